//! `cache`: one table in tiers. What each tier gives, what a batch finds where, and how near that is
//! to what memory and disk give by themselves.
//!
//! ```text
//! lookups all on device      against a resident table                             (hits)
//! ids of dynamic tables      against a static table                               (ids)
//! the log on SSD             against the disk: puts, gets, updates                (ssd)
//! fetches all in one tier    device, host, SSD                                    (fetches)
//! fetches of batches         for each size of the device tier: who finds what     (fetches)
//! ```
//! Rows are held against what was written to them throughout. `tiers` ([`train`]) puts a whole model
//! in tiers.

pub mod disk;
pub mod fetches;
pub mod hits;
pub mod ids;
pub mod knobs;
pub mod point;
pub mod rows;
pub mod ssd;
pub mod steps;
pub mod train;

use std::hint::black_box;
use std::time::Instant;

use rayon::prelude::*;
use tessera_cache::{RowLayout, TieredOptions};
use tessera_device::Cpu;

use crate::document::Document;
use crate::draw::{Law, Rng};
use crate::knobs::TableKnobs;
use crate::machine::Machine;
use crate::stats::median;
use crate::tables::{self, Defaults};
use crate::{BenchError, Result};
use fetches::{Cycle, Fetches, Table, batch, small_device};
use knobs::CacheArgs;
use point::Bound;
pub use point::CachePoint;
use ssd::Ssd;
pub use train::TrainPoint;

/// The command's name in documents.
pub const COMMAND: &str = "cache";

/// Rows of a fetch that is all in one tier.
const TIER_ROWS: u64 = 16_384;

/// A pass of the limit of memory copies so many bytes.
const COPY_BYTES: usize = 128 << 20;

/// Runs the command.
///
/// Errors: knobs that make no sense, a wrong row, no memory, a disk that refuses.
pub fn run(args: &CacheArgs) -> Result<Document<CachePoint>> {
    if args.iterations == 0 || args.batch == 0 || args.pooling.mean == 0 || args.rows < 16 {
        let text = "--iterations, --batch and --pooling must be at least 1, --rows at least 16";
        return Err(BenchError::usage(text));
    }
    let knobs = TableKnobs {
        dim: vec![args.dim],
        precision: Some(args.precision),
        optimizer: Some(args.optimizer),
        ..TableKnobs::default()
    };
    let defaults = Defaults { tables: 1, rows: args.rows, dim: args.dim, hots: args.pooling };
    let table = tables::tables(&knobs, defaults)?.swap_remove(0);
    let spec = &table.spec;
    let layout = RowLayout {
        weight_bytes: spec.dim * spec.precision.bytes(),
        state_bytes: 4 * spec.optimizer.state_columns(spec.dim),
    };
    let cpu = Cpu::new(args.threads)?;
    let machine = Machine::look(&cpu);
    let mut points = Vec::new();
    hits::measure(&cpu, args, &table, layout, &mut points)?;
    ids::measure(&cpu, args, &table, &mut points)?;
    let memory = Memory::measure(&cpu, layout);
    let ssd = match &args.ssd_dir {
        Some(dir) => {
            let ssd = Ssd::fill(args, dir, layout, &mut points)?;
            ssd.gets(args.seed, &mut points)?;
            ssd.updates(args.seed, &mut points)?;
            Some(ssd)
        }
        None => None,
    };
    let options = TieredOptions {
        device_bytes: 0,
        host_bytes: args.host_bytes.0 as u64,
        policy: args.policy.policy(),
    };
    let mut counts = vec![0; args.rows as usize];
    let setup = Setup { cpu: &cpu, args, layout, options, ssd: ssd.as_ref(), memory };
    setup.one_tier(&mut counts, &mut points)?;
    for &device in &args.device_bytes {
        points.push(setup.batches(device.0 as u64, &mut counts)?);
    }
    let reader = ssd.as_ref().map_or("no SSD".into(), |ssd| format!("SSD by {}", ssd.reader()));
    let optimizer = spec.optimizer.name();
    let precision = format!("{:?}", spec.precision).to_lowercase();
    let (rows, dim, host, alpha) = (args.rows, args.dim, args.host_bytes, args.alpha);
    let policy = format!("{:?}", args.policy).to_lowercase();
    Ok(Document::new(
        COMMAND,
        machine,
        args,
        format!(
            "{rows} rows, dim {dim}, {precision}, {optimizer}, alpha {alpha}, batch {} x {}, host \
             {host}, {policy}, {reader}",
            args.batch, args.pooling
        ),
        points,
    ))
}

