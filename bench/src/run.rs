//! A command from its knobs to its figures.
//!
//! ```text
//! the machine's limit, for every batch size and pooling       (gather)
//! tables or model at their first values
//! for every batch size and pooling: check the answer, warm up, measure
//! the limit once more, where memory holds its buffer beside the tables
//! ```

use std::path::Path;

use serde::Serialize;
use tessera::config::Config;
use tessera_data::Batch;
use tessera_device::Cpu;

use crate::document::{Document, Limit, Point};
use crate::drive::{Pace, Sample, Workload, measure};
use crate::gather::{Gather, Hint, Plan};
use crate::knobs::{Hots, RunKnobs, StepArgs, TableKnobs, TablesArgs};
use crate::machine::{Machine, Scrubber, available_mib};
use crate::requests::{self, Draw};
use crate::stats::{LatencyMs, median, tail};
use crate::step::{DENSE, Steps, Training, config_of_knobs, flops};
use crate::tables::{self, Defaults, Table};
use crate::workloads::{Requests, Tables, Volume, Work};
use crate::{BenchError, Result};

/// Passes of each hint that the limit is the median of, at the least.
const LIMIT_PASSES: usize = 11;

/// One batch size and pooling.
#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    hots: Option<Hots>,
}

/// All combinations of the batch sizes and poolings asked for.
fn cases(knobs: &TableKnobs, default_batch: usize) -> Vec<Case> {
    let batches = if knobs.batch.is_empty() { vec![default_batch] } else { knobs.batch.clone() };
    let hots: Vec<Option<Hots>> = if knobs.pooling.is_empty() {
        vec![None]
    } else {
        knobs.pooling.iter().copied().map(Some).collect()
    };
    let of = |&batch: &usize| hots.iter().map(move |&hots| Case { batch, hots });
    batches.iter().flat_map(of).collect()
}

/// What all commands share.
struct Bench<'a> {
    cpu: Cpu,
    knobs: &'a TableKnobs,
    run: &'a RunKnobs,
    tables: Vec<Table>,
    cases: Vec<Case>,
    dense: usize,
    scrubber: Option<Scrubber>,
    /// For reading the limit again, where memory holds it beside the tables.
    gather: Option<Gather>,
    limits: Vec<Limit>,
    machine: Machine,
}

impl<'a> Bench<'a> {
    /// Checks the knobs and measures the limit of every case.
    fn new(
        knobs: &'a TableKnobs,
        run: &'a RunKnobs,
        tables: Vec<Table>,
        default_batch: usize,
        dense: usize,
    ) -> Result<Self> {
        let cases = cases(knobs, default_batch);
        if run.iterations == 0 {
            return Err(BenchError::usage("--iterations must be at least 1"));
        }
        if run.rate.is_some_and(|rate| !(rate > 0.0 && rate.is_finite())) {
            return Err(BenchError::usage("--rate must be a number above 0"));
        }
        if run.dump_ids.is_some() && cases.len() > 1 {
            return Err(BenchError::usage("--dump-ids takes one batch size and one pooling"));
        }
        let bytes = tables::bytes(&tables);
        tables::check_memory(bytes)?;
        let cpu = Cpu::new(run.threads)?;
        let machine = Machine::look(&cpu);
        let scrubber = if run.flush { Some(Scrubber::new(&cpu)?) } else { None };
        let mut gather = Gather::new(&cpu, &tables)?;
        let mut bench = Self {
            cpu,
            knobs,
            run,
            tables,
            cases,
            dense,
            scrubber,
            gather: None,
            limits: Vec::new(),
            machine,
        };
        for case in bench.cases.clone() {
            let requests = bench.requests(case)?;
            if let Some(path) = &run.dump_ids {
                requests::save(path, &bench.tables, &requests)?;
            }
            let limit = bench.limit(&mut gather, &requests);
            bench.limits.push(limit);
        }
        if available_mib().is_some_and(|mib| bytes >> 20 < mib / 2) {
            bench.gather = Some(gather);
        }
        Ok(bench)
    }

