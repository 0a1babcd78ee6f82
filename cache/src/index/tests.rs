use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::owner_of;

const INVERSES: [u64; 2] = [inverse(MULTIPLIERS[0]), inverse(MULTIPLIERS[1])];

/// The id of a key. Folding by half the width undoes itself.
const fn id_of(key: u64) -> u64 {
    let x = key.wrapping_mul(INVERSES[1]);
    (x ^ (x >> 32)).wrapping_mul(INVERSES[0]) ^ ODD_ONE
}

/// The inverse of an odd number modulo 2^64, by Newton's iteration: x is right to 3 bits at
/// first, and each round doubles them.
const fn inverse(odd: u64) -> u64 {
    let mut x = odd;
    let mut round = 0;
    while round < 5 {
        x = x.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(x)));
        round += 1;
    }
    x
}

/// Bytes of an index for `capacity` ids that did not grow.
fn bytes_for(capacity: u64) -> u64 {
    (homes_for(capacity) + TAIL_LINES as u64) * LINE_BYTES
}

/// All (id, slot), in the order of the lines.
fn entries(index: &Index) -> impl Iterator<Item = (u64, u32)> + '_ {
    let odd_one = Some((ODD_ONE, !index.odd_one)).filter(|&(_, slot)| slot != Index::NONE);
    let lines = index.lines.iter().flat_map(|line| {
        let taken = line.keys.into_iter().zip(line.slots).take_while(|&(key, _)| key != 0);
        taken.map(|(key, slot)| (id_of(key), !slot))
    });
    odd_one.into_iter().chain(lines)
}

/// What must hold of the lines, whatever was done to them.
fn check(index: &Index, model: &HashMap<u64, u32>) {
    assert_eq!(index.len(), model.len() as u64);
    assert_eq!(entries(index).collect::<HashMap<_, _>>(), *model);
    let mut last = u64::MAX;
    for (at, line) in index.lines.iter().enumerate() {
        let taken = line.keys.iter().take_while(|&&key| key != 0).count();
        assert!(line.keys[taken..].iter().all(|&key| key == 0), "gap in line {at}");
        assert!(line.slots[taken..].iter().all(|&slot| slot == 0), "slot in an empty lane");
        for &key in &line.keys[..taken] {
            assert!(key <= last, "line {at} is out of order");
            last = key;
            let home = home(key, index.homes);
            assert!(home <= at);
            let full = |line: &Line| line.keys[LANES - 1] != 0;
            assert!(index.lines[home..at].iter().all(full), "gap before line {at}");
        }
    }
    assert_eq!(index.lines[index.lines.len() - 1].keys, [0; LANES]);
}

#[derive(Clone, Debug)]
enum Step {
    Insert(Vec<(u64, u32)>),
    Remove(Vec<u64>),
    Find(Vec<u64>),
}

/// Ids that repeat, extreme ones, and ones whose keys crowd the first and the last line.
fn id() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0u64..60,
        1 => prop::sample::select(vec![0, 1, u64::MAX, u64::MAX - 1, 1 << 63, ODD_ONE]),
        1 => (0u64..40).prop_map(|x| id_of(1 + x)),
        1 => (0u64..40).prop_map(|x| id_of(u64::MAX - x)),
        1 => (0u64..40).prop_map(|x| x << 40),
    ]
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let ids = || prop::collection::vec(id(), 0..50);
    let slot = prop_oneof![0u32..100, Just(u32::MAX - 1)];
    prop::collection::vec(
        prop_oneof![
            prop::collection::vec((id(), slot), 0..50).prop_map(Step::Insert),
            ids().prop_map(Step::Remove),
            ids().prop_map(Step::Find),
        ],
        0..20,
    )
}

proptest! {
    #[test]
    fn it_is_a_map(capacity in 0u64..120, steps in steps()) {
        let mut index = Index::new(capacity).unwrap();
        let mut model = HashMap::new();
        for step in steps {
            match step {
                Step::Insert(mut entries) => {
                    let mut room = capacity - model.len() as u64;
                    let mut new = model.clone();
                    entries.retain(|&(id, slot)| {
                        let fits = new.contains_key(&id) || room > 0;
                        if fits && new.insert(id, slot).is_none() {
                            room -= 1;
                        }
                        fits
                    });
                    let (ids, slots): (Vec<_>, Vec<_>) = entries.iter().copied().unzip();
                    let (first, rest) = ids.split_at(ids.len().min(1));
                    for &id in first {
                        prop_assert_eq!(
                            index.insert(id, slots[0]).unwrap(),
                            model.get(&id).copied()
                        );
                    }
                    index.insert_all(rest, &slots[first.len()..]).unwrap();
                    model = new;
                }
                Step::Remove(ids) => {
                    let (first, rest) = ids.split_at(ids.len().min(1));
                    for &id in first {
                        prop_assert_eq!(index.remove(id), model.remove(&id));
                    }
                    index.remove_all(rest);
                    model.retain(|id, _| !ids.contains(id));
                }
                Step::Find(ids) => {
                    let mut slots = vec![77; ids.len()];
                    index.find(&ids, &mut slots);
                    for (&id, slot) in ids.iter().zip(slots) {
                        prop_assert_eq!(slot, *model.get(&id).unwrap_or(&Index::NONE));
                        prop_assert_eq!(index.get(id), model.get(&id).copied());
                    }
                }
            }
            check(&index, &model);
        }
    }

    #[test]
    fn keys_give_their_ids_back(id in any::<u64>()) {
        prop_assert_eq!(id_of(key_of(id)), id);
    }
}

