//! Matrix products by cuBLASLt, or its stand-in: against plain loops, in all forms; what is
//! refused; and what a machine without the library says. Every test needs a GPU or the stand-ins of
//! tests/emu, and says that it was skipped where there is neither.

use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;

use tessera_device::cuda::{
    CudaBuffer, CudaOptions, CudaStream, Epilogue, Factor, Form, Fused, Output, Precision, Product,
    Store, testing,
};
use tessera_device::{Cuda, Device, DeviceError, Philox};

/// `len` numbers between -1 and 1, of the seed alone.
fn values(seed: u64, len: usize) -> Vec<f32> {
    let generator = Philox::new(seed);
    (0..len as u64).map(|i| 2.0 * Philox::unit(generator.block(i, 0)[0]) - 1.0).collect()
}

fn upload(cuda: &Cuda, stream: &CudaStream, values: &[f32]) -> CudaBuffer<f32> {
    let mut buffer = cuda.alloc(values.len()).unwrap();
    cuda.upload(stream, values, &mut buffer, 0).unwrap();
    buffer
}

fn download(cuda: &Cuda, stream: &CudaStream, buffer: &CudaBuffer<f32>) -> Vec<f32> {
    let mut values = vec![0.0; buffer.len()];
    cuda.download(stream, buffer, 0, &mut values).unwrap();
    values
}

/// A factor as the host has it: (rows, cols) of the product's own, stored as its form says, from
/// element `at` on with gaps of `gap` elements.
struct Host {
    all: Vec<f32>,
    form: Form,
    at: usize,
    stride: usize,
}

impl Host {
    fn new(seed: u64, rows: usize, cols: usize, form: Form, at: usize, gap: usize) -> Self {
        let (rows, cols) = if form == Form::Plain { (rows, cols) } else { (cols, rows) };
        let stride = cols + gap;
        Self { all: values(seed, at + rows * stride), form, at, stride }
    }

    fn get(&self, r: usize, c: usize) -> f64 {
        let (r, c) = if self.form == Form::Plain { (r, c) } else { (c, r) };
        self.all[self.at + r * self.stride + c].into()
    }

    fn factor<'a>(&self, buffer: &'a CudaBuffer<f32>) -> Factor<'a> {
        Factor { buffer, at: self.at, stride: self.stride, form: self.form }
    }
}

#[test]
fn products_are_those_of_plain_loops_and_write_nothing_else() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let forms = [Form::Plain, Form::Transposed];
    let mut seed = 0;
    for (m, n, k) in [(1, 1, 1), (3, 5, 7), (16, 8, 32), (2, 3, 200), (33, 17, 4)] {
        for (a_form, b_form) in forms.iter().flat_map(|&a| forms.map(|b| (a, b))) {
            for (at, gap) in [(0, 0), (4, 4), (3, 1)] {
                for ends in 0..4 {
                    seed += 1;
                    let a = Host::new(seed, m, k, a_form, at, gap);
                    let b = Host::new(seed + 1000, k, n, b_form, at, gap);
                    let bias = values(seed + 2000, at + n);
                    let out_stride = n + gap;
                    let before = values(seed + 3000, at + m * out_stride + 2);
                    let (on_a, on_b) =
                        (upload(&cuda, &stream, &a.all), upload(&cuda, &stream, &b.all));
                    let on_bias = upload(&cuda, &stream, &bias);
                    let mut out = upload(&cuda, &stream, &before);
                    let (epilogue, store) = match ends {
                        0 => (Epilogue::None, Store::Replace),
                        1 => (Epilogue::None, Store::Add),
                        2 => (Epilogue::Bias(&on_bias, at), Store::Replace),
                        _ => (Epilogue::BiasRelu(&on_bias, at), Store::Replace),
                    };
                    let product =
                        Product { m, n, k, a: a.factor(&on_a), b: b.factor(&on_b), epilogue };
                    let to = Output { buffer: &mut out, at, stride: out_stride, store };
                    let fused = cuda.multiply(&stream, product, to).unwrap();
                    let got = download(&cuda, &stream, &out);
                    for (i, (&got, &before)) in got.iter().zip(&before).enumerate() {
                        let cell = i.checked_sub(at).map(|i| (i / out_stride, i % out_stride));
                        let Some((r, c)) = cell.filter(|&(r, c)| r < m && c < n) else {
                            assert_eq!(got.to_bits(), before.to_bits(), "element {i} is outside");
                            continue;
                        };
                        let mut want: f64 = (0..k).map(|i| a.get(r, i) * b.get(i, c)).sum();
                        if store == Store::Add {
                            want += f64::from(before);
                        }
                        if fused != Fused::Nothing {
                            want += f64::from(bias[at + c]);
                        }
                        if fused == Fused::BiasRelu {
                            want = want.max(0.0);
                        }
                        let error = (f64::from(got) - want).abs();
                        let what = format!("{m} x {k} x {n} ({r}, {c}), {fused:?}");
                        assert!(error <= 1e-6 * (1 + k) as f64, "{what}: {got}, not {want}");
                    }
                }
            }
        }
    }
}

