//! What a source of samples is: its format, files, columns and the few knobs of reading.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::{DataError, Result, SyntheticSpec};

/// A categorical feature: a column of bags.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FeatureSpec {
    /// The column's name (formats without names take features in schema order).
    pub name: String,
    /// Rows of the table that the feature looks up; used by `criteo-tsv` to place categories, by
    /// `synthetic` to draw ids and by `mlperf-npy` to choose the width of the ids it writes. No
    /// reader checks ids against it: the table does.
    pub rows: u64,
    /// Whether ids are any 64-bit numbers, not rows: unsigned ones above 2^63 - 1 are read as their
    /// bits, and `criteo-tsv` gives categories by their own values, a missing one as
    /// [`MISSING`](Self::MISSING).
    #[serde(default)]
    pub raw_ids: bool,
    /// Whether every id has a weight (`parquet`: the column `<name>_weights`).
    pub weighted: bool,
    /// Ids a bag: exact in `raw`, the mean in `synthetic`, only a hint for memory elsewhere.
    pub hots: usize,
}

impl FeatureSpec {
    /// What stands for a missing category where ids are raw: the bits of 2^64 - 1.
    pub const MISSING: i64 = -1;

    /// An unweighted feature of one id a sample.
    #[must_use]
    pub fn one_hot(name: impl Into<String>, rows: u64) -> Self {
        Self { name: name.into(), rows, raw_ids: false, weighted: false, hots: 1 }
    }

    /// The column of weights of a weighted feature.
    #[must_use]
    pub fn weights_column(&self) -> String {
        format!("{}_weights", self.name)
    }
}

/// The columns of a source, in the order in which batches hold them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Schema {
    /// Dense columns.
    pub dense: Vec<String>,
    /// Categorical features.
    pub features: Vec<FeatureSpec>,
    /// The label's column (formats without names have a fixed place for it).
    pub label: String,
    /// The column of sample weights, if any (`parquet`).
    pub sample_weight: Option<String>,
    /// The column of groups for grouped AUC, if any (`parquet`); it may be a dense column or a
    /// feature too, if it has one integer a row.
    pub group: Option<String>,
}

impl Schema {
    /// Checks the names of the columns.
    ///
    /// No two dense columns and no two features share a name. Where columns are found by name
    /// (`parquet`), nothing else shares one either, but that the group may also be a dense column
    /// or a feature: click logs are grouped by user, and the user is a feature.
    ///
    /// Errors: [`DataError::Spec`] naming the column.
    pub fn validate(&self, format: Format) -> Result<()> {
        let features: Vec<String> = self.features.iter().map(|f| f.name.clone()).collect();
        named_once("dense columns", self.dense.clone())?;
        named_once("features", features.clone())?;
        if format != Format::Parquet {
            return Ok(());
        }
        let weights = self.features.iter().filter(|f| f.weighted).map(FeatureSpec::weights_column);
        let mut alone: Vec<String> = weights.collect();
        alone.push(self.label.clone());
        alone.extend(self.sample_weight.clone());
        let mut with_group = alone.clone();
        with_group.extend(self.group.clone());
        alone.extend(self.dense.iter().cloned().chain(features));
        named_once("dense columns, features, their weights, label and sample weight", alone)?;
        named_once("weights of features, label, sample weight and group", with_group)
    }

    /// Refuses columns that `format` has no place for.
    pub(crate) fn refuse_unless_parquet(&self, format: Format) -> Result<()> {
        let refuse = |what: String| {
            Err(DataError::spec(format!("format {format} has no place for {what}; use parquet")))
        };
        if let Some(column) = &self.sample_weight {
            return refuse(format!("sample weights (column `{column}`)"));
        }
        if let Some(column) = &self.group {
            return refuse(format!("groups (column `{column}`)"));
        }
        match self.features.iter().find(|feature| feature.weighted) {
            Some(feature) if format != Format::Synthetic => {
                refuse(format!("weights of ids (feature {})", feature.name))
            }
            _ => Ok(()),
        }
    }
}

/// Refuses a name that comes twice.
fn named_once(what: &str, mut names: Vec<String>) -> Result<()> {
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(DataError::spec(format!(
            "column `{}` is named twice among {what}; name each column once",
            pair[0]
        ))),
        None => Ok(()),
    }
}

/// How samples are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Format {
    /// Label, 13 integers and 26 hex categories, tab-separated; plain, gzip or zstd.
    CriteoTsv,
    /// Directories of `day_*_dense.npy`, `day_*_labels.npy`, `day_*_sparse_multi_hot.npz`.
    MlperfNpy,
    /// Little-endian records: i32 label, f32 dense values, i32 ids.
    Raw,
    /// Parquet files, columns by name, list columns as bags.
    Parquet,
    /// Generated from a seed.
    Synthetic,
}

