//! Each operation of [`LookupOps`] on both devices, with all that it can be asked: every bit that a
//! GPU gives is the CPU's.

use std::sync::Arc;

use tessera_cache::{Plane, Resident, RowLayout, RowStore};
use tessera_data::Jagged;
use tessera_device::Philox;
use tessera_embedding::{
    BadIdPolicy, Clip, EmbeddingCollection, FeatureSpec, HostLookup, Init, LookupOps, Marked,
    Pooling, Precision, Reach, Schema, SparseOptimizer, SparseStep, Stores, TableSpec, UpdateStats,
    WeightDecay,
};

use crate::common::{every_optimizer, feature, jagged, table};
use crate::devices;

/// Numbers drawn one after another from a seed.
struct Draw(Philox, u64);

impl Draw {
    fn new(seed: u64) -> Self {
        Self(Philox::new(seed), 0)
    }
    fn word(&mut self) -> u32 {
        self.1 += 1;
        self.0.block(self.1, 0)[0]
    }
    fn below(&mut self, limit: usize) -> usize {
        self.word() as usize % limit
    }
    /// From -1 to 1, now and then a zero of either sign.
    fn number(&mut self) -> f32 {
        match self.below(12) {
            0 => 0.0,
            1 => -0.0,
            _ => 2.0 * Philox::unit(self.word()) - 1.0,
        }
    }
}

/// Tables and one batch of each step.
struct Case {
    tables: Vec<TableSpec>,
    features: Vec<FeatureSpec>,
    stride: usize,
    bags: usize,
    batches: Vec<Vec<Jagged>>,
    grads: Vec<Vec<f32>>, // (bags, stride)
    clips: Vec<Clip>,
    /// Whether rows of the tables are numbered, and lie at other slots than their own.
    numbered: bool,
}

impl Case {
    /// Tables with `features` features each, whose columns lie one after another; `aligned` to 4
    /// columns or with one column between them.
    fn new(tables: Vec<TableSpec>, features: usize, bags: usize, aligned: bool) -> Self {
        let mut specs = Vec::new();
        let mut column = usize::from(!aligned);
        for (i, table) in tables.iter().enumerate() {
            for part in 0..features {
                specs.push(feature(&format!("f{i}.{part}"), i, column));
                column += table.dim + usize::from(!aligned);
                if aligned {
                    column = column.next_multiple_of(4);
                }
            }
        }
        // Features of a table need not be neighbours.
        specs.reverse();
        Self {
            tables,
            features: specs,
            stride: column,
            bags,
            batches: Vec::new(),
            grads: Vec::new(),
            clips: Vec::new(),
            numbered: false,
        }
    }

    /// Adds a step whose bags have up to `ids` ids.
    fn step(&mut self, draw: &mut Draw, ids: usize, clip: Clip) {
        let mut batch = Vec::new();
        for (i, feature) in self.features.iter().enumerate() {
            let spec = &self.tables[feature.table];
            let (mut offsets, mut rows, mut weights) = (vec![0], Vec::new(), Vec::new());
            for _ in 0..self.bags {
                for _ in 0..draw.below(ids + 1) {
                    // Some rows occur often.
                    let among = if draw.below(3) == 0 { 1 + spec.rows / 7 } else { spec.rows };
                    rows.push(draw.below(among.min(spec.rows) as usize) as i64);
                    weights.push(draw.number());
                }
                offsets.push(rows.len() as u64);
            }
            let weighted = spec.pooling == Pooling::Sum && i % 3 != 0;
            batch.push(jagged(&offsets, &rows, weighted.then_some(&weights[..])));
        }
        self.batches.push(batch);
        self.grads.push((0..self.bags * self.stride).map(|_| draw.number()).collect());
        self.clips.push(clip);
    }
}

/// What a run gave, each thing with its name.
type Trace = Vec<(String, Vec<u8>)>;

