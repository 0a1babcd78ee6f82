//! Sums in an order that depends on lengths alone: dot products, row sums and column sums.
//!
//! Library GEMMs split a sum by threads when one side is a single row or column, so those
//! products come here. A dot product has 32 lanes: element i goes to lane i mod 32 in order, then
//! lanes l and l + 16 are added, l and l + 8, 4, 2, 1. A column sum adds blocks of 128 rows, each
//! in order from 0, in order. Multiply and add are apart (no FMA), so every instruction set gives
//! the same bits.

use tessera_device::simd_kernel;

/// Lanes of a dot product.
const LANES: usize = 32;

/// Rows of a column sum that are added up before they join the total.
const BLOCK: usize = 128;

/// Columns that a column sum holds in registers.
pub const COLUMNS: usize = 64;

#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for lane in 0..half {
            lanes[lane] += lanes[lane + half];
        }
        half /= 2;
    }
    lanes[0]
}

#[inline(always)]
fn dot_body(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    for (lane, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        lanes[lane] += a * b;
    }
    fold(lanes)
}

simd_kernel! {
    /// Dot product of two slices of one length.
    pub fn dot = dot_body(a: &[f32], b: &[f32]) -> f32
}

/// As [`dot`], with the elements of `b` `stride` apart: the same bits.
pub fn dot_strided(a: &[f32], b: &[f32], stride: usize) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for (i, a) in a.iter().enumerate() {
        lanes[i % LANES] += a * b[i * stride];
    }
    fold(lanes)
}

#[inline(always)]
fn sum_body(a: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (blocks, rest) = a.as_chunks::<LANES>();
    for a in blocks {
        for lane in 0..LANES {
            lanes[lane] += a[lane];
        }
    }
    for (lane, a) in rest.iter().enumerate() {
        lanes[lane] += a;
    }
    fold(lanes)
}

simd_kernel! {
    /// Sum of a slice.
    pub fn sum = sum_body(a: &[f32]) -> f32
}

/// Sums of `W` columns, each row times its weight.
#[inline(always)]
fn columns<const W: usize>(x: &[f32], stride: usize, weights: &[f32]) -> [f32; W] {
    let mut total = [0.0f32; W];
    for (block, weights) in weights.chunks(BLOCK).enumerate() {
        let mut part = [0.0f32; W];
        for (r, &weight) in weights.iter().enumerate() {
            let row = &x[(block * BLOCK + r) * stride..][..W];
            for c in 0..W {
                part[c] += weight * row[c];
            }
        }
        for c in 0..W {
            total[c] += part[c];
        }
    }
    total
}

#[inline(always)]
fn weighted_columns_body(x: &[f32], stride: usize, weights: &[f32], out: &mut [f32]) {
    let mut c = 0;
    while out.len() - c >= COLUMNS {
        out[c..c + COLUMNS].copy_from_slice(&columns::<COLUMNS>(&x[c..], stride, weights));
        c += COLUMNS;
    }
    while out.len() - c >= 8 {
        out[c..c + 8].copy_from_slice(&columns::<8>(&x[c..], stride, weights));
        c += 8;
    }
    for c in c..out.len() {
        out[c] = columns::<1>(&x[c..], stride, weights)[0];
    }
}

simd_kernel! {
    /// `out_c = sum_r weights_r x_rc` for the columns of `out`; rows of x are `stride` apart and
    /// there is at least one.
    pub fn weighted_columns = weighted_columns_body(
        x: &[f32],
        stride: usize,
        weights: &[f32],
        out: &mut [f32],
    )
}

/// Side of a block that [`transpose`] moves at once: a cache line.
pub const SIDE: usize = 16;

#[inline(always)]
fn transpose_body(x: &[f32], stride: usize, rows: usize, cols: usize, out: &mut [f32], to: usize) {
    let mut block = [[0.0f32; SIDE]; SIDE];
    for r0 in (0..rows).step_by(SIDE) {
        let height = SIDE.min(rows - r0);
        if height == SIDE && cols == SIDE {
            for r in 0..SIDE {
                let row = &x[(r0 + r) * stride..][..SIDE];
                for c in 0..SIDE {
                    block[c][r] = row[c];
                }
            }
            for c in 0..SIDE {
                out[c * to + r0..][..SIDE].copy_from_slice(&block[c]);
            }
        } else {
            for r in 0..height {
                for c in 0..cols {
                    out[c * to + r0 + r] = x[(r0 + r) * stride + c];
                }
            }
        }
    }
}

simd_kernel! {
    /// Writes x (rows, cols), at most [`SIDE`] columns, to `out` as (cols, rows) with rows `to`
    /// apart.
    pub fn transpose = transpose_body(
        x: &[f32],
        stride: usize,
        rows: usize,
        cols: usize,
        out: &mut [f32],
        to: usize,
    )
}

// The functions below spell out their arrays: `map` and `from_fn` are not inlined into kernels.

/// Four elements of 8 rows as 4 columns.
#[inline(always)]
pub fn turn_8_rows(rows: [&[f32; 4]; 8]) -> [[f32; 8]; 4] {
    let [a, b, c, d] = turn(rows[0], rows[1], rows[2], rows[3]);
    let [e, f, g, h] = turn(rows[4], rows[5], rows[6], rows[7]);
    [join(a, e), join(b, f), join(c, g), join(d, h)]
}

#[inline(always)]
fn join([a, b, c, d]: [f32; 4], [e, f, g, h]: [f32; 4]) -> [f32; 8] {
    [a, b, c, d, e, f, g, h]
}

