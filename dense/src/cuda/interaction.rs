//! The dot interaction; the kernels are in `dense_dot.cu`.

use tessera_device::cuda::{Kernel, Launch};
use tessera_device::{Cuda, Result};

use super::kernels::{DOT, ViewArguments, blocks};
use crate::ops::{DotShape, Pass, Rows, RowsMut};

/// Threads of a block, which has a sample at a time.
const THREADS: u32 = 128;

/// The most blocks; each takes more samples then.
const BLOCKS_MAX: usize = 1 << 16;

/// Bytes of shared memory a block from which on vectors are taken in parts: with more, a
/// multiprocessor has fewer than 1024 threads.
const SHARED_BYTES: usize = 28 << 10;

/// See [`crate::DenseOps::dot`].
pub fn dot(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    shape: DotShape,
    x: Rows<'_, Cuda>,
    mut y: RowsMut<'_, Cuda>,
) -> Result<()> {
    let Some(Prepared { kernel, launch, depth }) = prepare(cuda, "dense_dot", shape, batch)? else {
        return Ok(());
    };
    let call = kernel.on(stream).rows(x).value(shape.vectors as u32).value(shape.dim as u64);
    let call = call.value(shape.copied as u64).value(depth).rows_mut(&mut y);
    // SAFETY: the kernel's arguments; the caller of the trait guarantees that rows of this shape
    // lie in their buffers, and the shared memory is that of `depth` columns.
    unsafe { call.value(batch as u64).launch(launch) }
}

/// See [`crate::DenseOps::dot_grad`].
pub fn dot_grad(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    shape: DotShape,
    x: Rows<'_, Cuda>,
    dy: Rows<'_, Cuda>,
    mut dx: RowsMut<'_, Cuda>,
) -> Result<()> {
    let Some(Prepared { kernel, launch, depth }) = prepare(cuda, "dense_dot_grad", shape, batch)?
    else {
        return Ok(());
    };
    let call = kernel.on(stream).rows(x).rows(dy).value(shape.vectors as u32);
    let call = call.value(shape.dim as u64).value(shape.copied as u64).value(depth);
    // SAFETY: as in `dot`.
    unsafe { call.rows_mut(&mut dx).value(batch as u64).launch(launch) }
}

/// What a launch needs.
struct Prepared {
    kernel: Kernel,
    launch: Launch,
    /// Columns of all vectors that are in shared memory at once.
    depth: u32,
}

/// None where there is nothing to do.
fn prepare(cuda: &Cuda, function: &str, shape: DotShape, batch: usize) -> Result<Option<Prepared>> {
    if batch == 0 || shape.dim == 0 {
        return Ok(None);
    }
    let depth = depth(shape.vectors, shape.dim);
    let launch = Launch {
        grid: [blocks(batch.min(BLOCKS_MAX)), 1, 1],
        block: [THREADS, 1, 1],
        // More than a device has is refused by the launch.
        shared_bytes: u32::try_from(shared_bytes(shape.vectors, depth)).unwrap_or(u32::MAX),
    };
    Ok(Some(Prepared { kernel: cuda.kernel(&DOT, function)?, launch, depth: depth as u32 }))
}

/// Rows are an odd number of words apart.
fn shared_bytes(vectors: usize, depth: usize) -> usize {
    vectors * (depth | 1) * size_of::<f32>()
}

/// As many columns as [`SHARED_BYTES`] hold, all of them if they fit; at least one.
fn depth(vectors: usize, dim: usize) -> usize {
    if shared_bytes(vectors, dim) <= SHARED_BYTES {
        return dim;
    }
    let words = SHARED_BYTES / (vectors * size_of::<f32>());
    // The largest odd number of words, so that no column is lost to the distance of rows.
    if words.is_multiple_of(2) { words.saturating_sub(1).max(1) } else { words }.min(dim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_taken_whole_where_they_fit_and_in_parts_where_not() {
        assert_eq!(depth(27, 128), 128);
        for vectors in [2, 27, 100, 3_000, 30_000] {
            for dim in [1, 2, 16, 127, 128, 1024, 100_000] {
                let depth = depth(vectors, dim);
                assert!((1..=dim).contains(&depth), "{vectors} x {dim}: {depth}");
                let bytes = shared_bytes(vectors, depth);
                assert!(bytes <= SHARED_BYTES || depth == 1, "{vectors} x {dim}: {bytes} bytes");
            }
        }
        // As many vectors as a model may have still fit the 163 KiB of an A100.
        assert!(shared_bytes(32_768, depth(32_768, 64)) <= 163 << 10);
    }
}
