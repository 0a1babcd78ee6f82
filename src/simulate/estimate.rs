//! Costs of a step from tables, towers and topology, through the planner.

use std::collections::BTreeMap;

use tessera_embedding::EmbeddingError;
use tessera_embedding::plan::{Budget, RankStages, Route, Workload, plan, rank_stages};

use crate::Result;
use crate::plan::{SetDefaults, of_file};

use super::costs::{ClassCosts, LinkWork, Links, ms};
use super::spec::{Model, Scenario, Simulation};

/// Steps of the planner's search: as for a curve over replicas.
const SEARCH_STEPS: usize = 2_000;
/// Bytes of a dense parameter and of its gradient.
const PARAMETER_BYTES: f64 = 4.0;
/// Ranks whose costs differ by less than this share of the largest count as one class.
const SAME_SHARE: f64 = 0.01;

/// The classes of ranks of `model` under its plan, or why there is none.
///
/// Errors: tables that cannot be read or make no sense.
pub fn classes(
    model: &Model,
    simulation: &Simulation,
    scenario: &Scenario,
    links: &Links<'_>,
    batch: f64,
) -> Result<Result<Vec<ClassCosts>, String>> {
    let defaults = SetDefaults {
        rows_column: model.rows_column.as_deref(),
        dim: model.dim,
        optimizer: &model.optimizer,
    };
    let (tables, _) = of_file(&model.tables, &defaults)?;
    let mode = scenario.mode;
    let workload = Workload {
        row_buffers: if mode.reads_ahead() { 2 } else { 0 },
        // Bags whose rows come in two parts are summed where they are needed.
        route: mode.splits().then_some(Route::Unique),
        batches_in_flight: if mode.splits() { 3 } else { 2 },
        ..Workload::new(batch)
    };
    let topology = links.topology;
    let budget = Budget { steps: SEARCH_STEPS, ..Budget::default() };
    let planned = match plan(&tables, links.grid, topology, &workload, budget) {
        Err(error @ EmbeddingError::CannotPlace { .. }) => return Ok(Err(error.to_string())),
        other => other?,
    };
    let stages = rank_stages(&tables, &planned.plan, links.grid, topology, &workload)?;
    let towers = towers(model, simulation, links, batch);
    let loads = planned.ranks.iter().map(|load| load.memory_bytes);
    Ok(Ok(merge(
        &stages,
        loads,
        &|rank, stages, memory| ClassCosts {
            rank: links.grid.rank(0, rank),
            memory_bytes: Some(memory),
            ..with_tables(towers, stages, links)
        },
        links.grid.groups(),
    )))
}

/// What every rank does alike.
fn towers(model: &Model, simulation: &Simulation, links: &Links<'_>, batch: f64) -> ClassCosts {
    let dense_bytes = model.dense_parameters * PARAMETER_BYTES;
    ClassCosts {
        upload_ms: ms(batch * model.sample_bytes, links.topology.host_gb_per_s),
        dense_ms: batch * model.flops_per_sample / (simulation.tflops * 1e9),
        all_reduce: links.all_reduce(dense_bytes),
        // Parameters, gradients and a state: read, and two of them written.
        update_ms: ms(5.0 * dense_bytes, links.topology.device_gb_per_s),
        ..ClassCosts::default()
    }
}

fn with_tables(towers: ClassCosts, stages: &RankStages, links: &Links<'_>) -> ClassCosts {
    let topology = links.topology;
    let sent = LinkWork {
        near_ms: ms(stages.near_bytes, topology.intra_node.gb_per_s),
        far_ms: ms(stages.far_bytes, topology.inter_node.gb_per_s),
        latency_ms: links.exchange(0.0).latency_ms,
    };
    let sums = links.exchange(stages.sums_bytes);
    ClassCosts {
        keys: links.exchange(stages.ids_bytes),
        ssd_ms: ms(stages.ssd_bytes, topology.ssd_gb_per_s),
        host_ms: ms(stages.host_bytes, topology.host_gb_per_s),
        lookup_ms: ms(stages.lookup_bytes, topology.device_gb_per_s),
        exchange_out: sent,
        exchange_back: LinkWork {
            near_ms: sent.near_ms + sums.near_ms,
            far_ms: sent.far_ms + sums.far_ms,
            ..sent
        },
        update_ms: towers.update_ms + ms(stages.update_bytes, topology.device_gb_per_s),
        sync: links.sync(stages.sync_bytes),
        ..towers
    }
}

/// Ranks that do nearly the same become one class, with the most that any of them does.
fn merge(
    stages: &[RankStages],
    memory: impl Iterator<Item = u64>,
    costs: &dyn Fn(usize, &RankStages, f64) -> ClassCosts,
    groups: usize,
) -> Vec<ClassCosts> {
    let memory: Vec<f64> = memory.map(|bytes| bytes as f64).collect();
    let rows: Vec<[f64; 10]> =
        stages.iter().zip(&memory).map(|(stages, &memory)| row(stages, memory)).collect();
    let mut most = [0.0f64; 10];
    for row in &rows {
        for (most, x) in most.iter_mut().zip(row) {
            *most = most.max(*x);
        }
    }
    let mut merged: BTreeMap<[u64; 10], (usize, usize, [f64; 10])> = BTreeMap::new();
    for (rank, row) in rows.iter().enumerate() {
        let mut key = [0; 10];
        for ((key, x), most) in key.iter_mut().zip(row).zip(most) {
            *key = if most > 0.0 { (x / most / SAME_SHARE).round() as u64 } else { 0 };
        }
        let (_, count, largest) = merged.entry(key).or_insert((rank, 0, *row));
        *count += 1;
        for (largest, x) in largest.iter_mut().zip(row) {
            *largest = largest.max(*x);
        }
    }
    let mut classes: Vec<ClassCosts> = merged
        .into_values()
        .map(|(rank, count, largest)| {
            let (stages, memory) = unrow(largest);
            ClassCosts { count: count * groups, ..costs(rank, &stages, memory) }
        })
        .collect();
    classes.sort_by_key(|class| class.rank);
    classes
}

fn row(s: &RankStages, memory: f64) -> [f64; 10] {
    [
        s.ids_bytes,
        s.lookup_bytes,
        s.near_bytes,
        s.far_bytes,
        s.sums_bytes,
        s.update_bytes,
        s.host_bytes,
        s.ssd_bytes,
        s.sync_bytes,
        memory,
    ]
}

fn unrow(row: [f64; 10]) -> (RankStages, f64) {
    let [
        ids_bytes,
        lookup_bytes,
        near_bytes,
        far_bytes,
        sums_bytes,
        update_bytes,
        host_bytes,
        ssd_bytes,
        sync_bytes,
        memory,
    ] = row;
    let stages = RankStages {
        ids_bytes,
        lookup_bytes,
        near_bytes,
        far_bytes,
        sums_bytes,
        update_bytes,
        host_bytes,
        ssd_bytes,
        sync_bytes,
    };
    (stages, memory)
}
