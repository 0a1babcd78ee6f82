//! Elements of tables: to float32 and, with random bits, back.
//!
//! Stochastic rounding takes a number to one of its two neighbours, the nearer the likelier, so
//! that its mean is the number itself: an update far below the spacing of float16 still arrives
//! on average. With `k` dropped bits of value `f`, adding `k` random bits before the cut carries
//! with probability `f / 2^k`, exactly; exact numbers never move. Loops over these functions
//! have no branches, so they become vector code.

use bytemuck::{Pod, Zeroable};

/// The bits of an IEEE binary16 number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct F16(pub(crate) u16);

/// The bits of a bfloat16 number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

/// An element of a table.
pub(crate) trait Stored: Pod + Send + Sync {
    /// Whether storing rounds, so that it needs random bits.
    const ROUNDS: bool;

    /// Its value, exactly.
    fn load(self) -> f32;

    /// The bits of a neighbour of the finite number `x`, chosen by `random`; an overflow gives
    /// infinity.
    fn round(x: f32, random: u32) -> u32;

    /// The element of these bits.
    fn from_bits(bits: u32) -> Self;

    /// Whether these bits are a finite number.
    fn finite(bits: u32) -> bool;
}

impl Stored for f32 {
    const ROUNDS: bool = false;

    #[inline(always)]
    fn load(self) -> f32 {
        self
    }

    #[inline(always)]
    fn round(x: f32, _: u32) -> u32 {
        x.to_bits()
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Self::from_bits(bits)
    }

    #[inline(always)]
    fn finite(bits: u32) -> bool {
        bits & 0x7F80_0000 != 0x7F80_0000
    }
}

/// 2^112 and 2^24: what takes the exponents of binary16 to those of binary32, and the spacing of
/// binary16's subnormal numbers to 1.
const TWO_112: f32 = f32::from_bits((127 + 112) << 23);
const TWO_24: f32 = (1u32 << 24) as f32;

impl Stored for F16 {
    const ROUNDS: bool = true;

    #[inline(always)]
    fn load(self) -> f32 {
        let sign = u32::from(self.0 & 0x8000) << 16;
        let magnitude = u32::from(self.0 & 0x7FFF) << 13;
        // Read as binary32 the exponent is 112 too small, for subnormal numbers too.
        let value = (f32::from_bits(magnitude) * TWO_112).to_bits();
        let special = if magnitude >= 0x7C00 << 13 { 0x7F80_0000 } else { 0 };
        f32::from_bits(value | special | sign)
    }

    #[inline(always)]
    fn round(x: f32, random: u32) -> u32 {
        let sign = (x.to_bits() >> 16) & 0x8000;
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        // From 2^-14 up: 13 bits are dropped, and the exponent's bias falls by 112.
        let cut = (magnitude + (random & 0x1FFF)) >> 13;
        let normal = cut.wrapping_sub(112 << 10).min(0x7C00);
        // Below: multiples of 2^-24. The scaled number is exact; 31 bits of its fraction are
        // added to 31 random bits, so the bias is below 2^-31 of the spacing.
        let scaled = (f32::from_bits(magnitude) * TWO_24).min(1024.0);
        let whole = scaled as i32;
        let fraction = ((scaled - whole as f32) * (1u32 << 31) as f32) as i32;
        let subnormal = whole as u32 + (((random >> 1) + fraction as u32) >> 31);
        sign | if magnitude >= 113 << 23 { normal } else { subnormal }
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Self(bits as u16)
    }

    #[inline(always)]
    fn finite(bits: u32) -> bool {
        bits & 0x7C00 != 0x7C00
    }
}

impl Stored for Bf16 {
    const ROUNDS: bool = true;

    #[inline(always)]
    fn load(self) -> f32 {
        f32::from_bits(u32::from(self.0) << 16)
    }

    #[inline(always)]
    fn round(x: f32, random: u32) -> u32 {
        // Same exponents as binary32: 16 bits are dropped, subnormal or not. The sum cannot
        // leave 32 bits, since a finite number's magnitude is below 0x7F80_0000.
        (x.to_bits() + (random & 0xFFFF)) >> 16
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Self(bits as u16)
    }

