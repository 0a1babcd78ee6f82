//! What tables and features are: checked once, shared by all who resolve or look up.

use std::fmt;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tessera_cache::{Admission, Eviction};

use crate::{EmbeddingError, Result, SparseOptimizer};

/// How a table stores its weights. Arithmetic is float32 whatever it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// IEEE binary32.
    #[default]
    Fp32,
    /// IEEE binary16; updates round stochastically.
    Fp16,
    /// bfloat16; updates round stochastically.
    Bf16,
}

impl Precision {
    /// Bytes an element.
    #[must_use]
    pub fn bytes(self) -> usize {
        match self {
            Self::Fp32 => 4,
            Self::Fp16 | Self::Bf16 => 2,
        }
    }
}

/// What becomes of the rows of a bag.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pooling {
    /// Their sum, each times its weight where the feature has weights.
    #[default]
    Sum,
    /// Their sum divided by the number of ids in the bag.
    Mean,
    /// Nothing is pooled: every bag holds one id, and its row is the output.
    None,
}

impl fmt::Display for Pooling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sum => "sum",
            Self::Mean => "mean",
            Self::None => "none",
        })
    }
}

/// First values of a table: a pure function of (seed, name of the table, row, column).
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum Init {
    /// Uniform on `[-scale, scale)`.
    Uniform {
        /// Half the width; `1 / sqrt(rows)` when `None`.
        scale: Option<f32>,
    },
    /// Normal with mean 0.
    Normal {
        /// Standard deviation.
        std: f32,
    },
    /// Zero. No memory is touched.
    Zero,
}

impl Default for Init {
    fn default() -> Self {
        Self::Uniform { scale: None }
    }
}

/// Which ids a table takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum TableKind {
    /// Row numbers: an id is a row of the table or bad.
    #[default]
    Static,
    /// Any 64-bit number, read as unsigned: up to as many as the table has rows have one at a
    /// time.
    Dynamic {
        /// Which new ids get a row.
        admission: Admission,
        /// Which ids lose theirs.
        eviction: Eviction,
    },
}

/// A table.
#[derive(Clone, Debug, PartialEq)]
pub struct TableSpec {
    /// Name, unique in its collection. It seeds the table's generator.
    pub name: String,
    /// Which ids it takes.
    pub kind: TableKind,
    /// Number of rows; 0 is a static table that serves empty bags only. The capacity of a dynamic
    /// table, over all ranks.
    pub rows: u64,
    /// Columns, from 1.
    pub dim: usize,
    /// How weights are stored.
    pub precision: Precision,
    /// What becomes of a bag.
    pub pooling: Pooling,
    /// First values.
    pub init: Init,
    /// How rows move.
    pub optimizer: SparseOptimizer,
}

impl TableSpec {
    /// Whether ids are any numbers.
    #[must_use]
    pub fn is_dynamic(&self) -> bool {
        self.kind != TableKind::Static
    }

    /// Rows of its store: a dynamic table has one more, of zeros, for ids without a row.
    pub(crate) fn stored_rows(&self) -> u64 {
        self.rows.saturating_add(self.is_dynamic().into())
    }

    /// Whether it matters how often an id occurs in a batch.
    pub(crate) fn counts_ids(&self) -> bool {
        let TableKind::Dynamic { admission, eviction } = self.kind else { return false };
        matches!(admission, Admission::Count { .. }) || matches!(eviction, Eviction::Lfu { .. })
    }

    fn faults(&self) -> Vec<String> {
        let mut faults = self.optimizer.faults();
        if self.is_dynamic() && self.rows == 0 {
            faults.push("a dynamic table of 0 rows; it must have at least 1".into());
        }
        if self.dim == 0 {
            faults.push("dim is 0; it must be from 1 up".into());
        }
        match self.init {
            Init::Uniform { scale: Some(x) } if !(x >= 0.0 && x.is_finite()) => {
                faults.push(format!("init scale is {x}; it must be a number from 0 up"));
            }
            Init::Normal { std } if !(std >= 0.0 && std.is_finite()) => {
                faults.push(format!("init std is {std}; it must be a number from 0 up"));
            }
            _ => {}
        }
        faults
    }
}

/// A feature: bags of ids of one table, pooled into some columns of the output.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureSpec {
    /// Name, unique in its collection.
    pub name: String,
    /// Number of its table; features may share one.
    pub table: usize,
    /// First of its columns in an output row; it takes as many as its table has.
    pub column: usize,
}

/// Where the rows and columns of a collection's table lie in the whole table: what first values
/// and rounding, which are functions of the whole table's row and column, need to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// Rows of the whole table.
    pub rows: u64,
    /// Columns of the whole table.
    pub dim: usize,
    /// The whole table's row that is row 0 here.
    pub first_row: u64,
    /// The whole table's column that is column 0 here: a multiple of 32.
    pub first_column: usize,
}

/// Tables and features, known to fit each other.
#[derive(Debug)]
pub struct Schema {
    tables: Vec<TableSpec>,
    windows: Vec<Window>,
    features: Vec<FeatureSpec>,
    /// Features of each table, ascending: the canonical order of its occurrences.
    features_of: Vec<Vec<usize>>,
    /// First columns of those features.
    columns_of: Vec<Vec<usize>>,
    /// One past the last column of any feature.
    width: usize,
    seed: u64,
}

