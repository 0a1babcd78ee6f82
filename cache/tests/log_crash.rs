//! The machine stops at every change of a script, and again at every change of the recovery.

mod log_support;

use std::collections::HashMap;
use std::path::Path;

use log_support::{Loss, Sim, get, put, row_bytes};
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

/// A compaction that drops tombstones and deletes what they hide in one go. A segment has 9 records.
fn tombstones(sim: &Sim, promise: &mut Promise) -> Result<()> {
    let log = open(sim)?;
    let mut change = |rows: std::ops::Range<u64>, n: Option<u64>| {
        promise.since.extend(rows.clone().map(|row| (row, n)));
        let rows: Vec<u64> = rows.collect();
        match n {
            Some(n) => put(&log, &rows, n),
            None => log.remove(&rows),
        }
    };
    change(0..9, Some(1))?;
    change(0..6, None)?;
    change(10..13, Some(2))?;
    change(10..13, Some(3))?;
    log.flush()?;
    promise.flush();
    // Both full segments go, their live rows into one.
    assert_eq!(log.compact_now()?, 2);
    Ok(())
}

#[test]
fn what_was_flushed_survives_a_stop_at_any_change() {
    let changes = stop_everywhere(script);
    assert!(changes > 100, "{changes} changes are no script");
}

#[test]
fn removed_rows_stay_away_when_compaction_stops_at_any_change() {
    stop_everywhere(tombstones);
}

/// Gives the number of changes that the script makes.
fn stop_everywhere(script: fn(&Sim, &mut Promise) -> Result<()>) -> u64 {
    let whole = Sim::new();
    script(&whole, &mut Promise::default()).unwrap();
    let changes = whole.steps();
    // What survives is drawn anew each time.
    let (some, any) = (Loss::Suffixes, Loss::Sectors);
    let losses = [Loss::All, Loss::Nothing, some, some, any, any, any, any, any, any];
    for change in 1..=changes {
        let sim = Sim::new();
        sim.stop_after(change);
        let mut promise = Promise::default();
        let stopped = script(&sim, &mut promise).is_err();
        // The last changes are those of the sealing on drop, whose failure nobody sees.
        assert!(stopped || sim.stopped(), "change {change}");
        for (index, loss) in losses.into_iter().enumerate() {
            let left = sim.reboot(loss, change * 100 + index as u64);
            let at = format!("stopped at change {change}, loss {index}: {loss:?}");
            goes_on(&left, &promise, &at);
            if index == losses.len() - 1 {
                stops_while_opening(&left, &promise, &at);
            }
        }
    }
    changes
}

/// Opens what a crash left, and uses it.
fn goes_on(left: &Sim, promise: &Promise, at: &str) {
    let sim = left.reboot(Loss::Nothing, 0);
    let log = open(&sim).unwrap();
    promise.kept_by(&log, at);
    put(&log, &[1, 5], 99).unwrap();
    log.flush().unwrap();
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
