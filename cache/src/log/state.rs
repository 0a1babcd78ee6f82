//! What readers and writers share: the index, the segments, the records not yet in a file.

use std::collections::HashMap;
use std::sync::Arc;

use super::format::Geometry;
use super::places::{Place, Places};
use super::segment::{Seal, Segment};

/// How many index entries point into a segment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Live {
    /// Rows and tombstones.
    pub entries: u64,
    /// Tombstones alone.
    pub tombstones: u64,
}

/// A sealed segment.
#[derive(Debug)]
pub(crate) struct Held {
    pub segment: Arc<Segment>,
    pub seal: Seal,
    pub live: Live,
}

/// The segment that is being appended to.
#[derive(Debug)]
pub(crate) struct Open {
    pub segment: Arc<Segment>,
    pub live: Live,
    /// Records appended.
    pub slots: u64,
    /// Records that are in the file.
    pub written: u64,
    /// Bytes of the file from `pending_at` on that are not in it yet. Only the writer changes
    /// them; it writes them to the file from a second handle, so that gets go on meanwhile.
    pub pending: Arc<Vec<u8>>,
    pub pending_at: u64,
}

impl Open {
    pub fn number(&self) -> u32 {
        self.segment.header.number
    }

    /// A record that is not in the file yet.
    pub fn pending_record(&self, geometry: &Geometry, slot: u64) -> &[u8] {
        let at = (geometry.offset(slot) - self.pending_at) as usize;
        &self.pending[at..at + geometry.record_bytes]
    }
}

/// Everything under the log's read-write lock.
#[derive(Debug)]
pub(crate) struct State {
    pub places: Places,
    pub held: HashMap<u32, Held>,
    pub open: Option<Open>,
    /// Rows held.
    pub rows: u64,
    /// Bytes of segments that compaction is making.
    pub making_bytes: u64,
}

impl State {
    pub fn new(places: Places) -> Self {
        Self { places, held: HashMap::new(), open: None, rows: 0, making_bytes: 0 }
    }

    fn live(&mut self, segment: u32) -> Option<&mut Live> {
        match &mut self.open {
            Some(open) if open.number() == segment => Some(&mut open.live),
            _ => self.held.get_mut(&segment).map(|held| &mut held.live),
        }
    }

    /// Moves a row, or its tombstone, to a place in a segment that is here.
    pub fn set(&mut self, row: u64, place: Place) {
        let old = self.places.set(row, place);
        self.left(old);
        if let Some(live) = self.live(place.segment()) {
            live.entries += 1;
            live.tombstones += u64::from(place.is_tombstone());
        }
        self.rows += u64::from(!place.is_tombstone());
    }

    /// Forgets a row's tombstone.
    pub fn clear(&mut self, row: u64) {
        let old = self.places.get(row);
        self.places.clear(row);
        self.left(old);
    }

    /// Counts rows and live records anew from the index.
    pub fn recount(&mut self) {
        let mut live: HashMap<u32, Live> = HashMap::new();
        self.rows = 0;
        self.places.for_each(|place| {
            let live = live.entry(place.segment()).or_default();
            live.entries += 1;
            live.tombstones += u64::from(place.is_tombstone());
            self.rows += u64::from(!place.is_tombstone());
        });
        for (number, held) in &mut self.held {
            held.live = live.get(number).copied().unwrap_or_default();
        }
    }

    fn left(&mut self, old: Option<Place>) {
        let Some(old) = old else { return };
        if let Some(live) = self.live(old.segment()) {
            live.entries -= 1;
            live.tombstones -= u64::from(old.is_tombstone());
        }
        self.rows -= u64::from(!old.is_tombstone());
    }

    /// Bytes of all files, what is not written yet included.
    pub fn file_bytes(&self, geometry: &Geometry) -> u64 {
        let held: u64 = self.held.values().map(|held| held.seal.bytes).sum();
        let open = self.open.as_ref().map_or(0, |open| geometry.end(open.slots));
        held + open + self.making_bytes
    }
}
