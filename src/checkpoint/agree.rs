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

use crate::ranks::agreed;
use crate::{Error, Result};

const BUSY: u8 = 1;
const DONE: u8 = 0;

/// Work on one rank that may take longer than the time limit calls this now and then, after each
/// few seconds at most.
pub type Meet<'a> = dyn FnMut() -> Result<()> + 'a;

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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tessera_comm::{Options, threads};

    use super::*;

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
