//! Lookups and updates on the host's cores.
//!
//! Forward passes are cut by bags and updates by rows, so that every number has one owner and the
//! cut never shows in a result. Loops over rows prefetch: a batch's rows are scattered over tables
//! far larger than any cache, and the time of both passes is that of fetching them.

pub(crate) mod dedup;
mod group;
pub(crate) mod init;
mod lanes;
mod numbers;
mod pool;
mod rows;
mod rules;
mod update;

use std::borrow::Cow;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use rayon::prelude::*;
use tessera_cache::{Resident, RowStore};
use tessera_device::{Cpu, CpuStream, HostBuffer, Philox, Simd};

use crate::plan::COLUMN_BLOCK;
use crate::{
    FeatureRows, FeatureSpec, HostLookup, LookupOps, Marked, Pooling, Precision, Reach, Result,
    Row, Schema, SparseStep, Stores, UpdateStats,
};
use group::{Groups, Part};
use numbers::{Bf16, F16, Stored};
use pool::Bags;
use rows::RawRows;
pub(crate) use rules::Rule;
use update::{Gradients, Owner, TableUpdate, Weights};

/// Groupings kept for reuse: as many as batches are likely to be in flight.
const GROUPS_KEPT: usize = 8;

/// Tasks a thread, so that a slow one does not hold up the rest.
const TASKS_PER_THREAD: usize = 8;

/// Below this many numbers to read, waking the pool costs more than it saves.
const INLINE_NUMBERS: u64 = 1 << 14;

/// Memory that lookups and updates on the CPU reuse from step to step.
#[derive(Debug, Default)]
pub struct CpuScratch {
    groups: Mutex<Vec<Groups>>,
    owners: Mutex<Vec<Vec<Owner>>>,
}

/// A batch's lookup on the CPU: its rows where the resolver left them.
#[derive(Debug)]
pub struct CpuLookup {
    schema: Arc<Schema>,
    scratch: Arc<CpuScratch>,
    host: HostLookup,
    groups: OnceLock<Groups>,
}

impl Drop for CpuLookup {
    fn drop(&mut self) {
        if let Some(groups) = self.groups.take() {
            let mut kept = lock(&self.scratch.groups);
            if kept.len() < GROUPS_KEPT {
                kept.push(groups);
            }
        }
    }
}

