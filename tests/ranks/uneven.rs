//! Ranks with files of their own: one that runs out of data waits with no samples for the others,
//! and every sample is trained on once.

use crate::common::files::{bags, floats, write_parquet};
use crate::common::{Line, Project};

/// Samples of a batch on two ranks, 4 each.
const BATCH: usize = 8;
const ROWS: u32 = 40;

/// A sample: label, dense values, ids of two features.
#[derive(Clone)]
struct Sample {
    label: f32,
    dense: [f32; 2],
    ids: [Vec<i64>; 2],
    weight: f32,
}

/// A sample that does nothing but be counted.
const NOTHING: Sample =
    Sample { label: 0.0, dense: [0.0; 2], ids: [Vec::new(), Vec::new()], weight: 0.0 };

/// `count` samples from a small congruential generator.
fn samples(seed: u32, count: usize) -> Vec<Sample> {
    let mut state = seed;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    (0..count)
        .map(|_| Sample {
            label: (next() % 2) as f32,
            dense: [next() % 100, next() % 100].map(|x| x as f32 / 50.0 - 1.0),
            ids: [0, 1].map(|feature| {
                (0..next() % 3 + feature).map(|_| i64::from(next() % ROWS)).collect()
            }),
            weight: 1.0,
        })
        .collect()
}

fn write(project: &Project, name: &str, samples: &[Sample]) {
    let column = |value: fn(&Sample) -> f32| floats(&samples.iter().map(value).collect::<Vec<_>>());
    let ids = |feature: usize| {
        bags(&samples.iter().map(|sample| &sample.ids[feature][..]).collect::<Vec<_>>())
    };
    write_parquet(
        &project.path(name),
        &[
            ("label", column(|s| s.label)),
            ("x", column(|s| s.dense[0])),
            ("y", column(|s| s.dense[1])),
            ("w", column(|s| s.weight)),
            ("user", ids(0)),
            ("item", ids(1)),
        ],
    );
}

/// A folder with a configuration and a file for each list of samples.
fn project(files: &[&[Sample]]) -> Project {
    let names: Vec<String> = (0..files.len()).map(|i| format!("\"{i}.parquet\"")).collect();
    let project = Project::new(&format!(
        r#"seed = 5
threads = 1
[data]
format = "parquet"
train = [{}]
dense = ["x", "y"]
sample_weight = "w"
batch_size = {BATCH}
[model]
dense_features = 2
bottom_mlp = [6, 4]
interaction = "dot"
top_mlp = [8, 1]
wide = true
[[table]]
name = "user"
rows = {ROWS}
dim = 4
[[table]]
name = "item"
rows = {ROWS}
dim = 4
pooling = "mean"
[optimizer.sparse]
kind = "adagrad"
lr = 0.1
[optimizer.dense]
kind = "adagrad"
lr = 0.05
[train]
log_every = 1
"#,
        names.join(", ")
    ));
    for (i, samples) in files.iter().enumerate() {
        write(&project, &format!("{i}.parquet"), samples);
    }
    project
}

/// Trains on `ranks` ranks, each on files of its own.
fn own(project: &Project, out: &str, ranks: usize, set: &str) -> Vec<Line> {
    let line = format!("--set parallel.ranks={ranks} --set threads={ranks} --set data.read=own");
    project.ok(&format!("train config.toml {out} {line} {set}"));
    project.steps(out.split_whitespace().last().unwrap())
}

/// The batches that `ranks` ranks take together from lists of samples, `each` from one.
fn together(files: &[&[Sample]], each: usize) -> Vec<Vec<Sample>> {
    let steps = files.iter().map(|samples| samples.len().div_ceil(each)).max().unwrap();
    (0..steps)
        .map(|step| {
            let part = |samples: &[Sample]| {
                let end = samples.len().min((step + 1) * each);
                samples[end.min(step * each)..end].to_vec()
            };
            files.iter().flat_map(|samples| part(samples)).collect()
        })
        .collect()
}

#[track_caller]
fn agree(ours: &[Line], theirs: &[Line]) {
    assert_eq!(ours.len(), theirs.len());
    for (a, b) in ours.iter().zip(theirs) {
        assert_eq!((a.step, a.epoch), (b.step, b.epoch));
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-5 * b;
        let (x, y) = (a.loss.unwrap(), b.loss.unwrap());
        assert!(close(x, y), "step {}: loss {x}, {y} is right", a.step);
    }
}

