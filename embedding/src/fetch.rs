//! Bringing the rows of a batch near before its turn comes.
//!
//! A table's rows are *wanted* from the moment they are fetched until the lookup is dropped, so
//! that no eviction takes them; those that lie below the device tier are copied beside, by
//! whichever thread fetches. The training thread puts them into slots when it holds the lookup
//! ([`EmbeddingCollection::hold`]). A row that an earlier batch still changes is in the device
//! tier by then, and is used as it is there: what was fetched early is never out of date.
//!
//! Tables are fetched side by side: a batch misses few rows of each of many tables, and an SSD
//! is fast only when asked for many rows at once.

use std::fmt;
use std::sync::Arc;

use rayon::prelude::*;
use tessera_cache::{CacheError, Fetched, Fetcher};

use crate::collection::of_table;
use crate::{EmbeddingCollection, EmbeddingError, Lookup, LookupOps, Result, Schema};

/// Threads that fetch: they wait for reads, so there are more than cores.
const FETCH_THREADS: usize = 8;

/// Threads that install: copies and index changes, and now and then a wait for a write.
const INSTALL_THREADS: usize = 4;

/// Threads that move rows of tables between tiers, shared by the tables of a rank.
pub(crate) struct FetchPool {
    fetch: rayon::ThreadPool,
    /// Its own, since those that fetch the next batch's rows are all waiting for reads.
    install: rayon::ThreadPool,
}

impl FetchPool {
    /// Starts the threads.
    ///
    /// Errors: [`EmbeddingError::Threads`] when the system starts no thread.
    pub(crate) fn new() -> Result<Arc<Self>> {
        let start = |name: &'static str, threads| {
            let builder = rayon::ThreadPoolBuilder::new().num_threads(threads);
            let pool = builder.thread_name(move |index| format!("{name}-{index}")).build();
            pool.map_err(|error| EmbeddingError::Threads { reason: error.to_string() })
        };
        let install = start("install", INSTALL_THREADS)?;
        Ok(Arc::new(Self { fetch: start("fetch", FETCH_THREADS)?, install }))
    }

    /// Fetches each table's rows; the first table's error, in order, if there is one.
    pub(crate) fn fetch(
        &self,
        schema: &Schema,
        fetchers: &[Option<Fetcher>],
        rows: &[Option<&[u64]>],
    ) -> Result<Vec<Option<Fetched>>> {
        let one = |(fetcher, rows): (&Option<Fetcher>, &Option<&[u64]>)| match (fetcher, rows) {
            (Some(fetcher), Some(rows)) => fetcher.fetch(rows).map(Some),
            _ => Ok(None),
        };
        let tables = fetchers.iter().zip(rows).collect();
        let fetched: Vec<std::result::Result<Option<Fetched>, CacheError>> =
            side_by_side(&self.fetch, tables, one);
        let named = fetched.into_iter().zip(schema.tables());
        named.map(|(fetched, table)| fetched.map_err(of_table(table))).collect()
    }

    /// Does `work` for each of `items`, side by side; the first error, in order.
    pub(crate) fn each<T: Send>(
        &self,
        items: Vec<T>,
        work: impl Fn(T) -> Result<bool> + Send + Sync,
    ) -> Result<bool> {
        let done: Vec<Result<bool>> = side_by_side(&self.fetch, items, work);
        done.into_iter().try_fold(true, |all, one| Ok(all & one?))
    }

    /// Puts each table's fetched rows into slots, side by side: what `work` does for each of
    /// `tables`; the first error, in order, if there is one.
    pub(crate) fn install<T: Send, R: Send>(
        &self,
        tables: Vec<T>,
        work: impl Fn(T) -> Result<R> + Send + Sync,
    ) -> Result<Vec<R>> {
        side_by_side(&self.install, tables, work).into_iter().collect()
    }
}

/// What `work` makes of each of `items`, each on a thread of its own, as far as there are some. A
/// single one keeps its thread.
fn side_by_side<T: Send, R: Send>(
    pool: &rayon::ThreadPool,
    items: Vec<T>,
    work: impl Fn(T) -> R + Send + Sync,
) -> Vec<R> {
    if items.len() <= 1 {
        return items.into_iter().map(work).collect();
    }
    pool.install(|| items.into_par_iter().with_max_len(1).map(work).collect())
}

impl fmt::Debug for FetchPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FetchPool")
    }
}

/// What fetches rows of a collection's tables, on any thread.
#[derive(Clone, Debug)]
pub struct Fetchers {
    schema: Arc<Schema>,
    /// Of each table whose rows move between tiers.
    tables: Vec<Option<Fetcher>>,
    /// `None` where no rows move.
    pool: Option<Arc<FetchPool>>,
}

impl<D: LookupOps> EmbeddingCollection<D> {
    /// What fetches rows of these tables ahead of time.
    #[must_use]
    pub fn fetchers(&self) -> Fetchers {
        self.fetchers.clone()
    }
}

impl Fetchers {
    /// Of the tables of `schema`, where `tables` has those whose rows move.
    pub(crate) fn new(
        schema: &Arc<Schema>,
        tables: Vec<Option<Fetcher>>,
        pool: Option<Arc<FetchPool>>,
    ) -> Self {
        Self { schema: Arc::clone(schema), tables, pool }
    }

    /// Wants the rows of a lookup that move between tiers and copies beside those that are not in
    /// the device tier. Gives whether there was room for all of them; if not, none is wanted, and
    /// [`EmbeddingCollection::hold`] brings them when earlier lookups have been dropped. Does
    /// nothing if they are wanted already.
    ///
    /// Errors: [`EmbeddingError::ForeignLookup`]; [`EmbeddingError::Store`] when a tier fails.
    pub fn fetch<D: LookupOps>(&self, lookup: &mut Lookup<D>) -> Result<bool> {
        if !Arc::ptr_eq(&lookup.schema, &self.schema) {
            return Err(EmbeddingError::ForeignLookup { operation: "fetch" });
        }
        if lookup.held.is_some() || lookup.fetched.is_some() || self.pool.is_none() {
            return Ok(true);
        }
        let rows: Vec<Option<&[u64]>> =
            lookup.moving.iter().map(|rows| rows.as_ref().map(|rows| &rows[..])).collect();
        match self.fetch_rows(&rows) {
            Ok(fetched) => {
                lookup.fetched = Some(fetched);
                Ok(true)
            }
            Err(error) if exceeds_slots(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Wants rows of each table and copies beside those that are not in the device tier.
    pub(crate) fn fetch_rows(&self, rows: &[Option<&[u64]>]) -> Result<Vec<Option<Fetched>>> {
        match &self.pool {
            Some(pool) => pool.fetch(&self.schema, &self.tables, rows),
            None => Ok(rows.iter().map(|_| None).collect()),
        }
    }

    /// Whether rows move between tiers at all.
    #[must_use]
    pub fn moves(&self) -> bool {
        self.pool.is_some()
    }

    /// The threads that fetch, where rows move.
    pub(crate) fn pool(&self) -> Option<&Arc<FetchPool>> {
        self.pool.as_ref()
    }
}

/// Whether a store has too few slots for what was asked of it at once.
pub(crate) fn exceeds_slots(error: &EmbeddingError) -> bool {
    matches!(error, EmbeddingError::Store { source: CacheError::WorkingSet { .. }, .. })
}
