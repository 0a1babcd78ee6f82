//! Register blocks of matrix products: a few rows by a few vectors of columns, kept in registers
//! over the whole depth of a block.
//!
//! ```text
//! for p in 0..k:  for r in rows:  c[r] += a[r, p] * b[p]      (a broadcast, b and c vectors)
//! ```
//!
//! One kernel for each instruction set. Those with fused multiply-add give the same bits: an
//! element is one chain of fused operations from 0 in the order of p, whatever the block's shape.

use tessera_device::Simd;

/// What a kernel works on.
#[derive(Clone, Copy)]
pub struct Block {
    /// Terms of each sum.
    pub k: usize,
    /// Element (r, p) of the left factor is at `a + r * a_row + p * a_step`.
    pub a: *const f32,
    /// See `a`.
    pub a_row: usize,
    /// See `a`.
    pub a_step: usize,
    /// Element (p, c) of the right factor is at `b + p * cols + c`.
    pub b: *const f32,
    /// Element (r, c) of the result is at `c + r * c_row + c`.
    pub c: *mut f32,
    /// See `c`.
    pub c_row: usize,
    /// Whether the product is added to what the result holds, which is else never read.
    pub add: bool,
}

/// A kernel and its shape.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Rows of a block.
    pub rows: usize,
    /// Columns of a block.
    pub cols: usize,
    run: unsafe fn(Block),
}

/// Most rows and columns of a kernel's block.
pub const ROWS_MAX: usize = 12;
/// See [`ROWS_MAX`].
pub const COLS_MAX: usize = 32;

impl Kernel {
    /// The kernel for an instruction set.
    pub fn of(simd: Simd) -> Self {
        #[cfg(target_arch = "x86_64")]
        match simd {
            Simd::Avx512 => return Self { rows: 12, cols: 32, run: avx512 },
            Simd::Avx2 if std::arch::is_x86_feature_detected!("fma") => {
                return Self { rows: 6, cols: 16, run: avx2 };
            }
            _ => {}
        }
        let _ = simd;
        Self { rows: PORTABLE.0, cols: PORTABLE.1, run: portable }
    }

    /// Computes a block.
    ///
    /// # Safety
    /// All elements of the factors that [`Block`] names, for this kernel's rows and columns, can
    /// be read; those of the result can be written, and read when they are added to, and nobody
    /// else touches them.
    #[inline]
    pub unsafe fn run(self, block: Block) {
        // SAFETY: the caller's promise; `of` chose instructions that the machine has.
        unsafe { (self.run)(block) }
    }
}

