//! Shorter forms of float32 vectors for the exchange between ranks.
//!
//! Off by default: every codec but `fp32` loses bits. Encoded rows lie one behind another:
//!
//! ```text
//! fp32   dim x f32
//! fp16   dim x IEEE half precision
//! bf16   dim x bfloat16
//! int8   f32 scale, dim x i8        element = scale * i8
//! ```
//!
//! Rounding is to nearest, ties to even. The largest error of an element x:
//!
//! | codec | error | outside its range |
//! |---|---|---|
//! | fp32 | 0 | |
//! | fp16 | 2^-11 abs(x) from 2^-14 on, 2^-25 below | from 65520 on: infinite |
//! | bf16 | 2^-8 abs(x) from 2^-126 on, 2^-134 below | from about 3.396e38 on: infinite |
//! | int8 | max(m / 127, 2^-126) (1/2 + 2^-15), m the row's largest abs(x) | |
//!
//! An element that is not finite stays so in the 16-bit forms; in int8 it makes its whole row NaN.
//! What overflows is infinite rather than cut off. So a check for finite values that follows the
//! exchange sees both, and no rank has to leave the exchange because of its data. A row of zeros
//! is exact in every form. All instruction sets give the same bits.

use tessera_device::{Simd, simd_kernel};

use crate::{CommError, Result};

/// How float32 vectors travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Codec {
    /// As they are.
    #[default]
    Fp32,
    /// IEEE half precision.
    Fp16,
    /// Brain floating point.
    Bf16,
    /// 8-bit integers with a scale per row.
    Int8,
}

impl Codec {
    /// All codecs.
    pub const ALL: [Self; 4] = [Self::Fp32, Self::Fp16, Self::Bf16, Self::Int8];

    /// The name in configurations.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Fp32 => "fp32",
            Self::Fp16 => "fp16",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }

    /// The codec of a name in configurations.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|codec| codec.name() == name)
    }

    /// Bytes of an encoded row of `dim` elements.
    #[must_use]
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self {
            Self::Fp32 => 4 * dim,
            Self::Fp16 | Self::Bf16 => 2 * dim,
            Self::Int8 => 4 + dim,
        }
    }

    /// The largest error of an element `value` of a row whose largest absolute value is `largest`,
    /// inside the codec's range.
    #[must_use]
    pub fn error_max(self, value: f32, largest: f32) -> f64 {
        let relative = |bits: i32, smallest: i32| {
            f64::from(value.abs()).max(2f64.powi(smallest)) * 2f64.powi(-bits)
        };
        match self {
            Self::Fp32 => 0.0,
            Self::Fp16 => relative(11, -14),
            Self::Bf16 => relative(8, -126),
            Self::Int8 => {
                let scale = (f64::from(largest) / 127.0).max(2f64.powi(-126));
                scale * (0.5 + 2f64.powi(-15))
            }
        }
    }

    /// Appends the encoding of `rows` (n, dim) to `out`.
    ///
    /// # Panics
    /// When `rows` is not made of whole rows of `dim` elements.
    pub fn encode(self, simd: Simd, rows: &[f32], dim: usize, out: &mut Vec<u8>) {
        assert!(
            rows.is_empty() || (dim > 0 && rows.len().is_multiple_of(dim)),
            "{} elements are no rows of {dim}",
            rows.len()
        );
        if rows.is_empty() {
            return;
        }
        let start = out.len();
        out.resize(start + rows.len() / dim * self.row_bytes(dim), 0);
        let out = &mut out[start..];
        match self {
            Self::Fp32 => out.copy_from_slice(bytemuck::cast_slice(rows)),
            Self::Fp16 => encode_f16(simd, rows, out),
            Self::Bf16 => encode_bf16(simd, rows, out),
            Self::Int8 => encode_i8(simd, rows, dim, out),
        }
    }

    /// Decodes `out.len() / dim` rows into `out` (n, dim).
    ///
    /// Errors: [`CommError::Encoded`] when `bytes` is not what so many rows take.
    ///
    /// # Panics
    /// When `out` is not made of whole rows of `dim` elements.
    pub fn decode(self, simd: Simd, bytes: &[u8], dim: usize, out: &mut [f32]) -> Result<()> {
        assert!(
            out.is_empty() || (dim > 0 && out.len().is_multiple_of(dim)),
            "{} elements are no rows of {dim}",
            out.len()
        );
        let rows = out.len().checked_div(dim).unwrap_or(0);
        let expected = rows as u128 * self.row_bytes(dim) as u128;
        if bytes.len() as u128 != expected {
            let (codec, bytes) = (self.name(), bytes.len());
            return Err(CommError::Encoded { codec, bytes, rows, dim, expected });
        }
        if out.is_empty() {
            return Ok(());
        }
        match self {
            Self::Fp32 => bytemuck::cast_slice_mut(out).copy_from_slice(bytes),
            Self::Fp16 => decode_f16(simd, bytes, out),
            Self::Bf16 => decode_bf16(simd, bytes, out),
            Self::Int8 => decode_i8(simd, bytes, dim, out),
        }
        Ok(())
    }
}

