//! Rows that are wanted, their slots, and copies of those that were not in the device tier: what
//! a fetch makes, an install completes and a lease is.

use std::sync::Arc;
use std::time::Instant;

use super::host::Block;
use super::shared::{Absent, Shared};
use crate::ops::NO_SLOT;
use crate::{CacheError, PlanesMut, Result};

/// Dropping it lets go of the rows.
pub(crate) struct Wanted {
    shared: Arc<Shared>,
    rows: Vec<u64>,
    slots: Vec<u64>, // (rows): NO_SLOT until installed
    pub(super) copies: Copies,
}

/// Copies of rows: first those from the host tier, then from the cold tier, then first values.
#[derive(Default)]
pub(super) struct Copies {
    /// Whose copies they are: positions among the wanted rows.
    pub(super) positions: Vec<usize>,
    /// Where copies from the host tier come from.
    pub(super) host_slots: Vec<u64>,
    /// How many copies were below the host tier; they are the last ones.
    pub(super) below: usize,
    /// How many copies are first values; they are the last ones.
    pub(super) first: usize,
    /// Writes before the copies were made.
    pub(super) generation: u64,
    /// Installs before the copies were made.
    pub(super) installs: u64,
    pub(super) block: Block,
}

impl Wanted {
    /// `rows` that were counted as wanted, at `slots`.
    pub(super) fn new(shared: Arc<Shared>, rows: Vec<u64>, slots: Vec<u64>, block: Block) -> Self {
        Self { shared, rows, slots, copies: Copies { block, ..Copies::default() } }
    }

    /// Whether the rows are those of this store.
    pub(super) fn is_of(&self, shared: &Arc<Shared>) -> bool {
        Arc::ptr_eq(&self.shared, shared)
    }

    pub(crate) fn rows(&self) -> &[u64] {
        &self.rows
    }

    pub(crate) fn slots(&self) -> &[u64] {
        &self.slots
    }

    /// Notes the slot of a row that is now in the device tier.
    pub(super) fn set_slot(&mut self, position: usize, slot: u64) {
        self.slots[position] = slot;
    }

    /// The slots of `rows`, ascending, all of which it holds.
    ///
    /// Errors: [`CacheError::NotLeased`].
    pub(crate) fn slots_of(&self, rows: &[u64]) -> Result<Vec<u64>> {
        let mut at = 0;
        let mut slot_of = |&row: &u64| {
            // Sparse subsets leap, dense ones walk.
            let mut step = 1;
            while self.rows.get(at + step).is_some_and(|&other| other <= row) {
                at += step;
                step *= 2;
            }
            let end = self.rows.len().min(at + step);
            at += self.rows[at..end].partition_point(|&other| other < row);
            match self.rows.get(at) {
                Some(&other) if other == row => Ok(self.slots[at]),
                _ => Err(CacheError::NotLeased { row }),
            }
        };
        rows.iter().map(&mut slot_of).collect()
    }

    /// Copies the rows that are absent from the device tier. What is in the host tier comes as it
    /// is there, under a lock that is held for a thousand rows at a time; for what is below it
    /// nothing is locked.
    pub(super) fn copy(&mut self, absent: Absent) -> Result<()> {
        let (shared, layout) = (Arc::clone(&self.shared), self.shared.layout);
        let in_host = absent.in_host.len();
        let below = absent.below.len();
        let Copies { positions, block, .. } = &mut self.copies;
        block.reserve(layout, in_host + below);
        *positions = absent.in_host;
        shared.copy_from_host(&absent.host_slots, block.rows_mut(layout, 0..in_host));
        let at = in_host;
        let rows: Vec<u64> = absent.below.iter().map(|&position| self.rows[position]).collect();
        let read = shared.read_below(&rows, |rows| block.rows_mut(layout, at..at + rows))?;
        positions.extend(read.order.iter().map(|&i| absent.below[i]));
        (self.copies.below, self.copies.first) = (below, read.first);
        self.copies.host_slots = absent.host_slots;
        (self.copies.generation, self.copies.installs) = (absent.generation, absent.installs);
        let mut state = shared.lock();
        state.stats.cold_rows += (below - read.first) as u64;
        state.stats.first_rows += read.first as u64;
        state.stats.cold_wait_s += read.wait_s;
        Ok(())
    }

