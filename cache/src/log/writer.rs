//! Appending: the one place that makes, fills and seals segments of puts and removals.
//!
//! ```text
//! append: encode a piece -> under the state's lock: to the pending bytes, places to the index
//!         -> when 1 MiB is pending: to the file, and tell the system to begin writing it
//! flush:  pending to the file -> sync -> mark record -> sync
//! seal:   pending to the file -> sync -> seal record -> sync -> reopen for reading
//! ```
//!
//! A mark or a seal is written after the records before it are on the medium. So whenever one is
//! read back, a wrong record before it was damaged later and is an error; what a crash tears can
//! only lie behind the last mark.

use std::sync::Arc;

use super::files::write_all;
use super::format::{Header, Kind, Origin, Record, encode};
use super::inner::{Inner, read, write};
use super::places::Place;
use super::read::Source;
use super::segment::{Seal, Segment, create, failed, publish};
use super::state::{Held, Live, Open};
use crate::{CacheError, Planes, Result};

/// Bytes that are written at once.
const PENDING_BYTES: usize = 1 << 20;
/// Bytes that are encoded and published at once: about 0.1 ms of the state's lock.
const PIECE_BYTES: usize = 256 << 10;

/// What only the thread that holds the writer's lock knows.
#[derive(Debug)]
pub(crate) struct Writer {
    /// Version of the next record.
    pub next_version: u64,
    /// Checksum so far of the open segment's checksums.
    content: crc32fast::Hasher,
    /// Records of the open segment that a mark or nothing lies behind.
    marked: u64,
    piece: Vec<u8>,
}

impl Writer {
    pub fn new(next_version: u64) -> Self {
        let content = crc32fast::Hasher::new();
        Self { next_version, content, marked: 0, piece: Vec::new() }
    }

    /// Appends rows with their planes, or tombstones without.
    pub fn append(
        &mut self,
        inner: &Inner,
        kind: Kind,
        rows: &[u64],
        planes: Option<Planes<'_>>,
    ) -> Result<()> {
        let geometry = &inner.geometry;
        let piece_rows = (PIECE_BYTES / geometry.record_bytes).max(1);
        let (weight_bytes, state_bytes) =
            (geometry.layout.weight_bytes, geometry.layout.state_bytes);
        let mut done = 0;
        while done < rows.len() {
            let (number, seed, first) = self.open(inner)?;
            let room = inner.capacity - first;
            if room == 0 {
                self.seal(inner)?;
                continue;
            }
            let count = (rows.len() - done).min(piece_rows).min(room as usize);
            let piece_at = geometry.end(first);
            self.piece.clear();
            for i in 0..count {
                let row = done + i;
                let record = Record { kind, id: rows[row], version: self.next_version };
                let planes = planes.map(|planes| {
                    let weights = &planes.weights[row * weight_bytes..][..weight_bytes];
                    (weights, &planes.state[row * state_bytes..][..state_bytes])
                });
                let slot = first + i as u64;
                let crc = encode(&mut self.piece, piece_at, geometry, seed, slot, record, planes);
                self.content.update(&crc.to_le_bytes());
                self.next_version += 1;
            }
            let mut state = write(&inner.state);
            self.publish_piece(&mut state.open, count as u64);
            for (i, &row) in rows[done..done + count].iter().enumerate() {
                let tombstone = kind == Kind::Tombstone;
                state.set(row, Place::new(number, first + i as u64, tombstone));
            }
            let pending = state.open.as_ref().map_or(0, |open| open.pending.len());
            drop(state);
            inner.counters.put_bytes.add(self.piece.len() as u64);
            if pending >= PENDING_BYTES {
                self.write_pending(inner)?;
            }
            done += count;
        }
        Ok(())
    }

    /// Adds the encoded piece to the open segment's pending bytes.
    fn publish_piece(&self, open: &mut Option<Open>, slots: u64) {
        if let Some(open) = open {
            // Nobody holds a second handle while the writer is here, so nothing is copied.
            Arc::make_mut(&mut open.pending).extend_from_slice(&self.piece);
            open.slots += slots;
        }
    }

    /// The open segment, made if there is none: number, seed, records.
    fn open(&mut self, inner: &Inner) -> Result<(u32, u32, u64)> {
        if let Some(open) = &read(&inner.state).open {
            return Ok((open.number(), open.segment.seed, open.slots));
        }
        let number = inner.next_number()?;
        let base = self.next_version;
        let header = Header { tag: inner.tag, number, base, origin: Origin::Appended };
        let (unfinished, file) = create(&*inner.files, &inner.dir, &inner.geometry, &header)?;
        // Header and name are on the medium before the first record: a segment file without a
        // sound header is damaged, never torn.
        file.sync().map_err(failed("sync", &unfinished))?;
        let path = publish(&*inner.files, &inner.dir, &unfinished, number)?;
        let seed = header.seed();
        let segment = Arc::new(Segment { header, path, seed, source: Source::File(file) });
        self.content = crc32fast::Hasher::new();
        self.marked = 0;
        let pending_at = inner.geometry.end(0);
        inner.counters.put_bytes.add(pending_at);
        write(&inner.state).open = Some(Open {
            segment,
            live: Live::default(),
            slots: 0,
            written: 0,
            pending: Arc::default(),
            pending_at,
        });
        Ok((number, seed, 0))
    }

