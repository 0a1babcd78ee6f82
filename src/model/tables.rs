//! A model's tables, all here or shared with other ranks: one set of operations for both.

use std::ops::Range;
use std::sync::Arc;

use tessera_cache::{IdMapStats, StoreStats};
use tessera_data::Jagged;
use tessera_embedding::{
    BadIdPolicy, EmbeddingCollection, Held, HostLookup, LookupOps, Result, Schema,
    ShardedCollection, SparseStep, UpdateStats, micro_batches,
};

use super::router::{Found, FoundRows, RouterTables};

/// The tables of a model.
pub(super) enum Tables<D: LookupOps> {
    /// All on this rank, which is the only one.
    Alone(EmbeddingCollection<D>),
    /// Spread over ranks.
    Shared(Box<ShardedCollection<D>>),
}

/// A rectangle of a table that this rank holds; of a dynamic table, some of its ids.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) table: usize,
    /// Its number among what this rank holds.
    pub(super) held: usize,
    /// Which of the table's blocks of rows it is.
    pub(super) block: usize,
    pub(super) blocks: usize,
    pub(super) rows: Range<u64>,
    pub(super) columns: Range<usize>,
    /// Whether this rank is the one that writes it to checkpoints.
    pub(super) writes: bool,
}

impl<D: LookupOps> Tables<D> {
    /// What this rank holds of a table.
    pub(super) fn pieces(&self, table: usize) -> Vec<Piece> {
        match self {
            Self::Alone(tables) => {
                let spec = &tables.schema().tables()[table];
                vec![Piece {
                    table,
                    held: 0,
                    block: 0,
                    blocks: 1,
                    rows: 0..spec.rows,
                    columns: 0..spec.dim,
                    writes: true,
                }]
            }
            Self::Shared(tables) => {
                let first = tables.ranks().rank() == 0;
                // Groups hold the same: the first one writes.
                let writes = tables.replicas().is_none_or(|replicas| replicas.rank() == 0);
                let all = tables.held().iter().enumerate();
                all.filter(|(_, held)| held.table() == table)
                    .map(|(number, held)| {
                        let (block, blocks) = held.block();
                        Piece {
                            table,
                            held: number,
                            block,
                            blocks,
                            rows: held.rows(),
                            columns: held.columns(),
                            writes: writes && (first || !held.replicated()),
                        }
                    })
                    .collect()
            }
        }
    }

    /// Blocks of rows of a table.
    pub(super) fn row_blocks(&self, table: usize) -> usize {
        match self {
            Self::Alone(_) => 1,
            Self::Shared(tables) => tables.row_blocks(table),
        }
    }

    /// The collection that keeps a piece, and the table's number in it.
    pub(super) fn of_piece(&self, piece: &Piece) -> (&EmbeddingCollection<D>, usize) {
        match self {
            Self::Alone(tables) => (tables, piece.table),
            Self::Shared(tables) => (&tables.held()[piece.held].store, 0),
        }
    }

    /// As [`Tables::of_piece`], to write to.
    pub(super) fn of_piece_mut(&mut self, piece: &Piece) -> (&mut EmbeddingCollection<D>, usize) {
        match self {
            Self::Alone(tables) => (tables, piece.table),
            Self::Shared(tables) => (&mut tables.held_mut()[piece.held].store, 0),
        }
    }

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
    pub(super) fn check(&self, features: Vec<Jagged>, policy: BadIdPolicy) -> Result<HostLookup> {
        match self {
            Self::Alone(tables) => tables.resolver().check(features, policy),
            Self::Shared(tables) => tables.check(features, policy),
        }
    }

    /// Finds the rows of a batch that is only looked up, and tells their owners what it needs. A
    /// collective.
    pub(super) fn route(&mut self, stream: &D::Stream, checked: HostLookup) -> Result<Found<D>> {
        let (rows, samples) = match self {
            Self::Alone(tables) => {
                let lookup = tables.resolver().route(stream, checked)?;
                let samples = lookup.bags();
                (FoundRows::Alone(lookup), samples)
            }
            Self::Shared(tables) => {
                let routed = tables.route(stream, checked)?;
                let samples = routed.bags();
                (FoundRows::Shared(Box::new(routed)), samples)
            }
        };
        Ok(Found { rows, micro: micro_batches(samples, 1), ready: None })
    }

    /// What routes batches for these tables on a thread of its own, in micro-batches. A
    /// collective.
    pub(super) fn router(&self, name: &str, micro_batches: usize) -> Result<RouterTables<D>> {
        Ok(match self {
            Self::Alone(tables) => {
                RouterTables::Alone(tables.resolver().clone(), tables.fetchers())
            }
            Self::Shared(tables) => RouterTables::Shared(tables.router(name, micro_batches)?),
        })
    }