    /// The requests of a case: the same each time.
    fn requests(&self, case: Case) -> Result<Vec<Batch>> {
        let draw = Draw {
            batch: case.batch,
            hots: case.hots,
            requests: self.run.requests,
            dense: self.dense,
            seed: self.run.seed,
        };
        requests::requests(&self.tables, self.knobs, draw)
    }

    fn limit(&self, gather: &mut Gather, requests: &[Batch]) -> Limit {
        let plans: Vec<_> = requests.iter().map(|r| gather.plan(&self.tables, r)).collect();
        let (mut far, mut near, mut samples_ms) = (Vec::new(), Vec::new(), Vec::new());
        for plan in &plans {
            gather.run(plan, Hint::T1);
        }
        for pass in 0..LIMIT_PASSES.max(plans.len()) {
            let plan = &plans[pass % plans.len()];
            let seconds = gather.run(plan, Hint::T1);
            samples_ms.push(seconds * 1e3);
            far.push(plan.rows() as f64 / seconds);
            // Of another request: this one's rows may still be in the caches.
            let plan = &plans[(pass + plans.len() / 2) % plans.len()];
            near.push(plan.rows() as f64 / gather.run(plan, Hint::T0));
        }
        let ids: u64 = requests.iter().map(requests::ids).sum();
        let bytes = self.row_bytes(requests);
        let rows_per_s = median(&far);
        Limit {
            rows_per_s,
            gb_per_s: rows_per_s * bytes / (ids as f64).max(1.0) / 1e9,
            rows_per_s_t0: median(&near),
            rows_per_s_after: None,
            samples_ms,
        }
    }

    /// Bytes of the rows of all ids.
    fn row_bytes(&self, requests: &[Batch]) -> f64 {
        let owners =
            || self.tables.iter().flat_map(|table| table.features.iter().map(move |_| &table.spec));
        let of = |request: &Batch| -> f64 {
            let features = request.features().iter().zip(owners());
            features.map(|(f, t)| (f.ids().len() * t.dim * t.precision.bytes()) as f64).sum()
        };
        requests.iter().map(of).sum()
    }

    /// Measures a case whose answer was checked.
    fn point(
        &mut self,
        index: usize,
        workload: &mut dyn Workload,
        requests: &[Batch],
        volume: Volume,
        flops_per_request: f64,
    ) -> Result<Point> {
        let (run, case, limit) = (self.run, self.cases[index], self.limits[index].clone());
        let pace = Pace { warmup: run.warmup, iterations: run.iterations, rate: run.rate };
        let (mut scrubber, mut gather) = (self.scrubber.as_mut(), self.gather.as_mut());
        let plans: Vec<Plan> = match (&gather, run.pair) {
            (Some(gather), true) => requests.iter().map(|r| gather.plan(&self.tables, r)).collect(),
            (None, true) => {
                return Err(BenchError::usage("--pair needs memory for the tables twice"));
            }
            (_, false) => Vec::new(),
        };
        let mut limits_s = Vec::new();
        let samples = measure(workload, pace, |number| {
            if let (Some(gather), Some(last)) = (&mut gather, plans.len().checked_sub(1)) {
                limits_s.push(gather.run(&plans[number % (last + 1)], Hint::T1));
            }
            if let Some(scrubber) = &mut scrubber {
                scrubber.scrub();
            }
        })?;
        let of = |value: fn(&Sample) -> f64| samples.iter().map(value).collect::<Vec<f64>>();
        let (service, latency) = (of(|s| s.service_s), of(|s| s.latency_s));
        let mut names: Vec<&String> = samples.iter().flat_map(|s| s.stages.keys()).collect();
        names.sort();
        names.dedup();
        let stage = |name: &String| {
            let all: Vec<f64> =
                samples.iter().map(|s| s.stages.get(name).copied().unwrap_or(0.0)).collect();
            (name.clone(), 1e3 * median(&all))
        };
        let stages_ms: std::collections::BTreeMap<String, f64> =
            names.into_iter().map(stage).collect();
        let middle = median(&service);
        let rows_per_s = volume.ids / middle;
        let features: usize = self.tables.iter().map(|table| table.features.len()).sum();
        // Both read the same rows, so a ratio of times is one of rates.
        let share = |seconds: &dyn Fn(&Sample) -> f64| {
            let limit_s =
                |k: usize| limits_s.get(k).copied().unwrap_or(volume.ids / limit.rows_per_s);
            let shares = samples.iter().enumerate().map(|(k, s)| limit_s(k) / seconds(s));
            median(&shares.collect::<Vec<f64>>())
        };
        let lookup_s = |sample: &Sample| sample.stages.get("lookup").copied().unwrap_or(0.0);
        Ok(Point {
            batch: case.batch,
            pooling: case.hots.map_or("tables".into(), |hots| hots.to_string()),
            ids_per_bag: volume.ids / (case.batch * features.max(1)) as f64,
            ids_per_request: volume.ids,
            unique_rows_per_request: volume.unique_rows,
            bytes_per_request: volume.bytes,
            flops_per_request,
            rows_per_s,
            samples_per_s: case.batch as f64 / middle,
            gb_per_s: volume.bytes / middle / 1e9,
            share_of_limit: share(&|sample| sample.service_s),
            lookup_share_of_limit: share(&lookup_s),
            limit,
            rate: run.rate,
            latency_ms: LatencyMs::of(&latency),
            stages_ms,
            tail: tail(&samples),
            service_ms: service.iter().map(|s| s * 1e3).collect(),
            latencies_ms: latency.iter().map(|s| s * 1e3).collect(),
        })
    }

