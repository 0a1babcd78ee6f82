//! Dot interaction: products of all pairs of a sample's vectors, and their gradient, for 8
//! samples at a time.
//!
//! Z is (vectors, dim), row-major, as it lies in an input row. Columns of a block of vectors are
//! turned so that the same element of 8 samples is one register; then everything is multiplied
//! lane by lane, with nothing to spread or to add across, and no product is computed twice:
//!
//! ```text
//! forward   pairs[i][j] += z[d][i] * z[d][j]    2 rows i by 4 columns j in registers, over d
//! backward  dz[d][i]    += s[i][j] * z[d][j]    2 rows i by 4 columns d in registers, over j
//! ```
//!
//! S is symmetric with zeros on its diagonal: the gradients of the pairs. Every result is one
//! chain of multiplications and additions in the order of d (forward) or j (backward), apart (no
//! FMA): the same bits on every instruction set, whatever samples share the lanes.
//! Cost for 27 vectors of 16: 11 kFLOP a sample forward, 23 backward; turning moves 0.9 and 1.3
//! thousand elements.

use tessera_device::simd_kernel;

use super::vector::{turn_8_columns, turn_8_rows};
use crate::ops::DotShape;

/// Samples whose elements share a register.
pub const LANES: usize = 8;
/// Vectors of a block: a multiple of the rows and columns held in registers.
const SPAN: usize = 30;
/// Columns d turned at once.
const DEPTH: usize = 16;

/// The same element of several samples.
type Lanes = [f32; LANES];
const ZERO: Lanes = [0.0; LANES];

/// Columns of a block of vectors, turned.
type Turned = [[Lanes; SPAN]; DEPTH];

/// Memory that the kernels work in, 74 KiB; what it holds before and after does not matter.
#[repr(C, align(64))]
pub struct Work {
    /// Vectors j.
    z: Turned,
    /// Vectors i forward, their gradients backward.
    other: Turned,
    /// Products or S of a block of pairs (i, j).
    pairs: [[Lanes; SPAN]; SPAN],
}

impl Work {
    pub fn new() -> Self {
        let empty = [[ZERO; SPAN]; DEPTH];
        Self { z: empty, other: empty, pairs: [[ZERO; SPAN]; SPAN] }
    }
}

/// Index of pair (i, 0) among the pairs.
const fn pair_row(i: usize) -> usize {
    i * i.saturating_sub(1) / 2
}

/// Rows of samples; a lane without a sample reads the last one's.
#[derive(Clone, Copy)]
struct Samples<'a>([&'a [f32]; LANES]);

impl<'a> Samples<'a> {
    /// The first `count` rows, `stride` apart, of at least `len` elements.
    #[inline(always)]
    fn new(rows: &'a [f32], stride: usize, count: usize, len: usize) -> Self {
        Self(std::array::from_fn(|lane| &rows[lane.min(count - 1) * stride..][..len]))
    }

    /// Calls `to(c, lanes)` for elements `at + c` of all samples, c in `0..len`.
    #[inline(always)]
    fn turned(&self, at: usize, len: usize, mut to: impl FnMut(usize, Lanes)) {
        let [a, b, c, d, e, f, g, h] = self.0;
        let quads = len / 4;
        let of = |row: &'a [f32]| &row[at..].as_chunks::<4>().0[..quads];
        let (a4, b4, c4, d4) = (of(a), of(b), of(c), of(d));
        let (e4, f4, g4, h4) = (of(e), of(f), of(g), of(h));
        for i in 0..quads {
            let rows = [&a4[i], &b4[i], &c4[i], &d4[i], &e4[i], &f4[i], &g4[i], &h4[i]];
            let [p, q, r, s] = turn_8_rows(rows);
            to(4 * i, p);
            to(4 * i + 1, q);
            to(4 * i + 2, r);
            to(4 * i + 3, s);
        }
        for i in 4 * quads..len {
            let at = at + i;
            to(i, [a[at], b[at], c[at], d[at], e[at], f[at], g[at], h[at]]);
        }
    }
}

