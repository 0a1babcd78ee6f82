//! What is written is read back, bit for bit, in every format and through conversions.

use proptest::collection::vec;
use proptest::prelude::*;
use tessera_data::{
    Batch, BatchParts, DenseTransform, FeatureSpec, Format, Jagged, RawId, Schema, SourceSpec,
    SyntheticDense, SyntheticSpec, Values, convert, create, log1p, open,
};

use crate::common::{assert_same, jagged, plain_batch, ragged, read_all, schema, write};

fn parts(schema: &Schema, dense: Vec<f32>, labels: Vec<f32>, features: Vec<Jagged>) -> BatchParts {
    BatchParts {
        dense_features: schema.dense.len(),
        dense,
        labels,
        sample_weights: None,
        groups: None,
        features,
        provenance: None,
    }
}

fn finite() -> impl Strategy<Value = f32> {
    prop::num::f32::NORMAL | prop::num::f32::SUBNORMAL | prop::num::f32::ZERO
}

/// Samples with bags of exactly `hots` ids of 32 bits, as `raw` and `mlperf-npy` need them.
fn fixed_hots() -> impl Strategy<Value = (Schema, Batch)> {
    (0usize..20, 0usize..3, vec(0usize..4, 0..3)).prop_flat_map(|(samples, dense, hots)| {
        let mut schema = schema(dense, hots.len());
        for (feature, hots) in schema.features.iter_mut().zip(&hots) {
            feature.hots = *hots;
        }
        let bags: Vec<_> = hots
            .iter()
            .map(|hots| vec(vec(any::<i32>().prop_map(i64::from), *hots), samples))
            .collect();
        let labels = vec(any::<i16>().prop_map(f32::from), samples);
        (vec(finite(), samples * dense), labels, bags).prop_map(move |(dense, labels, bags)| {
            let features = bags.iter().map(|bags| jagged(bags)).collect();
            (schema.clone(), Batch::new(parts(&schema, dense, labels, features)).unwrap())
        })
    })
}

/// Samples with everything that only `parquet` can hold.
fn anything() -> impl Strategy<Value = (Schema, Batch)> {
    (0usize..20, any::<[bool; 3]>()).prop_flat_map(|(samples, [weighted, weights, groups])| {
        let mut schema = schema(2, 2);
        schema.features[1].weighted = weighted;
        schema.sample_weight = weights.then(|| "w".to_owned());
        schema.group = groups.then(|| "query".to_owned());
        let columns = (
            vec(finite(), samples * 2),
            vec(finite(), samples),
            ragged(samples, any::<i64>()),
            vec(vec((any::<i64>(), finite()), 0..4), samples),
            vec(0.0f32..5.0, samples),
            vec(any::<i64>(), samples),
        );
        columns.prop_map(move |(dense, labels, first, second, sample_weights, query)| {
            let lengths: Vec<u64> = second.iter().map(|bag| bag.len() as u64).collect();
            let pairs = second.concat();
            let ids = pairs.iter().map(|pair| RawId(pair.0)).collect();
            let weights_of_ids = weighted.then(|| pairs.iter().map(|pair| pair.1).collect());
            let second = Jagged::from_lengths(&lengths, ids, weights_of_ids).unwrap();
            let mut parts = parts(&schema, dense, labels, vec![jagged(&first), second]);
            parts.sample_weights = weights.then_some(sample_weights);
            parts.groups = groups.then_some(query);
            (schema.clone(), Batch::new(parts).unwrap())
        })
    })
}

