//! A discrete-event simulation of tasks that need each other and share resources.
//!
//! ```text
//! loop: take every event of the earliest time     (a task ends)
//!       tell those who waited for it              (a task is ready when its last reason is there)
//!       let each resource start what is ready
//! ```
//! Time is counted in whole picoseconds, so that sums are exact and the order of events never
//! depends on rounding: equal input gives equal output on every machine. Ties are broken by the
//! number of the task, which is the order in which tasks were added.
//!
//! Cost: O((tasks + edges) log tasks); a task takes about 100 bytes.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};

/// Picoseconds: 2^64 of them are 213 days.
pub type Ps = u64;

/// Picoseconds of a millisecond.
const PS_PER_MS: f64 = 1e9;

/// Milliseconds as picoseconds. `ms` is finite and not negative.
#[must_use]
pub fn ps(ms: f64) -> Ps {
    // Saturates.
    (ms * PS_PER_MS).round() as Ps
}

/// Picoseconds as milliseconds.
#[must_use]
pub fn ms(ps: Ps) -> f64 {
    ps as f64 / PS_PER_MS
}

/// How a resource serves several tasks that want it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Policy {
    /// One after the other, in the order in which they became ready.
    Queue,
    /// All at once, each at an equal part of the speed: a link with several messages on it.
    Shared,
}

/// A resource, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ResourceId(usize);

/// A task, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TaskId(usize);

impl TaskId {
    /// Its number, from 0 in the order in which tasks were added.
    #[must_use]
    pub fn index(self) -> usize {
        self.0
    }
}

/// What a task waits for.
#[derive(Debug, Default)]
struct Task {
    resource: Option<usize>,
    work: Ps,
    /// Reasons to wait that are not there yet.
    missing: usize,
    next: Vec<usize>,
}

/// Tasks, what they need and in which order.
#[derive(Debug, Default)]
pub struct Graph {
    policies: Vec<Policy>,
    tasks: Vec<Task>,
}

/// When a task ran, and why not earlier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Everything that it waits for is there.
    pub ready: Ps,
    /// It has its resource.
    pub start: Ps,
    /// It is done.
    pub end: Ps,
    /// The task whose end let it start: the last that it waited for, or the one that held its
    /// resource. None for those that start at 0.
    pub cause: Option<TaskId>,
}

impl Graph {
    /// Adds a resource.
    pub fn resource(&mut self, policy: Policy) -> ResourceId {
        self.policies.push(policy);
        ResourceId(self.policies.len() - 1)
    }

    /// Adds a task that holds `resource` for `work`; without a resource it is a delay.
    pub fn task(&mut self, resource: Option<ResourceId>, work: Ps) -> TaskId {
        let resource = resource.map(|resource| resource.0);
        self.tasks.push(Task { resource, work, ..Task::default() });
        TaskId(self.tasks.len() - 1)
    }

    /// `later` starts after `earlier` has ended.
    pub fn after(&mut self, earlier: TaskId, later: TaskId) {
        self.tasks[earlier.0].next.push(later.0);
        self.tasks[later.0].missing += 1;
    }

    /// Runs all tasks; spans are in the order of the tasks.
    ///
    /// # Panics
    /// If tasks wait for each other in a circle: whoever built the graph is wrong.
    #[must_use]
    pub fn run(self) -> Vec<Span> {
        let mut run = Run::new(self);
        run.all();
        run.spans
    }
}

/// A resource at work.
struct Server {
    policy: Policy,
    /// Ready and not started: (ready, task).
    waiting: BTreeSet<(Ps, usize)>,
    /// `Queue`: the task that holds it, or held it last, and whether it still does.
    holder: Option<usize>,
    busy: bool,
    /// `Shared`: what runs, by the virtual time at which it is done.
    running: BTreeSet<(u128, usize)>,
    /// `Shared`: work that each running task has been given so far, in 2^-32 picoseconds.
    virtual_time: u128,
    /// `Shared`: when `virtual_time` was last brought up to date.
    updated: Ps,
    /// `Shared`: number of the only event that is still meant.
    generation: u64,
}

/// Fractions of a picosecond in virtual time.
const FRACTION_BITS: u32 = 32;

/// Something that happens: a task ends, or a shared resource may have ended one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Ends(usize),
    Look { server: usize, generation: u64 },
}

struct Run {
    tasks: Vec<Task>,
    servers: Vec<Server>,
    spans: Vec<Span>,
    events: BinaryHeap<Reverse<(Ps, Event)>>,
    /// Ready without a resource, at the time at hand: (task, its cause).
    free: Vec<usize>,
    /// Servers that may start something.
    touched: BTreeSet<usize>,
    done: usize,
}

