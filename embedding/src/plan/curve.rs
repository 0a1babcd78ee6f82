//! How many replicas pay: the cost of a step over the number of groups of two-dimensional
//! parallelism.
//!
//! More groups are smaller: exchanges have fewer peers, and tables spread evenly over fewer ranks.
//! In return each rank holds more of the tables, and replicas have to be averaged.

use super::cost::ms;
use super::load::{TableLoad, Workload};
use super::planner::{Budget, Planned, plan};
use super::{Grid2d, Placement, Plan, Topology};
use crate::{EmbeddingError, Result};

/// One number of replicas.
#[derive(Debug)]
pub struct CurvePoint {
    /// The groups.
    pub grid: Grid2d,
    /// Mean cost of a rank, in milliseconds a step.
    pub work_ms: f64,
    /// Latency of the exchanges inside a group.
    pub latency_ms: f64,
    /// How far the hottest rank is above the mean.
    pub imbalance_ms: f64,
    /// Averaging of replicas, divided by the steps between.
    pub sync_ms: f64,
    /// Memory of the fullest rank.
    pub memory_bytes: u64,
    /// The group's plan, or which table has no room ([`EmbeddingError::CannotPlace`]).
    pub planned: Result<Planned>,
}

impl CurvePoint {
    /// Milliseconds a step; infinite when the tables have no room.
    #[must_use]
    pub fn total_ms(&self) -> f64 {
        match self.planned {
            Ok(_) => self.work_ms + self.latency_ms + self.imbalance_ms + self.sync_ms,
            Err(_) => f64::INFINITY,
        }
    }
}

/// Plans `total` ranks in every number of groups that divides them; `sync_every` steps lie between
/// synchronisations.
///
/// Errors: as [`plan`], but a number of groups without room is a point that says so.
pub fn curve(
    tables: &[TableLoad],
    total: usize,
    placement: Placement,
    sync_every: u64,
    topology: &Topology,
    workload: &Workload,
    budget: Budget,
) -> Result<Vec<CurvePoint>> {
    let mut points = Vec::new();
    for groups in (1..=total).filter(|groups| total.is_multiple_of(*groups)) {
        let grid = Grid2d::new(total, groups, placement)?;
        points.push(point(tables, grid, sync_every, topology, workload, budget)?);
    }
    Ok(points)
}

fn point(
    tables: &[TableLoad],
    grid: Grid2d,
    sync_every: u64,
    topology: &Topology,
    workload: &Workload,
    budget: Budget,
) -> Result<CurvePoint> {
    let planned = match plan(tables, grid, topology, workload, budget) {
        Err(error @ EmbeddingError::CannotPlace { .. }) => Err(error),
        other => Ok(other?),
    };
    let mut point = CurvePoint {
        grid,
        work_ms: 0.0,
        latency_ms: 0.0,
        imbalance_ms: 0.0,
        sync_ms: 0.0,
        memory_bytes: 0,
        planned,
    };
    if let Ok(planned) = &point.planned {
        point.work_ms = planned.cost_mean();
        point.latency_ms = planned.latency_ms;
        point.imbalance_ms = planned.cost_max() - planned.cost_mean();
        let sync = sync_ms(tables, planned, grid, topology, workload)?;
        point.sync_ms = sync / sync_every.max(1) as f64;
        point.memory_bytes = planned.ranks.iter().map(|rank| rank.memory_bytes).max().unwrap_or(0);
    }
    Ok(point)
}

/// One synchronisation of the fullest replica group: the rows that some replica touched, or the
/// whole shards where that is less, reduced and gathered (2 (M - 1) / M of them).
fn sync_ms(
    tables: &[TableLoad],
    planned: &Planned,
    grid: Grid2d,
    topology: &Topology,
    workload: &Workload,
) -> Result<f64> {
    let groups = grid.groups() as f64;
    let most = sync_bytes(tables, &planned.plan, grid, workload).into_iter().fold(0.0, f64::max);
    let near = grid.replicas_per_node(topology.node(grid.total())?) as f64;
    let sent = 2.0 * most;
    let intra = ms(sent * (near - 1.0) / groups, topology.intra_node.gb_per_s);
    let inter = ms(sent * (groups - near) / groups, topology.inter_node.gb_per_s);
    Ok(intra.max(inter))
}

/// Bytes of the rows of each rank of a group that some replica touched.
pub(super) fn sync_bytes(
    tables: &[TableLoad],
    plan: &Plan,
    grid: Grid2d,
    workload: &Workload,
) -> Vec<f64> {
    let mut bytes = vec![0.0; grid.ranks()];
    for (table, plan) in tables.iter().zip(plan.tables()) {
        let ids = workload.batch_per_rank * table.ids();
        let touched = table.unique(ids * grid.total() as f64);
        for shard in &plan.shards {
            let rows = (shard.rows.end - shard.rows.start) as f64;
            let share = match &table.stats {
                Some(stats) => stats.share(&shard.rows).1,
                None => rows / (table.rows.max(1)) as f64,
            };
            bytes[shard.rank] +=
                (touched * share).min(rows) * table.row_bytes(shard.columns.len()) as f64;
        }
    }
    bytes
}
