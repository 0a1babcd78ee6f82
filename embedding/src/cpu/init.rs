//! First values of rows.
//!
//! Columns `4 b .. 4 b + 4` of a row come from the four words of block (row, b) of the table's
//! generator: neither threads nor shards show in them.

use std::f64::consts::TAU;

use rayon::prelude::*;
use tessera_device::Philox;

use crate::{Init, Precision, TableSpec, Window};

/// Rows made by one task at a time, in numbers.
const CHUNK_NUMBERS: usize = 1 << 16;

/// Fills the weights plane of a table, (rows, dim), which lies in its whole table as `window`
/// says, on the current pool's threads.
pub(crate) fn fill(table: &TableSpec, window: &Window, generator: Philox, weights: &mut [u8]) {
    let dim = table.dim;
    let row_bytes = dim * table.precision.bytes();
    let chunk_rows = (CHUNK_NUMBERS / dim).max(1);
    weights.par_chunks_mut(chunk_rows * row_bytes).enumerate().for_each(|(chunk, bytes)| {
        let first = (chunk * chunk_rows) as u64;
        let rows = (bytes.len() / row_bytes) as u64;
        fill_rows(table, window, generator, first..first + rows, bytes);
    });
}

/// Writes the first weights of `rows` of a table, counted from its window's first.
pub(crate) fn fill_rows(
    table: &TableSpec,
    window: &Window,
    generator: Philox,
    rows: impl Iterator<Item = u64>,
    weights: &mut [u8], // (rows, dim)
) {
    let mut values = vec![0.0f32; table.dim];
    let row_bytes = table.dim * table.precision.bytes();
    for (row, bytes) in rows.zip(weights.chunks_exact_mut(row_bytes)) {
        fill_row(table.init, window, generator, window.first_row + row, &mut values);
        match table.precision {
            Precision::Fp32 => bytes.copy_from_slice(bytemuck::cast_slice(&values)),
            Precision::Fp16 => {
                for (to, &x) in bytes.chunks_exact_mut(2).zip(&values) {
                    to.copy_from_slice(&half::f16::from_f32(x).to_ne_bytes());
                }
            }
            Precision::Bf16 => {
                for (to, &x) in bytes.chunks_exact_mut(2).zip(&values) {
                    to.copy_from_slice(&half::bf16::from_f32(x).to_ne_bytes());
                }
            }
        }
    }
}

/// The first values of one row of the whole table, in the window's columns.
fn fill_row(init: Init, window: &Window, generator: Philox, row: u64, values: &mut [f32]) {
    let first_block = (window.first_column / 4) as u64;
    let blocks =
        values.chunks_mut(4).zip(first_block..).map(|(to, b)| (to, generator.block(row, b)));
    match init {
        Init::Uniform { scale } => {
            let scale = uniform_scale(scale, window);
            for (to, words) in blocks {
                for (to, word) in to.iter_mut().zip(words) {
                    *to = (2.0 * Philox::unit(word) - 1.0) * scale;
                }
            }
        }
        Init::Normal { std } => {
            for (to, words) in blocks {
                let (a, b) = normal_pair(words[0], words[1]);
                let (c, d) = normal_pair(words[2], words[3]);
                for (to, z) in to.iter_mut().zip([a, b, c, d]) {
                    *to = (z * f64::from(std)) as f32;
                }
            }
        }
        Init::Zero => values.fill(0.0),
    }
}

/// Half the width of a uniform distribution.
pub(crate) fn uniform_scale(scale: Option<f32>, window: &Window) -> f32 {
    scale.unwrap_or_else(|| (1.0 / (window.rows as f64).sqrt()) as f32)
}

