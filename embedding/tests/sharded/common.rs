//! Cases, plans and what runs leave.

use std::num::NonZeroUsize;
use std::ops::Range;

use tessera_comm::{Codec, Options, threads};
use tessera_data::{Jagged, RawId};
use tessera_device::{Cpu, CpuStream, Device};
use tessera_embedding::plan::{Plan, Route, Shard, Sharding, TablePlan, column_cuts, row_cuts};
use tessera_embedding::{
    BadIdPolicy, Clip, EmbeddingCollection, FeatureSpec, Init, Pooling, Precision,
    ShardedCollection, SparseOptimizer, SparseStep, TableKind, TableSpec, Tiers, WeightDecay,
};

pub const SEED: u64 = 11;

/// A small generator for test data.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self, below: u64) -> u64 {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % below
    }
    pub fn number(&mut self) -> f32 {
        self.next(2001) as f32 * 1e-3 - 1.0
    }
}

/// Tables, features and all global batches of a run.
pub struct Case {
    pub tables: Vec<TableSpec>,
    pub features: Vec<FeatureSpec>,
    pub width: usize,
    pub batches: Vec<Vec<Jagged>>,
    pub grads: Vec<Vec<f32>>, // (samples, width)
    /// Whether step 2 clips by value.
    pub clips: bool,
}

pub fn optimizers() -> Vec<SparseOptimizer> {
    let (lr, eps) = (0.05, 1e-6);
    let (beta1, beta2, weight_decay) = (0.9, 0.99, 0.01);
    vec![
        SparseOptimizer::Sgd { lr },
        SparseOptimizer::RowwiseAdagrad { lr, eps, decay: WeightDecay::L2(0.1), moment_scale: 1.0 },
        SparseOptimizer::Adagrad { lr, eps, decay: WeightDecay::Decouple(0.1) },
        SparseOptimizer::Adam { lr, eps, beta1, beta2, weight_decay },
        SparseOptimizer::PartialRowwiseAdam { lr, eps, beta1, beta2, weight_decay },
    ]
}

/// A case whose tables have few rows, several features, ragged and empty bags, and one without a
/// single id; `samples` of each batch.
pub fn case(samples: &[usize], precision: Precision, lengths_max: u64) -> Case {
    let dims = [64, 32, 70, 5, 96, 33];
    let rows = [40, 6, 100, 3, 1, 17];
    let poolings =
        [Pooling::Sum, Pooling::Mean, Pooling::Sum, Pooling::Sum, Pooling::Mean, Pooling::Sum];
    let optimizers = optimizers();
    let tables: Vec<TableSpec> = (0..6)
        .map(|i| TableSpec {
            name: format!("t{i}"),
            kind: TableKind::Static,
            rows: rows[i],
            dim: dims[i],
            precision,
            pooling: poolings[i],
            init: Init::Uniform { scale: Some(0.5) },
            optimizer: optimizers[i % optimizers.len()],
        })
        .collect();
    let mut features = Vec::new();
    let mut width = 0;
    for (name, table) in [("a", 0), ("b", 1), ("c", 2), ("d", 0), ("e", 3), ("f", 4), ("g", 5)] {
        features.push(FeatureSpec { name: name.into(), table, column: width });
        width += dims[table];
    }
    let mut random = Random(7);
    let (mut batches, mut grads) = (Vec::new(), Vec::new());
    for &samples in samples {
        let mut batch = Vec::new();
        for feature in &features {
            let rows = tables[feature.table].rows;
            let (mut offsets, mut ids) = (vec![0u64], Vec::new());
            for _ in 0..samples {
                // Feature g never has an id.
                let length = if feature.name == "g" { 0 } else { random.next(lengths_max + 1) };
                ids.extend((0..length).map(|_| RawId(random.next(rows) as i64)));
                offsets.push(ids.len() as u64);
            }
            let weights =
                (feature.name == "c").then(|| ids.iter().map(|_| random.number()).collect());
            batch.push(Jagged::new(samples, offsets, ids, weights).unwrap());
        }
        batches.push(batch);
        grads.push((0..samples * width).map(|_| random.number()).collect());
    }
    Case { tables, features, width, batches, grads, clips: true }
}

/// What a run leaves: pooled vectors of every batch, then weights and states of all tables.
#[derive(Debug, PartialEq)]
pub struct Outcome {
    pub pooled: Vec<Vec<f32>>,
    pub weights: Vec<Vec<f32>>,
    pub states: Vec<Vec<Vec<f32>>>,
    pub norms: Vec<f64>,
    pub updated: Vec<u64>,
}

