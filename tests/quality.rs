//! Quality on real data: the Criteo example as the README runs it (docs/QUALITY.md has the figures).

mod common;

use common::{Project, shared::shared};

/// One epoch on parts 1 to 3, evaluated on part 4. A one-hot logistic regression reaches an AUC
/// of 0.7718 and a log loss of 0.4429 there; seeds differ by about 0.0005 in AUC.
#[test]
fn the_criteo_example_beats_a_logistic_regression() {
    let Some(shared) = shared() else { return };
    let project = Project::new("");
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/criteo-80k.toml");
    std::os::unix::fs::symlink(example, project.path("criteo.toml")).unwrap();
    let mut train = project.command("train criteo.toml --out run");
    let ran = train.env("TESSERA_SHARED", shared).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let summary = project.summary("run");
    assert_eq!(summary["samples"], 60_000);
    let figure = |name: &str| summary["eval"][name].as_f64().unwrap();
    assert!(figure("auc") > 0.7718, "{summary}");
    assert!(figure("logloss") < 0.4429, "{summary}");
}
