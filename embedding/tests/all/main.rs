//! Integration tests of the embedding tables.

mod against_oracle;
mod common;
mod determinism;
mod dynamic;
mod edges;
mod golden;
mod oracle;
mod rounding;

/// On every instruction set of this machine.
#[test]
fn every_golden_file_alone() {
    common::machines(&[1]).iter().for_each(golden::every_file_alone);
}

#[test]
fn golden_tables_of_an_optimizer_together() {
    common::machines(&[1, 3]).iter().for_each(golden::all_tables_of_an_optimizer_together);
}
