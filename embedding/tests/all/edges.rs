//! Empty things, limits, shared tables, bad numbers, and errors that name their place.

use prometheus::Registry;
use tessera_device::{Cpu, Device, DeviceError};
use tessera_embedding::{
    BadIdPolicy, Clip, EmbeddingCollection, EmbeddingError, EmbeddingMetrics, FeatureSpec, Init,
    Pooling, Precision, SparseOptimizer, SparseStep, TableSpec, WeightDecay,
};

use crate::common::{
    all_bits, any_cpu, buffer, every_optimizer, feature, jagged, machines, one_hot, state, stream,
    table, weights,
};

const SGD: SparseOptimizer = SparseOptimizer::Sgd { lr: 1.0 };

fn make(tables: Vec<TableSpec>, features: Vec<FeatureSpec>) -> EmbeddingCollection<Cpu> {
    let cpu = any_cpu();
    let stream = stream(&cpu);
    EmbeddingCollection::new(cpu, &stream, tables, features, 3).unwrap()
}

#[test]
fn a_batch_without_bags_or_ids_is_a_step_that_moves_nothing() {
    for cpu in machines(&[1, 2]) {
        let stream = stream(&cpu);
        for optimizer in every_optimizer() {
            let tables = vec![table("a", 5, 3, optimizer), table("none", 0, 2, optimizer)];
            let features = vec![feature("f", 0, 0), feature("g", 1, 3)];
            let mut tables =
                EmbeddingCollection::new(cpu.clone(), &stream, tables, features, 1).unwrap();
            let before = all_bits(&tables);
            for bags in [0, 4] {
                let empty = || jagged(&vec![0; bags + 1], &[], None);
                let mut lookup =
                    tables.resolve(&stream, vec![empty(), empty()], BadIdPolicy::Error).unwrap();
                assert_eq!(lookup.bags(), bags);
                let mut out = buffer(&vec![7.0; bags * 5]);
                tables.forward(&stream, &mut lookup, &mut out, 5).unwrap();
                assert!(out.iter().all(|&x| x == 0.0));
                let step = SparseStep::new(1);
                let stats = tables.update(&stream, &lookup, &out, 5, &step).unwrap();
                assert_eq!(stats.rows_updated, [0, 0]);
                assert_eq!(tables.grad_sq_norm(&stream, &lookup, &out, 5).unwrap(), 0.0);
                assert_eq!(tables.resolver().unique_counts(&stream, &lookup).unwrap(), [0, 0]);
            }
            assert_eq!(all_bits(&tables), before);
        }
    }
}

#[test]
fn an_id_of_a_table_without_rows_is_an_error() {
    let tables = make(vec![table("none", 0, 2, SGD)], vec![feature("f", 0, 0)]);
    let stream = stream(tables.device());
    let error = tables.resolve(&stream, vec![one_hot(&[0])], BadIdPolicy::Error).unwrap_err();
    assert_eq!(
        error.to_string(),
        "lookup: id 0 out of range for table none of 0 rows (feature f, sample 0)"
    );
}

#[test]
fn the_first_bad_id_is_named_and_nothing_was_written() {
    let features = vec![feature("x", 1, 0), feature("y", 0, 4)];
    let tables = make(vec![table("a", 10, 2, SGD), table("b", 4, 2, SGD)], features);
    let stream = stream(tables.device());
    for id in [10, -1, i64::MAX] {
        let batch = vec![one_hot(&[0, 3, 1]), one_hot(&[9, id, -5])];
        let error = tables.resolve(&stream, batch, BadIdPolicy::Error).unwrap_err();
        assert_eq!(
            error.to_string(),
            format!("lookup: id {id} out of range for table a of 10 rows (feature y, sample 1)")
        );
    }
    let short = vec![one_hot(&[0, 3, 1]), one_hot(&[9])];
    let error = tables.resolve(&stream, short, BadIdPolicy::Error).unwrap_err();
    assert_eq!(error.to_string(), "lookup: feature y has 1 bags; feature x has 3");
}

