//! Work cut into pieces, spread over the device's threads. Every value is computed by one piece in
//! one order, whoever runs it and wherever pieces end, so results do not depend on threads.

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;
use tessera_device::Cpu;

/// Elements that one piece of an elementwise pass handles: 32 KiB of f32 stay in the first cache.
const PIECE: usize = 8192;

/// Below this many elementary operations the calling thread does everything itself: waking a
/// worker costs about as much.
const ALONE: usize = 4 * PIECE;

/// Least groups of rows that share memory to work in.
const GROUPS: usize = 4;

/// Runs `piece(0..count)`; `cost` is the number of elementary operations of all together.
pub fn pieces(cpu: &Cpu, count: usize, cost: usize, piece: impl Fn(usize) + Send + Sync) {
    if alone(cpu, count, cost) {
        (0..count).for_each(piece);
    } else {
        cpu.run(|| (0..count).into_par_iter().with_max_len(1).for_each(piece));
    }
}

fn alone(cpu: &Cpu, count: usize, cost: usize) -> bool {
    count <= 1 || cost < ALONE || cpu.threads() == 1
}

/// Rows of `cols` elements that one piece handles when each element costs `weight` operations.
fn rows_a_piece(cols: usize, weight: usize) -> usize {
    (PIECE / cols.saturating_mul(weight).max(1)).max(1)
}

/// Calls `row(r, columns)` for each of `rows` rows of `cols` elements, `stride` apart in `out`.
/// An element costs about `weight` elementary operations.
pub fn rows_mut(
    cpu: &Cpu,
    (rows, cols, weight): (usize, usize, usize),
    out: &mut [f32],
    stride: usize,
    row: impl Fn(usize, &mut [f32]) + Send + Sync,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    let each = rows_a_piece(cols, weight);
    let piece = |(i, chunk): (usize, &mut [f32])| {
        for (r, columns) in chunk.chunks_mut(stride).enumerate() {
            row(i * each + r, &mut columns[..cols]);
        }
    };
    if alone(cpu, rows.div_ceil(each), rows * cols * weight) {
        out.chunks_mut(stride * each).enumerate().for_each(piece);
    } else {
        cpu.run(|| out.par_chunks_mut(stride * each).with_max_len(1).enumerate().for_each(piece));
    }
}

/// As [`rows_mut`], calling `group(work, first row, rows)` for groups of `height` rows (the last
/// may have fewer), with memory to work in that `work` makes for each piece.
pub fn row_groups<W>(
    cpu: &Cpu,
    (rows, cols, weight): (usize, usize, usize),
    height: usize,
    (out, stride): (&mut [f32], usize),
    work: impl Fn() -> W + Send + Sync,
    group: impl Fn(&mut W, usize, &mut [f32]) + Send + Sync,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    let each = rows_a_piece(cols, weight).max(GROUPS * height).next_multiple_of(height);
    let piece = |(i, chunk): (usize, &mut [f32])| {
        let mut work = work();
        for (g, rows) in chunk.chunks_mut(stride * height).enumerate() {
            group(&mut work, i * each + g * height, rows);
        }
    };
    if alone(cpu, rows.div_ceil(each), rows * cols * weight) {
        out.chunks_mut(stride * each).enumerate().for_each(piece);
    } else {
        cpu.run(|| out.par_chunks_mut(stride * each).with_max_len(1).enumerate().for_each(piece));
    }
}

/// As [`rows_mut`] for two outputs with rows of the same width.
pub fn rows_mut2(
    cpu: &Cpu,
    (rows, cols): (usize, usize),
    (a, a_stride): (&mut [f32], usize),
    (b, b_stride): (&mut [f32], usize),
    row: impl Fn(usize, &mut [f32], &mut [f32]) + Send + Sync,
) {
    if rows == 0 || cols == 0 {
        return;
    }
    let each = rows_a_piece(cols, 1);
    let piece = |(i, (a, b)): (usize, (&mut [f32], &mut [f32]))| {
        for (r, (a, b)) in a.chunks_mut(a_stride).zip(b.chunks_mut(b_stride)).enumerate() {
            row(i * each + r, &mut a[..cols], &mut b[..cols]);
        }
    };
    if alone(cpu, rows.div_ceil(each), rows * cols) {
        a.chunks_mut(a_stride * each)
            .zip(b.chunks_mut(b_stride * each))
            .enumerate()
            .for_each(piece);
    } else {
        cpu.run(|| {
            let a = a.par_chunks_mut(a_stride * each).with_max_len(1);
            a.zip(b.par_chunks_mut(b_stride * each)).enumerate().for_each(piece);
        });
    }
}

/// A strided matrix that pieces of work write in disjoint rectangles.
pub struct Tiles<'a> {
    start: *mut f32,
    len: usize,
    stride: usize,
    owner: PhantomData<&'a mut [f32]>,
}

// SAFETY: access goes through `row` and `pointer`, whose callers keep rectangles disjoint.
unsafe impl Send for Tiles<'_> {}
// SAFETY: as above.
unsafe impl Sync for Tiles<'_> {}

impl<'a> Tiles<'a> {
    /// A matrix with rows `stride` apart.
    pub fn new(out: &'a mut [f32], stride: usize) -> Self {
        Self { start: out.as_mut_ptr(), len: out.len(), stride, owner: PhantomData }
    }

    /// Columns `cols` of row `r`.
    ///
    /// # Safety
    /// While the result lives, nobody else touches these elements.
    #[allow(clippy::mut_from_ref)] // Disjointness is the caller's duty.
    pub unsafe fn row(&self, r: usize, cols: Range<usize>) -> &mut [f32] {
        let at = r * self.stride + cols.start;
        assert!(cols.start <= cols.end && at + cols.len() <= self.len);
        // SAFETY: in bounds by the assertion, exclusive by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), cols.len()) }
    }

    /// Pointer to element (r, c) of a rectangle of `rows` x `cols` that lies within the matrix.
    pub fn pointer(&self, r: usize, c: usize, rows: usize, cols: usize) -> *mut f32 {
        let at = r * self.stride + c;
        assert!(rows > 0 && at + (rows - 1) * self.stride + cols <= self.len);
        // SAFETY: in bounds by the assertion.
        unsafe { self.start.add(at) }
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }
}
