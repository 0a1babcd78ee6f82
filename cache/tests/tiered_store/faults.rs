//! Calls that are refused, and a cold tier that fails.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tessera_cache::{
    CacheError, Plane, Policy, RowLayout, RowOps, Tiered, TieredOptions, slot_bytes,
};

use crate::support::{
    LAYOUT, MemoryCold, Sizes, World, chain, cpu, effort, first_rows, on_every_device,
};

on_every_device!(
    a_batch_larger_than_the_device_tier_says_what_size_is_needed,
    wrong_calls_are_refused_with_the_numbers,
    a_failed_read_of_the_cold_tier_fails_that_fetch_alone,
    a_row_that_the_cold_tier_denies_is_an_error,
    after_a_failed_write_everything_is_refused_with_the_first_cause,
    a_failed_flush_is_a_failed_write,
    nothing_is_held_after_many_batches,
    random_failures_leak_nothing,
);

const SIZES: Sizes = Sizes { rows: 50, device: 4, host: 4, cold: true, policy: Policy::Lru };

fn a_batch_larger_than_the_device_tier_says_what_size_is_needed<D: RowOps>(device: &D) {
    let mut world = World::new(device, SIZES);
    let error = world.prefetch(&[1, 2, 3, 4, 5]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "fetch: 5 rows, beside 0 that leases and fetches hold, do not fit a device tier of 4 \
         slots; give this table a device tier of at least 240 bytes (device_bytes), hold fewer \
         batches at a time, or work in passes of fewer rows"
    );
    assert_eq!(slot_bytes(LAYOUT, Policy::Lru), 48);
    let lease = world.prefetch(&[1, 2, 3]).unwrap();
    assert_eq!(world.store.slots_free(), 1);
    let error = world.prefetch(&[3, 4, 5]).unwrap_err();
    assert!(matches!(error, CacheError::WorkingSet { held: 3, bytes_needed: 240, .. }), "{error}");
    // In passes, as the error suggests.
    drop(lease);
    let free = world.store.slots_free() as usize;
    for rows in [1, 2, 3, 4, 5].chunks(free) {
        let lease = world.prefetch(rows).unwrap();
        world.update(&lease, rows);
    }
    world.check_at_rest();
}

fn wrong_calls_are_refused_with_the_numbers<D: RowOps>(device: &D) {
    let mut world = World::new(device, SIZES);
    let fetch = |world: &mut World<D>, rows: &[u64]| world.prefetch(rows).unwrap_err().to_string();
    assert_eq!(
        fetch(&mut world, &[1, 7, 7]),
        "fetch: row 7 follows row 7 at position 2; rows must ascend"
    );
    assert_eq!(
        fetch(&mut world, &[9, 3]),
        "fetch: row 3 follows row 9 at position 1; rows must ascend"
    );
    assert_eq!(fetch(&mut world, &[3, 50]), "fetch: row 50 of a store of 50 rows");
    assert_eq!(
        fetch(&mut world, &[u64::MAX]),
        format!("fetch: row {} of a store of 50 rows", u64::MAX)
    );
    let error = world.store.read(&world.device, &world.stream, Plane::State, 49..51, &mut [0; 8]);
    assert_eq!(
        error.unwrap_err().to_string(),
        "row store: cannot read state of rows 49..51: the store has 50 rows"
    );
    let error = world.store.write(&world.device, &world.stream, Plane::Weights, 2..4, &[0; 23]);
    assert_eq!(
        error.unwrap_err().to_string(),
        "row store: cannot write weights of rows 2..4 with 23 bytes: 24 are needed"
    );
    let lease = world.prefetch(&[3, 8]).unwrap();
    assert!(lease.slots_of(&[3, 5]).unwrap_err().to_string().contains("row 5 is not among"));
    assert!(lease.slots_of(&[8, 3]).is_err());
    assert!(lease.slots_of(&[9]).is_err());
    // Rows of another store.
    let mut other = World::new(device, SIZES);
    let error = other.store.commit(&lease).unwrap_err();
    assert_eq!(error.to_string(), "row store: cannot commit rows that another store holds");
    let fetched = world.store.fetcher().fetch(&[20]).unwrap();
    let error = other.store.install(&other.device, &other.stream, fetched).unwrap_err();
    assert_eq!(error.to_string(), "row store: cannot install rows that another store holds");
    drop(lease);
    world.check_at_rest();
}

