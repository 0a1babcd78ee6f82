//! Tessera trains deep learning recommendation models (DLRM, DCNv2) whose embedding tables are
//! larger than one device.
//!
//! This crate is the program: configuration, the model that joins embedding tables and dense
//! towers, the training loop, evaluation, checkpoints, metrics and the command line. The parts
//! it stands on are crates of their own; docs/ARCHITECTURE.md is the map.

pub mod checkpoint;
pub mod chrome_trace;
pub mod cli;
pub mod clock;
pub mod config;
pub mod console;
pub mod data_cmd;
pub mod doctor;
mod error;
pub mod evaluate;
pub mod evaluation;
pub mod export;
pub mod metrics;
pub mod model;
pub mod pipeline;
pub mod plan;
pub mod predict;
pub mod progress;
pub mod ranking;
pub mod ranks;
pub mod run_dir;
pub mod safetensors_io;
pub mod serve;
pub mod shares;
pub mod signals;
pub mod simulate;
pub mod source;
pub mod tensors;
#[cfg(test)]
#[path = "../tests/common/shared.rs"]
mod testing;
mod text;
pub mod trace;
pub mod train;
pub mod trainer;
pub mod window;

pub use error::{Error, Result};
