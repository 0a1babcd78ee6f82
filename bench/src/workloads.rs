//! `lookup` and `update`: requests against tables, through the code that training uses.
//!
//! ```text
//! check   Resolver::resolve: every id against its table
//! group   Resolver::group: the different rows and their occurrences        (update)
//! lookup  EmbeddingCollection::forward: pooled vectors
//! update  EmbeddingCollection::update: gradients summed a row, rows moved   (update)
//! ```
//! The gradient of the pooled vectors is a fixed buffer of small numbers. Ids are copied for each
//! request outside the clock, as a request's sender would make them.

use std::time::Instant;

use tessera_cache::StoreStats;
use tessera_data::{Batch, Jagged};
use tessera_device::{Cpu, CpuStream, Device, HostBuffer};
use tessera_embedding::{BadIdPolicy, EmbeddingCollection, Lookup, SparseStep, Tiers};

use crate::draw::Rng;
use crate::drive::{Stages, Workload};
use crate::tables::{self, Table};
use crate::{BenchError, Result, check, requests};

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Pooled vectors.
    Lookup,
    /// Pooled vectors, then the rows moved.
    Update,
}

/// Tables on this machine.
pub struct Tables {
    stream: CpuStream,
    collection: EmbeddingCollection<Cpu>,
    stride: usize,
    step: u64,
}

impl Tables {
    /// Tables at their first values.
    ///
    /// Errors: tables that do not fit memory or make no sense.
    pub fn new(cpu: &Cpu, tables: &[Table], seed: u64) -> Result<Self> {
        Self::with_tiers(cpu, tables, seed, None)
    }

    /// The same, with rows that move between tiers, where they are given.
    ///
    /// Errors: as there.
    pub fn with_tiers(
        cpu: &Cpu,
        tables: &[Table],
        seed: u64,
        tiers: Option<&Tiers>,
    ) -> Result<Self> {
        let stream = cpu.stream()?;
        let (features, stride) = tables::features(tables);
        let specs = tables.iter().map(|table| table.spec.clone()).collect();
        let collection =
            EmbeddingCollection::with_tiers(cpu.clone(), &stream, specs, features, seed, tiers)?;
        Ok(Self { stream, collection, stride, step: 0 })
    }

    /// What the store of a table did so far.
    ///
    /// Errors: a table that is not there.
    pub fn stats(&self, table: usize) -> Result<StoreStats> {
        Ok(self.collection.store_stats(table)?)
    }
}

/// Requests against tables.
pub struct Requests<'a> {
    tables: &'a mut Tables,
    requests: &'a [Batch],
    work: Work,
    out: HostBuffer<f32>,  // (bags, stride)
    grad: HostBuffer<f32>, // (bags, stride)
    prepared: Option<Vec<Jagged>>,
    /// Kept until the next request is prepared: giving its memory back is outside the clock.
    done: Option<Lookup<Cpu>>,
}

impl<'a> Requests<'a> {
    /// Requests of one size.
    ///
    /// Errors: no memory.
    pub fn new(tables: &'a mut Tables, requests: &'a [Batch], work: Work) -> Result<Self> {
        let device = tables.collection.device();
        let numbers = requests.iter().map(Batch::samples).max().unwrap_or(0) * tables.stride;
        let (out, mut grad) = (device.alloc(numbers)?, device.alloc::<f32>(numbers)?);
        let mut rng = Rng::new(7);
        for value in grad.iter_mut() {
            *value = (rng.unit() - 0.5) as f32 * 0.01;
        }
        Ok(Self { tables, requests, work, out, grad, prepared: None, done: None })
    }

