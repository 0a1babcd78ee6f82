//! From a configuration to the data it names.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use tessera_data::{
    BatchStream, DataError, DataMetrics, Event, FeatureSpec, Position, Prefetch, Schema, Shuffle,
    SourceSpec, StreamOptions, Waited, ceiling_auc,
};
use tessera_embedding::TableKind;

use crate::cli::Split;
use crate::config::{Config, PipelineConfig, PipelineMode};
use crate::signals::Signals;
use crate::{Error, Result};

/// Batches read ahead at the most, where the configuration says nothing.
const READ_AHEAD: NonZeroUsize = NonZeroUsize::new(4).unwrap();

/// Samples that the ceiling AUC of synthetic data is computed over, at the most.
const CEILING_SAMPLES: u64 = 100_000;

/// The columns that a configuration reads.
#[must_use]
pub fn schema(config: &Config) -> Schema {
    let features = config.tables.iter().flat_map(|table| {
        table.features.iter().zip(&table.hots).map(|(name, &hots)| FeatureSpec {
            name: name.clone(),
            rows: table.rows,
            raw_ids: table.kind != TableKind::Static,
            weighted: table.weighted,
            hots,
        })
    });
    Schema {
        dense: config.data.dense.clone(),
        features: features.collect(),
        label: config.data.label.clone(),
        sample_weight: config.data.sample_weight.clone(),
        group: config.data.group.clone(),
    }
}

/// The source of `split`; `None` when the configuration has no such data.
#[must_use]
pub fn spec(config: &Config, split: Split) -> Option<SourceSpec> {
    let data = &config.data;
    let mut spec = if let Some(synthetic) = &data.synthetic {
        let range = match split {
            Split::Train => synthetic.spec.clone(),
            Split::Eval => synthetic.spec.following(synthetic.eval_samples),
        };
        if range.samples == 0 {
            return None;
        }
        SourceSpec::synthetic(schema(config), range)
    } else {
        let files = match split {
            Split::Train => &data.train,
            Split::Eval => &data.eval,
        };
        if files.is_empty() {
            return None;
        }
        SourceSpec::files(data.format, files.clone(), schema(config))
    };
    spec.dense_transform = data.dense_transform;
    spec.on_nan_dense = data.on_nan_dense;
    Some(spec)
}

/// The source of `split`, which a command cannot do without.
///
/// Errors: [`Error::Usage`] when the configuration names none.
pub fn required(config: &Config, split: Split) -> Result<SourceSpec> {
    spec(config, split).ok_or_else(|| {
        let key = match (split, &config.data.synthetic) {
            (Split::Train, _) => "data.train",
            (Split::Eval, None) => "data.eval",
            (Split::Eval, Some(_)) => "data.synthetic.eval_samples",
        };
        Error::Usage(format!("the configuration has no data for this: set {key}"))
    })
}

/// Expected AUC of the teacher's own probabilities on the evaluation samples of synthetic data.
///
/// Errors: what the source says.
pub fn ceiling(config: &Config) -> Result<Option<f64>> {
    let split = if config.data.synthetic.as_ref().is_some_and(|s| s.eval_samples > 0) {
        Split::Eval
    } else {
        Split::Train
    };
    match spec(config, split).and_then(|spec| Some((spec.schema, spec.synthetic?))) {
        None => Ok(None),
        Some((schema, synthetic)) => {
            let first = synthetic.first_sample;
            let samples = synthetic.samples.min(CEILING_SAMPLES);
            Ok(ceiling_auc(&schema, &synthetic, first..first + samples)?)
        }
    }
}

/// Batches in the order of the data. A signal interrupts reading and waiting.
pub struct Batches {
    reading: Reading,
    epoch_samples: Option<u64>,
    signals: Signals,
    /// Epoch under way.
    epoch: u64,
    epochs: u64,
    /// Whether others have the samples if these files have none.
    is_part: bool,
}

/// The part of the training data that one of several ranks reads for itself.
#[derive(Clone, Debug)]
pub struct Part {
    /// Its files, which may be none.
    pub files: Vec<PathBuf>,
    /// Its samples of a batch.
    pub batch_size: usize,
}

enum Reading {
    /// By the thread that asks.
    Serial(Box<BatchStream>),
    /// Ahead, by a thread of its own.
    Prefetch(Prefetch),
    /// There are no samples: epochs end as they begin.
    Nothing,
}

/// What comes next.
pub enum Next {
    /// A batch, or the end of an epoch.
    Event(Event),
    /// Nothing: the last epoch is over.
    End,
    /// Nothing yet: a signal came first.
    Stopped,
}

