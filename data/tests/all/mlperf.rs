//! `mlperf-npy`: days in order, every width of numbers, deflated archives, and faults.

use std::io::Write;
use std::path::Path;

use half::f16;
use tessera_data::{Format, RawId, SourceSpec, open};
use zip::write::SimpleFileOptions;

use crate::common::{assert_error, read_all, schema};

fn npy(kind: &str, shape: &str, order: &str, data: &[u8]) -> Vec<u8> {
    let text = format!("{{'descr': '{kind}', 'fortran_order': {order}, 'shape': {shape}, }}\n");
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
    bytes.extend_from_slice(data);
    bytes
}

fn npz(path: &Path, method: zip::CompressionMethod, arrays: &[(&str, Vec<u8>)]) {
    let mut archive = zip::ZipWriter::new(std::fs::File::create(path).unwrap());
    let options = SimpleFileOptions::default().compression_method(method);
    for (name, bytes) in arrays {
        archive.start_file(*name, options).unwrap();
        archive.write_all(bytes).unwrap();
    }
    archive.finish().unwrap();
}

fn le<const N: usize>(values: &[[u8; N]]) -> Vec<u8> {
    values.concat()
}

/// A day of `rows` rows: dense = label = id = `first`, `first` + 1, ...
fn day(dir: &Path, day: &str, first: i32, rows: i32, method: zip::CompressionMethod) {
    let numbers: Vec<i32> = (first..first + rows).collect();
    let dense = le(&numbers.iter().map(|n| (*n as f32).to_le_bytes()).collect::<Vec<_>>());
    let integers = le(&numbers.iter().map(|n| n.to_le_bytes()).collect::<Vec<_>>());
    let path = |ending: &str| dir.join(format!("day_{day}_{ending}"));
    let shape = format!("({rows}, 1)");
    std::fs::write(path("dense.npy"), npy("<f4", &shape, "False", &dense)).unwrap();
    let labels = npy("<i4", &format!("({rows},)"), "False", &integers);
    std::fs::write(path("labels.npy"), labels).unwrap();
    npz(
        &path("sparse_multi_hot.npz"),
        method,
        &[("0.npy", npy("<i4", &shape, "False", &integers))],
    );
}

fn spec(dir: &Path) -> SourceSpec {
    SourceSpec::files(Format::MlperfNpy, vec![dir.to_owned()], schema(1, 1))
}

#[test]
fn days_come_in_the_order_of_their_numbers() {
    let dir = tempfile::tempdir().unwrap();
    for (method, deflated) in
        [(zip::CompressionMethod::Stored, false), (zip::CompressionMethod::Deflated, true)]
    {
        day(dir.path(), "10", 7, 3000, method);
        day(dir.path(), "2", 2, 5, method);
        day(dir.path(), "1", 0, 2, method);
        std::fs::write(dir.path().join("readme.txt"), "not data").unwrap();
        let batch = read_all(&spec(dir.path()));
        let expected: Vec<f32> = (0..3007).map(|n| n as f32).collect();
        assert_eq!(batch.labels(), expected, "deflated: {deflated}");
        assert_eq!(batch.dense(), expected);
        assert_eq!(batch.features()[0].ids()[3000], RawId(3000));
        assert!(batch.place(7).to_string().ends_with("day_10 row 0"));
        let mut reader = open(&spec(dir.path())).unwrap();
        assert_eq!(reader.total_samples(), Some(3007));
        assert_eq!(reader.skip(1).unwrap(), 1);
        assert_eq!(reader.read(1).unwrap().labels(), [1.0]);
        assert_eq!(reader.skip(2500).unwrap(), 2500);
        assert_eq!(reader.read(1).unwrap().features()[0].ids(), [RawId(2502)]);
        assert_eq!(reader.skip(5000).unwrap(), 504);
    }
}

/// Rewrites one file of a good day of three rows.
fn with(ending: &str, bytes: &[u8]) -> (tempfile::TempDir, SourceSpec) {
    let dir = tempfile::tempdir().unwrap();
    day(dir.path(), "0", 0, 3, zip::CompressionMethod::Stored);
    std::fs::write(dir.path().join(format!("day_0_{ending}")), bytes).unwrap();
    let spec = spec(dir.path());
    (dir, spec)
}

fn with_ids(arrays: &[(&str, Vec<u8>)]) -> (tempfile::TempDir, SourceSpec) {
    let (dir, spec) = with("sparse_multi_hot.npz", b"");
    let path = dir.path().join("day_0_sparse_multi_hot.npz");
    npz(&path, zip::CompressionMethod::Stored, arrays);
    (dir, spec)
}

