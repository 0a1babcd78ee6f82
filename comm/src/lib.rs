//! Collective operations between the ranks of a training job.
//!
//! A [`Communicator`] is a rank's place in a group of ranks. Its operations ([`all_to_all_v`],
//! [`all_reduce`], …) return at once with a [`Pending`] value; a thread of the communicator
//! carries them out, in program order, while the caller computes. Overlap of two operations is
//! two communicators ([`Communicator::duplicate`]).
//!
//! Every rank of a group must post the same operations, with the same types, in the same order,
//! whatever its data. Each message says what it belongs to, so a rank that does otherwise is an
//! error on it and on its peers, not a hang or a wrong sum. So are a rank that is gone and a rank
//! that keeps the others waiting beyond the [time limit](Options::time_limit). After an error the
//! communicator refuses further work, and all communicators of the same world stop.
//!
//! ```text
//! Communicator   typed operations, order, errors, metrics         one per rank and group
//!   worker       carries operations out: post to all, receive from all, copy or sum
//!     Transport  messages between two ranks in order: single | threads | mpi
//! ```
//!
//! Reductions are sums of ours, in rank order from the first term: the same bits on every
//! backend. Between ranks of one process a message is a shared buffer, and the receiver's copy to
//! its place is the only one.
//!
//! [`all_to_all_v`]: Communicator::all_to_all_v
//! [`all_reduce`]: Communicator::all_reduce

mod codec;
mod collectives;
mod communicator;
mod delay;
mod engine;
mod error;
mod group;
mod header;
mod inbox;
mod launch;
mod metrics;
#[cfg(feature = "mpi")]
pub mod mpi;
mod payload;
mod pending;
mod reduce;
mod single;
#[cfg(any(feature = "mpi", test))]
mod split;
pub mod threads;
mod transport;
mod wire;

pub use codec::Codec;
pub use collectives::{Parts, Receive, share};
pub use communicator::Communicator;
pub use delay::LinkDelay;
pub use error::{CommError, Result};
pub use group::{Listener, Options};
pub use launch::{LaunchEnv, Launcher};
pub use metrics::CommMetrics;
pub use pending::Pending;
pub use single::single;
pub use wire::{Dtype, Ordered, Summable, Wire};
