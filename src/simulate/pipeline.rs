//! A training run as tasks: the stages of several steps on the lanes of several ranks.
//!
//! ```text
//! ahead of a step, each stage a thread with a bounded queue behind it (serial: one after the other)
//!   read -> upload -> keys* -> ssd -> host                           -> window
//! the window of a step; (j) for each micro-batch
//!   install, shared -> lookup(j) -> exchange out*(j) -> dense(j) -> exchange back*(j)
//!     -> update -> sync* (every k steps) -> overhead
//!   the last dense(j) is cut in buckets, whose gradients are added up meanwhile: all_reduce*
//! * collective: starts when all ranks are there, ends for all when the last has sent
//! ```
//! Modes differ in what waits for what:
//! - `serial`: everything waits for what is before it.
//! - `prefetch`: the stages ahead of a window run while earlier windows do. `host` fills the buffer
//!   that the window before has swapped away, so that it is one window ahead and no more.
//! - `nested`: besides, micro-batches overlap within a window. Weights stay as they are until
//!   `update`, so that only the first exchange out and the last one back have nothing to hide behind.
//! - `split`: rows that the step before does not touch are looked up and exchanged one window ahead;
//!   the rest (`seen_share`) in the window. `nested_split` is both.
//! - `async`: `prefetch` that does not bring rows up to date which the step before has changed
//!   (`shared`): not exact, and no mode of training.
//!
//! Ranks that do the same work take the same time, so that one of each class is simulated.

use super::costs::{ClassCosts, LinkWork};
use super::engine::{Graph, Policy, ResourceId, TaskId, ps};
use super::spec::Mode;

/// A resource of a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lane {
    /// The thread that reads batches.
    Reader,
    /// Between device and host memory.
    HostLink,
    /// The disks.
    Ssd,
    /// Copies inside device memory.
    Copy,
    /// Computations.
    Device,
    /// Links to ranks of the same node.
    IntraNode,
    /// Links to other nodes.
    InterNode,
}

impl Lane {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Reader,
        Self::HostLink,
        Self::Ssd,
        Self::Copy,
        Self::Device,
        Self::IntraNode,
        Self::InterNode,
    ];

    /// Name in traces and reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Reader => "reader",
            Self::HostLink => "host_link",
            Self::Ssd => "ssd",
            Self::Copy => "copy",
            Self::Device => crate::chrome_trace::DEVICE_LANE,
            Self::IntraNode => "intra_node",
            Self::InterNode => "inter_node",
        }
    }

    /// Links carry several messages at once; the others do one thing after the other.
    fn policy(self) -> Policy {
        match self {
            Self::HostLink | Self::IntraNode | Self::InterNode => Policy::Shared,
            _ => Policy::Queue,
        }
    }
}

/// How a run is staged.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// What may overlap.
    pub mode: Mode,
    /// Parts of a batch.
    pub micro_batches: usize,
    /// Batches that are read ahead at the most.
    pub depth: usize,
    /// Batches that fit between two stages.
    pub queue: usize,
    /// Steps between synchronisations of replicas; `None` without replicas.
    pub sync_every: Option<usize>,
    /// Parts in which dense gradients are added up.
    pub buckets: usize,
    /// Share of a batch's rows that the step before touches too: modes that split.
    pub seen_share: f64,
    /// Steps.
    pub steps: usize,
}

/// A task that is shown: a stage at work.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Work {
    /// The task.
    pub task: TaskId,
    /// Name of the stage.
    pub stage: &'static str,
    /// Number of the class of ranks.
    pub class: usize,
    /// Where.
    pub lane: Lane,
    /// Step, from 0.
    pub step: usize,
    /// Part of the batch.
    pub micro_batch: Option<usize>,
}

/// The tasks of a run.
pub struct Run {
    /// What waits for what.
    pub graph: Graph,
    /// The tasks that do something.
    pub works: Vec<Work>,
    /// The end of each step: a task that waits for everything in it.
    pub ends: Vec<TaskId>,
}

