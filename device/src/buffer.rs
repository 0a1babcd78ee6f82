//! Host memory for numbers: zeroed, aligned, on huge pages when it is large.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use crate::{DeviceBuffer, DeviceError, Element, Result};

/// Alignment of every buffer in bytes: a cache line, and the widest vector.
pub(crate) const ALIGN: usize = 64;

/// Size and alignment of a huge page on the systems we run on, in bytes.
const HUGE: usize = 2 << 20;

/// Who gives the memory back.
enum Owner {
    /// The global allocator.
    Heap(Layout),
    /// An anonymous map, larger than the buffer so that it can start at a huge page.
    Map { _map: memmap2::MmapMut },
}

/// A zeroed array in host memory, aligned to 64 bytes; from 4 MiB on it is an anonymous map
/// aligned to 2 MiB for which huge pages were asked. Pages that nobody wrote take no memory.
pub struct HostBuffer<T> {
    start: NonNull<T>,
    len: usize,
    owner: Owner,
    elements: PhantomData<T>,
}

// SAFETY: the buffer owns its memory alone, like a Vec; T: Element is Send and Sync.
unsafe impl<T: Element> Send for HostBuffer<T> {}
// SAFETY: as above; a shared buffer gives shared slices only.
unsafe impl<T: Element> Sync for HostBuffer<T> {}

impl<T: Element> HostBuffer<T> {
    /// `len` elements, all bytes zero.
    ///
    /// Errors: [`DeviceError::OutOfMemory`] with the size asked for.
    pub fn zeroed(len: usize) -> Result<Self> {
        let refuse = |reason: String| DeviceError::OutOfMemory {
            device: "cpu",
            bytes: len as u128 * size_of::<T>() as u128,
            reason,
        };
        const { assert!(align_of::<T>() <= ALIGN) };
        let bytes = len
            .checked_mul(size_of::<T>())
            .filter(|&bytes| bytes <= isize::MAX as usize - HUGE)
            .ok_or_else(|| refuse("larger than the address space".into()))?;
        let (start, owner) = if bytes >= 2 * HUGE {
            map(bytes).map_err(|error| refuse(error.to_string()))?
        } else {
            let layout = Layout::from_size_align(bytes.max(1), ALIGN)
                .map_err(|error| refuse(error.to_string()))?;
            // SAFETY: the layout's size is at least 1.
            let start = NonNull::new(unsafe { alloc_zeroed(layout) })
                .ok_or_else(|| refuse("the allocator has no memory left".into()))?;
            (start, Owner::Heap(layout))
        };
        Ok(Self { start: start.cast(), len, owner, elements: PhantomData })
    }

    /// A buffer that holds a copy of `values`.
    ///
    /// Errors: as [`HostBuffer::zeroed`].
    pub fn from_slice(values: &[T]) -> Result<Self> {
        let mut buffer = Self::zeroed(values.len())?;
        buffer.copy_from_slice(values);
        Ok(buffer)
    }
}

/// An anonymous map of at least `bytes` from a huge-page boundary on.
fn map(bytes: usize) -> std::io::Result<(NonNull<u8>, Owner)> {
    let mut map = memmap2::MmapMut::map_anon(bytes + HUGE)?;
    // A refusal only means small pages: the buffer works all the same.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    let start = map.as_mut_ptr();
    let shift = start.align_offset(HUGE);
    // SAFETY: shift < HUGE and the map is HUGE longer than `bytes`.
    let start = unsafe { NonNull::new_unchecked(start.add(shift)) };
    Ok((start, Owner::Map { _map: map }))
}

impl<T> Drop for HostBuffer<T> {
    fn drop(&mut self) {
        if let Owner::Heap(layout) = self.owner {
            // SAFETY: `start` came from `alloc_zeroed` with this layout and is freed once.
            unsafe { dealloc(self.start.as_ptr().cast(), layout) };
        }
    }
}

impl<T> Deref for HostBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `start` is aligned and owns `len` initialised (zeroed, plain) elements.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T> DerefMut for HostBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Element> DeviceBuffer<T> for HostBuffer<T> {
    fn len(&self) -> usize {
        self.len
    }
}

impl<T> fmt::Debug for HostBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({} x {} bytes)", self.len, size_of::<T>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_and_large_buffers_are_zeroed_and_aligned() {
        for len in [0usize, 1, 15, 1 << 10, (4 << 20) / 4, (9 << 20) / 4 + 3] {
            let mut buffer = HostBuffer::<f32>::zeroed(len).unwrap();
            assert_eq!(buffer.len(), len);
            assert_eq!(buffer.as_ptr() as usize % ALIGN, 0);
            if len * 4 >= 2 * HUGE {
                assert_eq!(buffer.as_ptr() as usize % HUGE, 0);
            }
            assert!(buffer.iter().all(|&x| x == 0.0));
            if let Some(last) = buffer.last_mut() {
                *last = 1.0;
            }
            assert_eq!(buffer.iter().sum::<f32>(), if len == 0 { 0.0 } else { 1.0 });
        }
    }

    #[test]
    fn a_size_beyond_the_address_space_is_an_error_with_its_bytes() {
        let error = HostBuffer::<u64>::zeroed(usize::MAX / 4).unwrap_err();
        let DeviceError::OutOfMemory { bytes, .. } = error else { panic!("{error}") };
        assert_eq!(bytes, (usize::MAX / 4) as u128 * 8);
    }
}
