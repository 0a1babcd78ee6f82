//! The golden runs and real data in every mode, on one rank and several, resident and tiered.

use crate::common::golden::{RUNS, agrees, project};
use crate::common::{Project, shared::shared};

/// Trains a golden run; `set` are `--set` assignments.
fn train(project: &Project, out: &str, ranks: usize, set: &str) {
    let set: String = set.split_whitespace().map(|one| format!(" --set {one}")).collect();
    project.ok(&format!(
        "train golden/config.toml --init golden/init.safetensors --out {out} \
         --set parallel.ranks={ranks} --set threads={ranks}{set}"
    ));
}

/// Asserts that two runs have the same losses, weights and states, to the bit.
#[track_caller]
fn same(project: &Project, one: &str, other: &str) {
    assert_eq!(project.steps(one), project.steps(other), "losses of {one} and {other}");
    assert!(project.export(one) == project.export(other), "{one} and {other} differ");
}

#[test]
fn every_mode_and_depth_has_the_bits_of_serial_with_as_many_micro_batches() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        let golden = shared.join("golden").join(run);
        let project = project(&golden);
        for ranks in [1, 2, 4] {
            for micro in [1, 2, 3, 8] {
                let serial = format!("{ranks}-{micro}-serial");
                let set = format!("pipeline.micro_batches={micro}");
                train(&project, &serial, ranks, &format!("{set} pipeline.mode=serial"));
                // Another number of parts groups dense sums otherwise: the reference still.
                agrees(&project, &golden, &serial);
                for (mode, depth) in [("prefetch", 1 + micro % 4), ("nested", 4 - micro % 4)] {
                    let out = format!("{ranks}-{micro}-{mode}");
                    let set = format!("{set} pipeline.mode={mode} pipeline.depth={depth}");
                    train(&project, &out, ranks, &set);
                    same(&project, &serial, &out);
                }
            }
        }
    }
}

#[test]
fn so_it_has_with_tiers_groups_codecs_and_pooled_routes() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_dot_rowwise_adagrad");
    let project = project(&golden);
    let ssd = |name: &str| project.path(name).display().to_string();
    let cases = [
        ("host", 1, "tiers.device_bytes=40000".to_owned()),
        (
            "ssd",
            2,
            format!("tiers.device_bytes=24000 tiers.host_bytes=3000 tiers.ssd_dir={}", ssd("ssd")),
        ),
        ("groups", 4, "parallel.replicas=2 parallel.sync_every=3".to_owned()),
        ("tiered groups", 4, "parallel.replicas=2 tiers.device_bytes=24000".to_owned()),
        ("codecs", 2, "parallel.codec_forward=bf16 parallel.codec_backward=fp16".to_owned()),
        ("pooled", 3, "parallel.route=pooled".to_owned()),
    ];
    for (name, ranks, set) in cases {
        let name = name.replace(' ', "-");
        let serial = format!("{name}-serial");
        train(
            &project,
            &serial,
            ranks,
            &format!("{set} pipeline.mode=serial pipeline.micro_batches=3"),
        );
        for mode in ["prefetch", "nested"] {
            let out = format!("{name}-{mode}");
            let set = format!("{set} pipeline.mode={mode} pipeline.micro_batches=3");
            train(&project, &out, ranks, &set);
            same(&project, &serial, &out);
        }
    }
}

/// Evaluations, checkpoints, epochs and interruptions drain the pipeline: a run in pieces, each in
/// another mode, is the run in one.
#[test]
fn a_run_in_pieces_of_any_mode_is_the_run_in_one() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_dcn_adagrad");
    let project = project(&golden);
    let whole = "pipeline.mode=serial pipeline.micro_batches=2 train.eval_every=7";
    train(&project, "whole", 2, whole);
    let piece = |steps: usize, start: &str, set: &str| {
        project.ok(&format!(
            "train golden/config.toml {start} --out run --set parallel.ranks=2 --set threads=2 \
             --set pipeline.micro_batches=2 --set train.max_steps={steps} \
             --set train.eval_every=7 --set train.checkpoint_every=5 {set}"
        ));
    };
    piece(13, "--init golden/init.safetensors", "--set pipeline.mode=nested");
    piece(29, "--resume run", "--set pipeline.mode=prefetch --set pipeline.depth=3");
    piece(44, "--resume run", "--set pipeline.mode=serial");
    piece(1000, "--resume run", "--set pipeline.mode=nested --set pipeline.depth=2");
    same(&project, "whole", "run");
    assert_eq!(project.summary("whole")["eval"], project.summary("run")["eval"]);
}

/// What is wrong with a batch is said by its own step, after those before it.
#[test]
fn bad_input_ahead_stops_the_run_at_its_own_step() {
    for mode in ["serial", "prefetch", "nested"] {
        for ranks in [1, 2] {
            let project = Project::new(
                r#"
[data]
format = "criteo-tsv"
train = "data.tsv"
batch_size = 2
[model]
dense_features = 13
bottom_mlp = [4]
top_mlp = [1]
interaction = "dot"
[[table]]
name = "c1"
rows = 10
dim = 4
features = ["c1"]
[optimizer.sparse]
kind = "sgd"
lr = 0.1
[optimizer.dense]
kind = "sgd"
lr = 0.1
"#,
            );
            let line =
                |label: &str| format!("{label}{}{}\n", "\t1".repeat(13), "\t68fd1e64".repeat(26));
            let mut text: String = (0..9).map(|_| line("1")).collect();
            text += &line("7");
            project.write("data.tsv", &text);
            let ran = project.run(&format!(
                "train config.toml --out run --set pipeline.mode={mode} \
                 --set parallel.ranks={ranks} --set threads={ranks}"
            ));
            ran.says(1, &["data.tsv", "10"]);
            assert_eq!(project.steps("run").len(), 4, "{mode} on {ranks} ranks");
        }
    }
}

#[test]
fn settings_that_make_no_sense_are_refused() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_dcn_adagrad"));
    let run =
        |set: &str| project.run(&format!("train golden/config.toml --out no --set pipeline.{set}"));
    run("micro_batches=0").says(2, &["pipeline.micro_batches", "at least 1"]);
    run("micro_batches=256").says(2, &["pipeline.micro_batches", "at most 255"]);
    run("depth=0").says(2, &["pipeline.depth", "at least 1"]);
    run("mode=nest").says(2, &["pipeline.mode", "`nest` is not one of"]);
    run("cluster=rows").says(2, &["pipeline.cluster", "`rows` is not one of none and keys"]);
}
