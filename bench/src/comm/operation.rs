//! The operations that are measured, and their answers.
//!
//! A size is that of the larger of a rank's two buffers. On `n` ranks, for a size of `s` bytes:
//!
//! | operation | a rank gives | and gets | must cross its link |
//! |---|---|---|---|
//! | all_to_all_v | s | s | (n - 1)/n s |
//! | all_gather | s/n | s | (n - 1)/n s |
//! | all_reduce | s | s | 2 (n - 1)/n s |
//! | reduce_scatter | s | s/n | (n - 1)/n s |
//! | broadcast | s, the root alone | s | s |
//! | barrier | 0 | 0 | 0 |
//! | codec_* | s bytes of float32 encoded, then decoded | | s |
//!
//! The last column over the time is the bandwidth: the "bus bandwidth" of NCCL's tests, which can
//! be held against a link's whatever the operation and the number of ranks.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Serialize, Serializer};
use tessera_comm::{Codec, Communicator};
use tessera_device::Simd;

use crate::drive::{Stages, Workload};
use crate::{BenchError, Result};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // Documented where they are implemented.
pub enum Operation {
    AllToAllV,
    AllGather,
    AllReduce,
    ReduceScatter,
    Broadcast,
    Barrier,
    Codec(Codec),
}

impl Operation {
    /// All operations.
    pub const ALL: [Self; 10] = [
        Self::AllToAllV,
        Self::AllGather,
        Self::AllReduce,
        Self::ReduceScatter,
        Self::Broadcast,
        Self::Barrier,
        Self::Codec(Codec::Fp32),
        Self::Codec(Codec::Fp16),
        Self::Codec(Codec::Bf16),
        Self::Codec(Codec::Int8),
    ];

    /// Its name.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::AllToAllV => "all_to_all_v".into(),
            Self::AllGather => "all_gather".into(),
            Self::AllReduce => "all_reduce".into(),
            Self::ReduceScatter => "reduce_scatter".into(),
            Self::Broadcast => "broadcast".into(),
            Self::Barrier => "barrier".into(),
            Self::Codec(codec) => format!("codec_{}", codec.name()),
        }
    }

    /// Elements that a size of `bytes` has: whole rows of `dim` for codecs.
    #[must_use]
    pub fn elements(self, bytes: usize, dim: usize) -> usize {
        let elements = bytes / size_of::<f32>();
        match self {
            Self::Barrier => 0,
            Self::Codec(_) => elements - elements % dim,
            _ => elements,
        }
    }

    /// Bytes that must cross a rank's link, or be encoded, for a size of `bytes` on `ranks`.
    #[must_use]
    pub fn moved_bytes(self, bytes: usize, ranks: usize) -> f64 {
        let (bytes, others) = (bytes as f64, (ranks - 1) as f64 / ranks as f64);
        match self {
            Self::AllToAllV | Self::AllGather | Self::ReduceScatter => others * bytes,
            Self::AllReduce => 2.0 * others * bytes,
            Self::Broadcast | Self::Codec(_) => bytes,
            Self::Barrier => 0.0,
        }
    }
}

impl FromStr for Operation {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(Self::name).join(", ");
        let found = Self::ALL.into_iter().find(|operation| operation.name() == text);
        found.ok_or_else(|| format!("`{text}` is not one of {}", names()))
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name())
    }
}

impl Serialize for Operation {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Element `i` of a rank's data: small integers, so that sums of them are exact in any order.
fn value(rank: usize, i: usize) -> f32 {
    ((i * 7 + rank * 31) % 255) as f32 - 127.0
}

/// The part of rank `rank` of `len` elements on `ranks`: all parts differ by at most one.
fn part(len: usize, rank: usize, ranks: usize) -> Range<usize> {
    len * rank / ranks..len * (rank + 1) / ranks
}

/// Repeats one operation between the ranks of a group.
pub struct Turn<'a> {
    comm: &'a Communicator,
    operation: Operation,
    source: Vec<f32>,   // what this rank gives
    counts: Vec<usize>, // elements of every rank's part
    send: Vec<f32>,     // a copy of the source, used up by the operation
    result: Vec<f32>,
    encoded: Vec<u8>,
    simd: Simd,
    dim: usize,
}

impl<'a> Turn<'a> {
    /// `operation` with `elements` float32 numbers, in rows of `dim` for codecs.
    #[must_use]
    pub fn new(
        comm: &'a Communicator,
        operation: Operation,
        elements: usize,
        dim: usize,
        simd: Simd,
    ) -> Self {
        let (rank, ranks) = (comm.rank(), comm.size());
        let given = match operation {
            Operation::AllGather => part(elements, rank, ranks),
            Operation::Broadcast if rank != 0 => 0..0,
            _ => 0..elements,
        };
        Self {
            comm,
            operation,
            source: given.map(|i| value(rank, i)).collect(),
            counts: (0..ranks).map(|r| part(elements, r, ranks).len()).collect(),
            send: Vec::new(),
            result: Vec::new(),
            encoded: Vec::new(),
            simd,
            dim,
        }
    }

