//! The same bits for any number of threads, on every instruction set, in body and tail, however
//! and wherever the grouping was made.

use std::collections::{BTreeMap, BTreeSet};

use tessera_data::Jagged;
use tessera_device::{Cpu, Device, Philox, Simd};
use tessera_embedding::{
    BadIdPolicy, Clip, EmbeddingCollection, Pooling, Precision, SparseOptimizer, SparseStep,
    WeightDecay,
};

use crate::common::{
    all_bits, any_cpu, buffer, cpu, every_optimizer, feature, jagged, machines, stream, table,
    weights,
};

const BAGS: usize = 700;
const DIMS: [usize; 8] = [12, 1, 33, 8, 64, 17, 3, 160];

/// Tables of every optimizer, of all precisions and poolings, two of three features sharing one.
fn collection(cpu: &Cpu) -> (EmbeddingCollection<Cpu>, usize) {
    let mut tables = Vec::new();
    let mut features = Vec::new();
    let mut column = 0;
    for (i, optimizer) in every_optimizer().into_iter().enumerate() {
        let dim = DIMS[i % DIMS.len()];
        let mut spec = table(&format!("t{i}"), 500 + 977 * i as u64, dim, optimizer);
        spec.precision = [Precision::Fp32, Precision::Fp16, Precision::Bf16][i % 3];
        spec.pooling = if i % 4 == 3 { Pooling::Mean } else { Pooling::Sum };
        tables.push(spec);
        for part in 0..=usize::from(i % 3 == 0) {
            features.push(feature(&format!("f{i}.{part}"), i, column));
            column += dim;
        }
    }
    (EmbeddingCollection::new(cpu.clone(), &stream(cpu), tables, features, 11).unwrap(), column)
}

/// A batch whose ids crowd towards row 0, about 6 a bag.
fn batch(collection: &EmbeddingCollection<Cpu>, step: u64) -> Vec<Jagged> {
    let schema = collection.schema();
    let bags = schema.features().iter().enumerate().map(|(f, feature)| {
        let spec = &schema.tables()[feature.table];
        let generator = Philox::for_name(step, &feature.name);
        let (mut offsets, mut ids, mut weights) = (vec![0], Vec::new(), Vec::new());
        for bag in 0..BAGS as u64 {
            for i in 0..u64::from(generator.block(bag, u64::MAX)[0] % 13) {
                let words = generator.block(bag, i);
                let place = f64::from(Philox::unit(words[0])).powi(3);
                ids.push((place * spec.rows as f64) as i64);
                weights.push(Philox::unit(words[1]) - 0.3);
            }
            offsets.push(ids.len() as u64);
        }
        let weighted = spec.pooling == Pooling::Sum && f % 2 == 0;
        jagged(&offsets, &ids, weighted.then_some(&weights))
    });
    bags.collect()
}

fn gradients(len: usize, step: u64) -> Vec<f32> {
    let generator = Philox::new(step);
    (0..len as u64).map(|i| Philox::unit(generator.block(i, 0)[0]) - 0.5).collect()
}

/// Three steps; returns the bits of all pooled vectors, of the tables and of the norms.
fn run(cpu: &Cpu, group_elsewhere: bool) -> (Vec<u32>, Vec<u64>) {
    let (mut tables, stride) = collection(cpu);
    let stream = stream(cpu);
    let (mut bits, mut norms) = (Vec::new(), Vec::new());
    for t in 1..=3 {
        let (resolver, batch) = (tables.resolver().clone(), batch(&tables, t));
        let resolve = move || {
            let stream = any_cpu().stream().unwrap();
            let lookup = resolver.resolve(&stream, batch, BadIdPolicy::Error).unwrap();
            if group_elsewhere {
                resolver.group(&stream, &lookup).unwrap();
            }
            lookup
        };
        let mut lookup = std::thread::spawn(resolve).join().unwrap();
        let mut out = cpu.alloc::<f32>(BAGS * stride).unwrap();
        tables.forward(&stream, &mut lookup, &mut out, stride).unwrap();
        bits.extend(out.iter().map(|x| x.to_bits()));
        let grad = buffer(&gradients(BAGS * stride, t));
        norms.push(tables.grad_sq_norm(&stream, &lookup, &grad, stride).unwrap().to_bits());
        let step = SparseStep { t, lr_scale: 0.7, clip: Clip::Value(2.0) };
        let stats = tables.update(&stream, &lookup, &grad, stride, &step).unwrap();
        assert_eq!(stats.nonfinite(), 0);
    }
    bits.extend(all_bits(&tables));
    (bits, norms)
}

#[test]
fn threads_instruction_sets_and_grouping_ahead_do_not_show() {
    let first = run(&cpu(1, Simd::Baseline), false);
    for cpu in machines(&[1, 2, 3, 7]) {
        let ahead = cpu.threads() % 2 == 0;
        assert!(run(&cpu, ahead) == first, "{:?} with {} threads", cpu.simd(), cpu.threads());
    }
}

