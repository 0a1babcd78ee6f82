//! Memory that the MPI library receives into.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use tessera_device::HostBuffer;

use crate::payload::Bytes;

/// Memory of messages that have been read, for later ones.
#[derive(Default)]
pub(super) struct Buffers {
    free: Mutex<Vec<HostBuffer<u8>>>,
}

/// Buffers kept at most.
const KEPT: usize = 16;

impl Buffers {
    /// At least `bytes` bytes, but no buffer of many times as much.
    pub(super) fn take(&self, bytes: usize) -> tessera_device::Result<HostBuffer<u8>> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let fitting = bytes..=bytes.saturating_mul(4).max(4096);
        let best = (0..free.len())
            .filter(|&at| fitting.contains(&free[at].len()))
            .min_by_key(|&at| free[at].len());
        if let Some(at) = best {
            return Ok(free.swap_remove(at));
        }
        drop(free);
        HostBuffer::zeroed(bytes)
    }

    fn put(&self, buffer: HostBuffer<u8>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let oldest = (free.len() >= KEPT).then(|| free.remove(0));
        free.push(buffer);
        drop(free);
        drop(oldest);
    }
}

/// The first `len` bytes of a buffer, which goes home when nobody reads it any more.
pub(super) struct Arrived {
    memory: Option<HostBuffer<u8>>,
    len: usize,
    home: Weak<Buffers>,
}

impl Arrived {
    /// The first `len` bytes of `memory`, whose home is `home`.
    pub(super) fn new(memory: HostBuffer<u8>, len: usize, home: &Arc<Buffers>) -> Self {
        Self { memory: Some(memory), len, home: Arc::downgrade(home) }
    }
}

impl Bytes for Arrived {
    fn bytes(&self) -> &[u8] {
        self.memory.as_ref().map_or(&[], |memory| &memory[..self.len])
    }
}

impl Drop for Arrived {
    fn drop(&mut self) {
        if let (Some(memory), Some(home)) = (self.memory.take(), self.home.upgrade()) {
            home.put(memory);
        }
    }
}
