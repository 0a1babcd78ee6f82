//! The tables to plan: of a configuration, of a table set, or with their costs.

use std::collections::HashMap;
use std::path::Path;

use tessera_embedding::plan::{GivenTable, Sharding, TableLoad};
use tessera_embedding::{Precision, SparseOptimizer, WeightDecay};

use super::csv::Csv;
use crate::config::Config;
use crate::{Error, Result};

/// The tables of a configuration. `hots` stands for the ids per sample where the format has a
/// fixed number; elsewhere one is assumed until a sample tells.
pub(super) fn of_config(config: &Config) -> Vec<TableLoad> {
    let load = |table: &crate::config::TableConfig| {
        let ids = table.hots.iter().map(|&hots| hots as f64).collect();
        TableLoad {
            element_bytes: table.precision.bytes(),
            sharding: table.sharding,
            ..TableLoad::new(&table.name, table.rows, table.dim, &table.optimizer, ids)
        }
    };
    let mut tables: Vec<TableLoad> = config.tables.iter().map(load).collect();
    if config.model.wide {
        // The wide part is one more table of one column, looked up by the same features.
        let wide = |table: &TableLoad| TableLoad {
            name: format!("{}.wide", table.name),
            dim: 1,
            ..table.clone()
        };
        tables.extend(tables.iter().map(wide).collect::<Vec<_>>());
    }
    tables
}

/// What the file of a table set leaves open.
pub(crate) struct SetDefaults<'a> {
    /// Column that holds the rows, if it has none of the usual names.
    pub(crate) rows_column: Option<&'a str>,
    /// Columns of tables whose file does not tell.
    pub(crate) dim: usize,
    /// Optimizer whose state the tables keep.
    pub(crate) optimizer: &'a str,
}

/// The tables of a set, and what to note about how it was read.
pub(crate) fn of_file(
    path: &Path,
    defaults: &SetDefaults<'_>,
) -> Result<(Vec<TableLoad>, Vec<String>)> {
    let csv = Csv::read(path)?;
    let rows = match defaults.rows_column {
        Some(name) => csv.need(&[name])?,
        None => csv.need(&["rows", "vocabulary_size", "hash_size", "mlperf_v2_rows"])?,
    };
    let hots = csv.find(&["hots", "hotness", "ids_per_sample", "mlperf_v2_multi_hot"]);
    let dim = csv.find(&["dim", "emb_dim"]);
    let name = csv.find(&["table", "name", "feature"]);
    let count = csv.find(&["num_tables"]);
    let precision = csv.find(&["precision"]);
    let sharding = csv.find(&["sharding"]);
    let optimizer = optimizer(defaults.optimizer)?;
    let mut notes = vec![format!("state of optimizer {}", defaults.optimizer)];
    if hots.is_none() {
        notes.push("one id a sample: the file has no column hots".into());
    }
    if dim.is_none() {
        notes.push(format!("{} columns a table: the file has no column dim", defaults.dim));
    }
    let mut tables = Vec::new();
    for row in 0..csv.rows() {
        let copies = count.map_or(Ok(1), |column| csv.value::<u64>(row, column))?;
        let stem = name.map_or_else(|| format!("t{}", row + 1), |c| csv.text(row, c).to_owned());
        let load = TableLoad {
            element_bytes: precision
                .map_or(Ok(Precision::Fp32), |column| self::precision(csv.text(row, column)))?
                .bytes(),
            sharding: sharding.map_or(Ok(None), |column| self::sharding(csv.text(row, column)))?,
            ..TableLoad::new(
                &stem,
                csv.value(row, rows)?,
                dim.map_or(Ok(defaults.dim), |column| csv.value(row, column))?,
                &optimizer,
                vec![hots.map_or(Ok(1.0), |column| csv.value(row, column))?],
            )
        };
        for copy in 1..=copies {
            let name = if copies == 1 { stem.clone() } else { format!("{stem}_{copy}") };
            tables.push(TableLoad { name, ..load.clone() });
        }
    }
    let names = tables.iter_mut().map(|table| &mut table.name);
    notes.extend(rename(names));
    Ok((tables, notes))
}