    /// Does the operation once and holds its result against one computed in sequence.
    ///
    /// Errors: [`BenchError::WrongAnswer`] naming rank and element; those of the operation.
    pub fn check(&mut self) -> Result<()> {
        self.prepare(0)?;
        self.serve()?;
        let (operation, rank) = (self.operation, self.comm.rank());
        let wrong = |what: String, got: f64, want: f64| {
            let what = format!("{operation}, rank {rank}, {what}");
            Err(BenchError::WrongAnswer { what, got, want })
        };
        let want = self.expected();
        if self.result.len() != want.len() {
            return wrong("its length".into(), self.result.len() as f64, want.len() as f64);
        }
        for (row, (got, want)) in
            self.result.chunks(self.dim).zip(want.chunks(self.dim)).enumerate()
        {
            let largest = want.iter().fold(0.0f32, |most, x| most.max(x.abs()));
            for (column, (&got, &want)) in got.iter().zip(want).enumerate() {
                let error_max = match operation {
                    Operation::Codec(codec) => codec.error_max(want, largest),
                    _ => 0.0,
                };
                let (got, want) = (f64::from(got), f64::from(want));
                let near = (got - want).abs() <= error_max; // what is not a number is not near
                if !near {
                    return wrong(format!("element {}", row * self.dim + column), got, want);
                }
            }
        }
        Ok(())
    }

    /// What the operation gives on this rank.
    fn expected(&self) -> Vec<f32> {
        let (rank, ranks) = (self.comm.rank(), self.comm.size());
        let elements: usize = self.counts.iter().sum();
        let mine = part(elements, rank, ranks);
        let sum = |i: usize| (0..ranks).map(|r| value(r, i)).sum::<f32>();
        match self.operation {
            Operation::AllToAllV => {
                (0..ranks).flat_map(|r| mine.clone().map(move |i| value(r, i))).collect()
            }
            Operation::AllGather => (0..ranks)
                .flat_map(|r| part(elements, r, ranks).map(move |i| value(r, i)))
                .collect(),
            Operation::AllReduce => (0..elements).map(sum).collect(),
            Operation::ReduceScatter => mine.map(sum).collect(),
            Operation::Broadcast => (0..elements).map(|i| value(0, i)).collect(),
            Operation::Barrier => Vec::new(),
            Operation::Codec(_) => self.source.clone(),
        }
    }
}

impl Workload for Turn<'_> {
    /// Copies what is given, and waits until every rank has.
    fn prepare(&mut self, _: usize) -> Result<()> {
        if !matches!(self.operation, Operation::Codec(_)) {
            self.comm.recycle(std::mem::take(&mut self.result));
            self.send = self.comm.buffer(self.source.len());
            self.send.extend_from_slice(&self.source);
        }
        Ok(self.comm.barrier().wait()?)
    }

    fn serve(&mut self) -> Result<Stages> {
        let (comm, send) = (self.comm, std::mem::take(&mut self.send));
        self.result = match self.operation {
            Operation::AllToAllV => comm.all_to_all_v(send, &self.counts).wait()?.into_data(),
            Operation::AllGather => comm.all_gather(send).wait()?.into_data(),
            Operation::AllReduce => comm.all_reduce(send).wait()?,
            Operation::ReduceScatter => comm.reduce_scatter(send, &self.counts).wait()?,
            Operation::Broadcast => comm.broadcast(send, 0).wait()?,
            Operation::Barrier => comm.barrier().wait().map(|()| send)?,
            Operation::Codec(codec) => {
                // Memory stays: after the first time neither vector grows.
                let mut decoded = std::mem::take(&mut self.result);
                self.encoded.clear();
                codec.encode(self.simd, &self.source, self.dim, &mut self.encoded);
                decoded.resize(self.source.len(), 0.0);
                codec.decode(self.simd, &self.encoded, self.dim, &mut decoded)?;
                decoded
            }
        };
        Ok(Stages::new())
    }
}

#[cfg(test)]
mod tests {
    use tessera_comm::{Options, threads};

    use super::*;

    #[test]
    fn every_operation_is_right_for_sizes_that_do_not_divide() {
        for ranks in [2, 3, 5] {
            let results = threads::run(ranks, &Options::default(), |comm| {
                for operation in Operation::ALL {
                    for bytes in [0, 4, 400, 4004, 40_000] {
                        let elements = operation.elements(bytes, 10);
                        Turn::new(&comm, operation, elements, 10, Simd::Baseline).check()?;
                    }
                }
                Ok::<_, BenchError>(())
            });
            for result in results.unwrap() {
                result.unwrap();
            }
        }
    }

    #[test]
    fn a_wrong_element_is_found_and_named() {
        let results = threads::run(2, &Options::default(), |comm| {
            let mut turn = Turn::new(&comm, Operation::Broadcast, 100, 10, Simd::Baseline);
            if comm.rank() == 0 {
                turn.source[42] += 1.0;
            }
            turn.check()
        });
        for (rank, result) in results.unwrap().into_iter().enumerate() {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(&format!("broadcast, rank {rank}, element 42 is ")), "{error}");
        }
    }

    #[test]
    fn bytes_that_cross_a_link_follow_the_number_of_ranks() {
        assert_eq!(Operation::AllToAllV.moved_bytes(1000, 4), 750.0);
        assert_eq!(Operation::AllReduce.moved_bytes(1000, 2), 1000.0);
        assert_eq!(Operation::Broadcast.moved_bytes(1000, 4), 1000.0);
        assert_eq!(Operation::Codec(Codec::Int8).elements(1000, 128), 128);
        for operation in Operation::ALL {
            assert_eq!(operation.name().parse(), Ok(operation));
        }
        assert!("gossip".parse::<Operation>().unwrap_err().contains("all_to_all_v, "));
    }
}
