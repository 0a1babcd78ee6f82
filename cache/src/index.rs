//! The index of a bounded set of ids: id -> slot, open addressing, found in batches.
//!
//! A line is one cache line: five keys and their five slots. A key is the hash of its id, and the
//! hash is a bijection: equal keys mean equal ids. Its home line is the key scaled to the number of
//! lines; when a line is full, the smallest key moves on to the next one. Keys thereby lie sorted
//! from large to small over all lines:
//!
//! ```text
//! line = home(key); while line.keys[4] > key { line += 1 }     at 0.8 load: 1.3 lines on average
//! lane = how many of line.keys[0..4] are larger than key       no branch
//! found = line.keys[lane] == key
//! ```
//!
//! An empty lane has key 0, smaller than all others, so an absent id costs no more than a present
//! one. Insertion pushes keys on, removal pulls them back: no tombstones, and the lines are a
//! function of the set of ids alone, whatever happened before.
//!
//! Memory: 16 bytes an id of the capacity, and none for pages that nobody wrote. The hash has no
//! secret: it spreads ids as they come in data, not ids made to collide. Such ids make the index
//! slow, never wrong.

use tessera_device::{HostBuffer, prefetch_l1};

use crate::{CacheError, Result};

/// Keys a line.
const LANES: usize = 5;

/// Ids a line when the index is full: a load of 0.8.
const IDS_PER_LINE: u64 = 4;

/// Lines after the last home line, for keys that full lines push on. The index grows if they
/// do not suffice.
const TAIL_LINES: usize = 16;

/// How many ids ahead of the one at hand lines are prefetched.
pub(crate) const AHEAD: usize = 16;

/// How many ids ahead the line after the home line is, where it is needed: the home line tells, and
/// has come by then. Every third id of a full index needs it, and nobody would have asked for it.
pub(crate) const NEXT_AHEAD: usize = 6;

/// Both odd, so that multiplying by them is a bijection; those of MurmurHash3's finaliser
/// (fmix64). They differ from splitmix64's, which chooses owners and rows of ids: ids that it put
/// together are spread here.
const MULTIPLIERS: [u64; 2] = [0xFF51_AFD7_ED55_8CCD, 0xC4CE_B9FE_1A85_EC53];

/// The id whose key is 0: any that is rare in data.
const ODD_ONE: u64 = 0x9E6C_63D0_676A_9A99;

/// One cache line: keys from large to small, the empty ones (0) last, and the slots' complements,
/// so that an empty lane reads as [`Index::NONE`].
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
struct Line {
    keys: [u64; LANES],
    slots: [u32; LANES],
    unused: u32,
}

const LINE_BYTES: u64 = size_of::<Line>() as u64;

/// A map from ids (any u64) to slots (up to 2^32 - 2), of bounded size.
pub(crate) struct Index {
    lines: HostBuffer<Line>, // homes, then the tail; the last one is empty
    homes: u64,
    capacity: u64,
    len: u64,
    /// The complement of the slot of [`ODD_ONE`], whose key is that of an empty lane.
    odd_one: u32,
}

impl Index {
    /// No slot.
    pub(crate) const NONE: u32 = u32::MAX;

    /// The largest capacity, in ids.
    pub(crate) const CAPACITY_MAX: u64 = u32::MAX as u64 - 1;

    /// An empty index for up to `capacity` ids.
    ///
    /// Errors: [`CacheError::IndexTooLarge`], or what the host says about memory.
    pub(crate) fn new(capacity: u64) -> Result<Self> {
        if capacity > Self::CAPACITY_MAX {
            return Err(CacheError::IndexTooLarge { capacity, max: Self::CAPACITY_MAX });
        }
        let homes = homes_for(capacity);
        // At most 2^30 + 16 lines: fits where the buffer does.
        let lines = HostBuffer::zeroed(homes as usize + TAIL_LINES)?;
        Ok(Self { lines, homes, capacity, len: 0, odd_one: 0 })
    }

    /// Bytes of the index.
    pub(crate) fn bytes(&self) -> u64 {
        self.lines.len() as u64 * LINE_BYTES
    }

    /// Ids in the index.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    /// Ids that the index may hold.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// Finds `ids` in one go: `slots[i]` becomes the slot of `ids[i]`, or [`Index::NONE`].
    ///
    /// # Panics
    /// When the lengths differ.
    pub(crate) fn find(&self, ids: &[u64], slots: &mut [u32]) {
        assert_eq!(ids.len(), slots.len(), "index: a slot for each id");
        find(&self.lines, self.homes, ids, slots);
        if self.odd_one != 0 {
            for (&id, slot) in ids.iter().zip(slots) {
                if id == ODD_ONE {
                    *slot = !self.odd_one;
                }
            }
        }
    }

