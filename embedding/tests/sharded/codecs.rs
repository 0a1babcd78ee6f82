//! Vectors and gradients that travel in shorter forms.

use std::num::NonZeroUsize;

use tessera_comm::{Codec, Options, threads};
use tessera_device::{Cpu, Device};
use tessera_embedding::plan::{Plan, Route, Sharding};
use tessera_embedding::{BadIdPolicy, Pooling, Precision, ShardedCollection, SparseStep};

use crate::common::{
    Case, EXACT, Outcome, SEED, case, on_one_rank, on_ranks, part, pieces_of, plan, under_sgd,
};

const SHORT: [Codec; 3] = [Codec::Fp16, Codec::Bf16, Codec::Int8];
const RANKS: usize = 3;
const LR: f64 = 0.05;

/// An id of a batch: where it stands, and what its row is multiplied by.
struct Term {
    feature: usize,
    sample: usize,
    row: usize,
    factor: f64,
}

/// All ids of the first batch.
fn terms(case: &Case) -> Vec<Term> {
    let mut terms = Vec::new();
    for (feature, bags) in case.batches[0].iter().enumerate() {
        let mean = case.tables[case.features[feature].table].pooling == Pooling::Mean;
        for (sample, ends) in bags.offsets().windows(2).enumerate() {
            for at in ends[0] as usize..ends[1] as usize {
                let weight = bags.weights().map_or(1.0, |weights| f64::from(weights[at]));
                let factor = if mean { 1.0 / (ends[1] - ends[0]) as f64 } else { weight };
                terms.push(Term { feature, sample, row: bags.ids()[at].0 as usize, factor });
            }
        }
    }
    terms
}

fn largest(row: &[f32]) -> f32 {
    row.iter().fold(0.0, |largest, x| largest.max(x.abs()))
}

/// All numbers are within their bounds, and some differ.
fn within(exact: &[f32], coded: &[f32], bounds: &[f64], what: &str) -> bool {
    for (i, ((&a, &b), &bound)) in exact.iter().zip(coded).zip(bounds).enumerate() {
        let error = (f64::from(a) - f64::from(b)).abs();
        assert!(error <= bound, "{what}: [{i}] {a} became {b}: {error} > {bound}");
    }
    exact != coded
}

/// Tables as they are before the first step.
fn first_weights() -> Vec<Vec<f32>> {
    on_one_rank(&under_sgd(case(&[], Precision::Fp32, 4), LR)).weights
}

#[test]
fn pooled_vectors_are_off_by_their_rows_errors_at_most() {
    let case = under_sgd(case(&[13], Precision::Fp32, 4), LR);
    let weights = first_weights();
    for sharding in [Sharding::TableWise, Sharding::ColumnWise, Sharding::RowWise] {
        let plan = plan(&case, RANKS, sharding, Route::Unique);
        let exact = on_ranks(&case, &plan, 1, EXACT);
        for codec in SHORT {
            let mut bounds = vec![0.0; exact.pooled[0].len()];
            for term in terms(&case) {
                let feature = &case.features[term.feature];
                let dim = case.tables[feature.table].dim;
                let row = &weights[feature.table][term.row * dim..][..dim];
                // A piece's largest is at most the row's. Sums of float32 round besides.
                let bound = |x: f32| codec.error_max(x, largest(row)) + 1e-6 * f64::from(x.abs());
                let out = &mut bounds[term.sample * case.width + feature.column..][..dim];
                for (out, &x) in out.iter_mut().zip(row) {
                    *out += term.factor.abs() * bound(x);
                }
            }
            let coded = on_ranks(&case, &plan, 1, (codec, Codec::Fp32));
            let what = format!("{sharding} {codec:?}");
            assert!(within(&exact.pooled[0], &coded.pooled[0], &bounds, &what), "{what}");
        }
    }
}

