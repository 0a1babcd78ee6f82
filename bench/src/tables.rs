//! Which tables a benchmark has: from knobs, a csv of table sizes, or a training configuration.

use std::path::Path;

use tessera::config::Config;
use tessera_embedding::{
    FeatureSpec, Init, Pooling, Precision, SparseOptimizer, TableKind, TableSpec, WeightDecay,
};

use crate::knobs::{Hots, OptimizerKnob, PrecisionKnob, TableKnobs};
use crate::{BenchError, Result, machine};

/// A feature of a table.
#[derive(Clone, Debug, PartialEq)]
pub struct Feature {
    /// Name.
    pub name: String,
    /// Ids a bag, unless the pooling knob says otherwise.
    pub hots: Hots,
}

/// A table and what is looked up in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// The table.
    pub spec: TableSpec,
    /// Features that it serves.
    pub features: Vec<Feature>,
    /// Whether ids carry weights.
    pub weighted: bool,
}

/// What a command measures where knobs do not say.
#[derive(Clone, Copy, Debug)]
pub struct Defaults {
    /// Number of tables.
    pub tables: usize,
    /// Rows of each.
    pub rows: u64,
    /// Columns of each.
    pub dim: usize,
    /// Ids a bag.
    pub hots: Hots,
}

/// The tables that knobs ask for.
///
/// Errors: [`BenchError::Usage`] for knobs that make no sense, a file that cannot be read.
pub fn tables(knobs: &TableKnobs, defaults: Defaults) -> Result<Vec<Table>> {
    let mut tables = match &knobs.table_set {
        Some(path) if path.extension().is_some_and(|extension| extension == "toml") => {
            if knobs.rows_column.is_some() {
                return Err(BenchError::usage("--rows-column needs a csv as --table-set"));
            }
            of_config(&Config::load(path, &[])?)?
        }
        Some(path) => of_csv(path, knobs.rows_column.as_deref(), defaults)?,
        None => {
            let number = knobs.tables.unwrap_or(defaults.tables);
            let rows = knobs.rows.unwrap_or(defaults.rows);
            (0..number).map(|i| plain(format!("t{i}"), rows, defaults.dim, defaults.hots)).collect()
        }
    };
    if tables.is_empty() {
        return Err(BenchError::usage("there are no tables; give --tables of at least 1"));
    }
    for (i, table) in tables.iter_mut().enumerate() {
        let spec = &mut table.spec;
        if !knobs.dim.is_empty() {
            spec.dim = knobs.dim[i % knobs.dim.len()];
        }
        if spec.dim == 0 {
            return Err(BenchError::usage("--dim must be at least 1"));
        }
        if let Some(precision) = knobs.precision {
            spec.precision = match precision {
                PrecisionKnob::Fp32 => Precision::Fp32,
                PrecisionKnob::Fp16 => Precision::Fp16,
                PrecisionKnob::Bf16 => Precision::Bf16,
            };
        }
        if let Some(kind) = knobs.optimizer {
            spec.optimizer = optimizer(kind);
        }
        if let Some(most) = knobs.rows_max {
            spec.rows = spec.rows.min(most);
        }
        table.weighted |= knobs.weighted;
        if table.weighted && spec.pooling != Pooling::Sum {
            let name = &spec.name;
            return Err(BenchError::usage(format!("table {name}: --weighted needs sum pooling")));
        }
    }
    Ok(tables)
}

/// A table of float32 rows with row-wise AdaGrad and one feature.
fn plain(name: String, rows: u64, dim: usize, hots: Hots) -> Table {
    Table {
        features: vec![Feature { name: name.clone(), hots }],
        spec: TableSpec {
            name,
            kind: TableKind::Static,
            rows,
            dim,
            precision: Precision::Fp32,
            pooling: Pooling::Sum,
            init: Init::default(),
            optimizer: optimizer(OptimizerKnob::RowwiseAdagrad),
        },
        weighted: false,
    }
}