/// Locks scratch memory. A panic elsewhere leaves nothing half done in it: entries are taken out
/// whole and put back whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CpuLookup {
    /// The grouping, made now unless it was made before.
    ///
    /// Two threads that ask at once both work and one result stays: waiting for the other while
    /// holding a worker of the pool could wait for ever.
    fn groups(&self, cpu: &Cpu) -> &Groups {
        if let Some(groups) = self.groups.get() {
            return groups;
        }
        let mut groups = lock(&self.scratch.groups).pop().unwrap_or_default();
        groups.plan(&self.schema, &self.host, cpu.threads());
        let parallel = self.parallel(cpu);
        let parts = groups.parts_mut();
        let fill = |part: &mut Part| part.fill(&self.schema, &self.host);
        if parallel {
            cpu.run(|| parts.par_iter_mut().with_max_len(1).for_each(fill));
        } else {
            parts.iter_mut().for_each(fill);
        }
        self.groups.get_or_init(|| groups)
    }

    /// Whether the work is worth more than one thread.
    fn parallel(&self, cpu: &Cpu) -> bool {
        let tables = self.schema.tables().iter().zip(&self.host.rows_read);
        let numbers = tables.map(|(spec, rows)| rows.saturating_mul(spec.dim as u64));
        cpu.threads() > 1 && numbers.fold(0, u64::saturating_add) >= INLINE_NUMBERS
    }

    /// Runs `work` for every part of the grouping with an owner of its own, then hands the
    /// owners, in the order of parts, to `finish`.
    fn each_part<R>(
        &self,
        cpu: &Cpu,
        work: impl Fn(usize, &Part, &mut Owner) + Sync,
        finish: impl FnOnce(&[Part], &[Owner]) -> R,
    ) -> R {
        let parts = self.groups(cpu).parts();
        let mut owners = lock(&self.scratch.owners).pop().unwrap_or_default();
        if owners.len() < parts.len() {
            owners.resize_with(parts.len(), Owner::default);
        }
        let used = &mut owners[..parts.len()];
        if self.parallel(cpu) {
            cpu.run(|| {
                used.par_iter_mut()
                    .zip(parts)
                    .enumerate()
                    .with_max_len(1)
                    .for_each(|(i, (owner, part))| work(i, part, owner));
            });
        } else {
            for (i, (owner, part)) in used.iter_mut().zip(parts).enumerate() {
                work(i, part, owner);
            }
        }
        let result = finish(parts, used);
        lock(&self.scratch.owners).push(owners);
        result
    }

    /// The gradients of those rows of a part whose places in it are `places`; `rows` are these
    /// rows of the table, and `slots` where they are.
    fn gradients<'a>(
        &'a self,
        part: &'a Part,
        places: Range<usize>,
        (rows, slots): (&'a [u64], &'a [u64]),
        squares: &'a [f32],
        grad: &'a [f32],
        stride: usize,
    ) -> Gradients<'a> {
        Gradients {
            dim: self.schema.tables()[part.table()].dim,
            rows,
            slots,
            squares,
            starts: &part.starts()[places.start..=places.end],
            terms: part.terms(),
            scales: part.scales(),
            grad,
            stride,
            bags: self.host.bags,
            columns: self.schema.columns_of(part.table()),
        }
    }

    /// As [`CpuLookup::gradients`], of all rows of a part, to read only: wherever they are.
    fn all_gradients<'a>(
        &'a self,
        part: &'a Part,
        grad: &'a [f32],
        stride: usize,
    ) -> Gradients<'a> {
        self.gradients(part, 0..part.rows().len(), (part.rows(), &[]), &[], grad, stride)
    }

    /// How many rows of a part an update may move: all but the row of zeros of a dynamic table,
    /// which is its last.
    fn moved(&self, part: &Part) -> usize {
        let (table, rows) = (&self.schema.tables()[part.table()], part.rows());
        let last = self.host.rows_of(part.table(), &rows[rows.len().saturating_sub(1)..]);
        let is_zeros = table.is_dynamic() && last.first() == Some(&table.rows);
        rows.len() - usize::from(is_zeros)
    }

    /// The rows of each part that are in reach.
    fn in_reach(&self, cpu: &Cpu, reach: &[Reach<'_>]) -> Vec<InReach<'_>> {
        let parts = self.groups(cpu).parts().iter();
        parts
            .map(|part| {
                let Reach { slots, rows } = &reach[part.table()];
                let first = part.rows().partition_point(|&row| row < rows.start);
                let end = part.rows().partition_point(|&row| row < rows.end).max(first);
                let numbers = &part.rows()[first..end];
                let rows = self.host.rows_of(part.table(), numbers);
                let slots = match slots {
                    None => Cow::Borrowed(numbers),
                    Some(slots) => numbers.iter().map(|&number| slots[number as usize]).collect(),
                };
                InReach { places: first..end, rows, slots }
            })
            .collect()
    }

    /// Cuts a forward pass over `bags` into tasks of about equal work, each some bags of one
    /// feature: a thread stays with one table, whose pages it then knows, for as long as it can.
    fn pool_tasks(&self, threads: usize, bags: &Range<usize>) -> Vec<PoolTask> {
        let features = self.schema.features().iter().zip(&self.host.features);
        let cost_to = |table: usize, offsets: &[u64], bag: usize| {
            let spec = &self.schema.tables()[table];
            let ids = offsets[bag] - offsets[bags.start];
            ids * (spec.dim * spec.precision.bytes() + 16) as u64
                + ((bag - bags.start) * spec.dim * 4) as u64
        };
        let cost_of = |(spec, feature): (&FeatureSpec, &FeatureRows)| {
            cost_to(spec.table, &feature.offsets, bags.end)
        };
        let wanted = TASKS_PER_THREAD * threads;
        let share = features.clone().map(cost_of).sum::<u64>() / wanted as u64 + 1;
        let mut tasks = Vec::with_capacity(features.len() + wanted);
        for (index, (spec, feature)) in features.enumerate() {
            let cost = cost_of((spec, feature));
            let parts = cost.div_ceil(share).max(1);
            let mut first = bags.start;
            for part in 1..=parts {
                let upto = cost / parts * part;
                let enough = |bag| cost_to(spec.table, &feature.offsets, bag) >= upto;
                let end = match part == parts {
                    true => bags.end,
                    false => first_bag(first..bags.end, enough),
                };
                tasks.push(PoolTask { feature: index, bags: first..end });
                first = end;
            }
        }
        tasks
    }

    /// Pools some bags of a feature into `out`, (bags, stride).
    ///
    /// # Safety
    /// While this runs, nobody else reaches the feature's columns of these bags.
    unsafe fn pool(
        &self,
        simd: Simd,
        stores: &Stores<Cpu>,
        reach: &[Reach<'_>],
        task: &PoolTask,
        out: &RawRows<'_, f32>,
    ) {
        let (spec, feature) =
            (&self.schema.features()[task.feature], &self.host.features[task.feature]);
        let (table, store) = (&self.schema.tables()[spec.table], &stores[spec.table]);
        let plane: &[u8] = store.weights();
        let numbers: &[u64] = bytemuck::cast_slice(&feature.rows);
        let offsets = &feature.offsets[task.bags.start..=task.bags.end];
        // Where slots are not rows they are looked up here, for the ids of this task.
        let ids = offsets[0] as usize..offsets[task.bags.len()] as usize;
        let (mut moved_slots, mut moved_offsets) = (Vec::new(), Vec::new());
        let (slots, weights, offsets) = match reach[spec.table].slots {
            None => (numbers, feature.weights.as_deref(), offsets),
            Some(slots) => {
                moved_slots.extend(numbers[ids.clone()].iter().map(|&n| slots[n as usize]));
                moved_offsets.extend(offsets.iter().map(|offset| offset - offsets[0]));
                let weights = feature.weights.as_ref().map(|weights| &weights[ids]);
                (&moved_slots[..], weights, &moved_offsets[..])
            }
        };
        macro_rules! bags {
            () => {
                &Bags {
                    table: bytemuck::cast_slice(plane),
                    dim: table.dim,
                    slots,
                    weights,
                    offsets,
                    first: task.bags.start,
                    mean: table.pooling == Pooling::Mean,
                    column: spec.column,
                }
            };
        }
        // SAFETY: the caller's guarantee, handed on.
        unsafe {
            match table.precision {
                Precision::Fp32 => pool::pool_fp32(simd, bags!(), out),
                Precision::Fp16 if f16c(simd) => pool::pool_f16c(simd, bags!(), out),
                Precision::Fp16 => pool::pool_fp16(simd, bags!(), out),
                Precision::Bf16 => pool::pool_bf16(simd, bags!(), out),
            }
        }
    }
}

/// Rows of a part that an operation may touch.
struct InReach<'a> {
    /// Their places in the part.
    places: Range<usize>,
    /// The table's rows.
    rows: Cow<'a, [u64]>,
    /// Where they are.
    slots: Cow<'a, [u64]>,
}

/// Some bags of one feature.
struct PoolTask {
    feature: usize,
    bags: Range<usize>,
}

/// The first of `bags` that is `enough`, or their end; `enough` holds from some bag on.
fn first_bag(bags: Range<usize>, enough: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (bags.start, bags.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if enough(middle) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    low
}

/// Cuts `out` into successive pieces of these lengths, each for one owner to lock.
fn cut(mut out: &mut [f32], lengths: impl Iterator<Item = usize>) -> Vec<Mutex<&mut [f32]>> {
    let piece = |length| {
        let (piece, rest) = std::mem::take(&mut out).split_at_mut(length);
        out = rest;
        Mutex::new(piece)
    };
    lengths.map(piece).collect()
}

/// Where the rows of each part begin among the rows of all, and where the last end.
fn row_starts(parts: &[Part]) -> Vec<usize> {
    let mut end = 0;
    let ends = parts.iter().map(|part| {
        end += part.rows().len();
        end
    });
    std::iter::once(0).chain(ends).collect()
}

/// Reads a row of 16-bit numbers as float32.
fn load_row<E: Stored>(bytes: &[u8], row: &mut [f32]) {
    for (to, &from) in row.iter_mut().zip(bytemuck::cast_slice::<u8, E>(bytes)) {
        *to = from.load();
    }
}

/// Whether `simd` comes with conversions of float16.
fn f16c(simd: Simd) -> bool {
    simd != Simd::Baseline
}

/// The key of the generator by which an update at `step` rounds rows of table `table`.
pub(crate) fn rounding_key(schema: &Schema, table: usize, step: &SparseStep) -> u64 {
    // First values use counters below 2^62 (columns / 4) in the high half; a step's key comes
    // from one that they never reach.
    let name = &schema.tables()[table].name;
    let words = Philox::for_name(schema.seed(), name).block(step.t, u64::MAX);
    u64::from(words[0]) | u64::from(words[1]) << 32
}

/// What an update at `step` needs of table `table`.
fn table_update<'a>(
    schema: &Schema,
    table: usize,
    store: &'a mut dyn RowStore<Cpu>,
    simd: Simd,
    step: &SparseStep,
) -> TableUpdate<'a> {
    let spec = &schema.tables()[table];
    let (weights, state) = store.planes_mut();
    let dim = spec.dim;
    let weights = match spec.precision {
        Precision::Fp32 => Weights::Fp32(RawRows::new(bytemuck::cast_slice_mut(weights), dim)),
        Precision::Fp16 if f16c(simd) => {
            Weights::F16c(RawRows::new(bytemuck::cast_slice_mut(weights), dim))
        }
        Precision::Fp16 => Weights::Fp16(RawRows::new(bytemuck::cast_slice_mut(weights), dim)),
        Precision::Bf16 => Weights::Bf16(RawRows::new(bytemuck::cast_slice_mut(weights), dim)),
    };
    let all = spec.optimizer.state_columns(dim);
    let first = spec.optimizer.state().first().map_or(0, |tensor| tensor.columns(dim));
    TableUpdate {
        rule: Rule::new(&spec.optimizer, step),
        clip: step.clip,
        weights,
        state: RawRows::new(bytemuck::cast_slice_mut(state), all),
        state_columns: (first, all - first),
        rounding: Philox::new(rounding_key(schema, table, step)),
        window: schema.windows()[table],
    }
}

