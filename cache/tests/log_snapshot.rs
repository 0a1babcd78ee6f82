//! Snapshots: whole, incremental, restored, and what is said of broken ones.

mod log_support;

use std::path::Path;

use log_support::{Model, Sim, check, put};
use tessera_cache::log::{Compaction, Options, Snapshot, SsdLog};
use tessera_cache::{CacheError, ColdRows, Result, RowLayout};

const LAYOUT: RowLayout = RowLayout { weight_bytes: 256, state_bytes: 4 };
const ROWS: u64 = 300;

fn options() -> Options {
    Options { segment_bytes: 3 * 4096, compaction: Compaction::OnDemand, ..Options::default() }
}

fn open(sim: &Sim, dir: &str) -> Result<SsdLog> {
    SsdLog::open_with(Box::new(sim.clone()), Path::new(dir), 7, LAYOUT, options())
}

fn restore(sim: &Sim, from: &[&str], snapshot: &Snapshot, into: &str) -> Result<SsdLog> {
    let from: Vec<&Path> = from.iter().map(Path::new).collect();
    SsdLog::restore_with(Box::new(sim.clone()), &from, snapshot, Path::new(into), options())
}

fn write(log: &SsdLog, model: &mut Model, rows: impl Iterator<Item = u64>, n: u64) {
    let rows: Vec<u64> = rows.collect();
    put(log, &rows, n).unwrap();
    model.extend(rows.iter().map(|&row| (row, n)));
}

fn forget(log: &SsdLog, model: &mut Model, rows: impl Iterator<Item = u64>) {
    let rows: Vec<u64> = rows.collect();
    log.remove(&rows).unwrap();
    model.retain(|row, _| !rows.contains(row));
}

#[test]
fn a_chain_of_snapshots_restores_each_moment() {
    let sim = Sim::new();
    let log = open(&sim, "/log").unwrap();
    let mut moments: Vec<(Snapshot, Model)> = Vec::new();
    let mut model = Model::new();
    let names = ["/s0", "/s1", "/s2", "/s3"];
    for (n, dir) in names.iter().enumerate() {
        let n = n as u64;
        // Half of the rows once, then few: increments are small.
        let step = [2, 31, 37, 3][n as usize];
        write(&log, &mut model, (n..ROWS).step_by(step), n);
        forget(&log, &mut model, (n * 7..ROWS).step_by(41));
        if n == 3 {
            log.compact_now().unwrap();
        }
        let snapshot = match moments.last() {
            None => log.snapshot(Path::new(dir)).unwrap(),
            Some((base, _)) => log.snapshot_since(base, Path::new(dir)).unwrap(),
        };
        if let Some((base, _)) = moments.last() {
            let mut new: Vec<&str> =
                snapshot.files_since(base).map(|file| file.name.as_str()).collect();
            let mut linked = sim.names(Path::new(dir));
            new.sort_unstable();
            linked.sort_unstable();
            assert_eq!(linked, new);
            let shared = snapshot.files_shared(base).count();
            assert_eq!(shared + new.len(), snapshot.files.len());
            assert!(n == 3 || shared > new.len(), "snapshot {n}: {shared} shared, {new:?} new");
        }
        assert_eq!(snapshot.rows, model.len() as u64);
        let text = serde_json::to_string(&snapshot).unwrap();
        assert_eq!(serde_json::from_str::<Snapshot>(&text).unwrap(), snapshot);
        moments.push((snapshot, model.clone()));
    }
    // What the log does later does not reach the snapshots.
    write(&log, &mut model, 0..ROWS, 9);
    log.compact_now().unwrap();
    drop(log);
    for (n, (snapshot, model)) in moments.iter().enumerate() {
        let into = format!("/restored-{n}");
        let log = restore(&sim, &names[..=n], snapshot, &into).unwrap();
        check(&log, model, ROWS);
        // A restored log is a log.
        let mut model = model.clone();
        write(&log, &mut model, (0..ROWS).step_by(5), 50);
        forget(&log, &mut model, (1..ROWS).step_by(5));
        log.compact_now().unwrap();
        drop(log);
        check(&open(&sim, &into).unwrap(), &model, ROWS);
    }
    // And the snapshots are untouched by that, too.
    let again = restore(&sim, &names[..1], &moments[0].0, "/again").unwrap();
    check(&again, &moments[0].1, ROWS);
}

