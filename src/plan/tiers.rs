//! Miss-ratio curves and sizes of tiers for people.

use std::fmt::Write as _;

use tessera_embedding::plan::{CURVE_PERCENTS, TierAdvice, TierLoad};

use crate::text::{size, table};

/// The whole report; `ranks` form a group.
pub(super) fn text(advice: &TierAdvice, ranks: usize) -> String {
    let mut text = format!(
        "tiers, from {} batches: hits of lru over uses of rows that the sample showed before\n\n",
        advice.batches
    );
    text += &curves(advice);
    text += "-: fewer slots than a batch has rows; none: no row is used twice\n";
    let error = advice.tables.iter().flat_map(|table| &table.curve).map(|part| part.error);
    let error = error.fold(0.0, f64::max);
    if error > 0.0 {
        let _ = writeln!(
            text,
            "tables of many rows are sampled: hits within {:.2}% of uses",
            100.0 * error
        );
    }
    text.push('\n');
    text += &loads(advice);
    let each = if ranks > 1 { " of each rank" } else { "" };
    let _ = writeln!(
        text,
        "bytes{each}, with 32 bytes of index a slot; misses and reads are rows a step\n\
         at least: with the {} first uses a step of rows that the sample had not shown; a longer \
         one brings both figures together",
        rows(advice.first_uses)
    );
    text += &match advice.ssd_bytes_max {
        Some(bytes) => format!(
            "host_bytes is the least that keeps reads of the SSD within a step of the plan: {} of \
             each rank\n",
            size(bytes as u64)
        ),
        None => "host_bytes is that of all rows below the device; with --topology it is the least \
                 that the SSD's speed allows\n"
            .to_owned(),
    };
    if advice.given.is_some_and(|load| load.parts_in_passes > 0) {
        text += "note: tiers.device_bytes has no room for a whole batch of every table, which \
                 takes several passes and more reads than foretold\n";
    }
    text
}

/// A line a table.
fn curves(advice: &TierAdvice) -> String {
    let percents = CURVE_PERCENTS.map(|percent| format!("{percent}%"));
    let mut head = vec!["table", "rows", "seen", "batch_max"];
    head.extend(percents.iter().map(String::as_str));
    if advice.given.is_some() {
        head.push("in [tiers]");
    }
    let lines: Vec<Vec<String>> = advice
        .tables
        .iter()
        .map(|curve| {
            let mut line = vec![
                curve.table.clone(),
                curve.rows.to_string(),
                rows(curve.first_uses),
                curve.batch_rows_max.to_string(),
            ];
            line.extend(CURVE_PERCENTS.map(|percent| {
                curve.at_percent(percent).map_or("-".to_owned(), |part| rate(part.hit_rate))
            }));
            if advice.given.is_some() {
                line.push(in_tiers(advice, &curve.table));
            }
            line
        })
        .collect();
    table(&head, &lines)
}

/// The hit rate of a table over all its parts.
fn in_tiers(advice: &TierAdvice, name: &str) -> String {
    let (mut repeats, mut misses, mut whole) = (0.0, 0.0, true);
    for share in advice.shares.iter().filter(|share| share.table == name) {
        repeats += share.repeats;
        misses += share.device_misses;
        whole &= share.device_slots >= share.rows;
    }
    if whole {
        return "whole".to_owned();
    }
    rate((repeats > 0.0).then(|| 1.0 - misses / repeats))
}

/// The tiers of the configuration, and those advised.
fn loads(advice: &TierAdvice) -> String {
    let line = |name: String, load: &TierLoad| {
        let host = load.host_bytes.unwrap_or(load.host_bytes_all);
        vec![
            name,
            load.device_bytes.to_string(),
            size(load.device_bytes),
            host.to_string(),
            size(host),
            rate(load.hit_rate),
            rate(load.hit_rate_min),
            rows(load.device_misses),
            rows(load.host_misses),
        ]
    };
    let mut lines: Vec<Vec<String>> = Vec::new();
    lines.extend(advice.given.iter().map(|load| line("[tiers]".to_owned(), load)));
    for size in &advice.sizes {
        lines.push(line(format!("{:.0}%", 100.0 * size.hit_rate_wanted), &size.load));
    }
    let head = [
        "hits",
        "device_bytes",
        "",
        "host_bytes",
        "",
        "device hits",
        "at least",
        "misses",
        "SSD reads",
    ];
    table(&head, &lines)
}

fn rate(rate: Option<f64>) -> String {
    rate.map_or_else(|| "none".to_owned(), |rate| format!("{:.2}%", 100.0 * rate))
}

/// A number of rows, which may be a mean.
fn rows(rows: f64) -> String {
    if rows < 100.0 && rows.fract() != 0.0 { format!("{rows:.1}") } else { format!("{rows:.0}") }
}
