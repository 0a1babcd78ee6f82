//! `manifest.json`: what a checkpoint holds and the moment it was taken.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use tessera_cache::Plane;
use tessera_cache::log::Snapshot;
use tessera_data::Position;
use tessera_device::fnv1a;
use tessera_embedding::Init;

use crate::window::Window;

/// Version of the layout described in docs/formats.md that is written.
pub const VERSION: u32 = 4;
/// Versions that are read. The first knew pieces of whole rows only, the second one position, the
/// third neither logs nor increments.
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
    /// With it the file holds only some of these rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listed: Option<Listed>,
}

/// Some rows of a piece: those that changed since the checkpoint before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Listed {
    /// How many.
    pub count: u64,
    /// The tensor of the same file that holds their numbers in the table, ascending.
    pub rows: String,
}

/// Some rows and columns of a table in the segment files of a log. Rows that the log does not hold
/// have their first values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ColdPiece {
    /// Folder of its files in a checkpoint's.
    pub folder: String,
    /// The table's row that is row 0 of the log.
    pub first_row: u64,
    /// Rows from there on.
    pub rows: u64,
    /// What a record holds of which tensor.
    pub fields: Vec<ColdField>,
    /// First weights; zero if absent. First states are zero.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first: Option<First>,
    /// The log's files.
    pub snapshot: Snapshot,
    /// For each of them, the step of the checkpoint whose folder it lies in.
    pub steps: Vec<u64>,
}

/// What a record holds of one tensor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ColdField {
    /// Logical name.
    pub tensor: String,
    /// The record's plane.
    pub plane: Plane,
    /// First byte in the plane.
    pub at: u64,
    /// First element of each row.
    pub first_column: u64,
    /// Elements of each row from there on.
    pub columns: u64,
}

/// How first weights are drawn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct First {
    /// The name that they are drawn by.
    pub table: String,
    /// The seed.
    pub seed: u64,
    /// How.
    pub init: Init,
}

/// A checkpoint that another one builds on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Its step.
    pub step: u64,
    /// Its [`Manifest::identity`].
    pub identity: String,
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
    /// All safetensors files.
    pub shards: Vec<Shard>,
    /// What lies in segment files of logs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cold: Vec<ColdPiece>,
    /// With it the checkpoint holds what changed since the last of these, the first of which is
    /// whole.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub chain: Vec<Link>,
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

    /// What tells this checkpoint from any other, of the same step too: FNV-1a of its text but for
    /// the evaluations, which may be noted later.
    #[must_use]
    pub fn identity(&self) -> String {
        let mut bare = Self { crc32: 0, ..self.clone() };
        bare.moment.best = None;
        bare.moment.judged = None;
        bare.moment.evaluations_without_improvement = 0;
        format!("{:016x}", fnv1a(&bare.text()))
    }

    /// Where `piece`'s rows and columns lie in the tensors, a tensor each.
    pub(super) fn cold_pieces(piece: &ColdPiece) -> impl Iterator<Item = Piece> + '_ {
        piece.fields.iter().map(|field| Piece {
            tensor: field.tensor.clone(),
            first_row: piece.first_row,
            rows: piece.rows,
            first_column: Some(field.first_column),
            columns: Some(field.columns),
            listed: None,
        })
    }

    fn checksum(&self) -> u32 {
        crc32fast::hash(&Self { crc32: 0, ..self.clone() }.text())
    }

    fn text(&self) -> Vec<u8> {
        serde_json::to_vec_pretty(self).expect("a manifest has string keys only")
    }
}
