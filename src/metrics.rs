//! What a training run tells Prometheus; docs/metrics.md lists every name.

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge,
    Opts, Registry,
};
use tessera_cache::CacheMetrics;
use tessera_data::DataMetrics;
use tessera_embedding::{EmbeddingMetrics, IdMetrics};

use crate::Result;
use crate::evaluation::Evaluation;
use crate::pipeline::Clustered;

/// Bounds of duration histograms in seconds: from 10 microseconds to 100 seconds, 1-2-5.
fn seconds() -> Vec<f64> {
    let mut bounds = Vec::new();
    for exponent in -5..=1 {
        for step in [1.0, 2.0, 5.0] {
            bounds.push(step * 10f64.powi(exponent));
        }
    }
    bounds.push(100.0);
    bounds
}

/// Handles of every metric of a trainer, its data and its tables.
pub struct Metrics {
    /// The data pipeline's own.
    pub data: DataMetrics,
    /// The embedding tables' own.
    pub embedding: EmbeddingMetrics,
    /// Those of tables whose rows move between tiers, once [`Metrics::with_cache`] made them.
    pub cache: Option<CacheMetrics>,
    /// Those of dynamic tables, once [`Metrics::with_ids`] made them.
    pub ids: Option<IdMetrics>,
    /// Steps done by this process.
    pub steps: IntCounter,
    /// Samples trained on by this process.
    pub samples: IntCounter,
    /// Epoch being read, from 0.
    pub epoch: IntGauge,
    /// Loss of the last step.
    pub loss: Gauge,
    /// Windowed normalised entropy.
    pub window_ne: Gauge,
    /// Factor of the schedule on all learning rates.
    pub learning_rate_factor: Gauge,
    /// Learning rate of the dense optimizer.
    pub learning_rate: Gauge,
    /// Seconds of a whole step.
    pub step_seconds: Histogram,
    /// Seconds of each stage of a step.
    pub stage_seconds: HistogramVec,
    /// Different keys of each micro-batch, added up, by the order of samples: as they were
    /// given, and clustered.
    keys: [IntCounter; 2],
    /// Rows that ranks look up, the most over the mean.
    pub imbalance: Gauge,
    /// Steps skipped for a loss or gradient that is not finite.
    pub skipped_steps: IntCounter,
    /// Bytes of dense parameters, gradients and states.
    pub dense_resident_bytes: IntGauge,
    /// Seconds of writing a checkpoint.
    pub checkpoint_seconds: Histogram,
    /// Bytes of the last checkpoint.
    pub checkpoint_bytes: IntGauge,
    /// Bytes of the files on SSD that the last checkpoint has links to.
    pub checkpoint_linked_bytes: IntGauge,
    /// Step of the last checkpoint.
    pub checkpoint_step: IntGauge,
    /// Checkpoints that could not be written.
    pub checkpoint_failures: IntCounter,
    /// Seconds of an evaluation.
    pub eval_seconds: Histogram,
    /// Figures of the last evaluation, by metric.
    pub eval: GaugeVec,
}