#[test]
fn every_width_of_numbers_is_read() {
    let halves = le(&[1.5f32, -2.0, 0.25].map(|v| f16::from_f32(v).to_le_bytes()));
    let (_dir, spec) = with("dense.npy", &npy("<f2", "(3, 1)", "False", &halves));
    assert_eq!(read_all(&spec).dense(), [1.5, -2.0, 0.25]);
    let doubles = le(&[1.5f64, -2.0, 0.1].map(f64::to_le_bytes));
    let (_dir, spec) = with("dense.npy", &npy("<f8", "(3, 1)", "False", &doubles));
    assert_eq!(read_all(&spec).dense(), [1.5, -2.0, 0.1]);
    // One column is in both orders at once.
    let (_dir, spec) = with("dense.npy", &npy("<f8", "(3, 1)", "True", &doubles));
    assert_eq!(read_all(&spec).dense(), [1.5, -2.0, 0.1]);

    let labels: [(&str, Vec<u8>); 6] = [
        ("|b1", vec![1, 0, 1]),
        ("|u1", vec![1, 0, 1]),
        ("<i2", le(&[1i16, 0, 1].map(i16::to_le_bytes))),
        ("<u4", le(&[1u32, 0, 1].map(u32::to_le_bytes))),
        ("<u8", le(&[1u64, 0, 1].map(u64::to_le_bytes))),
        ("<f8", doubles_of(&[1.0, 0.0, 1.0])),
    ];
    for (kind, bytes) in labels {
        let (_dir, spec) = with("labels.npy", &npy(kind, "(3,)", "False", &bytes));
        assert_eq!(read_all(&spec).labels(), [1.0, 0.0, 1.0], "{kind}");
    }
    let ids: [(&str, Vec<u8>, [i64; 6]); 6] = [
        ("|i1", vec![0, 1, 2, 255, 128, 127], [0, 1, 2, -1, -128, 127]),
        ("|u1", vec![0, 1, 2, 255, 128, 127], [0, 1, 2, 255, 128, 127]),
        ("<i2", le(&[0i16, 1, 2, -1, i16::MIN, 7].map(i16::to_le_bytes)), [0, 1, 2, -1, -32768, 7]),
        ("<u2", le(&[0u16, 1, 2, 3, u16::MAX, 7].map(u16::to_le_bytes)), [0, 1, 2, 3, 65535, 7]),
        (
            "<u4",
            le(&[0u32, 1, 2, 3, u32::MAX, 7].map(u32::to_le_bytes)),
            [0, 1, 2, 3, 4294967295, 7],
        ),
        (
            "<i8",
            le(&[0i64, 1, -1, 3, i64::MAX, 7].map(i64::to_le_bytes)),
            [0, 1, -1, 3, i64::MAX, 7],
        ),
    ];
    for (kind, bytes, expected) in ids {
        let (_dir, spec) = with_ids(&[("0.npy", npy(kind, "(3, 2)", "False", &bytes))]);
        let batch = read_all(&spec);
        let found: Vec<i64> = batch.features()[0].ids().iter().map(|id| id.0).collect();
        assert_eq!(found, expected, "{kind}");
        assert_eq!(batch.features()[0].bag(1).len(), 2);
    }
}