#[test]
fn updates_are_off_by_the_errors_of_the_ranks_sums_at_most() {
    let case = under_sgd(case(&[13], Precision::Fp32, 4), LR);
    let weights = first_weights();
    // Each rank's own sums of its rows' gradients.
    let mut sums: Vec<Vec<Vec<f64>>> = (0..RANKS)
        .map(|_| weights.iter().map(|weights| vec![0.0; weights.len()]).collect())
        .collect();
    for term in terms(&case) {
        let of_rank = |rank: &usize| part(13, *rank, RANKS).contains(&term.sample);
        let rank = (0..RANKS).find(of_rank).unwrap();
        let feature = &case.features[term.feature];
        let dim = case.tables[feature.table].dim;
        let grad = &case.grads[0][term.sample * case.width + feature.column..][..dim];
        let row = &mut sums[rank][feature.table][term.row * dim..][..dim];
        for (sum, &grad) in row.iter_mut().zip(grad) {
            *sum += term.factor * f64::from(grad);
        }
    }
    for sharding in [Sharding::DataParallel, Sharding::ColumnWise, Sharding::RowWise] {
        let plan = plan(&case, RANKS, sharding, Route::Unique);
        let exact = on_ranks(&case, &plan, 1, EXACT);
        for codec in SHORT {
            let what = format!("{sharding} {codec:?}");
            let coded = on_ranks(&case, &plan, 1, (Codec::Fp32, codec));
            assert_eq!(exact.pooled, coded.pooled, "{what}");
            let mut differ = false;
            for (table, spec) in case.tables.iter().enumerate() {
                let mut bounds: Vec<f64> =
                    weights[table].iter().map(|x| 1e-6 * f64::from(x.abs())).collect();
                for sums in &sums {
                    let rows = sums[table].chunks(spec.dim);
                    for (bounds, row) in bounds.chunks_mut(spec.dim).zip(rows) {
                        let row: Vec<f32> = row.iter().map(|&x| x as f32).collect();
                        for (bound, &x) in bounds.iter_mut().zip(&row) {
                            let error = codec.error_max(x, largest(&row));
                            *bound += LR * 1.001 * error + 1e-6 * f64::from(x.abs());
                        }
                    }
                }
                differ |= within(&exact.weights[table], &coded.weights[table], &bounds, &what);
            }
            assert!(differ, "{what} changed nothing");
        }
    }
}

#[test]
fn pieces_of_whole_rows_give_the_same_bits_under_every_codec() {
    let case = case(&[13, 8, 1, 20], Precision::Fp32, 4);
    for codec in SHORT {
        let run = |sharding, threads| {
            let plan = plan(&case, 4, sharding, Route::Unique);
            on_ranks(&case, &plan, threads, (codec, codec))
        };
        let first = run(Sharding::TableWise, 1);
        for (sharding, threads) in
            [(Sharding::TableWise, 2), (Sharding::RowWise, 1), (Sharding::TableRowWise, 1)]
        {
            let other = run(sharding, threads);
            let same = |a: &Outcome, b: &Outcome| {
                a.pooled == b.pooled && a.weights == b.weights && a.states == b.states
            };
            assert!(same(&first, &other), "{codec:?} {sharding} on {threads} threads");
        }
    }
}

#[test]
fn all_copies_of_a_replicated_table_move_alike_and_are_read_exactly() {
    let case = case(&[13, 8, 1], Precision::Fp32, 4);
    let plan = plan(&case, RANKS, Sharding::DataParallel, Route::Unique);
    let exact = on_ranks(&case, &plan, 1, EXACT);
    for codec in SHORT {
        // That copies are the same bits is seen where they are put together.
        let coded = on_ranks(&case, &plan, 1, (codec, codec));
        assert_eq!(exact.pooled[0], coded.pooled[0], "{codec:?}");
        assert_ne!(exact.weights, coded.weights, "{codec:?}");
    }
}

#[test]
fn rows_of_sixteen_bits_travel_in_their_own_form_without_loss() {
    for (precision, codec) in [(Precision::Fp16, Codec::Fp16), (Precision::Bf16, Codec::Bf16)] {
        let case = case(&[13, 8], precision, 4);
        for sharding in [Sharding::TableWise, Sharding::ColumnWise, Sharding::RowWise] {
            let plan = plan(&case, RANKS, sharding, Route::Unique);
            let exact = on_ranks(&case, &plan, 1, EXACT);
            assert_eq!(exact, on_ranks(&case, &plan, 1, (codec, Codec::Fp32)), "{precision:?}");
        }
    }
}

