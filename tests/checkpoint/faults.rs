//! Failing writes and damage on one rank: the checkpoint before stays whole, and what is damaged
//! is never loaded.

use std::io;
use std::os::unix::process::CommandExt;
use std::path::Path;

use tessera::checkpoint::{self, Checkpoint, Disk, Files, LAST};

use crate::common::Project;
use crate::common::model::{Source, project};
use crate::disk::Failing;
use crate::parts::{Layout, alone, loaded, moment, save, table};

fn write(files: &dyn Files, run: &Path, values: u8, step: u64) -> tessera::Result<()> {
    let part = Layout::single(&table()).part(&table(), 0, values);
    save(files, &alone(), run, &part, step)
}

/// Fails each operation of `change` in turn, from the same state before; gives how many there are.
pub fn fail_everywhere(
    before: impl Fn(&Path),
    change: impl Fn(&dyn Files, &Path) -> tessera::Result<()>,
    old: (u64, u8),
    new: (u64, u8),
) -> u64 {
    for allowed in 0.. {
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path();
        before(run);
        assert_eq!(loaded(run), old);
        let result = change(&Failing::after(allowed), run);
        match result {
            Ok(()) => {
                assert_eq!(loaded(run), new);
                return allowed;
            }
            Err(error) => {
                let text = error.to_string();
                assert!(text.contains("cannot write") && text.contains("checkpoints"), "{text}");
                let there = loaded(run);
                // Once `last` has been renamed the new one counts, though its name may not be on
                // stable storage yet.
                assert!(there == old || there == new, "after {allowed} operations: {there:?}");
            }
        }
        // Room again: what the failure left behind is no hindrance.
        change(&Disk, run).unwrap();
        assert_eq!(loaded(run), new);
    }
    unreachable!("the range has no end")
}

#[test]
fn a_failure_of_any_operation_leaves_a_whole_checkpoint() {
    let operations = fail_everywhere(
        |run| write(&Disk, run, 1, 1).unwrap(),
        |files, run| write(files, run, 2, 2),
        (1, 1),
        (2, 2),
    );
    assert!(operations >= 12, "{operations} operations were tried");
}

/// A run that went back to an earlier checkpoint comes by the folder of a later one again. It is
/// not the one that `last` names, so that it may go.
#[test]
fn a_folder_of_a_past_that_is_gone_is_replaced() {
    fail_everywhere(
        |run| {
            write(&Disk, run, 9, 2).unwrap();
            write(&Disk, run, 1, 1).unwrap();
        },
        |files, run| write(files, run, 2, 2),
        (1, 1),
        (2, 2),
    );
}

/// The best evaluation may come after the checkpoint of its step. The manifest is then written
/// again; there was a time when the whole folder was, and a crash between removing and renaming
/// left `last` naming nothing.
#[test]
fn noting_the_best_evaluation_never_takes_the_checkpoint_away() {
    let renew = |files: &dyn Files, run: &Path| {
        let mut moment = moment(1);
        moment.evaluations_without_improvement = 5;
        checkpoint::renew(files, &run.join("checkpoints"), &moment)
    };
    fail_everywhere(|run| write(&Disk, run, 1, 1).unwrap(), renew, (1, 1), (1, 1));
    let folder = tempfile::tempdir().unwrap();
    write(&Disk, folder.path(), 1, 1).unwrap();
    renew(&Disk, folder.path()).unwrap();
    let found = Checkpoint::find(folder.path()).unwrap();
    assert_eq!(found.manifest.moment.evaluations_without_improvement, 5);
}

#[test]
fn the_pointer_is_switched_or_stays() {
    let folder = tempfile::tempdir().unwrap();
    let run = folder.path();
    write(&Disk, run, 2, 2).unwrap();
    write(&Disk, run, 1, 1).unwrap();
    for allowed in 0..3 {
        let files = Failing::after(allowed);
        checkpoint::point(&files, &run.join("checkpoints"), LAST, 2).unwrap_err();
        assert_eq!(loaded(run), (1, 1));
    }
    checkpoint::point(&Disk, &run.join("checkpoints"), LAST, 2).unwrap();
    assert_eq!(loaded(run), (2, 2));
}

/// A run of 4 steps with an evaluation file.
fn trained() -> Project {
    let project = project(Source::Raw);
    let text = std::fs::read_to_string(project.path("config.toml")).unwrap();
    project.write("config.toml", &text.replace("train = [", "eval = [\"part2.bin\"]\ntrain = ["));
    project.ok("train config.toml --out run --set train.max_steps=4");
    project
}

