//! Shared by the integration tests: where the golden files are, and small builders.

use std::num::NonZeroUsize;
use std::path::PathBuf;

use tessera_data::{Jagged, RawId};
use tessera_device::{Cpu, Device, HostBuffer, Simd};
use tessera_embedding::{
    EmbeddingCollection, FeatureSpec, Init, LookupOps, Pooling, Precision, SparseOptimizer,
    TableKind, TableSpec, WeightDecay,
};

/// The directory of golden values, or `None` where a bare checkout has none. Under CI it must be
/// there.
pub fn golden() -> Option<PathBuf> {
    let shared = std::env::var_os("TESSERA_SHARED").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let golden = shared.join("golden");
    if golden.is_dir() {
        return Some(golden);
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "no golden values at {}: set TESSERA_SHARED",
        golden.display()
    );
    println!("skipped: no golden values at {} (set TESSERA_SHARED)", golden.display());
    None
}

/// A device of `threads` threads restricted to `simd`.
pub fn cpu(threads: usize, simd: Simd) -> Cpu {
    Cpu::new(NonZeroUsize::new(threads)).unwrap().with_simd(simd)
}

/// Every instruction set of this machine with every number of threads given.
pub fn machines(threads: &[usize]) -> Vec<Cpu> {
    let sets = Simd::available();
    sets.iter().flat_map(|&simd| threads.iter().map(move |&n| cpu(n, simd))).collect()
}

/// A device that does whatever it likes.
pub fn any_cpu() -> Cpu {
    Cpu::new(NonZeroUsize::new(2)).unwrap()
}

pub fn stream<D: Device>(device: &D) -> D::Stream {
    device.stream().unwrap()
}

pub fn table(name: &str, rows: u64, dim: usize, optimizer: SparseOptimizer) -> TableSpec {
    TableSpec {
        name: name.into(),
        kind: TableKind::Static,
        rows,
        dim,
        precision: Precision::Fp32,
        pooling: Pooling::Sum,
        init: Init::Uniform { scale: Some(0.5) },
        optimizer,
    }
}

pub fn feature(name: &str, table: usize, column: usize) -> FeatureSpec {
    FeatureSpec { name: name.into(), table, column }
}

pub fn jagged(offsets: &[u64], ids: &[i64], weights: Option<&[f32]>) -> Jagged {
    let ids = ids.iter().copied().map(RawId).collect();
    Jagged::new(offsets.len() - 1, offsets.to_vec(), ids, weights.map(<[f32]>::to_vec)).unwrap()
}

/// One bag an id.
pub fn one_hot(ids: &[i64]) -> Jagged {
    let offsets: Vec<u64> = (0..=ids.len() as u64).collect();
    jagged(&offsets, ids, None)
}

pub fn buffer(values: &[f32]) -> HostBuffer<f32> {
    HostBuffer::from_slice(values).unwrap()
}

/// All weights of a table as float32.
pub fn weights<D: LookupOps>(tables: &EmbeddingCollection<D>, table: usize) -> Vec<f32> {
    let spec = &tables.schema().tables()[table];
    let mut values = vec![0.0; spec.rows as usize * spec.dim];
    tables.read_weights(&stream(tables.device()), table, 0..spec.rows, &mut values).unwrap();
    values
}

/// All of a state tensor of a table.
pub fn state<D: LookupOps>(tables: &EmbeddingCollection<D>, table: usize, name: &str) -> Vec<f32> {
    let spec = &tables.schema().tables()[table];
    let tensor = spec.optimizer.state().iter().find(|tensor| tensor.name == name).unwrap();
    let mut values = vec![0.0; spec.rows as usize * tensor.columns(spec.dim)];
    tables.read_state(&stream(tables.device()), table, name, 0..spec.rows, &mut values).unwrap();
    values
}

/// Bits of every weight and state of every table, one after another.
pub fn all_bits<D: LookupOps>(tables: &EmbeddingCollection<D>) -> Vec<u32> {
    let mut bits = Vec::new();
    for (i, spec) in tables.schema().tables().iter().enumerate() {
        bits.extend(weights(tables, i).into_iter().map(f32::to_bits));
        for tensor in spec.optimizer.state() {
            bits.extend(state(tables, i, tensor.name).into_iter().map(f32::to_bits));
        }
    }
    bits
}

/// One optimizer of every kind and option, with ordinary hyper-parameters.
pub fn every_optimizer() -> Vec<SparseOptimizer> {
    let (lr, eps, beta1, beta2) = (0.05, 1e-8, 0.9, 0.99);
    let mut all = vec![SparseOptimizer::Sgd { lr }];
    for decay in [WeightDecay::None, WeightDecay::L2(0.02), WeightDecay::Decouple(0.02)] {
        all.push(SparseOptimizer::Adagrad { lr, eps, decay });
        for moment_scale in [1.0, 4.0] {
            all.push(SparseOptimizer::RowwiseAdagrad { lr, eps, decay, moment_scale });
        }
    }
    for weight_decay in [0.0, 0.01] {
        all.extend([
            SparseOptimizer::Adam { lr, eps, beta1, beta2, weight_decay },
            SparseOptimizer::PartialRowwiseAdam { lr, eps, beta1, beta2, weight_decay },
            SparseOptimizer::Lamb { lr, eps, beta1, beta2, weight_decay },
            SparseOptimizer::PartialRowwiseLamb { lr, eps, beta1, beta2, weight_decay },
            SparseOptimizer::LarsSgd { lr: 0.5, eta: 0.02, momentum: 0.9, weight_decay },
        ]);
    }
    all.push(SparseOptimizer::Ftrl { lr, beta: 1.0, l1: 0.002, l2: 0.01 });
    all
}

/// Asserts `|a - b| <= absolute + relative * |b|` everywhere.
#[track_caller]
pub fn assert_close(what: &str, a: &[f32], b: &[f64], absolute: f64, relative: f64) {
    assert_eq!(a.len(), b.len(), "{what}");
    for (i, (&a, &b)) in a.iter().zip(b).enumerate() {
        let error = (f64::from(a) - b).abs();
        assert!(error <= absolute + relative * b.abs(), "{what}[{i}]: {a} is not {b}");
    }
}