/// Writes `from(c)` to elements `at + c` of `count` samples' rows, c in `0..len`.
#[inline(always)]
fn turn_back(
    (rows, stride): (&mut [f32], usize),
    count: usize,
    at: usize,
    len: usize,
    from: impl Fn(usize) -> Lanes,
) {
    let mut c = 0;
    while len - c >= 4 {
        let turned = turn_8_columns([&from(c), &from(c + 1), &from(c + 2), &from(c + 3)]);
        for (lane, values) in turned.iter().enumerate().take(count) {
            rows[lane * stride + at + c..][..4].copy_from_slice(values);
        }
        c += 4;
    }
    for c in c..len {
        for (lane, value) in from(c).into_iter().enumerate().take(count) {
            rows[lane * stride + at + c] = value;
        }
    }
}

/// Columns `d0..d0 + depth` of vectors `first..first + count`.
#[inline(always)]
fn turn_vectors(
    x: Samples<'_>,
    dim: usize,
    (first, count): (usize, usize),
    (d0, depth): (usize, usize),
    out: &mut Turned,
) {
    for (v, vector) in (first..first + count).enumerate() {
        x.turned(vector * dim + d0, depth, |d, lanes| out[d][v] = lanes);
    }
}

/// Products of vectors i, i + 1 with vectors j..j + C, over the columns given, added to `sums`.
#[inline(always)]
fn products<const C: usize>(
    mut sums: [[Lanes; C]; 2],
    rows: &[[Lanes; SPAN]],
    i: usize,
    cols: &[[Lanes; SPAN]],
    j: usize,
) -> [[Lanes; C]; 2] {
    assert!(i + 1 < SPAN && j + C <= SPAN);
    for (rows, cols) in rows.iter().zip(cols) {
        for r in 0..2 {
            for c in 0..C {
                for lane in 0..LANES {
                    sums[r][c][lane] += rows[i + r][lane] * cols[j + c][lane];
                }
            }
        }
    }
    sums
}

/// [`products`] from and to rows i, i + 1 of `pairs`; from 0 if these are the first columns.
#[inline(always)]
fn product_columns<const C: usize>(
    first: bool,
    pairs: &mut [[Lanes; SPAN]; SPAN],
    rows: &[[Lanes; SPAN]],
    i: usize,
    cols: &[[Lanes; SPAN]],
    j: usize,
) {
    let mut sums = [[ZERO; C]; 2];
    if !first {
        for (r, sums) in sums.iter_mut().enumerate() {
            sums.copy_from_slice(&pairs[i + r][j..j + C]);
        }
    }
    let sums = products::<C>(sums, rows, i, cols, j);
    for (r, sums) in sums.iter().enumerate() {
        pairs[i + r][j..j + C].copy_from_slice(sums);
    }
}

#[inline(always)]
fn forward_body(
    shape: DotShape,
    (x, x_stride): (&[f32], usize),
    count: usize,
    (y, y_stride): (&mut [f32], usize),
    work: &mut Work,
) {
    let DotShape { vectors, dim, copied } = shape;
    let x = Samples::new(x, x_stride, count, vectors * dim);
    let Work { z, other, pairs } = work;
    for i0 in (0..vectors).step_by(SPAN) {
        let height = SPAN.min(vectors - i0);
        for j0 in (0..=i0).step_by(SPAN) {
            let diagonal = i0 == j0;
            for d0 in (0..dim).step_by(DEPTH) {
                let depth = DEPTH.min(dim - d0);
                turn_vectors(x, dim, (j0, SPAN.min(vectors - j0)), (d0, depth), z);
                if !diagonal {
                    turn_vectors(x, dim, (i0, height), (d0, depth), other);
                }
                let cols = &z[..depth];
                let rows = if diagonal { cols } else { &other[..depth] };
                for i in (0..height).step_by(2) {
                    // On the diagonal row i + 1 has pairs up to i, row i one less.
                    let end = if diagonal { i + 1 } else { SPAN };
                    let mut j = 0;
                    while end - j >= 4 {
                        product_columns::<4>(d0 == 0, pairs, rows, i, cols, j);
                        j += 4;
                    }
                    match end - j {
                        0 => {}
                        1 => product_columns::<1>(d0 == 0, pairs, rows, i, cols, j),
                        2 => product_columns::<2>(d0 == 0, pairs, rows, i, cols, j),
                        _ => product_columns::<3>(d0 == 0, pairs, rows, i, cols, j),
                    }
                }
            }
            for (i, pairs) in pairs.iter().enumerate().take(height) {
                let len = if diagonal { i } else { SPAN };
                let at = copied + pair_row(i0 + i) + j0;
                turn_back((&mut *y, y_stride), count, at, len, |j| pairs[j]);
            }
        }
    }
}

