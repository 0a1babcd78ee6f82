//! How ranks go through a checkpoint together: each does its part, and all learn how all fared.
//!
//! ```text
//! work, meeting the others every quarter of the time limit    -> so that waiting for a rank that
//! meet until nobody is busy                                      has more to do is not its loss
//! gather every rank's value or error text                     -> the same outcome everywhere
//! ```
//! How often ranks meet depends on time, but all decide by what all have gathered, so that they
//! post the same operations.

use std::time::Instant;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tessera_comm::Communicator;

use crate::{Error, Result};

const BUSY: u8 = 1;
const DONE: u8 = 0;

/// Work on one rank that may take longer than the time limit calls this now and then, after each
/// few seconds at most.
pub type Meet<'a> = dyn FnMut() -> Result<()> + 'a;

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
    let gathered = ranks.all_gather(told).wait()?;
    outcome?;
    let mut values = Vec::with_capacity(ranks.size());
    for (&rank, text) in ranks.world_ranks().iter().zip(gathered.iter()) {
        let value = serde_json::from_slice::<Result<T, String>>(text)
            .unwrap_or_else(|error| Err(format!("it is another version of this program: {error}")));
        values.push(value.map_err(|reason| Error::OtherRank { rank, reason })?);
    }
    Ok(values)
}

/// Does `work`, of whatever length on each rank, then as [`agreed`]. A collective.
pub(super) fn together<T>(
    ranks: &Communicator,
    work: impl FnOnce(&mut Meet) -> Result<T>,
) -> Result<Vec<T>>
where
    T: Serialize + DeserializeOwned,
{
    let every = ranks.time_limit() / 4;
    let mut last = Instant::now();
    let outcome = work(&mut || {
        if last.elapsed() >= every {
            ranks.all_gather(vec![BUSY]).wait()?;
            last = Instant::now();
        }
        Ok(())
    });
    if let Err(error @ Error::Comm(_)) = outcome {
        return Err(error);
    }
    while ranks.all_gather(vec![DONE]).wait()?.data().contains(&BUSY) {}
    agreed(ranks, outcome)
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
    use std::time::Duration;

    use tessera_comm::{Options, threads};

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

    /// A rank that had to write more than the others once was taken for lost.
    #[test]
    fn a_rank_with_much_to_do_is_waited_for() {
        let options = Options { time_limit: Duration::from_secs(2), ..Options::default() };
        let pieces = threads::run(3, &options, |ranks| {
            together(&ranks, |meet| {
                let pieces = ranks.rank() * 15;
                for _ in 0..pieces {
                    std::thread::sleep(Duration::from_millis(100));
                    meet()?;
                }
                Ok(pieces)
            })
        });
        for pieces in pieces.unwrap() {
            assert_eq!(pieces.unwrap(), [0, 15, 30]);
        }
    }
}