impl LookupOps for Cpu {
    type Lookup = CpuLookup;
    type Scratch = CpuScratch;

    fn stage(
        &self,
        _: &CpuStream,
        schema: &Arc<Schema>,
        scratch: &Arc<CpuScratch>,
        lookup: HostLookup,
    ) -> Result<CpuLookup> {
        Ok(CpuLookup {
            schema: Arc::clone(schema),
            scratch: Arc::clone(scratch),
            host: lookup,
            groups: OnceLock::new(),
        })
    }

    fn group(&self, _: &CpuStream, lookup: &CpuLookup) -> Result<()> {
        lookup.groups(self);
        Ok(())
    }

    fn unique_counts(&self, _: &CpuStream, lookup: &CpuLookup) -> Result<Vec<u64>> {
        let mut counts = vec![0; lookup.schema.tables().len()];
        for part in lookup.groups(self).parts() {
            counts[part.table()] += part.rows().len() as u64;
        }
        Ok(counts)
    }

    fn unique_rows(&self, _: &CpuStream, lookup: &CpuLookup, table: usize) -> Result<Vec<Row>> {
        let parts = lookup.groups(self).parts().iter().filter(|part| part.table() == table);
        let rows = parts.map(|part| lookup.host.rows_of(table, part.rows()));
        Ok(rows.flat_map(|rows| rows.iter().copied().map(Row).collect::<Vec<_>>()).collect())
    }