/// The inverse of [`turn_8_rows`].
#[inline(always)]
pub fn turn_8_columns(columns: [&[f32; 8]; 4]) -> [[f32; 4]; 8] {
    let ([a, e], [b, f]) = (halves(columns[0]), halves(columns[1]));
    let ([c, g], [d, h]) = (halves(columns[2]), halves(columns[3]));
    let [p, q, r, s] = turn(&a, &b, &c, &d);
    let [t, u, v, w] = turn(&e, &f, &g, &h);
    [p, q, r, s, t, u, v, w]
}

#[inline(always)]
fn halves(&[a, b, c, d, e, f, g, h]: &[f32; 8]) -> [[f32; 4]; 2] {
    [[a, b, c, d], [e, f, g, h]]
}

#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn turn(a: &[f32; 4], b: &[f32; 4], c: &[f32; 4], d: &[f32; 4]) -> [[f32; 4]; 4] {
    use std::arch::x86_64::{
        _mm_loadu_ps, _mm_movehl_ps, _mm_movelh_ps, _mm_storeu_ps, _mm_unpackhi_ps, _mm_unpacklo_ps,
    };
    let mut columns = [[0.0f32; 4]; 4];
    // SAFETY: SSE is there on every x86-64; each pointer is to four elements.
    unsafe {
        let (a, b) = (_mm_loadu_ps(a.as_ptr()), _mm_loadu_ps(b.as_ptr()));
        let (c, d) = (_mm_loadu_ps(c.as_ptr()), _mm_loadu_ps(d.as_ptr()));
        let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
        let (ef, gh) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
        _mm_storeu_ps(columns[0].as_mut_ptr(), _mm_movelh_ps(ab, cd));
        _mm_storeu_ps(columns[1].as_mut_ptr(), _mm_movehl_ps(cd, ab));
        _mm_storeu_ps(columns[2].as_mut_ptr(), _mm_movelh_ps(ef, gh));
        _mm_storeu_ps(columns[3].as_mut_ptr(), _mm_movehl_ps(gh, ef));
    }
    columns
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn turn(a: &[f32; 4], b: &[f32; 4], c: &[f32; 4], d: &[f32; 4]) -> [[f32; 4]; 4] {
    let mut columns = [[0.0f32; 4]; 4];
    for i in 0..4 {
        columns[i] = [a[i], b[i], c[i], d[i]];
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_device::Simd;

    fn values(len: usize, step: f32) -> Vec<f32> {
        (0..len).map(|i| (i as f32 * step).sin()).collect()
    }

    #[test]
    fn dots_and_sums_are_right_and_the_same_on_every_path() {
        for len in (0..=70).chain([128, 1000, 4096]) {
            let (a, b) = (values(len, 0.37), values(len, 0.73));
            let want: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let total: f64 = a.iter().map(|&a| f64::from(a)).sum();
            let spread: Vec<f32> = b.iter().flat_map(|&b| [b, f32::NAN, f32::NAN]).collect();
            let first = dot(Simd::Baseline, &a, &b);
            assert!((f64::from(first) - want).abs() < 1e-5 + 1e-6 * len as f64, "{len}");
            assert_eq!(dot_strided(&a, &spread, 3).to_bits(), first.to_bits(), "{len}");
            let first_sum = sum(Simd::Baseline, &a);
            assert!((f64::from(first_sum) - total).abs() < 1e-5 + 1e-6 * len as f64, "{len}");
            for simd in Simd::available() {
                assert_eq!(dot(simd, &a, &b).to_bits(), first.to_bits(), "{len} {simd:?}");
                assert_eq!(sum(simd, &a).to_bits(), first_sum.to_bits(), "{len} {simd:?}");
            }
        }
    }

    #[test]
    fn column_sums_are_right_and_the_same_on_every_path() {
        for cols in (1..=33).chain([64, 65, 100, 144]) {
            for rows in [1, 2, 7, 127, 128, 129, 300] {
                let stride = cols + 3;
                let x = values(rows * stride, 0.29);
                let weights = values(rows, 0.51);
                let mut first = vec![f32::NAN; cols];
                weighted_columns(Simd::Baseline, &x, stride, &weights, &mut first);
                for c in 0..cols {
                    let want: f64 = (0..rows)
                        .map(|r| f64::from(weights[r]) * f64::from(x[r * stride + c]))
                        .sum();
                    assert!((f64::from(first[c]) - want).abs() < 1e-4, "{rows} x {cols}");
                }
                for simd in Simd::available() {
                    let mut out = vec![f32::NAN; cols];
                    weighted_columns(simd, &x, stride, &weights, &mut out);
                    assert_eq!(out, first, "{rows} x {cols} {simd:?}");
                }
            }
        }
    }

    #[test]
    fn transposing_moves_every_element_and_no_other() {
        for (rows, cols) in [(1, 1), (16, 16), (17, 16), (33, 5), (48, 16), (3, 15)] {
            let (stride, to) = (cols + 2, rows + 5);
            let x = values(rows * stride, 0.11);
            for simd in Simd::available() {
                let mut out = vec![7.0; cols * to];
                transpose(simd, &x, stride, rows, cols, &mut out, to);
                for c in 0..cols {
                    for r in 0..rows {
                        assert_eq!(out[c * to + r], x[r * stride + c]);
                    }
                    assert!(out[c * to + rows..][..5].iter().all(|&x| x == 7.0));
                }
            }
        }
    }
}
