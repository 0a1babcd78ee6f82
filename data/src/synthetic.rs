//! Synthetic data with a teacher: what is drawn, and how good a model of it can be.
//!
//! Sample `k` is a pure function of (seed, k), so any sample is a jump away and two ranges of
//! samples of one seed are two sets of one law. Ids follow a bounded Zipf law over ranks, and a
//! fixed bijection scatters the ranks over the rows, so that the hot rows are not the first ones.
//!
//! ```text
//! linear = sum of effect[f][id] over ids of all bags + sum of c[j] x[j] over dense columns
//! pairs  = sum of u[f] . u[f + 1] over neighbouring features, u[f] = sum of latent[f][id] (4 wide)
//! logit  = bias + strength (sqrt(1 - s) z(linear) + sqrt(s) z(pairs)),  z: to mean 0, variance 1
//! label  = 1 with probability sigmoid(logit)
//! ```
//! Effects and latents are hashes of (seed, feature, id): nothing is stored. The bias is found so
//! that the share of positives is `base_rate`. A linear model can learn the first part only;
//! `s` is the share of the logit's variance that is in the second.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::hash::{Words, key, splitmix64};
use crate::zipf::{Scatter, Zipf};
use crate::{DataError, FeatureSpec, Result, Schema};

/// What dense columns of synthetic data look like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SyntheticDense {
    /// Mean 0, variance 1, bell-shaped between -3.5 and 3.5.
    #[default]
    Normal,
    /// Counts 0, 1, 2, ... with a long tail, for `log1p` and for formats that hold integers.
    Counts,
}

/// What is drawn for format `synthetic`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct SyntheticSpec {
    /// Number of samples.
    pub samples: u64,
    /// Number of the first sample: evaluation data is a range after the training data's.
    pub first_sample: u64,
    /// Seed of samples and teacher.
    pub seed: u64,
    /// Exponent of the Zipf law of ids, 0 (uniform) to 20.
    pub alpha: f64,
    /// Bags have `hots - hots_spread` to `hots + hots_spread` ids, each length as likely.
    pub hots_spread: usize,
    /// What dense columns look like.
    pub dense: SyntheticDense,
    /// Share of positives, between 0 and 1 exclusively.
    pub base_rate: f64,
    /// Standard deviation of the teacher's logit: 0 makes labels pure chance.
    pub strength: f64,
    /// Share of the logit's variance in pairs of features, 0 to 1.
    pub interactions: f64,
}

impl Default for SyntheticSpec {
    fn default() -> Self {
        Self {
            samples: 100_000,
            first_sample: 0,
            seed: 1,
            alpha: 1.05,
            hots_spread: 0,
            dense: SyntheticDense::Normal,
            base_rate: 0.25,
            strength: 1.5,
            interactions: 0.4,
        }
    }
}

impl SyntheticSpec {
    /// The `samples` samples after this range: data of the same law that this range never holds.
    #[must_use]
    pub fn following(&self, samples: u64) -> Self {
        let first_sample = self.first_sample.saturating_add(self.samples);
        Self { samples, first_sample, ..self.clone() }
    }

    /// Checks the settings against the features to draw.
    ///
    /// Errors: [`DataError::Spec`] naming the setting or feature.
    pub fn validate(&self, schema: &Schema) -> Result<()> {
        let fail = |reason: String| Err(DataError::spec(format!("synthetic data: {reason}")));
        if self.first_sample.checked_add(self.samples).is_none() {
            return fail(format!(
                "first_sample {} + samples {} is beyond 2^64",
                self.first_sample, self.samples
            ));
        }
        let limits = [
            ("alpha", self.alpha, 0.0, 20.0),
            ("base_rate", self.base_rate, 1e-6, 1.0 - 1e-6),
            ("strength", self.strength, 0.0, 100.0),
            ("interactions", self.interactions, 0.0, 1.0),
        ];
        for (name, value, low, high) in limits {
            if !(low..=high).contains(&value) {
                return fail(format!("{name} is {value}; {low} to {high} is needed"));
            }
        }
        for feature in &schema.features {
            let name = &feature.name;
            if self.hots_spread > feature.hots {
                return fail(format!(
                    "hots_spread {} is above the hots of feature {name}, {}; bags cannot have fewer than 0 ids",
                    self.hots_spread, feature.hots
                ));
            }
            if feature.hots > HOTS_MAX {
                return fail(format!(
                    "feature {name} has hots {}; bags of at most {HOTS_MAX} ids are drawn",
                    feature.hots
                ));
            }
            if feature.rows == 0 && feature.hots > 0 {
                return fail(format!("feature {name} has 0 rows to draw ids from"));
            }
            if i64::try_from(feature.rows).is_err() {
                return fail(format!(
                    "feature {name} has {} rows; ids end at 2^63 - 1",
                    feature.rows
                ));
            }
        }
        Ok(())
    }
}