#[test]
fn stores_that_cannot_be_are_refused_with_the_numbers() {
    let (cpu, _) = cpu(1);
    let options = TieredOptions { device_bytes: 47, host_bytes: 0, policy: Policy::Lru };
    let new = |options: &TieredOptions, rows, layout, cold: Option<Arc<MemoryCold>>| {
        let cold = cold.map(|cold| cold as Arc<dyn tessera_cache::ColdRows>);
        Tiered::new(&cpu, rows, layout, options, cold, first_rows(layout)).unwrap_err().to_string()
    };
    let message = new(&options, 5, LAYOUT, None);
    assert!(message.contains("47 bytes") && message.contains("at least 48"), "{message}");
    let cold = MemoryCold::new(RowLayout { weight_bytes: 16, state_bytes: 4 });
    let options = TieredOptions { device_bytes: 480, ..options };
    let message = new(&options, 5, LAYOUT, Some(cold));
    assert!(message.contains("16+4 bytes") && message.contains("12+4"), "{message}");
    let vast = TieredOptions { device_bytes: u64::MAX, ..options };
    let message = new(&vast, u64::MAX, LAYOUT, None);
    assert!(message.contains("bytes"), "{message}");
    let wide = RowLayout { weight_bytes: usize::MAX / 2, state_bytes: 0 };
    let message = new(&vast, 9, wide, None);
    assert!(message.contains("bytes"), "{message}");
    // No rows at all are no error.
    let first = first_rows(LAYOUT);
    assert!(Tiered::new(&cpu, 0, LAYOUT, &options, None, first).is_ok());
}

fn a_failed_read_of_the_cold_tier_fails_that_fetch_alone<D: RowOps>(device: &D) {
    let mut world = World::new(device, Sizes { host: 0, ..SIZES });
    for start in [0, 4] {
        let rows: Vec<u64> = (start..start + 4).collect();
        let lease = world.prefetch(&rows).unwrap();
        world.update(&lease, &rows);
    }
    let cold = world.cold.clone().unwrap();
    cold.fail_gets.store(true, Ordering::Relaxed);
    let error = world.prefetch(&[1, 5]).unwrap_err();
    let text = chain(&error);
    assert!(text.contains("cannot read from the cold tier (1 rows)"), "{text}");
    assert!(text.contains("injected get"), "{text}");
    assert_eq!(world.store.stats().rows_held, 0);
    cold.fail_gets.store(false, Ordering::Relaxed);
    world.check_at_rest();
}

fn a_row_that_the_cold_tier_denies_is_an_error<D: RowOps>(device: &D) {
    #[derive(Debug)]
    struct Denies(Arc<MemoryCold>);
    impl tessera_cache::ColdRows for Denies {
        fn layout(&self) -> RowLayout {
            self.0.layout()
        }
        fn get(
            &self,
            _: &[u64],
            _: tessera_cache::PlanesMut<'_>,
            found: &mut [bool],
        ) -> tessera_cache::Result<()> {
            found.fill(false);
            Ok(())
        }
        fn put(&self, rows: &[u64], from: tessera_cache::Planes<'_>) -> tessera_cache::Result<()> {
            self.0.put(rows, from)
        }
        fn remove(&self, rows: &[u64]) -> tessera_cache::Result<()> {
            self.0.remove(rows)
        }
        fn contains(&self, _: &[u64], found: &mut [bool]) {
            found.fill(true);
        }
        fn flush(&self) -> tessera_cache::Result<()> {
            self.0.flush()
        }
        fn len(&self) -> u64 {
            self.0.len()
        }
        fn stats(&self) -> tessera_cache::ColdStats {
            self.0.stats()
        }
    }
    let stream = device.stream().unwrap();
    let options = TieredOptions { device_bytes: 480, host_bytes: 0, policy: Policy::Lru };
    let cold = Arc::new(Denies(MemoryCold::new(LAYOUT)));
    let mut store =
        Tiered::new(device, 50, LAYOUT, &options, Some(cold), first_rows(LAYOUT)).unwrap();
    let error = tessera_cache::RowStore::prefetch(&mut store, device, &stream, &[3]).unwrap_err();
    assert!(matches!(error, CacheError::RowLost { row: 3 }), "{error}");
}

/// Makes a write-back necessary, by way of each tier that can need one.
fn overflow<D: RowOps>(world: &mut World<D>) -> tessera_cache::Result<()> {
    for start in (0..48).step_by(4) {
        let rows: Vec<u64> = (start..start + 4).collect();
        let lease = world.prefetch(&rows)?;
        world.update(&lease, &rows);
    }
    Ok(())
}