    fn initialize(
        &self,
        _: &CpuStream,
        schema: &Schema,
        table: usize,
        store: &mut Resident<Self>,
    ) -> Result<()> {
        let (spec, window) = (&schema.tables()[table], &schema.windows()[table]);
        let weights = store.planes_mut().0;
        let generator = Philox::for_name(schema.seed(), &spec.name);
        self.run(|| init::fill(spec, window, generator, weights));
        Ok(())
    }

    fn number_rows(&self, schema: &Schema, which: &[bool], lookup: &mut HostLookup) {
        lookup.number_rows(schema, which, |tables, number| {
            if self.threads() > 1
                && tables.iter().map(|table| table.ids()).sum::<u64>() >= INLINE_NUMBERS
            {
                self.run(|| tables.par_iter_mut().with_max_len(1).for_each(number));
            } else {
                tables.iter_mut().for_each(number);
            }
        });
    }

    fn numbers_of(
        &self,
        _: &CpuStream,
        lookup: &CpuLookup,
        table: usize,
        bags: Range<usize>,
    ) -> Result<Vec<u64>> {
        Ok(lookup.host.numbers_of(&lookup.schema, table, bags))
    }

    fn forward(
        &self,
        _: &CpuStream,
        stores: &Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &CpuLookup,
        bags: Range<usize>,
        out: &mut HostBuffer<f32>,
        stride: usize,
    ) -> Result<()> {
        let out = &mut out[..lookup.host.bags * stride];
        if out.is_empty() {
            return Ok(());
        }
        let simd = self.simd();
        let out = RawRows::new(out, stride);
        let parallel = lookup.parallel(self);
        let tasks = lookup.pool_tasks(if parallel { self.threads() } else { 1 }, &bags);
        let work = |task: &PoolTask| {
            // SAFETY: the features' columns do not overlap, says their schema, and tasks of one
            // feature have different bags; `out` is the buffer's only borrow.
            unsafe { lookup.pool(simd, stores, reach, task, &out) };
        };
        if parallel {
            self.run(|| tasks.par_iter().with_max_len(1).for_each(work));
        } else {
            tasks.iter().for_each(work);
        }
        Ok(())
    }