simd_kernel!(fn encode_f16 = encode_f16_body(values: &[f32], out: &mut [u8]));
simd_kernel!(fn decode_f16 = decode_f16_body(bytes: &[u8], out: &mut [f32]));
simd_kernel!(fn encode_bf16 = encode_bf16_body(values: &[f32], out: &mut [u8]));
simd_kernel!(fn decode_bf16 = decode_bf16_body(bytes: &[u8], out: &mut [f32]));
simd_kernel!(fn encode_i8 = encode_i8_body(rows: &[f32], dim: usize, out: &mut [u8]));
simd_kernel!(fn decode_i8 = decode_i8_body(bytes: &[u8], dim: usize, out: &mut [f32]));

#[inline(always)]
fn encode_f16_body(values: &[f32], out: &mut [u8]) {
    for (&value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        let bits = value.to_bits();
        let sign = (bits >> 16) & 0x8000;
        let size = bits & 0x7FFF_FFFF;
        // From 2^-14 on: exponent moved, 13 bits rounded away. From 65520 on: infinity.
        let normal = (size + 0xFFF + ((size >> 13) & 1)).wrapping_sub(0x3800_0000) >> 13;
        let normal = if size >= 0x477F_F000 { 0x7C00 } else { normal };
        // Below: 0.5 has a last bit of 2^-24, that of the half-precision numbers there.
        let small = (f32::from_bits(size) + 0.5).to_bits().wrapping_sub(0x3F00_0000);
        let nan = 0x7E00 | ((size >> 13) & 0x3FF);
        let number = if size < 0x3880_0000 { small } else { normal };
        let number = if size > 0x7F80_0000 { nan } else { number };
        *out = ((sign | number) as u16).to_ne_bytes();
    }
}

#[inline(always)]
fn decode_f16_body(bytes: &[u8], out: &mut [f32]) {
    for (&bytes, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
        let half = u32::from(u16::from_ne_bytes(bytes));
        let size = half & 0x7FFF;
        let normal = (size << 13) + 0x3800_0000;
        let small = (size as i32 as f32 * (1.0 / 16_777_216.0)).to_bits(); // units of 2^-24
        let endless = (size << 13) | 0x7F80_0000;
        let number = if size < 0x400 { small } else { normal };
        let number = if size >= 0x7C00 { endless } else { number };
        *out = f32::from_bits(((half & 0x8000) << 16) | number);
    }
}

#[inline(always)]
fn encode_bf16_body(values: &[f32], out: &mut [u8]) {
    for (&value, out) in values.iter().zip(out.as_chunks_mut::<2>().0) {
        let bits = value.to_bits();
        // To nearest, ties to even: half a unit less one, and the unit's own last bit.
        let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1)) >> 16;
        // A NaN whose high bits are all zero must not round to an infinity: set the quiet bit.
        let nan = (bits >> 16) | 0x40;
        let is_nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000;
        *out = ((if is_nan { nan } else { rounded }) as u16).to_ne_bytes();
    }
}

#[inline(always)]
fn decode_bf16_body(bytes: &[u8], out: &mut [f32]) {
    for (&bytes, out) in bytes.as_chunks::<2>().0.iter().zip(out) {
        *out = f32::from_bits(u32::from(u16::from_ne_bytes(bytes)) << 16);
    }
}

/// Adding it to a float32 below 2^22 in size rounds that to the nearest integer, ties to even,
/// and leaves the integer in the low bits.
const ROUND: f32 = 12_582_912.0; // 1.5 * 2^23

