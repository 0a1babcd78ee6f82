//! What a rank does with the others besides sharing tables: agree, add, and take its part.
//!
//! Alone, nothing here waits or sends. With others, every rank makes the same calls in the same
//! order, whatever its data.

use std::ops::Range;

use tessera_comm::{Communicator, Options, Wire, single};

use crate::{Error, Result};

/// A rank among the ranks of a run.
pub struct Ranks {
    control: Communicator,
    dense: Communicator,
    /// Number of this rank's group of two-dimensional parallelism.
    group: usize,
}

impl Ranks {
    /// The only rank.
    ///
    /// Errors: none in practice.
    pub fn alone() -> Result<Self> {
        let control = single(&Options::default());
        let dense = control.duplicate("dense")?;
        Ok(Self { control, dense, group: 0 })
    }

    /// This rank of `world`, which is in group `group` of two-dimensional parallelism. All ranks
    /// call it.
    ///
    /// Errors: those of any collective.
    pub fn new(world: Communicator, group: usize) -> Result<Self> {
        let dense = world.duplicate("dense")?;
        Ok(Self { control: world, dense, group })
    }

    /// This rank's number.
    #[must_use]
    pub fn rank(&self) -> usize {
        self.control.rank()
    }

    /// Number of ranks.
    #[must_use]
    pub fn size(&self) -> usize {
        self.control.size()
    }

    /// Whether there is no other rank.
    #[must_use]
    pub fn is_alone(&self) -> bool {
        self.size() == 1
    }

    /// Whether this is the rank that writes the run's folder and speaks to people.
    #[must_use]
    pub fn is_first(&self) -> bool {
        self.rank() == 0
    }

    /// For checkpoints, and for what is agreed on between steps.
    #[must_use]
    pub fn control(&self) -> &Communicator {
        &self.control
    }

    /// For dense gradients, beside the tables' own exchanges.
    #[must_use]
    pub fn dense(&self) -> &Communicator {
        &self.dense
    }

    /// The step that messages belong to from now on.
    pub fn set_step(&self, step: u64) {
        self.control.set_step(step);
        self.dense.set_step(step);
    }

    /// This rank's samples of a global batch: contiguous, and the first ranks take the remainder.
    #[must_use]
    pub fn part(&self, samples: usize) -> Range<usize> {
        let (rank, size) = (self.rank(), self.size());
        let (each, more) = (samples / size, samples % size);
        let start = rank * each + rank.min(more);
        start..start + each + usize::from(rank < more)
    }

    /// Most samples that a rank's part of `samples` has.
    #[must_use]
    pub fn part_max(&self, samples: usize) -> usize {
        samples.div_ceil(self.size())
    }

    /// `result`, unless another rank's is an error. All ranks call it at the same place.
    ///
    /// Errors: this rank's own, else [`Error::OtherRank`] of the first rank that has one.
    pub fn agree<T>(&self, result: Result<T>) -> Result<T> {
        if self.is_alone() {
            return result;
        }
        let text = result.as_ref().err().map_or(String::new(), ToString::to_string);
        let all = self.control.all_gather(text.into_bytes()).wait();
        let value = result?;
        for (rank, text) in all?.iter().enumerate() {
            if !text.is_empty() {
                let reason = String::from_utf8_lossy(text).into_owned();
                return Err(Error::OtherRank { rank, reason });
            }
        }
        Ok(value)
    }

    /// Whether `flag` is set on any rank.
    ///
    /// Errors: those of any collective.
    pub fn any(&self, flag: bool) -> Result<bool> {
        if self.is_alone() {
            return Ok(flag);
        }
        Ok(self.control.all_max(vec![u64::from(flag)]).wait()? != [0])
    }

    /// The sums over all ranks, in rank order.
    ///
    /// Errors: those of any collective.
    pub fn sum<const N: usize>(&self, values: [f64; N]) -> Result<[f64; N]> {
        if self.is_alone() {
            return Ok(values);
        }
        let sums = self.control.all_reduce(values.to_vec()).wait()?;
        Ok(std::array::from_fn(|i| sums[i]))
    }

    /// The sum over groups of a value that all ranks of a group have.
    ///
    /// Errors: those of any collective.
    pub fn sum_over_groups(&self, value: f64) -> Result<f64> {
        if self.is_alone() {
            return Ok(value);
        }
        let all = self.control.all_gather(vec![(self.group as f64), value]).wait()?;
        let mut groups: Vec<[f64; 2]> =
            all.data().chunks_exact(2).map(|pair| [pair[0], pair[1]]).collect();
        groups.sort_by(|a, b| a[0].total_cmp(&b[0]));
        groups.dedup_by_key(|pair| pair[0]);
        Ok(groups.iter().map(|pair| pair[1]).sum())
    }

    /// Every rank's values, in rank order.
    ///
    /// Errors: those of any collective.
    pub fn gather<T: Wire>(&self, values: Vec<T>) -> Result<Vec<T>> {
        if self.is_alone() {
            return Ok(values);
        }
        Ok(self.control.all_gather(values).wait()?.into_data())
    }
}
