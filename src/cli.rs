//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use tessera_data::Format;

/// Trains deep learning recommendation models (DLRM, DCNv2).
#[derive(Debug, Parser)]
#[command(name = "tessera", version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// A command.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train a model, evaluate it and write checkpoints
    Train(Train),
    /// Evaluate a checkpoint on the configuration's evaluation data
    Eval(Eval),
    /// Write a prediction for every sample to a Parquet file
    Predict(Predict),
    /// Write a checkpoint's weights as one safetensors file
    Export(Export),
    /// Plan which rank keeps which part of which table
    Plan(Plan),
    /// Simulate training steps on machines that are not at hand
    Simulate(Simulate),
    /// Tell what a trace shows: exposed stages, busy lanes, the critical path
    TraceReport(TraceReport),
    /// Make, convert and look at data
    #[command(subcommand)]
    Data(Data),
    /// Show what this machine offers: processor, memory, io_uring, MPI, NVIDIA's driver, GPUs and
    /// libraries; and what to install for what is missing
    Doctor(Doctor),
}

/// A configuration and changes to it.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// Configuration file (docs/config.md lists every key)
    pub config: PathBuf,
    /// Change one key, such as train.epochs=2 or table.0.rows=10; repeatable
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
}

/// `tessera train`.
#[derive(Debug, Args)]
pub struct Train {
    /// What to train.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Start from these weights (safetensors; optimizer states may be lacking)
    #[arg(long, value_name = "W.safetensors", conflicts_with = "resume")]
    pub init: Option<PathBuf>,
    /// Go on from a run's last checkpoint, or from a step-N folder
    #[arg(long, value_name = "DIR")]
    pub resume: Option<PathBuf>,
    /// Write a timeline of all stages and operations to this file, for Perfetto or trace-report;
    /// with MPI each rank writes one, its number before the file's ending
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Folder of the run: new or empty, or the run being resumed
    /// [default: the resumed run, or runs/NAME-N: the config's name and the first free number]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
}

/// `tessera eval`.
#[derive(Debug, Args)]
pub struct Eval {
    /// Which model and data.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// A run's folder (its last checkpoint), or a step-N folder
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `tessera predict`.
#[derive(Debug, Args)]
pub struct Predict {
    /// Which model and data.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// A run's folder (its last checkpoint), or a step-N folder
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Parquet file to write: sample, label, score
    #[arg(long, value_name = "FILE.parquet")]
    pub out: PathBuf,
}

/// `tessera export`.
#[derive(Debug, Args)]
pub struct Export {
    /// A run's folder (its last checkpoint), or a step-N folder
    #[arg(long, value_name = "DIR")]
    pub checkpoint: PathBuf,
    /// Safetensors file to write
    #[arg(long, value_name = "W.safetensors")]
    pub out: PathBuf,
    /// Names and order of the weights
    #[arg(long, value_enum, default_value_t = Layout::Tessera)]
    pub layout: Layout,
}

/// Whose names and order an export follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Layout {
    /// Our own logical names, optimizer states included
    Tessera,
    /// The state dict of the DLRM reference implementation
    Dlrm,
    /// The state dict of TorchRec's DLRM and DLRM_DCN
    Torchrec,
}

