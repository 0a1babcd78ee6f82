//! Times between ranks: what all of them took is what the slowest took.

use std::hint::black_box;
use std::time::Instant;

use tessera_comm::Communicator;
use tessera_device::{Cpu, Simd};

use super::operation::{Operation, Turn};
use crate::Result;
use crate::drive::{Pace, Sample, measure};
use crate::gather::{Gather, Hint};
use crate::knobs::{Hots, TableKnobs};
use crate::requests::{Draw, requests};
use crate::stats::median;
use crate::tables::{Defaults, bytes, check_memory, tables};

/// Passes that a limit is the median of.
const PASSES: usize = 11;

/// A pass copies at least so many bytes, so that a clock can time it.
const PASS_BYTES: usize = 1 << 20;

/// How operations are repeated.
#[derive(Clone, Copy, Debug)]
pub struct Repeat {
    /// Operations before those that count.
    pub warmup: usize,
    /// Operations that count.
    pub iterations: usize,
    /// Vector instructions of codecs.
    pub simd: Simd,
    /// Numbers of a codec's row.
    pub dim: usize,
}

/// The longest of all ranks' times in seconds, entry by entry.
fn slowest(comm: &Communicator, seconds: &[f64]) -> Result<Vec<f64>> {
    let ns = seconds.iter().map(|s| (s * 1e9) as u64).collect();
    Ok(comm.all_max(ns).wait()?.into_iter().map(|ns| ns as f64 / 1e9).collect())
}

/// Checks an operation's answer, repeats it in a closed loop, and gives samples whose times are
/// those of the slowest rank, from when all ranks were ready.
///
/// Errors: a wrong answer; those of the operation.
pub fn repeat(
    comm: &Communicator,
    operation: Operation,
    bytes: usize,
    how: Repeat,
) -> Result<Vec<Sample>> {
    let elements = operation.elements(bytes, how.dim);
    let mut turn = Turn::new(comm, operation, elements, how.dim, how.simd);
    turn.check()?;
    let pace = Pace { warmup: how.warmup, iterations: how.iterations, rate: None };
    let mut samples = measure(&mut turn, pace, |_| {})?;
    let own: Vec<f64> = samples.iter().map(|sample| sample.service_s).collect();
    for (sample, seconds) in samples.iter_mut().zip(slowest(comm, &own)?) {
        sample.service_s = seconds;
        sample.latency_s = seconds;
    }
    Ok(samples)
}

/// The limit of an exchange through memory: 10^9 bytes a second that each rank copies from one
/// buffer of `bytes` to another while all others do the same. Buffers that fit a cache are copied
/// in it.
///
/// Errors: those of an operation between ranks.
pub fn copy_gb_per_s(comm: &Communicator, bytes: usize) -> Result<f64> {
    let from = vec![1u8; bytes];
    let mut to = vec![2u8; bytes];
    let copies = PASS_BYTES.div_ceil(bytes.max(1)).max(1);
    let mut pass = || -> Result<f64> {
        comm.barrier().wait()?;
        let start = Instant::now();
        for _ in 0..copies {
            black_box(&mut to).copy_from_slice(black_box(&from));
        }
        Ok(start.elapsed().as_secs_f64())
    };
    pass()?;
    let own = (0..PASSES).map(|_| pass()).collect::<Result<Vec<f64>>>()?;
    Ok((bytes * copies) as f64 / median(&slowest(comm, &own)?) / 1e9)
}

/// 10^9 bytes a second of random rows of 256 bytes that each rank reads with the threads of its
/// `cpu` while all others do the same: what lookups are bound by.
///
/// Errors: no memory; those of an operation between ranks.
pub fn gather_gb_per_s(comm: &Communicator, cpu: &Cpu) -> Result<f64> {
    let knobs = TableKnobs::default();
    let defaults = Defaults { tables: 1, rows: 500_000, dim: 64, hots: Hots::fixed(20) };
    let tables = tables(&knobs, defaults)?;
    check_memory(bytes(&tables))?;
    let seed = comm.rank() as u64 + 1;
    let draw = Draw { batch: 2048, hots: None, requests: 8, dense: 0, seed };
    let mut gather = Gather::new(cpu, &tables)?;
    let plans: Vec<_> =
        requests(&tables, &knobs, draw)?.iter().map(|r| gather.plan(&tables, r)).collect();
    let mut own = Vec::with_capacity(PASSES);
    for pass in 0..=PASSES {
        comm.barrier().wait()?;
        let seconds = gather.run(&plans[pass % plans.len()], Hint::T1);
        // The first touches the output's memory.
        if pass > 0 {
            own.push(seconds);
        }
    }
    let row_bytes = tables[0].spec.dim * tables[0].spec.precision.bytes();
    let read = (plans[0].rows() * row_bytes) as f64;
    Ok(read / median(&slowest(comm, &own)?) / 1e9)
}
