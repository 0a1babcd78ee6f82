//! What each counter counts, exactly, on a file whose bad values are known.

use std::collections::BTreeSet;

use prometheus::Registry;
use tessera::checkpoint::step_dir;
use tessera::clock::Clock;
use tessera::config::Config;
use tessera::metrics::Metrics;
use tessera::model::{FirstValues, Model};
use tessera::pipeline::{Feeder, Next};
use tessera::run_dir::RunDir;
use tessera::signals::Signals;
use tessera::trainer::Trainer;
use tessera_device::Cpu;

use super::common::Project;
use super::exposition::{Page, parse};
use super::{gathered, value};

const CONFIG: &str = r#"
[data]
format = "raw"
train = "data.raw"
batch_size = 8
[model]
dense_features = 2
interaction = "dcn"
dcn = { layers = 2, rank = 2 }
top_mlp = [4, 1]
wide = true
[[table]]
name = "a"
rows = 10
dim = 3
[[table]]
name = "b"
rows = 5
dim = 2
[optimizer.sparse]
kind = "adagrad"
lr = 0.1
[optimizer.dense]
kind = "sgd"
lr = 0.1
"#;

/// Four batches of eight samples. Batch 0 has two ids outside table a and one outside b, batch 1
/// a NaN and an infinite dense value, batch 2 a value that overflows in the cross layers.
struct Samples {
    dense: Vec<[f32; 2]>,
    ids: Vec<[i32; 2]>,
}

impl Samples {
    fn new() -> Self {
        let mut samples = Self {
            dense: (0..32).map(|k| [k as f32 / 32.0, 0.5]).collect(),
            ids: (0..32).map(|k| [k % 7, k % 3]).collect(),
        };
        samples.ids[1][0] = -1;
        samples.ids[4][0] = 10;
        samples.ids[4][1] = i32::MAX;
        samples.dense[9][0] = f32::NAN;
        samples.dense[15][1] = f32::NEG_INFINITY;
        samples.dense[20] = [3e38, 3e38];
        samples
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (k, (dense, ids)) in (0i32..).zip(self.dense.iter().zip(&self.ids)) {
            bytes.extend((k % 2).to_le_bytes());
            bytes.extend(dense.iter().flat_map(|x| x.to_le_bytes()));
            bytes.extend(ids.iter().flat_map(|id| id.to_le_bytes()));
        }
        bytes
    }

    /// Rows that the updates of a table move, ids outside it dropped or in its row 0. Batch 2 is
    /// skipped.
    fn updated(&self, column: usize, rows: i32, default_row: bool) -> usize {
        let moved = |batch: &[[i32; 2]]| -> BTreeSet<i32> {
            let inside = |id: &i32| (0..rows).contains(id);
            let ids = batch.iter().map(|ids| ids[column]);
            ids.filter_map(|id| Some(id).filter(inside).or(default_row.then_some(0))).collect()
        };
        let batches = self.ids.chunks(8).enumerate().filter(|(batch, _)| *batch != 2);
        batches.map(|(_, batch)| moved(batch).len()).sum()
    }
}

/// Trains on the file until its end or an error, then writes a checkpoint; gives the metrics and
/// the error.
fn train(project: &Project, set: &[&str]) -> (Page, Option<String>) {
    std::fs::write(project.path("data.raw"), Samples::new().bytes()).unwrap();
    let set: Vec<String> = set.iter().map(|&assignment| assignment.to_owned()).collect();
    let config = Config::load(&project.path("config.toml"), &set).unwrap();
    let registry = Registry::new();
    let model =
        Model::new(&Cpu::new(config.threads).unwrap(), &config, FirstValues::Drawn).unwrap();
    let names: Vec<String> = model.table_names().map(str::to_owned).collect();
    let metrics = Metrics::register(&registry, names.iter().map(String::as_str)).unwrap();
    let signals = Signals::default();
    let mut trainer = Trainer::new(&config, &metrics, &signals, model);
    let mut run = RunDir::create(&project.path("run")).unwrap();
    let (model, moment) = (trainer.model(), trainer.moment());
    let feeder = Feeder::new(&config, model, moment, &metrics, &signals).unwrap();
    let mut feeder = feeder.expect("there are no signals");
    let mut go = || -> tessera::Result<()> {
        loop {
            let mut clock = Clock::start();
            match feeder.next(&mut clock)? {
                Next::End | Next::Signal(_) => {
                    let folder = run.checkpoints();
                    return trainer.checkpoint(Some(&mut run), &folder, false);
                }
                Next::EpochEnd => {}
                Next::Step(fed) => {
                    trainer.step(Some(&mut run), *fed, clock)?;
                }
            }
        }
    };
    let error = go().err().map(|error| error.to_string());
    (parse(&gathered(&registry)).unwrap(), error)
}

