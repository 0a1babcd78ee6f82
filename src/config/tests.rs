//! Configurations as a whole: the code against docs/config.md, all faults at once, and the way
//! through the resolved configuration and back.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use toml::{Table, Value};

use super::{Config, ConfigError, Fault};

/// Samples that reach every format, kind and option.
const SAMPLES: u64 = 600;

const SPARSE_KINDS: [&str; 9] = [
    "sgd",
    "adagrad",
    "rowwise_adagrad",
    "adam",
    "partial_rowwise_adam",
    "lamb",
    "partial_rowwise_lamb",
    "lars_sgd",
    "ftrl",
];

fn parse(text: &str, set: &[&str]) -> Result<(Config, BTreeSet<String>), ConfigError> {
    let set: Vec<String> = set.iter().map(|&assignment| assignment.to_owned()).collect();
    Config::parse(text, Path::new("test.toml"), PathBuf::from("/base/folder"), &set)
}

fn load(text: &str, set: &[&str]) -> Config {
    match parse(text, set) {
        Ok((config, _)) => config,
        Err(error) => panic!("{error}\nin\n{text}"),
    }
}

fn faults(text: &str, set: &[&str]) -> Vec<Fault> {
    match parse(text, set) {
        Err(ConfigError::Faults { faults, .. }) => faults,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("no fault in {set:?}\n{text}"),
    }
}

/// Exactly one fault, of `key`, whose message holds `part`.
fn one_fault(text: &str, set: &[&str], key: &str, part: &str) {
    let faults = faults(text, set);
    assert_eq!(faults.len(), 1, "{set:?}: {faults:?}");
    assert_eq!(faults[0].key, key, "{set:?}: {faults:?}");
    assert!(faults[0].message.contains(part), "{set:?}: {faults:?}");
}

/// A small configuration without a fault.
const SMALL: &str = r#"
[data]
format = "parquet"
train = ["a.parquet"]
eval = "b.parquet"
batch_size = 32
dense = ["x", "y"]

[model]
dense_features = 2
bottom_mlp = [8, 4]
interaction = "dot"
top_mlp = [8, 1]

[[table]]
name = "user"
rows = 10
dim = 4

[[table]]
name = "item"
rows = 20
dim = 4
features = ["item", "history"]

[optimizer.sparse]
kind = "adagrad"
lr = 0.1

[optimizer.dense]
kind = "sgd"
lr = 0.1
"#;

/// Draws configurations without a fault: every option is there in some, absent in others.
struct Draw(u64);

impl Draw {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    fn coin(&mut self) -> bool {
        self.word() & 1 == 1
    }

    fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[(self.word() % choices.len() as u64) as usize]
    }

    /// Adds each of `lines` or leaves it out.
    fn some(&mut self, out: &mut String, lines: &[&str]) {
        for line in lines {
            if self.coin() {
                writeln!(out, "{line}").unwrap();
            }
        }
    }

    /// Options of a sparse optimizer; `lr` may be left out when it is inherited.
    fn sparse(&mut self, out: &mut String, kind: &str, lr: bool) {
        if lr {
            writeln!(out, "lr = {}", self.pick(&["0.1", "1", "1e-3"])).unwrap();
        }
        match kind {
            "sgd" => {}
            "adagrad" | "rowwise_adagrad" => {
                self.some(out, &["eps = 1e-10"]);
                let decays = [
                    "",
                    "weight_decay = 0\nweight_decay_mode = \"none\"",
                    "weight_decay = 0.5\nweight_decay_mode = \"l2\"",
                    "weight_decay = 0.0\nweight_decay_mode = \"decouple\"",
                ];
                writeln!(out, "{}", self.pick(&decays)).unwrap();
                if kind == "rowwise_adagrad" {
                    self.some(out, &["moment_scale = 2"]);
                }
            }
            "lars_sgd" => {
                self.some(out, &["eta = 0.01", "momentum = 0", "weight_decay = 1e-4"]);
            }
            "ftrl" => self.some(out, &["beta = 0.5", "l1 = 0.1", "l2 = 0.2"]),
            _ => self
                .some(out, &["eps = 1e-6", "beta1 = 0.8", "beta2 = 0.99", "weight_decay = 0.01"]),
        }
    }

    fn data(&mut self, out: &mut String, format: &str) {
        writeln!(out, "[data]\nformat = \"{format}\"\nbatch_size = 64").unwrap();
        let transform =
            if format == "criteo-tsv" { "log1p" } else { self.pick(&["none", "log1p"]) };
        self.some(
            out,
            &[
                "eval_batch_size = 32",
                "on_nan_dense = \"zero\"",
                "on_bad_id = \"drop\"",
                "shuffle_window = 1000",
                &format!("dense_transform = \"{transform}\""),
            ],
        );
        if format == "synthetic" {
            writeln!(out, "[data.synthetic]\neval_samples = 7").unwrap();
            self.some(
                out,
                &[
                    "samples = 1000",
                    "seed = 5",
                    "alpha = 0",
                    "hots_spread = 1",
                    "dense = \"counts\"",
                    "base_rate = 0.5",
                    "strength = 3",
                    "interactions = 1",
                ],
            );
            return;
        }
        let paths = ["\"one\"", "[\"a\", \"/b/c\"]", "[\"${TESSERA_NO_SUCH_NAME:-../x}/./y\"]"];
        writeln!(out, "train = {}\neval = {}", self.pick(&paths), self.pick(&paths)).unwrap();
        if format == "parquet" {
            writeln!(out, "dense = [\"d1\", \"d2\", \"d3\"]\ngroup = \"g\"").unwrap();
            self.some(out, &["label = \"click\"", "sample_weight = \"w\""]);
        } else if format == "criteo-tsv" {
            self.some(out, &["dense = [\"i5\", \"i13\", \"i1\"]"]);
        }
    }

    fn table(&mut self, out: &mut String, index: usize, format: &str, shared: Option<&str>) {
        let first = 2 * index + 1;
        if self.coin() {
            writeln!(out, "[[table]]\nname = \"c{first}\"").unwrap();
        } else {
            writeln!(out, "[[table]]\nname = \"t.{index}\"").unwrap();
            let one = format!("\"c{first}\"");
            let two = format!("[\"c{first}\", \"c{}\"]", first + 1);
            writeln!(out, "features = {}", if self.coin() { one } else { two }).unwrap();
        }
        writeln!(out, "rows = 100\ndim = 4").unwrap();
        if matches!(format, "raw" | "synthetic") {
            self.some(out, &["hots = 3"]);
        }
        if matches!(format, "parquet" | "synthetic") && self.coin() {
            writeln!(out, "weighted = true").unwrap();
        } else {
            self.some(out, &["weighted = false", "pooling = \"mean\""]);
        }
        self.some(out, &["precision = \"bf16\"", "sharding = \"row_wise\"", "kind = \"static\""]);
        let inits = [
            "",
            "kind = \"uniform\"",
            "kind = \"uniform\"\nscale = 0.25",
            "kind = \"normal\"",
            "kind = \"normal\"\nstd = 1",
            "kind = \"zero\"",
        ];
        writeln!(out, "[table.init]\n{}", self.pick(&inits)).unwrap();
        match shared {
            Some(kind) if self.coin() => {
                if self.coin() {
                    writeln!(out, "[table.optimizer]").unwrap();
                    if self.coin() {
                        writeln!(out, "kind = \"{kind}\"").unwrap();
                    }
                    let lr = self.coin();
                    self.sparse(out, kind, lr);
                }
            }
            _ => {
                let kind = self.pick(&SPARSE_KINDS);
                writeln!(out, "[table.optimizer]\nkind = \"{kind}\"").unwrap();
                self.sparse(out, kind, true);
            }
        }
    }

    fn config(&mut self) -> String {
        let mut out = String::new();
        self.some(&mut out, &["seed = 12", "threads = 3"]);
        let format = self.pick(&["criteo-tsv", "mlperf-npy", "raw", "parquet", "synthetic"]);
        self.data(&mut out, format);
        let interaction = self.pick(&["dot", "dcn", "concat"]);
        writeln!(
            out,
            "[model]\ndense_features = 3\ninteraction = \"{interaction}\"\ntop_mlp = [5, 1]"
        )
        .unwrap();
        if interaction == "dot" || self.coin() {
            writeln!(out, "bottom_mlp = [6, 4]").unwrap();
        }
        self.some(&mut out, &["wide = true", "loss = \"mse\""]);
        if interaction == "dcn" {
            writeln!(out, "dcn = {{ layers = 2, rank = 3 }}").unwrap();
        }
        let shared = self.coin().then(|| self.pick(&SPARSE_KINDS));
        for index in 0..1 + self.pick(&[0, 1, 2]) {
            self.table(&mut out, index, format, shared);
        }
        writeln!(out, "[optimizer]").unwrap();
        writeln!(out, "{}", self.pick(&["", "clip_norm = 1", "clip_value = 0.5"])).unwrap();
        if let Some(kind) = shared {
            writeln!(out, "[optimizer.sparse]\nkind = \"{kind}\"").unwrap();
            self.sparse(&mut out, kind, true);
        }
        let dense = self.pick(&["sgd", "adagrad", "adam"]);
        writeln!(out, "[optimizer.dense]\nkind = \"{dense}\"\nlr = 0.5").unwrap();
        if dense != "sgd" {
            self.some(&mut out, &["eps = 1e-6"]);
        }
        if dense == "adam" {
            self.some(&mut out, &["beta1 = 0.5", "beta2 = 0.75"]);
        }
        writeln!(out, "[optimizer.schedule]").unwrap();
        self.some(&mut out, &["warmup_steps = 10"]);
        let decay = self.pick(&["constant", "linear", "cosine", "poly"]);
        writeln!(out, "decay = \"{decay}\"").unwrap();
        if decay != "constant" {
            writeln!(out, "decay_steps = 100").unwrap();
            self.some(&mut out, &["decay_start = 20", "end_ratio = 0.5"]);
        }
        if decay == "poly" {
            self.some(&mut out, &["power = 3"]);
        }
        writeln!(out, "[parallel]").unwrap();
        self.some(
            &mut out,
            &[
                "ranks = 1",
                "comm = \"single\"",
                "replicas = 1",
                "sync_every = 4",
                "plan = \"auto\"",
            ],
        );
        writeln!(out, "[pipeline]").unwrap();
        self.some(&mut out, &["micro_batches = 1", "cluster = \"none\""]);
        let modes = ["", "mode = \"serial\"", "mode = \"prefetch\"\ndepth = 9"];
        writeln!(out, "{}", self.pick(&modes)).unwrap();
        writeln!(out, "[train]").unwrap();
        self.some(
            &mut out,
            &[
                "epochs = 3",
                "max_steps = 9",
                "eval_every = 4",
                "log_every = 5",
                "checkpoint_every = 6",
                "keep = 7",
                "window_steps = 8",
                "on_nonfinite = \"skip\"",
            ],
        );
        if self.coin() {
            let metrics: &[&str] = match format {
                "parquet" => &["auc", "logloss", "ne", "grouped_auc"],
                _ => &["auc", "logloss", "ne"],
            };
            writeln!(out, "[train.early_stop]\nmetric = \"{}\"", self.pick(metrics)).unwrap();
            self.some(&mut out, &["patience = 2", "min_delta = 0.001"]);
        }
        self.some(&mut out, &["[metrics]\nlisten = \"127.0.0.1:9464\""]);
        out
    }
}

