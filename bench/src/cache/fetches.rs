//! Fetches through a tiered store: rows all in one tier, and batches of a law of popularity.
//!
//! A request's rows are different and ascending, as training fetches them. The clock runs from
//! asking for them until they are in slots; then, outside the clock, rows are held against what
//! they should be, each is written (its first byte counts that) and given back as changed.

use std::sync::Arc;
use std::time::Instant;

use tessera_cache::{
    ColdRows, FirstRows, Lease, PlanesMut, RowLayout, RowStore, StoreStats, Tiered, TieredOptions,
    slot_bytes,
};
use tessera_device::{Cpu, CpuStream, Device};

use super::point::Shares;
use super::rows::{check, fill_all};
use crate::Result;
use crate::draw::{Rng, Rows};
use crate::knobs::Hots;

/// Rows of a fetch that are held against what they should be.
const CHECKED: usize = 64;

/// What measured fetches took and found.
#[derive(Clone, Debug)]
pub struct Fetches {
    /// Seconds of each.
    pub seconds: Vec<f64>,
    /// Rows of one, on average.
    pub rows: f64,
    /// Where they lay.
    pub shares: Shares,
    /// Share of the time spent waiting for the SSD to read.
    pub ssd_wait: f64,
}

/// A table in tiers.
pub struct Table<'a> {
    cpu: &'a Cpu,
    stream: CpuStream,
    store: Tiered<Cpu>,
    layout: RowLayout,
    /// How often each row was written.
    counts: &'a mut [u8],
    rng: Rng,
}

