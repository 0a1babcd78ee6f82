//! Rows to average over replicas: which they are, how they are cut among replicas, and the mean.
//!
//! ```text
//! all rows of all pieces, one behind another:   |--------------------------------|  total bytes
//! cut at whole rows into rounds * M slices:     | 0 | 1 | 2 | 3 | 0 | 1 | 2 | 3 |
//! a slice in a message: for each piece it holds rows of: their weights, then their state
//! ```
//! Replica `i` of `M` averages the slices numbered `i`. A slice is within one row of the others in
//! bytes, and a round within [`ROUND_BYTES`] and a row a slice: memory has a bound however many
//! rows there are.

use std::ops::Range;

use tessera_device::{Simd, simd_kernel};

use crate::{EmbeddingError, Precision, Result};

/// Bytes that a rank sends in one round.
const ROUND_BYTES: u64 = 4 << 20;

/// Numbers averaged at a time.
const BLOCK: usize = 512;

/// Rows of a piece, ascending, numbered from the piece's first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Rows {
    All(u64),
    These(Vec<u64>),
}

impl Rows {
    /// How many.
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::All(rows) => *rows,
            Self::These(rows) => rows.len() as u64,
        }
    }

    /// Those in `places` of the list, as runs of neighbours.
    pub(super) fn runs(&self, places: Range<u64>) -> Vec<Range<u64>> {
        match self {
            Self::All(_) => vec![places],
            Self::These(rows) => rows[places.start as usize..places.end as usize]
                .chunk_by(|a, b| a + 1 == *b)
                .map(|run| run[0]..run[0] + run.len() as u64)
                .collect(),
        }
    }
}

/// Adds `more` to `rows`; both ascend without repeats.
pub(super) fn merge(rows: &mut Vec<u64>, more: impl ExactSizeIterator<Item = u64>) {
    if rows.is_empty() {
        rows.extend(more); // into memory that is there
        return;
    }
    let old = std::mem::take(rows);
    rows.reserve(old.len() + more.len());
    let mut old = old.into_iter().peekable();
    for row in more {
        while let Some(before) = old.next_if(|&before| before < row) {
            rows.push(before);
        }
        old.next_if_eq(&row);
        rows.push(row);
    }
    rows.extend(old);
}

/// What each rank touched, a message a rank: for each piece the number of its rows, then those.
pub(super) fn encode_touched(touched: &mut [Vec<u64>], message: &mut Vec<u64>) {
    for rows in touched {
        message.push(rows.len() as u64);
        message.append(rows);
    }
}

/// The rows of each piece that some rank touched. `rows_of` is the number of rows of each piece.
///
/// Errors: [`EmbeddingError::Exchange`] when a message is not what [`encode_touched`] writes.
pub(super) fn union<'a>(
    messages: impl Iterator<Item = &'a [u64]>,
    rows_of: &[u64],
) -> Result<Vec<Rows>> {
    let mut all = vec![Vec::new(); rows_of.len()];
    for (replica, mut message) in messages.enumerate() {
        let broken = || EmbeddingError::Exchange {
            reason: format!("the touched rows from replica {replica} are broken"),
        };
        for (all, &rows_of) in all.iter_mut().zip(rows_of) {
            let (&count, rest) = message.split_first().ok_or_else(broken)?;
            let count = usize::try_from(count).ok().filter(|&count| count <= rest.len());
            let (rows, rest) = rest.split_at(count.ok_or_else(broken)?);
            if !rows.is_sorted_by(|a, b| a < b) || rows.last().is_some_and(|&row| row >= rows_of) {
                return Err(broken());
            }
            merge(all, rows.iter().copied());
            message = rest;
        }
        if !message.is_empty() {
            return Err(broken());
        }
    }
    Ok(all.into_iter().map(Rows::These).collect())
}

/// Some rows of one piece: a range of places in its [`Rows`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Stretch {
    pub(super) piece: usize,
    pub(super) places: Range<u64>,
}

/// The rows of all pieces, cut into slices.
#[derive(Debug)]
pub(super) struct Cut {
    /// Rows and bytes a row of each piece.
    pieces: Vec<(u64, u64)>,
    total: u128,
    pub(super) rounds: u64,
    slices: u64,
}

impl Cut {
    /// Cuts `(rows, bytes a row)` of each piece for `replicas` replicas. A row has bytes.
    pub(super) fn new(pieces: Vec<(u64, u64)>, replicas: usize) -> Self {
        let bytes = |&(rows, width): &(u64, u64)| u128::from(rows) * u128::from(width);
        let total: u128 = pieces.iter().map(bytes).sum();
        // A table in memory has fewer than 2^64 bytes, and so have all of them.
        let rounds = total.div_ceil(u128::from(ROUND_BYTES)) as u64;
        Self { pieces, total, rounds, slices: rounds * replicas as u64 }
    }