/// Ten batches on one rank and eleven on the other, the last of three samples.
fn ten_and_eleven() -> [Vec<Sample>; 2] {
    [samples(1, 10 * BATCH / 2), samples(2, 11 * BATCH / 2 - 1)]
}

#[test]
fn drained_the_last_batches_are_means_over_what_there_is() {
    let [a, b] = ten_and_eleven();
    let project = project(&[&a, &b]);
    // One rank that reads the same batches: the last one of an epoch may be smaller.
    let whole: Vec<Sample> = together(&[&a, &b], BATCH / 2).concat();
    write(&project, "whole.parquet", &whole);
    let reference = "--out one --set data.train=whole.parquet --set train.epochs=2";
    project.ok(&format!("train config.toml {reference}"));
    let steps = own(&project, "--out two", 2, "--set train.epochs=2");
    agree(&steps, &project.steps("one"));
    let samples = (a.len() + b.len()) as u64;
    assert_eq!(steps.iter().map(|line| line.samples).max(), Some(2 * samples));
    assert_eq!((steps[9].samples, steps[10].samples, steps.len()), (80, samples, 22));
    assert_eq!(project.summary("two")["samples"], 2 * samples);
    for (ours, theirs) in steps.iter().zip(project.steps("one")) {
        assert_eq!(ours.samples, theirs.samples);
        let (a, b) = (ours.window_ne.unwrap_or(1.0), theirs.window_ne.unwrap_or(1.0));
        assert!((a - b).abs() < 1e-5, "step {}: {a} and {b}", ours.step);
    }
}

#[test]
fn padded_missing_samples_have_weight_0() {
    // The shorter rank waits for more than one step.
    let (a, b) = (samples(1, 13), samples(2, 31));
    let project = project(&[&a, &b]);
    let mut whole = Vec::new();
    for mut batch in together(&[&a, &b], BATCH / 2) {
        batch.resize(BATCH, NOTHING);
        whole.extend(batch);
    }
    write(&project, "whole.parquet", &whole);
    project.ok("train config.toml --out one --set data.train=whole.parquet");
    let steps = own(&project, "--out two", 2, "--set parallel.uneven=pad");
    agree(&steps, &project.steps("one"));
    assert_eq!(
        steps.iter().map(|line| line.samples).collect::<Vec<_>>()[2..],
        [24, 29, 33, 37, 41, 44]
    );
    for (ours, theirs) in steps.iter().zip(project.steps("one")) {
        let (a, b) = (ours.window_ne.unwrap_or(1.0), theirs.window_ne.unwrap_or(1.0));
        assert!((a - b).abs() < 1e-5, "step {}: {a} and {b}", ours.step);
    }
    // Drained, the same samples in the same step weigh more.
    let drained = own(&project, "--out drained", 2, "");
    assert_eq!(drained[..3], steps[..3]);
    let (pad, drain) = (steps[3].loss.unwrap(), drained[3].loss.unwrap());
    assert!((pad * 8.0 - drain * 5.0).abs() < 1e-6 * drain, "{pad} of 8, {drain} of 5");
}

/// Three ranks and two files; and a file without a row.
#[test]
fn a_rank_without_samples_takes_part() {
    let (a, b) = (samples(1, 15), samples(2, 17));
    for (name, files) in [("two files", vec![&a[..], &b]), ("an empty file", vec![&a, &b, &[]])] {
        let project = project(&files);
        // Parts of 8 samples on three ranks are 3, 3 and 2.
        let whole = together(&[&a, &b], 3).concat();
        write(&project, "whole.parquet", &whole);
        let one = "--set data.train=whole.parquet --set data.batch_size=6 --set train.epochs=2";
        project.ok(&format!("train config.toml --out one {one}"));
        let steps = own(&project, "--out three", 3, "--set train.epochs=2");
        eprintln!("{name}");
        agree(&steps, &project.steps("one"));
        assert_eq!(project.summary("three")["samples"], 2 * 32);
    }
    let project = project(&[&[], &[]]);
    let ran = project.run(
        "train config.toml --out none --set parallel.ranks=2 --set threads=2 --set data.read=own",
    );
    ran.says(1, &["no samples"]);
}

