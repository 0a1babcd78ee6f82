//! Payloads in pieces that a library's 32-bit counts can name.

use std::ops::Range;

/// The pieces of `bytes` bytes, in order, of at most `bytes_max` each; none for no bytes.
pub(crate) fn pieces(bytes: usize, bytes_max: usize) -> impl Iterator<Item = Range<usize>> {
    let bytes_max = bytes_max.max(1);
    (0..bytes.div_ceil(bytes_max)).map(move |piece| {
        let start = piece * bytes_max;
        start..start.saturating_add(bytes_max).min(bytes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = i32::MAX as usize;

    #[test]
    fn pieces_cover_everything_once_within_the_limit() {
        for bytes in [0, 1, LIMIT - 1, LIMIT, LIMIT + 1, 1 << 31, 1 << 32, (5 << 40) + 3] {
            for bytes_max in [LIMIT, 1 << 30, usize::MAX] {
                let mut end = 0;
                for piece in pieces(bytes, bytes_max) {
                    assert_eq!(piece.start, end);
                    assert!(!piece.is_empty() && piece.len() <= bytes_max);
                    end = piece.end;
                }
                assert_eq!(end, bytes);
            }
        }
    }

    #[test]
    fn two_to_the_31_is_one_byte_too_many_for_one_piece() {
        assert!(pieces(LIMIT, LIMIT).eq(std::iter::once(0..LIMIT)));
        assert_eq!(pieces(1 << 31, LIMIT).collect::<Vec<_>>(), [0..LIMIT, LIMIT..1 << 31]);
        assert_eq!(pieces(5, 2).collect::<Vec<_>>(), [0..2, 2..4, 4..5]);
        assert_eq!(pieces(3, 0).count(), 3);
    }
}
