//! Tables of any ids against a hash map of rows, each moved by a plain optimizer. Which ids have a
//! row is asked of an [`IdMap`], which has tests of its own.

use std::collections::HashMap;
use std::sync::Arc;

use tessera_cache::{Admission, Eviction, IdMap, IdMapOptions, Policy, SketchShape};
use tessera_data::Jagged;
use tessera_device::{Cpu, Device, HostBuffer, Philox};
use tessera_embedding::{
    BadIdPolicy, Clip, EmbeddingCollection, Init, Lookup, SparseOptimizer, SparseStep, TableKind,
    TableSpec, Tiers, WeightDecay,
};

use crate::common::{any_cpu, buffer, feature, jagged, one_hot, stream, table};

const SEED: u64 = 5;
const DIM: usize = 6;
const EPS: f32 = 1e-6;
const LR: f32 = 0.25;

fn sgd() -> SparseOptimizer {
    SparseOptimizer::Sgd { lr: LR.into() }
}

fn rowwise() -> SparseOptimizer {
    let decay = WeightDecay::None;
    SparseOptimizer::RowwiseAdagrad { lr: LR.into(), eps: EPS.into(), decay, moment_scale: 1.0 }
}

fn dynamic(rows: u64, optimizer: SparseOptimizer, kind: (Admission, Eviction)) -> TableSpec {
    let (admission, eviction) = kind;
    TableSpec {
        kind: TableKind::Dynamic { admission, eviction },
        init: Init::Uniform { scale: None },
        ..table("t", rows, DIM, optimizer)
    }
}

fn step(t: u64) -> SparseStep {
    SparseStep { t, lr_scale: 1.0, clip: Clip::None }
}

/// The first values of an id: a function of (seed, table, id), wherever its row is.
fn first_values(rows: u64, id: u64) -> Vec<f32> {
    let generator = Philox::for_name(SEED, "t");
    let scale = (1.0 / (rows as f64).sqrt()) as f32;
    let unit = |c: usize| Philox::unit(generator.block(id, c as u64 / 4)[c % 4]);
    (0..DIM).map(|c| (2.0 * unit(c) - 1.0) * scale).collect()
}

/// A row of the model: weights and the sum of squares of row-wise AdaGrad.
#[derive(Clone, Debug, PartialEq)]
struct Known {
    w: Vec<f32>,
    sum: f32,
}

struct Model {
    map: IdMap,
    rows: HashMap<u64, Known>,
    adagrad: bool,
}

impl Model {
    fn new(spec: &TableSpec) -> Self {
        let TableKind::Dynamic { admission, eviction } = spec.kind else { panic!("dynamic") };
        let options = IdMapOptions { capacity: spec.rows, admission, eviction, seed: SEED };
        let map = IdMap::new(options).unwrap();
        let adagrad = matches!(spec.optimizer, SparseOptimizer::RowwiseAdagrad { .. });
        Self { map, rows: HashMap::new(), adagrad }
    }

    fn admit(&mut self, features: &[Jagged], step: u64) {
        let capacity = self.map.options().capacity;
        for gone in self.map.advance(step).unwrap() {
            self.rows.remove(&gone.id);
        }
        let ids: Vec<u64> = features.iter().flat_map(Jagged::ids).map(|id| id.0 as u64).collect();
        let resolved = self.map.resolve(&ids, step, true).unwrap();
        for gone in resolved.evicted {
            self.rows.remove(&gone.id);
        }
        for new in resolved.admitted {
            let known = Known { w: first_values(capacity, new.id), sum: 0.0 };
            assert_eq!(self.rows.insert(new.id, known), None);
        }
    }

    fn pool(&self, features: &[Jagged]) -> Vec<f32> {
        let bags = features[0].bags();
        let mut out = vec![0.0; bags * features.len() * DIM];
        for (f, feature) in features.iter().enumerate() {
            for bag in 0..bags {
                let to = &mut out[(bag * features.len() + f) * DIM..][..DIM];
                for id in feature.bag(bag) {
                    if let Some(known) = self.rows.get(&(id.0 as u64)) {
                        to.iter_mut().zip(&known.w).for_each(|(to, w)| *to += w);
                    }
                }
            }
        }
        out
    }

