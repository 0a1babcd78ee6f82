//! Dynamic tables as plain arrays: taken over, dealt to other ranks, refused with a reason.

use std::collections::HashMap;

use tessera_cache::{
    Admission, CacheError, Eviction, IdMap, IdMapOptions, IdMapState, IdRow, SketchShape, owner_of,
};

const SKETCH: SketchShape = SketchShape { width: 4096, depth: 4 };

fn options(capacity: u64, eviction: Eviction) -> IdMapOptions {
    IdMapOptions { capacity, admission: Admission::Always, eviction, seed: 3 }
}

fn counting(capacity: u64, n: u8) -> IdMapOptions {
    let admission = Admission::Count { n, sketch: SKETCH, halve_every_sightings: 0 };
    IdMapOptions { capacity, admission, eviction: Eviction::None, seed: 3 }
}

/// A state of three ids.
fn state() -> IdMapState {
    IdMapState {
        ids: vec![2, 5, u64::MAX],
        rows: vec![4, 0, 2],
        seen_steps: vec![7, 3, 6],
        occurrences: vec![1, 9, 2],
        step: 7,
        sketch: None,
    }
}

#[test]
fn every_id_keeps_its_row_and_free_rows_between_are_used_first() {
    let mut map = IdMap::import(options(6, Eviction::Lru), &state()).unwrap();
    assert_eq!(map.export(), state());
    let resolved = map.resolve(&[5, 10, 11, 12, u64::MAX, 2], 8, true).unwrap();
    assert_eq!(resolved.rows, [0, 1, 3, 5, 2, 4]);
    // Rows beyond the old capacity are there, too, and the oldest goes first.
    let mut map = IdMap::import(options(5, Eviction::Lru), &state()).unwrap();
    let resolved = map.resolve(&[10, 11, 12, 13], 7, true).unwrap();
    // Id 2 was seen in step 7 already.
    assert_eq!(resolved.evicted, [IdRow { id: 5, row: 0 }, IdRow { id: u64::MAX, row: 2 }]);
    assert_eq!(resolved.rows, [0, 1, 2, 3]);
}

#[test]
fn arrays_that_are_no_map_are_refused_with_the_reason() {
    type Change = fn(&mut IdMapState);
    let changes: [(Change, &str); 8] = [
        (|s| s.ids[1] = 2, "id 2 comes before 2; ids must ascend"),
        (|s| s.ids.swap(0, 1), "id 5 comes before 2; ids must ascend"),
        (|s| s.rows[2] = 4, "ids 2 and 18446744073709551615 have the same row 4"),
        (|s| s.rows[1] = 5, "id 5 has row 5, beyond the capacity of 5; raise the capacity"),
        (|s| s.rows[1] = u64::MAX, "id 5 has row 18446744073709551615, beyond the capacity"),
        (|s| s.occurrences[0] = 0, "id 2 has 0 occurrences; a row has at least 1"),
        (|s| s.seen_steps[0] = 8, "id 2 was seen in step 8, after the last step 7"),
        (|s| s.seen_steps.truncate(1), "have [3, 3, 1, 3] elements"),
    ];
    for (change, reason) in changes {
        let mut state = state();
        change(&mut state);
        let error = IdMap::import(options(5, Eviction::Lru), &state).unwrap_err();
        assert!(matches!(error, CacheError::IdMapState { .. }), "{error}");
        assert!(error.to_string().contains(reason), "{error}");
    }
}

#[test]
fn a_sketch_goes_on_is_left_out_or_is_refused() {
    let mut map = IdMap::new(counting(10, 3)).unwrap();
    map.resolve(&[1, 2, 2], 1, true).unwrap();
    let mut state = map.export();
    let admitted = |state: &IdMapState| {
        let mut map = IdMap::import(counting(10, 3), state).unwrap();
        map.resolve(&[1, 2], 2, true).unwrap().stats.admitted
    };
    assert_eq!(admitted(&state), 1);
    // Admission that does not count leaves the counts alone.
    assert!(IdMap::import(options(10, Eviction::None), &state).unwrap().export().sketch.is_none());
    state.sketch.as_mut().unwrap().shape.width = 5;
    let error = IdMap::import(counting(10, 3), &state).unwrap_err();
    assert!(error.to_string().contains("4 rows of 5 counters"), "{error}");
    state.sketch = None;
    assert_eq!(admitted(&state), 0);
}

