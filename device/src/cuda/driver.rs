//! The driver's context of one GPU: every call to the driver runs under it, and every refusal
//! becomes a [`DeviceError`] with the driver's words.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::{self, CUresult};

use crate::{DeviceError, Result};

/// A GPU's primary context, retained.
pub(super) struct Context {
    pub(super) ordinal: u32,
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: a context's handle may be used by any thread; the driver locks.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// The context of GPU `ordinal`. The driver is there, and was initialised.
    pub(super) fn retain(ordinal: u32) -> Result<Self> {
        let refuse = |operation| move |error| driver_error(ordinal, operation, error);
        let mut device = 0;
        // SAFETY: the pointer is to a local.
        done(unsafe { sys::cuDeviceGet(&mut device, ordinal as c_int) })
            .map_err(refuse("find the device"))?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: as above; `device` is one that the driver gave.
        done(unsafe { sys::cuDevicePrimaryCtxRetain(&mut raw, device) })
            .map_err(refuse("retain the context"))?;
        Ok(Self { ordinal, device, raw })
    }

    /// Makes this the calling thread's context.
    pub(super) fn bind(&self) -> Result<()> {
        let mut current = std::ptr::null_mut();
        // SAFETY: the pointer is to a local.
        self.check("ask for the context", unsafe { sys::cuCtxGetCurrent(&mut current) })?;
        if current != self.raw {
            // SAFETY: the context is retained as long as `self` lives.
            self.check("bind the context", unsafe { sys::cuCtxSetCurrent(self.raw) })?;
        }
        Ok(())
    }

    /// A refusal of the driver as an error.
    pub(super) fn check(&self, operation: &'static str, result: CUresult) -> Result<()> {
        done(result).map_err(|error| driver_error(self.ordinal, operation, error))
    }

    /// A number that the driver knows of the device.
    pub(super) fn attribute(&self, of: sys::CUdevice_attribute) -> Result<u32> {
        let refuse = |error| driver_error(self.ordinal, "ask for an attribute", error);
        attribute(self.device, of).map_err(refuse)
    }

    /// The device's name.
    pub(super) fn name(&self) -> Result<String> {
        device_name(self.device)
            .map_err(|error| driver_error(self.ordinal, "ask for the name", error))
    }

    /// Free and total bytes of the device's memory.
    pub(super) fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the pointers are to locals.
        self.check("ask for the memory", unsafe { sys::cuMemGetInfo_v2(&mut free, &mut total) })?;
        Ok((free, total))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`. A refusal leaves nothing to do.
        let _ = unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// A number that the driver knows of a device, which it gave.
pub(super) fn attribute(
    device: sys::CUdevice,
    of: sys::CUdevice_attribute,
) -> std::result::Result<u32, CUresult> {
    let mut value = 0;
    // SAFETY: the pointer is to a local; `device` is one that the driver gave.
    done(unsafe { sys::cuDeviceGetAttribute(&mut value, of, device) })?;
    Ok(value.max(0) as u32)
}

/// The name of a device, which the driver gave.
pub(super) fn device_name(device: sys::CUdevice) -> std::result::Result<String, CUresult> {
    let mut text = [0 as c_char; 256];
    let len = text.len() as c_int - 1;
    // SAFETY: the pointer and length are of a local array.
    done(unsafe { sys::cuDeviceGetName(text.as_mut_ptr(), len, device) })?;
    // SAFETY: the driver wrote at most all but the last byte, which is 0.
    Ok(unsafe { CStr::from_ptr(text.as_ptr()) }.to_string_lossy().into_owned())
}

/// The driver's result as a `Result`.
pub(super) fn done(result: CUresult) -> std::result::Result<(), CUresult> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(result) }
}

/// A refusal as an error.
pub(super) fn driver_error(ordinal: u32, operation: &'static str, error: CUresult) -> DeviceError {
    let (name, text) = words(error);
    DeviceError::Driver { ordinal, operation, code: error as u32, name, text }
}

/// Name and description of a result.
pub(super) fn words(error: CUresult) -> (String, String) {
    let ask = |question: unsafe fn(CUresult, *mut *const c_char) -> CUresult| {
        let mut text = std::ptr::null();
        // SAFETY: the pointer is to a local; the driver gives a string that lives for ever.
        match unsafe { question(error, &mut text) } {
            CUresult::CUDA_SUCCESS if !text.is_null() => {
                // SAFETY: as above.
                unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
            }
            _ => "the driver has no word for it".to_owned(),
        }
    };
    (ask(sys::cuGetErrorName), ask(sys::cuGetErrorString))
}
