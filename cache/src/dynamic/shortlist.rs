//! The rows that go first: the lowest by (score, id), found without a sorted list of all rows.
//!
//! Scores only rise between two calls of [`Shortlist::clear`], so a hit need not tell this list:
//!
//! ```text
//! bound: every row with (score, id) <= bound is on the list, with a score that was once its own
//! lowest: pop the top; if its score has risen since, put it back with its score of now,
//!         or drop it when that is beyond the bound
//! empty:  one pass over all rows finds the lowest eighth of them, and so the next bound
//! ```
//!
//! So an eviction costs about 8 rows of a sequential pass and a share of a sort, and the list
//! takes 3 to 6 bytes a row. What it gives is exactly the lowest, however it was filled.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::rows::{Entry, Rows};

/// The list holds one row in so many, at least, when it is filled.
const SHARE: u64 = 8;

/// The fewest rows that a pass looks for.
const FILL_MIN: u64 = 1024;

/// How many rows ahead of the one that goes entries are prefetched.
const AHEAD: usize = 8;

/// A row's place in the order of eviction. The id settles ties; the row never matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Candidate {
    pub(super) score: u64,
    pub(super) id: u64,
    pub(super) row: u32,
}

/// What a policy goes by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Score {
    SeenStep,
    Occurrences,
}

impl Score {
    #[inline(always)]
    pub(super) fn of(self, entry: &Entry) -> u64 {
        match self {
            Self::SeenStep => entry.seen_step,
            Self::Occurrences => entry.occurrences,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Shortlist {
    /// What the last pass found, lowest last.
    sorted: Vec<Candidate>,
    /// What came to the list since.
    heap: BinaryHeap<Reverse<Candidate>>,
    /// None: no row need be on the list.
    bound: Option<(u64, u64)>,
}

impl Shortlist {
    /// Forgets all, because scores fell.
    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> u64 {
        ((self.sorted.capacity() + self.heap.capacity()) * size_of::<Candidate>()) as u64
    }

    /// A row that was not in use now is, one of `len`.
    pub(super) fn add(&mut self, candidate: Candidate, len: u64) {
        self.put_back(candidate);
        let most = size(len);
        if self.sorted.len() + self.heap.len() >= 2 * most {
            // What a row is listed with is its own score or a lower one, so the rows that leave
            // the list are beyond the new bound.
            let mut all = std::mem::take(&mut self.sorted);
            all.extend(self.heap.drain().map(|Reverse(candidate)| candidate));
            self.keep(all, most);
        }
    }

    /// Puts a row on the list unless it is beyond the bound.
    fn put_back(&mut self, candidate: Candidate) {
        if Some((candidate.score, candidate.id)) <= self.bound {
            self.heap.push(Reverse(candidate));
        }
    }

    /// Frees the `count` lowest rows not seen in `step` and returns them, lowest first. `seen` is
    /// the number of rows seen in `step`; at least `count` others must be in use.
    pub(super) fn release_lowest(
        &mut self,
        rows: &mut Rows,
        score: Score,
        count: u64,
        step: u64,
        seen: u64,
    ) -> Vec<Candidate> {
        let mut lowest = Vec::with_capacity(count as usize);
        let mut held = Vec::new();
        while (lowest.len() as u64) < count {
            let Some(candidate) = self.pop(rows, score) else {
                // The pass finds what is held too.
                held.clear();
                self.fill(rows, score, count - lowest.len() as u64 + seen);
                continue;
            };
            if rows.get(candidate.row).seen_step == step {
                held.push(Reverse(candidate));
            } else {
                rows.release(candidate.row);
                lowest.push(candidate);
            }
        }
        self.heap.extend(held);
        lowest
    }

    /// Frees all rows whose score is below `limit` and returns them, lowest first.
    pub(super) fn release_below(
        &mut self,
        rows: &mut Rows,
        score: Score,
        limit: u64,
    ) -> Vec<Candidate> {
        let mut below = Vec::new();
        loop {
            while self.lowest().is_some_and(|lowest| lowest.score < limit) {
                let Some(candidate) = self.pop(rows, score) else { break };
                if candidate.score < limit {
                    rows.release(candidate.row);
                    below.push(candidate);
                } else {
                    self.put_back(candidate);
                }
            }
            // Rows that are not on the list have the bound's score or a higher one.
            let listed = self.lowest().is_some();
            if listed || self.bound.is_some_and(|(score, _)| score >= limit) {
                return below;
            }
            self.fill(rows, score, 0);
        }
    }

    /// The lowest row of the list, by the scores with which rows are listed.
    fn lowest(&self) -> Option<&Candidate> {
        let came = self.heap.peek().map(|Reverse(candidate)| candidate);
        self.sorted.last().into_iter().chain(came).min()
    }

    /// Takes the lowest row off the list, with its score of now.
    fn pop(&mut self, rows: &Rows, score: Score) -> Option<Candidate> {
        loop {
            let mut candidate = *self.lowest()?;
            if self.sorted.last() == Some(&candidate) {
                self.sorted.pop();
                if let Some(ahead) = self.sorted.len().checked_sub(AHEAD) {
                    rows.prefetch(self.sorted[ahead].row);
                }
            } else {
                self.heap.pop();
            }
            let now = score.of(rows.get(candidate.row));
            if now == candidate.score {
                return Some(candidate);
            }
            candidate.score = now;
            self.put_back(candidate);
        }
    }

    /// Puts the lowest rows on the list: at least `count`, or all.
    fn fill(&mut self, rows: &Rows, score: Score, count: u64) {
        let most = size(rows.len()).max(count as usize);
        let mut lowest = Vec::with_capacity((2 * most).min(rows.len() as usize));
        let mut cut = None;
        for (row, entry) in rows.iter() {
            let candidate = Candidate { score: score.of(entry), id: entry.id, row };
            if cut.is_some_and(|cut| candidate > cut) {
                continue;
            }
            lowest.push(candidate);
            if lowest.len() == 2 * most {
                cut = Some(keep_lowest(&mut lowest, most));
            }
        }
        self.heap.clear();
        if cut.is_some() || lowest.len() > most {
            self.keep(lowest, most);
        } else {
            let all = lowest.len();
            self.keep(lowest, all);
            self.bound = Some((u64::MAX, u64::MAX));
        }
    }

    /// Makes the list of the `most` lowest of some rows.
    fn keep(&mut self, mut candidates: Vec<Candidate>, most: usize) {
        if most < candidates.len() {
            keep_lowest(&mut candidates, most);
        }
        candidates.sort_unstable_by(|a, b| b.cmp(a));
        self.bound = candidates.first().map(|last| (last.score, last.id));
        self.sorted = candidates;
    }
}

/// Rows on a list that was filled, of `len` in use.
fn size(len: u64) -> usize {
    (len / SHARE).max(FILL_MIN) as usize
}

/// Keeps the `most` lowest, at least one, and returns the highest of them.
fn keep_lowest(candidates: &mut Vec<Candidate>, most: usize) -> Candidate {
    let last = *candidates.select_nth_unstable(most - 1).1;
    candidates.truncate(most);
    last
}
