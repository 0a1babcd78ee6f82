//! A map as plain arrays, for checkpoints, and back: into the same map or dealt to other ranks.

use super::admission::refuse;
use super::rows::Entry;
use super::shortlist::Candidate;
use super::{IdMap, IdMapOptions, SketchShape, owner_of};
use crate::{CacheError, Result};

/// All that an [`IdMap`] knows, one element an id, sorted by id. Nothing else has to be kept:
/// random admission is a function of (seed, id, step).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct IdMapState {
    /// Ids that have a row, ascending.
    pub ids: Vec<u64>,
    /// Their rows.
    pub rows: Vec<u64>,
    /// Steps in which they were last seen.
    pub seen_steps: Vec<u64>,
    /// How often they were seen (halved now and then), at least 1.
    pub occurrences: Vec<u64>,
    /// The last training step.
    pub step: u64,
    /// Sightings of the others, where admission counts them.
    pub sketch: Option<SketchState>,
}

/// The counters of a sketch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SketchState {
    /// Its size.
    pub shape: SketchShape,
    /// Sightings since all counters were last halved.
    pub sightings: u64,
    /// The counters, (depth, width).
    pub cells: Vec<u8>,
}

/// A rank's share of the ids of several maps.
#[derive(Debug)]
pub struct Dealt {
    /// The rank's map: its ids have rows 0, 1, ... in ascending order.
    pub map: IdMap,
    /// Where the rows come from, by ascending `to_row`.
    pub moves: Vec<Move>,
    /// Ids that had to go because the capacity is smaller than the share, lowest score first.
    pub evicted: Vec<u64>,
}

/// A row that is another one now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// The id.
    pub id: u64,
    /// Which of the maps it was in.
    pub part: usize,
    /// Its row there.
    pub from_row: u64,
    /// Its row now.
    pub to_row: u64,
}

impl IdMap {
    /// The map as plain arrays.
    #[must_use]
    pub fn export(&self) -> IdMapState {
        let mut order: Vec<(u64, u32)> =
            self.rows.iter().map(|(row, entry)| (entry.id, row)).collect();
        order.sort_unstable();
        let entries = || order.iter().map(|&(_, row)| self.rows.get(row));
        IdMapState {
            ids: order.iter().map(|&(id, _)| id).collect(),
            rows: order.iter().map(|&(_, row)| row.into()).collect(),
            seen_steps: entries().map(|entry| entry.seen_step).collect(),
            occurrences: entries().map(|entry| entry.occurrences).collect(),
            step: self.step,
            sketch: self.gate.state(),
        }
    }

    /// The map that was exported: with the same options, it goes on as if nothing had happened.
    /// Every id keeps its row, so the capacity may be larger, and smaller only if no row is
    /// beyond it ([`IdMap::deal`] gives rows anew). A sketch is taken over where admission
    /// counts; without one, counts begin at zero.
    ///
    /// Errors: [`CacheError::IdMapState`] for arrays that are no map, a row beyond the capacity or
    /// a sketch of another size; otherwise as [`IdMap::new`].
    pub fn import(options: IdMapOptions, state: &IdMapState) -> Result<Self> {
        check(state)?;
        let mut map = Self::new(options)?;
        map.step = state.step;
        for (i, &row) in state.rows.iter().enumerate() {
            let id = state.ids[i];
            if row >= options.capacity {
                return Err(wrong(format!(
                    "id {id} has row {row}, beyond the capacity of {}; raise the capacity, or \
                     deal the ids, which gives them other rows",
                    options.capacity
                )));
            }
            // Below the capacity, which fits 32 bits.
            let row = row as u32;
            if !map.rows.get(row).is_free() {
                let other = map.rows.get(row).id;
                return Err(wrong(format!("ids {other} and {id} have the same row {row}")));
            }
            map.put(row, entry(state, i))?;
        }
        map.rows.find_free();
        map.gate.load(state.sketch.iter())?;
        Ok(map)
    }

