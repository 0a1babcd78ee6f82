//! An NVIDIA GPU as a device, over its driver, NVRTC and cuBLASLt, which are loaded at run time: a
//! program with this in it starts on machines that have none of them.
//!
//! ```text
//! probe      what there is, as a value: libraries, driver, GPUs
//! Cuda       memory (pools of blocks), streams, events
//! KernelSource -> Kernel -> Call -> launch
//! Product      -> multiply, by cuBLASLt
//! ```
//!
//! Everything may be used by any thread: each call binds the device's context to its thread.
//! Accounts of which stream uses which memory are our own (`memory.rs`, `pool.rs`): they say when
//! memory may be freed and used again, and nothing else. Work on two streams is ordered by the
//! events that the caller records and waits for.

mod compile;
mod driver;
mod kernel;
mod libraries;
mod memory;
mod pool;
mod probe;
mod products;
mod shared;
mod stream;
pub mod testing;

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

use cudarc::driver::sys;

pub use kernel::{Call, Kernel, KernelSource, Launch};
pub use libraries::Found;
pub use memory::{CudaBuffer, PinnedBytes};
pub use probe::{Driver, Gpu, Probe};
pub use products::{Epilogue, Factor, Form, Fused, Output, Precision, Product, Store};
pub use stream::{CudaEvent, CudaStream};

use crate::{Device, DeviceError, DeviceInfo, Element, Result};
use products::Products;
use shared::Shared;

/// The oldest driver that works, in CUDA's numbering: 1000 times the major version and 10 times
/// the minor one. From it on, drivers have all functions that are called here and run what NVRTC
/// 12.8 compiles.
pub const DRIVER_VERSION_MIN: u32 = 12_040;

/// How a [`Cuda`] works.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CudaOptions {
    /// Folder of compiled kernels; none are kept without one. Anyone who can write to it can make
    /// this program run code on the GPU.
    pub cubin_dir: Option<PathBuf>,
    /// Bytes of device memory that are kept for later buffers at most, beyond those that cannot be
    /// freed yet. With 0, buffers have exactly their size, so that tools see each byte beyond it.
    pub cached_bytes_max: u64,
    /// As [`CudaOptions::cached_bytes_max`], of page-locked host memory.
    pub pinned_bytes_max: u64,
    /// How matrices are multiplied.
    pub precision: Precision,
}

impl Default for CudaOptions {
    /// Kernels are kept in `tessera/cubin` of `$XDG_CACHE_HOME` or `$HOME/.cache`; 4 GiB of device
    /// memory and 64 MiB of page-locked memory; products in f32.
    fn default() -> Self {
        let folder = |name: &str, below: &str| {
            let base = std::env::var_os(name).filter(|base| !base.is_empty())?;
            Some(PathBuf::from(base).join(below))
        };
        Self {
            cubin_dir: folder("XDG_CACHE_HOME", "tessera/cubin")
                .or_else(|| folder("HOME", ".cache/tessera/cubin")),
            cached_bytes_max: 4 << 30,
            pinned_bytes_max: 64 << 20,
            precision: Precision::Fp32,
        }
    }
}

/// What a device holds and did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaStats {
    /// Bytes of device memory in buffers, as rounded up.
    pub live_bytes: u64,
    /// The most there were.
    pub live_bytes_peak: u64,
    /// Bytes of device memory kept for later buffers.
    pub cached_bytes: u64,
    /// Bytes of page-locked host memory.
    pub pinned_bytes: u64,
    /// Pieces of device memory that the driver gave.
    pub allocations: u64,
    /// Buffers that got memory of former ones.
    pub reuses: u64,
    /// Sources of kernels that were compiled.
    pub kernels_compiled: u64,
    /// Sources of kernels that were read as compiled before.
    pub kernels_from_disk: u64,
    /// Kernels launched.
    pub launches: u64,
}

/// One NVIDIA GPU.
///
/// Clones are the same device; two that were made by [`Cuda::new`] are not, even of one GPU: what
/// belongs to one is refused by the other.
#[derive(Clone)]
pub struct Cuda {
    shared: Arc<Shared>,
    products: Arc<Products>,
}

impl Cuda {
    /// GPU `ordinal` of this machine, as the driver counts (`CUDA_VISIBLE_DEVICES`).
    ///
    /// Errors: [`DeviceError::Unavailable`] with what is missing, or what the driver says.
    pub fn new(ordinal: u32) -> Result<Self> {
        Self::with_options(ordinal, CudaOptions::default())
    }

    /// As [`Cuda::new`].
    ///
    /// Errors: as there.
    pub fn with_options(ordinal: u32, options: CudaOptions) -> Result<Self> {
        let probe = Driver::probe();
        let count = probe.gpus()?.len() as u32;
        if ordinal >= count {
            return Err(DeviceError::Unavailable {
                reason: format!("there is no GPU {ordinal}: the driver shows {count}, from 0"),
            });
        }
        let products = Arc::new(Products::new(options.precision));
        Ok(Self { shared: Shared::new(ordinal, options)?, products })
    }

