//! The log against a map: any sequence of operations, restarts, crashes and broken transfers.

mod log_support;

use std::collections::{HashMap, HashSet};
use std::path::Path;

use log_support::{LOSSES, Model, Random, Sim, check, get, put, row_bytes};
use proptest::prelude::*;
use tessera_cache::log::{Compaction, Options, SsdLog};
use tessera_cache::{ColdRows, RowLayout};

/// Rows that the operations touch.
const ROWS: u64 = 24;

#[derive(Clone, Debug)]
enum Step {
    Put(HashSet<u64>),
    Remove(HashSet<u64>),
    Flush,
    Compact,
    Reopen,
    /// The machine stops during the changes that follow, or at once if there are fewer.
    StopAfter(u64),
    /// It stops now.
    Stop,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let rows = || prop::collection::hash_set(0..ROWS, 0..12);
    let step = prop_oneof![
        6 => rows().prop_map(Step::Put),
        2 => rows().prop_map(Step::Remove),
        2 => Just(Step::Flush),
        2 => Just(Step::Compact),
        1 => Just(Step::Reopen),
        1 => (0u64..40).prop_map(Step::StopAfter),
        1 => Just(Step::Stop),
    ];
    prop::collection::vec(step, 0..60)
}

/// What each row may be after a crash: as flushed, or as any later change left it.
#[derive(Default)]
struct Expected {
    now: Model,
    flushed: Model,
    since: HashMap<u64, Vec<Option<u64>>>,
}

impl Expected {
    fn set(&mut self, row: u64, n: Option<u64>) {
        match n {
            Some(n) => self.now.insert(row, n),
            None => self.now.remove(&row),
        };
        self.since.entry(row).or_default().push(n);
    }

    fn flush(&mut self) {
        self.flushed = self.now.clone();
        self.since.clear();
    }

    /// Takes what the log holds after a crash, if it may.
    fn adopt(&mut self, log: &dyn ColdRows) {
        let rows: Vec<u64> = (0..ROWS).collect();
        let got = get(log, &rows).unwrap();
        self.now.clear();
        for (&row, got) in rows.iter().zip(got) {
            let since = self.since.get(&row).into_iter().flatten().copied();
            let mut allowed = std::iter::once(self.flushed.get(&row).copied()).chain(since);
            let n = allowed
                .find(|n| n.map(|n| row_bytes(log.layout(), row, n)) == got)
                .unwrap_or_else(|| panic!("row {row} is neither as flushed nor as changed later"));
            if let Some(n) = n {
                self.now.insert(row, n);
            }
        }
        // Opening sealed it.
        self.flush();
    }
}

fn run(
    layout: RowLayout,
    options: &Options,
    steps: Vec<Step>,
    seed: u64,
    short: bool,
) -> Result<(), TestCaseError> {
    let dir = Path::new("/log");
    let mut random = Random(seed);
    let mut sim = Sim::new();
    let mut expected = Expected::default();
    let open = |sim: &Sim, random: &mut Random| {
        if short {
            sim.short_transfers(random.next());
        }
        SsdLog::open_with(Box::new(sim.clone()), dir, 7, layout, options.clone())
    };
    let mut log = open(&sim, &mut random).unwrap();
    for (n, step) in steps.into_iter().enumerate() {
        let n = n as u64;
        let mut outcome = Ok(());
        let mut stopped = false;
        match step {
            Step::Put(rows) => {
                let rows: Vec<u64> = rows.into_iter().collect();
                outcome = put(&log, &rows, n);
                rows.iter().for_each(|&row| expected.set(row, Some(n)));
            }
            Step::Remove(rows) => {
                let rows: Vec<u64> = rows.into_iter().collect();
                outcome = log.remove(&rows);
                rows.iter().for_each(|&row| expected.set(row, None));
            }
            Step::Flush => {
                outcome = log.flush();
                if outcome.is_ok() {
                    expected.flush();
                }
            }
            Step::Compact => outcome = log.compact_now().map(drop),
            Step::Reopen => {
                drop(log);
                if !sim.stopped() {
                    expected.flush();
                }
                log = match open(&sim, &mut random) {
                    Ok(log) => log,
                    Err(_) => {
                        prop_assert!(sim.stopped());
                        sim = sim.reboot(LOSSES[random.below(4) as usize], random.next());
                        let log = open(&sim, &mut random).unwrap();
                        expected.adopt(&log);
                        log
                    }
                };
            }
            Step::StopAfter(changes) => sim.stop_after(changes.max(1)),
            Step::Stop => stopped = true,
        }
        if stopped || sim.stopped() {
            let left = sim.reboot(LOSSES[random.below(4) as usize], random.next());
            drop(std::mem::replace(&mut sim, left));
            drop(log);
            log = open(&sim, &mut random).unwrap();
            expected.adopt(&log);
        } else {
            outcome.unwrap();
        }
        check(&log, &expected.now, ROWS);
    }
    Ok(())
}

fn layouts() -> impl Strategy<Value = RowLayout> {
    // 5 records a page; records across pages; large ones.
    prop_oneof![Just((700, 20)), Just((1500, 0)), Just((0, 0)), Just((5000, 3))]
        .prop_map(|(weight_bytes, state_bytes)| RowLayout { weight_bytes, state_bytes })
}

proptest! {
    #[test]
    fn the_log_is_a_map_that_keeps_what_it_flushed(
        layout in layouts(),
        steps in steps(),
        seed in any::<u64>(),
        dense in any::<bool>(),
        short in any::<bool>(),
        live_share in prop_oneof![Just(0.3), Just(0.7), Just(1.0)],
        pages in 1u64..4,
    ) {
        let record = 24 + layout.weight_bytes + layout.state_bytes;
        let options = Options {
            segment_bytes: 4096 * pages + 4 * record.next_multiple_of(4096) as u64,
            compaction: Compaction::OnDemand,
            live_share,
            rows: dense.then_some(ROWS),
            ..Options::default()
        };
        run(layout, &options, steps, seed, short)?;
    }
}