pub fn on_one_rank(case: &Case) -> Outcome {
    on_one_rank_with(case, None)
}

/// With rows that move between tiers, where some are given.
pub fn on_one_rank_with(case: &Case, tiers: Option<&Tiers>) -> Outcome {
    let cpu = Cpu::new(NonZeroUsize::new(2)).unwrap();
    let stream = cpu.stream().unwrap();
    let (tables, features, device) = (case.tables.clone(), case.features.clone(), cpu.clone());
    let mut all =
        EmbeddingCollection::with_tiers(device, &stream, tables, features, SEED, tiers).unwrap();
    let mut outcome = Outcome {
        pooled: vec![],
        weights: vec![],
        states: vec![],
        norms: vec![],
        updated: vec![0; case.tables.len()],
    };
    for (t, (batch, grad)) in (1..).zip(case.batches.iter().zip(&case.grads)) {
        let mut lookup = all.resolve(&stream, batch.clone(), BadIdPolicy::Error).unwrap();
        let mut out = cpu.alloc::<f32>(grad.len()).unwrap();
        all.forward(&stream, &mut lookup, &mut out, case.width).unwrap();
        outcome.pooled.push(out.to_vec());
        cpu.upload(&stream, grad, &mut out, 0).unwrap();
        outcome.norms.push(all.grad_sq_norm(&stream, &lookup, &out, case.width).unwrap());
        let stats = all.update(&stream, &lookup, &out, case.width, &case.step(t)).unwrap();
        for (sum, moved) in outcome.updated.iter_mut().zip(stats.rows_updated) {
            *sum += moved;
        }
    }
    for (index, table) in case.tables.iter().enumerate() {
        let mut weights = vec![0.0; table.rows as usize * table.dim];
        all.read_weights(&stream, index, 0..table.rows, &mut weights).unwrap();
        outcome.weights.push(weights);
        let states = table.optimizer.state().iter().map(|tensor| {
            let mut state = vec![0.0; table.rows as usize * tensor.columns(table.dim)];
            all.read_state(&stream, index, tensor.name, 0..table.rows, &mut state).unwrap();
            state
        });
        outcome.states.push(states.collect());
    }
    outcome
}

/// Every table sharded as `sharding` says, as far as its size allows.
pub fn plan(case: &Case, ranks: usize, sharding: Sharding, route: Route) -> Plan {
    let per_node = if ranks.is_multiple_of(2) { 2 } else { 1 };
    let tables = case.tables.iter().enumerate().map(|(i, table)| {
        let all_rows = 0..table.rows;
        let mut shards = Vec::new();
        let mut cut_rows = |on: std::ops::Range<usize>, columns: &std::ops::Range<usize>| {
            for (rank, rows) in on.clone().zip(row_cuts(table.rows, on.len())) {
                shards.push(Shard { rank, rows, columns: columns.clone() });
            }
        };
        let whole = 0..table.dim;
        let pieces = |most: usize| column_cuts(table.dim, most.min(table.dim.div_ceil(32)));
        match sharding {
            Sharding::DataParallel => {
                for rank in 0..ranks {
                    let (rows, columns) = (all_rows.clone(), whole.clone());
                    shards.push(Shard { rank, rows, columns });
                }
            }
            Sharding::TableWise => cut_rows(i % ranks..i % ranks + 1, &whole),
            Sharding::ColumnWise => {
                for (j, columns) in pieces(ranks).iter().enumerate() {
                    let rank = (i + j) % ranks;
                    cut_rows(rank..rank + 1, columns);
                }
            }
            Sharding::RowWise => cut_rows(0..ranks, &whole),
            Sharding::TableRowWise => {
                let node = i % (ranks / per_node) * per_node;
                cut_rows(node..node + per_node, &whole);
            }
            Sharding::Grid => {
                let nodes = ranks / per_node;
                for (j, columns) in pieces(nodes).iter().enumerate() {
                    let node = (i + j) % nodes * per_node;
                    cut_rows(node..node + per_node, columns);
                }
            }
        }
        let (rows, dim) = (table.rows, table.dim);
        TablePlan { table: table.name.clone(), rows, dim, sharding, route, shards }
    });
    Plan::new(ranks, per_node, 1, tables.collect()).unwrap()
}

