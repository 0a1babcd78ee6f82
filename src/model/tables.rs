//! A model's tables, all here or shared with other ranks: one set of operations for both.

use std::ops::Range;
use std::sync::Arc;

use tessera_cache::StoreStats;
use tessera_data::Jagged;
use tessera_embedding::{
    BadIdPolicy, EmbeddingCollection, Held, HostLookup, Lookup, LookupOps, Result, Routed, Schema,
    ShardedCollection, SparseStep, UpdateStats,
};

use crate::metrics::Metrics;

/// The tables of a model.
pub(super) enum Tables<D: LookupOps> {
    /// All on this rank, which is the only one.
    Alone(EmbeddingCollection<D>),
    /// Spread over ranks.
    Shared(Box<ShardedCollection<D>>),
}

/// A batch whose ids were checked; no other rank has heard of it.
pub(super) enum Checked<D: LookupOps> {
    Alone(Lookup<D>),
    Shared(HostLookup),
}

/// A batch that can be looked up.
pub(super) enum Found<D: LookupOps> {
    Alone(Lookup<D>),
    Shared(Routed<D>),
}

/// A rectangle of a table that this rank holds.
pub(super) struct Rectangle {
    pub(super) rows: Range<u64>,
    pub(super) columns: Range<usize>,
    /// Whether this rank is the one that writes it to checkpoints.
    pub(super) writes: bool,
}

impl<D: LookupOps> Tables<D> {
    pub(super) fn schema(&self) -> &Arc<Schema> {
        match self {
            Self::Alone(tables) => tables.schema(),
            Self::Shared(tables) => tables.schema(),
        }
    }

    pub(super) fn resident_bytes(&self, table: usize) -> Result<u64> {
        match self {
            Self::Alone(tables) => tables.resident_bytes(table),
            Self::Shared(tables) => tables.resident_bytes(table),
        }
    }

    /// Checks the ids of this rank's samples; nothing is written and nobody is told.
    pub(super) fn check(
        &self,
        stream: &D::Stream,
        features: Vec<Jagged>,
        policy: BadIdPolicy,
    ) -> Result<Checked<D>> {
        Ok(match self {
            Self::Alone(tables) => Checked::Alone(tables.resolve(stream, features, policy)?),
            Self::Shared(tables) => Checked::Shared(tables.check(features, policy)?),
        })
    }

    /// Tells the owners of rows what the batch needs. A collective.
    pub(super) fn route(&mut self, stream: &D::Stream, checked: Checked<D>) -> Result<Found<D>> {
        match (self, checked) {
            (Self::Alone(_), Checked::Alone(lookup)) => Ok(Found::Alone(lookup)),
            (Self::Shared(tables), Checked::Shared(batch)) => {
                Ok(Found::Shared(tables.route(stream, batch)?))
            }
            _ => unreachable!("a batch is used by the tables that checked it"),
        }
    }

    /// Finds each row's occurrences, which an update needs.
    pub(super) fn group(&self, stream: &D::Stream, found: &Found<D>) -> Result<()> {
        match (self, found) {
            (Self::Alone(tables), Found::Alone(lookup)) => tables.resolver().group(stream, lookup),
            // Owners group what they were asked for when it comes to the update.
            _ => Ok(()),
        }
    }

    /// Whether rows of this rank move between tiers.
    pub(super) fn moves(&self) -> bool {
        match self {
            Self::Alone(tables) => tables.moves(),
            Self::Shared(tables) => tables.moves(),
        }
    }

    /// Brings the rows that a batch needs of this rank to device memory, if there is room.
    pub(super) fn hold(&mut self, stream: &D::Stream, found: &mut Found<D>) -> Result<()> {
        match (self, found) {
            (Self::Alone(tables), Found::Alone(lookup)) => tables.hold(stream, lookup),
            (Self::Shared(tables), Found::Shared(routed)) => tables.hold(stream, routed),
            _ => unreachable!("a batch is used by the tables that checked it"),
        }
    }

    /// What the stores of a table did so far.
    pub(super) fn store_stats(&self, table: usize) -> Result<StoreStats> {
        match self {
            Self::Alone(tables) => tables.store_stats(table),
            Self::Shared(tables) => tables.store_stats(table),
        }
    }

    /// Pools the batch's bags. A collective.
    pub(super) fn forward(
        &mut self,
        stream: &D::Stream,
        found: &mut Found<D>,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        match (self, found) {
            (Self::Alone(tables), Found::Alone(lookup)) => {
                tables.forward(stream, lookup, out, stride)
            }
            (Self::Shared(tables), Found::Shared(routed)) => {
                tables.forward(stream, routed, out, stride)
            }
            _ => unreachable!("a batch is used by the tables that checked it"),
        }
    }

    /// Sends gradients to the owners of rows. A collective.
    pub(super) fn exchange_gradients(
        &self,
        stream: &D::Stream,
        found: &mut Found<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        match (self, found) {
            (Self::Shared(tables), Found::Shared(routed)) => {
                tables.exchange_gradients(stream, routed, grad, stride)
            }
            _ => Ok(()),
        }
    }

