//! One of several ranks fails or finds damage: all of them fail with its words, no model is
//! changed by what is damaged, and the checkpoint before stays whole.

use std::path::Path;

use tempfile::tempdir;
use tessera::checkpoint::{self, Checkpoint, Disk, LAST};
use tessera::ranks::on_first;
use tessera::tensors::Block;
use tessera_comm::{Communicator, Options, threads};

use crate::disk::Failing;
use crate::parts::{Layout, NOTHING, Part, loaded, moment, save, table};

const RANKS: usize = 3;

/// Runs `body` on each rank with its part of the table at `moment`.
fn on_ranks<R: Send>(moment: u8, body: impl Fn(&Communicator, Part) -> R + Sync) -> Vec<R> {
    let layout = Layout::by_rows(&table(), RANKS);
    threads::run(RANKS, &Options::default(), |ranks| {
        body(&ranks, layout.part(&table(), ranks.rank(), moment))
    })
    .unwrap()
}

fn write(run: &Path, values: u8, step: u64) {
    let written = on_ranks(values, |ranks, part| save(&Disk, ranks, run, &part, step));
    written.into_iter().for_each(Result::unwrap);
}

/// What all ranks say alike.
fn said(errors: Vec<tessera::Result<()>>) -> String {
    let texts: Vec<String> = errors.into_iter().map(|e| e.unwrap_err().to_string()).collect();
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    texts[0].clone()
}

/// What rank `bad` says, and the others of it.
fn said_of(bad: usize, mut errors: Vec<tessera::Result<()>>) -> String {
    let own = errors.remove(bad).unwrap_err().to_string();
    assert_eq!(said(errors), format!("rank {bad}: {own}"));
    own
}

#[test]
fn a_failing_disk_of_any_rank_leaves_a_whole_checkpoint() {
    for bad in 0..RANKS {
        // Whether the new folder was whole, and the old one still the last.
        let mut between = 0;
        for allowed in 0.. {
            let folder = tempdir().unwrap();
            let run = folder.path();
            write(run, 1, 1);
            let results = on_ranks(2, |ranks, part| {
                let allowed = if ranks.rank() == bad { allowed } else { u64::MAX };
                save(&Failing::after(allowed), ranks, run, &part, 2)
            });
            if results.iter().all(Result::is_ok) {
                assert_eq!(loaded(run), (2, 2));
                assert!(allowed >= 3, "{allowed} operations of rank {bad} were tried");
                break;
            }
            let said = said_of(bad, results);
            assert!(said.starts_with("cannot write "), "{said}");
            assert!(said.contains("No space left"), "{said}");
            let now = loaded(run);
            assert!(now == (1, 1) || now == (2, 2), "after {allowed} operations: {now:?}");
            let new = run.join("checkpoints/step-2");
            if now == (1, 1) && new.is_dir() {
                assert_eq!(loaded(&new), (2, 2));
                between += 1;
            }
            // Room again: what the failure left behind is no hindrance.
            write(run, 2, 2);
            assert_eq!(loaded(run), (2, 2));
        }
        // Only the first rank switches.
        assert_eq!(between > 0, bad == 0, "{between} times, rank {bad}");
    }
}

#[test]
fn damage_seen_by_one_rank_is_loaded_by_none() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    write(run, 1, 1);
    let found = Checkpoint::find(run).unwrap();
    assert_eq!(found.manifest.shards.len(), RANKS);
    for (number, shard) in found.manifest.shards.iter().enumerate() {
        let path = found.folder.join(&shard.file);
        let whole = std::fs::read(&path).unwrap();
        for damaged in [&whole[..whole.len() - 1], &[&whole[..50], &[0xee], &whole[51..]].concat()]
        {
            std::fs::write(&path, damaged).unwrap();
            let ends = on_ranks(NOTHING, |ranks, mut part| {
                let result = found.load(ranks, &mut part, true);
                assert!(part.is(NOTHING, true), "rank {} was written", ranks.rank());
                result
            });
            let said = said_of(number % RANKS, ends);
            assert!(said.contains(&shard.file) && said.contains("manifest says"), "{said}");
        }
        std::fs::write(&path, whole).unwrap();
    }
    let ends = on_ranks(NOTHING, |ranks, mut part| {
        found.load(ranks, &mut part, true).unwrap();
        part.is(1, true)
    });
    assert_eq!(ends, [true; RANKS]);
}

