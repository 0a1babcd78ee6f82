//! Figures of one measurement of `cache`.

use std::fmt;

use serde::{Deserialize, Serialize};
use tessera_cache::StoreStats;

use super::knobs::Size;
use crate::Result;
use crate::document::Figures;
use crate::report::{Curve, plot};
use crate::stats::{LatencyMs, median, tail_curve};

/// Where the rows that were fetched lay, as shares of all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Shares {
    /// In the device tier.
    pub device: f64,
    /// In the host tier.
    pub host: f64,
    /// On SSD.
    pub ssd: f64,
    /// Nowhere: rows that were never written.
    pub first: f64,
}

impl Shares {
    /// What a store did between two looks at its numbers.
    #[must_use]
    pub fn between(before: &StoreStats, after: &StoreStats) -> Self {
        let device = (after.device.hits - before.device.hits) as f64;
        let host = (after.host.hits - before.host.hits) as f64;
        let ssd = (after.cold_rows - before.cold_rows) as f64;
        let first = (after.first_rows - before.first_rows) as f64;
        let all = (device + host + ssd + first).max(1.0);
        Self { device: device / all, host: host / all, ssd: ssd / all, first: first / all }
    }
}

/// What a speed is held against.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Bound {
    /// What it is, in words.
    pub what: String,
    /// Rows a second.
    pub rows_per_s: f64,
}

impl Bound {
    /// A bound.
    pub fn new(what: impl Into<String>, rows_per_s: f64) -> Self {
        Self { what: what.into(), rows_per_s }
    }
}

/// Figures of one measurement.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CachePoint {
    /// What was measured.
    pub case: String,
    /// Rows of a request.
    pub rows: f64,
    /// Rows a second at the median time.
    pub rows_per_s: f64,
    /// The same in bytes of rows with their state, in 10^9 a second.
    pub gb_per_s: f64,
    /// What it is held against.
    pub limit: Bound,
    /// Rows a second over the limit's: the median over pairs where the two took turns.
    pub share_of_limit: f64,
    /// Bytes of the device tier, where there is one.
    pub device_bytes: Option<u64>,
    /// Where the rows lay, of fetches.
    pub shares: Option<Shares>,
    /// Share of the time that fetches waited for the SSD to read.
    pub ssd_wait: Option<f64>,
    /// Bytes written to the SSD over bytes of records that were put there.
    pub write_amplification: Option<f64>,
    /// Time of a request.
    pub latency_ms: LatencyMs,
    /// Time of every request in milliseconds.
    pub service_ms: Vec<f64>,
}

impl CachePoint {
    /// The figures of requests of `rows` rows of `row_bytes` that took `seconds`.
    #[must_use]
    pub fn new(case: String, rows: f64, row_bytes: f64, limit: Bound, seconds: &[f64]) -> Self {
        let rows_per_s = rows / median(seconds);
        Self {
            case,
            rows,
            rows_per_s,
            gb_per_s: rows_per_s * row_bytes / 1e9,
            share_of_limit: rows_per_s / limit.rows_per_s,
            limit,
            device_bytes: None,
            shares: None,
            ssd_wait: None,
            write_amplification: None,
            latency_ms: LatencyMs::of(seconds),
            service_ms: seconds.iter().map(|s| s * 1e3).collect(),
        }
    }
}

/// A share in percent, or nothing.
fn percent(share: Option<f64>) -> String {
    share.map_or(String::new(), |share| format!("{:.1}%", 100.0 * share))
}

impl Figures for CachePoint {
    fn case(&self) -> String {
        let device = self
            .device_bytes
            .map_or(String::new(), |bytes| format!(", device {}", Size(bytes as usize)));
        format!("{}{device}", self.case)
    }

    fn service_ms(&self) -> &[f64] {
        &self.service_ms
    }

    fn latency_ms(&self) -> &LatencyMs {
        &self.latency_ms
    }

    fn limit(&self) -> f64 {
        self.limit.rows_per_s
    }

    fn write(points: &[Self], f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "\n{:<26} {:>7} | {:>9} {:>7} {:>10} {:>5} | {:>6} {:>6} {:>6} {:>6} {:>6} | {:>8} {:>8} {:>8} {:>8} ms",
            "what",
            "rows",
            "krows/s",
            "GB/s",
            "limit",
            "share",
            "device",
            "host",
            "SSD",
            "first",
            "wait",
            "p50",
            "p90",
            "p99",
            "max"
        )?;
        for point in points {
            let latency = &point.latency_ms;
            let share = |of: fn(&Shares) -> f64| percent(point.shares.as_ref().map(of));
            writeln!(
                f,
                "{:<26} {:>7.0} | {:>9.1} {:>7.3} {:>10.1} {:>5.2} | {:>6} {:>6} {:>6} {:>6} {:>6} | {:>8.3} {:>8.3} {:>8.3} {:>8.3}",
                point.case(),
                point.rows,
                point.rows_per_s / 1e3,
                point.gb_per_s,
                point.limit.rows_per_s / 1e3,
                point.share_of_limit,
                share(|s| s.device),
                share(|s| s.host),
                share(|s| s.ssd),
                share(|s| s.first),
                percent(point.ssd_wait),
                latency.p50,
                latency.p90,
                latency.p99,
                latency.max
            )?;
        }
        writeln!(f)?;
        let mut told: Vec<&str> = Vec::new();
        for point in points {
            if !told.contains(&point.limit.what.as_str()) {
                told.push(&point.limit.what);
                writeln!(f, "limit of {}: {}", point.case(), point.limit.what)?;
            }
            if let Some(amplification) = point.write_amplification {
                writeln!(f, "write amplification of {}: {amplification:.2}", point.case())?;
            }
        }
        Ok(())
    }

    fn plots(points: &[Self]) -> Result<Vec<String>> {
        let of = |name: &str, share: fn(&Shares) -> f64| -> Curve {
            let at = points.iter().filter_map(|point| {
                Some((point.device_bytes? as f64, 100.0 * share(point.shares.as_ref()?)))
            });
            (name.to_owned(), at.collect())
        };
        let found = vec![
            of("in the device tier", |s| s.device),
            of("in the device or host tier", |s| s.device + s.host),
        ];
        let mut plots = Vec::new();
        if !found[0].1.is_empty() {
            let x = "bytes of the device tier";
            plots.push(plot("Rows found against device bytes", x, "% of rows", &found)?);
        }
        let fetches = points.iter().filter(|point| point.shares.is_some());
        let curves: Vec<Curve> = fetches
            .map(|point| {
                let seconds: Vec<f64> = point.service_ms.iter().map(|ms| ms / 1e3).collect();
                (point.case(), tail_curve(&seconds))
            })
            .collect();
        if !curves.is_empty() {
            let x = "1 / (1 - quantile): 2 is the median, 100 is p99";
            plots.push(plot("Latency of a fetch beyond a quantile", x, "ms", &curves)?);
        }
        Ok(plots)
    }
}
