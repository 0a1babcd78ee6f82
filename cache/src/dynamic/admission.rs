//! Which new ids get a row, and the sketch that counts sightings.

use tessera_device::Philox;

use super::{Admission, SketchState};
use crate::{CacheError, Result};

/// Size of a counting sketch: `depth` rows of `width` counters of 8 bits.
///
/// A count-min sketch with conservative update: an id has one counter in each row, chosen by an
/// independent hash; its count is the smallest of them; a sighting raises those that are smallest
/// (saturating at 255). Counts are never too small, so an id is admitted at its n-th sighting at
/// the latest. They are too large only if *every* counter of the id is shared:
///
/// ```text
/// N distinct ids sighted:  P(admitted early at all)            <= (N / width)^depth
/// S sightings in all:      P(admitted m or more sightings early) <= (S / (width * m))^depth
/// ```
///
/// Each other id shares the counter of one row with probability 1 / width: the first bound adds
/// that over N ids, the second is Markov's inequality on the expected excess S / width; rows are
/// independent. Source: Cormode and Muthukrishnan, "An improved data stream summary: the
/// count-min sketch and its applications" (J. Algorithms 55, 2005), theorem 1; conservative
/// update only lowers counts: Estan and Varghese, "New directions in traffic measurement and
/// accounting" (SIGCOMM 2002).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SketchShape {
    /// Counters a row, at least 1.
    pub width: u64,
    /// Rows, from 1 to [`SketchShape::DEPTH_MAX`].
    pub depth: u64,
}

impl SketchShape {
    /// The largest depth.
    pub const DEPTH_MAX: u64 = 16;

    /// The smallest shape of the paper's form for `ids` distinct ids, of which each is admitted
    /// early with probability at most `delta`: width e * ids, depth ln(1 / delta).
    #[must_use]
    pub fn for_error(ids: u64, delta: f64) -> Self {
        let width = (std::f64::consts::E * ids as f64).ceil().max(1.0) as u64;
        let depth = (1.0 / delta).ln().ceil().clamp(1.0, Self::DEPTH_MAX as f64) as u64;
        Self { width, depth }
    }

    /// Bytes of the counters.
    #[must_use]
    pub fn bytes(self) -> u64 {
        self.width.saturating_mul(self.depth)
    }

    /// The bytes as a length in memory.
    fn cells(self) -> Result<usize> {
        if self.width == 0 {
            return Err(refuse("sketch width", self.width, "it must be at least 1"));
        }
        if !(1..=Self::DEPTH_MAX).contains(&self.depth) {
            return Err(refuse("sketch depth", self.depth, "it must be from 1 to 16"));
        }
        let cells =
            self.width.checked_mul(self.depth).and_then(|cells| isize::try_from(cells).ok());
        cells.map(|cells| cells as usize).ok_or_else(|| {
            refuse("sketch width", self.width, "width times depth must fit the address space")
        })
    }
}

/// The counters.
#[derive(Debug)]
pub(super) struct Sketch {
    shape: SketchShape,
    halve_every: u64,
    sightings: u64, // since the last halving
    cells: Vec<u8>, // (depth, width)
    hashes: Philox,
}

impl Sketch {
    /// Counts a sighting and says what the count is now.
    fn add(&mut self, id: u64) -> u8 {
        let mut at = [0usize; SketchShape::DEPTH_MAX as usize];
        let at = &mut at[..self.shape.depth as usize];
        for (pair, at) in at.chunks_mut(2).enumerate() {
            let words = self.hashes.block(id, pair as u64);
            for (half, at) in at.iter_mut().enumerate() {
                let hash = join(words[2 * half], words[2 * half + 1]);
                let column = (u128::from(hash) * u128::from(self.shape.width)) >> 64;
                *at = (2 * pair + half) * self.shape.width as usize + column as usize;
            }
        }
        let least = at.iter().map(|&at| self.cells[at]).min().expect("depth is at least 1");
        let count = least.saturating_add(1);
        for &mut at in at {
            self.cells[at] = self.cells[at].max(count);
        }
        self.sightings += 1;
        if self.sightings == self.halve_every {
            self.sightings = 0;
            self.cells.iter_mut().for_each(|cell| *cell /= 2);
        }
        count
    }

