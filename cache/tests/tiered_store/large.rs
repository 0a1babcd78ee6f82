//! Batches so large that several threads move them.

use std::sync::Arc;

use tessera_cache::{
    Lease, Plane, Policy, RowLayout, RowOps, RowStore, Tiered, TieredOptions, slot_bytes,
};
use tessera_device::cuda::testing;

use crate::support::{MemoryCold, bytes_of, cpu, download, first_rows};

/// A store of large rows beside what they are: how often each was written.
struct Large<D: RowOps> {
    store: Tiered<D>,
    written: Vec<u64>,
}

const WIDE: RowLayout = RowLayout { weight_bytes: 500, state_bytes: 4 };

impl<D: RowOps> Large<D> {
    /// Reads rows, checks them, and writes them if asked to.
    fn visit(&mut self, device: &D, rows: &[u64], write: bool) {
        let stream = device.stream().unwrap();
        let lease: Lease = self.store.prefetch(device, &stream, rows).unwrap();
        let (weights_plane, state_plane) = self.store.planes_mut();
        let mut weights = download(device, &stream, weights_plane);
        let mut state = download(device, &stream, state_plane);
        for (&row, &slot) in rows.iter().zip(lease.slots(rows)) {
            let weights = &mut weights[slot as usize * 500..][..500];
            let state = &mut state[slot as usize * 4..][..4];
            let written = &mut self.written[row as usize];
            assert!(weights == bytes_of(WIDE, Plane::Weights, row, *written), "row {row}");
            assert!(state == bytes_of(WIDE, Plane::State, row, *written), "row {row}");
            if write {
                *written += 1;
                weights.copy_from_slice(&bytes_of(WIDE, Plane::Weights, row, *written));
                state.copy_from_slice(&bytes_of(WIDE, Plane::State, row, *written));
            }
        }
        if write {
            device.upload(&stream, &weights, weights_plane, 0).unwrap();
            device.upload(&stream, &state, state_plane, 0).unwrap();
            self.store.commit(&lease).unwrap();
        }
    }
}

/// 4,500 rows of 504 bytes a batch: 2.3 MB, which several threads copy between tiers, whose indexes
/// two threads change. The host tier has several chunks of slots.
#[test]
fn large_batches_are_moved_by_several_threads() {
    move_large_batches(&cpu(3).0, 25);
}

#[test]
fn cuda_moves_large_batches() {
    if let Some(cuda) = testing::cuda() {
        move_large_batches(&cuda, 12);
    }
}

fn move_large_batches<D: RowOps>(device: &D, rounds: u64) {
    const ROWS: u64 = 45_000;
    for cold in [false, true] {
        let slot = slot_bytes(WIDE, Policy::Lru);
        let options = TieredOptions {
            device_bytes: 5000 * slot,
            host_bytes: 36_000 * slot,
            policy: Policy::Lru,
        };
        let cold = cold.then(|| MemoryCold::new(WIDE) as Arc<dyn tessera_cache::ColdRows>);
        let first = first_rows(WIDE);
        let store = Tiered::new(device, ROWS, WIDE, &options, cold, first).unwrap();
        let mut large = Large { store, written: vec![0; ROWS as usize] };
        for round in 0..rounds {
            let rows: Vec<u64> = (0..4500).map(|i| i * 10 + round % 10).collect();
            large.visit(device, &rows, round % 3 != 2);
        }
        // Half of what is in the device tier, half of what is not.
        let rows: Vec<u64> = (0..4500).map(|i| i * 10 + 4 - i % 2).collect();
        large.visit(device, &rows, true);
        assert!(RowStore::stats(&large.store).host.hits > 4500);
    }
}
