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

mod exchange;
mod layout;
mod mean;
mod replicas;
mod request;
mod update;
mod vectors;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tessera_cache::StoreStats;
use tessera_comm::{Codec, Communicator};
use tessera_data::Jagged;
use tessera_device::DeviceBuffer;

use crate::plan::{Plan, Route};
use crate::resolve::check;
use crate::tiers::places;
use crate::{
    BadIdPolicy, EmbeddingCollection, EmbeddingError, FeatureSpec, HostLookup, Init, Lookup,
    LookupOps, Pooling, Precision, Resolver, Result, Schema, SparseOptimizer, TableSpec, Tiers,
};
use layout::{Layout, Piece};
use replicas::Replicas;
pub use replicas::SyncStats;
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
    plan_hash: u64,
    forward_codec: Codec,
    backward_codec: Codec,
    replicas: Option<Replicas>,
    /// Memory of batches that are done.
    spare: Vec<Spare<D>>,
}

/// Memory that a batch uses, for the next one.
struct Spare<D: LookupOps> {
    fetched: EmbeddingCollection<D>,
    /// Of each held piece.
    numbers: Vec<D::Buffer<f32>>,
    sums: Vec<f32>,
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
    /// The sum of each fetched row's gradient.
    sums: Vec<f32>,
    /// Whether gradients were exchanged.
    has_gradients: bool,
}

/// What all ranks asked of a piece.
struct Asked<D: LookupOps> {
    lookup: Lookup<D>,
    /// Bags of each rank.
    counts: Vec<usize>,
    /// Vectors of the bags, then their gradients: (bags, columns) and more.
    numbers: D::Buffer<f32>,
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

    /// Rows that all ranks asked of this one, repeats between ranks counted.
    #[must_use]
    pub fn rows_asked(&self) -> u64 {
        self.asked.iter().flat_map(|asked| asked.lookup.rows_read()).sum()
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
        Self::with_tiers(device, stream, (tables, features), seed, plan, ranks, None)
    }

