//! Which rank keeps which part of which table, and how to choose that.
//!
//! ```text
//! tables, features, ids --layouts--> ways to cut each table, each shard with cost and memory
//!   --choose--> one way a table   --place--> ranks   --improve--> Plan + report
//! ```
//! - A [`Plan`] is plain data that only a checking constructor makes: every table is tiled exactly
//!   by rectangles (rows, columns), each on one rank. Who holds a plan relies on it.
//! - [`Grid2d`] maps ranks to the groups and replicas of two-dimensional parallelism. A plan
//!   describes one group; all groups follow the same one.
//! - [`plan`] estimates costs from a [`Topology`] and a [`Workload`]; [`plan_given`] takes them as
//!   given. Both are deterministic: the same input gives the same plan and the same hash.
//! - [`curve`] tells how many replicas pay; [`rank_stages`] what each rank of a plan does, by stage.
//! - [`tier_advice`] tells from [`MissCurve`]s how large tiers of memory should be.
//!
//! Costs are milliseconds a training step. docs/planning.md has every term.

mod cost;
mod curve;
mod describe;
mod file;
mod given;
mod grid;
mod improve;
mod layout;
mod load;
mod miss_ratio;
mod planner;
mod sample;
mod search;
mod solve;
mod stages;
mod tiering;
mod topology;
mod types;

pub use curve::{CurvePoint, curve};
pub use file::{PlanFile, ShardRecord, TableRecord};
pub use given::{GivenTable, plan_given};
pub use grid::{Grid2d, Placement};
pub use layout::{column_cuts, row_cuts};
pub use load::{TableLoad, Workload};
pub use miss_ratio::{MissCurve, ROWS_TRACKED, ReuseCounter};
pub use planner::{Budget, Planned, RankLoad, ShardLoad, plan};
pub use sample::{IdCounter, IdStats};
pub use stages::{RankStages, rank_stages};
pub use tiering::{
    CURVE_PERCENTS, CurvePart, TableCurve, TierAdvice, TierJob, TierLoad, TierShare, TierSize,
    tier_advice,
};
pub use topology::{Link, Topology};
pub use types::{COLUMN_BLOCK, Plan, Route, Shard, Sharding, TablePlan};
