//! Memory that is made once and handed out again, of the device and page-locked memory of the
//! host: making either stops the device, for a time that a training step does not have.
//!
//! ```text
//! take(bytes)    a free block of that size whose events were all reached; else, where free blocks
//!                fill their bound already, the oldest of that size, once they are; else a new one
//! give(block)    becomes free, with an event at the end of each stream that used it
//!                past the bound, blocks whose events were reached go back to the driver
//! no room        all free blocks go back to the driver, once their events are reached
//! ```
//!
//! A block is never waited for while there is room: that would tie the stream that asked to the
//! streams that used it before. Sizes are rounded up to one of four in every power of two, so that
//! batches of like sizes share blocks; with a bound of 0 bytes they are exact, and nothing is kept
//! that is not in use.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Mutex;

use cudarc::driver::sys::{self, CUresult};

use super::driver::Context;
use super::shared::{Event, Shared, lock};
use crate::{DeviceError, Result};

/// The smallest block in bytes.
const BLOCK_BYTES_MIN: usize = 512;

/// Larger blocks are rounded up to multiples of this many bytes, a page of the device.
const PAGE_BYTES: usize = 2 << 20;

/// The most blocks that wait for their events, whatever their size.
const FREE_BLOCKS_MAX: usize = 1024;

/// Where a pool's memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// On the device.
    Device,
    /// On the host, page-locked; the device sees it at the same address.
    Pinned,
}

/// A piece of memory. Its size is the block's, which may be larger than what was asked for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) address: u64,
    pub(super) bytes: usize,
}

struct Free {
    block: Block,
    events: Vec<Event>,
}

/// What a pool holds and did.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct PoolStats {
    pub(super) live_bytes: u64,
    pub(super) live_bytes_peak: u64,
    pub(super) cached_bytes: u64,
    pub(super) made: u64,
    pub(super) reused: u64,
}

#[derive(Default)]
struct State {
    free: VecDeque<Free>, // oldest first
    stats: PoolStats,
}

/// Blocks of one kind of memory.
pub(super) struct Pool {
    kind: Kind,
    cached_bytes_max: u64,
    state: Mutex<State>,
    /// What a test takes away: reuse without regard to the events.
    #[cfg(test)]
    pub(super) forget_events: std::sync::atomic::AtomicBool,
}

impl Pool {
    pub(super) fn new(kind: Kind, cached_bytes_max: u64) -> Self {
        Self {
            kind,
            cached_bytes_max,
            state: Mutex::default(),
            #[cfg(test)]
            forget_events: false.into(),
        }
    }

    pub(super) fn stats(&self) -> PoolStats {
        lock(&self.state).stats
    }

    /// A block of at least `bytes`, which are more than 0, that no queued work uses.
    ///
    /// Errors: [`DeviceError::OutOfMemory`] with `bytes`, or what the driver says.
    pub(super) fn take(&self, shared: &Shared, bytes: usize) -> Result<Block> {
        let size = if self.cached_bytes_max == 0 { bytes } else { size_class(bytes) };
        shared.context.bind()?;
        let reused = {
            let mut state = lock(&self.state);
            let taken = self.take_free(shared, &mut state, size)?;
            if let Some(free) = &taken {
                state.stats.cached_bytes -= free.block.bytes as u64;
                state.stats.reused += 1;
                state.stats.lives(size);
            }
            taken
        };
        if let Some(free) = reused {
            self.settle(shared, free.events)?;
            return Ok(free.block);
        }
        let block = match self.make(&shared.context, size) {
            Err(CUresult::CUDA_ERROR_OUT_OF_MEMORY) => {
                self.release_free(shared, |_| true)?;
                self.make(&shared.context, size)
            }
            made => made,
        }
        .map_err(|error| self.refused(shared, bytes, error))?;
        let mut state = lock(&self.state);
        state.stats.made += 1;
        state.stats.lives(size);
        Ok(block)
    }

    /// Takes back a block that was used by the streams of `used`, and by the work before `marks`.
    pub(super) fn give(
        &self,
        shared: &Shared,
        block: Block,
        marks: impl IntoIterator<Item = Event>,
        used: u64,
    ) {
        let events = shared.record_all(used).map(|mut events| {
            events.extend(marks);
            events
        });
        let mut state = lock(&self.state);
        state.stats.live_bytes -= block.bytes as u64;
        // Without its events nobody can say when a block may be used again: it is given up. The
        // context is broken then, and takes all its memory with it.
        let Ok(events) = events else { return };
        state.stats.cached_bytes += block.bytes as u64;
        state.free.push_back(Free { block, events });
        drop(state);
        // A refusal here comes back from the next call that can tell it.
        let _ = self.trim(shared);
    }

