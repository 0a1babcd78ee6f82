//! Random calls on stores of any sizes, against a model that keeps every row in a map.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering::Relaxed;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use tessera_cache::{
    CacheError, Fetched, Lease, Plane, Policy, Resident, RowLayout, RowOps, RowStore,
};
use tessera_device::Device;

use crate::support::{LAYOUT, Sizes, World, bytes_of, effort, on_every_device};

on_every_device!(
    every_row_reads_as_in_a_map,
    what_was_flushed_is_found_by_the_next_store,
    rows_are_fetched_again_if_one_of_them_was_written,
    a_resident_store_is_a_row_store,
    rows_written_whole_go_below_once_and_nothing_is_read,
    rows_without_state_need_no_state,
);

const ROWS: u64 = 40;

#[derive(Clone, Debug)]
enum Call {
    Fetch(BTreeSet<u64>),
    Install(usize),
    Look(usize),
    Update(usize),
    DropLease(usize),
    DropFetched(usize),
    Read(Plane, u64, u64),
    Write(Plane, u64, u64),
    WriteRows(u64, u64),
    ReadListed(Plane, BTreeSet<u64>),
    WriteListed(Option<Plane>, BTreeSet<u64>),
    Hint(BTreeSet<u64>, u32),
    Flush,
}

fn plane() -> impl Strategy<Value = Plane> {
    prop_oneof![Just(Plane::Weights), Just(Plane::State)]
}

fn call() -> impl Strategy<Value = Call> {
    let some = || prop::collection::btree_set(0..ROWS, 0..8);
    prop_oneof![
        8 => some().prop_map(Call::Fetch),
        8 => any::<usize>().prop_map(Call::Install),
        2 => any::<usize>().prop_map(Call::Look),
        6 => any::<usize>().prop_map(Call::Update),
        6 => any::<usize>().prop_map(Call::DropLease),
        1 => any::<usize>().prop_map(Call::DropFetched),
        1 => (plane(), 0..=ROWS, 0..=ROWS).prop_map(|(p, a, b)| Call::Read(p, a.min(b), a.max(b))),
        2 => (plane(), 0..=ROWS, 0..=ROWS).prop_map(|(p, a, b)| Call::Write(p, a.min(b), a.max(b))),
        2 => (0..=ROWS, 0..=ROWS).prop_map(|(a, b)| Call::WriteRows(a.min(b), a.max(b))),
        1 => (plane(), some()).prop_map(|(p, rows)| Call::ReadListed(p, rows)),
        2 => (prop::option::of(plane()), some()).prop_map(|(p, rows)| Call::WriteListed(p, rows)),
        1 => (some(), 0u32..6).prop_map(|(rows, ahead)| Call::Hint(rows, ahead)),
        1 => Just(Call::Flush),
    ]
}

pub fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![Just(Policy::Lru), Just(Policy::Lfu), Just(Policy::NextUse)]
}

fn sizes() -> impl Strategy<Value = Sizes> {
    (1u64..=ROWS, 0..=ROWS, any::<bool>(), policy())
        .prop_map(|(device, host, cold, policy)| Sizes { rows: ROWS, device, host, cold, policy })
}

/// What is fetched and leased, with its rows.
#[derive(Default)]
struct Held {
    fetched: Vec<(Fetched, Vec<u64>)>,
    leases: Vec<(Lease, Vec<u64>)>,
}

impl Held {
    fn rows(&self) -> BTreeSet<u64> {
        let fetched = self.fetched.iter().flat_map(|(_, rows)| rows);
        fetched.chain(self.leases.iter().flat_map(|(_, rows)| rows)).copied().collect()
    }
}