    fn update(&mut self, features: &[Jagged], grad: &[f32]) {
        let mut sums: HashMap<u64, Vec<f32>> = HashMap::new();
        for (f, feature) in features.iter().enumerate() {
            for bag in 0..feature.bags() {
                let g = &grad[(bag * features.len() + f) * DIM..][..DIM];
                for id in feature.bag(bag) {
                    let sum = sums.entry(id.0 as u64).or_insert_with(|| vec![0.0; DIM]);
                    sum.iter_mut().zip(g).for_each(|(sum, g)| *sum += g);
                }
            }
        }
        for (id, g) in sums {
            let Some(known) = self.rows.get_mut(&id) else { continue };
            let mut lr = LR;
            if self.adagrad {
                known.sum += g.iter().map(|g| g * g).sum::<f32>() / DIM as f32;
                lr = LR / (known.sum.sqrt() + EPS);
            }
            known.w.iter_mut().zip(&g).for_each(|(w, g)| *w -= lr * g);
        }
    }
}

/// A dynamic table of two features.
struct Ours {
    tables: EmbeddingCollection<Cpu>,
    stream: <Cpu as Device>::Stream,
}

impl Ours {
    fn new(spec: &TableSpec, tiers: Option<&Tiers>) -> Self {
        let cpu = any_cpu();
        let stream = stream(&cpu);
        let features = vec![feature("a", 0, 0), feature("b", 0, DIM)];
        let tables = vec![spec.clone()];
        let tables =
            EmbeddingCollection::with_tiers(cpu, &stream, tables, features, SEED, tiers).unwrap();
        Self { tables, stream }
    }

    fn route(&self, features: &[Jagged], step: u64) -> Lookup<Cpu> {
        let resolver = self.tables.resolver();
        let batch = resolver.check(features.to_vec(), BadIdPolicy::Error).unwrap();
        resolver.route(&self.stream, batch.at_step(step)).unwrap()
    }

    fn pool(&mut self, lookup: &mut Lookup<Cpu>) -> Vec<f32> {
        let mut out = HostBuffer::zeroed(lookup.bags() * 2 * DIM).unwrap();
        self.tables.forward(&self.stream, lookup, &mut out, 2 * DIM).unwrap();
        out.to_vec()
    }

    /// What an evaluation sees.
    fn evaluate(&mut self, features: &[Jagged]) -> Vec<f32> {
        let mut lookup =
            self.tables.resolve(&self.stream, features.to_vec(), BadIdPolicy::Error).unwrap();
        self.pool(&mut lookup)
    }

    fn train(&mut self, features: &[Jagged], grad: &[f32], t: u64) -> Vec<f32> {
        let mut lookup = self.route(features, t);
        let pooled = self.pool(&mut lookup);
        let grad = buffer(grad);
        self.tables.update(&self.stream, &lookup, &grad, 2 * DIM, &step(t)).unwrap();
        pooled
    }

    /// Weights and states by id.
    fn rows(&self) -> HashMap<u64, Known> {
        let state = self.tables.id_state(0).unwrap();
        let mut weights = vec![0u8; state.rows.len() * DIM * 4];
        self.tables.read_weights_of(&self.stream, 0, &state.rows, &mut weights).unwrap();
        let weights: Vec<f32> =
            weights.as_chunks().0.iter().map(|bytes| f32::from_ne_bytes(*bytes)).collect();
        let mut sums = vec![0.0; state.rows.len()];
        let spec = &self.tables.schema().tables()[0];
        if spec.optimizer != sgd() {
            self.tables.read_state_of(&self.stream, 0, "sum", &state.rows, &mut sums).unwrap();
        }
        let rows = weights.chunks_exact(DIM).zip(sums);
        state.ids.into_iter().zip(rows.map(|(w, sum)| Known { w: w.to_vec(), sum })).collect()
    }
}

struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Ids all over the 64 bits, hot ones and rare ones.
    fn id(&mut self) -> i64 {
        let odd = [0, u64::MAX, u64::MAX - 1, 1 << 63];
        let id = match self.next() % 8 {
            0 => odd[self.next() as usize % odd.len()],
            1..5 => (self.next() % 12).wrapping_mul(0x9E37_79B9_7F4A_7C15),
            _ => (self.next() % 200).wrapping_mul(0xD1B5_4A32_D192_ED03),
        };
        id as i64
    }

    fn feature(&mut self, bags: usize) -> Jagged {
        let (mut offsets, mut ids) = (vec![0], Vec::new());
        for _ in 0..bags {
            (0..self.next() % 4).for_each(|_| ids.push(self.id()));
            offsets.push(ids.len() as u64);
        }
        jagged(&offsets, &ids, None)
    }

    fn grad(&mut self, numbers: usize) -> Vec<f32> {
        (0..numbers).map(|_| (self.next() % 2001) as f32 * 1e-3 - 1.0).collect()
    }
}

