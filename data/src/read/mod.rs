//! Readers: the files of a source, in order, as one stream of samples in constant memory.
//!
//! A format knows how to read one file ([`FileReader`]). The [`Chain`] puts files together, so
//! that batches run across their borders, and does what is the same for every format: it checks
//! dense values and transforms them.

mod criteo_fields;
pub(crate) mod criteo_tsv;
mod lines;
mod logs;
pub(crate) mod mlperf_npy;
mod npy;
mod parquet;
mod parquet_columns;
pub(crate) mod raw;
mod synthetic;

use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use self::logs::Logs;
use crate::batch::BatchBuilder;
use crate::{Batch, DataError, Format, OnNanDense, Result, Schema, SourceFile, SourceSpec};

/// What a reader has met so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadCounts {
    /// Bytes read from files, as stored (0 for generated data).
    pub bytes: u64,
    /// Dense values that were not finite and became 0 by policy.
    pub dense_replaced: u64,
}

/// A stream of samples.
///
/// Obligations of an implementor: samples come in the order of the source, whatever the sizes
/// asked for; `skip(n)` leaves the reader where `n` samples read would; memory in use does not
/// grow with the source; after an error the reader refuses to go on.
pub trait Reader: Send {
    /// The next `samples` samples; fewer only at the end of the stream, none after it.
    ///
    /// Errors: bad input, each naming its place; [`DataError::Stopped`] after an earlier error.
    fn read(&mut self, samples: usize) -> Result<Batch>;

    /// Passes over `samples` samples, by seeking where the format can, and returns how many there
    /// were: fewer only at the end of the stream.
    ///
    /// Errors: as [`Reader::read`], though what is passed over need not be looked at.
    fn skip(&mut self, samples: u64) -> Result<u64>;

    /// Samples of the whole stream, where the files tell without being read (`criteo-tsv` does
    /// not).
    fn total_samples(&self) -> Option<u64>;

    /// What was met so far.
    fn counts(&self) -> ReadCounts;
}

/// Opens a source at its first sample. Every file is opened and its layout looked at before the
/// first sample is read, so that a missing file or column is found at once.
///
/// Errors: a source description that cannot be used, a file that cannot be opened or is not laid
/// out as its format says, a column that is missing.
pub fn open(spec: &SourceSpec) -> Result<Box<dyn Reader>> {
    Ok(Box::new(Chain::open_cancellable(spec, Cancel::default())?))
}

/// Opens a source whose dense values are passed on even when they are not finite, for inspection.
pub(crate) fn open_unchecked(spec: &SourceSpec) -> Result<Box<dyn Reader>> {
    Ok(Box::new(Chain::open(spec, BadDense::Keep, Cancel::default())?))
}

/// Flags any of which, once set, stops reading.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cancel {
    flags: Vec<Arc<AtomicBool>>,
}

impl Cancel {
    /// Stops for `flag` too.
    pub(crate) fn add(&mut self, flag: Arc<AtomicBool>) {
        self.flags.push(flag);
    }

    /// Errors: [`DataError::Cancelled`] once a flag is set.
    fn check(&self) -> Result<()> {
        // Relaxed: nothing is read that the setter has written.
        match self.flags.iter().any(|flag| flag.load(Ordering::Relaxed)) {
            true => Err(DataError::Cancelled),
            false => Ok(()),
        }
    }
}

/// What the chain does with dense values that are not finite.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BadDense {
    Refuse,
    Zero,
    Keep,
}

/// Reads one file.
///
/// Obligations of an implementor: [`FileReader::read`] fills every column of the builder evenly
/// and gives each sample an origin (`file`, row from 0).
trait FileReader: Send {
    /// Adds the next `samples` samples to `out` and returns how many; fewer only at the end.
    fn read(&mut self, samples: usize, file: u32, out: &mut BatchBuilder) -> Result<usize>;

    /// Passes over `samples` samples and returns how many there were; fewer only at the end.
    fn skip(&mut self, samples: u64) -> Result<u64>;

    /// Bytes of the file read so far.
    fn bytes_read(&self) -> u64;
}

