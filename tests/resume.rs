//! A run that is interrupted and resumed gives the bits of the run that was not, from any format,
//! at any step, with any optimizer.

mod common;

use common::model::{EPOCH, Source, project};
use common::{Project, Running};

/// Steps of the whole run.
const LAST: u64 = 2 * EPOCH;

/// Stops in the middle of the first file, across two files, at the end of an epoch, in the second
/// one and after the last step, and goes on each time in the same folder.
fn stop_and_go(source: Source, shuffle: &str) {
    eprintln!("{source:?} {shuffle}");
    let project = project(source);
    project.ok(&format!("train config.toml --out whole {shuffle}"));
    let steps = project.steps("whole");
    assert_eq!(steps.len() as u64, LAST);
    assert_eq!(steps.last().unwrap().samples, 2 * common::model::SAMPLES);
    let weights = project.export("whole");

    let stops = [3, 6, EPOCH, EPOCH + 4, LAST];
    for (i, stop) in stops.into_iter().enumerate() {
        let from = if i == 0 { "--out parts" } else { "--resume parts --out parts" };
        project.ok(&format!("train config.toml {from} {shuffle} --set train.max_steps={stop}"));
        assert_eq!(project.pointer("parts", "last"), stop);
        assert_eq!(project.steps("parts"), steps[..stop as usize]);
    }
    assert!(project.export("parts") == weights, "{source:?} {shuffle}: other weights");

    // There is nothing left to do.
    project.ok(&format!("train config.toml --resume parts {shuffle}"));
    assert_eq!(project.steps("parts"), steps);
    assert!(project.export("parts") == weights);
}

#[test]
fn stop_and_go_in_order() {
    Source::ALL.into_iter().for_each(|source| stop_and_go(source, ""));
}

#[test]
fn stop_and_go_shuffled() {
    // Neither a multiple of the batch nor of a file.
    let shuffle = "--set data.shuffle_window=50";
    Source::ALL.into_iter().for_each(|source| stop_and_go(source, shuffle));
    let [order, shuffled] = ["", shuffle].map(|set| {
        let project = project(Source::Raw);
        project.ok(&format!("train config.toml --out run --set train.max_steps=1 {set}"));
        project.steps("run")
    });
    assert_ne!(order, shuffled, "the window does shuffle");
}

/// Many small steps, each told at once, and a checkpoint now and then.
const LONG: &str = "--set data.batch_size=8 --set data.shuffle_window=50 --set train.epochs=50 \
                    --set train.checkpoint_every=170 --set optimizer.schedule.decay_steps=1500";

/// Starts or resumes the long run and interrupts it once it has done `steps` steps.
fn interrupt(project: &Project, from: &str, steps: usize, signal: libc::c_int) -> Running {
    let mut run = project.start(&format!("train config.toml {from} {LONG}"));
    run.wait_for("steps", || (project.steps_so_far("parts") >= steps).then_some(()));
    run.signal(signal);
    run
}

#[test]
fn killed_or_asked_to_end_it_goes_on_with_the_same_bits() {
    let project = project(Source::Parquet);
    project.ok(&format!("train config.toml --out whole {LONG}"));
    let steps = project.steps("whole");

    let mut from = "--out parts";
    for (at, signal) in [
        (200, libc::SIGKILL),
        (400, libc::SIGTERM),
        (600, libc::SIGKILL),
        (900, libc::SIGINT),
        (1300, libc::SIGKILL),
    ] {
        let run = interrupt(&project, from, at, signal);
        let (status, stderr) = run.end();
        let last = project.pointer("parts", "last");
        match signal {
            libc::SIGKILL => {
                use std::os::unix::process::ExitStatusExt;
                assert_eq!(status.signal(), Some(libc::SIGKILL), "{stderr}");
                assert_eq!(last % 170, 0, "step {last}: only checkpoints in between are there");
            }
            _ => {
                // Asked in order: the checkpoint is of the last step that was done.
                assert_eq!(status.code(), Some(128 + signal), "{stderr}");
                assert_eq!(last, project.steps("parts").len() as u64);
                let name = if signal == libc::SIGTERM { "SIGTERM" } else { "SIGINT" };
                assert_eq!(project.summary("parts")["ended"], name);
                assert!(project.summary("parts")["eval"].is_null());
            }
        }
        from = "--resume parts --out parts";
    }
    project.ok(&format!("train config.toml {from} {LONG}"));
    assert_eq!(project.steps("parts"), steps);
    assert!(project.export("parts") == project.export("whole"), "other weights");
    assert_eq!(project.summary("parts")["ended"], "done");
}

