//! What the planner knows of tables and of the work on them.

use std::ops::Range;

use super::sample::IdStats;
use super::{Route, Sharding};
use crate::SparseOptimizer;
use crate::optimizer::{RowSum, StateWidth};

/// One table: its size, and how much it is looked up.
#[derive(Clone, Debug, PartialEq)]
pub struct TableLoad {
    /// Name, unique.
    pub name: String,
    /// Rows.
    pub rows: u64,
    /// Columns, from 1.
    pub dim: usize,
    /// Bytes of a stored weight.
    pub element_bytes: usize,
    /// float32 state tensors of shape (rows, dim): cut with the columns.
    pub column_states: usize,
    /// float32 state tensors of shape (rows): every block of columns keeps a copy.
    pub row_states: usize,
    /// Whether the optimizer needs norms of whole rows, so that columns are not to be cut.
    pub whole_rows: bool,
    /// Mean ids per sample of each feature that looks rows up in it.
    pub ids_per_sample: Vec<f64>,
    /// What a sample of the data told; without it ids count as uniform.
    pub stats: Option<IdStats>,
    /// The sharding asked for; `None` leaves it to the planner.
    pub sharding: Option<Sharding>,
}

impl TableLoad {
    /// A float32 table without sample and constraint.
    #[must_use]
    pub fn new(
        name: impl Into<String>,
        rows: u64,
        dim: usize,
        optimizer: &SparseOptimizer,
        ids_per_sample: Vec<f64>,
    ) -> Self {
        let states = |width| optimizer.state().iter().filter(|s| s.width == width).count();
        Self {
            name: name.into(),
            rows,
            dim,
            element_bytes: 4,
            column_states: states(StateWidth::Dim),
            row_states: states(StateWidth::One),
            whole_rows: optimizer.row_sum() == RowSum::Norms,
            ids_per_sample,
            stats: None,
            sharding: None,
        }
    }

    /// Bytes of one row of `columns` columns with its state.
    #[must_use]
    pub fn row_bytes(&self, columns: usize) -> u64 {
        (columns * (self.element_bytes + 4 * self.column_states) + 4 * self.row_states) as u64
    }

    /// Bytes of a rectangle with its state.
    #[must_use]
    pub fn bytes(&self, rows: &Range<u64>, columns: &Range<usize>) -> u64 {
        (rows.end - rows.start).saturating_mul(self.row_bytes(columns.len()))
    }

    /// Bytes of the whole table with its state.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.rows.saturating_mul(self.row_bytes(self.dim))
    }

    /// Mean ids per sample over all its features.
    pub(super) fn ids(&self) -> f64 {
        self.ids_per_sample.iter().sum()
    }

    /// Expected different rows among `ids` ids.
    ///
    /// From the sample's growth, or for uniform ids: `rows * (1 - exp(-ids / rows))`.
    pub(super) fn unique(&self, ids: f64) -> f64 {
        let rows = self.rows as f64;
        let grown = match &self.stats {
            Some(stats) => stats.unique(ids),
            None if self.rows == 0 => 0.0,
            None => -rows * (-ids / rows).exp_m1(),
        };
        grown.clamp(0.0, ids.min(rows))
    }

    pub(super) fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        if self.dim == 0 {
            faults.push(format!("table {}: dim is 0; it must be from 1 up", self.name));
        }
        if self.ids_per_sample.iter().any(|ids| !(*ids >= 0.0 && ids.is_finite())) {
            faults.push(format!("table {}: ids per sample must be numbers from 0 up", self.name));
        }
        let widest = self.dim.checked_mul(4 * (2 + self.column_states)).map(|w| w as u64);
        if widest.and_then(|w| w.checked_mul(self.rows.max(1))).is_none() {
            faults.push(format!(
                "table {}: {} rows of {} columns exceed 64 bits of bytes",
                self.name, self.rows, self.dim
            ));
        }
        faults
    }
}

/// How the tables are used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Samples of a step on each rank.
    pub batch_per_rank: f64,
    /// Batches whose ids and pooled vectors are in memory at once.
    pub batches_in_flight: usize,
    /// Copies of a batch's unique rows that read-ahead keeps where rows come from lower tiers: 2
    /// for dual buffering, 0 for none.
    pub row_buffers: usize,
    /// The route to take; `None` leaves the choice to the planner.
    pub route: Option<Route>,
}

impl Workload {
    /// Two batches in flight, two row buffers, any route.
    #[must_use]
    pub fn new(batch_per_rank: f64) -> Self {
        Self { batch_per_rank, batches_in_flight: 2, row_buffers: 2, route: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_count_states_as_they_are_cut() {
        let adagrad =
            SparseOptimizer::Adagrad { lr: 0.1, eps: 0.0, decay: crate::WeightDecay::None };
        let table = TableLoad::new("t", 10, 64, &adagrad, vec![1.0]);
        assert_eq!(table.total_bytes(), 10 * 64 * 8);
        let partial = SparseOptimizer::PartialRowwiseAdam {
            lr: 0.1,
            eps: 0.0,
            beta1: 0.9,
            beta2: 0.9,
            weight_decay: 0.0,
        };
        let table =
            TableLoad { element_bytes: 2, ..TableLoad::new("t", 10, 64, &partial, vec![1.0]) };
        assert_eq!(table.total_bytes(), 10 * (64 * 6 + 4));
        assert_eq!(table.bytes(&(2..5), &(32..64)), 3 * (32 * 6 + 4));
    }

    #[test]
    fn uniform_ids_meet_each_other_as_balls_in_bins_do() {
        let table = TableLoad::new("t", 1000, 4, &SparseOptimizer::Sgd { lr: 0.1 }, vec![2.0]);
        assert_eq!(table.unique(0.0), 0.0);
        assert!((table.unique(1000.0) - 632.12).abs() < 0.01);
        assert!(table.unique(1e9) <= 1000.0);
        let one = TableLoad { rows: 1, ..table.clone() };
        assert_eq!(one.unique(100.0), 1.0);
        assert_eq!(TableLoad { rows: 0, ..table }.unique(5.0), 0.0);
    }
}
