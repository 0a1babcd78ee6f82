//! Backward pass and optimizer in one: a row's gradient is summed and the row moved while both
//! are in the first-level cache.
//!
//! ```text
//! for each row of a part (rows ascending):
//!     g = sum over its occurrences, in canonical order, of grad[bag] * scale
//!     g not finite -> count, leave the row
//!     clip g; load weights and state as float32; apply the rule
//!     anything not finite -> count, leave the row
//!     store state; store weights, rounded stochastically where they have 16 bits
//! ```
//! Cost, per row: weights and state read and written once, per occurrence `dim` numbers of
//! gradient read. Rows, states and gradients to come are prefetched.

use tessera_device::{Philox, Simd, simd_kernel};

use super::lanes::{LANES, Lanes};
use super::numbers::{Bf16, F16, Stored};
use super::rows::{RawRows, prefetch};
use super::rules::{self, Rule, all_finite, sum_squares_f64};
use crate::plan::COLUMN_BLOCK;
use crate::{Clip, Marked, Window};

/// Rows, and gradients, to look ahead.
const ROWS_AHEAD: usize = 16;
const TERMS_AHEAD: usize = 16;

/// Weights of a table, for several owners to write.
#[derive(Debug)]
pub(crate) enum Weights<'a> {
    Fp32(RawRows<'a, f32>),
    Fp16(RawRows<'a, F16<false>>),
    F16c(RawRows<'a, F16<true>>),
    Bf16(RawRows<'a, Bf16>),
}

/// What an update needs of a table.
#[derive(Debug)]
pub(crate) struct TableUpdate<'a> {
    pub(crate) rule: Rule,
    pub(crate) clip: Clip,
    pub(crate) weights: Weights<'a>,
    pub(crate) state: RawRows<'a, f32>,
    /// Columns of the first and of the second state tensor; 0 for none.
    pub(crate) state_columns: (usize, usize),
    /// Generator of this step's rounding: block (row, column / 8) of the whole table.
    pub(crate) rounding: Philox,
    /// Where the table lies in the whole one.
    pub(crate) window: Window,
}

/// Rows of a part and where the terms of their gradients are.
#[derive(Debug)]
pub(crate) struct Gradients<'a> {
    pub(crate) dim: usize,
    /// Numbers of the rows, ascending, and their slots.
    pub(crate) rows: &'a [u64],
    pub(crate) slots: &'a [u64],
    /// Sums of squares over all columns of the whole table, one a row; empty where the rows are
    /// whole.
    pub(crate) squares: &'a [f32],
    /// As in the grouping: (rows + 1), terms, scales.
    pub(crate) starts: &'a [u32],
    pub(crate) terms: &'a [u32],
    pub(crate) scales: &'a [f32],
    /// Gradient of the pooled vectors, (bags, stride).
    pub(crate) grad: &'a [f32],
    pub(crate) stride: usize,
    pub(crate) bags: usize,
    /// First columns of the table's features.
    pub(crate) columns: &'a [usize],
}

/// One row in work, padded with zeros to whole groups.
#[derive(Debug, Default)]
pub(crate) struct RowBuffers {
    g: Vec<Lanes>,
    w: Vec<Lanes>,
    a: Vec<Lanes>,
    b: Vec<Lanes>,
    words: Vec<[u32; LANES]>,
}

impl RowBuffers {
    /// Makes room for rows of `dim` columns.
    fn fit(&mut self, dim: usize) {
        let groups = dim.div_ceil(LANES);
        for buffer in [&mut self.g, &mut self.w, &mut self.a, &mut self.b] {
            buffer.clear();
            buffer.resize(groups, Lanes::zero());
        }
        self.words.clear();
        self.words.resize(groups, [0; LANES]);
    }
}

/// What one owner of rows works with, and what it did.
#[derive(Debug, Default)]
pub(crate) struct Owner {
    pub(crate) row: RowBuffers,
    pub(crate) counts: Counts,
    /// Squared norm of each row's gradient.
    pub(crate) norms: Vec<f64>,
}

/// Rows moved, and rows left as they were.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) updated: u64,
    pub(crate) nonfinite: u64,
}

