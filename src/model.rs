//! A DLRM on one device of each rank: embedding tables and dense towers joined into one step.
//!
//! ```text
//! global batch -> this rank's samples
//!       -> check, route              ids checked against their tables, nothing written yet
//!       -> lookup                    pooled vectors into the tower's input rows
//!       -> forward, loss, backward   gradients of dense parameters, added over ranks bucket by
//!                                    bucket while backward goes on, and of pooled vectors
//!       -> all finite? clip          a step that is not changes nothing
//!       -> exchange, update          rows' gradients to their owners; dense parameters, then rows
//! ```
//! All ranks see the whole batch, agree before anything is written whether it is good, and do the
//! same dense update. The loss is the mean over the global batch: sums over ranks, never means.
//!
//! The wide part is one more table of dim 1 for each table, `T.wide`, whose pooled weights add
//! to the logit.

mod dynamic;
mod router;
mod saving;
mod tables;
mod tensors;

use std::borrow::Cow;
use std::ops::Range;
use std::rc::Rc;

use tessera_comm::{Communicator, Pending};
use tessera_data::Batch;
use tessera_dense::{
    Activations, DenseError, DenseOps, DenseStep, Dlrm, Loss, ModelSpec, ParamGrad, SUM_BLOCK,
};
use tessera_device::Device;
use tessera_embedding::plan::{Grid2d, Plan};
use tessera_embedding::{
    BadIdPolicy, EmbeddingCollection, FeatureSpec, HostLookup, Init, LookupOps, Schema,
    ShardedCollection, SparseStep, TableSpec,
};

use crate::clock::Clock;
use crate::config::{ClipConfig, Config, PipelineMode};
use crate::evaluation::log_loss;
use crate::metrics::Metrics;
use crate::ranks::{Ranks, same_config};
use crate::tensors::Tensor;
use crate::{Error, Result};
use dynamic::Listing;
use router::bad_input;
pub use router::{Found, Router, RowFetchers, check_labels};
use tables::Tables;
use tensors::{Home, logical_tensors};

/// A device that can run a whole model.
pub trait ModelDevice: Device + LookupOps + DenseOps {}
impl<D: Device + LookupOps + DenseOps> ModelDevice for D {}

/// What a step's samples on all ranks add up to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Total {
    /// Samples of all ranks, at least one.
    pub samples: u64,
    /// What the sum of all samples' losses is divided by.
    pub divisor: u64,
}

impl Total {
    /// Of a batch whose loss is the mean over its samples.
    #[must_use]
    pub fn of(batch: &Batch) -> Self {
        let samples = batch.samples() as u64;
        Self { samples, divisor: samples }
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
    ranks: Rc<Ranks>,
    /// For dense gradients, beside the tables' own exchanges.
    dense: Communicator,
    /// Whether exchanges of micro-batches overlap with each other's compute.
    overlap: bool,
    /// Groups of two-dimensional parallelism, by which gradients of rows are multiplied: a group
    /// moves its tables by the gradient of the mean over its own samples.
    groups: f32,
    tables: Tables<D>,
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
    /// Tables before those of the wide part.
    narrow: usize,
    tensors: Vec<Tensor>,
    homes: Vec<Home>,
    /// The ids of dynamic tables, while they are saved or loaded.
    listing: Listing,
}

impl<D: ModelDevice> Model<D> {
    /// A model on one rank, at its first values.
    ///
    /// Errors: tables that do not fit memory, by name and bytes.
    pub fn new(device: &D, config: &Config, first: FirstValues) -> Result<Self> {
        Self::build(device, config, first, None)
    }

    /// This rank's part of a model whose tables lie on the ranks of `world` as `plan` says. All
    /// ranks call it.
    ///
    /// Errors: as [`Model::new`]; a plan that does not fit the model; ranks that disagree.
    pub fn on_ranks(
        device: &D,
        config: &Config,
        first: FirstValues,
        plan: &Plan,
        world: Communicator,
    ) -> Result<Self> {
        Self::build(device, config, first, Some((plan, world)))
    }

