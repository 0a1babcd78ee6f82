//! Why tables, lookups and updates refuse.

/// Why an operation on embedding tables was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddingError {
    /// A batch cannot be cut into so many parts.
    #[error("micro-batches: {given} are not from 1 to {max}")]
    MicroBatches {
        /// Asked for.
        given: usize,
        /// The most.
        max: usize,
    },
    /// The system starts no threads to fetch rows.
    #[error(
        "fetching rows: cannot start threads: {reason}; raise the limit on threads (ulimit -u)"
    )]
    Threads {
        /// What it said.
        reason: String,
    },
    /// Tables or features are described wrongly; every fault is listed.
    #[error("embedding tables: {}", faults.join("; "))]
    Spec {
        /// What is wrong, each naming its table or feature.
        faults: Vec<String>,
    },
    /// An id names no row of its table.
    #[error(
        "lookup: id {id} out of range for table {table} of {rows} rows \
         (feature {feature}, sample {sample})"
    )]
    IdOutOfRange {
        /// The id as it stands in the data.
        id: i64,
        /// Name of the table.
        table: String,
        /// Rows of the table.
        rows: u64,
        /// Name of the feature.
        feature: String,
        /// Number of the bag in the batch, from 0.
        sample: usize,
    },
    /// A lookup has another number of features than the collection.
    #[error("lookup: {given} features given; the tables serve {needed}")]
    FeatureCount {
        /// Features given.
        given: usize,
        /// Features of the collection.
        needed: usize,
    },
    /// What ranks sent each other does not fit together.
    #[error("exchange between ranks: {reason}")]
    Exchange {
        /// What is wrong.
        reason: String,
    },
    /// Ranks cannot work together, or no longer.
    #[error(transparent)]
    Comm(Box<tessera_comm::CommError>),
    /// The features of one lookup differ in their number of bags.
    #[error("lookup: feature {feature} has {given} bags; feature {first} has {needed}")]
    BagCount {
        /// Name of the feature.
        feature: String,
        /// Its bags.
        given: usize,
        /// Name of the first feature.
        first: String,
        /// Bags of the first feature.
        needed: usize,
    },
    /// Per-sample weights where the pooling has no meaning for them.
    #[error(
        "lookup: feature {feature} has weights, but table {table} pools by {pooling}; \
         weights go with sum only"
    )]
    WeightsNeedSum {
        /// Name of the feature.
        feature: String,
        /// Name of the table.
        table: String,
        /// The table's pooling.
        pooling: crate::Pooling,
    },
    /// A bag of other than one id for a table without pooling.
    #[error(
        "lookup: bag {sample} of feature {feature} has {ids} ids; table {table} does not pool, \
         so that every bag must hold one"
    )]
    BagNotSingle {
        /// Name of the feature.
        feature: String,
        /// Name of the table.
        table: String,
        /// Number of the bag in the batch, from 0.
        sample: usize,
        /// Ids in it.
        ids: u64,
    },
    /// Ids of a table that has rows only.
    #[error("table {table} is static: it keeps no ids; only dynamic tables do")]
    NotDynamic {
        /// Name of the table.
        table: String,
    },
    /// More of something in one batch than the 32-bit fields of the grouping hold.
    #[error(
        "lookup: {count} {what} for table {table} in one batch; at most {max} fit, \
         use smaller batches"
    )]
    BatchTooLarge {
        /// What there is too much of.
        what: &'static str,
        /// How many of it.
        count: u64,
        /// Name of the table.
        table: String,
        /// The most that fits.
        max: u64,
    },
    /// Rows of a pooled buffer are too short for the features' columns.
    #[error("{operation}: a row stride of {stride} columns; the features end at column {width}")]
    Stride {
        /// `lookup`, `update` or `gradient norm`.
        operation: &'static str,
        /// Stride given.
        stride: usize,
        /// One past the last column of any feature.
        width: usize,
    },
    /// A pooled buffer is shorter than the batch.
    #[error(
        "{operation}: a buffer of {len} elements; {bags} bags of {stride} columns need {needed}"
    )]
    BufferTooShort {
        /// `lookup`, `update` or `gradient norm`.
        operation: &'static str,
        /// Elements in the buffer.
        len: usize,
        /// Bags in the batch.
        bags: usize,
        /// Columns a bag.
        stride: usize,
        /// Elements needed (saturating).
        needed: usize,
    },
    /// A lookup of one collection used with another.
    #[error("{operation}: the lookup was resolved for other tables than these")]
    ForeignLookup {
        /// `lookup`, `update` or `gradient norm`.
        operation: &'static str,
    },
    /// Steps are counted from 1.
    #[error("update: step 0; steps are counted from 1")]
    StepZero,
    /// A number of the step makes no sense.
    #[error("update: {what} is {value}; it must be {needed}")]
    StepValue {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: f32,
        /// What it must be.
        needed: &'static str,
    },
    /// There is no such table.
    #[error("no table number {table}: there are {tables}")]
    NoTable {
        /// Number given.
        table: usize,
        /// Tables in the collection.
        tables: usize,
    },
    /// The table's optimizer keeps no such state.
    #[error("table {table} keeps no state `{state}`; its optimizer {optimizer} keeps: {known}")]
    NoState {
        /// Name of the table.
        table: String,
        /// Name given.
        state: String,
        /// The optimizer's name.
        optimizer: &'static str,
        /// Names there are.
        known: String,
    },
    /// Values given do not fill the rows named.
    #[error(
        "{operation}: {given} values of table {table} for rows {start}..{end}; {needed} are needed"
    )]
    ValueCount {
        /// `read weights` and the like.
        operation: &'static str,
        /// Name of the table.
        table: String,
        /// First row.
        start: u64,
        /// One past the last row.
        end: u64,
        /// Values given.
        given: usize,
        /// Values of those rows.
        needed: u128,
    },
    /// The row store of a table refused.
    #[error("table {table}: {source}")]
    Store {
        /// Name of the table.
        table: String,
        /// What it said.
        source: tessera_cache::CacheError,
    },
    /// A sharding plan is not sound; every fault is listed.
    #[error("sharding plan: {}", faults.join("; "))]
    Plan {
        /// What is wrong, each naming its table.
        faults: Vec<String>,
    },
    /// Tables, ranks or topology cannot be planned for; every fault is listed.
    #[error("planning: {}", faults.join("; "))]
    PlanInput {
        /// What is wrong.
        faults: Vec<String>,
    },
    /// A table has no room on the ranks.
    #[error(
        "planning: no room for table {table} of {bytes} bytes: {ranks} ranks have {rank_bytes} \
         bytes each, {} in all, and all tables need {tables_bytes} and their buffers (add ranks, \
         lower its rows, precision or optimizer state, or give the topology a lower tier)",
        u128::from(*rank_bytes) * *ranks as u128
    )]
    CannotPlace {
        /// Name of the table.
        table: String,
        /// Its rows with their state.
        bytes: u64,
        /// All tables' rows with their state.
        tables_bytes: u128,
        /// Ranks of a group.
        ranks: usize,
        /// Memory of each.
        rank_bytes: u64,
    },
    /// The device refused.
    #[error(transparent)]
    Device(#[from] tessera_device::DeviceError),
    /// A metric could not be registered.
    #[error("embedding metrics: {0}")]
    Metrics(#[from] prometheus::Error),
}

impl From<tessera_comm::CommError> for EmbeddingError {
    fn from(error: tessera_comm::CommError) -> Self {
        Self::Comm(Box::new(error))
    }
}

/// Result of an operation on embedding tables.
pub type Result<T> = std::result::Result<T, EmbeddingError>;