#[test]
fn features_that_share_a_table_add_to_one_gradient_and_one_update() {
    // The map [1, 0, 1] is in no order; row 2 of table 1 occurs in two features and twice in one.
    let features = vec![feature("x", 1, 0), feature("y", 0, 2), feature("z", 1, 4)];
    let tables = vec![table("a", 3, 2, SGD), table("b", 3, 2, SGD)];
    let mut tables = make(tables, features);
    let stream = stream(tables.device());
    tables.write_weights(&stream, 0, 0..3, &[0.0; 6]).unwrap();
    tables.write_weights(&stream, 1, 0..3, &[0.0; 6]).unwrap();
    let batch = vec![
        jagged(&[0, 2, 3], &[2, 2, 0], None),
        jagged(&[0, 0, 1], &[2], None),
        jagged(&[0, 0, 1], &[2], Some(&[0.5])),
    ];
    let lookup = tables.resolve(&stream, batch, BadIdPolicy::Error).unwrap();
    assert_eq!(lookup.rows_read(), [1, 4]);
    let grad = buffer(&[
        1.0, 2.0, 99.0, 99.0, 99.0, 99.0, // bag 0: x has an id
        3.0, 4.0, 5.0, 6.0, 7.0, 8.0, // bag 1: all have
    ]);
    // Row 2 of b: 2 * (1, 2) + 0.5 * (7, 8).
    let norm = 5.5f64.powi(2) + 8.0f64.powi(2) + 25.0 + 61.0;
    assert_eq!(tables.grad_sq_norm(&stream, &lookup, &grad, 6).unwrap(), norm);
    let stats = tables.update(&stream, &lookup, &grad, 6, &SparseStep::new(1)).unwrap();
    assert_eq!(stats.rows_updated, [1, 2]);
    assert_eq!(weights(&tables, 0), [0.0, 0.0, 0.0, 0.0, -5.0, -6.0]);
    assert_eq!(weights(&tables, 1), [-3.0, -4.0, 0.0, 0.0, -5.5, -8.0]);
}

#[test]
fn without_pooling_every_bag_gives_and_takes_its_row() {
    let mut spec = table("t", 4, 3, SGD);
    spec.pooling = Pooling::None;
    let mut tables = make(vec![spec], vec![feature("f", 0, 0)]);
    let stream = stream(tables.device());
    let before = weights(&tables, 0);
    let mut lookup =
        tables.resolve(&stream, vec![one_hot(&[3, 1, 3])], BadIdPolicy::Error).unwrap();
    let mut out = buffer(&[0.0; 9]);
    tables.forward(&stream, &mut lookup, &mut out, 3).unwrap();
    assert_eq!(out[..3], before[9..]);
    assert_eq!(out[3..6], before[3..6]);
    assert_eq!(out[6..], before[9..]);
    let grad = buffer(&[1.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0, 4.0]);
    tables.update(&stream, &lookup, &grad, 3, &SparseStep::new(1)).unwrap();
    let after = weights(&tables, 0);
    assert_eq!(after[9..], [before[9] - 1.0, before[10], before[11] - 4.0]);
    assert_eq!(after[3..6], [before[3], before[4] - 2.0, before[5]]);
    assert_eq!(after[..3], before[..3]);
}

#[test]
fn policies_count_bad_ids_a_table() {
    let features = vec![feature("x", 0, 0), feature("y", 1, 2)];
    let mut tables = make(vec![table("a", 4, 2, SGD), table("b", 4, 2, SGD)], features);
    let stream = stream(tables.device());
    let registry = Registry::new();
    let metrics = EmbeddingMetrics::new(["a", "b"], Some(&registry)).unwrap();
    let w = weights(&tables, 0);
    for (policy, first) in
        [(BadIdPolicy::Drop, [0.0, 0.0]), (BadIdPolicy::DefaultRow, [w[0], w[1]])]
    {
        let batch = vec![one_hot(&[4, 1]), jagged(&[0, 2, 3], &[-1, 2, 77], None)];
        let mut lookup = tables.resolve(&stream, batch, policy).unwrap();
        assert_eq!(lookup.bad_ids(), [1, 2]);
        let mut out = buffer(&[9.0; 8]);
        tables.forward(&stream, &mut lookup, &mut out, 4).unwrap();
        assert_eq!(out[..2], first);
        assert_eq!(out[4..6], w[2..4]);
        metrics.observe_lookup(&lookup, 0.001);
    }
    for table in 0..tables.schema().tables().len() {
        metrics.set_resident(table, tables.resident_bytes(table).unwrap());
    }
    let families = registry.gather();
    let value = |name: &str, labels: [&str; 2]| {
        let family = families.iter().find(|family| family.name() == name).unwrap();
        let metric = family
            .get_metric()
            .iter()
            .find(|metric| metric.get_label().iter().all(|label| labels.contains(&label.value())));
        let metric = metric.unwrap();
        metric.get_counter().get_value() + metric.get_gauge().get_value()
    };
    assert_eq!(value("tessera_embedding_bad_ids_total", ["a", "drop"]), 1.0);
    assert_eq!(value("tessera_embedding_bad_ids_total", ["b", "default_row"]), 2.0);
    assert_eq!(value("tessera_embedding_bad_ids_total", ["b", "error"]), 0.0);
    assert_eq!(value("tessera_embedding_rows_read_total", ["b", ""]), 4.0);
    assert_eq!(value("tessera_embedding_resident_bytes", ["a", ""]), 32.0);
}

