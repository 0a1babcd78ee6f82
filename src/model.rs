//! A DLRM on one device: embedding tables and dense towers joined into one step.
//!
//! ```text
//! batch -> resolve, group            ids checked against their tables, nothing written yet
//!       -> lookup                    pooled vectors into the tower's input rows
//!       -> forward, loss, backward   gradients of dense parameters and of pooled vectors
//!       -> all finite? clip          a step that is not changes nothing
//!       -> update                    dense parameters, then rows
//! ```
//! The wide part is one more table of dim 1 for each table, `T.wide`, whose pooled weights add
//! to the logit.

mod tensors;

use std::collections::BTreeMap;
use std::time::Instant;

use tessera_data::Batch;
use tessera_dense::{
    Activations, DenseError, DenseOps, DenseStep, Dlrm, Loss, ModelSpec, SUM_BLOCK,
};
use tessera_device::Device;
use tessera_embedding::{
    BadIdPolicy, EmbeddingCollection, EmbeddingError, FeatureSpec, Init, Lookup, LookupOps,
    SparseStep, TableSpec,
};

use crate::config::{ClipConfig, Config};
use crate::evaluation::log_loss;
use crate::metrics::Metrics;
use crate::tensors::Tensor;
use crate::{Error, Result};
use tensors::{Home, logical_tensors};

/// A device that can run a whole model.
pub trait ModelDevice: Device + LookupOps + DenseOps {}
impl<D: Device + LookupOps + DenseOps> ModelDevice for D {}

/// Times the stages of a step.
#[derive(Debug)]
pub struct Clock {
    start: Instant,
    last: Instant,
    stages: BTreeMap<String, f64>,
}

impl Clock {
    /// A clock that starts now.
    #[must_use]
    pub fn start() -> Self {
        let now = Instant::now();
        Self { start: now, last: now, stages: BTreeMap::new() }
    }

    /// Ends a stage; the next one starts. Gives its seconds.
    pub fn lap(&mut self, stage: &str) -> f64 {
        let now = Instant::now();
        let seconds = (now - self.last).as_secs_f64();
        self.last = now;
        *self.stages.entry(stage.to_owned()).or_default() += seconds * 1e3;
        seconds
    }

    /// Milliseconds from the start, and of each stage by name.
    #[must_use]
    pub fn finish(self) -> (f64, BTreeMap<String, f64>) {
        (self.start.elapsed().as_secs_f64() * 1e3, self.stages)
    }
}

/// The scalars of one step.
#[derive(Clone, Copy, Debug)]
pub struct StepScalars {
    /// Update count after this step (t), from 1.
    pub update: u64,
    /// Factor of the schedule on all learning rates.
    pub lr_factor: f64,
}

/// A step's loss, and sums for the windowed entropy.
#[derive(Clone, Copy, Debug)]
pub struct StepLoss {
    /// Mean over the batch.
    pub mean: f64,
    /// Sum of weighted log losses.
    pub logloss: f64,
    /// Sum of weighted labels.
    pub labels: f64,
    /// Sum of sample weights.
    pub weight: f64,
}

/// What became of a step.
#[derive(Debug)]
pub enum Stepped {
    /// The model moved.
    Done(StepLoss),
    /// A loss or gradient, named here, is not finite; the model is as it was.
    NonFinite(String),
    /// Rows of a table or a dense parameter, named here, overflowed in their update although their
    /// gradients were finite: others have moved, so the model is between two steps.
    Torn(String),
}

/// Where the first values of a model come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FirstValues {
    /// Drawn: a function of the seed and of names.
    Drawn,
    /// The caller loads every weight before it uses the model. Until then tables are zero, which
    /// touches no memory.
    Loaded,
}

/// A model on a device.
pub struct Model<D: ModelDevice> {
    device: D,
    stream: D::Stream,
    embedding: EmbeddingCollection<D>,
    towers: Dlrm<D>,
    activations: Activations<D>,
    /// For the sum of squares over the gradient of the input rows.
    partial_sums: D::Buffer<f64>,
    ones: Vec<f32>,
    stride: usize,
    wide: bool,
    loss: Loss,
    clip: ClipConfig,
    on_bad_id: BadIdPolicy,
    tensors: Vec<Tensor>,
    homes: Vec<Home>,
}

impl<D: ModelDevice> Model<D> {
    /// A model at its first values.
    ///
    /// Errors: tables that do not fit memory, by name and bytes.
    pub fn new(device: &D, config: &Config, first: FirstValues) -> Result<Self> {
        let stream = device.stream()?;
        let spec = config.model_spec();
        let (mut tables, features) = tables(config, &spec);
        if first == FirstValues::Loaded {
            for table in &mut tables {
                table.init = Init::Zero;
            }
        }
        let stride = spec.stride();
        let embedding =
            EmbeddingCollection::new(device.clone(), &stream, tables, features, config.seed)?;
        let towers = Dlrm::new(device, spec, config.dense_optimizer, config.seed)?;
        let batch_max = config.data.batch_size.max(config.data.eval_batch_size);
        let activations = towers.activations(batch_max)?;
        let blocks = batch_max.saturating_mul(stride).div_ceil(SUM_BLOCK);
        let (tensors, homes) = logical_tensors(&embedding, &towers, config.tables.len());
        Ok(Self {
            device: device.clone(),
            embedding,
            towers,
            activations,
            partial_sums: device.alloc(blocks)?,
            ones: vec![1.0; batch_max],
            stride,
            wide: config.model.wide,
            loss: config.model.loss,
            clip: config.clip,
            on_bad_id: config.data.on_bad_id,
            tensors,
            homes,
            stream,
        })
    }

