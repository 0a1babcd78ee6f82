//! Tables spread over ranks: lookups and updates that give the same answer whatever the plan.
//!
//! ```text
//! asker                                              owner of a piece (a rectangle of a table)
//! check ids; deduplicate             --ids-->        look the bags up (of all ranks, in order)
//! fetched table <- vectors           <--vectors--
//! pool bags of the fetched table
//! ...
//! sum gradients of its rows          --sums-->       update: a row's sums in rank order
//!                                    <-squares->     among owners of a row's columns, if the
//!                                                    optimizer sums over them
//! ```
//! A row's gradient is each rank's own sum, in (feature, sample, position) order, added in rank
//! order: on unique routes nothing in the result shows where rows are. A replicated
//! (data-parallel) table is owned by all ranks: each reads its own copy and gets everybody's ids
//! and sums. Every rank takes part in the same collectives whatever its ids; which there are
//! depends on the plan alone.

mod layout;
mod request;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tessera_comm::{Communicator, Parts};
use tessera_data::Jagged;

use crate::plan::{COLUMN_BLOCK, Plan, Route};
use crate::resolve::check;
use crate::{
    BadIdPolicy, EmbeddingCollection, EmbeddingError, FeatureSpec, HostLookup, Init, Lookup,
    LookupOps, Pooling, Precision, Resolver, Result, Schema, SparseOptimizer, SparseStep,
    TableSpec, UpdateStats,
};
use layout::{Layout, Piece};
use request::{Gathered, TableRequest};

/// Least rows of a fetched table: below, growing it costs more than it saves.
const FETCHED_ROWS_MIN: u64 = 1 << 10;

/// A rectangle of a table, held by this rank.
#[derive(Debug)]
pub struct Held<D: LookupOps> {
    piece: Piece,
    rows: Range<u64>,
    columns: Range<usize>,
    replicated: bool,
    /// Its rows and columns as table 0 of a collection of its own.
    pub store: EmbeddingCollection<D>,
}

impl<D: LookupOps> Held<D> {
    /// Number of the table.
    #[must_use]
    pub fn table(&self) -> usize {
        self.piece.table
    }

    /// The table's rows that it holds.
    #[must_use]
    pub fn rows(&self) -> Range<u64> {
        self.rows.clone()
    }

    /// The table's columns that it holds.
    #[must_use]
    pub fn columns(&self) -> Range<usize> {
        self.columns.clone()
    }

    /// Whether every rank holds the same.
    #[must_use]
    pub fn replicated(&self) -> bool {
        self.replicated
    }
}

/// One rank's part of all tables, and its way to the others'.
pub struct ShardedCollection<D: LookupOps> {
    resolver: Resolver<D>,
    layout: Layout,
    held: Vec<Held<D>>,
    ranks: Communicator,
    /// Fetched tables of batches that are done.
    spare: Vec<EmbeddingCollection<D>>,
}

/// A batch on its way: what this rank asked for and what it was asked for.
pub struct Routed<D: LookupOps> {
    bags: usize,
    rows_read: Vec<u64>,
    bad_ids: Vec<u64>,
    policy: BadIdPolicy,
    requests: Vec<TableRequest>,
    fetched: EmbeddingCollection<D>,
    /// The batch as bags of the fetched tables.
    lookup: Lookup<D>,
    asked: Vec<Asked<D>>,
}

/// What all ranks asked of a piece.
struct Asked<D: LookupOps> {
    lookup: Lookup<D>,
    /// Bags of each rank.
    counts: Vec<usize>,
    /// Gradients of the bags, (bags, columns), once they were exchanged.
    grad: Option<D::Buffer<f32>>,
}

impl<D: LookupOps> fmt::Debug for ShardedCollection<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShardedCollection")
            .field("schema", self.schema())
            .field("ranks", &self.ranks)
            .finish_non_exhaustive()
    }
}

impl<D: LookupOps> Routed<D> {
    /// Bags a feature: samples of this rank's part of the batch.
    #[must_use]
    pub fn bags(&self) -> usize {
        self.bags
    }

    /// Rows of each table that this rank's part of the batch reads, repeats counted.
    #[must_use]
    pub fn rows_read(&self) -> &[u64] {
        &self.rows_read
    }

    /// Bad ids of each table that the policy dropped or mapped.
    #[must_use]
    pub fn bad_ids(&self) -> &[u64] {
        &self.bad_ids
    }