/// 0/0 elsewhere: LAMB's ratio of norms, AdaGrad's quotient at eps = 0.
#[test]
fn a_zero_gradient_never_makes_a_nan() {
    for cpu in machines(&[1]) {
        let stream = stream(&cpu);
        for optimizer in every_optimizer() {
            let optimizer = match optimizer {
                SparseOptimizer::Adagrad { lr, decay, .. } => {
                    SparseOptimizer::Adagrad { lr, eps: 0.0, decay }
                }
                SparseOptimizer::RowwiseAdagrad { lr, decay, moment_scale, .. } => {
                    SparseOptimizer::RowwiseAdagrad { lr, eps: 0.0, decay, moment_scale }
                }
                SparseOptimizer::Adam { lr, beta1, beta2, weight_decay, .. } => {
                    SparseOptimizer::Adam { lr, eps: 0.0, beta1, beta2, weight_decay }
                }
                SparseOptimizer::Lamb { lr, beta1, beta2, weight_decay, .. } => {
                    SparseOptimizer::Lamb { lr, eps: 0.0, beta1, beta2, weight_decay }
                }
                SparseOptimizer::PartialRowwiseLamb { lr, beta1, beta2, weight_decay, .. } => {
                    SparseOptimizer::PartialRowwiseLamb { lr, eps: 0.0, beta1, beta2, weight_decay }
                }
                SparseOptimizer::Ftrl { lr, .. } => {
                    SparseOptimizer::Ftrl { lr, beta: 0.0, l1: 0.0, l2: 0.0 }
                }
                other => other,
            };
            for zero_weights in [false, true] {
                let mut spec = table("t", 2, 5, optimizer);
                if zero_weights {
                    spec.init = Init::Zero;
                }
                let mut tables = EmbeddingCollection::new(
                    cpu.clone(),
                    &stream,
                    vec![spec],
                    vec![feature("f", 0, 0)],
                    1,
                )
                .unwrap();
                for t in 1..=3 {
                    let grad = if t == 2 { [1e-3; 5] } else { [0.0; 5] };
                    let lookup =
                        tables.resolve(&stream, vec![one_hot(&[1])], BadIdPolicy::Error).unwrap();
                    let stats = tables
                        .update(&stream, &lookup, &buffer(&grad), 5, &SparseStep::new(t))
                        .unwrap();
                    assert_eq!(stats.rows_updated, [1], "{optimizer:?} step {t}");
                }
                let bits = all_bits(&tables);
                assert!(bits.iter().all(|&b| f32::from_bits(b).is_finite()), "{optimizer:?}");
            }
        }
    }
}

#[test]
fn numbers_that_are_not_finite_are_never_written() {
    for optimizer in every_optimizer() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            // A limit must not turn an infinite gradient into an ordinary one.
            for clip in [Clip::None, Clip::Value(1.0)] {
                let mut tables = make(vec![table("t", 3, 13, optimizer)], vec![feature("f", 0, 0)]);
                let stream = stream(tables.device());
                let before = all_bits(&tables);
                let w = weights(&tables, 0);
                let ids = vec![one_hot(&[2, 0])];
                let lookup = tables.resolve(&stream, ids, BadIdPolicy::Error).unwrap();
                let mut grad = [0.5; 26];
                grad[12] = bad; // last column of row 2
                let step = SparseStep { t: 1, lr_scale: 1.0, clip };
                let norm = tables.grad_sq_norm(&stream, &lookup, &buffer(&grad), 13).unwrap();
                assert!(!norm.is_finite());
                let stats = tables.update(&stream, &lookup, &buffer(&grad), 13, &step).unwrap();
                assert_eq!((stats.rows_updated[0], stats.nonfinite()), (1, 1));
                let after = weights(&tables, 0);
                assert_eq!(after[13..], w[13..], "{optimizer:?}");
                assert_ne!(after[..13], w[..13], "{optimizer:?}");
                assert!(all_bits(&tables).iter().all(|&b| f32::from_bits(b).is_finite()));
                assert_ne!(all_bits(&tables), before);
            }
        }
    }
}

