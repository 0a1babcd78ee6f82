//! A batch of samples: dense values, labels and one jagged array a feature, with the place in the
//! data that every sample came from.

use std::fmt;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use crate::jagged::JaggedBuilder;
use crate::{DataError, Jagged, RawId, Result, Schema};

/// How people count the rows of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numbering {
    /// Rows from 0, as in arrays and Parquet files.
    Row,
    /// Lines from 1, as in text files.
    Line,
}

/// A file that samples came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceFile {
    /// The path as it was given.
    pub path: Arc<Path>,
    /// How its rows are counted for people.
    pub numbering: Numbering,
}

/// Where a sample came from: a file of [`Provenance::files`] and a row of it, counted from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Index into [`Provenance::files`]; ignored when there are no files (generated data).
    pub file: u32,
    /// Row of the file, from 0.
    pub row: u64,
}

/// Where the samples of a batch came from.
#[derive(Clone, Debug, PartialEq)]
pub struct Provenance {
    /// The files of the source, shared by its batches; empty for generated data.
    pub files: Arc<[SourceFile]>,
    /// One origin a sample.
    pub origins: Vec<Origin>,
}

/// Where a sample came from, for error messages: `part1.tsv line 18`, `day_0 row 17`, `sample 17`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The file, unless the sample was generated or made in memory.
    pub file: Option<Arc<Path>>,
    /// Row of the file, from 0; without a file, number of the sample.
    pub row: u64,
    /// How the row is shown.
    pub numbering: Numbering,
}

impl Place {
    /// The place `origin` among `files`.
    pub(crate) fn new(files: &[SourceFile], origin: Origin) -> Self {
        let file = files.get(origin.file as usize);
        Self {
            file: file.map(|file| Arc::clone(&file.path)),
            row: origin.row,
            numbering: file.map_or(Numbering::Row, |file| file.numbering),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(file) = &self.file else {
            return write!(f, "sample {}", self.row);
        };
        match self.numbering {
            Numbering::Row => write!(f, "{} row {}", file.display(), self.row),
            Numbering::Line => write!(f, "{} line {}", file.display(), self.row.saturating_add(1)),
        }
    }
}

/// What a [`Batch`] is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct BatchParts {
    /// Dense values a sample.
    pub dense_features: usize,
    /// Dense values, (samples, dense_features) row-major.
    pub dense: Vec<f32>,
    /// One label a sample.
    pub labels: Vec<f32>,
    /// One weight a sample, where the data has them.
    pub sample_weights: Option<Vec<f32>>,
    /// One group a sample (for grouped AUC), where the data has them.
    pub groups: Option<Vec<i64>>,
    /// One jagged array a feature, in schema order, each with one bag a sample.
    pub features: Vec<Jagged>,
    /// Where the samples came from; samples without provenance are named by their number.
    pub provenance: Option<Provenance>,
}

/// Samples, checked to be of one length in every part.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    parts: BatchParts,
}

impl Batch {
    /// A batch of as many samples as there are labels.
    ///
    /// Errors: [`DataError::Batch`] when a part has another number of samples.
    pub fn new(parts: BatchParts) -> Result<Self> {
        let samples = parts.labels.len();
        let check = |what: &str, have: usize, want: Option<usize>| {
            if Some(have) == want {
                return Ok(());
            }
            let want = want.map_or("more than memory holds".to_owned(), |want| want.to_string());
            Err(DataError::Batch {
                reason: format!("{have} {what} for {samples} labels; {want} are needed"),
            })
        };
        let values = samples.checked_mul(parts.dense_features);
        check("dense values", parts.dense.len(), values)?;
        if let Some(weights) = &parts.sample_weights {
            check("sample weights", weights.len(), Some(samples))?;
        }
        if let Some(groups) = &parts.groups {
            check("groups", groups.len(), Some(samples))?;
        }
        for (i, feature) in parts.features.iter().enumerate() {
            check(&format!("bags of feature {i}"), feature.bags(), Some(samples))?;
        }
        if let Some(provenance) = &parts.provenance {
            check("origins", provenance.origins.len(), Some(samples))?;
        }
        Ok(Self { parts })
    }

