//! Configurations as a whole: all faults at once, `--set`, paths, and the way through the resolved
//! configuration and back.

mod docs;
mod draw;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use proptest::prelude::*;
use toml::Table;

use self::draw::{Draw, samples};
use super::{Config, ConfigError, Fault};

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
        ("table.0.optimizer={lr=2, epss=1}", "table.0.optimizer.epss", "did you mean `eps`?"),
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
        ("optimizer.clip_value=1e300", "optimizer.clip_value", "within float32"),
        ("optimizer.sparse.lr=1e-60", "optimizer.sparse.lr", "within float32"),
        ("optimizer.sparse.eps=1e39", "optimizer.sparse.eps", "within float32"),
        ("pipeline.depth=900000000000000000", "pipeline.depth", "at most 1024"),
        ("train.early_stop.metric=grouped_auc", "train.early_stop.metric", "needs data.group"),
        ("model.dcn.rank=3", "model.dcn.rank", "other than dcn"),
        ("model.bottom_mlp=[8, 5]", "model.bottom_mlp", "dim 4"),
        ("metrics=9464", "metrics", "expected a section"),
        ("data.read=mine", "data.read", "`mine` is not one of all and own"),
        ("parallel.uneven=pad", "parallel.uneven", "all ranks read the same data"),
        ("seed=18446744073709551615", "seed", "a whole number"),
    ] {
        one_fault(SMALL, &[set], key, part);
    }
    // A rank reads its own files in vain when no batch has room for its samples.
    let set = ["data.read=own", "parallel.ranks=33"];
    one_fault(SMALL, &set, "data.batch_size", "at least 33");
    load(SMALL, &["data.read=own", "parallel.ranks=32", "parallel.uneven=pad"]);
    // Without evaluation data nothing can be followed.
    let set = ["data.eval=[]", "train.early_stop.metric=auc"];
    one_fault(SMALL, &set, "train.early_stop.metric", "no data.eval");
    one_fault(SMALL, &["data.eval=[]", "train.eval_every=5"], "train.eval_every", "no data.eval");
}

#[test]
fn keys_of_other_formats_are_refused_by_name() {
    let of = |format: &str| {
        // Of tables of rows: other tables have other faults.
        samples()
            .filter(|text| !text.contains("kind = \"dynamic\""))
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
        ("synthetic", "data.read", "\"own\""),
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
            let path = path.canonicalize().unwrap();
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

#[test]
fn the_ssd_is_read_as_told_and_its_keys_need_a_folder() {
    use tessera_cache::log::Reader;
    let device = "tiers.device_bytes=1000";
    let reader = |set: &[&str]| {
        let set = [&[device, "tiers.ssd_dir=ssd"], set].concat();
        let tiers = load(SMALL, &set).tiers.expect("tiers were given");
        tiers.cold.expect("a folder was given").reader
    };
    assert_eq!(reader(&[]), Reader::Auto);
    assert_eq!(reader(&["tiers.ssd_reader=mmap"]), Reader::Mmap);
    assert_eq!(reader(&["tiers.ssd_reader=io_uring"]), Reader::Uring);
    for (set, key) in
        [("tiers.ssd_reader=mmap", "tiers.ssd_reader"), ("tiers.ssd_bytes=9", "tiers.ssd_bytes")]
    {
        one_fault(SMALL, &[device, set], key, "with ssd_dir only");
    }
    one_fault(SMALL, &[device, "tiers.ssd_reader=fast"], "tiers.ssd_reader", "is not one of");
}
