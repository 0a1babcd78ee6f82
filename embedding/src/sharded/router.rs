//! Routing: which rows a batch needs, and which of this rank's rows all ranks need.
//!
//! A [`Router`] shares with its tables what never changes, and has a communicator of its own: it
//! may route the next batches on another thread while this one is looked up and trained on. What
//! it finds is a [`Routed`] batch, whose vectors are exchanged when its turn comes.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tessera_comm::Communicator;
use tessera_data::Jagged;
use tessera_device::DeviceBuffer;

use super::layout::Layout;
use super::micro::{Marks, micro_batches};
use super::request::{Gathered, TableRequest};
use super::{Asked, Routed};
use crate::plan::Route;
use crate::resolve::check;
use crate::{
    BadIdPolicy, EmbeddingCollection, FeatureRows, Fetchers, HostLookup, Init, Lookup, LookupOps,
    Pooling, Precision, Resolver, Result, Schema, SparseOptimizer, TableKind, TableSpec,
};

/// Least rows of a fetched table: below, growing it costs more than it saves.
const FETCHED_ROWS_MIN: u64 = 1 << 10;

/// Routes batches to the owners of rows.
pub struct Router<D: LookupOps> {
    pub(super) resolver: Resolver<D>,
    layout: Arc<Layout>,
    held: Vec<Owned<D>>,
    fetchers: RoutedFetchers,
    ranks: Communicator,
    /// How many a batch is cut into.
    micro_batches: usize,
    /// Whether rows' occurrences are found here, which an update needs.
    trains: bool,
    spare: Arc<Pool<D>>,
}

/// What routing needs of a held piece.
struct Owned<D: LookupOps> {
    columns: usize,
    resolver: Resolver<D>,
}

/// What fetches rows of a rank's pieces ahead of time, on any thread.
#[derive(Clone, Debug)]
pub struct RoutedFetchers(Vec<Fetchers>); // of each held piece

impl RoutedFetchers {
    /// Whether rows move between tiers at all.
    #[must_use]
    pub fn moves(&self) -> bool {
        self.0.iter().any(Fetchers::moves)
    }

    /// [`Fetchers::fetch`] of the rows that all ranks asked of this one.
    ///
    /// Errors: as there.
    pub fn fetch<D: LookupOps>(&self, routed: &mut Routed<D>) -> Result<bool> {
        let Some(pool) = self.0.iter().find_map(Fetchers::pool) else { return Ok(true) };
        let pairs: Vec<_> = self.0.iter().zip(&mut routed.asked).collect();
        let all = pool.each(pairs, |(fetchers, asked)| fetchers.fetch(&mut asked.lookup))?;
        if !all {
            // Those that were fetched would keep slots from the rows that were not.
            routed.asked.iter_mut().for_each(|asked| asked.lookup.fetched = None);
        }
        Ok(all)
    }
}

/// Memory of batches that are done.
pub(super) struct Pool<D: LookupOps>(Mutex<Vec<Spare<D>>>);

/// Memory that a batch uses, for the next one.
pub(super) struct Spare<D: LookupOps> {
    pub(super) fetched: EmbeddingCollection<D>,
    /// Of each held piece.
    pub(super) numbers: Vec<D::Buffer<f32>>,
    pub(super) sums: Vec<f32>,
    /// What the device has to have done before others use it.
    pub(super) idle: D::Event,
}

impl<D: LookupOps> Pool<D> {
    pub(super) fn new() -> Self {
        Self(Mutex::default())
    }

    pub(super) fn put(&self, spare: Spare<D>) {
        // What a panicking thread left is memory like any other.
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(spare);
    }

    fn take(&self) -> Option<Spare<D>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).pop()
    }
}

impl<D: LookupOps> fmt::Debug for Router<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Router").field("ranks", &self.ranks).finish_non_exhaustive()
    }
}

impl<D: LookupOps> Router<D> {
    pub(super) fn new(
        resolver: Resolver<D>,
        layout: Arc<Layout>,
        held: &[super::Held<D>],
        ranks: Communicator,
        (micro_batches, trains): (usize, bool),
        spare: Arc<Pool<D>>,
    ) -> Self {
        let owned = held.iter().map(|held| Owned {
            columns: held.columns.len(),
            resolver: held.store.resolver().clone(),
        });
        let fetchers = RoutedFetchers(held.iter().map(|held| held.store.fetchers()).collect());
        Self {
            fetchers,
            resolver,
            layout,
            held: owned.collect(),
            ranks,
            micro_batches,
            trains,
            spare,
        }
    }

    /// The whole tables and the features.
    #[must_use]
    pub fn schema(&self) -> &Arc<Schema> {
        self.resolver.schema()
    }

    /// The ranks that share the tables, on the way that routing takes.
    #[must_use]
    pub fn ranks(&self) -> &Communicator {
        &self.ranks
    }

    /// Checks the ids of this rank's part of a batch. No other rank hears of it: agree on the
    /// outcome before [`Router::route`].
    ///
    /// Errors: as [`Resolver::resolve`].
    pub fn check(&self, features: Vec<Jagged>, policy: BadIdPolicy) -> Result<HostLookup> {
        check(self.schema(), features, policy)
    }

