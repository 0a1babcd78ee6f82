//! The slots of one tier: which row each holds, who wants it, and what its policy thinks of it.
//! The bytes of rows lie elsewhere.
//!
//! Memory: 16 bytes of index, and 8 of row and 8 of marks a slot, 4 more under the policy next-use;
//! pages of slots that were never used take none.

use tessera_device::HostBuffer;

use super::policy::{Candidates, Policy};
use crate::index::{AHEAD, Index, NEXT_AHEAD, prefetch};
use crate::{Result, TierStats};

/// The bytes differ from those that the cold tier, or the row's first value, would give.
pub(super) const DIRTY: u32 = 1;
/// The cold tier holds the row, with these bytes unless they are [`DIRTY`].
pub(super) const BELOW: u32 = 2;
/// The slot holds a row.
const TAKEN: u32 = 4;
/// One who wants the row.
const WANT: u32 = 8;

/// How many rows ahead of the one at hand the slot is asked for, which tells the row; and so the
/// row's place in the index.
const SLOT_AHEAD: usize = 24;

/// End of the list of free slots.
const END: u64 = u64::MAX;

/// What a fetch reads and changes of a slot.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(super) struct Marks {
    /// The policy's: a clock or a count.
    pub(super) score: u32,
    /// How many want the row, in units of [`WANT`], and flags.
    word: u32,
}

impl Marks {
    /// [`DIRTY`] and [`BELOW`].
    pub(super) fn flags(self) -> u32 {
        self.word & (DIRTY | BELOW)
    }

    /// Whether the slot's row may be evicted.
    pub(super) fn idle(self) -> bool {
        self.word & !(DIRTY | BELOW) == TAKEN
    }

    /// Counts one more who wants the row; true for the first.
    #[inline(always)]
    fn want(&mut self) -> bool {
        let first = self.idle();
        self.word += WANT;
        first
    }

    /// Counts one less; true for the last.
    #[inline(always)]
    fn unwant(&mut self) -> bool {
        debug_assert!(self.word >= WANT | TAKEN, "nobody wants it");
        self.word -= WANT;
        self.idle()
    }
}

/// A row on its way between tiers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moving {
    pub(super) row: u64,
    /// [`DIRTY`] and [`BELOW`].
    pub(super) flags: u32,
    pub(super) wants: u32,
    pub(super) score: u32,
    /// See [`Tier::next`].
    pub(super) next: u32,
}

/// A slot, of which four share a cache line: what moves a row needs all of it.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Slot {
    /// The slot's row, or the next free slot.
    row: u64,
    marks: Marks,
}

/// Slots 0..capacity, each free or with a row.
pub(super) struct Tier {
    index: Index,            // row -> slot
    slots: HostBuffer<Slot>, // (capacity)
    /// When the row is next used, where the policy asks for it; 0 for not known.
    next: HostBuffer<u32>, // (capacity) or empty
    free: u64,               // first of the list of slots that had a row, or END
    unused: u64,             // slots from here on never had a row
    candidates: Candidates,
    pub(super) stats: TierStats,
}

/// Bytes a slot takes beside its row.
pub(super) fn overhead_bytes(policy: Policy) -> u64 {
    // Four ids of the index share a line of 64 bytes when it is full.
    16 + 8 + 8 + if policy == Policy::NextUse { 4 } else { 0 }
}

impl Tier {
    pub(super) fn new(capacity: u64, policy: Policy) -> Result<Self> {
        let index = Index::new(capacity)?;
        let slots = capacity as usize; // the index takes no more than 32 bits
        let next = if policy == Policy::NextUse { slots } else { 0 };
        Ok(Self {
            index,
            slots: HostBuffer::zeroed(slots)?,
            next: HostBuffer::zeroed(next)?,
            free: END,
            unused: 0,
            candidates: Candidates::default(),
            stats: TierStats { slots: capacity, ..TierStats::default() },
        })
    }

    pub(super) fn capacity(&self) -> u64 {
        self.index.capacity()
    }

    /// Slots that hold no row.
    pub(super) fn free(&self) -> u64 {
        self.index.capacity() - self.index.len()
    }

    /// One past the last slot that ever held a row.
    pub(super) fn used(&self) -> u64 {
        self.unused
    }

    pub(super) fn stats(&self) -> TierStats {
        TierStats { rows: self.index.len(), ..self.stats }
    }

