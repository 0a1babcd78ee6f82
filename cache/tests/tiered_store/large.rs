//! Batches so large that several threads move them.

use std::sync::Arc;

use tessera_cache::{Lease, Plane, Policy, RowLayout, RowStore, Tiered, TieredOptions, slot_bytes};

use crate::support::{MemoryCold, bytes_of, cpu, first_rows};

/// A store of large rows beside what they are: how often each was written.
struct Large {
    store: Tiered<tessera_device::Cpu>,
    written: Vec<u64>,
}

const WIDE: RowLayout = RowLayout { weight_bytes: 500, state_bytes: 4 };

impl Large {
    /// Reads rows, checks them, and writes them if asked to.
    fn visit(&mut self, cpu: &tessera_device::Cpu, rows: &[u64], write: bool) {
        let stream = tessera_device::Device::stream(cpu).unwrap();
        let lease: Lease = self.store.prefetch(cpu, &stream, rows).unwrap();
        let (weights, state) = self.store.planes_mut();
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
            self.store.commit(&lease).unwrap();
        }
    }
}

/// 4,500 rows of 504 bytes a batch: 2.3 MB, which several threads copy between tiers, whose indexes
/// two threads change. The host tier has several chunks of slots.
#[test]
fn large_batches_are_moved_by_several_threads() {
    const ROWS: u64 = 45_000;
    let (cpu, _) = cpu(3);
    for cold in [false, true] {
        let slot = slot_bytes(WIDE, Policy::Lru);
        let options = TieredOptions {
            device_bytes: 5000 * slot,
            host_bytes: 36_000 * slot,
            policy: Policy::Lru,
        };
        let cold = cold.then(|| MemoryCold::new(WIDE) as Arc<dyn tessera_cache::ColdRows>);
        let first = first_rows(WIDE);
        let store = Tiered::new(&cpu, ROWS, WIDE, &options, cold, first).unwrap();
        let mut large = Large { store, written: vec![0; ROWS as usize] };
        for round in 0..25u64 {
            let rows: Vec<u64> = (0..4500).map(|i| i * 10 + round % 10).collect();
            large.visit(&cpu, &rows, round % 3 != 2);
        }
        // Half of what is in the device tier, half of what is not.
        let rows: Vec<u64> = (0..4500).map(|i| i * 10 + 4 - i % 2).collect();
        large.visit(&cpu, &rows, true);
        assert!(RowStore::stats(&large.store).host.hits > 4500);
    }
}
