//! `tessera simulate`: what a training step takes on machines that are not at hand.
//!
//! ```text
//! file -> Simulation: stages, speeds, scenarios, published figures
//!   each scenario, each number of ranks: costs (given, or estimated through the planner)
//!     -> tasks (pipeline) -> times (engine) -> figures (measure)
//!   -> report, curve, plot, trace; deviations from what was published
//! ```
//! docs/simulate.md has the file's keys and the model; docs/SCALING.md what it says.

mod costs;
mod engine;
mod estimate;
mod formula;
mod measure;
mod pipeline;
mod plot;
mod point;
mod report;
mod spec;
mod targets;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufWriter;
use std::path::Path;

use serde::Serialize;

pub use formula::{Formula, Values};
pub use point::{ClassFigures, Lacking, Point};
pub use spec::{
    Batch, Cost, Imbalance, Memory, Mode, Model, Quantity, Scenario, Simulation, Stage, Target,
};
pub use targets::Held;

use crate::chrome_trace::{Event, TraceWriter};
use crate::cli::Simulate;
use crate::config::load_simulation;
use crate::{Error, Result, console};

/// Everything that a simulation says: what `--json` prints.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    /// `tessera-simulation-1`.
    pub format: &'static str,
    /// What is simulated.
    pub title: String,
    /// Where its figures come from.
    pub source: Option<String>,
    /// Free parameters.
    pub parameters: BTreeMap<String, f64>,
    /// Every scenario on every number of ranks.
    pub points: Vec<Point>,
    /// Published figures.
    pub targets: Vec<Held>,
}

/// Runs every scenario on its numbers of ranks and on those of its targets.
///
/// Errors: ranks that do not fill groups or nodes, formulas without a value, unreadable tables.
pub fn simulate(simulation: &Simulation) -> Result<Outcome> {
    let mut points = Vec::new();
    for scenario in &simulation.scenarios {
        let mut ranks = scenario.ranks.clone();
        for target in simulation.targets.iter().filter(|target| target.scenario == scenario.name) {
            ranks.push(target.ranks);
            if let Quantity::Efficiency { from, .. } = target.quantity {
                ranks.push(from);
            }
        }
        ranks.sort_unstable();
        ranks.dedup();
        let mut curve = Vec::with_capacity(ranks.len());
        for ranks in ranks {
            curve.push(point::simulate(simulation, scenario, ranks)?.0);
        }
        let per_rank = |point: &Point| Some(point.samples_per_s? / point.ranks as f64);
        let first = curve.iter().find_map(per_rank);
        for point in &mut curve {
            point.efficiency = per_rank(point).zip(first).map(|(here, first)| here / first);
        }
        points.extend(curve);
    }
    let targets = targets::compare(&simulation.targets, &points);
    Ok(Outcome {
        format: "tessera-simulation-1",
        title: simulation.title.clone(),
        source: simulation.source.clone(),
        parameters: simulation.parameters.clone(),
        points,
        targets,
    })
}

/// Runs the command.
///
/// Errors: a file that is refused; what [`simulate`] says; outputs that cannot be written.
pub fn run(args: &Simulate) -> Result<()> {
    let simulation = load_simulation(&args.file)?;
    let shown = shown(args, &simulation)?;
    let outcome = simulate(&simulation)?;
    if let Some(path) = &args.trace {
        let (scenario, ranks) = shown;
        let (point, events) = point::simulate(&simulation, scenario, ranks)?;
        write_trace(path, &point, &events)
            .map_err(|source| Error::Write { path: path.clone(), source })?;
    }
    if let Some(path) = &args.plot {
        let text = plot::document(path, &outcome)?;
        std::fs::write(path, text).map_err(|source| Error::Write { path: path.clone(), source })?;
    }
    if args.json {
        let text = serde_json::to_string_pretty(&outcome).expect("an outcome has string keys only");
        return console::print(text + "\n");
    }
    console::print(report::text(&outcome, &shown.0.name, shown.1))
}

/// The scenario and ranks that details are shown of: those asked for, or the last ones.
fn shown<'s>(args: &Simulate, simulation: &'s Simulation) -> Result<(&'s Scenario, usize)> {
    let scenario = match &args.scenario {
        None => simulation.scenarios.last(),
        Some(name) => simulation.scenarios.iter().find(|scenario| scenario.name == *name),
    };
    let Some(scenario) = scenario else {
        let names: Vec<&str> =
            simulation.scenarios.iter().map(|scenario| scenario.name.as_str()).collect();
        let name = args.scenario.as_deref().unwrap_or_default();
        return Err(Error::Usage(format!("--scenario {name}: not one of {}", names.join(", "))));
    };
    let ranks = match args.ranks {
        None => scenario.ranks.last().copied().unwrap_or(1),
        Some(ranks) if scenario.ranks.contains(&ranks) => ranks,
        Some(ranks) => {
            return Err(Error::Usage(format!(
                "--ranks {ranks}: scenario {} is simulated on {:?} ranks",
                scenario.name, scenario.ranks
            )));
        }
    };
    Ok((scenario, ranks))
}

fn write_trace(path: &Path, point: &Point, events: &[Event]) -> std::io::Result<()> {
    let mut writer = TraceWriter::new(BufWriter::new(File::create(path)?))?;
    for class in &point.figures {
        let rank = class.figures.rank;
        writer.rank(rank, &report::like(rank, class.ranks))?;
    }
    for event in events {
        writer.event(event)?;
    }
    writer.finish()
}
