//! Simulation files: what `tessera simulate` is asked.
//!
//! Read as a configuration is: unknown keys are faults, and all faults are told at once.
//! docs/simulate.md lists every key; a test holds the two together.

use std::path::Path;

use tessera_embedding::plan::{Placement, Topology};
use toml::Value;

use super::ConfigError;
use super::section::{Context, Section};
use super::topology;
use super::value::{FromValue, absolute};
use crate::simulate::{
    Batch, Cost, Formula, Imbalance, Memory, Mode, Model, Quantity, Scenario, Simulation, Stage,
    Target, Values,
};

/// Most ranks of a simulation.
const RANKS_MAX: usize = 1 << 20;
/// Most of anything that tasks are made for: steps, parts, batches ahead.
const COUNT_MAX: usize = 1024;
/// Names that formulas know besides the parameters.
const NAMES: [&str; 4] = ["W", "N", "M", "B"];

/// Reads a simulation file.
///
/// Errors: [`ConfigError`]; a file with faults lists all of them.
pub fn load_simulation(path: &Path) -> Result<Simulation, ConfigError> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.into(), source })?;
    parse(&text, path)
}

fn parse(text: &str, path: &Path) -> Result<Simulation, ConfigError> {
    let table = text
        .parse::<toml::Table>()
        .map_err(|error| ConfigError::Syntax { path: path.into(), message: error.to_string() })?;
    let base = path.parent().unwrap_or(Path::new(""));
    let context = Context::new(base.into());
    let simulation = simulation(Section::root(&context, table), base);
    let (faults, _, _) = context.finish();
    if faults.is_empty() {
        Ok(simulation)
    } else {
        Err(ConfigError::Faults { path: path.into(), faults })
    }
}

/// A formula, or why it is none.
struct Text(Result<Formula, String>);

impl FromValue for Text {
    const EXPECTED: &'static str = "a number, or a formula such as \"150 + 0.674 * N\"";
    fn from_value(value: &Value) -> Option<Self> {
        match value {
            Value::String(text) => Some(Self(text.parse())),
            _ => f64::from_value(value).map(|number| Self(Ok(number.into()))),
        }
    }
    fn to_value(&self) -> Value {
        Value::String(self.0.as_ref().map_or_else(Clone::clone, ToString::to_string))
    }
}

/// Reads formulas over known names.
struct Formulas<'v> {
    parameters: &'v Values,
}

impl Formulas<'_> {
    fn optional(&self, section: &mut Section<'_>, key: &str) -> Option<Formula> {
        let formula = match section.optional::<Text>(key)?.0 {
            Ok(formula) => formula,
            Err(message) => {
                section.fault(key, message);
                return None;
            }
        };
        let unknown: Vec<&str> = formula
            .names()
            .into_iter()
            .filter(|name| !NAMES.contains(name) && !self.parameters.contains_key(*name))
            .collect();
        if !unknown.is_empty() {
            section.fault(
                key,
                format!(
                    "{} is none of [parameters] and not W (ranks), N (ranks of a group), M (groups) \
                     or B (samples of a rank)",
                    unknown.join(", ")
                ),
            );
        }
        Some(formula)
    }

    fn or(&self, section: &mut Section<'_>, key: &str, default: f64) -> Formula {
        self.optional(section, key).unwrap_or_else(|| default.into())
    }

    fn required(&self, section: &mut Section<'_>, key: &str) -> Formula {
        if !section.has(key) {
            section.fault(key, "missing");
        }
        self.or(section, key, 0.0)
    }

    /// A share of something, which no rank count changes.
    fn share(&self, section: &mut Section<'_>, key: &str) -> f64 {
        let share = self.or(section, key, 1.0).value(self.parameters);
        if !(share > 0.0 && share <= 1.0) {
            section.fault(key, format!("must be above 0 and at most 1, is {share}"));
        }
        share
    }
}

fn simulation(mut root: Section<'_>, base: &Path) -> Simulation {
    let title = root.required("title", String::new());
    let source = root.optional("source");
    let steps = root.or("steps", 16usize);
    let buckets = root.or("buckets", 4usize);
    for (key, count) in [("steps", steps), ("buckets", buckets)] {
        within(&root, key, count, COUNT_MAX);
    }
    let ranks = ranks(&mut root, None);
    let parameters = parameters(root.section("parameters"));
    let formulas = Formulas { parameters: &parameters };
    let batch = batch(&mut root, &formulas);
    let seen_share = formulas.or(&mut root, "seen_share", 0.5);
    let costs = costs(&mut root, &formulas);
    let model = model(&mut root, base);
    let (topology, tflops) = speeds(&mut root, &formulas);
    if model.is_some() && !tflops.is_finite() {
        root.fault("speed.tflops", "missing: [model] needs it");
    }
    let imbalance = imbalance(&mut root, &formulas);
    if model.is_some() && imbalance.is_some() {
        root.fault("imbalance", "has no meaning with [model]: the plan tells what each rank does");
    }
    let memory = memory(&mut root, &formulas);
    let mut scenarios = Vec::new();
    for section in root.sections("scenario") {
        scenarios.push(scenario(section, &formulas, &ranks));
    }
    if scenarios.is_empty() {
        root.fault("scenario", "at least one [[scenario]] is needed");
    }
    for (index, one) in scenarios.iter().enumerate() {
        if scenarios[..index].iter().any(|other| other.name == one.name) {
            root.fault(&format!("scenario.{index}.name"), format!("`{}` is there twice", one.name));
        }
    }
    let mut targets = Vec::new();
    for section in root.sections("target") {
        targets.extend(target(section, &scenarios));
    }
    root.finish(None);
    Simulation {
        title,
        source,
        batch,
        steps,
        buckets,
        seen_share,
        parameters,
        costs,
        topology,
        tflops,
        model,
        imbalance,
        memory,
        scenarios,
        targets,
    }
}

