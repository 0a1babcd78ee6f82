//! For the tests of all crates: a GPU, or its stand-in, where there is one.

use super::{Cuda, CudaOptions, Probe};

/// Set by who runs the tests where a GPU, or its stand-in, must be found.
pub const EXPECTED: &str = "TESSERA_CUDA_EXPECTED";

/// GPU 0 with buffers of exact sizes, or none where there is none: the test says then that it was
/// skipped.
///
/// # Panics
/// When there is none, or it does not work, though [`EXPECTED`] is set in the environment.
#[must_use]
pub fn cuda() -> Option<Cuda> {
    let options = CudaOptions { cached_bytes_max: 0, ..CudaOptions::default() };
    cuda_with(options)
}

/// As [`cuda`], with options.
///
/// # Panics
/// As there.
#[must_use]
pub fn cuda_with(options: CudaOptions) -> Option<Cuda> {
    let made = Probe::new().usable().and_then(|()| Cuda::with_options(0, options));
    match made {
        Ok(cuda) => Some(cuda),
        Err(error) if std::env::var_os(EXPECTED).is_some() => {
            panic!("{EXPECTED} is set, and there is no GPU: {error}")
        }
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}
