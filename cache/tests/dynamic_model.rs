//! Dynamic tables against a straightforward model: a hash map, and all rows in the order in which
//! they would go.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use proptest::prelude::*;
use tessera_cache::{
    Admission, Eviction, IdMap, IdMapOptions, IdMapStats, IdRow, Resolved, SketchShape,
};
use tessera_device::Philox;

#[derive(Clone, Copy, Debug)]
struct Known {
    row: u64,
    seen: u64,
    occurrences: u64,
}

struct Model {
    options: IdMapOptions,
    known: HashMap<u64, Known>,
    order: BTreeSet<(u64, u64)>, // (score, id)
    free: BTreeSet<u64>,
    sighted: HashMap<u64, u8>,
    sightings: u64,
    step: u64,
}

impl Model {
    fn new(options: IdMapOptions) -> Self {
        Self {
            options,
            known: HashMap::new(),
            order: BTreeSet::new(),
            free: (0..options.capacity).collect(),
            sighted: HashMap::new(),
            sightings: 0,
            step: 0,
        }
    }

    fn score(&self, known: &Known) -> u64 {
        match self.options.eviction {
            Eviction::Lfu { .. } => known.occurrences,
            _ => known.seen,
        }
    }

    fn put(&mut self, id: u64, known: Known) {
        if let Some(old) = self.known.insert(id, known) {
            self.order.remove(&(self.score(&old), id));
        }
        self.order.insert((self.score(&known), id));
    }

    fn evict(&mut self, score: u64, id: u64) -> IdRow {
        self.order.remove(&(score, id));
        let row = self.known.remove(&id).unwrap().row;
        self.free.insert(row);
        IdRow { id, row }
    }

    fn begin(&mut self, step: u64) {
        if let Eviction::Lfu { halve_every_steps: period @ 1.. } = self.options.eviction {
            for _ in self.step / period..step / period {
                for (id, mut known) in self.known.clone() {
                    known.occurrences = known.occurrences.div_ceil(2);
                    self.put(id, known);
                }
            }
        }
        self.step = step;
    }

    fn accepts(&mut self, id: u64) -> bool {
        match self.options.admission {
            Admission::Always => true,
            Admission::Count { n, halve_every_sightings, .. } => {
                let count = self.sighted.entry(id).or_default();
                *count = count.saturating_add(1);
                let accepted = *count >= n;
                self.sightings += 1;
                if halve_every_sightings > 0 && self.sightings.is_multiple_of(halve_every_sightings)
                {
                    self.sighted.values_mut().for_each(|count| *count /= 2);
                }
                accepted
            }
            Admission::Probability { p } => {
                let draws = Philox::for_name(self.options.seed, "dynamic.admission");
                let [low, high, ..] = draws.block(id, self.step);
                let draw = u64::from(low) | u64::from(high) << 32;
                u128::from(draw) < (p * 2f64.powi(64)) as u128
            }
        }
    }

    fn advance(&mut self, step: u64) -> Vec<IdRow> {
        self.begin(step);
        let Eviction::Age { steps } = self.options.eviction else { return Vec::new() };
        let old: Vec<_> =
            self.order.iter().copied().take_while(|&(seen, _)| step - seen > steps).collect();
        old.into_iter().map(|(seen, id)| self.evict(seen, id)).collect()
    }

    fn resolve(&mut self, ids: &[u64], step: u64, training: bool) -> Resolved {
        let rows = |model: &Self| {
            ids.iter()
                .map(|id| model.known.get(id).map_or(IdMap::NONE, |known| known.row))
                .collect()
        };
        let hits = ids.iter().filter(|id| self.known.contains_key(id)).count() as u64;
        let misses = ids.len() as u64 - hits;
        let mut stats = IdMapStats { hits, misses, ..IdMapStats::default() };
        let (mut admitted, mut evicted) = (Vec::new(), Vec::new());
        if training {
            self.begin(step);
            let mut counts: BTreeMap<u64, u64> = BTreeMap::new();
            for &id in ids {
                if let Some(&(mut known)) = self.known.get(&id) {
                    (known.seen, known.occurrences) = (step, known.occurrences + 1);
                    self.put(id, known);
                    continue;
                }
                *counts.entry(id).or_default() += 1;
            }
            let new: Vec<(u64, bool, u64)> = counts
                .into_iter()
                .map(|(id, count)| (id, (0..count).any(|_| self.accepts(id)), count))
                .collect();
            let mut wanted = new.iter().filter(|&&(_, accepted, _)| accepted).count();
            stats.rejected = (new.len() - wanted) as u64;
            while self.free.len() < wanted
                && matches!(self.options.eviction, Eviction::Lru | Eviction::Lfu { .. })
            {
                let lowest = self.order.iter().copied().find(|(_, id)| self.known[id].seen != step);
                let Some((score, id)) = lowest else { break };
                evicted.push(self.evict(score, id));
            }
            for (id, accepted, occurrences) in new {
                if accepted {
                    wanted -= 1;
                    match self.free.pop_first() {
                        Some(row) => {
                            self.put(id, Known { row, seen: step, occurrences });
                            admitted.push(IdRow { id, row });
                        }
                        None => stats.overflow += 1,
                    }
                }
            }
            assert_eq!(wanted, 0);
        }
        stats.admitted = admitted.len() as u64;
        stats.evicted = evicted.len() as u64;
        stats.occupancy = self.known.len() as u64;
        Resolved { rows: rows(self), admitted, evicted, stats }
    }
}

