//! `tessera train`.

use std::path::{Path, PathBuf};

use prometheus::Registry;
use tessera_data::Event;
use tessera_device::Cpu;

use crate::checkpoint::{self, BEST, Checkpoint, Disk, LAST};
use crate::cli;
use crate::config::Config;
use crate::evaluation::Evaluation;
use crate::metrics::Metrics;
use crate::model::{Clock, FirstValues, Model, ModelDevice};
use crate::progress::{Progress, Standing};
use crate::run_dir::{RunDir, Summary};
use crate::serve::{Health, MetricsServer};
use crate::signals::{Signal, Signals};
use crate::source::{self, Batches, Next};
use crate::trainer::{Evaluated, Trainer};
use crate::{Error, Result, console};

/// Why a run ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// All epochs or steps are done.
    Done,
    /// The metric followed no longer got better.
    EarlyStop,
    /// A signal asked for it.
    Signal(Signal),
}

impl Ended {
    /// The process's exit code.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Done | Self::EarlyStop => 0,
            Self::Signal(signal) => signal.exit_code(),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::EarlyStop => "early_stop",
            Self::Signal(signal) => signal.name(),
        }
    }
}

/// Runs `tessera train`.
///
/// Errors: whatever stopped the run; what had been checkpointed stays whole.
pub fn run(args: &cli::Train) -> Result<Ended> {
    let config = Config::load(&args.config.config, &args.config.set)?;
    one_rank(|name| std::env::var(name).ok())?;
    let start = Start::choose(args)?;
    let out = Out::choose(args, &start)?;
    let signals = Signals::catch()?;
    let device = Cpu::new(config.threads)?;
    train_on(&device, &config, &start, &out, &signals)
}

/// Refuses a launcher that started several processes: each would be a run of its own.
fn one_rank(variable: impl Fn(&str) -> Option<String>) -> Result<()> {
    // Open MPI, MPICH and other PMI launchers, Slurm's srun, torchrun.
    for name in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"] {
        let size = variable(name).and_then(|size| size.parse::<u64>().ok());
        if let Some(size) = size.filter(|&size| size > 1) {
            return Err(Error::Usage(format!(
                "parallel.ranks is 1, but the launcher started {size} ranks ({name})"
            )));
        }
    }
    Ok(())
}

/// Where a run begins.
enum Start {
    /// At first values, or at those of a weights file.
    Fresh { weights: Option<PathBuf> },
    /// In the folder of a run that ended before its first checkpoint: at its beginning.
    Again { run: PathBuf, weights: Option<PathBuf> },
    /// At a checkpoint.
    Resumed(Box<Checkpoint>),
}

impl Start {
    fn choose(args: &cli::Train) -> Result<Self> {
        Ok(match &args.resume {
            None => Self::Fresh { weights: args.init.clone() },
            Some(run) if RunDir::is_begun(run) => {
                Self::Again { run: run.clone(), weights: RunDir::weights_of(run)? }
            }
            Some(path) => Self::Resumed(Box::new(Checkpoint::find(path)?)),
        })
    }

    /// The folder of the run that goes on.
    fn run(&self) -> Option<PathBuf> {
        match self {
            Self::Fresh { .. } => None,
            Self::Again { run, .. } => Some(run.clone()),
            Self::Resumed(checkpoint) => {
                let folder = std::path::absolute(&checkpoint.folder).ok()?;
                Some(folder.parent()?.parent()?.to_path_buf())
            }
        }
    }

    fn weights(&self) -> Option<&Path> {
        match self {
            Self::Fresh { weights } | Self::Again { weights, .. } => weights.as_deref(),
            Self::Resumed(_) => None,
        }
    }
}

/// The run's folder and what it is to this run.
struct Out {
    path: PathBuf,
    /// Whether the run that goes on lies in it.
    same_run: bool,
}

