//! Random tables, features and batches against the float64 oracle.
//!
//! Gradients of a column have one sign and weights are positive: sums that cancel would make the
//! float32 result's relative error as large as one likes.

use proptest::prelude::*;
use tessera_device::{Device, Philox};
use tessera_embedding::{
    BadIdPolicy, Clip, EmbeddingCollection, Pooling, SparseOptimizer, SparseStep,
};

use crate::common::{
    assert_close, buffer, every_optimizer, feature, jagged, machines, state, stream, table, weights,
};
use crate::oracle::{Bags, Table};

/// Numbers drawn one after another from a seed.
struct Draw(Philox, u64);

impl Draw {
    fn below(&mut self, limit: usize) -> usize {
        self.1 += 1;
        self.0.block(self.1, 0)[0] as usize % limit
    }
}

fn dims() -> impl Strategy<Value = usize> {
    prop_oneof![1usize..=33, Just(64), Just(128), Just(256)]
}

#[derive(Clone, Debug)]
struct Shape {
    dim: usize,
    rows: u64,
    mean: bool,
    optimizer: SparseOptimizer,
    features: usize,
}

fn shapes() -> impl Strategy<Value = Vec<Shape>> {
    let optimizers = prop::sample::select(every_optimizer());
    let shape = (dims(), 1u64..=20, any::<bool>(), optimizers, 1usize..=3).prop_map(
        |(dim, rows, mean, optimizer, features)| Shape { dim, rows, mean, optimizer, features },
    );
    prop::collection::vec(shape, 1..=3)
}

/// Bags of one feature.
struct Drawn {
    offsets: Vec<u64>,
    rows: Vec<i64>,
    weights: Option<Vec<f32>>,
}

