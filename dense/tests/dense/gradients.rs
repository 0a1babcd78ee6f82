//! Losses and gradients of every kind of model against the oracle and its finite differences.

use tessera_dense::{
    Bucket, DenseError, DenseOps, DenseOptimizer, Interaction, Loss, ModelSpec, ParamGrad,
};

use crate::fixture::{Fixture, cpu, on_each_device, spec};
use crate::oracle::{self, Params, Sample};

const SGD: DenseOptimizer = DenseOptimizer::Sgd { lr: 0.1 };

/// Central difference of the oracle's loss; its own error is about 1e-9.
const STEP: f64 = 1e-5;

/// Compares with the largest gradient of the tensor: f32 sums of a few hundred terms of that size.
fn assert_close(name: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len(), "{name}");
    let largest = want.iter().fold(0.0f64, |max, x| max.max(x.abs()));
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let error = (f64::from(*got) - want).abs();
        assert!(error <= 1e-8 + 1e-5 * largest, "{name}[{i}]: {got}, expected {want}");
    }
}

fn check<D: DenseOps>(device: &D, spec: ModelSpec, batch: usize, weighted: bool) {
    let what = format!("{spec:?}");
    let mut fixture = Fixture::new(device, spec.clone(), SGD, batch);
    if weighted {
        let weights: Vec<f32> = (0..batch).map(|r| 0.25 + 0.5 * (r % 4) as f32).collect();
        fixture.upload(&weights, 0, |acts| &mut acts.sample_weights);
    }
    let global_batch = batch as u64 + 3;
    let (loss, buckets) = fixture.step(global_batch);
    assert_eq!(buckets, fixture.dlrm.buckets().len(), "{what}");
    let samples = fixture.samples();
    let params = fixture.params();
    let of = |params: &Params, samples: &[Sample]| {
        oracle::loss(&spec, params, samples, global_batch as f64)
    };
    let want = of(&params, &samples);
    assert!((loss - want).abs() <= 1e-6 * want.abs(), "{what}: loss {loss}, expected {want}");

    let grads = fixture.grads();
    for param in fixture.dlrm.params() {
        let mut moved = params.clone();
        let want: Vec<f64> = (0..param.range.len())
            .map(|i| {
                let at = params[&param.name][i];
                let mut loss_at = |x: f64| {
                    moved.get_mut(&param.name).unwrap()[i] = x;
                    of(&moved, &samples)
                };
                let slope = (loss_at(at + STEP) - loss_at(at - STEP)) / (2.0 * STEP);
                loss_at(at);
                slope
            })
            .collect();
        let got = &grads[param.range.clone()];
        assert_close(&format!("{what}: {}", param.name), got, &want);
    }

    let dx0 = fixture.dx0();
    let mut moved = samples.clone();
    let stride = spec.stride();
    for feature in 0..spec.features.len() {
        let (mut got, mut want, mut got_wide, mut want_wide) = (vec![], vec![], vec![], vec![]);
        for r in 0..batch {
            let row = &dx0[r * stride..];
            got.extend(&row[spec.feature_column(feature)..][..spec.features[feature]]);
            for d in 0..spec.features[feature] {
                let at = samples[r].features[feature][d];
                let mut loss_at = |x: f64| {
                    moved[r].features[feature][d] = x;
                    of(&params, &moved)
                };
                want.push((loss_at(at + STEP) - loss_at(at - STEP)) / (2.0 * STEP));
                loss_at(at);
            }
            if spec.wide {
                got_wide.push(row[spec.wide_column(feature)]);
                let at = samples[r].wide[feature];
                let mut loss_at = |x: f64| {
                    moved[r].wide[feature] = x;
                    of(&params, &moved)
                };
                want_wide.push((loss_at(at + STEP) - loss_at(at - STEP)) / (2.0 * STEP));
                loss_at(at);
            }
        }
        assert_close(&format!("{what}: feature {feature}"), &got, &want);
        assert_close(&format!("{what}: wide {feature}"), &got_wide, &want_wide);
    }
}

const DCN: Interaction = Interaction::Dcn { layers: 3, rank: 2 };

