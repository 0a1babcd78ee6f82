//! `tessera plan`: from a configuration, a table set or given costs to a plan and its report.

mod common;

use common::shared::shared;
use common::{Project, golden};
use serde_json::Value;
use tessera_embedding::plan::{PlanFile, Sharding};

const CONFIG: &str = r#"
[data]
format = "synthetic"
batch_size = 256

[data.synthetic]
samples = 4000
alpha = 1.1

[model]
dense_features = 2
bottom_mlp = [8]
interaction = "concat"
top_mlp = [8, 1]

[[table]]
name = "user"
rows = 20000
dim = 64
hots = 4

[[table]]
name = "item"
rows = 3000
dim = 100
hots = [1, 2]
features = ["item", "history"]
sharding = "column_wise"

[[table]]
name = "tiny"
rows = 3
dim = 8

[optimizer]
sparse = { kind = "adagrad", lr = 0.1 }
dense = { kind = "sgd", lr = 0.1 }
"#;

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// The plan of a report, checked.
fn plan_of(text: &str) -> tessera_embedding::plan::Plan {
    serde_json::from_str::<PlanFile>(text).unwrap().plan().unwrap()
}

#[test]
fn a_configuration_is_planned_and_told() {
    let project = Project::new(CONFIG);
    let ran = project.ok("plan config.toml --ranks 4");
    for part in [
        "3 tables on 4 ranks, topology cpu, 64 samples a rank",
        "user",
        "column_wise",
        "asked for",
        "shard of",
        "max/mean 1.",
        "count their ids as uniform",
    ] {
        assert!(ran.stdout.contains(part), "`{part}` is missing from:\n{}", ran.stdout);
    }
    // One rank: its parallel section is the configuration's own.
    let ran = project.ok("plan config.toml --json");
    let plan = plan_of(&ran.stdout);
    assert_eq!((plan.ranks(), plan.replicas(), plan.tables().len()), (1, 1, 3));
    // The same on every run, and what --json prints is what a reader takes.
    let first = project.ok("plan config.toml --ranks 4 --json").stdout;
    assert_eq!(project.ok("plan config.toml --ranks 4 --json").stdout, first);
    let plan = plan_of(&first);
    assert_eq!(plan.table("item").unwrap().sharding, Sharding::ColumnWise);
    assert_eq!(plan.table("item").unwrap().dim, 100);
    let report = json(&first);
    let keys = ["table", "rank", "rows", "cols", "bytes", "cost"];
    for shard in report["shards"].as_array().unwrap() {
        assert!(keys.iter().all(|key| !shard[key].is_null()), "{shard}");
    }
    assert!(report["max_over_mean"].as_f64().unwrap() >= 1.0);
}

#[test]
fn a_sample_of_the_data_tells_how_often_ids_meet() {
    let project = Project::new(CONFIG);
    let cost = |line: &str| {
        let report = json(&project.ok(line).stdout);
        let ranks = report["rank_loads"].as_array().unwrap();
        ranks.iter().map(|rank| rank["cost"].as_f64().unwrap()).sum::<f64>()
    };
    let blind = cost("plan config.toml --ranks 4 --exact --json");
    let seeing = cost("plan config.toml --ranks 4 --exact --json --sample 5");
    // Zipf ids meet more often than uniform ones: fewer unique rows travel.
    assert!(seeing < blind * 0.95, "{seeing} with a sample, {blind} without");
    let ran = project.ok("plan config.toml --ranks 4 --sample 1000");
    assert!(ran.stdout.contains("ids of 4000 samples were counted: 32000 ids"), "{}", ran.stdout);
    assert!(!ran.stdout.contains("as uniform"), "{}", ran.stdout);
}

