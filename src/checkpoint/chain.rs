//! Checkpoints that others build on: an increment names each of them, and is nothing without them.

use std::collections::BTreeSet;
use std::path::Path;

use super::manifest::{ColdPiece, Link, Manifest};
use super::{Checkpoint, MANIFEST, step_dir};
use crate::{Error, Result};

impl Checkpoint {
    /// The folder of step `step`, which is this checkpoint or one that it builds on.
    pub(super) fn folder_of(&self, step: u64) -> std::path::PathBuf {
        if step == self.manifest.moment.step {
            return self.folder.clone();
        }
        beside(&self.folder, step)
    }

    /// The manifests of this checkpoint's chain, oldest first, its own last.
    pub(super) fn levels(&self) -> impl Iterator<Item = &Manifest> {
        self.bases.iter().chain(std::iter::once(&self.manifest))
    }

    /// The pieces in logs that count: those of the newest level that has some of their rows.
    pub(super) fn cold_pieces(&self) -> Vec<&ColdPiece> {
        let levels: Vec<&Manifest> = self.levels().collect();
        let mut pieces: Vec<&ColdPiece> = Vec::new();
        for level in levels.iter().rev() {
            let newer = pieces.clone();
            let is_inside = |inner: &ColdPiece, outer: &ColdPiece| {
                inner.fields == outer.fields
                    && outer.first_row <= inner.first_row
                    && inner.first_row + inner.rows <= outer.first_row + outer.rows
            };
            let counts = |piece: &&ColdPiece| !newer.iter().any(|outer| is_inside(piece, outer));
            pieces.extend(level.cold.iter().filter(counts));
        }
        pieces.reverse();
        pieces
    }

    /// As the last one of a chain to come.
    pub(super) fn chain(&self) -> Vec<Link> {
        let link = Link { step: self.manifest.moment.step, identity: self.manifest.identity() };
        self.manifest.chain.iter().cloned().chain([link]).collect()
    }
}

/// Opens the checkpoints that the one in `folder` with `manifest` builds on.
///
/// Errors: [`Error::BadFile`] for the manifest, which names the first that is missing, damaged or
/// another one than it was written after.
pub(super) fn open_bases(folder: &Path, manifest: &Manifest) -> Result<Vec<Manifest>> {
    let mut bases: Vec<Manifest> = Vec::with_capacity(manifest.chain.len());
    for (place, Link { step, identity }) in manifest.chain.iter().enumerate() {
        let there = beside(folder, *step);
        let bad = |reason: String| Error::BadFile {
            path: folder.join(MANIFEST),
            reason: format!(
                "it holds what changed since checkpoint {}, {reason}; put {} back as it was, or \
                 use a checkpoint that does not build on it",
                step_dir(*step),
                there.display()
            ),
        };
        if !there.join(MANIFEST).is_file() {
            return Err(bad("which is missing".into()));
        }
        let base = super::load::read_manifest(&there).map_err(|error| match error {
            Error::BadFile { reason, .. } => bad(format!("whose manifest is damaged: {reason}")),
            other => other,
        })?;
        if base.identity() != *identity {
            return Err(bad("and the one there is another".into()));
        }
        if base.chain != manifest.chain[..place] {
            return Err(bad("which builds on others".into()));
        }
        if base.tensors != manifest.tensors {
            return Err(bad("which has other tensors".into()));
        }
        bases.push(base);
    }
    Ok(bases)
}

/// The folder of step `step` beside a checkpoint's.
fn beside(folder: &Path, step: u64) -> std::path::PathBuf {
    let folder = std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf());
    folder.parent().unwrap_or(&folder).join(step_dir(step))
}

/// Steps in `folder` that the checkpoints of `steps` build on; `None` if that of one cannot be
/// known.
pub(super) fn needed(folder: &Path, steps: &[u64]) -> Option<BTreeSet<u64>> {
    let mut needed = BTreeSet::new();
    for &step in steps {
        let manifest = super::load::read_manifest(&folder.join(step_dir(step))).ok()?;
        needed.extend(manifest.chain.iter().map(|link| link.step));
    }
    Some(needed)
}
