//! The host as a device: memory is ordinary memory, a stream runs its work at once.

use std::num::NonZeroUsize;
use std::sync::Arc;

use crate::{Device, DeviceError, DeviceInfo, Element, HostBuffer, Result, Simd};

/// The host's cores and memory.
///
/// Work runs on a pool of its own with a given number of threads, so two trainers in one process
/// do not share workers. Results never depend on that number.
#[derive(Clone, Debug)]
pub struct Cpu {
    pool: Arc<rayon::ThreadPool>,
    simd: Simd,
}

impl Cpu {
    /// A device of `threads` worker threads; all of the machine's cores when `None`.
    ///
    /// Errors: [`DeviceError::Threads`].
    pub fn new(threads: Option<NonZeroUsize>) -> Result<Self> {
        let threads = threads
            .or_else(|| std::thread::available_parallelism().ok())
            .map_or(1, NonZeroUsize::get);
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("tessera-cpu-{i}"))
            .build()
            .map_err(|error| DeviceError::Threads { threads, reason: error.to_string() })?;
        Ok(Self { pool: Arc::new(pool), simd: Simd::detect() })
    }

    /// The same device restricted to `simd`, which must be one of [`Simd::available`].
    ///
    /// # Panics
    /// When the machine lacks the instructions.
    #[must_use]
    pub fn with_simd(mut self, simd: Simd) -> Self {
        assert!(Simd::available().contains(&simd), "this machine has no {simd:?}");
        self.simd = simd;
        self
    }

    /// Vector instructions for kernels.
    #[must_use]
    pub fn simd(&self) -> Simd {
        self.simd
    }

    /// Number of worker threads.
    #[must_use]
    pub fn threads(&self) -> usize {
        self.pool.current_num_threads()
    }

    /// Runs `work` on the pool: rayon's parallel iterators inside it use this device's threads.
    pub fn run<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        self.pool.install(work)
    }
}

/// A CPU stream: work is done when the call that gave it returns.
#[derive(Debug)]
#[non_exhaustive]
pub struct CpuStream;

/// A point in a CPU stream: always reached.
#[derive(Debug)]
#[non_exhaustive]
pub struct CpuEvent;

impl Device for Cpu {
    type Buffer<T: Element> = HostBuffer<T>;
    type Stream = CpuStream;
    type Event = CpuEvent;

    fn info(&self) -> DeviceInfo {
        DeviceInfo { kind: "cpu", name: model_name(), parallelism: self.threads() }
    }

    fn stream(&self) -> Result<CpuStream> {
        Ok(CpuStream)
    }

    fn alloc<T: Element>(&self, len: usize) -> Result<HostBuffer<T>> {
        HostBuffer::zeroed(len)
    }

    fn upload<T: Element>(
        &self,
        _: &CpuStream,
        src: &[T],
        dst: &mut HostBuffer<T>,
        at: usize,
    ) -> Result<()> {
        let len = dst.len();
        let end = at.saturating_add(src.len());
        dst.get_mut(at..end)
            .ok_or(DeviceError::CopyOutOfBounds { at, end, len })?
            .copy_from_slice(src);
        Ok(())
    }

    fn download<T: Element>(
        &self,
        _: &CpuStream,
        src: &HostBuffer<T>,
        at: usize,
        dst: &mut [T],
    ) -> Result<()> {
        let end = at.saturating_add(dst.len());
        let from =
            src.get(at..end).ok_or(DeviceError::CopyOutOfBounds { at, end, len: src.len() })?;
        dst.copy_from_slice(from);
        Ok(())
    }

    fn record(&self, _: &CpuStream) -> Result<CpuEvent> {
        Ok(CpuEvent)
    }

    fn wait(&self, _: &CpuStream, _: &CpuEvent) -> Result<()> {
        Ok(())
    }

    fn synchronize(&self, _: &CpuStream) -> Result<()> {
        Ok(())
    }
}

/// The processor's model name, or its architecture where the system does not tell.
fn model_name() -> String {
    std::fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| {
            let line = text.lines().find(|line| line.starts_with("model name"))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        })
        .unwrap_or_else(|| std::env::consts::ARCH.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DeviceBuffer;

    #[test]
    fn copies_go_where_they_are_told_and_nowhere_else() {
        let cpu = Cpu::new(NonZeroUsize::new(2)).unwrap();
        let stream = cpu.stream().unwrap();
        let mut buffer = cpu.alloc::<u32>(5).unwrap();
        cpu.upload(&stream, &[1, 2, 3], &mut buffer, 1).unwrap();
        let mut all = [9; 5];
        cpu.download(&stream, &buffer, 0, &mut all).unwrap();
        assert_eq!(all, [0, 1, 2, 3, 0]);
        assert_eq!(DeviceBuffer::len(&buffer), 5);
        for at in [3, 5, usize::MAX] {
            let error = cpu.upload(&stream, &[7, 7, 7], &mut buffer, at).unwrap_err();
            assert!(matches!(error, DeviceError::CopyOutOfBounds { len: 5, .. }), "{error}");
            assert!(cpu.download(&stream, &buffer, at, &mut all[..3]).is_err());
        }
    }

    #[test]
    fn the_pool_has_the_threads_asked_for() {
        for threads in [1, 2, 3] {
            let cpu = Cpu::new(NonZeroUsize::new(threads)).unwrap();
            assert_eq!(cpu.threads(), threads);
            assert_eq!(cpu.run(rayon::current_num_threads), threads);
        }
    }
}