    /// Asks for the line of an id that will be found, inserted or removed soon.
    #[inline(always)]
    pub(crate) fn prefetch(&self, id: u64) {
        prefetch(&self.lines, home(key_of(id), self.homes));
    }

    /// Asks for the line after that of an id that will be inserted or removed soon, if keys are
    /// pushed on to it. The id's own line is read.
    #[inline(always)]
    pub(crate) fn prefetch_next(&self, id: u64) {
        let at = home(key_of(id), self.homes);
        prefetch(&self.lines, at + usize::from(self.lines[at].keys[LANES - 1] != 0));
    }

    /// The slot of one id.
    pub(crate) fn get(&self, id: u64) -> Option<u32> {
        let mut slot = [Self::NONE];
        self.find(&[id], &mut slot);
        Some(slot[0]).filter(|&slot| slot != Self::NONE)
    }

    /// Gives `id` a slot and returns the one that it had.
    ///
    /// Errors: what the host says about memory, when crafted ids make the index grow; nothing has
    /// changed then.
    ///
    /// # Panics
    /// When `slot` is [`Index::NONE`], or a new id comes to an index that is full.
    pub(crate) fn insert(&mut self, id: u64, slot: u32) -> Result<Option<u32>> {
        let (stored, new) = self.stored(id, slot)?;
        let old = !std::mem::replace(stored, !slot);
        Ok(Some(old).filter(|_| !new))
    }

    /// The slot of `id`, which becomes `slot` if it has none.
    ///
    /// Errors and panics: as [`Index::insert`].
    pub(crate) fn get_or_insert(&mut self, id: u64, slot: u32) -> Result<u32> {
        Ok(!*self.stored(id, slot)?.0)
    }

    /// Where the complement of the slot of `id` lies, and whether it is new: `slot` then.
    fn stored(&mut self, id: u64, slot: u32) -> Result<(&mut u32, bool)> {
        assert_ne!(slot, Self::NONE, "index: no slot has this number");
        let key = key_of(id);
        let (at, lane) = place(&self.lines, self.homes, key);
        let known = if key == 0 { self.odd_one != 0 } else { self.lines[at].keys[lane] == key };
        if !known {
            assert!(self.len < self.capacity, "index: more than its {} ids", self.capacity);
            if key == 0 {
                self.odd_one = !slot;
            } else {
                let mut end = at;
                while self.lines[end].keys[LANES - 1] != 0 {
                    end += 1;
                }
                if end + 1 == self.lines.len() {
                    self.grow()?;
                }
                push(&mut self.lines[at..=end], lane, key, !slot);
            }
            self.len += 1;
        }
        let stored = if key == 0 { &mut self.odd_one } else { &mut self.lines[at].slots[lane] };
        Ok((stored, !known))
    }

    /// Gives each of `ids` its slot: [`Index::insert`] for all of them, with prefetching.
    ///
    /// Errors and panics: as [`Index::insert`]; ids before the one that failed are in.
    pub(crate) fn insert_all(&mut self, ids: &[u64], slots: &[u32]) -> Result<()> {
        assert_eq!(ids.len(), slots.len(), "index: a slot for each id");
        for (i, (&id, &slot)) in ids.iter().zip(slots).enumerate() {
            if let Some(&ahead) = ids.get(i + AHEAD) {
                self.prefetch(ahead);
            }
            if let Some(&ahead) = ids.get(i + NEXT_AHEAD) {
                self.prefetch_next(ahead);
            }
            self.insert(id, slot)?;
        }
        Ok(())
    }

    /// Forgets `id` and returns the slot that it had.
    pub(crate) fn remove(&mut self, id: u64) -> Option<u32> {
        let key = key_of(id);
        let slot = if key == 0 {
            !std::mem::take(&mut self.odd_one)
        } else {
            let (at, lane) = place(&self.lines, self.homes, key);
            if self.lines[at].keys[lane] != key {
                return None;
            }
            let slot = !self.lines[at].slots[lane];
            pull(&mut self.lines, self.homes, at, lane);
            slot
        };
        self.len -= u64::from(slot != Self::NONE);
        Some(slot).filter(|&slot| slot != Self::NONE)
    }

    /// Forgets all of `ids`, with prefetching; absent ones are ignored.
    pub(crate) fn remove_all(&mut self, ids: &[u64]) {
        for (i, &id) in ids.iter().enumerate() {
            if let Some(&ahead) = ids.get(i + AHEAD) {
                self.prefetch(ahead);
            }
            if let Some(&ahead) = ids.get(i + NEXT_AHEAD) {
                self.prefetch_next(ahead);
            }
            self.remove(id);
        }
    }

