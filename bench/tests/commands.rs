//! Tiny runs of every command, as a user runs them, and what they leave behind.

use std::path::{Path, PathBuf};
use std::process::{Command as Process, Output};

use clap::Parser;
use serde_json::Value;
use tessera::cli::{Cli, Command};
use tessera::config::load_topology;
use tessera_bench::compare::compare;
use tessera_bench::document::Document;
use tessera_embedding::plan::Topology;

fn bench_command() -> Process {
    Process::new(env!("CARGO_BIN_EXE_tessera-bench"))
}

fn bench(args: &[&str]) -> Output {
    bench_command().args(args).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs a command that must succeed and gives its standard output.
fn good(args: &[&str]) -> String {
    let output = bench(args);
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

const SMALL: [&str; 12] = [
    "--threads",
    "2",
    "--iterations",
    "6",
    "--warmup",
    "1",
    "--requests",
    "2",
    "--tables",
    "3",
    "--rows",
    "500",
];

fn small<'a>(command: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&[command][..], &SMALL, more].concat()
}

/// The folder of golden values and data: see the README.
fn shared() -> Option<PathBuf> {
    let path = std::env::var_os("TESSERA_SHARED")
        .map(PathBuf::from)
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"));
    if path.join("data").is_dir() {
        return Some(path);
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{} is not there, and CI needs it (set TESSERA_SHARED)",
        path.display()
    );
    eprintln!("skipped: no data at {}", path.display());
    None
}

#[test]
fn lookup_sweeps_batch_and_pooling_and_its_json_has_every_figure() {
    let args = small(
        "lookup",
        &["--dim", "16,32", "--batch", "8,64", "--pooling", "1,4:2", "--alpha", "1.05", "--json"],
    );
    let json: Value = serde_json::from_str(&good(&args)).unwrap();
    assert_eq!(json["schema"], "tessera-bench/1");
    assert_eq!(json["command"], "lookup");
    assert_eq!(json["knobs"]["dim"], serde_json::json!([16, 32]));
    let points = json["points"].as_array().unwrap();
    let cases: Vec<(u64, &str)> = points
        .iter()
        .map(|point| (point["batch"].as_u64().unwrap(), point["pooling"].as_str().unwrap()))
        .collect();
    assert_eq!(cases, [(8, "1"), (8, "4:2"), (64, "1"), (64, "4:2")]);
    for point in points {
        for name in [
            "ids_per_request",
            "unique_rows_per_request",
            "bytes_per_request",
            "rows_per_s",
            "samples_per_s",
            "gb_per_s",
            "share_of_limit",
            "lookup_share_of_limit",
        ] {
            assert!(point[name].as_f64().unwrap() > 0.0, "{name}");
        }
        let latency = &point["latency_ms"];
        let quantiles =
            ["p50", "p90", "p99", "p999", "max"].map(|name| latency[name].as_f64().unwrap());
        assert!(quantiles.is_sorted() && quantiles[0] > 0.0, "{quantiles:?}");
        assert_eq!(point["service_ms"].as_array().unwrap().len(), 6);
        assert!(point["limit"]["rows_per_s"].as_f64().unwrap() > 0.0);
        assert!(point["limit"]["rows_per_s_t0"].as_f64().unwrap() > 0.0);
        assert!(point["limit"]["rows_per_s_after"].as_f64().unwrap() > 0.0);
        let stages = point["stages_ms"].as_object().unwrap();
        assert_eq!(stages.keys().collect::<Vec<_>>(), ["check", "lookup"]);
    }
    // One-hot: 3 features x 8 bags, rows of 64, 128 and 64 bytes in and as much out.
    assert_eq!(points[0]["ids_per_request"], 24.0);
    assert_eq!(points[0]["bytes_per_request"], f64::from(2 * 8 * (64 + 128 + 64)));
}

#[test]
fn update_reports_stages_open_loop_and_a_page_with_plots() {
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("report.html");
    let page = page.to_str().unwrap();
    let more = ["--batch", "16,64", "--pooling", "3", "--rate", "200", "--flush", "--report", page];
    let table = good(&small("update", &more));
    for part in ["p99.9", "limit", "share", "group", "update", "check", "tail"] {
        assert!(table.contains(part), "no {part} in: {table}");
    }
    let page = std::fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("<svg").count(), 2, "latency, and throughput against batch");
    assert!(page.contains("Throughput against batch") && page.contains("p99.9"));
    assert!(!page.contains("src=") && !page.contains("href="), "the page must stand alone");
}

