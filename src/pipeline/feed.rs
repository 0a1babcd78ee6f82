//! The feeder: what the ranks do next, and for a step, this rank's share of it, routed.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use super::Clusterer;
use crate::checkpoint::Moment;
use crate::clock::{Clock, Stages};
use crate::config::{Cluster, Config};
use crate::metrics::Metrics;
use crate::model::{Found, Model, ModelDevice, Router, RowFetchers};
use crate::ranks::Ranks;
use crate::shares::{Share, Shares, Turn};
use crate::signals::{Signal, Signals};
use crate::{Error, Result};

/// A batch on its way to its step.
pub struct Fed<D: ModelDevice> {
    /// The step, from 1.
    pub step: u64,
    /// This rank's samples and what belongs to them.
    pub share: Share,
    /// The rows that they need.
    pub found: Found<D>,
    /// What the stages took so far, where other threads did them.
    pub stages: Stages,
}

/// What all ranks do next.
pub enum Next<D: ModelDevice> {
    /// A step.
    Step(Box<Fed<D>>),
    /// Nothing: all samples of an epoch have been trained on.
    EpochEnd,
    /// Nothing: the last epoch is over, or the last step is done.
    End,
    /// The run ends: a signal came to some rank.
    Signal(Signal),
}

/// Says what comes next, the same on all ranks.
pub struct Feeder<'a, D: ModelDevice> {
    config: &'a Config,
    metrics: &'a Metrics,
    signals: &'a Signals,
    shares: Shares,
    router: Router<D>,
    fetchers: Option<RowFetchers>,
    /// The table of each feature.
    tables: Vec<usize>,
    clusterer: Clusterer,
    /// Steps fed so far.
    step: u64,
}

impl<'a, D: ModelDevice> Feeder<'a, D> {
    /// The training data of a configuration from a moment on, for `model`; `None` when a signal
    /// came to any rank on the way there. A collective.
    ///
    /// Errors: data that cannot be opened, on any rank.
    pub fn new(
        config: &'a Config,
        model: &Model<D>,
        moment: &Moment,
        metrics: &'a Metrics,
        signals: &'a Signals,
    ) -> Result<Option<Self>> {
        let ranks = model.ranks().duplicate("feed")?;
        let router = model.router("keys ahead", config.pipeline.micro_batches.get())?;
        let shares = Shares::train(config, ranks, moment, &metrics.data, signals)?;
        let fetchers = router.fetchers();
        let feeder = |shares| {
            let step = moment.step;
            let tables = config.features().map(|(table, _, _)| table).collect();
            let clusterer = Clusterer::default();
            Self { config, metrics, signals, shares, router, fetchers, tables, clusterer, step }
        };
        Ok(shares.map(feeder))
    }

    /// Samples of an epoch over all ranks, if the data tell without being read.
    #[must_use]
    pub fn epoch_samples(&self) -> Option<u64> {
        self.shares.epoch_samples()
    }

    /// The files that this rank reads.
    #[must_use]
    pub fn files(&self) -> &[PathBuf] {
        self.shares.files(self.config)
    }

    /// What fetches the rows of batches, where rows move.
    pub(super) fn fetchers(&self) -> Option<RowFetchers> {
        self.fetchers.clone()
    }

    /// Batches that may be on their way at once, if that is set.
    pub(super) fn depth(&self) -> Option<NonZeroUsize> {
        self.config.pipeline.depth
    }

    /// What comes next, with rows fetched. A collective.
    ///
    /// Errors: bad data of any rank, by file and row, or what the ranks say of each other; a tier that
    /// fails.
    pub fn next(&mut self, clock: &mut Clock) -> Result<Next<D>> {
        let mut next = self.routed(clock)?;
        if let (Next::Step(fed), Some(fetchers)) = (&mut next, &self.fetchers) {
            fetchers.fetch(&mut fed.found)?;
            clock.lap("fetch");
        }
        Ok(next)
    }

    /// What comes next. A collective.
    ///
    /// Errors: bad data of any rank, by file and row, or what the ranks say of each other.
    pub(super) fn routed(&mut self, clock: &mut Clock) -> Result<Next<D>> {
        loop {
            self.ranks().set_step(self.step + 1);
            if let Some(signal) = self.signal()? {
                return Ok(Next::Signal(signal));
            }
            if self.config.train.max_steps.is_some_and(|max| self.step >= max) {
                return Ok(Next::End);
            }
            let turn = self.shares.next_turn(self.step)?;
            clock.lap("read");
            return Ok(match turn {
                Turn::End => Next::End,
                Turn::EpochEnd => Next::EpochEnd,
                // The signal is found where the loop begins.
                Turn::Stopped => continue,
                Turn::Step(mut share) => {
                    let step = self.step + 1;
                    let parts = self.config.pipeline.micro_batches.get();
                    if self.config.pipeline.cluster == Cluster::Keys && parts > 1 {
                        let clustered = self.clusterer.order(&share.own, &self.tables, parts);
                        share.own = share.own.reordered(&clustered.order);
                        self.metrics.clustered(&clustered);
                        clock.lap("cluster");
                    }
                    let (ranks, metrics) = (self.shares.ranks(), self.metrics);
                    let found = self.router.route(ranks, step, &mut share.own, metrics)?;
                    clock.lap("route");
                    self.step = step;
                    Next::Step(Box::new(Fed { step, share: *share, found, stages: Stages::new() }))
                }
            });
        }
    }

    /// Whether nothing may be in flight after what comes next.
    pub(super) fn pauses_after(&self, next: &Next<D>) -> bool {
        let train = &self.config.train;
        let due = |every: Option<u64>| every.is_some_and(|every| self.step.is_multiple_of(every));
        match next {
            Next::Step(_) => due(train.eval_every) || due(train.checkpoint_every),
            Next::EpochEnd => true,
            Next::End | Next::Signal(_) => false,
        }
    }

    /// Makes the other ranks' operations end, for this reason.
    pub(super) fn give_up(&self, reason: &str) {
        self.ranks().control().give_up(reason);
    }

    /// Steps fed so far.
    pub(super) fn step(&self) -> u64 {
        self.step
    }

    fn ranks(&self) -> &Ranks {
        self.shares.ranks()
    }

    /// The signal that any rank has received, if one has.
    fn signal(&self) -> Result<Option<Signal>> {
        signal(self.ranks(), self.signals)
    }
}

/// The signal that any of `ranks` has received, if one has. A collective.
///
/// Errors: those of any collective.
pub fn signal(ranks: &Ranks, signals: &Signals) -> Result<Option<Signal>> {
    let here = signals.received();
    if ranks.is_alone() {
        return Ok(here);
    }
    let code = here.map_or(0, |signal| u64::from(signal.exit_code()));
    let largest = ranks.control().all_max(vec![code]).wait().map_err(Error::from)?[0];
    Ok([Signal::Interrupt, Signal::Terminate]
        .into_iter()
        .find(|signal| u64::from(signal.exit_code()) == largest))
}
