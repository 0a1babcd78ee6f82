//! `tessera data synth|convert|inspect`.

use tessera_data::{Format, SourceSpec, convert, inspect};

use crate::cli::{ConfigArgs, Convert, Data, Inspect, Split};
use crate::config::Config;
use crate::progress::counting;
use crate::{Error, Result, source};

/// Runs a data command.
///
/// Errors: bad data, by file and row, or a failed write.
pub fn run(command: &Data) -> Result<()> {
    match command {
        Data::Synth(args) => {
            let (config, spec) = load(&args.config, args.split)?;
            if config.data.format != Format::Synthetic {
                return Err(Error::Usage(format!(
                    "data synth makes data of a configuration with data.format = \"synthetic\", not \"{}\" (to rewrite files, use data convert)",
                    config.data.format
                )));
            }
            write(&spec, args)?;
            if let Some(auc) = source::ceiling(&config)? {
                eprintln!("ceiling: AUC {auc:.4} (expected for the teacher's own probabilities)");
            }
            Ok(())
        }
        Data::Convert(args) => {
            let (_, spec) = load(&args.config, args.split)?;
            write(&spec, args)
        }
        Data::Inspect(args) => look(args),
    }
}

fn load(args: &ConfigArgs, split: Split) -> Result<(Config, SourceSpec)> {
    let config = Config::load(&args.config, &args.set)?;
    let spec = source::required(&config, split)?;
    Ok((config, spec))
}

fn write(spec: &SourceSpec, args: &Convert) -> Result<()> {
    if args.to == Format::Synthetic {
        return Err(Error::Usage("--to synthetic: that format is generated, not written".into()));
    }
    let samples = convert(spec, args.to, &args.out, counting())?;
    eprintln!("wrote {samples} samples as {} to {}", args.to, args.out.display());
    Ok(())
}

fn look(args: &Inspect) -> Result<()> {
    let (_, spec) = load(&args.config, args.split)?;
    let report = inspect(&spec, Some(args.samples))?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).expect("a report has string keys only");
        println!("{text}");
    } else {
        print!("{report}");
    }
    Ok(())
}
