//! Dot interaction of one sample: products of all pairs of its vectors, and their gradient.
//!
//! Z is (vectors, dim), row-major, as it lies in an input row.
//! Forward: 8 vectors j are turned so that column d of all 8 is one register; rows i, six at a
//! time, are broadcast against it: a GEMM kernel that skips most of the upper triangle.
//! Accumulators pass through functions by value, or the compiler would keep them in memory.
//! Backward: `dz_i = sum_j S_ij z_j`, S symmetric with zeros on its diagonal, six rows i times 16
//! columns at a time. Every result is one chain of multiplications and additions in the order of
//! d (forward) or j (backward), apart (no FMA): the same bits on every instruction set.
//! Cost for 27 vectors of 16: 11 kFLOP a sample forward, 23 backward.

use std::cmp::Ordering;

use tessera_device::simd_kernel;

/// Rows of a register block.
const ROWS: usize = 6;
/// Columns of a register block forward.
const COLS: usize = 8;
/// Columns d turned at once, held on the stack (4 KiB).
const DEPTH: usize = 128;
/// Vectors j whose S is held on the stack.
const WIDTH: usize = 64;

/// Index of pair (i, 0) among the pairs.
const fn pair_row(i: usize) -> usize {
    i * i.saturating_sub(1) / 2
}

/// Adds `rows_r[d] * turned[d]` to each row of `sums`, which stay in registers.
#[inline(always)]
fn forward_block(
    mut sums: [[f32; COLS]; ROWS],
    turned: &[[f32; COLS]],
    rows: [&[f32]; ROWS],
) -> [[f32; COLS]; ROWS] {
    let depth = turned.len();
    let rows = rows.map(|row| &row[..depth]);
    for d in 0..depth {
        for r in 0..ROWS {
            for j in 0..COLS {
                sums[r][j] += rows[r][d] * turned[d][j];
            }
        }
    }
    sums
}

#[inline(always)]
fn forward_body(z: &[f32], vectors: usize, dim: usize, pairs: &mut [f32]) {
    let mut turned = [[0.0f32; COLS]; DEPTH];
    for j0 in (0..vectors).step_by(COLS) {
        let width = COLS.min(vectors - j0);
        for d0 in (0..dim).step_by(DEPTH) {
            let depth = DEPTH.min(dim - d0);
            // Vectors past the end repeat the last one, here and below; what they give is not
            // stored.
            let columns: [&[f32]; COLS] =
                std::array::from_fn(|j| &z[(j0 + j).min(vectors - 1) * dim + d0..][..depth]);
            for (d, turned) in turned[..depth].iter_mut().enumerate() {
                *turned = std::array::from_fn(|j| columns[j][d]);
            }
            let turned = &turned[..depth];
            for i0 in (j0 + 1..vectors).step_by(ROWS) {
                let rows: [&[f32]; ROWS] =
                    std::array::from_fn(|r| &z[(i0 + r).min(vectors - 1) * dim + d0..][..depth]);
                let mut sums = [[0.0f32; COLS]; ROWS];
                if d0 > 0 {
                    for r in 0..ROWS.min(vectors - i0) {
                        let kept = width.min(i0 + r - j0);
                        let from = &pairs[pair_row(i0 + r) + j0..][..kept];
                        sums[r][..kept].copy_from_slice(from);
                    }
                }
                let sums = forward_block(sums, turned, rows);
                for r in 0..ROWS.min(vectors - i0) {
                    let kept = width.min(i0 + r - j0);
                    let to = &mut pairs[pair_row(i0 + r) + j0..][..kept];
                    to.copy_from_slice(&sums[r][..kept]);
                }
            }
        }
    }
}

simd_kernel! {
    /// `pairs_ij = z_i . z_j`, j < i, row-major: (1,0), (2,0), (2,1), (3,0)...
    pub fn forward = forward_body(z: &[f32], vectors: usize, dim: usize, pairs: &mut [f32])
}

/// Adds `sum_j s_j z_j[first..first + C]` to each row of `sums`, which stay in registers.
#[inline(always)]
fn backward_block<const C: usize>(
    mut sums: [[f32; C]; ROWS],
    s: &[[f32; ROWS]],
    z: &[f32],
    dim: usize,
) -> [[f32; C]; ROWS] {
    for (j, s) in s.iter().enumerate() {
        let z = &z[j * dim..][..C];
        for r in 0..ROWS {
            for c in 0..C {
                sums[r][c] += s[r] * z[c];
            }
        }
    }
    sums
}

