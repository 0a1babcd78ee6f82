//! The interface of row stores: rows become slots, and stay so as long as a lease lives.
//!
//! ```text
//! fetcher.fetch(rows)         any thread: wants the rows, copies the absent ones beside    Fetched
//! store.install(.., fetched)  the owner: puts them into slots, evicting others             Lease
//! kernels                     over weights() or planes_mut(), at lease.slots(rows)
//! store.commit(lease)         after an update: what lies below is out of date
//! drop(lease)                 the rows may be evicted again
//! ```
//!
//! Fetching is apart from installing so that the next batch's rows can be read, from an SSD even,
//! while kernels work on this batch's. What is fetched or leased is *wanted*: no eviction touches
//! it. Values that want rows let go of them when dropped, so that an error on the way leaks
//! nothing.

use std::borrow::Cow;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

use tessera_device::Device;

use crate::tiered::{Shared, Wanted};
use crate::{CacheError, ColdStats, Plane, Planes, Result, RowLayout};

/// Rows of fixed width, wherever they are, of which kernels see those that a lease holds.
///
/// The caller guarantees:
/// - kernels touch no slots but those of a lease that lives, write none but under a lease that is
///   committed before it is dropped, and are ordered by the stream given here;
/// - rows given to a call are different and ascending.
///
/// The implementor must:
/// - give every row the same bytes as a store that keeps all rows in device memory, whatever is
///   fetched, installed, evicted or dropped when;
/// - keep a leased row at its slot;
/// - refuse everything after a write, or the device, failed once.
pub trait RowStore<D: Device>: Send + Sync + Debug {
    /// Number of rows.
    fn rows(&self) -> u64;

    /// Width of the planes.
    fn layout(&self) -> RowLayout;

    /// Slots: the most rows that leases and fetches can hold together.
    fn capacity(&self) -> u64;

    /// Slots that no lease and no fetch holds. A fetch of so many rows succeeds, and one of more
    /// does if enough of them are held already.
    fn slots_free(&self) -> u64;

    /// Bytes of the device tier, its index included.
    fn bytes(&self) -> u64;

    /// Bytes that the host tier may grow to, its index included.
    fn host_bytes(&self) -> u64;

    /// What wants rows ahead of time, to be cloned for other threads.
    fn fetcher(&self) -> Fetcher;

    /// Puts fetched rows into slots, evicting others where there is no room.
    ///
    /// Errors: [`CacheError::Foreign`], [`CacheError::Tier`], [`CacheError::Poisoned`], or what
    /// the device says.
    fn install(&mut self, device: &D, stream: &D::Stream, fetched: Fetched) -> Result<Lease>;

    /// [`Fetcher::fetch`], then [`RowStore::install`].
    ///
    /// Errors: as those.
    fn prefetch(&mut self, device: &D, stream: &D::Stream, rows: &[u64]) -> Result<Lease> {
        let fetched = self.fetcher().fetch(rows)?;
        self.install(device, stream, fetched)
    }

    /// Says that the planes of a lease's rows were written.
    ///
    /// Errors: [`CacheError::Foreign`], [`CacheError::Poisoned`].
    fn commit(&mut self, lease: &Lease) -> Result<()>;

    /// The weights of every slot, (slots, weight_bytes).
    fn weights(&self) -> &D::Buffer<u8>;

    /// Both planes, for a kernel that writes them: weights, then state.
    fn planes_mut(&mut self) -> (&mut D::Buffer<u8>, &mut D::Buffer<u8>);

    /// Copies a plane of a range of rows into `bytes`, (rows, bytes a row), wherever they are;
    /// none of them moves.
    ///
    /// Errors: [`CacheError::RowsOutOfRange`], [`CacheError::WrongLength`],
    /// [`CacheError::Tier`], [`CacheError::Poisoned`], or what the device says.
    fn read(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Range<u64>,
        bytes: &mut [u8],
    ) -> Result<()>;

    /// Copies `bytes`, (rows, bytes a row), over a plane of a range of rows. Who fills both planes
    /// uses [`RowStore::write_rows`].
    ///
    /// Errors: as [`RowStore::read`].
    fn write(
        &mut self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Range<u64>,
        bytes: &[u8],
    ) -> Result<()>;