/// The highest expected AUC on a range of samples (by number): that of the teacher's own
/// probabilities, `sum p_i (1 - p_j) [p_i > p_j, half for ties] / sum p_i (1 - p_j)` over pairs
/// i != j. `None` for fewer than two samples.
///
/// Errors: [`DataError::Spec`] for settings that cannot be used.
pub fn ceiling_auc(
    schema: &Schema,
    settings: &SyntheticSpec,
    samples: Range<u64>,
) -> Result<Option<f64>> {
    let teacher = Teacher::new(schema, settings)?;
    let mut draw = Draw::new(schema);
    let mut chances: Vec<f64> = samples.map(|sample| teacher.draw(sample, &mut draw)).collect();
    if chances.len() < 2 {
        return Ok(None);
    }
    chances.sort_unstable_by(f64::total_cmp);
    // In rising order: what lies below a sample has been summed before it comes.
    let (mut negatives_below, mut won, mut itself) = (0.0, 0.0, 0.0);
    for same in chances.chunk_by(|a, b| a == b) {
        let (p, count) = (same[0], same.len() as f64);
        won += count * p * negatives_below;
        won += 0.5 * count * (count - 1.0) * p * (1.0 - p);
        negatives_below += count * (1.0 - p);
        itself += count * p * (1.0 - p);
    }
    let positives: f64 = chances.iter().sum();
    Ok(Some(won / (positives * negatives_below - itself)))
}

/// Most ids of a drawn bag, on average. Bags are held whole, and thousands of them are drawn before
/// the first sample.
const HOTS_MAX: usize = 1 << 16;

/// Width of the latent vectors of the pair terms.
const LATENT: usize = 4;
/// Samples drawn to find mean, variance and bias.
const PROBES: u64 = 2048;

/// What hashes are for.
mod purpose {
    pub(super) const SAMPLE: u64 = 1;
    pub(super) const PROBE: u64 = 2;
    pub(super) const FEATURE: u64 = 3;
    pub(super) const DENSE: u64 = 4;
    pub(super) const EFFECT: u64 = 5;
}

/// One drawn sample.
pub(crate) struct Draw {
    pub(crate) dense: Vec<f32>,
    /// Ids and weights (1 where the feature has none) of each feature's bag.
    pub(crate) bags: Vec<Vec<(i64, f32)>>,
    pub(crate) label: f32,
}

impl Draw {
    pub(crate) fn new(schema: &Schema) -> Self {
        Self {
            dense: Vec::with_capacity(schema.dense.len()),
            bags: vec![Vec::new(); schema.features.len()],
            label: 0.0,
        }
    }
}

/// The law of the data.
pub(crate) struct Teacher {
    seed: u64,
    spread: usize,
    counts: bool,
    features: Vec<FeatureLaw>,
    dense: Vec<DenseLaw>,
    /// (mean, factor) that standardise and weigh the linear and the pair part.
    scales: [(f64, f64); 2],
    bias: f64,
}

struct DenseLaw {
    key: u64,
    coefficient: f64,
}

impl Teacher {
    /// Builds the law and tunes its bias on samples of its own.
    pub(crate) fn new(schema: &Schema, settings: &SyntheticSpec) -> Result<Self> {
        settings.validate(schema)?;
        let seed = settings.seed;
        let mut teacher = Self {
            seed,
            spread: settings.hots_spread,
            counts: settings.dense == SyntheticDense::Counts,
            features: schema.features.iter().map(|f| FeatureLaw::new(f, settings)).collect(),
            dense: schema
                .dense
                .iter()
                .map(|name| {
                    let key = key(&[seed, purpose::DENSE, name_word(name)]);
                    DenseLaw { key, coefficient: bell(splitmix64(key)) }
                })
                .collect(),
            scales: [(0.0, 1.0); 2],
            bias: 0.0,
        };
        let mut draw = Draw::new(schema);
        let parts: Vec<[f64; 2]> = (0..PROBES)
            .map(|probe| teacher.draw_from(key(&[seed, purpose::PROBE, probe]), &mut draw).1)
            .collect();
        let shares = [1.0 - settings.interactions, settings.interactions];
        for (part, share) in shares.into_iter().enumerate() {
            let values = || parts.iter().map(|parts| parts[part]);
            let mean = values().sum::<f64>() / PROBES as f64;
            let variance = values().map(|v| (v - mean).powi(2)).sum::<f64>() / PROBES as f64;
            let factor = if variance > 0.0 { (share / variance).sqrt() } else { 0.0 };
            teacher.scales[part] = (mean, settings.strength * factor);
        }
        let logits: Vec<f64> = parts.iter().map(|parts| teacher.logit(*parts)).collect();
        teacher.bias = bias_for(&logits, settings.base_rate);
        Ok(teacher)
    }