    #[inline(always)]
    fn finite(bits: u32) -> bool {
        bits & 0x7F80 != 0x7F80
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_16_bit_number_loads_as_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            for (ours, theirs) in [
                (F16(bits).load(), half::f16::from_bits(bits).to_f32()),
                (Bf16(bits).load(), half::bf16::from_bits(bits).to_f32()),
            ] {
                assert!(
                    ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                    "{bits:#x}: {ours} {theirs}"
                );
            }
        }
    }

    #[test]
    fn exact_numbers_stay_whatever_the_random_bits() {
        for bits in 0..=u16::MAX {
            for random in [0, 1, 0x1FFF, 0xFFFF, 0x1234_5678, u32::MAX] {
                if F16(bits).load().is_finite() {
                    assert_eq!(F16::round(F16(bits).load(), random), u32::from(bits));
                }
                if Bf16(bits).load().is_finite() {
                    assert_eq!(Bf16::round(Bf16(bits).load(), random), u32::from(bits));
                }
            }
        }
    }

    /// Over evenly spread random words the share of round-ups is the number's place between its
    /// neighbours: normal, subnormal, at a power of two, just below the smallest number.
    fn mean_is_the_number<E: Stored>(x: f32) {
        let words = 1u64 << 16;
        let (low, high) = (E::round(x, 0), E::round(x, u32::MAX));
        let (low, high) = (E::from_bits(low).load(), E::from_bits(high).load());
        assert!(low.abs() <= x.abs() && x.abs() <= high.abs(), "{low} {x} {high}");
        let mean = (0..words)
            // An odd multiplier spreads both the low 16 and the high 16 bits evenly.
            .map(|i| (i as u32).wrapping_mul(0x9E37_79B1))
            .map(|word| f64::from(E::from_bits(E::round(x, word)).load()))
            .sum::<f64>()
            / words as f64;
        let spacing = f64::from((high - low).abs());
        assert!((mean - f64::from(x)).abs() <= spacing * 1e-3, "{x}: mean {mean}");
    }

    #[test]
    fn rounding_is_right_on_average() {
        for x in [1.0001f32, -1.0001, 0.3, 1.9999, 65000.7, 1e-3, 6.2e-5, -3.0e-5, 1e-7, 4e-8] {
            mean_is_the_number::<F16>(x);
            mean_is_the_number::<Bf16>(x);
        }
        mean_is_the_number::<Bf16>(1e-40);
        mean_is_the_number::<Bf16>(-3e38);
    }

    #[test]
    fn overflow_is_infinite_and_seen() {
        assert!(F16::finite(F16::round(65504.0, u32::MAX)));
        assert!(F16::finite(F16::round(65519.0, 0)));
        for x in [65519.0, 65536.0, 1e30, -f32::MAX] {
            assert!(!F16::finite(F16::round(x, u32::MAX)), "{x}");
        }
        assert!(!F16::finite(F16::round(65536.0, 0)));
        assert!(!Bf16::finite(Bf16::round(f32::MAX, u32::MAX)));
        assert!(Bf16::finite(Bf16::round(f32::MAX, 0)));
    }

    proptest! {
        #[test]
        fn a_rounded_number_is_a_neighbour(bits in any::<u32>(), random in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assume!(x.is_finite());
            let nearest = half::f16::from_f32(x);
            let ours = half::f16::from_bits(F16::round(x, random) as u16);
            let distance = i32::from(ours.to_bits() & 0x7FFF) - i32::from(nearest.to_bits() & 0x7FFF);
            prop_assert!(distance.abs() <= 1, "{x}: {ours} {nearest}");
            let nearest = half::bf16::from_f32(x);
            let ours = half::bf16::from_bits(Bf16::round(x, random) as u16);
            let distance = i32::from(ours.to_bits() & 0x7FFF) - i32::from(nearest.to_bits() & 0x7FFF);
            prop_assert!(distance.abs() <= 1, "{x}: {ours} {nearest}");
        }
    }
}
