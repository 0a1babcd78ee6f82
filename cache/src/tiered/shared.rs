//! What a store and its fetchers share: who wants which rows, and where these are.
//!
//! # Why a copy that a fetch made is never out of date when it is installed
//!
//! Rows move between tiers, and bytes of rows change, only in calls that borrow the store mutably
//! (`install`, `write`), and by kernels, which borrow its planes mutably. So neither happens
//! during another. A fetch may run beside any of them, and does this:
//!
//! ```text
//! lock; for each row: count it as wanted where it is, or in `wanted` if it is in no tier of
//!       memory; note the host slots of those in the host tier, and `generation`; unlock
//! copy the rows that are not in the device tier: from those host slots, from the cold tier, or
//!       by making first values
//! ```
//!
//! From the first line on, until the rows are let go of:
//! 1. No eviction takes a wanted row: the one move left to it is up, into the device tier.
//! 2. If it moves up, by another's install, it stays there, and our install finds it there and
//!    leaves the copy unused. That matters, since kernels may have written the row, and since its
//!    host slot may have been given to another row while we copied from it.
//! 3. If it does not move up, it stays where it was, and its bytes stay what they were: kernels
//!    write only the device tier, and evictions fill only slots that had no row of ours. The only
//!    other writer of a row below the device tier is `write`, each chunk of which ends by
//!    counting up `generation` and noting which of its rows somebody wants there; our install
//!    copies again if one of ours was noted after our fetch began.
//!
//! A row evicted just *before* the first line is where the index says: an eviction to the host
//! tier takes the lock of the host's bytes before it lets go of the index, so that who finds the
//! row there reads it after it was written; an eviction to the cold tier is over before the row
//! leaves the index.
//!
//! Order of locks: `state`, then `host`. While either is held nothing slow happens: no device
//! operation, no call of the cold tier, no work on a thread pool.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use super::host::{Block, HostRows};
use super::policy::Policy;
use super::share::{share, threads_for};
use super::tier::Tier;
use super::wanted::Wanted;
use super::{FirstRows, TieredOptions};
use crate::index::Index;
use crate::ops::NO_SLOT;
use crate::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, RwLockWriteGuard};
use crate::{CacheError, ColdRows, PlanesMut, Result, RowLayout, StoreStats};

/// Rows found in the index in one go: their slots stay in the nearest cache.
const BATCH: usize = 1024;

/// How many rows ahead of the one at hand the marks of slots are asked for.
const AHEAD: usize = 24;

/// Rows copied from the host tier before others may have its lock.
const HOST_BATCH: usize = 1024;

/// Clocks are set back by half when they reach this.
const CLOCK_MAX: u32 = u32::MAX;

/// Blocks kept for the next fetch.
const SPARE_BLOCKS: usize = 2;

/// See the module.
pub(crate) struct Shared {
    pub(super) layout: RowLayout,
    rows: u64,
    slot_bytes: u64,
    /// Threads that copy rows of the host tier.
    pub(super) threads: usize,
    /// Whether the host tier may be as large as it takes, for lack of a tier below it.
    pub(super) cold: Option<Arc<dyn ColdRows>>,
    pub(super) first: Arc<FirstRows>,
    state: Mutex<State>,
    host: RwLock<HostRows>,
}

/// What the lock protects.
pub(super) struct State {
    pub(super) device: Tier,
    pub(super) host: Tier,
    /// How many want a row that is in neither tier.
    pub(super) wanted: HashMap<u64, u32>,
    /// Different rows that are wanted, wherever they are.
    pub(super) held: u64,
    pub(super) policy: Policy,
    /// Fetches so far.
    pub(super) clock: u32,
    /// Rows fetched since counts of use were last halved.
    uses: u64,
    /// Writes so far; see the module.
    pub(super) generation: u64,
    /// Wanted rows that were written below the device tier, and the last write of each.
    rewritten: HashMap<u64, u64>,
    /// Installs so far that brought rows into the device tier.
    pub(super) installs: u64,
    poison: Option<Poison>,
    pub(super) stats: StoreStats,
    spare: Vec<Block>,
}

/// Why the store refuses.
#[derive(Clone)]
struct Poison {
    operation: &'static str,
    cause: String,
}

/// Where wanted rows are that are not in the device tier, by their position in the fetch.
#[derive(Default)]
pub(super) struct Absent {
    pub(super) in_host: Vec<usize>,
    pub(super) host_slots: Vec<u64>, // one for each in the host tier
    pub(super) below: Vec<usize>,
    pub(super) generation: u64,
    pub(super) installs: u64,
}