#[test]
fn a_row_that_would_overflow_stays_whole() {
    let decay = WeightDecay::None;
    let optimizer = SparseOptimizer::Adagrad { lr: 1.0, eps: 0.0, decay };
    let mut tables = make(vec![table("t", 2, 4, optimizer)], vec![feature("f", 0, 0)]);
    let stream = stream(tables.device());
    let before = all_bits(&tables);
    let lookup = tables.resolve(&stream, vec![one_hot(&[1])], BadIdPolicy::Error).unwrap();
    // The square of 1e30 has no float32.
    let grad = buffer(&[1.0, 1e30, 1.0, 1.0]);
    let stats = tables.update(&stream, &lookup, &grad, 4, &SparseStep::new(1)).unwrap();
    assert_eq!((stats.rows_updated[0], stats.rows_nonfinite[0]), (0, 1));
    assert_eq!(all_bits(&tables), before);
}

#[test]
fn ftrl_stays_at_a_rate_of_zero() {
    let optimizer = SparseOptimizer::Ftrl { lr: 0.1, beta: 1.0, l1: 0.0, l2: 0.0 };
    let mut tables = make(vec![table("t", 2, 4, optimizer)], vec![feature("f", 0, 0)]);
    let stream = stream(tables.device());
    let before = all_bits(&tables);
    let lookup = tables.resolve(&stream, vec![one_hot(&[1])], BadIdPolicy::Error).unwrap();
    let step = SparseStep { t: 1, lr_scale: 0.0, clip: Clip::None };
    let stats = tables.update(&stream, &lookup, &buffer(&[1.0; 4]), 4, &step).unwrap();
    assert_eq!(stats.nonfinite(), 0);
    assert_eq!(all_bits(&tables), before);
}

/// More than 2^31 elements and more than 2^32 rows, in a map whose pages nobody touches but the
/// last: offsets are 64 bits, and so are the keys of the grouping.
#[test]
fn the_last_rows_of_a_huge_table_are_their_own() {
    let rows = (1u64 << 32) + 5;
    let mut spec = table("huge", rows, 1, SGD);
    (spec.precision, spec.init) = (Precision::Fp16, Init::Zero);
    let cpu = any_cpu();
    let stream = stream(&cpu);
    let features = vec![feature("f", 0, 0), feature("g", 0, 1)];
    let mut tables = match EmbeddingCollection::new(cpu, &stream, vec![spec], features, 1) {
        Err(EmbeddingError::Store {
            source: tessera_cache::CacheError::Device(DeviceError::OutOfMemory { bytes, .. }),
            ..
        }) if std::env::var("CI").as_deref() != Ok("true") => {
            println!("skipped: this system maps no {bytes} bytes that nobody will touch");
            return;
        }
        made => made.unwrap(),
    };
    assert_eq!(tables.resident_bytes(0).unwrap(), rows * 2);
    let last = rows as i64 - 1;
    let near = last - (1 << 32); // the same number in 32 bits
    let batch =
        || vec![one_hot(&[last, near, 0, last]), jagged(&[0, 0, 2, 2, 2], &[near, last], None)];
    let mut lookup = tables.resolve(&stream, batch(), BadIdPolicy::Error).unwrap();
    let grad = buffer(&[1.0, 0.0, 2.0, 16.0, 4.0, 0.0, 8.0, 0.0]); // (4, 2)
    let stats = tables.update(&stream, &lookup, &grad, 2, &SparseStep::new(1)).unwrap();
    assert_eq!(stats.rows_updated, [3]);
    let mut out = buffer(&[0.0; 8]);
    tables.forward(&stream, &mut lookup, &mut out, 2).unwrap();
    // Row last: 1 + 8 + 16; row near: 2 + 16; row 0: 4.
    assert_eq!(out[..], [-25.0, 0.0, -18.0, -43.0, -4.0, 0.0, -25.0, 0.0]);
    let rows_of = tables.resolver().unique_rows(&stream, &lookup, 0).unwrap();
    assert_eq!(rows_of.iter().map(|row| row.0 as i64).collect::<Vec<_>>(), [0, near, last]);
    let mut end = [1.0; 2];
    tables.read_weights(&stream, 0, rows - 2..rows, &mut end).unwrap();
    assert_eq!(end, [0.0, -25.0]);
    let error =
        tables.resolve(&stream, vec![one_hot(&[last + 1]), one_hot(&[0])], BadIdPolicy::Error);
    assert!(error.unwrap_err().to_string().contains("of 4294967301 rows"));
}

