//! What reports for people are made of.

use std::fmt::Write as _;

/// Bytes in the largest unit that keeps them above 1: `1.25 GB`.
pub(crate) fn size(bytes: u64) -> String {
    let units = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")];
    match units.iter().find(|(unit, _)| bytes as f64 >= *unit) {
        Some((unit, name)) => format!("{:.2} {name}", bytes as f64 / unit),
        None => format!("{bytes} B"),
    }
}

/// Lines of cells under a head: numbers to the right, names and text to the left.
pub(crate) fn table(head: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = head.iter().map(|cell| cell.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let head: Vec<String> = head.iter().map(|cell| (*cell).to_owned()).collect();
    for row in std::iter::once(&head).chain(rows) {
        let mut line = String::new();
        for (number, (cell, &width)) in row.iter().zip(&widths).enumerate() {
            let wordy = cell.chars().next().is_some_and(char::is_alphabetic);
            if number == 0 || wordy {
                let _ = write!(line, "{cell:<width$}  ");
            } else {
                let _ = write!(line, "{cell:>width$}  ");
            }
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}