fn close(what: &str, ours: &[f32], wanted: &[f32]) {
    assert_eq!(ours.len(), wanted.len(), "{what}");
    for (i, (a, b)) in ours.iter().zip(wanted).enumerate() {
        assert!((a - b).abs() <= 1e-5 + 1e-5 * b.abs(), "{what} [{i}]: {a}, wanted {b}");
    }
}

fn kinds() -> Vec<(Admission, Eviction)> {
    let sketch = SketchShape { width: 1 << 14, depth: 4 };
    let count = Admission::Count { n: 2, sketch, halve_every_sightings: 0 };
    vec![
        (Admission::Always, Eviction::None),
        (Admission::Always, Eviction::Lru),
        (Admission::Always, Eviction::Age { steps: 2 }),
        (count, Eviction::Lfu { halve_every_steps: 5 }),
        (Admission::Probability { p: 0.4 }, Eviction::Lru),
    ]
}

#[test]
fn every_policy_trains_as_a_hash_map_of_rows_does() {
    for (number, kind) in kinds().into_iter().enumerate() {
        for (rows, optimizer) in [(20, sgd()), (40, rowwise()), (1000, rowwise())] {
            let what = format!("{kind:?}, {rows} rows, {}", optimizer.name());
            let spec = dynamic(rows, optimizer, kind);
            let (mut model, mut ours) = (Model::new(&spec), Ours::new(&spec, None));
            // A device tier of a few rows, so that batches work in passes too.
            let tiers =
                Tiers { device_bytes: 12 * 80, host_bytes: None, cold: None, policy: Policy::Lru };
            let mut tiered = Ours::new(&spec, Some(&tiers));
            let mut draws = Draws(number as u64);
            for t in 1..=30 {
                let features = [draws.feature(8), draws.feature(8)];
                let grad = draws.grad(8 * 2 * DIM);
                model.admit(&features, t);
                let wanted = model.pool(&features);
                let pooled = ours.train(&features, &grad, t);
                close(&format!("{what}: pooled at step {t}"), &pooled, &wanted);
                model.update(&features, &grad);
                assert!(tiered.train(&features, &grad, t) == pooled, "{what}: tiers at step {t}");
                // An evaluation finds what is there and changes nothing.
                let other = [draws.feature(5), draws.feature(5)];
                let (before, seen) = (ours.rows(), ours.evaluate(&other));
                close(&format!("{what}: evaluation {t}"), &seen, &model.pool(&other));
                assert!(ours.rows() == before && tiered.evaluate(&other) == seen, "{what}");
            }
            let rows = ours.rows();
            assert_eq!(rows.len(), model.rows.len(), "{what}");
            assert!(!rows.is_empty() && rows.len() as u64 <= spec.rows, "{what}");
            for (id, known) in &rows {
                close(&format!("{what}: id {id}"), &known.w, &model.rows[id].w);
                close(&format!("{what}: sum of {id}"), &[known.sum], &[model.rows[id].sum]);
            }
            assert!(tiered.rows() == rows, "{what}: rows in tiers");
        }
    }
}

/// A peer's tables were all zeros, or kept the state of whoever had the row before.
#[test]
fn a_row_that_goes_to_another_id_has_first_values_and_no_state() {
    let spec = dynamic(1, rowwise(), (Admission::Always, Eviction::Lru));
    let mut ours = Ours::new(&spec, None);
    let (five, nine) = ([one_hot(&[5]), one_hot(&[5])], [one_hot(&[9]), one_hot(&[9])]);
    for t in 1..4 {
        ours.train(&five, &[1.0; 2 * DIM], t);
    }
    assert!(ours.rows()[&5].sum > 1.0);
    let mut lookup = ours.route(&nine, 4);
    let pooled = ours.pool(&mut lookup);
    assert_eq!(pooled[..DIM], first_values(1, 9));
    assert_eq!(ours.rows(), HashMap::from([(9, Known { w: first_values(1, 9), sum: 0.0 })]));
    let stats = lookup.id_stats(0).unwrap();
    assert_eq!((stats.admitted, stats.evicted, stats.occupancy), (1, 1, 1));
    // The id that lost its row is nobody, and comes back as if it were new.
    assert_eq!(ours.evaluate(&five), [0.0; 2 * DIM]);
    let mut lookup = ours.route(&five, 5);
    assert_eq!(ours.pool(&mut lookup)[DIM..], first_values(1, 5));
}

