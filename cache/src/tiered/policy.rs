//! Which rows leave a tier: a policy gives each a score, and the lowest go.
//!
//! Results never depend on a policy, only times do; and what leaves depends on nothing but the
//! order of calls.

/// Which rows a tier would rather lose when it needs room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Those whose last use is the longest ago.
    #[default]
    Lru,
    /// Those used least often. Counts are halved after as many uses as ten times the slots, so
    /// that what was popular once can leave: the reset of TinyLFU (Einziger, Friedman, Manes,
    /// "TinyLFU: a highly efficient cache admission policy", 2017).
    Lfu,
    /// Those whose next use is farthest away, after all of which no use is known; among these the
    /// least recently used. The optimum of Belady ("A study of replacement algorithms for a
    /// virtual-storage computer", 1966) as far as
    /// [`hint_next_use`](crate::RowStore::hint_next_use) sees.
    NextUse,
}

impl Policy {
    /// A row's score once it is used at `clock`; a row never used before has score 0.
    #[inline(always)]
    pub(super) fn touched(self, score: u32, clock: u32) -> u32 {
        match self {
            Self::Lru | Self::NextUse => clock,
            Self::Lfu => score.saturating_add(1),
        }
    }

    /// The larger, the longer the row stays: (a next use is known, nearness or score).
    #[inline(always)]
    pub(super) fn score(self, score: u32, next: u32, clock: u32) -> u64 {
        if self == Self::NextUse && next > clock {
            (1 << 32) | u64::from(u32::MAX - next)
        } else {
            u64::from(score)
        }
    }
}

/// Rows that may leave next, the lowest score last.
///
/// To look at all slots for each eviction would be slow. A look takes a sixteenth of them, which
/// later calls use up; one whose score has changed since, or that is wanted, is passed over. Under
/// lru this is exact: whatever was used since then has a larger score than all that were taken.
/// Under the others a row whose score fell behind the candidates' waits for the next look.
#[derive(Default)]
pub(super) struct Candidates {
    queue: Vec<(u64, u32)>, // (score, slot), from high to low
}

/// The part of all slots that one look takes.
const SHARE: usize = 16;

impl Candidates {
    /// The `count` lowest of slots `0..slots`, or all if they are fewer. `score` gives none for
    /// slots that must stay.
    pub(super) fn take(
        &mut self,
        count: usize,
        slots: usize,
        score: impl Fn(u32) -> Option<u64>,
    ) -> Vec<u64> {
        let mut taken = Vec::with_capacity(count);
        self.take_queued(count, &score, &mut taken);
        if taken.len() < count {
            taken.clear();
            self.queue = lowest(count.max(slots / SHARE), slots, &score);
            self.take_queued(count, &score, &mut taken);
        }
        taken
    }

    fn take_queued(
        &mut self,
        count: usize,
        score: impl Fn(u32) -> Option<u64>,
        taken: &mut Vec<u64>,
    ) {
        while taken.len() < count
            && let Some((then, slot)) = self.queue.pop()
        {
            if score(slot) == Some(then) {
                taken.push(u64::from(slot));
            }
        }
    }
}

/// The `count` lowest (score, slot) of slots `0..slots`, from high to low, in O(slots) time and
/// O(count) memory.
fn lowest(count: usize, slots: usize, score: impl Fn(u32) -> Option<u64>) -> Vec<(u64, u32)> {
    let mut kept: Vec<(u64, u32)> = Vec::new();
    let mut limit = (u64::MAX, u32::MAX); // what is above it cannot be among the lowest
    for slot in 0..slots as u32 {
        let Some(score) = score(slot) else { continue };
        if (score, slot) > limit {
            continue;
        }
        kept.push((score, slot));
        if kept.len() == 4 * count {
            limit = *kept.select_nth_unstable(count - 1).1;
            kept.truncate(count);
        }
    }
    // Rows of one fetch have one score and often neighbouring slots: runs, which this sort finds.
    kept.sort();
    kept.truncate(count);
    kept.reverse();
    kept
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn the_lowest_are_those_of_a_full_sort(
            scores in prop::collection::vec(prop::option::of(0u64..20), 0..200),
            count in 0usize..60,
        ) {
            let mut all: Vec<(u64, u32)> =
                (0u32..).zip(&scores).filter_map(|(slot, score)| Some(((*score)?, slot))).collect();
            all.sort_unstable();
            all.truncate(count);
            let slots: Vec<u64> = all.iter().map(|&(_, slot)| u64::from(slot)).collect();
            let score = |slot: u32| scores[slot as usize];
            let mut candidates = Candidates::default();
            prop_assert_eq!(candidates.take(count, scores.len(), score), slots);
        }
    }

    #[test]
    fn candidates_whose_score_changed_are_passed_over() {
        let mut scores: Vec<Option<u64>> = (0..64).map(Some).collect();
        let mut candidates = Candidates::default();
        assert_eq!(candidates.take(2, 64, |slot| scores[slot as usize]), [0, 1]);
        scores[2] = Some(100);
        assert_eq!(candidates.take(1, 64, |slot| scores[slot as usize]), [3]);
        // Nothing was queued any more: a new look.
        scores[5] = None;
        assert_eq!(candidates.take(3, 64, |slot| scores[slot as usize]), [0, 1, 3]);
    }

    #[test]
    fn a_known_use_outlasts_all_others_and_nearer_ones_longer() {
        let policy = Policy::NextUse;
        let (near, far) = (policy.score(1, 12, 10), policy.score(1, 99, 10));
        assert!(near > far && far > policy.score(u32::MAX, 0, 10));
        assert_eq!(policy.score(7, 10, 10), 7, "a use that is over");
        assert_eq!(Policy::Lru.score(7, 99, 10), 7);
        assert_eq!(Policy::Lfu.touched(u32::MAX, 3), u32::MAX);
    }
}
