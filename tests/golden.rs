//! The project's golden runs, trained through the command line: losses of every step, final
//! weights and states, evaluation and predictions against the float64 reference.

mod common;

use std::path::Path;

use common::golden::{RUNS, agrees, expected, project};
use common::{Project, files, shared::shared};
use serde_json::Value;

fn train(project: &Project, out: &str, set: &str) {
    project.ok(&format!(
        "train golden/config.toml --init golden/init.safetensors --out {out} --set threads=2 {set}"
    ));
}

/// Probability that a positive scores above a negative, ties half, pair by pair.
fn auc(labels: &[f32], scores: &[f32]) -> f64 {
    let (mut won, mut pairs) = (0.0, 0.0);
    for (i, _) in labels.iter().enumerate().filter(|(_, label)| **label == 1.0) {
        for (j, _) in labels.iter().enumerate().filter(|(_, label)| **label == 0.0) {
            pairs += 1.0;
            won += match scores[i].total_cmp(&scores[j]) {
                std::cmp::Ordering::Greater => 1.0,
                std::cmp::Ordering::Equal => 0.5,
                std::cmp::Ordering::Less => 0.0,
            };
        }
    }
    won / pairs
}

fn run_agrees(golden: &Path) {
    let project = project(golden);
    train(&project, "run", "");
    agrees(&project, golden, "run");
    let expected = expected(golden);
    let ran = project.ok("eval golden/config.toml --checkpoint run --json");
    let again: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(again, project.summary("run")["eval"], "eval of the checkpoint, as at the end");

    project.ok("predict golden/config.toml --checkpoint run --out scores.parquet");
    let (labels, scores) = files::scores(&project.path("scores.parquet"));
    assert_eq!(labels.len() as u64, expected["eval_rows"].as_u64().unwrap());
    let want = expected["eval"]["auc"].as_f64().unwrap();
    let got = auc(&labels, &scores);
    assert!((got - want).abs() < 1e-4, "AUC of the predictions {got}, {want} is right");
}

fn bits_do_not_depend_on_the_schedule(golden: &Path) {
    let project = project(golden);
    train(&project, "one", "--set threads=1");
    let steps = project.steps("one");
    let export = project.export("one");
    for (out, set) in [
        ("three", "--set threads=3"),
        ("serial", "--set pipeline.mode=serial"),
        ("deep", "--set pipeline.depth=4"),
    ] {
        train(&project, out, set);
        assert_eq!(project.steps(out), steps, "{set}");
        assert!(project.export(out) == export, "{set}: other weights");
    }
}

#[test]
fn golden_runs_agree_with_the_reference() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        eprintln!("{run}");
        run_agrees(&shared.join("golden").join(run));
    }
}

#[test]
fn golden_runs_have_the_same_bits_on_any_threads_and_pipeline() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        eprintln!("{run}");
        bits_do_not_depend_on_the_schedule(&shared.join("golden").join(run));
    }
}

/// A table that `--init` lacks, one of another shape and one that the model does not have are
/// told in one message, and the run does not begin.
#[test]
fn weights_of_another_model_are_refused() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_dcn_adagrad"));
    let ran = project.run(
        "train golden/config.toml --init golden/init.safetensors --out run --set table.1.rows=40 \
         --set table.2.name=other",
    );
    ran.says(
        1,
        &[
            "init.safetensors does not fit this model",
            "tables.c2.weight has shape [41, 12], the model [40, 12]",
            "tables.other.weight is missing",
            "the model has no tables.c3.weight",
        ],
    );
    assert!(!project.path("run").exists());
}
