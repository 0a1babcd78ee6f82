//! `tessera predict`: a score for every sample of the evaluation data, in a Parquet file.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, RecordBatch, UInt64Array};
use parquet::arrow::ArrowWriter;
use parquet::errors::ParquetError;
use tessera_data::{Batch, Event};
use tessera_dense::sigmoid;

use crate::cli::{self, Split};
use crate::signals::Signals;
use crate::source::{self, Batches, Next};
use crate::{Error, Result, console, evaluate};

/// Runs `tessera predict`.
///
/// Errors: as `tessera eval`, or a failed write; no file is left then.
pub fn run(args: &cli::Predict) -> Result<()> {
    let (config, mut model) = evaluate::load(&args.config, &args.checkpoint)?;
    let spec = source::required(&config, Split::Eval)?;
    // Half a file is worth nothing, so that a signal may end the process at once.
    let signals = Signals::default();
    let metrics = evaluate::unwatched(&model)?;
    let Some(mut batches) = Batches::eval(&config, spec, &metrics.data, &signals)? else {
        return Ok(());
    };
    let mut writer = Scores::create(&args.out)?;
    while let Next::Event(event) = batches.next_event()? {
        if let Event::Batch { batch, .. } = event {
            let logits = model.predict(&batch, &metrics)?;
            writer.write(&batch, logits)?;
        }
    }
    let samples = writer.finish()?;
    console::tell(format_args!("wrote {samples} scores to {}", args.out.display()));
    Ok(())
}

/// A Parquet file of scores, written beside its target until it is whole.
struct Scores<'p> {
    out: &'p Path,
    part: std::path::PathBuf,
    /// Made with the first batch, whose columns give the schema.
    writer: Option<ArrowWriter<File>>,
    samples: u64,
}

impl<'p> Scores<'p> {
    fn create(out: &'p Path) -> Result<Self> {
        let mut part = out.as_os_str().to_owned();
        part.push(".part");
        Ok(Self { out, part: part.into(), writer: None, samples: 0 })
    }

    fn failed(&self) -> impl Fn(ParquetError) -> Error + use<> {
        let path = self.out.to_path_buf();
        move |error| Error::Write { path: path.clone(), source: std::io::Error::other(error) }
    }

    /// Adds `sample` (number in the stream, from 0), `label` and `score` (a probability).
    fn write(&mut self, batch: &Batch, logits: Vec<f32>) -> Result<()> {
        let first = self.samples;
        self.samples += batch.samples() as u64;
        let sample = UInt64Array::from_iter_values(first..self.samples);
        let label = Float32Array::from(batch.labels().to_vec());
        let score = Float32Array::from_iter_values(logits.into_iter().map(sigmoid));
        let columns: [(&str, ArrayRef); 3] =
            [("sample", Arc::new(sample)), ("label", Arc::new(label)), ("score", Arc::new(score))];
        let failed = self.failed();
        let rows = RecordBatch::try_from_iter(columns).map_err(|error| failed(error.into()))?;
        let writer = match &mut self.writer {
            Some(writer) => writer,
            empty => {
                let file = File::create(&self.part)
                    .map_err(|source| Error::Write { path: self.out.into(), source })?;
                empty.insert(ArrowWriter::try_new(file, rows.schema(), None).map_err(&failed)?)
            }
        };
        writer.write(&rows).map_err(failed)
    }

    fn finish(mut self) -> Result<u64> {
        let failed = self.failed();
        if let Some(writer) = self.writer.take() {
            writer.close().map_err(failed)?;
            std::fs::rename(&self.part, self.out)
                .map_err(|source| Error::Write { path: self.out.into(), source })?;
        }
        Ok(self.samples)
    }
}

impl Drop for Scores<'_> {
    fn drop(&mut self) {
        // Whole files have been renamed; what is left here is half a file, or nothing.
        let _ = std::fs::remove_file(&self.part);
    }
}
