//! The crate's Prometheus metrics: one set a process, resolved per communicator when it is made.

use std::fmt;
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{Counter, CounterVec, IntCounter, IntCounterVec, Opts, Registry};

use crate::Result;
use crate::group::Group;
use crate::header::Kind;

/// Metrics of all communicators that are made with it. Ranks are numbers in the world; the ranks
/// that are threads of one process share one set.
#[derive(Clone)]
pub struct CommMetrics {
    bytes: IntCounterVec,
    seconds: CounterVec,
    wait: CounterVec,
}

const DIRECTIONS: [&str; 2] = ["send", "receive"];

impl CommMetrics {
    /// Metrics on `registry`.
    ///
    /// Errors: [`crate::CommError::Metrics`] when the registry has metrics of these names.
    pub fn new(registry: &Registry) -> Result<Self> {
        let metrics = Self::default();
        let all: [Box<dyn Collector>; 3] = [
            Box::new(metrics.bytes.clone()),
            Box::new(metrics.seconds.clone()),
            Box::new(metrics.wait.clone()),
        ];
        for collector in all {
            registry.register(collector)?;
        }
        Ok(metrics)
    }

    /// The counters of one communicator.
    pub(crate) fn handles(&self, group: &Group) -> Handles {
        let rank = group.world_rank().to_string();
        let kinds = Kind::ALL
            .map(|kind| DIRECTIONS.map(|direction| [&rank, kind.name(), direction]))
            .map(|both| {
                both.map(|labels| {
                    (self.bytes.with_label_values(&labels), self.seconds.with_label_values(&labels))
                })
            });
        let wait = group
            .ranks
            .iter()
            .map(|peer| {
                (*peer != group.world_rank())
                    .then(|| self.wait.with_label_values(&[&group.name, &rank, &peer.to_string()]))
            })
            .collect();
        Handles { kinds, wait }
    }
}

impl Default for CommMetrics {
    /// Metrics on no registry.
    fn default() -> Self {
        let opts = |name: &str, help: &str| Opts::new(format!("tessera_comm_{name}"), help);
        let labels = ["rank", "collective", "direction"];
        let valid = "the names and labels are valid";
        Self {
            bytes: IntCounterVec::new(
                opts(
                    "bytes_total",
                    "Bytes of payload that a rank exchanged with its peers, by collective.",
                ),
                &labels,
            )
            .expect(valid),
            seconds: CounterVec::new(
                opts(
                    "seconds_total",
                    "Time that a rank's communicators were busy with a collective, in seconds.",
                ),
                &labels,
            )
            .expect(valid),
            wait: CounterVec::new(
                opts(
                    "wait_seconds_total",
                    "Time that a rank's communicator waited for a peer's message, in seconds.",
                ),
                &["communicator", "rank", "peer"],
            )
            .expect(valid),
        }
    }
}

impl fmt::Debug for CommMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("CommMetrics")
    }
}

/// Counters of one communicator of one rank.
pub(crate) struct Handles {
    kinds: [[(IntCounter, Counter); 2]; Kind::ALL.len()],
    wait: Vec<Option<Counter>>,
}

impl Handles {
    /// Counts an operation: bytes and times, sent and received.
    pub(crate) fn observe(&self, kind: Kind, bytes: [u64; 2], times: [Duration; 2]) {
        let both = self.kinds[kind as usize].iter().zip(bytes.into_iter().zip(times));
        for ((byte_counter, second_counter), (bytes, time)) in both {
            byte_counter.inc_by(bytes);
            second_counter.inc_by(time.as_secs_f64());
        }
    }

    /// Counts a wait for a peer, by its rank in the group.
    pub(crate) fn observe_wait(&self, peer: usize, time: Duration) {
        if let Some(counter) = &self.wait[peer] {
            counter.inc_by(time.as_secs_f64());
        }
    }
}