#[test]
fn step_trains_both_models_and_counts_their_work() {
    let cross = ["--dcn-rank", "4", "--dcn-layers", "2"];
    for (model, more) in [("dot", &[][..]), ("dcn", &cross[..])] {
        let shape = "--dim 8 --bottom 16-8 --top 16-1 --batch 32 --pooling 2:1 --json";
        let mut args = small("step", &["--model", model]);
        args.extend(shape.split(' ').chain(more.iter().copied()));
        let json: Value = serde_json::from_str(&good(&args)).unwrap();
        let point = &json["points"][0];
        assert!(point["samples_per_s"].as_f64().unwrap() > 0.0);
        let stages = point["stages_ms"].as_object().unwrap();
        for stage in ["route", "lookup", "forward", "backward", "update_sparse", "update_dense"] {
            assert!(stages.contains_key(stage), "no {stage} in {stages:?}");
        }
        // Forward products a sample: 13 x 16 + 16 x 8 below; 4 vectors of 8.
        let forward = match model {
            "dot" => 208 + 128 + 6 * 8 + (8 + 6) * 16 + 16,
            _ => 208 + 128 + 2 * 2 * 4 * 32 + 32 * 16 + 16,
        };
        assert_eq!(point["flops_per_request"], f64::from(2 * 32 * (3 * forward - 208)), "{model}");
    }
}

#[test]
fn step_reads_the_data_of_a_configuration() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    std::fs::write(
        &path,
        "[data]\nformat = \"synthetic\"\nbatch_size = 32\n[data.synthetic]\nsamples = 100\n\
         [model]\ndense_features = 2\nbottom_mlp = [4]\ninteraction = \"dot\"\ntop_mlp = [8, 1]\n\
         wide = true\n\
         [[table]]\nname = \"a\"\nrows = 50\ndim = 4\nfeatures = [\"x\", \"y\"]\nhots = [2, 1]\n\
         [[table]]\nname = \"b\"\nrows = 20\ndim = 4\n\
         [optimizer]\nclip_norm = 0.01\n\
         [optimizer.sparse]\nkind = \"adam\"\nlr = 0.01\n[optimizer.dense]\nkind = \"adagrad\"\n\
         lr = 0.01\n",
    )
    .unwrap();
    let path = path.to_str().unwrap();
    let run = ["--threads", "2", "--iterations", "9", "--warmup", "1", "--requests", "2"];
    let args = [&["step", path, "--json"][..], &run].concat();
    let json: Value = serde_json::from_str(&good(&args)).unwrap();
    assert!(json["points"][0]["stages_ms"]["read"].as_f64().is_some());
    assert_eq!(json["points"][0]["ids_per_request"], 32.0 * 4.0);

    let args =
        [&["lookup", "--table-set", path, "--ids", path, "--batch", "32"][..], &run].concat();
    assert!(good(&args).contains("2 tables x 70 rows in all, dim 4"));
}

#[test]
fn dumped_requests_can_be_run_again_and_compared() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (ids, old, new) = (file("requests.ids"), file("old.json"), file("new.json"));
    let first = good(&small(
        "lookup",
        &["--batch", "32", "--dim", "8", "--alpha", "1.1", "--pair", "--dump-ids", &ids, "--json"],
    ));
    std::fs::write(&old, &first).unwrap();
    let again = small("lookup", &["--batch", "32", "--dim", "8", "--ids", &ids, "--json"]);
    let second = good(&again);
    std::fs::write(&new, &second).unwrap();
    let document = |text: &str| serde_json::from_str::<Document>(text).unwrap();
    let (before, after) = (document(&first), document(&second));
    assert_eq!(before.points[0].unique_rows_per_request, after.points[0].unique_rows_per_request);
    let comparison = compare(&before, &after).unwrap();
    assert_eq!(comparison.lines.len(), 1);
    let ratio = comparison.lines[0].throughput;
    assert!(ratio.low <= ratio.ratio && ratio.ratio <= ratio.high);
    assert!(comparison.differences.iter().any(|text| text.starts_with("ids: null")));

    let printed = good(&["compare", &old, &new]);
    assert!(printed.contains("batch     32") && printed.contains("throughput"), "{printed}");
    let json: Value = serde_json::from_str(&good(&["compare", &old, &new, "--json"])).unwrap();
    assert!(json["lines"][0]["throughput"]["low"].is_f64());
    let with = small("lookup", &["--batch", "32", "--dim", "8", "--compare", &old]);
    assert!(good(&with).contains("new over old"));
}