/// 3 ranks become 2, 5 and 1: each id is with its owner, once, with what was known of it; and the
/// owner knows where each row came from.
#[test]
fn ids_are_dealt_to_their_owners() {
    let stream: Vec<Vec<u64>> = (0..50u64)
        .map(|step| (0..60).map(|i| (step * 7 + i * i) % 1000 * 0x0123_4567_89AB).collect())
        .collect();
    let mut parts = Vec::new();
    for rank in 0..3 {
        let mut map = IdMap::new(counting(600, 2)).unwrap();
        for (step, ids) in (0..).zip(&stream) {
            let own: Vec<u64> = ids.iter().copied().filter(|&id| owner_of(id, 3) == rank).collect();
            map.resolve(&own, step, true).unwrap();
        }
        parts.push(map.export());
    }
    let all: usize = parts.iter().map(|part| part.ids.len()).sum();
    assert!(all > 500);
    for ranks in [2, 5, 1] {
        let mut found = 0;
        for rank in 0..ranks {
            let dealt = IdMap::deal(counting(1000, 2), &parts, rank, ranks).unwrap();
            let state = dealt.map.export();
            assert!(dealt.evicted.is_empty());
            assert_eq!(state.step, 49);
            assert_eq!(state.rows, (0..state.ids.len() as u64).collect::<Vec<_>>());
            assert_eq!(dealt.moves.len(), state.ids.len());
            for (i, step) in dealt.moves.iter().enumerate() {
                let from = &parts[step.part];
                let old = from.ids.binary_search(&step.id).unwrap();
                assert_eq!(owner_of(step.id, ranks), rank);
                assert_eq!((step.id, step.to_row), (state.ids[i], i as u64));
                assert_eq!(step.from_row, from.rows[old]);
                assert_eq!(state.seen_steps[i], from.seen_steps[old]);
                assert_eq!(state.occurrences[i], from.occurrences[old]);
            }
            found += state.ids.len();
        }
        assert_eq!(found, all);
    }
    // Ids sighted once so far are admitted by whoever has them at their second sighting.
    let mut sightings = HashMap::new();
    stream.iter().flatten().for_each(|&id| *sightings.entry(id).or_insert(0) += 1);
    let once: Vec<u64> = sightings.iter().filter(|one| *one.1 == 1).map(|one| *one.0).collect();
    assert!(once.len() > 20);
    for rank in 0..2 {
        let own: Vec<u64> = once.iter().copied().filter(|&id| owner_of(id, 2) == rank).collect();
        let mut map = IdMap::deal(counting(1000, 2), &parts, rank, 2).unwrap().map;
        assert_eq!(map.resolve(&own, 50, true).unwrap().stats.rejected, 0);
    }
}

#[test]
fn a_share_beyond_the_capacity_is_an_error_or_loses_its_lowest() {
    let parts = [state(), IdMapState { ids: vec![9], rows: vec![8], ..part_of_one() }];
    for eviction in [Eviction::None, Eviction::Age { steps: 1 }] {
        let error = IdMap::deal(options(3, eviction), &parts, 0, 1).unwrap_err();
        assert!(error.to_string().contains("4 ids belong to rank 0, which has 3 rows"), "{error}");
    }
    let lru = IdMap::deal(options(2, Eviction::Lru), &parts, 0, 1).unwrap();
    assert_eq!((lru.evicted, lru.map.export().ids), (vec![5, 9], vec![2, u64::MAX]));
    let eviction = Eviction::Lfu { halve_every_steps: 0 };
    let lfu = IdMap::deal(options(2, eviction), &parts, 0, 1).unwrap();
    assert_eq!((lfu.evicted, lfu.map.export().ids), (vec![2, u64::MAX], vec![5, 9]));
}

