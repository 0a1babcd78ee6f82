//! From the times of tasks to the figures of a run.

use crate::chrome_trace::{Event, PathPart, Report, analyse};

use super::costs::ClassCosts;
use super::engine::{Span, TaskId, ms};
use super::pipeline::{Run, Schedule, Work, build};

/// Picoseconds of a microsecond.
const PS_PER_US: f64 = 1e6;

/// What a simulated run took.
pub struct Measured {
    /// Figures of the steps that count, one rank for each class.
    pub report: Report,
    /// What the end of the last step waited for, back to the end of the run-up: longest first.
    pub critical_path: Vec<PathPart>,
    /// What ran when, in the order of starts: the steps that count and the one before them.
    pub events: Vec<Event>,
}

/// Runs `counted` steps after a run-up that fills every queue.
#[must_use]
pub fn measure(classes: &[ClassCosts], schedule: Schedule, counted: usize) -> Measured {
    // Ahead of a window there are at most `depth` batches: after so many steps their order is the
    // steady one. A multiple of the steps between synchronisations keeps the two in step.
    let every = schedule.sync_every.unwrap_or(1);
    let run_up = (schedule.depth + 4).next_multiple_of(every);
    let counted = counted.next_multiple_of(every);
    // Steps behind them, so that until the last one ends there is something to read ahead.
    let (first, last) = (run_up - 1, run_up + counted - 1);
    let run = build(classes, Schedule { steps: last + 1 + schedule.depth + 1, ..schedule });
    let Run { graph, works, ends } = run;
    let spans = graph.run();
    let (begin, end) = (ends[first], spans[ends[last].index()].end);
    let mut events: Vec<Event> = works
        .iter()
        .filter(|work| work.step >= first && spans[work.task.index()].start < end)
        .map(|work| event(work, &spans, classes, last))
        .collect();
    events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(a.rank.cmp(&b.rank)));
    // A step without any work has no events: then all of it is nothing.
    let report = analyse(&events).unwrap_or_else(|_| Report {
        format: "tessera-trace-report-1",
        step_ms: 0.0,
        ranks: Vec::new(),
        critical_path: Vec::new(),
        steps: Vec::new(),
    });
    let critical_path = critical_path(&works, &spans, begin, ends[last])
        .into_iter()
        .map(|(stage, time)| PathPart { stage: stage.to_owned(), ms: ms(time) / counted as f64 })
        .collect();
    Measured { report, critical_path, events }
}

/// What is done for a step behind the `last` names no step: none of them is whole.
fn event(work: &Work, spans: &[Span], classes: &[ClassCosts], last: usize) -> Event {
    let span = spans[work.task.index()];
    Event {
        stage: work.stage.to_owned(),
        rank: classes[work.class].rank,
        lane: work.lane.name().to_owned(),
        step: (work.step <= last).then_some(work.step as u64 + 1),
        micro_batch: work.micro_batch.map(|part| part as u64),
        start_us: span.start as f64 / PS_PER_US,
        duration_us: (span.end - span.start) as f64 / PS_PER_US,
    }
}

/// Time by stage on the way from `to` back to `from`'s end, by what really kept each task.
fn critical_path(
    works: &[Work],
    spans: &[Span],
    from: TaskId,
    to: TaskId,
) -> Vec<(&'static str, u64)> {
    let mut stages: Vec<Option<&'static str>> = vec![None; spans.len()];
    for work in works {
        stages[work.task.index()] = Some(work.stage);
    }
    let begin = spans[from.index()].end;
    let mut path: Vec<(&'static str, u64)> = Vec::new();
    let mut at = Some(to);
    while let Some(task) = at {
        let span = spans[task.index()];
        if span.end <= begin {
            break;
        }
        let time = span.end - span.start.max(begin);
        if let (Some(stage), true) = (stages[task.index()], time > 0) {
            match path.iter_mut().find(|(known, _)| *known == stage) {
                Some((_, sum)) => *sum += time,
                None => path.push((stage, time)),
            }
        }
        at = span.cause;
    }
    path.sort_by_key(|&(_, time)| std::cmp::Reverse(time));
    path
}
