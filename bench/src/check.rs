//! The answer first: what the code under test gives is held against a naive computation on a
//! sample of bags or rows, and a wrong answer stops the benchmark.
//!
//! Tolerance: `1e-6 + 2e-5 * |value|`, that of the golden files, in float32; one unit in the last
//! place of the stored type more for 16-bit tables, which round stochastically.

use std::collections::BTreeMap;

use tessera_data::Batch;
use tessera_device::{Cpu, CpuStream};
use tessera_embedding::{EmbeddingCollection, Pooling, Precision};

use crate::draw::Rng;
use crate::naive::rules;
use crate::{BenchError, Result};

/// Bags or rows of each feature or table that are looked at.
const SAMPLE: usize = 16;

/// Holds one number against another.
///
/// Errors: [`BenchError::WrongAnswer`] naming it.
pub fn close(what: impl FnOnce() -> String, got: f64, want: f64, slack: f64) -> Result<()> {
    // Written so that a NaN is a wrong answer.
    if (got - want).abs() <= 1e-6 + 2e-5 * want.abs() + slack {
        return Ok(());
    }
    Err(BenchError::WrongAnswer { what: what(), got, want })
}

/// One unit in the last place of a stored value, relative.
#[must_use]
pub fn unit(precision: Precision) -> f64 {
    match precision {
        Precision::Fp32 => 0.0,
        Precision::Fp16 => 1.0 / 1024.0,
        Precision::Bf16 => 1.0 / 128.0,
    }
}

/// A row's weights as they are stored now.
///
/// Errors: what the tables say.
pub fn weights(
    tables: &EmbeddingCollection<Cpu>,
    stream: &CpuStream,
    table: usize,
    row: u64,
) -> Result<Vec<f64>> {
    let mut values = vec![0.0f32; tables.schema().tables()[table].dim];
    tables.read_weights(stream, table, row..row + 1, &mut values)?;
    Ok(values.into_iter().map(f64::from).collect())
}

/// A row's state tensors as they are stored now, in their order.
///
/// Errors: what the tables say.
pub fn state(
    tables: &EmbeddingCollection<Cpu>,
    stream: &CpuStream,
    table: usize,
    row: u64,
) -> Result<Vec<Vec<f64>>> {
    let spec = &tables.schema().tables()[table];
    let mut all = Vec::new();
    for tensor in spec.optimizer.state() {
        let mut values = vec![0.0f32; tensor.columns(spec.dim)];
        tables.read_state(stream, table, tensor.name, row..row + 1, &mut values)?;
        all.push(values.into_iter().map(f64::from).collect());
    }
    Ok(all)
}

/// Factor of each id of a bag: its weight, or the part that a mean gives it.
fn factors(request: &Batch, feature: usize, bag: usize, pooling: Pooling) -> Vec<f64> {
    let jagged = &request.features()[feature];
    let count = jagged.bag(bag).len();
    match (jagged.bag_weights(bag), pooling) {
        (Some(weights), _) => weights.iter().map(|&weight| f64::from(weight)).collect(),
        (None, Pooling::Mean) => vec![1.0 / count as f64; count],
        (None, _) => vec![1.0; count],
    }
}

/// The pooled vector of a bag, naively.
///
/// Errors: what the tables say.
pub fn pooled(
    tables: &EmbeddingCollection<Cpu>,
    stream: &CpuStream,
    request: &Batch,
    feature: usize,
    bag: usize,
) -> Result<Vec<f64>> {
    let schema = tables.schema();
    let table = schema.features()[feature].table;
    let spec = &schema.tables()[table];
    let mut sum = vec![0.0; spec.dim];
    let ids = request.features()[feature].bag(bag);
    for (id, factor) in ids.iter().zip(factors(request, feature, bag, spec.pooling)) {
        let row = weights(tables, stream, table, id.0 as u64)?;
        for (sum, value) in sum.iter_mut().zip(row) {
            *sum += factor * value;
        }
    }
    Ok(sum)
}

