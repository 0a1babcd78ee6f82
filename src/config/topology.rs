//! Topology files: speeds and memory of the machines that a plan is for.
//!
//! Read as a configuration is: unknown keys are faults, and all faults are told at once.

use std::path::Path;

use tessera_embedding::plan::{Link, Topology};

use super::section::{Context, Section, list};
use super::{ConfigError, Fault};

/// The topology that `given` names: a preset, or else a TOML file.
///
/// Errors: [`ConfigError`]; a file with faults lists all of them.
pub fn load_topology(given: &str) -> Result<Topology, ConfigError> {
    if let Some(preset) = Topology::preset(given) {
        return Ok(preset);
    }
    let path = Path::new(given);
    let text = std::fs::read_to_string(path)
        .map_err(|source| ConfigError::Unreadable { path: path.into(), source })?;
    parse(&text, given)
}

/// The topology of a file's text; `name` is the file's.
fn parse(text: &str, name: &str) -> Result<Topology, ConfigError> {
    let path = Path::new(name);
    let table = text
        .parse::<toml::Table>()
        .map_err(|error| ConfigError::Syntax { path: path.into(), message: error.to_string() })?;
    let context = Context::new(path.into());
    let topology = read(Section::root(&context, table), name);
    let (mut faults, _, _) = context.finish();
    if faults.is_empty() {
        let fault = |(key, message): (&str, _)| Fault { key: key.to_owned(), message };
        faults.extend(topology.faults().into_iter().map(fault));
    }
    if faults.is_empty() {
        Ok(topology)
    } else {
        Err(ConfigError::Faults { path: path.into(), faults })
    }
}

pub(super) fn read(mut section: Section<'_>, name: &str) -> Topology {
    let preset = section.or("preset", "cpu".to_owned());
    let base = Topology::preset(&preset).unwrap_or_else(|| {
        let names = list(Topology::PRESETS.iter());
        section.fault("preset", format!("`{preset}` is not one of {names}"));
        Topology::preset("cpu").expect("cpu is a preset")
    });
    let mut link = |kind: &str, base: Link| Link {
        gb_per_s: section.or(&format!("{kind}_gb_per_s"), base.gb_per_s),
        latency_us: section.or(&format!("{kind}_latency_us"), base.latency_us),
    };
    let intra_node = link("intra_node", base.intra_node);
    let inter_node = link("inter_node", base.inter_node);
    let topology = Topology {
        name: section.or("name", name.to_owned()),
        ranks_per_node: section.optional("ranks_per_node").or(base.ranks_per_node),
        device_gb_per_s: section.or("device_gb_per_s", base.device_gb_per_s),
        intra_node,
        inter_node,
        host_gb_per_s: section.or("host_gb_per_s", base.host_gb_per_s),
        ssd_gb_per_s: section.or("ssd_gb_per_s", base.ssd_gb_per_s),
        device_bytes: section.or("device_bytes", base.device_bytes),
        host_bytes: section.or("host_bytes", base.host_bytes),
        ssd_bytes: section.or("ssd_bytes", base.ssd_bytes),
        reserve_bytes: section.or("reserve_bytes", base.reserve_bytes),
    };
    section.finish(None);
    topology
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_changes_what_it_names_of_a_preset() {
        let text = "preset = \"h100\"\nranks_per_node = 4\ninter_node_gb_per_s = 25\n\
                    device_bytes = 141_000_000_000\nname = \"h200\"";
        let read = parse(text, "t.toml").unwrap();
        let mut wanted = Topology::preset("h100").unwrap();
        wanted.name = "h200".into();
        wanted.ranks_per_node = Some(4);
        wanted.inter_node.gb_per_s = 25.0;
        wanted.device_bytes = 141_000_000_000;
        assert_eq!(read, wanted);
        assert_eq!(load_topology("a100").unwrap(), Topology::preset("a100").unwrap());
    }

    #[test]
    fn all_faults_are_told() {
        let told = |text| match parse(text, "t.toml") {
            Err(ConfigError::Faults { faults, .. }) => {
                faults.into_iter().map(|fault| format!("{fault}\n")).collect::<String>()
            }
            other => panic!("{other:?}"),
        };
        let faults = told("preset = \"abacus\"\nhost_gb_per_sec = 3\nssd_bytes = -1");
        for part in [
            "preset: `abacus` is not one of cpu, a100 and h100",
            "did you mean",
            "ssd_bytes: expected",
        ] {
            assert!(faults.contains(part), "{part}: {faults}");
        }
        let faults = told("device_gb_per_s = 0\nreserve_bytes = 64_000_000_001");
        for part in ["device_gb_per_s: must be above 0", "reserve_bytes: must be below"] {
            assert!(faults.contains(part), "{part}: {faults}");
        }
        assert!(matches!(parse("=", "t.toml"), Err(ConfigError::Syntax { .. })));
        assert!(matches!(load_topology("no/such.toml"), Err(ConfigError::Unreadable { .. })));
    }

    /// Every key is in the table of docs/planning.md with the values of the presets, and no other.
    #[test]
    fn the_docs_list_every_key() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/planning.md");
        let docs = std::fs::read_to_string(path).unwrap();
        let context = Context::new(Path::new("").into());
        read(Section::root(&context, toml::Table::new()), "t.toml");
        let (_, _, known) = context.finish();
        let rows = docs
            .lines()
            .skip_while(|line| !line.starts_with("| topology key"))
            .skip(2)
            .take_while(|line| line.starts_with('|'));
        let listed: std::collections::BTreeSet<String> =
            rows.filter_map(|row| row.split('`').nth(1).map(str::to_owned)).collect();
        assert_eq!(listed, known);
    }
}
