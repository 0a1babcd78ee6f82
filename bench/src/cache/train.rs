//! `tiers`: training steps of a model whose tables lie in tiers, against the same model with all rows
//! in memory.
//!
//! ```text
//! tiers      write every row once; steps that fill the tiers; rounds of steps that count ([`steps`])
//! disk       in each round, random 4 KiB reads of the tables' own files: what misses cost at the least
//! in serial  steps of mode serial, in the same rounds
//! overlap    mode prefetch against what overlapping those could bring
//! resident   the same steps
//!
//! [`steps`]: super::steps
//! ```
//! Every row is written before anything is measured, so that one which was never trained is read back
//! instead of being made anew. Batches are never twice the same; as in mode prefetch of training, one thread draws
//! and routes later ones and another fetches their rows while a step trains. Losses of
//! both models must be the same, to the bit. The rate to reach is the resident one, or that at which
//! the disk's random reads bring the rows that steps miss, whichever is lower.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tessera::config::Config;
use tessera_cache::StoreStats;
use tessera_device::Cpu;
use tessera_embedding::{ColdTier, Tiers};

use super::knobs::TiersArgs;
use super::point::Shares;
use super::steps::{DiskProbe, Run, Steps};
use crate::document::{Document, Figures};
use crate::draw::Law;
use crate::knobs::{DenseOptimizerKnob, Hots, OutputKnobs, RunKnobs, StepArgs, TableKnobs};
use crate::machine::Machine;
use crate::report::{Curve, plot};
use crate::requests::{Draw, Drawer};
use crate::stats::{LatencyMs, median, tail_curve};
use crate::step::{DENSE, Training, config_of_knobs};
use crate::tables::{self, Defaults, Table};
use crate::{BenchError, Result};

/// The command's name in documents.
pub const COMMAND: &str = "tiers";

/// Reads in flight then.
const DEPTH: usize = 64;

/// Figures of the model in tiers or resident.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TrainPoint {
    /// `tiers` or `resident`.
    pub case: String,
    /// Steps a second: all over the whole time, drawing left out.
    pub steps_per_s: f64,
    /// The rate to reach; of the resident model its own.
    pub limit_steps_per_s: f64,
    /// Steps a second over that.
    pub share_of_limit: f64,
    /// Where the rows of steps lay.
    pub shares: Option<Shares>,
    /// Different rows of a step, over all tables.
    pub rows_per_step: Option<f64>,
    /// Rows that a step read from the SSD.
    pub misses_per_step: Option<f64>,
    /// Random 4 KiB reads of the disk a second.
    pub reads_per_s: Option<f64>,
    /// Share of steps' time that they waited for the SSD to read.
    pub ssd_wait: Option<f64>,
    /// Share of steps' time that they waited for the SSD to write.
    pub ssd_write: Option<f64>,
    /// Of mode serial: share of steps' time that they waited for rows to be fetched.
    pub fetch_share: Option<f64>,
    /// Cores that worked at a time.
    pub cores: Option<f64>,
    /// Of mode serial: that share without the time that cores worked for fetching.
    pub fetch_wait: Option<f64>,
    /// Memory of the process that is no file's, and locked memory, at its most, in bytes; `None`
    /// where the system does not tell.
    pub peak_bytes: Option<u64>,
    /// The bound of that: budgets of the tiers, 15% more and 500 MB.
    pub peak_bytes_bound: Option<u64>,
    /// Time of a step.
    pub latency_ms: LatencyMs,
    /// Mean time of each stage of a step in milliseconds. Of mode prefetch, routing and fetching go
    /// on beside the others, and steps `wait` for batches that are not fetched yet.
    pub stages_ms: BTreeMap<String, f64>,
    /// Time of every step in milliseconds.
    pub service_ms: Vec<f64>,
}

/// The point of a mode.
fn point(case: &str, run: &Run, steps: &Steps, limit_steps_per_s: f64) -> TrainPoint {
    let steps_per_s = steps.per_s();
    TrainPoint {
        case: case.into(),
        steps_per_s,
        limit_steps_per_s,
        share_of_limit: steps_per_s / limit_steps_per_s,
        shares: None,
        rows_per_step: None,
        misses_per_step: None,
        reads_per_s: None,
        ssd_wait: None,
        ssd_write: None,
        fetch_share: None,
        cores: None,
        fetch_wait: None,
        peak_bytes: run.peak_bytes,
        peak_bytes_bound: None,
        latency_ms: LatencyMs::of(&steps.seconds),
        stages_ms: steps
            .stages
            .iter()
            .map(|(stage, ms)| (stage.clone(), ms / steps.count as f64))
            .collect(),
        service_ms: steps.seconds.iter().map(|s| s * 1e3).collect(),
    }
}

