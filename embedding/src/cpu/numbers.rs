//! Elements of tables: to float32 and, with random bits, back.
//!
//! Stochastic rounding takes a number to one of its two neighbours, the nearer the likelier, so
//! that its mean is the number itself: an update far below the spacing of float16 still arrives
//! on average. With `k` dropped bits of value `f`, adding `k` random bits before the cut carries
//! with probability `f / 2^k`, exactly; exact numbers never move. Every column has 16 random bits:
//! bfloat16 drops as many, float16 drops 13, and below its normal range, where it drops more, the
//! probability is cut to 16 bits: a bias of less than 2^-16 of the spacing. The functions have no
//! branches, so that loops over a group become vector code.

use bytemuck::{Pod, Zeroable};

use super::lanes::{LANES, Lanes};

/// The bits of an IEEE binary16 number; `F16C` where the machine converts those itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct F16<const F16C: bool>(pub(crate) u16);

// SAFETY: a transparent u16.
unsafe impl<const F16C: bool> Zeroable for F16<F16C> {}
// SAFETY: as above.
unsafe impl<const F16C: bool> Pod for F16<F16C> {}

/// The bits of a bfloat16 number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(transparent)]
pub(crate) struct Bf16(pub(crate) u16);

/// An element of a table.
pub(crate) trait Stored: Pod + Send + Sync {
    /// Whether storing rounds, so that it needs random bits.
    const ROUNDS: bool;

    /// Whether `load_group` has an instruction of its own.
    const LOADS_GROUPS: bool = false;

    /// Its value, exactly.
    fn load(self) -> f32;

    /// The values of a group.
    #[inline(always)]
    fn load_group(from: &[Self; LANES]) -> Lanes {
        let mut columns = [0.0; LANES];
        for (column, element) in columns.iter_mut().zip(from) {
            *column = element.load();
        }
        Lanes::from_array(columns)
    }

    /// The bits of a neighbour of the finite number `x`, chosen by 16 random bits; an overflow
    /// gives infinity.
    fn round(x: f32, random: u32) -> u32;

    /// The bits of infinity.
    const INFINITY: u32;

    /// The element of these bits.
    fn from_bits(bits: u32) -> Self;
}

impl Stored for f32 {
    const ROUNDS: bool = false;
    const INFINITY: u32 = 0x7F80_0000;

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
}

/// 2^112 and 2^24: what takes the exponents of binary16 to those of binary32, and the spacing of
/// binary16's subnormal numbers to 1.
const TWO_112: f32 = f32::from_bits((127 + 112) << 23);
const TWO_24: f32 = (1u32 << 24) as f32;

impl<const F16C: bool> Stored for F16<F16C> {
    const ROUNDS: bool = true;
    const LOADS_GROUPS: bool = F16C;
    const INFINITY: u32 = 0x7C00;

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
    fn load_group(from: &[Self; LANES]) -> Lanes {
        #[cfg(target_arch = "x86_64")]
        if F16C {
            use std::arch::x86_64::{__m128, __m128i, _mm_cvtph_ps, _mm_unpackhi_epi64};
            let bits: __m128i = bytemuck::cast(*from);
            // SAFETY: `F16C` types are used under instruction sets that have F16C only.
            let quads: [__m128; 2] =
                unsafe { [_mm_cvtph_ps(bits), _mm_cvtph_ps(_mm_unpackhi_epi64(bits, bits))] };
            return bytemuck::cast(quads);
        }
        let mut columns = [0.0; LANES];
        for (column, element) in columns.iter_mut().zip(from) {
            *column = element.load();
        }
        Lanes::from_array(columns)
    }