/// What all fetches share.
struct Setup<'a> {
    cpu: &'a Cpu,
    args: &'a CacheArgs,
    layout: RowLayout,
    options: TieredOptions,
    ssd: Option<&'a Ssd>,
    memory: Memory,
}

impl Setup<'_> {
    /// Fetches that find all rows in one tier.
    fn one_tier(&self, counts: &mut [u8], points: &mut Vec<CachePoint>) -> Result<()> {
        let Self { cpu, args, layout, .. } = *self;
        let each = TIER_ROWS.min(args.rows / 8);
        let small = small_device(layout, each, &self.options);

        // Without an SSD all rows stay in memory; the first round writes them.
        let mut table = Table::new(cpu, layout, &small, None, counts)?;
        let mut cycle = Cycle::new(args.rows, each);
        let run = cycle.run();
        let found = table.measure((1, args.iterations), true, || run.clone())?;
        points.push(self.point("fetch, all on device", &found, self.memory.bound()));
        let rounds = (2 * cycle.runs(), args.iterations);
        let found = table.measure(rounds, true, || cycle.run())?;
        points.push(self.point("fetch, all in host tier", &found, self.memory.bound()));
        drop(table);

        let Some(ssd) = self.ssd else { return Ok(()) };
        counts.fill(0);
        let straight = TieredOptions { host_bytes: 0, ..small };
        let mut table = Table::new(cpu, layout, &straight, Some(ssd.cold()), counts)?;
        let mut cycle = Cycle::new(args.rows, each);
        let found = table.measure((2, args.iterations.min(100)), false, || cycle.run())?;
        points.push(self.point("fetch, all on SSD", &found, ssd.limit(1.0)));
        Ok(())
    }

    /// Fetches of batches with a device tier of so many bytes.
    fn batches(&self, device_bytes: u64, counts: &mut [u8]) -> Result<CachePoint> {
        let Self { cpu, args, layout, .. } = *self;
        let options = TieredOptions { device_bytes, ..self.options };
        let mut table = Table::new(cpu, layout, &options, self.ssd.map(Ssd::cold), counts)?;
        let law = Law::Zipf { alpha: args.alpha }.over(args.rows, args.seed)?;
        let mut rng = Rng::new(args.seed);
        let found = table.measure((args.warmup, args.iterations), true, || {
            batch(&law, args.batch, args.pooling, &mut rng)
        })?;
        table.flush()?;
        let limit = match self.ssd {
            Some(ssd) if found.shares.ssd > 0.0 => ssd.limit(1.0 / found.shares.ssd),
            _ => self.memory.bound(),
        };
        let point = self.point("batch", &found, limit);
        Ok(CachePoint { device_bytes: Some(device_bytes), ..point })
    }

    /// The point of some fetches.
    fn point(&self, case: &str, found: &Fetches, limit: Bound) -> CachePoint {
        let bytes = (self.layout.weight_bytes + self.layout.state_bytes) as f64;
        CachePoint {
            shares: Some(found.shares),
            ssd_wait: Some(found.ssd_wait),
            ..CachePoint::new(case.into(), found.rows, bytes, limit, &found.seconds)
        }
    }
}

/// The limit of moving rows between the tiers in memory.
struct Memory {
    rows_per_s: f64,
}

impl Memory {
    /// Copies from one buffer to another on all threads.
    fn measure(cpu: &Cpu, layout: RowLayout) -> Self {
        let from = vec![1u8; COPY_BYTES];
        let mut to = vec![2u8; COPY_BYTES];
        let chunk = COPY_BYTES / cpu.threads().max(1);
        let mut pass = || {
            let start = Instant::now();
            cpu.run(|| {
                let pieces = to.par_chunks_mut(chunk.max(1)).zip(from.par_chunks(chunk.max(1)));
                pieces.for_each(|(to, from)| black_box(to).copy_from_slice(black_box(from)));
            });
            start.elapsed().as_secs_f64()
        };
        pass();
        let seconds = [pass(), pass(), pass(), pass(), pass()];
        let row_bytes = (layout.weight_bytes + layout.state_bytes) as f64;
        Self { rows_per_s: COPY_BYTES as f64 / median(&seconds) / row_bytes }
    }

    fn bound(&self) -> Bound {
        Bound::new("copies from end to end in memory, on all threads", self.rows_per_s)
    }
}