impl Format {
    /// All formats.
    pub const ALL: [Self; 5] =
        [Self::CriteoTsv, Self::MlperfNpy, Self::Raw, Self::Parquet, Self::Synthetic];

    /// The name in configs: `criteo-tsv`, `mlperf-npy`, `raw`, `parquet`, `synthetic`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::CriteoTsv => "criteo-tsv",
            Self::MlperfNpy => "mlperf-npy",
            Self::Raw => "raw",
            Self::Parquet => "parquet",
            Self::Synthetic => "synthetic",
        }
    }
}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Format {
    type Err = DataError;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            DataError::spec(format!("unknown data format `{name}`; one of {names} is needed"))
        })
    }
}

/// What is done to dense values as they are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DenseTransform {
    /// Nothing (`criteo-tsv` still applies its own, which is [`log1p`]).
    #[default]
    None,
    /// [`log1p`]. With `criteo-tsv` this names what the format does anyway.
    Log1p,
}

/// `ln(1 + max(x, 0))` in float32, 0 for 0 and below: the transform of `criteo-tsv` and the one
/// that `dense_transform = "log1p"` names, one function so that both give the same bits.
#[inline]
#[must_use]
pub fn log1p(x: f32) -> f32 {
    if x > 0.0 { x.ln_1p() } else { 0.0 }
}

/// What happens to a dense value that is NaN or infinite.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnNanDense {
    /// Reading stops with an error that names file, row and column.
    #[default]
    Error,
    /// The value becomes 0 (before the transform) and is counted.
    Zero,
}

/// How much of a format's own treatment a reader applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Values {
    /// As a model sees them: dense values transformed, categories as rows.
    #[default]
    Training,
    /// Dense values before the transform (a missing integer is 0, negatives stay), categories as
    /// rows. What [`convert`](crate::convert) writes.
    Untransformed,
    /// As they stand in the file: also `criteo-tsv` categories by their own value (the bits of the
    /// hex number) with an empty bag for a missing one. The same as `Untransformed` elsewhere.
    Verbatim,
}

/// A source of samples: files of one format, read in the given order as one stream.
#[derive(Clone, Debug, PartialEq)]
pub struct SourceSpec {
    /// How the samples are stored.
    pub format: Format,
    /// Files (`mlperf-npy`: directories) in reading order; none for `synthetic`.
    pub files: Vec<PathBuf>,
    /// The columns.
    pub schema: Schema,
    /// What is done to dense values.
    pub dense_transform: DenseTransform,
    /// What happens to dense values that are not finite.
    pub on_nan_dense: OnNanDense,
    /// How much of the format's treatment is applied.
    pub values: Values,
    /// What to generate, for `synthetic` only.
    pub synthetic: Option<SyntheticSpec>,
}

impl SourceSpec {
    /// A source of files as a model sees them, with no transform and bad values refused.
    #[must_use]
    pub fn files(format: Format, files: Vec<PathBuf>, schema: Schema) -> Self {
        Self {
            format,
            files,
            schema,
            dense_transform: DenseTransform::None,
            on_nan_dense: OnNanDense::Error,
            values: Values::Training,
            synthetic: None,
        }
    }

    /// A generated source.
    #[must_use]
    pub fn synthetic(schema: Schema, synthetic: SyntheticSpec) -> Self {
        Self { synthetic: Some(synthetic), ..Self::files(Format::Synthetic, Vec::new(), schema) }
    }

    /// Whether dense values go through [`log1p`].
    pub(crate) fn transforms(&self) -> bool {
        self.values == Values::Training
            && (self.format == Format::CriteoTsv || self.dense_transform == DenseTransform::Log1p)
    }

    /// The files, for people.
    pub(crate) fn describe(&self) -> String {
        if self.files.is_empty() {
            return self.format.to_string();
        }
        let names: Vec<String> = self.files.iter().map(|file| file.display().to_string()).collect();
        names.join(", ")
    }

