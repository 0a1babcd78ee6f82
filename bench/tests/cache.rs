//! Tiny runs of `cache` and `tiers`, as a user runs them.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

fn bench(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tessera-bench")).args(args).output().unwrap()
}

/// Runs a command that must succeed and gives its standard output.
fn good(args: &[&str]) -> String {
    let output = bench(args);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

const CACHE: [&str; 19] = [
    "cache",
    "--rows",
    "6000",
    "--dim",
    "8",
    "--batch",
    "40",
    "--pooling",
    "5",
    "--iterations",
    "12",
    "--warmup",
    "10",
    "--device-bytes",
    "24k,128k",
    "--host-bytes",
    "64k",
    "--threads",
    "2",
];

fn cache<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&CACHE[..], more].concat()
}

fn point<'a>(points: &'a [Value], case: &str) -> &'a Value {
    points.iter().find(|point| point["case"] == case).unwrap_or_else(|| panic!("no {case}"))
}

#[test]
fn cache_measures_every_tier_and_finds_more_in_a_larger_device_tier() {
    let folder = tempfile::tempdir().unwrap();
    let ssd = folder.path().join("ssd");
    let page = folder.path().join("page.html");
    let (ssd, page) = (ssd.to_str().unwrap(), page.to_str().unwrap());
    let more = ["--ssd-dir", ssd, "--disk-ms", "40", "--json", "--report", page];
    let json: Value = serde_json::from_str(&good(&cache(&more))).unwrap();
    let points = json["points"].as_array().unwrap();
    let number = |case: &str, name: &str| point(points, case)[name].as_f64().unwrap();
    for case in [
        "lookup, all on device",
        "the same and grouping",
        "put",
        "disk, 1 in flight",
        "disk, 8 in flight",
        "disk, 64 in flight",
        "get 1",
        "get 64",
        "get 1024",
        "update, compaction included",
        "fetch, all on device",
        "fetch, all in host tier",
        "fetch, all on SSD",
    ] {
        assert!(number(case, "rows_per_s") > 0.0, "{case}");
        assert!(number(case, "share_of_limit") > 0.0, "{case}");
        assert!(point(points, case)["latency_ms"]["p99"].as_f64().unwrap() > 0.0, "{case}");
    }
    let share = |case: &str, tier: &str| point(points, case)["shares"][tier].as_f64().unwrap();
    assert_eq!(share("fetch, all on device", "device"), 1.0);
    assert_eq!(share("fetch, all in host tier", "host"), 1.0);
    assert_eq!(share("fetch, all on SSD", "ssd"), 1.0);
    assert!(number("fetch, all on SSD", "ssd_wait") > 0.0);
    assert!(number("update, compaction included", "write_amplification") >= 1.0);
    let batches: Vec<&Value> = points.iter().filter(|point| point["case"] == "batch").collect();
    let found = |point: &Value| point["shares"]["device"].as_f64().unwrap();
    assert_eq!(batches.len(), 2);
    assert!(found(batches[1]) > found(batches[0]), "{batches:?}");
    for batch in batches {
        let shares = batch["shares"].as_object().unwrap();
        let sum: f64 = shares.values().map(|share| share.as_f64().unwrap()).sum();
        assert!((sum - 1.0).abs() < 1e-9 && shares["first"] == 0.0, "{shares:?}");
    }
    let html = std::fs::read_to_string(page).unwrap();
    assert!(html.contains("Rows found against device bytes") && html.contains("<svg"));

    // A folder with something in it is somebody's.
    let output = bench(&cache(&["--ssd-dir", ssd]));
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("new or empty"));
}

#[test]
fn cache_needs_no_ssd_and_compares_with_itself() {
    let folder = tempfile::tempdir().unwrap();
    let old = folder.path().join("old.json");
    std::fs::write(&old, good(&cache(&["--json"]))).unwrap();
    let old = old.to_str().unwrap();
    let table = good(&cache(&["--policy", "lfu", "--compare", old]));
    assert!(table.contains("batch, device 128k") && !table.contains("on SSD"), "{table}");
    assert!(table.contains("not alike: policy: \"lru\" -> \"lfu\""), "{table}");
    let table = good(&["compare", old, old]);
    assert!(table.contains("batch, device 24k: throughput 1.000"), "{table}");
}

#[test]
fn a_batch_larger_than_the_device_tier_is_refused_with_what_it_needs() {
    let output = bench(&cache(&["--device-bytes", "1k"]));
    assert_eq!(output.status.code(), Some(1));
    let message = String::from_utf8_lossy(&output.stderr);
    assert!(message.contains("device_bytes"), "{message}");
}

/// Arguments of `tiers` on a folder.
fn tiers<'a>(ssd: &'a Path, more: &[&'a str]) -> Vec<&'a str> {
    let small = [
        "tiers",
        "--tables",
        "3",
        "--rows",
        "3000",
        "--dim",
        "8",
        "--batch",
        "32",
        "--bottom",
        "16-8",
        "--top",
        "8-1",
        "--iterations",
        "10",
        "--warmup",
        "5",
        "--threads",
        "2",
        "--device-bytes",
        "24k",
        "--host-bytes",
        "16k",
        "--disk-ms",
        "40",
        "--ssd-dir",
    ];
    [&small[..], &[ssd.to_str().unwrap()], more].concat()
}

#[test]
fn tiers_train_as_the_resident_model_does_and_rows_come_from_the_ssd() {
    let folder = tempfile::tempdir().unwrap();
    let json: Value = serde_json::from_str(&good(&tiers(folder.path(), &["--json"]))).unwrap();
    let points = json["points"].as_array().unwrap();
    let (tiered, resident) = (point(points, "tiers"), point(points, "resident"));
    assert!(tiered["misses_per_step"].as_f64().unwrap() > 1.0, "{tiered}");
    assert_eq!(tiered["shares"]["first"], 0.0, "every row was written");
    assert!(tiered["peak_bytes"].as_u64().unwrap() > 1 << 20);
    assert_eq!(resident["share_of_limit"], 1.0);
    let limit = tiered["limit_steps_per_s"].as_f64().unwrap();
    assert!(limit <= resident["steps_per_s"].as_f64().unwrap());

    let table = good(&tiers(folder.path(), &["--no-resident"]));
    assert!(table.contains("misses a step") && !table.contains("resident"), "{table}");
}
