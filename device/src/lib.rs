//! Where buffers live and work is ordered: the [`Device`] trait, implemented by [`Cpu`] and
//! [`Cuda`].
//!
//! A `Device` owns memory (`Buffer`), queues of work (`Stream`) and points in those queues
//! (`Event`). It knows nothing about tables or layers: the operations of a subject are small
//! traits beside that subject (`LookupOps` in `tessera-embedding`, `DenseOps` in `tessera-dense`)
//! with `Device` as their supertrait, implemented once per device. Callers are generic over
//! `D: Device + …`, so a new device is a new implementation and no change to them.
//!
//! This is also the only crate that may name a vendor's runtime.

mod buffer;
mod cpu;
pub mod cuda;
mod error;
mod philox;
mod prefetch;
mod simd;

pub use buffer::HostBuffer;
pub use cpu::{Cpu, CpuEvent, CpuStream};
pub use cuda::Cuda;
pub use error::{DeviceError, Result};
pub use philox::{Philox, fnv1a, key_of_name};
pub use prefetch::{prefetch_l1, prefetch_l2};
pub use simd::Simd;

/// Plain data that may cross to a device byte for byte.
pub trait Element: bytemuck::Pod + Send + Sync {}
impl<T: bytemuck::Pod + Send + Sync> Element for T {}

/// What a device says of itself, for `doctor`, summaries and logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Kind of device: `cpu` or `cuda`.
    pub kind: &'static str,
    /// Name for people, such as the processor's model name.
    pub name: String,
    /// Worker threads (CPU) or multiprocessors.
    pub parallelism: usize,
}

/// Memory on a device, `len` elements of one plain type.
pub trait DeviceBuffer<T>: Send + Sync {
    /// Number of elements.
    fn len(&self) -> usize;

    /// Whether there are no elements.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Memory and ordered work.
///
/// Obligations of an implementor:
/// - a fresh buffer reads as zero bytes;
/// - work given to one stream happens in the order given; work on two streams is ordered only by
///   an event recorded on one and waited for on the other;
/// - a buffer may be dropped while work that uses it is queued: the memory lives until then;
/// - `Clone` is cheap and names the same device.
pub trait Device: Clone + Send + Sync + 'static {
    /// Memory on this device.
    type Buffer<T: Element>: DeviceBuffer<T>;
    /// A queue of work.
    type Stream: Send + Sync;
    /// A point in a queue of work.
    type Event: Send + Sync;

    /// What this device is.
    fn info(&self) -> DeviceInfo;

    /// A new queue of work.
    fn stream(&self) -> Result<Self::Stream>;

    /// A buffer of `len` elements, all bytes zero.
    ///
    /// Errors: [`DeviceError::OutOfMemory`] with the size asked for.
    fn alloc<T: Element>(&self, len: usize) -> Result<Self::Buffer<T>>;

    /// Copies `src` to elements `at..at + src.len()` of `dst`; `src` may be reused on return.
    ///
    /// Errors: [`DeviceError::CopyOutOfBounds`].
    fn upload<T: Element>(
        &self,
        stream: &Self::Stream,
        src: &[T],
        dst: &mut Self::Buffer<T>,
        at: usize,
    ) -> Result<()>;

    /// Copies elements `at..at + dst.len()` of `src` to `dst`, which holds them on return.
    ///
    /// Errors: [`DeviceError::CopyOutOfBounds`].
    fn download<T: Element>(
        &self,
        stream: &Self::Stream,
        src: &Self::Buffer<T>,
        at: usize,
        dst: &mut [T],
    ) -> Result<()>;

    /// Marks the present end of `stream`.
    fn record(&self, stream: &Self::Stream) -> Result<Self::Event>;

    /// Makes later work of `stream` wait for `event`.
    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<()>;

    /// Returns when all work given to `stream` is done.
    fn synchronize(&self, stream: &Self::Stream) -> Result<()>;
}