    /// Number of samples.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.parts.labels.len()
    }

    /// Dense values a sample.
    #[must_use]
    pub fn dense_features(&self) -> usize {
        self.parts.dense_features
    }

    /// Dense values, (samples, dense_features) row-major.
    #[must_use]
    pub fn dense(&self) -> &[f32] {
        &self.parts.dense
    }

    /// Dense values of one sample.
    ///
    /// # Panics
    /// When there is no such sample.
    #[must_use]
    pub fn dense_row(&self, sample: usize) -> &[f32] {
        assert!(sample < self.samples(), "sample {sample} of {}", self.samples());
        &self.parts.dense[sample * self.parts.dense_features..][..self.parts.dense_features]
    }

    /// One label a sample.
    #[must_use]
    pub fn labels(&self) -> &[f32] {
        &self.parts.labels
    }

    /// One weight a sample, where the data has them.
    #[must_use]
    pub fn sample_weights(&self) -> Option<&[f32]> {
        self.parts.sample_weights.as_deref()
    }

    /// One group a sample, where the data has them.
    #[must_use]
    pub fn groups(&self) -> Option<&[i64]> {
        self.parts.groups.as_deref()
    }

    /// One jagged array a feature, in schema order.
    #[must_use]
    pub fn features(&self) -> &[Jagged] {
        &self.parts.features
    }

    /// Where a sample came from.
    ///
    /// # Panics
    /// When there is no such sample.
    #[must_use]
    pub fn place(&self, sample: usize) -> Place {
        assert!(sample < self.samples(), "sample {sample} of {}", self.samples());
        match &self.parts.provenance {
            Some(provenance) => Place::new(&provenance.files, provenance.origins[sample]),
            None => Place { file: None, row: sample as u64, numbering: Numbering::Row },
        }
    }

    /// The samples `range`, as a batch of their own (a rank's part of a global batch).
    ///
    /// # Panics
    /// When the range leaves the batch.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let parts = &self.parts;
        let width = parts.dense_features;
        Self {
            parts: BatchParts {
                dense_features: width,
                dense: parts.dense[range.start * width..range.end * width].to_vec(),
                labels: parts.labels[range.clone()].to_vec(),
                sample_weights: parts.sample_weights.as_ref().map(|w| w[range.clone()].to_vec()),
                groups: parts.groups.as_ref().map(|g| g[range.clone()].to_vec()),
                features: parts.features.iter().map(|f| f.slice(range.clone())).collect(),
                provenance: parts.provenance.as_ref().map(|provenance| Provenance {
                    files: Arc::clone(&provenance.files),
                    origins: provenance.origins[range.clone()].to_vec(),
                }),
            },
        }
    }

    /// The samples in the order in which `order` names them.
    ///
    /// # Panics
    /// When it names a sample that is not there.
    #[must_use]
    pub fn reordered(&self, order: &[usize]) -> Self {
        fn of<T: Copy>(values: &[T], order: &[usize]) -> Vec<T> {
            order.iter().map(|&sample| values[sample]).collect()
        }
        let parts = &self.parts;
        Self {
            parts: BatchParts {
                dense_features: parts.dense_features,
                dense: order.iter().flat_map(|&sample| self.dense_row(sample)).copied().collect(),
                labels: of(&parts.labels, order),
                sample_weights: parts.sample_weights.as_ref().map(|weights| of(weights, order)),
                groups: parts.groups.as_ref().map(|groups| of(groups, order)),
                features: parts.features.iter().map(|feature| feature.reordered(order)).collect(),
                provenance: parts.provenance.as_ref().map(|provenance| Provenance {
                    files: Arc::clone(&provenance.files),
                    origins: of(&provenance.origins, order),
                }),
            },
        }
    }

    /// Takes the features out: the batch has none afterwards, and its samples are what they were.
    pub fn take_features(&mut self) -> Vec<Jagged> {
        std::mem::take(&mut self.parts.features)
    }

    /// The files that the samples came from.
    pub(crate) fn files(&self) -> Arc<[SourceFile]> {
        match &self.parts.provenance {
            Some(provenance) => Arc::clone(&provenance.files),
            None => Arc::new([]),
        }
    }

    /// The parts.
    #[must_use]
    pub fn into_parts(self) -> BatchParts {
        self.parts
    }
}

