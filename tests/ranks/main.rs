//! Runs on several ranks: the answer of one rank, whoever keeps what and reads what, and what
//! happens when a rank fails.

mod codecs;
#[path = "../common/mod.rs"]
mod common;
mod failures;
mod golden;
mod groups;
mod uneven;
