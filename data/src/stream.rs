//! Epochs of batches over a source, from any position, shuffled inside windows when asked.
//!
//! Without a shuffle, batch k of an epoch is the samples kB to (k+1)B of the source. With one, the
//! source is cut into windows of W consecutive samples, and window w of epoch e is put in an order
//! that depends on (seed, e, w) alone; batches are then cut from the sequence of windows. Either
//! way the sequence of samples of an epoch is fixed, so a position (epoch, samples gone by) is all
//! that a checkpoint needs, and the batch size may change at a resume.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use serde::{Deserialize, Serialize};

use crate::batch::{BatchBuilder, SourceFile};
use crate::hash::{key, permutation};
use crate::read::{Cancel, Chain, ReadCounts};
use crate::{Batch, DataError, DataMetrics, Reader, Result, SourceSpec, open};

/// Samples of a chunk of a window.
const CHUNK_SAMPLES: usize = 8192;

/// Where a stream is: everything before has been handed out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// Epoch, from 0.
    pub epoch: u64,
    /// Samples of the epoch that have gone by.
    pub sample: u64,
}

/// Reordering inside windows of consecutive samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shuffle {
    /// Samples of a window; it is held in memory.
    pub window_samples: u64,
    /// Seed of the orders.
    pub seed: u64,
}

/// How a source is streamed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamOptions {
    /// Samples of a batch; the last batch of an epoch may have fewer.
    pub batch_size: usize,
    /// Epochs to go through; `None` never ends.
    pub epochs: Option<u64>,
    /// Reordering, if any.
    pub shuffle: Option<Shuffle>,
    /// Where to begin.
    pub start: Position,
}

impl StreamOptions {
    /// One epoch in order from the first sample.
    #[must_use]
    pub fn one_epoch(batch_size: usize) -> Self {
        Self { batch_size, epochs: Some(1), shuffle: None, start: Position::default() }
    }
}

/// What a stream hands out.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The next samples of an epoch, at least one.
    Batch {
        /// The samples.
        batch: Batch,
        /// Epoch, from 0.
        epoch: u64,
        /// The position after them: a stream started there gives exactly the events that follow.
        after: Position,
    },
    /// All samples of an epoch have been handed out.
    EpochEnd {
        /// Epoch, from 0.
        epoch: u64,
        /// The position after it.
        after: Position,
    },
}

/// Epochs of batches over a source.
pub struct BatchStream {
    spec: SourceSpec,
    options: StreamOptions,
    metrics: DataMetrics,
    /// Open while an epoch is under way.
    source: Option<Source>,
    position: Position,
    cancel: Cancel,
    failed: Option<String>,
}

struct Source {
    reader: Chain,
    files: Arc<[SourceFile]>,
    /// What the metrics have been told of.
    counted: ReadCounts,
    window: Option<Window>,
}

/// Samples of a window, in chunks of [`CHUNK_SAMPLES`], and the order to give them out in.
struct Window {
    chunks: Vec<Batch>,
    order: Vec<usize>,
    at: usize,
}

impl BatchStream {
    /// Opens the source and goes to the start position.
    ///
    /// Errors: as [`open`]; a batch size or window of 0; [`DataError::PositionBeyondData`].
    pub fn new(spec: SourceSpec, options: StreamOptions, metrics: DataMetrics) -> Result<Self> {
        Self::start(spec, options, metrics, Cancel::default())
    }

    /// As [`BatchStream::new`], where setting `flag` also ends the way to the start position (in
    /// compressed files all that comes before has to be decoded). The stream then keeps the flag,
    /// as by [`BatchStream::cancel_with`].
    ///
    /// Errors: as [`BatchStream::new`]; [`DataError::Cancelled`] once the flag is set.
    pub fn new_cancellable(
        spec: SourceSpec,
        options: StreamOptions,
        metrics: DataMetrics,
        flag: Arc<AtomicBool>,
    ) -> Result<Self> {
        let mut cancel = Cancel::default();
        cancel.add(flag);
        Self::start(spec, options, metrics, cancel)
    }

    fn start(
        spec: SourceSpec,
        options: StreamOptions,
        metrics: DataMetrics,
        cancel: Cancel,
    ) -> Result<Self> {
        if options.batch_size == 0 {
            return Err(DataError::spec("a batch size of 0 gives no batches; give at least 1"));
        }
        if options.shuffle.is_some_and(|shuffle| shuffle.window_samples == 0) {
            return Err(DataError::spec(
                "a shuffle window of 0 samples holds nothing; leave it out",
            ));
        }
        let position = options.start;
        let mut stream =
            Self { spec, options, metrics, source: None, position, cancel, failed: None };
        if stream.is_over() {
            // Even a stream with nothing left to give refuses a source that cannot be opened.
            open(&stream.spec)?;
        } else {
            stream.source = Some(stream.open_at(position)?);
        }
        Ok(stream)
    }

    /// Makes reading stop with [`DataError::Cancelled`] once `flag` is set, within some thousands
    /// of samples: in the middle of a large batch, of a shuffle window, or of passing over samples.
    /// Flags add up: any of those given stops the stream. A cancelled stream is over; a new one
    /// goes on from the position after the last batch that it gave.
    pub fn cancel_with(&mut self, flag: Arc<AtomicBool>) {
        if let Some(source) = &mut self.source {
            source.reader.cancel_with(Arc::clone(&flag));
        }
        self.cancel.add(flag);
    }

