//! Fields of criteo-tsv lines, read in words of eight bytes instead of byte by byte.
//!
//! ```text
//! tabs of a line    64 bytes -> a word with a bit for each tab -> their places, lowest bit first
//! a field           the 8 bytes from its start, as a little-endian word (its first byte lowest)
//!                   moved up, so that its last byte is the highest and `0`s fill the rest
//!                   all 8 bytes to digits at once, pairs of digits joined three times
//! ```
//! Most fields have at most eight bytes and need no branch that depends on the data; signs and
//! longer numbers go byte by byte. Both ways accept and give the same, as the tests hold.

use super::criteo_tsv::COLUMNS;
use super::lines::{Line, PADDING};

/// Bytes looked at at once for tabs.
const BLOCK: usize = 64;

const _: () = assert!(BLOCK <= PADDING);

/// Places written at once; those behind the last tab of a block are overwritten by the next.
const STRIDE: usize = 8;

/// The place of the made-up tab before a line: the line begins one place after it, at 0.
const BEFORE_LINE: u32 = u32::MAX;

/// Eight times the same byte.
const fn all(byte: u8) -> u64 {
    u64::from_ne_bytes([byte; 8])
}

/// Where the fields of a line end.
pub(super) struct Fields {
    /// Column i lies between `marks[i]` and `marks[i + 1]`, the places of tabs, the first one made
    /// up. One block finds up to `BLOCK` tabs behind `COLUMNS - 1`.
    marks: [u32; COLUMNS + BLOCK],
}

impl Fields {
    /// No line yet.
    pub(super) fn new() -> Self {
        Self { marks: [BEFORE_LINE; COLUMNS + BLOCK] }
    }

    /// Finds the fields of `line`; false, and nothing can be said of them, unless there are
    /// exactly [`COLUMNS`].
    #[inline(always)]
    pub(super) fn split(&mut self, line: Line<'_>) -> bool {
        let (padded, len) = (line.padded(), line.bytes().len());
        let mut found = 0;
        for base in (0..len).step_by(BLOCK) {
            let block = padded[base..].first_chunk().expect("a block fits the padding");
            let mut tabs = tabs(block);
            if len - base < BLOCK {
                tabs &= (1 << (len - base)) - 1;
            }
            let after = found + tabs.count_ones() as usize;
            while found < after {
                let marks = self.marks[found + 1..].first_chunk_mut::<STRIDE>();
                for mark in marks.expect("room for the tabs of a block") {
                    // The highest bit is a tab's or, without tabs left, makes up one that the next
                    // block overwrites.
                    *mark = base as u32 + (tabs | 1 << (BLOCK - 1)).trailing_zeros();
                    tabs &= tabs.wrapping_sub(1);
                }
                found = (found + STRIDE).min(after);
            }
            if found >= COLUMNS {
                return false;
            }
        }
        self.marks[COLUMNS] = len as u32;
        found == COLUMNS - 1
    }

    /// Start and length of a column's field in the line that was split.
    #[inline(always)]
    pub(super) fn field(&self, column: usize) -> (usize, usize) {
        let start = self.marks[column].wrapping_add(1);
        (start as usize, (self.marks[column + 1] - start) as usize)
    }

    /// A column's field in `line`, which is the one that was split.
    pub(super) fn bytes<'a>(&self, line: Line<'a>, column: usize) -> &'a [u8] {
        let (start, len) = self.field(column);
        &line.bytes()[start..start + len]
    }
}

/// A bit for each tab of a block, that of the first byte lowest.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn tabs(block: &[u8; BLOCK]) -> u64 {
    use std::arch::x86_64::{_mm_cmpeq_epi8, _mm_movemask_epi8, _mm_set1_epi8};

    let mut mask = 0;
    for (i, quarter) in block.as_chunks::<16>().0.iter().enumerate() {
        // SAFETY: these are SSE2 instructions, which every x86-64 has.
        let bits = unsafe {
            let equal = _mm_cmpeq_epi8(bytemuck::cast(*quarter), _mm_set1_epi8(b'\t' as i8));
            _mm_movemask_epi8(equal)
        };
        mask |= u64::from(bits as u16) << (16 * i);
    }
    mask
}

#[cfg(not(target_arch = "x86_64"))]
use tabs_by_words as tabs;

/// A bit for each tab of a block, that of the first byte lowest; without vector instructions.
#[cfg(any(test, not(target_arch = "x86_64")))]
#[inline(always)]
fn tabs_by_words(block: &[u8; BLOCK]) -> u64 {
    let mut mask = 0;
    for (i, word) in block.as_chunks::<8>().0.iter().enumerate() {
        let differs = u64::from_le_bytes(*word) ^ all(b'\t');
        // The highest bit of each byte: whether any of its bits is set. Nothing carries over.
        let set = ((differs & all(0x7F)) + all(0x7F)) | differs;
        let bits = (!set >> 7) & all(0x01);
        // Brings bit 8k of `bits` to bit 56 + k; no two partial products meet.
        mask |= (bits.wrapping_mul(0x0102_0408_1020_4080) >> 56) << (8 * i);
    }
    mask
}