    /// As [`ShardedCollection::new`], with rows that move between the tiers that `tiers` bound on
    /// this rank. Results are the same to the bit.
    ///
    /// Errors: as there; [`EmbeddingError::Spec`] when this rank's part does not fit its tiers.
    pub fn with_tiers(
        device: D,
        stream: &D::Stream,
        (tables, features): (Vec<TableSpec>, Vec<FeatureSpec>),
        seed: u64,
        plan: &Plan,
        ranks: Communicator,
        tiers: Option<&Tiers>,
    ) -> Result<Self> {
        let schema = Arc::new(Schema::new(tables, features, seed)?);
        if plan.ranks() != ranks.size() {
            let (given, needed) = (ranks.size(), plan.ranks());
            let faults = vec![format!("the plan is for {needed} ranks; there are {given}")];
            return Err(EmbeddingError::Spec { faults });
        }
        let layout = Layout::new(plan, &schema)?;
        let plan_hash = plan.hash();
        ranks.agree("sharding plan", &plan_hash.to_le_bytes()).wait()?;
        let described = format!("{schema:?}");
        ranks.agree("tables, features and seed", described.as_bytes()).wait()?;
        let pieces = &layout.pieces_of[ranks.rank()];
        let parts = pieces
            .iter()
            .map(|&piece| {
                let table = &layout.tables[piece.table];
                let rows = table.row_blocks[piece.row_block].clone();
                let columns = table.column_blocks[piece.column_block].clone();
                Schema::of_shard(&schema.tables()[piece.table], rows, columns, seed)
            })
            .collect::<Result<Vec<Schema>>>()?;
        let places = places(tiers, parts.iter().flat_map(Schema::tables))?;
        let held = pieces
            .iter()
            .zip(parts)
            .zip(places)
            .map(|((&piece, part), place)| {
                let table = &layout.tables[piece.table];
                let rows = table.row_blocks[piece.row_block].clone();
                let columns = table.column_blocks[piece.column_block].clone();
                let replicated = table.replicated;
                let store = EmbeddingCollection::of_schema(device.clone(), stream, part, &[place])?;
                Ok(Held { piece, rows, columns, replicated, store })
            })
            .collect::<Result<_>>()?;
        let moving = vec![false; schema.tables().len()].into(); // those of `held` have their own
        let resolver = Resolver { device, schema, scratch: Arc::default(), moving };
        Ok(Self {
            resolver,
            layout,
            held,
            ranks,
            plan_hash,
            forward_codec: Codec::Fp32,
            backward_codec: Codec::Fp32,
            replicas: None,
            spare: Vec::new(),
        })
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

    /// Whether rows of this rank move between tiers.
    #[must_use]
    pub fn moves(&self) -> bool {
        self.held.iter().any(|held| held.store.moves())
    }

    /// Brings the rows that all ranks asked of this one to device memory, as
    /// [`EmbeddingCollection::hold`].
    ///
    /// Errors: as there.
    pub fn hold(&mut self, stream: &D::Stream, routed: &mut Routed<D>) -> Result<()> {
        let mut pairs = self.held.iter_mut().zip(&mut routed.asked);
        pairs.try_for_each(|(held, asked)| held.store.hold(stream, &mut asked.lookup))
    }

    /// What the stores of this rank's pieces of a table did so far; of rows that stay in device
    /// memory nothing is counted.
    ///
    /// Errors: [`EmbeddingError::NoTable`].
    pub fn store_stats(&self, table: usize) -> Result<StoreStats> {
        let mut sum = StoreStats::default();
        for held in self.held.iter().filter(|held| held.piece.table == table) {
            sum += held.store.store_stats(0)?;
        }
        Ok(sum)
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
        let mut spare = self.spare(stream, &requests)?;
        let asked = self.exchange_ids(stream, &requests, &mut spare.numbers)?;
        for (table, rows_read) in batch.rows_read.iter_mut().enumerate() {
            let features = schema.features_of(table).iter();
            *rows_read = features.map(|&f| batch.features[f].rows.len() as u64).sum();
        }
        let Spare { fetched, sums, .. } = spare;
        let lookup = Lookup::new(fetched.resolver(), stream, batch)?;
        let has_gradients = false;
        Ok(Routed {
            bags,
            rows_read,
            bad_ids,
            policy,
            requests,
            fetched,
            lookup,
            asked,
            sums,
            has_gradients,
        })
    }

    /// What to ask for; the batch becomes bags of the fetched tables.
    fn requests(&self, schema: &Schema, batch: &mut HostLookup) -> Vec<TableRequest> {
        let tables = self.layout.tables.iter();
        let unique: Vec<bool> = tables.map(|table| table.route == Route::Unique).collect();
        self.resolver.device.number_rows(schema, &unique, batch);
        (0..schema.tables().len())
            .map(|table| {
                let blocks = &self.layout.tables[table].row_blocks;
                // The numbers become rows of the fetched table.
                if let Some(rows) = batch.numbered[table].take() {
                    return TableRequest::unique(&rows, blocks);
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
    /// Memory of `numbers` is used where it is long enough.
    fn exchange_ids(
        &self,
        stream: &D::Stream,
        requests: &[TableRequest],
        numbers: &mut Vec<D::Buffer<f32>>,
    ) -> Result<Vec<Asked<D>>> {
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
        let mut old = numbers.drain(..);
        for held in &self.held {
            let mut gathered = Gathered::default();
            for (rank, message) in messages.iter_mut().enumerate() {
                gathered.take(message, rank)?;
            }
            let counts = gathered.counts.clone();
            let bags = gathered.into_jagged()?;
            // Ids were checked by who asked; a broken message would be seen here.
            let lookup = held.store.resolve(stream, vec![bags], BadIdPolicy::Error)?;
            let needed = lookup.bags() * held.columns.len();
            let numbers = match old.next() {
                Some(numbers) if numbers.len() >= needed => numbers,
                _ => self.resolver.device.alloc(needed + needed / 4)?,
            };
            asked.push(Asked { lookup, counts, numbers });
        }
        self.ranks.recycle(received.into_data());
        Ok(asked)
    }

    /// Memory for a batch, with room in the fetched tables for what was asked.
    fn spare(&mut self, stream: &D::Stream, requests: &[TableRequest]) -> Result<Spare<D>> {
        let rows_of = |request: &TableRequest| request.bags() as u64;
        let (numbers, sums) = match self.spare.pop() {
            Some(spare) => {
                let tables = spare.fetched.schema().tables().iter().zip(requests);
                if tables.clone().all(|(table, request)| rows_of(request) <= table.rows) {
                    return Ok(spare);
                }
                (spare.numbers, spare.sums)
            }
            None => (Vec::new(), Vec::new()),
        };
        let schema = Arc::clone(self.schema());
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
        let fetched = EmbeddingCollection::new(device, stream, tables, features, schema.seed())?;
        Ok(Spare { fetched, numbers, sums })
    }
}
