//! Metrics: the page that a running program serves, docs/metrics.md against what is registered,
//! what each counter counts, and the names in docs/monitoring.

#[path = "../common/mod.rs"]
mod common;
mod counts;
mod exposition;
mod monitoring;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use common::Project;
use exposition::{Page, Series};
use prometheus::{Encoder, Registry, TextEncoder};
use tessera::metrics::Metrics;
use tessera_comm::{CommMetrics, Options, threads};

const CONFIG: &str = r#"
[data]
format = "synthetic"
batch_size = 50
[data.synthetic]
samples = 500
eval_samples = 200
[model]
dense_features = 2
bottom_mlp = [8, 4]
interaction = "dot"
top_mlp = [8, 1]
wide = true
[[table]]
name = "user"
rows = 40
dim = 4
[[table]]
name = "item.2-b"
rows = 60
dim = 4
[optimizer.sparse]
kind = "rowwise_adagrad"
lr = 0.05
[optimizer.dense]
kind = "adagrad"
lr = 0.05
[optimizer.schedule]
warmup_steps = 5
[train]
epochs = 1_000_000
eval_every = 8
checkpoint_every = 6
log_every = 1_000_000
[metrics]
listen = "127.0.0.1:0"
"#;

/// A row of docs/metrics.md.
struct Row {
    kind: String,
    labels: BTreeSet<String>,
    unit: String,
    meaning: String,
}

fn repository(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The metrics that docs/metrics.md lists, by name.
fn documented() -> BTreeMap<String, Row> {
    let docs = std::fs::read_to_string(repository("docs/metrics.md")).unwrap();
    let mut rows = BTreeMap::new();
    for line in docs.lines().filter(|line| line.starts_with("| `tessera_")) {
        let cells: Vec<&str> = line.trim_matches(['|', ' ']).split(" | ").collect();
        let [name, kind, labels, unit, meaning] = cells[..] else { panic!("{line}") };
        let labels = match labels {
            "none" => BTreeSet::new(),
            names => names.split(", ").map(str::to_owned).collect(),
        };
        let row = Row { kind: kind.into(), labels, unit: unit.into(), meaning: meaning.into() };
        let name = name.trim_matches('`').to_owned();
        assert!(rows.insert(name, row).is_none(), "twice: {line}");
    }
    rows
}

/// The text that a registry serves.
fn gathered(registry: &Registry) -> String {
    let mut text = Vec::new();
    TextEncoder::new().encode(&registry.gather(), &mut text).unwrap();
    String::from_utf8(text).unwrap()
}

/// Labels of a family, that of a histogram's bounds aside.
fn labels(family: &exposition::Family) -> BTreeSet<String> {
    let names = family.samples.iter().flat_map(|((_, labels), _)| labels.keys().cloned());
    names.filter(|name| name != "le").collect()
}

/// The value of a series.
#[track_caller]
fn value(page: &Page, name: &str, labels: &[(&str, &str)]) -> f64 {
    let labels = labels.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect();
    let wanted: Series = (name.into(), labels);
    let found = page.values().flat_map(|family| &family.samples).find(|sample| sample.0 == wanted);
    found.unwrap_or_else(|| panic!("no series {wanted:?}")).1
}

#[test]
fn the_docs_list_exactly_what_is_registered() {
    let registry = Registry::new();
    let metrics = Metrics::register(&registry, ["t"]).unwrap();
    // Those of tiers come with [tiers].
    let metrics = metrics.with_cache(&registry, ["t"]).unwrap();
    // And those of dynamic tables with such a table.
    let metrics = metrics.with_ids(&registry, ["t"]).unwrap();
    // Families of labels that come with the first value.
    metrics.stage_seconds.with_label_values(&["read"]).observe(0.1);
    metrics.eval.with_label_values(&["auc"]).set(0.5);
    // Those of communication come with a communicator of several ranks.
    let metrics = Arc::new(CommMetrics::new(&registry).unwrap());
    let options = Options { metrics, ..Options::default() };
    threads::run(2, &options, |ranks| ranks.barrier().wait().unwrap()).unwrap();
    let page = exposition::parse(&gathered(&registry)).unwrap();
    let documented = documented();
    let names = |page: Vec<&String>| -> BTreeSet<String> { page.into_iter().cloned().collect() };
    assert_eq!(names(documented.keys().collect()), names(page.keys().collect()));
    for (name, family) in &page {
        let row = &documented[name];
        assert_eq!(row.kind, family.kind, "{name}");
        assert!(row.meaning.starts_with(&family.help), "{name}: {}", family.help);
        assert!(family.help.ends_with('.'), "{name}: {}", family.help);
        assert_eq!(row.labels, labels(family), "{name}");
    }
}

#[test]
fn names_carry_their_units() {
    for (name, row) in documented() {
        let plain = name.strip_suffix("_total").unwrap_or(&name);
        for unit in ["seconds", "bytes", "ratio"] {
            assert_eq!(
                plain.ends_with(&format!("_{unit}")),
                row.unit == unit,
                "{name}: {}",
                row.unit
            );
        }
        assert_eq!(name.ends_with("_total"), row.kind == "counter", "{name}");
        let base = ["milliseconds", "minutes", "kilobytes", "percent", "_ms", "_mb"];
        assert!(!base.iter().any(|unit| name.contains(unit)), "{name}");
    }
}

/// One GET to a running program. HTTP 1.0, so that the body comes as it is.
fn get(address: &str, path: &str) -> (u16, String, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.0\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head.to_owned(), body.to_owned())
}

