//! Features of raw ids: any 64 bits go through every format that can hold them.

use std::path::Path;

use tessera_data::{Batch, BatchParts, FeatureSpec, Format, RawId, Schema, SourceSpec, convert};

use crate::common::{assert_error, assert_same, jagged, read_all, schema, write};

fn raw(dense: usize, features: usize) -> Schema {
    let mut schema = schema(dense, features);
    schema.features.iter_mut().for_each(|feature| feature.raw_ids = true);
    schema
}

fn source(format: Format, path: &Path, schema: &Schema) -> SourceSpec {
    SourceSpec::files(format, vec![path.into()], schema.clone())
}

fn line(categories: &[&str]) -> String {
    let mut columns = vec![String::new(); 26];
    for (column, value) in columns.iter_mut().zip(categories) {
        (*value).clone_into(column);
    }
    format!("1{}\t{}\n", "\t5".repeat(13), columns.join("\t"))
}

#[test]
fn categories_are_their_values_and_a_missing_one_is_none_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tsv");
    let values = ["68fd1e64", "", "0", "fffffffffffffffe", "ffffffff", "8000000000000000"];
    let text: String = values.iter().map(|value| line(&[value])).collect();
    std::fs::write(&path, &text).unwrap();
    let schema = raw(1, 1);
    let batch = read_all(&source(Format::CriteoTsv, &path, &schema));
    let ids: Vec<u64> = batch.features()[0].ids().iter().map(|id| id.0 as u64).collect();
    assert_eq!(ids, [0x68fd_1e64, u64::MAX, 0, u64::MAX - 1, 0xffff_ffff, 1 << 63]);
    assert_eq!(RawId(FeatureSpec::MISSING).0 as u64, u64::MAX);
    // Two features of one file: rows and values.
    let mut both = raw(1, 2);
    both.features[1].raw_ids = false;
    let ids: Vec<i64> = read_all(&source(Format::CriteoTsv, &path, &both)).features()[1]
        .ids()
        .iter()
        .map(|id| id.0)
        .collect();
    assert_eq!(ids, [0; 6]);
    // What stands for a missing one is refused as a value, with its place.
    std::fs::write(&path, text + &line(&["ffffffffffffffff"])).unwrap();
    let bad = source(Format::CriteoTsv, &path, &schema);
    assert_error(&bad, &["a.tsv", "7", "c1", "stands for a missing one"]);
    let verbatim = SourceSpec { values: tessera_data::Values::Verbatim, ..bad };
    assert_eq!(read_all(&verbatim).features()[0].ids().last(), Some(&RawId(-1)));
}

#[test]
fn any_64_bits_go_from_format_to_format() {
    let dir = tempfile::tempdir().unwrap();
    let schema = raw(1, 2);
    let ids = [0, 1, -1, i64::MIN, i64::MAX, -2, 1 << 40].map(|id| vec![id]);
    let batch = Batch::new(BatchParts {
        dense_features: 1,
        dense: (0..7).map(|x| x as f32).collect(),
        labels: vec![0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 1.0],
        sample_weights: None,
        groups: None,
        features: vec![jagged(&ids), jagged(&ids.iter().rev().cloned().collect::<Vec<_>>())],
        provenance: None,
    })
    .unwrap();
    let formats = [Format::Parquet, Format::MlperfNpy, Format::CriteoTsv];
    for from in formats {
        let first = dir.path().join(format!("{from}"));
        write(from, &first, &schema, &[batch.slice(0..3), batch.slice(3..7)]);
        for to in formats {
            let second = dir.path().join(format!("{from}-{to}"));
            convert(&source(from, &first, &schema), to, &second, |_| {}).unwrap();
            let read = read_all(&source(to, &second, &schema));
            assert_eq!(read.features(), batch.features(), "{from} to {to}");
            if from != Format::CriteoTsv && to != Format::CriteoTsv {
                assert_same(&read, &batch);
            }
        }
    }
    let raw = dir.path().join("raw");
    let error = convert(
        &source(Format::Parquet, &dir.path().join("parquet"), &schema),
        Format::Raw,
        &raw,
        |_| {},
    );
    assert!(error.unwrap_err().to_string().contains("32"), "raw ids have 32 bits");
}
