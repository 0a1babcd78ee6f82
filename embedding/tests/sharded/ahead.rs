//! Batches that are routed and fetched by another thread while earlier ones are trained on, and
//! cut into micro-batches whose exchanges overlap: the bits of one batch after the other.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

use tessera_cache::Policy;
use tessera_cache::log::Reader;
use tessera_comm::{Options, threads};
use tessera_data::{Jagged, RawId};
use tessera_device::{Cpu, Device};
use tessera_embedding::plan::{Plan, Route, Sharding};
use tessera_embedding::{
    BadIdPolicy, ColdTier, EmbeddingError, FeatureSpec, Precision, Routed, ShardedCollection,
    TableSpec, Tiers, micro_batches,
};

use crate::common::{
    Case, EXACT, Outcome, SEED, case, on_ranks, on_ranks_with, part, pieces_of, plan,
};

/// How a run overlaps.
#[derive(Clone, Copy, Debug)]
struct Ahead {
    /// Batches that wait, routed and fetched, at the most.
    depth: usize,
    micro: usize,
    /// Whether all of a batch's exchanges are posted before any of it is awaited.
    overlap: bool,
}

/// The run of [`on_ranks_with`], with routing ahead.
fn ahead(case: &Case, plan: &Plan, how: Ahead, tiers: Option<&Tiers>) -> Outcome {
    let ranks = plan.ranks();
    let parts = threads::run(ranks, &Options::default(), |comm| {
        let rank = comm.rank();
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let model = (case.tables.clone(), case.features.clone());
        let tiers = tiers.map(|tiers| tiers.of_rank(rank));
        let (device, tiers) = (cpu.clone(), tiers.as_ref());
        let mut all =
            ShardedCollection::with_tiers(device, &stream, model, SEED, plan, comm, tiers).unwrap();
        let router = all.router("ahead", how.micro).unwrap();
        let (send, receive) = sync_channel::<Routed<Cpu>>(how.depth - 1);
        let done = &AtomicU64::new(0);
        std::thread::scope(|scope| {
            let cpu = &cpu;
            scope.spawn(move || {
                let stream = cpu.stream().unwrap();
                for (step, batch) in (1..).zip(&case.batches) {
                    router.ranks().set_step(step);
                    let samples = part(batch[0].bags(), rank, ranks);
                    let own = batch.iter().map(|feature| feature.slice(samples.clone())).collect();
                    let checked = router.check(own, BadIdPolicy::Error).unwrap();
                    let mut routed = router.route(&stream, checked).unwrap();
                    let fetched = router.fetchers().fetch(&mut routed).unwrap();
                    if send.send(routed).is_err() {
                        return;
                    }
                    // What does not fit beside earlier batches has the tiers to itself.
                    while !fetched && done.load(Ordering::Acquire) < step {
                        std::thread::yield_now();
                    }
                }
            });
            let (mut pooled, mut norms) = (Vec::new(), Vec::new());
            let mut updated = vec![0; case.tables.len()];
            for (t, grad) in (1..).zip(&case.grads) {
                let mut routed = receive.recv().unwrap();
                all.set_step(t);
                let samples = part(case.batches[t as usize - 1][0].bags(), rank, ranks);
                assert_eq!(routed.micro_batches(), micro_batches(samples.len(), how.micro));
                let mut out = cpu.alloc::<f32>(samples.len() * case.width).unwrap();
                let grad = &grad[samples.start * case.width..samples.end * case.width];
                let grad = cpu.upload_new(grad);
                all.hold(&stream, &mut routed).unwrap();
                all.look_up(&stream, &mut routed).unwrap();
                if how.overlap {
                    for micro in 0..how.micro {
                        all.post_vectors(&stream, &mut routed, micro).unwrap();
                    }
                }
                for micro in 0..how.micro {
                    if !how.overlap {
                        all.post_vectors(&stream, &mut routed, micro).unwrap();
                    }
                    all.forward_micro(&stream, &mut routed, micro, &mut out, case.width).unwrap();
                    all.post_gradients(&stream, &mut routed, micro, &grad, case.width).unwrap();
                    if !how.overlap {
                        all.receive_gradients(&stream, &mut routed).unwrap();
                    }
                }
                all.receive_gradients(&stream, &mut routed).unwrap();
                pooled.push(out.to_vec());
                norms.push(all.grad_sq_norm(&stream, &routed).unwrap());
                let stats = all.update(&stream, routed, &case.step(t)).unwrap();
                for (sum, moved) in updated.iter_mut().zip(stats.rows_updated) {
                    *sum += moved;
                }
                done.store(t, Ordering::Release);
            }
            for table in 0..case.tables.len() {
                assert_eq!(all.store_stats(table).unwrap().rows_held, 0, "pins are gone");
            }
            (pooled, norms, updated, pieces_of(&all, &stream, case))
        })
    });
    Outcome::of_parts(case, parts.unwrap())
}

