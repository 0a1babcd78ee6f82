//! The tensors of a checkpoint, read row by row without loading a model.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use super::Checkpoint;
use super::load::Verified;
use crate::tensors::{Dtype, ReadTensors, Tensor};
use crate::{Error, Result};

/// A verified checkpoint as a list of logical tensors.
pub struct CheckpointTensors {
    shards: Verified,
    tensors: Vec<Tensor>,
    /// Pieces of each tensor, ascending: (first row, rows, shard, offset in the shard in bytes).
    pieces: Vec<Vec<(usize, usize, usize, usize)>>,
}

impl CheckpointTensors {
    /// Checks all files of `checkpoint` and finds every piece.
    ///
    /// Errors: damage, by file.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        let shards = checkpoint.verify()?;
        let manifest = &checkpoint.manifest;
        let mut index = HashMap::new();
        let mut tensors = Vec::new();
        for entry in &manifest.tensors {
            let dtype = dtype(&checkpoint.folder, &entry.dtype)?;
            index.insert(entry.name.as_str(), tensors.len());
            tensors.push(Tensor {
                name: entry.name.clone(),
                dtype,
                shape: entry.shape.iter().map(|&n| n as usize).collect(),
                is_state: is_state(&entry.name),
            });
        }
        let mut pieces = vec![Vec::new(); tensors.len()];
        for (number, (shard, file)) in manifest.shards.iter().zip(&shards.files).enumerate() {
            let start = file.bytes().as_ptr() as usize;
            for (name, view) in file.tensors()? {
                let piece = shard.pieces.iter().find(|piece| piece.tensor == name);
                let (Some(piece), Some(&tensor)) = (piece, index.get(name.as_str())) else {
                    let path = checkpoint.folder.join(&shard.file);
                    let reason = format!("holds {name}, which the manifest does not list");
                    return Err(Error::BadFile { path, reason });
                };
                let offset = view.data().as_ptr() as usize - start;
                pieces[tensor].push((
                    piece.first_row as usize,
                    piece.rows as usize,
                    number,
                    offset,
                ));
            }
        }
        for pieces in &mut pieces {
            pieces.sort_unstable();
        }
        Ok(Self { shards, tensors, pieces })
    }
}

impl ReadTensors for CheckpointTensors {
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn read_rows(&self, index: usize, rows: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        out.clear();
        let width = self.tensors[index].row_bytes();
        for &(first, count, shard, offset) in &self.pieces[index] {
            let (start, end) = (rows.start.max(first), rows.end.min(first + count));
            if start < end {
                let bytes = self.shards.files[shard].bytes();
                out.extend(
                    &bytes[offset + (start - first) * width..offset + (end - first) * width],
                );
            }
        }
        Ok(())
    }
}

fn dtype(folder: &Path, name: &str) -> Result<Dtype> {
    [Dtype::F32, Dtype::F16, Dtype::BF16]
        .into_iter()
        .find(|dtype| dtype.to_string() == name)
        .ok_or_else(|| Error::BadFile {
            path: folder.join(super::MANIFEST),
            reason: format!("element type {name}"),
        })
}

/// Whether a logical name is that of an optimizer state, not of a weight.
fn is_state(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    if name.starts_with("tables.") {
        !["weight", "wide"].contains(&last)
    } else {
        // `dense.cross.L.v` and `.w` are weights; a state has one more part.
        name.split('.').count() > 4
    }
}

#[cfg(test)]
mod tests {
    use super::is_state;

    #[test]
    fn states_are_told_from_weights_by_name() {
        for weight in ["tables.a.weight", "tables.a.wide", "dense.top.0.bias", "dense.cross.1.v"] {
            assert!(!is_state(weight), "{weight}");
        }
        for state in
            ["tables.a.sum", "tables.a.wide.sum", "dense.top.0.bias.m", "dense.cross.1.v.v"]
        {
            assert!(is_state(state), "{state}");
        }
    }
}
