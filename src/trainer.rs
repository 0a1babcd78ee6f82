//! One training run: steps, evaluations and checkpoints in their order.
//!
//! A [`Trainer`] owns the model and the moment of the run (step, samples, position in the data,
//! best evaluation). Each step either happens whole, or, when its batch is bad or its gradients
//! are not finite, changes nothing. After a step that failed half-way, or a failed write, it
//! refuses further work and no checkpoint is written.

use std::path::Path;
use std::time::Instant;

use tessera_data::{Event, Position};
use tessera_dense::Schedule;

use crate::checkpoint::{self, BEST, Best, Checkpoint, Disk, Extent, Moment, Written};
use crate::cli::Split;
use crate::clock::Clock;
use crate::config::{ColdFormat, Config, EarlyStop, OnNonfinite, Read};
use crate::evaluation::{Evaluation, Evaluator};
use crate::metrics::Metrics;
use crate::model::{Model, ModelDevice, StepScalars, Stepped, check_labels};
use crate::pipeline::Fed;
use crate::ranks::on_first;
use crate::run_dir::{RunDir, StepLine};
use crate::signals::Signals;
use crate::source::{self, Batches, Next};
use crate::window::Window;
use crate::{Error, Result};

/// What became of an evaluation.
pub enum Evaluated {
    /// There is no evaluation data.
    NoData,
    /// A signal came first.
    Interrupted,
    /// The figures.
    Done(Evaluation),
}

/// A model in training.
pub struct Trainer<'a, D: ModelDevice> {
    config: &'a Config,
    metrics: &'a Metrics,
    signals: &'a Signals,
    model: Model<D>,
    schedule: Schedule,
    moment: Moment,
    /// The moment that the newest checkpoint of this run holds.
    saved: Option<Moment>,
    /// Increments since this trainer last wrote a whole checkpoint, if it did.
    increments: Option<u64>,
    /// Why no further work is done.
    failed: Option<String>,
}

impl<'a, D: ModelDevice> Trainer<'a, D> {
    /// A trainer at its start.
    pub fn new(
        config: &'a Config,
        metrics: &'a Metrics,
        signals: &'a Signals,
        mut model: Model<D>,
    ) -> Self {
        if config.train.checkpoint_full_every > 1 {
            model.track_changes();
        }
        for table in 0..model.schema().tables().len() {
            metrics.embedding.set_resident(table, model.table_bytes(table));
        }
        metrics.dense_resident_bytes.set(model.dense_bytes() as i64);
        let moment = Moment {
            step: 0,
            samples: 0,
            updates: 0,
            position: Position::default(),
            positions: Vec::new(),
            seed: config.seed,
            window: Window::new(config.train.window_steps),
            best: None,
            evaluations_without_improvement: 0,
            judged: None,
        };
        Self {
            config,
            metrics,
            signals,
            model,
            schedule: config.schedule,
            moment,
            saved: None,
            increments: None,
            failed: None,
        }
    }

    /// Puts the trainer at the moment of a checkpoint: weights, states and scalars.
    ///
    /// `same_run` says that the checkpoint lies in the folder that this run writes to.
    ///
    /// Errors: a damaged checkpoint, or one of another model or seed; nothing is written then.
    pub fn resume(&mut self, checkpoint: &Checkpoint, same_run: bool) -> Result<()> {
        let moment = &checkpoint.manifest.moment;
        let faults = differences(&checkpoint.config()?, self.config);
        if !faults.is_empty() {
            let (path, reason) = (checkpoint.folder.clone(), faults.join("; "));
            return Err(Error::Mismatch { path, reason });
        }
        let ranks = self.model.ranks();
        checkpoint.load(ranks.control(), &mut self.model, true)?;
        self.moment = moment.clone();
        self.moment.window = moment.window.clone().resized(self.config.train.window_steps);
        self.saved = same_run.then(|| moment.clone());
        Ok(())
    }

