//! Admission to dynamic tables: what the counting sketch promises, and random admission.

use std::collections::HashMap;

use tessera_cache::{Admission, Eviction, IdMap, IdMapOptions, SketchShape};

fn map(admission: Admission, seed: u64) -> IdMap {
    IdMap::new(IdMapOptions { capacity: 100_000, admission, eviction: Eviction::None, seed })
        .unwrap()
}

fn counting(n: u8, sketch: SketchShape, seed: u64) -> IdMap {
    map(Admission::Count { n, sketch, halve_every_sightings: 0 }, seed)
}

/// Every one of many ids is admitted at its n-th sighting at the latest, and the share that is
/// admitted early keeps to the bound for that number of ids: (N / width)^depth.
#[test]
fn a_sketch_is_never_late_and_early_as_seldom_as_it_says() {
    const IDS: u64 = 20_000;
    for (n, width, depth) in [(2, 4 * IDS, 1), (2, 4 * IDS, 2), (4, 2 * IDS, 3), (3, IDS / 2, 4)] {
        let mut map = counting(n, SketchShape { width, depth }, 5);
        let mut early = 0;
        let ids: Vec<u64> = (0..IDS).map(|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)).collect();
        for sighting in 1..=u64::from(n) {
            let resolved = map.resolve(&ids, sighting, true).unwrap();
            if sighting < u64::from(n) {
                early += resolved.stats.admitted;
            }
        }
        assert_eq!(map.len(), IDS, "late: n {n} width {width} depth {depth}");
        let bound = (IDS as f64 / width as f64).powi(depth as i32);
        let share = early as f64 / IDS as f64;
        // Three standard deviations of the share.
        let slack = 3.0 * (bound.min(1.0) / IDS as f64).sqrt();
        assert!(share <= bound + slack, "n {n} width {width} depth {depth}: {share} > {bound}");
        if n == 2 && depth == 1 {
            // The bound says something: here ids are admitted early about as often as it allows.
            assert!(share > bound / 4.0, "{share}, bound {bound}");
        }
    }
}

/// The second bound: many sightings of few ids weigh as much as they are.
#[test]
fn ids_are_many_sightings_early_as_seldom_as_markov_says() {
    let (width, depth, n) = (2000, 2, 100);
    let mut map = counting(n, SketchShape { width, depth }, 9);
    // Sightings: each of 1000 ids up to 40 times, none of them n times.
    let mut sightings = 0u64;
    for step in 0..40 {
        let ids: Vec<u64> = (step * 25..1000).collect();
        sightings += ids.len() as u64;
        assert_eq!(map.resolve(&ids, step, true).unwrap().stats.admitted, 0);
    }
    // New ids, seen so often that they are admitted if their counts are 20 or more too high.
    let m = 20;
    let probes: Vec<u64> = (1_000_000..1_010_000).collect();
    let state = map.export();
    let mut early = 0u64;
    for probe in probes.chunks(100) {
        // Each hundred meets the same sketch.
        let mut map = IdMap::import(*map.options(), &state).unwrap();
        let ids: Vec<u64> = (0..n - m).flat_map(|_| probe.iter().copied()).collect();
        early += map.resolve(&ids, 40, true).unwrap().stats.admitted;
    }
    let all = sightings + 100 * u64::from(n - m);
    let bound = (all as f64 / (width as f64 * f64::from(m))).powi(depth as i32);
    let share = early as f64 / probes.len() as f64;
    assert!(bound < 1.0 && share <= bound, "{share} > {bound}");
}

#[test]
fn the_papers_shape_keeps_its_promise() {
    let shape = SketchShape::for_error(1000, 0.01);
    assert_eq!((shape.width, shape.depth), (2719, 5));
    assert_eq!(shape.bytes(), 13_595);
    assert!((1000.0 / shape.width as f64).powi(shape.depth as i32) <= 0.01);
    assert_eq!(SketchShape::for_error(0, 1.0), SketchShape { width: 1, depth: 1 });
}

#[test]
fn sightings_count_by_occurrence_and_only_in_training() {
    let mut map = counting(3, SketchShape { width: 1000, depth: 4 }, 0);
    assert_eq!(map.resolve(&[7, 7, 7, 7], 1, false).unwrap().rows, [IdMap::NONE; 4]);
    let resolved = map.resolve(&[7, 8, 7], 1, true).unwrap();
    assert_eq!((resolved.stats.rejected, resolved.stats.misses), (2, 3));
    // The third sighting of 7 is here: all its occurrences in the batch have the row.
    let resolved = map.resolve(&[9, 7, 7, 8], 2, true).unwrap();
    assert_eq!(resolved.rows, [IdMap::NONE, 0, 0, IdMap::NONE]);
    assert_eq!(map.resolve(&[8, 8, 8], 3, true).unwrap().rows, [1, 1, 1]);
}

#[test]
fn counts_are_forgotten_by_halves() {
    let sketch = SketchShape { width: 1000, depth: 4 };
    let mut map = map(Admission::Count { n: 3, sketch, halve_every_sightings: 4 }, 0);
    assert_eq!(map.resolve(&[5, 5, 1, 2], 1, true).unwrap().stats.admitted, 0);
    // 5 has count 1 now, and 1 and 2 have none.
    let resolved = map.resolve(&[5, 1, 1, 5], 2, true).unwrap();
    assert_eq!(resolved.admitted.iter().map(|one| one.id).collect::<Vec<_>>(), [5]);
}

/// A count beyond 255 stays there: the id is not forgotten.
#[test]
fn counters_saturate() {
    let mut map = counting(255, SketchShape { width: 64, depth: 2 }, 0);
    assert_eq!(map.resolve(&[3; 254], 1, true).unwrap().stats.admitted, 0);
    assert_eq!(map.resolve(&[3; 600], 1, true).unwrap().stats.admitted, 1);
    assert_eq!(map.export().sketch.unwrap().cells.iter().max(), Some(&255));
}

/// Whether an id gets in depends on (seed, id, step) alone: not on the batch around it, its order
/// or what came before.
#[test]
fn random_admission_is_a_function_of_seed_id_and_step() {
    let p = 0.25;
    let ids: Vec<u64> = (0..8000).collect();
    let mut admitted = HashMap::new();
    let mut map_of = |seed: u64, step: u64, ids: &[u64]| {
        let mut fresh = map(Admission::Probability { p }, seed);
        for ids in ids.chunks(1000) {
            for one in fresh.resolve(ids, step, true).unwrap().admitted {
                *admitted.entry((seed, step, one.id)).or_insert(0) += 1;
            }
        }
        fresh.export().ids
    };
    let first = map_of(1, 1, &ids);
    // Standard deviation of the share: 0.005.
    assert!((first.len() as f64 / 8000.0 - p).abs() < 0.02, "{}", first.len());
    let backwards: Vec<u64> = ids.iter().rev().copied().collect();
    assert_eq!(map_of(1, 1, &backwards), first);
    let even: Vec<u64> = ids.iter().step_by(2).copied().collect();
    let of_first: Vec<u64> = first.iter().copied().filter(|id| id % 2 == 0).collect();
    assert_eq!(map_of(1, 1, &even), of_first);
    for (seed, step) in [(1, 2), (2, 1)] {
        let other = map_of(seed, step, &ids);
        let both = other.iter().filter(|id| first.binary_search(id).is_ok()).count();
        // Independent: a quarter of a quarter, standard deviation 0.0027.
        assert!((both as f64 / 8000.0 - p * p).abs() < 0.014, "{both}");
    }
}