/// The order of batches is that of files and ranks, whatever the schedule; and an uneven tail is
/// resumed anywhere in it with the bits of the run that was not interrupted.
#[test]
fn an_uneven_tail_is_resumed_exactly() {
    let (a, b, c) = (samples(1, 9), samples(2, 30), samples(3, 22));
    for set in ["", "--set parallel.uneven=pad --set data.shuffle_window=7"] {
        let project = project(&[&a, &b, &c]);
        let epochs = format!("--set train.epochs=2 {set}");
        let steps = own(&project, "--out whole", 3, &epochs);
        let per_epoch = steps.len() / 2;
        assert_eq!(steps[per_epoch - 1].samples, 61);
        let weights = project.export("whole");
        let serial =
            own(&project, "--out serial", 3, &format!("{epochs} --set pipeline.mode=serial"));
        assert_eq!(serial, steps);
        let mut from = "--out parts";
        // Rank 0 ends after 3 steps, rank 2 after 11, rank 1 after 10.
        for stop in [2, 3, 5, per_epoch - 1, per_epoch, per_epoch + 4, 2 * per_epoch] {
            let set = format!("{epochs} --set train.max_steps={stop}");
            assert_eq!(own(&project, from, 3, &set), steps[..stop], "{stop}");
            from = "--resume parts --out parts";
        }
        assert_eq!(own(&project, from, 3, &epochs), steps);
        assert!(project.export("parts") == weights, "other weights");

        // On other ranks nobody could say what was read.
        for (set, says) in [
            ("--set parallel.ranks=2 --set data.read=own", "set parallel.ranks = 3"),
            ("--set parallel.ranks=3", "data.read = \"own\", the configuration \"all\""),
        ] {
            let line = format!("train config.toml --resume parts --out new {set}");
            project.run(&line).says(1, &["does not fit this model", says]);
            assert!(!project.path("new").exists());
        }
        project.ok("train config.toml --out all --set train.max_steps=3");
        let line = "train config.toml --resume all --out new --set data.read=own";
        project.run(line).says(1, &["data.read = \"all\", the configuration \"own\""]);
    }
}

/// Bad input of one rank's own file stops all, by file and row.
#[test]
fn bad_input_names_the_file_of_the_rank_that_read_it() {
    let (a, mut b) = (samples(1, 40), samples(2, 40));
    b[17].ids[1] = vec![i64::from(ROWS)];
    let project = project(&[&a, &b]);
    let line = "--set parallel.ranks=2 --set threads=2 --set data.read=own";
    let ran = project.run(&format!("train config.toml --out run {line}"));
    ran.says(1, &["1.parquet row 17", "out of range for table item of 40 rows"]);
    // The batches before were trained on.
    assert!(project.steps_so_far("run") <= 4);
    b[17].ids[1].clear();
    b[3].label = 2.0;
    write(&project, "1.parquet", &b);
    let ran = project.run(&format!("train config.toml --out label {line}"));
    ran.says(1, &["1.parquet row 3: label 2 is outside 0 to 1"]);
}

/// All ranks read the same: the last batch may leave some of them nothing, or be one sample.
#[test]
fn a_batch_smaller_than_the_ranks_leaves_some_without_samples() {
    let a = samples(1, 2 * BATCH + 1);
    let project = project(&[&a]);
    project.ok("train config.toml --out one");
    for sharding in ["table_wise", "row_wise", "column_wise", "data_parallel"] {
        let out = format!("four-{sharding}");
        project.ok(&format!(
            "train config.toml --out {out} --set parallel.ranks=4 --set threads=4 \
             --set table.0.sharding={sharding} --set table.1.sharding={sharding}"
        ));
        agree(&project.steps(&out), &project.steps("one"));
        assert_eq!(project.summary(&out)["samples"], 17);
    }
    // Every batch is one sample, and groups are averaged over ranks that have none.
    for set in ["", "--set parallel.replicas=2"] {
        let out = format!("ones{}", set.len());
        project.ok(&format!(
            "train config.toml --out {out} --set data.batch_size=1 --set parallel.ranks=4 \
             --set threads=4 {set}"
        ));
        assert_eq!(project.steps(&out).len(), 17);
    }
}
