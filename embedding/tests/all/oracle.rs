//! A table in float64 with obvious loops: what every kernel is held to.

use std::collections::BTreeMap;

use tessera_embedding::{Pooling, SparseOptimizer as Kind, SparseStep, StateWidth, WeightDecay};

/// Bags of one feature: offsets, rows, a weight a row.
pub struct Bags<'a> {
    pub offsets: &'a [u64],
    pub rows: &'a [i64],
    pub weights: Option<&'a [f32]>,
}

/// A table's weights and state.
pub struct Table {
    pub optimizer: Kind,
    pub pooling: Pooling,
    pub dim: usize,
    pub w: Vec<Vec<f64>>,
    pub state: BTreeMap<&'static str, Vec<Vec<f64>>>,
}

impl Table {
    pub fn new(optimizer: Kind, pooling: Pooling, dim: usize, weights: &[f32]) -> Self {
        let w: Vec<Vec<f64>> =
            weights.chunks(dim).map(|row| row.iter().map(|&x| f64::from(x)).collect()).collect();
        let state = optimizer.state().iter().map(|tensor| {
            let width = if tensor.width == StateWidth::One { 1 } else { dim };
            (tensor.name, vec![vec![0.0; width]; w.len()])
        });
        Self { optimizer, pooling, dim, state: state.collect(), w }
    }

    /// Pooled vectors, (bags, dim).
    pub fn pool(&self, bags: &Bags<'_>) -> Vec<Vec<f64>> {
        let bag = |pair: &[u64]| {
            let mut sum = vec![0.0; self.dim];
            for i in pair[0] as usize..pair[1] as usize {
                let weight = bags.weights.map_or(1.0, |weights| f64::from(weights[i]));
                for (sum, x) in sum.iter_mut().zip(&self.w[bags.rows[i] as usize]) {
                    *sum += weight * x;
                }
            }
            if self.pooling == Pooling::Mean && pair[1] > pair[0] {
                sum.iter_mut().for_each(|sum| *sum /= (pair[1] - pair[0]) as f64);
            }
            sum
        };
        bags.offsets.windows(2).map(bag).collect()
    }

