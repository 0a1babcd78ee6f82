//! Compaction: live records of some sealed segments move to new ones, the old ones are deleted.
//!
//! ```text
//! choose sources; note the base version of the open segment
//! copy: records that the index still points at -> new segments; write, seal, sync, rename
//! flush the log             (1)
//! switch: index entries that still point at the old place, to the new one
//! delete the sources, oldest first
//! ```
//!
//! (1) A record is dropped because a newer one of its row exists. That one may still be in memory:
//! if it were lost and the dropped one too, an even older record elsewhere would come back. So what
//! superseded is made durable before anything superseded is deleted.
//!
//! **Tombstones** are live records while the row is not put again. One is dropped when no older
//! record of its row can exist: when all segments that are replayed before its own are sources of
//! the same compaction, and thus deleted before it. Names are synced after each deletion then, so
//! that a crash cannot bring an older segment back without the tombstone.
//!
//! **Which segments.** Those with the smallest live share, while the share over all is below its
//! bound. If more than an eighth of all records are tombstones: the oldest, which lets tombstones
//! go. If there are many small ones, as snapshots and restarts leave: the smallest together.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::files::{LogFile, write_all};
use super::format::{Header, Kind, Origin, Record, encode, planes};
use super::inner::{Inner, lock, read, write};
use super::places::Place;
use super::segment::{Scanned, Seal, Segment, create, failed, order, publish, scan};
use super::state::{Held, Live, State};
use crate::Result;

/// Bytes of copies that are written at once.
const WRITE_BYTES: usize = 1 << 20;
/// Index entries switched under one lock: about 0.1 ms.
const SWITCH_ENTRIES: usize = 1024;

/// What compaction is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// The bound on the live share.
    Share,
    /// As much room as there is to gain.
    Room,
}

/// A segment to be emptied.
#[derive(Debug)]
struct Source {
    segment: Arc<Segment>,
    records: u64,
    /// Whether no older record can hide behind one of its tombstones.
    drops_tombstones: bool,
}

#[derive(Debug)]
struct Job {
    /// In replay order.
    sources: Vec<Source>,
    base: u64,
}

/// Compacts until it is `enough`, the aim is reached or nothing is left to gain; gives the segments
/// deleted. At most one compaction runs at a time.
pub(crate) fn compact(
    inner: &Inner,
    aim: Aim,
    bytes_per_s: u64,
    enough: impl Fn() -> bool,
) -> Result<u64> {
    let _one = lock(&inner.compacting);
    let mut deleted = 0;
    while !enough() {
        let Some(job) = plan(inner, aim)? else { break };
        let result = run(inner, &job, bytes_per_s);
        write(&inner.state).making_bytes = 0;
        if let Err(error) = &result {
            inner.fail(error);
        }
        result?;
        deleted += job.sources.len() as u64;
    }
    Ok(deleted)
}

fn plan(inner: &Inner, aim: Aim) -> Result<Option<Job>> {
    inner.change("compaction", |writer| {
        let dead_in_open = read(&inner.state)
            .open
            .as_ref()
            .is_some_and(|open| open.live.entries < open.slots || open.live.tombstones > 0);
        if aim == Aim::Room && dead_in_open {
            writer.seal(inner)?;
        }
        let state = read(&inner.state);
        // All sealed segments of puts have smaller versions.
        let base = match &state.open {
            Some(open) => open.segment.header.base,
            None => writer.next_version,
        };
        let mut chosen = choose(inner, &state, aim);
        if chosen.is_empty() {
            return Ok(None);
        }
        chosen.sort_by_key(|held| order(&held.segment.header));
        let mut all: Vec<&Held> = state.held.values().collect();
        all.sort_by_key(|held| order(&held.segment.header));
        let oldest = all
            .iter()
            .zip(&chosen)
            .take_while(|(one, other)| Arc::ptr_eq(&one.segment, &other.segment))
            .count();
        let source = |(index, held): (usize, &&Held)| Source {
            segment: held.segment.clone(),
            records: held.seal.records,
            drops_tombstones: index < oldest,
        };
        Ok(Some(Job { sources: chosen.iter().enumerate().map(source).collect(), base }))
    })
}

/// The segments to empty next; none if the aim is reached.
fn choose<'a>(inner: &Inner, state: &'a State, aim: Aim) -> Vec<&'a Held> {
    let sum = |of: fn(&Held) -> u64| state.held.values().map(of).sum::<u64>();
    let (records, live) = (sum(|held| held.seal.records), sum(|held| held.live.entries));
    let tombstones = sum(|held| held.live.tombstones);
    let mut all: Vec<&Held> = state.held.values().collect();
    // Numbers settle ties, so that the choice does not depend on the map's order.
    all.sort_by_key(|held| order(&held.segment.header));
    let sparse = match aim {
        Aim::Share => (live as f64) < inner.options.live_share * records as f64,
        Aim::Room => live < records,
    };
    if sparse {
        all.retain(|held| held.live.entries < held.seal.records);
        // Exact comparison of live / records.
        all.sort_by(|a, b| {
            let share =
                |x: &Held, y: &Held| u128::from(x.live.entries) * u128::from(y.seal.records);
            share(a, b).cmp(&share(b, a))
        });
        return fill(inner, all);
    }
    if tombstones > 0 && (aim == Aim::Room || tombstones * 8 > records) {
        return fill(inner, all);
    }
    if all.len() as u64 > records / inner.capacity * 2 + 8 {
        // The two smallest fit one segment: on average they are less than half full.
        all.sort_by_key(|held| held.seal.records);
        let chosen = fill(inner, all);
        return if chosen.len() > 1 { chosen } else { Vec::new() };
    }
    Vec::new()
}

