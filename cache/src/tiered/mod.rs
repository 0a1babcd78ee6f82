//! The store whose rows lie in three tiers: a bounded part of device memory, a bounded part of
//! host memory, and an SSD.
//!
//! ```text
//! device tier   slots that kernels address          bounded; filled and emptied in batches
//!    |    ^
//!    v    |     evictions / installs
//! host tier     slots in host memory                bounded, or not where nothing is below it
//!    |    ^
//!    v    |     write-backs / fetches
//! cold tier     `ColdRows`, such as a log on SSD    a row's older copy stays while it is above
//!         ^
//!         |
//! first values  of rows that were never written
//! ```
//!
//! A row is in at most one of the device and the host tier, which then has its newest bytes. It is
//! *dirty* if these differ from what the cold tier, or the row's first value, would give: only
//! dirty rows are written down. A clean row that the cold tier holds goes from the device to the
//! host tier too, so that reading it again is no SSD access; a clean first value is dropped.
//!
//! Both planes of a row move together. What is wanted stays; see the `shared` module for why a
//! copy is never out of date.

mod down;
mod host;
mod install;
mod logical;
mod policy;
mod share;
mod shared;
mod tier;
mod wanted;

use std::ops::Range;
use std::sync::Arc;

use tessera_device::{Device, DeviceBuffer};

pub use policy::Policy;
pub(crate) use shared::Shared;
pub(crate) use wanted::Wanted;

use logical::Given;

use crate::index::Index;
use crate::store::{FetcherKind, Held};
use crate::{
    CacheError, ColdRows, Fetched, Fetcher, Lease, Plane, Planes, PlanesMut, Result, RowLayout,
    RowOps, RowStore, StoreStats,
};

/// Writes the first values of rows, (rows) in any order, into planes that are zero. A function of
/// the row alone: it may be asked for the same row again.
pub type FirstRows = dyn Fn(&[u64], PlanesMut<'_>) + Send + Sync;

/// Sizes of a store's tiers, and what they keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TieredOptions {
    /// Bytes of the device tier with its index, [`slot_bytes`] a slot. No more slots are made
    /// than there are rows.
    pub device_bytes: u64,
    /// Bytes of the host tier with its index, likewise. 0: rows go from the device tier to the
    /// cold tier at once. Without a cold tier this is not used: the host tier takes all rows.
    pub host_bytes: u64,
    /// Which rows leave a tier that has no room.
    pub policy: Policy,
}

/// Bytes that a slot takes of a tier's budget: its row, and 32 bytes of index and marks (36 under
/// the policy next-use).
#[must_use]
pub fn slot_bytes(layout: RowLayout, policy: Policy) -> u64 {
    // Saturating: a width beyond the address space is refused when the planes are allocated.
    (layout.weight_bytes as u64)
        .saturating_add(layout.state_bytes as u64)
        .saturating_add(tier::overhead_bytes(policy))
}

/// Rows in three tiers; see the module.
///
/// Memory beyond the budgets: copies of fetched rows that were not in the device tier, and as many
/// rows again during an install (the evicted ones); two batches of them are kept for reuse.
pub struct Tiered<D: Device> {
    shared: Arc<Shared>,
    weights: D::Buffer<u8>, // (slots, weight_bytes)
    state: D::Buffer<u8>,   // (slots, state_bytes)
    leaving: host::Block,
    device_bytes: u64,
    host_bytes: u64,
}

impl<D: Device> Tiered<D> {
    /// A store of `rows` rows, which are what `cold` holds already, and `first` values elsewhere.
    ///
    /// Errors: [`CacheError::TierTooSmall`] when the device tier has no room for one row,
    /// [`CacheError::LayoutDiffers`] when the cold tier's rows have other widths,
    /// [`CacheError::IndexTooLarge`] for 2^32 slots and more, [`CacheError::TooLarge`], or what
    /// the device says.
    pub fn new(
        device: &D,
        rows: u64,
        layout: RowLayout,
        options: &TieredOptions,
        cold: Option<Arc<dyn ColdRows>>,
        first: Arc<FirstRows>,
    ) -> Result<Self> {
        let slot_bytes = slot_bytes(layout, options.policy);
        let device_slots = (options.device_bytes / slot_bytes).min(rows);
        if device_slots == 0 && rows > 0 {
            let given = options.device_bytes;
            return Err(CacheError::TierTooSmall { given, needed: slot_bytes });
        }
        let host_slots = match &cold {
            Some(cold) if cold.layout() != layout => {
                return Err(CacheError::LayoutDiffers { cold: cold.layout(), store: layout });
            }
            Some(_) => (options.host_bytes / slot_bytes).min(rows),
            None => rows,
        };
        let alloc = |plane: Plane| {
            let row_bytes = layout.row_bytes(plane);
            let bytes = usize::try_from(device_slots)
                .ok()
                .and_then(|slots| slots.checked_mul(row_bytes))
                .filter(|&bytes| isize::try_from(bytes).is_ok())
                .ok_or(CacheError::TooLarge { plane, rows: device_slots, row_bytes })?;
            device.alloc::<u8>(bytes).map_err(CacheError::from)
        };
        let (weights, state) = (alloc(Plane::Weights)?, alloc(Plane::State)?);
        let slots = (device_slots, host_slots);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = device.info().parallelism.min(cores);
        let shared = Shared::new(rows, layout, options, slots, cold, first, threads)?;
        Ok(Self {
            shared: Arc::new(shared),
            weights,
            state,
            leaving: host::Block::default(),
            device_bytes: device_slots * slot_bytes,
            host_bytes: host_slots.saturating_mul(slot_bytes),
        })
    }

