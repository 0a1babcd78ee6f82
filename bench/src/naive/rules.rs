//! One row, one update, one column after the other.

use tessera_embedding::{SparseOptimizer, WeightDecay};

/// `a / b`, 0 where both are 0.
fn ratio(a: f64, b: f64) -> f64 {
    if a == 0.0 { 0.0 } else { a / b }
}

fn mean_square(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>() / values.len() as f64
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Moves row `w` by gradient `g` at step `t`; `state` holds the optimizer's state tensors of the
/// row, in their order.
///
/// # Panics
/// For an optimizer that is not written down here.
pub fn update(
    optimizer: &SparseOptimizer,
    t: u64,
    w: &mut [f64],
    g: &[f64],
    state: &mut [Vec<f64>],
) {
    match *optimizer {
        SparseOptimizer::Sgd { lr } => {
            for (w, g) in w.iter_mut().zip(g) {
                *w -= lr * g;
            }
        }
        SparseOptimizer::Adagrad { lr, eps, decay } => {
            let before = w.to_vec();
            for (i, w) in w.iter_mut().enumerate() {
                let g = g[i] + l2(decay) * before[i];
                state[0][i] += g * g;
                *w = *w * (1.0 - lr * decouple(decay)) - lr * ratio(g, state[0][i].sqrt() + eps);
            }
        }
        SparseOptimizer::RowwiseAdagrad { lr, eps, decay, moment_scale } => {
            let decayed: Vec<f64> = g.iter().zip(&*w).map(|(g, w)| g + l2(decay) * w).collect();
            state[0][0] += mean_square(&decayed);
            let m = ratio(lr, (state[0][0] / moment_scale).sqrt() + eps);
            for (w, g) in w.iter_mut().zip(g) {
                let keep = 1.0 - lr * decouple(decay) - m * l2(decay);
                *w = keep * *w - if *g == 0.0 { 0.0 } else { m * g };
            }
        }
        SparseOptimizer::Adam { lr, eps, beta1, beta2, weight_decay } => {
            let direction = direction(t, w, g, state, (beta1, beta2), eps, weight_decay);
            for (w, d) in w.iter_mut().zip(direction) {
                *w -= lr * d;
            }
        }
        SparseOptimizer::PartialRowwiseAdam { lr, eps, beta1, beta2, weight_decay } => {
            let direction = direction(t, w, g, state, (beta1, beta2), eps, weight_decay);
            for (w, d) in w.iter_mut().zip(direction) {
                *w -= lr * d;
            }
        }
        SparseOptimizer::Lamb { lr, eps, beta1, beta2, weight_decay }
        | SparseOptimizer::PartialRowwiseLamb { lr, eps, beta1, beta2, weight_decay } => {
            let direction = direction(t, w, g, state, (beta1, beta2), eps, weight_decay);
            let length = norm(&direction);
            let trust = if length == 0.0 { 0.0 } else { norm(w) / length };
            for (w, d) in w.iter_mut().zip(direction) {
                *w -= lr * trust * d;
            }
        }
        SparseOptimizer::LarsSgd { lr, eta, momentum, weight_decay } => {
            let below = norm(g) + weight_decay * norm(w);
            let a = ratio(lr * eta * norm(w), below);
            for (i, w) in w.iter_mut().enumerate() {
                state[0][i] = momentum * state[0][i] + a * (g[i] + weight_decay * *w);
                *w -= state[0][i];
            }
        }
        SparseOptimizer::Ftrl { lr, beta, l1, l2 } => {
            for (i, w) in w.iter_mut().enumerate() {
                let (n, square) = (state[0][i], g[i] * g[i]);
                let sigma = ((n + square).sqrt() - n.sqrt()) / lr;
                state[1][i] += g[i] - sigma * *w;
                state[0][i] = n + square;
                let z = state[1][i];
                *w = match z.abs() <= l1 {
                    true => 0.0,
                    false => -(z - z.signum() * l1) / ((beta + state[0][i].sqrt()) / lr + l2),
                };
            }
        }
        _ => panic!("{} has no naive form", optimizer.name()),
    }
}

fn l2(decay: WeightDecay) -> f64 {
    match decay {
        WeightDecay::L2(amount) => amount,
        WeightDecay::None | WeightDecay::Decouple(_) => 0.0,
    }
}

fn decouple(decay: WeightDecay) -> f64 {
    match decay {
        WeightDecay::Decouple(amount) => amount,
        WeightDecay::None | WeightDecay::L2(_) => 0.0,
    }
}

/// Adam's direction `m^ / (sqrt(v^) + eps) + weight_decay * w`; `v` holds one number where it
/// averages over the row.
fn direction(
    t: u64,
    w: &[f64],
    g: &[f64],
    state: &mut [Vec<f64>],
    (beta1, beta2): (f64, f64),
    eps: f64,
    weight_decay: f64,
) -> Vec<f64> {
    let [m, v] = state else { return Vec::new() };
    for (m, g) in m.iter_mut().zip(g) {
        *m = beta1 * *m + (1.0 - beta1) * g;
    }
    let rowwise = v.len() == 1 && g.len() > 1;
    for (i, v) in v.iter_mut().enumerate() {
        let square = if rowwise { mean_square(g) } else { g[i] * g[i] };
        *v = beta2 * *v + (1.0 - beta2) * square;
    }
    let (unbias1, unbias2) = (1.0 - beta1.powf(t as f64), 1.0 - beta2.powf(t as f64));
    m.iter()
        .enumerate()
        .map(|(i, m)| {
            let v = v[if rowwise { 0 } else { i }];
            ratio(m / unbias1, (v / unbias2).sqrt() + eps) + weight_decay * w[i]
        })
        .collect()
}