    /// Serves the first request and holds its answer against a naive computation.
    ///
    /// Errors: [`BenchError::WrongAnswer`], or what the tables say.
    pub fn check(&mut self) -> Result<()> {
        let Some(request) = self.requests.first() else { return Ok(()) };
        let grad = &self.grad;
        let (stride, tables) = (self.tables.stride, &*self.tables);
        let watched = match self.work {
            Work::Lookup => Vec::new(),
            Work::Update => {
                let grad = |bag: usize, column: usize| f64::from(grad[bag * stride + column]);
                check::watch(&tables.collection, &tables.stream, request, grad, Some(16))?
            }
        };
        // The lookup comes before the rows move, and its check needs them as they were.
        let work = std::mem::replace(&mut self.work, Work::Lookup);
        self.prepare(0)?;
        self.serve()?;
        self.work = work;
        let tables = &*self.tables;
        check::lookup(&tables.collection, &tables.stream, request, &self.out, stride)?;
        if work == Work::Update {
            self.prepare(0)?;
            self.serve()?;
            let tables = &*self.tables;
            let (collection, stream) = (&tables.collection, &tables.stream);
            check::updated(collection, stream, watched, tables.step, |g| g, 1e-3)?;
        }
        Ok(())
    }

    /// Different rows and bytes of a request, on average.
    ///
    /// Bytes: rows read and vectors written; for an update also gradients read, and each
    /// different row with its state read and written once.
    ///
    /// Errors: what the tables say.
    pub fn volume(&self) -> Result<Volume> {
        let tables = &*self.tables;
        volume(&tables.collection, &tables.stream, self.requests, self.work)
    }
}

/// What requests amount to, on average.
#[derive(Clone, Copy, Debug, Default)]
pub struct Volume {
    /// Ids.
    pub ids: f64,
    /// Different rows.
    pub unique_rows: f64,
    /// Bytes moved.
    pub bytes: f64,
}

/// Volume of requests to some tables: see [`Requests::volume`].
///
/// Errors: what the tables say.
pub fn volume(
    collection: &EmbeddingCollection<Cpu>,
    stream: &CpuStream,
    requests: &[Batch],
    work: Work,
) -> Result<Volume> {
    let mut sum = Volume::default();
    let schema = collection.schema();
    for request in requests {
        // A wide part looks the same ids up once more, in tables of its own.
        let features = request.features().iter().cycle().take(schema.features().len());
        let lookup = collection.resolve(stream, features.cloned().collect(), BadIdPolicy::Drop)?;
        let unique = collection.resolver().unique_counts(stream, &lookup)?;
        sum.ids += requests::ids(request) as f64;
        for (index, table) in schema.tables().iter().enumerate() {
            let row = (table.dim * table.precision.bytes()) as f64;
            let state = (4 * table.optimizer.state_columns(table.dim)) as f64;
            sum.bytes += lookup.rows_read()[index] as f64 * row;
            sum.unique_rows += unique[index] as f64;
            if work == Work::Update {
                sum.bytes += unique[index] as f64 * 2.0 * (row + state);
            }
        }
        let dims: usize = schema.features().iter().map(|f| schema.tables()[f.table].dim).sum();
        let outputs = (request.samples() * dims * 4) as f64;
        sum.bytes += if work == Work::Update { 2.0 * outputs } else { outputs };
    }
    let n = requests.len().max(1) as f64;
    Ok(Volume { ids: sum.ids / n, unique_rows: sum.unique_rows / n, bytes: sum.bytes / n })
}

