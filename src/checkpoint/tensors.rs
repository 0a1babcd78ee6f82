//! The tensors of a checkpoint, read block by block without loading a model.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::path::Path;
use std::rc::Rc;

use super::{Checkpoint, MANIFEST, cover};
use crate::safetensors_io::TensorFile;
use crate::tensors::{Block, Dtype, Tensor, element_bytes};
use crate::{Error, Result};

/// Files that are open at a time, at most: a checkpoint may have more than a process may open,
/// and ranks may be threads of one.
const OPEN_FILES_MAX: usize = 4;

/// A checkpoint as a list of logical tensors, whoever wrote which part.
pub struct CheckpointTensors<'a> {
    checkpoint: &'a Checkpoint,
    tensors: Vec<Tensor>,
    pieces: Vec<Pieces>,
    /// Files by number, the last used at the end.
    open: RefCell<VecDeque<(usize, Rc<TensorFile>)>>,
}

/// The pieces of one tensor.
#[derive(Default)]
struct Pieces {
    /// By first row.
    places: Vec<Place>,
    /// Most rows of a piece.
    rows_max: usize,
}

/// Where a block of a tensor is.
struct Place {
    block: Block,
    shard: usize,
}

impl<'a> CheckpointTensors<'a> {
    /// Checks all files of `checkpoint` and finds every piece.
    ///
    /// Errors: damage, by file.
    pub fn open(checkpoint: &'a Checkpoint) -> Result<Self> {
        checkpoint.verify(0, 1, &mut || Ok(()))?;
        cover::check(&checkpoint.folder.join(MANIFEST), &checkpoint.manifest)?;
        Self::index(checkpoint)
    }

    /// Finds every piece of a checkpoint whose files and pieces were checked.
    ///
    /// Errors: an element type that models do not have.
    pub(super) fn index(checkpoint: &'a Checkpoint) -> Result<Self> {
        let manifest = &checkpoint.manifest;
        let mut tensors = Vec::new();
        let mut number_of = HashMap::new();
        for entry in &manifest.tensors {
            number_of.insert(entry.name.as_str(), tensors.len());
            tensors.push(Tensor {
                name: entry.name.clone(),
                dtype: dtype(&checkpoint.folder, &entry.dtype)?,
                shape: entry.shape.iter().map(|&n| n as usize).collect(),
                is_state: is_state(&entry.name),
            });
        }
        let mut pieces: Vec<Pieces> = tensors.iter().map(|_| Pieces::default()).collect();
        for (shard, file) in manifest.shards.iter().enumerate() {
            for piece in &file.pieces {
                let checked = "its place was checked";
                let tensor = number_of[piece.tensor.as_str()];
                let (first, end) = cover::columns(&manifest.tensors[tensor], piece).expect(checked);
                let first_row = piece.first_row as usize;
                let rows = first_row..first_row + piece.rows as usize;
                let pieces = &mut pieces[tensor];
                pieces.rows_max = pieces.rows_max.max(rows.len());
                let block = Block { tensor, rows, columns: first as usize..end as usize };
                pieces.places.push(Place { block, shard });
            }
        }
        for pieces in &mut pieces {
            pieces.places.sort_by_key(|place| place.block.rows.start);
        }
        Ok(Self { checkpoint, tensors, pieces, open: RefCell::default() })
    }

    /// Its tensors, in a fixed order.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Number of the tensor of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.name == name)
    }

    /// Replaces `out` by the little-endian elements of `block`, (rows, columns).
    ///
    /// Errors: a failed read.
    pub fn read_block(&self, block: &Block, out: &mut Vec<u8>) -> Result<()> {
        let tensor = &self.tensors[block.tensor];
        let element = element_bytes(tensor.dtype);
        let stride = block.columns.len() * element;
        out.resize(block.rows.len() * stride, 0);
        let Pieces { places, rows_max } = &self.pieces[block.tensor];
        // Where those before end cannot be in the block.
        let from = places.partition_point(|p| p.block.rows.start + rows_max <= block.rows.start);
        for place in places[from..].iter().take_while(|p| p.block.rows.start < block.rows.end) {
            let piece = &place.block;
            let rows = block.rows.start.max(piece.rows.start)..block.rows.end.min(piece.rows.end);
            let columns = block.columns.start.max(piece.columns.start)
                ..block.columns.end.min(piece.columns.end);
            if rows.is_empty() || columns.is_empty() {
                continue;
            }
            let at = (rows.start - block.rows.start) * stride
                + (columns.start - block.columns.start) * element;
            let file = self.file(place.shard)?;
            let stored = file.tensor(&tensor.name).expect("open_shard found it");
            let rows = rows.start - piece.rows.start..rows.end - piece.rows.start;
            let columns = columns.start - piece.columns.start..columns.end - piece.columns.start;
            file.read(stored, rows, columns, &mut out[at..], stride)?;
        }
        Ok(())
    }

    /// The file of a shard, open.
    fn file(&self, shard: usize) -> Result<Rc<TensorFile>> {
        let mut open = self.open.borrow_mut();
        let file = match open.iter().position(|&(number, _)| number == shard) {
            Some(at) => open.remove(at).expect("a position in the list").1,
            None => Rc::new(self.checkpoint.open_shard(&self.checkpoint.manifest.shards[shard])?),
        };
        if open.len() == OPEN_FILES_MAX {
            open.pop_front();
        }
        open.push_back((shard, Rc::clone(&file)));
        Ok(file)
    }
}

fn dtype(folder: &Path, name: &str) -> Result<Dtype> {
    [Dtype::F32, Dtype::F16, Dtype::BF16]
        .into_iter()
        .find(|dtype| dtype.to_string() == name)
        .ok_or_else(|| Error::BadFile {
            path: folder.join(MANIFEST),
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
