//! Dynamic tables through the command line, on raw categories of Criteo.

mod common;

use std::path::Path;

use common::{Project, Ran, shared::shared};
use safetensors::{Dtype, SafeTensors};

/// A small model of four features, some of whose tables `kind` says of; 60 steps of 64 samples.
fn config(kind: &str) -> String {
    let table = |name: &str, rows: u64, more: &str| {
        format!("[[table]]\nname = \"{name}\"\nrows = {rows}\ndim = 32\n{more}\n")
    };
    [
        "seed = 3\n[data]\nformat = \"criteo-tsv\"\nbatch_size = 64\neval_batch_size = 4096\n\
         train = \"${TESSERA_SHARED}/data/criteo-80k/part1.tsv\"\n\
         eval = \"${TESSERA_SHARED}/data/criteo-80k/part4.tsv\"\n\
         [model]\ndense_features = 13\nbottom_mlp = [32]\ninteraction = \"dot\"\n\
         top_mlp = [16, 1]\nwide = true\n\
         [optimizer]\nclip_norm = 5\n\
         [optimizer.sparse]\nkind = \"rowwise_adagrad\"\nlr = 0.05\n\
         [optimizer.dense]\nkind = \"adagrad\"\nlr = 0.02\n\
         [train]\nmax_steps = 60\n"
            .to_owned(),
        table("c1", 2000, kind),
        table("c3", 5000, kind),
        table("c9", 50, ""),
        table("c20", 40, kind),
    ]
    .concat()
}

/// Every id that comes gets a row, and there is room.
const ROOM: &str = "kind = \"dynamic\"";

/// Rows come and go.
const BOUNDED: &str = "kind = \"dynamic\"\n\
                       [table.admission]\nkind = \"count\"\nn = 2\nhalve_every = 3000\n\
                       [table.eviction]\nkind = \"lfu\"\nhalve_every = 20";

struct Runs {
    project: Project,
    shared: std::path::PathBuf,
}

impl Runs {
    fn new(shared: &Path, config: &str) -> Self {
        Self { project: Project::new(config), shared: shared.to_path_buf() }
    }

    fn run(&self, line: &str) -> Ran {
        let mut command = self.project.command(line);
        let out = command.env("TESSERA_SHARED", &self.shared).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        Ran { code: out.status.code(), stdout: text(&out.stdout), stderr: text(&out.stderr) }
    }

    #[track_caller]
    fn ok(&self, line: &str) -> Ran {
        let ran = self.run(line);
        assert_eq!(ran.code, Some(0), "tessera {line}\n{}", ran.stderr);
        ran
    }

    #[track_caller]
    fn train(&self, out: &str, set: &str) {
        self.ok(&format!("train config.toml --out {out} {set}"));
    }

    fn export(&self, checkpoint: &str) -> Vec<u8> {
        self.ok(&format!("export --checkpoint {checkpoint} --out exported.safetensors"));
        std::fs::read(self.project.path("exported.safetensors")).unwrap()
    }

    fn auc(&self, line: &str) -> f64 {
        let ran = self.ok(&format!("eval config.toml --json {line}"));
        let figures: serde_json::Value = serde_json::from_str(&ran.stdout).unwrap();
        figures["auc"].as_f64().unwrap()
    }
}

