//! Kernels: found in a source that was compiled for the device, and launched with arguments whose
//! number and sizes are those that the compiled kernel has.

use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use cudarc::driver::sys::{self, CUresult};

use super::shared::{Shared, lock};
use super::{CudaBuffer, CudaStream, PinnedBytes};
use crate::{DeviceError, Element, Result};

/// The text of a `.cu` file, embedded by the crate that it belongs to.
///
/// Its kernels are `extern "C" __global__`. It may include `tessera.cuh`, which this crate brings,
/// and its own `headers`.
#[derive(Clone, Copy, Debug)]
pub struct KernelSource {
    /// The name of its file without `.cu`; different sources have different names.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// Headers that it includes: name in the include, and text.
    pub headers: &'static [(&'static str, &'static str)],
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Blocks, in x, y and z. With none in any direction nothing runs.
    pub grid: [u32; 3],
    /// Threads of a block, in x, y and z.
    pub block: [u32; 3],
    /// Bytes of shared memory a block, beside what the kernel declares.
    pub shared_bytes: u32,
}

impl Launch {
    /// Blocks of `threads`, enough of them for a thread for each of `items`.
    #[must_use]
    pub fn for_items(items: u64, threads: u32) -> Self {
        let blocks = items.div_ceil(u64::from(threads.max(1)));
        // What exceeds 32 bits is refused by the launch.
        Self::blocks(u32::try_from(blocks).unwrap_or(u32::MAX), threads)
    }

    /// `blocks` blocks of `threads`, in one direction.
    #[must_use]
    pub fn blocks(blocks: u32, threads: u32) -> Self {
        Self { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
    }
}

/// Shared memory that a launch may ask for without telling the driver before.
const SHARED_BYTES_FREE: u32 = 48 << 10;

/// A compiled source on a device.
pub(super) struct Module {
    pub(super) raw: sys::CUmodule,
    source: KernelSource,
    functions: Mutex<HashMap<String, Arc<Function>>>,
}

struct Function {
    raw: sys::CUfunction,
    name: String,
    /// Bytes of each argument.
    arguments: Vec<usize>,
    shared_bytes: AtomicU32,
}

// SAFETY: handles may be used by any thread whose context is theirs; the driver locks.
unsafe impl Send for Module {}
// SAFETY: as above.
unsafe impl Sync for Module {}
// SAFETY: as above.
unsafe impl Send for Function {}
// SAFETY: as above.
unsafe impl Sync for Function {}

/// A kernel on one device.
#[derive(Clone)]
pub struct Kernel {
    shared: Arc<Shared>,
    function: Arc<Function>,
}

/// Finds a kernel, compiling its source if that was not done.
pub(super) fn find(shared: &Arc<Shared>, source: &KernelSource, name: &str) -> Result<Kernel> {
    let module = {
        // Held while compiling: who wants the same source waits for it.
        let mut modules = lock(&shared.modules);
        match modules.get(source.name) {
            Some(module) => module.clone(),
            None => {
                let module = Arc::new(Module::load(shared, source)?);
                modules.insert(source.name, module.clone());
                module
            }
        }
    };
    debug_assert!(module.source.text == source.text, "two sources are called {}", source.name);
    let function = module.function(shared, name)?;
    Ok(Kernel { shared: shared.clone(), function })
}

impl Module {
    fn load(shared: &Shared, source: &KernelSource) -> Result<Self> {
        let image = shared.compiler.compile(source, shared.capability)?;
        shared.context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the image is one that the compiler made, with a zero byte at its end; the driver
        // copies it.
        let result = unsafe { sys::cuModuleLoadData(&mut raw, image.as_ptr().cast()) };
        shared.context.check("load compiled kernels", result)?;
        Ok(Self { raw, source: *source, functions: Mutex::default() })
    }

