//! Passes over rows, one row a call: bias and ReLU, gates, the cross layer's products, the
//! optimizer's step and sums of squares.

use tessera_device::simd_kernel;

use crate::optimizer::{AdamRule, Clip};

#[inline(always)]
fn add_bias_body(y: &mut [f32], bias: &[f32]) {
    for (y, b) in y.iter_mut().zip(bias) {
        *y += b;
    }
}

simd_kernel! {
    /// `y += bias`.
    pub fn add_bias = add_bias_body(y: &mut [f32], bias: &[f32])
}

#[inline(always)]
fn add_bias_relu_body(y: &mut [f32], bias: &[f32]) {
    for (y, b) in y.iter_mut().zip(bias) {
        let sum = *y + b;
        // Written so that NaN stays NaN.
        *y = if sum < 0.0 { 0.0 } else { sum };
    }
}

simd_kernel! {
    /// `y = max(0, y + bias)`.
    pub fn add_bias_relu = add_bias_relu_body(y: &mut [f32], bias: &[f32])
}

#[inline(always)]
fn relu_body(y: &mut [f32]) {
    for y in y {
        *y = if *y < 0.0 { 0.0 } else { *y };
    }
}

simd_kernel! {
    /// `y = max(0, y)`.
    pub fn relu = relu_body(y: &mut [f32])
}

#[inline(always)]
fn gate_body(dy: &mut [f32], y: &[f32]) {
    for (dy, y) in dy.iter_mut().zip(y) {
        *dy = if *y <= 0.0 { 0.0 } else { *dy };
    }
}

simd_kernel! {
    /// `dy = 0` where y, a ReLU's output, is 0.
    pub fn gate = gate_body(dy: &mut [f32], y: &[f32])
}

#[inline(always)]
fn cross_body(x0: &[f32], u: &[f32], x: &[f32], y: &mut [f32]) {
    for (((y, x0), u), x) in y.iter_mut().zip(x0).zip(u).zip(x) {
        *y = x0 * u + x;
    }
}

simd_kernel! {
    /// `y = x0 * u + x`.
    pub fn cross = cross_body(x0: &[f32], u: &[f32], x: &[f32], y: &mut [f32])
}

#[inline(always)]
fn cross_grad_body(
    first: bool,
    last: bool,
    dy: &[f32],
    x0: &[f32],
    u: &[f32],
    du: &mut [f32],
    dx0: &mut [f32],
) {
    let inputs = dy.iter().zip(x0).zip(u);
    for ((du, dx0), ((dy, x0), u)) in du.iter_mut().zip(dx0).zip(inputs) {
        *du = dy * x0;
        let before = if last { 0.0 } else { *dx0 };
        let through = if first { *dy } else { 0.0 };
        *dx0 = (before + dy * u) + through;
    }
}

simd_kernel! {
    /// `du = dy * x0`; `dx0 = dy * u`, plus dx0 unless `last`, plus dy if `first`.
    pub fn cross_grad = cross_grad_body(
        first: bool,
        last: bool,
        dy: &[f32],
        x0: &[f32],
        u: &[f32],
        du: &mut [f32],
        dx0: &mut [f32],
    )
}

#[inline(always)]
fn clipped(g: f32, clip: Clip) -> f32 {
    match clip {
        Clip::None => g,
        // Not `clamp`: NaN must not become a number, and neither does it here.
        Clip::Value(limit) => {
            if g > limit {
                limit
            } else if g < -limit {
                -limit
            } else {
                g
            }
        }
        Clip::Scale(scale) => g * scale,
    }
}

/// `a / b`, 0 where b is 0: a zero gradient without eps moves nothing.
#[inline(always)]
fn quotient(a: f32, b: f32) -> f32 {
    if b == 0.0 { 0.0 } else { a / b }
}

#[inline(always)]
fn sgd_body(lr: f32, clip: Clip, g: &[f32], w: &mut [f32]) {
    for (w, g) in w.iter_mut().zip(g) {
        *w -= lr * clipped(*g, clip);
    }
}

simd_kernel! {
    /// See `DenseOptimizer::Sgd`.
    pub fn sgd = sgd_body(lr: f32, clip: Clip, g: &[f32], w: &mut [f32])
}

#[inline(always)]
fn adagrad_body(lr: f32, eps: f32, clip: Clip, g: &[f32], w: &mut [f32], sum: &mut [f32]) {
    for ((w, sum), g) in w.iter_mut().zip(sum).zip(g) {
        let g = clipped(*g, clip);
        *sum += g * g;
        *w -= quotient(lr * g, sum.sqrt() + eps);
    }
}