impl Shared {
    pub(super) fn new(
        rows: u64,
        layout: RowLayout,
        options: &TieredOptions,
        slots: (u64, u64),
        cold: Option<Arc<dyn ColdRows>>,
        first: Arc<FirstRows>,
        threads: usize,
    ) -> Result<Self> {
        let policy = options.policy;
        let state = State {
            device: Tier::new(slots.0, policy)?,
            host: Tier::new(slots.1, policy)?,
            wanted: HashMap::new(),
            held: 0,
            policy,
            clock: 0,
            uses: 0,
            generation: 0,
            rewritten: HashMap::new(),
            installs: 0,
            poison: None,
            stats: StoreStats::default(),
            spare: Vec::new(),
        };
        Ok(Self {
            layout,
            rows,
            slot_bytes: super::slot_bytes(layout, policy),
            threads,
            cold,
            first,
            state: Mutex::new(state),
            host: RwLock::new(HostRows::new(layout, slots.1)),
        })
    }

    pub(crate) fn rows(&self) -> u64 {
        self.rows
    }

    /// The state, whatever happened before: for counting down, and for looking.
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|poisoned| {
            let mut state = poisoned.into_inner();
            state.poison("keep count of its rows", "a thread panicked while it changed them");
            state
        })
    }

    /// The state, unless the store is poisoned.
    ///
    /// Errors: [`CacheError::Poisoned`].
    pub(super) fn state(&self) -> Result<MutexGuard<'_, State>> {
        let state = self.lock();
        match &state.poison {
            None => Ok(state),
            Some(Poison { operation, cause }) => {
                Err(CacheError::Poisoned { operation, cause: cause.clone() })
            }
        }
    }

    /// The host tier's bytes. A panic among its writers would have poisoned the state, which
    /// everyone looks at before what is read here is used.
    pub(super) fn host(&self) -> RwLockReadGuard<'_, HostRows> {
        self.host.read().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// The host tier's bytes, to be written.
    pub(super) fn host_mut(&self) -> RwLockWriteGuard<'_, HostRows> {
        self.host.write().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// Copies rows of the host tier to `to`, one row a slot. Its lock is held for a thousand rows
    /// at a time.
    pub(super) fn copy_from_host(&self, slots: &[u64], to: PlanesMut<'_>) {
        let layout = self.layout;
        let threads = threads_for(self.threads, to.weights.len() + to.state.len());
        let each = slots.len().div_ceil(threads).max(1);
        share(slots.chunks(each).zip(to.pieces(layout, each)), |(slots, to)| {
            let batches = slots.chunks(HOST_BATCH).zip(to.pieces(layout, HOST_BATCH));
            for (slots, mut to) in batches {
                self.host().copy_out(slots, &mut to);
            }
        });
    }

    /// Refuses all further work for `error`, which it returns.
    pub(super) fn poison(&self, operation: &'static str, error: CacheError) -> CacheError {
        let mut cause = error.to_string();
        let mut source = std::error::Error::source(&error);
        while let Some(deeper) = source {
            cause = format!("{cause}: {deeper}");
            source = deeper.source();
        }
        self.lock().poison(operation, &cause);
        error
    }

    /// Wants `rows`, different, ascending and within the store, and copies those that are not in
    /// the device tier.
    pub(crate) fn fetch(self: &Arc<Self>, rows: &[u64]) -> Result<Wanted> {
        let mut state = self.state()?;
        state.tick(rows.len());
        let mut slots = Vec::with_capacity(rows.len());
        state.want_in_device(rows, &mut slots);
        let absent = state.want_elsewhere(rows, &slots);
        let (slots_all, held) = (state.device.capacity(), state.held);
        if held > slots_all {
            state.unwant(rows, &slots);
            return Err(CacheError::WorkingSet {
                rows: rows.len() as u64,
                held: state.held,
                slots: slots_all,
                bytes_needed: held.saturating_mul(self.slot_bytes),
            });
        }
        state.count(rows.len(), &absent);
        let block = state.spare.pop().unwrap_or_default();
        drop(state);
        // From here on dropping it lets go of the rows.
        let mut wanted = Wanted::new(Arc::clone(self), rows.to_vec(), slots, block);
        wanted.copy(absent)?;
        Ok(wanted)
    }

    /// Lets go of rows, and takes a block back.
    pub(super) fn release(&self, rows: &[u64], slots: &[u64], block: Block) {
        let mut state = self.lock();
        state.unwant(rows, slots);
        if state.spare.len() < SPARE_BLOCKS && block.bytes() > 0 {
            state.spare.push(block);
        }
    }
}