    #[inline(always)]
    fn round(x: f32, random: u32) -> u32 {
        let sign = (x.to_bits() >> 16) & 0x8000;
        let magnitude = x.to_bits() & 0x7FFF_FFFF;
        // From 2^-14 up: 13 bits are dropped, and the exponent's bias falls by 112.
        let cut = (magnitude + (random & 0x1FFF)) >> 13;
        let normal = (cut as i32 - (112 << 10)).min(0x7C00) as u32;
        // Below: multiples of 2^-24. The scaled number and its fraction are exact.
        let scaled = (f32::from_bits(magnitude) * TWO_24).min(1024.0);
        // SAFETY: from 0 to 1024; NaN is excluded by the caller, and `min` would drop it.
        let whole: i32 = unsafe { scaled.to_int_unchecked() };
        let fraction = (scaled - whole as f32) * 65536.0;
        // SAFETY: from 0 to below 65536.
        let fraction: i32 = unsafe { fraction.to_int_unchecked() };
        let carry = ((random & 0xFFFF) as i32 + fraction) >> 16;
        let subnormal = (whole + carry) as u32;
        sign | if (magnitude as i32) >= 113 << 23 { normal } else { subnormal }
    }

    #[inline(always)]
    fn from_bits(bits: u32) -> Self {
        Self(bits as u16)
    }
}

impl Stored for Bf16 {
    const ROUNDS: bool = true;
    const INFINITY: u32 = 0x7F80;

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
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_16_bit_number_loads_as_the_half_crate_says() {
        for bits in 0..=u16::MAX {
            for (ours, theirs) in [
                (F16::<false>(bits).load(), half::f16::from_bits(bits).to_f32()),
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
    #[cfg(target_arch = "x86_64")]
    fn the_machine_converts_as_we_do() {
        if tessera_device::Simd::detect() == tessera_device::Simd::Baseline {
            return;
        }
        for start in (0..=u16::MAX).step_by(LANES) {
            let bits: [u16; LANES] = std::array::from_fn(|c| start + c as u16);
            let ours = F16::<false>::load_group(&bits.map(F16)).to_array();
            let machine = F16::<true>::load_group(&bits.map(F16)).to_array();
            for (a, b) in ours.into_iter().zip(machine) {
                assert!(a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan(), "{a} {b}");
            }
        }
    }

    fn finite<E: Stored>(bits: u32) -> bool {
        bits & E::INFINITY != E::INFINITY
    }

    #[test]
    fn exact_numbers_stay_whatever_the_random_bits() {
        for bits in 0..=u16::MAX {
            for random in [0, 1, 0x1FFF, 0xFFFF, 0x1234_5678, u32::MAX] {
                if F16::<false>(bits).load().is_finite() {
                    assert_eq!(
                        F16::<false>::round(F16::<false>(bits).load(), random),
                        u32::from(bits)
                    );
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
            // An odd multiplier visits every value of the low 16 bits once.
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
            mean_is_the_number::<F16<false>>(x);
            mean_is_the_number::<Bf16>(x);
        }
        mean_is_the_number::<Bf16>(1e-40);
        mean_is_the_number::<Bf16>(-3e38);
    }

    #[test]
    fn overflow_is_infinite_and_seen() {
        assert!(finite::<F16<false>>(F16::<false>::round(65504.0, u32::MAX)));
        assert!(finite::<F16<false>>(F16::<false>::round(65519.0, 0)));
        for x in [65519.0, 65536.0, 1e30, -f32::MAX] {
            assert!(!finite::<F16<false>>(F16::<false>::round(x, u32::MAX)), "{x}");
        }
        assert!(!finite::<F16<false>>(F16::<false>::round(65536.0, 0)));
        assert!(!finite::<Bf16>(Bf16::round(f32::MAX, u32::MAX)));
        assert!(finite::<Bf16>(Bf16::round(f32::MAX, 0)));
    }

    proptest! {
        #[test]
        fn a_rounded_number_is_a_neighbour(bits in any::<u32>(), random in any::<u32>()) {
            let x = f32::from_bits(bits);
            prop_assume!(x.is_finite());
            let nearest = half::f16::from_f32(x);
            let ours = half::f16::from_bits(F16::<false>::round(x, random) as u16);
            let distance = i32::from(ours.to_bits() & 0x7FFF) - i32::from(nearest.to_bits() & 0x7FFF);
            prop_assert!(distance.abs() <= 1, "{x}: {ours} {nearest}");
            let nearest = half::bf16::from_f32(x);
            let ours = half::bf16::from_bits(Bf16::round(x, random) as u16);
            let distance = i32::from(ours.to_bits() & 0x7FFF) - i32::from(nearest.to_bits() & 0x7FFF);
            prop_assert!(distance.abs() <= 1, "{x}: {ours} {nearest}");
        }
    }
}
