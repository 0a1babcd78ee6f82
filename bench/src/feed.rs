//! The training data of a configuration, read as training reads it: by a stream, ahead on a
//! thread of its own where the configuration says so. It never ends.

use tessera::config::Config;
use tessera::signals::Signals;
use tessera::source::{Batches, Next};
use tessera_data::{DataMetrics, Event, Position};

use crate::{BenchError, Result};

/// Batches without end.
pub struct Feed(Batches);

impl Feed {
    /// The data of `config` from its first sample, in batches of `batch`.
    ///
    /// Errors: data that cannot be opened.
    pub fn open(config: &Config, batch: usize, metrics: &DataMetrics) -> Result<Self> {
        let mut config = config.clone();
        config.data.batch_size = batch;
        config.train.epochs = u64::MAX;
        // Nobody asks a benchmark to end in order.
        let signals = Signals::default();
        let batches = Batches::train(&config, Position::default(), metrics, &signals)?;
        batches.map(Self).ok_or_else(ended)
    }

    /// The next batch or end of an epoch.
    ///
    /// Errors: bad data, by file and row.
    pub fn next_event(&mut self) -> Result<Event> {
        match self.0.next_event()? {
            Next::Event(event) => Ok(event),
            Next::End | Next::Stopped => Err(ended()),
        }
    }
}

fn ended() -> BenchError {
    BenchError::Step("the data has ended".into())
}