#[test]
fn a_snapshot_survives_a_crash_right_after_it() {
    let sim = Sim::new();
    let log = open(&sim, "/log").unwrap();
    let mut model = Model::new();
    write(&log, &mut model, 0..50, 1);
    forget(&log, &mut model, 10..20);
    let snapshot = log.snapshot(Path::new("/copy")).unwrap();
    let left = sim.reboot(log_support::Loss::All, 0);
    check(&restore(&left, &["/copy"], &snapshot, "/restored").unwrap(), &model, 60);
    check(&open(&left, "/log").unwrap(), &model, 60);
}

#[test]
fn where_links_are_impossible_files_are_copied() {
    let sim = Sim::new();
    sim.forbid_links();
    let log = open(&sim, "/log").unwrap();
    let mut model = Model::new();
    write(&log, &mut model, 0..90, 1);
    let snapshot = log.snapshot(Path::new("/copy")).unwrap();
    let left = sim.reboot(log_support::Loss::All, 0);
    check(&restore(&left, &["/copy"], &snapshot, "/restored").unwrap(), &model, 100);
}

#[test]
fn broken_chains_are_named() {
    let sim = Sim::new();
    let log = open(&sim, "/log").unwrap();
    let mut model = Model::new();
    write(&log, &mut model, 0..60, 1);
    let base = log.snapshot(Path::new("/base")).unwrap();
    write(&log, &mut model, 60..70, 2);
    let next = log.snapshot_since(&base, Path::new("/next")).unwrap();
    let error = restore(&sim, &["/next"], &next, "/a").unwrap_err().to_string();
    assert_eq!(error, "row log: snapshot: 0000000001.seg: it is missing in /next");
    let first = Path::new("/base").join(&base.files[0].name);
    let second = Path::new("/base").join(&base.files[1].name);

    // A file of the right name with other contents.
    let broken = sim.reboot(log_support::Loss::Nothing, 0);
    let other = open(&broken, "/other").unwrap();
    put(&other, &(0..60).collect::<Vec<_>>(), 8).unwrap();
    drop(other);
    broken.delete(&first);
    broken.copy_name(&Path::new("/other").join(first.file_name().unwrap()), &first);
    let error = restore(&broken, &["/base"], &base, "/a").unwrap_err();
    let CacheError::Snapshot { file, fault } = &error else { panic!("{error}") };
    assert_eq!(
        (file, fault.as_str()),
        (&base.files[0].name, "it is not the file that the snapshot lists")
    );

    // A flipped bit.
    let broken = sim.reboot(log_support::Loss::Nothing, 0);
    broken.flip(&second, 4500 * 8);
    let error = restore(&broken, &["/base", "/next"], &next, "/a").unwrap_err();
    assert!(
        matches!(&error, CacheError::Damaged { path, .. } if path == Path::new("/a/0000000002.seg"))
    );

    // Files that a snapshot does not list, names that are none.
    let error = restore(&sim, &["/base"], &base, "/log").unwrap_err().to_string();
    assert!(error.contains("/log holds segments already"), "{error}");
    let mut odd = base.clone();
    odd.files[0].name = "../0000000001.seg".to_owned();
    let error = restore(&sim, &["/base"], &odd, "/b").unwrap_err().to_string();
    assert_eq!(error, "row log: snapshot: ../0000000001.seg: it is no name of a segment file");
    let mut less = base.clone();
    less.rows -= 1;
    let error = restore(&sim, &["/base"], &less, "/c").unwrap_err().to_string();
    assert!(error.contains("60 rows in 3 files, 59 rows in 3 files are listed"), "{error}");
    check(
        &restore(&sim, &["/base"], &base, "/d").unwrap(),
        &(0..60).map(|row| (row, 1)).collect(),
        70,
    );
}
