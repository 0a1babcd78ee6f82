//! Writers: batches into files, in constant memory; and conversion between formats.
//!
//! A file takes its name only when it is finished: until then it is `<name>.part`, which is
//! removed if the writer is dropped. An existing file is never overwritten. What a format cannot
//! express is an error that names the sample, the column and the reason, never a rounded value.

mod criteo_tsv;
mod mlperf_npy;
mod parquet;
mod raw;

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::{Batch, DataError, Format, Result, Schema, SourceSpec, Values, open};

/// Bytes gathered before they are written.
const BUFFER_BYTES: usize = 1 << 18;

/// Takes the batches of a data set, one after the other.
///
/// Obligations of an implementor: memory in use does not grow with the data set; nothing stands
/// under the final name before [`Writer::finish`] has returned.
pub trait Writer {
    /// Adds the samples of a batch of the schema that the writer was made for.
    ///
    /// Errors: [`DataError::Inexpressible`]; [`DataError::Batch`] for a batch of another schema;
    /// [`DataError::Io`].
    fn write(&mut self, batch: &Batch) -> Result<()>;

    /// Completes the files and gives them their names.
    ///
    /// Errors: [`DataError::Io`].
    fn finish(self: Box<Self>) -> Result<()>;
}

/// A writer of `format` for samples of `schema`.
///
/// `path` is a file (`criteo-tsv`: compressed if it ends in `.gz` or `.zst`) or, for `mlperf-npy`,
/// a directory, which gets the files of day 0.
///
/// Errors: [`DataError::Spec`] for what the format has no place for (and for `synthetic`, which
/// is not stored); [`DataError::BadFile`] when the path exists; [`DataError::Io`].
pub fn create(format: Format, path: &Path, schema: &Schema) -> Result<Box<dyn Writer>> {
    create_with(format, path, schema, criteo_tsv::Ids::NotNegative)
}

fn create_with(
    format: Format,
    path: &Path,
    schema: &Schema,
    ids: criteo_tsv::Ids,
) -> Result<Box<dyn Writer>> {
    schema.validate(format)?;
    if format != Format::Parquet {
        schema.refuse_unless_parquet(format)?;
    }
    Ok(match format {
        Format::CriteoTsv => Box::new(criteo_tsv::CriteoWriter::create(path, schema, ids)?),
        Format::MlperfNpy => Box::new(mlperf_npy::MlperfWriter::create(path, schema)?),
        Format::Raw => Box::new(raw::RawWriter::create(path, schema)?),
        Format::Parquet => Box::new(parquet::ParquetWriter::create(path, schema)?),
        Format::Synthetic => {
            return Err(DataError::spec(
                "format synthetic is made from a seed, not stored; write another format",
            ));
        }
    })
}

/// Samples moved at once by [`convert`].
const CONVERT_SAMPLES: usize = 4096;

/// Writes all samples of `source` to `path` in `format` and returns how many there were.
/// `progress` is told the number so far after every few thousand.
///
/// Ids are those that training sees, dense values those before the transform (`criteo-tsv`: a
/// missing integer is 0, negatives stay). A model trains on the copy as on the source if the
/// copy's `dense_transform` is `"log1p"` where the source was transformed. From `criteo-tsv` to
/// `criteo-tsv` the categories keep their own values.
///
/// Errors: as [`open`], [`create`], reading and writing; [`DataError::NoSamples`].
pub fn convert(
    source: &SourceSpec,
    format: Format,
    path: &Path,
    mut progress: impl FnMut(u64),
) -> Result<u64> {
    let verbatim = source.format == Format::CriteoTsv && format == Format::CriteoTsv;
    let (values, ids) = match verbatim {
        true => (Values::Verbatim, criteo_tsv::Ids::Bits),
        false => (Values::Untransformed, criteo_tsv::Ids::NotNegative),
    };
    let mut reader = open(&SourceSpec { values, ..source.clone() })?;
    let mut writer = create_with(format, path, &source.schema, ids)?;
    let mut samples = 0;
    loop {
        let batch = reader.read(CONVERT_SAMPLES)?;
        if batch.samples() == 0 {
            break;
        }
        writer.write(&batch)?;
        samples += batch.samples() as u64;
        progress(samples);
    }
    if samples == 0 {
        return Err(DataError::NoSamples { files: source.describe() });
    }
    writer.finish()?;
    Ok(samples)
}

