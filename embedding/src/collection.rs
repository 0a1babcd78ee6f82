//! The tables of a model on one device.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tessera_cache::log::SsdLog;
use tessera_cache::{CacheError, Plane, RowStore, StoreStats};
use tessera_data::Jagged;
use tessera_device::DeviceBuffer;

use crate::dynamic::open_maps;
use crate::fetch::FetchPool;
use crate::saving::Changes;
use crate::tiers::{Place, open_store, places};
use crate::{
    BadIdPolicy, EmbeddingError, FeatureSpec, Fetchers, Lookup, LookupOps, Marked, Precision,
    Resolver, Result, Schema, SparseOptimizer, SparseStep, StateTensor, TableSpec, Tiers,
    UpdateStats,
};

/// Values copied at a time when a state tensor is cut out of the state plane.
const CHUNK_VALUES: usize = 1 << 18;

/// All tables of a model and the features they serve.
///
/// Several tables may differ in rows, dim, precision, pooling and optimizer; a lookup and an
/// update always work on all of them at once.
pub struct EmbeddingCollection<D: LookupOps> {
    pub(crate) resolver: Resolver<D>,
    pub(crate) stores: Vec<Box<dyn RowStore<D>>>,
    pub(crate) fetchers: Fetchers,
    /// The log below each store that has one.
    pub(crate) logs: Vec<Option<Arc<SsdLog>>>,
    pub(crate) changes: Option<Changes>,
}

impl<D: LookupOps> fmt::Debug for EmbeddingCollection<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EmbeddingCollection").field("schema", self.schema()).finish_non_exhaustive()
    }
}

impl<D: LookupOps> EmbeddingCollection<D> {
    /// Tables at their first values, which depend on `seed`, names, rows and columns alone;
    /// optimizer state is zero.
    ///
    /// Errors: [`EmbeddingError::Spec`] with every fault; [`EmbeddingError::Store`] when a table
    /// does not fit memory.
    pub fn new(
        device: D,
        stream: &D::Stream,
        tables: Vec<TableSpec>,
        features: Vec<FeatureSpec>,
        seed: u64,
    ) -> Result<Self> {
        Self::with_tiers(device, stream, tables, features, seed, None)
    }

    /// As [`EmbeddingCollection::new`], with rows that move between the tiers that `tiers` bound,
    /// where they are given. Results are the same to the bit.
    ///
    /// Errors: as there; [`EmbeddingError::Spec`] when the tables do not fit all tiers together.
    pub fn with_tiers(
        device: D,
        stream: &D::Stream,
        tables: Vec<TableSpec>,
        features: Vec<FeatureSpec>,
        seed: u64,
        tiers: Option<&Tiers>,
    ) -> Result<Self> {
        let schema = Schema::new(tables, features, seed)?;
        let places = places(tiers, schema.tables())?;
        let pool = tiers.map(|_| FetchPool::new()).transpose()?;
        Self::of_schema(device, stream, schema, &places, pool)
    }

    /// The tables of a schema, each at its place, as [`EmbeddingCollection::new`]. `pool` fetches
    /// rows that move.
    pub(crate) fn of_schema(
        device: D,
        stream: &D::Stream,
        schema: Schema,
        places: &[Place],
        pool: Option<Arc<FetchPool>>,
    ) -> Result<Self> {
        let schema = Arc::new(schema);
        let opened = places
            .iter()
            .enumerate()
            .map(|(index, place)| open_store(&device, stream, &schema, index, place))
            .collect::<Result<Vec<_>>>()?;
        let (stores, logs): (Vec<Box<dyn RowStore<D>>>, _) = opened.into_iter().unzip();
        let moving: Arc<[bool]> = places.iter().map(|place| *place != Place::Resident).collect();
        let fetched = moving.iter().zip(&stores);
        let fetched = fetched.map(|(&moves, store)| moves.then(|| store.fetcher())).collect();
        let fetchers = Fetchers::new(&schema, fetched, pool.filter(|_| moving.contains(&true)));
        let maps = open_maps(&schema)?;
        let resolver = Resolver { device, schema, scratch: Arc::default(), moving, maps };
        Ok(Self { resolver, stores, logs, changes: None, fetchers })
    }

