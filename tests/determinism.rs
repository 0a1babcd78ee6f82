//! Same configuration and seed: the same bits, for any number of threads.

mod common;

use common::Project;
use common::model::tables;

/// Batches large enough for the work to be cut between threads, dims on both sides of a vector's
/// width, every optimizer.
fn config(interaction: &str, bottom: &str, dims: &[usize], precision: &str) -> String {
    format!(
        r#"seed = 5

[data]
format = "synthetic"
batch_size = 1000
synthetic = {{ samples = 2500, eval_samples = 500, hots_spread = 1 }}

[model]
dense_features = 5
bottom_mlp = [40, {bottom}]
interaction = "{interaction}"
top_mlp = [33, 1]
wide = true
{}

[optimizer]
clip_norm = 1.0
dense = {{ kind = "adagrad", lr = 0.01 }}

[train]
epochs = 2
{}"#,
        if interaction == "dcn" { "dcn = { layers = 2, rank = 7 }" } else { "" },
        tables(dims, &[precision], |table| Some(1 + table), true),
    )
}

fn same_bits(interaction: &str, bottom: &str, dims: &[usize]) {
    for precision in ["fp32", "fp16", "bf16"] {
        let project = Project::new(&config(interaction, bottom, dims, precision));
        project.ok("train config.toml --out one --set threads=1");
        let (steps, weights) = (project.steps("one"), project.export("one"));
        assert_eq!(steps.len(), 6);
        for threads in [2, 3] {
            let out = format!("on{threads}");
            project.ok(&format!("train config.toml --out {out} --set threads={threads}"));
            let case = format!("{interaction} {precision} on {threads} threads");
            assert_eq!(project.steps(&out), steps, "{case}");
            assert!(project.export(&out) == weights, "{case}: other weights");
            assert_eq!(project.summary(&out)["eval"], project.summary("one")["eval"], "{case}");
        }
        project.ok("train config.toml --out seed --set threads=2 --set seed=6");
        assert_ne!(project.steps("seed"), steps, "another seed is another run");
    }
}

#[test]
fn dot_on_any_threads() {
    same_bits("dot", "16", &[16]);
}

#[test]
fn dcn_on_any_threads() {
    same_bits("dcn", "12", &[1, 33, 8, 3, 64]);
}

#[test]
fn concat_on_any_threads() {
    same_bits("concat", "20", &[7, 32, 16]);
}