/// Bytes reserved at once for an array; a longer one grows as its values come. Sizes come from
/// settings, and a slip in one must not ask for more memory than there is.
const RESERVE_BYTES_MAX: usize = 16 << 20;

/// How many of `count` values of a type to make room for.
fn room<T>(count: usize) -> usize {
    count.min(RESERVE_BYTES_MAX / size_of::<T>())
}

/// Grows a [`Batch`]; readers push into its columns, the shuffle appends rows of other batches.
#[derive(Debug)]
pub(crate) struct BatchBuilder {
    pub(crate) dense_features: usize,
    pub(crate) dense: Vec<f32>,
    pub(crate) labels: Vec<f32>,
    pub(crate) sample_weights: Option<Vec<f32>>,
    pub(crate) groups: Option<Vec<i64>>,
    pub(crate) features: Vec<JaggedBuilder>,
    pub(crate) origins: Vec<Origin>,
    files: Arc<[SourceFile]>,
}

impl BatchBuilder {
    /// No samples yet, with room for `samples` within [`RESERVE_BYTES_MAX`] an array.
    pub(crate) fn new(schema: &Schema, files: Arc<[SourceFile]>, samples: usize) -> Self {
        let features = schema.features.iter().map(|feature| {
            let mut builder = JaggedBuilder::new(feature.weighted);
            let ids = samples.saturating_mul(feature.hots);
            builder.reserve(room::<u64>(samples), room::<RawId>(ids));
            builder
        });
        Self {
            dense_features: schema.dense.len(),
            dense: Vec::with_capacity(room::<f32>(samples.saturating_mul(schema.dense.len()))),
            labels: Vec::with_capacity(room::<f32>(samples)),
            sample_weights: schema.sample_weight.is_some().then(Vec::new),
            groups: schema.group.is_some().then(Vec::new),
            features: features.collect(),
            origins: Vec::with_capacity(room::<Origin>(samples)),
            files,
        }
    }

    /// Samples so far.
    pub(crate) fn samples(&self) -> usize {
        self.labels.len()
    }

    /// Where sample `sample` came from.
    pub(crate) fn place(&self, sample: usize) -> Place {
        Place::new(&self.files, self.origins[sample])
    }

    /// Adds samples of batches of the same schema and files, in the given order.
    pub(crate) fn append_rows(&mut self, rows: &[(&Batch, usize)]) {
        for &(batch, row) in rows {
            let parts = &batch.parts;
            self.dense.extend_from_slice(batch.dense_row(row));
            self.labels.push(parts.labels[row]);
            if let (Some(weights), Some(more)) = (&mut self.sample_weights, &parts.sample_weights) {
                weights.push(more[row]);
            }
            if let (Some(groups), Some(more)) = (&mut self.groups, &parts.groups) {
                groups.push(more[row]);
            }
            if let Some(provenance) = &parts.provenance {
                self.origins.push(provenance.origins[row]);
            }
        }
        for (i, builder) in self.features.iter_mut().enumerate() {
            for &(batch, row) in rows {
                builder.append(&batch.parts.features[i], row..row + 1);
            }
        }
    }

