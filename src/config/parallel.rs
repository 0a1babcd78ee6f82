//! `[parallel]`: how many ranks, how they talk, who keeps which table, and what happens when a rank
//! runs out of data.

use std::num::NonZeroU64;
use std::path::PathBuf;
use std::time::Duration;

use tessera_comm::Codec;
use tessera_embedding::plan::{Placement, Route};

use super::Read;
use super::section::Section;

/// Longest time limit, in seconds: a day.
const TIME_LIMIT_MAX_S: f64 = 86_400.0;

/// Most ranks of one process: each has threads of its own.
const THREAD_RANKS_MAX: usize = 256;

/// How ranks talk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comm {
    /// There is one rank.
    Single,
    /// Ranks are threads of one process.
    Threads,
    /// Ranks are processes that an MPI launcher started.
    Mpi,
}

/// What the loss of a step is divided by when some ranks have run out of data of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uneven {
    /// By the samples that there are: their mean.
    Drain,
    /// By the samples of a whole batch: those that are missing have weight 0.
    Pad,
}

/// Where the plan comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlanSource {
    /// The planner's own.
    Auto,
    /// A file that `tessera plan --json` wrote.
    File(PathBuf),
}

/// `[parallel]`.
#[derive(Clone, Debug)]
pub struct ParallelConfig {
    /// Ranks over all.
    pub ranks: usize,
    /// How they talk.
    pub comm: Comm,
    /// Groups of two-dimensional parallelism, each of which holds all tables.
    pub replicas: u64,
    /// Steps between averages over groups.
    pub sync_every: NonZeroU64,
    /// Which ranks form a group.
    pub placement: Placement,
    /// Which rank keeps which part of which table.
    pub plan: PlanSource,
    /// What travels; the planner's choice for each table when absent.
    pub route: Option<Route>,
    /// How vectors travel from their owners.
    pub codec_forward: Codec,
    /// How gradients travel to them.
    pub codec_backward: Codec,
    /// How long an operation waits for the other ranks.
    pub time_limit: Duration,
    /// What a step's loss is divided by, where ranks read files of their own.
    pub uneven: Uneven,
}

/// Reads the section but for what depends on how data are read.
pub(super) fn parallel(section: &mut Section<'_>) -> ParallelConfig {
    let ranks = section.at_least_one("ranks", 1u64);
    let (threads, single) = (("threads", Comm::Threads), ("single", Comm::Single));
    let comm = match ranks {
        0 | 1 => section.choice("comm", &[single, threads, ("mpi", Comm::Mpi)]),
        _ => section.choice("comm", &[threads, single, ("mpi", Comm::Mpi)]),
    };
    let alone = comm == Comm::Single;
    if alone && ranks > 1 {
        section.fault("comm", format!("single is one rank; parallel.ranks is {ranks}"));
    }
    if comm == Comm::Threads {
        section.at_most("ranks", ranks as usize, THREAD_RANKS_MAX);
    }
    if comm == Comm::Mpi && !cfg!(feature = "mpi") {
        section.fault("comm", "this program was built without MPI: build it with --features mpi");
    }
    let replicas = section.at_least_one("replicas", 1u64);
    if !ranks.is_multiple_of(replicas.max(1)) {
        section.fault("replicas", format!("{ranks} ranks cannot form {replicas} equal groups"));
    }
    let sync_every = section.at_least_one("sync_every", 1u64);
    let placement = section.choice(
        "placement",
        &[("strided", Placement::Strided), ("contiguous", Placement::Contiguous)],
    );
    let given = section.entries().get("plan").and_then(|plan| plan.as_str());
    let plan = if given.is_some_and(|plan| plan != "auto")
        || section.entries().get("plan").is_some_and(toml::Value::is_array)
    {
        let file = section.paths("plan").and_then(|mut paths| paths.pop());
        file.map_or(PlanSource::Auto, PlanSource::File)
    } else {
        section.or("plan", "auto".to_owned());
        PlanSource::Auto
    };
    if alone && plan != PlanSource::Auto {
        section.fault("plan", "one rank holds every table: only \"auto\" has a meaning");
    }
    let route = section.choice(
        "route",
        &[("auto", None), ("unique", Some(Route::Unique)), ("pooled", Some(Route::Pooled))],
    );
    let codecs = Codec::ALL.map(|codec| (codec.name(), codec));
    let codec_forward = section.choice("codec_forward", &codecs);
    let codec_backward = section.choice("codec_backward", &codecs);
    for (key, codec) in [("codec_forward", codec_forward), ("codec_backward", codec_backward)] {
        if codec == Codec::Fp32 {
        } else if ranks <= 1 {
            section.fault(key, "one rank sends nothing: only \"fp32\" has a meaning");
        } else if ranks == replicas {
            section.fault(key, "a group of one rank sends nothing: only \"fp32\" has a meaning");
        }
    }
    if alone && route.is_some() {
        section.fault("route", "one rank sends nothing: only \"auto\" has a meaning");
    }
    let seconds = section.or("time_limit_s", 600.0f64);
    if !(seconds > 0.0 && seconds <= TIME_LIMIT_MAX_S) {
        section.fault(
            "time_limit_s",
            format!("is {seconds}; it must be above 0 and at most {TIME_LIMIT_MAX_S}"),
        );
    }
    ParallelConfig {
        ranks: ranks as usize,
        comm,
        replicas,
        sync_every: NonZeroU64::new(sync_every).unwrap_or(NonZeroU64::MIN),
        placement,
        plan,
        route,
        codec_forward,
        codec_backward,
        time_limit: Duration::from_secs_f64(seconds.clamp(1e-3, TIME_LIMIT_MAX_S)),
        uneven: Uneven::Drain,
    }
}

/// Reads `uneven`, which has a meaning only where ranks can run out of data one by one.
pub(super) fn uneven(section: &mut Section<'_>, read: Read) -> Uneven {
    match read {
        Read::Own => section.choice("uneven", &[("drain", Uneven::Drain), ("pad", Uneven::Pad)]),
        Read::All => {
            section.refuse(
                "uneven",
                "all ranks read the same data: only data.read = \"own\" has ends that differ",
            );
            Uneven::Drain
        }
    }
}
