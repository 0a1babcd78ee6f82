//! How a rank's memory is shared by its tables where not all of them fit.
//!
//! ```text
//! budget -> tables: the smallest first, each up to an equal share of what is left
//! ```
//! So small tables, whose rows are the hottest, stay whole in device memory, and large ones get
//! equally many bytes, whatever their size: a batch reads about as many rows of each.

use std::path::PathBuf;
use std::sync::Arc;

use tessera_cache::log::{Options, Reader, SsdLog};
use tessera_cache::{
    CacheError, ColdRows, FirstRows, Plane, PlanesMut, Policy, Resident, RowLayout, RowStore,
    Tiered, TieredOptions, slot_bytes,
};
use tessera_device::{Philox, fnv1a};

use crate::collection::of_table;
use crate::cpu::init;
use crate::{EmbeddingError, Init, LookupOps, Result, Schema, TableSpec, Window};

/// Memory of one rank for its tables, weights and optimizer state together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tiers {
    /// Bytes of the device tier.
    pub device_bytes: u64,
    /// Bytes of the host tier; `None` for as many as the rows need that are not elsewhere.
    pub host_bytes: Option<u64>,
    /// What lies below; `None`: nothing.
    pub cold: Option<ColdTier>,
    /// Which rows leave a tier that has no room.
    pub policy: Policy,
}

/// A tier on SSD.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColdTier {
    /// A folder of this rank alone. Rows that an earlier run left in it are deleted.
    pub dir: PathBuf,
    /// Most bytes of files; `None` for no bound.
    pub bytes: Option<u64>,
    /// How rows are read.
    pub reader: Reader,
}

/// What one table gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// All rows in device memory.
    Resident,
    /// Some of them.
    Tiered {
        /// Bytes of the tiers in memory.
        options: TieredOptions,
        /// Folder and bytes of files.
        cold: Option<ColdTier>,
    },
}

/// Bytes of each table.
struct Amounts {
    /// All rows with their state.
    needs: Vec<u64>,
    /// Its part of the device tier; all that it needs if it is to stay there whole.
    device: Vec<u64>,
    /// What the device tier has no slots for.
    below: Vec<u64>,
    /// Its part of the host tier.
    host: Vec<u64>,
}

impl Tiers {
    /// The same for rank `rank`, with an SSD folder of its own.
    #[must_use]
    pub fn of_rank(&self, rank: usize) -> Self {
        let mut tiers = self.clone();
        if let Some(cold) = &mut tiers.cold {
            cold.dir.push(format!("rank-{rank}"));
        }
        tiers
    }

    /// How many rows of each table, given by rows and layout, the tiers in memory hold when the
    /// tables share them: in the device tier, and in the host tier besides.
    #[must_use]
    pub fn rows_held(&self, tables: &[(u64, RowLayout)]) -> Vec<(u64, u64)> {
        let Amounts { needs, device, host, .. } = self.amounts(tables);
        let held = |(table, &(rows, layout)): (usize, &(u64, RowLayout))| {
            if device[table] >= needs[table] {
                return (rows, 0);
            }
            let slot = slot_bytes(layout, self.policy);
            let slots = device[table] / slot;
            (slots, (host[table] / slot).min(rows - slots))
        };
        tables.iter().enumerate().map(held).collect()
    }

    /// Shares the memory between tables of so many rows and such layouts.
    fn amounts(&self, tables: &[(u64, RowLayout)]) -> Amounts {
        let bytes = |&(rows, layout): &(u64, RowLayout)| {
            rows.saturating_mul((layout.weight_bytes + layout.state_bytes) as u64)
        };
        let needs: Vec<u64> = tables.iter().map(bytes).collect();
        let device = shares(&needs, self.device_bytes);
        let below: Vec<u64> = (0..tables.len())
            .map(|table| {
                let (rows, layout) = tables[table];
                let slot = slot_bytes(layout, self.policy);
                let resident = device[table] >= needs[table];
                if resident { 0 } else { (rows - device[table] / slot).saturating_mul(slot) }
            })
            .collect();
        let host = shares(&below, self.host_bytes.unwrap_or(u64::MAX));
        Amounts { needs, device, below, host }
    }

