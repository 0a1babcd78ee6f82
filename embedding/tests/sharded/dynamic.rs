//! Tables of any ids on several ranks: who owns an id is a matter of its hash, and every owner
//! admits and evicts by itself.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;

use tessera_cache::{Admission, Eviction, SketchShape, owner_of};
use tessera_comm::{Options, threads};
use tessera_data::{Jagged, RawId};
use tessera_device::{Cpu, CpuStream, Device};
use tessera_embedding::plan::{Plan, Route, Sharding};
use tessera_embedding::{
    BadIdPolicy, EmbeddingCollection, Precision, ShardedCollection, TableKind,
};

use crate::common::{Case, SEED, case, part, plan};

/// A case whose ids are spread over all 64 bits, of tables with `rows` rows for each that the case
/// had.
fn dynamic(kind: (Admission, Eviction), rows: impl Fn(u64) -> u64) -> Case {
    let mut case = case(&[13, 8, 0, 1, 20, 9], Precision::Fp32, 4);
    let (admission, eviction) = kind;
    for table in &mut case.tables {
        table.kind = TableKind::Dynamic { admission, eviction };
        table.rows = rows(table.rows);
    }
    let spread = |id: &RawId| match id.0 {
        0 => RawId(-1), // the largest id
        1 => RawId(0),
        id => RawId(id.wrapping_mul(0x9E37_79B9_7F4A_7C15_u64 as i64)),
    };
    for feature in case.batches.iter_mut().flatten() {
        let ids = feature.ids().iter().map(spread).collect();
        let (offsets, weights) =
            (feature.offsets().to_vec(), feature.weights().map(<[f32]>::to_vec));
        *feature = Jagged::new(feature.bags(), offsets, ids, weights).unwrap();
    }
    case
}

/// Of a table: weights and states of each id, by column.
type Rows = BTreeMap<u64, BTreeMap<usize, f32>>;

#[derive(Debug, PartialEq)]
struct Outcome {
    pooled: Vec<Vec<f32>>,
    rows: Vec<Rows>,
    evaluated: Vec<f32>,
}

/// Adds what a piece of a table holds to `rows`; what is there already must be the same bits.
fn collect(
    rows: &mut Rows,
    store: &EmbeddingCollection<Cpu>,
    table: usize,
    stream: &CpuStream,
    first_column: usize,
) {
    let (state, spec) = (store.id_state(table).unwrap(), &store.schema().tables()[table]);
    let mut bytes = vec![0u8; state.rows.len() * spec.dim * 4];
    store.read_weights_of(stream, table, &state.rows, &mut bytes).unwrap();
    let weights: Vec<f32> = bytes.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)).collect();
    let mut put = |id: u64, column: usize, value: f32| {
        let old = rows.entry(id).or_default().insert(column, value);
        assert!(old.is_none_or(|old| old.to_bits() == value.to_bits()), "id {id} {column}");
    };
    for (id, weights) in state.ids.iter().zip(weights.chunks_exact(spec.dim)) {
        weights.iter().zip(first_column..).for_each(|(&w, column)| put(*id, column, w));
    }
    for (number, tensor) in spec.optimizer.state().iter().enumerate() {
        let columns = tensor.columns(spec.dim);
        let mut values = vec![0.0; state.rows.len() * columns];
        store.read_state_of(stream, table, tensor.name, &state.rows, &mut values).unwrap();
        for (id, values) in state.ids.iter().zip(values.chunks_exact(columns)) {
            let first = (number + 1) * 1000 + if columns == 1 { 0 } else { first_column };
            values.iter().zip(first..).for_each(|(&value, column)| put(*id, column, value));
        }
    }
}

fn on_one_rank(case: &Case) -> Outcome {
    let cpu = Cpu::new(NonZeroUsize::new(2)).unwrap();
    let stream = cpu.stream().unwrap();
    let (tables, features, device) = (case.tables.clone(), case.features.clone(), cpu.clone());
    let mut all = EmbeddingCollection::new(device, &stream, tables, features, SEED).unwrap();
    let mut pooled = Vec::new();
    for (t, (batch, grad)) in (1..).zip(case.batches.iter().zip(&case.grads)) {
        let resolver = all.resolver();
        let checked = resolver.check(batch.clone(), BadIdPolicy::Error).unwrap().at_step(t);
        let mut lookup = resolver.route(&stream, checked).unwrap();
        let mut out = cpu.alloc::<f32>(grad.len()).unwrap();
        all.forward(&stream, &mut lookup, &mut out, case.width).unwrap();
        pooled.push(out.to_vec());
        cpu.upload(&stream, grad, &mut out, 0).unwrap();
        all.update(&stream, &lookup, &out, case.width, &case.step(t)).unwrap();
    }
    let batch = case.batches[0].clone();
    let mut out = cpu.alloc::<f32>(case.grads[0].len()).unwrap();
    let mut lookup = all.resolve(&stream, batch, BadIdPolicy::Error).unwrap();
    all.forward(&stream, &mut lookup, &mut out, case.width).unwrap();
    let mut rows = vec![Rows::new(); case.tables.len()];
    for (table, rows) in rows.iter_mut().enumerate() {
        collect(rows, &all, table, &stream, 0);
    }
    Outcome { pooled, rows, evaluated: out.to_vec() }
}

