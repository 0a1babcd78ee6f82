//! Learning-rate schedules: a factor for each step, in f64.

use crate::spec::Fault;

/// How the learning rate falls from `decay_start` on; p runs from 0 to 1 over `decay_steps`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Decay {
    /// Not at all.
    Constant,
    /// `1 - (1 - end) p`.
    Linear,
    /// `end + (1 - end) (1 + cos(pi p)) / 2`.
    Cosine,
    /// `end + (1 - end) (1 - p)^power` (MLPerf's DLRM: power 2).
    Poly {
        /// Exponent, above 0.
        power: f64,
    },
}

/// A learning-rate schedule: linear warm-up from 0, level, then a decay.
///
/// ```text
/// factor(t) = t / warmup_steps                       t < warmup_steps
///             1                                      until t = decay_start
///             decay(p), p = (t - decay_start) / decay_steps, at most 1
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Steps until the full rate; 0 for no warm-up.
    pub warmup_steps: u64,
    /// Shape of the decay.
    pub decay: Decay,
    /// Last step at the full rate.
    pub decay_start: u64,
    /// Steps from the full rate to the end.
    pub decay_steps: u64,
    /// Factor at the end and after, in 0..=1.
    pub end_ratio: f64,
}

impl Schedule {
    /// The full rate at every step.
    pub const CONSTANT: Self = Self {
        warmup_steps: 0,
        decay: Decay::Constant,
        decay_start: 0,
        decay_steps: 0,
        end_ratio: 0.0,
    };

    /// Checks everything.
    ///
    /// Errors: every fault at once, each with its key.
    pub fn validate(&self) -> Result<(), Vec<Fault>> {
        let mut faults = Vec::new();
        if !(0.0..=1.0).contains(&self.end_ratio) {
            let message = format!("{} is not within 0 and 1", self.end_ratio);
            faults.push(Fault::new("end_ratio", message));
        }
        if self.decay != Decay::Constant {
            if self.decay_steps == 0 {
                faults.push(Fault::new("decay_steps", "must be at least 1 for a decay"));
            }
            if self.decay_start < self.warmup_steps {
                let message = format!(
                    "{} lies within the {} steps of warm-up",
                    self.decay_start, self.warmup_steps
                );
                faults.push(Fault::new("decay_start", message));
            }
        }
        if let Decay::Poly { power } = self.decay
            && !(power > 0.0 && power.is_finite())
        {
            faults.push(Fault::new("power", format!("{power} must be a number above 0")));
        }
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    /// What to multiply the learning rate by at step `t`, which counts from 1.
    #[must_use]
    pub fn factor(&self, t: u64) -> f64 {
        if t < self.warmup_steps {
            return t as f64 / self.warmup_steps as f64;
        }
        if self.decay == Decay::Constant || t <= self.decay_start {
            return 1.0;
        }
        let p = ((t - self.decay_start) as f64 / self.decay_steps as f64).min(1.0);
        let left = match self.decay {
            Decay::Constant => 1.0,
            Decay::Linear => 1.0 - p,
            Decay::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * p).cos()),
            Decay::Poly { power } => (1.0 - p).powf(power),
        };
        self.end_ratio + (1.0 - self.end_ratio) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn falling(decay: Decay) -> Schedule {
        Schedule { warmup_steps: 4, decay, decay_start: 10, decay_steps: 8, end_ratio: 0.25 }
    }

    #[test]
    fn warm_up_is_linear_from_zero_and_reaches_one_at_its_last_step() {
        let schedule = falling(Decay::Linear);
        assert_eq!([1, 2, 3, 4, 5].map(|t| schedule.factor(t)), [0.25, 0.5, 0.75, 1.0, 1.0]);
        assert_eq!(Schedule { warmup_steps: 0, ..schedule }.factor(1), 1.0);
        assert_eq!(Schedule { warmup_steps: 1, ..schedule }.factor(1), 1.0);
    }

    #[test]
    fn each_decay_starts_at_one_and_ends_at_the_ratio_for_good() {
        let poly = Decay::Poly { power: 2.0 };
        for (decay, half) in [
            (Decay::Linear, 0.25 + 0.75 * 0.5),
            (Decay::Cosine, 0.25 + 0.75 * 0.5),
            (poly, 0.25 + 0.75 * 0.25),
        ] {
            let schedule = falling(decay);
            schedule.validate().unwrap();
            assert_eq!(schedule.factor(10), 1.0, "{decay:?}");
            assert!(schedule.factor(11) < 1.0, "{decay:?}");
            assert!((schedule.factor(14) - half).abs() < 1e-15, "{decay:?}");
            for t in [18, 19, 1000, u64::MAX] {
                assert_eq!(schedule.factor(t), 0.25, "{decay:?}");
            }
        }
        assert_eq!(Schedule::CONSTANT.factor(1), 1.0);
        assert_eq!(falling(Decay::Constant).factor(1000), 1.0);
    }

    #[test]
    fn every_fault_is_listed() {
        Schedule::CONSTANT.validate().unwrap();
        let bad = Schedule {
            warmup_steps: 5,
            decay: Decay::Poly { power: -1.0 },
            decay_start: 4,
            decay_steps: 0,
            end_ratio: 1.5,
        };
        let keys: Vec<_> = bad.validate().unwrap_err().into_iter().map(|f| f.key).collect();
        assert_eq!(keys, ["end_ratio", "decay_steps", "decay_start", "power"]);
    }
}
