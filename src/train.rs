//! `tessera train`.

use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use prometheus::Registry;
use tessera_comm::{
    CommMetrics, Communicator, LaunchEnv, Launcher, LinkDelay, Listener, Options, threads,
};
use tessera_device::Cpu;
use tessera_embedding::TableSpec;
use tessera_embedding::plan::Plan;

use crate::checkpoint::{self, BEST, Checkpoint, Disk, LAST, Moment};
use crate::cli;
use crate::clock::{Clock, Lane, Probe, Watch};
use crate::config::{Comm, Config, ParallelConfig, PipelineMode};
use crate::evaluation::Evaluation;
use crate::metrics::Metrics;
use crate::model::{FirstValues, Model, ModelDevice};
use crate::pipeline::{self, Feeder, Next, Source};
use crate::plan;
use crate::progress::{Progress, Standing};
use crate::ranks::Ranks;
#[cfg(feature = "mpi")]
use crate::ranks::agree;
use crate::run_dir::{RunDir, StepLine, Summary};
use crate::serve::{Health, MetricsServer};
use crate::signals::{Signal, Signals};
use crate::source;
use crate::trace::Trace;
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
    let Some(path) = &args.trace else { return run_with(args, &Hooks::default()) };
    let trace = Arc::new(Trace::create(path)?);
    let (probe, listener) = (Arc::clone(&trace), Arc::clone(&trace));
    let hooks = Hooks { probe: Some(probe), listener: Some(listener), ..Hooks::default() };
    let ended = run_with(args, &hooks);
    // What was traced is worth having, whatever became of the run.
    let finished = trace.finish();
    ended.and_then(|ended| finished.map(|()| ended))
}

/// What a run is watched, or slowed down, by.
#[derive(Clone, Default)]
pub struct Hooks {
    /// Watches the stages of all ranks of this process.
    pub probe: Option<Arc<dyn Probe>>,
    /// Hears of operations between ranks.
    pub listener: Option<Arc<dyn Listener>>,
    /// Makes links between ranks that are threads slow.
    pub link: Option<LinkDelay>,
    /// Whether nothing is said on the terminal.
    pub quiet: bool,
}

/// As [`run`], with hooks.
///
/// Errors: as there.
pub fn run_with(args: &cli::Train, hooks: &Hooks) -> Result<Ended> {
    let config = Config::load(&args.config.config, &args.config.set)?;
    let launched = LaunchEnv::read(|name| std::env::var(name).ok())?;
    check_launch(&config.parallel, launched.as_ref())?;
    match config.parallel.comm {
        Comm::Single => {
            let start = Start::choose(args)?;
            let out = Out::choose(args, &start)?;
            let signals = Signals::catch()?;
            let device = Cpu::new(config.threads)?;
            train_on(&device, &config, &start, &out, &signals, Registry::new(), None, hooks)
        }
        Comm::Threads => on_threads(args, &config, hooks),
        Comm::Mpi => on_mpi(args, &config, hooks),
    }
}

/// Refuses a launcher whose number of ranks is not the configuration's: under one rank or ranks
/// that are threads, each process would be a run of its own.
fn check_launch(parallel: &ParallelConfig, launched: Option<&LaunchEnv>) -> Result<()> {
    let started = launched.map_or(1, |launched| launched.size);
    let processes = if parallel.comm == Comm::Mpi { parallel.ranks } else { 1 };
    if started == processes {
        return Ok(());
    }
    let ranks = parallel.ranks;
    let what = match (parallel.comm, launched.map(|launched| launched.launcher)) {
        (Comm::Mpi, Some(Launcher::Torchrun)) => {
            "torchrun starts no MPI job: use mpirun or srun".to_owned()
        }
        (Comm::Mpi, _) => format!("start it with mpirun -n {ranks} or srun -n {ranks}"),
        (Comm::Threads, _) => "its ranks are threads of one process: start it once, or set \
             parallel.comm = \"mpi\""
            .to_owned(),
        (Comm::Single, _) => "set parallel.ranks and parallel.comm = \"mpi\"".to_owned(),
    };
    Err(Error::Usage(format!(
        "parallel.ranks is {ranks}, but the launcher started {started} ranks; {what}"
    )))
}

/// What communicators are made with.
fn comm_options(config: &Config, registry: &Registry, hooks: &Hooks) -> Result<Options> {
    let metrics = Arc::new(CommMetrics::new(registry)?);
    let time_limit = config.parallel.time_limit;
    Ok(Options { time_limit, metrics, delay: hooks.link, listener: hooks.listener.clone() })
}

