//! Each kind of fault by itself: what is refused, what goes on, what the message says.

mod log_support;

use std::path::{Path, PathBuf};

use log_support::{LOSSES, Model, Sim, check, get, put, row_bytes};
use tessera_cache::log::{Compaction, Options, SsdLog};
use tessera_cache::{CacheError, ColdRows, Planes, PlanesMut, Result, RowLayout};

/// 14 records a page.
const LAYOUT: RowLayout = RowLayout { weight_bytes: 256, state_bytes: 4 };
const RECORD: u64 = 284;
const PAGE: u64 = 4096;

fn options() -> Options {
    Options {
        segment_bytes: 3 * PAGE,
        compaction: Compaction::OnDemand,
        rows: Some(1000),
        ..Options::default()
    }
}

fn open_with(sim: &Sim, options: Options) -> Result<SsdLog> {
    SsdLog::open_with(Box::new(sim.clone()), Path::new("/log"), 7, LAYOUT, options)
}

fn open(sim: &Sim) -> Result<SsdLog> {
    open_with(sim, options())
}

fn segment(number: u32) -> PathBuf {
    PathBuf::from(format!("/log/{number:010}.seg"))
}

fn filled(sim: &Sim, rows: u64) -> Model {
    let log = open(sim).unwrap();
    put(&log, &(0..rows).collect::<Vec<_>>(), 1).unwrap();
    (0..rows).map(|row| (row, 1)).collect()
}

#[test]
fn a_flipped_bit_is_named_or_changes_nothing_whatever_bit_it_is() {
    let sim = Sim::new();
    let model = filled(&sim, 20);
    let bits = sim.bytes(&segment(1)).len() as u64 * 8;
    let (mut named, mut harmless) = (0, 0);
    for bit in (0..bits).step_by(7) {
        sim.flip(&segment(1), bit);
        match open(&sim.reboot(LOSSES[0], 0)) {
            Ok(log) => {
                check(&log, &model, 30);
                harmless += 1;
            }
            Err(CacheError::Damaged { path, offset, .. }) => {
                assert_eq!(path, segment(1));
                let page = bit / 8 / PAGE * PAGE;
                let record = if page == 0 { 0 } else { page + bit / 8 % PAGE / RECORD * RECORD };
                assert_eq!(offset, record, "bit {bit}");
                named += 1;
            }
            Err(error) => panic!("bit {bit}: {error}"),
        }
        sim.flip(&segment(1), bit);
    }
    // 20 records and the header's fields; what is harmless is padding, and the seal, which opening
    // writes again.
    let of_records = (20 * RECORD + 68) * 8 / 7;
    assert!(named >= of_records - 30 && harmless > 0, "{named} named of {of_records}");
}

#[test]
fn a_bit_that_flips_while_the_log_is_open_is_named_by_get_and_compaction() {
    let sim = Sim::new();
    let mut model = filled(&sim, 20);
    let log = open(&sim).unwrap();
    // Record 3, in its weights.
    sim.flip(&segment(1), (PAGE + 3 * RECORD + 100) * 8);
    let error = get(&log, &[2, 3, 4]).unwrap_err();
    assert_eq!(
        error.to_string(),
        format!(
            "row log: /log/0000000001.seg is damaged at byte {} (id 3): the record's checksum is \
             wrong; check the disk and go back to a checkpoint",
            PAGE + 3 * RECORD
        )
    );
    assert_eq!(get(&log, &[4]).unwrap(), [Some(row_bytes(LAYOUT, 4, 1))]);
    let rows: Vec<u64> = (5..20).collect();
    put(&log, &rows, 2).unwrap();
    model.extend(rows.iter().map(|&row| (row, 2)));
    let error = log.compact_now().unwrap_err();
    assert!(matches!(error, CacheError::Damaged { id: 3, .. }), "{error}");
    assert!(sim.names(Path::new("/log")).contains(&"0000000001.seg".to_owned()));
    let refused = put(&log, &[1], 3).unwrap_err().to_string();
    assert!(refused.contains("put refused since an earlier failure") && refused.contains("id 3"));
}