    fn build(
        device: &D,
        config: &Config,
        first: FirstValues,
        shared: Option<(&Plan, Communicator)>,
    ) -> Result<Self> {
        let stream = device.stream()?;
        let spec = config.model_spec();
        let (mut tables, features) = tables(config, &spec);
        if first == FirstValues::Loaded {
            // Ids that come to a dynamic table later are drawn all the same.
            for table in tables.iter_mut().filter(|table| !table.is_dynamic()) {
                table.init = Init::Zero;
            }
        }
        let stride = spec.stride();
        let (here, seed) = (device.clone(), config.seed);
        let tiers_of = |rank| config.tiers.as_ref().map(|tiers| tiers.of_rank(rank));
        let (ranks, tables) = match shared {
            None => {
                let tiers = tiers_of(0);
                let tables = EmbeddingCollection::with_tiers(
                    here,
                    &stream,
                    tables,
                    features,
                    seed,
                    tiers.as_ref(),
                )?;
                (Ranks::alone(), Tables::Alone(tables))
            }
            Some((plan, world)) => {
                same_config(&world, config)?;
                let parallel = &config.parallel;
                let total = world.size();
                let grid = Grid2d::new(total, parallel.replicas as usize, parallel.placement)?;
                let (group, index) = grid.place(world.rank());
                let split = |name: &str, color: usize, key: usize| {
                    let joined = world.split(name, Some(color as u64), key as u64)?;
                    Ok::<_, Error>(joined.expect("every rank has a color"))
                };
                let of_group = split("tables", group, index)?;
                let tiers = tiers_of(world.rank());
                let model = (tables, features);
                let tables = ShardedCollection::with_tiers(
                    here,
                    &stream,
                    model,
                    seed,
                    plan,
                    of_group,
                    tiers.as_ref(),
                )?
                .with_codecs(parallel.codec_forward, parallel.codec_backward)?;
                let tables = match parallel.replicas {
                    1 => tables,
                    _ => tables
                        .with_replicas(split("replicas", index, group)?, parallel.sync_every)?,
                };
                (Ranks::new(world, index == 0), Tables::Shared(Box::new(tables)))
            }
        };
        let towers = Dlrm::new(device, spec, config.dense_optimizer, config.seed)?;
        let batch_max = ranks.part_max(config.data.batch_size.max(config.data.eval_batch_size));
        let activations = towers.activations(batch_max)?;
        let blocks = batch_max.saturating_mul(stride).div_ceil(SUM_BLOCK);
        let (narrow, listing) = (config.tables.len(), Listing::default());
        let (tensors, homes) = logical_tensors(tables.schema(), &towers, narrow, &listing);
        Ok(Self {
            device: device.clone(),
            dense: ranks.control().duplicate("dense")?,
            ranks: Rc::new(ranks),
            overlap: config.pipeline.mode == PipelineMode::Nested,
            groups: config.parallel.replicas as f32,
            tables,
            towers,
            activations,
            partial_sums: device.alloc(blocks)?,
            ones: vec![1.0; batch_max],
            stride,
            wide: config.model.wide,
            loss: config.model.loss,
            clip: config.clip,
            on_bad_id: config.data.on_bad_id,
            narrow,
            tensors,
            homes,
            listing,
            stream,
        })
    }

    /// The tables of a model on one rank, those of the wide part included.
    pub fn embedding(&self) -> Option<&EmbeddingCollection<D>> {
        match &self.tables {
            Tables::Alone(tables) => Some(tables),
            Tables::Shared(_) => None,
        }
    }

    /// The tables and features, those of the wide part included.
    pub fn schema(&self) -> &Schema {
        self.tables.schema()
    }

    /// This rank among the others.
    pub fn ranks(&self) -> Rc<Ranks> {
        Rc::clone(&self.ranks)
    }

    /// Averages groups of two-dimensional parallelism now: what is to be saved or evaluated
    /// between two averages needs it. A collective.
    ///
    /// Errors: what the tables say.
    pub fn sync(&mut self) -> Result<()> {
        Ok(self.tables.sync(&self.stream)?)
    }

    /// What routes batches of this model on a thread of its own, in micro-batches; `name` is that
    /// of its communicator. A collective.
    ///
    /// Errors: those of any collective; a number of micro-batches out of range.
    pub fn router(&self, name: &str, micro_batches: usize) -> Result<Router<D>> {
        Ok(Router {
            device: self.device.clone(),
            stream: self.device.stream()?,
            tables: self.tables.router(name, micro_batches)?,
            micro_batches,
            wide: self.wide,
            on_bad_id: self.on_bad_id,
        })
    }

    /// The step that messages between ranks belong to from now on.
    pub fn set_step(&self, step: u64) {
        self.ranks.set_step(step);
        self.dense.set_step(step);
        self.tables.set_step(step);
    }

    /// Bytes of a table on this rank.
    pub fn table_bytes(&self, table: usize) -> u64 {
        self.tables.resident_bytes(table).unwrap_or(0)
    }

    /// Names of the tables, those of the wide part included.
    pub fn table_names(&self) -> impl Iterator<Item = &str> {
        self.schema().tables().iter().map(|table| table.name.as_str())
    }