#[inline(always)]
fn encode_i8_body(rows: &[f32], dim: usize, out: &mut [u8]) {
    for (row, out) in rows.chunks_exact(dim).zip(out.chunks_exact_mut(4 + dim)) {
        let (scale_bytes, out) = out.split_at_mut(4);
        // The bits of absolute values are ordered as the values, and NaN and infinity above all.
        let largest = row.iter().fold(0i32, |largest, x| {
            let bits = (x.to_bits() & 0x7FFF_FFFF) as i32;
            if bits > largest { bits } else { largest }
        });
        let scale = scale_of(f32::from_bits(largest as u32));
        scale_bytes.copy_from_slice(&scale.to_ne_bytes());
        // A row that is not finite has a NaN for its scale; what is stored of it does not matter.
        for (&x, out) in row.iter().zip(out) {
            *out = (x / scale + ROUND).to_bits() as u8;
        }
    }
}

/// The scale of a row whose largest absolute value is `largest`.
#[inline(always)]
fn scale_of(largest: f32) -> f32 {
    if !largest.is_finite() {
        return f32::NAN;
    }
    // A denormal scale would have few bits; below the normal numbers the smallest of them serves.
    let scale = (largest / 127.0).max(f32::MIN_POSITIVE);
    // Rounded up, the largest numbers' scale times 127 would be infinite.
    if (scale * 127.0).is_finite() { scale } else { scale.next_down() }
}