simd_kernel! {
    /// For `count` samples, 1 to [`LANES`], x (vectors, dim) each: `y_ij = z_i . z_j`, j < i,
    /// row-major: (1,0), (2,0), (2,1), (3,0)..., after the copied columns.
    pub fn forward = forward_body(
        shape: DotShape,
        x: (&[f32], usize),
        count: usize,
        y: (&mut [f32], usize),
        work: &mut Work,
    )
}

/// Adds `s[i + r][j] * z[d + c][j]` over all j to `sums[c][r]`.
#[inline(always)]
fn gradients(
    mut sums: [[Lanes; 2]; 4],
    pairs: &[[Lanes; SPAN]; SPAN],
    i: usize,
    z: &Turned,
    d: usize,
    count: usize,
) -> [[Lanes; 2]; 4] {
    assert!(i + 2 <= SPAN && d + 4 <= DEPTH && count <= SPAN);
    for j in 0..count {
        for c in 0..4 {
            for r in 0..2 {
                for lane in 0..LANES {
                    sums[c][r][lane] += pairs[i + r][j][lane] * z[d + c][j][lane];
                }
            }
        }
    }
    sums
}

#[inline(always)]
fn backward_body(
    shape: DotShape,
    (x, x_stride): (&[f32], usize),
    (dy, dy_stride): (&[f32], usize),
    count: usize,
    (dx, dx_stride): (&mut [f32], usize),
    work: &mut Work,
) {
    let DotShape { vectors, dim, copied } = shape;
    let x = Samples::new(x, x_stride, count, vectors * dim);
    let dy = Samples::new(dy, dy_stride, count, copied + shape.pairs());
    let Work { z, other: dz, pairs } = work;
    for i0 in (0..vectors).step_by(SPAN) {
        let height = SPAN.min(vectors - i0);
        for j0 in (0..vectors).step_by(SPAN) {
            let width = SPAN.min(vectors - j0);
            turn_pairs(dy, copied, (i0, height), (j0, width), pairs);
            for d0 in (0..dim).step_by(DEPTH) {
                let depth = DEPTH.min(dim - d0);
                turn_vectors(x, dim, (j0, width), (d0, depth), z);
                // The first terms: what earlier j gave, or the copied columns' own gradient.
                if j0 > 0 {
                    let dx = Samples::new(dx, dx_stride, count, vectors * dim);
                    turn_vectors(dx, dim, (i0, height), (d0, depth), dz);
                } else if i0 == 0 && copied > 0 {
                    dy.turned(d0, depth, |d, lanes| dz[d][..2].copy_from_slice(&[lanes, ZERO]));
                }
                // Rows and columns past the end are computed from what is there, and not stored.
                for i in (0..height).step_by(2) {
                    let from_zero = j0 == 0 && (i0 + i > 0 || copied == 0);
                    for d in (0..depth).step_by(4) {
                        let mut sums = [[ZERO; 2]; 4];
                        if !from_zero {
                            for (c, sums) in sums.iter_mut().enumerate() {
                                sums.copy_from_slice(&dz[d + c][i..i + 2]);
                            }
                        }
                        let sums = gradients(sums, pairs, i, z, d, width);
                        for (c, sums) in sums.iter().enumerate() {
                            dz[d + c][i..i + 2].copy_from_slice(sums);
                        }
                    }
                }
                for (i, vector) in (i0..i0 + height).enumerate() {
                    let at = vector * dim + d0;
                    turn_back((&mut *dx, dx_stride), count, at, depth, |d| dz[d][i]);
                }
            }
        }
    }
}

