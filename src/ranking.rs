//! Area under the ROC curve over any number of samples in bounded memory.
//!
//! Scores are kept as (ordered 32-bit key, weight of positives, weight of negatives), one entry a
//! distinct score. That is exact while there are at most [`Ranking::CAPACITY`] distinct scores.
//! Beyond it the lowest bits of the keys are dropped, one at a time, until the entries fit;
//! samples that become ties then count half, and the largest error that this can make is
//! reported beside the value: half of the weight of the pairs that share an entry.

/// Accumulates scored samples; gives the AUC.
#[derive(Clone, Debug)]
pub struct Ranking {
    entries: Vec<Entry>,
    capacity: usize,
    /// Lowest bits dropped from each key.
    dropped_bits: u32,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: u32,
    positive: f64,
    negative: f64,
}

/// An AUC and how far it can be from the exact one.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Auc {
    /// Probability that a positive scores above a negative, ties counted half.
    pub value: f64,
    /// Largest absolute error; 0 when every distinct score was kept.
    pub error_max: f64,
}

impl Default for Ranking {
    fn default() -> Self {
        Self::with_capacity(Self::CAPACITY)
    }
}

impl Ranking {
    /// Distinct scores kept exactly (24 bytes each, twice that while samples arrive).
    pub const CAPACITY: usize = 1 << 21;

    /// A ranking that keeps `capacity` distinct scores exactly.
    #[must_use]
    pub fn with_capacity(capacity: usize) -> Self {
        Self { entries: Vec::new(), capacity: capacity.max(1), dropped_bits: 0 }
    }

    /// Adds a sample: its score (not NaN), its label in [0, 1] and its weight.
    pub fn add(&mut self, score: f32, label: f64, weight: f64) {
        if self.entries.len() >= 2 * self.capacity {
            self.compact();
        }
        let key = coarse(ordered(score), self.dropped_bits);
        self.entries.push(Entry {
            key,
            positive: weight * label,
            negative: weight * (1.0 - label),
        });
    }

    /// Sorts, joins equal keys, and drops bits until the entries fit.
    fn compact(&mut self) {
        loop {
            // Stable: equal keys are summed in the order of the samples.
            self.entries.sort_by_key(|entry| entry.key);
            self.entries.dedup_by(|next, kept| {
                let same = next.key == kept.key;
                if same {
                    kept.positive += next.positive;
                    kept.negative += next.negative;
                }
                same
            });
            if self.entries.len() <= self.capacity {
                return;
            }
            self.dropped_bits += 1;
            let bits = self.dropped_bits;
            for entry in &mut self.entries {
                entry.key = coarse(entry.key, bits);
            }
        }
    }

    /// The AUC, or `None` when one class has no weight.
    #[must_use]
    pub fn auc(mut self) -> Option<Auc> {
        self.compact();
        let (mut below, mut won, mut tied) = (0.0, 0.0, 0.0);
        for entry in &self.entries {
            won += entry.positive * below;
            tied += entry.positive * entry.negative;
            below += entry.negative;
        }
        let positives: f64 = self.entries.iter().map(|entry| entry.positive).sum();
        let pairs = positives * below;
        (pairs > 0.0).then(|| Auc {
            value: (won + 0.5 * tied) / pairs,
            error_max: if self.dropped_bits == 0 { 0.0 } else { 0.5 * tied / pairs },
        })
    }
}

/// `key` without its lowest `bits`, of which there may be 32: a capacity of 1 needs them all gone.
fn coarse(key: u32, bits: u32) -> u32 {
    (u64::from(key) >> bits << bits) as u32
}

/// A key in the order of the floats: negative ones have all bits flipped, others the sign.
fn ordered(score: f32) -> u32 {
    // -0 and 0 are one score.
    let bits = (score + 0.0).to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 1 << 31 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pairwise(samples: &[(f32, f64, f64)]) -> Option<f64> {
        let (mut won, mut pairs) = (0.0, 0.0);
        for &(a, label_a, weight_a) in samples {
            for &(b, label_b, weight_b) in samples {
                let pair = weight_a * label_a * weight_b * (1.0 - label_b);
                pairs += pair;
                won += pair
                    * if a > b {
                        1.0
                    } else if a == b {
                        0.5
                    } else {
                        0.0
                    };
            }
        }
        (pairs > 0.0).then(|| won / pairs)
    }

    proptest! {
        #[test]
        fn equals_the_count_over_all_pairs(
            samples in proptest::collection::vec(
                (prop_oneof![-3.0f32..3.0, Just(0.0f32), Just(-0.0f32), Just(f32::INFINITY)],
                 prop_oneof![Just(0.0f64), Just(1.0), 0.0f64..1.0],
                 0.0f64..2.0),
                0..60),
            capacity in 1usize..40,
        ) {
            let mut exact = Ranking::default();
            let mut small = Ranking::with_capacity(capacity);
            for &(score, label, weight) in &samples {
                exact.add(score, label, weight);
                small.add(score, label, weight);
            }
            let wanted = pairwise(&samples);
            let (exact, small) = (exact.auc(), small.auc());
            prop_assert_eq!(exact.is_some(), wanted.is_some());
            if let (Some(wanted), Some(exact), Some(small)) = (wanted, exact, small) {
                prop_assert!((exact.value - wanted).abs() < 1e-9);
                prop_assert_eq!(exact.error_max, 0.0);
                prop_assert!((small.value - wanted).abs() <= small.error_max + 1e-9);
            }
        }
    }

    #[test]
    fn one_class_has_no_auc() {
        let mut ranking = Ranking::default();
        ranking.add(0.3, 1.0, 1.0);
        ranking.add(0.4, 1.0, 1.0);
        assert!(ranking.auc().is_none());
        assert!(Ranking::default().auc().is_none());
    }

    #[test]
    fn memory_stays_bounded_and_the_error_small() {
        let mut ranking = Ranking::with_capacity(1000);
        let mut exact = Ranking::default();
        for i in 0..50_000u32 {
            let u = f64::from(i.wrapping_mul(2_654_435_761)) / f64::from(u32::MAX);
            let score = ((u - 0.5) * 6.0) as f32;
            let label = f64::from(u8::from((i % 97) as f64 / 97.0 < u));
            ranking.add(score, label, 1.0);
            exact.add(score, label, 1.0);
        }
        assert!(ranking.entries.len() <= 2000);
        let (coarse, exact) = (ranking.auc().unwrap(), exact.auc().unwrap());
        assert!(coarse.error_max > 0.0 && coarse.error_max < 0.01, "{coarse:?}");
        assert!((coarse.value - exact.value).abs() <= coarse.error_max);
    }
}
