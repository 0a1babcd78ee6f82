//! How each optimizer moves one row, on whole groups of columns.
//!
//! A row in work is padded with zeros to groups of 8 columns ([`Lanes`]), so that there is no
//! tail to treat otherwise than the body; every rule leaves padding zero. Multiplies and adds
//! stay apart (Rust never contracts them), and sums over columns go in one fixed order, so every
//! instruction set gives the same bits:
//!
//! ```text
//! block of 32 columns: lane l = x[l] + x[l + 8] + x[l + 16] + x[l + 24]   (l = 0..8, in this order)
//!                      sum = ((0+4) + (2+6)) + ((1+5) + (3+7))           (lanes)
//! row: sum of block 0 + sum of block 1 + ...                             (columns past dim are 0)
//! ```
//! A table cut by columns at multiples of 32 can therefore exchange block sums and get the same
//! total. Formulas: [`SparseOptimizer`], whose constants for a step are formed here in float64
//! and rounded once.

use super::lanes::{LANES, Lanes};
use crate::cuda::Constants;
use crate::{SparseOptimizer, SparseStep, WeightDecay};

/// Groups in a block.
const BLOCK_GROUPS: usize = 4;

/// An optimizer's constants for one step.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Rule {
    Sgd { lr: f32 },
    Adagrad { lr: f32, eps: f32, l2: f32, keep: f32 },
    RowwiseAdagrad { lr: f32, eps: f32, l2: f32, keep: f32, moment_scale: f32 },
    Adam(Adam),
    LarsSgd { rate: f32, momentum: f32, decay: f32 },
    Ftrl { lr: f32, beta: f32, l1: f32, l2: f32 },
    Stay,
}

/// Constants of the Adam and LAMB kinds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adam {
    lr: f32,
    eps: f32,
    beta1: f32,
    fresh1: f32, // 1 - beta1
    beta2: f32,
    fresh2: f32,      // 1 - beta2
    correction1: f32, // 1 - beta1^t
    correction2: f32, // 1 - beta2^t
    decay: f32,
    /// One second moment a row.
    rowwise: bool,
    /// LAMB: the direction is scaled by |w| / |direction|.
    trust: bool,
}

impl Rule {
    /// The constants of `optimizer` at `step`.
    pub(crate) fn new(optimizer: &SparseOptimizer, step: &SparseStep) -> Self {
        let lr = optimizer.lr() * f64::from(step.lr_scale);
        let decay_of = |decay: WeightDecay| match decay {
            WeightDecay::None => (0.0, 1.0),
            WeightDecay::L2(decay) => (decay as f32, 1.0),
            WeightDecay::Decouple(decay) => (0.0, (1.0 - lr * decay) as f32),
        };
        let adam = |eps: f64, beta1: f64, beta2: f64, decay: f64, rowwise, trust| {
            Self::Adam(Adam {
                lr: lr as f32,
                eps: eps as f32,
                beta1: beta1 as f32,
                fresh1: (1.0 - beta1) as f32,
                beta2: beta2 as f32,
                fresh2: (1.0 - beta2) as f32,
                correction1: (1.0 - power(beta1, step.t)) as f32,
                correction2: (1.0 - power(beta2, step.t)) as f32,
                decay: decay as f32,
                rowwise,
                trust,
            })
        };
        match *optimizer {
            SparseOptimizer::Sgd { .. } => Self::Sgd { lr: lr as f32 },
            SparseOptimizer::Adagrad { eps, decay, .. } => {
                let (l2, keep) = decay_of(decay);
                Self::Adagrad { lr: lr as f32, eps: eps as f32, l2, keep }
            }
            SparseOptimizer::RowwiseAdagrad { eps, decay, moment_scale, .. } => {
                let (l2, keep) = decay_of(decay);
                let (lr, eps, moment_scale) = (lr as f32, eps as f32, moment_scale as f32);
                Self::RowwiseAdagrad { lr, eps, l2, keep, moment_scale }
            }
            SparseOptimizer::Adam { eps, beta1, beta2, weight_decay, .. } => {
                adam(eps, beta1, beta2, weight_decay, false, false)
            }
            SparseOptimizer::PartialRowwiseAdam { eps, beta1, beta2, weight_decay, .. } => {
                adam(eps, beta1, beta2, weight_decay, true, false)
            }
            SparseOptimizer::Lamb { eps, beta1, beta2, weight_decay, .. } => {
                adam(eps, beta1, beta2, weight_decay, false, true)
            }
            SparseOptimizer::PartialRowwiseLamb { eps, beta1, beta2, weight_decay, .. } => {
                adam(eps, beta1, beta2, weight_decay, true, true)
            }
            SparseOptimizer::LarsSgd { eta, momentum, weight_decay, .. } => Self::LarsSgd {
                rate: (lr * eta) as f32,
                momentum: momentum as f32,
                decay: weight_decay as f32,
            },
            // Its formula divides by the rate; a rate of 0 moves nothing.
            SparseOptimizer::Ftrl { .. } if lr as f32 == 0.0 => Self::Stay,
            SparseOptimizer::Ftrl { beta, l1, l2, .. } => {
                Self::Ftrl { lr: lr as f32, beta: beta as f32, l1: l1 as f32, l2: l2 as f32 }
            }
        }
    }