/// No file of the program may grow beyond `bytes` from here on: writes fail, as on a full disk.
pub fn limit_files(command: &mut std::process::Command, bytes: u64) {
    let limit = libc::rlimit { rlim_cur: bytes, rlim_max: bytes };
    // SAFETY: between fork and exec only two system calls are made, which neither allocate nor
    // take locks.
    unsafe {
        command.pre_exec(move || {
            if libc::setrlimit(libc::RLIMIT_FSIZE, &limit) != 0
                || libc::signal(libc::SIGXFSZ, libc::SIG_IGN) == libc::SIG_ERR
            {
                return Err(io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

#[test]
fn a_disk_that_fills_up_leaves_the_checkpoint_before() {
    let project = trained();
    let eval =
        |run: &str| project.ok(&format!("eval config.toml --checkpoint {run} --json")).stdout;
    let (figures, weights) = (eval("run"), project.export("run"));
    let shard = project.path("run/checkpoints/step-4/shard-00000-00000.safetensors");
    let bytes = std::fs::metadata(shard).unwrap().len();

    // steps.jsonl and config.toml fit, a shard does not: when it is nearly written, and at once.
    for limit in [bytes - 1, bytes / 2] {
        let mut command = project.command("train config.toml --resume run");
        limit_files(&mut command, limit);
        let out = command.output().unwrap();
        let stderr = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{stderr}");
        assert!(stderr.contains("cannot write"), "{stderr}");
        assert!(stderr.contains("shard-00000-00000.safetensors"), "{stderr}");
        assert_eq!(project.pointer("run", "last"), 4);
        assert_eq!(project.checkpoints("run"), [4]);
        assert_eq!(eval("run"), figures);
        assert!(project.export("run") == weights);
    }

    // Room again: the run goes on, and ends as if nothing had been.
    project.ok("train config.toml --resume run");
    project.ok("train config.toml --out whole");
    assert_eq!(project.steps("run"), project.steps("whole"));
    assert!(project.export("run") == project.export("whole"));
}

#[test]
fn damage_is_named_and_never_loaded() {
    let project = trained();
    let folder = project.path("run/checkpoints/step-4");
    let shard = folder.join("shard-00000-00000.safetensors");
    let manifest = folder.join("manifest.json");
    let [whole, text] = [&shard, &manifest].map(|path| std::fs::read(path).unwrap());
    let flipped = |bytes: &[u8], at: usize| {
        let mut bytes = bytes.to_vec();
        bytes[at] ^= 0x10;
        bytes
    };
    let check = |part: &str, names: &str| {
        for line in [
            "eval config.toml --checkpoint run",
            "predict config.toml --checkpoint run --out scores.parquet",
            "export --checkpoint run --out w.safetensors",
            "train config.toml --resume run --out new",
            "train config.toml --resume run",
        ] {
            let ran = project.run(line);
            eprintln!("{}", ran.stderr.trim_end());
            ran.says(1, &[part, names]);
        }
        for name in ["scores.parquet", "w.safetensors", "new"] {
            assert!(!project.path(name).exists(), "{name}");
        }
        assert_eq!(project.pointer("run", "last"), 4);
        assert_eq!(project.steps("run").len(), 4, "the run's lines are not cut");
    };

    for at in [0, 20, whole.len() / 2, whole.len() - 1] {
        std::fs::write(&shard, flipped(&whole, at)).unwrap();
        check("the file was changed or damaged", "shard-00000-00000.safetensors");
    }
    for keep in [whole.len() - 1, 100, 0] {
        std::fs::write(&shard, &whole[..keep]).unwrap();
        check("the manifest says", "shard-00000-00000.safetensors");
    }
    std::fs::remove_file(&shard).unwrap();
    check("cannot read", "shard-00000-00000.safetensors");
    std::fs::write(&shard, &whole).unwrap();

    std::fs::write(&manifest, &text[..text.len() / 2]).unwrap();
    check("not a checkpoint's manifest", "manifest.json");
    // A digit that another one took the place of still makes a manifest, but not a whole one.
    let changed =
        String::from_utf8(text.clone()).unwrap().replacen("\"samples\": ", "\"samples\": 1", 1);
    std::fs::write(&manifest, changed).unwrap();
    check("its checksum is wrong", "manifest.json");
    std::fs::remove_file(&manifest).unwrap();
    check("cannot read", "manifest.json");

    std::fs::write(&manifest, &text).unwrap();
    project.ok("train config.toml --resume run");
}