    /// Where the stream is.
    #[must_use]
    pub fn position(&self) -> Position {
        self.position
    }

    /// Samples of an epoch, where the files tell without being read.
    #[must_use]
    pub fn epoch_samples(&self) -> Option<u64> {
        self.source.as_ref().and_then(|source| source.reader.total_samples())
    }

    /// The next event; `None` after the last epoch.
    ///
    /// Errors: bad input; [`DataError::NoSamples`]; [`DataError::Cancelled`];
    /// [`DataError::Stopped`] after an earlier error.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        if let Some(earlier) = &self.failed {
            return Err(DataError::Stopped { earlier: earlier.clone() });
        }
        let result = self.step();
        if let Err(error) = &result {
            self.failed = Some(error.to_string());
            if matches!(error, DataError::NonFiniteDense { .. }) {
                self.metrics.dense_not_finite("error").inc();
            }
        }
        result
    }

    fn is_over(&self) -> bool {
        self.options.epochs.is_some_and(|epochs| self.position.epoch >= epochs)
    }

    fn step(&mut self) -> Result<Option<Event>> {
        if self.is_over() {
            return Ok(None);
        }
        let epoch = self.position.epoch;
        let mut source = match self.source.take() {
            Some(source) => source,
            None => self.open_at(self.position)?,
        };
        let size = self.options.batch_size;
        let batch = match self.options.shuffle {
            None => source.reader.read(size)?,
            Some(shuffle) => self.shuffled(shuffle, &mut source, size)?,
        };
        source.report(&self.metrics);
        if batch.samples() == 0 {
            if self.position.sample == 0 {
                return Err(DataError::NoSamples { files: self.spec.describe() });
            }
            self.position = Position { epoch: epoch + 1, sample: 0 };
            return Ok(Some(Event::EpochEnd { epoch, after: self.position }));
        }
        self.source = Some(source);
        self.position.sample += batch.samples() as u64;
        self.metrics.samples.inc_by(batch.samples() as u64);
        Ok(Some(Event::Batch { batch, epoch, after: self.position }))
    }

    /// Opens the source so that the next sample is that of `position`.
    fn open_at(&self, position: Position) -> Result<Source> {
        let mut reader = Chain::open_cancellable(&self.spec, self.cancel.clone())?;
        let files = reader.read(0)?.files();
        let beyond = |samples| DataError::PositionBeyondData {
            epoch: position.epoch,
            sample: position.sample,
            samples,
        };
        let inside = self.options.shuffle.map_or(0, |s| position.sample % s.window_samples);
        let before = position.sample - inside;
        let skipped = reader.skip(before)?;
        if skipped < before {
            return Err(beyond(skipped));
        }
        let mut source = Source { reader, files, counted: ReadCounts::default(), window: None };
        if let Some(shuffle) = self.options.shuffle
            && inside > 0
        {
            let mut window = self.window(shuffle, &mut source, before)?;
            if (window.order.len() as u64) < inside {
                return Err(beyond(before + window.order.len() as u64));
            }
            window.at = inside as usize;
            source.window = Some(window);
        }
        Ok(source)
    }

    /// The next `size` samples of the sequence of shuffled windows.
    fn shuffled(&self, shuffle: Shuffle, source: &mut Source, size: usize) -> Result<Batch> {
        let room = size.min(CHUNK_SAMPLES);
        let mut out = BatchBuilder::new(&self.spec.schema, Arc::clone(&source.files), room);
        while out.samples() < size {
            let mut window = match source.window.take() {
                Some(window) if window.at < window.order.len() => window,
                _ => {
                    let first = self.position.sample + out.samples() as u64;
                    self.window(shuffle, source, first)?
                }
            };
            let take = (window.order.len() - window.at).min(size - out.samples());
            if take == 0 {
                break;
            }
            let order = &window.order[window.at..window.at + take];
            let rows: Vec<(&Batch, usize)> = order
                .iter()
                .map(|&i| (&window.chunks[i / CHUNK_SAMPLES], i % CHUNK_SAMPLES))
                .collect();
            out.append_rows(&rows);
            window.at += take;
            source.window = Some(window);
        }
        out.finish()
    }

    /// Reads the window whose first sample is `first`, which is the reader's next.
    fn window(&self, shuffle: Shuffle, source: &mut Source, first: u64) -> Result<Window> {
        let mut chunks = Vec::new();
        let mut samples = 0;
        while samples < shuffle.window_samples {
            let wanted = (shuffle.window_samples - samples).min(CHUNK_SAMPLES as u64) as usize;
            let chunk = source.reader.read(wanted)?;
            let got = chunk.samples();
            samples += got as u64;
            chunks.push(chunk);
            if got < wanted {
                break;
            }
        }
        let index = first / shuffle.window_samples;
        let order = permutation(samples as usize, key(&[shuffle.seed, self.position.epoch, index]));
        Ok(Window { chunks, order, at: 0 })
    }
}

impl Source {
    /// Tells the metrics what the reader has met since the last time.
    fn report(&mut self, metrics: &DataMetrics) {
        let now = self.reader.counts();
        metrics.bytes.inc_by(now.bytes - self.counted.bytes);
        let replaced = now.dense_replaced - self.counted.dense_replaced;
        metrics.dense_not_finite("zero").inc_by(replaced);
        self.counted = now;
    }
}
