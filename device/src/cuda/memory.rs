//! Buffers on the device, and page-locked memory of the host that the device can read and write.
//!
//! Each piece of memory knows the streams that use it. The first use by a stream makes it wait
//! until the piece is ready; when the piece is dropped, each of those streams marks its end, and
//! the memory is nobody else's until those marks are reached (`pool.rs`).

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::sys;

use super::pool::Block;
use super::shared::{Event, FILL_STREAM, STREAMS_MAX, Shared};
use super::{Cuda, CudaStream};
use crate::{DeviceBuffer, DeviceError, Element, Result};

/// Fresh memory of the device, all bytes zero, and its account.
struct Memory {
    shared: Arc<Shared>,
    block: Block,
    /// Reached when the memory is zero.
    ready: Event,
    used: AtomicU64,
}

/// `len` elements in device memory, which read as zero bytes at first.
pub struct CudaBuffer<T> {
    /// None for no bytes.
    memory: Option<Memory>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> CudaBuffer<T> {
    pub(super) fn zeroed(shared: &Arc<Shared>, len: usize) -> Result<Self> {
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let bytes = bytes.ok_or_else(|| DeviceError::OutOfMemory {
            device: "cuda",
            bytes: len as u128 * size_of::<T>() as u128,
            reason: "larger than the address space".into(),
        })?;
        let memory = (bytes > 0).then(|| Memory::zeroed(shared, bytes)).transpose()?;
        Ok(Self { memory, len, elements: PhantomData })
    }

    /// The device's address of the first element, 0 for a buffer without bytes, for work that is
    /// about to be given to `stream`: to hand to a kernel within other data, such as a list of
    /// tables. Buffers that are a kernel's arguments by themselves need no address.
    ///
    /// It holds as long as the buffer lives. Work that uses it is on streams for which it was
    /// asked; and who writes to it does so as if holding `&mut` to the buffer.
    ///
    /// Errors: [`DeviceError::Foreign`] for a stream of another device, or what the driver says.
    pub fn address(&self, stream: &CudaStream) -> Result<u64> {
        match &self.memory {
            Some(memory) => memory.address(stream),
            None => Ok(0),
        }
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub(super) fn check(&self, at: usize, count: usize) -> Result<()> {
        let end = at.saturating_add(count);
        if end > self.len {
            return Err(DeviceError::CopyOutOfBounds { at, end, len: self.len });
        }
        Ok(())
    }
}

impl Memory {
    fn zeroed(shared: &Arc<Shared>, bytes: usize) -> Result<Self> {
        let block = shared.device_pool.take(shared, bytes)?;
        let fill = shared.stream(FILL_STREAM);
        let give_back = |_: &DeviceError| {
            shared.device_pool.give(shared, block, [], 1 << FILL_STREAM);
        };
        // SAFETY: the block holds `bytes` and is this buffer's alone; the pool bound the context.
        let result = unsafe { sys::cuMemsetD8Async(block.address, 0, bytes, fill.0) };
        shared.context.check("fill a buffer", result).inspect_err(give_back)?;
        let ready = shared.record(fill).inspect_err(give_back)?;
        Ok(Self { shared: shared.clone(), block, ready, used: AtomicU64::new(0) })
    }

    fn address(&self, stream: &CudaStream) -> Result<u64> {
        if !Arc::ptr_eq(&self.shared, &stream.shared) {
            let ordinal = stream.shared.context.ordinal;
            return Err(DeviceError::Foreign { operation: "use a buffer on a stream", ordinal });
        }
        let bit = 1 << stream.index;
        if self.used.load(Ordering::Acquire) & bit == 0 {
            // The wait comes before the bit: who sees the bit may rely on it.
            self.shared.wait(stream.raw, self.ready)?;
            self.used.fetch_or(bit, Ordering::AcqRel);
        }
        Ok(self.block.address)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let used = *self.used.get_mut();
        self.shared.device_pool.give(&self.shared, self.block, [self.ready], used);
    }
}

impl<T: Element> DeviceBuffer<T> for CudaBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T> fmt::Debug for CudaBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaBuffer({} x {} bytes)", self.len, size_of::<T>())
    }
}

/// Page-locked bytes of the host, which kernels and copies reach at full speed. What they hold at
/// first is not defined.
///
/// The bytes are seen by the host or by the device, not by both: [`PinnedBytes::host`] awaits the
/// work that uses them.
pub struct PinnedBytes {
    shared: Arc<Shared>,
    block: Block,
    len: usize,
    used: AtomicU64,
    /// Ends of uses that are over.
    marks: Vec<Event>,
}

impl PinnedBytes {
    pub(super) fn take(shared: &Arc<Shared>, len: usize) -> Result<Self> {
        let block = shared.pinned_pool.take(shared, len.max(1))?;
        Ok(Self { shared: shared.clone(), block, len, used: AtomicU64::new(0), marks: Vec::new() })
    }

    /// Says that what was given to `stream` up to now is all that uses these bytes there, so that
    /// later work of the stream is not awaited with it.
    ///
    /// Errors: [`DeviceError::Foreign`], or what the driver says.
    pub fn mark(&mut self, stream: &CudaStream) -> Result<()> {
        self.address(stream)?;
        self.marks.push(self.shared.record(stream.raw)?);
        *self.used.get_mut() &= !(1 << stream.index);
        Ok(())
    }