/// A file of a source that can be opened when its turn comes.
struct Unit {
    /// `None` for generated data.
    file: Option<SourceFile>,
    /// Samples, where known without reading.
    samples: Option<u64>,
    open: Box<dyn Fn() -> Result<Box<dyn FileReader>> + Send>,
}

/// The units of a source, one after the other.
pub(crate) struct Chain {
    units: Vec<Unit>,
    files: Arc<[SourceFile]>,
    schema: Schema,
    bad_dense: BadDense,
    /// Where dense values are transformed.
    logs: Option<Logs>,
    /// The unit that is being read or comes next.
    at: usize,
    current: Option<Box<dyn FileReader>>,
    counts: ReadCounts,
    failed: Option<String>,
    cancel: Cancel,
}

/// Samples for which room is made at once; a reader asked for more grows as samples come.
const RESERVE_SAMPLES_MAX: usize = 1 << 16;

/// Samples read at once, between looks at the cancel flags.
const PIECE_SAMPLES: usize = 8192;

/// Samples passed over at first between looks at the cancel flags. Where the format seeks, that
/// takes no time, and pieces double; where it decodes, they stay near [`SKIP_PIECE`].
const SKIP_SAMPLES: u64 = 8192;

/// Time that a piece of what is passed over should take.
const SKIP_PIECE: Duration = Duration::from_millis(20);

impl Chain {
    /// The source at its first sample, as [`open`] gives it, stopped by `cancel`.
    pub(crate) fn open_cancellable(spec: &SourceSpec, cancel: Cancel) -> Result<Self> {
        let bad_dense = match spec.on_nan_dense {
            OnNanDense::Error => BadDense::Refuse,
            OnNanDense::Zero => BadDense::Zero,
        };
        Self::open(spec, bad_dense, cancel)
    }

    /// Stops for `flag` too.
    pub(crate) fn cancel_with(&mut self, flag: Arc<AtomicBool>) {
        self.cancel.add(flag);
    }

    fn open(spec: &SourceSpec, bad_dense: BadDense, cancel: Cancel) -> Result<Self> {
        spec.validate()?;
        let mut units = Vec::new();
        if let Some(settings) = &spec.synthetic {
            units.push(synthetic::unit(&spec.schema, settings)?);
        }
        for path in &spec.files {
            match spec.format {
                Format::CriteoTsv => units.push(criteo_tsv::unit(path, spec)?),
                Format::MlperfNpy => units.extend(mlperf_npy::units(path, &spec.schema)?),
                Format::Raw => units.push(raw::unit(path, &spec.schema)?),
                Format::Parquet => units.push(parquet::unit(path, &spec.schema)?),
                // Validated: a synthetic source has no files.
                Format::Synthetic => {}
            }
        }
        if u32::try_from(units.len()).is_err() {
            return Err(DataError::spec(format!("{} files are more than 2^32", units.len())));
        }
        Ok(Self {
            files: units.iter().filter_map(|unit| unit.file.clone()).collect(),
            units,
            schema: spec.schema.clone(),
            bad_dense,
            logs: spec.transforms().then(Logs::new),
            at: 0,
            current: None,
            counts: ReadCounts::default(),
            failed: None,
            cancel,
        })
    }

    /// The reader of the present unit, opened if need be; `None` at the end of the stream.
    fn current(&mut self) -> Result<Option<&mut Box<dyn FileReader>>> {
        if self.current.is_none() {
            let Some(unit) = self.units.get(self.at) else { return Ok(None) };
            self.current = Some((unit.open)()?);
        }
        Ok(self.current.as_mut())
    }

    /// Leaves the present unit.
    fn advance(&mut self) {
        if let Some(reader) = self.current.take() {
            self.counts.bytes += reader.bytes_read();
        }
        self.at += 1;
    }

