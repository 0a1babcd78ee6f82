//! Why a benchmark gave no figures.

use std::path::PathBuf;

/// Why a benchmark gave no figures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// Knobs that make no sense, alone or together.
    #[error("{0}")]
    Usage(String),
    /// A file cannot be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {path}: {source}")]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{path}: {reason}")]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// Tables that the machine has no room for.
    #[error(
        "the tables need {needed} MiB, but {available} MiB are available; use fewer or smaller \
         tables, or cut them with --rows-max"
    )]
    TooLarge {
        /// MiB of weights and state.
        needed: u64,
        /// MiB that the system has left.
        available: u64,
    },
    /// The code under test computed something wrong: its speed means nothing.
    #[error("wrong answer, no figures: {what} is {got}, a naive computation gives {want}")]
    WrongAnswer {
        /// The number, with its place.
        what: String,
        /// What the code under test gave.
        got: f64,
        /// What the naive computation gave.
        want: f64,
    },
    /// A step did not train.
    #[error("step: {0}")]
    Step(String),
    /// A topology that the planner would refuse.
    #[error("the topology measured is none that can be planned with: {0}")]
    Topology(String),
    /// A plot could not be drawn.
    #[error("cannot draw the report: {0}")]
    Plot(String),
    /// The trainer refused.
    #[error(transparent)]
    Tessera(#[from] tessera::Error),
    /// The tables refused.
    #[error(transparent)]
    Embedding(Box<tessera_embedding::EmbeddingError>),
    /// A row store refused.
    #[error(transparent)]
    Cache(Box<tessera_cache::CacheError>),
    /// The data refused.
    #[error(transparent)]
    Data(#[from] tessera_data::DataError),
    /// The towers refused.
    #[error(transparent)]
    Dense(#[from] tessera_dense::DenseError),
    /// Ranks did not agree, or one of them failed.
    #[error(transparent)]
    Comm(Box<tessera_comm::CommError>),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] tessera_device::DeviceError),
}

impl BenchError {
    /// The process's exit code: 2 for wrong use, 1 for a failed run.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Usage(_) => 2,
            Self::Tessera(error) => error.exit_code(),
            _ => 1,
        }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Self::Usage(text.into())
    }
}

impl From<tessera_comm::CommError> for BenchError {
    fn from(error: tessera_comm::CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

impl From<tessera_embedding::EmbeddingError> for BenchError {
    fn from(error: tessera_embedding::EmbeddingError) -> Self {
        Self::Embedding(Box::new(error))
    }
}

impl From<tessera_cache::CacheError> for BenchError {
    fn from(error: tessera_cache::CacheError) -> Self {
        Self::Cache(Box::new(error))
    }
}

impl From<tessera::config::ConfigError> for BenchError {
    fn from(error: tessera::config::ConfigError) -> Self {
        Self::Tessera(error.into())
    }
}

/// Result of a benchmark's part.
pub type Result<T, E = BenchError> = std::result::Result<T, E>;
