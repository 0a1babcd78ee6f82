//! What a sample of the data tells about a table's ids: how many differ, where they are, how hot
//! the hottest are.

use std::ops::Range;

use hashbrown::{HashMap, HashSet};

/// Blocks of rows that ids are counted in, at the most.
const HEAT_BLOCKS: u64 = 1024;

/// Counts of one table's ids.
#[derive(Clone, Debug, PartialEq)]
pub struct IdStats {
    /// Rows of the table.
    rows: u64,
    /// Ids counted.
    ids: u64,
    /// (ids read, different ones among them) at every doubling, ascending.
    growth: Vec<(f64, f64)>,
    /// Share of the ids below each block boundary, from 0 to 1.
    below: Vec<f64>,
    /// The same, each id counted once a batch.
    unique_below: Vec<f64>,
    /// (hottest rows, their share of all ids), ascending, from (0, 0) to (rows, 1).
    hottest: Vec<(f64, f64)>,
}

/// Counts ids batch by batch. Memory: the different rows of the sample.
#[derive(Clone, Debug)]
pub struct IdCounter {
    rows: u64,
    counts: HashMap<u64, u64>,
    ids: u64,
    growth: Vec<(f64, f64)>,
    next: u64,
    heat: Vec<u64>,
    unique_heat: Vec<u64>,
}

impl IdCounter {
    /// For a table of `rows` rows.
    #[must_use]
    pub fn new(rows: u64) -> Self {
        let blocks = rows.clamp(1, HEAT_BLOCKS) as usize;
        Self {
            rows,
            counts: HashMap::new(),
            ids: 0,
            growth: Vec::new(),
            next: 1,
            heat: vec![0; blocks],
            unique_heat: vec![0; blocks],
        }
    }

    /// Counts the ids of one batch. Those that name no row are left to whoever trains.
    pub fn batch(&mut self, ids: impl IntoIterator<Item = i64>) {
        let mut seen = HashSet::new();
        for id in ids {
            let Some(row) = u64::try_from(id).ok().filter(|&row| row < self.rows) else {
                continue;
            };
            let block =
                (u128::from(row) * self.heat.len() as u128 / u128::from(self.rows)) as usize;
            self.heat[block] += 1;
            self.unique_heat[block] += u64::from(seen.insert(row));
            *self.counts.entry(row).or_insert(0) += 1;
            self.ids += 1;
            if self.ids == self.next {
                self.growth.push((self.ids as f64, self.counts.len() as f64));
                self.next *= 2;
            }
        }
    }

    /// Ids counted so far.
    #[must_use]
    pub fn ids(&self) -> u64 {
        self.ids
    }

    /// The counts; `None` when there was no id.
    #[must_use]
    pub fn finish(self) -> Option<IdStats> {
        if self.ids == 0 {
            return None;
        }
        let mut growth = self.growth;
        let last = (self.ids as f64, self.counts.len() as f64);
        if growth.last() != Some(&last) {
            growth.push(last);
        }
        let mut counts: Vec<u64> = self.counts.into_values().collect();
        counts.sort_unstable_by(|a, b| b.cmp(a));
        // Good and Turing: rows that were not seen have together about the probability of those
        // seen once.
        let unseen = counts.iter().filter(|&&count| count == 1).count() as f64 / self.ids as f64;
        let seen_all = counts.len() as u64 == self.rows;
        let scale = if seen_all { 1.0 } else { 1.0 - unseen } / self.ids as f64;
        let mut hottest = vec![(0.0, 0.0)];
        let mut sum = 0u64;
        for (count, rank) in counts.iter().zip(1usize..) {
            sum += count;
            if rank.is_power_of_two() || rank == counts.len() {
                hottest.push((rank as f64, sum as f64 * scale));
            }
        }
        if !seen_all {
            hottest.push((self.rows as f64, 1.0));
        }
        Some(IdStats {
            rows: self.rows,
            ids: self.ids,
            growth,
            below: cumulated(&self.heat),
            unique_below: cumulated(&self.unique_heat),
            hottest,
        })
    }
}

/// Shares below each boundary.
fn cumulated(heat: &[u64]) -> Vec<f64> {
    let total = heat.iter().sum::<u64>() as f64;
    let mut sum = 0;
    let mut below = vec![0.0];
    below.extend(heat.iter().map(|count| {
        sum += count;
        sum as f64 / total
    }));
    below
}

impl IdStats {
    /// Ids counted.
    #[must_use]
    pub fn ids(&self) -> u64 {
        self.ids
    }

    /// Different rows seen.
    #[must_use]
    pub fn distinct(&self) -> u64 {
        self.growth.last().map_or(0, |last| last.1 as u64)
    }