impl Out {
    fn choose(args: &cli::Train, start: &Start) -> Result<Self> {
        let resumed_run = start.run();
        let path = match (&args.out, &resumed_run) {
            (Some(out), _) => out.clone(),
            (None, Some(run)) => run.clone(),
            (None, None) => free_folder(&args.config.config),
        };
        let same = |run: &PathBuf| matches!((run.canonicalize(), path.canonicalize()), (Ok(a), Ok(b)) if a == b);
        let same_run = resumed_run.as_ref().is_some_and(same);
        if !same_run {
            RunDir::check_new(&path)?;
        }
        Ok(Self { path, same_run })
    }
}

/// `runs/<name of the config>-<first number not in use>`.
fn free_folder(config: &Path) -> PathBuf {
    let name = config.file_stem().unwrap_or_default().to_string_lossy();
    (1u64..)
        .map(|number| Path::new("runs").join(format!("{name}-{number}")))
        .find(|path| !path.exists())
        .expect("numbers do not run out")
}

fn train_on<D: ModelDevice>(
    device: &D,
    config: &Config,
    start: &Start,
    out: &Out,
    signals: &Signals,
) -> Result<Ended> {
    let registry = Registry::new();
    let drawn =
        matches!(start, Start::Fresh { weights: None } | Start::Again { weights: None, .. });
    let first = if drawn { FirstValues::Drawn } else { FirstValues::Loaded };
    let model = Model::new(device, config, first)?;
    let metrics = Metrics::register(&registry, model.table_names())?;
    let mut trainer = Trainer::new(config, &metrics, signals, model);
    if let Start::Resumed(checkpoint) = start {
        trainer.resume(checkpoint, out.same_run)?;
    }
    if let Some(weights) = start.weights() {
        trainer.init(weights)?;
    }
    let position = trainer.moment().position;
    let Some(batches) = Batches::train(config, position, &metrics.data, signals)? else {
        // Nothing was done since the checkpoint.
        return Ok(signals.received().map_or(Ended::Done, Ended::Signal));
    };
    let health = Health::default();
    let server = match &config.listen {
        Some(listen) => Some(MetricsServer::start(listen, registry, health.clone())?),
        None => None,
    };
    let mut run = if out.same_run {
        let checkpoints = out.path.join("checkpoints");
        let moment = trainer.moment();
        RunDir::resume(&out.path, moment.step, || {
            // From here on the checkpoint resumed is the last one, whatever came after it
            // before. A best one that is gone is no longer pointed at.
            if let Start::Resumed(_) = start {
                checkpoint::point(&Disk, &checkpoints, LAST, moment.step)?;
            }
            match &moment.best {
                Some(best) if checkpoints.join(checkpoint::step_dir(best.step)).is_dir() => {
                    checkpoint::point(&Disk, &checkpoints, BEST, best.step)
                }
                _ => checkpoint::unpoint(&checkpoints, BEST),
            }
        })?
    } else {
        RunDir::create(&out.path)?
    };
    if let Some(weights) = start.weights() {
        run.started_from(weights)?;
    }
    run.config(&config.resolved)?;
    let by_epochs =
        batches.epoch_samples().map(|samples| samples.saturating_mul(config.train.epochs));
    let mut progress = Progress::new(
        samples_total(config, by_epochs),
        trainer.moment().samples,
        config.train.log_every,
    );
    progress.say(&format!("run: {}", out.path.display()));
    if let Some(server) = &server {
        progress.say(&format!("metrics: http://{}/metrics", server.address()));
    }
    let mut session = Session {
        config,
        trainer: &mut trainer,
        batches,
        run: &mut run,
        progress: &mut progress,
        signals,
    };
    let (ended, evaluation) = session.train().inspect_err(|_| health.fail())?;
    progress.finish();
    let moment = trainer.moment();
    let summary = Summary {
        steps: moment.step,
        samples: moment.samples,
        samples_per_s: progress.samples_per_s(moment.samples),
        eval: evaluation,
        best: moment.best.clone(),
        ceiling_auc: source::ceiling(config)?,
        ended: ended.name(),
        seed: config.seed,
        ranks: 1,
        device: device.info().kind.to_owned(),
        version: env!("CARGO_PKG_VERSION"),
    };
    run.summary(&summary)?;
    run.flush()?;
    report(&summary)?;
    Ok(ended)
}

