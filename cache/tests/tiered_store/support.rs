//! A cold tier in memory that fails when told to, first values, and a store beside a model of it.

use std::collections::{BTreeSet, HashMap};
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tessera_cache::{
    CacheError, ColdRows, ColdStats, FirstRows, Lease, Plane, Planes, PlanesMut, Policy, Result,
    RowLayout, RowOps, RowStore, Tiered, TieredOptions, slot_bytes,
};
use tessera_device::{Cpu, CpuStream, Device, DeviceBuffer, DeviceError};

/// Makes tests of bodies that are generic over the device, for each that there is.
macro_rules! on_every_device {
    ($($name:ident),* $(,)?) => {
        mod on_cpu {
            $(#[test] fn $name() {
                super::$name(&crate::support::cpu(1).0);
            })*
        }
        mod on_cuda {
            $(#[test] fn $name() {
                if let Some(cuda) = tessera_device::cuda::testing::cuda() {
                    super::$name(&cuda);
                }
            })*
        }
    };
}
pub(crate) use on_every_device;

pub const LAYOUT: RowLayout = RowLayout { weight_bytes: 12, state_bytes: 4 };

type Row = (Vec<u8>, Vec<u8>);

/// Rows in a map; fails when told to.
#[derive(Debug)]
pub struct MemoryCold {
    layout: RowLayout,
    pub rows: Mutex<HashMap<u64, Row>>,
    pub fail_gets: AtomicBool,
    pub fail_puts: AtomicBool,
    pub fail_flushes: AtomicBool,
    pub puts: AtomicU64, // rows
    pub gets: AtomicU64, // rows
}

impl MemoryCold {
    pub fn new(layout: RowLayout) -> Arc<Self> {
        Arc::new(Self {
            layout,
            rows: Mutex::default(),
            fail_gets: AtomicBool::new(false),
            fail_puts: AtomicBool::new(false),
            fail_flushes: AtomicBool::new(false),
            puts: AtomicU64::new(0),
            gets: AtomicU64::new(0),
        })
    }
}

fn fails(switch: &AtomicBool, reason: &str) -> Result<()> {
    if switch.load(Ordering::Relaxed) {
        let reason = reason.to_owned();
        return Err(DeviceError::OutOfMemory { device: "disk", bytes: 7, reason }.into());
    }
    Ok(())
}

impl ColdRows for MemoryCold {
    fn layout(&self) -> RowLayout {
        self.layout
    }

    fn get(&self, rows: &[u64], to: PlanesMut<'_>, found: &mut [bool]) -> Result<()> {
        fails(&self.fail_gets, "injected get")?;
        let RowLayout { weight_bytes: w, state_bytes: s } = self.layout;
        assert_eq!((to.weights.len(), to.state.len()), (rows.len() * w, rows.len() * s));
        let map = self.rows.lock().unwrap();
        for (i, row) in rows.iter().enumerate() {
            found[i] = map.contains_key(row);
            if let Some((weights, state)) = map.get(row) {
                to.weights[i * w..][..w].copy_from_slice(weights);
                to.state[i * s..][..s].copy_from_slice(state);
                self.gets.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }

    fn put(&self, rows: &[u64], from: Planes<'_>) -> Result<()> {
        fails(&self.fail_puts, "injected put")?;
        let RowLayout { weight_bytes: w, state_bytes: s } = self.layout;
        assert_eq!((from.weights.len(), from.state.len()), (rows.len() * w, rows.len() * s));
        let different: BTreeSet<&u64> = rows.iter().collect();
        assert_eq!(different.len(), rows.len(), "a put has each row once");
        let mut map = self.rows.lock().unwrap();
        for (i, &row) in rows.iter().enumerate() {
            let planes = (from.weights[i * w..][..w].to_vec(), from.state[i * s..][..s].to_vec());
            map.insert(row, planes);
        }
        self.puts.fetch_add(rows.len() as u64, Ordering::Relaxed);
        Ok(())
    }

    fn remove(&self, rows: &[u64]) -> Result<()> {
        let mut map = self.rows.lock().unwrap();
        rows.iter().for_each(|row| drop(map.remove(row)));
        Ok(())
    }

    fn contains(&self, rows: &[u64], found: &mut [bool]) {
        let map = self.rows.lock().unwrap();
        found.iter_mut().zip(rows).for_each(|(found, row)| *found = map.contains_key(row));
    }

    fn flush(&self) -> Result<()> {
        fails(&self.fail_flushes, "injected flush")
    }

    fn len(&self) -> u64 {
        self.rows.lock().unwrap().len() as u64
    }

    fn stats(&self) -> ColdStats {
        ColdStats { rows: self.len(), reader: "memory", ..ColdStats::default() }
    }
}

/// The bytes of a row's plane after its `version`-th write; version 0 is its first value.
pub fn bytes_of(layout: RowLayout, plane: Plane, row: u64, version: u64) -> Vec<u8> {
    if plane == Plane::State && version == 0 {
        return vec![0; layout.state_bytes];
    }
    let salt = if plane == Plane::State { 77 } else { 0 };
    let byte = |i: u64| {
        let x = (row * 31 + version * 1009 + i * 7 + salt).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        (x >> 56) as u8
    };
    (0..layout.row_bytes(plane) as u64).map(byte).collect()
}

pub fn first_rows(layout: RowLayout) -> Arc<FirstRows> {
    Arc::new(move |rows: &[u64], planes: PlanesMut<'_>| {
        assert!(planes.state.iter().all(|&byte| byte == 0));
        for (row, to) in rows.iter().zip(planes.weights.chunks_exact_mut(layout.weight_bytes)) {
            to.copy_from_slice(&bytes_of(layout, Plane::Weights, *row, 0));
        }
    })
}

pub fn cpu(threads: usize) -> (Cpu, CpuStream) {
    let cpu = Cpu::new(NonZeroUsize::new(threads)).unwrap();
    let stream = cpu.stream().unwrap();
    (cpu, stream)
}

/// How much of something a test does on a device: less where threads are emulated.
pub fn effort<D: Device, N>(device: &D, cpu: N, cuda: N) -> N {
    if device.info().kind == "cpu" { cpu } else { cuda }
}

/// The bytes of a plane.
pub fn download<D: Device>(device: &D, stream: &D::Stream, plane: &D::Buffer<u8>) -> Vec<u8> {
    let mut bytes = vec![0; plane.len()];
    device.download(stream, plane, 0, &mut bytes).unwrap();
    bytes
}

/// Sizes in slots.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub rows: u64,
    pub device: u64,
    pub host: u64,
    pub cold: bool,
    pub policy: Policy,
}

