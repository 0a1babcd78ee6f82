//! The `tessera-bench` program: parses knobs, measures, prints figures.

use std::error::Error as _;
use std::process::ExitCode;

use clap::Parser;
use tessera_bench::cache::{self, CachePoint, TrainPoint};
use tessera_bench::comm::{self, CommPoint};
use tessera_bench::compare::{Comparison, compare};
use tessera_bench::document::{Document, Figures, Point};
use tessera_bench::knobs::{Cli, Command, CompareArgs, OutputKnobs};
use tessera_bench::pipeline::{self, PipelinePoint};
use tessera_bench::workloads::Work;
use tessera_bench::{BenchError, Result, report, run};

fn main() -> ExitCode {
    match execute(&Cli::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            let mut cause = error.source();
            while let Some(reason) = cause {
                eprintln!("  because: {reason}");
                cause = reason.source();
            }
            ExitCode::from(error.exit_code())
        }
    }
}

fn execute(command: &Command) -> Result<()> {
    match command {
        Command::Lookup(args) => {
            finish(&args.run.output, || run::run_tables(args, Work::Lookup).map(Some))
        }
        Command::Update(args) => {
            finish(&args.run.output, || run::run_tables(args, Work::Update).map(Some))
        }
        Command::Step(args) => finish(&args.run.output, || run::run_step(args).map(Some)),
        Command::Comm(args) => finish(&args.output, || comm::run(args)),
        Command::Cache(args) => finish(&args.output, || cache::run(args).map(Some)),
        Command::Tiers(args) => finish(&args.output, || cache::train::run(args).map(Some)),
        Command::Pipeline(args) => finish(&args.output, || pipeline::run(args).map(Some)),
        Command::Compare(args) => compare_files(args),
    }
}

/// Measures and gives the figures out in the ways asked for, if this process is the one to do so.
fn finish<P: Figures>(
    knobs: &OutputKnobs,
    measure: impl FnOnce() -> Result<Option<Document<P>>>,
) -> Result<()> {
    // A document that cannot be read should not cost a measurement.
    let old = knobs.compare.as_deref().map(Document::<P>::load).transpose()?;
    let Some(document) = measure()? else { return Ok(()) };
    if knobs.json {
        println!("{}", document.to_json());
    } else {
        print!("{document}");
    }
    if let Some(path) = &knobs.report {
        std::fs::write(path, report::html(&document)?)
            .map_err(|source| BenchError::Write { path: path.clone(), source })?;
    }
    if let Some(old) = old {
        let comparison = compare(&old, &document)?;
        // Standard output holds the JSON document alone.
        if knobs.json { eprint!("{comparison}") } else { print!("\n{comparison}") }
    }
    Ok(())
}

fn compare_files(args: &CompareArgs) -> Result<()> {
    // Commands differ in their figures.
    let command = Document::<serde_json::Value>::load(&args.new)?.command;
    let comparison = match command.as_str() {
        comm::COMMAND => of_files::<CommPoint>(args)?,
        cache::COMMAND => of_files::<CachePoint>(args)?,
        cache::train::COMMAND => of_files::<TrainPoint>(args)?,
        pipeline::COMMAND => of_files::<PipelinePoint>(args)?,
        _ => of_files::<Point>(args)?,
    };
    if args.json {
        let text =
            serde_json::to_string_pretty(&comparison).expect("a comparison has string keys only");
        println!("{text}");
    } else {
        print!("{comparison}");
    }
    Ok(())
}

fn of_files<P: Figures>(args: &CompareArgs) -> Result<Comparison> {
    let old = Document::<serde_json::Value>::load(&args.old)?.command;
    let new = Document::<P>::load(&args.new)?;
    if old != new.command {
        return Err(BenchError::Usage(format!("cannot compare {old} with {}", new.command)));
    }
    compare(&Document::<P>::load(&args.old)?, &new)
}
