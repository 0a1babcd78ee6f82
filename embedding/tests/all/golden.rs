//! Every file of golden/optim: pooled vectors, weights and states after each step, alone and with
//! all tables of an optimizer in one collection, on any device.

use std::path::Path;

use safetensors::SafeTensors;
use tessera_data::{Jagged, RawId};
use tessera_embedding::{
    BadIdPolicy, EmbeddingCollection, Init, LookupOps, Pooling, SparseOptimizer, SparseStep,
    WeightDecay,
};

use crate::common::{assert_close, feature, golden, state, stream, table, weights};

/// One file: a table and what happens to it.
struct Case {
    name: String,
    bytes: Vec<u8>,
    optimizer: SparseOptimizer,
    pooling: Pooling,
    dim: usize,
}

const STEPS: usize = 4;
const BAGS: usize = 9;

impl Case {
    fn f32s(&self, name: &str) -> Vec<f32> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let bytes = file.tensor(name).unwrap().data();
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn f64s(&self, name: &str) -> Vec<f64> {
        self.f32s(name).into_iter().map(f64::from).collect()
    }

    fn i64s(&self, name: &str) -> Vec<i64> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let bytes = file.tensor(name).unwrap().data();
        bytes.chunks_exact(8).map(|b| i64::from_le_bytes(b.try_into().unwrap())).collect()
    }

    fn bags(&self, step: usize) -> Jagged {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let weights = format!("per_sample_weights.{step}");
        let weighted = file.names().iter().any(|name| **name == weights);
        let offsets = self.i64s(&format!("offsets.{step}")).iter().map(|&x| x as u64).collect();
        let ids = self.i64s(&format!("ids.{step}")).into_iter().map(RawId).collect();
        Jagged::new(BAGS, offsets, ids, weighted.then(|| self.f32s(&weights))).unwrap()
    }
}

fn optimizer(kind: &str, hyper: &serde_json::Value) -> SparseOptimizer {
    let or = |name: &str, default: f64| hyper.get(name).map_or(default, |x| x.as_f64().unwrap());
    let lr = hyper["lr"].as_f64().unwrap();
    let (eps, beta1, beta2) = (or("eps", 1e-8), or("beta1", 0.9), or("beta2", 0.999));
    let weight_decay = or("weight_decay", 0.0);
    let decay = match hyper.get("weight_decay_mode").and_then(serde_json::Value::as_str) {
        None => WeightDecay::None,
        Some("l2") => WeightDecay::L2(weight_decay),
        Some("decouple") => WeightDecay::Decouple(weight_decay),
        Some(mode) => panic!("unknown decay {mode}"),
    };
    match kind {
        "sgd" => SparseOptimizer::Sgd { lr },
        "adagrad" => SparseOptimizer::Adagrad { lr, eps, decay },
        "rowwise_adagrad" => {
            let moment_scale = or("moment_scale", 1.0);
            SparseOptimizer::RowwiseAdagrad { lr, eps, decay, moment_scale }
        }
        "adam" => SparseOptimizer::Adam { lr, eps, beta1, beta2, weight_decay },
        "partial_rowwise_adam" => {
            SparseOptimizer::PartialRowwiseAdam { lr, eps, beta1, beta2, weight_decay }
        }
        "lamb" => SparseOptimizer::Lamb { lr, eps, beta1, beta2, weight_decay },
        "partial_rowwise_lamb" => {
            SparseOptimizer::PartialRowwiseLamb { lr, eps, beta1, beta2, weight_decay }
        }
        "lars_sgd" => {
            let (eta, momentum) = (or("eta", 0.001), or("momentum", 0.9));
            SparseOptimizer::LarsSgd { lr, eta, momentum, weight_decay }
        }
        "ftrl" => SparseOptimizer::Ftrl {
            lr,
            beta: or("beta", 1.0),
            l1: or("l1", 0.0),
            l2: or("l2", 0.0),
        },
        _ => panic!("unknown optimizer {kind}"),
    }
}

