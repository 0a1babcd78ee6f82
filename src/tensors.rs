//! A model as a list of logical tensors: the common ground of checkpoints, exports and `--init`.
//!
//! A tensor's name and shape never depend on how a model is stored or cut. What a rank has of it
//! are blocks: rectangles of its rows. Some rows of a block are the unit of reading and writing,
//! so that a tensor larger than memory passes through in pieces.

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub use safetensors::Dtype;
use tessera_cache::Plane;
use tessera_cache::log::SsdLog;
use tessera_embedding::Init;

/// Name, type and shape of one logical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Logical name, such as `tables.c1.weight`.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape; the first dimension counts rows.
    pub shape: Vec<usize>,
    /// Whether this is optimizer state: `--init` may lack it.
    pub is_state: bool,
}

impl Tensor {
    /// Number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.shape[0]
    }

    /// Elements of one row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.shape[1..].iter().product()
    }

    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.columns() * element_bytes(self.dtype)
    }
}

/// A rectangle of a logical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// Which tensor of the model.
    pub tensor: usize,
    /// Its rows.
    pub rows: Range<usize>,
    /// Elements of each of these rows.
    pub columns: Range<usize>,
}

impl Block {
    /// All of `tensor`, the model's number `index`.
    #[must_use]
    pub fn whole(index: usize, tensor: &Tensor) -> Self {
        Self { tensor: index, rows: 0..tensor.rows(), columns: 0..tensor.columns() }
    }

    /// All of each of `tensors`.
    #[must_use]
    pub fn all(tensors: &[Tensor]) -> Vec<Self> {
        tensors.iter().enumerate().map(|(index, tensor)| Self::whole(index, tensor)).collect()
    }

    /// The same columns of other rows.
    #[must_use]
    pub fn with_rows(&self, rows: Range<usize>) -> Self {
        Self { rows, ..self.clone() }
    }

    /// Whether it has no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() || self.columns.is_empty()
    }
}

/// Bytes of an element of a type that a model can hold.
#[must_use]
pub fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize().div_ceil(8)
}

/// Some rows and columns of a table that one rank saves: its weights and states over the same rows.
#[derive(Clone, Debug)]
pub struct TablePart {
    /// The table's rows.
    pub rows: Range<usize>,
    /// What it has of each tensor.
    pub fields: Vec<Field>,
    /// Where the rows lie, if that is a log below memory.
    pub cold: Option<ColdPart>,
}

/// What a part of a table has of one tensor.
#[derive(Clone, Debug)]
pub struct Field {
    /// The tensor, the part's rows, and the columns.
    pub block: Block,
    /// The plane of a row that it lies in.
    pub plane: Plane,
    /// Its first byte in the plane.
    pub at: usize,
}

/// A part of a table in a log.
#[derive(Clone, Debug)]
pub struct ColdPart {
    /// The log: all of the part's rows that differ from their first values, once the model has
    /// written down the others. Its row 0 is the part's first.
    pub log: Arc<SsdLog>,
    /// The name by which first weights are drawn.
    pub table: String,
    /// How.
    pub init: Init,
    /// The seed.
    pub seed: u64,
}

/// One rank's part of a model, to be read.
pub trait ReadTensors {
    /// The whole model's tensors, in a fixed order: the same on all ranks.
    fn tensors(&self) -> &[Tensor];

    /// What this rank is to save, in the order of tensors: over all ranks, each element of each
    /// tensor is in exactly one block.
    fn blocks(&self) -> Vec<Block>;

    /// Replaces `out` by little-endian elements of `block`, (rows, columns): some rows of one of
    /// [`Self::blocks`].
    ///
    /// Errors: what the device or the store says.
    fn read_block(&self, block: &Block, out: &mut Vec<u8>) -> crate::Result<()>;

    /// Which of [`Self::blocks`] are parts of tables. A checkpoint may link the log of one, or
    /// hold only those of its rows that changed.
    fn parts(&self) -> Vec<TablePart> {
        Vec::new()
    }

    /// The rows of one of [`Self::parts`] that were written since the last checkpoint, ascending;
    /// `None` if that is not known.
    ///
    /// Errors: what the tables say.
    fn changed(&self, _part: &TablePart) -> crate::Result<Option<Vec<usize>>> {
        Ok(None)
    }
}

/// Tensors somewhere else, by name.
pub trait Stored {
    /// For messages.
    fn path(&self) -> &Path;

