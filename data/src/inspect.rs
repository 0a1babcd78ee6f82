//! What is in a data set: ranges, shares, cardinalities and the heads of the distributions.

use std::collections::HashMap;
use std::fmt;

use serde::Serialize;

use crate::hash::splitmix64;
use crate::read::open_unchecked;
use crate::{DataError, Format, Jagged, Result, SourceSpec, Values};

/// Distinct ids of a feature that are counted exactly; memory is bounded by this.
pub const DISTINCT_EXACT_MAX: usize = 1 << 17;

/// Ids in the head of a feature's distribution.
const HEAD: usize = 10;

/// Samples read at once.
const READ_SAMPLES: usize = 4096;

/// What was found in a data set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// Format of the source.
    pub format: Format,
    /// Samples looked at.
    pub samples: u64,
    /// Samples of the whole source, where known.
    pub samples_total: Option<u64>,
    /// Share of labels above 0.5.
    pub positives_share: f64,
    /// Range and mean of the labels.
    pub label: Range,
    /// Range and mean of the sample weights, where there are any.
    pub sample_weight: Option<Range>,
    /// Distinct groups, where there are any.
    pub groups: Option<Distinct>,
    /// Dense columns, before any transform.
    pub dense: Vec<DenseReport>,
    /// Categorical features.
    pub features: Vec<FeatureReport>,
}

/// Range and mean of finite values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Range {
    /// Smallest value.
    pub min: f64,
    /// Mean value.
    pub mean: f64,
    /// Largest value.
    pub max: f64,
}

/// A dense column.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DenseReport {
    /// The column.
    pub name: String,
    /// Range of its finite values; `None` when it has none.
    pub range: Option<Range>,
    /// Share of samples where it is 0.
    pub zeros_share: f64,
    /// Values that are NaN or infinite.
    pub not_finite: u64,
}

/// A count of different values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Distinct {
    /// Counted one by one.
    Exact(u64),
    /// Estimated by a HyperLogLog sketch with a standard error of 0.8 %.
    Estimate(u64),
}

/// An id of the head of a distribution.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HeadId {
    /// The id.
    pub id: i64,
    /// Its share of all ids of the feature.
    pub share: f64,
}

/// A categorical feature.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct FeatureReport {
    /// The feature.
    pub name: String,
    /// Rows of its table by the schema.
    pub rows: u64,
    /// Ids in all bags.
    pub ids: u64,
    /// Different ids.
    pub distinct: Distinct,
    /// Smallest id; `None` when there are no ids.
    pub id_min: Option<i64>,
    /// Largest id; `None` when there are no ids.
    pub id_max: Option<i64>,
    /// Ids a bag.
    pub bag_length: Range,
    /// Share of empty bags.
    pub empty_share: f64,
    /// The most frequent ids, most frequent first.
    pub head: Vec<HeadId>,
    /// By how much a share in the head may be too small: 0 unless there are very many ids.
    pub head_share_error: f64,
    /// Range of the weights of ids, where there are any.
    pub weight: Option<Range>,
}

