//! Writes a checkpoint beside the old one, then switches.
//!
//! ```text
//! first rank    checkpoints/.step-N.part/       made anew
//! all ranks     links to the logs of tables that have one, each folder synced
//!               its shards, each synced         at the same time
//! all ranks     tell each other their shards, or why there are none
//! first rank    its manifest.json, synced
//!               rename to checkpoints/step-N/   (atomic)
//!               checkpoints/last: new file, synced, renamed over the old one (atomic)
//! all ranks     learn how that went
//! ```
//! A crash or a failed write of any rank at any point leaves `last` naming a whole checkpoint.

use std::collections::HashSet;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tessera_comm::Communicator;

use super::agree::{Meet, together};
use super::changes::write_changes;
use super::files::Files;
use super::links::{Linked, Place, on_one_device, write_links};
use super::manifest::{ColdPiece, Entry, Manifest, Moment, Shard, VERSION};
use super::shards::write_shards;
use super::{Checkpoint, LAST, MANIFEST, cover, step_dir};
use crate::config::ColdFormat;
use crate::ranks::agreed;
use crate::tensors::{Block, ReadTensors, TablePart, Tensor};
use crate::{Error, Result};

/// What was written.
#[derive(Clone, Copy, Debug, Default)]
pub struct Written {
    /// Bytes of all files of all ranks but those that were linked.
    pub bytes: u64,
    /// Bytes of files that were linked.
    pub linked_bytes: u64,
    /// Whether it holds what changed since the one before.
    pub is_increment: bool,
}

/// What a checkpoint is to hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// How rows in logs are kept.
    pub cold: ColdFormat,
    /// The checkpoint in the same folder after which the model notes its changes: only they are
    /// written. One that is no longer there, or not whole, is as none.
    pub base: Option<u64>,
}

impl Extent {
    /// Everything, rows as rows.
    pub const ROWS: Self = Self { cold: ColdFormat::Rows, base: None };
}

/// What one rank wrote.
#[derive(Default, Serialize, Deserialize)]
struct OfRank {
    shards: Vec<Shard>,
    cold: Vec<ColdPiece>,
    linked_bytes: u64,
    copied_bytes: u64,
}

/// Writes the model at `moment` to `folder/step-N` and points `last` at it. A collective; all
/// ranks must see the same `folder`, and `moment` and `config` are the first rank's. Tables whose
/// logs are linked have written down what they had in memory only.
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
    extent: Extent,
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
    let base = usable(ranks, folder, extent.base)?;
    let place = Place { files, folder: &part, step: moment.step, rank: ranks.rank() };
    let base_manifest = base.as_ref().map(|base| &base.manifest);
    let of_ranks =
        together(ranks, |meet| write_own(&place, model, extent.cold, base_manifest, meet))?;
    let mut written = Written { is_increment: base.is_some(), ..Written::default() };
    let (mut shards, mut cold) = (Vec::new(), Vec::new());
    for of_rank in of_ranks {
        written.bytes += of_rank.copied_bytes;
        written.bytes += of_rank.shards.iter().map(|shard| shard.bytes).sum::<u64>();
        written.linked_bytes += of_rank.linked_bytes;
        shards.extend(of_rank.shards);
        cold.extend(of_rank.cold);
    }
    let switched = if first {
        let manifest = Manifest {
            format: "tessera-checkpoint".into(),
            version: VERSION,
            moment: moment.clone(),
            config: config.to_string(),
            tensors: model.tensors().iter().map(entry).collect(),
            shards,
            cold,
            chain: base.as_ref().map(Checkpoint::chain).unwrap_or_default(),
            crc32: 0,
        };
        switch(files, folder, &part, manifest)
    } else {
        Ok(0)
    };
    written.bytes += agreed(ranks, switched)?.iter().sum::<u64>();
    Ok(written)
}

/// The checkpoint of step `base`, if all ranks find it and all that it builds on. A collective.
fn usable(ranks: &Communicator, folder: &Path, base: Option<u64>) -> Result<Option<Checkpoint>> {
    let Some(step) = base else { return Ok(None) };
    let opened = Checkpoint::open(folder.join(step_dir(step))).ok();
    let everywhere = agreed(ranks, Ok(opened.is_some()))?;
    Ok(opened.filter(|_| everywhere.iter().all(|&here| here)))
}

/// Writes what this rank has: links to logs, rows that changed, blocks as they are.
fn write_own(
    place: &Place<'_>,
    model: &dyn ReadTensors,
    format: ColdFormat,
    base: Option<&Manifest>,
    meet: &mut Meet,
) -> Result<OfRank> {
    let is_linked = |part: &TablePart| match (format, &part.cold) {
        (ColdFormat::Rows, _) | (_, None) => false,
        (ColdFormat::Links, Some(_)) => true,
        (ColdFormat::Auto, Some(cold)) => on_one_device(cold, place.folder),
    };
    let (linked, parts): (Vec<_>, Vec<_>) = model.parts().into_iter().partition(is_linked);
    let mut changes = Vec::new();
    if base.is_some() {
        for part in parts {
            if let Some(rows) = model.changed(&part)? {
                changes.push((part, rows));
            }
        }
    }
    // Whatever is left, such as dense parameters, is written as it is.
    let elsewhere: HashSet<(usize, usize, usize)> = linked
        .iter()
        .chain(changes.iter().map(|(part, _)| part))
        .flat_map(|part| &part.fields)
        .map(|field| corner(&field.block))
        .collect();
    let mut blocks = model.blocks();
    blocks.retain(|block| !elsewhere.contains(&corner(block)));
    let (files, folder, rank) = (place.files, place.folder, place.rank);
    let Linked { pieces, linked_bytes, copied_bytes } =
        write_links(place, model, &linked, base, meet)?;
    let mut shards = write_shards(files, folder, rank, model, &blocks, meet)?;
    shards.extend(write_changes(files, folder, rank, model, &changes, meet)?);
    Ok(OfRank { shards, cold: pieces, linked_bytes, copied_bytes })
}

/// What tells a block of those that a rank saves: they do not overlap.
fn corner(block: &Block) -> (usize, usize, usize) {
    (block.tensor, block.rows.start, block.columns.start)
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
