//! splitmix64: the hash of categories and the counter-based generator of this crate.
//!
//! Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014),
//! with Vigna's constants (`splitmix64.c`). Data made with it stays the same for ever, so it is
//! kept here and not taken from a library that may change its streams.

/// The increment of splitmix64: 2^64 divided by the golden ratio, made odd.
const GOLDEN_GAMMA: u64 = 0x9E37_79B9_7F4A_7C15;

/// The first output of splitmix64 seeded with `value`.
///
/// `z = value + 0x9E3779B97F4A7C15; z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;`
/// `z = (z ^ z >> 27) * 0x94D049BB133111EB; z ^ z >> 31`, all modulo 2^64. A bijection.
#[inline]
#[must_use]
pub const fn splitmix64(value: u64) -> u64 {
    let z = value.wrapping_add(GOLDEN_GAMMA);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// The row of a category: `1 + splitmix64(value) mod (rows - 1)`. Row 0 is for missing ones.
///
/// The caller guarantees `rows >= 2` (checked when a source is opened).
#[inline]
#[must_use]
pub const fn category_row(value: u64, rows: u64) -> u64 {
    1 + splitmix64(value) % (rows - 1)
}

/// [`category_row`] of a fixed number of rows, without its division.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CategoryRows {
    rows_but_first: Remainder,
}

impl CategoryRows {
    /// Categories over `rows` rows; the caller guarantees `rows >= 2`.
    pub(crate) const fn new(rows: u64) -> Self {
        Self { rows_but_first: Remainder::by(rows - 1) }
    }

    /// `category_row(value, rows)`.
    #[inline(always)]
    pub(crate) const fn row(&self, value: u64) -> u64 {
        1 + self.rows_but_first.of(splitmix64(value))
    }
}

/// Exact remainders by a fixed divisor, where a division would take several times as long.
///
/// With `l = ceil(log2(divisor))` and `m = floor(2^64 (2^l - divisor) / divisor) + 1`, the quotient
/// of n is `(high(m n) + (n - high(m n)) / 2) / 2^(l-1)`, `high` being the upper 64 bits of a
/// product of 128. Source: Granlund and Montgomery, "Division by invariant integers using
/// multiplication" (PLDI 1994), figure 4.1, which proves it for every n and divisor.
#[derive(Clone, Copy, Debug)]
struct Remainder {
    divisor: u64,
    /// `m` above.
    multiplier: u64,
    /// 1, or 0 for the divisor 1.
    shift_before: u32,
    /// `l - 1`, or 0 for the divisor 1.
    shift_after: u32,
}

impl Remainder {
    /// The caller guarantees `divisor >= 1`.
    const fn by(divisor: u64) -> Self {
        let log2_up = u64::BITS - (divisor - 1).leading_zeros();
        let above = (1u128 << log2_up) - divisor as u128;
        Self {
            divisor,
            // The quotient is below 2^64, since 2^l is below twice the divisor.
            multiplier: (((above << 64) / divisor as u128) as u64).wrapping_add(1),
            shift_before: if log2_up == 0 { 0 } else { 1 },
            shift_after: log2_up.saturating_sub(1),
        }
    }

    /// `n % divisor`.
    #[inline(always)]
    const fn of(&self, n: u64) -> u64 {
        let high = ((self.multiplier as u128 * n as u128) >> 64) as u64;
        let quotient = (high + ((n - high) >> self.shift_before)) >> self.shift_after;
        n - quotient * self.divisor
    }
}

/// A key for a stream of random words, made from words that say what the stream is for.
pub(crate) const fn key(words: &[u64]) -> u64 {
    let mut hash = 0;
    let mut i = 0;
    while i < words.len() {
        hash = splitmix64(hash ^ splitmix64(words[i]));
        i += 1;
    }
    hash
}

/// The stream of random words of a key: splitmix64 from that seed.
#[derive(Clone, Debug)]
pub(crate) struct Words {
    state: u64,
}

