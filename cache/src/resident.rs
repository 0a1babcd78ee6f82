//! The store that keeps every row in device memory: a slot is the row's number.

use std::fmt;
use std::ops::Range;

use tessera_device::{Device, DeviceBuffer};

use crate::store::{FetcherKind, Held, check_rows};
use crate::{
    CacheError, Fetched, Fetcher, Lease, Plane, Result, RowLayout, RowOps, RowStore, StoreStats,
    TierStats,
};

/// All rows of a table in device memory, zero at first.
///
/// Memory: `rows * (weight_bytes + state_bytes)`; pages that nobody wrote take none of it where
/// the device maps memory lazily, as the CPU does.
pub struct Resident<D: Device> {
    rows: u64,
    layout: RowLayout,
    weights: D::Buffer<u8>, // (rows, weight_bytes)
    state: D::Buffer<u8>,   // (rows, state_bytes)
}

impl<D: Device> Resident<D> {
    /// A store of `rows` zero rows.
    ///
    /// Errors: [`CacheError::TooLarge`] with the numbers, or what the device says.
    pub fn new(device: &D, rows: u64, layout: RowLayout) -> Result<Self> {
        let alloc = |plane: Plane, row_bytes: usize| {
            let bytes = usize::try_from(rows)
                .ok()
                .and_then(|rows| rows.checked_mul(row_bytes))
                .filter(|&bytes| isize::try_from(bytes).is_ok())
                .ok_or(CacheError::TooLarge { plane, rows, row_bytes })?;
            device.alloc::<u8>(bytes).map_err(CacheError::from)
        };
        let weights = alloc(Plane::Weights, layout.weight_bytes)?;
        let state = alloc(Plane::State, layout.state_bytes)?;
        Ok(Self { rows, layout, weights, state })
    }
}

impl<D: RowOps> RowStore<D> for Resident<D> {
    fn rows(&self) -> u64 {
        self.rows
    }

    fn layout(&self) -> RowLayout {
        self.layout
    }

    fn capacity(&self) -> u64 {
        self.rows
    }

    fn slots_free(&self) -> u64 {
        self.rows
    }

    fn bytes(&self) -> u64 {
        // `new` checked each product against the address space; their sum fits 64 bits.
        self.rows * self.layout.weight_bytes as u64 + self.rows * self.layout.state_bytes as u64
    }

    fn host_bytes(&self) -> u64 {
        0
    }

    fn fetcher(&self) -> Fetcher {
        Fetcher(FetcherKind::Resident { rows: self.rows })
    }

    fn install(&mut self, _: &D, _: &D::Stream, fetched: Fetched) -> Result<Lease> {
        match fetched.0 {
            Held::Identity { last, .. } if last.is_none_or(|row| row < self.rows) => {
                Ok(Lease(fetched.0))
            }
            _ => Err(CacheError::Foreign { operation: "install" }),
        }
    }

    fn commit(&mut self, lease: &Lease) -> Result<()> {
        match lease.0 {
            Held::Identity { last, .. } if last.is_none_or(|row| row < self.rows) => Ok(()),
            _ => Err(CacheError::Foreign { operation: "commit" }),
        }
    }

    fn weights(&self) -> &D::Buffer<u8> {
        &self.weights
    }

    fn planes_mut(&mut self) -> (&mut D::Buffer<u8>, &mut D::Buffer<u8>) {
        (&mut self.weights, &mut self.state)
    }

    fn read(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Range<u64>,
        bytes: &mut [u8],
    ) -> Result<()> {
        check_range("read", self.rows, self.layout, plane, &rows, bytes.len())?;
        // At most the plane's size, which `new` checked.
        let at = rows.start as usize * self.layout.row_bytes(plane);
        let buffer = match plane {
            Plane::Weights => &self.weights,
            Plane::State => &self.state,
        };
        Ok(device.download(stream, buffer, at, bytes)?)
    }

    fn write(
        &mut self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: Range<u64>,
        bytes: &[u8],
    ) -> Result<()> {
        check_range("write", self.rows, self.layout, plane, &rows, bytes.len())?;
        // At most the plane's size, which `new` checked.
        let at = rows.start as usize * self.layout.row_bytes(plane);
        let buffer = match plane {
            Plane::Weights => &mut self.weights,
            Plane::State => &mut self.state,
        };
        Ok(device.upload(stream, bytes, buffer, at)?)
    }

