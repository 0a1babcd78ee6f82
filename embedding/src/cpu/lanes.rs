//! Eight columns at a time, in code that does not depend on what a compiler makes of loops.
//!
//! On x86-64 a group is two SSE registers, which every such machine has; the kernels around it
//! are bound by memory, so wider ones would gain little. Every operation is IEEE's, column by
//! column, so results are those of scalar code to the bit.

use std::ops::{Add, Div, Mul, Sub};

use bytemuck::{Pod, Zeroable};

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    __m128, _mm_add_ps, _mm_andnot_ps, _mm_cmpeq_ps, _mm_cmple_ps, _mm_div_ps, _mm_max_ps,
    _mm_min_ps, _mm_mul_ps, _mm_setzero_ps, _mm_sqrt_ps, _mm_sub_ps,
};

/// Columns in a group.
pub(crate) const LANES: usize = 8;

/// A group of columns.
#[derive(Clone, Copy, Debug, Pod, Zeroable)]
#[repr(C)]
pub(crate) struct Lanes([Quad; 2]);

#[cfg(target_arch = "x86_64")]
type Quad = __m128;
#[cfg(not(target_arch = "x86_64"))]
type Quad = [f32; 4];

/// Defines a method of some groups by an SSE intrinsic and by a scalar function.
macro_rules! columnwise {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident),+) = $sse:expr, $scalar:expr) => {
        $(#[$doc])*
        #[inline(always)]
        $vis fn $name($($arg: Self),+) -> Self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: SSE is part of x86-64.
            let quad = |i: usize| unsafe { ($sse)($($arg.0[i]),+) };
            #[cfg(not(target_arch = "x86_64"))]
            let quad = |i: usize| std::array::from_fn(|c| ($scalar)($($arg.0[i][c]),+));
            Self([quad(0), quad(1)])
        }
    };
}

impl Lanes {
    /// All columns 0.
    #[inline(always)]
    pub(crate) fn zero() -> Self {
        Self::zeroed()
    }

    /// All columns `x`.
    #[inline(always)]
    pub(crate) fn splat(x: f32) -> Self {
        Self::from_array([x; LANES])
    }

    /// The group of these columns.
    #[inline(always)]
    pub(crate) fn from_array(columns: [f32; LANES]) -> Self {
        bytemuck::cast(columns)
    }

    /// Its columns.
    #[inline(always)]
    pub(crate) fn to_array(self) -> [f32; LANES] {
        bytemuck::cast(self)
    }

    columnwise! {
        fn plus(self, other) = _mm_add_ps, |a: f32, b: f32| a + b
    }
    columnwise! {
        fn minus(self, other) = _mm_sub_ps, |a: f32, b: f32| a - b
    }
    columnwise! {
        fn times(self, other) = _mm_mul_ps, |a: f32, b: f32| a * b
    }
    columnwise! {
        fn divided(self, other) = _mm_div_ps, |a: f32, b: f32| a / b
    }
    columnwise! {
        /// Square roots.
        pub(crate) fn sqrt(self) = |a| _mm_sqrt_ps(a), f32::sqrt
    }
    columnwise! {
        /// Quotients, and 0 where the divisor is 0.
        pub(crate) fn over(self, divisor) =
            |a, b| _mm_andnot_ps(_mm_cmpeq_ps(b, _mm_setzero_ps()), _mm_div_ps(a, b)),
            |a: f32, b: f32| if b == 0.0 { 0.0 } else { a / b }
    }
    columnwise! {
        /// Itself, and 0 where `x` is at most `limit`.
        pub(crate) fn above(self, x, limit) =
            |a, x, limit| _mm_andnot_ps(_mm_cmple_ps(x, limit), a),
            |a: f32, x: f32, limit: f32| if x <= limit { 0.0 } else { a }
    }
    columnwise! {
        /// The smaller of two numbers.
        pub(crate) fn min(self, other) = |a, b| _mm_min_ps(a, b), |a: f32, b: f32| if a < b { a } else { b }
    }
    columnwise! {
        /// The larger of two numbers.
        pub(crate) fn max(self, other) = |a, b| _mm_max_ps(a, b), |a: f32, b: f32| if a > b { a } else { b }
    }
}

impl Add for Lanes {
    type Output = Self;
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.plus(other)
    }
}

impl Sub for Lanes {
    type Output = Self;
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.minus(other)
    }
}

impl Mul for Lanes {
    type Output = Self;
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.times(other)
    }
}

impl Div for Lanes {
    type Output = Self;
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.divided(other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operation_is_the_scalar_one_in_every_column() {
        let numbers = [0.0, -0.0, 1.5, -2.25, 1e-40, 3e38, -7.0, 0.1];
        for shift in 0..LANES {
            let other: [f32; LANES] = std::array::from_fn(|c| numbers[(c + shift) % LANES]);
            let (a, b) = (Lanes::from_array(numbers), Lanes::from_array(other));
            let third = Lanes::splat(1.0);
            let check = |name: &str, ours: Lanes, scalar: &dyn Fn(f32, f32) -> f32| {
                for (c, ours) in ours.to_array().into_iter().enumerate() {
                    let expected = scalar(numbers[c], other[c]);
                    let same =
                        ours.to_bits() == expected.to_bits() || ours.is_nan() && expected.is_nan();
                    assert!(same, "{name} of {} and {}: {ours}", numbers[c], other[c]);
                }
            };
            check("sum", a + b, &|a, b| a + b);
            check("difference", a - b, &|a, b| a - b);
            check("product", a * b, &|a, b| a * b);
            check("quotient", a / b, &|a, b| a / b);
            check("root", a.sqrt(), &|a, _| a.sqrt());
            check("over", a.over(b), &|a, b| if b == 0.0 { 0.0 } else { a / b });
            check("above", a.above(b, third), &|a, b| if b <= 1.0 { 0.0 } else { a });
            check("min", a.min(b), &|a, b| if a < b { a } else { b });
            check("max", a.max(b), &|a, b| if a > b { a } else { b });
        }
        assert_eq!(Lanes::zero().to_array(), [0.0; LANES]);
        assert_eq!(Lanes::splat(2.5).to_array(), [2.5; LANES]);
    }
}
