//! Grouping of a batch's ids on a GPU: kernels of `group.cu`, one after another on a stream.
//!
//! Nothing waits for the device: what the number of different rows decides is decided there, and
//! lists have room for as many rows as there are ids.

use std::sync::OnceLock;

use tessera_device::cuda::{CudaBuffer, CudaEvent, CudaStream, Kernel, Launch};
use tessera_device::{Cuda, Device};

use super::staged::CudaLookup;
use super::views::{BagsView, RunsView, Words};
use super::{GROUP, LONG_RUN, THREADS};
use crate::{Pooling, Result};

/// Ids of a tile; digits of a pass, and their bits: `TILE`, `DIGITS` in the kernels.
const TILE: u64 = 2048;
const DIGITS: usize = 256;
const DIGIT_BITS: u32 = 8;

/// Lanes that expand a bag.
const LANES_A_BAG: u64 = 8;

/// The most blocks of a kernel whose threads take several items, a multiprocessor.
const BLOCKS_A_MULTIPROCESSOR_MAX: u64 = 16;

/// The different rows of a batch and their occurrences.
///
/// A row's key is its number, or row, and the table's base: keys of a table follow the former's.
#[derive(Debug)]
pub(super) struct Groups {
    keys: CudaBuffer<u64>,   // (ids), of which (runs) are in use
    scales: CudaBuffer<f32>, // (ids), or none
    lists: CudaBuffer<u32>,
    places: Places,
    /// Where each table's keys begin; then where the last one's end.
    pub(super) key_bases: Vec<u64>,
    /// Whether terms of each table have scales.
    pub(super) scaled: Vec<bool>,
    /// Ids.
    count: usize,
    ready: CudaEvent,
    /// First run of each table, and the number of all, once somebody asked.
    table_runs: OnceLock<Vec<u32>>,
}

/// Where lists begin among the 32-bit ones.
#[derive(Clone, Copy, Debug)]
struct Places {
    table_runs: usize, // (tables + 1)
    long_count: usize, // 1
    starts: usize,     // (ids + 1)
    terms: usize,      // (ids)
    long_runs: usize,  // (ids / LONG_RUN)
    long_index: usize, // (ids)
    end: usize,
}

impl Places {
    fn new(tables: usize, ids: usize) -> Self {
        let (table_runs, long_count) = (0, tables + 1);
        let starts = long_count + 1;
        let terms = starts + ids + 1;
        let long_runs = terms + ids;
        let long_index = long_runs + ids / LONG_RUN;
        Self { table_runs, long_count, starts, terms, long_runs, long_index, end: long_index + ids }
    }
}

/// An address behind `elements` of 32 bits.
fn behind(address: u64, elements: usize) -> u64 {
    address + (elements * size_of::<u32>()) as u64
}

/// Kernels of the grouping on one stream.
struct Queue<'a> {
    device: &'a Cuda,
    stream: &'a CudaStream,
}

impl Queue<'_> {
    fn kernel(&self, name: &str) -> Result<Kernel> {
        Ok(self.device.kernel(&GROUP, name)?)
    }

    /// Blocks for `items` items a thread takes several of.
    fn blocks(&self, items: u64) -> Launch {
        let most = u64::from(self.device.multiprocessors()) * BLOCKS_A_MULTIPROCESSOR_MAX;
        let blocks = items.div_ceil(THREADS.into()).min(most.max(1));
        Launch::blocks(blocks as u32, THREADS)
    }
}

impl Groups {
    pub(super) fn new(device: &Cuda, stream: &CudaStream, lookup: &CudaLookup) -> Result<Self> {
        let schema = &*lookup.schema;
        let tables = schema.tables().len();
        let mut key_bases = vec![0u64];
        for table in 0..tables {
            // Rows that are not numbered lie in memory, so that all of them have 64-bit numbers.
            let end = lookup.host.key_end(schema, table);
            key_bases.push(key_bases[table].saturating_add(end));
        }
        let scaled: Vec<bool> = (0..tables)
            .map(|table| {
                schema.tables()[table].pooling == Pooling::Mean
                    || schema.features_of(table).iter().any(|&f| lookup.weighted[f])
            })
            .collect();
        let count = lookup.count;
        let places = Places::new(tables, count);
        let with_scales = if scaled.contains(&true) { count } else { 0 };
        let keys = device.alloc(count)?;
        let scales = device.alloc(with_scales)?;
        let lists = device.alloc(places.end)?;
        if count > 0 {
            lookup.await_on(device, stream)?;
            let queue = Queue { device, stream };
            let to = Lists { keys: &keys, scales: &scales, lists: &lists, places };
            queue.group(lookup, &key_bases, &to)?;
        }
        let (ready, table_runs) = (device.record(stream)?, OnceLock::new());
        Ok(Self { keys, scales, lists, places, key_bases, scaled, count, ready, table_runs })
    }