/// Two normal values from two words (Box and Muller 1958), in float64.
fn normal_pair(a: u32, b: u32) -> (f64, f64) {
    let range = 2f64.powi(-32);
    // The logarithm's argument is in (0, 1].
    let radius = (-2.0 * ((f64::from(a) + 1.0) * range).ln()).sqrt();
    let (sin, cos) = (TAU * f64::from(b) * range).sin_cos();
    (radius * cos, radius * sin)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pooling, SparseOptimizer, TableKind};

    fn table(init: Init, precision: Precision, rows: u64, dim: usize) -> TableSpec {
        TableSpec {
            name: "t".into(),
            kind: TableKind::Static,
            rows,
            dim,
            precision,
            pooling: Pooling::Sum,
            init,
            optimizer: SparseOptimizer::Sgd { lr: 0.1 },
        }
    }

    fn values(table: &TableSpec) -> Vec<f32> {
        let mut bytes = vec![0u8; table.rows as usize * table.dim * table.precision.bytes()];
        let whole = Window { rows: table.rows, dim: table.dim, first_row: 0, first_column: 0 };
        fill(table, &whole, Philox::for_name(3, &table.name), &mut bytes);
        let bits = bytes.chunks_exact(table.precision.bytes());
        bits.map(|bits| match table.precision {
            Precision::Fp32 => f32::from_ne_bytes(bits.try_into().unwrap()),
            Precision::Fp16 => half::f16::from_ne_bytes(bits.try_into().unwrap()).to_f32(),
            Precision::Bf16 => half::bf16::from_ne_bytes(bits.try_into().unwrap()).to_f32(),
        })
        .collect()
    }

    fn moments(values: &[f32]) -> (f64, f64) {
        let n = values.len() as f64;
        let mean = values.iter().map(|&x| f64::from(x)).sum::<f64>() / n;
        let variance = values.iter().map(|&x| (f64::from(x) - mean).powi(2)).sum::<f64>() / n;
        (mean, variance.sqrt())
    }

    #[test]
    fn values_have_the_moments_and_bounds_asked_for() {
        let uniform = values(&table(Init::default(), Precision::Fp32, 10_000, 7));
        let (mean, deviation) = moments(&uniform);
        assert!(mean.abs() < 1e-4 && (deviation - 0.01 / 3f64.sqrt()).abs() < 1e-4);
        assert!(uniform.iter().all(|x| (-0.01..0.01).contains(x)));
        let normal = values(&table(Init::Normal { std: 0.5 }, Precision::Fp32, 10_000, 7));
        let (mean, deviation) = moments(&normal);
        assert!(mean.abs() < 0.01 && (deviation - 0.5).abs() < 0.01, "{mean} {deviation}");
        assert!(normal.iter().any(|x| x.abs() > 1.5) && normal.iter().all(|x| x.is_finite()));
    }

    #[test]
    fn a_window_shows_the_whole_tables_values() {
        let whole = table(Init::default(), Precision::Fp32, 9, 70);
        let all = values(&whole);
        let part = TableSpec { rows: 4, dim: 38, ..whole.clone() };
        let window = Window { rows: 9, dim: 70, first_row: 3, first_column: 32 };
        let mut bytes = vec![0u8; 4 * 38 * 4];
        fill(&part, &window, Philox::for_name(3, &whole.name), &mut bytes);
        let part: &[f32] = bytemuck::cast_slice(&bytes);
        for row in 0..4 {
            assert_eq!(part[row * 38..][..38], all[(row + 3) * 70 + 32..][..38]);
        }
    }

    #[test]
    fn a_row_depends_on_nothing_but_its_number() {
        let init = Init::Uniform { scale: Some(1.0) };
        let small = values(&table(init, Precision::Fp32, 3, 6));
        let large = values(&table(init, Precision::Fp32, 50_000, 6));
        assert_eq!(small, large[..18]);
        assert_ne!(large[0..6], large[6..12]);
        for precision in [Precision::Fp16, Precision::Bf16] {
            let rounded = values(&table(init, precision, 3, 6));
            for (a, b) in small.iter().zip(&rounded) {
                assert!((a - b).abs() <= a.abs() / 250.0, "{a} {b}");
            }
        }
    }
}