/// Whether `promtool` is there; then `args` must succeed with `input` on standard input.
fn promtool(args: &[&str], input: &str) {
    let started = Command::new("promtool")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let Ok(mut child) = started else {
        eprintln!("skipped: no promtool on PATH");
        return;
    };
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&out.stdout) + String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success(), "promtool {args:?}: {said}");
}

#[test]
fn a_running_program_serves_its_metrics() {
    let project = Project::new(CONFIG);
    let mut running = project.start("train config.toml --out run");
    let url = running.line("metrics: ");
    let address =
        url.strip_prefix("http://").and_then(|rest| rest.strip_suffix("/metrics")).unwrap();
    let scrape = || {
        let (status, head, body) = get(address, "/metrics");
        assert_eq!(status, 200);
        assert!(head.contains("Content-Type: text/plain; version=0.0.4"), "{head}");
        (exposition::parse(&body).unwrap_or_else(|why| panic!("{why}\n{body}")), body)
    };
    let reached = |steps: f64| {
        move || {
            let (page, body) = scrape();
            let done = value(&page, "tessera_train_steps_total", &[]) >= steps
                && value(&page, "tessera_checkpoint_write_seconds_count", &[]) >= 1.0
                && value(&page, "tessera_eval_seconds_count", &[]) >= 1.0;
            done.then_some((page, body))
        }
    };
    let (first, _) = running.wait_for("the first steps", reached(20.0));
    let (status, _, body) = get(address, "/healthz");
    assert_eq!((status, body.as_str()), (200, "ok\n"));
    let steps = value(&first, "tessera_train_steps_total", &[]);
    let (second, body) = running.wait_for("later steps", reached(steps + 20.0));
    promtool(&["check", "metrics"], &body);

    grows(&first, &second);
    let mut documented = documented();
    // One rank talks to nobody, and its rows stay and have no ids.
    let absent = ["tessera_comm_", "tessera_cache_", "tessera_dynamic_"];
    documented.retain(|name, _| absent.iter().all(|prefix| !name.starts_with(prefix)));
    for (name, row) in &documented {
        let family = second.get(name).unwrap_or_else(|| panic!("{name} is not served"));
        assert_eq!(labels(family), row.labels, "{name}");
    }
    assert_eq!(second.len(), documented.len());
    plausible(&second);

    running.signal(libc::SIGTERM);
    let (status, stderr) = running.end();
    assert_eq!(status.code(), Some(143), "{stderr}");
    assert!(TcpStream::connect(address).is_err(), "the endpoint outlives the program");
}

/// Counters and counts only rise, and those of training have risen.
fn grows(first: &Page, second: &Page) {
    let mut risen = BTreeSet::new();
    for (name, family) in first.iter().filter(|(_, family)| family.kind != "gauge") {
        let later: BTreeMap<_, _> = second[name].samples.iter().cloned().collect();
        for (series, value) in &family.samples {
            let now = later.get(series).unwrap_or_else(|| panic!("{series:?} is gone"));
            assert!(now >= value, "{series:?} fell from {value} to {now}");
            if now > value {
                risen.insert(name.as_str());
            }
        }
    }
    for name in [
        "tessera_train_steps_total",
        "tessera_train_samples_total",
        "tessera_train_step_seconds",
        "tessera_train_stage_seconds",
        "tessera_data_samples_total",
        "tessera_embedding_lookup_seconds",
        "tessera_embedding_rows_read_total",
        "tessera_embedding_rows_updated_total",
    ] {
        assert!(risen.contains(name), "{name} did not rise");
    }
}