    /// Reads a weights file.
    ///
    /// Errors: weights of another model; nothing is written then.
    pub fn init(&mut self, path: &Path) -> Result<()> {
        let ranks = self.model.ranks();
        checkpoint::init(path, ranks.control(), &mut self.model)
    }

    /// The metrics that it reports to.
    pub fn metrics(&self) -> &Metrics {
        self.metrics
    }

    /// The model.
    pub fn model(&self) -> &Model<D> {
        &self.model
    }

    /// Where the run stands.
    pub fn moment(&self) -> &Moment {
        &self.moment
    }

    /// Trains on one global batch, of which this rank has its share, and writes its line to the
    /// run's folder, which the first rank has. `clock` has run since the batch was asked for. A
    /// collective, like everything below.
    ///
    /// Errors: a gradient that is not finite (nothing of the step is written), or a failure, after
    /// which the trainer refuses further work.
    ///
    /// # Panics
    /// When the batch is not of the step that comes next.
    pub fn step(
        &mut self,
        run: Option<&mut RunDir>,
        fed: Fed<D>,
        mut clock: Clock,
    ) -> Result<StepLine> {
        self.alive()?;
        let Fed { step: number, share, found, .. } = fed;
        assert_eq!(number, self.moment.step + 1, "batches are trained on in order");
        self.model.set_step(number);
        let lr_factor = self.schedule.factor(self.moment.updates + 1);
        let scalars = StepScalars { update: self.moment.updates + 1, lr_factor };
        let outcome = self.model.train_step(
            &share.own,
            share.total,
            found,
            scalars,
            self.metrics,
            &mut clock,
        );
        let loss = match outcome {
            Ok(Stepped::Done(loss)) => {
                self.moment.updates += 1;
                self.moment.window.add(loss.logloss, loss.labels, loss.weight);
                Some(loss.mean)
            }
            Ok(Stepped::NonFinite(what)) => match self.config.train.on_nonfinite {
                OnNonfinite::Error => return Err(Error::NonFinite { step: number, what }),
                OnNonfinite::Skip => {
                    self.metrics.skipped_steps.inc();
                    None
                }
            },
            Ok(Stepped::Torn(what)) => {
                let error = Error::Torn { step: number, what };
                self.failed = Some(error.to_string());
                return Err(error);
            }
            Err(error) => {
                self.failed = Some(error.to_string());
                return Err(error);
            }
        };
        self.moment.step = number;
        self.moment.samples += share.total.samples;
        self.moment.position = share.after;
        self.moment.positions.clone_from(&share.positions);
        let (step_ms, stages) = clock.finish();
        let line = StepLine {
            step: number,
            epoch: share.epoch,
            samples: self.moment.samples,
            loss,
            window_ne: self.moment.window.ne(),
            step_ms,
            stages,
        };
        if let Some(run) = run {
            run.step(&line).inspect_err(|error| self.failed = Some(error.to_string()))?;
        }
        self.show(&line, share.total.samples, lr_factor);
        Ok(line)
    }

    fn show(&self, line: &StepLine, samples: u64, lr_factor: f64) {
        let metrics = self.metrics;
        metrics.steps.inc();
        metrics.samples.inc_by(samples);
        metrics.epoch.set(line.epoch as i64);
        if let Some(loss) = line.loss {
            metrics.loss.set(loss);
        }
        if let Some(ne) = line.window_ne {
            metrics.window_ne.set(ne);
        }
        metrics.learning_rate_factor.set(lr_factor);
        metrics.learning_rate.set(lr_factor * self.config.dense_optimizer.lr());
        metrics.step_seconds.observe(line.step_ms / 1e3);
        for (stage, ms) in &line.stages {
            metrics.stage_seconds.with_label_values(&[stage.as_str()]).observe(ms / 1e3);
        }
    }