/// The contiguous part of `samples` that `rank` of `ranks` takes; the first take the remainder.
pub fn part(samples: usize, rank: usize, ranks: usize) -> std::ops::Range<usize> {
    let (each, more) = (samples / ranks, samples % ranks);
    let start = rank * each + rank.min(more);
    start..start + each + usize::from(rank < more)
}

/// Pooled vectors, norms, rows updated and pieces of a rank.
pub type RankPart = (Vec<Vec<f32>>, Vec<f64>, Vec<u64>, Vec<PieceValues>);

/// A held piece as it stands in memory.
pub struct PieceValues {
    table: usize,
    rows: Range<u64>,
    columns: Range<usize>,
    weights: Vec<f32>,
    states: Vec<Vec<f32>>,
}

/// The case under plain sgd, without clipping.
pub fn under_sgd(mut case: Case, lr: f64) -> Case {
    case.clips = false;
    for table in &mut case.tables {
        table.optimizer = SparseOptimizer::Sgd { lr };
    }
    case
}

/// Weights and state of all pieces that a rank holds.
pub fn pieces_of(
    all: &ShardedCollection<Cpu>,
    stream: &CpuStream,
    case: &Case,
) -> Vec<PieceValues> {
    let piece = |held: &tessera_embedding::Held<Cpu>| {
        let (rows, columns) = (held.rows(), held.columns());
        let count = rows.end - rows.start;
        let mut weights = vec![0.0; count as usize * columns.len()];
        held.store.read_weights(stream, 0, 0..count, &mut weights).unwrap();
        let state = case.tables[held.table()].optimizer.state().iter();
        let states = state.map(|tensor| {
            let mut state = vec![0.0; count as usize * tensor.columns(columns.len())];
            held.store.read_state(stream, 0, tensor.name, 0..count, &mut state).unwrap();
            state
        });
        let states = states.collect();
        PieceValues { table: held.table(), rows, columns, weights, states }
    };
    all.held().iter().map(piece).collect()
}

impl Case {
    pub fn step(&self, t: u64) -> SparseStep {
        let clip = if self.clips && t == 2 { Clip::Value(0.3) } else { Clip::None };
        SparseStep { t, lr_scale: 1.0, clip }
    }
}

impl Outcome {
    /// Tables that nobody has filled in yet.
    pub fn empty(case: &Case) -> Self {
        let mut outcome = Self {
            pooled: vec![Vec::new(); case.batches.len()],
            weights: Vec::new(),
            states: Vec::new(),
            norms: Vec::new(),
            updated: vec![0; case.tables.len()],
        };
        for table in &case.tables {
            // NaN shows what no rank holds.
            outcome.weights.push(vec![f32::NAN; table.rows as usize * table.dim]);
            let state = |columns: usize| vec![f32::NAN; table.rows as usize * columns];
            let tensors = table.optimizer.state().iter();
            outcome.states.push(tensors.map(|tensor| state(tensor.columns(table.dim))).collect());
        }
        outcome
    }

    /// What ranks have together, in rank order.
    pub fn of_parts(case: &Case, parts: Vec<RankPart>) -> Self {
        let mut outcome = Self { norms: parts[0].1.clone(), ..Self::empty(case) };
        for (pooled, norms, updated, pieces) in parts {
            assert_eq!(norms, outcome.norms, "all ranks have the same norm");
            for (all, part) in outcome.pooled.iter_mut().zip(pooled) {
                all.extend(part);
            }
            for (all, part) in outcome.updated.iter_mut().zip(updated) {
                *all += part;
            }
            for piece in &pieces {
                outcome.put(case, piece);
            }
        }
        outcome
    }

    /// Puts a piece in its place. What several ranks hold must be the same bits.
    pub fn put(&mut self, case: &Case, piece: &PieceValues) {
        let spec = &case.tables[piece.table];
        let put = |all: &mut [f32], of_row: usize, columns: Range<usize>, values: &[f32]| {
            for (row, values) in piece.rows.clone().zip(values.chunks_exact(columns.len())) {
                for (at, value) in columns.clone().zip(values) {
                    let place = &mut all[row as usize * of_row + at];
                    assert!(
                        place.is_nan() || place.to_bits() == value.to_bits(),
                        "table {}, row {row}, column {at}: {place} and {value}",
                        spec.name
                    );
                    *place = *value;
                }
            }
        };
        put(&mut self.weights[piece.table], spec.dim, piece.columns.clone(), &piece.weights);
        let tensors = spec.optimizer.state();
        let states = self.states[piece.table].iter_mut();
        for ((all, tensor), values) in states.zip(tensors).zip(&piece.states) {
            if tensor.columns(spec.dim) == 1 && spec.dim > 1 {
                put(all, 1, 0..1, values);
            } else {
                put(all, spec.dim, piece.columns.clone(), values);
            }
        }
    }
}

