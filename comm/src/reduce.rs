//! Sums, largest and smallest values over ranks.
//!
//! Element `i` of the result is `((term_0[i] + term_1[i]) + term_2[i]) + …` in rank order from the
//! first term, whatever the lengths, cuts and backends: the same bits everywhere. The terms are
//! taken a block at a time, so that a sum over many ranks stays in the first-level cache:
//! `terms + 1` elements of traffic per element of the result.

use crate::{Ordered, Wire};

/// Elements of a block: 8 to 32 KiB.
const BLOCK: usize = 4096;

/// Puts `term` into the result so far; whether an integer left its range.
pub(crate) type Combine<T> = fn(&mut [T], &[T]) -> bool;

/// Appends the combination of all terms, which have one length, to `out`; whether an integer left
/// its range.
pub(crate) fn in_rank_order<T: Wire>(
    terms: &[&[T]],
    combine: Combine<T>,
    out: &mut Vec<T>,
) -> bool {
    let Some((first, rest)) = terms.split_first() else { return false };
    let mut overflow = false;
    for start in (0..first.len()).step_by(BLOCK) {
        let range = start..(start + BLOCK).min(first.len());
        let at = out.len();
        out.extend_from_slice(&first[range.clone()]);
        for term in rest {
            overflow |= combine(&mut out[at..], &term[range.clone()]);
        }
    }
    overflow
}

/// `sum[i] += term[i]`.
pub(crate) fn add_f32(sum: &mut [f32], term: &[f32]) {
    for (sum, term) in sum.iter_mut().zip(term) {
        *sum += term;
    }
}

/// `sum[i] += term[i]`.
pub(crate) fn add_f64(sum: &mut [f64], term: &[f64]) {
    for (sum, term) in sum.iter_mut().zip(term) {
        *sum += term;
    }
}

/// `best[i] = max(best[i], term[i])`.
pub(crate) fn max<T: Ordered>(best: &mut [T], term: &[T]) -> bool {
    for (best, &term) in best.iter_mut().zip(term) {
        *best = (*best).max(term);
    }
    false
}

/// `best[i] = min(best[i], term[i])`.
pub(crate) fn min<T: Ordered>(best: &mut [T], term: &[T]) -> bool {
    for (best, &term) in best.iter_mut().zip(term) {
        *best = (*best).min(term);
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Summable;

    #[test]
    fn sums_are_taken_in_rank_order_from_the_first_term() {
        // (1e8 + 1) - 1e8 is 0 in float32 and 1e8 - 1e8 + 1 is 1: the order shows.
        for len in [0, 1, 5, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7] {
            let terms: [Vec<f32>; 3] = [vec![1e8; len], vec![1.0; len], vec![-1e8; len]];
            let sum = |order: [usize; 3]| {
                let mut out = Vec::new();
                let terms: Vec<&[f32]> = order.iter().map(|&i| &terms[i][..]).collect();
                assert!(!in_rank_order(&terms, f32::add, &mut out));
                out
            };
            assert_eq!(sum([0, 1, 2]), vec![0.0; len]);
            assert_eq!(sum([0, 2, 1]), vec![1.0; len]);
        }
        // A first term of -0 stays: nothing is added to a zero of ours.
        let mut out = Vec::new();
        in_rank_order(&[&[-0.0f32][..]], f32::add, &mut out);
        assert_eq!(out[0].to_bits(), (-0.0f32).to_bits());
    }

    #[test]
    fn largest_and_smallest() {
        let terms: [&[i64]; 3] = [&[1, -5, i64::MAX], &[2, -6, 0], &[0, -4, i64::MIN]];
        let (mut high, mut low) = (Vec::new(), Vec::new());
        in_rank_order(&terms, max, &mut high);
        in_rank_order(&terms, min, &mut low);
        assert_eq!(high, [2, -4, i64::MAX]);
        assert_eq!(low, [0, -6, i64::MIN]);
    }
}