#[test]
fn every_event_of_a_policy_is_counted_once() {
    let samples = Samples::new();
    for default_row in [false, true] {
        let policy = if default_row { "default_row" } else { "drop" };
        let project = Project::new(CONFIG);
        let on_bad_id = format!("data.on_bad_id={policy}");
        let set = [on_bad_id.as_str(), "data.on_nan_dense=zero", "train.on_nonfinite=skip"];
        let (page, error) = train(&project, &set);
        assert_eq!(error, None);
        let get = |name: &str| value(&page, name, &[]);
        assert_eq!(get("tessera_train_steps_total"), 4.0);
        assert_eq!(get("tessera_train_samples_total"), 32.0);
        assert_eq!(get("tessera_train_skipped_steps_total"), 1.0);
        assert_eq!(get("tessera_train_step_seconds_count"), 4.0);
        assert_eq!(get("tessera_embedding_lookup_seconds_count"), 4.0);
        assert_eq!(get("tessera_data_samples_total"), 32.0);
        assert_eq!(get("tessera_data_read_bytes_total"), samples.bytes().len() as f64);
        for (table, column, rows, bad) in
            [("a", 0, 10, 2.0), ("b", 1, 5, 1.0), ("a.wide", 0, 10, 2.0), ("b.wide", 1, 5, 1.0)]
        {
            for counted in ["error", "drop", "default_row"] {
                let labels = [("table", table), ("policy", counted)];
                let ids = value(&page, "tessera_embedding_bad_ids_total", &labels);
                assert_eq!(ids, if counted == policy { bad } else { 0.0 }, "{table} {counted}");
            }
            let of = |name| value(&page, name, &[("table", table)]);
            let read = if default_row { 32.0 } else { 32.0 - bad };
            assert_eq!(of("tessera_embedding_rows_read_total"), read, "{table}");
            let updated = samples.updated(column, rows, default_row) as f64;
            assert_eq!(of("tessera_embedding_rows_updated_total"), updated, "{table}");
            assert_eq!(of("tessera_embedding_rows_nonfinite_total"), 0.0, "{table}");
        }
        let bad_input = |policy| {
            let labels = [("kind", "dense_not_finite"), ("policy", policy)];
            value(&page, "tessera_data_bad_input_total", &labels)
        };
        assert_eq!((bad_input("zero"), bad_input("error")), (2.0, 0.0));
        let stage = |stage| value(&page, "tessera_train_stage_seconds_count", &[("stage", stage)]);
        assert_eq!((stage("lookup"), stage("update_dense")), (4.0, 3.0));

        let lines = project.steps("run");
        assert_eq!(lines[2].loss, None);
        assert_eq!(Some(get("tessera_train_loss")), lines[3].loss);
        let folder = project.path("run/checkpoints").join(step_dir(4));
        let files = std::fs::read_dir(folder).unwrap();
        let bytes: u64 = files.map(|file| file.unwrap().metadata().unwrap().len()).sum();
        assert_eq!(get("tessera_checkpoint_size_bytes"), bytes as f64);
        assert_eq!(get("tessera_checkpoint_last_step"), 4.0);
        assert_eq!(get("tessera_checkpoint_write_seconds_count"), 1.0);
        assert_eq!(get("tessera_checkpoint_failures_total"), 0.0);
    }
}

#[test]
fn input_that_stops_the_run_is_counted_too() {
    let project = Project::new(CONFIG);
    let (page, error) = train(&project, &["data.on_nan_dense=zero"]);
    assert!(error.unwrap().contains("id -1"));
    let labels = [("table", "a"), ("policy", "error")];
    assert_eq!(value(&page, "tessera_embedding_bad_ids_total", &labels), 1.0);
    assert_eq!(value(&page, "tessera_train_steps_total", &[]), 0.0);
    assert_eq!(value(&page, "tessera_embedding_rows_updated_total", &[("table", "a")]), 0.0);

    let project = Project::new(CONFIG);
    let (page, error) = train(&project, &["data.on_bad_id=drop"]);
    assert!(error.unwrap().contains("NaN"));
    let labels = [("kind", "dense_not_finite"), ("policy", "error")];
    assert_eq!(value(&page, "tessera_data_bad_input_total", &labels), 1.0);
    assert_eq!(value(&page, "tessera_train_steps_total", &[]), 1.0);

    let project = Project::new(CONFIG);
    let (page, error) = train(&project, &["data.on_bad_id=drop", "data.on_nan_dense=zero"]);
    assert!(error.unwrap().contains("step 3: "));
    assert_eq!(value(&page, "tessera_train_skipped_steps_total", &[]), 0.0);
    assert_eq!(value(&page, "tessera_train_steps_total", &[]), 2.0);
}
