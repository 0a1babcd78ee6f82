//! The passes of a model over a batch: forward, loss, backward.

use std::mem::swap;
use std::ops::Range;

use crate::activations::{Activations, Between};
use crate::dlrm::{Dlrm, grad_sq_norm};
use crate::error::{DenseError, Result};
use crate::ops::{
    Activation, CrossInput, CrossLayer, DenseOps, DotShape, InputGrad, Linear, LossInput,
    ParamGrad, Pass, Rows, RowsMut,
};
use crate::params::{Layout, Param};
use crate::spec::ModelSpec;

/// A bucket whose gradients are final; backward hands it to its caller.
pub struct Bucket<'a, D: DenseOps> {
    /// Number of the bucket.
    pub index: usize,
    /// Its elements of the flat gradient buffer.
    pub range: Range<usize>,
    /// The flat gradient buffer. Only `range` may be changed.
    pub grads: &'a mut D::Buffer<f32>,
    /// Parameters in the bucket, in flat order.
    pub params: &'a [Param],
    ranges: &'a [Range<usize>],
    device: &'a D,
    partial_sums: &'a mut D::Buffer<f64>,
    sums: &'a mut [f64],
}

impl<D: DenseOps> Bucket<'_, D> {
    /// As [`Dlrm::grad_sq_norm`].
    ///
    /// Errors: as there.
    pub fn grad_sq_norm(&mut self, stream: &D::Stream) -> Result<f64> {
        let of = (self.params, self.ranges);
        grad_sq_norm(self.device, stream, of, self.grads, self.partial_sums, self.sums)
    }
}

impl<D: DenseOps> Dlrm<D> {
    /// From `acts.dense` and the features' columns of `acts.x0` to `acts.logits`, of the samples
    /// `rows` of a batch. What backward needs besides is kept of these samples alone: a batch that
    /// is worked on in parts goes forward and backward part by part.
    ///
    /// Errors: [`DenseError::BatchTooLarge`], [`DenseError::Device`].
    pub fn forward(
        &self,
        stream: &D::Stream,
        acts: &mut Activations<D>,
        rows: Range<usize>,
    ) -> Result<()> {
        check_rows("forward", acts, &rows)?;
        let pass = Pass { stream, batch: rows.len() };
        let (device, spec, weights) = (&self.device, &self.spec, &self.weights);
        let stride = spec.stride();
        let Activations { dense, x0, logits, bottom, interaction, top, .. } = acts;

        let start = rows.start * stride; // in x0
        let raw = Rows::<D>::new(dense, rows.start * spec.dense_features, spec.dense_features);
        if self.layout.bottom.is_empty() {
            let to = RowsMut::new(x0, start, stride);
            device.copy_rows(pass, spec.dense_features, raw, to)?;
        }
        for (i, &layer) in self.layout.bottom.iter().enumerate() {
            let (before, after) = bottom.split_at_mut(i);
            let x = before.last().map_or(raw, |x| Rows::new(x, 0, layer.inputs));
            let y = match after.first_mut() {
                Some(y) => RowsMut::new(y, 0, layer.outputs),
                None => RowsMut::new(&mut *x0, start, stride),
            };
            device.linear(pass, layer, Activation::Relu, x, weights, y)?;
        }

        let x0 = Rows::<D>::new(x0, start, stride);
        let width = spec.interaction_width();
        let interacted = match interaction {
            Between::Concat => x0,
            Between::Dot { y, .. } => {
                device.dot(pass, dot_shape(spec), x0, RowsMut::new(y, 0, width))?;
                Rows::new(y, 0, width)
            }
            Between::Dcn { layers, .. } => {
                let mut x = x0;
                for (values, cross) in layers.iter_mut().zip(&self.layout.cross) {
                    let rank = cross.v.outputs;
                    let h = RowsMut::new(&mut values.h, 0, rank);
                    device.linear(pass, cross.v, Activation::Identity, x, weights, h)?;
                    let h = Rows::new(&values.h, 0, rank);
                    let u = RowsMut::new(&mut values.u, 0, width);
                    device.linear(pass, cross.w, Activation::Identity, h, weights, u)?;
                    let u = Rows::new(&values.u, 0, width);
                    device.cross(pass, width, x0, u, x, RowsMut::new(&mut values.y, 0, width))?;
                    x = Rows::new(&values.y, 0, width);
                }
                x
            }
        };

        for (i, &layer) in self.layout.top.iter().enumerate() {
            let (before, after) = top.split_at_mut(i);
            let x = before.last().map_or(interacted, |x| Rows::new(x, 0, layer.inputs));
            let (y, act) = match after.first_mut() {
                Some(y) => (RowsMut::new(y, 0, layer.outputs), Activation::Relu),
                None => (RowsMut::new(&mut *logits, rows.start, 1), Activation::Identity),
            };
            device.linear(pass, layer, act, x, weights, y)?;
        }
        if spec.wide {
            let columns = Rows::new(x0.buffer, start + spec.wide_column(0), stride);
            let logits = RowsMut::new(logits, rows.start, 1);
            device.add_columns(pass, spec.features.len(), columns, logits)?;
        }
        Ok(())
    }

