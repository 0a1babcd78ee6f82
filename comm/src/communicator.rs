//! A rank's place in a group: the operations that everybody uses.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::{Sender, bounded};
use tessera_device::{fnv1a, key_of_name};

use crate::collectives;
use crate::engine::{Engine, Op};
use crate::group::{Group, Options, members};
use crate::header::{Header, Kind, Reduction, VERSION};
use crate::reduce::{self, Combine};
use crate::transport::{Failure, Transport};
use crate::{CommError, Dtype, Ordered, Parts, Pending, Receive, Result, Summable, Wire};

/// Operations that wait for the communicator's thread at most; posting more waits for it.
const QUEUED_OPERATIONS: usize = 256;

type Task = Box<dyn FnOnce(&mut Engine) + Send>;

/// Who carries out the operations.
enum Executor {
    /// The caller: a group of one has nobody to wait for.
    Caller(Box<RefCell<Engine>>),
    /// A thread that ends when this sender is dropped and its queue is empty.
    Thread(Sender<Task>),
}

/// One rank's place in a group of ranks.
///
/// All ranks of the group must post the same operations in the same order. A communicator can be
/// sent to another thread but not shared by threads, for their order would be chance.
///
/// Arguments that do not fit together are an error of the returned [`Pending`] like any other:
/// the operation cannot take place, so the world fails.
///
/// Dropping a communicator leaves its group, after the operations already posted: they go on
/// without it. Peers that wait for later ones are told at once.
pub struct Communicator {
    group: Arc<Group>,
    transport: Arc<dyn Transport>,
    executor: Executor,
    sequence: Cell<u64>,
    step: Cell<u64>,
}

impl Communicator {
    /// A communicator whose operations run on a thread of its own.
    ///
    /// Errors: [`CommError::Thread`].
    pub(crate) fn threaded(
        name: &str,
        id: u64,
        transport: Arc<dyn Transport>,
        rank: usize,
        ranks: Vec<usize>,
        options: &Options,
    ) -> Result<Self> {
        let group = Arc::new(Group::new(name, id, rank, ranks, options));
        let mut engine = Engine::new(Arc::clone(&group), Arc::clone(&transport));
        let (tasks, queue) = bounded::<Task>(QUEUED_OPERATIONS);
        std::thread::Builder::new()
            .name(format!("comm-{name}-{rank}"))
            .spawn(move || {
                for task in queue {
                    // The thread must outlive a fault, or nobody would answer who waits for the
                    // operations behind it.
                    if catch_unwind(AssertUnwindSafe(|| task(&mut engine))).is_err() {
                        engine.panicked();
                    }
                }
            })
            .map_err(|error| CommError::Thread {
                communicator: name.to_owned(),
                reason: error.to_string(),
            })?;
        Ok(Self::over(group, transport, Executor::Thread(tasks)))
    }

    /// The communicator of a group of one, rank `world_rank` of the world.
    pub(crate) fn inline(
        name: &str,
        transport: Arc<dyn Transport>,
        world_rank: usize,
        options: &Options,
    ) -> Self {
        let group = Arc::new(Group::new(name, 0, 0, vec![world_rank], options));
        let engine = Engine::new(Arc::clone(&group), Arc::clone(&transport));
        Self::over(group, transport, Executor::Caller(Box::new(RefCell::new(engine))))
    }

    fn over(group: Arc<Group>, transport: Arc<dyn Transport>, executor: Executor) -> Self {
        Self { group, transport, executor, sequence: Cell::new(0), step: Cell::new(0) }
    }