    /// The constants as a GPU's kernels take them.
    pub(crate) fn constants(&self) -> Constants {
        let none = Constants::default();
        match *self {
            Self::Sgd { lr } => Constants { lr, ..none },
            Self::Adagrad { lr, eps, l2, keep } => Constants { lr, eps, l2, keep, ..none },
            Self::RowwiseAdagrad { lr, eps, l2, keep, moment_scale } => {
                Constants { lr, eps, l2, keep, moment_scale, ..none }
            }
            Self::Adam(Adam {
                lr,
                eps,
                beta1,
                fresh1,
                beta2,
                fresh2,
                correction1,
                correction2,
                decay,
                ..
            }) => Constants {
                lr,
                eps,
                beta1,
                fresh1,
                beta2,
                fresh2,
                correction1,
                correction2,
                decay,
                ..none
            },
            Self::LarsSgd { rate, momentum, decay } => {
                Constants { lr: rate, momentum, decay, ..none }
            }
            Self::Ftrl { lr, beta, l1, l2 } => Constants { lr, beta, l1, l2, ..none },
            Self::Stay => none,
        }
    }

    /// The kernel of a GPU that moves rows by it.
    pub(crate) fn kernel(&self) -> &'static str {
        match self {
            Self::Sgd { .. } => "update_sgd",
            Self::Adagrad { .. } => "update_adagrad",
            Self::RowwiseAdagrad { .. } => "update_rowwise_adagrad",
            Self::Adam(Adam { rowwise: false, trust: false, .. }) => "update_adam",
            Self::Adam(Adam { rowwise: true, trust: false, .. }) => "update_partial_rowwise_adam",
            Self::Adam(Adam { rowwise: false, trust: true, .. }) => "update_lamb",
            Self::Adam(Adam { rowwise: true, trust: true, .. }) => "update_partial_rowwise_lamb",
            Self::LarsSgd { .. } => "update_lars_sgd",
            Self::Ftrl { .. } => "update_ftrl",
            Self::Stay => "update_stay",
        }
    }

    /// The factor of the weights in what the rule sums squares of.
    pub(crate) fn l2(&self) -> f32 {
        match *self {
            Self::RowwiseAdagrad { l2, .. } => l2,
            _ => 0.0,
        }
    }

    /// Whether a gradient that is not finite leaves a number that is not finite in weights or
    /// state. Each formula carries it there; only a rule that moves nothing does not.
    #[inline(always)]
    pub(crate) fn carries_nonfinite(&self) -> bool {
        !matches!(self, Self::Stay)
    }

    /// Moves one row: gradient `g` (which it may overwrite), weights `w`, and its state tensors
    /// `a` and `b` in their order (one number: the first of the first group). `dim` is the whole
    /// table's, and `squares` the sum of squares over all its columns where these are not all
    /// of them.
    #[inline(always)]
    pub(crate) fn apply(
        &self,
        dim: usize,
        squares: Option<f32>,
        g: &mut [Lanes],
        w: &mut [Lanes],
        a: &mut [Lanes],
        b: &mut [Lanes],
    ) {
        let splat = Lanes::splat;
        match *self {
            Self::Sgd { lr } => {
                let lr = splat(lr);
                for (w, &mut g) in w.iter_mut().zip(g) {
                    *w = *w - lr * g;
                }
            }
            Self::Adagrad { lr, eps, l2, keep } => {
                let (lr, eps, l2, keep) = (splat(lr), splat(eps), splat(l2), splat(keep));
                for ((w, &mut g), sum) in w.iter_mut().zip(g).zip(a) {
                    let g = g + l2 * *w;
                    *sum = *sum + g * g;
                    *w = *w * keep - (lr * g).over(sum.sqrt() + eps);
                }
            }
            Self::RowwiseAdagrad { lr, eps, l2, keep, moment_scale } => {
                let squares = match squares {
                    Some(squares) => squares,
                    None if l2 == 0.0 => sum_squares(g),
                    None => sum_squares_l2(g, w, l2),
                };
                let sum = first(a) + squares / dim as f32;
                set_first(a, sum);
                let m = quotient(lr, (sum / moment_scale).sqrt() + eps);
                let keep = if l2 == 0.0 { keep } else { 1.0 - m * l2 };
                let (m, keep) = (splat(m), splat(keep));
                for (w, &mut g) in w.iter_mut().zip(g) {
                    *w = keep * *w - m * g;
                }
            }
            Self::Adam(adam) => adam.apply(dim, squares, g, w, a, b),
            Self::LarsSgd { rate, momentum, decay } => {
                let (norm_w, norm_g) = (sum_squares(w).sqrt(), sum_squares(g).sqrt());
                let rate = splat(quotient(rate * norm_w, norm_g + decay * norm_w));
                let (momentum, decay) = (splat(momentum), splat(decay));
                for ((w, &mut g), u) in w.iter_mut().zip(g).zip(a) {
                    *u = momentum * *u + rate * (g + decay * *w);
                    *w = *w - *u;
                }
            }
            Self::Ftrl { lr, beta, l1, l2 } => {
                let (lr, beta, l1, l2) = (splat(lr), splat(beta), splat(l1), splat(l2));
                for (((w, &mut g), n), z) in w.iter_mut().zip(g).zip(a).zip(b) {
                    let (square, old) = (g * g, *n);
                    *n = old + square;
                    let root = n.sqrt();
                    // (new root - old root) without cancelling: their squares differ by g^2.
                    let sigma = square.over(root + old.sqrt()) / lr;
                    *z = *z + (g - sigma * *w);
                    let minus_z = Lanes::zero() - *z;
                    // sign(z) * l1 - z, wherever |z| is above l1.
                    let under = minus_z - l1.min(minus_z).max(Lanes::zero() - l1);
                    let moved = under.over((beta + root) / lr + l2);
                    *w = moved.above(z.max(minus_z), l1);
                }
            }
            Self::Stay => {}
        }
    }
}

