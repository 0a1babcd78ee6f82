//! Sends requests and takes the time: closed loop, or open loop at a rate.
//!
//! ```text
//! closed: prepare | serve        latency = service time
//! open:   request k is due at start + k / rate; it is served when it is due and the one before
//!         it is done; latency = end - due
//! ```
//! In an open loop a stall delays every request that comes due meanwhile, and each of them counts
//! its whole wait: no request is left out because the system was too busy to be asked. Preparing
//! a request (copying its ids, as a sender would) happens before it is due, outside the clock,
//! unless the system is behind.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crate::Result;
use crate::machine::Disturbance;

/// Below this long a wait, the clock is watched instead of sleeping.
const SPIN: Duration = Duration::from_micros(200);

/// Times of the stages of one request, in seconds by name.
pub type Stages = BTreeMap<String, f64>;

/// Something that serves requests one after the other.
pub trait Workload {
    /// Gets request `number` ready, outside the clock.
    ///
    /// Errors: whatever keeps it from being served.
    fn prepare(&mut self, number: usize) -> Result<()>;

    /// Serves the request that was prepared last and gives the times of its stages.
    ///
    /// Errors: whatever went wrong; the measurement ends.
    fn serve(&mut self) -> Result<Stages>;
}

/// How requests come.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Requests before those that count.
    pub warmup: usize,
    /// Requests that count.
    pub iterations: usize,
    /// Requests a second in an open loop; a closed loop when `None`.
    pub rate: Option<f64>,
}

/// One request.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Seconds of serving it.
    pub service_s: f64,
    /// Seconds from when it was due until it was done.
    pub latency_s: f64,
    /// Seconds of each stage.
    pub stages: Stages,
    /// What the system did meanwhile.
    pub disturbance: Disturbance,
}

/// Runs a workload and gives its samples. `before` is called with the number of each request that
/// counts, once it is prepared, outside the clock.
///
/// Errors: what the workload says.
pub fn measure(
    workload: &mut dyn Workload,
    pace: Pace,
    mut before: impl FnMut(usize),
) -> Result<Vec<Sample>> {
    for number in 0..pace.warmup {
        workload.prepare(number)?;
        workload.serve()?;
    }
    let mut samples = Vec::with_capacity(pace.iterations);
    let first = Instant::now();
    for k in 0..pace.iterations {
        workload.prepare(pace.warmup + k)?;
        before(pace.warmup + k);
        let due = pace.rate.map(|rate| first + Duration::from_secs_f64(k as f64 / rate));
        if let Some(due) = due {
            wait_until(due);
        }
        let disturbed = Disturbance::so_far();
        let start = Instant::now();
        let stages = workload.serve()?;
        let end = Instant::now();
        samples.push(Sample {
            service_s: (end - start).as_secs_f64(),
            latency_s: (end - due.unwrap_or(start)).as_secs_f64(),
            stages,
            disturbance: Disturbance::so_far().since(disturbed),
        });
    }
    Ok(samples)
}

fn wait_until(due: Instant) {
    loop {
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return;
        }
        if left > SPIN {
            std::thread::sleep(left - SPIN);
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves at once, but for one request that stalls.
    struct Fake {
        prepared: Option<usize>,
        slow: usize,
        stall: Duration,
    }

    impl Workload for Fake {
        fn prepare(&mut self, number: usize) -> Result<()> {
            self.prepared = Some(number);
            Ok(())
        }

        fn serve(&mut self) -> Result<Stages> {
            if self.prepared.take() == Some(self.slow) {
                std::thread::sleep(self.stall);
            }
            Ok(Stages::new())
        }
    }

    const STALL: Duration = Duration::from_millis(100);

    fn run(rate: Option<f64>) -> Vec<Sample> {
        let mut fake = Fake { prepared: None, slow: 2 + 5, stall: STALL };
        measure(&mut fake, Pace { warmup: 2, iterations: 40, rate }, |_| {}).unwrap()
    }

    #[test]
    fn a_closed_loop_sees_a_stall_once() {
        let samples = run(None);
        assert_eq!(samples.len(), 40);
        assert!(samples[5].latency_s >= 0.1);
        assert!(samples.iter().all(|sample| sample.latency_s == sample.service_s));
        let late = samples.iter().filter(|sample| sample.latency_s > 0.05).count();
        assert_eq!(late, 1);
    }

    #[test]
    fn an_open_loop_counts_a_stall_for_every_request_that_was_due_meanwhile() {
        let samples = run(Some(100.0)); // one every 10 ms
        for (k, sample) in samples.iter().enumerate().skip(5).take(10) {
            // Request k was due 10 (k - 5) ms after the stall began and is done after its end.
            let least = 0.1 - 0.01 * (k - 5) as f64;
            assert!(sample.latency_s >= least - 1e-4, "request {k}: {} s", sample.latency_s);
        }
        assert!(samples[10].service_s < samples[10].latency_s);
        // Requests keep to the rate: the last is due 390 ms after the first.
        assert!(samples[39].latency_s < 0.09, "{}", samples[39].latency_s);
    }
}
