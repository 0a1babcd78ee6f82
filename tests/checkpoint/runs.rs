//! Runs of the program go on with other ranks and other plans, and what they wrote is evaluated
//! and exported by one.

use std::collections::{BTreeMap, BTreeSet};

use tessera::checkpoint::{Checkpoint, Shard};

use crate::common::{Project, Tensor, tensors};
use crate::faults::limit_files;

/// Every width of state, a table with fewer rows than ranks, and the wide part.
pub fn project() -> Project {
    let mut text = String::from(
        r#"seed = 5
threads = 1

[data]
format = "synthetic"
batch_size = 24
[data.synthetic]
samples = 480
eval_samples = 100

[model]
dense_features = 2
bottom_mlp = [8, 64]
interaction = "dot"
top_mlp = [8, 1]
wide = true

[optimizer]
dense = { kind = "adam", lr = 0.01 }

[train]
epochs = 2
max_steps = 12
"#,
    );
    for (name, rows, precision, kind) in [
        ("few", 3, "fp32", "adagrad"),
        ("one_a_row", 40, "fp32", "rowwise_adagrad"),
        ("both", 29, "fp16", "partial_rowwise_adam"),
        ("none", 50, "fp32", "sgd"),
    ] {
        text += &format!(
            "\n[[table]]\nname = \"{name}\"\nrows = {rows}\ndim = 64\nhots = 2\nprecision = \
             \"{precision}\"\noptimizer = {{ kind = \"{kind}\", lr = 0.05 }}\n"
        );
    }
    Project::new(&text)
}

pub fn plan(ranks: usize, sharding: &str) -> String {
    let tables = (0..4).map(|table| format!(" --set table.{table}.sharding={sharding}"));
    format!("--set parallel.ranks={ranks}{}", tables.collect::<String>())
}

/// How many ranks wrote the last checkpoint of a run, and whether there are columns apart.
fn written_by(project: &Project, run: &str) -> (usize, bool) {
    let manifest = Checkpoint::find(&project.path(run)).unwrap().manifest;
    let rank = |shard: &Shard| shard.file.split('-').nth(1).unwrap().to_owned();
    let ranks: BTreeSet<String> = manifest.shards.iter().map(rank).collect();
    let mut pieces = manifest.shards.iter().flat_map(|shard| &shard.pieces);
    (ranks.len(), pieces.any(|piece| piece.columns.is_some()))
}

#[test]
fn a_run_moves_between_ranks_and_plans_without_a_bit_changed() {
    let project = project();
    project.ok(&format!("train config.toml --out run0 {}", plan(8, "row_wise")));
    let weights = project.export("run0");
    let eval = |run: &str| {
        let printed = project.ok(&format!("eval config.toml --checkpoint {run} --json")).stdout;
        project.ok(&format!("predict config.toml --checkpoint {run} --out scores.parquet"));
        (printed, std::fs::read(project.path("scores.parquet")).unwrap())
    };
    let figures = eval("run0");
    assert_eq!(written_by(&project, "run0"), (8, false));
    let moves = [
        (6, "column_wise", (6, true)),
        (1, "auto", (1, false)),
        (4, "data_parallel", (1, false)),
        (2, "grid", (2, false)),
        (3, "table_wise", (3, false)),
        (5, "row_wise", (5, false)),
    ];
    for (i, (ranks, sharding, writers)) in moves.into_iter().enumerate() {
        let (from, to) = (format!("run{i}"), format!("run{}", i + 1));
        let plan = plan(ranks, sharding);
        // All steps are done: the run writes what it has read.
        project.ok(&format!("train config.toml --resume {from} --out {to} {plan}"));
        assert_eq!(written_by(&project, &to), writers, "{sharding} on {ranks} ranks");
        assert!(project.export(&to) == weights, "{sharding} on {ranks} ranks");
        assert!(eval(&to) == figures, "{sharding} on {ranks} ranks");
    }
}

/// 12 steps on 3 ranks and 8 more on others, against 20 on one.
#[test]
fn a_run_that_moved_goes_on_as_if_it_had_not() {
    let project = project();
    let far = "--set train.max_steps=20";
    project.ok(&format!("train config.toml --out whole {far}"));
    let whole = project.steps("whole");
    project.ok(&format!("train config.toml --out first {}", plan(3, "row_wise")));
    for (ranks, sharding) in [(4, "column_wise"), (2, "data_parallel"), (1, "auto")] {
        let plan = plan(ranks, sharding);
        let out = format!("on{ranks}");
        project.ok(&format!("train config.toml --resume first --out {out} {far} {plan}"));
        let rest = project.steps(&out);
        assert_eq!(rest.len(), 8);
        for (line, reference) in rest.iter().zip(&whole[12..]) {
            assert_eq!(line.step, reference.step);
            let (loss, expected) = (line.loss.unwrap(), reference.loss.unwrap());
            let off = (loss - expected).abs() / expected;
            assert!(off <= 1e-5, "{ranks} ranks, step {}: {loss}, not {expected}", line.step);
        }
    }
}

/// Bits of the weights of an export by name, without states.
fn of_weights(file: &[u8]) -> BTreeMap<String, Vec<u32>> {
    let is_weight =
        |name: &str| [".weight", ".bias", ".wide"].iter().any(|end| name.ends_with(end));
    let bits = |tensor: Tensor| tensor.values.iter().map(|value| value.to_bits()).collect();
    let weights = tensors(file).into_iter().filter(|(name, _)| is_weight(name));
    weights.map(|(name, tensor)| (name, bits(tensor))).collect()
}

/// A weights file is read by ranks that hold a part of it each.
#[test]
fn ranks_begin_from_a_weights_file() {
    let project = project();
    project.ok("train config.toml --out run");
    let weights = project.export("run");
    std::fs::write(project.path("w.safetensors"), &weights).unwrap();
    // With learning rates of nothing, the weights stay what they were read as.
    let still = "--set optimizer.dense.lr=0 --set table.0.optimizer.lr=0 \
                 --set table.1.optimizer.lr=0 --set table.2.optimizer.lr=0 \
                 --set table.3.optimizer.lr=0 --set train.max_steps=1";
    let train = |out: &str, more: &str| {
        project.ok(&format!("train config.toml --init w.safetensors --out {out} {still} {more}"));
        of_weights(&project.export(out))
    };
    let read = of_weights(&weights);
    assert_eq!(read.len(), 4 + 4 + 8, "tables, wide part, layers");
    assert!(train("alone", "") == read);
    assert!(train("rows", &plan(5, "row_wise")) == read);
    assert!(train("columns", &plan(2, "column_wise")) == read);
}

/// The disk has no room for the largest shard of several ranks.
#[test]
fn a_full_disk_under_several_ranks_leaves_the_checkpoint_before() {
    let project = project();
    let plan = plan(3, "table_wise");
    project.ok(&format!("train config.toml --out run {plan}"));
    let weights = project.export("run");
    let manifest = Checkpoint::find(&project.path("run")).unwrap().manifest;
    let largest = manifest.shards.iter().max_by_key(|shard| shard.bytes).unwrap();
    let more = format!("train config.toml --resume run --set train.max_steps=20 {plan}");
    let mut command = project.command(&more);
    limit_files(&mut command, largest.bytes - 1);
    let out = command.output().unwrap();
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains("cannot write") && stderr.contains(&largest.file), "{stderr}");
    assert_eq!(project.pointer("run", "last"), 12);
    assert!(project.export("run") == weights);
    project.ok(&more);
    assert_eq!(project.pointer("run", "last"), 20);
}
