//! Runs whose tables lie in tiers, or whose checkpoints are increments: every checkpoint is the
//! rows it stands for, and a run goes on from it as if it had not stopped.

use tessera::checkpoint::Checkpoint;

use crate::common::Project;
use crate::runs::{plan, project};

/// Tiers of each of `ranks`, which hold part of the tables only, and a checkpoint every two steps.
fn tiers(ranks: usize, more: &str) -> String {
    let device_bytes = if ranks == 1 { 12_000 } else { 5_000 };
    let more = more.split_whitespace().map(|key| format!(" --set train.{key}"));
    format!(
        " --set tiers.device_bytes={device_bytes} --set tiers.host_bytes=1000 \
         --set tiers.ssd_dir=ssd --set train.checkpoint_every=2 --set train.keep=9{}",
        more.collect::<String>()
    )
}

/// How many checkpoints that of a step builds on, and its pieces in logs.
fn shape(project: &Project, run: &str, step: u64) -> (usize, usize) {
    let folder = project.path(&format!("{run}/checkpoints/step-{step}"));
    let manifest = Checkpoint::find(&folder).unwrap().manifest;
    (manifest.chain.len(), manifest.cold.len())
}

#[test]
fn links_and_increments_are_the_rows_that_they_stand_for() {
    for (ranks, sharding) in [(1, "auto"), (4, "row_wise"), (4, "column_wise")] {
        let project = project();
        let plan_of = |ranks, sharding| match ranks {
            1 => String::new(),
            _ => plan(ranks, sharding),
        };
        let plan = plan_of(ranks, sharding);
        let train = |out: &str, more: &str| {
            let tiers = tiers(ranks, more);
            project.ok(&format!("train config.toml --out {out} {plan}{tiers}"));
        };
        train("rows", "checkpoint_cold=rows");
        train("links", "checkpoint_cold=links checkpoint_full_every=3");
        train("lists", "checkpoint_cold=rows checkpoint_full_every=4");
        assert_eq!(project.steps("links"), project.steps("rows"));
        assert_eq!(project.checkpoints("links"), [2, 4, 6, 8, 10, 12]);
        for (step, chain) in [(2, 0), (4, 1), (6, 2), (8, 0), (10, 1), (12, 2)] {
            let export = |run: &str| project.export(&format!("{run}/checkpoints/step-{step}"));
            let rows = export("rows");
            assert!(export("links") == rows, "{sharding}: links of step {step}");
            assert!(export("lists") == rows, "{sharding}: lists of step {step}");
            let (links, pieces) = shape(&project, "links", step);
            assert!(links == chain && pieces > 0, "{sharding}, step {step}: {links}, {pieces}");
            assert_eq!(shape(&project, "rows", step), (0, 0));
            assert_eq!(shape(&project, "lists", step).1, 0);
        }
        let weights = project.export("rows");
        let eval =
            |run: &str| project.ok(&format!("eval config.toml --checkpoint {run} --json")).stdout;
        assert_eq!(eval("links"), eval("rows"));
        // On from a whole one and from increments, in tiers and without, to the same bits.
        let all = project.steps("rows");
        for (step, run, in_tiers) in
            [(2, "links", true), (6, "links", true), (10, "links", false), (6, "lists", true)]
        {
            let more =
                if in_tiers { tiers(ranks, "checkpoint_full_every=2") } else { String::new() };
            let out = format!("on-{run}-{step}");
            project.ok(&format!(
                "train config.toml --resume {run}/checkpoints/step-{step} --out {out} {plan}{more}"
            ));
            assert!(project.export(&out) == weights, "{sharding}: on from {run}, step {step}");
            assert_eq!(project.steps(&out), all[step..], "{sharding}: on from {run}, step {step}");
        }
        // All steps are done: other ranks, in tiers of theirs, write what they have read.
        for (ranks, sharding) in [(1, "auto"), (3, "row_wise"), (2, "column_wise")] {
            let (plan, tiers) = (plan_of(ranks, sharding), tiers(ranks, ""));
            let out = format!("moved-{ranks}");
            project.ok(&format!("train config.toml --resume links --out {out} {plan}{tiers}"));
            assert!(project.export(&out) == weights, "moved to {ranks} ranks, {sharding}");
            assert!(shape(&project, &out, 12).1 > 0);
        }
    }
}