/// On the CPU alone: the oracle is slow, and GPUs' operations are held to the CPU's.
#[test]
fn every_dim_from_1_to_33() {
    let device = &cpu(2);
    for dim in 1..=33 {
        let mut spec = spec(Interaction::Dot, &[dim, dim]);
        if dim % 3 == 1 {
            spec = ModelSpec { interaction: Interaction::Concat, ..spec };
        }
        if dim % 3 == 2 {
            spec = ModelSpec { interaction: Interaction::Dcn { layers: 2, rank: 3 }, ..spec };
        }
        spec.bottom[0] = dim;
        spec.top = vec![dim, 1];
        check(device, spec, 3, false);
    }
}

on_each_device! {
    fn every_interaction_loss_and_wide_part(device) {
        for interaction in [Interaction::Dot, Interaction::Concat, DCN] {
            for loss in [Loss::Bce, Loss::Mse] {
                for wide in [false, true] {
                    let spec = ModelSpec { loss, wide, ..spec(interaction.clone(), &[4, 4, 4]) };
                    check(device, spec, 6, wide);
                }
            }
        }
    }

    fn models_without_a_dense_vector_or_with_raw_dense_values(device) {
        for interaction in [Interaction::Dot, Interaction::Concat, DCN] {
            let spec = spec(interaction, &[3, 3]);
            check(device, ModelSpec { dense_features: 0, bottom: vec![], ..spec }, 5, false);
        }
        for interaction in [Interaction::Concat, DCN] {
            let spec = spec(interaction, &[3, 1, 2]);
            check(device, ModelSpec { bottom: vec![], ..spec.clone() }, 5, false);
            check(device, ModelSpec { features: vec![], wide: false, ..spec }, 5, false);
        }
    }

    fn single_layers_ranks_and_columns(device) {
        for interaction in [Interaction::Dot, Interaction::Concat, DCN] {
            for dim in [1, 2] {
                let mut spec = spec(interaction.clone(), &[dim, dim]);
                spec.top = vec![1];
                spec.bottom = vec![dim];
                spec.dense_features = 1;
                check(device, spec, 4, false);
            }
        }
        for (layers, rank) in [(1, 1), (2, 1), (4, 9)] {
            check(device, spec(Interaction::Dcn { layers, rank }, &[2, 3]), 1, false);
        }
    }

    /// A batch that goes forward and backward in parts has the loss, and the gradients, of the
    /// whole batch but for how their sums are grouped.
    fn gradients_of_a_batchs_parts_add_up_to_those_of_the_whole(device) {
        let interactions =
            [Interaction::Dot, Interaction::Concat, Interaction::Dcn { layers: 2, rank: 3 }];
        for interaction in interactions {
            for cuts in [vec![0, 13], vec![0, 1, 13], vec![0, 5, 5, 9, 13], vec![0, 0, 13]] {
                let fixture = || {
                    Fixture::new(
                        device,
                        spec(interaction.clone(), &[4, 4]),
                        DenseOptimizer::Sgd { lr: 0.1 },
                        13,
                    )
                };
                let (mut whole, mut parts) = (fixture(), fixture());
                let (expected, _) = whole.step(20);
                let Fixture { stream, dlrm, acts, .. } = &mut parts;
                let mut loss = 0.0;
                for (part, ends) in cuts.windows(2).enumerate() {
                    let rows = ends[0]..ends[1];
                    dlrm.forward(stream, acts, rows.clone()).unwrap();
                    loss += dlrm.loss(stream, acts, rows.clone(), 20).unwrap();
                    let store = if part == 0 { ParamGrad::Store } else { ParamGrad::Add };
                    let ignore = |_: Bucket<'_, D>| Ok::<(), DenseError>(());
                    dlrm.backward(stream, acts, rows, store, ignore).unwrap();
                }
                assert!((loss - expected).abs() < 1e-12, "{loss} {expected}");
                let close = |a: &[f32], b: &[f32]| {
                    let largest = a.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                    a.iter().zip(b).all(|(a, b)| (a - b).abs() <= 1e-6 * largest)
                };
                assert!(close(&whole.grads(), &parts.grads()), "{interaction:?} {cuts:?}");
                let first = whole.dlrm.spec().dense_width();
                let stride = whole.dlrm.spec().stride();
                for (a, b) in whole.dx0().chunks(stride).zip(parts.dx0().chunks(stride)) {
                    let used = first..whole.dlrm.spec().input_width();
                    assert!(close(&a[used.clone()], &b[used]), "{interaction:?} {cuts:?}");
                }
            }
        }
    }
}