    /// Makes `stream` wait until the grouping is there.
    pub(super) fn await_on(&self, device: &Cuda, stream: &CudaStream) -> Result<()> {
        Ok(device.wait(stream, &self.ready)?)
    }

    /// What kernels see of it, for work that is about to be given to `stream`.
    pub(super) fn view(&self, stream: &CudaStream) -> Result<RunsView> {
        let lists = self.lists.address(stream)?;
        Ok(RunsView {
            keys: self.keys.address(stream)?,
            starts: behind(lists, self.places.starts),
            terms: behind(lists, self.places.terms),
            scales: self.scales.address(stream)?,
            table_runs: behind(lists, self.places.table_runs),
            long_count: behind(lists, self.places.long_count),
            long_runs: behind(lists, self.places.long_runs),
            long_index: behind(lists, self.places.long_index),
            long_sums: 0,
            long_stride: 0,
        })
    }

    /// The most runs that blocks of their own sum.
    pub(super) fn long_runs_max(&self) -> usize {
        self.count / LONG_RUN
    }

    /// First run of each table, then the number of all runs. The host waits for it once.
    pub(super) fn table_runs(&self, device: &Cuda, stream: &CudaStream) -> Result<&[u32]> {
        if let Some(runs) = self.table_runs.get() {
            return Ok(runs);
        }
        let mut runs = vec![0; self.key_bases.len()];
        device.download(stream, &self.lists, self.places.table_runs, &mut runs)?;
        Ok(self.table_runs.get_or_init(|| runs))
    }

    /// The different rows of a table, or their numbers; ascending.
    pub(super) fn numbers(
        &self,
        device: &Cuda,
        stream: &CudaStream,
        table: usize,
    ) -> Result<Vec<u64>> {
        let runs = self.table_runs(device, stream)?;
        let (first, end) = (runs[table] as usize, runs[table + 1] as usize);
        let mut keys = vec![0; end - first];
        device.download(stream, &self.keys, first, &mut keys)?;
        keys.iter_mut().for_each(|key| *key -= self.key_bases[table]);
        Ok(keys)
    }
}

/// Where a grouping goes. The grouping is being made, so that its queue alone writes these.
struct Lists<'a> {
    keys: &'a CudaBuffer<u64>,
    scales: &'a CudaBuffer<f32>,
    lists: &'a CudaBuffer<u32>,
    places: Places,
}