    /// The rows in slice `slice`.
    pub(super) fn slice(&self, slice: u64) -> Vec<Stretch> {
        let bound = |slice: u64| self.total * u128::from(slice) / u128::from(self.slices);
        let (low, high) = (bound(slice), bound(slice + 1));
        let mut stretches = Vec::new();
        let mut start = 0u128;
        for (piece, &(rows, width)) in self.pieces.iter().enumerate() {
            // A row is where its first byte is.
            let before = |bound: u128| {
                let rows_before = bound.saturating_sub(start).div_ceil(u128::from(width));
                rows_before.min(u128::from(rows)) as u64
            };
            let places = before(low)..before(high);
            if !places.is_empty() {
                stretches.push(Stretch { piece, places });
            }
            start += u128::from(rows) * u128::from(width);
        }
        stretches
    }
}

/// Appends to `out` the mean over replicas of the numbers in `terms`, one slice of bytes each and
/// all equally long: summed in float64 by a pairwise tree in the replicas' order, divided by their
/// number, rounded to float32, and for 16-bit numbers once more; to nearest, ties to even.
///
/// The sum of equal numbers is exact, and so is its quotient: their mean is the number itself.
pub(super) fn mean(precision: Precision, terms: &[&[u8]], out: &mut Vec<u8>) {
    let length = terms.first().map_or(0, |term| term.len());
    let start = out.len();
    out.resize(start + length, 0);
    let mut sums = vec![[0.0; BLOCK]; terms.len()];
    mean_kernel(Simd::detect(), precision, terms, &mut sums, &mut out[start..]);
}

simd_kernel!(fn mean_kernel = mean_body(
    precision: Precision,
    terms: &[&[u8]],
    sums: &mut [[f64; BLOCK]],
    out: &mut [u8],
));

#[inline(always)]
fn mean_body(precision: Precision, terms: &[&[u8]], sums: &mut [[f64; BLOCK]], out: &mut [u8]) {
    let block_bytes = BLOCK * precision.bytes();
    for (block, out) in out.chunks_mut(block_bytes).enumerate() {
        let start = block * block_bytes;
        for (sums, term) in sums.iter_mut().zip(terms) {
            load(precision, &term[start..start + out.len()], sums);
        }
        let mut left = terms.len();
        while left > 1 {
            for i in 0..left / 2 {
                let (to, from) = sums.split_at_mut(2 * i + 1);
                for (a, b) in to[2 * i].iter_mut().zip(&from[0]) {
                    *a += b;
                }
                sums.swap(i, 2 * i);
            }
            if left % 2 == 1 {
                sums.swap(left / 2, left - 1);
            }
            left = left.div_ceil(2);
        }
        for sum in &mut sums[0] {
            *sum /= terms.len() as f64;
        }
        store(precision, &sums[0], out);
    }
}

#[inline(always)]
fn load(precision: Precision, bytes: &[u8], to: &mut [f64; BLOCK]) {
    match precision {
        Precision::Fp32 => {
            for (to, &from) in to.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *to = f64::from(f32::from_ne_bytes(from));
            }
        }
        Precision::Fp16 => {
            for (to, &from) in to.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *to = half::f16::from_ne_bytes(from).to_f64();
            }
        }
        Precision::Bf16 => {
            for (to, &from) in to.iter_mut().zip(bytes.as_chunks::<2>().0) {
                *to = half::bf16::from_ne_bytes(from).to_f64();
            }
        }
    }
}