/// Looks at the first `samples_max` samples of a source (all when `None`) in bounded memory: at
/// most [`DISTINCT_EXACT_MAX`] ids a feature are held.
///
/// Dense values are those before any transform, and ones that are not finite are counted whatever
/// the source's policy for them is.
///
/// Errors: as [`open`](crate::open) and reading; [`DataError::NoSamples`].
pub fn inspect(spec: &SourceSpec, samples_max: Option<u64>) -> Result<Report> {
    let spec = SourceSpec { values: Values::Untransformed, ..spec.clone() };
    let mut reader = open_unchecked(&spec)?;
    let schema = &spec.schema;
    let mut samples = 0u64;
    let mut positives = 0u64;
    let mut label = Tally::default();
    let mut sample_weight = Tally::default();
    let mut groups = Counts::new(DISTINCT_EXACT_MAX);
    let mut dense = vec![Tally::default(); schema.dense.len()];
    let mut features: Vec<FeatureTally> =
        schema.features.iter().map(|_| FeatureTally::new(DISTINCT_EXACT_MAX)).collect();
    loop {
        let left = samples_max.map_or(u64::MAX, |most| most - samples);
        let batch = reader.read(left.min(READ_SAMPLES as u64) as usize)?;
        if batch.samples() == 0 {
            break;
        }
        samples += batch.samples() as u64;
        positives += batch.labels().iter().filter(|label| **label > 0.5).count() as u64;
        batch.labels().iter().for_each(|value| label.add(*value));
        batch.sample_weights().unwrap_or_default().iter().for_each(|w| sample_weight.add(*w));
        batch.groups().unwrap_or_default().iter().for_each(|group| groups.add(*group));
        for (column, tally) in dense.iter_mut().enumerate() {
            let values = batch.dense().iter().skip(column).step_by(schema.dense.len());
            values.for_each(|value| tally.add(*value));
        }
        for (tally, jagged) in features.iter_mut().zip(batch.features()) {
            tally.add(jagged);
        }
    }
    if samples == 0 {
        return Err(DataError::NoSamples { files: spec.describe() });
    }
    let none = Range { min: 0.0, mean: 0.0, max: 0.0 };
    Ok(Report {
        format: spec.format,
        samples,
        samples_total: reader.total_samples(),
        positives_share: positives as f64 / samples as f64,
        label: label.range().unwrap_or(none),
        sample_weight: schema.sample_weight.as_ref().and_then(|_| sample_weight.range()),
        groups: schema.group.as_ref().map(|_| groups.distinct()),
        dense: schema
            .dense
            .iter()
            .zip(&dense)
            .map(|(name, tally)| DenseReport {
                name: name.clone(),
                range: tally.range(),
                zeros_share: tally.zeros as f64 / samples as f64,
                not_finite: tally.not_finite,
            })
            .collect(),
        features: schema
            .features
            .iter()
            .zip(features)
            .map(|(feature, tally)| {
                let ids = tally.ids.max(1) as f64;
                FeatureReport {
                    name: feature.name.clone(),
                    rows: feature.rows,
                    ids: tally.ids,
                    distinct: tally.counts.distinct(),
                    id_min: tally.id_range.map(|range| range.0),
                    id_max: tally.id_range.map(|range| range.1),
                    bag_length: tally.lengths.range().unwrap_or(none),
                    empty_share: tally.lengths.zeros as f64 / samples as f64,
                    head: tally
                        .counts
                        .head()
                        .into_iter()
                        .map(|(id, count)| HeadId { id, share: count as f64 / ids })
                        .collect(),
                    head_share_error: tally.counts.missed as f64 / ids,
                    weight: tally.weights.range(),
                }
            })
            .collect(),
    })
}

/// Sums up numbers.
#[derive(Clone, Debug, Default)]
struct Tally {
    finite: u64,
    not_finite: u64,
    zeros: u64,
    sum: f64,
    min: f64,
    max: f64,
}

impl Tally {
    fn add(&mut self, value: f32) {
        if !value.is_finite() {
            self.not_finite += 1;
            return;
        }
        let value = f64::from(value);
        if self.finite == 0 {
            (self.min, self.max) = (value, value);
        }
        self.finite += 1;
        self.zeros += u64::from(value == 0.0);
        self.sum += value;
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    fn range(&self) -> Option<Range> {
        let mean = self.sum / self.finite as f64;
        (self.finite > 0).then_some(Range { min: self.min, mean, max: self.max })
    }
}

struct FeatureTally {
    ids: u64,
    id_range: Option<(i64, i64)>,
    lengths: Tally,
    weights: Tally,
    counts: Counts,
}

impl FeatureTally {
    fn new(exact_max: usize) -> Self {
        Self {
            ids: 0,
            id_range: None,
            lengths: Tally::default(),
            weights: Tally::default(),
            counts: Counts::new(exact_max),
        }
    }

    fn add(&mut self, jagged: &Jagged) {
        self.ids += jagged.ids().len() as u64;
        for pair in jagged.offsets().windows(2) {
            self.lengths.add((pair[1] - pair[0]) as f32);
        }
        for id in jagged.ids() {
            let (low, high) = self.id_range.unwrap_or((id.0, id.0));
            self.id_range = Some((low.min(id.0), high.max(id.0)));
            self.counts.add(id.0);
        }
        jagged.weights().unwrap_or_default().iter().for_each(|weight| self.weights.add(*weight));
    }
}

/// Counts of different values: exact up to a bound, then the frequent ones by Misra and Gries
/// ("Finding repeated elements", 1982) and their number by HyperLogLog (Flajolet et al., 2007).
struct Counts {
    exact_max: usize,
    counts: HashMap<i64, u64>,
    /// By how much a count may be too small; 0 while counts are exact.
    missed: u64,
    /// For each of 2^14 parts of the hashes, the longest run of zero bits before a one, plus 1.
    registers: Vec<u8>,
}

/// Bits of a hash that choose a register.
const REGISTER_BITS: u32 = 14;

impl Counts {
    fn new(exact_max: usize) -> Self {
        Self {
            exact_max,
            counts: HashMap::new(),
            missed: 0,
            registers: vec![0; 1 << REGISTER_BITS],
        }
    }

