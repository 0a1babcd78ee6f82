//! The command lines of `cache` and `tiers`.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use serde::Serialize;
use tessera_cache::Policy;
use tessera_cache::log::Reader;

pub use crate::comm::knobs::Size;
use crate::knobs::{Hots, OptimizerKnob, OutputKnobs, PrecisionKnob};

/// Which rows leave a tier that is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum PolicyKnob {
    /// Those whose last use is the longest ago
    Lru,
    /// Those used least often
    Lfu,
}

impl PolicyKnob {
    /// The store's word for it.
    #[must_use]
    pub fn policy(self) -> Policy {
        match self {
            Self::Lru => Policy::Lru,
            Self::Lfu => Policy::Lfu,
        }
    }
}

/// How rows are read from the SSD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum ReaderKnob {
    /// io_uring where the system allows it
    Auto,
    /// Memory maps: what the page cache holds is no read
    Mmap,
    /// io_uring and O_DIRECT, or an error
    Uring,
}

impl ReaderKnob {
    /// The log's word for it.
    #[must_use]
    pub fn reader(self) -> Reader {
        match self {
            Self::Auto => Reader::Auto,
            Self::Mmap => Reader::Mmap,
            Self::Uring => Reader::Uring,
        }
    }
}

/// `cache`.
#[derive(Clone, Debug, Args, Serialize)]
pub struct CacheArgs {
    /// Rows of the table
    #[arg(long, default_value_t = 1_000_000)]
    pub rows: u64,
    /// Columns
    #[arg(long, default_value_t = 64)]
    pub dim: usize,
    /// How the table stores weights
    #[arg(long, value_enum, default_value_t = PrecisionKnob::Fp32)]
    pub precision: PrecisionKnob,
    /// Sparse optimizer: its state moves with the rows
    #[arg(long, value_enum, default_value_t = OptimizerKnob::RowwiseAdagrad)]
    pub optimizer: OptimizerKnob,
    /// Samples of a batch
    #[arg(long, default_value_t = 2048)]
    pub batch: usize,
    /// Ids a bag: `20`, or mean and spread `20:10`
    #[arg(long, default_value = "20")]
    pub pooling: Hots,
    /// Zipf exponent of the ids' popularity; 0 is uniform
    #[arg(long, default_value_t = 1.05)]
    pub alpha: f64,
    /// Bytes of the device tier, as `64m`; one after the other
    #[arg(long, value_delimiter = ',', default_value = "16m,32m,64m,128m")]
    pub device_bytes: Vec<Size>,
    /// Bytes of the host tier; without an SSD it takes all rows, whatever this says
    #[arg(long, default_value = "64m")]
    pub host_bytes: Size,
    /// A folder on the SSD, new or empty; absent: no SSD
    #[arg(long)]
    pub ssd_dir: Option<PathBuf>,
    /// Most bytes of files there [default: no bound]
    #[arg(long, requires = "ssd_dir")]
    pub ssd_bytes: Option<Size>,
    /// Which rows leave a tier that is full
    #[arg(long, value_enum, default_value_t = PolicyKnob::Lru)]
    pub policy: PolicyKnob,
    /// How rows are read from the SSD
    #[arg(long, value_enum, default_value_t = ReaderKnob::Auto)]
    pub reader: ReaderKnob,
    /// Batches measured
    #[arg(long, default_value_t = 200)]
    pub iterations: usize,
    /// Batches before those, which fill the tiers
    #[arg(long, alias = "warm-up", default_value_t = 200)]
    pub warmup: usize,
    /// Milliseconds that each measurement of the disk takes
    #[arg(long, default_value_t = 1500)]
    pub disk_ms: u64,
    /// Worker threads [default: all cores]
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Seed of ids and values
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Figures.
    #[command(flatten)]
    #[serde(flatten)]
    pub output: OutputKnobs,
}

/// `tiers`. The defaults are 12 GB of tables in a device tier of 256 MB, a host tier of 1 GB, and an
/// SSD.
#[derive(Clone, Debug, Args, Serialize)]
pub struct TiersArgs {
    /// Number of tables, each with one id a sample
    #[arg(long, default_value_t = 26)]
    pub tables: usize,
    /// Rows of each table
    #[arg(long, default_value_t = 1_775_000)]
    pub rows: u64,
    /// Columns
    #[arg(long, default_value_t = 64)]
    pub dim: usize,
    /// How tables store weights
    #[arg(long, value_enum, default_value_t = PrecisionKnob::Fp32)]
    pub precision: PrecisionKnob,
    /// Sparse optimizer
    #[arg(long, value_enum, default_value_t = OptimizerKnob::RowwiseAdagrad)]
    pub optimizer: OptimizerKnob,
    /// Samples of a batch
    #[arg(long, default_value_t = 2048)]
    pub batch: usize,
    /// Zipf exponent of the ids' popularity; 0 is uniform
    #[arg(long, default_value_t = 1.2)]
    pub alpha: f64,
    /// Widths of the bottom MLP, as 512-256-64 [default: 512-256-dim]
    #[arg(long)]
    pub bottom: Option<String>,
    /// Widths of the top MLP [default: 512-256-1]
    #[arg(long)]
    pub top: Option<String>,
    /// Bytes of the device tier, of all tables together
    #[arg(long, default_value = "256m")]
    pub device_bytes: Size,
    /// Bytes of the host tier, of all tables together
    #[arg(long, default_value = "1g")]
    pub host_bytes: Size,
    /// A folder on the SSD
    #[arg(long)]
    pub ssd_dir: Option<PathBuf>,
    /// Most bytes of files there [default: no bound]
    #[arg(long, requires = "ssd_dir")]
    pub ssd_bytes: Option<Size>,
    /// Which rows leave a tier that is full
    #[arg(long, value_enum, default_value_t = PolicyKnob::Lru)]
    pub policy: PolicyKnob,
    /// How rows are read from the SSD
    #[arg(long, value_enum, default_value_t = ReaderKnob::Auto)]
    pub reader: ReaderKnob,
    /// Steps measured
    #[arg(long, default_value_t = 300)]
    pub iterations: usize,
    /// Steps before those, which fill the tiers
    #[arg(long, alias = "warm-up", default_value_t = 200)]
    pub warmup: usize,
    /// Leave the resident model out, where memory has no room for it
    #[arg(long)]
    pub no_resident: bool,
    /// Milliseconds that each measurement of the disk takes
    #[arg(long, default_value_t = 1500)]
    pub disk_ms: u64,
    /// Worker threads [default: all cores]
    #[arg(long)]
    pub threads: Option<NonZeroUsize>,
    /// Seed of ids and weights
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Figures.
    #[command(flatten)]
    #[serde(flatten)]
    pub output: OutputKnobs,
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::knobs::{Cli, Command};

    #[test]
    fn sizes_policies_and_the_other_spelling_are_understood() {
        let line =
            "tessera-bench cache --device-bytes 1m,64k --policy lfu --reader mmap --warm-up 3";
        let Command::Cache(args) = Cli::parse_from(line.split(' ')).command else {
            panic!("not cache")
        };
        assert_eq!(args.device_bytes, [Size(1 << 20), Size(64 << 10)]);
        assert_eq!((args.policy.policy(), args.reader.reader()), (Policy::Lfu, Reader::Mmap));
        assert_eq!((args.warmup, args.ssd_dir), (3, None));
        let alone = "tessera-bench tiers --ssd-bytes 1g";
        assert!(Cli::try_parse_from(alone.split(' ')).is_err(), "a bound of no folder");
    }
}
