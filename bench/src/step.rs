//! `step`: whole training steps through the trainer's own model.
//!
//! With knobs, batches wait in memory and a step is what the model does with one. With a training
//! configuration, batches are read, parsed and prefetched as in training, and stage `read` is the
//! time that a step waits for them.

use std::path::Path;

use prometheus::Registry;
use tessera::clock::Clock;
use tessera::config::{ClipConfig, Config};
use tessera::metrics::Metrics;
use tessera::model::{
    FirstValues, Found, Model, Router, RowFetchers, StepLoss, StepScalars, Stepped, Total,
};
use tessera::ranks::Ranks;
use tessera::tensors::{Block, ReadTensors, Tensor, WriteTensors};
use tessera_cache::StoreStats;
use tessera_data::{Batch, Event};
use tessera_dense::{DenseOptimizer, Interaction, ModelSpec};
use tessera_device::{Cpu, CpuStream, Device};
use tessera_embedding::EmbeddingCollection;

use crate::drive::{Stages, Workload};
use crate::feed::Feed;
use crate::knobs::{DenseOptimizerKnob, ModelKnob, StepArgs};
use crate::naive::network::{Network, Params, Sample};
use crate::tables::Table;
use crate::workloads::{Volume, Work, volume};
use crate::{BenchError, Result, check};

/// Dense values a sample of models made from knobs: those of Criteo.
pub const DENSE: usize = 13;

/// Samples that the naive computation goes through.
const CHECKED: usize = 4;

/// Bytes of rows that are written in one go.
const WRITE_BYTES: usize = 1 << 20;

/// The configuration of a model made from knobs. Its data is never read.
///
/// Errors: [`BenchError::Usage`] for widths that are no numbers; every fault of the model.
pub fn config_of_knobs(args: &StepArgs, tables: &[Table], batch: usize) -> Result<Config> {
    let dim = tables.first().map_or(0, |table| table.spec.dim);
    let model = args.model.unwrap_or(ModelKnob::Dot);
    let bottom = widths("--bottom", args.bottom.as_deref(), &format!("512-256-{dim}"))?;
    let top = match model {
        ModelKnob::Dot => widths("--top", args.top.as_deref(), "512-256-1")?,
        ModelKnob::Dcn => widths("--top", args.top.as_deref(), "1024-1024-512-256-1")?,
    };
    let interaction = match model {
        ModelKnob::Dot if args.dcn_layers.or(args.dcn_rank).is_some() => {
            return Err(BenchError::usage("--dcn-rank and --dcn-layers need --model dcn"));
        }
        ModelKnob::Dot => "interaction = \"dot\"".to_owned(),
        ModelKnob::Dcn => format!(
            "interaction = \"dcn\"\ndcn = {{ layers = {}, rank = {} }}",
            args.dcn_layers.unwrap_or(3),
            args.dcn_rank.unwrap_or(512)
        ),
    };
    let mut text = format!(
        "seed = {}\n[data]\nformat = \"synthetic\"\nbatch_size = {batch}\n\
         [data.synthetic]\nsamples = {batch}\n\
         [model]\ndense_features = {DENSE}\nbottom_mlp = {bottom:?}\ntop_mlp = {top:?}\n\
         {interaction}\n\
         [optimizer.sparse]\nkind = \"sgd\"\nlr = 0.01\n\
         [optimizer.dense]\nkind = \"sgd\"\nlr = 0.01\n",
        args.run.seed
    );
    for table in tables {
        let names: Vec<&str> = table.features.iter().map(|f| f.name.as_str()).collect();
        text.push_str(&format!(
            "[[table]]\nname = {:?}\nrows = {}\ndim = {}\nfeatures = {names:?}\n",
            table.spec.name, table.spec.rows, table.spec.dim
        ));
    }
    let (mut config, _) = Config::parse(&text, Path::new("knobs"), "/".into(), &[])?;
    for (config, table) in config.tables.iter_mut().zip(tables) {
        config.precision = table.spec.precision;
        config.pooling = table.spec.pooling;
        config.init = table.spec.init;
        config.optimizer = table.spec.optimizer;
        config.weighted = table.weighted;
    }
    let (lr, eps) = (0.01, 1e-8);
    config.dense_optimizer = match args.dense_optimizer {
        DenseOptimizerKnob::Sgd => DenseOptimizer::Sgd { lr },
        DenseOptimizerKnob::Adagrad => DenseOptimizer::Adagrad { lr, eps },
        DenseOptimizerKnob::Adam => DenseOptimizer::Adam { lr, eps, beta1: 0.9, beta2: 0.999 },
    };
    Ok(config)
}

