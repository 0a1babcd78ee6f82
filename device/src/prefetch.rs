//! Asking the processor for memory that will be read soon.

/// Asks for the cache line at `address` to be brought into the first-level cache. Any address will
/// do: nothing is read, and none faults. Does nothing where there is no such instruction.
#[inline(always)]
pub fn prefetch_l1(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing and faults on no address; SSE is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// As [`prefetch_l1`], into the second-level cache: more lines can be on their way there than the
/// first level has buffers for.
#[inline(always)]
pub fn prefetch_l2(address: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: as in `prefetch_l1`.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(address.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}