fn samples() -> impl Iterator<Item = String> {
    (0..SAMPLES).map(|seed| Draw(seed).config())
}

/// The values at `key` (`table[].rows`: of every table), none where it is not there.
fn values<'v>(root: &'v Table, key: &str) -> Vec<&'v Value> {
    let mut tables = vec![root];
    let (way, last) = key.rsplit_once('.').map_or((None, key), |(way, last)| (Some(way), last));
    for step in way.into_iter().flat_map(|way| way.split('.')) {
        let name = step.trim_end_matches("[]");
        tables = tables
            .into_iter()
            .flat_map(|table| match table.get(name) {
                Some(Value::Table(inner)) => vec![inner],
                Some(Value::Array(inner)) => inner.iter().filter_map(Value::as_table).collect(),
                _ => Vec::new(),
            })
            .collect();
    }
    tables.into_iter().filter_map(|table| table.get(last)).collect()
}

/// Puts `value` at `key` in the first section that has it (or takes it out). Gives the key's name
/// in faults.
fn change(root: &mut Table, key: &str, value: Option<Value>) -> Option<String> {
    let (way, last) = key.rsplit_once('.').map_or((None, key), |(way, last)| (Some(way), last));
    let Some((first, rest)) = way.map(|way| way.split_once('.').unwrap_or((way, ""))) else {
        root.get(last)?;
        match value {
            Some(value) => root.insert(last.to_owned(), value),
            None => root.remove(last),
        };
        return Some(last.to_owned());
    };
    let rest = if rest.is_empty() { last.to_owned() } else { format!("{rest}.{last}") };
    match root.get_mut(first.trim_end_matches("[]"))? {
        Value::Table(inner) => Some(format!("{first}.{}", change(inner, &rest, value)?)),
        Value::Array(inner) => inner.iter_mut().enumerate().find_map(|(index, element)| {
            let name = change(element.as_table_mut()?, &rest, value.clone())?;
            Some(format!("{}.{index}.{name}", first.trim_end_matches("[]")))
        }),
        _ => None,
    }
}

/// A row of the tables of keys in docs/config.md.
struct Row {
    key: String,
    kind: String,
    default: String,
}

fn docs() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/config.md")).unwrap()
}

/// The cells of every row of every table.
fn cells(docs: &str) -> impl Iterator<Item = Vec<&str>> {
    docs.lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"))
        .map(|line| line.split(" | ").collect())
}

fn rows(docs: &str) -> Vec<Row> {
    cells(docs)
        .filter_map(|cells| {
            let key = cells[0].strip_prefix('`')?.strip_suffix('`')?;
            (cells.len() == 4 && !key.contains(['`', ' '])).then(|| Row {
                key: key.to_owned(),
                kind: cells[1].to_owned(),
                default: cells[2].to_owned(),
            })
        })
        .collect()
}

