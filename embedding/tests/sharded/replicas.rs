//! Groups of ranks that each hold all tables, averaged now and then.

use std::num::{NonZeroU64, NonZeroUsize};

use tessera_comm::{Communicator, Options, threads};
use tessera_data::{Jagged, RawId};
use tessera_device::{Cpu, Device};
use tessera_embedding::plan::{Grid2d, Placement, Plan, Route, Sharding};
use tessera_embedding::{
    BadIdPolicy, Precision, ShardedCollection, SparseOptimizer, SparseStep, WeightDecay,
};

use crate::common::{
    Case, Outcome, Random, SEED, case, on_one_rank, part, pieces_of, plan, under_sgd,
};

/// When and how replicas are averaged.
#[derive(Clone, Copy)]
pub enum Sync {
    Touched,
    /// Begun after the update, ended when the next batch's ids are exchanged.
    Overlapped,
    Full,
}

/// `(N, M)`: ranks a group, groups.
pub const GRIDS: [(usize, usize); 3] = [(2, 2), (4, 2), (2, 4)];

/// This rank's group and its replicas.
pub fn split(comm: &Communicator, grid: Grid2d) -> (Communicator, Communicator) {
    let (group, index) = grid.place(comm.rank());
    let (group, index) = (group as u64, index as u64);
    let ranks = comm.split("group", Some(group), index).unwrap().unwrap();
    let replicas = comm.split("replicas", Some(index), group).unwrap().unwrap();
    (ranks, replicas)
}

/// What all replicas hold after a last sync (the same bits, or this fails), and the rows averaged
/// in all syncs by all ranks.
pub fn on_grid(
    case: &Case,
    plan: &Plan,
    grid: Grid2d,
    sync_every: u64,
    sync: Sync,
) -> (Outcome, u64) {
    let sync_every = NonZeroU64::new(sync_every).unwrap();
    let parts = threads::run(grid.total(), &Options::default(), |comm| {
        let (ranks, replicas) = split(&comm, grid);
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let mut all =
            ShardedCollection::new(cpu.clone(), &stream, tables, features, SEED, plan, ranks)
                .unwrap()
                .with_replicas(replicas, sync_every)
                .unwrap();
        let mut averaged = 0;
        for (t, (batch, grad)) in (1..).zip(case.batches.iter().zip(&case.grads)) {
            let samples = part(batch[0].bags(), comm.rank(), grid.total());
            let own = batch.iter().map(|feature| feature.slice(samples.clone())).collect();
            let checked = all.check(own, BadIdPolicy::Error).unwrap();
            let mut routed = all.route(&stream, checked).unwrap();
            averaged += all.finish_sync(&stream).unwrap().rows.iter().sum::<u64>();
            let mut out = cpu.alloc::<f32>(samples.len() * case.width).unwrap();
            all.forward(&stream, &mut routed, &mut out, case.width).unwrap();
            // Of the mean over the group's samples, where `case` has that over all.
            let scale = grid.groups() as f32;
            let grad = &grad[samples.start * case.width..samples.end * case.width];
            let grad: Vec<f32> = grad.iter().map(|x| x * scale).collect();
            cpu.upload(&stream, &grad, &mut out, 0).unwrap();
            all.exchange_gradients(&stream, &mut routed, &out, case.width).unwrap();
            let stats = all.update(&stream, routed, &SparseStep::new(t)).unwrap();
            assert_eq!(stats.nonfinite(), 0);
            if all.sync_due(t) {
                let stats = match sync {
                    Sync::Touched => all.sync(&stream),
                    Sync::Full => all.sync_full(&stream),
                    Sync::Overlapped => {
                        all.start_sync().unwrap();
                        continue;
                    }
                };
                averaged += stats.unwrap().rows.iter().sum::<u64>();
            }
        }
        averaged += all.finish_sync(&stream).unwrap().rows.iter().sum::<u64>();
        let last = match sync {
            Sync::Full => all.sync_full(&stream),
            _ => all.sync(&stream),
        };
        averaged += last.unwrap().rows.iter().sum::<u64>();
        (averaged, pieces_of(&all, &stream, case))
    })
    .unwrap();
    let mut outcome = Outcome::empty(case);
    let mut averaged = 0;
    for (rows, pieces) in parts {
        averaged += rows;
        pieces.iter().for_each(|piece| outcome.put(case, piece));
    }
    (outcome, averaged)
}

