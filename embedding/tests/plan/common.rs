//! Where the shared data is, and what every plan must be.

use std::path::PathBuf;

use tessera_embedding::SparseOptimizer;
use tessera_embedding::plan::{COLUMN_BLOCK, Plan, Planned, Shard, Sharding, TableLoad};

/// A file below the folder of shared data, split in lines of cells; `None` where a bare checkout
/// has none. Under CI it must be there.
pub fn csv(path: &str) -> Option<Vec<Vec<String>>> {
    let shared = std::env::var_os("TESSERA_SHARED").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    if !shared.join("data").is_dir() {
        let ci = std::env::var("CI").as_deref() == Ok("true");
        assert!(!ci, "no data at {}: set TESSERA_SHARED", shared.display());
        println!("skipped: no data at {} (set TESSERA_SHARED)", shared.display());
        return None;
    }
    let text = std::fs::read_to_string(shared.join("data").join(path)).unwrap();
    Some(text.lines().skip(1).map(|line| line.split(',').map(str::to_owned).collect()).collect())
}

pub fn adagrad() -> SparseOptimizer {
    let decay = tessera_embedding::WeightDecay::None;
    SparseOptimizer::Adagrad { lr: 0.1, eps: 1e-8, decay }
}

pub fn table(name: &str, rows: u64, dim: usize, ids: f64) -> TableLoad {
    TableLoad::new(name, rows, dim, &adagrad(), vec![ids])
}

/// Every cell of every table is on exactly one rank (on all of them where it is copied), counted
/// in a way of its own; and columns are cut where kernels allow.
pub fn assert_tiled(plan: &Plan) {
    for table in plan.tables() {
        let area = |shard: &Shard| {
            u128::from(shard.rows.end - shard.rows.start) * shard.columns.len() as u128
        };
        let whole = u128::from(table.rows) * table.dim as u128;
        let copies = if table.sharding == Sharding::DataParallel { plan.ranks() } else { 1 };
        let sum: u128 = table.shards.iter().map(area).sum();
        assert_eq!(sum, whole * copies as u128, "{table:?}");
        for (i, a) in table.shards.iter().enumerate() {
            assert!(a.rows.end <= table.rows && a.columns.end <= table.dim, "{table:?}");
            assert!(
                table.dim < COLUMN_BLOCK
                    || a.columns.len() >= COLUMN_BLOCK
                    || a.columns.end == table.dim,
                "{table:?}"
            );
            for b in &table.shards[..i] {
                assert_ne!(a.rank, b.rank, "{table:?}");
                let apart = |a0, a1, b0, b1| a1 <= b0 || b1 <= a0;
                let rows = apart(a.rows.start, a.rows.end, b.rows.start, b.rows.end);
                let columns = apart(
                    a.columns.start as u64,
                    a.columns.end as u64,
                    b.columns.start as u64,
                    b.columns.end as u64,
                );
                assert!(rows || columns || copies > 1, "{a:?} and {b:?} of {}", table.table);
            }
        }
    }
}

/// The report agrees with the plan.
pub fn assert_consistent(planned: &Planned) {
    let plan = &planned.plan;
    assert_tiled(plan);
    let shards: Vec<_> = plan.tables().iter().flat_map(|table| &table.shards).collect();
    assert_eq!(shards.len(), planned.shards.len());
    assert_eq!(planned.ranks.len(), plan.ranks());
    for (rank, load) in planned.ranks.iter().enumerate() {
        let on = || shards.iter().zip(&planned.shards).filter(|(shard, _)| shard.rank == rank);
        assert_eq!(on().map(|(_, load)| load.bytes).sum::<u64>(), load.bytes, "rank {rank}");
        let cost: f64 = on().map(|(_, load)| load.cost_ms).sum();
        assert!(load.cost >= cost * (1.0 - 1e-9), "rank {rank}: {load:?}, {cost}");
        assert!(load.memory_bytes <= planned.capacity_bytes, "rank {rank}: {load:?}");
        assert!(load.bytes <= load.memory_bytes, "rank {rank}: {load:?}");
    }
    let mean = planned.cost_mean();
    if mean > 0.0 {
        let ratio = planned.cost_max() / mean;
        assert!((ratio - planned.max_over_mean).abs() < 1e-9 * ratio);
    }
    assert_eq!(planned.why.len(), plan.tables().len());
}
