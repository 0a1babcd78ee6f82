//! Embedding tables on a GPU, or the stand-in of tests/emu: the CPU's bits, and the golden values.
//! Every test says that it was skipped where there is neither.

mod collections;
#[path = "../all/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../all/golden.rs"]
#[allow(dead_code)]
mod golden;
mod operations;

use tessera_device::Cuda;
use tessera_device::cuda::testing;

/// Alone each file would show no more, and take ten times as long on the stand-in.
#[test]
fn golden_tables_of_an_optimizer_together() {
    if let Some(cuda) = testing::cuda() {
        golden::all_tables_of_an_optimizer_together(&cuda);
    }
}

/// A GPU whose buffers have exactly their size, and the host.
fn devices() -> Option<(tessera_device::Cpu, Cuda)> {
    Some((common::any_cpu(), testing::cuda()?))
}