    /// Evaluates the model on the configuration's evaluation data and notes whether it is the
    /// best so far.
    ///
    /// Errors: bad data, by file and row.
    pub fn evaluate(&mut self) -> Result<Evaluated> {
        self.alive()?;
        let start = Instant::now();
        self.model.sync()?;
        let evaluated = evaluate(self.config, &mut self.model, self.metrics, self.signals)?;
        if let Evaluated::Done(evaluation) = &evaluated {
            self.metrics.eval_seconds.observe(start.elapsed().as_secs_f64());
            self.metrics.evaluated(evaluation);
        }
        Ok(evaluated)
    }

    /// Holds an evaluation of this moment against the best one, once. Gives whether it is the
    /// best so far.
    pub fn judge(&mut self, stop: &EarlyStop, evaluation: &Evaluation) -> bool {
        if self.moment.judged == Some(self.moment.step) {
            return false;
        }
        self.moment.judged = Some(self.moment.step);
        let value = evaluation.get(stop.metric);
        let better = match (&self.moment.best, value) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(best), Some(value)) if stop.metric.higher_is_better() => {
                value > best.value + stop.min_delta
            }
            (Some(best), Some(value)) => value < best.value - stop.min_delta,
        };
        if let (true, Some(value)) = (better, value) {
            let metric = stop.metric.name().to_owned();
            self.moment.best = Some(Best { step: self.moment.step, metric, value });
            self.moment.evaluations_without_improvement = 0;
        } else if value.is_some() {
            self.moment.evaluations_without_improvement += 1;
        }
        better
    }

    /// Writes a checkpoint of this moment to `folder`, unless the newest one holds it already.
    /// `best` makes it the best one too.
    ///
    /// Errors: a failed write; the checkpoints before stay whole, and the trainer refuses further
    /// work.
    pub fn checkpoint(
        &mut self,
        run: Option<&mut RunDir>,
        folder: &Path,
        best: bool,
    ) -> Result<()> {
        self.alive()?;
        let start = Instant::now();
        let result = self.write_checkpoint(run, folder, best);
        match &result {
            Ok(Some(written)) => {
                self.metrics.checkpoint_seconds.observe(start.elapsed().as_secs_f64());
                self.metrics.checkpoint_bytes.set(written.bytes as i64);
                self.metrics.checkpoint_linked_bytes.set(written.linked_bytes as i64);
                self.metrics.checkpoint_step.set(self.moment.step as i64);
            }
            Ok(None) => {}
            Err(error) => {
                self.metrics.checkpoint_failures.inc();
                self.failed = Some(error.to_string());
            }
        }
        result.map(|_| ())
    }

    fn write_checkpoint(
        &mut self,
        run: Option<&mut RunDir>,
        folder: &Path,
        best: bool,
    ) -> Result<Option<Written>> {
        let all = self.model.ranks();
        let ranks = all.control();
        self.model.sync()?;
        let step = self.moment.step;
        let mut written = None;
        match &self.saved {
            Some(saved) if *saved == self.moment => {}
            Some(saved) if saved.step == step => {
                on_first(ranks, || checkpoint::renew(&Disk, folder, &self.moment))?;
            }
            _ => {
                // A resumed run cuts the lines after its checkpoint, so those before must be there.
                on_first(ranks, || run.map_or(Ok(()), RunDir::sync))?;
                self.model.list_ids()?;
                let train = &self.config.train;
                if train.checkpoint_cold != ColdFormat::Rows {
                    all.agree(self.model.flush_tables())?;
                }
                let may_add = self.increments.is_some_and(|n| n + 1 < train.checkpoint_full_every)
                    && !self.model.has_ids();
                let before = self.saved.as_ref().map(|saved| saved.step);
                let extent =
                    Extent { cold: train.checkpoint_cold, base: before.filter(|_| may_add) };
                let config = &self.config.resolved;
                let (model, moment) = (&self.model, &self.moment);
                let done = checkpoint::write(&Disk, ranks, folder, model, moment, config, extent)?;
                self.increments = Some(match self.increments {
                    Some(increments) if done.is_increment => increments + 1,
                    _ => 0,
                });
                if self.config.train.checkpoint_full_every > 1 {
                    self.model.track_changes();
                }
                written = Some(done);
            }
        }
        self.saved = Some(self.moment.clone());
        if best {
            on_first(ranks, || checkpoint::point(&Disk, folder, BEST, step))?;
        }
        let kept = self.moment.best.as_ref().map(|best| best.step);
        let keep = self.config.train.keep;
        on_first(ranks, || checkpoint::prune(&Disk, folder, step, keep, kept))?;
        Ok(written)
    }

    fn alive(&self) -> Result<()> {
        match &self.failed {
            Some(reason) => Err(Error::Poisoned(reason.clone())),
            None => Ok(()),
        }
    }
}