impl State {
    /// Keeps the first cause of why the store refuses.
    pub(super) fn poison(&mut self, operation: &'static str, cause: &str) {
        self.poison.get_or_insert_with(|| Poison { operation, cause: cause.to_owned() });
    }

    /// Ends a write of `rows`, a chunk: after the last byte, and before any install.
    pub(super) fn written(&mut self, rows: &[u64]) {
        self.generation += 1;
        if self.held == 0 {
            return;
        }
        for &row in rows {
            if self.is_wanted_below(row) {
                self.rewritten.insert(row, self.generation);
            }
        }
    }

    /// Whether a row is wanted and not in the device tier.
    fn is_wanted_below(&self, row: u64) -> bool {
        if self.device.get(row).is_some() {
            return false;
        }
        let in_host = self.host.get(row).is_some_and(|slot| !self.host.marks(slot).idle());
        in_host || self.wanted.contains_key(&row)
    }

    /// Whether one of `rows`, which are wanted, was written below the device tier after the first
    /// `generation` writes.
    pub(super) fn any_written_since(
        &self,
        generation: u64,
        mut rows: impl Iterator<Item = u64>,
    ) -> bool {
        self.generation != generation
            && !self.rewritten.is_empty()
            && rows.any(|row| self.rewritten.get(&row).is_some_and(|&write| write > generation))
    }

    /// Counts a fetch, and keeps clocks and counts of use within bounds.
    fn tick(&mut self, rows: usize) {
        if self.clock == CLOCK_MAX {
            const BACK: u32 = 1 << 31;
            self.clock -= BACK;
            let policy = self.policy;
            let score = |score: u32| match policy {
                Policy::Lfu => score,
                Policy::Lru | Policy::NextUse => score.saturating_sub(BACK),
            };
            for tier in [&mut self.device, &mut self.host] {
                tier.rescore(score, |next| next.saturating_sub(BACK));
            }
        }
        self.clock += 1;
        self.uses = self.uses.saturating_add(rows as u64);
        let slots = self.device.capacity().saturating_add(self.host.capacity());
        if self.policy == Policy::Lfu && self.uses >= slots.saturating_mul(10) {
            self.uses = 0;
            for tier in [&mut self.device, &mut self.host] {
                tier.rescore(|score| score / 2, |next| next);
            }
        }
    }

    /// Wants those of `rows` that are in the device tier, and appends the slot of each, or
    /// [`NO_SLOT`].
    fn want_in_device(&mut self, rows: &[u64], slots: &mut Vec<u64>) {
        let (policy, clock) = (self.policy, self.clock);
        let mut found = [0; BATCH];
        for rows in rows.chunks(BATCH) {
            let found = &mut found[..rows.len()];
            self.device.find(rows, found);
            slots.extend(found.iter().enumerate().map(|(i, &slot)| {
                if let Some(&ahead) = found.get(i + AHEAD) {
                    self.device.prefetch(u64::from(ahead));
                }
                if slot == Index::NONE {
                    return NO_SLOT;
                }
                self.held += u64::from(self.device.want(u64::from(slot), policy, clock));
                u64::from(slot)
            }));
        }
    }

    /// Wants those of `rows` that have no slot, where they are.
    fn want_elsewhere(&mut self, rows: &[u64], slots: &[u64]) -> Absent {
        let (policy, clock) = (self.policy, self.clock);
        let absent = self.locate(rows, slots);
        for (i, &slot) in absent.host_slots.iter().enumerate() {
            if let Some(&ahead) = absent.host_slots.get(i + AHEAD) {
                self.host.prefetch(ahead);
            }
            self.held += u64::from(self.host.want(slot, policy, clock));
        }
        for &position in &absent.below {
            let wants = self.wanted.entry(rows[position]).or_insert(0);
            self.held += u64::from(*wants == 0);
            *wants += 1;
        }
        absent
    }

    /// Where those of `rows` are that have no slot, none of which is in the device tier.
    pub(super) fn locate(&self, rows: &[u64], slots: &[u64]) -> Absent {
        let positions: Vec<usize> = (0..rows.len()).filter(|&i| slots[i] == NO_SLOT).collect();
        let (generation, installs) = (self.generation, self.installs);
        let mut absent = Absent { generation, installs, ..Absent::default() };
        let mut found = [0; BATCH];
        for positions in positions.chunks(BATCH) {
            let mut ids = [0; BATCH];
            let (ids, found) = (&mut ids[..positions.len()], &mut found[..positions.len()]);
            for (id, &position) in ids.iter_mut().zip(positions) {
                *id = rows[position];
            }
            self.host.find(ids, found);
            for (&position, &slot) in positions.iter().zip(&*found) {
                if slot == Index::NONE {
                    absent.below.push(position);
                } else {
                    absent.in_host.push(position);
                    absent.host_slots.push(u64::from(slot));
                }
            }
        }
        absent
    }

