//! How many of its rows a table's device tier must hold for which share of hits, told from a
//! sample of the data: the miss-ratio curve of lru.
//!
//! ```text
//! batch of ids -> its different rows; a row used before: how many rows were used since?
//!   that many or fewer slots: a miss;   more: a hit, whatever their number
//! ```
//! One pass gives the curve at every size, since what a smaller tier holds a larger one holds too:
//! R. L. Mattson, J. Gecsei, D. R. Slutz, I. L. Traiger, "Evaluation techniques for storage
//! hierarchies", IBM Systems Journal 9(2), 1970. The rows used since are counted by a tree of
//! sums (P. M. Fenwick, "A new data structure for cumulative frequency tables", 1994) over the
//! order of last uses: O(log rows) a use.
//!
//! The unit is a batch, as in training: its rows are looked for together, once each, and all of
//! them are in the tier afterwards. So the curve has a meaning from the largest batch's rows on.
//! Which of the rows of one batch leave first depends on their slots in a store; here it is their
//! order by a hash, which favours none of them.
//!
//! Beyond a limit of rows only those are tracked whose hash is below a threshold, which is halved
//! whenever they become too many, and each then stands for as many as were left out: C. A.
//! Waldspurger, N. Park, A. Garthwaite, I. Ahmad, "Efficient MRC construction with SHARDS", FAST
//! 2015, with its correction of the total (SHARDS-adj). [`MissCurve::error`] bounds what that costs.

use hashbrown::{HashMap, HashSet};

/// Rows that a counter tracks at the most: about 8 MB.
pub const ROWS_TRACKED: usize = 1 << 17;

/// Standard deviations that [`MissCurve::error`] allows for.
const DEVIATIONS: f64 = 3.0;

/// Counts uses of one table's rows, batch by batch.
#[derive(Clone, Debug)]
pub struct ReuseCounter {
    rows: u64,
    limit: usize,
    /// Of 2^level rows one is tracked.
    level: u32,
    tracked: HashMap<u64, Tracked>,
    order: Order,
    /// For each level, how often so many tracked rows were used since: counts[level][rows].
    counts: Vec<Vec<u64>>,
    /// For each level, first uses of tracked rows.
    first: Vec<u64>,
    batches: u64,
    uses: u64,
    batch_rows_max: u64,
    seen: HashSet<u64>, // of the batch, kept for its memory
}

#[derive(Clone, Copy, Debug)]
struct Tracked {
    /// Place in the order of last uses.
    place: usize,
    /// Uses that can be misses at some size from the largest batch on, the first among them.
    misses: u64,
}

impl ReuseCounter {
    /// For a table of `rows` rows, of which at most [`ROWS_TRACKED`] are tracked.
    #[must_use]
    pub fn new(rows: u64) -> Self {
        Self::tracking(rows, ROWS_TRACKED)
    }

    /// For a table of `rows` rows, of which at most `limit` are tracked, and one at least.
    #[must_use]
    pub fn tracking(rows: u64, limit: usize) -> Self {
        Self {
            rows,
            limit: limit.max(1),
            level: 0,
            tracked: HashMap::new(),
            order: Order::default(),
            counts: vec![Vec::new()],
            first: vec![0],
            batches: 0,
            uses: 0,
            batch_rows_max: 0,
            seen: HashSet::new(),
        }
    }

    /// Counts a batch: each row once. Ids that name no row are left to whoever trains.
    pub fn batch(&mut self, ids: impl IntoIterator<Item = i64>) {
        self.seen.clear();
        let mut used: Vec<(u64, u64)> = Vec::new(); // (order within the batch, row), tracked ones
        for id in ids {
            let Some(row) = u64::try_from(id).ok().filter(|&row| row < self.rows) else {
                continue;
            };
            if self.seen.insert(row) && is_tracked(row, self.level) {
                used.push((order(row, self.batches), row));
            }
        }
        let rows = self.seen.len() as u64;
        self.batches += 1;
        self.uses += rows;
        self.batch_rows_max = self.batch_rows_max.max(rows);
        used.sort_unstable();
        self.count(&used);
        self.order.reserve(used.len(), &mut self.tracked);
        for &(_, row) in &used {
            let place = self.order.push();
            let tracked = self.tracked.get_mut(&row).expect("counted just now");
            tracked.place = place;
        }
        while self.tracked.len() > self.limit {
            self.level += 1;
            let level = self.level;
            self.tracked.retain(|&row, _| is_tracked(row, level));
            self.order.rebuild(0, &mut self.tracked);
            self.counts.push(Vec::new());
            self.first.push(0);
        }
    }

