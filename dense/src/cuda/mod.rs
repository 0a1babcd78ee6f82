//! The operations of [`DenseOps`] on a GPU.
//!
//! ```text
//! linear.rs       products: cuBLASLt for matrices (`Cuda::multiply`), our own kernels where one
//!                 side is a single row or column, and for sums of columns
//! rows.rs         passes over rows: gates, copies, cross layers' ends, the wide part
//! interaction.rs  the dot interaction
//! sums.rs         losses, squared norms: the operations that give the host a number
//! update.rs       optimizers
//! kernels.rs      the sources in `dense/kernels`, and views as arguments
//! ```
//!
//! **Nothing waits** but the operations of `sums.rs`, which copy one number or a few back; the sums of
//! a bucket's parameters are one launch and one wait.
//!
//! **Bits.** Our kernels do the host's operations in the host's order: everything but products of
//! matrices (cuBLASLt's order; the same on one configuration of GPU and library) and the
//! exponential and logarithm of the loss has the CPU's bits, whatever the streams or blocks. There
//! are no atomics.
//!
//! **Fused or not.** A linear layer's bias and ReLU are cuBLASLt's epilogues where it has an
//! algorithm with them, the bias is aligned and its ReLU keeps NaN; what is left is one pass of
//! `dense_finish_linear`, 8 bytes an element. Adding to an output is the product's own beta. Not
//! fused: the gate of a hidden layer's gradient (the library's takes a mask of bits that forward
//! would have to leave behind, and 1 bit an element in place of the 4 bytes that are there saves a
//! third of that pass), and the bias' gradient, whose order would be the library's.
//!
//! **Precision** is the device's (`CudaOptions::precision`): f32, or factors rounded to TF32 when
//! asked for.
//!
//! What a step of (batch, width) costs beside products, in bytes of memory an element: 12 a gate,
//! 4 a bias' gradient, 16 a cross layer's end and 20 its gradient; a DCNv2 of 3 layers and 3,456
//! columns with 65,536 samples moves 24 GB so, 5 ms of an H200.

mod interaction;
mod kernels;
mod linear;
mod rows;
mod sums;
mod update;

use std::ops::Range;

use tessera_device::cuda::{CudaBuffer, CudaStream};
use tessera_device::{Cuda, Result};

use crate::ops::{
    Activation, CrossInput, CrossLayer, DenseOps, DotShape, InputGrad, Linear, LossInput,
    ParamGrad, Pass, Rows, RowsMut, Update,
};

impl DenseOps for Cuda {
    fn linear(
        &self,
        pass: Pass<'_, Self>,
        layer: Linear,
        act: Activation,
        x: Rows<'_, Self>,
        weights: &CudaBuffer<f32>,
        y: RowsMut<'_, Self>,
    ) -> Result<()> {
        linear::forward(self, pass, layer, act, x, weights, y)
    }

    fn linear_grad_input(
        &self,
        pass: Pass<'_, Self>,
        layer: Linear,
        dy: Rows<'_, Self>,
        weights: &CudaBuffer<f32>,
        store: InputGrad<'_, Self>,
        dx: RowsMut<'_, Self>,
    ) -> Result<()> {
        linear::grad_input(self, pass, layer, dy, weights, store, dx)
    }

    fn linear_grad_params(
        &self,
        pass: Pass<'_, Self>,
        layer: Linear,
        dy: Rows<'_, Self>,
        x: Rows<'_, Self>,
        store: ParamGrad,
        grads: &mut CudaBuffer<f32>,
        _: &mut CudaBuffer<f32>,
    ) -> Result<()> {
        linear::grad_params(self, pass, layer, dy, x, store, grads)
    }

    /// Nothing is transposed in memory.
    fn scratch_len(&self, _: usize, _: usize) -> usize {
        0
    }

    fn relu_grad(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        y: Rows<'_, Self>,
        dy: RowsMut<'_, Self>,
    ) -> Result<()> {
        rows::gate(self, pass, cols, y, dy)
    }

    fn copy_rows(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        from: Rows<'_, Self>,
        to: RowsMut<'_, Self>,
    ) -> Result<()> {
        rows::copy(self, pass, cols, from, to)
    }

    fn dot(
        &self,
        pass: Pass<'_, Self>,
        shape: DotShape,
        x: Rows<'_, Self>,
        y: RowsMut<'_, Self>,
    ) -> Result<()> {
        interaction::dot(self, pass, shape, x, y)
    }

    fn dot_grad(
        &self,
        pass: Pass<'_, Self>,
        shape: DotShape,
        x: Rows<'_, Self>,
        dy: Rows<'_, Self>,
        dx: RowsMut<'_, Self>,
    ) -> Result<()> {
        interaction::dot_grad(self, pass, shape, x, dy, dx)
    }

    fn cross(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        x0: Rows<'_, Self>,
        u: Rows<'_, Self>,
        x: Rows<'_, Self>,
        y: RowsMut<'_, Self>,
    ) -> Result<()> {
        rows::cross(self, pass, cols, [x0, u, x], y)
    }

    fn cross_grad(
        &self,
        pass: Pass<'_, Self>,
        layer: CrossLayer,
        input: CrossInput<'_, Self>,
        du: RowsMut<'_, Self>,
        dx0: RowsMut<'_, Self>,
    ) -> Result<()> {
        rows::cross_grad(self, pass, layer, input, du, dx0)
    }

    fn add_columns(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        x: Rows<'_, Self>,
        y: RowsMut<'_, Self>,
    ) -> Result<()> {
        rows::add_columns(self, pass, cols, x, y)
    }

    fn spread_column(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        dy: Rows<'_, Self>,
        dx: RowsMut<'_, Self>,
    ) -> Result<()> {
        rows::spread_column(self, pass, cols, dy, dx)
    }

    fn loss(
        &self,
        pass: Pass<'_, Self>,
        input: LossInput<'_, Self>,
        dlogits: &mut CudaBuffer<f32>,
        scratch: &mut CudaBuffer<f64>,
    ) -> Result<f64> {
        sums::loss(self, pass, input, dlogits, scratch)
    }

    fn update(
        &self,
        stream: &CudaStream,
        update: &Update,
        grads: &CudaBuffer<f32>,
        weights: &mut CudaBuffer<f32>,
        states: &mut [CudaBuffer<f32>],
    ) -> Result<()> {
        update::update(self, stream, update, grads, weights, states)
    }

    fn sums_of_squares(
        &self,
        stream: &CudaStream,
        ranges: &[Range<usize>],
        buffer: &CudaBuffer<f32>,
        scratch: &mut CudaBuffer<f64>,
        sums: &mut [f64],
    ) -> Result<()> {
        sums::squares(self, stream, ranges, buffer, scratch, sums)
    }
}
