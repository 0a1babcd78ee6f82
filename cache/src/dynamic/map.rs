//! The map: a batch of ids in, rows out.

use super::admission::{Gate, refuse};
use super::rows::{Entry, Rows};
use super::shortlist::{Candidate, Score, Shortlist};
use super::{Eviction, IdMapOptions, IdRow, Resolved};
use crate::index::{AHEAD, Index};
use crate::{CacheError, Result};

/// Ids that are found together: their slots stay in the first cache.
const CHUNK: usize = 1024;

/// Raw ids to rows `0..capacity` of a row store.
///
/// One batch a call, one call after another; [`IdMap::find`] may run on several threads. The
/// owner resets the rows in [`Resolved::admitted`] before the batch reads them, and after all
/// earlier batches have updated theirs: a row that an earlier batch used may have a new id.
#[derive(Debug)]
pub struct IdMap {
    pub(super) options: IdMapOptions,
    pub(super) index: Index,
    pub(super) rows: Rows,
    pub(super) gate: Gate,
    shortlist: Shortlist,
    /// The last training step, and the rows seen in it.
    pub(super) step: u64,
    pub(super) seen: u64,
    /// A batch ended half way.
    failed: bool,
}

impl IdMap {
    /// What stands for the row of an id that has none.
    pub const NONE: u64 = u64::MAX;

    /// A map without ids.
    ///
    /// Errors: [`CacheError::IdMapOption`] for options that cannot be,
    /// [`CacheError::IndexTooLarge`] for more than 2^32 - 2 rows, or what the host says about
    /// memory.
    pub fn new(options: IdMapOptions) -> Result<Self> {
        let capacity = options.capacity;
        if capacity == 0 {
            return Err(refuse("capacity", capacity, "it must be at least 1"));
        }
        Ok(Self {
            options,
            index: Index::new(capacity)?,
            rows: Rows::new(capacity)?,
            gate: Gate::new(options.admission, options.seed)?,
            shortlist: Shortlist::default(),
            step: 0,
            seen: 0,
            failed: false,
        })
    }

    /// Its options.
    #[must_use]
    pub fn options(&self) -> &IdMapOptions {
        &self.options
    }