    /// [`Index::find`].
    pub(super) fn find(&self, rows: &[u64], slots: &mut [u32]) {
        self.index.find(rows, slots);
    }

    pub(super) fn get(&self, row: u64) -> Option<u64> {
        self.index.get(row).map(u64::from)
    }

    pub(super) fn marks(&self, slot: u64) -> Marks {
        self.slots[slot as usize].marks
    }

    /// The row of a slot that has one.
    pub(super) fn row(&self, slot: u64) -> u64 {
        self.slots[slot as usize].row
    }

    /// Sets and clears flags of a slot.
    pub(super) fn flag(&mut self, slot: u64, set: u32, clear: u32) {
        let word = &mut self.slots[slot as usize].marks.word;
        *word = (*word & !clear) | set;
    }

    /// [`Tier::flag`] for all of them.
    pub(super) fn flag_all(&mut self, slots: &[u64], set: u32, clear: u32) {
        for (i, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(i + SLOT_AHEAD) {
                self.prefetch(ahead);
            }
            self.flag(slot, set, clear);
        }
    }

    /// Asks for a slot that will be read or changed soon; does nothing for what is no slot: the
    /// address of one far away would be looked up in page tables each time, in vain.
    #[inline(always)]
    pub(super) fn prefetch(&self, slot: u64) {
        if slot < self.unused {
            prefetch(&self.slots, slot as usize);
        }
    }

    /// Wants the row of a slot, used at `clock`; true if nobody did before.
    #[inline(always)]
    pub(super) fn want(&mut self, slot: u64, policy: Policy, clock: u32) -> bool {
        let marks = &mut self.slots[slot as usize].marks;
        marks.score = policy.touched(marks.score, clock);
        if policy == Policy::NextUse {
            let next = &mut self.next[slot as usize];
            if *next <= clock {
                *next = 0;
            }
        }
        marks.want()
    }

    /// Lets go of the row of a slot; true if nobody wants it now.
    #[inline(always)]
    pub(super) fn unwant(&mut self, slot: u64) -> bool {
        self.slots[slot as usize].marks.unwant()
    }

    /// Notes that the row of a slot is used at `at`, unless it is used before that.
    pub(super) fn hint(&mut self, slot: u64, clock: u32, at: u32) {
        if let Some(next) = self.next.get_mut(slot as usize)
            && (*next <= clock || *next > at)
        {
            *next = at;
        }
    }

    /// Gives a row a free slot.
    ///
    /// Errors: what the host says about memory.
    ///
    /// # Panics
    /// When there is no free slot.
    pub(super) fn insert(&mut self, moving: Moving) -> Result<u64> {
        let slot = if self.free == END { self.unused } else { self.free };
        self.index.insert(moving.row, slot as u32)?;
        if self.free == END {
            self.unused += 1;
        } else {
            self.free = self.row(slot);
            self.prefetch(self.free);
        }
        let word = TAKEN | moving.flags | (moving.wants * WANT);
        self.slots[slot as usize] =
            Slot { row: moving.row, marks: Marks { score: moving.score, word } };
        if let Some(next) = self.next.get_mut(slot as usize) {
            *next = moving.next;
        }
        Ok(slot)
    }

    /// Frees a slot that has a row.
    pub(super) fn remove(&mut self, slot: u64) -> Moving {
        let at = slot as usize;
        let Slot { row, marks } = self.slots[at];
        self.index.remove(row);
        self.slots[at] = Slot { row: self.free, marks: Marks { score: 0, word: 0 } };
        self.free = slot;
        Moving {
            row,
            flags: marks.flags(),
            wants: marks.word / WANT,
            score: marks.score,
            next: self.next.get(at).copied().unwrap_or(0),
        }
    }

    /// [`Tier::insert`] for all of them.
    pub(super) fn insert_all(&mut self, moving: &[Moving]) -> Result<Vec<u64>> {
        let mut slots = Vec::with_capacity(moving.len());
        for (i, &one) in moving.iter().enumerate() {
            if let Some(ahead) = moving.get(i + AHEAD) {
                self.index.prefetch(ahead.row);
            }
            if let Some(ahead) = moving.get(i + NEXT_AHEAD) {
                self.index.prefetch_next(ahead.row);
            }
            slots.push(self.insert(one)?);
        }
        Ok(slots)
    }

