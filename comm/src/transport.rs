//! Messages between two ranks of a group, in order: what a backend has to provide.

use std::sync::Arc;
use std::time::Instant;

use crate::Result;
use crate::header::Header;
use crate::payload::Payload;

/// What one rank posts to another.
#[derive(Clone)]
pub(crate) struct Message {
    /// When it was posted.
    pub(crate) posted: Instant,
    pub(crate) header: Header,
    pub(crate) payload: Payload,
}

/// The first failure of a world.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    /// The rank in the world on which it was seen.
    pub(crate) rank: usize,
    /// Its message.
    pub(crate) cause: String,
}

/// Why there is no message.
#[derive(Clone, Debug)]
pub(crate) enum Stall {
    /// The deadline has passed.
    TimeLimit,
    /// The peer is gone, and this is known of why.
    Gone(String),
    /// The world has failed.
    WorldFailed(Failure),
}

/// One rank's end of the matrix of message queues between the ranks of one group.
///
/// Obligations of an implementor:
/// - messages from one rank to another arrive whole, once, and in the order posted;
/// - `post` never waits for the receiver. Memory stays bounded all the same: an operation is over
///   only when something has come from every peer, so no rank is more than one operation, two
///   messages, ahead of another;
/// - `receive` gives what has arrived even when the peer is gone or the world has failed, and
///   otherwise returns at once when either happens;
/// - after `poison` on any rank, every receive in every group of the world ends;
/// - dropping the end makes it gone for its peers, after the messages already posted.
pub(crate) trait Transport: Send + Sync {
    /// Sends a message to rank `to` of the group, another than this one.
    fn post(&self, to: usize, message: Message) -> std::result::Result<(), Stall>;

    /// The next message from rank `from` of the group.
    fn receive(&self, from: usize, deadline: Instant) -> std::result::Result<Message, Stall>;

    /// The world's failure, if it has failed.
    fn failure(&self) -> Option<Failure>;

    /// Makes the world fail, for this reason if it is the first.
    fn poison(&self, failure: Failure);

    /// This rank's end of a new group with this id. `members` are ranks of this group, in the
    /// order of the new one, and include this rank; all of them call this with the same arguments.
    ///
    /// Errors: the backend's.
    fn group(&self, id: u64, members: &[usize]) -> Result<Arc<dyn Transport>>;
}