/// Samples that `criteo-tsv` can hold: whole numbers, bags of at most one id.
fn criteo() -> impl Strategy<Value = (Schema, Batch)> {
    (0usize..20).prop_flat_map(|samples| {
        let mut schema = schema(2, 2);
        // Not the columns' own order: they are chosen by name.
        schema.dense = vec!["i13".into(), "i2".into()];
        schema.features = ["c26", "c4"].map(|name| FeatureSpec::one_hot(name, 50)).to_vec();
        let bag = || vec(vec(0..=i64::MAX, 0..2), samples);
        let whole = any::<i64>()
            .prop_map(|value| value as f32)
            .prop_filter("below 2^63", |value| *value < 9.2e18);
        (vec(whole, samples * 2), vec(finite(), samples), bag(), bag()).prop_map(
            move |(dense, labels, a, b)| {
                let features = vec![jagged(&a), jagged(&b)];
                (schema.clone(), Batch::new(parts(&schema, dense, labels, features)).unwrap())
            },
        )
    })
}

/// Writes in two pieces.
fn write_pieces(format: Format, path: &std::path::Path, schema: &Schema, batch: &Batch) {
    let cut = batch.samples() / 3;
    write(format, path, schema, &[batch.slice(0..cut), batch.slice(cut..batch.samples())]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn fixed_hots_go_through_raw_mlperf_and_parquet((schema, batch) in fixed_hots()) {
        let dir = tempfile::tempdir().unwrap();
        let formats = [Format::Raw, Format::MlperfNpy, Format::Parquet];
        for from in formats {
            // An empty raw file is refused, since a file without bytes tells of a failed copy.
            if batch.samples() == 0 && from == Format::Raw {
                continue;
            }
            let path = dir.path().join(from.name());
            write_pieces(from, &path, &schema, &batch);
            let source = SourceSpec::files(from, vec![path], schema.clone());
            assert_same(&read_all(&source), &batch);
            for to in formats {
                let path = dir.path().join(format!("{from}-{to}"));
                let result = convert(&source, to, &path, |_| ());
                if batch.samples() == 0 {
                    prop_assert!(result.unwrap_err().to_string().contains("no samples"));
                    prop_assert!(!path.exists() || to == Format::MlperfNpy);
                    continue;
                }
                prop_assert_eq!(result.unwrap(), batch.samples() as u64);
                let copy = SourceSpec::files(to, vec![path], schema.clone());
                assert_same(&read_all(&copy), &batch);
            }
        }
    }

    #[test]
    fn parquet_holds_anything((schema, batch) in anything()) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.parquet");
        write_pieces(Format::Parquet, &path, &schema, &batch);
        let source = SourceSpec::files(Format::Parquet, vec![path], schema.clone());
        assert_same(&read_all(&source), &batch);
    }

    #[test]
    fn criteo_lines_come_back_in_every_compression((schema, batch) in criteo()) {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a.tsv", "a.tsv.gz", "a.tsv.zst"] {
            let path = dir.path().join(name);
            write_pieces(Format::CriteoTsv, &path, &schema, &batch);
            let mut source = SourceSpec::files(Format::CriteoTsv, vec![path], schema.clone());
            source.values = Values::Verbatim;
            if batch.samples() == 0 {
                let empty = open(&source).and_then(|mut reader| reader.read(1)).unwrap_err();
                prop_assert!(empty.to_string().contains("the file is empty"));
                continue;
            }
            assert_same(&read_all(&source), &batch);
        }
    }

    #[test]
    fn a_copy_of_criteo_data_trains_as_the_original((schema, batch) in criteo()) {
        prop_assume!(batch.samples() > 0);
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.tsv");
        let labels = batch.labels().iter().map(|label| f32::from(*label > 0.0)).collect();
        let batch = Batch::new(BatchParts { labels, ..batch.into_parts() }).unwrap();
        write(Format::CriteoTsv, &path, &schema, std::slice::from_ref(&batch));
        let source = SourceSpec::files(Format::CriteoTsv, vec![path], schema.clone());
        let trained = read_all(&source);
        for (value, raw) in trained.dense().iter().zip(batch.dense()) {
            prop_assert_eq!(value.to_bits(), log1p(*raw).to_bits());
        }
        for to in [Format::Raw, Format::MlperfNpy, Format::Parquet, Format::CriteoTsv] {
            let path = dir.path().join(format!("copy-{to}"));
            convert(&source, to, &path, |_| ()).unwrap();
            let mut copy = SourceSpec::files(to, vec![path], schema.clone());
            copy.dense_transform = DenseTransform::Log1p;
            assert_same(&read_all(&copy), &trained);
        }
    }
}

