//! Writes `parquet`: dense values, label and weights as float32, groups as int64, every feature
//! as a list of int64 (a list even where bags have one id, so that an empty bag needs no null). Where the group is a
//! dense column or a feature too, the one column of both is the group's.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow::array::{ArrayRef, Float32Array, Int64Array, ListArray, RecordBatch};
use arrow::buffer::OffsetBuffer;
use arrow::datatypes::{DataType, Field, Schema as ArrowSchema};
use parquet::arrow::ArrowWriter;
use parquet::basic::Compression;
use parquet::file::properties::WriterProperties;

use super::{Output, Writer, check_shape, inexpressible};
use crate::{Batch, DataError, Format, RawId, Result, Schema};

/// Rows of a row group: what is held in memory, and the grain of seeking.
const GROUP_ROWS: usize = 1 << 16;
/// Rows of an Arrow batch: list offsets have 32 bits, so long bags must not come too many at once.
const WRITE_ROWS: usize = 4096;

/// Writes row groups.
pub(super) struct ParquetWriter {
    path: PathBuf,
    schema: Schema,
    columns: Arc<ArrowSchema>,
    writer: ArrowWriter<Output>,
}

impl ParquetWriter {
    pub(super) fn create(path: &Path, schema: &Schema) -> Result<Self> {
        let float = |name: &str| Field::new(name, DataType::Float32, false);
        let list = |name: &str, kind| {
            Field::new(name, DataType::List(Arc::new(Field::new("element", kind, false))), false)
        };
        let mut fields = vec![float(&schema.label)];
        fields.extend(schema.sample_weight.as_deref().map(float));
        fields.extend(schema.group.as_ref().map(|name| Field::new(name, DataType::Int64, false)));
        let grouped = |name: &String| schema.group.as_ref() == Some(name);
        fields.extend(schema.dense.iter().filter(|name| !grouped(name)).map(|name| float(name)));
        for feature in &schema.features {
            if !grouped(&feature.name) {
                fields.push(list(&feature.name, DataType::Int64));
            }
            if feature.weighted {
                fields.push(list(&feature.weights_column(), DataType::Float32));
            }
        }
        let columns = Arc::new(ArrowSchema::new(fields));
        let properties = WriterProperties::builder()
            .set_compression(Compression::SNAPPY)
            .set_max_row_group_row_count(Some(GROUP_ROWS))
            .build();
        let output = Output::create(path)?;
        let writer = ArrowWriter::try_new(output, Arc::clone(&columns), Some(properties))
            .map_err(|error| failure(path, error))?;
        Ok(Self { path: path.to_owned(), schema: schema.clone(), columns, writer })
    }

    /// The samples of `batch` as Arrow columns.
    fn columns_of(&self, batch: &Batch) -> Result<RecordBatch> {
        let mut arrays: Vec<ArrayRef> = vec![Arc::new(Float32Array::from(batch.labels().to_vec()))];
        if let Some(weights) = batch.sample_weights() {
            arrays.push(Arc::new(Float32Array::from(weights.to_vec())));
        }
        if let Some(groups) = batch.groups() {
            arrays.push(Arc::new(Int64Array::from(groups.to_vec())));
        }
        for (column, name) in self.schema.dense.iter().enumerate() {
            if self.schema.group.as_ref() == Some(name) {
                continue;
            }
            let values = batch.dense().iter().skip(column).step_by(self.schema.dense.len());
            arrays.push(Arc::new(values.copied().collect::<Float32Array>()));
        }
        for (jagged, feature) in batch.features().iter().zip(&self.schema.features) {
            let offsets: Option<Vec<i32>> =
                jagged.offsets().iter().map(|offset| i32::try_from(*offset).ok()).collect();
            let offsets = offsets.ok_or_else(|| DataError::Batch {
                reason: format!(
                    "{} ids in {} bags are above 2^31 - 1, the limit of a Parquet page of lists",
                    jagged.ids().len(),
                    jagged.bags()
                ),
            })?;
            let offsets = OffsetBuffer::new(offsets.into());
            let list = |values: ArrayRef| {
                let element = Field::new("element", values.data_type().clone(), false);
                ListArray::try_new(Arc::new(element), offsets.clone(), values, None)
                    .map_err(|error| failure(&self.path, error.into()))
            };
            let ids: Vec<i64> = bytemuck::cast_slice(jagged.ids()).to_vec();
            if self.schema.group.as_ref() != Some(&feature.name) {
                arrays.push(Arc::new(list(Arc::new(Int64Array::from(ids)))?));
            }
            if let Some(weights) = jagged.weights() {
                arrays.push(Arc::new(list(Arc::new(Float32Array::from(weights.to_vec())))?));
            }
        }
        RecordBatch::try_new(Arc::clone(&self.columns), arrays)
            .map_err(|error| failure(&self.path, error.into()))
    }
}

/// Refuses a sample whose group is not what it has in the column that is both group and dense
/// column or feature.
fn check_group(batch: &Batch, schema: &Schema) -> Result<()> {
    let (Some(name), Some(groups)) = (&schema.group, batch.groups()) else { return Ok(()) };
    let dense = schema.dense.iter().position(|column| column == name);
    let feature = schema.features.iter().position(|feature| feature.name == *name);
    for (sample, &group) in groups.iter().enumerate() {
        let fault = |reason| Err(inexpressible(Format::Parquet, batch, sample, name, reason));
        if let Some(column) = dense {
            let value = batch.dense_row(sample)[column];
            if value != group as f32 {
                return fault(format!("the group is {group}, but the dense value is {value}"));
            }
        }
        if let Some(feature) = feature {
            let bag = batch.features()[feature].bag(sample);
            if *bag != [RawId(group)] {
                return fault(format!("the group is {group}, but it is not the bag's only id"));
            }
        }
    }
    Ok(())
}

fn failure(path: &Path, error: parquet::errors::ParquetError) -> DataError {
    DataError::io("write", path)(std::io::Error::other(error))
}

impl Writer for ParquetWriter {
    fn write(&mut self, batch: &Batch) -> Result<()> {
        check_shape(batch, &self.schema)?;
        check_group(batch, &self.schema)?;
        for first in (0..batch.samples()).step_by(WRITE_ROWS) {
            let piece = batch.slice(first..batch.samples().min(first + WRITE_ROWS));
            let columns = self.columns_of(&piece)?;
            self.writer.write(&columns).map_err(|error| failure(&self.path, error))?;
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        // Writes the last row group and the footer.
        let output = self.writer.into_inner().map_err(|error| failure(&self.path, error))?;
        output.finish()
    }
}