    fn read_on(&mut self, samples: usize) -> Result<Batch> {
        let room = samples.min(RESERVE_SAMPLES_MAX);
        let mut out = BatchBuilder::new(&self.schema, Arc::clone(&self.files), room);
        while out.samples() < samples {
            self.cancel.check()?;
            let before = out.samples();
            let wanted = (samples - before).min(PIECE_SAMPLES);
            // `Chain::open` checked that unit numbers fit.
            let file = self.at as u32;
            let Some(reader) = self.current()? else { break };
            let got = reader.read(wanted, file, &mut out)?;
            self.settle_dense(before, &mut out)?;
            if got < wanted {
                self.advance();
            }
        }
        out.finish()
    }

    /// Checks and transforms the dense values of the samples from `first` on.
    fn settle_dense(&mut self, first: usize, out: &mut BatchBuilder) -> Result<()> {
        let start = first * out.dense_features;
        if self.bad_dense != BadDense::Keep && !all_finite(&out.dense[start..]) {
            self.settle_not_finite(start, out)?;
        }
        if let Some(logs) = &mut self.logs {
            logs.log1p(&mut out.dense[start..]);
        }
        Ok(())
    }

    /// Refuses or replaces the dense values from `start` on that are not finite.
    fn settle_not_finite(&mut self, start: usize, out: &mut BatchBuilder) -> Result<()> {
        let width = out.dense_features;
        for at in start..out.dense.len() {
            let value = out.dense[at];
            if value.is_finite() {
                continue;
            }
            if self.bad_dense == BadDense::Refuse {
                return Err(DataError::NonFiniteDense {
                    place: out.place(at / width),
                    column: self.schema.dense[at % width].clone(),
                    value,
                });
            }
            out.dense[at] = 0.0;
            self.counts.dense_replaced += 1;
        }
        Ok(())
    }

    fn skip_on(&mut self, samples: u64) -> Result<u64> {
        let mut left = samples;
        let mut piece = SKIP_SAMPLES;
        while left > 0 {
            self.cancel.check()?;
            let known = self.units.get(self.at).and_then(|unit| unit.samples);
            if let (None, Some(whole)) = (&self.current, known)
                && whole <= left
            {
                left -= whole;
                self.advance();
                continue;
            }
            let Some(reader) = self.current()? else { break };
            let wanted = left.min(piece);
            let began = Instant::now();
            let got = reader.skip(wanted)?;
            if got < wanted {
                self.advance();
                piece = SKIP_SAMPLES;
            } else if began.elapsed() < SKIP_PIECE {
                piece = piece.saturating_mul(2);
            } else {
                piece = (piece / 2).max(SKIP_SAMPLES);
            }
            left -= got;
        }
        Ok(samples - left)
    }

    /// Runs `work` unless an earlier one failed, and remembers if it fails.
    fn guard<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        if let Some(earlier) = &self.failed {
            return Err(DataError::Stopped { earlier: earlier.clone() });
        }
        let result = work(self);
        if let Err(error) = &result {
            self.failed = Some(error.to_string());
        }
        result
    }
}

impl Reader for Chain {
    fn read(&mut self, samples: usize) -> Result<Batch> {
        self.guard(|chain| chain.read_on(samples))
    }

    fn skip(&mut self, samples: u64) -> Result<u64> {
        self.guard(|chain| chain.skip_on(samples))
    }

    fn total_samples(&self) -> Option<u64> {
        self.units.iter().map(|unit| unit.samples).sum()
    }

    fn counts(&self) -> ReadCounts {
        let open = self.current.as_ref().map_or(0, |reader| reader.bytes_read());
        ReadCounts { bytes: self.counts.bytes + open, ..self.counts }
    }
}

/// Whether no value is NaN or infinite. Looks at all of them, which vectors do at once.
fn all_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |finite, value| finite & value.is_finite())
}

/// Opens a file for reading; a directory or a missing file is an error that names it.
fn open_file(path: &Path) -> Result<(File, u64)> {
    let file = File::open(path).map_err(DataError::io("open", path))?;
    let metadata = file.metadata().map_err(DataError::io("look at", path))?;
    if metadata.is_dir() {
        return Err(DataError::bad_file(path, "this is a directory, a file is needed"));
    }
    Ok((file, metadata.len()))
}
