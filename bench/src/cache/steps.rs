//! Steps of one model, in rounds: the disk's own rate, then steps of mode serial, then of mode
//! prefetch. What is compared is of the same rounds, so that a disk that is fast for a while and slow
//! afterwards (those of rented machines are) is so for all.
//!
//! ```text
//! serial     route, fetch, train                            fetch: what waits
//! prefetch   one thread routes, one fetches, one trains
//! ```
//! In a round of mode prefetch neither the first steps count, whose rows nobody fetched while others
//! trained, nor the last ones, during which nothing is fetched any more.

use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use tessera::clock::{Clock, Stages};
use tessera::metrics::Metrics;
use tessera::model::{Found, Router, RowFetchers};
use tessera::ranks::Ranks;
use tessera_cache::StoreStats;
use tessera_data::Batch;
use tessera_device::Cpu;

use super::disk::Pages;
use crate::machine::core_seconds;
use crate::requests::Drawer;
use crate::step::Training;
use crate::{BenchError, Result};

/// Rounds, at most.
const ROUNDS: usize = 6;

/// Batches that wait between two threads.
const AHEAD: usize = 1;

/// Steps at either end of a round of mode prefetch that do not count.
const EDGE: usize = 2 * AHEAD;

/// Steps of the warm-up whose batches are drawn at once: they take memory.
const WARMUP_PART: usize = 50;

/// How a disk's own rate is measured.
#[derive(Clone, Copy)]
pub struct DiskProbe<'a> {
    /// The folder whose files are read.
    pub dir: &'a Path,
    /// Reads in flight.
    pub depth: usize,
    /// Time of a measurement.
    pub duration: Duration,
    /// Seed of places.
    pub seed: u64,
}

impl DiskProbe<'_> {
    /// Random 4 KiB reads a second.
    fn rate(&self) -> Result<f64> {
        let pages = Pages::below(self.dir);
        let rate = pages.and_then(|pages| pages.rate(self.depth, self.duration, self.seed));
        rate.map_err(|source| BenchError::Read { path: self.dir.into(), source })
    }
}

/// What steps of one mode did.
#[derive(Debug, Default)]
pub struct Steps {
    /// Time of each step that counts.
    pub seconds: Vec<f64>,
    /// All steps.
    pub count: usize,
    /// What stores did in all of them, all tables together.
    pub stats: StoreStats,
    /// Time that cores worked while mode serial fetched rows, in seconds.
    pub fetch_core_s: f64,
    /// Milliseconds of each stage in all steps; `wait` is for a batch whose rows are fetched.
    pub stages: Stages,
    /// Time that cores worked in all steps.
    pub core_s: f64,
}

impl Steps {
    /// Steps a second.
    #[must_use]
    pub fn per_s(&self) -> f64 {
        self.seconds.len() as f64 / self.seconds.iter().sum::<f64>()
    }

    /// Adds a step's stages.
    fn add(&mut self, stages: Stages) {
        stages.into_iter().for_each(|(stage, ms)| *self.stages.entry(stage).or_default() += ms);
    }

    /// Counts what stores did between two looks at them.
    fn count(&mut self, steps: usize, (before, core_s): &Look, (after, core_s_now): &Look) {
        self.core_s += core_s_now - core_s;
        let stats = &mut self.stats;
        self.count += steps;
        stats.device.hits += after.device.hits - before.device.hits;
        stats.host.hits += after.host.hits - before.host.hits;
        stats.cold_rows += after.cold_rows - before.cold_rows;
        stats.first_rows += after.first_rows - before.first_rows;
        stats.cold_wait_s += after.cold_wait_s - before.cold_wait_s;
        stats.cold_write_s += after.cold_write_s - before.cold_write_s;
    }
}

/// All steps of a model.
#[derive(Debug, Default)]
pub struct Run {
    /// Those of mode serial.
    pub serial: Steps,
    /// Those of mode prefetch.
    pub prefetch: Steps,
    /// Losses of all of them, and of those before.
    pub losses: Vec<f64>,
    /// The disk's own rate in each round.
    pub disk_reads_per_s: Vec<f64>,
    /// Most memory that is no file's, in bytes.
    pub peak_bytes: Option<u64>,
}

/// What the stores of all tables did, and cores worked, until a moment.
type Look = (StoreStats, f64);

fn look(training: &Training) -> Result<Look> {
    let mut sum = Steps::default();
    for stats in training.store_stats()? {
        sum.count(0, &Look::default(), &(stats, 0.0));
    }
    Ok((sum.stats, core_seconds()))
}

/// `RssAnon` and `VmLck` of this process together, in bytes.
fn memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = |key: &str| -> Option<u64> {
        let line = text.lines().find(|line| line.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse().ok()
    };
    Some((kib("RssAnon:")? + kib("VmLck:")?) << 10)
}

/// A batch on its way.
struct Ahead {
    batch: Batch,
    found: Found<Cpu>,
    /// Milliseconds of the stages that it has behind it.
    stages: Stages,
}

/// A model and what brings it its batches.
struct Lane<'a, 'd> {
    training: &'a mut Training,
    router: Router<Cpu>,
    fetchers: Option<RowFetchers>,
    metrics: Metrics,
    drawer: &'a mut Drawer<'d>,
    /// Steps routed.
    step: u64,
}

