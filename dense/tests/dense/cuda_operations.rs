//! Every operation on a GPU, or its stand-in, against the CPU: to the bit where our own kernels do
//! the work, within rounding where a library multiplies matrices. Views begin anywhere, have gaps
//! between their rows and NaN around them, which nothing may change.

use tessera_dense::{
    Activation, Clip, CrossInput, CrossLayer, DenseOps, DenseOptimizer, DenseStep, DotShape,
    InputGrad, Interaction, LOSS_BLOCK, Linear, Loss, LossInput, ParamGrad, Pass, Rows, RowsMut,
    SUM_BLOCK, Update, sum_blocks,
};
use tessera_device::cuda::testing;
use tessera_device::{Cpu, Cuda, Device};

use crate::fixture::{Fixture, cpu, download, spec, value};

/// Runs a function on both devices and compares what it gives: all elements of what was written,
/// guards included.
macro_rules! same {
    ($devices:expr, $agree:expr, $function:ident($($argument:expr),*)) => {{
        let (cpu, cuda) = $devices;
        let want = $function(cpu, $($argument),*);
        let what = format!(concat!(stringify!($function), "{:?}"), ($($argument,)*));
        compare(&what, &$function(cuda, $($argument),*), &want, $agree);
    }};
}

/// The CPU, and a GPU or its stand-in where there is one.
fn devices() -> Option<(Cpu, Cuda)> {
    Some((cpu(2), testing::cuda()?))
}

/// What devices may differ by.
#[derive(Clone, Copy)]
enum Agree {
    /// Not at all.
    Bits,
    /// As sums of this many products of numbers up to 1, in another order.
    Sums(usize),
}

fn compare(what: &str, got: &[f32], want: &[f32], agree: Agree) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        // A NaN's bits are the processor's own affair.
        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
        let close = match agree {
            Agree::Bits => false,
            Agree::Sums(terms) => (got - want).abs() <= 2e-7 * (2 + terms) as f32,
        };
        assert!(same || close, "{what}: element {i} is {got}, expected {want}");
    }
}

/// Rows of a matrix from some element on, NaN around them.
struct Matrix<D: DenseOps> {
    buffer: D::Buffer<f32>,
    at: usize,
    stride: usize,
}

impl<D: DenseOps> Matrix<D> {
    /// Values between -1 and 1 that depend on `seed`, as its place and gaps do.
    fn new(device: &D, stream: &D::Stream, seed: usize, rows: usize, cols: usize) -> Self {
        let (at, stride) = (4 * (seed % 3) + seed % 2, cols + seed % 4);
        let mut all = vec![f32::NAN; at + rows * stride + 3];
        for r in 0..rows {
            for c in 0..cols {
                all[at + r * stride + c] = value(seed, r * cols + c);
            }
        }
        Self { buffer: upload(device, stream, &all), at, stride }
    }

    fn rows(&self) -> Rows<'_, D> {
        Rows::new(&self.buffer, self.at, self.stride)
    }

    fn rows_mut(&mut self) -> RowsMut<'_, D> {
        RowsMut::new(&mut self.buffer, self.at, self.stride)
    }
}

fn upload<D: DenseOps>(device: &D, stream: &D::Stream, values: &[f32]) -> D::Buffer<f32> {
    let mut buffer = device.alloc(values.len()).unwrap();
    device.upload(stream, values, &mut buffer, 0).unwrap();
    buffer
}

/// Sides of small products, and of some that exceed a block of any kernel.
fn shapes() -> impl Iterator<Item = (usize, usize, usize)> {
    let sides = [1, 2, 3, 8, 17, 33];
    let all = sides.into_iter().flat_map(move |m| {
        sides.into_iter().flat_map(move |n| sides.into_iter().map(move |k| (m, n, k)))
    });
    all.chain([
        (1, 70, 300),
        (70, 1, 300),
        (300, 70, 1),
        (5000, 1, 40),
        (5000, 40, 1),
        (1, 1, 5000),
    ])
}

/// Whether the CPU and a GPU use kernels of one order.
fn agreement(m: usize, n: usize, k: usize) -> Agree {
    if m == 1 || n == 1 { Agree::Bits } else { Agree::Sums(k) }
}

