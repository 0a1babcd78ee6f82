//! Bad input, each kind with its message: file, row, column and what to do.

use std::io::Write;

use tessera_data::{
    BatchStream, DataMetrics, DenseTransform, Event, Format, OnNanDense, RawId, SourceSpec,
    StreamOptions, SyntheticSpec, inspect, open,
};

use crate::common::{assert_error, read_all, schema};

/// A good line of criteo-tsv.
fn line(label: &str, i1: &str, c1: &str) -> String {
    format!("{label}\t{i1}{}\t{c1}{}\n", "\t".repeat(12), "\t".repeat(25))
}

fn criteo(dir: &tempfile::TempDir, name: &str, content: &[u8]) -> SourceSpec {
    let path = dir.path().join(name);
    std::fs::write(&path, content).unwrap();
    SourceSpec::files(Format::CriteoTsv, vec![path], schema(1, 1))
}

#[test]
fn criteo_lines() {
    let dir = tempfile::tempdir().unwrap();
    let good = line("1", "5", "ab");
    let check = |bad: &str, parts: &[&str]| {
        let spec = criteo(&dir, "a.tsv", format!("{good}{good}{bad}{good}").as_bytes());
        let mut all = vec!["a.tsv line 3"];
        all.extend(parts);
        assert_error(&spec, &all);
    };
    check(&good.replacen('\t', "", 1), &["39 columns, 40 expected"]);
    check(&good.replacen('\t', "\t\t", 1), &["41 columns, 40 expected"]);
    check("\n", &["0 columns, 40 expected"]);
    check(&line("yes", "5", "ab"), &["column label: `yes` is not a finite number"]);
    check(&line("", "5", "ab"), &["column label: `` is not"]);
    check(&line("NaN", "5", "ab"), &["column label: `NaN` is not a finite number"]);
    check(&line("1", "5.5", "ab"), &["column i1: `5.5` is not an integer"]);
    check(&line("1", "9223372036854775808", "ab"), &["column i1", "64 bits"]);
    check(&line("1", "5", "xyz"), &["column c1: `xyz` is not 1 to 16 hexadecimal digits"]);
    check(&line("1", "5", "0123456789abcdef0"), &["column c1: `0123456789abcdef0` is not"]);
    check(&line("1", &"9".repeat(90), "ab"), &[&format!("`{}...`", "9".repeat(40))]);
}

#[test]
fn criteo_lines_that_are_odd_but_good() {
    let dir = tempfile::tempdir().unwrap();
    let text = line("0.25", "-3", "AB") + &line("1", "+7", "");
    let windows = text.replace('\n', "\r\n");
    let expected = read_all(&criteo(&dir, "a", text.as_bytes()));
    assert_eq!(expected.labels(), [0.25, 1.0]);
    assert_eq!(expected.dense(), [0.0, 7f32.ln_1p()]);
    assert_eq!(expected.features()[0].bag(1), [RawId(0)]);
    assert_eq!(read_all(&criteo(&dir, "b", windows.as_bytes())).dense(), expected.dense());
    let unended = text.trim_end_matches('\n');
    assert_eq!(read_all(&criteo(&dir, "c", unended.as_bytes())).labels(), expected.labels());
}

