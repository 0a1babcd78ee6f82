//! Any plan on any number of ranks against one rank.

use std::num::NonZeroUsize;

use tessera_comm::{Options, threads};
use tessera_device::{Cpu, Device};
use tessera_embedding::plan::{Route, Sharding};
use tessera_embedding::{Precision, ShardedCollection, SparseOptimizer};

use crate::common::{EXACT, Outcome, SEED, case, close, on_one_rank, on_ranks, plan};

const STEPS: u64 = 4;

const RANKS: [usize; 5] = [1, 2, 3, 4, 7];

#[test]
fn every_plan_on_unique_routes_gives_the_same_bits() {
    let case = case(&[13, 8, 1, 20], Precision::Fp32, 4);
    assert_eq!(case.batches.len() as u64, STEPS);
    let one = on_one_rank(&case);
    for ranks in RANKS {
        let mut first: Option<Outcome> = None;
        for sharding in Sharding::ALL {
            let what = format!("{ranks} ranks, {sharding}");
            let plan = plan(&case, ranks, sharding, Route::Unique);
            let outcome = on_ranks(&case, &plan, 1 + ranks % 2, EXACT);
            close(&one, &outcome, 1e-5, &what);
            match &first {
                None => first = Some(outcome),
                Some(first) => {
                    // Norms are summed piece by piece.
                    let same = first.pooled == outcome.pooled
                        && first.weights == outcome.weights
                        && first.states == outcome.states;
                    assert!(same, "{what}: not the bits of {}", Sharding::ALL[0]);
                }
            }
            if ranks == 1 {
                assert_eq!(one.weights, first.as_ref().unwrap().weights, "{what}");
            }
        }
    }
}

#[test]
fn pooled_routes_agree_within_rounding() {
    let case = case(&[13, 8, 1, 20], Precision::Fp32, 4);
    let one = on_one_rank(&case);
    for ranks in RANKS {
        for sharding in Sharding::ALL {
            let plan = plan(&case, ranks, sharding, Route::Pooled);
            let what = format!("{ranks} ranks, {sharding}, pooled");
            close(&one, &on_ranks(&case, &plan, 1, EXACT), 1e-5, &what);
        }
    }
}

#[test]
fn rounding_is_the_same_wherever_a_row_is() {
    for precision in [Precision::Fp16, Precision::Bf16] {
        let case = case(&[16, 9], precision, 3);
        let table_wise =
            on_ranks(&case, &plan(&case, 2, Sharding::TableWise, Route::Unique), 1, EXACT);
        for sharding in [Sharding::ColumnWise, Sharding::RowWise, Sharding::Grid] {
            let other = on_ranks(&case, &plan(&case, 2, sharding, Route::Unique), 1, EXACT);
            assert_eq!(table_wise.weights, other.weights, "{precision:?} {sharding}");
        }
    }
}

#[test]
fn ranks_without_samples_and_batches_without_ids_take_part() {
    for (samples, lengths_max) in [(vec![1, 2, 0, 3], 2), (vec![5, 5], 0)] {
        let case = case(&samples, Precision::Fp32, lengths_max);
        let one = on_one_rank(&case);
        for sharding in Sharding::ALL {
            for route in [Route::Unique, Route::Pooled] {
                let outcome = on_ranks(&case, &plan(&case, 4, sharding, route), 1, EXACT);
                close(&one, &outcome, 1e-5, &format!("{samples:?} {sharding} {route}"));
            }
        }
    }
}

#[test]
fn a_feature_list_that_differs_on_one_rank_is_an_error_on_all() {
    let case = case(&[4], Precision::Fp32, 2);
    let plan = plan(&case, 3, Sharding::TableWise, Route::Unique);
    let errors = threads::run(3, &Options::default(), |comm| {
        let mut features = case.features.clone();
        if comm.rank() == 1 {
            features[2].name = "another".into();
        }
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let tables = case.tables.clone();
        ShardedCollection::new(cpu, &stream, tables, features, SEED, &plan, comm)
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("tables, features and seed") && error.contains('1'), "{error}");
    }
}

#[test]
fn norms_over_columns_that_are_elsewhere_are_refused_by_name() {
    let mut case = case(&[4], Precision::Fp32, 2);
    case.tables[0].optimizer =
        SparseOptimizer::LarsSgd { lr: 0.1, eta: 0.01, momentum: 0.9, weight_decay: 0.0 };
    let plan = plan(&case, 2, Sharding::ColumnWise, Route::Unique);
    let errors = threads::run(2, &Options::default(), |comm| {
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        ShardedCollection::new(cpu, &stream, tables, features, SEED, &plan, comm)
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    assert!(errors[0].contains("table t0: lars_sgd needs norms over whole rows"), "{}", errors[0]);
}
