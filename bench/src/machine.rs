//! The machine: what it is, how to empty its caches, and what it did to us meanwhile.

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use tessera_device::{Cpu, Device, HostBuffer};

use crate::Result;

/// What figures were measured on.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Processor's model.
    pub cpu: String,
    /// Architecture.
    pub arch: String,
    /// Cores that the process may use.
    pub cores: usize,
    /// Worker threads.
    pub threads: usize,
    /// Vector instructions in use.
    pub simd: String,
    /// Last-level cache in KiB, if the system tells.
    pub cache_kib: Option<u64>,
    /// Memory in MiB, if the system tells.
    pub memory_mib: Option<u64>,
    /// Setting of transparent huge pages, if the system tells.
    pub huge_pages: Option<String>,
    /// Operating system's release, if the system tells.
    pub kernel: Option<String>,
    /// Processes that wanted a core over the last minute, if the system tells: other people's
    /// work slows ours.
    pub load: Option<f64>,
}

impl Machine {
    /// Looks at the machine that `cpu` runs on.
    #[must_use]
    pub fn look(cpu: &Cpu) -> Self {
        let read = |path: &str| std::fs::read_to_string(path).ok().map(|text| text.trim().into());
        let load: Option<String> = read("/proc/loadavg");
        let huge: Option<String> = read("/sys/kernel/mm/transparent_hugepage/enabled");
        Self {
            cpu: cpu.info().name,
            arch: std::env::consts::ARCH.into(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            threads: cpu.threads(),
            simd: format!("{:?}", cpu.simd()).to_lowercase(),
            cache_kib: cache_kib(),
            memory_mib: meminfo_mib("MemTotal:"),
            huge_pages: huge
                .and_then(|text| Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())),
            kernel: read("/proc/sys/kernel/osrelease"),
            load: load.and_then(|text| text.split_whitespace().next()?.parse().ok()),
        }
    }
}

/// A line of /proc/meminfo in MiB.
fn meminfo_mib(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find(|line| line.starts_with(key))?;
    Some(line.split_whitespace().nth(1)?.parse::<u64>().ok()? >> 10)
}

/// Memory that can be had without swapping, in MiB.
#[must_use]
pub fn available_mib() -> Option<u64> {
    meminfo_mib("MemAvailable:")
}

/// Size of the last-level cache of the first core.
fn cache_kib() -> Option<u64> {
    (0..8)
        .filter_map(|index| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{index}/size");
            let text = std::fs::read_to_string(path).ok()?;
            text.trim().strip_suffix('K')?.parse().ok()
        })
        .max()
}

/// `git describe` of the folder that the program runs in, if that is a repository.
#[must_use]
pub fn git_describe() -> Option<String> {
    let output = std::process::Command::new("git")
        .args(["describe", "--always", "--dirty", "--tags"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}

/// Empties the caches by writing over four times their size.
pub struct Scrubber {
    cpu: Cpu,
    memory: HostBuffer<u64>,
}

impl Scrubber {
    /// Memory for scrubbing.
    ///
    /// Errors: no memory.
    pub fn new(cpu: &Cpu) -> Result<Self> {
        let bytes = (4 * cache_kib().unwrap_or(16 << 10) as usize * 1024).max(64 << 20);
        Ok(Self { cpu: cpu.clone(), memory: cpu.alloc(bytes / size_of::<u64>())? })
    }

    /// Writes over all of it, on all threads.
    pub fn scrub(&mut self) {
        let memory = &mut self.memory;
        self.cpu.run(|| {
            memory.par_chunks_mut(1 << 16).for_each(|chunk| {
                for word in chunk {
                    *word = word.wrapping_add(1);
                }
            });
        });
    }
}

/// What the system says of this process since it began.
fn usage() -> Option<libc::rusage> {
    // SAFETY: rusage is plain numbers, for which all zeros is a value.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: `usage` is a valid rusage for the call to fill.
    (unsafe { libc::getrusage(libc::RUSAGE_SELF, &mut usage) } == 0).then_some(usage)
}

/// Seconds that cores have worked for this process since it began, all threads together.
#[must_use]
pub fn core_seconds() -> f64 {
    let seconds = |time: libc::timeval| time.tv_sec as f64 + time.tv_usec as f64 * 1e-6;
    usage().map_or(0.0, |usage| seconds(usage.ru_utime) + seconds(usage.ru_stime))
}

/// What the system did to the process during a request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Disturbance {
    /// Times a thread of ours lost its core to somebody else.
    pub preemptions: libc::c_long,
    /// Pages that were touched for the first time.
    pub page_faults: libc::c_long,
}

impl Disturbance {
    /// Totals since the process began.
    #[must_use]
    pub fn so_far() -> Self {
        usage().map_or_else(Self::default, |usage| Self {
            preemptions: usage.ru_nivcsw,
            page_faults: usage.ru_minflt + usage.ru_majflt,
        })
    }

    /// What was added since `before`.
    #[must_use]
    pub fn since(self, before: Self) -> Self {
        Self {
            preemptions: self.preemptions - before.preemptions,
            page_faults: self.page_faults - before.page_faults,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described_and_page_faults_are_seen() {
        let cpu = Cpu::new(std::num::NonZeroUsize::new(2)).unwrap();
        let machine = Machine::look(&cpu);
        assert_eq!(machine.threads, 2);
        assert!(machine.cores >= 1 && !machine.cpu.is_empty());
        let before = Disturbance::so_far();
        let touched: Vec<u8> = (0..8 << 20).map(|i| i as u8).collect();
        assert!(std::hint::black_box(touched).len() > 1);
        assert!(Disturbance::so_far().since(before).page_faults > 0);
        Scrubber::new(&cpu).unwrap().scrub();
    }
}