    /// Shares the memory between tables of so many rows and such layouts, given with their names.
    ///
    /// Errors: [`EmbeddingError::Spec`] when the tables do not fit all tiers together.
    fn places(&self, tables: &[(&str, u64, RowLayout)]) -> Result<Vec<Place>> {
        let sizes: Vec<(u64, RowLayout)> =
            tables.iter().map(|&(_, rows, layout)| (rows, layout)).collect();
        let Amounts { needs, device, below, host } = self.amounts(&sizes);
        let resident = |table: usize| device[table] >= needs[table];
        let total = below.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
        let host_bytes = self.host_bytes.unwrap_or(u64::MAX);
        if self.cold.is_none() && total > host_bytes {
            let all = needs.iter().fold(0u64, |sum, &bytes| sum.saturating_add(bytes));
            return Err(EmbeddingError::Spec {
                faults: vec![format!(
                    "tables of {all} bytes: {total} bytes do not fit the device tier of {} bytes, \
                     and the host tier has {host_bytes}; give it more, or an SSD below it",
                    self.device_bytes
                )],
            });
        }
        let on_disk = |table: usize| (below[table] / 4096 + 1) as u128;
        let disk: u128 = (0..tables.len()).filter(|&t| !resident(t)).map(on_disk).sum();
        let place = |table: usize| {
            if resident(table) {
                return Place::Resident;
            }
            let options = TieredOptions {
                device_bytes: device[table],
                host_bytes: host[table],
                policy: self.policy,
            };
            let cold = self.cold.as_ref().map(|cold| ColdTier {
                dir: cold.dir.join(folder_name(table, tables[table].0)),
                bytes: cold
                    .bytes
                    .map(|bytes| (u128::from(bytes) * on_disk(table) / disk.max(1)) as u64),
                reader: cold.reader,
            });
            Place::Tiered { options, cold }
        };
        Ok((0..tables.len()).map(place).collect())
    }
}

/// A folder for the rows of table number `index`: unique by the number, readable by the name.
fn folder_name(index: usize, name: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '_' };
    let name: String = name.chars().map(plain).take(64).collect();
    format!("{index:04}-{name}")
}

/// Shares a budget: the smallest need first, each at most an equal share of what is left.
fn shares(needs: &[u64], budget: u64) -> Vec<u64> {
    let mut order: Vec<usize> = (0..needs.len()).collect();
    order.sort_by_key(|&i| needs[i]);
    let mut left = budget;
    let mut shares = vec![0; needs.len()];
    for (done, &i) in order.iter().enumerate() {
        shares[i] = needs[i].min(left / (needs.len() - done) as u64);
        left -= shares[i];
    }
    shares
}

/// What each of `tables` gets of `tiers`; without them all rows stay.
///
/// Errors: [`EmbeddingError::Spec`] when the tables do not fit all tiers together.
pub(crate) fn places<'t>(
    tiers: Option<&Tiers>,
    tables: impl IntoIterator<Item = &'t TableSpec>,
) -> Result<Vec<Place>> {
    let tables = tables.into_iter();
    let Some(tiers) = tiers else { return Ok(tables.map(|_| Place::Resident).collect()) };
    let sizes = tables.map(|table| Ok((&table.name[..], table.stored_rows(), layout_of(table)?)));
    tiers.places(&sizes.collect::<Result<Vec<_>>>()?)
}

/// Bytes of weights and of state a row of `table`.
///
/// Errors: [`EmbeddingError::Store`] when a row exceeds the address space.
pub(crate) fn layout_of(table: &TableSpec) -> Result<RowLayout> {
    let too_large = |plane| {
        of_table(table)(CacheError::TooLarge { plane, rows: table.rows, row_bytes: usize::MAX })
    };
    Ok(RowLayout {
        weight_bytes: table
            .dim
            .checked_mul(table.precision.bytes())
            .ok_or_else(|| too_large(Plane::Weights))?,
        state_bytes: table
            .dim
            .checked_mul(12) // the largest state is two numbers a column and one a row
            .map(|_| table.optimizer.state_columns(table.dim) * size_of::<f32>())
            .ok_or_else(|| too_large(Plane::State))?,
    })
}

/// A table's store, and the log in which rows of it lie that have no room in memory.
pub(crate) type Opened<D> = (Box<dyn RowStore<D>>, Option<Arc<SsdLog>>);