/// Codecs of vectors and of gradients.
pub type Codecs = (Codec, Codec);

pub const EXACT: Codecs = (Codec::Fp32, Codec::Fp32);

pub fn on_ranks(case: &Case, plan: &Plan, threads_a_rank: usize, codecs: Codecs) -> Outcome {
    on_ranks_with(case, plan, threads_a_rank, codecs, None)
}

/// With rows that move between tiers, where some are given.
pub fn on_ranks_with(
    case: &Case,
    plan: &Plan,
    threads_a_rank: usize,
    codecs: Codecs,
    tiers: Option<&Tiers>,
) -> Outcome {
    let ranks = plan.ranks();
    let parts = threads::run(ranks, &Options::default(), |comm| {
        let rank = comm.rank();
        let cpu = Cpu::new(NonZeroUsize::new(threads_a_rank)).unwrap();
        let stream = cpu.stream().unwrap();
        let model = (case.tables.clone(), case.features.clone());
        let tiers = tiers.map(|tiers| tiers.of_rank(rank));
        let (device, tiers) = (cpu.clone(), tiers.as_ref());
        let mut all =
            ShardedCollection::with_tiers(device, &stream, model, SEED, plan, comm, tiers)
                .unwrap()
                .with_codecs(codecs.0, codecs.1)
                .unwrap();
        let (mut pooled, mut norms) = (Vec::new(), Vec::new());
        let mut updated = vec![0; case.tables.len()];
        for (t, (batch, grad)) in (1..).zip(case.batches.iter().zip(&case.grads)) {
            let samples = part(batch[0].bags(), rank, ranks);
            let own = batch.iter().map(|feature| feature.slice(samples.clone())).collect();
            let checked = all.check(own, BadIdPolicy::Error).unwrap();
            let mut routed = all.route(&stream, checked).unwrap();
            assert_eq!(routed.bags(), samples.len());
            let mut out = cpu.alloc::<f32>(samples.len() * case.width).unwrap();
            all.forward(&stream, &mut routed, &mut out, case.width).unwrap();
            pooled.push(out.to_vec());
            let grad = &grad[samples.start * case.width..samples.end * case.width];
            cpu.upload(&stream, grad, &mut out, 0).unwrap();
            all.exchange_gradients(&stream, &mut routed, &out, case.width).unwrap();
            norms.push(all.grad_sq_norm(&stream, &routed).unwrap());
            let stats = all.update(&stream, routed, &case.step(t)).unwrap();
            assert_eq!(stats.nonfinite(), 0);
            for (sum, moved) in updated.iter_mut().zip(stats.rows_updated) {
                *sum += moved;
            }
        }
        (pooled, norms, updated, pieces_of(&all, &stream, case))
    })
    .unwrap();

    Outcome::of_parts(case, parts)
}

/// All numbers agree to `tolerance` of the largest in their tensor.
pub fn close(a: &Outcome, b: &Outcome, tolerance: f32, what: &str) {
    let compare = |name: &str, a: &[f32], b: &[f32]| {
        assert_eq!(a.len(), b.len(), "{what}: {name}");
        let largest = a.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        for (i, (a, b)) in a.iter().zip(b).enumerate() {
            assert!((a - b).abs() <= tolerance * largest, "{what}: {name}[{i}]: {a} and {b}");
        }
    };
    for (i, (a, b)) in a.pooled.iter().zip(&b.pooled).enumerate() {
        compare(&format!("pooled {i}"), a, b);
    }
    for (i, (a, b)) in a.weights.iter().zip(&b.weights).enumerate() {
        compare(&format!("weights of t{i}"), a, b);
    }
    for (i, (a, b)) in a.states.iter().zip(&b.states).enumerate() {
        for (a, b) in a.iter().zip(b) {
            compare(&format!("state of t{i}"), a, b);
        }
    }
    for (a, b) in a.norms.iter().zip(&b.norms) {
        assert!((a - b).abs() <= f64::from(tolerance) * a, "{what}: norms {a} and {b}");
    }
    assert_eq!(a.updated, b.updated, "{what}: rows updated");
}