fn widths(knob: &str, given: Option<&str>, default: &str) -> Result<Vec<usize>> {
    let text = given.unwrap_or(default);
    text.split('-')
        .map(|width| width.parse())
        .collect::<std::result::Result<_, _>>()
        .map_err(|_| BenchError::usage(format!("{knob} {text}: widths like 512-256-1 are needed")))
}

/// Multiplications and additions of the dense network in a training step on `batch` samples:
/// forward, gradients of inputs (but of the dense values) and gradients of parameters.
#[must_use]
pub fn flops(spec: &ModelSpec, batch: usize) -> f64 {
    let layers = |mut inputs: usize, widths: &[usize]| -> usize {
        let mut products = 0;
        for &width in widths {
            products += inputs * width;
            inputs = width;
        }
        products
    };
    let vectors = spec.features.len() + usize::from(spec.dense_features > 0);
    let interaction = match spec.interaction {
        Interaction::Concat => 0,
        Interaction::Dot => {
            vectors * vectors.saturating_sub(1) / 2 * spec.features.first().copied().unwrap_or(0)
        }
        Interaction::Dcn { layers, rank } => 2 * layers * rank * spec.input_width(),
    };
    let forward = layers(spec.dense_features, &spec.bottom)
        + interaction
        + layers(spec.interaction_width(), &spec.top);
    let first = spec.bottom.first().map_or(0, |width| width * spec.dense_features);
    2.0 * (3 * forward - first) as f64 * batch as f64
}

/// A model in training.
pub struct Training {
    stream: CpuStream,
    model: Model<Cpu>,
    router: Router<Cpu>,
    spec: ModelSpec,
    config: Config,
    metrics: Metrics,
    updates: u64,
}

impl Training {
    /// A model at its first values.
    ///
    /// Errors: tables that do not fit memory.
    pub fn new(cpu: &Cpu, config: Config) -> Result<Self> {
        let model = Model::new(cpu, &config, FirstValues::Drawn)?;
        let metrics = Metrics::register(&Registry::new(), model.table_names())?;
        let spec = config.model_spec();
        let router = model.router("bench", config.pipeline.micro_batches.get())?;
        Ok(Self { stream: cpu.stream()?, model, router, spec, config, metrics, updates: 0 })
    }

    /// The dense network's shape.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The tables: a benchmark runs on one rank.
    fn embedding(&self) -> &EmbeddingCollection<Cpu> {
        self.model.embedding().expect("made for one rank")
    }

    /// Volume of batches in the tables.
    ///
    /// Errors: what the tables say.
    pub fn volume(&self, batches: &[Batch]) -> Result<Volume> {
        volume(self.embedding(), &self.stream, batches, Work::Update)
    }

    /// What routes batches on another thread and counts them, and what fetches their rows.
    ///
    /// Errors: none on one rank.
    pub(crate) fn router(&self) -> Result<(Router<Cpu>, Option<RowFetchers>, Metrics)> {
        let router = self.model.router("ahead", self.config.pipeline.micro_batches.get())?;
        let fetchers = router.fetchers();
        Ok((router, fetchers, Metrics::register(&Registry::new(), self.model.table_names())?))
    }

    /// One step, routing included, which takes the batch's ids.
    ///
    /// Errors: a loss that is not finite, or what the model says.
    pub(crate) fn step(&mut self, batch: &mut Batch, clock: &mut Clock) -> Result<StepLoss> {
        let step = self.updates + 1;
        let found = self.router.route(&Ranks::alone(), step, batch, &self.metrics)?;
        clock.lap("route");
        self.train(batch, found, clock)
    }

