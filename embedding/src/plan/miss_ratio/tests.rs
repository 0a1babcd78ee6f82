//! Curves against a tier that is simulated naively, and against the tiers that train.

use std::collections::HashMap;
use std::num::NonZeroUsize;

use proptest::prelude::*;
use tessera_cache::{Policy, slot_bytes};
use tessera_data::{Jagged, RawId};
use tessera_device::{Cpu, Device, HostBuffer};

use super::*;
use crate::tiers::layout_of;
use crate::{
    BadIdPolicy, EmbeddingCollection, FeatureSpec, Init, Pooling, Precision, SparseOptimizer,
    SparseStep, TableSpec, Tiers,
};

fn curve(rows: u64, limit: usize, batches: &[Vec<i64>]) -> MissCurve {
    let mut counter = ReuseCounter::tracking(rows, limit);
    for batch in batches {
        counter.batch(batch.iter().copied());
    }
    counter.finish()
}

fn different(batch: &[i64]) -> Vec<u64> {
    let mut rows: Vec<u64> = batch.iter().map(|&id| id as u64).collect();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// (hits, first uses) of a tier of `slots` slots that loses the row used longest ago.
fn simulated(slots: usize, batches: &[Vec<i64>]) -> (u64, u64) {
    let mut tier: HashMap<u64, (u64, u64)> = HashMap::new(); // row -> (batch, order in it)
    let mut known = std::collections::HashSet::new();
    let (mut hits, mut first) = (0, 0);
    for (number, batch) in (0..).zip(batches) {
        let rows = different(batch);
        hits += rows.iter().filter(|row| tier.contains_key(*row)).count() as u64;
        first += rows.iter().filter(|row| known.insert(**row)).count() as u64;
        tier.extend(rows.iter().map(|&row| (row, (number, order(row, number)))));
        while tier.len() > slots {
            let oldest = *tier.iter().min_by_key(|(_, used)| **used).unwrap().0;
            tier.remove(&oldest);
        }
    }
    (hits, first)
}

/// Pseudo-random numbers below 1.
fn uniform(seed: u64) -> impl FnMut() -> f64 {
    let mut state = seed;
    move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        (mix(state) >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Ids whose density falls as a power of the row; hot ones lie scattered.
fn skewed(seed: u64, rows: u64, batches: usize, batch: usize) -> Vec<Vec<i64>> {
    let mut draw = uniform(seed);
    let mut id = || {
        let rank = (rows as f64).powf(draw()) as u64 - 1;
        ((rank * 7919 + seed) % rows) as i64
    };
    (0..batches).map(|_| (0..batch).map(|_| id()).collect()).collect()
}

proptest! {
    #[test]
    fn exact_at_every_size(
        batches in prop::collection::vec(prop::collection::vec(0i64..40, 0..25), 0..40),
    ) {
        let curve = curve(1000, usize::MAX, &batches);
        prop_assert_eq!(curve.share_tracked(), 1.0);
        let uses: usize = batches.iter().map(|batch| different(batch).len()).sum();
        prop_assert_eq!(curve.uses(), uses as u64);
        for slots in 0..45 {
            let (hits, first) = simulated(slots, &batches);
            prop_assert_eq!(curve.first_uses(), first as f64);
            prop_assert_eq!(curve.repeats() - curve.misses(slots as u64), hits as f64);
            prop_assert_eq!(curve.error(slots as u64), 0.0);
        }
    }

    /// Few rows in many batches: places are given anew many times.
    #[test]
    fn long_streams_stay_exact(seed in any::<u64>(), rows in 2u64..60, batch in 1usize..20) {
        let batches = skewed(seed % 1000, rows, 400, batch);
        let curve = curve(rows + 1, usize::MAX, &batches);
        for slots in [1, rows / 3, rows / 2, rows - 1] {
            let hits = curve.repeats() - curve.misses(slots);
            prop_assert_eq!(hits, simulated(slots as usize, &batches).0 as f64);
        }
    }
}

#[test]
fn streams_made_to_hurt() {
    // One row more than there are slots, in a cycle: nothing, then everything, is found.
    let cycle: Vec<Vec<i64>> = (0..100).map(|i| vec![i % 11]).collect();
    let of_cycle = curve(50, usize::MAX, &cycle);
    assert_eq!(
        (of_cycle.first_uses(), of_cycle.misses(10), of_cycle.misses(11)),
        (11.0, 89.0, 0.0)
    );
    assert_eq!(of_cycle.hit_rate(10), Some(0.0));
    // The same rows in every batch.
    let hot = curve(50, usize::MAX, &vec![vec![3, 4, 3]; 10]);
    assert_eq!((hot.uses(), hot.first_uses(), hot.batch_rows_max()), (20, 2.0, 2));
    assert_eq!((hot.hit_rate(2), hot.hit_rate(1)), (Some(1.0), Some(0.5)));
    // No row twice.
    let cold = curve(1000, usize::MAX, &(0..10).map(|i| vec![i]).collect::<Vec<_>>());
    assert_eq!((cold.first_uses(), cold.repeats(), cold.hit_rate(5)), (10.0, 0.0, None));
    // Two sets in turn: a tier of one of them finds nothing.
    let turns: Vec<Vec<i64>> = (0..20).map(|i| (0..5).map(|j| 5 * (i % 2) + j).collect()).collect();
    let turns = curve(1000, usize::MAX, &turns);
    assert_eq!((turns.hit_rate(5), turns.hit_rate(10)), (Some(0.0), Some(1.0)));
    // Ids that name no row, and nothing at all.
    assert_eq!(curve(5, 9, &[vec![-1, 5, 4]]).uses(), 1);
    let empty = curve(5, 9, &[]);
    assert_eq!((empty.uses(), empty.misses(3), empty.hit_rate(3)), (0, 0.0, None));
    assert_eq!(curve(0, 9, &[vec![0]]).misses(0), 0.0);
}

#[test]
fn fewer_rows_tracked_stay_within_the_error_they_state() {
    let mut largest = 0.0f64;
    for seed in 0..12 {
        let rows = 60_000;
        let batches = skewed(seed, rows, 120, 800);
        let exact = curve(rows, usize::MAX, &batches);
        let sampled = curve(rows, 4000, &batches);
        assert!(sampled.share_tracked() < 0.5 && sampled.share_tracked() > 0.01);
        assert_eq!(sampled.uses(), exact.uses());
        let uses = exact.uses() as f64;
        let apart = (sampled.first_uses() - exact.first_uses()).abs() / uses;
        assert!(apart < 0.05, "seed {seed}: first uses {apart} apart");
        for slots in (0..32).map(|i| 800 + i * 1800) {
            let apart = (sampled.misses(slots) - exact.misses(slots)).abs() / uses;
            let error = sampled.error(slots);
            assert!(apart <= error, "seed {seed}, {slots} slots: {apart} apart, stated {error}");
            assert!(error < 0.15, "seed {seed}, {slots} slots: an error of {error} says nothing");
            largest = largest.max(apart);
        }
        assert_eq!(sampled.error(rows), 0.0);
    }
    assert!(largest > 0.0, "nothing was left out");
}

/// The bounds of what any order within a batch gives: (least, most) hits.
fn bounds(slots: usize, batches: &[Vec<i64>]) -> (u64, u64) {
    let mut last: HashMap<u64, usize> = HashMap::new();
    let (mut least, mut most) = (0, 0);
    for (number, batch) in (1..).zip(batches) {
        let rows = different(batch);
        for used in rows.iter().filter_map(|row| last.get(row)) {
            most += u64::from(last.values().filter(|other| *other > used).count() < slots);
            least += u64::from(last.values().filter(|other| *other >= used).count() <= slots);
        }
        last.extend(rows.into_iter().map(|row| (row, number)));
    }
    (least, most)
}

/// Columns, enough that the slots' own bytes make no tier large enough for all rows.
const DIM: usize = 64;

/// The device tier of a table in training, under lru, has the hits that were foretold.
#[test]
fn tiers_in_training_hit_as_foretold() {
    let (rows, batches) = (1500u64, skewed(5, 1500, 60, 120));
    let curve = curve(rows, usize::MAX, &batches);
    let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
    let stream = cpu.stream().unwrap();
    for slots in [curve.batch_rows_max(), 150, 300, 600] {
        let table = TableSpec {
            name: "t".into(),
            kind: crate::TableKind::Static,
            rows,
            dim: DIM,
            precision: Precision::Fp32,
            pooling: Pooling::Sum,
            init: Init::Uniform { scale: None },
            optimizer: SparseOptimizer::Sgd { lr: 0.1 },
        };
        let tiers = Tiers {
            device_bytes: slots * slot_bytes(layout_of(&table).unwrap(), Policy::Lru),
            host_bytes: None,
            cold: None,
            policy: Policy::Lru,
        };
        let feature = FeatureSpec { name: "f".into(), table: 0, column: 0 };
        let (tables, features) = (vec![table], vec![feature]);
        let (cpu, tiers) = (cpu.clone(), Some(&tiers));
        let made = EmbeddingCollection::with_tiers(cpu, &stream, tables, features, 1, tiers);
        let mut tables = made.unwrap();
        for (step, batch) in (1..).zip(&batches) {
            let ids: Vec<RawId> = batch.iter().copied().map(RawId).collect();
            let offsets = (0..=ids.len() as u64).collect();
            let bags = Jagged::new(ids.len(), offsets, ids, None).unwrap();
            let mut lookup = tables.resolve(&stream, vec![bags], BadIdPolicy::Error).unwrap();
            let mut pooled = HostBuffer::from_slice(&vec![0.5f32; batch.len() * DIM]).unwrap();
            tables.forward(&stream, &mut lookup, &mut pooled, DIM).unwrap();
            tables.update(&stream, &lookup, &pooled, DIM, &SparseStep::new(step)).unwrap();
        }
        let stats = tables.stores[0].stats().device;
        assert_eq!((stats.slots, stats.hits + stats.misses), (slots, curve.uses()));
        let foretold = curve.repeats() - curve.misses(slots);
        let (least, most) = bounds(slots as usize, &batches);
        let case = format!("{slots} slots: {} hits, {foretold} foretold", stats.hits);
        assert!((least..=most).contains(&stats.hits), "{case}, {least} to {most}");
        assert!((least as f64..=most as f64).contains(&foretold), "{case}, {least} to {most}");
        let apart = (stats.hits as f64 - foretold).abs() / curve.uses() as f64;
        assert!(apart < 0.01, "{case}");
        assert!(most - least > 0, "{slots} slots: no order would matter");
    }
}
