//! Values that peers published.

use std::path::PathBuf;

use serde_json::Value;
use tessera_dense::{
    Bucket, Clip, DenseError, DenseOptimizer, DenseStep, Dlrm, DotShape, Interaction, Loss,
    ModelSpec, ParamGrad, Pass, Rows, RowsMut,
};

use crate::fixture::{download, on_each_device};

/// A golden file, or none where the shared files are missing (a failure under CI).
fn golden(name: &str) -> Option<Value> {
    let shared = std::env::var_os("TESSERA_SHARED").map_or_else(
        || PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../shared"),
        PathBuf::from,
    );
    let path = shared.join("golden/peers").join(name);
    if !path.exists() {
        let ci = std::env::var("CI").is_ok_and(|ci| ci == "true");
        assert!(!ci, "{} is missing: set TESSERA_SHARED", path.display());
        println!("skipped: {} is missing", path.display());
        return None;
    }
    Some(serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap())
}

/// All numbers of a nested array, in order.
fn numbers(value: &Value) -> Vec<f32> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        other => vec![other.as_f64().unwrap() as f32],
    }
}

on_each_device! {
    /// Facebook DLRM's debug run: three steps of SGD with MSE, and a table of plain rows.
    fn dlrm_tiny_run_within_printed_digits(device) {
        let Some(golden) = golden("dlrm_tiny_golden.json") else { return };
        let spec = ModelSpec {
            dense_features: 4,
            bottom: vec![3, 2],
            interaction: Interaction::Dot,
            features: vec![2; 3],
            top: vec![4, 2, 1],
            wide: false,
            loss: Loss::Mse,
        };
        let (lr, batch) = (0.01, 2);
        let stream = device.stream().unwrap();
        let optimizer = DenseOptimizer::Sgd { lr: f64::from(lr) };
        let mut dlrm = Dlrm::new(device, spec.clone(), optimizer, 1).unwrap();
        let mut acts = dlrm.activations(batch).unwrap();
        let names =
            [("bot", "bottom", 2), ("top", "top", 3)].into_iter().flat_map(|(theirs, ours, n)| {
                (0..n).flat_map(move |i| {
                    [("w", "weight"), ("b", "bias")].map(|(their_part, part)| {
                        (format!("{theirs}_{their_part}{i}"), format!("dense.{ours}.{i}.{part}"))
                    })
                })
            });
        let names: Vec<_> = names.collect();
        for (theirs, ours) in &names {
            dlrm.write(&stream, ours, &numbers(&golden["initial"][theirs])).unwrap();
        }
        let mut tables: Vec<Vec<f32>> =
            (0..3).map(|t| numbers(&golden["initial"][format!("emb{t}")])).collect();

        for (step, values) in golden["batches"].as_array().unwrap().iter().enumerate() {
            device.upload(&stream, &numbers(&values["dense"]), &mut acts.dense, 0).unwrap();
            device.upload(&stream, &numbers(&values["targets"]), &mut acts.labels, 0).unwrap();
            // (table, row of the table, columns of the pooled vector in the input rows)
            let mut uses = Vec::new();
            let mut x0 = vec![0.0; batch * spec.stride()];
            for t in 0..3 {
                for r in 0..batch {
                    let at = r * spec.stride() + spec.feature_column(t);
                    for id in values["indices"][t][r].as_array().unwrap() {
                        uses.push((t, id.as_u64().unwrap() as usize, at));
                    }
                }
            }
            for &(t, id, at) in &uses {
                for d in 0..2 {
                    x0[at + d] += tables[t][id * 2 + d];
                }
            }
            device.upload(&stream, &x0, &mut acts.x0, 0).unwrap();
            dlrm.forward(&stream, &mut acts, 0..batch).unwrap();
            let loss = dlrm.loss(&stream, &mut acts, 0..batch, batch as u64).unwrap();
            let want = golden["loss"][step].as_f64().unwrap();
            assert!((loss - want).abs() < 4e-6, "step {step}: loss {loss}, expected {want}");
            let ignore = |_: Bucket<'_, D>| Ok::<(), DenseError>(());
            dlrm.backward(&stream, &mut acts, 0..batch, ParamGrad::Store, ignore).unwrap();
            let dx0 = download(device, &stream, &acts.dx0);
            for &(t, id, at) in &uses {
                for d in 0..2 {
                    tables[t][id * 2 + d] -= lr * dx0[at + d];
                }
            }
            dlrm.update(&stream, &DenseStep { t: step as u64 + 1, lr, clip: Clip::None }).unwrap();
        }

        let check = |name: &str, got: &[f32]| {
            let want = numbers(&golden["updated"][name]);
            assert_eq!(got.len(), want.len(), "{name}");
            for (got, want) in got.iter().zip(&want) {
                assert!((got - want).abs() < 1e-5, "{name}: {got}, expected {want}");
            }
        };
        for (theirs, ours) in &names {
            check(theirs, &dlrm.read(&stream, ours).unwrap());
        }
        for (t, table) in tables.iter().enumerate() {
            check(&format!("emb{t}"), table);
        }
    }

    /// TorchRec lists pairs (i, j), i < j, by i; ours are (i, j), j < i, by i.
    fn torchrec_interactions_within_printed_digits(device) {
        let Some(golden) = golden("torchrec_interaction_golden.json") else { return };
        let (dense, sparse) = (numbers(&golden["dense"]), numbers(&golden["sparse"]));
        let (batch, dim, vectors) = (3, 4, 5);
        let shape = DotShape { vectors, dim, copied: dim };
        let (width, cols) = (vectors * dim, dim + shape.pairs());
        let stream = device.stream().unwrap();
        let mut x = vec![0.0; batch * width];
        let mut y = device.alloc::<f32>(batch * cols).unwrap();
        for r in 0..batch {
            x[r * width..][..dim].copy_from_slice(&dense[r * dim..][..dim]);
            x[r * width + dim..][..width - dim]
                .copy_from_slice(&sparse[r * (width - dim)..][..width - dim]);
        }
        let concat = numbers(&golden["interaction_dcn_concat"]);
        assert!(x.iter().zip(&concat).all(|(x, want)| (x - want).abs() < 5.1e-5));

        let mut input = device.alloc::<f32>(x.len()).unwrap();
        device.upload(&stream, &x, &mut input, 0).unwrap();
        let pass = Pass { stream: &stream, batch };
        let x_rows = Rows::new(&input, 0, width);
        device.dot(pass, shape, x_rows, RowsMut::new(&mut y, 0, cols)).unwrap();
        let y = download(device, &stream, &y);
        let want = numbers(&golden["interaction_dot_upper_row_major"]);
        for r in 0..batch {
            let (got, want) = (&y[r * cols..][..cols], &want[r * cols..][..cols]);
            assert!(got[..dim].iter().zip(want).all(|(got, want)| (got - want).abs() < 5.1e-5));
            let mut theirs = want[dim..].iter();
            for i in 0..vectors {
                for j in i + 1..vectors {
                    let (got, want) = (got[dim + j * (j - 1) / 2 + i], theirs.next().unwrap());
                    assert!((got - want).abs() < 5.1e-5, "row {r}, pair ({i}, {j}): {got}, {want}");
                }
            }
        }
    }
}
