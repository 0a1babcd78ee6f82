//! Checkpoints: written by any ranks and loaded by any others, under failing writes and damage.

mod changes;
#[path = "../common/mod.rs"]
mod common;
mod disk;
mod faults;
mod layouts;
mod links;
mod parts;
mod ranks;
mod runs;
mod tiers;
mod versions;