    /// The tables, those of the wide part included.
    pub fn embedding(&self) -> &EmbeddingCollection<D> {
        &self.embedding
    }

    /// Names of the tables, those of the wide part included.
    pub fn table_names(&self) -> impl Iterator<Item = &str> {
        self.embedding.schema().tables().iter().map(|table| table.name.as_str())
    }

    /// Bytes of dense parameters, gradients and states.
    pub fn dense_bytes(&self) -> u64 {
        self.towers.bytes()
    }

    /// Checks that the loss is defined on a batch's labels.
    ///
    /// Errors: [`Error::BadLabel`] with the file and row of the first label outside 0 to 1.
    pub fn check_labels(&self, batch: &Batch) -> Result<()> {
        let outside = |label: &f32| !(0.0..=1.0).contains(label);
        match batch.labels().iter().position(outside) {
            None => Ok(()),
            Some(sample) => Err(Error::BadLabel {
                place: batch.place(sample).to_string(),
                label: batch.labels()[sample],
            }),
        }
    }

    /// Checks the ids of a batch against their tables; nothing is written.
    ///
    /// Errors: [`Error::BadInput`] with the file and row of the sample.
    fn resolve(&self, batch: &Batch, metrics: &Metrics) -> Result<Lookup<D>> {
        let mut features = batch.features().to_vec();
        if self.wide {
            features.extend_from_slice(batch.features());
        }
        let resolved = self.embedding.resolve(&self.stream, features, self.on_bad_id);
        resolved.map_err(|source| match source {
            EmbeddingError::IdOutOfRange { ref table, sample, .. } => {
                if let Some(index) = self.table_names().position(|name| name == table) {
                    metrics.embedding.observe_refusal(index);
                }
                Error::BadInput { place: batch.place(sample).to_string(), source: source.into() }
            }
            other => other.into(),
        })
    }

    /// From a batch's dense values and ids to `activations.logits`.
    fn forward(
        &mut self,
        batch: &Batch,
        lookup: &Lookup<D>,
        metrics: &Metrics,
        clock: &mut Clock,
    ) -> Result<()> {
        let (stream, acts) = (&self.stream, &mut self.activations);
        self.device.upload(stream, batch.dense(), &mut acts.dense, 0)?;
        self.embedding.forward(stream, lookup, &mut acts.x0, self.stride)?;
        self.device.synchronize(stream)?;
        metrics.embedding.observe_lookup(lookup, clock.lap("lookup"));
        Ok(self.towers.forward(stream, acts, batch.samples())?)
    }

    /// The logits of a batch, in the order of its samples.
    ///
    /// Errors: [`Error::BadInput`]; [`Error::NonFiniteLogit`] of the first one; what the device
    /// says.
    pub fn predict(&mut self, batch: &Batch, metrics: &Metrics) -> Result<Vec<f32>> {
        let lookup = self.resolve(batch, metrics)?;
        self.forward(batch, &lookup, metrics, &mut Clock::start())?;
        let mut logits = vec![0.0; batch.samples()];
        self.towers.logits(&self.stream, &self.activations, &mut logits)?;
        match logits.iter().position(|logit| !logit.is_finite()) {
            None => Ok(logits),
            Some(sample) => Err(Error::NonFiniteLogit {
                place: batch.place(sample).to_string(),
                logit: logits[sample],
            }),
        }
    }

