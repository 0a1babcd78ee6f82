//! `tessera trace-report`: a trace's figures for people and programs.

use std::fmt::Write as _;

use super::report::{Report, analyse};
use super::{RankFigures, read};
use crate::cli::TraceReport;
use crate::text::table;
use crate::{Error, Result, console};

/// Ranks that a report for people shows one by one.
const RANKS_SHOWN: usize = 4;

/// Runs the command.
///
/// Errors: a file that is no trace, or one without two steps.
pub fn run(args: &TraceReport) -> Result<()> {
    let events = read(&args.trace)?;
    let report =
        analyse(&events).map_err(|reason| Error::BadFile { path: args.trace.clone(), reason })?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).expect("a report has string keys only");
        return console::print(text + "\n");
    }
    console::print(text(&report))
}

fn number(x: f64) -> String {
    format!("{x:.3}")
}

fn text(report: &Report) -> String {
    let mut text = format!(
        "{} steps of {} ms on {} ranks\n",
        report.steps.len(),
        number(report.step_ms),
        report.ranks.len()
    );
    for figures in report.ranks.iter().take(RANKS_SHOWN) {
        let _ = write!(text, "\nrank {}\n{}", figures.rank, rank_text(figures, report.step_ms));
    }
    if report.ranks.len() > RANKS_SHOWN {
        let _ = writeln!(
            text,
            "\n{} more ranks: --json has them all",
            report.ranks.len() - RANKS_SHOWN
        );
    }
    let path = report
        .critical_path
        .iter()
        .map(|part| vec![part.stage.clone(), number(part.ms), percent(part.ms / report.step_ms)]);
    text.push('\n');
    text += &table(&["critical path", "ms a step", "of step"], &path.collect::<Vec<_>>());
    let steps = report
        .steps
        .iter()
        .map(|step| vec![step.step.to_string(), number(step.step_ms), number(step.device_ms)]);
    text.push('\n');
    text += &table(&["step", "step_ms", "device_ms"], &steps.collect::<Vec<_>>());
    text
}

fn percent(share: f64) -> String {
    format!("{:.1}%", 100.0 * share)
}

/// Stages and lanes of a rank.
pub(crate) fn rank_text(figures: &RankFigures, step_ms: f64) -> String {
    let stages = figures.stages.iter().map(|stage| {
        vec![
            stage.stage.clone(),
            number(stage.busy_ms),
            number(stage.exposed_ms),
            percent(stage.exposed_ms / step_ms),
        ]
    });
    let head = ["stage", "ms a step", "exposed", "of step"];
    let mut text = table(&head, &stages.collect::<Vec<_>>());
    let _ = writeln!(text, "nothing runs: {} ms a step", number(figures.idle_ms));
    let lanes = figures.lanes.iter().map(|lane| vec![lane.lane.clone(), percent(lane.utilisation)]);
    text.push('\n');
    text += &table(&["lane", "busy"], &lanes.collect::<Vec<_>>());
    text
}