/// Samples of a run whose epochs have `by_epochs` together, if that is known, bounded by its steps.
fn samples_total(config: &Config, by_epochs: Option<u64>) -> Option<u64> {
    let most = |steps: u64| steps.saturating_mul(config.data.batch_size as u64);
    by_epochs.into_iter().chain(config.train.max_steps.map(most)).min()
}

/// Bytes of the training files together, where they are plain files.
fn data_bytes(config: &Config) -> Option<u64> {
    let size = |path: &PathBuf| {
        std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file).map(|file| file.len())
    };
    config.data.train.iter().map(size).sum::<Option<u64>>().filter(|&bytes| bytes > 0)
}

/// Samples of the whole run, from the share of the data's bytes that gave `samples` so far.
fn estimated_total(samples: u64, read_bytes: u64, epoch_bytes: u64, epochs: u64) -> Option<u64> {
    let all = epoch_bytes as f64 * epochs as f64;
    let share = (read_bytes as f64 / all).min(1.0);
    (samples > 0 && share > 0.0).then(|| (samples as f64 / share) as u64)
}

/// What the loop of a run works on.
struct Session<'a, 't, D: ModelDevice> {
    config: &'a Config,
    trainer: &'a mut Trainer<'t, D>,
    batches: Batches,
    run: &'a mut RunDir,
    progress: &'a mut Progress,
    signals: &'a Signals,
}

impl<D: ModelDevice> Session<'_, '_, D> {
    /// Trains to the end, with the final evaluation and checkpoint.
    fn train(&mut self) -> Result<(Ended, Option<Evaluation>)> {
        let mut evaluated = None;
        if self.owes_judgement() {
            evaluated = self.evaluate()?;
        }
        let unknown_bytes =
            if self.batches.epoch_samples().is_none() { data_bytes(self.config) } else { None };
        let ended = loop {
            if let Some(signal) = self.signals.received() {
                break Ended::Signal(signal);
            }
            // Asked before a step, so that a run which has stopped early stays so when resumed.
            if self.should_stop() {
                break Ended::EarlyStop;
            }
            let step = self.trainer.moment().step;
            if self.config.train.max_steps.is_some_and(|max| step >= max) {
                break Ended::Done;
            }
            let mut clock = Clock::start();
            let next = self.batches.next_event()?;
            clock.lap("read");
            match next {
                Next::End => break Ended::Done,
                // The signal is found where the loop begins.
                Next::Stopped => {}
                Next::Event(Event::Batch { batch, epoch, after }) => {
                    let line = self.trainer.step(self.run, &batch, epoch, after, clock)?;
                    if let Some(bytes) = unknown_bytes
                        && line.step.is_multiple_of(self.config.train.log_every)
                    {
                        self.estimate(line.samples, bytes);
                    }
                    self.progress.step(&Standing {
                        step: line.step,
                        epoch,
                        samples: line.samples,
                        loss: line.loss.unwrap_or(f64::NAN),
                        window_ne: line.window_ne,
                    });
                    if line.step.is_multiple_of(self.config.train.log_every) {
                        self.run.flush()?;
                    }
                    if due(self.config.train.eval_every, line.step) {
                        evaluated = self.evaluate()?;
                    }
                    if due(self.config.train.checkpoint_every, line.step) {
                        self.checkpoint(false)?;
                    }
                }
                Next::Event(Event::EpochEnd { .. }) => {
                    // Between epochs a metric that is followed is looked at too.
                    if self.config.train.early_stop.is_some() && !self.is_current(&evaluated) {
                        evaluated = self.evaluate()?;
                    }
                }
            }
        };
        // Before the last evaluation, whose data may be bad, and after it: it may be the best.
        self.checkpoint(false)?;
        if !matches!(ended, Ended::Signal(_)) && !self.is_current(&evaluated) {
            evaluated = self.evaluate()?;
            self.checkpoint(false)?;
        }
        // A signal may have come during the last evaluation.
        let ended = self.signals.received().map_or(ended, Ended::Signal);
        let evaluation = evaluated
            .filter(|(step, _)| *step == self.trainer.moment().step)
            .map(|(_, evaluation)| evaluation);
        Ok((ended, evaluation))
    }

