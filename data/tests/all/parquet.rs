//! `parquet`: columns by name, every type, nulls, row groups, and faults.

use std::path::Path;
use std::sync::Arc;

use arrow::array::*;
use arrow::datatypes::{DataType, Field, Float64Type, Int32Type, Int64Type, Schema as ArrowSchema};
use parquet::arrow::ArrowWriter;
use parquet::file::properties::WriterProperties;
use tessera_data::{
    Batch, Distinct, Format, RawId, Schema, SourceSpec, convert, create, inspect, open,
};

use crate::common::{assert_error, assert_same, read_all, schema};

/// Writes columns in row groups of four.
fn write(path: &Path, columns: Vec<(&str, ArrayRef)>) {
    let fields: Vec<Field> =
        columns.iter().map(|(name, c)| Field::new(*name, c.data_type().clone(), true)).collect();
    let arrays = columns.into_iter().map(|(_, column)| column).collect();
    let batch = RecordBatch::try_new(Arc::new(ArrowSchema::new(fields)), arrays).unwrap();
    let properties = WriterProperties::builder().set_max_row_group_row_count(Some(4)).build();
    let file = std::fs::File::create(path).unwrap();
    let mut writer = ArrowWriter::try_new(file, batch.schema(), Some(properties)).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
}

fn source(columns: Vec<(&str, ArrayRef)>, schema: Schema) -> (tempfile::TempDir, SourceSpec) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.parquet");
    write(&path, columns);
    let spec = SourceSpec::files(Format::Parquet, vec![path], schema);
    (dir, spec)
}

fn list(bags: Vec<Option<Vec<Option<i64>>>>) -> ArrayRef {
    Arc::new(ListArray::from_iter_primitive::<Int64Type, _, _>(bags))
}

/// Three rows of good columns.
fn good() -> Vec<(&'static str, ArrayRef)> {
    vec![
        ("label", Arc::new(Float32Array::from(vec![0.0, 1.0, 0.5])) as ArrayRef),
        ("i1", Arc::new(Float64Array::from(vec![0.1, 2.0, 3.0]))),
        ("c1", Arc::new(Int32Array::from(vec![4, -1, 6]))),
    ]
}

/// The good columns, one of them replaced or added.
fn good_but(name: &'static str, column: ArrayRef) -> Vec<(&'static str, ArrayRef)> {
    let mut columns = good();
    columns.retain(|(other, _)| *other != name);
    columns.push((name, column));
    columns
}

fn ids(batch: &tessera_data::Batch, row: usize) -> Vec<i64> {
    batch.features()[0].bag(row).iter().map(|id| id.0).collect()
}

#[test]
fn columns_go_by_name_in_any_order_and_others_are_ignored() {
    let (_dir, spec) = source(good(), schema(1, 1));
    let plain = read_all(&spec);
    assert_eq!(plain.dense(), [0.1, 2.0, 3.0]);
    assert_eq!(plain.labels(), [0.0, 1.0, 0.5]);
    assert_eq!(plain.features()[0].ids(), [4, -1, 6].map(RawId));
    assert!(plain.place(2).to_string().ends_with("a.parquet row 2"));
    let mut shuffled = good();
    shuffled.reverse();
    shuffled.insert(1, ("note", Arc::new(StringArray::from(vec!["a", "b", "c"]))));
    let (_dir, spec) = source(shuffled, schema(1, 1));
    assert_same(&read_all(&spec), &plain);
}

