//! The crate's Prometheus metrics: stores count plain numbers, and a training step shows them here
//! once a batch.

use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

use crate::{Result, StoreStats, TierStats};

/// Metrics of the stores of one rank's tables.
#[derive(Debug)]
pub struct CacheMetrics {
    tables: Vec<TableMetrics>,
}

#[derive(Debug)]
struct TableMetrics {
    device: TierMetrics,
    host: TierMetrics,
    first_rows: IntCounter,
    fetched_again: IntCounter,
    ssd_rows: IntGauge,
    ssd_live_bytes: IntGauge,
    ssd_file_bytes: IntGauge,
    ssd_index_bytes: IntGauge,
    ssd_rows_read: IntCounter,
    ssd_rows_written: IntCounter,
    get_bytes: IntCounter,
    put_bytes: IntCounter,
    compaction_read_bytes: IntCounter,
    compaction_bytes: IntCounter,
    compactions: IntCounter,
    read_wait: Histogram,
    write_wait: Histogram,
    /// Sums of the waits that were shown, in seconds.
    waited: std::sync::Mutex<(f64, f64)>,
}

#[derive(Debug)]
struct TierMetrics {
    slots: IntGauge,
    rows: IntGauge,
    hits: IntCounter,
    misses: IntCounter,
    evictions: IntCounter,
    write_backs: IntCounter,
    bytes_in: IntCounter,
    bytes_out: IntCounter,
}

impl TierMetrics {
    fn show(&self, stats: &TierStats) {
        set(&self.slots, stats.slots);
        set(&self.rows, stats.rows);
        raise(&self.hits, stats.hits);
        raise(&self.misses, stats.misses);
        raise(&self.evictions, stats.evictions);
        raise(&self.write_backs, stats.write_backs);
        raise(&self.bytes_in, stats.bytes_in);
        raise(&self.bytes_out, stats.bytes_out);
    }
}

impl CacheMetrics {
    /// Metrics for tables of these names, on `registry` or, when `None`, on no registry.
    ///
    /// Errors: [`crate::CacheError::Metrics`] when the registry has metrics of these names.
    pub fn new<'a>(
        tables: impl IntoIterator<Item = &'a str>,
        registry: Option<&Registry>,
    ) -> Result<Self> {
        let mut all: Vec<Box<dyn Collector>> = Vec::new();
        let mut counter = |name: &str, help: &str, labels: &[&str]| {
            let made = IntCounterVec::new(Opts::new(format!("tessera_cache_{name}"), help), labels);
            if let Ok(made) = &made {
                all.push(Box::new(made.clone()));
            }
            made
        };
        let tier = ["table", "tier"];
        let hits = counter("hits_total", "Rows looked for in a tier of memory and found.", &tier)?;
        let misses =
            counter("misses_total", "Rows looked for in a tier of memory and not found.", &tier)?;
        let evictions =
            counter("evictions_total", "Rows that left a tier to make room for others.", &tier)?;
        let write_backs = counter(
            "write_backs_total",
            "Rows written from a tier to the one below because they differed from it.",
            &tier,
        )?;
        let bytes = counter(
            "bytes_total",
            "Bytes of rows that were copied into a tier of memory and out of it.",
            &["table", "tier", "direction"],
        )?;
        let first_rows = counter(
            "first_rows_total",
            "Rows made at their first values because they had never been written.",
            &["table"],
        )?;
        let fetched_again = counter(
            "fetched_again_total",
            "Rows fetched a second time because one of their batch was written after they were.",
            &["table"],
        )?;
        let ssd_moved =
            counter("ssd_rows_total", "Rows read from SSD and written to it.", &["table", "what"])?;
        let ssd_io = counter(
            "ssd_io_bytes_total",
            "Bytes read from SSD and written to it, by what asked for them.",
            &["table", "what"],
        )?;
        let compactions = counter(
            "ssd_compactions_total",
            "Segment files that compaction emptied and deleted.",
            &["table"],
        )?;
        let mut gauge = |name: &str, help: &str, labels: &[&str]| {
            let made = IntGaugeVec::new(Opts::new(format!("tessera_cache_{name}"), help), labels);
            if let Ok(made) = &made {
                all.push(Box::new(made.clone()));
            }
            made
        };
        let slots = gauge("slots", "Rows that a tier of memory has room for.", &tier)?;
        let rows = gauge("rows", "Rows that a tier holds.", &tier)?;
        let ssd_bytes = gauge(
            "ssd_bytes",
            "Bytes on SSD: newest records, all files, and the memory of their index.",
            &["table", "what"],
        )?;
        // From 10 us, a read or two, to 10 s in steps of about 2.15.
        let buckets = prometheus::exponential_buckets(1e-5, 10f64.powf(1.0 / 3.0), 19)?;
        let wait = HistogramVec::new(
            HistogramOpts::new(
                "tessera_cache_ssd_wait_seconds",
                "Time that a step's rows of a table took to be read from SSD or written to it, of \
                 steps that had such.",
            )
            .buckets(buckets),
            &["table", "what"],
        )?;
        all.push(Box::new(wait.clone()));
        if let Some(registry) = registry {
            for collector in all {
                registry.register(collector)?;
            }
        }
        let of_tier = |table: &str, tier: &str| TierMetrics {
            slots: slots.with_label_values(&[table, tier]),
            rows: rows.with_label_values(&[table, tier]),
            hits: hits.with_label_values(&[table, tier]),
            misses: misses.with_label_values(&[table, tier]),
            evictions: evictions.with_label_values(&[table, tier]),
            write_backs: write_backs.with_label_values(&[table, tier]),
            bytes_in: bytes.with_label_values(&[table, tier, "in"]),
            bytes_out: bytes.with_label_values(&[table, tier, "out"]),
        };
        let tables = tables
            .into_iter()
            .map(|table| TableMetrics {
                device: of_tier(table, "device"),
                host: of_tier(table, "host"),
                first_rows: first_rows.with_label_values(&[table]),
                fetched_again: fetched_again.with_label_values(&[table]),
                ssd_rows: rows.with_label_values(&[table, "ssd"]),
                ssd_live_bytes: ssd_bytes.with_label_values(&[table, "live"]),
                ssd_file_bytes: ssd_bytes.with_label_values(&[table, "files"]),
                ssd_index_bytes: ssd_bytes.with_label_values(&[table, "index"]),
                ssd_rows_read: ssd_moved.with_label_values(&[table, "read"]),
                ssd_rows_written: ssd_moved.with_label_values(&[table, "written"]),
                get_bytes: ssd_io.with_label_values(&[table, "get"]),
                put_bytes: ssd_io.with_label_values(&[table, "put"]),
                compaction_read_bytes: ssd_io.with_label_values(&[table, "compaction_read"]),
                compaction_bytes: ssd_io.with_label_values(&[table, "compaction_write"]),
                compactions: compactions.with_label_values(&[table]),
                read_wait: wait.with_label_values(&[table, "read"]),
                write_wait: wait.with_label_values(&[table, "write"]),
                waited: std::sync::Mutex::default(),
            })
            .collect();
        Ok(Self { tables })
    }

    /// Shows what the stores of table number `table` did since they were made; once a step.
    pub fn show(&self, table: usize, stats: &StoreStats) {
        let Some(metrics) = self.tables.get(table) else { return };
        metrics.device.show(&stats.device);
        metrics.host.show(&stats.host);
        raise(&metrics.first_rows, stats.first_rows);
        raise(&metrics.fetched_again, stats.rows_fetched_again);
        let mut waited = metrics.waited.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (read, write) = (stats.cold_wait_s - waited.0, stats.cold_write_s - waited.1);
        *waited = (stats.cold_wait_s, stats.cold_write_s);
        for (histogram, seconds) in [(&metrics.read_wait, read), (&metrics.write_wait, write)] {
            if seconds > 0.0 {
                histogram.observe(seconds);
            }
        }
        let Some(cold) = &stats.cold else { return };
        set(&metrics.ssd_rows, cold.rows);
        set(&metrics.ssd_live_bytes, cold.live_bytes);
        set(&metrics.ssd_file_bytes, cold.file_bytes);
        set(&metrics.ssd_index_bytes, cold.index_bytes);
        raise(&metrics.ssd_rows_read, cold.rows_read);
        raise(&metrics.ssd_rows_written, cold.rows_written);
        raise(&metrics.get_bytes, cold.get_bytes);
        raise(&metrics.put_bytes, cold.put_bytes);
        raise(&metrics.compaction_read_bytes, cold.compaction_read_bytes);
        raise(&metrics.compaction_bytes, cold.compaction_bytes);
        raise(&metrics.compactions, cold.compactions);
    }
}

