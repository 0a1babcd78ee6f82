//! Bad input is an error that names its place, before anything is written; policies that let it
//! pass count it.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;

use arrow::array::ArrayRef;
use common::files::{
    bags, criteo_line, floats, ints, raw_record, unsigned, weights, write_parquet,
};
use common::{Project, Running, tensors};

/// Two tables, read from Parquet.
const PARQUET: &str = r#"seed = 1
threads = 2

[data]
format = "parquet"
train = ["train.parquet"]
batch_size = 4
dense = ["d1", "d2"]

[model]
dense_features = 2
bottom_mlp = [4]
interaction = "concat"
top_mlp = [4, 1]
wide = true

[[table]]
name = "a"
rows = 10
dim = 4

[[table]]
name = "b"
rows = 1000
dim = 4

[optimizer.sparse]
kind = "rowwise_adagrad"
lr = 0.05

[optimizer.dense]
kind = "sgd"
lr = 0.05

[train]
log_every = 1
"#;

/// Columns that [`PARQUET`] trains on: 8 rows, two batches.
fn columns() -> Vec<(&'static str, ArrayRef)> {
    vec![
        ("label", floats(&[0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.0])),
        ("d1", floats(&[0.5, -1.0, 0.0, 2.0, 0.25, 1.5, -0.5, 1.0])),
        ("d2", floats(&[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])),
        ("a", bags(&[&[0, 9], &[], &[3], &[4, 4], &[5], &[1, 2], &[0], &[9]])),
        ("b", ints(&[0, 999, 5, 7, 5, 11, 13, 999])),
    ]
}

