//! The criteo-tsv reader against a tiny and obvious parser: the same samples or the same error,
//! over lines good and broken, with any ends, in batches of any size, plain and compressed.

use std::path::Path;

use proptest::prelude::*;
use tessera_data::{
    Format, RawId, Reader, Schema, SourceSpec, Values, category_row, log1p, open, splitmix64,
};

use crate::common::schema;

const INTEGERS: usize = 13;
const CATEGORIES: usize = 26;
const COLUMNS: usize = 1 + INTEGERS + CATEGORIES;

/// What a reader gives: samples as bits of the label, bits of the dense values and bags of ids.
type Samples = Vec<(u32, Vec<u32>, Vec<Vec<i64>>)>;

/// All features, the last ones first, so that an error is that of the schema's first column.
fn spec(path: &Path, values: Values) -> SourceSpec {
    let mut schema: Schema = schema(INTEGERS, CATEGORIES);
    schema.dense.reverse();
    schema.features.reverse();
    for (i, feature) in schema.features.iter_mut().enumerate() {
        feature.rows = [2, 3, 1000, 1 << 32, u64::MAX][i % 5];
    }
    SourceSpec { values, ..SourceSpec::files(Format::CriteoTsv, vec![path.into()], schema) }
}

/// The samples of `text`, or how the message of the first error goes on after the file's name.
fn naive(text: &[u8], spec: &SourceSpec) -> Result<Samples, String> {
    let mut samples = Vec::new();
    let mut lines: Vec<&[u8]> = text.split(|byte| *byte == b'\n').collect();
    if lines.last().is_some_and(|line| line.is_empty()) {
        lines.pop();
    }
    for (i, line) in lines.iter().enumerate() {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        let fields: Vec<&[u8]> = match line.is_empty() {
            true => Vec::new(),
            false => line.split(|byte| *byte == b'\t').collect(),
        };
        if fields.len() != COLUMNS {
            return Err(format!(" line {}: {} columns, 40 expected", i + 1, fields.len()));
        }
        let bad = |column: &str, field: &[u8], needed: &str| {
            let shown = String::from_utf8_lossy(&field[..field.len().min(40)]).into_owned();
            let more = if field.len() > 40 { "..." } else { "" };
            format!(" line {}, column {column}: `{shown}{more}` is not {needed}", i + 1)
        };
        let label: Option<f32> = text_of(fields[0]).and_then(|text| text.parse().ok());
        let label = label
            .filter(|label| label.is_finite())
            .ok_or_else(|| bad("label", fields[0], "a finite number"))?;
        let mut dense = Vec::new();
        for name in &spec.schema.dense {
            let field = fields[name[1..].parse::<usize>().unwrap()];
            let value = match field {
                b"" => Some(0),
                field => text_of(field).and_then(|text| text.parse::<i64>().ok()),
            };
            let value = value.ok_or_else(|| bad(name, field, "an integer of 64 bits"))? as f32;
            let transformed = if spec.values == Values::Verbatim { value } else { log1p(value) };
            dense.push(transformed.to_bits());
        }
        let mut bags = Vec::new();
        for feature in &spec.schema.features {
            let field = fields[INTEGERS + feature.name[1..].parse::<usize>().unwrap()];
            let hex = field.iter().all(u8::is_ascii_hexdigit) && field.len() <= 16;
            let value = match (hex, field) {
                (true, b"") => None,
                (true, field) => Some(u64::from_str_radix(text_of(field).unwrap(), 16).unwrap()),
                _ => return Err(bad(&feature.name, field, "1 to 16 hexadecimal digits")),
            };
            bags.push(match (value, spec.values) {
                (Some(value), Values::Verbatim) => vec![value as i64],
                (None, Values::Verbatim) => vec![],
                (Some(value), _) => vec![category_row(value, feature.rows) as i64],
                (None, _) => vec![0],
            });
        }
        samples.push((label.to_bits(), dense, bags));
    }
    Ok(samples)
}

fn text_of(field: &[u8]) -> Option<&str> {
    std::str::from_utf8(field).ok()
}

/// The samples that a reader gives in batches of `batch`, or its error's message.
fn read(spec: &SourceSpec, batch: usize) -> Result<Samples, String> {
    let message = |error: tessera_data::DataError| error.to_string();
    let mut reader: Box<dyn Reader> = open(spec).map_err(message)?;
    let mut samples = Vec::new();
    loop {
        let found = reader.read(batch).map_err(message)?;
        if found.samples() == 0 {
            return Ok(samples);
        }
        for i in 0..found.samples() {
            assert_eq!(found.place(i).row, samples.len() as u64);
            let ids = |bag: &[RawId]| bag.iter().map(|id| id.0).collect::<Vec<_>>();
            samples.push((
                found.labels()[i].to_bits(),
                found.dense_row(i).iter().map(|value| value.to_bits()).collect(),
                found.features().iter().map(|feature| ids(feature.bag(i))).collect(),
            ));
        }
    }
}

/// Asserts that the reader does with `text`, stored as `stored`, as the naive parser does.
fn check(text: &[u8], stored: &[u8], batch: usize) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), stored).unwrap();
    for values in [Values::Training, Values::Verbatim] {
        let spec = spec(file.path(), values);
        match (naive(text, &spec), read(&spec, batch)) {
            (Ok(expected), Ok(found)) => assert_eq!(found, expected),
            (Err(expected), Err(found)) => {
                let name = file.path().display();
                assert!(found.starts_with(&format!("{name}{expected}")), "{found}\n{expected}");
            }
            (expected, found) => panic!("{expected:?}\n{found:?}"),
        }
    }
}