impl Gradients<'_> {
    /// The pooled gradient of a term.
    #[inline(always)]
    fn term(&self, dim: usize, term: u32) -> &[f32] {
        let (feature, bag) = match self.columns.len() {
            1 => (0, term as usize),
            _ => (term as usize / self.bags, term as usize % self.bags),
        };
        &self.grad[bag * self.stride + self.columns[feature]..][..dim]
    }

    /// Sums row `i`'s gradient into `g`, whose padding it zeroes. `dim` is the table's: a
    /// constant where the caller knows it.
    #[inline(always)]
    fn sum(&self, dim: usize, i: usize, g: &mut [Lanes]) {
        let (low, high) = (self.starts[i] as usize, self.starts[i + 1] as usize);
        for place in low..high {
            if let Some(&next) = self.terms.get(place + TERMS_AHEAD) {
                prefetch(self.term(dim, next).as_ptr(), dim);
            }
            let term = self.term(dim, self.terms[place]);
            // A scale of 1 changes no bit: it is left out.
            match (place == low, self.scales.get(place)) {
                (true, None) => each_group(g, term, |_, term| term),
                (false, None) => each_group(g, term, |g, term| g + term),
                (true, Some(&scale)) => {
                    let scale = Lanes::splat(scale);
                    each_group(g, term, |_, term| term * scale);
                }
                (false, Some(&scale)) => {
                    let scale = Lanes::splat(scale);
                    each_group(g, term, |g, term| g + term * scale);
                }
            }
        }
    }
}

/// Replaces each group of `g` by `f` of it and of the same columns of `term`, whose last group
/// is padded with zeros.
#[inline(always)]
fn each_group(g: &mut [Lanes], term: &[f32], f: impl Fn(Lanes, Lanes) -> Lanes) {
    let (groups, tail) = term.as_chunks::<LANES>();
    for (g, &term) in g.iter_mut().zip(groups) {
        *g = f(*g, Lanes::from_array(term));
    }
    if let Some(g) = g.get_mut(groups.len()) {
        *g = f(*g, padded(tail));
    }
}

/// The columns of a tail, and zeros.
#[inline(always)]
fn padded<E: Stored>(tail: &[E]) -> Lanes {
    let mut columns = [0.0; LANES];
    // A loop of known length: one over the tail would become a call of memcpy.
    for (c, column) in columns.iter_mut().enumerate() {
        if let Some(element) = tail.get(c) {
            *column = element.load();
        }
    }
    Lanes::from_array(columns)
}

/// Copies elements into groups and zeroes the padding of the last.
#[inline(always)]
fn load<E: Stored>(to: &mut [Lanes], from: &[E]) {
    let (groups, tail) = from.as_chunks::<LANES>();
    for (to, from) in to.iter_mut().zip(groups) {
        *to = E::load_group(from);
    }
    if !tail.is_empty() {
        to[groups.len()] = padded(tail);
    }
}

/// Copies groups over elements, without the padding of the last.
#[inline(always)]
fn store<E: Stored>(to: &mut [E], mut from: impl Iterator<Item = [E; LANES]>) {
    let (groups, tail) = to.as_chunks_mut::<LANES>();
    for (to, from) in groups.iter_mut().zip(&mut from) {
        *to = from;
    }
    if !tail.is_empty()
        && let Some(last) = from.next()
    {
        // A loop of known length, as in `padded`.
        for (c, element) in last.into_iter().enumerate() {
            if let Some(to) = tail.get_mut(c) {
                *to = element;
            }
        }
    }
}

/// Stores weights, rounded where `E` rounds; false, and nothing written, when one overflows.
#[inline(always)]
fn store_weights<E: Stored>(
    to: &mut [E],
    from: &[Lanes],
    rounding: Philox,
    (row, first_block): (u64, u64),
    words: &mut [[u32; LANES]],
) -> bool {
    if !E::ROUNDS {
        store(to, from.iter().map(|x| x.to_array().map(|x| E::from_bits(x.to_bits()))));
        return true;
    }
    let mut largest = [0; LANES];
    for (block, (words, from)) in (first_block..).zip(words.iter_mut().zip(from)) {
        let x = from.to_array();
        // 16 of a block's 128 bits for each column.
        let random = rounding.block(row, block);
        let mut bits = [0; LANES];
        for c in 0..LANES {
            bits[c] = E::round(x[c], random[c % 4] >> (c / 4 * 16));
        }
        for c in 0..LANES {
            largest[c] = largest[c].max(bits[c] & E::INFINITY);
        }
        *words = bits;
    }
    if largest.contains(&E::INFINITY) {
        return false;
    }
    store(to, words.iter().map(|bits| bits.map(E::from_bits)));
    true
}

/// Clips a gradient.
#[inline(always)]
fn clip(clip: Clip, g: &mut [Lanes]) {
    match clip {
        Clip::None => {}
        Clip::Value(limit) => {
            let (low, high) = (Lanes::splat(-limit), Lanes::splat(limit));
            for g in g {
                *g = g.max(low).min(high);
            }
        }
        Clip::Scale(scale) => {
            let scale = Lanes::splat(scale);
            for g in g {
                *g = *g * scale;
            }
        }
    }
}