    /// The policy that dealt with them.
    #[must_use]
    pub fn policy(&self) -> BadIdPolicy {
        self.policy
    }
}

impl<D: LookupOps> ShardedCollection<D> {
    /// This rank's part of the tables at their first values, which depend on `seed`, names, rows
    /// and columns alone. `ranks` are those of the plan, in its order.
    ///
    /// Errors: as [`EmbeddingCollection::new`]; [`EmbeddingError::Spec`] with every table that the
    /// plan does not fit; [`EmbeddingError::Comm`] when the ranks have different plans or schemas.
    pub fn new(
        device: D,
        stream: &D::Stream,
        tables: Vec<TableSpec>,
        features: Vec<FeatureSpec>,
        seed: u64,
        plan: &Plan,
        ranks: Communicator,
    ) -> Result<Self> {
        let schema = Arc::new(Schema::new(tables, features, seed)?);
        if plan.ranks() != ranks.size() {
            let (given, needed) = (ranks.size(), plan.ranks());
            let faults = vec![format!("the plan is for {needed} ranks; there are {given}")];
            return Err(EmbeddingError::Spec { faults });
        }
        let layout = Layout::new(plan, &schema)?;
        ranks.agree("sharding plan", &plan.hash().to_le_bytes()).wait()?;
        let described = format!("{schema:?}");
        ranks.agree("tables, features and seed", described.as_bytes()).wait()?;
        let held = layout.pieces_of[ranks.rank()]
            .iter()
            .map(|&piece| {
                let table = &layout.tables[piece.table];
                let rows = table.row_blocks[piece.row_block].clone();
                let columns = table.column_blocks[piece.column_block].clone();
                let spec = &schema.tables()[piece.table];
                let part = Schema::of_shard(spec, rows.clone(), columns.clone(), seed)?;
                let store = EmbeddingCollection::of_schema(device.clone(), stream, part)?;
                let replicated = table.replicated;
                Ok(Held { piece, rows, columns, replicated, store })
            })
            .collect::<Result<_>>()?;
        let resolver = Resolver { device, schema, scratch: Arc::default() };
        Ok(Self { resolver, layout, held, ranks, spare: Vec::new() })
    }

    /// The whole tables and the features.
    #[must_use]
    pub fn schema(&self) -> &Arc<Schema> {
        self.resolver.schema()
    }

    /// The ranks that share the tables.
    #[must_use]
    pub fn ranks(&self) -> &Communicator {
        &self.ranks
    }

    /// What this rank holds of the tables, in their order.
    #[must_use]
    pub fn held(&self) -> &[Held<D>] {
        &self.held
    }

    /// As [`ShardedCollection::held`], to write to.
    pub fn held_mut(&mut self) -> &mut [Held<D>] {
        &mut self.held
    }

    /// Bytes of weights and state of a table on this rank.
    ///
    /// Errors: [`EmbeddingError::NoTable`].
    pub fn resident_bytes(&self, table: usize) -> Result<u64> {
        let tables = self.schema().tables().len();
        if table >= tables {
            return Err(EmbeddingError::NoTable { table, tables });
        }
        let of_table = self.held.iter().filter(|held| held.piece.table == table);
        of_table.map(|held| held.store.resident_bytes(0)).sum()
    }

    /// Checks the ids of this rank's part of a batch. No other rank hears of it: agree on the
    /// outcome before [`ShardedCollection::route`].
    ///
    /// Errors: as [`Resolver::resolve`].
    pub fn check(&self, features: Vec<Jagged>, policy: BadIdPolicy) -> Result<HostLookup> {
        check(self.schema(), features, policy)
    }

    /// Tells the owners which rows this rank's part of a batch needs, and hears from all ranks
    /// which of its own are needed. A collective.
    ///
    /// Errors: [`EmbeddingError::Comm`], [`EmbeddingError::Exchange`], or what the device says.
    pub fn route(&mut self, stream: &D::Stream, mut batch: HostLookup) -> Result<Routed<D>> {
        let schema = Arc::clone(self.schema());
        let (bags, rows_read) = (batch.bags, batch.rows_read.clone());
        let (bad_ids, policy) = (batch.bad_ids.clone(), batch.policy);
        let requests = self.requests(&schema, &mut batch);
        let asked = self.exchange_ids(stream, &requests)?;
        for (table, rows_read) in batch.rows_read.iter_mut().enumerate() {
            let features = schema.features_of(table).iter();
            *rows_read = features.map(|&f| batch.features[f].rows.len() as u64).sum();
        }
        let fetched = self.fetched(stream, &requests)?;
        let lookup = Lookup::new(fetched.resolver(), stream, batch)?;
        Ok(Routed { bags, rows_read, bad_ids, policy, requests, fetched, lookup, asked })
    }

