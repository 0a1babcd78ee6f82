//! Fetchers on three threads beside one that installs, updates, writes and evicts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use tessera_cache::{CacheError, Fetched, Plane, Policy, RowOps};

use crate::support::{Sizes, World, effort, on_every_device};

on_every_device!(
    fetchers_race_with_installs_over_a_small_host_tier,
    fetchers_race_with_installs_without_a_host_tier,
    fetchers_race_with_installs_without_a_cold_tier,
);

const ROWS: u64 = 300;
const FETCHERS: u64 = 3;

/// Fetches small batches of skewed rows until told to stop, and hands each over or drops it.
fn fetch_all(
    fetcher: &tessera_cache::Fetcher,
    seed: u64,
    stop: &AtomicBool,
    hand: impl Fn((Fetched, Vec<u64>)),
) -> u64 {
    let mut random = seed;
    let mut draw = move |below: u64| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(2 * seed + 1);
        (random >> 33) % below
    };
    let mut refused = 0;
    while !stop.load(Ordering::Relaxed) {
        let mut rows: Vec<u64> = (0..1 + draw(12)).map(|_| draw(ROWS).min(draw(ROWS))).collect();
        rows.sort_unstable();
        rows.dedup();
        match fetcher.fetch(&rows) {
            Ok(fetched) if draw(8) == 0 => drop(fetched),
            Ok(fetched) => hand((fetched, rows)),
            Err(CacheError::WorkingSet { .. }) => {
                refused += 1;
                std::thread::yield_now();
            }
            Err(error) => panic!("{error}"),
        }
    }
    refused
}

/// Installs what comes, in another order than it came, and holds two leases at a time.
fn own<D: RowOps>(
    world: &mut World<D>,
    incoming: &Receiver<(Fetched, Vec<u64>)>,
    until: Instant,
) -> u64 {
    let mut waiting = Vec::new();
    let mut leases = Vec::new();
    let mut installed = 0u64;
    while Instant::now() < until {
        waiting.extend(incoming.recv_timeout(Duration::from_millis(20)).ok());
        waiting.extend(incoming.try_recv().ok());
        let Some((fetched, rows)) = waiting.pop() else { continue };
        if waiting.len() > 2 {
            drop(waiting.remove(0));
        }
        let lease = world.store.install(&world.device, &world.stream, fetched).unwrap();
        world.check(&lease, &rows);
        installed += 1;
        if !installed.is_multiple_of(3) {
            world.update(&lease, &rows);
        }
        if installed.is_multiple_of(17) {
            let start = installed * 7 % (ROWS - 20);
            let plane = if installed.is_multiple_of(2) { Plane::Weights } else { Plane::State };
            world.write(plane, start..start + 20).unwrap();
            world.read(plane, start..start + 20);
        }
        if installed.is_multiple_of(101) {
            world.flush();
        }
        leases.push((lease, rows));
        if leases.len() > 2 {
            let (lease, rows) = leases.remove(0);
            world.check(&lease, &rows);
        }
    }
    installed
}

/// Stops the fetchers however the owner ends.
struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn stress<D: RowOps>(device: &D, sizes: Sizes) {
    let mut world = World::new(device, sizes);
    let stop = AtomicBool::new(false);
    let (send, incoming) = sync_channel(2);
    let installed = std::thread::scope(|scope| {
        for seed in 1..=FETCHERS {
            let (fetcher, send, stop) = (world.store.fetcher(), send.clone(), &stop);
            scope.spawn(move || {
                // The owner may have gone: then what was fetched is dropped.
                fetch_all(&fetcher, seed, stop, |fetched| drop(send.send(fetched)))
            });
        }
        let _stop = Stop(&stop);
        let incoming = incoming; // so that fetchers who wait for us to take more stop too
        own(&mut world, &incoming, Instant::now() + Duration::from_millis(700))
    });
    assert!(installed > effort(device, 50, 5), "{installed} batches");
    world.check_at_rest();
    world.flush();
}

fn fetchers_race_with_installs_over_a_small_host_tier<D: RowOps>(device: &D) {
    stress(device, Sizes { rows: ROWS, device: 80, host: 30, cold: true, policy: Policy::Lru });
}

fn fetchers_race_with_installs_without_a_host_tier<D: RowOps>(device: &D) {
    stress(device, Sizes { rows: ROWS, device: 90, host: 0, cold: true, policy: Policy::Lfu });
}

fn fetchers_race_with_installs_without_a_cold_tier<D: RowOps>(device: &D) {
    stress(device, Sizes { rows: ROWS, device: 80, host: 0, cold: false, policy: Policy::NextUse });
}
