//! How a log is kept.

use super::format::{Geometry, PAGE};
use super::places::SLOTS_MAX;
use super::read::Reader;
use crate::{CacheError, Result};

/// When segments with dead records are rewritten.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compaction {
    /// By a thread of the log, as soon as the live share falls below its bound.
    #[default]
    Background,
    /// Only when asked for, or when the budget is used up.
    OnDemand,
}

/// How a log is kept. The default suits tables of a few GB on an SSD.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Bytes after which a segment is sealed \[64 MiB\]. Each segment takes a map or a file
    /// descriptor.
    pub segment_bytes: u64,
    /// Most bytes of all files, 0 for no bound \[0\]. One segment of it is kept free for
    /// compaction. At least four segments.
    pub budget_bytes: u64,
    /// Compaction starts when live records fall below this share of all, in (0, 1\] \[0.5\]. Files
    /// then take about live bytes / share, and n bytes of puts cost up to n * share / (1 - share)
    /// of compaction.
    pub live_share: f64,
    /// Most bytes a second that background compaction reads and writes together, 0 for no bound
    /// \[0\]. Calls that wait for room lift it.
    pub compaction_bytes_per_s: u64,
    /// When compaction runs \[in the background\].
    pub compaction: Compaction,
    /// How sealed segments are read \[auto\].
    pub reader: Reader,
    /// Reads in flight of one get with io_uring, 1 to 4096 \[64\].
    pub queue_depth: u32,
    /// `Some(n)` where rows are numbered 0..n: the index takes 8 bytes a row; `None` for any
    /// ids: 20 to 39 \[None\].
    pub rows: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            segment_bytes: 64 << 20,
            budget_bytes: 0,
            live_share: 0.5,
            compaction_bytes_per_s: 0,
            compaction: Compaction::default(),
            reader: Reader::default(),
            queue_depth: 64,
            rows: None,
        }
    }
}

impl Options {
    /// Records of a segment without its seal, once all options are known to be right.
    pub(crate) fn capacity(&self, geometry: &Geometry) -> Result<u64> {
        let mut faults = Vec::new();
        let slots = geometry.slots_in(self.segment_bytes / PAGE * PAGE).min(SLOTS_MAX);
        if slots < 3 {
            faults.push(format!(
                "segment_bytes = {} hold no 3 records of {} bytes and a header of {PAGE}",
                self.segment_bytes, geometry.record_bytes
            ));
        }
        let least = self.segment_bytes.saturating_mul(4);
        if self.budget_bytes != 0 && self.budget_bytes < least {
            let (budget, segment) = (self.budget_bytes, self.segment_bytes);
            faults.push(format!(
                "budget_bytes = {budget} are less than four segments of {segment} bytes; \
                 use smaller segments"
            ));
        }
        if !(self.live_share > 0.0 && self.live_share <= 1.0) {
            faults.push(format!("live_share = {} is not in (0, 1]", self.live_share));
        }
        if !(1..=4096).contains(&self.queue_depth) {
            faults.push(format!("queue_depth = {} is not in 1..=4096", self.queue_depth));
        }
        if faults.is_empty() {
            return Ok(slots - 1);
        }
        Err(CacheError::Options { faults: faults.join("; ") })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RowLayout;

    #[test]
    fn all_faults_are_listed_at_once() {
        let geometry = Geometry::new(RowLayout { weight_bytes: 100, state_bytes: 0 }).unwrap();
        assert!(Options::default().capacity(&geometry).unwrap() > 500_000);
        let options = Options {
            segment_bytes: 4200,
            budget_bytes: 10_000,
            live_share: f64::NAN,
            queue_depth: 0,
            ..Options::default()
        };
        let error = options.capacity(&geometry).unwrap_err().to_string();
        for part in ["segment_bytes = 4200", "budget_bytes = 10000", "live_share = NaN", "depth"] {
            assert!(error.contains(part), "{error}");
        }
    }
}
