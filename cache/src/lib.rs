//! Row stores: fixed-width rows by number.
//!
//! A row has two planes under one slot number: its weights, which every lookup reads, and its
//! state, which only updates touch. A store knows their widths in bytes and nothing of what they
//! mean: `tessera-embedding` owns the meaning.
//!
//! ```text
//! row (u64, the table's numbering) -> slot (u64, a place in device memory)
//! weights plane: slot * weight_bytes .. + weight_bytes
//! state plane:   slot * state_bytes  .. + state_bytes
//! ```
//!
//! Kernels address rows by slot and never by row, so that a store whose rows move between tiers
//! can stand where [`Resident`] stands: there a slot *is* the row.

mod cold;
mod dynamic;
mod index;
pub mod log;
mod metrics;
mod ops;
mod resident;
mod store;
mod sync;
mod tiered;

pub use cold::{ColdRows, ColdStats, Planes, PlanesMut};
pub use dynamic::{
    Admission, Dealt, Eviction, IdMap, IdMapOptions, IdMapState, IdMapStats, IdRow, Move, Resolved,
    SketchShape, SketchState, id_hash, owner_of,
};
pub use metrics::CacheMetrics;
pub use ops::{NO_SLOT, RowOps};
pub use resident::Resident;
pub use store::{Fetched, Fetcher, Lease, RowStore, StoreStats, TierStats};
pub use tiered::{FirstRows, Policy, Tiered, TieredOptions, slot_bytes};

/// Width of a row's two planes in bytes. Rows lie one after another without padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowLayout {
    /// Bytes of weights a row.
    pub weight_bytes: usize,
    /// Bytes of state a row; 0 for none.
    pub state_bytes: usize,
}

impl RowLayout {
    /// Bytes a row in one of its planes.
    #[must_use]
    pub fn row_bytes(self, plane: Plane) -> usize {
        match plane {
            Plane::Weights => self.weight_bytes,
            Plane::State => self.state_bytes,
        }
    }
}

/// One of a row's two planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Plane {
    /// What a lookup reads.
    Weights,
    /// What an update keeps beside the weights.
    State,
}

impl std::fmt::Display for Plane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Weights => "weights",
            Self::State => "state",
        })
    }
}

