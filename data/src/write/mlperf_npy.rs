//! Writes `mlperf-npy`: day 0 of a directory.
//!
//! Arrays grow in files of their own. A header of fixed size comes first and gets the number of
//! rows at the end; then the arrays of ids are copied into an uncompressed `.npz`, which readers
//! can seek in. Labels are int32 (rows, 1); ids are int32 for features of at most 2^31 rows, else
//! int64.

use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use zip::ZipWriter;
use zip::write::SimpleFileOptions;

use super::{Output, Writer, check_shape, inexpressible, label_i32};
use crate::read::mlperf_npy::ENDINGS;
use crate::{Batch, DataError, Format, Result, Schema};

const FORMAT: Format = Format::MlperfNpy;

/// Bytes of the header of every array: a multiple of 64 with room for any shape.
const HEADER_BYTES: usize = 128;

/// An array of rows that grows.
struct Array {
    output: Output,
    kind: &'static str,
}

impl Array {
    fn create(path: &Path, kind: &'static str) -> Result<Self> {
        let mut array = Self { output: Output::create(path)?, kind };
        array.write(&[0; HEADER_BYTES])?;
        Ok(array)
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.output.write_all(bytes).map_err(self.output.io())
    }

    /// Puts the header in its place.
    fn complete(mut self, rows: u64, columns: usize) -> Result<Output> {
        let header = header(self.kind, rows, columns);
        let done =
            self.output.seek(SeekFrom::Start(0)).and_then(|_| self.output.write_all(&header));
        done.map_err(self.output.io())?;
        Ok(self.output)
    }
}

/// An `.npy` header, version 1.0: magic, version, length of the text as u16, text padded by spaces.
fn header(kind: &str, rows: u64, columns: usize) -> [u8; HEADER_BYTES] {
    let mut header = [b' '; HEADER_BYTES];
    header[..8].copy_from_slice(b"\x93NUMPY\x01\x00");
    header[8..10].copy_from_slice(&(HEADER_BYTES as u16 - 10).to_le_bytes());
    // At most 98 bytes, for two numbers of 20 digits.
    let text =
        format!("{{'descr': '{kind}', 'fortran_order': False, 'shape': ({rows}, {columns}), }}");
    header[10..10 + text.len()].copy_from_slice(text.as_bytes());
    header[HEADER_BYTES - 1] = b'\n';
    header
}

struct FeatureArray {
    array: Array,
    wide: bool,
    /// Ids a row: those of the first sample.
    hots: Option<usize>,
}

/// Writes the files of a day.
pub(super) struct MlperfWriter {
    schema: Schema,
    dense: Array,
    labels: Array,
    features: Vec<FeatureArray>,
    archive: Output,
    rows: u64,
    scratch: Vec<u8>,
}

impl MlperfWriter {
    pub(super) fn create(directory: &Path, schema: &Schema) -> Result<Self> {
        std::fs::create_dir_all(directory).map_err(DataError::io("create directory", directory))?;
        let [dense, labels, archive] =
            ENDINGS.map(|ending| directory.join(format!("day_0_{ending}")));
        let features = schema.features.iter().enumerate().map(|(k, feature)| {
            let wide = feature.raw_ids || feature.rows > 1 << 31;
            let array = Array::create(&array_path(directory, k), if wide { "<i8" } else { "<i4" })?;
            Ok(FeatureArray { array, wide, hots: None })
        });
        Ok(Self {
            schema: schema.clone(),
            dense: Array::create(&dense, "<f4")?,
            labels: Array::create(&labels, "<i4")?,
            features: features.collect::<Result<_>>()?,
            archive: Output::create(&archive)?,
            rows: 0,
            scratch: Vec::new(),
        })
    }
}

/// Where the ids of feature `k` grow until they are in the archive.
fn array_path(directory: &Path, k: usize) -> PathBuf {
    directory.join(format!("day_0_feature_{k}.npy"))
}

