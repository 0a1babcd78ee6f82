//! A DLRM or DCNv2 without its tables, one sample and one number at a time: loss, gradients of
//! all parameters, gradients of the pooled vectors.

use std::collections::BTreeMap;

use tessera_dense::{Interaction, Loss, ModelSpec};

/// Parameters or their gradients by name.
pub type Params = BTreeMap<String, Vec<f64>>;

/// One sample.
#[derive(Clone, Debug)]
pub struct Sample<'a> {
    /// Dense values.
    pub dense: &'a [f32],
    /// Pooled vectors in the columns of the model's input row; the dense vector's are ignored.
    pub row: Vec<f64>,
    /// Label.
    pub label: f64,
    /// Its weight in the loss, divided by the batch.
    pub weight: f64,
}

/// What a sample gives.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Logit.
    pub logit: f64,
    /// Weighted loss.
    pub loss: f64,
    /// Gradient of the input row.
    pub row_grad: Vec<f64>,
}

/// A model's parameters and the sum of their gradients.
pub struct Network<'a> {
    spec: &'a ModelSpec,
    params: &'a Params,
    /// Gradients of all samples that were run, added up.
    pub grads: Params,
}

impl<'a> Network<'a> {
    /// A network with gradients of zero.
    #[must_use]
    pub fn new(spec: &'a ModelSpec, params: &'a Params) -> Self {
        let grads = params.iter().map(|(name, p)| (name.clone(), vec![0.0; p.len()])).collect();
        Self { spec, params, grads }
    }

    /// Runs a sample forward and backward and adds its gradients to the sum.
    pub fn run(&mut self, sample: &Sample<'_>) -> Outcome {
        let spec = self.spec;
        let dense: Vec<f64> = sample.dense.iter().map(|&x| f64::from(x)).collect();
        let bottom = self.mlp("dense.bottom", &spec.bottom, dense, true);
        let mut x0 = sample.row.clone();
        if spec.dense_features > 0 {
            x0[..spec.dense_width()].copy_from_slice(last(&bottom));
        }
        let x0 = &x0[..spec.input_width()];
        let (joined, cross) = self.join(x0);
        let top = self.mlp("dense.top", &spec.top, joined, false);
        let wide = if spec.wide { spec.features.len() } else { 0 };
        let wide_columns = spec.input_width()..spec.input_width() + wide;
        let logit = last(&top)[0] + sample.row[wide_columns.clone()].iter().sum::<f64>();

        let (loss, slope) = match spec.loss {
            Loss::Bce => {
                let loss = logit.max(0.0) - logit * sample.label + (-logit.abs()).exp().ln_1p();
                (loss, sigmoid(logit) - sample.label)
            }
            Loss::Mse => {
                let p = sigmoid(logit);
                ((p - sample.label).powi(2), 2.0 * (p - sample.label) * p * (1.0 - p))
            }
        };
        let slope = slope * sample.weight;
        let djoined = self.mlp_grad("dense.top", &spec.top, &top, vec![slope], false);
        let mut row_grad = vec![0.0; sample.row.len()];
        let dx0 = self.join_grad(x0, &cross, &djoined);
        row_grad[..dx0.len()].copy_from_slice(&dx0);
        row_grad[wide_columns].fill(slope);
        if spec.dense_features > 0 {
            let dbottom = row_grad[..spec.dense_width()].to_vec();
            self.mlp_grad("dense.bottom", &spec.bottom, &bottom, dbottom, true);
        }
        Outcome { logit, loss: loss * sample.weight, row_grad }
    }

