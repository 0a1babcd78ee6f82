//! Ranks that are processes of an MPI job (Open MPI, MPICH and its relatives).
//!
//! One thread owns the library, which is initialised and used on it alone; the communicators of
//! the process hand it their messages and find what arrives in their inboxes, as on threads:
//!
//! ```text
//! Communicator threads --commands--> MPI thread --Isend--> other processes
//!                      <--inboxes---            <--Irecv--
//! ```
//!
//! MPI's own communicator is the world's, whatever groups there are: a message's header says which
//! group it is for. A message is its header with one tag, then its payload in pieces that fit
//! MPI's 32-bit counts with another; MPI keeps the order of either between two processes.
//! Reductions are ours, not the library's, so that sums have the same bits as on threads.
//!
//! The thread asks the library for news without end, because nothing else makes MPI go on. It
//! waits longer between the questions, up to a millisecond, the longer there is no news.

mod buffers;
mod end;
mod library;
mod pump;

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, bounded, unbounded};

use crate::header::{Header, Kind, VERSION};
use crate::{CommError, Communicator, Dtype, Options, Result, single};
use end::{End, Shared};
use library::Library;
use pump::{Command, Pump};

/// The longest piece of a payload in bytes: MPI counts in 32-bit integers.
pub const PIECE_BYTES_MAX: usize = i32::MAX as usize;

/// How long a rank that gives up goes on telling the others why.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// This process's place in the MPI job: keep it until the end, then [`Job::finalize`] it, or
/// [`Job::abort`] when the run has failed.
///
/// Dropping it without either leaves the job as a failed process does: the others are told, and
/// the launcher ends them when this process exits.
#[derive(Debug)]
pub struct Job {
    rank: usize,
    size: usize,
    library: String,
    commands: Sender<Command>,
    thread: Option<JoinHandle<()>>,
    ended: Receiver<Result<()>>,
}

/// Joins the MPI job that started this process and returns the communicator of all its ranks.
/// A process can do this once in its life.
///
/// Errors: [`CommError::Backend`] when the library refuses or was initialised before;
/// [`CommError::Thread`].
pub fn init(options: &Options) -> Result<(Job, Communicator)> {
    init_with_pieces(options, PIECE_BYTES_MAX)
}

/// [`init`] with payloads cut in pieces of at most `piece_bytes_max` bytes, at least 1 and at most
/// [`PIECE_BYTES_MAX`]; all ranks must give the same number. Small ones are of use in tests only.
///
/// Errors: as [`init`]; [`CommError::Argument`].
pub fn init_with_pieces(options: &Options, piece_bytes_max: usize) -> Result<(Job, Communicator)> {
    if !(1..=PIECE_BYTES_MAX).contains(&piece_bytes_max) {
        return Err(CommError::Argument {
            communicator: "world".to_owned(),
            operation: "init".to_owned(),
            reason: format!("pieces of {piece_bytes_max} bytes, 1 to {PIECE_BYTES_MAX} can be"),
        });
    }
    let shared = Arc::new(Shared::default());
    let (commands, queue) = unbounded();
    let (started, start) = bounded(1);
    let (ended_sender, ended) = bounded(1);
    let of_thread = Arc::clone(&shared);
    let time_limit = options.time_limit;
    let thread = std::thread::Builder::new()
        .name("comm-mpi".to_owned())
        .spawn(move || {
            let library = match Library::start() {
                Ok(library) => library,
                Err(error) => return drop(started.send(Err(error))),
            };
            let (rank, size) = (library.rank(), library.size());
            if started.send(Ok((rank, size, library.version()))).is_err() {
                return;
            }
            let pump = Pump::new(library, of_thread, queue, piece_bytes_max, time_limit);
            // The job may be gone without having asked.
            let _ = ended_sender.send(pump.run());
        })
        .map_err(|error| CommError::Thread {
            communicator: "world".to_owned(),
            reason: error.to_string(),
        })?;
    let lost = || Err(CommError::WorkerLost { communicator: "world".to_owned() });
    let (rank, size, library) = start.recv().unwrap_or_else(|_| lost())?;
    let comm = if size == 1 {
        single(options)
    } else {
        let all: Vec<usize> = (0..size).collect();
        let end = End::join(&shared, &commands, 0, rank, all.clone());
        Communicator::threaded("world", 0, Arc::new(end), rank, all, options)?
    };
    Ok((Job { rank, size, library, commands, thread: Some(thread), ended }, comm))
}

impl Job {
    /// This process's number in the job.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Processes in the job.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// The library's name and version.
    #[must_use]
    pub fn library(&self) -> &str {
        &self.library
    }

    /// Ends this process's part in the job, when all its communicators are dropped and their
    /// operations done, together with all other processes.
    ///
    /// Errors: [`CommError::WorldFailed`] when the world has failed: exit with a code other than
    /// 0, or [`Job::abort`]; [`CommError::TimeLimit`] when a communicator is still held or a
    /// process does not come within the time limit.
    pub fn finalize(mut self) -> Result<()> {
        let _ = self.commands.send(Command::Finish);
        self.join()
            .unwrap_or_else(|| Err(CommError::WorkerLost { communicator: "world".to_owned() }))
    }

    /// Ends all processes of the job, after a moment in which the others learn why from the
    /// failure of their operations. Print this process's reason before.
    pub fn abort(self, code: i32) -> ! {
        let _ = self.commands.send(Command::Abort(code));
        // The thread does not come back from it, unless the library is stuck.
        let _ = self.ended.recv_timeout(LAST_WORDS + Duration::from_secs(2));
        std::process::exit(code)
    }

    fn join(&mut self) -> Option<Result<()>> {
        let result = self.ended.recv().ok();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        result
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        if self.thread.is_some() {
            let _ = self.commands.send(Command::Leave);
            let _ = self.ended.recv_timeout(LAST_WORDS + Duration::from_secs(2));
        }
    }
}

/// What a message is about that is no operation's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Control {
    /// The sender has left a group.
    Left = 128,
    /// The world has failed, on rank `detail`; the payload is the message.
    Failed = 129,
    /// The sender has left all groups and ends.
    Bye = 130,
}

impl Control {
    fn of_kind(kind: u8) -> Option<Self> {
        [Self::Left, Self::Failed, Self::Bye].into_iter().find(|control| *control as u8 == kind)
    }

    fn header(self, communicator: u64, detail: u32, count: usize) -> Header {
        const { assert!(Kind::ALL.len() < Self::Left as usize) };
        Header {
            communicator,
            sequence: 0,
            step: 0,
            extent: 0,
            count: count as u64,
            detail,
            kind: self as u8,
            phase: 0,
            dtype: Dtype::U8.code(),
            version: VERSION,
        }
    }
}

/// Whether `limit` has passed since `start`.
fn past(start: Instant, limit: Duration) -> bool {
    start.elapsed() >= limit
}
