//! From tables, topology and workload to a plan and its estimates.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::cost::Model;
use super::layout::layouts;
use super::load::{TableLoad, Workload};
use super::search::Problem;
use super::solve::{Facts, solve};
use super::{Grid2d, Plan, Topology};
use crate::{EmbeddingError, Result};

/// Max/mean above which the report says what holds it up.
const UNEVEN: f64 = 1.1;

/// How long to look for a better plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Steps of local search.
    pub steps: usize,
    /// A limit that no usual search meets. One that does says so in its notes: then the plan may
    /// differ from run to run.
    pub cap: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self { steps: 20_000, cap: Duration::from_secs(8) }
    }
}

/// What a shard of a plan was estimated to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ShardLoad {
    /// Its rows with their state, in bytes.
    pub bytes: u64,
    /// Milliseconds a step, or the unit of the costs given.
    pub cost_ms: f64,
}

/// What a rank of a plan was estimated to take.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RankLoad {
    /// Rows with their state, in bytes.
    pub bytes: u64,
    /// Those and the buffers of batches in flight.
    pub memory_bytes: u64,
    /// Milliseconds a step, or the unit of the costs given.
    pub cost: f64,
}

/// A plan and the reasons for it.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Estimates of its shards, table after table in the plan's order.
    pub shards: Vec<ShardLoad>,
    /// Estimates of its ranks.
    pub ranks: Vec<RankLoad>,
    /// Largest cost of a rank over the mean; 1 when nothing costs anything.
    pub max_over_mean: f64,
    /// Memory that each rank had to offer.
    pub capacity_bytes: u64,
    /// Latency of a step's exchanges in milliseconds: the same for all plans, so in no cost.
    pub latency_ms: f64,
    /// Why each table is cut as it is.
    pub why: Vec<String>,
    /// What else a reader should know.
    pub notes: Vec<String>,
}

impl Planned {
    /// Largest cost of a rank.
    #[must_use]
    pub fn cost_max(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.cost).fold(0.0, f64::max)
    }

    /// Mean cost of the ranks.
    #[must_use]
    pub fn cost_mean(&self) -> f64 {
        self.ranks.iter().map(|rank| rank.cost).sum::<f64>() / self.ranks.len() as f64
    }

    /// Notes what holds an uneven plan up.
    pub(super) fn note_unevenness(&mut self) {
        if self.max_over_mean <= UNEVEN {
            return;
        }
        let most = self.cost_max();
        let hottest = self.ranks.iter().position(|rank| rank.cost >= most).unwrap_or(0);
        let shards = self.plan.tables().iter().flat_map(|table| {
            table.shards.iter().map(move |shard| (shard.rank, table.table.as_str()))
        });
        let mut on: Vec<(f64, &str)> = shards
            .zip(&self.shards)
            .filter(|((rank, _), _)| *rank == hottest)
            .map(|((_, table), load)| (load.cost_ms, table))
            .collect();
        on.sort_by(|a, b| b.0.total_cmp(&a.0));
        let list: Vec<String> =
            on.iter().take(3).map(|(cost, table)| format!("{table} ({cost:.4})")).collect();
        self.notes.push(format!(
            "rank {hottest} costs {:.3} times the mean, and no other cut or place that was tried \
             lowers it; its costliest shards: {}",
            self.max_over_mean,
            list.join(", ")
        ));
    }
}

/// Plans `tables` on the ranks of one group of `grid`.
///
/// Errors: [`EmbeddingError::PlanInput`] when tables, topology or ranks make no sense;
/// [`EmbeddingError::CannotPlace`] with the name and bytes of a table that has no room.
pub fn plan(
    tables: &[TableLoad],
    grid: Grid2d,
    topology: &Topology,
    workload: &Workload,
    budget: Budget,
) -> Result<Planned> {
    check(tables, topology, workload)?;
    let (ranks, replicas) = (grid.ranks(), grid.groups());
    let per_node = grid.group_ranks_per_node(topology.node(grid.total())?);
    let model = Model::new(topology, workload, ranks, per_node, tables);
    let problem = Problem {
        ranks,
        per_node,
        capacity: topology.capacity_bytes(),
        layouts: tables
            .iter()
            .map(|table| layouts(table, &model, workload, ranks, per_node))
            .collect(),
    };
    let facts = Facts {
        name: &|table: usize| (&tables[table].name, tables[table].rows, tables[table].dim),
        total_bytes: &|table: usize| tables[table].total_bytes(),
        bytes: &|table: usize, shard: &super::Shard| {
            tables[table].bytes(&shard.rows, &shard.columns)
        },
        forced: &|table: usize| tables[table].sharding.is_some(),
    };
    let mut planned = solve(&problem, &facts, replicas, budget)?;
    planned.latency_ms = model.latency_ms();
    planned.note_unevenness();
    if model.device_share() < 1.0 {
        planned.notes.push(format!(
            "devices have room for {:.1}% of all rows; the rest is in the tiers below, and costs \
             count the misses",
            100.0 * model.device_share()
        ));
    }
    let guessed = tables.iter().filter(|table| table.stats.is_none()).count();
    if guessed > 0 {
        planned.notes.push(format!(
            "{guessed} of {} tables count their ids as uniform: give a sample of data for better \
             estimates",
            tables.len()
        ));
    }
    Ok(planned)
}

/// All faults of the input.
fn check(tables: &[TableLoad], topology: &Topology, workload: &Workload) -> Result<()> {
    let mut faults: Vec<String> = topology
        .faults()
        .into_iter()
        .map(|(field, rule)| format!("topology {}: {field} {rule}", topology.name))
        .collect();
    let mut names = hashbrown::HashSet::new();
    for table in tables {
        faults.extend(table.faults());
        if !names.insert(table.name.as_str()) {
            faults.push(format!("table {} is there twice", table.name));
        }
    }
    if !(workload.batch_per_rank >= 0.0 && workload.batch_per_rank.is_finite()) {
        faults.push(format!("{} samples a rank", workload.batch_per_rank));
    }
    if faults.is_empty() { Ok(()) } else { Err(EmbeddingError::PlanInput { faults }) }
}
