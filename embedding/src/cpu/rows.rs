//! Access to rows by slot, from several owners at once, and prefetching of rows to come.

use std::marker::PhantomData;

use tessera_device::prefetch_l2;

/// The rows of a plane, (slots, width), of which different owners may each write their own.
#[derive(Debug)]
pub(crate) struct RawRows<'a, T> {
    start: *mut T,
    slots: usize,
    width: usize,
    plane: PhantomData<&'a mut [T]>,
}

// SAFETY: it stands for a mutable slice; who reaches a row guarantees to be its only user.
unsafe impl<T: Send> Send for RawRows<'_, T> {}
// SAFETY: as above: a shared `RawRows` gives nothing without that guarantee.
unsafe impl<T: Send> Sync for RawRows<'_, T> {}

impl<'a, T> RawRows<'a, T> {
    /// The rows of `plane`, which has a multiple of `width` elements; none when `width` is 0.
    pub(crate) fn new(plane: &'a mut [T], width: usize) -> Self {
        let slots = plane.len().checked_div(width).unwrap_or(0);
        Self { start: plane.as_mut_ptr(), slots, width, plane: PhantomData }
    }

    /// The row at `slot`.
    ///
    /// # Safety
    /// While the row is in use, nobody else may reach the same slot.
    ///
    /// # Panics
    /// When there is no such slot.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // exclusive by the caller's guarantee
    pub(crate) unsafe fn row(&self, slot: u64) -> &mut [T] {
        assert!(slot < self.slots as u64, "slot {slot} of {}", self.slots);
        // SAFETY: the slot is inside the plane, and the caller is its only user.
        unsafe {
            std::slice::from_raw_parts_mut(self.start.add(slot as usize * self.width), self.width)
        }
    }

    /// Columns `column .. column + count` of the row at `slot`.
    ///
    /// # Safety
    /// While they are in use, nobody else may reach the same columns of the same slot.
    ///
    /// # Panics
    /// When there is no such slot or column.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)] // exclusive by the caller's guarantee
    pub(crate) unsafe fn columns(&self, slot: usize, column: usize, count: usize) -> &mut [T] {
        assert!(slot < self.slots && column <= self.width && count <= self.width - column);
        // SAFETY: the columns are inside the row, the row is inside the plane, and the caller is
        // their only user.
        unsafe {
            let start = self.start.add(slot * self.width + column);
            std::slice::from_raw_parts_mut(start, count)
        }
    }

    /// Asks for the row at `slot` to be brought near.
    #[inline(always)]
    pub(crate) fn prefetch(&self, slot: u64) {
        self.prefetch_columns(slot as usize, 0, self.width);
    }

    /// Asks for some columns of the row at `slot`, which need not exist, to be brought near.
    #[inline(always)]
    pub(crate) fn prefetch_columns(&self, slot: usize, column: usize, count: usize) {
        prefetch(self.start.wrapping_add(slot.wrapping_mul(self.width) + column), count);
    }
}

/// Asks for `count` elements from `start` on to be brought into the second-level cache: rows to
/// come are too many for the first. Any address will do, since nothing is read.
#[inline(always)]
pub(crate) fn prefetch<T>(start: *const T, count: usize) {
    let start = start.cast::<u8>();
    let bytes = count * size_of::<T>();
    // A loop of known length where the count is known; a row that does not begin at a line's
    // border may end in one line more.
    let mut at = 0;
    while at < bytes {
        prefetch_l2(start.wrapping_add(at));
        at += LINE_BYTES;
    }
    if start as usize % LINE_BYTES + bytes > at {
        prefetch_l2(start.wrapping_add(bytes.wrapping_sub(1)));
    }
}

/// Bytes of a cache line.
const LINE_BYTES: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_where_their_slot_says() {
        let mut plane: Vec<u32> = (0..12).collect();
        let rows = RawRows::new(&mut plane, 3);
        rows.prefetch(2);
        rows.prefetch(u64::MAX); // harmless
        // SAFETY: one thread, one row at a time.
        unsafe {
            assert_eq!(rows.row(2), [6, 7, 8]);
            rows.row(3)[2] = 99;
        }
        assert_eq!(plane[11], 99);
        let rows = RawRows::new(&mut plane, 3);
        // SAFETY: one thread, different columns.
        let (left, right) = unsafe { (rows.columns(1, 0, 2), rows.columns(1, 2, 1)) };
        assert_eq!((&left[..], &right[..]), (&[3, 4][..], &[5][..]));
        let none = RawRows::new(&mut plane[..0], 0);
        none.prefetch(0);
        assert_eq!(none.slots, 0);
    }

    #[test]
    #[should_panic(expected = "assertion failed")]
    fn columns_outside_are_a_panic_not_a_write() {
        let mut plane = vec![0u8; 8];
        let rows = RawRows::new(&mut plane, 4);
        // SAFETY: one thread.
        unsafe { rows.columns(1, 3, 2)[0] = 1 };
    }

    #[test]
    #[should_panic(expected = "slot 4 of 4")]
    fn a_slot_outside_is_a_panic_not_a_write() {
        let mut plane = vec![0u8; 8];
        let rows = RawRows::new(&mut plane, 2);
        // SAFETY: one thread.
        unsafe { rows.row(4)[0] = 1 };
    }
}
