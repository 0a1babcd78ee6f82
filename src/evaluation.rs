//! Quality of predictions over a whole set: AUC, log loss, normalised entropy, calibration.
//!
//! All sums are in float64, in the order of the samples. A figure that is not defined on a set
//! (the AUC of one class, the entropy of a base rate of 0) is absent, never a stand-in number.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::config::StopMetric;
use crate::ranking::Ranking;

/// Figures of an evaluation.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// Samples evaluated.
    pub samples: u64,
    /// Area under the ROC curve, ties half; absent when a class is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc: Option<f64>,
    /// Largest error of `auc`; absent when it is exact.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auc_error_max: Option<f64>,
    /// AUC within each group that has both classes, averaged over those groups.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub grouped_auc: Option<f64>,
    /// Mean log loss in nats; absent without samples.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logloss: Option<f64>,
    /// Log loss over the entropy of the base rate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ne: Option<f64>,
    /// Sum of predictions over sum of labels.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calibration: Option<f64>,
    /// Mean squared error of the predictions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mse: Option<f64>,
}

impl Evaluation {
    /// The figure that `metric` names.
    #[must_use]
    pub fn get(&self, metric: StopMetric) -> Option<f64> {
        match metric {
            StopMetric::Auc => self.auc,
            StopMetric::Logloss => self.logloss,
            StopMetric::Ne => self.ne,
            StopMetric::GroupedAuc => self.grouped_auc,
        }
    }
}

impl fmt::Display for Evaluation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} samples", self.samples)?;
        let figures = [
            ("AUC", self.auc),
            ("grouped AUC", self.grouped_auc),
            ("log loss", self.logloss),
            ("NE", self.ne),
            ("calibration", self.calibration),
        ];
        for (name, value) in figures {
            match value {
                Some(value) => write!(f, ", {name} {value:.5}")?,
                None if name == "grouped AUC" => {}
                None => write!(f, ", {name} undefined")?,
            }
        }
        Ok(())
    }
}

/// Collects predictions for an [`Evaluation`].
///
/// Memory is bounded, but for grouped AUC, which keeps 24 bytes a sample.
#[derive(Clone, Debug, Default)]
pub struct Evaluator {
    samples: u64,
    weight: f64,
    labels: f64,
    predictions: f64,
    logloss: f64,
    squares: f64,
    ranking: Ranking,
    grouped: Option<Vec<Grouped>>,
}

#[derive(Clone, Copy, Debug)]
struct Grouped {
    group: i64,
    score: f32,
    label: f32,
    weight: f32,
}

/// Log loss in nats of a logit against a label in [0, 1], without overflow:
/// max(z, 0) - z y + ln(1 + e^-|z|).
#[must_use]
pub fn log_loss(logit: f64, label: f64) -> f64 {
    logit.max(0.0) - logit * label + (-logit.abs()).exp().ln_1p()
}

/// Entropy in nats of a coin with probability `rate`.
fn entropy(rate: f64) -> f64 {
    -(rate * rate.ln() + (1.0 - rate) * (1.0 - rate).ln())
}

/// `log loss / entropy of the base rate`, where both classes occur.
#[must_use]
pub fn normalized_entropy(logloss_mean: f64, rate: f64) -> Option<f64> {
    (rate > 0.0 && rate < 1.0).then(|| logloss_mean / entropy(rate))
}

impl Evaluator {
    /// An empty evaluator; `grouped` asks for the grouped AUC too.
    #[must_use]
    pub fn new(grouped: bool) -> Self {
        Self { grouped: grouped.then(Vec::new), ..Self::default() }
    }

    /// Adds a batch. `weights` and `groups` are one value a sample where they are given.
    pub fn add(
        &mut self,
        logits: &[f32],
        labels: &[f32],
        weights: Option<&[f32]>,
        groups: Option<&[i64]>,
    ) {
        for (i, (&logit, &label)) in logits.iter().zip(labels).enumerate() {
            let weight = weights.map_or(1.0, |weights| weights[i]);
            let (z, y, w) = (f64::from(logit), f64::from(label), f64::from(weight));
            let p = 1.0 / (1.0 + (-z).exp());
            self.samples += 1;
            self.weight += w;
            self.labels += w * y;
            self.predictions += w * p;
            self.logloss += w * log_loss(z, y);
            self.squares += w * (p - y) * (p - y);
            self.ranking.add(logit, y, w);
            if let (Some(grouped), Some(groups)) = (&mut self.grouped, groups) {
                grouped.push(Grouped { group: groups[i], score: logit, label, weight });
            }
        }
    }

