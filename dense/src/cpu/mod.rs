//! The operations of [`DenseOps`] on the host's cores.

mod dot;
mod elementwise;
mod gemm;
mod loss;
mod parallel;
mod vector;

use std::ops::Range;

use rayon::prelude::*;
use tessera_device::{Cpu, CpuStream, HostBuffer, Result};

use self::gemm::{Form, Product, Store, gemm};
use self::parallel::{pieces, row_groups, rows_mut, rows_mut2};
use crate::ops::{
    Activation, CrossInput, CrossLayer, DenseOps, DotShape, InputGrad, LOSS_BLOCK, Linear,
    LossInput, ParamGrad, Pass, Rows, RowsMut, SUM_BLOCK, Update,
};
use crate::optimizer::Rule;

/// Elements that one piece of an update handles.
const UPDATE_BLOCK: usize = 16_384;

/// Distance between the rows of a transposed gradient: whole cache lines, but never a large power
/// of two, whose rows would fall on the same cache sets.
fn turned_stride(batch: usize) -> usize {
    let lines = batch.next_multiple_of(vector::SIDE);
    if lines.is_multiple_of(256) { lines + vector::SIDE } else { lines }
}

/// Elements of `rows` rows of `cols` columns.
fn span(rows: usize, cols: usize, stride: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1) * stride + cols }
}

impl Rows<'_, Cpu> {
    fn slice(&self, rows: usize, cols: usize) -> &[f32] {
        &self.buffer[self.at..self.at + span(rows, cols, self.stride)]
    }
}

impl RowsMut<'_, Cpu> {
    fn slice(&mut self, rows: usize, cols: usize) -> &mut [f32] {
        &mut self.buffer[self.at..self.at + span(rows, cols, self.stride)]
    }
}

impl DenseOps for Cpu {
    fn linear(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        layer: Linear,
        act: Activation,
        x: Rows<'_, Self>,
        weights: &HostBuffer<f32>,
        mut y: RowsMut<'_, Self>,
    ) -> Result<()> {
        let Linear { inputs, outputs, weight, bias } = layer;
        let product = Product {
            m: batch,
            n: outputs,
            k: inputs,
            a: x.slice(batch, inputs),
            a_stride: x.stride,
            b: &weights[weight..weight + inputs * outputs],
            b_stride: inputs,
            form: Form::Transposed,
        };
        let bias = bias.map(|at| &weights[at..at + outputs]);
        let (simd, stride) = (self.simd(), y.stride);
        let out = y.slice(batch, outputs);
        gemm(self, product, Store::Replace, out, stride, |_, first, y| match (act, bias) {
            (Activation::Relu, Some(bias)) => {
                elementwise::add_bias_relu(simd, y, &bias[first..][..y.len()]);
            }
            (Activation::Relu, None) => elementwise::relu(simd, y),
            (Activation::Identity, Some(bias)) => {
                elementwise::add_bias(simd, y, &bias[first..][..y.len()]);
            }
            (Activation::Identity, None) => {}
        });
        Ok(())
    }

    fn linear_grad_input(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        layer: Linear,
        dy: Rows<'_, Self>,
        weights: &HostBuffer<f32>,
        store: InputGrad<'_, Self>,
        mut dx: RowsMut<'_, Self>,
    ) -> Result<()> {
        let Linear { inputs, outputs, weight, .. } = layer;
        let product = Product {
            m: batch,
            n: inputs,
            k: outputs,
            a: dy.slice(batch, outputs),
            a_stride: dy.stride,
            b: &weights[weight..weight + inputs * outputs],
            b_stride: inputs,
            form: Form::Plain,
        };
        let (simd, stride) = (self.simd(), dx.stride);
        let out = dx.slice(batch, inputs);
        match store {
            InputGrad::Store => gemm(self, product, Store::Replace, out, stride, |_, _, _| {}),
            InputGrad::Add => gemm(self, product, Store::Add, out, stride, |_, _, _| {}),
            InputGrad::Gate(x) => {
                let gates = x.slice(batch, inputs);
                gemm(self, product, Store::Replace, out, stride, |r, first, dx| {
                    elementwise::gate(simd, dx, &gates[r * x.stride + first..][..dx.len()]);
                });
            }
        }
        Ok(())
    }