    /// Moves pending bytes to the file.
    fn write_pending(&mut self, inner: &Inner) -> Result<()> {
        let (segment, pending, at) = match &read(&inner.state).open {
            Some(open) if !open.pending.is_empty() => {
                (open.segment.clone(), open.pending.clone(), open.pending_at)
            }
            _ => return Ok(()),
        };
        if let Source::File(file) = &segment.source {
            write_all(&**file, &pending, at).map_err(failed("write", &segment.path))?;
            file.start_writing(at, pending.len() as u64);
        }
        if let Some(open) = &mut write(&inner.state).open {
            open.pending_at = at + pending.len() as u64;
            open.written = open.slots;
            open.pending = Arc::default();
        }
        Ok(())
    }

    /// Appends a mark or a seal and writes it.
    fn append_control(&mut self, inner: &Inner, kind: Kind, slots: u64, seed: u32) -> Result<()> {
        let geometry = &inner.geometry;
        let version = match kind {
            Kind::Seal => u64::from(self.content.clone().finalize()),
            _ => 0,
        };
        let record = Record { kind, id: slots, version };
        self.piece.clear();
        let at = geometry.end(slots);
        let crc = encode(&mut self.piece, at, geometry, seed, slots, record, None);
        self.content.update(&crc.to_le_bytes());
        if kind == Kind::Seal {
            self.piece.resize((geometry.file_bytes(slots + 1) - at) as usize, 0);
        }
        self.publish_piece(&mut write(&inner.state).open, 1);
        inner.counters.put_bytes.add(self.piece.len() as u64);
        self.write_pending(inner)?;
        self.sync(inner)
    }

    fn sync(&self, inner: &Inner) -> Result<()> {
        let segment = read(&inner.state).open.as_ref().map(|open| open.segment.clone());
        if let Some(segment) = segment
            && let Source::File(file) = &segment.source
        {
            file.sync().map_err(failed("sync", &segment.path))?;
        }
        Ok(())
    }

    /// Everything appended is on the medium, and a mark says so.
    pub fn flush(&mut self, inner: &Inner) -> Result<()> {
        let Some((_, seed, slots)) = self.opened(inner) else { return Ok(()) };
        if slots == self.marked {
            return Ok(());
        }
        if slots == inner.capacity {
            // Only the seal's place is left.
            return self.seal(inner);
        }
        self.write_pending(inner)?;
        self.sync(inner)?;
        self.append_control(inner, Kind::Mark, slots, seed)?;
        self.marked = slots + 1;
        Ok(())
    }

    /// Number, seed and records of the open segment, if there is one.
    fn opened(&self, inner: &Inner) -> Option<(u32, u32, u64)> {
        let state = read(&inner.state);
        state.open.as_ref().map(|open| (open.number(), open.segment.seed, open.slots))
    }

    /// Seals the open segment, if there is one.
    pub fn seal(&mut self, inner: &Inner) -> Result<()> {
        let Some((number, seed, slots)) = self.opened(inner) else { return Ok(()) };
        self.write_pending(inner)?;
        self.sync(inner)?;
        let content = self.content.clone().finalize();
        self.append_control(inner, Kind::Seal, slots, seed)?;
        let bytes = inner.geometry.file_bytes(slots + 1);
        let last_version = self.next_version - 1;
        let seal = Seal { records: slots, bytes, content, last_version };
        let Some(old) = read(&inner.state).open.as_ref().map(|open| open.segment.clone()) else {
            return Ok(());
        };
        let source = inner.reader.open(&*inner.files, &old.path, bytes)?;
        let segment = Segment { header: old.header, path: old.path.clone(), seed, source };
        let mut state = write(&inner.state);
        if let Some(open) = state.open.take() {
            let held = Held { segment: Arc::new(segment), seal, live: open.live };
            state.held.insert(number, held);
        }
        drop(state);
        inner.wake();
        Ok(())
    }
}

/// Bytes by which appending `rows` records to an open segment of `slots` records (`None`: there is
/// none) makes the files grow, new headers and seals included.
pub(crate) fn growth(inner: &Inner, slots: Option<u64>, rows: u64) -> u64 {
    let geometry = &inner.geometry;
    let used = slots.unwrap_or(inner.capacity);
    let fill = rows.min(inner.capacity - used);
    let rest = rows - fill;
    let here = match slots {
        Some(_) => geometry.file_bytes(used + fill + 1) - geometry.end(used),
        None => 0,
    };
    let last = rest % inner.capacity;
    let tail = if last > 0 { geometry.file_bytes(last + 1) } else { 0 };
    here + rest / inner.capacity * geometry.file_bytes(inner.capacity + 1) + tail
}

/// Refuses what has no room.
pub(crate) fn fits(inner: &Inner, rows: u64, reserve: u64) -> Result<()> {
    let budget = inner.options.budget_bytes;
    if budget == 0 {
        return Ok(());
    }
    let state = read(&inner.state);
    let used = state.file_bytes(&inner.geometry) - state.making_bytes;
    let needed = growth(inner, state.open.as_ref().map(|open| open.slots), rows);
    if used.saturating_add(needed).saturating_add(reserve) <= budget {
        return Ok(());
    }
    Err(CacheError::Budget { dir: inner.dir.clone(), needed, used, reserve, budget })
}
