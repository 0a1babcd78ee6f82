//! `criteo-tsv`: label, integers i1..i13, hex categories c1..c26, tab-separated, one sample a line.
//!
//! A missing integer is 0, and `ln(1 + max(x, 0))` is applied by the chain. A category's hex value
//! goes to row [`category_row`](crate::category_row), a missing one to row 0; a feature of raw ids
//! keeps the value, and a missing one is 2^64 - 1, which is no category then. Features are chosen
//! by name, so a schema may name any of them in any order; columns that it does not name are
//! counted but not looked at.

use std::path::Path;

use memchr::memchr_iter;

use super::criteo_fields::{Fields, long_decimal, long_hex, short_decimal, short_hex, word_at};
use super::lines::{Line, Lines};
use super::{FileReader, Unit};
use crate::batch::{BatchBuilder, Numbering, Origin, SourceFile};
use crate::hash::CategoryRows;
use crate::{DataError, FeatureSpec, Place, Result, SourceSpec, Values};

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
    ids: Ids,
}

/// What ids categories become.
#[derive(Clone, Copy)]
enum Ids {
    /// Rows to place them in, one a sample.
    Rows(CategoryRows),
    /// Their own values, one a sample; a missing one has an id of its own.
    Raw,
    /// Their own values; a missing one leaves the bag empty.
    Verbatim,
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
            let ids = match feature.rows {
                _ if spec.values == Values::Verbatim => Ids::Verbatim,
                _ if feature.raw_ids => Ids::Raw,
                2.. => Ids::Rows(CategoryRows::new(feature.rows)),
                rows => {
                    return Err(DataError::spec(format!(
                        "feature {}: {rows} rows; criteo-tsv needs at least 2, row 0 being for missing categories",
                        feature.name
                    )));
                }
            };
            Ok(FeaturePlan { column, ids })
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
        let first = self.lines.lines();
        let mut fields = Fields::new();
        let mut got = 0;
        while got < samples
            && let Some(line) = self.lines.next()?
        {
            parse_line(line, &self.plan, &mut fields, out)
                .map_err(|fault| fault.at(&self.path, first + got as u64))?;
            got += 1;
        }
        if first == 0 && got == 0 && samples > 0 {
            return Err(empty(&self.path));
        }
        for (feature, builder) in self.plan.features.iter().zip(&mut out.features) {
            if !matches!(feature.ids, Ids::Verbatim) {
                builder.end_bags(got, 1);
            }
        }
        out.origins.extend((0..got as u64).map(|i| Origin { file, row: first + i }));
        Ok(got)
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
    #[cold]
    fn columns(line: &[u8]) -> Self {
        Self::Columns(if line.is_empty() { 0 } else { 1 + memchr_iter(b'\t', line).count() })
    }

    #[cold]
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

/// Adds the sample of one line to `out`: all but its origin and the ends of bags of one.
#[inline(always)]
fn parse_line(
    line: Line<'_>,
    plan: &Plan,
    fields: &mut Fields,
    out: &mut BatchBuilder,
) -> std::result::Result<(), Fault> {
    if !fields.split(line) {
        return Err(Fault::columns(line.bytes()));
    }
    let padded = line.padded();
    out.labels.push(parse_label(fields.bytes(line, 0))?);
    for &column in &plan.dense {
        let (start, len) = fields.field(column);
        let value = match short_decimal(word_at(padded, start), len) {
            Some(value) => i64::from(value),
            None => {
                let field = fields.bytes(line, column);
                long_decimal(field)
                    .ok_or_else(|| Fault::value(column, field, "an integer of 64 bits"))?
            }
        };
        out.dense.push(value as f32);
    }
    for (feature, builder) in plan.features.iter().zip(&mut out.features) {
        let (start, len) = fields.field(feature.column);
        let category = match short_hex(word_at(padded, start), len) {
            Some(value) => u64::from(value),
            None => {
                let field = fields.bytes(line, feature.column);
                long_hex(field).ok_or_else(|| {
                    Fault::value(feature.column, field, "1 to 16 hexadecimal digits")
                })?
            }
        };
        match &feature.ids {
            // A missing category, which was read as 0, goes to row 0 without a branch: in many
            // columns as good as every second one is missing.
            Ids::Rows(rows) => builder.push_id((rows.row(category) * u64::from(len > 0)) as i64),
            Ids::Raw if len == 0 => builder.push_id(FeatureSpec::MISSING),
            Ids::Raw if category == u64::MAX => {
                let needed = "a category of raw ids: 2^64 - 1 stands for a missing one";
                let field = fields.bytes(line, feature.column);
                return Err(Fault::value(feature.column, field, needed));
            }
            Ids::Raw => builder.push_id(category as i64),
            Ids::Verbatim => {
                if len > 0 {
                    builder.push_id(category as i64);
                }
                builder.end_bag();
            }
        }
    }
    Ok(())
}

fn parse_label(field: &[u8]) -> std::result::Result<f32, Fault> {
    match *field {
        [digit @ (b'0' | b'1')] => Ok(f32::from(digit - b'0')),
        _ => std::str::from_utf8(field)
            .ok()
            .and_then(|text| text.parse::<f32>().ok())
            .filter(|label| label.is_finite())
            .ok_or_else(|| Fault::value(0, field, "a finite number")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