/// Defines a kernel of `$rows` rows by `$vectors` vectors of `$lanes` columns.
#[cfg(target_arch = "x86_64")]
macro_rules! kernel {
    ($name:ident, $features:literal, $rows:literal x $vectors:literal x $lanes:literal,
     $zero:ident, $load:ident, $spread:ident, $fma:ident, $add:ident, $store:ident) => {
        /// # Safety
        /// As [`Kernel::run`], for this shape, on a machine that has the instructions.
        #[target_feature(enable = $features)]
        unsafe fn $name(block: Block) {
            use std::arch::x86_64::*;
            const COLS: usize = $vectors * $lanes;
            let Block { k, mut a, a_row, a_step, mut b, c, c_row, add } = block;
            let mut sums = [[$zero(); $vectors]; $rows];
            for _ in 0..k {
                // SAFETY: step p reads elements (p, 0..COLS) of b and (0..rows, p) of a, which
                // the caller lets us read; the pointers end at most one step past the last.
                unsafe {
                    let columns: [_; $vectors] = std::array::from_fn(|v| $load(b.add(v * $lanes)));
                    for r in 0..$rows {
                        let x = $spread(*a.add(r * a_row));
                        for v in 0..$vectors {
                            sums[r][v] = $fma(x, columns[v], sums[r][v]);
                        }
                    }
                    a = a.wrapping_add(a_step);
                    b = b.wrapping_add(COLS);
                }
            }
            for r in 0..$rows {
                for v in 0..$vectors {
                    // SAFETY: element (r, v * lanes) of the result and its lanes are ours.
                    unsafe {
                        let at = c.add(r * c_row + v * $lanes);
                        let sum = if add { $add($load(at), sums[r][v]) } else { sums[r][v] };
                        $store(at, sum);
                    }
                }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
kernel!(
    avx2,
    "avx2,fma",
    6 x 2 x 8,
    _mm256_setzero_ps,
    _mm256_loadu_ps,
    _mm256_set1_ps,
    _mm256_fmadd_ps,
    _mm256_add_ps,
    _mm256_storeu_ps
);

#[cfg(target_arch = "x86_64")]
kernel!(
    avx512,
    "avx512f",
    12 x 2 x 16,
    _mm512_setzero_ps,
    _mm512_loadu_ps,
    _mm512_set1_ps,
    _mm512_fmadd_ps,
    _mm512_add_ps,
    _mm512_storeu_ps
);

/// Rows and columns of the portable kernel: the accumulators fit in 16 registers of 4 lanes on
/// x86-64 and in 32 on aarch64.
const PORTABLE: (usize, usize) = if cfg!(target_arch = "aarch64") { (6, 16) } else { (4, 8) };

/// Whether a fused multiply-add is an instruction of every machine of the target; elsewhere it
/// would be a function call, so that multiplication and addition stay apart.
const FUSED: bool = cfg!(any(target_arch = "aarch64", target_feature = "fma"));

/// # Safety
/// As [`Kernel::run`], for [`PORTABLE`].
unsafe fn portable(block: Block) {
    const ROWS: usize = PORTABLE.0;
    const COLS: usize = PORTABLE.1;
    let Block { k, a, a_row, a_step, b, c, c_row, add } = block;
    let mut sums = [[0.0f32; COLS]; ROWS];
    for p in 0..k {
        // SAFETY: element (p, 0..COLS) of b, which the caller lets us read.
        let columns = unsafe { &*b.add(p * COLS).cast::<[f32; COLS]>() };
        for (r, sums) in sums.iter_mut().enumerate() {
            // SAFETY: element (r, p) of a, which the caller lets us read.
            let x = unsafe { *a.add(r * a_row + p * a_step) };
            for (sum, y) in sums.iter_mut().zip(columns) {
                *sum = if FUSED { x.mul_add(*y, *sum) } else { *sum + x * y };
            }
        }
    }
    for (r, sums) in sums.iter().enumerate() {
        // SAFETY: elements (r, 0..COLS) of the result, which are ours.
        let row = unsafe { &mut *c.add(r * c_row).cast::<[f32; COLS]>() };
        for (c, sum) in row.iter_mut().zip(sums) {
            *c = if add { *c + sum } else { *sum };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every kernel against plain loops; those with fused multiply-add to the bit.
    #[test]
    fn blocks_are_plain_chains_of_sums() {
        for simd in Simd::available() {
            let kernel = Kernel::of(simd);
            let (rows, cols) = (kernel.rows, kernel.cols);
            assert!(rows <= ROWS_MAX && cols <= COLS_MAX);
            let fused = FUSED || simd != Simd::Baseline && kernel.cols > PORTABLE.1;
            for (k, add) in [(1, false), (2, true), (13, false), (37, true)] {
                let value = |i: usize| (i as f32 * 0.37).sin();
                let b: Vec<f32> = (0..k * cols).map(|i| value(i + 3)).collect();
                for (a_row, a_step) in [(k + 5, 1), (1, rows + 2)] {
                    let a: Vec<f32> = (0..(rows + 2) * (k + 5)).map(value).collect();
                    let c_row = cols + 3;
                    let start = if add { 0.5 } else { f32::NAN };
                    let mut c = vec![start; rows * c_row];
                    let to = c.as_mut_ptr();
                    let (a_at, b_at) = (a.as_ptr(), b.as_ptr());
                    let block = Block { k, a: a_at, a_row, a_step, b: b_at, c: to, c_row, add };
                    // SAFETY: the vectors are as long as the block says.
                    unsafe { kernel.run(block) };
                    for r in 0..rows {
                        for j in 0..cols {
                            let sum = (0..k).fold(0.0f32, |sum, p| {
                                let (x, y) = (a[r * a_row + p * a_step], b[p * cols + j]);
                                if fused { x.mul_add(y, sum) } else { sum + x * y }
                            });
                            let want = if add { 0.5 + sum } else { sum };
                            assert_eq!(c[r * c_row + j].to_bits(), want.to_bits(), "{simd:?}");
                        }
                        let gap = &c[r * c_row + cols..][..3];
                        assert!(gap.iter().all(|x| x.to_bits() == start.to_bits()));
                    }
                }
            }
        }
    }
}