#[test]
fn a_rank_that_cannot_take_its_part_fails_all() {
    let folder = tempdir().unwrap();
    write(folder.path(), 1, 1);
    let found = Checkpoint::find(folder.path()).unwrap();
    let ends = on_ranks(NOTHING, |ranks, mut part| {
        part.refuses_writes = ranks.rank() == 1;
        found.load(ranks, &mut part, true)
    });
    assert_eq!(said_of(1, ends), "cannot write device: the device is lost");
}

#[test]
fn a_model_that_does_not_fit_is_refused_by_all() {
    let folder = tempdir().unwrap();
    write(folder.path(), 1, 1);
    let found = Checkpoint::find(folder.path()).unwrap();
    let other = [table()[0].clone()];
    let layout = Layout::by_rows(&other, 2);
    let ends = threads::run(2, &Options::default(), |ranks| {
        found.load(&ranks, &mut layout.part(&other, ranks.rank(), NOTHING), true)
    });
    let said = said(ends.unwrap());
    assert!(said.ends_with("does not fit this model: the model has no tables.a.sum"), "{said}");
}

#[test]
fn ranks_that_were_given_different_checkpoints_do_not_mix_them() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    write(run, 1, 1);
    write(run, 2, 2);
    let ends = on_ranks(NOTHING, |ranks, mut part| {
        let step = if ranks.rank() == 2 { 1 } else { 2 };
        let found = Checkpoint::find(&run.join(format!("checkpoints/step-{step}"))).unwrap();
        let result = found.load(ranks, &mut part, true);
        assert!(part.is(NOTHING, true), "rank {} was written", ranks.rank());
        result
    });
    assert!(said(ends).contains("rank 2 of communicator 'world' have another checkpoint"));
}

/// A fault of the program, seen when it is written and not when it is needed.
#[test]
fn parts_that_are_not_the_whole_are_no_checkpoint() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    write(run, 1, 1);
    for (change, says) in [
        (Block { tensor: 1, rows: 100..200, columns: 0..1 }, "row 100 column 0 is in two pieces"),
        (Block { tensor: 1, rows: 0..0, columns: 0..1 }, "100 of its 300 elements are in no shard"),
    ] {
        let ends = on_ranks(2, |ranks, mut part| {
            if ranks.rank() == 1 && change.rows.is_empty() {
                part.saves.pop();
            } else if ranks.rank() == 1 {
                part.saves.push(change.clone());
            }
            save(&Disk, ranks, run, &part, 2)
        });
        let said = said_of(0, ends);
        assert!(said.contains("manifest.json: tables.a.sum"), "{said}");
        assert!(said.ends_with(says), "{said}");
        assert_eq!(loaded(run), (1, 1));
    }
}

#[test]
fn what_the_first_rank_changes_alone_is_known_to_all() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    write(run, 1, 1);
    write(run, 2, 2);
    let folder = run.join("checkpoints");
    for allowed in 0..3 {
        let ends = on_ranks(NOTHING, |ranks, _| {
            let files = Failing::after(allowed);
            on_first(ranks, || checkpoint::point(&files, &folder, LAST, 1))
        });
        assert!(said_of(0, ends).starts_with("cannot write "));
        assert_eq!(loaded(run), (2, 2));
    }
    let mut changed = moment(2);
    changed.evaluations_without_improvement = 5;
    let ends = on_ranks(NOTHING, |ranks, _| {
        on_first(ranks, || {
            checkpoint::renew(&Disk, &folder, &changed)?;
            checkpoint::prune(&Disk, &folder, 2, 1, None)
        })
    });
    ends.into_iter().for_each(Result::unwrap);
    let found = Checkpoint::find(run).unwrap();
    assert_eq!(found.manifest.moment, changed);
    assert!(!folder.join("step-1").exists());
    assert_eq!(loaded(run), (2, 2));
}
