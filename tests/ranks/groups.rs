//! Groups that average now and then (two-dimensional parallelism), through the command line.

use crate::common::Project;
use crate::common::golden::project;
use crate::common::shared::shared;

fn train(project: &Project, from: &str, set: &str) {
    project.ok(&format!(
        "train golden/config.toml {from} --set parallel.ranks=4 --set threads=4 \
         --set parallel.replicas=2 --set parallel.sync_every=3 {set}"
    ));
}

/// A checkpoint averages groups, for it holds one model; so a run that writes one goes on from
/// there as its own resumption does, and not as a run that writes none.
#[test]
fn a_run_between_two_averages_is_resumed_as_its_checkpoint_left_it() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_dot_rowwise_adagrad");
    let project = project(&golden);
    let every = "--set train.checkpoint_every=7 --set train.keep=99";
    train(&project, "--out whole", every);
    train(&project, "--out never", "");
    let (whole, never) = (project.steps("whole"), project.steps("never"));
    assert_eq!(whole.len(), 60);
    assert_eq!(whole[..7], never[..7]);
    assert_ne!(whole[8..], never[8..], "the average at step 7 is no matter of the schedule's");
    let weights = project.export("whole");
    // Step 7 is between the averages after 6 and 9, step 21 is one of them.
    for step in [7, 14, 21, 49] {
        let out = format!("from{step}");
        let from = format!("--resume whole/checkpoints/step-{step} --out {out}");
        train(&project, &from, every);
        assert_eq!(project.steps(&out), whole[step..], "from step {step}");
        assert!(project.export(&out) == weights, "from step {step}: other weights");
    }
    // Stopped there, not only looked at.
    train(&project, "--out parts", &format!("{every} --set train.max_steps=7"));
    train(&project, "--resume parts --out parts", every);
    assert_eq!(project.steps("parts"), whole);
    assert!(project.export("parts") == weights);
}

/// Sums of bags travel as well as rows, and either way the groups' answer is one answer.
#[test]
fn routes_agree_in_groups() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_jagged_adam");
    let project = project(&golden);
    for route in ["unique", "pooled"] {
        train(&project, &format!("--out {route}"), &format!("--set parallel.route={route}"));
    }
    let (unique, pooled) = (project.steps("unique"), project.steps("pooled"));
    assert_eq!(unique.len(), 60);
    for (a, b) in unique.iter().zip(&pooled) {
        let (a, b) = (a.loss.unwrap(), b.loss.unwrap());
        assert!((a - b).abs() <= 1e-5 * a, "{a} and {b}");
    }
}