/// The configuration that the knobs ask for, all rows in memory.
fn config(args: &TiersArgs, tables: &[Table]) -> Result<Config> {
    let run = RunKnobs {
        threads: args.threads,
        iterations: args.iterations,
        warmup: args.warmup,
        requests: 1,
        flush: false,
        pair: false,
        rate: None,
        seed: args.seed,
        output: OutputKnobs::default(),
        dump_ids: None,
    };
    let step = StepArgs {
        config: None,
        tables: TableKnobs::default(),
        model: None,
        bottom: args.bottom.clone(),
        top: args.top.clone(),
        dcn_rank: None,
        dcn_layers: None,
        dense_optimizer: DenseOptimizerKnob::Sgd,
        run,
    };
    config_of_knobs(&step, tables, args.batch)
}

/// A new model, every row of it written.
fn model(cpu: &Cpu, config: &Config) -> Result<Training> {
    let mut training = Training::new(cpu, config.clone())?;
    if config.tiers.is_some() {
        training.write_rows()?;
    }
    Ok(training)
}

/// Runs the command.
///
/// Errors: knobs that make no sense, tables that do not fit, losses that differ.
pub fn run(args: &TiersArgs) -> Result<Document<TrainPoint>> {
    if args.iterations == 0 || args.batch == 0 {
        return Err(BenchError::usage("--iterations and --batch must be at least 1"));
    }
    let knobs = TableKnobs {
        dim: vec![args.dim],
        precision: Some(args.precision),
        optimizer: Some(args.optimizer),
        ..TableKnobs::default()
    };
    let hots = Hots::fixed(1);
    let defaults = Defaults { tables: args.tables, rows: args.rows, dim: args.dim, hots };
    let tables = tables::tables(&knobs, defaults)?;
    let bytes = tables::bytes(&tables);
    if !args.no_resident {
        tables::check_memory(bytes)?;
    }
    let mut config = config(args, &tables)?;
    let (device, host) = (args.device_bytes.0 as u64, args.host_bytes.0 as u64);
    let cold = args.ssd_dir.as_ref().map(|dir| ColdTier {
        dir: dir.clone(),
        bytes: args.ssd_bytes.map(|size| size.0 as u64),
        reader: args.reader.reader(),
    });
    let tiers =
        Tiers { device_bytes: device, host_bytes: Some(host), cold, policy: args.policy.policy() };
    config.tiers = Some(tiers);
    let cpu = Cpu::new(args.threads)?;
    let machine = Machine::look(&cpu);
    let draw = Draw { batch: args.batch, hots: None, requests: 1, dense: DENSE, seed: args.seed };
    let law = Law::Zipf { alpha: args.alpha };

    let steps = (args.warmup, args.iterations);
    let disk = args.ssd_dir.as_deref().map(|dir| DiskProbe {
        dir,
        depth: DEPTH,
        duration: Duration::from_millis(args.disk_ms),
        seed: args.seed,
    });
    let tiered = {
        let mut training = model(&cpu, &config)?;
        Run::of(&mut training, steps, &mut Drawer::new(&tables, &law, draw)?, disk)?
    };
    config.tiers = None;
    let resident = match args.no_resident {
        true => None,
        false => {
            let mut training = model(&cpu, &config)?;
            Some(Run::of(&mut training, steps, &mut Drawer::new(&tables, &law, draw)?, None)?)
        }
    };
    let points = points(&tiered, resident.as_ref(), device + host)?;
    let (number, rows, dim, alpha) = (args.tables, args.rows, args.dim, args.alpha);
    let (batch, optimizer) = (args.batch, tables[0].spec.optimizer.name());
    Ok(Document::new(
        COMMAND,
        machine,
        args,
        format!(
            "{number} tables x {rows} rows, dim {dim}, {optimizer}, {:.2} GB; alpha {alpha}, batch \
             {batch}; device {}, host {}",
            bytes as f64 / 1e9,
            args.device_bytes,
            args.host_bytes
        ),
        points,
    ))
}