fn draw_bags(draw: &mut Draw, bags: usize, rows: u64, weighted: bool) -> Drawn {
    let mut drawn = Drawn { offsets: vec![0], rows: Vec::new(), weights: None };
    for _ in 0..bags {
        for _ in 0..draw.below(5) {
            let row = match draw.below(4) {
                0 => rows - 1,
                1 => 0, // duplicates
                _ => draw.below(rows as usize) as u64,
            };
            drawn.rows.push(row as i64);
        }
        drawn.offsets.push(drawn.rows.len() as u64);
    }
    if weighted {
        drawn.weights = Some(drawn.rows.iter().map(|_| (1 + draw.below(9)) as f32 / 4.0).collect());
    }
    drawn
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, ..ProptestConfig::default() })]

    #[test]
    fn lookups_and_updates_follow_the_oracle(
        shapes in shapes(),
        bags in 0usize..=6,
        seed in any::<u64>(),
        clip in prop::sample::select(vec![Clip::None, Clip::Value(0.5), Clip::Scale(0.25)]),
    ) {
        let draw = &mut Draw(Philox::new(seed), 0);
        let machines = machines(&[1, 2]);
        let cpu = &machines[draw.below(machines.len())];
        let stream = stream(cpu);

        // Features of all tables in any order, at columns in another order, with gaps.
        let mut map: Vec<usize> =
            shapes.iter().enumerate().flat_map(|(i, s)| vec![i; s.features]).collect();
        for i in (1..map.len()).rev() {
            map.swap(i, draw.below(i + 1));
        }
        let mut stride = draw.below(3);
        let mut features = Vec::new();
        for (i, &of) in map.iter().enumerate().rev() {
            features.insert(0, feature(&format!("f{i}"), of, stride));
            stride += shapes[of].dim + draw.below(3);
        }
        let tables = shapes.iter().enumerate().map(|(i, shape)| {
            let mut spec = table(&format!("t{i}"), shape.rows, shape.dim, shape.optimizer);
            spec.pooling = if shape.mean { Pooling::Mean } else { Pooling::Sum };
            spec
        });
        let columns: Vec<usize> = features.iter().map(|feature| feature.column).collect();
        let mut collection =
            EmbeddingCollection::new(cpu.clone(), &stream, tables.collect(), features, seed)
                .unwrap();
        let mut oracle: Vec<Table> = collection.schema().tables().iter().enumerate().map(
            |(i, spec)| {
                Table::new(spec.optimizer, spec.pooling, spec.dim, &weights(&collection, i))
            },
        ).collect();

        for t in 1..=3 {
            let drawn: Vec<Drawn> = map.iter().map(|&of| {
                let weighted = !shapes[of].mean && draw.below(2) == 0;
                draw_bags(draw, bags, shapes[of].rows, weighted)
            }).collect();
            let batch = drawn.iter().map(|d| jagged(&d.offsets, &d.rows, d.weights.as_deref()));
            let mut lookup = collection
                .resolve(&stream, batch.collect(), BadIdPolicy::Error)
                .unwrap();
            let mut out = cpu.alloc::<f32>(bags * stride).unwrap();
            out.fill(7.5);
            collection.forward(&stream, &mut lookup, &mut out, stride).unwrap();

            let mut grad = vec![f32::NAN; bags * stride];
            let mut by_table: Vec<Vec<_>> = shapes.iter().map(|_| Vec::new()).collect();
            for ((&of, &column), d) in map.iter().zip(&columns).zip(&drawn) {
                let dim = shapes[of].dim;
                let of_feature =
                    Bags { offsets: &d.offsets, rows: &d.rows, weights: d.weights.as_deref() };
                let mut grads = Vec::new();
                for (bag, pooled) in oracle[of].pool(&of_feature).into_iter().enumerate() {
                    let at = bag * stride + column;
                    assert_close("pooled", &out[at..at + dim], &pooled, 1e-6, 1e-5);
                    out[at..at + dim].fill(7.5);
                    for c in 0..dim {
                        let size = (16 + draw.below(49)) as f32 / 64.0;
                        grad[at + c] = if c % 2 == 0 { size } else { -size };
                    }
                    grads.push(grad[at..at + dim].iter().map(|&x| f64::from(x)).collect());
                }
                by_table[of].push((of_feature, grads));
            }
            prop_assert!(out.iter().all(|&x| x == 7.5), "a column of no feature was written");

            let step = SparseStep { t, lr_scale: 0.5, clip };
            let gradients: Vec<_> =
                oracle.iter().zip(&by_table).map(|(table, f)| table.gradients(f)).collect();
            let norm: f64 =
                gradients.iter().flat_map(|g| g.values().flatten()).map(|x| x * x).sum();
            let grad = buffer(&grad);
            let ours = collection.grad_sq_norm(&stream, &lookup, &grad, stride).unwrap();
            prop_assert!((ours - norm).abs() <= 1e-5 * norm, "{ours} {norm}");
            let unique = collection.resolver().unique_counts(&stream, &lookup).unwrap();
            let stats = collection.update(&stream, &lookup, &grad, stride, &step).unwrap();
            for (i, mut gradients) in gradients.into_iter().enumerate() {
                prop_assert_eq!(stats.rows_updated[i], gradients.len() as u64);
                prop_assert_eq!(unique[i], gradients.len() as u64);
                let rows = collection.resolver().unique_rows(&stream, &lookup, i).unwrap();
                prop_assert!(rows.iter().map(|row| row.0 as i64).eq(gradients.keys().copied()));
                for g in gradients.values_mut().flatten() {
                    match clip {
                        Clip::None => {}
                        Clip::Value(limit) => *g = g.clamp(-f64::from(limit), f64::from(limit)),
                        Clip::Scale(scale) => *g *= f64::from(scale),
                    }
                }
                oracle[i].update(&gradients, &step);
                let name = oracle[i].optimizer.name();
                let expected: Vec<f64> = oracle[i].w.iter().flatten().copied().collect();
                assert_close(name, &weights(&collection, i), &expected, 2e-6, 5e-5);
                for (tensor, rows) in &oracle[i].state {
                    let expected: Vec<f64> = rows.iter().flatten().copied().collect();
                    let ours = state(&collection, i, tensor);
                    assert_close(&format!("{name} {tensor}"), &ours, &expected, 2e-6, 5e-5);
                }
            }
        }
    }
}