    /// Copies again, since a write of one of them came between, the rows that are still absent.
    ///
    /// Errors: as a fetch's.
    pub(super) fn copy_again(&mut self) -> Result<()> {
        let absent = {
            let mut state = self.shared.state()?;
            for i in 0..self.rows.len() {
                if self.slots[i] == NO_SLOT
                    && let Some(slot) = state.device.get(self.rows[i])
                {
                    self.slots[i] = slot;
                }
            }
            let absent = state.locate(&self.rows, &self.slots);
            state.stats.rows_fetched_again += (absent.in_host.len() + absent.below.len()) as u64;
            absent
        };
        self.copy(absent)
    }

    /// All rows have their slot: the copies are not needed any more.
    pub(super) fn installed(&mut self) {
        debug_assert!(self.slots.iter().all(|&slot| slot != NO_SLOT));
        let block = std::mem::take(&mut self.copies.block);
        self.copies = Copies::default();
        self.shared.release(&[], &[], block);
    }
}

impl Drop for Wanted {
    fn drop(&mut self) {
        let block = std::mem::take(&mut self.copies.block);
        self.shared.release(&self.rows, &self.slots, block);
    }
}

impl std::fmt::Debug for Wanted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Wanted({} rows)", self.rows.len())
    }
}

/// Rows read from below the host tier.
pub(super) struct Below {
    /// The order in which they were read: positions among the rows asked for.
    pub(super) order: Vec<usize>,
    /// How many of them are first values; they are the last ones.
    pub(super) first: usize,
    /// Time that reading the cold tier took, in seconds.
    pub(super) wait_s: f64,
}

impl Shared {
    /// Reads rows that are in no tier of memory: those of the cold tier first, then the first
    /// values of the others. `to` gives planes for the number of rows asked.
    pub(super) fn read_below<'a>(
        &self,
        rows: &[u64],
        to: impl FnOnce(usize) -> PlanesMut<'a>,
    ) -> Result<Below> {
        let PlanesMut { weights, state } = to(rows.len());
        let mut order: Vec<usize> = (0..rows.len()).collect();
        let (mut cold, mut wait_s) = (0, 0.0);
        if let Some(tier) = &self.cold
            && !rows.is_empty()
        {
            let start = Instant::now();
            let mut found = vec![false; rows.len()];
            tier.contains(rows, &mut found);
            let (held, new): (Vec<usize>, Vec<usize>) = order.into_iter().partition(|&i| found[i]);
            cold = held.len();
            order = held;
            order.extend(new);
            let ids: Vec<u64> = order[..cold].iter().map(|&i| rows[i]).collect();
            let to = PlanesMut {
                weights: &mut weights[..cold * self.layout.weight_bytes],
                state: &mut state[..cold * self.layout.state_bytes],
            };
            found.truncate(cold);
            tier.get(&ids, to, &mut found).map_err(|source| CacheError::Tier {
                operation: "read from the cold tier",
                rows: cold as u64,
                source: Box::new(source),
            })?;
            if let Some(i) = found.iter().position(|&found| !found) {
                return Err(CacheError::RowLost { row: ids[i] });
            }
            wait_s = start.elapsed().as_secs_f64();
        }
        let ids: Vec<u64> = order[cold..].iter().map(|&i| rows[i]).collect();
        if !ids.is_empty() {
            let weights = &mut weights[cold * self.layout.weight_bytes..];
            let state = &mut state[cold * self.layout.state_bytes..];
            weights.fill(0);
            state.fill(0);
            (self.first)(&ids, PlanesMut { weights, state });
        }
        Ok(Below { order, first: ids.len(), wait_s })
    }
}
