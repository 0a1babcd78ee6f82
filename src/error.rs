//! Everything that can stop a run, each with what a user can do about it.

use std::io;
use std::path::PathBuf;

use tessera_data::DataError;
use tessera_embedding::EmbeddingError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The configuration was refused.
    #[error(transparent)]
    Config(#[from] crate::config::ConfigError),
    /// The command line asks for something that cannot be.
    #[error("{0}")]
    Usage(String),
    /// A file or folder cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file or folder cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path}: {reason}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A stage of the training pipeline failed for a reason of its own.
    #[error("pipeline: stage {stage} failed: {reason}")]
    Stage {
        /// The stage.
        stage: &'static str,
        /// Why.
        reason: String,
    },
    /// A checkpoint does not fit the configuration.
    #[error("{path} does not fit this model: {reason}")]
    Mismatch {
        /// Checkpoint or weights file.
        path: PathBuf,
        /// Every difference.
        reason: String,
    },
    /// Training data is wrong or missing.
    #[error(transparent)]
    Data(#[from] DataError),
    /// An embedding table refused.
    #[error(transparent)]
    Embedding(#[from] EmbeddingError),
    /// Row stores.
    #[error(transparent)]
    Cache(#[from] tessera_cache::CacheError),
    /// Ranks cannot work together, or no longer.
    #[error(transparent)]
    Comm(Box<tessera_comm::CommError>),
    /// Another rank failed where all agree on what happens next.
    #[error("rank {rank}: {reason}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// What it said.
        reason: String,
    },
    /// Ranks read different data.
    #[error(
        "rank {rank}: after step {step} rank {other} goes on with other data than this rank: all \
         ranks must read the same files (with data.read = \"own\" each reads its own)"
    )]
    UnevenData {
        /// This rank.
        rank: usize,
        /// Steps done.
        step: u64,
        /// The rank whose data differ.
        other: usize,
    },
    /// Ranks were started with different configurations.
    #[error(
        "rank {rank} has another configuration than rank 0: {}; start all ranks with the same",
        .keys.join(", ")
    )]
    OtherConfig {
        /// The first rank whose configuration differs.
        rank: usize,
        /// Each key with its value on rank 0 and on that rank.
        keys: Vec<String>,
    },
    /// An id that its table does not have, with the place it was read from.
    #[error("{place}: {source}")]
    BadInput {
        /// File and row.
        place: String,
        /// Table, feature, sample and id.
        source: Box<EmbeddingError>,
    },
    /// The dense network refused.
    #[error(transparent)]
    Dense(#[from] tessera_dense::DenseError),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] tessera_device::DeviceError),
    /// A loss or gradient is NaN or infinite.
    #[error(
        "step {step}: {what} is not finite; nothing of this step was written (lower the learning rate, set optimizer.clip_norm, or skip such steps with train.on_nonfinite = \"skip\")"
    )]
    NonFinite {
        /// The step, from 1.
        step: u64,
        /// Which loss, parameter or table.
        what: String,
    },
    /// Some of the model moved in a step and the rest overflowed.
    #[error(
        "step {step}: {what} overflowed in the update while others moved; the model is between two steps, and no checkpoint of it is written (resume the last one with a lower learning rate or optimizer.clip_norm)"
    )]
    Torn {
        /// The step, from 1.
        step: u64,
        /// Which rows or parameter.
        what: String,
    },
    /// A trained model gives no number for a sample.
    #[error(
        "{place}: the model's logit is {logit}: its weights have grown too large (go back to an earlier checkpoint with a lower learning rate or optimizer.clip_norm)"
    )]
    NonFiniteLogit {
        /// File and row.
        place: String,
        /// NaN or an infinity.
        logit: f32,
    },
    /// A label that the loss has no meaning for.
    #[error("{place}: label {label} is outside 0 to 1")]
    BadLabel {
        /// File and row.
        place: String,
        /// The label.
        label: f32,
    },
    /// The trainer failed before and refuses to go on.
    #[error("the trainer refuses further work: it failed before ({0})")]
    Poisoned(String),
    /// The metrics endpoint could not be opened.
    #[error("cannot listen on {address} for metrics: {reason}")]
    Listen {
        /// Address asked for.
        address: String,
        /// What the system said.
        reason: String,
    },
    /// A layout cannot express the model.
    #[error("export: layout {layout} cannot hold this model: {reason}")]
    Layout {
        /// Name of the layout.
        layout: &'static str,
        /// What it lacks.
        reason: String,
    },
}

impl Error {
    /// Whether an operation between ranks says it, or another rank: what began it may be known better
    /// elsewhere.
    #[must_use]
    pub fn is_heard(&self) -> bool {
        matches!(
            self,
            Self::OtherRank { .. } | Self::Comm(_) | Self::Embedding(EmbeddingError::Comm(_))
        )
    }

    /// The process's exit code: 2 for a wrong use or configuration, 1 for a failed run.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_)
            | Self::Usage(_)
            | Self::OtherConfig { .. }
            | Self::Data(DataError::Spec { .. })
            | Self::Embedding(EmbeddingError::Plan { .. } | EmbeddingError::PlanInput { .. }) => 2,
            _ => 1,
        }
    }
}

impl From<tessera_comm::CommError> for Error {
    fn from(error: tessera_comm::CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

/// Result of a command.
pub type Result<T, E = Error> = std::result::Result<T, E>;
