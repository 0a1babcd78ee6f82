//! Reading rows: places and pending records under the state's lock, files without it.

use std::collections::HashMap;
use std::sync::Arc;

use super::format::{Geometry, Kind, decode};
use super::inner::{Inner, read};
use super::places::Place;
use super::read::{SegmentReader, Wanted};
use super::segment::Segment;
use crate::{CacheError, PlanesMut, Result};

/// As [`crate::ColdRows::get`]; lengths were checked.
pub(crate) fn get(
    inner: &Inner,
    rows: &[u64],
    to: &mut PlanesMut<'_>,
    found: &mut [bool],
) -> Result<()> {
    let geometry = &inner.geometry;
    let mut places: Vec<(Place, usize)> = Vec::with_capacity(rows.len());
    // Segments stay readable as long as somebody holds them, also when compaction deletes their
    // files meanwhile.
    let mut segments: HashMap<u32, Arc<Segment>> = HashMap::new();
    let mut taken = 0;
    {
        let state = read(&inner.state);
        for (index, (&row, found)) in rows.iter().zip(found.iter_mut()).enumerate() {
            let place = state.places.get(row).filter(|place| !place.is_tombstone());
            *found = place.is_some();
            let Some(place) = place else { continue };
            let number = place.segment();
            if let Some(open) = state.open.as_ref().filter(|open| open.number() == number) {
                if place.slot() >= open.written {
                    copy(geometry, open.pending_record(geometry, place.slot()), index, to);
                    taken += 1;
                    continue;
                }
                segments.entry(number).or_insert_with(|| open.segment.clone());
            } else if let Some(held) = state.held.get(&number) {
                segments.entry(number).or_insert_with(|| held.segment.clone());
            }
            places.push((place, index));
        }
    }
    let (read, bytes) = read_places(&*inner.reader, geometry, places, &segments, rows, to)?;
    taken += read;
    // A row that the index has and nobody handed over must not pass for one that was read.
    assert_eq!(taken, found.iter().filter(|&&found| found).count(), "rows read");
    inner.counters.rows_read.add(taken as u64);
    inner.counters.get_bytes.add(bytes);
    Ok(())
}

/// Copies the records at `places`, each with its position among `rows`, from their segments; gives
/// how many there were and the bytes read.
pub(crate) fn read_places(
    reader: &dyn SegmentReader,
    geometry: &Geometry,
    mut places: Vec<(Place, usize)>,
    segments: &HashMap<u32, Arc<Segment>>,
    rows: &[u64],
    to: &mut PlanesMut<'_>,
) -> Result<(usize, u64)> {
    places.sort_unstable();
    let wanted: Vec<Wanted<'_>> = places
        .iter()
        .filter_map(|&(place, index)| {
            let segment = segments.get(&place.segment())?;
            Some(Wanted { segment, slot: place.slot(), index })
        })
        .collect();
    let mut taken = 0;
    let bytes = reader.read(geometry, &wanted, &mut |wanted, bytes| {
        check(geometry, wanted, rows[wanted.index], bytes)?;
        copy(geometry, bytes, wanted.index, to);
        taken += 1;
        Ok(())
    })?;
    Ok((taken, bytes))
}

/// The record must be sound and the row's.
fn check(geometry: &Geometry, wanted: &Wanted<'_>, row: u64, bytes: &[u8]) -> Result<()> {
    let fault = match decode(bytes, wanted.segment.seed, wanted.slot) {
        Some(record) if record.kind == Kind::Row && record.id == row => return Ok(()),
        Some(record) => format!("it holds a {:?} of id {}", record.kind, record.id),
        None => "the record's checksum is wrong".to_owned(),
    };
    let path = wanted.segment.path.clone();
    Err(CacheError::Damaged { path, offset: geometry.offset(wanted.slot), id: row, fault })
}

fn copy(geometry: &Geometry, record: &[u8], index: usize, to: &mut PlanesMut<'_>) {
    let (weight_bytes, state_bytes) = (geometry.layout.weight_bytes, geometry.layout.state_bytes);
    let (weights, state) = super::format::planes(record, weight_bytes);
    to.weights[index * weight_bytes..][..weight_bytes].copy_from_slice(weights);
    to.state[index * state_bytes..][..state_bytes].copy_from_slice(state);
}