fn same(a: &Outcome, b: &Outcome, what: &str) {
    assert!(a.weights == b.weights && a.states == b.states, "{what}: other bits");
}

#[test]
fn touched_rows_are_all_that_need_averaging() {
    let case = case(&[19, 8, 11, 20], Precision::Fp32, 2);
    for (ranks, groups) in GRIDS {
        for (sharding, placement) in [
            (Sharding::DataParallel, Placement::Strided),
            (Sharding::TableWise, Placement::Contiguous),
            (Sharding::ColumnWise, Placement::Strided),
            (Sharding::RowWise, Placement::Contiguous),
            (Sharding::Grid, Placement::Strided),
        ] {
            let grid = Grid2d::new(ranks * groups, groups, placement).unwrap();
            let plan = plan(&case, ranks, sharding, Route::Unique);
            for sync_every in [1, 3] {
                let what = format!("{ranks} x {groups}, {sharding}, every {sync_every}");
                let (full, rows_full) = on_grid(&case, &plan, grid, sync_every, Sync::Full);
                let (touched, rows) = on_grid(&case, &plan, grid, sync_every, Sync::Touched);
                same(&full, &touched, &what);
                assert!(0 < rows && rows < rows_full, "{what}: {rows} of {rows_full} rows");
                let overlapped = on_grid(&case, &plan, grid, sync_every, Sync::Overlapped);
                same(&touched, &overlapped.0, &what);
                assert_eq!(rows, overlapped.1, "{what}");
            }
        }
    }
}

#[test]
fn numbers_of_groups_that_are_no_power_of_two_and_short_weights_agree_too() {
    for (groups, precision) in [(3, Precision::Fp32), (2, Precision::Fp16), (2, Precision::Bf16)] {
        let case = case(&[19, 8, 11], precision, 2);
        let grid = Grid2d::new(2 * groups, groups, Placement::Strided).unwrap();
        let plan = plan(&case, 2, Sharding::RowWise, Route::Unique);
        let what = format!("{groups} groups, {precision:?}");
        let full = on_grid(&case, &plan, grid, 1, Sync::Full).0;
        same(&full, &on_grid(&case, &plan, grid, 1, Sync::Touched).0, &what);
    }
}

#[test]
fn rows_of_more_bytes_than_a_round_are_averaged_in_several() {
    let (rows, dim) = (40_000, 64); // 10 MB and its state; a round is 4 MiB
    let mut case = case(&[], Precision::Fp32, 0);
    case.tables.truncate(1);
    case.features.truncate(1);
    (case.tables[0].rows, case.tables[0].dim, case.width) = (rows, dim, dim);
    case.tables[0].optimizer = SparseOptimizer::RowwiseAdagrad {
        lr: 0.05,
        eps: 1e-6,
        decay: WeightDecay::None,
        moment_scale: 2.0,
    };
    let mut random = Random(3);
    let ids = (0..60_000).map(|_| RawId(random.next(rows) as i64)).collect();
    case.batches = vec![vec![Jagged::new(2, vec![0, 30_000, 60_000], ids, None).unwrap()]];
    case.grads = vec![(0..2 * dim).map(|_| random.number()).collect()];
    let grid = Grid2d::new(2, 2, Placement::Strided).unwrap();
    let plan = plan(&case, 1, Sharding::TableWise, Route::Unique);
    let (full, rows_full) = on_grid(&case, &plan, grid, 1, Sync::Full);
    let (touched, rows_touched) = on_grid(&case, &plan, grid, 1, Sync::Touched);
    same(&full, &touched, "10 MB");
    assert!(rows_touched > 50_000 && rows_full == 4 * rows, "{rows_touched} and {rows_full}");
}