/// Once, such a folder could be neither resumed (no checkpoint) nor used anew (not empty).
#[test]
fn killed_before_its_first_checkpoint_a_run_begins_again_where_it_began() {
    let project = project(Source::Raw);
    project.ok("train config.toml --out first");
    project.ok("export --checkpoint first --out weights.safetensors");
    for (name, init) in [("drawn", ""), ("given", "--init weights.safetensors")] {
        project.ok(&format!("train config.toml {init} --out whole-{name}"));
        let long = "--set train.epochs=5000";
        let mut run = project.start(&format!("train config.toml {init} --out {name} {long}"));
        run.wait_for("steps", || (project.steps_so_far(name) >= 3).then_some(()));
        // As long as it lives, nobody else trains in its folder.
        let second = project.run(&format!("train config.toml --resume {name} {long}"));
        second.says(2, &["another process is training in this folder"]);
        run.signal(libc::SIGKILL);
        run.end();
        project.ok(&format!("train config.toml --resume {name}"));
        assert_eq!(project.steps(name), project.steps(&format!("whole-{name}")));
        assert!(project.export(name) == project.export(&format!("whole-{name}")));
    }
}

/// Once, a reader that closed the pipe (`| head -1`) took the run down, and its checkpoint with it.
#[test]
fn a_run_goes_on_when_nobody_reads_what_it_tells() {
    let project = project(Source::Raw);
    let mut command = project.command("train config.toml --out run --set train.log_every=1");
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    drop(child.stderr.take());
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert_eq!(project.steps("run").len(), 20);
    assert_eq!(project.pointer("run", "last"), 20);
}

#[test]
fn going_back_to_an_earlier_checkpoint_cuts_what_came_after() {
    let project = project(Source::Raw);
    project.ok("train config.toml --out run --set train.checkpoint_every=5 --set train.keep=9");
    let (steps, weights) = (project.steps("run"), project.export("run"));
    assert_eq!(project.checkpoints("run"), [5, 10, 15, 20]);

    // Into a new folder: its lines begin after the checkpoint, and the old run stays as it was.
    let before = project.snapshot("run");
    project.ok("train config.toml --resume run/checkpoints/step-10 --out branch");
    assert_eq!(project.steps("branch"), steps[10..]);
    assert!(project.export("branch") == weights);
    assert!(project.snapshot("run") == before);

    // In the same folder.
    project.ok(
        "train config.toml --resume run/checkpoints/step-10 --out run --set train.max_steps=12 \
         --set train.keep=9",
    );
    assert_eq!(project.steps("run"), steps[..12]);
    assert_eq!(project.pointer("run", "last"), 12);
    assert_eq!(project.checkpoints("run"), [5, 10, 12], "later ones are of a past that is gone");
    project.ok("train config.toml --resume run --set train.checkpoint_every=5");
    assert_eq!(project.steps("run"), steps);
    assert!(project.export("run") == weights);
}

#[test]
fn old_checkpoints_go_and_the_pointer_names_the_newest() {
    let project = project(Source::Raw);
    project.ok("train config.toml --out run --set train.checkpoint_every=3 --set train.keep=2");
    assert_eq!(project.checkpoints("run"), [18, 20]);
    assert_eq!(project.pointer("run", "last"), 20);
    project.ok("train config.toml --out one --set train.checkpoint_every=3 --set train.keep=1");
    assert_eq!(project.checkpoints("one"), [20]);
}

/// A folder of a run is resumed, or it is new: never written over.
#[test]
fn a_folder_in_use_is_not_written_over() {
    let project = project(Source::Raw);
    project.ok("train config.toml --out run");
    project.ok("train config.toml --out other --set train.max_steps=2");
    let before = project.snapshot("run");
    project.run("train config.toml --out run").says(2, &["run", "not an empty folder"]);
    project.run("train config.toml --resume other --out run").says(2, &["not an empty folder"]);
    assert!(project.snapshot("run") == before);
}

#[test]
fn a_checkpoint_of_another_model_or_seed_is_refused_and_nothing_changes() {
    let project = project(Source::Raw);
    project.ok("train config.toml --out run --set train.max_steps=5");
    let before = project.snapshot("run");
    for (set, parts) in [
        ("seed=8", &["step-5 does not fit", "seed 7", "the configuration 8"] as &[&str]),
        (
            "table.1.rows=28 --set table.3.dim=6",
            &[
                "tables.c2.weight is F16 [27, 3], the model has F16 [28, 3]",
                "tables.c2.wide is F16 [27, 1], the model has F16 [28, 1]",
                "tables.c4.weight is F32 [41, 4], the model has F32 [41, 6]",
            ],
        ),
        ("table.1.precision=fp32", &["tables.c2.weight is F16 [27, 3], the model has F32"]),
        (
            "table.0.optimizer.kind=adagrad",
            &["table c1 has optimizer sgd, the configuration adagrad"],
        ),
        ("optimizer.dense.kind=sgd", &["the model has no dense.bottom.0.bias.m"]),
        ("model.wide=false", &["the model has no tables.c9.wide"]),
        ("model.dcn.layers=1", &["the model has no dense.cross.1.v"]),
        // These two keep states of the same names and shapes.
        ("table.3.optimizer.kind=lamb", &["table c4 has optimizer adam, the configuration lamb"]),
    ] {
        let ran = project.run(&format!("train config.toml --resume run --set {set}"));
        eprintln!("{set}: {}", ran.stderr.trim_end());
        ran.says(1, parts);
        let ran = project.run(&format!("train config.toml --resume run --out new --set {set}"));
        ran.says(1, parts);
        assert!(!project.path("new").exists());
        assert!(project.snapshot("run") == before, "{set}: the run has changed");
    }
    // What may change between two parts of a run.
    project.ok("train config.toml --resume run --set table.0.optimizer.lr=0.01 --set train.keep=3");
}