    /// The figures over everything added.
    #[must_use]
    pub fn finish(self) -> Evaluation {
        let mean = |sum: f64| (self.weight > 0.0).then(|| sum / self.weight);
        let logloss = mean(self.logloss);
        let auc = self.ranking.auc();
        Evaluation {
            samples: self.samples,
            auc: auc.map(|auc| auc.value),
            auc_error_max: auc.map(|auc| auc.error_max).filter(|&error| error > 0.0),
            grouped_auc: self.grouped.and_then(grouped_auc),
            logloss,
            ne: logloss.and_then(|logloss| normalized_entropy(logloss, self.labels / self.weight)),
            calibration: (self.labels > 0.0).then(|| self.predictions / self.labels),
            mse: mean(self.squares),
        }
    }
}

/// Mean over groups of the AUC inside the group; groups with one class have none and do not count.
fn grouped_auc(mut samples: Vec<Grouped>) -> Option<f64> {
    samples.sort_by_key(|sample| sample.group);
    let (mut sum, mut groups) = (0.0, 0u64);
    for group in samples.chunk_by(|a, b| a.group == b.group) {
        let mut ranking = Ranking::default();
        for sample in group {
            ranking.add(sample.score, f64::from(sample.label), f64::from(sample.weight));
        }
        if let Some(auc) = ranking.auc() {
            sum += auc.value;
            groups += 1;
        }
    }
    (groups > 0).then(|| sum / groups as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn logit(p: f64) -> f32 {
        (p / (1.0 - p)).ln() as f32
    }

    /// Values from TorchRec's metric tests (golden/peers), to their printed digits.
    #[test]
    fn the_peers_values() {
        let Some(shared) = crate::testing::shared() else { return };
        let text =
            std::fs::read_to_string(shared.join("golden/peers/torchrec_metrics_golden.json"))
                .unwrap();
        let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
        let numbers = |value: &serde_json::Value| -> Vec<f64> {
            value.as_array().unwrap().iter().map(|x| x.as_f64().unwrap()).collect()
        };
        let mut tried = 0;
        for case in golden["cases"].as_array().unwrap() {
            let metric = case["metric"].as_str().unwrap();
            // A score of 0 or 1 has no finite logit; their order is all that AUC needs.
            let logits: Vec<f32> = numbers(&case["predictions"])
                .iter()
                .map(|&p| logit(p.clamp(1e-6, 1.0 - 1e-6)))
                .collect();
            let floats =
                |key: &str| -> Vec<f32> { numbers(&case[key]).iter().map(|&x| x as f32).collect() };
            let (labels, weights) = (floats("labels"), floats("weights"));
            let groups: Option<Vec<i64>> = case
                .get("groups")
                .map(|groups| numbers(groups).iter().map(|&x| x as i64).collect());
            let run = |keep: &dyn Fn(usize) -> bool| {
                let mut evaluator = Evaluator::new(groups.is_some());
                for i in (0..labels.len()).filter(|&i| keep(i)) {
                    let group = groups.as_ref().map(|groups| &groups[i..=i]);
                    evaluator.add(&logits[i..=i], &labels[i..=i], Some(&weights[i..=i]), group);
                }
                evaluator.finish()
            };
            let close = |got: Option<f64>, want: &serde_json::Value| {
                let want = want.as_f64().unwrap();
                assert!((got.unwrap() - want).abs() < 6e-5, "{metric}: {got:?} and {want}");
            };
            let all = run(&|_| true);
            let one_class = labels.iter().all(|&y| y == labels[0]);
            match metric {
                // The peer says 0.5 there; we say that there is none.
                "auc" if one_class => assert_eq!(all.auc, None),
                "auc" | "auc_weighted" => close(all.auc, &case["expected"]),
                "auc_grouped_mean_over_groups" => close(all.grouped_auc, &case["expected"]),
                "normalized_entropy" => close(all.ne, &case["expected"]),
                "normalized_entropy_per_group" => {
                    for (group, want) in case["expected"].as_array().unwrap().iter().enumerate() {
                        let groups = groups.as_ref().unwrap();
                        close(run(&|i| groups[i] == group as i64).ne, want);
                    }
                }
                other => panic!("unknown metric {other}"),
            }
            tried += 1;
        }
        assert!(tried >= 8, "{tried} cases");
    }

    #[test]
    fn what_is_not_defined_is_absent() {
        let none = Evaluator::new(true).finish();
        assert_eq!(none, Evaluation::default());
        let mut negatives = Evaluator::new(false);
        negatives.add(&[0.1, -0.2], &[0.0, 0.0], None, None);
        let negatives = negatives.finish();
        assert_eq!((negatives.auc, negatives.ne, negatives.calibration), (None, None, None));
        assert!(negatives.logloss.unwrap() > 0.5);
        assert!(!serde_json::to_string(&negatives).unwrap().contains("auc"));
    }

    #[test]
    fn extreme_logits_do_not_overflow() {
        assert_eq!(log_loss(1000.0, 1.0), 0.0);
        assert_eq!(log_loss(1000.0, 0.0), 1000.0);
        assert_eq!(log_loss(-1000.0, 1.0), 1000.0);
        assert!((log_loss(0.0, 1.0) - 2f64.ln()).abs() < 1e-15);
    }
}