#[test]
fn criteo_files() {
    let dir = tempfile::tempdir().unwrap();
    assert_error(&criteo(&dir, "empty.tsv", b""), &["empty.tsv", "the file is empty"]);
    let mut missing = criteo(&dir, "here.tsv", line("1", "", "").as_bytes());
    missing.files.push(dir.path().join("gone.tsv"));
    assert_error(&missing, &["cannot open", "gone.tsv"]);
    missing.files[1] = dir.path().to_owned();
    assert_error(&missing, &["this is a directory"]);
    assert_error(
        &criteo(&dir, "binary", &vec![7; 3 << 20]),
        &["line 1 is longer than 1048576 bytes"],
    );

    let text: String = (0..5000).map(|i| line("1", &i.to_string(), &format!("{i:x}"))).collect();
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    gz.write_all(text.as_bytes()).unwrap();
    let gz = gz.finish().unwrap();
    assert_eq!(read_all(&criteo(&dir, "whole", &gz)).samples(), 5000);
    let two = [gz.clone(), gz.clone()].concat();
    assert_eq!(read_all(&criteo(&dir, "two members", &two)).samples(), 10_000);
    for cut in [2, 9, 100, gz.len() / 2, gz.len() - 9, gz.len() - 1] {
        let spec = criteo(&dir, "cut.gz", &gz[..cut]);
        assert_error(
            &spec,
            &["cut.gz: gzip data ends early or is damaged", "fetch the file again"],
        );
    }
    // Zeros after or between members are padding, as gzip(1) takes them; other bytes are not.
    for zeros in [1, 511, 1 << 20] {
        let padding = vec![0; zeros];
        let padded = [&gz[..], &padding].concat();
        assert_eq!(read_all(&criteo(&dir, "padded", &padded)).samples(), 5000);
        let between = [&padded[..], &gz].concat();
        assert_eq!(read_all(&criteo(&dir, "between", &between)).samples(), 10_000);
        let garbage = [&padded[..], b"garbage"].concat();
        assert_error(&criteo(&dir, "garbage", &garbage), &["gzip data ends early or is damaged"]);
    }
    let mut damaged = gz.clone();
    // The checksum: what it covers can be read, but is not to be trusted.
    damaged[gz.len() - 6] ^= 0x55;
    assert_error(&criteo(&dir, "damaged", &damaged), &["gzip data ends early or is damaged"]);

    let zst = zstd::encode_all(text.as_bytes(), 3).unwrap();
    assert_eq!(read_all(&criteo(&dir, "whole", &zst)).samples(), 5000);
    for cut in [5, zst.len() / 2, zst.len() - 1] {
        let spec = criteo(&dir, "cut.zst", &zst[..cut]);
        assert_error(&spec, &["cut.zst: zstd data ends early or is damaged"]);
    }
    // Skippable frames (of pzstd, or seek tables) hold no data, before, between or after.
    let skippable = |kind: u8, bytes: u8| {
        let mut frame = vec![0x50 + kind, 0x2A, 0x4D, 0x18, bytes, 0, 0, 0];
        frame.extend((0..bytes).map(|byte| byte ^ 0x5A));
        frame
    };
    for (kind, bytes) in [(0, 4), (15, 0), (7, 200)] {
        let frame = skippable(kind, bytes);
        let file = [&frame[..], &zst, &frame, &zst, &frame].concat();
        assert_eq!(read_all(&criteo(&dir, "skippable", &file)).samples(), 10_000);
        assert_error(&criteo(&dir, "none.zst", &frame), &["the file is empty"]);
    }
    // Compressed nothing is nothing.
    let none = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::default());
    assert_error(&criteo(&dir, "none.gz", &none.finish().unwrap()), &["the file is empty"]);
}

#[test]
fn criteo_schemas() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = criteo(&dir, "a", line("1", "2", "3").as_bytes());
    spec.schema.dense[0] = "i14".into();
    assert_error(&spec, &["no dense column `i14`", "i1 to i13"]);
    spec.schema.dense[0] = "i1".into();
    spec.schema.features[0].name = "user".into();
    assert_error(&spec, &["no feature `user`", "c1 to c26"]);
    spec.schema.features[0].name = "c7".into();
    spec.schema.features[0].rows = 1;
    assert_error(&spec, &["feature c7: 1 rows", "at least 2"]);
}

