//! 16-bit tables: small updates arrive on average, and nothing that overflows is written.

use tessera_device::Device;
use tessera_embedding::{
    BadIdPolicy, EmbeddingCollection, Precision, SparseOptimizer, SparseStep, UpdateStats,
};

use crate::common::{any_cpu, buffer, cpu, feature, one_hot, stream, table, weights};

/// `steps` steps of plain SGD at rate 1 on `rows` rows that start at `start`, each number with
/// the same gradient.
fn sgd(
    precision: Precision,
    rows: u64,
    dim: usize,
    start: f32,
    grad: f32,
    steps: std::ops::RangeInclusive<u64>,
) -> (Vec<f32>, UpdateStats) {
    let cpu = cpu(1, *tessera_device::Simd::available().last().unwrap());
    let stream = stream(&cpu);
    let mut spec = table("t", rows, dim, SparseOptimizer::Sgd { lr: 1.0 });
    spec.precision = precision;
    let mut tables =
        EmbeddingCollection::new(cpu, &stream, vec![spec], vec![feature("f", 0, 0)], 5).unwrap();
    let numbers = rows as usize * dim;
    tables.write_weights(&stream, 0, 0..rows, &vec![start; numbers]).unwrap();
    let ids: Vec<i64> = (0..rows as i64).collect();
    let lookup = tables.resolve(&stream, vec![one_hot(&ids)], BadIdPolicy::Error).unwrap();
    let grad = buffer(&vec![grad; numbers]);
    let mut stats = UpdateStats::default();
    for t in steps {
        stats = tables.update(&stream, &lookup, &grad, dim, &SparseStep::new(t)).unwrap();
    }
    (weights(&tables, 0), stats)
}

/// Fast kernels elsewhere lost stochastic rounding, and training got worse: 1e5 updates of 1e-4
/// on 1.0, each far below half the spacing of float16, must add up to 10.
#[test]
fn many_small_updates_add_up() {
    for (precision, error_max, spread_max) in
        [(Precision::Fp16, 0.05, 2.0), (Precision::Bf16, 0.2, 6.0)]
    {
        // Seen as sums of 1e5 coin flips, 256 numbers have means with standard deviations of
        // 0.012 (float16, spacing up to 2^-7) and 0.03 (bfloat16, up to 2^-4).
        let (values, stats) = sgd(precision, 16, 16, 1.0, -1e-4, 1..=100_000);
        assert_eq!(stats.rows_updated, [16]);
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
        assert!((mean - 11.0).abs() < error_max, "{precision:?}: mean {mean}");
        assert!(values.iter().all(|x| (x - 11.0).abs() < spread_max), "{precision:?}");
        assert!(values.windows(2).any(|pair| pair[0] != pair[1]), "all rounded alike");
    }
}

#[test]
fn subnormal_numbers_round_too() {
    // 1e-8 is a sixth of float16's smallest number.
    let (values, _) = sgd(Precision::Fp16, 64, 64, 0.0, -1e-8, 1..=600);
    let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / values.len() as f64;
    assert!((mean - 6e-6).abs() < 1e-7, "mean {mean}");
}

#[test]
fn exact_numbers_stay_exact() {
    for precision in [Precision::Fp16, Precision::Bf16] {
        let (values, _) = sgd(precision, 4, 13, 1.0, 0.25, 1..=6);
        assert!(values.iter().all(|&x| x == -0.5), "{precision:?}");
        let (values, _) = sgd(precision, 4, 13, 0.1, 0.0, 1..=50);
        let start = match precision {
            Precision::Fp16 => half::f16::from_f32(0.1).to_f32(),
            _ => half::bf16::from_f32(0.1).to_f32(),
        };
        assert!(values.iter().all(|&x| x == start), "{precision:?}");
    }
}

#[test]
fn rounding_depends_on_the_step() {
    let (first, _) = sgd(Precision::Fp16, 4, 32, 1.0, -1e-4, 1..=1);
    let (second, _) = sgd(Precision::Fp16, 4, 32, 1.0, -1e-4, 2..=2);
    let (again, _) = sgd(Precision::Fp16, 4, 32, 1.0, -1e-4, 1..=1);
    assert_eq!(first, again);
    assert_ne!(first, second);
}

#[test]
fn what_would_overflow_is_not_written() {
    let (values, stats) = sgd(Precision::Fp16, 3, 9, 65504.0, -100.0, 1..=1);
    assert!(values.iter().all(|&x| x == 65504.0));
    assert_eq!((stats.rows_updated[0], stats.rows_nonfinite[0]), (0, 3));
    let (values, stats) = sgd(Precision::Bf16, 3, 9, 3.3e38, -1e38, 1..=1);
    assert!(values.iter().all(|x| x.is_finite()));
    assert_eq!((stats.rows_updated[0], stats.rows_nonfinite[0]), (0, 3));
}

#[test]
fn bits_written_are_the_bits_read() {
    let cpu = any_cpu();
    let stream = stream(&cpu);
    for precision in [Precision::Fp16, Precision::Bf16, Precision::Fp32] {
        let mut spec = table("t", 5, 3, SparseOptimizer::Sgd { lr: 1.0 });
        spec.precision = precision;
        let mut tables =
            EmbeddingCollection::new(cpu.clone(), &stream, vec![spec], vec![], 5).unwrap();
        let bytes: Vec<u8> = (0..2 * 3 * precision.bytes()).map(|i| (i * 37 + 11) as u8).collect();
        tables.write_weight_bits(&stream, 0, 2..4, &bytes).unwrap();
        let mut back = vec![0; bytes.len()];
        tables.read_weight_bits(&stream, 0, 2..4, &mut back).unwrap();
        assert_eq!(back, bytes);
        let values = [0.5, -1.25, 3.0];
        tables.write_weights(&stream, 0, 4..5, &values).unwrap();
        let mut back = [0.0; 3];
        tables.read_weights(&stream, 0, 4..5, &mut back).unwrap();
        assert_eq!(back, values);
    }
    cpu.synchronize(&stream).unwrap();
}
