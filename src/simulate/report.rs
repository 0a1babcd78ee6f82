//! A simulation for people.

use std::fmt::Write as _;

use super::Outcome;
use super::point::Point;
use super::targets::Held;
use crate::chrome_trace::rank_text;
use crate::text::{size, table};

/// Stages that bring rows to the device.
const LOOKUP: [&str; 6] = ["keys", "ssd", "host", "install", "shared", "upload"];
/// Stages that go over links within a step.
const EXCHANGE: [&str; 4] = ["exchange_out", "exchange_back", "all_reduce", "sync"];

/// The whole report; stages are shown of `scenario` on `ranks` ranks.
pub(super) fn text(outcome: &Outcome, scenario: &str, ranks: usize) -> String {
    let mut text = format!("{}\n", outcome.title);
    if let Some(source) = &outcome.source {
        let _ = writeln!(text, "source: {source}");
    }
    if !outcome.parameters.is_empty() {
        let list: Vec<String> =
            outcome.parameters.iter().map(|(name, value)| format!("{name} = {value}")).collect();
        let _ = writeln!(text, "free parameters: {}", list.join(", "));
    }
    text.push('\n');
    text += &points(outcome);
    let shown = outcome
        .points
        .iter()
        .find(|point| point.scenario == scenario && point.ranks == ranks)
        .filter(|point| point.step_ms.is_some());
    if let Some(point) = shown {
        text += &details(point);
    }
    if !outcome.targets.is_empty() {
        text.push('\n');
        text += &targets(&outcome.targets);
    }
    for point in outcome.points.iter().filter(|point| point.fits == Some(false)) {
        let _ = writeln!(text, "out of memory: {}", lacking(point));
    }
    text
}

/// What is missing where.
fn lacking(point: &Point) -> String {
    let place = format!("{} on {} ranks", point.scenario, point.ranks);
    if let Some(reason) = &point.lacking {
        return format!("{place}: {reason}");
    }
    let ranks = point.out_of_memory.iter().map(|lacking| {
        format!("{} of {}", bytes(lacking.bytes), like(lacking.rank, lacking.ranks))
    });
    let ranks: Vec<String> = ranks.collect();
    let capacity = point.capacity_bytes.unwrap_or(0.0);
    format!("{place}: {} exceed {}", ranks.join(", "), bytes(capacity))
}

/// The ranks of a class.
pub(super) fn like(rank: usize, ranks: usize) -> String {
    match ranks {
        1 => format!("rank {rank}"),
        _ => format!("rank {rank} and {} like it", ranks - 1),
    }
}

fn bytes(bytes: f64) -> String {
    size(bytes as u64)
}

/// Milliseconds a step that stages are on the critical path.
fn critical(point: &Point, stages: &[&str]) -> String {
    if point.step_ms.is_none() {
        return "-".into();
    }
    let parts = point.critical_path.iter().filter(|part| stages.contains(&part.stage.as_str()));
    format!("{:.2}", parts.fold(0.0, |sum, part| sum + part.ms))
}

/// A line a point; `speed-up` is over the first scenario on as many ranks, `lookup` and `exchange` are
/// milliseconds on the critical path.
fn points(outcome: &Outcome) -> String {
    let first = outcome.points.first().map_or("", |point| point.scenario.as_str());
    let base = |ranks: usize| {
        let found = |point: &&Point| point.scenario == first && point.ranks == ranks;
        outcome.points.iter().find(found).and_then(|point| point.step_ms)
    };
    let number = |x: Option<f64>, digits: usize| {
        x.map_or_else(|| "-".to_owned(), |x| format!("{x:.digits$}"))
    };
    let rows = outcome.points.iter().map(|point| {
        let faster = base(point.ranks).zip(point.step_ms).map(|(base, here)| base / here);
        vec![
            point.scenario.clone(),
            point.ranks.to_string(),
            point.replicas.to_string(),
            number(point.step_ms, 2),
            number(point.samples_per_s, 0),
            number(faster, 2),
            number(point.efficiency.map(|share| 100.0 * share), 1),
            critical(point, &LOOKUP),
            critical(point, &EXCHANGE),
            point.memory_bytes.map_or_else(|| "-".to_owned(), bytes),
            if point.fits == Some(false) { "out of memory" } else { "" }.to_owned(),
        ]
    });
    let head = [
        "scenario",
        "ranks",
        "groups",
        "step_ms",
        "samples/s",
        "speed-up",
        "efficiency",
        "lookup",
        "exchange",
        "memory",
        "",
    ];
    table(&head, &rows.collect::<Vec<_>>())
}

fn details(point: &Point) -> String {
    let step_ms = point.step_ms.unwrap_or(0.0);
    let mut text = format!(
        "\n{} ({}) on {} ranks, {} samples a rank, {} micro-batches: {step_ms:.2} ms a step\n",
        point.scenario, point.mode, point.ranks, point.batch_per_rank, point.micro_batches
    );
    if let Some(class) = point.figures.first() {
        let _ = writeln!(text, "\n{}", like(class.figures.rank, class.ranks));
        text += &rank_text(&class.figures, step_ms);
    }
    let path = point.critical_path.iter().map(|part| {
        let share = format!("{:.1}%", 100.0 * part.ms / step_ms);
        vec![part.stage.clone(), format!("{:.3}", part.ms), share]
    });
    text.push('\n');
    text += &table(&["critical path", "ms a step", "of step"], &path.collect::<Vec<_>>());
    text
}

fn targets(targets: &[Held]) -> String {
    let rows = targets.iter().map(|held| {
        let number = |x: f64| format!("{x:.2}");
        vec![
            held.scenario.clone(),
            held.ranks.to_string(),
            held.quantity.to_owned(),
            number(held.published),
            held.simulated.map_or_else(|| "-".to_owned(), number),
            held.deviation.map_or_else(|| "-".to_owned(), |x| format!("{x:+.2}")),
            number(held.within),
            if held.holds { "holds" } else { "FAILS" }.to_owned(),
            if held.fitted { "fitted" } else { "" }.to_owned(),
        ]
    });
    let head =
        ["published", "ranks", "quantity", "published", "simulated", "deviation", "within", "", ""];
    table(&head, &rows.collect::<Vec<_>>())
}