fn layer_at(inputs: usize, outputs: usize, bias: bool) -> Linear {
    // The bias is aligned in some layers only.
    let weight = if outputs.is_multiple_of(2) { 16 } else { 7 };
    let end = (weight + inputs * outputs).next_multiple_of(16);
    Linear { inputs, outputs, weight, bias: bias.then_some(end + outputs % 3) }
}

fn parameters<D: DenseOps>(device: &D, stream: &D::Stream, layer: Linear) -> D::Buffer<f32> {
    let len = layer.weight + layer.inputs * layer.outputs + layer.outputs + 32;
    let values: Vec<f32> = (0..len).map(|i| value(77, i)).collect();
    upload(device, stream, &values)
}

fn linear<D: DenseOps>(device: &D, batch: usize, layer: Linear, act: Activation) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let x = Matrix::new(device, &stream, 3, batch, layer.inputs);
    let mut y = Matrix::new(device, &stream, 5, batch, layer.outputs);
    let weights = parameters(device, &stream, layer);
    let pass = Pass { stream: &stream, batch };
    device.linear(pass, layer, act, x.rows(), &weights, y.rows_mut()).unwrap();
    download(device, &stream, &y.buffer)
}

/// `store`: 0 stores, 1 gates, 2 adds.
fn grad_input<D: DenseOps>(device: &D, batch: usize, layer: Linear, store: usize) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let dy = Matrix::new(device, &stream, 4, batch, layer.outputs);
    let gate = Matrix::new(device, &stream, 9, batch, layer.inputs);
    let mut dx = Matrix::new(device, &stream, 6, batch, layer.inputs);
    let weights = parameters(device, &stream, layer);
    let store = match store {
        0 => InputGrad::Store,
        1 => InputGrad::Gate(gate.rows()),
        _ => InputGrad::Add,
    };
    let pass = Pass { stream: &stream, batch };
    device.linear_grad_input(pass, layer, dy.rows(), &weights, store, dx.rows_mut()).unwrap();
    download(device, &stream, &dx.buffer)
}

fn grad_params<D: DenseOps>(device: &D, batch: usize, layer: Linear, store: ParamGrad) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let dy = Matrix::new(device, &stream, 7, batch, layer.outputs);
    let x = Matrix::new(device, &stream, 8, batch, layer.inputs);
    let mut grads = parameters(device, &stream, layer);
    let mut scratch = device.alloc(device.scratch_len(batch, layer.outputs)).unwrap();
    let (pass, dy, x) = (Pass { stream: &stream, batch }, dy.rows(), x.rows());
    device.linear_grad_params(pass, layer, dy, x, store, &mut grads, &mut scratch).unwrap();
    download(device, &stream, &grads)
}

#[test]
fn linear_layers_of_all_shapes() {
    let Some((cpu, cuda)) = devices() else { return };
    for (i, (batch, outputs, inputs)) in shapes().enumerate() {
        for act in [Activation::Identity, Activation::Relu] {
            let layer = layer_at(inputs, outputs, i % 3 > 0);
            same!((&cpu, &cuda), agreement(batch, outputs, inputs), linear(batch, layer, act));
        }
    }
}

#[test]
fn gradients_of_layers_inputs_of_all_shapes() {
    let Some((cpu, cuda)) = devices() else { return };
    for (batch, inputs, outputs) in shapes() {
        for store in 0..3 {
            let layer = layer_at(inputs, outputs, false);
            same!(
                (&cpu, &cuda),
                agreement(batch, inputs, outputs),
                grad_input(batch, layer, store)
            );
        }
    }
}

#[test]
fn gradients_of_parameters_of_all_shapes() {
    let Some((cpu, cuda)) = devices() else { return };
    for (i, (outputs, inputs, batch)) in shapes().enumerate() {
        for store in [ParamGrad::Store, ParamGrad::Add] {
            let layer = layer_at(inputs, outputs, i % 3 > 0);
            same!(
                (&cpu, &cuda),
                agreement(outputs, inputs, batch),
                grad_params(batch, layer, store)
            );
        }
    }
    for store in [ParamGrad::Store, ParamGrad::Add] {
        for (inputs, outputs) in [(5, 3), (40, 1), (1, 40)] {
            same!(
                (&cpu, &cuda),
                Agree::Bits,
                grad_params(0, layer_at(inputs, outputs, true), store)
            );
        }
    }
}

