//! Normalised entropy over the last steps of training.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use crate::evaluation::normalized_entropy;

/// Sums of the last `capacity` steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Window {
    capacity: usize,
    /// (sum of weighted log losses, sum of weighted labels, sum of weights) of each step.
    steps: VecDeque<[f64; 3]>,
}

impl Window {
    /// An empty window over `capacity` steps.
    #[must_use]
    pub fn new(capacity: usize) -> Self {
        Self { capacity: capacity.max(1), steps: VecDeque::new() }
    }

    /// The same steps seen through a window of `capacity`.
    #[must_use]
    pub fn resized(mut self, capacity: usize) -> Self {
        self.capacity = capacity.max(1);
        while self.steps.len() > self.capacity {
            self.steps.pop_front();
        }
        self
    }

    /// Adds a step's sums; the oldest step leaves a full window.
    pub fn add(&mut self, logloss: f64, labels: f64, weight: f64) {
        if self.steps.len() == self.capacity {
            self.steps.pop_front();
        }
        self.steps.push_back([logloss, labels, weight]);
    }

    /// Normalised entropy over the window; absent while one class is missing.
    #[must_use]
    pub fn ne(&self) -> Option<f64> {
        let [logloss, labels, weight] = self
            .steps
            .iter()
            .fold([0.0; 3], |sum, step| [sum[0] + step[0], sum[1] + step[1], sum[2] + step[2]]);
        if weight > 0.0 { normalized_entropy(logloss / weight, labels / weight) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_steps_leave() {
        let mut window = Window::new(2);
        assert_eq!(window.ne(), None);
        window.add(100.0, 1.0, 2.0);
        window.add(1.0, 1.0, 2.0);
        window.add(1.0, 1.0, 2.0);
        let wanted = 0.5 / 2f64.ln();
        assert!((window.ne().unwrap() - wanted).abs() < 1e-12);
        let text = serde_json::to_string(&window).unwrap();
        assert_eq!(serde_json::from_str::<Window>(&text).unwrap(), window);
        window.add(1.0, 0.0, 2.0);
        assert_eq!(window.resized(1).ne(), None);
    }
}
