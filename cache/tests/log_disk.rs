//! The log on the real file system: both ways to read, threads, hard links.

mod log_support;

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use log_support::{Model, Random, check, get, put, row_bytes};
use tessera_cache::log::{Compaction, Options, Reader, SsdLog};
use tessera_cache::{CacheError, ColdRows, RowLayout};

const LAYOUT: RowLayout = RowLayout { weight_bytes: 256, state_bytes: 4 };

fn open(dir: &Path, options: Options) -> Result<SsdLog, CacheError> {
    SsdLog::open(dir, 7, LAYOUT, options)
}

#[test]
fn every_reader_gives_the_same_rows() {
    for (weight_bytes, state_bytes) in [(256, 4), (1000, 600), (3000, 0), (40_000, 80)] {
        let layout = RowLayout { weight_bytes, state_bytes };
        let dir = tempfile::tempdir().unwrap();
        let options = |reader| Options {
            segment_bytes: 256 << 10,
            compaction: Compaction::OnDemand,
            reader,
            queue_depth: 8,
            ..Options::default()
        };
        let mut model = Model::new();
        for reader in [Reader::Mmap, Reader::Uring, Reader::Auto] {
            let log = match SsdLog::open(dir.path(), 7, layout, options(reader)) {
                Ok(log) => log,
                Err(error) if reader == Reader::Uring => {
                    println!("skipped: {error}");
                    assert!(error.to_string().contains("io_uring and O_DIRECT"), "{error}");
                    continue;
                }
                Err(error) => panic!("{error}"),
            };
            let rows = 2_000_000 / weight_bytes as u64;
            // Some of these are sealed, some in the open segment's file, some pending.
            let n = model.len() as u64;
            for part in 0..5 {
                let rows: Vec<u64> = (0..rows).filter(|row| row % 5 == part).collect();
                put(&log, &rows, n + part).unwrap();
                model.extend(rows.iter().map(|&row| (row, n + part)));
            }
            check(&log, &model, rows + 10);
            log.compact_now().unwrap();
            check(&log, &model, rows + 10);
            let mut random = Random(9);
            for count in [1, 7, 300] {
                let mut few: Vec<u64> = (0..count).map(|_| random.below(rows)).collect();
                few.sort_unstable();
                few.dedup();
                let got = get(&log, &few).unwrap();
                for (&row, got) in few.iter().zip(got) {
                    assert_eq!(got, Some(row_bytes(layout, row, model[&row])));
                }
            }
            let name = log.stats().reader;
            match reader {
                Reader::Mmap => assert_eq!(name, "mmap"),
                Reader::Uring => assert_eq!(name, "io_uring"),
                Reader::Auto => assert!(name.starts_with("mmap") || name == "io_uring"),
            }
            assert!(log.stats().get_bytes > 0 && log.stats().write_amplification() >= 1.0);
        }
    }
}

#[test]
fn a_changed_byte_on_disk_is_named_by_every_reader() {
    for reader in [Reader::Mmap, Reader::Uring] {
        let dir = tempfile::tempdir().unwrap();
        let options = || Options { reader, ..Options::default() };
        let Ok(log) = open(dir.path(), options()) else {
            println!("skipped: {reader:?} is refused here");
            continue;
        };
        put(&log, &[1, 2, 3], 1).unwrap();
        drop(log);
        let log = open(dir.path(), options()).unwrap();
        let path = dir.path().join("0000000001.seg");
        let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_at(&file, &[0xFF], 4096 + 284 + 60).unwrap();
        file.sync_all().unwrap();
        let error = get(&log, &[1, 2, 3]).unwrap_err();
        let CacheError::Damaged { path: named, offset, id, .. } = &error else { panic!("{error}") };
        assert_eq!((named, *offset, *id), (&path, 4096 + 284, 2));
        assert_eq!(get(&log, &[1, 3]).unwrap().len(), 2);
        let error = open(&dir.path().join("."), options()).unwrap_err();
        assert!(matches!(error, CacheError::InUse { .. }), "{error}");
        drop(log);
        let error = open(dir.path(), options()).unwrap_err();
        assert!(matches!(error, CacheError::Damaged { id: 2, .. }), "{error}");
    }
}

#[test]
fn snapshots_are_hard_links() {
    let dir = tempfile::tempdir().unwrap();
    let log = open(&dir.path().join("log"), Options::default()).unwrap();
    put(&log, &[1, 2, 3], 1).unwrap();
    let copy = dir.path().join("checkpoint/tables/one");
    let snapshot = log.snapshot(&copy).unwrap();
    let inode = |dir: &Path| dir.join(&snapshot.files[0].name).metadata().unwrap().ino();
    assert_eq!(inode(log.dir()), inode(&copy));
    let into = dir.path().join("restored");
    let restored = SsdLog::restore(&[&copy], &snapshot, &into, Options::default()).unwrap();
    assert_eq!(inode(&into), inode(&copy));
    check(&restored, &Model::from([(1, 1), (2, 1), (3, 1)]), 10);
}