impl Run {
    /// Trains `warmup` steps, then `iterations` of each mode, a part of them in each round.
    ///
    /// Errors: tables without room for the rows of several batches; a disk that refuses.
    pub fn of(
        training: &mut Training,
        (warmup, iterations): (usize, usize),
        drawer: &mut Drawer<'_>,
        disk: Option<DiskProbe<'_>>,
    ) -> Result<Self> {
        let mut run = Self { peak_bytes: memory_bytes(), ..Self::default() };
        let (router, fetchers, metrics) = training.router()?;
        let mut lane = Lane { training, router, fetchers, metrics, drawer, step: 0 };
        for part in 0..warmup.div_ceil(WARMUP_PART) {
            run.ahead(&mut lane, WARMUP_PART.min(warmup - part * WARMUP_PART))?;
        }
        run.prefetch = Steps::default();
        let rounds = ROUNDS.min(iterations);
        for round in 0..rounds {
            if let Some(disk) = &disk {
                run.disk_reads_per_s.push(disk.rate()?);
            }
            let steps = tessera_comm::share(iterations, round, rounds).len();
            run.in_turn(&mut lane, steps)?;
            run.ahead(&mut lane, steps + 2 * EDGE)?;
        }
        Ok(run)
    }

    /// Steps of mode serial.
    fn in_turn(&mut self, lane: &mut Lane<'_, '_>, steps: usize) -> Result<()> {
        let batches = lane.draw(steps)?;
        let before = look(lane.training)?;
        for batch in batches {
            let start = Instant::now();
            let mut ahead = route(&mut lane.router, &lane.metrics, &mut lane.step, batch)?;
            let core_s = core_seconds();
            if let Some(fetchers) = &lane.fetchers {
                fetch(fetchers, &mut ahead)?;
            }
            self.serial.fetch_core_s += core_seconds() - core_s;
            let stages = self.train(lane.training, ahead, Clock::start())?;
            self.serial.add(stages);
            self.serial.seconds.push(start.elapsed().as_secs_f64());
        }
        self.serial.count(steps, &before, &look(lane.training)?);
        Ok(())
    }

    /// Steps of mode prefetch.
    fn ahead(&mut self, lane: &mut Lane<'_, '_>, steps: usize) -> Result<()> {
        let batches = lane.draw(steps)?;
        let before = look(lane.training)?;
        let Lane { training, router, fetchers, metrics, step, .. } = lane;
        std::thread::scope(|scope| {
            let (to_fetch, routed) = sync_channel::<Result<Ahead>>(AHEAD);
            let (to_step, fetched) = sync_channel::<Result<Ahead>>(AHEAD);
            scope.spawn(move || {
                for batch in batches {
                    let ahead = route(router, metrics, step, batch);
                    let failed = ahead.is_err();
                    if to_fetch.send(ahead).is_err() || failed {
                        return;
                    }
                }
            });
            scope.spawn(move || {
                for mut ahead in routed {
                    if let (Ok(next), Some(fetchers)) = (&mut ahead, &fetchers)
                        && let Err(error) = fetch(fetchers, next)
                    {
                        ahead = Err(error);
                    }
                    if to_step.send(ahead).is_err() {
                        return;
                    }
                }
            });
            let mut last = Instant::now();
            for number in 0..steps {
                let mut clock = Clock::start();
                // A thread that is gone has said why, or panicked.
                let Ok(ahead) = fetched.recv() else { break };
                clock.lap("wait");
                let stages = self.train(training, ahead?, clock)?;
                self.prefetch.add(stages);
                let now = Instant::now();
                if (EDGE..steps.saturating_sub(EDGE)).contains(&number) {
                    self.prefetch.seconds.push((now - last).as_secs_f64());
                }
                last = now;
            }
            Ok::<(), BenchError>(())
        })?;
        self.prefetch.count(steps, &before, &look(lane.training)?);
        Ok(())
    }

    /// Trains a step, and gives the times of all its stages.
    fn train(&mut self, training: &mut Training, ahead: Ahead, clock: Clock) -> Result<Stages> {
        let mut clock = clock;
        clock.absorb(ahead.stages);
        let loss = training.train(&ahead.batch, ahead.found, &mut clock)?;
        self.losses.push(loss.mean);
        self.peak_bytes = self.peak_bytes.max(memory_bytes());
        Ok(clock.finish().1)
    }
}

impl Lane<'_, '_> {
    /// What the next steps train on, drawn before they are timed: only one mode could hide it.
    fn draw(&mut self, steps: usize) -> Result<Vec<Batch>> {
        (0..steps).map(|_| self.drawer.draw()).collect()
    }
}

fn route(
    router: &mut Router<Cpu>,
    metrics: &Metrics,
    step: &mut u64,
    mut batch: Batch,
) -> Result<Ahead> {
    let mut clock = Clock::start();
    *step += 1;
    let found = router.route(&Ranks::alone(), *step, &mut batch, metrics)?;
    clock.lap("route");
    Ok(Ahead { batch, found, stages: clock.finish().1 })
}

fn fetch(fetchers: &RowFetchers, ahead: &mut Ahead) -> Result<()> {
    let mut clock = Clock::start();
    if fetchers.fetch(&mut ahead.found)? {
        clock.lap("fetch");
        ahead.stages.extend(clock.finish().1);
        return Ok(());
    }
    let what = "the device tier has no room for the rows of several batches: raise \
                --device-bytes or lower --batch";
    Err(BenchError::usage(what))
}
