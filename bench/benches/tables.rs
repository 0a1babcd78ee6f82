//! Micro-benchmarks of embedding tables: lookup, grouping, fused update.
//!
//! Every one is held against a naive computation before it is timed. Tables are larger than the
//! usual last-level cache, so that memory is part of what is measured.

use std::num::NonZeroUsize;
use std::time::Duration;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use tessera_bench::draw::Law;
use tessera_bench::drive::Workload;
use tessera_bench::knobs::{Hots, OptimizerKnob, PrecisionKnob, TableKnobs};
use tessera_bench::requests::{Draw, drawn, ids};
use tessera_bench::tables::{Defaults, Table, features, tables};
use tessera_bench::workloads::{Requests, Tables, Work};
use tessera_data::Batch;
use tessera_device::{Cpu, Device};
use tessera_embedding::{BadIdPolicy, EmbeddingCollection};

const DRAW: Draw = Draw { batch: 512, hots: None, requests: 4, dense: 0, seed: 1 };

fn cpu() -> Cpu {
    Cpu::new(NonZeroUsize::new(1)).expect("a pool of one thread")
}

fn some(knobs: TableKnobs, alpha: f64) -> (Vec<Table>, Vec<Batch>) {
    let defaults = Defaults { tables: 4, rows: 200_000, dim: 64, hots: Hots::fixed(20) };
    let tables = tables(&knobs, defaults).expect("knobs that make sense");
    let requests = drawn(&tables, &Law::Zipf { alpha }, DRAW).expect("a law that makes sense");
    (tables, requests)
}

/// A whole request a round, ids copied outside the clock.
fn serve(criterion: &mut Criterion, name: &str, knobs: TableKnobs, alpha: f64, work: Work) {
    let (tables, requests) = some(knobs, alpha);
    let mut live = Tables::new(&cpu(), &tables, 1).expect("tables that fit memory");
    let mut workload = Requests::new(&mut live, &requests, work).expect("buffers that fit memory");
    workload.check().expect("the right answer");
    let mut group =
        criterion.benchmark_group(if work == Work::Lookup { "lookup" } else { "update" });
    group.throughput(Throughput::Elements(ids(&requests[0])));
    let mut number = 0;
    group.bench_function(name, |bencher| {
        bencher.iter_custom(|rounds| {
            let mut spent = Duration::ZERO;
            for _ in 0..rounds {
                workload.prepare(number).expect("a request");
                number += 1;
                let stages = workload.serve().expect("an answer");
                spent += Duration::from_secs_f64(stages.values().sum());
            }
            spent
        });
    });
    group.finish();
}

fn lookup(criterion: &mut Criterion) {
    for (name, precision) in [
        ("fp32", PrecisionKnob::Fp32),
        ("fp16", PrecisionKnob::Fp16),
        ("bf16", PrecisionKnob::Bf16),
    ] {
        let knobs = TableKnobs { precision: Some(precision), ..TableKnobs::default() };
        serve(criterion, name, knobs, 0.0, Work::Lookup);
    }
    let knobs = TableKnobs { weighted: true, ..TableKnobs::default() };
    serve(criterion, "fp32 weighted", knobs, 0.0, Work::Lookup);
    serve(criterion, "fp32 alpha 1.05", TableKnobs::default(), 1.05, Work::Lookup);
    for dim in [16, 128, 256] {
        let knobs = TableKnobs { dim: vec![dim], ..TableKnobs::default() };
        serve(criterion, &format!("fp32 dim {dim}"), knobs, 0.0, Work::Lookup);
    }
}

fn update(criterion: &mut Criterion) {
    for (name, optimizer) in [
        ("sgd", OptimizerKnob::Sgd),
        ("rowwise_adagrad", OptimizerKnob::RowwiseAdagrad),
        ("adagrad", OptimizerKnob::Adagrad),
        ("adam", OptimizerKnob::Adam),
    ] {
        let knobs = TableKnobs { optimizer: Some(optimizer), ..TableKnobs::default() };
        serve(criterion, name, knobs, 0.0, Work::Update);
    }
    serve(criterion, "rowwise_adagrad alpha 1.05", TableKnobs::default(), 1.05, Work::Update);
}

/// Finding the different rows of a batch and their occurrences.
fn grouping(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("group");
    for alpha in [0.0, 1.05] {
        let (tables, requests) = some(TableKnobs::default(), alpha);
        let (cpu, request) = (cpu(), &requests[0]);
        let stream = cpu.stream().expect("a stream");
        let specs = tables.iter().map(|table| table.spec.clone()).collect();
        let (features, _) = features(&tables);
        let collection = EmbeddingCollection::new(cpu, &stream, specs, features, 1)
            .expect("tables that fit memory");
        let resolve = || {
            collection
                .resolve(&stream, request.features().to_vec(), BadIdPolicy::Error)
                .expect("good ids")
        };
        let lookup = resolve();
        for table in 0..tables.len() {
            let mut want: Vec<u64> =
                request.features()[table].ids().iter().map(|id| id.0 as u64).collect();
            want.sort_unstable();
            want.dedup();
            let rows = collection.resolver().unique_rows(&stream, &lookup, table);
            let got: Vec<u64> = rows.expect("a table").iter().map(|row| row.0).collect();
            assert_eq!(got, want, "the right answer");
        }
        group.throughput(Throughput::Elements(ids(request)));
        group.bench_function(format!("alpha {alpha}"), |bencher| {
            bencher.iter_batched(
                resolve,
                |lookup| {
                    collection.resolver().group(&stream, &lookup).expect("a grouping");
                    lookup
                },
                BatchSize::PerIteration,
            );
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(2));
    targets = lookup, grouping, update
}
criterion_main!(benches);
