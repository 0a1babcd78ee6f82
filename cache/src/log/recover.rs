//! Opening a directory: every record of every segment is read, checked and replayed.
//!
//! **Order.** Each segment has a base version. One of appended records has versions from its base
//! on; one that compaction made from sealed segments has versions below its base, which is that of
//! the segment that was open when the compaction began. Segments are replayed by (base, copied
//! before appended), and then a row's newest record comes last. Take two records of a row, v < v'.
//! - v appended: v lies in the segment of v', before it, or in one sealed before, whose base is
//!   smaller; and if v' was copied, its segment's base is above v', thus above v's base.
//! - v copied: when it was, v was the newest, so v' came later, into the segment then open or one
//!   after it, and v's base is at most that segment's; if equal, copied comes first. If v' was
//!   copied in turn, its base is above v', thus above v's base.
//!
//! So no version is kept in memory, and the file's names or times mean nothing.
//!
//! **Torn tails.** Copies are named as segments only when sealed, and a segment of puts is made
//! only when the one before is sealed: so just the appended segment with the largest base may lack
//! its seal. Behind its last mark a wrong record is what a crash left: it and what follows are cut
//! off, and the rest is sealed. Any other wrong record is damage, and an error.

use std::path::{Path, PathBuf};

use super::files::{Files, read_exact, write_all};
use super::format::{
    Geometry, Header, HeaderFault, Kind, Origin, PAGE, Record, crc_of, encode, id_of,
};
use super::places::{Place, Places};
use super::read::SegmentReader;
use super::segment::{Scanned, Seal, Segment, failed, is_unfinished, number_of, order, scan};
use super::state::{Held, Live, State};
use crate::{CacheError, Result};

/// What there is to know of a directory before its log runs.
pub(crate) struct Recovered {
    pub next_version: u64,
    pub next_number: u64,
}

/// What opening needs.
#[derive(Clone, Copy)]
pub(crate) struct Opener<'a> {
    pub files: &'a dyn Files,
    pub dir: &'a Path,
    pub tag: u64,
    pub geometry: &'a Geometry,
    pub reader: &'a dyn SegmentReader,
}

impl Opener<'_> {
    /// Fills an empty state from the directory.
    pub fn replay(&self, state: &mut State) -> Result<Recovered> {
        let names = self.files.list(self.dir).map_err(failed("list", self.dir))?;
        let mut segments = Vec::new();
        for name in names {
            let path = self.dir.join(&name);
            if is_unfinished(&name) {
                // A segment that was never used, or copies of what is still there.
                self.files.remove(&path).map_err(failed("remove", &path))?;
            } else if let Some(number) = number_of(&name) {
                segments.push((self.header(&path, number)?, path));
            }
        }
        segments.sort_by_key(|(header, _)| order(header));
        let newest = segments.iter().rposition(|(header, _)| header.origin == Origin::Appended);
        let mut recovered = Recovered { next_version: 1, next_number: 1 };
        for (index, (header, path)) in segments.into_iter().enumerate() {
            recovered.next_number = recovered.next_number.max(u64::from(header.number) + 1);
            recovered.next_version = recovered.next_version.max(header.base);
            if let Some(last) = self.segment(state, header, path, Some(index) == newest)? {
                recovered.next_version = recovered.next_version.max(last + 1);
            }
        }
        state.recount();
        Ok(recovered)
    }

    fn header(&self, path: &Path, number: u32) -> Result<Header> {
        let file = self.files.open(path).map_err(failed("open", path))?;
        read_header(&*file, path, self.tag, self.geometry, number)
    }

    /// Replays a segment; gives its largest version, or `None` if nothing was left of it.
    fn segment(
        &self,
        state: &mut State,
        header: Header,
        path: PathBuf,
        may_be_torn: bool,
    ) -> Result<Option<u64>> {
        let geometry = self.geometry;
        let file = self.files.open(&path).map_err(failed("open", &path))?;
        let size = file.size().map_err(failed("measure", &path))?;
        let slots = geometry.slots_in(size);
        let mut replay = Replay::new(header, &path, geometry);
        scan(&*file, &path, geometry, header.seed(), slots, |records| {
            records.iter().try_for_each(|scanned| replay.next(&mut state.places, scanned))
        })?;
        let records = replay.records;
        if !replay.sealed {
            if let Some(damage) = replay.torn.take().filter(|_| !may_be_torn) {
                return Err(damage);
            }
            if !may_be_torn {
                return Err(replay.fault(records, 0, "it ends without its seal"));
            }
            if records == 0 {
                self.files.remove(&path).map_err(failed("remove", &path))?;
                self.files.sync_dir(self.dir).map_err(failed("sync", self.dir))?;
                return Ok(None);
            }
            replay.cut_and_seal(&*file)?;
        } else if size < replay.file_bytes() && may_be_torn {
            // The seal arrived, the zeros behind it did not.
            file.resize(replay.file_bytes()).map_err(failed("extend", &path))?;
            file.sync().map_err(failed("sync", &path))?;
        } else if size != replay.file_bytes() {
            return Err(replay.fault(records, 0, "its length is not that of its seal"));
        }
        let bytes = replay.file_bytes();
        let (content, last_version) = (replay.content.finalize(), replay.last_version);
        let source = self.reader.open(self.files, &path, bytes)?;
        let segment = std::sync::Arc::new(Segment { header, path, seed: header.seed(), source });
        let seal = Seal { records, bytes, content, last_version };
        state.held.insert(header.number, Held { segment, seal, live: Live::default() });
        Ok(Some(last_version))
    }
}