    /// Counts how many rows were used since each was used last, all against the state before the
    /// batch, and takes them out of the order.
    fn count(&mut self, used: &[(u64, u64)]) {
        let level = self.level as usize;
        for (_, row) in used {
            match self.tracked.get_mut(row) {
                None => self.first[level] += 1,
                Some(tracked) => {
                    let since = self.order.after(tracked.place);
                    let counts = &mut self.counts[level];
                    if counts.len() <= since {
                        counts.resize(since + 1, 0);
                    }
                    counts[since] += 1;
                    let apart = (since as u64).saturating_mul(1 << level);
                    tracked.misses += u64::from(apart >= self.batch_rows_max);
                }
            }
        }
        for &(_, row) in used {
            match self.tracked.get(&row) {
                Some(tracked) => self.order.remove(tracked.place),
                None => {
                    self.tracked.insert(row, Tracked { place: 0, misses: 1 });
                }
            }
        }
    }

    /// The curve of what was counted.
    #[must_use]
    pub fn finish(self) -> MissCurve {
        let mut counts: Vec<(u64, f64)> = Vec::new(); // (slots that make it a hit, uses)
        let mut first = 0.0;
        for (level, (of_level, &first_of_level)) in (0..).zip(self.counts.iter().zip(&self.first)) {
            let stands_for = f64::from(level).exp2();
            first += first_of_level as f64 * stands_for;
            let some = (0u64..).zip(of_level).filter(|(_, count)| **count > 0);
            counts.extend(some.map(|(since, &count)| {
                ((since << level).saturating_add(1), count as f64 * stands_for)
            }));
        }
        counts.sort_unstable_by_key(|&(slots, _)| slots);
        // Uses that more slots would still miss, the longest distance first.
        let mut misses = Vec::with_capacity(counts.len() + 1);
        let mut sum = 0.0;
        for &(slots, uses) in counts.iter().rev() {
            misses.push((slots, sum));
            sum += uses;
        }
        misses.push((0, sum));
        misses.reverse();
        let share = (-f64::from(self.level)).exp2();
        let squares: f64 =
            self.tracked.values().map(|row| (row.misses as f64) * (row.misses as f64)).sum();
        MissCurve {
            rows: self.rows,
            batches: self.batches,
            uses: self.uses,
            batch_rows_max: self.batch_rows_max,
            first: first.min(self.uses as f64),
            share,
            deviation: (squares * (1.0 - share)).sqrt() / share,
            misses,
        }
    }
}

/// A row's hash (the finaliser of SplitMix64).
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn is_tracked(row: u64, level: u32) -> bool {
    mix(row.wrapping_add(0x9e37_79b9_7f4a_7c15)).leading_zeros() >= level
}

/// The order of last uses within a batch: another one in every batch.
fn order(row: u64, batch: u64) -> u64 {
    mix(row ^ mix(!batch))
}

/// Places of last uses, ascending, and for each how many are after it.
#[derive(Clone, Debug, Default)]
struct Order {
    sums: Vec<u32>, // Fenwick's tree over places from 1; sums[0] is not used
    next: usize,    // the next use's place, from 1
    total: usize,
}

impl Order {
    /// How many are after `place`.
    fn after(&self, place: usize) -> usize {
        let (mut at, mut up_to) = (place, 0);
        while at > 0 {
            up_to += self.sums[at] as usize;
            at &= at - 1;
        }
        self.total - up_to
    }

    fn remove(&mut self, place: usize) {
        self.add(place, u32::MAX); // -1
        self.total -= 1;
    }

    /// Takes the next place.
    fn push(&mut self) -> usize {
        let place = self.next;
        self.add(place, 1);
        self.next += 1;
        self.total += 1;
        place
    }

    fn add(&mut self, place: usize, value: u32) {
        let mut at = place;
        while at < self.sums.len() {
            self.sums[at] = self.sums[at].wrapping_add(value);
            at += at & at.wrapping_neg();
        }
    }

    /// Makes room for `more` places. Rows that are to take one have none now.
    fn reserve(&mut self, more: usize, tracked: &mut HashMap<u64, Tracked>) {
        if self.next + more > self.sums.len() {
            self.rebuild(more, tracked);
        }
    }