fn cases(golden: &Path) -> Vec<Case> {
    let dir = golden.join("optim");
    let index = std::fs::read(dir.join("index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let case = |entry: &serde_json::Value| {
        let name = entry["file"].as_str().unwrap().to_owned();
        Case {
            bytes: std::fs::read(dir.join(&name)).unwrap(),
            optimizer: optimizer(entry["optimizer"].as_str().unwrap(), &entry["hyper"]),
            pooling: if entry["pooling"] == "mean" { Pooling::Mean } else { Pooling::Sum },
            dim: entry["dim"].as_u64().unwrap() as usize,
            name,
        }
    };
    index.as_array().unwrap().iter().map(case).collect()
}

/// Runs the steps of some files as the tables of one collection, with `gap` unused columns
/// between features.
fn run<D: LookupOps>(device: &D, cases: &[&Case], gap: usize) {
    let stream = stream(device);
    let mut column = gap;
    let mut tables = Vec::new();
    let mut features = Vec::new();
    for (i, case) in cases.iter().enumerate() {
        let rows = (case.f32s("w.0").len() / case.dim) as u64;
        let mut spec = table(&case.name, rows, case.dim, case.optimizer);
        (spec.pooling, spec.init) = (case.pooling, Init::Zero);
        tables.push(spec);
        features.push(feature(&case.name, i, column));
        column += case.dim + gap;
    }
    let stride = column;
    let columns: Vec<usize> = features.iter().map(|feature| feature.column).collect();
    let mut collection =
        EmbeddingCollection::new(device.clone(), &stream, tables, features, 1).unwrap();
    for (i, case) in cases.iter().enumerate() {
        let start = case.f32s("w.0");
        let rows = (start.len() / case.dim) as u64;
        collection.write_weights(&stream, i, 0..rows, &start).unwrap();
    }
    for step in 0..STEPS {
        let bags = cases.iter().map(|case| case.bags(step)).collect();
        let mut lookup = collection.resolve(&stream, bags, BadIdPolicy::Error).unwrap();
        let mut out = vec![7.5; BAGS * stride];
        let mut on_device = device.alloc::<f32>(out.len()).unwrap();
        device.upload(&stream, &out, &mut on_device, 0).unwrap();
        collection.forward(&stream, &mut lookup, &mut on_device, stride).unwrap();
        device.download(&stream, &on_device, 0, &mut out).unwrap();
        let mut grad = vec![f32::NAN; BAGS * stride]; // columns of no feature are not read
        for (case, &column) in cases.iter().zip(&columns) {
            let grads = case.f32s(&format!("grad.{step}"));
            let mut pooled = Vec::new();
            for (bag, row) in grads.chunks_exact(case.dim).enumerate() {
                let at = bag * stride + column;
                grad[at..at + case.dim].copy_from_slice(row);
                pooled.extend_from_slice(&out[at..at + case.dim]);
                out[at..at + case.dim].fill(7.5);
            }
            let expected = case.f64s(&format!("pooled.{step}"));
            let what = format!("{} pooled.{step}", case.name);
            assert_close(&what, &pooled, &expected, 1e-6, 2e-5);
        }
        assert!(out.iter().all(|&x| x == 7.5), "a column of no feature was written");
        device.upload(&stream, &grad, &mut on_device, 0).unwrap();
        let stats = collection
            .update(&stream, &lookup, &on_device, stride, &SparseStep::new(step as u64 + 1))
            .unwrap();
        assert_eq!(stats.nonfinite(), 0);
        for (i, case) in cases.iter().enumerate() {
            let after = step + 1;
            let what = format!("{} w.{after}", case.name);
            let expected = case.f64s(&format!("w.{after}"));
            assert_close(&what, &weights(&collection, i), &expected, 1e-6, 2e-5);
            for tensor in case.optimizer.state() {
                let what = format!("{} {}.{after}", case.name, tensor.name);
                let expected = case.f64s(&format!("{}.{after}", tensor.name));
                assert_close(&what, &state(&collection, i, tensor.name), &expected, 1e-6, 2e-5);
            }
        }
    }
}

pub fn every_file_alone<D: LookupOps>(device: &D) {
    let Some(golden) = golden() else { return };
    let cases = cases(&golden);
    assert_eq!(cases.len(), 96);
    cases.iter().for_each(|case| run(device, &[case], 0));
}

pub fn all_tables_of_an_optimizer_together<D: LookupOps>(device: &D) {
    let Some(golden) = golden() else { return };
    let cases = cases(&golden);
    let mut kinds: Vec<&str> = cases.iter().map(|case| case.optimizer.name()).collect();
    kinds.dedup();
    assert_eq!(kinds.len(), 9);
    for kind in &kinds {
        let of_kind: Vec<&Case> =
            cases.iter().filter(|case| case.optimizer.name() == *kind).collect();
        run(device, &of_kind, 1);
    }
    run(device, &cases.iter().collect::<Vec<_>>(), 0);
}
