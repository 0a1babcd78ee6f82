//! What rows hold while the tiers are measured: a first byte that counts how often the row was
//! written, then numbers without a pattern that name the row.

use tessera_cache::{PlanesMut, RowLayout};
use tessera_data::splitmix64;

use crate::{BenchError, Result};

/// Writes what `row` holds after `count` writes: its weights, then its state.
pub fn fill(row: u64, count: u8, weights: &mut [u8], state: &mut [u8]) {
    let mut word = splitmix64(row);
    for bytes in weights.chunks_mut(8).chain(state.chunks_mut(8)) {
        word = splitmix64(word);
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
    if let Some(first) = weights.first_mut() {
        *first = count;
    }
}

/// [`fill`] for many rows; `count` gives each one's.
pub fn fill_all(layout: RowLayout, rows: &[u64], count: impl Fn(u64) -> u8, to: PlanesMut<'_>) {
    let RowLayout { weight_bytes, state_bytes } = layout;
    for (i, &row) in rows.iter().enumerate() {
        let weights = &mut to.weights[i * weight_bytes..][..weight_bytes];
        let state = &mut to.state[i * state_bytes..][..state_bytes];
        fill(row, count(row), weights, state);
    }
}

/// Both planes of some rows, in memory.
#[derive(Debug, Default)]
pub struct Block {
    /// (rows, weight_bytes).
    pub weights: Vec<u8>,
    /// (rows, state_bytes).
    pub state: Vec<u8>,
}

impl Block {
    /// Room for `rows` rows.
    #[must_use]
    pub fn new(layout: RowLayout, rows: usize) -> Self {
        Self {
            weights: vec![0; rows * layout.weight_bytes],
            state: vec![0; rows * layout.state_bytes],
        }
    }

    /// What rows hold.
    #[must_use]
    pub fn filled(layout: RowLayout, rows: &[u64], count: impl Fn(u64) -> u8) -> Self {
        let mut block = Self::new(layout, rows.len());
        fill_all(layout, rows, count, block.planes_mut());
        block
    }

    /// Both planes, to be written.
    pub fn planes_mut(&mut self) -> PlanesMut<'_> {
        PlanesMut { weights: &mut self.weights, state: &mut self.state }
    }
}

/// Holds a row against what it should be.
///
/// Errors: [`BenchError::WrongAnswer`] with the first byte that differs.
pub fn check(row: u64, got: (&[u8], &[u8]), count: u8) -> Result<()> {
    let (mut weights, mut state) = (vec![0; got.0.len()], vec![0; got.1.len()]);
    fill(row, count, &mut weights, &mut state);
    for (plane, got, want) in [("weights", got.0, &weights), ("state", got.1, &state)] {
        if let Some(at) = got.iter().zip(want).position(|(got, want)| got != want) {
            return Err(BenchError::WrongAnswer {
                what: format!("byte {at} of the {plane} of row {row}"),
                got: f64::from(got[at]),
                want: f64::from(want[at]),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_differ_and_a_wrong_byte_is_named() {
        let layout = RowLayout { weight_bytes: 12, state_bytes: 4 };
        let block = Block::filled(layout, &[3, 9], |row| row as u8);
        assert_ne!(block.weights[1..12], block.weights[13..24]);
        assert_eq!((block.weights[0], block.weights[12]), (3, 9));
        check(9, (&block.weights[12..], &block.state[4..]), 9).unwrap();
        let error = check(9, (&block.weights[12..], &block.state[..4]), 9).unwrap_err();
        assert!(error.to_string().contains("of the state of row 9"), "{error}");
        let error = check(3, (&block.weights[..12], &block.state[..4]), 4).unwrap_err();
        assert!(error.to_string().contains("byte 0 of the weights of row 3 is 3"), "{error}");
    }
}
