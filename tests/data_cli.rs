//! `tessera data`: what is written in one format and rewritten in the others trains to the same
//! bits, and inspection tells what is there.

mod common;

use common::files::criteo_line;
use common::{Line, Project};
use serde_json::Value;

/// A configuration of two tables; `data` and `table` go into their sections.
fn config(data: &str, [first, second]: [&str; 2], table: &str) -> String {
    format!(
        r#"seed = 2
threads = 2

[data]
batch_size = 40
{data}

[model]
dense_features = 2
bottom_mlp = [4]
interaction = "concat"
top_mlp = [6, 1]

[[table]]
name = "{first}"
rows = 300
dim = 4
{table}

[[table]]
name = "{second}"
rows = 50
dim = 4
{table}

[optimizer]
sparse = {{ kind = "adagrad", lr = 0.05 }}
dense = {{ kind = "sgd", lr = 0.05 }}
"#
    )
}

/// Trains on `data` and gives the lines of the steps.
fn losses(project: &Project, name: &str, text: &str) -> Vec<Line> {
    project.write(&format!("{name}.toml"), text);
    project.ok(&format!("train {name}.toml --out run-{name}"));
    project.steps(&format!("run-{name}"))
}

const NAMES: [&str; 2] = ["user", "item"];

/// `synthetic`, written to each format and rewritten from each to each.
#[test]
fn synthetic_data_is_the_same_in_every_format() {
    let synthetic = "format = \"synthetic\"\n[data.synthetic]\nsamples = 500\neval_samples = 100";
    let project = Project::new(&config(synthetic, NAMES, "hots = 2"));
    project.ok("train config.toml --out run");
    let wanted = project.steps("run");
    assert_eq!(wanted.len(), 13);

    let reads = |format: &str, path: &str| {
        let names = if format == "parquet" { "dense = [\"dense1\", \"dense2\"]" } else { "" };
        let data = format!("format = \"{format}\"\ntrain = [\"{path}\"]\n{names}");
        config(&data, NAMES, if format == "raw" { "hots = 2" } else { "" })
    };
    let formats = ["raw", "parquet", "mlperf-npy"];
    for from in formats {
        let ran = project.ok(&format!("data synth config.toml --to {from} --out {from}.data"));
        ran.says(0, &[&format!("wrote 500 samples as {from} to {from}.data"), "ceiling: AUC 0."]);
        let text = reads(from, &format!("{from}.data"));
        assert_eq!(losses(&project, from, &text), wanted, "{from}");
        for to in formats {
            let copy = format!("{from}-{to}.data");
            project.ok(&format!("data convert {from}.toml --to {to} --out {copy}"));
            let name = format!("{from}-{to}");
            assert_eq!(losses(&project, &name, &reads(to, &copy)), wanted, "{from} to {to}");
        }
    }
    // The other split is other data of the same law.
    project.ok("data synth config.toml --split eval --to raw --out eval.data");
    let bytes = |name: &str| std::fs::read(project.path(name)).unwrap();
    assert_eq!(bytes("eval.data").len() * 5, bytes("raw.data").len());
    assert_ne!(bytes("eval.data"), bytes("raw.data")[..bytes("eval.data").len()]);
}

#[test]
fn criteo_rows_keep_their_values_in_every_format() {
    let names = ["c3", "c14"];
    let mut lines = String::new();
    for i in 0..230i64 {
        // Missing and negative integers, missing categories.
        let count = if i % 7 == 0 { String::new() } else { (i * i % 50 - 2).to_string() };
        let category = if i % 5 == 0 { String::new() } else { format!("{:08x}", i * 2_654_435) };
        let other = format!("{:08x}", i % 9);
        lines += &criteo_line(
            if i % 3 == 0 { "1" } else { "0" },
            &[("i2", &count), ("i13", "4"), ("c3", &category), ("c14", &other)],
        );
    }
    let dense = "dense = [\"i2\", \"i13\"]";
    let criteo = |path: &str| {
        config(&format!("format = \"criteo-tsv\"\ntrain = [\"{path}\"]\n{dense}"), names, "")
    };
    let project = Project::new(&criteo("data.tsv"));
    project.write("data.tsv", &lines);
    project.ok("train config.toml --out run");
    let wanted = project.steps("run");
    assert_eq!(wanted.len(), 6);

    for copy in ["copy.tsv", "copy.tsv.gz", "copy.tsv.zst"] {
        project.ok(&format!("data convert config.toml --to criteo-tsv --out {copy}"));
        assert_eq!(losses(&project, copy, &criteo(copy)), wanted, "{copy}");
    }
    for to in ["raw", "parquet", "mlperf-npy"] {
        project.ok(&format!("data convert config.toml --to {to} --out {to}.data"));
        // The copy holds the counts as they were; the transform is the reader's.
        let names_of_dense = if to == "parquet" { dense } else { "" };
        let data = format!(
            "format = \"{to}\"\ntrain = [\"{to}.data\"]\ndense_transform = \"log1p\"\n{names_of_dense}"
        );
        assert_eq!(losses(&project, to, &config(&data, names, "")), wanted, "{to}");
    }
}