/// The first of `candidates` whose live records fill one new segment; one at least.
fn fill<'a>(inner: &Inner, candidates: Vec<&'a Held>) -> Vec<&'a Held> {
    let mut records = 0;
    let mut chosen = Vec::new();
    for held in candidates {
        records += held.live.entries;
        if !chosen.is_empty() && records > inner.capacity {
            break;
        }
        chosen.push(held);
    }
    chosen
}

/// An index entry to switch: row, old place, new place or none for a tombstone that goes.
type Move = (u64, Place, Option<Place>);

fn run(inner: &Inner, job: &Job, bytes_per_s: u64) -> Result<()> {
    let mut pace = Pace { started: Instant::now(), bytes: 0, bytes_per_s };
    let mut moves: Vec<Move> = Vec::new();
    let mut copies = Copies { inner, base: job.base, output: None, done: Vec::new() };
    for source in &job.sources {
        let path = &source.segment.path;
        let file = inner.files.open(path).map_err(failed("open", path))?;
        let geometry = &inner.geometry;
        scan(&*file, path, geometry, source.segment.seed, source.records, |records| {
            let first = moves.len();
            moves.extend(live(inner, source, records)?);
            let mut copied = 0;
            for (_, old, new) in &mut moves[first..] {
                // The chunk's records are numbered in sequence.
                let scanned = &records[(old.slot() - records[0].slot) as usize];
                if !(old.is_tombstone() && source.drops_tombstones) {
                    *new = Some(copies.append(scanned, old.is_tombstone())?);
                    copied += scanned.bytes.len() as u64;
                }
            }
            let read: u64 = records.iter().map(|scanned| scanned.bytes.len() as u64).sum();
            inner.counters.compaction_read_bytes.add(read);
            pace.wait(inner, read + copied);
            Ok(())
        })?;
    }
    copies.finish()?;
    inner.change("flush before compaction deletes", |writer| writer.flush(inner))?;
    switch(inner, job, &moves, copies.done);
    delete(inner, job)
}

/// Which of a chunk's records the index points at.
fn live(inner: &Inner, source: &Source, records: &[Scanned<'_>]) -> Result<Vec<Move>> {
    let number = source.segment.header.number;
    let mut live = Vec::with_capacity(records.len());
    let state = read(&inner.state);
    for scanned in records {
        let Some(record) = scanned.record else {
            let fault = "the record's checksum is wrong";
            return Err(scanned.damaged(&source.segment.path, &inner.geometry, fault));
        };
        let tombstone = match record.kind {
            Kind::Row => false,
            Kind::Tombstone => true,
            Kind::Mark | Kind::Seal => continue,
        };
        let place = Place::new(number, scanned.slot, tombstone);
        if state.places.get(record.id) == Some(place) {
            live.push((record.id, place, None));
        }
    }
    Ok(live)
}

/// A segment of copies being made.
#[derive(Debug)]
struct Output {
    header: Header,
    unfinished: PathBuf,
    file: Box<dyn LogFile>,
    slots: u64,
    content: crc32fast::Hasher,
    last_version: u64,
    image: Vec<u8>,
    image_at: u64,
}

/// The segments of copies of one compaction.
struct Copies<'a> {
    inner: &'a Inner,
    base: u64,
    output: Option<Output>,
    done: Vec<(Arc<Segment>, Seal)>,
}

impl Copies<'_> {
    fn append(&mut self, scanned: &Scanned<'_>, tombstone: bool) -> Result<Place> {
        let inner = self.inner;
        if self.output.as_ref().is_some_and(|output| output.slots == inner.capacity) {
            self.finish()?;
        }
        let output = match &mut self.output {
            Some(output) => output,
            none => none.insert(Output::new(inner, self.base)?),
        };
        let kind = if tombstone { Kind::Tombstone } else { Kind::Row };
        let version = scanned.record.map_or(0, |record| record.version);
        let record = Record { kind, id: super::format::id_of(scanned.bytes), version };
        let slot = output.slots;
        output.push(inner, record, planes(scanned.bytes, inner.geometry.layout.weight_bytes));
        output.last_version = output.last_version.max(version);
        if output.image.len() >= WRITE_BYTES {
            output.write(inner)?;
        }
        Ok(Place::new(output.header.number, slot, tombstone))
    }

    /// Seals the segment being made, if any.
    fn finish(&mut self) -> Result<()> {
        let Some(output) = self.output.take() else { return Ok(()) };
        self.done.push(output.seal(self.inner)?);
        Ok(())
    }
}