    /// Frees everything without waiting.
    ///
    /// # Safety
    /// The context is bound, all work is done and no block lives.
    pub(super) unsafe fn free_all(&self) {
        for free in lock(&self.state).free.drain(..) {
            // SAFETY: by this function's contract.
            let _ = unsafe { self.unmake(free.block) };
        }
    }

    /// A free block of `size` bytes, by the rule of the module.
    fn take_free(&self, shared: &Shared, state: &mut State, size: usize) -> Result<Option<Free>> {
        #[cfg(test)]
        if self.forget_events.load(std::sync::atomic::Ordering::Relaxed) {
            // The newest, whose user is the likeliest not to be done.
            let position = state.free.iter().rposition(|free| free.block.bytes == size);
            return Ok(position.and_then(|position| {
                let mut free = state.free.remove(position)?;
                free.events.drain(..).for_each(|event| shared.give_event(event));
                Some(free)
            }));
        }
        let mut oldest = None;
        for position in 0..state.free.len() {
            let free = &state.free[position];
            if free.block.bytes != size {
                continue;
            }
            if all_reached(shared, &free.events)? {
                return Ok(state.free.remove(position));
            }
            oldest = oldest.or(Some(position));
        }
        let full = state.stats.cached_bytes > self.cached_bytes_max;
        Ok(oldest.filter(|_| full).and_then(|position| state.free.remove(position)))
    }

    /// Awaits events and takes them back.
    fn settle(&self, shared: &Shared, events: Vec<Event>) -> Result<()> {
        events.into_iter().try_for_each(|event| {
            let reached = shared.await_event(event);
            shared.give_event(event);
            reached
        })
    }

    /// Gives free blocks beyond the bounds back to the driver: those whose events were reached, and
    /// others only if there are very many of them.
    fn trim(&self, shared: &Shared) -> Result<()> {
        let mut excess = {
            let state = lock(&self.state);
            state.stats.cached_bytes.saturating_sub(self.cached_bytes_max)
        };
        if excess == 0 {
            return Ok(());
        }
        shared.context.bind()?;
        self.release_free(shared, |free| {
            let goes = excess > 0 && all_reached(shared, &free.events).unwrap_or(false);
            excess = if goes { excess.saturating_sub(free.block.bytes as u64) } else { excess };
            goes
        })?;
        let mut many = lock(&self.state).free.len().saturating_sub(FREE_BLOCKS_MAX);
        if many == 0 {
            return Ok(());
        }
        self.release_free(shared, |_| {
            let goes = many > 0;
            many = many.saturating_sub(1);
            goes
        })
    }

    /// Gives those free blocks back to the driver that `goes` says, oldest first, once their events
    /// are reached. The context is bound.
    fn release_free(&self, shared: &Shared, mut goes: impl FnMut(&Free) -> bool) -> Result<()> {
        let gone: Vec<Free> = {
            let mut state = lock(&self.state);
            let (gone, kept) =
                std::mem::take(&mut state.free).into_iter().partition(|free| goes(free));
            state.free = kept;
            let gone: VecDeque<Free> = gone;
            state.stats.cached_bytes -=
                gone.iter().map(|free| free.block.bytes as u64).sum::<u64>();
            gone.into()
        };
        for free in gone {
            self.settle(shared, free.events)?;
            // SAFETY: the block was free, and no queued work uses it.
            let result = unsafe { self.unmake(free.block) };
            shared.context.check("free memory", result)?;
        }
        Ok(())
    }

    fn make(&self, _bound: &Context, bytes: usize) -> std::result::Result<Block, CUresult> {
        let mut address = 0u64;
        let result = match self.kind {
            // SAFETY: the pointer is to a local, and a context is bound.
            Kind::Device => unsafe { sys::cuMemAlloc_v2(&mut address, bytes) },
            Kind::Pinned => {
                let mut pointer: *mut c_void = std::ptr::null_mut();
                let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
                // SAFETY: as above.
                let result = unsafe { sys::cuMemHostAlloc(&mut pointer, bytes, flags) };
                address = pointer as u64;
                result
            }
        };
        super::driver::done(result).map(|()| Block { address, bytes })
    }

