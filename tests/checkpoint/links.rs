//! Checkpoints of rows that lie in a log: links to its files, whole under failing writes and
//! whatever the log does later, and nothing of them is read to write one.

use std::path::Path;
use std::sync::Arc;

use tempfile::tempdir;
use tessera::checkpoint::{self, Checkpoint, Disk, Extent, Files};
use tessera::config::ColdFormat;
use tessera::tensors::{Block, ColdPart, Field, ReadTensors, TablePart, Tensor};
use tessera_cache::log::{Compaction, Options, SsdLog};
use tessera_cache::{ColdRows, Plane, Planes, RowLayout};
use tessera_embedding::Init;

use crate::disk::Failing;
use crate::faults::fail_everywhere;
use crate::parts::{Layout, NOTHING, Part, alone, loaded, moment, table};

const ROWS: u64 = 300;
const LAYOUT: RowLayout = RowLayout { weight_bytes: 64, state_bytes: 4 };

/// [`table`] with its rows in a log.
struct Logged {
    tensors: Vec<Tensor>,
    log: Arc<SsdLog>,
}

impl Logged {
    /// The log in the run's folder, opened again.
    fn open(run: &Path) -> Self {
        let options = Options {
            segment_bytes: 3 * 4096,
            compaction: Compaction::OnDemand,
            rows: Some(ROWS),
            ..Options::default()
        };
        let log = SsdLog::open(&run.join("log"), 7, LAYOUT, options).unwrap();
        Self { tensors: table(), log: Arc::new(log) }
    }

    /// Writes some rows as of `moment`.
    fn put(&self, rows: impl Iterator<Item = u64>, moment: u8) {
        let part = Layout::single(&self.tensors).part(&self.tensors, 0, moment);
        let [(_, weights), (_, sums)] = part.contents() else { panic!("two tensors") };
        for row in rows {
            let at = row as usize;
            let planes = Planes { weights: &weights[at * 64..][..64], state: &sums[at * 4..][..4] };
            self.log.put(&[row], planes).unwrap();
        }
    }

    fn save(
        &self,
        files: &dyn Files,
        run: &Path,
        step: u64,
        base: Option<u64>,
    ) -> tessera::Result<checkpoint::Written> {
        let extent = Extent { cold: ColdFormat::Links, base };
        let (folder, config) = (run.join("checkpoints"), toml::Table::new());
        checkpoint::write(files, &alone(), &folder, self, &moment(step), &config, extent)
    }
}

impl ReadTensors for Logged {
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn blocks(&self) -> Vec<Block> {
        Block::all(&self.tensors)
    }

    fn read_block(&self, block: &Block, _: &mut Vec<u8>) -> tessera::Result<()> {
        panic!("nothing is read of what is linked: {block:?}");
    }

    fn parts(&self) -> Vec<TablePart> {
        let mut fields = Vec::new();
        for (block, plane) in self.blocks().into_iter().zip([Plane::Weights, Plane::State]) {
            fields.push(Field { block, plane, at: 0 });
        }
        let (table, init, seed) = ("a".to_owned(), Init::Zero, 1);
        let cold = ColdPart { log: self.log.clone(), table, init, seed };
        vec![TablePart { rows: 0..ROWS as usize, fields, cold: Some(cold) }]
    }
}

fn write(
    files: &dyn Files,
    run: &Path,
    values: u8,
    step: u64,
    base: Option<u64>,
) -> tessera::Result<()> {
    let logged = Logged::open(run);
    logged.put(0..ROWS, values);
    logged.save(files, run, step, base).map(|_| ())
}

#[test]
fn a_failure_of_any_operation_leaves_a_whole_checkpoint() {
    for base in [None, Some(1)] {
        let operations = fail_everywhere(
            |run| write(&Disk, run, 1, 1, None).unwrap(),
            |files, run| write(files, run, 2, 2, base),
            (1, 1),
            (2, 2),
        );
        assert!(operations >= 18, "{operations} operations were tried");
    }
}

/// The file system with the log is another one than that with the checkpoints.
struct Apart<F>(F);

impl<F: Files> Files for Apart<F> {
    fn create_dir(&self, path: &Path) -> std::io::Result<()> {
        self.0.create_dir(path)
    }