/// The same buffer on the device.
trait UploadNew {
    fn upload_new(&self, values: &[f32]) -> <Cpu as Device>::Buffer<f32>;
}

impl UploadNew for Cpu {
    fn upload_new(&self, values: &[f32]) -> <Cpu as Device>::Buffer<f32> {
        let mut buffer = self.alloc(values.len()).unwrap();
        self.upload(&self.stream().unwrap(), values, &mut buffer, 0).unwrap();
        buffer
    }
}

const PLANS: [(usize, Sharding, Route); 8] = [
    (1, Sharding::TableWise, Route::Unique),
    (2, Sharding::TableWise, Route::Unique),
    (3, Sharding::RowWise, Route::Unique),
    (2, Sharding::RowWise, Route::Pooled),
    (4, Sharding::ColumnWise, Route::Unique),
    (4, Sharding::Grid, Route::Pooled),
    (4, Sharding::Grid, Route::Unique),
    (2, Sharding::DataParallel, Route::Unique),
];

#[test]
fn any_overlap_gives_the_bits_of_one_batch_after_the_other() {
    let case = case(&[9, 1, 7, 0, 12, 9], Precision::Bf16, 3);
    for (ranks, sharding, route) in PLANS {
        let plan = plan(&case, ranks, sharding, route);
        let serial = on_ranks(&case, &plan, 1, EXACT);
        for (depth, micro, overlap) in
            [(1, 1, false), (1, 2, true), (2, 3, true), (3, 8, true), (4, 3, false)]
        {
            let how = Ahead { depth, micro, overlap };
            let found = ahead(&case, &plan, how, None);
            assert!(found == serial, "{ranks} ranks, {sharding:?}, {route:?}, {how:?}");
        }
    }
}

#[test]
fn so_it_does_over_tiers_that_hold_one_batch_or_several() {
    let dir = tempfile::tempdir().unwrap();
    let case = case(&[9, 3, 12, 0, 7, 9, 9], Precision::Fp32, 2);
    let mut run = 0;
    for (ranks, sharding, route) in PLANS {
        let plan = plan(&case, ranks, sharding, route);
        let serial = on_ranks_with(&case, &plan, 1, EXACT, None);
        for (device_bytes, host_bytes) in [(9_000, None), (9_000, Some(3_000)), (40_000, Some(0))] {
            for (depth, micro) in [(1, 1), (2, 2), (4, 3)] {
                run += 1;
                let cold = host_bytes.map(|_| {
                    let dir = dir.path().join(run.to_string());
                    ColdTier { dir, bytes: None, reader: Reader::Auto }
                });
                let tiers = Tiers { device_bytes, host_bytes, cold, policy: Policy::Lru };
                let how = Ahead { depth, micro, overlap: true };
                let found = ahead(&case, &plan, how, Some(&tiers));
                assert!(found == serial, "{ranks} ranks, {sharding:?}, {how:?}, {tiers:?}");
            }
        }
    }
}

