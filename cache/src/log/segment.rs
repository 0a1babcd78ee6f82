//! One segment file: its names, what its seal says, and reading it from front to back.

use std::path::{Path, PathBuf};

use super::files::{Files, LogFile, read_exact};
use super::format::{Geometry, Header, Origin, PAGE, Record, decode, id_of};
use super::read::Source;
use crate::{CacheError, Result};

/// Ending of a file that is being made.
const UNFINISHED: &str = ".tmp";
const SEGMENT: &str = ".seg";
/// Bytes read at once from front to back.
const CHUNK: u64 = 1 << 20;

/// A segment whose records can be read.
#[derive(Debug)]
pub(crate) struct Segment {
    pub header: Header,
    pub path: PathBuf,
    pub seed: u32,
    pub source: Source,
}

/// What the last record of a sealed segment says, and what follows from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seal {
    /// Records before the seal.
    pub records: u64,
    /// Bytes of the file.
    pub bytes: u64,
    /// Checksum of the records' checksums.
    pub content: u32,
    /// Largest version of a record; 0 for none.
    pub last_version: u64,
}

/// Place of a segment in the order in which a row's newest record comes last.
pub(crate) fn order(header: &Header) -> (u64, Origin, u32) {
    (header.base, header.origin, header.number)
}

pub(crate) fn file_name(number: u32) -> String {
    format!("{number:010}{SEGMENT}")
}

pub(crate) fn unfinished_name(number: u32) -> String {
    format!("{number:010}{UNFINISHED}")
}

/// The number in a segment's file name.
pub(crate) fn number_of(name: &str) -> Option<u32> {
    let number = name.strip_suffix(SEGMENT)?.parse().ok()?;
    (file_name(number) == name).then_some(number)
}

/// Whether a crash left it: nothing of such a file was ever relied on.
pub(crate) fn is_unfinished(name: &str) -> bool {
    let number = name.strip_suffix(UNFINISHED).and_then(|number| number.parse().ok());
    number.is_some_and(|number| unfinished_name(number) == name)
}

/// Wraps what the system said.
pub(crate) fn failed(
    operation: &'static str,
    path: &Path,
) -> impl FnOnce(std::io::Error) -> CacheError {
    let path = path.to_owned();
    move |source| CacheError::File { operation, path, source }
}

/// Makes a segment file with its header under its unfinished name. Nothing of it is synced.
pub(crate) fn create(
    files: &dyn Files,
    dir: &Path,
    geometry: &Geometry,
    header: &Header,
) -> Result<(PathBuf, Box<dyn LogFile>)> {
    let path = dir.join(unfinished_name(header.number));
    let file = files.create(&path).map_err(failed("create", &path))?;
    super::files::write_all(&*file, &header.encode(geometry), 0).map_err(failed("write", &path))?;
    Ok((path, file))
}

/// Gives a segment file, synced by the caller, its final name; its name outlives a crash.
pub(crate) fn publish(
    files: &dyn Files,
    dir: &Path,
    unfinished: &Path,
    number: u32,
) -> Result<PathBuf> {
    let path = dir.join(file_name(number));
    files.rename(unfinished, &path).map_err(failed("rename", unfinished))?;
    files.sync_dir(dir).map_err(failed("sync", dir))?;
    Ok(path)
}

/// Calls `visit` with number, bytes and fields of records 0..slots in order, a chunk's records at
/// a time; fields are `None` where the checksum does not hold. Gives the bytes read.
pub(crate) fn scan(
    file: &dyn LogFile,
    path: &Path,
    geometry: &Geometry,
    seed: u32,
    slots: u64,
    mut visit: impl FnMut(&[Scanned<'_>]) -> Result<()>,
) -> Result<u64> {
    let record = geometry.record_bytes;
    let at_once = match geometry.per_page {
        0 => (CHUNK / record as u64).max(1),
        per_page => CHUNK / PAGE * per_page,
    };
    let mut bytes = Vec::new();
    let mut read = 0;
    let mut first = 0;
    while first < slots {
        let last = (first + at_once).min(slots);
        let start = geometry.offset(first);
        bytes.resize((geometry.end(last) - start) as usize, 0);
        read_exact(file, &mut bytes, start).map_err(failed("read", path))?;
        read += bytes.len() as u64;
        let scanned: Vec<Scanned<'_>> = (first..last)
            .map(|slot| {
                let at = (geometry.offset(slot) - start) as usize;
                let bytes = &bytes[at..at + record];
                Scanned { slot, bytes, record: decode(bytes, seed, slot) }
            })
            .collect();
        visit(&scanned)?;
        first = last;
    }
    Ok(read)
}

/// A record met by [`scan`].
#[derive(Debug)]
pub(crate) struct Scanned<'a> {
    pub slot: u64,
    pub bytes: &'a [u8],
    pub record: Option<Record>,
}

impl Scanned<'_> {
    /// The error that names this record.
    pub fn damaged(&self, path: &Path, geometry: &Geometry, fault: &str) -> CacheError {
        CacheError::Damaged {
            path: path.to_owned(),
            offset: geometry.offset(self.slot),
            id: id_of(self.bytes),
            fault: fault.to_owned(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_numbers_and_no_others() {
        assert_eq!(number_of(&file_name(7)), Some(7));
        assert_eq!(number_of(&file_name(u32::MAX)), Some(u32::MAX));
        for name in ["7.seg", "0000000007.tmp", "+000000007.seg", "lock", "4294967296.seg"] {
            assert_eq!(number_of(name), None, "{name}");
        }
        assert!(is_unfinished(&unfinished_name(3)));
        assert!(!is_unfinished("notes.tmp") && !is_unfinished(&file_name(3)));
    }
}