/// Replays a segment that must be sealed, in a file of `size` bytes that nobody changes.
pub(crate) fn replay_sealed(
    places: &mut Places,
    header: Header,
    file: &dyn super::files::LogFile,
    path: &Path,
    geometry: &Geometry,
    size: u64,
) -> Result<Seal> {
    let mut replay = Replay::new(header, path, geometry);
    scan(file, path, geometry, header.seed(), geometry.slots_in(size), |records| {
        records.iter().try_for_each(|scanned| replay.next(places, scanned))
    })?;
    if let Some(damage) = replay.torn.take() {
        return Err(damage);
    }
    if !replay.sealed {
        return Err(replay.fault(replay.records, 0, "it ends without its seal"));
    }
    if size != replay.file_bytes() {
        return Err(replay.fault(replay.records, 0, "its length is not that of its seal"));
    }
    let (records, last_version) = (replay.records, replay.last_version);
    Ok(Seal { records, bytes: size, content: replay.content.finalize(), last_version })
}

/// The header of a segment file, which must be of this table, geometry and number.
pub(crate) fn read_header(
    file: &dyn super::files::LogFile,
    path: &Path,
    tag: u64,
    geometry: &Geometry,
    number: u32,
) -> Result<Header> {
    let damaged = |fault: &str| CacheError::Damaged {
        path: path.to_owned(),
        offset: 0,
        id: 0,
        fault: fault.to_owned(),
    };
    if file.size().map_err(failed("measure", path))? < PAGE {
        return Err(damaged("it is shorter than its header"));
    }
    let mut page = vec![0; PAGE as usize];
    read_exact(file, &mut page, 0).map_err(failed("read", path))?;
    match Header::decode(&page, tag, geometry) {
        Ok(header) if header.number == number => Ok(header),
        Ok(_) => Err(damaged("it was renamed: its header has another number")),
        Err(HeaderFault::Damaged(fault)) => Err(damaged(fault)),
        Err(HeaderFault::Other { what, found, expected }) => {
            Err(CacheError::OtherLog { path: path.to_owned(), what, found, expected })
        }
    }
}