/// A project whose file has the columns of [`columns`], some of them replaced.
fn parquet(replaced: &[(&'static str, ArrayRef)]) -> Project {
    let project = Project::new(PARQUET);
    let mut columns = columns();
    for (name, values) in &mut columns {
        if let Some((_, other)) = replaced.iter().find(|(column, _)| column == name) {
            *values = other.clone();
        }
    }
    write_parquet(&project.path("train.parquet"), &columns);
    project
}

/// The run fails with exit code 1, says `parts`, and leaves no state.
#[track_caller]
fn refused(project: &Project, set: &str, parts: &[&str]) {
    let ran = project.run(&format!("train config.toml --out run {set}"));
    eprintln!("{}", ran.stderr.trim_end());
    ran.says(1, parts);
    project.wrote_no_state("run");
}

#[test]
fn the_good_file_trains() {
    let project = parquet(&[]);
    project.ok("train config.toml --out run");
    assert_eq!(project.steps("run").len(), 2);
}

#[test]
fn an_id_out_of_range_names_file_row_table_feature_and_sample() {
    for id in [10, -1, i64::MAX, i64::MIN] {
        // Row 6 is sample 2 of the second batch.
        let ids = [0, 1, 2, 3, 4, 5, id, 7];
        let project = parquet(&[("a", ints(&ids))]);
        let wanted = format!(
            "train.parquet row 6: lookup: id {id} out of range for table a of 10 rows (feature a, sample 2)"
        );
        refused(&project, "", &[&wanted]);
        assert_eq!(project.steps("run").len(), 1, "the batch before was good");
        let again = project.run("train config.toml --out again");
        assert_eq!(again.stderr.matches("out of range").count(), 1, "told twice: {}", again.stderr);
    }
    // In the last table, and inside a bag.
    let project = parquet(&[("b", ints(&[0, 1, 1000, 3, 4, 5, 6, 7]))]);
    refused(&project, "", &["train.parquet row 2", "id 1000", "table b of 1000 rows", "sample 2"]);
    let inside: &[&[i64]] = &[&[0], &[1, 2, 10, 3], &[], &[], &[], &[], &[], &[]];
    let project = parquet(&[("a", bags(inside))]);
    refused(&project, "", &["train.parquet row 1", "id 10", "table a of 10 rows", "sample 1"]);
}

#[test]
fn an_unsigned_id_beyond_63_bits_is_not_wrapped() {
    for id in [1 << 63, u64::MAX] {
        let project = parquet(&[("b", unsigned(&[0, 1, 2, id, 4, 5, 6, 7]))]);
        refused(&project, "", &["train.parquet row 3, column b", &id.to_string()]);
    }
}

/// The state of before the bad batch is the state that stays.
#[test]
fn a_bad_batch_changes_nothing_of_the_checkpoint_before() {
    let bad = parquet(&[("b", ints(&[0, 999, 5, 7, 5, 11, 13, 1000]))]);
    let ran = bad.run("train config.toml --out run --set train.checkpoint_every=1");
    ran.says(1, &["train.parquet row 7", "id 1000"]);
    assert_eq!((bad.pointer("run", "last"), bad.checkpoints("run")), (1, vec![1]));
    let good = parquet(&[]);
    good.ok("train config.toml --out run --set train.max_steps=1");
    assert!(good.export("run") == bad.export("run"));
}

/// The last evaluation comes after the last checkpoint: its data may be bad, the training is not
/// lost.
#[test]
fn bad_evaluation_data_does_not_cost_the_training() {
    let project = parquet(&[]);
    let mut columns = columns();
    columns[4].1 = ints(&[0, 1, 2, 3, 4, 5, 6, 1000]);
    write_parquet(&project.path("eval.parquet"), &columns);
    let ran = project.run("train config.toml --out run --set data.eval=eval.parquet");
    ran.says(1, &["eval.parquet row 7", "id 1000 out of range for table b of 1000 rows"]);
    assert_eq!(project.pointer("run", "last"), 2);
    assert!(!project.path("run/summary.json").exists());
    let eval = "eval config.toml --checkpoint run --set data.eval";
    project.run(&format!("{eval}=eval.parquet")).says(1, &["eval.parquet row 7"]);
    project.ok(&format!("{eval}=train.parquet"));
}

fn raw(records: &[Vec<u8>]) -> Project {
    let text = PARQUET.replace("parquet", "raw").replace("dense = [\"d1\", \"d2\"]\n", "");
    let project = Project::new(&text);
    std::fs::write(project.path("train.raw"), records.concat()).unwrap();
    project
}

#[test]
fn raw_files_are_held_to_their_records() {
    let record = |a: i32, b: i32| raw_record(1, &[0.5, 1.5], &[a, b]);
    let good = record(1, 2);
    for (a, b, part) in [(-1, 0, "id -1"), (10, 0, "id 10"), (0, i32::MIN, "id -2147483648")] {
        let project = raw(&[good.clone(), record(a, b)]);
        refused(&project, "", &["train.raw row 1", part, "sample 1"]);
    }
    let project = raw(&[good.clone(), good[..19].to_vec()]);
    refused(&project, "", &["train.raw: 39 bytes are not a whole number of records of 20 bytes"]);
    refused(&raw(&[]), "", &["train.raw", "empty"]);
    let nan = raw_record(0, &[0.5, f32::NAN], &[1, 1]);
    refused(&raw(&[good, nan]), "", &["train.raw row 1", "column dense2", "NaN is not finite"]);
}

fn criteo(lines: &str, name: &str) -> Project {
    let text = PARQUET
        .replace("train.parquet", name)
        .replace("\"parquet\"", "\"criteo-tsv\"")
        .replace("dense = [\"d1\", \"d2\"]\n", "")
        .replace("name = \"a\"", "name = \"a\"\nfeatures = [\"c1\"]")
        .replace("name = \"b\"", "name = \"b\"\nfeatures = [\"c26\"]");
    let project = Project::new(&text);
    project.write(name, lines);
    project
}

#[test]
fn criteo_rows_are_held_to_their_columns() {
    let good = criteo_line("1", &[("i1", "3"), ("i2", ""), ("c1", "68fd1e64"), ("c26", "a")]);
    criteo(&good, "train.tsv").ok("train config.toml --out run");
    let cut = good.trim_end().rsplit_once('\t').unwrap().0.to_owned() + "\n";
    let line = |label: &str, i1: &str, c1: &str| criteo_line(label, &[("i1", i1), ("c1", c1)]);
    for (bad, parts) in [
        (cut, &["39 columns, 40 expected"] as &[&str]),
        ("\n".to_owned(), &["columns, 40 expected"]),
        (line("yes", "1", "a"), &["column label: `yes`"]),
        (line("", "1", "a"), &["column label: ``"]),
        (line("0", "1.5x", "a"), &["column i1: `1.5x`"]),
        (line("0", "1", "xyz"), &["column c1: `xyz`"]),
    ] {
        let project = criteo(&(good.clone() + &good + &bad + &good), "train.tsv");
        refused(&project, "", &[&["train.tsv line 3"], parts].concat());
    }
    refused(&criteo("", "train.tsv"), "", &["train.tsv: the file is empty"]);
}

#[test]
fn a_compressed_file_that_is_cut_is_an_error_not_a_short_epoch() {
    let lines: String = (0..3000)
        .map(|i| criteo_line("0", &[("i1", &i.to_string()), ("c1", &format!("{:x}", i * 77))]))
        .collect();
    for name in ["train.tsv.gz", "train.tsv.zst"] {
        let project = criteo(&lines, "train.tsv");
        project.ok(&format!("data convert config.toml --to criteo-tsv --out {name}"));
        let whole = std::fs::read(project.path(name)).unwrap();
        let set = format!("--set data.train={name} --set data.batch_size=100");
        project.ok(&format!("train config.toml --out whole {set}"));
        assert_eq!(project.steps("whole").len(), 30);
        for keep in [whole.len() / 2, whole.len() - 3] {
            std::fs::write(project.path(name), &whole[..keep]).unwrap();
            refused(&project, &set, &[name, "ends early or is damaged"]);
            std::fs::remove_dir_all(project.path("run")).unwrap();
        }
        std::fs::write(project.path(name), b"").unwrap();
        refused(&project, &set, &[name, "empty"]);
    }
}

#[test]
fn parquet_columns_are_found_by_name() {
    for missing in ["label", "d2", "a"] {
        let project = Project::new(PARQUET);
        let columns: Vec<_> = columns().into_iter().filter(|(name, _)| *name != missing).collect();
        write_parquet(&project.path("train.parquet"), &columns);
        let wanted = format!("train.parquet: no column `{missing}`; the file has: ");
        refused(&project, "", &[&wanted, "b"]);
        assert!(!project.path("run").exists(), "found before the run began");
    }
    let straight = parquet(&[]);
    straight.ok("train config.toml --out run");
    let shuffled = Project::new(PARQUET);
    let mut columns = columns();
    columns.reverse();
    columns.insert(2, ("unused", ints(&[7; 8])));
    write_parquet(&shuffled.path("train.parquet"), &columns);
    shuffled.ok("train config.toml --out run");
    assert_eq!(shuffled.steps("run"), straight.steps("run"));
    assert!(shuffled.export("run") == straight.export("run"));
}

#[test]
fn files_that_are_not_what_they_should_be() {
    let project = parquet(&[]);
    let whole = std::fs::read(project.path("train.parquet")).unwrap();
    std::fs::write(project.path("train.parquet"), &whole[..whole.len() / 2]).unwrap();
    refused(&project, "", &["train.parquet: not a readable Parquet file"]);
    std::fs::write(project.path("train.parquet"), b"").unwrap();
    refused(&project, "", &["train.parquet: the file is empty"]);
    std::fs::remove_file(project.path("train.parquet")).unwrap();
    refused(&project, "", &["cannot open", "train.parquet"]);

    let project = parquet(&[("a", floats(&[0.5; 8]))]);
    refused(&project, "", &["train.parquet: column `a` is Float32; an integer or a list"]);
}

#[test]
fn dense_values_that_are_not_finite_name_their_column() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf"), (-f32::INFINITY, "-inf")] {
        let project = parquet(&[("d2", floats(&[1.0, 2.0, 3.0, 4.0, 5.0, value, 7.0, 8.0]))]);
        let wanted = format!("train.parquet row 5, dense column d2: {shown} is not finite");
        refused(&project, "", &[&wanted]);
    }
}