    /// The gradient is transposed first: the product then reads both factors along their rows
    /// (a quarter faster than a product with a transposed factor, measured), and the bias'
    /// gradient is the sum of a row that has just been written.
    fn linear_grad_params(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        layer: Linear,
        dy: Rows<'_, Self>,
        x: Rows<'_, Self>,
        store: ParamGrad,
        grads: &mut HostBuffer<f32>,
        scratch: &mut HostBuffer<f32>,
    ) -> Result<()> {
        let Linear { inputs, outputs, weight, bias } = layer;
        let from = dy.slice(batch, outputs);
        let simd = self.simd();
        let turned = turned_stride(batch);
        if batch > 0 {
            let cost = batch * outputs;
            let scratch = parallel::Tiles::new(&mut scratch[..turned * outputs], turned);
            pieces(self, outputs.div_ceil(vector::SIDE), cost, |piece| {
                let first = piece * vector::SIDE;
                let cols = vector::SIDE.min(outputs - first);
                // SAFETY: pieces have disjoint rows of the transposed gradient.
                let to = unsafe { scratch.row(first, 0..cols * turned) };
                vector::transpose(simd, &from[first..], dy.stride, batch, cols, to, turned);
            });
        }
        let turned_dy = &scratch[..span(outputs, batch, turned)];
        if let Some(bias) = bias {
            let sums = &mut grads[bias..bias + outputs];
            rows_mut(self, (outputs, 1, batch.max(1)), sums, 1, |r, sum| {
                let here = vector::sum(simd, &turned_dy[r * turned..][..batch]);
                sum[0] = if store == ParamGrad::Add { sum[0] + here } else { here };
            });
        }
        let product = Product {
            m: outputs,
            n: inputs,
            k: batch,
            a: turned_dy,
            a_stride: turned,
            b: x.slice(batch, inputs),
            b_stride: x.stride,
            form: Form::Plain,
        };
        let out = &mut grads[weight..weight + inputs * outputs];
        let store = if store == ParamGrad::Add { Store::Add } else { Store::Replace };
        gemm(self, product, store, out, inputs, |_, _, _| {});
        Ok(())
    }

    fn scratch_len(&self, max_batch: usize, outputs: usize) -> usize {
        // The stride of a smaller batch may be longer than that of `max_batch`, but not than this.
        (max_batch.next_multiple_of(vector::SIDE) + vector::SIDE).saturating_mul(outputs)
    }

    fn relu_grad(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        cols: usize,
        y: Rows<'_, Self>,
        mut dy: RowsMut<'_, Self>,
    ) -> Result<()> {
        let (simd, gates, stride) = (self.simd(), y.slice(batch, cols), dy.stride);
        rows_mut(self, (batch, cols, 1), dy.slice(batch, cols), stride, |r, dy| {
            elementwise::gate(simd, dy, &gates[r * y.stride..][..cols]);
        });
        Ok(())
    }

    fn copy_rows(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        cols: usize,
        from: Rows<'_, Self>,
        mut to: RowsMut<'_, Self>,
    ) -> Result<()> {
        let (source, stride) = (from.slice(batch, cols), to.stride);
        rows_mut(self, (batch, cols, 1), to.slice(batch, cols), stride, |r, to| {
            to.copy_from_slice(&source[r * from.stride..][..cols]);
        });
        Ok(())
    }

    fn dot(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        shape: DotShape,
        x: Rows<'_, Self>,
        mut y: RowsMut<'_, Self>,
    ) -> Result<()> {
        let DotShape { vectors, dim, copied } = shape;
        let (width, cols) = (vectors * dim, copied + shape.pairs());
        let (simd, source, stride) = (self.simd(), x.slice(batch, width), y.stride);
        let x_stride = x.stride;
        let out = (y.slice(batch, cols), stride);
        let rows = (batch, cols, dim);
        row_groups(self, rows, dot::LANES, out, dot::Work::new, |work, first, y| {
            let x = &source[first * x_stride..];
            let from = (x, x_stride);
            let count = y.len().div_ceil(stride);
            for (y, x) in y.chunks_mut(stride).zip(x.chunks(x_stride)) {
                y[..copied].copy_from_slice(&x[..copied]);
            }
            dot::forward(simd, shape, from, count, (y, stride), work);
        });
        Ok(())
    }

