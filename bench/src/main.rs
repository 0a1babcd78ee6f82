//! The `tessera-bench` program: parses knobs, measures, prints figures.

use std::error::Error as _;
use std::process::ExitCode;

use clap::Parser;
use tessera_bench::compare::compare;
use tessera_bench::document::Document;
use tessera_bench::knobs::{Cli, Command, CompareArgs, RunKnobs};
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
        Command::Lookup(args) => finish(&args.run, || run::run_tables(args, Work::Lookup)),
        Command::Update(args) => finish(&args.run, || run::run_tables(args, Work::Update)),
        Command::Step(args) => finish(&args.run, || run::run_step(args)),
        Command::Compare(args) => compare_files(args),
    }
}

/// Measures and gives the figures out in the ways asked for.
fn finish(knobs: &RunKnobs, measure: impl FnOnce() -> Result<Document>) -> Result<()> {
    // A document that cannot be read should not cost a measurement.
    let old = knobs.compare.as_deref().map(Document::load).transpose()?;
    let document = measure()?;
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
    let comparison = compare(&Document::load(&args.old)?, &Document::load(&args.new)?)?;
    if args.json {
        let text =
            serde_json::to_string_pretty(&comparison).expect("a comparison has string keys only");
        println!("{text}");
    } else {
        print!("{comparison}");
    }
    Ok(())
}