#[test]
fn labels_are_from_0_to_1() {
    for (label, said) in [
        (2.0, "row 3: label 2 is outside 0 to 1"),
        (-0.5, "row 3: label -0.5 is outside 0 to 1"),
        (f32::NAN, "row 3, column label: NaN is not finite"),
    ] {
        let project = parquet(&[("label", floats(&[0.0, 1.0, 0.5, label, 0.0, 0.0, 0.0, 0.0]))]);
        refused(&project, "", &["train.parquet", said]);
    }
    // A label in between is a probability.
    let project = parquet(&[("label", floats(&[0.25; 8]))]);
    project.ok("train config.toml --out run");
}

#[test]
fn weights_of_ids_must_fit_their_bags() {
    let columns = |values: &[&[f32]]| {
        let mut columns = columns();
        columns.push(("a_weights", weights(values)));
        let project = Project::new(&PARQUET.replace("rows = 10\n", "rows = 10\nweighted = true\n"));
        write_parquet(&project.path("train.parquet"), &columns);
        project
    };
    let good: &[&[f32]] = &[&[0.5, 2.0], &[], &[1.0], &[1.0; 2], &[0.0], &[1.0; 2], &[1.0], &[1.0]];
    columns(good).ok("train config.toml --out run");
    let mut short = good.to_vec();
    short[3] = &[1.0];
    refused(&columns(&short), "", &["train.parquet row 3", "a_weights"]);
    let mut nan = good.to_vec();
    nan[5] = &[1.0, f32::NAN];
    refused(&columns(&nan), "", &["train.parquet row 5", "a_weights"]);
}

