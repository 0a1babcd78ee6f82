//! Small data files, made to the letter.

use std::path::Path;
use std::sync::Arc;

use arrow::array::{
    ArrayRef, Float32Array, Int64Array, ListBuilder, PrimitiveBuilder, RecordBatch, UInt64Array,
};
use arrow::datatypes::{Float32Type, Int64Type};
use parquet::arrow::ArrowWriter;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;

/// A Parquet column of floats.
pub fn floats(values: &[f32]) -> ArrayRef {
    Arc::new(Float32Array::from(values.to_vec()))
}

/// A Parquet column of signed integers.
pub fn ints(values: &[i64]) -> ArrayRef {
    Arc::new(Int64Array::from(values.to_vec()))
}

/// A Parquet column of unsigned integers.
pub fn unsigned(values: &[u64]) -> ArrayRef {
    Arc::new(UInt64Array::from(values.to_vec()))
}

/// A Parquet column of bags of ids.
pub fn bags(values: &[&[i64]]) -> ArrayRef {
    let mut list = ListBuilder::new(PrimitiveBuilder::<Int64Type>::new());
    for bag in values {
        list.values().append_slice(bag);
        list.append(true);
    }
    Arc::new(list.finish())
}

/// A Parquet column of bags of weights.
pub fn weights(values: &[&[f32]]) -> ArrayRef {
    let mut list = ListBuilder::new(PrimitiveBuilder::<Float32Type>::new());
    for bag in values {
        list.values().append_slice(bag);
        list.append(true);
    }
    Arc::new(list.finish())
}

/// Writes columns to a Parquet file.
pub fn write_parquet(path: &Path, columns: &[(&str, ArrayRef)]) {
    let rows = RecordBatch::try_from_iter(columns.iter().cloned()).unwrap();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, rows.schema(), None).unwrap();
    writer.write(&rows).unwrap();
    writer.close().unwrap();
}

/// Reads the columns of a Parquet file.
pub fn read_parquet(path: &Path) -> Vec<(String, ArrayRef)> {
    let file = std::fs::File::open(path).unwrap();
    let reader = ParquetRecordBatchReaderBuilder::try_new(file).unwrap();
    let schema = reader.schema().clone();
    let batches: Vec<RecordBatch> = reader.build().unwrap().map(Result::unwrap).collect();
    schema
        .fields()
        .iter()
        .enumerate()
        .map(|(i, field)| {
            let parts: Vec<_> = batches.iter().map(|batch| batch.column(i).as_ref()).collect();
            (field.name().clone(), concat(&parts))
        })
        .collect()
}

fn concat(parts: &[&dyn arrow::array::Array]) -> ArrayRef {
    arrow::compute::concat(parts).unwrap()
}

/// The labels and scores that `tessera predict` wrote.
pub fn scores(path: &Path) -> (Vec<f32>, Vec<f32>) {
    let columns = read_parquet(path);
    let column = |name: &str| {
        let (_, array) = columns.iter().find(|(column, _)| column == name).unwrap();
        array.as_any().downcast_ref::<Float32Array>().unwrap().values().to_vec()
    };
    (column("label"), column("score"))
}

/// A line of `criteo-tsv`: a label, then columns by name; the others are empty.
pub fn criteo_line(label: &str, columns: &[(&str, &str)]) -> String {
    let names = (1..=13).map(|i| format!("i{i}")).chain((1..=26).map(|i| format!("c{i}")));
    let mut line = label.to_owned();
    for name in names {
        line.push('\t');
        if let Some((_, value)) = columns.iter().find(|(column, _)| *column == name) {
            line.push_str(value);
        }
    }
    line + "\n"
}

/// The bytes of a `raw` record.
pub fn raw_record(label: i32, dense: &[f32], ids: &[i32]) -> Vec<u8> {
    let mut bytes = label.to_le_bytes().to_vec();
    bytes.extend(dense.iter().flat_map(|value| value.to_le_bytes()));
    bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
    bytes
}
