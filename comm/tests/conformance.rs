//! The conformance suite on the backends of one process.

mod suite;

use tessera_comm::{Options, single, threads};

/// Names the case, ranks and seed of a failure.
struct Report<'a>(&'a str, usize, u64);

impl Drop for Report<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("failed: case '{}' on {} ranks, seed {}", self.0, self.1, self.2);
        }
    }
}

#[test]
fn a_single_rank_conforms() {
    for (name, case) in suite::CASES {
        let _report = Report(name, 1, 7);
        let comm = single(&Options::default());
        case(&comm, 7);
        comm.close().unwrap();
    }
}

#[test]
fn ranks_on_threads_conform() {
    for ranks in [1, 2, 3, 4, 5, 7] {
        for (name, case) in suite::CASES {
            let seed = ranks as u64 * 1000 + 1;
            let _report = Report(name, ranks, seed);
            let places = threads::run(ranks, &Options::default(), |comm| {
                case(&comm, seed);
                let place = comm.rank();
                comm.close().unwrap();
                place
            });
            assert_eq!(places.unwrap(), (0..ranks).collect::<Vec<_>>());
        }
    }
}

#[test]
fn cases_follow_each_other_on_one_world() {
    threads::run(3, &Options::default(), |comm| {
        for (_, case) in suite::CASES {
            case(&comm, 5);
        }
        comm.close().unwrap();
    })
    .unwrap();
}

#[test]
fn random_programs_of_many_seeds() {
    let (_, programs) = suite::CASES[suite::CASES.len() - 1];
    for seed in 0..30 {
        let ranks = 2 + seed as usize % 4;
        let _report = Report("random programs", ranks, seed);
        threads::run(ranks, &Options::default(), |comm| programs(&comm, seed)).unwrap();
    }
}

#[test]
fn two_worlds_live_in_one_process() {
    std::thread::scope(|scope| {
        for (world, ranks) in [(1u64, 2usize), (2, 3)] {
            scope.spawn(move || {
                threads::run(ranks, &Options::default(), |comm| {
                    for (_, case) in suite::CASES {
                        case(&comm, world);
                    }
                })
                .unwrap();
            });
        }
    });
}

#[test]
fn vectors_come_back_on_threads() {
    threads::run(3, &Options::default(), |comm| {
        // all_reduce returns the vector it was given: when its second exchange ends, no peer
        // reads it any more.
        for _ in 0..50 {
            let values = vec![1.0f32; 50_000];
            let at = values.as_ptr();
            let sums = comm.all_reduce(values).wait().unwrap();
            assert_eq!(sums.as_ptr(), at);
            assert_eq!(sums, vec![3.0; 50_000]);
        }
        // What was sent is in the pool once all have read it.
        let send: Vec<u64> = Vec::from_iter(0..777);
        let at = send.as_ptr();
        comm.all_gather(send).wait().unwrap();
        comm.barrier().wait().unwrap();
        let again = comm.buffer::<u64>(700);
        assert_eq!(again.as_ptr(), at);
    })
    .unwrap();
}
