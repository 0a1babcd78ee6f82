//! Moving rows on a GPU: kernels that reach page-locked host memory over the link, a piece of it at
//! a time.
//!
//! ```text
//! piece = slots of some rows | padding to 16 bytes | the rows
//! gather:  slots into the piece; kernel; meanwhile take out the piece before; await; take out
//! scatter: slots and rows into the piece; kernel; the next piece needs no wait
//! ```
//! A piece is page-locked memory of the device's pool, which waits for the kernel before somebody
//! else gets it.

use tessera_device::Cuda;
use tessera_device::cuda::{Kernel, KernelSource, Launch, PinnedBytes};

use super::{NO_SLOT, RowOps, check_slots};
use crate::Result;

const ROWS: KernelSource =
    KernelSource { name: "rows", text: include_str!("../../kernels/rows.cu"), headers: &[] };

/// The most bytes of a piece, unless a single row is larger.
const PIECE_BYTES: usize = 4 << 20;

/// Threads of a block, and the most blocks a multiprocessor: each thread moves several units of a
/// large piece.
const THREADS: u32 = 256;
const BLOCKS_A_MULTIPROCESSOR_MAX: u64 = 16;

impl RowOps for Cuda {
    fn gather_rows(
        &self,
        stream: &Self::Stream,
        plane: &Self::Buffer<u8>,
        slots: &[u64],
        row_bytes: usize,
        to: &mut [u8],
    ) -> Result<()> {
        check_slots(slots.iter().copied(), row_bytes, plane.len())?;
        if row_bytes == 0 || slots.is_empty() {
            return Ok(());
        }
        let moving = Moving::new(self, "gather_rows", row_bytes)?;
        let rows = moving.rows_a_piece();
        let mut before: Option<(&mut [u8], PinnedBytes, usize)> = None;
        for (slots, to) in slots.chunks(rows).zip(to.chunks_mut(rows * row_bytes)) {
            let (mut piece, at) = moving.piece(slots)?;
            // The address is in the call's account of what the stream uses.
            let list = piece.address(stream)?;
            let call = moving.kernel.on(stream).read(plane).value(list);
            let call = call.write_pinned(&mut piece, at);
            // SAFETY: the kernel reads a slot a row from the piece's begin, which `piece` wrote,
            // and writes the piece's rows; all slots were checked against the plane.
            unsafe { moving.launch(call, slots.len())? };
            piece.mark(stream)?;
            if let Some(copy) = before.replace((to, piece, at)) {
                take_out(copy)?;
            }
        }
        before.map_or(Ok(()), take_out)
    }

    fn scatter_rows(
        &self,
        stream: &Self::Stream,
        from: &[u8],
        slots: &[u64],
        row_bytes: usize,
        plane: &mut Self::Buffer<u8>,
    ) -> Result<()> {
        let placed = slots.iter().copied().filter(|&slot| slot != NO_SLOT);
        check_slots(placed.clone(), row_bytes, plane.len())?;
        if row_bytes == 0 || placed.count() == 0 {
            return Ok(());
        }
        let moving = Moving::new(self, "scatter_rows", row_bytes)?;
        let rows = moving.rows_a_piece();
        for (slots, from) in slots.chunks(rows).zip(from.chunks(rows * row_bytes)) {
            let (mut piece, at) = moving.piece(slots)?;
            piece.host()?[at..at + from.len()].copy_from_slice(from);
            let list = piece.address(stream)?;
            let call = moving.kernel.on(stream).write(plane).value(list).read_pinned(&piece, at);
            // SAFETY: the kernel reads a slot a row and a row a slot from the piece, which holds
            // both; slots were checked against the plane, or are left out by the kernel as well.
            unsafe { moving.launch(call, slots.len())? };
        }
        Ok(())
    }
}

/// Copies a piece's rows to the host, once they are there.
fn take_out((to, mut piece, at): (&mut [u8], PinnedBytes, usize)) -> Result<()> {
    let bytes = piece.host()?;
    to.copy_from_slice(&bytes[at..at + to.len()]);
    Ok(())
}

/// One list of rows on its way.
struct Moving<'a> {
    device: &'a Cuda,
    kernel: Kernel,
    row_bytes: usize,
    unit_bytes: usize,
}

impl<'a> Moving<'a> {
    fn new(device: &'a Cuda, kernel: &str, row_bytes: usize) -> Result<Self> {
        // Planes begin at 256 bytes, rows of a piece at 16: a row's bytes decide.
        let unit_bytes = 1 << row_bytes.trailing_zeros().min(4);
        let kernel = device.kernel(&ROWS, &format!("{kernel}_{unit_bytes}"))?;
        Ok(Self { device, kernel, row_bytes, unit_bytes })
    }

    fn rows_a_piece(&self) -> usize {
        (PIECE_BYTES / (self.row_bytes + size_of::<u64>())).max(1)
    }

    /// A piece with slots in it, and where its rows begin.
    fn piece(&self, slots: &[u64]) -> Result<(PinnedBytes, usize)> {
        let list: &[u8] = bytemuck::cast_slice(slots);
        let at = list.len().next_multiple_of(16);
        let mut piece = self.device.pinned(at + slots.len() * self.row_bytes)?;
        piece.host()?[..list.len()].copy_from_slice(list);
        Ok((piece, at))
    }

    /// # Safety
    /// The call has plane, slots and rows; these are all within bounds.
    unsafe fn launch(&self, call: tessera_device::cuda::Call<'_>, rows: usize) -> Result<()> {
        let row_units = (self.row_bytes / self.unit_bytes) as u64;
        let units = rows as u64 * row_units;
        let most = u64::from(self.device.multiprocessors()) * BLOCKS_A_MULTIPROCESSOR_MAX;
        let blocks = units.div_ceil(u64::from(THREADS)).min(most.max(1)) as u32;
        // SAFETY: by this function's contract; the kernel touches `units` units of the lists.
        unsafe { call.value(row_units).value(units).launch(Launch::blocks(blocks, THREADS))? };
        Ok(())
    }
}