#[test]
fn twice_as_slow_compares_as_half() {
    let args = small("lookup", &["--batch", "8", "--dim", "4", "--json"]);
    let old: Document = serde_json::from_str(&good(&args)).unwrap();
    let mut new = old.clone();
    for ms in &mut new.points[0].service_ms {
        *ms *= 2.0;
    }
    let found = compare(&old, &new).unwrap().lines[0].throughput;
    assert!((found.ratio - 0.5).abs() < 1e-9);
    new.command = "update".into();
    assert!(compare(&old, &new).unwrap_err().to_string().contains("lookup with update"));
}

const QUICK: [&str; 8] =
    ["comm", "--ranks", "3", "--iterations", "7", "--warmup", "1", "--sizes=0,1k,3000,64k"];

#[test]
fn comm_measures_every_operation_and_size_and_compares() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (old, page) = (file("old.json"), file("report.html"));
    let first = good(&[&QUICK[..], &["--json"]].concat());
    std::fs::write(&old, &first).unwrap();
    let json: Value = serde_json::from_str(&first).unwrap();
    assert_eq!(json["schema"], "tessera-bench/1");
    assert_eq!(json["knobs"]["sizes"], serde_json::json!(["0", "1k", "3000", "64k"]));
    let points = json["points"].as_array().unwrap();
    // Five operations with four sizes, the barrier, and codecs of at least one row of 128.
    assert_eq!(points.len(), 5 * 4 + 1 + 4 * 3);
    for point in points {
        let name = point["operation"].as_str().unwrap();
        let latency = &point["latency_ms"];
        let quantiles = ["p50", "p99", "max"].map(|name| latency[name].as_f64().unwrap());
        assert!(quantiles.is_sorted() && quantiles[0] > 0.0, "{name}: {quantiles:?}");
        assert_eq!(point["service_ms"].as_array().unwrap().len(), 7, "{name}");
        assert!(point["limit_gb_per_s"].as_f64().unwrap() > 0.0, "{name}");
        let moves = name != "barrier" && point["bytes"] != 0;
        assert_eq!(point["gb_per_s"].as_f64().is_some_and(|speed| speed > 0.0), moves, "{name}");
        assert_eq!(point["share_of_limit"].is_number(), moves, "{name}");
    }
    let moved = |name: &str, bytes: u64| {
        let found = points.iter().find(|p| p["operation"] == name && p["bytes"] == bytes);
        found.unwrap()["moved_bytes"].as_f64().unwrap()
    };
    assert_eq!(moved("all_to_all_v", 3000), 2000.0);
    assert_eq!(moved("all_reduce", 3000), 4000.0);
    assert_eq!(moved("codec_int8", 3000), 2560.0, "five rows of 128 numbers");

    let some = ["--operations", "codec_fp16,all_gather", "--report", &page, "--compare", &old];
    let table = good(&[&QUICK[..], &some].concat());
    for part in ["3 ranks that are threads", "copy", "share", "p99", "new over old"] {
        assert!(table.contains(part), "no {part} in: {table}");
    }
    assert!(!table.contains("all_reduce"), "{table}");
    let page = std::fs::read_to_string(page).unwrap();
    assert_eq!(page.matches("<svg").count(), 3, "bandwidth, codecs and times");
    assert!(page.contains("memory copy") && page.contains("all_gather"));
    let json: Value = serde_json::from_str(&good(&["compare", &old, &old, "--json"])).unwrap();
    assert_eq!(json["lines"].as_array().unwrap().len(), points.len());
    let lookup = file("lookup.json");
    std::fs::write(&lookup, good(&small("lookup", &["--batch", "8", "--json"]))).unwrap();
    for pair in [[&old, &lookup], [&lookup, &old]] {
        let output = bench(&["compare", pair[0], pair[1]]);
        assert_eq!(output.status.code(), Some(2));
        assert!(text(&output.stderr).contains("cannot compare"), "{}", text(&output.stderr));
    }
}

