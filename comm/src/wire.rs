//! The types of numbers that travel between ranks.

use std::fmt;

use half::{bf16, f16};
use tessera_device::Element;

use crate::reduce;

/// Type of the elements of a message. It travels in the message, so that ranks that take a
/// buffer for different types find out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// Bytes.
    U8,
    /// 8-bit signed integers.
    I8,
    /// 16-bit unsigned integers.
    U16,
    /// 16-bit signed integers.
    I16,
    /// 32-bit unsigned integers.
    U32,
    /// 32-bit signed integers.
    I32,
    /// 64-bit unsigned integers.
    U64,
    /// 64-bit signed integers.
    I64,
    /// IEEE half precision.
    F16,
    /// Brain floating point.
    Bf16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl Dtype {
    const ALL: [Self; 12] = [
        Self::U8,
        Self::I8,
        Self::U16,
        Self::I16,
        Self::U32,
        Self::I32,
        Self::U64,
        Self::I64,
        Self::F16,
        Self::Bf16,
        Self::F32,
        Self::F64,
    ];

    /// The name Rust gives it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::U8 => "u8",
            Self::I8 => "i8",
            Self::U16 => "u16",
            Self::I16 => "i16",
            Self::U32 => "u32",
            Self::I32 => "i32",
            Self::U64 => "u64",
            Self::I64 => "i64",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::F32 => "f32",
            Self::F64 => "f64",
        }
    }

    /// Bytes of an element.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
        }
    }

    /// Its number in a message's header.
    pub(crate) const fn code(self) -> u8 {
        self as u8
    }

    /// The type of a number in a header.
    pub(crate) fn of_code(code: u8) -> Option<Self> {
        Self::ALL.get(usize::from(code)).copied()
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
}

/// An element of a message.
pub trait Wire: Element + sealed::Sealed {
    /// Its type as messages carry it.
    const DTYPE: Dtype;
}

/// Elements that ranks can add up.
pub trait Summable: Wire {
    /// `sum[i] += term[i]`; whether some sum left the range of an integer type.
    #[doc(hidden)]
    fn add(sum: &mut [Self], term: &[Self]) -> bool;
}

/// Elements of which ranks can find the largest and the smallest.
pub trait Ordered: Wire + Ord {}

macro_rules! wire {
    ($($ty:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $ty {}
        impl Wire for $ty {
            const DTYPE: Dtype = Dtype::$dtype;
        }
        const _: () = assert!(size_of::<$ty>() == Dtype::$dtype.bytes());
    )*};
}
wire!(
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, u64 => U64, i64 => I64,
    f16 => F16, bf16 => Bf16, f32 => F32, f64 => F64,
);

macro_rules! integer {
    ($($ty:ty),*) => {$(
        impl Ordered for $ty {}
        impl Summable for $ty {
            fn add(sum: &mut [Self], term: &[Self]) -> bool {
                let mut overflow = false;
                for (sum, &term) in sum.iter_mut().zip(term) {
                    let (value, over) = sum.overflowing_add(term);
                    *sum = value;
                    overflow |= over;
                }
                overflow
            }
        }
    )*};
}
integer!(u8, i8, u16, i16, u32, i32, u64, i64);

impl Summable for f32 {
    fn add(sum: &mut [Self], term: &[Self]) -> bool {
        reduce::add_f32(sum, term);
        false
    }
}

impl Summable for f64 {
    fn add(sum: &mut [Self], term: &[Self]) -> bool {
        reduce::add_f64(sum, term);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_tell_types_apart() {
        for (code, dtype) in Dtype::ALL.into_iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), code);
            assert_eq!(Dtype::of_code(dtype.code()), Some(dtype));
        }
        assert_eq!(Dtype::of_code(12), None);
        let names: std::collections::BTreeSet<_> = Dtype::ALL.iter().map(|d| d.name()).collect();
        assert_eq!(names.len(), 12);
    }

    #[test]
    fn integer_sums_that_leave_their_range_are_seen() {
        let mut sum = [1u64, u64::MAX - 1];
        assert!(!u64::add(&mut sum, &[1, 1]));
        assert_eq!(sum, [2, u64::MAX]);
        assert!(u64::add(&mut sum, &[0, 1]));
        assert!(i32::add(&mut [i32::MIN], &[-1]));
    }
}
