//! Matrix products: tiles of fixed sizes, each by a single-threaded library GEMM, side by side.
//!
//! The library's own threads would do as well (within 5 percent, measured), but then its bits
//! would depend on their number wherever it splits a sum. Here the tiles depend on the shape
//! alone and no sum is ever split between tiles. A tile that has just been computed is still in
//! the cache when its epilogue (bias, ReLU, gate) passes over it. Products with a single row or
//! column go to the kernels of `vector`.

use std::ops::Range;

use faer::linalg::matmul::matmul;
use faer::{Accum, MatMut, MatRef, Par};
use tessera_device::Cpu;

use super::parallel::{Tiles, pieces};
use super::vector;

/// How the second factor lies in memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `a b^T`: b has n rows of k elements.
    Transposed,
    /// `a b`: b has k rows of n elements.
    Plain,
}

/// A product to compute: (m, n) from a (m, k) and b, rows contiguous and strided.
#[derive(Clone, Copy)]
pub struct Product<'a> {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: &'a [f32],
    pub a_stride: usize,
    pub b: &'a [f32],
    pub b_stride: usize,
    pub form: Form,
}

/// What happens to what the output holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Store {
    /// It is never read.
    Replace,
    /// The product is added to it.
    Add,
}

/// Largest tile, and the smallest that a tile is cut to for the sake of more threads.
const TILE_MAX: (usize, usize) = (256, 384);
const TILE_MIN: (usize, usize) = (128, 96);

/// Tiles start at multiples of the library's register block on AVX2, its side along a row last.
const GRAIN: (usize, usize) = (4, 24);

/// Computes `product` into `out`, rows `stride` apart, and calls `epilogue(r, first column,
/// columns)` once on every row of every tile when it is done.
pub fn gemm(
    cpu: &Cpu,
    product: Product<'_>,
    store: Store,
    out: &mut [f32],
    stride: usize,
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    let Product { m, n, k, .. } = product;
    if m == 0 || n == 0 {
        return;
    }
    let out = Tiles::new(out, stride);
    if k == 0 {
        for r in 0..m {
            // SAFETY: one thread, one row at a time.
            let row = unsafe { out.row(r, 0..n) };
            if store == Store::Replace {
                row.fill(0.0);
            }
            epilogue(r, 0, row);
        }
    } else if m == 1 && product.form == Form::Plain {
        single_row(cpu, product, store, &out, epilogue);
    } else if m == 1 || n == 1 {
        dots(cpu, product, store, &out, epilogue);
    } else {
        tiles(cpu, product, store, &out, epilogue);
    }
}

/// One row of coefficients: weighted sums of b's rows, pieces of columns side by side.
fn single_row(
    cpu: &Cpu,
    product: Product<'_>,
    store: Store,
    out: &Tiles<'_>,
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    let Product { n, k, a, b, b_stride, .. } = product;
    pieces(cpu, n.div_ceil(vector::COLUMNS), n * k, |piece| {
        let first = piece * vector::COLUMNS;
        let end = n.min(first + vector::COLUMNS);
        let mut sums = [0.0f32; vector::COLUMNS];
        let sums = &mut sums[..end - first];
        vector::weighted_columns(cpu.simd(), &b[first..], b_stride, &a[..k], sums);
        // SAFETY: pieces have disjoint columns.
        let row = unsafe { out.row(0, first..end) };
        put(store, row, sums);
        epilogue(0, first, row);
    });
}