/// One step with these gradients: rows left as they were, all ranks together, and the tables.
fn one_step(case: &Case, plan: &Plan, codec: Codec, grad: &[f32]) -> (u64, Outcome) {
    let parts = threads::run(RANKS, &Options::default(), |comm| {
        let rank = comm.rank();
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let mut all =
            ShardedCollection::new(cpu.clone(), &stream, tables, features, SEED, plan, comm)
                .unwrap()
                .with_codecs(Codec::Fp32, codec)
                .unwrap();
        let samples = part(case.batches[0][0].bags(), rank, RANKS);
        let own = case.batches[0].iter().map(|feature| feature.slice(samples.clone())).collect();
        let checked = all.check(own, BadIdPolicy::Error).unwrap();
        let mut routed = all.route(&stream, checked).unwrap();
        let mut out = cpu.alloc::<f32>(samples.len() * case.width).unwrap();
        let grad = &grad[samples.start * case.width..samples.end * case.width];
        cpu.upload(&stream, grad, &mut out, 0).unwrap();
        all.exchange_gradients(&stream, &mut routed, &out, case.width).unwrap();
        let stats = all.update(&stream, routed, &SparseStep::new(1)).unwrap();
        (stats.nonfinite(), pieces_of(&all, &stream, case))
    })
    .unwrap();
    let mut outcome = Outcome::empty(case);
    let mut left = 0;
    for (nonfinite, pieces) in parts {
        left += nonfinite;
        pieces.iter().for_each(|piece| outcome.put(case, piece));
    }
    (left, outcome)
}

#[test]
fn what_is_not_finite_or_becomes_so_is_seen_and_not_written() {
    let case = under_sgd(case(&[13], Precision::Fp32, 4), LR);
    let before = first_weights();
    let held: Vec<(usize, usize)> = terms(&case)
        .iter()
        .filter(|term| term.sample == 0)
        .map(|term| (case.features[term.feature].table, term.row))
        .collect();
    assert!(held.len() > 2);
    for sharding in [Sharding::DataParallel, Sharding::RowWise] {
        let plan = plan(&case, RANKS, sharding, Route::Unique);
        for (codec, bad) in [
            (Codec::Fp32, f32::NAN),
            (Codec::Fp16, f32::NAN),
            (Codec::Fp16, 1e6), // beyond half precision
            (Codec::Bf16, f32::INFINITY),
            (Codec::Int8, f32::NEG_INFINITY),
        ] {
            let mut grad = case.grads[0].clone();
            grad[..case.width].fill(bad);
            let (left, after) = one_step(&case, &plan, codec, &grad);
            assert!(left > 0, "{sharding} {codec:?}: {bad} was not seen");
            for &(table, row) in &held {
                let dim = case.tables[table].dim;
                let here = row * dim..(row + 1) * dim;
                assert_eq!(before[table][here.clone()], after.weights[table][here], "{codec:?}");
            }
            assert!(after.weights.iter().flatten().all(|x| x.is_finite()), "{codec:?}");
        }
    }
}

#[test]
fn codecs_that_differ_on_one_rank_are_an_error_on_all() {
    let case = case(&[4], Precision::Fp32, 2);
    let plan = plan(&case, RANKS, Sharding::RowWise, Route::Unique);
    let errors = threads::run(RANKS, &Options::default(), |comm| {
        let codec = if comm.rank() == 1 { Codec::Bf16 } else { Codec::Fp16 };
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        ShardedCollection::new(cpu, &stream, tables, features, SEED, &plan, comm)
            .unwrap()
            .with_codecs(codec, Codec::Fp32)
            .unwrap_err()
            .to_string()
    })
    .unwrap();
    for error in errors {
        assert!(error.contains("codecs") && error.contains('1'), "{error}");
    }
}