    /// Lets go of rows: at their slots, or where they are for those without.
    fn unwant(&mut self, rows: &[u64], slots: &[u64]) {
        for (i, (&row, &slot)) in rows.iter().zip(slots).enumerate() {
            if let Some(&ahead) = slots.get(i + AHEAD) {
                self.device.prefetch(ahead);
            }
            let last = if slot != NO_SLOT {
                self.device.unwant(slot)
            } else if let Some(slot) = self.device.get(row) {
                self.device.unwant(slot)
            } else if let Some(slot) = self.host.get(row) {
                self.host.unwant(slot)
            } else {
                let Entry::Occupied(mut wants) = self.wanted.entry(row) else {
                    unreachable!("a wanted row is where its wants are counted")
                };
                *wants.get_mut() -= 1;
                let last = *wants.get() == 0;
                if last {
                    wants.remove();
                }
                last
            };
            self.held -= u64::from(last);
            if last && !self.rewritten.is_empty() {
                self.rewritten.remove(&row);
            }
        }
    }

    fn count(&mut self, rows: usize, absent: &Absent) {
        let misses = (absent.in_host.len() + absent.below.len()) as u64;
        self.device.stats.hits += rows as u64 - misses;
        self.device.stats.misses += misses;
        self.host.stats.hits += absent.in_host.len() as u64;
        self.host.stats.misses += absent.below.len() as u64;
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Shared({} rows)", self.rows)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RowStore, Tiered};
    use tessera_device::{Cpu, Device};

    /// A clock that comes to its end is set back, and the order of last uses stays.
    #[test]
    fn the_clock_can_run_for_ever() {
        for policy in [Policy::Lru, Policy::NextUse] {
            let cpu = Cpu::new(std::num::NonZeroUsize::new(1)).unwrap();
            let stream = cpu.stream().unwrap();
            let layout = RowLayout { weight_bytes: 1, state_bytes: 0 };
            let device_bytes = 3 * super::super::slot_bytes(layout, policy);
            let options = TieredOptions { device_bytes, host_bytes: 0, policy };
            let first: Arc<FirstRows> = Arc::new(|rows: &[u64], to: PlanesMut<'_>| {
                to.weights.iter_mut().zip(rows).for_each(|(to, &row)| *to = row as u8);
            });
            let mut store = Tiered::new(&cpu, 9, layout, &options, None, first).unwrap();
            store.shared.lock().clock = CLOCK_MAX - 2;
            for row in [0, 1, 2] {
                drop(store.prefetch(&cpu, &stream, &[row]).unwrap());
            }
            assert!(store.shared.lock().clock < CLOCK_MAX / 2 + 5);
            store.hint_next_use(&[0], 5);
            drop(store.prefetch(&cpu, &stream, &[3]).unwrap());
            let state = store.shared.lock();
            // The first of them went, unless its next use was known.
            let gone = if policy == Policy::NextUse { 1 } else { 0 };
            let left: Vec<u64> = (0..4).filter(|&row| state.device.get(row).is_some()).collect();
            let wanted: Vec<u64> = (0..4).filter(|&row| row != gone).collect();
            assert_eq!(left, wanted, "{policy:?}");
        }
    }

    /// A thread that panics while it changes the counts leaves a store that refuses.
    #[test]
    fn a_panic_under_the_lock_poisons_the_store() {
        let layout = RowLayout { weight_bytes: 1, state_bytes: 0 };
        let options = TieredOptions { device_bytes: 0, host_bytes: 0, policy: Policy::Lru };
        let first: Arc<FirstRows> = Arc::new(|_: &[u64], _: PlanesMut<'_>| {});
        let shared = Arc::new(Shared::new(9, layout, &options, (3, 9), None, first, 1).unwrap());
        let fetched = shared.fetch(&[1]).unwrap();
        std::thread::scope(|scope| {
            let panics = scope.spawn(|| {
                let _state = shared.lock();
                panic!("on purpose");
            });
            assert!(panics.join().is_err());
        });
        drop(fetched);
        let error = shared.fetch(&[1]).unwrap_err().to_string();
        assert!(error.contains("a thread panicked"), "{error}");
    }
}