/// What a step looks like to those who build its tasks.
#[derive(Clone, Copy)]
struct At {
    step: usize,
    micro_batch: Option<usize>,
}

/// Tasks by class of ranks.
type PerClass = Vec<TaskId>;

struct Builder<'a> {
    classes: &'a [ClassCosts],
    schedule: Schedule,
    lanes: Vec<[ResourceId; Lane::ALL.len()]>,
    run: Run,
}

/// Builds the tasks of `schedule.steps` steps.
#[must_use]
pub fn build(classes: &[ClassCosts], schedule: Schedule) -> Run {
    let mut graph = Graph::default();
    let lanes =
        classes.iter().map(|_| Lane::ALL.map(|lane| graph.resource(lane.policy()))).collect();
    let run = Run { graph, works: Vec::new(), ends: Vec::new() };
    let mut builder = Builder { classes, schedule, lanes, run };
    if schedule.mode.reads_ahead() {
        builder.ahead();
    } else {
        builder.serial();
    }
    builder.run
}

impl Builder<'_> {
    fn join(&mut self, earlier: &[TaskId]) -> TaskId {
        let join = self.run.graph.task(None, 0);
        for &task in earlier {
            self.run.graph.after(task, join);
        }
        join
    }

    /// A point in time of each class, after all of `earlier`.
    fn point(&mut self, earlier: &[&PerClass]) -> PerClass {
        (0..self.classes.len())
            .map(|class| {
                let earlier: Vec<TaskId> = earlier.iter().map(|tasks| tasks[class]).collect();
                self.join(&earlier)
            })
            .collect()
    }

    /// A stage on one lane, on each class after `earlier`. Nothing to do takes no lane.
    fn stage(
        &mut self,
        stage: &'static str,
        lane: Lane,
        at: At,
        earlier: &[TaskId],
        cost_ms: impl Fn(&ClassCosts) -> f64,
    ) -> PerClass {
        let mut tasks = Vec::with_capacity(self.classes.len());
        for (class, &before) in earlier.iter().enumerate() {
            let task = self.work(stage, lane, at, class, ps(cost_ms(&self.classes[class])));
            self.run.graph.after(before, task);
            tasks.push(task);
        }
        tasks
    }

    fn work(&mut self, stage: &'static str, lane: Lane, at: At, class: usize, work: u64) -> TaskId {
        if work == 0 {
            return self.run.graph.task(None, 0);
        }
        let task = self.run.graph.task(Some(self.lanes[class][lane as usize]), work);
        let (step, micro_batch) = (at.step, at.micro_batch);
        self.run.works.push(Work { task, stage, class, lane, step, micro_batch });
        task
    }

    /// A collective: from when all classes have come past `earlier` (and the operation before it on
    /// the same communicator is over) until all have sent. Latency takes no part of a link.
    fn collective(
        &mut self,
        stage: &'static str,
        at: At,
        earlier: &[TaskId],
        before: &mut Option<TaskId>,
        cost: impl Fn(&ClassCosts) -> LinkWork,
    ) -> PerClass {
        let start = self.join(earlier);
        if let Some(before) = *before {
            self.run.graph.after(before, start);
        }
        let mut sent = vec![start];
        for class in 0..self.classes.len() {
            let cost = cost(&self.classes[class]);
            let mut begin = start;
            if ps(cost.latency_ms) > 0 {
                begin = self.run.graph.task(None, ps(cost.latency_ms));
                self.run.graph.after(start, begin);
                let lane = if cost.far_ms > 0.0 { Lane::InterNode } else { Lane::IntraNode };
                let (task, step, micro_batch) = (begin, at.step, at.micro_batch);
                self.run.works.push(Work { task, stage, class, lane, step, micro_batch });
            }
            for (lane, ms) in [(Lane::IntraNode, cost.near_ms), (Lane::InterNode, cost.far_ms)] {
                let task = self.work(stage, lane, at, class, ps(ms));
                self.run.graph.after(begin, task);
                sent.push(task);
            }
        }
        let end = self.join(&sent);
        *before = Some(end);
        vec![end; self.classes.len()]
    }

    /// The stages before a window, one after the other.
    fn serial(&mut self) {
        let mut last = self.point(&[]);
        for step in 0..self.schedule.steps {
            let at = At { step, micro_batch: None };
            last = self.stage("read", Lane::Reader, at, &last, |c| c.read_ms);
            last = self.stage("upload", Lane::HostLink, at, &last, |c| c.upload_ms);
            last = self.collective("keys", at, &last, &mut None, |c| c.keys);
            last = self.stage("ssd", Lane::Ssd, at, &last, |c| c.ssd_ms);
            last = self.stage("host", Lane::HostLink, at, &last, |c| c.host_ms);
            last = self.window(step, &last);
        }
    }

    /// The stages before a window, each as far ahead as queues, buffers and depth allow.
    fn ahead(&mut self) {
        const STAGES: usize = 5;
        let Schedule { depth, queue, steps, .. } = self.schedule;
        // Points of each stage and step: taken from the queue before it, put into the one behind.
        let mut taken: Vec<Vec<PerClass>> = vec![Vec::new(); STAGES];
        let mut put: Vec<Vec<PerClass>> = vec![Vec::new(); STAGES];
        let mut keys_before = None;
        let mut unseen_before = None;
        // Windows: begun, and their buffers swapped.
        let mut begun: Vec<PerClass> = Vec::new();
        let mut swapped: Vec<PerClass> = Vec::new();
        let mut last_end: Option<PerClass> = None;
        for step in 0..steps {
            let at = At { step, micro_batch: None };
            for stage in 0..STAGES {
                let mut reasons = Vec::new();
                // The thread is free, and there is something to take.
                reasons.extend(step.checked_sub(1).map(|before| put[stage][before].clone()));
                reasons.extend(stage.checked_sub(1).map(|from| put[from][step].clone()));
                if stage == 0 {
                    reasons.extend(step.checked_sub(depth).map(|window| begun[window].clone()));
                }
                let take = self.point(&reasons.iter().collect::<Vec<_>>());
                let done = match stage {
                    0 => self.stage("read", Lane::Reader, at, &take, |c| c.read_ms),
                    1 => self.stage("upload", Lane::HostLink, at, &take, |c| c.upload_ms),
                    2 => self.collective("keys", at, &take, &mut keys_before, |c| c.keys),
                    3 => self.stage("ssd", Lane::Ssd, at, &take, |c| c.ssd_ms),
                    _ => {
                        let free = step.checked_sub(1).map(|before| swapped[before].clone());
                        let earlier =
                            self.point(&std::iter::once(&take).chain(&free).collect::<Vec<_>>());
                        self.stage("host", Lane::HostLink, at, &earlier, |c| c.host_ms)
                    }
                };
                taken[stage].push(take);
                // Held until the stage behind has taken the batch that many steps before.
                let behind = step.checked_sub(queue);
                let room = behind.map(|before| match stage + 1 {
                    STAGES => begun[before].clone(),
                    next => taken[next][before].clone(),
                });
                put[stage]
                    .push(self.point(&std::iter::once(&done).chain(&room).collect::<Vec<_>>()));
            }
            let here = put[STAGES - 1][step].clone();
            let unseen = self.unseen(at, &here, begun.last(), &mut unseen_before);
            let reasons: Vec<&PerClass> =
                [Some(&here), unseen.as_ref(), last_end.as_ref()].into_iter().flatten().collect();
            let begin = self.point(&reasons);
            begun.push(begin.clone());
            let mut swap = self.stage("install", Lane::Copy, at, &begin, |c| c.install_ms);
            if self.schedule.mode.is_exact() {
                swap = self.stage("shared", Lane::Copy, at, &swap, |c| c.shared_ms);
            }
            swapped.push(swap.clone());
            last_end = Some(self.window(step, &swap));
        }
    }

    /// Rows that the window before does not touch, while that one runs: modes that split.
    fn unseen(
        &mut self,
        at: At,
        here: &PerClass,
        window_before: Option<&PerClass>,
        before: &mut Option<TaskId>,
    ) -> Option<PerClass> {
        if !self.schedule.mode.splits() {
            return None;
        }
        let share = 1.0 - self.schedule.seen_share;
        let earlier: Vec<&PerClass> = std::iter::once(here).chain(window_before).collect();
        let start = self.point(&earlier);
        let found = self.stage("lookup", Lane::Device, at, &start, |c| c.lookup_ms * share);
        Some(self.collective("exchange_out", at, &found, before, |c| c.exchange_out.part(share)))
    }

    /// Everything between the rows of a step being there and the next step; gives its end.
    fn window(&mut self, step: usize, ready: &PerClass) -> PerClass {
        let Schedule { mode, micro_batches, .. } = self.schedule;
        let part = 1.0 / micro_batches as f64;
        let seen = part * if mode.splits() { self.schedule.seen_share } else { 1.0 };
        let (mut out_before, mut back_before, mut sum_before) = (None, None, None);
        let (mut looked_up, mut computed) = (ready.clone(), ready.clone());
        let mut back = ready.clone();
        let mut summed = ready.clone();
        for micro_batch in 0..micro_batches {
            let at = At { step, micro_batch: (micro_batches > 1).then_some(micro_batch) };
            // Without a frozen window, a part begins when the one before it is through.
            let begin = if mode.overlaps_parts() { looked_up } else { back.clone() };
            looked_up = self.stage("lookup", Lane::Device, at, &begin, |c| c.lookup_ms * seen);
            let out = |c: &ClassCosts| c.exchange_out.part(seen);
            let rows = self.collective("exchange_out", at, &looked_up, &mut out_before, out);
            let start = self.point(&[&rows, &computed]);
            let forward =
                self.stage("dense", Lane::Device, at, &start, |c| c.dense_ms * part / 3.0);
            let last = micro_batch + 1 == micro_batches;
            (computed, summed) = self.backward(at, &forward, last, &mut sum_before);
            let gradients = |c: &ClassCosts| c.exchange_back.part(part);
            back = self.collective("exchange_back", at, &computed, &mut back_before, gradients);
        }
        let at = At { step, micro_batch: None };
        let all = self.point(&[&back, &summed]);
        let mut end = self.stage("update", Lane::Device, at, &all, |c| c.update_ms);
        if self.schedule.sync_every.is_some_and(|every| (step + 1).is_multiple_of(every)) {
            end = self.collective("sync", at, &end, &mut None, |c| c.sync);
        }
        end = self.stage("overhead", Lane::Device, at, &end, |c| c.overhead_ms);
        let whole = self.join(&end);
        self.run.ends.push(whole);
        end
    }

    /// The backward pass of a micro-batch, and for the last one the sums of its gradients.
    fn backward(
        &mut self,
        at: At,
        forward: &PerClass,
        last: bool,
        before: &mut Option<TaskId>,
    ) -> (PerClass, PerClass) {
        let sums = self.classes.iter().any(|class| class.all_reduce != LinkWork::default());
        let pieces = if last && sums { self.schedule.buckets } else { 1 };
        let share = 1.0 / pieces as f64;
        let part = 2.0 / 3.0 * share / self.schedule.micro_batches as f64;
        let mut computed = forward.clone();
        let mut summed = forward.clone();
        for _ in 0..pieces {
            computed = self.stage("dense", Lane::Device, at, &computed, |c| c.dense_ms * part);
            if last {
                let sum = |c: &ClassCosts| c.all_reduce.part(share);
                summed = self.collective("all_reduce", at, &computed, before, sum);
            }
        }
        (computed, summed)
    }
}
