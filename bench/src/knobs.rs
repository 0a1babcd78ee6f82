//! The command line: knobs in the field's terms.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::cache::knobs::{CacheArgs, TiersArgs};
pub use crate::comm::knobs::CommArgs;
pub use crate::pipeline::PipelineArgs;

/// Measures Tessera on this machine, against this machine's own limit.
#[derive(Debug, Parser)]
#[command(name = "tessera-bench", version, propagate_version = true)]
pub struct Cli {
    /// What to measure.
    #[command(subcommand)]
    pub command: Command,
}

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Pooled lookups: ids in, one vector a bag and feature out
    Lookup(TablesArgs),
    /// Lookup, then backward and optimizer fused: rows that occur move once
    Update(TablesArgs),
    /// Whole training steps of a DLRM or DCNv2
    Step(StepArgs),
    /// Operations between ranks: bandwidth and latency of each, for every size
    Comm(CommArgs),
    /// One table in tiers: what each tier gives, and the disk's own limit
    Cache(CacheArgs),
    /// Training steps of a model in tiers, against the same model resident
    Tiers(TiersArgs),
    /// The modes of the training pipeline over stages and links that take as long as asked for
    Pipeline(PipelineArgs),
    /// Ratios between two earlier outputs of --json, with their spread
    Compare(CompareArgs),
}

/// Ids a bag: the same number always, or uniform on `mean - spread ..= mean + spread`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hots {
    /// Mean.
    pub mean: usize,
    /// Largest difference to it.
    pub spread: usize,
}

impl Hots {
    /// Always `mean` ids.
    #[must_use]
    pub fn fixed(mean: usize) -> Self {
        Self { mean, spread: 0 }
    }
}

impl FromStr for Hots {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (mean, spread) = text.split_once(':').unwrap_or((text, "0"));
        let number = |text: &str| {
            text.parse::<usize>().map_err(|error| format!("`{text}` is no number of ids: {error}"))
        };
        let hots = Self { mean: number(mean)?, spread: number(spread)? };
        if hots.spread > hots.mean {
            return Err(format!("spread {} is above the mean {}", hots.spread, hots.mean));
        }
        Ok(hots)
    }
}

impl fmt::Display for Hots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.spread {
            0 => write!(f, "{}", self.mean),
            spread => write!(f, "{}:{spread}", self.mean),
        }
    }
}

impl Serialize for Hots {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// How a table stores its weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum PrecisionKnob {
    /// IEEE binary32
    Fp32,
    /// IEEE binary16
    Fp16,
    /// bfloat16
    Bf16,
}

/// Sparse optimizer, with the usual hyper-parameters (lr 0.01, eps 1e-8).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
#[allow(missing_docs)] // Their formulas are documented where they are implemented.
pub enum OptimizerKnob {
    Sgd,
    Adagrad,
    RowwiseAdagrad,
    Adam,
    PartialRowwiseAdam,
    Lamb,
    PartialRowwiseLamb,
    LarsSgd,
    Ftrl,
}

/// Which tables there are and what is looked up in them.
#[derive(Clone, Debug, Default, Args, Serialize)]
pub struct TableKnobs {
    /// Number of tables
    #[arg(long)]
    pub tables: Option<usize>,
    /// Rows of each table
    #[arg(long)]
    pub rows: Option<u64>,
    /// Columns: one number, or a list that the tables take in turn
    #[arg(long, value_delimiter = ',')]
    pub dim: Vec<usize>,
    /// Samples of a request; a list measures one after the other
    #[arg(long, value_delimiter = ',')]
    pub batch: Vec<usize>,
    /// Ids a bag: `20`, or mean and spread `20:10`; a list measures one after the other
    #[arg(long, value_delimiter = ',')]
    pub pooling: Vec<Hots>,
    /// Zipf exponent of the ids' popularity; 0 is uniform
    #[arg(long)]
    pub alpha: Option<f64>,
    /// A weight per id
    #[arg(long)]
    pub weighted: bool,
    /// How tables store weights
    #[arg(long, value_enum)]
    pub precision: Option<PrecisionKnob>,
    /// Sparse optimizer
    #[arg(long, value_enum)]
    pub optimizer: Option<OptimizerKnob>,
    /// Tables from a file: a csv of table sizes, or a training configuration (.toml)
    #[arg(long, value_name = "FILE", conflicts_with_all = ["tables", "rows"])]
    pub table_set: Option<PathBuf>,
    /// Column of the csv that holds the rows, where there are several
    #[arg(long, value_name = "NAME", requires = "table_set")]
    pub rows_column: Option<String>,
    /// Cut every table to at most this many rows
    #[arg(long)]
    pub rows_max: Option<u64>,
    /// Ids from a file: a training configuration (.toml) whose data is read, a file of
    /// --dump-ids, or little-endian 64-bit ids (.i64) dealt to bags in order
    #[arg(long, value_name = "FILE", conflicts_with_all = ["alpha", "reuse"])]
    pub ids: Option<PathBuf>,
    /// Ids that recur as those of a trace: a locality-stats file and the trace's name
    #[arg(long, value_name = "FILE:TRACE", conflicts_with = "alpha")]
    pub reuse: Option<String>,
}