/// The store of table `index` of `schema`, at its first values.
///
/// Errors: [`EmbeddingError::Store`], or what the device says.
pub(crate) fn open_store<D: LookupOps>(
    device: &D,
    stream: &D::Stream,
    schema: &Schema,
    index: usize,
    place: &Place,
) -> Result<Opened<D>> {
    let table = &schema.tables()[index];
    let layout = layout_of(table)?;
    match place {
        Place::Resident => {
            let rows = table.stored_rows();
            let mut store = Resident::new(device, rows, layout).map_err(of_table(table))?;
            // A dynamic table's rows get first values with their ids.
            if table.init != Init::Zero && table.rows > 0 && !table.is_dynamic() {
                device.initialize(stream, schema, index, &mut store)?;
            }
            Ok((Box::new(store), None))
        }
        Place::Tiered { options, cold } => {
            let log = cold.as_ref().map(|cold| open_cold(table, layout, cold)).transpose()?;
            let cold = log.clone().map(|log| log as Arc<dyn ColdRows>);
            let first = first_rows(table, &schema.windows()[index], schema.seed());
            let rows = table.stored_rows();
            let store = Tiered::new(device, rows, layout, options, cold, first);
            Ok((Box::new(store.map_err(of_table(table))?), log))
        }
    }
}

/// What makes the first values of rows that were never written.
fn first_rows(table: &TableSpec, window: &Window, seed: u64) -> Arc<FirstRows> {
    let first = FirstWeights::new(table, window, seed);
    Arc::new(move |rows: &[u64], to: PlanesMut<'_>| first.fill(rows, to.weights))
}

/// The weights of rows before any was written: a function of seed, table, row and column; zeros in
/// a dynamic table, whose rows get first values with their ids. Their states are zero.
#[derive(Clone, Debug)]
pub struct FirstWeights {
    table: TableSpec,
    window: Window,
    generator: Philox,
}

impl FirstWeights {
    /// Those of a table, of which `table` are some rows and columns where `window` says.
    #[must_use]
    pub fn new(table: &TableSpec, window: &Window, seed: u64) -> Self {
        let generator = Philox::for_name(seed, &table.name);
        Self { table: table.clone(), window: *window, generator }
    }

    /// Writes those of `rows`, counted from the window's first, into zeros: (rows, dim).
    pub fn fill(&self, rows: &[u64], weights: &mut [u8]) {
        if self.table.init != Init::Zero && !self.table.is_dynamic() {
            let rows = rows.iter().copied();
            init::fill_rows(&self.table, &self.window, self.generator, rows, weights);
        }
    }
}

/// Begins an empty log in the folder of a table's cold tier.
fn open_cold(table: &TableSpec, layout: RowLayout, cold: &ColdTier) -> Result<Arc<SsdLog>> {
    let record_bytes = (layout.weight_bytes + layout.state_bytes) as u64 + RECORD_EXTRA_BYTES;
    let all = table.stored_rows().saturating_mul(record_bytes);
    let bytes = cold.bytes.unwrap_or(0);
    // Enough segments that compaction has a choice, large enough to be written in long runs.
    let wished = (all.max(bytes) / SEGMENTS).clamp(SEGMENT_BYTES_MIN, SEGMENT_BYTES_MAX);
    let segment_bytes = if bytes == 0 { wished } else { wished.min(bytes / 4) };
    let options = Options {
        segment_bytes: segment_bytes.max(3 * record_bytes),
        budget_bytes: bytes,
        reader: cold.reader,
        rows: Some(table.stored_rows()),
        ..Options::default()
    };
    let tag = fnv1a(table.name.as_bytes());
    let log = SsdLog::create(&cold.dir, tag, layout, options).map_err(of_table(table))?;
    Ok(Arc::new(log))
}

/// Bytes of a record on SSD besides its planes, about.
pub(crate) const RECORD_EXTRA_BYTES: u64 = 32;

/// Segments of a full log.
const SEGMENTS: u64 = 64;

/// Bounds of a segment's size, in bytes. Each segment costs five syncs, for which reads of other
/// tables wait too.
const SEGMENT_BYTES_MIN: u64 = 8 << 20;
const SEGMENT_BYTES_MAX: u64 = 64 << 20;
