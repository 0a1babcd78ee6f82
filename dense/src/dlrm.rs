//! A DLRM or DCNv2 without its tables: parameters, gradients, optimizer states and their names.
//! Its passes over a batch are in `passes`.

use std::ops::Range;

use tessera_device::DeviceBuffer;

use crate::activations::Activations;
use crate::error::{DenseError, Result};
use crate::ops::{DenseOps, Update, sum_blocks};
use crate::optimizer::{DenseOptimizer, DenseStep};
use crate::params::{BUCKET_BYTES, Layout, Param, Role, Tensor, first_values};
use crate::spec::ModelSpec;

/// Parameters, gradients and optimizer states of a model, and its passes.
///
/// Work is given to the caller's stream. The step number is the caller's: see [`DenseStep`].
pub struct Dlrm<D: DenseOps> {
    pub(crate) device: D,
    pub(crate) spec: ModelSpec,
    optimizer: DenseOptimizer,
    pub(crate) layout: Layout,
    pub(crate) weights: D::Buffer<f32>,
    pub(crate) grads: D::Buffer<f32>,
    states: Vec<D::Buffer<f32>>,
    /// For `DenseOps::sums_of_squares`.
    pub(crate) partial_sums: D::Buffer<f64>,
    /// A parameter's sum each.
    pub(crate) sums: Vec<f64>,
}

impl<D: DenseOps> Dlrm<D> {
    /// A model with its first values, a function of `seed` and the parameters' names alone.
    ///
    /// Errors: [`DenseError::Invalid`] with every fault, [`DenseError::Device`].
    pub fn new(device: &D, spec: ModelSpec, optimizer: DenseOptimizer, seed: u64) -> Result<Self> {
        Self::with_bucket_bytes(device, spec, optimizer, seed, BUCKET_BYTES)
    }

    /// As [`Dlrm::new`], with buckets of about `bucket_bytes` (whole layers).
    pub fn with_bucket_bytes(
        device: &D,
        spec: ModelSpec,
        optimizer: DenseOptimizer,
        seed: u64,
        bucket_bytes: usize,
    ) -> Result<Self> {
        let mut faults = spec.validate().err().unwrap_or_default();
        faults.extend(optimizer.validate().err().unwrap_or_default());
        if !faults.is_empty() {
            return Err(DenseError::Invalid { faults });
        }
        let layout = Layout::new(&spec, bucket_bytes);
        let stream = device.stream()?;
        let mut weights = device.alloc(layout.len)?;
        for param in &layout.params {
            let values = first_values(param, seed);
            device.upload(&stream, &values, &mut weights, param.range.start)?;
        }
        device.synchronize(&stream)?;
        let blocks = sum_blocks(layout.params.iter().map(|param| param.range.len()));
        Ok(Self {
            device: device.clone(),
            weights,
            grads: device.alloc(layout.len)?,
            states: optimizer
                .state_names()
                .iter()
                .map(|_| device.alloc(layout.len))
                .collect::<tessera_device::Result<_>>()?,
            partial_sums: device.alloc(blocks)?,
            sums: vec![0.0; layout.params.len()],
            spec,
            optimizer,
            layout,
        })
    }

    /// The model's shape.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// The optimizer.
    #[must_use]
    pub fn optimizer(&self) -> &DenseOptimizer {
        &self.optimizer
    }

    /// Parameters in flat order, which is the order in which backward finishes them.
    #[must_use]
    pub fn params(&self) -> &[Param] {
        &self.layout.params
    }

    /// Contiguous ranges of the flat buffers in the order in which backward finishes them.
    #[must_use]
    pub fn buckets(&self) -> &[Range<usize>] {
        &self.layout.buckets
    }

    /// Memory for batches of up to `max_batch` rows.
    ///
    /// Errors: [`DenseError::Device`].
    pub fn activations(&self, max_batch: usize) -> Result<Activations<D>> {
        let stream = self.device.stream()?;
        let made = Activations::new(&self.device, &stream, &self.spec, &self.layout, max_batch)?;
        self.device.synchronize(&stream)?;
        Ok(made)
    }

