//! Sparse optimizers: their hyper-parameters and the state that they keep beside a row.
//!
//! The formulas are those of FBGEMM's split optimizers as the project's float64 oracle writes
//! them; `cpu/rules.rs` has them in code. Hyper-parameters are float64, so that the constants of
//! a step (1 - beta, bias corrections) are formed before the one rounding to float32.

/// Weight decay of the AdaGrad kinds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum WeightDecay {
    /// None.
    #[default]
    None,
    /// Adds `decay * w` to the gradient.
    L2(f64),
    /// Scales weights by `1 - lr * decay`, apart from the gradient.
    Decouple(f64),
}

/// How a row moves by its gradient `g` (summed over all its occurrences in a batch).
///
/// `w` is the row, `mean` and norms run over its columns, `t` is the step, `m^ = m / (1 -
/// beta1^t)`, `v^ = v / (1 - beta2^t)`. Any quotient `0 / 0` counts as 0: a zero gradient never
/// makes a NaN.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum SparseOptimizer {
    /// `w -= lr * g`.
    Sgd {
        /// Learning rate.
        lr: f64,
    },
    /// `sum += g^2; w -= lr * g / (sqrt(sum) + eps)`. State: `sum` (rows, dim).
    Adagrad {
        /// Learning rate.
        lr: f64,
        /// Added to the root.
        eps: f64,
        /// Weight decay.
        decay: WeightDecay,
    },
    /// `sum += mean(g^2); m = lr / (sqrt(sum / moment_scale) + eps); w -= m * g`. With l2 the
    /// square is of `g + decay * w` and `w` is scaled by `1 - m * decay`. State: `sum` (rows).
    RowwiseAdagrad {
        /// Learning rate.
        lr: f64,
        /// Added to the root.
        eps: f64,
        /// Weight decay.
        decay: WeightDecay,
        /// Divides the accumulated squares: 1, or the number of groups of 2D parallelism.
        moment_scale: f64,
    },
    /// `w -= lr * (m^ / (sqrt(v^) + eps) + weight_decay * w)`. State: `m`, `v` (rows, dim).
    Adam {
        /// Learning rate.
        lr: f64,
        /// Added to the root.
        eps: f64,
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Decoupled weight decay.
        weight_decay: f64,
    },
    /// Adam whose `v` averages `mean(g^2)`. State: `m` (rows, dim), `v` (rows).
    PartialRowwiseAdam {
        /// Learning rate.
        lr: f64,
        /// Added to the root.
        eps: f64,
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Decoupled weight decay.
        weight_decay: f64,
    },
    /// Adam's direction `d`, scaled by `|w| / |d|` (0 where `|d|` is 0). State as Adam.
    Lamb {
        /// Learning rate.
        lr: f64,
        /// Added to the root.
        eps: f64,
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Decoupled weight decay, part of the direction.
        weight_decay: f64,
    },
    /// Lamb whose `v` averages `mean(g^2)`. State: `m` (rows, dim), `v` (rows).
    PartialRowwiseLamb {
        /// Learning rate.
        lr: f64,
        /// Added to the root.
        eps: f64,
        /// Decay of the first moment.
        beta1: f64,
        /// Decay of the second moment.
        beta2: f64,
        /// Decoupled weight decay, part of the direction.
        weight_decay: f64,
    },
    /// `a = lr * eta * |w| / (|g| + weight_decay * |w|); u = momentum * u + a * (g +
    /// weight_decay * w); w -= u`. State: `u` (rows, dim).
    LarsSgd {
        /// Learning rate.
        lr: f64,
        /// Trust coefficient.
        eta: f64,
        /// Momentum.
        momentum: f64,
        /// Weight decay.
        weight_decay: f64,
    },
    /// Follow the regularised leader: `z += g - (sqrt(n + g^2) - sqrt(n)) / lr * w; n += g^2;
    /// w = 0 where |z| <= l1, else -(z - sign(z) * l1) / ((beta + sqrt(n)) / lr + l2)`. At a
    /// learning rate of 0 row and state stay. State: `n`, `z` (rows, dim).
    Ftrl {
        /// Learning rate (alpha).
        lr: f64,
        /// Smooths the rate of fresh rows.
        beta: f64,
        /// L1 penalty: small weights become 0.
        l1: f64,
        /// L2 penalty.
        l2: f64,
    },
}