    /// [`RowStore::write`] of both planes of a range of rows: a row that has no room in memory
    /// goes below once, and nothing is read.
    ///
    /// Errors: as [`RowStore::read`].
    fn write_rows(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: Range<u64>,
        planes: Planes<'_>,
    ) -> Result<()> {
        self.write(device, stream, Plane::Weights, rows.clone(), planes.weights)?;
        self.write(device, stream, Plane::State, rows, planes.state)
    }

    /// As [`RowStore::read`], of `rows`, which are different and ascending.
    ///
    /// Errors: as there; [`CacheError::RowsNotAscending`], [`CacheError::RowOutOfRange`].
    fn read_listed(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: &[u64],
        bytes: &mut [u8],
    ) -> Result<()>;

    /// As [`RowStore::write`], of the planes that are given of `rows`, which are different and
    /// ascending.
    ///
    /// Errors: as [`RowStore::read_listed`].
    fn write_listed(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: &[u64],
        weights: Option<&[u8]>,
        state: Option<&[u8]>,
    ) -> Result<()>;

    /// Writes all rows that differ from the cold tier to it, and makes that outlive a crash.
    /// Nothing to do without a cold tier.
    ///
    /// Errors: [`CacheError::Tier`], [`CacheError::Poisoned`], or what the device says.
    fn flush(&mut self, device: &D, stream: &D::Stream) -> Result<()>;

    /// Tells the policy next-use that `rows` are next fetched by the `ahead`-th fetch from now,
    /// 1 being the next one. Rows that are in no tier of memory yet, and stores of other
    /// policies, forget it: it never changes a result.
    fn hint_next_use(&self, rows: &[u64], ahead: u32);

    /// What the store did so far.
    fn stats(&self) -> StoreStats;
}

/// Plain numbers of one tier; counts are since the store was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Slots.
    pub slots: u64,
    /// Slots that hold a row.
    pub rows: u64,
    /// Rows looked for here and found, one count a fetch.
    pub hits: u64,
    /// Rows looked for here and not found.
    pub misses: u64,
    /// Rows that left to make room for others.
    pub evictions: u64,
    /// Rows written to a tier below because they differed from what lay there.
    pub write_backs: u64,
    /// Bytes of rows that came in.
    pub bytes_in: u64,
    /// Bytes of rows that were copied out, up or down.
    pub bytes_out: u64,
}

/// Plain numbers of a store. A store that keeps all rows in device memory counts nothing: all
/// would be hits.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StoreStats {
    /// The device tier.
    pub device: TierStats,
    /// The host tier.
    pub host: TierStats,
    /// Rows that leases and fetches hold.
    pub rows_held: u64,
    /// Rows that fetches made because they had never been written.
    pub first_rows: u64,
    /// Rows that fetches read from the cold tier.
    pub cold_rows: u64,
    /// Time that fetches waited for the cold tier, in seconds.
    pub cold_wait_s: f64,
    /// Time that evictions waited for the cold tier to take rows, in seconds.
    pub cold_write_s: f64,
    /// Rows fetched a second time because a write came between fetch and install.
    pub rows_fetched_again: u64,
    /// The cold tier, where there is one.
    pub cold: Option<ColdStats>,
}

impl std::ops::AddAssign for TierStats {
    fn add_assign(&mut self, other: Self) {
        self.slots += other.slots;
        self.rows += other.rows;
        self.hits += other.hits;
        self.misses += other.misses;
        self.evictions += other.evictions;
        self.write_backs += other.write_backs;
        self.bytes_in += other.bytes_in;
        self.bytes_out += other.bytes_out;
    }
}

/// The sum of several stores, such as those of the pieces of a table.
impl std::ops::AddAssign for StoreStats {
    fn add_assign(&mut self, other: Self) {
        self.device += other.device;
        self.host += other.host;
        self.rows_held += other.rows_held;
        self.first_rows += other.first_rows;
        self.cold_rows += other.cold_rows;
        self.cold_wait_s += other.cold_wait_s;
        self.cold_write_s += other.cold_write_s;
        self.rows_fetched_again += other.rows_fetched_again;
        self.cold = match (self.cold, other.cold) {
            (Some(mut sum), Some(cold)) => {
                sum += cold;
                Some(sum)
            }
            (sum, cold) => sum.or(cold),
        };
    }
}

