//! Key clustering: what it saves, and that it changes the order of samples only.

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;

use tessera::config::Config;
use tessera::pipeline::Clusterer;
use tessera::signals::Signals;
use tessera::source::{Batches, Next};
use tessera_data::{Batch, BatchParts, DataMetrics, Event, Jagged, Position, RawId};
use tessera_embedding::micro_batches;

use crate::common::golden::{agrees, project};
use crate::common::shared::shared;

/// Different keys of each micro-batch, added up, naively.
fn keys_of(batch: &Batch, tables: &[usize], parts: usize) -> u64 {
    let keys = |samples: Range<usize>| {
        let mut keys = HashSet::new();
        for (feature, &table) in batch.features().iter().zip(tables) {
            for sample in samples.clone() {
                keys.extend(feature.bag(sample).iter().map(|id| (table, id.0)));
            }
        }
        keys.len() as u64
    };
    micro_batches(batch.samples(), parts).into_iter().map(keys).sum()
}

/// Different keys of all micro-batches with and without clustering, over the first batches of a
/// configuration's data.
fn unique(config: &Config, parts: usize, batches: usize) -> (u64, u64) {
    let tables: Vec<usize> = config.features().map(|(table, _, _)| table).collect();
    let (metrics, signals) = (DataMetrics::unregistered(), Signals::default());
    let data = Batches::train(config, Position::default(), &metrics, &signals);
    let mut data = data.unwrap().unwrap();
    let (mut plain, mut clustered, mut clusterer) = (0, 0, Clusterer::default());
    for _ in 0..batches {
        let Next::Event(Event::Batch { batch, .. }) = data.next_event().unwrap() else {
            panic!("there are batches")
        };
        let done = clusterer.order(&batch, &tables, parts);
        let mut sorted = done.order.clone();
        sorted.sort_unstable();
        assert!(sorted.iter().copied().eq(0..batch.samples()), "each sample once");
        assert_eq!(done.keys_before, keys_of(&batch, &tables, parts));
        assert_eq!(done.keys_after, keys_of(&batch.reordered(&done.order), &tables, parts));
        plain += done.keys_before;
        clustered += done.keys_after;
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

/// Samples of sessions: 16 a session, which share a user and a page of items, mixed with those of all
/// other sessions of the batch; one feature more is of its own for each sample.
fn sessions(sessions: usize, samples_each: usize, seed: u64) -> Batch {
    let samples = sessions * samples_each;
    // A multiplier that is odd and no power of two mixes a batch of 2^n samples.
    let session = |sample: usize| (sample * 0x9E37_79B1 + seed as usize) % samples / samples_each;
    let feature = |ids: Vec<RawId>, each: usize| {
        Jagged::from_lengths(&vec![each as u64; samples], ids, None).unwrap()
    };
    let each = |samples: usize, f: &dyn Fn(usize) -> i64| (0..samples).map(f).map(RawId).collect();
    let users = each(samples, &|sample| session(sample) as i64);
    let items = (0..samples)
        .flat_map(|sample| (0..4).map(move |item| (sample, item)))
        .map(|(sample, item)| RawId((session(sample) * 4 + item) as i64))
        .collect();
    let own = each(samples, &|sample| sample as i64);
    Batch::new(BatchParts {
        dense_features: 0,
        dense: Vec::new(),
        labels: vec![0.0; samples],
        sample_weights: None,
        groups: None,
        features: vec![feature(users, 1), feature(items, 4), feature(own, 1)],
        provenance: None,
    })
    .unwrap()
}

#[test]
fn samples_of_a_session_meet() {
    let mut clusterer = Clusterer::default();
    for (parts, least) in [(2, 1.2), (4, 1.6), (8, 2.1)] {
        let batch = sessions(128, 16, 7);
        let done = clusterer.order(&batch, &[0, 1, 2], parts);
        let factor = done.keys_before as f64 / done.keys_after as f64;
        eprintln!(
            "sessions in {parts} parts: {} keys, clustered {}: {factor:.3}",
            done.keys_before, done.keys_after
        );
        // Every session in one part: none of its keys twice, but at the cuts.
        assert!(done.keys_after <= 128 * 5 + 2048 + 5 * parts as u64);
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
