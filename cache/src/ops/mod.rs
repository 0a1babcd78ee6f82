//! What a device must do to move rows between a plane and a list of rows: the [`RowOps`] trait.

mod cuda;

use rayon::prelude::*;
use tessera_device::{Cpu, CpuStream, Device, DeviceError, HostBuffer};

use crate::Result;
use crate::index::prefetch;

/// A slot that stands for no place.
pub const NO_SLOT: u64 = u64::MAX;

/// Copies between a plane in device memory, (slots, row_bytes), and rows one after another in
/// host memory, (rows, row_bytes).
///
/// The caller gives slots of the plane, to a scatter each at most once; host memory of exactly
/// `slots.len() * row_bytes` bytes.
///
/// The implementor must leave `to` filled, and `from` free to be reused, when a call returns, and
/// order the work on `stream` like an upload or download.
pub trait RowOps: Device {
    /// Copies the rows at `slots` to `to`.
    ///
    /// Errors: a slot outside of the plane, or what the device says.
    fn gather_rows(
        &self,
        stream: &Self::Stream,
        plane: &Self::Buffer<u8>,
        slots: &[u64],
        row_bytes: usize,
        to: &mut [u8],
    ) -> Result<()>;

    /// Copies rows to `slots`; a row whose slot is [`NO_SLOT`] is left out.
    ///
    /// Errors: a slot outside of the plane, or what the device says.
    fn scatter_rows(
        &self,
        stream: &Self::Stream,
        from: &[u8],
        slots: &[u64],
        row_bytes: usize,
        plane: &mut Self::Buffer<u8>,
    ) -> Result<()>;
}

/// Fewer bytes than this are copied by the calling thread: waking others takes as long.
const PARALLEL_BYTES: usize = 1 << 20;

impl RowOps for Cpu {
    fn gather_rows(
        &self,
        _: &CpuStream,
        plane: &HostBuffer<u8>,
        slots: &[u64],
        row_bytes: usize,
        to: &mut [u8],
    ) -> Result<()> {
        check_slots(slots.iter().copied(), row_bytes, plane.len())?;
        let rows = rows_a_thread(slots.len(), self.threads());
        if row_bytes == 0 {
        } else if rows == slots.len() || to.len() < PARALLEL_BYTES {
            gather(plane, slots, row_bytes, to);
        } else {
            self.run(|| {
                let pieces = to.par_chunks_mut(rows * row_bytes);
                pieces
                    .zip(slots.par_chunks(rows))
                    .for_each(|(to, slots)| gather(plane, slots, row_bytes, to));
            });
        }
        Ok(())
    }

    /// In parallel, each thread owns a part of the plane and passes over all slots for those that
    /// lie in it.
    fn scatter_rows(
        &self,
        _: &CpuStream,
        from: &[u8],
        slots: &[u64],
        row_bytes: usize,
        plane: &mut HostBuffer<u8>,
    ) -> Result<()> {
        let placed = slots.iter().copied().filter(|&slot| slot != NO_SLOT);
        check_slots(placed, row_bytes, plane.len())?;
        if row_bytes == 0 {
            return Ok(());
        }
        let rows = rows_a_thread(plane.len() / row_bytes, self.threads());
        if self.threads() == 1 || from.len() < PARALLEL_BYTES {
            scatter(from, slots, row_bytes, 0, plane);
        } else {
            self.run(|| {
                let pieces = plane.par_chunks_mut(rows * row_bytes).enumerate();
                pieces.for_each(|(i, piece)| {
                    scatter(from, slots, row_bytes, (i * rows) as u64, piece);
                });
            });
        }
        Ok(())
    }
}

/// How many of `rows` each of `threads` gets; at least 1.
fn rows_a_thread(rows: usize, threads: usize) -> usize {
    rows.div_ceil(threads).max(1)
}

/// Refuses slots whose rows do not lie in a plane of `len` bytes.
fn check_slots(slots: impl Iterator<Item = u64>, row_bytes: usize, len: usize) -> Result<()> {
    let Some(last) = slots.max() else { return Ok(()) };
    let at = usize::try_from(last).unwrap_or(usize::MAX).saturating_mul(row_bytes);
    let end = at.saturating_add(row_bytes);
    if end > len {
        return Err(DeviceError::CopyOutOfBounds { at, end, len }.into());
    }
    Ok(())
}

/// How many rows ahead of the one at hand memory is asked for.
pub(crate) const AHEAD: usize = 4;

/// Asks for the bytes of a row that will be copied soon.
#[inline(always)]
pub(crate) fn prefetch_row(plane: &[u8], at: usize, row_bytes: usize) {
    for line in (0..row_bytes).step_by(64) {
        prefetch(plane, at.wrapping_add(line));
    }
}

/// Copies the rows at `slots` of `plane` to `to`, one after another.
fn gather(plane: &[u8], slots: &[u64], row_bytes: usize, to: &mut [u8]) {
    for (i, (&slot, to)) in slots.iter().zip(to.chunks_exact_mut(row_bytes)).enumerate() {
        if let Some(&ahead) = slots.get(i + AHEAD) {
            prefetch_row(plane, (ahead as usize).wrapping_mul(row_bytes), row_bytes);
        }
        let at = slot as usize * row_bytes;
        to.copy_from_slice(&plane[at..at + row_bytes]);
    }
}

