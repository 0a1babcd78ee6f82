//! `pipeline`: the modes of the training pipeline over stages, links and compute that take as long
//! as the knobs say.
//!
//! ```text
//! serial     route + fetch + vectors + compute + gradients, one after the other
//! prefetch   route and fetch of later batches beside the rest
//! nested     that, and vectors and gradients of micro-batches beside compute: of them only the
//!            first micro-batch's vectors and the last one's gradients are waited for
//! ```
//! Stages and compute last longer by sleeping in them, links by a transport whose messages arrive
//! late; what runs is `tessera train` itself, whose losses must be the same in all modes. So
//! overlap shows on a machine whose cores could not compute and communicate at once.

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Serialize};
use tessera::cli::{ConfigArgs, Train};
use tessera::clock::{Lane, Probe, Stage};
use tessera::run_dir::StepLine;
use tessera::train::{Hooks, run_with};
use tessera_comm::LinkDelay;
use tessera_device::Cpu;

use crate::document::{Document, Figures};
use crate::knobs::OutputKnobs;
use crate::machine::Machine;
use crate::report::{Curve, plot};
use crate::stats::{LatencyMs, median, tail_curve};
use crate::{BenchError, Result};

/// The command's name in documents.
pub const COMMAND: &str = "pipeline";

/// Dense values a sample.
const DENSE: usize = 4;

/// Rows of each table: so many that a batch hardly repeats one.
const ROWS: u64 = 1_000_000;

/// `pipeline`.
#[derive(Clone, Debug, Args, Serialize)]
pub struct PipelineArgs {
    /// Ranks, threads of one process
    #[arg(long, default_value_t = 2)]
    pub ranks: usize,
    /// Samples of a global batch
    #[arg(long, default_value_t = 512)]
    pub batch: usize,
    /// Number of tables, each with one id a sample
    #[arg(long, default_value_t = 8)]
    pub tables: usize,
    /// Columns
    #[arg(long, default_value_t = 32)]
    pub dim: usize,
    /// Micro-batches of a batch, in all modes
    #[arg(long, default_value_t = NonZeroUsize::new(8).expect("not 0"))]
    pub micro_batches: NonZeroUsize,
    /// Batches on their way at once, in modes other than serial
    #[arg(long, default_value_t = NonZeroUsize::new(2).expect("not 0"))]
    pub depth: NonZeroUsize,
    /// Milliseconds that routing a batch takes
    #[arg(long, default_value_t = 100.0)]
    pub route_ms: f64,
    /// Milliseconds that fetching its rows takes
    #[arg(long, default_value_t = 100.0)]
    pub fetch_ms: f64,
    /// Milliseconds that forward and backward take, all micro-batches together
    #[arg(long, default_value_t = 120.0)]
    pub compute_ms: f64,
    /// Milliseconds that the bytes of a batch's vectors and gradients take on the link of a rank
    #[arg(long, default_value_t = 80.0)]
    pub link_ms: f64,
    /// Microseconds that a message takes besides
    #[arg(long, default_value_t = 50.0)]
    pub latency_us: f64,
    /// Steps measured
    #[arg(long, default_value_t = 24)]
    pub iterations: usize,
    /// Steps before those
    #[arg(long, alias = "warm-up", default_value_t = 6)]
    pub warmup: usize,
    /// Figures.
    #[command(flatten)]
    #[serde(flatten)]
    pub output: OutputKnobs,
}

/// Figures of a mode.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PipelinePoint {
    /// The mode.
    pub mode: String,
    /// Median milliseconds of a step.
    pub step_ms: f64,
    /// Serial's over it.
    pub speedup: f64,
    /// Milliseconds of a step that waited for routing and fetching.
    pub lookup_exposed_ms: f64,
    /// The same over the step.
    pub lookup_exposed_share: f64,
    /// Milliseconds of a step that waited for vectors and gradients.
    pub exchange_exposed_ms: f64,
    /// The same over all that serial waits for them.
    pub exchange_exposed_share: f64,
    /// Median of each stage in milliseconds.
    pub stages_ms: BTreeMap<String, f64>,
    /// Time of a step.
    pub latency_ms: LatencyMs,
    /// Time of every step in milliseconds.
    pub service_ms: Vec<f64>,
}

/// Makes stages last.
struct Delays {
    route: Duration,
    fetch: Duration,
    /// Of each micro-batch.
    forward: Duration,
    backward: Duration,
}

impl Probe for Delays {
    fn done(&self, stage: Stage<'_>) {
        std::thread::sleep(match (stage.lane, stage.name) {
            (_, "route") => self.route,
            (_, "fetch") => self.fetch,
            (Lane::Step, "forward") => self.forward,
            (Lane::Step, "backward") => self.backward,
            _ => Duration::ZERO,
        });
    }
}

