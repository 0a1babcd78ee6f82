//! Matrix products by register blocks.
//!
//! ```text
//! right factor -> panels of as many columns as a register block, for each block of depth
//! for each tile of rows (side by side):
//!     for each block of depth: copy the tile's share of the left factor (stays in the second cache)
//!         for each panel (stays in the first cache):  for each group of rows:  register block
//!     epilogue over the tile's rows
//! ```
//!
//! An element is one chain of multiplications and additions over a block of depth, blocks are
//! added in order, and where blocks end depends on the depth alone: the bits of an element depend
//! on its row, its column and the depth, not on tiles or threads, nor on instructions as long as
//! they fuse multiply and add. So tiles are cut as the threads at hand need them.
//!
//! A product with a single row or column would waste most of a register block and goes to the
//! kernels of `vector`, as long as its factors lie as these want them.
//!
//! Why not a library's: with faer's kernel in the same tiles a step takes 7 percent longer. It
//! copies both factors for every tile and wants the gradient of the weights transposed first; here
//! the right factor is copied once, and the bias' gradient falls out of the copy of the left one.

use std::mem::MaybeUninit;
use std::ops::Range;

use tessera_device::{Cpu, Simd};

use super::kernel::{Block, COLS_MAX, Kernel, ROWS_MAX};
use super::pack::{self, GAP};
use super::parallel::{Tiles, in_order, pieces, together};
use super::vector;

/// A matrix in memory.
#[derive(Clone, Copy)]
pub struct Factor<'a> {
    pub values: &'a [f32],
    pub stride: usize,
    /// Element (r, c) is at `c * stride + r`, not `r * stride + c`.
    pub turned: bool,
}

impl Factor<'_> {
    /// Whether there are `rows` rows of `cols` elements, at least one of each.
    fn holds(&self, rows: usize, cols: usize) -> bool {
        let (outer, inner) = if self.turned { (cols, rows) } else { (rows, cols) };
        (outer == 1 || inner <= self.stride)
            && (outer - 1) * self.stride + inner <= self.values.len()
    }
}

/// A product to compute: (m, n) from a (m, k) and b (k, n).
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Factor<'a>,
    pub b: Factor<'a>,
}

/// What happens to what the output holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// It is never read.
    Replace,
    /// The product is added to it.
    Add,
}

/// Most terms of a sum that are added up before they join the total.
const DEPTH: usize = 512;
/// Most and fewest rows of a tile (the last may have fewer).
const ROWS: (usize, usize) = (pack::HEIGHT, 24);
/// Tiles of rows start at multiples of this: of every kernel's rows.
const GRAIN: usize = 12;
/// Fewest columns of a tile, a multiple of every kernel's columns.
const COLS: usize = 64;
/// A tile's share of the left factor over a block of depth: 200 KiB.
const SHARE: usize = ROWS.0 * (DEPTH + GAP);
/// Columns of the right factor that are copied side by side, a multiple of every kernel's columns.
const PACKED: usize = 128;

/// Elements of scratch that a product needs at most.
pub fn scratch_len(n: usize, k: usize) -> usize {
    n.next_multiple_of(COLS_MAX).saturating_mul(k)
}

/// Computes `product` into `out`, rows `stride` apart, and calls `epilogue(r, first column,
/// columns)` once on every row of every tile when it is done. `scratch` holds at least
/// [`scratch_len`] elements. With `sums` (m) the sums of a's rows, a being turned, are written
/// there.
pub fn gemm(
    cpu: &Cpu,
    product: Product<'_>,
    store: Store,
    (out, stride): (&mut [f32], usize),
    sums: Option<&mut [f32]>,
    scratch: &mut [f32],
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    let Product { m, n, k, a, mut b } = product;
    if m == 0 || n == 0 {
        return;
    }
    // A column without gaps is a row.
    b.turned |= n == 1 && b.stride == 1;
    let out = Tiles::new(out, stride);
    if k == 0 {
        if let Some(sums) = sums {
            sums.fill(0.0);
        }
        for r in 0..m {
            // SAFETY: one thread, one row at a time.
            let row = unsafe { out.row(r, 0..n) };
            if store == Store::Replace {
                row.fill(0.0);
            }
            epilogue(r, 0, row);
        }
    } else if m == 1 && !a.turned && !b.turned {
        single_row(cpu, product, store, &out, epilogue);
    } else if (m == 1 || n == 1) && !a.turned && b.turned {
        dots(cpu, Product { b, ..product }, store, &out, epilogue);
    } else {
        tiles(cpu, product, store, &out, sums, scratch, epilogue);
    }
}

