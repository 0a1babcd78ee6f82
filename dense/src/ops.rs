//! The operations a device must have for dense towers, and the views they work on.

use std::ops::Range;

use tessera_device::{Device, Result};

use crate::optimizer::{Clip, Rule};
use crate::spec::Loss;

/// Samples whose losses are added in one block; see [`DenseOps::loss`].
pub const LOSS_BLOCK: usize = 256;

/// Elements whose squares are added in one block; see [`DenseOps::sums_of_squares`].
pub const SUM_BLOCK: usize = 8192;

/// Rows of a matrix in a device buffer: element (r, c) is at `at + r * stride + c`.
pub struct Rows<'a, D: Device> {
    /// The memory.
    pub buffer: &'a D::Buffer<f32>,
    /// Element (0, 0).
    pub at: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl<'a, D: Device> Rows<'a, D> {
    /// A view from element `at` on.
    pub fn new(buffer: &'a D::Buffer<f32>, at: usize, stride: usize) -> Self {
        Self { buffer, at, stride }
    }
}

impl<D: Device> Clone for Rows<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Rows<'_, D> {}

/// Rows of a matrix that an operation writes; as [`Rows`].
pub struct RowsMut<'a, D: Device> {
    /// The memory.
    pub buffer: &'a mut D::Buffer<f32>,
    /// Element (0, 0).
    pub at: usize,
    /// Elements from one row to the next.
    pub stride: usize,
}

impl<'a, D: Device> RowsMut<'a, D> {
    /// A view from element `at` on.
    pub fn new(buffer: &'a mut D::Buffer<f32>, at: usize, stride: usize) -> Self {
        Self { buffer, at, stride }
    }
}

/// A linear layer: `y = x W^T + b`, W (outputs, inputs) and b (outputs) in flat buffers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Linear {
    /// Columns of x.
    pub inputs: usize,
    /// Columns of y.
    pub outputs: usize,
    /// First element of W.
    pub weight: usize,
    /// First element of b, if there is one.
    pub bias: Option<usize>,
}

/// What follows a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// Nothing.
    Identity,
    /// `max(0, y)`; NaN stays NaN.
    Relu,
}

/// What happens to the gradient of a layer's input.
pub enum InputGrad<'a, D: Device> {
    /// It is stored.
    Store,
    /// It is stored where the layer's input, a ReLU's output, is not 0; else 0.
    Gate(Rows<'a, D>),
    /// It is added to what is there.
    Add,
}

/// Vectors of a dot interaction: an input row begins with `vectors` vectors of `dim` columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DotShape {
    /// Vectors a row.
    pub vectors: usize,
    /// Columns a vector.
    pub dim: usize,
    /// Columns of the first vector that are copied in front of the pairs: `dim` when it is the
    /// dense vector, 0 when there is none.
    pub copied: usize,
}

impl DotShape {
    /// Products of two different vectors.
    #[must_use]
    pub fn pairs(&self) -> usize {
        self.vectors * (self.vectors - 1) / 2
    }
}

/// A cross layer in backward, which runs from the last to the first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CrossLayer {
    /// Columns of the layer.
    pub cols: usize,
    /// Its input is x0 itself.
    pub first: bool,
    /// Nothing was written to dx0 before.
    pub last: bool,
}

/// What [`DenseOps::cross_grad`] reads, all (batch, cols).
pub struct CrossInput<'a, D: Device> {
    /// Gradient of the layer's output.
    pub dy: Rows<'a, D>,
    /// Input of the first cross layer.
    pub x0: Rows<'a, D>,
    /// `W (V x) + b` of this layer.
    pub u: Rows<'a, D>,
}

/// What happens to gradients of parameters that are there already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParamGrad {
    /// They are never read.
    Store,
    /// What is computed is added to them.
    Add,
}

/// What [`DenseOps::loss`] reads.
pub struct LossInput<'a, D: Device> {
    /// The loss of a sample.
    pub loss: Loss,
    /// Samples of the whole batch, on all ranks.
    pub global_batch: u64,
    /// The first sample, in these buffers and that of gradients.
    pub first: usize,
    /// (first + batch).
    pub logits: &'a D::Buffer<f32>,
    /// (first + batch).
    pub labels: &'a D::Buffer<f32>,
    /// (first + batch).
    pub sample_weights: &'a D::Buffer<f32>,
}

/// One optimizer step on a range of the flat buffers.
#[derive(Clone, Debug, PartialEq)]
pub struct Update {
    /// The optimizer at this step.
    pub rule: Rule,
    /// Learning rate, schedule applied.
    pub lr: f32,
    /// What is done to the gradients first.
    pub clip: Clip,
    /// Elements.
    pub range: Range<usize>,
}

/// Where an operation runs, and how many rows it has.
pub struct Pass<'a, D: Device> {
    /// The queue that the operation joins.
    pub stream: &'a D::Stream,
    /// Rows of the batch.
    pub batch: usize,
}

impl<D: Device> Clone for Pass<'_, D> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<D: Device> Copy for Pass<'_, D> {}

