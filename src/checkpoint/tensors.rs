//! The tensors of a checkpoint, read row by row without loading a model.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use super::Checkpoint;
use crate::safetensors_io::TensorFile;
use crate::tensors::{Dtype, ReadTensors, Tensor};
use crate::{Error, Result};

/// A verified checkpoint as a list of logical tensors.
pub struct CheckpointTensors {
    shards: Vec<TensorFile>,
    tensors: Vec<Tensor>,
    /// Pieces of each tensor, ascending.
    pieces: Vec<Vec<Place>>,
}

/// Where some rows of a tensor are.
struct Place {
    first_row: usize,
    rows: usize,
    shard: usize,
}

impl CheckpointTensors {
    /// Checks all files of `checkpoint` and finds every piece.
    ///
    /// Errors: damage, by file.
    pub fn open(checkpoint: &Checkpoint) -> Result<Self> {
        checkpoint.verify()?;
        let manifest = &checkpoint.manifest;
        let mut tensors = Vec::new();
        for entry in &manifest.tensors {
            tensors.push(Tensor {
                name: entry.name.clone(),
                dtype: dtype(&checkpoint.folder, &entry.dtype)?,
                shape: entry.shape.iter().map(|&n| n as usize).collect(),
                is_state: is_state(&entry.name),
            });
        }
        let mut shards = Vec::new();
        let mut places: HashMap<&str, Vec<Place>> = HashMap::new();
        for (number, shard) in manifest.shards.iter().enumerate() {
            shards.push(checkpoint.open_shard(shard)?);
            for piece in &shard.pieces {
                places.entry(&piece.tensor).or_default().push(Place {
                    first_row: piece.first_row as usize,
                    rows: piece.rows as usize,
                    shard: number,
                });
            }
        }
        let mut pieces = Vec::new();
        for tensor in &tensors {
            let mut list = places.remove(tensor.name.as_str()).unwrap_or_default();
            list.sort_by_key(|place| place.first_row);
            pieces.push(list);
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
        let tensor = &self.tensors[index];
        let width = tensor.row_bytes();
        for place in &self.pieces[index] {
            let start = rows.start.max(place.first_row);
            let end = rows.end.min(place.first_row + place.rows);
            if start < end {
                let file = &self.shards[place.shard];
                let stored = file.tensor(&tensor.name).expect("open_shard found it");
                let first = start - place.first_row;
                file.read(stored, first * width..(first + end - start) * width, out)?;
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