    /// Expected different rows among `ids` ids: the sample's own growth, between its points and
    /// beyond them as a power law (Heaps' law).
    pub(super) fn unique(&self, ids: f64) -> f64 {
        if ids <= 1.0 {
            return ids.max(0.0);
        }
        let at = self.growth.partition_point(|&(n, _)| n < ids);
        let (low, high) = match at.min(self.growth.len() - 1) {
            0 => ((1.0, 1.0), self.growth[0]),
            i => (self.growth[i - 1], self.growth[i]),
        };
        let slope =
            if high.0 > low.0 { (high.1 / low.1).ln() / (high.0 / low.0).ln() } else { 1.0 };
        low.1 * (ids / low.0).powf(slope.clamp(0.0, 1.0))
    }

    /// Share of all ids, and of the unique ones of a batch, that rows in `range` take.
    pub(super) fn share(&self, range: &Range<u64>) -> (f64, f64) {
        let between = |below: &[f64]| self.at(below, range.end) - self.at(below, range.start);
        (between(&self.below), between(&self.unique_below))
    }

    fn at(&self, below: &[f64], row: u64) -> f64 {
        let x = row as f64 / self.rows.max(1) as f64 * (below.len() - 1) as f64;
        let block = (x as usize).min(below.len() - 2);
        below[block] + (below[block + 1] - below[block]) * (x - block as f64)
    }

    /// Blocks of rows with equal shares of the ids, `parts` of them.
    pub(super) fn even_cuts(&self, parts: usize) -> Vec<Range<u64>> {
        let blocks = self.below.len() - 1;
        let mut start = 0;
        let mut cuts = Vec::with_capacity(parts);
        for part in 1..=parts {
            let wanted = part as f64 / parts as f64;
            let block = self.below.partition_point(|&share| share < wanted).clamp(1, blocks) - 1;
            let (low, high) = (self.below[block], self.below[block + 1]);
            let inside = if high > low { (wanted - low) / (high - low) } else { 1.0 };
            let row = (block as f64 + inside.clamp(0.0, 1.0)) / blocks as f64 * self.rows as f64;
            let end = if part == parts { self.rows } else { (row.round() as u64).min(self.rows) };
            cuts.push(start..end.max(start));
            start = end.max(start);
        }
        cuts
    }

    /// Share of the ids that the hottest `share` of the rows take.
    pub(super) fn hit(&self, share: f64) -> f64 {
        let rows = share * self.rows as f64;
        let at = self.hottest.partition_point(|&(n, _)| n < rows).clamp(1, self.hottest.len() - 1);
        let ((n0, h0), (n1, h1)) = (self.hottest[at - 1], self.hottest[at]);
        (h0 + (h1 - h0) * (rows - n0) / (n1 - n0)).clamp(0.0, 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(rows: u64, batches: &[&[i64]]) -> IdStats {
        let mut counter = IdCounter::new(rows);
        for batch in batches {
            counter.batch(batch.iter().copied());
        }
        counter.finish().unwrap()
    }

    #[test]
    fn counts_of_a_small_sample() {
        let stats = stats(4, &[&[0, 0, 0, 1], &[0, 2, 2, 99], &[-1]]);
        assert_eq!((stats.ids(), stats.distinct()), (7, 3));
        assert_eq!(stats.share(&(0..4)), (1.0, 1.0));
        // Ids 0: 4 of 7; once a batch: 2 of the 4 pairs (0, 1), (0, 2).
        let (ids, unique) = stats.share(&(0..1));
        assert!((ids - 4.0 / 7.0).abs() < 1e-12 && (unique - 0.5).abs() < 1e-12);
        assert_eq!(stats.unique(7.0), 3.0);
        assert!(stats.unique(14.0) >= 3.0 && stats.unique(3.0) < 3.0);
        // Of the ids, 1 of 7 was seen once, so that much is kept for the row not seen.
        assert_eq!((stats.hit(0.0), stats.hit(1.0)), (0.0, 1.0));
        assert!((stats.hit(0.25) - 4.0 / 7.0 * 6.0 / 7.0).abs() < 1e-12);
        assert!((stats.hit(0.75) - 6.0 / 7.0).abs() < 1e-12);
    }

    #[test]
    fn no_ids_no_stats() {
        assert_eq!(IdCounter::new(5).finish(), None);
        let mut counter = IdCounter::new(0);
        counter.batch([0, 1]);
        assert_eq!(counter.finish(), None);
    }

    #[test]
    fn even_cuts_follow_the_ids() {
        // Half of the ids below row 200 of 1000.
        let ids: Vec<i64> = (0..1000).map(|i| if i % 2 == 0 { i % 200 } else { i }).collect();
        let stats = stats(1000, &[&ids]);
        for parts in [1, 2, 3, 7, 2000] {
            let cuts = stats.even_cuts(parts);
            assert_eq!(cuts.len(), parts);
            assert_eq!((cuts[0].start, cuts[parts - 1].end), (0, 1000));
            assert!(cuts.windows(2).all(|pair| pair[0].end == pair[1].start));
            if parts < 10 {
                for cut in cuts {
                    let share = stats.share(&cut).0 * parts as f64;
                    assert!((0.7..1.3).contains(&share), "{parts} parts: {cut:?} has {share}");
                }
            }
        }
    }
}