    /// Doubles the tail.
    fn grow(&mut self) -> Result<()> {
        let tail = self.lines.len() - self.homes as usize;
        let mut lines = HostBuffer::zeroed(self.lines.len() + tail)?;
        lines[..self.lines.len()].copy_from_slice(&self.lines);
        self.lines = lines;
        Ok(())
    }
}

impl std::fmt::Debug for Index {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Index({} of {} ids)", self.len, self.capacity)
    }
}

/// Home lines of an index for `capacity` ids.
fn homes_for(capacity: u64) -> u64 {
    capacity.div_ceil(IDS_PER_LINE).max(1)
}

/// The key of an id: a bijection whose high bits depend on all bits of the id.
#[inline(always)]
const fn key_of(id: u64) -> u64 {
    let x = (id ^ ODD_ONE).wrapping_mul(MULTIPLIERS[0]);
    (x ^ (x >> 32)).wrapping_mul(MULTIPLIERS[1])
}

/// The home line of a key: the largest keys are at home in the first line.
#[inline(always)]
const fn home(key: u64, homes: u64) -> usize {
    ((!key as u128 * homes as u128) >> 64) as usize
}

/// How many keys but the last are larger than `key`: the lane where it is, or would be if the
/// last is not larger.
#[inline(always)]
fn lane_of(line: &Line, key: u64) -> usize {
    line.keys[..LANES - 1].iter().map(|&other| usize::from(other > key)).sum()
}

/// Line and lane where `key` is, or where it would be inserted. The last line is empty, so the
/// search ends.
#[inline(always)]
fn place(lines: &[Line], homes: u64, key: u64) -> (usize, usize) {
    let mut at = home(key, homes);
    while lines[at].keys[LANES - 1] > key {
        at += 1;
    }
    (at, lane_of(&lines[at], key))
}

fn find(lines: &[Line], homes: u64, ids: &[u64], slots: &mut [u32]) {
    for &id in &ids[..ids.len().min(AHEAD)] {
        prefetch(lines, home(key_of(id), homes));
    }
    for (i, (&id, slot)) in ids.iter().zip(slots).enumerate() {
        if let Some(&ahead) = ids.get(i + AHEAD) {
            prefetch(lines, home(key_of(ahead), homes));
        }
        if let Some(&ahead) = ids.get(i + NEXT_AHEAD) {
            let key = key_of(ahead);
            let at = home(key, homes);
            prefetch(lines, at + usize::from(lines[at].keys[LANES - 1] > key));
        }
        let key = key_of(id);
        let (at, lane) = place(lines, homes, key);
        let line = &lines[at];
        // Key 0 finds an empty lane here, whose slot is NONE.
        *slot = if line.keys[lane] == key { !line.slots[lane] } else { Index::NONE };
    }
}

/// Puts a key at a lane of the first line, moving smaller ones on. The last line has room.
fn push(lines: &mut [Line], mut lane: usize, mut key: u64, mut slot: u32) {
    for line in lines {
        let (last_key, last_slot) = (line.keys[LANES - 1], line.slots[LANES - 1]);
        for lane in (lane..LANES - 1).rev() {
            line.keys[lane + 1] = line.keys[lane];
            line.slots[lane + 1] = line.slots[lane];
        }
        (line.keys[lane], line.slots[lane]) = (key, slot);
        // What leaves a line is larger than all of the next one.
        (lane, key, slot) = (0, last_key, last_slot);
    }
}

/// Takes the key at a lane out, pulling back the keys that full lines had pushed on.
fn pull(lines: &mut [Line], homes: u64, mut at: usize, lane: usize) {
    // A key past its home means that the line before it was full. The next line is not even looked
    // at after one that was not: it would have to come from memory.
    let mut full = lines[at].keys[LANES - 1] != 0;
    close(&mut lines[at], lane);
    while full && let Some(next) = lines.get_mut(at + 1) {
        let (key, slot) = (next.keys[0], next.slots[0]);
        if key == 0 || home(key, homes) > at {
            break;
        }
        full = next.keys[LANES - 1] != 0;
        close(next, 0);
        // Its last lane is free now.
        (lines[at].keys[LANES - 1], lines[at].slots[LANES - 1]) = (key, slot);
        at += 1;
    }
}

/// Takes the key at a lane out of its line.
fn close(line: &mut Line, lane: usize) {
    for lane in lane..LANES - 1 {
        line.keys[lane] = line.keys[lane + 1];
        line.slots[lane] = line.slots[lane + 1];
    }
    (line.keys[LANES - 1], line.slots[LANES - 1]) = (0, 0);
}

/// Asks for an element's cache line, which will be read soon.
#[inline(always)]
pub(crate) fn prefetch<T>(elements: &[T], at: usize) {
    prefetch_l1(elements.as_ptr().wrapping_add(at).cast());
}

#[cfg(test)]
mod tests;