/// A writer puts rows in order, three readers get them all the time, compaction runs. What a get
/// gives was current at some time during it: between the last writing finished before it and the
/// last one begun when it ended.
#[test]
fn gets_beside_puts_and_compaction_see_what_was_current() {
    const ROWS: u64 = 500;
    let seconds = Duration::from_millis(1200);
    for reader in [Reader::Mmap, Reader::Auto] {
        let dir = tempfile::tempdir().unwrap();
        let options = Options {
            segment_bytes: 128 << 10,
            live_share: 0.8,
            reader,
            rows: Some(ROWS),
            ..Options::default()
        };
        let log = open(dir.path(), options).unwrap();
        let begun: Vec<AtomicU64> = (0..ROWS).map(|_| AtomicU64::new(0)).collect();
        let done: Vec<AtomicU64> = (0..ROWS).map(|_| AtomicU64::new(0)).collect();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for thread in 0..3 {
                let (log, begun, done, stop) = (&log, &begun, &done, &stop);
                scope.spawn(move || {
                    let mut random = Random(thread);
                    let mut seen = 0;
                    while !stop.load(Ordering::Relaxed) {
                        let from = random.below(ROWS);
                        let rows: Vec<u64> = (from..ROWS.min(from + 40)).collect();
                        let least: Vec<u64> =
                            rows.iter().map(|&r| done[r as usize].load(Ordering::SeqCst)).collect();
                        let mut weights = vec![0; rows.len() * 256];
                        let mut state = vec![0; rows.len() * 4];
                        let mut found = vec![false; rows.len()];
                        let to =
                            tessera_cache::PlanesMut { weights: &mut weights, state: &mut state };
                        log.get(&rows, to, &mut found).unwrap();
                        for (i, &row) in rows.iter().enumerate() {
                            let most = begun[row as usize].load(Ordering::SeqCst);
                            let given = found[i].then(|| {
                                (weights[i * 256..][..256].to_vec(), state[i * 4..][..4].to_vec())
                            });
                            // Every 16th writing is a removal; the 0th means never put.
                            let fits = (least[i]..=most).any(|n| match n % 16 {
                                0 => given.is_none(),
                                _ => given == Some(row_bytes(LAYOUT, row, n)),
                            });
                            assert!(fits, "row {row}: none of writings {}..={most}", least[i]);
                            seen += 1;
                        }
                    }
                    assert!(seen > 0);
                });
            }
            let started = Instant::now();
            let mut random = Random(77);
            while started.elapsed() < seconds {
                let from = random.below(ROWS);
                let rows: Vec<u64> = (from..ROWS.min(from + 1 + random.below(60))).collect();
                for &row in &rows {
                    begun[row as usize].fetch_add(1, Ordering::SeqCst);
                }
                let n = |row: u64| begun[row as usize].load(Ordering::Relaxed);
                let (gone, put): (Vec<u64>, Vec<u64>) = rows.iter().partition(|&&r| n(r) % 16 == 0);
                let (mut weights, mut state) = (Vec::new(), Vec::new());
                for &row in &put {
                    let planes = row_bytes(LAYOUT, row, n(row));
                    weights.extend(planes.0);
                    state.extend(planes.1);
                }
                let planes = tessera_cache::Planes { weights: &weights, state: &state };
                log.put(&put, planes).unwrap();
                log.remove(&gone).unwrap();
                for &row in &rows {
                    done[row as usize].store(n(row), Ordering::SeqCst);
                }
                if random.below(50) == 0 {
                    log.flush().unwrap();
                }
            }
            stop.store(true, Ordering::Relaxed);
        });
        let model: Model = (0..ROWS)
            .map(|row| (row, done[row as usize].load(Ordering::SeqCst)))
            .filter(|(_, n)| n % 16 != 0)
            .collect();
        check(&log, &model, ROWS);
        let stats = log.stats();
        assert!(stats.compactions > 3, "{stats:?}");
        drop(log);
        check(&open(dir.path(), Options::default()).unwrap(), &model, ROWS);
    }
}

#[test]
fn background_compaction_keeps_to_its_rate_unless_somebody_waits() {
    let dir = tempfile::tempdir().unwrap();
    let options = Options {
        segment_bytes: 64 << 10,
        live_share: 0.9,
        compaction_bytes_per_s: 20_000,
        ..Options::default()
    };
    let log = open(dir.path(), options).unwrap();
    let rows: Vec<u64> = (0..2000).collect();
    put(&log, &rows, 1).unwrap();
    put(&log, &rows[..500], 2).unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let stats = log.stats();
    let moved = stats.compaction_bytes + stats.compaction_read_bytes;
    // A chunk may be a segment ahead.
    assert!(moved < 20_000 + (256 << 10), "{stats:?}");
    let started = Instant::now();
    log.compact_now().unwrap();
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
    assert!(log.stats().compactions > 0);
    let mut model: Model = rows.iter().map(|&row| (row, 1)).collect();
    model.extend((0..500).map(|row| (row, 2)));
    check(&log, &model, 2000);
}
