//! What the integration tests share: a folder to work in, the program run as a user runs it, and
//! readers for what a run leaves behind.

#![allow(dead_code)] // each test program uses its own part of this

pub mod files;
pub mod golden;
pub mod model;
pub mod shared;

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use serde::Deserialize;
use tempfile::TempDir;

/// How long a test waits for something that a child process will do.
const PATIENCE: Duration = Duration::from_secs(60);

/// How a run of the program ended.
#[derive(Debug)]
pub struct Ran {
    /// Exit code; `None` after a signal that it did not catch.
    pub code: Option<i32>,
    /// Standard output.
    pub stdout: String,
    /// Standard error.
    pub stderr: String,
}

impl Ran {
    /// Asserts exit code `code` and that standard error holds each of `parts`.
    #[track_caller]
    pub fn says(&self, code: i32, parts: &[&str]) -> &Self {
        assert_eq!(self.code, Some(code), "standard error:\n{}", self.stderr);
        for part in parts {
            assert!(self.stderr.contains(part), "`{part}` is missing from:\n{}", self.stderr);
        }
        self
    }
}

/// A folder with the files of one test.
pub struct Project {
    folder: TempDir,
}

impl Project {
    /// A folder with `config.toml`.
    pub fn new(config: &str) -> Self {
        let project = Self { folder: tempfile::tempdir().unwrap() };
        project.write("config.toml", config);
        project
    }

    /// A path in the folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Writes a text file in the folder.
    pub fn write(&self, name: &str, text: &str) {
        std::fs::write(self.path(name), text).unwrap();
    }

    /// The program with the words of `line` as arguments, to be started in the folder.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tessera"));
        command.args(line.split_whitespace()).current_dir(self.folder.path());
        command
    }

    /// Runs the program to its end.
    pub fn run(&self, line: &str) -> Ran {
        let out = self.command(line).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        Ran { code: out.status.code(), stdout: text(&out.stdout), stderr: text(&out.stderr) }
    }

    /// Runs the program, which must succeed.
    #[track_caller]
    pub fn ok(&self, line: &str) -> Ran {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(0), "tessera {line}\n{}", ran.stderr);
        ran
    }

    /// Starts the program in the background.
    pub fn start(&self, line: &str) -> Running {
        let mut child =
            self.command(line).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        let stderr = BufReader::new(child.stderr.take().unwrap());
        Running { child, stderr }
    }

    /// The lines of `steps.jsonl` of a run.
    #[track_caller]
    pub fn steps(&self, run: &str) -> Vec<Line> {
        let text = std::fs::read_to_string(self.path(run).join("steps.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Whole lines of `steps.jsonl` of a run that may still be writing it; 0 without the file.
    pub fn steps_so_far(&self, run: &str) -> usize {
        let text = std::fs::read(self.path(run).join("steps.jsonl")).unwrap_or_default();
        text.iter().filter(|&&byte| byte == b'\n').count()
    }

    /// `summary.json` of a run.
    #[track_caller]
    pub fn summary(&self, run: &str) -> serde_json::Value {
        let text = std::fs::read_to_string(self.path(run).join("summary.json")).unwrap();
        serde_json::from_str(&text).unwrap()
    }

    /// The step that `checkpoints/last` (or `best`) of a run names.
    #[track_caller]
    pub fn pointer(&self, run: &str, name: &str) -> u64 {
        let path = self.path(run).join("checkpoints").join(name);
        let text = std::fs::read_to_string(&path).unwrap();
        text.trim().strip_prefix("step-").expect("names a step's folder").parse().unwrap()
    }

    /// Steps of the checkpoint folders of a run, ascending.
    pub fn checkpoints(&self, run: &str) -> Vec<u64> {
        let Ok(entries) = std::fs::read_dir(self.path(run).join("checkpoints")) else {
            return Vec::new();
        };
        let mut steps: Vec<u64> = entries
            .filter_map(|entry| {
                entry.unwrap().file_name().to_str()?.strip_prefix("step-")?.parse().ok()
            })
            .collect();
        steps.sort_unstable();
        steps
    }

    /// Bytes of `tessera export` of a run or checkpoint folder.
    #[track_caller]
    pub fn export(&self, checkpoint: &str) -> Vec<u8> {
        self.ok(&format!("export --checkpoint {checkpoint} --out exported.safetensors"));
        std::fs::read(self.path("exported.safetensors")).unwrap()
    }

    /// Asserts that a run that failed left nothing that could be taken for a result.
    #[track_caller]
    pub fn wrote_no_state(&self, run: &str) {
        assert_eq!(self.checkpoints(run), [] as [u64; 0], "checkpoints of a run that failed");
        for name in ["checkpoints/last", "checkpoints/best", "summary.json"] {
            assert!(!self.path(run).join(name).exists(), "{name} of a run that failed");
        }
    }

    /// Every file below a folder with its bytes.
    pub fn snapshot(&self, name: &str) -> BTreeMap<PathBuf, Vec<u8>> {
        fn walk(folder: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, files);
                } else {
                    files.insert(path.clone(), std::fs::read(&path).unwrap());
                }
            }
        }
        let mut files = BTreeMap::new();
        walk(&self.path(name), &mut files);
        files
    }
}