#[test]
fn a_sample_tells_how_large_tiers_should_be() {
    let project = Project::new(CONFIG);
    let ran = project.ok("plan config.toml --sample 15");
    for part in ["tiers, from 15 batches", "batch_max", "50%", "device_bytes", "with --topology"] {
        assert!(ran.stdout.contains(part), "`{part}` is missing from:\n{}", ran.stdout);
    }
    assert!(!ran.stdout.contains("[tiers]"), "{}", ran.stdout);
    assert!(!project.ok("plan config.toml").stdout.contains("tiers"), "nothing to tell it from");
    let set = "--set tiers.device_bytes=2000000 --set tiers.host_bytes=1000000 \
               --set tiers.ssd_dir=ssd --topology cpu";
    for ranks in [1, 4] {
        let line = format!("plan config.toml --ranks {ranks} --sample 15 {set}");
        let ran = project.ok(&line);
        for part in ["in [tiers]", "whole", "at least  misses  SSD reads", "within a step"] {
            assert!(ran.stdout.contains(part), "`{part}` is missing from:\n{}", ran.stdout);
        }
        let text = project.ok(&format!("{line} --json")).stdout;
        // With advice in it, it is still a plan.
        assert_eq!(plan_of(&text).tables().len(), 3);
        let tiers = &json(&text)["tiers"];
        let number = |value: &Value, key: &str| value[key].as_f64().unwrap();
        let shares = tiers["shares"].as_array().unwrap();
        let sum = |key: &str| shares.iter().map(|share| number(share, key)).sum::<f64>();
        let given = &tiers["given"];
        assert!((number(given, "device_misses") - sum("device_misses")).abs() < 1e-6);
        let hit_rate = 1.0 - sum("device_misses") / sum("repeats");
        assert!((number(given, "hit_rate") - hit_rate).abs() < 1e-9);
        let limit = number(tiers, "ssd_bytes_max");
        let sizes = tiers["sizes"].as_array().unwrap();
        assert_eq!(sizes.len(), 3);
        for (size, wanted) in sizes.iter().zip([0.9, 0.95, 0.99]) {
            let load = &size["load"];
            assert!(number(load, "hit_rate") >= wanted && number(load, "ssd_bytes") <= limit);
            assert_eq!(load["parts_in_passes"], 0);
            // What was advised is what the configuration would get.
            let line = format!(
                "plan config.toml --ranks {ranks} --sample 15 --json --topology cpu \
                 --set tiers.device_bytes={} --set tiers.host_bytes={} --set tiers.ssd_dir=ssd",
                load["device_bytes"], load["host_bytes"]
            );
            assert_eq!(&json(&project.ok(&line).stdout)["tiers"]["given"], load);
        }
    }
    // No room for a batch: it is said.
    let ran = project.ok("plan config.toml --sample 5 --set tiers.device_bytes=50000");
    assert!(ran.stdout.contains("several passes"), "{}", ran.stdout);
}

/// Curves of a golden run's own data: whole ones, since it is small.
#[test]
fn curves_of_a_golden_run() {
    let Some(shared) = shared() else { return };
    let project = golden::project(&shared.join("golden/dlrm_dot_rowwise_adagrad"));
    for set in ["", "--set tiers.device_bytes=40000"] {
        let line = format!("plan golden/config.toml --sample 60 --json {set}");
        let report = json(&project.ok(&line).stdout);
        let tables = report["tiers"]["tables"].as_array().unwrap();
        assert_eq!(tables.len(), 5);
        assert_eq!(report["tiers"]["given"].is_null(), set.is_empty());
        for table in tables {
            let number = |key: &str| table[key].as_f64().unwrap();
            assert!(number("batch_rows_max") <= number("rows"), "{table}");
            assert!(number("uses") <= 60.0 * number("batch_rows_max"), "{table}");
            assert!(number("first_uses") <= number("rows"), "{table}");
            assert_eq!(number("share_tracked"), 1.0);
            let curve = table["curve"].as_array().unwrap();
            let rates: Vec<f64> =
                curve.iter().map(|part| part["hit_rate"].as_f64().unwrap()).collect();
            assert!(rates.is_sorted() && rates.last() == Some(&1.0), "{table}");
            assert!(curve.iter().all(|part| part["error"] == 0.0), "{table}");
        }
        // All three rows of c3 are in every batch.
        let c3 = &tables[2];
        assert_eq!((&c3["uses"], &c3["first_uses"]), (&180.into(), &3.0.into()));
    }
}

#[test]
fn the_wide_part_is_planned_too() {
    let project = Project::new(CONFIG);
    let ran = project.ok("plan config.toml --set model.wide=true --ranks 2 --sample 2 --json");
    let plan = plan_of(&ran.stdout);
    assert_eq!(plan.tables().len(), 6);
    assert_eq!(plan.table("user.wide").unwrap().dim, 1);
    let tiers = &json(&ran.stdout)["tiers"]["tables"];
    assert_eq!((&tiers[3]["table"], &tiers[3]["uses"]), (&"user.wide".into(), &tiers[0]["uses"]));
}