    /// The GPU's number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.shared.context.ordinal
    }

    /// The GPU's compute capability, 10 times the major number and the minor one: 90 for an H200.
    #[must_use]
    pub fn capability(&self) -> u32 {
        self.shared.capability
    }

    /// The GPU's multiprocessors.
    #[must_use]
    pub fn multiprocessors(&self) -> u32 {
        self.shared.multiprocessors
    }

    /// The most bytes of shared memory that a block of threads can ask for.
    #[must_use]
    pub fn shared_bytes_max(&self) -> u32 {
        self.shared.shared_bytes_max
    }

    /// Free and total bytes of the GPU's memory. Buffers that were dropped may not be free yet.
    ///
    /// Errors: what the driver says.
    pub fn memory_bytes(&self) -> Result<(u64, u64)> {
        self.shared.context.memory().map(|(free, total)| (free as u64, total as u64))
    }

    /// What this device holds and did.
    #[must_use]
    pub fn stats(&self) -> CudaStats {
        self.shared.stats()
    }

    /// The kernel `function` of a source, which is compiled for this GPU when it is first asked for.
    ///
    /// Errors: [`DeviceError::Compile`], [`DeviceError::NoKernel`], [`DeviceError::Unavailable`]
    /// without NVRTC, or what the driver says.
    pub fn kernel(&self, source: &KernelSource, function: &str) -> Result<Kernel> {
        kernel::find(&self.shared, source, function)
    }

    /// Page-locked host memory, for as long as it is needed.
    ///
    /// Errors: [`DeviceError::OutOfMemory`], or what the driver says.
    pub fn pinned(&self, bytes: usize) -> Result<PinnedBytes> {
        PinnedBytes::take(&self.shared, bytes)
    }

    /// Fills a buffer with zero bytes.
    ///
    /// Errors: [`DeviceError::Foreign`], or what the driver says.
    pub fn zero<T: Element>(&self, stream: &CudaStream, buffer: &mut CudaBuffer<T>) -> Result<()> {
        let bytes = buffer.len() * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        let address = buffer.address(stream)?;
        self.shared.context.bind()?;
        // SAFETY: the buffer has `bytes`, is borrowed alone, and lives until the stream is done.
        let result = unsafe { sys::cuMemsetD8Async(address, 0, bytes, stream.raw.0) };
        self.shared.context.check("fill a buffer", result)
    }

    fn own(&self, operation: &'static str, other: &Arc<Shared>) -> Result<()> {
        if Arc::ptr_eq(&self.shared, other) {
            return Ok(());
        }
        Err(DeviceError::Foreign { operation, ordinal: self.ordinal() })
    }
}

impl Device for Cuda {
    type Buffer<T: Element> = CudaBuffer<T>;
    type Stream = CudaStream;
    type Event = CudaEvent;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            kind: "cuda",
            name: self.shared.name.clone(),
            parallelism: self.shared.multiprocessors as usize,
        }
    }

    fn stream(&self) -> Result<CudaStream> {
        CudaStream::take(&self.shared)
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<CudaBuffer<T>> {
        CudaBuffer::zeroed(&self.shared, len)
    }

    fn upload<T: Element>(
        &self,
        stream: &CudaStream,
        src: &[T],
        dst: &mut CudaBuffer<T>,
        at: usize,
    ) -> Result<()> {
        self.own("upload", &stream.shared)?;
        dst.check(at, src.len())?;
        let to = dst.address(stream)? + (at * size_of::<T>()) as u64;
        self.upload_bytes(stream, bytemuck::cast_slice(src), to)
    }

    fn download<T: Element>(
        &self,
        stream: &CudaStream,
        src: &CudaBuffer<T>,
        at: usize,
        dst: &mut [T],
    ) -> Result<()> {
        self.own("download", &stream.shared)?;
        src.check(at, dst.len())?;
        let from = src.address(stream)? + (at * size_of::<T>()) as u64;
        self.download_bytes(stream, from, bytemuck::cast_slice_mut(dst))
    }

    fn record(&self, stream: &CudaStream) -> Result<CudaEvent> {
        self.own("record", &stream.shared)?;
        CudaEvent::record(stream)
    }

    fn wait(&self, stream: &CudaStream, event: &CudaEvent) -> Result<()> {
        self.own("wait", &stream.shared)?;
        self.own("wait", &event.shared)?;
        self.shared.wait(stream.raw, event.raw)
    }

    fn synchronize(&self, stream: &CudaStream) -> Result<()> {
        self.own("synchronize", &stream.shared)?;
        self.shared.synchronize(stream.raw)
    }
}

impl fmt::Debug for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cuda({}, {})", self.ordinal(), self.shared.name)
    }
}