    /// Type and shape of a tensor, if it is there.
    fn find(&self, name: &str) -> Option<(Dtype, &[usize])>;

    /// Replaces `out` by little-endian elements of some rows of a tensor that is there.
    ///
    /// Errors: a failed read.
    fn read(&self, name: &str, rows: Range<usize>, out: &mut Vec<u8>) -> crate::Result<()>;
}

/// One rank's part of a model, to be written.
pub trait WriteTensors: ReadTensors {
    /// Tells what is about to be loaded, with optimizer states and what goes with them, or weights
    /// alone: from here on, tensors whose shapes depend on it have those. Nothing else changes.
    ///
    /// Errors: what cannot be loaded.
    fn prepare(&mut self, stored: &dyn Stored, with_states: bool) -> crate::Result<()> {
        let _ = (stored, with_states);
        Ok(())
    }

    /// The first write of what was prepared.
    ///
    /// Errors: what the device or the store says.
    fn begin(&mut self) -> crate::Result<()> {
        Ok(())
    }

    /// All that this rank keeps, in the order of tensors; other ranks may keep the same.
    fn held(&self) -> Vec<Block>;

    /// Writes little-endian elements (rows, columns) to `block`: some rows of one of
    /// [`Self::held`].
    ///
    /// Errors: what the device or the store says.
    fn write_block(&mut self, block: &Block, bytes: &[u8]) -> crate::Result<()>;

    /// [`Self::held`] in groups that [`Self::write_blocks`] may write at once: blocks of the same
    /// rows.
    fn held_together(&self) -> Vec<Vec<Block>> {
        self.held().into_iter().map(|block| vec![block]).collect()
    }

    /// Writes the same rows of blocks of one group, each as [`Self::write_block`] does.
    ///
    /// Errors: as there.
    fn write_blocks(&mut self, blocks: &[Block], bytes: &[Vec<u8>]) -> crate::Result<()> {
        blocks.iter().zip(bytes).try_for_each(|(block, bytes)| self.write_block(block, bytes))
    }
}

/// Converts little-endian elements of `from` to elements of `to`, rounding to nearest.
///
/// Gives `None` for a pair of types that a model does not hold.
#[must_use]
pub fn convert(bytes: &[u8], from: Dtype, to: Dtype) -> Option<Vec<u8>> {
    use half::{bf16, f16};
    if from == to {
        return Some(bytes.to_vec());
    }
    let pairs = || bytes.chunks_exact(2).map(|b| [b[0], b[1]]);
    let floats: Vec<f32> = match from {
        Dtype::F32 => {
            bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        }
        Dtype::F64 => bytes
            .chunks_exact(8)
            .map(|b| f64::from_le_bytes(b.try_into().expect("chunks of 8")) as f32)
            .collect(),
        Dtype::F16 => pairs().map(|b| f16::from_le_bytes(b).to_f32()).collect(),
        Dtype::BF16 => pairs().map(|b| bf16::from_le_bytes(b).to_f32()).collect(),
        _ => return None,
    };
    Some(match to {
        Dtype::F32 => floats.iter().flat_map(|x| x.to_le_bytes()).collect(),
        Dtype::F16 => floats.iter().flat_map(|&x| f16::from_f32(x).to_le_bytes()).collect(),
        Dtype::BF16 => floats.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes()).collect(),
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_what_follows_the_first_dimension() {
        let tensor =
            Tensor { name: "t".into(), dtype: Dtype::F16, shape: vec![5, 3], is_state: false };
        assert_eq!((tensor.rows(), tensor.columns(), tensor.row_bytes()), (5, 3, 6));
        let vector = Tensor { shape: vec![7], dtype: Dtype::F32, ..tensor };
        assert_eq!((vector.rows(), vector.columns(), vector.row_bytes()), (7, 1, 4));
    }

    #[test]
    fn conversion_is_exact_where_the_type_is_wider() {
        let values = [0.0f32, -1.5, 65504.0, 6.1e-5, 1.0 / 3.0];
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        for dtype in [Dtype::F16, Dtype::BF16] {
            let narrow = convert(&bytes, Dtype::F32, dtype).unwrap();
            let wide = convert(&narrow, dtype, Dtype::F32).unwrap();
            assert_eq!(convert(&wide, Dtype::F32, dtype).unwrap(), narrow);
        }
        assert!(convert(&bytes, Dtype::F32, Dtype::I32).is_none());
    }
}