impl Run {
    fn new(graph: Graph) -> Self {
        let server = |policy| Server {
            policy,
            waiting: BTreeSet::new(),
            holder: None,
            busy: false,
            running: BTreeSet::new(),
            virtual_time: 0,
            updated: 0,
            generation: 0,
        };
        let span = Span { ready: 0, start: 0, end: 0, cause: None };
        Self {
            spans: vec![span; graph.tasks.len()],
            servers: graph.policies.into_iter().map(server).collect(),
            tasks: graph.tasks,
            events: BinaryHeap::new(),
            free: Vec::new(),
            touched: BTreeSet::new(),
            done: 0,
        }
    }

    fn all(&mut self) {
        for task in 0..self.tasks.len() {
            if self.tasks[task].missing == 0 {
                self.ready(task, 0, None);
            }
        }
        self.start_what_can(0);
        while let Some(&Reverse((now, _))) = self.events.peek() {
            while let Some(&Reverse((time, event))) = self.events.peek()
                && time == now
            {
                self.events.pop();
                match event {
                    Event::Ends(task) => self.ends(task, now),
                    Event::Look { server, generation } => self.look(server, generation, now),
                }
            }
            self.start_what_can(now);
        }
        let all = self.tasks.len();
        assert_eq!(self.done, all, "{} of {all} tasks wait for each other", all - self.done);
    }

    fn ready(&mut self, task: usize, now: Ps, cause: Option<usize>) {
        self.spans[task].ready = now;
        self.spans[task].cause = cause.map(TaskId);
        match self.tasks[task].resource {
            None => self.free.push(task),
            Some(server) => {
                self.servers[server].waiting.insert((now, task));
                self.touched.insert(server);
            }
        }
    }

    /// Until nothing more can start now. A task without work ends at once and makes others ready.
    fn start_what_can(&mut self, now: Ps) {
        loop {
            if let Some(task) = self.free.pop() {
                self.spans[task].start = now;
                let end = now.saturating_add(self.tasks[task].work);
                if end == now {
                    self.ends(task, now);
                } else {
                    self.events.push(Reverse((end, Event::Ends(task))));
                }
            } else if let Some(server) = self.touched.pop_first() {
                match self.servers[server].policy {
                    Policy::Queue => self.serve_next(server, now),
                    Policy::Shared => self.share(server, now),
                }
            } else {
                return;
            }
        }
    }

    fn serve_next(&mut self, at: usize, now: Ps) {
        let server = &mut self.servers[at];
        if server.busy {
            return;
        }
        let Some((ready, task)) = server.waiting.pop_first() else { return };
        let before = server.holder.replace(task);
        server.busy = true;
        // It was the resource that kept it.
        if ready < now {
            self.spans[task].cause = before.map(TaskId);
        }
        self.spans[task].start = now;
        let end = now.saturating_add(self.tasks[task].work);
        self.events.push(Reverse((end, Event::Ends(task))));
    }

    /// Lets all that wait join, and asks to be looked at when the first is done.
    fn share(&mut self, at: usize, now: Ps) {
        self.bring_up_to_date(at, now);
        while let Some((_, task)) = self.servers[at].waiting.pop_first() {
            let server = &mut self.servers[at];
            let work = u128::from(self.tasks[task].work) << FRACTION_BITS;
            server.running.insert((server.virtual_time + work, task));
            self.spans[task].start = now;
        }
        let server = &mut self.servers[at];
        server.generation += 1;
        if let Some(&(target, _)) = server.running.first() {
            let left = (target - server.virtual_time) * server.running.len() as u128;
            // Rounded up, so that the task is done when it is looked at.
            let wait = left.div_ceil(1 << FRACTION_BITS);
            let time = now.saturating_add(Ps::try_from(wait).unwrap_or(Ps::MAX));
            let generation = server.generation;
            self.events.push(Reverse((time, Event::Look { server: at, generation })));
        }
    }

    fn bring_up_to_date(&mut self, at: usize, now: Ps) {
        let server = &mut self.servers[at];
        let passed = u128::from(now - server.updated) << FRACTION_BITS;
        if let Some(&(target, _)) = server.running.first() {
            let each = passed / server.running.len() as u128;
            // No further than the first is done: what rounding up gave too much is given to none.
            server.virtual_time = (server.virtual_time + each).min(target);
        }
        server.updated = now;
    }

    fn look(&mut self, at: usize, generation: u64, now: Ps) {
        if self.servers[at].generation != generation {
            return;
        }
        self.bring_up_to_date(at, now);
        while let Some(&(target, task)) = self.servers[at].running.first()
            && target <= self.servers[at].virtual_time
        {
            self.servers[at].running.pop_first();
            self.ends(task, now);
        }
        self.touched.insert(at);
    }