    /// What to ask for; the batch becomes bags of the fetched tables.
    fn requests(&self, schema: &Schema, batch: &mut HostLookup) -> Vec<TableRequest> {
        let pooled = |table: usize| self.layout.tables[table].route == Route::Pooled;
        // Features of pooled tables stay out of the deduplication.
        let mut aside = Vec::new();
        for table in (0..schema.tables().len()).filter(|&table| pooled(table)) {
            for &f in schema.features_of(table) {
                aside.push((f, std::mem::take(&mut batch.features[f].rows)));
            }
        }
        let unique = self.resolver.device.deduplicate(schema, batch);
        for (f, rows) in aside {
            batch.features[f].rows = rows;
        }
        (0..schema.tables().len())
            .map(|table| {
                let blocks = &self.layout.tables[table].row_blocks;
                if !pooled(table) {
                    return TableRequest::unique(&unique[table], blocks);
                }
                let of_table = schema.features_of(table);
                let empty =
                    || crate::FeatureRows { offsets: Vec::new(), rows: Vec::new(), weights: None };
                let mut features: Vec<_> = of_table
                    .iter()
                    .map(|&f| std::mem::replace(&mut batch.features[f], empty()))
                    .collect();
                let pooling = schema.tables()[table].pooling;
                let request = TableRequest::pooled(&mut features, pooling, blocks);
                for (&f, feature) in of_table.iter().zip(features) {
                    batch.features[f] = feature;
                }
                request
            })
            .collect()
    }

    /// Sends requests to the owners and looks up what was asked of this rank.
    fn exchange_ids(&self, stream: &D::Stream, requests: &[TableRequest]) -> Result<Vec<Asked<D>>> {
        let mut message = self.ranks.buffer(0);
        let counts: Vec<usize> = self
            .layout
            .pieces_of
            .iter()
            .map(|pieces| {
                let before = message.len();
                for piece in pieces {
                    requests[piece.table].blocks[piece.row_block].encode(&mut message);
                }
                message.len() - before
            })
            .collect();
        let received = self.ranks.all_to_all_v(message, &counts).wait()?;
        let mut messages: Vec<&[u64]> = received.iter().collect();
        let mut asked = Vec::with_capacity(self.held.len());
        for held in &self.held {
            let mut gathered = Gathered::default();
            for (rank, message) in messages.iter_mut().enumerate() {
                gathered.take(message, rank)?;
            }
            let counts = std::mem::take(&mut gathered.counts);
            gathered.counts.clone_from(&counts);
            let bags = gathered.into_jagged()?;
            // Ids were checked by who asked; a broken message would be seen here.
            let lookup = held.store.resolve(stream, vec![bags], BadIdPolicy::Error)?;
            asked.push(Asked { lookup, counts, grad: None });
        }
        self.ranks.recycle(received.into_data());
        Ok(asked)
    }

    /// Fetched tables with room for what was asked.
    fn fetched(
        &mut self,
        stream: &D::Stream,
        requests: &[TableRequest],
    ) -> Result<EmbeddingCollection<D>> {
        let schema = Arc::clone(self.schema());
        let rows_of = |request: &TableRequest| request.bags() as u64;
        if let Some(spare) = self.spare.pop() {
            let tables = spare.schema().tables().iter().zip(requests);
            if tables.clone().all(|(table, request)| rows_of(request) <= table.rows) {
                return Ok(spare);
            }
        }
        let tables = schema.tables().iter().zip(requests).zip(&self.layout.tables);
        let tables = tables
            .map(|((table, request), layout)| TableSpec {
                rows: (rows_of(request) * 5 / 4).max(FETCHED_ROWS_MIN),
                precision: Precision::Fp32,
                pooling: match layout.route {
                    Route::Pooled => Pooling::Sum,
                    Route::Unique => table.pooling,
                },
                init: Init::Zero,
                optimizer: SparseOptimizer::Sgd { lr: 0.0 },
                ..table.clone()
            })
            .collect();
        let (device, features) = (self.resolver.device.clone(), schema.features().to_vec());
        EmbeddingCollection::new(device, stream, tables, features, schema.seed())
    }

