//! Reads a checkpoint or a weights file into a model, checking everything before the first write.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::manifest::{Manifest, Shard, VERSION};
use super::{BEST, LAST, MANIFEST};
use crate::config::Config;
use crate::safetensors_io::{CHUNK_BYTES, TensorFile};
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

    pub(super) fn open(folder: PathBuf) -> Result<Self> {
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
        if !manifest.is_whole() {
            return Err(bad("its checksum is wrong: the file was changed or damaged".into()));
        }
        Ok(Self { folder, manifest })
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

    /// Holds all shards against the manifest's sizes and checksums, and every tensor's pieces
    /// against its row count.
    ///
    /// Errors: a file that is missing, cut, changed, or lacks rows, by name.
    pub fn verify(&self) -> Result<()> {
        for shard in &self.manifest.shards {
            let path = self.folder.join(&shard.file);
            let bad = |reason: String| Err(Error::BadFile { path: path.clone(), reason });
            let (bytes, crc32) = checksum(&path)?;
            if bytes != shard.bytes {
                return bad(format!("{bytes} bytes, the manifest says {}", shard.bytes));
            }
            if crc32 != shard.crc32 {
                return bad(format!(
                    "checksum {crc32:08x}, the manifest says {:08x}: the file was changed or damaged",
                    shard.crc32
                ));
            }
        }
        self.cover()
    }

    /// Opens a shard and finds what the manifest says it holds.
    ///
    /// Errors: a piece that is not there or has another shape than its rows.
    pub(super) fn open_shard(&self, shard: &Shard) -> Result<TensorFile> {
        let path = self.folder.join(&shard.file);
        let file = TensorFile::open(&path)?;
        for piece in &shard.pieces {
            let entry = self.manifest.tensors.iter().find(|entry| entry.name == piece.tensor);
            let wanted = entry.map(|entry| {
                let mut shape = entry.shape.clone();
                shape[0] = piece.rows;
                (entry.dtype.clone(), shape)
            });
            let found = file.tensor(&piece.tensor).map(|stored| {
                let shape: Vec<u64> = stored.shape.iter().map(|&n| n as u64).collect();
                (stored.dtype.to_string(), shape)
            });
            if wanted.is_none() || wanted != found {
                let reason =
                    format!("holds {} as {found:?}, the manifest says {wanted:?}", piece.tensor);
                return Err(Error::BadFile { path, reason });
            }
        }
        Ok(file)
    }

    /// Every row of every tensor is in exactly one piece.
    fn cover(&self) -> Result<()> {
        let mut pieces: HashMap<&str, Vec<(u64, u64)>> = HashMap::new();
        for piece in self.manifest.shards.iter().flat_map(|shard| &shard.pieces) {
            pieces.entry(&piece.tensor).or_default().push((piece.first_row, piece.rows));
        }
        let bad = |reason: String| Err(Error::BadFile { path: self.folder.join(MANIFEST), reason });
        for tensor in &self.manifest.tensors {
            let Some(&wanted) = tensor.shape.first() else {
                return bad(format!("{} has no rows in its shape", tensor.name));
            };
            let mut rows = pieces.remove(tensor.name.as_str()).unwrap_or_default();
            rows.sort_unstable();
            let mut next = 0;
            for (first, count) in rows {
                if first != next {
                    return bad(format!(
                        "{}: a piece from row {first} follows row {next}",
                        tensor.name
                    ));
                }
                next += count;
            }
            if next != wanted {
                return bad(format!("{}: rows {next} to {wanted} are in no shard", tensor.name));
            }
        }
        match pieces.keys().next() {
            Some(name) => bad(format!("a shard holds {name}, which is no tensor of the model")),
            None => Ok(()),
        }
    }

    /// Reads all tensors into `model`.
    ///
    /// With `need_states` (to resume) every tensor of the model must be there with its own type;
    /// without (to evaluate), states are not needed and are not read.
    ///
    /// Errors: damage ([`Self::verify`]) or [`Error::Mismatch`] listing every difference; the
    /// model is written only when there is none.
    pub fn load(&self, model: &mut dyn WriteTensors, need_states: bool) -> Result<()> {
        self.verify()?;
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
        let mut bytes = Vec::new();
        for shard in &self.manifest.shards {
            let file = self.open_shard(shard)?;
            for piece in &shard.pieces {
                let Some(&index) = wanted.get(&piece.tensor) else { continue };
                let stored = file.tensor(&piece.tensor).expect("open_shard found it");
                let row_bytes = model.tensors()[index].row_bytes();
                for rows in chunks(piece.rows as usize, row_bytes) {
                    bytes.clear();
                    file.read(stored, rows.start * row_bytes..rows.end * row_bytes, &mut bytes)?;
                    let first = piece.first_row as usize;
                    model.write_rows(index, first + rows.start..first + rows.end, &bytes)?;
                }
            }
        }
        Ok(())
    }
}

