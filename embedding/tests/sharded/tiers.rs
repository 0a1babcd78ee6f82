//! Rows that move between tiers: the same bits as rows that stay, on one rank and on several.

use std::num::NonZeroUsize;

use tessera_cache::Policy;
use tessera_cache::log::Reader;
use tessera_data::{Jagged, RawId};
use tessera_device::{Cpu, Device};
use tessera_embedding::plan::{Route, Sharding};
use tessera_embedding::{
    BadIdPolicy, ColdTier, EmbeddingCollection, EmbeddingError, Precision, SparseStep, Tiers,
};

use crate::common::{
    Case, EXACT, SEED, case, on_one_rank, on_one_rank_with, on_ranks, on_ranks_with, plan,
};

/// Tiers without an SSD, then with one that most rows must go to, for each policy.
fn every_kind(device_bytes: u64, dir: &std::path::Path) -> Vec<Tiers> {
    let mut all = Vec::new();
    for policy in [Policy::Lru, Policy::Lfu, Policy::NextUse] {
        all.push(Tiers { device_bytes, host_bytes: None, cold: None, policy });
        for host_bytes in [0, 3000] {
            let dir = dir.join(format!("{policy:?}-{host_bytes}"));
            let reader = if host_bytes == 0 { Reader::Auto } else { Reader::Mmap };
            let cold = Some(ColdTier { dir, bytes: None, reader });
            all.push(Tiers { device_bytes, host_bytes: Some(host_bytes), cold, policy });
        }
    }
    all
}

#[test]
fn any_tiers_give_the_bits_of_rows_that_stay() {
    let dir = tempfile::tempdir().unwrap();
    for precision in [Precision::Fp32, Precision::Bf16] {
        let case = case(&[9, 1, 7, 0, 12, 9], precision, 2);
        let resident = on_one_rank(&case);
        // Little: a batch needs passes. More: it fits, and rows come and go between batches.
        for device_bytes in [7_500, 20_000] {
            for tiers in every_kind(device_bytes, dir.path()) {
                assert!(on_one_rank_with(&case, Some(&tiers)) == resident, "{tiers:?}");
            }
        }
    }
}

#[test]
fn so_they_do_on_every_plan() {
    let dir = tempfile::tempdir().unwrap();
    let case = case(&[9, 3, 12, 0, 7], Precision::Fp32, 2);
    for (ranks, sharding, route) in [
        (2, Sharding::TableWise, Route::Unique),
        (3, Sharding::RowWise, Route::Unique),
        (4, Sharding::ColumnWise, Route::Unique),
        (4, Sharding::Grid, Route::Pooled),
        (2, Sharding::DataParallel, Route::Unique),
    ] {
        let plan = plan(&case, ranks, sharding, route);
        let resident = on_ranks(&case, &plan, 1, EXACT);
        for tiers in every_kind(9_000, dir.path()) {
            let moving = on_ranks_with(&case, &plan, 1, EXACT, Some(&tiers));
            assert!(moving == resident, "{ranks} ranks, {sharding:?}, {tiers:?}");
        }
    }
}

/// A stream of one-hot batches over table 0, which has `slots` slots and more rows.
fn ids_of(kind: &str, slots: u64, rows: u64, step: u64) -> Vec<i64> {
    let id = |i: u64| match kind {
        // Every row has just left when it is needed again.
        "cyclic" => (step * slots + i) % (slots + 1),
        "hot" => i % 3,
        "cold" => (step * slots + i) % rows,
        _ => (i % slots) + step % 2 * slots,
    };
    (0..slots).map(|i| id(i) as i64).collect()
}

#[test]
fn adversarial_streams_change_no_bit() {
    let base = case(&[1], Precision::Fp32, 1);
    let (table, slots) = (tessera_embedding::TableSpec { rows: 400, ..base.tables[0].clone() }, 16);
    let features = vec![tessera_embedding::FeatureSpec { name: "a".into(), table: 0, column: 0 }];
    for kind in ["cyclic", "hot", "cold", "alternating"] {
        let batches: Vec<Vec<Jagged>> = (0..40)
            .map(|step| {
                let ids = ids_of(kind, slots, table.rows, step).into_iter().map(RawId).collect();
                vec![Jagged::new(slots as usize, (0..=slots).collect(), ids, None).unwrap()]
            })
            .collect();
        let grads = batches.iter().map(|_| vec![0.25; slots as usize * table.dim]).collect();
        let case = Case {
            tables: vec![table.clone()],
            features: features.clone(),
            width: table.dim,
            batches,
            grads,
            clips: false,
        };
        let resident = on_one_rank(&case);
        let dir = tempfile::tempdir().unwrap();
        for tiers in every_kind(16 * (64 * 4 + 36), dir.path()) {
            assert!(on_one_rank_with(&case, Some(&tiers)) == resident, "{kind}: {tiers:?}");
        }
    }
}

#[test]
fn a_sample_that_fits_no_pass_and_tables_that_fit_no_tier_are_named() {
    let case = case(&[9], Precision::Fp32, 8);
    let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
    let stream = cpu.stream().unwrap();
    let tiers = |device_bytes, host_bytes| Tiers {
        device_bytes,
        host_bytes,
        cold: None,
        policy: Policy::Lru,
    };
    let make = |tiers: &Tiers| {
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let (cpu, tiers) = (cpu.clone(), Some(tiers));
        EmbeddingCollection::with_tiers(cpu, &stream, tables, features, SEED, tiers)
    };
    let error = make(&tiers(7_500, Some(100))).unwrap_err().to_string();
    assert!(error.contains("the host tier has 100"), "{error}");
    let mut tables = make(&tiers(5_000, None)).unwrap();
    let mut lookup = tables.resolve(&stream, case.batches[0].clone(), BadIdPolicy::Error).unwrap();
    let mut out = cpu.alloc::<f32>(9 * case.width).unwrap();
    let error = tables.forward(&stream, &mut lookup, &mut out, case.width).unwrap_err();
    let EmbeddingError::Store { table, source } = &error else { panic!("{error}") };
    assert!(matches!(source, tessera_cache::CacheError::WorkingSet { .. }), "{table}: {source}");
    // By rows it still fits, however few slots there are.
    let stats = tables.update(&stream, &lookup, &out, case.width, &SparseStep::new(1)).unwrap();
    assert!(stats.rows_updated.iter().sum::<u64>() > 0);
}