/// Ranks that are threads of this process, which share its cores.
fn on_threads(args: &cli::Train, config: &Config, hooks: &Hooks) -> Result<Ended> {
    let start = Start::choose(args)?;
    let out = Out::choose(args, &start)?;
    let plan = plan::for_training(config)?;
    let signals = Signals::catch()?;
    let registry = Registry::new();
    let options = comm_options(config, &registry, hooks)?;
    let ranks = config.parallel.ranks;
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = config.threads.map_or(cores, NonZeroUsize::get);
    let each = NonZeroUsize::new((threads / ranks).max(1));
    let outcomes = threads::run(ranks, &options, |world| {
        let device = Cpu::new(each)?;
        let registry = if world.rank() == 0 { registry.clone() } else { Registry::new() };
        train_on(&device, config, &start, &out, &signals, registry, Some((&plan, world)), hooks)
    })?;
    // The rank that failed by itself says more than those that heard of it.
    let mut ended = None;
    let mut failed: Option<Error> = None;
    for outcome in outcomes {
        match outcome {
            Ok(how) => ended = Some(how),
            Err(error)
                if failed.as_ref().is_none_or(|failed| failed.is_heard() && !error.is_heard()) =>
            {
                failed = Some(error);
            }
            Err(_) => {}
        }
    }
    match (failed, ended) {
        (Some(error), _) => Err(error),
        (None, Some(ended)) => Ok(ended),
        (None, None) => unreachable!("there is at least one rank"),
    }
}

/// A rank that is a process of an MPI job.
#[cfg(feature = "mpi")]
fn on_mpi(args: &cli::Train, config: &Config, hooks: &Hooks) -> Result<Ended> {
    let registry = Registry::new();
    let options = comm_options(config, &registry, hooks)?;
    let (job, world) = tessera_comm::mpi::init(&options)?;
    let outcome = (|| {
        if world.size() != config.parallel.ranks {
            return Err(Error::Usage(format!(
                "parallel.ranks is {}, but the MPI job has {} ranks",
                config.parallel.ranks,
                world.size()
            )));
        }
        let start = agree(&world, Start::choose(args))?;
        // The first rank chooses the folder: others might see it made already.
        let chosen = if world.rank() == 0 { Out::choose(args, &start).map(Some) } else { Ok(None) };
        let chosen = agree(&world, chosen)?;
        let text = chosen.map_or(Vec::new(), Out::into_bytes);
        let out = Out::from_bytes(world.broadcast(text, 0).wait()?);
        let plan = plan::for_training(config)?;
        let signals = Signals::catch()?;
        let device = Cpu::new(config.threads)?;
        train_on(&device, config, &start, &out, &signals, registry, Some((&plan, world)), hooks)
    })();
    match outcome {
        Ok(ended) => job.finalize().map(|()| ended).map_err(Error::from),
        Err(error) => {
            console::tell_error(&error);
            job.abort(i32::from(error.exit_code()))
        }
    }
}

