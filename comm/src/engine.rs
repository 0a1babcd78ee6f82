//! Carries out the operations of one communicator, one after another.
//!
//! Everything is built of one step, the exchange:
//!
//! ```text
//! for every peer: post a header and its part of the payload       (never waits)
//! for every peer: receive its header and part, compare the header (until the deadline)
//! ```
//!
//! A rank leaves an exchange only when it has heard from every peer. So all ranks compare notes in
//! every operation, none is more than one operation ahead, and two messages a pair is all that
//! a queue ever holds.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::group::Group;
use crate::header::{Header, Kind};
use crate::metrics::Handles;
use crate::payload::Payload;
use crate::transport::{Failure, Message, Stall, Transport};
use crate::{CommError, Dtype, Result};

/// An operation at its place in the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Op {
    pub(crate) kind: Kind,
    pub(crate) header: Header,
}

impl Op {
    /// The header of the operation's second exchange.
    pub(crate) fn second_phase(&self) -> Header {
        Header { phase: 1, ..self.header }
    }
}

/// The executor of one rank of one group.
pub(crate) struct Engine {
    pub(crate) group: Arc<Group>,
    transport: Arc<dyn Transport>,
    metrics: Handles,
    posting: Duration,
    bytes: [u64; 2], // sent, received by the operation so far
}

impl Engine {
    pub(crate) fn new(group: Arc<Group>, transport: Arc<dyn Transport>) -> Self {
        let metrics = group.metrics.handles(&group);
        Self { group, transport, metrics, posting: Duration::ZERO, bytes: [0; 2] }
    }

    /// Runs an operation, unless one before it failed, and remembers its failure.
    pub(crate) fn run<R>(
        &mut self,
        op: &Op,
        body: impl FnOnce(&mut Self, &Op) -> Result<R>,
    ) -> Result<R> {
        if let Some(cause) = self.group.failed.get() {
            return Err(CommError::Refused {
                communicator: self.group.name.clone(),
                operation: op.header.describe(),
                cause: Box::new(cause.clone()),
            });
        }
        let start = Instant::now();
        (self.posting, self.bytes) = (Duration::ZERO, [0; 2]);
        let result = match self.transport.failure() {
            None => body(self, op),
            Some(failure) => {
                let nothing = vec![None; self.group.ranks.len()];
                let rank = self.group.rank;
                Err(self.diagnose(&op.header, rank, &Stall::WorldFailed(failure), &nothing))
            }
        };
        let end = Instant::now();
        if let Some(listener) = &self.group.listener {
            let (rank, kind) = (self.group.world_rank(), op.kind.name());
            listener.operation(rank, &self.group.name, kind, op.header.step, start, end);
        }
        let receiving = (end - start).saturating_sub(self.posting);
        self.metrics.observe(op.kind, self.bytes, [self.posting, receiving]);
        if let Err(error) = &result
            && !matches!(error, CommError::Disagreement { .. })
        {
            self.group.failed.get_or_init(|| error.clone());
            let (rank, cause) = (self.group.world_rank(), error.to_string());
            self.transport.poison(Failure { rank, cause });
        }
        result
    }