/// One row of coefficients: weighted sums of b's rows, pieces of columns side by side.
fn single_row(
    cpu: &Cpu,
    Product { n, k, a, b, .. }: Product<'_>,
    store: Store,
    out: &Tiles<'_>,
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    pieces(cpu, n.div_ceil(vector::COLUMNS), n * k, |piece| {
        let first = piece * vector::COLUMNS;
        let end = n.min(first + vector::COLUMNS);
        let mut sums = [0.0f32; vector::COLUMNS];
        let sums = &mut sums[..end - first];
        vector::weighted_columns(cpu.simd(), &b.values[first..], b.stride, &a.values[..k], sums);
        // SAFETY: pieces have disjoint columns.
        let row = unsafe { out.row(0, first..end) };
        put(store, row, sums);
        epilogue(0, first, row);
    });
}

/// One row or one column of results: each a dot product along k.
fn dots(
    cpu: &Cpu,
    Product { m, n, k, a, b }: Product<'_>,
    store: Store,
    out: &Tiles<'_>,
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    let each = 64;
    pieces(cpu, (m * n).div_ceil(each), m * n * k, |piece| {
        for i in piece * each..(m * n).min((piece + 1) * each) {
            let (r, c) = if n == 1 { (i, 0) } else { (0, i) };
            let a = &a.values[r * a.stride..][..k];
            let value = vector::dot(cpu.simd(), a, &b.values[c * b.stride..][..k]);
            // SAFETY: each i is another element.
            let cell = unsafe { out.row(r, c..c + 1) };
            put(store, cell, &[value]);
            epilogue(r, c, cell);
        }
    });
}

fn put(store: Store, out: &mut [f32], values: &[f32]) {
    match store {
        Store::Replace => out.copy_from_slice(values),
        Store::Add => out.iter_mut().zip(values).for_each(|(out, value)| *out += value),
    }
}

fn tiles(
    cpu: &Cpu,
    product: Product<'_>,
    store: Store,
    out: &Tiles<'_>,
    sums: Option<&mut [f32]>,
    scratch: &mut [f32],
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    let Product { m, n, k, a, b } = product;
    // Tiles rely on it.
    assert!(a.holds(m, k) && b.holds(k, n) && (m == 1 || n <= out.stride()));
    let kernel = Kernel::of(cpu.simd());
    let panels = &mut scratch[..n.next_multiple_of(kernel.cols) * k];
    let sums = sums.map(|sums| Tiles::new(sums, 1));
    let rows = row_parts(m, cpu.threads());
    let across = (2 * cpu.threads()).div_ceil(rows.len()).min(n / COLS).max(1);
    let tile = |panels: &[f32], i: usize| {
        let cols = part(n, across, COLS, i % across);
        if cols.is_empty() {
            return;
        }
        let tile = Tile { rows: rows[i / across].clone(), cols };
        // SAFETY: tiles are disjoint, and so are the rows of those that have the first column.
        let sums = sums.as_ref().filter(|_| tile.cols.start == 0).map(|sums| unsafe {
            let at = sums.pointer(tile.rows.start, 0, tile.rows.len(), 1);
            std::slice::from_raw_parts_mut(at, tile.rows.len())
        });
        tile.compute(cpu.simd(), product, kernel, store, panels, out, sums);
        for r in tile.rows {
            // SAFETY: this tile's own rectangle, which is complete.
            epilogue(r, tile.cols.start, unsafe { out.row(r, tile.cols.clone()) });
        }
    };
    together(cpu, m * n * k, || {
        pack_panels(cpu, product, kernel, panels);
        in_order(cpu, rows.len() * across, m * n * k, |i| tile(panels, i));
    });
}

