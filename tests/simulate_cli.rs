//! `tessera simulate` and `tessera trace-report`: published figures, files that are refused, traces
//! and plots.

mod common;

use std::path::Path;

use common::Project;
use serde_json::Value;

/// A file of the examples.
fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/simulate").join(name);
    path.to_str().unwrap().to_owned()
}

fn simulate(project: &Project, line: &str) -> Value {
    serde_json::from_str(&project.ok(&format!("simulate {line} --json")).stdout).unwrap()
}

/// Targets of a file, each of which must hold: (scenario, ranks, quantity, within, fitted).
#[track_caller]
fn held(outcome: &Value) -> Vec<(String, u64, String, f64, bool)> {
    let mut targets = Vec::new();
    for target in outcome["targets"].as_array().unwrap() {
        assert_eq!(target["holds"], true, "{target:#}");
        targets.push((
            target["scenario"].as_str().unwrap().to_owned(),
            target["ranks"].as_u64().unwrap(),
            target["quantity"].as_str().unwrap().to_owned(),
            target["within"].as_f64().unwrap(),
            target["fitted"].as_bool().unwrap(),
        ));
    }
    targets
}

/// The published comparison on 1,536 accelerators: step times within 3%, efficiencies within 2
/// points.
#[test]
fn the_published_pipelines_are_reproduced() {
    let project = Project::new("");
    let outcome = simulate(&project, &example("nested-pipelining.toml"));
    let targets = held(&outcome);
    for scenario in ["serial", "serial + 2D", "async", "nested", "nested + 2D"] {
        let of = |quantities: [&str; 2], most: f64| {
            let found = |target: &&(String, u64, String, f64, bool)| {
                target.0 == scenario && target.1 == 1536 && quantities.contains(&&*target.2)
            };
            let found: Vec<_> = targets.iter().filter(found).collect();
            assert_eq!(found.len(), 1, "{scenario} {quantities:?}");
            assert!(found[0].3 <= most, "{:?}", found[0]);
        };
        of(["step_ms", "samples_per_s"], 3.0);
        of(["efficiency", "efficiency"], 2.0);
    }
    // Published of nested: 154.23 ms of 1185 exposed, and 30.19 of the lookup.
    let points = outcome["points"].as_array().unwrap();
    let nested = points.iter().find(|p| p["scenario"] == "nested" && p["ranks"] == 1536).unwrap();
    let exposed = |names: &[&str]| {
        let stages = nested["figures"][0]["stages"].as_array().unwrap();
        let of = stages.iter().filter(|stage| names.contains(&stage["stage"].as_str().unwrap()));
        of.map(|stage| stage["exposed_ms"].as_f64().unwrap()).sum::<f64>()
    };
    let exchange = exposed(&["exchange_out", "exchange_back"]);
    assert!((exchange - 154.23).abs() < 0.05 * 154.23, "{exchange}");
    let rows = exposed(&["install", "shared"]);
    assert!((rows - 30.19).abs() < 0.1, "{rows}");
}

/// One run of `tessera-bench pipeline` on two ranks: within 10%, from what serial took beside its
/// delays.
#[test]
fn a_real_run_over_injected_delays_is_predicted() {
    let outcome = simulate(&Project::new(""), &example("injected-delays.toml"));
    let predicted =
        held(&outcome).into_iter().filter(|(.., within, fitted)| *within <= 10.0 && !fitted);
    let names: Vec<String> = predicted.map(|(scenario, ..)| scenario).collect();
    assert_eq!(names, ["prefetch", "nested"]);
}

