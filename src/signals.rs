//! Ctrl-C and SIGTERM: asked for at the end of each step, so that a checkpoint is one moment.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

use crate::{Error, Result};

/// Whether the user asked the run to end.
#[derive(Clone, Debug, Default)]
pub struct Signals {
    /// Number of the last signal; 0 before any.
    last: Arc<AtomicUsize>,
    /// Set by any signal, for readers that a signal must interrupt.
    stop: Arc<AtomicBool>,
}

/// A signal that ends a run in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Ctrl-C.
    Interrupt,
    /// `kill`.
    Terminate,
}

impl Signal {
    /// Its name.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Interrupt => "SIGINT",
            Self::Terminate => "SIGTERM",
        }
    }

    /// The exit code of a process that it ended: 128 plus its number.
    #[must_use]
    pub fn exit_code(self) -> u8 {
        match self {
            Self::Interrupt => 130,
            Self::Terminate => 143,
        }
    }
}

impl Signals {
    /// Catches both signals from now on. A second signal ends the process at once.
    ///
    /// Errors: a system that does not let signals be caught.
    pub fn catch() -> Result<Self> {
        let signals = Self::default();
        let failed =
            |source| Error::Usage(format!("cannot catch signals in this environment: {source}"));
        for signal in [SIGINT, SIGTERM] {
            let code = 128 + signal;
            let caught = Arc::new(false.into());
            // Registered first: the first signal finds the flag unset, the second one ends.
            flag::register_conditional_shutdown(signal, code, Arc::clone(&caught))
                .map_err(failed)?;
            flag::register(signal, caught).map_err(failed)?;
            // Who sees the flag finds the signal.
            flag::register_usize(signal, Arc::clone(&signals.last), signal as usize)
                .map_err(failed)?;
            flag::register(signal, Arc::clone(&signals.stop)).map_err(failed)?;
        }
        Ok(signals)
    }

    /// As if this signal had come to this process: for programs that are asked in another way.
    pub fn raise(&self, signal: Signal) {
        let number = match signal {
            Signal::Interrupt => SIGINT,
            Signal::Terminate => SIGTERM,
        };
        self.last.store(number as usize, Ordering::SeqCst);
        self.stop.store(true, Ordering::SeqCst);
    }

    /// A flag that any signal sets.
    #[must_use]
    pub fn stop(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.stop)
    }

    /// The signal that arrived last, if any did.
    #[must_use]
    pub fn received(&self) -> Option<Signal> {
        match i32::try_from(self.last.load(Ordering::Relaxed)) {
            Ok(SIGINT) => Some(Signal::Interrupt),
            Ok(SIGTERM) => Some(Signal::Terminate),
            _ => None,
        }
    }
}
