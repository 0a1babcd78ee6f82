//! Reads a checkpoint or a weights file into a model, checking everything before the first write.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use super::manifest::{Manifest, VERSION};
use super::{BEST, LAST, MANIFEST};
use crate::safetensors_io::MappedFile;
use crate::tensors::{Dtype, Tensor, WriteTensors, convert, element_bytes};
use crate::{Error, Result};

/// A checkpoint on disk whose manifest has been read.
#[derive(Debug)]
pub struct Checkpoint {
    /// Its folder, `.../step-N`.
    pub folder: PathBuf,
    /// Its manifest.
    pub manifest: Manifest,
}

impl Checkpoint {
    /// Finds the checkpoint that `path` means: a `step-N` folder, or a run's folder, whose
    /// `checkpoints/last` names it.
    ///
    /// Errors: no checkpoint there, or a manifest of another format or version.
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

    fn open(folder: PathBuf) -> Result<Self> {
        let path = folder.join(MANIFEST);
        let text =
            std::fs::read(&path).map_err(|source| Error::Read { path: path.clone(), source })?;
        let bad = |reason: String| Error::BadFile { path: path.clone(), reason };
        let manifest: Manifest = serde_json::from_slice(&text)
            .map_err(|error| bad(format!("not a checkpoint's manifest: {error}")))?;
        if manifest.format != "tessera-checkpoint" || manifest.version != VERSION {
            return Err(bad(format!(
                "format {} version {}; this program reads tessera-checkpoint version {VERSION}",
                manifest.format, manifest.version
            )));
        }
        Ok(Self { folder, manifest })
    }

    /// Maps all shards and holds them against the manifest's sizes and checksums, and every
    /// tensor's pieces against its row count.
    ///
    /// Errors: a file that is missing, cut, changed, or lacks rows, by name.
    pub fn verify(&self) -> Result<Verified> {
        let mut files = Vec::new();
        for shard in &self.manifest.shards {
            let path = self.folder.join(&shard.file);
            let file = MappedFile::open(&path)?;
            let bad = |reason: String| Error::BadFile { path: path.clone(), reason };
            let bytes = file.bytes().len() as u64;
            if bytes != shard.bytes {
                return Err(bad(format!("{bytes} bytes, the manifest says {}", shard.bytes)));
            }
            let crc32 = crc32fast::hash(file.bytes());
            if crc32 != shard.crc32 {
                return Err(bad(format!(
                    "checksum {crc32:08x}, the manifest says {:08x}: the file was changed or damaged",
                    shard.crc32
                )));
            }
            files.push(file);
        }
        self.cover()?;
        Ok(Verified { files })
    }

    /// Every row of every tensor is in exactly one piece.
    fn cover(&self) -> Result<()> {
        let mut pieces: HashMap<&str, Vec<(u64, u64)>> = HashMap::new();
        for piece in self.manifest.shards.iter().flat_map(|shard| &shard.pieces) {
            pieces.entry(&piece.tensor).or_default().push((piece.first_row, piece.rows));
        }
        for tensor in &self.manifest.tensors {
            let mut rows = pieces.remove(tensor.name.as_str()).unwrap_or_default();
            rows.sort_unstable();
            let mut next = 0;
            for (first, count) in rows {
                if first != next {
                    break;
                }
                next += count;
            }
            let wanted = tensor.shape.first().copied().unwrap_or(1);
            if next != wanted {
                return Err(Error::BadFile {
                    path: self.folder.join(MANIFEST),
                    reason: format!("{}: rows {next} to {wanted} are in no shard", tensor.name),
                });
            }
        }
        Ok(())
    }