/// `tessera plan`.
#[derive(Debug, Args)]
pub struct Plan {
    /// Configuration whose tables are planned (docs/config.md lists every key)
    #[arg(required_unless_present_any = ["tables", "costs"])]
    pub config: Option<PathBuf>,
    /// Change one key of the configuration, such as table.0.rows=10; repeatable
    #[arg(long, value_name = "KEY=VALUE", requires = "config")]
    pub set: Vec<String>,
    /// Plan a set of tables: a CSV file with rows and more (docs/planning.md lists its columns)
    #[arg(long, value_name = "FILE.csv", conflicts_with_all = ["config", "costs"])]
    pub tables: Option<PathBuf>,
    /// Plan tables whose costs are known: a CSV file with table, rows, dim, cost and bytes
    #[arg(long, value_name = "FILE.csv", conflicts_with = "config", requires = "bytes_max")]
    pub costs: Option<PathBuf>,
    /// Memory of a rank, in bytes, for --costs
    #[arg(long, value_name = "BYTES", requires = "costs")]
    pub bytes_max: Option<u64>,
    /// Speeds and memory: a TOML file, or one of cpu, a100 and h100
    /// [default: cpu; with --tables: h100]
    #[arg(long, value_name = "T.toml", conflicts_with = "costs")]
    pub topology: Option<String>,
    /// Ranks over all replicas [default: the configuration's parallel.ranks]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
    /// Groups of two-dimensional parallelism, or `auto` for the number that costs least
    /// [default: the configuration's parallel.replicas]
    #[arg(long, value_name = "M", conflicts_with = "costs")]
    pub replicas: Option<Replicas>,
    /// Print what every number of replicas costs, instead of a plan
    #[arg(long, conflicts_with_all = ["costs", "replicas"])]
    pub curve: bool,
    /// Which ranks form a group [default: the configuration's parallel.placement]
    #[arg(long, value_enum, conflicts_with = "costs")]
    pub placement: Option<GroupPlacement>,
    /// Steps between synchronisations of replicas [default: the configuration's
    /// parallel.sync_every]
    #[arg(long, value_name = "STEPS", conflicts_with = "costs", value_parser = clap::value_parser!(u64).range(1..))]
    pub sync_every: Option<u64>,
    /// Count the ids of this many batches of the configuration's training data
    #[arg(long, value_name = "BATCHES", requires = "config")]
    pub sample: Option<u64>,
    /// Send unique rows only, so that all plans give the same bits
    #[arg(long, conflicts_with = "costs")]
    pub exact: bool,
    /// Samples of a step over all ranks, for --tables
    #[arg(long, value_name = "SAMPLES", requires = "tables", default_value_t = 65_536, value_parser = clap::value_parser!(u64).range(1..))]
    pub batch_size: u64,
    /// Optimizer whose state the tables of --tables keep
    #[arg(long, value_name = "KIND", requires = "tables", default_value = "adagrad")]
    pub optimizer: String,
    /// Columns of each table of --tables whose file does not tell
    #[arg(long, value_name = "COLUMNS", requires = "tables", default_value_t = 128)]
    pub dim: usize,
    /// Column of --tables that holds the rows
    /// [default: the first of rows, vocabulary_size, hash_size and mlperf_v2_rows]
    #[arg(long, value_name = "COLUMN", requires = "tables")]
    pub rows_column: Option<String>,
    /// Print JSON: what parallel.plan of a configuration takes, with the estimates
    #[arg(long)]
    pub json: bool,
}

/// `--replicas`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replicas {
    /// The number that costs least.
    Auto,
    /// So many.
    Fixed(usize),
}

impl std::str::FromStr for Replicas {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.parse::<usize>() {
            Ok(count) if count > 0 => Ok(Self::Fixed(count)),
            _ if text == "auto" => Ok(Self::Auto),
            _ => Err("a whole number from 1, or auto".into()),
        }
    }
}

/// Which ranks form a group of two-dimensional parallelism.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GroupPlacement {
    /// Group g is g, g + M, ...: replicas are neighbours
    Strided,
    /// Neighbours form a group
    Contiguous,
}

/// `tessera simulate`.
#[derive(Debug, Args)]
pub struct Simulate {
    /// What to simulate (docs/simulate.md lists every key)
    #[arg(value_name = "S.toml")]
    pub file: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
    /// Write a Chrome trace of one scenario, one rank of each class (opens in Perfetto)
    #[arg(long, value_name = "FILE.json")]
    pub trace: Option<PathBuf>,
    /// Write the scaling curves
    #[arg(long, value_name = "FILE.svg|html")]
    pub plot: Option<PathBuf>,
    /// Scenario whose stages are shown and traced [default: the last]
    #[arg(long, value_name = "NAME")]
    pub scenario: Option<String>,
    /// Ranks whose stages are shown and traced [default: the most of the scenario]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,
}

/// `tessera trace-report`.
#[derive(Debug, Args)]
pub struct TraceReport {
    /// A trace of `tessera simulate --trace`, or any in Chrome's format whose events name steps
    pub trace: PathBuf,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `tessera data`.
#[derive(Debug, Subcommand)]
pub enum Data {
    /// Write synthetic data of a configuration to files
    Synth(Convert),
    /// Rewrite the data of a configuration in another format
    Convert(Convert),
    /// Print counts, ranges and distributions of the data of a configuration
    Inspect(Inspect),
}

/// Which of a configuration's two sets of data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Split {
    /// data.train
    #[default]
    Train,
    /// data.eval
    Eval,
}

/// `tessera data convert`, and `synth` for a configuration with data.format = "synthetic".
#[derive(Debug, Args)]
pub struct Convert {
    /// A configuration whose data is read.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Which samples
    #[arg(long, value_enum, default_value_t)]
    pub split: Split,
    /// Format to write
    #[arg(long, value_parser = format)]
    pub to: Format,
    /// File to write (mlperf-npy: folder)
    #[arg(long, value_name = "PATH")]
    pub out: PathBuf,
}

/// `tessera data inspect`.
#[derive(Debug, Args)]
pub struct Inspect {
    /// A configuration whose data is read.
    #[command(flatten)]
    pub config: ConfigArgs,
    /// Which samples
    #[arg(long, value_enum, default_value_t)]
    pub split: Split,
    /// Samples to look at, at the most
    #[arg(long, default_value_t = 1_000_000)]
    pub samples: u64,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// `tessera doctor`.
#[derive(Debug, Args)]
pub struct Doctor {
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

fn format(name: &str) -> Result<Format, String> {
    name.parse().map_err(|error: tessera_data::DataError| error.to_string())
}