/// Numbers a row in a state tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateWidth {
    /// One number a row: shape (rows).
    One,
    /// One number a column: shape (rows, dim).
    Dim,
}

/// A state tensor of an optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateTensor {
    /// Its name in checkpoints, after `tables.T.`.
    pub name: &'static str,
    /// Its numbers a row.
    pub width: StateWidth,
}

impl StateTensor {
    /// float32 numbers a row in a table of `dim` columns.
    #[must_use]
    pub fn columns(self, dim: usize) -> usize {
        match self.width {
            StateWidth::One => 1,
            StateWidth::Dim => dim,
        }
    }
}

const fn per_column(name: &'static str) -> StateTensor {
    StateTensor { name, width: StateWidth::Dim }
}

const fn per_row(name: &'static str) -> StateTensor {
    StateTensor { name, width: StateWidth::One }
}

/// What an optimizer sums over the columns of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowSum {
    /// Nothing: each column moves by itself.
    None,
    /// The square of the gradient: a table cut by columns exchanges the sums over blocks.
    Squares,
    /// Norms of weights and of a direction, which a table cut by columns does not exchange.
    Norms,
}

impl SparseOptimizer {
    /// What it sums over the columns of a row.
    #[must_use]
    pub fn row_sum(&self) -> RowSum {
        match self {
            Self::Sgd { .. } | Self::Adagrad { .. } | Self::Adam { .. } | Self::Ftrl { .. } => {
                RowSum::None
            }
            Self::RowwiseAdagrad { .. } | Self::PartialRowwiseAdam { .. } => RowSum::Squares,
            Self::Lamb { .. } | Self::PartialRowwiseLamb { .. } | Self::LarsSgd { .. } => {
                RowSum::Norms
            }
        }
    }

    /// Its name in configs and manifests.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Sgd { .. } => "sgd",
            Self::Adagrad { .. } => "adagrad",
            Self::RowwiseAdagrad { .. } => "rowwise_adagrad",
            Self::Adam { .. } => "adam",
            Self::PartialRowwiseAdam { .. } => "partial_rowwise_adam",
            Self::Lamb { .. } => "lamb",
            Self::PartialRowwiseLamb { .. } => "partial_rowwise_lamb",
            Self::LarsSgd { .. } => "lars_sgd",
            Self::Ftrl { .. } => "ftrl",
        }
    }

    /// The state that it keeps, in the order in which a row's state plane holds it. All of it
    /// begins at zero.
    #[must_use]
    pub fn state(&self) -> &'static [StateTensor] {
        match self {
            Self::Sgd { .. } => &[],
            Self::Adagrad { .. } => const { &[per_column("sum")] },
            Self::RowwiseAdagrad { .. } => const { &[per_row("sum")] },
            Self::Adam { .. } | Self::Lamb { .. } => const { &[per_column("m"), per_column("v")] },
            Self::PartialRowwiseAdam { .. } | Self::PartialRowwiseLamb { .. } => {
                const { &[per_column("m"), per_row("v")] }
            }
            Self::LarsSgd { .. } => const { &[per_column("u")] },
            Self::Ftrl { .. } => const { &[per_column("n"), per_column("z")] },
        }
    }

    /// float32 numbers of state a row of `dim` columns.
    #[must_use]
    pub fn state_columns(&self, dim: usize) -> usize {
        self.state().iter().map(|tensor| tensor.columns(dim)).sum()
    }

    /// The learning rate, before a step's scale.
    #[must_use]
    pub fn lr(&self) -> f64 {
        match *self {
            Self::Sgd { lr }
            | Self::Adagrad { lr, .. }
            | Self::RowwiseAdagrad { lr, .. }
            | Self::Adam { lr, .. }
            | Self::PartialRowwiseAdam { lr, .. }
            | Self::Lamb { lr, .. }
            | Self::PartialRowwiseLamb { lr, .. }
            | Self::LarsSgd { lr, .. }
            | Self::Ftrl { lr, .. } => lr,
        }
    }

    /// Every hyper-parameter that makes no sense, as text that names it; empty when all do.
    #[must_use]
    pub fn faults(&self) -> Vec<String> {
        let mut faults = Vec::new();
        let mut at_least_0 = |name: &str, value: f64| {
            if !(value >= 0.0 && value.is_finite()) {
                faults.push(format!("{name} is {value}; it must be a number from 0 up"));
            }
        };
        at_least_0("lr", self.lr());
        match *self {
            Self::Sgd { .. } => {}
            Self::Adagrad { eps, decay, .. } | Self::RowwiseAdagrad { eps, decay, .. } => {
                at_least_0("eps", eps);
                if let WeightDecay::L2(decay) | WeightDecay::Decouple(decay) = decay {
                    at_least_0("weight_decay", decay);
                }
            }
            Self::Adam { eps, weight_decay, .. }
            | Self::PartialRowwiseAdam { eps, weight_decay, .. }
            | Self::Lamb { eps, weight_decay, .. }
            | Self::PartialRowwiseLamb { eps, weight_decay, .. } => {
                at_least_0("eps", eps);
                at_least_0("weight_decay", weight_decay);
            }
            Self::LarsSgd { eta, weight_decay, .. } => {
                at_least_0("eta", eta);
                at_least_0("weight_decay", weight_decay);
            }
            Self::Ftrl { beta, l1, l2, .. } => {
                at_least_0("beta", beta);
                at_least_0("l1", l1);
                at_least_0("l2", l2);
            }
        }
        let below_1: &[(&str, f64)] = match *self {
            Self::Adam { beta1, beta2, .. }
            | Self::PartialRowwiseAdam { beta1, beta2, .. }
            | Self::Lamb { beta1, beta2, .. }
            | Self::PartialRowwiseLamb { beta1, beta2, .. } => {
                &[("beta1", beta1), ("beta2", beta2)]
            }
            Self::LarsSgd { momentum, .. } => &[("momentum", momentum)],
            _ => &[],
        };
        for &(name, value) in below_1 {
            if !(0.0..1.0).contains(&value) {
                faults.push(format!("{name} is {value}; it must be from 0 up and below 1"));
            }
        }
        if let Self::RowwiseAdagrad { moment_scale, .. } = *self
            && !(moment_scale > 0.0 && moment_scale.is_finite())
        {
            faults.push(format!("moment_scale is {moment_scale}; it must be above 0"));
        }
        faults
    }
}

