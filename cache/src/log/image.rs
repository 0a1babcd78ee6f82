//! The rows of a snapshot, read from its files wherever they lie: nothing is opened as a log,
//! nothing is written.
//!
//! ```text
//! Image::new      an empty index for the snapshot
//! add             each of its files in turn: every record checked, places of rows noted
//! finish          the rows are as many as the snapshot says
//! get             records read by places, checksums checked again
//! ```
//! Files are read from front to back once, then by batches of rows. Memory is the index alone: 8
//! bytes a row.

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use super::files::{Access, Disk, Files, LogFile};
use super::format::{Geometry, Header};
use super::get::read_places;
use super::places::{Place, Places};
use super::read::{SegmentReader, mapped};
use super::recover::{read_header, replay_sealed};
use super::segment::{Seal, Segment, failed, number_of};
use super::snapshot::{entry, fault};
use super::{SegmentFile, Snapshot};
use crate::{CacheError, PlanesMut, Result, RowLayout};

/// A snapshot's rows.
#[derive(Debug)]
pub struct Image {
    tag: u64,
    rows: u64,
    geometry: Geometry,
    places: Places,
    segments: HashMap<u32, Arc<Segment>>,
    reader: Box<dyn SegmentReader>,
}

impl Image {
    /// An image of `snapshot` without any of its files yet. Its rows are numbered 0..`rows`.
    ///
    /// Errors: [`CacheError::Options`] for rows that no machine can hold.
    pub fn new(snapshot: &Snapshot, rows: u64) -> Result<Self> {
        let geometry = geometry(snapshot)?;
        Ok(Self {
            tag: snapshot.tag,
            rows: snapshot.rows,
            geometry,
            places: Places::new(Some(rows))?,
            segments: HashMap::new(),
            reader: mapped(),
        })
    }

    /// Reads the next of the snapshot's files, in the order of its list, from `path`.
    ///
    /// Errors: [`CacheError::Damaged`] with the first wrong record, [`CacheError::OtherLog`],
    /// [`CacheError::Snapshot`] for a file that is another than listed, [`CacheError::NoSuchRow`],
    /// or what the file system says.
    pub fn add(&mut self, file: &SegmentFile, path: &Path) -> Result<()> {
        let (header, seal) = scan(&mut self.places, self.tag, &self.geometry, file, path)?;
        let source = self.reader.open(&Disk, path, seal.bytes)?;
        let segment = Segment { header, path: path.to_owned(), seed: header.seed(), source };
        self.segments.insert(header.number, Arc::new(segment));
        Ok(())
    }

    /// Checks, after the last file, that the rows are as many as the snapshot says.
    ///
    /// Errors: [`CacheError::Snapshot`].
    pub fn finish(&self) -> Result<()> {
        let mut rows = 0;
        self.places.for_each(|place| rows += u64::from(!place.is_tombstone()));
        if rows != self.rows {
            let words = format!("{rows} rows, {} are listed", self.rows);
            return Err(fault("all files", &words));
        }
        Ok(())
    }

    /// Width of the planes.
    #[must_use]
    pub fn layout(&self) -> RowLayout {
        self.geometry.layout
    }

    /// As [`ColdRows::get`](crate::ColdRows::get): copies the planes of the rows that the snapshot
    /// has; `found[i]` says whether `rows[i]` is one of them.
    ///
    /// Errors: a record that was damaged since it was added, by file, byte and row.
    ///
    /// # Panics
    /// When planes or `found` are not of exactly these rows.
    pub fn get(&self, rows: &[u64], mut to: PlanesMut<'_>, found: &mut [bool]) -> Result<()> {
        let RowLayout { weight_bytes, state_bytes } = self.geometry.layout;
        let given = (to.weights.len(), to.state.len(), found.len());
        let needed = (rows.len() * weight_bytes, rows.len() * state_bytes, rows.len());
        assert_eq!(given, needed, "planes of the rows asked for");
        let mut places: Vec<(Place, usize)> = Vec::with_capacity(rows.len());
        for (index, (&row, found)) in rows.iter().zip(found.iter_mut()).enumerate() {
            let place = self.places.get(row).filter(|place| !place.is_tombstone());
            *found = place.is_some();
            places.extend(place.map(|place| (place, index)));
        }
        let wanted = places.len();
        let (reader, segments) = (&*self.reader, &self.segments);
        let (read, _) = read_places(reader, &self.geometry, places, segments, rows, &mut to)?;
        assert_eq!(read, wanted, "rows read");
        Ok(())
    }
}

/// Reads one file of a snapshot, whose rows are numbered 0..`rows`, from front to back and holds it
/// against the list.
///
/// Errors: as [`Image::add`].
pub fn check_file(snapshot: &Snapshot, rows: u64, file: &SegmentFile, path: &Path) -> Result<()> {
    // Memory that no record of the file touches is none.
    let mut places = Places::new(Some(rows))?;
    scan(&mut places, snapshot.tag, &geometry(snapshot)?, file, path).map(|_| ())
}

fn geometry(snapshot: &Snapshot) -> Result<Geometry> {
    let width = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
    let (weight_bytes, state_bytes) = (width(snapshot.weight_bytes), width(snapshot.state_bytes));
    let layout = RowLayout { weight_bytes, state_bytes };
    Geometry::new(layout).ok_or_else(|| CacheError::Options {
        faults: format!("records of {layout:?} exceed 1 GiB"),
    })
}

/// Replays a file that must be the one listed.
fn scan(
    places: &mut Places,
    tag: u64,
    geometry: &Geometry,
    file: &SegmentFile,
    path: &Path,
) -> Result<(Header, Seal)> {
    let Some(number) = number_of(&file.name) else {
        return Err(fault(&file.name, "it is no name of a segment file"));
    };
    let opened = Disk.os_file(path, Access::Cached).map_err(failed("open", path))?;
    let opened = opened.expect("the real file system has files of the system's");
    let size = opened.size().map_err(failed("measure", path))?;
    if size != file.bytes {
        let words = format!("{size} bytes, {} are listed: {}", file.bytes, path.display());
        return Err(fault(&file.name, &words));
    }
    let header = read_header(&opened, path, tag, geometry, number)?;
    let seal = replay_sealed(places, header, &opened, path, geometry, size)?;
    if entry(&header, &seal) != *file {
        let words = format!("it is not the file that the snapshot lists: {}", path.display());
        return Err(fault(&file.name, &words));
    }
    Ok((header, seal))
}
