//! The group of one rank.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use crate::transport::{Failure, Message, Stall, Transport};
use crate::{Communicator, Options, Result};

/// A communicator of one rank. Operations are done when the call returns, on the caller's thread,
/// and a vector handed in is the vector that comes back.
#[must_use]
pub fn single(options: &Options) -> Communicator {
    Communicator::inline("world", Arc::new(Single::default()), 0, options)
}

/// No peers: there is nobody to post to or to receive from.
#[derive(Default)]
pub(crate) struct Single {
    failure: Arc<OnceLock<Failure>>,
}

impl Transport for Single {
    fn post(&self, to: usize, _: Message) -> std::result::Result<(), Stall> {
        Err(Stall::Gone(format!("a group of one has no rank {to}")))
    }

    fn receive(&self, from: usize, _: Instant) -> std::result::Result<Message, Stall> {
        Err(Stall::Gone(format!("a group of one has no rank {from}")))
    }

    fn failure(&self) -> Option<Failure> {
        self.failure.get().cloned()
    }

    fn poison(&self, failure: Failure) {
        self.failure.get_or_init(|| failure);
    }

    fn group(&self, _: u64, _: &[usize]) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Self { failure: Arc::clone(&self.failure) }))
    }
}
