//! Slow links, for tests and demonstrations: a transport behind which messages arrive later.
//!
//! ```text
//! arrival of a message = when it was posted, or the link of its receiver became free
//!                      + bytes / bandwidth + latency
//! ```
//! All groups of a world share a rank's link. The wait is in `receive`, which is on the
//! communicator's own thread: what a rank computes meanwhile hides it, as it would hide a real
//! link's.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::Result;
use crate::transport::{Failure, Message, Stall, Transport};

/// How slow the link into each rank is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinkDelay {
    /// From the last byte's departure to its arrival.
    pub latency: Duration,
    /// Bytes that arrive at a rank a second.
    pub bytes_per_s: f64,
}

/// The link into a rank.
pub(crate) struct Link {
    delay: LinkDelay,
    free_at: Mutex<Instant>,
}

impl Link {
    pub(crate) fn new(delay: LinkDelay) -> Self {
        Self { delay, free_at: Mutex::new(Instant::now()) }
    }

    /// Takes the link for a message; gives when it has arrived.
    fn arrival(&self, posted: Instant, bytes: usize) -> Instant {
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let seconds = bytes as f64 / self.delay.bytes_per_s;
        *free_at = posted.max(*free_at) + Duration::from_secs_f64(seconds);
        *free_at + self.delay.latency
    }
}

/// A transport over a slow link.
pub(crate) struct Delayed {
    pub(crate) inner: Arc<dyn Transport>,
    pub(crate) link: Arc<Link>,
}

impl Transport for Delayed {
    fn post(&self, to: usize, message: Message) -> std::result::Result<(), Stall> {
        self.inner.post(to, message)
    }

    fn receive(&self, from: usize, deadline: Instant) -> std::result::Result<Message, Stall> {
        let message = self.inner.receive(from, deadline)?;
        let arrival = self.link.arrival(message.posted, message.payload.bytes().len());
        std::thread::sleep(arrival.saturating_duration_since(Instant::now()));
        Ok(message)
    }

    fn failure(&self) -> Option<Failure> {
        self.inner.failure()
    }

    fn poison(&self, failure: Failure) {
        self.inner.poison(failure);
    }

    fn group(&self, id: u64, members: &[usize]) -> Result<Arc<dyn Transport>> {
        Ok(Arc::new(Self { inner: self.inner.group(id, members)?, link: Arc::clone(&self.link) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, threads};

    /// Two exchanges on two communicators share the link: the second arrives after the first.
    #[test]
    fn messages_arrive_after_latency_and_bytes_over_bandwidth() {
        let delay = LinkDelay { latency: Duration::from_millis(5), bytes_per_s: 1e6 };
        let options = Options { delay: Some(delay), ..Options::default() };
        let times = threads::run(2, &options, |ranks| {
            let other = ranks.duplicate("other").unwrap();
            // Nobody posts before all have begun to count.
            let start = Instant::now();
            ranks.barrier().wait().unwrap();
            let first = ranks.all_to_all_v(vec![0u8; 40_000], &[20_000, 20_000]);
            let second = other.all_to_all_v(vec![0u8; 40_000], &[20_000, 20_000]);
            first.wait().unwrap();
            let after_first = start.elapsed();
            second.wait().unwrap();
            (after_first, start.elapsed())
        });
        for (first, both) in times.unwrap() {
            // 20 ms of bytes and 5 ms of latency, which the second one's bytes do not wait for.
            assert!(first.as_secs_f64() >= 0.0249, "{first:?}");
            assert!(both.as_secs_f64() >= 0.0449, "{both:?}");
        }
    }
}
