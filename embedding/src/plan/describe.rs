//! What is told of a placement: the plan, its estimates, and why each table is cut as it is.

use super::layout::Layout;
use super::planner::{Planned, RankLoad, ShardLoad};
use super::search::Placed;
use super::solve::Facts;
use super::{Plan, TablePlan};
use crate::Result;

/// The plan of a placement, and what is to be said about it.
pub(super) fn describe(
    placed: &Placed<'_>,
    facts: &Facts<'_>,
    replicas: usize,
    notes: Vec<String>,
) -> Result<Planned> {
    let problem = placed.problem;
    let mut tables = Vec::with_capacity(placed.at.len());
    let mut loads = Vec::new();
    let mut why = Vec::with_capacity(placed.at.len());
    let mut ranks: Vec<RankLoad> = placed
        .cost
        .iter()
        .zip(&placed.memory)
        .map(|(cost, memory)| RankLoad {
            bytes: 0,
            memory_bytes: memory + placed.floor.memory,
            cost: cost + placed.floor.cost,
        })
        .collect();
    let mean = placed.mean();
    for table in 0..placed.at.len() {
        let layout = placed.layout(table);
        let shards = layout.shards(&placed.at[table], problem.per_node);
        let costs = layout.pieces.iter().flat_map(|piece| &piece.loads).map(|load| load.cost);
        let mut with_cost: Vec<_> = shards.into_iter().zip(costs).collect();
        with_cost.sort_by_key(|(shard, _)| (shard.columns.start, shard.rank));
        for (shard, cost) in &with_cost {
            let bytes = (facts.bytes)(table, shard);
            ranks[shard.rank].bytes += bytes;
            loads.push(ShardLoad { bytes, cost_ms: *cost });
        }
        let (name, rows, dim) = (facts.name)(table);
        why.push(reason(&problem.layouts[table], layout, problem.capacity, mean, facts, table));
        tables.push(TablePlan {
            table: name.to_owned(),
            rows,
            dim,
            sharding: layout.sharding,
            route: layout.route,
            shards: with_cost.into_iter().map(|(shard, _)| shard).collect(),
        });
    }
    let plan = Plan::new(problem.ranks, problem.per_node, replicas, tables)?;
    Ok(Planned {
        plan,
        shards: loads,
        max_over_mean: ratio(&ranks),
        ranks,
        capacity_bytes: problem.capacity,
        latency_ms: 0.0,
        why,
        notes,
    })
}

/// Largest cost over the mean.
pub(super) fn ratio(ranks: &[RankLoad]) -> f64 {
    let mean = ranks.iter().map(|rank| rank.cost).sum::<f64>() / ranks.len() as f64;
    let most = ranks.iter().map(|rank| rank.cost).fold(0.0, f64::max);
    if mean > 0.0 { most / mean } else { 1.0 }
}

/// Why a table is cut as it is.
fn reason(
    all: &[Layout],
    chosen: &Layout,
    capacity: u64,
    even: f64,
    facts: &Facts<'_>,
    table: usize,
) -> String {
    let of = |layout: &Layout| format!("{:.4} a rank, {:.4} in all", layout.peak, layout.work);
    if (facts.forced)(table) {
        return format!("asked for: {}", of(chosen));
    }
    if let [_] = all {
        return format!("the only way to cut it: {}", of(chosen));
    }
    let other = |layout: &&Layout| {
        (layout.sharding, layout.route, layout.pieces.len())
            != (chosen.sharding, chosen.route, chosen.pieces.len())
    };
    let fits = |layout: &&Layout| layout.peak_memory <= capacity;
    let by_work = |a: &&Layout, b: &&Layout| a.work.total_cmp(&b.work);
    let next = all.iter().filter(other).filter(fits).min_by(by_work);
    let least = all.iter().min_by(by_work).unwrap_or(chosen);
    match next {
        None => format!("nothing else fits a rank's memory: {}", of(chosen)),
        Some(next) if chosen.work <= next.work => {
            format!("least work: {}; next is {}: {}", of(chosen), next.words(), of(next))
        }
        Some(_) if least.peak_memory > capacity => format!(
            "{} needs {} bytes on a rank, which has {capacity}: {}",
            least.words(),
            least.peak_memory,
            of(chosen)
        ),
        Some(next) => format!(
            "for evenness ({even:.4} a rank): {}; least work is {}: {}",
            of(chosen),
            next.words(),
            of(next)
        ),
    }
}