    /// The group's name, for messages and metrics.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.group.name
    }

    /// This rank's number in the group, from 0.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.group.rank
    }

    /// Number of ranks in the group.
    #[must_use]
    pub fn size(&self) -> usize {
        self.group.ranks.len()
    }

    /// The numbers in the world of the group's ranks, in the group's order. Errors and metrics
    /// name ranks by them.
    #[must_use]
    pub fn world_ranks(&self) -> &[usize] {
        &self.group.ranks
    }

    /// How long an operation waits for the other ranks.
    #[must_use]
    pub fn time_limit(&self) -> Duration {
        self.group.time_limit
    }

    /// The step that operations posted now belong to.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step.get()
    }

    /// Sets the step that later operations belong to. Ranks in different steps at one operation
    /// are an error.
    pub fn set_step(&self, step: u64) {
        self.step.set(step);
    }

    /// Why the communicator refuses work, once an operation has failed.
    #[must_use]
    pub fn failure(&self) -> Option<CommError> {
        self.group.failed.get().cloned()
    }

    /// An empty vector with room for `capacity` elements, of memory that earlier operations are
    /// done with if there is such: vectors handed in come back here when their last reader is
    /// done with them.
    #[must_use]
    pub fn buffer<T: Wire>(&self, capacity: usize) -> Vec<T> {
        let mut buffer = self.group.pool.take(capacity);
        buffer.reserve(capacity);
        buffer
    }

    /// Gives a vector that nobody needs to [`Communicator::buffer`] and to later operations.
    pub fn recycle<T: Wire>(&self, buffer: Vec<T>) {
        self.group.pool.put(buffer);
    }

    /// Sends `counts[r]` elements of `send`, in order, to each rank `r` (itself too).
    pub fn all_to_all_v<T: Wire>(&self, send: Vec<T>, counts: &[usize]) -> Pending<Parts<T>> {
        self.all_to_all_v_with(send, counts, Receive::new())
    }

    /// [`Communicator::all_to_all_v`] with a choice of how to receive.
    pub fn all_to_all_v_with<T: Wire>(
        &self,
        send: Vec<T>,
        counts: &[usize],
        receive: Receive<T>,
    ) -> Pending<Parts<T>> {
        let counts = counts.to_vec();
        self.post(self.op(Kind::AllToAllV, T::DTYPE, 0, 0), move |engine, op| {
            collectives::all_to_all_v(engine, op, send, &counts, receive)
        })
    }

    /// Sends all of `send`, of any length, to every rank (itself too).
    pub fn all_gather<T: Wire>(&self, send: Vec<T>) -> Pending<Parts<T>> {
        self.all_gather_with(send, Receive::new())
    }

    /// [`Communicator::all_gather`] with a choice of how to receive.
    pub fn all_gather_with<T: Wire>(&self, send: Vec<T>, receive: Receive<T>) -> Pending<Parts<T>> {
        self.post(self.op(Kind::AllGather, T::DTYPE, 0, 0), move |engine, op| {
            collectives::all_gather(engine, op, send, receive)
        })
    }

    /// The sum over all ranks of `values`, element by element, in rank order from the first term.
    /// All ranks give the same number of elements.
    ///
    /// Errors: [`CommError::Overflow`] when a sum of integers leaves their range.
    pub fn all_reduce<T: Summable>(&self, values: Vec<T>) -> Pending<Vec<T>> {
        self.reduce_all(values, Reduction::Sum, T::add)
    }

    /// The largest value over all ranks, element by element.
    pub fn all_max<T: Ordered>(&self, values: Vec<T>) -> Pending<Vec<T>> {
        self.reduce_all(values, Reduction::Max, reduce::max)
    }

    /// The smallest value over all ranks, element by element.
    pub fn all_min<T: Ordered>(&self, values: Vec<T>) -> Pending<Vec<T>> {
        self.reduce_all(values, Reduction::Min, reduce::min)
    }

    fn reduce_all<T: Wire>(
        &self,
        values: Vec<T>,
        reduction: Reduction,
        combine: Combine<T>,
    ) -> Pending<Vec<T>> {
        let op = self.op(Kind::AllReduce, T::DTYPE, reduction as u32, values.len() as u64);
        self.post(op, move |engine, op| collectives::all_reduce(engine, op, values, combine))
    }

    /// This rank's part of the sum over all ranks of `values`: as [`Communicator::all_reduce`],
    /// but rank `r` gets only the `counts[r]` elements that are its part. All ranks give the same
    /// counts.
    pub fn reduce_scatter<T: Summable>(&self, values: Vec<T>, counts: &[usize]) -> Pending<Vec<T>> {
        let counts = counts.to_vec();
        // All ranks must cut alike: the cut's hash is beside the kind of reduction.
        let cut = fnv1a(bytemuck::cast_slice(&counts)) as u32;
        let detail = Reduction::Sum as u32 | cut << 8;
        let op = self.op(Kind::ReduceScatter, T::DTYPE, detail, values.len() as u64);
        self.post(op, move |engine, op| {
            collectives::reduce_scatter(engine, op, values, &counts, T::add)
        })
    }

    /// The `values` of rank `root` of the group. The other ranks' values are lost; their memory is
    /// used.
    pub fn broadcast<T: Wire>(&self, values: Vec<T>, root: usize) -> Pending<Vec<T>> {
        let op = self.op(Kind::Broadcast, T::DTYPE, u32::try_from(root).unwrap_or(u32::MAX), 0);
        self.post(op, move |engine, op| collectives::broadcast(engine, op, values, root))
    }

    /// Done when every rank has posted it.
    pub fn barrier(&self) -> Pending<()> {
        self.post(self.op(Kind::Barrier, Dtype::U8, 0, 0), collectives::barrier)
    }

    /// Compares a hash of `value`, the same on all ranks if all is well, such as a plan or a list
    /// of features. `what` names it in the message. All ranks get the same result, and the
    /// communicator stays usable.
    ///
    /// Errors: [`CommError::Disagreement`] with the ranks that differ from the group's first.
    pub fn agree(&self, what: &str, value: &[u8]) -> Pending<()> {
        let op = self.op(Kind::Agree, Dtype::U64, 0, key_of_name(what));
        let what = what.to_owned();
        let send = vec![value.len() as u64, fnv1a(value)];
        self.post(op, move |engine, op| {
            let group = Arc::clone(&engine.group);
            let all = collectives::all_gather(engine, op, send, Receive::new())?;
            let differing: Vec<usize> = (1..group.ranks.len())
                .filter(|&rank| all.part(rank) != all.part(0))
                .map(|rank| group.ranks[rank])
                .collect();
            if differing.is_empty() {
                return Ok(());
            }
            Err(CommError::Disagreement {
                communicator: group.name.clone(),
                what,
                first: group.ranks[0],
                differing,
            })
        })
    }

    /// Parts the group: ranks that give the same `color` form a new one, ordered by `key` and
    /// then by their rank in this one, called `name`. A rank without a color is in none.
    /// All ranks of this group call it, at the same place among its operations; it returns when
    /// all have.
    ///
    /// Errors: those of any operation; [`CommError::Disagreement`] when ranks of one color give it
    /// different names; the backend's.
    pub fn split(&self, name: &str, color: Option<u64>, key: u64) -> Result<Option<Self>> {
        let op = self.op(Kind::Split, Dtype::U64, 0, 0);
        let send = vec![u64::from(color.is_some()), color.unwrap_or(0), key, key_of_name(name)];
        let joined = self.post(op, move |engine, op| {
            let Some(split) = members(engine, op, send)? else { return Ok(None) };
            let transport = engine.subgroup(split.id, &split.members)?;
            Ok(Some((split, transport)))
        });
        let Some((split, transport)) = joined.wait()? else { return Ok(None) };
        if !split.differing.is_empty() {
            return Err(CommError::Disagreement {
                communicator: self.group.name.clone(),
                what: format!("name of the new group (here '{name}')"),
                first: self.group.ranks[split.members[0]],
                differing: split.differing,
            });
        }
        let options =
            // The new group's transport has the delay, if there is one, of this one's.
            Options {
                time_limit: self.group.time_limit,
                metrics: Arc::clone(&self.group.metrics),
                delay: None,
                listener: self.group.listener.clone(),
            };
        let ranks: Vec<usize> = split.members.iter().map(|&rank| self.group.ranks[rank]).collect();
        let created = if ranks.len() == 1 {
            Self::inline(name, transport, ranks[0], &options)
        } else {
            Self::threaded(name, split.id, transport, split.rank, ranks, &options)?
        };
        created.set_step(self.step.get());
        Ok(Some(created))
    }

    /// Another communicator of the same ranks, whose operations go on beside this one's. All ranks
    /// of the group call it, as [`Communicator::split`].
    ///
    /// Errors: as [`Communicator::split`].
    pub fn duplicate(&self, name: &str) -> Result<Self> {
        let created = self.split(name, Some(0), 0)?;
        Ok(created.expect("a rank with a color is in a group"))
    }

    /// Makes the world fail for a reason outside of its operations, such as a file that cannot be
    /// read: the other ranks' operations end at once and say it. Does nothing if the world has
    /// failed already.
    pub fn give_up(&self, reason: &str) {
        let (rank, cause) = (self.group.world_rank(), reason.to_owned());
        self.transport.poison(Failure { rank, cause });
    }

    /// Waits until all operations posted are done, and leaves the group.
    ///
    /// Errors: the first failure of an operation, also of one that nobody waited for.
    pub fn close(self) -> Result<()> {
        if let Executor::Thread(tasks) = &self.executor {
            let (done, wait) = bounded::<()>(1);
            // The thread lives as long as this sender.
            let _ = tasks.send(Box::new(move |_| drop(done)));
            let _ = wait.recv();
        }
        self.group.failed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// The next operation of this rank's program.
    fn op(&self, kind: Kind, dtype: Dtype, detail: u32, extent: u64) -> Op {
        let sequence = self.sequence.get();
        self.sequence.set(sequence + 1);
        let header = Header {
            communicator: self.group.id,
            sequence,
            step: self.step.get(),
            extent,
            count: 0,
            detail,
            kind: kind as u8,
            phase: 0,
            dtype: dtype.code(),
            version: VERSION,
        };
        Op { kind, header }
    }

    fn post<R: Send + 'static>(
        &self,
        op: Op,
        body: impl FnOnce(&mut Engine, &Op) -> Result<R> + Send + 'static,
    ) -> Pending<R> {
        match &self.executor {
            Executor::Caller(engine) => Pending::done(engine.borrow_mut().run(&op, body)),
            Executor::Thread(tasks) => {
                let (done, result) = bounded(1);
                let task: Task = Box::new(move |engine| {
                    // Nobody may be waiting.
                    let _ = done.send(engine.run(&op, body));
                });
                // The thread lives as long as this sender.
                let _ = tasks.send(task);
                Pending::posted(result, Arc::clone(&self.group))
            }
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.give_up("it panicked");
        }
    }
}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Communicator('{}', rank {} of {})", self.name(), self.rank(), self.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::threads;

    #[test]
    fn a_fault_on_the_communication_thread_is_an_error_everywhere() {
        let mut world = threads::world(2, &Options::default()).unwrap();
        let (second, first) = (world.remove(1), world.remove(0));
        let op = first.op(Kind::Barrier, Dtype::U8, 0, 0);
        let faulty = first.post(op, |_, _| -> Result<()> { panic!("a fault, on purpose") });
        assert!(matches!(faulty.wait(), Err(CommError::WorkerLost { .. })));
        let error = first.barrier().wait().unwrap_err();
        assert!(
            error.to_string().starts_with("communicator 'world' refuses barrier #1"),
            "{error}"
        );
        let error = second.barrier().wait().unwrap_err();
        let CommError::WorldFailed { rank: 0, cause, .. } = &error else { panic!("{error}") };
        assert_eq!(cause, "its communication panicked");
        assert!(second.close().is_err());
    }
}