    /// Brings the vectors that a batch needs from their owners and pools its bags, as
    /// [`EmbeddingCollection::forward`]. A collective.
    ///
    /// Errors: as there; [`EmbeddingError::Comm`].
    pub fn forward(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        let vectors = self.exchange_vectors(stream, routed)?;
        self.place_vectors(stream, routed, &vectors)?;
        self.ranks.recycle(vectors.into_data());
        routed.fetched.forward(stream, &routed.lookup, out, stride)
    }

    /// Looks up what was asked of this rank and sends it to who asked.
    fn exchange_vectors(&self, stream: &D::Stream, routed: &Routed<D>) -> Result<Parts<f32>> {
        let device = &self.resolver.device;
        let (size, own) = (self.ranks.size(), self.ranks.rank());
        // Numbers for each rank, and where its next piece goes.
        let mut counts = vec![0; size];
        for (held, asked) in self.held.iter().zip(&routed.asked) {
            for (rank, count) in counts.iter_mut().enumerate() {
                if self.layout.reads(&held.piece, rank, own) {
                    *count += asked.counts[rank] * held.columns.len();
                }
            }
        }
        let mut places = Vec::with_capacity(size);
        let mut total = 0;
        for count in &counts {
            places.push(total);
            total += count;
        }
        let mut send: Vec<f32> = self.ranks.buffer(total);
        send.resize(total, 0.0);
        for (held, asked) in self.held.iter().zip(&routed.asked) {
            let columns = held.columns.len();
            let mut vectors = device.alloc(asked.lookup.bags() * columns)?;
            held.store.forward(stream, &asked.lookup, &mut vectors, columns)?;
            let mut at = 0;
            for (rank, place) in places.iter_mut().enumerate() {
                let numbers = asked.counts[rank] * columns;
                if self.layout.reads(&held.piece, rank, own) {
                    let to = &mut send[*place..*place + numbers];
                    device.download(stream, &vectors, at, to)?;
                    *place += numbers;
                }
                at += numbers;
            }
        }
        Ok(self.ranks.all_to_all_v(send, &counts).wait()?)
    }

    /// Writes received vectors to the fetched tables.
    fn place_vectors(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        vectors: &Parts<f32>,
    ) -> Result<()> {
        let own = self.ranks.rank();
        // Tables cut by columns are put together here first.
        let mut whole: Vec<Vec<f32>> = vec![Vec::new(); self.layout.tables.len()];
        for (owner, pieces) in self.layout.pieces_of.iter().enumerate() {
            let mut part = vectors.part(owner);
            for piece in pieces.iter().filter(|piece| self.layout.reads(piece, own, owner)) {
                let table = &self.layout.tables[piece.table];
                let request = &routed.requests[piece.table];
                let rows = request.rows_of(piece.row_block);
                let columns = table.column_blocks[piece.column_block].clone();
                let numbers = rows.len() * columns.len();
                let Some((here, rest)) = part.split_at_checked(numbers) else {
                    let reason = format!("the vectors from rank {owner} end too early");
                    return Err(EmbeddingError::Exchange { reason });
                };
                part = rest;
                if table.column_blocks.len() == 1 {
                    let rows = rows.start as u64..rows.end as u64;
                    routed.fetched.write_weights(stream, piece.table, rows, here)?;
                    continue;
                }
                let dim = self.schema().tables()[piece.table].dim;
                let whole = &mut whole[piece.table];
                whole.resize(request.bags() * dim, 0.0);
                let to = whole[rows.start * dim..rows.end * dim].chunks_exact_mut(dim);
                for (to, from) in to.zip(here.chunks_exact(columns.len())) {
                    to[columns.clone()].copy_from_slice(from);
                }
            }
        }
        for (table, whole) in whole.iter().enumerate().filter(|(_, whole)| !whole.is_empty()) {
            let rows = 0..routed.requests[table].bags() as u64;
            routed.fetched.write_weights(stream, table, rows, whole)?;
        }
        Ok(())
    }

