//! Plain CSV files: a line of column names, then cells without quotes.

use std::fmt::Display;
use std::path::Path;
use std::str::FromStr;

use crate::{Error, Result};

/// The rows of a file.
pub(super) struct Csv<'p> {
    path: &'p Path,
    columns: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl<'p> Csv<'p> {
    /// Reads a file whole: table sets have thousands of rows.
    ///
    /// Errors: [`Error::Usage`] naming the file and the line.
    pub(super) fn read(path: &'p Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Error::Usage(format!("cannot read {}: {error}", path.display())))?;
        Self::parse(path, &text)
    }

    fn parse(path: &'p Path, text: &str) -> Result<Self> {
        let split = |line: &str| -> Vec<String> {
            line.split(',').map(|cell| cell.trim().to_owned()).collect()
        };
        let fault = |line: usize, reason: String| {
            Err(Error::Usage(format!("{} line {line}: {reason}", path.display())))
        };
        let mut lines = text.trim_start_matches('\u{feff}').lines().zip(1..);
        let columns = lines.next().map(|(line, _)| split(line)).unwrap_or_default();
        let mut rows = Vec::new();
        for (line, number) in lines.filter(|(line, _)| !line.trim().is_empty()) {
            if line.contains('"') {
                return fault(number, "quoted cells are not read".into());
            }
            let cells = split(line);
            if cells.len() != columns.len() {
                let reason = format!("{} cells for {} columns", cells.len(), columns.len());
                return fault(number, reason);
            }
            rows.push(cells);
        }
        if rows.is_empty() {
            return fault(1, "no rows after the line of column names".into());
        }
        Ok(Self { path, columns, rows })
    }

    /// The number of the first of these columns that the file has.
    pub(super) fn find(&self, names: &[&str]) -> Option<usize> {
        names.iter().find_map(|name| self.columns.iter().position(|column| column == name))
    }

    /// The same, of a column that must be there.
    pub(super) fn need(&self, names: &[&str]) -> Result<usize> {
        self.find(names).ok_or_else(|| {
            Error::Usage(format!(
                "{}: no column {} among {}",
                self.path.display(),
                names.join(" or "),
                self.columns.join(", ")
            ))
        })
    }

    pub(super) fn rows(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn text(&self, row: usize, column: usize) -> &str {
        &self.rows[row][column]
    }

    /// The value of a cell.
    pub(super) fn value<T: FromStr<Err: Display>>(&self, row: usize, column: usize) -> Result<T> {
        let text = self.text(row, column);
        text.parse().map_err(|error| {
            Error::Usage(format!(
                "{} row {} of {}: `{text}`: {error}",
                self.path.display(),
                row + 1,
                self.columns[column]
            ))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Csv<'static>> {
        Csv::parse(Path::new("t.csv"), text)
    }

    #[test]
    fn cells_are_found_by_name() {
        let csv = parse("a, b\n1,2\n\n3, x\r\n").unwrap();
        let (a, b) = (csv.need(&["a"]).unwrap(), csv.need(&["c", "b"]).unwrap());
        assert_eq!((csv.rows(), csv.value::<u64>(1, a).unwrap(), csv.text(1, b)), (2, 3, "x"));
        assert_eq!(csv.find(&["c"]), None);
        let says = |result: Result<u64>| result.unwrap_err().to_string();
        assert!(says(csv.value(1, b)).contains("t.csv row 2 of b: `x`"));
        assert!(says(csv.need(&["c"]).map(|c| c as u64)).contains("no column c among a, b"));
    }

    #[test]
    fn what_is_no_plain_csv_is_refused_with_its_line() {
        for (text, part) in [
            ("", "line 1: no rows"),
            ("a,b\n", "no rows after"),
            ("a,b\n1,2\n1\n", "line 3: 1 cells for 2 columns"),
            ("a\n\"x\"\n", "line 2: quoted"),
        ] {
            let error = parse(text).err().unwrap().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
