//! Tests of whole models: against a naive oracle, against values that peers published, and for
//! the same bits on any number of threads. Most run on every device there is; and the operations of
//! a GPU, one by one, against the CPU's.

mod cuda_operations;
mod determinism;
mod fixture;
mod golden;
mod gradients;
mod oracle;
mod training;
