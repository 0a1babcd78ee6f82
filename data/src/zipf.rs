//! Which rows synthetic data looks up: ranks by a bounded Zipf law, scattered over the rows.

use crate::hash::{Words, splitmix64};

/// Ranks `0..n` with probability proportional to `(rank + 1)^-alpha`, in constant time.
///
/// Rejection-inversion: a rank is the rounded inverse of the integral of `x^-alpha`, and is taken
/// if it lies under the histogram (Hörmann, Derflinger, "Rejection-inversion to generate variates
/// from monotone discrete distributions", 1996).
pub(crate) struct Zipf {
    n: u64,
    alpha: f64,
    /// Integral up to half a step past the first bar, less that bar's height.
    low: f64,
    /// Integral up to half a step past the last bar.
    high: f64,
    /// Distance below its rank at which a point is surely under the histogram.
    sure: f64,
}

impl Zipf {
    /// The law of `n > 0` ranks; `alpha` is 0 or above.
    pub(crate) fn new(n: u64, alpha: f64) -> Self {
        let mut zipf = Self { n, alpha, low: 0.0, high: 0.0, sure: 0.0 };
        zipf.low = zipf.integral(1.5) - 1.0;
        zipf.high = zipf.integral(n as f64 + 0.5);
        zipf.sure = 2.0 - zipf.inverse(zipf.integral(2.5) - zipf.bar(2.0));
        zipf
    }

    /// The next rank.
    pub(crate) fn draw(&self, words: &mut Words) -> u64 {
        if self.alpha == 0.0 {
            return words.below(self.n);
        }
        loop {
            let u = self.high + words.unit() * (self.low - self.high);
            let x = self.inverse(u);
            let rank = (x.round() as u64).clamp(1, self.n);
            let k = rank as f64;
            if k - x <= self.sure || u >= self.integral(k + 0.5) - self.bar(k) {
                return rank - 1;
            }
        }
    }

    fn bar(&self, x: f64) -> f64 {
        (-self.alpha * x.ln()).exp()
    }

    /// `(x^(1 - alpha) - 1) / (1 - alpha)`, which is `ln x` at alpha 1.
    fn integral(&self, x: f64) -> f64 {
        let log = x.ln();
        let t = (1.0 - self.alpha) * log;
        // (e^t - 1) / t tends to 1.
        if t.abs() < 1e-12 { log } else { t.exp_m1() / t * log }
    }

    /// The inverse of [`Zipf::integral`].
    fn inverse(&self, y: f64) -> f64 {
        let t = ((1.0 - self.alpha) * y).max(-1.0);
        // ln(1 + t) / t tends to 1.
        if t.abs() < 1e-12 { y.exp() } else { (t.ln_1p() / t * y).exp() }
    }
}

/// The bijection `rank -> (rank * step + shift) mod rows`, `step` prime to `rows`.
pub(crate) struct Scatter {
    rows: u64,
    step: u64,
    shift: u64,
}

impl Scatter {
    /// A bijection of `rows > 0` rows, shifted by `key`.
    pub(crate) fn new(rows: u64, key: u64) -> Self {
        // Close to the golden section of the rows, so that neighbouring ranks land far apart.
        let mut step = ((rows as f64 * 0.618_033_988_749_895) as u64).max(1);
        while gcd(step, rows) != 1 {
            step += 1;
        }
        Self { rows, step, shift: splitmix64(key) % rows }
    }

    /// The row of a rank.
    pub(crate) fn row(&self, rank: u64) -> u64 {
        let place = u128::from(rank) * u128::from(self.step) + u128::from(self.shift);
        (place % u128::from(self.rows)) as u64
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_the_law_they_are_asked_for() {
        for alpha in [0.0, 0.5, 1.0, 1.05, 2.0] {
            let (n, draws) = (50u64, 200_000);
            let zipf = Zipf::new(n, alpha);
            let mut words = Words::new(9);
            let mut counts = vec![0u32; n as usize];
            for _ in 0..draws {
                counts[zipf.draw(&mut words) as usize] += 1;
            }
            let weights: Vec<f64> = (1..=n).map(|r| (r as f64).powf(-alpha)).collect();
            let total: f64 = weights.iter().sum();
            let chi: f64 = weights
                .iter()
                .zip(&counts)
                .map(|(w, &c)| {
                    let expected = w / total * f64::from(draws);
                    (f64::from(c) - expected).powi(2) / expected
                })
                .sum();
            // 49 degrees of freedom: mean 49, standard deviation 10.
            assert!(chi < 99.0, "alpha {alpha}: chi squared {chi}");
        }
    }

    #[test]
    fn one_row_and_very_many_rows_can_be_drawn() {
        let mut words = Words::new(1);
        for alpha in [0.0, 1.0, 1.2, 20.0] {
            assert_eq!(Zipf::new(1, alpha).draw(&mut words), 0);
            let n = i64::MAX as u64;
            let scatter = Scatter::new(n, 3);
            for _ in 0..100 {
                assert!(scatter.row(Zipf::new(n, alpha).draw(&mut words)) < n);
            }
        }
    }

    #[test]
    fn scattering_reaches_every_row_once() {
        for rows in [1, 2, 3, 6, 60, 97, 1000] {
            let scatter = Scatter::new(rows, 7);
            let mut seen: Vec<u64> = (0..rows).map(|rank| scatter.row(rank)).collect();
            seen.sort_unstable();
            assert_eq!(seen, (0..rows).collect::<Vec<_>>());
        }
    }
}
