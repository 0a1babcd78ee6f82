//! `tessera data synth|convert|inspect`.

use tessera_data::{Format, SourceSpec, convert, inspect, open};

use crate::cli::{ConfigArgs, Convert, Data, Inspect, Split};
use crate::config::Config;
use crate::progress::counting;
use crate::{Error, Result, console, source};

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
                console::tell(format_args!(
                    "ceiling: AUC {auc:.4} (expected for the teacher's own probabilities)"
                ));
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
    let spec = expressed(spec, args.to)?;
    let samples = convert(&spec, args.to, &args.out, counting())?;
    console::tell(format_args!("wrote {samples} samples as {} to {}", args.to, args.out.display()));
    Ok(())
}

/// The source with what `to` needs and a configuration of its own format does not tell.
///
/// criteo-tsv has names for dense columns, which those of a source without names (`dense1`, ...)
/// take in order. raw has fixed numbers of ids: those of the first sample, and a sample with
/// others is refused by the writer.
fn expressed(spec: &SourceSpec, to: Format) -> Result<SourceSpec> {
    let mut spec = spec.clone();
    let named = matches!(spec.format, Format::Parquet | Format::CriteoTsv);
    if to == Format::CriteoTsv && !named {
        for (name, number) in spec.schema.dense.iter_mut().zip(1..) {
            *name = format!("i{number}");
        }
    }
    if to == Format::Raw && matches!(spec.format, Format::Parquet | Format::MlperfNpy) {
        let first = open(&spec)?.read(1)?;
        for (feature, bags) in spec.schema.features.iter_mut().zip(first.features()) {
            // A source without samples is refused by the conversion.
            feature.hots = if bags.bags() == 0 { 0 } else { bags.bag(0).len() };
        }
    }
    Ok(spec)
}

fn look(args: &Inspect) -> Result<()> {
    let (_, spec) = load(&args.config, args.split)?;
    let report = inspect(&spec, Some(args.samples))?;
    if args.json {
        let text = serde_json::to_string_pretty(&report).expect("a report has string keys only");
        console::print(text + "\n")
    } else {
        console::print(report)
    }
}