    /// The document, once every case is measured.
    fn document(
        mut self,
        command: &str,
        knobs: &impl Serialize,
        subject: String,
        mut points: Vec<Point>,
    ) -> Result<Document> {
        if let Some(mut gather) = self.gather.take() {
            for (point, &case) in points.iter_mut().zip(&self.cases) {
                let requests = self.requests(case)?;
                let after = self.limit(&mut gather, &requests);
                point.limit.rows_per_s_after = Some(after.rows_per_s);
            }
        }
        Ok(Document::new(command, self.machine, knobs, subject, points))
    }
}

/// What tables are measured, in words.
fn describe(tables: &[Table], knobs: &TableKnobs) -> String {
    let spec = &tables[0].spec;
    let all = |same: &dyn Fn(&Table) -> bool| tables.iter().all(same);
    let rows = match all(&|table| table.spec.rows == spec.rows) {
        true => format!("{} rows", spec.rows),
        false => format!("{} rows in all", tables.iter().map(|t| t.spec.rows).sum::<u64>()),
    };
    let dim = match all(&|table| table.spec.dim == spec.dim) {
        true => format!("dim {}", spec.dim),
        false => "dims of their own".into(),
    };
    let precision = match all(&|table| table.spec.precision == spec.precision) {
        true => format!("{:?}", spec.precision).to_lowercase(),
        false => "mixed precision".into(),
    };
    let optimizer = match all(&|table| table.spec.optimizer.name() == spec.optimizer.name()) {
        true => spec.optimizer.name(),
        false => "optimizers of their own",
    };
    let ids = match (&knobs.ids, &knobs.reuse) {
        (Some(path), _) => format!("ids of {}", path.display()),
        (None, Some(reuse)) => format!("reuse of {reuse}"),
        (None, None) => format!("alpha {}", knobs.alpha.unwrap_or(0.0)),
    };
    let weighted = if tables.iter().any(|table| table.weighted) { ", weighted" } else { "" };
    let number = tables.len();
    format!("{number} tables x {rows}, {dim}, {precision}, {optimizer}, {ids}{weighted}")
}

/// Runs `lookup` or `update`.
///
/// Errors: knobs that make no sense, a wrong answer, no memory.
pub fn run_tables(args: &TablesArgs, work: Work) -> Result<Document> {
    let defaults = Defaults { tables: 8, rows: 1_000_000, dim: 64, hots: Hots::fixed(20) };
    let tables = tables::tables(&args.tables, defaults)?;
    let mut bench = Bench::new(&args.tables, &args.run, tables, 2048, 0)?;
    let mut live = Tables::new(&bench.cpu, &bench.tables, args.run.seed)?;
    let mut points = Vec::new();
    for (index, &case) in bench.cases.clone().iter().enumerate() {
        let requests = bench.requests(case)?;
        let mut workload = Requests::new(&mut live, &requests, work)?;
        workload.check()?;
        let volume = workload.volume()?;
        points.push(bench.point(index, &mut workload, &requests, volume, 0.0)?);
    }
    let command = if work == Work::Lookup { "lookup" } else { "update" };
    let subject = describe(&bench.tables, &args.tables);
    bench.document(command, args, subject, points)
}

