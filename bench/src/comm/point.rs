//! Figures of one operation and size.

use std::fmt;

use serde::{Deserialize, Serialize};
use tessera_comm::Codec;

use super::knobs::Size;
use super::operation::Operation;
use crate::Result;
use crate::document::Figures;
use crate::drive::Sample;
use crate::report::{Curve, plot};
use crate::stats::{LatencyMs, Tail, median, tail};

/// Sizes up to this one are shown in the plot of times; larger ones would hide them.
const SMALL_BYTES: usize = 64 << 10;

/// Figures of one operation and size: see [`Operation`] for what a size is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CommPoint {
    /// The operation.
    pub operation: String,
    /// Bytes of the larger of what a rank gives and gets.
    pub bytes: usize,
    /// Bytes that must cross a rank's link, or be encoded.
    pub moved_bytes: f64,
    /// Those over the median time, in 10^9 a second; `None` when nothing is moved.
    pub gb_per_s: Option<f64>,
    /// 10^9 bytes a second that each rank copies in memory while all others do, in buffers of
    /// this size (of the largest size, where this is 0).
    pub limit_gb_per_s: f64,
    /// Bandwidth over the limit.
    pub share_of_limit: Option<f64>,
    /// Time of an operation.
    pub latency_ms: LatencyMs,
    /// Where the slowest operations lost their time.
    pub tail: Option<Tail>,
    /// Time of every operation in milliseconds, each that of its slowest rank.
    pub service_ms: Vec<f64>,
}

impl CommPoint {
    /// The figures of samples of `operation`, `bytes` large, that moved `moved_bytes` each.
    #[must_use]
    pub fn new(
        operation: Operation,
        bytes: usize,
        moved_bytes: f64,
        limit_gb_per_s: f64,
        samples: &[Sample],
    ) -> Self {
        let seconds: Vec<f64> = samples.iter().map(|sample| sample.service_s).collect();
        let gb_per_s = (moved_bytes > 0.0).then(|| moved_bytes / median(&seconds) / 1e9);
        Self {
            operation: operation.name(),
            bytes,
            moved_bytes,
            gb_per_s,
            limit_gb_per_s,
            share_of_limit: gb_per_s.map(|speed| speed / limit_gb_per_s),
            latency_ms: LatencyMs::of(&seconds),
            tail: tail(samples),
            service_ms: seconds.iter().map(|s| s * 1e3).collect(),
        }
    }
}

impl Figures for CommPoint {
    fn case(&self) -> String {
        format!("{:<14} {:>6}", self.operation, Size(self.bytes).to_string())
    }

    fn service_ms(&self) -> &[f64] {
        &self.service_ms
    }

    fn latency_ms(&self) -> &LatencyMs {
        &self.latency_ms
    }

    fn limit(&self) -> f64 {
        self.limit_gb_per_s
    }

    fn write(points: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<14} {:>6} | {:>8} {:>8} {:>6} | {:>10} {:>10} {:>10} {:>10} us",
            "operation", "bytes", "GB/s", "copy", "share", "p50", "p90", "p99", "max"
        )?;
        for point in points {
            let number = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.3}"));
            let percent =
                |value: Option<f64>| value.map_or("-".into(), |v| format!("{:.0}%", 100.0 * v));
            let latency = &point.latency_ms;
            writeln!(
                f,
                "{} | {:>8} {:>8.3} {:>6} | {:>10.1} {:>10.1} {:>10.1} {:>10.1}",
                point.case(),
                number(point.gb_per_s),
                point.limit_gb_per_s,
                percent(point.share_of_limit),
                1e3 * latency.p50,
                1e3 * latency.p90,
                1e3 * latency.p99,
                1e3 * latency.max
            )?;
        }
        Ok(())
    }

    fn plots(points: &[Self]) -> Result<Vec<String>> {
        let codecs = Codec::ALL.map(|codec| Operation::Codec(codec).name());
        let is_codec = |point: &Self| codecs.contains(&point.operation);
        let all = |_: &Self| true;
        let small = |point: &Self| point.bytes <= SMALL_BYTES && !is_codec(point);
        let limit = |point: &Self| Some(point.limit_gb_per_s);
        let speed = |point: &Self| point.gb_per_s;
        let mut bandwidth = curves(points, |point| !is_codec(point), speed);
        if let Some((_, at)) = curves(points, all, limit).into_iter().max_by_key(|c| c.1.len()) {
            bandwidth.push(("memory copy".into(), at));
        }
        let encoding = curves(points, is_codec, speed);
        let times = curves(points, small, |point| Some(1e3 * point.latency_ms.p50));
        let size = "bytes of a rank";
        let mut plots = Vec::new();
        for (title, y, curves) in [
            ("Bandwidth of a rank's link against size", "GB/s", bandwidth),
            ("Encoding and decoding against size", "GB/s of float32", encoding),
            ("Median time of small operations", "microseconds", times),
        ] {
            if !curves.is_empty() {
                plots.push(plot(title, size, y, &curves)?);
            }
        }
        Ok(plots)
    }
}

/// A curve for every operation, `y` over the size, of the points that `keep` picks and whose size
/// a logarithmic axis has a place for.
fn curves(
    points: &[CommPoint],
    keep: impl Fn(&CommPoint) -> bool,
    y: impl Fn(&CommPoint) -> Option<f64>,
) -> Vec<Curve> {
    let mut curves: Vec<Curve> = Vec::new();
    for point in points.iter().filter(|&point| point.bytes > 0 && keep(point)) {
        let Some(y) = y(point) else { continue };
        let at = (point.bytes as f64, y);
        match curves.iter_mut().find(|(name, _)| *name == point.operation) {
            Some((_, points)) => points.push(at),
            None => curves.push((point.operation.clone(), vec![at])),
        }
    }
    for (_, points) in &mut curves {
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
    }
    curves
}
