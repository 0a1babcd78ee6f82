//! Reads ahead: a stream on a thread of its own behind a bounded queue.

use std::any::Any;
use std::num::NonZeroUsize;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, bounded};

use crate::stream::{BatchStream, Event};
use crate::{DataError, DataMetrics, Result};

/// Events that are read ahead at the most: the queue's slots are allocated at once, and a consumer
/// that needs a longer queue is slower than its data anyway.
const DEPTH_MAX: usize = 1024;

/// Time between two looks at the stop condition of a waiting consumer.
const STOP_POLL: Duration = Duration::from_millis(50);

/// How long a thread that is no longer needed may take to end what it is reading.
const GRACE: Duration = Duration::from_secs(2);

/// What came of waiting for an event.
#[derive(Clone, Debug, PartialEq)]
pub enum Waited {
    /// The next event.
    Event(Event),
    /// The last epoch is over.
    End,
    /// The consumer gave up; nothing is lost, and waiting again goes on where it was.
    Stopped,
}

/// A [`BatchStream`] that runs ahead by at most a given number of events.
///
/// The events are those of the stream, in its order. Dropping it stops the thread, which ends
/// after the batch (or piece of a shuffle window) that it is reading, and waits for it, but not for
/// long: a file system that hangs, or a pipe into which nobody writes, must not keep a run that has
/// failed elsewhere from ending.
pub struct Prefetch {
    /// `None` once the owner lets go.
    events: Option<Receiver<Result<Event>>>,
    thread: Option<JoinHandle<()>>,
    cancel: Arc<AtomicBool>,
    metrics: DataMetrics,
    failed: Option<String>,
}

impl Prefetch {
    /// Starts reading ahead by up to `depth` events (1024 at the most).
    ///
    /// Errors: [`DataError::Io`] when the system gives no thread.
    pub fn new(mut stream: BatchStream, depth: NonZeroUsize, metrics: DataMetrics) -> Result<Self> {
        let cancel = Arc::new(AtomicBool::new(false));
        stream.cancel_with(Arc::clone(&cancel));
        Self::start(move || stream.next_event(), depth, metrics, cancel)
    }

    fn start(
        mut next: impl FnMut() -> Result<Option<Event>> + Send + 'static,
        depth: NonZeroUsize,
        metrics: DataMetrics,
        cancel: Arc<AtomicBool>,
    ) -> Result<Self> {
        let (sender, events) = bounded(depth.get().min(DEPTH_MAX));
        let work = move || {
            while let Some(event) = next().transpose() {
                let last = event.is_err();
                if sender.send(event).is_err() || last {
                    break;
                }
            }
        };
        let thread = std::thread::Builder::new()
            .name("tessera-data".to_owned())
            .spawn(work)
            .map_err(DataError::io("start a thread for", "prefetch".as_ref()))?;
        Ok(Self { events: Some(events), thread: Some(thread), cancel, metrics, failed: None })
    }

    /// The next event, waiting for it if need be; `None` after the last epoch.
    ///
    /// Errors: those of the stream; [`DataError::Panicked`] if its thread panicked;
    /// [`DataError::Stopped`] after an earlier error.
    pub fn next_event(&mut self) -> Result<Option<Event>> {
        match self.next_event_unless(|| false)? {
            Waited::Event(event) => Ok(Some(event)),
            // Who never gives up is not stopped.
            Waited::End | Waited::Stopped => Ok(None),
        }
    }

    /// The next event, waiting for it as long as `stop` says no, which is asked every 50 ms. An
    /// event that is there already is handed out without asking.
    ///
    /// Errors: as [`Prefetch::next_event`].
    pub fn next_event_unless(&mut self, stop: impl Fn() -> bool) -> Result<Waited> {
        if let Some(earlier) = &self.failed {
            return Err(DataError::Stopped { earlier: earlier.clone() });
        }
        let Some(events) = &self.events else { return Ok(Waited::End) };
        let began = Instant::now();
        let received = loop {
            match events.recv_timeout(STOP_POLL) {
                Err(RecvTimeoutError::Timeout) if !stop() => {}
                received => break received,
            }
        };
        self.metrics.wait_seconds.inc_by(began.elapsed().as_secs_f64());
        self.metrics.queued.set(events.len() as i64);
        let result = match received {
            Ok(event) => event.map(Waited::Event),
            Err(RecvTimeoutError::Timeout) => Ok(Waited::Stopped),
            // The thread has let go of the queue: it is at its end.
            Err(RecvTimeoutError::Disconnected) => self.join().map(|()| Waited::End),
        };
        if let Err(error) = &result {
            self.failed = Some(error.to_string());
        }
        result
    }

    /// Events that are read and wait to be taken.
    #[must_use]
    pub fn queued(&self) -> usize {
        self.events.as_ref().map_or(0, Receiver::len)
    }

    /// Lets the thread go.
    fn stop(&mut self) {
        self.cancel.store(true, Ordering::Relaxed);
        self.events = None;
        self.metrics.queued.set(0);
    }

