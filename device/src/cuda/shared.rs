//! What all handles of one device share: context, streams, events, pools of memory, kernels.
//!
//! Streams and events are made once and handed out again: a dropped stream goes to whoever asks
//! next, behind what is queued on it, so that a device never has more of them than lived at once.
//! Each stream has a number below 64; the streams that used some memory are the bits of one word.

use std::collections::HashMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys::{self, CUresult};

use super::compile::Compiler;
use super::driver::Context;
use super::kernel::Module;
use super::pool::{Kind, Pool};
use super::{CudaOptions, CudaStats};
use crate::{DeviceError, Result};

/// The most streams of a device.
pub(super) const STREAMS_MAX: usize = 64;

/// The stream that fills fresh memory.
pub(super) const FILL_STREAM: usize = 0;

/// Idle events that are kept.
const EVENTS_KEPT_MAX: usize = 4096;

pub(super) struct Shared {
    pub(super) context: Context,
    pub(super) name: String,
    pub(super) capability: u32,
    pub(super) multiprocessors: u32,
    pub(super) shared_bytes_max: u32,
    streams: Mutex<Streams>,
    events: Mutex<Vec<Event>>,
    pub(super) device_pool: Pool,
    pub(super) pinned_pool: Pool,
    pub(super) compiler: Compiler,
    pub(super) modules: Mutex<HashMap<&'static str, Arc<Module>>>,
    pub(super) launches: AtomicU64,
}

/// A driver's event, not in use by anyone else.
#[derive(Clone, Copy)]
pub(super) struct Event(pub(super) sys::CUevent);

/// A driver's stream.
#[derive(Clone, Copy)]
pub(super) struct Stream(pub(super) sys::CUstream);

// SAFETY: handles may be used by any thread whose context is theirs; the driver locks.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Event {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

struct Streams {
    all: Vec<Stream>,
    idle: Vec<usize>,
}

