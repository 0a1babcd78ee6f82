//! Where each row's newest record lies: the log's index in memory.
//!
//! A place is a segment's number and a record's number in it, 8 bytes. A table whose rows are
//! numbered 0..n keeps an array of places by row: 8 bytes a row (46M rows: 368 MB), and pages of
//! rows that were never put take no memory. Any other table keeps a hash table of (id, place): 17
//! bytes an entry at 7/16 to 7/8 full, 20 to 39 bytes a row.
//!
//! Versions are not kept: segments are replayed in an order in which a row's newest record comes
//! last (see the module's page).

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use crate::{CacheError, Result};

/// A record: segment in the upper half, then a bit for tombstones, then the record's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Place(u64);

/// One past the largest record number in a segment.
pub(crate) const SLOTS_MAX: u64 = 1 << 31;

impl Place {
    /// Record `slot`, below [`SLOTS_MAX`], of segment `number`, which is never 0.
    pub fn new(number: u32, slot: u64, tombstone: bool) -> Self {
        debug_assert!(number > 0 && slot < SLOTS_MAX);
        Self(u64::from(number) << 32 | u64::from(tombstone) << 31 | slot)
    }

    pub fn segment(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub fn slot(self) -> u64 {
        self.0 & (SLOTS_MAX - 1)
    }

    pub fn is_tombstone(self) -> bool {
        self.0 & SLOTS_MAX != 0
    }
}

/// Places by row.
#[derive(Debug)]
pub(crate) enum Places {
    /// `places[row]`; 0 for none.
    Dense(Vec<u64>),
    /// Any ids.
    Hashed { table: HashTable<(u64, Place)>, hasher: DefaultHashBuilder },
}

impl Places {
    /// For rows 0..n, or for any ids.
    pub fn new(rows: Option<u64>) -> Result<Self> {
        let Some(rows) = rows else {
            return Ok(Self::Hashed { table: HashTable::new(), hasher: Default::default() });
        };
        let length = usize::try_from(rows).ok().filter(|&rows| rows <= isize::MAX as usize / 8);
        let length = length.ok_or(CacheError::Options {
            faults: format!("rows = {rows} exceed the address space"),
        })?;
        // Zeroed pages come from the system untouched.
        Ok(Self::Dense(vec![0; length]))
    }

    /// Whether a row can be kept here.
    pub fn check(&self, operation: &'static str, row: u64) -> Result<()> {
        match self {
            Self::Dense(places) if row >= places.len() as u64 => {
                Err(CacheError::NoSuchRow { operation, row, rows: places.len() as u64 })
            }
            _ => Ok(()),
        }
    }

    pub fn get(&self, row: u64) -> Option<Place> {
        match self {
            Self::Dense(places) => {
                let place = usize::try_from(row).ok().and_then(|row| places.get(row));
                place.copied().filter(|&place| place != 0).map(Place)
            }
            Self::Hashed { table, hasher } => {
                table.find(hasher.hash_one(row), |entry| entry.0 == row).map(|entry| entry.1)
            }
        }
    }

    /// Puts a row, checked before, at a place; gives the one it had.
    pub fn set(&mut self, row: u64, place: Place) -> Option<Place> {
        match self {
            Self::Dense(places) => {
                let old = std::mem::replace(&mut places[row as usize], place.0);
                (old != 0).then_some(Place(old))
            }
            Self::Hashed { table, hasher } => {
                let hash = hasher.hash_one(row);
                match table.find_mut(hash, |entry| entry.0 == row) {
                    Some(entry) => Some(std::mem::replace(&mut entry.1, place)),
                    None => {
                        table.insert_unique(hash, (row, place), |entry| hasher.hash_one(entry.0));
                        None
                    }
                }
            }
        }
    }

    /// Forgets a row.
    pub fn clear(&mut self, row: u64) {
        match self {
            Self::Dense(places) => places[row as usize] = 0,
            Self::Hashed { table, hasher } => {
                if let Ok(entry) = table.find_entry(hasher.hash_one(row), |entry| entry.0 == row) {
                    entry.remove();
                }
            }
        }
    }

    /// Calls `visit` with every place.
    pub fn for_each(&self, mut visit: impl FnMut(Place)) {
        match self {
            Self::Dense(places) => {
                places.iter().filter(|&&place| place != 0).for_each(|&place| visit(Place(place)));
            }
            Self::Hashed { table, .. } => table.iter().for_each(|entry| visit(entry.1)),
        }
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> u64 {
        match self {
            Self::Dense(places) => places.len() as u64 * 8,
            Self::Hashed { table, .. } => table.allocation_size() as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn both_kinds_are_maps(
            steps in prop::collection::vec((0u64..40, 1u32..5, 0u64..9, any::<u8>()), 0..200),
        ) {
            let mut model: HashMap<u64, Place> = HashMap::new();
            let mut dense = Places::new(Some(40)).unwrap();
            let mut hashed = Places::new(None).unwrap();
            for (row, number, slot, choice) in steps {
                if choice % 3 == 0 {
                    model.remove(&row);
                    dense.clear(row);
                    hashed.clear(row);
                } else {
                    let place = Place::new(number, slot, choice % 3 == 1);
                    let old = model.insert(row, place);
                    prop_assert_eq!(dense.set(row, place), old);
                    prop_assert_eq!(hashed.set(row, place), old);
                }
                for row in 0..42 {
                    prop_assert_eq!(dense.get(row), model.get(&row).copied());
                    prop_assert_eq!(hashed.get(row), model.get(&row).copied());
                }
            }
        }
    }

    #[test]
    fn a_place_keeps_its_parts_at_their_largest() {
        let place = Place::new(u32::MAX, SLOTS_MAX - 1, true);
        assert_eq!((place.segment(), place.slot()), (u32::MAX, SLOTS_MAX - 1));
        assert!(place.is_tombstone());
        assert!(!Place::new(1, SLOTS_MAX - 1, false).is_tombstone());
    }

    #[test]
    fn rows_beyond_the_table_are_errors_and_absent() {
        let places = Places::new(Some(3)).unwrap();
        let error = places.check("put", 3).unwrap_err().to_string();
        assert_eq!(error, "row log: put: row 3 is out of range: the table has 3 rows");
        assert_eq!(places.get(u64::MAX), None);
        assert!(Places::new(None).unwrap().check("put", u64::MAX).is_ok());
        assert!(Places::new(Some(u64::MAX)).is_err());
        assert_eq!(places.bytes(), 24);
    }
}