fn check_compressed(text: &[u8], batch: usize) {
    check(text, text, batch);
    check(text, &zstd::encode_all(text, 1).unwrap(), batch);
    let mut gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    std::io::Write::write_all(&mut gz, text).unwrap();
    check(text, &gz.finish().unwrap(), batch);
}

fn label() -> impl Strategy<Value = String> {
    prop_oneof![9 => Just("0".into()), 9 => Just("1".into()), 1 => Just("0.25".into()),
        1 => Just("-1e3".into()), 1 => any::<f32>().prop_map(|label| label.abs().min(9e9).to_string())]
}

fn integer() -> impl Strategy<Value = String> {
    prop_oneof![4 => Just(String::new()), 8 => (-3i64..100_000).prop_map(|x| x.to_string()),
        1 => any::<i64>().prop_map(|x| x.to_string()), 1 => (0u64..1 << 34).prop_map(|x| x.to_string()),
        1 => (0u32..1000).prop_map(|x| format!("+{x}")), 1 => (0u32..9).prop_map(|x| format!("{x:012}"))]
}

fn category() -> impl Strategy<Value = String> {
    prop_oneof![4 => Just(String::new()), 12 => any::<u32>().prop_map(|x| format!("{x:08x}")),
        1 => any::<u32>().prop_map(|x| format!("{x:X}")), 1 => any::<u64>().prop_map(|x| format!("{x:x}"))]
}

/// A good line without its end.
fn good_line() -> impl Strategy<Value = Vec<u8>> {
    let integers = prop::collection::vec(integer(), INTEGERS);
    let categories = prop::collection::vec(category(), CATEGORIES);
    (label(), integers, categories).prop_map(|(label, integers, categories)| {
        [vec![label], integers, categories].concat().join("\t").into_bytes()
    })
}

/// What may be wrong with a line.
#[derive(Clone, Debug)]
enum Damage {
    Replace(prop::sample::Index, u8),
    Insert(prop::sample::Index, u8),
    Remove(prop::sample::Index),
    Truncate(prop::sample::Index),
    Repeat(usize),
}

fn damage() -> impl Strategy<Value = Damage> {
    let byte =
        prop_oneof![prop::sample::select(&b"\t\r\n 0aAgG-+.@`:/\0\x10\x80\xFF"[..]), any::<u8>()];
    let index = any::<prop::sample::Index>;
    prop_oneof![
        3 => (index(), byte.clone()).prop_map(|(at, byte)| Damage::Replace(at, byte)),
        3 => (index(), byte).prop_map(|(at, byte)| Damage::Insert(at, byte)),
        2 => index().prop_map(Damage::Remove),
        1 => index().prop_map(Damage::Truncate),
        1 => (2usize..5).prop_map(Damage::Repeat),
    ]
}

fn apply(line: &mut Vec<u8>, damage: &Damage) {
    match damage {
        Damage::Replace(at, byte) => {
            let at = at.index(line.len());
            line[at] = *byte;
        }
        Damage::Insert(at, byte) => line.insert(at.index(line.len() + 1), *byte),
        Damage::Remove(at) => {
            line.remove(at.index(line.len()));
        }
        Damage::Truncate(at) => line.truncate(at.index(line.len())),
        Damage::Repeat(times) => *line = line.repeat(*times),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn lines_good_and_broken(
        mut lines in prop::collection::vec((good_line(), any::<bool>()), 1..7),
        damages in prop::collection::vec((any::<prop::sample::Index>(), damage()), 0..2),
        ended in any::<bool>(),
        batch in 1usize..9,
    ) {
        for (at, damage) in &damages {
            let at = at.index(lines.len());
            apply(&mut lines[at].0, damage);
        }
        let mut text = Vec::new();
        for (line, windows) in &lines {
            text.extend_from_slice(line);
            text.extend_from_slice(if *windows { b"\r\n" } else { b"\n" });
        }
        if !ended {
            text.pop();
        }
        // A file of no bytes has an error of its own.
        prop_assume!(!text.is_empty());
        check(&text, &text, batch);
    }
}

/// More text than the buffer holds, so that lines lie across the borders of what is.
#[test]
fn lines_across_the_borders_of_reads() {
    let mut text = String::new();
    for line in 0..12_000u64 {
        text.push_str(if line % 4 == 0 { "1" } else { "0" });
        for column in 0..39 {
            text.push('\t');
            let word = splitmix64(line * 40 + column);
            match (word >> 60, column < 13) {
                (0..4, _) => {}
                (_, true) => text.push_str(&(word >> (word >> 58 | 32)).to_string()),
                (_, false) => text.push_str(&format!("{:08x}", word as u32)),
            }
        }
        text.push('\n');
    }
    assert!(text.len() > 2 << 20);
    check_compressed(text.as_bytes(), 700);
    // A fault in the last line, and faults in long lines.
    check_compressed(format!("{text}0\t1\n").as_bytes(), 12_001);
    let long = "7".repeat(300_000);
    check_compressed(format!("{text}{long}\t\n{text}").as_bytes(), 11_999);
    check_compressed(format!("{text}1\t{long}{}\n", "\t".repeat(38)).as_bytes(), 5);
}