    fn update(
        &self,
        _: &CpuStream,
        stores: &mut Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &CpuLookup,
        grad: &HostBuffer<f32>,
        stride: usize,
        step: &SparseStep,
        squares: &[f32],
    ) -> Result<UpdateStats> {
        let (simd, schema) = (self.simd(), &lookup.schema);
        let in_reach = lookup.in_reach(self, reach);
        let tables: Vec<TableUpdate<'_>> = stores
            .iter_mut()
            .enumerate()
            .map(|(table, store)| table_update(schema, table, &mut **store, simd, step))
            .collect();
        let starts = row_starts(lookup.groups(self).parts());
        let work = |i: usize, part: &Part, owner: &mut Owner| {
            let InReach { places, rows, slots } = &in_reach[i];
            let squares = match squares {
                [] => squares,
                squares => &squares[starts[i]..][places.clone()],
            };
            let place = (&rows[..], &slots[..]);
            let gradients = lookup.gradients(part, places.clone(), place, squares, grad, stride);
            // SAFETY: the parts of a table hold different rows, each once, and a store gives
            // different rows different slots, so no two owners share one; `tables` holds the
            // planes' only borrow.
            owner.counts = unsafe {
                update::update_rows(simd, &tables[part.table()], &gradients, &mut owner.row)
            };
        };
        Ok(lookup.each_part(self, work, |parts, owners| {
            let mut stats = UpdateStats {
                rows_updated: vec![0; schema.tables().len()],
                rows_nonfinite: vec![0; schema.tables().len()],
            };
            for (part, owner) in parts.iter().zip(owners) {
                stats.rows_updated[part.table()] += owner.counts.updated;
                stats.rows_nonfinite[part.table()] += owner.counts.nonfinite;
            }
            stats
        }))
    }

