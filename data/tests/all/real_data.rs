//! Real Criteo rows and the golden data sets.

use std::path::PathBuf;

use tessera_data::{
    DataError, Distinct, FeatureSpec, Format, RawId, Schema, SourceSpec, Values, convert, inspect,
    open,
};

use crate::common::{assert_same, read_all, schema, shared};

fn criteo(files: Vec<PathBuf>) -> SourceSpec {
    SourceSpec::files(Format::CriteoTsv, files, schema(13, 26))
}

fn share_of_positives(labels: &[f32]) -> f64 {
    labels.iter().map(|label| f64::from(*label)).sum::<f64>() / labels.len() as f64
}

#[test]
fn criteo_rows_have_the_counts_they_are_known_for() {
    let Some(dir) = shared("data/criteo-80k") else { return };
    let spec = criteo((1..=4).map(|part| dir.join(format!("part{part}.tsv"))).collect());
    let batch = read_all(&spec);
    assert_eq!(batch.samples(), 80_000);
    assert!((share_of_positives(batch.labels()) - 0.2245).abs() < 0.00005);
    assert!(batch.place(20_000).to_string().ends_with("part2.tsv line 1"));
    assert!(batch.features().iter().all(|feature| feature.ids().len() == 80_000));
    let mut reader = open(&spec).unwrap();
    reader.skip(80_000).unwrap();
    assert_eq!(reader.counts().bytes, 3_468_064 + 3_476_110 + 3_481_014 + 3_481_917);
}

#[test]
fn compressed_criteo_rows_give_the_same_batches() {
    let Some(file) = shared("data/criteo-10k-raw/dac_first10k.tsv") else { return };
    let dir = tempfile::tempdir().unwrap();
    let plain = criteo(vec![file]);
    let expected = read_all(&plain);
    assert_eq!(expected.samples(), 10_000);
    assert!((share_of_positives(expected.labels()) - 0.2182).abs() < 0.00005);
    for name in ["a.gz", "a.zst", "a"] {
        let path = dir.path().join(name);
        convert(&plain, Format::CriteoTsv, &path, |_| ()).unwrap();
        // The name does not tell the compression to the reader.
        let renamed = dir.path().join("renamed");
        std::fs::rename(path, &renamed).unwrap();
        assert_same(&read_all(&criteo(vec![renamed])), &expected);
    }
}

/// The first row of the raw file, by hand.
#[test]
fn a_known_row() {
    let Some(file) = shared("data/criteo-80k/part1.tsv") else { return };
    let mut spec = criteo(vec![file]);
    spec.schema.dense = vec!["i5".into(), "i12".into(), "i1".into()];
    spec.schema.features =
        vec![FeatureSpec::one_hot("c2", 1000), FeatureSpec::one_hot("c22", 1000)];
    spec.values = Values::Untransformed;
    let batch = open(&spec).unwrap().read(1).unwrap();
    assert_eq!(batch.dense(), [1382.0, 0.0, 1.0]);
    // C22 is missing.
    assert_eq!(batch.features()[1].bag(0), [RawId(0)]);
    let row = tessera_data::category_row(0x22277, 1000) as i64;
    assert_eq!(batch.features()[0].bag(0), [RawId(row)]);
    spec.values = Values::Verbatim;
    let batch = open(&spec).unwrap().read(1).unwrap();
    assert_eq!(batch.features()[0].bag(0), [RawId(0x22277)]);
    assert!(batch.features()[1].bag(0).is_empty());
    spec.values = Values::Training;
    let batch = open(&spec).unwrap().read(1).unwrap();
    assert_eq!(batch.dense(), [1382f32.ln_1p(), 0.0, 1f32.ln_1p()]);
}

#[test]
fn inspection_of_criteo_rows() {
    let Some(file) = shared("data/criteo-10k-raw/dac_first10k.tsv") else { return };
    let mut spec = criteo(vec![file]);
    for feature in &mut spec.schema.features {
        feature.rows = 100_000;
    }
    let report = inspect(&spec, None).unwrap();
    assert_eq!((report.samples, report.samples_total), (10_000, None));
    assert!((report.positives_share - 0.2182).abs() < 0.00005);
    // Raw integers: I2 goes down to -2 and the untransformed values are whole.
    let i2 = report.dense[1].range.unwrap();
    assert!(i2.min < 0.0 && i2.max > 100.0 && i2.max.fract() == 0.0, "{i2:?}");
    let c9 = &report.features[8];
    assert_eq!(c9.distinct, Distinct::Exact(3), "C9 has three values");
    assert!(c9.head[0].share > 0.8 && c9.head.len() == 3 && c9.head_share_error == 0.0);
    assert_eq!((c9.bag_length.min, c9.bag_length.max, c9.empty_share), (1.0, 1.0, 0.0));
    assert!(c9.id_min.unwrap() >= 1, "never missing");
    let c22 = &report.features[21];
    assert_eq!((c22.head[0].id, c22.id_min), (0, Some(0)), "mostly missing");
    let text = report.to_string();
    for part in ["10000 samples", "positives      21.82 %", "\ni13 ", "\nc26 ", "0:"] {
        assert!(text.contains(part), "{part} in\n{text}");
    }
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["features"][8]["distinct"]["exact"], 3);
    assert_eq!(inspect(&spec, Some(7)).unwrap().samples, 7);
    assert!(matches!(inspect(&spec, Some(0)), Err(DataError::NoSamples { .. })));
}

fn golden(dense: usize, features: &[(&str, u64)], format: Format, file: PathBuf) -> SourceSpec {
    let schema = Schema {
        features: features.iter().map(|(name, rows)| FeatureSpec::one_hot(*name, *rows)).collect(),
        ..schema(dense, 0)
    };
    SourceSpec::files(format, vec![file], schema)
}

#[test]
fn golden_data_sets_are_read() {
    let Some(dir) = shared("golden") else { return };
    let dcn = [("c1", 700), ("c2", 41), ("c3", 5), ("c4", 900)];
    let train = golden(13, &dcn, Format::MlperfNpy, dir.join("dlrm_dcn_adagrad/train"));
    let batch = read_all(&train);
    assert_eq!(batch.samples(), 6000);
    let hots: Vec<usize> =
        batch.features().iter().map(|feature| feature.ids().len() / 6000).collect();
    assert_eq!(hots, [2, 1, 1, 4]);
    for (feature, (_, rows)) in batch.features().iter().zip(dcn) {
        assert!(feature.ids().iter().all(|id| (0..rows as i64).contains(&id.0)));
    }
    let dot = [("a", 0), ("b", 0), ("c", 0), ("d", 0), ("e", 0)];
    let train = golden(13, &dot, Format::MlperfNpy, dir.join("dlrm_dot_rowwise_adagrad/train"));
    assert_eq!(read_all(&train).samples(), 7680);

    let jagged = [("item", 800), ("history", 800), ("user", 300), ("ctx", 11)];
    let train = golden(4, &jagged, Format::Parquet, dir.join("dlrm_jagged_adam/train.parquet"));
    let batch = read_all(&train);
    // 60 steps of 96 samples.
    assert_eq!(batch.samples(), 5760);
    let lengths: Vec<usize> = (0..5760).map(|i| batch.features()[1].bag(i).len()).collect();
    assert!(lengths.contains(&0) && lengths.iter().any(|length| *length > 2));
    for (feature, (_, rows)) in batch.features().iter().zip(jagged) {
        assert!(feature.ids().iter().all(|id| (0..rows as i64).contains(&id.0)));
    }
}
