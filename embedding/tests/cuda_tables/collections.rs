//! Whole collections: rows that move between tiers, in passes where a batch's rows have no room;
//! tables of any ids; lookups made and grouped on another stream than they are used on.

use tessera_cache::{Admission, Eviction, Policy};
use tessera_data::Jagged;
use tessera_device::Philox;
use tessera_device::cuda::testing;
use tessera_embedding::{
    BadIdPolicy, Clip, EmbeddingCollection, LookupOps, Pooling, Precision, SparseStep, TableKind,
    TableSpec, Tiers,
};

use crate::common::{all_bits, any_cpu, every_optimizer, feature, jagged, table};

const BAGS: usize = 6;
const STEPS: u64 = 3;

/// Tables of some optimizers; the last takes any ids where `dynamic` says so.
fn tables(dynamic: bool) -> Vec<TableSpec> {
    let some = every_optimizer().into_iter().step_by(3).enumerate();
    let mut tables: Vec<TableSpec> = some
        .map(|(i, optimizer)| {
            let mut spec = table(&format!("t{i}"), 30 + 7 * i as u64, [8, 5, 36][i % 3], optimizer);
            spec.precision = [Precision::Fp32, Precision::Bf16, Precision::Fp16][i / 2 % 3];
            spec.pooling = if i % 4 == 3 { Pooling::Mean } else { Pooling::Sum };
            spec
        })
        .collect();
    if dynamic && let Some(last) = tables.last_mut() {
        let (admission, eviction) = (Admission::Always, Eviction::Lru);
        last.kind = TableKind::Dynamic { admission, eviction };
    }
    tables
}

fn batch(tables: &[TableSpec], t: u64) -> Vec<Jagged> {
    let bags = tables.iter().map(|spec| {
        let generator = Philox::for_name(t, &spec.name);
        let (mut offsets, mut ids) = (vec![0], Vec::new());
        for bag in 0..BAGS as u64 {
            let words = generator.block(bag, 0);
            ids.extend((0..u64::from(words[0] % 4)).map(|i| {
                let id = u64::from(generator.block(bag, 1 + i)[0]);
                if spec.is_dynamic() { id as i64 % 90 - 45 } else { (id % spec.rows) as i64 }
            }));
            offsets.push(ids.len() as u64);
        }
        jagged(&offsets, &ids, None)
    });
    bags.collect()
}

/// Steps of training; the bits of pooled vectors, norms and tables.
fn train<D: LookupOps>(device: &D, tables: &[TableSpec], tiers: Option<&Tiers>) -> Vec<u64> {
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let mut column = 0;
    let mut features = Vec::new();
    for (i, spec) in tables.iter().enumerate() {
        features.push(feature(&format!("f{i}"), i, column));
        column += spec.dim.next_multiple_of(4);
    }
    let (specs, stride) = (tables.to_vec(), column);
    let mut collection =
        EmbeddingCollection::with_tiers(device.clone(), &stream, specs, features, 4, tiers)
            .unwrap();
    let mut bits = Vec::new();
    for t in 1..=STEPS {
        let resolver = collection.resolver();
        let host = resolver.check(batch(tables, t), BadIdPolicy::Error).unwrap().at_step(t);
        let mut lookup = resolver.route(&other, host).unwrap();
        if t == 2 {
            resolver.group(&other, &lookup).unwrap();
        }
        let mut out = device.alloc::<f32>(BAGS * stride).unwrap();
        collection.forward(&stream, &mut lookup, &mut out, stride).unwrap();
        let mut pooled = vec![0.0; BAGS * stride];
        device.download(&stream, &out, 0, &mut pooled).unwrap();
        bits.extend(pooled.iter().map(|x| u64::from(x.to_bits())));
        // The gradient of half the sum of squares.
        let norm = collection.grad_sq_norm(&stream, &lookup, &out, stride).unwrap();
        bits.push(norm.to_bits());
        let step = SparseStep { t, lr_scale: 1.0, clip: Clip::Value(0.4) };
        let stats = collection.update(&stream, &lookup, &out, stride, &step).unwrap();
        bits.extend(stats.rows_updated.iter().chain(&stats.rows_nonfinite));
    }
    bits.extend(all_bits(&collection).into_iter().map(u64::from));
    bits
}

#[test]
fn resident_tables_on_two_streams() {
    let Some(cuda) = testing::cuda() else { return };
    let tables = tables(false);
    assert!(train(&cuda, &tables, None) == train(&any_cpu(), &tables, None));
}

#[test]
fn rows_that_move_between_tiers() {
    let Some(cuda) = testing::cuda() else { return };
    let tables = tables(false);
    let wanted = train(&any_cpu(), &tables, None);
    for (device_bytes, policy) in [(10_000, Policy::Lru), (20_000, Policy::Lfu)] {
        let tiers = Tiers { device_bytes, host_bytes: None, cold: None, policy };
        assert!(train(&cuda, &tables, Some(&tiers)) == wanted, "{device_bytes}");
    }
}

#[test]
fn tables_of_any_ids() {
    let Some(cuda) = testing::cuda() else { return };
    let tables = tables(true);
    let wanted = train(&any_cpu(), &tables, None);
    assert!(train(&cuda, &tables, None) == wanted);
    let tiers = Tiers { device_bytes: 9_000, host_bytes: None, cold: None, policy: Policy::Lru };
    assert!(train(&cuda, &tables, Some(&tiers)) == wanted);
}