    /// [`Tier::remove`] for all of them.
    pub(super) fn remove_all(&mut self, slots: &[u64]) -> Vec<Moving> {
        let mut moving = Vec::with_capacity(slots.len());
        for (i, &slot) in slots.iter().enumerate() {
            if let Some(&ahead) = slots.get(i + SLOT_AHEAD) {
                self.prefetch(ahead);
            }
            if let Some(&ahead) = slots.get(i + AHEAD) {
                self.index.prefetch(self.row(ahead));
            }
            if let Some(&ahead) = slots.get(i + NEXT_AHEAD) {
                self.index.prefetch_next(self.row(ahead));
            }
            moving.push(self.remove(slot));
        }
        moving
    }

    /// Slots of `count` rows that nobody wants, or of all such rows if they are fewer: those that
    /// the policy would rather lose. They stay in the tier. See [`Candidates`].
    pub(super) fn victims(&mut self, count: usize, policy: Policy, clock: u32) -> Vec<u64> {
        let (slots, next) = (&self.slots[..self.unused as usize], &*self.next);
        let score = |slot: u32| {
            let (slot, marks) = (slot as usize, slots[slot as usize].marks);
            let next = next.get(slot).copied().unwrap_or(0);
            marks.idle().then(|| policy.score(marks.score, next, clock))
        };
        self.candidates.take(count, slots.len(), score)
    }

    /// Slots whose rows differ from the cold tier, from slot `from` on, at most `count`; and where
    /// to go on.
    pub(super) fn dirty(&self, from: u64, count: usize) -> (Vec<u64>, u64) {
        let mut slots = Vec::new();
        let mut slot = from;
        while slot < self.unused && slots.len() < count {
            if self.marks(slot).word & (TAKEN | DIRTY) == TAKEN | DIRTY {
                slots.push(slot);
            }
            slot += 1;
        }
        (slots, slot)
    }

    /// Changes all scores and next uses; candidates are chosen anew.
    pub(super) fn rescore(&mut self, score: impl Fn(u32) -> u32, next: impl Fn(u32) -> u32) {
        let used = self.unused as usize;
        for Slot { marks, .. } in &mut self.slots[..used] {
            marks.score = score(marks.score);
        }
        for at in self.next.iter_mut() {
            *at = next(*at);
        }
        self.candidates = Candidates::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moving(row: u64, score: u32) -> Moving {
        Moving { row, flags: DIRTY, wants: 0, score, next: 0 }
    }

    #[test]
    fn slots_are_used_again_and_rows_keep_what_moves_with_them() {
        let mut tier = Tier::new(3, Policy::Lru).unwrap();
        for row in [7, 8, 9] {
            tier.insert(Moving { wants: 2, flags: BELOW, ..moving(row, row as u32) }).unwrap();
        }
        assert_eq!((tier.free(), tier.used()), (0, 3));
        assert!(tier.victims(3, Policy::Lru, 10).is_empty(), "all are wanted");
        let slot = tier.get(8).unwrap();
        let gone = tier.remove(slot);
        assert_eq!((gone.row, gone.flags, gone.wants, gone.score), (8, BELOW, 2, 8));
        assert_eq!(tier.get(8), None);
        assert_eq!(tier.insert(moving(80, 1)).unwrap(), slot);
        assert_eq!(tier.row(slot), 80);
        assert_eq!(tier.victims(3, Policy::Lru, 10), [slot]);
        assert_eq!(tier.dirty(0, 9), (vec![slot], 3));
        assert!(tier.want(slot, Policy::Lru, 11));
        assert!(!tier.want(slot, Policy::Lru, 12));
        assert!(!tier.unwant(slot) && tier.unwant(slot));
        tier.flag(slot, BELOW, DIRTY);
        assert_eq!(tier.marks(slot).flags(), BELOW);
        assert_eq!(tier.remove(slot).score, 12);
    }

    #[test]
    fn a_hint_holds_until_its_use_and_the_nearest_wins() {
        let mut tier = Tier::new(2, Policy::NextUse).unwrap();
        let near = tier.insert(moving(1, 5)).unwrap();
        let far = tier.insert(moving(2, 5)).unwrap();
        tier.hint(near, 5, 9);
        tier.hint(near, 5, 7);
        tier.hint(near, 5, 8);
        tier.hint(far, 5, 9);
        assert_eq!(tier.victims(1, Policy::NextUse, 5), [far]);
        tier.want(near, Policy::NextUse, 7);
        tier.unwant(near);
        assert_eq!(tier.victims(1, Policy::NextUse, 7), [near], "its use is over");
    }
}