    /// One step on a batch that was routed.
    ///
    /// Errors: as [`Training::step`].
    pub(crate) fn train(
        &mut self,
        batch: &Batch,
        found: Found<Cpu>,
        clock: &mut Clock,
    ) -> Result<StepLoss> {
        let scalars = StepScalars { update: self.updates + 1, lr_factor: 1.0 };
        let total = Total::of(batch);
        match self.model.train_step(batch, total, found, scalars, &self.metrics, clock)? {
            Stepped::Done(loss) => {
                self.updates += 1;
                Ok(loss)
            }
            Stepped::NonFinite(what) | Stepped::Torn(what) => {
                Err(BenchError::Step(format!("{what} is not finite")))
            }
        }
    }

    /// What the stores of all tables did so far.
    ///
    /// Errors: what the tables say.
    pub fn store_stats(&self) -> Result<Vec<StoreStats>> {
        let tables = 0..self.embedding().schema().tables().len();
        Ok(tables.map(|table| self.embedding().store_stats(table)).collect::<Result<_, _>>()?)
    }

    /// Writes every row of every table once, with what it holds already, so that tiers cannot make
    /// it anew instead of keeping it.
    ///
    /// Errors: what the tables say.
    pub fn write_rows(&mut self) -> Result<()> {
        let weights = |tensor: &Tensor| tensor.name.starts_with("tables.") && !tensor.is_state;
        let tensors: Vec<Tensor> = self.model.tensors().to_vec();
        let mut bytes = Vec::new();
        for (index, tensor) in tensors.iter().enumerate().filter(|(_, tensor)| weights(tensor)) {
            let whole = Block::whole(index, tensor);
            let each = (WRITE_BYTES / tensor.row_bytes().max(1)).max(1);
            for first in (0..tensor.rows()).step_by(each) {
                let block = whole.with_rows(first..tensor.rows().min(first + each));
                self.model.read_block(&block, &mut bytes)?;
                self.model.write_block(&block, &bytes)?;
            }
        }
        Ok(())
    }

    /// All dense parameters by name.
    fn params(&self) -> Result<Params> {
        let mut params = Params::new();
        let mut bytes = Vec::new();
        for (index, tensor) in self.model.tensors().iter().enumerate() {
            if tensor.is_state || !tensor.name.starts_with("dense.") {
                continue;
            }
            self.model.read_block(&Block::whole(index, tensor), &mut bytes)?;
            let numbers = bytes.chunks_exact(4);
            let numbers =
                numbers.map(|b| f64::from(f32::from_le_bytes([b[0], b[1], b[2], b[3]]))).collect();
            params.insert(tensor.name.clone(), numbers);
        }
        Ok(params)
    }