impl Output {
    fn new(inner: &Inner, base: u64) -> Result<Self> {
        let number = inner.next_number()?;
        let header = Header { tag: inner.tag, number, base, origin: Origin::Copied };
        let (unfinished, file) = create(&*inner.files, &inner.dir, &inner.geometry, &header)?;
        let image_at = inner.geometry.end(0);
        write(&inner.state).making_bytes += image_at;
        inner.counters.compaction_bytes.add(image_at);
        Ok(Self {
            header,
            unfinished,
            file,
            slots: 0,
            content: crc32fast::Hasher::new(),
            last_version: 0,
            image: Vec::new(),
            image_at,
        })
    }

    fn push(&mut self, inner: &Inner, record: Record, planes: (&[u8], &[u8])) {
        let seed = self.header.seed();
        let (image, at) = (&mut self.image, self.image_at);
        let crc = encode(image, at, &inner.geometry, seed, self.slots, record, Some(planes));
        self.content.update(&crc.to_le_bytes());
        self.slots += 1;
    }

    fn write(&mut self, inner: &Inner) -> Result<()> {
        let bytes = self.image.len() as u64;
        write_all(&*self.file, &self.image, self.image_at)
            .map_err(failed("write", &self.unfinished))?;
        self.file.start_writing(self.image_at, bytes);
        inner.counters.compaction_bytes.add(bytes);
        write(&inner.state).making_bytes += bytes;
        self.image_at += bytes;
        self.image.clear();
        Ok(())
    }

    fn seal(mut self, inner: &Inner) -> Result<(Arc<Segment>, Seal)> {
        let (records, content) = (self.slots, self.content.clone().finalize());
        let seal = Record { kind: Kind::Seal, id: records, version: u64::from(content) };
        self.push(inner, seal, (&[], &[]));
        let bytes = inner.geometry.file_bytes(self.slots);
        self.image.resize((bytes - self.image_at) as usize, 0);
        self.write(inner)?;
        // One sync for records and seal: before it has its name nobody reads the file.
        self.file.sync().map_err(failed("sync", &self.unfinished))?;
        let Self { header, unfinished, last_version, .. } = self;
        let path = publish(&*inner.files, &inner.dir, &unfinished, header.number)?;
        let source = inner.reader.open(&*inner.files, &path, bytes)?;
        let segment = Arc::new(Segment { header, path, seed: header.seed(), source });
        Ok((segment, Seal { records, bytes, content, last_version }))
    }
}

/// Points the index at the copies. At every instant in between, all entries are right.
fn switch(inner: &Inner, job: &Job, moves: &[Move], outputs: Vec<(Arc<Segment>, Seal)>) {
    let mut state = write(&inner.state);
    state.making_bytes = 0;
    for (segment, seal) in outputs {
        let live = Live::default();
        state.held.insert(segment.header.number, Held { segment, seal, live });
    }
    drop(state);
    for moves in moves.chunks(SWITCH_ENTRIES) {
        let mut state = write(&inner.state);
        for &(row, old, new) in moves {
            // A row that was put or removed meanwhile is somewhere newer.
            if state.places.get(row) == Some(old) {
                match new {
                    Some(new) => state.set(row, new),
                    None => state.clear(row),
                }
            }
        }
    }
    let mut state = write(&inner.state);
    for source in &job.sources {
        let held = state.held.remove(&source.segment.header.number);
        debug_assert_eq!(held.map(|held| held.live), Some(Live::default()));
    }
}

/// Deletes the sources' files, oldest first. Gets that still read them hold them open.
fn delete(inner: &Inner, job: &Job) -> Result<()> {
    let _still = lock(&inner.deleting);
    let sync = || inner.files.sync_dir(&inner.dir).map_err(failed("sync", &inner.dir));
    for source in &job.sources {
        let path = &source.segment.path;
        inner.files.remove(path).map_err(failed("remove", path))?;
        if source.drops_tombstones {
            sync()?;
        }
        inner.counters.compactions.add(1);
    }
    sync()
}

/// Keeps copying to a rate.
struct Pace {
    started: Instant,
    bytes: u64,
    bytes_per_s: u64,
}

impl Pace {
    fn wait(&mut self, inner: &Inner, bytes: u64) {
        self.bytes += bytes;
        if self.bytes_per_s == 0 {
            return;
        }
        let due = Duration::from_secs_f64(self.bytes as f64 / self.bytes_per_s as f64);
        let mut signal = lock(&inner.signal);
        while !signal.stop && inner.hurry.load(Ordering::Relaxed) == 0 {
            let left = due.saturating_sub(self.started.elapsed());
            if left.is_zero() {
                return;
            }
            signal = inner
                .signalled
                .wait_timeout(signal, left)
                .unwrap_or_else(std::sync::PoisonError::into_inner)
                .0;
        }
    }
}