#[inline(always)]
fn store(precision: Precision, from: &[f64; BLOCK], to: &mut [u8]) {
    match precision {
        Precision::Fp32 => {
            for (to, &x) in to.as_chunks_mut::<4>().0.iter_mut().zip(from) {
                *to = (x as f32).to_ne_bytes();
            }
        }
        Precision::Fp16 => {
            for (to, &x) in to.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                *to = half::f16::from_f32(x as f32).to_ne_bytes();
            }
        }
        Precision::Bf16 => {
            for (to, &x) in to.as_chunks_mut::<2>().0.iter_mut().zip(from) {
                *to = half::bf16::from_f32(x as f32).to_ne_bytes();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|x| x.to_ne_bytes()).collect()
    }

    fn mean_of(terms: &[Vec<f32>]) -> Vec<f32> {
        let terms: Vec<Vec<u8>> = terms.iter().map(|term| bytes(term)).collect();
        let terms: Vec<&[u8]> = terms.iter().map(Vec::as_slice).collect();
        let mut out = Vec::new();
        mean(Precision::Fp32, &terms, &mut out);
        out.chunks_exact(4).map(|x| f32::from_ne_bytes(x.try_into().unwrap())).collect()
    }

    #[test]
    fn means_are_those_of_all_replicas() {
        for replicas in 1..=9usize {
            let term = |r: usize| (0..1300).map(|i| (i * 7 + r * r) as f32).collect::<Vec<_>>();
            let terms: Vec<Vec<f32>> = (0..replicas).map(term).collect();
            for (i, mean) in mean_of(&terms).into_iter().enumerate() {
                let sum: f64 = terms.iter().map(|term| f64::from(term[i])).sum();
                assert_eq!(mean, (sum / replicas as f64) as f32, "{i} of {replicas}");
            }
        }
    }

    #[test]
    fn equal_numbers_keep_their_bits_whatever_their_number() {
        let numbers = [0.1, -0.0, 0.0, f32::MAX, f32::MIN, 1e-45, -1.0 / 3.0, f32::MIN_POSITIVE];
        for replicas in 1..=9 {
            let means = mean_of(&vec![numbers.to_vec(); replicas]);
            assert_eq!(means.map_bits(), numbers.to_vec().map_bits(), "{replicas} replicas");
        }
        for precision in [Precision::Fp16, Precision::Bf16] {
            let finite = |bits: &u16| match precision {
                Precision::Fp16 => half::f16::from_bits(*bits).is_finite(),
                _ => half::bf16::from_bits(*bits).is_finite(),
            };
            let all: Vec<u8> =
                (0..=u16::MAX).filter(finite).flat_map(|bits| bits.to_ne_bytes()).collect();
            for replicas in [2, 3] {
                let mut out = Vec::new();
                mean(precision, &vec![&all[..]; replicas], &mut out);
                assert_eq!(out, all, "{precision:?}");
            }
        }
    }

    trait Bits {
        fn map_bits(&self) -> Vec<u32>;
    }

    impl Bits for Vec<f32> {
        fn map_bits(&self) -> Vec<u32> {
            self.iter().map(|x| x.to_bits()).collect()
        }
    }

    #[test]
    fn halves_round_to_even() {
        // Neighbours of 16 bits: their mean is a tie.
        for (low, even) in [(0x3C00u16, 0x3C00), (0x3C01, 0x3C02)] {
            for precision in [Precision::Fp16, Precision::Bf16] {
                let (a, b) = (low.to_ne_bytes(), (low + 1).to_ne_bytes());
                let mut out = Vec::new();
                mean(precision, &[&a, &b], &mut out);
                assert_eq!(out, u16::to_ne_bytes(even), "{precision:?}");
            }
        }
    }

    #[test]
    fn slices_hold_every_row_once_in_order_and_about_as_many_bytes() {
        let sets: [&[(u64, u64)]; 6] = [
            &[],
            &[(0, 4), (0, 8)],
            &[(1, 4)],
            &[(5, 12), (0, 4), (7, 100), (1, 4)],
            &[(100_000, 260), (3, 4), (40_000, 1028)],
            &[(u64::MAX >> 9, 256)],
        ];
        for pieces in sets {
            for replicas in [1, 2, 3, 8] {
                let cut = Cut::new(pieces.to_vec(), replicas);
                let slices = cut.rounds * replicas as u64;
                let widest = pieces.iter().map(|&(_, width)| width).max().unwrap_or(0);
                if slices > 1 << 20 {
                    // A table of 2^63 bytes: the last slice ends with its last row.
                    let last = cut.slice(slices - 1);
                    assert_eq!(last[0].places.end, pieces[0].0);
                    continue;
                }
                let mut next = vec![0u64; pieces.len()];
                for slice in 0..slices {
                    let mut bytes = 0;
                    for Stretch { piece, places } in cut.slice(slice) {
                        assert_eq!(next[piece], places.start);
                        assert!(pieces[..piece].iter().zip(&next).all(|(p, &next)| p.0 == next));
                        next[piece] = places.end;
                        bytes += (places.end - places.start) * pieces[piece].1;
                    }
                    assert!(bytes <= ROUND_BYTES / replicas as u64 + widest + 1, "{bytes} bytes");
                    let share = cut.total as u64 / slices;
                    assert!(bytes.abs_diff(share) <= widest + 1, "{bytes} of {share}");
                }
                assert!(pieces.iter().zip(&next).all(|(piece, &next)| piece.0 == next));
            }
        }
    }

    #[test]
    fn touched_rows_unite_and_broken_messages_are_named() {
        let (mut a, mut b) = (vec![vec![1, 4, 9], vec![]], vec![vec![0, 4, 5], vec![2]]);
        let (mut first, mut second) = (Vec::new(), Vec::new());
        encode_touched(&mut a, &mut first);
        encode_touched(&mut b, &mut second);
        assert!(a.iter().chain(&b).all(Vec::is_empty));
        let messages = || [&first[..], &second[..]].into_iter();
        let rows = union(messages(), &[10, 3]).unwrap();
        assert_eq!(rows, [Rows::These(vec![0, 1, 4, 5, 9]), Rows::These(vec![2])]);
        assert_eq!(rows[0].runs(0..5), [0..2, 4..6, 9..10]);
        assert_eq!(rows[0].runs(1..3), [1..2, 4..5]);
        let run = 2..5;
        assert_eq!(Rows::All(7).runs(2..5), [run]);
        assert!(union(messages(), &[9, 3]).is_err(), "a row beyond the piece");
        for broken in [&second[..4], &[0, 0, 0], &[1], &[2, 3, 3, 0], &[u64::MAX, 0]] {
            let messages = [&first[..], broken].into_iter();
            let error = union(messages, &[10, 3]).unwrap_err().to_string();
            assert!(error.contains("from replica 1 are broken"), "{error}");
        }
    }
}
