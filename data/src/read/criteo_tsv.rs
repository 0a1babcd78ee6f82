//! `criteo-tsv`: label, integers i1..i13, hex categories c1..c26, tab-separated, one sample a line.
//!
//! A missing integer is 0, and `ln(1 + max(x, 0))` is applied by the chain. A category's hex value
//! goes to row [`category_row`](crate::category_row), a missing one to row 0. Features are chosen
//! by name, so a schema may name any of them in any order; columns that it does not name are
//! counted but not looked at.

use std::path::Path;

use memchr::memchr_iter;

use super::lines::Lines;
use super::{FileReader, Unit};
use crate::batch::{BatchBuilder, Numbering, Origin, SourceFile};
use crate::hash::category_row;
use crate::{DataError, Place, Result, SourceSpec, Values};

/// Integer columns, i1 to i13.
pub(crate) const INTEGERS: usize = 13;
/// Categorical columns, c1 to c26.
pub(crate) const CATEGORIES: usize = 26;
/// Columns of a row: the label and all of these.
pub(crate) const COLUMNS: usize = 1 + INTEGERS + CATEGORIES;

/// The file `path` of a source.
pub(super) fn unit(path: &Path, spec: &SourceSpec) -> Result<Unit> {
    let plan = Plan::new(spec)?;
    let (_, bytes) = super::open_file(path)?;
    if bytes == 0 {
        return Err(empty(path));
    }
    let file = SourceFile { path: path.into(), numbering: Numbering::Line };
    let path = path.to_owned();
    let open = move || -> Result<Box<dyn FileReader>> {
        Ok(Box::new(CriteoFile {
            lines: Lines::open(&path)?,
            plan: plan.clone(),
            path: path.clone(),
        }))
    };
    Ok(Unit { file: Some(file), samples: None, open: Box::new(open) })
}

fn empty(path: &Path) -> DataError {
    DataError::bad_file(path, "the file is empty; criteo-tsv rows are needed")
}

/// The column of an integer feature's name `i1`..`i13`, counted from the label at 0.
pub(crate) fn integer_column(name: &str) -> Option<usize> {
    number(name, 'i', INTEGERS)
}

/// The column of a category's name `c1`..`c26`, counted from the label at 0.
pub(crate) fn category_column(name: &str) -> Option<usize> {
    number(name, 'c', CATEGORIES).map(|number| INTEGERS + number)
}

fn number(name: &str, letter: char, most: usize) -> Option<usize> {
    let digits = name.strip_prefix(letter)?;
    let number = digits.parse().ok().filter(|number| (1..=most).contains(number))?;
    // `i01` and `i+1` parse as numbers but are not names.
    (digits == number.to_string()).then_some(number)
}

/// The name of a column.
pub(crate) fn column_name(column: usize) -> String {
    match column {
        0 => "label".to_owned(),
        i if i <= INTEGERS => format!("i{i}"),
        c => format!("c{}", c - INTEGERS),
    }
}

/// Which columns go where.
#[derive(Clone)]
struct Plan {
    /// The column of each dense feature.
    dense: Vec<usize>,
    features: Vec<FeaturePlan>,
}

#[derive(Clone, Copy)]
struct FeaturePlan {
    column: usize,
    /// Rows to place categories in; `None` keeps their own values.
    rows: Option<u64>,
}

impl Plan {
    fn new(spec: &SourceSpec) -> Result<Self> {
        let dense = spec.schema.dense.iter().map(|name| {
            integer_column(name).ok_or_else(|| {
                DataError::spec(format!(
                    "criteo-tsv has no dense column `{name}`; it has i1 to i13"
                ))
            })
        });
        let features = spec.schema.features.iter().map(|feature| {
            let column = category_column(&feature.name).ok_or_else(|| {
                DataError::spec(format!(
                    "criteo-tsv has no feature `{}`; it has c1 to c26",
                    feature.name
                ))
            })?;
            let rows = (spec.values != Values::Verbatim).then_some(feature.rows);
            if rows.is_some_and(|rows| rows < 2) {
                return Err(DataError::spec(format!(
                    "feature {}: {} rows; criteo-tsv needs at least 2, row 0 being for missing categories",
                    feature.name, feature.rows
                )));
            }
            Ok(FeaturePlan { column, rows })
        });
        Ok(Self {
            dense: dense.collect::<Result<_>>()?,
            features: features.collect::<Result<_>>()?,
        })
    }
}

