//! The benchmark program of Tessera: lookups, updates, training steps and operations between ranks,
//! through the code that training uses, against this machine's own limit.
//!
//! Every command measures the limit first (`gather`, or copies for `comm`), checks the answer of the code under test
//! against a naive computation (`check`, `naive`), and only then takes times (`drive`). What it
//! gives is a [`Document`](document::Document): a table, JSON, or a report with plots.
//! docs/PERFORMANCE.md says what the figures mean.

pub mod cache;
pub mod check;
pub mod comm;
pub mod compare;
pub mod document;
pub mod draw;
pub mod drive;
mod error;
pub mod feed;
pub mod gather;
pub mod knobs;
pub mod machine;
pub mod naive;
pub mod pipeline;
pub mod report;
pub mod requests;
pub mod run;
pub mod stats;
pub mod step;
pub mod tables;
pub mod workloads;

pub use error::{BenchError, Result};