    /// Reads all tensors into `model`.
    ///
    /// With `need_states` (to resume) every tensor of the model must be there with its own type;
    /// without (to evaluate), states are not needed and are not read.
    ///
    /// Errors: damage ([`Self::verify`]) or [`Error::Mismatch`] listing every difference; the
    /// model is written only when there is none.
    pub fn load(&self, model: &mut dyn WriteTensors, need_states: bool) -> Result<()> {
        let files = self.verify()?;
        let there: BTreeMap<&str, (String, Vec<u64>)> = self
            .manifest
            .tensors
            .iter()
            .map(|entry| (entry.name.as_str(), (entry.dtype.clone(), entry.shape.clone())))
            .collect();
        let mut faults = Vec::new();
        let mut wanted = HashMap::new();
        for (index, tensor) in model.tensors().iter().enumerate() {
            if tensor.is_state && !need_states {
                continue;
            }
            wanted.insert(tensor.name.clone(), index);
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
        mismatch(&self.folder, faults)?;
        for (shard, file) in self.manifest.shards.iter().zip(&files.files) {
            let views: HashMap<String, _> = file.tensors()?.into_iter().collect();
            for piece in &shard.pieces {
                let Some(&index) = wanted.get(&piece.tensor) else { continue };
                let view = views.get(&piece.tensor).ok_or_else(|| Error::BadFile {
                    path: self.folder.join(&shard.file),
                    reason: format!("holds no {}, which the manifest lists", piece.tensor),
                })?;
                let first = piece.first_row as usize;
                write(model, index, first, piece.rows as usize, view.data())?;
            }
        }
        Ok(())
    }
}

/// The shards of a checkpoint, found whole.
pub struct Verified {
    /// In the manifest's order.
    pub files: Vec<MappedFile>,
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

/// Reads a weights file (`--init`) into `model`. States may be lacking; then they stay as they
/// are. A table stored in another float type is rounded to nearest.
///
/// Errors: [`Error::Mismatch`] listing every weight that is missing, has another shape or is not
/// of this model; the model is written only when there is none.
pub fn init(path: &Path, model: &mut dyn WriteTensors) -> Result<()> {
    let file = MappedFile::open(path)?;
    let views: BTreeMap<String, _> = file.tensors()?.into_iter().collect();
    let mut faults = Vec::new();
    let known: HashMap<&str, &Tensor> =
        model.tensors().iter().map(|tensor| (tensor.name.as_str(), tensor)).collect();
    for tensor in model.tensors() {
        match views.get(&tensor.name) {
            None if tensor.is_state => {}
            None => faults.push(format!("{} is missing", tensor.name)),
            Some(view) if view.shape() != tensor.shape => faults.push(format!(
                "{} has shape {:?}, the model {:?}",
                tensor.name,
                view.shape(),
                tensor.shape
            )),
            Some(view) if !is_float(view.dtype()) => {
                faults.push(format!("{} has type {}, not a float", tensor.name, view.dtype()));
            }
            Some(_) => {}
        }
    }
    for name in views.keys().filter(|name| !known.contains_key(name.as_str())) {
        faults.push(format!("the model has no {name}"));
    }
    drop(known);
    mismatch(path, faults)?;
    for (index, tensor) in model.tensors().to_vec().into_iter().enumerate() {
        let Some(view) = views.get(&tensor.name) else { continue };
        let row_bytes = tensor.shape[1..].iter().product::<usize>() * element_bytes(view.dtype());
        let rows_a_piece = ((8 << 20) / row_bytes.max(1)).max(1);
        for first in (0..tensor.rows()).step_by(rows_a_piece) {
            let rows = rows_a_piece.min(tensor.rows() - first);
            let bytes = &view.data()[first * row_bytes..(first + rows) * row_bytes];
            let bytes = convert(bytes, view.dtype(), tensor.dtype).expect("float types, checked");
            write(model, index, first, rows, &bytes)?;
        }
    }
    Ok(())
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64)
}

fn write(
    model: &mut dyn WriteTensors,
    index: usize,
    first: usize,
    rows: usize,
    bytes: &[u8],
) -> Result<()> {
    if rows == 0 { Ok(()) } else { model.write_rows(index, first..first + rows, bytes) }
}

fn mismatch(path: &Path, faults: Vec<String>) -> Result<()> {
    if faults.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch { path: path.into(), reason: faults.join("; ") })
}