/// An optimizer at its usual hyper-parameters.
#[must_use]
pub fn optimizer(kind: OptimizerKnob) -> SparseOptimizer {
    let (lr, eps, beta1, beta2, weight_decay) = (0.01, 1e-8, 0.9, 0.999, 0.0);
    let decay = WeightDecay::None;
    match kind {
        OptimizerKnob::Sgd => SparseOptimizer::Sgd { lr },
        OptimizerKnob::Adagrad => SparseOptimizer::Adagrad { lr, eps, decay },
        OptimizerKnob::RowwiseAdagrad => {
            SparseOptimizer::RowwiseAdagrad { lr, eps, decay, moment_scale: 1.0 }
        }
        OptimizerKnob::Adam => SparseOptimizer::Adam { lr, eps, beta1, beta2, weight_decay },
        OptimizerKnob::PartialRowwiseAdam => {
            SparseOptimizer::PartialRowwiseAdam { lr, eps, beta1, beta2, weight_decay }
        }
        OptimizerKnob::Lamb => SparseOptimizer::Lamb { lr, eps, beta1, beta2, weight_decay },
        OptimizerKnob::PartialRowwiseLamb => {
            SparseOptimizer::PartialRowwiseLamb { lr, eps, beta1, beta2, weight_decay }
        }
        OptimizerKnob::LarsSgd => {
            SparseOptimizer::LarsSgd { lr, eta: 0.001, momentum: 0.9, weight_decay }
        }
        OptimizerKnob::Ftrl => SparseOptimizer::Ftrl { lr, beta: 1.0, l1: 0.0, l2: 0.0 },
    }
}

/// The tables of a training configuration.
///
/// Errors: [`BenchError::Usage`] for dynamic tables, whose ids are not rows.
pub fn of_config(config: &Config) -> Result<Vec<Table>> {
    if let Some(table) = config.tables.iter().find(|table| table.kind != TableKind::Static) {
        return Err(BenchError::usage(format!(
            "table {} is dynamic: ids are drawn among the rows of static tables",
            table.name
        )));
    }
    let spread = config.data.synthetic.as_ref().map_or(0, |synthetic| synthetic.spec.hots_spread);
    let tables = config.tables.iter().map(|table| Table {
        spec: TableSpec {
            name: table.name.clone(),
            kind: TableKind::Static,
            rows: table.rows,
            dim: table.dim,
            precision: table.precision,
            pooling: table.pooling,
            init: table.init,
            optimizer: table.optimizer,
        },
        features: table
            .features
            .iter()
            .zip(&table.hots)
            .map(|(name, &mean)| Feature { name: name.clone(), hots: Hots { mean, spread } })
            .collect(),
        weighted: table.weighted,
    });
    Ok(tables.collect())
}

/// Tables of a csv: either `num_tables, vocabulary_size, hotness, dim`, a line for tables that
/// are alike, or `feature, <rows columns...>, mlperf_v2_multi_hot`, a line a table.
fn of_csv(path: &Path, rows_column: Option<&str>, defaults: Defaults) -> Result<Vec<Table>> {
    let bad = |reason: String| BenchError::BadFile { path: path.into(), reason };
    let text = std::fs::read_to_string(path)
        .map_err(|source| BenchError::Read { path: path.into(), source })?;
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let header: Vec<&str> = lines.next().unwrap_or_default().split(',').map(str::trim).collect();
    let column = |name: &str| header.iter().position(|column| *column == name);
    let need = |name: &str| {
        column(name).ok_or_else(|| bad(format!("no column {name} in: {}", header.join(", "))))
    };
    let counted = column("num_tables").is_some();
    let rows_name = rows_column.unwrap_or(match counted {
        true => "vocabulary_size",
        false => "mlperf_v2_rows",
    });
    let rows_at = need(rows_name)?;
    let hots_at = if counted {
        Some(need("hotness")?)
    } else if rows_name.starts_with("mlperf") {
        Some(need("mlperf_v2_multi_hot")?)
    } else {
        None
    };
    let dim_at = if counted { Some(need("dim")?) } else { None };
    let mut tables = Vec::new();
    for (number, line) in lines.enumerate() {
        let cells: Vec<&str> = line.split(',').map(str::trim).collect();
        let cell = |at: usize| {
            let text = cells.get(at).copied().unwrap_or_default();
            text.parse::<u64>().map_err(|_| {
                bad(format!("line {}, column {}: `{text}` is no number", number + 2, header[at]))
            })
        };
        let rows = cell(rows_at)?;
        let hots = hots_at.map(&cell).transpose()?.map_or(1, |hots| hots as usize);
        let dim = dim_at.map(&cell).transpose()?.map_or(defaults.dim, |dim| dim as usize);
        let copies = match column("num_tables") {
            Some(at) => cell(at)?,
            None => 1,
        };
        for _ in 0..copies {
            let name = match column("feature").and_then(|at| cells.get(at)) {
                Some(name) => (*name).to_owned(),
                None => format!("t{}", tables.len()),
            };
            tables.push(plain(name, rows, dim, Hots::fixed(hots)));
        }
    }
    Ok(tables)
}