    /// Trains on one batch.
    ///
    /// Errors: [`Error::BadInput`] and [`Error::BadLabel`] before anything is written; what the
    /// device says at any time.
    pub fn train_step(
        &mut self,
        batch: &Batch,
        scalars: StepScalars,
        metrics: &Metrics,
        clock: &mut Clock,
    ) -> Result<Stepped> {
        let samples = batch.samples();
        self.check_labels(batch)?;
        let lookup = self.resolve(batch, metrics)?;
        self.embedding.resolver().group(&self.stream, &lookup)?;
        clock.lap("route");
        self.forward(batch, &lookup, metrics, clock)?;

        let (stream, acts) = (&self.stream, &mut self.activations);
        self.device.upload(stream, batch.labels(), &mut acts.labels, 0)?;
        let weights = batch.sample_weights().unwrap_or(&self.ones[..samples]);
        self.device.upload(stream, weights, &mut acts.sample_weights, 0)?;
        let mean = self.towers.loss(stream, acts, samples, samples as u64)?;
        clock.lap("forward");
        if !mean.is_finite() {
            return Ok(Stepped::NonFinite(format!("the loss, {mean},")));
        }

        let mut dense_sq_norm = 0.0;
        let backward = self.towers.backward(stream, acts, samples, |mut bucket| {
            dense_sq_norm += bucket.grad_sq_norm(stream)?;
            Ok::<(), DenseError>(())
        });
        match backward {
            Err(DenseError::NonFiniteGradient { parameter, .. }) => {
                return Ok(Stepped::NonFinite(format!("the gradient of {parameter}")));
            }
            other => other?,
        }
        let rows = 0..samples * self.stride;
        let sums = &mut self.partial_sums;
        if !self.device.sum_of_squares(stream, rows, &acts.dx0, sums)?.is_finite() {
            return Ok(Stepped::NonFinite("the gradient of the pooled vectors".into()));
        }
        clock.lap("backward");

        let (sparse_clip, dense_clip) = match self.clip {
            ClipConfig::None => (tessera_embedding::Clip::None, tessera_dense::Clip::None),
            ClipConfig::Value(limit) => {
                let limit = limit as f32;
                (tessera_embedding::Clip::Value(limit), tessera_dense::Clip::Value(limit))
            }
            ClipConfig::Norm(limit) => {
                let sparse =
                    self.embedding.grad_sq_norm(stream, &lookup, &acts.dx0, self.stride)?;
                let norm = (dense_sq_norm + sparse).sqrt();
                if !norm.is_finite() {
                    return Ok(Stepped::NonFinite("the norm of all gradients".into()));
                }
                let scale = if norm > limit { (limit / norm) as f32 } else { 1.0 };
                (tessera_embedding::Clip::Scale(scale), tessera_dense::Clip::Scale(scale))
            }
        };
        let sparse =
            SparseStep { t: scalars.update, lr_scale: scalars.lr_factor as f32, clip: sparse_clip };
        let moved = self.embedding.update(stream, &lookup, &acts.dx0, self.stride, &sparse)?;
        self.device.synchronize(stream)?;
        metrics.embedding.observe_update(&moved);
        clock.lap("update_sparse");
        if let Some(table) = moved.rows_nonfinite.iter().position(|&rows| rows > 0) {
            let name = &self.embedding.schema().tables()[table].name;
            let rows = moved.rows_nonfinite[table];
            return Ok(Stepped::Torn(format!("{rows} rows of table {name}")));
        }
        let dense = DenseStep {
            t: scalars.update,
            lr: (self.towers.optimizer().lr() * scalars.lr_factor) as f32,
            clip: dense_clip,
        };
        self.towers.update(stream, &dense)?;
        if let Some(parameter) = self.towers.nonfinite(stream)? {
            return Ok(Stepped::Torn(format!("parameter {parameter}")));
        }
        self.device.synchronize(stream)?;
        clock.lap("update_dense");
        Ok(Stepped::Done(self.sums(batch, mean)?))
    }

    /// The sums of a step for the windowed entropy.
    fn sums(&self, batch: &Batch, mean: f64) -> Result<StepLoss> {
        let weight = |i: usize| batch.sample_weights().map_or(1.0, |w| f64::from(w[i]));
        let mut sums = StepLoss { mean, logloss: 0.0, labels: 0.0, weight: 0.0 };
        for (i, &label) in batch.labels().iter().enumerate() {
            sums.labels += weight(i) * f64::from(label);
            sums.weight += weight(i);
        }
        match self.loss {
            Loss::Bce => sums.logloss = mean * batch.samples() as f64,
            Loss::Mse => {
                let mut logits = vec![0.0; batch.samples()];
                self.towers.logits(&self.stream, &self.activations, &mut logits)?;
                for (i, (&z, &y)) in logits.iter().zip(batch.labels()).enumerate() {
                    sums.logloss += weight(i) * log_loss(f64::from(z), f64::from(y));
                }
            }
        }
        Ok(sums)
    }
}

/// Tables and features of a configuration as the embedding collection wants them: the model's,
/// then, with a wide part, one table of dim 1 for each.
fn tables(config: &Config, spec: &ModelSpec) -> (Vec<TableSpec>, Vec<FeatureSpec>) {
    let mut tables: Vec<TableSpec> = config
        .tables
        .iter()
        .map(|table| TableSpec {
            name: table.name.clone(),
            rows: table.rows,
            dim: table.dim,
            precision: table.precision,
            pooling: table.pooling,
            init: table.init,
            optimizer: table.optimizer,
        })
        .collect();
    let mut features: Vec<FeatureSpec> = config
        .features()
        .enumerate()
        .map(|(index, (table, _, name))| FeatureSpec {
            name: name.to_owned(),
            table,
            column: spec.feature_column(index),
        })
        .collect();
    if config.model.wide {
        for table in 0..config.tables.len() {
            let narrow = &tables[table];
            let wide = TableSpec {
                name: format!("{}.wide", narrow.name),
                dim: 1,
                init: Init::Zero,
                ..narrow.clone()
            };
            tables.push(wide);
        }
        for (index, (table, _, name)) in config.features().enumerate() {
            features.push(FeatureSpec {
                name: format!("{name}.wide"),
                table: config.tables.len() + table,
                column: spec.wide_column(index),
            });
        }
    }
    (tables, features)
}