/// Blocks of depth: of nearly one length, a function of `k` alone.
fn depths(k: usize) -> impl Iterator<Item = Range<usize>> {
    let count = k.div_ceil(DEPTH);
    (0..count).map(move |i| i * k / count..(i + 1) * k / count)
}

/// Copies the right factor to `panels`: for each block of depth its panels, one after the other.
fn pack_panels(
    cpu: &Cpu,
    Product { n, k, b, .. }: Product<'_>,
    kernel: Kernel,
    panels: &mut [f32],
) {
    let (simd, cols) = (cpu.simd(), kernel.cols);
    let wide = n.next_multiple_of(cols);
    let pieces_across = wide.div_ceil(PACKED);
    let to = Tiles::new(panels, wide);
    let blocks: Vec<_> = depths(k).collect();
    pieces(cpu, blocks.len() * pieces_across, n * k, |i| {
        let depth = blocks[i / pieces_across].clone();
        let first = i % pieces_across * PACKED;
        let width = PACKED.min(n - first);
        let len = depth.len() * width.next_multiple_of(cols);
        // SAFETY: a block of depth begins at row `depth.start`; the panels before this piece fill
        // `depth.len() * first` elements of it, and pieces have disjoint panels.
        let to = unsafe {
            let start = to.pointer(depth.start, 0, depth.len(), wide);
            std::slice::from_raw_parts_mut(start.add(depth.len() * first), len)
        };
        if b.turned {
            let from = &b.values[first * b.stride + depth.start..];
            pack::turned_panels(simd, from, b.stride, width, depth.len(), cols, to);
        } else {
            let from = &b.values[depth.start * b.stride + first..];
            pack::panels(simd, from, b.stride, width, depth.len(), cols, to);
        }
    });
}

/// A rectangle of the result.
struct Tile {
    rows: Range<usize>,
    cols: Range<usize>,
}

impl Tile {
    #[allow(clippy::too_many_arguments)]
    fn compute(
        &self,
        simd: Simd,
        Product { n, k, a, .. }: Product<'_>,
        kernel: Kernel,
        store: Store,
        panels: &[f32],
        out: &Tiles<'_>,
        mut sums: Option<&mut [f32]>,
    ) {
        let Self { rows, cols } = self;
        let c = out.pointer(rows.start, cols.start, rows.len(), cols.len());
        let wide = n.next_multiple_of(kernel.cols);
        let groups = rows.len().div_ceil(kernel.rows);
        let mut share = [const { MaybeUninit::<f32>::uninit() }; SHARE];
        if let Some(sums) = &mut sums {
            sums.fill(0.0);
        }
        for depth in depths(k) {
            let len = depth.len();
            let (group, a_row, a_step) = if a.turned {
                let from = &a.values[depth.start * a.stride + rows.start..];
                let (height, sums) = (rows.len(), sums.as_deref_mut());
                pack::groups(simd, from, a.stride, height, len, kernel.rows, &mut share, sums);
                (kernel.rows * len + GAP, 1, kernel.rows)
            } else {
                let from = &a.values[rows.start * a.stride + depth.start..];
                pack::rows(from, a.stride, rows.len(), len, kernel.rows, &mut share);
                (kernel.rows * (len + GAP), len + GAP, 1)
            };
            let add = store == Store::Add || depth.start > 0;
            let panels = &panels[depth.start * wide..depth.end * wide];
            let panels = panels.chunks_exact(kernel.cols * len).skip(cols.start / kernel.cols);
            for (first, b) in (0..cols.len()).step_by(kernel.cols).zip(panels) {
                let width = kernel.cols.min(cols.len() - first);
                for g in 0..groups {
                    let height = kernel.rows.min(rows.len() - g * kernel.rows);
                    let a = share[g * group..].as_ptr().cast();
                    let at = g * kernel.rows * out.stride() + first;
                    let c = c.wrapping_add(at);
                    let c_row = out.stride();
                    let block = Block { k: len, a, a_row, a_step, b: b.as_ptr(), c, c_row, add };
                    // SAFETY: the share holds `groups` whole groups and the panel `len` rows; the
                    // output's rectangle is this tile's own, and `pointer` checked it.
                    unsafe {
                        if height == kernel.rows && width == kernel.cols {
                            kernel.run(block);
                        } else {
                            part_of_block(kernel, block, height, width);
                        }
                    }
                }
            }
        }
    }
}

