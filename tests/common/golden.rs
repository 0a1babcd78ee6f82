//! The golden runs: where they are, and whether a run of ours agrees with one.

use std::path::Path;

use serde_json::Value;

use super::{Project, tensors};

pub const RUNS: [&str; 3] = ["dlrm_dcn_adagrad", "dlrm_dot_rowwise_adagrad", "dlrm_jagged_adam"];

/// A project in whose folder `golden` is the folder of a golden run.
pub fn project(golden: &Path) -> Project {
    let project = Project::new("");
    std::os::unix::fs::symlink(golden, project.path("golden")).unwrap();
    project
}

/// `--set` for the sharding of every table of a golden run.
pub fn sharded(golden: &Path, sharding: &str) -> String {
    let text = std::fs::read_to_string(golden.join("config.toml")).unwrap();
    let tables = text.matches("[[table]]").count();
    (0..tables).map(|table| format!(" --set table.{table}.sharding={sharding}")).collect()
}

/// What the reference says of a golden run.
pub fn expected(golden: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(golden.join("expected.json")).unwrap()).unwrap()
}

#[track_caller]
pub fn evaluation_agrees(evaluation: &Value, expected: &Value) {
    for (metric, want) in expected["eval"].as_object().unwrap() {
        let (got, want) = (evaluation[metric].as_f64().unwrap(), want.as_f64().unwrap());
        assert!((got - want).abs() < 1e-4, "{metric}: {got}, the reference has {want}");
    }
    assert_eq!(evaluation["samples"], expected["eval_rows"]);
}

/// Holds the run `out` against the reference: losses of every step, final weights and states,
/// evaluation.
#[track_caller]
pub fn agrees(project: &Project, golden: &Path, out: &str) {
    let expected = expected(golden);
    let losses = expected["train_loss"].as_array().unwrap();
    let steps = project.steps(out);
    assert_eq!((steps.len(), losses.len()), (60, 60), "{out}");
    for (line, want) in steps.iter().zip(losses) {
        let (got, want) = (line.loss.unwrap(), want.as_f64().unwrap());
        let relative = (got - want).abs() / want;
        assert!(relative < 1e-5, "{out}, step {}: loss {got}, {want} is right", line.step);
    }
    assert!(steps.iter().zip(1..).all(|(line, number)| line.step == number), "{out}");

    // Each weight and state within 2e-4 of the largest value of its tensor.
    let ours = tensors(&project.export(out));
    let theirs = tensors(&std::fs::read(golden.join("final.safetensors")).unwrap());
    for (name, want) in &theirs {
        let got = ours.get(name).unwrap_or_else(|| panic!("{out}: the export has no {name}"));
        assert_eq!(got.shape, want.shape, "{out}: {name}");
        let largest = want.values.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        for (i, (a, b)) in got.values.iter().zip(&want.values).enumerate() {
            let apart = (a - b).abs();
            assert!(
                apart <= 2e-4 * largest,
                "{out}: {name}[{i}]: {a}, {b} is right, largest {largest}"
            );
        }
    }
    // The reference file lists every weight and the states of tables; ours adds dense states only.
    for name in ours.keys().filter(|name| !theirs.contains_key(*name)) {
        assert!(name.starts_with("dense.") && name.split('.').count() == 5, "{name} is not known");
    }
    evaluation_agrees(&project.summary(out)["eval"], &expected);
}