impl<'a> Table<'a> {
    /// A table of as many rows as `counts`, written so often as it says, which are in `cold` if
    /// there is one. Without one, nothing was written.
    ///
    /// Errors: no memory; a device tier without room for a row.
    pub fn new(
        cpu: &'a Cpu,
        layout: RowLayout,
        options: &TieredOptions,
        cold: Option<Arc<dyn ColdRows>>,
        counts: &'a mut [u8],
    ) -> Result<Self> {
        if cold.is_none() {
            counts.fill(0);
        }
        let first: Arc<FirstRows> =
            Arc::new(move |rows: &[u64], to: PlanesMut<'_>| fill_all(layout, rows, |_| 0, to));
        let store = Tiered::new(cpu, counts.len() as u64, layout, options, cold, first)?;
        Ok(Self { cpu, stream: cpu.stream()?, store, layout, counts, rng: Rng::new(5) })
    }

    /// Fetches rows; gives the seconds that it took.
    fn fetch(&mut self, rows: &[u64]) -> Result<(Lease, f64)> {
        let start = Instant::now();
        let lease = self.store.prefetch(self.cpu, &self.stream, rows)?;
        Ok((lease, start.elapsed().as_secs_f64()))
    }

    /// Holds some of a lease's rows, or all, against what they should be.
    fn check(&mut self, rows: &[u64], lease: &Lease, all: bool) -> Result<()> {
        let RowLayout { weight_bytes, state_bytes } = self.layout;
        let slots = lease.slots(rows);
        let some = if all { rows.len() } else { CHECKED.min(rows.len()) };
        for i in 0..some {
            let i = if all { i } else { self.rng.below(rows.len() as u64) as usize };
            let (row, slot) = (rows[i], slots[i] as usize);
            let (weights, state) = self.store.planes_mut();
            let weights = &weights[slot * weight_bytes..][..weight_bytes];
            let state = &state[slot * state_bytes..][..state_bytes];
            check(row, (weights, state), self.counts[row as usize])?;
        }
        Ok(())
    }

    /// Writes a lease's rows.
    fn write(&mut self, rows: &[u64], lease: &Lease) -> Result<()> {
        let weights = self.store.planes_mut().0;
        for (&row, &slot) in rows.iter().zip(lease.slots(rows)) {
            let first = &mut weights[slot as usize * self.layout.weight_bytes];
            *first = first.wrapping_add(1);
            let count = &mut self.counts[row as usize];
            *count = count.wrapping_add(1);
        }
        Ok(self.store.commit(lease)?)
    }

    /// Fetches what `request` gives, `warmup` times unmeasured, then `iterations` times.
    ///
    /// Errors: a wrong row; what the store says.
    pub fn measure(
        &mut self,
        (warmup, iterations): (usize, usize),
        writes: bool,
        mut request: impl FnMut() -> Vec<u64>,
    ) -> Result<Fetches> {
        let mut before = StoreStats::default();
        let (mut seconds, mut rows_sum) = (Vec::with_capacity(iterations), 0);
        for number in 0..warmup + iterations {
            if number == warmup {
                before = self.store.stats();
            }
            let rows = request();
            let (lease, took) = self.fetch(&rows)?;
            self.check(&rows, &lease, number == 0 || number + 1 == warmup + iterations)?;
            if writes {
                self.write(&rows, &lease)?;
            }
            if number >= warmup {
                seconds.push(took);
                rows_sum += rows.len();
            }
        }
        let after = self.store.stats();
        let total: f64 = seconds.iter().sum();
        Ok(Fetches {
            rows: rows_sum as f64 / iterations.max(1) as f64,
            shares: Shares::between(&before, &after),
            ssd_wait: (after.cold_wait_s - before.cold_wait_s) / total.max(f64::MIN_POSITIVE),
            seconds,
        })
    }

    /// Writes everything down to the SSD.
    ///
    /// Errors: what the store says.
    pub fn flush(&mut self) -> Result<()> {
        Ok(self.store.flush(self.cpu, &self.stream)?)
    }
}

/// The different rows of a batch, ascending.
#[must_use]
pub fn batch(law: &Rows, samples: usize, hots: Hots, rng: &mut Rng) -> Vec<u64> {
    let (low, kinds) = (hots.mean - hots.spread, 2 * hots.spread as u64 + 1);
    let ids: u64 = (0..samples).map(|_| low as u64 + rng.below(kinds)).sum();
    let mut rows: Vec<u64> = (0..ids).map(|_| law.draw(rng)).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// Sets of rows, spread over the whole table, that go round it.
#[derive(Clone, Debug)]
pub struct Cycle {
    runs: u64,
    each: u64,
    next: u64,
}

impl Cycle {
    /// Sets of `each` of `rows` rows.
    #[must_use]
    pub fn new(rows: u64, each: u64) -> Self {
        Self { runs: (rows / each.max(1)).max(1), each, next: 0 }
    }

    /// The next set: no row of it is a neighbour of another.
    pub fn run(&mut self) -> Vec<u64> {
        let first = self.next;
        self.next = (self.next + 1) % self.runs;
        (0..self.each).map(|i| i * self.runs + first).collect()
    }

    /// How many sets go round once.
    #[must_use]
    pub fn runs(&self) -> usize {
        self.runs as usize
    }
}

/// Tiers for runs of `each` rows of which none is found in the device tier twice in a round.
#[must_use]
pub fn small_device(layout: RowLayout, each: u64, options: &TieredOptions) -> TieredOptions {
    let device_bytes = 2 * each * slot_bytes(layout, options.policy);
    TieredOptions { device_bytes, ..*options }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Law;
    use tessera_cache::Policy;

    const LAYOUT: RowLayout = RowLayout { weight_bytes: 16, state_bytes: 4 };

    fn options(device_rows: u64) -> TieredOptions {
        let device_bytes = device_rows * slot_bytes(LAYOUT, Policy::Lru);
        TieredOptions { device_bytes, host_bytes: 0, policy: Policy::Lru }
    }

    #[test]
    fn runs_that_go_round_are_never_found_in_a_small_device_tier() {
        let cpu = Cpu::new(std::num::NonZeroUsize::new(1)).unwrap();
        let mut counts = vec![9; 80];
        let small = small_device(LAYOUT, 10, &options(0));
        let mut table = Table::new(&cpu, LAYOUT, &small, None, &mut counts).unwrap();
        let mut cycle = Cycle::new(85, 10);
        assert_eq!(cycle.runs(), 8);
        let found = table.measure((8, 16), true, || cycle.run()).unwrap();
        assert_eq!(found.shares, Shares { host: 1.0, ..Shares::default() });
        assert_eq!((found.rows, found.seconds.len(), found.ssd_wait), (10.0, 16, 0.0));
        assert!(counts.iter().all(|&count| count == 3));
    }

    #[test]
    fn a_wrong_row_gives_no_figures() {
        let cpu = Cpu::new(std::num::NonZeroUsize::new(1)).unwrap();
        let mut counts = vec![0; 20];
        let mut table = Table::new(&cpu, LAYOUT, &options(20), None, &mut counts).unwrap();
        table.measure((0, 2), true, || (0..20).collect()).unwrap();
        table.counts[7] = 99;
        let error = table.measure((0, 1), true, || (0..20).collect()).unwrap_err();
        assert!(error.to_string().contains("row 7 is 2"), "{error}");
    }

    #[test]
    fn a_batch_has_different_rows_ascending() {
        let law = Law::Zipf { alpha: 1.2 }.over(50, 1).unwrap();
        let rows = batch(&law, 30, Hots { mean: 3, spread: 2 }, &mut Rng::new(1));
        assert!(rows.len() > 5 && rows.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
