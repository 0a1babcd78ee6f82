//! Rows on SSD: an append-only log of segment files, one directory a table's shard on one rank.
//!
//! ```text
//! put, remove -> records appended to the open segment; sealed when full, then never changed
//! index       -> row -> (segment, record), in memory, rebuilt by replaying all segments on open
//! get         -> places sorted, records read by batches (io_uring or mmap), checksums checked
//! compaction  -> live records of sparse segments move to new segments, the old ones are deleted
//! snapshot    -> seal, then hard links to all segments, and a list of them
//! ```
//!
//! What holds:
//! - After [`flush`](crate::ColdRows::flush), what was put and removed before outlives any crash,
//!   and nothing older of those rows ever comes back.
//! - A record whose bytes changed on the medium is an error that names file, byte and id, on open,
//!   get and compaction; it is never given out or passed over.
//! - After a failed write or sync every later change is refused with the first cause; gets go on.
//! - Every segment file is exactly as it was sealed for as long as it exists, so hard links to it
//!   are copies.
//!
//! The layout of files is drawn in docs/formats.md; recover.rs says why replay is right,
//! compact.rs why deleting is.

mod compact;
pub mod files;
mod format;
mod get;
mod image;
mod inner;
mod options;
mod places;
mod read;
mod recover;
mod segment;
mod snapshot;
mod state;
mod writer;

use std::path::Path;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::thread::JoinHandle;

pub use image::{Image, check_file};
pub use options::{Compaction, Options};
pub use read::{Reader, io_uring_allowed};
pub use snapshot::{SegmentFile, Snapshot};

use crate::{CacheError, ColdRows, ColdStats, Planes, PlanesMut, Result, RowLayout};
use compact::{Aim, compact};
use files::{Disk, Files};
use format::{Geometry, Kind};
use inner::{Counters, Inner, Signal, lock, read};
use places::Places;
use state::State;
use writer::{Writer, fits, growth};

/// Rows of one table on SSD. Dropping it seals what is open; [`ColdRows::flush`] before says
/// whether everything arrived.
#[derive(Debug)]
pub struct SsdLog {
    inner: Arc<Inner>,
    compactor: Option<JoinHandle<()>>,
}

/// Deletes the segments in `dir`.
fn remove_segments(files: &dyn Files, dir: &Path) -> Result<()> {
    for name in files.list(dir).map_err(segment::failed("list", dir))? {
        if segment::is_unfinished(&name) || segment::number_of(&name).is_some() {
            let path = dir.join(&name);
            files.remove(&path).map_err(segment::failed("remove", &path))?;
        }
    }
    Ok(())
}

impl SsdLog {
    /// Opens the log in `dir`, or begins one: reads and checks every record there is. `tag` names
    /// the table: files of another one are refused.
    ///
    /// Errors: [`CacheError::Options`], [`CacheError::InUse`], [`CacheError::Damaged`],
    /// [`CacheError::OtherLog`], [`CacheError::NoSuchRow`], or what the file system says.
    pub fn open(dir: &Path, tag: u64, layout: RowLayout, options: Options) -> Result<Self> {
        Self::open_with(Box::new(Disk), dir, tag, layout, options)
    }

    /// Begins an empty log in `dir`: what an earlier log left there is deleted.
    ///
    /// Errors: as [`SsdLog::open`]; nothing is deleted while another log is open there.
    pub fn create(dir: &Path, tag: u64, layout: RowLayout, options: Options) -> Result<Self> {
        let files = Box::new(Disk);
        Self::build(files, dir, tag, layout, options, remove_segments, |_| Ok(()))
    }

    /// [`SsdLog::open`] on another file system.
    ///
    /// Errors: as [`SsdLog::open`].
    pub fn open_with(
        files: Box<dyn Files>,
        dir: &Path,
        tag: u64,
        layout: RowLayout,
        options: Options,
    ) -> Result<Self> {
        Self::build(files, dir, tag, layout, options, |_, _| Ok(()), |_| Ok(()))
    }

