//! One scenario on one number of ranks: costs, memory, and the simulation itself.

use serde::Serialize;
use tessera_embedding::plan::Grid2d;

use crate::chrome_trace::{Event, PathPart, RankFigures};
use crate::{Error, Result};

use super::costs::{ClassCosts, LinkWork, Links, ms};
use super::estimate;
use super::formula::{Formula, Values};
use super::measure::measure;
use super::pipeline::Schedule;
use super::spec::{Cost, Scenario, Simulation, Stage};

/// A scenario on a number of ranks: what `--json` prints of it.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    /// Name of the scenario.
    pub scenario: String,
    /// Its mode.
    pub mode: &'static str,
    /// Ranks in all.
    pub ranks: usize,
    /// Groups.
    pub replicas: usize,
    /// Parts of a batch.
    pub micro_batches: usize,
    /// Samples a step on each rank.
    pub batch_per_rank: f64,
    /// Whether memory suffices; absent when it is not known.
    pub fits: Option<bool>,
    /// Memory of the fullest rank, in bytes.
    pub memory_bytes: Option<f64>,
    /// Memory that a rank has.
    pub capacity_bytes: Option<f64>,
    /// Ranks whose memory does not suffice.
    pub out_of_memory: Vec<Lacking>,
    /// Why there is no plan, where the planner found no room.
    pub lacking: Option<String>,
    /// Milliseconds a step.
    pub step_ms: Option<f64>,
    /// Samples a second over all ranks.
    pub samples_per_s: Option<f64>,
    /// Throughput of a rank over that on the scenario's fewest ranks that fit.
    pub efficiency: Option<f64>,
    /// One rank of each class: the most numerous class first.
    pub figures: Vec<ClassFigures>,
    /// What a step is made of, longest first.
    pub critical_path: Vec<PathPart>,
}

/// Ranks that lack memory.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Lacking {
    /// The first of them.
    pub rank: usize,
    /// How many there are.
    pub ranks: usize,
    /// What each needs.
    pub bytes: f64,
}

/// A class of ranks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ClassFigures {
    /// Its ranks.
    pub ranks: usize,
    /// The first of them.
    #[serde(flatten)]
    pub figures: RankFigures,
}

/// Everything that formulas are computed from.
struct Setting<'a> {
    simulation: &'a Simulation,
    scenario: &'a Scenario,
    links: Links<'a>,
    batch: f64,
    values: Values,
}

impl Setting<'_> {
    /// The value of a formula that must be a number from 0 up.
    fn value(&self, what: &str, formula: &Formula) -> Result<f64> {
        let value = formula.value(&self.values);
        if value.is_finite() && value >= 0.0 {
            return Ok(value);
        }
        Err(Error::Usage(format!(
            "scenario {} on {} ranks: {what} = `{formula}` is {value}; it must be a number from 0 up",
            self.scenario.name,
            self.links.grid.total()
        )))
    }
}

