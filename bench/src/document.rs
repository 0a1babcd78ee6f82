//! What a benchmark gives: one JSON document, and the same as a table for people.

use std::collections::BTreeMap;
use std::fmt::{self, Write};
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::machine::{Machine, git_describe};
use crate::stats::{LatencyMs, Tail};
use crate::{BenchError, Result, report};

/// Name and version of the document's schema.
pub const SCHEMA: &str = "tessera-bench/1";

/// Figures of one command.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Document<P = Point> {
    /// [`SCHEMA`].
    pub schema: String,
    /// `lookup`, `update`, `step`, `comm`, `cache`, `tiers` or `pipeline`.
    pub command: String,
    /// Version of the program.
    pub version: String,
    /// `git describe` where it ran.
    pub git: Option<String>,
    /// What it ran on.
    pub machine: Machine,
    /// Knobs as given.
    pub knobs: serde_json::Value,
    /// What was measured, in words.
    pub subject: String,
    /// One entry a case: a batch size and pooling, or an operation and size.
    pub points: Vec<P>,
}

/// Figures of one case of a command.
pub trait Figures: Serialize + DeserializeOwned {
    /// The case in words: what two documents must have in common to be compared.
    fn case(&self) -> String;

    /// Service time of every request in milliseconds.
    fn service_ms(&self) -> &[f64];

    /// Latency.
    fn latency_ms(&self) -> &LatencyMs;

    /// The machine's limit, more is faster.
    fn limit(&self) -> f64;

    /// Writes the table for people.
    ///
    /// Errors: those of writing.
    fn write(points: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result;

    /// Plots for the report, as SVG.
    ///
    /// Errors: [`BenchError::Plot`].
    fn plots(points: &[Self]) -> Result<Vec<String>>;
}

/// Figures of one batch size and pooling.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Point {
    /// Samples of a request.
    pub batch: usize,
    /// Ids a bag, as the knob says it, or `tables` where each feature has its own.
    pub pooling: String,
    /// The same as a number: the mean over all bags.
    pub ids_per_bag: f64,
    /// Ids of a request.
    pub ids_per_request: f64,
    /// Different rows of a request.
    pub unique_rows_per_request: f64,
    /// Bytes of a request that the command must move.
    pub bytes_per_request: f64,
    /// Additions and multiplications of the dense network in a request; 0 without one.
    pub flops_per_request: f64,
    /// The machine's limit over the same ids.
    pub limit: Limit,
    /// Rows looked up a second at the median service time.
    pub rows_per_s: f64,
    /// Samples a second at the median service time.
    pub samples_per_s: f64,
    /// Bytes moved a second at the median service time, in 10^9.
    pub gb_per_s: f64,
    /// Rows a second of the whole request over the limit's: the median over requests, each over
    /// its own pass of the limit with `--pair`, else over the limit measured first.
    pub share_of_limit: f64,
    /// Rows a second of stage `lookup` alone over the limit's.
    pub lookup_share_of_limit: f64,
    /// Requests a second asked for, in an open loop.
    pub rate: Option<f64>,
    /// Latency.
    pub latency_ms: LatencyMs,
    /// Median of each stage in milliseconds.
    pub stages_ms: BTreeMap<String, f64>,
    /// Where the slowest requests lost their time.
    pub tail: Option<Tail>,
    /// Service time of every request in milliseconds.
    pub service_ms: Vec<f64>,
    /// Latency of every request in milliseconds.
    pub latencies_ms: Vec<f64>,
}

/// The machine's own limit: see the `gather` module.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Limit {
    /// Rows a second, prefetching into the second-level cache: the limit.
    pub rows_per_s: f64,
    /// The same in bytes of rows, in 10^9 a second.
    pub gb_per_s: f64,
    /// Rows a second, prefetching into the first-level cache.
    pub rows_per_s_t0: f64,
    /// The limit once more when the benchmark was done: how steady the machine was.
    pub rows_per_s_after: Option<f64>,
    /// Time of every pass in milliseconds.
    pub samples_ms: Vec<f64>,
}

impl<P: Serialize + DeserializeOwned> Document<P> {
    /// What this program measured just now by `command` with these knobs.
    #[must_use]
    pub fn new(
        command: &str,
        machine: Machine,
        knobs: &impl Serialize,
        subject: String,
        points: Vec<P>,
    ) -> Self {
        Self {
            schema: SCHEMA.into(),
            command: command.into(),
            version: env!("CARGO_PKG_VERSION").into(),
            git: git_describe(),
            machine,
            knobs: serde_json::to_value(knobs).expect("knobs have string keys only"),
            subject,
            points,
        }
    }

