//! `tessera plan`: which rank keeps which part of which table, before anything is trained.

mod csv;
mod report;
mod sample;
mod tables;
mod tiers;

use tessera_embedding::Tiers;
use tessera_embedding::plan::{
    Budget, CurvePoint, Grid2d, MissCurve, Placement, Plan as SavedPlan, PlanFile, Planned, Route,
    TableLoad, TierAdvice, TierJob, Topology, Workload, curve, plan, plan_given, tier_advice,
};

pub(crate) use tables::{SetDefaults, of_file};

use crate::cli::{GroupPlacement, Plan, Replicas};
use crate::config::{Config, PipelineMode, PlanSource, load_topology};
use crate::{Error, Result, console};

/// Steps of search for each point of a curve: its costs matter more than its last percent.
const CURVE_STEPS: usize = 2_000;

/// Runs the command.
///
/// Errors: [`Error::Usage`] and [`Error::Config`] for wrong input;
/// [`tessera_embedding::EmbeddingError::CannotPlace`] when a table has no room.
pub fn run(args: &Plan) -> Result<()> {
    if let Some(path) = &args.costs {
        return from_costs(args, path);
    }
    let job = Job::new(args)?;
    let replicas = match args.replicas {
        None if args.curve => Replicas::Auto,
        None => Replicas::Fixed(job.replicas),
        Some(replicas) => replicas,
    };
    let (points, groups) = match replicas {
        Replicas::Fixed(groups) => (Vec::new(), groups),
        Replicas::Auto => best(job.curve()?)?,
    };
    if args.curve {
        return console::print(if args.json {
            json(&report::curve_json(&points, groups))
        } else {
            report::curve_text(&points, groups)
        });
    }
    let grid = Grid2d::new(job.ranks, groups, job.placement)?;
    let mut planned = plan(&job.tables, grid, &job.topology, &job.workload, Budget::default())?;
    planned.notes.extend(job.notes.iter().cloned());
    let tiers = job.tiers(&planned);
    if args.json {
        return console::print(json(&PlanFile { tiers, ..PlanFile::new(&planned) }));
    }
    let mut text = String::new();
    if !points.is_empty() {
        text = report::curve_text(&points, groups) + "\n";
    }
    text += &report::plan_text(&planned, &job.heading(grid), report::Unit::Ms);
    if let Some(advice) = &tiers {
        text += "\n";
        text += &tiers::text(advice, job.ranks / groups);
    }
    console::print(text)
}

fn from_costs(args: &Plan, path: &std::path::Path) -> Result<()> {
    let ranks = args.ranks.ok_or_else(|| Error::Usage("--costs needs --ranks".into()))?;
    let bytes_max = args.bytes_max.unwrap_or(u64::MAX);
    let (tables, notes) = tables::given(path)?;
    let mut planned = plan_given(&tables, ranks, bytes_max, Budget::default())?;
    planned.notes.extend(notes);
    if args.json {
        return console::print(json(&PlanFile::new(&planned)));
    }
    let heading = format!(
        "{} tables with the costs of {} on {ranks} ranks of {}",
        tables.len(),
        path.display(),
        crate::text::size(bytes_max)
    );
    console::print(report::plan_text(&planned, &heading, report::Unit::Given))
}

fn json(value: &impl serde::Serialize) -> String {
    serde_json::to_string_pretty(value).expect("reports have string keys only") + "\n"
}

/// The points, and the number of groups of the one that costs least.
fn best(points: Vec<CurvePoint>) -> Result<(Vec<CurvePoint>, usize)> {
    let fit = points.iter().filter(|point| point.planned.is_ok());
    let least = fit.min_by(|a, b| a.total_ms().total_cmp(&b.total_ms()));
    match least.map(|point| point.grid.groups()) {
        Some(groups) => Ok((points, groups)),
        // One group asks the least of a rank, so that its reason is the one to tell.
        None => match points.into_iter().next().map(|point| point.planned) {
            Some(Err(error)) => Err(error.into()),
            _ => unreachable!("every number of ranks forms one group, and none had room"),
        },
    }
}