/// A store, and what it must hold.
pub struct World<D: RowOps> {
    pub device: D,
    pub stream: D::Stream,
    pub store: Box<dyn RowStore<D>>,
    pub cold: Option<Arc<MemoryCold>>,
    /// Versions of each row's weights and state; absent ones are 0.
    pub versions: HashMap<u64, [u64; 2]>,
    pub sizes: Sizes,
    next_version: u64,
}

impl<D: RowOps> World<D> {
    pub fn new(device: &D, sizes: Sizes) -> Self {
        let (device, stream) = (device.clone(), device.stream().unwrap());
        let cold = sizes.cold.then(|| MemoryCold::new(LAYOUT));
        let store = tiered(&device, sizes, cold.clone());
        let versions = HashMap::new();
        Self { device, stream, store, cold, versions, sizes, next_version: 1 }
    }

    fn version(&self, plane: Plane, row: u64) -> u64 {
        self.versions.get(&row).map_or(0, |versions| versions[plane as usize])
    }

    /// The bytes that a row must have.
    pub fn wanted(&self, plane: Plane, row: u64) -> Vec<u8> {
        bytes_of(LAYOUT, plane, row, self.version(plane, row))
    }

    pub fn prefetch(&mut self, rows: &[u64]) -> Result<Lease> {
        self.store.prefetch(&self.device, &self.stream, rows)
    }

    /// Holds a lease's slots against the model.
    pub fn check(&mut self, lease: &Lease, rows: &[u64]) {
        let slots = lease.slots(rows).to_vec();
        let (weights, state) = self.store.planes_mut();
        let [weights, state] =
            [weights, state].map(|plane| download(&self.device, &self.stream, plane));
        let mut seen = BTreeSet::new();
        for (&row, &slot) in rows.iter().zip(&slots) {
            assert!(slot < self.store.capacity() && seen.insert(slot));
            let slot = slot as usize;
            assert_eq!(&weights[slot * 12..][..12], self.wanted(Plane::Weights, row), "row {row}");
            assert_eq!(&state[slot * 4..][..4], self.wanted(Plane::State, row), "row {row}");
        }
    }

    /// Writes new bytes to a lease's slots, as an update's kernel would.
    pub fn update(&mut self, lease: &Lease, rows: &[u64]) {
        let version = self.next_version;
        self.next_version += 1;
        let (weights, state) = self.store.planes_mut();
        for (&row, &slot) in rows.iter().zip(lease.slots(rows)) {
            let slot = slot as usize;
            let bytes = bytes_of(LAYOUT, Plane::Weights, row, version);
            self.device.upload(&self.stream, &bytes, weights, slot * 12).unwrap();
            let bytes = bytes_of(LAYOUT, Plane::State, row, version);
            self.device.upload(&self.stream, &bytes, state, slot * 4).unwrap();
            self.versions.insert(row, [version; 2]);
        }
        self.store.commit(lease).unwrap();
    }

    /// Writes new bytes to a plane of a range.
    pub fn write(&mut self, plane: Plane, rows: Range<u64>) -> Result<()> {
        let version = self.next_version;
        self.next_version += 1;
        let bytes: Vec<u8> =
            rows.clone().flat_map(|row| bytes_of(LAYOUT, plane, row, version)).collect();
        self.store.write(&self.device, &self.stream, plane, rows.clone(), &bytes)?;
        for row in rows {
            self.versions.entry(row).or_default()[plane as usize] = version;
        }
        Ok(())
    }