/// The ids of table 0 that batch `step` of a stream has, of `each` at most.
fn keys(stream: &str, step: u64, each: u64) -> Vec<i64> {
    let first = match stream {
        "identical" => 0,
        "disjoint" => step * each,
        "alternating" => step % 2 * each,
        "thrice" => step / 3 * each,
        // Half of each batch's are those of the one before.
        "sliding" => step * each / 2,
        "empty between" if step % 2 == 1 => return Vec::new(),
        "empty between" => 0,
        _ => unreachable!("no such stream"),
    };
    (first..first + each).map(|id| id as i64).collect()
}

#[test]
fn key_streams_made_to_trip_a_pipeline_change_no_bit() {
    const EACH: u64 = 16;
    const STEPS: u64 = 9;
    let base = case(&[1], Precision::Fp32, 1);
    let table = TableSpec { rows: EACH * STEPS, ..base.tables[0].clone() };
    let features = vec![FeatureSpec { name: "a".into(), table: 0, column: 0 }];
    let width = table.dim;
    let dir = tempfile::tempdir().unwrap();
    let slots = |count: u64| count * (width as u64 * 4 + 36);
    for stream in ["identical", "disjoint", "alternating", "thrice", "sliding", "empty between"] {
        let batches = (0..STEPS).map(|step| {
            let ids: Vec<RawId> = keys(stream, step, EACH).into_iter().map(RawId).collect();
            // Every id twice, in bags of two samples, so that micro-batches share rows.
            let length = u64::from(!ids.is_empty());
            let twice = [&ids[..], &ids[..]].concat();
            let lengths = vec![length; 2 * EACH as usize];
            vec![Jagged::from_lengths(&lengths, twice, None).unwrap()]
        });
        let grad = |step: u64| {
            let number = |i: usize| ((i as u64 * 37 + step * 11) % 101) as f32 * 0.01 - 0.5;
            (0..2 * EACH as usize * width).map(number).collect()
        };
        let case = Case {
            tables: vec![table.clone()],
            features: features.clone(),
            width,
            batches: batches.collect(),
            grads: (0..STEPS).map(grad).collect(),
            clips: false,
        };
        for (ranks, sharding) in
            [(1, Sharding::TableWise), (2, Sharding::RowWise), (4, Sharding::Grid)]
        {
            let plan = plan(&case, ranks, sharding, Route::Unique);
            let serial = on_ranks(&case, &plan, 1, EXACT);
            for (depth, micro) in [(1, 2), (2, 1), (3, 3), (4, 8)] {
                // Room for one batch, for two, for all that are on their way.
                for count in [EACH, 2 * EACH, 6 * EACH] {
                    let place = format!("{stream}-{ranks}-{depth}-{count}");
                    let cold = Some(ColdTier {
                        dir: dir.path().join(place),
                        bytes: None,
                        reader: Reader::Auto,
                    });
                    let tiers = Tiers {
                        device_bytes: slots(count),
                        host_bytes: Some(slots(EACH / 2)),
                        cold,
                        policy: Policy::Lru,
                    };
                    let how = Ahead { depth, micro, overlap: true };
                    let found = ahead(&case, &plan, how, Some(&tiers));
                    assert!(found == serial, "{stream}: {ranks} ranks, {how:?}, {count} slots");
                }
                let how = Ahead { depth, micro, overlap: true };
                assert!(ahead(&case, &plan, how, None) == serial, "{stream}: {ranks}, {how:?}");
            }
        }
    }
}

#[test]
fn the_number_of_micro_batches_is_checked_and_the_same_on_all_ranks() {
    let case = case(&[4], Precision::Fp32, 1);
    let plan = plan(&case, 2, Sharding::TableWise, Route::Unique);
    let errors = threads::run(2, &Options::default(), |comm| {
        let rank = comm.rank();
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let all =
            ShardedCollection::new(cpu, &stream, tables, features, SEED, &plan, comm).unwrap();
        let many = all.router("many", 256).unwrap_err();
        assert!(matches!(many, EmbeddingError::MicroBatches { given: 256, max: 255 }), "{many}");
        all.router("different", 1 + rank).unwrap_err().to_string()
    });
    for error in errors.unwrap() {
        assert!(error.contains("number of micro-batches"), "{error}");
    }
}
