//! Reading and writing rows wherever they are, by range or as a list: for checkpoints, exports and
//! first fills.

use std::ops::Range;

use super::Tiered;
use super::down::{make_room, put};
use super::host::Block;
use super::shared::{Absent, Shared, State};
use super::tier::{DIRTY, Moving};
use crate::index::Index;
use crate::ops::NO_SLOT;
use crate::resident::{check_listed, check_range};
use crate::{Plane, Result, RowLayout, RowOps};

/// Bytes of rows handled in one go.
const CHUNK_BYTES: u64 = 4 << 20;

impl Shared {
    /// Bytes of a row's planes.
    pub(super) fn row_bytes(&self) -> u64 {
        (self.layout.weight_bytes + self.layout.state_bytes) as u64
    }

    /// Rows handled in one go.
    pub(super) fn chunk_rows(&self) -> usize {
        (CHUNK_BYTES / self.row_bytes().max(1)).clamp(1, 1 << 14) as usize
    }
}

/// Some rows, and where they are.
struct Chunk {
    rows: Vec<u64>,
    in_device: Vec<usize>, // positions
    slots: Vec<u64>,       // one for each in the device tier
    absent: Absent,
}

impl Chunk {
    fn new(shared: &Shared, rows: Vec<u64>) -> Result<Self> {
        let state = shared.state()?;
        let mut found = vec![0; rows.len()];
        state.device.find(&rows, &mut found);
        let slot = |&slot: &u32| if slot == Index::NONE { NO_SLOT } else { u64::from(slot) };
        let all: Vec<u64> = found.iter().map(slot).collect();
        let absent = state.locate(&rows, &all);
        let in_device: Vec<usize> = (0..rows.len()).filter(|&i| all[i] != NO_SLOT).collect();
        let slots = in_device.iter().map(|&i| all[i]).collect();
        Ok(Self { rows, in_device, slots, absent })
    }

    /// The rows that are in no tier of memory.
    fn rows_below(&self) -> Vec<u64> {
        self.absent.below.iter().map(|&i| self.rows[i]).collect()
    }
}

/// Row `i` of some.
fn nth(bytes: &[u8], i: usize, row_bytes: usize) -> &[u8] {
    &bytes[i * row_bytes..(i + 1) * row_bytes]
}

/// Row `i` of some, to be written.
fn nth_mut(bytes: &mut [u8], i: usize, row_bytes: usize) -> &mut [u8] {
    &mut bytes[i * row_bytes..(i + 1) * row_bytes]
}

/// Cuts a range of rows into chunks, each with the bytes it has of the range's.
fn chunks(rows: Range<u64>, each: usize, row_bytes: usize) -> impl Iterator<Item = Part> {
    let start = rows.start;
    (start..rows.end).step_by(each).map(move |first| {
        let end = rows.end.min(first + each as u64);
        // Within the bytes that were given for the range.
        let at = |row: u64| (row - start) as usize * row_bytes;
        Part { rows: first..end, bytes: at(first)..at(end) }
    })
}

struct Part {
    rows: Range<u64>,
    bytes: Range<usize>,
}

impl<D: RowOps> Tiered<D> {
    /// See [`RowStore::read`](crate::RowStore::read). Rows do not move while the store is
    /// borrowed, so they are where the index said.
    pub(super) fn read_range(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Range<u64>,
        bytes: &mut [u8],
    ) -> Result<()> {
        let shared = &*self.shared;
        let layout = shared.layout;
        check_range("read", shared.rows(), layout, plane, &rows, bytes.len())?;
        drop(shared.state()?);
        let row_bytes = layout.row_bytes(plane);
        if row_bytes == 0 {
            return Ok(());
        }
        let mut block = Block::default();
        for part in chunks(rows, shared.chunk_rows(), row_bytes) {
            let to = &mut bytes[part.bytes];
            self.read_chunk(device, stream, plane, part.rows.collect(), to, &mut block)?;
        }
        Ok(())
    }

    /// See [`RowStore::read_listed`](crate::RowStore::read_listed).
    pub(super) fn read_list(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: &[u64],
        bytes: &mut [u8],
    ) -> Result<()> {
        let shared = &*self.shared;
        check_listed("read", shared.rows(), shared.layout, plane, rows, bytes.len())?;
        drop(shared.state()?);
        let row_bytes = shared.layout.row_bytes(plane);
        if row_bytes == 0 {
            return Ok(());
        }
        let (each, mut block) = (shared.chunk_rows(), Block::default());
        for (rows, to) in rows.chunks(each).zip(bytes.chunks_mut(each * row_bytes)) {
            self.read_chunk(device, stream, plane, rows.to_vec(), to, &mut block)?;
        }
        Ok(())
    }

