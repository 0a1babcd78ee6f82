//! Key clustering: what it saves, and that it changes the order of samples only.

use std::path::Path;

use tessera::config::Config;
use tessera::pipeline::{order, unique_keys};
use tessera::signals::Signals;
use tessera::source::{Batches, Next};
use tessera_data::{DataMetrics, Event, Position};

use crate::common::golden::{agrees, project};
use crate::common::shared::shared;

/// Different keys of all micro-batches with and without clustering, over the first batches of a
/// configuration's data.
fn unique(config: &Config, parts: usize, batches: usize) -> (u64, u64) {
    let tables: Vec<usize> = config.features().map(|(table, _, _)| table).collect();
    let (metrics, signals) = (DataMetrics::unregistered(), Signals::default());
    let data = Batches::train(config, Position::default(), &metrics, &signals);
    let mut data = data.unwrap().unwrap();
    let (mut plain, mut clustered) = (0, 0);
    for _ in 0..batches {
        let Next::Event(Event::Batch { batch, .. }) = data.next_event().unwrap() else {
            panic!("there are batches")
        };
        plain += unique_keys(&batch, &tables, parts);
        let order = order(&batch, &tables);
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..batch.samples()), "each sample once");
        clustered += unique_keys(&batch.reordered(&order), &tables, parts);
    }
    (plain, clustered)
}

#[test]
fn fewer_keys_are_shared_by_micro_batches() {
    let Some(shared) = shared() else { return };
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/criteo-80k.toml");
    let files = (1..=4).map(|part| shared.join(format!("data/criteo-80k/part{part}.tsv")));
    let files: Vec<String> =
        files.map(|path| format!("{:?}", path.display().to_string())).collect();
    let set = [format!("data.train=[{}]", files.join(", ")), "data.batch_size=2048".to_owned()];
    let config = Config::load(Path::new(example), &set).unwrap();
    for (parts, least) in [(2, 1.03), (4, 1.06), (8, 1.08)] {
        let (plain, clustered) = unique(&config, parts, 8);
        let factor = plain as f64 / clustered as f64;
        eprintln!("criteo-80k in {parts} parts: {plain} keys, clustered {clustered}: {factor:.3}");
        assert!(factor > least, "{parts} parts: {factor}");
    }
}

#[test]
fn a_clustered_run_agrees_with_the_reference_and_in_all_modes_to_the_bit() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_jagged_adam");
    let project = project(&golden);
    for ranks in [1, 2] {
        for mode in ["serial", "prefetch", "nested"] {
            project.ok(&format!(
                "train golden/config.toml --init golden/init.safetensors --out {ranks}-{mode} \
                 --set parallel.ranks={ranks} --set threads={ranks} \
                 --set pipeline.mode={mode} --set pipeline.micro_batches=4 \
                 --set pipeline.cluster=keys"
            ));
        }
        let serial = format!("{ranks}-serial");
        agrees(&project, &golden, &serial);
        for mode in ["prefetch", "nested"] {
            let other = format!("{ranks}-{mode}");
            assert_eq!(project.steps(&serial), project.steps(&other));
            assert!(project.export(&serial) == project.export(&other), "{other}");
        }
    }
}