#[test]
fn every_type_of_numbers_is_read() {
    let ones: Vec<ArrayRef> = vec![
        Arc::new(Int8Array::from(vec![1, 0, 1])),
        Arc::new(Int16Array::from(vec![1, 0, 1])),
        Arc::new(Int64Array::from(vec![1, 0, 1])),
        Arc::new(UInt8Array::from(vec![1, 0, 1])),
        Arc::new(UInt16Array::from(vec![1, 0, 1])),
        Arc::new(UInt32Array::from(vec![1, 0, 1])),
        Arc::new(UInt64Array::from(vec![1, 0, 1])),
    ];
    let also: Vec<ArrayRef> = vec![
        Arc::new(BooleanArray::from(vec![true, false, true])),
        Arc::new(Float16Array::from(vec![half::f16::ONE, half::f16::ZERO, half::f16::ONE])),
        Arc::new(Float64Array::from(vec![1.0, 0.0, 1.0])),
    ];
    for column in ones.iter().chain(&also) {
        let (_dir, spec) = source(good_but("label", column.clone()), schema(1, 1));
        assert_eq!(read_all(&spec).labels(), [1.0, 0.0, 1.0], "{}", column.data_type());
        let (_dir, spec) = source(good_but("i1", column.clone()), schema(1, 1));
        assert_eq!(read_all(&spec).dense(), [1.0, 0.0, 1.0], "{}", column.data_type());
    }
    for column in &ones {
        let (_dir, spec) = source(good_but("c1", column.clone()), schema(1, 1));
        assert_eq!(read_all(&spec).features()[0].ids(), [1, 0, 1].map(RawId));
    }
}

#[test]
fn lists_are_bags_and_nulls_are_empty_ones() {
    let bags = || vec![Some(vec![Some(1), Some(2)]), None, Some(vec![])];
    let large: Vec<Option<Vec<Option<i32>>>> =
        vec![Some(vec![Some(1), Some(2)]), None, Some(vec![])];
    let columns: Vec<ArrayRef> =
        vec![list(bags()), Arc::new(LargeListArray::from_iter_primitive::<Int32Type, _, _>(large))];
    for column in columns {
        let (_dir, spec) = source(good_but("c1", column), schema(1, 1));
        let batch = read_all(&spec);
        assert_eq!((ids(&batch, 0), ids(&batch, 1), ids(&batch, 2)), (vec![1, 2], vec![], vec![]));
    }
    let fixed = FixedSizeListArray::from_iter_primitive::<Int64Type, _, _>(
        vec![Some(vec![Some(1), Some(2)]); 3],
        2,
    );
    let (_dir, spec) = source(good_but("c1", Arc::new(fixed)), schema(1, 1));
    assert_eq!(ids(&read_all(&spec), 2), [1, 2]);
    let single = Arc::new(Int64Array::from(vec![Some(1), None, Some(3)]));
    let (_dir, spec) = source(good_but("c1", single), schema(1, 1));
    let batch = read_all(&spec);
    assert_eq!((ids(&batch, 0), ids(&batch, 1), ids(&batch, 2)), (vec![1], vec![], vec![3]));
}

#[test]
fn row_groups_are_passed_over_and_read_across() {
    let n = 5000i64;
    let columns: Vec<(&str, ArrayRef)> = vec![
        ("label", Arc::new(Float32Array::from_iter_values((0..n).map(|i| i as f32)))),
        ("c1", list((0..n).map(|i| Some(vec![Some(i); (i % 3) as usize])).collect())),
    ];
    let (_dir, spec) = source(columns, schema(0, 1));
    let whole = read_all(&spec);
    assert_eq!(whole.samples(), 5000);
    for (first, size) in [(0, 5000), (1, 10), (3, 4), (2047, 3), (2048, 2048), (4999, 5)] {
        let mut reader = open(&spec).unwrap();
        assert_eq!(reader.skip(first).unwrap(), first);
        let batch = reader.read(size).unwrap();
        let first = first as usize;
        assert_eq!(batch, whole.slice(first..(first + size).min(5000)));
        assert_eq!(reader.skip(10).unwrap(), (5000 - first - batch.samples()).min(10) as u64);
    }
}

