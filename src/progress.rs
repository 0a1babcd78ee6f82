//! Progress of a run: a bar on a terminal, plain lines elsewhere. All of it on standard error.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::console;

/// Where a run stands.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// Steps done.
    pub step: u64,
    /// Epoch, from 0.
    pub epoch: u64,
    /// Samples trained on, over all resumptions.
    pub samples: u64,
    /// Loss of the last step.
    pub loss: f64,
    /// Windowed normalised entropy.
    pub window_ne: Option<f64>,
}

/// Tells how a run goes.
pub struct Progress {
    bar: Option<ProgressBar>,
    /// Whether nothing is told.
    silent: bool,
    log_every: u64,
    samples_total: Option<u64>,
    started: Instant,
    samples_at_start: u64,
    /// Time spent on evaluations and checkpoints, not on training.
    paused: Duration,
}

impl Progress {
    /// Progress of a run that trains on `samples_total` samples if that is known, and had
    /// trained on `samples_at_start` before this process.
    #[must_use]
    pub fn new(samples_total: Option<u64>, samples_at_start: u64, log_every: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = match samples_total {
                Some(total) => ProgressBar::new(total).with_style(bar_style()),
                None => ProgressBar::no_length().with_style(
                    ProgressStyle::with_template("{spinner} {human_pos} samples, {msg}, {elapsed}")
                        .expect("a fixed template"),
                ),
            };
            bar.set_draw_target(ProgressDrawTarget::stderr_with_hz(5));
            bar.set_position(samples_at_start);
            bar.reset_eta();
            bar
        });
        Self {
            bar,
            silent: false,
            log_every: log_every.max(1),
            samples_total,
            started: Instant::now(),
            samples_at_start,
            paused: Duration::ZERO,
        }
    }

    /// Keeps time, and tells nothing.
    #[must_use]
    pub fn silent(mut self) -> Self {
        self.finish();
        (self.bar, self.silent) = (None, true);
        self
    }

    /// Takes a new estimate of the samples of the whole run, for data that does not tell.
    pub fn estimate(&mut self, samples_total: u64) {
        if let (Some(bar), None) = (&self.bar, self.samples_total) {
            bar.set_style(bar_style());
        }
        if let Some(bar) = &self.bar {
            bar.set_length(samples_total);
        }
        self.samples_total = Some(samples_total);
    }

    /// Seconds of training in this process, evaluations and checkpoints not counted.
    #[must_use]
    pub fn training_s(&self) -> f64 {
        self.started.elapsed().saturating_sub(self.paused).as_secs_f64()
    }

    /// Samples a second of this process.
    #[must_use]
    pub fn samples_per_s(&self, samples: u64) -> f64 {
        (samples - self.samples_at_start) as f64 / self.training_s().max(1e-9)
    }

    /// Runs something that is not training.
    pub fn pause<R>(&mut self, work: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = work();
        self.paused += start.elapsed();
        result
    }

    /// After a step.
    pub fn step(&self, at: &Standing) {
        let speed = self.samples_per_s(at.samples);
        let ne = at.window_ne.map_or_else(String::new, |ne| format!(", ne {ne:.4}"));
        if let Some(bar) = &self.bar {
            bar.set_position(at.samples);
            bar.set_message(format!("{speed:.0} samples/s, loss {:.4}{ne}", at.loss));
        } else if !self.silent && at.step.is_multiple_of(self.log_every) {
            let left = self.samples_total.map_or_else(String::new, |total| {
                let seconds = total.saturating_sub(at.samples) as f64 / speed.max(1e-9);
                format!(", {} left", duration(seconds))
            });
            console::tell(format_args!(
                "step {} epoch {}: loss {:.5}{ne}, {} samples, {speed:.0} samples/s{left}",
                at.step, at.epoch, at.loss, at.samples
            ));
        }
    }

    /// A line for people, between steps.
    pub fn say(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| console::tell(line)),
            None if self.silent => {}
            None => console::tell(line),
        }
    }

    /// The end of the run: the bar is taken away.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// A bar of a known length.
fn bar_style() -> ProgressStyle {
    ProgressStyle::with_template(
        "{bar:32} {percent}% {human_pos}/{human_len} samples, {msg}, {eta} left",
    )
    .expect("a fixed template")
}

/// Shows a growing number of samples on a terminal, and nothing elsewhere.
pub fn counting() -> impl FnMut(u64) {
    let bar = if std::io::stderr().is_terminal() {
        ProgressBar::no_length().with_style(
            ProgressStyle::with_template("{spinner} {human_pos} samples, {per_sec}")
                .expect("a fixed template"),
        )
    } else {
        ProgressBar::hidden()
    };
    move |samples| bar.set_position(samples)
}

/// Seconds as `1h02m03s`.
fn duration(seconds: f64) -> String {
    let s = seconds.min(1e9) as u64;
    match (s / 3600, s / 60 % 60, s % 60) {
        (0, 0, s) => format!("{s}s"),
        (0, m, s) => format!("{m}m{s:02}s"),
        (h, m, s) => format!("{h}h{m:02}m{s:02}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_for_people() {
        assert_eq!(duration(5.9), "5s");
        assert_eq!(duration(65.0), "1m05s");
        assert_eq!(duration(3723.0), "1h02m03s");
    }

    #[test]
    fn pauses_are_not_training() {
        let mut progress = Progress::new(None, 10, 1);
        progress.pause(|| std::thread::sleep(Duration::from_millis(30)));
        assert!(progress.training_s() < progress.started.elapsed().as_secs_f64() - 0.025);
        assert!(progress.samples_per_s(20) > 0.0);
    }
}
