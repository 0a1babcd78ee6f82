//! Dynamic tables: finding the rows of any 64-bit ids, or making them, against a static table.
//!
//! The map is full, which is a load of 0.8 of its index. Three shares of the static lookup's rate
//! come of it, requests taking turns:
//!
//! ```text
//! ids found             the map alone, every id known, as training does it: counted and touched
//! 1% of ids new         the map alone; each new id takes the row of the one seen longest ago
//! lookup of ids         a request of a training step: map, then pooled vectors
//! ```

use std::collections::HashMap;
use std::time::Instant;

use tessera_cache::{Admission, Eviction, IdMap, IdMapOptions, id_hash};
use tessera_data::{Batch, BatchParts, Jagged, RawId};
use tessera_device::{Cpu, CpuStream, Device};
use tessera_embedding::{BadIdPolicy, EmbeddingCollection, TableKind};

use super::knobs::CacheArgs;
use super::point::{Bound, CachePoint};
use crate::draw::Law;
use crate::requests::{Draw, drawn};
use crate::stats::median;
use crate::tables::{self, Table};
use crate::{BenchError, Result, check};

/// Different requests, taken in turn.
const REQUESTS: usize = 8;

/// One id of so many is new, where some are.
const NEW_EVERY: usize = 100;

/// Ids that fill a map or table in one go.
const FILL: u64 = 1 << 16;

/// Measures; `table` has the rows that are asked for.
///
/// Errors: a wrong answer; no memory.
pub fn measure(
    cpu: &Cpu,
    args: &CacheArgs,
    table: &Table,
    points: &mut Vec<CachePoint>,
) -> Result<()> {
    let hots = Some(args.pooling);
    let draw = Draw { batch: args.batch, hots, requests: REQUESTS, dense: 0, seed: args.seed };
    let law = Law::Zipf { alpha: args.alpha };
    let plain = drawn(std::slice::from_ref(table), &law, draw)?;
    let named: Vec<Batch> =
        plain.iter().map(|request| renamed(request, id_hash)).collect::<Result<_>>()?;
    let mut dynamic = table.clone();
    let (admission, eviction) = (Admission::Always, Eviction::Lru);
    dynamic.spec.kind = TableKind::Dynamic { admission, eviction };
    crate::tables::check_memory(2 * tables::bytes(std::slice::from_ref(table)))?;

    let rows = table.spec.rows;
    let options = IdMapOptions { capacity: rows, admission, eviction, seed: args.seed };
    let mut known = full(options)?;
    let mut churned = full(options)?;
    let mut resident = Side::new(cpu, table, args)?;
    let mut ids = Side::new(cpu, &dynamic, args)?;
    ids.fill(rows)?;
    resident.check(&plain[0], u64::from)?;
    let of_ids = ids.rows_of_ids()?;
    ids.check(&named[0], |id| of_ids[&id])?;

    let mut fresh = rows; // the next id that no request has had
    let mut seconds: [Vec<f64>; 4] = Default::default();
    for number in 0..args.iterations + REQUESTS {
        let which = number % REQUESTS;
        let step = number as u64 + 1;
        let request = named[which].features()[0].ids();
        let mut raw: Vec<u64> = request.iter().map(|id| id.0 as u64).collect();
        let mut taken = [0.0; 4];
        let timed = Instant::now();
        let resolved = known.resolve(&raw, step, true)?;
        taken[1] = timed.elapsed().as_secs_f64();
        count("ids found", resolved.stats.hits, raw.len() as u64)?;
        for id in raw.iter_mut().step_by(NEW_EVERY) {
            *id = id_hash(fresh);
            fresh += 1;
        }
        let timed = Instant::now();
        let resolved = churned.resolve(&raw, step, true)?;
        taken[2] = timed.elapsed().as_secs_f64();
        let new = raw.len().div_ceil(NEW_EVERY) as u64;
        if resolved.stats.admitted < new {
            count("ids that got a row", resolved.stats.admitted, new)?;
        }
        let sides = [(0, &mut resident, &plain), (3, &mut ids, &named)];
        let mut order = sides;
        if number % 2 == 1 {
            order.reverse();
        }
        for (place, side, requests) in order {
            taken[place] = side.serve(&requests[which])?;
        }
        if number >= REQUESTS {
            for (all, taken) in seconds.iter_mut().zip(taken) {
                all.push(taken);
            }
        }
    }
    let count: u64 = plain.iter().map(crate::requests::ids).sum();
    let count = count as f64 / plain.len() as f64;
    let row_bytes = (table.spec.dim * table.spec.precision.bytes()) as f64;
    let what = "lookups of a static table, request by request";
    for (place, case, bytes) in [
        (1, "ids found", 8.0),
        (2, "ids found, 1% of them new", 8.0),
        (3, "lookup of ids", row_bytes),
    ] {
        let limit = Bound::new(what, count / median(&seconds[0]));
        let mut point = CachePoint::new(case.into(), count, bytes, limit, &seconds[place]);
        let ratios: Vec<f64> = seconds[0].iter().zip(&seconds[place]).map(|(r, t)| r / t).collect();
        point.share_of_limit = median(&ratios);
        points.push(point);
    }
    Ok(())
}