/// Computes the first `rows` rows and `width` columns of a block.
///
/// # Safety
/// As [`Kernel::run`], but only these rows and columns of the result exist.
unsafe fn part_of_block(kernel: Kernel, block: Block, rows: usize, width: usize) {
    let mut whole = [0.0f32; ROWS_MAX * COLS_MAX];
    let to = Block { c: whole.as_mut_ptr(), c_row: COLS_MAX, add: false, ..block };
    // SAFETY: the factors by the caller's promise, the result is `whole`.
    unsafe { kernel.run(to) };
    for (r, sums) in whole.chunks(COLS_MAX).take(rows).enumerate() {
        // SAFETY: `width` elements of row r of the result, by the caller's promise.
        let c = unsafe { std::slice::from_raw_parts_mut(block.c.add(r * block.c_row), width) };
        put(if block.add { Store::Add } else { Store::Replace }, c, &sums[..width]);
    }
}

/// Cuts `m` rows: large tiles first, smaller ones towards the end, so that all threads end
/// together.
fn row_parts(m: usize, threads: usize) -> Vec<Range<usize>> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < m {
        let wanted = ((m - at) / (2 * threads)).next_multiple_of(GRAIN);
        let end = m.min(at + wanted.clamp(ROWS.1, ROWS.0));
        parts.push(at..end);
        at = end;
    }
    parts
}

