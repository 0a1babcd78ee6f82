//! Micro-benchmark of parsing Criteo TSV, on a file made up here. One thread, from the page
//! cache; what it parses is held against the values that were written.

use std::fmt::Write as _;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use tessera_bench::draw::Rng;
use tessera_data::{FeatureSpec, Format, Schema, SourceSpec, category_row, log1p, open};

const LINES: usize = 20_000;
const ROWS: u64 = 100_000;

fn parsing(criterion: &mut Criterion) {
    let mut rng = Rng::new(1);
    let (mut text, mut integers, mut categories) = (String::new(), Vec::new(), Vec::new());
    for line in 0..LINES {
        write!(text, "{}", line % 4 / 3).expect("text takes text");
        for _ in 0..13 {
            // Small numbers mostly, a tenth missing, as in the real files.
            let value = (10f64.powf(4.0 * rng.unit()) - 2.0) as i64;
            let missing = rng.below(10) == 0;
            integers.push(if missing { 0 } else { value });
            text.push('\t');
            if !missing {
                write!(text, "{value}").expect("text takes text");
            }
        }
        for _ in 0..26 {
            let value = rng.bits() as u32;
            let missing = rng.below(10) == 0;
            categories.push((!missing).then_some(value));
            text.push('\t');
            if !missing {
                write!(text, "{value:08x}").expect("text takes text");
            }
        }
        text.push('\n');
    }
    let file = tempfile::NamedTempFile::with_suffix(".tsv").expect("a temporary file");
    std::fs::write(file.path(), &text).expect("a temporary file");
    let schema = Schema {
        dense: (1..=13).map(|i| format!("i{i}")).collect(),
        features: (1..=26).map(|i| FeatureSpec::one_hot(format!("c{i}"), ROWS)).collect(),
        label: "label".into(),
        sample_weight: None,
        group: None,
    };
    let spec = SourceSpec::files(Format::CriteoTsv, vec![file.path().into()], schema);

    let all = open(&spec).expect("a good file").read(LINES).expect("good lines");
    assert_eq!(all.samples(), LINES);
    for (i, &value) in integers.iter().enumerate() {
        assert_eq!(all.dense()[i], log1p(value as f32), "the right answer");
    }
    for (i, &value) in categories.iter().enumerate() {
        let want = value.map_or(0, |value| category_row(u64::from(value), ROWS));
        assert_eq!(all.features()[i % 26].ids()[i / 26].0 as u64, want, "the right answer");
    }

    let mut group = criterion.benchmark_group("criteo-tsv");
    group.throughput(Throughput::Bytes(text.len() as u64));
    group.bench_function("batches of 2048", |bencher| {
        bencher.iter(|| {
            let mut reader = open(&spec).expect("a good file");
            let mut samples = 0;
            loop {
                let batch = reader.read(2048).expect("good lines");
                if batch.samples() == 0 {
                    return samples;
                }
                samples += batch.samples();
            }
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(3));
    targets = parsing
}
criterion_main!(benches);
