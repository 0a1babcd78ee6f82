//! What each rank of a plan does in a step, stage by stage: the terms of a rank's cost before they
//! are added up, for those who overlap them.

use super::cost::{Model, Way};
use super::curve::sync_bytes;
use super::load::{TableLoad, Workload};
use super::{Grid2d, Plan, Route, Sharding, Topology};
use crate::Result;

/// A step of one rank, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct RankStages {
    /// Ids that the owner is sent.
    pub ids_bytes: f64,
    /// Memory that the forward pass of owner and source moves.
    pub lookup_bytes: f64,
    /// Vectors sent to ranks of the same node; as many gradients come back.
    pub near_bytes: f64,
    /// Vectors sent to other nodes; as many gradients come back.
    pub far_bytes: f64,
    /// Sent with the gradients, to all ranks alike: squares of other columns, rows of tables that
    /// every rank keeps.
    pub sums_bytes: f64,
    /// Memory that the backward pass and the update move.
    pub update_bytes: f64,
    /// Rows from host memory and back.
    pub host_bytes: f64,
    /// Rows from disks and back.
    pub ssd_bytes: f64,
    /// Touched rows that replicas average.
    pub sync_bytes: f64,
}

/// The stages of each rank of a group of `grid`, of a plan that was made for it.
///
/// Errors: [`crate::EmbeddingError::PlanInput`] when ranks do not fill the topology's nodes.
pub fn rank_stages(
    tables: &[TableLoad],
    plan: &Plan,
    grid: Grid2d,
    topology: &Topology,
    workload: &Workload,
) -> Result<Vec<RankStages>> {
    let ranks = grid.ranks();
    let per_node = grid.group_ranks_per_node(topology.node(grid.total())?);
    let model = Model::new(topology, workload, ranks, per_node, tables);
    let mut stages = vec![RankStages::default(); ranks];
    for (stage, bytes) in stages.iter_mut().zip(sync_bytes(tables, plan, grid, workload)) {
        stage.sync_bytes = bytes;
    }
    let (all, near) = (ranks as f64, per_node as f64);
    for (table, spread) in tables.iter().zip(plan.tables()) {
        if spread.sharding == Sharding::DataParallel {
            let work = model.copy_work(table);
            for stage in &mut stages {
                stage.lookup_bytes += work.lookup_bytes;
                stage.update_bytes += work.update_bytes;
                stage.sums_bytes += work.exchange_bytes;
            }
            continue;
        }
        if spread.route == Route::Unique {
            for stage in &mut stages {
                stage.lookup_bytes += model.source_bytes(table);
                stage.update_bytes += model.source_bytes(table);
            }
        }
        let by_node = matches!(spread.sharding, Sharding::TableRowWise | Sharding::Grid);
        let way = if by_node && spread.route == Route::Pooled { Way::Node } else { Way::Flat };
        for shard in spread.shards.iter().filter(|shard| !shard.is_empty()) {
            let stage = &mut stages[shard.rank];
            let part = Model::part(table, &shard.rows, &shard.columns);
            let work = model.owner_work(table, spread.route, &part);
            let (host, ssd) = model.miss_bytes(table, work.rows, part.columns);
            stage.ids_bytes += work.ids_bytes;
            stage.lookup_bytes += work.read_bytes + work.ids_bytes + work.out_bytes;
            stage.update_bytes += 2.0 * work.read_bytes + work.out_bytes;
            stage.sums_bytes += work.sums_bytes;
            stage.host_bytes += host;
            stage.ssd_bytes += ssd;
            let (inside, outside) = match way {
                Way::Flat => ((near - 1.0) / all, (all - near) / all),
                Way::Node => ((near - 1.0) / near, (all - near) / all / near),
            };
            stage.near_bytes += work.out_bytes * inside;
            stage.far_bytes += work.out_bytes * outside;
        }
    }
    Ok(stages)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Budget, Placement, plan};
    use crate::{SparseOptimizer, WeightDecay};

    /// The terms add up to what the planner counts, for every way to cut tables and both routes.
    #[test]
    fn stages_add_up_to_the_costs_of_the_plan() {
        let rowwise = SparseOptimizer::RowwiseAdagrad {
            lr: 0.1,
            eps: 0.0,
            decay: WeightDecay::None,
            moment_scale: 1.0,
        };
        // Host memory takes what the devices have no room for.
        let topology = Topology {
            device_bytes: 3_000_000,
            reserve_bytes: 0,
            host_bytes: 1 << 40,
            ..Topology::preset("h100").unwrap()
        };
        let grid = Grid2d::new(16, 1, Placement::Strided).unwrap();
        let shardings = [
            Sharding::DataParallel,
            Sharding::TableWise,
            Sharding::ColumnWise,
            Sharding::RowWise,
            Sharding::TableRowWise,
            Sharding::Grid,
        ];
        for route in [Route::Pooled, Route::Unique] {
            let workload = Workload { route: Some(route), ..Workload::new(64.0) };
            let table = |(index, sharding)| TableLoad {
                sharding: Some(sharding),
                ..TableLoad::new(format!("t{index}"), 40_000, 128, &rowwise, vec![3.0, 1.0])
            };
            let tables: Vec<TableLoad> = shardings.into_iter().enumerate().map(table).collect();
            let planned = plan(&tables, grid, &topology, &workload, Budget::default()).unwrap();
            let stages = rank_stages(&tables, &planned.plan, grid, &topology, &workload).unwrap();
            let ms = |bytes: f64, gb_per_s: f64| bytes / (gb_per_s * 1e6);
            for (stage, load) in stages.iter().zip(&planned.ranks) {
                let spread = |bytes: f64| {
                    ms(bytes * 7.0 / 16.0, topology.intra_node.gb_per_s)
                        .max(ms(bytes * 8.0 / 16.0, topology.inter_node.gb_per_s))
                };
                let near = ms(stage.near_bytes, topology.intra_node.gb_per_s);
                let far = ms(stage.far_bytes, topology.inter_node.gb_per_s);
                let fixed = ms(stage.lookup_bytes + stage.update_bytes, topology.device_gb_per_s)
                    + spread(stage.ids_bytes + stage.sums_bytes)
                    + ms(stage.host_bytes, topology.host_gb_per_s)
                    + ms(stage.ssd_bytes, topology.ssd_gb_per_s);
                // The planner lets links of pooled vectors work at once or in turn, by the way.
                let (low, high) = (fixed + 2.0 * near.max(far), fixed + 2.0 * (near + far));
                let slack = 1e-9 * high;
                assert!(
                    (low - slack..=high + slack).contains(&load.cost),
                    "{route}: {} is not in {low}..{high}",
                    load.cost
                );
                assert!(near + far < 0.5 * high, "{route}: {stage:?}");
            }
            assert!(stages.iter().all(|stage| stage.host_bytes > 0.0 && stage.sums_bytes > 0.0));
        }
    }
}
