//! NVIDIA's libraries: whether each can be loaded, where it is, and which version it has.
//!
//! The binding of the driver and of NVRTC panics when a library is missing; nobody calls it before
//! a function of this module said that it is there.

use std::ffi::{CStr, c_int, c_void};
use std::path::{Path, PathBuf};

use cudarc::{cublaslt, driver, nvrtc};
use libloading::Library;

/// A library that was loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// Its version, as it says itself.
    pub version: String,
    /// Its file, where the system tells.
    pub path: Option<PathBuf>,
}

/// The driver, or what to do about it.
pub(super) fn driver() -> Result<Found, String> {
    // SAFETY: loads the library, which runs its initialisers, as using it does.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err("no NVIDIA driver: libcuda.so.1 cannot be loaded; \
                    install NVIDIA's driver for this machine's GPU"
            .into());
    }
    let mut version: c_int = 0;
    // SAFETY: the library is there, the pointer is to a local.
    match super::driver::done(unsafe { driver::sys::cuDriverGetVersion(&mut version) }) {
        Ok(()) => {
            // SAFETY: the library is there.
            let path = unsafe { path_of(driver::sys::culib(), b"cuDriverGetVersion\0") };
            Ok(Found { version: cuda_version(version as u32), path })
        }
        Err(error) => Err(format!("the NVIDIA driver does not tell its version: {error:?}")),
    }
}

/// The compiler of kernels, or what to do about it.
pub(super) fn nvrtc() -> Result<Found, String> {
    let present = || {
        // SAFETY: loads the library, which runs its initialisers, as using it does.
        unsafe { nvrtc::sys::is_culib_present() }
    };
    if !(present() || from_toolkit("libnvrtc.so.12") && present()) {
        return Err("no NVRTC, which compiles the kernels: libnvrtc.so.12 cannot be loaded; \
                    `pip install nvidia-cuda-nvrtc-cu12` and add its folder nvidia/cuda_nvrtc/lib \
                    to LD_LIBRARY_PATH, or install the CUDA toolkit"
            .into());
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is there, the pointers are to locals.
    let result = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) };
    if result != nvrtc::sys::nvrtcResult::NVRTC_SUCCESS {
        return Err(format!("NVRTC does not tell its version: {result:?}"));
    }
    // SAFETY: the library is there.
    let path = unsafe { path_of(nvrtc::sys::culib(), b"nvrtcVersion\0") };
    Ok(Found { version: format!("{major}.{minor}"), path })
}

/// The matrix products of the towers, or what to do about it.
pub(super) fn cublaslt() -> Result<Found, String> {
    let present = || {
        // SAFETY: loads the library, which runs its initialisers, as using it does.
        unsafe { cublaslt::sys::is_culib_present() }
    };
    if !(present() || from_toolkit("libcublasLt.so.12") && present()) {
        return Err("no cuBLASLt: libcublasLt.so.12 cannot be loaded; \
                    `pip install nvidia-cublas-cu12` and add its folder nvidia/cublas/lib to \
                    LD_LIBRARY_PATH, or install the CUDA toolkit"
            .into());
    }
    // SAFETY: the library is there.
    let (version, path) = unsafe {
        let version = cublaslt::sys::cublasLtGetVersion() as u64;
        (version, path_of(cublaslt::sys::culib(), b"cublasLtGetVersion\0"))
    };
    Ok(Found { version: packed_version(version, 10_000), path })
}

/// The collectives between GPUs, or what to do about it.
pub(super) fn nccl() -> Result<Found, String> {
    let missing = || {
        "no NCCL: neither libnccl.so.2 nor libnccl.so can be loaded; `pip install \
         nvidia-nccl-cu12` and add its folder nvidia/nccl/lib to LD_LIBRARY_PATH"
            .to_owned()
    };
    // SAFETY: loads the library, which runs its initialisers, as using it does.
    let library = unsafe { Library::new("libnccl.so.2").or_else(|_| Library::new("libnccl.so")) };
    let library = library.map_err(|_| missing())?;
    let name = b"ncclGetVersion\0";
    let mut version: c_int = 0;
    // SAFETY: the function's type is that of NCCL's header, in all versions; the pointer is to a
    // local.
    let (result, path) = unsafe {
        let ask = library.get::<unsafe extern "C" fn(*mut c_int) -> c_int>(name);
        let ask = ask.map_err(|error| format!("libnccl is not NCCL: {error}"))?;
        (ask(&mut version), path_of(&library, name))
    };
    if result != 0 {
        return Err(format!("NCCL does not tell its version: error {result}"));
    }
    // Two digits a part since 2.9; one before.
    let base = if version >= 10_000 { 10_000 } else { 1_000 };
    Ok(Found { version: packed_version(version as u64, base), path })
}

/// CUDA's version numbers: 1000 times the major one and 10 times the minor one.
pub(super) fn cuda_version(version: u32) -> String {
    format!("{}.{}", version / 1000, version % 1000 / 10)
}

/// A version of three parts, the last two of two digits.
fn packed_version(version: u64, base: u64) -> String {
    format!("{}.{}.{}", version / base, version % base / 100, version % 100)
}

/// Loads a library from the toolkit's usual folder, so that it is found by its name from then on.
fn from_toolkit(name: &str) -> bool {
    let homes = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(std::env::var_os);
    homes.map(PathBuf::from).chain([PathBuf::from("/usr/local/cuda")]).any(|home| {
        let path = home.join("lib64").join(name);
        // SAFETY: loads the library, which runs its initialisers, as using it does.
        path.exists() && unsafe { Library::new(path) }.map(std::mem::forget).is_ok()
    })
}

/// The file that a library's function comes from.
///
/// # Safety
/// The name ends with a zero byte.
unsafe fn path_of(library: &Library, function: &[u8]) -> Option<PathBuf> {
    // SAFETY: the symbol's address is taken, and nothing called; `info` is a local that the call
    // fills, with strings that live as long as the library.
    unsafe {
        let symbol = library.get::<*const c_void>(function).ok()?;
        let address = symbol.try_as_raw_ptr()?;
        let mut info: libc::Dl_info = std::mem::zeroed();
        if libc::dladdr(address, &mut info) == 0 || info.dli_fname.is_null() {
            return None;
        }
        let path = Path::new(CStr::from_ptr(info.dli_fname).to_str().ok()?);
        Some(std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_read_as_people_write_them() {
        assert_eq!(cuda_version(12_080), "12.8");
        assert_eq!(cuda_version(11_040), "11.4");
        assert_eq!(packed_version(120_804, 10_000), "12.8.4");
        assert_eq!(packed_version(22_605, 10_000), "2.26.5");
        assert_eq!(packed_version(2_708, 1_000), "2.7.8");
    }
}
