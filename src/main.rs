//! The `tessera` program: parses the command line, runs a command, prints what went wrong.

use std::process::ExitCode;

use clap::Parser;
use tessera::cli::{Cli, Command};
use tessera::{
    Result, chrome_trace, console, data_cmd, doctor, evaluate, export, plan, predict, simulate,
    train,
};

fn main() -> ExitCode {
    // Usage errors exit with 2 here, as --help and --version exit with 0.
    let cli = Cli::parse();
    // A panic is a fault of ours; it has told its place, and the run has failed.
    match std::panic::catch_unwind(|| run(&cli.command)) {
        Err(_) => ExitCode::FAILURE,
        Ok(Ok(code)) => code,
        Ok(Err(error)) => {
            console::tell_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Train(args) => {
            let ended = train::run(args)?;
            return Ok(ExitCode::from(ended.exit_code()));
        }
        Command::Eval(args) => evaluate::run(args)?,
        Command::Predict(args) => predict::run(args)?,
        Command::Export(args) => export::run(args)?,
        Command::Plan(args) => plan::run(args)?,
        Command::Simulate(args) => simulate::run(args)?,
        Command::TraceReport(args) => chrome_trace::run(args)?,
        Command::Data(command) => data_cmd::run(command)?,
        Command::Doctor(args) => {
            let report = doctor::examine()?;
            if args.json {
                let text =
                    serde_json::to_string_pretty(&report).expect("a report has string keys only");
                console::print(text + "\n")?;
            } else {
                console::print(report)?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}
