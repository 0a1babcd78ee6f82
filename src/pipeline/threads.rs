//! Stages on threads of their own.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender, TrySendError, bounded};

use super::{Feeder, Next};
use crate::clock::{Clock, Lane, Watch};
use crate::model::{ModelDevice, RowFetchers};
use crate::{Error, Result};

/// Most batches on their way where the configuration sets no depth: each has memory of its own.
const DEPTH_MAX: usize = 4;

/// Share of a step's time that it may wait for its batch before the depth grows.
const WAIT_SHARE: f64 = 0.02;

/// Steps between looks at it.
const STEPS_WATCHED: u64 = 8;

/// How long stages may take to end by themselves after a failure.
const END_TIME: Duration = Duration::from_millis(500);

/// What goes from stage to stage.
struct Item<D: ModelDevice> {
    next: Result<Next<D>>,
    /// Whether the feeder waits behind it.
    pauses: bool,
}

/// The step's end of the stages.
pub struct Threads<D: ModelDevice> {
    items: Receiver<Item<D>>,
    credits: Sender<()>,
    go_on: Sender<()>,
    /// Says which step is over; `None` where nobody waits for that.
    over: Option<Newest>,
    /// The step that was taken last.
    step: u64,
    /// Whether the feeder waits behind what was taken last.
    pauses: bool,
    depth: usize,
    /// The depth may grow to this.
    depth_max: usize,
    taken: u64,
    watched_from: Instant,
    waited: Duration,
}

/// Tells another thread of steps. It may be busy, and wants to know of the newest one only: that one
/// takes the place of one not heard yet, and nobody who tells ever waits.
struct Newest {
    tell: Sender<u64>,
    /// Takes back what was not heard.
    unheard: Receiver<u64>,
}

impl Newest {
    fn channel() -> (Self, Receiver<u64>) {
        let (tell, hear) = bounded(1);
        (Self { tell, unheard: hear.clone() }, hear)
    }

    fn tell(&self, step: u64) {
        while let Err(TrySendError::Full(_)) = self.tell.try_send(step) {
            let _ = self.unheard.try_recv();
        }
    }
}

/// Runs `body` on what `feeder` gives, with the stages before the step on threads of their own.
/// `watch` watches a thread's stages. `give_up` tells the other ranks that this one has failed, for
/// one of them may be what a stage of this rank waits for.
///
/// Errors: what `body` says, which reports those of stages.
pub fn run<D: ModelDevice, R>(
    feeder: Feeder<'_, D>,
    watch: &(dyn Fn(Lane) -> Option<Watch> + Sync),
    give_up: &dyn Fn(&str),
    body: impl FnOnce(Threads<D>) -> Result<R>,
) -> Result<R> {
    let panicked = Mutex::new(None);
    std::thread::scope(|scope| {
        let (depth, depth_max) = match feeder.depth() {
            Some(depth) => (depth.get(), depth.get()),
            None => (1, DEPTH_MAX),
        };
        // Credits bound what is on its way; each queue has room for all of it and an end.
        let room = depth_max + 1;
        let (credits, paid) = bounded(depth_max);
        for _ in 0..depth {
            credits.send(()).expect("there is room for all credits");
        }
        let (go_on, told) = bounded(1);
        let mut over = None;
        let panicked = &panicked;
        let mut handles = Vec::new();
        let (fetchers, begun) = (feeder.fetchers(), feeder.step());
        let (to_next, mut items) = bounded(room);
        handles.push(spawn(scope, "feed", move || {
            feed(feeder, watch, panicked, &to_next, &paid, &told);
        })?);
        if let Some(fetchers) = fetchers {
            let (to_step, fetched) = bounded(room);
            let (tell, hear) = Newest::channel();
            over = Some(tell);
            let from = std::mem::replace(&mut items, fetched);
            handles.push(spawn(scope, "fetch", move || {
                fetch(&fetchers, watch, panicked, &from, &to_step, &hear, begun);
            })?);
        }
        let ends = Ends { handles, give_up };
        let now = Instant::now();
        let threads = Threads {
            items,
            credits,
            go_on,
            over,
            step: 0,
            pauses: false,
            depth,
            depth_max,
            taken: 0,
            watched_from: now,
            waited: Duration::ZERO,
        };
        let result = body(threads);
        if let Err(error) = &result {
            ends.wait(&error.to_string());
        }
        result
    })
    .map_err(|error| match panicked.into_inner() {
        // What the step heard of from other ranks began here.
        Ok(Some(own)) if error.is_heard() => own,
        _ => error,
    })
}

/// The stages' threads. When the body panics, the other ranks are told before anybody waits.
struct Ends<'scope, 'g> {
    handles: Vec<ScopedJoinHandle<'scope, ()>>,
    give_up: &'g dyn Fn(&str),
}