    /// Gives every rank its payload and returns what every rank gave this one, by rank. The
    /// header's count is filled in here; `outgoing` is asked once for each rank, this one too.
    pub(crate) fn exchange(
        &mut self,
        header: &Header,
        outgoing: impl Fn(usize) -> Payload,
    ) -> Result<Vec<Message>> {
        let (rank, size) = (self.group.rank, self.group.ranks.len());
        let element_bytes = Dtype::of_code(header.dtype).map_or(1, Dtype::bytes) as u64;
        let message = |to| {
            let payload = outgoing(to);
            let count = payload.bytes().len() as u64 / element_bytes;
            let posted = Instant::now();
            Message { posted, header: Header { count, ..*header }, payload }
        };
        let start = Instant::now();
        let deadline = deadline(start, self.group.time_limit);
        let mut messages: Vec<Option<Message>> = vec![None; size];
        messages[rank] = Some(message(rank));
        let mut stalled = None;
        // Ranks begin with different peers, so that they do not all send to one.
        for to in (1..size).map(|shift| (rank + shift) % size) {
            let message = message(to);
            self.bytes[0] += message.payload.bytes().len() as u64;
            if let Err(stall) = self.transport.post(to, message) {
                stalled.get_or_insert((to, stall));
            }
        }
        self.posting += start.elapsed();
        if let Some((to, stall)) = stalled {
            return Err(self.diagnose(header, to, &stall, &messages));
        }
        for from in (1..size).map(|shift| (rank + size - shift) % size) {
            let waiting = Instant::now();
            let received = self.transport.receive(from, deadline);
            self.metrics.observe_wait(from, waiting.elapsed());
            match received {
                Ok(message) => {
                    self.check(header, from, &message.header)?;
                    self.bytes[1] += message.payload.bytes().len() as u64;
                    messages[from] = Some(message);
                }
                Err(stall) => return Err(self.diagnose(header, from, &stall, &messages)),
            }
        }
        Ok(messages.into_iter().flatten().collect())
    }

    /// Notes that an operation panicked: a fault of this crate, after which nothing can be relied
    /// on.
    pub(crate) fn panicked(&self) {
        let communicator = self.group.name.clone();
        self.group.failed.get_or_init(|| CommError::WorkerLost { communicator });
        let (rank, cause) = (self.group.world_rank(), "its communication panicked".to_owned());
        self.transport.poison(Failure { rank, cause });
    }

    /// This rank's end of a new group; see [`Transport::group`].
    pub(crate) fn subgroup(&self, id: u64, members: &[usize]) -> Result<Arc<dyn Transport>> {
        self.transport.group(id, members)
    }

    fn check(&self, ours: &Header, peer: usize, theirs: &Header) -> Result<()> {
        if ours.agrees_with(theirs) {
            return Ok(());
        }
        let mut text = theirs.describe();
        if theirs.step != ours.step {
            text.push_str(&format!(" in its step {}", theirs.step));
        }
        Err(CommError::Mismatch {
            communicator: self.group.name.clone(),
            step: ours.step,
            rank: self.group.world_rank(),
            ours: ours.describe(),
            peer: self.group.ranks[peer],
            theirs: text,
        })
    }

    /// Why an exchange cannot go on. A peer's message that does not fit tells more than the
    /// silence it led to, so all that has arrived is looked at first.
    fn diagnose(
        &self,
        header: &Header,
        peer: usize,
        stall: &Stall,
        messages: &[Option<Message>],
    ) -> CommError {
        let mut missing = Vec::new();
        for from in (0..messages.len()).filter(|&from| from != self.group.rank) {
            if messages[from].is_some() {
                continue;
            }
            match self.transport.receive(from, Instant::now()) {
                Ok(message) => {
                    if let Err(mismatch) = self.check(header, from, &message.header) {
                        return mismatch;
                    }
                }
                Err(_) => missing.push(self.group.ranks[from]),
            }
        }
        missing.sort_unstable();
        let communicator = self.group.name.clone();
        let (step, operation) = (header.step, header.describe());
        match stall {
            Stall::TimeLimit => {
                if missing.is_empty() {
                    missing.push(self.group.ranks[peer]); // it came just now, too late
                }
                let limit = self.group.time_limit;
                CommError::TimeLimit { communicator, step, operation, limit, missing }
            }
            Stall::Gone(reason) => CommError::Gone {
                communicator,
                step,
                operation,
                peer: self.group.ranks[peer],
                reason: reason.clone(),
            },
            Stall::WorldFailed(Failure { rank, cause }) => CommError::WorldFailed {
                communicator,
                step,
                operation,
                rank: *rank,
                cause: cause.clone(),
            },
        }
    }
}

/// The end of a time limit that begins at `start`; a limit beyond the clock's range is a century.
pub(crate) fn deadline(start: Instant, limit: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_secs(3_155_760_000);
    start.checked_add(limit).unwrap_or_else(|| start + CENTURY)
}
