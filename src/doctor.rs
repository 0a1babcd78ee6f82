//! `tessera doctor`: what this machine offers, and why something is not used.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::Serialize;
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
            writeln!(f, "{:<12} {mark:<4} {}", finding.subject, finding.detail)?;
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
    let (gpu, gpu_detail) = gpu();
    let (nccl, nccl_detail) =
        library("libnccl.so", "no libnccl found: GPUs would exchange nothing");
    let (mpi, mpi_detail) = library("libmpi.so", "no libmpi found: ranks on several hosts need it");
    Ok(Report {
        findings: vec![
            found("cpu", true, format!("{}, {} threads", info.name, info.parallelism)),
            found("simd", simd.len() > 1, format!("{simd:?}; kernels use the last")),
            found("memory", true, memory()),
            found("huge pages", huge, huge_detail),
            found("locked", true, locked_memory()),
            found("gpu", gpu, gpu_detail),
            found("nccl", nccl, nccl_detail),
            found("mpi", mpi, mpi_detail),
        ],
    })
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

fn gpu() -> (bool, String) {
    let driver = find_library("libcuda.so");
    let nodes = (0..16).filter(|n| Path::new(&format!("/dev/nvidia{n}")).exists()).count();
    match (driver, nodes) {
        (None, _) => (false, "no libcuda found: no NVIDIA driver is installed".into()),
        (Some(path), 0) => {
            (false, format!("{} is there, but no device node /dev/nvidia0", path.display()))
        }
        (Some(path), n) => (
            false,
            format!(
                "{n} device nodes and {}, but this version trains on the CPU only",
                path.display()
            ),
        ),
    }
}

fn library(name: &str, absent: &str) -> (bool, String) {
    match find_library(name) {
        Some(path) => (
            false,
            format!("{} is there, but this version trains on one rank only", path.display()),
        ),
        None => (false, absent.into()),
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