/// Loads a state tensor of a row: all columns, one number, or none.
#[inline(always)]
fn load_state(to: &mut [Lanes], from: &[f32]) {
    match from {
        [] => {}
        &[number] => to[0] = padded(&[number]),
        columns => load(to, columns),
    }
}

/// Whether a state tensor of `columns` columns is finite.
#[inline(always)]
fn state_finite(state: &[Lanes], columns: usize) -> bool {
    match columns {
        // Reading the whole group back right after its first number was written would stall.
        1 => state[0].to_array()[0].is_finite(),
        _ => all_finite(state),
    }
}

/// Stores what [`load_state`] loads.
#[inline(always)]
fn store_state(to: &mut [f32], from: &[Lanes]) {
    match to {
        [] => {}
        [number] => *number = from[0].to_array()[0],
        columns => store(columns, from.iter().map(|x| x.to_array())),
    }
}

/// Moves the rows of a part whose table has `GROUPS` whole groups of columns, known when this is
/// compiled, so that a row in work is an array and every loop over it straight code; 0 is any
/// width, in `buffers`.
///
/// # Safety
/// As [`update_rows`].
#[inline(always)]
unsafe fn update_body<E: Stored, const GROUPS: usize>(
    table: &TableUpdate<'_>,
    weights: &RawRows<'_, E>,
    gradients: &Gradients<'_>,
    buffers: &mut RowBuffers,
) -> Counts {
    let mut arrays = [[Lanes::zero(); GROUPS]; 4];
    let mut word_array = [[0; LANES]; GROUPS];
    let (dim, g, w, a, b, words) = if GROUPS > 0 {
        let [g, w, a, b] = &mut arrays;
        (GROUPS * LANES, &mut g[..], &mut w[..], &mut a[..], &mut b[..], &mut word_array[..])
    } else {
        buffers.fit(gradients.dim);
        let RowBuffers { g, w, a, b, words } = buffers;
        (gradients.dim, &mut g[..], &mut w[..], &mut a[..], &mut b[..], &mut words[..])
    };
    let (columns_a, columns_b) = table.state_columns;
    // Clipping by value would make an infinite gradient finite. Otherwise the row itself shows it.
    let check_gradient = matches!(table.clip, Clip::Value(_)) || !table.rule.carries_nonfinite();
    let first_block = (table.window.first_column / LANES) as u64;
    let mut counts = Counts::default();
    for (i, (&row, &slot)) in gradients.rows.iter().zip(gradients.slots).enumerate() {
        if let Some(&next) = gradients.slots.get(i + ROWS_AHEAD) {
            weights.prefetch_columns(next as usize, 0, dim);
            table.state.prefetch(next);
        }
        gradients.sum(dim, i, g);
        if check_gradient && !all_finite(g) {
            counts.nonfinite += 1;
            continue;
        }
        clip(table.clip, g);
        // SAFETY: no other owner has this slot, says the caller, and one row is in work at a
        // time.
        let stored = unsafe { weights.columns(slot as usize, 0, dim) };
        load(w, stored);
        let state = if columns_a > 0 {
            // SAFETY: as above.
            unsafe { table.state.row(slot) }
        } else {
            &mut []
        };
        let (state_a, state_b) = state.split_at_mut(columns_a);
        let a = &mut a[..columns_a.div_ceil(LANES)];
        let b = &mut b[..columns_b.div_ceil(LANES)];
        load_state(a, state_a);
        load_state(b, state_b);
        let squares = gradients.squares.get(i).copied();
        table.rule.apply(table.window.dim, squares, g, w, a, b);
        let finite = all_finite(w) && state_finite(a, columns_a) && state_finite(b, columns_b);
        let place = (row + table.window.first_row, first_block);
        if finite && store_weights(stored, w, table.rounding, place, words) {
            store_state(state_a, a);
            store_state(state_b, b);
            counts.updated += 1;
        } else {
            counts.nonfinite += 1;
        }
    }
    counts
}

