//! What a rank does with the others besides sharing tables: agree, add, and take its part.
//!
//! Alone, nothing here waits or sends. With others, every rank makes the same calls in the same
//! order, whatever its data.

use std::ops::Range;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tessera_comm::{Communicator, Options, Wire, share, single};

use crate::config::{Config, differing_keys};
use crate::{Error, Result};

/// A rank among the ranks of a run.
pub struct Ranks {
    control: Communicator,
    /// Whether this is the first rank of its group of two-dimensional parallelism.
    leads_group: bool,
}

impl Ranks {
    /// The only rank.
    #[must_use]
    pub fn alone() -> Self {
        Self { control: single(&Options::default()), leads_group: true }
    }

    /// This rank of `world`, the first of its group of two-dimensional parallelism or not.
    #[must_use]
    pub fn new(world: Communicator, leads_group: bool) -> Self {
        Self { control: world, leads_group }
    }

    /// The same for another thread, with a communicator called `name`. All ranks call it.
    ///
    /// Errors: those of any collective.
    pub fn duplicate(&self, name: &str) -> Result<Self> {
        Ok(Self { control: self.control.duplicate(name)?, leads_group: self.leads_group })
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

    /// The step that messages belong to from now on.
    pub fn set_step(&self, step: u64) {
        self.control.set_step(step);
    }

    /// This rank's samples of a global batch: contiguous, and the first ranks take the remainder.
    #[must_use]
    pub fn part(&self, samples: usize) -> Range<usize> {
        share(samples, self.rank(), self.size())
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
        agree(&self.control, result)
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
        let [sum] = self.sum([if self.leads_group { value } else { 0.0 }])?;
        Ok(sum)
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

/// `result`, unless another rank's is an error. A collective.
///
/// Errors: this rank's own, else [`Error::OtherRank`] of the first rank that has one.
pub fn agree<T>(ranks: &Communicator, result: Result<T>) -> Result<T> {
    let mut value = None;
    agreed(ranks, result.map(|own| value = Some(own)))?;
    Ok(value.expect("no rank has an error"))
}

/// Gives all ranks' values, in rank order. A collective.
///
/// Errors: if any rank has one, this rank's own, else [`Error::OtherRank`] with the first such
/// rank's; [`Error::Comm`].
pub fn agreed<T>(ranks: &Communicator, outcome: Result<T>) -> Result<Vec<T>>
where
    T: Serialize + DeserializeOwned,
{
    let told = outcome.as_ref().map_err(ToString::to_string);
    let told = serde_json::to_vec(&told).expect("outcomes have string keys only");
    let gathered = ranks.all_gather(told).wait();
    outcome?;
    let gathered = gathered?;
    let mut values = Vec::with_capacity(ranks.size());
    for (&rank, text) in ranks.world_ranks().iter().zip(gathered.iter()) {
        let value = serde_json::from_slice::<Result<T, String>>(text)
            .unwrap_or_else(|error| Err(format!("it is another version of this program: {error}")));
        values.push(value.map_err(|reason| Error::OtherRank { rank, reason })?);
    }
    Ok(values)
}

/// Checks that all ranks were given the same configuration, but for what each may have for itself.
/// A collective.
///
/// Errors, on all ranks alike: [`Error::OtherConfig`].
pub fn same_config(ranks: &Communicator, config: &Config) -> Result<()> {
    let all = agreed(ranks, Ok(config.resolved.clone()))?;
    for (rank, other) in all.iter().enumerate().skip(1) {
        let keys = differing_keys(&all[0], other);
        if !keys.is_empty() {
            return Err(Error::OtherConfig { rank, keys });
        }
    }
    Ok(())
}

/// Lets the first rank do `work`, such as changing a pointer file, and tells all how it went. A
/// collective.
///
/// Errors: what `work` says, on all ranks, as [`agreed`].
pub fn on_first(ranks: &Communicator, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let outcome = if ranks.rank() == 0 { work() } else { Ok(()) };
    agreed(ranks, outcome).map(|_| ())
}

#[cfg(test)]
mod tests {
    use std::io;

    use tessera_comm::threads;

    use super::*;

    fn refusal(what: &str) -> Error {
        Error::Write { path: what.into(), source: io::Error::other("no") }
    }

    #[test]
    fn all_ranks_get_all_values_or_an_error() {
        for size in 1..=4 {
            let all = threads::run(size, &Options::default(), |ranks| {
                let rank = ranks.rank();
                let values = agreed(&ranks, Ok(rank * 10)).unwrap();
                let text = |outcome: Result<Vec<usize>>| outcome.unwrap_err().to_string();
                let all = text(agreed(&ranks, Err(refusal(&format!("disk{rank}")))));
                let last = if rank + 1 == size { Err(refusal("disk")) } else { Ok(1) };
                let last = text(agreed(&ranks, last));
                let first = on_first(&ranks, || Err(refusal("disk"))).unwrap_err().to_string();
                (values, all, last, first)
            });
            let expected: Vec<usize> = (0..size).map(|rank| rank * 10).collect();
            for (rank, (values, all, last, first)) in all.unwrap().into_iter().enumerate() {
                assert_eq!(values, expected);
                assert_eq!(all, format!("cannot write disk{rank}: no"));
                let of = |other: usize| match other == rank {
                    true => "cannot write disk: no".to_owned(),
                    false => format!("rank {other}: cannot write disk: no"),
                };
                assert_eq!([last, first], [of(size - 1), of(0)]);
            }
        }
    }
}