    fn build(
        files: Box<dyn Files>,
        dir: &Path,
        tag: u64,
        layout: RowLayout,
        options: Options,
        prepare: impl FnOnce(&dyn Files, &Path) -> Result<()>,
        verify: impl FnOnce(&State) -> Result<()>,
    ) -> Result<Self> {
        let geometry = Geometry::new(layout).ok_or_else(|| CacheError::Options {
            faults: format!("records of {layout:?} exceed 1 GiB; use a smaller dim"),
        })?;
        let capacity = options.capacity(&geometry)?;
        let places = Places::new(options.rows)?;
        files.create_dir(dir).map_err(segment::failed("create", dir))?;
        let _lock = files.lock(dir).map_err(|error| match error.kind() {
            std::io::ErrorKind::WouldBlock => CacheError::InUse { dir: dir.to_owned() },
            _ => segment::failed("lock", dir)(error),
        })?;
        prepare(&*files, dir)?;
        let reader = read::choose(options.reader, options.queue_depth, &geometry, &*files, dir)?;
        let mut state = State::new(places);
        let opener =
            recover::Opener { files: &*files, dir, tag, geometry: &geometry, reader: &*reader };
        let recovered = opener.replay(&mut state)?;
        verify(&state)?;
        let background = options.compaction == Compaction::Background;
        let inner = Arc::new(Inner {
            files,
            dir: dir.to_owned(),
            tag,
            geometry,
            capacity,
            options,
            reader,
            counters: Counters::default(),
            compacting: Mutex::new(()),
            deleting: Mutex::new(()),
            writer: Mutex::new(Writer::new(recovered.next_version)),
            state: RwLock::new(state),
            failure: Mutex::new(None),
            signal: Mutex::new(Signal { look: true, stop: false }),
            signalled: Condvar::new(),
            hurry: AtomicU32::new(0),
            number: AtomicU64::new(recovered.next_number),
            _lock,
        });
        let mut compactor = None;
        if background {
            let inner = inner.clone();
            let thread = std::thread::Builder::new().name("row-log-compaction".to_owned());
            let spawned = thread.spawn(move || compact_when_signalled(&inner));
            compactor = Some(spawned.map_err(segment::failed("start compaction of", dir))?);
        }
        Ok(Self { inner, compactor })
    }

    /// Opens a snapshot in `into`, a directory without segments: links each file from the first of
    /// `from` that has it (a base and its increments), copies where links are impossible, and
    /// checks everything against `snapshot`.
    ///
    /// Errors: [`CacheError::Snapshot`] names the first file that is missing or another than
    /// listed; else as [`SsdLog::open`].
    pub fn restore(
        from: &[&Path],
        snapshot: &Snapshot,
        into: &Path,
        options: Options,
    ) -> Result<Self> {
        Self::restore_with(Box::new(Disk), from, snapshot, into, options)
    }

    /// [`SsdLog::restore`] on another file system.
    ///
    /// Errors: as [`SsdLog::restore`].
    pub fn restore_with(
        files: Box<dyn Files>,
        from: &[&Path],
        snapshot: &Snapshot,
        into: &Path,
        options: Options,
    ) -> Result<Self> {
        snapshot::gather(&*files, from, snapshot, into)?;
        let width = |bytes: u64| usize::try_from(bytes).unwrap_or(usize::MAX);
        let weight_bytes = width(snapshot.weight_bytes);
        let layout = RowLayout { weight_bytes, state_bytes: width(snapshot.state_bytes) };
        let nothing = |_: &dyn Files, _: &Path| Ok(());
        let verify = |state: &State| snapshot.verify(state);
        Self::build(files, into, snapshot.tag, layout, options, nothing, verify)
    }

    /// Seals what was put so far and links all segments into `into`, which must have none of them:
    /// everything is on the medium when this returns. Where links are impossible files are copied.
    ///
    /// Errors: as [`ColdRows::put`], and what the file system says of `into`.
    pub fn snapshot(&self, into: &Path) -> Result<Snapshot> {
        snapshot::snapshot(&self.inner, into, None)
    }