/// Holds pooled vectors, (bags, stride), against naive sums on a sample of bags.
///
/// Errors: [`BenchError::WrongAnswer`] naming feature, bag and column.
pub fn lookup(
    tables: &EmbeddingCollection<Cpu>,
    stream: &CpuStream,
    request: &Batch,
    out: &[f32],
    stride: usize,
) -> Result<()> {
    let mut rng = Rng::new(request.samples() as u64);
    for (index, feature) in tables.schema().features().iter().enumerate() {
        for _ in 0..SAMPLE.min(request.samples()) {
            let bag = rng.below(request.samples() as u64) as usize;
            let want = pooled(tables, stream, request, index, bag)?;
            for (column, want) in want.into_iter().enumerate() {
                let got = f64::from(out[bag * stride + feature.column + column]);
                let what = || format!("feature {}, bag {bag}, column {column}", feature.name);
                close(what, got, want, 0.0)?;
            }
        }
    }
    Ok(())
}

/// A table's row as it was before an update, and the gradient that it should move by.
#[derive(Debug)]
pub struct Watched {
    table: usize,
    row: u64,
    weights: Vec<f64>,
    state: Vec<Vec<f64>>,
    grad: Vec<f64>,
}

/// Picks rows of a request and notes what an update needs of them; `grad` gives the gradient of
/// a pooled number by sample and column. `most` rows a table are picked, all where `None`.
///
/// Errors: what the tables say.
pub fn watch(
    tables: &EmbeddingCollection<Cpu>,
    stream: &CpuStream,
    request: &Batch,
    grad: impl Fn(usize, usize) -> f64,
    most: Option<usize>,
) -> Result<Vec<Watched>> {
    let schema = tables.schema();
    let mut watched = Vec::new();
    let mut rng = Rng::new(request.samples() as u64 + 1);
    for (table, spec) in schema.tables().iter().enumerate() {
        let mut grads: BTreeMap<u64, Vec<f64>> = BTreeMap::new();
        let of_table = || schema.features().iter().enumerate().filter(|(_, f)| f.table == table);
        for (index, _) in of_table() {
            let ids = request.features()[index].ids();
            let count = most.unwrap_or(ids.len()).min(ids.len());
            for i in 0..count {
                let at = if most.is_some() { rng.below(ids.len() as u64) as usize } else { i };
                grads.insert(ids[at].0 as u64, vec![0.0; spec.dim]);
            }
        }
        for (index, feature) in of_table() {
            let jagged = &request.features()[index];
            for bag in 0..jagged.bags() {
                let factors = factors(request, index, bag, spec.pooling);
                for (id, factor) in jagged.bag(bag).iter().zip(factors) {
                    if let Some(sum) = grads.get_mut(&(id.0 as u64)) {
                        for (column, sum) in sum.iter_mut().enumerate() {
                            *sum += factor * grad(bag, feature.column + column);
                        }
                    }
                }
            }
        }
        for (row, grad) in grads {
            watched.push(Watched {
                table,
                row,
                weights: weights(tables, stream, table, row)?,
                state: state(tables, stream, table, row)?,
                grad,
            });
        }
    }
    Ok(watched)
}

/// Sum of squares of the gradients of rows.
#[must_use]
pub fn square_norm(watched: &[Watched]) -> f64 {
    watched.iter().flat_map(|row| &row.grad).map(|g| g * g).sum()
}

/// Holds rows after update `t` against naive updates of what they were; `clip` is what happens
/// to a gradient first, and `slack` how far a gradient may be off, relative to the largest one of
/// its row.
///
/// Errors: [`BenchError::WrongAnswer`] naming table, row and column.
pub fn updated(
    tables: &EmbeddingCollection<Cpu>,
    stream: &CpuStream,
    watched: Vec<Watched>,
    t: u64,
    clip: impl Fn(f64) -> f64,
    slack: f64,
) -> Result<()> {
    for Watched { table, row, weights: before, state: mut numbers, grad } in watched {
        let spec = &tables.schema().tables()[table];
        let grad: Vec<f64> = grad.into_iter().map(&clip).collect();
        let largest = grad.iter().fold(0.0f64, |most, g| most.max(g.abs()));
        let mut want = before.clone();
        rules::update(&spec.optimizer, t, &mut want, &grad, &mut numbers);
        let got = weights(tables, stream, table, row)?;
        for (column, (&got, &want)) in got.iter().zip(&want).enumerate() {
            // The sign of a gradient that rounding decides is nobody's fault, and optimizers that
            // divide by its size move by a whole step on it.
            if slack > 0.0 && grad[column].abs() <= 1e-3 * largest {
                continue;
            }
            let what = || format!("table {}, row {row}, column {column}", spec.name);
            let moved = slack * (want - before[column]).abs();
            close(what, got, want, unit(spec.precision) * want.abs() + moved)?;
        }
    }
    Ok(())
}
