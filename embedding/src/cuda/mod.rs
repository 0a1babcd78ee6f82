//! Lookups and updates on an NVIDIA GPU, with the CPU's bits.
//!
//! ```text
//! stage     ids, offsets and weights of a batch go to the device, features of a table together
//! forward   one kernel for all features: a team of lanes a bag               (lookup.cu)
//! group     ids -> keys (table, row), sorted stably -> runs of equal keys    (group.cu)
//! update    one kernel for all tables of a rule: a team of lanes a run       (update.cu)
//! ```
//! What keeps the bits:
//! - a run's terms are in canonical order, since the sort is stable, and one owner adds them in
//!   that order. Columns are independent of each other: that, and nothing else, is what the work
//!   on one run is split by. Runs of more than [`LONG_RUN`] terms have a block of threads for
//!   each 32 columns beforehand, so that a row that every sample has holds nobody up;
//! - sums over columns go in the CPU's order, by exchanges between lanes that have a fixed pattern
//!   (`block_sum` in `embedding.cuh`);
//! - kernels are compiled without contraction, with IEEE division and root and with subnormal
//!   numbers; rounding uses the CPU's generator with the CPU's counters. Constants of a step are
//!   formed by the host. Logarithms and sines, which normal first values need, are the host's.
//!
//! There are no atomic additions of floating-point numbers. Counts of rows, which any order gives
//! alike, and the list of long runs, which is read by place, use atomic integers.
//!
//! What kernels need to know of tables, slots of rows that move between tiers included, is packed
//! in one list of words and uploaded with each call; memory is the device's pool's. No call but
//! those that return numbers waits for the device: `update` for its counts, and what returns rows,
//! gradients or norms. A lookup knows when it, and its grouping, are complete, and makes every
//! stream that uses it wait for that; order between uses of *tables* is the caller's.

mod first;
mod groups;
mod rows;
mod staged;
mod views;

use std::ops::Range;
use std::sync::Arc;

use tessera_cache::Resident;
use tessera_device::Cuda;
use tessera_device::cuda::{CudaBuffer, CudaStream, KernelSource};

use crate::{
    HostLookup, LookupOps, Marked, Reach, Result, Row, Schema, SparseStep, Stores, UpdateStats,
};
use rows::{Pooled, Rows};
pub use staged::CudaLookup;
pub(crate) use views::Constants;

/// Threads of a block, in kernels that do not say otherwise.
const THREADS: u32 = 256;

/// Terms above which a run is summed beforehand: `LONG_RUN` in the kernels.
const LONG_RUN: usize = 256;

const HEADERS: &[(&str, &str)] = &[("embedding.cuh", include_str!("../../kernels/embedding.cuh"))];

const GROUP: KernelSource =
    KernelSource { name: "group", text: include_str!("../../kernels/group.cu"), headers: HEADERS };
const LOOKUP: KernelSource = KernelSource {
    name: "lookup",
    text: include_str!("../../kernels/lookup.cu"),
    headers: HEADERS,
};
const UPDATE: KernelSource = KernelSource {
    name: "update",
    text: include_str!("../../kernels/update.cu"),
    headers: HEADERS,
};

impl LookupOps for Cuda {
    type Lookup = CudaLookup;
    type Scratch = ();

    fn stage(
        &self,
        stream: &CudaStream,
        schema: &Arc<Schema>,
        _: &Arc<()>,
        lookup: HostLookup,
    ) -> Result<CudaLookup> {
        CudaLookup::stage(self, stream, schema, lookup)
    }

    fn group(&self, stream: &CudaStream, lookup: &CudaLookup) -> Result<()> {
        lookup.groups(self, stream).map(drop)
    }

    fn unique_counts(&self, stream: &CudaStream, lookup: &CudaLookup) -> Result<Vec<u64>> {
        let groups = lookup.groups(self, stream)?;
        let runs = groups.table_runs(self, stream)?;
        Ok(runs.windows(2).map(|pair| u64::from(pair[1] - pair[0])).collect())
    }

    fn unique_rows(
        &self,
        stream: &CudaStream,
        lookup: &CudaLookup,
        table: usize,
    ) -> Result<Vec<Row>> {
        let numbers = lookup.groups(self, stream)?.numbers(self, stream, table)?;
        Ok(lookup.host.rows_of(table, &numbers).iter().copied().map(Row).collect())
    }

    fn initialize(
        &self,
        stream: &CudaStream,
        schema: &Schema,
        table: usize,
        store: &mut Resident<Self>,
    ) -> Result<()> {
        first::initialize(self, stream, schema, table, store)
    }

    /// By the host, where the tiers' indices are.
    fn number_rows(&self, schema: &Schema, which: &[bool], lookup: &mut HostLookup) {
        lookup.number_rows(schema, which, |tables, number| tables.iter_mut().for_each(number));
    }

    fn numbers_of(
        &self,
        _: &CudaStream,
        lookup: &CudaLookup,
        table: usize,
        bags: Range<usize>,
    ) -> Result<Vec<u64>> {
        Ok(lookup.host.numbers_of(&lookup.schema, table, bags))
    }

    fn forward(
        &self,
        stream: &CudaStream,
        stores: &Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &CudaLookup,
        bags: Range<usize>,
        out: &mut CudaBuffer<f32>,
        stride: usize,
    ) -> Result<()> {
        lookup.pool(self, stream, stores, reach, bags, out, stride)
    }

    fn update(
        &self,
        stream: &CudaStream,
        stores: &mut Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &CudaLookup,
        grad: &CudaBuffer<f32>,
        stride: usize,
        step: &SparseStep,
        squares: &[f32],
    ) -> Result<UpdateStats> {
        let groups = lookup.groups(self, stream)?;
        let rows = Rows::new(self, stream, lookup, &groups, Pooled { grad, stride });
        rows.update(stores, reach, step, squares)
    }

    fn row_gradients(
        &self,
        stream: &CudaStream,
        lookup: &CudaLookup,
        grad: &CudaBuffer<f32>,
        stride: usize,
        marked: Marked<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let groups = lookup.groups(self, stream)?;
        let rows = Rows::new(self, stream, lookup, &groups, Pooled { grad, stride });
        rows.gradients(marked, out)
    }

    fn block_squares(
        &self,
        stream: &CudaStream,
        stores: &Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &CudaLookup,
        grad: &CudaBuffer<f32>,
        stride: usize,
        step: &SparseStep,
        out: &mut [f32],
    ) -> Result<()> {
        let groups = lookup.groups(self, stream)?;
        let rows = Rows::new(self, stream, lookup, &groups, Pooled { grad, stride });
        rows.block_squares(stores, reach, step, out)
    }

    fn grad_sq_norm(
        &self,
        stream: &CudaStream,
        lookup: &CudaLookup,
        grad: &CudaBuffer<f32>,
        stride: usize,
    ) -> Result<f64> {
        let groups = lookup.groups(self, stream)?;
        Rows::new(self, stream, lookup, &groups, Pooled { grad, stride }).sq_norm()
    }
}