struct CriteoFile {
    lines: Lines,
    plan: Plan,
    path: std::path::PathBuf,
}

impl FileReader for CriteoFile {
    fn read(&mut self, samples: usize, file: u32, out: &mut BatchBuilder) -> Result<usize> {
        for got in 0..samples {
            let row = self.lines.lines();
            let Some(line) = self.lines.next()? else {
                return if row == 0 { Err(empty(&self.path)) } else { Ok(got) };
            };
            parse_line(line, &self.plan, out).map_err(|fault| fault.at(&self.path, row))?;
            out.origins.push(Origin { file, row });
        }
        Ok(samples)
    }

    fn skip(&mut self, samples: u64) -> Result<u64> {
        for got in 0..samples {
            if self.lines.next()?.is_none() {
                return if self.lines.lines() == 0 { Err(empty(&self.path)) } else { Ok(got) };
            }
        }
        Ok(samples)
    }

    fn bytes_read(&self) -> u64 {
        self.lines.bytes_read()
    }
}

/// What is wrong with a line.
enum Fault {
    Columns(usize),
    Value { column: usize, reason: String },
}

impl Fault {
    fn value(column: usize, field: &[u8], needed: &str) -> Self {
        const SHOWN: usize = 40;
        let text = String::from_utf8_lossy(&field[..field.len().min(SHOWN)]);
        let more = if field.len() > SHOWN { "..." } else { "" };
        Self::Value { column, reason: format!("`{text}{more}` is not {needed}") }
    }

    fn at(self, path: &Path, row: u64) -> DataError {
        let place = Place { file: Some(path.into()), row, numbering: Numbering::Line };
        match self {
            Self::Columns(columns) => DataError::ColumnCount { place, columns, expected: COLUMNS },
            Self::Value { column, reason } => {
                DataError::BadValue { place, column: column_name(column), reason }
            }
        }
    }
}

/// Adds the sample of one line, all but its origin, to `out`.
fn parse_line(line: &[u8], plan: &Plan, out: &mut BatchBuilder) -> std::result::Result<(), Fault> {
    // Column i is line[starts[i]..starts[i + 1] - 1].
    let mut starts = [0usize; COLUMNS + 1];
    let mut columns = 1;
    for tab in memchr_iter(b'\t', line) {
        if columns < COLUMNS {
            starts[columns] = tab + 1;
        }
        columns += 1;
    }
    if columns != COLUMNS {
        return Err(Fault::Columns(if line.is_empty() { 0 } else { columns }));
    }
    starts[COLUMNS] = line.len() + 1;
    let field = |column: usize| &line[starts[column]..starts[column + 1] - 1];

    out.labels.push(parse_label(field(0))?);
    for &column in &plan.dense {
        let field = field(column);
        let value = parse_integer(field)
            .ok_or_else(|| Fault::value(column, field, "an integer of 64 bits"))?;
        out.dense.push(value as f32);
    }
    for (feature, builder) in plan.features.iter().zip(&mut out.features) {
        let field = field(feature.column);
        let category = parse_hex(field)
            .ok_or_else(|| Fault::value(feature.column, field, "1 to 16 hexadecimal digits"))?;
        match (category, feature.rows) {
            (Some(value), Some(rows)) => builder.push_id(category_row(value, rows) as i64),
            (None, Some(_)) => builder.push_id(0),
            (Some(value), None) => builder.push_id(value as i64),
            (None, None) => {}
        }
        builder.end_bag();
    }
    Ok(())
}