struct Run<'a, D: LookupOps> {
    device: &'a D,
    stream: D::Stream,
    schema: Arc<Schema>,
    stores: Vec<Box<dyn RowStore<D>>>,
    trace: Trace,
}

impl<D: LookupOps> Run<'_, D> {
    fn note<T: bytemuck::Pod>(&mut self, what: String, values: &[T]) {
        self.trace.push((what, bytemuck::cast_slice(values).to_vec()));
    }

    fn note_stats(&mut self, what: String, stats: &UpdateStats) {
        self.note(format!("{what}: rows updated"), &stats.rows_updated);
        self.note(format!("{what}: rows not finite"), &stats.rows_nonfinite);
    }

    fn note_tables(&mut self, what: &str) {
        for table in 0..self.stores.len() {
            for plane in [Plane::Weights, Plane::State] {
                let store = &self.stores[table];
                let mut bytes = vec![0; store.rows() as usize * store.layout().row_bytes(plane)];
                let rows = 0..store.rows();
                store.read(self.device, &self.stream, plane, rows, &mut bytes).unwrap();
                self.note(format!("{what}: {plane:?} of table {table}"), &bytes);
            }
        }
    }

    fn buffer(&self, values: &[f32]) -> D::Buffer<f32> {
        let mut buffer = self.device.alloc(values.len()).unwrap();
        self.device.upload(&self.stream, values, &mut buffer, 0).unwrap();
        buffer
    }

    /// All that can be done with one batch.
    fn step(&mut self, case: &Case, host: HostLookup, t: u64) {
        let (device, tables) = (self.device, self.stores.len());
        let what = |name: &str| format!("step {t}: {name}");
        let mut host = host;
        let numbers: Vec<u64> = if case.numbered {
            device.number_rows(&self.schema, &vec![true; tables], &mut host);
            host.numbered.iter().map(|rows| rows.as_ref().unwrap().len() as u64).collect()
        } else {
            case.tables.iter().map(|table| table.rows).collect()
        };
        // A number's slot: the last slots, backwards.
        let slots: Vec<Vec<u64>> = numbers
            .iter()
            .zip(&case.tables)
            .map(|(&numbers, table)| (0..numbers).map(|n| table.rows - 1 - n).collect())
            .collect();
        let reach = |part: &dyn Fn(u64) -> std::ops::Range<u64>| -> Vec<Reach<'_>> {
            let with = numbers.iter().zip(&slots);
            with.map(|(&end, slots)| Reach {
                slots: case.numbered.then_some(&slots[..]),
                rows: part(end),
            })
            .collect()
        };
        let all = reach(&|end| 0..end);
        let scratch = Arc::new(D::Scratch::default());
        let lookup = device.stage(&self.stream, &self.schema, &scratch, host).unwrap();
        if t.is_multiple_of(2) {
            device.group(&self.stream, &lookup).unwrap();
        }

        let stride = case.stride;
        let mut out = self.buffer(&vec![7.5; case.bags * stride]);
        let cut = case.bags / 3;
        for bags in [cut..case.bags, 0..cut] {
            let (stores, out) = (&self.stores, &mut out);
            device.forward(&self.stream, stores, &all, &lookup, bags, out, stride).unwrap();
        }
        let mut pooled = vec![0.0f32; case.bags * stride];
        device.download(&self.stream, &out, 0, &mut pooled).unwrap();
        self.note(what("pooled"), &pooled);

        let counts = device.unique_counts(&self.stream, &lookup).unwrap();
        self.note(what("different rows"), &counts);
        for (table, &count) in counts.iter().enumerate() {
            let rows = device.unique_rows(&self.stream, &lookup, table).unwrap();
            assert_eq!(rows.len() as u64, count);
            self.note(what("rows"), &rows);
            if case.numbered {
                let some = device.numbers_of(&self.stream, &lookup, table, cut..case.bags).unwrap();
                self.note(what("numbers"), &some);
            }
        }

        let step = SparseStep { t, lr_scale: 0.75, clip: case.clips[t as usize - 1] };
        let grad = self.buffer(&case.grads[t as usize - 1]);
        let norm = device.grad_sq_norm(&self.stream, &lookup, &grad, stride).unwrap();
        self.note(what("squared norm"), &[norm]);
        let all_rows = counts.iter().sum::<u64>() as usize;
        let sizes = counts.iter().zip(&case.tables).map(|(&rows, table)| rows as usize * table.dim);
        let length = sizes.sum();
        let marks: Vec<u8> = (0..all_rows).map(|i| (i % 3) as u8).collect();
        for marked in [Marked::All, Marked::With { marks: &marks, mark: 1 }] {
            let mut sums = vec![f32::NAN; length];
            device.row_gradients(&self.stream, &lookup, &grad, stride, marked, &mut sums).unwrap();
            self.note(what("gradients"), &sums);
        }
        if tables == 1 {
            let blocks = case.tables[0].dim.div_ceil(32);
            let mut squares = vec![-1.0f32; all_rows * blocks];
            let some = reach(&|end| end / 4..end - end / 4);
            let (stream, out) = (&self.stream, &mut squares);
            let stores: &Stores<D> = &self.stores;
            device
                .block_squares(stream, stores, &some, &lookup, &grad, stride, &step, out)
                .unwrap();
            self.note(what("sums of squares"), &squares);
        }
        // Sums that are given, as for tables cut by columns, and sums of its own.
        let given: Vec<f32> = match t % 3 {
            0 => (0..all_rows).map(|i| 0.1 + i as f32).collect(),
            _ => Vec::new(),
        };
        for part in [reach(&|end| 0..end / 2), reach(&|end| end / 2..end)] {
            let (stream, stores) = (&self.stream, &mut self.stores);
            let stats = device
                .update(stream, stores, &part, &lookup, &grad, stride, &step, &given)
                .unwrap();
            self.note_stats(what("update"), &stats);
        }
        self.note_tables(&what("after"));
    }
}