/// S of a block of vectors i by a block of vectors j.
#[inline(always)]
fn turn_pairs(
    dy: Samples<'_>,
    copied: usize,
    (i0, height): (usize, usize),
    (j0, width): (usize, usize),
    pairs: &mut [[Lanes; SPAN]; SPAN],
) {
    if i0 == j0 {
        for (i, row) in (i0..i0 + height).enumerate() {
            pairs[i][i] = ZERO;
            dy.turned(copied + pair_row(row) + j0, i, |j, lanes| {
                pairs[i][j] = lanes;
                pairs[j][i] = lanes;
            });
        }
    } else if i0 > j0 {
        for (i, row) in (i0..i0 + height).enumerate() {
            let at = copied + pair_row(row) + j0;
            dy.turned(at, width, |j, lanes| pairs[i][j] = lanes);
        }
    } else {
        for (j, row) in (j0..j0 + width).enumerate() {
            let at = copied + pair_row(row) + i0;
            dy.turned(at, height, |i, lanes| pairs[i][j] = lanes);
        }
    }
}

simd_kernel! {
    /// For `count` samples, 1 to [`LANES`]: `dx_i = sum_j s_ij z_j`, plus dy's copied columns for
    /// the first vector, where s_ij is the gradient in dy of pair (i, j) or (j, i).
    pub fn backward = backward_body(
        shape: DotShape,
        x: (&[f32], usize),
        dy: (&[f32], usize),
        count: usize,
        dx: (&mut [f32], usize),
        work: &mut Work,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_device::Simd;

    fn shapes() -> impl Iterator<Item = (DotShape, usize)> {
        let dims = (1..=33).chain([64, 128, 300]);
        let all = dims.flat_map(|dim| [1, 2, 3, 6, 7, 8, 9, 14, 27, 70].map(|v| (v, dim)));
        all.enumerate().map(|(i, (vectors, dim))| {
            (DotShape { vectors, dim, copied: dim * (i % 2) }, 1 + i % LANES)
        })
    }

    fn values(len: usize, step: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * step).sin()).collect()
    }

    #[test]
    fn the_pairs_are_plain_dot_products_to_the_bit() {
        let mut work = Work::new();
        for (shape, count) in shapes() {
            let DotShape { vectors, dim, copied } = shape;
            let (x_stride, y_stride) = (vectors * dim + 1, copied + shape.pairs() + 2);
            let x = values(count * x_stride, 0.37);
            let mut want = vec![f32::NAN; count * y_stride];
            for s in 0..count {
                let z = &x[s * x_stride..];
                let mut at = s * y_stride + copied;
                for i in 0..vectors {
                    for j in 0..i {
                        let terms = (0..dim).map(|d| z[i * dim + d] * z[j * dim + d]);
                        want[at] = terms.fold(0.0f32, |sum, term| sum + term);
                        at += 1;
                    }
                }
            }
            for simd in Simd::available() {
                let mut y = vec![f32::NAN; want.len()];
                forward(simd, shape, (&x, x_stride), count, (&mut y, y_stride), &mut work);
                let same = y.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{shape:?}, {count} samples, {simd:?}");
            }
        }
    }

    #[test]
    fn the_gradient_is_a_plain_sum_over_pairs_to_the_bit() {
        let mut work = Work::new();
        for (shape, count) in shapes() {
            let DotShape { vectors, dim, copied } = shape;
            let (x_stride, y_stride) = (vectors * dim + 1, copied + shape.pairs() + 2);
            let x = values(count * x_stride, 0.37);
            let dy = values(count * y_stride, 0.91);
            let mut want = vec![f32::NAN; count * x_stride];
            for s in 0..count {
                let (z, dy) = (&x[s * x_stride..], &dy[s * y_stride..]);
                for i in 0..vectors {
                    for d in 0..dim {
                        let mut sum = if i * dim + d < copied { dy[d] } else { 0.0 };
                        for j in 0..vectors {
                            let (high, low) = (i.max(j), i.min(j));
                            let pair = copied + pair_row(high) + low;
                            let s = if i == j { 0.0 } else { dy[pair] };
                            sum += s * z[j * dim + d];
                        }
                        want[s * x_stride + i * dim + d] = sum;
                    }
                }
            }
            for simd in Simd::available() {
                let mut dx = vec![f32::NAN; want.len()];
                let (from, grads) = ((&x[..], x_stride), (&dy[..], y_stride));
                backward(simd, shape, from, grads, count, (&mut dx, x_stride), &mut work);
                let same = dx.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same, "{shape:?}, {count} samples, {simd:?}");
            }
        }
    }
}