#[test]
fn a_measured_topology_is_one_that_the_planner_reads() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("topology.toml");
    let path = path.to_str().unwrap();
    let base = "comm --ranks 4 --iterations 3 --warmup 1 --operations barrier --topology";
    let base: Vec<&str> = base.split(' ').chain([path]).collect();
    good(&base);
    let preset = Topology::preset("cpu").unwrap();
    let one_node = load_topology(path).unwrap();
    assert!(one_node.name.starts_with("4 x "), "{}", one_node.name);
    assert_eq!((one_node.ranks_per_node, one_node.inter_node), (None, preset.inter_node));
    assert_ne!(one_node.intra_node, preset.intra_node);
    assert_ne!(one_node.device_gb_per_s, preset.device_gb_per_s);
    assert_ne!(one_node.device_bytes, preset.device_bytes);
    assert_eq!(one_node.host_gb_per_s, preset.host_gb_per_s);

    good(&[&base[..], &["--ranks-per-node", "2"]].concat());
    let two_nodes = load_topology(path).unwrap();
    assert_eq!(
        (two_nodes.ranks_per_node, two_nodes.device_bytes),
        (Some(2), one_node.device_bytes)
    );
    assert_ne!(two_nodes.intra_node, preset.intra_node);
    assert_ne!(two_nodes.inter_node, preset.inter_node);
    good(&[&base[..], &["--ranks-per-node", "1"]].concat());
    assert_eq!(load_topology(path).unwrap().intra_node, preset.intra_node);

    let tables = folder.path().join("tables.csv");
    std::fs::write(&tables, "table,rows,dim\nuser,100000,64\nitem,5000,32\n").unwrap();
    let plan = ["tessera", "plan", "--ranks", "4", "--topology", path, "--tables"];
    let plan = Cli::try_parse_from(plan.into_iter().chain([tables.to_str().unwrap()])).unwrap();
    let Command::Plan(plan) = plan.command else { panic!("not plan") };
    tessera::plan::run(&plan).unwrap();
}

#[test]
fn a_job_of_several_processes_is_not_taken_for_one() {
    let mut command = bench_command();
    command.args(["comm", "--operations", "barrier"]).env("RANK", "1").env("WORLD_SIZE", "4");
    let output = command.output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    let message = text(&output.stderr);
    assert!(message.contains("4 processes") && message.contains("--comm mpi"), "{message}");
}

#[cfg(not(feature = "mpi"))]
#[test]
fn ranks_over_mpi_need_a_build_with_it() {
    let output = bench(&["comm", "--comm", "mpi"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(text(&output.stderr).contains("--features mpi"), "{}", text(&output.stderr));
}

#[test]
fn wrong_use_is_refused_with_what_to_do() {
    for (args, part) in [
        (vec!["comm", "--ranks", "1"], "--ranks 2"),
        (vec!["comm", "--iterations", "0"], "--iterations"),
        (vec!["comm", "--sizes", "1x"], "no size"),
        (vec!["comm", "--operations", "gossip"], "all_gather"),
        (vec!["comm", "--ranks", "4", "--ranks-per-node", "3"], "does not divide 4"),
        (small("lookup", &["--batch", "0"]), "--batch"),
        (small("lookup", &["--dim", "0"]), "--dim"),
        (small("lookup", &["--rate", "0"]), "--rate"),
        (small("update", &["--batch", "1,2", "--dump-ids", "x"]), "one batch size"),
        (small("step", &["--top", "16-x"]), "--top 16-x"),
        (small("step", &["--bottom", "4-3"]), "bottom_mlp"),
        (small("step", &["--dcn-rank", "3"]), "--model dcn"),
        (small("lookup", &["--reuse", "nowhere"]), "FILE:TRACE"),
        (vec!["lookup", "--tables", "9", "--rows", "999999999999"], "--rows-max"),
    ] {
        let output = bench(&args);
        let message = text(&output.stderr);
        assert!(message.contains(part), "{args:?}: {message}");
        let code = output.status.code().unwrap();
        assert!(code == 2 || (code == 1 && part == "--rows-max"), "{args:?}: {code}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn the_table_sets_and_traces_at_hand_are_understood() {
    let Some(shared) = shared() else { return };
    let data = shared.join("data");
    let run = ["--threads", "2", "--iterations", "1", "--warmup", "0", "--requests", "1"];
    for entry in std::fs::read_dir(data.join("table-configs")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "csv") {
            let set = ["lookup", "--table-set", path.to_str().unwrap(), "--rows-max", "100"];
            good(&[&set[..], &["--batch", "2", "--pooling", "1"], &run].concat());
        }
    }
    let trace = data.join("locality-stats/locality_stats_2022.txt:fbgemm_t788_bs131072_0");
    let args =
        small("lookup", &["--batch", "64", "--dim", "8", "--reuse", trace.to_str().unwrap()]);
    assert!(good(&args).contains("reuse of"));
}