impl Words {
    /// The stream of `key`.
    pub(crate) const fn new(key: u64) -> Self {
        Self { state: key }
    }

    /// The next 64 random bits.
    pub(crate) const fn next_word(&mut self) -> u64 {
        let word = splitmix64(self.state);
        self.state = self.state.wrapping_add(GOLDEN_GAMMA);
        word
    }

    /// A whole number in `0..bound` (`bound > 0`): high half of word times bound. Its
    /// distribution is off uniform by at most bound / 2^64.
    pub(crate) const fn below(&mut self, bound: u64) -> u64 {
        ((self.next_word() as u128 * bound as u128) >> 64) as u64
    }

    /// A float64 in `[0, 1)` with 53 random bits.
    pub(crate) const fn unit(&mut self) -> f64 {
        (self.next_word() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

/// Numbers `0..len` in random order: Fisher-Yates with the words of `key`.
pub(crate) fn permutation(len: usize, key: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..len).collect();
    let mut words = Words::new(key);
    for last in (1..len).rev() {
        order.swap(last, words.below(last as u64 + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The outputs of Vigna's splitmix64.c from seed 0.
    #[test]
    fn known_answers() {
        assert_eq!(splitmix64(0), 0xE220_A839_7B1D_CDAF);
        let mut words = Words::new(0);
        assert_eq!(words.next_word(), 0xE220_A839_7B1D_CDAF);
        assert_eq!(words.next_word(), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(words.next_word(), 0x06C4_5D18_8009_454F);
    }

    #[test]
    fn categories_use_every_row_but_the_first() {
        let mut seen = [false; 7];
        for value in 0..1000 {
            seen[category_row(value, 7) as usize] = true;
        }
        assert_eq!(seen, [false, true, true, true, true, true, true]);
        assert_eq!(category_row(12345, 2), 1);
        assert!((1..1 << 40).contains(&category_row(u64::MAX, 1 << 40)));
    }

    fn check_remainders(divisor: u64, n: u64) {
        let fast = Remainder::by(divisor);
        // Around multiples of the divisor a quotient that is off by one shows.
        let multiple = n - n % divisor;
        let near = [multiple.wrapping_sub(1), multiple, multiple.wrapping_add(1)];
        for n in [0, 1, n, u64::MAX, divisor - 1, divisor, divisor.wrapping_add(1)]
            .into_iter()
            .chain(near)
        {
            assert_eq!(fast.of(n), n % divisor, "{n} % {divisor}");
        }
    }

    #[test]
    fn remainders_by_the_edges_of_every_width() {
        for bits in 0..64 {
            let power = 1u64 << bits;
            for divisor in [power - 1, power, power + 1, u64::MAX - power + 1, power / 3 * 2] {
                for n in [0, power, u64::MAX / 3, u64::MAX - 1] {
                    check_remainders(divisor.max(1), n);
                }
            }
        }
    }

    proptest! {
        #[test]
        fn remainders_are_exact(divisor in 1u64.., shift in 0u32..64, n in any::<u64>()) {
            check_remainders((divisor >> shift).max(1), n);
            check_remainders(divisor, n);
        }

        #[test]
        fn rows_without_division_are_the_same(
            rows in 2u64..,
            shift in 0u32..62,
            value in any::<u64>(),
        ) {
            let rows = (rows >> shift).max(2);
            prop_assert_eq!(CategoryRows::new(rows).row(value), category_row(value, rows));
        }
    }

    #[test]
    fn permutations_are_permutations_and_depend_on_the_key() {
        for len in [0, 1, 2, 17, 1000] {
            let mut order = permutation(len, 5);
            if len > 10 {
                assert_ne!(order, permutation(len, 6));
                assert_ne!(order, (0..len).collect::<Vec<_>>());
            }
            assert_eq!(order, permutation(len, 5));
            order.sort_unstable();
            assert_eq!(order, (0..len).collect::<Vec<_>>());
        }
    }
}
