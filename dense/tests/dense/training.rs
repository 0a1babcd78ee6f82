//! Optimizers against f64 loops, clipping, norms, faults, names and edges of the model.

use tessera_dense::{
    Clip, DenseError, DenseOptimizer, DenseStep, Dlrm, Interaction, ModelSpec, ParamGrad, Role,
    sigmoid,
};

use crate::fixture::{Fixture, cpu, on_each_device, spec, value};

const SGD: DenseOptimizer = DenseOptimizer::Sgd { lr: 0.05 };

/// One parameter element's optimizer in f64, after the project's reference (class Dense).
struct Reference {
    optimizer: DenseOptimizer,
    p: f64,
    sum: f64,
    m: f64,
    v: f64,
}

impl Reference {
    fn step(&mut self, t: u64, g: f64) {
        match self.optimizer {
            DenseOptimizer::Sgd { lr } => self.p -= lr * g,
            DenseOptimizer::Adagrad { lr, eps } => {
                self.sum += g * g;
                self.p -= lr * g / (self.sum.sqrt() + eps);
            }
            DenseOptimizer::Adam { lr, eps, beta1, beta2 } => {
                self.m = beta1 * self.m + (1.0 - beta1) * g;
                self.v = beta2 * self.v + (1.0 - beta2) * g * g;
                let m = self.m / (1.0 - beta1.powi(t as i32));
                let v = self.v / (1.0 - beta2.powi(t as i32));
                self.p -= lr * m / (v.sqrt() + eps);
            }
        }
    }
}

#[test]
fn sgd_takes_the_loss_down() {
    let device = &cpu(2);
    let mut fixture = Fixture::new(device, spec(Interaction::Dot, &[8; 5]), SGD, 64);
    let first = fixture.step(64).0;
    for t in 1..=200 {
        fixture.step(64);
        fixture.update(&DenseStep { t, lr: 0.1, clip: Clip::None });
    }
    let last = fixture.step(64).0;
    assert!(last < 0.6 * first, "{first} to {last}");
}

