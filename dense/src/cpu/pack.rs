//! Copies of factors in the order in which a register block reads them, padded with zeros.
//!
//! ```text
//! panels (right factor)   for each block of depth, for each group of columns:  (depth, cols)
//! rows   (left factor)    for each block of depth: its rows, one after the other
//! groups (left factor^T)  for each block of depth, for each group of rows:     (depth, rows)
//! ```
//!
//! One pass over the values: a quarter of a cycle an element, against columns / 8 cycles of
//! multiplication for an element on the left and rows / 8 for one on the right.

use std::mem::MaybeUninit;

use tessera_device::simd_kernel;

use super::vector::turn_8_rows;

/// Elements between the copies of two rows or two groups of rows, beyond their own: a distance of
/// a large power of two would put them on the same cache sets.
pub const GAP: usize = 16;

/// Most columns that [`groups`] copies.
pub const HEIGHT: usize = 96;

/// Rows by which [`groups`] asks for values before it copies them: each is a piece of a long row,
/// which hardware does not foresee.
#[cfg(target_arch = "x86_64")]
const AHEAD: usize = 8;

#[inline(always)]
fn copy_columns<const C: usize>(
    b: &[f32],
    stride: usize,
    width: usize,
    depth: usize,
    out: &mut [f32],
) {
    for (p, b) in b.chunks(stride).take(depth).enumerate() {
        let (whole, rest) = b[..width].as_chunks::<C>();
        for (panel, b) in whole.iter().enumerate() {
            out[(panel * depth + p) * C..][..C].copy_from_slice(b);
        }
        if !rest.is_empty() {
            let out = &mut out[(whole.len() * depth + p) * C..][..C];
            out[..rest.len()].copy_from_slice(rest);
            out[rest.len()..].fill(0.0);
        }
    }
}

#[inline(always)]
fn panels_body(b: &[f32], stride: usize, width: usize, depth: usize, cols: usize, out: &mut [f32]) {
    match cols {
        8 => copy_columns::<8>(b, stride, width, depth, out),
        16 => copy_columns::<16>(b, stride, width, depth, out),
        _ => copy_columns::<32>(b, stride, width, depth, out),
    }
}

simd_kernel! {
    /// Copies `width` columns of `depth` rows `stride` apart to panels (depth, cols), one after
    /// the other; cols is 8, 16 or 32.
    pub fn panels = panels_body(
        b: &[f32],
        stride: usize,
        width: usize,
        depth: usize,
        cols: usize,
        out: &mut [f32],
    )
}

#[inline(always)]
fn turned_panels_body(
    b: &[f32],
    stride: usize,
    width: usize,
    depth: usize,
    cols: usize,
    out: &mut [f32],
) {
    for (panel, out) in out.chunks_mut(depth * cols).enumerate() {
        let first = panel * cols;
        let width = cols.min(width - first);
        if width < cols {
            out.fill(0.0);
        }
        for c0 in (0..width).step_by(8) {
            let rows = 8.min(width - c0);
            let rest = if rows == 8 { depth % 4 } else { depth };
            if rows == 8 {
                let of = |c: usize| {
                    &b[(first + c0 + c) * stride..][..depth - rest].as_chunks::<4>().0[..depth / 4]
                };
                let (r, s, t, u) = (of(0), of(1), of(2), of(3));
                let (v, w, x, y) = (of(4), of(5), of(6), of(7));
                for i in 0..depth / 4 {
                    let rows = [&r[i], &s[i], &t[i], &u[i], &v[i], &w[i], &x[i], &y[i]];
                    for (j, values) in turn_8_rows(rows).iter().enumerate() {
                        out[(4 * i + j) * cols + c0..][..8].copy_from_slice(values);
                    }
                }
            }
            for p in depth - rest..depth {
                for c in c0..c0 + rows {
                    out[p * cols + c] = b[(first + c) * stride + p];
                }
            }
        }
    }
}

simd_kernel! {
    /// As [`panels`] from the transposed factor: its `width` rows of depth elements, `stride`
    /// apart.
    pub fn turned_panels = turned_panels_body(
        b: &[f32],
        stride: usize,
        width: usize,
        depth: usize,
        cols: usize,
        out: &mut [f32],
    )
}

/// Memory that holds something.
fn held(values: &[f32]) -> &[MaybeUninit<f32>] {
    // SAFETY: the same memory, of which less is promised.
    unsafe { &*(std::ptr::from_ref(values) as *const [MaybeUninit<f32>]) }
}

#[inline(always)]
fn copy_groups<const R: usize>(
    a: &[f32],
    stride: usize,
    height: usize,
    depth: usize,
    out: &mut [MaybeUninit<f32>],
    sums: Option<&mut [f32]>,
) {
    let apart = R * depth + GAP;
    let mut part = [0.0f32; HEIGHT];
    let part = &mut part[..if sums.is_some() { height } else { 0 }];
    for (p, row) in a.chunks(stride).take(depth).enumerate() {
        #[cfg(target_arch = "x86_64")]
        if let Some(ahead) = a.get((p + AHEAD) * stride..) {
            for a in ahead[..height.min(ahead.len())].chunks(16) {
                // SAFETY: a hint; the address is that of an element.
                unsafe {
                    std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                        a.as_ptr().cast(),
                    );
                }
            }
        }
        for (part, a) in part.iter_mut().zip(row) {
            *part += a;
        }
        let (whole, rest) = held(&row[..height]).as_chunks::<R>();
        for (group, a) in whole.iter().enumerate() {
            out[group * apart + p * R..][..R].copy_from_slice(a);
        }
        if !rest.is_empty() {
            let out = &mut out[whole.len() * apart + p * R..][..R];
            out[..rest.len()].copy_from_slice(rest);
            out[rest.len()..].fill(MaybeUninit::new(0.0));
        }
    }
    for (sum, part) in sums.into_iter().flatten().zip(part) {
        *sum += *part;
    }
}

#[inline(always)]
fn groups_body(
    a: &[f32],
    stride: usize,
    height: usize,
    depth: usize,
    rows: usize,
    out: &mut [MaybeUninit<f32>],
    sums: Option<&mut [f32]>,
) {
    match rows {
        4 => copy_groups::<4>(a, stride, height, depth, out, sums),
        6 => copy_groups::<6>(a, stride, height, depth, out, sums),
        _ => copy_groups::<12>(a, stride, height, depth, out, sums),
    }
}

simd_kernel! {
    /// Copies `height` columns, at most [`HEIGHT`], of `depth` rows `stride` apart, in groups of
    /// `rows` columns (4, 6 or 12), to `out`: (depth, rows) for each group, groups
    /// `rows * depth + GAP` apart. Adds each column's sum, from the first row on, to `sums`.
    pub fn groups = groups_body(
        a: &[f32],
        stride: usize,
        height: usize,
        depth: usize,
        rows: usize,
        out: &mut [MaybeUninit<f32>],
        sums: Option<&mut [f32]>,
    )
}

/// Copies `height` rows of `depth` elements, `stride` apart, to rows `depth + GAP` apart, and
/// zeros to the rows up to a multiple of `rows`.
pub fn rows(
    a: &[f32],
    stride: usize,
    height: usize,
    depth: usize,
    rows: usize,
    out: &mut [MaybeUninit<f32>],
) {
    for (a, out) in a.chunks(stride).take(height).zip(out.chunks_mut(depth + GAP)) {
        out[..depth].copy_from_slice(held(&a[..depth]));
    }
    for r in height..height.next_multiple_of(rows) {
        out[r * (depth + GAP)..][..depth].fill(MaybeUninit::new(0.0));
    }
}
