//! A batch's lookup on a GPU: its ids, offsets and weights, and pooling them.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_device::cuda::{CudaBuffer, CudaEvent, CudaStream, Launch};
use tessera_device::{Cuda, Device};

use super::groups::Groups;
use super::views::{FeatureView, Lanes, NONE, Words, precision_of};
use super::{LOOKUP, THREADS};
use crate::{EmbeddingError, HostLookup, Pooling, Reach, Result, Schema, Stores};

/// Blocks of a lookup, a multiprocessor: those that run at once, and as many again so that they end
/// together.
const BLOCKS_A_MULTIPROCESSOR: u32 = 8;

/// A batch's lookup on a GPU.
///
/// What is on the device may be used by any stream: each waits until it is there.
#[derive(Debug)]
pub struct CudaLookup {
    pub(super) schema: Arc<Schema>,
    /// The lookup as it was given; rows of tables that are not numbered are on the device alone.
    pub(super) host: HostLookup,
    /// Rows, or numbers, of all bags: table after table, and of a table feature after feature.
    pub(super) ids: CudaBuffer<u64>,
    /// A weight an id; empty where no feature has weights.
    pub(super) weights: CudaBuffer<f32>,
    offsets: CudaBuffer<u64>, // (features, bags + 1), each from 0
    /// Where each feature's ids begin in `ids`.
    pub(super) first_ids: Vec<u64>,
    /// Whether each feature has weights.
    pub(super) weighted: Vec<bool>,
    /// Ids of all features.
    pub(super) count: usize,
    ready: CudaEvent,
    groups: Mutex<Option<Arc<Groups>>>,
}

impl CudaLookup {
    pub(super) fn stage(
        device: &Cuda,
        stream: &CudaStream,
        schema: &Arc<Schema>,
        mut host: HostLookup,
    ) -> Result<Self> {
        let features = schema.features().len();
        let count: u64 = host.rows_read.iter().sum();
        // Places among all ids, and what is counted of them, are 32 bits.
        let max = u64::from(u32::MAX);
        if count > max {
            let table = "(all of them together)".to_owned();
            return Err(EmbeddingError::BatchTooLarge { what: "ids", count, table, max });
        }
        let weighted: Vec<bool> = host.features.iter().map(|f| f.weights.is_some()).collect();
        let mut ids = device.alloc::<u64>(count as usize)?;
        let any = weighted.contains(&true);
        let mut weights = device.alloc::<f32>(if any { count as usize } else { 0 })?;
        let mut offsets = device.alloc::<u64>(features * (host.bags + 1))?;
        let mut first_ids = vec![0; features];
        let mut next = 0;
        for &feature in (0..schema.tables().len()).flat_map(|table| schema.features_of(table)) {
            let rows = &host.features[feature];
            first_ids[feature] = next as u64;
            device.upload(stream, bytemuck::cast_slice(&rows.rows), &mut ids, next)?;
            if let Some(of_rows) = &rows.weights {
                device.upload(stream, of_rows, &mut weights, next)?;
            }
            device.upload(stream, &rows.offsets, &mut offsets, feature * (host.bags + 1))?;
            next += rows.rows.len();
        }
        for (spec, rows) in schema.features().iter().zip(&mut host.features) {
            rows.weights = None;
            if host.numbered[spec.table].is_none() {
                rows.rows = Vec::new();
            }
        }
        let (schema, ready) = (Arc::clone(schema), device.record(stream)?);
        let (count, groups) = (count as usize, Mutex::default());
        Ok(Self { schema, host, ids, weights, offsets, first_ids, weighted, count, ready, groups })
    }

    /// Makes `stream` wait until the lookup is on the device.
    pub(super) fn await_on(&self, device: &Cuda, stream: &CudaStream) -> Result<()> {
        Ok(device.wait(stream, &self.ready)?)
    }

    /// The address of a feature's offsets.
    pub(super) fn offsets_of(&self, stream: &CudaStream, feature: usize) -> Result<u64> {
        let at = feature * (self.host.bags + 1) * size_of::<u64>();
        Ok(self.offsets.address(stream)? + at as u64)
    }

    /// The grouping, queued now unless it was before; `stream` waits until it is there.
    pub(super) fn groups(&self, device: &Cuda, stream: &CudaStream) -> Result<Arc<Groups>> {
        // A panic elsewhere leaves either none or a whole one.
        let mut held: MutexGuard<'_, _> =
            self.groups.lock().unwrap_or_else(PoisonError::into_inner);
        let groups = match &*held {
            Some(groups) => groups.clone(),
            None => {
                let groups = Arc::new(Groups::new(device, stream, self)?);
                *held = Some(groups.clone());
                groups
            }
        };
        drop(held);
        groups.await_on(device, stream)?;
        Ok(groups)
    }

    /// Pools `bags` into `out`, (bags, stride).
    #[allow(clippy::too_many_arguments)]
    pub(super) fn pool(
        &self,
        device: &Cuda,
        stream: &CudaStream,
        stores: &Stores<Cuda>,
        reach: &[Reach<'_>],
        bags: Range<usize>,
        out: &mut CudaBuffer<f32>,
        stride: usize,
    ) -> Result<()> {
        let count = self.schema.features().len() as u32;
        if bags.is_empty() || count == 0 {
            return Ok(());
        }
        self.await_on(device, stream)?;
        let mut words = Words::default();
        let slots: Vec<u64> =
            reach.iter().map(|reach| reach.slots.map_or(NONE, |slots| words.push(slots))).collect();
        let mut views = Vec::with_capacity(count as usize);
        for (index, feature) in self.schema.features().iter().enumerate() {
            let table = &self.schema.tables()[feature.table];
            let lanes = Lanes::of(table.dim, &[feature.column], stride);
            views.push(FeatureView {
                weights: stores[feature.table].weights().address(stream)?,
                slots: slots[feature.table],
                offsets: self.offsets_of(stream, index)?,
                first_id: self.first_ids[index],
                dim: table.dim as u64,
                column: feature.column as u64,
                precision: precision_of(table.precision),
                lanes: lanes.count,
                vector: lanes.vector.into(),
                mean: (table.pooling == Pooling::Mean).into(),
                weighted: self.weighted[index].into(),
                unused: 0,
            });
        }
        let lanes = views.iter().map(|view| u64::from(view.lanes)).max().unwrap_or(32);
        let at = words.push(&views);
        let words = words.upload(device, stream)?;
        let most = (device.multiprocessors() * BLOCKS_A_MULTIPROCESSOR).div_ceil(count);
        let blocks = (bags.len() as u64 * lanes).div_ceil(THREADS.into()).min(most.into()) as u32;
        let kernel = device.kernel(&LOOKUP, "pooled_lookup")?;
        let call = kernel.on(stream).read_from(&words, at as usize).read(&words).value(blocks);
        let call = call.value(bags.start as u64).value(bags.end as u64);
        let call = call.read(&self.ids).read(&self.weights).write(out).value(stride as u64);
        // SAFETY: the kernel's arguments. Rows exist, says the lookup, and have slots, says the
        // reach; a schema's features do not overlap and end before `stride`; the caller checked
        // the length of `out`.
        unsafe { call.launch(Launch::blocks(blocks.saturating_mul(count), THREADS))? };
        Ok(())
    }
}