#[test]
fn a_table_of_no_rows_serves_empty_bags_only() {
    let text = PARQUET.replace("rows = 10\n", "rows = 0\n");
    let run = |bag: &[i64]| {
        let project = parquet(&[("a", bags(&[&[], &[], &[], bag, &[], &[], &[], &[]]))]);
        project.write("config.toml", &text);
        project
    };
    let empty = run(&[]);
    empty.ok("train config.toml --out run");
    let export = tensors(&empty.export("run"));
    assert_eq!(export["tables.a.weight"].shape, [0, 4]);
    assert_eq!(export["tables.a.sum"].shape, [0]);
    empty.ok("train config.toml --resume run --set train.epochs=2");
    assert_eq!(empty.steps("run").len(), 4);
    refused(&run(&[0]), "", &["train.parquet row 3", "id 0", "table a of 0 rows"]);
}

#[test]
fn options_that_are_not_known_or_not_used_are_refused() {
    let project = parquet(&[]);
    for (set, parts) in [
        ("train.epoch=2", &["train.epoch: unknown key; did you mean `epochs`?"] as &[&str]),
        ("colour=red", &["colour: unknown key"]),
        ("table.0.hots=3", &["table.0.hots: only formats raw and synthetic"]),
        (
            "optimizer.sparse.momentum=0.9",
            &["optimizer.sparse.momentum: optimizer rowwise_adagrad does not take this option"],
        ),
        ("optimizer.dense.beta1=0.9", &["optimizer.dense.beta1: optimizer sgd does not take"]),
        (
            "optimizer.sparse.weight_decay=0.1",
            &["optimizer.sparse.weight_decay", "weight_decay_mode"],
        ),
        ("table.1.pooling=none", &["table.1.pooling"]),
        ("data.label=d1", &["d1"]),
    ] {
        let ran = project.run(&format!("train config.toml --out run --set {set}"));
        assert_ne!(ran.code, Some(0), "{set} was accepted");
        for part in parts {
            assert!(ran.stderr.contains(part), "{set}: `{part}` is missing from:\n{}", ran.stderr);
        }
        project.wrote_no_state("run");
    }
    // The exit code of a wrong configuration and of a wrong command line.
    project.run("train config.toml --out run --set colour=red").says(2, &["colour"]);
    project.run("train config.toml --out run --colour red").says(2, &["--colour"]);
    project.run("train --out run").says(2, &["CONFIG"]);
}