simd_kernel! {
    /// See `DenseOptimizer::Adagrad`.
    pub fn adagrad = adagrad_body(
        lr: f32,
        eps: f32,
        clip: Clip,
        g: &[f32],
        w: &mut [f32],
        sum: &mut [f32],
    )
}

#[inline(always)]
fn adam_body(
    lr: f32,
    rule: AdamRule,
    clip: Clip,
    g: &[f32],
    w: &mut [f32],
    m: &mut [f32],
    v: &mut [f32],
) {
    let AdamRule { eps, beta1, rest1, correction1, beta2, rest2, correction2 } = rule;
    for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
        let g = clipped(*g, clip);
        *m = beta1 * *m + rest1 * g;
        *v = beta2 * *v + rest2 * (g * g);
        let mean = *m / correction1;
        let root = (*v / correction2).sqrt();
        *w -= quotient(lr * mean, root + eps);
    }
}

simd_kernel! {
    /// See `DenseOptimizer::Adam`.
    pub fn adam = adam_body(
        lr: f32,
        rule: AdamRule,
        clip: Clip,
        g: &[f32],
        w: &mut [f32],
        m: &mut [f32],
        v: &mut [f32],
    )
}

#[inline(always)]
fn sum_of_squares_body(x: &[f32]) -> f64 {
    let mut lanes = [0.0f64; 8];
    let (blocks, rest) = x.as_chunks::<8>();
    for x in blocks {
        for lane in 0..8 {
            let x = f64::from(x[lane]);
            lanes[lane] += x * x;
        }
    }
    for (lane, &x) in rest.iter().enumerate() {
        let x = f64::from(x);
        lanes[lane] += x * x;
    }
    let [a, b, c, d, e, f, g, h] = lanes;
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}

simd_kernel! {
    /// Sum of squares of a block, in the order of `DenseOps::sums_of_squares`.
    pub fn sum_of_squares = sum_of_squares_body(x: &[f32]) -> f64
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_device::Simd;

    #[test]
    fn relu_keeps_nan_and_the_gate_follows_its_output() {
        for simd in Simd::available() {
            let mut y: Vec<f32> = vec![-1.0, 0.0, 2.0, f32::NAN, f32::NEG_INFINITY];
            add_bias_relu(simd, &mut y, &[0.5; 5]);
            assert_eq!(y[..3], [0.0, 0.5, 2.5]);
            assert!(y[3].is_nan());
            assert_eq!(y[4], 0.0);
            let mut dy = vec![1.0; 5];
            gate(simd, &mut dy, &y);
            assert_eq!(dy, [0.0, 1.0, 1.0, 1.0, 0.0]);
        }
    }

    #[test]
    fn a_zero_gradient_without_eps_moves_nothing() {
        for simd in Simd::available() {
            let (mut w, mut sum) = (vec![1.0f32; 9], vec![0.0f32; 9]);
            adagrad(simd, 0.1, 0.0, Clip::None, &[0.0; 9], &mut w, &mut sum);
            assert_eq!(w, [1.0; 9]);
            let rule = AdamRule {
                eps: 0.0,
                beta1: 0.9,
                rest1: 0.1,
                correction1: 0.1,
                beta2: 0.999,
                rest2: 0.001,
                correction2: 0.001,
            };
            let (mut m, mut v) = (vec![0.0f32; 9], vec![0.0f32; 9]);
            adam(simd, 0.1, rule, Clip::None, &[0.0; 9], &mut w, &mut m, &mut v);
            assert_eq!(w, [1.0; 9]);
        }
    }

    #[test]
    fn clipping_holds_values_and_scales() {
        for simd in Simd::available() {
            let g = [3.0, -3.0, 0.25, f32::NAN];
            let mut w = vec![0.0f32; 4];
            sgd(simd, 1.0, Clip::Value(1.0), &g, &mut w);
            assert_eq!(w[..3], [-1.0, 1.0, -0.25]);
            assert!(w[3].is_nan());
            let mut w = vec![0.0f32; 4];
            sgd(simd, 1.0, Clip::Scale(0.5), &g, &mut w);
            assert_eq!(w[..3], [-1.5, 1.5, -0.125]);
        }
    }

    #[test]
    fn sums_of_squares_never_overflow_and_show_what_is_not_finite() {
        for simd in Simd::available() {
            let x: Vec<f32> = (0..21).map(|i| i as f32).collect();
            assert_eq!(sum_of_squares(simd, &x), 2870.0);
            assert!(sum_of_squares(simd, &[f32::MAX; 1000]).is_finite());
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = vec![1.0; 13];
                x[11] = bad;
                assert!(!sum_of_squares(simd, &x).is_finite());
            }
        }
    }
}
