//! What of NVIDIA's is on this machine, as a value: nothing here panics or fails.

use super::libraries::{self, Found, cuda_version};
use super::{DRIVER_VERSION_MIN, driver};
use crate::{DeviceError, Result};
use cudarc::driver::sys;

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// The driver and its GPUs.
    pub driver: Driver,
    /// NVRTC, which compiles the kernels, or what to do about it.
    pub nvrtc: std::result::Result<Found, String>,
    /// cuBLASLt, which multiplies matrices, or what to do about it.
    pub cublaslt: std::result::Result<Found, String>,
    /// NCCL, which joins GPUs, or what to do about it.
    pub nccl: std::result::Result<Found, String>,
}

/// The driver, as far as it can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Driver {
    /// There is none.
    Missing {
        /// What to do about it.
        advice: String,
    },
    /// Older than [`DRIVER_VERSION_MIN`].
    TooOld {
        /// The driver.
        found: Found,
    },
    /// It does not start.
    Refuses {
        /// The driver.
        found: Found,
        /// Its code.
        code: u32,
        /// The code's name.
        name: String,
        /// What it says about it.
        text: String,
    },
    /// It shows no GPU.
    NoDevice {
        /// The driver.
        found: Found,
    },
    /// It works.
    Ready {
        /// The driver.
        found: Found,
        /// Its GPUs, by their numbers.
        gpus: Vec<Gpu>,
    },
}

/// A GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// 10 times the major number of its compute capability and the minor one.
    pub capability: u32,
    /// Bytes of its memory.
    pub memory_bytes: u64,
}

impl Probe {
    /// Looks. The driver's initialisation may take a second where GPUs sleep.
    #[must_use]
    pub fn new() -> Self {
        Self {
            driver: Driver::probe(),
            nvrtc: libraries::nvrtc(),
            cublaslt: libraries::cublaslt(),
            nccl: libraries::nccl(),
        }
    }

    /// Whether a [`Cuda`](super::Cuda) can be made and run kernels; if not, why.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`].
    pub fn usable(&self) -> Result<()> {
        self.driver.gpus()?;
        let nvrtc = self.nvrtc.as_ref().map_err(|advice| advice.clone());
        nvrtc.map(drop).map_err(|reason| DeviceError::Unavailable { reason })
    }
}

impl Default for Probe {
    fn default() -> Self {
        Self::new()
    }
}

impl Driver {
    pub(super) fn probe() -> Self {
        let found = match libraries::driver() {
            Ok(found) => found,
            Err(advice) => return Self::Missing { advice },
        };
        let mut version = 0;
        // SAFETY: the library is there, the pointer is to a local.
        let _ = unsafe { sys::cuDriverGetVersion(&mut version) };
        if (version as u32) < DRIVER_VERSION_MIN {
            return Self::TooOld { found };
        }
        // SAFETY: the library is there.
        let result = driver::done(unsafe { sys::cuInit(0) }).and_then(|()| {
            let mut count = 0;
            // SAFETY: as above; the pointer is to a local.
            driver::done(unsafe { sys::cuDeviceGetCount(&mut count) })?;
            (0..count).map(gpu).collect::<std::result::Result<Vec<Gpu>, _>>()
        });
        match result {
            Ok(gpus) if gpus.is_empty() => Self::NoDevice { found },
            Ok(gpus) => Self::Ready { found, gpus },
            Err(sys::CUresult::CUDA_ERROR_NO_DEVICE) => Self::NoDevice { found },
            Err(error) => {
                let (name, text) = driver::words(error);
                Self::Refuses { found, code: error as u32, name, text }
            }
        }
    }

    /// The GPUs that can be used.
    ///
    /// # Errors
    /// [`DeviceError::Unavailable`] with why there are none.
    pub fn gpus(&self) -> Result<&[Gpu]> {
        let reason = match self {
            Self::Ready { gpus, .. } => return Ok(gpus),
            Self::Missing { advice } => advice.clone(),
            Self::TooOld { found } => format!(
                "the NVIDIA driver is too old: it is of CUDA {}, and {} is needed (driver 550 or \
                 newer); update the driver",
                found.version,
                cuda_version(DRIVER_VERSION_MIN)
            ),
            Self::Refuses { code, name, text, .. } => format!(
                "the NVIDIA driver does not start: {code} ({name}): {text}; see whether \
                 `nvidia-smi` works, and restart the machine after an update of the driver"
            ),
            Self::NoDevice { .. } => "the NVIDIA driver shows no GPU; see whether `nvidia-smi` \
                                      lists one, CUDA_VISIBLE_DEVICES hides them, or a container \
                                      was started without them"
                .into(),
        };
        Err(DeviceError::Unavailable { reason })
    }
}

fn gpu(ordinal: i32) -> std::result::Result<Gpu, sys::CUresult> {
    use sys::CUdevice_attribute as Of;
    let (mut device, mut bytes) = (0, 0);
    // SAFETY: the library is there and was initialised; the pointers are to locals.
    driver::done(unsafe { sys::cuDeviceGet(&mut device, ordinal) })?;
    // SAFETY: as above; `device` is one that the driver gave.
    driver::done(unsafe { sys::cuDeviceTotalMem_v2(&mut bytes, device) })?;
    let name = driver::device_name(device)?;
    let major = driver::attribute(device, Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
    let minor = driver::attribute(device, Of::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
    Ok(Gpu { name, capability: major * 10 + minor, memory_bytes: bytes as u64 })
}