    /// Sum of the squares of a bucket's gradients: each parameter's sum in the fixed order of
    /// [`DenseOps::sums_of_squares`], then the parameters in flat order.
    ///
    /// Errors: [`DenseError::NonFiniteGradient`] naming the parameter, [`DenseError::Device`].
    ///
    /// # Panics
    /// When there is no such bucket.
    pub fn grad_sq_norm(&mut self, stream: &D::Stream, bucket: usize) -> Result<f64> {
        let params = self.layout.params_in(&self.layout.buckets[bucket]);
        let (scratch, sums) = (&mut self.partial_sums, &mut self.sums);
        let of = (&self.layout.params[params.clone()], &self.layout.ranges[params]);
        grad_sq_norm(&self.device, stream, of, &self.grads, scratch, sums)
    }

    /// One optimizer step on all parameters with the gradients of the last backward pass.
    ///
    /// Errors: [`DenseError::Device`].
    pub fn update(&mut self, stream: &D::Stream, step: &DenseStep) -> Result<()> {
        let DenseStep { t, lr, clip } = *step;
        let update = Update { rule: self.optimizer.rule(t), lr, clip, range: 0..self.layout.len };
        let (grads, weights) = (&self.grads, &mut self.weights);
        Ok(self.device.update(stream, &update, grads, weights, &mut self.states)?)
    }

    /// The first parameter, if any, with a weight or an optimizer state that is NaN or infinite:
    /// a finite gradient can still overflow in its update. One pass over weights and states.
    ///
    /// Errors: [`DenseError::Device`].
    pub fn nonfinite(&mut self, stream: &D::Stream) -> Result<Option<&str>> {
        // The first parameter whatever the buffer, so all buffers are read.
        let mut first = None;
        for values in std::iter::once(&self.weights).chain(&self.states) {
            let (scratch, sums) = (&mut self.partial_sums, &mut self.sums);
            self.device.sums_of_squares(stream, &self.layout.ranges, values, scratch, sums)?;
            let found = self.sums.iter().position(|sum| !sum.is_finite());
            first = first.into_iter().chain(found).min();
        }
        Ok(first.map(|param: usize| &*self.layout.params[param].name))
    }

    /// Replaces a bucket's gradients, as by their sum over ranks.
    ///
    /// Errors: [`DenseError::WrongLength`], [`DenseError::Device`].
    ///
    /// # Panics
    /// When there is no such bucket.
    pub fn write_grads(&mut self, stream: &D::Stream, bucket: usize, values: &[f32]) -> Result<()> {
        let range = self.layout.buckets[bucket].clone();
        if values.len() != range.len() {
            let (expected, found) = (range.len(), values.len());
            return Err(DenseError::WrongLength {
                name: format!("gradients of bucket {bucket}"),
                expected,
                found,
            });
        }
        Ok(self.device.upload(stream, values, &mut self.grads, range.start)?)
    }

    /// The flat gradient buffer, laid out as [`Dlrm::params`] says.
    #[must_use]
    pub fn grads(&self) -> &D::Buffer<f32> {
        &self.grads
    }

    /// The logits of a batch, on the host.
    ///
    /// Errors: [`DenseError::WrongLength`] when `out` is longer than the activations' rows,
    /// [`DenseError::Device`].
    pub fn logits(&self, stream: &D::Stream, acts: &Activations<D>, out: &mut [f32]) -> Result<()> {
        if out.len() > acts.max_batch {
            let (expected, found) = (acts.max_batch, out.len());
            return Err(DenseError::WrongLength { name: "logits".into(), expected, found });
        }
        Ok(self.device.download(stream, &acts.logits, 0, out)?)
    }

    /// The predictions of a batch, [`sigmoid`] of its logits, on the host.
    ///
    /// Errors: as [`Dlrm::logits`].
    pub fn predictions(
        &self,
        stream: &D::Stream,
        acts: &Activations<D>,
        out: &mut [f32],
    ) -> Result<()> {
        self.logits(stream, acts, out)?;
        for value in out {
            *value = sigmoid(*value);
        }
        Ok(())
    }