/// Simulates `scenario` on `ranks` ranks: figures, and what ran when.
///
/// Errors: [`Error::Usage`] for ranks that do not fill groups or nodes and formulas without a value;
/// tables that make no sense.
pub fn simulate(
    simulation: &Simulation,
    scenario: &Scenario,
    ranks: usize,
) -> Result<(Point, Vec<Event>)> {
    let setting = setting(simulation, scenario, ranks)?;
    let mut point = Point {
        scenario: scenario.name.clone(),
        mode: scenario.mode.name(),
        ranks,
        replicas: setting.links.grid.groups(),
        micro_batches: scenario.micro_batches,
        batch_per_rank: setting.batch,
        fits: None,
        memory_bytes: None,
        capacity_bytes: None,
        out_of_memory: Vec::new(),
        lacking: None,
        step_ms: None,
        samples_per_s: None,
        efficiency: None,
        figures: Vec::new(),
        critical_path: Vec::new(),
    };
    let mut classes = match &simulation.model {
        None => vec![ClassCosts { rank: 0, count: ranks, ..ClassCosts::default() }],
        Some(model) => {
            let capacity = simulation.topology.capacity_bytes();
            point.capacity_bytes = Some(capacity as f64);
            match estimate::classes(model, simulation, scenario, &setting.links, setting.batch)? {
                Ok(classes) => classes,
                Err(lacking) => {
                    point.fits = Some(false);
                    point.lacking = Some(lacking);
                    return Ok((point, Vec::new()));
                }
            }
        }
    };
    for (stage, cost) in &simulation.costs {
        for class in &mut classes {
            give(class, *stage, cost, &setting)?;
        }
    }
    let (classes, capacity) = with_memory(with_imbalance(classes, &setting)?, &setting)?;
    point.capacity_bytes = capacity.or(point.capacity_bytes);
    point.memory_bytes = classes.iter().filter_map(|class| class.memory_bytes).reduce(f64::max);
    if let Some(capacity) = point.capacity_bytes {
        let lacking = |class: &ClassCosts| {
            let bytes = class.memory_bytes.filter(|&bytes| bytes > capacity)?;
            Some(Lacking { rank: class.rank, ranks: class.count, bytes })
        };
        point.out_of_memory = classes.iter().filter_map(lacking).collect();
        point.fits = point.memory_bytes.map(|_| point.out_of_memory.is_empty());
    }
    if point.fits == Some(false) {
        return Ok((point, Vec::new()));
    }
    let schedule = Schedule {
        mode: scenario.mode,
        micro_batches: scenario.micro_batches,
        depth: scenario.depth,
        queue: scenario.queue,
        sync_every: (point.replicas > 1).then_some(scenario.sync_every),
        buckets: simulation.buckets,
        seen_share: setting.value("seen_share", &simulation.seen_share)?.min(1.0),
        steps: 0,
    };
    let measured = measure(&classes, schedule, simulation.steps);
    let step_ms = measured.report.step_ms;
    point.step_ms = Some(step_ms);
    point.samples_per_s = (step_ms > 0.0).then(|| setting.batch * ranks as f64 / step_ms * 1e3);
    point.critical_path = measured.critical_path;
    let mut figures: Vec<ClassFigures> = classes
        .iter()
        .filter_map(|class| {
            let figures = measured.report.rank(class.rank)?.clone();
            Some(ClassFigures { ranks: class.count, figures })
        })
        .collect();
    figures.sort_by_key(|class| std::cmp::Reverse(class.ranks));
    point.figures = figures;
    Ok((point, measured.events))
}

fn setting<'a>(
    simulation: &'a Simulation,
    scenario: &'a Scenario,
    ranks: usize,
) -> Result<Setting<'a>> {
    let batch = simulation.batch.per_rank(ranks);
    let mut values = simulation.parameters.clone();
    values.insert("W".into(), ranks as f64);
    values.insert("B".into(), batch);
    let replicas = scenario.replicas.value(&values);
    let groups = replicas as usize;
    if groups == 0 || groups as f64 != replicas || !ranks.is_multiple_of(groups) {
        return Err(Error::Usage(format!(
            "scenario {} on {ranks} ranks: replicas = `{}` is {replicas}; it must be a divisor of \
             the ranks",
            scenario.name, scenario.replicas
        )));
    }
    values.insert("M".into(), replicas);
    values.insert("N".into(), (ranks / groups) as f64);
    let grid = Grid2d::new(ranks, groups, scenario.placement)?;
    let per_node = simulation.topology.node(ranks)?;
    let links = Links { topology: &simulation.topology, grid, per_node };
    Ok(Setting { simulation, scenario, links, batch, values })
}

/// A collective's work from an amount of bytes or milliseconds.
type LinkTime<'a> = fn(&Links<'a>, f64) -> LinkWork;