#[test]
fn the_best_checkpoint_stays_and_the_run_stops_early() {
    let project = project(Source::Synthetic);
    // Nothing is ever better by this much than the first evaluation.
    let stop = "--set train.eval_every=2 --set train.keep=1 --set train.checkpoint_every=1 \
                --set train.early_stop.metric=logloss --set train.early_stop.patience=2 \
                --set train.early_stop.min_delta=5";
    project.ok(&format!("train config.toml --out run {stop}"));
    let summary = project.summary("run");
    assert_eq!(summary["ended"], "early_stop");
    assert_eq!((&summary["steps"], &summary["best"]["step"]), (&6.into(), &2.into()));
    assert_eq!(summary["best"]["metric"], "logloss");
    assert_eq!(project.checkpoints("run"), [2, 6], "the best one is kept beside the newest");
    assert_eq!(project.pointer("run", "best"), 2);
    assert_eq!(project.pointer("run", "last"), 6);
    let ran = project.ok("eval config.toml --checkpoint run/checkpoints/step-2 --json");
    let best: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(best["logloss"], summary["best"]["value"]);

    // So it is on ranks whose next batches are on their way when the run ends.
    let ahead = "--set parallel.ranks=3 --set threads=3 --set pipeline.depth=4";
    project.ok(&format!("train config.toml --out ranks {stop} {ahead}"));
    assert_eq!(project.summary("ranks")["ended"], "early_stop");
    assert_eq!(project.summary("ranks")["steps"], 6);
    project.ok(&format!("train config.toml --resume ranks {stop} {ahead}"));
    assert_eq!(project.summary("ranks")["steps"], 6);

    // A run that has stopped early stays stopped.
    let before = project.export("run");
    project.ok(&format!("train config.toml --resume run {stop}"));
    assert_eq!(project.summary("run")["ended"], "early_stop");
    assert_eq!(project.summary("run")["steps"], 6);
    assert_eq!(project.summary("run")["best"], summary["best"]);
    assert!(project.export("run") == before);
}

/// What early stopping has seen belongs to the moment: from any checkpoint the run stops where
/// the whole run does. Epochs end at steps 10, 20, ..., which are evaluated too, and the
/// checkpoint of such a step may be from before or after its evaluation.
#[test]
fn early_stopping_is_resumed_exactly() {
    let project = project(Source::Synthetic);
    let stop = "--set train.epochs=6 --set train.eval_every=4 --set train.keep=99 \
                --set train.checkpoint_every=1 --set train.early_stop.metric=logloss \
                --set train.early_stop.patience=5 --set train.early_stop.min_delta=0.0005";
    project.ok(&format!("train config.toml --out whole {stop}"));
    let whole = project.summary("whole");
    let steps = project.steps("whole");
    assert_eq!((&whole["ended"], &whole["best"]["step"]), (&"early_stop".into(), &8.into()));
    assert_eq!(steps.len(), 24);
    for from in [1, 3, 4, 8, 10, 11, 12, 16, 20, 24] {
        let from_step = format!("--resume whole/checkpoints/step-{from}");
        let out = format!("from{from}");
        project.ok(&format!("train config.toml {from_step} --out {out} {stop}"));
        let summary = project.summary(&out);
        for key in ["steps", "ended", "best", "eval"] {
            assert_eq!(summary[key], whole[key], "{key}, resumed from step {from}");
        }
        assert_eq!(project.steps(&out), steps[from as usize..]);
    }
    // A signal in the middle of the evaluation at step 8 leaves a checkpoint that has not seen it,
    // as does a run that follows no metric. The evaluation is made up for.
    project.ok("train config.toml --out unseen --set train.epochs=6 --set train.max_steps=8");
    project.ok(&format!("train config.toml --resume unseen {stop}"));
    for key in ["steps", "ended", "best", "eval"] {
        assert_eq!(project.summary("unseen")[key], whole[key], "{key}");
    }
}
