//! Why an operation between ranks failed.

use std::time::Duration;

use crate::Dtype;

/// Why an operation between ranks failed. Ranks are named by their number in the world, also in
/// messages of smaller groups. Only [`CommError::Disagreement`] leaves its communicator usable.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// Two ranks posted different operations at the same place of their programs.
    #[error(
        "rank {peer} posted {theirs}, rank {rank} {ours} (step {step}, communicator \
         '{communicator}'): all ranks must post the same operations in the same order"
    )]
    Mismatch {
        /// Name of the communicator.
        communicator: String,
        /// This rank's step.
        step: u64,
        /// This rank.
        rank: usize,
        /// What this rank posted.
        ours: String,
        /// The other rank.
        peer: usize,
        /// What the other rank posted.
        theirs: String,
    },
    /// Ranks did not come within the time limit.
    #[error(
        "{operation} (step {step}, communicator '{communicator}'): no message from {} within \
         {:.1} s; look for what stopped or delayed them, or raise the time limit",
        ranks(.missing), .limit.as_secs_f64()
    )]
    TimeLimit {
        /// Name of the communicator.
        communicator: String,
        /// The step.
        step: u64,
        /// What was waited for.
        operation: String,
        /// The time limit.
        limit: Duration,
        /// The ranks that did not come.
        missing: Vec<usize>,
    },
    /// A rank ended before it took part.
    #[error(
        "{operation} (step {step}, communicator '{communicator}'): rank {peer} is gone: {reason}"
    )]
    Gone {
        /// Name of the communicator.
        communicator: String,
        /// The step.
        step: u64,
        /// What was to be done with it.
        operation: String,
        /// The rank.
        peer: usize,
        /// What is known of why.
        reason: String,
    },
    /// The world failed elsewhere: on another rank or another communicator.
    #[error(
        "{operation} (step {step}, communicator '{communicator}') given up because rank {rank} \
         failed: {cause}"
    )]
    WorldFailed {
        /// Name of the communicator.
        communicator: String,
        /// The step.
        step: u64,
        /// What was given up.
        operation: String,
        /// The rank that failed first.
        rank: usize,
        /// Its message.
        cause: String,
    },
    /// The communicator had failed before.
    #[error("communicator '{communicator}' refuses {operation}: it failed before: {cause}")]
    Refused {
        /// Name of the communicator.
        communicator: String,
        /// What was refused.
        operation: String,
        /// The first failure.
        cause: Box<CommError>,
    },
    /// The arguments of an operation do not fit together.
    #[error("{operation} (communicator '{communicator}'): {reason}")]
    Argument {
        /// Name of the communicator.
        communicator: String,
        /// The operation.
        operation: String,
        /// What is wrong.
        reason: String,
    },
    /// A rank sent another number of elements than it had to.
    #[error(
        "{operation} (step {step}, communicator '{communicator}'): rank {peer} sent {found} \
         elements, {expected} expected"
    )]
    Count {
        /// Name of the communicator.
        communicator: String,
        /// The step.
        step: u64,
        /// The operation.
        operation: String,
        /// The sender.
        peer: usize,
        /// Elements that came.
        found: u64,
        /// What was expected, in words.
        expected: String,
    },
    /// Ranks that must hold the same value of something do not.
    #[error(
        "{} of communicator '{communicator}' have another {what} than rank {first}: all ranks must \
         be started with the same",
        ranks(.differing)
    )]
    Disagreement {
        /// Name of the communicator.
        communicator: String,
        /// What was compared.
        what: String,
        /// The rank that the others are compared with.
        first: usize,
        /// The ranks that differ from it.
        differing: Vec<usize>,
    },
    /// A sum of integers left their range.
    #[error("{operation} (step {step}, communicator '{communicator}'): a sum leaves {dtype}")]
    Overflow {
        /// Name of the communicator.
        communicator: String,
        /// The step.
        step: u64,
        /// The operation.
        operation: String,
        /// The integers' type.
        dtype: Dtype,
    },
    /// No memory for what the other ranks sent.
    #[error("{operation} (communicator '{communicator}'): cannot allocate {bytes} bytes")]
    OutOfMemory {
        /// Name of the communicator.
        communicator: String,
        /// The operation.
        operation: String,
        /// Bytes asked for.
        bytes: u128,
    },
    /// The system refused a thread.
    #[error("communicator '{communicator}': cannot start its thread: {reason}")]
    Thread {
        /// Name of the communicator.
        communicator: String,
        /// What the system said.
        reason: String,
    },
    /// An operation panicked on the communicator's thread: a fault of this crate.
    #[error("communicator '{communicator}': an operation panicked, see its message above")]
    WorkerLost {
        /// Name of the communicator.
        communicator: String,
    },
    /// The library under a backend refused.
    #[error("{library}: {operation}: {reason}")]
    Backend {
        /// The library.
        library: &'static str,
        /// What was asked of it.
        operation: String,
        /// What it said.
        reason: String,
    },
    /// Encoded vectors have another length than their number says.
    #[error(
        "decode {codec}: {bytes} bytes for {rows} rows of dim {dim}, {expected} bytes expected"
    )]
    Encoded {
        /// Name of the codec.
        codec: &'static str,
        /// Bytes given.
        bytes: usize,
        /// Rows asked for.
        rows: usize,
        /// Columns of a row.
        dim: usize,
        /// Bytes that such rows take.
        expected: u128,
    },
    /// A launcher's environment variables contradict each other.
    #[error("environment of the launcher: {reason}")]
    Launch {
        /// What is wrong, with the variables' names.
        reason: String,
    },
    /// The metrics' names are taken in the registry.
    #[error("metrics of communication: {reason}")]
    Metrics {
        /// What the registry said.
        reason: String,
    },
}

impl From<prometheus::Error> for CommError {
    fn from(error: prometheus::Error) -> Self {
        Self::Metrics { reason: error.to_string() }
    }
}

/// Result of an operation between ranks.
pub type Result<T> = std::result::Result<T, CommError>;

/// `rank 2`, `ranks 1, 3`.
fn ranks(numbers: &[usize]) -> String {
    let list: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if list.len() == 1 { "" } else { "s" }, list.join(", "))
}