    fn read_listed(
        &self,
        device: &D,
        stream: &D::Stream,
        plane: Plane,
        rows: &[u64],
        bytes: &mut [u8],
    ) -> Result<()> {
        check_listed("read", self.rows, self.layout, plane, rows, bytes.len())?;
        let buffer = match plane {
            Plane::Weights => &self.weights,
            Plane::State => &self.state,
        };
        device.gather_rows(stream, buffer, rows, self.layout.row_bytes(plane), bytes)
    }

    fn write_listed(
        &mut self,
        device: &D,
        stream: &D::Stream,
        rows: &[u64],
        weights: Option<&[u8]>,
        state: Option<&[u8]>,
    ) -> Result<()> {
        for (plane, bytes) in [(Plane::Weights, weights), (Plane::State, state)] {
            let Some(bytes) = bytes else { continue };
            check_listed("write", self.rows, self.layout, plane, rows, bytes.len())?;
            let buffer = match plane {
                Plane::Weights => &mut self.weights,
                Plane::State => &mut self.state,
            };
            device.scatter_rows(stream, bytes, rows, self.layout.row_bytes(plane), buffer)?;
        }
        Ok(())
    }

    fn flush(&mut self, _: &D, _: &D::Stream) -> Result<()> {
        Ok(())
    }

    fn hint_next_use(&self, _: &[u64], _: u32) {}

    fn stats(&self) -> StoreStats {
        let device = TierStats { slots: self.rows, rows: self.rows, ..TierStats::default() };
        StoreStats { device, ..StoreStats::default() }
    }
}

impl<D: Device> fmt::Debug for Resident<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (weights, state) = (self.weights.len(), self.state.len());
        write!(f, "Resident({} rows, {weights} + {state} bytes)", self.rows)
    }
}

/// Refuses a range of rows that leaves a store of `stored` rows, and bytes that are not the
/// range's.
pub(crate) fn check_range(
    operation: &'static str,
    stored: u64,
    layout: RowLayout,
    plane: Plane,
    rows: &Range<u64>,
    given: usize,
) -> Result<()> {
    let (start, end) = (rows.start, rows.end);
    if start > end || end > stored {
        return Err(CacheError::RowsOutOfRange { operation, plane, start, end, rows: stored });
    }
    // Bytes beyond the address space cannot have been given.
    let rows = usize::try_from(end - start).unwrap_or(usize::MAX);
    let needed = rows.saturating_mul(layout.row_bytes(plane));
    if given != needed {
        return Err(CacheError::WrongLength { operation, plane, start, end, given, needed });
    }
    Ok(())
}