/// Why a row store refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// A plane's size does not fit the address space.
    #[error(
        "row store: {rows} rows of {row_bytes} bytes of {plane} exceed the address space; \
         use fewer rows or a smaller dim"
    )]
    TooLarge {
        /// The plane.
        plane: Plane,
        /// Rows asked for.
        rows: u64,
        /// Bytes a row in that plane.
        row_bytes: usize,
    },
    /// A range of rows leaves the store.
    #[error(
        "row store: cannot {operation} {plane} of rows {start}..{end}: the store has {rows} rows"
    )]
    RowsOutOfRange {
        /// `read` or `write`.
        operation: &'static str,
        /// The plane.
        plane: Plane,
        /// First row of the range.
        start: u64,
        /// One past its last row.
        end: u64,
        /// Rows in the store.
        rows: u64,
    },
    /// The bytes given are not those of the range.
    #[error(
        "row store: cannot {operation} {plane} of rows {start}..{end} with {given} bytes: \
         {needed} are needed"
    )]
    WrongLength {
        /// `read` or `write`.
        operation: &'static str,
        /// The plane.
        plane: Plane,
        /// First row of the range.
        start: u64,
        /// One past its last row.
        end: u64,
        /// Bytes given.
        given: usize,
        /// Bytes of the range.
        needed: usize,
    },
    /// An index for too many ids.
    #[error(
        "index: a capacity of {capacity} ids exceeds the {max} of one index; \
         use fewer rows or spread them over more shards"
    )]
    IndexTooLarge {
        /// Ids asked for.
        capacity: u64,
        /// The most that fit.
        max: u64,
    },
    /// An option of a row log does not hold; all faults at once.
    #[error("row log: options refused: {faults}")]
    Options {
        /// The faults, separated by semicolons.
        faults: String,
    },
    /// The file system refused.
    #[error("row log: cannot {operation} {}: {source}{}", path.display(), log::hint(source))]
    File {
        /// What was tried.
        operation: &'static str,
        /// On what.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// Another log is open in the directory.
    #[error(
        "row log: {} is in use by another process or another log of this one; \
         give each table and rank a directory of its own",
        dir.display()
    )]
    InUse {
        /// The directory.
        dir: std::path::PathBuf,
    },
    /// A file's bytes are not those that were written.
    #[error(
        "row log: {} is damaged at byte {offset} (id {id}): {fault}; \
         check the disk and go back to a checkpoint",
        path.display()
    )]
    Damaged {
        /// The segment file.
        path: std::path::PathBuf,
        /// First byte of the record, or 0 for the file's header.
        offset: u64,
        /// The row asked for, or what the record's id field reads; 0 for a header.
        id: u64,
        /// What is wrong.
        fault: String,
    },
    /// A file is sound but of another log.
    #[error(
        "row log: {} has {what} {found}, not {expected}; it belongs to another table or build",
        path.display()
    )]
    OtherLog {
        /// The segment file.
        path: std::path::PathBuf,
        /// What differs.
        what: &'static str,
        /// Its value in the file.
        found: u64,
        /// The value asked for.
        expected: u64,
    },
    /// No room within the budget, even after compaction.
    #[error(
        "row log: {}: {needed} bytes more do not fit: {used} bytes of files and {reserve} kept \
         free for compaction of a budget of {budget}; raise the budget (tiers.ssd_bytes)",
        dir.display()
    )]
    Budget {
        /// The log's directory.
        dir: std::path::PathBuf,
        /// Bytes that the call would write.
        needed: u64,
        /// Bytes of the files there are.
        used: u64,
        /// Bytes kept free.
        reserve: u64,
        /// Bytes allowed.
        budget: u64,
    },
    /// An earlier write failed.
    #[error("row log: {}: {operation} refused since an earlier failure: {cause}", dir.display())]
    Refused {
        /// The log's directory.
        dir: std::path::PathBuf,
        /// What was asked.
        operation: &'static str,
        /// The first failure.
        cause: String,
    },
    /// Planes and rows given together do not belong together.
    #[error(
        "row log: {operation} of {rows} rows with {given} bytes of {what}: {needed} are needed"
    )]
    WrongRows {
        /// `get`, `put`, `remove` or `contains`.
        operation: &'static str,
        /// Rows given.
        rows: usize,
        /// `weights`, `state` or `found`.
        what: &'static str,
        /// Bytes given.
        given: usize,
        /// Bytes needed.
        needed: usize,
    },
    /// A row that a table of known size cannot have.
    #[error("row log: {operation}: row {row} is out of range: the table has {rows} rows")]
    NoSuchRow {
        /// `put`, or `replay` for one found in a file.
        operation: &'static str,
        /// The row.
        row: u64,
        /// Rows of the table.
        rows: u64,
    },
    /// A snapshot's file is nowhere, or not what the snapshot says.
    #[error("row log: snapshot: {file}: {fault}")]
    Snapshot {
        /// The segment file.
        file: String,
        /// What is wrong, and where it was looked for.
        fault: String,
    },
    /// An option of a dynamic table that cannot be.
    #[error("dynamic table: {option} is {value}: {rule}")]
    IdMapOption {
        /// The option.
        option: &'static str,
        /// Its value.
        value: String,
        /// What it must be.
        rule: &'static str,
    },
    /// A training step before the last one.
    #[error(
        "dynamic table: step {step} comes after step {last}; give batches in the order of their \
         steps, and evaluate without training"
    )]
    IdMapStep {
        /// The step given.
        step: u64,
        /// The last one.
        last: u64,
    },
    /// An earlier batch ended half way.
    #[error(
        "dynamic table: refuses to train on: a batch of step {step} failed half way; \
         load a checkpoint"
    )]
    IdMapFailed {
        /// The step of the batch.
        step: u64,
    },
    /// Arrays that are not those of a dynamic table.
    #[error("dynamic table: cannot take over its ids: {reason}")]
    IdMapState {
        /// What is wrong with them, with the numbers and what to do.
        reason: String,
    },
    /// More ids for a rank than it has rows, and no policy that says which go.
    #[error(
        "dynamic table: {ids} ids belong to rank {rank}, which has {capacity} rows; raise the \
         capacity, use more ranks, or evict by lru or lfu"
    )]
    IdMapShare {
        /// The rank.
        rank: u64,
        /// Its ids.
        ids: u64,
        /// Its rows.
        capacity: u64,
    },
    /// The device tier has no room for one row.
    #[error(
        "row store: a device tier of {given} bytes has no room for one row: at least {needed} \
         bytes are needed, and a batch needs them for each of its different rows; raise \
         device_bytes"
    )]
    TierTooSmall {
        /// Bytes given.
        given: u64,
        /// Bytes of a slot.
        needed: u64,
    },
    /// The cold tier's rows have other widths than the store's.
    #[error(
        "row store: the cold tier holds rows of {}+{} bytes (weights+state), the store {}+{}; \
         use another directory, or the dim, precision and optimizer that it was written with",
        cold.weight_bytes, cold.state_bytes, store.weight_bytes, store.state_bytes
    )]
    LayoutDiffers {
        /// The cold tier's.
        cold: RowLayout,
        /// The store's.
        store: RowLayout,
    },
    /// Rows to fetch are not different and ascending.
    #[error("fetch: row {next} follows row {row} at position {position}; rows must ascend")]
    RowsNotAscending {
        /// Position of the second of the two.
        position: usize,
        /// A row.
        row: u64,
        /// The one after it.
        next: u64,
    },
    /// A row to fetch is not in the store.
    #[error("fetch: row {row} of a store of {rows} rows")]
    RowOutOfRange {
        /// The row.
        row: u64,
        /// Rows in the store.
        rows: u64,
    },
    /// More rows are wanted at a time than the device tier has slots.
    #[error(
        "fetch: {rows} rows, beside {held} that leases and fetches hold, do not fit a device tier \
         of {slots} slots; give this table a device tier of at least {bytes_needed} bytes \
         (device_bytes), hold fewer batches at a time, or work in passes of fewer rows"
    )]
    WorkingSet {
        /// Rows to fetch.
        rows: u64,
        /// Rows held already.
        held: u64,
        /// Slots of the device tier.
        slots: u64,
        /// Bytes of a device tier that all of them would fit.
        bytes_needed: u64,
    },
    /// A fetch or lease was given to a store that it is not of.
    #[error("row store: cannot {operation} rows that another store holds")]
    Foreign {
        /// `install` or `commit`.
        operation: &'static str,
    },
    /// A lease was asked for a row that it does not hold.
    #[error("lease: row {row} is not among its rows, or rows asked for do not ascend")]
    NotLeased {
        /// The row.
        row: u64,
    },
    /// A tier below the device refused.
    #[error("row store: cannot {operation} ({rows} rows)")]
    Tier {
        /// What was to be done.
        operation: &'static str,
        /// How many rows it concerned.
        rows: u64,
        /// Why not.
        source: Box<CacheError>,
    },
    /// The cold tier does not give a row that it says it holds.
    #[error("row store: the cold tier lost row {row}; restore from a checkpoint")]
    RowLost {
        /// The row.
        row: u64,
    },
    /// An earlier failure left rows in doubt.
    #[error(
        "row store: refuses further work since it could not {operation}: {cause}; go on from the \
         last checkpoint"
    )]
    Poisoned {
        /// What failed.
        operation: &'static str,
        /// Why, with its own causes.
        cause: String,
    },
    /// Metrics could not be registered.
    #[error("metrics: {0}")]
    Metrics(#[from] prometheus::Error),
    /// The device refused.
    #[error(transparent)]
    Device(#[from] tessera_device::DeviceError),
}

/// Result of a store's operation.
pub type Result<T> = std::result::Result<T, CacheError>;