fn run<D: RowOps>(world: &mut World<D>, held: &mut Held, call: Call) {
    match call {
        Call::Fetch(rows) => {
            let rows: Vec<u64> = rows.into_iter().collect();
            let mut all = held.rows();
            let before = all.len() as u64;
            all.extend(&rows);
            match world.store.fetcher().fetch(&rows) {
                Ok(fetched) => {
                    assert!(all.len() as u64 <= world.store.capacity());
                    assert_eq!(fetched.len(), rows.len());
                    held.fetched.push((fetched, rows));
                }
                Err(CacheError::WorkingSet { held, slots, rows: asked, .. }) => {
                    assert!(all.len() as u64 > slots);
                    assert_eq!((held, asked), (before, rows.len() as u64));
                }
                Err(error) => panic!("{error}"),
            }
            assert_eq!(world.store.stats().rows_held, held.rows().len() as u64);
        }
        Call::Install(i) if !held.fetched.is_empty() => {
            let (fetched, rows) = held.fetched.remove(i % held.fetched.len());
            let lease = world.store.install(&world.device, &world.stream, fetched).unwrap();
            world.check(&lease, &rows);
            held.leases.push((lease, rows));
        }
        Call::Look(i) if !held.leases.is_empty() => {
            let (lease, rows) = &held.leases[i % held.leases.len()];
            world.check(lease, rows);
            let some: Vec<u64> = rows.iter().copied().step_by(1 + i % 3).collect();
            let slots: Vec<u64> = lease.slots(rows).iter().copied().step_by(1 + i % 3).collect();
            assert_eq!(*lease.slots_of(&some).unwrap(), slots);
        }
        Call::Update(i) if !held.leases.is_empty() => {
            let (lease, rows) = &held.leases[i % held.leases.len()];
            world.update(lease, rows);
        }
        Call::DropLease(i) if !held.leases.is_empty() => {
            drop(held.leases.remove(i % held.leases.len()));
        }
        Call::DropFetched(i) if !held.fetched.is_empty() => {
            drop(held.fetched.remove(i % held.fetched.len()));
        }
        Call::Read(plane, start, end) => world.read(plane, start..end),
        Call::Write(plane, start, end) => world.write(plane, start..end).unwrap(),
        Call::WriteRows(start, end) => world.write_rows(start..end).unwrap(),
        Call::ReadListed(plane, rows) => {
            world.read_listed(plane, &rows.into_iter().collect::<Vec<_>>());
        }
        Call::WriteListed(plane, rows) => {
            world.write_listed(plane, &rows.into_iter().collect::<Vec<_>>()).unwrap();
        }
        Call::Hint(rows, ahead) => {
            world.store.hint_next_use(&rows.into_iter().collect::<Vec<_>>(), ahead);
        }
        Call::Flush => world.flush(),
        _ => {}
    }
}

fn runner<D: Device>(device: &D) -> TestRunner {
    TestRunner::new(ProptestConfig::with_cases(effort(device, 400, 40)))
}

fn every_row_reads_as_in_a_map<D: RowOps>(device: &D) {
    let cases = (sizes(), prop::collection::vec(call(), 0..150));
    runner(device)
        .run(&cases, |(sizes, calls)| {
            let mut world = World::new(device, sizes);
            let mut held = Held::default();
            for call in calls {
                run(&mut world, &mut held, call);
                for (lease, rows) in &held.leases {
                    world.check(lease, rows);
                }
            }
            held = Held::default();
            prop_assert!(held.rows().is_empty());
            world.check_at_rest();
            world.flush();
            world.check_at_rest();
            if let Some(cold) = world.cold.clone() {
                // Nothing is dirty any more.
                let puts = cold.puts.load(Relaxed);
                world.flush();
                prop_assert_eq!(cold.puts.load(Relaxed), puts);
            }
            Ok(())
        })
        .unwrap();
}

/// The same calls on a store that is opened anew over what was flushed.
fn what_was_flushed_is_found_by_the_next_store<D: RowOps>(device: &D) {
    let calls = || prop::collection::vec(call(), 0..60);
    runner(device)
        .run(&(sizes(), calls(), calls()), |(sizes, calls, more)| {
            let mut world = World::new(device, Sizes { cold: true, ..sizes });
            let mut held = Held::default();
            calls.into_iter().for_each(|call| run(&mut world, &mut held, call));
            drop(held);
            world.flush();
            world.store = crate::support::tiered(device, world.sizes, world.cold.clone());
            let mut held = Held::default();
            more.into_iter().for_each(|call| run(&mut world, &mut held, call));
            drop(held);
            world.check_at_rest();
            Ok(())
        })
        .unwrap();
}

