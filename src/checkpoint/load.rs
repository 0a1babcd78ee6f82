//! Finds a checkpoint and reads it into a model, checking everything before the first write.
//!
//! ```text
//! all ranks     every n-th file against the manifest's size and checksum
//!               the manifest's tensors and pieces against each other and against the model
//! all ranks     learn whether all was well
//! all ranks     what they hold, from the pieces that have some of it
//! all ranks     learn how that went
//! ```
//! How many ranks wrote it, and which had what, does not matter.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tessera_comm::Communicator;

use super::agree::{Meet, together};
use super::chain::open_bases;
use super::manifest::{Manifest, READ};
use super::{BEST, CheckpointTensors, LAST, MANIFEST, cold, cover};
use crate::config::Config;
use crate::safetensors_io::chunks;
use crate::tensors::{Block, WriteTensors};
use crate::{Error, Result};

/// A checkpoint on disk whose manifest has been read.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder, `.../step-N`.
    pub folder: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
    /// Those of the checkpoints beside it that it builds on, oldest first.
    pub(super) bases: Vec<Manifest>,
}

impl Checkpoint {
    /// Finds the checkpoint that `path` means: a `step-N` folder, or a run's folder, whose
    /// `checkpoints/last` names it.
    ///
    /// Errors: no checkpoint there, a manifest of another format or version, or, for an increment,
    /// a checkpoint that it builds on and that is missing or another.
    pub fn find(path: &Path) -> Result<Self> {
        if path.join(MANIFEST).is_file() {
            return Self::open(path.to_path_buf());
        }
        let checkpoints = path.join("checkpoints");
        match pointed(&checkpoints, LAST)? {
            Some(folder) => Self::open(folder),
            None => Err(Error::Usage(format!(
                "{} is neither a checkpoint (no {MANIFEST}) nor a run's folder (no checkpoints/{LAST})",
                path.display()
            ))),
        }
    }

    pub(super) fn open(folder: PathBuf) -> Result<Self> {
        let manifest = read_manifest(&folder)?;
        let bases = open_bases(&folder, &manifest)?;
        Ok(Self { folder, manifest, bases })
    }

    /// The configuration that its run had.
    ///
    /// Errors: one that this program does not accept.
    pub fn config(&self) -> Result<Config> {
        let base = std::path::absolute(&self.folder)
            .map_err(|source| Error::Read { path: self.folder.clone(), source })?;
        let manifest = self.folder.join(MANIFEST);
        Ok(Config::parse(&self.manifest.config, &manifest, base, &[])?.0)
    }

    /// Reads what `model` holds of all tensors. A collective.
    ///
    /// With `need_states` (to resume) every tensor of the model must be there with its own type;
    /// without (to evaluate), states are not needed and are not read.
    ///
    /// Errors, on all ranks: damage, by file, or [`Error::Mismatch`] listing every difference; no
    /// rank's model is written then. A read that fails later leaves the models written in part.
    pub fn load(
        &self,
        ranks: &Communicator,
        model: &mut dyn WriteTensors,
        need_states: bool,
    ) -> Result<()> {
        ranks.agree("checkpoint", &self.manifest.crc32.to_le_bytes()).wait()?;
        together(ranks, |meet| {
            self.check_pieces()?;
            self.verify(ranks.rank(), ranks.size(), meet)?;
            model.prepare(&CheckpointTensors::index(self)?, need_states)?;
            self.compare(model, need_states)
        })?;
        together(ranks, |meet| self.read(model, need_states, meet)).map(|_| ())
    }

