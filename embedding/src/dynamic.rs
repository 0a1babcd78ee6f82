//! Tables of any ids: which row an id has, and what a row holds when an id gets it.
//!
//! ```text
//! check   nothing changes; ids stay ids
//! route   ids -> rows, by the table's map; in training ids are admitted, counted and evicted
//! hold    rows that went to new ids: first values by (seed, table, id), zero state
//! ```
//! Routing touches the map alone and holding the rows alone, so that a batch may be routed on one
//! thread while another still updates the rows of the batch before; batches are routed in the
//! order of their steps, and held in that order after the updates of those before.
//!
//! An id without a row (not admitted, or without room, or unknown when evaluating) is looked up as
//! a vector of zeros, which no update moves: one more row at the end of the table's store. A mean
//! divides by all ids of the bag, those included.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_cache::{IdMap, IdMapOptions, IdMapState, IdMapStats, IdRow, Plane};
use tessera_device::Philox;

use crate::collection::{of_table, state_columns};
use crate::cpu::init;
use crate::{
    EmbeddingCollection, EmbeddingError, HostLookup, Lookup, LookupOps, Resolver, Result, Row,
    Schema, TableKind, TableSpec, Window,
};

/// The maps of a collection's tables; none for static ones.
pub(crate) type Maps = Arc<[Option<Mutex<IdMap>>]>;

/// Rows that get their first values in one go.
const FIRST_ROWS: usize = 1 << 13;

/// What routing did to a dynamic table.
#[derive(Clone, Debug)]
pub(crate) struct Mapped {
    /// Ids that got a row which has not been reset yet.
    pub(crate) admitted: Vec<IdRow>,
    /// The batch in numbers; the ids that were too old are among those evicted.
    pub(crate) stats: IdMapStats,
}

/// Empty maps for the dynamic tables of a schema.
///
/// Errors: [`EmbeddingError::Store`] for options that cannot be.
pub(crate) fn open_maps(schema: &Schema) -> Result<Maps> {
    let tables = schema.tables().iter();
    tables.map(|table| options(table, schema.seed()).map(|o| open(table, o)).transpose()).collect()
}

fn options(table: &TableSpec, seed: u64) -> Option<IdMapOptions> {
    match table.kind {
        TableKind::Static => None,
        TableKind::Dynamic { admission, eviction } => {
            Some(IdMapOptions { capacity: table.rows, admission, eviction, seed })
        }
    }
}

fn open(table: &TableSpec, options: IdMapOptions) -> Result<Mutex<IdMap>> {
    IdMap::new(options).map(Mutex::new).map_err(of_table(table))
}

/// Locks a map. One that a panic left half way refuses to train on by itself.
fn lock(map: &Mutex<IdMap>) -> MutexGuard<'_, IdMap> {
    map.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: LookupOps> Resolver<D> {
    /// Turns the ids of dynamic tables into rows. `counts`, where a collection of one table and
    /// feature has them, says for how many occurrences each id stands.
    pub(crate) fn map_ids(
        &self,
        host: &mut HostLookup,
        counts: Option<&[u64]>,
    ) -> Result<Vec<Option<Mapped>>> {
        let mut mapped = Vec::with_capacity(self.maps.len());
        for (table, map) in self.maps.iter().enumerate() {
            mapped.push(match map {
                None => None,
                Some(map) => Some(self.map_table(table, &mut lock(map), host, counts)?),
            });
        }
        host.holds_ids = false;
        Ok(mapped)
    }

    fn map_table(
        &self,
        table: usize,
        map: &mut IdMap,
        host: &mut HostLookup,
        counts: Option<&[u64]>,
    ) -> Result<Mapped> {
        let spec = &self.schema.tables()[table];
        let features = self.schema.features_of(table);
        let mut ids: Vec<u64> = Vec::new();
        for &feature in features {
            ids.extend(host.features[feature].rows.iter().map(|row| row.0));
        }
        let (resolved, old) = match host.step {
            None => (map.resolve(&ids, 0, false).map_err(of_table(spec))?, 0),
            Some(step) => {
                let old = map.advance(step).map_err(of_table(spec))?.len();
                let resolved = match counts {
                    None => map.resolve(&ids, step, true),
                    Some(counts) => map.resolve_counted(&ids, counts, step),
                };
                (resolved.map_err(of_table(spec))?, old as u64)
            }
        };
        let mut rows = resolved.rows.iter();
        for &feature in features {
            for (to, &row) in host.features[feature].rows.iter_mut().zip(&mut rows) {
                // The row of zeros is the last one.
                *to = Row(row.min(spec.rows));
            }
        }
        let mut stats = resolved.stats;
        stats.evicted += old;
        Ok(Mapped { admitted: resolved.admitted, stats })
    }
}