/// The ids of a table in an exported file, which must have a row of weights each.
fn ids(exported: &[u8], table: &str) -> Vec<u64> {
    let file = SafeTensors::deserialize(exported).unwrap();
    let ids = file.tensor(&format!("tables.{table}.ids")).unwrap();
    let weight = file.tensor(&format!("tables.{table}.weight")).unwrap();
    assert_eq!((ids.dtype(), ids.shape()[0]), (Dtype::U64, weight.shape()[0]));
    ids.data().as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

/// All of a run's values but those that tell where rows were.
fn values(exported: &[u8]) -> Vec<(String, Vec<u8>)> {
    let file = SafeTensors::deserialize(exported).unwrap();
    let mut all: Vec<(String, Vec<u8>)> = file
        .tensors()
        .into_iter()
        .filter(|(name, _)| ![".rows", ".clock", ".sketch"].iter().any(|end| name.ends_with(end)))
        .map(|(name, view)| (name, view.data().to_vec()))
        .collect();
    all.sort();
    all
}

#[test]
fn a_run_resumed_is_the_run_uninterrupted_on_any_ranks_and_tiers() {
    let Some(shared) = shared() else { return };
    for (kind, rows) in [(ROOM, 5000), (BOUNDED, 300)] {
        let runs =
            Runs::new(&shared, &config(kind).replace("rows = 5000", &format!("rows = {rows}")));
        for ranks in ["", "--set parallel.ranks=4 --set threads=4 --set parallel.route=unique"] {
            let name = if ranks.is_empty() { "one" } else { "four" };
            runs.train(name, ranks);
            let whole = runs.export(name);
            assert!(ids(&whole, "c3").len() <= rows, "{kind}");
            assert!(ids(&whole, "c20").contains(&u64::MAX), "a missing category is an id");
            let part = format!("{name}-part");
            runs.train(&part, &format!("{ranks} --set train.max_steps=25"));
            runs.ok(&format!("train config.toml --resume {part} --out {part} {ranks}"));
            assert!(runs.export(&part) == whole, "{kind}: {name}");
            assert_eq!(runs.project.steps(&part), runs.project.steps(name), "{kind}: {name}");
            let tiers = format!("{name}-tiers");
            runs.train(&tiers, &format!("{ranks} --set tiers.device_bytes=200000"));
            assert!(runs.export(&tiers) == whole, "{kind}: {name} in tiers");
            // In one thread or in stages: the same.
            let serial = format!("{name}-serial");
            runs.train(&serial, &format!("{ranks} --set pipeline.mode=serial"));
            assert!(runs.export(&serial) == whole, "{kind}: {name}, serial");
        }
        // Four ranks go on where one was, and one where four were.
        for (from, ranks) in [("one-part", "--set parallel.ranks=4"), ("four-part", "")] {
            let (out, set) = (format!("{from}-on"), "--set train.max_steps=70");
            runs.ok(&format!("train config.toml --resume {from} --out {out} {ranks} {set}"));
            assert_eq!(runs.project.summary(&out)["steps"], 70);
        }
        if kind == ROOM {
            // With room for all ids, ranks agree with one; sums are grouped anew.
            let (one, four) = (runs.export("one"), runs.export("four"));
            assert_eq!(ids(&one, "c3"), ids(&four, "c3"));
            let (one, four) =
                (common::tensors_of(&one, ".weight"), common::tensors_of(&four, ".weight"));
            for (name, one) in one {
                let largest = one.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
                for (a, b) in one.iter().zip(&four[&name]) {
                    assert!((a - b).abs() <= 2e-4 * largest.max(1.0), "{name}: {a} and {b}");
                }
            }
        }
    }
}

#[test]
fn exported_ids_begin_another_run() {
    let Some(shared) = shared() else { return };
    let runs = Runs::new(&shared, &config(ROOM));
    runs.train("run", "");
    let exported = runs.export("run");
    std::fs::write(runs.project.path("w.safetensors"), &exported).unwrap();
    for ranks in ["", "--set parallel.ranks=4 --set threads=4"] {
        let out = format!("new-{}", ranks.len());
        runs.train(&out, &format!("--init w.safetensors --set train.max_steps=0 {ranks}"));
        let (again, old) = (values(&runs.export(&out)), values(&exported));
        for ((name, again), (other, old)) in again.iter().zip(&old) {
            assert_eq!(name, other);
            let known = [".seen_steps", ".occurrences"].iter().any(|end| name.ends_with(end));
            assert!(known || again == old, "{name}");
        }
        assert_eq!(runs.auc(&format!("--checkpoint {out}")), runs.auc("--checkpoint run"));
    }
    // Weights of a table of rows are not those of a table of ids.
    let plain = Runs::new(&shared, &config(""));
    plain.train("run", "--set train.max_steps=1");
    std::fs::write(runs.project.path("p.safetensors"), plain.export("run")).unwrap();
    runs.run("train config.toml --init p.safetensors --out no")
        .says(1, &["tables.c1.ids is missing", "tables.c20.ids is missing"]);
    runs.run("export --checkpoint run --layout dlrm --out no").says(1, &["dlrm"]);
}

#[test]
fn the_criteo_example_is_as_good_on_raw_categories_bounded_or_not() {
    let Some(shared) = shared() else { return };
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/criteo-80k.toml");
    let text = std::fs::read_to_string(example).unwrap();
    let runs = Runs::new(&shared, &text.replace("[[table]]", "[[table]]\nkind = \"dynamic\""));
    runs.train("room", "");
    let figure = |run: &str| runs.project.summary(run)["eval"]["auc"].as_f64().unwrap();
    // Rows are hashed in the static example: a few values share one. What its test asks for.
    assert!(figure("room") > 0.7718, "{}", figure("room"));
    // A tenth of the distinct values of the largest columns.
    let bounded = (0..26).map(|i| format!(" --set table.{i}.rows=2000")).collect::<String>();
    runs.train("bounded", &bounded);
    assert!(figure("bounded") > 0.76, "{}", figure("bounded"));
    let exported = runs.export("bounded");
    let in_use: Vec<usize> = (1..=26).map(|i| ids(&exported, &format!("c{i}")).len()).collect();
    assert!(in_use.iter().all(|&rows| rows <= 2000) && in_use.contains(&2000), "{in_use:?}");
    println!("AUC with room {}, bounded {}", figure("room"), figure("bounded"));
}

#[test]
fn what_makes_no_sense_is_refused() {
    let Some(shared) = shared() else { return };
    let runs = Runs::new(&shared, &config(ROOM));
    let run = |set: &str| runs.run(&format!("train config.toml --out no {set}"));
    run("--set table.2.admission.kind=always")
        .says(2, &["table.2.admission.kind", "kind \"static\""]);
    run("--set table.0.admission.kind=count --set table.0.admission.n=0 \
         --set table.1.eviction.kind=age --set table.3.admission.kind=probability \
         --set table.3.admission.p=2 --set table.3.eviction.steps=2")
    .says(
        2,
        &[
            "table.0.admission.n",
            "table.1.eviction.steps: missing",
            "table.3.admission.p",
            "table.3.eviction.steps: eviction lru does not take",
        ],
    );
    run("--set parallel.ranks=4 --set parallel.replicas=2").says(2, &["table.0.kind"]);
    runs.ok("plan config.toml --ranks 4 --sample 5");
}