    /// Draws sample number `sample`; returns the probability with which it is positive.
    pub(crate) fn draw(&self, sample: u64, draw: &mut Draw) -> f64 {
        let (chance, parts) = self.draw_from(key(&[self.seed, purpose::SAMPLE, sample]), draw);
        let probability = sigmoid(self.logit(parts));
        draw.label = if chance < probability { 1.0 } else { 0.0 };
        probability
    }

    fn logit(&self, parts: [f64; 2]) -> f64 {
        let [(m0, f0), (m1, f1)] = self.scales;
        self.bias + (parts[0] - m0) * f0 + (parts[1] - m1) * f1
    }

    /// Draws the inputs of a sample's key; returns a number in [0, 1) for its label and the linear
    /// and pair parts of its logit.
    fn draw_from(&self, sample: u64, draw: &mut Draw) -> (f64, [f64; 2]) {
        let mut linear = 0.0;
        draw.dense.clear();
        for law in &self.dense {
            let z = bell(splitmix64(sample ^ law.key));
            linear += law.coefficient * z;
            let value = if self.counts { (1.0 + 1.5 * z).exp().floor() } else { z };
            draw.dense.push(value as f32);
        }
        let mut pairs = 0.0;
        let mut before: Option<[f64; LATENT]> = None;
        for (law, bag) in self.features.iter().zip(&mut draw.bags) {
            let mut words = Words::new(splitmix64(sample ^ law.key));
            law.draw_bag(self.spread, &mut words, bag);
            let (effect, latent) = law.judge(bag);
            linear += effect;
            if let Some(before) = before {
                pairs += before.iter().zip(latent).map(|(a, b)| a * b).sum::<f64>();
            }
            before = Some(latent);
        }
        (Words::new(sample).unit(), [linear, pairs])
    }
}

/// How the bags of a feature are drawn and judged.
struct FeatureLaw {
    key: u64,
    effects: u64,
    hots: usize,
    weighted: bool,
    zipf: Zipf,
    scatter: Scatter,
}

impl FeatureLaw {
    fn new(feature: &FeatureSpec, settings: &SyntheticSpec) -> Self {
        let key = key(&[settings.seed, purpose::FEATURE, name_word(&feature.name)]);
        let rows = feature.rows.max(1);
        Self {
            key,
            effects: splitmix64(key ^ purpose::EFFECT),
            hots: feature.hots,
            weighted: feature.weighted,
            zipf: Zipf::new(rows, settings.alpha),
            scatter: Scatter::new(rows, key),
        }
    }

    fn draw_bag(&self, spread: usize, words: &mut Words, bag: &mut Vec<(i64, f32)>) {
        bag.clear();
        let length = match spread {
            0 => self.hots,
            // Validated: the spread is at most the hots.
            _ => self.hots - spread + words.below(2 * spread as u64 + 1) as usize,
        };
        for _ in 0..length {
            let id = self.scatter.row(self.zipf.draw(words)) as i64;
            let weight = if self.weighted { 0.5 + words.unit() as f32 } else { 1.0 };
            bag.push((id, weight));
        }
    }

    /// The effect and the latent vector of a bag, of variance about 1 a component.
    fn judge(&self, bag: &[(i64, f32)]) -> (f64, [f64; LATENT]) {
        let mut effect = 0.0;
        let mut latent = [0.0; LATENT];
        for &(id, weight) in bag {
            let mut words = Words::new(splitmix64(self.effects ^ id as u64));
            let weight = f64::from(weight);
            effect += weight * bell(words.next_word());
            for component in &mut latent {
                *component += weight * bell(words.next_word());
            }
        }
        let scale = 1.0 / (self.hots.max(1) as f64).sqrt();
        (effect * scale, latent.map(|component| component * scale))
    }
}

/// A number of mean 0 and variance 1 from 64 random bits: the sum of four uniform ones.
fn bell(word: u64) -> f64 {
    let sum = (word & 0xFFFF) + (word >> 16 & 0xFFFF) + (word >> 32 & 0xFFFF) + (word >> 48);
    ((sum + 2) as f64 / 65536.0 - 2.0) * 3f64.sqrt()
}