    /// Reads a document.
    ///
    /// Errors: a file that cannot be read or is no such document.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| BenchError::Read { path: path.into(), source })?;
        let bad = |reason| BenchError::BadFile { path: path.into(), reason };
        let document: Self = serde_json::from_str(&text).map_err(|error| bad(error.to_string()))?;
        if document.schema != SCHEMA {
            return Err(bad(format!("its schema is {}, not {SCHEMA}", document.schema)));
        }
        Ok(document)
    }

    /// The document as text.
    #[must_use]
    pub fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("a document has string keys only")
    }
}

impl<P: Figures> fmt::Display for Document<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        let size =
            |kib: Option<u64>, unit: u64| kib.map_or("?".into(), |kib| (kib / unit).to_string());
        writeln!(f, "{}: {}", self.command, self.subject)?;
        writeln!(
            f,
            "on {}, {} of {} cores, {}, {} MiB cache, {} GiB memory, load {}",
            machine.cpu,
            machine.threads,
            machine.cores,
            machine.simd,
            size(machine.cache_kib, 1 << 10),
            size(machine.memory_mib, 1 << 10),
            machine.load.map_or("?".into(), |load| format!("{load:.1}")),
        )?;
        P::write(&self.points, f)
    }
}

impl Figures for Point {
    fn case(&self) -> String {
        format!("batch {:>6}, pooling {:>6}", self.batch, self.pooling)
    }

    fn service_ms(&self) -> &[f64] {
        &self.service_ms
    }

    fn latency_ms(&self) -> &LatencyMs {
        &self.latency_ms
    }

    fn limit(&self) -> f64 {
        self.limit.rows_per_s
    }

    fn plots(points: &[Self]) -> Result<Vec<String>> {
        report::request_plots(points)
    }

    fn write(points: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:>7} {:>9} | {:>8} {:>9} {:>7} {:>8} | {:>9} {:>7} {:>7} | {:>8} {:>8} {:>8} {:>8} {:>8} ms",
            "batch",
            "pooling",
            "Mrows/s",
            "samples/s",
            "GB/s",
            "GFLOP/s",
            "limit",
            "share",
            "lookup",
            "p50",
            "p90",
            "p99",
            "p99.9",
            "max"
        )?;
        for point in points {
            let latency = &point.latency_ms;
            let gflops = point.flops_per_request / point.batch as f64 * point.samples_per_s / 1e9;
            writeln!(
                f,
                "{:>7} {:>9} | {:>8.2} {:>9.0} {:>7.2} {:>8.1} | {:>9.2} {:>6.0}% {:>6.0}% | {:>8.3} {:>8.3} {:>8.3} {:>8.3} {:>8.3}",
                point.batch,
                point.pooling,
                point.rows_per_s / 1e6,
                point.samples_per_s,
                point.gb_per_s,
                gflops,
                point.limit.rows_per_s / 1e6,
                100.0 * point.share_of_limit,
                100.0 * point.lookup_share_of_limit,
                latency.p50,
                latency.p90,
                latency.p99,
                latency.p999,
                latency.max
            )?;
        }
        for point in points {
            writeln!(f, "\nbatch {}, pooling {}:", point.batch, point.pooling)?;
            let limit = &point.limit;
            let mut text = format!(
                "  limit    {:.2} Mrows/s, {:.2} GB/s; prefetching into L1 {:.2} Mrows/s",
                limit.rows_per_s / 1e6,
                limit.gb_per_s,
                limit.rows_per_s_t0 / 1e6
            );
            if let Some(after) = limit.rows_per_s_after {
                write!(text, "; at the end {:.2} Mrows/s", after / 1e6)?;
            }
            writeln!(f, "{text}")?;
            let total: f64 = point.stages_ms.values().sum();
            let stages: Vec<String> = point
                .stages_ms
                .iter()
                .map(|(name, ms)| format!("{name} {ms:.3} ms ({:.0}%)", 100.0 * ms / total))
                .collect();
            writeln!(f, "  stages   {}", stages.join(", "))?;
            writeln!(
                f,
                "  request  {:.0} ids, {:.0} different rows, {:.1} MB moved",
                point.ids_per_request,
                point.unique_rows_per_request,
                point.bytes_per_request / 1e6
            )?;
            if let Some(tail) = &point.tail {
                writeln!(
                    f,
                    "  tail     slowest {}: +{:.3} ms over the median; {}",
                    tail.requests, tail.excess_ms, tail.cause
                )?;
            }
        }
        Ok(())
    }
}
