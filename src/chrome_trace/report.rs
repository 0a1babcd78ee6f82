//! What a trace tells: exposed time, busy lanes, the critical path, a line a step.
//!
//! The steps of a trace are those that the device computes in, or, without such, that events name. A step ends when its last event on any rank
//! does; what is before the first step's end is a run-up and counts nowhere, so that figures are of
//! whole steps.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::intervals::Intervals;
use super::{DEVICE_LANE, Event};

/// Microseconds that count as the same time.
const SAME_US: f64 = 1e-3;

/// Microseconds of a millisecond.
const US_PER_MS: f64 = 1e3;

/// Name of the parts of the critical path in which nothing of the trace ran.
const WAIT: &str = "wait";

/// A stage of one rank, per step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StageFigures {
    /// Name.
    pub stage: String,
    /// Milliseconds a step in which it ran.
    pub busy_ms: f64,
    /// Of these, milliseconds in which the device of the rank did not compute.
    pub exposed_ms: f64,
}

/// A lane of one rank.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct LaneFigures {
    /// Name.
    pub lane: String,
    /// Share of the time in which something ran on it.
    pub utilisation: f64,
}

/// One rank, per step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct RankFigures {
    /// The rank.
    pub rank: usize,
    /// Stages by name.
    pub stages: Vec<StageFigures>,
    /// Lanes by name.
    pub lanes: Vec<LaneFigures>,
    /// Milliseconds a step in which nothing ran on any lane.
    pub idle_ms: f64,
}

/// A part of the critical path, per step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PathPart {
    /// Name of a stage, or `wait`.
    pub stage: String,
    /// Milliseconds a step.
    pub ms: f64,
}

/// One step.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct StepFigures {
    /// The step.
    pub step: u64,
    /// Milliseconds from the end of the step before it.
    pub step_ms: f64,
    /// Milliseconds in which the devices computed, mean over ranks.
    pub device_ms: f64,
}

/// What a trace tells.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// `tessera-trace-report-1`.
    pub format: &'static str,
    /// Mean milliseconds of a step.
    pub step_ms: f64,
    /// Each rank.
    pub ranks: Vec<RankFigures>,
    /// What the last step's end waited for, back to the beginning: longest first. An estimate: an
    /// event is taken to have waited for the one that ended last before it started.
    pub critical_path: Vec<PathPart>,
    /// Each step.
    pub steps: Vec<StepFigures>,
}

impl Report {
    /// The figures of `rank`.
    #[must_use]
    pub fn rank(&self, rank: usize) -> Option<&RankFigures> {
        self.ranks.iter().find(|figures| figures.rank == rank)
    }
}

/// The figures of events, in any order.
///
/// Errors: a message when fewer than two steps are named, so that no step is whole.
pub fn analyse(events: &[Event]) -> Result<Report, String> {
    // What was prepared for a step that never came is no step.
    let computed: BTreeSet<u64> =
        events.iter().filter(|e| e.lane == DEVICE_LANE).filter_map(|e| e.step).collect();
    let mut ends: BTreeMap<u64, f64> = BTreeMap::new();
    for event in events {
        let step = event.step.filter(|step| computed.is_empty() || computed.contains(step));
        if let Some(step) = step {
            let end = ends.entry(step).or_insert(f64::MIN);
            *end = end.max(event.end_us());
        }
    }
    let ends: Vec<(u64, f64)> = ends.into_iter().collect();
    let (Some(&(_, from)), Some(&(_, to))) = (ends.first(), ends.last()) else {
        return Err("no event names its step".into());
    };
    if ends.len() < 2 || from >= to {
        return Err("events of at least two steps are needed: the first is the run-up".into());
    }
    let window = (from, to);
    let steps = (ends.len() - 1) as f64;
    let mut ranks: BTreeMap<usize, Vec<&Event>> = BTreeMap::new();
    for event in events {
        ranks.entry(event.rank).or_default().push(event);
    }
    let devices: Vec<Intervals> = ranks.values().map(|own| device(own, window)).collect();
    let device_ms = |from, to| {
        let sum: f64 = devices.iter().map(|device| device.within(from, to)).sum();
        sum / devices.len() as f64 / US_PER_MS
    };
    Ok(Report {
        format: "tessera-trace-report-1",
        step_ms: (to - from) / steps / US_PER_MS,
        ranks: ranks
            .iter()
            .zip(&devices)
            .map(|((&rank, own), device)| one_rank(rank, own, device, window, steps))
            .collect(),
        critical_path: critical_path(events, window, steps),
        steps: ends
            .windows(2)
            .map(|pair| StepFigures {
                step: pair[1].0,
                step_ms: (pair[1].1 - pair[0].1) / US_PER_MS,
                device_ms: device_ms(pair[0].1, pair[1].1),
            })
            .collect(),
    })
}