    /// The part of the loss that the samples `rows` have, `sum_i w_i l_i / global_batch`, and their
    /// `acts.dlogits`.
    /// `global_batch` is the number of samples on all ranks.
    ///
    /// Errors: [`DenseError::BatchTooLarge`], [`DenseError::GlobalBatch`],
    /// [`DenseError::Device`].
    pub fn loss(
        &self,
        stream: &D::Stream,
        acts: &mut Activations<D>,
        rows: Range<usize>,
        global_batch: u64,
    ) -> Result<f64> {
        check_rows("loss", acts, &rows)?;
        let batch = rows.len();
        if global_batch < (batch as u64).max(1) {
            return Err(DenseError::GlobalBatch { batch, global_batch });
        }
        let input = LossInput {
            loss: self.spec.loss,
            global_batch,
            first: rows.start,
            logits: &acts.logits,
            labels: &acts.labels,
            sample_weights: &acts.sample_weights,
        };
        let (dlogits, partial) = (&mut acts.dlogits, &mut acts.partial_losses);
        Ok(self.device.loss(Pass { stream, batch }, input, dlogits, partial)?)
    }

    /// From `acts.dlogits` to the gradients of all parameters and to `acts.dx0`, of the samples
    /// `rows`, which went forward last. Gradients of parameters are stored as `store` says: those
    /// of a batch's parts add up. `on_bucket` is called as this pass is done with each bucket, in
    /// order; an error from it stops the pass.
    ///
    /// Errors: [`DenseError::BatchTooLarge`], [`DenseError::Device`], the caller's own.
    pub fn backward<E: From<DenseError>>(
        &mut self,
        stream: &D::Stream,
        acts: &mut Activations<D>,
        rows: Range<usize>,
        store: ParamGrad,
        mut on_bucket: impl FnMut(Bucket<'_, D>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), E> {
        check_rows("backward", acts, &rows)?;
        let pass = Pass { stream, batch: rows.len() };
        let (device, spec) = (&self.device, &self.spec);
        let (stride, width) = (spec.stride(), spec.interaction_width());
        let Activations { dense, x0, dx0, dlogits, bottom, interaction, top, .. } = acts;
        let start = rows.start * stride; // in x0 and dx0
        let x0 = Rows::<D>::new(x0, start, stride);
        let mut backward = Backward {
            pass,
            store,
            device,
            layout: &self.layout,
            weights: &self.weights,
            grads: &mut self.grads,
            partial_sums: &mut self.partial_sums,
            sums: &mut self.sums,
            scratch: &mut acts.scratch,
            next_bucket: 0,
            on_bucket: &mut on_bucket,
        };
        // Gradients of hidden layers: the present one is in `front`, the next goes to `back`.
        let [front, back] = &mut acts.grads;
        let (mut front, mut back) = (front, back);

        if spec.wide {
            let dx = RowsMut::new(&mut *dx0, start + spec.wide_column(0), stride);
            let dy = Rows::new(dlogits, rows.start, 1);
            lift(device.spread_column(pass, spec.features.len(), dy, dx))?;
        }
        let layers = &self.layout.top;
        for (i, &layer) in layers.iter().enumerate().rev() {
            let dy = match i + 1 == layers.len() {
                true => Rows::new(dlogits, rows.start, 1),
                false => Rows::new(&*front, 0, layer.outputs),
            };
            if i > 0 {
                let x = Rows::new(&top[i - 1], 0, layer.inputs);
                let dx = RowsMut::new(back, 0, layer.inputs);
                backward.linear(layer, dy, x, Some((InputGrad::Gate(x), dx)))?;
                swap(&mut front, &mut back);
                continue;
            }
            let (x, dx) = match &mut *interaction {
                Between::Concat => (x0, RowsMut::new(&mut *dx0, start, stride)),
                Between::Dot { y, dy } => (Rows::new(&*y, 0, width), RowsMut::new(dy, 0, width)),
                Between::Dcn { layers, dx, .. } => {
                    let x = layers.last().map_or(x0, |last| Rows::new(&last.y, 0, width));
                    (x, RowsMut::new(dx, 0, width))
                }
            };
            backward.linear(layer, dy, x, Some((InputGrad::Store, dx)))?;
        }

        match interaction {
            Between::Concat => {}
            Between::Dot { dy, .. } => {
                let dx = RowsMut::new(&mut *dx0, start, stride);
                let dy = Rows::new(&*dy, 0, width);
                lift(device.dot_grad(pass, dot_shape(spec), x0, dy, dx))?;
            }
            Between::Dcn { layers, dx, du, dh } => {
                for (i, cross) in self.layout.cross.iter().enumerate().rev() {
                    let (first, last) = (i == 0, i + 1 == layers.len());
                    let rank = cross.v.outputs;
                    let u = Rows::new(&layers[i].u, 0, width);
                    let input = CrossInput { dy: Rows::new(&*dx, 0, width), x0, u };
                    let to = RowsMut::new(&mut *du, 0, width);
                    let to_x0 = RowsMut::new(&mut *dx0, start, stride);
                    let layer = CrossLayer { cols: width, first, last };
                    lift(device.cross_grad(pass, layer, input, to, to_x0))?;

                    let (dy, x) = (Rows::new(&*du, 0, width), Rows::new(&layers[i].h, 0, rank));
                    let to = RowsMut::new(&mut *dh, 0, rank);
                    backward.linear(cross.w, dy, x, Some((InputGrad::Store, to)))?;

                    let dy = Rows::new(&*dh, 0, rank);
                    let (x, to) = if first {
                        (x0, RowsMut::new(&mut *dx0, start, stride))
                    } else {
                        (Rows::new(&layers[i - 1].y, 0, width), RowsMut::new(&mut *dx, 0, width))
                    };
                    backward.linear(cross.v, dy, x, Some((InputGrad::Add, to)))?;
                }
            }
        }

        let layers = &self.layout.bottom;
        if !layers.is_empty() {
            let dy = RowsMut::new(&mut *dx0, start, stride);
            lift(device.relu_grad(pass, spec.dense_width(), x0, dy))?;
        }
        for (i, &layer) in layers.iter().enumerate().rev() {
            let dy = match i + 1 == layers.len() {
                true => Rows::new(&*dx0, start, stride),
                false => Rows::new(&*front, 0, layer.outputs),
            };
            if i == 0 {
                let x = Rows::new(dense, rows.start * layer.inputs, layer.inputs);
                backward.linear(layer, dy, x, None)?;
                continue;
            }
            let x = Rows::new(&bottom[i - 1], 0, layer.inputs);
            let dx = RowsMut::new(back, 0, layer.inputs);
            backward.linear(layer, dy, x, Some((InputGrad::Gate(x), dx)))?;
            swap(&mut front, &mut back);
        }
        Ok(())
    }
}

/// Backward through linear layers in flat order, handing finished buckets on.
struct Backward<'a, D: DenseOps, F> {
    pass: Pass<'a, D>,
    store: ParamGrad,
    device: &'a D,
    layout: &'a Layout,
    weights: &'a D::Buffer<f32>,
    grads: &'a mut D::Buffer<f32>,
    partial_sums: &'a mut D::Buffer<f64>,
    sums: &'a mut [f64],
    scratch: &'a mut D::Buffer<f32>,
    next_bucket: usize,
    on_bucket: &'a mut F,
}

