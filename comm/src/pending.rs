//! The result of an operation that may still be going on.

use std::fmt;
use std::sync::Arc;

use crossbeam::channel::Receiver;

use crate::group::Group;
use crate::{CommError, Result};

/// The result of a posted operation. Dropping it does not undo the operation: it still happens,
/// in its place, and a failure of it is what the communicator's next operation reports.
#[must_use = "an operation's failure is seen by waiting for it"]
pub struct Pending<R> {
    state: State<R>,
}

enum State<R> {
    Done(Result<R>),
    Posted(Receiver<Result<R>>, Arc<Group>),
}

impl<R> Pending<R> {
    pub(crate) fn done(result: Result<R>) -> Self {
        Self { state: State::Done(result) }
    }

    pub(crate) fn posted(result: Receiver<Result<R>>, group: Arc<Group>) -> Self {
        Self { state: State::Posted(result, group) }
    }

    /// Whether [`Pending::wait`] would return at once.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        match &self.state {
            State::Done(_) => true,
            State::Posted(result, _) => !result.is_empty(),
        }
    }

    /// Waits for the operation.
    ///
    /// Errors: those of the operation, and [`CommError::Refused`] when one before it failed.
    pub fn wait(self) -> Result<R> {
        match self.state {
            State::Done(result) => result,
            State::Posted(result, group) => result.recv().unwrap_or_else(|_| {
                Err(CommError::WorkerLost { communicator: group.name.clone() })
            }),
        }
    }
}

impl<R> fmt::Debug for Pending<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("ready", &self.is_ready()).finish()
    }
}
