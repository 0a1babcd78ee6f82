//! The folder of a run: `config.toml`, `steps.jsonl`, `summary.json`, `checkpoints/`.

use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::checkpoint::{Best, LAST};
use crate::evaluation::Evaluation;
use crate::{Error, Result};

/// One line of `steps.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StepLine {
    /// Step, from 1.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Samples trained on so far, this step's included.
    pub samples: u64,
    /// Mean loss over the global batch before the update; absent in a step that was skipped
    /// because its loss was not finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Normalised entropy over the last steps; absent while one class is missing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_ne: Option<f64>,
    /// Milliseconds from the end of the step before to the end of this one.
    pub step_ms: f64,
    /// Milliseconds of each stage.
    pub stages: BTreeMap<String, f64>,
}

/// `summary.json`.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Steps done, over all resumptions.
    pub steps: u64,
    /// Samples trained on.
    pub samples: u64,
    /// Samples a second of this process, evaluations and checkpoints not counted.
    pub samples_per_s: f64,
    /// The evaluation at the end; null without evaluation data or after an interruption.
    pub eval: Option<Evaluation>,
    /// The best evaluation, when a metric is followed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best: Option<Best>,
    /// Expected AUC of the planted teacher (synthetic data).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling_auc: Option<f64>,
    /// Why the run ended: `done`, `early_stop`, `SIGINT` or `SIGTERM`.
    pub ended: &'static str,
    /// Seed.
    pub seed: u64,
    /// Ranks.
    pub ranks: u64,
    /// Kind of device.
    pub device: String,
    /// Version of the program.
    pub version: &'static str,
}

/// Name of the note that names the weights file a run started from.
const INIT: &str = "init.txt";

/// An open run folder.
pub struct RunDir {
    path: PathBuf,
    steps: BufWriter<File>,
    /// Held until this value is dropped, or the process ends.
    _lock: File,
}

impl RunDir {
    /// Checks that `path` can be a new run's folder: it must not exist yet, or be empty.
    ///
    /// Errors: a folder in use ([`Error::Usage`]).
    pub fn check_new(path: &Path) -> Result<()> {
        let read = |source| Error::Read { path: path.into(), source };
        if path.exists() && (!path.is_dir() || fs::read_dir(path).map_err(read)?.next().is_some()) {
            return Err(Error::Usage(format!(
                "--out {}: not an empty folder; choose another, or --resume that run",
                path.display()
            )));
        }
        Ok(())
    }

    /// The folder `path` for a new run.
    ///
    /// Errors: as [`Self::check_new`], or a folder that cannot be made.
    pub fn create(path: &Path) -> Result<Self> {
        Self::check_new(path)?;
        Self::open(path, None, || Ok(()))
    }

    /// The folder of a run that goes on after step `step`: later lines of `steps.jsonl` are cut,
    /// after `before_cut` has moved the pointers to checkpoints. In that order a crash between
    /// the two leaves lines that the next resumption cuts, never a hole.
    ///
    /// Errors: a folder in use by another process, or one that cannot be written.
    pub fn resume(path: &Path, step: u64, before_cut: impl FnOnce() -> Result<()>) -> Result<Self> {
        Self::open(path, Some(step), before_cut)
    }

    /// Whether `path` is a run's folder in which no checkpoint was written yet.
    #[must_use]
    pub fn is_begun(path: &Path) -> bool {
        path.join("steps.jsonl").is_file() && !path.join("checkpoints").join(LAST).exists()
    }

    /// Takes the folder for this process; a second run in it is refused until it ends.
    fn lock(path: &Path) -> Result<File> {
        let file = path.join(".lock");
        let failed = |source| Error::Write { path: file.clone(), source };
        let lock = File::create(&file).map_err(failed)?;
        match lock.try_lock() {
            Ok(()) => Ok(lock),
            Err(TryLockError::WouldBlock) => Err(Error::Usage(format!(
                "{}: another process is training in this folder",
                path.display()
            ))),
            Err(TryLockError::Error(source)) => Err(failed(source)),
        }
    }

