//! `tessera train --trace` and what `tessera trace-report` makes of it.

use serde_json::Value;

use crate::common::golden::project;
use crate::common::shared::shared;

#[test]
fn a_trace_of_a_run_is_read_back_with_a_lane_for_each_resource() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_jagged_adam"));
    project.ok("train golden/config.toml --out run --trace trace.json --set parallel.ranks=2 \
         --set threads=2 --set pipeline.mode=nested --set train.max_steps=12 \
         --set tiers.device_bytes=30000");
    let report = project.ok("trace-report trace.json --json");
    let report: Value = serde_json::from_str(&report.stdout).unwrap();
    let ranks = report["ranks"].as_array().unwrap();
    assert_eq!(ranks.len(), 2);
    for rank in ranks {
        let names = |of: &str, name: &str| -> Vec<String> {
            let all = rank[of].as_array().unwrap().iter();
            all.map(|one| one[name].as_str().unwrap().to_owned()).collect()
        };
        let lanes = names("lanes", "lane");
        for lane in ["device", "step", "feed", "fetch", "link tables", "link gradients"] {
            assert!(lanes.iter().any(|one| one == lane), "{lane} is not in {lanes:?}");
        }
        let stages = names("stages", "stage");
        for stage in ["read", "route", "fetch", "lookup", "forward", "backward", "all_to_all_v"] {
            assert!(stages.iter().any(|one| one == stage), "{stage} is not in {stages:?}");
        }
    }
    assert_eq!(report["steps"].as_array().unwrap().len(), 11, "all but the run-up");
}

#[test]
fn a_trace_that_cannot_be_written_is_an_error_before_anything_else() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_jagged_adam"));
    let ran = project.run("train golden/config.toml --out run --trace none/trace.json");
    ran.says(1, &["none/trace.json"]);
    assert!(!project.path("run").exists());
}
