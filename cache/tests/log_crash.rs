//! The machine stops at every change of a script, and again at every change of the recovery.

mod log_support;

use std::collections::HashMap;
use std::path::Path;

use log_support::{LOSSES, Loss, Sim, get, put, row_bytes};
use tessera_cache::log::{Compaction, Options, SsdLog};
use tessera_cache::{ColdRows, Result, RowLayout};

const ROWS: u64 = 20;
/// 5 records a page.
const LAYOUT: RowLayout = RowLayout { weight_bytes: 700, state_bytes: 20 };

fn open(sim: &Sim) -> Result<SsdLog> {
    let options = Options {
        segment_bytes: 3 * 4096,
        compaction: Compaction::OnDemand,
        live_share: 0.8,
        ..Options::default()
    };
    SsdLog::open_with(Box::new(sim.clone()), Path::new("/log"), 7, LAYOUT, options)
}

/// What rows may be: as of the last flush that was reported, or of any change begun since.
#[derive(Default)]
struct Promise {
    flushed: HashMap<u64, Option<u64>>,
    since: Vec<(u64, Option<u64>)>,
}

impl Promise {
    fn flush(&mut self) {
        self.flushed.extend(self.since.drain(..));
    }

    fn kept_by(&self, log: &SsdLog, at: &str) {
        let rows: Vec<u64> = (0..ROWS).collect();
        for (&row, got) in rows.iter().zip(get(log, &rows).unwrap()) {
            let flushed = self.flushed.get(&row).copied().flatten();
            let since = self.since.iter().filter(|change| change.0 == row).map(|change| change.1);
            let kept = std::iter::once(flushed)
                .chain(since)
                .any(|n| n.map(|n| row_bytes(LAYOUT, row, n)) == got);
            assert!(kept, "{at}: row {row} is neither as flushed nor as changed since");
        }
    }
}

/// Overwrites, removals, rows put again, compactions, a restart. Stops at the first failure.
fn script(sim: &Sim, promise: &mut Promise) -> Result<()> {
    let mut log = open(sim)?;
    let mut n = 0;
    for round in 0..4u64 {
        for part in 0..4 {
            n += 1;
            let rows: Vec<u64> = (0..ROWS).filter(|row| (row + part) % (round + 2) == 0).collect();
            promise.since.extend(rows.iter().map(|&row| (row, Some(n))));
            put(&log, &rows, n)?;
        }
        log.flush()?;
        promise.flush();
        let rows: Vec<u64> = (0..ROWS).filter(|row| row % 3 == round % 3).collect();
        promise.since.extend(rows.iter().map(|&row| (row, None)));
        log.remove(&rows)?;
        if round % 2 == 1 {
            log.flush()?;
            promise.flush();
            // These supersede what was flushed, and are not flushed when compaction deletes it.
            n += 1;
            promise.since.extend(rows.iter().step_by(2).map(|&row| (row, Some(n))));
            put(&log, &rows.iter().copied().step_by(2).collect::<Vec<_>>(), n)?;
        }
        log.compact_now()?;
        if round == 2 {
            drop(log);
            log = open(sim)?;
        }
    }
    Ok(())
}

#[test]
fn what_was_flushed_survives_a_stop_at_any_change() {
    let whole = Sim::new();
    script(&whole, &mut Promise::default()).unwrap();
    let changes = whole.steps();
    assert!(changes > 100, "{changes} changes are no script");
    for change in 1..=changes {
        for (index, loss) in LOSSES.into_iter().enumerate() {
            let sim = Sim::new();
            sim.stop_after(change);
            let mut promise = Promise::default();
            let stopped = script(&sim, &mut promise).is_err();
            // The last changes are those of the sealing on drop, whose failure nobody sees.
            assert!(stopped || sim.stopped(), "change {change}");
            let left = sim.reboot(loss, change * 4 + index as u64);
            let at = format!("stopped at change {change}, {loss:?}");
            goes_on(&left, &promise, &at);
            if index == 3 {
                stops_while_opening(&left, &promise, &at);
            }
        }
    }
}

/// Opens what a crash left, and uses it.
fn goes_on(left: &Sim, promise: &Promise, at: &str) {
    let sim = left.reboot(Loss::Nothing, 0);
    let log = open(&sim).unwrap();
    promise.kept_by(&log, at);
    put(&log, &[1, 5], 99).unwrap();
    log.flush().unwrap();
    log.compact_now().unwrap();
    let left = sim.reboot(Loss::All, 0);
    let expected = [Some(row_bytes(LAYOUT, 1, 99)), Some(row_bytes(LAYOUT, 5, 99))];
    assert_eq!(get(&open(&left).unwrap(), &[1, 5]).unwrap(), expected, "{at}");
}

/// Stops at every change that opening makes.
fn stops_while_opening(left: &Sim, promise: &Promise, at: &str) {
    let sim = left.reboot(Loss::Nothing, 0);
    let log = open(&sim);
    let changes = sim.steps();
    drop(log);
    for change in 1..=changes {
        let sim = left.reboot(Loss::Nothing, 0);
        sim.stop_after(change);
        assert!(open(&sim).is_err());
        let again = sim.reboot(Loss::Sectors, change);
        let at = format!("{at}, again at change {change} of opening");
        promise.kept_by(&open(&again).unwrap(), &at);
    }
}
