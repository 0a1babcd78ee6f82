//! Losses of single samples, in f64 from the f32 logit.

use crate::spec::Loss;

/// Loss and its derivative by the logit.
pub fn sample(loss: Loss, logit: f32, label: f32) -> (f64, f64) {
    let (z, y) = (f64::from(logit), f64::from(label));
    // exp(-|z|) never overflows.
    let small = (-z.abs()).exp();
    let p = if z >= 0.0 { 1.0 / (1.0 + small) } else { small / (1.0 + small) };
    match loss {
        Loss::Bce => (z.max(0.0) - z * y + small.ln_1p(), p - y),
        Loss::Mse => ((p - y) * (p - y), 2.0 * (p - y) * p * (1.0 - p)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_values() {
        let ln2 = std::f64::consts::LN_2;
        assert_eq!(sample(Loss::Bce, 0.0, 1.0), (ln2, -0.5));
        assert_eq!(sample(Loss::Mse, 0.0, 1.0), (0.25, -0.25));
        let (loss, slope) = sample(Loss::Bce, 2.0, 0.25);
        let p = 1.0 / (1.0 + (-2.0f64).exp());
        assert!((loss - -(0.25 * p.ln() + 0.75 * (1.0 - p).ln())).abs() < 1e-15);
        assert!((slope - (p - 0.25)).abs() < 1e-15);
    }

    #[test]
    fn extreme_logits_stay_finite_and_nan_stays_nan() {
        assert_eq!(sample(Loss::Bce, 1000.0, 0.0), (1000.0, 1.0));
        assert_eq!(sample(Loss::Bce, -1000.0, 1.0), (1000.0, -1.0));
        assert_eq!(sample(Loss::Bce, -1000.0, 0.0), (0.0, 0.0));
        assert_eq!(sample(Loss::Mse, f32::MAX, 1.0).1, 0.0);
        for loss in [Loss::Bce, Loss::Mse] {
            let (value, slope) = sample(loss, f32::NAN, 1.0);
            assert!(value.is_nan() && slope.is_nan());
        }
    }
}
