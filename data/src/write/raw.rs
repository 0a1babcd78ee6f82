//! Writes `raw` records; the layout is drawn in the reader.

use std::io::Write;
use std::path::Path;

use super::{Output, Writer, check_shape, inexpressible, label_i32};
use crate::{Batch, Format, Result, Schema};

const FORMAT: Format = Format::Raw;

/// Writes records.
pub(super) struct RawWriter {
    output: Output,
    schema: Schema,
    records: Vec<u8>,
}

impl RawWriter {
    pub(super) fn create(path: &Path, schema: &Schema) -> Result<Self> {
        crate::read::raw::record_bytes(schema)?;
        Ok(Self { output: Output::create(path)?, schema: schema.clone(), records: Vec::new() })
    }
}

impl Writer for RawWriter {
    fn write(&mut self, batch: &Batch) -> Result<()> {
        check_shape(batch, &self.schema)?;
        self.records.clear();
        for sample in 0..batch.samples() {
            let label = label_i32(FORMAT, batch, sample, &self.schema)?;
            self.records.extend_from_slice(&label.to_le_bytes());
            for value in batch.dense_row(sample) {
                self.records.extend_from_slice(&value.to_le_bytes());
            }
            for (feature, jagged) in self.schema.features.iter().zip(batch.features()) {
                let bag = jagged.bag(sample);
                let fail =
                    |reason| Err(inexpressible(FORMAT, batch, sample, &feature.name, reason));
                if bag.len() != feature.hots {
                    return fail(format!(
                        "a bag of {} ids; the feature's hots are {} in every record",
                        bag.len(),
                        feature.hots
                    ));
                }
                for id in bag {
                    let Ok(id) = i32::try_from(id.0) else {
                        return fail(format!("id {id} does not fit 32 bits"));
                    };
                    self.records.extend_from_slice(&id.to_le_bytes());
                }
            }
        }
        self.output.write_all(&self.records).map_err(self.output.io())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        self.output.finish()
    }
}
