//! The checks of a plan, its file, and what the planner does with small cases.

use std::ops::Range;

use tessera_embedding::plan::{
    Budget, Grid2d, IdCounter, Placement, Plan, PlanFile, Planned, Route, Shard, Sharding,
    TableLoad, TablePlan, Topology, Workload, curve, plan,
};
use tessera_embedding::{EmbeddingError, Result, SparseOptimizer};

use crate::common::{adagrad, assert_consistent, table};

fn shard(rank: usize, rows: Range<u64>, columns: Range<usize>) -> Shard {
    Shard { rank, rows, columns }
}

/// A table of 6 rows and 96 columns.
fn spread(sharding: Sharding, shards: Vec<Shard>) -> TablePlan {
    TablePlan { table: "t".into(), rows: 6, dim: 96, sharding, route: Route::Pooled, shards }
}

/// On 4 ranks in nodes of 2.
fn checked(sharding: Sharding, shards: Vec<Shard>) -> Result<Plan> {
    Plan::new(4, 2, 1, vec![spread(sharding, shards)])
}

/// Faults of a plan, one of them this.
#[track_caller]
fn refused(sharding: Sharding, shards: Vec<Shard>, part: &str) {
    match checked(sharding, shards) {
        Err(EmbeddingError::Plan { faults }) => {
            assert!(faults.iter().any(|fault| fault.contains(part)), "{part}: {faults:?}");
            assert!(faults.iter().all(|fault| fault.contains("table t: ")), "{faults:?}");
        }
        other => panic!("{part}: {other:?}"),
    }
}

/// A sound plan of each kind.
fn sound(sharding: Sharding) -> Vec<Shard> {
    match sharding {
        Sharding::DataParallel => (0..4).map(|rank| shard(rank, 0..6, 0..96)).collect(),
        Sharding::TableWise => vec![shard(3, 0..6, 0..96)],
        Sharding::ColumnWise => vec![shard(2, 0..6, 0..64), shard(0, 0..6, 64..96)],
        Sharding::RowWise => vec![
            shard(0, 0..2, 0..96),
            shard(1, 2..4, 0..96),
            shard(2, 4..6, 0..96),
            shard(3, 6..6, 0..96),
        ],
        Sharding::TableRowWise => vec![shard(2, 0..6, 0..96), shard(3, 6..6, 0..96)],
        Sharding::Grid => vec![
            shard(2, 0..3, 0..32),
            shard(3, 3..6, 0..32),
            shard(0, 0..1, 32..96),
            shard(1, 1..6, 32..96),
        ],
    }
}

#[test]
fn sound_plans_of_every_kind_are_taken_in_any_order() {
    for sharding in Sharding::ALL {
        let mut shards = sound(sharding);
        let plan = checked(sharding, shards.clone()).unwrap();
        shards.reverse();
        assert_eq!(checked(sharding, shards).unwrap().hash(), plan.hash());
        let table = plan.table("t").unwrap();
        assert!(table.shard_on(3).is_some() || sharding == Sharding::ColumnWise);
        // Any single shard missing is a fault, and so is one that is there twice.
        for i in 0..table.shards.len() {
            let mut fewer = table.shards.clone();
            let taken = fewer.remove(i);
            checked(sharding, fewer).unwrap_err();
            let mut more = table.shards.clone();
            more.push(taken);
            refused(sharding, more, "two shards");
        }
    }
}

#[test]
fn unsound_shards_are_refused_with_the_reason() {
    use Sharding::{ColumnWise, DataParallel, Grid, RowWise, TableRowWise, TableWise};
    let one = |rows, columns| vec![shard(0, rows, columns)];
    refused(TableWise, one(0..7, 0..96), "rows 0..7 of 6");
    refused(TableWise, one(Range { start: 4, end: 2 }, 0..96), "rows 4..2");
    refused(TableWise, one(0..6, 0..97), "columns 0..97");
    refused(TableWise, one(0..6, 0..64), "one shard, the whole table");
    refused(TableWise, vec![shard(4, 0..6, 0..96)], "rank 4 of 4 ranks");
    refused(TableWise, sound(ColumnWise), "one shard");
    refused(ColumnWise, vec![shard(0, 0..6, 0..48), shard(1, 0..6, 48..96)][..1].to_vec(), "48");
    refused(ColumnWise, vec![shard(0, 0..6, 0..32), shard(1, 0..6, 64..96)], "followed by 64");
    refused(ColumnWise, vec![shard(0, 0..6, 0..64), shard(1, 0..6, 32..96)], "followed by 32");
    refused(ColumnWise, one(0..6, 0..64), "columns from 64 to 96 are on no rank");
    refused(ColumnWise, sound(Grid), "whole columns");
    refused(DataParallel, sound(TableWise), "a whole copy on each of 4 ranks, has 1");
    refused(RowWise, sound(TableRowWise), "every rank, in order");
    let mut backwards = sound(RowWise);
    (backwards[0].rank, backwards[1].rank) = (1, 0);
    refused(RowWise, backwards, "row 0 is followed by 2");
    let across = vec![shard(1, 0..3, 0..96), shard(2, 3..6, 0..96)];
    refused(TableRowWise, across.clone(), "every rank of a node");
    refused(Grid, across, "every rank of a node");
    refused(TableRowWise, sound(Grid), "rows of all columns");
    let mut short = sound(RowWise);
    short[2].rows = 4..5;
    short[3].rows = 5..5;
    refused(RowWise, short, "rows from 5 to 6 are on no rank");
}