/// Where figures go.
#[derive(Clone, Debug, Default, Args, Serialize)]
pub struct OutputKnobs {
    /// Print one JSON document instead of a table
    #[arg(long)]
    pub json: bool,
    /// Write a report with plots
    #[arg(long, value_name = "FILE.html")]
    pub report: Option<PathBuf>,
    /// Compare with an earlier output of --json
    #[arg(long, value_name = "OLD.json")]
    pub compare: Option<PathBuf>,
}

/// How measuring goes, and where figures go.
#[derive(Clone, Debug, Args, Serialize)]
pub struct RunKnobs {
    /// Worker threads [default: all cores]
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Requests measured
    #[arg(long, default_value_t = 100)]
    pub iterations: usize,
    /// Requests before those
    #[arg(long, default_value_t = 5)]
    pub warmup: usize,
    /// Different requests, taken in turn
    #[arg(long, default_value_t = 8)]
    pub requests: usize,
    /// Overwrite the caches before every request
    #[arg(long)]
    pub flush: bool,
    /// Read the limit again before every request, over its ids, and take shares of the limit
    /// from these pairs: for machines that others use meanwhile
    #[arg(long, conflicts_with = "rate")]
    pub pair: bool,
    /// Open loop: requests arrive at this rate whether the last one is done or not, and latency
    /// counts from the moment each was due; without it the next request waits for the last
    #[arg(long, value_name = "REQUESTS_PER_S")]
    pub rate: Option<f64>,
    /// Seed of ids, weights and values
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Figures.
    #[command(flatten)]
    #[serde(flatten)]
    pub output: OutputKnobs,
    /// Write the requests to a file, for other programs to run the same
    #[arg(long, value_name = "FILE")]
    pub dump_ids: Option<PathBuf>,
}

/// `lookup` and `update`.
#[derive(Clone, Debug, Args, Serialize)]
pub struct TablesArgs {
    /// Tables and ids.
    #[command(flatten)]
    #[serde(flatten)]
    pub tables: TableKnobs,
    /// Measuring.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunKnobs,
}

/// How features meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ModelKnob {
    /// Dot products of all pairs (DLRM)
    Dot,
    /// Low-rank cross layers (DCNv2)
    Dcn,
}

/// Dense optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
#[allow(missing_docs)] // Their formulas are documented where they are implemented.
pub enum DenseOptimizerKnob {
    Sgd,
    Adagrad,
    Adam,
}

/// `step`.
#[derive(Clone, Debug, Args, Serialize)]
pub struct StepArgs {
    /// Training configuration: its model on its own data, reading included. Without one, the
    /// knobs make a model, and batches wait in memory
    #[arg(conflicts_with_all = ["tables", "rows", "dim", "pooling", "alpha", "weighted", "precision",
        "optimizer", "table_set", "ids", "reuse", "model", "bottom", "top", "dcn_rank", "dcn_layers",
        "dense_optimizer", "seed", "dump_ids"])]
    pub config: Option<PathBuf>,
    /// Tables and ids.
    #[command(flatten)]
    #[serde(flatten)]
    pub tables: TableKnobs,
    /// Interaction
    #[arg(long, value_enum)]
    pub model: Option<ModelKnob>,
    /// Widths of the bottom MLP, as 512-256-16
    #[arg(long)]
    pub bottom: Option<String>,
    /// Widths of the top MLP, as 512-256-1
    #[arg(long)]
    pub top: Option<String>,
    /// Rank of the cross layers of model dcn [default: 512]
    #[arg(long)]
    pub dcn_rank: Option<usize>,
    /// Cross layers of model dcn [default: 3]
    #[arg(long)]
    pub dcn_layers: Option<usize>,
    /// Optimizer of the dense network, with the usual hyper-parameters (lr 0.01, eps 1e-8)
    #[arg(long, value_enum, default_value_t = DenseOptimizerKnob::Sgd)]
    pub dense_optimizer: DenseOptimizerKnob,
    /// Measuring.
    #[command(flatten)]
    #[serde(flatten)]
    pub run: RunKnobs,
}

/// `compare`.
#[derive(Clone, Debug, Args)]
pub struct CompareArgs {
    /// The earlier output
    pub old: PathBuf,
    /// The later output
    pub new: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }

    #[test]
    fn pooling_is_a_number_or_mean_and_spread() {
        assert_eq!("20".parse(), Ok(Hots::fixed(20)));
        assert_eq!("20:5".parse(), Ok(Hots { mean: 20, spread: 5 }));
        assert_eq!(Hots { mean: 20, spread: 5 }.to_string(), "20:5");
        assert!("5:6".parse::<Hots>().unwrap_err().contains("above the mean"));
        assert!("x".parse::<Hots>().unwrap_err().contains("`x`"));
    }

    #[test]
    fn lists_and_conflicts_are_understood() {
        let parse = |args: &[&str]| Cli::try_parse_from(["tessera-bench"].iter().chain(args));
        let cli = parse(&["lookup", "--batch", "1,8", "--pooling", "1,20:5"]).unwrap();
        let Command::Lookup(args) = cli.command else { panic!("not lookup") };
        assert_eq!(args.tables.batch, [1, 8]);
        assert_eq!(args.tables.pooling, [Hots::fixed(1), Hots { mean: 20, spread: 5 }]);
        assert!(parse(&["lookup", "--alpha", "1", "--reuse", "f:t"]).is_err());
        assert!(parse(&["step", "c.toml", "--dim", "16"]).is_err());
        assert!(parse(&["lookup", "--rows-column", "x"]).is_err());
    }
}