#[test]
fn sizes_beyond_the_address_space_are_errors_with_the_numbers() {
    let cpu = any_cpu();
    let stream = stream(&cpu);
    for (rows, dim) in [(1 << 40, 1 << 30), (u64::MAX, 1), (1, usize::MAX), (1, usize::MAX / 5)] {
        let tables = vec![table("t", rows, dim, every_optimizer()[1])];
        let error = EmbeddingCollection::new(cpu.clone(), &stream, tables, vec![], 1).unwrap_err();
        assert!(error.to_string().contains(&format!("table t: row store: {rows} rows")), "{error}");
    }
}

#[test]
fn state_of_a_range_is_read_and_written_alone() {
    let optimizer = SparseOptimizer::PartialRowwiseAdam {
        lr: 0.1,
        eps: 1e-8,
        beta1: 0.9,
        beta2: 0.999,
        weight_decay: 0.0,
    };
    // Rows so many that the copies go in several pieces.
    let (rows, dim) = (70_000u64, 7);
    let mut tables = make(vec![table("t", rows, dim, optimizer)], vec![]);
    let stream = stream(tables.device());
    let m: Vec<f32> = (0..rows as usize * dim).map(|i| i as f32).collect();
    let v: Vec<f32> = (0..rows).map(|i| -(i as f32)).collect();
    tables.write_state(&stream, 0, "m", 0..rows, &m).unwrap();
    tables.write_state(&stream, 0, "v", 0..rows, &v).unwrap();
    assert!(state(&tables, 0, "m") == m && state(&tables, 0, "v") == v);
    tables.write_state(&stream, 0, "v", 5..7, &[50.0, 60.0]).unwrap();
    let mut back = [0.0; 4];
    tables.read_state(&stream, 0, "v", 4..8, &mut back).unwrap();
    assert_eq!(back, [-4.0, 50.0, 60.0, -7.0]);
    assert!(state(&tables, 0, "m") == m);
    assert_eq!(tables.resident_bytes(0).unwrap(), rows * (7 + 8) * 4);

    let error = tables.read_state(&stream, 0, "sum", 0..1, &mut [0.0]).unwrap_err().to_string();
    assert_eq!(
        error,
        "table t keeps no state `sum`; its optimizer partial_rowwise_adam keeps: m, v"
    );
    let error = tables.read_state(&stream, 0, "v", 0..2, &mut [0.0]).unwrap_err().to_string();
    assert_eq!(error, "read state: 1 values of table t for rows 0..2; 2 are needed");
    let error = tables.write_weights(&stream, 0, rows..rows + 1, &[0.0; 7]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "table t: row store: cannot write weights of rows 70000..70001: the store has 70000 rows"
    );
    let error = tables.write_state(&stream, 1, "v", 0..1, &[0.0]).unwrap_err().to_string();
    assert_eq!(error, "no table number 1: there are 1");
}

#[test]
fn buffers_strides_steps_and_lookups_that_do_not_fit_are_errors() {
    let mut tables = make(vec![table("t", 3, 4, SGD)], vec![feature("f", 0, 2)]);
    let mut other = make(vec![table("t", 3, 4, SGD)], vec![feature("f", 0, 2)]);
    let stream = stream(tables.device());
    let mut lookup = tables.resolve(&stream, vec![one_hot(&[1, 2])], BadIdPolicy::Error).unwrap();
    let mut out = buffer(&[0.0; 12]);
    let error = tables.forward(&stream, &mut lookup, &mut out, 5).unwrap_err().to_string();
    assert_eq!(error, "lookup: a row stride of 5 columns; the features end at column 6");
    let error = tables.forward(&stream, &mut lookup, &mut out, 7).unwrap_err().to_string();
    assert_eq!(error, "lookup: a buffer of 12 elements; 2 bags of 7 columns need 14");
    let error = other.forward(&stream, &mut lookup, &mut out, 6).unwrap_err();
    assert!(matches!(error, EmbeddingError::ForeignLookup { operation: "lookup" }));
    let before = all_bits(&tables);
    let step = SparseStep::new(0);
    let error = tables.update(&stream, &lookup, &out, 6, &step).unwrap_err();
    assert!(matches!(error, EmbeddingError::StepZero));
    for (lr_scale, clip, named) in [
        (f32::NAN, Clip::None, "lr_scale is NaN"),
        (1.0, Clip::Value(-1.0), "clip value is -1"),
        (1.0, Clip::Scale(f32::INFINITY), "clip scale is inf"),
    ] {
        let step = SparseStep { t: 1, lr_scale, clip };
        let error = tables.update(&stream, &lookup, &out, 6, &step).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    assert_eq!(all_bits(&tables), before);
    tables.forward(&stream, &mut lookup, &mut out, 6).unwrap();
    assert_eq!(tables.device().info().kind, "cpu");
}