    /// Sends the sum of each fetched row's gradient to the row's owner. `grad` is laid out as
    /// [`ShardedCollection::forward`] wrote the pooled vectors. A collective.
    ///
    /// Errors: as [`EmbeddingCollection::update`]; [`EmbeddingError::Comm`].
    pub fn exchange_gradients(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        let schema = self.schema();
        let mut starts = vec![0]; // of each table in `sums`
        for (table, request) in schema.tables().iter().zip(&routed.requests) {
            starts.push(starts[starts.len() - 1] + request.bags() * table.dim);
        }
        let mut sums: Vec<f32> = self.ranks.buffer(starts[schema.tables().len()]);
        sums.resize(starts[schema.tables().len()], 0.0);
        routed.fetched.row_gradients(stream, &routed.lookup, grad, stride, &mut sums)?;

        let mut send: Vec<f32> = self.ranks.buffer(sums.len());
        let mut counts = Vec::with_capacity(self.ranks.size());
        for pieces in &self.layout.pieces_of {
            let before = send.len();
            for piece in pieces {
                let dim = schema.tables()[piece.table].dim;
                let columns = &self.layout.tables[piece.table].column_blocks[piece.column_block];
                let rows = routed.requests[piece.table].rows_of(piece.row_block);
                let rows = &sums[starts[piece.table]..][rows.start * dim..rows.end * dim];
                if columns.len() == dim {
                    send.extend_from_slice(rows);
                } else {
                    let rows = rows.chunks_exact(dim);
                    rows.for_each(|row| send.extend_from_slice(&row[columns.clone()]));
                }
            }
            counts.push(send.len() - before);
        }
        self.ranks.recycle(sums);
        let received = self.ranks.all_to_all_v(send, &counts).wait()?;

        let device = &self.resolver.device;
        let mut messages: Vec<&[f32]> = received.iter().collect();
        for (held, asked) in self.held.iter().zip(&mut routed.asked) {
            let columns = held.columns.len();
            let mut grad = device.alloc(asked.lookup.bags() * columns)?;
            let mut at = 0;
            for (rank, message) in messages.iter_mut().enumerate() {
                let numbers = asked.counts[rank] * columns;
                let Some((here, rest)) = message.split_at_checked(numbers) else {
                    let reason = format!("the gradients from rank {rank} end too early");
                    return Err(EmbeddingError::Exchange { reason });
                };
                device.upload(stream, here, &mut grad, at)?;
                *message = rest;
                at += numbers;
            }
            asked.grad = Some(grad);
        }
        self.ranks.recycle(received.into_data());
        Ok(())
    }

    /// Squared norm of all rows' gradients before clipping, the same on all ranks: the sums of
    /// the pieces, in the order of tables and pieces, in float64. A collective, after
    /// [`ShardedCollection::exchange_gradients`].
    ///
    /// Errors: as [`EmbeddingCollection::grad_sq_norm`]; [`EmbeddingError::Comm`].
    pub fn grad_sq_norm(&self, stream: &D::Stream, routed: &Routed<D>) -> Result<f64> {
        let own = self.ranks.rank();
        let mut norms = Vec::new();
        for (held, asked) in self.held.iter().zip(&routed.asked) {
            // Every rank has the sum of a replicated table; the first one's counts.
            if self.layout.tables[held.piece.table].replicated && own != 0 {
                continue;
            }
            let (grad, columns) = (gradients(asked)?, held.columns.len());
            norms.push(held.store.grad_sq_norm(stream, &asked.lookup, grad, columns)?);
        }
        let all = self.ranks.all_gather(norms).wait()?;
        let mut sums = vec![Vec::new(); self.layout.tables.len()];
        for (rank, pieces) in self.layout.pieces_of.iter().enumerate() {
            let counted = |piece: &&Piece| !self.layout.tables[piece.table].replicated || rank == 0;
            for (piece, &norm) in pieces.iter().filter(counted).zip(all.part(rank)) {
                sums[piece.table].push((piece.column_block, piece.row_block, norm));
            }
        }
        let of_table = |pieces: &mut Vec<(usize, usize, f64)>| {
            pieces.sort_by_key(|&(column_block, row_block, _)| (column_block, row_block));
            pieces.iter().map(|&(_, _, norm)| norm).sum::<f64>()
        };
        Ok(sums.iter_mut().map(of_table).sum())
    }