/// The points of both models.
fn points(run: &Run, resident: Option<&Run>, budget_bytes: u64) -> Result<Vec<TrainPoint>> {
    if let Some(resident) = resident
        && let Some(at) = run.losses.iter().zip(&resident.losses).position(|(t, r)| t != r)
    {
        return Err(BenchError::WrongAnswer {
            what: format!("loss of step {} in tiers", at + 1),
            got: run.losses[at],
            want: resident.losses[at],
        });
    }
    let reads_per_s = (!run.disk_reads_per_s.is_empty()).then(|| median(&run.disk_reads_per_s));
    let misses_of = |steps: &Steps| steps.stats.cold_rows as f64 / steps.count as f64;
    let mut limit = resident.map_or(f64::INFINITY, |resident| resident.prefetch.per_s());
    let misses = misses_of(&run.prefetch);
    if let Some(reads) = reads_per_s
        && misses > 0.0
    {
        limit = limit.min(reads / misses);
    }
    if limit.is_infinite() {
        limit = run.prefetch.per_s();
    }
    let serial_s = run.serial.seconds.iter().sum::<f64>();
    let share = run.serial.stages.get("fetch").copied().unwrap_or(0.0) / 1e3 / serial_s;
    // Of two things that take shares of the time, the longer one is what overlapping leaves. Cores
    // that work for a fetch do not wait: they are missing elsewhere.
    let waiting = (share - run.serial.fetch_core_s / serial_s).max(0.0);
    let bound = run.serial.per_s() / waiting.max(1.0 - waiting);
    let in_tiers = |case: &str, steps: &Steps, limit: f64| {
        let stats = &steps.stats;
        let count = steps.count as f64;
        let rows = stats.device.hits + stats.host.hits + stats.cold_rows + stats.first_rows;
        let total = steps.seconds.iter().sum::<f64>() / steps.seconds.len() as f64 * count;
        TrainPoint {
            shares: Some(Shares::between(&StoreStats::default(), stats)),
            rows_per_step: Some(rows as f64 / count),
            misses_per_step: Some(misses_of(steps)),
            reads_per_s,
            ssd_wait: Some(stats.cold_wait_s / total),
            ssd_write: Some(stats.cold_write_s / total),
            cores: Some(steps.core_s / total),
            peak_bytes_bound: Some(budget_bytes + budget_bytes * 15 / 100 + 500_000_000),
            ..point(case, run, steps, limit)
        }
    };
    let mut points = vec![
        in_tiers("tiers", &run.prefetch, limit),
        TrainPoint {
            fetch_share: Some(share),
            fetch_wait: Some(waiting),
            ..in_tiers("in serial", &run.serial, run.serial.per_s())
        },
        TrainPoint { peak_bytes: None, ..point("overlap", run, &run.prefetch, bound) },
    ];
    points.extend(resident.map(|run| point("resident", run, &run.prefetch, run.prefetch.per_s())));
    Ok(points)
}

impl Figures for TrainPoint {
    fn case(&self) -> String {
        self.case.clone()
    }

    fn service_ms(&self) -> &[f64] {
        &self.service_ms
    }

    fn latency_ms(&self) -> &LatencyMs {
        &self.latency_ms
    }

    fn limit(&self) -> f64 {
        self.limit_steps_per_s
    }

    fn write(points: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<9} | {:>8} {:>8} {:>6} | {:>8} {:>8} {:>8} {:>8} ms | {:>9}",
            "what", "steps/s", "to reach", "share", "p50", "p90", "p99", "max", "memory MB"
        )?;
        for point in points {
            let latency = &point.latency_ms;
            writeln!(
                f,
                "{:<9} | {:>8.2} {:>8.2} {:>6.2} | {:>8.2} {:>8.2} {:>8.2} {:>8.2}    | {:>9}",
                point.case,
                point.steps_per_s,
                point.limit_steps_per_s,
                point.share_of_limit,
                latency.p50,
                latency.p90,
                latency.p99,
                latency.max,
                point.peak_bytes.map_or("?".into(), |bytes| (bytes / 1_000_000).to_string()),
            )?;
        }
        for point in points {
            let (Some(shares), Some(rows), Some(misses)) =
                (&point.shares, point.rows_per_step, point.misses_per_step)
            else {
                continue;
            };
            writeln!(
                f,
                "\nof {rows:.0} rows a step {:.2}% are on device, {:.2}% in the host tier, {:.2}% on SSD, {:.2}% new; \
                 {misses:.0} misses a step",
                100.0 * shares.device,
                100.0 * shares.host,
                100.0 * shares.ssd,
                100.0 * shares.first
            )?;
            let stages: Vec<String> =
                point.stages_ms.iter().map(|(stage, ms)| format!("{stage} {ms:.2}")).collect();
            writeln!(f, "stages, ms: {}", stages.join(", "))?;
            if let Some(cores) = point.cores {
                writeln!(f, "{cores:.2} cores worked at a time")?;
            }
            let percent = |share: Option<f64>| 100.0 * share.unwrap_or(0.0);
            if let (Some(share), Some(wait)) = (point.fetch_share, point.fetch_wait) {
                writeln!(
                    f,
                    "in serial, rows are fetched for {:.1}% of the time, {:.1}% without any core's work: that \
                     overlapped, steps could be 1 / {:.2} as long",
                    100.0 * share,
                    100.0 * wait,
                    1.0 / wait.max(1.0 - wait)
                )?;
                continue;
            }
            writeln!(
                f,
                "waiting for the SSD: {:.1}% of the time for reads, {:.1}% for writes; the disk gives {:.0} \
                 random reads a second",
                percent(point.ssd_wait),
                percent(point.ssd_write),
                point.reads_per_s.unwrap_or(0.0)
            )?;
            if let Some(bound) = point.peak_bytes_bound {
                writeln!(f, "memory may be {} MB", bound / 1_000_000)?;
            }
        }
        Ok(())
    }

    fn plots(points: &[Self]) -> Result<Vec<String>> {
        let curve = |point: &Self| -> Curve {
            let seconds: Vec<f64> = point.service_ms.iter().map(|ms| ms / 1e3).collect();
            (point.case.clone(), tail_curve(&seconds))
        };
        let curves: Vec<Curve> = points.iter().map(curve).collect();
        let x = "1 / (1 - quantile): 2 is the median, 100 is p99";
        Ok(vec![plot("Time of a step beyond a quantile", x, "ms", &curves)?])
    }
}