fn part_of_one() -> IdMapState {
    IdMapState { seen_steps: vec![3], occurrences: vec![4], step: 5, ..IdMapState::default() }
}

#[test]
fn parts_that_cannot_be_are_refused() {
    let twice = [state(), state()];
    let error = IdMap::deal(options(9, Eviction::None), &twice, 0, 1).unwrap_err();
    assert!(error.to_string().contains("id 2 is in parts 0 and 1"), "{error}");
    let error = IdMap::deal(options(9, Eviction::None), &[], 2, 2).unwrap_err();
    assert_eq!(error.to_string(), "dynamic table: rank is 2: it must be below the number of ranks");
    assert!(IdMap::deal(options(9, Eviction::None), &[], 1, 2).unwrap().map.is_empty());
}

#[test]
fn owners_are_splitmix64_scaled() {
    // The first number of splitmix64 with seed 0, as published: 0xE220A8397B1DCDAF.
    assert_eq!(owner_of(0, 1 << 32), 0xE220_A839);
    for ranks in [1u64, 2, 3, 8, 100] {
        let mut share = vec![0u64; ranks as usize];
        (0..100_000).for_each(|id| share[owner_of(id << 20, ranks) as usize] += 1);
        let mean = 100_000 / ranks;
        assert!(share.iter().all(|n| n.abs_diff(mean) < 5 * mean.isqrt()), "{ranks}: {share:?}");
    }
}

#[test]
fn options_that_cannot_be_are_refused_with_their_values() {
    let sketch = |width, depth| Admission::Count {
        n: 2,
        sketch: SketchShape { width, depth },
        halve_every_sightings: 0,
    };
    let always = Admission::Always;
    let none = Admission::Count { n: 0, sketch: SKETCH, halve_every_sightings: 0 };
    for (capacity, admission, message) in [
        (0, always, "dynamic table: capacity is 0: it must be at least 1"),
        (u64::from(u32::MAX), always, "index: a capacity of 4294967295 ids exceeds the 4294967294"),
        (1 << 40, always, "index: a capacity of 1099511627776 ids exceeds the 4294967294"),
        (5, none, "dynamic table: admission n is 0: it must be at least 1"),
        (5, Admission::Probability { p: 1.5 }, "admission p is 1.5: it must be from 0 to 1"),
        (5, Admission::Probability { p: f64::NAN }, "admission p is NaN"),
        (5, sketch(0, 2), "sketch width is 0: it must be at least 1"),
        (5, sketch(9, 0), "sketch depth is 0: it must be from 1 to 16"),
        (5, sketch(9, 17), "sketch depth is 17: it must be from 1 to 16"),
        (5, sketch(1 << 61, 8), "width times depth must fit the address space"),
    ] {
        let options = IdMapOptions { admission, ..options(capacity, Eviction::None) };
        let error = IdMap::new(options).unwrap_err().to_string();
        assert!(error.contains(message), "{error}");
    }
}

#[test]
fn a_step_back_is_refused_before_anything_changes() {
    let mut map = IdMap::new(options(5, Eviction::Lru)).unwrap();
    map.resolve(&[1], 4, true).unwrap();
    let before = map.export();
    let error = map.resolve(&[1, 2], 3, true).unwrap_err();
    assert!(error.to_string().contains("step 3 comes after step 4"), "{error}");
    assert!(matches!(map.advance(0).unwrap_err(), CacheError::IdMapStep { step: 0, last: 4 }));
    assert_eq!(map.export(), before);
    assert_eq!(map.resolve(&[1, 2], 3, false).unwrap().rows, [0, IdMap::NONE]);
    assert_eq!(map.resolve(&[2], 4, true).unwrap().rows, [1]);
}