/// Starts a run that would last long, with its metrics on a free port.
fn long_run(project: &Project, set: &str) -> (Running, String) {
    let mut run = project.start(&format!(
        "train config.toml --out run --set metrics.listen=127.0.0.1:0 --set train.epochs=1000000 {set}"
    ));
    let address = run.line("metrics: http://").strip_suffix("/metrics").unwrap().to_owned();
    (run, address)
}

/// The value of a series of `/metrics`.
fn metric(address: &str, series: &str) -> f64 {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix(series)?.strip_prefix(' '))
        .unwrap_or_else(|| panic!("no series {series} in:\n{text}"));
    line.trim().parse().unwrap()
}

/// The run goes on under the policy, and counts.
fn counted(project: &Project, set: &str, series: &str) {
    project.ok(&format!("train config.toml --out short {set} --set train.epochs=2"));
    assert_eq!(project.steps("short").len(), 4);
    let (mut run, address) = long_run(project, set);
    // An epoch has one such value: after three of them there are at least two.
    run.wait_for("steps", || (project.steps_so_far("run") >= 6).then_some(()));
    let value = metric(&address, series);
    let epochs = (project.steps_so_far("run") + 2) as f64 / 2.0;
    assert!((2.0..=epochs + 4.0).contains(&value), "{series} is {value} after {epochs} epochs");
    run.signal(libc::SIGTERM);
    let (status, stderr) = run.end();
    assert_eq!(status.code(), Some(143), "{stderr}");
}

#[test]
fn a_bad_id_can_be_dropped_and_is_counted() {
    let good: &[&[i64]] = &[&[0], &[1], &[2], &[3], &[4], &[5], &[], &[7]];
    let mut bad = good.to_vec();
    bad[6] = &[10];
    let project = parquet(&[("a", bags(&bad))]);
    let set = "--set data.on_bad_id=drop";
    // The wide part looks every id up a second time.
    let series = "tessera_embedding_bad_ids_total{policy=\"drop\",table=\"a\"}";
    counted(&project, set, series);
    // A dropped id is as if it had not been there.
    let without = parquet(&[("a", bags(good))]);
    without.ok("train config.toml --out short --set train.epochs=2");
    assert!(project.export("short") == without.export("short"));
}

#[test]
fn a_bad_id_can_go_to_the_default_row_and_is_counted() {
    let ids = |id: i64| [9, 1, 2, id, 4, 5, 6, 7];
    let project = parquet(&[("a", ints(&ids(-1)))]);
    let set = "--set data.on_bad_id=default_row";
    let series = "tessera_embedding_bad_ids_total{policy=\"default_row\",table=\"a\"}";
    counted(&project, set, series);
    let row_0 = parquet(&[("a", ints(&ids(0)))]);
    row_0.ok("train config.toml --out short --set train.epochs=2");
    assert!(project.export("short") == row_0.export("short"));
}