fn on_ranks(case: &Case, plan: &Plan) -> Outcome {
    let ranks = plan.ranks();
    let parts = threads::run(ranks, &Options::default(), |comm| {
        let rank = comm.rank();
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let mut all =
            ShardedCollection::new(cpu.clone(), &stream, tables, features, SEED, plan, comm)
                .unwrap();
        let mut pooled = Vec::new();
        for (t, (batch, grad)) in (1..).zip(case.batches.iter().zip(&case.grads)) {
            let samples = part(batch[0].bags(), rank, ranks);
            let own = batch.iter().map(|feature| feature.slice(samples.clone())).collect();
            let checked = all.check(own, BadIdPolicy::Error).unwrap().at_step(t);
            let mut routed = all.route(&stream, checked).unwrap();
            let mut out = cpu.alloc::<f32>(samples.len() * case.width).unwrap();
            all.forward(&stream, &mut routed, &mut out, case.width).unwrap();
            pooled.push(out.to_vec());
            let grad = &grad[samples.start * case.width..samples.end * case.width];
            cpu.upload(&stream, grad, &mut out, 0).unwrap();
            all.exchange_gradients(&stream, &mut routed, &out, case.width).unwrap();
            all.update(&stream, routed, &case.step(t)).unwrap();
        }
        let samples = part(case.batches[0][0].bags(), rank, ranks);
        let own = case.batches[0].iter().map(|feature| feature.slice(samples.clone())).collect();
        let checked = all.check(own, BadIdPolicy::Error).unwrap();
        let mut routed = all.route(&stream, checked).unwrap();
        let mut out = cpu.alloc::<f32>(samples.len() * case.width).unwrap();
        all.forward(&stream, &mut routed, &mut out, case.width).unwrap();
        all.finish(&stream, routed).unwrap();
        let mut rows = vec![Rows::new(); case.tables.len()];
        let mut states = Vec::new();
        for held in all.held() {
            let (block, blocks) = held.block();
            let state = held.store.id_state(0).unwrap();
            assert!(state.ids.iter().all(|&id| owner_of(id, blocks as u64) == block as u64));
            assert!(state.ids.len() as u64 <= held.rows().end - held.rows().start);
            states.push((held.table(), block, state));
            collect(&mut rows[held.table()], &held.store, 0, &stream, held.columns().start);
        }
        (pooled, rows, out.to_vec(), states)
    })
    .unwrap();
    let mut outcome = Outcome {
        pooled: vec![Vec::new(); case.batches.len()],
        rows: vec![Rows::new(); case.tables.len()],
        evaluated: Vec::new(),
    };
    let mut maps = BTreeMap::new();
    for (pooled, rows, evaluated, states) in parts {
        outcome.pooled.iter_mut().zip(pooled).for_each(|(all, part)| all.extend(part));
        outcome.evaluated.extend(evaluated);
        for (all, part) in outcome.rows.iter_mut().zip(rows) {
            for (id, values) in part {
                let all = all.entry(id).or_default();
                for (column, value) in values {
                    let old = all.insert(column, value);
                    assert!(old.is_none_or(|old| old.to_bits() == value.to_bits()));
                }
            }
        }
        // Whoever keeps the same ids has the same map of them.
        for (table, block, state) in states {
            let other = maps.entry((table, block)).or_insert_with(|| state.clone());
            assert_eq!(*other, state, "table {table}, block {block}");
        }
    }
    outcome
}

