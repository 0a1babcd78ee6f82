//! Layouts of `tessera export`: names, shapes and the order of columns, the latter by computing the
//! peers' forward pass from the exported file and holding it against `tessera predict`.

mod common;

use std::collections::BTreeMap;

use common::files::{raw_record, scores};
use common::{Project, Tensor, tensors};

const DIM: usize = 4;
const DENSE: usize = 3;
const TABLES: [(&str, usize, &[usize]); 4] =
    [("user", 11, &[1]), ("item", 7, &[2]), ("shop", 5, &[1]), ("day", 3, &[3])];

/// A sample: dense values, and the ids of each feature.
struct Sample {
    dense: [f32; DENSE],
    ids: Vec<Vec<usize>>,
}

/// 200 samples from a small congruential generator.
fn samples() -> Vec<Sample> {
    let mut state = 12345u32;
    let mut next = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state >> 8
    };
    (0..200)
        .map(|_| Sample {
            dense: std::array::from_fn(|_| (next() % 1000) as f32 / 250.0 - 2.0),
            ids: TABLES
                .iter()
                .map(|(_, rows, hots)| (0..hots[0]).map(|_| next() as usize % rows).collect())
                .collect(),
        })
        .collect()
}

/// A trained model and the scores that it gives to [`samples`].
fn trained(interaction: &str) -> (Project, Vec<f32>) {
    let mut text = format!(
        r#"seed = 3
threads = 1

[data]
format = "raw"
train = ["data.raw"]
eval = ["data.raw"]
batch_size = 20

[model]
dense_features = {DENSE}
bottom_mlp = [6, {DIM}]
{interaction}
top_mlp = [8, 5, 1]

[optimizer]
sparse = {{ kind = "adagrad", lr = 0.1 }}
dense = {{ kind = "adam", lr = 0.02 }}

[train]
epochs = 5
"#
    );
    for (name, rows, hots) in TABLES {
        text += &format!(
            "\n[[table]]\nname = \"{name}\"\nrows = {rows}\ndim = {DIM}\nhots = {}\n",
            hots[0]
        );
    }
    let project = Project::new(&text);
    let records: Vec<u8> = samples()
        .iter()
        .flat_map(|sample| {
            let label = i32::from(sample.dense[0] + sample.ids[0][0] as f32 * 0.2 > 1.0);
            let ids: Vec<i32> = sample.ids.iter().flatten().map(|&id| id as i32).collect();
            raw_record(label, &sample.dense, &ids)
        })
        .collect();
    std::fs::write(project.path("data.raw"), records).unwrap();
    project.ok("train config.toml --out run");
    project.ok("predict config.toml --checkpoint run --out scores.parquet");
    let (_, scores) = scores(&project.path("scores.parquet"));
    (project, scores)
}

fn exported(project: &Project, layout: &str) -> BTreeMap<String, Tensor> {
    project.ok(&format!("export --checkpoint run --out {layout}.safetensors --layout {layout}"));
    tensors(&std::fs::read(project.path(&format!("{layout}.safetensors"))).unwrap())
}

/// `weight x + bias` of the layer `name`.
fn linear(weights: &BTreeMap<String, Tensor>, name: &str, x: &[f64]) -> Vec<f64> {
    let weight = &weights[&format!("{name}.weight")];
    let bias = &weights[&format!("{name}.bias")];
    assert_eq!(weight.shape, [bias.values.len(), x.len()], "{name}");
    times(weight, x).iter().zip(&bias.values).map(|(y, b)| y + f64::from(*b)).collect()
}

fn times(matrix: &Tensor, x: &[f64]) -> Vec<f64> {
    matrix
        .values
        .chunks_exact(x.len())
        .map(|row| row.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum())
        .collect()
}

fn relu(mut x: Vec<f64>) -> Vec<f64> {
    x.iter_mut().for_each(|x| *x = x.max(0.0));
    x
}

