//! Micro-batches: the parts of a batch whose exchanges overlap with each other's compute.
//!
//! Weights stay as they are until all of a batch's gradients are together, so a row that several
//! micro-batches need is the same in all of them. It travels once, as without micro-batches:
//!
//! ```text
//! its vector      before the first micro-batch that needs it    mark: first
//! its gradient    after the last one that adds to it            mark: last
//! ```
//! A row's gradient is thus summed over the whole batch at once, in its one order, and how a
//! batch is cut shows in no bit of it. A bag's sum (pooled routes) belongs to one micro-batch.

use std::ops::Range;

use tessera_comm::share;

use crate::{FeatureRows, Marked};

/// The most micro-batches of a batch: marks are bytes.
pub const MICRO_BATCHES_MAX: usize = 255;

/// The samples of each of `count` micro-batches of a batch of `samples`, in order: as even as can
/// be, the first ones larger. Some are empty when there are fewer samples than micro-batches.
#[must_use]
pub fn micro_batches(samples: usize, count: usize) -> Vec<Range<usize>> {
    (0..count).map(|part| share(samples, part, count)).collect()
}

/// The micro-batches between which each of some vectors is in use; without entries where the
/// batch is whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Marks {
    /// The first that needs it.
    pub(super) first: Vec<u8>,
    /// The last that adds to its gradient.
    pub(super) last: Vec<u8>,
}

impl Marks {
    /// Of `rows` fetched rows of a table, of which `features` hold bags.
    pub(super) fn of<'f>(
        rows: usize,
        features: impl Iterator<Item = &'f FeatureRows>,
        micro: &[Range<usize>],
    ) -> Self {
        if micro.len() == 1 {
            return Self::default();
        }
        let mut marks = Self { first: vec![u8::MAX; rows], last: vec![0; rows] };
        for feature in features {
            for (mark, samples) in micro.iter().enumerate() {
                let mark = mark as u8; // as many as MICRO_BATCHES_MAX
                let ids =
                    feature.offsets[samples.start] as usize..feature.offsets[samples.end] as usize;
                for row in &feature.rows[ids] {
                    let row = row.0 as usize;
                    marks.first[row] = marks.first[row].min(mark);
                    marks.last[row] = marks.last[row].max(mark);
                }
            }
        }
        marks
    }

    /// Those of `rows`.
    pub(super) fn slice(&self, rows: Range<usize>) -> Self {
        if self.first.is_empty() {
            return Self::default();
        }
        Self { first: self.first[rows.clone()].to_vec(), last: self.last[rows].to_vec() }
    }

    /// Appends it to a message: both marks of four rows in a word.
    pub(super) fn encode(&self, message: &mut Vec<u64>) {
        let pairs = self.first.chunks(4).zip(self.last.chunks(4));
        message.extend(pairs.map(|(first, last)| {
            let pairs = first.iter().zip(last).rev();
            pairs.fold(0, |word, (&first, &last)| {
                word << 16 | u64::from(last) << 8 | u64::from(first)
            })
        }));
    }

    /// Appends `rows` marks that [`Marks::encode`] wrote.
    pub(super) fn decode(&mut self, words: &[u64], rows: usize) {
        let bytes = words.iter().flat_map(|word| word.to_le_bytes()).take(2 * rows);
        for (i, mark) in bytes.enumerate() {
            if i % 2 == 0 { self.first.push(mark) } else { self.last.push(mark) }
        }
    }

    /// Words of `rows` marks in a message.
    pub(super) fn words(rows: usize) -> usize {
        rows.div_ceil(4)
    }

    /// Which of `rows` have their vectors exchanged before micro-batch `micro`.
    pub(super) fn vectors(&self, rows: Range<usize>, micro: usize) -> Chosen {
        Chosen::of(&self.first, rows, micro)
    }

    /// Which of `rows` have their gradients exchanged after micro-batch `micro`.
    pub(super) fn gradients(&self, rows: Range<usize>, micro: usize) -> Chosen {
        Chosen::of(&self.last, rows, micro)
    }
}

