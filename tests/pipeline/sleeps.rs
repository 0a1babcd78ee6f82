//! Sleeps of random length in every stage of every thread: they decide who is ahead, never what
//! comes out. And stages that fail, of which the run says which.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tessera::cli::{ConfigArgs, Train};
use tessera::clock::{Probe, Stage};
use tessera::train::{self, Hooks};

use crate::common::golden::project;
use crate::common::{Project, shared::shared};

/// Sleeps up to half a millisecond at the end of each stage.
struct Sleeps {
    seed: u64,
    drawn: AtomicU64,
}

impl Probe for Sleeps {
    fn done(&self, stage: Stage<'_>) {
        let number = self.drawn.fetch_add(1, Ordering::Relaxed);
        let mixed = (self.seed ^ number ^ stage.step << 20).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        // Most stages do not sleep, so that those that do change who waits for whom.
        if mixed >> 62 == 0 {
            std::thread::sleep(Duration::from_micros(mixed >> 40 & 511));
        }
    }
}

fn run(project: &Project, out: &str, set: &[String], probe: Option<Arc<dyn Probe>>) {
    let args = Train {
        config: ConfigArgs { config: project.path("golden/config.toml"), set: set.to_vec() },
        init: Some(project.path("golden/init.safetensors")),
        resume: None,
        trace: None,
        out: Some(project.path(out)),
    };
    train::run_with(&args, &Hooks { probe, ..Hooks::default() }).unwrap();
}

#[test]
fn sleeps_in_any_stage_change_no_bit() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_jagged_adam"));
    let common = |ranks: usize, micro: usize| {
        [
            format!("parallel.ranks={ranks}"),
            format!("threads={ranks}"),
            format!("pipeline.micro_batches={micro}"),
            "train.max_steps=12".to_owned(),
            "train.eval_every=5".to_owned(),
        ]
    };
    let mut expected = Vec::new();
    for (ranks, micro) in [(1, 2), (2, 2), (2, 3)] {
        let out = format!("serial-{ranks}-{micro}");
        let mut set = common(ranks, micro).to_vec();
        set.push("pipeline.mode=serial".to_owned());
        run(&project, &out, &set, None);
        expected.push((ranks, micro, project.export(&out)));
    }
    for seed in 0..100 {
        let (ranks, micro, weights) = &expected[seed as usize % expected.len()];
        let mode = if seed % 2 == 0 { "nested" } else { "prefetch" };
        let mut set = common(*ranks, *micro).to_vec();
        set.push(format!("pipeline.mode={mode}"));
        set.push(format!("pipeline.depth={}", 1 + seed % 4));
        if seed % 3 == 0 {
            set.push("tiers.device_bytes=30000".to_owned());
        }
        let out = format!("sleeps-{seed}");
        run(&project, &out, &set, Some(Arc::new(Sleeps { seed, drawn: AtomicU64::new(0) })));
        assert!(project.export(&out) == *weights, "seed {seed}: {set:?}");
        std::fs::remove_dir_all(project.path(&out)).unwrap();
    }
}

/// Panics in a stage of a step on the last rank.
struct Fault {
    stage: &'static str,
    rank: usize,
}

impl Probe for Fault {
    fn done(&self, stage: Stage<'_>) {
        assert!(
            (stage.name, stage.step, stage.rank) != (self.stage, 4, self.rank),
            "a fault, on purpose"
        );
    }
}

#[test]
fn a_stage_that_fails_stops_all_of_them_and_is_named() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_jagged_adam"));
    for ranks in [1, 2] {
        for (stage, thread) in [("read", "feed"), ("route", "feed"), ("fetch", "fetch")] {
            let out = format!("{stage}-{ranks}");
            let set = [
                format!("parallel.ranks={ranks}"),
                format!("threads={ranks}"),
                "tiers.device_bytes=30000".to_owned(),
                "pipeline.mode=nested".to_owned(),
            ];
            let args = Train {
                config: ConfigArgs {
                    config: project.path("golden/config.toml"),
                    set: set.to_vec(),
                },
                init: None,
                resume: None,
                trace: None,
                out: Some(project.path(&out)),
            };
            let fault: Arc<dyn Probe> = Arc::new(Fault { stage, rank: ranks - 1 });
            let hooks = Hooks { probe: Some(fault), ..Hooks::default() };
            let error = train::run_with(&args, &hooks).unwrap_err().to_string();
            let named = format!("stage {thread} failed: it panicked: a fault, on purpose");
            assert!(error.contains(&named), "{ranks} ranks, {stage}: {error}");
            // Alone, what was before it is trained on.
            let steps = project.steps(&out).len();
            assert!(steps == 3 || ranks > 1 && steps < 3, "{steps}");
        }
    }
}

/// Sleeps in the step, so that batches are fetched while those before them train.
struct SlowSteps;

impl Probe for SlowSteps {
    fn done(&self, stage: Stage<'_>) {
        if stage.name == "forward" {
            std::thread::sleep(Duration::from_millis(4));
        }
    }
}

/// What is over was told in a queue that had no room for the end of an epoch after as many steps as
/// could be on their way: the step waited for the fetching thread, which waited for the feeder, which
/// waited for the step.
#[test]
fn an_epoch_ends_behind_batches_that_were_fetched_while_others_trained() {
    let Some(shared) = shared() else { return };
    let project = project(&shared.join("golden/dlrm_jagged_adam"));
    for depth in 1..=3 {
        let out = format!("depth-{depth}");
        let set = [
            "tiers.device_bytes=60000".to_owned(),
            "train.epochs=3".to_owned(),
            format!("pipeline.depth={depth}"),
        ];
        let args = Train {
            config: ConfigArgs { config: project.path("golden/config.toml"), set: set.to_vec() },
            init: None,
            resume: None,
            trace: None,
            out: Some(project.path(&out)),
        };
        let (tell, hear) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let hooks = Hooks { probe: Some(Arc::new(SlowSteps)), ..Hooks::default() };
            let _ = tell.send(train::run_with(&args, &hooks));
        });
        let ended = hear.recv_timeout(Duration::from_secs(60));
        ended.expect("the run ends").unwrap();
    }
}
