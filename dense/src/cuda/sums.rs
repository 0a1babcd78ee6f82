//! Losses and squared norms: what gives the host numbers. The kernels are in `dense_loss.cu` and
//! `dense_sums.cu`.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};
use tessera_device::cuda::{CudaBuffer, CudaStream, Launch};
use tessera_device::{Cuda, Device, Result};

use super::kernels::{LOSS, SUMS, blocks};
use crate::ops::{LOSS_BLOCK, LossInput, Pass, SUM_BLOCK};
use crate::spec::Loss;

/// The most ranges of a launch: they are its arguments, of which a kernel has at most 4 KiB.
const RANGES_MAX: usize = 64;

/// As `dense_sums.cu` has it.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct SumRanges {
    begin: [u64; RANGES_MAX],
    end: [u64; RANGES_MAX],
    /// Among the blocks of all ranges.
    first_block: [u64; RANGES_MAX + 1],
    count: u64,
}

impl SumRanges {
    /// Ranges whose blocks follow one another, at least one each.
    fn new(ranges: &[Range<usize>], block: usize) -> Self {
        let mut all = Self { count: ranges.len() as u64, ..Self::zeroed() };
        for (i, range) in ranges.iter().enumerate() {
            (all.begin[i], all.end[i]) = (range.start as u64, range.end as u64);
            let blocks = range.len().div_ceil(block).max(1) as u64;
            all.first_block[i + 1] = all.first_block[i] + blocks;
        }
        all
    }

    fn blocks(&self) -> usize {
        self.first_block[self.count as usize] as usize
    }
}

/// See [`crate::DenseOps::loss`].
pub fn loss(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    input: LossInput<'_, Cuda>,
    dlogits: &mut CudaBuffer<f32>,
    scratch: &mut CudaBuffer<f64>,
) -> Result<f64> {
    if batch == 0 {
        return Ok(0.0);
    }
    let kernel = cuda.kernel(&LOSS, "dense_losses")?;
    let (first, rows) = (input.first, input.global_batch as f64);
    let loss: u32 = match input.loss {
        Loss::Bce => 0,
        Loss::Mse => 1,
    };
    let call = kernel.on(stream).value(loss).read_from(input.logits, first);
    let call = call.read_from(input.labels, first).read_from(input.sample_weights, first);
    let call = call.value(rows).write_from(dlogits, first).write(scratch).value(batch as u64);
    let launch = Launch::blocks(blocks(batch.div_ceil(LOSS_BLOCK)), LOSS_BLOCK as u32);
    // SAFETY: the kernel's arguments; the caller of the trait guarantees buffers of first + batch
    // elements and one element of scratch a block.
    unsafe { call.launch(launch) }?;
    let samples = SumRanges::new(std::slice::from_ref(&(0..batch)), LOSS_BLOCK);
    let mut sum = [0.0];
    add_in_order(cuda, stream, samples, scratch, &mut sum)?;
    Ok(sum[0] / rows)
}

/// See [`crate::DenseOps::sums_of_squares`].
pub fn squares(
    cuda: &Cuda,
    stream: &CudaStream,
    ranges: &[Range<usize>],
    buffer: &CudaBuffer<f32>,
    scratch: &mut CudaBuffer<f64>,
    sums: &mut [f64],
) -> Result<()> {
    /// Threads of a block of threads, and of a block of elements.
    const THREADS: u32 = 128;
    const LANES: u64 = 8;
    let kernel = cuda.kernel(&SUMS, "dense_squares")?;
    for (ranges, sums) in ranges.chunks(RANGES_MAX).zip(sums.chunks_mut(RANGES_MAX)) {
        let all = SumRanges::new(ranges, SUM_BLOCK);
        let call = kernel.on(stream).value(all).read(buffer).write(scratch);
        // SAFETY: the kernel's arguments; the caller of the trait guarantees that ranges lie in the
        // buffer, and one element of scratch a block.
        unsafe { call.launch(Launch::for_items(all.blocks() as u64 * LANES, THREADS)) }?;
        add_in_order(cuda, stream, all, scratch, sums)?;
    }
    Ok(())
}

/// Sums of each range's blocks in `scratch`, on the host.
fn add_in_order(
    cuda: &Cuda,
    stream: &CudaStream,
    ranges: SumRanges,
    scratch: &mut CudaBuffer<f64>,
    sums: &mut [f64],
) -> Result<()> {
    let kernel = cuda.kernel(&SUMS, "dense_add_in_order")?;
    let call = kernel.on(stream).value(ranges).write(scratch);
    // SAFETY: the kernel's arguments; the scratch has all ranges' blocks, of which each range has
    // at least one.
    unsafe { call.launch(Launch::blocks(1, RANGES_MAX as u32)) }?;
    cuda.download(stream, scratch, 0, sums)
}
