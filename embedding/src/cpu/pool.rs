//! Pooled lookup.
//!
//! ```text
//! for each bag: for each block of columns:
//!     sum = row of the first id (times its weight)         sums stay in registers
//!     for each further id: sum += its row (times its weight)
//!     out = sum (divided by the number of ids under mean)
//! ```
//! Each column is summed alone and from left to right, so blocks may be of any width. At 64
//! columns a block is 8 or 16 vector registers. While id `i` is added, the same block of id
//! `i + ahead` is prefetched, across the borders of bags.
//!
//! Cost: `ids * dim * size_of::<E>()` bytes read at random, `bags * dim * 4` written; two flops
//! or fewer an element. Memory is the bound.

use tessera_device::{Simd, simd_kernel};

use super::lanes::LANES;
use super::numbers::{Bf16, F16, Stored};
use super::rows::{RawRows, prefetch};

/// Bags of one feature and the table that they look up.
pub(crate) struct Bags<'a, E> {
    /// All slots of the table, (slots, dim).
    pub(crate) table: &'a [E],
    pub(crate) dim: usize,
    /// Slots of the bags that `offsets` names, and of those after them.
    pub(crate) slots: &'a [u64],
    /// A weight a slot.
    pub(crate) weights: Option<&'a [f32]>,
    /// Where bags begin and end in `slots`, (bags + 1).
    pub(crate) offsets: &'a [u64],
    /// Number of the first bag: its row of the output.
    pub(crate) first: usize,
    /// Whether sums are divided by the number of ids.
    pub(crate) mean: bool,
    /// First column of the output.
    pub(crate) column: usize,
}

/// Bytes of a table that are on their way at a time: enough to hide a miss, few enough to stay
/// near until they are used.
const AHEAD_BYTES: usize = 4 << 10;

/// Bags whose output is on its way: stores wait for their lines, too.
const OUT_AHEAD: usize = 4;

/// Ids to look ahead in a table with rows of `row_bytes`.
fn ids_ahead(row_bytes: usize) -> usize {
    (AHEAD_BYTES / row_bytes.max(1)).clamp(4, 64)
}

/// # Safety
/// As [`pool_fp32`].
#[inline(always)]
unsafe fn pool_any<E: Stored>(bags: &Bags<'_, E>, out: &RawRows<'_, f32>) {
    // SAFETY: the caller's guarantee, handed on.
    unsafe {
        match bags.weights {
            None => pool::<E, false>(bags, &[], out),
            Some(weights) => pool::<E, true>(bags, weights, out),
        }
    }
}

/// # Safety
/// As [`pool_fp32`].
#[inline(always)]
unsafe fn pool<E: Stored, const WEIGHTED: bool>(
    bags: &Bags<'_, E>,
    weights: &[f32],
    out: &RawRows<'_, f32>,
) {
    let dim = bags.dim;
    let ahead = ids_ahead(dim * size_of::<E>());
    let first = bags.offsets.first().map_or(0, |&offset| offset as usize);
    let end = bags.offsets.last().map_or(0, |&offset| offset as usize);
    for &slot in &bags.slots[first..end.min(first + ahead)] {
        prefetch(bags.table.as_ptr().wrapping_add(slot as usize * dim), dim);
    }
    for (bag, pair) in (bags.first..).zip(bags.offsets.windows(2)) {
        out.prefetch_columns(bag + OUT_AHEAD, bags.column, dim);
        // SAFETY: the caller is the only user of these columns of these bags.
        let out = unsafe { out.columns(bag, bags.column, dim) };
        let (low, high) = (pair[0] as usize, pair[1] as usize);
        if low == high {
            out.fill(0.0);
            continue;
        }
        let ids = Ids { low, high, end, ahead };
        let mut column = 0;
        macro_rules! block {
            ($width:literal) => {{
                let sum = sum_block::<E, $width, WEIGHTED>(bags, weights, &ids, column);
                out[column..column + $width].copy_from_slice(&sum);
                column += $width;
            }};
        }
        while dim - column >= 64 {
            block!(64);
        }
        let rest = dim - column;
        if rest & 32 != 0 {
            block!(32);
        }
        if rest & 16 != 0 {
            block!(16);
        }
        if rest & 8 != 0 {
            block!(8);
        }
        if rest & 4 != 0 {
            block!(4);
        }
        if rest & 2 != 0 {
            block!(2);
        }
        if rest & 1 != 0 {
            block!(1);
        }
        if bags.mean {
            let count = (high - low) as f32;
            for out in &mut out[..column] {
                *out /= count;
            }
        }
    }
}

