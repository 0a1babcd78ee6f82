//! The conformance suite, and failures, under MPI: `mpi.sh` runs this under a launcher.
//!
//! `mpi SCENARIO [PIECE_BYTES_MAX]`; alone, the suite.

mod suite;

use std::process::{Command, exit};
use std::time::Duration;

use tessera_comm::{Communicator, LaunchEnv, Options, Result, mpi};

fn main() {
    let mut arguments = std::env::args().skip(1).filter(|argument| !argument.starts_with('-'));
    let scenario = arguments.next().unwrap_or_else(|| "suite".to_owned());
    let pieces = arguments.next().map_or(mpi::PIECE_BYTES_MAX, |text| text.parse().unwrap());
    let limit = if scenario == "suite" { 120 } else { 2 };
    let options = Options { time_limit: Duration::from_secs(limit), ..Options::default() };
    let (job, comm) = mpi::init_with_pieces(&options, pieces).unwrap();
    let rank = comm.rank();
    if let Some(env) = LaunchEnv::read(|name| std::env::var(name).ok()).unwrap() {
        assert_eq!((env.rank, env.size), (rank, comm.size()), "{env:?}");
    }
    let result = match scenario.as_str() {
        "suite" => {
            for (name, case) in suite::CASES {
                for seed in [1, 2] {
                    case(&comm, seed);
                }
                if rank == 0 {
                    println!("{name}: ok");
                }
            }
            comm.close()
        }
        "again" => {
            let error = mpi::init(&options).map(drop).unwrap_err();
            println!("{error}");
            comm.close()
        }
        "mismatch" if rank == 1 => comm.all_gather(vec![1u64]).wait().map(drop),
        "mismatch" => {
            comm.all_to_all_v(vec![1.0f32; comm.size()], &vec![1; comm.size()]).wait().map(drop)
        }
        "stopped" => {
            comm.set_step(4);
            if rank == 1 {
                signal_self("STOP");
            }
            reduce(&comm)
        }
        "killed" => {
            if rank == 1 {
                signal_self("KILL");
            }
            reduce(&comm)
        }
        "panic" => {
            assert!(rank != 1, "rank 1 has had enough");
            reduce(&comm)
        }
        "left" if rank == 1 => comm.close(),
        "left" => reduce(&comm),
        "held" => {
            let twin = comm.duplicate("twin").unwrap();
            let result = job.finalize();
            drop(twin);
            println!("rank {rank}: {}", result.unwrap_err());
            exit(3);
        }
        other => panic!("no scenario {other}"),
    };
    if let Err(error) = result {
        println!("rank {rank}: {error}");
        job.abort(3);
    }
    if let Err(error) = job.finalize() {
        println!("rank {rank}, at the end: {error}");
        exit(3);
    }
    if rank == 0 {
        println!("{scenario}: done");
    }
}

fn reduce(comm: &Communicator) -> Result<()> {
    comm.barrier().wait()?;
    comm.all_reduce(vec![1.0f32; 100_000]).wait().map(drop)
}

/// Sends this process a signal.
fn signal_self(name: &str) {
    let status =
        Command::new("kill").args([format!("-{name}"), std::process::id().to_string()]).status();
    println!("rank 1 sends itself {name}: {status:?}");
    // The signal comes at once or not at all.
    std::thread::sleep(Duration::from_secs(1));
}