#[test]
fn products_on_many_streams_do_not_share_a_workspace() {
    let Some(cuda) = testing::cuda() else { return };
    let streams: Vec<_> = (0..4).map(|_| cuda.stream().unwrap()).collect();
    let (m, n, k) = (3, 4, 300);
    let a = Host::new(1, m, k, Form::Plain, 0, 0);
    let b = Host::new(2, k, n, Form::Plain, 0, 0);
    let (on_a, on_b) = (upload(&cuda, &streams[0], &a.all), upload(&cuda, &streams[0], &b.all));
    cuda.synchronize(&streams[0]).unwrap();
    let mut outs: Vec<_> = streams.iter().map(|_| cuda.alloc::<f32>(m * n).unwrap()).collect();
    for _ in 0..3 {
        for (stream, out) in streams.iter().zip(&mut outs) {
            let (a, b) = (a.factor(&on_a), b.factor(&on_b));
            let product = Product { m, n, k, a, b, epilogue: Epilogue::None };
            let to = Output { buffer: out, at: 0, stride: n, store: Store::Replace };
            cuda.multiply(stream, product, to).unwrap();
        }
    }
    let results: Vec<_> =
        streams.iter().zip(&outs).map(|(stream, out)| download(&cuda, stream, out)).collect();
    assert!(results.iter().all(|result| result == &results[0]));
    assert!(results[0].iter().all(|value| value.is_finite()));
}

/// Ten bits of mantissa for whom asks for them, and for nobody else.
#[test]
fn factors_are_rounded_only_when_asked_for() {
    let error = |precision| {
        let mut options = CudaOptions::default();
        options.precision = precision;
        let cuda = testing::cuda_with(options)?;
        let stream = cuda.stream().unwrap();
        let (m, n, k) = (64, 64, 256);
        let a = Host::new(1, m, k, Form::Plain, 0, 0);
        let b = Host::new(2, k, n, Form::Plain, 0, 0);
        let (on_a, on_b) = (upload(&cuda, &stream, &a.all), upload(&cuda, &stream, &b.all));
        let mut out = cuda.alloc::<f32>(m * n).unwrap();
        let (left, right) = (a.factor(&on_a), b.factor(&on_b));
        let product = Product { m, n, k, a: left, b: right, epilogue: Epilogue::None };
        let to = Output { buffer: &mut out, at: 0, stride: n, store: Store::Replace };
        cuda.multiply(&stream, product, to).unwrap();
        let got = download(&cuda, &stream, &out);
        let largest = (0..m * n).map(|i| {
            let want: f64 = (0..k).map(|e| a.get(i / n, e) * b.get(e, i % n)).sum();
            (f64::from(got[i]) - want).abs()
        });
        Some(largest.fold(0.0, f64::max))
    };
    let Some(exact) = error(Precision::Fp32) else { return };
    assert!(exact < 2e-5, "{exact}");
    let rounded = error(Precision::Tf32).unwrap();
    assert!((1e-4..2e-2).contains(&rounded), "{rounded}");
}

#[test]
fn products_that_do_not_fit_are_refused_with_their_numbers() {
    let Some(cuda) = testing::cuda() else { return };
    let stream = cuda.stream().unwrap();
    let (a, b) = (cuda.alloc::<f32>(12).unwrap(), cuda.alloc::<f32>(20).unwrap());
    let mut out = cuda.alloc::<f32>(15).unwrap();
    let plain = |buffer, at, stride| Factor { buffer, at, stride, form: Form::Plain };
    let good = Product {
        m: 3,
        n: 5,
        k: 4,
        a: plain(&a, 0, 4),
        b: plain(&b, 0, 5),
        epilogue: Epilogue::None,
    };
    let mut refused = |product, at, stride, store, words: &str| {
        let to = Output { buffer: &mut out, at, stride, store };
        let error = cuda.multiply(&stream, product, to).unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
    };
    let replace = Store::Replace;
    refused(Product { k: 0, ..good }, 0, 5, replace, "3 x 0 x 5: every side must be at least 1");
    let words =
        "left factor of 3 x 4 from element 1 on, rows 4 apart, does not lie in a buffer of 12";
    refused(Product { a: plain(&a, 1, 4), ..good }, 0, 5, replace, words);
    refused(Product { a: plain(&a, 0, 3), ..good }, 0, 5, replace, "left factor");
    refused(Product { b: plain(&b, 0, 6), ..good }, 0, 5, replace, "right factor of 4 x 5");
    refused(Product { b: plain(&b, usize::MAX, 5), ..good }, 0, 5, replace, "right factor");
    refused(good, 1, 5, replace, "output of 3 x 5 from element 1 on");
    refused(good, 0, usize::MAX, replace, "output");
    let biased = Product { epilogue: Epilogue::Bias(&a, 0), ..good };
    refused(biased, 0, 5, Store::Add, "a bias for a product that is added");
    let biased = Product { epilogue: Epilogue::Bias(&a, 8), ..good };
    refused(biased, 0, 5, replace, "elements 8..13 of a buffer of 12");
    let other = testing::cuda().unwrap();
    let to = Output { buffer: &mut out, at: 0, stride: 5, store: replace };
    let error = other.multiply(&stream, good, to).unwrap_err();
    assert!(matches!(error, DeviceError::Foreign { ordinal: 0, .. }), "{error}");
}