/// A lock whose owner may have panicked: what it guards is changed only in whole.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// The parts of GPU `ordinal`. The driver is there, and was initialised.
    pub(super) fn new(ordinal: u32, options: CudaOptions) -> Result<Arc<Self>> {
        use sys::CUdevice_attribute as Of;
        let context = Context::retain(ordinal)?;
        context.bind()?;
        let major = context.attribute(Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = context.attribute(Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let shared = Self {
            name: context.name()?,
            capability: major * 10 + minor,
            multiprocessors: context.attribute(Of::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            shared_bytes_max: context
                .attribute(Of::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
            context,
            streams: Mutex::new(Streams { all: Vec::new(), idle: Vec::new() }),
            events: Mutex::new(Vec::new()),
            device_pool: Pool::new(Kind::Device, options.cached_bytes_max),
            pinned_pool: Pool::new(Kind::Pinned, options.pinned_bytes_max),
            compiler: Compiler::new(options.cubin_dir),
            modules: Mutex::new(HashMap::new()),
            launches: AtomicU64::new(0),
        };
        let (fill, _) = shared.take_stream()?;
        debug_assert_eq!(fill, FILL_STREAM);
        Ok(Arc::new(shared))
    }

    pub(super) fn stats(&self) -> CudaStats {
        let (device, pinned) = (self.device_pool.stats(), self.pinned_pool.stats());
        CudaStats {
            live_bytes: device.live_bytes,
            live_bytes_peak: device.live_bytes_peak,
            cached_bytes: device.cached_bytes,
            pinned_bytes: pinned.live_bytes + pinned.cached_bytes,
            allocations: device.made,
            reuses: device.reused,
            kernels_compiled: self.compiler.compiled(),
            kernels_from_disk: self.compiler.read_back(),
            launches: self.launches.load(Ordering::Relaxed),
        }
    }

    /// A stream that nobody uses, and its number.
    pub(super) fn take_stream(&self) -> Result<(usize, Stream)> {
        let mut streams = lock(&self.streams);
        if let Some(index) = streams.idle.pop() {
            return Ok((index, streams.all[index]));
        }
        let ordinal = self.context.ordinal;
        if streams.all.len() == STREAMS_MAX {
            return Err(DeviceError::TooManyStreams { ordinal, most: STREAMS_MAX - 1 });
        }
        self.context.bind()?;
        let mut raw = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as c_uint;
        // SAFETY: the pointer is to a local, and the context is bound.
        self.context.check("make a stream", unsafe { sys::cuStreamCreate(&mut raw, flags) })?;
        streams.all.push(Stream(raw));
        Ok((streams.all.len() - 1, Stream(raw)))
    }

    /// Takes a stream back.
    pub(super) fn give_stream(&self, index: usize) {
        lock(&self.streams).idle.push(index);
    }

    /// The stream of a number.
    pub(super) fn stream(&self, index: usize) -> Stream {
        lock(&self.streams).all[index]
    }

    /// An event at the present end of a stream.
    pub(super) fn record(&self, stream: Stream) -> Result<Event> {
        self.context.bind()?;
        let idle = lock(&self.events).pop();
        let event = match idle {
            Some(event) => event,
            None => {
                let mut raw = std::ptr::null_mut();
                let flags = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as c_uint;
                // SAFETY: the pointer is to a local, and the context is bound.
                let result = unsafe { sys::cuEventCreate(&mut raw, flags) };
                self.context.check("make an event", result)?;
                Event(raw)
            }
        };
        // SAFETY: both handles are live ones of this context.
        let result = unsafe { sys::cuEventRecord(event.0, stream.0) };
        self.context.check("record an event", result).inspect_err(|_| self.give_event(event))?;
        Ok(event)
    }

    /// Takes an event back. Waits for it that are queued keep the moment they were queued for.
    pub(super) fn give_event(&self, event: Event) {
        let mut events = lock(&self.events);
        if events.len() < EVENTS_KEPT_MAX {
            events.push(event);
        } else if self.context.bind().is_ok() {
            // SAFETY: a live event that nobody else has.
            let _ = unsafe { sys::cuEventDestroy_v2(event.0) };
        }
    }

    /// Makes later work of a stream wait for an event.
    pub(super) fn wait(&self, stream: Stream, event: Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: both handles are live ones of this context.
        let result = unsafe { sys::cuStreamWaitEvent(stream.0, event.0, 0) };
        self.context.check("wait for an event", result)
    }

    /// Whether an event was reached. The context is bound.
    pub(super) fn reached(&self, event: Event) -> Result<bool> {
        // SAFETY: a live event of this context.
        match unsafe { sys::cuEventQuery(event.0) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            result => self.context.check("ask for an event", result).map(|()| true),
        }
    }

    /// Returns when an event was reached.
    pub(super) fn await_event(&self, event: Event) -> Result<()> {
        self.context.bind()?;
        // SAFETY: a live event of this context.
        self.context.check("await an event", unsafe { sys::cuEventSynchronize(event.0) })
    }

    /// Returns when all work of a stream is done.
    pub(super) fn synchronize(&self, stream: Stream) -> Result<()> {
        self.context.bind()?;
        // SAFETY: a live stream of this context.
        self.context.check("await a stream", unsafe { sys::cuStreamSynchronize(stream.0) })
    }

    /// Events at the ends of the streams whose bits are set.
    pub(super) fn record_all(&self, used: u64) -> Result<Vec<Event>> {
        let bits = (0..STREAMS_MAX).filter(|index| used >> index & 1 == 1);
        let mut events = Vec::with_capacity(used.count_ones() as usize);
        for index in bits {
            match self.record(self.stream(index)) {
                Ok(event) => events.push(event),
                Err(error) => {
                    events.into_iter().for_each(|event| self.give_event(event));
                    return Err(error);
                }
            }
        }
        Ok(events)
    }
}

impl Drop for Shared {
    /// Frees everything, once all work is done. No refusal can be told; a broken context takes
    /// its memory with it.
    fn drop(&mut self) {
        if self.context.bind().is_err() {
            return;
        }
        // SAFETY: the context is bound, no handle of it is used after this, and each is destroyed
        // once.
        unsafe {
            let _ = sys::cuCtxSynchronize();
            self.device_pool.free_all();
            self.pinned_pool.free_all();
            for module in lock(&self.modules).drain() {
                let _ = sys::cuModuleUnload(module.1.raw);
            }
            for event in lock(&self.events).drain(..) {
                let _ = sys::cuEventDestroy_v2(event.0);
            }
            for stream in lock(&self.streams).all.drain(..) {
                let _ = sys::cuStreamDestroy_v2(stream.0);
            }
        }
    }
}