    /// Every tensor of a checkpoint: parameters in flat order, then each parameter's states.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor> + '_ {
        let of =
            |param: &Param, name: String, role| Tensor { name, shape: param.shape.clone(), role };
        let weights = self.layout.params.iter().map(move |p| of(p, p.name.clone(), Role::Weight));
        let states = self.layout.params.iter().flat_map(move |p| {
            let names = self.optimizer.state_names().iter();
            names.map(move |state| of(p, format!("{}.{state}", p.name), Role::State))
        });
        weights.chain(states)
    }

    /// Values of a tensor by its name, on the host.
    ///
    /// Errors: [`DenseError::UnknownTensor`], [`DenseError::Device`].
    pub fn read(&self, stream: &D::Stream, name: &str) -> Result<Vec<f32>> {
        let (state, range) = self.locate(name)?;
        let buffer = state.map_or(&self.weights, |state| &self.states[state]);
        let mut values = vec![0.0; range.len()];
        self.device.download(stream, buffer, range.start, &mut values)?;
        Ok(values)
    }

    /// Overwrites a tensor by its name.
    ///
    /// Errors: [`DenseError::UnknownTensor`], [`DenseError::WrongLength`],
    /// [`DenseError::Device`].
    pub fn write(&mut self, stream: &D::Stream, name: &str, values: &[f32]) -> Result<()> {
        let (state, range) = self.locate(name)?;
        if values.len() != range.len() {
            let (expected, found) = (range.len(), values.len());
            return Err(DenseError::WrongLength { name: name.into(), expected, found });
        }
        let buffer = match state {
            None => &mut self.weights,
            Some(state) => &mut self.states[state],
        };
        Ok(self.device.upload(stream, values, buffer, range.start)?)
    }

    /// Bytes of weights, gradients and states.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let buffers = [&self.weights, &self.grads].into_iter().chain(&self.states);
        buffers.map(|buffer| buffer.len() as u64 * size_of::<f32>() as u64).sum()
    }

    /// State number (none for the weights) and elements of a tensor.
    fn locate(&self, name: &str) -> Result<(Option<usize>, Range<usize>)> {
        let unknown = || DenseError::UnknownTensor { name: name.into() };
        let param = |name: &str| self.layout.params.iter().find(|param| param.name == name);
        if let Some(param) = param(name) {
            return Ok((None, param.range.clone()));
        }
        let (owner, state) = name.rsplit_once('.').ok_or_else(unknown)?;
        let states = self.optimizer.state_names();
        let state = states.iter().position(|&s| s == state).ok_or_else(unknown)?;
        Ok((Some(state), param(owner).ok_or_else(unknown)?.range.clone()))
    }
}

/// `1 / (1 + exp(-z))`, computed in f64.
#[must_use]
pub fn sigmoid(z: f32) -> f32 {
    (1.0 / (1.0 + (-f64::from(z)).exp())) as f32
}

/// See [`Dlrm::grad_sq_norm`].
pub(crate) fn grad_sq_norm<D: DenseOps>(
    device: &D,
    stream: &D::Stream,
    (params, ranges): (&[Param], &[Range<usize>]),
    grads: &D::Buffer<f32>,
    partial_sums: &mut D::Buffer<f64>,
    sums: &mut [f64],
) -> Result<f64> {
    let sums = &mut sums[..ranges.len()];
    device.sums_of_squares(stream, ranges, grads, partial_sums, sums)?;
    let mut total = 0.0;
    for (param, &mut sum) in params.iter().zip(sums) {
        if !sum.is_finite() {
            let mut values = vec![0.0f32; param.range.len()];
            device.download(stream, grads, param.range.start, &mut values)?;
            let found = values.iter().enumerate().find(|(_, value)| !value.is_finite());
            let (index, &value) = found.unwrap_or((0, &f32::NAN));
            return Err(DenseError::NonFiniteGradient {
                parameter: param.name.clone(),
                index,
                value,
            });
        }
        total += sum;
    }
    Ok(total)
}
