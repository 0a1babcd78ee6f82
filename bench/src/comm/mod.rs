//! `comm`: bandwidth and latency of operations between ranks, through the communicators that
//! training uses.
//!
//! ```text
//! on every rank: copies through memory for every size            the limit
//!                for every operation and size: check the answer, warm up, measure
//!                links and memory for the planner, where asked for
//! ```
//! The loop is closed: every operation begins when all ranks are ready and is over when the
//! slowest is.

pub mod knobs;
pub mod measure;
pub mod operation;
pub mod point;
pub mod topology;

use std::num::NonZeroUsize;

use tessera_comm::{CommError, Communicator, LaunchEnv, Options, threads};
use tessera_device::Cpu;

use crate::document::Document;
use crate::machine::Machine;
use crate::{BenchError, Result};
use knobs::{Backend, CommArgs};
use measure::{Repeat, copy_gb_per_s, repeat};
use operation::Operation;
pub use point::CommPoint;
use topology::{Measured, Nodes, ranks_per_node};

/// The command's name in documents.
pub const COMMAND: &str = "comm";

/// What every rank finds, alike on all of them.
struct Findings {
    machine: Machine,
    points: Vec<CommPoint>,
    topology: Option<Measured>,
}

/// Runs the command. `None` on processes of a job other than the first.
///
/// Errors: knobs that make no sense, a wrong answer, no memory, a rank that failed.
pub fn run(args: &CommArgs) -> Result<Option<Document<CommPoint>>> {
    if args.iterations == 0 {
        return Err(BenchError::usage("--iterations must be at least 1"));
    }
    match args.comm {
        Backend::Threads => over_threads(args),
        Backend::Mpi => over_mpi(args),
    }
}