fn parse_label(field: &[u8]) -> std::result::Result<f32, Fault> {
    match field {
        b"0" => Ok(0.0),
        b"1" => Ok(1.0),
        _ => std::str::from_utf8(field)
            .ok()
            .and_then(|text| text.parse::<f32>().ok())
            .filter(|label| label.is_finite())
            .ok_or_else(|| Fault::value(0, field, "a finite number")),
    }
}

/// An integer of 64 bits in decimal digits with an optional sign; 0 for an empty field; `None` if
/// it is anything else.
fn parse_integer(field: &[u8]) -> Option<i64> {
    if field.is_empty() {
        return Some(0);
    }
    let (negative, digits) = match field {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    if digits.is_empty() {
        return None;
    }
    // Counted downwards, since the most negative integer has no positive counterpart.
    let mut value = 0i64;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?.checked_sub(i64::from(digit))?;
    }
    if negative { Some(value) } else { value.checked_neg() }
}

/// A number of 1 to 16 hex digits in either case; `Some(None)` for an empty field; `None` if it is
/// anything else.
fn parse_hex(field: &[u8]) -> Option<Option<u64>> {
    if field.is_empty() {
        return Some(None);
    }
    if field.len() > 16 {
        return None;
    }
    let mut value = 0;
    for &byte in field {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ => return None,
        };
        value = value << 4 | u64::from(digit);
    }
    Some(Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_and_columns_go_both_ways() {
        for column in 1..COLUMNS {
            let name = column_name(column);
            assert_eq!(integer_column(&name).or(category_column(&name)), Some(column));
        }
        for name in ["i0", "i14", "c0", "c27", "i01", "i+1", "c", "x1", "C1", ""] {
            assert_eq!(integer_column(name).or(category_column(name)), None, "{name}");
        }
    }

    #[test]
    fn odd_numbers() {
        assert_eq!(parse_integer(b""), Some(0));
        assert_eq!(parse_integer(b"-9223372036854775808"), Some(i64::MIN));
        for bad in [&b"9223372036854775808"[..], b"-", b"+", b"1.5", b" 1", b"1 ", b"--1", b"nan"] {
            assert_eq!(parse_integer(bad), None, "{}", String::from_utf8_lossy(bad));
        }
        assert_eq!(parse_hex(b""), Some(None));
        assert_eq!(parse_hex(b"FfffFFFFffffffff"), Some(Some(u64::MAX)));
        for bad in [&b"0ffffffffffffffff"[..], b"g", b"0x1", b"-1", b" "] {
            assert_eq!(parse_hex(bad), None, "{}", String::from_utf8_lossy(bad));
        }
    }

    proptest! {
        #[test]
        fn numbers_parse_as_the_standard_library_does(value in any::<i64>(), bits in any::<u64>()) {
            prop_assert_eq!(parse_integer(value.to_string().as_bytes()), Some(value));
            prop_assert_eq!(parse_hex(format!("{bits:x}").as_bytes()), Some(Some(bits)));
            prop_assert_eq!(parse_hex(format!("{bits:016X}").as_bytes()), Some(Some(bits)));
        }

        #[test]
        fn any_bytes_are_a_row_or_a_fault(
            fields in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3), 39..42),
        ) {
            let line = fields.join(&b'\t');
            let plan = Plan {
                dense: (1..=INTEGERS).collect(),
                features: vec![FeaturePlan { column: 14, rows: Some(9) }],
            };
            let schema = crate::Schema {
                dense: vec![],
                features: vec![crate::FeatureSpec::one_hot("c1", 9)],
                label: "label".into(),
                sample_weight: None,
                group: None,
            };
            let mut out = BatchBuilder::new(&schema, [].into(), 1);
            let columns = line.split(|byte| *byte == b'\t').count();
            match parse_line(&line, &plan, &mut out) {
                Err(Fault::Columns(found)) => prop_assert!(found == columns && columns != COLUMNS),
                Err(Fault::Value { column, .. }) => prop_assert!(columns == COLUMNS && column <= 14),
                Ok(()) => prop_assert_eq!((columns, out.dense.len()), (COLUMNS, INTEGERS)),
            }
        }
    }
}
