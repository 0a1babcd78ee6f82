//! Work on a batch's different rows on a GPU: kernels of `update.cu`.

use std::collections::BTreeMap;

use tessera_device::cuda::{CudaBuffer, CudaStream, Launch};
use tessera_device::{Cuda, Device};

use super::groups::Groups;
use super::staged::CudaLookup;
use super::views::{Lanes, NONE, RunsView, TableView, Words, WorkView, precision_of};
use super::{THREADS, UPDATE};
use crate::cpu::{Rule, rounding_key};
use crate::{Clip, Marked, Precision, Reach, Result, SparseStep, Stores, UpdateStats};

/// The most blocks of a table, a multiprocessor: those that run at once, and some more so that they
/// end together.
const BLOCKS_A_MULTIPROCESSOR_MAX: u64 = 4;

/// Threads of a block that sums a long run, and columns that it takes.
const LONG_THREADS: u32 = 512;
const LONG_COLUMNS: usize = 32;

/// Bytes of shared memory that kernels declare themselves, at most.
const SHARED_BYTES_DECLARED: usize = 1 << 10;

/// Threads of a warp.
const WARP: u32 = 32;

/// The pooled vectors' gradient.
#[derive(Clone, Copy)]
pub(super) struct Pooled<'a> {
    pub(super) grad: &'a CudaBuffer<f32>, // (bags, stride)
    pub(super) stride: usize,
}

/// A lookup and its grouping, and how one operation sees its tables.
pub(super) struct Rows<'a> {
    device: &'a Cuda,
    stream: &'a CudaStream,
    lookup: &'a CudaLookup,
    groups: &'a Groups,
    pooled: Pooled<'a>,
    words: Words,
    tables: Vec<TableView>,
    lanes: Vec<Lanes>,
}

/// Lists and views on the device, and what they are for.
struct Brought {
    words: CudaBuffer<u64>,
    view: WorkView,
    /// Sums of long runs.
    _long_sums: CudaBuffer<f32>,
}

impl<'a> Rows<'a> {
    /// All tables, with every row in reach, to be read.
    pub(super) fn new(
        device: &'a Cuda,
        stream: &'a CudaStream,
        lookup: &'a CudaLookup,
        groups: &'a Groups,
        pooled: Pooled<'a>,
    ) -> Self {
        let (schema, mut words) = (&*lookup.schema, Words::default());
        let (mut tables, mut lanes_of) = (Vec::new(), Vec::new());
        for (index, table) in schema.tables().iter().enumerate() {
            let (columns, window) = (schema.columns_of(index), &schema.windows()[index]);
            let lanes = Lanes::of(table.dim, columns, pooled.stride);
            let columns: Vec<u64> = columns.iter().map(|&column| column as u64).collect();
            lanes_of.push(lanes);
            tables.push(TableView {
                slots: NONE,
                rows: NONE,
                columns: words.push(&columns),
                key_base: groups.key_bases[index],
                reach_end: u64::MAX,
                dim: table.dim as u64,
                state_columns: table.optimizer.state_columns(table.dim) as u64,
                first_row: window.first_row,
                first_block: (window.first_column / 8) as u64,
                features: columns.len() as u32,
                precision: precision_of(table.precision),
                lanes: lanes.count,
                vector: lanes.vector.into(),
                scaled: groups.scaled[index].into(),
                whole_dim: window.dim as f32,
                ..bytemuck::Zeroable::zeroed()
            });
        }
        Self { device, stream, lookup, groups, pooled, words, tables, lanes: lanes_of }
    }