impl Schema {
    /// Checks every table and feature and lists all that is wrong.
    pub(crate) fn new(
        tables: Vec<TableSpec>,
        features: Vec<FeatureSpec>,
        seed: u64,
    ) -> Result<Self> {
        let mut faults = Vec::new();
        for (kind, names) in [
            ("table", tables.iter().map(|t| t.name.as_str()).collect::<Vec<_>>()),
            ("feature", features.iter().map(|f| f.name.as_str()).collect()),
        ] {
            let mut seen = hashbrown::HashSet::new();
            let twice = names.into_iter().filter(|name| !seen.insert(*name));
            faults.extend(twice.map(|name| format!("{kind} {name} is named twice")));
        }
        for table in &tables {
            let of_table = |fault: String| format!("table {}: {fault}", table.name);
            faults.extend(table.faults().into_iter().map(of_table));
        }
        let mut features_of = vec![Vec::new(); tables.len()];
        let mut spans = Vec::with_capacity(features.len()); // (first column, end, feature)
        for (i, feature) in features.iter().enumerate() {
            let Some(table) = tables.get(feature.table) else {
                faults.push(format!(
                    "feature {}: no table number {}; there are {}",
                    feature.name,
                    feature.table,
                    tables.len()
                ));
                continue;
            };
            features_of[feature.table].push(i);
            match feature.column.checked_add(table.dim) {
                Some(end) => spans.push((feature.column, end, i)),
                None => faults.push(format!(
                    "feature {}: column {} + {} exceeds 64 bits",
                    feature.name, feature.column, table.dim
                )),
            }
        }
        spans.sort_unstable();
        for pair in spans.windows(2) {
            let ((_, end, a), (start, _, b)) = (pair[0], pair[1]);
            if start < end {
                faults.push(format!(
                    "features {} and {} share output columns {start}..{end}",
                    features[a].name, features[b].name
                ));
            }
        }
        if !faults.is_empty() {
            return Err(EmbeddingError::Spec { faults });
        }
        let columns_of = features_of
            .iter()
            .map(|of: &Vec<usize>| of.iter().map(|&f| features[f].column).collect())
            .collect();
        let width = spans.iter().map(|&(_, end, _)| end).max().unwrap_or(0);
        let whole = |table: &TableSpec| Window {
            rows: table.rows,
            dim: table.dim,
            first_row: 0,
            first_column: 0,
        };
        let windows = tables.iter().map(whole).collect();
        Ok(Self { tables, windows, features, features_of, columns_of, width, seed })
    }

    /// The schema of one rectangle of `table`, looked up by bags of its own rows, which are
    /// summed.
    pub(crate) fn of_shard(
        table: &TableSpec,
        rows: Range<u64>,
        columns: Range<usize>,
        seed: u64,
    ) -> Result<Self> {
        let part = TableSpec {
            rows: rows.end - rows.start,
            dim: columns.len(),
            pooling: Pooling::Sum,
            ..table.clone()
        };
        let feature = FeatureSpec { name: table.name.clone(), table: 0, column: 0 };
        let mut schema = Self::new(vec![part], vec![feature], seed)?;
        schema.windows[0] = Window {
            rows: table.rows,
            dim: table.dim,
            first_row: rows.start,
            first_column: columns.start,
        };
        Ok(schema)
    }

    /// Where each table lies in its whole table.
    #[must_use]
    pub fn windows(&self) -> &[Window] {
        &self.windows
    }

    /// The tables.
    #[must_use]
    pub fn tables(&self) -> &[TableSpec] {
        &self.tables
    }

    /// The features, in the order in which lookups give them.
    #[must_use]
    pub fn features(&self) -> &[FeatureSpec] {
        &self.features
    }

    /// One past the last output column of any feature: the least stride.
    #[must_use]
    pub fn width(&self) -> usize {
        self.width
    }

    /// The seed of first values and of rounding.
    #[must_use]
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// Features that look `table` up, ascending.
    pub(crate) fn features_of(&self, table: usize) -> &[usize] {
        &self.features_of[table]
    }

    /// First output columns of [`Schema::features_of`].
    pub(crate) fn columns_of(&self, table: usize) -> &[usize] {
        &self.columns_of[table]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(name: &str, dim: usize) -> TableSpec {
        TableSpec {
            name: name.into(),
            kind: TableKind::Static,
            rows: 4,
            dim,
            precision: Precision::Fp32,
            pooling: Pooling::Sum,
            init: Init::Zero,
            optimizer: SparseOptimizer::Sgd { lr: 0.1 },
        }
    }

    fn feature(name: &str, table: usize, column: usize) -> FeatureSpec {
        FeatureSpec { name: name.into(), table, column }
    }

    #[test]
    fn every_fault_is_listed_with_its_table_or_feature() {
        let mut bad = table("b", 0);
        bad.init = Init::Normal { std: -1.0 };
        let tables = vec![table("a", 4), table("a", 4), bad];
        let features = vec![
            feature("x", 0, 0),
            feature("y", 1, 3),
            feature("x", 7, 20),
            feature("z", 1, usize::MAX),
        ];
        let text = Schema::new(tables, features, 0).unwrap_err().to_string();
        for part in [
            "table a is named twice",
            "feature x is named twice",
            "table b: dim is 0",
            "table b: init std is -1",
            "feature x: no table number 7; there are 3",
            "feature z: column 18446744073709551615 + 4 exceeds 64 bits",
            "features x and y share output columns 3..4",
        ] {
            assert!(text.contains(part), "{part} is missing from: {text}");
        }
    }

    #[test]
    fn features_of_a_table_come_in_their_own_order_whatever_the_map() {
        let tables = vec![table("a", 2), table("b", 3)];
        let features = vec![feature("x", 1, 4), feature("y", 0, 0), feature("z", 1, 10)];
        let schema = Schema::new(tables, features, 0).unwrap();
        assert_eq!(schema.features_of(1), [0, 2]);
        assert_eq!(schema.columns_of(1), [4, 10]);
        assert_eq!(schema.features_of(0), [1]);
        assert_eq!(schema.width(), 13);
    }
}