impl Adam {
    #[inline(always)]
    fn apply(
        &self,
        dim: usize,
        squares: Option<f32>,
        g: &mut [Lanes],
        w: &mut [Lanes],
        m: &mut [Lanes],
        v: &mut [Lanes],
    ) {
        let splat = Lanes::splat;
        let (lr, eps, decay) = (splat(self.lr), splat(self.eps), splat(self.decay));
        let (beta1, fresh1) = (splat(self.beta1), splat(self.fresh1));
        let correction1 = splat(self.correction1);
        // g becomes the direction.
        if self.rowwise {
            let mean = squares.unwrap_or_else(|| sum_squares(g)) / dim as f32;
            let second = self.beta2 * first(v) + self.fresh2 * mean;
            set_first(v, second);
            let root = splat((second / self.correction2).sqrt() + self.eps);
            for ((g, &w), m) in g.iter_mut().zip(&*w).zip(m) {
                *m = beta1 * *m + fresh1 * *g;
                *g = (*m / correction1).over(root) + decay * w;
            }
        } else {
            let (beta2, fresh2) = (splat(self.beta2), splat(self.fresh2));
            let correction2 = splat(self.correction2);
            for (((g, &w), m), v) in g.iter_mut().zip(&*w).zip(m).zip(v) {
                *m = beta1 * *m + fresh1 * *g;
                *v = beta2 * *v + fresh2 * (*g * *g);
                let root = (*v / correction2).sqrt() + eps;
                *g = (*m / correction1).over(root) + decay * w;
            }
        }
        let ratio = if self.trust {
            splat(quotient(sum_squares(w).sqrt(), sum_squares(g).sqrt()))
        } else {
            splat(1.0)
        };
        for (w, &mut g) in w.iter_mut().zip(g) {
            *w = *w - lr * (g * ratio);
        }
    }
}

/// The number of a state tensor that has one a row.
#[inline(always)]
fn first(tensor: &[Lanes]) -> f32 {
    tensor[0].to_array()[0]
}

/// Sets that number.
#[inline(always)]
fn set_first(tensor: &mut [Lanes], x: f32) {
    let mut columns = [0.0; LANES];
    columns[0] = x;
    tensor[0] = Lanes::from_array(columns);
}

/// `a / b`, or 0 where `b` is 0.
#[inline(always)]
fn quotient(a: f32, b: f32) -> f32 {
    if b == 0.0 { 0.0 } else { a / b }
}

/// `base^exponent` by squaring: the same on every machine.
fn power(base: f64, mut exponent: u64) -> f64 {
    let (mut result, mut square) = (1.0, base);
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= square;
        }
        square *= square;
        exponent >>= 1;
    }
    result
}