    /// Gives the rows that have a place the first ones, in the same order, and makes room for
    /// `more`, and for as many again, so that this is rare.
    fn rebuild(&mut self, more: usize, tracked: &mut HashMap<u64, Tracked>) {
        let placed = |row: &Tracked| row.place > 0 && self.holds(row.place);
        let mut rows: Vec<(usize, u64)> = tracked
            .iter()
            .filter(|(_, row)| placed(row))
            .map(|(&id, row)| (row.place, id))
            .collect();
        rows.sort_unstable();
        let room = 2 * (rows.len() + more) + 1024;
        *self = Self { sums: vec![0; room + 1], next: 1, total: 0 };
        for (_, row) in rows {
            let place = self.push();
            tracked.get_mut(&row).expect("taken from it").place = place;
        }
    }

    /// Whether somebody has the place.
    fn holds(&self, place: usize) -> bool {
        self.after(place - 1) > self.after(place)
    }
}

/// A table's uses in a sample, and how many of them a tier of lru would have missed.
#[derive(Clone, Debug, PartialEq)]
pub struct MissCurve {
    rows: u64,
    batches: u64,
    uses: u64,
    batch_rows_max: u64,
    first: f64,
    share: f64,
    deviation: f64,
    /// (slots, uses that so many and more, up to the next entry, miss though it was not the
    /// row's first), slots ascending from 0.
    misses: Vec<(u64, f64)>,
}

impl MissCurve {
    /// Rows of the table.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Batches of the sample.
    #[must_use]
    pub fn batches(&self) -> u64 {
        self.batches
    }

    /// Uses: the different rows of each batch, over all batches.
    #[must_use]
    pub fn uses(&self) -> u64 {
        self.uses
    }

    /// Uses that were a row's first in the sample: different rows. A miss of any tier, but a
    /// shorter sample has more of them than training.
    #[must_use]
    pub fn first_uses(&self) -> f64 {
        self.first
    }

    /// Uses of rows that had been used before.
    #[must_use]
    pub fn repeats(&self) -> f64 {
        self.uses as f64 - self.first
    }

    /// Most rows of a batch: a tier of fewer slots works in passes.
    #[must_use]
    pub fn batch_rows_max(&self) -> u64 {
        self.batch_rows_max
    }

    /// Share of the rows that were tracked; 1: the curve is exact.
    #[must_use]
    pub fn share_tracked(&self) -> f64 {
        self.share
    }

    /// Repeats that a tier of `slots` slots misses, [`MissCurve::first_uses`] not among them.
    #[must_use]
    pub fn misses(&self, slots: u64) -> f64 {
        if slots >= self.rows {
            return 0.0;
        }
        let at = self.misses.partition_point(|&(from, _)| from <= slots);
        // The first entry is at 0 slots.
        self.misses[at - 1].1.clamp(0.0, self.repeats())
    }

    /// Share of the repeats that a tier of `slots` slots finds; `None` when nothing repeats.
    #[must_use]
    pub fn hit_rate(&self, slots: u64) -> Option<f64> {
        (self.repeats() > 0.0).then(|| 1.0 - self.misses(slots) / self.repeats())
    }

    /// How far misses at `slots` slots, over uses, may be from those of all rows tracked, from
    /// [`MissCurve::batch_rows_max`] slots on: 0 when they were.
    ///
    /// Three standard deviations, of what the tracked rows stand for and of how far apart they
    /// make uses seem. With the share `p` of the rows and `m` misses of a row:
    /// `3 sqrt((1 - p) sum m^2) / p`, and the misses within `slots (1 ± 3 sqrt((1 - p) / (p slots)))`.
    #[must_use]
    pub fn error(&self, slots: u64) -> f64 {
        if self.share >= 1.0 || self.uses == 0 || slots >= self.rows {
            return 0.0;
        }
        let slots = slots as f64;
        let spread = DEVIATIONS * ((1.0 - self.share) * slots / self.share).sqrt();
        let at = |slots: f64| self.misses(slots.max(0.0) as u64);
        let here = at(slots);
        let beside = (at(slots - spread) - here).max(here - at(slots + spread));
        ((DEVIATIONS * self.deviation + beside) / self.uses as f64).min(1.0)
    }
}

#[cfg(test)]
mod tests;