/// The plan of a run on the configuration's ranks: its file's, or the planner's own.
///
/// Errors: a file that is no plan or not one for these ranks; a table without room.
pub fn for_training(config: &Config) -> Result<SavedPlan> {
    let parallel = &config.parallel;
    let PlanSource::File(path) = &parallel.plan else {
        let grid = Grid2d::new(parallel.ranks, parallel.replicas as usize, parallel.placement)?;
        let workload = workload_of(config, parallel.ranks, false);
        let tables = tables::of_config(config);
        let topology = match &config.tiers {
            Some(tiers) => with_tiers(load_topology("cpu")?, tiers),
            None => with_room(load_topology("cpu")?, &tables, grid.ranks()),
        };
        return Ok(plan(&tables, grid, &topology, &workload, Budget::default())?.plan);
    };
    let text = std::fs::read_to_string(path)
        .map_err(|source| Error::Read { path: path.clone(), source })?;
    let bad = |reason: String| Error::BadFile { path: path.clone(), reason };
    let file: PlanFile =
        serde_json::from_str(&text).map_err(|error| bad(format!("is no plan: {error}")))?;
    // Before the plan is looked at: its size is the file's word.
    let groups = parallel.replicas as usize;
    if file.ranks.checked_mul(groups) != Some(parallel.ranks) || file.replicas != groups {
        return Err(Error::Usage(format!(
            "{} is a plan for {} groups of {} ranks; parallel.ranks is {} in {groups} groups",
            path.display(),
            file.replicas,
            file.ranks,
            parallel.ranks,
        )));
    }
    // The file says both.
    if parallel.route.is_some() {
        return Err(Error::Usage(format!(
            "parallel.route has no meaning with a plan file: {} says what travels; make the plan \
             with the route, or leave it out",
            path.display()
        )));
    }
    if let Some(table) = config.tables.iter().find(|table| table.sharding.is_some()) {
        return Err(Error::Usage(format!(
            "table {}: sharding has no meaning with a plan file: {} says how tables are cut; make \
             the plan with it, or leave it out",
            table.name,
            path.display()
        )));
    }
    file.plan().map_err(|error| bad(error.to_string()))
}

/// Memory for rows that nothing bounds, in bytes.
const UNBOUNDED_BYTES: u64 = 1 << 60;

/// `topology` with the memory that `[tiers]` gives each rank.
fn with_tiers(topology: Topology, tiers: &Tiers) -> Topology {
    Topology {
        device_bytes: tiers.device_bytes,
        reserve_bytes: 0,
        host_bytes: tiers.host_bytes.unwrap_or(UNBOUNDED_BYTES),
        ssd_bytes: match &tiers.cold {
            Some(cold) => cold.bytes.unwrap_or(UNBOUNDED_BYTES),
            None => 0,
        },
        ..topology
    }
}

/// `topology` with room for twice an even part of `tables` on each of `ranks`: what ranks really
/// have is not known here, and what they lack shows when memory is asked for.
fn with_room(topology: Topology, tables: &[TableLoad], ranks: usize) -> Topology {
    let total = tables.iter().fold(0u64, |sum, table| sum.saturating_add(table.total_bytes()));
    let part = (total / ranks as u64).saturating_mul(2).saturating_add(topology.reserve_bytes);
    Topology { device_bytes: topology.device_bytes.max(part), ..topology }
}

/// What a configuration asks of `ranks` ranks; `exact` sends unique rows only.
fn workload_of(config: &Config, ranks: usize, exact: bool) -> Workload {
    let dual_buffers = config.pipeline.mode != PipelineMode::Serial;
    let route = if exact { Some(Route::Unique) } else { config.parallel.route };
    workload(config.data.batch_size as u64, ranks, dual_buffers, route)
}

fn workload(batch_size: u64, ranks: usize, dual_buffers: bool, route: Option<Route>) -> Workload {
    Workload {
        row_buffers: if dual_buffers { 2 } else { 0 },
        route,
        ..Workload::new(batch_size as f64 / ranks as f64)
    }
}

/// What is planned.
struct Job {
    tables: Vec<TableLoad>,
    ranks: usize,
    replicas: usize,
    placement: Placement,
    sync_every: u64,
    topology: Topology,
    workload: Workload,
    notes: Vec<String>,
    /// Of the configuration's tables, where a sample was read.
    curves: Vec<MissCurve>,
    tiers: Option<Tiers>,
    /// Whether the topology was asked for, and is not just assumed.
    topology_given: bool,
}

