//! What can go wrong in the dense part of a model.

use tessera_device::DeviceError;

use crate::spec::Fault;

/// Result of a dense operation.
pub type Result<T> = std::result::Result<T, DenseError>;

/// Why the dense part of a model refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DenseError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The model, optimizer or schedule is not valid; every fault is listed.
    #[error("invalid model: {}", list(.faults))]
    Invalid {
        /// All faults.
        faults: Vec<Fault>,
    },
    /// A batch has more rows than the activations were made for.
    #[error("{operation}: batch of {batch} rows, but the activations hold {max_batch}")]
    BatchTooLarge {
        /// What was called.
        operation: &'static str,
        /// Rows given.
        batch: usize,
        /// Rows that fit.
        max_batch: usize,
    },
    /// The global batch is smaller than the part of it that this rank holds.
    #[error("loss: global batch of {global_batch} rows cannot hold this rank's {batch}")]
    GlobalBatch {
        /// Rows given.
        batch: usize,
        /// Rows of the global batch.
        global_batch: u64,
    },
    /// A gradient is NaN or infinite; no weight was changed.
    #[error(
        "backward: the gradient of {parameter} is {value} at element {index}; \
         look for bad input or lower the learning rate"
    )]
    NonFiniteGradient {
        /// Name of the parameter.
        parameter: String,
        /// First such element within the parameter.
        index: usize,
        /// Its value.
        value: f32,
    },
    /// No parameter or optimizer state has this name.
    #[error("no dense tensor is named {name:?} in this model with this optimizer")]
    UnknownTensor {
        /// The name asked for.
        name: String,
    },
    /// Values of the wrong number for a tensor, or for a read-out.
    #[error("{name}: {found} values, expected {expected}")]
    WrongLength {
        /// Tensor or buffer.
        name: String,
        /// Number expected.
        expected: usize,
        /// Number given.
        found: usize,
    },
}

/// `key: message; key: message`.
fn list(faults: &[Fault]) -> String {
    faults.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}