    /// The share of `rank` of `ranks` in the ids of several maps, such as those of all ranks of
    /// an earlier run: the ids whose [`owner_of`] it is. Rows are given anew. Where the share is
    /// larger than the capacity, the policies that evict when full (lru, lfu) keep the highest
    /// scores; with the others it is an error. Each new sketch has, counter by counter, the
    /// largest of the old ones, so that no id is admitted late.
    ///
    /// Errors: [`CacheError::IdMapShare`] with the numbers; [`CacheError::IdMapState`] for arrays
    /// that are no map, an id in two of them or sketches of another size; otherwise as
    /// [`IdMap::new`].
    pub fn deal(
        options: IdMapOptions,
        parts: &[IdMapState],
        rank: u64,
        ranks: u64,
    ) -> Result<Dealt> {
        if rank >= ranks {
            return Err(refuse("rank", rank, "it must be below the number of ranks"));
        }
        let mut map = Self::new(options)?;
        map.gate.load(parts.iter().filter_map(|part| part.sketch.as_ref()))?;
        map.step = parts.iter().map(|part| part.step).max().unwrap_or(0);
        let mut share = Vec::new();
        for (part, state) in parts.iter().enumerate() {
            check(state)?;
            let own = (0..state.ids.len()).filter(|&i| owner_of(state.ids[i], ranks) == rank);
            share.extend(own.map(|i| (entry(state, i), part, state.rows[i])));
        }
        let evicted = map.keep_highest(&mut share, rank)?;
        share.sort_unstable_by_key(|&(entry, part, _)| (entry.id, part));
        if let Some(two) = share.windows(2).find(|two| two[0].0.id == two[1].0.id) {
            let (id, first, second) = (two[0].0.id, two[0].1, two[1].1);
            return Err(wrong(format!("id {id} is in parts {first} and {second}")));
        }
        let mut moves = Vec::with_capacity(share.len());
        for (row, (entry, part, from_row)) in (0u32..).zip(share) {
            map.put(row, entry)?;
            moves.push(Move { id: entry.id, part, from_row, to_row: row.into() });
        }
        Ok(Dealt { map, moves, evicted })
    }

    /// Takes from a share what exceeds the capacity and returns the ids, lowest score first.
    fn keep_highest(&self, share: &mut Vec<(Entry, usize, u64)>, rank: u64) -> Result<Vec<u64>> {
        let (ids, capacity) = (share.len() as u64, self.options.capacity);
        let excess = ids.saturating_sub(capacity) as usize;
        if excess == 0 {
            return Ok(Vec::new());
        }
        let score = self.score_when_full();
        let score = score.ok_or(CacheError::IdMapShare { rank, ids, capacity })?;
        let order = |&(entry, _, _): &(Entry, usize, u64)| Candidate {
            score: score.of(&entry),
            id: entry.id,
            row: 0,
        };
        share.sort_unstable_by_key(order);
        Ok(share.drain(..excess).map(|(entry, _, _)| entry.id).collect())
    }

    /// Gives an id a row that is free.
    fn put(&mut self, row: u32, entry: Entry) -> Result<()> {
        self.index.insert(entry.id, row)?;
        self.rows.place(row, entry);
        self.seen += u64::from(entry.seen_step == self.step);
        Ok(())
    }
}

/// What must hold of the arrays of a map.
fn check(state: &IdMapState) -> Result<()> {
    let IdMapState { ids, rows, seen_steps, occurrences, step, .. } = state;
    let lengths = [ids.len(), rows.len(), seen_steps.len(), occurrences.len()];
    if lengths.iter().any(|&length| length != ids.len()) {
        return Err(wrong(format!(
            "ids, rows, seen_steps and occurrences have {lengths:?} elements; they must have as many"
        )));
    }
    if let Some(two) = ids.windows(2).find(|two| two[0] >= two[1]) {
        return Err(wrong(format!("id {} comes before {}; ids must ascend", two[0], two[1])));
    }
    if let Some(i) = occurrences.iter().position(|&count| count == 0) {
        return Err(wrong(format!("id {} has 0 occurrences; a row has at least 1", ids[i])));
    }
    if let Some(i) = seen_steps.iter().position(|seen| seen > step) {
        return Err(wrong(format!(
            "id {} was seen in step {}, after the last step {step}",
            ids[i], seen_steps[i]
        )));
    }
    Ok(())
}

fn entry(state: &IdMapState, i: usize) -> Entry {
    Entry { id: state.ids[i], seen_step: state.seen_steps[i], occurrences: state.occurrences[i] }
}

fn wrong(reason: String) -> CacheError {
    CacheError::IdMapState { reason }
}