#[cfg(not(feature = "mpi"))]
fn on_mpi(_: &cli::Train, _: &Config, _: &Hooks) -> Result<Ended> {
    unreachable!("the configuration refuses MPI in a program without it")
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
#[derive(Debug)]
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

#[cfg(feature = "mpi")]
impl Out {
    /// As a message: whether it is the run that goes on, then the path.
    fn into_bytes(self) -> Vec<u8> {
        use std::os::unix::ffi::OsStringExt;
        let mut bytes = vec![u8::from(self.same_run)];
        bytes.extend(self.path.into_os_string().into_vec());
        bytes
    }

    /// What [`Out::into_bytes`] made.
    fn from_bytes(mut bytes: Vec<u8>) -> Self {
        use std::os::unix::ffi::OsStringExt;
        let same_run = bytes.first() == Some(&1);
        bytes.drain(..bytes.len().min(1));
        Self { path: std::ffi::OsString::from_vec(bytes).into(), same_run }
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

#[allow(clippy::too_many_arguments)]
/// Trains on this rank. `shared` is the plan and the world of several ranks, all of which call it.
fn train_on<D: ModelDevice>(
    device: &D,
    config: &Config,
    start: &Start,
    out: &Out,
    signals: &Signals,
    registry: Registry,
    shared: Option<(&Plan, Communicator)>,
    hooks: &Hooks,
) -> Result<Ended> {
    let drawn =
        matches!(start, Start::Fresh { weights: None } | Start::Again { weights: None, .. });
    let first = if drawn { FirstValues::Drawn } else { FirstValues::Loaded };
    let model = match shared {
        None => Model::new(device, config, first)?,
        Some((plan, world)) => Model::on_ranks(device, config, first, plan, world)?,
    };
    let ranks = model.ranks();
    let metrics = Metrics::register(&registry, model.table_names())?;
    let metrics = match config.tiers {
        Some(_) => metrics.with_cache(&registry, model.table_names())?,
        None => metrics,
    };
    let metrics = match model.schema().tables().iter().any(TableSpec::is_dynamic) {
        true => metrics.with_ids(&registry, model.table_names())?,
        false => metrics,
    };
    let mut trainer = Trainer::new(config, &metrics, signals, model);
    if let Start::Resumed(checkpoint) = start {
        trainer.resume(checkpoint, out.same_run)?;
    }
    if let Some(weights) = start.weights() {
        trainer.init(weights)?;
    }
    let feeder = Feeder::new(config, trainer.model(), trainer.moment(), &metrics, signals)?;
    let Some(feeder) = feeder else {
        // Nothing was done since the checkpoint.
        return Ok(signals.received().map_or(Ended::Done, Ended::Signal));
    };
    let health = Health::default();
    let server = match &config.listen {
        Some(listen) if ranks.is_first() => {
            MetricsServer::start(listen, registry, health.clone()).map(Some)
        }
        _ => Ok(None),
    };
    let server = ranks.agree(server)?;
    let opened = match ranks.is_first() {
        true => open_run(config, start, out, trainer.moment()).map(Some),
        false => Ok(None),
    };
    let mut run = ranks.agree(opened)?;
    let by_epochs =
        feeder.epoch_samples().map(|samples| samples.saturating_mul(config.train.epochs));
    let mut progress = ranks.is_first().then(|| {
        let progress = Progress::new(
            samples_total(config, by_epochs),
            trainer.moment().samples,
            config.train.log_every,
        );
        if hooks.quiet { progress.silent() } else { progress }
    });
    if let Some(progress) = &progress {
        progress.say(&format!("run: {}", out.path.display()));
        if let Some(server) = &server {
            progress.say(&format!("metrics: http://{}/metrics", server.address()));
        }
    }
    let mut session = Session {
        config,
        trainer: &mut trainer,
        ranks: Rc::clone(&ranks),
        probe: hooks.probe.as_ref(),
        unknown_bytes: match feeder.epoch_samples() {
            None => data_bytes(feeder.files()),
            Some(_) => None,
        },
        checkpoints: out.path.join("checkpoints"),
        run: run.as_mut(),
        progress: progress.as_mut(),
        signals,
    };
    let (ended, evaluation) = session.train(feeder).inspect_err(|_| health.fail())?;
    let closed = match (progress, run) {
        (Some(progress), Some(run)) => {
            let kind = device.info().kind;
            close_run(config, &trainer, progress, run, ended, evaluation, kind, hooks.quiet)
        }
        _ => Ok(()),
    };
    ranks.agree(closed)?;
    Ok(ended)
}

/// Opens the run's folder.
fn open_run(config: &Config, start: &Start, out: &Out, moment: &Moment) -> Result<RunDir> {
    let run = if out.same_run {
        let checkpoints = out.path.join("checkpoints");
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
    Ok(run)
}

/// Writes the run's summary and says how it ended, unless `quiet`.
#[allow(clippy::too_many_arguments)]
fn close_run<D: ModelDevice>(
    config: &Config,
    trainer: &Trainer<'_, D>,
    progress: Progress,
    mut run: RunDir,
    ended: Ended,
    evaluation: Option<Evaluation>,
    device: &str,
    quiet: bool,
) -> Result<()> {
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
        ranks: config.parallel.ranks as u64,
        device: device.to_owned(),
        version: env!("CARGO_PKG_VERSION"),
    };
    run.summary(&summary)?;
    run.flush()?;
    if quiet { Ok(()) } else { report(&summary) }
}

/// Samples of a run whose epochs have `by_epochs` together, if that is known, bounded by its steps.
fn samples_total(config: &Config, by_epochs: Option<u64>) -> Option<u64> {
    let most = |steps: u64| steps.saturating_mul(config.data.batch_size as u64);
    by_epochs.into_iter().chain(config.train.max_steps.map(most)).min()
}

/// Bytes of files together, where they are plain files.
fn data_bytes(files: &[PathBuf]) -> Option<u64> {
    let size = |path: &PathBuf| {
        std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file).map(|file| file.len())
    };
    files.iter().map(size).sum::<Option<u64>>().filter(|&bytes| bytes > 0)
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
    ranks: Rc<Ranks>,
    /// What watches stages, if anything does.
    probe: Option<&'a Arc<dyn Probe>>,
    /// Bytes of an epoch's files, where its samples are not known.
    unknown_bytes: Option<u64>,
    checkpoints: PathBuf,
    /// The run's folder and the terminal, which the first rank has.
    run: Option<&'a mut RunDir>,
    progress: Option<&'a mut Progress>,
    signals: &'a Signals,
}

impl<D: ModelDevice> Session<'_, '_, D> {
    /// Trains to the end on what `feeder` gives, with the final evaluation and checkpoint.
    fn train(&mut self, feeder: Feeder<'_, D>) -> Result<(Ended, Option<Evaluation>)> {
        let mut evaluated = None;
        if self.owes_judgement() {
            evaluated = self.evaluate()?;
        }
        // Asked before a step, so that a run which has stopped early stays so when resumed.
        let ended = match self.config.pipeline.mode {
            _ if self.should_stop() => Ended::EarlyStop,
            PipelineMode::Serial => self.steps(Source::Serial(Box::new(feeder)), &mut evaluated)?,
            PipelineMode::Prefetch | PipelineMode::Nested => {
                let (rank, probe) = (self.ranks.rank(), self.probe);
                let watch = |lane| watch(probe, rank, lane);
                let ranks = Rc::clone(&self.ranks);
                let give_up = |reason: &str| ranks.control().give_up(reason);
                pipeline::run(feeder, &watch, &give_up, |threads| {
                    self.steps(Source::Ahead(threads), &mut evaluated)
                })?
            }
        };
        // Before the last evaluation, whose data may be bad, and after it: it may be the best.
        self.checkpoint(false)?;
        if !matches!(ended, Ended::Signal(_)) && !self.is_current(&evaluated) {
            evaluated = self.evaluate()?;
            self.checkpoint(false)?;
        }
        // A signal may have come during the last evaluation.
        let signal = pipeline::signal(&self.ranks, self.signals)?;
        let ended = signal.map_or(ended, Ended::Signal);
        let evaluation = evaluated
            .filter(|(step, _)| *step == self.trainer.moment().step)
            .map(|(_, evaluation)| evaluation);
        Ok((ended, evaluation))
    }

    /// Steps, with evaluations and checkpoints between them, until the run ends.
    fn steps(
        &mut self,
        mut source: Source<'_, D>,
        evaluated: &mut Option<(u64, Evaluation)>,
    ) -> Result<Ended> {
        let watch = watch(self.probe, self.ranks.rank(), Lane::Step);
        loop {
            let mut clock = Clock::watched(watch.clone(), self.trainer.moment().step + 1);
            match source.next(&mut clock)? {
                Next::Signal(signal) => return Ok(Ended::Signal(signal)),
                Next::End => return Ok(Ended::Done),
                Next::Step(fed) => {
                    let run = self.run.as_deref_mut();
                    let line = self.trainer.step(run, *fed, clock)?;
                    self.after_step(&line)?;
                    if due(self.config.train.eval_every, line.step) {
                        *evaluated = self.evaluate()?;
                    }
                    if due(self.config.train.checkpoint_every, line.step) {
                        self.checkpoint(false)?;
                    }
                }
                Next::EpochEnd => {
                    // Between epochs a metric that is followed is looked at too.
                    if self.config.train.early_stop.is_some() && !self.is_current(evaluated) {
                        *evaluated = self.evaluate()?;
                    }
                }
            }
            // Before the stages are told to go on, so that those of all ranks are at the same place.
            if self.should_stop() {
                return Ok(Ended::EarlyStop);
            }
            source.done();
        }
    }

    /// Shows a step to people.
    fn after_step(&mut self, line: &StepLine) -> Result<()> {
        let shown = line.step.is_multiple_of(self.config.train.log_every);
        if let (true, Some(bytes)) = (shown, self.unknown_bytes) {
            self.estimate(line.samples, bytes);
        }
        if let Some(progress) = &mut self.progress {
            progress.step(&Standing {
                step: line.step,
                epoch: line.epoch,
                samples: line.samples,
                loss: line.loss.unwrap_or(f64::NAN),
                window_ne: line.window_ne,
            });
        }
        match &mut self.run {
            Some(run) if shown => run.flush(),
            _ => Ok(()),
        }
    }

    /// Tells the progress how long the run will be, by the bytes read. It counts batches that
    /// wait in the queue as trained on, and after a resumption what was passed over as read: an
    /// estimate that gets better as the run goes on.
    fn estimate(&mut self, samples: u64, epoch_bytes: u64) {
        let read = self.trainer.metrics().data.bytes.get();
        let by_epochs = estimated_total(samples, read, epoch_bytes, self.config.train.epochs);
        if let (Some(total), Some(progress)) =
            (samples_total(self.config, by_epochs), &mut self.progress)
        {
            progress.estimate(total);
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
        let evaluated = match &mut self.progress {
            Some(progress) => progress.pause(|| trainer.evaluate()),
            None => trainer.evaluate(),
        };
        let Evaluated::Done(evaluation) = evaluated? else { return Ok(None) };
        let step = self.trainer.moment().step;
        if let Some(progress) = &self.progress {
            progress.say(&format!("eval at step {step}: {evaluation}"));
        }
        if let Some(stop) = &self.config.train.early_stop
            && self.trainer.judge(stop, &evaluation)
        {
            self.checkpoint(true)?;
        }
        Ok(Some((step, evaluation)))
    }

    /// Writes a checkpoint of this moment if there is none; `best` makes it the best one too.
    fn checkpoint(&mut self, best: bool) -> Result<()> {
        let (trainer, run) = (&mut *self.trainer, self.run.as_deref_mut());
        match &mut self.progress {
            Some(progress) => progress.pause(|| trainer.checkpoint(run, &self.checkpoints, best)),
            None => trainer.checkpoint(run, &self.checkpoints, best),
        }
    }
}

/// What watches the stages of a thread of a rank.
fn watch(probe: Option<&Arc<dyn Probe>>, rank: usize, lane: Lane) -> Option<Watch> {
    probe.map(|probe| Watch { rank, lane, probe: Arc::clone(probe) })
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
    use crate::config::{PlanSource, Uneven};
    use tessera_comm::Codec;
    use tessera_embedding::plan::Placement;

    #[test]
    fn the_length_of_a_run_is_estimated_from_the_bytes_read() {
        assert_eq!(estimated_total(100, 50, 200, 2), Some(800));
        assert_eq!(estimated_total(100, 500, 200, 2), Some(100));
        assert_eq!(estimated_total(0, 50, 200, 2), None);
        assert_eq!(estimated_total(100, 0, 200, 2), None);
    }

    fn one_rank() -> ParallelConfig {
        ParallelConfig {
            ranks: 1,
            comm: Comm::Single,
            replicas: 1,
            sync_every: std::num::NonZeroU64::MIN,
            placement: Placement::Strided,
            plan: PlanSource::Auto,
            route: None,
            codec_forward: Codec::Fp32,
            codec_backward: Codec::Fp32,
            time_limit: std::time::Duration::from_secs(1),
            uneven: Uneven::Drain,
        }
    }

    #[test]
    fn a_launcher_of_several_ranks_is_refused() {
        for name in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE"] {
            let rank = match name {
                "OMPI_COMM_WORLD_SIZE" => "OMPI_COMM_WORLD_RANK",
                "PMI_SIZE" => "PMI_RANK",
                "SLURM_STEP_NUM_TASKS" => "SLURM_PROCID",
                _ => "RANK",
            };
            let launch = |size: &str| {
                LaunchEnv::read(|asked| match asked {
                    _ if asked == name => Some(size.to_owned()),
                    _ if asked == rank => Some("0".to_owned()),
                    _ => None,
                })
                .unwrap()
            };
            let parallel = |ranks, comm| ParallelConfig { ranks, comm, ..one_rank() };
            assert!(check_launch(&parallel(1, Comm::Single), launch("1").as_ref()).is_ok());
            assert!(check_launch(&parallel(2, Comm::Mpi), launch("2").as_ref()).is_ok());
            for (ranks, comm) in [(1, Comm::Single), (2, Comm::Threads), (3, Comm::Mpi)] {
                let error = check_launch(&parallel(ranks, comm), launch("2").as_ref()).unwrap_err();
                assert_eq!(error.exit_code(), 2);
                assert!(error.to_string().contains("started 2 ranks"), "{error}");
            }
        }
        let alone = ParallelConfig { ranks: 4, comm: Comm::Mpi, ..one_rank() };
        let error = check_launch(&alone, None).unwrap_err().to_string();
        assert!(error.contains("mpirun -n 4"), "{error}");
    }
}