    /// Squared norm of all rows' gradients over all ranks. A collective.
    pub(super) fn grad_sq_norm(
        &self,
        stream: &D::Stream,
        found: &Found<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<f64> {
        match (self, found) {
            (Self::Alone(tables), Found::Alone(lookup)) => {
                tables.grad_sq_norm(stream, lookup, grad, stride)
            }
            (Self::Shared(tables), Found::Shared(routed)) => tables.grad_sq_norm(stream, routed),
            _ => unreachable!("a batch is used by the tables that checked it"),
        }
    }

    /// Moves this rank's rows. A collective.
    pub(super) fn update(
        &mut self,
        stream: &D::Stream,
        found: Found<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
        step: &SparseStep,
    ) -> Result<UpdateStats> {
        match (self, found) {
            (Self::Alone(tables), Found::Alone(lookup)) => {
                tables.update(stream, &lookup, grad, stride, step)
            }
            (Self::Shared(tables), Found::Shared(routed)) => tables.update(stream, routed, step),
            _ => unreachable!("a batch is used by the tables that checked it"),
        }
    }

    /// Begins to average groups, if that is due after step `t`; it goes on beside the routing of
    /// the next batch. A collective.
    pub(super) fn start_sync(&mut self, t: u64) -> Result<()> {
        match self {
            Self::Shared(tables) if tables.sync_due(t) => tables.start_sync(),
            _ => Ok(()),
        }
    }

    /// Ends what [`Tables::start_sync`] began, if it did. A collective.
    pub(super) fn finish_sync(&mut self, stream: &D::Stream) -> Result<()> {
        match self {
            Self::Shared(tables) => tables.finish_sync(stream).map(|_| ()),
            Self::Alone(_) => Ok(()),
        }
    }

    /// Averages groups now. A collective.
    pub(super) fn sync(&mut self, stream: &D::Stream) -> Result<()> {
        self.finish_sync(stream)?;
        match self {
            Self::Shared(tables) => tables.sync(stream).map(|_| ()),
            Self::Alone(_) => Ok(()),
        }
    }

    /// Gives back the memory of a batch that is only looked up.
    pub(super) fn finish(&mut self, found: Found<D>) {
        if let (Self::Shared(tables), Found::Shared(routed)) = (self, found) {
            tables.finish(routed);
        }
    }

    /// What this rank holds of a table.
    pub(super) fn rectangles(&self, table: usize) -> Vec<Rectangle> {
        match self {
            Self::Alone(tables) => {
                let spec = &tables.schema().tables()[table];
                vec![Rectangle { rows: 0..spec.rows, columns: 0..spec.dim, writes: true }]
            }
            Self::Shared(tables) => {
                let first = tables.ranks().rank() == 0;
                // Groups hold the same: the first one writes.
                let writes = tables.replicas().is_none_or(|replicas| replicas.rank() == 0);
                let of_table = tables.held().iter().filter(|held| held.table() == table);
                of_table
                    .map(|held| Rectangle {
                        rows: held.rows(),
                        columns: held.columns(),
                        writes: writes && (first || !held.replicated()),
                    })
                    .collect()
            }
        }
    }

    /// The collection with the rectangle of `table` that holds `rows` from column `column` on, the
    /// table's number in it, and the rows counted from its first.
    ///
    /// # Panics
    /// When this rank does not hold them.
    pub(super) fn store(
        &self,
        table: usize,
        rows: &Range<u64>,
        column: usize,
    ) -> (&EmbeddingCollection<D>, usize, Range<u64>) {
        match self {
            Self::Alone(tables) => (tables, table, rows.clone()),
            Self::Shared(tables) => {
                let held = tables.held().iter().find(|held| holds(held, table, rows, column));
                let held = held.expect("blocks are of what a rank holds");
                (&held.store, 0, within(held, rows))
            }
        }
    }

    /// Columns whose rectangles keep `columns` of a state tensor: every block of the table's
    /// columns that is here, where the tensor has one number a row.
    pub(super) fn state_columns(
        &self,
        table: usize,
        state: &str,
        columns: &Range<usize>,
    ) -> Vec<usize> {
        let spec = &self.schema().tables()[table];
        let tensor = spec.optimizer.state().iter().find(|tensor| tensor.name == state);
        if tensor.is_some_and(|tensor| tensor.columns(spec.dim) == 1) {
            let mut starts: Vec<usize> =
                self.rectangles(table).into_iter().map(|held| held.columns.start).collect();
            starts.sort_unstable();
            starts.dedup();
            return starts;
        }
        vec![columns.start]
    }

    /// As [`Tables::store`], to write to.
    pub(super) fn store_mut(
        &mut self,
        table: usize,
        rows: &Range<u64>,
        column: usize,
    ) -> (&mut EmbeddingCollection<D>, usize, Range<u64>) {
        match self {
            Self::Alone(tables) => (tables, table, rows.clone()),
            Self::Shared(tables) => {
                let mut all = tables.held_mut().iter_mut();
                let held = all.find(|held| holds(held, table, rows, column));
                let held = held.expect("blocks are of what a rank holds");
                let rows = within(held, rows);
                (&mut held.store, 0, rows)
            }
        }
    }
}

/// Whether a rectangle is of `table` and has the first of `rows` and the column.
fn holds<D: LookupOps>(held: &Held<D>, table: usize, rows: &Range<u64>, column: usize) -> bool {
    held.table() == table && held.rows().contains(&rows.start) && held.columns().contains(&column)
}

/// Rows of the table as rows of a rectangle.
fn within<D: LookupOps>(held: &Held<D>, rows: &Range<u64>) -> Range<u64> {
    let first = held.rows().start;
    rows.start - first..rows.end - first
}

impl<D: LookupOps> Found<D> {
    /// Rows that this rank looks up, for itself and for others.
    pub(super) fn rows_asked(&self) -> u64 {
        match self {
            Self::Alone(lookup) => lookup.rows_read().iter().sum(),
            Self::Shared(routed) => routed.rows_asked(),
        }
    }

    /// Counts a lookup that was done, and its time in seconds.
    pub(super) fn observe(&self, metrics: &Metrics, seconds: f64) {
        match self {
            Self::Alone(lookup) => metrics.embedding.observe_lookup(lookup, seconds),
            Self::Shared(routed) => metrics.embedding.observe_routed(routed, seconds),
        }
    }
}