    /// The tables and features.
    #[must_use]
    pub fn schema(&self) -> &Arc<Schema> {
        self.resolver.schema()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &D {
        &self.resolver.device
    }

    /// What turns raw ids into lookups, to be cloned for a reader's thread.
    #[must_use]
    pub fn resolver(&self) -> &Resolver<D> {
        &self.resolver
    }

    /// [`Resolver::resolve`].
    ///
    /// Errors: as there.
    pub fn resolve(
        &self,
        stream: &D::Stream,
        features: Vec<Jagged>,
        policy: BadIdPolicy,
    ) -> Result<Lookup<D>> {
        self.resolver.resolve(stream, features, policy)
    }

    /// Moves every row that occurs in a lookup by the sum of its gradients over all occurrences,
    /// in every feature that shares its table. `grad` is the gradient of the pooled vectors, laid
    /// out as [`EmbeddingCollection::forward`] wrote them.
    ///
    /// A row whose gradient, new weights or new state is not finite stays as it is and is
    /// counted: whether that is an error is the caller's choice.
    ///
    /// Errors: as [`EmbeddingCollection::forward`]; [`EmbeddingError::StepZero`] and
    /// [`EmbeddingError::StepValue`]. Nothing is written then.
    pub fn update(
        &mut self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
        step: &SparseStep,
    ) -> Result<UpdateStats> {
        self.update_with(stream, lookup, grad, stride, step, &[])
    }

    /// [`LookupOps::row_gradients`].
    pub(crate) fn row_gradients(
        &self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
        marked: Marked<'_>,
        out: &mut [f32],
    ) -> Result<()> {
        self.check("row gradients", lookup, grad.len(), stride)?;
        self.device().row_gradients(stream, &lookup.staged, grad, stride, marked, out)
    }

    /// Writes the weights of single rows of a table of float32 that stays in device memory.
    pub(crate) fn scatter_weights(
        &mut self,
        stream: &D::Stream,
        table: usize,
        rows: &[u64],
        values: &[f32], // (rows, dim)
    ) -> Result<()> {
        let Resolver { device, schema, .. } = &self.resolver;
        let row_bytes = schema.tables()[table].dim * size_of::<f32>();
        let (weights, _) = self.stores[table].planes_mut();
        let bytes = bytemuck::cast_slice(values);
        let scattered = device.scatter_rows(stream, bytes, rows, row_bytes, weights);
        scattered.map_err(of_table(&schema.tables()[table]))
    }

    /// Squared norm of the gradients that [`EmbeddingCollection::update`] would use, before
    /// clipping: the sum over tables in order, rows ascending, in float64. Not finite when a
    /// gradient is not.
    ///
    /// Errors: as [`EmbeddingCollection::forward`].
    pub fn grad_sq_norm(
        &self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<f64> {
        self.check("gradient norm", lookup, grad.len(), stride)?;
        self.device().grad_sq_norm(stream, &lookup.staged, grad, stride)
    }

    pub(crate) fn check(
        &self,
        operation: &'static str,
        lookup: &Lookup<D>,
        len: usize,
        stride: usize,
    ) -> Result<()> {
        if !Arc::ptr_eq(&lookup.schema, self.schema()) {
            return Err(EmbeddingError::ForeignLookup { operation });
        }
        let width = self.schema().width();
        if stride < width {
            return Err(EmbeddingError::Stride { operation, stride, width });
        }
        let bags = lookup.bags();
        let needed = bags.saturating_mul(stride);
        if len < needed {
            return Err(EmbeddingError::BufferTooShort { operation, len, bags, stride, needed });
        }
        Ok(())
    }

    pub(crate) fn table(&self, table: usize) -> Result<(&TableSpec, &dyn RowStore<D>)> {
        let tables = self.stores.len();
        let store = self.stores.get(table).ok_or(EmbeddingError::NoTable { table, tables })?;
        Ok((&self.schema().tables()[table], &**store))
    }

    /// Bytes of a table's weights and state in device memory.
    ///
    /// Errors: [`EmbeddingError::NoTable`].
    pub fn resident_bytes(&self, table: usize) -> Result<u64> {
        Ok(self.table(table)?.1.bytes())
    }

    /// Copies the weights of `rows`, bits as stored, into `bytes`: (rows, dim) little-endian
    /// elements of the table's precision.
    ///
    /// Errors: [`EmbeddingError::NoTable`], [`EmbeddingError::Store`] naming the range.
    pub fn read_weight_bits(
        &self,
        stream: &D::Stream,
        table: usize,
        rows: Range<u64>,
        bytes: &mut [u8],
    ) -> Result<()> {
        self.read_plane(stream, table, Plane::Weights, rows, bytes)
    }

    /// Writes what [`EmbeddingCollection::read_weight_bits`] reads.
    ///
    /// Errors: as there.
    pub fn write_weight_bits(
        &mut self,
        stream: &D::Stream,
        table: usize,
        rows: Range<u64>,
        bytes: &[u8],
    ) -> Result<()> {
        self.write_plane(stream, table, Plane::Weights, rows, bytes)
    }

    /// Bytes of weights and of state a row of a table.
    pub(crate) fn row_bytes(&self, table: usize) -> (usize, usize) {
        let layout = self.stores[table].layout();
        (layout.weight_bytes, layout.state_bytes)
    }

    /// Copies a plane of `rows`, bits as stored, into `bytes`.
    pub(crate) fn read_plane(
        &self,
        stream: &D::Stream,
        table: usize,
        plane: Plane,
        rows: Range<u64>,
        bytes: &mut [u8],
    ) -> Result<()> {
        let (spec, store) = self.table(table)?;
        store.read(self.device(), stream, plane, rows, bytes).map_err(of_table(spec))
    }

    /// Writes what [`EmbeddingCollection::read_plane`] reads.
    pub(crate) fn write_plane(
        &mut self,
        stream: &D::Stream,
        table: usize,
        plane: Plane,
        rows: Range<u64>,
        bytes: &[u8],
    ) -> Result<()> {
        self.table(table)?;
        let Resolver { device, schema, .. } = &self.resolver;
        let spec = &schema.tables()[table];
        let written = self.stores[table].write(device, stream, plane, rows.clone(), bytes);
        written.map_err(of_table(spec))?;
        self.note_range(table, rows);
        Ok(())
    }

    /// Copies the weights of `rows` into `values`, (rows, dim), as float32.
    ///
    /// Errors: [`EmbeddingError::NoTable`], [`EmbeddingError::ValueCount`],
    /// [`EmbeddingError::Store`].
    pub fn read_weights(
        &self,
        stream: &D::Stream,
        table: usize,
        rows: Range<u64>,
        values: &mut [f32],
    ) -> Result<()> {
        let (spec, _) = self.table(table)?;
        check_count("read weights", spec, &rows, spec.dim, values.len())?;
        match spec.precision {
            Precision::Fp32 => {
                let bytes = bytemuck::cast_slice_mut(values);
                self.read_weight_bits(stream, table, rows, bytes)
            }
            precision => {
                let mut bits = vec![0u16; values.len()];
                let bytes = bytemuck::cast_slice_mut(&mut bits);
                self.read_weight_bits(stream, table, rows, bytes)?;
                for (value, bits) in values.iter_mut().zip(bits) {
                    *value = match precision {
                        Precision::Fp16 => half::f16::from_bits(bits).to_f32(),
                        _ => half::bf16::from_bits(bits).to_f32(),
                    };
                }
                Ok(())
            }
        }
    }

    /// Writes float32 weights, (rows, dim), over `rows`; 16-bit tables round to nearest even.
    ///
    /// Errors: as [`EmbeddingCollection::read_weights`].
    pub fn write_weights(
        &mut self,
        stream: &D::Stream,
        table: usize,
        rows: Range<u64>,
        values: &[f32],
    ) -> Result<()> {
        let (spec, _) = self.table(table)?;
        check_count("write weights", spec, &rows, spec.dim, values.len())?;
        let bits: Vec<u16> = match spec.precision {
            Precision::Fp32 => {
                let bytes = bytemuck::cast_slice(values);
                return self.write_weight_bits(stream, table, rows, bytes);
            }
            Precision::Fp16 => values.iter().map(|&x| half::f16::from_f32(x).to_bits()).collect(),
            Precision::Bf16 => values.iter().map(|&x| half::bf16::from_f32(x).to_bits()).collect(),
        };
        self.write_weight_bits(stream, table, rows, bytemuck::cast_slice(&bits))
    }

    /// Copies a state tensor of `rows` into `values`: (rows, dim) or (rows), as
    /// [`SparseOptimizer::state`] says.
    ///
    /// Errors: [`EmbeddingError::NoTable`], [`EmbeddingError::NoState`],
    /// [`EmbeddingError::ValueCount`], [`EmbeddingError::Store`].
    pub fn read_state(
        &self,
        stream: &D::Stream,
        table: usize,
        name: &str,
        rows: Range<u64>,
        values: &mut [f32],
    ) -> Result<()> {
        let (spec, store) = self.table(table)?;
        let (columns, all) = state_columns(spec, name)?;
        check_count("read state", spec, &rows, columns.len(), values.len())?;
        let chunk_rows = (CHUNK_VALUES / all).max(1);
        let mut plane = Vec::new(); // (chunk_rows, all)
        let mut start = rows.start;
        for values in values.chunks_mut(chunk_rows * columns.len()) {
            let count = values.len() / columns.len();
            plane.resize(count * all, 0.0f32);
            let end = start + count as u64;
            let bytes = bytemuck::cast_slice_mut(&mut plane);
            store
                .read(self.device(), stream, Plane::State, start..end, bytes)
                .map_err(of_table(spec))?;
            for (to, from) in values.chunks_exact_mut(columns.len()).zip(plane.chunks_exact(all)) {
                to.copy_from_slice(&from[columns.clone()]);
            }
            start = end;
        }
        Ok(())
    }

    /// Writes a state tensor of `rows`, as [`EmbeddingCollection::read_state`] reads it.
    ///
    /// Errors: as there.
    pub fn write_state(
        &mut self,
        stream: &D::Stream,
        table: usize,
        name: &str,
        rows: Range<u64>,
        values: &[f32],
    ) -> Result<()> {
        self.table(table)?;
        let Resolver { device, schema, .. } = &self.resolver;
        let (spec, store) = (&schema.tables()[table], &mut self.stores[table]);
        let (columns, all) = state_columns(spec, name)?;
        check_count("write state", spec, &rows, columns.len(), values.len())?;
        let chunk_rows = (CHUNK_VALUES / all).max(1);
        let mut plane = Vec::new(); // (chunk_rows, all)
        let mut start = rows.start;
        for values in values.chunks(chunk_rows * columns.len()) {
            let count = values.len() / columns.len();
            plane.resize(count * all, 0.0f32);
            let end = start + count as u64;
            let bytes = bytemuck::cast_slice_mut(&mut plane);
            store.read(device, stream, Plane::State, start..end, bytes).map_err(of_table(spec))?;
            for (from, to) in values.chunks_exact(columns.len()).zip(plane.chunks_exact_mut(all)) {
                to[columns.clone()].copy_from_slice(from);
            }
            let bytes = bytemuck::cast_slice(&plane);
            store.write(device, stream, Plane::State, start..end, bytes).map_err(of_table(spec))?;
            start = end;
        }
        self.note_range(table, rows);
        Ok(())
    }

    /// What a table's store did so far.
    ///
    /// Errors: [`EmbeddingError::NoTable`].
    pub fn store_stats(&self, table: usize) -> Result<StoreStats> {
        Ok(self.table(table)?.1.stats())
    }

    /// How a table's rows move.
    ///
    /// Errors: [`EmbeddingError::NoTable`].
    pub fn optimizer(&self, table: usize) -> Result<&SparseOptimizer> {
        Ok(&self.table(table)?.0.optimizer)
    }
}

/// Names the table in what its store said.
pub(crate) fn of_table(spec: &TableSpec) -> impl Fn(CacheError) -> EmbeddingError + '_ {
    |source| EmbeddingError::Store { table: spec.name.clone(), source }
}

/// Columns of a state tensor in a row's state plane, and the columns of the whole plane.
pub(crate) fn state_columns(spec: &TableSpec, name: &str) -> Result<(Range<usize>, usize)> {
    let tensors = spec.optimizer.state();
    let mut start = 0;
    for tensor in tensors {
        let end = start + tensor.columns(spec.dim);
        if tensor.name == name {
            return Ok((start..end, spec.optimizer.state_columns(spec.dim)));
        }
        start = end;
    }
    let name_of = |tensor: &StateTensor| tensor.name;
    let known = tensors.iter().map(name_of).collect::<Vec<_>>().join(", ");
    Err(EmbeddingError::NoState {
        table: spec.name.clone(),
        state: name.to_owned(),
        optimizer: spec.optimizer.name(),
        known: if known.is_empty() { "none".to_owned() } else { known },
    })
}

/// Checks that there are `columns` values for each of `rows`, all of them in the table.
fn check_count(
    operation: &'static str,
    spec: &TableSpec,
    rows: &Range<u64>,
    columns: usize,
    given: usize,
) -> Result<()> {
    let (start, end) = (rows.start, rows.end);
    let needed = u128::from(end.saturating_sub(start)) * columns as u128;
    if given as u128 == needed && start <= end && end <= spec.rows {
        return Ok(());
    }
    let table = spec.name.clone();
    if start > end || end > spec.rows {
        let (plane, verb) = match operation {
            "read weights" => (Plane::Weights, "read"),
            "write weights" => (Plane::Weights, "write"),
            "read state" => (Plane::State, "read"),
            _ => (Plane::State, "write"),
        };
        let rows = spec.rows;
        let source = CacheError::RowsOutOfRange { operation: verb, plane, start, end, rows };
        return Err(EmbeddingError::Store { table, source });
    }
    Err(EmbeddingError::ValueCount { operation, table, start, end, given, needed })
}