/// A ReLU that makes 0 of NaN hides a fault. The stand-in for cuBLASLt has such a one in some runs.
#[test]
fn relus_keep_nan() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    for (batch, outputs) in [(1, 5), (6, 1), (6, 16)] {
        let layer = Linear { inputs: 4, outputs, weight: 0, bias: Some(4 * outputs) };
        let mut values = vec![0.5; 5 * outputs];
        values[2] = f32::NAN;
        let weights = upload(&cuda, &stream, &values);
        let x = Matrix::new(&cuda, &stream, 0, batch, 4);
        for _ in 0..2 {
            let mut y = Matrix::new(&cuda, &stream, 0, batch, outputs);
            let pass = Pass { stream: &stream, batch };
            cuda.linear(pass, layer, Activation::Relu, x.rows(), &weights, y.rows_mut()).unwrap();
            let y = download(&cuda, &stream, &y.buffer);
            for r in 0..batch {
                assert!(
                    y[r * outputs].is_nan(),
                    "row {r} of {batch} x {outputs}: {}",
                    y[r * outputs]
                );
                assert!(y[r * outputs + 1..][..outputs - 1].iter().all(|&y| y >= 0.0));
            }
        }
    }
}

/// `which`: the operation.
fn rows<D: DenseOps>(device: &D, batch: usize, cols: usize, which: usize) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let matrix = |seed: usize, cols: usize| Matrix::new(device, &stream, seed, batch, cols);
    let (a, b, c) = (matrix(1, cols), matrix(2, cols), matrix(3, cols));
    let (column, mut column_out) = (matrix(8, 1), matrix(6, 1));
    let (mut y, mut other) = (matrix(4, cols), matrix(5, cols));
    let pass = Pass { stream: &stream, batch };
    match which {
        0 => device.relu_grad(pass, cols, a.rows(), y.rows_mut()),
        1 => device.copy_rows(pass, cols, a.rows(), y.rows_mut()),
        2 => device.cross(pass, cols, a.rows(), b.rows(), c.rows(), y.rows_mut()),
        3 => device.add_columns(pass, cols, a.rows(), column_out.rows_mut()),
        4 => device.spread_column(pass, cols, column.rows(), y.rows_mut()),
        _ => {
            let layer = CrossLayer { cols, first: which.is_multiple_of(2), last: which > 6 };
            let input = CrossInput { dy: a.rows(), x0: b.rows(), u: c.rows() };
            device.cross_grad(pass, layer, input, y.rows_mut(), other.rows_mut())
        }
    }
    .unwrap();
    let get = |matrix: &Matrix<D>| download(device, &stream, &matrix.buffer);
    [get(&y), get(&other), get(&column_out)].concat()
}

#[test]
fn passes_over_rows() {
    let Some((cpu, cuda)) = devices() else { return };
    for (batch, cols) in [(0, 5), (1, 1), (1, 33), (7, 31), (9, 32), (100, 3), (17, 300)] {
        for which in 0..9 {
            same!((&cpu, &cuda), Agree::Bits, rows(batch, cols, which));
        }
    }
}

fn dot<D: DenseOps>(device: &D, batch: usize, shape: DotShape) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let (width, cols) = (shape.vectors * shape.dim, shape.copied + shape.pairs());
    let matrix = |seed, cols| Matrix::new(device, &stream, seed, batch, cols);
    let (x, dy) = (matrix(1, width), matrix(2, cols));
    let (mut y, mut dx) = (matrix(3, cols), matrix(4, width));
    let pass = Pass { stream: &stream, batch };
    device.dot(pass, shape, x.rows(), y.rows_mut()).unwrap();
    device.dot_grad(pass, shape, x.rows(), dy.rows(), dx.rows_mut()).unwrap();
    [download(device, &stream, &y.buffer), download(device, &stream, &dx.buffer)].concat()
}