fn within(section: &Section<'_>, key: &str, count: usize, most: usize) {
    if !(1..=most).contains(&count) {
        section.fault(key, format!("must be from 1 to {most}, is {count}"));
    }
}

fn batch(root: &mut Section<'_>, formulas: &Formulas<'_>) -> Batch {
    let mut samples = |key: &str| {
        let samples = formulas.optional(root, key)?.value(formulas.parameters);
        if !(samples > 0.0 && samples.is_finite()) {
            root.fault(key, format!("must be above 0, is {samples}"));
        }
        Some(samples)
    };
    match (samples("batch_per_rank"), samples("batch_size")) {
        (Some(samples), None) => Batch::PerRank(samples),
        (None, Some(samples)) => Batch::Global(samples),
        (None, None) => {
            root.fault("batch_per_rank", "missing: it, or batch_size over all ranks, is needed");
            Batch::PerRank(1.0)
        }
        (Some(samples), Some(_)) => {
            root.fault("batch_size", "is given beside batch_per_rank: one of them is enough");
            Batch::PerRank(samples)
        }
    }
}

/// `ranks`, or the file's.
fn ranks(section: &mut Section<'_>, default: Option<&[usize]>) -> Vec<usize> {
    let given = section.optional::<Vec<usize>>("ranks");
    if given.is_none() && default.is_none() {
        section.fault("ranks", "missing: numbers of ranks to simulate");
    }
    let mut ranks = given.unwrap_or_else(|| default.unwrap_or(&[1]).to_vec());
    if ranks.is_empty() || ranks.iter().any(|count| !(1..=RANKS_MAX).contains(count)) {
        section.fault("ranks", format!("must be numbers from 1 to {RANKS_MAX}"));
    }
    ranks.sort_unstable();
    ranks.dedup();
    ranks
}

fn parameters(mut section: Section<'_>) -> Values {
    let names: Vec<String> = section.entries().keys().cloned().collect();
    let mut values = Values::new();
    for name in names {
        let value = section.required(&name, 0.0);
        if NAMES.contains(&name.as_str()) {
            section.fault(&name, "is a name that every formula knows already");
        } else {
            values.insert(name, value);
        }
    }
    section.finish(None);
    values
}

fn costs(root: &mut Section<'_>, formulas: &Formulas<'_>) -> Vec<(Stage, Cost)> {
    let mut costs = Vec::new();
    let mut given = root.section("ms");
    for (name, stage) in Stage::ALL {
        if let Some(formula) = formulas.optional(&mut given, name) {
            costs.push((stage, Cost::Ms(formula)));
        }
    }
    given.finish(Some("[ms]"));
    let mut given = root.section("bytes");
    for (name, stage) in Stage::ALL.into_iter().filter(|(_, stage)| stage.takes_bytes()) {
        if let Some(formula) = formulas.optional(&mut given, name) {
            if costs.iter().any(|(known, _)| *known == stage) {
                given.fault(name, "is given in [ms] too: one of them is enough");
            }
            costs.push((stage, Cost::Bytes(formula)));
        }
    }
    given.finish(Some("[bytes]"));
    costs
}

fn model(root: &mut Section<'_>, base: &Path) -> Option<Model> {
    let given = root.has("model");
    let mut section = root.section("model");
    let tables = section.optional::<String>("tables");
    let positive = |section: &mut Section<'_>, key: &str, default| {
        section.number(key, default, |x| x >= 0.0, "at least 0")
    };
    let model = Model {
        dim: section.or("dim", 128usize),
        optimizer: section.or("optimizer", "adagrad".to_owned()),
        rows_column: section.optional("rows_column"),
        flops_per_sample: positive(&mut section, "flops_per_sample", 0.0),
        dense_parameters: positive(&mut section, "dense_parameters", 0.0),
        sample_bytes: positive(&mut section, "sample_bytes", 0.0),
        tables: absolute(base, Path::new(tables.as_deref().unwrap_or_default())),
    };
    if model.dim == 0 {
        section.fault("dim", "must be at least 1");
    }
    if given && tables.is_none() {
        section.fault("tables", "missing: a table set (docs/planning.md lists its columns)");
    }
    section.finish(None);
    given.then_some(model)
}