#[inline(always)]
fn decode_i8_body(bytes: &[u8], dim: usize, out: &mut [f32]) {
    for (bytes, out) in bytes.chunks_exact(4 + dim).zip(out.chunks_exact_mut(dim)) {
        let (scale, bytes) = bytes.split_at(4);
        let scale = f32::from_ne_bytes([scale[0], scale[1], scale[2], scale[3]]);
        for (&byte, out) in bytes.iter().zip(out) {
            *out = scale * f32::from(byte as i8);
        }
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;

    /// Encodes and decodes on every instruction set; all must give the same bits.
    fn round_trip(codec: Codec, rows: &[f32], dim: usize) -> Vec<f32> {
        let mut first: Option<(Vec<u8>, Vec<f32>)> = None;
        for simd in Simd::available() {
            let mut bytes = vec![7; 3]; // what is there stays, and rows need no alignment
            codec.encode(simd, rows, dim, &mut bytes);
            assert_eq!(bytes[..3], [7; 3]);
            let bytes = bytes.split_off(3);
            assert_eq!(bytes.len(), rows.len() / dim * codec.row_bytes(dim));
            let mut out = vec![0.0; rows.len()];
            codec.decode(simd, &bytes, dim, &mut out).unwrap();
            match &first {
                None => first = Some((bytes, out)),
                Some((same_bytes, same_out)) => {
                    assert_eq!(&bytes, same_bytes, "{codec:?} on {simd:?}");
                    let bits = |values: &[f32]| -> Vec<u32> {
                        values.iter().map(|value| value.to_bits()).collect()
                    };
                    assert_eq!(bits(&out), bits(same_out), "{codec:?} on {simd:?}");
                }
            }
        }
        first.unwrap().1
    }

    /// Values of every size, zeros and repeats among them.
    fn element() -> impl Strategy<Value = f32> {
        prop_oneof![
            4 => -2.0f32..2.0,
            2 => any::<f32>().prop_filter("finite", |x| x.is_finite()),
            1 => prop::sample::select(vec![
                0.0, -0.0, 1.0, -1.0, 0.5, 65504.0, f32::MAX, f32::MIN, f32::MIN_POSITIVE, 1e-45,
                -1e-40, 6e-8, 6.103_515_6e-5,
            ]),
        ]
    }

    proptest! {
        #[test]
        fn errors_stay_below_the_stated_maximum(
            dim in prop_oneof![1usize..34, Just(64usize), Just(128)],
            seed in prop::collection::vec(element(), 128 * 3),
            rows in 0usize..4,
        ) {
            let values = &seed[..rows * dim];
            for codec in Codec::ALL {
                let decoded = round_trip(codec, values, dim);
                for (row, decoded) in values.chunks(dim).zip(decoded.chunks(dim)) {
                    let largest = row.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                    for (&x, &y) in row.iter().zip(decoded) {
                        let limit = match codec {
                            Codec::Fp16 => 65_520.0,
                            Codec::Bf16 => 3.396e38,
                            _ => f32::INFINITY,
                        };
                        if x.abs() >= limit {
                            prop_assert!(y.is_infinite() || (y - x).abs() < 1e36, "{x} {y}");
                            continue;
                        }
                        let error = (f64::from(x) - f64::from(y)).abs();
                        let most = codec.error_max(x, largest);
                        prop_assert!(error <= most, "{codec:?}: {x} became {y}: {error} > {most}");
                    }
                }
            }
        }
    }

    #[test]
    fn sixteen_bit_forms_are_those_of_the_half_library() {
        // All half-precision numbers, their neighbours and the midpoints between them.
        let mut values = vec![f32::NAN, -f32::NAN, f32::from_bits(0x7F80_0001)];
        for bits in 0..=u16::MAX {
            for value in [f16::from_bits(bits).to_f32(), bf16::from_bits(bits).to_f32()] {
                let bits = value.to_bits();
                values.push(value);
                for near in [1, 0xFFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001] {
                    values.push(f32::from_bits(bits.wrapping_add(near)));
                }
            }
        }
        for (value, (short, brain)) in values.iter().zip(
            round_trip(Codec::Fp16, &values, 1).iter().zip(round_trip(Codec::Bf16, &values, 1)),
        ) {
            let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
            assert!(same(*short, f16::from_f32(*value).to_f32()), "{value:e} became {short:e}");
            assert!(same(brain, bf16::from_f32(*value).to_f32()), "{value:e} became {brain:e}");
        }
    }

    #[test]
    fn eight_bit_rows_keep_what_they_can() {
        // Ties go to even; the largest is met to rounding; zeros are exact.
        let row = [127.0f32, 0.5, 1.5, -0.5, -2.5, 0.0, -127.0];
        assert_eq!(round_trip(Codec::Int8, &row, 7), [127.0, 0.0, 2.0, 0.0, -2.0, 0.0, -127.0]);
        assert_eq!(round_trip(Codec::Int8, &[0.0, -0.0], 2), [0.0, 0.0]);
        // The scale is a row's own.
        let rows = [1e-30f32, 0.0, 1e30, -1e30];
        let decoded = round_trip(Codec::Int8, &rows, 2);
        assert!((decoded[0] / 1e-30 - 1.0).abs() < 1e-6 && decoded[1] == 0.0);
        assert!(decoded[2] == -decoded[3] && (decoded[2] / 1e30 - 1.0).abs() < 1e-6);
        // The largest numbers do not become infinite.
        assert!(round_trip(Codec::Int8, &[f32::MAX, f32::MIN], 2).iter().all(|x| x.is_finite()));
    }

    #[test]
    fn what_is_not_finite_arrives_as_such() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for dim in [1usize, 2, 33] {
                let mut rows = vec![1.0; 2 * dim];
                rows[dim - 1] = bad;
                for codec in Codec::ALL {
                    let decoded = round_trip(codec, &rows, dim);
                    assert!(!decoded[dim - 1].is_finite(), "{codec:?}: {bad}");
                    assert!(decoded[dim..].iter().all(|&x| x == 1.0), "{codec:?}: {bad}");
                    let whole_row = codec == Codec::Int8;
                    assert!(decoded[..dim - 1].iter().all(|x| x.is_nan() == whole_row));
                }
            }
        }
    }

    #[test]
    fn lengths_that_do_not_fit_are_errors_with_numbers() {
        let mut out = [0.0; 6];
        let error = Codec::Int8.decode(Simd::Baseline, &[0; 13], 3, &mut out).unwrap_err();
        assert_eq!(
            error.to_string(),
            "decode int8: 13 bytes for 2 rows of dim 3, 14 bytes expected"
        );
        assert!(Codec::Fp32.decode(Simd::Baseline, &[0], 0, &mut []).is_err());
        assert!(Codec::Fp16.decode(Simd::Baseline, &[], 0, &mut []).is_ok());
        for codec in Codec::ALL {
            assert_eq!(Codec::of_name(codec.name()), Some(codec));
        }
        assert_eq!(Codec::of_name("fp8"), None);
    }
}