/// Features of all tables with the columns that their pooled vectors take, one after the other,
/// and the elements from one sample's output to the next (a multiple of 16).
#[must_use]
pub fn features(tables: &[Table]) -> (Vec<FeatureSpec>, usize) {
    let mut column = 0;
    let mut features = Vec::new();
    for (index, table) in tables.iter().enumerate() {
        for feature in &table.features {
            features.push(FeatureSpec { name: feature.name.clone(), table: index, column });
            column += table.spec.dim;
        }
    }
    (features, column.next_multiple_of(16))
}

/// Bytes of weights and of state.
#[must_use]
pub fn bytes(tables: &[Table]) -> u64 {
    let of_table = |table: &Table| {
        let spec = &table.spec;
        let row = spec.dim * spec.precision.bytes() + 4 * spec.optimizer.state_columns(spec.dim);
        spec.rows.saturating_mul(row as u64)
    };
    tables.iter().map(of_table).fold(0, u64::saturating_add)
}

/// Refuses tables that memory does not hold, before they push everything else out of it.
///
/// Errors: [`BenchError::TooLarge`].
pub fn check_memory(bytes: u64) -> Result<()> {
    let needed = bytes >> 20;
    match machine::available_mib() {
        Some(available) if needed > available => Err(BenchError::TooLarge { needed, available }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEFAULTS: Defaults =
        Defaults { tables: 2, rows: 10, dim: 4, hots: Hots { mean: 3, spread: 0 } };

    fn csv(text: &str, knobs: TableKnobs) -> Result<Vec<Table>> {
        let file = tempfile::NamedTempFile::with_suffix(".csv").unwrap();
        std::fs::write(file.path(), text).unwrap();
        tables(&TableKnobs { table_set: Some(file.path().into()), ..knobs }, DEFAULTS)
    }

    #[test]
    fn dims_come_in_turn_and_rows_are_cut() {
        let knobs = TableKnobs {
            tables: Some(3),
            dim: vec![8, 16],
            rows_max: Some(7),
            optimizer: Some(OptimizerKnob::Sgd),
            ..TableKnobs::default()
        };
        let tables = tables(&knobs, DEFAULTS).unwrap();
        let dims: Vec<usize> = tables.iter().map(|table| table.spec.dim).collect();
        assert_eq!(dims, [8, 16, 8]);
        assert!(tables.iter().all(|table| table.spec.rows == 7));
        let (features, stride) = features(&tables);
        assert_eq!(features[2].column, 24);
        assert_eq!(stride, 32);
        assert_eq!(bytes(&tables), 7 * 4 * 32);
    }

    #[test]
    fn both_forms_of_csv_are_read() {
        let text = "num_tables,vocabulary_size,hotness,dim\n2,100,1,128\n1,50,20,64\n";
        let tables = csv(text, TableKnobs::default()).unwrap();
        let rows: Vec<u64> = tables.iter().map(|table| table.spec.rows).collect();
        assert_eq!(rows, [100, 100, 50]);
        assert_eq!(tables[2].features[0].hots, Hots::fixed(20));
        assert_eq!(tables[2].spec.dim, 64);

        let text = "feature,kaggle_rows,mlperf_v2_rows,mlperf_v2_multi_hot\nC1,5,40,3\n";
        let tables = csv(text, TableKnobs::default()).unwrap();
        assert_eq!((tables[0].spec.rows, tables[0].features[0].hots.mean), (40, 3));
        let knobs = TableKnobs { rows_column: Some("kaggle_rows".into()), ..TableKnobs::default() };
        let tables = csv(text, knobs).unwrap();
        assert_eq!((tables[0].spec.rows, tables[0].features[0].hots.mean), (5, 1));
    }

    #[test]
    fn faults_of_a_csv_name_their_place() {
        let error = csv("a,b\n1,2\n", TableKnobs::default()).unwrap_err().to_string();
        assert!(error.contains("no column mlperf_v2_rows in: a, b"), "{error}");
        let text = "num_tables,vocabulary_size,hotness,dim\n1,x,1,4\n";
        let error = csv(text, TableKnobs::default()).unwrap_err().to_string();
        assert!(error.contains("line 2, column vocabulary_size: `x`"), "{error}");
    }

    #[test]
    fn tables_that_memory_does_not_hold_are_refused() {
        let error = check_memory(1 << 60).unwrap_err().to_string();
        assert!(error.contains("--rows-max"), "{error}");
        check_memory(1 << 20).unwrap();
    }
}
