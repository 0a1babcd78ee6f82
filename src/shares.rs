//! What each rank trains on in a step.
//!
//! Where all ranks read all data, a step's batch is the next one of the stream and a rank takes its
//! part: the batch does not depend on the number of ranks. Where each rank reads files of its own,
//! the batch is what all of them have next, in rank order; ranks come to the end of an epoch at
//! different steps, and those that have go on with no samples until all have:
//!
//! ```text
//! every rank    what comes next: a batch, the end of the epoch, of all, or a signal
//! gather        so that all take the same turn:
//!   a signal anywhere     nobody takes anything; what was read is kept
//!   a batch anywhere      a step; a rank at its epoch's end keeps that and has no samples
//!   else                  all are at the same end
//! ```

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tessera_data::{Batch, BatchParts, DataError, DataMetrics, Event, Jagged, Position};

use crate::checkpoint::Moment;
use crate::config::{Config, Read, Uneven};
use crate::model::Total;
use crate::ranks::{Ranks, agreed};
use crate::signals::Signals;
use crate::source::{Batches, Next, Part};
use crate::{Error, Result};

/// A rank's part of the batch of one step.
#[derive(Clone, Debug)]
pub struct Share {
    /// This rank's samples, which may be none.
    pub own: Batch,
    /// What the samples of all ranks add up to.
    pub total: Total,
    /// Epoch, from 0.
    pub epoch: u64,
    /// The position after the step, in the samples of all ranks together.
    pub after: Position,
    /// Every rank's own position after it, where each reads files of its own; else empty.
    pub positions: Vec<Position>,
}

impl Share {
    /// A whole batch, for the only rank.
    #[must_use]
    pub fn whole(batch: Batch, epoch: u64, after: Position) -> Self {
        let total = Total::of(&batch);
        Self { own: batch, total, epoch, after, positions: Vec::new() }
    }
}

/// What all ranks do next.
#[derive(Debug)]
pub enum Turn {
    /// A step.
    Step(Box<Share>),
    /// Nothing: all samples of an epoch have been trained on.
    EpochEnd,
    /// Nothing: the last epoch is over.
    End,
    /// Nothing yet: a signal came first, to some rank.
    Stopped,
}

/// What a rank has next, for the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Told {
    Batch { samples: u64, epoch: u64, after: Position },
    EpochEnd { after: Position },
    End,
    Stopped,
}

impl Told {
    fn of(next: &Next) -> Self {
        match next {
            Next::Event(Event::Batch { batch, epoch, after }) => {
                Self::Batch { samples: batch.samples() as u64, epoch: *epoch, after: *after }
            }
            Next::Event(Event::EpochEnd { after, .. }) => Self::EpochEnd { after: *after },
            Next::End => Self::End,
            Next::Stopped => Self::Stopped,
        }
    }
}

/// The training data as this rank's parts of steps. All ranks make the same calls.
pub struct Shares {
    ranks: Ranks,
    batches: Batches,
    epoch_samples: Option<u64>,
    /// What was read and not used.
    kept: Option<Next>,
    /// Where every rank is in its own files; `None` where all read the same.
    own: Option<Own>,
}

/// What ranks with files of their own need.
struct Own {
    positions: Vec<Position>,
    uneven: Uneven,
    batch_size: u64,
    /// A batch of no samples.
    empty: Batch,
    /// This rank's files.
    files: Vec<PathBuf>,
}

impl Shares {
    /// The training data of a configuration from a moment on; `None` when a signal came to any
    /// rank on the way there. A collective.
    ///
    /// Errors: data that cannot be opened, on any rank.
    pub fn train(
        config: &Config,
        ranks: Ranks,
        moment: &Moment,
        metrics: &DataMetrics,
        signals: &Signals,
    ) -> Result<Option<Self>> {
        let (rank, size) = (ranks.rank(), ranks.size());
        let data = &config.data;
        let own = (data.read == Read::Own).then(|| Own {
            positions: match moment.positions.len() {
                // Before the first step.
                0 => vec![moment.position; size],
                _ => moment.positions.clone(),
            },
            uneven: config.parallel.uneven,
            batch_size: data.batch_size as u64,
            empty: nothing(config),
            files: data.train.iter().skip(rank).step_by(size).cloned().collect(),
        });
        let batches = match &own {
            None => Batches::train(config, moment.position, metrics, signals),
            Some(own) => {
                let batch_size = ranks.part(data.batch_size).len();
                let part = Part { files: own.files.clone(), batch_size };
                Batches::train_part(config, part, own.positions[rank], metrics, signals)
            }
        };
        let batches = ranks.agree(batches)?;
        if ranks.any(batches.is_none())? {
            return Ok(None);
        }
        let Some(batches) = batches else { return Ok(None) };
        let mut epoch_samples = batches.epoch_samples();
        if own.is_some() && !ranks.is_alone() {
            epoch_samples = agreed(ranks.control(), Ok(epoch_samples))?.into_iter().sum();
        }
        Ok(Some(Self { ranks, batches, epoch_samples, kept: None, own }))
    }