/// Clipping of a row's summed gradient before its optimizer sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Clip {
    /// None.
    #[default]
    None,
    /// Each element to `-value..=value`.
    Value(f32),
    /// Each element times a factor: clipping by global norm, the norm being the caller's.
    Scale(f32),
}

/// One training step, the same for all tables.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SparseStep {
    /// Number of the step, from 1. It moves on training steps only.
    pub t: u64,
    /// Multiplies every table's learning rate.
    pub lr_scale: f32,
    /// Clipping.
    pub clip: Clip,
}

impl SparseStep {
    /// Step `t` at the tables' own learning rates, without clipping.
    #[must_use]
    pub fn new(t: u64) -> Self {
        Self { t, lr_scale: 1.0, clip: Clip::None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_tensors_have_the_names_and_widths_of_the_contract() {
        let adam = SparseOptimizer::PartialRowwiseAdam {
            lr: 0.1,
            eps: 1e-8,
            beta1: 0.9,
            beta2: 0.999,
            weight_decay: 0.0,
        };
        let names: Vec<_> = adam.state().iter().map(|s| (s.name, s.columns(5))).collect();
        assert_eq!(names, [("m", 5), ("v", 1)]);
        assert_eq!(adam.state_columns(5), 6);
        assert_eq!(SparseOptimizer::Sgd { lr: 1.0 }.state_columns(5), 0);
    }

    #[test]
    fn every_senseless_hyper_parameter_is_named() {
        let optimizer = SparseOptimizer::Lamb {
            lr: -1.0,
            eps: f64::NAN,
            beta1: 1.0,
            beta2: 0.5,
            weight_decay: f64::INFINITY,
        };
        let faults = optimizer.faults().join("\n");
        for name in ["lr", "eps", "beta1", "weight_decay"] {
            assert!(faults.contains(&format!("{name} is ")), "{name}: {faults}");
        }
        assert!(!faults.contains("beta2"), "{faults}");
        let scale = SparseOptimizer::RowwiseAdagrad {
            lr: 0.1,
            eps: 0.0,
            decay: WeightDecay::Decouple(-0.5),
            moment_scale: 0.0,
        };
        assert_eq!(scale.faults().len(), 2);
    }
}
