//! Integration tests of the embedding tables.

mod against_oracle;
mod common;
mod determinism;
mod dynamic;
mod edges;
mod golden;
mod oracle;
mod rounding;
