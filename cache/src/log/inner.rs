//! What the log's methods and its compaction thread share.
//!
//! Locks, always taken in this order: `compacting` (one compaction), `deleting` (files disappear
//! or are linked), `writer` (appends), `state` (short: index and segments).

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{
    Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};

use super::files::Files;
use super::format::Geometry;
use super::options::Options;
use super::read::SegmentReader;
use super::state::State;
use super::writer::Writer;
use crate::{CacheError, Result};

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Count(AtomicU64);

impl Count {
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What was done so far.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub rows_read: Count,
    pub rows_written: Count,
    pub rows_removed: Count,
    pub get_bytes: Count,
    pub put_bytes: Count,
    pub compaction_read_bytes: Count,
    pub compaction_bytes: Count,
    pub compactions: Count,
}

/// What the compaction thread waits for.
#[derive(Debug, Default)]
pub(crate) struct Signal {
    pub look: bool,
    pub stop: bool,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub files: Box<dyn Files>,
    pub dir: PathBuf,
    pub tag: u64,
    pub geometry: Geometry,
    /// Records of a segment, its seal not counted.
    pub capacity: u64,
    pub options: Options,
    pub reader: Box<dyn SegmentReader>,
    pub counters: Counters,
    pub compacting: Mutex<()>,
    pub deleting: Mutex<()>,
    pub writer: Mutex<Writer>,
    pub state: RwLock<State>,
    /// The first failure of a write.
    pub failure: Mutex<Option<String>>,
    pub signal: Mutex<Signal>,
    pub signalled: Condvar,
    /// Calls that wait for compaction: while there are any, its rate has no bound.
    pub hurry: AtomicU32,
    /// Number of the next segment.
    pub number: AtomicU64,
    /// Holds the directory.
    pub _lock: Box<dyn std::fmt::Debug + Send + Sync>,
}

// A thread that panicked inside a lock left nothing half done that the next one could not see:
// what it wrote was published in one step or not at all.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn read<T>(state: &RwLock<T>) -> RwLockReadGuard<'_, T> {
    state.read().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn write<T>(state: &RwLock<T>) -> RwLockWriteGuard<'_, T> {
    state.write().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    /// Runs a change under the writer's lock, unless one failed before; its failure is the last.
    pub fn change<T>(
        &self,
        operation: &'static str,
        change: impl FnOnce(&mut Writer) -> Result<T>,
    ) -> Result<T> {
        let mut writer = lock(&self.writer);
        self.usable(operation)?;
        let result = change(&mut writer);
        if let Err(error) = &result {
            self.fail(error);
        }
        result
    }

    /// Refuses when a change failed before.
    pub fn usable(&self, operation: &'static str) -> Result<()> {
        match &*lock(&self.failure) {
            None => Ok(()),
            Some(cause) => {
                let (dir, cause) = (self.dir.clone(), cause.clone());
                Err(CacheError::Refused { dir, operation, cause })
            }
        }
    }

    /// Remembers the first failure: what the files hold is no longer known. Want of room and
    /// refusals happen before anything is written and are none.
    pub fn fail(&self, error: &CacheError) {
        if !matches!(error, CacheError::Budget { .. } | CacheError::Refused { .. }) {
            lock(&self.failure).get_or_insert_with(|| error.to_string());
        }
    }

    pub fn next_number(&self) -> Result<u32> {
        let number = self.number.fetch_add(1, Ordering::Relaxed);
        u32::try_from(number).map_err(|_| CacheError::Options {
            faults: format!(
                "{}: all 2^32 segment numbers are used up; use larger segments",
                self.dir.display()
            ),
        })
    }

    /// Lets the compaction thread look whether there is work.
    pub fn wake(&self) {
        lock(&self.signal).look = true;
        self.signalled.notify_all();
    }
}