impl Writer for MlperfWriter {
    fn write(&mut self, batch: &Batch) -> Result<()> {
        check_shape(batch, &self.schema)?;
        self.scratch.clear();
        for sample in 0..batch.samples() {
            let label = label_i32(FORMAT, batch, sample, &self.schema)?;
            self.scratch.extend_from_slice(&label.to_le_bytes());
        }
        self.labels.write(&self.scratch)?;
        self.scratch.clear();
        for value in batch.dense() {
            self.scratch.extend_from_slice(&value.to_le_bytes());
        }
        self.dense.write(&self.scratch)?;
        let features = self.features.iter_mut().zip(batch.features()).zip(&self.schema.features);
        for ((feature, jagged), spec) in features {
            self.scratch.clear();
            for sample in 0..batch.samples() {
                let bag = jagged.bag(sample);
                let fail = |reason| Err(inexpressible(FORMAT, batch, sample, &spec.name, reason));
                let hots = *feature.hots.get_or_insert(bag.len());
                if bag.len() != hots {
                    return fail(format!(
                        "a bag of {} ids after bags of {hots}; all bags of a feature need the same number",
                        bag.len()
                    ));
                }
                for id in bag {
                    if feature.wide {
                        self.scratch.extend_from_slice(&id.0.to_le_bytes());
                    } else if let Ok(id) = i32::try_from(id.0) {
                        self.scratch.extend_from_slice(&id.to_le_bytes());
                    } else {
                        return fail(format!(
                            "id {id} does not fit the 32 bits that a feature of {} rows gets",
                            spec.rows
                        ));
                    }
                }
            }
            feature.array.write(&self.scratch)?;
        }
        self.rows += batch.samples() as u64;
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let path = self.archive.path.clone();
        let failed = |error: zip::result::ZipError| DataError::io("write", &path)(error.into());
        let mut archive = ZipWriter::new(self.archive);
        for (k, (feature, spec)) in self.features.into_iter().zip(&self.schema.features).enumerate()
        {
            let columns = feature.hots.unwrap_or(spec.hots);
            // Dropped unfinished after the copy, which removes the file.
            let mut ids = feature.array.complete(self.rows, columns)?;
            ids.seek(SeekFrom::Start(0)).map_err(ids.io())?;
            let options = SimpleFileOptions::default()
                .compression_method(zip::CompressionMethod::Stored)
                .large_file(true);
            archive.start_file(format!("{k}.npy"), options).map_err(failed)?;
            copy(&mut ids, &mut archive).map_err(DataError::io("write", &path))?;
        }
        let archive = archive.finish().map_err(failed)?;
        self.dense.complete(self.rows, self.schema.dense.len())?.finish()?;
        self.labels.complete(self.rows, 1)?.finish()?;
        archive.finish()
    }
}

/// Copies all bytes through one large buffer.
fn copy(from: &mut impl Read, to: &mut impl Write) -> std::io::Result<()> {
    let mut buffer = vec![0; super::BUFFER_BYTES];
    loop {
        match from.read(&mut buffer)? {
            0 => return Ok(()),
            got => to.write_all(&buffer[..got])?,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_have_one_size_and_are_read_by_others() {
        let header = header("<i8", u64::MAX >> 20, 13);
        assert_eq!(header.len() % 64, 0);
        let read = npyz::NpyHeader::from_reader(&header[..]).unwrap();
        assert_eq!(read.shape(), [u64::MAX >> 20, 13]);
        assert_eq!(read.dtype().descr(), "'<i8'");
    }

    /// No numbers are too long for the room that the text has.
    #[test]
    fn the_longest_header_fits() {
        let header = super::header("<i8", u64::MAX, usize::MAX);
        let (text, end) = header.split_at(HEADER_BYTES - 1);
        assert!(text.trim_ascii_end().ends_with(b"), }"), "{}", text.escape_ascii());
        assert_eq!(end, b"\n");
    }
}