/// Operations of dense towers on a device.
///
/// The caller guarantees that views and ranges lie within their buffers. An implementor must
/// order operations as given to a stream, read and write only the rows and columns named, and
/// give the same bits for the same arguments whatever the number of workers and whatever lies
/// elsewhere in the buffers. All sums run in an order that depends on shapes alone. `batch` may be
/// 0: gradients of parameters that are stored are then zeros.
pub trait DenseOps: Device {
    /// `y = act(x W^T + b)`: x (batch, inputs), y (batch, outputs).
    fn linear(
        &self,
        pass: Pass<'_, Self>,
        layer: Linear,
        act: Activation,
        x: Rows<'_, Self>,
        weights: &Self::Buffer<f32>,
        y: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// `dx = dy W`, stored as `store` says: dy (batch, outputs), dx (batch, inputs).
    fn linear_grad_input(
        &self,
        pass: Pass<'_, Self>,
        layer: Linear,
        dy: Rows<'_, Self>,
        weights: &Self::Buffer<f32>,
        store: InputGrad<'_, Self>,
        dx: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// `dW = dy^T x` and `db`, the column sums of dy, stored in `grads` as `store` says, where the
    /// layer's W and b are. `scratch` holds at least [`DenseOps::scratch_len`] elements.
    #[allow(clippy::too_many_arguments)]
    fn linear_grad_params(
        &self,
        pass: Pass<'_, Self>,
        layer: Linear,
        dy: Rows<'_, Self>,
        x: Rows<'_, Self>,
        store: ParamGrad,
        grads: &mut Self::Buffer<f32>,
        scratch: &mut Self::Buffer<f32>,
    ) -> Result<()>;

    /// Elements of scratch that [`DenseOps::linear_grad_params`] needs for layers of at most
    /// `outputs` outputs and batches of at most `max_batch`.
    fn scratch_len(&self, max_batch: usize, outputs: usize) -> usize;

    /// `dy = 0` where y, a ReLU's output, is 0: both (batch, cols).
    fn relu_grad(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        y: Rows<'_, Self>,
        dy: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// `to = from`: both (batch, cols).
    fn copy_rows(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        from: Rows<'_, Self>,
        to: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// Dot interaction: x (batch, vectors * dim) to y (batch, copied + pairs), the first `copied`
    /// columns of x, then the products of vectors (i, j), j < i, as (1,0), (2,0), (2,1), (3,0)...
    fn dot(
        &self,
        pass: Pass<'_, Self>,
        shape: DotShape,
        x: Rows<'_, Self>,
        y: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// Gradient of [`DenseOps::dot`]: `dz_i = sum_j g_ij z_j`, plus the copied columns' own.
    fn dot_grad(
        &self,
        pass: Pass<'_, Self>,
        shape: DotShape,
        x: Rows<'_, Self>,
        dy: Rows<'_, Self>,
        dx: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// A cross layer's end: `y = x0 * u + x`, all (batch, cols).
    fn cross(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        x0: Rows<'_, Self>,
        u: Rows<'_, Self>,
        x: Rows<'_, Self>,
        y: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// Gradient of [`DenseOps::cross`]: `du = dy * x0`; `dx0` becomes `dy * u`, plus itself
    /// unless this is the last cross layer, plus `dy` if it is the first (whose x is x0).
    fn cross_grad(
        &self,
        pass: Pass<'_, Self>,
        layer: CrossLayer,
        input: CrossInput<'_, Self>,
        du: RowsMut<'_, Self>,
        dx0: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// `y += x_0 + x_1 + ...`, one column after the other: x (batch, cols), y (batch, 1).
    fn add_columns(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        x: Rows<'_, Self>,
        y: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// Gradient of [`DenseOps::add_columns`]: each column of dx (batch, cols) becomes dy.
    fn spread_column(
        &self,
        pass: Pass<'_, Self>,
        cols: usize,
        dy: Rows<'_, Self>,
        dx: RowsMut<'_, Self>,
    ) -> Result<()>;

    /// `sum_i w_i l_i / global_batch` and its gradient by the logits. Each sample is computed in
    /// f64; losses are added in f64, in order within blocks of [`LOSS_BLOCK`] samples, then the
    /// blocks in order. `dlogits` (first + batch); `scratch` one element a block. Returns when done.
    fn loss(
        &self,
        pass: Pass<'_, Self>,
        input: LossInput<'_, Self>,
        dlogits: &mut Self::Buffer<f32>,
        scratch: &mut Self::Buffer<f64>,
    ) -> Result<f64>;

    /// Clips `grads` and applies one step to a range of elements of `weights` and `states` (in
    /// the order of `DenseOptimizer::state_names`).
    fn update(
        &self,
        stream: &Self::Stream,
        update: &Update,
        grads: &Self::Buffer<f32>,
        weights: &mut Self::Buffer<f32>,
        states: &mut [Self::Buffer<f32>],
    ) -> Result<()>;

    /// For each of `ranges` the sum of its elements' squares in f64, not finite if and only if one
    /// of them is not, to `sums`, which is as long. Within a block of [`SUM_BLOCK`] elements of a
    /// range, element i goes to lane i mod 8 and lanes are added as ((0+4)+(2+6))+((1+5)+(3+7));
    /// then the range's blocks in order. `scratch` has [`sum_blocks`] elements at least. Returns
    /// when done: one wait for all ranges.
    fn sums_of_squares(
        &self,
        stream: &Self::Stream,
        ranges: &[Range<usize>],
        buffer: &Self::Buffer<f32>,
        scratch: &mut Self::Buffer<f64>,
        sums: &mut [f64],
    ) -> Result<()>;

    /// As [`DenseOps::sums_of_squares`], of one range.
    fn sum_of_squares(
        &self,
        stream: &Self::Stream,
        range: Range<usize>,
        buffer: &Self::Buffer<f32>,
        scratch: &mut Self::Buffer<f64>,
    ) -> Result<f64> {
        let mut sum = [0.0];
        self.sums_of_squares(stream, &[range], buffer, scratch, &mut sum)?;
        Ok(sum[0])
    }
}

/// Blocks of [`SUM_BLOCK`] elements in ranges of these lengths, at least one a range: the scratch
/// of [`DenseOps::sums_of_squares`].
#[must_use]
pub fn sum_blocks(lens: impl IntoIterator<Item = usize>) -> usize {
    lens.into_iter().map(|len| len.div_ceil(SUM_BLOCK).max(1)).sum()
}