    /// `w x`, `w` of shape (out, inputs).
    fn times(&self, name: &str, x: &[f64]) -> Vec<f64> {
        let w = &self.params[name];
        w.chunks_exact(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
    }

    /// Adds `dy x^T` to the gradient of `w` and gives `w^T dy`.
    fn times_grad(&mut self, name: &str, x: &[f64], dy: &[f64]) -> Vec<f64> {
        let mut dx = vec![0.0; x.len()];
        let grads = self.grads.get_mut(name).expect("made with a gradient for every parameter");
        let rows = self.params[name].chunks_exact(x.len()).zip(grads.chunks_exact_mut(x.len()));
        for ((w, dw), &dy) in rows.zip(dy) {
            for i in 0..x.len() {
                dw[i] += dy * x[i];
                dx[i] += dy * w[i];
            }
        }
        dx
    }

    fn add_grad(&mut self, name: &str, dy: &[f64]) {
        let grads = self.grads.get_mut(name).expect("made with a gradient for every parameter");
        for (grad, dy) in grads.iter_mut().zip(dy) {
            *grad += dy;
        }
    }

    /// Input and outputs of all layers.
    fn mlp(&self, name: &str, widths: &[usize], x: Vec<f64>, relu_last: bool) -> Vec<Vec<f64>> {
        let mut all = vec![x];
        for layer in 0..widths.len() {
            let mut y = self.times(&format!("{name}.{layer}.weight"), last(&all));
            for (y, b) in y.iter_mut().zip(&self.params[&format!("{name}.{layer}.bias")]) {
                *y += b;
                if relu_last || layer + 1 < widths.len() {
                    *y = y.max(0.0);
                }
            }
            all.push(y);
        }
        all
    }

    fn mlp_grad(
        &mut self,
        name: &str,
        widths: &[usize],
        all: &[Vec<f64>],
        mut dy: Vec<f64>,
        relu_last: bool,
    ) -> Vec<f64> {
        for layer in (0..widths.len()).rev() {
            if relu_last || layer + 1 < widths.len() {
                for (dy, &y) in dy.iter_mut().zip(&all[layer + 1]) {
                    *dy *= f64::from(u8::from(y > 0.0));
                }
            }
            self.add_grad(&format!("{name}.{layer}.bias"), &dy);
            dy = self.times_grad(&format!("{name}.{layer}.weight"), &all[layer], &dy);
        }
        dy
    }

    /// Vectors of a dot interaction in an input row.
    fn vectors<'x>(&self, x0: &'x [f64]) -> Vec<&'x [f64]> {
        let dim = self.spec.features.first().copied().unwrap_or(1);
        x0.chunks_exact(dim).collect()
    }

    /// The interaction's output, and what its gradient needs: (input, V x, u) of cross layers.
    fn join(&self, x0: &[f64]) -> (Vec<f64>, Vec<[Vec<f64>; 3]>) {
        match self.spec.interaction {
            Interaction::Concat => (x0.to_vec(), Vec::new()),
            Interaction::Dot => {
                let vectors = self.vectors(x0);
                let mut y = x0[..self.spec.dense_width()].to_vec();
                for i in 1..vectors.len() {
                    for j in 0..i {
                        y.push(vectors[i].iter().zip(vectors[j]).map(|(a, b)| a * b).sum());
                    }
                }
                (y, Vec::new())
            }
            Interaction::Dcn { layers, .. } => {
                let (mut x, mut kept) = (x0.to_vec(), Vec::new());
                for layer in 0..layers {
                    let vx = self.times(&format!("dense.cross.{layer}.v"), &x);
                    let mut u = self.times(&format!("dense.cross.{layer}.w"), &vx);
                    self.params[&format!("dense.cross.{layer}.bias")]
                        .iter()
                        .zip(&mut u)
                        .for_each(|(b, u)| *u += b);
                    let y = (0..x.len()).map(|i| x0[i] * u[i] + x[i]).collect();
                    kept.push([std::mem::replace(&mut x, y), vx, u]);
                }
                (x, kept)
            }
        }
    }

    fn join_grad(&mut self, x0: &[f64], kept: &[[Vec<f64>; 3]], dy: &[f64]) -> Vec<f64> {
        match self.spec.interaction {
            Interaction::Concat => dy.to_vec(),
            Interaction::Dot => {
                let (vectors, dense) = (self.vectors(x0), self.spec.dense_width());
                let dim = vectors[0].len();
                let mut dx = vec![0.0; x0.len()];
                dx[..dense].copy_from_slice(&dy[..dense]);
                let mut pairs = dy[dense..].iter();
                for i in 1..vectors.len() {
                    for j in 0..i {
                        let g = pairs.next().copied().unwrap_or_default();
                        for c in 0..dim {
                            dx[i * dim + c] += g * vectors[j][c];
                            dx[j * dim + c] += g * vectors[i][c];
                        }
                    }
                }
                dx
            }
            Interaction::Dcn { .. } => {
                let (mut dy, mut dx0) = (dy.to_vec(), vec![0.0; x0.len()]);
                for (layer, [x, vx, u]) in kept.iter().enumerate().rev() {
                    let du: Vec<f64> = dy.iter().zip(x0).map(|(dy, x0)| dy * x0).collect();
                    for i in 0..x0.len() {
                        dx0[i] += dy[i] * u[i];
                    }
                    self.add_grad(&format!("dense.cross.{layer}.bias"), &du);
                    let dvx = self.times_grad(&format!("dense.cross.{layer}.w"), vx, &du);
                    let dx = self.times_grad(&format!("dense.cross.{layer}.v"), x, &dvx);
                    for i in 0..dy.len() {
                        dy[i] += dx[i];
                    }
                }
                // The first cross layer's input is x0 itself.
                dx0.iter().zip(dy).map(|(a, b)| a + b).collect()
            }
        }
    }
}