    /// Trains the fresh model on a few samples and holds logits, loss, every dense parameter and
    /// every row that moved against a naive computation.
    ///
    /// Errors: [`BenchError::WrongAnswer`], or what the model says.
    pub fn check(&mut self, batch: &Batch) -> Result<()> {
        let mut batch = batch.slice(0..batch.samples().min(CHECKED));
        let samples = batch.samples();
        // The wide part looks the same ids up in tables of its own.
        let features = self.embedding().schema().features().len();
        let looked_up = repeat_features(&batch, features)?;
        let before = self.params()?;
        let mut network = Network::new(&self.spec, &before);
        let (mut loss, mut logits, mut row_grads) = (0.0, Vec::new(), Vec::new());
        for i in 0..samples {
            let embedding = self.embedding();
            let mut row = vec![0.0; self.spec.stride()];
            for (index, feature) in embedding.schema().features().iter().enumerate() {
                let pooled = check::pooled(embedding, &self.stream, &looked_up, index, i)?;
                row[feature.column..feature.column + pooled.len()].copy_from_slice(&pooled);
            }
            let weight = batch.sample_weights().map_or(1.0, |weights| f64::from(weights[i]));
            let outcome = network.run(&Sample {
                dense: batch.dense_row(i),
                row,
                label: f64::from(batch.labels()[i]),
                weight: weight / samples as f64,
            });
            loss += outcome.loss;
            logits.push(outcome.logit);
            row_grads.push(outcome.row_grad);
        }
        let grads = network.grads;
        let largest = logits.iter().fold(0.0f64, |most, z| most.max(z.abs()));
        for (i, (got, want)) in
            self.model.predict(&batch, &self.metrics)?.iter().zip(&logits).enumerate()
        {
            let what = || format!("logit of sample {i}");
            check::close(what, f64::from(*got), *want, 1e-4 * largest)?;
        }

        let watched = check::watch(
            self.embedding(),
            &self.stream,
            &looked_up,
            |sample, column| row_grads[sample][column],
            None,
        )?;
        let dense_norm: f64 = grads.values().flatten().map(|g| g * g).sum();
        let norm = (dense_norm + check::square_norm(&watched)).sqrt();
        let clip = move |clip: ClipConfig, g: f64| match clip {
            ClipConfig::None => g,
            ClipConfig::Value(limit) => g.clamp(-limit, limit),
            ClipConfig::Norm(limit) => {
                if norm > limit {
                    g * limit / norm
                } else {
                    g
                }
            }
        };
        let config_clip = self.config.clip;
        let got = self.step(&mut batch, &mut Clock::start())?.mean;
        check::close(|| "loss".into(), got, loss, 1e-4 * loss.abs())?;

        let after = self.params()?;
        for (name, before) in &before {
            let grads: Vec<f64> = grads[name].iter().map(|&g| clip(config_clip, g)).collect();
            let largest = grads.iter().fold(0.0f64, |most, g| most.max(g.abs()));
            for (i, (&before, &grad)) in before.iter().zip(&grads).enumerate() {
                let optimizer = &self.config.dense_optimizer;
                // Where rounding decides a gradient's sign, so does it the step of optimizers
                // that divide by its size.
                let divides = !matches!(optimizer, DenseOptimizer::Sgd { .. });
                if divides && grad.abs() <= 1e-3 * largest {
                    continue;
                }
                let moved = first_move(optimizer, grad);
                let slack = 1e-2 * moved.abs() + optimizer.lr() * 1e-4 * largest;
                let what = || format!("{name}[{i}] after a step");
                check::close(what, after[name][i], before - moved, slack)?;
            }
        }
        let embedding = self.embedding();
        check::updated(
            embedding,
            &self.stream,
            watched,
            self.updates,
            |g| clip(config_clip, g),
            1e-2,
        )
    }
}

/// How far a parameter moves in the first step of a dense optimizer.
fn first_move(optimizer: &DenseOptimizer, grad: f64) -> f64 {
    match *optimizer {
        DenseOptimizer::Sgd { lr } => lr * grad,
        // Sums and bias-corrected means of one gradient are the gradient itself.
        DenseOptimizer::Adagrad { lr, eps } | DenseOptimizer::Adam { lr, eps, .. } => {
            if grad == 0.0 { 0.0 } else { lr * grad / (grad.abs() + eps) }
        }
    }
}

/// The batch with its features over and over until there are `count`.
fn repeat_features(batch: &Batch, count: usize) -> Result<Batch> {
    let mut parts = batch.clone().into_parts();
    parts.features = parts.features.iter().cycle().take(count).cloned().collect();
    Ok(Batch::new(parts)?)
}

/// Where the batches of steps come from.
pub enum Source<'a> {
    /// Memory, one after the other.
    Memory(&'a [Batch]),
    /// The data of the configuration, read as in training.
    Data(Feed),
}

/// Steps of a model in training.
pub struct Steps<'a> {
    training: &'a mut Training,
    source: Source<'a>,
    /// A copy of the next batch in memory: a step takes its ids.
    prepared: Option<Batch>,
}

impl<'a> Steps<'a> {
    /// Steps on batches in memory.
    #[must_use]
    pub fn in_memory(training: &'a mut Training, batches: &'a [Batch]) -> Self {
        Self { training, source: Source::Memory(batches), prepared: None }
    }

