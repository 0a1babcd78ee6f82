//! Writes a checkpoint beside the old one, then switches.
//!
//! ```text
//! first rank    checkpoints/.step-N.part/       made anew
//! all ranks     its shards, each synced         at the same time
//! all ranks     tell each other their shards, or why there are none
//! first rank    its manifest.json, synced
//!               rename to checkpoints/step-N/   (atomic)
//!               checkpoints/last: new file, synced, renamed over the old one (atomic)
//! all ranks     learn how that went
//! ```
//! A crash or a failed write of any rank at any point leaves `last` naming a whole checkpoint.

use std::io;
use std::path::Path;

use tessera_comm::Communicator;

use super::agree::together;
use super::files::Files;
use super::manifest::{Entry, Manifest, Moment, Shard, VERSION};
use super::shards::write_shards;
use super::{Checkpoint, LAST, MANIFEST, cover, step_dir};
use crate::ranks::agreed;
use crate::tensors::{ReadTensors, Tensor};
use crate::{Error, Result};

/// What was written.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Bytes of all files of all ranks.
    pub bytes: u64,
}

/// Writes the model at `moment` to `folder/step-N` and points `last` at it. A collective; all
/// ranks must see the same `folder`, and `moment` and `config` are the first rank's.
///
/// Errors: any failed operation of any rank, with its path, on all ranks; the checkpoints that
/// were there stay whole.
pub fn write(
    files: &dyn Files,
    ranks: &Communicator,
    folder: &Path,
    model: &dyn ReadTensors,
    moment: &Moment,
    config: &toml::Table,
) -> Result<Written> {
    let first = ranks.rank() == 0;
    let part = folder.join(format!(".{}.part", step_dir(moment.step)));
    let wrote = |source| Error::Write { path: part.clone(), source };
    let made = if first {
        files.remove_dir(&part).and_then(|()| files.create_dir(&part)).map_err(wrote)
    } else {
        Ok(())
    };
    agreed(ranks, made)?;
    let shards = together(ranks, |meet| write_shards(files, &part, ranks.rank(), model, meet))?;
    let shards: Vec<Shard> = shards.into_iter().flatten().collect();
    let bytes: u64 = shards.iter().map(|shard| shard.bytes).sum();
    let switched = if first {
        let manifest = Manifest {
            format: "tessera-checkpoint".into(),
            version: VERSION,
            moment: moment.clone(),
            config: config.to_string(),
            tensors: model.tensors().iter().map(entry).collect(),
            shards,
            crc32: 0,
        };
        switch(files, folder, &part, manifest)
    } else {
        Ok(0)
    };
    let manifest_bytes: u64 = agreed(ranks, switched)?.iter().sum();
    Ok(Written { bytes: bytes + manifest_bytes })
}

/// Completes the folder `part` and makes it the last checkpoint; gives the bytes of its manifest.
fn switch(files: &dyn Files, folder: &Path, part: &Path, manifest: Manifest) -> Result<u64> {
    let wrote = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Write { path, source }
    };
    let path = part.join(MANIFEST);
    // What could not be loaded is not written: no rank's blocks may be missing or in the way.
    cover::check(&path, &manifest)?;
    let (manifest, text) = manifest.seal();
    write_file(files, &path, &text).map_err(wrote(&path))?;
    files.sync_dir(part).map_err(wrote(part))?;

    let step = manifest.moment.step;
    let target = folder.join(step_dir(step));
    // A folder of this step can only be a leftover of a run that was resumed before it.
    files.remove_dir(&target).map_err(wrote(&target))?;
    files.rename(part, &target).map_err(wrote(&target))?;
    files.sync_dir(folder).map_err(wrote(folder))?;
    point(files, folder, LAST, step)?;
    Ok(text.len() as u64)
}

/// Replaces the moment of checkpoint `folder/step-N`, which holds the model of that step already.
///
/// An evaluation changes the moment (what is best so far) and no tensor, so that only the manifest
/// is written again, and switched atomically: the checkpoint may be the one that `last` names.
/// For one rank alone ([`crate::ranks::on_first`]).
///
/// Errors: a manifest that cannot be read, or any failed operation; the old one then stands.
pub fn renew(files: &dyn Files, folder: &Path, moment: &Moment) -> Result<()> {
    let target = folder.join(step_dir(moment.step));
    let manifest = Checkpoint::open(target.clone())?.manifest;
    let (_, text) = Manifest { moment: moment.clone(), ..manifest }.seal();
    let part = target.join(format!(".{MANIFEST}.part"));
    let path = target.join(MANIFEST);
    write_file(files, &part, &text)
        .and_then(|()| files.rename(&part, &path))
        .and_then(|()| files.sync_dir(&target))
        .map_err(|source| Error::Write { path, source })
}

/// Makes the pointer file `name` (such as `last`) hold the name of step `step`'s folder. For one
/// rank alone ([`crate::ranks::on_first`]).
///
/// Errors: any failed operation, with its path; the old pointer then stands.
pub fn point(files: &dyn Files, folder: &Path, name: &str, step: u64) -> Result<()> {
    let path = folder.join(name);
    let part = folder.join(format!(".{name}.part"));
    let text = format!("{}\n", step_dir(step));
    write_file(files, &part, text.as_bytes())
        .and_then(|()| files.rename(&part, &path))
        .and_then(|()| files.sync_dir(folder))
        .map_err(|source| Error::Write { path, source })
}

fn write_file(files: &dyn Files, path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = files.create(path)?;
    file.write_all(bytes)?;
    file.sync()
}

fn entry(tensor: &Tensor) -> Entry {
    Entry {
        name: tensor.name.clone(),
        dtype: tensor.dtype.to_string(),
        shape: tensor.shape.iter().map(|&n| n as u64).collect(),
    }
}
