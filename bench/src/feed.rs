//! The training data of a configuration, read as training reads it: by a stream, ahead on a
//! thread of its own where the configuration says so. It never ends.

use tessera::cli::Split;
use tessera::config::{Config, PipelineMode};
use tessera::source;
use tessera_data::{BatchStream, DataMetrics, Event, Position, Prefetch, Shuffle, StreamOptions};

use crate::{BenchError, Result};

/// Batches without end.
pub enum Feed {
    /// Read when they are asked for.
    Serial(Box<BatchStream>),
    /// Read ahead.
    Prefetch(Prefetch),
}

impl Feed {
    /// The data of `config` from its first sample, in batches of `batch`.
    ///
    /// Errors: data that cannot be opened.
    pub fn open(config: &Config, batch: usize, metrics: &DataMetrics) -> Result<Self> {
        let window_samples = config.data.shuffle_window;
        let options = StreamOptions {
            batch_size: batch,
            epochs: None,
            shuffle: (window_samples > 1).then_some(Shuffle { window_samples, seed: config.seed }),
            start: Position::default(),
        };
        let spec = source::required(config, Split::Train)?;
        let stream = BatchStream::new(spec, options, metrics.clone())?;
        Ok(match config.pipeline.mode {
            PipelineMode::Serial => Self::Serial(Box::new(stream)),
            PipelineMode::Prefetch => {
                Self::Prefetch(Prefetch::new(stream, config.pipeline.depth, metrics.clone())?)
            }
        })
    }

    /// The next batch or end of an epoch.
    ///
    /// Errors: bad data, by file and row.
    pub fn next_event(&mut self) -> Result<Event> {
        let event = match self {
            Self::Serial(stream) => stream.next_event()?,
            Self::Prefetch(prefetch) => prefetch.next_event()?,
        };
        event.ok_or_else(|| BenchError::Step("the data has ended".into()))
    }
}