    /// Checks what can be checked without looking at the files.
    ///
    /// Errors: [`DataError::Spec`].
    pub fn validate(&self) -> Result<()> {
        self.schema.validate(self.format)?;
        match (self.format, &self.synthetic) {
            (Format::Synthetic, None) => {
                return Err(DataError::spec(
                    "format synthetic needs its settings (samples, seed, ...)",
                ));
            }
            (Format::Synthetic, Some(synthetic)) => {
                synthetic.validate(&self.schema)?;
                if !self.files.is_empty() {
                    return Err(DataError::spec(format!(
                        "format synthetic reads no files; {} given: {}",
                        self.files.len(),
                        self.describe()
                    )));
                }
            }
            (format, Some(_)) => {
                return Err(DataError::spec(format!(
                    "settings of synthetic data are given, but the format is {format}"
                )));
            }
            (_, None) if self.files.is_empty() => {
                return Err(DataError::spec("no data files are given"));
            }
            (_, None) => {}
        }
        if self.format != Format::Parquet {
            self.schema.refuse_unless_parquet(self.format)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema() -> Schema {
        Schema {
            dense: vec!["i1".into(), "i2".into()],
            features: vec![FeatureSpec::one_hot("c1", 10), FeatureSpec::one_hot("c2", 10)],
            label: "label".into(),
            sample_weight: None,
            group: None,
        }
    }

    #[test]
    fn names_of_formats_go_both_ways() {
        for format in Format::ALL {
            assert_eq!(format.to_string().parse::<Format>().unwrap(), format);
            let quoted = serde_json::to_string(&format).unwrap();
            assert_eq!(quoted, format!("\"{format}\""));
        }
        let error = "csv".parse::<Format>().unwrap_err().to_string();
        assert!(error.contains("`csv`") && error.contains("mlperf-npy"), "{error}");
    }

    #[test]
    fn a_column_named_twice_is_refused() {
        let fails = |break_it: fn(&mut Schema), format, part: &str| {
            let mut schema = schema();
            break_it(&mut schema);
            let error = schema.validate(format).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
            schema
        };
        for format in Format::ALL {
            schema().validate(format).unwrap();
            fails(|s| s.dense[1] = "i1".into(), format, "`i1` is named twice among dense columns");
            fails(|s| s.features[1].name = "c1".into(), format, "`c1` is named twice among feat");
        }
        // Where columns have no names, only these two lists are told apart by them.
        type Change = fn(&mut Schema);
        let clashes: [(Change, &str); 7] = [
            (|s| s.label = "i2".into(), "`i2`"),
            (|s| s.label = "c2".into(), "`c2`"),
            (|s| s.dense[0] = "c1".into(), "`c1`"),
            (|s| s.sample_weight = Some("i1".into()), "`i1`"),
            (|s| s.group = Some("label".into()), "`label`"),
            (
                |s| {
                    s.features[0].weighted = true;
                    s.features[1].name = "c1_weights".into();
                },
                "`c1_weights`",
            ),
            (
                |s| {
                    s.features[0].weighted = true;
                    s.group = Some("c1_weights".into());
                },
                "`c1_weights`",
            ),
        ];
        for (clash, column) in clashes {
            let schema = fails(clash, Format::Parquet, column);
            schema.validate(Format::CriteoTsv).unwrap();
        }
        for also in ["i2", "c2", "user"] {
            let schema = Schema { group: Some(also.into()), ..schema() };
            schema.validate(Format::Parquet).unwrap();
        }
    }

    #[test]
    fn settings_that_do_not_fit_the_format_are_refused() {
        let fails = |spec: SourceSpec, part: &str| {
            let error = spec.validate().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        let file = || vec![PathBuf::from("a")];
        fails(SourceSpec::files(Format::Raw, vec![], schema()), "no data files");
        fails(SourceSpec::files(Format::Synthetic, vec![], schema()), "needs its settings");
        let synthetic = SyntheticSpec::default();
        let mut spec = SourceSpec::files(Format::Raw, file(), schema());
        spec.synthetic = Some(synthetic.clone());
        fails(spec, "format is raw");
        let mut spec = SourceSpec::synthetic(schema(), synthetic);
        spec.files = file();
        fails(spec, "reads no files");
        for format in [Format::Raw, Format::CriteoTsv, Format::MlperfNpy] {
            let mut spec = SourceSpec::files(format, file(), schema());
            spec.schema.features[1].weighted = true;
            fails(spec.clone(), "weights of ids (feature c2)");
            spec.schema.sample_weight = Some("w".into());
            fails(spec.clone(), "sample weights (column `w`)");
            spec.format = Format::Parquet;
            spec.validate().unwrap();
        }
    }

    #[test]
    fn log1p_is_zero_up_to_zero_and_rises_from_there() {
        assert_eq!(log1p(-3.0).to_bits(), 0);
        assert_eq!(log1p(-0.0).to_bits(), 0);
        assert_eq!(log1p(0.0).to_bits(), 0);
        assert!((log1p(1.0) - std::f32::consts::LN_2).abs() < 1e-7);
        assert!(log1p(1e30) > 69.0);
    }
}
