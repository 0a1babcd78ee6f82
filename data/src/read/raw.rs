//! `raw`: fixed-size little-endian records, so any sample is a seek away.
//!
//! ```text
//! byte 0        4                  4 + 4 D               4 + 4 D + 4 (h0 + h1 + ...)
//! | label i32   | dense f32 x D    | ids i32 x h0 | x h1 ... |
//! ```
//! `D` is the number of dense columns, `hk` the hots of feature k. Ids are signed and passed on as
//! they are; the table refuses those out of its range.

use std::fs::File;
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

use super::{FileReader, Unit};
use crate::batch::{BatchBuilder, Numbering, Origin, SourceFile};
use crate::{DataError, Result, Schema};

/// Bytes of a record of `schema`.
///
/// Errors: [`DataError::Spec`] when they do not fit 64 bits.
pub(crate) fn record_bytes(schema: &Schema) -> Result<u64> {
    schema
        .features
        .iter()
        .try_fold(1 + schema.dense.len() as u64, |fields, f| fields.checked_add(f.hots as u64))
        .and_then(|fields| fields.checked_mul(4))
        .filter(|bytes| usize::try_from(*bytes).is_ok())
        .ok_or_else(|| DataError::spec("a raw record of these hots does not fit 64 bits"))
}

/// The file `path` of a source.
pub(super) fn unit(path: &Path, schema: &Schema) -> Result<Unit> {
    let record = record_bytes(schema)?;
    let (_, bytes) = super::open_file(path)?;
    if bytes == 0 {
        return Err(DataError::bad_file(
            path,
            format!("the file is empty; raw records of {record} bytes are needed"),
        ));
    }
    if bytes % record != 0 {
        return Err(DataError::bad_file(
            path,
            format!(
                "{bytes} bytes are not a whole number of records of {record} bytes ({} are left over); is the file cut short, or do the dense columns ({}) and hots ({}) differ?",
                bytes % record,
                schema.dense.len(),
                schema.features.iter().map(|f| f.hots.to_string()).collect::<Vec<_>>().join(", ")
            ),
        ));
    }
    let samples = bytes / record;
    let file = SourceFile { path: path.into(), numbering: Numbering::Row };
    let hots: Vec<usize> = schema.features.iter().map(|feature| feature.hots).collect();
    let path = path.to_owned();
    let open = move || -> Result<Box<dyn FileReader>> {
        let (file, _) = super::open_file(&path)?;
        Ok(Box::new(RawFile {
            path: path.clone(),
            file: BufReader::with_capacity(1 << 18, file),
            hots: hots.clone(),
            record: vec![0; record as usize],
            samples,
            row: 0,
            bytes: 0,
        }))
    };
    Ok(Unit { file: Some(file), samples: Some(samples), open: Box::new(open) })
}

struct RawFile {
    path: PathBuf,
    file: BufReader<File>,
    hots: Vec<usize>,
    record: Vec<u8>,
    samples: u64,
    row: u64,
    bytes: u64,
}

impl FileReader for RawFile {
    fn read(&mut self, samples: usize, file: u32, out: &mut BatchBuilder) -> Result<usize> {
        let take = (self.samples - self.row).min(samples as u64) as usize;
        for _ in 0..take {
            self.file.read_exact(&mut self.record).map_err(DataError::io("read", &self.path))?;
            parse_record(&self.record, &self.hots, out);
            out.origins.push(Origin { file, row: self.row });
            self.row += 1;
        }
        for (&hots, builder) in self.hots.iter().zip(&mut out.features) {
            builder.end_bags(take, hots);
        }
        self.bytes += take as u64 * self.record.len() as u64;
        Ok(take)
    }

    fn skip(&mut self, samples: u64) -> Result<u64> {
        let take = (self.samples - self.row).min(samples);
        // Files are below 2^63 bytes, so the distance fits.
        let distance = (take * self.record.len() as u64) as i64;
        self.file.seek_relative(distance).map_err(DataError::io("seek in", &self.path))?;
        self.row += take;
        Ok(take)
    }

    fn bytes_read(&self) -> u64 {
        self.bytes
    }
}

/// Adds the sample of a record of exactly the right size, all but its origin and the ends of its
/// bags, to `out`.
fn parse_record(record: &[u8], hots: &[usize], out: &mut BatchBuilder) {
    let (words, _) = record.as_chunks::<4>();
    let (label, rest) = (words[0], &words[1..]);
    out.labels.push(i32::from_le_bytes(label) as f32);
    let (dense, mut ids) = rest.split_at(out.dense_features);
    out.dense.extend(dense.iter().map(|word| f32::from_le_bytes(*word)));
    for (&hots, builder) in hots.iter().zip(&mut out.features) {
        let (bag, others) = ids.split_at(hots);
        for word in bag {
            builder.push_id(i64::from(i32::from_le_bytes(*word)));
        }
        ids = others;
    }
}