    /// [`SsdLog::snapshot`] that links only the files that `base` does not have. Its list is
    /// complete all the same: [`SsdLog::restore`] wants both directories.
    ///
    /// Errors: as [`SsdLog::snapshot`].
    pub fn snapshot_since(&self, base: &Snapshot, into: &Path) -> Result<Snapshot> {
        snapshot::snapshot(&self.inner, into, Some(base))
    }

    /// [`SsdLog::snapshot_since`] whose caller keeps the files its own way: `keep` is called with
    /// each file that `base` does not have, and its path. Until this returns no file is deleted,
    /// and what was linked never changes.
    ///
    /// Errors: as [`ColdRows::put`], and what `keep` says.
    pub fn snapshot_by<E: From<CacheError>>(
        &self,
        base: Option<&Snapshot>,
        keep: impl FnMut(&SegmentFile, &Path) -> std::result::Result<(), E>,
    ) -> std::result::Result<Snapshot, E> {
        snapshot::snapshot_by(&self.inner, base, keep)
    }

    /// Compacts now, at full speed, until the live share holds; gives the segments deleted.
    ///
    /// Errors: as [`ColdRows::put`], or a damaged record.
    pub fn compact_now(&self) -> Result<u64> {
        self.hurried(|inner| compact(inner, Aim::Share, 0, || false))
    }