    fn dot_grad(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        shape: DotShape,
        x: Rows<'_, Self>,
        dy: Rows<'_, Self>,
        mut dx: RowsMut<'_, Self>,
    ) -> Result<()> {
        let DotShape { vectors, dim, copied } = shape;
        let (width, cols) = (vectors * dim, copied + shape.pairs());
        let (simd, stride) = (self.simd(), dx.stride);
        let (source, grads) = (x.slice(batch, width), dy.slice(batch, cols));
        let (x_stride, dy_stride) = (x.stride, dy.stride);
        let out = (dx.slice(batch, width), stride);
        let rows = (batch, width, vectors);
        row_groups(self, rows, dot::LANES, out, dot::Work::new, |work, first, dx| {
            let x = (&source[first * x_stride..], x_stride);
            let dy = (&grads[first * dy_stride..], dy_stride);
            let count = dx.len().div_ceil(stride);
            dot::backward(simd, shape, x, dy, count, (dx, stride), work);
        });
        Ok(())
    }

    fn cross(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        cols: usize,
        x0: Rows<'_, Self>,
        u: Rows<'_, Self>,
        x: Rows<'_, Self>,
        mut y: RowsMut<'_, Self>,
    ) -> Result<()> {
        let (simd, stride) = (self.simd(), y.stride);
        let (x0s, us, xs) = (x0.slice(batch, cols), u.slice(batch, cols), x.slice(batch, cols));
        rows_mut(self, (batch, cols, 1), y.slice(batch, cols), stride, |r, y| {
            let x0 = &x0s[r * x0.stride..][..cols];
            let u = &us[r * u.stride..][..cols];
            elementwise::cross(simd, x0, u, &xs[r * x.stride..][..cols], y);
        });
        Ok(())
    }

    fn cross_grad(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        CrossLayer { cols, first, last }: CrossLayer,
        CrossInput { dy, x0, u }: CrossInput<'_, Self>,
        mut du: RowsMut<'_, Self>,
        mut dx0: RowsMut<'_, Self>,
    ) -> Result<()> {
        let simd = self.simd();
        let (dys, x0s, us) = (dy.slice(batch, cols), x0.slice(batch, cols), u.slice(batch, cols));
        let (du_stride, dx0_stride) = (du.stride, dx0.stride);
        let du = (du.slice(batch, cols), du_stride);
        let dx0 = (dx0.slice(batch, cols), dx0_stride);
        rows_mut2(self, (batch, cols), du, dx0, |r, du, dx0| {
            let dy = &dys[r * dy.stride..][..cols];
            let x0 = &x0s[r * x0.stride..][..cols];
            let u = &us[r * u.stride..][..cols];
            elementwise::cross_grad(simd, first, last, dy, x0, u, du, dx0);
        });
        Ok(())
    }

    fn add_columns(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        cols: usize,
        x: Rows<'_, Self>,
        mut y: RowsMut<'_, Self>,
    ) -> Result<()> {
        let (columns, stride) = (x.slice(batch, cols), y.stride);
        rows_mut(self, (batch, 1, cols), y.slice(batch, 1), stride, |r, y| {
            for x in &columns[r * x.stride..][..cols] {
                y[0] += x;
            }
        });
        Ok(())
    }

    fn spread_column(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        cols: usize,
        dy: Rows<'_, Self>,
        mut dx: RowsMut<'_, Self>,
    ) -> Result<()> {
        let (column, stride) = (dy.slice(batch, 1), dx.stride);
        rows_mut(self, (batch, cols, 1), dx.slice(batch, cols), stride, |r, dx| {
            dx.fill(column[r * dy.stride]);
        });
        Ok(())
    }