    /// Moves the rows of this rank that any rank's part of the batch holds, once each. A
    /// collective where tables are cut by columns; after
    /// [`ShardedCollection::exchange_gradients`]. Rows count where their first columns are, and
    /// those of a replicated table on the first rank.
    ///
    /// Errors: as [`EmbeddingCollection::update`]; [`EmbeddingError::Comm`].
    pub fn update(
        &mut self,
        stream: &D::Stream,
        routed: Routed<D>,
        step: &SparseStep,
    ) -> Result<UpdateStats> {
        let tables = self.schema().tables().len();
        let squares = self.exchange_squares(stream, &routed, step)?;
        let mut stats =
            UpdateStats { rows_updated: vec![0; tables], rows_nonfinite: vec![0; tables] };
        let own = self.ranks.rank();
        for ((held, asked), squares) in self.held.iter_mut().zip(&routed.asked).zip(&squares) {
            let (grad, columns) = (gradients(asked)?, held.columns.len());
            let moved =
                held.store.update_with(stream, &asked.lookup, grad, columns, step, squares)?;
            let table = held.piece.table;
            let counts =
                held.piece.column_block == 0 && (!self.layout.tables[table].replicated || own == 0);
            stats.rows_updated[table] += if counts { moved.rows_updated[0] } else { 0 };
            stats.rows_nonfinite[table] += moved.rows_nonfinite[0];
        }
        self.spare.push(routed.fetched);
        Ok(stats)
    }

    /// Gives back the memory of a batch that only looked up.
    pub fn finish(&mut self, routed: Routed<D>) {
        self.spare.push(routed.fetched);
    }

    /// For each held piece whose optimizer sums over columns that others hold: the sum over all
    /// columns of each of its different rows; empty for the rest.
    fn exchange_squares(
        &self,
        stream: &D::Stream,
        routed: &Routed<D>,
        step: &SparseStep,
    ) -> Result<Vec<Vec<f32>>> {
        let specs = self.schema().tables();
        let exchanges = |table: usize| self.layout.tables[table].exchanges_squares(&specs[table]);
        let mut squares = vec![Vec::new(); self.held.len()];
        if !(0..specs.len()).any(exchanges) {
            return Ok(squares);
        }
        // (different rows, blocks of columns) of each piece.
        for ((held, asked), sums) in self.held.iter().zip(&routed.asked).zip(&mut squares) {
            if exchanges(held.piece.table) {
                let unique = held.store.resolver().unique_counts(stream, &asked.lookup)?[0];
                let blocks = held.columns.len().div_ceil(COLUMN_BLOCK);
                sums.resize(unique as usize * blocks, 0.0);
                let (grad, columns) = (gradients(asked)?, held.columns.len());
                held.store.block_squares(stream, &asked.lookup, grad, columns, step, sums)?;
            }
        }
        let same_rows = |a: &Piece, b: &Piece| (a.table, a.row_block) == (b.table, b.row_block);
        let mut send = self.ranks.buffer(0);
        let mut counts = Vec::with_capacity(self.ranks.size());
        for pieces in &self.layout.pieces_of {
            let before = send.len();
            for piece in pieces.iter().filter(|piece| exchanges(piece.table)) {
                for (held, sums) in self.held.iter().zip(&squares) {
                    if same_rows(&held.piece, piece) {
                        send.extend_from_slice(sums);
                    }
                }
            }
            counts.push(send.len() - before);
        }
        let received = self.ranks.all_to_all_v(send, &counts).wait()?;
        let mut messages: Vec<&[f32]> = received.iter().collect();
        for (held, own) in self.held.iter().zip(&mut squares) {
            let table = &self.layout.tables[held.piece.table];
            if !exchanges(held.piece.table) {
                continue;
            }
            let unique = own.len() / held.columns.len().div_ceil(COLUMN_BLOCK);
            let mut totals = vec![0.0f32; unique];
            for (column_block, columns) in table.column_blocks.iter().enumerate() {
                let blocks = columns.len().div_ceil(COLUMN_BLOCK);
                let owner = table.owner(held.piece.row_block, column_block);
                let numbers = unique * blocks;
                let Some((here, rest)) = messages[owner].split_at_checked(numbers) else {
                    let reason = format!("the row sums from rank {owner} end too early");
                    return Err(EmbeddingError::Exchange { reason });
                };
                messages[owner] = rest;
                for (total, sums) in totals.iter_mut().zip(here.chunks_exact(blocks)) {
                    for sum in sums {
                        *total += sum;
                    }
                }
            }
            *own = totals;
        }
        self.ranks.recycle(received.into_data());
        Ok(squares)
    }
}

/// The exchanged gradients of what was asked of a piece.
fn gradients<D: LookupOps>(asked: &Asked<D>) -> Result<&D::Buffer<f32>> {
    let reason = || "update before the exchange of gradients".to_owned();
    asked.grad.as_ref().ok_or_else(|| EmbeddingError::Exchange { reason: reason() })
}