#[test]
fn dot_interactions() {
    let Some((cpu, cuda)) = devices() else { return };
    for vectors in [1, 2, 3, 14, 27, 40] {
        for dim in [1, 2, 7, 16, 33, 128, 200] {
            let copied = if vectors % 2 == 0 { dim } else { 0 };
            same!((&cpu, &cuda), Agree::Bits, dot(3, DotShape { vectors, dim, copied }));
        }
    }
    // More than shared memory holds at once.
    same!((&cpu, &cuda), Agree::Bits, dot(2, DotShape { vectors: 90, dim: 131, copied: 131 }));
    same!((&cpu, &cuda), Agree::Bits, dot(0, DotShape { vectors: 4, dim: 8, copied: 8 }));
}

fn update<D: DenseOps>(device: &D, rule: DenseOptimizer, clip: Clip) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let len = 1000;
    let values = |seed| (0..len).map(|i| value(seed, i)).collect::<Vec<f32>>();
    let mut grads = values(1);
    // A zero gradient, one that is not a number, and large ones.
    (grads[10], grads[11], grads[12]) = (0.0, f32::NAN, 1e30);
    let grads = upload(device, &stream, &grads);
    let mut weights = upload(device, &stream, &values(2));
    let positive = |seed| values(seed).into_iter().map(f32::abs).collect::<Vec<f32>>();
    let states = rule.state_names().iter().enumerate();
    let mut states: Vec<_> =
        states.map(|(i, _)| upload(device, &stream, &positive(3 + i))).collect();
    for t in 1..4 {
        let update = Update { rule: rule.rule(t), lr: 0.1, clip, range: 5..len - 7 };
        device.update(&stream, &update, &grads, &mut weights, &mut states).unwrap();
    }
    let all = std::iter::once(&weights).chain(&states);
    all.flat_map(|buffer| download(device, &stream, buffer)).collect()
}

#[test]
fn optimizers() {
    let Some((cpu, cuda)) = devices() else { return };
    for eps in [0.0, 1e-8] {
        for rule in [
            DenseOptimizer::Sgd { lr: 0.1 },
            DenseOptimizer::Adagrad { lr: 0.1, eps },
            DenseOptimizer::Adam { lr: 0.1, eps, beta1: 0.9, beta2: 0.999 },
        ] {
            for clip in [Clip::None, Clip::Value(0.25), Clip::Scale(0.3)] {
                same!((&cpu, &cuda), Agree::Bits, update(rule, clip));
            }
        }
    }
}

/// Sums of squares as the bits of two words each.
fn squares<D: DenseOps>(device: &D, ranges: &[std::ops::Range<usize>]) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let values: Vec<f32> = (0..3 * SUM_BLOCK).map(|i| value(1, i)).collect();
    let buffer = upload(device, &stream, &values);
    let blocks = sum_blocks(ranges.iter().map(ExactSizeIterator::len));
    let mut scratch = device.alloc(blocks).unwrap();
    let mut sums = vec![f64::NAN; ranges.len()];
    device.sums_of_squares(&stream, ranges, &buffer, &mut scratch, &mut sums).unwrap();
    let words = sums.iter().flat_map(|sum| [sum.to_bits() as u32, (sum.to_bits() >> 32) as u32]);
    words.map(|word| f32::from_bits(word & 0x7f7f_ffff)).collect()
}

#[test]
fn sums_of_squares_of_many_ranges() {
    let Some((cpu, cuda)) = devices() else { return };
    let b = SUM_BLOCK;
    same!((&cpu, &cuda), Agree::Bits, squares(&[0..1, 3..3, 7..8, 1..b, 1..b + 1, 9..3 * b - 5]));
    let many: Vec<_> = (0..150).map(|i| i * 13..i * 13 + i % 30).collect();
    same!((&cpu, &cuda), Agree::Bits, squares(&many));
    same!((&cpu, &cuda), Agree::Bits, squares(&[0..0, 5..5]));
}