/// A word for a name: its bytes, eight at a time, hashed in turn.
fn name_word(name: &str) -> u64 {
    name.as_bytes().chunks(8).fold(name.len() as u64, |hash, chunk| {
        let mut bytes = [0; 8];
        bytes[..chunk.len()].copy_from_slice(chunk);
        splitmix64(hash ^ u64::from_le_bytes(bytes))
    })
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// The bias at which the mean of `sigmoid(bias + logit)` is `rate`, by halving.
fn bias_for(logits: &[f64], rate: f64) -> f64 {
    let (mut low, mut high) = (-1000.0, 1000.0);
    for _ in 0..64 {
        let middle = 0.5 * (low + high);
        let mean = logits.iter().map(|logit| sigmoid(middle + logit)).sum::<f64>();
        if mean < rate * logits.len() as f64 { low = middle } else { high = middle }
    }
    0.5 * (low + high)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn schema(rows: u64, hots: usize) -> Schema {
        Schema {
            dense: vec!["i1".into(), "i2".into()],
            features: (1..=3)
                .map(|i| FeatureSpec {
                    name: format!("c{i}"),
                    rows,
                    raw_ids: false,
                    weighted: i == 2,
                    hots,
                })
                .collect(),
            label: "label".into(),
            sample_weight: None,
            group: None,
        }
    }

    #[test]
    fn the_base_rate_and_the_ceiling_are_what_they_say() {
        let schema = schema(500, 2);
        let settings = SyntheticSpec { base_rate: 0.3, seed: 5, ..SyntheticSpec::default() };
        let teacher = Teacher::new(&schema, &settings).unwrap();
        let mut draw = Draw::new(&schema);
        let mut scored: Vec<(f64, f32)> =
            (0..20_000).map(|k| (teacher.draw(k, &mut draw), draw.label)).collect();
        let positives = scored.iter().filter(|s| s.1 == 1.0).count() as f64;
        assert!((positives / 20_000.0 - 0.3).abs() < 0.03, "{positives}");
        // The AUC of the teacher on the labels drawn, counted by ranks.
        scored.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let (mut negatives, mut won) = (0.0, 0.0);
        for (_, label) in &scored {
            if *label == 1.0 { won += negatives } else { negatives += 1.0 }
        }
        let counted = won / (positives * negatives);
        let ceiling = ceiling_auc(&schema, &settings, 0..20_000).unwrap().unwrap();
        assert!((counted - ceiling).abs() < 0.01, "{counted} {ceiling}");
        assert!((0.75..0.95).contains(&ceiling), "{ceiling}");
    }

    #[test]
    fn a_teacher_without_strength_knows_nothing() {
        let settings = SyntheticSpec { strength: 0.0, ..SyntheticSpec::default() };
        let ceiling = ceiling_auc(&schema(10, 1), &settings, 0..500).unwrap().unwrap();
        assert!((ceiling - 0.5).abs() < 1e-9, "{ceiling}");
        assert_eq!(ceiling_auc(&schema(10, 1), &settings, 3..4).unwrap(), None);
    }

    #[test]
    fn the_law_does_not_depend_on_where_the_range_begins() {
        let schema = schema(100, 1);
        let settings = SyntheticSpec { samples: 10, ..SyntheticSpec::default() };
        let later = settings.following(5);
        assert_eq!((later.first_sample, later.samples), (10, 5));
        let (a, b) = (Teacher::new(&schema, &settings), Teacher::new(&schema, &later));
        let (mut x, mut y) = (Draw::new(&schema), Draw::new(&schema));
        let p = a.unwrap().draw(12, &mut x);
        assert_eq!(p, b.unwrap().draw(12, &mut y));
        assert_eq!((x.dense, x.bags, x.label), (y.dense, y.bags, y.label));
    }

    #[test]
    fn settings_out_of_range_are_named() {
        let check = |change: fn(&mut SyntheticSpec), rows, part: &str| {
            let mut settings = SyntheticSpec::default();
            change(&mut settings);
            let error = settings.validate(&schema(rows, 1)).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        };
        check(|s| s.alpha = -1.0, 9, "alpha is -1");
        check(|s| s.alpha = f64::NAN, 9, "alpha is NaN");
        check(|s| s.base_rate = 1.0, 9, "base_rate is 1");
        check(|s| s.strength = -0.5, 9, "strength");
        check(|s| s.interactions = 1.5, 9, "interactions is 1.5");
        check(|s| s.hots_spread = 2, 9, "hots_spread 2 is above the hots of feature c1, 1");
        check(|s| s.first_sample = u64::MAX, 9, "beyond 2^64");
        check(|_| (), 0, "feature c1 has 0 rows");
        check(|_| (), u64::MAX, "2^63 - 1");
        SyntheticSpec::default().validate(&schema(0, 0)).unwrap();
    }
}
