//! Averaged second moments and the scale that makes up for them.
//!
//! A group's gradient of a row that only it holds is `M` times the whole one, so that the averaged
//! moment grows by `M g^2` a step where one group's grows by `g^2`. Divided by `c = M` a step is
//! that of one group once many steps lie behind; in the first, the moment that an update sees
//! holds `M^2 g^2`, not yet averaged.

use tessera_data::{Jagged, RawId};
use tessera_embedding::plan::{Grid2d, Placement, Route, Sharding};
use tessera_embedding::{
    FeatureSpec, Init, Pooling, Precision, SparseOptimizer, TableKind, TableSpec, WeightDecay,
};

use crate::common::{Case, Random, on_one_rank, plan};
use crate::replicas::{GRIDS, Sync, on_grid};

const DIM: usize = 8;

/// One table under row-wise AdaGrad; `ids[s]` is what sample `s` holds, the same in every step.
fn case_of(ids: &[u64], rows: u64, steps: usize, mut grad: impl FnMut(u64) -> f32) -> Case {
    let table = TableSpec {
        name: "t".into(),
        kind: TableKind::Static,
        rows,
        dim: DIM,
        precision: Precision::Fp32,
        pooling: Pooling::Sum,
        init: Init::Zero,
        optimizer: SparseOptimizer::RowwiseAdagrad {
            lr: 0.1,
            eps: 1e-10,
            decay: WeightDecay::None,
            moment_scale: 1.0,
        },
    };
    let offsets: Vec<u64> = (0..=ids.len() as u64).collect();
    let bags: Vec<RawId> = ids.iter().map(|&id| RawId(id as i64)).collect();
    let batch = || vec![Jagged::new(ids.len(), offsets.clone(), bags.clone(), None).unwrap()];
    let mut grads = || -> Vec<f32> {
        ids.iter().flat_map(|&id| (0..DIM).map(|_| grad(id)).collect::<Vec<_>>()).collect()
    };
    Case {
        tables: vec![table],
        features: vec![FeatureSpec { name: "f".into(), table: 0, column: 0 }],
        width: DIM,
        batches: (0..steps).map(|_| batch()).collect(),
        grads: (0..steps).map(|_| grads()).collect(),
        clips: false,
    }
}

/// Distance of the averaged weights from those of one group: with `c = 1` and with `c = M`.
fn distances(case: &mut Case, ranks: usize, groups: usize) -> (f64, f64) {
    let one = on_one_rank(case);
    let grid = Grid2d::new(ranks * groups, groups, Placement::Strided).unwrap();
    let mut distance = |scale: f64| {
        if let SparseOptimizer::RowwiseAdagrad { moment_scale, .. } = &mut case.tables[0].optimizer
        {
            *moment_scale = scale;
        }
        let plan = plan(case, ranks, Sharding::RowWise, Route::Unique);
        let (outcome, _) = on_grid(case, &plan, grid, 1, Sync::Touched);
        let squares = one.weights[0].iter().zip(&outcome.weights[0]).map(|(a, b)| {
            let difference = f64::from(a - b);
            difference * difference
        });
        squares.sum::<f64>().sqrt()
    };
    (distance(1.0), distance(groups as f64))
}

#[test]
fn rows_that_one_group_hits_come_nearer_to_one_group_by_the_scale() {
    for (ranks, groups) in GRIDS {
        let samples = 2 * (ranks * groups) as u64;
        let ids: Vec<u64> = (0..samples).collect();
        for (hits, least) in [(1, 1.4), (10, 2.0), (100, 5.0)] {
            // A row's gradient keeps its direction and size.
            let mut column = 0;
            let mut case = case_of(&ids, samples, hits, |id| {
                column = (column + 1) % DIM;
                (1 + id) as f32 * 0.01 * (1.0 + column as f32)
            });
            let (unscaled, scaled) = distances(&mut case, ranks, groups);
            let ratio = unscaled / scaled;
            assert!(ratio >= least, "{ranks} x {groups}, {hits} hits: {unscaled} / {scaled}");
        }
    }
}

/// Rows that all groups hit in each of 30 steps, by gradients of one mean and as much noise:
///
/// ```text
/// N x M   noise / mean of a sample   distance c = 1   c = M    ratio
/// 2 x 2    0                         0.0000           2.2459    0.00
/// 2 x 2    1                         0.1989           1.8891    0.11
/// 2 x 2    3                         0.7109           0.7250    0.98
/// 2 x 2   10                         0.5522           0.1224    4.51
/// 2 x 2   30                         0.3415           0.1072    3.19
/// 4 x 2    0                         0.0000           2.2459    0.00
/// 4 x 2    1                         0.1083           2.0675    0.05
/// 4 x 2    3                         0.5764           1.1587    0.50
/// 4 x 2   10                         0.7244           0.1264    5.73
/// 4 x 2   30                         0.4382           0.1073    4.09
/// 2 x 4    0                         0.0000           5.4222    0.00
/// 2 x 4    1                         0.2919           4.7791    0.06
/// 2 x 4    3                         1.2552           2.2642    0.55
/// 2 x 4   10                         1.2376           0.2800    4.42
/// 2 x 4   30                         0.6982           0.1733    4.03
/// ```
/// Without noise all groups agree, and the scale makes steps too long by the root of `M`.
#[test]
fn noisy_rows_gain_by_the_scale_and_quiet_ones_step_too_far() {
    let rows = 4;
    let mut table = String::from("N x M   noise / mean   distance c = 1, c = M, ratio\n");
    let mut ratios = Vec::new();
    for (ranks, groups) in GRIDS {
        // Every rank's part of the batch holds every row.
        let ids: Vec<u64> = (0..rows * (ranks * groups) as u64).map(|s| s % rows).collect();
        for noise in [0.0, 1.0, 3.0, 10.0, 30.0] {
            let mut random = Random(5);
            let mut case = case_of(&ids, rows, 30, |_| 0.1 + 0.1 * noise * random.number());
            let (unscaled, scaled) = distances(&mut case, ranks, groups);
            let ratio = unscaled / scaled;
            table += &format!(
                "{ranks} x {groups}   {noise:12}   {unscaled:.4} {scaled:.4} {ratio:.2}\n"
            );
            ratios.push((noise, ratio));
        }
    }
    for (noise, ratio) in ratios {
        match noise {
            0.0 => assert!(ratio < 0.01, "{table}"),
            10.0.. => assert!(ratio > 3.0, "{table}"),
            _ => {}
        }
    }
}