#[test]
fn unique_rows_are_those_of_the_batch() {
    for threads in [1, 4] {
        let cpu = cpu(threads, Simd::Baseline);
        let (tables, _) = collection(&cpu);
        let stream = stream(&cpu);
        let batch = batch(&tables, 5);
        let mut expected: BTreeMap<usize, BTreeSet<u64>> = BTreeMap::new();
        for (feature, bags) in tables.schema().features().iter().zip(&batch) {
            let rows = bags.ids().iter().map(|id| id.0 as u64);
            expected.entry(feature.table).or_default().extend(rows);
        }
        let lookup = tables.resolve(&stream, batch, BadIdPolicy::Error).unwrap();
        let counts = tables.resolver().unique_counts(&stream, &lookup).unwrap();
        for (table, expected) in expected {
            let rows = tables.resolver().unique_rows(&stream, &lookup, table).unwrap();
            assert!(rows.iter().map(|row| row.0).eq(expected.iter().copied()), "table {table}");
            assert_eq!(counts[table], expected.len() as u64);
        }
    }
}

/// Steps of one table with one row in one bag; column `c` starts at `w(c)` and has gradients
/// `g(t, c)`.
fn train(
    optimizer: SparseOptimizer,
    dim: usize,
    simd: Simd,
    w: impl Fn(usize) -> f32,
    g: impl Fn(u64, usize) -> f32,
) -> Vec<u32> {
    let cpu = cpu(1, simd);
    let stream = stream(&cpu);
    let tables = vec![table("t", 1, dim, optimizer)];
    let mut tables =
        EmbeddingCollection::new(cpu, &stream, tables, vec![feature("f", 0, 0)], 0).unwrap();
    let start: Vec<f32> = (0..dim).map(w).collect();
    tables.write_weights(&stream, 0, 0..1, &start).unwrap();
    for t in 1..=3 {
        let bags = vec![jagged(&[0, 1], &[0], None)];
        let lookup = tables.resolve(&stream, bags, BadIdPolicy::Error).unwrap();
        let grad: Vec<f32> = (0..dim).map(|c| g(t, c)).collect();
        tables.update(&stream, &lookup, &buffer(&grad), dim, &SparseStep::new(t)).unwrap();
    }
    weights(&tables, 0).into_iter().map(f32::to_bits).collect()
}

/// Some code elsewhere applied the raw gradient in its vector body and gradient plus decay in its
/// tail (seen at D = 12 with decay): equal columns must stay equal.
#[test]
fn equal_columns_stay_equal_in_body_and_tail() {
    for simd in Simd::available() {
        for optimizer in every_optimizer() {
            for dim in 1..=33 {
                let bits = train(optimizer, dim, simd, |_| 0.3, |t, _| 0.7 - 0.5 * t as f32);
                assert!(bits.iter().all(|&b| b == bits[0]), "{optimizer:?} dim {dim} {simd:?}");
            }
        }
    }
}

/// Optimizers without sums over columns treat each column as a table of its own would.
#[test]
fn a_column_moves_as_in_a_table_of_its_own() {
    let (lr, eps) = (0.05, 1e-8);
    let elementwise = [
        SparseOptimizer::Sgd { lr },
        SparseOptimizer::Adagrad { lr, eps, decay: WeightDecay::L2(0.1) },
        SparseOptimizer::Adagrad { lr, eps, decay: WeightDecay::Decouple(0.1) },
        SparseOptimizer::Adam { lr, eps, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 },
        SparseOptimizer::Ftrl { lr, beta: 1.0, l1: 0.01, l2: 0.1 },
    ];
    let w = |c: usize| (c as f32 * 0.61).sin();
    let g = |t: u64, c: usize| ((t * 31 + c as u64 * 7) as f32 * 0.37).cos();
    for simd in Simd::available() {
        for optimizer in elementwise {
            for dim in [2, 7, 8, 9, 12, 17, 33, 64] {
                let bits = train(optimizer, dim, simd, w, g);
                for (c, &bits) in bits.iter().enumerate() {
                    let alone = train(optimizer, 1, Simd::Baseline, |_| w(c), |t, _| g(t, c));
                    assert_eq!(bits, alone[0], "{optimizer:?} dim {dim} column {c} {simd:?}");
                }
            }
        }
    }
}

#[test]
fn first_values_depend_on_seed_and_name_only() {
    let make = |threads, seed, name: &str, others: usize| {
        let cpu = cpu(threads, Simd::Baseline);
        let mut tables: Vec<_> = (0..others)
            .map(|i| table(&format!("other{i}"), 3, 4, SparseOptimizer::Sgd { lr: 1.0 }))
            .collect();
        tables.push(table(name, 20_000, 5, SparseOptimizer::Sgd { lr: 1.0 }));
        let stream = stream(&cpu);
        weights(&EmbeddingCollection::new(cpu, &stream, tables, vec![], seed).unwrap(), others)
    };
    let first = make(1, 1, "a", 0);
    assert_eq!(first, make(3, 1, "a", 2));
    assert_ne!(first, make(1, 2, "a", 0));
    assert_ne!(first, make(1, 1, "b", 0));
}
