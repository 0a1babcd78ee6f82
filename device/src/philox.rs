//! Philox4x32-10, the counter-based generator every device shares.
//!
//! A value is a pure function of (key, counter): no state to save, no order to keep. That is what
//! lets a row's first value and a rounding decision be the same on any schedule, rank count and
//! device. Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
//! (SC 2011), Philox with 4 words of 32 bits and 10 rounds.

/// A keyed Philox4x32-10 generator: 128 counter bits in, 128 random bits out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
}

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

impl Philox {
    /// The generator of a 64-bit key.
    #[must_use]
    pub const fn new(key: u64) -> Self {
        Self { key: [key as u32, (key >> 32) as u32] }
    }

    /// The generator of a seed and the name of what it is for (such as a table's name): different
    /// names give unrelated streams.
    #[must_use]
    pub fn for_name(seed: u64, name: &str) -> Self {
        Self::new(mix(seed ^ mix(key_of_name(name))))
    }

    /// Its key, for a device that makes the same words itself.
    #[must_use]
    pub const fn key(self) -> u64 {
        self.key[0] as u64 | (self.key[1] as u64) << 32
    }

    /// Four random words for a counter of two 64-bit halves.
    #[inline(always)]
    #[must_use]
    pub const fn block(self, low: u64, high: u64) -> [u32; 4] {
        let mut c = [low as u32, (low >> 32) as u32, high as u32, (high >> 32) as u32];
        let mut k = self.key;
        let mut round = 0;
        while round < 10 {
            let p0 = MULTIPLIERS[0] as u64 * c[0] as u64;
            let p1 = MULTIPLIERS[1] as u64 * c[2] as u64;
            c = [
                (p1 >> 32) as u32 ^ c[1] ^ k[0],
                p1 as u32,
                (p0 >> 32) as u32 ^ c[3] ^ k[1],
                p0 as u32,
            ];
            k = [k[0].wrapping_add(WEYL[0]), k[1].wrapping_add(WEYL[1])];
            round += 1;
        }
        c
    }

    /// A float32 in [0, 1) with 24 random bits from one word of a block.
    #[inline(always)]
    #[must_use]
    pub const fn unit(word: u32) -> f32 {
        (word >> 8) as f32 * (1.0 / (1u32 << 24) as f32)
    }
}

/// The 64-bit FNV-1a hash of a name: stable for ever, for keys of generators.
#[must_use]
pub const fn key_of_name(name: &str) -> u64 {
    fnv1a(name.as_bytes())
}

/// The 64-bit FNV-1a hash (Fowler, Noll, Vo) of some bytes: simple enough to be written again in
/// any language.
#[must_use]
pub const fn fnv1a(bytes: &[u8]) -> u64 {
    let mut hash = 0xCBF2_9CE4_8422_2325u64;
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x100_0000_01B3);
        i += 1;
    }
    hash
}

/// The finaliser of splitmix64: a bijection that spreads every input bit.
const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers published with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn known_answers() {
        let zero = Philox::new(0).block(0, 0);
        assert_eq!(zero, [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8]);
        let ones = Philox::new(u64::MAX).block(u64::MAX, u64::MAX);
        assert_eq!(ones, [0x408F_276D, 0x41C8_3B0E, 0xA20B_C7C6, 0x6D54_51FD]);
        let pi =
            Philox::new(0x299F_31D0_A409_3822).block(0x85A3_08D3_243F_6A88, 0x0370_7344_1319_8A2E);
        assert_eq!(pi, [0xD16C_FE09, 0x94FD_CCEB, 0x5001_E420, 0x2412_6EA1]);
    }

    #[test]
    fn the_hash_is_fnv_1a() {
        // Published test vectors: the empty string, "a" and "foobar".
        for (text, wanted) in [
            ("", 0xcbf2_9ce4_8422_2325),
            ("a", 0xaf63_dc4c_8601_ec8c),
            ("foobar", 0x8594_4171_f739_67e8),
        ] {
            assert_eq!(fnv1a(text.as_bytes()), wanted, "{text}");
            assert_eq!(key_of_name(text), wanted, "{text}");
        }
    }

    #[test]
    fn unit_is_uniform_on_the_half_open_interval() {
        let generator = Philox::for_name(7, "table");
        let mut sum = 0.0f64;
        for i in 0..4096u64 {
            for word in generator.block(i, 0) {
                let u = Philox::unit(word);
                assert!((0.0..1.0).contains(&u));
                sum += f64::from(u);
            }
        }
        // Mean of 16,384 uniform values: standard deviation 0.0023.
        assert!((sum / 16384.0 - 0.5).abs() < 0.01);
        assert_eq!(Philox::unit(u32::MAX), 1.0 - f32::EPSILON / 2.0);
    }

    #[test]
    fn names_and_seeds_give_unrelated_streams() {
        let a = Philox::for_name(1, "a").block(0, 0);
        assert_ne!(a, Philox::for_name(1, "b").block(0, 0));
        assert_ne!(a, Philox::for_name(2, "a").block(0, 0));
        assert_eq!(a, Philox::for_name(1, "a").block(0, 0));
    }
}