/// Places of a bag's ids, and where ids to prefetch end.
struct Ids {
    low: usize,
    high: usize,
    end: usize,
    ahead: usize,
}

/// Sum of `WIDTH` columns from `column` on over a bag that is not empty.
#[inline(always)]
fn sum_block<E: Stored, const WIDTH: usize, const WEIGHTED: bool>(
    bags: &Bags<'_, E>,
    weights: &[f32],
    ids: &Ids,
    column: usize,
) -> [f32; WIDTH] {
    let mut sum = term::<E, WIDTH, WEIGHTED>(bags, weights, ids, ids.low, column);
    for i in ids.low + 1..ids.high {
        let term = term::<E, WIDTH, WEIGHTED>(bags, weights, ids, i, column);
        for c in 0..WIDTH {
            sum[c] += term[c];
        }
    }
    sum
}

/// What id `i` adds to its bag, in `WIDTH` columns from `column` on.
#[inline(always)]
fn term<E: Stored, const WIDTH: usize, const WEIGHTED: bool>(
    bags: &Bags<'_, E>,
    weights: &[f32],
    ids: &Ids,
    i: usize,
    column: usize,
) -> [f32; WIDTH] {
    if i + ids.ahead < ids.end {
        let next = bags.slots[i + ids.ahead] as usize * bags.dim + column;
        prefetch(bags.table.as_ptr().wrapping_add(next), WIDTH);
    }
    let row = &bags.table[bags.slots[i] as usize * bags.dim + column..][..WIDTH];
    let mut term = [0.0; WIDTH];
    if E::LOADS_GROUPS && WIDTH.is_multiple_of(LANES) {
        let groups = term.as_chunks_mut::<LANES>().0;
        for (term, row) in groups.iter_mut().zip(row.as_chunks::<LANES>().0) {
            *term = E::load_group(row).to_array();
        }
    } else {
        for (term, &element) in term.iter_mut().zip(row) {
            *term = element.load();
        }
    }
    if WEIGHTED {
        let weight = weights[i];
        for term in &mut term {
            *term *= weight;
        }
    }
    term
}

macro_rules! pool_kernel {
    ($name:ident, $kernel:ident, $body:ident, $element:ty) => {
        #[inline(always)]
        fn $body(bags: &Bags<'_, $element>, out: &RawRows<'_, f32>) {
            // SAFETY: private to the function below, whose caller guarantees it.
            unsafe { pool_any(bags, out) }
        }
        simd_kernel!(fn $kernel = $body(bags: &Bags<'_, $element>, out: &RawRows<'_, f32>));

        /// Pools bags into their columns of `out`, (bags, stride).
        ///
        /// # Safety
        /// While this runs, nobody else reaches these columns of these bags.
        pub(crate) unsafe fn $name(
            simd: Simd,
            bags: &Bags<'_, $element>,
            out: &RawRows<'_, f32>,
        ) {
            $kernel(simd, bags, out);
        }
    };
}
pool_kernel!(pool_fp32, kernel_fp32, body_fp32, f32);
pool_kernel!(pool_fp16, kernel_fp16, body_fp16, F16<false>);
pool_kernel!(pool_f16c, kernel_f16c, body_f16c, F16<true>);
pool_kernel!(pool_bf16, kernel_bf16, body_bf16, Bf16);
