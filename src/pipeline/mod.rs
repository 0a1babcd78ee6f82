//! The way of a batch to its training step, in stages that may each have a thread.
//!
//! ```text
//! reader  files -> batches                                   (thread of its own, mode permitting)
//! feed    this rank's share; ids checked, agreed on by all ranks, routed to their owners
//! fetch   rows that lie in slower tiers are copied near                  (where rows move)
//! step    lookup, forward, backward, exchange of gradients, update
//! ```
//! In mode serial one thread does all of it for one batch after the other. In the other modes each
//! stage is a thread that hands what it is done with to the next over a bounded queue. The stages
//! do the same work in the same order on communicators of their own, and what they do ahead (ids,
//! routes, copies of rows that the store keeps right) does not depend on weights: so every mode
//! and depth has the bits of serial.
//!
//! **Clustering.** With several micro-batches the feeder may order a share's samples anew
//! ([`Clusterer`]): it trains on the same samples in the same step.
//!
//! **Bounds.** At most `depth` batches are past the reader and not yet in their step: the feeder
//! takes a credit for each, the step gives it back when it takes the batch. Unless the
//! configuration sets it, the depth begins at 1 and grows as long as steps wait.
//!
//! **Pauses.** Where an evaluation, a checkpoint or a new epoch follows a step, the feeder stops
//! behind it until it is told to go on: nothing is in flight at such a moment.
//!
//! **Room.** A batch whose rows do not fit beside those of batches before it goes on unfetched, and
//! its step brings its rows; nothing behind it is fetched before that step is over.
//!
//! **Failures.** A stage that fails hands on its error and ends; the step reports it, named. A step
//! that fails drops its end of the queue, and every stage ends.

mod cluster;
mod feed;
mod threads;

pub use cluster::{Clustered, Clusterer};
pub use feed::{Fed, Feeder, Next, signal};
pub use threads::{Threads, run};

use crate::Result;
use crate::clock::Clock;
use crate::model::ModelDevice;

/// Where a training loop gets its batches.
pub enum Source<'a, D: ModelDevice> {
    /// The same thread, one after the other.
    Serial(Box<Feeder<'a, D>>),
    /// Stages on threads.
    Ahead(Threads<D>),
}

impl<D: ModelDevice> Source<'_, D> {
    /// What comes next. `clock` has run since it was asked for; its stages are those of this
    /// thread, and those that other threads did for the batch. A collective in mode serial.
    ///
    /// Errors: those of any stage.
    pub fn next(&mut self, clock: &mut Clock) -> Result<Next<D>> {
        match self {
            Self::Serial(feeder) => feeder.next(clock),
            Self::Ahead(threads) => threads.next(clock),
        }
    }

    /// A step, or what came instead of one, is over.
    pub fn done(&mut self) {
        if let Self::Ahead(threads) = self {
            threads.done();
        }
    }
}