impl Workload for Requests<'_> {
    fn prepare(&mut self, number: usize) -> Result<()> {
        self.done = None;
        self.prepared = Some(self.requests[number % self.requests.len()].features().to_vec());
        Ok(())
    }

    fn serve(&mut self) -> Result<Stages> {
        let ids = self.prepared.take().ok_or_else(|| BenchError::usage("nothing is prepared"))?;
        let Tables { stream, collection, stride, step } = &mut *self.tables;
        let mut stages = Stages::new();
        let mut last = Instant::now();
        let mut lap = |name: &str| {
            let now = Instant::now();
            stages.insert(name.into(), (now - last).as_secs_f64());
            last = now;
        };
        let mut lookup = collection.resolve(stream, ids, BadIdPolicy::Error)?;
        lap("check");
        if self.work == Work::Update {
            collection.resolver().group(stream, &lookup)?;
            lap("group");
        }
        collection.forward(stream, &mut lookup, &mut self.out, *stride)?;
        lap("lookup");
        if self.work == Work::Update {
            *step += 1;
            let step = SparseStep::new(*step);
            let moved = collection.update(stream, &lookup, &self.grad, *stride, &step)?;
            if moved.nonfinite() > 0 {
                return Err(BenchError::Step("rows of the tables overflowed".into()));
            }
            lap("update");
        }
        self.done = Some(lookup);
        Ok(stages)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Law;
    use crate::knobs::{Hots, OptimizerKnob, PrecisionKnob, TableKnobs};
    use crate::requests::{Draw, drawn};
    use crate::tables::Defaults;
    use clap::ValueEnum;

    fn tables(knobs: TableKnobs) -> Vec<Table> {
        let defaults = Defaults { tables: 3, rows: 40, dim: 7, hots: Hots { mean: 3, spread: 3 } };
        tables::tables(&knobs, defaults).unwrap()
    }

    fn cpu() -> Cpu {
        Cpu::new(std::num::NonZeroUsize::new(2)).unwrap()
    }

    const DRAW: Draw = Draw { batch: 30, hots: None, requests: 2, dense: 0, seed: 1 };

    #[test]
    fn every_optimizer_and_precision_passes_its_check() {
        for &optimizer in OptimizerKnob::value_variants() {
            for &precision in PrecisionKnob::value_variants() {
                for weighted in [false, true] {
                    let tables = tables(TableKnobs {
                        optimizer: Some(optimizer),
                        precision: Some(precision),
                        weighted,
                        ..TableKnobs::default()
                    });
                    let requests = drawn(&tables, &Law::Zipf { alpha: 1.0 }, DRAW).unwrap();
                    let mut live = Tables::new(&cpu(), &tables, 1).unwrap();
                    let mut work = Requests::new(&mut live, &requests, Work::Update).unwrap();
                    for round in 0..3 {
                        work.check().unwrap_or_else(|error| {
                            panic!("{optimizer:?} {precision:?} {weighted} {round}: {error}")
                        });
                    }
                }
            }
        }
    }

    #[test]
    fn a_wrong_answer_is_caught() {
        let tables = tables(TableKnobs::default());
        let requests = drawn(&tables, &Law::Zipf { alpha: 0.0 }, DRAW).unwrap();
        let mut live = Tables::new(&cpu(), &tables, 1).unwrap();
        let mut work = Requests::new(&mut live, &requests, Work::Lookup).unwrap();
        work.prepare(0).unwrap();
        work.serve().unwrap();
        let stride = work.tables.stride;
        for (index, value) in [(0, 0.3f32), (stride + 5, f32::NAN)] {
            // Every bag is looked at, as there are hardly more than the check samples.
            let mut out = work.out.to_vec();
            for bag in 0..30 {
                out[bag * stride + index % stride] = value;
            }
            let tables = &*work.tables;
            let error =
                check::lookup(&tables.collection, &tables.stream, &requests[0], &out, stride)
                    .unwrap_err();
            assert!(matches!(error, BenchError::WrongAnswer { .. }), "{error}");
        }

        let tables = &*work.tables;
        let (collection, stream) = (&tables.collection, &tables.stream);
        let watched = check::watch(collection, stream, &requests[0], |_, _| 0.5, Some(4)).unwrap();
        assert!(check::square_norm(&watched) > 0.0);
        // Nothing was updated, so every watched row is wrong.
        let error = check::updated(collection, stream, watched, 1, |g| g, 0.0).unwrap_err();
        assert!(error.to_string().contains("table t0, row"), "{error}");
    }

    #[test]
    fn volume_counts_rows_outputs_and_state() {
        let tables = tables(TableKnobs { tables: Some(1), dim: vec![8], ..TableKnobs::default() });
        let draw = Draw { batch: 5, hots: Some(Hots::fixed(2)), requests: 1, ..DRAW };
        let requests = drawn(&tables, &Law::Zipf { alpha: 3.0 }, draw).unwrap();
        let mut live = Tables::new(&cpu(), &tables, 1).unwrap();
        let look = Requests::new(&mut live, &requests, Work::Lookup).unwrap().volume().unwrap();
        assert_eq!((look.ids, look.bytes), (10.0, 10.0 * 32.0 + 5.0 * 32.0));
        let update = Requests::new(&mut live, &requests, Work::Update).unwrap().volume().unwrap();
        assert!(update.unique_rows < 10.0);
        assert_eq!(update.bytes, look.bytes + 160.0 + update.unique_rows * 2.0 * 36.0);
    }
}