/// The rows whose gradients are complete after micro-batch `micro`, by the last marks of all
/// tables.
pub(super) fn complete(last: &[u8], micro: usize) -> Marked<'_> {
    if last.is_empty() { Marked::All } else { Marked::With { marks: last, mark: micro as u8 } }
}

/// Some of a range of rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Chosen {
    /// All of them.
    All(Range<usize>),
    /// These, ascending.
    Some(Vec<u64>),
}

impl Chosen {
    fn of(marks: &[u8], rows: Range<usize>, micro: usize) -> Self {
        if marks.is_empty() {
            return Self::All(rows);
        }
        let marked =
            rows.clone().zip(&marks[rows]).filter(|&(_, &mark)| usize::from(mark) == micro);
        Self::Some(marked.map(|(row, _)| row as u64).collect())
    }

    /// How many.
    pub(super) fn len(&self) -> usize {
        match self {
            Self::All(rows) => rows.len(),
            Self::Some(rows) => rows.len(),
        }
    }

    /// Appends columns `columns` of these rows of `from`, rows of `width`.
    pub(super) fn copy_out(
        &self,
        from: &[f32],
        width: usize,
        columns: Range<usize>,
        to: &mut Vec<f32>,
    ) {
        match self {
            Self::All(rows) if columns.len() == width => {
                to.extend_from_slice(&from[rows.start * width..rows.end * width]);
            }
            Self::All(rows) => {
                let rows = from[rows.start * width..rows.end * width].chunks_exact(width.max(1));
                rows.for_each(|row| to.extend_from_slice(&row[columns.clone()]));
            }
            Self::Some(rows) => {
                for &row in rows {
                    to.extend_from_slice(&from[row as usize * width..][..width][columns.clone()]);
                }
            }
        }
    }

    /// Copies rows of `width`, one behind another, to these rows of `to`.
    pub(super) fn copy_in(&self, from: &[f32], width: usize, to: &mut [f32]) {
        match self {
            Self::All(rows) => to[rows.start * width..rows.end * width].copy_from_slice(from),
            Self::Some(rows) => {
                for (&row, from) in rows.iter().zip(from.chunks_exact(width.max(1))) {
                    to[row as usize * width..][..width].copy_from_slice(from);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Row;

    #[test]
    fn micro_batches_are_even_and_in_order() {
        assert_eq!(micro_batches(7, 3), [0..3, 3..5, 5..7]);
        assert_eq!(micro_batches(2, 3), [0..1, 1..2, 2..2]);
        assert_eq!(micro_batches(0, 2), [0..0, 0..0]);
        assert_eq!(micro_batches(5, 1), vec![0..5; 1]);
    }

    #[test]
    fn marks_say_where_a_row_is_needed_first_and_last() {
        let feature = |offsets: &[u64], rows: &[u64]| FeatureRows {
            offsets: offsets.to_vec(),
            rows: rows.iter().map(|&row| Row(row)).collect(),
            weights: None,
        };
        let features =
            [feature(&[0, 2, 3, 3, 5], &[0, 1, 1, 2, 0]), feature(&[0, 0, 0, 1, 1], &[3])];
        let marks = Marks::of(4, features.iter(), &micro_batches(4, 3));
        assert_eq!((&marks.first[..], &marks.last[..]), (&[0, 0, 2, 1][..], &[2, 0, 2, 1][..]));
        assert_eq!(marks.vectors(0..4, 0), Chosen::Some(vec![0, 1]));
        assert_eq!(marks.gradients(1..4, 2), Chosen::Some(vec![2]));
        let mut message = Vec::new();
        marks.slice(1..4).encode(&mut message);
        assert_eq!(message.len(), Marks::words(3));
        let mut back = Marks::default();
        back.decode(&message, 3);
        assert_eq!(back, marks.slice(1..4));
        let whole = Marks::of(4, features.iter(), &micro_batches(4, 1));
        assert_eq!(whole.vectors(1..3, 0), Chosen::All(1..3));
    }
}