#[test]
fn a_dense_value_that_is_not_finite_can_be_0_and_is_counted() {
    let dense = |value: f32| floats(&[1.0, value, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let project = parquet(&[("d2", dense(f32::NAN))]);
    let series = "tessera_data_bad_input_total{kind=\"dense_not_finite\",policy=\"zero\"}";
    counted(&project, "--set data.on_nan_dense=zero", series);
    let zero = parquet(&[("d2", dense(0.0))]);
    zero.ok("train config.toml --out short --set train.epochs=2");
    assert!(project.export("short") == zero.export("short"));
}

/// With such a rate the first update makes weights near 1e30, and the second loss overflows.
const HUGE: &str = "--set optimizer.dense.lr=1e30";

#[test]
fn a_loss_or_gradient_that_overflows_stops_the_run() {
    let project = parquet(&[]);
    refused(&project, HUGE, &["step 2: ", "is not finite; nothing of this step was written"]);
    assert_eq!(project.steps("run").len(), 1);
    // With checkpoints on the way the last good moment stays, the overflow is never saved.
    let ran =
        project.run(&format!("train config.toml --out kept {HUGE} --set train.checkpoint_every=1"));
    ran.says(1, &["step 2: "]);
    assert_eq!(project.pointer("kept", "last"), 1);
    for (name, tensor) in tensors(&project.export("kept")) {
        assert!(tensor.values.iter().all(|value| value.is_finite()), "{name}");
    }
}

/// Weights that are finite and far too large give no predictions. There was a time when the
/// evaluation then said AUC 0.5 and log loss NaN, and the run ended well.
#[test]
fn a_prediction_that_is_not_a_number_is_an_error() {
    let project = parquet(&[]);
    let eval = "--set data.eval=train.parquet";
    let ran =
        project.run(&format!("train config.toml --out run {HUGE} {eval} --set train.max_steps=1"));
    let said = ["train.parquet row 0: the model's logit is ", "too large"];
    ran.says(1, &said);
    project.run(&format!("eval config.toml --checkpoint run {eval}")).says(1, &said);
    let predict = format!("predict config.toml --checkpoint run --out scores.parquet {eval}");
    project.run(&predict).says(1, &said);
    assert!(!project.path("scores.parquet").exists());
}

/// Finite gradients can overflow in the update of the towers. There was a time when the last step
/// of a run could do so, and its checkpoint held NaN.
#[test]
fn a_parameter_that_overflows_in_its_update_is_never_saved() {
    for lr in ["1e38", "3e38"] {
        let project = parquet(&[("d2", floats(&[1e4; 8]))]);
        let set = format!("--set optimizer.dense.lr={lr} --set train.max_steps=1");
        refused(&project, &set, &["step 1: parameter dense.", "no checkpoint of it is written"]);
    }
}

#[test]
fn a_row_that_overflows_in_its_update_stops_the_run_too() {
    let project = Project::new(PARQUET);
    let mut columns = columns();
    columns.push(("w", floats(&[1e4; 8])));
    write_parquet(&project.path("train.parquet"), &columns);
    let set = "--set optimizer.sparse.kind=sgd --set optimizer.sparse.lr=3e38 \
               --set optimizer.dense.lr=1 --set data.sample_weight=w";
    refused(&project, set, &["step 1: ", "rows of table ", "no checkpoint of it is written"]);
}

#[test]
fn steps_that_are_not_finite_can_be_skipped_and_are_counted() {
    let project = parquet(&[]);
    let skip = format!("{HUGE} --set train.on_nonfinite=skip");
    project.ok(&format!("train config.toml --out run {skip} --set train.epochs=3"));
    let steps = project.steps("run");
    assert_eq!(steps.len(), 6);
    assert!(steps[0].loss.is_some());
    assert!(steps[1..].iter().all(|line| line.loss.is_none()), "skipped steps have no loss");
    // They changed nothing: weights and states are those after the first step.
    project.ok(&format!("train config.toml --out first {HUGE} --set train.max_steps=1"));
    assert!(project.export("run") == project.export("first"));

    std::fs::remove_dir_all(project.path("run")).unwrap();
    let (mut run, address) = long_run(&project, &skip);
    run.wait_for("steps", || (project.steps_so_far("run") >= 8).then_some(()));
    assert!(metric(&address, "tessera_train_skipped_steps_total") >= 6.0);
    run.signal(libc::SIGINT);
    assert_eq!(run.end().0.code(), Some(130));
}