impl<D: LookupOps> EmbeddingCollection<D> {
    /// Gives rows that went to new ids by a lookup their first values and zero state.
    pub(crate) fn reset_rows(&mut self, stream: &D::Stream, lookup: &mut Lookup<D>) -> Result<()> {
        for (table, mapped) in lookup.mapped.iter_mut().enumerate() {
            let Some(mapped) = mapped else { continue };
            let mut fresh = std::mem::take(&mut mapped.admitted);
            fresh.sort_unstable_by_key(|one| one.row);
            let Resolver { device, schema, .. } = &self.resolver;
            let (spec, store) = (&schema.tables()[table], &mut self.stores[table]);
            let generator = Philox::for_name(schema.seed(), &spec.name);
            // First values go by the id, whatever the row and wherever it lies.
            let window = Window { first_row: 0, ..schema.windows()[table] };
            let layout = store.layout();
            for fresh in fresh.chunks(FIRST_ROWS) {
                let rows: Vec<u64> = fresh.iter().map(|one| one.row).collect();
                let mut weights = vec![0; rows.len() * layout.weight_bytes];
                let ids = fresh.iter().map(|one| one.id);
                init::fill_rows(spec, &window, generator, ids, &mut weights);
                let state = vec![0; rows.len() * layout.state_bytes];
                store
                    .write_listed(device, stream, &rows, Some(&weights), Some(&state))
                    .map_err(of_table(spec))?;
            }
        }
        Ok(())
    }