    /// Waits for the thread to end.
    fn join(&mut self) -> Result<()> {
        self.stop();
        match self.thread.take().map(JoinHandle::join) {
            Some(Err(panic)) => Err(DataError::Panicked { message: panic_message(&*panic) }),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        self.stop();
        let began = Instant::now();
        let is_busy = |thread: &JoinHandle<()>| !thread.is_finished();
        while self.thread.as_ref().is_some_and(is_busy) && began.elapsed() < GRACE {
            std::thread::sleep(Duration::from_millis(1));
        }
        // One that is still reading owns what it works with, and ends at the event that it has
        // nobody to give to. A panic was reported by the thread itself.
    }
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|text| (*text).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Position;

    fn end(epoch: u64) -> Event {
        Event::EpochEnd { epoch, after: Position { epoch: epoch + 1, sample: 0 } }
    }

    fn start(next: impl FnMut() -> Result<Option<Event>> + Send + 'static) -> Prefetch {
        let depth = NonZeroUsize::new(2).unwrap();
        let cancel = Arc::new(AtomicBool::new(false));
        Prefetch::start(next, depth, DataMetrics::unregistered(), cancel).unwrap()
    }

    #[test]
    fn a_panic_comes_out_as_an_error_after_what_was_read() {
        let mut given = 0;
        let mut prefetch = start(move || {
            assert!(given < 1, "the disk is on fire");
            given += 1;
            Ok(Some(end(0)))
        });
        assert_eq!(prefetch.next_event().unwrap(), Some(end(0)));
        let error = prefetch.next_event().unwrap_err();
        assert!(
            matches!(&error, DataError::Panicked { message } if message == "the disk is on fire")
        );
        let error = prefetch.next_event().unwrap_err().to_string();
        assert!(
            error.contains("stopped after an earlier error: the data thread panicked"),
            "{error}"
        );
    }

    #[test]
    fn an_error_ends_the_stream() {
        let mut prefetch = start(|| Err(DataError::spec("broken")));
        assert_eq!(prefetch.next_event().unwrap_err().to_string(), "broken");
        assert!(matches!(prefetch.next_event(), Err(DataError::Stopped { .. })));
    }

    #[test]
    fn the_queue_is_bounded_and_dropping_it_ends_the_thread() {
        let (sender, made) = crossbeam::channel::unbounded();
        let mut epoch = 0;
        let mut prefetch = start(move || {
            epoch += 1;
            sender.send(epoch).unwrap();
            Ok(Some(end(epoch)))
        });
        assert_eq!(prefetch.next_event().unwrap(), Some(end(1)));
        // One is taken, two fill the queue, and a fourth waits in the thread's hands.
        for expected in 1..=4 {
            assert_eq!(made.recv_timeout(Duration::from_secs(10)).unwrap(), expected);
        }
        assert!(made.recv_timeout(Duration::from_millis(50)).is_err());
        assert_eq!(prefetch.queued(), 2);
        drop(prefetch);
        // The thread is gone, and with it the sender.
        assert!(made.recv_timeout(Duration::from_secs(10)).is_err());
        assert!(matches!(made.try_recv(), Err(crossbeam::channel::TryRecvError::Disconnected)));
    }

    /// Once, dropping it waited for as long as the file system pleased.
    #[test]
    fn a_reader_that_hangs_is_left_behind() {
        let (go, gate) = crossbeam::channel::unbounded::<()>();
        let (sender, made) = crossbeam::channel::unbounded();
        let prefetch = start(move || {
            let awoken = gate.recv().is_ok();
            sender.send(awoken).unwrap();
            Ok(Some(end(0)))
        });
        let (dropped, told) = crossbeam::channel::unbounded();
        std::thread::spawn(move || {
            drop(prefetch);
            dropped.send(()).unwrap();
        });
        told.recv_timeout(Duration::from_secs(60)).expect("it waits for the reader");
        // It was still reading, and ends when it has read.
        assert!(made.try_recv().is_err());
        go.send(()).unwrap();
        assert!(made.recv().unwrap());
        assert!(made.recv().is_err());
    }

    #[test]
    fn a_waiting_consumer_gives_up_and_may_come_back() {
        let (go, gate) = crossbeam::channel::unbounded::<()>();
        let mut left = 2;
        let mut prefetch = start(move || {
            if left == 1 {
                gate.recv().unwrap();
            }
            left -= 1;
            Ok((left >= 0).then(|| end(0)))
        });
        // What is there is handed out, whatever the consumer says.
        while prefetch.queued() == 0 {
            std::thread::yield_now();
        }
        assert_eq!(prefetch.next_event_unless(|| true).unwrap(), Waited::Event(end(0)));
        assert_eq!(prefetch.next_event_unless(|| true).unwrap(), Waited::Stopped);
        let asked = std::cell::Cell::new(0);
        let third_time = || {
            asked.set(asked.get() + 1);
            asked.get() == 3
        };
        assert_eq!(prefetch.next_event_unless(third_time).unwrap(), Waited::Stopped);
        assert_eq!(asked.get(), 3);
        go.send(()).unwrap();
        assert_eq!(prefetch.next_event_unless(|| false).unwrap(), Waited::Event(end(0)));
        assert_eq!(prefetch.next_event_unless(|| false).unwrap(), Waited::End);
        assert_eq!(prefetch.next_event_unless(|| true).unwrap(), Waited::End);
    }

    /// Once, a depth of billions asked for all its slots at once and took the process down.
    #[test]
    fn a_huge_depth_is_cut() {
        let cancel = Arc::new(AtomicBool::new(false));
        let metrics = DataMetrics::unregistered();
        let next = || Ok(Some(end(0)));
        let prefetch = Prefetch::start(next, NonZeroUsize::MAX, metrics, cancel).unwrap();
        assert_eq!(prefetch.events.as_ref().unwrap().capacity(), Some(DEPTH_MAX));
    }

    #[test]
    fn after_the_end_there_is_nothing() {
        let mut left = 1;
        let mut prefetch = start(move || {
            left -= 1;
            Ok((left >= 0).then(|| end(0)))
        });
        assert_eq!(prefetch.next_event().unwrap(), Some(end(0)));
        assert_eq!(prefetch.next_event().unwrap(), None);
        assert_eq!(prefetch.next_event().unwrap(), None);
    }
}
