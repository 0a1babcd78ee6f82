//! The crate's Prometheus metrics, resolved once; kernels return plain numbers and the training
//! step adds them here once a batch.

use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

use tessera_cache::IdMapStats;

use crate::{BadIdPolicy, Lookup, LookupOps, Result, Routed, UpdateStats};

/// Metrics of one collection of tables.
#[derive(Debug)]
pub struct EmbeddingMetrics {
    tables: Vec<TableMetrics>,
    lookup_seconds: Histogram,
}

#[derive(Debug)]
struct TableMetrics {
    rows_read: IntCounter,
    rows_updated: IntCounter,
    rows_nonfinite: IntCounter,
    bad_ids_dropped: IntCounter,
    bad_ids_mapped: IntCounter,
    bad_ids_refused: IntCounter,
    resident_bytes: IntGauge,
}

impl EmbeddingMetrics {
    /// Metrics for tables of these names, on `registry` or, when `None`, on no registry.
    ///
    /// Errors: [`crate::EmbeddingError::Metrics`] when the registry has metrics of these names.
    pub fn new<'a>(
        tables: impl IntoIterator<Item = &'a str>,
        registry: Option<&Registry>,
    ) -> Result<Self> {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(format!("tessera_embedding_{name}"), help), labels)
        };
        let rows_read = counter(
            "rows_read_total",
            "Rows read by lookups, repeats within a batch counted.",
            &["table"],
        )?;
        let rows_updated = counter(
            "rows_updated_total",
            "Rows moved by updates, once a batch however often they occur in it.",
            &["table"],
        )?;
        let rows_nonfinite = counter(
            "rows_nonfinite_total",
            "Rows that an update left as they were because a number was not finite.",
            &["table"],
        )?;
        let bad_ids = counter(
            "bad_ids_total",
            "Ids that named no row of their table, by what was done: a refused batch counts once.",
            &["table", "policy"],
        )?;
        let resident_bytes = IntGaugeVec::new(
            Opts::new(
                "tessera_embedding_resident_bytes",
                "Bytes of weights and optimizer state that a table keeps in device memory.",
            ),
            &["table"],
        )?;
        // From 10 us, a small batch on one table, to 10 s in steps of about 2.15.
        let buckets = prometheus::exponential_buckets(1e-5, 10f64.powf(1.0 / 3.0), 19)?;
        let lookup_seconds = Histogram::with_opts(
            HistogramOpts::new(
                "tessera_embedding_lookup_seconds",
                "Time of one pooled lookup of a batch over all tables.",
            )
            .buckets(buckets),
        )?;
        if let Some(registry) = registry {
            let all: [Box<dyn Collector>; 6] = [
                Box::new(rows_read.clone()),
                Box::new(rows_updated.clone()),
                Box::new(rows_nonfinite.clone()),
                Box::new(bad_ids.clone()),
                Box::new(resident_bytes.clone()),
                Box::new(lookup_seconds.clone()),
            ];
            for collector in all {
                registry.register(collector)?;
            }
        }
        let of_policy =
            |table: &str, policy: BadIdPolicy| bad_ids.with_label_values(&[table, policy.name()]);
        let tables = tables
            .into_iter()
            .map(|table| TableMetrics {
                rows_read: rows_read.with_label_values(&[table]),
                rows_updated: rows_updated.with_label_values(&[table]),
                rows_nonfinite: rows_nonfinite.with_label_values(&[table]),
                bad_ids_dropped: of_policy(table, BadIdPolicy::Drop),
                bad_ids_mapped: of_policy(table, BadIdPolicy::DefaultRow),
                bad_ids_refused: of_policy(table, BadIdPolicy::Error),
                resident_bytes: resident_bytes.with_label_values(&[table]),
            })
            .collect();
        Ok(Self { tables, lookup_seconds })
    }

    /// Counts a lookup that was done, and its time in seconds.
    pub fn observe_lookup<D: LookupOps>(&self, lookup: &Lookup<D>, seconds: f64) {
        self.observe(lookup.rows_read(), lookup.bad_ids(), lookup.policy(), seconds);
    }

    /// As [`EmbeddingMetrics::observe_lookup`], for this rank's part of a batch.
    pub fn observe_routed<D: LookupOps>(&self, routed: &Routed<D>, seconds: f64) {
        self.observe(routed.rows_read(), routed.bad_ids(), routed.policy(), seconds);
    }

    fn observe(&self, rows_read: &[u64], bad_ids: &[u64], policy: BadIdPolicy, seconds: f64) {
        self.lookup_seconds.observe(seconds);
        let counts = rows_read.iter().zip(bad_ids);
        for (table, (&rows, &bad)) in self.tables.iter().zip(counts) {
            table.rows_read.inc_by(rows);
            match policy {
                BadIdPolicy::Drop => table.bad_ids_dropped.inc_by(bad),
                BadIdPolicy::DefaultRow => table.bad_ids_mapped.inc_by(bad),
                BadIdPolicy::Error => {} // such a lookup has none
            }
        }
    }

    /// Counts a batch that was refused for a bad id of table number `table`.
    pub fn observe_refusal(&self, table: usize) {
        if let Some(table) = self.tables.get(table) {
            table.bad_ids_refused.inc();
        }
    }

    /// Counts an update.
    pub fn observe_update(&self, stats: &UpdateStats) {
        let counts = stats.rows_updated.iter().zip(&stats.rows_nonfinite);
        for (table, (&updated, &nonfinite)) in self.tables.iter().zip(counts) {
            table.rows_updated.inc_by(updated);
            table.rows_nonfinite.inc_by(nonfinite);
        }
    }

    /// Sets the resident bytes of a table, by its number.
    pub fn set_resident(&self, table: usize, bytes: u64) {
        if let Some(table) = self.tables.get(table) {
            table.resident_bytes.set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }
}

