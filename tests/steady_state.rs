//! What a step allocates once a run is under way, counted by the allocator of this program.
//!
//! Every allocation, of whatever thread, is put down to the stage of the step in which it happened:
//! in mode serial nothing else is running. Stages of the towers ask for no memory at all. Stages of
//! the tables ask for lists of tables, of tasks and of parts (what is in reach, what an update did):
//! none of them grows with the batch.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tessera::cli::{ConfigArgs, Train};
use tessera::clock::{Lane, Probe, Stage};
use tessera::train::{self, Hooks};

/// The system's allocator, counted.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static BYTES: AtomicU64 = AtomicU64::new(0);

fn count(bytes: usize) {
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    BYTES.fetch_add(bytes as u64, Ordering::Relaxed);
}

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller's guarantees are those of the system's allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above; what is given back came from there.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        count(bytes);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, bytes) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The first step that counts: thread pools and spare memory have grown by then.
const FROM: u64 = 41;
/// Steps that count.
const STEPS: u64 = 60;

/// Allocations and bytes of a stage, over all steps that count.
type Sum = (u64, u64);

/// Puts allocations down to stages.
#[derive(Default)]
struct Counts {
    last: Mutex<Sum>,
    stages: Mutex<BTreeMap<String, Sum>>,
}

impl Probe for Counts {
    fn done(&self, stage: Stage<'_>) {
        if stage.lane != Lane::Step {
            return;
        }
        let now = (ALLOCATIONS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        let last = std::mem::replace(&mut *self.last.lock().unwrap(), now);
        if stage.step >= FROM {
            let mut stages = self.stages.lock().unwrap();
            // Its own entry is no allocation of the next stage.
            let sum = stages.entry(stage.name.to_owned()).or_default();
            *sum = (sum.0 + now.0 - last.0, sum.1 + now.1 - last.1);
        }
        let after = (ALLOCATIONS.load(Ordering::Relaxed), BYTES.load(Ordering::Relaxed));
        *self.last.lock().unwrap() = after;
    }
}

/// Trains the synthetic example; gives the sums of its stages.
fn stages(folder: &Path, batch: usize) -> BTreeMap<String, Sum> {
    let set = [
        format!("data.batch_size={batch}"),
        format!("train.max_steps={}", FROM + STEPS - 1),
        "data.synthetic.eval_samples=0".to_owned(),
        "pipeline.mode=serial".to_owned(),
        "threads=2".to_owned(),
    ];
    let example = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/synthetic.toml");
    let args = Train {
        config: ConfigArgs { config: example.into(), set: set.to_vec() },
        init: None,
        resume: None,
        trace: None,
        out: Some(folder.join(batch.to_string())),
    };
    let counts = Arc::new(Counts::default());
    let probe: Arc<dyn Probe> = Arc::clone(&counts) as Arc<dyn Probe>;
    let hooks = Hooks { probe: Some(probe), quiet: true, ..Hooks::default() };
    train::run_with(&args, &hooks).unwrap();
    let stages = counts.stages.lock().unwrap();
    stages.clone()
}

#[test]
fn a_step_asks_for_no_memory_that_grows_with_the_batch() {
    let folder = tempfile::tempdir().unwrap();
    let (small, large) = (stages(folder.path(), 256), stages(folder.path(), 1024));
    let each = |stages: &BTreeMap<String, Sum>, stage: &str| {
        let (count, bytes) = stages[stage];
        (count as f64 / STEPS as f64, bytes as f64 / STEPS as f64)
    };
    for stage in large.keys() {
        let (small, large) = (each(&small, stage), each(&large, stage));
        eprintln!(
            "{stage:14} a step of 256 samples: {:5.2} allocations, {:8.0} bytes; of 1024: {:5.2}, {:8.0}",
            small.0, small.1, large.0, large.1
        );
    }
    // Now and then a thread pool's queue takes one more block.
    const RARELY: f64 = 0.3;
    for stage in ["forward", "backward", "check", "update_dense"] {
        for stages in [&small, &large] {
            let (count, _) = each(stages, stage);
            assert!(count <= RARELY, "{stage}: {count} allocations a step");
        }
    }
    for stage in ["lookup", "update_sparse"] {
        let (small, large) = (each(&small, stage), each(&large, stage));
        assert!(large.0 <= small.0 + RARELY, "{stage}: {large:?} after {small:?}");
        assert!(large.0 <= 10.0 && large.1 <= 4096.0, "{stage}: {large:?}");
    }
}
