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
    /// Make, convert and look at data
    #[command(subcommand)]
    Data(Data),
    /// Show what this machine offers: processor, memory, huge pages, GPU, NCCL, MPI
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
