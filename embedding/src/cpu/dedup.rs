//! Finding the different rows of a batch, ascending, and numbering them.
//!
//! ```text
//! few rows an id    a bit for each row of the table: set those of all ids;
//!                   count bits word by word    -> the different rows, and how many lie before a word
//!                   number of an id = rows before its word + bits before its own
//! many rows an id   (row, place) of all ids, sorted by row; a run of equal rows is one number
//! ```
//! Both give the same. The first touches `rows / 4` bytes in order and two words at random an id,
//! the second moves 32 bytes an id and 11 bits of the row.

use super::group::{Packed, sort};
use crate::Row;

/// Most rows of a table an id for which bits are counted rather than ids sorted: looking at a word
/// of 32 rows costs a twelfth of what sorting an id does.
const ROWS_PER_ID_MAX: u64 = 12 * u32::BITS as u64;

/// The different ones of a table's `rows` ids, ascending; each id becomes its number among them.
pub(crate) fn deduplicate(features: &mut [Vec<Row>], rows: u64) -> Vec<u64> {
    let ids = features.iter().map(|ids| ids.len() as u64).sum::<u64>();
    if rows <= ids.saturating_mul(ROWS_PER_ID_MAX) {
        by_bits(features, rows)
    } else if rows <= 1 << 32 {
        by_sorting::<u64>(features, rows)
    } else {
        by_sorting::<u128>(features, rows)
    }
}

/// 32 rows of a table.
#[derive(Clone, Copy, Default)]
struct Word {
    /// Which of them occur.
    bits: u32,
    /// How many different rows lie before them; a lookup's ids fit 32 bits.
    before: u32,
}

fn by_bits(features: &mut [Vec<Row>], rows: u64) -> Vec<u64> {
    let mut words = vec![Word::default(); rows.div_ceil(u64::from(u32::BITS)) as usize];
    let place = |row: Row| ((row.0 / u64::from(u32::BITS)) as usize, row.0 as u32 % u32::BITS);
    for &row in features.iter().flatten() {
        let (word, bit) = place(row);
        words[word].bits |= 1 << bit;
    }
    let mut unique = Vec::new();
    for (word, first) in words.iter_mut().zip((0..).step_by(u32::BITS as usize)) {
        word.before = unique.len() as u32;
        let mut bits = word.bits;
        while bits != 0 {
            unique.push(first + u64::from(bits.trailing_zeros()));
            bits &= bits - 1;
        }
    }
    for row in features.iter_mut().flatten() {
        let (word, bit) = place(*row);
        let Word { bits, before } = words[word];
        *row = Row(u64::from(before + (bits & ((1 << bit) - 1)).count_ones()));
    }
    unique
}

fn by_sorting<K: Packed>(features: &mut [Vec<Row>], rows: u64) -> Vec<u64> {
    // Places fit 32 bits: the lookup was checked.
    let ids = features.iter().flatten();
    let mut packs: Vec<K> = ids.zip(0u32..).map(|(row, place)| K::pack(row.0, place)).collect();
    let mut spare = Vec::new();
    let mut numbers = vec![0; packs.len()];
    let mut unique = Vec::new();
    for pack in sort(&mut packs, &mut spare, u64::BITS - rows.leading_zeros()) {
        if unique.last() != Some(&pack.key()) {
            unique.push(pack.key());
        }
        numbers[pack.payload() as usize] = unique.len() as u64 - 1;
    }
    for (id, number) in features.iter_mut().flatten().zip(numbers) {
        *id = Row(number);
    }
    unique
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn check(number: impl Fn(&mut [Vec<Row>]) -> Vec<u64>, ids: &[Vec<u64>]) {
        let mut rows: Vec<Vec<Row>> =
            ids.iter().map(|ids| ids.iter().copied().map(Row).collect()).collect();
        let unique = number(&mut rows);
        assert!(unique.is_sorted_by(|a, b| a < b));
        let wanted: BTreeSet<u64> = ids.iter().flatten().copied().collect();
        assert!(unique.iter().eq(&wanted));
        for (ids, rows) in ids.iter().zip(&rows) {
            for (id, row) in ids.iter().zip(rows) {
                assert_eq!(*id, unique[row.0 as usize]);
            }
        }
    }

    proptest! {
        #[test]
        fn different_ids_are_numbered_in_their_order(
            features in prop::collection::vec(prop::collection::vec(0u64..400, 0..300), 0..4),
            spread in prop::sample::select(vec![1u64, 7, 1 << 23, 1 << 40]),
        ) {
            let ids: Vec<Vec<u64>> =
                features.iter().map(|ids| ids.iter().map(|id| id * spread).collect()).collect();
            let rows = 399 * spread + 1;
            check(|features| deduplicate(features, rows), &ids);
            check(|features| by_sorting::<u128>(features, rows), &ids);
            if spread < 100 {
                check(|features| by_bits(features, rows), &ids);
                check(|features| by_sorting::<u64>(features, rows), &ids);
            }
        }
    }

    #[test]
    fn the_last_row_of_a_table_has_its_bit() {
        for rows in [1, 31, 32, 33, 64] {
            check(|features| by_bits(features, rows), &[vec![rows - 1, 0, rows - 1]]);
        }
    }
}