    /// Steps on the data of the model's configuration, in batches of `batch`.
    ///
    /// Errors: data that cannot be opened.
    pub fn on_data(training: &'a mut Training, batch: usize) -> Result<Self> {
        let feed = Feed::open(&training.config, batch, &training.metrics.data)?;
        Ok(Self { training, source: Source::Data(feed), prepared: None })
    }
}

impl Workload for Steps<'_> {
    fn prepare(&mut self, number: usize) -> Result<()> {
        self.prepared = match &self.source {
            Source::Memory(batches) => Some(batches[number % batches.len()].clone()),
            Source::Data(_) => None,
        };
        Ok(())
    }

    fn serve(&mut self) -> Result<Stages> {
        let mut clock = Clock::start();
        let mut batch = match (&mut self.source, self.prepared.take()) {
            (_, Some(batch)) => batch,
            (Source::Memory(_), None) => return Err(BenchError::usage("nothing is prepared")),
            (Source::Data(feed), None) => {
                let batch = loop {
                    if let Event::Batch { batch, .. } = feed.next_event()? {
                        break batch;
                    }
                };
                clock.lap("read");
                batch
            }
        };
        self.training.step(&mut batch, &mut clock)?;
        let (_, stages) = clock.finish();
        Ok(stages.into_iter().map(|(name, ms)| (name, ms / 1e3)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draw::Law;
    use crate::knobs::{Cli, Command, Hots};
    use crate::requests::{Draw, drawn};
    use crate::tables::{Defaults, tables};
    use clap::Parser;

    fn fresh(more: &str) -> (Training, Batch) {
        let line = format!("tessera-bench step --bottom 8-4 --top 8-1{more}");
        let Command::Step(args) = Cli::parse_from(line.split(' ')).command else {
            panic!("not step")
        };
        let defaults = Defaults { tables: 3, rows: 50, dim: 4, hots: Hots { mean: 2, spread: 2 } };
        let tables = tables(&args.tables, defaults).unwrap();
        let draw = Draw { batch: 9, hots: None, requests: 1, dense: DENSE, seed: 3 };
        let batch = drawn(&tables, &Law::Zipf { alpha: 1.0 }, draw).unwrap().remove(0);
        let config = config_of_knobs(&args, &tables, 9).unwrap();
        let cpu = Cpu::new(std::num::NonZeroUsize::new(2)).unwrap();
        (Training::new(&cpu, config).unwrap(), batch)
    }

    #[test]
    fn a_right_step_passes_and_wrong_ones_are_caught() {
        for optimizers in ["", " --dense-optimizer adagrad", " --dense-optimizer adam"] {
            let (mut training, batch) = fresh(optimizers);
            training.check(&batch).unwrap();
        }

        // The naive computation believes in another model each time: what the real one gives is
        // then wrong in its eyes, in the place that differs.
        let wrong = |change: &dyn Fn(&mut Training)| {
            let (mut training, batch) = fresh("");
            change(&mut training);
            let error = training.check(&batch).unwrap_err();
            assert!(matches!(error, BenchError::WrongAnswer { .. }), "{error}");
            error.to_string()
        };
        let loss = wrong(&|t| t.spec.loss = tessera_dense::Loss::Mse);
        assert!(loss.contains("loss is"), "{loss}");
        let rate = wrong(&|t| t.config.dense_optimizer = DenseOptimizer::Sgd { lr: 1.0 });
        assert!(rate.contains("after a step"), "{rate}");
        let clip = wrong(&|t| t.config.clip = ClipConfig::Norm(1e-4));
        assert!(clip.contains("after a step"), "{clip}");
    }

    #[test]
    fn flops_of_a_small_model_are_those_counted_by_hand() {
        let (training, _) = fresh("");
        // 13-8-4, 6 pairs of dim 4 between 4 vectors, 10-8-1.
        let forward = 13 * 8 + 8 * 4 + 6 * 4 + 10 * 8 + 8;
        assert_eq!(flops(training.spec(), 3), f64::from(2 * 3 * (3 * forward - 13 * 8)));
    }
}