    /// Summed gradients by row; `features` gives each feature's bags and pooled gradients.
    pub fn gradients(&self, features: &[(Bags<'_>, Vec<Vec<f64>>)]) -> BTreeMap<i64, Vec<f64>> {
        let mut gradients = BTreeMap::new();
        for (bags, grad) in features {
            for (bag, pair) in bags.offsets.windows(2).enumerate() {
                let mean = self.pooling == Pooling::Mean;
                let share = if mean { 1.0 / (pair[1] - pair[0]) as f64 } else { 1.0 };
                for i in pair[0] as usize..pair[1] as usize {
                    let scale = bags.weights.map_or(share, |weights| f64::from(weights[i]));
                    let sum = gradients.entry(bags.rows[i]).or_insert_with(|| vec![0.0; self.dim]);
                    for (sum, g) in sum.iter_mut().zip(&grad[bag]) {
                        *sum += scale * g;
                    }
                }
            }
        }
        gradients
    }

    /// One update by summed gradients.
    pub fn update(&mut self, gradients: &BTreeMap<i64, Vec<f64>>, step: &SparseStep) {
        for (&row, g) in gradients {
            self.update_row(row as usize, g, step);
        }
    }

    fn update_row(&mut self, row: usize, g: &[f64], step: &SparseStep) {
        let dim = self.dim;
        let t = step.t as f64;
        let lr = self.optimizer.lr() * f64::from(step.lr_scale);
        let x = self.w[row].clone();
        let w = &mut self.w[row];
        let mut tensors: Vec<(&str, &mut Vec<f64>)> =
            self.state.iter_mut().map(|(&name, rows)| (name, &mut rows[row])).collect();
        let tensors = &mut tensors[..]; // by name: m v, n z, sum, u
        let mean_square = |g: &[f64]| g.iter().map(|g| g * g).sum::<f64>() / dim as f64;
        let norm = |x: &[f64]| x.iter().map(|x| x * x).sum::<f64>().sqrt();
        let or_0 = |x: f64, divisor: f64| if divisor == 0.0 { 0.0 } else { x / divisor };
        match self.optimizer {
            Kind::Sgd { .. } => (0..dim).for_each(|d| w[d] = x[d] - lr * g[d]),
            Kind::Adagrad { eps, decay, .. } => {
                let sum = &mut tensors[0].1;
                for d in 0..dim {
                    let l2 = if let WeightDecay::L2(l2) = decay { l2 } else { 0.0 };
                    let keep =
                        if let WeightDecay::Decouple(wd) = decay { 1.0 - lr * wd } else { 1.0 };
                    let g = g[d] + l2 * x[d];
                    sum[d] += g * g;
                    w[d] = x[d] * keep - or_0(lr * g, sum[d].sqrt() + eps);
                }
            }
            Kind::RowwiseAdagrad { eps, decay, moment_scale, .. } => {
                let sum = &mut tensors[0].1[0];
                let l2 = if let WeightDecay::L2(l2) = decay { l2 } else { 0.0 };
                let with_decay: Vec<f64> = g.iter().zip(&x).map(|(g, x)| g + l2 * x).collect();
                *sum += mean_square(&with_decay);
                let m = or_0(lr, (*sum / moment_scale).sqrt() + eps);
                let keep = match decay {
                    WeightDecay::None => 1.0,
                    WeightDecay::L2(l2) => 1.0 - m * l2,
                    WeightDecay::Decouple(wd) => 1.0 - lr * wd,
                };
                (0..dim).for_each(|d| w[d] = keep * x[d] - m * g[d]);
            }
            Kind::Adam { eps, beta1, beta2, weight_decay, .. }
            | Kind::PartialRowwiseAdam { eps, beta1, beta2, weight_decay, .. }
            | Kind::Lamb { eps, beta1, beta2, weight_decay, .. }
            | Kind::PartialRowwiseLamb { eps, beta1, beta2, weight_decay, .. } => {
                let [(_, m), (_, v)] = tensors else { unreachable!() };
                let partial = v.len() == 1 && dim > 1;
                let whole = mean_square(g);
                for (d, second) in v.iter_mut().enumerate() {
                    let square = if partial { whole } else { g[d] * g[d] };
                    *second = beta2 * *second + (1.0 - beta2) * square;
                }
                let mut direction = vec![0.0; dim];
                for d in 0..dim {
                    m[d] = beta1 * m[d] + (1.0 - beta1) * g[d];
                    let second = v[if partial { 0 } else { d }] / (1.0 - beta2.powf(t));
                    let first = m[d] / (1.0 - beta1.powf(t));
                    direction[d] = or_0(first, second.sqrt() + eps) + weight_decay * x[d];
                }
                let lamb =
                    matches!(self.optimizer, Kind::Lamb { .. } | Kind::PartialRowwiseLamb { .. });
                let ratio = if lamb { or_0(norm(&x), norm(&direction)) } else { 1.0 };
                (0..dim).for_each(|d| w[d] = x[d] - lr * ratio * direction[d]);
            }
            Kind::LarsSgd { eta, momentum, weight_decay, .. } => {
                let u = &mut tensors[0].1;
                let rate = or_0(lr * eta * norm(&x), norm(g) + weight_decay * norm(&x));
                for d in 0..dim {
                    u[d] = momentum * u[d] + rate * (g[d] + weight_decay * x[d]);
                    w[d] = x[d] - u[d];
                }
            }
            Kind::Ftrl { beta, l1, l2, .. } => {
                let [(_, n), (_, z)] = tensors else { unreachable!() };
                for d in 0..dim {
                    let next = n[d] + g[d] * g[d];
                    z[d] += g[d] - (next.sqrt() - n[d].sqrt()) / lr * x[d];
                    n[d] = next;
                    let over = z[d] - z[d].signum() * l1;
                    let moved = -over / ((beta + next.sqrt()) / lr + l2);
                    w[d] = if z[d].abs() <= l1 { 0.0 } else { moved };
                }
            }
            _ => panic!("no oracle for {}", self.optimizer.name()),
        }
    }
}
