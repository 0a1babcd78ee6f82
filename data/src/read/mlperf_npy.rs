//! `mlperf-npy`: directories of days, each day three files of as many rows.
//!
//! `day_N_dense.npy` (rows, dense), `day_N_labels.npy` (rows) or (rows, 1), and
//! `day_N_sparse_multi_hot.npz` with an array `k.npy` (rows, hots) for the k-th feature. Days are
//! read in the order of their numbers.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::npy::{Layout, Rows};
use super::{FileReader, Unit};
use crate::batch::{BatchBuilder, Numbering, Origin, Place, SourceFile};
use crate::{DataError, Result, Schema};

/// Endings of the files of a day: dense values, labels, ids.
pub(crate) const ENDINGS: [&str; 3] = ["dense.npy", "labels.npy", "sparse_multi_hot.npz"];

/// Rows decoded at once.
const CHUNK_ROWS: usize = 2048;

/// The days of the directory `path` of a source.
pub(super) fn units(path: &Path, schema: &Schema) -> Result<Vec<Unit>> {
    let mut days = BTreeSet::new();
    for entry in std::fs::read_dir(path).map_err(DataError::io("list directory", path))? {
        let entry = entry.map_err(DataError::io("list directory", path))?;
        days.extend(day_of(&entry.file_name().to_string_lossy()));
    }
    if days.is_empty() {
        let reason = "the directory has no files day_N_dense.npy, day_N_labels.npy, day_N_sparse_multi_hot.npz";
        return Err(DataError::bad_file(path, reason));
    }
    days.into_iter().map(|(_, day)| unit(path, &day, schema)).collect()
}

/// The number of the day that a file belongs to, as a number and as written.
fn day_of(name: &str) -> Option<(u64, String)> {
    let rest = name.strip_prefix("day_")?;
    let digits = ENDINGS.iter().find_map(|end| rest.strip_suffix(end)?.strip_suffix('_'))?;
    Some((digits.parse().ok()?, digits.to_owned()))
}

fn unit(directory: &Path, day: &str, schema: &Schema) -> Result<Unit> {
    let layouts = Day::look(directory, day, schema)?;
    let file =
        SourceFile { path: directory.join(format!("day_{day}")).into(), numbering: Numbering::Row };
    let samples = layouts.dense.rows;
    let path = file.path.to_path_buf();
    let names: Vec<(String, bool)> =
        schema.features.iter().map(|feature| (feature.name.clone(), feature.raw_ids)).collect();
    let open = move || -> Result<Box<dyn FileReader>> {
        Ok(Box::new(DayReader {
            path: path.clone(),
            names: names.clone(),
            dense: layouts.dense.open()?,
            labels: layouts.labels.open()?,
            features: layouts.features.iter().map(Layout::open).collect::<Result<_>>()?,
            samples,
            row: 0,
            bytes: 0,
            scratch: Vec::new(),
        }))
    };
    Ok(Unit { file: Some(file), samples: Some(samples), open: Box::new(open) })
}

struct Day {
    dense: Layout,
    labels: Layout,
    features: Vec<Layout>,
}

impl Day {
    fn look(directory: &Path, day: &str, schema: &Schema) -> Result<Self> {
        let [dense, labels, features] =
            ENDINGS.map(|ending| directory.join(format!("day_{day}_{ending}")));
        let dense = Layout::of_file(&dense)?;
        let labels = Layout::of_file(&labels)?;
        let features = Layout::of_archive(&features, schema.features.len())?;
        if dense.columns != schema.dense.len() {
            return Err(dense.fault(format!(
                "{} columns for {} dense features",
                dense.columns,
                schema.dense.len()
            )));
        }
        if labels.columns != 1 {
            return Err(labels.fault(format!("{} columns; labels have one", labels.columns)));
        }
        for (layout, feature) in features.iter().zip(&schema.features) {
            if !layout.is_integer() {
                return Err(layout.fault(format!("ids of {} are not integers", feature.name)));
            }
        }
        for layout in features.iter().chain([&labels]) {
            if layout.rows != dense.rows {
                return Err(layout.fault(format!(
                    "{} rows, but {} has {}",
                    layout.rows,
                    dense.name(),
                    dense.rows
                )));
            }
        }
        Ok(Self { dense, labels, features })
    }
}

struct DayReader {
    path: PathBuf,
    /// Name of each feature, and whether its ids are raw.
    names: Vec<(String, bool)>,
    dense: Rows,
    labels: Rows,
    features: Vec<Rows>,
    samples: u64,
    row: u64,
    bytes: u64,
    scratch: Vec<i64>,
}

impl DayReader {
    fn read_chunk(&mut self, rows: usize, file: u32, out: &mut BatchBuilder) -> Result<()> {
        let first_label = out.labels.len();
        self.bytes += self.dense.read_f32(rows, &mut out.dense)?;
        self.bytes += self.labels.read_f32(rows, &mut out.labels)?;
        if let Some(at) = out.labels[first_label..].iter().position(|label| !label.is_finite()) {
            let value = out.labels[first_label + at];
            return Err(self.bad_value(at, "label", format!("{value} is not finite")));
        }
        for feature in 0..self.features.len() {
            let hots = self.features[feature].columns();
            self.scratch.clear();
            let (name, raw) = &self.names[feature];
            match self.features[feature].read_i64(rows, *raw, &mut self.scratch)? {
                Ok(bytes) => self.bytes += bytes,
                Err((at, value)) => {
                    let reason = format!("id {value} is above 2^63 - 1");
                    return Err(self.bad_value(at / hots, name, reason));
                }
            }
            let builder = &mut out.features[feature];
            builder.push_ids(&self.scratch);
            builder.end_bags(rows, hots);
        }
        out.origins.extend((0..rows as u64).map(|i| Origin { file, row: self.row + i }));
        self.row += rows as u64;
        Ok(())
    }

    /// An error about row `at` of those being read.
    fn bad_value(&self, at: usize, column: &str, reason: String) -> DataError {
        let file = Some(self.path.as_path().into());
        let place = Place { file, row: self.row + at as u64, numbering: Numbering::Row };
        DataError::BadValue { place, column: column.to_owned(), reason }
    }
}

impl FileReader for DayReader {
    fn read(&mut self, samples: usize, file: u32, out: &mut BatchBuilder) -> Result<usize> {
        let take = (self.samples - self.row).min(samples as u64) as usize;
        let mut left = take;
        while left > 0 {
            let rows = left.min(CHUNK_ROWS);
            self.read_chunk(rows, file, out)?;
            left -= rows;
        }
        Ok(take)
    }

    fn skip(&mut self, samples: u64) -> Result<u64> {
        let take = (self.samples - self.row).min(samples);
        for rows in [&mut self.dense, &mut self.labels].into_iter().chain(&mut self.features) {
            rows.skip(take)?;
        }
        self.row += take;
        Ok(take)
    }

    fn bytes_read(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_found_by_their_files() {
        assert_eq!(day_of("day_10_dense.npy"), Some((10, "10".to_owned())));
        assert_eq!(day_of("day_07_sparse_multi_hot.npz"), Some((7, "07".to_owned())));
        for other in ["day__dense.npy", "day_x_labels.npy", "day_1_dense.npz", "readme", "day_1"] {
            assert_eq!(day_of(other), None, "{other}");
        }
    }
}