/// `a`, `b` and `c` of a cell.
fn quoted(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The names in `a, b and c`.
fn listed(text: &str) -> BTreeSet<String> {
    text.replace(" and ", ", ").split(", ").map(str::to_owned).collect()
}

/// The default of a row where it is a constant.
fn constant(default: &str) -> Option<Value> {
    let text = default.strip_prefix('`')?.strip_suffix('`')?;
    format!("v = {text}").parse::<Table>().ok()?.remove("v")
}

/// A sample that gives `key`, as a table.
fn sample_with(key: &str) -> Table {
    samples()
        .map(|text| text.parse::<Table>().unwrap())
        .find(|given| !values(given, key).is_empty())
        .unwrap_or_else(|| panic!("no sample gives {key}"))
}

#[test]
fn the_docs_list_exactly_the_keys_that_are_read() {
    let known: BTreeSet<String> = samples()
        .flat_map(|text| parse(&text, &[]).unwrap_or_else(|e| panic!("{e}\n{text}")).1)
        .collect();
    let holds_keys = |key: &str| {
        let inside = [format!("{key}."), format!("{key}[].")];
        known.iter().any(|other| inside.iter().any(|prefix| other.starts_with(prefix)))
    };
    let (sections, keys): (BTreeSet<&str>, BTreeSet<&str>) =
        known.iter().map(String::as_str).partition(|key| holds_keys(key));

    let own = |section: &str| -> BTreeSet<&str> {
        keys.iter().filter_map(|key| key.strip_prefix(section)).collect()
    };
    assert_eq!(own("table[].optimizer."), own("optimizer.sparse."));
    let keys: BTreeSet<&str> =
        keys.into_iter().filter(|key| !key.starts_with("table[].optimizer.")).collect();

    let docs = docs();
    let rows = rows(&docs);
    let documented: BTreeSet<&str> = rows.iter().map(|row| row.key.as_str()).collect();
    assert_eq!(documented.len(), rows.len(), "a key has two rows");
    let missing: Vec<_> = keys.difference(&documented).collect();
    let stale: Vec<_> = documented.difference(&keys).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "not in the docs: {missing:?}\nnot in the code: {stale:?}"
    );

    let headings: BTreeSet<String> = docs
        .lines()
        .filter(|line| line.starts_with('#'))
        .flat_map(quoted)
        .filter(|name| name.starts_with('['))
        .collect();
    let wanted: BTreeSet<String> = sections
        .into_iter()
        .map(|section| match section {
            "table" => "[[table]]".to_owned(),
            other => format!("[{}]", other.replace("[]", "")),
        })
        .collect();
    assert_eq!(headings, wanted);
}

#[test]
fn defaults_in_the_docs_are_those_in_force() {
    let docs = docs();
    let rows = rows(&docs);
    let mut checked = BTreeSet::new();
    for text in samples() {
        let given: Table = text.parse().unwrap();
        let resolved = load(&text, &[]).resolved;
        for row in rows.iter().filter(|row| values(&given, &row.key).is_empty()) {
            for value in values(&resolved, &row.key) {
                match constant(&row.default) {
                    Some(default) => assert_eq!(*value, default, "{}\n{text}", row.key),
                    None => assert_ne!(row.default, "none", "{} = {value}\n{text}", row.key),
                }
                checked.insert(row.key.as_str());
            }
        }
    }
    for row in rows.iter().filter(|row| constant(&row.default).is_some()) {
        assert!(checked.contains(row.key.as_str()), "the default of {} was never seen", row.key);
    }
}

#[test]
fn what_the_docs_require_is_missed() {
    let docs = docs();
    let rows = rows(&docs);
    let required: Vec<&Row> = rows.iter().filter(|row| row.default == "required").collect();
    assert!(required.len() >= 15);
    for row in required {
        let mut given = sample_with(&row.key);
        let name = change(&mut given, &row.key, None).unwrap();
        let faults = faults(&given.to_string(), &[]);
        let missed = faults.iter().any(|f| f.key == name && f.message.contains("missing"));
        assert!(missed, "{name} taken out: {faults:?}");
    }
}