/// Categories of 64 bits keep their values from criteo-tsv to criteo-tsv, above 2^63 too.
#[test]
fn wide_categories_survive_a_copy() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.tsv");
    let line = format!("1{}\tFFFFFFFFFFFFFFFF{}\n", "\t".repeat(13), "\t".repeat(25));
    std::fs::write(&path, &line).unwrap();
    let source = SourceSpec::files(Format::CriteoTsv, vec![path], schema(1, 2));
    let copied = dir.path().join("b.tsv");
    convert(&source, Format::CriteoTsv, &copied, |_| ()).unwrap();
    let text = std::fs::read_to_string(&copied).unwrap();
    // The columns that the schema does not name are left out; the missing integer i1 is a 0.
    assert_eq!(text, line.replacen("1\t", "1\t0", 1).to_lowercase());
}

#[test]
fn synthetic_data_can_be_stored_in_every_format() {
    let dir = tempfile::tempdir().unwrap();
    let schema = schema(3, 4);
    let settings = SyntheticSpec {
        samples: 5000,
        first_sample: 77,
        dense: SyntheticDense::Counts,
        ..SyntheticSpec::default()
    };
    let source = SourceSpec::synthetic(schema.clone(), settings);
    let batch = read_all(&source);
    assert_eq!(batch.samples(), 5000);
    assert_eq!(batch.place(5).to_string(), "sample 82");
    for format in [Format::CriteoTsv, Format::MlperfNpy, Format::Raw, Format::Parquet] {
        let path = dir.path().join(format.name());
        let mut told = Vec::new();
        assert_eq!(convert(&source, format, &path, |n| told.push(n)).unwrap(), 5000);
        assert_eq!(told, [4096, 5000]);
        let mut copy = SourceSpec::files(format, vec![path], schema.clone());
        copy.values = Values::Verbatim;
        assert_same(&read_all(&copy), &batch);
    }
    assert!(create(Format::Synthetic, dir.path(), &schema).is_err());
}

#[test]
fn a_writer_leaves_nothing_behind_unless_it_finishes() {
    let dir = tempfile::tempdir().unwrap();
    let schema = schema(1, 1);
    let batch = plain_batch(&schema, 0, 10);
    for format in [Format::CriteoTsv, Format::MlperfNpy, Format::Raw, Format::Parquet] {
        let path = dir.path().join(format.name());
        let mut writer = create(format, &path, &schema).unwrap();
        writer.write(&batch).unwrap();
        drop(writer);
        let left: Vec<_> = walk(dir.path());
        assert!(left.is_empty(), "{left:?}");
        write(format, &path, &schema, std::slice::from_ref(&batch));
        let error = create(format, &path, &schema).err().unwrap().to_string();
        assert!(error.contains("exists already"), "{error}");
        let left: Vec<_> = walk(dir.path());
        assert!(left.iter().all(|name| !name.ends_with(".part")), "{left:?}");
        std::fs::remove_file(&path).or_else(|_| std::fs::remove_dir_all(&path)).unwrap();
    }
}

/// The files below a directory.
fn walk(directory: &std::path::Path) -> Vec<String> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(walk(&path));
        } else {
            files.push(path.display().to_string());
        }
    }
    files
}