#[test]
fn under_sgd_groups_move_as_one() {
    let case = under_sgd(case(&[19, 8, 11, 20], Precision::Fp32, 3), 0.05);
    let one = on_one_rank(&case);
    for (ranks, groups) in GRIDS {
        for sharding in [Sharding::DataParallel, Sharding::RowWise, Sharding::ColumnWise] {
            let grid = Grid2d::new(ranks * groups, groups, Placement::Strided).unwrap();
            let plan = plan(&case, ranks, sharding, Route::Unique);
            let (outcome, _) = on_grid(&case, &plan, grid, 1, Sync::Touched);
            for (a, b) in one.weights.iter().flatten().zip(outcome.weights.iter().flatten()) {
                assert!((a - b).abs() < 1e-5, "{ranks} x {groups} {sharding}: {a} and {b}");
            }
        }
    }
}

#[test]
fn groups_without_samples_and_steps_without_ids_take_part() {
    for (samples, lengths_max) in [(vec![1, 2, 0, 3], 3), (vec![5, 5], 0)] {
        let case = case(&samples, Precision::Fp32, lengths_max);
        for (ranks, groups) in GRIDS {
            let grid = Grid2d::new(ranks * groups, groups, Placement::Contiguous).unwrap();
            for sharding in [Sharding::DataParallel, Sharding::RowWise] {
                let plan = plan(&case, ranks, sharding, Route::Unique);
                let what = format!("{samples:?} on {ranks} x {groups}, {sharding}");
                let full = on_grid(&case, &plan, grid, 1, Sync::Full).0;
                let (touched, rows) = on_grid(&case, &plan, grid, 1, Sync::Overlapped);
                same(&full, &touched, &what);
                assert_eq!(rows == 0, lengths_max == 0, "{what}");
            }
        }
    }
}

#[test]
fn nothing_looks_up_or_moves_while_replicas_differ_in_part() {
    let case = case(&[6], Precision::Fp32, 2);
    let plan = plan(&case, 1, Sharding::TableWise, Route::Unique);
    let errors = threads::run(2, &Options::default(), |comm| {
        let (ranks, replicas) = split(&comm, Grid2d::new(2, 2, Placement::Strided).unwrap());
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let mut all =
            ShardedCollection::new(cpu.clone(), &stream, tables, features, SEED, &plan, ranks)
                .unwrap()
                .with_replicas(replicas, NonZeroU64::new(2).unwrap())
                .unwrap();
        assert_eq!((1..5).map(|t| all.sync_due(t)).collect::<Vec<_>>(), [false, true, false, true]);
        assert_eq!(all.replicas().unwrap().size(), 2);
        let checked = all.check(case.batches[0].clone(), BadIdPolicy::Error).unwrap();
        all.start_sync().unwrap();
        let mut routed = all.route(&stream, checked).unwrap();
        let mut out = cpu.alloc::<f32>(6 * case.width).unwrap();
        let mut errors = vec![
            all.forward(&stream, &mut routed, &mut out, case.width).unwrap_err().to_string(),
            all.start_sync().unwrap_err().to_string(),
            all.sync_full(&stream).unwrap_err().to_string(),
        ];
        all.exchange_gradients(&stream, &mut routed, &out, case.width).unwrap();
        let error = all.update(&stream, routed, &SparseStep::new(1)).unwrap_err();
        errors.push(error.to_string());
        let stats = all.finish_sync(&stream).unwrap();
        assert_eq!(stats.rows, vec![0; case.tables.len()]);
        errors
    })
    .unwrap();
    for error in errors.iter().flatten() {
        assert!(error.contains("between the start of a sync and its end"), "{error}");
    }
}

#[test]
fn replicas_that_differ_are_an_error_on_all_of_them() {
    let case = case(&[4], Precision::Fp32, 2);
    let plan = plan(&case, 1, Sharding::TableWise, Route::Unique);
    let errors = threads::run(3, &Options::default(), |comm| {
        let (ranks, replicas) = split(&comm, Grid2d::new(3, 3, Placement::Strided).unwrap());
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let every = NonZeroU64::new(if comm.rank() == 2 { 3 } else { 1 }).unwrap();
        ShardedCollection::new(cpu, &stream, tables, features, SEED, &plan, ranks)
            .unwrap()
            .with_replicas(replicas, every)
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("sync_every") && error.contains('2'), "{error}");
    }
}