/// Raises a counter to a count.
fn raise(counter: &IntCounter, count: u64) {
    counter.inc_by(count.saturating_sub(counter.get()));
}

fn set(gauge: &IntGauge, value: u64) {
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ColdStats;

    #[test]
    fn counters_follow_the_stores_and_waits_are_shown_once() {
        let registry = Registry::new();
        let metrics = CacheMetrics::new(["a", "b"], Some(&registry)).unwrap();
        let mut stats = StoreStats { cold_wait_s: 0.5, ..StoreStats::default() };
        stats.device.hits = 7;
        stats.host.write_backs = 3;
        stats.cold = Some(ColdStats { rows: 11, put_bytes: 4096, ..ColdStats::default() });
        metrics.show(1, &stats);
        metrics.show(1, &stats); // nothing happened
        stats.device.hits = 9;
        stats.cold_wait_s = 0.75;
        metrics.show(1, &stats);
        metrics.show(2, &stats); // no such table
        let families = registry.gather();
        let value = |name: &str, labels: &[&str]| {
            let family = families.iter().find(|family| family.name() == name).unwrap();
            let has = |metric: &&prometheus::proto::Metric| {
                labels.iter().all(|label| metric.get_label().iter().any(|l| l.value() == *label))
            };
            family.get_metric().iter().find(has).unwrap().clone()
        };
        let hits = value("tessera_cache_hits_total", &["b", "device"]);
        assert_eq!(hits.get_counter().get_value(), 9.0);
        let backs = value("tessera_cache_write_backs_total", &["b", "host"]);
        assert_eq!(backs.get_counter().get_value(), 3.0);
        assert_eq!(value("tessera_cache_rows", &["b", "ssd"]).get_gauge().get_value(), 11.0);
        let put = value("tessera_cache_ssd_io_bytes_total", &["b", "put"]);
        assert_eq!(put.get_counter().get_value(), 4096.0);
        let wait = value("tessera_cache_ssd_wait_seconds", &["b", "read"]);
        assert_eq!(wait.get_histogram().get_sample_count(), 2);
        assert_eq!(wait.get_histogram().get_sample_sum(), 0.75);
        let none = value("tessera_cache_ssd_wait_seconds", &["a", "read"]);
        assert_eq!(none.get_histogram().get_sample_count(), 0);
        assert!(CacheMetrics::new(["a"], Some(&registry)).is_err());
    }
}