/// As [`check_range`], of rows in a list.
pub(crate) fn check_listed(
    operation: &'static str,
    stored: u64,
    layout: RowLayout,
    plane: Plane,
    rows: &[u64],
    given: usize,
) -> Result<()> {
    check_rows(rows, stored)?;
    let needed = rows.len().saturating_mul(layout.row_bytes(plane));
    if given != needed {
        let (start, end) =
            (rows.first().map_or(0, |&row| row), rows.last().map_or(0, |row| row + 1));
        return Err(CacheError::WrongLength { operation, plane, start, end, given, needed });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tessera_device::{Cpu, DeviceBuffer};

    fn cpu() -> (Cpu, <Cpu as Device>::Stream) {
        let cpu = Cpu::new(std::num::NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        (cpu, stream)
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_and_nothing_else_moves(
            rows in 0u64..20,
            weight_bytes in 1usize..40,
            state_bytes in 0usize..20,
            cut in any::<(u64, u64)>(),
        ) {
            let (cpu, stream) = cpu();
            let layout = RowLayout { weight_bytes, state_bytes };
            let mut store = Resident::new(&cpu, rows, layout).unwrap();
            prop_assert_eq!(store.bytes(), rows * (weight_bytes + state_bytes) as u64);
            let (a, b) = (cut.0 % (rows + 1), cut.1 % (rows + 1));
            let range = a.min(b)..a.max(b);
            for (plane, width) in [(Plane::Weights, weight_bytes), (Plane::State, state_bytes)] {
                let length = (range.end - range.start) as usize * width;
                let bytes: Vec<u8> = (0..length).map(|i| 1 + (i % 250) as u8).collect();
                store.write(&cpu, &stream, plane, range.clone(), &bytes).unwrap();
                let mut back = vec![0; length];
                store.read(&cpu, &stream, plane, range.clone(), &mut back).unwrap();
                prop_assert_eq!(&back, &bytes);
                let mut all = vec![9; rows as usize * width];
                store.read(&cpu, &stream, plane, 0..rows, &mut all).unwrap();
                let start = range.start as usize * width;
                for (i, &byte) in all.iter().enumerate() {
                    let inside = i >= start && i < start + length;
                    prop_assert_eq!(byte, if inside { bytes[i - start] } else { 0 });
                }
            }
        }
    }

    #[test]
    fn listed_rows_are_read_and_written_as_ranges_are() {
        let (cpu, stream) = cpu();
        let layout = RowLayout { weight_bytes: 3, state_bytes: 0 };
        let mut store = Resident::new(&cpu, 10, layout).unwrap();
        let all: Vec<u8> = (0..30).collect();
        store.write(&cpu, &stream, Plane::Weights, 0..10, &all).unwrap();
        store.write_listed(&cpu, &stream, &[0, 4, 9], Some(&[99; 9]), None).unwrap();
        let mut back = [0; 12];
        store.read_listed(&cpu, &stream, Plane::Weights, &[1, 4, 5, 9], &mut back).unwrap();
        assert_eq!(back, [3, 4, 5, 99, 99, 99, 15, 16, 17, 99, 99, 99]);
        for (rows, bytes) in [(&[4, 4][..], 6), (&[10], 3), (&[1, 2], 5)] {
            let bytes = vec![0; bytes];
            assert!(store.write_listed(&cpu, &stream, rows, Some(&bytes), None).is_err());
        }
        store.write_listed(&cpu, &stream, &[2, 3], None, Some(&[])).unwrap();
    }

    #[test]
    fn ranges_and_lengths_that_do_not_fit_are_errors_with_the_numbers() {
        let (cpu, stream) = cpu();
        let layout = RowLayout { weight_bytes: 4, state_bytes: 0 };
        let mut store = Resident::new(&cpu, 10, layout).unwrap();
        let error = store.read(&cpu, &stream, Plane::Weights, 8..11, &mut [0; 12]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "row store: cannot read weights of rows 8..11: the store has 10 rows"
        );
        let error = store.write(&cpu, &stream, Plane::State, 1..u64::MAX, &[]).unwrap_err();
        assert!(matches!(error, CacheError::RowsOutOfRange { end: u64::MAX, .. }), "{error}");
        let reversed = Range { start: 5, end: 2 };
        let error = store.write(&cpu, &stream, Plane::Weights, reversed, &[]).unwrap_err();
        assert!(matches!(error, CacheError::RowsOutOfRange { start: 5, end: 2, .. }), "{error}");
        let error = store.write(&cpu, &stream, Plane::Weights, 2..4, &[0; 7]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "row store: cannot write weights of rows 2..4 with 7 bytes: 8 are needed"
        );
        store.write(&cpu, &stream, Plane::State, 0..10, &[]).unwrap();
        let lease = store.prefetch(&cpu, &stream, &[3, 9]).unwrap();
        assert_eq!(lease.slots(&[3, 9]), [3, 9]);
        assert_eq!(DeviceBuffer::len(store.weights()), 40);
    }

    #[test]
    fn sizes_beyond_the_address_space_are_errors_with_the_numbers() {
        let (cpu, _) = cpu();
        for rows in [u64::MAX, 1 << 62, 1 << 61] {
            let layout = RowLayout { weight_bytes: 4, state_bytes: 4 };
            let error = Resident::new(&cpu, rows, layout).unwrap_err();
            assert!(matches!(error, CacheError::TooLarge { row_bytes: 4, .. }), "{error}");
            assert!(error.to_string().contains(&format!("{rows} rows of 4 bytes")), "{error}");
        }
    }

    /// Element offsets of a large table exceed 32 bits: 2^31 + some f32 of weights in one map
    /// whose pages nobody touches but the last.
    #[test]
    fn the_last_row_of_a_table_beyond_32_bits_is_its_own() {
        let (cpu, stream) = cpu();
        let layout = RowLayout { weight_bytes: 256, state_bytes: 4 };
        let rows = (1u64 << 25) + 7;
        let mut store = Resident::new(&cpu, rows, layout).unwrap();
        store.write(&cpu, &stream, Plane::Weights, rows - 1..rows, &[7; 256]).unwrap();
        let mut back = [0; 512];
        store.read(&cpu, &stream, Plane::Weights, rows - 2..rows, &mut back).unwrap();
        assert!(back[..256].iter().all(|&byte| byte == 0));
        assert!(back[256..].iter().all(|&byte| byte == 7));
        store.read(&cpu, &stream, Plane::Weights, 0..2, &mut back).unwrap();
        assert!(back.iter().all(|&byte| byte == 0));
    }
}