impl Queue<'_> {
    /// Queues all kernels of a grouping of at least one id.
    fn group(&self, lookup: &CudaLookup, key_bases: &[u64], to: &Lists<'_>) -> Result<()> {
        let (device, stream) = (self.device, self.stream);
        let n = lookup.count;
        let tiles = (n as u64).div_ceil(TILE) as u32;
        // Two lists of keys, and of places; terms and scales in the order of ids; counts.
        let keys = device.alloc::<u64>(2 * n)?;
        let scales = device.alloc::<f32>(to.scales.len())?;
        let counts = DIGITS * tiles as usize;
        let small = device.alloc::<u32>(3 * n + counts + DIGITS + tiles as usize + 1)?;
        let keys_at = |half: usize| -> Result<u64> {
            Ok(keys.address(stream)? + (half * n * size_of::<u64>()) as u64)
        };
        let small_at = small.address(stream)?;
        let places_at = |half: usize| behind(small_at, half * n);
        let terms_at = behind(small_at, 2 * n);
        let counts_at = behind(small_at, 3 * n);
        let totals_at = behind(counts_at, counts);
        let heads_at = behind(totals_at, DIGITS);
        let runs_at = behind(heads_at, tiles as usize);

        let words = self.expand(lookup, key_bases, (keys_at(0)?, terms_at, &scales))?;
        let each_tile = Launch::blocks(tiles, THREADS);
        let bits = u64::BITS - key_bases[key_bases.len() - 1].leading_zeros();
        let mut now = 0;
        let mut places = 0u64; // a key's place is its own, at first
        for shift in (0..bits).step_by(DIGIT_BITS as usize) {
            let kernel = self.kernel("radix_count")?;
            let call = kernel.on(stream).value(keys_at(now)?).value(n as u64).value(shift);
            // SAFETY: here and below: the kernel's arguments, whose lists were made for `n` ids,
            // `tiles` tiles and `DIGITS` digits above, and are used by this stream alone.
            unsafe { call.value(counts_at).launch(each_tile)? };
            let kernel = self.kernel("radix_scan")?;
            let call = kernel.on(stream).value(counts_at).value(totals_at).value(tiles);
            // SAFETY: as above.
            unsafe { call.launch(Launch::blocks(DIGITS as u32, THREADS))? };
            let kernel = self.kernel("radix_scatter")?;
            let call = kernel.on(stream).value(keys_at(now)?).value(places).value(n as u64);
            let call = call.value(shift).value(counts_at).value(totals_at);
            let call = call.value(keys_at(1 - now)?).value(places_at(1 - now));
            // SAFETY: as above.
            unsafe { call.launch(each_tile)? };
            now = 1 - now;
            places = places_at(now);
        }

        let sorted = keys_at(now)?;
        let lists = to.lists.address(stream)?;
        let kernel = self.kernel("count_heads")?;
        let call = kernel.on(stream).value(sorted).value(n as u64).value(heads_at);
        // SAFETY: as above.
        unsafe { call.launch(each_tile)? };
        let kernel = self.kernel("scan_heads")?;
        let call = kernel.on(stream).value(heads_at).value(tiles).value(runs_at);
        // SAFETY: as above.
        unsafe { call.launch(Launch::blocks(1, THREADS))? };
        let kernel = self.kernel("write_runs")?;
        let call = kernel.on(stream).value(sorted).value(places).value(n as u64).value(heads_at);
        let call = call.value(terms_at).read(&scales).value(to.keys.address(stream)?);
        let starts = behind(lists, to.places.starts);
        let call = call.value(starts).value(behind(lists, to.places.terms));
        let call = call.value(to.scales.address(stream)?);
        // SAFETY: as above; there is room for `n` runs.
        unsafe { call.launch(each_tile)? };
        let tables = key_bases.len() - 1;
        let kernel = self.kernel("find_tables")?;
        let call = kernel.on(stream).value(to.keys.address(stream)?).value(runs_at).read(&words);
        let call = call.value(tables as u32).value(behind(lists, to.places.table_runs));
        // SAFETY: as above; `words` begins with the tables' bases.
        unsafe { call.launch(Launch::for_items(tables as u64 + 1, THREADS))? };
        if n > LONG_RUN {
            let kernel = self.kernel("find_long")?;
            let call = kernel.on(stream).value(starts).value(runs_at);
            let call = call.value(behind(lists, to.places.long_count));
            let call = call.value(behind(lists, to.places.long_runs));
            let call = call.value(behind(lists, to.places.long_index));
            // SAFETY: as above; fewer than `n / LONG_RUN` runs have more than `LONG_RUN` ids.
            unsafe { call.launch(self.blocks(n as u64))? };
        }
        Ok(())
    }

    /// Queues the kernel that makes keys, terms and scales of ids. Returns the lists that it brought,
    /// which begin with the tables' bases.
    fn expand(
        &self,
        lookup: &CudaLookup,
        key_bases: &[u64],
        (keys, terms, scales): (u64, u64, &CudaBuffer<f32>),
    ) -> Result<CudaBuffer<u64>> {
        let (schema, bags) = (&*lookup.schema, lookup.host.bags as u64);
        let mut words = Words::default();
        words.push(key_bases);
        let mut views = Vec::with_capacity(schema.features().len());
        for (table, spec) in schema.tables().iter().enumerate() {
            for (place, &feature) in schema.features_of(table).iter().enumerate() {
                views.push(BagsView {
                    offsets: lookup.offsets_of(self.stream, feature)?,
                    first_id: lookup.first_ids[feature],
                    key_base: key_bases[table],
                    // Pairs of a table's features and bags fit 32 bits: the lookup was checked.
                    first_term: (place as u64 * bags) as u32,
                    mean: (spec.pooling == Pooling::Mean).into(),
                    weighted: lookup.weighted[feature].into(),
                    unused: 0,
                });
            }
        }
        let at = words.push(&views);
        let words = words.upload(self.device, self.stream)?;
        let all = views.len() as u64 * bags;
        let kernel = self.kernel("expand_ids")?;
        let call = kernel.on(self.stream).read_from(&words, at as usize).value(bags).value(all);
        let call = call.read(&lookup.ids).read(&lookup.weights).value(keys).value(terms);
        // SAFETY: the kernel's arguments: it writes a key, a term and, where there are any, a
        // scale for each id, which `keys`, `terms` and `scales` have room for.
        unsafe {
            call.value(scales.address(self.stream)?).launch(self.blocks(all * LANES_A_BAG))?;
        }
        Ok(words)
    }
}