    /// Bytes of dense parameters, gradients and states.
    pub fn dense_bytes(&self) -> u64 {
        self.towers.bytes()
    }

    /// Checks the ids of this rank's samples against their tables; nothing is written.
    ///
    /// Errors: [`Error::BadInput`] with the file and row of the sample.
    fn check(&self, own: &Batch, metrics: &Metrics) -> Result<HostLookup> {
        let features = router::twice(own.features().to_vec(), self.wide);
        let checked = self.tables.check(features, self.on_bad_id);
        checked.map_err(|error| bad_input(error, self.schema(), own, metrics))
    }

    /// This rank's samples of a global batch.
    fn own<'b>(&self, batch: &'b Batch) -> Cow<'b, Batch> {
        match self.ranks.is_alone() {
            true => Cow::Borrowed(batch),
            false => Cow::Owned(batch.slice(self.ranks.part(batch.samples()))),
        }
    }

    /// The logits of a global batch, in the order of its samples, on every rank. A collective.
    ///
    /// Errors: [`Error::BadInput`]; [`Error::NonFiniteLogit`] of the first one; what the device
    /// says.
    pub fn predict(&mut self, batch: &Batch, metrics: &Metrics) -> Result<Vec<f32>> {
        let own = self.own(batch);
        let checked = self.ranks.agree(self.check(&own, metrics))?;
        let mut found = self.tables.route(&self.stream, checked)?;
        let (stream, acts, stride) = (&self.stream, &mut self.activations, self.stride);
        let mut clock = Clock::start();
        self.device.upload(stream, own.dense(), &mut acts.dense, 0)?;
        self.tables.begin_forward(stream, &mut found, false, &mut acts.x0, stride)?;
        self.tables.forward_micro(stream, &mut found, 0, false, &mut acts.x0, stride)?;
        self.device.synchronize(stream)?;
        found.observe(metrics, clock.lap("lookup"));
        self.towers.forward(stream, acts, 0..own.samples())?;
        self.tables.finish(stream, found)?;
        let mut logits = vec![0.0; own.samples()];
        self.towers.logits(&self.stream, &self.activations, &mut logits)?;
        let logits = self.ranks.gather(logits)?;
        match logits.iter().position(|logit| !logit.is_finite()) {
            None => Ok(logits),
            Some(sample) => Err(Error::NonFiniteLogit {
                place: batch.place(sample).to_string(),
                logit: logits[sample],
            }),
        }
    }

    /// Trains on one global batch, of which this rank has the samples `own`, maybe none, whose
    /// rows were `found`. A collective.
    ///
    /// Parameters stay as they are until the gradients of all micro-batches are together; a row's
    /// gradient is summed over the whole batch in its one order, those of dense parameters
    /// micro-batch after micro-batch.
    ///
    /// Errors: what the tables and the device say at any time.
    pub fn train_step(
        &mut self,
        own: &Batch,
        total: Total,
        mut found: Found<D>,
        scalars: StepScalars,
        metrics: &Metrics,
        clock: &mut Clock,
    ) -> Result<Stepped> {
        let samples = own.samples();
        self.unlist();
        self.observe_ids(&found, metrics);
        self.tables.finish_sync(&self.stream)?;
        clock.lap("finish_sync");
        if let Some(ready) = &found.ready {
            self.device.wait(&self.stream, ready)?;
        }
        if self.tables.moves() {
            self.tables.hold(&self.stream, &mut found)?;
            clock.lap("hold");
        }
        let (stream, acts) = (&self.stream, &mut self.activations);
        self.device.upload(stream, own.dense(), &mut acts.dense, 0)?;
        self.device.upload(stream, own.labels(), &mut acts.labels, 0)?;
        let weights = own.sample_weights().unwrap_or(&self.ones[..samples]);
        self.device.upload(stream, weights, &mut acts.sample_weights, 0)?;
        let (overlap, stride) = (self.overlap, self.stride);
        self.tables.begin_forward(stream, &mut found, overlap, &mut acts.x0, stride)?;
        self.device.synchronize(stream)?;
        let mut lookup_s = clock.lap("lookup");
        let (mut mean, mut dense_sq_norm, mut sums) = (0.0, 0.0, Vec::new());
        let micro = found.micro.clone();
        for (index, rows) in micro.iter().enumerate() {
            let (stream, acts) = (&self.stream, &mut self.activations);
            let out = &mut acts.x0;
            self.tables.forward_micro(stream, &mut found, index, overlap, out, stride)?;
            self.device.synchronize(stream)?;
            lookup_s += clock.lap("lookup");
            let last = index + 1 == micro.len();
            if last {
                found.observe(metrics, lookup_s);
            }
            self.towers.forward(stream, acts, rows.clone())?;
            mean += self.towers.loss(stream, acts, rows.clone(), total.divisor)?;
            clock.lap("forward");
            if last {
                [mean] = self.ranks.sum([mean])?;
                if !mean.is_finite() {
                    return Ok(Stepped::NonFinite(format!("the loss, {mean},")));
                }
                if !self.ranks.is_alone() {
                    clock.lap("agree");
                }
            }
            let store = if index == 0 { ParamGrad::Store } else { ParamGrad::Add };
            if let Err(what) =
                self.backward(rows.clone(), store, last, &mut dense_sq_norm, &mut sums)?
            {
                return Ok(Stepped::NonFinite(what));
            }
            clock.lap("backward");
            let (stream, dx0) = (&self.stream, &self.activations.dx0);
            self.tables.post_gradients(stream, &mut found, index, dx0, stride)?;
            if !overlap {
                self.tables.receive_gradients(stream, &mut found)?;
            }
            if !self.ranks.is_alone() {
                clock.lap("exchange_gradients");
            }
        }
        let dense_sq_norm = match self.finish_gradients(samples, dense_sq_norm, sums, clock)? {
            Ok(norm) => norm,
            Err(what) => return Ok(Stepped::NonFinite(what)),
        };
        self.tables.receive_gradients(&self.stream, &mut found)?;
        if !self.ranks.is_alone() {
            clock.lap("exchange_gradients");
        }
        let (stream, acts) = (&self.stream, &mut self.activations);

        let (sparse_clip, dense_clip) = match self.clip {
            ClipConfig::None if self.groups > 1.0 => {
                (tessera_embedding::Clip::Scale(self.groups), tessera_dense::Clip::None)
            }
            ClipConfig::None => (tessera_embedding::Clip::None, tessera_dense::Clip::None),
            ClipConfig::Value(limit) => {
                let limit = limit as f32;
                (tessera_embedding::Clip::Value(limit), tessera_dense::Clip::Value(limit))
            }
            ClipConfig::Norm(limit) => {
                let sparse = self.tables.grad_sq_norm(stream, &found, &acts.dx0, self.stride)?;
                let sparse = self.ranks.sum_over_groups(sparse)?;
                let norm = (dense_sq_norm + sparse).sqrt();
                if !norm.is_finite() {
                    return Ok(Stepped::NonFinite("the norm of all gradients".into()));
                }
                let scale = if norm > limit { (limit / norm) as f32 } else { 1.0 };
                (
                    tessera_embedding::Clip::Scale(scale * self.groups),
                    tessera_dense::Clip::Scale(scale),
                )
            }
        };
        let sparse =
            SparseStep { t: scalars.update, lr_scale: scalars.lr_factor as f32, clip: sparse_clip };
        let rows_asked = found.rows_asked();
        let moved = self.tables.update(stream, found, &acts.dx0, self.stride, &sparse)?;
        self.device.synchronize(stream)?;
        metrics.embedding.observe_update(&moved);
        if let Some(cache) = &metrics.cache {
            for table in 0..self.schema().tables().len() {
                cache.show(table, &self.tables.store_stats(table)?);
            }
        }
        self.tables.start_sync(scalars.update)?;
        let torn = moved.rows_nonfinite.iter().position(|&rows| rows > 0);
        clock.lap("update_sparse");
        let torn_anywhere = self.ranks.any(torn.is_some())?;
        if !self.ranks.is_alone() {
            clock.lap("agree");
        }
        if let Some(table) = torn {
            let name = &self.tables.schema().tables()[table].name;
            let rows = moved.rows_nonfinite[table];
            return Ok(Stepped::Torn(format!("{rows} rows of table {name}")));
        }
        if torn_anywhere {
            return Ok(Stepped::Torn("rows of another rank".to_owned()));
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
        let sums = self.sums(own, total, mean, rows_asked, metrics)?;
        if !self.ranks.is_alone() {
            clock.lap("agree");
        }
        Ok(Stepped::Done(sums))
    }

    /// Gradients of all parameters and of the pooled vectors of the samples `rows`. Of a batch's
    /// last ones, those of parameters are complete: alone, their squares are added to `sq_norm`;
    /// with other ranks they set out to be added, bucket by bucket, while the rest of the pass
    /// goes on. Gives what is not finite, as far as it shows alone.
    fn backward(
        &mut self,
        rows: Range<usize>,
        store: ParamGrad,
        last: bool,
        sq_norm: &mut f64,
        sums: &mut Vec<(usize, Pending<Vec<f32>>)>,
    ) -> Result<std::result::Result<(), String>> {
        let (stream, acts) = (&self.stream, &mut self.activations);
        let (device, ranks, dense) = (&self.device, &self.ranks, &self.dense);
        let done = self.towers.backward(stream, acts, rows, store, |mut bucket| {
            if !last {
                return Ok(());
            }
            if ranks.is_alone() {
                *sq_norm += bucket.grad_sq_norm(stream)?;
            } else {
                // Whether it is finite shows in the sum, on all ranks alike.
                let mut grads = dense.buffer(bucket.range.len());
                grads.resize(bucket.range.len(), 0.0f32);
                device.download(stream, bucket.grads, bucket.range.start, &mut grads)?;
                sums.push((bucket.index, dense.all_reduce(grads)));
            }
            Ok::<(), DenseError>(())
        });
        finite(done)
    }

    /// Waits for the sums of all parameters' gradients, and gives their squared norm or what is
    /// not finite, the gradient of the pooled vectors included; either is the same on all ranks.
    fn finish_gradients(
        &mut self,
        samples: usize,
        mut sq_norm: f64,
        sums: Vec<(usize, Pending<Vec<f32>>)>,
        clock: &mut Clock,
    ) -> Result<std::result::Result<f64, String>> {
        let (stream, acts) = (&self.stream, &mut self.activations);
        let rows = 0..samples * self.stride;
        let device = &self.device;
        let squares = device.sum_of_squares(stream, rows, &acts.dx0, &mut self.partial_sums)?;
        let finite_anywhere = !self.ranks.any(!squares.is_finite())?;
        clock.lap("check");
        for (bucket, sum) in sums {
            let grads = sum.wait()?;
            self.towers.write_grads(stream, bucket, &grads)?;
            self.dense.recycle(grads);
            match finite(self.towers.grad_sq_norm(stream, bucket))? {
                Ok(norm) => sq_norm += norm,
                Err(what) => return Ok(Err(what)),
            }
        }
        if !self.ranks.is_alone() {
            clock.lap("all_reduce");
        }
        Ok(if finite_anywhere {
            Ok(sq_norm)
        } else {
            Err("the gradient of the pooled vectors".into())
        })
    }

    /// The sums of a step over all ranks for the windowed entropy; shows how unevenly the rows
    /// that were asked of each rank are spread. A collective.
    fn sums(
        &self,
        own: &Batch,
        total: Total,
        mean: f64,
        rows_asked: u64,
        metrics: &Metrics,
    ) -> Result<StepLoss> {
        let weight = |i: usize| own.sample_weights().map_or(1.0, |w| f64::from(w[i]));
        let (mut logloss, mut labels, mut weights) = (0.0, 0.0, 0.0);
        for (i, &label) in own.labels().iter().enumerate() {
            labels += weight(i) * f64::from(label);
            weights += weight(i);
        }
        match self.loss {
            // The mean is over all ranks already; the sum over ranks makes it whole again.
            Loss::Bce => {
                let padded = total.divisor as f64 / total.samples as f64;
                logloss = mean * own.samples() as f64 * padded;
            }
            Loss::Mse => {
                let mut logits = vec![0.0; own.samples()];
                self.towers.logits(&self.stream, &self.activations, &mut logits)?;
                for (i, (&z, &y)) in logits.iter().zip(own.labels()).enumerate() {
                    logloss += weight(i) * log_loss(f64::from(z), f64::from(y));
                }
            }
        }
        let all = self.ranks.gather(vec![logloss, labels, weights, rows_asked as f64])?;
        let [mut logloss, mut labels, mut weight, mut rows, mut rows_max] = [0.0; 5];
        for rank in all.as_chunks::<4>().0 {
            logloss += rank[0];
            labels += rank[1];
            weight += rank[2];
            rows += rank[3];
            rows_max = f64::max(rows_max, rank[3]);
        }
        if rows > 0.0 {
            metrics.imbalance.set(rows_max * self.ranks.size() as f64 / rows);
        }
        Ok(StepLoss { mean, logloss, labels, weight })
    }
}

/// What a gradient is, or the name of what is not finite in it.
fn finite<T>(result: std::result::Result<T, DenseError>) -> Result<std::result::Result<T, String>> {
    match result {
        Ok(value) => Ok(Ok(value)),
        Err(DenseError::NonFiniteGradient { parameter, .. }) => {
            Ok(Err(format!("the gradient of {parameter}")))
        }
        Err(other) => Err(Error::from(other)),
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
            kind: table.kind,
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