/// 2D sparse parallelism on up to 4,096: throughputs within 5% from the one at 256 ranks, memory
/// verdicts right.
#[test]
fn the_published_replicas_are_reproduced() {
    let project = Project::new("");
    let outcome = simulate(&project, &example("two-dimensional.toml"));
    assert!(outcome["parameters"].as_object().unwrap().len() <= 4);
    let targets = held(&outcome);
    for ranks in [512, 1024, 2048, 4096] {
        let target = targets
            .iter()
            .find(|target| target.0 == "2D" && target.1 == ranks && target.2 == "samples_per_s")
            .unwrap_or_else(|| panic!("no target at {ranks}"));
        assert!(target.3 <= 5.0 && !target.4, "{target:?}");
    }
    let memory: Vec<u64> = targets
        .iter()
        .filter(|target| target.0 == "model parallel" && target.2 == "out_of_memory")
        .map(|target| target.1)
        .collect();
    assert_eq!(memory, [1024, 2048, 4096]);
    for point in outcome["points"].as_array().unwrap() {
        let lacks = point["scenario"] == "model parallel" && point["ranks"].as_u64() >= Some(2048);
        assert_eq!(point["fits"], !lacks, "{} on {}", point["scenario"], point["ranks"]);
        // One hot rank, with its bytes.
        let lacking = point["out_of_memory"].as_array().unwrap();
        assert_eq!(lacking.len(), usize::from(lacks));
        if let Some(rank) = lacking.first() {
            assert_eq!((&rank["rank"], &rank["ranks"]), (&Value::from(0), &Value::from(1)));
            assert!(rank["bytes"].as_f64() > point["capacity_bytes"].as_f64());
        }
    }
}

/// The reference workload from its tables, its towers and the machines' speeds.
#[test]
fn the_reference_workload_is_reproduced() {
    let project = Project::new("");
    for name in ["mlperf-h200.toml", "mlperf-gb200.toml"] {
        let outcome = simulate(&project, &example(name));
        let targets = held(&outcome);
        assert_eq!((targets.len(), targets[0].2.as_str()), (1, "samples_per_s"));
        assert!(targets[0].3 <= 5.0);
    }
}

const SMALL: &str = r#"
title = "small"
batch_per_rank = 100
ranks = [1, 16]

[topology]
preset = "h100"

[ms]
read = 1
ssd = 3
dense = 8
exchange = "4 * (N - 1) / N"
update = 1

[imbalance]
factor = "if_hot"

[parameters]
if_hot = 1.0

[[scenario]]
name = "serial"
mode = "serial"

[[scenario]]
name = "nested"
mode = "nested"
micro_batches = 4
"#;

#[test]
fn a_report_tells_steps_stages_and_targets() {
    let project = Project::new(SMALL);
    let ran = project.ok("simulate config.toml");
    for part in [
        "small",
        "free parameters: if_hot = 1",
        "speed-up",
        "nested (nested) on 16 ranks, 100 samples a rank, 4 micro-batches: 9.94 ms a step",
        "rank 1 and 14 like it",
        "critical path",
        "inter_node",
    ] {
        assert!(ran.stdout.contains(part), "`{part}` is missing from:\n{}", ran.stdout);
    }
    let ran = project.ok("simulate config.toml --scenario serial --ranks 1");
    assert!(ran.stdout.contains("serial (serial) on 1 ranks"), "{}", ran.stdout);
    // The same on every run.
    let first = project.ok("simulate config.toml --json").stdout;
    assert_eq!(project.ok("simulate config.toml --json").stdout, first);
    let outcome: Value = serde_json::from_str(&first).unwrap();
    let steps: Vec<f64> = outcome["points"]
        .as_array()
        .unwrap()
        .iter()
        .map(|point| point["step_ms"].as_f64().unwrap())
        .collect();
    for (step, wanted) in steps.iter().zip([13.0, 16.75, 9.0, 9.9375]) {
        assert!((step - wanted).abs() < 1e-6, "{steps:?}");
    }
    let efficiency = outcome["points"][1]["efficiency"].as_f64().unwrap();
    assert!((efficiency - 13.0 / 16.75).abs() < 1e-9, "{efficiency}");
}

