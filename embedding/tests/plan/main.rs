//! Sharding plans and the planner.

mod checks;
mod common;
mod properties;
mod sets;