#[test]
fn damage_behind_the_last_flush_is_a_torn_tail_and_before_it_an_error() {
    let sim = Sim::new();
    let log = open(&sim).unwrap();
    put(&log, &[1, 2, 3], 1).unwrap();
    log.flush().unwrap();
    put(&log, &[4, 2], 2).unwrap();
    log.flush().unwrap();
    // Slots: 1, 2, 3, mark, 4, 2, mark. Without the last mark nothing is lost but the mark.
    let left = sim.reboot(LOSSES[0], 0);
    left.flip(&segment(1), (PAGE + 6 * RECORD + 1) * 8);
    let model = Model::from([(1, 1), (2, 2), (3, 1), (4, 2)]);
    check(&open(&left).unwrap(), &model, 10);
    // A record that was flushed may not be cut off.
    for slot in [0, 1, 4, 5] {
        let left = sim.reboot(LOSSES[0], 0);
        left.flip(&segment(1), (PAGE + slot * RECORD + 99) * 8);
        let error = open(&left).unwrap_err();
        let at = PAGE + slot * RECORD;
        assert!(matches!(error, CacheError::Damaged { offset, .. } if offset == at), "{error}");
    }
}

#[test]
fn a_torn_tail_is_cut_wherever_it_tears() {
    let sim = Sim::new();
    let log = open(&sim).unwrap();
    put(&log, &(0..10).collect::<Vec<_>>(), 1).unwrap();
    log.flush().unwrap();
    let whole = sim.bytes(&segment(1)).len() as u64;
    for bytes in PAGE..=whole {
        let left = sim.reboot(LOSSES[0], 0);
        left.cut(&segment(1), bytes);
        let rows = ((bytes - PAGE) / RECORD).min(10);
        let log = open(&left).unwrap();
        check(&log, &(0..rows).map(|row| (row, 1)).collect(), 12);
        // What comes after the cut is kept.
        put(&log, &[11], 5).unwrap();
        drop(log);
        assert_eq!(open(&left).unwrap().len(), rows + 1, "cut at {bytes}");
    }
}

#[test]
fn files_that_do_not_belong_are_told_apart() {
    let sim = Sim::new();
    let model = filled(&sim, 60);
    assert!(sim.bytes(&segment(2)).len() as u64 == 3 * PAGE, "two full segments");
    let broken = |break_it: &dyn Fn(&Sim)| {
        let sim = sim.reboot(LOSSES[0], 0);
        break_it(&sim);
        open(&sim).unwrap_err().to_string()
    };
    let error = broken(&|sim| sim.cut(&segment(1), 2 * PAGE));
    assert!(error.contains("0000000001.seg") && error.contains("without its seal"), "{error}");
    let error = broken(&|sim| sim.cut(&segment(1), 100));
    assert!(error.contains("shorter than its header"), "{error}");
    let error = broken(&|sim| sim.copy_name(&segment(1), &segment(9)));
    assert!(error.contains("0000000009.seg") && error.contains("renamed"), "{error}");
    let error = SsdLog::open_with(
        Box::new(sim.reboot(LOSSES[0], 0)),
        Path::new("/log"),
        8,
        LAYOUT,
        options(),
    )
    .unwrap_err()
    .to_string();
    assert!(error.contains("has table tag 7, not 8; it belongs to another table"), "{error}");
    let few = Options { rows: Some(30), ..options() };
    let error = open_with(&sim.reboot(LOSSES[0], 0), few).unwrap_err().to_string();
    assert_eq!(error, "row log: replay: row 30 is out of range: the table has 30 rows");
    let log = open(&sim).unwrap();
    let error = open(&sim).unwrap_err();
    assert!(error.to_string().contains("/log is in use by another"), "{error}");
    check(&log, &model, 100);
}