/// Sum of the rows of a bag.
fn pooled(table: &Tensor, ids: &[usize]) -> Vec<f64> {
    assert_eq!(table.shape[1], DIM);
    (0..DIM).map(|d| ids.iter().map(|id| f64::from(table.values[id * DIM + d])).sum()).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Runs the peer's model `forward` on every sample and compares with our scores.
fn agree(scores: &[f32], forward: impl Fn(&Sample) -> f64) {
    let samples = samples();
    assert_eq!(scores.len(), samples.len());
    let (low, high) = scores.iter().fold((1f32, 0f32), |(l, h), s| (l.min(*s), h.max(*s)));
    assert!(high - low > 0.1, "the model has learnt something: {low} to {high}");
    for (i, (sample, &ours)) in samples.iter().zip(scores).enumerate() {
        let theirs = 1.0 / (1.0 + (-forward(sample)).exp());
        assert!((theirs - f64::from(ours)).abs() < 1e-5, "sample {i}: {ours}, {theirs} is right");
    }
}

fn dense(sample: &Sample) -> Vec<f64> {
    sample.dense.iter().map(|x| f64::from(*x)).collect()
}

/// TorchRec's sparse and dense arches: the dense vector, then the pooled ones.
fn torchrec_vectors(weights: &BTreeMap<String, Tensor>, sample: &Sample) -> Vec<Vec<f64>> {
    let mut x = dense(sample);
    for layer in 0..2 {
        x = relu(linear(weights, &format!("dense_arch.model._mlp.{layer}._linear"), &x));
    }
    let mut vectors = vec![x];
    for ((name, rows, _), ids) in TABLES.iter().zip(&sample.ids) {
        let prefix = "sparse_arch.embedding_bag_collection.embedding_bags";
        let table = &weights[&format!("{prefix}.{name}.weight")];
        assert_eq!(table.shape, [*rows, DIM]);
        vectors.push(pooled(table, ids));
    }
    vectors
}

fn torchrec_over(weights: &BTreeMap<String, Tensor>, mut x: Vec<f64>) -> f64 {
    for layer in 0..2 {
        x = relu(linear(weights, &format!("over_arch.model.0._mlp.{layer}._linear"), &x));
    }
    linear(weights, "over_arch.model.1", &x)[0]
}

#[test]
fn torchrec_dlrm_takes_pairs_of_the_upper_triangle() {
    let (project, scores) = trained("interaction = \"dot\"");
    let weights = exported(&project, "torchrec");
    assert_eq!(weights.len(), TABLES.len() + 2 * (2 + 3));
    agree(&scores, |sample| {
        let vectors = torchrec_vectors(&weights, sample);
        let mut x = vectors[0].clone();
        // torch.triu_indices(n, n, offset = 1)
        for a in 0..vectors.len() {
            for b in a + 1..vectors.len() {
                x.push(dot(&vectors[a], &vectors[b]));
            }
        }
        torchrec_over(&weights, x)
    });
}

#[test]
fn torchrec_dcn_has_low_rank_cross_layers() {
    let (project, scores) = trained("interaction = \"dcn\"\ndcn = { layers = 2, rank = 3 }");
    let weights = exported(&project, "torchrec");
    let width = DIM * (1 + TABLES.len());
    assert_eq!(weights.len(), TABLES.len() + 2 * (2 + 3) + 2 * 3);
    for layer in 0..2 {
        let shape = |kind: &str| &weights[&format!("inter_arch.crossnet.{kind}.{layer}")].shape;
        assert_eq!(*shape("V_kernels"), [3, width]);
        assert_eq!(*shape("W_kernels"), [width, 3]);
        assert_eq!(*shape("bias"), [width]);
    }
    agree(&scores, |sample| {
        let x0 = torchrec_vectors(&weights, sample).concat();
        let mut x = x0.clone();
        for layer in 0..2 {
            let part = |kind: &str| &weights[&format!("inter_arch.crossnet.{kind}.{layer}")];
            let low = times(part("V_kernels"), &x);
            let high = times(part("W_kernels"), &low);
            let bias = &part("bias").values;
            for i in 0..width {
                x[i] += x0[i] * (high[i] + f64::from(bias[i]));
            }
        }
        torchrec_over(&weights, x)
    });
}

#[test]
fn dlrm_takes_pairs_of_the_lower_triangle() {
    let (project, scores) = trained("interaction = \"dot\"");
    let weights = exported(&project, "dlrm");
    assert_eq!(weights.len(), TABLES.len() + 2 * (2 + 3));
    agree(&scores, |sample| {
        // Layers of the reference's nn.Sequential alternate with activations, hence the 2.
        let mut x = dense(sample);
        for layer in 0..2 {
            x = relu(linear(&weights, &format!("bot_l.{}", 2 * layer), &x));
        }
        let mut vectors = vec![x.clone()];
        for (table, ids) in sample.ids.iter().enumerate() {
            vectors.push(pooled(&weights[&format!("emb_l.{table}.weight")], ids));
        }
        for i in 0..vectors.len() {
            for j in 0..i {
                x.push(dot(&vectors[i], &vectors[j]));
            }
        }
        for layer in 0..2 {
            x = relu(linear(&weights, &format!("top_l.{}", 2 * layer), &x));
        }
        linear(&weights, "top_l.4", &x)[0]
    });
}

#[test]
fn our_own_layout_holds_everything_and_starts_another_run() {
    let (project, scores) = trained("interaction = \"dot\"");
    let ours = exported(&project, "tessera");
    for name in [
        "tables.user.weight",
        "tables.user.sum",
        "dense.bottom.0.weight",
        "dense.bottom.0.weight.m",
        "dense.top.2.bias",
        "dense.top.2.bias.v",
    ] {
        assert!(ours.contains_key(name), "{name}");
    }
    // A run that starts from it and takes no step is the same model.
    project.ok("train config.toml --init tessera.safetensors --out again --set train.max_steps=0");
    project.ok("predict config.toml --checkpoint again --out again.parquet");
    assert_eq!(common::files::scores(&project.path("again.parquet")).1, scores);
    assert!(project.export("again") == project.export("run"));
}

#[test]
fn layouts_that_cannot_hold_the_model_are_refused() {
    let refused = |interaction: &str, set: &str, layout: &str, part: &str| {
        let (project, _) = trained(interaction);
        project.ok(&format!("train config.toml --out other --set train.max_steps=1 {set}"));
        let ran = project
            .run(&format!("export --checkpoint other --out w.safetensors --layout {layout}"));
        ran.says(1, &[&format!("layout {layout} cannot hold this model"), part]);
        assert!(!project.path("w.safetensors").exists());
    };
    let dot = "interaction = \"dot\"";
    let dcn = "interaction = \"dcn\"\ndcn = { layers = 2, rank = 3 }";
    refused(dot, "--set model.wide=true", "dlrm", "no wide part");
    refused(dot, "--set model.wide=true", "torchrec", "no wide part");
    refused(dcn, "", "dlrm", "no cross layers");
    refused("interaction = \"concat\"", "", "torchrec", "by dot or by cross layers");
    refused(dcn, "--set table.1.dim=5", "torchrec", "one dim");
    refused(dot, "--set model.top_mlp=[1]", "torchrec", "at least two layers");
}