    /// Writes new bytes to both planes of a range.
    pub fn write_rows(&mut self, rows: Range<u64>) -> Result<()> {
        let version = self.next_version;
        self.next_version += 1;
        let bytes = |plane| -> Vec<u8> {
            rows.clone().flat_map(|row| bytes_of(LAYOUT, plane, row, version)).collect()
        };
        let (weights, state) = (bytes(Plane::Weights), bytes(Plane::State));
        let planes = Planes { weights: &weights, state: &state };
        self.store.write_rows(&self.device, &self.stream, rows.clone(), planes)?;
        self.versions.extend(rows.map(|row| (row, [version; 2])));
        Ok(())
    }

    /// Writes new bytes to one plane, or both, of some rows.
    pub fn write_listed(&mut self, plane: Option<Plane>, rows: &[u64]) -> Result<()> {
        let version = self.next_version;
        self.next_version += 1;
        let bytes = |of: Plane| {
            let is_given = plane.is_none_or(|plane| plane == of);
            is_given.then(|| -> Vec<u8> {
                rows.iter().flat_map(|&row| bytes_of(LAYOUT, of, row, version)).collect()
            })
        };
        let (weights, state) = (bytes(Plane::Weights), bytes(Plane::State));
        let (device, stream) = (&self.device, &self.stream);
        self.store.write_listed(device, stream, rows, weights.as_deref(), state.as_deref())?;
        for &row in rows {
            let versions = self.versions.entry(row).or_default();
            match plane {
                Some(plane) => versions[plane as usize] = version,
                None => *versions = [version; 2],
            }
        }
        Ok(())
    }

    /// Reads a plane of some rows and holds it against the model.
    pub fn read_listed(&self, plane: Plane, rows: &[u64]) {
        let mut bytes = vec![0xEE; rows.len() * LAYOUT.row_bytes(plane)];
        self.store.read_listed(&self.device, &self.stream, plane, rows, &mut bytes).unwrap();
        let wanted: Vec<u8> = rows.iter().flat_map(|&row| self.wanted(plane, row)).collect();
        assert_eq!(bytes, wanted);
    }

    /// Reads a plane of a range and holds it against the model.
    pub fn read(&self, plane: Plane, rows: Range<u64>) {
        let mut bytes = vec![0xEE; (rows.end - rows.start) as usize * LAYOUT.row_bytes(plane)];
        self.store.read(&self.device, &self.stream, plane, rows.clone(), &mut bytes).unwrap();
        let wanted: Vec<u8> = rows.flat_map(|row| self.wanted(plane, row)).collect();
        assert_eq!(bytes, wanted);
    }

    /// Writes everything down and holds the cold tier against the model.
    pub fn flush(&mut self) {
        self.store.flush(&self.device, &self.stream).unwrap();
        let Some(cold) = self.cold.clone() else { return };
        let map = cold.rows.lock().unwrap();
        for row in 0..self.sizes.rows {
            let wanted = (self.wanted(Plane::Weights, row), self.wanted(Plane::State, row));
            match map.get(&row) {
                Some(planes) => assert_eq!(*planes, wanted, "row {row}"),
                None => assert_eq!(self.version(Plane::Weights, row), 0, "row {row}"),
            }
        }
    }

    /// What must hold whenever nothing is leased: no row is held, tiers are within bounds, and
    /// every row reads as the model says.
    pub fn check_at_rest(&self) {
        let stats = self.store.stats();
        assert_eq!(stats.rows_held, 0);
        assert_eq!(self.store.slots_free(), self.store.capacity());
        assert!(stats.device.rows <= self.sizes.device && stats.host.rows <= stats.host.slots);
        assert!(stats.device.rows + stats.host.rows <= self.sizes.rows);
        if self.sizes.cold {
            assert!(stats.host.slots <= self.sizes.host);
        }
        self.read(Plane::Weights, 0..self.sizes.rows);
        self.read(Plane::State, 0..self.sizes.rows);
        assert_eq!(self.store.stats(), stats, "reading moves and counts nothing");
    }
}

pub fn tiered<D: RowOps>(
    device: &D,
    sizes: Sizes,
    cold: Option<Arc<MemoryCold>>,
) -> Box<dyn RowStore<D>> {
    let cold = cold.map(|cold| cold as Arc<dyn ColdRows>);
    let slot_bytes = slot_bytes(LAYOUT, sizes.policy);
    let options = TieredOptions {
        device_bytes: sizes.device * slot_bytes,
        host_bytes: sizes.host * slot_bytes,
        policy: sizes.policy,
    };
    let first = first_rows(LAYOUT);
    Box::new(Tiered::new(device, sizes.rows, LAYOUT, &options, cold, first).unwrap())
}

/// What an error says, with its causes.
pub fn chain(error: &CacheError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}