impl<D: DenseOps, F> Backward<'_, D, F> {
    /// Gradients of `layer`, whose parameters are next in flat order, then that of its input.
    fn linear<E: From<DenseError>>(
        &mut self,
        layer: Linear,
        dy: Rows<'_, D>,
        x: Rows<'_, D>,
        input: Option<(InputGrad<'_, D>, RowsMut<'_, D>)>,
    ) -> std::result::Result<(), E>
    where
        F: FnMut(Bucket<'_, D>) -> std::result::Result<(), E>,
    {
        let (grads, scratch) = (&mut *self.grads, &mut *self.scratch);
        let (pass, store) = (self.pass, self.store);
        lift(self.device.linear_grad_params(pass, layer, dy, x, store, grads, scratch))?;
        let done = match layer.bias {
            Some(bias) => bias + layer.outputs,
            None => layer.weight + layer.inputs * layer.outputs,
        };
        // A bucket ends with a layer's last parameter and the gap after it.
        while let Some(range) = self.layout.buckets.get(self.next_bucket)
            && let params = self.layout.params_in(range)
            && self.layout.ranges[params.clone()].last().is_some_and(|last| last.end <= done)
        {
            (self.on_bucket)(Bucket {
                index: self.next_bucket,
                range: range.clone(),
                grads: self.grads,
                params: &self.layout.params[params.clone()],
                ranges: &self.layout.ranges[params],
                device: self.device,
                partial_sums: self.partial_sums,
                sums: self.sums,
            })?;
            self.next_bucket += 1;
        }
        match input {
            Some((store, dx)) => {
                lift(self.device.linear_grad_input(self.pass, layer, dy, self.weights, store, dx))
            }
            None => Ok(()),
        }
    }
}

/// A device's error as the caller's.
fn lift<E: From<DenseError>>(result: tessera_device::Result<()>) -> std::result::Result<(), E> {
    result.map_err(|error| DenseError::from(error).into())
}

/// The dot interaction of a model.
fn dot_shape(spec: &ModelSpec) -> DotShape {
    let dim = spec.features.first().copied().unwrap_or_default();
    DotShape { vectors: spec.vectors(), dim, copied: spec.dense_width() }
}

fn check_rows<D: DenseOps>(
    operation: &'static str,
    acts: &Activations<D>,
    rows: &Range<usize>,
) -> Result<()> {
    let max_batch = acts.max_batch();
    if rows.end > max_batch {
        return Err(DenseError::BatchTooLarge { operation, batch: rows.end, max_batch });
    }
    Ok(())
}