#[test]
fn after_a_failed_sync_changes_are_refused_and_gets_go_on() {
    let sim = Sim::new();
    let log = open(&sim).unwrap();
    put(&log, &[1, 2], 1).unwrap();
    log.flush().unwrap();
    put(&log, &[2, 3], 2).unwrap();
    sim.fail_next_sync();
    let first = log.flush().unwrap_err().to_string();
    let expected = "row log: cannot sync /log/0000000001.seg: the sync failed on purpose";
    assert_eq!(first, expected);
    let refused = format!("row log: /log: flush refused since an earlier failure: {expected}");
    assert_eq!(log.flush().unwrap_err().to_string(), refused);
    for error in [put(&log, &[1], 3), log.remove(&[1]), log.compact_now().map(drop)] {
        assert!(matches!(error, Err(CacheError::Refused { .. })), "{error:?}");
    }
    assert!(log.snapshot(Path::new("/copy")).is_err());
    assert_eq!(get(&log, &[1]).unwrap(), [Some(row_bytes(LAYOUT, 1, 1))]);
    let left = sim.reboot(LOSSES[0], 0);
    drop(log);
    check(&open(&left).unwrap(), &Model::from([(1, 1), (2, 1)]), 10);
}

#[test]
fn a_full_disk_stops_changes_and_keeps_what_was_flushed() {
    for room in (0..20_000).step_by(1234) {
        let sim = Sim::new();
        let log = open(&sim).unwrap();
        put(&log, &(0..10).collect::<Vec<_>>(), 1).unwrap();
        log.flush().unwrap();
        sim.set_room(room);
        let many: Vec<u64> = (5..200).collect();
        let error = put(&log, &many, 2).and_then(|()| log.flush()).unwrap_err().to_string();
        assert!(error.contains("cannot write /log/") && error.contains("; free space"), "{error}");
        let refused = log.remove(&[1]).unwrap_err();
        assert!(matches!(refused, CacheError::Refused { .. }), "{refused}");
        assert_eq!(get(&log, &[1]).unwrap(), [Some(row_bytes(LAYOUT, 1, 1))]);
        let left = sim.reboot(LOSSES[2], room);
        drop(log);
        let log = open(&left).unwrap();
        for (row, got) in (0..10).zip(get(&log, &(0..10).collect::<Vec<_>>()).unwrap()) {
            let new = (row >= 5).then(|| row_bytes(LAYOUT, row, 2));
            assert!(got == Some(row_bytes(LAYOUT, row, 1)) || got == new, "row {row}");
        }
    }
}

#[test]
fn the_budget_holds_and_compaction_makes_room_within_it() {
    let sim = Sim::new();
    let budget = 10 * 3 * PAGE;
    let options = Options { budget_bytes: budget, live_share: 0.01, ..options() };
    let log = open_with(&sim, options).unwrap();
    let size = || -> u64 {
        let names = sim.names(Path::new("/log"));
        names.iter().map(|name| sim.bytes(&Path::new("/log").join(name)).len() as u64).sum()
    };
    // Overwriting the same rows needs room for one more version only.
    let rows: Vec<u64> = (0..100).collect();
    let mut model = Model::new();
    for n in 0..50 {
        put(&log, &rows, n).unwrap();
        model.extend(rows.iter().map(|&row| (row, n)));
        assert!(size() <= budget && log.stats().file_bytes <= budget);
    }
    check(&log, &model, 200);
    assert!(log.stats().compactions > 0);
    // Other rows do not fit: nothing of the put is there, and the log goes on.
    let more: Vec<u64> = (200..400).collect();
    let error = put(&log, &more, 60).unwrap_err();
    let CacheError::Budget { ref dir, needed, used, reserve, budget: named } = error else {
        panic!("{error}")
    };
    assert_eq!((dir.as_path(), named, reserve), (Path::new("/log"), budget, 3 * PAGE));
    assert!(needed >= 200 * RECORD && used + needed + reserve > budget);
    assert!(error.to_string().contains("tiers.ssd_bytes"), "{error}");
    check(&log, &model, 400);
    // Rows that go make room.
    log.remove(&rows[..90]).unwrap();
    model.retain(|row, _| !rows[..90].contains(row));
    put(&log, &more[..100], 61).unwrap();
    model.extend(more[..100].iter().map(|&row| (row, 61)));
    check(&log, &model, 400);
    assert!(size() <= budget);
    log.flush().unwrap();
    drop(log);
    check(&open(&sim).unwrap(), &model, 400);
}

