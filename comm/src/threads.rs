//! Ranks that are threads of one process.
//!
//! Every group has an inbox per rank; a message is a header and a reference to the sender's
//! buffer. Nothing here is global: a process can have several worlds.

use std::collections::HashMap;
use std::panic::resume_unwind;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use crate::delay::{Delayed, Link};
use crate::inbox::Inbox;
use crate::transport::{Failure, Message, Stall, Transport};
use crate::{CommError, Communicator, Options, Result, single};

/// The communicators of a new world of `ranks` ranks, each to be moved to its rank's thread.
///
/// Errors: [`CommError::Thread`]; [`CommError::Argument`] for no ranks.
pub fn world(ranks: usize, options: &Options) -> Result<Vec<Communicator>> {
    communicators(&Arc::default(), ranks, options)
}

/// Runs `body` on `ranks` threads, each with its communicator of a new world, and returns what
/// they returned, in rank order.
///
/// Errors: as [`world`].
///
/// # Panics
/// When a rank panicked, after all have ended (the others' operations fail at once): with the
/// panic of the rank whose failure was the first.
pub fn run<R: Send>(
    ranks: usize,
    options: &Options,
    body: impl Fn(Communicator) -> R + Sync,
) -> Result<Vec<R>> {
    let world = Arc::default();
    let communicators = communicators(&world, ranks, options)?;
    let body = &body;
    let ended: Vec<std::thread::Result<R>> = std::thread::scope(|scope| {
        // All are started before any is joined.
        let threads: Vec<_> = communicators
            .into_iter()
            .map(|comm| {
                std::thread::Builder::new()
                    .name(format!("rank-{}", comm.rank()))
                    .spawn_scoped(scope, move || body(comm))
                    .map_err(|error| thread_error(&error))
            })
            .collect();
        threads.into_iter().map(|thread| Ok(thread?.join())).collect::<Result<_>>()
    })?;
    let mut panics = HashMap::new();
    let mut results = Vec::with_capacity(ranks);
    for (rank, end) in ended.into_iter().enumerate() {
        match end {
            Ok(result) => results.push(result),
            Err(panic) => drop(panics.insert(rank, panic)),
        }
    }
    let culprit = world.failure.get().map(|failure| failure.rank);
    let first = culprit.filter(|rank| panics.contains_key(rank));
    match first.or_else(|| panics.keys().min().copied()).and_then(|rank| panics.remove(&rank)) {
        Some(panic) => resume_unwind(panic),
        None => Ok(results),
    }
}

fn communicators(world: &Arc<World>, ranks: usize, options: &Options) -> Result<Vec<Communicator>> {
    match ranks {
        0 => Err(CommError::Argument {
            communicator: "world".to_owned(),
            operation: "start".to_owned(),
            reason: "a world has at least one rank".to_owned(),
        }),
        1 => Ok(vec![single(options)]),
        _ => {
            let matrix = world.matrix(ranks);
            (0..ranks)
                .map(|rank| {
                    let all: Vec<usize> = (0..ranks).collect();
                    let (world, matrix) = (Arc::clone(world), Arc::clone(&matrix));
                    let end = End { world, matrix, rank, members: all.clone() };
                    let mut transport: Arc<dyn Transport> = Arc::new(end);
                    if let Some(delay) = options.delay {
                        let link = Arc::new(Link::new(delay));
                        transport = Arc::new(Delayed { inner: transport, link });
                    }
                    Communicator::threaded("world", 0, transport, rank, all, options)
                })
                .collect()
        }
    }
}

fn thread_error(error: &std::io::Error) -> CommError {
    CommError::Thread { communicator: "world".to_owned(), reason: error.to_string() }
}

/// What all groups of a world share.
#[derive(Default)]
struct World {
    failure: OnceLock<Failure>,
    inboxes: Mutex<Vec<Weak<Inbox>>>,
    /// Groups that some of their ranks have joined: id -> (queues, ranks still to come).
    forming: Mutex<HashMap<u64, (Arc<Matrix>, usize)>>,
}

/// The inboxes of one group, by rank.
struct Matrix {
    inboxes: Vec<Arc<Inbox>>,
}

impl World {
    /// The queues of a new group.
    fn matrix(&self, size: usize) -> Arc<Matrix> {
        let inboxes: Vec<_> = (0..size).map(|_| Arc::new(Inbox::new(size))).collect();
        let mut all = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        all.retain(|inbox| inbox.strong_count() > 0);
        all.extend(inboxes.iter().map(Arc::downgrade));
        Arc::new(Matrix { inboxes })
    }

    fn fail(&self, failure: Failure) {
        self.failure.get_or_init(|| failure);
        let inboxes = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        inboxes.iter().filter_map(Weak::upgrade).for_each(|inbox| inbox.wake());
    }

    /// The queues of group `id`, made by the first of its ranks that asks.
    fn join(&self, id: u64, size: usize) -> Arc<Matrix> {
        let mut forming = self.forming.lock().unwrap_or_else(PoisonError::into_inner);
        let (matrix, missing) = forming.entry(id).or_insert_with(|| (self.matrix(size), size));
        let matrix = Arc::clone(matrix);
        *missing -= 1;
        if *missing == 0 {
            forming.remove(&id);
        }
        matrix
    }
}

/// One rank's end of a group's queues.
struct End {
    world: Arc<World>,
    matrix: Arc<Matrix>,
    rank: usize,
    members: Vec<usize>, // numbers in the world
}

impl Transport for End {
    fn post(&self, to: usize, message: Message) -> std::result::Result<(), Stall> {
        if let Some(reason) = self.matrix.inboxes[self.rank].gone(to) {
            return Err(Stall::Gone(reason));
        }
        self.matrix.inboxes[to].deliver(self.rank, message);
        Ok(())
    }

    fn receive(&self, from: usize, deadline: Instant) -> std::result::Result<Message, Stall> {
        self.matrix.inboxes[self.rank].receive(from, deadline, &self.world.failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.world.failure.get().cloned()
    }

    fn poison(&self, failure: Failure) {
        self.world.fail(failure);
    }

    fn group(&self, id: u64, members: &[usize]) -> Result<Arc<dyn Transport>> {
        let place = members.iter().position(|&member| member == self.rank);
        Ok(Arc::new(Self {
            world: Arc::clone(&self.world),
            matrix: self.world.join(id, members.len()),
            rank: place.expect("the caller is a member of the group it asks for"),
            members: members.iter().map(|&member| self.members[member]).collect(),
        }))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        for (peer, inbox) in self.matrix.inboxes.iter().enumerate() {
            if peer != self.rank {
                inbox.depart(self.rank, "it has left the group");
            }
        }
        // Buffers of others must not wait for the group's end.
        self.matrix.inboxes[self.rank].clear();
    }
}