#[test]
fn types_and_choices_in_the_docs_are_those_of_the_code() {
    let docs = docs();
    let mut rules = BTreeMap::<String, usize>::new();
    for row in rows(&docs) {
        let refused = |value: Value, part: &str| {
            let mut given = sample_with(&row.key);
            let name = change(&mut given, &row.key, Some(value.clone())).unwrap();
            let faults = faults(&given.to_string(), &[]);
            let fault =
                faults.iter().find(|fault| fault.key == name && fault.message.contains(part));
            fault.unwrap_or_else(|| panic!("{name} = {value}: {faults:?}")).message.clone()
        };
        let rule = row.kind.split('`').next().unwrap().to_owned();
        let choices = match row.key.as_str() {
            "optimizer.sparse.kind" => SPARSE_KINDS.iter().map(|&kind| kind.to_owned()).collect(),
            _ => quoted(&row.kind),
        };
        if !choices.is_empty() {
            let message = refused(Value::String("zzz".into()), "is not one of ");
            let mut names = listed(message.split_once("is not one of ").unwrap().1);
            // Tables can, a DLRM cannot; and criteo-tsv has one transform.
            if row.key == "table[].pooling" {
                names.remove("none");
            }
            if row.key == "data.dense_transform" {
                names.insert("none".into());
            }
            assert_eq!(names, choices, "{}", row.key);
            *rules.entry("choices".into()).or_default() += 1;
            continue;
        }
        let wrong: &[Value] = match row.kind.as_str() {
            "whole number" => &[Value::Integer(-1), Value::Float(1.5)],
            "whole number from 1" => &[Value::Integer(0), Value::Integer(-1), Value::Float(1.5)],
            "whole number or list" => &[Value::Integer(-1), Value::Boolean(true)],
            "number from 0" => &[Value::Float(-0.1), Value::Float(f64::NAN)],
            "number above 0" => &[Value::Float(0.0), Value::Float(f64::INFINITY)],
            "number from 0, below 1" => &[Value::Float(-0.1), Value::Float(1.0)],
            "number from 0 to 1" => &[Value::Float(-0.1), Value::Float(1.1)],
            "number from 0 to 20" => &[Value::Float(-0.1), Value::Float(20.1)],
            "number from 0 to 100" => &[Value::Float(-0.1), Value::Float(100.1)],
            "number from 0.000001 to 0.999999" => &[Value::Float(0.0), Value::Float(1.0)],
            "true or false" => &[Value::Integer(1), Value::String("true".into())],
            "name"
            | "list of names"
            | "name or list of names"
            | "path or list of paths"
            | "list of whole numbers"
            | "address and port" => &[Value::Integer(1)],
            other => panic!("{}: no rule for the type `{other}`", row.key),
        };
        for value in wrong {
            refused(value.clone(), "");
        }
        *rules.entry(rule).or_default() += 1;
    }
    assert!(rules.len() >= 15, "{rules:?}");
}

