//! The configuration of a run: what a user writes, checked once, with every default filled in.
//!
//! [`Config::load`] reads a TOML file, applies `--set` overrides, fills paths in, and either
//! gives a configuration that the rest of the program may rely on, or *all* faults at once, each
//! with its key. docs/config.md describes every key; a test holds the two together.

mod differences;
mod dynamic;
mod optimizer;
mod overrides;
mod parallel;
mod read;
mod section;
mod simulation;
mod table;
#[cfg(test)]
mod tests;
mod tiers;
mod topology;
mod value;

use std::collections::BTreeSet;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

use tessera_data::{DenseTransform, Format, OnNanDense, SyntheticSpec};
use tessera_dense::{DenseOptimizer, Interaction, Loss, ModelSpec, Schedule};
use tessera_embedding::plan::Sharding;
use tessera_embedding::{BadIdPolicy, Init, Pooling, Precision, SparseOptimizer, TableKind, Tiers};

pub use differences::differing_keys;
pub use parallel::{Comm, ParallelConfig, PlanSource, Uneven};
pub use simulation::load_simulation;
pub use topology::load_topology;

/// One thing that is wrong with a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Dotted key, such as `table.0.rows`.
    pub key: String,
    /// What is wrong and what would be right.
    pub message: String,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}

/// Why a configuration was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file could not be read.
    #[error("cannot read {path}: {source}")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The file is not TOML.
    #[error("{path} is not TOML: {message}")]
    Syntax {
        /// The file.
        path: PathBuf,
        /// Where and why.
        message: String,
    },
    /// Keys or values are wrong.
    #[error("{path}: {} in the configuration:{}", count(.faults), lines(.faults))]
    Faults {
        /// The file.
        path: PathBuf,
        /// All of them.
        faults: Vec<Fault>,
    },
}

fn count(faults: &[Fault]) -> String {
    match faults.len() {
        1 => "1 fault".into(),
        n => format!("{n} faults"),
    }
}

fn lines(faults: &[Fault]) -> String {
    faults.iter().map(|fault| format!("\n  {fault}")).collect()
}

/// A checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Seed of initial values, shuffling and rounding.
    pub seed: u64,
    /// Worker threads; all cores when absent.
    pub threads: Option<NonZeroUsize>,
    /// `[tiers]`: memory of each rank's tables; absent: all rows are in device memory.
    pub tiers: Option<Tiers>,
    /// `[parallel]`.
    pub parallel: ParallelConfig,
    /// `[data]`.
    pub data: DataConfig,
    /// `[model]`.
    pub model: ModelConfig,
    /// `[[table]]`, in order.
    pub tables: Vec<TableConfig>,
    /// `[optimizer.dense]`.
    pub dense_optimizer: DenseOptimizer,
    /// `[optimizer.schedule]`.
    pub schedule: Schedule,
    /// `optimizer.clip_norm` or `optimizer.clip_value`.
    pub clip: ClipConfig,
    /// `[pipeline]`.
    pub pipeline: PipelineConfig,
    /// `[train]`.
    pub train: TrainConfig,
    /// `metrics.listen`: address of the metrics endpoint; off when absent.
    pub listen: Option<String>,
    /// Every key with the value in force: what `config.toml` of a run holds. Loading it gives
    /// this configuration again.
    pub resolved: toml::Table,
}

/// Where samples come from.
#[derive(Clone, Debug)]
pub struct DataConfig {
    /// Format of all files.
    pub format: Format,
    /// Files (or directories) to train on, read in this order as one stream.
    pub train: Vec<PathBuf>,
    /// Files (or directories) to evaluate on.
    pub eval: Vec<PathBuf>,
    /// Which of them each rank trains on.
    pub read: Read,
    /// Samples a step over all ranks.
    pub batch_size: usize,
    /// Samples a batch when evaluating.
    pub eval_batch_size: usize,
    /// Names of the dense columns.
    pub dense: Vec<String>,
    /// Name of the label column.
    pub label: String,
    /// Name of the sample-weight column.
    pub sample_weight: Option<String>,
    /// Name of the group column, for grouped AUC.
    pub group: Option<String>,
    /// Transform of dense values.
    pub dense_transform: DenseTransform,
    /// What a NaN or infinite dense value does.
    pub on_nan_dense: OnNanDense,
    /// What an id outside its table does.
    pub on_bad_id: BadIdPolicy,
    /// Samples in a shuffle window; 0 reads in the order of the files.
    pub shuffle_window: u64,
    /// `[data.synthetic]`, with format `synthetic` only.
    pub synthetic: Option<SyntheticConfig>,
}

