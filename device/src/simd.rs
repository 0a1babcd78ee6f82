//! Which vector instructions a kernel may use, chosen once, and the macro that compiles one body
//! for each choice.
//!
//! A kernel is an ordinary `#[inline(always)]` function on slices. [`simd_kernel!`] wraps it in
//! one copy per instruction set. Rust never contracts a multiply and an add into one rounding,
//! and a body that fixes its own order of summation keeps it on every path, so all paths give
//! the same bits.
//!
//! [`simd_kernel!`]: crate::simd_kernel

/// Vector instructions a kernel is compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Simd {
    /// What the target promises everywhere (SSE2 on x86-64).
    Baseline,
    /// AVX2 with F16C (x86-64).
    Avx2,
    /// AVX-512 F, BW, DQ and VL (x86-64).
    Avx512,
}

impl Simd {
    /// The widest set that this machine has.
    #[must_use]
    pub fn detect() -> Self {
        *Self::available().last().expect("the baseline is always there")
    }

    /// All sets that this machine has, narrowest first.
    #[must_use]
    pub fn available() -> Vec<Self> {
        let mut sets = vec![Self::Baseline];
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::is_x86_feature_detected as has;
            if has!("avx2") && has!("f16c") {
                sets.push(Self::Avx2);
                if has!("avx512f") && has!("avx512bw") && has!("avx512dq") && has!("avx512vl") {
                    sets.push(Self::Avx512);
                }
            }
        }
        sets
    }
}

/// Compiles a kernel once per instruction set.
///
/// `simd_kernel!(pub fn name = body(a: A, b: B) -> R)` defines `name(simd, a, b)`, which runs the
/// `#[inline(always)]` function `body` under `simd`.
#[macro_export]
macro_rules! simd_kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident = $body:ident
     $(<$($life:lifetime),*>)? ($($arg:ident : $ty:ty),* $(,)?) $(-> $ret:ty)?) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis fn $name $(<$($life),*>)? (simd: $crate::Simd, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx2 $(<$($life),*>)? ($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c")]
                #[allow(clippy::too_many_arguments)]
                fn avx512 $(<$($life),*>)? ($($arg: $ty),*) $(-> $ret)? { $body($($arg),*) }
                match simd {
                    // SAFETY: a `Simd` other than the baseline exists only where
                    // `Simd::available` found its instructions.
                    $crate::Simd::Avx2 => return unsafe { avx2($($arg),*) },
                    // SAFETY: as above.
                    $crate::Simd::Avx512 => return unsafe { avx512($($arg),*) },
                    _ => {}
                }
            }
            let _ = simd;
            $body($($arg),*)
        }
    };
}

#[cfg(test)]
mod tests {
    use super::Simd;

    #[inline(always)]
    fn dot_body(a: &[f32], b: &[f32]) -> f32 {
        let mut lanes = [0.0f32; 8];
        for (a, b) in a.chunks_exact(8).zip(b.chunks_exact(8)) {
            for lane in 0..8 {
                lanes[lane] += a[lane] * b[lane];
            }
        }
        lanes.iter().sum()
    }

    simd_kernel!(fn dot = dot_body(a: &[f32], b: &[f32]) -> f32);

    #[test]
    fn every_path_gives_the_same_bits() {
        let a: Vec<f32> = (0..64).map(|i| (i as f32 * 0.37).sin()).collect();
        let b: Vec<f32> = (0..64).map(|i| (i as f32 * 0.73).cos()).collect();
        let first = dot(Simd::Baseline, &a, &b);
        for simd in Simd::available() {
            assert_eq!(dot(simd, &a, &b).to_bits(), first.to_bits(), "{simd:?}");
        }
        assert_eq!(Simd::available().last(), Some(&Simd::detect()));
    }
}