    /// The step that messages belong to from now on.
    pub(super) fn set_step(&self, step: u64) {
        if let Self::Shared(tables) = self {
            tables.set_step(step);
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
        match (self, &mut found.rows) {
            (Self::Alone(tables), FoundRows::Alone(lookup)) => tables.hold(stream, lookup),
            (Self::Shared(tables), FoundRows::Shared(routed)) => tables.hold(stream, routed),
            _ => unreachable!("a batch is used by the tables that checked it"),
        }
    }

    /// What became of the ids of a dynamic table that this rank keeps.
    pub(super) fn id_stats(&self, found: &Found<D>, table: usize) -> Option<IdMapStats> {
        match (self, &found.rows) {
            (Self::Alone(_), FoundRows::Alone(lookup)) => lookup.id_stats(table).copied(),
            (Self::Shared(tables), FoundRows::Shared(routed)) => tables.id_stats(routed, table),
            _ => None,
        }
    }

    /// What the stores of a table did so far.
    pub(super) fn store_stats(&self, table: usize) -> Result<StoreStats> {
        match self {
            Self::Alone(tables) => tables.store_stats(table),
            Self::Shared(tables) => tables.store_stats(table),
        }
    }

    /// Begins to look a batch up. Alone, that is all of it: every bag is pooled into `out`. With
    /// other ranks, vectors set out: of all micro-batches if they are to `overlap`. A collective.
    pub(super) fn begin_forward(
        &mut self,
        stream: &D::Stream,
        found: &mut Found<D>,
        overlap: bool,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        match (self, &mut found.rows) {
            (Self::Alone(tables), FoundRows::Alone(lookup)) => {
                tables.forward(stream, lookup, out, stride)
            }
            (Self::Shared(tables), FoundRows::Shared(routed)) => {
                tables.look_up(stream, routed)?;
                let posted = if overlap { found.micro.len() } else { 0 };
                (0..posted).try_for_each(|micro| tables.post_vectors(stream, routed, micro))
            }
            _ => unreachable!("a batch is used by the tables that routed it"),
        }
    }

    /// Pools the bags of a micro-batch, if [`Tables::begin_forward`] did not. A collective.
    pub(super) fn forward_micro(
        &mut self,
        stream: &D::Stream,
        found: &mut Found<D>,
        micro: usize,
        overlap: bool,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        match (self, &mut found.rows) {
            (Self::Shared(tables), FoundRows::Shared(routed)) => {
                if !overlap {
                    tables.post_vectors(stream, routed, micro)?;
                }
                tables.forward_micro(stream, routed, micro, out, stride)
            }
            _ => Ok(()),
        }
    }

    /// Sends the gradients to their owners that are complete after a micro-batch. A collective.
    pub(super) fn post_gradients(
        &self,
        stream: &D::Stream,
        found: &mut Found<D>,
        micro: usize,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        match (self, &mut found.rows) {
            (Self::Shared(tables), FoundRows::Shared(routed)) => {
                tables.post_gradients(stream, routed, micro, grad, stride)
            }
            _ => Ok(()),
        }
    }

    /// Waits for the gradients that were sent. A collective.
    pub(super) fn receive_gradients(&self, stream: &D::Stream, found: &mut Found<D>) -> Result<()> {
        match (self, &mut found.rows) {
            (Self::Shared(tables), FoundRows::Shared(routed)) => {
                tables.receive_gradients(stream, routed)
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
        match (self, &found.rows) {
            (Self::Alone(tables), FoundRows::Alone(lookup)) => {
                tables.grad_sq_norm(stream, lookup, grad, stride)
            }
            (Self::Shared(tables), FoundRows::Shared(routed)) => {
                tables.grad_sq_norm(stream, routed)
            }
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
        match (self, found.rows) {
            (Self::Alone(tables), FoundRows::Alone(lookup)) => {
                tables.update(stream, &lookup, grad, stride, step)
            }
            (Self::Shared(tables), FoundRows::Shared(routed)) => {
                tables.update(stream, *routed, step)
            }
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
    pub(super) fn finish(&mut self, stream: &D::Stream, found: Found<D>) -> Result<()> {
        if let (Self::Shared(tables), FoundRows::Shared(routed)) = (self, found.rows) {
            tables.finish(stream, *routed)?;
        }
        Ok(())
    }

    /// The collections that keep this rank's rows.
    pub(super) fn collections(&mut self) -> Vec<&mut EmbeddingCollection<D>> {
        match self {
            Self::Alone(tables) => vec![tables],
            Self::Shared(tables) => {
                tables.held_mut().iter_mut().map(|held| &mut held.store).collect()
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
                self.pieces(table).into_iter().map(|held| held.columns.start).collect();
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
