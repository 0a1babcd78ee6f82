//! Streams of ids that are hard on caches: results stay right, memory within bounds, and each
//! policy does what its name says.

use std::sync::atomic::Ordering;

use tessera_cache::{Policy, RowOps};

use crate::support::{Sizes, World, effort, on_every_device};

on_every_device!(
    a_cyclic_scan_one_larger_than_a_tier,
    all_hot,
    all_cold,
    alternating,
    evaluation_writes_nothing,
    policies_keep_what_they_say,
);

const POLICIES: [Policy; 3] = [Policy::Lru, Policy::Lfu, Policy::NextUse];

/// Trains on each batch of a stream: look, update, let go.
fn train<D: RowOps>(world: &mut World<D>, stream: impl Iterator<Item = Vec<u64>>) {
    for rows in stream {
        let lease = world.prefetch(&rows).unwrap();
        world.check(&lease, &rows);
        world.update(&lease, &rows);
    }
}

fn each_policy<D: RowOps>(device: &D, sizes: Sizes, stream: impl Fn(u64) -> Vec<u64>) {
    for policy in POLICIES {
        let mut world = World::new(device, Sizes { policy, ..sizes });
        train(&mut world, (0..effort(device, 300, 60)).map(&stream));
        world.check_at_rest();
        world.flush();
    }
}

const SIZES: Sizes = Sizes { rows: 120, device: 20, host: 20, cold: true, policy: Policy::Lru };

fn a_cyclic_scan_one_larger_than_a_tier<D: RowOps>(device: &D) {
    each_policy(device, SIZES, |step| vec![step % 21]);
    each_policy(device, SIZES, |step| vec![step % 41]);
    each_policy(device, Sizes { cold: false, ..SIZES }, |step| vec![step % 21]);
}

fn all_hot<D: RowOps>(device: &D) {
    each_policy(device, SIZES, |_| (0..20).collect());
}

fn all_cold<D: RowOps>(device: &D) {
    each_policy(device, SIZES, |step| (0..20).map(|i| (step * 20 + i) % 120).collect::<Vec<_>>());
    each_policy(device, Sizes { host: 0, ..SIZES }, |step| {
        let start = (step * 20) % 120;
        (start..start + 20).collect()
    });
}

fn alternating<D: RowOps>(device: &D) {
    each_policy(
        device,
        SIZES,
        |step| if step % 2 == 0 { (0..20).collect() } else { (60..80).collect() },
    );
    each_policy(device, Sizes { host: 3, ..SIZES }, |step| {
        if step % 2 == 0 { (0..20).collect() } else { (10..30).collect() }
    });
}

/// Only what was committed is written down; reading alone writes nothing.
fn evaluation_writes_nothing<D: RowOps>(device: &D) {
    for host in [0, 7, 20] {
        let mut world = World::new(device, Sizes { host, ..SIZES });
        for step in 0..60 {
            let rows: Vec<u64> = (0..20).map(|i| (step * 20 + i) % 120).collect();
            let mut rows = rows;
            rows.sort_unstable();
            let lease = world.prefetch(&rows).unwrap();
            world.check(&lease, &rows);
        }
        world.flush();
        let cold = world.cold.clone().unwrap();
        assert_eq!(cold.puts.load(Ordering::Relaxed), 0);
        let stats = world.store.stats();
        assert_eq!((stats.device.write_backs, stats.host.write_backs), (0, 0));
        assert_eq!(stats.first_rows, stats.device.misses, "first values are made again");
        // Once written, clean rows are kept in the host tier but not written again.
        let rows: Vec<u64> = (0..20).collect();
        let lease = world.prefetch(&rows).unwrap();
        world.update(&lease, &rows);
        drop(lease);
        world.flush();
        assert_eq!(cold.puts.load(Ordering::Relaxed), 20);
        for start in [20, 40, 0, 20, 0] {
            let rows: Vec<u64> = (start..start + 20).collect();
            let lease = world.prefetch(&rows).unwrap();
            world.check(&lease, &rows);
        }
        assert_eq!(cold.puts.load(Ordering::Relaxed), 20);
        let reads = cold.gets.load(Ordering::Relaxed);
        assert_eq!(reads == 0, host == 20, "{reads} reads with {host} host slots");
        world.check_at_rest();
    }
}

/// Rows that were used recently, often, or soon, are those that are hit.
fn policies_keep_what_they_say<D: RowOps>(device: &D) {
    let hits = |policy: Policy, stream: &[u64], hints: bool| {
        let mut world =
            World::new(device, Sizes { rows: 120, device: 4, host: 4, cold: true, policy });
        for (step, &row) in stream.iter().enumerate() {
            let lease = world.prefetch(&[row]).unwrap();
            world.check(&lease, &[row]);
            drop(lease);
            let next = stream[step + 1..].iter().position(|&other| other == row);
            if let Some(next) = next.filter(|_| hints) {
                world.store.hint_next_use(&[row], next as u32 + 1);
            }
        }
        world.store.stats().device.hits
    };
    // Rows 0 and 1 every few steps among rows that never come back: counts keep them, the order
    // of last uses does not.
    let often: Vec<u64> = (0..600)
        .map(|i| {
            if i < 20 {
                i % 2
            } else if i % 6 == 0 {
                i / 6 % 2
            } else {
                2 + i % 113
            }
        })
        .collect();
    let (lru, lfu) = (hits(Policy::Lru, &often, false), hits(Policy::Lfu, &often, false));
    assert!(lfu >= lru + 50, "lfu {lfu}, lru {lru}");
    // A cyclic scan one larger than the tier: lru never hits, foresight hits most of the time.
    let scan: Vec<u64> = (0..500).map(|i| i % 5).collect();
    assert_eq!(hits(Policy::Lru, &scan, false), 0);
    assert_eq!(hits(Policy::NextUse, &scan, false), 0, "no hints: as lru");
    let foreseen = hits(Policy::NextUse, &scan, true);
    assert!(foreseen >= 350, "{foreseen}: the optimum is 3 of 4");
    // A window that moves: what was used last is used again.
    let window: Vec<u64> = (0..600).map(|i| i / 12 + i % 3).collect();
    let (lru, lfu) = (hits(Policy::Lru, &window, false), hits(Policy::Lfu, &window, false));
    assert!(lru >= 540 && lru >= lfu, "lru {lru}, lfu {lfu}");
}
