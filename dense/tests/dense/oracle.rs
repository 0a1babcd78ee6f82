//! A model's loss by obvious loops in f64, one sample at a time. No gradients: tests take them by
//! finite differences.

use std::collections::BTreeMap;

use tessera_dense::{Interaction, Loss, ModelSpec};

/// Parameters by name.
pub type Params = BTreeMap<String, Vec<f64>>;

/// One sample as the dense part sees it.
#[derive(Clone)]
pub struct Sample {
    pub dense: Vec<f64>,
    pub features: Vec<Vec<f64>>,
    pub wide: Vec<f64>,
    pub label: f64,
    pub weight: f64,
}

/// `act(W x + b)`; the number of outputs follows from W's length.
fn linear(w: &[f64], b: Option<&[f64]>, x: &[f64]) -> Vec<f64> {
    (0..w.len() / x.len())
        .map(|o| {
            let sum: f64 = (0..x.len()).map(|i| w[o * x.len() + i] * x[i]).sum();
            sum + b.map_or(0.0, |b| b[o])
        })
        .collect()
}

fn mlp(params: &Params, prefix: &str, layers: usize, relus: usize, x: Vec<f64>) -> Vec<f64> {
    (0..layers).fold(x, |x, i| {
        let w = &params[&format!("{prefix}.{i}.weight")];
        let mut y = linear(w, Some(&params[&format!("{prefix}.{i}.bias")]), &x);
        if i < relus {
            y.iter_mut().for_each(|y| *y = y.max(0.0));
        }
        y
    })
}

pub fn logit(spec: &ModelSpec, params: &Params, sample: &Sample) -> f64 {
    let bottom = spec.bottom.len();
    let dense = mlp(params, "dense.bottom", bottom, bottom, sample.dense.clone());
    let x0 = [dense.clone(), sample.features.concat()].concat();
    let interacted = match spec.interaction {
        Interaction::Concat => x0,
        Interaction::Dot => {
            let mut vectors = sample.features.clone();
            if !dense.is_empty() {
                vectors.insert(0, dense.clone());
            }
            let mut out = dense;
            for i in 0..vectors.len() {
                for j in 0..i {
                    out.push(vectors[i].iter().zip(&vectors[j]).map(|(a, b)| a * b).sum());
                }
            }
            out
        }
        Interaction::Dcn { layers, .. } => (0..layers).fold(x0.clone(), |x, l| {
            let h = linear(&params[&format!("dense.cross.{l}.v")], None, &x);
            let bias = &params[&format!("dense.cross.{l}.bias")];
            let u = linear(&params[&format!("dense.cross.{l}.w")], Some(bias), &h);
            (0..x.len()).map(|c| x0[c] * u[c] + x[c]).collect()
        }),
    };
    let top = spec.top.len();
    mlp(params, "dense.top", top, top - 1, interacted)[0] + sample.wide.iter().sum::<f64>()
}

pub fn loss(spec: &ModelSpec, params: &Params, samples: &[Sample], global_batch: f64) -> f64 {
    let losses = samples.iter().map(|sample| {
        let p = 1.0 / (1.0 + (-logit(spec, params, sample)).exp());
        let y = sample.label;
        sample.weight
            * match spec.loss {
                Loss::Bce => -(y * p.ln() + (1.0 - y) * (1.0 - p).ln()),
                Loss::Mse => (p - y) * (p - y),
            }
    });
    losses.sum::<f64>() / global_batch
}
