//! What can go wrong with data, each message naming the place and what to do about it.

use std::path::{Path, PathBuf};

use crate::{Format, Place};

/// Why data could not be read, written or arranged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DataError {
    /// The system refused an operation on a file.
    #[error("cannot {operation} {}: {source}", path.display())]
    Io {
        /// What was tried, as a verb: `open`, `read`, `create`.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A compressed file ends in the middle or is damaged.
    #[error(
        "{}: {compression} data ends early or is damaged after line {lines}: {source}; fetch the file again",
        path.display()
    )]
    Compressed {
        /// The file.
        path: PathBuf,
        /// `gzip` or `zstd`.
        compression: &'static str,
        /// Whole lines that could be read.
        lines: u64,
        /// What the decoder said.
        source: std::io::Error,
    },
    /// A file is not laid out as its format says.
    #[error("{}: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong, with numbers.
        reason: String,
    },
    /// A file lacks a column that the schema names.
    #[error("{}: no column `{column}`; the file has: {}", path.display(), present.join(", "))]
    MissingColumn {
        /// The file.
        path: PathBuf,
        /// The column asked for.
        column: String,
        /// The columns that are there.
        present: Vec<String>,
    },
    /// A row has the wrong number of columns.
    #[error(
        "{place}: {columns} columns, {expected} expected (label, 13 integers, 26 categories, tab-separated)"
    )]
    ColumnCount {
        /// The row.
        place: Place,
        /// Columns found.
        columns: usize,
        /// Columns that the format has.
        expected: usize,
    },
    /// A value cannot be used.
    #[error("{place}, column {column}: {reason}")]
    BadValue {
        /// The row.
        place: Place,
        /// The column's name.
        column: String,
        /// What is wrong, with the value.
        reason: String,
    },
    /// A dense value is NaN or infinite, and the policy is to stop.
    #[error(
        "{place}, dense column {column}: {value} is not finite; clean the data, or set data.on_nan_dense = \"zero\" to read such values as 0"
    )]
    NonFiniteDense {
        /// The row.
        place: Place,
        /// The column's name.
        column: String,
        /// NaN or an infinity.
        value: f32,
    },
    /// Parts of a jagged array do not fit together.
    #[error("jagged array: {reason}")]
    Jagged {
        /// What does not fit, with numbers.
        reason: String,
    },
    /// Parts of a batch do not fit together.
    #[error("batch: {reason}")]
    Batch {
        /// What does not fit, with numbers.
        reason: String,
    },
    /// The description of a source, a schema or a stream cannot be used.
    #[error("{reason}")]
    Spec {
        /// What is wrong and what to do.
        reason: String,
    },
    /// A sample cannot be expressed in a format.
    #[error("{format} cannot hold {place}, {column}: {reason}")]
    Inexpressible {
        /// The target format.
        format: Format,
        /// Where the sample came from.
        place: Place,
        /// The feature or column.
        column: String,
        /// Why not.
        reason: String,
    },
    /// A source has no samples.
    #[error("the source has no samples ({files})")]
    NoSamples {
        /// The files of the source, for people.
        files: String,
    },
    /// A stream was asked to start after its data ends.
    #[error(
        "position epoch {epoch}, sample {sample} is beyond the data, which has {samples} samples; is this the data the run began with?"
    )]
    PositionBeyondData {
        /// Epoch asked for.
        epoch: u64,
        /// Sample asked for.
        sample: u64,
        /// Samples that are there.
        samples: u64,
    },
    /// The reading thread panicked.
    #[error("the data thread panicked: {message}")]
    Panicked {
        /// The panic's message.
        message: String,
    },
    /// More was asked of a reader or stream that had failed before.
    #[error("the data stream stopped after an earlier error: {earlier}")]
    Stopped {
        /// The earlier error.
        earlier: String,
    },
    /// Reading was cancelled by its owner.
    #[error("reading was cancelled")]
    Cancelled,
    /// Metrics could not be registered.
    #[error("cannot register data metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

/// Result of a data operation.
pub type Result<T> = std::result::Result<T, DataError>;

impl DataError {
    /// Wraps a system error for `path`; made for `map_err`.
    pub(crate) fn io(
        operation: &'static str,
        path: &Path,
    ) -> impl FnOnce(std::io::Error) -> DataError {
        move |source| DataError::Io { operation, path: path.to_owned(), source }
    }

    /// A file that is not laid out as its format says.
    pub(crate) fn bad_file(path: &Path, reason: impl Into<String>) -> DataError {
        DataError::BadFile { path: path.to_owned(), reason: reason.into() }
    }

    /// A description that cannot be used.
    pub(crate) fn spec(reason: impl Into<String>) -> DataError {
        DataError::Spec { reason: reason.into() }
    }
}