/// The parts of a line of `steps.jsonl` that do not depend on the clock.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Line {
    pub step: u64,
    pub epoch: u64,
    pub samples: u64,
    #[serde(default)]
    pub loss: Option<f64>,
    #[serde(default)]
    pub window_ne: Option<f64>,
}

/// The program in the background; ended when dropped.
pub struct Running {
    child: Child,
    stderr: BufReader<std::process::ChildStderr>,
}

impl Running {
    /// Process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until `ready` gives something.
    #[track_caller]
    pub fn wait_for<T>(&mut self, what: &str, mut ready: impl FnMut() -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            if let Some(value) = ready() {
                return value;
            }
            if let Some(status) = self.child.try_wait().unwrap() {
                panic!("{what}: the program ended before, {status}\n{}", self.rest());
            }
            assert!(start.elapsed() < PATIENCE, "{what}: not within {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// The rest of the first line on standard error that starts with `prefix`.
    #[track_caller]
    pub fn line(&mut self, prefix: &str) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let bytes = self.stderr.read_line(&mut line).unwrap();
            assert!(bytes > 0, "no line `{prefix}...` before the program ended");
            if let Some(rest) = line.trim_end().strip_prefix(prefix) {
                return rest.to_owned();
            }
        }
    }

    /// Sends a signal.
    pub fn signal(&self, signal: libc::c_int) {
        let pid = libc::pid_t::try_from(self.child.id()).unwrap();
        // SAFETY: a plain system call on a child that has not been waited for, so that its id is
        // still its own.
        assert_eq!(unsafe { libc::kill(pid, signal) }, 0);
    }

    /// Waits for the end.
    #[track_caller]
    pub fn end(mut self) -> (ExitStatus, String) {
        let stderr = self.rest();
        (self.child.wait().unwrap(), stderr)
    }

    fn rest(&mut self) -> String {
        let mut text = String::new();
        std::io::Read::read_to_string(&mut self.stderr, &mut text).unwrap();
        text
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // A test that failed half-way leaves no process behind; one that has ended is no error.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A tensor of a safetensors file.
pub struct Tensor {
    pub shape: Vec<usize>,
    pub values: Vec<f32>,
}

/// The float tensors of a safetensors file by name.
#[track_caller]
pub fn tensors(bytes: &[u8]) -> BTreeMap<String, Tensor> {
    use safetensors::Dtype;
    let read = |name: &str, view: &safetensors::tensor::TensorView<'_>| {
        let pairs = || view.data().chunks_exact(2).map(|b| [b[0], b[1]]);
        match view.dtype() {
            Dtype::F32 => view
                .data()
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect(),
            Dtype::F16 => pairs().map(|b| half::f16::from_le_bytes(b).to_f32()).collect(),
            Dtype::BF16 => pairs().map(|b| half::bf16::from_le_bytes(b).to_f32()).collect(),
            other => panic!("{name} is {other}"),
        }
    };
    SafeTensors::deserialize(bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .map(|(name, view)| {
            let values = read(&name, &view);
            (name, Tensor { shape: view.shape().to_vec(), values })
        })
        .collect()
}

/// Values of the float32 tensors of a safetensors file whose names end with `end`.
#[track_caller]
pub fn tensors_of(bytes: &[u8], end: &str) -> BTreeMap<String, Vec<f32>> {
    let floats = |data: &[u8]| data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    SafeTensors::deserialize(bytes)
        .unwrap()
        .tensors()
        .into_iter()
        .filter(|(name, _)| name.ends_with(end))
        .map(|(name, view)| (name, floats(view.data())))
        .collect()
}
