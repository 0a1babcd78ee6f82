//! What a device must do for embedding tables: the [`LookupOps`] trait, and the [`Lookup`] of a
//! batch that it works on.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tessera_cache::{Fetched, IdMapStats, Lease, Resident, RowOps, RowStore};

use crate::dynamic::Mapped;
use crate::{BadIdPolicy, HostLookup, Resolver, Result, Row, Schema, SparseStep};

/// What an update did, one entry a table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UpdateStats {
    /// Rows that moved.
    pub rows_updated: Vec<u64>,
    /// Rows left as they were because their gradient, or what would have been written, was not
    /// finite.
    pub rows_nonfinite: Vec<u64>,
}

impl UpdateStats {
    /// Rows of all tables that were left as they were.
    #[must_use]
    pub fn nonfinite(&self) -> u64 {
        self.rows_nonfinite.iter().sum()
    }
}

/// Row stores of a collection's tables, in their order.
pub type Stores<D> = [Box<dyn RowStore<D>>];

/// Which rows of a table an operation may touch, and where they are. Where a lookup's rows are
/// numbered (see [`HostLookup::numbered`]) it speaks of numbers, else of rows.
#[derive(Clone, Debug, Default)]
pub struct Reach<'a> {
    /// The slot of each number, for those that are in reach; `None` where a slot is the row.
    pub slots: Option<&'a [u64]>,
    /// Rows, or numbers, that an operation by rows works on; an operation by bags finds all that
    /// its bags hold in reach.
    pub rows: Range<u64>,
}

/// Which of a lookup's different rows, table after table and ascending, an operation works on.
#[derive(Clone, Copy, Debug)]
pub enum Marked<'a> {
    /// All.
    All,
    /// Those whose mark is `mark`, with a mark a row.
    With {
        /// One a row.
        marks: &'a [u8],
        /// The mark of those meant.
        mark: u8,
    },
}

/// The batch-level operations on tables, implemented once a device.
///
/// The caller guarantees, for every operation on a lookup: `stores` holds the tables of the
/// schema that the lookup was staged for, in order, with the row layouts that the schema gives;
/// `reach` has one entry a table, whose slots are leased; `stride` is at least the schema's width;
/// pooled buffers hold at least `bags * stride` elements; a step was checked.
///
/// The implementor must:
/// - address rows by their slots;
/// - give results that depend on nothing but the arguments: not on the number of threads, nor on
///   instruction sets, nor on how work was cut;
/// - sum a row's gradient over its occurrences in (feature, sample, position) order, from the
///   first term, each term one multiply of the pooled gradient by the weight, or by 1 / length
///   under mean; never contract a multiply and an add;
/// - sum over the columns of a row in blocks of 32 columns, as the CPU's `rules` module writes
///   it down;
/// - write a row whole or not at all, and write no number that is not finite.
pub trait LookupOps: RowOps {
    /// A batch's lookup on this device.
    type Lookup: Send + Sync;
    /// Memory that lookups and updates reuse from step to step.
    type Scratch: Default + Send + Sync + 'static;

    /// Takes a checked lookup over to the device.
    fn stage(
        &self,
        stream: &Self::Stream,
        schema: &Arc<Schema>,
        scratch: &Arc<Self::Scratch>,
        lookup: HostLookup,
    ) -> Result<Self::Lookup>;

    /// Finds each table's different rows and their occurrences, unless that was done.
    fn group(&self, stream: &Self::Stream, lookup: &Self::Lookup) -> Result<()>;

    /// Number of different rows of each table.
    fn unique_counts(&self, stream: &Self::Stream, lookup: &Self::Lookup) -> Result<Vec<u64>>;

    /// The different rows of a table, ascending.
    fn unique_rows(
        &self,
        stream: &Self::Stream,
        lookup: &Self::Lookup,
        table: usize,
    ) -> Result<Vec<Row>>;

    /// Writes the first weights of every row of the fresh (zero) store of table `table`, at its
    /// window's place in the whole table.
    fn initialize(
        &self,
        stream: &Self::Stream,
        schema: &Schema,
        table: usize,
        store: &mut Resident<Self>,
    ) -> Result<()>;

    /// Gives the rows of the tables marked in `which` numbers among the different ones that
    /// `lookup` reads: [`HostLookup::numbered`].
    fn number_rows(&self, schema: &Schema, which: &[bool], lookup: &mut HostLookup);

    /// The different numbers of `table`, whose rows are numbered, that `bags` hold; ascending.
    fn numbers_of(
        &self,
        stream: &Self::Stream,
        lookup: &Self::Lookup,
        table: usize,
        bags: Range<usize>,
    ) -> Result<Vec<u64>>;