    /// Holds the manifest's tensors against the model's.
    ///
    /// Errors: [`Error::Mismatch`] listing every difference.
    fn compare(&self, model: &dyn WriteTensors, need_states: bool) -> Result<()> {
        let there: BTreeMap<&str, (String, Vec<u64>)> = self
            .manifest
            .tensors
            .iter()
            .map(|entry| (entry.name.as_str(), (entry.dtype.clone(), entry.shape.clone())))
            .collect();
        let mut faults = Vec::new();
        for tensor in model.tensors() {
            if tensor.is_state && !need_states {
                continue;
            }
            let shape: Vec<u64> = tensor.shape.iter().map(|&n| n as u64).collect();
            match there.get(tensor.name.as_str()) {
                None => faults.push(format!("{} is missing", tensor.name)),
                Some((dtype, other)) if *dtype != tensor.dtype.to_string() || *other != shape => {
                    faults.push(format!(
                        "{} is {dtype} {other:?}, the model has {} {shape:?}",
                        tensor.name, tensor.dtype
                    ));
                }
                Some(_) => {}
            }
        }
        let known: Vec<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
        if need_states {
            for name in there.keys().filter(|name| !known.contains(*name)) {
                faults.push(format!("the model has no {name}"));
            }
        }
        mismatch(&self.folder, faults)
    }

    /// Checks that the pieces of each level make a whole, or increments of one.
    pub(super) fn check_pieces(&self) -> Result<()> {
        for level in self.levels() {
            let path = self.folder_of(level.moment.step).join(MANIFEST);
            cover::check(&path, level)?;
            level.cold.iter().try_for_each(|piece| cold::check(&path, piece))?;
        }
        Ok(())
    }

    /// Reads what `model` holds; all of it is there, as [`Self::load`] has checked.
    fn read(&self, model: &mut dyn WriteTensors, need_states: bool, meet: &mut Meet) -> Result<()> {
        let stored = CheckpointTensors::index(self)?;
        model.begin()?;
        for mut group in model.held_together() {
            group.retain(|held| need_states || !model.tensors()[held.tensor].is_state);
            let theirs: Vec<usize> = group
                .iter()
                .map(|held| stored.find(&model.tensors()[held.tensor].name))
                .collect::<Option<_>>()
                .expect("compared with the model");
            let Some(first) = group.first() else { continue };
            let row_bytes = group.iter().map(|held| model.tensors()[held.tensor].row_bytes()).sum();
            let mut bytes = vec![Vec::new(); group.len()];
            for rows in chunks(first.rows.clone(), row_bytes) {
                meet()?;
                let blocks: Vec<Block> =
                    group.iter().map(|held| held.with_rows(rows.clone())).collect();
                for ((block, &tensor), bytes) in blocks.iter().zip(&theirs).zip(&mut bytes) {
                    let block = Block { tensor, ..block.clone() };
                    stored.read_block_while(&block, bytes, meet)?;
                }
                model.write_blocks(&blocks, &bytes)?;
            }
        }
        Ok(())
    }
}

/// The manifest in `folder`.
pub(super) fn read_manifest(folder: &Path) -> Result<Manifest> {
    let path = folder.join(MANIFEST);
    let text = std::fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
    let bad = |reason: String| Error::BadFile { path: path.clone(), reason };
    let manifest: Manifest = serde_json::from_slice(&text)
        .map_err(|error| bad(format!("not a checkpoint's manifest: {error}")))?;
    if manifest.format != "tessera-checkpoint" || !READ.contains(&manifest.version) {
        return Err(bad(format!(
            "format {} version {}; this program reads tessera-checkpoint versions {} to {}",
            manifest.format,
            manifest.version,
            READ.start(),
            READ.end()
        )));
    }
    if !manifest.is_whole() {
        return Err(bad("its checksum is wrong: the file was changed or damaged".into()));
    }
    Ok(manifest)
}

/// The folder that the pointer file `name` names, if there is one.
pub fn pointed(checkpoints: &Path, name: &str) -> Result<Option<PathBuf>> {
    debug_assert!([LAST, BEST].contains(&name));
    let path = checkpoints.join(name);
    match std::fs::read_to_string(&path) {
        Ok(text) => Ok(Some(checkpoints.join(text.trim()))),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(Error::Read { path, source }),
    }
}

/// Refuses with every difference, if there is any.
pub(super) fn mismatch(path: &Path, faults: Vec<String>) -> Result<()> {
    if faults.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch { path: path.into(), reason: faults.join("; ") })
}