/// `0..rows` in ranges that take about [`CHUNK_BYTES`] each.
fn chunks(rows: usize, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (CHUNK_BYTES / row_bytes.max(1)).max(1);
    (0..rows).step_by(step).map(move |first| first..(first + step).min(rows))
}

/// Size and CRC-32 of a file.
fn checksum(path: &Path) -> Result<(u64, u32)> {
    let unreadable = |source| Error::Read { path: path.into(), source };
    let mut file = File::open(path).map_err(unreadable)?;
    let mut crc = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        match file.read(&mut buffer).map_err(unreadable)? {
            0 => return Ok((total, crc.finalize())),
            bytes => {
                crc.update(&buffer[..bytes]);
                total += bytes as u64;
            }
        }
    }
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
    let file = TensorFile::open(path)?;
    let mut faults = Vec::new();
    for tensor in model.tensors() {
        match file.tensor(&tensor.name) {
            None if tensor.is_state => {}
            None => faults.push(format!("{} is missing", tensor.name)),
            Some(stored) if stored.shape != tensor.shape => faults.push(format!(
                "{} has shape {:?}, the model {:?}",
                tensor.name, stored.shape, tensor.shape
            )),
            Some(stored) if !is_float(stored.dtype) => {
                faults.push(format!("{} has type {}, not a float", tensor.name, stored.dtype));
            }
            Some(_) => {}
        }
    }
    let known: HashSet<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    for stored in file.tensors().iter().filter(|stored| !known.contains(stored.name.as_str())) {
        faults.push(format!("the model has no {}", stored.name));
    }
    drop(known);
    mismatch(path, faults)?;
    // All values are looked at before the first is written.
    for tensor in model.tensors() {
        pieces(&file, tensor, |rows, bytes| finite(path, tensor, rows, bytes))?;
    }
    for (index, tensor) in model.tensors().to_vec().iter().enumerate() {
        pieces(&file, tensor, |rows, bytes| model.write_rows(index, rows, bytes))?;
    }
    Ok(())
}

/// Hands all rows of `tensor`, as the model's type, to `take` piece by piece, if the file has it.
fn pieces(
    file: &TensorFile,
    tensor: &Tensor,
    mut take: impl FnMut(Range<usize>, &[u8]) -> Result<()>,
) -> Result<()> {
    let Some(stored) = file.tensor(&tensor.name) else { return Ok(()) };
    let row_bytes = tensor.shape[1..].iter().product::<usize>() * element_bytes(stored.dtype);
    let mut bytes = Vec::new();
    for rows in chunks(tensor.rows(), row_bytes) {
        bytes.clear();
        file.read(stored, rows.start * row_bytes..rows.end * row_bytes, &mut bytes)?;
        let converted = convert(&bytes, stored.dtype, tensor.dtype).expect("floats, checked");
        take(rows, &converted)?;
    }
    Ok(())
}

/// Refuses values that are not finite in the type that the model stores.
fn finite(path: &Path, tensor: &Tensor, rows: Range<usize>, bytes: &[u8]) -> Result<()> {
    let values = convert(bytes, tensor.dtype, Dtype::F32).expect("a model holds floats");
    let values = values.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let Some((at, value)) = values.enumerate().find(|(_, value)| !value.is_finite()) else {
        return Ok(());
    };
    let width = tensor.shape[1..].iter().product::<usize>();
    Err(Error::BadFile {
        path: path.into(),
        reason: format!(
            "{} row {} column {} is {value} as {}",
            tensor.name,
            rows.start + at / width,
            at % width,
            tensor.dtype
        ),
    })
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64)
}

fn mismatch(path: &Path, faults: Vec<String>) -> Result<()> {
    if faults.is_empty() {
        return Ok(());
    }
    Err(Error::Mismatch { path: path.into(), reason: faults.join("; ") })
}