/// Sum over the columns of a group in the module's order.
#[inline(always)]
fn sum_lanes(lanes: Lanes) -> f32 {
    let [a, b, c, d, e, f, g, h] = lanes.to_array();
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

/// Sum of `x^2` over the columns of a row in the module's order.
#[inline(always)]
fn sum_squares(row: &[Lanes]) -> f32 {
    let mut total = 0.0;
    for block in row.chunks(BLOCK_GROUPS) {
        let mut sums = Lanes::zero();
        for &x in block {
            sums = sums + x * x;
        }
        total += sum_lanes(sums);
    }
    total
}

/// Sum of `(g + l2 * w)^2`, in the same order.
#[inline(always)]
fn sum_squares_l2(g: &[Lanes], w: &[Lanes], l2: f32) -> f32 {
    let l2 = Lanes::splat(l2);
    let mut total = 0.0;
    for (g, w) in g.chunks(BLOCK_GROUPS).zip(w.chunks(BLOCK_GROUPS)) {
        let mut sums = Lanes::zero();
        for (&g, &w) in g.iter().zip(w) {
            let x = g + l2 * w;
            sums = sums + x * x;
        }
        total += sum_lanes(sums);
    }
    total
}

/// The sums of `(g + l2 * w)^2` over each block, in the module's order.
#[inline(always)]
pub(crate) fn block_squares(g: &[Lanes], w: &[Lanes], l2: f32, sums: &mut [f32]) {
    let blocks = g.chunks(BLOCK_GROUPS).zip(w.chunks(BLOCK_GROUPS));
    for (sum, (g, w)) in sums.iter_mut().zip(blocks) {
        *sum = if l2 == 0.0 { sum_squares(g) } else { sum_squares_l2(g, w, l2) };
    }
}

/// Sum of `x^2` in float64, in the same order.
#[inline(always)]
pub(crate) fn sum_squares_f64(row: &[Lanes]) -> f64 {
    let mut total = 0.0;
    for block in row.chunks(BLOCK_GROUPS) {
        let mut sums = [0.0f64; LANES];
        for x in block {
            for (sum, x) in sums.iter_mut().zip(x.to_array()) {
                *sum += f64::from(x) * f64::from(x);
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        total += ((a + e) + (c + g)) + ((b + f) + (d + h));
    }
    total
}

/// Whether all numbers are finite. A finite sum proves it with one addition a number; when finite
/// numbers overflow in their sum, a closer look decides: `0 * x` is 0 for those, NaN for others.
#[inline(always)]
pub(crate) fn all_finite(row: &[Lanes]) -> bool {
    let mut sums = Lanes::zero();
    for &x in row {
        sums = sums + x;
    }
    let zero = Lanes::zero();
    if (sums * zero).to_array() == [0.0; LANES] {
        return true;
    }
    row.iter().all(|&x| (x * zero).to_array() == [0.0; LANES])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn powers_are_those_of_repeated_multiplication() {
        assert_eq!(power(0.5, 10), 1.0 / 1024.0);
        assert_eq!(power(0.9, 1), 0.9);
        assert_eq!(power(0.0, 3), 0.0);
        assert_eq!(power(0.999, 1 << 40), 0.0);
        let repeated = (0..1000).fold(1.0, |product, _| product * 0.999);
        assert!((power(0.999, 1000) / repeated - 1.0).abs() < 1e-12);
    }

    #[test]
    fn sums_follow_the_order_that_the_module_states() {
        // One number of each column's size makes any other order visible.
        let x: Vec<f32> = (0..72).map(|i| (1.7f32).powi(i % 13 - 6) * (i as f32 + 0.3)).collect();
        let row: Vec<Lanes> =
            x.as_chunks::<LANES>().0.iter().map(|&columns| Lanes::from_array(columns)).collect();
        let mut expected = 0.0f32;
        for block in x.chunks(32) {
            let at = |i: usize| block.get(i).map_or(0.0, |x| x * x);
            let lane = |l: usize| ((at(l) + at(l + 8)) + at(l + 16)) + at(l + 24);
            expected += ((lane(0) + lane(4)) + (lane(2) + lane(6)))
                + ((lane(1) + lane(5)) + (lane(3) + lane(7)));
        }
        assert_eq!(sum_squares(&row).to_bits(), expected.to_bits());
        let exact: f64 = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        assert!((sum_squares_f64(&row) - exact).abs() <= 1e-13 * exact);
    }

    #[test]
    fn one_number_that_is_not_finite_is_seen_anywhere() {
        for at in [0, 7, 8, 23] {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut row = [Lanes::splat(-f32::MAX); 3];
                assert!(all_finite(&row));
                let mut columns = row[at / LANES].to_array();
                columns[at % LANES] = bad;
                row[at / LANES] = Lanes::from_array(columns);
                assert!(!all_finite(&row), "{bad} at {at}");
            }
        }
        assert!(all_finite(&[]));
    }
}