    fn create(&self, path: &Path) -> std::io::Result<Box<dyn checkpoint::OutFile>> {
        self.0.create(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.0.rename(from, to)
    }

    fn link(&self, _: &Path, _: &Path) -> std::io::Result<()> {
        Err(std::io::ErrorKind::CrossesDevices.into())
    }

    fn remove_dir(&self, path: &Path) -> std::io::Result<()> {
        self.0.remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> std::io::Result<()> {
        self.0.sync_dir(path)
    }
}

#[test]
fn where_links_are_impossible_files_are_copied() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    let logged = Logged::open(run);
    logged.put(0..ROWS, 1);
    let written = logged.save(&Apart(Disk), run, 1, None).unwrap();
    assert_eq!(written.linked_bytes, 0);
    assert!(written.bytes > 300 * 68, "{} bytes were copied", written.bytes);
    assert_eq!(loaded(run), (1, 1));
    // A copy that fails half-way is a failed checkpoint.
    for allowed in 3..20 {
        let before = logged.log.stats();
        logged.save(&Apart(Failing::after(allowed)), run, 2, None).unwrap_err();
        assert_eq!(logged.log.stats(), before, "the log is not to blame");
        assert_eq!(loaded(run), (1, 1));
    }
}

/// Time and bytes go by what changed, not by what there is.
#[test]
fn rows_are_neither_read_nor_written_for_a_checkpoint() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    let logged = Logged::open(run);
    logged.put(0..ROWS, 1);
    let before = logged.log.stats();
    let written = logged.save(&Disk, run, 1, None).unwrap();
    let after = logged.log.stats();
    assert_eq!(after.get_bytes, before.get_bytes, "rows were read");
    assert!(after.put_bytes - before.put_bytes < 4096, "more than a seal was written");
    assert_eq!(written.linked_bytes, after.file_bytes);
    assert!(written.bytes < 8192, "{} bytes beside the links", written.bytes);
    // One row more: the increment has the file with it, and no other.
    logged.put(5..6, 2);
    let increment = logged.save(&Disk, run, 2, Some(1)).unwrap();
    assert!(increment.is_increment);
    assert_eq!(increment.linked_bytes, 8192, "a header and a page of records");
    let manifest = Checkpoint::find(run).unwrap().manifest;
    let [piece] = &manifest.cold[..] else { panic!("one piece") };
    assert_eq!(piece.steps.iter().filter(|&&step| step == 2).count(), 1);
    assert_eq!(piece.snapshot.rows, ROWS);
}

/// Compaction deletes files and makes others: it cannot reach a checkpoint. Rows that are removed
/// are gone from what comes after, not from what was before; nothing older comes back.
#[test]
fn a_log_goes_on_without_touching_its_checkpoints() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    let logged = Logged::open(run);
    let step = |number: u64| run.join(format!("checkpoints/step-{number}"));
    logged.put(0..ROWS, 1);
    logged.save(&Disk, run, 1, None).unwrap();
    for (number, base) in [(2, Some(1)), (3, Some(2)), (4, None), (5, Some(4))] {
        logged.put(0..ROWS, number as u8);
        if number == 3 {
            assert!(logged.log.compact_now().unwrap() > 0);
        }
        logged.save(&Disk, run, number, base).unwrap();
    }
    // All of them lie in the folders still, and are what they were.
    logged.put(0..ROWS, 9);
    logged.log.compact_now().unwrap();
    for number in 1..=5 {
        assert_eq!(loaded(&step(number)), (number, number as u8));
    }
    // A row that was removed has its first value, zero, in the next increment.
    logged.log.remove(&[7, 8]).unwrap();
    logged.save(&Disk, run, 6, Some(5)).unwrap();
    drop(logged);
    std::fs::remove_dir_all(run.join("log")).unwrap();
    let mut part = Layout::single(&table()).part(&table(), 0, NOTHING);
    Checkpoint::find(run).unwrap().load(&alone(), &mut part, true).unwrap();
    let wanted = Layout::single(&table()).part(&table(), 0, 9);
    for ((_, bytes), (block, wanted)) in part.contents().iter().zip(wanted.contents()) {
        let width = bytes.len() / block.rows.len();
        for row in 0..ROWS as usize {
            let here = row * width..(row + 1) * width;
            if [7, 8].contains(&row) {
                assert!(bytes[here].iter().all(|&byte| byte == 0), "row {row}");
            } else {
                assert_eq!(bytes[here.clone()], wanted[here], "row {row}");
            }
        }
    }
    assert_eq!(loaded(&step(5)), (5, 5));
}

