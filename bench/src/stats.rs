//! Summaries of samples: quantiles from an HDR histogram, ratios with their spread, and what
//! tells the slow requests from the others.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::draw::Rng;
use crate::drive::Sample;

/// Latencies above are counted as this: an hour in nanoseconds.
const LATENCY_NS_MAX: u64 = 3_600_000_000_000;

/// Resamplings of a bootstrap.
const RESAMPLES: usize = 1000;

/// Latency of a request in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)] // Quantiles by their names.
pub struct LatencyMs {
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

/// A histogram of latencies in nanoseconds, three digits exact.
fn histogram(seconds: &[f64]) -> Histogram<u64> {
    let mut histogram =
        Histogram::new_with_bounds(1, LATENCY_NS_MAX, 3).expect("these bounds are valid");
    for &latency in seconds {
        histogram.saturating_record(((latency * 1e9) as u64).max(1));
    }
    histogram
}

impl LatencyMs {
    /// Quantiles of latencies in seconds.
    #[must_use]
    pub fn of(seconds: &[f64]) -> Self {
        let histogram = histogram(seconds);
        let ms = |quantile: f64| histogram.value_at_quantile(quantile) as f64 / 1e6;
        Self {
            mean: histogram.mean() / 1e6,
            p50: ms(0.5),
            p90: ms(0.9),
            p99: ms(0.99),
            p999: ms(0.999),
            max: histogram.max() as f64 / 1e6,
        }
    }
}

/// Points of a latency distribution for plotting: (1 / (1 - quantile), milliseconds), from the
/// median to the largest.
#[must_use]
pub fn tail_curve(seconds: &[f64]) -> Vec<(f64, f64)> {
    let histogram = histogram(seconds);
    let most = seconds.len().max(2) as f64;
    let steps = 100;
    (0..=steps)
        .map(|step| {
            let beyond = 2.0 * (most / 2.0).powf(f64::from(step) / f64::from(steps));
            let quantile = 1.0 - 1.0 / beyond;
            (beyond, histogram.value_at_quantile(quantile) as f64 / 1e6)
        })
        .collect()
}

/// The middle value; NaN of nothing.
#[must_use]
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// The value below which a share `q` of the values lies, between neighbours in proportion.
#[must_use]
pub fn quantile(values: &[f64], q: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let Some(last) = sorted.len().checked_sub(1) else { return f64::NAN };
    let place = q * last as f64;
    let (low, part) = (place.floor() as usize, place.fract());
    sorted[low] + part * (sorted[(low + 1).min(last)] - sorted[low])
}

/// A ratio of medians and where it lies with 90% confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ratio {
    /// Ratio of the medians.
    pub ratio: f64,
    /// 5% of resampled ratios are below.
    pub low: f64,
    /// 5% of resampled ratios are above.
    pub high: f64,
}

/// Median of `above` over median of `below`, with a bootstrap of both sets of samples.
#[must_use]
pub fn ratio(above: &[f64], below: &[f64]) -> Ratio {
    let mut rng = Rng::new(1);
    let mut resampled = |values: &[f64]| {
        let n = values.len().max(1) as u64;
        let drawn: Vec<f64> = (0..values.len()).map(|_| values[rng.below(n) as usize]).collect();
        median(&drawn)
    };
    let ratios: Vec<f64> = (0..RESAMPLES).map(|_| resampled(above) / resampled(below)).collect();
    Ratio {
        ratio: median(above) / median(below),
        low: quantile(&ratios, 0.05),
        high: quantile(&ratios, 0.95),
    }
}

/// What the slowest requests (those from p99 on, one at the least) have that the others lack.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Tail {
    /// How many they are.
    pub requests: usize,
    /// How much longer they took than the median, in milliseconds, on average.
    pub excess_ms: f64,
    /// How much of that was waiting for earlier requests (open loop).
    pub waiting_ms: f64,
    /// How much longer than its median each stage took, in milliseconds, on average.
    pub stages_ms: BTreeMap<String, f64>,
    /// Times a request lost a core to another process, on average: in the tail and elsewhere.
    pub preemptions: (f64, f64),
    /// Pages touched for the first time, on average: in the tail and elsewhere.
    pub page_faults: (f64, f64),
    /// The likeliest cause, in words.
    pub cause: String,
}