    fn loss(
        &self,
        Pass { batch, .. }: Pass<'_, Self>,
        input: LossInput<'_, Self>,
        dlogits: &mut HostBuffer<f32>,
        scratch: &mut HostBuffer<f64>,
    ) -> Result<f64> {
        let samples = input.first..input.first + batch;
        let (logits, labels) = (&input.logits[samples.clone()], &input.labels[samples.clone()]);
        let weights = &input.sample_weights[samples.clone()];
        let partial = &mut scratch[..batch.div_ceil(LOSS_BLOCK)];
        let rows = input.global_batch as f64;
        let block = |(i, (grads, partial)): (usize, (&mut [f32], &mut f64))| {
            *partial = 0.0;
            for (grad, at) in grads.iter_mut().zip(i * LOSS_BLOCK..) {
                let weight = f64::from(weights[at]);
                let (value, slope) = loss::sample(input.loss, logits[at], labels[at]);
                *partial += weight * value;
                *grad = (weight * slope / rows) as f32;
            }
        };
        self.run(|| {
            let grads = dlogits[samples].par_chunks_mut(LOSS_BLOCK);
            grads.zip(partial.par_iter_mut()).enumerate().for_each(block);
        });
        Ok(partial.iter().sum::<f64>() / rows)
    }

    fn update(
        &self,
        _: &CpuStream,
        update: &Update,
        grads: &HostBuffer<f32>,
        weights: &mut HostBuffer<f32>,
        states: &mut [HostBuffer<f32>],
    ) -> Result<()> {
        let simd = self.simd();
        let Update { rule, lr, clip, ref range } = *update;
        let grads = grads[range.clone()].par_chunks(UPDATE_BLOCK);
        let weights = weights[range.clone()].par_chunks_mut(UPDATE_BLOCK);
        let both = grads.zip(weights);
        self.run(|| match (rule, states) {
            (Rule::Sgd, _) => {
                both.for_each(|(g, w)| elementwise::sgd(simd, lr, clip, g, w));
            }
            (Rule::Adagrad { eps }, [sum]) => {
                let sum = sum[range.clone()].par_chunks_mut(UPDATE_BLOCK);
                both.zip(sum).for_each(|((g, w), sum)| {
                    elementwise::adagrad(simd, lr, eps, clip, g, w, sum);
                });
            }
            (Rule::Adam(rule), [m, v]) => {
                let m = m[range.clone()].par_chunks_mut(UPDATE_BLOCK);
                let v = v[range.clone()].par_chunks_mut(UPDATE_BLOCK);
                both.zip(m).zip(v).for_each(|(((g, w), m), v)| {
                    elementwise::adam(simd, lr, rule, clip, g, w, m, v);
                });
            }
            // The trait's contract: as many states as `DenseOptimizer::state_names` lists.
            (Rule::Adagrad { .. } | Rule::Adam(_), states) => {
                panic!("{rule:?} cannot work on {} states", states.len());
            }
        });
        Ok(())
    }

    fn sums_of_squares(
        &self,
        _: &CpuStream,
        ranges: &[Range<usize>],
        buffer: &HostBuffer<f32>,
        scratch: &mut HostBuffer<f64>,
        sums: &mut [f64],
    ) -> Result<()> {
        let simd = self.simd();
        for (range, sum) in ranges.iter().zip(sums) {
            let values = &buffer[range.clone()];
            if values.len() <= SUM_BLOCK {
                // Most biases: not worth waking a worker.
                *sum = elementwise::sum_of_squares(simd, values);
                continue;
            }
            let partial = &mut scratch[..values.len().div_ceil(SUM_BLOCK)];
            let blocks = values.par_chunks(SUM_BLOCK);
            self.run(|| {
                blocks.zip(partial.par_iter_mut()).for_each(|(block, partial)| {
                    *partial = elementwise::sum_of_squares(simd, block);
                });
            });
            *sum = partial.iter().sum();
        }
        Ok(())
    }
}