macro_rules! update_kernel {
    ($name:ident, $body:ident, $element:ty, $groups:literal) => {
        #[inline(always)]
        fn $body(
            table: &TableUpdate<'_>,
            weights: &RawRows<'_, $element>,
            gradients: &Gradients<'_>,
            buffers: &mut RowBuffers,
        ) -> Counts {
            // SAFETY: private to `update_rows`, whose caller guarantees it.
            unsafe { update_body::<_, $groups>(table, weights, gradients, buffers) }
        }
        simd_kernel!(fn $name = $body(
            table: &TableUpdate<'_>,
            weights: &RawRows<'_, $element>,
            gradients: &Gradients<'_>,
            buffers: &mut RowBuffers,
        ) -> Counts);
    };
}
update_kernel!(fp32_any, fp32_any_body, f32, 0);
update_kernel!(fp32_16, fp32_16_body, f32, 2);
update_kernel!(fp32_64, fp32_64_body, f32, 8);
update_kernel!(fp32_128, fp32_128_body, f32, 16);
update_kernel!(fp16_any, fp16_any_body, F16<false>, 0);
update_kernel!(f16c_any, f16c_any_body, F16<true>, 0);
update_kernel!(bf16_any, bf16_any_body, Bf16, 0);

/// Moves the rows of a part.
///
/// # Safety
/// While this runs, nobody else reaches the slots that `gradients` names in the table's planes,
/// and those slots are different.
pub(crate) unsafe fn update_rows(
    simd: Simd,
    table: &TableUpdate<'_>,
    gradients: &Gradients<'_>,
    buffers: &mut RowBuffers,
) -> Counts {
    match &table.weights {
        Weights::Fp32(weights) => {
            let kernel = match gradients.dim {
                16 => fp32_16,
                64 => fp32_64,
                128 => fp32_128,
                _ => fp32_any,
            };
            kernel(simd, table, weights, gradients, buffers)
        }
        Weights::Fp16(weights) => fp16_any(simd, table, weights, gradients, buffers),
        Weights::F16c(weights) => f16c_any(simd, table, weights, gradients, buffers),
        Weights::Bf16(weights) => bf16_any(simd, table, weights, gradients, buffers),
    }
}

#[inline(always)]
fn row_gradients_body(
    gradients: &Gradients<'_>,
    marked: Marked<'_>,
    buffers: &mut RowBuffers,
    out: &mut [f32],
) {
    buffers.fit(gradients.dim);
    for (i, out) in out.chunks_exact_mut(gradients.dim).enumerate() {
        if let Marked::With { marks, mark } = marked
            && marks[i] != mark
        {
            continue;
        }
        gradients.sum(gradients.dim, i, &mut buffers.g);
        store(out, buffers.g.iter().map(|x| x.to_array()));
    }
}

simd_kernel! {
    /// The summed gradient of each marked row of a part, (rows, dim).
    pub(crate) fn row_gradients = row_gradients_body(
        gradients: &Gradients<'_>,
        marked: Marked<'_>,
        buffers: &mut RowBuffers,
        out: &mut [f32],
    )
}

/// Rows of weights to read as float32, one at a time.
pub(crate) type ReadRow<'a> = &'a (dyn Fn(u64, &mut [f32]) + Sync);

#[inline(always)]
fn block_squares_body(
    gradients: &Gradients<'_>,
    clipping: Clip,
    l2: f32,
    weights: ReadRow<'_>,
    buffers: &mut RowBuffers,
    out: &mut [f32],
) {
    let dim = gradients.dim;
    buffers.fit(dim);
    let mut row = vec![0.0; dim];
    for (i, sums) in out.chunks_exact_mut(dim.div_ceil(COLUMN_BLOCK)).enumerate() {
        gradients.sum(dim, i, &mut buffers.g);
        clip(clipping, &mut buffers.g);
        if l2 != 0.0 {
            weights(gradients.slots[i], &mut row);
            load(&mut buffers.w, &row);
        }
        rules::block_squares(&buffers.g, &buffers.w, l2, sums);
    }
}

simd_kernel! {
    /// The sums of squares over blocks of columns of each row of a part, (rows, blocks).
    pub(crate) fn block_squares = block_squares_body(
        gradients: &Gradients<'_>,
        clipping: Clip,
        l2: f32,
        weights: ReadRow<'_>,
        buffers: &mut RowBuffers,
        out: &mut [f32],
    )
}

#[inline(always)]
fn square_norms_body(gradients: &Gradients<'_>, buffers: &mut RowBuffers, norms: &mut Vec<f64>) {
    buffers.fit(gradients.dim);
    norms.clear();
    for i in 0..gradients.rows.len() {
        gradients.sum(gradients.dim, i, &mut buffers.g);
        norms.push(sum_squares_f64(&buffers.g));
    }
}

simd_kernel! {
    /// Squared norm of the gradient of each row of a part.
    pub(crate) fn square_norms = square_norms_body(
        gradients: &Gradients<'_>,
        buffers: &mut RowBuffers,
        norms: &mut Vec<f64>,
    )
}