/// What keeps a run of `config` from going on with a run of `before`, besides names, types and
/// shapes of tensors: two kinds of optimizers may keep states alike and mean other things by them.
fn differences(before: &Config, config: &Config) -> Vec<String> {
    let mut faults = Vec::new();
    if before.seed != config.seed {
        faults.push(format!(
            "its run has seed {}, the configuration {}; a run goes on with its own seed",
            before.seed, config.seed
        ));
    }
    let name = |read: Read| match read {
        Read::All => "all",
        Read::Own => "own",
    };
    let (old, new) = (before.data.read, config.data.read);
    let (old_ranks, new_ranks) = (before.parallel.ranks, config.parallel.ranks);
    if old != new {
        faults.push(format!(
            "its run has data.read = \"{}\", the configuration \"{}\"; a run goes on as it began, \
             or begins anew from exported weights (--init)",
            name(old),
            name(new)
        ));
    } else if old == Read::Own && old_ranks != new_ranks {
        faults.push(format!(
            "its {old_ranks} ranks read files of their own and are each at a place of theirs, the \
             configuration has {new_ranks} ranks: set parallel.ranks = {old_ranks}, or begin anew \
             from exported weights (--init)"
        ));
    }
    for table in &config.tables {
        let name = &table.name;
        let old = before.tables.iter().find(|old| old.name == *name);
        let kinds = old.map(|old| (old.optimizer.name(), table.optimizer.name()));
        if let Some((old, new)) = kinds.filter(|(old, new)| old != new) {
            faults.push(format!("table {name} has optimizer {old}, the configuration {new}"));
        }
    }
    faults
}

/// Evaluates `model` on the evaluation data of `config`.
///
/// Errors: bad data, by file and row.
pub fn evaluate<D: ModelDevice>(
    config: &Config,
    model: &mut Model<D>,
    metrics: &Metrics,
    signals: &Signals,
) -> Result<Evaluated> {
    let Some(spec) = source::spec(config, Split::Eval) else { return Ok(Evaluated::NoData) };
    let ranks = model.ranks();
    let batches = ranks.agree(Batches::eval(config, spec, &metrics.data, signals))?;
    if ranks.any(batches.is_none())? {
        return Ok(Evaluated::Interrupted);
    }
    let Some(mut batches) = batches else { return Ok(Evaluated::Interrupted) };
    let mut evaluator = Evaluator::new(config.data.group.is_some());
    loop {
        let next = ranks.agree(batches.next_event())?;
        if ranks.any(signals.received().is_some() || matches!(next, Next::Stopped))? {
            return Ok(Evaluated::Interrupted);
        }
        match next {
            Next::End => break,
            Next::Stopped => return Ok(Evaluated::Interrupted),
            Next::Event(Event::EpochEnd { .. }) => {}
            Next::Event(Event::Batch { batch, .. }) => {
                // All ranks see all labels, and with them whether they are good.
                check_labels(&batch)?;
                let logits = model.predict(&batch, metrics)?;
                evaluator.add(&logits, batch.labels(), batch.sample_weights(), batch.groups());
            }
        }
    }
    Ok(Evaluated::Done(evaluator.finish()))
}
