//! `manifest.json`: what a checkpoint holds and the moment it was taken.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use tessera_data::Position;

use crate::window::Window;

/// Version of the layout described in docs/formats.md that is written.
pub const VERSION: u32 = 3;
/// Versions that are read. The first knew pieces of whole rows only, the second one position.
pub(super) const READ: RangeInclusive<u32> = 1..=VERSION;

/// The scalars of one moment of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Moment {
    /// Steps done.
    pub step: u64,
    /// Samples trained on.
    pub samples: u64,
    /// Update count of the optimizers (t); skipped steps do not move it.
    pub updates: u64,
    /// Where the training data goes on, in the samples of all ranks together.
    pub position: Position,
    /// Where the data of each rank goes on, if each reads files of its own; else empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub positions: Vec<Position>,
    /// Seed of the run: with `step` and `position` it is the whole random state.
    pub seed: u64,
    /// The windowed loss.
    pub window: Window,
    /// The best evaluation so far, if a metric is followed.
    pub best: Option<Best>,
    /// Evaluations since it, for early stopping.
    pub evaluations_without_improvement: u64,
    /// Step of the evaluation last held against the best: a resumed run that evaluates this
    /// moment again must not count it twice.
    pub judged: Option<u64>,
}

/// The best evaluation of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Best {
    /// Its step.
    pub step: u64,
    /// Name of the metric followed.
    pub metric: String,
    /// Its value.
    pub value: f64,
}

/// A rectangle of one tensor in one file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Piece {
    /// Logical name.
    pub tensor: String,
    /// First row of the logical tensor that the file holds.
    pub first_row: u64,
    /// Rows from there on.
    pub rows: u64,
    /// First element of each row; 0 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_column: Option<u64>,
    /// Elements of each row from there on; the rest of the row if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub columns: Option<u64>,
}

/// One safetensors file.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Shard {
    /// Name in the checkpoint's folder.
    pub file: String,
    /// Size in bytes.
    pub bytes: u64,
    /// CRC-32 (IEEE) of the whole file.
    pub crc32: u32,
    /// What it holds.
    pub pieces: Vec<Piece>,
}

/// A logical tensor as a whole.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Logical name.
    pub name: String,
    /// Element type, in safetensors' spelling.
    pub dtype: String,
    /// Shape over all files.
    pub shape: Vec<u64>,
}

/// The whole manifest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Always `tessera-checkpoint`.
    pub format: String,
    /// Version of the layout described in docs/formats.md.
    pub version: u32,
    /// When in the run it was taken.
    pub moment: Moment,
    /// The resolved configuration, as TOML.
    pub config: String,
    /// All logical tensors.
    pub tensors: Vec<Entry>,
    /// All files.
    pub shards: Vec<Shard>,
    /// CRC-32 (IEEE) of this file's text with 0 in this place.
    pub crc32: u32,
}

impl Manifest {
    /// The text of `manifest.json`, sealed with its checksum.
    pub(super) fn seal(mut self) -> (Self, Vec<u8>) {
        self.crc32 = self.checksum();
        let text = self.text();
        (self, text)
    }

    /// Whether the checksum is that of the rest.
    pub(super) fn is_whole(&self) -> bool {
        self.crc32 == self.checksum()
    }

    fn checksum(&self) -> u32 {
        crc32fast::hash(&Self { crc32: 0, ..self.clone() }.text())
    }

    fn text(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("a manifest has string keys only")
    }
}