/// Which training files a rank reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// All, of whose batches it takes its part: batches do not depend on the number of ranks.
    All,
    /// Every `ranks`-th one, whose batches are its parts.
    Own,
}

/// The built-in source.
#[derive(Clone, Debug, PartialEq)]
pub struct SyntheticConfig {
    /// What to train on.
    pub spec: SyntheticSpec,
    /// Samples to evaluate on; they follow the training samples.
    pub eval_samples: u64,
}

/// The network.
#[derive(Clone, Debug)]
pub struct ModelConfig {
    /// Dense values a sample.
    pub dense_features: usize,
    /// Widths of the bottom MLP.
    pub bottom_mlp: Vec<usize>,
    /// How features meet.
    pub interaction: Interaction,
    /// Widths of the top MLP; the last is 1.
    pub top_mlp: Vec<usize>,
    /// Whether each table has a dim-1 weight per row that adds to the logit.
    pub wide: bool,
    /// Loss.
    pub loss: Loss,
}

/// One embedding table.
#[derive(Clone, Debug)]
pub struct TableConfig {
    /// Name, unique.
    pub name: String,
    /// Which ids it takes.
    pub kind: TableKind,
    /// Rows; the capacity over all ranks of a dynamic table.
    pub rows: u64,
    /// Columns.
    pub dim: usize,
    /// Features that look rows up in this table.
    pub features: Vec<String>,
    /// Ids per sample of each feature, for formats with a fixed number.
    pub hots: Vec<usize>,
    /// How a bag becomes one vector.
    pub pooling: Pooling,
    /// Whether its features carry a weight per id.
    pub weighted: bool,
    /// Type of a stored element.
    pub precision: Precision,
    /// How ranks share it; `None` leaves that to the planner.
    pub sharding: Option<Sharding>,
    /// First values.
    pub init: Init,
    /// Optimizer of this table.
    pub optimizer: SparseOptimizer,
}

/// Gradient clipping over the whole model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ClipConfig {
    /// Off.
    None,
    /// Each component of each summed gradient to [-value, value].
    Value(f64),
    /// All gradients scaled so that their joint L2 norm is at most this.
    Norm(f64),
}

/// How a step is staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PipelineConfig {
    /// What overlaps.
    pub mode: PipelineMode,
    /// Batches on their way at the most; `None` as many as steps turn out to wait for. One in mode
    /// serial.
    pub depth: Option<NonZeroUsize>,
    /// Parts that a batch is trained in.
    pub micro_batches: NonZeroUsize,
    /// Which samples share a part.
    pub cluster: Cluster,
}

/// `pipeline.cluster`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// Neighbours in the data.
    None,
    /// Those that share rows.
    Keys,
}

/// `pipeline.mode`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PipelineMode {
    /// One stage after the other.
    Serial,
    /// Reading, routing and fetching of later batches overlap training.
    Prefetch,
    /// So they do, and exchanges of micro-batches overlap with each other's compute.
    Nested,
}

/// How long to train, and what happens on the way.
#[derive(Clone, Debug)]
pub struct TrainConfig {
    /// Passes over the training data.
    pub epochs: u64,
    /// Steps at the most.
    pub max_steps: Option<u64>,
    /// Steps between evaluations; `None` evaluates at the end only.
    pub eval_every: Option<u64>,
    /// Steps between lines of progress.
    pub log_every: u64,
    /// Steps between checkpoints; `None` writes the final one only.
    pub checkpoint_every: Option<u64>,
    /// Every so-many-th checkpoint is whole; those between hold what changed since the one before.
    pub checkpoint_full_every: u64,
    /// How checkpoints keep rows that lie on SSD.
    pub checkpoint_cold: ColdFormat,
    /// Checkpoints kept, the best one not counted.
    pub keep: usize,
    /// Steps that the windowed normalised entropy looks back over.
    pub window_steps: usize,
    /// What a NaN or infinite loss or gradient does.
    pub on_nonfinite: OnNonfinite,
    /// `[train.early_stop]`.
    pub early_stop: Option<EarlyStop>,
}