    /// Pools `bags`: feature `f` of bag `b` at `out[b * stride + column_f ..][.. dim]`, zeros
    /// for an empty bag. Other columns stay.
    #[allow(clippy::too_many_arguments)]
    fn forward(
        &self,
        stream: &Self::Stream,
        stores: &Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &Self::Lookup,
        bags: Range<usize>,
        out: &mut Self::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()>;

    /// Moves every row in reach that occurs, once, by its summed gradient.
    ///
    /// `squares`, where it is not empty, holds one number for each different row of the lookup,
    /// table after table: the sum over *all* columns of the whole table that the optimizer's
    /// [row sum](crate::SparseOptimizer::row_sum) asks for. It is empty where no table is cut by
    /// columns.
    #[allow(clippy::too_many_arguments)]
    fn update(
        &self,
        stream: &Self::Stream,
        stores: &mut Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &Self::Lookup,
        grad: &Self::Buffer<f32>, // (bags, stride)
        stride: usize,
        step: &SparseStep,
        squares: &[f32],
    ) -> Result<UpdateStats>;

    /// Each different row's summed gradient, as an update would use it before clipping: row `i`
    /// of table `t` (rows ascending) at `out[start_t + i * dim_t ..][.. dim_t]`, where `start_t`
    /// is the end of the table before. `out` is as long as that takes. Rows that are not `marked`
    /// keep what is there.
    fn row_gradients(
        &self,
        stream: &Self::Stream,
        lookup: &Self::Lookup,
        grad: &Self::Buffer<f32>, // (bags, stride)
        stride: usize,
        marked: Marked<'_>,
        out: &mut [f32],
    ) -> Result<()>;

    /// The sums of squares over blocks of 32 columns that an update at `step` needs of each
    /// different row of the only table of a collection: of its clipped gradient, with l2 decay
    /// added where the optimizer adds it. `out` is (different rows, blocks of 32 columns); rows out
    /// of reach keep what is there.
    #[allow(clippy::too_many_arguments)]
    fn block_squares(
        &self,
        stream: &Self::Stream,
        stores: &Stores<Self>,
        reach: &[Reach<'_>],
        lookup: &Self::Lookup,
        grad: &Self::Buffer<f32>, // (bags, stride)
        stride: usize,
        step: &SparseStep,
        out: &mut [f32],
    ) -> Result<()>;

    /// Squared norm of all summed row gradients in float64: rows ascending into the table's sum,
    /// then tables in order. The row of zeros of a dynamic table, which no update moves, counts
    /// for nothing.
    fn grad_sq_norm(
        &self,
        stream: &Self::Stream,
        lookup: &Self::Lookup,
        grad: &Self::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<f64>;
}

/// A batch's checked lookup, staged on a device. Made by [`Resolver::resolve`]; it may be made
/// and grouped on one thread and used on another.
pub struct Lookup<D: LookupOps> {
    pub(crate) schema: Arc<Schema>,
    pub(crate) staged: D::Lookup,
    bags: usize,
    rows_read: Vec<u64>,
    bad_ids: Vec<u64>,
    policy: BadIdPolicy,
    /// For each table whose rows move between tiers: the different rows, ascending.
    pub(crate) moving: Vec<Option<Arc<Vec<u64>>>>,
    /// Those that were fetched ahead and are not held yet.
    pub(crate) fetched: Option<Vec<Option<Fetched>>>,
    /// What holds them in device memory, once a forward pass has brought all of them there.
    pub(crate) held: Option<Vec<Option<Lease>>>,
    /// What routing did to dynamic tables.
    pub(crate) mapped: Vec<Option<Mapped>>,
}

impl<D: LookupOps> fmt::Debug for Lookup<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lookup")
            .field("bags", &self.bags)
            .field("rows_read", &self.rows_read)
            .field("bad_ids", &self.bad_ids)
            .field("policy", &self.policy)
            .finish_non_exhaustive()
    }
}

impl<D: LookupOps> Lookup<D> {
    pub(crate) fn new(
        resolver: &Resolver<D>,
        stream: &D::Stream,
        host: HostLookup,
    ) -> Result<Self> {
        Ok(Self {
            schema: Arc::clone(&resolver.schema),
            bags: host.bags,
            rows_read: host.rows_read.clone(),
            bad_ids: host.bad_ids.clone(),
            policy: host.policy,
            moving: host.numbered.clone(),
            fetched: None,
            held: None,
            mapped: Vec::new(),
            staged: resolver.device.stage(stream, &resolver.schema, &resolver.scratch, host)?,
        })
    }

    /// Bags a feature: samples of the batch.
    #[must_use]
    pub fn bags(&self) -> usize {
        self.bags
    }

    /// Rows read of each table, repeats counted.
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

    /// What became of the ids of a dynamic table.
    #[must_use]
    pub fn id_stats(&self, table: usize) -> Option<&IdMapStats> {
        self.mapped.get(table)?.as_ref().map(|mapped| &mapped.stats)
    }
}