#[test]
fn a_sum_of_squares_is_not_finite_if_and_only_if_an_element_is_not() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let mut scratch = cuda.alloc(8).unwrap();
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
        for at in [0, 5, SUM_BLOCK, 2 * SUM_BLOCK + 9] {
            let mut values = vec![1.0; 2 * SUM_BLOCK + 10];
            values[at] = bad;
            let buffer = upload(&cuda, &stream, &values);
            let sum = cuda.sum_of_squares(&stream, 0..values.len(), &buffer, &mut scratch).unwrap();
            assert_eq!(sum.is_finite(), bad.is_finite(), "{bad} at {at}");
        }
    }
}

/// The loss, then the gradients.
fn loss<D: DenseOps>(device: &D, loss: Loss, first: usize, batch: usize) -> Vec<f32> {
    let stream = device.stream().unwrap();
    let mut values: Vec<f32> = (0..first + batch).map(|i| 6.0 * value(1, i)).collect();
    for (i, extreme) in [1000.0, -1000.0, 0.0].into_iter().enumerate() {
        if let Some(value) = values.get_mut(first + 2 * i) {
            *value = extreme;
        }
    }
    let logits = upload(device, &stream, &values);
    let labels: Vec<f32> =
        (0..first + batch).map(|i| (i % 3 == 0).into()).map(|x: u8| x.into()).collect();
    let labels = upload(device, &stream, &labels);
    let weights: Vec<f32> = (0..first + batch).map(|i| 1.5 + value(3, i)).collect();
    let sample_weights = upload(device, &stream, &weights);
    let mut dlogits = upload(device, &stream, &vec![f32::NAN; first + batch]);
    let mut scratch = device.alloc(batch.div_ceil(LOSS_BLOCK)).unwrap();
    let input = LossInput {
        loss,
        global_batch: 2 * batch as u64 + 1,
        first,
        logits: &logits,
        labels: &labels,
        sample_weights: &sample_weights,
    };
    let pass = Pass { stream: &stream, batch };
    let sum = device.loss(pass, input, &mut dlogits, &mut scratch).unwrap();
    let mut all = vec![sum as f32];
    all.extend(download(device, &stream, &dlogits));
    all
}

#[test]
fn losses_and_their_gradients() {
    let Some((cpu, cuda)) = devices() else { return };
    for kind in [Loss::Bce, Loss::Mse] {
        for (first, batch) in [(0, 0), (0, 1), (3, 255), (0, 256), (7, 700)] {
            // Exponential and logarithm are another library's.
            same!((&cpu, &cuda), Agree::Sums(1), loss(kind, first, batch));
        }
    }
}

/// Whole models: losses within 1e-5, weights within 2e-4 of a tensor's largest.
#[test]
fn training_follows_the_cpu() {
    let Some(cuda) = testing::cuda() else { return };
    let adam = DenseOptimizer::Adam { lr: 0.01, eps: 1e-8, beta1: 0.9, beta2: 0.999 };
    for interaction in
        [Interaction::Dot, Interaction::Concat, Interaction::Dcn { layers: 2, rank: 5 }]
    {
        for batch in [1, 40] {
            let mut spec = spec(interaction.clone(), &[8; 6]);
            (spec.bottom, spec.top) = (vec![16, 8], vec![32, 16, 1]);
            let mut on_cpu = Fixture::new(&cpu(2), spec.clone(), adam, batch);
            let mut on_cuda = Fixture::new(&cuda, spec, adam, batch);
            for t in 1..=5u64 {
                on_cpu.fill(t as usize);
                on_cuda.fill(t as usize);
                let (want, got) = (on_cpu.step(batch as u64).0, on_cuda.step(batch as u64).0);
                assert!((got - want).abs() <= 1e-5 * want, "step {t}: loss {got}, expected {want}");
                let step = DenseStep { t, lr: 0.01, clip: Clip::Value(0.5) };
                on_cpu.update(&step);
                on_cuda.update(&step);
            }
            let got = on_cuda.params();
            for (name, want) in on_cpu.params() {
                let largest = want.iter().fold(0.0f64, |largest, x| largest.max(x.abs()));
                for (got, want) in got[&name].iter().zip(&want) {
                    assert!((got - want).abs() <= 2e-4 * largest, "{name}: {got}, not {want}");
                }
            }
        }
    }
}