/// What the trace of a simulation tells is what the simulation says of itself.
#[test]
fn a_trace_agrees_with_the_simulation() {
    let project = Project::new(SMALL);
    for (scenario, ranks) in [("serial", 1), ("serial", 16), ("nested", 16)] {
        let which = format!("--scenario {scenario} --ranks {ranks}");
        let outcome = simulate(&project, &format!("config.toml --trace t.json {which}"));
        let report = project.ok("trace-report t.json --json").stdout;
        let report: Value = serde_json::from_str(&report).unwrap();
        let of = |point: &&Value| point["scenario"] == scenario && point["ranks"] == ranks;
        let point = outcome["points"].as_array().unwrap().iter().find(of).unwrap();
        let near = |a: &Value, b: &Value, what: &str| {
            let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
            assert!((a - b).abs() < 1e-6, "{scenario} on {ranks}: {what} is {a} and {b}");
        };
        near(&point["step_ms"], &report["step_ms"], "step_ms");
        for class in point["figures"].as_array().unwrap() {
            let rank = report["ranks"].as_array().unwrap();
            let rank = rank.iter().find(|rank| rank["rank"] == class["rank"]).unwrap();
            near(&class["idle_ms"], &rank["idle_ms"], "idle_ms");
            let both = |name: &str| {
                let list = |value: &Value| value[name].as_array().unwrap().clone();
                let (ours, theirs) = (list(class), list(rank));
                assert_eq!(ours.len(), theirs.len());
                ours.into_iter().zip(theirs)
            };
            for (ours, theirs) in both("stages") {
                assert_eq!(ours["stage"], theirs["stage"]);
                near(&ours["busy_ms"], &theirs["busy_ms"], "busy_ms");
                near(&ours["exposed_ms"], &theirs["exposed_ms"], "exposed_ms");
            }
            for (ours, theirs) in both("lanes") {
                assert_eq!(ours["lane"], theirs["lane"]);
                near(&ours["utilisation"], &theirs["utilisation"], "utilisation");
            }
        }
        let length = |path: &Value| {
            let parts = path.as_array().unwrap().iter();
            Value::from(parts.map(|part| part["ms"].as_f64().unwrap()).sum::<f64>())
        };
        near(&length(&point["critical_path"]), &point["step_ms"], "the critical path");
        near(&length(&report["critical_path"]), &point["step_ms"], "the estimated critical path");
        let told = project.ok("trace-report t.json").stdout;
        for part in ["16 steps of", "exposed", "critical path", "device_ms"] {
            assert!(told.contains(part), "`{part}` is missing from:\n{told}");
        }
    }
}

#[test]
fn curves_are_drawn() {
    let project = Project::new(SMALL);
    project.ok("simulate config.toml --plot c.svg");
    let svg = std::fs::read_to_string(project.path("c.svg")).unwrap();
    assert!(svg.starts_with("<svg") && svg.contains("nested") && svg.contains("samples/s"));
    project.ok("simulate config.toml --plot c.html");
    let html = std::fs::read_to_string(project.path("c.html")).unwrap();
    assert_eq!(html.matches("<svg").count(), 2);
    assert!(html.contains("efficiency"));
    project.run("simulate config.toml --plot c.png").says(2, &["ends in .svg or .html"]);
}

#[test]
fn wrong_use_is_told() {
    let project = Project::new(SMALL);
    project.run("simulate config.toml --scenario nest").says(2, &["not one of serial, nested"]);
    project.run("simulate config.toml --ranks 3").says(2, &["simulated on [1, 16] ranks"]);
    project.run("simulate no.toml").says(2, &["cannot read", "no.toml"]);
    project.run("trace-report no.json").says(1, &["cannot read", "no.json"]);
    project.run("trace-report config.toml").says(1, &["is no Chrome trace"]);
    project.write("empty.json", "[]");
    project.run("trace-report empty.json").says(1, &["no event names its step"]);
    project.write(
        "bad.toml",
        &SMALL.replace("steps", "stops").replace("dense = 8", "dense = \"8 *\""),
    );
    project.run("simulate bad.toml").says(2, &["ms.dense: `8 *`: a number"]);
    project.write(
        "groups.toml",
        &SMALL.replace("mode = \"serial\"", "mode = \"serial\"\nreplicas = 3"),
    );
    project.run("simulate groups.toml").says(2, &["replicas = `3` is 3", "divisor"]);
    project.write("nodes.toml", &SMALL.replace("ranks = [1, 16]", "ranks = [12]"));
    project.run("simulate nodes.toml").says(2, &["do not fill nodes of 8"]);
    project.write("minus.toml", &SMALL.replace("4 * (N - 1) / N", "1 - N"));
    project.run("simulate minus.toml").says(2, &["ms.exchange = `1 - N` is -15"]);
    project.write(
        "tables.toml",
        &format!(
            "{}\n[model]\ntables = \"no.csv\"\n[speed]\ntflops = 1\n",
            SMALL.replace("[imbalance]\nfactor = \"if_hot\"", "")
        ),
    );
    project.run("simulate tables.toml").says(2, &["cannot read", "no.csv"]);
}