/// Refuses a batch whose shape is not that of the schema.
fn check_shape(batch: &Batch, schema: &Schema) -> Result<()> {
    let fail = |reason: String| Err(DataError::Batch { reason });
    if batch.dense_features() != schema.dense.len() {
        return fail(format!(
            "{} dense values a sample for {} dense columns",
            batch.dense_features(),
            schema.dense.len()
        ));
    }
    if batch.features().len() != schema.features.len() {
        return fail(format!(
            "{} features for {} in the schema",
            batch.features().len(),
            schema.features.len()
        ));
    }
    for (jagged, feature) in batch.features().iter().zip(&schema.features) {
        if jagged.weights().is_some() != feature.weighted {
            return fail(format!(
                "feature {}: weights where none are named, or none where they are",
                feature.name
            ));
        }
    }
    if batch.sample_weights().is_some() != schema.sample_weight.is_some() {
        return fail("sample weights where no column is named, or none where one is".to_owned());
    }
    if batch.groups().is_some() != schema.group.is_some() {
        return fail("groups where no column is named, or none where one is".to_owned());
    }
    Ok(())
}

/// An error about a value of sample `sample` of `batch`.
fn inexpressible(
    format: Format,
    batch: &Batch,
    sample: usize,
    column: &str,
    reason: impl Into<String>,
) -> DataError {
    DataError::Inexpressible {
        format,
        place: batch.place(sample),
        column: column.to_owned(),
        reason: reason.into(),
    }
}

/// The label of a sample as an i32, for formats that hold it so.
fn label_i32(format: Format, batch: &Batch, sample: usize, schema: &Schema) -> Result<i32> {
    let label = batch.labels()[sample];
    let fits = label.fract() == 0.0 && (-2_147_483_648.0..2_147_483_648.0).contains(&label);
    match fits {
        true => Ok(label as i32),
        false => Err(inexpressible(
            format,
            batch,
            sample,
            &schema.label,
            format!("label {label} is not an integer of 32 bits"),
        )),
    }
}

/// A file that takes its name when it is finished.
struct Output {
    /// `None` once finished.
    file: Option<BufWriter<File>>,
    part: PathBuf,
    path: PathBuf,
}

impl Output {
    fn create(path: &Path) -> Result<Self> {
        if path.exists() {
            return Err(DataError::bad_file(
                path,
                "this exists already; remove it or write elsewhere",
            ));
        }
        let mut part = path.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let file = File::options().read(true).write(true).create(true).truncate(true).open(&part);
        let file = file.map_err(DataError::io("create", &part))?;
        let file = Some(BufWriter::with_capacity(BUFFER_BYTES, file));
        Ok(Self { file, part, path: path.to_owned() })
    }

    fn finish(mut self) -> Result<()> {
        if let Some(mut file) = self.file.take() {
            let done = file.flush().and_then(|()| std::fs::rename(&self.part, &self.path));
            if done.is_err() {
                self.file = Some(file);
            }
            done.map_err(DataError::io("complete", &self.path))?;
        }
        Ok(())
    }

    fn io(&self) -> impl FnOnce(std::io::Error) -> DataError {
        DataError::io("write", &self.path)
    }

    fn open_file(&mut self) -> std::io::Result<&mut BufWriter<File>> {
        self.file.as_mut().ok_or_else(|| std::io::Error::other("the file is finished"))
    }
}

impl Write for Output {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.open_file()?.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.open_file()?.flush()
    }
}

impl std::io::Read for Output {
    fn read(&mut self, bytes: &mut [u8]) -> std::io::Result<usize> {
        self.open_file()?.get_mut().read(bytes)
    }
}

impl Seek for Output {
    fn seek(&mut self, to: SeekFrom) -> std::io::Result<u64> {
        self.open_file()?.seek(to)
    }
}

impl Drop for Output {
    fn drop(&mut self) {
        if self.file.take().is_some() {
            // What is left of a failed write; the failure itself has been reported.
            let _ = std::fs::remove_file(&self.part);
        }
    }
}
