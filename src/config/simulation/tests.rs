//! Files that are read, files that are refused, and the docs.

use super::*;
use std::collections::BTreeSet;

const WHOLE: &str = r#"
        title = "t"
        batch_per_rank = 4
        ranks = [8, 2, 8]
        [parameters]
        c = 2.5
        [ms]
        dense = "c * W"
        [bytes]
        exchange = "1e6 * B"
        [topology]
        preset = "h100"
        [speed]
        link_share = "c / 5"
        [[scenario]]
        name = "s"
        mode = "nested"
        replicas = "W / 2"
        [[target]]
        scenario = "s"
        ranks = 2
        efficiency = 90
        efficiency_from = 2
    "#;

fn faults(text: &str) -> String {
    match parse(text, Path::new("s.toml")) {
        Err(ConfigError::Faults { faults, .. }) => {
            faults.into_iter().map(|fault| format!("{fault}\n")).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_file_is_read_with_its_defaults() {
    let read = parse(WHOLE, Path::new("dir/s.toml")).unwrap();
    assert_eq!(read.batch, Batch::PerRank(4.0));
    assert_eq!(read.scenarios[0].ranks, [2, 8]);
    assert_eq!((read.scenarios[0].mode, read.scenarios[0].depth), (Mode::Nested, 8));
    assert_eq!(read.topology.inter_node.gb_per_s, 25.0);
    assert_eq!(read.targets[0].quantity, Quantity::Efficiency { percent: 90.0, from: 2 });
    assert_eq!(read.costs.len(), 2);
    assert!(read.model.is_none() && read.memory.is_none() && read.imbalance.is_none());
}

#[test]
fn all_faults_are_told_at_once() {
    let told = faults(
        r#"
            title = 7
            batch_per_rank = 4
            batch_size = 8
            ranks = [0]
            stpes = 3
            [parameters]
            W = 1
            [ms]
            dense = "1 +"
            exchange = "speed * 2"
            keys = true
            lookups = 1
            [bytes]
            exchange = 5
            dense = 5
            [speed]
            link_share = 2
            [model]
            [imbalance]
            [memory]
            [topology]
            device_gb_per_s = -1
            [[scenario]]
            name = "a"
            mode = "nest"
            depth = 0
            [[scenario]]
            name = "a"
            mode = "serial"
            [[target]]
            scenario = "b"
            ranks = 2
            efficiency = 3
        "#,
    );
    for part in [
        "title: expected a string",
        "batch_size: is given beside",
        "ranks: must be numbers from 1",
        "stpes: unknown key; did you mean `steps`?",
        "parameters.W: is a name",
        "ms.dense: `1 +`: a number",
        "ms.exchange: speed is none of [parameters]",
        "ms.keys: expected a number, or a formula",
        "ms.lookups: [ms] does not take this option",
        "bytes.exchange: is given in [ms] too",
        "bytes.dense: [bytes] does not take this option",
        "speed.link_share: must be above 0",
        "model.tables: missing",
        "speed.tflops: missing",
        "imbalance: has no meaning with [model]",
        "memory.capacity: missing",
        "topology.device_gb_per_s: must be above 0",
        "scenario.0.mode: `nest` is not one of",
        "scenario.0.depth: must be from 1",
        "scenario.1.name: `a` is there twice",
        "target.0.scenario: there is no scenario `b`",
        "target.0.efficiency_from: efficiency and",
        "target.0.step_ms: one of step_ms",
    ] {
        assert!(told.contains(part), "`{part}` is missing from:\n{told}");
    }
    let told = faults("");
    for part in ["title: missing", "batch_per_rank: missing", "ranks: missing", "[[scenario]]"] {
        assert!(told.contains(part), "`{part}` is missing from:\n{told}");
    }
    assert!(matches!(parse("=", Path::new("s")), Err(ConfigError::Syntax { .. })));
    assert!(matches!(
        load_simulation(Path::new("no/such.toml")),
        Err(ConfigError::Unreadable { .. })
    ));
}

/// Every key is in a table of docs/simulate.md, and no other.
#[test]
fn the_docs_list_every_key() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/simulate.md");
    let docs = std::fs::read_to_string(path).unwrap();
    let context = Context::new(Path::new("").into());
    simulation(Section::root(&context, WHOLE.parse().unwrap()), Path::new(""));
    let (_, _, known) = context.finish();
    // Parameters have the names that a file gives them; topologies are in docs/planning.md.
    let known: BTreeSet<String> = known
        .into_iter()
        .filter(|key| !key.starts_with("parameters.") && !key.starts_with("topology."))
        .collect();
    let mut listed = BTreeSet::new();
    let mut inside = false;
    for line in docs.lines() {
        inside = line.starts_with("| key ") || (inside && line.starts_with('|'));
        if inside && line.starts_with("| `") {
            listed.extend(line.split('`').nth(1).map(str::to_owned));
        }
    }
    assert_eq!(listed, known);
}