    /// Rows in use.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.rows.len()
    }

    /// Whether no row is in use.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory, pages that were never written included: 40 a row of the capacity, up to
    /// 10 more for lists of free rows and of rows that go first, and the sketch's counters.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.index.bytes() + self.rows.bytes() + self.shortlist.bytes() + self.gate.bytes()
    }

    /// Finds the rows of `ids`, [`IdMap::NONE`] for those that have none. Changes nothing.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn find(&self, ids: &[u64], rows: &mut [u64]) {
        assert_eq!(ids.len(), rows.len(), "dynamic table: a row for each id");
        let mut slots = [0; CHUNK];
        for (ids, rows) in ids.chunks(CHUNK).zip(rows.chunks_mut(CHUNK)) {
            let slots = &mut slots[..ids.len()];
            self.index.find(ids, slots);
            widen(slots, rows);
        }
    }

    /// Gives the ids of a batch, which may repeat, their rows. In training, ids are touched,
    /// counted, admitted and evicted; otherwise nothing changes, whatever the step. Nothing depends
    /// on the order of the ids, so that batches put together from several ranks do the same.
    ///
    /// An id has one row in the whole batch: if it is admitted at any of its occurrences, all of
    /// them have the row.
    ///
    /// Errors: [`CacheError::IdMapStep`] for a training step before the last one, before anything
    /// has changed; what the host says about memory, after which the map refuses all training
    /// ([`CacheError::IdMapFailed`]).
    pub fn resolve(&mut self, ids: &[u64], step: u64, training: bool) -> Result<Resolved> {
        if training {
            return self.train(ids, None, step);
        }
        let mut resolved = Resolved { rows: vec![Self::NONE; ids.len()], ..Resolved::default() };
        self.find(ids, &mut resolved.rows);
        let misses = resolved.rows.iter().filter(|&&row| row == Self::NONE);
        resolved.stats.misses = misses.count() as u64;
        resolved.stats.hits = ids.len() as u64 - resolved.stats.misses;
        resolved.stats.occupancy = self.len();
        Ok(resolved)
    }

    /// As [`IdMap::resolve`] in training, where `ids[i]` stands for `counts[i]` occurrences.
    ///
    /// Errors: as there.
    ///
    /// # Panics
    /// When the lengths differ.
    pub fn resolve_counted(&mut self, ids: &[u64], counts: &[u64], step: u64) -> Result<Resolved> {
        assert_eq!(ids.len(), counts.len(), "dynamic table: a count for each id");
        self.train(ids, Some(counts), step)
    }

    /// A batch of training; an id without a count occurs once.
    fn train(&mut self, ids: &[u64], counts: Option<&[u64]>, step: u64) -> Result<Resolved> {
        let mut resolved = Resolved { rows: vec![Self::NONE; ids.len()], ..Resolved::default() };
        self.begin(step)?;
        let misses = self.touch(ids, counts, &mut resolved.rows);
        let total = counts.map_or(ids.len() as u64, |counts| counts.iter().sum());
        let missed = counts.map(|counts| misses.iter().map(|&at| counts[at]).sum());
        resolved.stats.misses = missed.unwrap_or(misses.len() as u64);
        resolved.stats.hits = total - resolved.stats.misses;
        if !misses.is_empty() {
            self.failed = true;
            self.admit(ids, counts, &misses, &mut resolved)?;
            self.failed = false;
        }
        resolved.stats.occupancy = self.len();
        Ok(resolved)
    }

    /// A step begins or ends: evicts the ids that [`Eviction::Age`] finds too old at `step`,
    /// those seen longest ago first. Other policies evict nothing here.
    ///
    /// Errors: as [`IdMap::resolve`].
    pub fn advance(&mut self, step: u64) -> Result<Vec<IdRow>> {
        self.begin(step)?;
        let Eviction::Age { steps } = self.options.eviction else { return Ok(Vec::new()) };
        let limit = step.saturating_sub(steps);
        let old = self.shortlist.release_below(&mut self.rows, Score::SeenStep, limit);
        Ok(self.forget(&old))
    }

    /// A training step, the last one or a later one.
    fn begin(&mut self, step: u64) -> Result<()> {
        let last = self.step;
        if self.failed {
            return Err(CacheError::IdMapFailed { step: last });
        }
        if step < last {
            return Err(CacheError::IdMapStep { step, last });
        }
        if let Eviction::Lfu { halve_every_steps: period @ 1.. } = self.options.eviction {
            let times = step / period - last / period;
            if times > 0 {
                self.rows.halve(times);
                self.shortlist.clear();
            }
        }
        if step > last {
            (self.step, self.seen) = (step, 0);
        }
        Ok(())
    }

    /// Finds the rows of known ids and notes that they were seen. Returns the places of the
    /// others.
    fn touch(&mut self, ids: &[u64], counts: Option<&[u64]>, rows: &mut [u64]) -> Vec<usize> {
        let mut misses = Vec::new();
        let mut slots = [0; CHUNK];
        for (start, ids) in (0..).step_by(CHUNK).zip(ids.chunks(CHUNK)) {
            let slots = &mut slots[..ids.len()];
            self.index.find(ids, slots);
            let end = start + ids.len();
            let counts = counts.map(|counts| &counts[start..end]);
            let (hits, first) = self.rows.touch(slots, counts, self.step);
            self.seen += first;
            widen(slots, &mut rows[start..end]);
            if hits < ids.len() as u64 {
                let missing = slots.iter().enumerate().filter(|&(_, &slot)| slot == Index::NONE);
                misses.extend(missing.map(|(i, _)| start + i));
            }
        }
        misses
    }

    /// Decides on the ids without a row, which are at the places `misses` of `ids`.
    fn admit(
        &mut self,
        ids: &[u64],
        counts: Option<&[u64]>,
        misses: &[usize],
        resolved: &mut Resolved,
    ) -> Result<()> {
        let new = NewIds::new(ids, counts, misses)?;
        let mut wanted = new.ascending();
        wanted.retain(|&ordinal| {
            let (id, occurrences) = (new.ids[ordinal as usize], new.occurrences[ordinal as usize]);
            self.gate.sighted(id, occurrences, self.step)
        });
        resolved.stats.rejected = (new.ids.len() - wanted.len()) as u64;

        let missing = (wanted.len() as u64).saturating_sub(self.rows.free());
        resolved.evicted = self.make_room(missing);
        resolved.stats.evicted = resolved.evicted.len() as u64;
        resolved.stats.overflow = missing - resolved.stats.evicted;
        wanted.truncate(wanted.len() - resolved.stats.overflow as usize);
        resolved.stats.admitted = wanted.len() as u64;

        let (mut given_ids, mut given_rows) = (Vec::new(), Vec::new());
        let mut row_of = vec![Self::NONE; new.ids.len()];
        for ordinal in wanted {
            let id = new.ids[ordinal as usize];
            let occurrences = new.occurrences[ordinal as usize];
            let entry = Entry { id, seen_step: self.step, occurrences };
            let row = self.rows.take(entry);
            if let Some(score) = self.score() {
                self.shortlist.add(Candidate { score: score.of(&entry), id, row }, self.rows.len());
            }
            given_ids.push(id);
            given_rows.push(row);
            row_of[ordinal as usize] = row.into();
            resolved.admitted.push(IdRow { id, row: row.into() });
        }
        self.seen += resolved.stats.admitted;
        self.index.insert_all(&given_ids, &given_rows)?;
        for (&at, &ordinal) in misses.iter().zip(&new.ordinals) {
            resolved.rows[at] = row_of[ordinal as usize];
        }
        Ok(())
    }

    /// Evicts as many ids as the policy allows, up to `count`.
    fn make_room(&mut self, count: u64) -> Vec<IdRow> {
        let Some(score) = self.score_when_full() else { return Vec::new() };
        let count = count.min(self.rows.len() - self.seen);
        let rows = &mut self.rows;
        let lowest = self.shortlist.release_lowest(rows, score, count, self.step, self.seen);
        self.forget(&lowest)
    }

    /// What the policy goes by.
    fn score(&self) -> Option<Score> {
        match self.options.eviction {
            Eviction::None => None,
            Eviction::Age { .. } | Eviction::Lru => Some(Score::SeenStep),
            Eviction::Lfu { .. } => Some(Score::Occurrences),
        }
    }

    /// What a policy goes by that makes room when the table is full.
    pub(super) fn score_when_full(&self) -> Option<Score> {
        match self.options.eviction {
            Eviction::None | Eviction::Age { .. } => None,
            Eviction::Lru | Eviction::Lfu { .. } => self.score(),
        }
    }

    /// Takes ids whose rows are free already out of the index.
    fn forget(&mut self, gone: &[Candidate]) -> Vec<IdRow> {
        let ids: Vec<u64> = gone.iter().map(|candidate| candidate.id).collect();
        self.index.remove_all(&ids);
        gone.iter().map(|gone| IdRow { id: gone.id, row: gone.row.into() }).collect()
    }
}