    /// Takes what may be touched from `reach`.
    fn reach(&mut self, reach: &[Reach<'_>]) {
        for (view, reach) in self.tables.iter_mut().zip(reach) {
            (view.reach_first, view.reach_end) = (reach.rows.start, reach.rows.end);
            view.slots = reach.slots.map_or(NONE, |slots| self.words.push(slots));
        }
    }

    /// Takes clipping and rules from `step`; returns the rules.
    fn rules(&mut self, step: &SparseStep) -> Vec<Rule> {
        let schema = &*self.lookup.schema;
        let mut rules = Vec::with_capacity(self.tables.len());
        for (index, view) in self.tables.iter_mut().enumerate() {
            let rule = Rule::new(&schema.tables()[index].optimizer, step);
            (view.clip_kind, view.clip) = match step.clip {
                Clip::None => (0, 0.0),
                Clip::Value(limit) => (1, limit),
                Clip::Scale(scale) => (2, scale),
            };
            // As on the CPU: otherwise the row itself shows a gradient that is not finite.
            let check = matches!(step.clip, Clip::Value(_)) || !rule.carries_nonfinite();
            view.checks_gradient = check.into();
            view.constants = rule.constants();
            view.rounding_key = rounding_key(schema, index, step);
            rules.push(rule);
        }
        rules
    }

    /// Tables that may have rows.
    fn in_use(&self) -> Vec<u32> {
        let used = self.lookup.host.rows_read.iter().enumerate().filter(|(_, ids)| **ids > 0);
        used.map(|(table, _)| table as u32).collect()
    }

    /// Brings views, and sums long runs.
    fn bring(&mut self) -> Result<Brought> {
        let (device, stream) = (self.device, self.stream);
        let tables = self.words.push(&self.tables);
        let words = self.words.upload(device, stream)?;
        let widest = self.tables.iter().map(|view| view.dim).max().unwrap_or(0) as usize;
        let stride = widest.next_multiple_of(4);
        let long = self.groups.long_runs_max();
        let long_sums = device.alloc::<f32>(long * stride)?;
        let address = words.address(stream)?;
        let view = WorkView {
            words: address,
            tables: address + tables * size_of::<u64>() as u64,
            list: 0,
            runs: RunsView {
                long_sums: long_sums.address(stream)?,
                long_stride: stride as u64,
                ..self.groups.view(stream)?
            },
            grad: self.pooled.grad.address(stream)?,
            stride: self.pooled.stride as u64,
            bags: self.lookup.host.bags as u64,
            wide: 0,
            wide_stride: 0,
            blocks: 0,
            unused: 0,
        };
        if long > 0 {
            let slices = widest.div_ceil(LONG_COLUMNS);
            let most = device.multiprocessors() as usize * BLOCKS_A_MULTIPROCESSOR_MAX as usize;
            let blocks = (long * slices).min(most.max(1)) as u32;
            let kernel = device.kernel(&UPDATE, "long_sums")?;
            let call = kernel.on(stream).value(view).value(self.tables.len() as u32);
            // SAFETY: the kernel's arguments: terms lie in the pooled gradient, whose length the
            // caller checked; there is room for all runs of more than `LONG_RUN` ids, each as
            // wide as the widest table.
            unsafe {
                call.value(slices as u32).launch(Launch::blocks(blocks, LONG_THREADS))?;
            }
        }
        Ok(Brought { words, view, _long_sums: long_sums })
    }

    /// Blocks for each of `list` with `threads` threads each.
    fn blocks(&self, list: &[u32], threads: u32) -> u32 {
        let most = u64::from(self.device.multiprocessors()) * BLOCKS_A_MULTIPROCESSOR_MAX;
        let threads_of = |&table: &u32| {
            let index = table as usize;
            self.lookup.host.rows_read[index] * u64::from(self.lanes[index].count)
        };
        let wanted = list.iter().map(threads_of).max().unwrap_or(0);
        wanted.div_ceil(threads.into()).min(most.max(1)) as u32
    }

    /// Moves rows: [`crate::LookupOps::update`].
    pub(super) fn update(
        mut self,
        stores: &mut Stores<Cuda>,
        reach: &[Reach<'_>],
        step: &SparseStep,
        squares: &[f32],
    ) -> Result<UpdateStats> {
        let (device, stream) = (self.device, self.stream);
        self.reach(reach);
        let rules = self.rules(step);
        for (index, (view, store)) in self.tables.iter_mut().zip(stores).enumerate() {
            let (weights, state) = store.planes_mut();
            (view.weights, view.state) = (weights.address(stream)?, state.address(stream)?);
            // Rounding goes by the row, whatever its number.
            if view.precision != precision_of(Precision::Fp32)
                && let Some(rows) = &self.lookup.host.numbered[index]
            {
                view.rows = self.words.push(&rows[..]);
            }
        }
        // Tables that share a rule share a launch.
        let mut lists: BTreeMap<&str, Vec<u32>> = BTreeMap::new();
        for table in self.in_use() {
            lists.entry(rules[table as usize].kernel()).or_default().push(table);
        }
        let lists: Vec<(&str, Vec<u32>, u64)> = lists
            .into_iter()
            .map(|(kernel, list)| {
                let at = self.words.push(&list);
                (kernel, list, at)
            })
            .collect();
        let brought = self.bring()?;
        let mut on_device = device.alloc::<f32>(squares.len())?;
        device.upload(stream, squares, &mut on_device, 0)?;
        let mut stats = device.alloc::<u64>(2 * self.tables.len())?;
        for (kernel, list, at) in &lists {
            let wide = self.wide(list)?;
            let view = WorkView {
                list: brought.words.address(stream)? + at * size_of::<u64>() as u64,
                wide: wide.spare.address(stream)?,
                wide_stride: wide.stride as u64,
                blocks: wide.blocks,
                ..brought.view
            };
            let kernel = device.kernel(&UPDATE, kernel)?;
            let call = kernel.on(stream).value(view).read(&on_device).write(&mut stats);
            let launch = Launch {
                shared_bytes: wide.shared_bytes as u32,
                ..Launch::blocks(wide.blocks.saturating_mul(list.len() as u32), wide.threads)
            };
            // SAFETY: the kernel's arguments. A store gives different rows different slots, and a
            // table's runs are different rows, so that no two teams share one; `stores` is
            // borrowed alone. Teams of wide rows have `wide.stride` numbers each.
            unsafe { call.launch(launch)? };
        }
        let mut counts = vec![0u64; 2 * self.tables.len()];
        device.download(stream, &stats, 0, &mut counts)?;
        Ok(UpdateStats {
            rows_updated: counts.iter().copied().step_by(2).collect(),
            rows_nonfinite: counts.iter().copied().skip(1).step_by(2).collect(),
        })
    }

    /// Where the teams of an update keep gradients of rows wider than they take at once: in shared
    /// memory, with as many threads a block as that allows; where not even a warp's fits, in a
    /// buffer.
    fn wide(&self, list: &[u32]) -> Result<Wide> {
        let dims = list.iter().map(|&table| {
            let (view, lanes) = (&self.tables[table as usize], self.lanes[table as usize]);
            if view.dim as usize > lanes.at_once() { view.dim as usize } else { 0 }
        });
        let stride = dims.max().unwrap_or(0).next_multiple_of(4);
        let bytes_a_warp = stride * size_of::<f32>();
        let most = (self.device.shared_bytes_max() as usize).saturating_sub(SHARED_BYTES_DECLARED);
        let fits = |threads: &u32| (threads / WARP) as usize * bytes_a_warp <= most;
        if let Some(threads) = [THREADS, THREADS / 2, THREADS / 4, WARP].into_iter().find(fits) {
            let shared_bytes = (threads / WARP) as usize * bytes_a_warp;
            let (blocks, spare) = (self.blocks(list, threads), self.device.alloc(0)?);
            return Ok(Wide { stride, threads, blocks, shared_bytes, spare });
        }
        let blocks = self.blocks(list, THREADS);
        let warps = blocks as usize * list.len() * (THREADS / WARP) as usize;
        let spare = self.device.alloc(warps * stride)?;
        Ok(Wide { stride, threads: THREADS, blocks, shared_bytes: 0, spare })
    }

    /// A launch of a kernel that only reads tables, over all of them.
    fn over_all(&mut self) -> Result<(Brought, Launch)> {
        let list = self.in_use();
        let at = self.words.push(&list);
        let mut brought = self.bring()?;
        let blocks = self.blocks(&list, THREADS);
        brought.view.list = brought.words.address(self.stream)? + at * size_of::<u64>() as u64;
        brought.view.blocks = blocks;
        Ok((brought, Launch::blocks(blocks.saturating_mul(list.len() as u32), THREADS)))
    }

    /// [`crate::LookupOps::row_gradients`].
    pub(super) fn gradients(mut self, marked: Marked<'_>, out: &mut [f32]) -> Result<()> {
        let (device, stream) = (self.device, self.stream);
        let runs = self.groups.table_runs(device, stream)?;
        let mut start = 0;
        for (view, pair) in self.tables.iter_mut().zip(runs.windows(2)) {
            view.out = start;
            start += u64::from(pair[1] - pair[0]) * view.dim;
        }
        let mut to = device.alloc::<f32>(out.len())?;
        let (marks, mark) = match marked {
            Marked::All => (&[][..], 0),
            Marked::With { marks, mark } => {
                // Rows that are not marked keep what is there.
                device.upload(stream, out, &mut to, 0)?;
                (marks, u32::from(mark))
            }
        };
        let mut on_device = device.alloc::<u8>(marks.len())?;
        device.upload(stream, marks, &mut on_device, 0)?;
        let (brought, launch) = self.over_all()?;
        let kernel = device.kernel(&UPDATE, "row_gradients")?;
        let call = kernel.on(stream).value(brought.view).read(&on_device).value(mark);
        // SAFETY: the kernel's arguments; `out` is as long as all rows, and there is a mark a row.
        unsafe { call.write(&mut to).launch(launch)? };
        Ok(device.download(stream, &to, 0, out)?)
    }

    /// [`crate::LookupOps::block_squares`].
    pub(super) fn block_squares(
        mut self,
        stores: &Stores<Cuda>,
        reach: &[Reach<'_>],
        step: &SparseStep,
        out: &mut [f32],
    ) -> Result<()> {
        let (device, stream) = (self.device, self.stream);
        self.reach(reach);
        let rules = self.rules(step);
        for ((view, store), rule) in self.tables.iter_mut().zip(stores).zip(rules) {
            view.weights = store.weights().address(stream)?;
            view.constants.l2 = rule.l2();
        }
        // Rows out of reach keep what is there.
        let mut to = device.alloc::<f32>(out.len())?;
        device.upload(stream, out, &mut to, 0)?;
        let (brought, launch) = self.over_all()?;
        let kernel = device.kernel(&UPDATE, "row_squares")?;
        // SAFETY: the kernel's arguments; `out` has a number for each block of columns of each row.
        unsafe { kernel.on(stream).value(brought.view).write(&mut to).launch(launch)? };
        Ok(device.download(stream, &to, 0, out)?)
    }

    /// [`crate::LookupOps::grad_sq_norm`].
    pub(super) fn sq_norm(mut self) -> Result<f64> {
        let (device, stream) = (self.device, self.stream);
        let host = &self.lookup.host;
        for (index, view) in self.tables.iter_mut().enumerate() {
            let table = &self.lookup.schema.tables()[index];
            // All but the row of zeros of a dynamic table, which is its last.
            view.reach_end = match &host.numbered[index] {
                Some(rows) => rows.partition_point(|&row| row < table.rows) as u64,
                None => table.rows,
            };
        }
        let mut norms = device.alloc::<f64>(self.lookup.count)?;
        let (brought, launch) = self.over_all()?;
        let kernel = device.kernel(&UPDATE, "row_norms")?;
        // SAFETY: the kernel's arguments; there are at most as many rows as ids.
        unsafe { kernel.on(stream).value(brought.view).write(&mut norms).launch(launch)? };
        let tables = self.tables.len();
        let mut sums = device.alloc::<f64>(tables)?;
        let kernel = device.kernel(&UPDATE, "sum_norms")?;
        let call = kernel.on(stream).read(&norms).value(brought.view.runs.table_runs);
        // SAFETY: the kernel's arguments, with a sum a table.
        unsafe { call.write(&mut sums).launch(Launch::blocks(tables as u32, THREADS))? };
        let mut host = vec![0.0; tables];
        device.download(stream, &sums, 0, &mut host)?;
        Ok(host.into_iter().sum())
    }
}

/// Where gradients of wide rows lie during an update, and the shape of its launch.
struct Wide {
    stride: usize,
    threads: u32,
    /// Blocks a table.
    blocks: u32,
    shared_bytes: usize,
    spare: CudaBuffer<f32>,
}