/// Wants rows of a store, from any thread.
#[derive(Clone, Debug)]
pub struct Fetcher(pub(crate) FetcherKind);

#[derive(Clone, Debug)]
pub(crate) enum FetcherKind {
    /// All rows are at slots of their own number.
    Resident { rows: u64 },
    /// Rows move between tiers.
    Tiered(Arc<Shared>),
}

impl Fetcher {
    /// Wants `rows`, which are different and ascending, and copies beside those that are not in
    /// the device tier. Slow reads happen here, and hold nobody else up.
    ///
    /// Call it from a thread of your own, or from at most one task a store on the device's pool.
    ///
    /// Errors: [`CacheError::RowsNotAscending`], [`CacheError::RowOutOfRange`],
    /// [`CacheError::WorkingSet`] when the rows and those held already exceed the slots,
    /// [`CacheError::Tier`], [`CacheError::Poisoned`]. After an error none of the rows is wanted.
    pub fn fetch(&self, rows: &[u64]) -> Result<Fetched> {
        let stored = match &self.0 {
            FetcherKind::Resident { rows } => *rows,
            FetcherKind::Tiered(shared) => shared.rows(),
        };
        check_rows(rows, stored)?;
        Ok(Fetched(match &self.0 {
            FetcherKind::Resident { .. } => {
                Held::Identity { rows: rows.len(), last: rows.last().copied() }
            }
            FetcherKind::Tiered(shared) => Held::Wanted(shared.fetch(rows)?),
        }))
    }
}

/// Refuses rows that are not different and ascending or leave a store of `stored` rows. The largest
/// is the last.
pub(crate) fn check_rows(rows: &[u64], stored: u64) -> Result<()> {
    if let Some(i) = rows.windows(2).position(|pair| pair[0] >= pair[1]) {
        let (row, next) = (rows[i], rows[i + 1]);
        return Err(CacheError::RowsNotAscending { position: i + 1, row, next });
    }
    match rows.last() {
        Some(&row) if row >= stored => Err(CacheError::RowOutOfRange { row, rows: stored }),
        _ => Ok(()),
    }
}

/// What holds rows in place.
#[derive(Debug)]
pub(crate) enum Held {
    /// Slots are rows, and nothing moves.
    Identity { rows: usize, last: Option<u64> },
    /// Wanted rows of a tiered store; dropping it lets go of them.
    Wanted(Wanted),
}

impl Held {
    fn len(&self) -> usize {
        match self {
            Self::Identity { rows, .. } => *rows,
            Self::Wanted(wanted) => wanted.rows().len(),
        }
    }
}

/// Rows that are wanted, and copies of those that were not in the device tier. Dropping it lets
/// go of them.
#[derive(Debug)]
#[must_use = "rows that were fetched are to be installed"]
pub struct Fetched(pub(crate) Held);

impl Fetched {
    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it holds no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Rows pinned to slots. Dropping it unpins them.
#[derive(Debug)]
#[must_use = "rows are pinned as long as their lease lives"]
pub struct Lease(pub(crate) Held);

impl Lease {
    /// Number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it holds no row.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slots of `rows`, one a row, in the same order; `rows` are those that were fetched.
    /// Where a slot is the row, they are the rows themselves.
    ///
    /// # Panics
    /// When `rows` are not as many as the lease holds.
    #[must_use]
    pub fn slots<'a>(&'a self, rows: &'a [u64]) -> &'a [u64] {
        assert_eq!(rows.len(), self.len(), "lease: slots of all its rows");
        match &self.0 {
            Held::Identity { .. } => rows,
            Held::Wanted(wanted) => {
                debug_assert_eq!(rows, wanted.rows(), "lease: slots of its own rows");
                wanted.slots()
            }
        }
    }

    /// The slots of some of the lease's rows, ascending.
    ///
    /// Errors: [`CacheError::NotLeased`].
    pub fn slots_of<'a>(&self, rows: &'a [u64]) -> Result<Cow<'a, [u64]>> {
        match &self.0 {
            Held::Identity { .. } => Ok(Cow::Borrowed(rows)),
            Held::Wanted(wanted) => wanted.slots_of(rows).map(Cow::Owned),
        }
    }
}