fn trace<D: LookupOps>(device: &D, case: &Case) -> Trace {
    let stream = device.stream().unwrap();
    let (tables, features) = (case.tables.clone(), case.features.clone());
    // For its schema and its checks of ids.
    let checker = EmbeddingCollection::new(device.clone(), &stream, tables, features, 9).unwrap();
    let schema = Arc::clone(checker.schema());
    let stores = case.tables.iter().enumerate().map(|(index, table)| {
        let layout = RowLayout {
            weight_bytes: table.dim * table.precision.bytes(),
            state_bytes: table.optimizer.state_columns(table.dim) * 4,
        };
        let mut store = Resident::new(device, table.rows, layout).unwrap();
        device.initialize(&stream, &schema, index, &mut store).unwrap();
        Box::new(store) as Box<dyn RowStore<D>>
    });
    let stores = stores.collect();
    let mut run = Run { device, stream, schema, stores, trace: Vec::new() };
    run.note_tables("first");
    for (batch, t) in case.batches.iter().zip(1..) {
        let host = checker.resolver().check(batch.clone(), BadIdPolicy::Error).unwrap();
        run.step(case, host, t);
    }
    run.trace
}

/// Runs a case on both devices.
#[track_caller]
fn check(case: &Case) {
    let Some((cpu, cuda)) = devices() else { return };
    let (ours, wanted) = (trace(&cuda, case), trace(&cpu, case));
    assert_eq!(ours.len(), wanted.len());
    for ((what, ours), (_, wanted)) in ours.iter().zip(&wanted) {
        if ours != wanted {
            let at = ours.iter().zip(wanted).position(|(a, b)| a != b);
            let values = |bytes: &[u8]| {
                let at = at.unwrap_or(0) / 4 * 4;
                let bytes: [u8; 4] = bytes[at..at + 4].try_into().unwrap();
                (f32::from_ne_bytes(bytes), u32::from_ne_bytes(bytes))
            };
            let (ours, wanted) = (values(ours), values(wanted));
            panic!("{what} differs at byte {at:?}: {ours:?}, on the CPU {wanted:?}");
        }
    }
}

