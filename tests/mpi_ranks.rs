//! Runs on ranks that are processes of an MPI job: the answer of ranks that are threads, to the
//! bit, and what happens when one of them is stopped, killed or asked to end.
//!
//! Needs the feature `mpi` and Open MPI; `tests/mpi.sh` sets both up. `TESSERA_MPIRUN` is the
//! launcher with its options.

mod common;

use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::golden::{RUNS, agrees, project, sharded};
use common::model::{self, Source};
use common::{Project, Ran, shared::shared};

/// Longer than any job here takes; one that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// How long ranks wait for each other in jobs that lose one.
const LIMIT: Duration = Duration::from_secs(3);

fn mpirun() -> Vec<String> {
    let line = std::env::var("TESSERA_MPIRUN")
        .unwrap_or_else(|_| "mpirun --oversubscribe --allow-run-as-root".to_owned());
    line.split_whitespace().map(str::to_owned).collect()
}

/// A job in the background; all of it is ended when dropped.
struct Job {
    mpirun: Child,
    ranks: Vec<libc::pid_t>,
    begun: Instant,
}

impl Job {
    /// Starts the program with the words of `line` as arguments on `ranks` processes.
    fn start(project: &Project, ranks: usize, line: &str) -> Self {
        let launcher = mpirun();
        let mut command = Command::new(&launcher[0]);
        command
            .args(&launcher[1..])
            .args(["-n", &ranks.to_string(), env!("CARGO_BIN_EXE_tessera")])
            .args(line.split_whitespace())
            .args(["--set", &format!("parallel.ranks={ranks}"), "--set", "parallel.comm=mpi"])
            .args(["--set", "threads=1"])
            .current_dir(project.path(""))
            .stdin(Stdio::null())
            .stdout(fs::File::create(project.path("stdout")).unwrap())
            .stderr(fs::File::create(project.path("stderr")).unwrap());
        let mpirun = command.spawn().unwrap_or_else(|error| panic!("{launcher:?}: {error}"));
        Self { mpirun, ranks: Vec::new(), begun: Instant::now() }
    }

    /// Waits until `ready`.
    #[track_caller]
    fn wait_for(&mut self, project: &Project, ready: impl Fn() -> bool) {
        while !ready() {
            let ended = self.mpirun.try_wait().unwrap();
            let stderr = fs::read_to_string(project.path("stderr")).unwrap();
            assert!(ended.is_none(), "the job ended before: {stderr}");
            assert!(self.begun.elapsed() < PATIENCE, "not within {PATIENCE:?}: {stderr}");
            std::thread::sleep(Duration::from_millis(5));
        }
        self.ranks = ranks_of(self.mpirun.id());
    }

    /// Sends a signal to one rank.
    fn signal(&self, rank: usize, signal: libc::c_int) {
        // SAFETY: a plain system call. The process is a child of the launcher, which waits for it
        // only when it has ended; one that ended just now is at most a process of nobody.
        assert_eq!(unsafe { libc::kill(self.ranks[rank], signal) }, 0);
    }

    /// Waits for the end.
    #[track_caller]
    fn end(&mut self, project: &Project) -> Ran {
        let status = loop {
            if let Some(status) = self.mpirun.try_wait().unwrap() {
                break status;
            }
            let stderr = fs::read_to_string(project.path("stderr")).unwrap();
            assert!(self.begun.elapsed() < PATIENCE, "hangs: {stderr}");
            std::thread::sleep(Duration::from_millis(5));
        };
        let text = |name: &str| fs::read_to_string(project.path(name)).unwrap();
        Ran { code: status.code(), stdout: text("stdout"), stderr: text("stderr") }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // A test that failed half-way leaves no process behind; one that has ended is no error.
        let _ = self.mpirun.kill();
        let _ = self.mpirun.wait();
        for &rank in &self.ranks {
            if is_ours(rank) {
                // SAFETY: a plain system call on a process that runs the program under test in
                // this test's job.
                let _ = unsafe { libc::kill(rank, libc::SIGKILL) };
            }
        }
    }
}

/// Whether a process runs the program under test.
fn is_ours(process: libc::pid_t) -> bool {
    fs::read_link(format!("/proc/{process}/exe"))
        .is_ok_and(|path| path.ends_with("tessera") || path.to_string_lossy().contains("/tessera"))
}

/// The processes of a job by rank, as their environment says.
fn ranks_of(launcher: u32) -> Vec<libc::pid_t> {
    let mut ranks = Vec::new();
    for entry in fs::read_dir("/proc").unwrap() {
        let Ok(process) = entry.unwrap().file_name().to_string_lossy().parse::<libc::pid_t>()
        else {
            continue;
        };
        let read = |name: &str| fs::read(format!("/proc/{process}/{name}")).unwrap_or_default();
        let status = String::from_utf8_lossy(&read("status")).into_owned();
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"));
        if parent.map(str::trim) != Some(&launcher.to_string()) || !is_ours(process) {
            continue;
        }
        let environment = read("environ");
        let rank = environment.split(|&byte| byte == 0).find_map(|variable| {
            std::str::from_utf8(variable).ok()?.strip_prefix("OMPI_COMM_WORLD_RANK=")?.parse().ok()
        });
        ranks.push((rank.unwrap_or(usize::MAX), process));
    }
    ranks.sort_unstable();
    ranks.into_iter().map(|(_, process)| process).collect()
}

