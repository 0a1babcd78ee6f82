//! The same bits on any number of threads, in any activations.

use tessera_dense::{
    Bucket, Clip, DenseError, DenseOps, DenseOptimizer, DenseStep, Interaction, Loss, ModelSpec,
    ParamGrad,
};
use tessera_device::Cpu;

use crate::fixture::{Fixture, cpu, on_each_device, spec};

const ADAM: DenseOptimizer = DenseOptimizer::Adam { lr: 0.01, eps: 1e-8, beta1: 0.9, beta2: 0.999 };

/// Loss and all bits after two steps.
fn train<D: DenseOps>(fixture: &mut Fixture<D>) -> (Vec<u64>, Vec<u32>) {
    let mut losses = Vec::new();
    for t in 1..=2 {
        fixture.fill(t as usize);
        let batch = fixture.batch as u64;
        losses.push(fixture.step(batch).0.to_bits());
        fixture.update(&DenseStep { t, lr: 0.01, clip: Clip::Scale(0.9) });
    }
    (losses, fixture.bits())
}

fn assert_same_on_all(cpus: &[Cpu], spec: &ModelSpec, batch: usize) {
    let run = |cpu| train(&mut Fixture::new(cpu, spec.clone(), ADAM, batch));
    let want = run(&cpus[0]);
    for cpu in &cpus[1..] {
        let threads = cpu.threads();
        assert!(run(cpu) == want, "{threads} threads, batch {batch}: {spec:?}");
    }
}

fn cpus() -> Vec<Cpu> {
    [1, 2, 3, 5].into_iter().map(cpu).collect()
}

#[test]
fn every_small_width_and_batch_on_1_2_3_and_5_threads() {
    let cpus = cpus();
    for width in 1..=33 {
        for (i, batch) in [1, 2, 7, 33, 257].into_iter().enumerate() {
            let interaction = match (width + i) % 3 {
                0 => Interaction::Dot,
                1 => Interaction::Concat,
                _ => Interaction::Dcn { layers: 2, rank: 1 + width % 4 },
            };
            let mut spec = spec(interaction, &[width; 4]);
            spec.dense_features = 1 + width % 13;
            spec.bottom = vec![width + 3, width];
            spec.top = vec![2 * width + 1, width, 1];
            assert_same_on_all(&cpus, &spec, batch);
        }
    }
}

#[test]
fn models_of_real_size_on_1_2_3_and_5_threads() {
    let cpus = cpus();
    let dlrm = ModelSpec {
        dense_features: 13,
        bottom: vec![512, 256, 16],
        interaction: Interaction::Dot,
        features: vec![16; 26],
        top: vec![512, 256, 1],
        wide: true,
        loss: Loss::Bce,
    };
    assert_same_on_all(&cpus, &dlrm, 2048);
    let dcn = ModelSpec {
        interaction: Interaction::Dcn { layers: 2, rank: 32 },
        bottom: vec![64, 33],
        features: vec![1, 33, 100, 7],
        top: vec![300, 1],
        ..dlrm
    };
    assert_same_on_all(&cpus, &dcn, 2048);
    let narrow =
        ModelSpec { interaction: Interaction::Dcn { layers: 3, rank: 1 }, top: vec![1], ..dcn };
    assert_same_on_all(&cpus, &narrow, 2047);
}

on_each_device! {
    /// Rows past the batch hold NaN from a larger batch; scratch holds what that batch left.
    fn the_size_and_the_history_of_the_activations_do_not_matter(device) {
        for interaction in
            [Interaction::Dot, Interaction::Concat, Interaction::Dcn { layers: 2, rank: 3 }]
        {
            for batch in [1, 7, 256] {
                let spec = spec(interaction.clone(), &[9; 3]);
                let want = train(&mut Fixture::new(device, spec.clone(), ADAM, batch));
                let mut larger = Fixture::new(device, spec, ADAM, 300);
                larger.upload(&[f32::NAN; 300], 0, |acts| &mut acts.labels);
                let Fixture { stream, dlrm, acts, .. } = &mut larger;
                dlrm.forward(stream, acts, 0..300).unwrap();
                assert!(dlrm.loss(stream, acts, 0..300, 300).unwrap().is_nan());
                let ignore = |_: Bucket<'_, D>| Ok::<(), DenseError>(());
                dlrm.backward(stream, acts, 0..300, ParamGrad::Store, ignore).unwrap();
                larger.batch = batch;
                assert!(train(&mut larger) == want, "{interaction:?}, batch {batch}");
            }
        }
    }
}