#[test]
fn weights_of_ids_are_lists_alongside() {
    let mut schema = schema(0, 1);
    schema.features[0].weighted = true;
    let weights = |rows: Vec<Option<Vec<Option<f64>>>>| -> ArrayRef {
        Arc::new(ListArray::from_iter_primitive::<Float64Type, _, _>(rows))
    };
    let bags = list(vec![Some(vec![Some(1), Some(2)]), None, Some(vec![Some(3)])]);
    let columns =
        |weights| good_but("c1", bags.clone()).into_iter().chain([("c1_weights", weights)]);
    let fits = weights(vec![Some(vec![Some(0.5), Some(1.5)]), Some(vec![]), Some(vec![Some(2.0)])]);
    let (_dir, spec) = source(columns(fits).collect(), schema.clone());
    let batch = read_all(&spec);
    assert_eq!(batch.features()[0].weights(), Some(&[0.5, 1.5, 2.0][..]));

    let fails = |weights: ArrayRef, part: &str| {
        let (_dir, spec) = source(columns(weights).collect(), schema.clone());
        assert_error(&spec, &["a.parquet row 2, column c1_weights", part]);
    };
    let two = || Some(vec![Some(0.5), Some(1.5)]);
    fails(weights(vec![two(), None, Some(vec![])]), "0 weights for 1 ids of c1");
    fails(weights(vec![two(), None, two()]), "2 weights for 1 ids of c1");
    fails(weights(vec![two(), None, None]), "0 weights for 1 ids of c1");
    fails(weights(vec![two(), None, Some(vec![None])]), "a weight is null");
    fails(weights(vec![two(), None, Some(vec![Some(f64::NAN)])]), "weight NaN is not finite");

    let mut single = good();
    single.push(("c1_weights", Arc::new(Float32Array::from(vec![1.0, 2.0, 3.0]))));
    let (_dir, spec) = source(single, schema.clone());
    assert_eq!(read_all(&spec).features()[0].weights(), Some(&[1.0, 2.0, 3.0][..]));
    let (_dir, spec) = source(good(), schema);
    assert_error(&spec, &["no column `c1_weights`"]);
}

#[test]
fn sample_weights_and_groups_are_read() {
    let mut schema = schema(1, 1);
    schema.sample_weight = Some("w".into());
    schema.group = Some("query".into());
    let with = |weights: Vec<Option<f32>>, groups: Vec<Option<i64>>| {
        let mut columns = good();
        columns.push(("w", Arc::new(Float32Array::from(weights))));
        columns.push(("query", Arc::new(Int64Array::from(groups))));
        source(columns, schema.clone())
    };
    let groups = || vec![Some(7), Some(-7), Some(i64::MAX)];
    let (_dir, spec) = with(vec![Some(1.0), Some(0.0), Some(2.5)], groups());
    let batch = read_all(&spec);
    assert_eq!(batch.sample_weights(), Some(&[1.0, 0.0, 2.5][..]));
    assert_eq!(batch.groups(), Some(&[7, -7, i64::MAX][..]));
    let report = inspect(&spec, None).unwrap();
    assert_eq!(report.sample_weight.unwrap().max, 2.5);
    assert_eq!(report.groups, Some(Distinct::Exact(3)));
    assert!(report.to_string().contains("sample weight  0 to 2.5"), "{report}");
    let one = Some(1.0);
    let (_dir, spec) = with(vec![one, Some(-0.5), one], groups());
    assert_error(&spec, &["row 1, column w: -0.5 is negative"]);
    let (_dir, spec) = with(vec![one, one, None], groups());
    assert_error(&spec, &["row 2, column w: the value is null"]);
    let (_dir, spec) = with(vec![one; 3], vec![None, Some(1), Some(2)]);
    assert_error(&spec, &["row 0, column query: an integer is null"]);
}

/// Clicks are grouped by user, and the user is a feature: one column, read once for both.
#[test]
fn the_group_may_be_a_feature_or_a_dense_column_too() {
    let mut columns = good_but("i2", Arc::new(Int64Array::from(vec![7, -8, 9])) as ArrayRef);
    columns.insert(0, ("other", Arc::new(Int64Array::from(vec![1, 2, 3]))));
    let (dir, mut spec) = source(columns, schema(2, 1));
    let plain = read_all(&spec);
    for (group, expected) in [("c1", [4, -1, 6]), ("i2", [7, -8, 9])] {
        spec.schema.group = Some(group.into());
        let batch = read_all(&spec);
        assert_eq!(batch.groups(), Some(&expected[..]));
        assert_eq!((batch.dense(), batch.features()), (plain.dense(), plain.features()));
        // Written, it is one column again.
        let copy = dir.path().join(format!("by-{group}.parquet"));
        assert_eq!(convert(&spec, Format::Parquet, &copy, |_| ()).unwrap(), 3);
        let copied = SourceSpec { files: vec![copy], ..spec.clone() };
        assert_same(&read_all(&copied), &batch);
    }
    spec.schema.group = Some("c1".into());
    let mut parts = read_all(&spec).into_parts();
    parts.groups = Some(vec![4, -1, 5]);
    let path = dir.path().join("differs.parquet");
    let mut writer = create(Format::Parquet, &path, &spec.schema).unwrap();
    let error = writer.write(&Batch::new(parts).unwrap()).unwrap_err().to_string();
    assert!(error.contains("row 2, c1: the group is 5, but it is not the bag's"), "{error}");

    let group = |column| {
        let mut schema = schema(1, 1);
        schema.group = Some("c1".into());
        source(good_but("c1", column), schema)
    };
    let (_dir, spec) = group(list(vec![Some(vec![Some(1)]); 3]));
    assert_error(&spec, &["column `c1` is List", "one integer a row, to be the group"]);
    let (_dir, spec) = group(Arc::new(Int64Array::from(vec![Some(1), None, Some(3)])));
    assert_error(&spec, &["row 1, column c1: an integer is null"]);
}