/// Copies those rows of `from` whose slots lie in `piece`, a part of a plane from slot `first`.
fn scatter(from: &[u8], slots: &[u64], row_bytes: usize, first: u64, piece: &mut [u8]) {
    let place = |slot: u64| (slot.wrapping_sub(first) as usize).saturating_mul(row_bytes);
    for (i, (&slot, from)) in slots.iter().zip(from.chunks_exact(row_bytes)).enumerate() {
        if let Some(at) = slots.get(i + AHEAD).map(|&ahead| place(ahead))
            && at < piece.len()
        {
            prefetch_row(piece, at, row_bytes);
        }
        // `NO_SLOT` and the slots of other pieces wrap or lie beyond the end.
        let at = place(slot);
        if let Some(to) = at.checked_add(row_bytes).and_then(|end| piece.get_mut(at..end)) {
            to.copy_from_slice(from);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tessera_device::cuda::testing;

    fn cpu(threads: usize) -> Cpu {
        Cpu::new(std::num::NonZeroUsize::new(threads)).unwrap()
    }

    /// Rows scattered to slots in any order, some left out, and gathered back, on both sides of
    /// the size from which threads share the work.
    fn there_and_back<D: RowOps>(device: &D, row_bytes: usize, plane_rows: usize, keep: &[bool]) {
        let stream = device.stream().unwrap();
        let mut plane = device.alloc::<u8>(plane_rows * row_bytes).unwrap();
        // A bijection of the slots: an odd step modulo a power of two, others passed over.
        let slots: Vec<u64> = (0..plane_rows.next_power_of_two() as u64)
            .map(|i| i.wrapping_mul(0x9E37_79B1) % plane_rows.next_power_of_two() as u64)
            .filter(|&slot| slot < plane_rows as u64)
            .enumerate()
            .map(|(i, slot)| if keep[i % keep.len()] { slot } else { NO_SLOT })
            .collect();
        let rows: Vec<u8> =
            (0..slots.len() * row_bytes).map(|i| (i * 31 % 251) as u8 | 1).collect();
        device.scatter_rows(&stream, &rows, &slots, row_bytes, &mut plane).unwrap();
        let placed: Vec<u64> = slots.iter().copied().filter(|&slot| slot != NO_SLOT).collect();
        let mut back = vec![0; placed.len() * row_bytes];
        device.gather_rows(&stream, &plane, &placed, row_bytes, &mut back).unwrap();
        let wanted: Vec<u8> = slots
            .iter()
            .enumerate()
            .filter(|&(_, &slot)| slot != NO_SLOT)
            .flat_map(|(i, _)| &rows[i * row_bytes..(i + 1) * row_bytes])
            .copied()
            .collect();
        assert!(back == wanted);
        let mut all = vec![0; plane_rows * row_bytes];
        device.download(&stream, &plane, 0, &mut all).unwrap();
        let written = all.iter().filter(|&&byte| byte != 0).count();
        assert_eq!(written, placed.len() * row_bytes);
    }

    proptest! {
        #[test]
        fn rows_go_to_their_slots_and_come_back(
            threads in 1usize..4,
            row_bytes in 0usize..20,
            plane_rows in 1usize..40,
            keep in prop::collection::vec(any::<bool>(), 1..8),
        ) {
            there_and_back(&cpu(threads), row_bytes, plane_rows, &keep);
        }
    }

    #[test]
    fn many_rows_are_shared_between_threads() {
        for threads in [1, 2, 3] {
            there_and_back(&cpu(threads), 260, 9001, &[true, true, false]);
        }
    }

    #[test]
    fn cuda_moves_rows_of_any_width() {
        let Some(cuda) = testing::cuda() else { return };
        for row_bytes in 0..70 {
            there_and_back(&cuda, row_bytes, 37, &[true, false, true]);
        }
        there_and_back(&cuda, 64, 1, &[false]);
        // Several pieces, of a width that fits no vector and of one that does.
        for row_bytes in [7, 512] {
            there_and_back(&cuda, row_bytes, (9 << 20) / row_bytes, &[true, true, true, false]);
        }
        let stats = cuda.stats();
        assert!(stats.launches > 100 && stats.live_bytes == 0, "{stats:?}");
    }

    #[test]
    fn a_slot_outside_of_the_plane_is_an_error() {
        slots_are_checked(&cpu(1));
    }

    #[test]
    fn cuda_checks_slots() {
        if let Some(cuda) = testing::cuda() {
            slots_are_checked(&cuda);
        }
    }

    fn slots_are_checked<D: RowOps>(device: &D) {
        let stream = device.stream().unwrap();
        let mut plane = device.alloc::<u8>(40).unwrap();
        for slot in [10, u64::MAX - 1] {
            let error =
                device.gather_rows(&stream, &plane, &[0, slot], 4, &mut [0; 8]).unwrap_err();
            assert!(error.to_string().contains("of a buffer of 40"), "{error}");
            let error =
                device.scatter_rows(&stream, &[0; 8], &[slot, 0], 4, &mut plane).unwrap_err();
            assert!(error.to_string().contains("of a buffer of 40"), "{error}");
        }
        assert!(device.gather_rows(&stream, &plane, &[NO_SLOT], 4, &mut [0; 4]).is_err());
        device.scatter_rows(&stream, &[1; 4], &[NO_SLOT], 4, &mut plane).unwrap();
        let mut all = [9; 40];
        device.download(&stream, &plane, 0, &mut all).unwrap();
        assert_eq!(all, [0; 40]);
    }
}
