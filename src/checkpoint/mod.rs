//! Checkpoints: one moment of a run on disk, written beside the old one and switched atomically.
//!
//! A checkpoint is a folder `step-N` with `manifest.json` and safetensors shards. Each rank writes
//! the blocks of logical tensors that it has, and reads those that it needs, whoever wrote them:
//! any number of ranks with any plan can load it. docs/formats.md has the layout.
//!
//! ```text
//! writing    write    the order of things, and what goes where
//!            shards   blocks of tensors as they are
//!            links    tables whose rows lie in a log: links to its files
//!            changes  increments: rows that were written since the checkpoint before
//! reading    load     finds and checks a checkpoint, and reads it into a model
//!            tensors  its tensors, block by block, from whatever has them
//!            cold     the part of them that lies in a log's files
//! both       manifest what manifest.json says; cover: that pieces make a whole
//!            chain    the checkpoints that an increment builds on
//! ```

mod agree;
mod chain;
mod changes;
mod cold;
mod cover;
mod files;
mod init;
mod links;
mod load;
mod manifest;
mod shards;
mod tensors;
mod verify;
mod write;

use std::path::Path;

pub use files::{Disk, Files, OutFile};
pub use init::init;
pub use load::{Checkpoint, pointed};
pub use manifest::{
    Best, ColdField, ColdPiece, Entry, First, Link, Listed, Manifest, Moment, Piece, Shard,
};
pub use tensors::CheckpointTensors;
pub use write::{Extent, Written, point, renew, write};

use crate::{Error, Result};

/// Name of the manifest in a checkpoint's folder.
pub const MANIFEST: &str = "manifest.json";
/// Pointer file: the newest checkpoint.
pub const LAST: &str = "last";
/// Pointer file: the checkpoint of the best evaluation.
pub const BEST: &str = "best";

/// Name of the folder of step `step`.
#[must_use]
pub fn step_dir(step: u64) -> String {
    format!("step-{step}")
}

/// Removes the pointer file `name`, if there is one. For one rank alone ([`crate::ranks::on_first`]).
///
/// Errors: a file that cannot be removed.
pub fn unpoint(folder: &Path, name: &str) -> Result<()> {
    let path = folder.join(name);
    match std::fs::remove_file(&path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::Write { path, source })
        }
        _ => Ok(()),
    }
}

/// Removes all but the newest `keep` checkpoints, the best one, and the one of step `now`, after
/// which nothing is newer: a folder of a later step is a leftover of a run that was resumed
/// before it. What a kept one builds on is kept too. Folders of checkpoints that a crash cut short
/// go. For one rank alone ([`crate::ranks::on_first`]).
///
/// Errors: a folder that cannot be listed or removed.
pub fn prune(
    files: &dyn Files,
    folder: &Path,
    now: u64,
    keep: usize,
    best: Option<u64>,
) -> Result<()> {
    let listing =
        std::fs::read_dir(folder).map_err(|source| Error::Read { path: folder.into(), source })?;
    let names: Vec<String> =
        listing.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    let mut steps: Vec<u64> =
        names.iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect();
    steps.sort_unstable_by_key(|&step| std::cmp::Reverse(step));
    let (later, ours): (Vec<u64>, Vec<u64>) = steps.into_iter().partition(|&step| step > now);
    let (newest, old) = ours.split_at(keep.max(1).min(ours.len()));
    let kept: Vec<u64> =
        newest.iter().copied().chain(best.filter(|best| ours.contains(best))).collect();
    // Where one cannot be read, whatever it may need stays.
    let needed = chain::needed(folder, &kept).unwrap_or_else(|| old.iter().copied().collect());
    let old = old.iter().copied().filter(|step| !needed.contains(step));
    // The newest first: nothing is left that builds on what is gone.
    let gone = later.into_iter().chain(old).filter(|&step| Some(step) != best).map(step_dir);
    let cut = names.into_iter().filter(|name| name.starts_with(".step-"));
    for name in gone.chain(cut) {
        let path = folder.join(name);
        files.remove_dir(&path).map_err(|source| Error::Write { path, source })?;
    }
    Ok(())
}