#[test]
fn a_topology_file_is_obeyed() {
    let project = Project::new(CONFIG);
    project.write("t.toml", "preset = \"h100\"\nranks_per_node = 2\nname = \"lab\"");
    let ran = project.ok("plan config.toml --ranks 4 --topology t.toml --json");
    assert_eq!(plan_of(&ran.stdout).ranks_per_node(), 2);
    let ran = project.ok("plan config.toml --ranks 4 --topology t.toml");
    assert!(ran.stdout.contains("topology lab"), "{}", ran.stdout);
    project
        .run("plan config.toml --ranks 3 --topology t.toml")
        .says(2, &["do not fill nodes of 2"]);
    project.write("t.toml", "preset = \"h100\"\nrank_per_node = 2");
    project
        .run("plan config.toml --ranks 4 --topology t.toml")
        .says(2, &["t.toml", "rank_per_node: unknown key; did you mean `ranks_per_node`?"]);
    project.run("plan config.toml --topology abacus").says(2, &["cannot read abacus"]);
    // A table larger than all ranks together: named, with its bytes.
    project.write("t.toml", "device_bytes = 2_000_000\nreserve_bytes = 0");
    project
        .run("plan config.toml --ranks 4 --topology t.toml --set table.0.rows=1000000")
        .says(1, &["no room for table user of 512000000 bytes", "4 ranks have 2000000 bytes"]);
}

#[test]
fn replicas_are_chosen_by_their_curve() {
    let project = Project::new(CONFIG);
    let curve = json(&project.ok("plan config.toml --ranks 8 --curve --json").stdout);
    let points = curve["curve"].as_array().unwrap();
    let groups: Vec<u64> = points.iter().map(|point| point["replicas"].as_u64().unwrap()).collect();
    assert_eq!(groups, [1, 2, 4, 8]);
    let total = |point: &Value| point["total_ms"].as_f64().unwrap_or(f64::INFINITY);
    let best = curve["best_replicas"].as_u64().unwrap();
    let least = points.iter().min_by(|a, b| total(a).total_cmp(&total(b))).unwrap();
    assert_eq!(least["replicas"], best);
    let ran = project.ok("plan config.toml --ranks 8 --replicas auto");
    for part in ["replicas", "best", "max/mean"] {
        assert!(ran.stdout.contains(part), "`{part}` is missing from:\n{}", ran.stdout);
    }
    let ran = project.ok("plan config.toml --ranks 8 --replicas auto --json");
    assert_eq!(plan_of(&ran.stdout).replicas() as u64, best);
    let ran = project.ok("plan config.toml --ranks 8 --replicas 2 --placement contiguous");
    assert!(ran.stdout.contains("2 groups of 4"), "{}", ran.stdout);
    project.run("plan config.toml --ranks 8 --replicas 3").says(2, &["cannot form 3 equal groups"]);
    project.run("plan config.toml --ranks 8 --replicas 0").says(2, &["a whole number from 1"]);
    // Where no number fits, the reason of one group is told.
    project.write("t.toml", "device_bytes = 1000\nreserve_bytes = 0");
    project
        .run("plan config.toml --ranks 8 --curve --topology t.toml")
        .says(1, &["no room for table"]);
}