/// Features are chosen by name, so the order of a schema does not matter.
#[test]
fn criteo_columns_go_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let numbers: Vec<String> = (1..=13).map(|i| i.to_string()).collect();
    let categories: Vec<String> = (1..=26).map(|i| format!("{i:x}")).collect();
    let text = format!("1\t{}\t{}\n", numbers.join("\t"), categories.join("\t"));
    let mut spec = criteo(&dir, "a", text.as_bytes());
    spec.schema = schema(13, 26);
    let plain = read_all(&spec);
    spec.schema.dense.reverse();
    spec.schema.features.reverse();
    let reversed = read_all(&spec);
    let mut dense = reversed.dense().to_vec();
    dense.reverse();
    assert_eq!(dense, plain.dense());
    let features: Vec<_> = reversed.features().iter().rev().cloned().collect();
    assert_eq!(features, plain.features());
    for (i, feature) in plain.features().iter().enumerate() {
        let row = tessera_data::category_row(i as u64 + 1, 1000);
        assert_eq!(feature.bag(0), [RawId(row as i64)]);
    }
}

fn raw(dir: &tempfile::TempDir, bytes: &[u8]) -> SourceSpec {
    let path = dir.path().join("a.raw");
    std::fs::write(&path, bytes).unwrap();
    SourceSpec::files(Format::Raw, vec![path], schema(1, 1))
}

#[test]
fn raw_files() {
    let dir = tempfile::tempdir().unwrap();
    assert_error(&raw(&dir, b""), &["a.raw", "the file is empty", "records of 12 bytes"]);
    assert_error(
        &raw(&dir, &[0; 25]),
        &["25 bytes are not a whole number of records of 12 bytes (1 are left over)", "hots (1)"],
    );
    // An id of -1 is for the table to refuse.
    let record = [1i32.to_le_bytes(), 2f32.to_le_bytes(), (-1i32).to_le_bytes()].concat();
    let batch = read_all(&raw(&dir, &record));
    assert_eq!(batch.features()[0].bag(0), [RawId(-1)]);
    assert!(batch.place(0).to_string().ends_with("a.raw row 0"));
    let mut spec = raw(&dir, &record);
    spec.schema.features[0].hots = usize::MAX;
    assert_error(&spec, &["does not fit 64 bits"]);
}

/// Once, a huge number of hots or samples asked for its memory before a row was read.
#[test]
fn huge_hots_and_batches_take_the_memory_of_what_is_there() {
    let dir = tempfile::tempdir().unwrap();
    let mut spec = criteo(&dir, "a", line("1", "2", "3").as_bytes());
    spec.schema.features[0].hots = 1_000_000_000;
    let options = StreamOptions::one_epoch(1_000_000_000);
    let mut stream = BatchStream::new(spec, options, DataMetrics::unregistered()).unwrap();
    let event = stream.next_event().unwrap();
    assert!(matches!(event, Some(Event::Batch { batch, .. }) if batch.samples() == 1));
    let mut drawn = SourceSpec::synthetic(schema(1, 1), SyntheticSpec::default());
    drawn.schema.features[0].hots = 1_000_000_000;
    assert_error(&drawn, &["feature c1 has hots 1000000000", "at most 65536"]);
}

#[test]
fn dense_values_that_are_not_finite() {
    let dir = tempfile::tempdir().unwrap();
    let records = |values: &[f32]| -> Vec<u8> {
        let words = values.iter().flat_map(|v| [0u32, v.to_bits(), 0]);
        words.flat_map(u32::to_le_bytes).collect()
    };
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut spec = raw(&dir, &records(&[1.0, 2.0, 3.0, 4.0, bad, bad, 7.0]));
        let value = format!("{bad} is not finite");
        assert_error(
            &spec,
            &["a.raw row 4, dense column i1", &value, "set data.on_nan_dense = \"zero\""],
        );
        // Inspection counts them whatever the policy is.
        let report = inspect(&spec, None).unwrap();
        let range = report.dense[0].range.unwrap();
        assert_eq!((report.dense[0].not_finite, range.min, range.max), (2, 1.0, 7.0));
        assert_eq!(report.samples_total, Some(7));
        spec.on_nan_dense = OnNanDense::Zero;
        spec.dense_transform = DenseTransform::Log1p;
        let mut reader = open(&spec).unwrap();
        let batch = reader.read(9).unwrap();
        assert_eq!(batch.dense()[3..6], [4f32.ln_1p(), 0.0, 0.0]);
        assert_eq!(reader.counts().dense_replaced, 2);
    }
}
