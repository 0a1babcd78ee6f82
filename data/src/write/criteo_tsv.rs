//! Writes `criteo-tsv`: columns that the schema does not name are left empty.

use std::io::Write;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;

use super::{Output, Writer, check_shape, inexpressible};
use crate::read::criteo_tsv::{COLUMNS, category_column, column_name, integer_column};
use crate::{Batch, DataError, FeatureSpec, Format, Result, Schema};

const FORMAT: Format = Format::CriteoTsv;

/// What ids stand for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ids {
    /// Numbers; a negative one cannot be written.
    NotNegative,
    /// The 64 bits of a hexadecimal value.
    Bits,
}

/// What a column of the file is filled from.
#[derive(Clone, Copy)]
enum From {
    Nothing,
    Dense(usize),
    Feature(usize),
}

enum Sink {
    Plain(Output),
    Gzip(GzEncoder<Output>),
    Zstd(zstd::Encoder<'static, Output>),
}

/// Writes lines.
pub(super) struct CriteoWriter {
    path: PathBuf,
    sink: Sink,
    schema: Schema,
    columns: [From; COLUMNS],
    ids: Ids,
    text: Vec<u8>,
}

impl CriteoWriter {
    pub(super) fn create(path: &Path, schema: &Schema, ids: Ids) -> Result<Self> {
        let mut columns = [From::Nothing; COLUMNS];
        let unknown = |name: &str| {
            DataError::spec(format!(
                "criteo-tsv has no column `{name}`; it has i1 to i13 and c1 to c26"
            ))
        };
        for (i, name) in schema.dense.iter().enumerate() {
            columns[integer_column(name).ok_or_else(|| unknown(name))?] = From::Dense(i);
        }
        for (i, feature) in schema.features.iter().enumerate() {
            let column = category_column(&feature.name).ok_or_else(|| unknown(&feature.name))?;
            columns[column] = From::Feature(i);
        }
        let output = Output::create(path)?;
        let sink = match path.extension().and_then(|extension| extension.to_str()) {
            Some("gz") => Sink::Gzip(GzEncoder::new(output, Compression::default())),
            Some("zst") => Sink::Zstd(
                zstd::Encoder::new(output, zstd::DEFAULT_COMPRESSION_LEVEL)
                    .map_err(DataError::io("compress", path))?,
            ),
            _ => Sink::Plain(output),
        };
        Ok(Self {
            path: path.to_owned(),
            sink,
            schema: schema.clone(),
            columns,
            ids,
            text: Vec::new(),
        })
    }

    /// Adds the line of a sample to the text.
    fn add_line(&mut self, batch: &Batch, sample: usize) -> Result<()> {
        let label = batch.labels()[sample];
        if !label.is_finite() {
            let reason = format!("label {label} is not finite");
            return Err(inexpressible(FORMAT, batch, sample, &self.schema.label, reason));
        }
        push(&mut self.text, format_args!("{label}"));
        for (number, from) in self.columns.iter().enumerate().skip(1) {
            self.text.push(b'\t');
            let fail = |reason: String| {
                Err(inexpressible(FORMAT, batch, sample, &column_name(number), reason))
            };
            match *from {
                From::Nothing => {}
                From::Dense(i) => {
                    let value = batch.dense_row(sample)[i];
                    // 2^63 and above do not fit the 64-bit integers that the format has.
                    if value.fract() != 0.0 || !(-9.3e18..9.2e18).contains(&value) {
                        return fail(format!("dense value {value} is not an integer of 64 bits"));
                    }
                    push(&mut self.text, format_args!("{}", value as i64));
                }
                From::Feature(i) => match *batch.features()[i].bag(sample) {
                    [] => {}
                    [id] if self.schema.features[i].raw_ids && self.ids == Ids::NotNegative => {
                        if id.0 != FeatureSpec::MISSING {
                            push(&mut self.text, format_args!("{:08x}", id.0));
                        }
                    }
                    [id] if id.0 < 0 && self.ids == Ids::NotNegative => {
                        return fail(format!("id {id} is negative"));
                    }
                    [id] => push(&mut self.text, format_args!("{:08x}", id.0)),
                    ref bag => {
                        return fail(format!("a bag of {} ids; a column holds one", bag.len()));
                    }
                },
            }
        }
        self.text.push(b'\n');
        Ok(())
    }
}

/// Adds formatted text; writing to memory cannot fail.
fn push(text: &mut Vec<u8>, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("writing to a vector does not fail");
}

impl Writer for CriteoWriter {
    fn write(&mut self, batch: &Batch) -> Result<()> {
        check_shape(batch, &self.schema)?;
        self.text.clear();
        for sample in 0..batch.samples() {
            self.add_line(batch, sample)?;
        }
        let sink: &mut dyn Write = match &mut self.sink {
            Sink::Plain(output) => output,
            Sink::Gzip(encoder) => encoder,
            Sink::Zstd(encoder) => encoder,
        };
        sink.write_all(&self.text).map_err(DataError::io("write", &self.path))
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let output = match self.sink {
            Sink::Plain(output) => Ok(output),
            Sink::Gzip(encoder) => encoder.finish(),
            Sink::Zstd(encoder) => encoder.finish(),
        };
        output.map_err(DataError::io("write", &self.path))?.finish()
    }
}