fn last(layers: &[Vec<f64>]) -> &[f64] {
    layers.last().map_or(&[], Vec::as_slice)
}

fn sigmoid(z: f64) -> f64 {
    1.0 / (1.0 + (-z).exp())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The gradients are the slopes of the loss.
    #[test]
    fn gradients_agree_with_differences_of_the_loss() {
        for (interaction, wide, loss) in [
            (Interaction::Dot, false, Loss::Bce),
            (Interaction::Concat, true, Loss::Mse),
            (Interaction::Dcn { layers: 2, rank: 3 }, true, Loss::Bce),
        ] {
            let spec = ModelSpec {
                dense_features: 3,
                bottom: vec![5, 4],
                interaction,
                features: vec![4, 4],
                top: vec![6, 1],
                wide,
                loss,
            };
            spec.validate().unwrap();
            let mut rng = crate::draw::Rng::new(5);
            let mut random = |n: usize| -> Vec<f64> { (0..n).map(|_| rng.unit() - 0.4).collect() };
            let (width, joined) = (spec.input_width(), spec.interaction_width());
            let mut params = Params::new();
            let mut add = |name: &str, n: usize| params.insert(name.into(), random(n));
            add("dense.bottom.0.weight", 15);
            add("dense.bottom.0.bias", 5);
            add("dense.bottom.1.weight", 20);
            add("dense.bottom.1.bias", 4);
            add("dense.top.0.weight", 6 * joined);
            add("dense.top.0.bias", 6);
            add("dense.top.1.weight", 6);
            add("dense.top.1.bias", 1);
            for layer in 0..2 {
                add(&format!("dense.cross.{layer}.v"), 3 * width);
                add(&format!("dense.cross.{layer}.w"), 3 * width);
                add(&format!("dense.cross.{layer}.bias"), width);
            }
            let dense = [0.3f32, -0.2, 0.9];
            let row = random(spec.stride());
            let sample = Sample { dense: &dense, row, label: 1.0, weight: 0.5 };
            let loss_of =
                |params: &Params, sample: &Sample<'_>| Network::new(&spec, params).run(sample).loss;
            let mut network = Network::new(&spec, &params);
            let outcome = network.run(&sample);
            let h = 1e-6;
            for (name, values) in &params {
                for i in (0..values.len()).step_by(3) {
                    let mut moved = params.clone();
                    moved.get_mut(name).unwrap()[i] += h;
                    let up = loss_of(&moved, &sample);
                    moved.get_mut(name).unwrap()[i] -= 2.0 * h;
                    let slope = (up - loss_of(&moved, &sample)) / (2.0 * h);
                    let got = network.grads[name][i];
                    assert!((got - slope).abs() < 1e-7, "{name}[{i}]: {got}, not {slope}");
                }
            }
            for i in spec.dense_width()..sample.row.len() {
                let mut moved = sample.clone();
                moved.row[i] += h;
                let up = loss_of(&params, &moved);
                moved.row[i] -= 2.0 * h;
                let slope = (up - loss_of(&params, &moved)) / (2.0 * h);
                let got = outcome.row_grad[i];
                assert!((got - slope).abs() < 1e-7, "row[{i}]: {got}, not {slope}");
            }
        }
    }
}