    /// The wanted rows of a fetch or lease of this store.
    fn own<'a>(&self, operation: &'static str, held: &'a Held) -> Result<&'a Wanted> {
        match held {
            Held::Wanted(wanted) if wanted.is_of(&self.shared) => Ok(wanted),
            _ => Err(CacheError::Foreign { operation }),
        }
    }
}

impl<D: RowOps> RowStore<D> for Tiered<D> {
    fn rows(&self) -> u64 {
        self.shared.rows()
    }

    fn layout(&self) -> RowLayout {
        self.shared.layout
    }

    fn capacity(&self) -> u64 {
        self.shared.lock().device.capacity()
    }

    fn slots_free(&self) -> u64 {
        let state = self.shared.lock();
        // More may be wanted for a moment, by a fetch that is about to fail.
        state.device.capacity().saturating_sub(state.held)
    }

    fn bytes(&self) -> u64 {
        self.device_bytes
    }

    fn host_bytes(&self) -> u64 {
        self.host_bytes
    }

    fn fetcher(&self) -> Fetcher {
        Fetcher(FetcherKind::Tiered(Arc::clone(&self.shared)))
    }

    fn install(&mut self, device: &D, stream: &D::Stream, fetched: Fetched) -> Result<Lease> {
        self.own("install", &fetched.0)?;
        let Held::Wanted(mut wanted) = fetched.0 else {
            return Err(CacheError::Foreign { operation: "install" });
        };
        self.bring_in(device, stream, &mut wanted)?;
        Ok(Lease(Held::Wanted(wanted)))
    }

    fn commit(&mut self, lease: &Lease) -> Result<()> {
        let wanted = self.own("commit", &lease.0)?;
        let mut state = self.shared.state()?;
        state.device.flag_all(wanted.slots(), tier::DIRTY, 0);
        Ok(())
    }

    fn weights(&self) -> &D::Buffer<u8> {
        &self.weights
    }

    fn planes_mut(&mut self) -> (&mut D::Buffer<u8>, &mut D::Buffer<u8>) {
        (&mut self.weights, &mut self.state)
    }

    fn read(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Range<u64>,
        bytes: &mut [u8],
    ) -> Result<()> {
        self.read_range(device, stream, plane, rows, bytes)
    }

    fn write(
        &mut self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Range<u64>,
        bytes: &[u8],
    ) -> Result<()> {
        let given = match plane {
            Plane::Weights => Given { weights: Some(bytes), state: None },
            Plane::State => Given { weights: None, state: Some(bytes) },
        };
        self.write_range(device, stream, rows, given)
    }

    fn write_rows(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: Range<u64>,
        planes: Planes<'_>,
    ) -> Result<()> {
        let given = Given { weights: Some(planes.weights), state: Some(planes.state) };
        self.write_range(device, stream, rows, given)
    }

    fn read_listed(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: &[u64],
        bytes: &mut [u8],
    ) -> Result<()> {
        self.read_list(device, stream, plane, rows, bytes)
    }

    fn write_listed(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: &[u64],
        weights: Option<&[u8]>,
        state: Option<&[u8]>,
    ) -> Result<()> {
        self.write_list(device, stream, rows, Given { weights, state })
    }

    fn flush(&mut self, device: &D, stream: &D::Stream) -> Result<()> {
        self.flush_all(device, stream)
    }

    fn hint_next_use(&self, rows: &[u64], ahead: u32) {
        let mut state = self.shared.lock();
        if state.policy != Policy::NextUse {
            return;
        }
        let clock = state.clock;
        let at = clock.saturating_add(ahead);
        let mut slots = vec![0; rows.len()];
        state.device.find(rows, &mut slots);
        for (&row, slot) in rows.iter().zip(slots) {
            if slot != Index::NONE {
                state.device.hint(u64::from(slot), clock, at);
            } else if let Some(slot) = state.host.get(row) {
                state.host.hint(slot, clock, at);
            }
        }
    }

    fn stats(&self) -> StoreStats {
        let cold = self.shared.cold.as_ref().map(|cold| cold.stats());
        let state = self.shared.lock();
        StoreStats {
            cold,
            device: state.device.stats(),
            host: state.host.stats(),
            rows_held: state.held,
            ..state.stats
        }
    }
}

impl<D: Device> std::fmt::Debug for Tiered<D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (weights, state) = (self.weights.len(), self.state.len());
        write!(f, "Tiered({} rows, {weights} + {state} bytes on device)", self.shared.rows())
    }
}
