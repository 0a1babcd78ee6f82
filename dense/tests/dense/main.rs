//! Tests of whole models: against a naive oracle, against values that peers published, and for
//! the same bits on any number of threads.

mod determinism;
mod fixture;
mod golden;
mod gradients;
mod operations;
mod oracle;
mod training;