    /// The ranks that share the data.
    #[must_use]
    pub fn ranks(&self) -> &Ranks {
        &self.ranks
    }

    /// Samples of an epoch over all ranks, if the data tell without being read.
    #[must_use]
    pub fn epoch_samples(&self) -> Option<u64> {
        self.epoch_samples
    }

    /// The files that this rank reads.
    #[must_use]
    pub fn files<'c>(&'c self, config: &'c Config) -> &'c [PathBuf] {
        self.own.as_ref().map_or(&config.data.train, |own| &own.files)
    }

    /// What all ranks do after step `step`. A collective.
    ///
    /// Errors: bad data of any rank, by file and row; [`Error::UnevenData`] when ranks that read
    /// the same have another number of samples.
    pub fn next_turn(&mut self, step: u64) -> Result<Turn> {
        let next = match self.kept.take() {
            Some(next) => Ok(next),
            None => self.batches.next_event(),
        };
        let mut own = None;
        let told = next.map(|next| {
            let told = Told::of(&next);
            own = Some(next);
            told
        });
        let all = match self.ranks.is_alone() {
            true => vec![told?],
            false => agreed(self.ranks.control(), told)?,
        };
        let next = own.expect("no rank has an error");
        if all.contains(&Told::Stopped) {
            self.kept = Some(next).filter(|next| !matches!(next, Next::Stopped));
            return Ok(Turn::Stopped);
        }
        match &mut self.own {
            None => same(&self.ranks, &all, next, step),
            Some(own) => own.turn(&all, next, &mut self.kept),
        }
    }
}

/// The turn of ranks that read the same.
fn same(ranks: &Ranks, all: &[Told], next: Next, step: u64) -> Result<Turn> {
    let rank = ranks.rank();
    if let Some(other) = all.iter().position(|told| *told != all[rank]) {
        return Err(Error::UnevenData { rank, step, other });
    }
    Ok(match next {
        Next::Event(Event::Batch { batch, epoch, after }) => {
            let mut share = Share::whole(batch, epoch, after);
            if !ranks.is_alone() {
                share.own = share.own.slice(ranks.part(share.own.samples()));
            }
            Turn::Step(Box::new(share))
        }
        Next::Event(Event::EpochEnd { .. }) => Turn::EpochEnd,
        Next::End => Turn::End,
        Next::Stopped => Turn::Stopped,
    })
}

impl Own {
    /// The turn of ranks that read files of their own: as long as any has a batch, those that have
    /// none keep what they have in `kept`.
    fn turn(&mut self, all: &[Told], next: Next, kept: &mut Option<Next>) -> Result<Turn> {
        let sample_of_epoch: u64 = self.positions.iter().map(|position| position.sample).sum();
        let batches = all.iter().filter_map(|told| match told {
            Told::Batch { samples, epoch, .. } => Some((*samples, *epoch)),
            _ => None,
        });
        let samples: u64 = batches.clone().map(|(samples, _)| samples).sum();
        let epoch = batches.map(|(_, epoch)| epoch).next();
        for (position, told) in self.positions.iter_mut().zip(all) {
            match told {
                Told::Batch { after, .. } => *position = *after,
                Told::EpochEnd { after } if epoch.is_none() => *position = *after,
                _ => {}
            }
        }
        let Some(epoch) = epoch else {
            if all.iter().all(|told| *told == Told::End) {
                return Ok(Turn::End);
            }
            if sample_of_epoch == 0 {
                let files = "data.train of all ranks".to_owned();
                return Err(DataError::NoSamples { files }.into());
            }
            return Ok(Turn::EpochEnd);
        };
        let own = match next {
            Next::Event(Event::Batch { batch, .. }) => batch,
            other => {
                *kept = Some(other);
                self.empty.clone()
            }
        };
        let divisor = match self.uneven {
            Uneven::Drain => samples,
            Uneven::Pad => self.batch_size,
        };
        let after = Position { epoch, sample: sample_of_epoch + samples };
        let (total, positions) = (Total { samples, divisor }, self.positions.clone());
        Ok(Turn::Step(Box::new(Share { own, total, epoch, after, positions })))
    }
}

/// A batch of no samples.
fn nothing(config: &Config) -> Batch {
    let features = config.tables.iter().flat_map(|table| {
        table.features.iter().map(|_| {
            let weights = table.weighted.then(Vec::new);
            Jagged::new(0, vec![0], Vec::new(), weights).expect("no bags")
        })
    });
    Batch::new(BatchParts {
        dense_features: config.model.dense_features,
        dense: Vec::new(),
        labels: Vec::new(),
        sample_weights: config.data.sample_weight.is_some().then(Vec::new),
        groups: config.data.group.is_some().then(Vec::new),
        features: features.collect(),
        provenance: None,
    })
    .expect("no samples")
}