/// What is known of a segment while its records go by.
struct Replay<'a> {
    header: Header,
    path: &'a Path,
    geometry: &'a Geometry,
    /// Sound records so far, the seal not counted.
    records: u64,
    content: crc32fast::Hasher,
    last_version: u64,
    sealed: bool,
    /// The first wrong record.
    torn: Option<CacheError>,
}

impl<'a> Replay<'a> {
    fn new(header: Header, path: &'a Path, geometry: &'a Geometry) -> Self {
        let content = crc32fast::Hasher::new();
        let (records, last_version, sealed, torn) = (0, 0, false, None);
        Self { header, path, geometry, records, content, last_version, sealed, torn }
    }

    /// Bytes of the file when it is sealed behind its sound records.
    fn file_bytes(&self) -> u64 {
        self.geometry.file_bytes(self.records + 1)
    }

    fn fault(&self, slot: u64, id: u64, fault: &str) -> CacheError {
        let (path, offset) = (self.path.to_owned(), self.geometry.offset(slot));
        CacheError::Damaged { path, offset, id, fault: fault.to_owned() }
    }

    fn next(&mut self, places: &mut Places, scanned: &Scanned<'_>) -> Result<()> {
        let slot = scanned.slot;
        let id = id_of(scanned.bytes);
        let Some(record) = scanned.record else {
            // Zeros fill the seal's page.
            if !self.sealed && self.torn.is_none() {
                self.torn = Some(self.fault(slot, id, "the record's checksum is wrong"));
            }
            return Ok(());
        };
        let control = matches!(record.kind, Kind::Mark | Kind::Seal);
        if self.sealed {
            return Err(self.fault(slot, id, "a record lies behind the seal"));
        }
        if self.torn.is_some() && !control {
            // Written after the torn one, without a sync between: lost with it.
            return Ok(());
        }
        if let Some(damage) = self.torn.take() {
            return Err(damage);
        }
        if control && record.id != slot {
            return Err(self.fault(slot, id, "a mark or seal counts other records"));
        }
        match record.kind {
            Kind::Seal => {
                if record.version != u64::from(self.content.clone().finalize()) {
                    return Err(self.fault(slot, id, "the seal is not that of these records"));
                }
                self.sealed = true;
                return Ok(());
            }
            Kind::Mark => {}
            Kind::Row | Kind::Tombstone => self.place(places, record, slot)?,
        }
        self.content.update(&crc_of(scanned.bytes).to_le_bytes());
        self.records = slot + 1;
        Ok(())
    }

    fn place(&mut self, places: &mut Places, record: Record, slot: u64) -> Result<()> {
        let Record { kind, id, version } = record;
        let in_order = match self.header.origin {
            Origin::Appended => version >= self.header.base && version > self.last_version,
            Origin::Copied => version < self.header.base,
        };
        if !in_order {
            return Err(self.fault(slot, id, "its version does not belong in this segment"));
        }
        places.check("replay", id)?;
        places.set(id, Place::new(self.header.number, slot, kind == Kind::Tombstone));
        self.last_version = self.last_version.max(version);
        Ok(())
    }

    /// Cuts off what a crash tore and seals the rest. The cut is on the medium before the seal, so
    /// that nothing cut off can come back behind it.
    fn cut_and_seal(&mut self, file: &dyn super::files::LogFile) -> Result<()> {
        let (geometry, slots) = (self.geometry, self.records);
        let end = geometry.end(slots);
        file.resize(end).map_err(failed("cut", self.path))?;
        file.sync().map_err(failed("sync", self.path))?;
        let version = u64::from(self.content.clone().finalize());
        let record = Record { kind: Kind::Seal, id: slots, version };
        let mut image = Vec::new();
        encode(&mut image, end, geometry, self.header.seed(), slots, record, None);
        image.resize((self.file_bytes() - end) as usize, 0);
        write_all(file, &image, end).map_err(failed("write", self.path))?;
        file.sync().map_err(failed("sync", self.path))
    }
}