impl Ends<'_, '_> {
    /// Waits for stages that are ending, or makes them: another rank may be what they wait for.
    fn wait(&self, reason: &str) {
        let start = Instant::now();
        while !self.handles.iter().all(ScopedJoinHandle::is_finished) {
            if start.elapsed() > END_TIME {
                (self.give_up)(reason);
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Ends<'_, '_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            (self.give_up)("it panicked");
        }
    }
}

fn spawn<'scope>(
    scope: &'scope Scope<'scope, '_>,
    name: &'static str,
    work: impl FnOnce() + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, ()>> {
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn_scoped(scope, work).map_err(|source| Error::Stage {
        stage: name,
        reason: format!("its thread does not start: {source}"),
    })
}

/// Feeds until there is nothing more to feed, or nobody takes it.
fn feed<D: ModelDevice>(
    mut feeder: Feeder<'_, D>,
    watch: &(dyn Fn(Lane) -> Option<Watch> + Sync),
    panicked: &Panicked,
    to: &Sender<Item<D>>,
    paid: &Receiver<()>,
    told: &Receiver<()>,
) {
    let watch = watch(Lane::Feed);
    while paid.recv().is_ok() {
        let mut clock = Clock::watched(watch.clone(), feeder.step() + 1);
        let mut next = guarded("feed", panicked, || feeder.routed(&mut clock));
        if let Err(error @ Error::Stage { .. }) = &next {
            // The other ranks do not wait for what this one will never say.
            feeder.give_up(&error.to_string());
        }
        if let Ok(Next::Step(fed)) = &mut next {
            fed.stages = clock.finish().1;
        }
        let ends = matches!(&next, Err(_) | Ok(Next::End | Next::Signal(_)));
        let pauses = next.as_ref().is_ok_and(|next| feeder.pauses_after(next));
        if to.send(Item { next, pauses }).is_err() || ends || (pauses && told.recv().is_err()) {
            return;
        }
    }
}

/// Fetches the rows of each batch, of the steps after `begun`.
fn fetch<D: ModelDevice>(
    fetchers: &RowFetchers,
    watch: &(dyn Fn(Lane) -> Option<Watch> + Sync),
    panicked: &Panicked,
    from: &Receiver<Item<D>>,
    to: &Sender<Item<D>>,
    over: &Receiver<u64>,
    begun: u64,
) {
    let watch = watch(Lane::Fetch);
    let mut last = begun; // the newest step that is over
    for Item { mut next, pauses } in from {
        let mut alone = None;
        if let Ok(Next::Step(fed)) = &mut next {
            let mut clock = Clock::watched(watch.clone(), fed.step);
            let fetched = loop {
                let fetched = guarded("fetch", panicked, || {
                    let fetched = fetchers.fetch(&mut fed.found)?;
                    clock.lap("fetch");
                    Ok(fetched)
                });
                last = over.try_recv().unwrap_or(last);
                // Where there is no room, there may be when a step before it is over.
                match fetched {
                    Ok(false) if last + 1 < fed.step => match over.recv() {
                        Ok(step) => last = step,
                        Err(_) => return,
                    },
                    other => break other,
                }
            };
            match fetched {
                Ok(true) => {}
                Ok(false) => alone = Some(fed.step),
                Err(error) => {
                    let _ = to.send(Item { next: Err(error), pauses });
                    return;
                }
            }
            fed.stages.extend(clock.finish().1);
        }
        let ends = next.is_err();
        if to.send(Item { next, pauses }).is_err() || ends {
            return;
        }
        // Nothing is fetched beside a batch that did not fit: it needs the room.
        while alone.is_some_and(|step| last < step) {
            match over.recv() {
                Ok(step) => last = step,
                Err(_) => return,
            }
        }
    }
}

impl<D: ModelDevice> Threads<D> {
    /// See [`Source::next`](super::Source::next).
    pub(super) fn next(&mut self, clock: &mut Clock) -> Result<Next<D>> {
        let asked = Instant::now();
        let lost = || Error::Stage { stage: "pipeline", reason: "its threads are gone".to_owned() };
        let Item { next, pauses } = self.items.recv().map_err(|_| lost())?;
        let now = Instant::now();
        clock.lap("wait");
        self.pauses = pauses;
        let mut next = next?;
        if let Next::Step(fed) = &mut next {
            self.step = fed.step;
            clock.absorb(std::mem::take(&mut fed.stages));
            self.watch_waits(asked, now);
        }
        // The feeder may be gone, with nothing left to feed.
        let _ = self.credits.try_send(());
        Ok(next)
    }

    /// See [`Source::done`](super::Source::done).
    pub(super) fn done(&mut self) {
        if let Some(over) = &self.over {
            over.tell(self.step);
        }
        if std::mem::take(&mut self.pauses) {
            // A pause is not a wait.
            self.taken = 0;
            let _ = self.go_on.send(());
        }
    }

    /// Lets one batch more be on its way if steps wait for theirs.
    fn watch_waits(&mut self, asked: Instant, now: Instant) {
        if self.depth == self.depth_max {
            return;
        }
        // What comes first after a beginning has to be waited for.
        if self.taken == 0 {
            (self.watched_from, self.waited) = (now, Duration::ZERO);
        } else {
            self.waited += now - asked;
        }
        self.taken += 1;
        if self.taken > STEPS_WATCHED {
            let share = self.waited.as_secs_f64() / (now - self.watched_from).as_secs_f64();
            if share > WAIT_SHARE && self.credits.try_send(()).is_ok() {
                self.depth += 1;
            }
            self.taken = 0;
        }
    }
}

/// The error of the first stage that panicked.
type Panicked = Mutex<Option<Error>>;

/// What a stage's work gives; a panic in it is an error that names the stage.
fn guarded<R>(
    stage: &'static str,
    panicked: &Panicked,
    work: impl FnOnce() -> Result<R>,
) -> Result<R> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        let reason = format!("it panicked: {}", text.unwrap_or("?"));
        let mut first = panicked.lock().unwrap_or_else(PoisonError::into_inner);
        first.get_or_insert_with(|| Error::Stage { stage, reason: reason.clone() });
        Err(Error::Stage { stage, reason })
    })
}