#[test]
fn golden_runs_have_the_bits_of_thread_ranks() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        let golden = shared.join("golden").join(run);
        let project = project(&golden);
        for (ranks, sharding) in [
            (1, "auto"),
            (2, "column_wise"),
            (3, "row_wise"),
            (4, "grid"),
            (4, "auto"),
            (7, "table_row_wise"),
        ] {
            if ranks == 7 && run != "dlrm_jagged_adam" {
                continue;
            }
            let begun = Instant::now();
            let line = format!(
                "train golden/config.toml --init golden/init.safetensors{}",
                sharded(&golden, sharding)
            );
            // Where both have micro-batches, overlap on one side changes nothing.
            let (here, there) = match ranks {
                2 | 4 => (
                    " --set pipeline.micro_batches=3 --set pipeline.mode=nested \
                     --set pipeline.depth=3",
                    " --set pipeline.micro_batches=3 --set pipeline.mode=serial",
                ),
                _ => ("", ""),
            };
            let out = format!("mpi-{ranks}-{sharding}");
            let job = format!("{line} --out {out}{here}");
            let ran = Job::start(&project, ranks, &job).end(&project);
            assert_eq!(ran.code, Some(0), "{run} on {ranks}: {}", ran.stderr);
            eprintln!("{run}, {sharding} on {ranks}: {:.1} s", begun.elapsed().as_secs_f64());
            agrees(&project, &golden, &out);
            assert_eq!(project.summary(&out)["ranks"], ranks);

            let threads = format!("threads-{ranks}-{sharding}");
            project.ok(&format!(
                "{line} --out {threads} --set parallel.ranks={ranks} --set parallel.comm=threads \
                 --set threads={ranks}{there}"
            ));
            assert_eq!(project.steps(&out), project.steps(&threads), "{run}, {out}");
            assert!(project.export(&out) == project.export(&threads), "{run}, {out}: weights");
        }
    }
}

/// A long run on three ranks, once it is some steps in.
fn long(project: &Project) -> (Job, String) {
    let line = format!(
        "train config.toml --out run --set train.epochs=5000 --set data.batch_size=8 \
         --set parallel.time_limit_s={}",
        LIMIT.as_secs()
    );
    let mut job = Job::start(project, 3, &line);
    job.wait_for(project, || project.steps_so_far("run") >= 10);
    assert_eq!(job.ranks.len(), 3, "one process a rank");
    (job, line)
}

#[test]
fn a_stopped_rank_is_named_by_the_others_within_the_limit() {
    let project = model::project(Source::Raw);
    let (mut job, _) = long(&project);
    let begun = Instant::now();
    job.signal(1, libc::SIGSTOP);
    let ran = job.end(&project);
    assert_ne!(ran.code, Some(0));
    // The limit, then what the launcher takes to end a process that does not answer.
    assert!(begun.elapsed() < LIMIT + Duration::from_secs(20), "{:?}", begun.elapsed());
    for part in ["no message from rank 1 within 3.0 s", "(step ", "communicator '"] {
        assert!(ran.stderr.contains(part), "`{part}` is missing from:\n{}", ran.stderr);
    }
}

#[test]
fn a_killed_rank_ends_the_job() {
    let project = model::project(Source::Raw);
    let (mut job, _) = long(&project);
    let begun = Instant::now();
    job.signal(2, libc::SIGKILL);
    let ran = job.end(&project);
    assert_ne!(ran.code, Some(0));
    assert!(begun.elapsed() < LIMIT + Duration::from_secs(20), "{:?}", begun.elapsed());
}

/// Asked in order, whichever rank hears of it: one checkpoint, from which threads go on.
#[test]
fn a_signal_to_one_rank_ends_all_with_a_checkpoint() {
    let project = model::project(Source::Raw);
    let (mut job, line) = long(&project);
    job.signal(1, libc::SIGTERM);
    let ran = job.end(&project);
    assert_eq!(ran.code, Some(143), "{}", ran.stderr);
    let last = project.pointer("run", "last");
    assert_eq!(last, project.steps("run").len() as u64);
    assert_eq!(project.summary("run")["ended"], "SIGTERM");
    let more = format!("--set parallel.ranks=3 --set threads=3 --set train.max_steps={}", last + 5);
    project.ok(&format!("{} --resume run {more}", line));
    project.ok(&format!("{} {more}", line.replace("--out run", "--out whole")));
    assert_eq!(project.steps("run"), project.steps("whole"));
    assert!(project.export("run") == project.export("whole"), "other weights");
}

/// Ranks whose configurations differ: each process reads its own.
#[test]
fn processes_with_different_configurations_do_not_train() {
    let project = model::project(Source::Raw);
    let launcher = mpirun();
    let rank = |lr: f64| {
        let text = format!(
            "-n 1 {} train config.toml --out run --set parallel.ranks=2 --set parallel.comm=mpi \
             --set threads=1 --set optimizer.dense.lr={lr}",
            env!("CARGO_BIN_EXE_tessera")
        );
        text.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let mut arguments = launcher[1..].to_vec();
    arguments.extend(rank(0.01));
    arguments.push(":".into());
    arguments.extend(rank(0.02));
    let out = Command::new(&launcher[0])
        .args(&arguments)
        .current_dir(project.path(""))
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    let says = "rank 1 has another configuration than rank 0: optimizer.dense.lr is 0.01 and 0.02";
    assert!(stderr.contains(says), "{stderr}");
    assert!(project.steps_so_far("run") == 0);
}