fn over_threads(args: &CommArgs) -> Result<Option<Document<CommPoint>>> {
    if let Some(env) = LaunchEnv::read(|name| std::env::var(name).ok())?
        && env.size > 1
    {
        return Err(BenchError::Usage(format!(
            "a launcher started {} processes: give --comm mpi, or start one for ranks that are \
             threads",
            env.size
        )));
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let ranks = args.ranks.map_or(cores.max(2), usize::from);
    let results = threads::run(ranks, &Options::default(), |comm| {
        let result = on_rank(&comm, args);
        if let Err(error) = &result {
            comm.give_up(&error.to_string());
        }
        result
    })?;
    let mut found = first_cause(results)?;
    let subject = format!("{ranks} ranks that are threads of one process");
    Ok(Some(document(args, subject, found.swap_remove(0))?))
}

/// All ranks' findings, or the error that the other ranks' came of.
fn first_cause(results: Vec<Result<Findings>>) -> Result<Vec<Findings>> {
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for result in results {
        match result {
            Ok(findings) => found.push(findings),
            Err(error) => errors.push(error),
        }
    }
    errors.sort_by_key(|error| match error {
        BenchError::Comm(error) => matches!(**error, CommError::WorldFailed { .. }),
        _ => false,
    });
    errors.into_iter().next().map_or(Ok(found), Err)
}

#[cfg(feature = "mpi")]
fn over_mpi(args: &CommArgs) -> Result<Option<Document<CommPoint>>> {
    // Dropped with an error, the job ends as a failed process's does, and the others are told.
    let (job, comm) = tessera_comm::mpi::init(&Options::default())?;
    let root = comm.rank() == 0;
    let subject = format!("{} ranks that are processes, {}", comm.size(), job.library().trim());
    let findings = on_rank(&comm, args).inspect_err(|error| comm.give_up(&error.to_string()))?;
    comm.close()?;
    job.finalize()?;
    if root { document(args, subject, findings).map(Some) } else { Ok(None) }
}

#[cfg(not(feature = "mpi"))]
fn over_mpi(_: &CommArgs) -> Result<Option<Document<CommPoint>>> {
    Err(BenchError::usage(
        "this program was built without MPI: build it with --features mpi for --comm mpi",
    ))
}

/// The document, and the topology's file.
fn document(args: &CommArgs, subject: String, findings: Findings) -> Result<Document<CommPoint>> {
    if let (Some(path), Some(topology)) = (&args.topology, &findings.topology) {
        topology.write(path)?;
    }
    Ok(Document::new(COMMAND, findings.machine, args, subject, findings.points))
}

/// Operations and their sizes, in order: a barrier has none, a codec needs a row.
fn cases(args: &CommArgs) -> Vec<(Operation, usize)> {
    let all = Operation::ALL.to_vec();
    let operations = if args.operations.is_empty() { &all } else { &args.operations };
    let mut cases = Vec::new();
    for &operation in operations {
        if operation == Operation::Barrier {
            cases.push((operation, 0));
            continue;
        }
        let sizes = args.sizes.iter().map(|size| size.0);
        let empty = |bytes: usize| {
            matches!(operation, Operation::Codec(_))
                && operation.elements(bytes, args.dim.get()) == 0
        };
        cases.extend(sizes.filter(|&bytes| !empty(bytes)).map(|bytes| (operation, bytes)));
    }
    cases
}

/// One rank's part.
fn on_rank(comm: &Communicator, args: &CommArgs) -> Result<Findings> {
    let ranks = comm.size();
    if args.ranks.is_some_and(|asked| asked.get() != ranks) {
        return Err(BenchError::Usage(format!(
            "--ranks differs from the launcher's {ranks} ranks"
        )));
    }
    if ranks < 2 {
        return Err(BenchError::usage("one rank has nobody to exchange with: give --ranks 2"));
    }
    let (here, per_node) = places(comm, args)?;
    // Ranks of a machine share its cores.
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let cpu = Cpu::new(NonZeroUsize::new((cores / here).max(1)))?;
    let mut machine = Machine::look(&cpu);
    if args.comm == Backend::Threads {
        machine.threads *= ranks;
    }

    let cases = cases(args);
    let largest = args.sizes.iter().map(|size| size.0).max().filter(|&bytes| bytes > 0);
    let mut limits: Vec<(usize, f64)> = Vec::new();
    for bytes in args.sizes.iter().map(|size| size.0).chain([largest.unwrap_or(1 << 20)]) {
        if bytes > 0 && limits.iter().all(|(known, _)| *known != bytes) {
            limits.push((bytes, copy_gb_per_s(comm, bytes)?));
        }
    }
    let fallback = limits.iter().max_by_key(|(bytes, _)| *bytes).map_or(f64::NAN, |limit| limit.1);
    let limit = |bytes| limits.iter().find(|(b, _)| *b == bytes).map_or(fallback, |limit| limit.1);

    let how = Repeat {
        warmup: args.warmup,
        iterations: args.iterations,
        simd: cpu.simd(),
        dim: args.dim.get(),
    };
    let mut points = Vec::with_capacity(cases.len());
    for (operation, bytes) in cases {
        let samples = repeat(comm, operation, bytes, how)?;
        let moved = operation.elements(bytes, how.dim) * size_of::<f32>();
        let moved = operation.moved_bytes(moved, ranks);
        points.push(CommPoint::new(operation, bytes, moved, limit(bytes), &samples));
    }
    let topology = match args.topology {
        Some(_) => {
            let nodes = Nodes { here, per_node };
            Some(topology::measure(comm, nodes, &cpu, &machine, how)?)
        }
        None => None,
    };
    Ok(Findings { machine, points, topology })
}

/// Ranks on this machine, and those that count as a node: as asked for, or those whose machines
/// have one name.
fn places(comm: &Communicator, args: &CommArgs) -> Result<(usize, usize)> {
    let ranks = comm.size();
    let asked = args.ranks_per_node.map(usize::from);
    if let Some(per_node) = asked.filter(|&per_node| !ranks.is_multiple_of(per_node)) {
        let text = format!("--ranks-per-node {per_node} does not divide {ranks} ranks");
        return Err(BenchError::Usage(text));
    }
    if args.comm == Backend::Threads {
        return Ok((ranks, asked.unwrap_or(ranks)));
    }
    let name = std::fs::read("/proc/sys/kernel/hostname").unwrap_or_default();
    let names = comm.all_gather(name).wait()?;
    let names: Vec<Vec<u8>> = names.iter().map(<[u8]>::to_vec).collect();
    let here = names.iter().filter(|&name| *name == names[comm.rank()]).count();
    Ok((here, asked.map_or_else(|| ranks_per_node(&names), Ok)?))
}