/// The eight bytes of a line from `start`, which lies in it or at its end.
#[inline(always)]
pub(super) fn word_at(padded: &[u8], start: usize) -> u64 {
    let bytes = padded[start..].first_chunk().expect("a word fits the padding");
    u64::from_le_bytes(*bytes)
}

/// Moves the first `len` bytes of a word to its end, behind bytes of 0; `len` is 0 to 8.
#[inline(always)]
fn move_up(word: u64, len: usize) -> u64 {
    // In two steps, since a shift by all 64 bits is not one.
    let half = 32u32.wrapping_sub(4 * len as u32);
    word.wrapping_shl(half).wrapping_shl(half)
}

/// The number of the `len` decimal digits that `word` begins with, 0 for none; `None` where there
/// are more than eight or something else is among them.
#[inline(always)]
pub(super) fn short_decimal(word: u64, len: usize) -> Option<u32> {
    let digits = move_up(word ^ all(b'0'), len);
    // A byte above 9 reaches its highest bit, by itself or with 0x76 added; its carry only reaches
    // bytes above it, when this one has told already.
    let wrong = (digits.wrapping_add(all(0x76)) | digits) & all(0x80);
    if len > 8 || wrong != 0 {
        return None;
    }
    // Two digits in every second byte, then four in every fourth, then all.
    let twos = (digits * 10 + (digits >> 8)) & 0x00FF_00FF_00FF_00FF;
    let fours = (twos * 100 + (twos >> 16)) & 0x0000_FFFF_0000_FFFF;
    Some((fours * 10_000 + (fours >> 32)) as u32)
}

/// The number of the `len` hexadecimal digits, in either case, that `word` begins with, 0 for
/// none; `None` where there are more than eight or something else is among them.
#[inline(always)]
pub(super) fn short_hex(word: u64, len: usize) -> Option<u32> {
    // 0x00 to 0x09 for digits, 0x51 to 0x56 or 0x71 to 0x76 for letters.
    let flipped = move_up(word ^ all(b'0'), len);
    let letter = (flipped >> 6) & all(0x01);
    // 0 to 9 for digits and 0 to 5 for letters. What is below a letter wraps around to above.
    let low = (flipped & !(letter << 5)).wrapping_sub(letter * 0x51);
    // A byte above that reaches its upper half, by itself or with 6 added, for letters 10. What it
    // carries or borrows only reaches bytes above it, when this one has told already.
    let wrong = (low.wrapping_add(all(0x06) + letter * 4) | low) & all(0xF0);
    if len > 8 || wrong != 0 {
        return None;
    }
    let digits = low + letter * 10;
    // The first digit is the lowest byte and the highest part of the number.
    let twos = (digits << 4 | digits >> 8) & 0x00FF_00FF_00FF_00FF;
    let fours = (twos << 8 | twos >> 16) & 0x0000_FFFF_0000_FFFF;
    Some((fours << 16 | fours >> 32) as u32)
}

/// An integer of 64 bits in decimal digits with an optional sign; `None` if it is anything else.
#[cold]
pub(super) fn long_decimal(field: &[u8]) -> Option<i64> {
    let (negative, digits) = match field {
        [b'-', digits @ ..] => (true, digits),
        [b'+', digits @ ..] => (false, digits),
        digits => (false, digits),
    };
    if digits.is_empty() {
        return None;
    }
    // Counted downwards, since the most negative integer has no positive counterpart.
    let mut value = 0i64;
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?.checked_sub(i64::from(digit))?;
    }
    if negative { Some(value) } else { value.checked_neg() }
}