/// Values of a run of [`CONFIG`] that has gone on for some steps.
fn plausible(page: &Page) {
    let get = |name: &str| value(page, name, &[]);
    let samples = get("tessera_train_samples_total");
    assert_eq!(samples, 50.0 * get("tessera_train_steps_total"));
    assert!(get("tessera_data_samples_total") >= samples);
    assert!(get("tessera_train_loss") > 0.0 && get("tessera_train_loss") < 5.0);
    assert!(get("tessera_train_window_ne_ratio") > 0.0);
    assert_eq!(get("tessera_train_learning_rate_factor_ratio"), 1.0);
    assert_eq!(get("tessera_train_learning_rate"), 0.05);
    assert_eq!(value(page, "tessera_build_info", &[("version", env!("CARGO_PKG_VERSION"))]), 1.0);
    for (table, rows, dim) in [
        ("user", 40.0, 4.0),
        ("item.2-b", 60.0, 4.0),
        ("user.wide", 40.0, 1.0),
        ("item.2-b.wide", 60.0, 1.0),
    ] {
        let of = |name| value(page, name, &[("table", table)]);
        // Pages are made while steps go on: a step's rows come before the step is counted.
        let read = of("tessera_embedding_rows_read_total");
        assert!(read >= samples && read % 50.0 == 0.0, "{table}: {read} rows, {samples} samples");
        let updated = of("tessera_embedding_rows_updated_total");
        assert!(updated > 0.0 && updated <= read, "{table}: {updated}");
        assert!(of("tessera_embedding_resident_bytes") >= rows * (dim + 1.0) * 4.0, "{table}");
        for policy in ["error", "drop", "default_row"] {
            let labels = [("table", table), ("policy", policy)];
            assert_eq!(value(page, "tessera_embedding_bad_ids_total", &labels), 0.0);
        }
    }
    for stage in ["read", "route", "lookup", "forward", "backward", "update_sparse", "update_dense"]
    {
        let of = |part: &str| {
            value(page, &format!("tessera_train_stage_seconds_{part}"), &[("stage", stage)])
        };
        assert!(of("count") >= 20.0 && of("sum") >= 0.0 && of("sum") < 60.0, "{stage}");
    }
    let stages = page["tessera_train_stage_seconds"]
        .samples
        .iter()
        .filter(|((name, _), _)| name.ends_with("_sum"))
        .map(|(_, seconds)| seconds);
    let (stages, steps) = (stages.sum::<f64>(), get("tessera_train_step_seconds_sum"));
    assert!(stages < 1.5 * steps + 1.0, "stages take {stages} s of {steps} s");
    assert!(get("tessera_embedding_lookup_seconds_sum") > 0.0);
    assert!(get("tessera_embedding_lookup_seconds_sum") < 60.0);
    // Weights and gradients of (2, 8), (8, 4), (4 + 3, 8), (8, 1) and their biases at the least.
    assert!(get("tessera_dense_resident_bytes") >= 2.0 * 4.0 * (24.0 + 36.0 + 64.0 + 9.0));
    assert!(get("tessera_checkpoint_write_seconds_sum") > 0.0);
    assert!(get("tessera_checkpoint_size_bytes") > 100.0 * 5.0 * 4.0);
    assert!(get("tessera_checkpoint_last_step") % 6.0 == 0.0);
    assert!(get("tessera_checkpoint_last_step") > 0.0);
    let auc = value(page, "tessera_eval_ratio", &[("metric", "auc")]);
    assert!((0.0..=1.0).contains(&auc), "{auc}");
    for metric in ["logloss", "ne", "calibration", "mse"] {
        assert!(value(page, "tessera_eval_ratio", &[("metric", metric)]) > 0.0, "{metric}");
    }
}

#[test]
fn an_address_that_is_taken_is_an_error_before_anything_is_written() {
    let holder = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = holder.local_addr().unwrap().to_string();
    let project = Project::new(CONFIG);
    project
        .run(&format!("train config.toml --out run --set metrics.listen={address}"))
        .says(1, &["cannot listen on", &address]);
    assert!(!project.path("run").exists());
}