/// The distinct ids at some places of a batch, in order of first occurrence.
struct NewIds {
    ids: Vec<u64>,
    occurrences: Vec<u64>,
    /// For each place, which of the ids is there.
    ordinals: Vec<u32>,
}

impl NewIds {
    fn new(batch: &[u64], counts: Option<&[u64]>, places: &[usize]) -> Result<Self> {
        let mut index = Index::new(places.len() as u64)?;
        let mut ids = Vec::with_capacity(places.len());
        let mut occurrences = Vec::with_capacity(places.len());
        let mut ordinals = Vec::with_capacity(places.len());
        for (i, &place) in places.iter().enumerate() {
            let id = batch[place];
            if let Some(&ahead) = places.get(i + AHEAD) {
                index.prefetch(batch[ahead]);
            }
            // Fewer than the index's capacity, which fits 32 bits.
            let next = ids.len() as u32;
            let ordinal = index.get_or_insert(id, next)?;
            if ordinal == next {
                ids.push(id);
                occurrences.push(0);
            }
            let count = counts.map_or(1, |counts| counts[place]);
            occurrences[ordinal as usize] += count;
            ordinals.push(ordinal);
        }
        Ok(Self { ids, occurrences, ordinals })
    }

    /// Their ordinals, by ascending id.
    fn ascending(&self) -> Vec<u32> {
        let mut order: Vec<(u64, u32)> = self.ids.iter().copied().zip(0..).collect();
        order.sort_unstable();
        order.into_iter().map(|(_, ordinal)| ordinal).collect()
    }
}

fn widen(slots: &[u32], rows: &mut [u64]) {
    for (row, &slot) in rows.iter_mut().zip(slots) {
        *row = if slot == Index::NONE { IdMap::NONE } else { slot.into() };
    }
}