/// Sets what a stage costs.
fn give<'a>(
    class: &mut ClassCosts,
    stage: Stage,
    cost: &Cost,
    setting: &Setting<'a>,
) -> Result<()> {
    let name = Stage::ALL.iter().find(|(_, known)| *known == stage).map_or("", |(name, _)| name);
    let links = &setting.links;
    let topology = links.topology;
    let (amount, is_bytes) = match cost {
        Cost::Ms(formula) => (setting.value(&format!("ms.{name}"), formula)?, false),
        Cost::Bytes(formula) => (setting.value(&format!("bytes.{name}"), formula)?, true),
    };
    // What a link does, in bytes or given; and what a lane does.
    let link = |of_bytes: LinkTime<'a>, of_ms: LinkTime<'a>| {
        if is_bytes { of_bytes(links, amount) } else { of_ms(links, amount) }
    };
    let lane = |gb_per_s: f64| if is_bytes { ms(amount, gb_per_s) } else { amount };
    match stage {
        Stage::Read => class.read_ms = amount,
        Stage::Upload => class.upload_ms = lane(topology.host_gb_per_s),
        Stage::Keys => class.keys = link(Links::exchange, Links::group_ms),
        Stage::Ssd => class.ssd_ms = lane(topology.ssd_gb_per_s),
        Stage::Host => class.host_ms = lane(topology.host_gb_per_s),
        Stage::Install => class.install_ms = lane(topology.device_gb_per_s),
        Stage::Shared => class.shared_ms = lane(topology.device_gb_per_s),
        Stage::Lookup => class.lookup_ms = lane(topology.device_gb_per_s),
        Stage::Exchange => {
            // Half goes out, half comes back, each in an operation of its own.
            let both = link(Links::exchange, Links::group_ms);
            class.exchange_out = both.part(0.5);
            class.exchange_back = both.part(0.5);
        }
        Stage::Dense => class.dense_ms = amount,
        Stage::AllReduce => class.all_reduce = link(Links::all_reduce, Links::all_ms),
        Stage::Update => class.update_ms = lane(topology.device_gb_per_s),
        Stage::Sync => class.sync = link(Links::sync, Links::replicas_ms),
        Stage::Overhead => class.overhead_ms = amount,
    }
    Ok(())
}

/// A class of ranks, and how much more than the mean its part of the tables is used.
type Heated = (ClassCosts, f64);

/// Hot ranks as a class of their own.
fn with_imbalance(classes: Vec<ClassCosts>, setting: &Setting<'_>) -> Result<Vec<Heated>> {
    let Some(imbalance) = &setting.simulation.imbalance else {
        return Ok(classes.into_iter().map(|class| (class, 1.0)).collect());
    };
    let hot = setting.value("imbalance.ranks", &imbalance.ranks)? as usize;
    let factor = setting.value("imbalance.factor", &imbalance.factor)?;
    // A file with a model has no [imbalance]: here all ranks are of one class.
    let mean = classes[0];
    let hottest = ClassCosts { count: hot.min(mean.count), ..mean.hotter(factor) };
    let rest = ClassCosts { rank: hottest.count, count: mean.count - hottest.count, ..mean };
    let heated = [(hottest, factor), (rest, 1.0)];
    Ok(heated.into_iter().filter(|(class, _)| class.count > 0).collect())
}

/// What `[memory]` says of each class, and what a rank has.
fn with_memory(
    heated: Vec<Heated>,
    setting: &Setting<'_>,
) -> Result<(Vec<ClassCosts>, Option<f64>)> {
    let Some(memory) = &setting.simulation.memory else {
        return Ok((heated.into_iter().map(|(class, _)| class).collect(), None));
    };
    let capacity = setting.value("memory.capacity", &memory.capacity)?;
    let even = setting.value("memory.tables", &memory.tables)?
        + setting.value("memory.reserve", &memory.reserve)?;
    let buffers = setting.value("memory.buffers", &memory.buffers)?;
    let classes = heated
        .into_iter()
        .map(|(class, factor)| ClassCosts { memory_bytes: Some(even + buffers * factor), ..class });
    Ok((classes.collect(), Some(capacity)))
}