#[test]
fn the_lines_depend_on_the_ids_alone() {
    let lines = |ids: &mut dyn Iterator<Item = u64>, gone: std::ops::Range<u64>| {
        let mut index = Index::new(1000).unwrap();
        ids.for_each(|id| assert_eq!(index.insert(id, id as u32).unwrap(), None));
        index.remove_all(&gone.collect::<Vec<_>>());
        entries(&index).collect::<Vec<_>>()
    };
    let plain = lines(&mut (0..900), 0..0);
    assert_eq!(lines(&mut (0..900).rev(), 0..0), plain);
    assert_eq!(lines(&mut (0..1000).rev(), 900..1000), plain);
}

/// A full table in which the oldest id makes room for each new one, as a cache's does: no
/// tombstones gather, and no id is lost.
#[test]
fn a_full_table_takes_a_new_id_for_each_that_leaves() {
    let capacity = 10_000u64;
    let mut index = Index::new(capacity).unwrap();
    let mut inside = VecDeque::new();
    for i in 0..50 * capacity {
        let slot = if i < capacity {
            i as u32
        } else {
            index.remove(inside.pop_front().unwrap()).unwrap()
        };
        let id = i.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        assert_eq!(index.insert(id, slot).unwrap(), None);
        inside.push_back(id);
    }
    let model = inside.iter().map(|&id| (id, index.get(id).unwrap())).collect();
    check(&index, &model);
    assert_eq!(index.bytes(), bytes_for(capacity));
}

/// Every pattern that ids have in data is spread well: few keys are pushed on far.
#[test]
fn patterns_of_ids_are_spread() {
    let capacity = 100_000u64;
    let splitmix = |x: u64| {
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    };
    let owned: Vec<u64> = (0..).filter(|&id| owner_of(id, 8) == 7).take(100_000).collect();
    let patterns: [(&str, &dyn Fn(u64) -> u64); 9] = [
        ("dense", &|i| i),
        ("strided", &|i| i * 4096),
        ("high bits", &|i| i << 44),
        ("middle bits", &|i| i << 22),
        ("negative", &|i| 0u64.wrapping_sub(i)),
        ("prefixed", &|i| ((i % 7) << 56) | (i / 7)),
        ("golden", &|i| i.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
        ("splitmix", &splitmix),
        ("one owner's", &|i| owned[i as usize]),
    ];
    for (name, pattern) in patterns {
        let mut index = Index::new(capacity).unwrap();
        (0..capacity).for_each(|i| {
            index.insert(pattern(i), i as u32).unwrap();
        });
        let moved: usize = (index.lines.iter().enumerate())
            .flat_map(|(at, line)| line.keys.map(|key| (at, key)))
            .filter(|&(_, key)| key != 0)
            .map(|(at, key)| at - home(key, index.homes))
            .sum();
        let lines = 1.0 + moved as f64 / capacity as f64;
        assert!(lines < 1.4, "{name}: {lines} lines a search");
        assert_eq!(index.bytes(), bytes_for(capacity), "{name}");
    }
}

#[test]
fn crafted_ids_make_it_grow_and_stay_right() {
    let capacity = 2000;
    let mut index = Index::new(capacity).unwrap();
    let mut model = HashMap::new();
    for i in 0..capacity {
        // Keys 1, 2, ...: all are at home in the last home line.
        index.insert(id_of(1 + i), i as u32).unwrap();
        model.insert(id_of(1 + i), i as u32);
    }
    check(&index, &model);
    assert!(index.bytes() > bytes_for(capacity));
    for i in (0..capacity).step_by(2) {
        assert_eq!(index.remove(id_of(1 + i)), model.remove(&id_of(1 + i)));
    }
    check(&index, &model);
}

#[test]
fn a_capacity_beyond_32_bits_is_an_error_with_the_numbers() {
    for capacity in [u64::from(u32::MAX), 1 << 40, u64::MAX] {
        let error = Index::new(capacity).unwrap_err();
        assert!(matches!(error, CacheError::IndexTooLarge { .. }), "{error}");
        assert!(error.to_string().contains(&capacity.to_string()), "{error}");
    }
    // Pages that nobody wrote take no memory.
    assert_eq!(Index::new(1 << 26).unwrap().len(), 0);
}

#[test]
#[should_panic(expected = "more than its 3 ids")]
fn a_new_id_in_a_full_index_is_a_bug() {
    let mut index = Index::new(3).unwrap();
    index.insert_all(&[1, 2, 3, 4], &[0; 4]).unwrap();
}