/// A batch may be routed while the one before has still to move its rows.
#[test]
fn routing_ahead_changes_no_bit() {
    let spec = dynamic(9, rowwise(), (Admission::Always, Eviction::Lru));
    let (mut ahead, mut ours) = (Ours::new(&spec, None), Ours::new(&spec, None));
    let mut draws = Draws(77);
    let batches: Vec<_> =
        (0..20).map(|_| ([draws.feature(4), draws.feature(4)], draws.grad(8 * DIM))).collect();
    let mut next = ahead.route(&batches[0].0, 1);
    for (t, (features, grad)) in (1..).zip(&batches) {
        let mut lookup = next;
        let pooled = ahead.pool(&mut lookup);
        next = match batches.get(t as usize) {
            Some((features, _)) => ahead.route(features, t + 1),
            None => ahead.route(features, t + 1),
        };
        ahead.tables.update(&ahead.stream, &lookup, &buffer(grad), 2 * DIM, &step(t)).unwrap();
        assert_eq!(pooled, ours.train(features, grad, t), "step {t}");
    }
}

/// Ids without a row are zeros that nothing moves and no norm counts.
#[test]
fn ids_without_a_row_are_zeros_and_stay_so() {
    let (rows, kind) = (2, (Admission::Always, Eviction::None));
    for tiers in [
        None,
        Some(Tiers { device_bytes: 4096, host_bytes: None, cold: None, policy: Policy::Lru }),
    ] {
        let spec = dynamic(rows, sgd(), kind);
        let mut ours = Ours::new(&spec, tiers.as_ref());
        let empty = jagged(&[0, 0, 0, 0], &[], None);
        let features = [one_hot(&[3, 7, 8]), empty.clone()];
        let grad = vec![1.0; 3 * 2 * DIM];
        let mut lookup = ours.route(&features, 1);
        let pooled = ours.pool(&mut lookup);
        assert_eq!(pooled[2 * 2 * DIM..][..DIM], [0.0; DIM]);
        assert_eq!(lookup.id_stats(0).unwrap().overflow, 1);
        let norm =
            ours.tables.grad_sq_norm(&ours.stream, &lookup, &buffer(&grad), 2 * DIM).unwrap();
        assert_eq!(norm, 2.0 * DIM as f64);
        let moved =
            ours.tables.update(&ours.stream, &lookup, &buffer(&grad), 2 * DIM, &step(1)).unwrap();
        assert_eq!(moved.rows_updated, [2]);
        let unknown = [one_hot(&[8, -1, i64::MIN]), empty];
        assert_eq!(ours.evaluate(&unknown), [0.0; 3 * 2 * DIM]);
    }
    // A mean divides by all ids.
    let spec = TableSpec { pooling: tessera_embedding::Pooling::Mean, ..dynamic(1, sgd(), kind) };
    let mut ours = Ours::new(&spec, None);
    let features = [jagged(&[0, 2], &[1, 2], None), jagged(&[0, 0], &[], None)];
    let mut lookup = ours.route(&features, 1);
    let half: Vec<f32> = first_values(1, 1).iter().map(|x| x * 0.5).collect();
    assert_eq!(ours.pool(&mut lookup)[..DIM], half);
}

#[test]
fn what_cannot_be_is_refused() {
    let cpu = any_cpu();
    let stream = stream(&cpu);
    let kind = (
        Admission::Count {
            n: 0,
            sketch: SketchShape { width: 1, depth: 1 },
            halve_every_sightings: 0,
        },
        Eviction::None,
    );
    for (spec, part) in [
        (dynamic(0, sgd(), (Admission::Always, Eviction::Lru)), "a dynamic table of 0 rows"),
        (dynamic(3, sgd(), kind), "admission n is 0"),
    ] {
        let features = vec![feature("a", 0, 0)];
        let made = EmbeddingCollection::new(cpu.clone(), &stream, vec![spec], features, 1);
        let error: Arc<dyn std::error::Error> = Arc::new(made.unwrap_err());
        let text = std::iter::successors(Some(&*error), |error| error.source());
        let text = text.map(ToString::to_string).collect::<Vec<_>>().join(": ");
        assert!(text.contains(part), "{text}");
    }
    // Batches come in the order of their steps.
    let spec = dynamic(4, sgd(), (Admission::Always, Eviction::Lru));
    let ours = Ours::new(&spec, None);
    let features = vec![one_hot(&[1]), one_hot(&[2])];
    drop(ours.route(&features, 5));
    let resolver = ours.tables.resolver();
    let batch = resolver.check(features, BadIdPolicy::Error).unwrap();
    let error = resolver.route(&ours.stream, batch.at_step(4)).unwrap_err();
    assert!(format!("{error:?}").contains("IdMapStep { step: 4, last: 5 }"), "{error:?}");
}