/// How a checkpoint keeps rows that lie in a log on SSD.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ColdFormat {
    /// As links, where the log and the checkpoint lie in one file system, else as rows.
    #[default]
    Auto,
    /// By links to the log's files, which are copied where links are impossible.
    Links,
    /// As all other rows.
    Rows,
}

/// Policy for a step whose loss or gradient is NaN or infinite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnNonfinite {
    /// The run fails, and nothing of that step is written.
    Error,
    /// The step changes nothing and is counted.
    Skip,
}

/// Stopping when a metric no longer gets better.
#[derive(Clone, Debug, PartialEq)]
pub struct EarlyStop {
    /// Which one.
    pub metric: StopMetric,
    /// Evaluations without an improvement before the run stops.
    pub patience: u64,
    /// What counts as an improvement.
    pub min_delta: f64,
}

/// Metrics that early stopping and the best checkpoint can follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StopMetric {
    /// Area under the ROC curve; higher is better.
    Auc,
    /// Mean log loss; lower is better.
    Logloss,
    /// Normalised entropy; lower is better.
    Ne,
    /// AUC within groups, averaged; higher is better.
    GroupedAuc,
}

impl StopMetric {
    /// Its name in configurations and summaries.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auc => "auc",
            Self::Logloss => "logloss",
            Self::Ne => "ne",
            Self::GroupedAuc => "grouped_auc",
        }
    }

    /// Whether a larger value is better.
    #[must_use]
    pub fn higher_is_better(self) -> bool {
        matches!(self, Self::Auc | Self::GroupedAuc)
    }
}

impl Config {
    /// Reads `path`, applies the `--set` assignments in order and checks everything.
    ///
    /// Errors: [`ConfigError`]; a configuration with faults lists all of them.
    pub fn load(path: &Path, set: &[String]) -> Result<Self, ConfigError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Unreadable { path: path.into(), source })?;
        // Made absolute first: the folder of a bare `config.toml` has no name.
        let whole = std::path::absolute(path)
            .map_err(|source| ConfigError::Unreadable { path: path.into(), source })?;
        let base = whole.parent().unwrap_or(&whole).to_path_buf();
        Self::parse(&text, path, base, set).map(|(config, _)| config)
    }

    /// Checks the text of a configuration whose paths start from `base`; `path` is for messages.
    ///
    /// Also gives every key that was looked for (`table[].rows`), for the test of the docs.
    pub fn parse(
        text: &str,
        path: &Path,
        base: PathBuf,
        set: &[String],
    ) -> Result<(Self, BTreeSet<String>), ConfigError> {
        let mut table = text.parse::<toml::Table>().map_err(|error| ConfigError::Syntax {
            path: path.into(),
            message: error.to_string(),
        })?;
        let context = section::Context::new(base);
        for assignment in set {
            if let Err(fault) = overrides::apply(&mut table, assignment) {
                context.fault(fault.key, fault.message);
            }
        }
        let config = read::config(section::Section::root(&context, table));
        let (mut faults, resolved, known) = context.finish();
        if faults.is_empty() {
            // What reading demands of names and settings together; it needs a whole configuration.
            let source = crate::source::spec(&config, crate::cli::Split::Train);
            if let Some(Err(error)) = source.map(|spec| spec.validate()) {
                faults.push(Fault { key: "data".into(), message: error.to_string() });
            }
        }
        if faults.is_empty() {
            Ok((Self { resolved, ..config }, known))
        } else {
            Err(ConfigError::Faults { path: path.into(), faults })
        }
    }

    /// The network with the widths that its tables give it.
    #[must_use]
    pub fn model_spec(&self) -> ModelSpec {
        read::model_spec(&self.model, &self.tables)
    }

    /// Index, table and name of every feature, in the order of tables and their features: the
    /// order of batches, interactions and files without names.
    pub fn features(&self) -> impl Iterator<Item = (usize, &TableConfig, &str)> {
        self.tables.iter().enumerate().flat_map(|(index, table)| {
            table.features.iter().map(move |feature| (index, table, feature.as_str()))
        })
    }
}
