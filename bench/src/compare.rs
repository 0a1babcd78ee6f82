//! Two documents against each other: ratios of throughput and latency with their spread.

use std::fmt;

use serde::Serialize;

use crate::document::{Document, Figures};
use crate::stats::{Ratio, ratio};
use crate::{BenchError, Result};

/// One case that both documents have.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// The case, such as a batch size and a pooling.
    pub case: String,
    /// Throughput, new over old: above 1 is faster now.
    pub throughput: Ratio,
    /// p99 latency, new over old: below 1 is better now.
    pub latency_p99: f64,
    /// The machine's limit, new over old: how alike the two runs' conditions were.
    pub limit: f64,
}

/// All points that both documents have.
#[derive(Clone, Debug, Serialize)]
pub struct Comparison {
    /// The command of both.
    pub command: String,
    /// Knobs that differ, as `name: old -> new`.
    pub differences: Vec<String>,
    /// In the new document's order.
    pub lines: Vec<Line>,
}

/// Compares two documents.
///
/// Errors: [`BenchError::Usage`] for documents of different commands or without a common point.
pub fn compare<P: Figures>(old: &Document<P>, new: &Document<P>) -> Result<Comparison> {
    if old.command != new.command {
        let text = format!("cannot compare {} with {}", old.command, new.command);
        return Err(BenchError::Usage(text));
    }
    let lines: Vec<Line> = new
        .points
        .iter()
        .filter_map(|now| {
            let before = old.points.iter().find(|before| before.case() == now.case())?;
            Some(Line {
                case: now.case(),
                // Throughput is the inverse of the service time.
                throughput: ratio(before.service_ms(), now.service_ms()),
                latency_p99: now.latency_ms().p99 / before.latency_ms().p99,
                limit: now.limit() / before.limit(),
            })
        })
        .collect();
    if lines.is_empty() {
        return Err(BenchError::usage(
            "the two have no case in common: the same batch size and pooling, or operation and size",
        ));
    }
    // Where figures go and how many there are does not change what is measured.
    let free = [
        "json",
        "report",
        "compare",
        "dump_ids",
        "topology",
        "iterations",
        "warmup",
        "batch",
        "pooling",
        "operations",
        "sizes",
    ];
    let mut differences = Vec::new();
    if let (Some(before), Some(now)) = (old.knobs.as_object(), new.knobs.as_object()) {
        for (name, value) in now.iter().filter(|(name, _)| !free.contains(&name.as_str())) {
            let earlier = before.get(name).unwrap_or(&serde_json::Value::Null);
            if earlier != value {
                differences.push(format!("{name}: {earlier} -> {value}"));
            }
        }
    }
    if old.machine.cpu != new.machine.cpu || old.machine.threads != new.machine.threads {
        differences.push(format!(
            "machine: {} x {} -> {} x {}",
            old.machine.threads, old.machine.cpu, new.machine.threads, new.machine.cpu
        ));
    }
    Ok(Comparison { command: new.command.clone(), differences, lines })
}

impl fmt::Display for Comparison {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}, new over old (median, 90% between)", self.command)?;
        for difference in &self.differences {
            writeln!(f, "  not alike: {difference}")?;
        }
        for line in &self.lines {
            let Ratio { ratio, low, high } = line.throughput;
            writeln!(
                f,
                "  {}: throughput {ratio:.3} ({low:.3} to {high:.3}), p99 {:.3}, limit {:.3}",
                line.case, line.latency_p99, line.limit
            )?;
        }
        Ok(())
    }
}