impl Metrics {
    /// Handles for a model with tables of these names, registered on `registry`.
    ///
    /// Errors: a registry that already serves another trainer.
    pub fn register<'n>(
        registry: &Registry,
        tables: impl IntoIterator<Item = &'n str>,
    ) -> Result<Self> {
        let data = DataMetrics::register(registry)?;
        let embedding = EmbeddingMetrics::new(tables, Some(registry))?;
        // The two calls above have refused a registry that is in use.
        Ok(Self::build(data, embedding, |collector| {
            registry.register(collector).expect("names of ours on a registry of ours");
        }))
    }

    /// With metrics of the tiers that tables of these names have.
    ///
    /// Errors: a registry that already serves another trainer.
    pub fn with_cache<'n>(
        mut self,
        registry: &Registry,
        tables: impl IntoIterator<Item = &'n str>,
    ) -> Result<Self> {
        self.cache = Some(CacheMetrics::new(tables, Some(registry))?);
        Ok(self)
    }

    /// With metrics of the ids of dynamic tables, whose names are among these.
    ///
    /// Errors: a registry that already serves another trainer.
    pub fn with_ids<'n>(
        mut self,
        registry: &Registry,
        tables: impl IntoIterator<Item = &'n str>,
    ) -> Result<Self> {
        self.ids = Some(IdMetrics::new(tables, Some(registry))?);
        Ok(self)
    }

    fn build(
        data: DataMetrics,
        embedding: EmbeddingMetrics,
        register: impl Fn(Box<dyn prometheus::core::Collector>),
    ) -> Self {
        let counter = |name: &str, help: &str| {
            let counter = IntCounter::new(name, help).expect("a valid name");
            register(Box::new(counter.clone()));
            counter
        };
        let int_gauge = |name: &str, help: &str| {
            let gauge = IntGauge::new(name, help).expect("a valid name");
            register(Box::new(gauge.clone()));
            gauge
        };
        let gauge = |name: &str, help: &str| {
            let gauge = Gauge::new(name, help).expect("a valid name");
            register(Box::new(gauge.clone()));
            gauge
        };
        let histogram = |name: &str, help: &str| {
            let histogram = Histogram::with_opts(HistogramOpts::new(name, help).buckets(seconds()))
                .expect("a valid name and bounds");
            register(Box::new(histogram.clone()));
            histogram
        };
        let stage_seconds = HistogramVec::new(
            HistogramOpts::new("tessera_train_stage_seconds", "Duration of each stage of a step.")
                .buckets(seconds()),
            &["stage"],
        )
        .expect("a valid name and bounds");
        register(Box::new(stage_seconds.clone()));
        let keys = IntCounterVec::new(
            Opts::new(
                "tessera_pipeline_micro_batch_keys_total",
                "Different keys of each micro-batch, added up, by the order of samples.",
            ),
            &["order"],
        )
        .expect("a valid name");
        register(Box::new(keys.clone()));
        let eval = GaugeVec::new(
            Opts::new("tessera_eval_ratio", "Figures of the last evaluation, by metric."),
            &["metric"],
        )
        .expect("a valid name");
        register(Box::new(eval.clone()));
        let build = GaugeVec::new(
            Opts::new("tessera_build_info", "Always 1; the version is in the label."),
            &["version"],
        )
        .expect("a valid name");
        register(Box::new(build.clone()));
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1.0);
        Self {
            data,
            embedding,
            cache: None,
            ids: None,
            steps: counter("tessera_train_steps_total", "Training steps done by this process."),
            samples: counter("tessera_train_samples_total", "Samples trained on by this process."),
            epoch: int_gauge("tessera_train_epoch", "Epoch being trained, from 0."),
            loss: gauge("tessera_train_loss", "Mean loss over the last batch."),
            window_ne: gauge(
                "tessera_train_window_ne_ratio",
                "Normalised entropy over the last train.window_steps steps.",
            ),
            learning_rate_factor: gauge(
                "tessera_train_learning_rate_factor_ratio",
                "Factor of the schedule on all learning rates.",
            ),
            learning_rate: gauge(
                "tessera_train_learning_rate",
                "Learning rate of the dense optimizer at the last step.",
            ),
            step_seconds: histogram("tessera_train_step_seconds", "Duration of a whole step."),
            stage_seconds,
            keys: ["given", "clustered"].map(|order| keys.with_label_values(&[order])),
            imbalance: gauge(
                "tessera_train_imbalance_ratio",
                "Rows that ranks looked up in the last step, the most over the mean.",
            ),
            skipped_steps: counter(
                "tessera_train_skipped_steps_total",
                "Steps that changed nothing because a loss or gradient was not finite.",
            ),
            dense_resident_bytes: int_gauge(
                "tessera_dense_resident_bytes",
                "Memory of dense parameters, gradients and optimizer states.",
            ),
            checkpoint_seconds: histogram(
                "tessera_checkpoint_write_seconds",
                "Duration of writing a checkpoint.",
            ),
            checkpoint_bytes: int_gauge(
                "tessera_checkpoint_size_bytes",
                "Size of the last checkpoint.",
            ),
            checkpoint_linked_bytes: int_gauge(
                "tessera_checkpoint_linked_bytes",
                "Size of the files on SSD that the last checkpoint has links to.",
            ),
            checkpoint_step: int_gauge(
                "tessera_checkpoint_last_step",
                "Step of the last checkpoint.",
            ),
            checkpoint_failures: counter(
                "tessera_checkpoint_failures_total",
                "Checkpoints that could not be written.",
            ),
            eval_seconds: histogram("tessera_eval_seconds", "Duration of an evaluation."),
            eval,
        }
    }

    /// Shows what clustering saved of a batch's keys.
    pub fn clustered(&self, clustered: &Clustered) {
        self.keys[0].inc_by(clustered.keys_before);
        self.keys[1].inc_by(clustered.keys_after);
    }

    /// Shows the figures of an evaluation; a figure that is not defined is not shown.
    pub fn evaluated(&self, evaluation: &Evaluation) {
        let figures = [
            ("auc", evaluation.auc),
            ("grouped_auc", evaluation.grouped_auc),
            ("logloss", evaluation.logloss),
            ("ne", evaluation.ne),
            ("calibration", evaluation.calibration),
            ("mse", evaluation.mse),
        ];
        self.eval.reset();
        for (metric, value) in figures {
            if let Some(value) = value {
                self.eval.with_label_values(&[metric]).set(value);
            }
        }
    }
}