/// When events of `own` that `wanted` chooses run.
fn running(own: &[&Event], window: (f64, f64), wanted: impl Fn(&Event) -> bool) -> Intervals {
    let chosen = own.iter().filter(|event| wanted(event));
    Intervals::union(chosen.map(|event| (event.start_us, event.end_us())), window)
}

fn device(own: &[&Event], window: (f64, f64)) -> Intervals {
    running(own, window, |event| event.lane == DEVICE_LANE)
}

fn one_rank(
    rank: usize,
    own: &[&Event],
    device: &Intervals,
    window: (f64, f64),
    steps: f64,
) -> RankFigures {
    let per_step = |us: f64| us / steps / US_PER_MS;
    let stages: BTreeSet<&str> = own.iter().map(|event| event.stage.as_str()).collect();
    let lanes: BTreeSet<&str> = own.iter().map(|event| event.lane.as_str()).collect();
    let length = window.1 - window.0;
    RankFigures {
        rank,
        stages: stages
            .iter()
            .map(|&stage| {
                let busy = running(own, window, |event| event.stage == stage);
                StageFigures {
                    stage: stage.to_owned(),
                    busy_ms: per_step(busy.length()),
                    exposed_ms: per_step(busy.outside(device)),
                }
            })
            .collect(),
        lanes: lanes
            .iter()
            .map(|&lane| {
                let busy = running(own, window, |event| event.lane == lane);
                LaneFigures { lane: lane.to_owned(), utilisation: busy.length() / length }
            })
            .collect(),
        idle_ms: per_step(length - running(own, window, |_| true).length()),
    }
}