    fn row_gradients(
        &self,
        _: &CpuStream,
        lookup: &CpuLookup,
        grad: &HostBuffer<f32>,
        stride: usize,
        marked: Marked<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        let simd = self.simd();
        let starts = row_starts(lookup.groups(self).parts());
        let numbers_of = |part: &Part| part.rows().len() * lookup.schema.tables()[part.table()].dim;
        let pieces = cut(out, lookup.groups(self).parts().iter().map(numbers_of));
        let work = |i: usize, part: &Part, owner: &mut Owner| {
            let gradients = lookup.all_gradients(part, grad, stride);
            let marked = match marked {
                Marked::All => marked,
                Marked::With { marks, mark } => {
                    Marked::With { marks: &marks[starts[i]..starts[i + 1]], mark }
                }
            };
            update::row_gradients(simd, &gradients, marked, &mut owner.row, &mut lock(&pieces[i]));
        };
        lookup.each_part(self, work, |_, _| ());
        Ok(())
    }

    fn block_squares(
        &self,
        _: &CpuStream,
        stores: &Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &CpuLookup,
        grad: &HostBuffer<f32>,
        stride: usize,
        step: &SparseStep,
        out: &mut [f32],
    ) -> Result<()> {
        let (simd, spec) = (self.simd(), &lookup.schema.tables()[0]);
        let blocks = spec.dim.div_ceil(COLUMN_BLOCK);
        let l2 = Rule::new(&spec.optimizer, step).l2();
        let plane: &[u8] = stores[0].weights();
        let row_bytes = spec.dim * spec.precision.bytes();
        let read = |slot: u64, row: &mut [f32]| {
            let bytes = &plane[slot as usize * row_bytes..][..row_bytes];
            match spec.precision {
                Precision::Fp32 => row.copy_from_slice(bytemuck::cast_slice(bytes)),
                Precision::Fp16 => load_row::<F16<false>>(bytes, row),
                Precision::Bf16 => load_row::<Bf16>(bytes, row),
            }
        };
        let pieces =
            cut(out, lookup.groups(self).parts().iter().map(|part| part.rows().len() * blocks));
        let in_reach = lookup.in_reach(self, reach);
        let work = |i: usize, part: &Part, owner: &mut Owner| {
            let InReach { places, rows, slots } = &in_reach[i];
            let place = (&rows[..], &slots[..]);
            let gradients = lookup.gradients(part, places.clone(), place, &[], grad, stride);
            let out = &mut lock(&pieces[i])[places.start * blocks..places.end * blocks];
            update::block_squares(simd, &gradients, step.clip, l2, &read, &mut owner.row, out);
        };
        lookup.each_part(self, work, |_, _| ());
        Ok(())
    }

    fn grad_sq_norm(
        &self,
        _: &CpuStream,
        lookup: &CpuLookup,
        grad: &HostBuffer<f32>,
        stride: usize,
    ) -> Result<f64> {
        let simd = self.simd();
        let work = |_, part: &Part, owner: &mut Owner| {
            let gradients = lookup.all_gradients(part, grad, stride);
            update::square_norms(simd, &gradients, &mut owner.row, &mut owner.norms);
        };
        Ok(lookup.each_part(self, work, |parts, owners| {
            let mut sums = vec![0.0f64; lookup.schema.tables().len()];
            for (part, owner) in parts.iter().zip(owners) {
                for norm in &owner.norms[..lookup.moved(part)] {
                    sums[part.table()] += norm;
                }
            }
            sums.into_iter().sum()
        }))
    }
}