fn close(a: &Outcome, b: &Outcome, what: &str) {
    let near = |a: f32, b: f32| (a - b).abs() <= 2e-5 * (1.0 + b.abs());
    let all_near = |a: &[f32], b: &[f32]| a.iter().zip(b).all(|(&a, &b)| near(a, b));
    for (step, (a, b)) in a.pooled.iter().zip(&b.pooled).enumerate() {
        assert!(a.len() == b.len() && all_near(a, b), "{what}: pooled at step {step}");
    }
    assert!(all_near(&a.evaluated, &b.evaluated), "{what}: evaluation");
    for (table, (a, b)) in a.rows.iter().zip(&b.rows).enumerate() {
        assert!(a.keys().eq(b.keys()), "{what}: ids of table {table}");
        for ((id, a), b) in a.iter().zip(b.values()) {
            assert!(a.keys().eq(b.keys()), "{what}: columns of {id}");
            assert!(a.values().zip(b.values()).all(|(&a, &b)| near(a, b)), "{what}: id {id}");
        }
    }
}

fn counting() -> Admission {
    let sketch = SketchShape { width: 1 << 12, depth: 4 };
    Admission::Count { n: 3, sketch, halve_every_sightings: 0 }
}

#[test]
fn with_room_for_all_ids_ranks_agree_with_one_and_plans_to_the_bit() {
    for admission in [Admission::Always, counting(), Admission::Probability { p: 0.5 }] {
        let case = dynamic((admission, Eviction::Lru), |rows| 40 * rows);
        let one = on_one_rank(&case);
        assert!(one.rows.iter().map(BTreeMap::len).sum::<usize>() > 40);
        for ranks in [1, 4] {
            let mut first: Option<Outcome> = None;
            for sharding in Sharding::ALL {
                let what = format!("{ranks} ranks, {sharding}, {admission:?}");
                let outcome = on_ranks(&case, &plan(&case, ranks, sharding, Route::Unique));
                close(&outcome, &one, &what);
                let first = first.get_or_insert_with(|| {
                    on_ranks(&case, &plan(&case, ranks, Sharding::ALL[0], Route::Unique))
                });
                assert!(*first == outcome, "{what}: not the bits of {}", Sharding::ALL[0]);
                let pooled = on_ranks(&case, &plan(&case, ranks, sharding, Route::Pooled));
                close(&pooled, &one, &format!("{what}, pooled"));
            }
        }
    }
}

/// Where one block has all rows, what is admitted and evicted is what one rank does.
#[test]
fn without_room_an_uncut_table_does_on_ranks_what_it_does_on_one() {
    let kinds = [
        (Admission::Always, Eviction::Lru),
        (counting(), Eviction::Lfu { halve_every_steps: 2 }),
        (Admission::Always, Eviction::None),
        (Admission::Always, Eviction::Age { steps: 1 }),
    ];
    for kind in kinds {
        let case = dynamic(kind, |rows| rows.div_ceil(3));
        let one = on_one_rank(&case);
        for sharding in [Sharding::TableWise, Sharding::ColumnWise, Sharding::DataParallel] {
            for route in [Route::Unique, Route::Pooled] {
                let what = format!("{sharding}, {route:?}, {kind:?}");
                close(&on_ranks(&case, &plan(&case, 3, sharding, route)), &one, &what);
            }
        }
    }
}

#[test]
fn cut_tables_stay_within_their_rows() {
    let kind = (Admission::Always, Eviction::Lru);
    let case = dynamic(kind, |rows| (rows / 2).max(4));
    for sharding in [Sharding::RowWise, Sharding::Grid, Sharding::TableRowWise] {
        let plan = plan(&case, 4, sharding, Route::Unique);
        let outcome = on_ranks(&case, &plan);
        for (rows, table) in outcome.rows.iter().zip(&case.tables) {
            assert!(rows.len() as u64 <= table.rows, "{sharding}");
        }
        assert!(outcome == on_ranks(&case, &plan), "{sharding}: another run differs");
    }
}

#[test]
fn what_ranks_cannot_share_is_refused() {
    let case = dynamic((Admission::Always, Eviction::Lru), |_| 3);
    let plan = plan(&case, 4, Sharding::RowWise, Route::Unique);
    let errors = threads::run(4, &Options::default(), |comm| {
        let cpu = Cpu::new(NonZeroUsize::new(1)).unwrap();
        let stream = cpu.stream().unwrap();
        let (tables, features) = (case.tables.clone(), case.features.clone());
        let made = ShardedCollection::new(cpu, &stream, tables, features, SEED, &plan, comm);
        made.unwrap_err().to_string()
    });
    for error in errors.unwrap() {
        assert!(error.contains("table t0: 3 rows leave a rank without any"), "{error}");
    }
}
