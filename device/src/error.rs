//! Why a device refused.

/// Result of a device operation.
pub type Result<T> = std::result::Result<T, DeviceError>;

/// Why a device refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The device has no room for a buffer.
    #[error("device {device}: cannot allocate {bytes} bytes: {reason}")]
    OutOfMemory {
        /// Kind of the device.
        device: &'static str,
        /// Size asked for, in bytes.
        bytes: u128,
        /// What the system said.
        reason: String,
    },
    /// A copy would leave its buffer.
    #[error("device copy: elements {at}..{end} of a buffer of {len}")]
    CopyOutOfBounds {
        /// First element.
        at: usize,
        /// One past the last element (saturating).
        end: usize,
        /// Elements in the buffer.
        len: usize,
    },
    /// The worker threads could not be started.
    #[error("cannot start {threads} worker threads: {reason}")]
    Threads {
        /// Threads asked for.
        threads: usize,
        /// What the system said.
        reason: String,
    },
    /// There is no GPU to use.
    #[error("cuda: {reason}; `tessera doctor` lists what was found")]
    Unavailable {
        /// What is missing, and what to do about it.
        reason: String,
    },
    /// The driver refused. After most of these the process's work on that GPU is lost.
    #[error("cuda device {ordinal}: {operation} failed with {code} ({name}): {text}")]
    Driver {
        /// Number of the GPU.
        ordinal: u32,
        /// What was asked of the driver.
        operation: &'static str,
        /// The driver's code.
        code: u32,
        /// The code's name.
        name: String,
        /// What the driver says about it.
        text: String,
    },
    /// Kernels could not be compiled.
    #[error("cuda: cannot compile the kernels of {source_name} for {target}: {log}")]
    Compile {
        /// Name of the source.
        source_name: &'static str,
        /// Architecture compiled for.
        target: String,
        /// What the compiler said.
        log: String,
    },
    /// A source has no such kernel.
    #[error("cuda: the kernels of {source_name} have no function {function}")]
    NoKernel {
        /// Name of the source.
        source_name: &'static str,
        /// Function asked for.
        function: String,
    },
    /// A launch does not fit its kernel or the device.
    #[error("cuda: cannot launch {function}: {reason}")]
    Launch {
        /// The kernel.
        function: String,
        /// What does not fit, with the numbers.
        reason: String,
    },
    /// A matrix product that cannot be computed.
    #[error("cuda: {reason}")]
    Product {
        /// What does not fit, with the numbers, or what the library says.
        reason: String,
    },
    /// Memory, a stream or an event of another device.
    #[error(
        "cuda: {operation} mixes what was made by different devices (here device {ordinal}); \
         copy between them over the host"
    )]
    Foreign {
        /// What was asked for.
        operation: &'static str,
        /// The GPU it was asked of.
        ordinal: u32,
    },
    /// A device has all the streams it can keep account of.
    #[error("cuda device {ordinal}: {most} streams live already; drop some")]
    TooManyStreams {
        /// Number of the GPU.
        ordinal: u32,
        /// The most that can live at once.
        most: usize,
    },
}
