//! Reading a snapshot's files where they lie: every moment of a chain, whatever the log did after.

mod log_support;

use std::path::{Path, PathBuf};

use log_support::{Model, put, row_bytes};
use tessera_cache::log::{Compaction, Image, Options, Snapshot, SsdLog, check_file};
use tessera_cache::{CacheError, ColdRows, PlanesMut, Result, RowLayout};

const LAYOUT: RowLayout = RowLayout { weight_bytes: 256, state_bytes: 4 };
const ROWS: u64 = 300;

fn open(dir: &Path) -> SsdLog {
    let options = Options {
        segment_bytes: 3 * 4096,
        compaction: Compaction::OnDemand,
        rows: Some(ROWS),
        ..Options::default()
    };
    SsdLog::open(dir, 7, LAYOUT, options).unwrap()
}

/// Where the files of a snapshot lie, in the order of its list.
fn places(from: &[PathBuf], snapshot: &Snapshot) -> Vec<PathBuf> {
    let place = |name: &str| {
        let mut paths = from.iter().map(|dir| dir.join(name));
        paths.find(|path| path.is_file()).unwrap_or_else(|| from[0].join(name))
    };
    snapshot.files.iter().map(|file| place(&file.name)).collect()
}

fn image(from: &[PathBuf], snapshot: &Snapshot) -> Result<Image> {
    let mut image = Image::new(snapshot, ROWS)?;
    for (file, path) in snapshot.files.iter().zip(places(from, snapshot)) {
        check_file(snapshot, ROWS, file, &path)?;
        image.add(file, &path)?;
    }
    image.finish()?;
    Ok(image)
}

fn check(image: &Image, model: &Model) {
    let rows: Vec<u64> = (0..ROWS).rev().collect();
    let (mut weights, mut state) = (vec![0xA5; 256 * 300], vec![0xA5; 4 * 300]);
    let mut found = vec![false; 300];
    let planes = PlanesMut { weights: &mut weights, state: &mut state };
    image.get(&rows, planes, &mut found).unwrap();
    for (i, &row) in rows.iter().enumerate() {
        let here = (&weights[i * 256..][..256], &state[i * 4..][..4]);
        let (weights, state) = match model.get(&row) {
            Some(&n) => row_bytes(LAYOUT, row, n),
            None => (vec![0xA5; 256], vec![0xA5; 4]),
        };
        assert!(here == (&weights, &state), "row {row}");
        assert_eq!(found[i], model.contains_key(&row), "row {row}");
    }
}

#[test]
fn each_moment_of_a_chain_stays_what_it_was() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(&folder.path().join("log"));
    let mut model = Model::new();
    let mut moments: Vec<(Snapshot, Model, PathBuf)> = Vec::new();
    for n in 0..4 {
        let rows: Vec<u64> = (n..ROWS).step_by([2, 31, 37, 3][n as usize]).collect();
        put(&log, &rows, n).unwrap();
        model.extend(rows.iter().map(|&row| (row, n)));
        // Rows that are removed have tombstones, and come back in some later moments.
        let gone: Vec<u64> = (n * 7..ROWS).step_by(41).collect();
        log.remove(&gone).unwrap();
        model.retain(|row, _| !gone.contains(row));
        if n == 3 {
            log.compact_now().unwrap();
        }
        let into = folder.path().join(format!("s{n}"));
        let snapshot = match moments.last() {
            None => log.snapshot(&into),
            Some((base, ..)) => log.snapshot_since(base, &into),
        };
        moments.push((snapshot.unwrap(), model.clone(), into));
    }
    put(&log, &(0..ROWS).collect::<Vec<_>>(), 9).unwrap();
    log.compact_now().unwrap();
    drop(log);
    let dirs: Vec<PathBuf> = moments.iter().map(|(.., dir)| dir.clone()).collect();
    for (n, (snapshot, model, _)) in moments.iter().enumerate() {
        check(&image(&dirs[..=n], snapshot).unwrap(), model);
    }
    // Nothing was made in the folders: no lock, no file.
    for ((snapshot, ..), dir) in moments.iter().zip(&dirs) {
        let there = std::fs::read_dir(dir).unwrap().count();
        assert!(there <= snapshot.files.len());
    }
}

#[test]
fn what_is_wrong_with_a_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(&folder.path().join("log"));
    put(&log, &(0..60).collect::<Vec<_>>(), 1).unwrap();
    let into = folder.path().join("s");
    let snapshot = log.snapshot(&into).unwrap();
    let from = [into.clone()];
    let second = into.join(&snapshot.files[1].name);
    let whole = std::fs::read(&second).unwrap();
    // Another inode, or the log would have the damage too.
    let replace = |bytes: &[u8]| {
        std::fs::remove_file(&second).unwrap();
        std::fs::write(&second, bytes).unwrap();
    };
    for bit in [9 * 8, 4096 * 8, 4500 * 8, 8000 * 8] {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        replace(&bytes);
        match image(&from, &snapshot).unwrap_err() {
            CacheError::Damaged { path, .. } => assert_eq!(path, second),
            error => panic!("bit {bit}: {error}"),
        }
    }
    replace(&whole[..whole.len() - 4096]);
    let error = image(&from, &snapshot).unwrap_err().to_string();
    assert!(error.contains("8192 bytes, 12288 are listed"), "{error}");
    std::fs::remove_file(&second).unwrap();
    let error = image(&from, &snapshot).unwrap_err();
    assert!(matches!(&error, CacheError::File { path, .. } if *path == second), "{error}");
    std::fs::write(&second, &whole).unwrap();
    let mut less = snapshot.clone();
    less.rows -= 1;
    let error = image(&from, &less).unwrap_err().to_string();
    assert!(error.contains("60 rows, 59 are listed"), "{error}");
    let mut other = snapshot.clone();
    other.files[1].checksum ^= 1;
    let error = image(&from, &other).unwrap_err().to_string();
    assert!(error.contains("it is not the file that the snapshot lists"), "{error}");
    let error = Image::new(&snapshot, 5)
        .unwrap()
        .add(&snapshot.files[0], &from[0].join(&snapshot.files[0].name));
    assert!(error.unwrap_err().to_string().contains("the table has 5 rows"));
    image(&from, &snapshot).unwrap();
}