    /// Tells the progress how long the run will be, by the bytes read. It counts batches that
    /// wait in the queue as trained on, and after a resumption what was passed over as read: an
    /// estimate that gets better as the run goes on.
    fn estimate(&mut self, samples: u64, epoch_bytes: u64) {
        let read = self.trainer.metrics().data.bytes.get();
        let by_epochs = estimated_total(samples, read, epoch_bytes, self.config.train.epochs);
        if let Some(total) = samples_total(self.config, by_epochs) {
            self.progress.estimate(total);
        }
    }

    /// Whether the resumed run was interrupted in an evaluation that early stopping looks at.
    fn owes_judgement(&self) -> bool {
        let moment = self.trainer.moment();
        self.config.train.early_stop.is_some()
            && moment.step > 0
            && due(self.config.train.eval_every, moment.step)
            && moment.judged != Some(moment.step)
    }

    /// Whether the evaluation is of this very moment.
    fn is_current(&self, evaluated: &Option<(u64, Evaluation)>) -> bool {
        evaluated.as_ref().is_some_and(|(step, _)| *step == self.trainer.moment().step)
    }

    fn should_stop(&self) -> bool {
        let waited = self.trainer.moment().evaluations_without_improvement;
        self.config.train.early_stop.as_ref().is_some_and(|stop| waited >= stop.patience)
    }

    /// Evaluates now and, when a metric is followed, keeps the best checkpoint. Gives the step
    /// and the figures.
    fn evaluate(&mut self) -> Result<Option<(u64, Evaluation)>> {
        let trainer = &mut *self.trainer;
        let Evaluated::Done(evaluation) = self.progress.pause(|| trainer.evaluate())? else {
            return Ok(None);
        };
        let step = self.trainer.moment().step;
        self.progress.say(&format!("eval at step {step}: {evaluation}"));
        if let Some(stop) = &self.config.train.early_stop
            && self.trainer.judge(stop, &evaluation)
        {
            self.checkpoint(true)?;
        }
        Ok(Some((step, evaluation)))
    }

    /// Writes a checkpoint of this moment if there is none; `best` makes it the best one too.
    fn checkpoint(&mut self, best: bool) -> Result<()> {
        let (trainer, run) = (&mut *self.trainer, &mut *self.run);
        self.progress.pause(|| trainer.checkpoint(run, best))
    }
}

/// Whether something that happens every so many steps happens after step `step`.
fn due(every: Option<u64>, step: u64) -> bool {
    every.is_some_and(|every| step.is_multiple_of(every))
}

/// The end of a run, for people.
fn report(summary: &Summary) -> Result<()> {
    let mut text = format!(
        "{}: {} steps, {} samples, {:.0} samples/s\n",
        summary.ended, summary.steps, summary.samples, summary.samples_per_s
    );
    if let Some(evaluation) = &summary.eval {
        text += &format!("eval: {evaluation}\n");
    }
    if let Some(auc) = summary.ceiling_auc {
        text += &format!(
            "ceiling: AUC {auc:.4} (expected for the planted teacher's own probabilities)\n"
        );
    }
    console::print(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_length_of_a_run_is_estimated_from_the_bytes_read() {
        assert_eq!(estimated_total(100, 50, 200, 2), Some(800));
        assert_eq!(estimated_total(100, 500, 200, 2), Some(100));
        assert_eq!(estimated_total(0, 50, 200, 2), None);
        assert_eq!(estimated_total(100, 0, 200, 2), None);
    }

    #[test]
    fn a_launcher_of_several_ranks_is_refused() {
        let only = |name: &'static str, size: &'static str| {
            move |asked: &str| (asked == name).then(|| size.to_owned())
        };
        assert!(one_rank(|_| None).is_ok());
        assert!(one_rank(only("WORLD_SIZE", "1")).is_ok());
        for name in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"] {
            let error = one_rank(only(name, "2")).unwrap_err();
            assert_eq!(error.exit_code(), 2);
            assert!(error.to_string().contains("started 2 ranks"), "{error}");
        }
    }
}
