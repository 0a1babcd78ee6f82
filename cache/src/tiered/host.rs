//! The bytes of the rows of the host tier.

use tessera_device::HostBuffer;

use super::share::{share, threads_for};
use crate::ops::{AHEAD, prefetch_row};
use crate::{Plane, Planes, PlanesMut, Result, RowLayout};

/// Slots a chunk. Chunks come as slots are first used, so that a tier without a bound takes no
/// more memory than its rows.
const CHUNK_SLOTS: u64 = 1 << 15;

/// Planes of some slots: (chunk, weight_bytes) and (chunk, state_bytes).
type Chunk = (HostBuffer<u8>, HostBuffer<u8>);

/// Planes of slots in host memory.
pub(super) struct HostRows {
    layout: RowLayout,
    shift: u32, // of slots a chunk
    chunks: Vec<Chunk>,
}

impl HostRows {
    /// Room for up to `slots` slots, none of it taken yet.
    pub(super) fn new(layout: RowLayout, slots: u64) -> Self {
        let chunk = slots.clamp(1, CHUNK_SLOTS).next_power_of_two();
        Self { layout, shift: chunk.trailing_zeros(), chunks: Vec::new() }
    }

    /// Makes room for slots 0..slots.
    ///
    /// Errors: what the host says.
    pub(super) fn reserve(&mut self, slots: u64) -> Result<()> {
        let chunk = 1 << self.shift;
        while (self.chunks.len() as u64) << self.shift < slots {
            let RowLayout { weight_bytes, state_bytes } = self.layout;
            self.chunks.push((
                HostBuffer::zeroed(chunk * weight_bytes)?,
                HostBuffer::zeroed(chunk * state_bytes)?,
            ));
        }
        Ok(())
    }

    /// Chunk and slot within it.
    fn place(&self, slot: u64) -> (usize, usize) {
        ((slot >> self.shift) as usize, (slot & ((1 << self.shift) - 1)) as usize)
    }

    /// One plane of a slot.
    pub(super) fn row(&self, plane: Plane, slot: u64) -> &[u8] {
        let (chunk, at) = self.place(slot);
        let (weights, state) = &self.chunks[chunk];
        match plane {
            Plane::Weights => &weights[at * self.layout.weight_bytes..][..self.layout.weight_bytes],
            Plane::State => &state[at * self.layout.state_bytes..][..self.layout.state_bytes],
        }
    }

    /// One plane of a slot, to be written.
    pub(super) fn row_mut(&mut self, plane: Plane, slot: u64) -> &mut [u8] {
        let (chunk, at) = self.place(slot);
        let (weights, state) = &mut self.chunks[chunk];
        match plane {
            Plane::Weights => {
                &mut weights[at * self.layout.weight_bytes..][..self.layout.weight_bytes]
            }
            Plane::State => &mut state[at * self.layout.state_bytes..][..self.layout.state_bytes],
        }
    }

    /// Asks for the planes of a slot that will be copied soon.
    #[inline(always)]
    fn prefetch(&self, slot: u64) {
        let RowLayout { weight_bytes, state_bytes } = self.layout;
        let (chunk, at) = self.place(slot);
        let (weights, state) = &self.chunks[chunk];
        prefetch_row(weights, at * weight_bytes, weight_bytes);
        prefetch_row(state, at * state_bytes, state_bytes);
    }

    /// Copies the rows of `slots` to rows `0..` of `to`.
    pub(super) fn copy_out(&self, slots: &[u64], to: &mut PlanesMut<'_>) {
        for (i, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(i + AHEAD) {
                self.prefetch(ahead);
            }
            let RowLayout { weight_bytes, state_bytes } = self.layout;
            to.weights[i * weight_bytes..][..weight_bytes]
                .copy_from_slice(self.row(Plane::Weights, slot));
            to.state[i * state_bytes..][..state_bytes]
                .copy_from_slice(self.row(Plane::State, slot));
        }
    }

    /// Copies rows `0..` of `from` to `slots`, on up to `threads` threads: each owns a part of the
    /// tier and passes over all slots for those that lie in it.
    pub(super) fn copy_in(&mut self, slots: &[u64], from: Planes<'_>, threads: usize) {
        let (layout, shift) = (self.layout, self.shift);
        let threads = threads_for(threads, from.weights.len() + from.state.len());
        let each = self.chunks.len().div_ceil(threads).max(1);
        share(self.chunks.chunks_mut(each).enumerate(), |(part, chunks)| {
            copy_in(chunks, part * each, shift, layout, slots, from);
        });
    }
}

/// Copies those rows of `from` whose slots lie in `chunks`, of which chunk `first` is the first.
fn copy_in(
    chunks: &mut [Chunk],
    first: usize,
    shift: u32,
    layout: RowLayout,
    slots: &[u64],
    from: Planes<'_>,
) {
    let RowLayout { weight_bytes, state_bytes } = layout;
    // Chunks of others wrap or lie beyond the end.
    let place = |slot: u64| {
        let chunk = ((slot >> shift) as usize).wrapping_sub(first);
        (chunk, (slot & ((1 << shift) - 1)) as usize)
    };
    for (i, &slot) in slots.iter().enumerate() {
        if let Some(&ahead) = slots.get(i + AHEAD) {
            let (chunk, at) = place(ahead);
            if let Some((weights, state)) = chunks.get(chunk) {
                prefetch_row(weights, at * weight_bytes, weight_bytes);
                prefetch_row(state, at * state_bytes, state_bytes);
            }
        }
        let (chunk, at) = place(slot);
        if let Some((weights, state)) = chunks.get_mut(chunk) {
            weights[at * weight_bytes..][..weight_bytes]
                .copy_from_slice(&from.weights[i * weight_bytes..][..weight_bytes]);
            state[at * state_bytes..][..state_bytes]
                .copy_from_slice(&from.state[i * state_bytes..][..state_bytes]);
        }
    }
}

/// Planes of rows in memory of their own, kept from one use to the next.
#[derive(Default)]
pub(super) struct Block {
    weights: Vec<u8>, // at least (rows, weight_bytes)
    state: Vec<u8>,   // at least (rows, state_bytes)
}

impl Block {
    /// Makes room for `rows` rows; what lies in them is left from before.
    pub(super) fn reserve(&mut self, layout: RowLayout, rows: usize) {
        let grow = |plane: &mut Vec<u8>, bytes: usize| {
            if plane.len() < bytes {
                plane.resize(bytes, 0);
            }
        };
        grow(&mut self.weights, rows * layout.weight_bytes);
        grow(&mut self.state, rows * layout.state_bytes);
    }

    /// Bytes of the planes.
    pub(super) fn bytes(&self) -> usize {
        self.weights.capacity() + self.state.capacity()
    }

    pub(super) fn rows(&self, layout: RowLayout, rows: std::ops::Range<usize>) -> Planes<'_> {
        let RowLayout { weight_bytes, state_bytes } = layout;
        Planes {
            weights: &self.weights[rows.start * weight_bytes..rows.end * weight_bytes],
            state: &self.state[rows.start * state_bytes..rows.end * state_bytes],
        }
    }

    pub(super) fn rows_mut(
        &mut self,
        layout: RowLayout,
        rows: std::ops::Range<usize>,
    ) -> PlanesMut<'_> {
        let RowLayout { weight_bytes, state_bytes } = layout;
        PlanesMut {
            weights: &mut self.weights[rows.start * weight_bytes..rows.end * weight_bytes],
            state: &mut self.state[rows.start * state_bytes..rows.end * state_bytes],
        }
    }
}
