//! What the tests share.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use tessera_data::{
    Batch, BatchParts, DataError, FeatureSpec, Format, Jagged, RawId, Schema, SourceSpec, create,
    open,
};

/// A schema of dense i1.. and one-hot features c1.. of 1,000 rows.
pub fn schema(dense: usize, features: usize) -> Schema {
    Schema {
        dense: (1..=dense).map(|i| format!("i{i}")).collect(),
        features: (1..=features).map(|i| FeatureSpec::one_hot(format!("c{i}"), 1000)).collect(),
        label: "label".into(),
        sample_weight: None,
        group: None,
    }
}

/// Bags of ids without weights.
pub fn jagged(bags: &[Vec<i64>]) -> Jagged {
    let lengths: Vec<u64> = bags.iter().map(|bag| bag.len() as u64).collect();
    Jagged::from_lengths(&lengths, bags.concat().into_iter().map(RawId).collect(), None).unwrap()
}

/// A batch of one-hot samples that every format can hold, told apart by its numbers from `first`.
pub fn plain_batch(schema: &Schema, first: usize, samples: usize) -> Batch {
    let number = |sample: usize, column: usize| ((first + sample) * 7 + column * 3) % 900;
    let rows = 0..samples;
    let dense =
        rows.clone().flat_map(|s| (0..schema.dense.len()).map(move |c| number(s, c) as f32));
    let features = (0..schema.features.len()).map(|c| {
        let bags: Vec<Vec<i64>> = rows.clone().map(|s| vec![number(s, 50 + c) as i64]).collect();
        jagged(&bags)
    });
    Batch::new(BatchParts {
        dense_features: schema.dense.len(),
        dense: dense.collect(),
        labels: rows.clone().map(|s| f32::from((first + s).is_multiple_of(3))).collect(),
        sample_weights: None,
        groups: None,
        features: features.collect(),
        provenance: None,
    })
    .unwrap()
}

/// Writes batches to a new file.
pub fn write(format: Format, path: &Path, schema: &Schema, batches: &[Batch]) {
    let mut writer = create(format, path, schema).unwrap();
    for batch in batches {
        writer.write(batch).unwrap();
    }
    writer.finish().unwrap();
}

/// All samples of a source in one batch.
pub fn read_all(spec: &SourceSpec) -> Batch {
    let mut reader = open(spec).unwrap();
    let batch = reader.read(1_000_000).unwrap();
    assert_eq!(reader.read(1).unwrap().samples(), 0);
    if let Some(total) = reader.total_samples() {
        assert_eq!(total, batch.samples() as u64);
    }
    batch
}

/// The first error of opening and reading a source.
pub fn error_of(spec: &SourceSpec) -> DataError {
    let mut reader = match open(spec) {
        Ok(reader) => reader,
        Err(error) => return error,
    };
    loop {
        match reader.read(3) {
            Ok(batch) => assert!(batch.samples() > 0, "no error in {spec:?}"),
            Err(error) => {
                let again = reader.read(1).unwrap_err();
                assert!(matches!(again, DataError::Stopped { .. }), "{again}");
                return error;
            }
        }
    }
}

/// Asserts that the message of a source's first error holds every part.
pub fn assert_error(spec: &SourceSpec, parts: &[&str]) {
    let message = error_of(spec).to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
}

/// Asserts that two batches hold the same samples, bit for bit, wherever they came from.
#[track_caller]
pub fn assert_same(a: &Batch, b: &Batch) {
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(a.samples(), b.samples());
    assert_eq!(a.dense_features(), b.dense_features());
    assert_eq!(bits(a.dense()), bits(b.dense()));
    assert_eq!(bits(a.labels()), bits(b.labels()));
    assert_eq!(a.sample_weights().map(bits), b.sample_weights().map(bits));
    assert_eq!(a.groups(), b.groups());
    assert_eq!(a.features(), b.features());
}

/// The folder of shared data, if it is there. In CI it must be.
pub fn shared(part: &str) -> Option<PathBuf> {
    let root = std::env::var_os("TESSERA_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let path = root.join(part);
    if path.exists() {
        return Some(path);
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "{} is missing", path.display());
    println!("skipped: {} is missing", path.display());
    None
}

/// Bags of any ids for `samples` samples.
pub fn ragged(
    samples: usize,
    id: impl Strategy<Value = i64>,
) -> impl Strategy<Value = Vec<Vec<i64>>> {
    prop::collection::vec(prop::collection::vec(id, 0..4), samples)
}