    /// Tells the owners which rows this rank's part of a batch needs, and hears from all ranks
    /// which of its own are needed. A collective.
    ///
    /// Errors: [`EmbeddingError::Comm`](crate::EmbeddingError::Comm),
    /// [`EmbeddingError::Exchange`](crate::EmbeddingError::Exchange), or what the device says.
    pub fn route(&self, stream: &D::Stream, mut batch: HostLookup) -> Result<Routed<D>> {
        let schema = Arc::clone(self.schema());
        let (bags, rows_read) = (batch.bags, batch.rows_read.clone());
        let (bad_ids, policy) = (batch.bad_ids.clone(), batch.policy);
        let micro = micro_batches(bags, self.micro_batches);
        let mut requests = self.requests(&schema, &mut batch);
        for (table, request) in requests.iter_mut().enumerate() {
            let features = schema.features_of(table).iter().map(|&f| &batch.features[f]);
            request.marks = Marks::of(request.bags(), features, &micro);
        }
        let mut spare = self.spare(stream, &requests)?;
        let asked = self.exchange_ids(stream, &requests, batch.step, &mut spare.numbers)?;
        for (table, rows_read) in batch.rows_read.iter_mut().enumerate() {
            let features = schema.features_of(table).iter();
            *rows_read = features.map(|&f| batch.features[f].rows.len() as u64).sum();
        }
        let Spare { fetched, sums, .. } = spare;
        let lookup = Lookup::new(fetched.resolver(), stream, batch)?;
        if self.trains {
            fetched.resolver().group(stream, &lookup)?;
            for (held, asked) in self.held.iter().zip(&asked) {
                held.resolver.group(stream, &asked.lookup)?;
            }
        }
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
            micro,
            last: Vec::new(),
            vectors: VecDeque::new(),
            gradients: VecDeque::new(),
            micro_done: 0,
            has_gradients,
        })
    }

    /// What fetches the rows of routed batches.
    #[must_use]
    pub fn fetchers(&self) -> RoutedFetchers {
        self.fetchers.clone()
    }

    /// What to ask for; the batch becomes bags of the fetched tables.
    fn requests(&self, schema: &Schema, batch: &mut HostLookup) -> Vec<TableRequest> {
        let tables = self.layout.tables.iter();
        let unique: Vec<bool> = tables.map(|table| table.route == Route::Unique).collect();
        self.resolver.device.number_rows(schema, &unique, batch);
        (0..schema.tables().len())
            .map(|table| {
                let (spec, layout) = (&schema.tables()[table], &self.layout.tables[table]);
                let numbered = batch.numbered[table].take();
                // The numbers become rows of the fetched table.
                if let (Some(rows), false) = (&numbered, spec.is_dynamic()) {
                    return TableRequest::unique(rows, &layout.row_blocks);
                }
                let of_table = schema.features_of(table);
                let empty = || FeatureRows { offsets: Vec::new(), rows: Vec::new(), weights: None };
                let mut features: Vec<_> = of_table
                    .iter()
                    .map(|&f| std::mem::replace(&mut batch.features[f], empty()))
                    .collect();
                let cut = layout.cut(spec.is_dynamic());
                let request = match numbered {
                    Some(ids) => {
                        let counts = spec.counts_ids().then(|| counts(ids.len(), &features));
                        let mut features: Vec<_> = features.iter_mut().collect();
                        let counts = counts.as_deref();
                        TableRequest::unique_ids(&ids, counts, cut.blocks(), &mut features)
                    }
                    None => TableRequest::pooled(&mut features, spec.pooling, cut),
                };
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
        step: Option<u64>,
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
                    requests[piece.table].encode(piece.row_block, &mut message);
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
            let (counts, marks) = (gathered.counts.clone(), std::mem::take(&mut gathered.marks));
            let occurrences = std::mem::take(&mut gathered.occurrences);
            let occurrences = (!occurrences.is_empty()).then_some(&occurrences[..]);
            let bags = gathered.into_jagged()?;
            // Ids were checked by who asked; a broken message would be seen here.
            let mut batch = held.resolver.check(vec![bags], BadIdPolicy::Error)?;
            batch.step = step;
            let lookup = held.resolver.route_counted(stream, batch, occurrences)?;
            let needed = lookup.bags() * held.columns;
            let numbers = match old.next() {
                Some(numbers) if numbers.len() >= needed => numbers,
                _ => self.resolver.device.alloc(needed + needed / 4)?,
            };
            asked.push(Asked { lookup, counts, marks, numbers, vectors: Vec::new() });
        }
        self.ranks.recycle(received.into_data());
        Ok(asked)
    }

    /// Memory for a batch, with room in the fetched tables for what was asked.
    fn spare(&self, stream: &D::Stream, requests: &[TableRequest]) -> Result<Spare<D>> {
        let rows_of = |request: &TableRequest| request.bags() as u64;
        let (numbers, sums) = match self.spare.take() {
            Some(spare) => {
                self.resolver.device.wait(stream, &spare.idle)?;
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
                kind: TableKind::Static,
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
        let idle = self.resolver.device.record(stream)?;
        Ok(Spare { fetched, numbers, sums, idle })
    }
}

/// How often each of `unique` numbers occurs.
fn counts(unique: usize, features: &[FeatureRows]) -> Vec<u64> {
    let mut counts = vec![0; unique];
    for number in features.iter().flat_map(|feature| &feature.rows) {
        counts[number.0 as usize] += 1;
    }
    counts
}
