//! Writes a checkpoint beside the old one, then switches.
//!
//! ```text
//! checkpoints/.step-N.part/   shards, then manifest.json, each synced
//! rename to checkpoints/step-N/          (atomic)
//! checkpoints/last: new file, synced, renamed over the old one (atomic)
//! ```
//! A crash or a failed write at any point leaves `last` naming a whole checkpoint.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::files::{Files, OutFile};
use super::manifest::{Entry, Manifest, Moment, Piece, Shard, VERSION};
use super::{Checkpoint, LAST, MANIFEST, step_dir};
use crate::safetensors_io;
use crate::tensors::{ReadTensors, Tensor};
use crate::{Error, Result};

/// Aimed-at bytes of a shard.
const SHARD_BYTES: usize = 64 << 20;

/// What was written.
#[derive(Clone, Copy, Debug)]
pub struct Written {
    /// Bytes of all files.
    pub bytes: u64,
}

/// Writes the model at `moment` to `folder/step-N` and points `last` at it.
///
/// Errors: any failed operation, with its path; the checkpoints that were there stay whole.
pub fn write(
    files: &dyn Files,
    folder: &Path,
    model: &dyn ReadTensors,
    moment: &Moment,
    config: &toml::Table,
) -> Result<Written> {
    let name = step_dir(moment.step);
    let part = folder.join(format!(".{name}.part"));
    let wrote = |path: &Path| {
        let path = path.to_path_buf();
        move |source| Error::Write { path, source }
    };
    files.remove_dir(&part).map_err(wrote(&part))?;
    files.create_dir(&part).map_err(wrote(&part))?;
    let mut shards = Vec::new();
    for (number, pieces) in plan(model.tensors(), SHARD_BYTES).into_iter().enumerate() {
        let file = format!("shard-{number:05}.safetensors");
        shards.push(write_shard(files, &part.join(&file), file, model, pieces)?);
    }
    let manifest = Manifest {
        format: "tessera-checkpoint".into(),
        version: VERSION,
        moment: moment.clone(),
        config: config.to_string(),
        tensors: model.tensors().iter().map(entry).collect(),
        shards,
        crc32: 0,
    };
    let (manifest, text) = manifest.seal();
    let path = part.join(MANIFEST);
    write_file(files, &path, &text).map_err(wrote(&path))?;
    files.sync_dir(&part).map_err(wrote(&part))?;

    let target = folder.join(&name);
    // A folder of this step can only be a leftover of a run that was resumed before it.
    files.remove_dir(&target).map_err(wrote(&target))?;
    files.rename(&part, &target).map_err(wrote(&target))?;
    files.sync_dir(folder).map_err(wrote(folder))?;
    point(files, folder, LAST, moment.step)?;
    let bytes = manifest.shards.iter().map(|shard| shard.bytes).sum::<u64>() + text.len() as u64;
    Ok(Written { bytes })
}

/// Replaces the moment of checkpoint `folder/step-N`, which holds the model of that step already.
///
/// An evaluation changes the moment (what is best so far) and no tensor, so that only the manifest
/// is written again, and switched atomically: the checkpoint may be the one that `last` names.
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

/// Makes the pointer file `name` (such as `last`) hold the name of step `step`'s folder.
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

/// Rows of one tensor for one shard.
#[derive(Debug, PartialEq)]
struct Part {
    tensor: usize,
    first_row: usize,
    rows: usize,
}

/// Cuts tensors at rows so that a shard holds about `shard_bytes`.
fn plan(tensors: &[Tensor], shard_bytes: usize) -> Vec<Vec<Part>> {
    let mut shards = Vec::new();
    let mut shard = Vec::new();
    let mut room = shard_bytes;
    for (index, tensor) in tensors.iter().enumerate() {
        let row_bytes = tensor.row_bytes().max(1);
        let mut first_row = 0;
        loop {
            let rows = (room / row_bytes).min(tensor.rows() - first_row);
            if rows > 0 || tensor.rows() == 0 {
                shard.push(Part { tensor: index, first_row, rows });
                room -= rows * row_bytes;
                first_row += rows;
            } else {
                // No whole row fits: close the shard, and let a giant row have one of its own.
                if !shard.is_empty() {
                    shards.push(std::mem::take(&mut shard));
                }
                room = shard_bytes.max(row_bytes);
            }
            if first_row == tensor.rows() {
                break;
            }
        }
    }
    if !shard.is_empty() {
        shards.push(shard);
    }
    shards
}

fn write_shard(
    files: &dyn Files,
    path: &Path,
    file: String,
    model: &dyn ReadTensors,
    parts: Vec<Part>,
) -> Result<Shard> {
    let wrote = |source| Error::Write { path: path.into(), source };
    let all = model.tensors();
    let tensors: Vec<Tensor> =
        parts.iter().map(|part| all[part.tensor].with_rows(part.rows)).collect();
    let mut out = BufWriter::new(Counted::new(files.create(path).map_err(wrote)?));
    safetensors_io::write(&mut out, path, &tensors, HashMap::new(), |i, rows, buffer| {
        let first = parts[i].first_row;
        model.read_rows(parts[i].tensor, first + rows.start..first + rows.end, buffer)
    })?;
    let mut out = out.into_inner().map_err(|error| wrote(error.into_error()))?;
    out.file.sync().map_err(wrote)?;
    let pieces = parts
        .iter()
        .map(|part| Piece {
            tensor: all[part.tensor].name.clone(),
            first_row: part.first_row as u64,
            rows: part.rows as u64,
        })
        .collect();
    Ok(Shard { file, bytes: out.bytes, crc32: out.crc.finalize(), pieces })
}

/// Counts and sums what passes to a file.
struct Counted {
    file: Box<dyn OutFile>,
    bytes: u64,
    crc: crc32fast::Hasher,
}

impl Counted {
    fn new(file: Box<dyn OutFile>) -> Self {
        Self { file, bytes: 0, crc: crc32fast::Hasher::new() }
    }
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.crc.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::Dtype;

    #[test]
    fn shards_hold_whole_rows_and_every_row_once() {
        let tensor = |rows, width| Tensor {
            name: format!("t{rows}x{width}"),
            dtype: Dtype::F32,
            shape: vec![rows, width],
            is_state: false,
        };
        let tensors = [tensor(10, 3), tensor(0, 5), tensor(2, 100), tensor(7, 1)];
        for shard_bytes in [1, 12, 50, 100, 1000, 1 << 20] {
            let shards = plan(&tensors, shard_bytes);
            let mut next = vec![0; tensors.len()];
            let mut seen_empty = false;
            for shard in &shards {
                assert!(!shard.is_empty());
                let bytes: usize =
                    shard.iter().map(|part| part.rows * tensors[part.tensor].row_bytes()).sum();
                assert!(bytes <= shard_bytes.max(400), "{bytes} bytes in a shard");
                for part in shard {
                    assert_eq!(part.first_row, next[part.tensor]);
                    next[part.tensor] += part.rows;
                    seen_empty |= part.tensor == 1;
                }
            }
            assert_eq!(next, [10, 0, 2, 7]);
            assert!(seen_empty, "an empty tensor is listed too");
        }
    }
}
