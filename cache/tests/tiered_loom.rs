//! Fetches beside installs, updates and writes, in every order in which threads can take the
//! store's locks (up to three preemptions a run). Built with `--cfg loom` only:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test -p tessera-cache --test tiered_loom
//! ```
#![cfg(loom)]

#[allow(dead_code, unused_imports, unused_macros, reason = "shared with tests that use the rest")]
#[path = "tiered_store/support.rs"]
mod support;

use support::{Sizes, World, cpu};
use tessera_cache::{Fetched, Plane, Policy};
use tessera_device::Cpu;

const SIZES: Sizes = Sizes { rows: 4, device: 2, host: 1, cold: true, policy: Policy::Lru };

/// Explores `run` on a store in which rows 2 and 3 were updated last, row 1 before them and row 0
/// before that: with two device slots and one host slot, row 1 is in the host tier and row 0 in
/// the cold tier.
fn explore(sizes: Sizes, run: impl Fn(&mut World<Cpu>) + Send + Sync + 'static) {
    let (cpu, _) = cpu(1);
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(move || {
        let mut world = World::new(&cpu, sizes);
        for row in 0..4 {
            let lease = world.prefetch(&[row]).unwrap();
            world.update(&lease, &[row]);
        }
        run(&mut world);
        world.check_at_rest();
    });
}

/// Fetches rows on a thread of its own.
fn fetch(world: &World<Cpu>, rows: &'static [u64]) -> loom::thread::JoinHandle<Option<Fetched>> {
    let fetcher = world.store.fetcher();
    // With two slots, three different rows may be wanted at a time: then there is nothing.
    loom::thread::spawn(move || fetcher.fetch(rows).ok())
}

/// Installs what was fetched meanwhile and looks at it.
fn install(world: &mut World<Cpu>, fetched: Option<Fetched>, rows: &[u64]) {
    let Some(fetched) = fetched else { return };
    let lease = world.store.install(&world.device, &world.stream, fetched).unwrap();
    world.check(&lease, rows);
    world.update(&lease, rows);
}

#[test]
fn a_row_is_wanted_while_it_is_about_to_be_evicted() {
    for sizes in [SIZES, Sizes { host: 0, ..SIZES }, Sizes { cold: false, ..SIZES }] {
        explore(sizes, |world| {
            let other = fetch(world, &[2]);
            let lease = world.prefetch(&[0]).unwrap();
            world.check(&lease, &[0]);
            world.update(&lease, &[0]);
            drop(lease);
            let fetched = other.join().unwrap();
            install(world, fetched, &[2]);
        });
    }
}

#[test]
fn a_row_is_fetched_while_another_installs_and_updates_it() {
    for row in [&[0], &[1]] {
        explore(SIZES, move |world| {
            let other = fetch(world, row);
            let lease = world.prefetch(row).unwrap();
            world.update(&lease, row);
            drop(lease);
            // Would evict it if nobody wanted it.
            for row in [2, 3] {
                if let Ok(lease) = world.prefetch(&[row]) {
                    world.update(&lease, &[row]);
                }
            }
            let fetched = other.join().unwrap();
            install(world, fetched, row);
        });
    }
}

#[test]
fn a_row_is_fetched_while_it_is_written_below() {
    for row in [&[0u64], &[1]] {
        explore(SIZES, move |world| {
            let other = fetch(world, row);
            world.write(Plane::Weights, row[0]..row[0] + 1).unwrap();
            let fetched = other.join().unwrap();
            install(world, fetched, row);
        });
    }
}

#[test]
fn a_host_row_is_fetched_while_the_host_tier_is_emptied() {
    explore(SIZES, |world| {
        let other = fetch(world, &[1]);
        world.flush();
        let lease = world.prefetch(&[0]).unwrap();
        world.update(&lease, &[0]);
        drop(lease);
        let fetched = other.join().unwrap();
        install(world, fetched, &[1]);
    });
}

#[test]
fn two_fetchers_want_and_let_go() {
    explore(SIZES, |world| {
        let (one, two) = (fetch(world, &[1]), fetch(world, &[0, 1]));
        drop(one.join().unwrap());
        let fetched = two.join().unwrap();
        install(world, fetched, &[0, 1]);
    });
}
