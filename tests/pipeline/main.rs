//! Modes, depths and micro-batches of the pipeline: the bits of one stage after the other.

#[path = "../common/mod.rs"]
mod common;

mod clusters;
mod modes;
mod sleeps;
mod traces;
