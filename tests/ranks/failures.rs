//! What happens when a rank panics, stalls, was started with something else, or is asked to end:
//! the same for all, soon, and no hang.

use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use prometheus::Registry;
use tessera::clock::Clock;
use tessera::config::Config;
use tessera::metrics::Metrics;
use tessera::model::{FirstValues, Model};
use tessera::pipeline::{Feeder, Next};
use tessera::signals::{Signal, Signals};
use tessera::trainer::Trainer;
use tessera_comm::{Communicator, Options, threads};
use tessera_device::Cpu;
use tessera_embedding::plan::Plan;

use crate::common::Project;
use crate::common::model::{Source, project};

/// Longer than anything here may take, a time limit's own aside.
const SOON: Duration = Duration::from_secs(60);

/// Fails when `work` is not done soon, instead of waiting for it.
fn soon<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    std::thread::spawn(move || done.send(work()));
    result.recv_timeout(SOON).expect("ranks hang, or one of them panicked")
}

fn config(project: &Project, ranks: usize, set: &[&str]) -> Config {
    let ranks = format!("parallel.ranks={ranks}");
    let set: Vec<String> =
        [&ranks[..], "train.epochs=100"].iter().chain(set).map(|&one| one.to_owned()).collect();
    Config::load(&project.path("config.toml"), &set).unwrap()
}

fn limited(limit: Duration) -> Options {
    Options { time_limit: limit, ..Options::default() }
}

/// Trains on this rank; `before` is called with the number of each step when all ranks are at its
/// beginning. Gives the steps done.
fn train(
    config: &Config,
    plan: &Plan,
    world: Communicator,
    signals: &Signals,
    before: impl Fn(usize, u64),
) -> tessera::Result<u64> {
    let rank = world.rank();
    let device = Cpu::new(NonZeroUsize::new(1))?;
    let model = Model::on_ranks(&device, config, FirstValues::Drawn, plan, world)?;
    let metrics = Metrics::register(&Registry::new(), model.table_names())?;
    let mut trainer = Trainer::new(config, &metrics, signals, model);
    let (model, moment) = (trainer.model(), trainer.moment());
    let feeder = Feeder::new(config, model, moment, &metrics, signals)?;
    let mut feeder = feeder.expect("there are no signals");
    loop {
        let mut clock = Clock::start();
        match feeder.next(&mut clock)? {
            Next::Step(fed) => {
                before(rank, fed.step);
                trainer.step(None, *fed, clock)?;
            }
            Next::EpochEnd => {}
            Next::End | Next::Signal(_) => return Ok(trainer.moment().step),
        }
    }
}

#[test]
fn a_rank_that_panics_in_a_step_ends_the_others_with_its_number() {
    let messages = soon(|| {
        let project = project(Source::Raw);
        let config = config(&project, 3, &[]);
        let plan = tessera::plan::for_training(&config).unwrap();
        let seen = Mutex::new(Vec::new());
        let panic = catch_unwind(AssertUnwindSafe(|| {
            threads::run(3, &limited(Duration::from_secs(300)), |world| {
                let rank = world.rank();
                let before = |rank: usize, step: u64| {
                    assert!((rank, step) != (1, 4), "rank 1 has had enough");
                };
                let error = train(&config, &plan, world, &Signals::default(), before).unwrap_err();
                seen.lock().unwrap().push((rank, error.to_string()));
            })
        }));
        // Whoever runs the ranks sees the panic itself.
        assert!(panic.unwrap_err().downcast_ref::<&str>().unwrap().contains("has had enough"));
        seen.into_inner().unwrap()
    });
    assert_eq!(messages.len(), 2, "{messages:?}");
    for (rank, message) in messages {
        let parts = ["(step 4, communicator '", "rank 1", "panicked"];
        for part in parts {
            assert!(message.contains(part), "rank {rank}: `{part}` is not in: {message}");
        }
    }
}

#[test]
fn a_rank_that_stalls_in_a_step_is_named_within_the_limit() {
    let (took, messages) = soon(|| {
        let project = project(Source::Raw);
        let config = config(&project, 3, &[]);
        let plan = tessera::plan::for_training(&config).unwrap();
        let begun = Instant::now();
        let messages = threads::run(3, &limited(Duration::from_secs(2)), |world| {
            let before = |rank: usize, step: u64| {
                if (rank, step) == (2, 3) {
                    std::thread::sleep(Duration::from_secs(6));
                }
            };
            train(&config, &plan, world, &Signals::default(), before).unwrap_err().to_string()
        });
        (begun.elapsed(), messages.unwrap())
    });
    assert!(took < Duration::from_secs(30), "{took:?}");
    for message in &messages {
        for part in ["no message from rank 2 within 2.0 s", "(step 3, communicator '"] {
            assert!(message.contains(part), "`{part}` is not in: {message}");
        }
    }
    let named = messages.iter().any(|message| message.starts_with("all_to_all_v<f32> #"));
    assert!(named, "{messages:?}");
}