/// A model whose compute is nothing beside the delays.
fn config(args: &PipelineArgs) -> String {
    let steps = args.warmup + args.iterations;
    let mut text = format!(
        "seed = 1\nthreads = {ranks}\n[data]\nformat = \"synthetic\"\nbatch_size = {batch}\n\
         [data.synthetic]\nsamples = {}\nalpha = 0.0\neval_samples = 0\n\
         [model]\ndense_features = {DENSE}\nbottom_mlp = [{dim}]\ntop_mlp = [1]\n\
         interaction = \"dot\"\n\
         [optimizer.sparse]\nkind = \"rowwise_adagrad\"\nlr = 0.01\n\
         [optimizer.dense]\nkind = \"sgd\"\nlr = 0.01\n\
         [parallel]\nranks = {ranks}\nroute = \"unique\"\n\
         [pipeline]\nmicro_batches = {}\n[tiers]\ndevice_bytes = 8000000\n",
        steps * args.batch,
        args.micro_batches,
        ranks = args.ranks,
        batch = args.batch,
        dim = args.dim,
    );
    for table in 0..args.tables {
        text += &format!(
            "[[table]]\nname = \"t{table}\"\nrows = {ROWS}\ndim = {}\nfeatures = [\"f{table}\"]\n\
             sharding = \"row_wise\"\n",
            args.dim
        );
    }
    text
}

/// The link over which a batch's vectors and gradients take as long as asked for: of the rows that
/// a rank needs, `ranks - 1` of `ranks` are elsewhere, and as many of its own others need.
fn link(args: &PipelineArgs) -> LinkDelay {
    let (ranks, rows) = (args.ranks as f64, (args.batch * args.tables) as f64);
    let remote = rows / ranks * (ranks - 1.0) / ranks;
    let bytes = 2.0 * remote * (args.dim * size_of::<f32>()) as f64;
    LinkDelay {
        latency: Duration::from_secs_f64(args.latency_us / 1e6),
        bytes_per_s: bytes / (args.link_ms / 1e3).max(1e-9),
    }
}

/// Trains in a mode; gives the lines of the steps after the warm-up, and all losses.
fn train(args: &PipelineArgs, folder: &Path, mode: &str) -> Result<(Vec<StepLine>, Vec<f64>)> {
    let wrong = |source| BenchError::Write { path: folder.to_path_buf(), source };
    let file = folder.join("config.toml");
    std::fs::write(&file, config(args)).map_err(wrong)?;
    let mut set = vec![format!("pipeline.mode={mode}")];
    if mode != "serial" {
        set.push(format!("pipeline.depth={}", args.depth));
    }
    let out = folder.join(mode);
    let parts = args.micro_batches.get() as f64;
    let part = |share: f64| Duration::from_secs_f64(args.compute_ms / 1e3 * share / parts);
    let delays = Delays {
        route: Duration::from_secs_f64(args.route_ms / 1e3),
        fetch: Duration::from_secs_f64(args.fetch_ms / 1e3),
        forward: part(1.0 / 3.0),
        backward: part(2.0 / 3.0),
    };
    let hooks = Hooks {
        probe: Some(Arc::new(delays)),
        link: Some(link(args)),
        quiet: true,
        ..Hooks::default()
    };
    let config = ConfigArgs { config: file, set };
    let train = Train { config, init: None, resume: None, trace: None, out: Some(out.clone()) };
    run_with(&train, &hooks)?;
    let read = |source| BenchError::Read { path: out.join("steps.jsonl"), source };
    let text = std::fs::read_to_string(out.join("steps.jsonl")).map_err(read)?;
    let lines = text.lines().map(|line| {
        serde_json::from_str(line)
            .map_err(|error| BenchError::Step(format!("a line of steps.jsonl: {error}")))
    });
    let lines: Vec<StepLine> = lines.collect::<Result<_>>()?;
    let losses = lines.iter().map(|line| line.loss.unwrap_or(f64::NAN)).collect();
    Ok((lines.into_iter().skip(args.warmup).collect(), losses))
}