const PRECISIONS: [Precision; 3] = [Precision::Fp32, Precision::Fp16, Precision::Bf16];

/// Tables of every optimizer, of all precisions and poolings and the dims given.
fn tables(dims: &[usize]) -> Vec<TableSpec> {
    let every = every_optimizer().into_iter().enumerate();
    every
        .map(|(i, optimizer)| {
            let mut spec =
                table(&format!("t{i}"), 6 + 3 * i as u64, dims[i % dims.len()], optimizer);
            spec.precision = PRECISIONS[i % 3];
            spec.pooling = if i % 4 == 3 { Pooling::Mean } else { Pooling::Sum };
            spec
        })
        .collect()
}

#[test]
fn every_optimizer_precision_and_pooling() {
    for (seed, aligned) in [(1, true), (2, false)] {
        for dims in [&[4, 16, 32, 8][..], &[12, 1, 33, 64, 17], &[128, 36, 100, 7]] {
            let draw = &mut Draw::new(seed);
            let mut case = Case::new(tables(dims), 1 + seed as usize % 2, 7, aligned);
            for clip in [Clip::None, Clip::Value(0.5), Clip::Scale(0.25)] {
                case.step(draw, 4, clip);
            }
            case.numbered = seed == 2;
            check(&case);
        }
    }
}

/// Rows wider than a team takes at once: 128 columns in vectors, 32 else.
#[test]
fn wide_rows() {
    for dim in [132, 260, 161] {
        let draw = &mut Draw::new(dim as u64);
        let mut case = Case::new(tables(&[dim]), 1, 4, true);
        for clip in [Clip::None, Clip::Value(0.25), Clip::None] {
            case.step(draw, 3, clip);
        }
        check(&case);
    }
}

/// One table is what a rectangle of a sharded one is: its sums of squares are asked for.
#[test]
fn sums_of_squares_of_one_table() {
    let (lr, eps, moment_scale) = (0.05, 1e-8, 1.0);
    for (dim, numbered) in [(32, false), (70, true), (160, false), (5, true)] {
        for precision in [PRECISIONS[dim % 3], PRECISIONS[(dim + 1) % 3]] {
            for decay in [WeightDecay::None, WeightDecay::L2(0.1)] {
                let optimizer = SparseOptimizer::RowwiseAdagrad { lr, eps, decay, moment_scale };
                let mut spec = table("t", 12, dim, optimizer);
                spec.precision = precision;
                let mut case = Case::new(vec![spec], 2, 3, true);
                case.numbered = numbered;
                let draw = &mut Draw::new(dim as u64);
                for clip in [Clip::Value(0.5), Clip::Scale(2.0), Clip::None] {
                    case.step(draw, 3, clip);
                }
                check(&case);
            }
        }
    }
}

/// Rows that nearly all bags have are summed by other kernels, in the same order.
#[test]
fn rows_with_very_many_occurrences() {
    let optimizer = every_optimizer().remove(2);
    for (dim, pooling) in [(40, Pooling::Sum), (7, Pooling::Mean), (4, Pooling::Sum)] {
        let mut spec = table("hot", 3, dim, optimizer);
        spec.pooling = pooling;
        let other = table("other", 50, 8, SparseOptimizer::Sgd { lr: 0.1 });
        let mut case = Case::new(vec![other, spec], 2, 450, true);
        let draw = &mut Draw::new(5);
        case.step(draw, 2, Clip::None);
        case.step(draw, 2, Clip::Value(3.0));
        check(&case);
    }
}

/// Several tiles of ids and several digits of keys.
#[test]
fn many_ids_of_many_rows() {
    let mut large = table("large", 70_000, 2, SparseOptimizer::Sgd { lr: 0.1 });
    large.precision = Precision::Bf16;
    let small = table("small", 300, 4, every_optimizer().remove(2));
    let mut case = Case::new(vec![large, small], 1, 1500, false);
    case.step(&mut Draw::new(6), 4, Clip::None);
    check(&case);
}