#[test]
fn a_rank_with_another_configuration_is_refused_by_all_before_the_first_step() {
    for (set, says) in [
        (
            "table.1.features=[\"c2\", \"extra\"]",
            "table.1.features is [\"c2\"] and [\"c2\", \"extra\"]",
        ),
        ("data.batch_size=16", "data.batch_size is 32 and 16"),
        ("optimizer.dense.lr=0.5", "optimizer.dense.lr is 0.01 and 0.5"),
        ("train.checkpoint_every=3", "train.checkpoint_every is absent and 3"),
        ("seed=8", "seed is 7 and 8"),
    ] {
        let errors = soon(move || {
            let project = project(Source::Raw);
            let [usual, other] = [&[][..], &[set]].map(|set| config(&project, 3, set));
            let plan = tessera::plan::for_training(&usual).unwrap();
            threads::run(3, &limited(Duration::from_secs(300)), |world| {
                let config = if world.rank() == 2 { &other } else { &usual };
                let never = |_, _| panic!("no step begins");
                let error = train(config, &plan, world, &Signals::default(), never).unwrap_err();
                (error.exit_code(), error.to_string())
            })
            .unwrap()
        });
        for (code, message) in errors {
            assert_eq!(code, 2);
            assert!(
                message.starts_with("rank 2 has another configuration than rank 0: ")
                    && message.contains(says),
                "{set}: {message}"
            );
        }
    }
}

#[test]
fn a_rank_with_another_plan_is_refused_by_all_before_the_first_step() {
    let messages = soon(|| {
        let project = project(Source::Raw);
        let [usual, other] = [&[][..], &["table.0.sharding=row_wise", "table.1.sharding=row_wise"]]
            .map(|set| tessera::plan::for_training(&config(&project, 3, set)).unwrap());
        let config = config(&project, 3, &[]);
        threads::run(3, &limited(Duration::from_secs(300)), |world| {
            let plan = if world.rank() == 1 { &other } else { &usual };
            let never = |_, _| panic!("no step begins");
            train(&config, plan, world, &Signals::default(), never).unwrap_err().to_string()
        })
        .unwrap()
    });
    for message in messages {
        let says = "rank 1 of communicator 'tables' have another sharding plan than rank 0";
        assert!(message.starts_with(says), "{message}");
    }
}

/// Files may lie elsewhere on each machine, and threads are a rank's own.
#[test]
fn what_ranks_may_have_for_themselves_does_not_keep_them_apart() {
    let steps = soon(|| {
        let project = project(Source::Raw);
        let files = std::fs::read_dir(project.path("")).unwrap().map(|entry| entry.unwrap().path());
        for file in files.filter(|file| file.extension().is_some_and(|end| end == "bin")) {
            let name = file.file_name().unwrap().to_str().unwrap();
            std::fs::copy(&file, project.path(&format!("copy-of-{name}"))).unwrap();
        }
        let copies =
            "data.train=[\"copy-of-part0.bin\", \"copy-of-part1.bin\", \"copy-of-part2.bin\"]";
        let epochs = "train.epochs=1";
        let [usual, other] =
            [&[epochs][..], &[epochs, copies, "threads=1", "metrics.listen=127.0.0.1:0"]]
                .map(|set| config(&project, 2, set));
        let plan = tessera::plan::for_training(&usual).unwrap();
        threads::run(2, &limited(Duration::from_secs(30)), |world| {
            let config = if world.rank() == 1 { &other } else { &usual };
            train(config, &plan, world, &Signals::default(), |_, _| {}).unwrap()
        })
        .unwrap()
    });
    assert_eq!(steps, [10, 10]);
}

/// Once, the others went on to a step that the rank with the signal did not take part in.
#[test]
fn a_signal_that_one_rank_hears_of_stops_all_after_the_same_step() {
    for read in ["all", "own"] {
        let steps = soon(move || {
            let project = project(Source::Raw);
            let read = format!("data.read={read}");
            let config = config(&project, 3, &[&read, "pipeline.mode=serial"]);
            let plan = tessera::plan::for_training(&config).unwrap();
            threads::run(3, &limited(Duration::from_secs(300)), |world| {
                let signals = Signals::default();
                let before = |rank: usize, step: u64| {
                    if (rank, step) == (1, 3) {
                        signals.raise(Signal::Terminate);
                    }
                };
                train(&config, &plan, world, &signals, before).unwrap()
            })
            .unwrap()
        });
        assert_eq!(steps, [3, 3, 3], "{read}");
    }
}

/// Asked in order, all ranks write one checkpoint, from which the run goes on with the same bits.
#[test]
fn a_signal_ends_all_ranks_with_a_checkpoint() {
    for (signal, name, set) in [
        (libc::SIGTERM, "SIGTERM", ""),
        (libc::SIGINT, "SIGINT", "--set data.read=own --set data.shuffle_window=20"),
    ] {
        let project = project(Source::Parquet);
        let long = format!(
            "{set} --set parallel.ranks=3 --set threads=3 --set data.batch_size=8 \
             --set train.epochs=5000"
        );
        let mut run = project.start(&format!("train config.toml --out parts {long}"));
        run.wait_for("steps", || (project.steps_so_far("parts") >= 40).then_some(()));
        run.signal(signal);
        let (status, stderr) = run.end();
        assert_eq!(status.code(), Some(128 + signal), "{stderr}");
        let last = project.pointer("parts", "last");
        assert_eq!(last, project.steps("parts").len() as u64);
        assert_eq!(project.summary("parts")["ended"], name);
        let more = format!("{long} --set train.max_steps={}", last + 20);
        project.ok(&format!("train config.toml --resume parts --out parts {more}"));
        project.ok(&format!("train config.toml --out whole {more}"));
        assert_eq!(project.steps("parts"), project.steps("whole"));
        assert!(project.export("parts") == project.export("whole"), "other weights");
    }
}