#[test]
fn unsound_ranks_and_names_are_refused() {
    let faults =
        |ranks, per_node, replicas, tables| match Plan::new(ranks, per_node, replicas, tables) {
            Err(EmbeddingError::Plan { faults }) => faults.join("; "),
            other => panic!("{other:?}"),
        };
    assert!(faults(0, 1, 1, vec![]).contains("0 ranks"));
    assert!(faults(4, 3, 1, vec![]).contains("4 ranks do not fill nodes of 3"));
    assert!(faults(4, 2, 0, vec![]).contains("0 replicas"));
    let one = spread(Sharding::TableWise, sound(Sharding::TableWise));
    assert!(faults(4, 2, 1, vec![one.clone(), one.clone()]).contains("table t is there twice"));
    let none = TablePlan { dim: 0, ..one };
    assert!(faults(4, 2, 1, vec![none]).contains("dim is 0"));
}

#[test]
fn the_hash_sees_every_field() {
    let base = spread(Sharding::ColumnWise, sound(Sharding::ColumnWise));
    let mut plans = vec![
        Plan::new(4, 2, 1, vec![]),
        Plan::new(4, 4, 1, vec![]),
        Plan::new(4, 2, 2, vec![]),
        Plan::new(8, 2, 1, vec![]),
        Plan::new(4, 2, 1, vec![base.clone()]),
        Plan::new(4, 2, 1, vec![TablePlan { table: "u".into(), ..base.clone() }]),
        Plan::new(4, 2, 1, vec![TablePlan { route: Route::Unique, ..base.clone() }]),
    ];
    let mut other = base.clone();
    other.shards[0].rank = 1;
    plans.push(Plan::new(4, 2, 1, vec![other]));
    let mut other = base;
    (other.shards[0].columns, other.shards[1].columns) = (0..32, 32..96);
    plans.push(Plan::new(4, 2, 1, vec![other]));
    let mut hashes: Vec<u64> = plans.into_iter().map(|plan| plan.unwrap().hash()).collect();
    hashes.sort_unstable();
    assert!(hashes.windows(2).all(|pair| pair[0] != pair[1]), "{hashes:x?}");
    // Pinned: ranks of different builds compare it.
    assert_eq!(Plan::new(1, 1, 1, vec![]).unwrap().hash(), 0xded2_f105_54e9_8744);
}

#[test]
fn a_plan_file_is_read_back_and_a_changed_one_is_refused() {
    let plan = checked(Sharding::Grid, sound(Sharding::Grid)).unwrap();
    let file = PlanFile::bare(&plan);
    let text = serde_json::to_string(&file).unwrap();
    let read: PlanFile = serde_json::from_str(&text).unwrap();
    assert_eq!(read.plan().unwrap(), plan);
    let faulty = |change: &dyn Fn(&mut PlanFile), part: &str| {
        let mut file = file.clone();
        change(&mut file);
        let error = file.plan().unwrap_err().to_string();
        assert!(error.contains(part), "{part}: {error}");
    };
    faulty(&|file| file.format = "tessera-plan-0".into(), "this version reads tessera-plan-1");
    faulty(&|file| file.shards[0].table = "u".into(), "table u, which is not listed");
    faulty(&|file| file.replicas = 2, "take `hash` out");
    faulty(&|file| file.shards[1].rows = [3, 5], "table t: rows from 5 to 6");
    let unknown = text.replacen("\"ranks\"", "\"rank_count\"", 1);
    assert!(serde_json::from_str::<PlanFile>(&unknown).is_err());
}

