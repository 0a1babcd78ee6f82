//! Groups of ranks: what a rank knows of one, and how one is parted.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use tessera_device::fnv1a;

use crate::collectives;
use crate::engine::{Engine, Op};
use crate::payload::Pool;
use crate::{CommError, CommMetrics, LinkDelay, Receive, Result};

/// What a world's communicators share.
#[derive(Clone, Debug)]
pub struct Options {
    /// How long an operation waits for the other ranks, from when it is this rank's turn to carry
    /// it out. It must be longer than any rank may keep the others waiting in earnest.
    pub time_limit: Duration,
    /// Where bytes and times are counted.
    pub metrics: Arc<CommMetrics>,
    /// Makes the links between ranks that are threads slow, to show what overlaps; `None` leaves
    /// them as they are.
    pub delay: Option<LinkDelay>,
    /// Hears of every operation, such as a trace.
    pub listener: Option<Arc<dyn Listener>>,
}

/// Hears of operations as they end.
pub trait Listener: Send + Sync + std::fmt::Debug {
    /// An operation of `communicator` on rank `rank` of the world, of step `step`, took from `start`
    /// to `end`: from when it was its turn, waiting for other ranks included. Called on the
    /// communicator's own thread.
    fn operation(
        &self,
        rank: usize,
        communicator: &str,
        operation: &str,
        step: u64,
        start: Instant,
        end: Instant,
    );
}

impl Default for Options {
    /// Ten minutes; metrics that nobody sees.
    fn default() -> Self {
        Self {
            time_limit: Duration::from_secs(600),
            metrics: Arc::default(),
            delay: None,
            listener: None,
        }
    }
}

/// What a rank knows of a group it is in.
pub(crate) struct Group {
    pub(crate) name: String,
    pub(crate) id: u64,
    pub(crate) rank: usize,
    /// Numbers in the world, by rank of the group.
    pub(crate) ranks: Vec<usize>,
    pub(crate) time_limit: Duration,
    pub(crate) metrics: Arc<CommMetrics>,
    pub(crate) listener: Option<Arc<dyn Listener>>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) failed: OnceLock<CommError>,
}

impl Group {
    pub(crate) fn new(
        name: &str,
        id: u64,
        rank: usize,
        ranks: Vec<usize>,
        options: &Options,
    ) -> Self {
        Self {
            name: name.to_owned(),
            id,
            rank,
            ranks,
            time_limit: options.time_limit,
            metrics: Arc::clone(&options.metrics),
            listener: options.listener.clone(),
            pool: Arc::default(),
            failed: OnceLock::new(),
        }
    }

    /// This rank's number in the world.
    pub(crate) fn world_rank(&self) -> usize {
        self.ranks[self.rank]
    }
}

/// The new group that a rank is in after a split.
pub(crate) struct Split {
    pub(crate) id: u64,
    pub(crate) members: Vec<usize>, // ranks of the old group
    pub(crate) rank: usize,
    pub(crate) differing: Vec<usize>, // world ranks of members that call it by another name
}

/// Gathers what every rank gave (`[in a group, color, key, hash of the name]`) and finds this
/// rank's group.
pub(crate) fn members(engine: &mut Engine, op: &Op, send: Vec<u64>) -> Result<Option<Split>> {
    let all = collectives::all_gather(engine, op, send, Receive::new())?;
    let group = &engine.group;
    let own = all.part(group.rank);
    if own[0] == 0 {
        return Ok(None);
    }
    let mut members: Vec<usize> =
        (0..all.ranks()).filter(|&rank| all.part(rank)[..2] == own[..2]).collect();
    members.sort_by_key(|&rank| (all.part(rank)[2], rank));
    let name = all.part(members[0])[3];
    let differing = members
        .iter()
        .filter(|&&rank| all.part(rank)[3] != name)
        .map(|&rank| group.ranks[rank])
        .collect();
    let place = members.iter().position(|&rank| rank == group.rank);
    let rank = place.expect("a rank has its own color");
    // A function of (group, place in its program, color), the same on all members.
    let id = fnv1a(bytemuck::bytes_of(&[group.id, op.header.sequence, own[1]]));
    Ok(Some(Split { id, members, rank, differing }))
}
