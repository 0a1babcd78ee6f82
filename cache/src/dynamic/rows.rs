//! What is known of each row in use, and which rows are free.

use tessera_device::HostBuffer;

use crate::Result;
use crate::index::{AHEAD, prefetch};

/// A row. Zero bytes are a free one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Entry {
    pub(super) id: u64,
    /// Step in which the id was last seen.
    pub(super) seen_step: u64,
    /// How often it was seen, halved now and then; at least 1 unless the row is free.
    pub(super) occurrences: u64,
}

impl Entry {
    pub(super) fn is_free(&self) -> bool {
        self.occurrences == 0
    }
}

/// The rows: 24 bytes each, none for pages that nobody wrote.
#[derive(Debug)]
pub(super) struct Rows {
    entries: HostBuffer<Entry>,
    /// Free rows below `fresh`, lowest last when `in_order`.
    freed: Vec<u32>,
    in_order: bool,
    /// Rows from here on were never in use.
    fresh: u32,
    len: u64,
}

impl Rows {
    /// `capacity` free rows, at most 2^32 - 2.
    pub(super) fn new(capacity: u64) -> Result<Self> {
        let entries = HostBuffer::zeroed(capacity as usize)?;
        Ok(Self { entries, freed: Vec::new(), in_order: true, fresh: 0, len: 0 })
    }

    /// Rows in use.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    /// Rows not in use.
    pub(super) fn free(&self) -> u64 {
        self.entries.len() as u64 - self.len
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.entries.len() * size_of::<Entry>() + self.freed.capacity() * size_of::<u32>()) as u64
    }

    pub(super) fn get(&self, row: u32) -> &Entry {
        &self.entries[row as usize]
    }

    /// Asks for a row's entry, which will be read soon.
    pub(super) fn prefetch(&self, row: u32) {
        prefetch(&self.entries, row as usize);
    }

    /// Puts an id into the free row of the lowest number, and tells which that is: the choice
    /// depends on the rows in use alone, not on how they came to be.
    ///
    /// # Panics
    /// When no row is free.
    pub(super) fn take(&mut self, entry: Entry) -> u32 {
        if !self.in_order {
            // Stable sorting makes use of the part that is in order already.
            self.freed.sort_by(|a, b| b.cmp(a));
            self.in_order = true;
        }
        if let Some(ahead) = self.freed.len().checked_sub(AHEAD) {
            self.prefetch(self.freed[ahead]);
        }
        let row = self.freed.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        });
        self.entries[row as usize] = entry;
        self.len += 1;
        row
    }

    /// Frees a row in use.
    pub(super) fn release(&mut self, row: u32) {
        self.entries[row as usize] = bytemuck::Zeroable::zeroed();
        self.freed.push(row);
        self.in_order = false;
        self.len -= 1;
    }

    /// Puts an id into a free row; [`Rows::find_free`] must follow when all are placed.
    pub(super) fn place(&mut self, row: u32, entry: Entry) {
        self.entries[row as usize] = entry;
        self.fresh = self.fresh.max(row + 1);
        self.len += 1;
    }

    /// Finds the free rows between placed ones.
    pub(super) fn find_free(&mut self) {
        let rows = (0..self.fresh).rev();
        self.freed = rows.filter(|&row| self.get(row).is_free()).collect();
        self.in_order = true;
    }

    /// Notes that rows were seen in a step, as often as `counts` says or once; numbers of no row
    /// are skipped. Returns how many of `rows` are rows, and how many rows were not yet seen in
    /// this step.
    pub(super) fn touch(&mut self, rows: &[u32], counts: Option<&[u64]>, step: u64) -> (u64, u64) {
        match counts {
            None => touch(&mut self.entries, rows, |_| 1, step),
            Some(counts) => touch(&mut self.entries, rows, |i| counts[i], step),
        }
    }

    /// Halves all occurrences `times` times, rounding up.
    pub(super) fn halve(&mut self, times: u64) {
        let times = times.min(63);
        for entry in &mut self.entries[..self.fresh as usize] {
            let low = entry.occurrences & ((1 << times) - 1);
            entry.occurrences = (entry.occurrences >> times) + u64::from(low != 0);
        }
    }

    /// Rows in use.
    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, &Entry)> {
        let all = (0u32..).zip(&self.entries[..self.fresh as usize]);
        all.filter(|(_, entry)| !entry.is_free())
    }
}

fn touch(
    entries: &mut [Entry],
    rows: &[u32],
    count: impl Fn(usize) -> u64,
    step: u64,
) -> (u64, u64) {
    let (mut hits, mut first) = (0, 0);
    for (i, &row) in rows.iter().enumerate() {
        if let Some(&ahead) = rows.get(i + AHEAD) {
            prefetch(entries, ahead as usize);
        }
        if let Some(entry) = entries.get_mut(row as usize) {
            first += u64::from(entry.seen_step != step);
            entry.seen_step = step;
            entry.occurrences = entry.occurrences.saturating_add(count(i));
            hits += 1;
        }
    }
    (hits, first)
}
