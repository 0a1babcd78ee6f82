//! Dense optimizers: their settings, and the constants of one step.

use crate::spec::Fault;

/// A dense optimizer with its settings. `t` is the step number, g the clipped gradient.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DenseOptimizer {
    /// `p -= lr g`.
    Sgd {
        /// Learning rate before the schedule.
        lr: f64,
    },
    /// `sum += g^2; p -= lr g / (sqrt(sum) + eps)`.
    Adagrad {
        /// Learning rate before the schedule.
        lr: f64,
        /// Added to the root; at least 0.
        eps: f64,
    },
    /// `m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2;`
    /// `p -= lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)`.
    Adam {
        /// Learning rate before the schedule.
        lr: f64,
        /// Added to the root; at least 0.
        eps: f64,
        /// Decay of the first moment, in 0..1.
        beta1: f64,
        /// Decay of the second moment, in 0..1.
        beta2: f64,
    },
}

impl DenseOptimizer {
    /// Checks everything.
    ///
    /// Errors: every fault at once, each with its key.
    pub fn validate(&self) -> Result<(), Vec<Fault>> {
        let mut faults = Vec::new();
        let mut check = |key, value: f64, good: bool, rule: &str| {
            if !good {
                faults.push(Fault::new(key, format!("{value} must be {rule}")));
            }
        };
        let at_least_0 = |x: f64| x >= 0.0 && x.is_finite();
        let lr = self.lr();
        check("lr", lr, at_least_0(lr), "a number of at least 0");
        if let Self::Adagrad { eps, .. } | Self::Adam { eps, .. } = *self {
            check("eps", eps, at_least_0(eps), "a number of at least 0");
        }
        if let Self::Adam { beta1, beta2, .. } = *self {
            check("beta1", beta1, (0.0..1.0).contains(&beta1), "at least 0 and below 1");
            check("beta2", beta2, (0.0..1.0).contains(&beta2), "at least 0 and below 1");
        }
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    /// Learning rate before the schedule.
    #[must_use]
    pub fn lr(&self) -> f64 {
        match *self {
            Self::Sgd { lr } | Self::Adagrad { lr, .. } | Self::Adam { lr, .. } => lr,
        }
    }

    /// Names of the states kept for each parameter, all of the parameter's shape.
    #[must_use]
    pub fn state_names(&self) -> &'static [&'static str] {
        match self {
            Self::Sgd { .. } => &[],
            Self::Adagrad { .. } => &["sum"],
            Self::Adam { .. } => &["m", "v"],
        }
    }

    /// The constants of step `t`, computed in f64 and rounded once.
    #[must_use]
    pub fn rule(&self, t: u64) -> Rule {
        match *self {
            Self::Sgd { .. } => Rule::Sgd,
            Self::Adagrad { eps, .. } => Rule::Adagrad { eps: eps as f32 },
            Self::Adam { eps, beta1, beta2, .. } => Rule::Adam(AdamRule {
                eps: eps as f32,
                beta1: beta1 as f32,
                rest1: (1.0 - beta1) as f32,
                correction1: (1.0 - power(beta1, t)) as f32,
                beta2: beta2 as f32,
                rest2: (1.0 - beta2) as f32,
                correction2: (1.0 - power(beta2, t)) as f32,
            }),
        }
    }
}

/// `base^exponent` by squaring: the same bits on every machine.
fn power(base: f64, exponent: u64) -> f64 {
    let (mut result, mut square, mut left) = (1.0, base, exponent);
    while left > 0 {
        if left & 1 == 1 {
            result *= square;
        }
        square *= square;
        left >>= 1;
    }
    result
}

/// What is done to gradients before an update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Clip {
    /// Nothing.
    None,
    /// Each element is held within plus and minus this.
    Value(f32),
    /// Each element is multiplied by this (the caller's global norm).
    Scale(f32),
}

/// One update.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DenseStep {
    /// Number of the step, from 1. The caller keeps it: one counter for the whole model.
    pub t: u64,
    /// Learning rate, schedule applied.
    pub lr: f32,
    /// What is done to the gradients first.
    pub clip: Clip,
}

/// A [`DenseOptimizer`] at one step, for kernels. A quotient whose denominator is 0 counts as 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Rule {
    /// See [`DenseOptimizer::Sgd`].
    Sgd,
    /// See [`DenseOptimizer::Adagrad`].
    Adagrad {
        /// Added to the root.
        eps: f32,
    },
    /// See [`DenseOptimizer::Adam`].
    Adam(AdamRule),
}

/// Constants of an Adam step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdamRule {
    /// Added to the root.
    pub eps: f32,
    /// b1.
    pub beta1: f32,
    /// 1 - b1.
    pub rest1: f32,
    /// 1 - b1^t.
    pub correction1: f32,
    /// b2.
    pub beta2: f32,
    /// 1 - b2.
    pub rest2: f32,
    /// 1 - b2^t.
    pub correction2: f32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_right_at_the_edges() {
        assert_eq!(power(0.9, 0), 1.0);
        assert_eq!(power(0.9, 1), 0.9);
        assert!((power(0.999, 1000) - 0.999f64.powi(1000)).abs() < 1e-14);
        assert_eq!(power(0.999, u64::MAX), 0.0);
        assert_eq!(power(0.0, 3), 0.0);
    }

    #[test]
    fn every_fault_is_listed() {
        DenseOptimizer::Sgd { lr: 0.0 }.validate().unwrap();
        let bad = DenseOptimizer::Adam { lr: f64::NAN, eps: -1.0, beta1: 1.0, beta2: -0.1 };
        let keys: Vec<_> = bad.validate().unwrap_err().into_iter().map(|f| f.key).collect();
        assert_eq!(keys, ["lr", "eps", "beta1", "beta2"]);
    }
}