fn after_a_failed_write_everything_is_refused_with_the_first_cause<D: RowOps>(device: &D) {
    for host in [0, 4] {
        let mut world = World::new(device, Sizes { host, ..SIZES });
        let cold = world.cold.clone().unwrap();
        let outside = world.store.fetcher().fetch(&[49]).unwrap();
        cold.fail_puts.store(true, Ordering::Relaxed);
        // One slot is held by the fetch outside.
        let mut failed = None;
        for start in (0..48).step_by(3) {
            let rows: Vec<u64> = (start..start + 3).collect();
            match world.prefetch(&rows) {
                Ok(lease) => world.update(&lease, &rows),
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        let text = chain(&failed.expect("rows had to be written down"));
        assert!(text.contains("cannot write to the cold tier"), "{text}");
        cold.fail_puts.store(false, Ordering::Relaxed);
        let refusals = [
            world.prefetch(&[1]).unwrap_err(),
            world.store.install(&world.device, &world.stream, outside).unwrap_err(),
            world.store.flush(&world.device, &world.stream).unwrap_err(),
            world.write(Plane::Weights, 0..3).unwrap_err(),
            world
                .store
                .read(&world.device, &world.stream, Plane::Weights, 0..1, &mut [0; 12])
                .unwrap_err(),
        ];
        for error in refusals {
            assert!(matches!(error, CacheError::Poisoned { .. }), "{error}");
            let text = error.to_string();
            assert!(text.contains("could not write to the cold tier"), "{text}");
            assert!(text.contains("injected put"), "{text}");
        }
        assert_eq!(world.store.stats().rows_held, 0, "errors leak nothing");
    }
}

fn a_failed_flush_is_a_failed_write<D: RowOps>(device: &D) {
    let mut world = World::new(device, SIZES);
    overflow(&mut world).unwrap();
    let cold = world.cold.clone().unwrap();
    cold.fail_flushes.store(true, Ordering::Relaxed);
    let error = world.store.flush(&world.device, &world.stream).unwrap_err();
    assert!(chain(&error).contains("cannot flush the cold tier"), "{error}");
    let error = world.prefetch(&[1]).unwrap_err();
    assert!(error.to_string().contains("injected flush"), "{error}");
}

/// Ten thousand batches (fewer on a GPU), with fetches that fail, are dropped, or are taken over by others: every
/// row is let go of in the end.
fn nothing_is_held_after_many_batches<D: RowOps>(device: &D) {
    let sizes = Sizes { rows: 400, device: 60, host: 50, cold: true, policy: Policy::Lfu };
    let mut world = World::new(device, sizes);
    let cold = world.cold.clone().unwrap();
    let mut random = 1u64;
    let mut draw = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963);
        (random >> 33) % below
    };
    let (mut failed, mut dropped, mut full) = (0, 0, 0);
    let mut ahead = None;
    let batches = effort(device, 10_000, 1000);
    for batch in 0..batches {
        let mut rows: Vec<u64> = (0..draw(24)).map(|_| draw(400).min(draw(400))).collect();
        rows.sort_unstable();
        rows.dedup();
        cold.fail_gets.store(draw(10) == 0, Ordering::Relaxed);
        match world.store.fetcher().fetch(&rows) {
            Err(CacheError::WorkingSet { .. }) => full += 1,
            Err(_) => failed += 1,
            Ok(_) if draw(20) == 0 => dropped += 1,
            Ok(fetched) => {
                // The batch fetched before this one is installed after it.
                if let Some((fetched, rows)) = ahead.replace((fetched, rows)) {
                    cold.fail_gets.store(false, Ordering::Relaxed);
                    let lease = world.store.install(&world.device, &world.stream, fetched).unwrap();
                    if batch % 100 == 0 {
                        world.check(&lease, &rows);
                    }
                    world.update(&lease, &rows);
                }
            }
        }
    }
    assert!(
        failed > batches / 100 && dropped > batches / 100,
        "{failed} failed, {dropped} dropped, {full} full"
    );
    drop(ahead);
    cold.fail_gets.store(false, Ordering::Relaxed);
    world.check_at_rest();
    world.flush();
}

/// Whatever fails, nothing is held afterwards, and a store that is not poisoned is right.
fn random_failures_leak_nothing<D: RowOps>(device: &D) {
    let steps = prop::collection::vec((0u64..46, 1u64..4, 0u8..24), 1..60);
    let config = ProptestConfig::with_cases(effort(device, 256, 40));
    TestRunner::new(config)
        .run(&(steps, 0u64..6), |(steps, host)| {
            let mut world = World::new(device, Sizes { host, ..SIZES });
            let cold = world.cold.clone().unwrap();
            let mut poisoned = false;
            for (start, count, fault) in steps {
                cold.fail_gets.store(fault % 4 == 1, Ordering::Relaxed);
                cold.fail_puts.store(fault == 2, Ordering::Relaxed);
                let rows: Vec<u64> = (start..start + count).collect();
                match world.prefetch(&rows) {
                    Ok(lease) => {
                        prop_assert!(!poisoned);
                        world.check(&lease, &rows);
                        world.update(&lease, &rows);
                    }
                    Err(CacheError::Tier { operation: "read from the cold tier", .. }) => {}
                    Err(CacheError::Tier { operation: "write to the cold tier", .. }) => {
                        prop_assert!(!poisoned);
                        poisoned = true;
                    }
                    Err(error) => prop_assert!(poisoned, "{error}"),
                }
                prop_assert_eq!(world.store.stats().rows_held, 0);
            }
            if !poisoned {
                cold.fail_gets.store(false, Ordering::Relaxed);
                cold.fail_puts.store(false, Ordering::Relaxed);
                world.check_at_rest();
            }
            Ok(())
        })
        .unwrap();
}