impl Job {
    fn new(args: &Plan) -> Result<Self> {
        let mut notes = Vec::new();
        let mut curves = Vec::new();
        let config = match &args.config {
            Some(path) => Some(Config::load(path, &args.set)?),
            None => None,
        };
        let parallel = config.as_ref().map(|config| &config.parallel);
        let ranks = match (args.ranks, parallel) {
            (Some(ranks), _) => ranks,
            (None, Some(parallel)) => parallel.ranks,
            (None, None) => return Err(Error::Usage("--tables needs --ranks".into())),
        };
        if ranks == 0 {
            return Err(Error::Usage("--ranks 0: at least 1 is needed".into()));
        }
        let default = if config.is_some() { "cpu" } else { "h100" };
        let topology = load_topology(args.topology.as_deref().unwrap_or(default))?;
        let topology = match config.as_ref().and_then(|config| config.tiers.as_ref()) {
            // What was asked for by name keeps its own memory.
            Some(tiers) if args.topology.is_none() => with_tiers(topology, tiers),
            _ => topology,
        };
        let (tables, workload) = match (&config, &args.tables) {
            (Some(config), _) => {
                let mut tables = tables::of_config(config);
                if let Some(batches) = args.sample {
                    let sample = sample::count(config, batches, &mut tables)?;
                    notes.push(sample.note);
                    curves = sample.curves;
                }
                (tables, workload_of(config, ranks, args.exact))
            }
            (None, Some(path)) => {
                let defaults = SetDefaults {
                    rows_column: args.rows_column.as_deref(),
                    dim: args.dim,
                    optimizer: &args.optimizer,
                };
                let (tables, found) = tables::of_file(path, &defaults)?;
                notes.extend(found);
                let route = args.exact.then_some(Route::Unique);
                (tables, workload(args.batch_size, ranks, true, route))
            }
            (None, None) => unreachable!("the command line requires one of the two"),
        };
        Ok(Self {
            tables,
            ranks,
            replicas: parallel.map_or(1, |parallel| parallel.replicas as usize),
            placement: match (args.placement, parallel) {
                (Some(GroupPlacement::Strided), _) | (None, None) => Placement::Strided,
                (Some(GroupPlacement::Contiguous), _) => Placement::Contiguous,
                (None, Some(parallel)) => parallel.placement,
            },
            sync_every: args
                .sync_every
                .or(parallel.map(|parallel| parallel.sync_every.get()))
                .unwrap_or(1),
            topology,
            workload,
            notes,
            curves,
            tiers: config.as_ref().and_then(|config| config.tiers.clone()),
            topology_given: args.topology.is_some(),
        })
    }

    fn curve(&self) -> Result<Vec<CurvePoint>> {
        let budget = Budget { steps: CURVE_STEPS, ..Budget::default() };
        Ok(curve(
            &self.tables,
            self.ranks,
            self.placement,
            self.sync_every,
            &self.topology,
            &self.workload,
            budget,
        )?)
    }

    /// How large tiers of memory should be, where a sample tells.
    fn tiers(&self, planned: &Planned) -> Option<TierAdvice> {
        if self.curves.is_empty() {
            return None;
        }
        // A step takes at least what its tables cost, and so long the SSD may read.
        let step_s = (planned.cost_max() + planned.latency_ms) / 1e3;
        let ssd_bytes_max =
            self.topology_given.then_some(self.topology.ssd_gb_per_s * 1e9 * step_s);
        // Wide parts follow the tables, and are looked up by the same ids.
        let curves = (0..self.tables.len()).map(|table| &self.curves[table % self.curves.len()]);
        Some(tier_advice(&TierJob {
            planned,
            tables: &self.tables,
            curves: curves.collect(),
            given: self.tiers.as_ref(),
            ssd_bytes_max,
        }))
    }

    fn heading(&self, grid: Grid2d) -> String {
        let groups = match grid.groups() {
            1 => String::new(),
            groups => format!(", {groups} groups of {}", grid.ranks()),
        };
        format!(
            "{} tables on {} ranks{groups}, topology {}, {} samples a rank",
            self.tables.len(),
            self.ranks,
            self.topology.name,
            self.workload.batch_per_rank
        )
    }
}