    fn add(&mut self, value: i64) {
        let hash = splitmix64(value as u64);
        let register = (hash >> (64 - REGISTER_BITS)) as usize;
        let rank = (hash << REGISTER_BITS | 1 << (REGISTER_BITS - 1)).leading_zeros() as u8 + 1;
        self.registers[register] = self.registers[register].max(rank);
        let room = self.counts.len() < self.exact_max;
        match self.counts.get_mut(&value) {
            Some(count) => *count += 1,
            None if room => {
                self.counts.insert(value, 1);
            }
            None => {
                // One is taken from every count: that frees the rare ones' places.
                self.missed += 1;
                self.counts.retain(|_, count| {
                    *count -= 1;
                    *count > 0
                });
            }
        }
    }

    fn distinct(&self) -> Distinct {
        if self.missed == 0 {
            return Distinct::Exact(self.counts.len() as u64);
        }
        let m = self.registers.len() as f64;
        let sum: f64 = self.registers.iter().map(|rank| (-f64::from(*rank)).exp2()).sum();
        let alpha = 0.7213 / (1.0 + 1.079 / m);
        Distinct::Estimate((alpha * m * m / sum).round() as u64)
    }

    /// The most frequent values with their counts; the smaller of two as frequent comes first.
    fn head(&self) -> Vec<(i64, u64)> {
        let mut all: Vec<(i64, u64)> =
            self.counts.iter().map(|(id, count)| (*id, *count)).collect();
        all.sort_unstable_by_key(|&(id, count)| (std::cmp::Reverse(count), id));
        all.truncate(HEAD);
        all
    }
}

impl fmt::Display for Distinct {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(count) => f.pad(&count.to_string()),
            Self::Estimate(count) => f.pad(&format!("~{count}")),
        }
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} to {}, mean {:.4}", self.min, self.max, self.mean)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} samples", self.format, self.samples)?;
        match self.samples_total {
            Some(total) if total != self.samples => writeln!(f, " looked at of {total}")?,
            _ => writeln!(f)?,
        }
        writeln!(f, "positives      {:.2} %", 100.0 * self.positives_share)?;
        writeln!(f, "label          {}", self.label)?;
        if let Some(weight) = &self.sample_weight {
            writeln!(f, "sample weight  {weight}")?;
        }
        if let Some(groups) = &self.groups {
            writeln!(f, "groups         {groups} different")?;
        }
        if !self.dense.is_empty() {
            writeln!(
                f,
                "\n{:<16}{:>14}{:>14}{:>14}{:>9}{:>12}",
                "dense", "min", "mean", "max", "zeros", "not finite"
            )?;
        }
        for column in &self.dense {
            write!(f, "{:<16}", column.name)?;
            match &column.range {
                Some(r) => write!(f, "{:>14.4}{:>14.4}{:>14.4}", r.min, r.mean, r.max)?,
                None => write!(f, "{:>14}{:>14}{:>14}", "-", "-", "-")?,
            }
            writeln!(f, "{:>7.2} %{:>12}", 100.0 * column.zeros_share, column.not_finite)?;
        }
        if !self.features.is_empty() {
            writeln!(
                f,
                "\n{:<16}{:>12}{:>11}{:>22}{:>22}{:>19}{:>9}  head (share of ids)",
                "feature", "ids", "distinct", "min id", "max id", "bag min/mean/max", "empty"
            )?;
        }
        for feature in &self.features {
            let id = |id: Option<i64>| id.map_or("-".to_owned(), |id| id.to_string());
            let l = &feature.bag_length;
            write!(
                f,
                "{:<16}{:>12}{:>11}{:>22}{:>22}{:>19}{:>7.2} % ",
                feature.name,
                feature.ids,
                feature.distinct,
                id(feature.id_min),
                id(feature.id_max),
                format!("{}/{:.2}/{}", l.min, l.mean, l.max),
                100.0 * feature.empty_share
            )?;
            for head in &feature.head {
                write!(f, " {}:{:.2}%", head.id, 100.0 * head.share)?;
            }
            writeln!(f)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_exact_up_to_the_bound_and_estimated_past_it() {
        let mut counts = Counts::new(5000);
        for value in 0..5000 {
            counts.add(value);
            counts.add(value % 10);
        }
        assert_eq!(counts.distinct(), Distinct::Exact(5000));
        assert_eq!(counts.head()[0], (0, 501));
        assert_eq!(counts.missed, 0);

        let mut many = Counts::new(1000);
        for value in 0..200_000 {
            many.add(1_000_000 + value);
            many.add(7);
        }
        let Distinct::Estimate(estimate) = many.distinct() else { panic!("past the bound") };
        // Four standard errors.
        assert!((estimate as f64 / 200_001.0 - 1.0).abs() < 0.033, "{estimate}");
        let (id, count) = many.head()[0];
        assert_eq!(id, 7);
        assert!(count <= 200_000 && count + many.missed >= 200_000);
        assert!(many.missed <= 400_000 / 1000);
    }
}