/// A write between fetch and install makes those fetches copy again that it concerns, and no others.
fn rows_are_fetched_again_if_one_of_them_was_written<D: RowOps>(device: &D) {
    let sizes = Sizes { rows: 20, device: 4, host: 4, cold: true, policy: Policy::Lru };
    let mut world = World::new(device, sizes);
    for (fetched, written, again) in [([1, 2], 10..12, 0), ([5, 6], 6..8, 2), ([3, 4], 5..7, 2)] {
        let ahead = world.store.fetcher().fetch(&fetched).unwrap();
        world.write(Plane::Weights, written).unwrap();
        let lease = world.store.install(&world.device, &world.stream, ahead).unwrap();
        world.check(&lease, &fetched);
        assert_eq!(world.store.stats().rows_fetched_again, again);
    }
}

/// The store that keeps every row passes for the same interface, with slots that are the rows.
fn a_resident_store_is_a_row_store<D: RowOps>(device: &D) {
    let stream = device.stream().unwrap();
    let mut store: Box<dyn RowStore<D>> = Box::new(Resident::new(device, 10, LAYOUT).unwrap());
    let rows = [1, 4, 9];
    let lease = store.prefetch(device, &stream, &rows).unwrap();
    assert!(std::ptr::eq(lease.slots(&rows), &rows[..]), "no copy");
    assert_eq!(*lease.slots_of(&[4, 9]).unwrap(), [4, 9]);
    device.upload(&stream, &[7; 12], store.planes_mut().0, 4 * 12).unwrap();
    store.commit(&lease).unwrap();
    let mut bytes = [0; 12];
    store.read(device, &stream, Plane::Weights, 4..5, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 12]);
    store.write(device, &stream, Plane::State, 4..5, &[1; 4]).unwrap();
    store.flush(device, &stream).unwrap();
    store.hint_next_use(&rows, 1);
    assert_eq!((store.rows(), store.capacity(), store.slots_free()), (10, 10, 10));
    assert_eq!((store.bytes(), store.host_bytes(), store.stats().device.rows), (160, 0, 10));
    assert_eq!(store.layout(), LAYOUT);
    let error = store.fetcher().fetch(&[3, 10]).unwrap_err();
    assert_eq!(error.to_string(), "fetch: row 10 of a store of 10 rows");
    // A lease of more rows than another store has.
    let mut smaller = Resident::new(device, 5, LAYOUT).unwrap();
    assert!(matches!(smaller.commit(&lease), Err(CacheError::Foreign { operation: "commit" })));
}

/// Whoever loads a checkpoint writes both planes of every row.
fn rows_written_whole_go_below_once_and_nothing_is_read<D: RowOps>(device: &D) {
    let mut world =
        World::new(device, Sizes { rows: 40, device: 4, host: 3, cold: true, policy: Policy::Lru });
    world.write_rows(0..40).unwrap();
    let cold = world.cold.clone().unwrap();
    assert_eq!(cold.puts.load(Relaxed), 37, "three are in the host tier");
    world.flush();
    assert_eq!(cold.puts.load(Relaxed), 40);
    assert_eq!(cold.gets.load(Relaxed), 0);
    world.check_at_rest();
}

fn rows_without_state_need_no_state<D: RowOps>(device: &D) {
    let layout = RowLayout { weight_bytes: 8, state_bytes: 0 };
    let stream = device.stream().unwrap();
    let cold = crate::support::MemoryCold::new(layout);
    let options = tessera_cache::TieredOptions {
        device_bytes: 2 * tessera_cache::slot_bytes(layout, Policy::Lru),
        host_bytes: 2 * tessera_cache::slot_bytes(layout, Policy::Lru),
        policy: Policy::Lru,
    };
    let first = crate::support::first_rows(layout);
    let mut store =
        tessera_cache::Tiered::new(device, 9, layout, &options, Some(cold), first).unwrap();
    for row in 0..9 {
        let lease = store.prefetch(device, &stream, &[row]).unwrap();
        let slot = lease.slots(&[row])[0] as usize;
        device.upload(&stream, &[row as u8; 8], store.planes_mut().0, slot * 8).unwrap();
        store.commit(&lease).unwrap();
    }
    store.write(device, &stream, Plane::State, 0..9, &[]).unwrap();
    store.write(device, &stream, Plane::Weights, 0..1, &[99; 8]).unwrap();
    let mut bytes = [0; 72];
    store.read(device, &stream, Plane::Weights, 0..9, &mut bytes).unwrap();
    for (row, bytes) in bytes.chunks(8).enumerate() {
        assert_eq!(bytes, [if row == 0 { 99 } else { row as u8 }; 8]);
    }
    assert_eq!(bytes_of(layout, Plane::State, 1, 1), []);
}
