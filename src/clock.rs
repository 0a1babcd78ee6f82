//! Times of stages: for the lines of `steps.jsonl`, metrics and traces.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

/// Milliseconds of stages by name.
pub type Stages = BTreeMap<String, f64>;

/// A thread of a rank that works on stages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// The training step.
    Step,
    /// Reading and routing of batches ahead.
    Feed,
    /// Fetching of rows ahead.
    Fetch,
}

impl Lane {
    /// Its name in traces.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Step => "step",
            Self::Feed => "feed",
            Self::Fetch => "fetch",
        }
    }
}

/// A stage of a step, as a [`Probe`] sees it.
#[derive(Clone, Copy, Debug)]
pub struct Stage<'a> {
    /// Rank.
    pub rank: usize,
    /// Thread.
    pub lane: Lane,
    /// The step that it belongs to, from 1.
    pub step: u64,
    /// Name.
    pub name: &'a str,
}

/// What watches stages as they happen: a trace that writes them down, or a delay that makes them
/// last.
pub trait Probe: Send + Sync {
    /// A stage's work is done; its time is taken when this returns.
    fn done(&self, _stage: Stage<'_>) {}

    /// A stage's time.
    fn span(&self, _stage: Stage<'_>, _start: Instant, _end: Instant) {}
}

/// What watches the stages of one thread.
#[derive(Clone)]
pub struct Watch {
    /// Rank.
    pub rank: usize,
    /// Thread.
    pub lane: Lane,
    /// Who watches.
    pub probe: Arc<dyn Probe>,
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Watch(rank {}, {})", self.rank, self.lane.name())
    }
}

/// Most different stages of a step.
const STAGES_MAX: usize = 24;

/// Times the stages of a step, without asking for memory.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    last: Instant,
    step: u64,
    /// Milliseconds by name; those in use come first.
    laps: [(&'static str, f64); STAGES_MAX],
    absorbed: Stages,
    watch: Option<Watch>,
}

impl Clock {
    /// A clock that starts now.
    #[must_use]
    pub fn start() -> Self {
        Self::watched(None, 0)
    }

    /// A clock of step `step` that starts now and whose stages are watched.
    #[must_use]
    pub fn watched(watch: Option<Watch>, step: u64) -> Self {
        let now = Instant::now();
        let (laps, absorbed) = ([("", 0.0); STAGES_MAX], Stages::new());
        Self { start: now, last: now, step, laps, absorbed, watch }
    }

    /// Ends a stage; the next one starts. Gives its seconds.
    ///
    /// # Panics
    /// When there are more than 24 stages.
    pub fn lap(&mut self, stage: &'static str) -> f64 {
        let seen = |watch: &Watch| {
            let Watch { rank, lane, .. } = *watch;
            (Arc::clone(&watch.probe), Stage { rank, lane, step: self.step, name: stage })
        };
        let seen = self.watch.as_ref().map(seen);
        if let Some((probe, stage)) = &seen {
            probe.done(*stage);
        }
        let now = Instant::now();
        if let Some((probe, stage)) = &seen {
            probe.span(*stage, self.last, now);
        }
        let seconds = (now - self.last).as_secs_f64();
        self.last = now;
        let is_its = |(name, _): &&mut (&str, f64)| name.is_empty() || *name == stage;
        let lap = self.laps.iter_mut().find(is_its).expect("a place for each stage");
        *lap = (stage, lap.1 + seconds * 1e3);
        seconds
    }

    /// Counts stages that another thread did for this step.
    pub fn absorb(&mut self, stages: Stages) {
        if self.absorbed.is_empty() {
            self.absorbed = stages;
        } else {
            stages
                .into_iter()
                .for_each(|(stage, ms)| *self.absorbed.entry(stage).or_default() += ms);
        }
    }

    /// Milliseconds from the start, and of each stage by name.
    #[must_use]
    pub fn finish(self) -> (f64, Stages) {
        let ms = self.start.elapsed().as_secs_f64() * 1e3;
        let mut stages = self.absorbed;
        for (stage, ms) in self.laps.into_iter().take_while(|(stage, _)| !stage.is_empty()) {
            match stages.get_mut(stage) {
                Some(sum) => *sum += ms,
                None => drop(stages.insert(stage.to_owned(), ms)),
            }
        }
        (ms, stages)
    }
}
