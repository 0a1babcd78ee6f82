//! Planning from costs that are given: whatever measured or estimated them.

use super::cost::Load;
use super::describe::ratio;
use super::layout::{Layout, Piece, column_cuts, column_parts, row_cuts};
use super::planner::{Budget, Planned, RankLoad, ShardLoad};
use super::search::Problem;
use super::solve::{Facts, solve};
use super::{Plan, Route, Sharding};
use crate::{EmbeddingError, Result};

/// Halvings of the range of levels.
const BISECTIONS: usize = 60;

/// A table whose whole cost is known. A shard's share of cost and bytes is its share of the table.
#[derive(Clone, Debug, PartialEq)]
pub struct GivenTable {
    /// Name, unique.
    pub name: String,
    /// Rows.
    pub rows: u64,
    /// Columns, from 1.
    pub dim: usize,
    /// Cost of the whole table, in any unit.
    pub cost: f64,
    /// Memory of the whole table.
    pub bytes: u64,
    /// The sharding asked for: `table_wise`, `column_wise` or `row_wise`. `None`: whole or by
    /// columns, and by rows only where no cut by columns fits a rank.
    pub sharding: Option<Sharding>,
}

/// Plans tables of given costs on `ranks` ranks of `bytes_max` bytes each.
///
/// Errors: [`EmbeddingError::PlanInput`] for tables that make no sense,
/// [`EmbeddingError::CannotPlace`] for one that has no room.
pub fn plan_given(
    tables: &[GivenTable],
    ranks: usize,
    bytes_max: u64,
    budget: Budget,
) -> Result<Planned> {
    let mut faults = Vec::new();
    if ranks == 0 {
        faults.push("0 ranks; at least 1 is needed".to_owned());
    }
    let mut names = hashbrown::HashSet::new();
    for table in tables {
        let name = &table.name;
        if !names.insert(name.as_str()) {
            faults.push(format!("table {name} is there twice"));
        }
        if table.dim == 0 {
            faults.push(format!("table {name}: dim is 0; it must be from 1 up"));
        }
        if !(table.cost >= 0.0 && table.cost.is_finite()) {
            faults.push(format!("table {name}: cost {}; it must be from 0 up", table.cost));
        }
        if let Some(sharding) = table.sharding
            && !matches!(sharding, Sharding::TableWise | Sharding::ColumnWise | Sharding::RowWise)
        {
            faults.push(format!(
                "table {name}: {sharding} has no given cost; table_wise, column_wise and row_wise \
                 have"
            ));
        }
    }
    if !faults.is_empty() {
        return Err(EmbeddingError::PlanInput { faults });
    }
    let problem = Problem {
        ranks,
        per_node: ranks,
        capacity: bytes_max,
        layouts: tables.iter().map(|table| layouts(table, ranks, bytes_max)).collect(),
    };
    let facts = Facts {
        name: &|table| (tables[table].name.as_str(), tables[table].rows, tables[table].dim),
        total_bytes: &|table| tables[table].bytes,
        bytes: &|table, shard| {
            let rows = shard.rows.end - shard.rows.start;
            bytes(&tables[table], rows, shard.columns.len())
        },
        forced: &|table| tables[table].sharding.is_some_and(|s| s == Sharding::RowWise),
    };
    let mut planned = trim(solve(&problem, &facts, 1, budget)?, tables)?;
    planned.note_unevenness();
    Ok(planned)
}

/// Cuts the rows of row-wise tables unevenly, so that ranks with less of the others get more of
/// these, as far as memory goes.
///
/// With `f(r)` the share of all row-wise tables on rank `r`: `f(r) = min(room(r), level - other(r))`
/// in units of their cost, for the level at which the shares add up to 1.
fn trim(planned: Planned, tables: &[GivenTable]) -> Result<Planned> {
    let plans = planned.plan.tables();
    let by_rows: Vec<usize> = (0..tables.len())
        .filter(|&t| plans[t].sharding == Sharding::RowWise && tables[t].rows > 0)
        .collect();
    let cost: f64 = by_rows.iter().map(|&t| tables[t].cost).sum();
    let total_bytes: f64 = by_rows.iter().map(|&t| tables[t].bytes as f64).sum();
    if by_rows.is_empty() || cost <= 0.0 {
        return Ok(planned);
    }
    let mut others: Vec<(f64, f64)> =
        planned.ranks.iter().map(|rank| (rank.cost, rank.bytes as f64)).collect();
    let mut first = 0;
    for (t, plan) in plans.iter().enumerate() {
        if by_rows.binary_search(&t).is_ok() {
            for (shard, load) in plan.shards.iter().zip(&planned.shards[first..]) {
                others[shard.rank].0 -= load.cost_ms;
                others[shard.rank].1 -= load.bytes as f64;
            }
        }
        first += plan.shards.len();
    }
    // A row or two a table of rounding must fit as well.
    let rounding: f64 =
        by_rows.iter().map(|&t| 2.0 * (tables[t].bytes as f64 / tables[t].rows as f64 + 1.0)).sum();
    let share = |level: f64, rank: usize| {
        let room =
            (planned.capacity_bytes as f64 - others[rank].1 - rounding) / total_bytes.max(1.0);
        ((level - others[rank].0) / cost).min(room).max(0.0)
    };
    let sum = |level: f64| (0..others.len()).map(|rank| share(level, rank)).sum::<f64>();
    let (mut low, mut high) = (0.0, planned.cost_max());
    if sum(high) < 1.0 {
        return Ok(planned);
    }
    for _ in 0..BISECTIONS {
        let middle = (low + high) / 2.0;
        if sum(middle) < 1.0 { low = middle } else { high = middle }
    }
    let total = sum(high);
    let mut below = 0.0;
    let ends: Vec<f64> = (0..others.len())
        .map(|rank| {
            below += share(high, rank) / total;
            below
        })
        .collect();
    recut(planned, tables, &by_rows, &ends)
}

