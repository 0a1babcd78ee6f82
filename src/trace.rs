//! `tessera train --trace`: what every stage and every operation between ranks did, and when.
//!
//! Lanes of a rank: `device` (forward, backward, updates: what overlap hides things behind), `step`
//! (the rest of the training thread, waiting included), `feed` and `fetch` (the stages ahead), and
//! one for each communicator, named `link` and its name.

use std::fmt;
use std::fs::File;
use std::io::BufWriter;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use tessera_comm::{LaunchEnv, Listener};

use crate::chrome_trace::{DEVICE_LANE, Event, TraceWriter};
use crate::clock::{Lane, Probe, Stage};
use crate::{Error, Result};

/// Stages of the training thread in which it computes.
const COMPUTE: [&str; 4] = ["forward", "backward", "update_sparse", "update_dense"];

/// A trace that is being written.
pub struct Trace {
    path: PathBuf,
    begun: Instant,
    writing: Mutex<Writing>,
}

struct Writing {
    /// `None` once it is finished.
    writer: Option<TraceWriter<BufWriter<File>>>,
    /// The first failed write, after which nothing is written.
    failed: Option<std::io::Error>,
}

impl fmt::Debug for Trace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Trace({})", self.path.display())
    }
}

impl Trace {
    /// Begins a trace in `path`; a process that a launcher started as one of several ranks puts its
    /// number before the file's ending.
    ///
    /// Errors: a file that cannot be written.
    pub fn create(path: &Path) -> Result<Self> {
        let launched = LaunchEnv::read(|name| std::env::var(name).ok())?;
        let path = match launched.filter(|launched| launched.size > 1) {
            Some(launched) => of_rank(path, launched.rank),
            None => path.to_path_buf(),
        };
        let failed = |source| Error::Write { path: path.clone(), source };
        let file = File::create(&path).map_err(failed)?;
        let writer = TraceWriter::new(BufWriter::new(file)).map_err(failed)?;
        let writing = Mutex::new(Writing { writer: Some(writer), failed: None });
        Ok(Self { path, begun: Instant::now(), writing })
    }

    /// Ends the trace.
    ///
    /// Errors: the first write that failed.
    pub fn finish(&self) -> Result<()> {
        let mut writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let finished = match (writing.failed.take(), writing.writer.take()) {
            (Some(error), _) => Err(error),
            (None, Some(writer)) => writer.finish().map(drop),
            (None, None) => Ok(()),
        };
        finished.map_err(|source| Error::Write { path: self.path.clone(), source })
    }

    fn write(
        &self,
        rank: usize,
        lane: String,
        stage: &str,
        step: u64,
        start: Instant,
        end: Instant,
    ) {
        let us = |time: Instant| time.saturating_duration_since(self.begun).as_secs_f64() * 1e6;
        let event = Event {
            stage: stage.to_owned(),
            rank,
            lane,
            step: (step > 0).then_some(step),
            micro_batch: None,
            start_us: us(start),
            duration_us: us(end) - us(start),
        };
        let mut writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(writer) = &mut writing.writer
            && let Err(error) = writer.event(&event)
        {
            (writing.failed, writing.writer) = (Some(error), None);
        }
    }
}

/// `path` with the rank's number before its ending.
fn of_rank(path: &Path, rank: usize) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let ending = path.extension().map_or(String::new(), |e| format!(".{}", e.to_string_lossy()));
    path.with_file_name(format!("{stem}.{rank}{ending}"))
}

impl Probe for Trace {
    fn span(&self, stage: Stage<'_>, start: Instant, end: Instant) {
        let lane = match stage.lane {
            Lane::Step if COMPUTE.contains(&stage.name) => DEVICE_LANE,
            lane => lane.name(),
        };
        self.write(stage.rank, lane.to_owned(), stage.name, stage.step, start, end);
    }
}

impl Listener for Trace {
    fn operation(
        &self,
        rank: usize,
        communicator: &str,
        operation: &str,
        step: u64,
        start: Instant,
        end: Instant,
    ) {
        self.write(rank, format!("link {communicator}"), operation, step, start, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_job_have_files_of_their_own() {
        assert_eq!(of_rank(Path::new("a/t.json"), 3), Path::new("a/t.3.json"));
        assert_eq!(of_rank(Path::new("t"), 0), Path::new("t.0"));
    }
}