    fn state(&self) -> SketchState {
        SketchState { shape: self.shape, sightings: self.sightings, cells: self.cells.clone() }
    }

    /// Counts for ids of several sketches: at least those of each, so that no id is admitted
    /// late; the bounds of [`SketchShape`] hold for the ids of all.
    fn load<'a>(&mut self, states: impl Iterator<Item = &'a SketchState>) -> Result<()> {
        for state in states {
            if state.shape != self.shape || state.cells.len() != self.cells.len() {
                return Err(CacheError::IdMapState {
                    reason: format!(
                        "its sketch has {} rows of {} counters ({} bytes given), the options say \
                         {} of {}; give the same sketch, or none to count from zero",
                        state.shape.depth,
                        state.shape.width,
                        state.cells.len(),
                        self.shape.depth,
                        self.shape.width
                    ),
                });
            }
            for (cell, &other) in self.cells.iter_mut().zip(&state.cells) {
                *cell = (*cell).max(other);
            }
            self.sightings = self.sightings.max(state.sightings);
        }
        if self.halve_every > 0 {
            self.sightings %= self.halve_every;
        }
        Ok(())
    }
}

/// Admission at work.
#[derive(Debug)]
pub(super) enum Gate {
    Always,
    Count { n: u8, sketch: Sketch },
    Probability { below: u128, draws: Philox },
}

impl Gate {
    /// Errors: [`CacheError::IdMapOption`].
    pub(super) fn new(admission: Admission, seed: u64) -> Result<Self> {
        Ok(match admission {
            Admission::Always => Self::Always,
            Admission::Count { n, sketch: shape, halve_every_sightings: halve_every } => {
                if n == 0 {
                    return Err(refuse("admission n", n, "it must be at least 1"));
                }
                let cells = vec![0; shape.cells()?];
                let hashes = Philox::for_name(seed, "dynamic.sketch");
                let sketch = Sketch { shape, halve_every, sightings: 0, cells, hashes };
                Self::Count { n, sketch }
            }
            Admission::Probability { p } => {
                if !(0.0..=1.0).contains(&p) {
                    return Err(refuse("admission p", p, "it must be from 0 to 1"));
                }
                // 2^64 as a float is exact, and so is its product with a float.
                let below = (p * 2f64.powi(64)) as u128;
                Self::Probability { below, draws: Philox::for_name(seed, "dynamic.admission") }
            }
        })
    }

    /// Occurrences of an id without a row: does it get one? Those after the one that gets it in are
    /// not counted.
    pub(super) fn sighted(&mut self, id: u64, occurrences: u64, step: u64) -> bool {
        match self {
            Self::Always => true,
            Self::Count { n, sketch } => (0..occurrences).any(|_| sketch.add(id) >= *n),
            Self::Probability { below, draws } => {
                let words = draws.block(id, step);
                u128::from(join(words[0], words[1])) < *below
            }
        }
    }

    /// The sketch, if there is one.
    pub(super) fn state(&self) -> Option<SketchState> {
        match self {
            Self::Count { sketch, .. } => Some(sketch.state()),
            Self::Always | Self::Probability { .. } => None,
        }
    }

    /// Goes on from the sketches of one or more maps. A gate that does not count has no use for
    /// them.
    ///
    /// Errors: [`CacheError::IdMapState`].
    pub(super) fn load<'a>(&mut self, states: impl Iterator<Item = &'a SketchState>) -> Result<()> {
        match self {
            Self::Count { sketch, .. } => sketch.load(states),
            Self::Always | Self::Probability { .. } => Ok(()),
        }
    }

    /// Bytes of memory.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Count { sketch, .. } => sketch.shape.bytes(),
            Self::Always | Self::Probability { .. } => 0,
        }
    }
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// An option that cannot be.
pub(super) fn refuse(option: &'static str, value: impl ToString, rule: &'static str) -> CacheError {
    CacheError::IdMapOption { option, value: value.to_string(), rule }
}