#[test]
fn faults_are_named() {
    let fails = |columns: Vec<(&'static str, ArrayRef)>, parts: &[&str]| {
        let (_dir, spec) = source(columns, schema(1, 1));
        assert_error(&spec, parts);
    };
    let mut without = good();
    without.remove(1);
    fails(without, &["a.parquet: no column `i1`; the file has: label, c1"]);
    let texts: ArrayRef = Arc::new(StringArray::from(vec!["1", "2", "3"]));
    fails(good_but("i1", texts.clone()), &["column `i1` is", "a number or boolean is needed"]);
    fails(good_but("c1", texts), &["column `c1` is", "an integer or a list of integers is needed"]);
    let floats: ArrayRef = Arc::new(Float32Array::from(vec![1.0, 2.0, 3.0]));
    fails(good_but("c1", floats), &["column `c1` is Float32"]);
    let money = Decimal128Array::from(vec![1, 2, 3]).with_precision_and_scale(10, 2).unwrap();
    fails(good_but("i1", Arc::new(money)), &["column `i1` is Decimal128"]);

    let nulls = || Arc::new(Float32Array::from(vec![Some(1.0), Some(0.0), None]));
    fails(good_but("label", nulls()), &["a.parquet row 2, column label: the value is null"]);
    fails(good_but("i1", nulls()), &["a.parquet row 2, column i1: the value is null"]);
    let nan = || Arc::new(Float32Array::from(vec![1.0, f32::NAN, 0.0]));
    fails(good_but("label", nan()), &["row 1, column label: NaN is not finite"]);
    fails(good_but("i1", nan()), &["row 1, dense column i1: NaN is not finite"]);
    let wide = Arc::new(Float64Array::from(vec![1.0, 1e300, 0.0]));
    fails(good_but("i1", wide), &["row 1, dense column i1: inf is not finite"]);
    let inside = list(vec![Some(vec![Some(1)]), Some(vec![Some(1), None]), None]);
    fails(good_but("c1", inside), &["a.parquet row 1, column c1: an integer is null"]);
    let large = Arc::new(UInt64Array::from(vec![1, 1 << 63, 3]));
    fails(good_but("c1", large), &["row 1, column c1: 9223372036854775808 is above 2^63 - 1"]);

    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("b.parquet");
    write(&path, good());
    let bytes = std::fs::read(&path).unwrap();
    let spec = SourceSpec::files(Format::Parquet, vec![path.clone()], schema(1, 1));
    std::fs::write(&path, &bytes[..bytes.len() - 20]).unwrap();
    assert_error(&spec, &["b.parquet: not a readable Parquet file"]);
    std::fs::write(&path, b"").unwrap();
    assert_error(&spec, &["b.parquet: the file is empty"]);
    let mut damaged = bytes;
    damaged[8..40].fill(0xFF);
    std::fs::write(&path, damaged).unwrap();
    assert_error(&spec, &["b.parquet: cannot decode the rows from 0 on"]);
}

/// A file of no rows is a valid file, and has none.
#[test]
fn no_rows_are_fine() {
    let none: Vec<(&str, ArrayRef)> = vec![
        ("label", Arc::new(Float32Array::from(Vec::<f32>::new()))),
        ("c1", new_empty_array(&DataType::Int64)),
    ];
    let (_dir, spec) = source(none, schema(0, 1));
    assert_eq!(read_all(&spec).samples(), 0);
}