    /// The bytes, once all work is done that was given to streams which use them.
    ///
    /// Errors: what the driver says.
    pub fn host(&mut self) -> Result<&mut [u8]> {
        while let Some(&event) = self.marks.last() {
            self.shared.await_event(event)?;
            self.marks.pop();
            self.shared.give_event(event);
        }
        let used = std::mem::take(self.used.get_mut());
        for index in (0..STREAMS_MAX).filter(|index| used >> index & 1 == 1) {
            let awaited = self.shared.synchronize(self.shared.stream(index));
            // Not to be touched if it is not known whether the work is done.
            awaited.inspect_err(|_| *self.used.get_mut() = used)?;
        }
        // SAFETY: the block holds `len` bytes, which the driver or a former user initialised; it is
        // this value's alone, and no work that uses it is left.
        Ok(unsafe { std::slice::from_raw_parts_mut(self.block.address as *mut u8, self.len) })
    }

    /// The address, the same for host and device, for work that is about to be given to `stream`.
    ///
    /// Errors: [`DeviceError::Foreign`] for a stream of another device.
    pub fn address(&self, stream: &CudaStream) -> Result<u64> {
        if !Arc::ptr_eq(&self.shared, &stream.shared) {
            let ordinal = stream.shared.context.ordinal;
            return Err(DeviceError::Foreign { operation: "use memory on a stream", ordinal });
        }
        self.used.fetch_or(1 << stream.index, Ordering::AcqRel);
        Ok(self.block.address)
    }

    /// Number of bytes.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for PinnedBytes {
    fn drop(&mut self) {
        let used = *self.used.get_mut();
        let marks = std::mem::take(&mut self.marks);
        self.shared.pinned_pool.give(&self.shared, self.block, marks, used);
    }
}

impl fmt::Debug for PinnedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PinnedBytes({})", self.len)
    }
}

/// The most bytes of one piece of a copy.
const PIECE_BYTES: usize = 1 << 20;

impl Cuda {
    /// Queues a copy of bytes to a buffer, through page-locked memory.
    pub(super) fn upload_bytes(&self, stream: &CudaStream, src: &[u8], to: u64) -> Result<()> {
        for (i, piece) in src.chunks(PIECE_BYTES).enumerate() {
            let mut pinned = PinnedBytes::take(&self.shared, piece.len())?;
            pinned.host()?.copy_from_slice(piece);
            let from = pinned.address(stream)? as *const _;
            let to = to + (i * PIECE_BYTES) as u64;
            self.shared.context.bind()?;
            // SAFETY: the caller checked the buffer's range, which `to` walks through; the pinned
            // bytes are kept by their events until the copy was made.
            let result = unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, piece.len(), stream.raw.0) };
            self.shared.context.check("upload", result)?;
        }
        Ok(())
    }

    /// Copies bytes of a buffer to the host, through page-locked memory: while one piece is taken
    /// out, the next is copied.
    pub(super) fn download_bytes(
        &self,
        stream: &CudaStream,
        from: u64,
        dst: &mut [u8],
    ) -> Result<()> {
        let len = dst.len();
        let queue = |at: usize, bytes: usize| -> Result<PinnedBytes> {
            let mut pinned = PinnedBytes::take(&self.shared, bytes)?;
            let to = pinned.address(stream)? as *mut _;
            self.shared.context.bind()?;
            // SAFETY: the caller checked the buffer's range, which `at` walks through; `pinned`
            // has `bytes`, and is kept by its events until the copy was made.
            let result =
                unsafe { sys::cuMemcpyDtoHAsync_v2(to, from + at as u64, bytes, stream.raw.0) };
            self.shared.context.check("download", result)?;
            pinned.mark(stream)?;
            Ok(pinned)
        };
        let mut take_out = |at: usize, mut pinned: PinnedBytes| -> Result<()> {
            let bytes = pinned.host()?;
            dst[at..at + bytes.len()].copy_from_slice(bytes);
            Ok(())
        };
        let mut before = None;
        for at in (0..len).step_by(PIECE_BYTES) {
            let now = queue(at, PIECE_BYTES.min(len - at))?;
            if let Some((at, copy)) = before.replace((at, now)) {
                take_out(at, copy)?;
            }
        }
        before.map_or(Ok(()), |(at, copy)| take_out(at, copy))
    }

    /// Queues a copy of `count` elements within the device.
    ///
    /// Errors: [`DeviceError::CopyOutOfBounds`], [`DeviceError::Foreign`], or what the driver says.
    pub fn copy<T: Element>(
        &self,
        stream: &CudaStream,
        src: &CudaBuffer<T>,
        from: usize,
        dst: &mut CudaBuffer<T>,
        to: usize,
        count: usize,
    ) -> Result<()> {
        src.check(from, count)?;
        dst.check(to, count)?;
        let bytes = count * size_of::<T>();
        if bytes == 0 {
            return Ok(());
        }
        let from = src.address(stream)? + (from * size_of::<T>()) as u64;
        let to = dst.address(stream)? + (to * size_of::<T>()) as u64;
        self.shared.context.bind()?;
        // SAFETY: both ranges were checked; the buffers live until the copy was made.
        let result = unsafe { sys::cuMemcpyDtoDAsync_v2(to, from, bytes, stream.raw.0) };
        self.shared.context.check("copy within the device", result)
    }
}
