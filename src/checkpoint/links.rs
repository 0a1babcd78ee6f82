//! Tables whose rows lie in a log: a checkpoint has links to its sealed segment files.
//!
//! A sealed file never changes, and the log deletes names, never bytes: what it and its compaction
//! do later does not reach a checkpoint. An increment has only the files that the checkpoint before
//! it does not have.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use tessera_cache::log::SegmentFile;
use tessera_embedding::Init;

use super::Manifest;
use super::agree::Meet;
use super::files::Files;
use super::manifest::{ColdField, ColdPiece, First};
use crate::tensors::{ColdPart, ReadTensors, TablePart};
use crate::{Error, Result};

/// Where files of a checkpoint in the making go.
pub(super) struct Place<'a> {
    pub files: &'a dyn Files,
    /// The folder.
    pub folder: &'a Path,
    /// The checkpoint's step.
    pub step: u64,
    /// The rank that writes.
    pub rank: usize,
}

/// What was done.
#[derive(Default)]
pub(super) struct Linked {
    pub pieces: Vec<ColdPiece>,
    /// Bytes of files that were linked.
    pub linked_bytes: u64,
    /// Bytes of files that had to be copied.
    pub copied_bytes: u64,
}

/// Links the logs of `parts`, which all have one. With `base` only what that checkpoint lacks.
///
/// Errors: any failed operation, with its path; a log that cannot be sealed.
pub(super) fn write_links(
    place: &Place<'_>,
    model: &dyn ReadTensors,
    parts: &[TablePart],
    base: Option<&Manifest>,
    meet: &mut Meet,
) -> Result<Linked> {
    let mut linked = Linked::default();
    for (number, part) in parts.iter().enumerate() {
        let Some(cold) = &part.cold else { continue };
        let folder = format!("cold-{:05}-{number:05}", place.rank);
        let piece = link_part(place, model, part, cold, folder, base, &mut linked, meet)?;
        linked.pieces.push(piece);
    }
    Ok(linked)
}

#[allow(clippy::too_many_arguments)] // all of one part's
fn link_part(
    place: &Place<'_>,
    model: &dyn ReadTensors,
    part: &TablePart,
    cold: &ColdPart,
    name: String,
    base: Option<&Manifest>,
    linked: &mut Linked,
    meet: &mut Meet,
) -> Result<ColdPiece> {
    let fields: Vec<ColdField> = part
        .fields
        .iter()
        .map(|field| ColdField {
            tensor: model.tensors()[field.block.tensor].name.clone(),
            plane: field.plane,
            at: field.at as u64,
            first_column: field.block.columns.start as u64,
            columns: field.block.columns.len() as u64,
        })
        .collect();
    let (first_row, rows) = (part.rows.start as u64, part.rows.len() as u64);
    // The same process wrote it, so that it is of the same log.
    let before = base.and_then(|base| {
        let same = |piece: &&ColdPiece| {
            piece.folder == name
                && (piece.first_row, piece.rows) == (first_row, rows)
                && piece.fields == fields
        };
        base.cold.iter().find(same)
    });
    let folder = place.folder.join(&name);
    let mut made = false;
    let snapshot = cold.log.snapshot_by(before.map(|piece| &piece.snapshot), |file, path| {
        meet()?;
        if !made {
            let wrote = |source| Error::Write { path: folder.clone(), source };
            place.files.create_dir(&folder).map_err(wrote)?;
            made = true;
        }
        match keep(place.files, path, &folder.join(&file.name))? {
            Kept::Linked => linked.linked_bytes += file.bytes,
            Kept::Copied => linked.copied_bytes += file.bytes,
        }
        Ok::<(), Error>(())
    })?;
    if made {
        let wrote = |source| Error::Write { path: folder.clone(), source };
        place.files.sync_dir(&folder).map_err(wrote)?;
    }
    let lies = |file: &SegmentFile| {
        let known = before.and_then(|piece| {
            let at = piece.snapshot.files.iter().position(|other| other == file)?;
            piece.steps.get(at).copied()
        });
        known.unwrap_or(place.step)
    };
    let steps = snapshot.files.iter().map(lies).collect();
    let first = (cold.init != Init::Zero).then(|| First {
        table: cold.table.clone(),
        seed: cold.seed,
        init: cold.init,
    });
    Ok(ColdPiece { folder: name, first_row, rows, fields, first, snapshot, steps })
}

enum Kept {
    Linked,
    Copied,
}

/// Links a file, or copies it where links are impossible.
fn keep(files: &dyn Files, from: &Path, to: &Path) -> Result<Kept> {
    use io::ErrorKind::{CrossesDevices, PermissionDenied, TooManyLinks, Unsupported};
    let wrote = |source| Error::Write { path: to.into(), source };
    match files.link(from, to) {
        Ok(()) => return Ok(Kept::Linked),
        Err(error)
            if [CrossesDevices, PermissionDenied, TooManyLinks, Unsupported]
                .contains(&error.kind()) => {}
        Err(source) => return Err(wrote(source)),
    }
    let unreadable = |source| Error::Read { path: from.into(), source };
    let mut source = File::open(from).map_err(unreadable)?;
    let mut target = files.create(to).map_err(wrote)?;
    let mut buffer = vec![0; 1 << 20];
    loop {
        match source.read(&mut buffer).map_err(unreadable)? {
            0 => break,
            bytes => target.write_all(&buffer[..bytes]).map_err(wrote)?,
        }
    }
    target.sync().map_err(wrote)?;
    Ok(Kept::Copied)
}

/// Whether files of a log could be linked into `folder`: both lie in one file system.
pub(super) fn on_one_device(cold: &ColdPart, folder: &Path) -> bool {
    let device = |path: &Path| std::fs::metadata(path).map(|data| data.dev()).ok();
    let log = device(cold.log.dir());
    log.is_some() && log == device(folder)
}