    fn map(&self, table: usize) -> Result<MutexGuard<'_, IdMap>> {
        let (spec, _) = self.table(table)?;
        let map = self.resolver.maps[table].as_ref();
        map.map(lock).ok_or_else(|| EmbeddingError::NotDynamic { table: spec.name.clone() })
    }

    /// What a dynamic table's map is made of.
    ///
    /// Errors: [`EmbeddingError::NoTable`], [`EmbeddingError::NotDynamic`].
    pub fn id_options(&self, table: usize) -> Result<IdMapOptions> {
        Ok(*self.map(table)?.options())
    }

    /// All that a dynamic table knows of its ids.
    ///
    /// Errors: [`EmbeddingError::NoTable`], [`EmbeddingError::NotDynamic`].
    pub fn id_state(&self, table: usize) -> Result<IdMapState> {
        Ok(self.map(table)?.export())
    }

    /// Puts another map in the place of a dynamic table's. Rows stay as they are.
    ///
    /// Errors: [`EmbeddingError::NoTable`], [`EmbeddingError::NotDynamic`].
    ///
    /// # Panics
    /// When the capacity of `map` is another one.
    pub fn set_ids(&mut self, table: usize, map: IdMap) -> Result<()> {
        let mut held = self.map(table)?;
        assert_eq!(map.options().capacity, held.options().capacity, "a map of the table's rows");
        *held = map;
        Ok(())
    }

    /// As [`EmbeddingCollection::read_weight_bits`], of rows in any order.
    ///
    /// Errors: as there.
    pub fn read_weights_of(
        &self,
        stream: &D::Stream,
        table: usize,
        rows: &[u64],
        bytes: &mut [u8],
    ) -> Result<()> {
        self.read_of(stream, table, Plane::Weights, &Listed::new(rows), bytes)
    }

    /// Writes what [`EmbeddingCollection::read_weights_of`] reads; `rows` are different.
    ///
    /// Errors: as there.
    pub fn write_weights_of(
        &mut self,
        stream: &D::Stream,
        table: usize,
        rows: &[u64],
        bytes: &[u8],
    ) -> Result<()> {
        self.write_of(stream, table, Plane::Weights, &Listed::new(rows), bytes)
    }

    /// As [`EmbeddingCollection::read_state`], of rows in any order.
    ///
    /// Errors: as there.
    ///
    /// # Panics
    /// When `values` are not as many as the rows have.
    pub fn read_state_of(
        &self,
        stream: &D::Stream,
        table: usize,
        name: &str,
        rows: &[u64],
        values: &mut [f32],
    ) -> Result<()> {
        let (columns, all) = state_columns(self.table(table)?.0, name)?;
        assert_eq!(values.len(), rows.len() * columns.len(), "a state of every row");
        let mut plane = vec![0.0f32; rows.len() * all];
        let bytes = bytemuck::cast_slice_mut(&mut plane);
        self.read_of(stream, table, Plane::State, &Listed::new(rows), bytes)?;
        for (to, from) in values.chunks_exact_mut(columns.len()).zip(plane.chunks_exact(all)) {
            to.copy_from_slice(&from[columns.clone()]);
        }
        Ok(())
    }

    /// Writes what [`EmbeddingCollection::read_state_of`] reads; `rows` are different.
    ///
    /// Errors: as there.
    ///
    /// # Panics
    /// When `values` are not as many as the rows have.
    pub fn write_state_of(
        &mut self,
        stream: &D::Stream,
        table: usize,
        name: &str,
        rows: &[u64],
        values: &[f32],
    ) -> Result<()> {
        let (columns, all) = state_columns(self.table(table)?.0, name)?;
        assert_eq!(values.len(), rows.len() * columns.len(), "a state of every row");
        let listed = Listed::new(rows);
        let mut plane = vec![0.0f32; rows.len() * all];
        if columns.len() < all {
            let bytes = bytemuck::cast_slice_mut(&mut plane);
            self.read_of(stream, table, Plane::State, &listed, bytes)?;
        }
        for (from, to) in values.chunks_exact(columns.len()).zip(plane.chunks_exact_mut(all)) {
            to[columns.clone()].copy_from_slice(from);
        }
        self.write_of(stream, table, Plane::State, &listed, bytemuck::cast_slice(&plane))
    }

    fn read_of(
        &self,
        stream: &D::Stream,
        table: usize,
        plane: Plane,
        listed: &Listed,
        bytes: &mut [u8],
    ) -> Result<()> {
        let (spec, store) = self.table(table)?;
        let mut sorted = vec![0; bytes.len()];
        store
            .read_listed(self.device(), stream, plane, &listed.rows, &mut sorted)
            .map_err(of_table(spec))?;
        let width = store.layout().row_bytes(plane).max(1);
        for (from, &place) in sorted.chunks_exact(width).zip(&listed.places) {
            bytes[place * width..][..width].copy_from_slice(from);
        }
        Ok(())
    }

    fn write_of(
        &mut self,
        stream: &D::Stream,
        table: usize,
        plane: Plane,
        listed: &Listed,
        bytes: &[u8],
    ) -> Result<()> {
        self.table(table)?;
        let Resolver { device, schema, .. } = &self.resolver;
        let (spec, store) = (&schema.tables()[table], &mut self.stores[table]);
        let width = store.layout().row_bytes(plane).max(1);
        let mut sorted = Vec::with_capacity(bytes.len());
        for &place in &listed.places {
            sorted.extend_from_slice(&bytes[place * width..][..width]);
        }
        let (weights, state) = match plane {
            Plane::Weights => (Some(&sorted[..]), None),
            Plane::State => (None, Some(&sorted[..])),
        };
        store.write_listed(device, stream, &listed.rows, weights, state).map_err(of_table(spec))
    }
}

/// Rows, ascending, and the place of each in the list that was given.
struct Listed {
    rows: Vec<u64>,
    places: Vec<usize>,
}

impl Listed {
    fn new(rows: &[u64]) -> Self {
        let mut places: Vec<usize> = (0..rows.len()).collect();
        places.sort_unstable_by_key(|&place| rows[place]);
        Self { rows: places.iter().map(|&place| rows[place]).collect(), places }
    }
}