/// A plan on CPU ranks in nodes of `per_node`.
fn planned(tables: &[TableLoad], ranks: usize, per_node: usize) -> Planned {
    let topology = Topology { ranks_per_node: Some(per_node), ..Topology::preset("cpu").unwrap() };
    let grid = Grid2d::new(ranks, 1, Placement::default()).unwrap();
    let planned = plan(tables, grid, &topology, &Workload::new(64.0), Budget::default()).unwrap();
    assert_consistent(&planned);
    planned
}

/// Whatever is asked for is what comes, on any ranks, for tables of awkward sizes.
#[test]
fn a_sharding_asked_for_is_given() {
    for (rows, dim) in [(0, 8), (1, 1), (6, 100), (1000, 128), (5, 33)] {
        for (ranks, per_node) in [(1, 1), (2, 2), (4, 2), (6, 3), (8, 8), (7, 7)] {
            for sharding in Sharding::ALL {
                let asked = TableLoad { sharding: Some(sharding), ..table("t", rows, dim, 3.0) };
                let free = table("u", 50, 64, 2.0);
                let planned = planned(&[asked, free], ranks, per_node);
                let spread = planned.plan.table("t").unwrap();
                assert_eq!(spread.sharding, sharding);
                assert!(planned.why[0].starts_with("asked for"), "{}", planned.why[0]);
                let blocks = dim.div_ceil(32);
                match sharding {
                    Sharding::ColumnWise => {
                        assert_eq!(spread.shards.len() > 1, ranks.min(blocks) > 1, "{spread:?}");
                    }
                    Sharding::Grid => {
                        let cut = ranks / per_node > 1 && blocks > 1;
                        assert_eq!(spread.shards.len() > per_node, cut, "{spread:?}");
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Once, wide tables under lamb were cut by columns, which training then refused.
#[test]
fn rows_whose_norms_an_optimizer_needs_are_not_cut() {
    let lamb =
        SparseOptimizer::Lamb { lr: 0.1, eps: 1e-8, beta1: 0.9, beta2: 0.999, weight_decay: 0.0 };
    let wide = |optimizer: &SparseOptimizer| {
        [("a", 2000), ("b", 100)]
            .map(|(name, rows)| TableLoad::new(name, rows, 256, optimizer, vec![1.0]))
    };
    for (ranks, per_node) in [(4, 4), (7, 7), (8, 2)] {
        let whole = planned(&wide(&lamb), ranks, per_node);
        for table in whole.plan.tables() {
            assert!(table.shards.iter().all(|shard| shard.columns == (0..256)), "{table:?}");
        }
        let cut = planned(&wide(&adagrad()), ranks, per_node);
        let is_cut = |table: &TablePlan| table.shards.iter().any(|shard| shard.columns != (0..256));
        assert!(cut.plan.tables().iter().any(is_cut), "the case is one where cuts pay");
    }
}

#[test]
fn a_route_asked_for_is_given() {
    let grid = Grid2d::new(4, 1, Placement::default()).unwrap();
    let tables = [table("a", 3, 8, 1.0), table("b", 100_000, 64, 10.0)];
    let cpu = Topology::preset("cpu").unwrap();
    for route in [Route::Pooled, Route::Unique] {
        let workload = Workload { route: Some(route), ..Workload::new(64.0) };
        let planned = plan(&tables, grid, &cpu, &workload, Budget::default()).unwrap();
        for table in planned.plan.tables() {
            assert!(table.route == route || table.sharding == Sharding::DataParallel, "{table:?}");
        }
    }
}

/// A table that no rank has room for is cut, and the reason says so.
#[test]
fn a_table_larger_than_a_rank_is_cut() {
    let mut cpu = Topology::preset("cpu").unwrap();
    cpu.device_bytes = 3_000_000;
    cpu.reserve_bytes = 0;
    let grid = Grid2d::new(4, 1, Placement::default()).unwrap();
    // 20,000 rows of 32 columns with their state are 5.12 MB; columns cannot be cut.
    let tables = [table("wide", 20_000, 32, 1.0)];
    let planned = plan(&tables, grid, &cpu, &Workload::new(8.0), Budget::default()).unwrap();
    assert_consistent(&planned);
    assert_eq!(planned.plan.tables()[0].sharding, Sharding::RowWise);
}

#[test]
fn senseless_input_is_refused_with_all_faults() {
    let grid = Grid2d::new(2, 1, Placement::default()).unwrap();
    let mut cpu = Topology::preset("cpu").unwrap();
    cpu.host_gb_per_s = 0.0;
    let tables =
        [table("a", 1, 0, 1.0), table("a", 1, 8, f64::NAN), table("b", u64::MAX, 1 << 40, 1.0)];
    let workload = Workload::new(-1.0);
    let error = plan(&tables, grid, &cpu, &workload, Budget::default()).unwrap_err().to_string();
    for part in
        ["host_gb_per_s", "dim is 0", "a is there twice", "ids per sample", "64 bits", "-1 samples"]
    {
        assert!(error.contains(part), "{part}: {error}");
    }
}

/// A search that runs out of steps or time says so, and still gives a sound plan.
#[test]
fn a_short_search_says_that_it_was() {
    let tables: Vec<TableLoad> =
        (0..60).map(|i| table(&format!("t{i}"), 1000 + i * i, 64, 1.0 + i as f64)).collect();
    let grid = Grid2d::new(7, 1, Placement::default()).unwrap();
    let cpu = Topology::preset("cpu").unwrap();
    let with = |budget| {
        let planned = plan(&tables, grid, &cpu, &Workload::new(64.0), budget).unwrap();
        assert_consistent(&planned);
        planned
    };
    let steps = with(Budget { steps: 1, ..Budget::default() });
    assert!(
        steps.notes.iter().any(|note| note.contains("all of its 1 steps")),
        "{:?}",
        steps.notes
    );
    let clock = with(Budget { cap: std::time::Duration::ZERO, ..Budget::default() });
    assert!(clock.notes.iter().any(|note| note.contains("cut off after")), "{:?}", clock.notes);
    assert!(with(Budget::default()).max_over_mean <= steps.max_over_mean);
}

/// Ids that crowd in the first rows: the sample moves the cuts, and so the estimate is even.
#[test]
fn rows_are_cut_where_the_ids_are() {
    let rows = 100_000u64;
    let mut counter = IdCounter::new(rows);
    for batch in 0..4i64 {
        // Nine of ten ids in the first hundredth of the rows.
        counter.batch((0..4096).map(|i| {
            let spot = (i * 7919 + batch * 104_729) % 1000;
            if i % 10 > 0 { spot } else { spot * 100 }
        }));
    }
    let optimizer = SparseOptimizer::Sgd { lr: 0.1 };
    let mut load = TableLoad::new("t", rows, 32, &optimizer, vec![64.0]);
    load.sharding = Some(Sharding::RowWise);
    let blind = planned(std::slice::from_ref(&load), 4, 4);
    load.stats = counter.finish();
    let seeing = planned(std::slice::from_ref(&load), 4, 4);
    let first = |planned: &Planned| planned.plan.tables()[0].shards[0].rows.end;
    assert_eq!(first(&blind), 25_000);
    assert!(first(&seeing) < 2_000, "{:?}", seeing.plan);
    assert!(seeing.max_over_mean < 1.1, "{}", seeing.max_over_mean);
}

#[test]
fn the_curve_weighs_memory_against_exchange() {
    let h100 = Topology::preset("h100").unwrap();
    // Half of all memory of 16 ranks: two replicas fit, four do not.
    let tables: Vec<TableLoad> =
        (0..32).map(|i| table(&format!("t{i}"), 16_000_000, 128, 10.0)).collect();
    let workload = Workload::new(1024.0);
    let points =
        curve(&tables, 16, Placement::Strided, 1, &h100, &workload, Budget::default()).unwrap();
    let groups: Vec<usize> = points.iter().map(|point| point.grid.groups()).collect();
    assert_eq!(groups, [1, 2, 4, 8, 16]);
    assert_eq!(points[0].sync_ms, 0.0);
    let fit: Vec<bool> = points.iter().map(|point| point.planned.is_ok()).collect();
    assert_eq!(fit, [true, true, false, false, false]);
    let error = points[2].planned.as_ref().unwrap_err().to_string();
    assert!(error.contains("no room for table"), "{error}");
    assert!(points[1].memory_bytes > points[0].memory_bytes * 3 / 2);
    assert!(points[1].sync_ms > 0.0 && points[1].latency_ms < points[0].latency_ms);
    assert_eq!(points[2].total_ms(), f64::INFINITY);
    let plan = &points[1].planned.as_ref().unwrap().plan;
    assert_eq!((plan.ranks(), plan.replicas(), plan.ranks_per_node()), (8, 2, 4));
    // Synchronising less often costs less.
    let seldom =
        curve(&tables, 16, Placement::Strided, 4, &h100, &workload, Budget::default()).unwrap();
    assert!((seldom[1].sync_ms * 4.0 - points[1].sync_ms).abs() < 1e-9);
}
