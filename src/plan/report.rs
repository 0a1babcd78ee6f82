//! Plans and curves for people, and curves as JSON.

use std::fmt::Write as _;

use serde::Serialize;
use tessera_embedding::plan::{CurvePoint, Planned};

use crate::text::{size, table};

/// What costs are counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unit {
    /// Milliseconds a step.
    Ms,
    /// Whatever the costs were given in.
    Given,
}

/// The whole report of a plan.
pub(super) fn plan_text(planned: &Planned, heading: &str, unit: Unit) -> String {
    let plan = &planned.plan;
    let cost = match unit {
        Unit::Ms => "cost_ms",
        Unit::Given => "cost",
    };
    let number = |x: f64| format!("{x:.4}");
    let mut text = format!("{heading}\nplan {:016x}\n\n", plan.hash());
    let mut loads = planned.shards.iter();
    let (mut tables, mut shards) = (Vec::new(), Vec::new());
    for (spread, why) in plan.tables().iter().zip(&planned.why) {
        let (mut bytes, mut sum) = (0u64, 0.0);
        for (shard, load) in spread.shards.iter().zip(&mut loads) {
            bytes = bytes.saturating_add(load.bytes);
            sum += load.cost_ms;
            shards.push(vec![
                spread.table.clone(),
                shard.rank.to_string(),
                format!("{}..{}", shard.rows.start, shard.rows.end),
                format!("{}..{}", shard.columns.start, shard.columns.end),
                size(load.bytes),
                number(load.cost_ms),
            ]);
        }
        tables.push(vec![
            spread.table.clone(),
            spread.rows.to_string(),
            spread.dim.to_string(),
            size(bytes),
            number(sum),
            spread.shards.len().to_string(),
            spread.sharding.to_string(),
            spread.route.to_string(),
            why.clone(),
        ]);
    }
    let head = ["table", "rows", "dim", "bytes", cost, "shards", "sharding", "route", "why"];
    text += &table(&head, &tables);
    text.push('\n');
    text += &table(&["shard of", "rank", "rows", "columns", "bytes", cost], &shards);
    text.push('\n');
    let mean = planned.cost_mean();
    let ranks = planned.ranks.iter().enumerate().map(|(rank, load)| {
        vec![
            rank.to_string(),
            size(load.bytes),
            size(load.memory_bytes),
            format!("{:.1}%", 100.0 * load.memory_bytes as f64 / planned.capacity_bytes as f64),
            number(load.cost),
            format!("{:.4}", if mean > 0.0 { load.cost / mean } else { 1.0 }),
        ]
    });
    let head = ["rank", "bytes", "memory", "of rank", cost, "of mean"];
    text += &table(&head, &ranks.collect::<Vec<_>>());
    let _ = write!(
        text,
        "\nmax/mean {:.4}: {} over {}",
        planned.max_over_mean,
        number(planned.cost_max()),
        number(mean)
    );
    if unit == Unit::Ms {
        let _ = write!(text, " ms a step; latency besides: {} ms", number(planned.latency_ms));
    }
    text.push('\n');
    for note in &planned.notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

/// A point of a curve, as JSON.
#[derive(Serialize)]
struct Point {
    replicas: usize,
    ranks: usize,
    fits: bool,
    work_ms: f64,
    latency_ms: f64,
    imbalance_ms: f64,
    sync_ms: f64,
    total_ms: Option<f64>,
    memory_bytes: u64,
    lacking: Option<String>,
}

/// A curve, as JSON.
#[derive(Serialize)]
pub(super) struct Curve {
    curve: Vec<Point>,
    best_replicas: usize,
}

pub(super) fn curve_json(points: &[CurvePoint], best: usize) -> Curve {
    let curve = points.iter().map(|point| Point {
        replicas: point.grid.groups(),
        ranks: point.grid.ranks(),
        fits: point.planned.is_ok(),
        work_ms: point.work_ms,
        latency_ms: point.latency_ms,
        imbalance_ms: point.imbalance_ms,
        sync_ms: point.sync_ms,
        total_ms: point.planned.as_ref().ok().map(|_| point.total_ms()),
        memory_bytes: point.memory_bytes,
        lacking: point.planned.as_ref().err().map(ToString::to_string),
    });
    Curve { curve: curve.collect(), best_replicas: best }
}

/// A curve for people.
pub(super) fn curve_text(points: &[CurvePoint], best: usize) -> String {
    let number = |x: f64| format!("{x:.4}");
    let row = |point: &CurvePoint| {
        let mut row = vec![point.grid.groups().to_string(), point.grid.ranks().to_string()];
        if point.planned.is_ok() {
            row.extend(
                [point.work_ms, point.latency_ms, point.imbalance_ms, point.sync_ms].map(number),
            );
            row.push(number(point.total_ms()));
            row.push(size(point.memory_bytes));
            row.push(if point.grid.groups() == best { "best" } else { "" }.to_owned());
        } else {
            row.extend(std::iter::repeat_n("-".to_owned(), 6));
            row.push("out of memory".to_owned());
        }
        row
    };
    let head = [
        "replicas",
        "ranks",
        "work_ms",
        "latency_ms",
        "imbalance_ms",
        "sync_ms",
        "total_ms",
        "memory",
        "",
    ];
    let mut text = table(&head, &points.iter().map(row).collect::<Vec<_>>());
    let first = points.iter().find_map(|point| point.planned.as_ref().err());
    if let Some(reason) = first {
        let _ = writeln!(text, "note: {reason}");
    }
    text
}