/// Batches without bags, bags without ids, and tables that no feature, or no id, reads.
#[test]
fn nothing_to_do() {
    for bags in [0, 3] {
        let mut tables = tables(&[3, 8]);
        tables[0].rows = 0;
        let mut case = Case::new(tables, 1, bags, true);
        case.features.retain(|feature| feature.table != 4);
        case.step(&mut Draw::new(7), 0, Clip::None);
        check(&case);
    }
}

/// First values: each distribution and precision, from subnormal float16 numbers to infinity.
#[test]
fn first_values() {
    for precision in PRECISIONS {
        let inits = [
            Init::Uniform { scale: None },
            Init::Uniform { scale: Some(3e-5) },
            Init::Uniform { scale: Some(1e-6) },
            Init::Uniform { scale: Some(1e5) },
            Init::Normal { std: 0.5 },
            Init::Zero,
        ];
        let of_init = inits.into_iter().enumerate().map(|(i, init)| {
            let sgd = SparseOptimizer::Sgd { lr: 0.1 };
            TableSpec { precision, init, ..table(&format!("t{i}"), 40 + i as u64, 5 + i, sgd) }
        });
        check(&Case::new(of_init.collect(), 1, 1, true));
    }
}

/// Numbers that are not finite, in a gradient, in what would be written, and beyond 16 bits.
#[test]
fn what_is_not_finite_is_not_written() {
    for bad in [f32::NAN, f32::INFINITY, 1e30, 7e4] {
        let mut case = Case::new(tables(&[12, 5, 140]), 1, 6, true);
        let draw = &mut Draw::new(8);
        for clip in [Clip::None, Clip::Value(1.0), Clip::Scale(1e4)] {
            case.step(draw, 3, clip);
        }
        for grad in &mut case.grads {
            for at in 0..grad.len() / 40 {
                grad[at * 40 + at % 40] = bad;
            }
        }
        check_but_for_nan(&case);
    }
}

/// As [`check`], where sums may be NaN: which NaN is not said by IEEE.
fn check_but_for_nan(case: &Case) {
    let Some((cpu, cuda)) = devices() else { return };
    for ((what, ours), (_, wanted)) in trace(&cuda, case).iter().zip(&trace(&cpu, case)) {
        let same = match ours.len().is_multiple_of(4) && what.contains("gradients") {
            true => ours.chunks(4).zip(wanted.chunks(4)).all(|(a, b)| {
                let float = |bytes: &[u8]| f32::from_ne_bytes(bytes.try_into().unwrap());
                a == b || float(a).is_nan() && float(b).is_nan()
            }),
            false if what.contains("norm") => {
                let float = |bytes: &[u8]| f64::from_ne_bytes(bytes.try_into().unwrap());
                ours == wanted || float(ours).is_nan() && float(wanted).is_nan()
            }
            false => ours == wanted,
        };
        assert!(same, "{what}");
    }
}

/// At a rate of 0 FTRL stays, and still sees a gradient that is not finite.
#[test]
fn a_rule_that_stays() {
    let ftrl = SparseOptimizer::Ftrl { lr: 0.0, beta: 1.0, l1: 0.0, l2: 0.0 };
    let mut spec = table("t", 9, 6, ftrl);
    spec.precision = Precision::Fp16;
    let mut case = Case::new(vec![spec], 1, 6, true);
    case.step(&mut Draw::new(9), 2, Clip::None);
    case.grads[0][8] = f32::INFINITY;
    check_but_for_nan(&case);
}

/// A row so wide that not even one warp's gradient fits shared memory.
#[test]
fn a_row_wider_than_shared_memory() {
    let dim = 60_004;
    let spec = table("t", 2, dim, every_optimizer().remove(3));
    let mut case = Case::new(vec![spec], 1, 2, true);
    case.step(&mut Draw::new(10), 2, Clip::None);
    check(&case);
}