fn doubles_of(values: &[f64]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

#[test]
fn faults_are_named() {
    let fails = |(_dir, spec): (tempfile::TempDir, SourceSpec), parts: &[&str]| {
        assert_error(&spec, parts);
    };
    let dense = doubles_of(&[0.0; 6]);
    let ids = |kind: &str, rows: usize, bytes: usize| {
        npy(kind, &format!("({rows}, 1)"), "False", &vec![0; bytes])
    };

    let two = npy("<f8", "(3, 2)", "False", &dense);
    fails(with("dense.npy", &two), &["day_0_dense.npy", "2 columns for 1 dense features"]);
    let fortran = npy("<f8", "(3, 2)", "True", &dense);
    fails(with("dense.npy", &fortran), &["day_0_dense.npy", "Fortran order", "save it in C order"]);
    let cut = npy("<f8", "(7, 1)", "False", &dense);
    fails(with("dense.npy", &cut), &["shape (7, 1) of type <f8 needs", "cut short"]);
    let huge = npy("<f8", "(9223372036854775807, 16)", "False", &dense);
    fails(with("dense.npy", &huge), &["more than 2^64"]);
    let cube = npy("<f8", "(3, 2, 1)", "False", &dense);
    fails(with("dense.npy", &cube), &["shape [3, 2, 1] has not 1 or 2 dimensions"]);
    fails(with("dense.npy", &npy(">f8", "(6, 1)", "False", &dense)), &["big-endian"]);
    fails(with("dense.npy", &npy("<U8", "(6, 1)", "False", &dense)), &["type <U8 is not a number"]);
    fails(with("dense.npy", b"hello"), &["day_0_dense.npy", "not a readable npy header"]);

    let labels = npy("<f8", "(6,)", "False", &dense);
    fails(with("labels.npy", &labels), &["day_0_labels.npy", "6 rows", "dense.npy has 3"]);
    let wide = npy("<f8", "(3, 2)", "False", &dense);
    fails(with("labels.npy", &wide), &["day_0_labels.npy", "2 columns; labels have one"]);
    let odd = npy("<f8", "(3,)", "False", &doubles_of(&[0.0, f64::NAN, 1.0]));
    fails(with("labels.npy", &odd), &["day_0 row 1, column label: NaN is not finite"]);

    fails(with("sparse_multi_hot.npz", b"hello"), &["multi_hot.npz", "not a readable npz"]);
    fails(
        with_ids(&[("0.npy", ids("<i4", 3, 12)), ("1.npy", ids("<i4", 3, 12))]),
        &["2 arrays (0.npy, 1.npy) for 1 features"],
    );
    fails(with_ids(&[("arr_0.npy", ids("<i4", 3, 12))]), &["1 arrays (arr_0.npy) for 1 features"]);
    fails(with_ids(&[("0.npy", ids("<i4", 2, 8))]), &["array 0.npy: 2 rows, but", "has 3"]);
    fails(with_ids(&[("0.npy", ids("<f4", 3, 12))]), &["array 0.npy: ids of c1 are not integers"]);
    let above = le(&[0u64, u64::MAX, 3].map(u64::to_le_bytes));
    fails(
        with_ids(&[("0.npy", npy("<u8", "(3, 1)", "False", &above))]),
        &["day_0 row 1, column c1: id 18446744073709551615 is above 2^63 - 1"],
    );

    let empty = tempfile::tempdir().unwrap();
    assert_error(&spec(empty.path()), &["no files day_N_dense.npy"]);
    day(empty.path(), "3", 0, 3, zip::CompressionMethod::Stored);
    std::fs::remove_file(empty.path().join("day_3_labels.npy")).unwrap();
    assert_error(&spec(empty.path()), &["cannot open", "day_3_labels.npy"]);
    assert_error(&spec(&empty.path().join("none")), &["cannot list directory", "none"]);
}

/// The largest archives need Zip64, whose marks are there in small ones too when asked for.
#[test]
fn zip64_archives_are_read() {
    let (dir, spec) = with_ids(&[]);
    let file = std::fs::File::create(dir.path().join("day_0_sparse_multi_hot.npz")).unwrap();
    let mut archive = zip::ZipWriter::new(file);
    let options = SimpleFileOptions::default()
        .compression_method(zip::CompressionMethod::Stored)
        .large_file(true);
    archive.start_file("0.npy", options).unwrap();
    archive.write_all(&npy("|u1", "(3, 1)", "False", &[4, 5, 6])).unwrap();
    archive.finish().unwrap();
    assert_eq!(read_all(&spec).features()[0].ids(), [4, 5, 6].map(RawId));
}

/// A damaged stream is told by array and row: the decoder's own words name neither.
#[test]
fn damaged_archives_name_array_and_row() {
    let dir = tempfile::tempdir().unwrap();
    let rows = 3000u64;
    let noise: Vec<u8> =
        (0..rows).flat_map(|row| tessera_data::splitmix64(row).to_le_bytes()).collect();
    day(dir.path(), "0", 0, rows as i32, zip::CompressionMethod::Deflated);
    let path = dir.path().join("day_0_sparse_multi_hot.npz");
    let array = npy("<i8", &format!("({rows}, 1)"), "False", &noise);
    npz(&path, zip::CompressionMethod::Deflated, &[("0.npy", array)]);
    read_all(&spec(dir.path()));
    // Noise is stored in blocks of a few bytes of header: an end of stream in the middle.
    let mut bytes = std::fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 9000].fill(0xFF);
    std::fs::write(&path, &bytes).unwrap();
    let outcome = open(&spec(dir.path())).and_then(|mut reader| reader.read(3000));
    match outcome {
        Ok(_) => panic!("the damage was not met"),
        Err(error) => {
            let error = error.to_string();
            assert!(
                error.contains("day_0_sparse_multi_hot.npz: array 0.npy: cannot read on from row "),
                "{error}"
            );
        }
    }
}