    fn open(
        path: &Path,
        after: Option<u64>,
        before_cut: impl FnOnce() -> Result<()>,
    ) -> Result<Self> {
        let wrote = |path: &Path| {
            let path = path.to_path_buf();
            move |source| Error::Write { path, source }
        };
        let checkpoints = path.join("checkpoints");
        fs::create_dir_all(&checkpoints).map_err(wrote(&checkpoints))?;
        let lock = Self::lock(path)?;
        before_cut()?;
        let file = path.join("steps.jsonl");
        let mut steps = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&file)
            .map_err(wrote(&file))?;
        let keep = match after {
            Some(step) => length_to(&steps, step).map_err(wrote(&file))?,
            None => 0,
        };
        steps.set_len(keep).map_err(wrote(&file))?;
        steps.seek(SeekFrom::End(0)).map_err(wrote(&file))?;
        Ok(Self { path: path.into(), steps: BufWriter::new(steps), _lock: lock })
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The folder of its checkpoints.
    #[must_use]
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }

    /// Notes the weights file that this run started from, for a resumption before its first
    /// checkpoint.
    ///
    /// Errors: a failed write.
    pub fn started_from(&self, weights: &Path) -> Result<()> {
        let weights = std::path::absolute(weights)
            .map_err(|source| Error::Read { path: weights.into(), source })?;
        self.replace(INIT, weights.as_os_str().as_encoded_bytes())
    }

    /// The weights file that the run in `path` started from, if it did.
    ///
    /// Errors: a note that cannot be read.
    pub fn weights_of(path: &Path) -> Result<Option<PathBuf>> {
        let note = path.join(INIT);
        match fs::read_to_string(&note) {
            Ok(text) => Ok(Some(text.into())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(Error::Read { path: note, source }),
        }
    }

    /// Appends a line to `steps.jsonl`.
    ///
    /// Errors: a failed write.
    pub fn step(&mut self, line: &StepLine) -> Result<()> {
        let mut text = serde_json::to_vec(line).expect("a line has string keys only");
        text.push(b'\n');
        self.steps.write_all(&text).map_err(|source| self.failed("steps.jsonl", source))
    }

    /// Hands lines written so far to the system, so that readers see them.
    ///
    /// Errors: a failed write.
    pub fn flush(&mut self) -> Result<()> {
        self.steps.flush().map_err(|source| self.failed("steps.jsonl", source))
    }

    /// Brings the lines written so far to stable storage.
    ///
    /// Errors: a failed write.
    pub fn sync(&mut self) -> Result<()> {
        self.flush()?;
        let synced = self.steps.get_ref().sync_data();
        synced.map_err(|source| self.failed("steps.jsonl", source))
    }

    /// Writes `config.toml`.
    ///
    /// Errors: a failed write.
    pub fn config(&self, resolved: &toml::Table) -> Result<()> {
        self.replace("config.toml", resolved.to_string().as_bytes())
    }

    /// Writes `summary.json`.
    ///
    /// Errors: a failed write.
    pub fn summary(&self, summary: &Summary) -> Result<()> {
        let mut text = serde_json::to_vec_pretty(summary).expect("a summary has string keys only");
        text.push(b'\n');
        self.replace("summary.json", &text)
    }

    /// Writes a file beside the old one and switches.
    fn replace(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let part = self.path.join(format!(".{name}.part"));
        fs::write(&part, bytes)
            .and_then(|()| fs::rename(&part, self.path.join(name)))
            .map_err(|source| self.failed(name, source))
    }

    fn failed(&self, name: &str, source: std::io::Error) -> Error {
        Error::Write { path: self.path.join(name), source }
    }
}

/// Bytes of the lines of steps up to `step`. A line that was cut by a crash ends the reading: a
/// checkpoint is written only after the lines before it.
fn length_to(file: &File, step: u64) -> std::io::Result<u64> {
    let mut reader = BufReader::new(file);
    let mut length = 0;
    let mut line = Vec::new();
    loop {
        line.clear();
        let bytes = reader.read_until(b'\n', &mut line)?;
        let parsed = serde_json::from_slice::<StepLine>(&line);
        match parsed {
            Ok(parsed) if parsed.step <= step && line.ends_with(b"\n") => length += bytes as u64,
            _ => return Ok(length),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(step: u64) -> StepLine {
        StepLine {
            step,
            epoch: 0,
            samples: step * 8,
            loss: Some(0.1 + 0.2),
            window_ne: None,
            step_ms: 1.5,
            stages: BTreeMap::from([("read".to_owned(), 0.5)]),
        }
    }

    #[test]
    fn a_new_run_needs_an_empty_folder() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        RunDir::create(&path).unwrap();
        assert!(matches!(RunDir::create(&path), Err(Error::Usage(_))));
        let empty = folder.path().join("empty");
        fs::create_dir(&empty).unwrap();
        RunDir::create(&empty).unwrap();
    }

    #[test]
    fn resuming_cuts_later_and_torn_lines() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = RunDir::create(folder.path()).unwrap();
        for step in 1..=5 {
            run.step(&line(step)).unwrap();
        }
        run.flush().unwrap();
        drop(run);
        let path = folder.path().join("steps.jsonl");
        let mut torn = OpenOptions::new().append(true).open(&path).unwrap();
        torn.write_all(b"{\"step\":6,\"ep").unwrap();
        let mut run = RunDir::resume(folder.path(), 3, || Ok(())).unwrap();
        run.step(&line(4)).unwrap();
        run.flush().unwrap();
        let text = fs::read_to_string(&path).unwrap();
        let steps: Vec<StepLine> =
            text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(steps, [1, 2, 3, 4].map(line));
    }
}
