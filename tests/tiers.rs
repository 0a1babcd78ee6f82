//! Rows that move between tiers, through the command line: the bits of rows that stay.

mod common;

use common::golden::{RUNS, agrees, project};
use common::{Project, shared::shared};

/// Tiers of each of `ranks` in memory, and with an SSD, that together hold part of the golden
/// models' rows only. The SSD's folder is the project's: the golden folder is a link.
fn tiers(project: &Project, ranks: u64) -> Vec<(&'static str, String)> {
    let ssd = project.path("ssd").display().to_string();
    let set = |device_bytes: u64, more: &str| {
        let more = more.split_whitespace().map(|key| format!(" --set tiers.{key}"));
        format!(" --set tiers.device_bytes={}{}", device_bytes / ranks, more.collect::<String>())
    };
    vec![
        ("host", set(40_000, "")),
        ("ssd", set(40_000, &format!("host_bytes=3000 ssd_dir={ssd}"))),
        ("lfu", set(50_000, &format!("host_bytes=0 ssd_dir={ssd} policy=lfu"))),
    ]
}

#[test]
fn golden_runs_have_the_same_bits_in_any_tiers() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        let golden = shared.join("golden").join(run);
        let project = project(&golden);
        for ranks in [1, 4] {
            let train = |out: &str, set: &str| {
                project.ok(&format!(
                    "train golden/config.toml --init golden/init.safetensors --out {out} \
                     --set parallel.ranks={ranks} --set threads={ranks}{set}"
                ));
            };
            let resident = format!("{ranks}-resident");
            train(&resident, "");
            let weights = project.export(&resident);
            for (name, set) in tiers(&project, ranks) {
                let out = format!("{ranks}-{name}");
                train(&out, &set);
                agrees(&project, &golden, &out);
                assert!(project.export(&out) == weights, "{run}: {out} has other weights");
                assert_eq!(project.steps(&out), project.steps(&resident), "{run}: {out}");
            }
        }
    }
}

/// A run goes on with other tiers, with none, and on other ranks.
#[test]
fn a_run_goes_on_with_other_tiers() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_dcn_adagrad");
    let project = project(&golden);
    project.ok("train golden/config.toml --init golden/init.safetensors --out whole");
    let tiers = tiers(&project, 1);
    project.ok(&format!(
        "train golden/config.toml --init golden/init.safetensors --out run \
         --set train.max_steps=20{}",
        tiers[1].1
    ));
    for (set, steps) in [(&tiers[0].1[..], 40), ("", 50), (&tiers[2].1[..], 1000)] {
        project.ok(&format!(
            "train golden/config.toml --resume run --out run --set train.max_steps={steps}{set}"
        ));
    }
    assert!(project.export("run") == project.export("whole"));
    assert_eq!(project.steps("run"), project.steps("whole"));
    // A checkpoint is evaluated in tiers too, beside the folders of a run.
    let ran = project.ok(&format!("eval golden/config.toml --checkpoint run --json{}", tiers[2].1));
    let evaluation: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(evaluation["auc"], project.summary("whole")["eval"]["auc"]);
    assert!(project.path("ssd/eval/rank-0").is_dir());
}

#[test]
fn tiers_that_cannot_work_are_refused() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_dot_rowwise_adagrad"));
    let run = |set: &str| project.run(&format!("train golden/config.toml --out no {set}"));
    run("--set tiers.host_bytes=1").says(2, &["tiers.device_bytes"]);
    run("--set tiers.device_bytes=0").says(2, &["tiers.device_bytes", "is 0"]);
    run("--set tiers.device_bytes=9000 --set tiers.ssd_bytes=9")
        .says(2, &["tiers.ssd_bytes", "ssd_dir"]);
    run("--set tiers.device_bytes=9000 --set tiers.host_bytes=10")
        .says(1, &["the host tier has 10; give it more, or an SSD below it"]);
    // No room for the rows of a sample: which table, and what size it takes.
    run("--set tiers.device_bytes=300").says(1, &["table c1", "no room for one row", "68"]);
}

/// Tables that no rank's memory holds are planned for where tiers have room for them.
#[test]
fn plans_count_on_the_tiers() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_dot_rowwise_adagrad"));
    let plan = |set: &str| {
        project.run(&format!(
            "plan golden/config.toml --ranks 2 --set table.0.rows=400000000000 {set}"
        ))
    };
    plan("").says(1, &["no room for table"]);
    plan("--set tiers.device_bytes=1000000 --set tiers.host_bytes=9000000").says(1, &["no room"]);
    let ran = plan("--set tiers.device_bytes=1000000 --set tiers.ssd_dir=ssd");
    ran.says(0, &[]);
}