#[test]
fn given_costs_are_planned_as_the_contract_says() {
    let project = Project::new("");
    project.write(
        "costs.csv",
        "table,rows,dim,cost,bytes,sharding\na,10,128,8.0,800,\nb,6,64,2.0,100,TW\n\
         c,700,32,4.0,400,RW\na,5,8,1.0,10,auto\n",
    );
    let ran = project.ok("plan --costs costs.csv --ranks 4 --bytes-max 400 --json");
    let report = json(&ran.stdout);
    let plan = plan_of(&ran.stdout);
    assert_eq!(plan.tables().len(), 4);
    assert!(report["notes"][0].as_str().unwrap().contains("this one is a#2"), "{report}");
    let mut costs = [0.0; 4];
    let mut bytes = [0; 4];
    for shard in report["shards"].as_array().unwrap() {
        let rank = shard["rank"].as_u64().unwrap() as usize;
        costs[rank] += shard["cost"].as_f64().unwrap();
        bytes[rank] += shard["bytes"].as_u64().unwrap();
        let extent = |key: &str| {
            let [start, end] = [0, 1].map(|i| shard[key][i].as_u64().unwrap());
            end - start
        };
        if shard["table"] == "a" {
            // Cost by area: 8 over 10 rows of 128 columns.
            let area = (extent("rows") * extent("cols")) as f64;
            assert!((shard["cost"].as_f64().unwrap() - 8.0 * area / 1280.0).abs() < 1e-12);
        }
    }
    assert!((costs.iter().sum::<f64>() - 15.0).abs() < 1e-9, "{costs:?}");
    assert!(bytes.iter().all(|&bytes| bytes <= 400), "{bytes:?}");
    let most = costs.iter().copied().fold(0.0, f64::max);
    let ratio = report["max_over_mean"].as_f64().unwrap();
    assert!((most / (15.0 / 4.0) - ratio).abs() < 1e-9, "{costs:?}, {ratio}");
    assert!(ratio < 1.1, "{ratio}");
    let ran = project.ok("plan --costs costs.csv --ranks 4 --bytes-max 400");
    assert!(ran.stdout.contains("4 tables with the costs of costs.csv on 4 ranks of 400 B"));
    project
        .run("plan --costs costs.csv --ranks 4 --bytes-max 20")
        .says(1, &["no room for table", "4 ranks have 20 bytes"]);
}

#[test]
fn wrong_use_names_the_place() {
    let project = Project::new(CONFIG);
    project.write("costs.csv", "table,rows,dim,cost\na,10,128,8.0\n");
    let cases: [(&str, &[&str]); 10] = [
        ("plan", &["CONFIG"]),
        ("plan config.toml --ranks 0", &["--ranks 0"]),
        ("plan config.toml --sample 0", &["--sample 0"]),
        ("plan --tables costs.csv", &["--tables needs --ranks"]),
        ("plan --tables config.toml --ranks 2", &["config.toml line"]),
        ("plan --tables costs.csv --ranks 2 --optimizer sgdd", &["sgdd", "rowwise_adagrad"]),
        ("plan --costs costs.csv --ranks 2", &["--bytes-max"]),
        ("plan --costs costs.csv --ranks 2 --bytes-max 9", &["no column bytes or hbm_gb"]),
        ("plan --costs no.csv --ranks 2 --bytes-max 9", &["cannot read no.csv"]),
        ("plan config.toml --costs costs.csv", &["cannot be used with"]),
    ];
    for (line, parts) in cases {
        project.run(line).says(2, parts);
    }
    project.write("costs.csv", "table,rows,dim,cost,bytes\na,ten,128,8.0,1\n");
    project
        .run("plan --costs costs.csv --ranks 2 --bytes-max 9")
        .says(2, &["costs.csv row 1 of rows: `ten`"]);
    project.write("costs.csv", "table,rows,dim,cost,bytes\na,1,0,-8.0,1\n");
    project.run("plan --costs costs.csv --ranks 2 --bytes-max 9").says(2, &["dim is 0", "cost -8"]);
}

/// The published sets through the command line, as a user would plan them.
#[test]
fn published_table_sets_are_planned() {
    let Some(shared) = shared() else { return };
    let project = Project::new("");
    let sets = shared.join("data/table-configs").canonicalize().unwrap();
    for (file, ranks) in [("criteo_tables.csv", 64), ("hugectr_200table_100B_hotness20.csv", 16)] {
        let line = format!("plan --tables {} --ranks {ranks} --json", sets.join(file).display());
        let report = json(&project.ok(&line).stdout);
        let ratio = report["max_over_mean"].as_f64().unwrap();
        assert!(ratio <= 1.1, "{file}: {ratio}");
    }
    let file = sets.join("criteo_tables.csv");
    let ran = project
        .ok(&format!("plan --tables {} --rows-column kaggle_rows --ranks 2", file.display()));
    assert!(ran.stdout.contains("10131227"), "{}", ran.stdout);
    let job = shared.join("data/plan-96-ranks/tables.csv").canonicalize().unwrap();
    let line = format!("plan --costs {} --ranks 96 --bytes-max 19174000000 --json", job.display());
    let report = json(&project.ok(&line).stdout);
    assert!(report["max_over_mean"].as_f64().unwrap() <= 1.001, "{}", report["max_over_mean"]);
}