impl Batches {
    /// The training batches of a configuration from `start` on; `None` when a signal came on the
    /// way there.
    ///
    /// Errors: data that cannot be opened.
    pub fn train(
        config: &Config,
        start: Position,
        metrics: &DataMetrics,
        signals: &Signals,
    ) -> Result<Option<Self>> {
        let options = training(config, config.data.batch_size, start);
        Self::open(required(config, Split::Train)?, options, config.pipeline, metrics, signals)
    }

    /// As [`Batches::train`], of one rank's part of the files. Where it has no samples, each epoch
    /// is over at once.
    ///
    /// Errors: data that cannot be opened.
    pub fn train_part(
        config: &Config,
        part: Part,
        start: Position,
        metrics: &DataMetrics,
        signals: &Signals,
    ) -> Result<Option<Self>> {
        let options = training(config, part.batch_size, start);
        if part.files.is_empty() {
            return Ok(Some(Self {
                reading: Reading::Nothing,
                epoch_samples: Some(0),
                signals: signals.clone(),
                epoch: start.epoch,
                epochs: config.train.epochs,
                is_part: true,
            }));
        }
        let spec = SourceSpec { files: part.files, ..required(config, Split::Train)? };
        let batches = Self::open(spec, options, config.pipeline, metrics, signals)?;
        Ok(batches.map(|batches| Self { is_part: true, ..batches }))
    }

    /// One pass over the evaluation batches; `None` when a signal came.
    ///
    /// Errors: data that cannot be opened.
    pub fn eval(
        config: &Config,
        spec: SourceSpec,
        metrics: &DataMetrics,
        signals: &Signals,
    ) -> Result<Option<Self>> {
        let options = StreamOptions::one_epoch(config.data.eval_batch_size);
        // An evaluation is no training, but bad input is bad input.
        let metrics = metrics.bad_input_only();
        Self::open(spec, options, config.pipeline, &metrics, signals)
    }

    fn open(
        spec: SourceSpec,
        options: StreamOptions,
        pipeline: PipelineConfig,
        metrics: &DataMetrics,
        signals: &Signals,
    ) -> Result<Option<Self>> {
        let stop = signals.stop();
        let stream = match BatchStream::new_cancellable(spec, options, metrics.clone(), stop) {
            Err(DataError::Cancelled) => return Ok(None),
            opened => opened?,
        };
        let epoch_samples = stream.epoch_samples();
        let reading = match pipeline.mode {
            PipelineMode::Prefetch | PipelineMode::Nested => {
                let depth = pipeline.depth.unwrap_or(READ_AHEAD);
                Reading::Prefetch(Prefetch::new(stream, depth, metrics.clone())?)
            }
            PipelineMode::Serial => Reading::Serial(Box::new(stream)),
        };
        Ok(Some(Self {
            reading,
            epoch_samples,
            signals: signals.clone(),
            epoch: options.start.epoch,
            epochs: options.epochs.unwrap_or(u64::MAX),
            is_part: false,
        }))
    }

    /// Samples of an epoch, if the data tells without being read.
    #[must_use]
    pub fn epoch_samples(&self) -> Option<u64> {
        self.epoch_samples
    }

    /// The next batch or end of an epoch.
    ///
    /// Errors: bad data, by file and row.
    pub fn next_event(&mut self) -> Result<Next> {
        let waited = match &mut self.reading {
            Reading::Serial(stream) => {
                stream.next_event().map(|event| event.map_or(Waited::End, Waited::Event))
            }
            Reading::Prefetch(prefetch) => {
                prefetch.next_event_unless(|| self.signals.received().is_some())
            }
            Reading::Nothing if self.epoch < self.epochs => {
                let (epoch, after) = (self.epoch, Position { epoch: self.epoch + 1, sample: 0 });
                Ok(Waited::Event(Event::EpochEnd { epoch, after }))
            }
            Reading::Nothing => Ok(Waited::End),
        };
        if let Ok(Waited::Event(Event::EpochEnd { after, .. })) = &waited {
            self.epoch = after.epoch;
        }
        Ok(match waited {
            Err(DataError::NoSamples { .. }) if self.is_part => {
                self.reading = Reading::Nothing;
                return self.next_event();
            }
            Err(DataError::Cancelled) | Ok(Waited::Stopped) => Next::Stopped,
            Ok(Waited::Event(event)) => Next::Event(event),
            Ok(Waited::End) => Next::End,
            Err(error) => return Err(error.into()),
        })
    }
}

/// How a configuration's training data are streamed.
fn training(config: &Config, batch_size: usize, start: Position) -> StreamOptions {
    StreamOptions {
        batch_size,
        epochs: Some(config.train.epochs),
        shuffle: (config.data.shuffle_window > 1)
            .then_some(Shuffle { window_samples: config.data.shuffle_window, seed: config.seed }),
        start,
    }
}
