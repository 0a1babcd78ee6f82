//! Linear layers: products and what follows them.
//!
//! ```text
//! x (batch, inputs)   W (outputs, inputs)   y, dy (batch, outputs)
//!
//! forward      y  = x W^T       one output or one sample: `dense_dots`
//! grad_input   dx = dy W        one sample: `dense_weighted_columns`; one input: `dense_dots`
//! grad_params  dW = dy^T x      one output: `dense_weighted_columns`; one input:
//!                               `dense_column_dots`, as for db, the column sums of dy
//! ```
//!
//! Everything else is a product of matrices, by cuBLASLt. The choice depends on shapes alone, and
//! is the CPU's.

use tessera_device::cuda::{
    CudaBuffer, CudaStream, Epilogue, Factor, Form, Fused, Launch, Output, Product, Store,
};
use tessera_device::{Cuda, Result};

use super::kernels::{VECTOR, ViewArguments, blocks};
use super::rows::{finish_linear, gate};
use crate::ops::{Activation, InputGrad, Linear, ParamGrad, Pass, Rows, RowsMut};

/// What kernels do with their results: as `dense_vector.cu` numbers it.
const STORE: u32 = 0;
const ADD: u32 = 1;
const GATE: u32 = 2;

/// Columns of a block, and threads that share one, of kernels along columns.
const COLUMN_BLOCK: [u32; 3] = [32, 32, 1];

/// The most blocks of `dense_dots`; its warps take more pairs then.
const DOT_BLOCKS_MAX: usize = 1 << 16;

/// See [`crate::DenseOps::linear`].
pub fn forward(
    cuda: &Cuda,
    pass: Pass<'_, Cuda>,
    layer: Linear,
    act: Activation,
    x: Rows<'_, Cuda>,
    weights: &CudaBuffer<f32>,
    mut y: RowsMut<'_, Cuda>,
) -> Result<()> {
    let (Pass { stream, batch }, Linear { inputs, outputs, weight, bias }) = (pass, layer);
    let relu = act == Activation::Relu;
    if batch == 0 || outputs == 0 {
        return Ok(());
    }
    if batch == 1 || outputs == 1 {
        // Steps from one result to the next.
        let (x_step, w_step, y_step) = match outputs {
            1 => (x.stride, 0, y.stride),
            _ => (0, inputs, 1),
        };
        let dots = Dots {
            a: Rows::new(x.buffer, x.at, x_step),
            b: Rows::new(weights, weight, w_step),
            len: inputs,
            bias: bias.map(|at| Rows::new(weights, at, usize::from(outputs > 1))),
            relu,
            store: InputGrad::Store,
            count: batch.max(outputs),
        };
        return dots.launch(cuda, stream, RowsMut::new(y.buffer, y.at, y_step));
    }
    let epilogue = match (bias, act) {
        (Some(at), Activation::Relu) => Epilogue::BiasRelu(weights, at),
        (Some(at), Activation::Identity) => Epilogue::Bias(weights, at),
        (None, _) => Epilogue::None,
    };
    let product = Product {
        m: batch,
        n: outputs,
        k: inputs,
        a: factor(x, Form::Plain),
        b: factor(Rows::new(weights, weight, inputs), Form::Transposed),
        epilogue,
    };
    let fused = cuda.multiply(stream, product, output(&mut y, Store::Replace))?;
    let bias = bias.filter(|_| fused == Fused::Nothing).map(|at| Rows::new(weights, at, 0));
    finish_linear(cuda, pass, outputs, bias, relu && fused != Fused::BiasRelu, y)
}

/// See [`crate::DenseOps::linear_grad_input`].
pub fn grad_input(
    cuda: &Cuda,
    pass: Pass<'_, Cuda>,
    layer: Linear,
    dy: Rows<'_, Cuda>,
    weights: &CudaBuffer<f32>,
    store: InputGrad<'_, Cuda>,
    mut dx: RowsMut<'_, Cuda>,
) -> Result<()> {
    let (Pass { stream, batch }, Linear { inputs, outputs, weight, .. }) = (pass, layer);
    if batch == 0 || inputs == 0 {
        return Ok(());
    }
    let w = Rows::new(weights, weight, inputs);
    if batch == 1 {
        let coefficients = Rows::new(dy.buffer, dy.at, 1);
        return weighted_columns(cuda, stream, w, coefficients, [outputs, inputs], store, dx);
    }
    if inputs == 1 {
        let dots = Dots {
            a: dy,
            b: Rows::new(weights, weight, 0),
            len: outputs,
            bias: None,
            relu: false,
            store,
            count: batch,
        };
        return dots.launch(cuda, stream, dx);
    }
    let product = Product {
        m: batch,
        n: inputs,
        k: outputs,
        a: factor(dy, Form::Plain),
        b: factor(w, Form::Plain),
        epilogue: Epilogue::None,
    };
    let added = if matches!(store, InputGrad::Add) { Store::Add } else { Store::Replace };
    cuda.multiply(stream, product, output(&mut dx, added))?;
    match store {
        InputGrad::Gate(x) => gate(cuda, pass, inputs, x, dx),
        InputGrad::Store | InputGrad::Add => Ok(()),
    }
}