fn refused(run: &Path) -> String {
    let mut part: Part = Layout::single(&table()).part(&table(), 0, NOTHING);
    let error = match Checkpoint::find(run) {
        Ok(found) => found.load(&alone(), &mut part, true).unwrap_err(),
        Err(error) => error,
    };
    assert!(part.is(NOTHING, true), "nothing of it was loaded");
    let mut text = error.to_string();
    let mut source = std::error::Error::source(&error);
    while let Some(cause) = source {
        text += &format!(": {cause}");
        source = cause.source();
    }
    text
}

#[test]
fn damage_of_a_file_and_gaps_in_a_chain_are_named() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    let logged = Logged::open(run);
    logged.put(0..ROWS, 1);
    logged.save(&Disk, run, 1, None).unwrap();
    logged.put(0..9, 2);
    logged.save(&Disk, run, 2, Some(1)).unwrap();
    logged.put(0..ROWS, 3);
    logged.save(&Disk, run, 3, Some(2)).unwrap();
    let checkpoints = run.join("checkpoints");
    // A file of the first checkpoint that the last one needs. Another inode: the log has its own.
    let piece = Checkpoint::find(run).unwrap().manifest.cold[0].clone();
    let at = piece.steps.iter().position(|&step| step == 1).unwrap();
    let name = format!("{}/{}", piece.folder, piece.snapshot.files[at].name);
    let path = checkpoints.join("step-1").join(&name);
    let whole = std::fs::read(&path).unwrap();
    for bit in [0, 5000 * 8 + 3, 8500 * 8] {
        let mut bytes = whole.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        std::fs::remove_file(&path).unwrap();
        std::fs::write(&path, &bytes).unwrap();
        let said = refused(run);
        assert!(said.contains(&name) && said.contains("step-1"), "{said}");
    }
    std::fs::remove_file(&path).unwrap();
    let said = refused(run);
    assert!(said.contains("cannot read") && said.contains(&name), "{said}");
    std::fs::write(&path, &whole).unwrap();
    assert_eq!(loaded(run), (3, 3));
    // A checkpoint of the chain that is gone, or another of the same step.
    let (second, away) = (checkpoints.join("step-2"), checkpoints.join("away"));
    std::fs::rename(&second, &away).unwrap();
    let said = refused(run);
    assert!(
        said.contains("it holds what changed since checkpoint step-2, which is missing"),
        "{said}"
    );
    logged.put(0..9, 4);
    logged.save(&Disk, run, 2, None).unwrap();
    let said = refused(&checkpoints.join("step-3"));
    assert!(said.contains("step-2, and the one there is another"), "{said}");
    std::fs::remove_dir_all(&second).unwrap();
    std::fs::rename(&away, &second).unwrap();
    assert_eq!(loaded(&checkpoints.join("step-3")), (3, 3));
    // What was noted of evaluations later does not make it another one.
    let mut noted = moment(1);
    noted.evaluations_without_improvement = 3;
    checkpoint::renew(&Disk, &checkpoints, &noted).unwrap();
    assert_eq!(loaded(&checkpoints.join("step-3")), (3, 3));
}

#[test]
fn what_a_kept_increment_builds_on_is_kept() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    let logged = Logged::open(run);
    let checkpoints = run.join("checkpoints");
    let mut base = None;
    for (step, whole) in [(1, true), (2, true), (3, false), (4, false), (5, true), (6, false)] {
        logged.put(0..ROWS, step as u8);
        logged.save(&Disk, run, step, base.filter(|_| !whole)).unwrap();
        base = Some(step);
        checkpoint::prune(&Disk, &checkpoints, step, 1, Some(1)).unwrap();
        let mut left: Vec<u64> = std::fs::read_dir(&checkpoints)
            .unwrap()
            .filter_map(|entry| {
                entry.unwrap().file_name().to_str()?.strip_prefix("step-")?.parse().ok()
            })
            .collect();
        left.sort_unstable();
        let wanted: &[u64] = match step {
            1 => &[1],
            2 => &[1, 2],
            3 => &[1, 2, 3],
            4 => &[1, 2, 3, 4],
            5 => &[1, 5],
            _ => &[1, 5, 6],
        };
        assert_eq!(left, wanted, "after step {step}");
        assert_eq!(loaded(run), (step, step as u8));
    }
}