#[test]
fn the_docs_list_the_options_of_every_kind() {
    let docs = docs();
    let mut kinds = BTreeSet::new();
    for row in cells(&docs).filter(|row| SPARSE_KINDS.contains(&row[0])) {
        let kind = row[0];
        let mut wanted = listed(row[1]);
        wanted.remove("none");
        wanted.extend(["kind".to_owned(), "lr".to_owned()]);
        let set = [
            format!("optimizer.sparse={{kind=\"{kind}\", lr=1, zzz=1}}"),
            "table.0.optimizer={kind=\"sgd\", lr=1}".to_owned(),
            "table.1.optimizer={kind=\"sgd\", lr=1}".to_owned(),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let faults = faults(SMALL, &set);
        assert_eq!(faults.len(), 1, "{faults:?}");
        let message = &faults[0].message;
        let takes = message.split_once("(it takes ").and_then(|(_, rest)| rest.split_once(')'));
        assert_eq!(listed(takes.unwrap().0), wanted, "{kind}: {message}");
        assert!(message.contains(kind), "{message}");
        kinds.insert(kind);
    }
    assert_eq!(kinds.len(), SPARSE_KINDS.len(), "{kinds:?}");
}

#[test]
fn the_docs_say_what_is_refused_in_this_version() {
    let docs = docs();
    let says = |given: &str| {
        let row = cells(&docs).find(|row| row[0] == given).unwrap_or_else(|| panic!("{given}"));
        row[1].trim_matches('`').to_owned()
    };
    for (given, set, key) in [
        ("`parallel.ranks` above 1", "parallel.ranks=2", "parallel.ranks"),
        ("`parallel.comm` other than single", "parallel.comm=mpi", "parallel.comm"),
        ("`parallel.replicas` above 1", "parallel.replicas=2", "parallel.replicas"),
        ("`parallel.plan` with a file", "parallel.plan=plan.csv", "parallel.plan"),
        ("`pipeline.mode` \"nested\"", "pipeline.mode=nested", "pipeline.mode"),
        ("`pipeline.micro_batches` above 1", "pipeline.micro_batches=4", "pipeline.micro_batches"),
        ("`pipeline.cluster` \"keys\"", "pipeline.cluster=keys", "pipeline.cluster"),
        ("`table[].kind` \"dynamic\"", "table.0.kind=dynamic", "table.0.kind"),
        ("`table[].pooling` \"none\"", "table.0.pooling=none", "table.0.pooling"),
        ("a `[tiers]` section", "tiers.device_bytes=1", "tiers"),
    ] {
        one_fault(SMALL, &[set], key, &says(given));
    }
}

#[test]
fn all_faults_are_listed_at_once() {
    let text = r#"
seed = -1
threads = 0
colour = "red"
[data]
format = "parquet"
batch_size = 0
on_bad_id = "ignore"
bach_size = 3
[model]
dense_features = 2
bottom_mlp = [8, 4]
interaction = "dott"
top_mlp = [8, 2]
[[table]]
name = "a b"
rows = "many"
dim = 0
[[table]]
rows = 3
dim = 4
features = "f"
pooling = "mean"
weighted = true
hots = 2
[table.init]
kind = "zero"
std = 0.1
[[table]]
name = "t"
rows = 3
dim = 4
features = ["f"]
[optimizer.sparse]
kind = "sgd"
lr = 0.1
momentum = 0.9
[optimizer.dense]
kind = "adam"
lr = -1
beta1 = 1
[optimizer.schedule]
decay = "linear"
decay_start = 3
warmup_steps = 5
[optimizer]
clip_norm = 1
clip_value = 0
[pipeline]
mode = "serial"
depth = 4
[train]
epochs = 0
eval_every = 10
[metrics]
listen = "localhost"
"#;
    let error = parse(text, &["train.keep=0", "no-assignment"]).unwrap_err();
    let text = error.to_string();
    let ConfigError::Faults { faults, .. } = error else { panic!("{error}") };
    let wanted = [
        "seed",
        "threads",
        "colour",
        "data.train",
        "data.batch_size",
        "data.on_bad_id",
        "data.bach_size",
        "data.dense",
        "model.interaction",
        "model.top_mlp",
        "table.0.name",
        "table.0.rows",
        "table.0.dim",
        "table.1.name",
        "table.1.weighted",
        "table.1.hots",
        "table.1.init.std",
        "table.2.features",
        "optimizer.sparse.momentum",
        "optimizer.dense.lr",
        "optimizer.dense.beta1",
        "optimizer.schedule.decay_steps",
        "optimizer.schedule.decay_start",
        "optimizer.clip_value",
        "pipeline.depth",
        "train.epochs",
        "train.eval_every",
        "train.keep",
        "metrics.listen",
        "no-assignment",
    ];
    for key in wanted {
        assert!(faults.iter().any(|fault| fault.key == key), "{key} is not in\n{text}");
        assert!(text.contains(&format!("\n  {key}: ")), "{key} is not in\n{text}");
    }
    let others: Vec<_> = faults.iter().filter(|f| !wanted.contains(&f.key.as_str())).collect();
    assert!(others.is_empty(), "{others:?}");
    assert!(text.contains(&format!("{} faults", faults.len())), "{text}");
}

#[test]
fn one_mistake_is_one_fault() {
    for (set, key, part) in [
        ("data.format=criteo", "data.format", "`criteo` is not one of criteo-tsv,"),
        ("data.train=[\"${TESSERA_NO_SUCH_NAME}/x\"]", "data.train", "no variable TESSERA_NO_SUCH"),
        ("data.train=7", "data.train", "expected a list, found `7`"),
        ("data.train=[]", "data.train", "missing"),
        ("data.synthetic.samples=5", "data.synthetic", "only format synthetic"),
        ("table.0.hots=2", "table.0.hots", "only formats raw and synthetic"),
        ("table.0.dim=0", "table.0.dim", "at least 1"),
        ("table.0.rows=-4", "table.0.rows", "a whole number from 0, found `-4`"),
        ("table.0.name=", "table.0.name", "letters"),
        ("table.0.init={kind=\"uniform\", scale=1e300}", "table.0.init.scale", "float32"),
        ("table.1.name=user", "table.1.name", "used twice"),
        ("table.1.features=user", "table.1.features", "`user` is used twice"),
        ("table.1.features=[]", "table.1.features", "no feature"),
        ("table.1.features=x", "data", "column `x` is named twice"),
        ("data.label=x", "data", "column `x` is named twice"),
        ("optimizer.dense.lr=nan", "optimizer.dense.lr", "a finite number"),
        ("optimizer.clip_norm=0", "optimizer.clip_norm", "above 0"),
        ("train.early_stop.metric=grouped_auc", "train.early_stop.metric", "needs data.group"),
        ("model.dcn.rank=3", "model.dcn.rank", "other than dcn"),
        ("model.bottom_mlp=[8, 5]", "model.bottom_mlp", "dim 4"),
        ("metrics=9464", "metrics", "expected a section"),
        ("seed=18446744073709551615", "seed", "a whole number"),
    ] {
        one_fault(SMALL, &[set], key, part);
    }
    // Without evaluation data nothing can be followed.
    let set = ["data.eval=[]", "train.early_stop.metric=auc"];
    one_fault(SMALL, &set, "train.early_stop.metric", "no data.eval");
    one_fault(SMALL, &["data.eval=[]", "train.eval_every=5"], "train.eval_every", "no data.eval");
}

#[test]
fn keys_of_other_formats_are_refused_by_name() {
    let of = |format: &str| {
        samples()
            .find(|text| text.contains(&format!("format = \"{format}\"")))
            .unwrap_or_else(|| panic!("no sample of {format}"))
    };
    for (format, key, value) in [
        ("mlperf-npy", "data.label", "\"y\""),
        ("raw", "data.sample_weight", "\"w\""),
        ("criteo-tsv", "data.group", "\"g\""),
        ("mlperf-npy", "data.dense", "[\"a\", \"b\", \"c\"]"),
        ("synthetic", "data.train", "\"x\""),
        ("synthetic", "data.eval", "\"x\""),
        ("raw", "data.synthetic", "{samples=5}"),
        ("criteo-tsv", "data.dense_transform", "\"none\""),
        ("criteo-tsv", "table.0.hots", "1"),
        ("raw", "table.0.weighted", "true"),
        ("criteo-tsv", "table.0.rows", "1"),
        ("criteo-tsv", "table.0.features", "\"c27\""),
        ("criteo-tsv", "data.dense", "[\"i1\", \"i2\", \"i03\"]"),
    ] {
        let text = of(format);
        let given: Table = text.parse().unwrap();
        // A mean forbids weights whatever the format; that is not what is tried here.
        let pooling = "table.0.pooling=sum";
        let assignment = format!("{key}={value}");
        let found = faults(&text, &[pooling, &assignment]);
        assert!(found.iter().any(|fault| fault.key == key), "{assignment}: {found:?}\n{given}");
        assert!(found.iter().all(|fault| fault.message != "unknown key"), "{found:?}");
    }
}

#[test]
fn a_near_miss_is_named() {
    for (set, hint) in [
        ("sed=1", "`seed`"),
        ("data.bach_size=1", "`batch_size`"),
        ("train.epoch=1", "`epochs`"),
        ("train.early_stopp.metric=auc", "`early_stop`"),
        ("table.0.row=1", "`rows`"),
        ("optimizer.sprse.lr=1", "`sparse`"),
        ("optimizer.sparse.epss=1", "`eps`"),
        ("metrics.listn=1", "`listen`"),
    ] {
        let found = faults(SMALL, &[set]);
        let said = found.iter().any(|f| f.message.ends_with(&format!("did you mean {hint}?")));
        assert!(said, "{set}: {found:?}");
    }
    one_fault(SMALL, &["train.zzzzzz=1"], "train.zzzzzz", "unknown key");
    assert!(!faults(SMALL, &["train.zzzzzz=1"])[0].message.contains("did you mean"));
}

#[test]
fn an_option_that_the_kind_does_not_use_is_refused() {
    for (kind, option) in [
        ("sgd", "eps=1e-8"),
        ("sgd", "weight_decay=0.1"),
        ("sgd", "momentum=0.9"),
        ("adagrad", "beta1=0.9"),
        ("adagrad", "moment_scale=2"),
        ("adam", "weight_decay_mode=\"l2\""),
        ("lamb", "weight_decay_mode=\"none\""),
        ("lars_sgd", "weight_decay_mode=\"decouple\""),
        ("lars_sgd", "eps=1e-8"),
        ("ftrl", "weight_decay=0.1"),
    ] {
        let name = option.split('=').next().unwrap();
        let set = format!("optimizer.sparse={{kind=\"{kind}\", lr=1, {option}}}");
        let key = format!("optimizer.sparse.{name}");
        one_fault(SMALL, &[&set], &key, &format!("optimizer {kind} does not take this option"));
        let set = format!("table.1.optimizer={{kind=\"{kind}\", lr=1, {option}}}");
        let key = format!("table.1.optimizer.{name}");
        one_fault(SMALL, &[&set], &key, &format!("optimizer {kind} does not take this option"));
    }
    one_fault(SMALL, &["optimizer.dense.eps=1"], "optimizer.dense.eps", "optimizer sgd");
    one_fault(SMALL, &["optimizer.schedule.power=2"], "optimizer.schedule.power", "decay constant");
}

#[test]
fn decay_of_the_adagrad_kinds_needs_amount_and_mode() {
    for kind in ["adagrad", "rowwise_adagrad"] {
        let kind = format!("optimizer.sparse.kind={kind}");
        let key = "optimizer.sparse.weight_decay";
        one_fault(SMALL, &[&kind, "optimizer.sparse.weight_decay=0.1"], key, "weight_decay_mode");
        let mode = "optimizer.sparse.weight_decay_mode=l2";
        one_fault(SMALL, &[&kind, mode], "optimizer.sparse.weight_decay_mode", "a weight_decay");
        load(SMALL, &[&kind, mode, "optimizer.sparse.weight_decay=0.1"]);
    }
    let ftrl = ["optimizer.sparse.kind=ftrl", "optimizer.sparse.lr=0"];
    one_fault(SMALL, &ftrl, "optimizer.sparse.lr", "above 0");
}

#[test]
fn a_table_inherits_the_options_of_its_kind() {
    use tessera_embedding::{SparseOptimizer, WeightDecay};
    let set = ["optimizer.sparse.eps=0.5", "table.0.optimizer.lr=9"];
    let config = load(SMALL, &set);
    let adagrad = |lr, eps| SparseOptimizer::Adagrad { lr, eps, decay: WeightDecay::None };
    assert_eq!(config.tables[0].optimizer, adagrad(9.0, 0.5));
    assert_eq!(config.tables[1].optimizer, adagrad(0.1, 0.5));
    let set = ["optimizer.sparse.eps=0.5", "table.0.optimizer={kind=\"sgd\", lr=2}"];
    assert_eq!(load(SMALL, &set).tables[0].optimizer, SparseOptimizer::Sgd { lr: 2.0 });
    // Another kind inherits nothing, its learning rate neither.
    one_fault(SMALL, &["table.0.optimizer.kind=sgd"], "table.0.optimizer.lr", "missing");
    let text = SMALL.replace("[optimizer.sparse]\nkind = \"adagrad\"\nlr = 0.1\n", "");
    let keys: Vec<String> = faults(&text, &[]).into_iter().map(|fault| fault.key).collect();
    assert_eq!(keys, ["table.0.optimizer", "table.1.optimizer"]);
}

#[test]
fn names_of_wide_parts_are_taken_only_with_a_wide_part() {
    let table = ["table.1.name=user.wide", "model.wide=true"];
    one_fault(SMALL, &table, "table.1.name", "`user.wide`");
    load(SMALL, &table[..1]);
    let feature = ["table.1.features=[\"item\", \"user.wide\"]", "model.wide=true"];
    one_fault(SMALL, &feature, "table.1.features", "`user.wide`");
    load(SMALL, &feature[..1]);
}

#[test]
fn assignments_come_in_order_and_reach_elements() {
    let set = [
        "data.batch_size=1",
        "data.batch_size=2",
        "table.1.rows=77",
        "data.dense.0=z",
        "data.train=[\"p\", \"/q\"]",
        "data.train.0=r",
        "train.early_stop.metric=ne",
        "model.wide=true",
    ];
    let config = load(SMALL, &set);
    assert_eq!(config.data.batch_size, 2);
    assert_eq!(config.tables[1].rows, 77);
    assert_eq!(config.data.dense, ["z", "y"]);
    assert_eq!(config.data.train, [Path::new("/base/folder/r"), Path::new("/q")]);
    assert_eq!(config.train.early_stop.map(|stop| stop.metric.name()), Some("ne"));
    assert!(config.model.wide);
    one_fault(SMALL, &["table.2.rows=1"], "table.2.rows", "the array has 2");
}

#[test]
fn paths_start_from_the_folder_of_the_file() {
    let set = ["data.train=[\"../a\", \"./b/../c\", \"${TESSERA_NO_SUCH_NAME:-d}/e\", \"/f\"]"];
    let config = load(SMALL, &set);
    let wanted = ["/base/a", "/base/folder/c", "/base/folder/d/e", "/f"].map(PathBuf::from);
    assert_eq!(config.data.train, wanted);
    assert_eq!(config.data.eval, [Path::new("/base/folder/b.parquet")]);
    let resolved = config.resolved["data"]["train"].as_array().unwrap();
    assert_eq!(resolved[2].as_str(), Some("/base/folder/d/e"));
}

#[test]
fn the_golden_configurations_load() {
    let Some(shared) = crate::testing::shared() else { return };
    let mut loaded = 0;
    for entry in std::fs::read_dir(shared.join("golden")).unwrap() {
        let path = entry.unwrap().path().join("config.toml");
        if path.is_file() {
            let config = Config::load(&path, &[]).unwrap_or_else(|error| panic!("{error}"));
            assert!(config.data.train[0].starts_with(path.parent().unwrap()));
            assert!(config.data.train[0].exists());
            loaded += 1;
        }
    }
    assert!(loaded >= 3, "{loaded} configurations");
}

/// What a configuration holds, but for the text it came from.
fn content(config: &Config) -> String {
    format!("{config:?}")
}

proptest! {
    /// Loading what a run writes as its config.toml gives the same run, from any folder.
    #[test]
    fn the_resolved_configuration_loads_again_to_the_same(seed: u64) {
        let text = Draw(seed).config();
        let first = load(&text, &[]);
        let written = first.resolved.to_string();
        let elsewhere = PathBuf::from("/somewhere/else");
        let again = Config::parse(&written, Path::new("config.toml"), elsewhere, &[]);
        let (second, _) = again.unwrap_or_else(|error| panic!("{error}\nin\n{written}\nfrom\n{text}"));
        prop_assert_eq!(content(&first), content(&second));
        prop_assert_eq!(written, second.resolved.to_string());
    }
}
