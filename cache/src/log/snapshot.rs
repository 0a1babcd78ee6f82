//! Snapshots: the segments of one moment, linked into another directory, and a list of them.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::files::{Files, LogFile, read_exact, write_all};
use super::format::Header;
use super::inner::{Inner, lock, read};
use super::segment::{Seal, failed, file_name, number_of, order};
use super::state::State;
use crate::{CacheError, Result};

/// A sealed segment file as it was at a snapshot. Files of equal entries have equal bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentFile {
    /// Name in its directory.
    pub name: String,
    /// Bytes of the file.
    pub bytes: u64,
    /// Records before its seal.
    pub records: u64,
    /// Checksum of the records' checksums, as the seal has it.
    pub checksum: u32,
    /// The segment's place in replay order.
    pub base_version: u64,
    /// Largest version of a record.
    pub last_version: u64,
}

/// What a log held at one moment: which files, in replay order. Serialised by whoever keeps it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// The table's tag.
    pub tag: u64,
    /// Bytes of weights a row.
    pub weight_bytes: u64,
    /// Bytes of state a row.
    pub state_bytes: u64,
    /// Rows held.
    pub rows: u64,
    /// All the files, those that another snapshot has too included.
    pub files: Vec<SegmentFile>,
}

impl Snapshot {
    /// The files that `base` does not have: what an increment over it must hold.
    pub fn files_since<'a>(&'a self, base: &'a Snapshot) -> impl Iterator<Item = &'a SegmentFile> {
        self.files.iter().filter(|file| !base.files.contains(file))
    }

    /// The files that `base` has too.
    pub fn files_shared<'a>(&'a self, base: &'a Snapshot) -> impl Iterator<Item = &'a SegmentFile> {
        self.files.iter().filter(|file| base.files.contains(file))
    }

    /// The first file that `state`'s segments do not have, or have otherwise.
    pub(crate) fn verify(&self, state: &State) -> Result<()> {
        for file in &self.files {
            let held = number_of(&file.name).and_then(|number| state.held.get(&number));
            let held = held.ok_or_else(|| fault(&file.name, "it is not among the segments"))?;
            if entry(&held.segment.header, &held.seal) != *file {
                return Err(fault(&file.name, "it is not the file that the snapshot lists"));
            }
        }
        if state.rows != self.rows || state.held.len() != self.files.len() {
            let words = format!(
                "{} rows in {} files, {} rows in {} files are listed",
                state.rows,
                state.held.len(),
                self.rows,
                self.files.len()
            );
            return Err(fault("all files", &words));
        }
        Ok(())
    }
}

pub(crate) fn fault(file: &str, fault: &str) -> CacheError {
    CacheError::Snapshot { file: file.to_owned(), fault: fault.to_owned() }
}

/// What a snapshot says of a sealed segment.
pub(crate) fn entry(header: &Header, seal: &Seal) -> SegmentFile {
    SegmentFile {
        name: file_name(header.number),
        bytes: seal.bytes,
        records: seal.records,
        checksum: seal.content,
        base_version: header.base,
        last_version: seal.last_version,
    }
}

/// Seals what is open and hands each segment that `base` lacks to `keep`, with its path.
pub(crate) fn snapshot_by<E: From<CacheError>>(
    inner: &Inner,
    base: Option<&Snapshot>,
    mut keep: impl FnMut(&SegmentFile, &Path) -> std::result::Result<(), E>,
) -> std::result::Result<Snapshot, E> {
    // While they are linked no file is deleted.
    let _still = lock(&inner.deleting);
    let snapshot = inner.change("snapshot", |writer| {
        writer.seal(inner)?;
        let state = read(&inner.state);
        let mut segments: Vec<_> = state.held.values().collect();
        segments.sort_by_key(|held| order(&held.segment.header));
        Ok(Snapshot {
            tag: inner.tag,
            weight_bytes: inner.geometry.layout.weight_bytes as u64,
            state_bytes: inner.geometry.layout.state_bytes as u64,
            rows: state.rows,
            files: segments.iter().map(|held| entry(&held.segment.header, &held.seal)).collect(),
        })
    })?;
    for file in &snapshot.files {
        if base.is_none_or(|base| !base.files.contains(file)) {
            keep(file, &inner.dir.join(&file.name))?;
        }
    }
    Ok(snapshot)
}

/// [`snapshot_by`] that links the segments into a directory.
pub(crate) fn snapshot(inner: &Inner, into: &Path, base: Option<&Snapshot>) -> Result<Snapshot> {
    let files = &*inner.files;
    files.create_dir(into).map_err(failed("create", into))?;
    let link = |file: &SegmentFile, path: &Path| {
        link_or_copy(files, path, &into.join(&file.name), file.bytes)
    };
    let snapshot: Snapshot = snapshot_by::<CacheError>(inner, base, link)?;
    files.sync_dir(into).map_err(failed("sync", into))?;
    Ok(snapshot)
}

/// Fills a directory without segments with a snapshot's files from the first of `from` that has
/// each.
pub(crate) fn gather(
    files: &dyn Files,
    from: &[&Path],
    snapshot: &Snapshot,
    into: &Path,
) -> Result<()> {
    files.create_dir(into).map_err(failed("create", into))?;
    let there = files.list(into).map_err(failed("list", into))?;
    if let Some(name) = there.iter().find(|name| number_of(name).is_some()) {
        let words = format!("{} holds segments already; give an empty directory", into.display());
        return Err(fault(name, &words));
    }
    for file in &snapshot.files {
        if number_of(&file.name).is_none() {
            return Err(fault(&file.name, "it is no name of a segment file"));
        }
        let mut found = false;
        for dir in from {
            match link_or_copy(files, &dir.join(&file.name), &into.join(&file.name), file.bytes) {
                Ok(()) => found = true,
                Err(CacheError::File { source, .. })
                    if source.kind() == std::io::ErrorKind::NotFound =>
                {
                    continue;
                }
                Err(error) => return Err(error),
            }
            break;
        }
        if !found {
            let dirs: Vec<String> = from.iter().map(|dir| dir.display().to_string()).collect();
            let words = format!("it is missing in {}", dirs.join(", "));
            return Err(fault(&file.name, &words));
        }
    }
    files.sync_dir(into).map_err(failed("sync", into))
}

fn link_or_copy(files: &dyn Files, from: &Path, to: &Path, bytes: u64) -> Result<()> {
    match files.link(from, to) {
        Ok(()) => Ok(()),
        Err(error)
            if matches!(
                error.kind(),
                std::io::ErrorKind::CrossesDevices
                    | std::io::ErrorKind::Unsupported
                    | std::io::ErrorKind::PermissionDenied
                    | std::io::ErrorKind::TooManyLinks
            ) =>
        {
            let source = files.open(from).map_err(failed("open", from))?;
            let target = files.create(to).map_err(failed("create", to))?;
            copy(&*source, &*target, from, to, bytes)
        }
        Err(error) => Err(failed("link", from)(error)),
    }
}

fn copy(
    source: &dyn LogFile,
    target: &dyn LogFile,
    from: &Path,
    to: &Path,
    bytes: u64,
) -> Result<()> {
    let mut buffer = vec![0; 1 << 20];
    let mut done = 0;
    while done < bytes {
        let count = (bytes - done).min(buffer.len() as u64);
        let part = &mut buffer[..count as usize];
        read_exact(source, part, done).map_err(failed("read", from))?;
        write_all(target, part, done).map_err(failed("write", to))?;
        done += count;
    }
    target.sync().map_err(failed("sync", to))
}
