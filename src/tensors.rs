//! A model as a list of logical tensors: the common ground of checkpoints, exports and `--init`.
//!
//! A tensor's name and shape never depend on how a model is stored or cut. Rows are the unit of
//! reading and writing, so that a tensor larger than memory passes through in pieces.

use std::ops::Range;

pub use safetensors::Dtype;

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

    /// Bytes of one row.
    #[must_use]
    pub fn row_bytes(&self) -> usize {
        self.shape[1..].iter().product::<usize>() * element_bytes(self.dtype)
    }

    /// The same tensor cut to `rows` rows.
    #[must_use]
    pub fn with_rows(&self, rows: usize) -> Self {
        let mut cut = self.clone();
        cut.shape[0] = rows;
        cut
    }
}

/// Bytes of an element of a type that a model can hold.
#[must_use]
pub fn element_bytes(dtype: Dtype) -> usize {
    dtype.bitsize().div_ceil(8)
}

/// Something whose tensors can be read row by row.
pub trait ReadTensors {
    /// Its tensors, in a fixed order.
    fn tensors(&self) -> &[Tensor];

    /// Replaces `out` by the little-endian bytes of `rows` of tensor `index`.
    ///
    /// Errors: what the device or the store says.
    fn read_rows(&self, index: usize, rows: Range<usize>, out: &mut Vec<u8>) -> crate::Result<()>;
}

/// Something whose tensors can be written row by row.
pub trait WriteTensors: ReadTensors {
    /// Writes little-endian `bytes` to `rows` of tensor `index`.
    ///
    /// Errors: what the device or the store says.
    fn write_rows(&mut self, index: usize, rows: Range<usize>, bytes: &[u8]) -> crate::Result<()>;
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
        assert_eq!((tensor.rows(), tensor.row_bytes()), (5, 6));
        let vector = Tensor { shape: vec![7], dtype: Dtype::F32, ..tensor };
        assert_eq!((vector.rows(), vector.row_bytes()), (7, 4));
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