    fn function(&self, shared: &Shared, name: &str) -> Result<Arc<Function>> {
        let mut functions = lock(&self.functions);
        if let Some(function) = functions.get(name) {
            return Ok(function.clone());
        }
        let missing =
            || DeviceError::NoKernel { source_name: self.source.name, function: name.to_owned() };
        let text = CString::new(name).map_err(|_| missing())?;
        shared.context.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the module is loaded, the name ends with a zero byte.
        match unsafe { sys::cuModuleGetFunction(&mut raw, self.raw, text.as_ptr()) } {
            CUresult::CUDA_ERROR_NOT_FOUND => return Err(missing()),
            result => shared.context.check("find a kernel", result)?,
        }
        let mut arguments = Vec::new();
        loop {
            let (mut offset, mut bytes) = (0, 0);
            // SAFETY: the function is loaded, the pointers are to locals.
            let result =
                unsafe { sys::cuFuncGetParamInfo(raw, arguments.len(), &mut offset, &mut bytes) };
            // Beyond the last argument.
            if result == CUresult::CUDA_ERROR_INVALID_VALUE {
                break;
            }
            shared.context.check("ask for a kernel's arguments", result)?;
            arguments.push(bytes);
        }
        let function = Arc::new(Function {
            raw,
            name: name.to_owned(),
            arguments,
            shared_bytes: AtomicU32::new(SHARED_BYTES_FREE),
        });
        functions.insert(name.to_owned(), function.clone());
        Ok(function)
    }
}

impl Kernel {
    /// A call of this kernel on `stream`, which has no arguments yet.
    pub fn on<'a>(&'a self, stream: &'a CudaStream) -> Call<'a> {
        let same = Arc::ptr_eq(&self.shared, &stream.shared);
        let ordinal = self.shared.context.ordinal;
        let fault = (!same).then_some(DeviceError::Foreign { operation: "launch", ordinal });
        Call { kernel: self, stream, values: Vec::new(), places: Vec::new(), fault }
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({})", self.function.name)
    }
}

/// A kernel, a stream and arguments in the kernel's order.
#[must_use = "a call does nothing until it is launched"]
pub struct Call<'a> {
    kernel: &'a Kernel,
    stream: &'a CudaStream,
    values: Vec<u128>,
    /// Where each argument begins in `values`, and its bytes.
    places: Vec<(usize, usize)>,
    /// The first thing that went wrong.
    fault: Option<DeviceError>,
}

impl<'a> Call<'a> {
    /// A plain value, such as a number or a struct of numbers.
    pub fn value<T: Element>(mut self, value: T) -> Self {
        let bytes = size_of::<T>();
        self.places.push((self.values.len(), bytes));
        let place = self.values.len();
        self.values.resize(place + bytes.div_ceil(size_of::<u128>()).max(1), 0);
        bytemuck::cast_slice_mut(&mut self.values[place..])[..bytes]
            .copy_from_slice(bytemuck::bytes_of(&value));
        self
    }

    /// A buffer that the kernel reads: `const T*`.
    pub fn read<T: Element>(self, buffer: &'a CudaBuffer<T>) -> Self {
        let address = buffer.address(self.stream);
        self.address(address)
    }

    /// A buffer that the kernel writes, or reads and writes: `T*`.
    pub fn write<T: Element>(self, buffer: &'a mut CudaBuffer<T>) -> Self {
        let address = buffer.address(self.stream);
        self.address(address)
    }

    /// A buffer from element `at` on, which the kernel reads: `const T*`.
    pub fn read_from<T: Element>(self, buffer: &'a CudaBuffer<T>, at: usize) -> Self {
        let address = address_from(buffer, at, self.stream);
        self.address(address)
    }

    /// A buffer from element `at` on, which the kernel writes, or reads and writes: `T*`.
    pub fn write_from<T: Element>(self, buffer: &'a mut CudaBuffer<T>, at: usize) -> Self {
        let address = address_from(buffer, at, self.stream);
        self.address(address)
    }

    /// Page-locked host memory from byte `at` on, which the kernel reads: a pointer.
    pub fn read_pinned(self, bytes: &'a PinnedBytes, at: usize) -> Self {
        let address = pinned_from(bytes, at, self.stream);
        self.address(address)
    }

    /// Page-locked host memory from byte `at` on, which the kernel writes: a pointer.
    pub fn write_pinned(self, bytes: &'a mut PinnedBytes, at: usize) -> Self {
        let address = pinned_from(bytes, at, self.stream);
        self.address(address)
    }

    fn address(mut self, address: Result<u64>) -> Self {
        match address {
            Ok(address) => self.value(address),
            Err(error) => {
                self.fault = self.fault.or(Some(error));
                self.value(0u64)
            }
        }
    }