/// The plan with `tables[by_rows]` cut at these shares of their rows.
fn recut(
    planned: Planned,
    tables: &[GivenTable],
    by_rows: &[usize],
    ends: &[f64],
) -> Result<Planned> {
    let mut plans = planned.plan.tables().to_vec();
    let mut why = planned.why.clone();
    for &t in by_rows {
        let rows = tables[t].rows;
        let mut start = 0;
        for (shard, &share) in plans[t].shards.iter_mut().zip(ends) {
            let last = shard.rank + 1 == ends.len();
            let end = if last { rows } else { ((share * rows as f64).round() as u64).min(rows) };
            shard.rows = start..end.max(start);
            start = shard.rows.end;
        }
        why[t] += "; rows are cut so that ranks carry the same";
    }
    let mut shards = Vec::with_capacity(planned.shards.len());
    let mut ranks = vec![RankLoad { bytes: 0, memory_bytes: 0, cost: 0.0 }; planned.ranks.len()];
    for (plan, table) in plans.iter().zip(tables) {
        for shard in &plan.shards {
            let load = load(table, shard.rows.end - shard.rows.start, shard.columns.len());
            shards.push(ShardLoad { bytes: load.memory, cost_ms: load.cost });
            ranks[shard.rank].bytes += load.memory;
            ranks[shard.rank].memory_bytes += load.memory;
            ranks[shard.rank].cost += load.cost;
        }
    }
    let max_over_mean = ratio(&ranks);
    let fits = ranks.iter().all(|rank| rank.bytes <= planned.capacity_bytes);
    if !fits || max_over_mean >= planned.max_over_mean {
        return Ok(planned);
    }
    let per_node = planned.plan.ranks_per_node();
    let plan = Plan::new(planned.plan.ranks(), per_node, planned.plan.replicas(), plans)?;
    Ok(Planned { plan, shards, ranks, max_over_mean, why, ..planned })
}

/// Whole, by columns in every number of parts, or by rows over all ranks.
fn layouts(table: &GivenTable, ranks: usize, bytes_max: u64) -> Vec<Layout> {
    let add =
        |sharding, pieces| Layout::new(sharding, Route::Pooled, pieces, Load::default(), ranks);
    let piece = |columns: &std::ops::Range<usize>, rows: Vec<std::ops::Range<u64>>| Piece {
        loads: rows.iter().map(|rows| load(table, rows.end - rows.start, columns.len())).collect(),
        columns: columns.clone(),
        rows,
    };
    let mut found = Vec::new();
    if table.sharding != Some(Sharding::RowWise) {
        let most = if table.sharding == Some(Sharding::TableWise) { 1 } else { ranks };
        for parts in column_parts(table.dim, most) {
            // Which of the two it is called depends on what the search makes of it, not on what
            // the table was before.
            let sharding = if parts == 1 { Sharding::TableWise } else { Sharding::ColumnWise };
            let cuts = column_cuts(table.dim, parts);
            let whole = |columns| piece(columns, std::iter::once(0..table.rows).collect());
            found.push(add(sharding, cuts.iter().map(whole).collect()));
        }
    }
    let fits = |layout: &Layout| layout.peak_memory <= bytes_max;
    let by_rows = match table.sharding {
        Some(sharding) => sharding == Sharding::RowWise,
        None => !found.iter().any(fits),
    };
    if by_rows {
        let rows = row_cuts(table.rows, ranks);
        found.push(add(Sharding::RowWise, vec![piece(&(0..table.dim), rows)]));
    }
    found
}

fn load(table: &GivenTable, rows: u64, columns: usize) -> Load {
    let share = share(table, rows, columns);
    Load { cost: table.cost * share, memory: bytes(table, rows, columns) }
}

/// A shard's share of its table's area; a table without rows has none anywhere.
fn share(table: &GivenTable, rows: u64, columns: usize) -> f64 {
    if table.rows == 0 {
        return 0.0;
    }
    rows as f64 / table.rows as f64 * (columns as f64 / table.dim as f64)
}

/// Bytes of a shard, rounded up.
fn bytes(table: &GivenTable, rows: u64, columns: usize) -> u64 {
    let area = u128::from(table.rows) * table.dim as u128;
    let part = u128::from(rows) * columns as u128;
    match u128::from(table.bytes).checked_mul(part) {
        Some(0) => 0,
        Some(product) => u64::try_from(product.div_ceil(area)).unwrap_or(u64::MAX),
        // At such sizes rounding does not matter.
        None => (table.bytes as f64 * share(table, rows, columns)) as u64,
    }
}
