//! Exchanges in fewer bits: near the golden losses, as near as the format allows, and not at all
//! in the way when they are off.

use crate::common::golden::{RUNS, expected, project, sharded};
use crate::common::shared::shared;

/// How far a codec may lead from the golden losses, relative.
struct Limits {
    codec: &'static str,
    /// The loss of the first step, when nothing but vectors has been rounded: the rounding error of
    /// one element, half a unit in its last place (int8: of the largest of its row).
    first: f64,
    /// The losses of the first 20 steps, about twice the largest distance measured over all runs,
    /// routes and directions.
    early: f64,
    /// All 60 losses, likewise. Training amplifies small differences: where a unit's input is near
    /// 0, or adagrad meets a row for the first time and moves by the sign of its gradient, a loss
    /// that was right to 1e-5 is off by 1e-2 in the next step, whatever the codec.
    all: f64,
}

const LIMITS: [Limits; 3] = [
    Limits { codec: "fp16", first: 1.0 / 2048.0, early: 0.01, all: 0.06 },
    Limits { codec: "bf16", first: 1.0 / 256.0, early: 0.07, all: 0.12 },
    Limits { codec: "int8", first: 1.0 / 254.0, early: 0.035, all: 0.06 },
];

#[test]
fn losses_stay_near_the_golden_ones() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        let golden = shared.join("golden").join(run);
        let project = project(&golden);
        let expected = expected(&golden);
        let golden_losses = expected["train_loss"].as_array().unwrap();
        let losses = |out: &str, set: &str| -> Vec<f64> {
            project.ok(&format!(
                "train golden/config.toml --init golden/init.safetensors --out {out} \
                 --set parallel.ranks=3 --set threads=3 {set}{}",
                sharded(&golden, "row_wise")
            ));
            project.steps(out).iter().map(|line| line.loss.unwrap()).collect()
        };
        for route in ["unique", "pooled"] {
            let plain = losses(&format!("plain-{route}"), &format!("--set parallel.route={route}"));
            for limits in &LIMITS {
                for direction in ["forward", "backward"] {
                    let out = format!("{}-{route}-{direction}", limits.codec);
                    let codec = format!("--set parallel.codec_{direction}={}", limits.codec);
                    let ours = losses(&out, &format!("--set parallel.route={route} {codec}"));
                    let apart: Vec<f64> = ours
                        .iter()
                        .zip(golden_losses)
                        .map(|(ours, want)| (ours / want.as_f64().unwrap() - 1.0).abs())
                        .collect();
                    let largest = |steps: usize| apart[..steps].iter().copied().fold(0.0, f64::max);
                    let [first, early, all] = [1, 20, 60].map(largest);
                    let what = format!("{run} {out}: {first:.1e}, {early:.1e}, {all:.1e}");
                    eprintln!("{what}");
                    assert!(
                        first < limits.first && early < limits.early && all < limits.all,
                        "{what}"
                    );
                    // What is sent forward is rounded; what is sent back shows from the second step.
                    assert_eq!(ours[0] == plain[0], direction == "backward", "{what}");
                    assert_ne!(ours[1], plain[1], "{what}");
                }
            }
        }
    }
}

#[test]
fn off_they_change_no_bit() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_jagged_adam");
    let project = project(&golden);
    let run = |out: &str, set: &str| {
        project.ok(&format!(
            "train golden/config.toml --init golden/init.safetensors --out {out} \
             --set parallel.ranks=2 --set threads=2 {set}{}",
            sharded(&golden, "row_wise")
        ));
        (project.steps(out), project.export(out))
    };
    let off = "--set parallel.codec_forward=fp32 --set parallel.codec_backward=fp32";
    let plain = run("plain", "");
    assert!(plain == run("off", off));
    // Each direction has its own.
    let forward = run("forward", "--set parallel.codec_forward=fp16");
    let backward = run("backward", "--set parallel.codec_backward=fp16");
    assert_ne!(plain.0[0], forward.0[0]);
    assert_eq!(plain.0[0], backward.0[0], "the first loss is from before any gradient");
    assert_ne!(plain.0[1], backward.0[1]);
}
