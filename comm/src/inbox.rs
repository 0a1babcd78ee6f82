//! Where the messages for one rank of one group arrive.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use crate::transport::{Failure, Message, Stall};

/// A queue per sender under one lock, with one thread that takes from them.
pub(crate) struct Inbox {
    state: Mutex<State>,
    arrived: Condvar,
}

struct State {
    from: Vec<Sender>,
    awaited: Option<usize>,
}

#[derive(Default)]
struct Sender {
    messages: VecDeque<Message>,
    gone: Option<String>,
}

impl Inbox {
    /// An inbox for messages of `size` senders.
    pub(crate) fn new(size: usize) -> Self {
        let from = (0..size).map(|_| Sender::default()).collect();
        Self { state: Mutex::new(State { from, awaited: None }), arrived: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts a message in.
    pub(crate) fn deliver(&self, from: usize, message: Message) {
        let mut state = self.lock();
        state.from[from].messages.push_back(message);
        let awaited = state.awaited == Some(from);
        drop(state);
        // Only for the sender that is waited for: a wake-up costs more than a message.
        if awaited {
            self.arrived.notify_one();
        }
    }

    /// Notes that nothing more will come from a rank.
    pub(crate) fn depart(&self, from: usize, reason: &str) {
        self.lock().from[from].gone.get_or_insert_with(|| reason.to_owned());
        self.arrived.notify_one();
    }

    /// Why a rank is gone, if it is.
    pub(crate) fn gone(&self, from: usize) -> Option<String> {
        self.lock().from[from].gone.clone()
    }

    /// Makes the receiver look at the world's failure.
    pub(crate) fn wake(&self) {
        // A receiver between its look at the failure and its wait holds the lock.
        drop(self.lock());
        self.arrived.notify_one();
    }

    /// Forgets all messages.
    pub(crate) fn clear(&self) {
        let mut state = self.lock();
        let messages: Vec<_> =
            state.from.iter_mut().map(|sender| std::mem::take(&mut sender.messages)).collect();
        drop(state);
        drop(messages);
    }

    /// The next message of a sender; see [`crate::transport::Transport::receive`].
    pub(crate) fn receive(
        &self,
        from: usize,
        deadline: Instant,
        failure: &OnceLock<Failure>,
    ) -> Result<Message, Stall> {
        let mut state = self.lock();
        loop {
            if let Some(message) = state.from[from].messages.pop_front() {
                return Ok(message);
            }
            if let Some(failure) = failure.get() {
                return Err(Stall::WorldFailed(failure.clone()));
            }
            if let Some(reason) = &state.from[from].gone {
                return Err(Stall::Gone(reason.clone()));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Stall::TimeLimit);
            }
            state.awaited = Some(from);
            state =
                self.arrived.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
            state.awaited = None;
        }
    }
}