/// A map whose rows are all taken, by the ids that stand for rows of the static table.
fn full(options: IdMapOptions) -> Result<IdMap> {
    let mut map = IdMap::new(options)?;
    for start in (0..options.capacity).step_by(FILL as usize) {
        let ids: Vec<u64> = (start..options.capacity.min(start + FILL)).map(id_hash).collect();
        map.resolve(&ids, 0, true)?;
    }
    Ok(map)
}

/// A request for other ids.
fn renamed(request: &Batch, name: impl Fn(u64) -> u64) -> Result<Batch> {
    let feature = &request.features()[0];
    let ids = feature.ids().iter().map(|id| RawId(name(id.0 as u64) as i64)).collect();
    let offsets = feature.offsets().to_vec();
    let weights = feature.weights().map(<[f32]>::to_vec);
    let samples = request.samples();
    Ok(Batch::new(BatchParts {
        dense_features: 0,
        dense: Vec::new(),
        labels: request.labels().to_vec(),
        sample_weights: None,
        groups: None,
        features: vec![Jagged::new(samples, offsets, ids, weights)?],
        provenance: None,
    })?)
}

/// Holds a number of ids against what it must be.
fn count(what: &str, got: u64, want: u64) -> Result<()> {
    if got == want {
        return Ok(());
    }
    let (got, want) = (got as f64, want as f64);
    Err(BenchError::WrongAnswer { what: format!("number of {what}"), got, want })
}

/// A table, and where its vectors go.
struct Side {
    stream: CpuStream,
    tables: EmbeddingCollection<Cpu>,
    out: <Cpu as Device>::Buffer<f32>, // (bags, stride)
    stride: usize,
    step: u64,
}

impl Side {
    fn new(cpu: &Cpu, table: &Table, args: &CacheArgs) -> Result<Self> {
        let (features, stride) = tables::features(std::slice::from_ref(table));
        let (stream, specs) = (cpu.stream()?, vec![table.spec.clone()]);
        let tables = EmbeddingCollection::new(cpu.clone(), &stream, specs, features, args.seed)?;
        Ok(Self { stream, tables, out: cpu.alloc(args.batch * stride)?, stride, step: 0 })
    }

    /// Gives as many ids a row each.
    fn fill(&mut self, rows: u64) -> Result<()> {
        let each = self.out.len() / self.stride; // a bag holds one
        for start in (0..rows).step_by(each) {
            let end = rows.min(start + each as u64);
            let ids = (start..end).map(|row| RawId(id_hash(row) as i64)).collect();
            let bags = (end - start) as usize;
            self.look_up(Jagged::new(bags, (0..=bags as u64).collect(), ids, None)?)?;
        }
        Ok(())
    }

    /// Looks a request up; gives the seconds it took, its ids' copy not included.
    fn serve(&mut self, request: &Batch) -> Result<f64> {
        self.look_up(request.features()[0].clone())
    }

    fn look_up(&mut self, bags: Jagged) -> Result<f64> {
        self.step += 1;
        let start = Instant::now();
        let resolver = self.tables.resolver();
        let batch = resolver.check(vec![bags], BadIdPolicy::Error)?.at_step(self.step);
        let mut lookup = resolver.route(&self.stream, batch)?;
        self.tables.forward(&self.stream, &mut lookup, &mut self.out, self.stride)?;
        let taken = start.elapsed().as_secs_f64();
        drop(lookup); // its memory is given back outside the clock
        Ok(taken)
    }

    /// The row of each id of a dynamic table.
    fn rows_of_ids(&self) -> Result<HashMap<u64, u64>> {
        let state = self.tables.id_state(0)?;
        Ok(state.ids.into_iter().zip(state.rows).collect())
    }

    /// Holds the vectors of a request against naive sums over the rows of its ids.
    fn check(&mut self, request: &Batch, row_of: impl Fn(u64) -> u64) -> Result<()> {
        self.serve(request)?;
        let rows = renamed(request, row_of)?;
        check::lookup(&self.tables, &self.stream, &rows, &self.out, self.stride)
    }
}
