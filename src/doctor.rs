//! `tessera doctor`: what this machine offers, and why something is not used.

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;
use tessera_device::cuda::{Driver, Found, Probe};
use tessera_device::{Cpu, Device, Simd};

use crate::Result;

/// One finding.
#[derive(Clone, Debug, Serialize)]
pub struct Finding {
    /// What was looked at.
    pub subject: &'static str,
    /// Whether it can be used.
    pub usable: bool,
    /// What was found, or why it cannot be used.
    pub detail: String,
}

/// All findings.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// In the order they are printed.
    pub findings: Vec<Finding>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for finding in &self.findings {
            let mark = if finding.usable { "yes" } else { "no" };
            writeln!(f, "{:<14} {mark:<4} {}", finding.subject, finding.detail)?;
        }
        Ok(())
    }
}

/// Looks at the machine.
///
/// Errors: worker threads that cannot be started.
pub fn examine() -> Result<Report> {
    let info = Cpu::new(None)?.info();
    let simd = Simd::available();
    let found = |subject, usable, detail| Finding { subject, usable, detail };
    let (huge, huge_detail) = huge_pages();
    let (mpi, mpi_detail) = mpi();
    let (ring, ring_detail) = io_uring();
    let mut findings = vec![
        found("cpu", true, format!("{}, {} threads", info.name, info.parallelism)),
        found("simd", simd.len() > 1, format!("{simd:?}; kernels use the last")),
        found("memory", true, memory()),
        found("huge pages", huge, huge_detail),
        found("locked", true, locked_memory()),
        found("io_uring", ring, ring_detail),
        found("mpi", mpi, mpi_detail),
    ];
    findings.extend(nvidia(&Probe::new()));
    Ok(Report { findings })
}

/// NVIDIA's driver, its GPUs, and the libraries that use them.
fn nvidia(probe: &Probe) -> Vec<Finding> {
    let driver = match &probe.driver {
        Driver::Ready { found, gpus } => {
            let many = if gpus.len() == 1 { "GPU" } else { "GPUs" };
            Ok(format!("{}, {} {many}", located("CUDA", found), gpus.len()))
        }
        _ => Err(refusal(probe.driver.gpus())),
    };
    let of = |subject, state: std::result::Result<String, String>| {
        let usable = state.is_ok();
        Finding { subject, usable, detail: state.unwrap_or_else(|why| why) }
    };
    let library = |name, state: &std::result::Result<Found, String>| {
        state.as_ref().map(|found| located(name, found)).map_err(Clone::clone)
    };
    let mut findings = vec![of("nvidia driver", driver)];
    for (ordinal, gpu) in probe.driver.gpus().unwrap_or_default().iter().enumerate() {
        findings.push(of(
            "gpu",
            Ok(format!(
                "{ordinal}: {}, compute capability {}.{}, {:.1} GiB",
                gpu.name,
                gpu.capability / 10,
                gpu.capability % 10,
                gpu.memory_bytes as f64 / f64::from(1 << 30)
            )),
        ));
    }
    findings.push(of("nvrtc", library("NVRTC", &probe.nvrtc)));
    findings.push(of("cublaslt", library("cuBLASLt", &probe.cublaslt)));
    findings.push(of("nccl", library("NCCL", &probe.nccl)));
    let usable = probe.usable().map(|()| "this version's trainer runs on the CPU all the same");
    findings.push(of("gpu kernels", usable.map(str::to_owned).map_err(|error| error.to_string())));
    findings
}

/// A library's name, version and file.
fn located(name: &str, found: &Found) -> String {
    match &found.path {
        Some(path) => format!("{name} {} ({})", found.version, path.display()),
        None => format!("{name} {}", found.version),
    }
}

/// Why there is none of something.
fn refusal<T>(result: std::result::Result<T, tessera_device::DeviceError>) -> String {
    match result {
        Ok(_) => String::new(),
        Err(tessera_device::DeviceError::Unavailable { reason }) => reason,
        Err(error) => error.to_string(),
    }
}

fn io_uring() -> (bool, String) {
    match tessera_cache::log::io_uring_allowed() {
        Ok(()) => (true, "the SSD tier reads with it".into()),
        Err(error) => (false, format!("the kernel refuses it ({error}); the SSD tier reads maps")),
    }
}

fn mpi() -> (bool, String) {
    match (find_library("libmpi.so"), cfg!(feature = "mpi")) {
        (Some(path), true) => (true, format!("built in; {}", path.display())),
        (None, true) => (true, "built in".into()),
        (Some(path), false) => (
            false,
            format!("{} is there; build with --features mpi for ranks on hosts", path.display()),
        ),
        (None, false) => (
            false,
            "no libmpi found, and not built in; ranks on several hosts need an MPI library and \
             a build with --features mpi"
                .into(),
        ),
    }
}

fn memory() -> String {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let gib = |key: &str| {
        let line = text.lines().find(|line| line.starts_with(key))?;
        let kib: f64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib / f64::from(1 << 20))
    };
    match (gib("MemTotal:"), gib("MemAvailable:")) {
        (Some(total), Some(available)) => {
            format!("{total:.1} GiB, {available:.1} GiB available")
        }
        _ => "the system does not tell its size".into(),
    }
}

fn huge_pages() -> (bool, String) {
    let path = "/sys/kernel/mm/transparent_hugepage/enabled";
    match std::fs::read_to_string(path) {
        Ok(text) if text.contains("[never]") => {
            (false, format!("switched off ({path}); lookups of large tables are slower"))
        }
        Ok(text) => (true, format!("transparent huge pages: {}", text.trim())),
        Err(error) => (false, format!("{path}: {error}")),
    }
}

fn locked_memory() -> String {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid rlimit for the call to fill.
    let ok = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) } == 0;
    match (ok, limit.rlim_cur) {
        (false, _) => "the limit on locked memory is not known".into(),
        (true, libc::RLIM_INFINITY) => "no limit on locked memory".into(),
        (true, bytes) => format!("at most {} KiB of memory can be locked", bytes / 1024),
    }
}

/// The first file whose name starts with `name` in the loader's usual folders.
fn find_library(name: &str) -> Option<PathBuf> {
    let given = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let usual = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/lib",
        "/usr/local/lib",
        "/usr/local/cuda/lib64",
    ];
    std::env::split_paths(&given)
        .chain(usual.iter().map(PathBuf::from))
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| {
            path.file_name()
                .and_then(|file| file.to_str())
                .is_some_and(|file| file.starts_with(name))
        })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_has_a_detail() {
        let report = examine().unwrap();
        assert!(report.findings.iter().all(|finding| !finding.detail.is_empty()));
        assert!(report.to_string().contains("threads"));
        assert_eq!(find_library("libno-such-library"), None);
    }
}