/// Looks for the cause of the tail.
#[must_use]
pub fn tail(samples: &[Sample]) -> Option<Tail> {
    let latencies: Vec<f64> = samples.iter().map(|sample| sample.latency_s).collect();
    let mut order: Vec<&Sample> = samples.iter().collect();
    order.sort_by(|a, b| a.latency_s.total_cmp(&b.latency_s));
    let count = samples.len().div_ceil(100);
    let (others, slow) = order.split_at(samples.len() - count);
    if others.is_empty() {
        return None;
    }
    let mean = |of: &[&Sample], value: &dyn Fn(&Sample) -> f64| {
        of.iter().map(|sample| value(sample)).sum::<f64>() / of.len() as f64
    };
    let excess_ms = 1e3 * (mean(slow, &|sample| sample.latency_s) - median(&latencies));
    let waiting_ms = 1e3 * mean(slow, &|sample| sample.latency_s - sample.service_s);
    let mut names: Vec<&String> = samples.iter().flat_map(|sample| sample.stages.keys()).collect();
    names.sort();
    names.dedup();
    let stage = |sample: &Sample, name: &str| sample.stages.get(name).copied().unwrap_or(0.0);
    let stages_ms: BTreeMap<String, f64> = names
        .into_iter()
        .map(|name| {
            let all: Vec<f64> = samples.iter().map(|sample| stage(sample, name)).collect();
            let excess = mean(slow, &|sample| stage(sample, name)) - median(&all);
            (name.clone(), 1e3 * excess)
        })
        .collect();
    let both = |value: &dyn Fn(&Sample) -> f64| (mean(slow, value), mean(others, value));
    let preemptions = both(&|sample| sample.disturbance.preemptions as f64);
    let page_faults = both(&|sample| sample.disturbance.page_faults as f64);
    let worst = stages_ms.iter().max_by(|a, b| a.1.total_cmp(b.1));
    let mut cause = if waiting_ms > 0.5 * excess_ms {
        "requests waited for those before them: the rate is near what the machine can serve, or \
         one of them stalled"
            .to_owned()
    } else if preemptions.0 > 2.0 * preemptions.1 + 0.5 {
        "other processes took the cores away".to_owned()
    } else if page_faults.0 > 2.0 * page_faults.1 + 16.0 {
        "memory was touched for the first time".to_owned()
    } else {
        "they saw no more preemptions or page faults than the others, so the memory or the host \
         was slow"
            .to_owned()
    };
    if let Some((name, ms)) = worst.filter(|(_, ms)| **ms > 0.0) {
        cause.push_str(&format!("; most of it in stage {name} (+{ms:.3} ms)"));
    }
    Some(Tail {
        requests: count,
        excess_ms,
        waiting_ms,
        stages_ms,
        preemptions,
        page_faults,
        cause,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::drive::Stages;
    use crate::machine::Disturbance;

    #[test]
    fn quantiles_of_a_known_distribution() {
        let seconds: Vec<f64> = (1..=1000).map(|i| f64::from(i) * 1e-3).collect();
        let latency = LatencyMs::of(&seconds);
        for (got, want) in [
            (latency.p50, 500.0),
            (latency.p90, 900.0),
            (latency.p99, 990.0),
            (latency.p999, 999.0),
            (latency.max, 1000.0),
            (latency.mean, 500.5),
        ] {
            assert!((got / want - 1.0).abs() < 2e-3, "{got}, not {want}");
        }
        let curve = tail_curve(&seconds);
        assert!((curve[0].1 / 500.0 - 1.0).abs() < 2e-3);
        assert!((curve[100].1 / 1000.0 - 1.0).abs() < 2e-3);
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(quantile(&[0.0, 10.0], 0.25), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn a_ratio_is_found_with_its_spread() {
        let a: Vec<f64> = (0..100).map(|i| 200.0 + f64::from(i % 10)).collect();
        let b: Vec<f64> = (0..100).map(|i| 100.0 + f64::from(i % 7)).collect();
        let found = ratio(&a, &b);
        assert!((found.ratio - 204.5 / 103.0).abs() < 1e-9);
        assert!(found.low <= found.ratio && found.ratio <= found.high);
        assert!(found.high / found.low < 1.05);
    }

    #[test]
    fn the_tail_names_its_stage_and_its_cause() {
        let sample = |slow: bool| Sample {
            service_s: if slow { 0.012 } else { 0.002 },
            latency_s: if slow { 0.012 } else { 0.002 },
            stages: Stages::from([
                ("lookup".into(), if slow { 0.011 } else { 0.001 }),
                ("check".into(), 0.001),
            ]),
            disturbance: Disturbance { preemptions: if slow { 7 } else { 0 }, page_faults: 0 },
        };
        let samples: Vec<Sample> = (0..100).map(|i| sample(i == 40)).collect();
        let tail = tail(&samples).unwrap();
        assert_eq!(tail.requests, 1);
        assert!((tail.excess_ms - 10.0).abs() < 1e-9);
        assert!(tail.cause.contains("took the cores away"), "{}", tail.cause);
        assert!(tail.cause.contains("stage lookup (+10.000 ms)"), "{}", tail.cause);
        assert!(super::tail(&samples[..1]).is_none());
    }
}