/// All that can be seen of the map is as in the model.
fn check(map: &IdMap, model: &Model) {
    assert_eq!(map.len(), model.known.len() as u64);
    let state = map.export();
    assert_eq!(state.ids.len(), model.known.len());
    let ids = state.ids.iter();
    for (((id, row), seen), score) in
        ids.zip(&state.rows).zip(&state.seen_steps).zip(&state.occurrences)
    {
        let known = model.known[id];
        assert_eq!((*row, *seen, *score), (known.row, known.seen, known.occurrences), "id {id}");
    }
}

#[derive(Clone, Debug)]
enum Call {
    Train(Vec<u64>),
    Counted(Vec<u64>),
    Evaluate(Vec<u64>),
    Advance,
    Resume,
}

fn calls() -> impl Strategy<Value = Vec<(u64, Call)>> {
    let id = prop_oneof![
        6 => 0u64..40,
        2 => (0u64..20).prop_map(|x| x * x * x),
        1 => prop::sample::select(vec![0, u64::MAX, 1 << 63, u64::MAX - 1]),
    ];
    let ids = || prop::collection::vec(id.clone(), 0..40);
    let call = prop_oneof![
        4 => ids().prop_map(Call::Train),
        2 => ids().prop_map(Call::Counted),
        1 => ids().prop_map(Call::Evaluate),
        1 => Just(Call::Advance),
        1 => Just(Call::Resume),
    ];
    prop::collection::vec((0u64..3, call), 0..30)
}