/// Tables that are given, not drawn: rows that were never trained on are not their first values.
#[test]
fn rows_of_a_weights_file_are_in_the_log() {
    let project = project();
    project.ok("train config.toml --out first --set train.max_steps=3");
    project.ok("export --checkpoint first --out w.safetensors");
    let train = |out: &str, more: &str| {
        project.ok(&format!("train config.toml --init w.safetensors --out {out} {more}"));
        project.export(out)
    };
    let links = tiers(1, "checkpoint_cold=links checkpoint_full_every=9");
    assert!(train("links", &links) == train("resident", ""));
    assert_eq!(shape(&project, "links", 12).0, 5);
}

/// Groups are averaged before a checkpoint, which writes rows that no update of theirs did.
#[test]
fn increments_have_what_averages_of_groups_wrote() {
    let project = project();
    let groups = "--set parallel.ranks=4 --set parallel.replicas=2 --set parallel.sync_every=3 \
                  --set train.checkpoint_every=2 --set train.keep=9";
    project.ok(&format!("train config.toml --out whole {groups}"));
    project
        .ok(&format!("train config.toml --out parts {groups} --set train.checkpoint_full_every=9"));
    for step in [2, 4, 6, 8, 10, 12] {
        let export = |run: &str| project.export(&format!("{run}/checkpoints/step-{step}"));
        assert!(export("parts") == export("whole"), "step {step}");
    }
    assert_eq!(shape(&project, "parts", 12).0, 5);
}

#[test]
fn a_chain_with_a_gap_is_refused_by_every_command() {
    let project = project();
    project.ok(&format!(
        "train config.toml --out run{}",
        tiers(1, "checkpoint_cold=links checkpoint_full_every=3")
    ));
    std::fs::remove_dir_all(project.path("run/checkpoints/step-10")).unwrap();
    for line in [
        "eval config.toml --checkpoint run",
        "export --checkpoint run --out w.safetensors",
        "train config.toml --resume run --out new",
    ] {
        project.run(line).says(1, &["since checkpoint step-10, which is missing", "step-12"]);
    }
    assert!(!project.path("w.safetensors").exists() && !project.path("new").exists());
    // What does not build on it is as good as before; the run goes on from there.
    project.ok("train config.toml --resume run/checkpoints/step-8 --out run");
    project.ok("eval config.toml --checkpoint run");
}

/// Killed at any time, with compaction and all: what `last` names is whole.
#[test]
fn killed_runs_go_on_from_links_and_increments() {
    let project = project();
    let long = format!(
        "{} --set train.epochs=40 --set train.max_steps=700 --set data.batch_size=8 \
         --set tiers.ssd_bytes=3000000",
        tiers(1, "checkpoint_cold=links checkpoint_full_every=5 keep=2 checkpoint_every=7")
    );
    project.ok(&format!("train config.toml --out whole {long}"));
    let mut from = "--out parts";
    for at in [50, 130, 300, 500] {
        let mut run = project.start(&format!("train config.toml {from} {long}"));
        run.wait_for("steps", || (project.steps_so_far("parts") >= at).then_some(()));
        run.signal(libc::SIGKILL);
        run.end();
        assert_eq!(project.pointer("parts", "last") % 7, 0);
        project.export("parts");
        from = "--resume parts --out parts";
    }
    project.ok(&format!("train config.toml {from} {long}"));
    assert_eq!(project.steps("parts"), project.steps("whole"));
    assert!(project.export("parts") == project.export("whole"));
}
