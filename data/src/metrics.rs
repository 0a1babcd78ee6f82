//! What reading data tells Prometheus.

use prometheus::{Counter, IntCounter, IntCounterVec, IntGauge, Opts, Registry};

use crate::Result;

/// Resolved handles of the metrics of reading.
#[derive(Clone, Debug)]
pub struct DataMetrics {
    /// `tessera_data_samples_total`: samples handed to the consumer in batches.
    pub samples: IntCounter,
    /// `tessera_data_read_bytes_total`: bytes read from files, as stored.
    pub bytes: IntCounter,
    /// `tessera_data_queued_batches`: events that wait in the prefetch queue.
    pub queued: IntGauge,
    /// `tessera_data_wait_seconds_total`: time the consumer waited for a batch.
    pub wait_seconds: Counter,
    /// `tessera_data_bad_input_total{kind, policy}`: bad values met, by what was done.
    bad_input: IntCounterVec,
}

impl DataMetrics {
    /// Handles registered on `registry`.
    ///
    /// Errors: [`DataError::Metrics`](crate::DataError::Metrics) when a name is taken there.
    pub fn register(registry: &Registry) -> Result<Self> {
        let metrics = Self::build()?;
        registry.register(Box::new(metrics.samples.clone()))?;
        registry.register(Box::new(metrics.bytes.clone()))?;
        registry.register(Box::new(metrics.queued.clone()))?;
        registry.register(Box::new(metrics.wait_seconds.clone()))?;
        registry.register(Box::new(metrics.bad_input.clone()))?;
        Ok(metrics)
    }

    /// Handles that belong to no registry.
    #[must_use]
    pub fn unregistered() -> Self {
        Self::build().expect("the names and labels are constants that follow the rules")
    }

    /// Handles for reading that is not training, such as an evaluation: bad values are counted
    /// with those of training, all else by handles that belong to no registry.
    #[must_use]
    pub fn bad_input_only(&self) -> Self {
        Self { bad_input: self.bad_input.clone(), ..Self::unregistered() }
    }

    fn build() -> prometheus::Result<Self> {
        let metrics = Self {
            samples: IntCounter::new(
                "tessera_data_samples_total",
                "Samples read and handed on in batches.",
            )?,
            bytes: IntCounter::new(
                "tessera_data_read_bytes_total",
                "Bytes read from data files, as stored (compressed if they are).",
            )?,
            queued: IntGauge::new(
                "tessera_data_queued_batches",
                "Batches that are read and wait for the trainer.",
            )?,
            wait_seconds: Counter::new(
                "tessera_data_wait_seconds_total",
                "Time that the trainer waited for a batch, in seconds.",
            )?,
            bad_input: IntCounterVec::new(
                Opts::new(
                    "tessera_data_bad_input_total",
                    "Bad values met in the data, by kind and by the policy that was applied.",
                ),
                &["kind", "policy"],
            )?,
        };
        // Both series exist from the start, at zero.
        metrics.dense_not_finite("zero").inc_by(0);
        metrics.dense_not_finite("error").inc_by(0);
        Ok(metrics)
    }

    /// The counter of dense values that are NaN or infinite, by `policy`: `error` or `zero`.
    #[must_use]
    pub fn dense_not_finite(&self, policy: &str) -> IntCounter {
        self.bad_input.with_label_values(&["dense_not_finite", policy])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_metric_is_registered_with_a_help_text() {
        let registry = Registry::new();
        let metrics = DataMetrics::register(&registry).unwrap();
        metrics.samples.inc_by(3);
        let families = registry.gather();
        assert_eq!(families.len(), 5);
        for family in &families {
            assert!(family.name().starts_with("tessera_data_"), "{}", family.name());
            assert!(family.help().len() > 10, "{}", family.name());
        }
        assert!(DataMetrics::register(&registry).is_err(), "the names are taken");
        assert!(DataMetrics::register(&Registry::new()).is_ok(), "another registry is free");
    }
}
