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
mod micro;
mod replicas;
mod request;
mod router;
mod update;
mod vectors;

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tessera_cache::{IdMapStats, StoreStats};
use tessera_comm::{Codec, Communicator};
use tessera_data::Jagged;

use crate::fetch::FetchPool;
use crate::plan::Plan;
use crate::tiers::places;
use crate::{
    BadIdPolicy, EmbeddingCollection, EmbeddingError, FeatureSpec, HostLookup, Lookup, LookupOps,
    Resolver, Result, Schema, TableSpec, Tiers,
};
use exchange::Posted;
use layout::{Layout, Piece};
use micro::Marks;
pub use micro::{MICRO_BATCHES_MAX, micro_batches};
use replicas::Replicas;
pub use replicas::SyncStats;
use request::TableRequest;
use router::{Pool, Spare};
pub use router::{RoutedFetchers, Router};

/// A rectangle of a table, held by this rank.
#[derive(Debug)]
pub struct Held<D: LookupOps> {
    piece: Piece,
    rows: Range<u64>,
    columns: Range<usize>,
    /// Blocks of rows that the table is cut into.
    row_blocks: usize,
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

    /// Which of the table's blocks of rows it holds, and how many there are: of a dynamic table, the
    /// ids that [`tessera_cache::owner_of`] gives the block.
    #[must_use]
    pub fn block(&self) -> (usize, usize) {
        (self.piece.row_block, self.row_blocks)
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
    layout: Arc<Layout>,
    held: Vec<Held<D>>,
    ranks: Communicator,
    /// For gradients, beside vectors.
    gradients: Communicator,
    router: Router<D>,
    plan_hash: u64,
    forward_codec: Codec,
    backward_codec: Codec,
    replicas: Option<Replicas>,
    /// Memory of batches that are done.
    spare: Arc<Pool<D>>,
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
    /// Samples of each micro-batch.
    micro: Vec<Range<usize>>,
    /// The last marks of all tables' fetched rows.
    last: Vec<u8>,
    /// Exchanges under way, each of the next micro-batch.
    vectors: VecDeque<Posted>,
    gradients: VecDeque<Posted>,
    /// Micro-batches whose gradients have arrived.
    micro_done: usize,
    /// Whether all gradients were exchanged.
    has_gradients: bool,
}

/// What all ranks asked of a piece.
struct Asked<D: LookupOps> {
    lookup: Lookup<D>,
    /// Bags of each rank.
    counts: Vec<usize>,
    /// Of all bags.
    marks: Marks,
    /// Vectors of the bags, then their gradients: (bags, columns) and more.
    numbers: D::Buffer<f32>,
    /// On the host, vectors of bags that are still to be sent, or gradients as they arrive.
    vectors: Vec<f32>,
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

    /// The samples of each micro-batch.
    #[must_use]
    pub fn micro_batches(&self) -> &[Range<usize>] {
        &self.micro
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
        let layout = Arc::new(Layout::new(plan, &schema)?);
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
        let pool = tiers.map(|_| FetchPool::new()).transpose()?;
        let held: Vec<Held<D>> = pieces
            .iter()
            .zip(parts)
            .zip(places)
            .map(|((&piece, part), place)| {
                let table = &layout.tables[piece.table];
                let rows = table.row_blocks[piece.row_block].clone();
                let columns = table.column_blocks[piece.column_block].clone();
                let (row_blocks, replicated) = (table.row_blocks.len(), table.replicated);
                let (device, pool) = (device.clone(), pool.clone());
                let store = EmbeddingCollection::of_schema(device, stream, part, &[place], pool)?;
                Ok(Held { piece, rows, columns, row_blocks, replicated, store })
            })
            .collect::<Result<_>>()?;
        // Those of `held` have their own.
        let moving = vec![false; schema.tables().len()].into();
        let maps = schema.tables().iter().map(|_| None).collect();
        let resolver = Resolver { device, schema, scratch: Arc::default(), moving, maps };
        let spare = Arc::new(Pool::new());
        let (keys, gradients) = (ranks.duplicate("keys")?, ranks.duplicate("gradients")?);
        let router = Router::new(
            resolver.clone(),
            Arc::clone(&layout),
            &held,
            keys,
            (1, false),
            Arc::clone(&spare),
        );
        Ok(Self {
            resolver,
            layout,
            held,
            ranks,
            gradients,
            router,
            plan_hash,
            forward_codec: Codec::Fp32,
            backward_codec: Codec::Fp32,
            replicas: None,
            spare,
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

    /// Blocks of rows that a table is cut into.
    ///
    /// # Panics
    /// When there is no such table.
    #[must_use]
    pub fn row_blocks(&self, table: usize) -> usize {
        self.layout.tables[table].row_blocks.len()
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
        self.router.fetchers().fetch(routed)?;
        let mut pairs = self.held.iter_mut().zip(&mut routed.asked);
        pairs.try_for_each(|(held, asked)| held.store.hold(stream, &mut asked.lookup))
    }

    /// What became of the ids of a dynamic table that all ranks asked of this one; `None` where it
    /// holds none of it.
    #[must_use]
    pub fn id_stats(&self, routed: &Routed<D>, table: usize) -> Option<IdMapStats> {
        // Pieces with other columns of the same rows do the same.
        let pairs = self.held.iter().zip(&routed.asked);
        let of_table = pairs.filter(|(held, _)| held.piece.table == table);
        let all = of_table
            .filter_map(|(held, asked)| Some((held.piece.row_block, *asked.lookup.id_stats(0)?)));
        let mut sum = IdMapStats::default();
        let mut blocks = Vec::new();
        for (block, stats) in all {
            if !blocks.contains(&block) {
                blocks.push(block);
                sum += stats;
            }
        }
        (!blocks.is_empty()).then_some(sum)
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

    /// Another router of these tables, which may go to another thread, with a communicator called
    /// `name`; batches are cut into as many micro-batches. A collective.
    ///
    /// Errors: [`EmbeddingError::Comm`], also when ranks give different numbers of micro-batches;
    /// [`EmbeddingError::MicroBatches`].
    pub fn router(&self, name: &str, micro_batches: usize) -> Result<Router<D>> {
        if !(1..=MICRO_BATCHES_MAX).contains(&micro_batches) {
            let max = MICRO_BATCHES_MAX;
            return Err(EmbeddingError::MicroBatches { given: micro_batches, max });
        }
        let (layout, spare) = (Arc::clone(&self.layout), Arc::clone(&self.spare));
        let ranks = self.ranks.duplicate(name)?;
        ranks.agree("number of micro-batches", &micro_batches.to_le_bytes()).wait()?;
        Ok(Router::new(
            self.resolver.clone(),
            layout,
            &self.held,
            ranks,
            (micro_batches, true),
            spare,
        ))
    }

    /// The step that messages of vectors and gradients belong to from now on.
    pub fn set_step(&self, step: u64) {
        self.ranks.set_step(step);
        self.gradients.set_step(step);
    }

    /// [`Router::check`].
    ///
    /// Errors: as there.
    pub fn check(&self, features: Vec<Jagged>, policy: BadIdPolicy) -> Result<HostLookup> {
        self.router.check(features, policy)
    }

    /// [`Router::route`]. A collective.
    ///
    /// Errors: as there.
    pub fn route(&mut self, stream: &D::Stream, batch: HostLookup) -> Result<Routed<D>> {
        self.router.ranks().set_step(self.ranks.step());
        self.router.route(stream, batch)
    }
}