#[test]
fn what_a_format_cannot_hold_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let schema = schema(1, 1);
    let make = |dense: f32, label: f32, bags: &[Vec<i64>]| {
        let n = bags.len();
        let features = vec![jagged(bags)];
        Batch::new(parts(&schema, vec![dense; n], vec![label; n], features)).unwrap()
    };
    let fails = |format: Format, batch: &Batch, reason: &str| {
        let path = dir.path().join("x");
        let mut writer = create(format, &path, &schema).unwrap();
        let error = writer.write(batch).unwrap_err().to_string();
        assert_eq!(error, format!("{format} cannot hold {reason}"));
    };
    let one = vec![vec![3]];
    let two = vec![vec![3], vec![4, 5]];
    fails(
        Format::CriteoTsv,
        &make(0.5, 1.0, &one),
        "sample 0, i1: dense value 0.5 is not an integer of 64 bits",
    );
    fails(
        Format::CriteoTsv,
        &make(1e20, 1.0, &one),
        "sample 0, i1: dense value 100000000000000000000 is not an integer of 64 bits",
    );
    fails(
        Format::CriteoTsv,
        &make(1.0, 1.0, &two),
        "sample 1, c1: a bag of 2 ids; a column holds one",
    );
    fails(Format::CriteoTsv, &make(1.0, 1.0, &[vec![-1]]), "sample 0, c1: id -1 is negative");
    fails(
        Format::CriteoTsv,
        &make(1.0, f32::NAN, &one),
        "sample 0, label: label NaN is not finite",
    );
    fails(
        Format::Raw,
        &make(1.0, 0.5, &one),
        "sample 0, label: label 0.5 is not an integer of 32 bits",
    );
    fails(
        Format::Raw,
        &make(1.0, 3e9, &one),
        "sample 0, label: label 3000000000 is not an integer of 32 bits",
    );
    fails(
        Format::Raw,
        &make(1.0, 1.0, &two),
        "sample 1, c1: a bag of 2 ids; the feature's hots are 1 in every record",
    );
    fails(
        Format::Raw,
        &make(1.0, 1.0, &[vec![1 << 31]]),
        "sample 0, c1: id 2147483648 does not fit 32 bits",
    );
    fails(
        Format::MlperfNpy,
        &make(1.0, 1.0, &two),
        "sample 1, c1: a bag of 2 ids after bags of 1; all bags of a feature need the same number",
    );
    fails(
        Format::MlperfNpy,
        &make(1.0, 1.0, &[vec![1 << 31]]),
        "sample 0, c1: id 2147483648 does not fit the 32 bits that a feature of 1000 rows gets",
    );
    fails(
        Format::MlperfNpy,
        &make(1.0, 0.5, &one),
        "sample 0, label: label 0.5 is not an integer of 32 bits",
    );

    let path = dir.path().join("y");
    let mut weighted = schema.clone();
    weighted.features[0].weighted = true;
    let error = create(Format::Raw, &path, &weighted).err().unwrap().to_string();
    assert_eq!(error, "format raw has no place for weights of ids (feature c1); use parquet");
    let mut other = schema.clone();
    other.dense[0] = "price".into();
    let error = create(Format::CriteoTsv, &path, &other).err().unwrap().to_string();
    assert_eq!(error, "criteo-tsv has no column `price`; it has i1 to i13 and c1 to c26");
    let error = create(Format::Parquet, &path, &weighted).unwrap().write(&make(1.0, 1.0, &one));
    assert!(error.unwrap_err().to_string().contains("feature c1: weights where none"));
}

/// Ids of tables beyond 2^31 rows are written with 64 bits.
#[test]
fn mlperf_widens_ids_for_large_tables() {
    let dir = tempfile::tempdir().unwrap();
    let mut schema = schema(0, 1);
    schema.features[0].rows = (1 << 31) + 1;
    let batch =
        Batch::new(parts(&schema, vec![], vec![1.0], vec![jagged(&[vec![1 << 31, -1]])])).unwrap();
    let path = dir.path().join("d");
    write(Format::MlperfNpy, &path, &schema, std::slice::from_ref(&batch));
    assert_same(&read_all(&SourceSpec::files(Format::MlperfNpy, vec![path], schema)), &batch);
}