    /// Reads a plane of some rows; `block` is memory to work in.
    fn read_chunk(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Vec<u64>,
        to: &mut [u8],
        block: &mut Block,
    ) -> Result<()> {
        let shared = &*self.shared;
        let layout = shared.layout;
        let row_bytes = layout.row_bytes(plane);
        let chunk = Chunk::new(shared, rows)?;
        let mut gathered = vec![0; chunk.slots.len() * row_bytes];
        let buffer = match plane {
            Plane::Weights => &self.weights,
            Plane::State => &self.state,
        };
        device
            .gather_rows(stream, buffer, &chunk.slots, row_bytes, &mut gathered)
            .map_err(|error| shared.poison("copy rows from the device", error))?;
        for (from, &i) in gathered.chunks_exact(row_bytes).zip(&chunk.in_device) {
            nth_mut(to, i, row_bytes).copy_from_slice(from);
        }
        let host = shared.host();
        for (&slot, &i) in chunk.absent.host_slots.iter().zip(&chunk.absent.in_host) {
            nth_mut(to, i, row_bytes).copy_from_slice(host.row(plane, slot));
        }
        drop(host);
        let below = chunk.rows_below();
        block.reserve(layout, below.len());
        let read = shared.read_below(&below, |rows| block.rows_mut(layout, 0..rows))?;
        let planes = block.rows(layout, 0..below.len());
        let from = match plane {
            Plane::Weights => planes.weights,
            Plane::State => planes.state,
        };
        for (from, &i) in from.chunks_exact(row_bytes).zip(&read.order) {
            nth_mut(to, chunk.absent.below[i], row_bytes).copy_from_slice(from);
        }
        Ok(())
    }

    /// See [`RowStore::write`](crate::RowStore::write) and
    /// [`RowStore::write_rows`](crate::RowStore::write_rows). Rows that are in no tier of memory
    /// come into the host tier as far as it has room, so that a write of their other plane finds
    /// them there.
    pub(super) fn write_range(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: Range<u64>,
        given: Given<'_>,
    ) -> Result<()> {
        let layout = self.shared.layout;
        for (plane, bytes) in given.planes() {
            check_range("write", self.shared.rows(), layout, plane, &rows, bytes.len())?;
        }
        drop(self.shared.state()?);
        if given.planes().all(|(plane, _)| layout.row_bytes(plane) == 0) {
            return Ok(());
        }
        let mut written = Ok(());
        let start = rows.start;
        for part in chunks(rows, self.shared.chunk_rows(), 1) {
            let of_part = given.rows(layout, part.rows.start - start..part.rows.end - start);
            written = self.write_chunk(device, stream, part.rows.collect(), of_part);
            if written.is_err() {
                break;
            }
        }
        written
    }

    /// See [`RowStore::write_listed`](crate::RowStore::write_listed); otherwise as
    /// [`Tiered::write_range`].
    pub(super) fn write_list(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: &[u64],
        given: Given<'_>,
    ) -> Result<()> {
        let layout = self.shared.layout;
        for (plane, bytes) in given.planes() {
            check_listed("write", self.shared.rows(), layout, plane, rows, bytes.len())?;
        }
        drop(self.shared.state()?);
        if given.planes().all(|(plane, _)| layout.row_bytes(plane) == 0) {
            return Ok(());
        }
        let (each, mut start) = (self.shared.chunk_rows(), 0);
        rows.chunks(each).try_for_each(|rows| {
            let of_part = given.rows(layout, start..start + rows.len() as u64);
            start += rows.len() as u64;
            self.write_chunk(device, stream, rows.to_vec(), of_part)
        })
    }

    fn write_chunk(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: Vec<u64>,
        given: Given<'_>,
    ) -> Result<()> {
        let chunk = Chunk::new(&self.shared, rows)?;
        let written = self.write_where_they_are(device, stream, &chunk, given);
        // After the last byte, whatever became of it: a fetch that read before copies again. No
        // install comes between.
        self.shared.lock().written(&chunk.rows);
        written
    }

