//! A model on some device with a batch of made-up inputs.

use std::num::NonZeroUsize;

use tessera_dense::{
    Activations, Bucket, DenseError, DenseOps, DenseOptimizer, DenseStep, Dlrm, Interaction, Loss,
    ModelSpec, ParamGrad, Role,
};
use tessera_device::{Cpu, DeviceBuffer};

use crate::oracle::{Params, Sample};

pub struct Fixture<D: DenseOps> {
    pub device: D,
    pub stream: D::Stream,
    pub dlrm: Dlrm<D>,
    pub acts: Activations<D>,
    pub batch: usize,
}

/// Tests with one body for every device: on the CPU, and on a GPU or its stand-in where there is
/// one.
macro_rules! on_each_device {
    ($($(#[$attribute:meta])* fn $name:ident($device:ident) $body:block)+) => {$(
        $(#[$attribute])*
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            fn body<D: tessera_dense::DenseOps>($device: &D) $body

            #[test]
            fn on_cpu() {
                body(&$crate::fixture::cpu(2));
            }

            #[test]
            fn on_cuda() {
                if let Some(cuda) = tessera_device::cuda::testing::cuda() {
                    body(&cuda);
                }
            }
        }
    )+};
}
pub(crate) use on_each_device;

/// All elements of a buffer, once the stream is done.
pub fn download<D: DenseOps>(device: &D, stream: &D::Stream, buffer: &D::Buffer<f32>) -> Vec<f32> {
    let mut values = vec![0.0; buffer.len()];
    device.download(stream, buffer, 0, &mut values).unwrap();
    values
}

pub fn cpu(threads: usize) -> Cpu {
    Cpu::new(NonZeroUsize::new(threads)).unwrap()
}

/// A model with one feature of each dim in `features`.
pub fn spec(interaction: Interaction, features: &[usize]) -> ModelSpec {
    ModelSpec {
        dense_features: 3,
        bottom: vec![5, features.first().copied().unwrap_or(4)],
        interaction,
        features: features.to_vec(),
        top: vec![7, 4, 1],
        wide: true,
        loss: Loss::Bce,
    }
}

/// A number in -1..1 that looks random but is the same for ever.
pub fn value(seed: usize, i: usize) -> f32 {
    let mixed = (seed as u64 * 0x9E37_79B9 + i as u64).wrapping_mul(0xD134_2543_DE82_EF95);
    let mixed = (mixed ^ (mixed >> 29)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (mixed >> 40) as f32 / (1u64 << 23) as f32 - 1.0
}

impl<D: DenseOps> Fixture<D> {
    pub fn new(device: &D, spec: ModelSpec, optimizer: DenseOptimizer, batch: usize) -> Self {
        let dlrm = Dlrm::with_bucket_bytes(device, spec, optimizer, 11, 200).unwrap();
        let acts = dlrm.activations(batch).unwrap();
        let stream = device.stream().unwrap();
        let mut fixture = Self { device: device.clone(), stream, dlrm, acts, batch };
        fixture.fill(0);
        fixture
    }

    /// Writes inputs that depend on `seed`, row and column alone, and NaN everywhere else.
    pub fn fill(&mut self, seed: usize) {
        let spec = self.dlrm.spec();
        let (stride, max_batch) = (spec.stride(), self.acts.max_batch());
        let mut x0 = vec![f32::NAN; max_batch * stride];
        let mut dense = vec![f32::NAN; max_batch * spec.dense_features];
        let mut labels = vec![f32::NAN; max_batch];
        let features = spec.dense_width()..spec.input_width();
        let wide = if spec.wide { spec.features.len() } else { 0 };
        for r in 0..self.batch {
            let seed = seed * 1_000_003 + r;
            for c in features.start..features.end + wide {
                x0[r * stride + c] = value(seed, c);
            }
            for c in 0..spec.dense_features {
                dense[r * spec.dense_features + c] = 2.0 * value(seed, 5_000 + c);
            }
            labels[r] = if value(seed, 9_000) > 0.0 { 1.0 } else { 0.0 };
        }
        let dx0 = vec![f32::NAN; x0.len()];
        let Self { device, stream, acts, .. } = self;
        for (values, buffer) in [
            (x0, &mut acts.x0),
            (dx0, &mut acts.dx0),
            (dense, &mut acts.dense),
            (labels, &mut acts.labels),
        ] {
            device.upload(stream, &values, buffer, 0).unwrap();
        }
    }

    /// Writes a column of all samples' input rows or labels, say.
    pub fn upload(
        &mut self,
        values: &[f32],
        at: usize,
        to: impl Fn(&mut Activations<D>) -> &mut D::Buffer<f32>,
    ) {
        self.device.upload(&self.stream, values, to(&mut self.acts), at).unwrap();
    }

    /// The gradients of all parameters.
    pub fn grads(&self) -> Vec<f32> {
        download(&self.device, &self.stream, self.dlrm.grads())
    }

    /// The gradients of the input rows.
    pub fn dx0(&self) -> Vec<f32> {
        download(&self.device, &self.stream, &self.acts.dx0)
    }

    /// Forward, loss and backward; returns the loss and the number of buckets handed over.
    pub fn step(&mut self, global_batch: u64) -> (f64, usize) {
        let Self { stream, dlrm, acts, batch, .. } = self;
        dlrm.forward(stream, acts, 0..*batch).unwrap();
        let loss = dlrm.loss(stream, acts, 0..*batch, global_batch).unwrap();
        let mut buckets = 0;
        let on_bucket = |mut bucket: Bucket<'_, D>| -> Result<(), DenseError> {
            assert_eq!(bucket.index, buckets);
            assert!(bucket.grad_sq_norm(stream)? >= 0.0);
            buckets += 1;
            Ok(())
        };
        dlrm.backward(stream, acts, 0..*batch, ParamGrad::Store, on_bucket).unwrap();
        (loss, buckets)
    }

    pub fn update(&mut self, step: &DenseStep) {
        self.dlrm.update(&self.stream, step).unwrap();
    }

    pub fn params(&self) -> Params {
        let tensors = self.dlrm.tensors().filter(|tensor| tensor.role == Role::Weight);
        tensors
            .map(|tensor| {
                let values = self.dlrm.read(&self.stream, &tensor.name).unwrap();
                (tensor.name, values.into_iter().map(f64::from).collect())
            })
            .collect()
    }

    /// The batch as the oracle takes it.
    pub fn samples(&self) -> Vec<Sample> {
        let spec = self.dlrm.spec();
        let get = |buffer| download(&self.device, &self.stream, buffer);
        let (x0, dense) = (get(&self.acts.x0), get(&self.acts.dense));
        let (labels, weights) = (get(&self.acts.labels), get(&self.acts.sample_weights));
        let cells = |at: usize, len: usize| -> Vec<f64> {
            x0[at..at + len].iter().map(|&x| f64::from(x)).collect()
        };
        (0..self.batch)
            .map(|r| {
                let row = r * spec.stride();
                let dense = &dense[r * spec.dense_features..][..spec.dense_features];
                let wide = if spec.wide { spec.features.len() } else { 0 };
                Sample {
                    dense: dense.iter().map(|&x| f64::from(x)).collect(),
                    features: (0..spec.features.len())
                        .map(|f| cells(row + spec.feature_column(f), spec.features[f]))
                        .collect(),
                    wide: cells(row + spec.input_width(), wide),
                    label: f64::from(labels[r]),
                    weight: f64::from(weights[r]),
                }
            })
            .collect()
    }

    /// Everything that a step wrote, as bits: weights, states, logits, gradients of the input.
    pub fn bits(&self) -> Vec<u32> {
        let mut bits = Vec::new();
        for tensor in self.dlrm.tensors() {
            bits.extend(self.dlrm.read(&self.stream, &tensor.name).unwrap());
        }
        let spec = self.dlrm.spec();
        let wide = if spec.wide { spec.features.len() } else { 0 };
        let logits = download(&self.device, &self.stream, &self.acts.logits);
        bits.extend(&logits[..self.batch]);
        let dx0 = self.dx0();
        for r in 0..self.batch {
            let row = &dx0[r * spec.stride()..][..spec.stride()];
            let end = spec.input_width() + wide;
            bits.extend(&row[spec.dense_width()..end]);
            assert!(row[end..].iter().all(|x| x.is_nan()), "padding was written");
        }
        assert!(bits.iter().all(|x| x.is_finite()));
        bits.into_iter().map(f32::to_bits).collect()
    }
}