/// Runs `step`.
///
/// Errors: knobs or a configuration that make no sense, a wrong answer, no memory.
pub fn run_step(args: &StepArgs) -> Result<Document> {
    match &args.config {
        Some(path) => step_on_data(args, path),
        None => step_in_memory(args),
    }
}

fn step_in_memory(args: &StepArgs) -> Result<Document> {
    let defaults = Defaults { tables: 26, rows: 100_000, dim: 16, hots: Hots::fixed(1) };
    let tables = tables::tables(&args.tables, defaults)?;
    let mut bench = Bench::new(&args.tables, &args.run, tables, 2048, DENSE)?;
    let largest = bench.cases.iter().map(|case| case.batch).max().unwrap_or(1);
    let config = config_of_knobs(args, &bench.tables, largest)?;
    let mut training = Training::new(&bench.cpu, config)?;
    let points = step_points(&mut bench, &mut training, |training, batches, _| {
        Ok(Steps::in_memory(training, batches))
    })?;
    let subject = format!("{}; {}", model(training.spec()), describe(&bench.tables, &args.tables));
    bench.document("step", args, subject, points)
}

fn step_on_data(args: &StepArgs, path: &Path) -> Result<Document> {
    let mut config = Config::load(path, &[])?;
    if let Some(most) = args.tables.rows_max {
        for table in &mut config.tables {
            table.rows = table.rows.min(most);
        }
    }
    let mut run = args.run.clone();
    run.threads = run.threads.or(config.threads);
    // The limit is measured over the ids of the first batches.
    let knobs = TableKnobs { ids: Some(path.into()), ..args.tables.clone() };
    let tables = tables::of_config(&config)?;
    let mut bench = Bench::new(&knobs, &run, tables, config.data.batch_size, 0)?;
    let largest = bench.cases.iter().map(|case| case.batch).max().unwrap_or(1);
    config.data.batch_size = largest;
    config.data.eval_batch_size = largest;
    let mut training = Training::new(&bench.cpu, config)?;
    let points = step_points(&mut bench, &mut training, |training, _, case| {
        Steps::on_data(training, case.batch)
    })?;
    let subject = format!("{}; {}", model(training.spec()), describe(&bench.tables, &knobs));
    bench.document("step", args, subject, points)
}

/// What runs the steps of a case on its batches.
type MakeSteps = for<'a> fn(&'a mut Training, &'a [Batch], Case) -> Result<Steps<'a>>;

/// Checks the first step, then measures every case.
fn step_points(bench: &mut Bench, training: &mut Training, steps: MakeSteps) -> Result<Vec<Point>> {
    let mut points = Vec::new();
    for (index, &case) in bench.cases.clone().iter().enumerate() {
        let batches = bench.requests(case)?;
        if index == 0 {
            training.check(&batches[0])?;
        }
        let volume = training.volume(&batches)?;
        let flops = flops(training.spec(), case.batch);
        let mut steps = steps(training, &batches, case)?;
        points.push(bench.point(index, &mut steps, &batches, volume, flops)?);
    }
    Ok(points)
}

/// A dense network in words.
fn model(spec: &tessera_dense::ModelSpec) -> String {
    let chain =
        |widths: &[usize]| widths.iter().map(usize::to_string).collect::<Vec<_>>().join("-");
    let interaction = match spec.interaction {
        tessera_dense::Interaction::Dot => "dot".into(),
        tessera_dense::Interaction::Concat => "concat".into(),
        tessera_dense::Interaction::Dcn { layers, rank } => format!("{layers} x dcn {rank}"),
    };
    format!("bottom {}, {interaction}, top {}", chain(&spec.bottom), chain(&spec.top))
}
