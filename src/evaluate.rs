//! `tessera eval`.

use prometheus::Registry;
use tessera_device::Cpu;

use crate::checkpoint::Checkpoint;
use crate::cli::{self, Split};
use crate::config::Config;
use crate::metrics::Metrics;
use crate::model::{FirstValues, Model};
use crate::signals::Signals;
use crate::trainer::{Evaluated, evaluate};
use crate::{Result, console, source};

/// Loads the configuration and the model of a checkpoint.
///
/// Errors: a configuration or checkpoint that is wrong, or that do not fit each other.
pub fn load(args: &cli::ConfigArgs, path: &std::path::Path) -> Result<(Config, Model<Cpu>)> {
    let mut config = Config::load(&args.config, &args.set)?;
    // A run that goes on meanwhile has the ranks' folders.
    if let Some(cold) = config.tiers.as_mut().and_then(|tiers| tiers.cold.as_mut()) {
        cold.dir.push("eval");
    }
    let checkpoint = Checkpoint::find(path)?;
    let mut model = Model::new(&Cpu::new(config.threads)?, &config, FirstValues::Loaded)?;
    let ranks = model.ranks();
    checkpoint.load(ranks.control(), &mut model, false)?;
    Ok((config, model))
}

/// Metrics of a command that nobody scrapes.
///
/// Errors: none in practice; the registry is new.
pub fn unwatched(model: &Model<Cpu>) -> Result<Metrics> {
    Metrics::register(&Registry::new(), model.table_names())
}

/// Runs `tessera eval`.
///
/// Errors: as [`load`], or bad data by file and row.
pub fn run(args: &cli::Eval) -> Result<()> {
    let (config, mut model) = load(&args.config, &args.checkpoint)?;
    source::required(&config, Split::Eval)?;
    let metrics = unwatched(&model)?;
    // Nothing is written, so that a signal may end the process at once.
    if let Evaluated::Done(evaluation) =
        evaluate(&config, &mut model, &metrics, &Signals::default())?
    {
        if args.json {
            let text = serde_json::to_string_pretty(&evaluation)
                .expect("an evaluation has string keys only");
            console::print(text + "\n")?;
        } else {
            console::print(format_args!("{evaluation}\n"))?;
        }
    }
    Ok(())
}
