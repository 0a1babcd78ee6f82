//! Sets of times: sorted intervals that do not touch.

/// A set of times, in microseconds.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Intervals(Vec<(f64, f64)>);

impl Intervals {
    /// The union of `parts`, cut to `window`.
    pub(super) fn union(parts: impl Iterator<Item = (f64, f64)>, window: (f64, f64)) -> Self {
        let mut parts: Vec<(f64, f64)> = parts
            .map(|(start, end)| (start.max(window.0), end.min(window.1)))
            .filter(|(start, end)| start < end)
            .collect();
        parts.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut merged: Vec<(f64, f64)> = Vec::new();
        for (start, end) in parts {
            match merged.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                _ => merged.push((start, end)),
            }
        }
        Self(merged)
    }

    /// Microseconds in all.
    pub(super) fn length(&self) -> f64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// Microseconds between two times.
    pub(super) fn within(&self, from: f64, to: f64) -> f64 {
        let first = self.0.partition_point(|part| part.1 <= from);
        let parts = self.0[first..].iter().take_while(|part| part.0 < to);
        parts.map(|&(start, end)| end.min(to) - start.max(from)).sum()
    }

    /// Microseconds of this set that are not in `other`.
    pub(super) fn outside(&self, other: &Self) -> f64 {
        let mut total = self.length();
        let mut at = 0;
        for &(start, end) in &self.0 {
            while at < other.0.len() && other.0[at].1 <= start {
                at += 1;
            }
            for &(from, to) in other.0[at..].iter().take_while(|part| part.0 < end) {
                total -= to.min(end) - from.max(start);
            }
        }
        total
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(parts: &[(f64, f64)]) -> Intervals {
        Intervals::union(parts.iter().copied(), (0.0, 100.0))
    }

    #[test]
    fn unions_are_merged_and_cut() {
        assert_eq!(set(&[(5.0, 7.0), (1.0, 3.0), (2.0, 4.0), (4.0, 5.0)]).0, [(1.0, 7.0)]);
        assert_eq!(set(&[(-5.0, 1.0), (99.0, 200.0), (3.0, 3.0)]).0, [(0.0, 1.0), (99.0, 100.0)]);
        assert_eq!(set(&[]).length(), 0.0);
    }

    #[test]
    fn the_outside_is_what_the_other_does_not_cover() {
        let device = set(&[(10.0, 20.0), (30.0, 40.0), (60.0, 61.0)]);
        assert_eq!(set(&[(0.0, 100.0)]).outside(&device), 79.0);
        assert_eq!(set(&[(12.0, 18.0), (19.0, 31.0), (39.0, 50.0)]).outside(&device), 20.0);
        assert_eq!(device.outside(&device), 0.0);
        assert_eq!(device.outside(&set(&[])), 21.0);
        assert_eq!((device.within(15.0, 35.0), device.within(20.0, 30.0)), (10.0, 0.0));
    }
}