/// One row or one column of results: each a dot product along k.
fn dots(
    cpu: &Cpu,
    product: Product<'_>,
    store: Store,
    out: &Tiles<'_>,
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    let Product { m, n, k, a, a_stride, b, b_stride, form } = product;
    let each = 64;
    pieces(cpu, (m * n).div_ceil(each), m * n * k, |piece| {
        for i in piece * each..(m * n).min((piece + 1) * each) {
            let (r, c) = if n == 1 { (i, 0) } else { (0, i) };
            let a = &a[r * a_stride..][..k];
            let value = match form {
                Form::Transposed => vector::dot(cpu.simd(), a, &b[c * b_stride..][..k]),
                Form::Plain => vector::dot_strided(a, &b[c..], b_stride),
            };
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
    epilogue: impl Fn(usize, usize, &mut [f32]) + Send + Sync,
) {
    let Product { m, n, k, a, a_stride, b, b_stride, form } = product;
    // The last elements that the library will read.
    assert!((m - 1) * a_stride + k <= a.len());
    let b_len = match form {
        Form::Transposed => (n - 1) * b_stride + k,
        Form::Plain => (k - 1) * b_stride + n,
    };
    assert!(b_len <= b.len());
    let (down, across) = tile_counts(m, n, k);
    let accum = match store {
        Store::Replace => Accum::Replace,
        Store::Add => Accum::Add,
    };
    pieces(cpu, down * across, m * n * k, |tile| {
        let rows = part(m, down, GRAIN.0, tile / across);
        let cols = part(n, across, GRAIN.1, tile % across);
        if rows.is_empty() || cols.is_empty() {
            return;
        }
        let (height, width) = (rows.len(), cols.len());
        let (b_at, b_rows, b_cols) = match form {
            Form::Transposed => (cols.start * b_stride, 1, b_stride as isize),
            Form::Plain => (cols.start, b_stride as isize, 1),
        };
        let start = out.pointer(rows.start, cols.start, height, width);
        let (a_step, out_step) = (a_stride as isize, out.stride() as isize);
        // SAFETY: both factors hold every element of the tile's share, by the assertions above
        // and since rows < m and cols < n; `pointer` checked the output's rectangle, and tiles
        // are disjoint.
        unsafe {
            let a =
                MatRef::from_raw_parts(a[rows.start * a_stride..].as_ptr(), height, k, a_step, 1);
            let b = MatRef::from_raw_parts(b[b_at..].as_ptr(), k, width, b_rows, b_cols);
            let c = MatMut::from_raw_parts_mut(start, height, width, out_step, 1);
            matmul(c, accum, a, b, 1.0, Par::Seq);
        }
        for r in rows {
            // SAFETY: this tile's own rectangle; the library is done with it.
            epilogue(r, cols.start, unsafe { out.row(r, cols.clone()) });
        }
    });
}

/// Tiles down and across. About 16 (or one per 4 million multiplications, for small products) so
/// that threads have work, more for large products so that many threads end together, as long as
/// tiles are not cut below TILE_MIN.
fn tile_counts(m: usize, n: usize, k: usize) -> (usize, usize) {
    let work = m * n * k;
    let wanted = (work >> 22).min(16).max(work >> 25);
    let mut counts = (m.div_ceil(TILE_MAX.0), n.div_ceil(TILE_MAX.1));
    while counts.0 * counts.1 < wanted {
        let (height, width) = (m / counts.0, n / counts.1);
        let rows_left = height / TILE_MIN.0;
        let cols_left = width / TILE_MIN.1;
        if rows_left < 2 && cols_left < 2 {
            break;
        }
        if rows_left >= cols_left {
            counts.0 *= 2;
        } else {
            counts.1 *= 2;
        }
    }
    counts
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

    #[test]
    fn parts_cover_everything_once() {
        for len in [1, 2, 24, 25, 97, 367, 2048] {
            for parts in [1, 2, 3, 8, 16] {
                for grain in [4, 24] {
                    let mut at = 0;
                    for i in 0..parts {
                        let part = part(len, parts, grain, i);
                        assert_eq!(part.start, at);
                        at = part.end;
                    }
                    assert_eq!(at, len);
                }
            }
        }
    }

    #[test]
    fn tiles_are_many_enough_and_not_too_small() {
        assert_eq!(tile_counts(7, 9, 11), (1, 1));
        assert_eq!(tile_counts(16, 256, 2048), (1, 2));
        assert_eq!(tile_counts(2048, 512, 367), (8, 2));
        let (down, across) = tile_counts(1024, 1024, 2048);
        assert_eq!((down, across), (8, 6));
    }

    /// Every shape against a plain loop, into a strided output with guards around it.
    #[test]
    fn products_match_plain_loops_and_write_nothing_else() {
        let cpu = Cpu::new(NonZeroUsize::new(2)).unwrap();
        let dims = [1, 2, 3, 5, 8, 17, 33];
        let shapes = dims
            .into_iter()
            .flat_map(|m| dims.into_iter().flat_map(move |n| dims.map(|k| (m, n, k))))
            .chain([(300, 400, 20), (257, 100, 530), (1, 700, 300), (700, 1, 300), (4, 6, 0)]);
        for (m, n, k) in shapes {
            for form in [Form::Transposed, Form::Plain] {
                for store in [Store::Replace, Store::Add] {
                    let (a_stride, stride) = (k + 2, n + 3);
                    let (b_rows, b_cols) = if form == Form::Plain { (k, n) } else { (n, k) };
                    let b_stride = b_cols + 1;
                    let value = |i: usize| (i as f32 * 0.37).sin();
                    let a: Vec<f32> = (0..m * a_stride).map(value).collect();
                    let b: Vec<f32> = (0..b_rows * b_stride).map(|i| value(i + 7)).collect();
                    let start = if store == Store::Add { 0.5 } else { f32::NAN };
                    let mut out = vec![start; m * stride];
                    let product = Product { m, n, k, a: &a, a_stride, b: &b, b_stride, form };
                    gemm(&cpu, product, store, &mut out, stride, |r, first, columns| {
                        for (c, x) in columns.iter_mut().enumerate() {
                            *x += (r * 1000 + first + c) as f32;
                        }
                    });
                    for r in 0..m {
                        for c in 0..n {
                            let sum: f64 = (0..k)
                                .map(|i| {
                                    let b = match form {
                                        Form::Plain => b[i * b_stride + c],
                                        Form::Transposed => b[c * b_stride + i],
                                    };
                                    f64::from(a[r * a_stride + i]) * f64::from(b)
                                })
                                .sum();
                            let before = if store == Store::Add { 0.5 } else { 0.0 };
                            let want = sum + before + (r * 1000 + c) as f64;
                            let got = f64::from(out[r * stride + c]);
                            let tolerance = 1e-5 + 1e-6 * k as f64 + 3e-7 * want.abs();
                            assert!((got - want).abs() < tolerance, "{m}x{n}x{k}: {got} {want}");
                        }
                        let gap = &out[r * stride + n..][..3];
                        assert!(gap.iter().all(|x| x.to_bits() == start.to_bits()));
                    }
                }
            }
        }
    }
}
