//! What kernels see of tables and lookups: structs of numbers, as `embedding.cuh` and the files
//! beside it declare them.

use bytemuck::{Pod, Zeroable};
use tessera_device::cuda::CudaStream;
use tessera_device::{Cuda, Device};

use crate::Precision;
use crate::Result;

/// An index of a list that is not there.
pub(super) const NONE: u64 = u64::MAX;

/// Columns in one vector load.
const VECTOR: usize = 4;

/// An optimizer's constants for one step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, Pod, Zeroable)]
pub(crate) struct Constants {
    pub(crate) lr: f32,
    pub(crate) eps: f32,
    pub(crate) l2: f32,
    pub(crate) keep: f32,
    pub(crate) moment_scale: f32,
    pub(crate) beta1: f32,
    pub(crate) fresh1: f32,
    pub(crate) beta2: f32,
    pub(crate) fresh2: f32,
    pub(crate) correction1: f32,
    pub(crate) correction2: f32,
    pub(crate) decay: f32,
    pub(crate) momentum: f32,
    pub(crate) l1: f32,
    pub(crate) beta: f32,
    pub(crate) unused: f32,
}

/// A table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct TableView {
    pub(super) weights: u64,
    pub(super) state: u64,
    pub(super) slots: u64,
    pub(super) rows: u64,
    pub(super) columns: u64,
    pub(super) key_base: u64,
    pub(super) reach_first: u64,
    pub(super) reach_end: u64,
    pub(super) dim: u64,
    pub(super) state_columns: u64,
    pub(super) first_row: u64,
    pub(super) first_block: u64,
    pub(super) rounding_key: u64,
    pub(super) out: u64,
    pub(super) features: u32,
    pub(super) precision: u32,
    pub(super) lanes: u32,
    pub(super) vector: u32,
    pub(super) scaled: u32,
    pub(super) clip_kind: u32,
    pub(super) checks_gradient: u32,
    pub(super) unused: u32,
    pub(super) clip: f32,
    pub(super) whole_dim: f32,
    pub(super) constants: Constants,
}

/// A batch's rows and their occurrences, by addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct RunsView {
    pub(super) keys: u64,
    pub(super) starts: u64,
    pub(super) terms: u64,
    pub(super) scales: u64,
    pub(super) table_runs: u64,
    pub(super) long_count: u64,
    pub(super) long_runs: u64,
    pub(super) long_index: u64,
    pub(super) long_sums: u64,
    pub(super) long_stride: u64,
}

/// What a launch over tables works on.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct WorkView {
    pub(super) words: u64,
    pub(super) tables: u64,
    pub(super) list: u64,
    pub(super) runs: RunsView,
    pub(super) grad: u64,
    pub(super) stride: u64,
    pub(super) bags: u64,
    pub(super) wide: u64,
    pub(super) wide_stride: u64,
    pub(super) blocks: u32,
    pub(super) unused: u32,
}

/// Bags of a feature, to be grouped.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct BagsView {
    pub(super) offsets: u64,
    pub(super) first_id: u64,
    pub(super) key_base: u64,
    pub(super) first_term: u32,
    pub(super) mean: u32,
    pub(super) weighted: u32,
    pub(super) unused: u32,
}

/// Bags of a feature, to be pooled, and their table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
pub(super) struct FeatureView {
    pub(super) weights: u64,
    pub(super) slots: u64,
    pub(super) offsets: u64,
    pub(super) first_id: u64,
    pub(super) dim: u64,
    pub(super) column: u64,
    pub(super) precision: u32,
    pub(super) lanes: u32,
    pub(super) vector: u32,
    pub(super) mean: u32,
    pub(super) weighted: u32,
    pub(super) unused: u32,
}

/// A precision's number in kernels.
pub(super) fn precision_of(precision: Precision) -> u32 {
    match precision {
        Precision::Fp32 => 0,
        Precision::Fp16 => 1,
        Precision::Bf16 => 2,
    }
}

/// How a row's columns are shared between lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Lanes {
    /// Lanes of a team.
    pub(super) count: u32,
    /// Whether a lane has four neighbouring columns at a time.
    pub(super) vector: bool,
}

impl Lanes {
    /// For rows of `dim` columns that lie at `columns` of rows of `stride`.
    pub(super) fn of(dim: usize, columns: &[usize], stride: usize) -> Self {
        let whole = |number: usize| number.is_multiple_of(VECTOR);
        if !(whole(dim) && whole(stride) && columns.iter().copied().all(whole)) {
            return Self { count: 32, vector: false };
        }
        // A block of 32 columns, whose sum has an order, is 8 lanes.
        let count = (dim / VECTOR).next_power_of_two().clamp(8, 32);
        Self { count: count as u32, vector: true }
    }

    /// Columns that a team has at once.
    pub(super) fn at_once(self) -> usize {
        self.count as usize * if self.vector { VECTOR } else { 1 }
    }
}

/// Lists that a launch brings to the device together.
#[derive(Debug, Default)]
pub(super) struct Words(Vec<u64>);

impl Words {
    /// Adds a list, from a multiple of 16 bytes on; returns where it begins.
    pub(super) fn push<T: Pod>(&mut self, list: &[T]) -> u64 {
        self.0.resize(self.0.len().next_multiple_of(2), 0);
        let at = self.0.len();
        let bytes: &[u8] = bytemuck::cast_slice(list);
        self.0.resize(at + bytes.len().div_ceil(size_of::<u64>()), 0);
        bytemuck::cast_slice_mut(&mut self.0[at..])[..bytes.len()].copy_from_slice(bytes);
        at as u64
    }

    /// Queues their way to the device.
    pub(super) fn upload(
        &self,
        device: &Cuda,
        stream: &CudaStream,
    ) -> Result<<Cuda as Device>::Buffer<u64>> {
        let mut buffer = device.alloc(self.0.len())?;
        device.upload(stream, &self.0, &mut buffer, 0)?;
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn teams_are_as_wide_as_rows_and_their_places_allow() {
        let lanes = |dim, columns: &[usize], stride| {
            let lanes = Lanes::of(dim, columns, stride);
            (lanes.count, lanes.at_once())
        };
        assert_eq!(lanes(128, &[0, 256], 512), (32, 128));
        assert_eq!(lanes(64, &[4], 512), (16, 64));
        assert_eq!(lanes(48, &[4], 512), (16, 64));
        assert_eq!(lanes(4, &[0], 4), (8, 32));
        assert_eq!(lanes(1024, &[0], 1024), (32, 128));
        for (dim, columns, stride) in [(30, 0, 32), (32, 2, 64), (32, 0, 33)] {
            assert_eq!(lanes(dim, &[columns], stride), (32, 32));
        }
    }

    #[test]
    fn lists_begin_at_vectors() {
        let mut words = Words::default();
        assert_eq!(words.push(&[1u32, 2, 3]), 0);
        assert_eq!(words.push(&[7u64]), 2);
        assert_eq!(words.push::<u64>(&[]), 4);
        assert_eq!(words.push(&[9u8]), 4);
        assert_eq!(words.0, [2 << 32 | 1, 3, 7, 0, 9]);
    }
}