#[test]
fn bags_and_weights_stay_in_parquet_and_are_refused_elsewhere() {
    let synthetic = "format = \"synthetic\"\n[data.synthetic]\nsamples = 300\nhots_spread = 2";
    let project = Project::new(&config(synthetic, NAMES, "hots = 2\nweighted = true"));
    project.ok("train config.toml --out run");
    let wanted = project.steps("run");
    project.ok("data synth config.toml --to parquet --out data.parquet");
    let data = "format = \"parquet\"\ntrain = [\"data.parquet\"]\ndense = [\"dense1\", \"dense2\"]";
    let text = config(data, NAMES, "weighted = true");
    assert_eq!(losses(&project, "parquet", &text), wanted);
    for to in ["raw", "mlperf-npy", "criteo-tsv"] {
        let ran = project.run(&format!("data convert parquet.toml --to {to} --out {to}.data"));
        ran.says(2, &[to, "weights of ids (feature user)"]);
    }
    // Bags without weights: the number of ids differs, which these formats cannot hold.
    let text = config(data, NAMES, "");
    project.write("plain.toml", &text);
    for to in ["raw", "mlperf-npy"] {
        let ran = project.run(&format!("data convert plain.toml --to {to} --out {to}.data"));
        ran.says(1, &[to, "cannot hold", "data.parquet row ", "a bag of "]);
    }
    let ran = project.run("data convert plain.toml --to criteo-tsv --out criteo-tsv.data");
    ran.says(2, &["criteo-tsv has no column `dense1`; it has i1 to i13"]);
    for name in ["raw.data", "criteo-tsv.data", "mlperf-npy.data/day_0_dense.npy"] {
        assert!(!project.path(name).exists(), "{name}");
    }
}

#[test]
fn synthetic_counts_can_be_written_as_criteo_rows() {
    let data = "format = \"synthetic\"\n[data.synthetic]\nsamples = 120\ndense = \"counts\"";
    let project = Project::new(&config(data, ["c1", "c2"], ""));
    project.ok("data synth config.toml --to criteo-tsv --out data.tsv.gz");
    let criteo = "format = \"criteo-tsv\"\ntrain = [\"data.tsv.gz\"]";
    let steps = losses(&project, "tsv", &config(criteo, ["c1", "c2"], ""));
    assert_eq!(steps.last().unwrap().samples, 120);
}

#[test]
fn nothing_is_written_over_and_wrong_uses_are_told() {
    let synthetic = "format = \"synthetic\"\n[data.synthetic]\nsamples = 50";
    let project = Project::new(&config(synthetic, NAMES, ""));
    project.ok("data synth config.toml --to raw --out data.raw");
    let before = std::fs::read(project.path("data.raw")).unwrap();
    let ran = project.run("data synth config.toml --to raw --out data.raw");
    ran.says(1, &["data.raw"]);
    assert_eq!(std::fs::read(project.path("data.raw")).unwrap(), before);
    project.run("data synth config.toml --to synthetic --out x").says(2, &["--to synthetic"]);
    project.run("data synth config.toml --to csv --out x").says(2, &["`csv`", "mlperf-npy"]);
    project.write("raw.toml", &config("format = \"raw\"\ntrain = [\"data.raw\"]", NAMES, ""));
    let ran = project.run("data synth raw.toml --to parquet --out x");
    ran.says(2, &["data.format = \"synthetic\"", "data convert"]);
    project.run("data convert raw.toml --split eval --to parquet --out x").says(2, &["data.eval"]);
    assert!(!project.path("x").exists());
}

#[test]
fn inspection_tells_counts_ranges_and_heads() {
    let names = ["c1", "c2"];
    let mut lines = String::new();
    for i in 0..100 {
        let c1 = if i % 4 == 0 { "" } else { "0000abcd" };
        let i1 = (i % 10).to_string();
        lines += &criteo_line(
            if i < 25 { "1" } else { "0" },
            &[("i1", &i1), ("i2", "-3"), ("c1", c1), ("c2", &format!("{i:x}"))],
        );
    }
    let criteo = "format = \"criteo-tsv\"\ntrain = [\"data.tsv\"]";
    let project = Project::new(&config(criteo, names, ""));
    project.write("data.tsv", &lines);
    let ran = project.ok("data inspect config.toml --json");
    let report: Value = serde_json::from_str(&ran.stdout).unwrap();
    assert_eq!(report["samples"], 100);
    assert_eq!(report["positives_share"], 0.25);
    assert_eq!(report["dense"][0]["range"]["max"], 9.0);
    assert_eq!(report["dense"][1]["range"]["min"], -3.0, "before the transform");
    // Ids are those that training sees: a missing category is row 0.
    let [c1, c2] = [0, 1].map(|i| &report["features"][i]);
    assert_eq!((&c1["ids"], &c1["id_min"]), (&100.into(), &0.into()));
    assert_eq!(c1["distinct"]["exact"], 2);
    assert_eq!(c1["head"][0]["share"], 0.75);
    assert_eq!(c1["head"][1]["id"], 0);
    let distinct = c2["distinct"]["exact"].as_u64().unwrap();
    assert!((35..50).contains(&distinct), "100 values in 49 rows fill most: {distinct}");
    assert!(c2["id_min"].as_i64().unwrap() >= 1 && c2["id_max"].as_i64().unwrap() < 50);
    let text = project.ok("data inspect config.toml --samples 40").stdout;
    for part in ["40", "c1", "c2", "i1"] {
        assert!(text.contains(part), "`{part}` is missing from:\n{text}");
    }
}