/// Metrics of the ids of dynamic tables.
#[derive(Debug)]
pub struct IdMetrics {
    tables: Vec<TableIds>,
}

#[derive(Debug)]
struct TableIds {
    occurrences_known: IntCounter,
    occurrences_unknown: IntCounter,
    admitted: IntCounter,
    rejected: IntCounter,
    overflow: IntCounter,
    evicted: IntCounter,
    rows_in_use: IntGauge,
}

impl IdMetrics {
    /// Metrics for tables of these names, on `registry` or, when `None`, on no registry.
    ///
    /// Errors: [`crate::EmbeddingError::Metrics`] when the registry has metrics of these names.
    pub fn new<'a>(
        tables: impl IntoIterator<Item = &'a str>,
        registry: Option<&Registry>,
    ) -> Result<Self> {
        let counter = |name: &str, help: &str, labels: &[&str]| {
            IntCounterVec::new(Opts::new(format!("tessera_dynamic_{name}"), help), labels)
        };
        let occurrences = counter(
            "id_occurrences_total",
            "Occurrences of ids in training, by whether they had a row when their batch came.",
            &["table", "what"],
        )?;
        let ids = counter("ids_total", "Ids by what a step did to them.", &["table", "what"])?;
        let rows = IntGaugeVec::new(
            Opts::new("tessera_dynamic_rows_in_use", "Rows that an id has, after the last step."),
            &["table"],
        )?;
        if let Some(registry) = registry {
            registry.register(Box::new(occurrences.clone()))?;
            registry.register(Box::new(ids.clone()))?;
            registry.register(Box::new(rows.clone()))?;
        }
        let tables = tables
            .into_iter()
            .map(|table| TableIds {
                occurrences_known: occurrences.with_label_values(&[table, "known"]),
                occurrences_unknown: occurrences.with_label_values(&[table, "unknown"]),
                admitted: ids.with_label_values(&[table, "admitted"]),
                rejected: ids.with_label_values(&[table, "rejected"]),
                overflow: ids.with_label_values(&[table, "overflow"]),
                evicted: ids.with_label_values(&[table, "evicted"]),
                rows_in_use: rows.with_label_values(&[table]),
            })
            .collect();
        Ok(Self { tables })
    }

    /// Counts what a training step did to the ids of table number `table`.
    pub fn observe(&self, table: usize, stats: &IdMapStats) {
        let Some(metrics) = self.tables.get(table) else { return };
        metrics.occurrences_known.inc_by(stats.hits);
        metrics.occurrences_unknown.inc_by(stats.misses);
        metrics.admitted.inc_by(stats.admitted);
        metrics.rejected.inc_by(stats.rejected);
        metrics.overflow.inc_by(stats.overflow);
        metrics.evicted.inc_by(stats.evicted);
        metrics.rows_in_use.set(i64::try_from(stats.occupancy).unwrap_or(i64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_every_table_are_there_before_anything_happens() {
        let registry = Registry::new();
        let metrics = EmbeddingMetrics::new(["a", "b"], Some(&registry)).unwrap();
        metrics
            .observe_update(&UpdateStats { rows_updated: vec![3, 4], rows_nonfinite: vec![0, 1] });
        metrics.observe_refusal(1);
        let families = registry.gather();
        let names: Vec<&str> = families.iter().map(|family| family.name()).collect();
        assert_eq!(
            names,
            [
                "tessera_embedding_bad_ids_total",
                "tessera_embedding_lookup_seconds",
                "tessera_embedding_resident_bytes",
                "tessera_embedding_rows_nonfinite_total",
                "tessera_embedding_rows_read_total",
                "tessera_embedding_rows_updated_total",
            ]
        );
        assert_eq!(families[0].get_metric().len(), 6);
        let updated: f64 =
            families[5].get_metric().iter().map(|metric| metric.get_counter().get_value()).sum();
        assert_eq!(updated, 7.0);
        assert!(EmbeddingMetrics::new(["a"], Some(&registry)).is_err());
        assert!(EmbeddingMetrics::new(["a"], None).is_ok());
    }
}