    /// # Safety
    /// The context is bound, `block` is one of this pool's that nobody uses, now or later.
    unsafe fn unmake(&self, block: Block) -> CUresult {
        // SAFETY: by this function's contract.
        unsafe {
            match self.kind {
                Kind::Device => sys::cuMemFree_v2(block.address),
                Kind::Pinned => sys::cuMemFreeHost(block.address as *mut c_void),
            }
        }
    }

    fn refused(&self, shared: &Shared, bytes: usize, error: CUresult) -> DeviceError {
        if error != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            return super::driver::driver_error(shared.context.ordinal, "make memory", error);
        }
        let live = lock(&self.state).stats.live_bytes;
        let reason = match (self.kind, shared.context.memory()) {
            (Kind::Device, Ok((free, total))) => format!(
                "GPU {} has {free} of {total} bytes free, and this process's buffers hold {live}; \
                 use smaller tables or tiers, or more GPUs",
                shared.context.ordinal
            ),
            (Kind::Device, Err(_)) => format!("buffers hold {live} bytes already"),
            (Kind::Pinned, _) => {
                format!("the system gives no more page-locked memory; {live} bytes are in use")
            }
        };
        let device = if self.kind == Kind::Device { "cuda" } else { "cuda (pinned host memory)" };
        DeviceError::OutOfMemory { device, bytes: bytes as u128, reason }
    }
}

impl PoolStats {
    fn lives(&mut self, bytes: usize) {
        self.live_bytes += bytes as u64;
        self.live_bytes_peak = self.live_bytes_peak.max(self.live_bytes);
    }
}

/// Whether all events were reached. The context is bound.
fn all_reached(shared: &Shared, events: &[Event]) -> Result<bool> {
    for &event in events {
        if !shared.reached(event)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The size of a block that holds `bytes`: four sizes in every power of two, whole pages above
/// sixteen of them.
fn size_class(bytes: usize) -> usize {
    let octave = bytes.checked_next_power_of_two().unwrap_or(usize::MAX);
    let step = (octave / 8).clamp(BLOCK_BYTES_MIN, PAGE_BYTES);
    bytes.checked_next_multiple_of(step).unwrap_or(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_waste_at_most_a_quarter_and_are_few() {
        for bytes in [1, 511, 512, 513, 4095, 4097, 5000, 1 << 20, (1 << 20) + 1, 100 << 20] {
            let size = size_class(bytes);
            assert!(size >= bytes && size.is_multiple_of(BLOCK_BYTES_MIN), "{bytes}: {size}");
            assert!(size <= bytes + (bytes / 4).max(BLOCK_BYTES_MIN), "{bytes}: {size}");
            assert_eq!(size_class(size), size);
        }
        let sizes: std::collections::HashSet<usize> =
            ((1 << 20) + 1..=(2 << 20)).step_by(4096).map(size_class).collect();
        assert_eq!(sizes.len(), 4);
        assert_eq!(size_class(usize::MAX - 5), usize::MAX - 5);
    }

    /// Memory whose former user is not done: with the events that keep it from being used again,
    /// and without them.
    fn wrong_values(cuda: &crate::Cuda) -> usize {
        use crate::Device;
        let (one, two) = (cuda.stream().unwrap(), cuda.stream().unwrap());
        (0..60u32)
            .filter(|&round| {
                let mut source = cuda.alloc::<u32>(300).unwrap();
                let mut copy = cuda.alloc::<u32>(700).unwrap();
                cuda.upload(&one, &[round + 1; 300], &mut source, 0).unwrap();
                cuda.copy(&one, &source, 0, &mut copy, 0, 300).unwrap();
                drop(source);
                let mut other = cuda.alloc::<u32>(300).unwrap();
                cuda.upload(&two, &[77; 300], &mut other, 0).unwrap();
                cuda.synchronize(&two).unwrap();
                let mut found = [0; 300];
                cuda.download(&one, &copy, 0, &mut found).unwrap();
                found != [round + 1; 300]
            })
            .count()
    }

    #[test]
    fn a_block_is_not_used_again_before_its_events() {
        use super::super::{CudaOptions, testing};
        let Some(cuda) = testing::cuda_with(CudaOptions::default()) else { return };
        assert_eq!(wrong_values(&cuda), 0);
        let forget = &cuda.shared.device_pool.forget_events;
        forget.store(true, std::sync::atomic::Ordering::Relaxed);
        if cuda.shared.name.contains("stand-in") {
            assert!(wrong_values(&cuda) > 0, "without events, memory was shared to no effect");
        }
    }
}