/// As [`backward_block`], from and to the first `rows` rows of `dz`.
#[inline(always)]
fn backward_columns<const C: usize>(
    s: &[[f32; ROWS]],
    z: &[f32],
    dim: usize,
    dz: &mut [f32],
    rows: usize,
    first: usize,
) {
    let mut sums = [[0.0f32; C]; ROWS];
    for (r, sums) in sums.iter_mut().enumerate().take(rows) {
        sums.copy_from_slice(&dz[r * dim + first..][..C]);
    }
    let sums = backward_block::<C>(sums, s, &z[first..], dim);
    for (r, sums) in sums.iter().enumerate().take(rows) {
        dz[r * dim + first..][..C].copy_from_slice(sums);
    }
}

#[inline(always)]
fn backward_body(z: &[f32], vectors: usize, dim: usize, pairs: &[f32], dz: &mut [f32]) {
    let mut s = [[0.0f32; ROWS]; WIDTH];
    for i0 in (0..vectors).step_by(ROWS) {
        let rows = ROWS.min(vectors - i0);
        for j0 in (0..vectors).step_by(WIDTH) {
            let width = WIDTH.min(vectors - j0);
            for (j, s) in (j0..).zip(&mut s[..width]) {
                // Past the diagonal a row of S is a piece of a row of pairs.
                if j >= i0 + ROWS {
                    s.copy_from_slice(&pairs[pair_row(j) + i0..][..ROWS]);
                    continue;
                }
                for (i, s) in (i0..).zip(&mut s[..rows]) {
                    *s = match i.cmp(&j) {
                        Ordering::Greater => pairs[pair_row(i) + j],
                        Ordering::Equal => 0.0,
                        Ordering::Less => pairs[pair_row(j) + i],
                    };
                }
            }
            let (s, z) = (&s[..width], &z[j0 * dim..]);
            let dz = &mut dz[i0 * dim..];
            let mut first = 0;
            while dim - first >= 16 {
                backward_columns::<16>(s, z, dim, dz, rows, first);
                first += 16;
            }
            while dim - first >= 4 {
                backward_columns::<4>(s, z, dim, dz, rows, first);
                first += 4;
            }
            while dim > first {
                backward_columns::<1>(s, z, dim, dz, rows, first);
                first += 1;
            }
        }
    }
}

simd_kernel! {
    /// Adds `sum_j s_ij z_j` to each row i of `dz` (vectors, dim), where s_ij is the gradient of
    /// pair (i, j) or (j, i).
    pub fn backward = backward_body(
        z: &[f32],
        vectors: usize,
        dim: usize,
        pairs: &[f32],
        dz: &mut [f32],
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_device::Simd;

    fn shapes() -> impl Iterator<Item = (usize, usize)> {
        let dims = (1..=33).chain([64, 128, 300, 513]);
        dims.flat_map(|dim| [1, 2, 3, 6, 7, 8, 9, 14, 27, 70].map(|vectors| (vectors, dim)))
    }

    #[test]
    fn the_pairs_are_plain_dot_products_to_the_bit() {
        for (vectors, dim) in shapes() {
            let z: Vec<f32> = (0..vectors * dim).map(|i| (i as f32 * 0.37).sin()).collect();
            let mut want = Vec::new();
            for i in 0..vectors {
                for j in 0..i {
                    let terms = (0..dim).map(|d| z[i * dim + d] * z[j * dim + d]);
                    want.push(terms.fold(0.0f32, |sum, term| sum + term));
                }
            }
            for simd in Simd::available() {
                let mut pairs = vec![f32::NAN; want.len()];
                forward(simd, &z, vectors, dim, &mut pairs);
                assert_eq!(pairs, want, "{vectors} x {dim} {simd:?}");
            }
        }
    }

    #[test]
    fn the_gradient_is_a_plain_sum_over_pairs_to_the_bit() {
        for (vectors, dim) in shapes() {
            let z: Vec<f32> = (0..vectors * dim).map(|i| (i as f32 * 0.37).sin()).collect();
            let count = vectors * (vectors - 1) / 2;
            let g: Vec<f32> = (0..count).map(|i| (i as f32 * 0.91).cos()).collect();
            let start: Vec<f32> = (0..vectors * dim).map(|i| (i as f32 * 0.1).cos()).collect();
            let mut want = start.clone();
            for i in 0..vectors {
                for j in 0..vectors {
                    let (high, low) = (i.max(j), i.min(j));
                    let s = if i == j { 0.0 } else { g[high * (high - 1) / 2 + low] };
                    for d in 0..dim {
                        want[i * dim + d] += s * z[j * dim + d];
                    }
                }
            }
            for simd in Simd::available() {
                let mut dz = start.clone();
                backward(simd, &z, vectors, dim, &g, &mut dz);
                assert_eq!(dz, want, "{vectors} x {dim} {simd:?}");
            }
        }
    }
}