fn options() -> impl Strategy<Value = IdMapOptions> {
    let sketch = SketchShape { width: 1 << 12, depth: 6 };
    let admission = prop_oneof![
        2 => Just(Admission::Always),
        2 => (1u8..5, prop::sample::select(vec![0, 7, 40])).prop_map(move |(n, halve)| {
            Admission::Count { n, sketch, halve_every_sightings: halve }
        }),
        1 => prop::sample::select(vec![0.0, 0.3, 1.0]).prop_map(|p| Admission::Probability { p }),
    ];
    let eviction = prop_oneof![
        Just(Eviction::None),
        (0u64..6).prop_map(|steps| Eviction::Age { steps }),
        Just(Eviction::Lru),
        prop::sample::select(vec![0, 1, 5])
            .prop_map(|halve_every_steps| Eviction::Lfu { halve_every_steps }),
    ];
    (1u64..50, admission, eviction, any::<u64>()).prop_map(
        |(capacity, admission, eviction, seed)| IdMapOptions {
            capacity,
            admission,
            eviction,
            seed,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    #[test]
    fn every_policy_does_what_the_model_does(options in options(), calls in calls()) {
        let mut map = IdMap::new(options).unwrap();
        let mut model = Model::new(options);
        let mut step = 0;
        for (steps, call) in calls {
            step += steps;
            match call {
                Call::Train(ids) => prop_assert_eq!(
                    map.resolve(&ids, step, true).unwrap(), model.resolve(&ids, step, true)
                ),
                // The same batch as different ids, in any order, and how often each occurs.
                Call::Counted(ids) => {
                    let mut counts: HashMap<u64, u64> = HashMap::new();
                    ids.iter().for_each(|&id| *counts.entry(id).or_default() += 1);
                    let (different, counts): (Vec<u64>, Vec<u64>) = counts.into_iter().unzip();
                    let resolved = map.resolve_counted(&different, &counts, step).unwrap();
                    let wanted = model.resolve(&ids, step, true);
                    prop_assert_eq!(&resolved.admitted, &wanted.admitted);
                    prop_assert_eq!(&resolved.evicted, &wanted.evicted);
                    prop_assert_eq!(resolved.stats, wanted.stats);
                    for (id, row) in different.iter().zip(resolved.rows) {
                        let at = ids.iter().position(|other| other == id).unwrap();
                        prop_assert_eq!(row, wanted.rows[at]);
                    }
                }
                Call::Evaluate(ids) => {
                    let resolved = map.resolve(&ids, 0, false).unwrap();
                    let mut rows = vec![7; ids.len()];
                    map.find(&ids, &mut rows);
                    prop_assert_eq!(&rows, &resolved.rows);
                    prop_assert_eq!(resolved, model.resolve(&ids, 0, false));
                }
                Call::Advance => prop_assert_eq!(map.advance(step).unwrap(), model.advance(step)),
                Call::Resume => map = IdMap::import(options, &map.export()).unwrap(),
            }
            check(&map, &model);
        }
    }
}

/// A generator of streams: splitmix64.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `limit`, the small ones often: log-uniform.
    fn skewed(&mut self, limit: u64) -> u64 {
        let unit = (self.next() >> 11) as f64 / (1u64 << 53) as f64;
        ((limit as f64).powf(unit) - 1.0) as u64
    }
}

/// Tables large enough that the map keeps only a part of the rows in order: hot, skewed, uniform
/// and scanning streams, resumed in the middle.
#[test]
fn large_tables_do_what_the_model_does() {
    let policies = [
        Eviction::Lru,
        Eviction::Lfu { halve_every_steps: 0 },
        Eviction::Lfu { halve_every_steps: 40 },
        Eviction::Age { steps: 3 },
    ];
    for (seed, eviction) in policies.into_iter().enumerate() {
        let options =
            IdMapOptions { capacity: 5000, admission: Admission::Always, eviction, seed: 1 };
        let mut map = IdMap::new(options).unwrap();
        let mut model = Model::new(options);
        let mut draws = Draws(seed as u64);
        let mut evicted = 0;
        for step in 0..240u64 {
            let ids: Vec<u64> = (0..700)
                .map(|i| match step % 4 {
                    0 => draws.skewed(100_000),
                    1 => draws.next() % 12_000,
                    2 => (step * 700 + i) % 5001, // one more than fit
                    _ => draws.next(),
                })
                .collect();
            let resolved = map.resolve(&ids, step, true).unwrap();
            assert_eq!(resolved, model.resolve(&ids, step, true), "{eviction:?} step {step}");
            let old = map.advance(step).unwrap();
            assert_eq!(old, model.advance(step), "{eviction:?} step {step}");
            evicted += resolved.evicted.len() + old.len();
            if step % 50 == 49 {
                check(&map, &model);
                map = IdMap::import(options, &map.export()).unwrap();
            }
        }
        assert!(evicted > 20_000, "{eviction:?} evicted {evicted}");
    }
}

/// What the model of the next test says of a step.
struct Step {
    ids: Vec<u64>,
    evicted: Vec<u64>,
    occupancy: usize,
}

/// New ids through a table of `rows` rows whose policy is lru, some of them seen again: the model
/// of every step, then the ids left. An id is its number times a constant.
fn lru_steps(rows: usize, numbers: usize, next_step: impl Fn(Step)) -> Vec<u64> {
    const BATCH: usize = 50_000;
    let id_of = |number: usize| number as u64 * (u64::MAX / numbers as u64);
    // The step in which each number was last seen (0: not there), and the numbers seen in each.
    let mut seen = vec![0u8; numbers];
    let mut of_step: Vec<Vec<u32>> = vec![Vec::new()];
    let (mut oldest, mut occupancy) = (1, 0);
    let mut draws = Draws(3);
    for first in (0..numbers).step_by(BATCH) {
        let step = u8::try_from(of_step.len()).unwrap();
        let mut batch = Vec::with_capacity(BATCH + BATCH / 8);
        for i in 0..BATCH {
            batch.push(first + i);
            if i % 8 == 0 && first > 0 {
                batch.push(first - 1 - draws.next() as usize % first.min(2 * rows));
            }
        }
        let mut now = Vec::new();
        for &number in &batch {
            occupancy += usize::from(seen[number] == 0);
            if seen[number] != step {
                seen[number] = step;
                now.push(number as u32);
            }
        }
        of_step.push(now);
        let mut evicted = Vec::new();
        while occupancy > rows {
            let mut old = std::mem::take(&mut of_step[oldest]);
            old.retain(|&number| usize::from(seen[number as usize]) == oldest);
            old.sort_unstable();
            of_step[oldest] = old.split_off(old.len().min(occupancy - rows));
            occupancy -= old.len();
            for number in old {
                seen[number as usize] = 0;
                evicted.push(id_of(number as usize));
            }
            oldest += usize::from(of_step[oldest].is_empty());
        }
        let ids = batch.into_iter().map(id_of).collect();
        next_step(Step { ids, evicted, occupancy });
    }
    (0..numbers).filter(|&number| seen[number] > 0).map(id_of).collect()
}

/// 10 million ids through a table of a million rows: who goes is who was seen longest ago, none
/// is lost and none stays.
#[test]
fn ten_million_ids_through_a_million_rows() {
    const ROWS: usize = 1_000_000;
    let (admission, eviction) = (Admission::Always, Eviction::Lru);
    let capacity = ROWS as u64;
    let mut map = IdMap::new(IdMapOptions { capacity, admission, eviction, seed: 1 }).unwrap();
    std::thread::scope(|scope| {
        // The model runs ahead on a thread of its own.
        let (sender, steps) = std::sync::mpsc::sync_channel(2);
        let left = scope.spawn(move || {
            lru_steps(ROWS, 10_000_000, |step| sender.send(step).expect("the test goes on"))
        });
        let (mut hits, mut evicted) = (0, 0);
        for (number, step) in (1..).zip(steps) {
            let resolved = map.resolve(&step.ids, number, true).unwrap();
            assert!(resolved.evicted.iter().map(|gone| gone.id).eq(step.evicted), "step {number}");
            assert_eq!(resolved.stats.occupancy, step.occupancy as u64);
            assert_eq!(resolved.stats.overflow, 0);
            assert!(resolved.rows.iter().all(|&row| row < capacity));
            hits += resolved.stats.hits;
            evicted += resolved.stats.evicted;
        }
        assert!(hits > 100_000 && evicted > 9_000_000, "{hits} hits, {evicted} evicted");
        assert!(map.export().ids == left.join().unwrap());
    });
}

#[test]
fn a_full_table_takes_new_ids_again_once_old_ones_have_gone() {
    let eviction = Eviction::Age { steps: 1 };
    let options = IdMapOptions { capacity: 3, admission: Admission::Always, eviction, seed: 0 };
    let mut map = IdMap::new(options).unwrap();
    assert_eq!(map.resolve(&[10, 11, 12], 1, true).unwrap().rows, [0, 1, 2]);
    let full = map.resolve(&[13, 11, 13], 2, true).unwrap();
    assert_eq!(full.rows, [IdMap::NONE, 1, IdMap::NONE]);
    assert_eq!((full.stats.overflow, full.stats.misses, full.stats.hits), (1, 2, 1));
    assert_eq!(map.advance(2).unwrap(), []);
    let gone = [IdRow { id: 10, row: 0 }, IdRow { id: 12, row: 2 }];
    assert_eq!(map.advance(3).unwrap(), gone);
    let again = map.resolve(&[14, 13, 12, 12], 3, true).unwrap();
    assert_eq!(again.rows, [IdMap::NONE, 2, 0, 0]);
    assert_eq!(again.admitted, [IdRow { id: 12, row: 0 }, IdRow { id: 13, row: 2 }]);
    assert_eq!(again.stats.overflow, 1);
}

#[test]
fn a_batch_larger_than_the_table_overflows_and_evicts_none_of_its_own() {
    let eviction = Eviction::Lru;
    let options = IdMapOptions { capacity: 4, admission: Admission::Always, eviction, seed: 0 };
    let mut map = IdMap::new(options).unwrap();
    map.resolve(&[1, 2, 3, 4], 1, true).unwrap();
    let resolved = map.resolve(&[9, 2, 8, 7, 6, 5, 2], 2, true).unwrap();
    let none = IdMap::NONE;
    assert_eq!(resolved.rows, [none, 1, none, 3, 2, 0, 1]);
    assert_eq!(resolved.evicted.iter().map(|gone| gone.id).collect::<Vec<_>>(), [1, 3, 4]);
    assert_eq!(resolved.stats.overflow, 2);
    // The same step goes on: nothing seen in it goes.
    let more = map.resolve(&[1, 3], 2, true).unwrap();
    assert_eq!((more.rows, more.stats.overflow), (vec![none, none], 2));
}

#[test]
fn lookups_from_several_threads_agree() {
    let eviction = Eviction::None;
    let options =
        IdMapOptions { capacity: 10_000, admission: Admission::Always, eviction, seed: 0 };
    let mut map = IdMap::new(options).unwrap();
    let ids: Vec<u64> = (0..20_000).map(|i| i * 3).collect();
    let resolved = map.resolve(&ids, 1, true).unwrap();
    assert_eq!(resolved.stats.overflow, 10_000);
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let mut rows = vec![0; ids.len()];
                map.find(&ids, &mut rows);
                assert_eq!(rows, resolved.rows);
            });
        }
    });
}