/// See [`crate::DenseOps::linear_grad_params`].
pub fn grad_params(
    cuda: &Cuda,
    pass: Pass<'_, Cuda>,
    layer: Linear,
    dy: Rows<'_, Cuda>,
    x: Rows<'_, Cuda>,
    store: ParamGrad,
    grads: &mut CudaBuffer<f32>,
) -> Result<()> {
    let (Pass { stream, batch }, Linear { inputs, outputs, weight, bias }) = (pass, layer);
    if let Some(bias) = bias {
        let sums = RowsMut::new(grads, bias, outputs);
        column_dots(cuda, stream, dy, None, [batch, outputs], store, sums)?;
    }
    let added = match store {
        ParamGrad::Store => InputGrad::Store,
        ParamGrad::Add => InputGrad::Add,
    };
    let mut dw = RowsMut::new(grads, weight, inputs);
    if batch == 0 {
        // Sums without terms: W is one row of zeros, or nothing is added.
        return weighted_columns(cuda, stream, x, dy, [0, outputs * inputs], added, dw);
    }
    if outputs == 1 {
        return weighted_columns(cuda, stream, x, dy, [batch, inputs], added, dw);
    }
    if inputs == 1 {
        return column_dots(cuda, stream, dy, Some(x), [batch, outputs], store, dw);
    }
    let product = Product {
        m: outputs,
        n: inputs,
        k: batch,
        a: factor(dy, Form::Transposed),
        b: factor(x, Form::Plain),
        epilogue: Epilogue::None,
    };
    let added = if store == ParamGrad::Add { Store::Add } else { Store::Replace };
    cuda.multiply(stream, product, output(&mut dw, added)).map(drop)
}

fn factor(rows: Rows<'_, Cuda>, form: Form) -> Factor<'_> {
    Factor { buffer: rows.buffer, at: rows.at, stride: rows.stride, form }
}

fn output<'a>(rows: &'a mut RowsMut<'_, Cuda>, store: Store) -> Output<'a> {
    Output { buffer: rows.buffer, at: rows.at, stride: rows.stride, store }
}

/// A kernel's number for what it does with its results, and the gate.
fn stored(store: InputGrad<'_, Cuda>) -> (u32, Option<Rows<'_, Cuda>>) {
    match store {
        InputGrad::Store => (STORE, None),
        InputGrad::Add => (ADD, None),
        InputGrad::Gate(x) => (GATE, Some(x)),
    }
}

/// `count` dot products of rows of a and b, `len` long; a stride of 0 is one row for all.
struct Dots<'a> {
    a: Rows<'a, Cuda>,
    b: Rows<'a, Cuda>,
    len: usize,
    bias: Option<Rows<'a, Cuda>>,
    relu: bool,
    store: InputGrad<'a, Cuda>,
    count: usize,
}

impl Dots<'_> {
    /// Results go to the first elements of rows of `out`.
    fn launch(self, cuda: &Cuda, stream: &CudaStream, mut out: RowsMut<'_, Cuda>) -> Result<()> {
        const WARPS: u32 = 8;
        let kernel = cuda.kernel(&VECTOR, "dense_dots")?;
        let (store, gate) = stored(self.store);
        let call = kernel.on(stream).rows(self.a).rows(self.b).value(self.len as u64);
        let call = call.optional_rows(self.bias).value(u32::from(self.relu));
        let call = call.value(store).optional_rows(gate).rows_mut(&mut out);
        let count = self.count.div_ceil(WARPS as usize).min(DOT_BLOCKS_MAX);
        let launch = Launch { grid: [blocks(count), 1, 1], block: [32, WARPS, 1], shared_bytes: 0 };
        // SAFETY: the kernel's arguments; the caller of the trait guarantees that all rows lie in
        // their buffers, and the kernel stays within `count` of them.
        unsafe { call.value(self.count as u64).launch(launch) }
    }
}

/// `out_c = sum_r weight_r x_rc` for x (rows, cols), stored in the first row of `out`.
fn weighted_columns(
    cuda: &Cuda,
    stream: &CudaStream,
    x: Rows<'_, Cuda>,
    weights: Rows<'_, Cuda>,
    [rows, cols]: [usize; 2],
    store: InputGrad<'_, Cuda>,
    out: RowsMut<'_, Cuda>,
) -> Result<()> {
    let kernel = cuda.kernel(&VECTOR, "dense_weighted_columns")?;
    let (store, gate) = stored(store);
    let call = kernel.on(stream).rows(x).rows(weights).value(store);
    let call = match gate {
        Some(gate) => call.read_from(gate.buffer, gate.at),
        None => call.value(0u64),
    };
    let call = call.write_from(out.buffer, out.at).value(rows as u64).value(cols as u64);
    // SAFETY: as in `Dots::launch`.
    unsafe { call.launch(columns(cols)) }
}

/// Sums of x's columns, each row times its weight if there are weights, in the first row of `out`.
fn column_dots(
    cuda: &Cuda,
    stream: &CudaStream,
    x: Rows<'_, Cuda>,
    weights: Option<Rows<'_, Cuda>>,
    [rows, cols]: [usize; 2],
    store: ParamGrad,
    out: RowsMut<'_, Cuda>,
) -> Result<()> {
    let kernel = cuda.kernel(&VECTOR, "dense_column_dots")?;
    let add = u32::from(store == ParamGrad::Add);
    let call = kernel.on(stream).rows(x).optional_rows(weights).value(add);
    let call = call.write_from(out.buffer, out.at).value(rows as u64).value(cols as u64);
    // SAFETY: as in `Dots::launch`.
    unsafe { call.launch(columns(cols)) }
}

fn columns(cols: usize) -> Launch {
    let across = cols.div_ceil(COLUMN_BLOCK[0] as usize);
    Launch { grid: [blocks(across), 1, 1], block: COLUMN_BLOCK, shared_bytes: 0 }
}