/// Set for the processes that tests below start.
const CHILD: &str = "TESSERA_TEST_PRODUCTS";

/// Runs a test of this program in a process of its own, in a changed environment.
fn again(test: &str, child: &str, key: &str, value: impl AsRef<OsStr>) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--quiet"]).env(CHILD, child).env(key, value);
    let done = command.output().unwrap();
    assert!(done.status.success(), "{child}: {}", String::from_utf8_lossy(&done.stdout));
}

#[test]
fn epilogues_are_fused_as_far_as_the_library_goes() {
    let Some(cuda) = testing::cuda() else { return };
    let Ok(child) = std::env::var(CHILD) else {
        if cuda.info().name.contains("stand-in") {
            for mode in ["whole", "plain", "nan"] {
                let test = "epilogues_are_fused_as_far_as_the_library_goes";
                again(test, mode, "TESSERA_EMU_CUBLASLT", mode);
            }
        }
        return;
    };
    let stream = cuda.stream().unwrap();
    let values = upload(&cuda, &stream, &values(1, 64));
    let mut out = cuda.alloc::<f32>(16).unwrap();
    let factor = Factor { buffer: &values, at: 0, stride: 4, form: Form::Plain };
    let mut fused = |epilogue| {
        let product = Product { m: 4, n: 4, k: 4, a: factor, b: factor, epilogue };
        let to = Output { buffer: &mut out, at: 0, stride: 4, store: Store::Replace };
        cuda.multiply(&stream, product, to).unwrap()
    };
    let (relu, bias) = match child.as_str() {
        "whole" => (Fused::BiasRelu, Fused::Bias),
        "nan" => (Fused::Bias, Fused::Bias),
        _ => (Fused::Nothing, Fused::Nothing),
    };
    for _ in 0..2 {
        assert_eq!(fused(Epilogue::BiasRelu(&values, 32)), relu);
        assert_eq!(fused(Epilogue::Bias(&values, 32)), bias);
        assert_eq!(fused(Epilogue::BiasRelu(&values, 33)), Fused::Nothing, "not aligned");
        assert_eq!(fused(Epilogue::None), Fused::Nothing);
    }
}

#[test]
fn without_cublaslt_the_error_says_what_to_install() {
    let Some(cuda) = testing::cuda() else { return };
    if std::env::var_os(CHILD).is_some() {
        let stream = cuda.stream().unwrap();
        let factor = cuda.alloc::<f32>(1).unwrap();
        let mut out = cuda.alloc::<f32>(1).unwrap();
        let one = Factor { buffer: &factor, at: 0, stride: 1, form: Form::Plain };
        let product = Product { m: 1, n: 1, k: 1, a: one, b: one, epilogue: Epilogue::None };
        for _ in 0..2 {
            let to = Output { buffer: &mut out, at: 0, stride: 1, store: Store::Replace };
            let error = cuda.multiply(&stream, product, to).unwrap_err();
            assert!(matches!(error, DeviceError::Unavailable { .. }), "{error}");
            assert!(error.to_string().contains("pip install nvidia-cublas-cu12"), "{error}");
        }
        return;
    }
    // The stand-ins have a folder without it; a real machine cannot hide its library.
    let all = std::env::var("LD_LIBRARY_PATH").unwrap_or_default();
    let folder = Path::new(all.split(':').next().unwrap_or("")).join("../no-cublaslt");
    if !folder.exists() {
        eprintln!("skipped: no stand-ins without cuBLASLt");
        return;
    }
    let test = "without_cublaslt_the_error_says_what_to_install";
    again(test, "without", "LD_LIBRARY_PATH", folder);
}