    /// The batch.
    ///
    /// Errors: [`DataError::Batch`] when a reader filled the columns unevenly.
    pub(crate) fn finish(self) -> Result<Batch> {
        Batch::new(BatchParts {
            dense_features: self.dense_features,
            dense: self.dense,
            labels: self.labels,
            sample_weights: self.sample_weights,
            groups: self.groups,
            features: self.features.into_iter().map(JaggedBuilder::finish).collect(),
            provenance: Some(Provenance { files: self.files, origins: self.origins }),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FeatureSpec;

    fn parts() -> BatchParts {
        BatchParts {
            dense_features: 2,
            dense: vec![1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            labels: vec![0.0, 1.0, 0.0],
            sample_weights: Some(vec![1.0, 2.0, 3.0]),
            groups: Some(vec![7, 8, 9]),
            features: vec![
                Jagged::from_lengths(&[2, 0, 1], vec![RawId(5), RawId(6), RawId(7)], None).unwrap(),
            ],
            provenance: None,
        }
    }

    #[test]
    fn every_part_must_have_the_same_number_of_samples() {
        assert!(Batch::new(parts()).is_ok());
        let refused = |message: &str, break_it: fn(&mut BatchParts)| {
            let mut parts = parts();
            break_it(&mut parts);
            let error = Batch::new(parts).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        };
        refused("5 dense values for 3 labels; 6 are needed", |p| p.dense.truncate(5));
        refused("4 sample weights", |p| p.sample_weights.as_mut().unwrap().push(1.0));
        refused("2 groups", |p| p.groups.as_mut().unwrap().truncate(2));
        refused("2 bags of feature 0", |p| p.features[0] = p.features[0].slice(0..2));
        refused("0 origins", |p| {
            p.provenance = Some(Provenance { files: Arc::new([]), origins: vec![] });
        });
        refused("more than memory holds", |p| p.dense_features = usize::MAX);
    }

    /// Once, a slip in a setting asked for terabytes and took the process down.
    #[test]
    fn room_is_made_within_limits() {
        let feature = |hots| FeatureSpec { hots, ..FeatureSpec::one_hot("c", 10) };
        let schema = Schema {
            dense: vec!["i1".into(), "i2".into()],
            features: vec![feature(1_000_000_000), feature(usize::MAX), feature(0)],
            label: "label".into(),
            sample_weight: None,
            group: None,
        };
        for samples in [1, 1_000_000_000, usize::MAX] {
            let builder = BatchBuilder::new(&schema, [].into(), samples);
            assert!(builder.dense.capacity() * size_of::<f32>() <= RESERVE_BYTES_MAX);
            assert!(builder.labels.capacity() * size_of::<f32>() <= RESERVE_BYTES_MAX);
            assert!(builder.origins.capacity() * size_of::<Origin>() <= RESERVE_BYTES_MAX);
        }
    }

    #[test]
    fn slices_hold_the_samples_they_name() {
        let batch = Batch::new(parts()).unwrap();
        let tail = batch.slice(1..3);
        assert_eq!(tail.samples(), 2);
        assert_eq!(tail.dense_row(1), [5.0, 6.0]);
        assert_eq!(tail.labels(), [1.0, 0.0]);
        assert_eq!(tail.sample_weights(), Some(&[2.0, 3.0][..]));
        assert_eq!(tail.groups(), Some(&[8, 9][..]));
        assert_eq!(tail.features()[0].bag(0), []);
        assert_eq!(tail.features()[0].bag(1), [RawId(7)]);
        assert_eq!(batch.slice(3..3).samples(), 0);
        assert_eq!(batch.slice(0..3), batch);
    }

    #[test]
    fn places_are_told_as_people_count() {
        let files: Arc<[SourceFile]> = Arc::new([
            SourceFile { path: Path::new("part1.tsv").into(), numbering: Numbering::Line },
            SourceFile { path: Path::new("train/day_0").into(), numbering: Numbering::Row },
        ]);
        let place = |file, row| Place::new(&files, Origin { file, row }).to_string();
        assert_eq!(place(0, 17), "part1.tsv line 18");
        assert_eq!(place(1, 17), "train/day_0 row 17");
        assert_eq!(Place::new(&[], Origin { file: 0, row: 3 }).to_string(), "sample 3");
        assert_eq!(Batch::new(parts()).unwrap().place(2).to_string(), "sample 2");
    }
}
