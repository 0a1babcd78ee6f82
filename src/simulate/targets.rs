//! Published figures against simulated ones.

use serde::Serialize;

use super::point::Point;
use super::spec::{Quantity, Target};

/// A published figure and what the simulation says: what `--json` prints of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Held {
    /// Name of the scenario.
    pub scenario: String,
    /// Ranks.
    pub ranks: usize,
    /// `step_ms`, `samples_per_s`, `efficiency` (percent) or `out_of_memory` (0 or 1).
    pub quantity: &'static str,
    /// As published.
    pub published: f64,
    /// As simulated; absent when memory does not suffice.
    pub simulated: Option<f64>,
    /// Percents above the published figure; points for an efficiency.
    pub deviation: Option<f64>,
    /// The largest deviation, up or down, that is accepted.
    pub within: f64,
    /// Whether it is.
    pub holds: bool,
    /// Whether free parameters were chosen to meet it.
    pub fitted: bool,
}

/// Compares every target with the points.
#[must_use]
pub fn compare(targets: &[Target], points: &[Point]) -> Vec<Held> {
    targets.iter().map(|target| one(target, points)).collect()
}

fn one(target: &Target, points: &[Point]) -> Held {
    let find = |ranks: usize| {
        points.iter().find(|point| point.scenario == target.scenario && point.ranks == ranks)
    };
    let point = find(target.ranks);
    let per_rank = |ranks: usize| Some(find(ranks)?.samples_per_s? / ranks as f64);
    let (quantity, published, simulated) = match target.quantity {
        Quantity::StepMs(ms) => ("step_ms", ms, point.and_then(|point| point.step_ms)),
        Quantity::SamplesPerS(rate) => {
            ("samples_per_s", rate, point.and_then(|point| point.samples_per_s))
        }
        Quantity::Efficiency { percent, from } => {
            let share = per_rank(target.ranks).zip(per_rank(from)).map(|(to, from)| to / from);
            ("efficiency", percent, share.map(|share| 100.0 * share))
        }
        Quantity::OutOfMemory(runs_out) => {
            let simulated =
                point.and_then(|point| point.fits).map(|fits| f64::from(u8::from(!fits)));
            ("out_of_memory", f64::from(u8::from(runs_out)), simulated)
        }
    };
    let deviation = simulated.map(|simulated| match target.quantity {
        Quantity::StepMs(_) | Quantity::SamplesPerS(_) => 100.0 * (simulated / published - 1.0),
        _ => simulated - published,
    });
    Held {
        scenario: target.scenario.clone(),
        ranks: target.ranks,
        quantity,
        published,
        simulated,
        deviation,
        within: target.within,
        holds: deviation.is_some_and(|deviation| deviation.abs() <= target.within),
        fitted: target.fitted,
    }
}