    fn ends(&mut self, task: usize, now: Ps) {
        self.spans[task].end = now;
        self.done += 1;
        if let Some(at) = self.tasks[task].resource
            && self.servers[at].policy == Policy::Queue
        {
            self.servers[at].busy = false;
            self.touched.insert(at);
        }
        for next in std::mem::take(&mut self.tasks[task].next) {
            self.tasks[next].missing -= 1;
            if self.tasks[next].missing == 0 {
                self.ready(next, now, Some(task));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn times(spans: &[Span]) -> Vec<(Ps, Ps)> {
        spans.iter().map(|span| (span.start, span.end)).collect()
    }

    #[test]
    fn two_tasks_on_one_queue_follow_each_other() {
        let mut graph = Graph::default();
        let device = graph.resource(Policy::Queue);
        let a = graph.task(Some(device), 30);
        graph.task(Some(device), 20);
        let spans = graph.run();
        assert_eq!(times(&spans), [(0, 30), (30, 50)]);
        // The second was ready and had to wait for the first.
        assert_eq!((spans[1].ready, spans[1].cause, spans[0].cause), (0, Some(a), None));
    }

    #[test]
    fn tasks_on_two_resources_overlap() {
        let mut graph = Graph::default();
        let (device, link) = (graph.resource(Policy::Queue), graph.resource(Policy::Queue));
        let first = graph.task(Some(link), 10);
        let compute = graph.task(Some(device), 40);
        let second = graph.task(Some(link), 10);
        let last = graph.task(None, 5);
        graph.after(first, compute);
        graph.after(compute, last);
        graph.after(second, last);
        let spans = graph.run();
        assert_eq!(times(&spans), [(0, 10), (10, 50), (10, 20), (50, 55)]);
        assert_eq!(spans[last.index()].cause, Some(compute));
    }

    #[test]
    fn a_queue_serves_in_the_order_of_readiness() {
        let mut graph = Graph::default();
        let device = graph.resource(Policy::Queue);
        let late = graph.task(Some(device), 10);
        let early = graph.task(Some(device), 10);
        let first = graph.task(Some(device), 50);
        let (wait_long, wait_short) = (graph.task(None, 20), graph.task(None, 10));
        graph.after(wait_long, late);
        graph.after(wait_short, early);
        let spans = graph.run();
        assert_eq!(spans[first.index()].end, 50);
        assert_eq!(times(&spans[..2]), [(60, 70), (50, 60)]);
    }

    #[test]
    fn a_shared_link_gives_each_message_an_equal_part() {
        // 30 and 60 together: both at half speed until 60, then the second's 30 alone.
        let mut graph = Graph::default();
        let link = graph.resource(Policy::Shared);
        graph.task(Some(link), 30);
        graph.task(Some(link), 60);
        assert_eq!(times(&graph.run()), [(0, 60), (0, 90)]);
        // One that comes at 40: the first has 10 of its 50 left, which then take 20.
        let mut graph = Graph::default();
        let link = graph.resource(Policy::Shared);
        graph.task(Some(link), 50);
        let wait = graph.task(None, 40);
        let second = graph.task(Some(link), 100);
        graph.after(wait, second);
        assert_eq!(times(&graph.run()), [(0, 60), (0, 40), (40, 150)]);
        // Three at a third each, which is no whole number of picoseconds.
        let mut graph = Graph::default();
        let link = graph.resource(Policy::Shared);
        for _ in 0..3 {
            graph.task(Some(link), 7);
        }
        assert_eq!(times(&graph.run()), [(0, 21); 3]);
    }

    #[test]
    fn work_on_a_shared_link_is_kept() {
        // Whatever comes when: while there is work the link works, so the last end is known.
        let mut graph = Graph::default();
        let link = graph.resource(Policy::Shared);
        let mut total = 0;
        for i in 0..100u64 {
            let work = 1 + (i * 7919) % 1000;
            let wait = graph.task(None, i);
            let message = graph.task(Some(link), work);
            graph.after(wait, message);
            total += work;
        }
        let spans = graph.run();
        let last = spans.iter().map(|span| span.end).max().unwrap();
        assert!(last >= total && last <= total + 100, "{last} for {total}");
    }

    #[test]
    #[should_panic(expected = "2 of 3 tasks wait for each other")]
    fn a_circle_is_refused() {
        let mut graph = Graph::default();
        let tasks = [(); 3].map(|()| graph.task(None, 1));
        graph.after(tasks[0], tasks[1]);
        graph.after(tasks[1], tasks[2]);
        graph.after(tasks[2], tasks[1]);
        let _ = graph.run();
    }

    #[test]
    fn milliseconds_are_kept_to_the_picosecond() {
        assert_eq!(ps(1.5), 1_500_000_000);
        assert_eq!(ms(ps(5793.83)), 5793.83);
    }
}