on_each_device! {
    fn optimizers_follow_the_reference_over_many_steps(device) {
        let lr = 0.05;
        for optimizer in [
            SGD,
            DenseOptimizer::Adagrad { lr, eps: 1e-8 },
            DenseOptimizer::Adam { lr, eps: 1e-8, beta1: 0.9, beta2: 0.999 },
        ] {
            for clip in [Clip::None, Clip::Value(0.01), Clip::Scale(0.3)] {
                let spec = spec(Interaction::Dot, &[4, 4]);
                let mut fixture = Fixture::new(device, spec, optimizer, 9);
                let start = fixture.params();
                let mut references: Vec<(String, Vec<Reference>)> = start
                    .into_iter()
                    .map(|(name, values)| {
                        let of = |p| Reference { optimizer, p, sum: 0.0, m: 0.0, v: 0.0 };
                        (name, values.into_iter().map(of).collect())
                    })
                    .collect();
                for t in 1..=12u64 {
                    fixture.fill(t as usize);
                    fixture.step(9);
                    let grads = fixture.grads();
                    for (name, elements) in &mut references {
                        let param = fixture.dlrm.params().iter().find(|p| p.name == *name).unwrap();
                        let grads = &grads[param.range.clone()];
                        for (element, &g) in elements.iter_mut().zip(grads) {
                            let g = f64::from(g);
                            let g = match clip {
                                Clip::None => g,
                                Clip::Value(limit) => g.clamp(-f64::from(limit), f64::from(limit)),
                                Clip::Scale(scale) => g * f64::from(scale),
                            };
                            element.step(t, g);
                        }
                    }
                    fixture.update(&DenseStep { t, lr: lr as f32, clip });
                }
                for (name, elements) in &references {
                    let read = |name: &str| fixture.dlrm.read(&fixture.stream, name).unwrap();
                    let close = |what: &str, got: &[f32], want: &dyn Fn(&Reference) -> f64| {
                        for (got, element) in got.iter().zip(elements) {
                            let want = want(element);
                            let error = (f64::from(*got) - want).abs();
                            assert!(
                                error <= 2e-6 + 1e-5 * want.abs(),
                                "{optimizer:?} {clip:?} {what}: {got}, expected {want}"
                            );
                        }
                    };
                    close(name, &read(name), &|e| e.p);
                    for state in optimizer.state_names() {
                        let full = format!("{name}.{state}");
                        close(&full, &read(&full), &|e| match *state {
                            "sum" => e.sum,
                            "m" => e.m,
                            _ => e.v,
                        });
                    }
                }
            }
        }
    }

    fn norms_add_up_over_any_buckets_and_are_those_of_the_gradients(device) {
        let spec = spec(Interaction::Dcn { layers: 2, rank: 3 }, &[40; 3]);
        let mut fixture = Fixture::new(device, spec.clone(), SGD, 33);
        fixture.step(33);
        let want: f64 = fixture.grads().iter().map(|&g| f64::from(g).powi(2)).sum();
        assert!(fixture.dlrm.buckets().len() > 5);
        let mut sum = 0.0;
        for bucket in 0..fixture.dlrm.buckets().len() {
            sum += fixture.dlrm.grad_sq_norm(&fixture.stream, bucket).unwrap();
        }
        assert!((sum / want - 1.0).abs() < 1e-12);
        assert_eq!(Dlrm::new(device, spec, SGD, 11).unwrap().buckets().len(), 1);
    }

    fn a_gradient_that_is_not_finite_is_named_before_any_update(device) {
        let mut fixture = Fixture::new(device, spec(Interaction::Concat, &[4, 4]), SGD, 5);
        let column = fixture.dlrm.spec().feature_column(1) + 2;
        fixture.upload(&[f32::INFINITY], column, |acts| &mut acts.x0);
        let Fixture { stream, dlrm, acts, batch, .. } = &mut fixture;
        dlrm.forward(stream, acts, 0..*batch).unwrap();
        dlrm.loss(stream, acts, 0..*batch, 5).unwrap();
        let mut seen = Vec::new();
        let error = dlrm
            .backward(stream, acts, 0..*batch, ParamGrad::Store, |mut bucket| {
                let norm = bucket.grad_sq_norm(stream)?;
                seen.extend(bucket.params.iter().map(|param| param.name.clone()));
                assert!(norm.is_finite());
                Ok::<(), DenseError>(())
            })
            .unwrap_err();
        let DenseError::NonFiniteGradient { parameter, value, .. } = &error else {
            panic!("{error}")
        };
        assert!(parameter.starts_with("dense.top."), "{error}");
        assert!(!value.is_finite());
        assert!(!seen.contains(parameter));

        // One element set by hand, far inside a parameter.
        let mut fixture = Fixture::new(device, spec(Interaction::Concat, &[4, 4]), SGD, 5);
        let Fixture { stream, dlrm, acts, batch, .. } = &mut fixture;
        dlrm.forward(stream, acts, 0..*batch).unwrap();
        dlrm.loss(stream, acts, 0..*batch, 5).unwrap();
        let result = dlrm.backward(stream, acts, 0..*batch, ParamGrad::Store, |mut bucket| {
            if let Some(param) = bucket.params.iter().find(|p| p.name == "dense.bottom.0.weight") {
                let at = param.range.start + 7;
                device.upload(stream, &[f32::NEG_INFINITY], bucket.grads, at)?;
            }
            bucket.grad_sq_norm(stream).map(drop)
        });
        let error = result.unwrap_err();
        let DenseError::NonFiniteGradient { parameter, index, value } = &error else {
            panic!("{error}")
        };
        assert_eq!((parameter.as_str(), *index), ("dense.bottom.0.weight", 7));
        assert_eq!(*value, f32::NEG_INFINITY);
    }

    fn tensors_can_be_read_and_written_by_name(device) {
        let adam = DenseOptimizer::Adam { lr: 0.1, eps: 1e-8, beta1: 0.9, beta2: 0.999 };
        let spec = spec(Interaction::Dcn { layers: 1, rank: 2 }, &[4, 2]);
        let mut fixture = Fixture::new(device, spec, adam, 2);
        let tensors: Vec<_> = fixture.dlrm.tensors().collect();
        let weights = tensors.iter().filter(|tensor| tensor.role == Role::Weight).count();
        assert_eq!((weights, tensors.len()), (13, 39));
        for (i, tensor) in tensors.iter().enumerate() {
            let len = tensor.shape.iter().product();
            let values: Vec<f32> = (0..len).map(|e| value(i, e)).collect();
            fixture.dlrm.write(&fixture.stream, &tensor.name, &values).unwrap();
        }
        for (i, tensor) in tensors.iter().enumerate() {
            let values = fixture.dlrm.read(&fixture.stream, &tensor.name).unwrap();
            assert!(values.iter().enumerate().all(|(e, &x)| x == value(i, e)), "{}", tensor.name);
        }
        let names = |name: &str| tensors.iter().any(|tensor| tensor.name == name);
        assert!(names("dense.cross.0.v") && names("dense.cross.0.v.m"));
        for name in ["dense.top.9.weight", "dense.top.0.weight.sum", "dense", ""] {
            let error = fixture.dlrm.read(&fixture.stream, name).unwrap_err();
            assert!(matches!(error, DenseError::UnknownTensor { .. }), "{error}");
        }
        let error = fixture.dlrm.write(&fixture.stream, "dense.top.2.bias", &[1.0; 2]).unwrap_err();
        assert!(matches!(error, DenseError::WrongLength { expected: 1, found: 2, .. }), "{error}");
    }

    fn an_empty_batch_gives_zero_gradients(device) {
        for interaction in
            [Interaction::Dot, Interaction::Concat, Interaction::Dcn { layers: 2, rank: 2 }]
        {
            let mut fixture = Fixture::new(device, spec(interaction, &[3, 3]), SGD, 4);
            fixture.step(4);
            fixture.batch = 0;
            let (loss, buckets) = fixture.step(4);
            assert_eq!(loss, 0.0);
            assert_eq!(buckets, fixture.dlrm.buckets().len());
            assert!(fixture.grads().iter().all(|&g| g == 0.0));
        }
    }

    fn batches_that_do_not_fit_are_refused_with_their_sizes(device) {
        let mut fixture = Fixture::new(device, spec(Interaction::Concat, &[3]), SGD, 4);
        let Fixture { stream, dlrm, acts, .. } = &mut fixture;
        let error = dlrm.forward(stream, acts, 0..5).unwrap_err();
        let DenseError::BatchTooLarge { batch: 5, max_batch: 4, .. } = error else {
            panic!("{error}")
        };
        for global_batch in [0, 3] {
            let error = dlrm.loss(stream, acts, 0..4, global_batch).unwrap_err();
            assert!(matches!(error, DenseError::GlobalBatch { batch: 4, .. }), "{error}");
        }
        assert!(dlrm.logits(stream, acts, &mut [0.0; 5]).is_err());
        let bad = ModelSpec { top: vec![2], ..dlrm.spec().clone() };
        let error = Dlrm::new(device, bad, DenseOptimizer::Sgd { lr: -1.0 }, 0).err().unwrap();
        let DenseError::Invalid { faults } = &error else { panic!("{error}") };
        assert_eq!(faults.iter().map(|fault| fault.key).collect::<Vec<_>>(), ["top_mlp", "lr"]);
    }

    fn first_values_and_predictions(device) {
        let spec = spec(Interaction::Dot, &[4, 4]);
        let make = |seed| Dlrm::new(device, spec.clone(), SGD, seed).unwrap();
        let stream = device.stream().unwrap();
        let of = |dlrm: &Dlrm<_>| dlrm.read(&stream, "dense.top.0.weight").unwrap();
        assert_eq!(of(&make(5)), of(&make(5)));
        assert_ne!(of(&make(5)), of(&make(6)));

        let mut fixture = Fixture::new(device, spec.clone(), SGD, 6);
        fixture.dlrm.forward(&fixture.stream, &mut fixture.acts, 0..6).unwrap();
        let (mut logits, mut predictions) = ([0.0; 6], [0.0; 6]);
        fixture.dlrm.logits(&fixture.stream, &fixture.acts, &mut logits).unwrap();
        fixture.dlrm.predictions(&fixture.stream, &fixture.acts, &mut predictions).unwrap();
        let (samples, params) = (fixture.samples(), fixture.params());
        for ((logit, p), sample) in logits.iter().zip(predictions).zip(&samples) {
            let want = crate::oracle::logit(&spec, &params, sample);
            assert!((f64::from(*logit) - want).abs() < 1e-5);
            assert_eq!(p, sigmoid(*logit));
        }
        assert_eq!((sigmoid(0.0), sigmoid(f32::MAX), sigmoid(f32::MIN)), (0.5, 1.0, 0.0));
    }
}
