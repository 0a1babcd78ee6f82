//! Queues of work and points in them.

use std::fmt;
use std::sync::Arc;

use super::shared::{Event, Shared, Stream};
use crate::Result;

/// A queue of work on a GPU. It is handed out again when dropped; what was given to it goes on.
pub struct CudaStream {
    pub(super) shared: Arc<Shared>,
    pub(super) index: usize,
    pub(super) raw: Stream,
}

impl CudaStream {
    pub(super) fn take(shared: &Arc<Shared>) -> Result<Self> {
        let (index, raw) = shared.take_stream()?;
        Ok(Self { shared: shared.clone(), index, raw })
    }

    /// The driver's handle, for libraries that put their own work on this stream; it holds as long
    /// as the stream lives.
    #[must_use]
    pub fn handle(&self) -> *mut std::ffi::c_void {
        self.raw.0.cast()
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        self.shared.give_stream(self.index);
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaStream({} of device {})", self.index, self.shared.context.ordinal)
    }
}

/// A point in a queue of work.
pub struct CudaEvent {
    pub(super) shared: Arc<Shared>,
    pub(super) raw: Event,
}

impl CudaEvent {
    pub(super) fn record(stream: &CudaStream) -> Result<Self> {
        let raw = stream.shared.record(stream.raw)?;
        Ok(Self { shared: stream.shared.clone(), raw })
    }

    /// Whether all work before this point is done.
    ///
    /// Errors: what the driver says.
    pub fn reached(&self) -> Result<bool> {
        self.shared.context.bind()?;
        self.shared.reached(self.raw)
    }

    /// Returns when all work before this point is done.
    ///
    /// Errors: what the driver says.
    pub fn synchronize(&self) -> Result<()> {
        self.shared.await_event(self.raw)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        self.shared.give_event(self.raw);
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CudaEvent(device {})", self.shared.context.ordinal)
    }
}
