//! Micro-benchmarks of the dense towers: dot interaction and GEMMs of the usual shapes, forward
//! and backward. Every one is held against a naive computation before it is timed.

use std::num::NonZeroUsize;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tessera_bench::check::close;
use tessera_bench::draw::Rng;
use tessera_dense::{
    Activation, DenseOps, DotShape, InputGrad, Linear, ParamGrad, Pass, Rows, RowsMut,
};
use tessera_device::{Cpu, Device, HostBuffer};

const BATCH: usize = 512;

fn random(cpu: &Cpu, len: usize, seed: u64) -> HostBuffer<f32> {
    let mut buffer = cpu.alloc(len).expect("memory");
    let mut rng = Rng::new(seed);
    for value in buffer.iter_mut() {
        *value = (rng.unit() - 0.5) as f32;
    }
    buffer
}

fn zeros(cpu: &Cpu, len: usize) -> HostBuffer<f32> {
    cpu.alloc(len).expect("memory")
}

fn inner<'v>(a: impl Iterator<Item = &'v f32>, b: impl Iterator<Item = &'v f32>) -> f64 {
    a.zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn same(what: &str, got: f32, want: f64) {
    close(|| what.into(), f64::from(got), want, 1e-4).expect("the right answer");
}

fn interaction(criterion: &mut Criterion) {
    let cpu = Cpu::new(NonZeroUsize::new(1)).expect("a pool of one thread");
    let stream = cpu.stream().expect("a stream");
    let pass = Pass { stream: &stream, batch: BATCH };
    let mut group = criterion.benchmark_group("dot");
    for dim in [16, 64, 128] {
        let shape = DotShape { vectors: 27, dim, copied: dim };
        let (width, joined) = (27 * dim, dim + shape.pairs());
        let (x, dy) = (random(&cpu, BATCH * width, 1), random(&cpu, BATCH * joined, 2));
        let (mut y, mut dx) = (zeros(&cpu, BATCH * joined), zeros(&cpu, BATCH * width));
        let mut forward = || {
            cpu.dot(pass, shape, Rows::new(&x, 0, width), RowsMut::new(&mut y, 0, joined))
                .expect("an answer");
        };
        forward();
        group.throughput(Throughput::Elements((2 * BATCH * shape.pairs() * dim) as u64));
        group.bench_function(format!("forward 27 x {dim} (flop)"), |bencher| {
            bencher.iter(&mut forward);
        });
        // Sample 3, vectors 5 and 2: pair 5 * 4 / 2 + 2.
        let row = &x[3 * width..][..width];
        let want = inner(row[5 * dim..].iter().take(dim), row[2 * dim..].iter());
        same("a product", y[3 * joined + dim + 12], want);

        let mut backward = || {
            cpu.dot_grad(
                pass,
                shape,
                Rows::new(&x, 0, width),
                Rows::new(&dy, 0, joined),
                RowsMut::new(&mut dx, 0, width),
            )
            .expect("an answer");
        };
        backward();
        group.throughput(Throughput::Elements((4 * BATCH * shape.pairs() * dim) as u64));
        group.bench_function(format!("backward 27 x {dim} (flop)"), |bencher| {
            bencher.iter(&mut backward);
        });
        // Column 1 of vector 26 of sample 3: its products with vectors 0 to 25.
        let pairs = &dy[3 * joined + dim + 26 * 25 / 2..][..26];
        let column: Vec<f32> = (0..26).map(|j| row[j * dim + 1]).collect();
        same("a gradient", dx[3 * width + 26 * dim + 1], inner(pairs.iter(), column.iter()));
    }
    group.finish();
}

fn gemm(criterion: &mut Criterion) {
    let cpu = Cpu::new(NonZeroUsize::new(1)).expect("a pool of one thread");
    let stream = cpu.stream().expect("a stream");
    let pass = Pass { stream: &stream, batch: BATCH };
    let mut group = criterion.benchmark_group("gemm");
    // (inputs, outputs): bottom and top layers of the DLRMs of docs/PERFORMANCE.md, a cross layer.
    for (inputs, outputs) in
        [(13, 512), (512, 256), (367, 512), (479, 1024), (1024, 1024), (256, 1), (3456, 512)]
    {
        let layer = Linear { inputs, outputs, weight: 0, bias: None };
        let x = random(&cpu, BATCH * inputs, 1);
        let w = random(&cpu, inputs * outputs, 2);
        let dy = random(&cpu, BATCH * outputs, 3);
        let mut y = zeros(&cpu, BATCH * outputs);
        let mut dx = zeros(&cpu, BATCH * inputs);
        let mut dw = zeros(&cpu, inputs * outputs);
        let mut scratch = zeros(&cpu, cpu.scratch_len(BATCH, outputs));
        group.throughput(Throughput::Elements((2 * BATCH * inputs * outputs) as u64));

        let mut forward = || {
            let to = RowsMut::new(&mut y, 0, outputs);
            cpu.linear(pass, layer, Activation::Identity, Rows::new(&x, 0, inputs), &w, to)
                .expect("an answer");
        };
        forward();
        let name = |pass: &str| format!("{pass} {BATCH} x {inputs} x {outputs} (flop)");
        group.bench_function(name("y = x W^T"), |bencher| bencher.iter(&mut forward));
        let (i, j) = (5, outputs / 2);
        same(
            "y",
            y[i * outputs + j],
            inner(x[i * inputs..].iter().take(inputs), w[j * inputs..].iter()),
        );

        let mut to_input = || {
            let to = RowsMut::new(&mut dx, 0, inputs);
            cpu.linear_grad_input(
                pass,
                layer,
                Rows::new(&dy, 0, outputs),
                &w,
                InputGrad::Store,
                to,
            )
            .expect("an answer");
        };
        to_input();
        group.bench_function(name("dx = dy W"), |bencher| bencher.iter(&mut to_input));
        let column = w.iter().skip(2).step_by(inputs);
        same("dx", dx[i * inputs + 2], inner(dy[i * outputs..].iter().take(outputs), column));

        let mut to_params = || {
            let (dy, x) = (Rows::new(&dy, 0, outputs), Rows::new(&x, 0, inputs));
            cpu.linear_grad_params(pass, layer, dy, x, ParamGrad::Store, &mut dw, &mut scratch)
                .expect("an answer");
        };
        to_params();
        group.bench_function(name("dW = dy^T x"), |bencher| bencher.iter(&mut to_params));
        let (a, b) = (dy.iter().skip(j).step_by(outputs), x.iter().skip(2).step_by(inputs));
        same("dW", dw[j * inputs + 2], inner(a, b));
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2));
    targets = interaction, gemm
}
criterion_main!(benches);