/// From the last end backwards, always to the event that ended last before the one at hand started.
fn critical_path(events: &[Event], window: (f64, f64), steps: f64) -> Vec<PathPart> {
    let mut by_end: Vec<&Event> = events
        .iter()
        .filter(|event| event.duration_us > 2.0 * SAME_US && event.end_us() > window.0)
        .collect();
    by_end.sort_by(|a, b| a.end_us().total_cmp(&b.end_us()));
    let mut path: BTreeMap<&str, f64> = BTreeMap::new();
    let mut now = window.1;
    let mut at: Option<&Event> = None;
    while now > window.0 + SAME_US {
        let known = by_end.partition_point(|event| event.end_us() <= now + SAME_US);
        by_end.truncate(known);
        let Some(last) = by_end.last() else {
            *path.entry(WAIT).or_default() += now - window.0;
            break;
        };
        let latest = last.end_us();
        // Of those that ended together: one of the same rank, of the same step, on the device.
        let likeness = |event: &&&Event| {
            let same = |of: fn(&Event) -> u64| at.is_some_and(|at| of(at) == of(event));
            (
                same(|event| event.rank as u64),
                same(|event| event.step.map_or(0, |step| step + 1)),
                event.lane == DEVICE_LANE,
            )
        };
        let together = by_end.iter().rev().take_while(|event| event.end_us() >= latest - SAME_US);
        let Some(&next) = together.max_by_key(likeness) else { break };
        *path.entry(WAIT).or_default() += (now - next.end_us()).max(0.0);
        let start = next.start_us.max(window.0);
        *path.entry(&next.stage).or_default() += next.end_us().min(now) - start;
        now = start;
        at = Some(next);
    }
    let mut parts: Vec<PathPart> = path
        .into_iter()
        .filter(|(_, us)| *us > SAME_US)
        .map(|(stage, us)| PathPart { stage: stage.to_owned(), ms: us / steps / US_PER_MS })
        .collect();
    parts.sort_by(|a, b| b.ms.total_cmp(&a.ms));
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(stage: &str, rank: usize, lane: &str, step: u64, ms: (f64, f64)) -> Event {
        Event {
            stage: stage.into(),
            rank,
            lane: lane.into(),
            step: Some(step),
            micro_batch: None,
            start_us: ms.0 * 1e3,
            duration_us: (ms.1 - ms.0) * 1e3,
        }
    }

    /// Two steps of 10 ms after a run-up: 2 of exchange exposed, 6 of dense, 2 of both at once.
    fn hand_made() -> Vec<Event> {
        let mut events = vec![event("dense", 0, "device", 1, (0.0, 5.0))];
        for (step, start) in [(2, 5.0), (3, 15.0)] {
            events.push(event("exchange", 0, "inter_node", step, (start, start + 4.0)));
            events.push(event("dense", 0, "device", step, (start + 2.0, start + 10.0)));
            // Reads ahead for the next step.
            events.push(event("read", 0, "reader", step + 1, (start + 3.0, start + 6.0)));
        }
        events.retain(|event| event.step != Some(4));
        events
    }

    #[test]
    fn a_hand_made_trace_is_reported_as_counted_by_hand() {
        let report = analyse(&hand_made()).unwrap();
        assert_eq!(report.step_ms, 10.0);
        let rank = report.rank(0).unwrap();
        let stage = |name: &str| {
            let found = rank.stages.iter().find(|stage| stage.stage == name).unwrap();
            (found.busy_ms, found.exposed_ms)
        };
        assert_eq!(stage("exchange"), (4.0, 2.0));
        assert_eq!(stage("dense"), (8.0, 0.0));
        // One read of 3 ms in two steps.
        assert_eq!(stage("read"), (1.5, 0.0));
        let lane =
            |name: &str| rank.lanes.iter().find(|lane| lane.lane == name).unwrap().utilisation;
        assert_eq!((lane("device"), lane("inter_node"), lane("reader")), (0.8, 0.4, 0.15));
        assert_eq!(rank.idle_ms, 0.0);
        let steps: Vec<(u64, f64, f64)> =
            report.steps.iter().map(|step| (step.step, step.step_ms, step.device_ms)).collect();
        assert_eq!(steps, [(2, 10.0, 8.0), (3, 10.0, 8.0)]);
    }

    #[test]
    fn the_critical_path_goes_from_end_to_start() {
        // Rank 1 is slow: rank 0's update waits for its exchange, with 1 ms between them.
        let events = [
            event("dense", 0, "device", 1, (0.0, 1.0)),
            event("dense", 1, "device", 2, (1.0, 6.0)),
            event("dense", 0, "device", 2, (1.0, 3.0)),
            event("exchange", 1, "inter_node", 2, (6.0, 8.0)),
            event("update", 0, "device", 2, (9.0, 11.0)),
        ];
        let report = analyse(&events).unwrap();
        let path: Vec<(&str, f64)> =
            report.critical_path.iter().map(|part| (part.stage.as_str(), part.ms)).collect();
        assert_eq!(path, [("dense", 5.0), ("exchange", 2.0), ("update", 2.0), ("wait", 1.0)]);
        // Rank 0 did nothing from 3 to 9.
        assert_eq!(report.rank(0).unwrap().idle_ms, 6.0);
    }

    #[test]
    fn a_trace_without_whole_steps_is_refused() {
        assert!(analyse(&[]).unwrap_err().contains("no event names its step"));
        let one = [event("dense", 0, "device", 1, (0.0, 1.0))];
        assert!(analyse(&one).unwrap_err().contains("at least two steps"));
        let none = Event { step: None, ..one[0].clone() };
        assert!(analyse(&[none]).is_err());
    }
}