/// A number of 1 to 16 hexadecimal digits in either case; `None` if it is anything else.
#[cold]
pub(super) fn long_hex(field: &[u8]) -> Option<u64> {
    if field.is_empty() || field.len() > 16 {
        return None;
    }
    let mut value = 0;
    for &byte in field {
        let digit = match byte {
            b'0'..=b'9' => byte - b'0',
            b'a'..=b'f' => byte - b'a' + 10,
            b'A'..=b'F' => byte - b'A' + 10,
            _ => return None,
        };
        value = value << 4 | u64::from(digit);
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A word that begins with `field` and goes on with `rest`.
    fn word(field: &[u8], rest: u8) -> u64 {
        let mut padded = field.to_vec();
        padded.resize(field.len() + 8, rest);
        word_at(&padded, 0)
    }

    #[test]
    fn odd_numbers() {
        assert_eq!(long_decimal(b"-9223372036854775808"), Some(i64::MIN));
        for bad in
            [&b""[..], b"9223372036854775808", b"-", b"+", b"1.5", b" 1", b"1 ", b"--1", b"nan"]
        {
            assert_eq!(long_decimal(bad), None, "{}", String::from_utf8_lossy(bad));
        }
        assert_eq!(long_hex(b"FfffFFFFffffffff"), Some(u64::MAX));
        for bad in [&b""[..], b"0ffffffffffffffff", b"g", b"0x1", b"-1", b" "] {
            assert_eq!(long_hex(bad), None, "{}", String::from_utf8_lossy(bad));
        }
        assert_eq!(short_decimal(word(b"", b'7'), 0), Some(0));
        assert_eq!(short_hex(word(b"", b'7'), 0), Some(0));
        assert_eq!(short_decimal(word(b"99999999", b'7'), 8), Some(99_999_999));
        assert_eq!(short_hex(word(b"fFfFFfff", b'7'), 8), Some(u32::MAX));
    }

    /// Every byte at every place of every length, among digits and among other faults, so that a
    /// carry from one byte to the next would show.
    #[test]
    fn every_byte_at_every_place() {
        for len in 1..=9 {
            for place in 0..len {
                for byte in 0..=u8::MAX {
                    for others in [b'0', b'9', b'a', b'F', 0x00, 0x60, 0xFF] {
                        let mut field = vec![others; len];
                        field[place] = byte;
                        let word = word(&field, byte);
                        let digits = len <= 8 && field.iter().all(u8::is_ascii_digit);
                        let decimal = long_decimal(&field).filter(|_| digits);
                        assert_eq!(short_decimal(word, len).map(i64::from), decimal, "{field:?}");
                        let hex = long_hex(&field).filter(|_| len <= 8);
                        assert_eq!(short_hex(word, len).map(u64::from), hex, "{field:?}");
                    }
                }
            }
        }
    }

    proptest! {
        #[test]
        fn numbers_parse_as_the_standard_library_does(value in any::<i64>(), bits in any::<u64>()) {
            prop_assert_eq!(long_decimal(value.to_string().as_bytes()), Some(value));
            prop_assert_eq!(long_hex(format!("{bits:x}").as_bytes()), Some(bits));
            prop_assert_eq!(long_hex(format!("{bits:016X}").as_bytes()), Some(bits));
            let (number, digits) = (bits % 100_000_000, bits as u32 >> (value & 31));
            for text in [number.to_string(), format!("{number:08}")] {
                let read = short_decimal(word(text.as_bytes(), bits as u8), text.len());
                prop_assert_eq!(read.map(u64::from), Some(number));
            }
            for text in [format!("{digits:x}"), format!("{digits:08X}")] {
                let read = short_hex(word(text.as_bytes(), bits as u8), text.len());
                prop_assert_eq!(read, Some(digits));
            }
        }

        #[test]
        fn tabs_are_found_by_words_and_by_vectors(
            bytes in prop::array::uniform32(prop_oneof![Just(b'\t'), 8u8..11, any::<u8>()]),
            more in prop::array::uniform32(prop_oneof![Just(b'\t'), Just(b'\t' | 0x80)]),
        ) {
            let block: [u8; BLOCK] = [bytes, more].concat().try_into().unwrap();
            let naive = block.iter().rev().fold(0, |mask, &byte| mask << 1 | u64::from(byte == b'\t'));
            prop_assert_eq!(tabs(&block), naive);
            prop_assert_eq!(tabs_by_words(&block), naive);
        }

        #[test]
        fn fields_lie_between_tabs(
            lengths in prop::collection::vec(prop_oneof![0usize..2, 0usize..12, 0usize..200], 38..43),
        ) {
            // What lies behind the line is as misleading as can be.
            let line = lengths.iter().map(|len| "x".repeat(*len)).collect::<Vec<_>>().join("\t");
            let padded = [line.as_bytes(), &[b'\t'; PADDING]].concat();
            let mut fields = Fields::new();
            let whole = fields.split(Line::new(&padded, line.len()));
            prop_assert_eq!(whole, lengths.len() == COLUMNS);
            let mut start = 0;
            for (column, &len) in lengths.iter().enumerate().filter(|_| whole) {
                prop_assert_eq!(fields.field(column), (start, len));
                start += len + 1;
            }
        }

        #[test]
        fn any_number_of_tabs_is_counted(tabs in 0usize..300) {
            let padded = vec![b'\t'; tabs + PADDING];
            prop_assert_eq!(Fields::new().split(Line::new(&padded, tabs)), tabs == COLUMNS - 1);
        }
    }
}
