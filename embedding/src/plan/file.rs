//! A plan as a document: what is written to JSON and read back.
//!
//! Reading goes through [`Plan::new`], so that a file edited by hand is checked as much as a plan
//! made here. docs/planning.md shows the format.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::{Plan, Planned, Route, Shard, Sharding, TablePlan};
use crate::{EmbeddingError, Result};

/// Name and version of the format.
const FORMAT: &str = "tessera-plan-1";

/// A plan, and what it was estimated to cost. `bytes`, `cost`, `max_over_mean` and `hash` may be
/// absent in a plan written by hand.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlanFile {
    /// `tessera-plan-1`.
    pub format: String,
    /// Ranks of a group.
    pub ranks: usize,
    /// Successive ranks of a group on one node.
    pub ranks_per_node: usize,
    /// Groups that each hold all tables.
    pub replicas: usize,
    /// [`Plan::hash`] as hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hash: Option<String>,
    /// Largest cost of a rank over the mean of all ranks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_over_mean: Option<f64>,
    /// The tables, in order.
    pub tables: Vec<TableRecord>,
    /// All shards, table after table.
    pub shards: Vec<ShardRecord>,
    /// Cost and memory of each rank.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rank_loads: Vec<super::RankLoad>,
    /// What a reader should know about the plan.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub notes: Vec<String>,
    /// How large tiers of memory should be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tiers: Option<super::TierAdvice>,
}

/// A table of a [`PlanFile`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableRecord {
    /// Name.
    pub table: String,
    /// Rows.
    pub rows: u64,
    /// Columns.
    pub dim: usize,
    /// How it is cut.
    pub sharding: Sharding,
    /// What travels.
    pub route: Route,
    /// Why it is cut so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
}

/// A shard of a [`PlanFile`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShardRecord {
    /// Name of the table.
    pub table: String,
    /// Rank within the group.
    pub rank: usize,
    /// First row, and one past the last.
    pub rows: [u64; 2],
    /// First column, and one past the last.
    pub cols: [usize; 2],
    /// Rows with their optimizer state, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Milliseconds a step, or the unit of the costs given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<f64>,
}

impl PlanFile {
    /// A plan without estimates.
    #[must_use]
    pub fn bare(plan: &Plan) -> Self {
        let record = |table: &TablePlan| TableRecord {
            table: table.table.clone(),
            rows: table.rows,
            dim: table.dim,
            sharding: table.sharding,
            route: table.route,
            why: None,
        };
        let shards = plan.tables().iter().flat_map(|table| {
            table.shards.iter().map(|shard| ShardRecord {
                table: table.table.clone(),
                rank: shard.rank,
                rows: [shard.rows.start, shard.rows.end],
                cols: [shard.columns.start, shard.columns.end],
                bytes: None,
                cost: None,
            })
        });
        Self {
            format: FORMAT.into(),
            ranks: plan.ranks(),
            ranks_per_node: plan.ranks_per_node(),
            replicas: plan.replicas(),
            hash: Some(format!("{:016x}", plan.hash())),
            max_over_mean: None,
            tables: plan.tables().iter().map(record).collect(),
            shards: shards.collect(),
            rank_loads: Vec::new(),
            notes: Vec::new(),
            tiers: None,
        }
    }

    /// A plan with its estimates.
    #[must_use]
    pub fn new(planned: &Planned) -> Self {
        let mut file = Self::bare(&planned.plan);
        file.max_over_mean = Some(planned.max_over_mean);
        for (record, why) in file.tables.iter_mut().zip(&planned.why) {
            record.why = Some(why.clone());
        }
        for (record, load) in file.shards.iter_mut().zip(&planned.shards) {
            record.bytes = Some(load.bytes);
            record.cost = Some(load.cost_ms);
        }
        file.rank_loads.clone_from(&planned.ranks);
        file.notes.clone_from(&planned.notes);
        file
    }

    /// The plan, checked.
    ///
    /// Errors: [`EmbeddingError::Plan`]: another format, a shard of a table that is not listed, a
    /// hash of another plan, and all that [`Plan::new`] refuses.
    pub fn plan(&self) -> Result<Plan> {
        let refuse = |fault: String| Err(EmbeddingError::Plan { faults: vec![fault] });
        if self.format != FORMAT {
            return refuse(format!("format `{}`; this version reads {FORMAT}", self.format));
        }
        let mut tables: Vec<TablePlan> = self.tables.iter().map(TablePlan::from).collect();
        let numbers: hashbrown::HashMap<&str, usize> =
            self.tables.iter().zip(0..).map(|(table, i)| (table.table.as_str(), i)).collect();
        for shard in &self.shards {
            let Some(&number) = numbers.get(shard.table.as_str()) else {
                return refuse(format!("a shard of table {}, which is not listed", shard.table));
            };
            let [r0, r1] = shard.rows;
            let [c0, c1] = shard.cols;
            let shard = Shard {
                rank: shard.rank,
                rows: Range { start: r0, end: r1 },
                columns: Range { start: c0, end: c1 },
            };
            tables[number].shards.push(shard);
        }
        let plan = Plan::new(self.ranks, self.ranks_per_node, self.replicas, tables)?;
        let hash = format!("{:016x}", plan.hash());
        match &self.hash {
            Some(given) if *given != hash => refuse(format!(
                "the hash is {hash}, not {given}: the file was changed (take `hash` out of it to \
                 use it as it is)"
            )),
            _ => Ok(plan),
        }
    }
}

impl From<&TableRecord> for TablePlan {
    fn from(record: &TableRecord) -> Self {
        Self {
            table: record.table.clone(),
            rows: record.rows,
            dim: record.dim,
            sharding: record.sharding,
            route: record.route,
            shards: Vec::new(),
        }
    }
}