/// The `i`-th of `parts` parts of `0..len`, starting at a multiple of `grain`; may be empty.
fn part(len: usize, parts: usize, grain: usize, i: usize) -> Range<usize> {
    let at = |i: usize| len.min((i * len / parts).next_multiple_of(grain));
    at(i)..if i + 1 == parts { len } else { at(i + 1) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::num::NonZeroUsize;

    fn cpu(threads: usize) -> Cpu {
        Cpu::new(NonZeroUsize::new(threads)).unwrap()
    }

    fn value(i: usize) -> f32 {
        (i as f32 * 0.37).sin()
    }

    /// A matrix with gaps of NaN between its rows.
    fn matrix(rows: usize, cols: usize, seed: usize) -> (Vec<f32>, usize) {
        let stride = cols + 2;
        let cell = |i: usize| if i % stride < cols { value(i + seed) } else { f32::NAN };
        ((0..rows * stride).map(cell).collect(), stride)
    }

    #[test]
    fn parts_cover_everything_once() {
        for len in [1, 2, 24, 25, 97, 367, 2048] {
            for parts in [1, 2, 3, 8, 16] {
                let all: Vec<_> = (0..parts).flat_map(|i| part(len, parts, COLS, i)).collect();
                assert!(all.into_iter().eq(0..len));
            }
            for threads in [1, 2, 5, 64] {
                let parts = row_parts(len, threads);
                assert!(parts.iter().all(|part| !part.is_empty() && part.len() <= ROWS.0));
                assert!(parts.iter().all(|part| part.start % GRAIN == 0));
                assert!(parts.into_iter().flatten().eq(0..len));
            }
            let depths: Vec<_> = depths(len).collect();
            assert!(depths.iter().all(|depth| depth.len() <= DEPTH));
            assert!(depths.into_iter().flatten().eq(0..len));
        }
    }

    #[test]
    fn tiles_fit_every_kernel() {
        for simd in Simd::available() {
            let Kernel { rows, cols, .. } = Kernel::of(simd);
            assert!(GRAIN.is_multiple_of(rows) && ROWS.0.is_multiple_of(GRAIN));
            assert!(COLS.is_multiple_of(cols) && PACKED.is_multiple_of(cols));
            assert!(rows <= ROWS_MAX && COLS_MAX.is_multiple_of(cols));
        }
    }

    /// Every shape and layout against a plain loop, into a strided output with guards around it,
    /// with NaN wherever nothing may be read.
    #[test]
    fn products_match_plain_loops_and_write_nothing_else() {
        let dims = [1, 2, 3, 5, 8, 17, 33];
        let shapes: Vec<_> = dims
            .into_iter()
            .flat_map(|m| dims.into_iter().flat_map(move |n| dims.map(|k| (m, n, k))))
            .chain([(300, 400, 20), (257, 100, 1030), (1, 700, 300), (700, 1, 300), (4, 6, 0)])
            .collect();
        for simd in Simd::available() {
            let cpu = cpu(2).with_simd(simd);
            for &(m, n, k) in &shapes {
                for form in 0..8 {
                    let turned = (form & 1 > 0, form & 2 > 0);
                    let store = if form & 4 > 0 { Store::Add } else { Store::Replace };
                    check(&cpu, (m, n, k), turned, store);
                }
            }
        }
    }

    fn check(
        cpu: &Cpu,
        (m, n, k): (usize, usize, usize),
        (a_turned, b_turned): (bool, bool),
        store: Store,
    ) {
        let (a, a_stride) = if a_turned { matrix(k, m, 0) } else { matrix(m, k, 0) };
        let (b, b_stride) = if b_turned { matrix(n, k, 7) } else { matrix(k, n, 7) };
        let a = Factor { values: &a, stride: a_stride, turned: a_turned };
        let b = Factor { values: &b, stride: b_stride, turned: b_turned };
        let at = |f: Factor<'_>, r: usize, c: usize| {
            let (r, c) = if f.turned { (c, r) } else { (r, c) };
            f64::from(f.values[r * f.stride + c])
        };
        let stride = n + 3;
        let start = if store == Store::Add { 0.5 } else { f32::NAN };
        let mut out = vec![start; m * stride];
        let mut sums = vec![f32::NAN; m];
        let mut scratch = vec![f32::NAN; scratch_len(n, k)];
        gemm(
            cpu,
            Product { m, n, k, a, b },
            store,
            (&mut out, stride),
            a_turned.then_some(&mut sums[..]),
            &mut scratch,
            |r, first, columns| {
                for (c, x) in columns.iter_mut().enumerate() {
                    *x += (r * 1000 + first + c) as f32;
                }
            },
        );
        let before = if store == Store::Add { 0.5 } else { 0.0 };
        for r in 0..m {
            for c in 0..n {
                let sum: f64 = (0..k).map(|p| at(a, r, p) * at(b, p, c)).sum();
                let want = sum + before + (r * 1000 + c) as f64;
                let got = f64::from(out[r * stride + c]);
                let tolerance = 1e-5 + 1e-6 * k as f64 + 3e-7 * want.abs();
                assert!((got - want).abs() < tolerance, "{m}x{n}x{k}: {got} {want}");
            }
            let gap = &out[r * stride + n..][..3];
            assert!(gap.iter().all(|x| x.to_bits() == start.to_bits()));
            if a_turned {
                let want: f64 = (0..k).map(|p| at(a, r, p)).sum();
                assert!((f64::from(sums[r]) - want).abs() < 1e-5 + 1e-6 * k as f64);
            }
        }
    }

    /// Tiles are cut as threads need them, so this is what keeps threads out of the bits.
    #[test]
    fn bits_depend_on_row_column_and_depth_alone() {
        let (n, k) = (150, 1100);
        let (a, a_stride) = matrix(203, k, 0);
        let (b, b_stride) = matrix(k, n, 7);
        let mut scratch = vec![0.0; scratch_len(n, k)];
        let mut product = |threads, first: usize, m: usize| {
            let a = Factor { values: &a[first * a_stride..], stride: a_stride, turned: false };
            let b = Factor { values: &b, stride: b_stride, turned: false };
            let mut out = vec![0.0; m * n];
            let to = (&mut out[..], n);
            let product = Product { m, n, k, a, b };
            gemm(&cpu(threads), product, Store::Replace, to, None, &mut scratch, |_, _, _| {});
            out
        };
        let all = product(1, 0, 203);
        for threads in [2, 5, 16] {
            assert_eq!(product(threads, 0, 203), all, "{threads} threads");
        }
        for (first, m) in [(0, 2), (7, 3), (100, 101)] {
            assert_eq!(product(2, first, m), all[first * n..(first + m) * n], "row {first}");
        }
    }
}