#[test]
fn tombstones_go_when_nothing_older_is_left() {
    let sim = Sim::new();
    let log = open(&sim).unwrap();
    for n in 0..30 {
        let rows: Vec<u64> = (n * 20..n * 20 + 20).collect();
        put(&log, &rows, n).unwrap();
        log.remove(&rows).unwrap();
    }
    log.compact_now().unwrap();
    log.snapshot(Path::new("/copy")).unwrap();
    log.compact_now().unwrap();
    let stats = log.stats();
    assert_eq!(stats.rows, 0);
    assert!(stats.file_bytes <= 6 * PAGE, "{stats:?}");
    drop(log);
    check(&open(&sim).unwrap(), &Model::new(), 600);
}

#[test]
fn a_tombstone_stays_as_long_as_what_it_hides() {
    let sim = Sim::new();
    let options = || Options { segment_bytes: 2 * PAGE, live_share: 0.8, ..options() };
    let log = open_with(&sim, options()).unwrap();
    // 13 records a segment: all rows of the first live but one; the second has its tombstone, one
    // live row and rows that are overwritten. Only the second is worth compacting.
    put(&log, &(0..13).collect::<Vec<_>>(), 1).unwrap();
    log.remove(&[0]).unwrap();
    let rows: Vec<u64> = (20..32).collect();
    put(&log, &rows, 2).unwrap();
    put(&log, &rows[1..], 3).unwrap();
    assert_eq!(log.compact_now().unwrap(), 1);
    drop(log);
    let log = open_with(&sim, options()).unwrap();
    assert_eq!(get(&log, &[0]).unwrap(), [None]);
    assert_eq!(log.len(), 24);
}

#[test]
fn many_small_segments_become_few() {
    let sim = Sim::new();
    let mut model = Model::new();
    for row in 0..40 {
        let log = open(&sim).unwrap();
        put(&log, &[row], row).unwrap();
        model.insert(row, row);
    }
    let log = open(&sim).unwrap();
    assert_eq!(log.stats().segments, 40);
    log.compact_now().unwrap();
    assert!(log.stats().segments <= 12, "{:?}", log.stats());
    check(&log, &model, 50);
    drop(log);
    check(&open(&sim).unwrap(), &model, 50);
}

#[test]
fn what_does_not_belong_together_is_refused_before_anything_is_written() {
    let sim = Sim::new();
    let log = open(&sim).unwrap();
    let error = log.put(&[1, 2], Planes { weights: &[0; 511], state: &[0; 8] }).unwrap_err();
    assert_eq!(
        error.to_string(),
        "row log: put of 2 rows with 511 bytes of weights: 512 are needed"
    );
    let error = log.put(&[1], Planes { weights: &[0; 256], state: &[] }).unwrap_err();
    assert!(error.to_string().contains("0 bytes of state: 4 are needed"), "{error}");
    let error = put(&log, &[3, 1000], 1).unwrap_err();
    assert_eq!(
        error.to_string(),
        "row log: put: row 1000 is out of range: the table has 1000 rows"
    );
    let to = PlanesMut { weights: &mut [0; 256], state: &mut [0; 4] };
    let error = log.get(&[1], to, &mut []).unwrap_err();
    assert!(error.to_string().contains("get of 1 rows with 0 bytes of found"), "{error}");
    check(&log, &Model::new(), 1000);
    assert_eq!(get(&log, &[u64::MAX]).unwrap(), [None]);
    log.remove(&[5, u64::MAX]).unwrap();
    log.flush().unwrap();
    assert_eq!(sim.names(Path::new("/log")).len(), 0);
    // None of that is a failure of the log.
    put(&log, &[3], 1).unwrap();
    check(&log, &Model::from([(3, 1)]), 10);
}