/// Runs the command.
///
/// Errors: knobs that make no sense, losses that differ, what training says.
pub fn run(args: &PipelineArgs) -> Result<Document<PipelinePoint>> {
    if args.iterations == 0 || args.ranks < 2 || args.batch < args.ranks {
        return Err(BenchError::usage(
            "--iterations must be at least 1, --ranks at least 2 and --batch at least --ranks",
        ));
    }
    let write = |source| BenchError::Write { path: std::env::temp_dir(), source };
    let folder = tempfile::tempdir().map_err(write)?;
    let machine = Machine::look(&Cpu::new(NonZeroUsize::new(args.ranks))?);
    let mut points: Vec<PipelinePoint> = Vec::new();
    let mut first: Option<Vec<f64>> = None;
    for mode in ["serial", "prefetch", "nested"] {
        let (lines, losses) = train(args, folder.path(), mode)?;
        let expected = first.get_or_insert_with(|| losses.clone());
        if expected.len() != losses.len() {
            let reason = format!("mode {mode} made {} steps", losses.len());
            return Err(BenchError::Step(reason));
        }
        if let Some(at) = expected.iter().zip(&losses).position(|(a, b)| a != b) {
            let what = format!("loss of step {} in mode {mode}", at + 1);
            return Err(BenchError::WrongAnswer { what, got: losses[at], want: expected[at] });
        }
        points.push(PipelinePoint::of(mode, &lines, points.first()));
    }
    Ok(Document::new(
        COMMAND,
        machine,
        args,
        format!(
            "{} ranks, batch {} in {} micro-batches; route {} ms, fetch {} ms, compute {} ms, link {} ms",
            args.ranks,
            args.batch,
            args.micro_batches,
            args.route_ms,
            args.fetch_ms,
            args.compute_ms,
            args.link_ms
        ),
        points,
    ))
}

impl PipelinePoint {
    /// Of the steps of a run; `serial` is what they are held against.
    fn of(mode: &str, lines: &[StepLine], serial: Option<&Self>) -> Self {
        let names: std::collections::BTreeSet<&String> =
            lines.iter().flat_map(|line| line.stages.keys()).collect();
        let of_stage = |line: &StepLine, name: &str| line.stages.get(name).copied().unwrap_or(0.0);
        let stage =
            |name: &str| median(&lines.iter().map(|line| of_stage(line, name)).collect::<Vec<_>>());
        let stages_ms: BTreeMap<String, f64> =
            names.into_iter().map(|name| (name.clone(), stage(name))).collect();
        let together = |names: &[&str]| {
            let sum = |line| names.iter().map(|name| of_stage(line, name)).sum();
            median(&lines.iter().map(sum).collect::<Vec<f64>>())
        };
        let lookup_exposed_ms = match mode {
            "serial" => together(&["read", "route", "fetch", "hold"]),
            _ => together(&["wait", "hold"]),
        };
        let exchange_exposed_ms =
            together(&["lookup", "exchange_gradients", "all_reduce", "agree", "check"]);
        let service_ms: Vec<f64> = lines.iter().map(|line| line.step_ms).collect();
        let step_ms = median(&service_ms);
        let seconds: Vec<f64> = service_ms.iter().map(|ms| ms / 1e3).collect();
        Self {
            mode: mode.to_owned(),
            step_ms,
            speedup: serial.map_or(1.0, |serial| serial.step_ms / step_ms),
            lookup_exposed_ms,
            lookup_exposed_share: lookup_exposed_ms / step_ms,
            exchange_exposed_ms,
            exchange_exposed_share: serial
                .map_or(1.0, |serial| exchange_exposed_ms / serial.exchange_exposed_ms),
            stages_ms,
            latency_ms: LatencyMs::of(&seconds),
            service_ms,
        }
    }
}

impl Figures for PipelinePoint {
    fn case(&self) -> String {
        self.mode.clone()
    }

    fn service_ms(&self) -> &[f64] {
        &self.service_ms
    }

    fn latency_ms(&self) -> &LatencyMs {
        &self.latency_ms
    }

    /// Compute alone: nothing hides that.
    fn limit(&self) -> f64 {
        let compute = ["forward", "backward"].iter().filter_map(|name| self.stages_ms.get(*name));
        1e3 / compute.sum::<f64>().max(1e-9)
    }

    fn write(points: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<9} | {:>9} {:>8} | {:>14} {:>7} | {:>16} {:>10}",
            "mode",
            "step ms",
            "speedup",
            "lookup exposed",
            "of step",
            "exchange exposed",
            "of serial's"
        )?;
        for point in points {
            writeln!(
                f,
                "{:<9} | {:>9.2} {:>8.2} | {:>11.2} ms {:>6.1}% | {:>13.2} ms {:>10.1}%",
                point.mode,
                point.step_ms,
                point.speedup,
                point.lookup_exposed_ms,
                100.0 * point.lookup_exposed_share,
                point.exchange_exposed_ms,
                100.0 * point.exchange_exposed_share,
            )?;
        }
        Ok(())
    }

    fn plots(points: &[Self]) -> Result<Vec<String>> {
        let curve = |point: &Self| -> Curve {
            let seconds: Vec<f64> = point.service_ms.iter().map(|ms| ms / 1e3).collect();
            (point.mode.clone(), tail_curve(&seconds))
        };
        let curves: Vec<Curve> = points.iter().map(curve).collect();
        let x = "1 / (1 - quantile): 2 is the median, 100 is p99";
        Ok(vec![plot("Time of a step beyond a quantile", x, "ms", &curves)?])
    }
}