    fn write_where_they_are(
        &mut self,
        device: &D,
        stream: &D::Stream,
        chunk: &Chunk,
        given: Given<'_>,
    ) -> Result<()> {
        let shared = &*self.shared;
        for (plane, bytes) in given.planes() {
            let row_bytes = shared.layout.row_bytes(plane);
            let mut scattered = Vec::with_capacity(chunk.slots.len() * row_bytes);
            for &i in &chunk.in_device {
                scattered.extend_from_slice(nth(bytes, i, row_bytes));
            }
            let buffer = match plane {
                Plane::Weights => &mut self.weights,
                Plane::State => &mut self.state,
            };
            device
                .scatter_rows(stream, &scattered, &chunk.slots, row_bytes, buffer)
                .map_err(|error| shared.poison("copy rows to the device", error))?;
            let mut host = shared.host_mut();
            for (&slot, &i) in chunk.absent.host_slots.iter().zip(&chunk.absent.in_host) {
                host.row_mut(plane, slot).copy_from_slice(nth(bytes, i, row_bytes));
            }
        }
        let mut state = shared.lock();
        for &slot in &chunk.slots {
            state.device.flag(slot, DIRTY, 0);
        }
        for &slot in &chunk.absent.host_slots {
            state.host.flag(slot, DIRTY, 0);
        }
        drop(state);
        self.write_below(chunk, given)
    }

    /// Writes the rows of a chunk that are in no tier of memory: into the host tier as far as it
    /// has room, into the cold tier otherwise.
    fn write_below(&mut self, chunk: &Chunk, given: Given<'_>) -> Result<()> {
        let shared = &*self.shared;
        let layout = shared.layout;
        let below = chunk.rows_below();
        let count = below.len();
        let block = &mut self.leaving;
        block.reserve(layout, count);
        // A plane that is not given keeps what it has.
        let order = if given.is_whole(layout) {
            (0..count).collect()
        } else {
            shared.read_below(&below, |rows| block.rows_mut(layout, 0..rows))?.order
        };
        let planes = block.rows_mut(layout, 0..count);
        for (to, plane) in [(planes.weights, Plane::Weights), (planes.state, Plane::State)] {
            let Some(bytes) = given.get(plane) else { continue };
            let row_bytes = layout.row_bytes(plane);
            for (to, &i) in to.chunks_exact_mut(row_bytes.max(1)).zip(&order) {
                to.copy_from_slice(nth(bytes, chunk.absent.below[i], row_bytes));
            }
        }
        let rows: Vec<u64> = order.iter().map(|&i| below[i]).collect();
        let kept = make_room(shared, count as u64, 0)?.min(count as u64) as usize;
        put(shared, &rows[kept..], block.rows(layout, kept..count))?;
        let mut guard = shared.lock();
        let state = &mut *guard;
        let mut host = shared.host_mut();
        host.reserve(state.host.capacity().min(state.host.used() + kept as u64))?;
        let slots = insert_in_host(state, &rows[..kept])
            .inspect_err(|error| state.poison("move rows between tiers", &error.to_string()))?;
        state.host.stats.bytes_in += kept as u64 * shared.row_bytes();
        drop(guard);
        host.copy_in(&slots, block.rows(layout, 0..kept), shared.threads);
        Ok(())
    }
}

/// Planes of some rows, one of them or both, to be written.
#[derive(Clone, Copy)]
pub(super) struct Given<'a> {
    pub(super) weights: Option<&'a [u8]>,
    pub(super) state: Option<&'a [u8]>,
}

impl<'a> Given<'a> {
    fn get(self, plane: Plane) -> Option<&'a [u8]> {
        match plane {
            Plane::Weights => self.weights,
            Plane::State => self.state,
        }
    }

    /// The planes that are given.
    fn planes(self) -> impl Iterator<Item = (Plane, &'a [u8])> {
        let of = move |plane| self.get(plane).map(|bytes| (plane, bytes));
        [Plane::Weights, Plane::State].into_iter().filter_map(of)
    }

    /// Whether all bytes of a row are given.
    fn is_whole(self, layout: RowLayout) -> bool {
        let is_given = |plane| self.get(plane).is_some() || layout.row_bytes(plane) == 0;
        [Plane::Weights, Plane::State].into_iter().all(is_given)
    }

    /// Some of the rows, counted from the first.
    fn rows(self, layout: RowLayout, rows: Range<u64>) -> Self {
        let of = |plane| {
            let width = layout.row_bytes(plane);
            let bytes = rows.start as usize * width..rows.end as usize * width;
            self.get(plane).map(|all: &[u8]| &all[bytes])
        };
        Self { weights: of(Plane::Weights), state: of(Plane::State) }
    }
}

/// Gives written rows slots of the host tier; who wants them does so there from now on.
fn insert_in_host(state: &mut State, rows: &[u64]) -> Result<Vec<u64>> {
    let (policy, clock) = (state.policy, state.clock);
    let moving: Vec<Moving> = rows
        .iter()
        .map(|&row| Moving {
            row,
            flags: DIRTY,
            wants: state.wanted.remove(&row).unwrap_or(0),
            score: policy.touched(0, clock),
            next: 0,
        })
        .collect();
    state.host.insert_all(&moving)
}