    /// Queues the kernel; nothing for a grid without blocks.
    ///
    /// Errors: what went wrong with an argument; [`DeviceError::Launch`] for arguments or a shape
    /// that do not fit; what the driver says.
    ///
    /// # Safety
    /// The arguments have the kernel's types, in its order, and the kernel stays inside of what
    /// they point to, with these numbers of threads. Buffers that it writes are given by the
    /// methods that take them as `&mut`, or their addresses are used as if they were.
    pub unsafe fn launch(self, launch: Launch) -> Result<()> {
        let Self { kernel, stream, mut values, places, fault } = self;
        fault.map_or(Ok(()), Err)?;
        let function = &*kernel.function;
        check_arguments(function, &places)?;
        check_shape(&kernel.shared, function, launch)?;
        if launch.grid.contains(&0) {
            return Ok(());
        }
        let context = &kernel.shared.context;
        context.bind()?;
        if launch.shared_bytes > function.shared_bytes.load(Ordering::Relaxed) {
            use sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MOST;
            // SAFETY: the function is loaded.
            let result =
                unsafe { sys::cuFuncSetAttribute(function.raw, MOST, launch.shared_bytes as i32) };
            context.check("ask for shared memory", result)?;
            function.shared_bytes.fetch_max(launch.shared_bytes, Ordering::Relaxed);
        }
        let base = values.as_mut_ptr();
        let mut pointers: Vec<*mut c_void> = places
            .iter()
            // SAFETY: each place is inside of `values`.
            .map(|&(place, _)| unsafe { base.add(place) }.cast())
            .collect();
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // SAFETY: the arguments' number and sizes are the kernel's, the driver copies them before
        // it returns; their meaning is the caller's word. Memory lives until the stream is done.
        let result = unsafe {
            sys::cuLaunchKernel(
                function.raw,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                launch.shared_bytes,
                stream.raw.0,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        context.check("launch a kernel", result)?;
        kernel.shared.launches.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

fn address_from<T: Element>(buffer: &CudaBuffer<T>, at: usize, on: &CudaStream) -> Result<u64> {
    buffer.check(at, 0)?;
    Ok(buffer.address(on)? + (at * size_of::<T>()) as u64)
}

fn pinned_from(bytes: &PinnedBytes, at: usize, stream: &CudaStream) -> Result<u64> {
    if at > bytes.len() {
        return Err(DeviceError::CopyOutOfBounds { at, end: at, len: bytes.len() });
    }
    Ok(bytes.address(stream)? + at as u64)
}

fn check_arguments(function: &Function, places: &[(usize, usize)]) -> Result<()> {
    let refuse = |reason| Err(DeviceError::Launch { function: function.name.clone(), reason });
    let (given, wanted) = (places.len(), function.arguments.len());
    if given != wanted {
        return refuse(format!("{given} arguments are given, it has {wanted}"));
    }
    for (i, (&(_, given), &wanted)) in places.iter().zip(&function.arguments).enumerate() {
        if given != wanted {
            return refuse(format!("argument {i} has {wanted} bytes, {given} are given"));
        }
    }
    Ok(())
}

/// The limits of all devices from compute capability 8.0 on; what a kernel needs beyond them is the
/// driver's to refuse.
fn check_shape(shared: &Shared, function: &Function, launch: Launch) -> Result<()> {
    let Launch { grid, block, shared_bytes } = launch;
    let threads: u64 = block.iter().map(|&side| u64::from(side)).product();
    let refuse = |reason| Err(DeviceError::Launch { function: function.name.clone(), reason });
    if block.contains(&0) || threads > 1024 || block[2] > 64 {
        return refuse(format!("a block of {block:?} threads: 1 to 1024, at most 64 in z"));
    }
    if grid[0] > i32::MAX as u32 || grid[1] > 65_535 || grid[2] > 65_535 {
        return refuse(format!("a grid of {grid:?} blocks: at most [2^31 - 1, 65535, 65535]"));
    }
    if shared_bytes > shared.shared_bytes_max {
        let most = shared.shared_bytes_max;
        return refuse(format!("{shared_bytes} bytes of shared memory a block, of {most}"));
    }
    Ok(())
}