/// The tables of a file of costs, and what to note about how it was read.
pub(super) fn given(path: &Path) -> Result<(Vec<GivenTable>, Vec<String>)> {
    let csv = Csv::read(path)?;
    let name = csv.need(&["table", "name"])?;
    let rows = csv.need(&["rows", "hash_size"])?;
    let dim = csv.need(&["dim", "emb_dim", "cols"])?;
    let cost = csv.need(&["cost", "cost_ms", "perf_total_ms"])?;
    // TorchRec's plans count memory in GB.
    let (bytes, unit) = match csv.find(&["bytes"]) {
        Some(bytes) => (bytes, 1.0),
        None => (csv.need(&["bytes", "hbm_gb"])?, 1e9),
    };
    let sharding = csv.find(&["sharding"]);
    let mut tables = Vec::with_capacity(csv.rows());
    for row in 0..csv.rows() {
        let amount: f64 = csv.value(row, bytes)?;
        if !(amount >= 0.0 && amount.is_finite()) {
            return Err(Error::Usage(format!(
                "{} row {}: {amount} bytes",
                path.display(),
                row + 1
            )));
        }
        tables.push(GivenTable {
            name: csv.text(row, name).to_owned(),
            rows: csv.value(row, rows)?,
            dim: csv.value(row, dim)?,
            cost: csv.value(row, cost)?,
            bytes: (amount * unit).round() as u64,
            sharding: sharding.map_or(Ok(None), |column| self::sharding(csv.text(row, column)))?,
        });
    }
    let notes = rename(tables.iter_mut().map(|table| &mut table.name));
    Ok((tables, notes))
}

/// Gives each name that was there before a number of its own, and says so.
fn rename<'n>(names: impl Iterator<Item = &'n mut String>) -> Vec<String> {
    let mut seen: HashMap<String, u64> = HashMap::new();
    let mut notes = Vec::new();
    for name in names {
        let count = seen.entry(name.clone()).or_insert(0);
        *count += 1;
        if *count > 1 {
            let new = format!("{name}#{count}");
            notes.push(format!("table {name} is in the file more than once: this one is {new}"));
            *name = new;
        }
    }
    notes
}

/// Our names, and TorchRec's abbreviations.
fn sharding(text: &str) -> Result<Option<Sharding>> {
    Ok(Some(match text {
        "" | "auto" => return Ok(None),
        "DP" => Sharding::DataParallel,
        "TW" => Sharding::TableWise,
        "CW" => Sharding::ColumnWise,
        "RW" => Sharding::RowWise,
        "TWRW" => Sharding::TableRowWise,
        "GRID" => Sharding::Grid,
        name => name.parse().map_err(Error::Usage)?,
    }))
}

fn precision(text: &str) -> Result<Precision> {
    match text {
        "fp32" | "" => Ok(Precision::Fp32),
        "fp16" => Ok(Precision::Fp16),
        "bf16" => Ok(Precision::Bf16),
        other => Err(Error::Usage(format!("`{other}` is no precision: fp32, fp16 or bf16"))),
    }
}

/// An optimizer of that kind: only its state counts here.
fn optimizer(kind: &str) -> Result<SparseOptimizer> {
    let (lr, eps, decay) = (0.0, 0.0, WeightDecay::None);
    let (beta1, beta2, weight_decay) = (0.0, 0.0, 0.0);
    let kinds = [
        SparseOptimizer::Sgd { lr },
        SparseOptimizer::Adagrad { lr, eps, decay },
        SparseOptimizer::RowwiseAdagrad { lr, eps, decay, moment_scale: 1.0 },
        SparseOptimizer::Adam { lr, eps, beta1, beta2, weight_decay },
        SparseOptimizer::PartialRowwiseAdam { lr, eps, beta1, beta2, weight_decay },
        SparseOptimizer::Lamb { lr, eps, beta1, beta2, weight_decay },
        SparseOptimizer::PartialRowwiseLamb { lr, eps, beta1, beta2, weight_decay },
        SparseOptimizer::LarsSgd { lr, eta: 0.0, momentum: 0.0, weight_decay },
        SparseOptimizer::Ftrl { lr, beta: 0.0, l1: 0.0, l2: 0.0 },
    ];
    kinds.iter().find(|optimizer| optimizer.name() == kind).copied().ok_or_else(|| {
        let names: Vec<&str> = kinds.iter().map(SparseOptimizer::name).collect();
        Error::Usage(format!("optimizer {kind}: not one of {}", names.join(", ")))
    })
}