    /// The log's directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.inner.dir
    }

    fn hurried<T>(&self, work: impl FnOnce(&Inner) -> T) -> T {
        self.inner.hurry.fetch_add(1, Ordering::Relaxed);
        self.inner.wake();
        let done = work(&self.inner);
        self.inner.hurry.fetch_sub(1, Ordering::Relaxed);
        done
    }

    /// Appends records of `rows` if there is room, or when compaction has made room.
    fn append(
        &self,
        operation: &'static str,
        rows: &[u64],
        reserve: u64,
        change: impl Fn(&mut Writer) -> Result<()>,
    ) -> Result<()> {
        let inner = &*self.inner;
        let wanted = rows.len() as u64;
        let attempt = || {
            inner.change(operation, |writer| {
                fits(inner, wanted, reserve)?;
                change(writer)
            })
        };
        match attempt() {
            Err(CacheError::Budget { needed, budget, .. })
                if self.live_bytes() + needed + reserve <= budget =>
            {
                let enough = || fits(inner, wanted, reserve).is_ok();
                self.hurried(|inner| compact(inner, Aim::Room, 0, enough))?;
                attempt()
            }
            result => result,
        }
    }

    /// Bytes that files of the rows alone would take.
    fn live_bytes(&self) -> u64 {
        growth(&self.inner, None, read(&self.inner.state).rows)
    }

    /// Checks that planes and rows belong together.
    fn check_lengths(
        &self,
        operation: &'static str,
        rows: usize,
        given: [(&'static str, usize); 2],
    ) -> Result<()> {
        let RowLayout { weight_bytes, state_bytes } = self.inner.geometry.layout;
        for ((what, given), row_bytes) in given.into_iter().zip([weight_bytes, state_bytes]) {
            let needed = rows.saturating_mul(row_bytes);
            if given != needed {
                return Err(CacheError::WrongRows { operation, rows, what, given, needed });
            }
        }
        Ok(())
    }
}

impl ColdRows for SsdLog {
    fn layout(&self) -> RowLayout {
        self.inner.geometry.layout
    }

    fn get(&self, rows: &[u64], mut to: PlanesMut<'_>, found: &mut [bool]) -> Result<()> {
        let lengths = [("weights", to.weights.len()), ("state", to.state.len())];
        self.check_lengths("get", rows.len(), lengths)?;
        if found.len() != rows.len() {
            let (what, given, needed) = ("found", found.len(), rows.len());
            let (operation, rows) = ("get", rows.len());
            return Err(CacheError::WrongRows { operation, rows, what, given, needed });
        }
        get::get(&self.inner, rows, &mut to, found)
    }

    fn put(&self, rows: &[u64], from: Planes<'_>) -> Result<()> {
        let lengths = [("weights", from.weights.len()), ("state", from.state.len())];
        self.check_lengths("put", rows.len(), lengths)?;
        {
            let state = read(&self.inner.state);
            rows.iter().try_for_each(|&row| state.places.check("put", row))?;
        }
        self.append("put", rows, self.inner.options.segment_bytes, |writer| {
            writer.append(&self.inner, Kind::Row, rows, Some(from))
        })?;
        self.inner.counters.rows_written.add(rows.len() as u64);
        Ok(())
    }

    fn remove(&self, rows: &[u64]) -> Result<()> {
        let removed = std::cell::Cell::new(0);
        // What is kept free for compaction may hold tombstones: removing is how room is made.
        self.append("remove", rows, 0, |writer| {
            let mut held = rows.to_vec();
            {
                let state = read(&self.inner.state);
                let is_row = |row| state.places.get(row).is_some_and(|place| !place.is_tombstone());
                held.retain(|&row| is_row(row));
            }
            removed.set(held.len() as u64);
            writer.append(&self.inner, Kind::Tombstone, &held, None)
        })?;
        self.inner.counters.rows_removed.add(removed.get());
        Ok(())
    }

    fn contains(&self, rows: &[u64], found: &mut [bool]) {
        let state = read(&self.inner.state);
        for (&row, found) in rows.iter().zip(found) {
            *found = state.places.get(row).is_some_and(|place| !place.is_tombstone());
        }
    }

    fn flush(&self) -> Result<()> {
        self.inner.change("flush", |writer| writer.flush(&self.inner))
    }

    fn len(&self) -> u64 {
        read(&self.inner.state).rows
    }

    fn stats(&self) -> ColdStats {
        let (counters, geometry) = (&self.inner.counters, &self.inner.geometry);
        let state = read(&self.inner.state);
        ColdStats {
            rows: state.rows,
            live_bytes: state.rows * geometry.record_bytes as u64,
            file_bytes: state.file_bytes(geometry),
            index_bytes: state.places.bytes(),
            segments: state.held.len() as u64 + u64::from(state.open.is_some()),
            rows_read: counters.rows_read.get(),
            rows_written: counters.rows_written.get(),
            rows_removed: counters.rows_removed.get(),
            get_bytes: counters.get_bytes.get(),
            put_bytes: counters.put_bytes.get(),
            compaction_read_bytes: counters.compaction_read_bytes.get(),
            compaction_bytes: counters.compaction_bytes.get(),
            compactions: counters.compactions.get(),
            reader: self.inner.reader.name(),
        }
    }
}

impl Drop for SsdLog {
    fn drop(&mut self) {
        lock(&self.inner.signal).stop = true;
        self.inner.signalled.notify_all();
        if let Some(compactor) = self.compactor.take() {
            // Its panics were printed; nothing more can be done here.
            let _ = compactor.join();
        }
        // So that the next opening need not tell a torn tail from damage. A failure leaves the
        // segment unsealed, which is as good as a crash.
        let _ = self.inner.change("close", |writer| writer.seal(&self.inner));
    }
}

/// What to do about an error of the system's, where there is something.
pub(crate) fn hint(error: &std::io::Error) -> &'static str {
    use std::io::ErrorKind::{QuotaExceeded, StorageFull};
    match (error.kind(), error.raw_os_error()) {
        (StorageFull | QuotaExceeded, _) => {
            "; free space there, or bound the tier with tiers.ssd_bytes"
        }
        (_, Some(libc::EMFILE | libc::ENFILE)) => {
            "; allow more open files (ulimit -n) or use larger segments"
        }
        (_, Some(libc::ENOMEM)) => "; allow more maps (vm.max_map_count) or use larger segments",
        _ => "",
    }
}

/// The compaction thread: looks whenever a segment was sealed, until told to stop.
fn compact_when_signalled(inner: &Inner) {
    loop {
        let mut signal = lock(&inner.signal);
        while !signal.look && !signal.stop {
            signal =
                inner.signalled.wait(signal).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
        if signal.stop {
            return;
        }
        signal.look = false;
        drop(signal);
        let stopping = || lock(&inner.signal).stop;
        let done = compact(inner, Aim::Share, inner.options.compaction_bytes_per_s, stopping);
        if done.is_err() {
            // The log refuses changes from now on and says why.
            return;
        }
    }
}
