//! Moving rows down: from the device to memory, from the host tier to the cold tier.

use std::time::Instant;

use super::Tiered;
use super::host::Block;
use super::shared::Shared;
use super::tier::{BELOW, DIRTY};
use crate::{CacheError, Planes, Result, RowLayout, RowOps};

/// Rows of the host tier written down in one go, at most.
const PUT_ROWS: u64 = 1 << 14;

/// The part of the host tier that makes room in one go, at least.
const HOST_SHARE: u64 = 64;

/// Copies rows of the device tier to rows `0..` of `to`.
pub(super) fn gather<D: RowOps>(
    device: &D,
    stream: &D::Stream,
    shared: &Shared,
    (weights, state): (&D::Buffer<u8>, &D::Buffer<u8>),
    slots: &[u64],
    to: &mut Block,
) -> Result<()> {
    let RowLayout { weight_bytes, state_bytes } = shared.layout;
    to.reserve(shared.layout, slots.len());
    let to = to.rows_mut(shared.layout, 0..slots.len());
    device
        .gather_rows(stream, weights, slots, weight_bytes, to.weights)
        .and_then(|()| device.gather_rows(stream, state, slots, state_bytes, to.state))
        .map_err(|error| shared.poison("copy rows from the device", error))
}

/// Writes rows to the cold tier, if there are any.
pub(super) fn put(shared: &Shared, rows: &[u64], planes: Planes<'_>) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let operation = "write to the cold tier";
    let start = Instant::now();
    let written = match &shared.cold {
        Some(cold) => cold.put(rows, planes),
        None => unreachable!("without a cold tier the host tier has room for all rows"),
    };
    written.map_err(|source| {
        let source = Box::new(source);
        shared.poison(operation, CacheError::Tier { operation, rows: rows.len() as u64, source })
    })?;
    shared.lock().stats.cold_write_s += start.elapsed().as_secs_f64();
    Ok(())
}

/// Empties slots of the host tier until `needed` are free, `promoted` taken as free, and returns
/// how many are: fewer only where none of its rows may leave.
///
/// A row leaves after it was written down, so that it is found at every moment; one that is wanted
/// meanwhile stays, clean.
pub(super) fn make_room(shared: &Shared, needed: u64, promoted: u64) -> Result<u64> {
    let mut block = Block::default();
    loop {
        let (slots, dirty) = {
            let mut guard = shared.lock();
            let state = &mut *guard;
            let room = state.host.free() + promoted;
            if room >= needed {
                return Ok(room);
            }
            let count = (needed - room).max(state.host.capacity() / HOST_SHARE).min(PUT_ROWS);
            let slots = state.host.victims(count as usize, state.policy, state.clock);
            if slots.is_empty() {
                return Ok(room);
            }
            let is_dirty = |slot: &u64| state.host.marks(*slot).flags() & DIRTY != 0;
            let dirty: Vec<u64> = slots.iter().copied().filter(is_dirty).collect();
            (slots, dirty)
        };
        let rows = write_down_host(shared, &dirty, &mut block)?;
        let mut state = shared.lock();
        state.host.stats.bytes_out += rows * shared.row_bytes();
        let idle: Vec<u64> =
            slots.into_iter().filter(|&slot| state.host.marks(slot).idle()).collect();
        state.host.stats.evictions += state.host.remove_all(&idle).len() as u64;
    }
}

/// Writes rows of the host tier down, which are clean then, and returns how many they were.
fn write_down_host(shared: &Shared, slots: &[u64], block: &mut Block) -> Result<u64> {
    let count = slots.len();
    block.reserve(shared.layout, count);
    // Nobody changes bytes of a row of the host tier while this store is borrowed for it.
    shared.copy_from_host(slots, block.rows_mut(shared.layout, 0..count));
    let rows: Vec<u64> = {
        let state = shared.lock();
        slots.iter().map(|&slot| state.host.row(slot)).collect()
    };
    put(shared, &rows, block.rows(shared.layout, 0..count))?;
    let mut state = shared.lock();
    state.host.stats.write_backs += count as u64;
    for &slot in slots {
        state.host.flag(slot, BELOW, DIRTY);
    }
    Ok(count as u64)
}

impl<D: RowOps> Tiered<D> {
    /// See [`RowStore::flush`](crate::RowStore::flush).
    pub(super) fn flush_all(&mut self, device: &D, stream: &D::Stream) -> Result<()> {
        drop(self.shared.state()?);
        let Some(cold) = self.shared.cold.clone() else { return Ok(()) };
        let shared = &*self.shared;
        let mut from = 0;
        loop {
            let (slots, next) = shared.lock().device.dirty(from, shared.chunk_rows());
            if slots.is_empty() {
                break;
            }
            from = next;
            let rows: Vec<u64> = {
                let state = shared.lock();
                slots.iter().map(|&slot| state.device.row(slot)).collect()
            };
            let planes = (&self.weights, &self.state);
            gather(device, stream, shared, planes, &slots, &mut self.leaving)?;
            put(shared, &rows, self.leaving.rows(shared.layout, 0..rows.len()))?;
            let mut state = shared.lock();
            state.device.stats.write_backs += rows.len() as u64;
            state.device.stats.bytes_out += rows.len() as u64 * shared.row_bytes();
            for slot in slots {
                state.device.flag(slot, BELOW, DIRTY);
            }
        }
        from = 0;
        loop {
            let (slots, next) = shared.lock().host.dirty(from, shared.chunk_rows());
            if slots.is_empty() {
                break;
            }
            from = next;
            let rows = write_down_host(shared, &slots, &mut self.leaving)?;
            shared.lock().host.stats.bytes_out += rows * shared.row_bytes();
        }
        cold.flush().map_err(|source| {
            let operation = "flush the cold tier";
            let source = Box::new(source);
            shared.poison(operation, CacheError::Tier { operation, rows: cold.len(), source })
        })
    }
}
