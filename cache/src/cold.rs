//! The tier below memory, as the tiers above see it: rows by number, written and read in batches.

use crate::{Result, RowLayout};

/// Planes of some rows, row after row without padding: weights are (rows, weight_bytes), state is
/// (rows, state_bytes).
#[derive(Clone, Copy, Debug)]
pub struct Planes<'a> {
    /// The rows' weights, (rows, weight_bytes).
    pub weights: &'a [u8],
    /// The rows' state, (rows, state_bytes).
    pub state: &'a [u8],
}

/// [`Planes`] to be written.
#[derive(Debug)]
pub struct PlanesMut<'a> {
    /// The rows' weights, (rows, weight_bytes).
    pub weights: &'a mut [u8],
    /// The rows' state, (rows, state_bytes).
    pub state: &'a mut [u8],
}

impl<'a> PlanesMut<'a> {
    /// Pieces of `rows` rows, at least 1, the last one of what is left.
    pub(crate) fn pieces(self, layout: RowLayout, rows: usize) -> Vec<PlanesMut<'a>> {
        let (mut weights, mut state) = (self.weights, self.state);
        let mut pieces = Vec::new();
        while !(weights.is_empty() && state.is_empty()) {
            let at = (rows * layout.weight_bytes).min(weights.len());
            let (piece_weights, rest) = weights.split_at_mut(at);
            weights = rest;
            let at = (rows * layout.state_bytes).min(state.len());
            let (piece_state, rest) = state.split_at_mut(at);
            state = rest;
            pieces.push(PlanesMut { weights: piece_weights, state: piece_state });
        }
        pieces
    }
}

/// Rows below memory.
///
/// The caller gives each row once a call, in any order, planes of exactly `rows.len()` rows and a
/// `found` as long as `rows`. All methods may be called from several threads at once; puts and
/// removals take effect one after another. A row that is put while another thread gets it comes
/// back as it was before or as it is after, never as a mixture.
pub trait ColdRows: std::fmt::Debug + Send + Sync {
    /// Width of the planes.
    fn layout(&self) -> RowLayout;

    /// Copies the planes of the rows it holds. `found[i]` says whether `rows[i]` was there; the
    /// bytes of one that was not stay as they are.
    ///
    /// Errors: what the medium says, a damaged record (named, never given out), lengths that do
    /// not belong together. `to` and `found` are undefined after an error.
    fn get(&self, rows: &[u64], to: PlanesMut<'_>, found: &mut [bool]) -> Result<()>;

    /// Writes rows; a later get returns exactly these bytes, whether flushed or not.
    ///
    /// Errors: no room, what the medium says, lengths that do not belong together. After a failed
    /// write every later change is refused with the first cause.
    fn put(&self, rows: &[u64], from: Planes<'_>) -> Result<()>;

    /// Forgets rows; those that are not there are ignored.
    ///
    /// Errors: as [`ColdRows::put`].
    fn remove(&self, rows: &[u64]) -> Result<()>;

    /// Says which of `rows` it holds.
    fn contains(&self, rows: &[u64], found: &mut [bool]);

    /// When this returns, everything put and removed before the call is on the medium and outlives
    /// a crash.
    ///
    /// Errors: as [`ColdRows::put`].
    fn flush(&self) -> Result<()>;

    /// Rows held.
    fn len(&self) -> u64;

    /// Whether it holds no row.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What it did so far.
    fn stats(&self) -> ColdStats;
}

/// Plain numbers of a [`ColdRows`]; counts are since it was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ColdStats {
    /// Rows held.
    pub rows: u64,
    /// Bytes of the newest records of those rows.
    pub live_bytes: u64,
    /// Bytes of all files.
    pub file_bytes: u64,
    /// Bytes of memory that the index takes.
    pub index_bytes: u64,
    /// Files of rows.
    pub segments: u64,
    /// Rows that gets found.
    pub rows_read: u64,
    /// Rows that puts wrote.
    pub rows_written: u64,
    /// Rows that removals forgot.
    pub rows_removed: u64,
    /// Bytes that gets read from the medium or asked of its mapping.
    pub get_bytes: u64,
    /// Bytes that puts and removals wrote.
    pub put_bytes: u64,
    /// Bytes that compaction read.
    pub compaction_read_bytes: u64,
    /// Bytes that compaction wrote. Write amplification is
    /// (`put_bytes` + `compaction_bytes`) / `put_bytes`.
    pub compaction_bytes: u64,
    /// Segments that compaction emptied and deleted.
    pub compactions: u64,
    /// How rows are read, with the reason when it is not what was wished for.
    pub reader: &'static str,
}

impl std::ops::AddAssign for ColdStats {
    fn add_assign(&mut self, other: Self) {
        self.rows += other.rows;
        self.live_bytes += other.live_bytes;
        self.file_bytes += other.file_bytes;
        self.index_bytes += other.index_bytes;
        self.segments += other.segments;
        self.rows_read += other.rows_read;
        self.rows_written += other.rows_written;
        self.rows_removed += other.rows_removed;
        self.get_bytes += other.get_bytes;
        self.put_bytes += other.put_bytes;
        self.compaction_read_bytes += other.compaction_read_bytes;
        self.compaction_bytes += other.compaction_bytes;
        self.compactions += other.compactions;
        self.reader = other.reader;
    }
}

impl ColdStats {
    /// Bytes written over bytes that callers wrote; 1 before the first.
    #[must_use]
    pub fn write_amplification(&self) -> f64 {
        if self.put_bytes == 0 {
            return 1.0;
        }
        (self.put_bytes + self.compaction_bytes) as f64 / self.put_bytes as f64
    }
}