/// The topology as reached, and the device's arithmetic; NaN where it is not told.
fn speeds(root: &mut Section<'_>, formulas: &Formulas<'_>) -> (Topology, f64) {
    let section = root.section("topology");
    let faults_before = root.faults_so_far();
    let mut topology = topology::read(section, "file");
    if root.faults_so_far() == faults_before {
        for (key, message) in topology.faults() {
            root.fault(&format!("topology.{key}"), message);
        }
    }
    let mut speed = root.section("speed");
    let tflops = formulas.optional(&mut speed, "tflops").map(|f| f.value(formulas.parameters));
    if tflops.is_some_and(|tflops| !(tflops > 0.0 && tflops.is_finite())) {
        speed.fault("tflops", "must be above 0");
    }
    let dense = formulas.share(&mut speed, "dense_share");
    let memory = formulas.share(&mut speed, "memory_share");
    let links = formulas.share(&mut speed, "link_share");
    speed.finish(None);
    topology.device_gb_per_s *= memory;
    topology.intra_node.gb_per_s *= links;
    topology.inter_node.gb_per_s *= links;
    (topology, tflops.unwrap_or(f64::NAN) * dense)
}

fn imbalance(root: &mut Section<'_>, formulas: &Formulas<'_>) -> Option<Imbalance> {
    let given = root.has("imbalance");
    let mut section = root.section("imbalance");
    let ranks = formulas.or(&mut section, "ranks", 1.0);
    let factor = formulas.or(&mut section, "factor", 1.0);
    section.finish(None);
    given.then_some(Imbalance { ranks, factor })
}

fn memory(root: &mut Section<'_>, formulas: &Formulas<'_>) -> Option<Memory> {
    let given = root.has("memory");
    let mut section = root.section("memory");
    let memory = Memory {
        capacity: if given {
            formulas.required(&mut section, "capacity")
        } else {
            formulas.or(&mut section, "capacity", 0.0)
        },
        tables: formulas.or(&mut section, "tables", 0.0),
        buffers: formulas.or(&mut section, "buffers", 0.0),
        reserve: formulas.or(&mut section, "reserve", 0.0),
    };
    section.finish(None);
    given.then_some(memory)
}

fn scenario(mut section: Section<'_>, formulas: &Formulas<'_>, all: &[usize]) -> Scenario {
    let name = section.required("name", String::new());
    let mode = section.required_choice("mode", &Mode::ALL).unwrap_or(Mode::Serial);
    let scenario = Scenario {
        mode,
        micro_batches: section.or("micro_batches", 1usize),
        depth: section.or("depth", 8usize),
        queue: section.or("queue", 1usize),
        replicas: formulas.or(&mut section, "replicas", 1.0),
        sync_every: section.or("sync_every", 1usize),
        placement: section.choice(
            "placement",
            &[("strided", Placement::Strided), ("contiguous", Placement::Contiguous)],
        ),
        ranks: ranks(&mut section, Some(all)),
        name,
    };
    for (key, count) in [
        ("micro_batches", scenario.micro_batches),
        ("depth", scenario.depth),
        ("queue", scenario.queue),
        ("sync_every", scenario.sync_every),
    ] {
        within(&section, key, count, COUNT_MAX);
    }
    section.finish(None);
    scenario
}

fn target(mut section: Section<'_>, scenarios: &[Scenario]) -> Option<Target> {
    let scenario = section.required("scenario", String::new());
    if !scenarios.iter().any(|known| known.name == scenario) {
        section.fault("scenario", format!("there is no scenario `{scenario}`"));
    }
    let ranks = section.required_at_least_one("ranks");
    let within = section.number("within", 0.0, |x| x >= 0.0, "at least 0");
    let fitted = section.or("fitted", false);
    let step_ms = section.optional("step_ms").map(Quantity::StepMs);
    let samples = section.optional("samples_per_s").map(Quantity::SamplesPerS);
    let memory = section.optional("out_of_memory").map(Quantity::OutOfMemory);
    let from = section.optional::<usize>("efficiency_from");
    let percent = section.optional::<f64>("efficiency");
    let efficiency = match (percent, from) {
        (Some(percent), Some(from)) => Some(Quantity::Efficiency { percent, from }),
        (None, None) => None,
        _ => {
            section.fault("efficiency_from", "efficiency and efficiency_from go together");
            None
        }
    };
    let mut given = [step_ms, samples, memory, efficiency].into_iter().flatten();
    let quantity = given.next();
    if quantity.is_none() || given.next().is_some() {
        section.fault(
            "step_ms",
            "one of step_ms, samples_per_s, efficiency and out_of_memory is needed",
        );
    }
    section.finish(None);
    Some(Target { scenario, ranks, quantity: quantity?, within, fitted })
}

#[cfg(test)]
mod tests;
