//! What happens when ranks do not do what they must: an error with names and numbers on all of
//! them, soon, and no hang.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_comm::{
    CommError, CommMetrics, Communicator, Options, Receive, Result, single, threads,
};

/// Longer than any failure but a time limit's own may take to be seen.
const SOON: Duration = Duration::from_secs(20);

/// Runs ranks whose time limit is far above [`SOON`], and checks that they end before.
fn soon<R: Send>(ranks: usize, body: impl Fn(Communicator) -> R + Sync) -> Vec<R> {
    let start = Instant::now();
    let options = Options { time_limit: Duration::from_secs(300), ..Options::default() };
    let results = threads::run(ranks, &options, body).unwrap();
    assert!(start.elapsed() < SOON, "{:?}", start.elapsed());
    results
}

fn message<R: std::fmt::Debug>(result: Result<R>) -> String {
    result.unwrap_err().to_string()
}

#[test]
fn different_operations_are_an_error_on_both_sides() {
    let messages = soon(2, |comm| {
        comm.set_step(4);
        let ids = comm.duplicate("ids").unwrap();
        for _ in 0..17 {
            ids.barrier().wait().unwrap();
        }
        if comm.rank() == 0 {
            message(ids.all_to_all_v(vec![1.0f32, 2.0], &[1, 1]).wait())
        } else {
            message(ids.all_gather(vec![1u64]).wait())
        }
    });
    assert_eq!(
        messages[0],
        "rank 1 posted all_gather<u64> #17, rank 0 all_to_all_v<f32> #17 (step 4, communicator \
         'ids'): all ranks must post the same operations in the same order"
    );
    assert_eq!(
        messages[1],
        "rank 0 posted all_to_all_v<f32> #17, rank 1 all_gather<u64> #17 (step 4, communicator \
         'ids'): all ranks must post the same operations in the same order"
    );
}

#[test]
fn operations_that_differ_in_anything_are_mismatches() {
    type Post = fn(&Communicator) -> Result<()>;
    let pairs: [(Post, Post, &str); 10] = [
        (
            |c| c.reduce_scatter(vec![1u8; c.size()], &vec![1; c.size()]).wait().map(drop),
            |c| {
                let mut counts = vec![1; c.size()];
                (counts[0], counts[1]) = (2, 0);
                c.reduce_scatter(vec![1u8; c.size()], &counts).wait().map(drop)
            },
            "reduce_scatter<u8, sum> of ",
        ),
        (
            |c| c.all_gather(vec![1u8]).wait().map(drop),
            |c| c.all_gather(vec![1i8]).wait().map(drop),
            "all_gather<i8>",
        ),
        (
            |c| c.all_reduce(vec![1u32; 10]).wait().map(drop),
            |c| c.all_reduce(vec![1u32; 11]).wait().map(drop),
            "all_reduce<u32, sum> of 11 elements",
        ),
        (
            // One route is one exchange, the other two.
            |c| c.all_reduce(vec![1u32; 10]).wait().map(drop),
            |c| c.all_reduce(vec![1u32; 10_000]).wait().map(drop),
            "of 10000 elements",
        ),
        (
            |c| c.all_max(vec![1u32; 10]).wait().map(drop),
            |c| c.all_min(vec![1u32; 10]).wait().map(drop),
            "all_reduce<u32, min>",
        ),
        (
            |c| c.broadcast(vec![1f32], 0).wait().map(drop),
            |c| c.broadcast(vec![1f32], 1).wait().map(drop),
            "broadcast<f32> from its rank 1",
        ),
        (|c| c.barrier().wait(), |c| c.agree("plan", b"x").wait(), "agree"),
        (|c| c.agree("ids", b"x").wait(), |c| c.agree("plan", b"x").wait(), "agree"),
        (
            |c| c.barrier().wait(),
            |c| {
                c.set_step(9);
                c.barrier().wait()
            },
            "barrier #0 in its step 9",
        ),
        (
            |c| c.barrier().wait(),
            |c| {
                drop(c.all_reduce(vec![1f32; 2000]));
                c.barrier().wait()
            },
            "all_reduce<f32, sum>",
        ),
    ];
    for (first, second, text) in pairs {
        for ranks in [2, 4] {
            let errors = soon(ranks, |comm| {
                let post = if comm.rank() == 0 { first } else { second };
                (post(&comm).unwrap_err(), comm.failure())
            });
            let (error, failure) = &errors[0];
            assert!(matches!(error, CommError::Mismatch { rank: 0, .. }), "{error}");
            assert!(error.to_string().contains(text), "{error}");
            assert_eq!(failure.as_ref(), Some(error));
            for (error, failure) in &errors[1..] {
                assert!(failure.is_some(), "{error}");
                let text = error.to_string();
                assert!(text.contains("rank 0"), "{text}");
            }
        }
    }
}

#[test]
fn a_failed_communicator_refuses_and_its_world_stops() {
    let results = soon(3, |comm| {
        let other = comm.duplicate("other").unwrap();
        let first = if comm.rank() == 1 {
            comm.barrier().wait()
        } else {
            comm.all_gather(vec![0u8]).wait().map(drop)
        };
        assert!(first.is_err());
        (message(comm.barrier().wait()), message(other.barrier().wait()), comm.close())
    });
    for (refused, stopped, closed) in results {
        assert!(refused.starts_with("communicator 'world' refuses barrier #"), "{refused}");
        assert!(refused.contains("it failed before: "), "{refused}");
        assert!(stopped.contains("communicator 'other'"), "{stopped}");
        assert!(stopped.contains("failed: rank"), "{stopped}");
        assert!(closed.is_err());
    }
}

#[test]
fn a_rank_that_does_not_come_is_named_when_the_time_is_up() {
    let options = Options { time_limit: Duration::from_millis(300), ..Options::default() };
    let start = Instant::now();
    let results = threads::run(4, &options, |comm| {
        comm.set_step(12);
        let group = comm.split("rows", Some(0), 3 - comm.rank() as u64).unwrap().unwrap();
        let late = [1, 2].contains(&comm.rank());
        if late {
            std::thread::sleep(Duration::from_millis(1500));
        }
        (late, message(group.all_reduce(vec![1.0f32; 5]).wait()))
    })
    .unwrap();
    assert!(start.elapsed() < SOON);
    // The first to see it says who is missing; everybody else repeats it.
    let full = "all_reduce<f32, sum> of 5 elements #0 (step 12, communicator 'rows'): no message \
                from ranks 1, 2 within 0.3 s";
    assert!(results.iter().filter(|(_, m)| m.starts_with(full)).count() >= 1, "{results:#?}");
    for (late, message) in &results {
        assert!(message.contains("no message from ranks 1, 2 within 0.3 s"), "{late}: {message}");
    }
}

#[test]
fn a_rank_that_panics_ends_the_others_at_once_and_is_the_panic_one_sees() {
    let start = Instant::now();
    let options = Options { time_limit: Duration::from_secs(300), ..Options::default() };
    let seen: std::sync::Mutex<Vec<String>> = std::sync::Mutex::new(Vec::new());
    let panic = catch_unwind(AssertUnwindSafe(|| {
        threads::run(3, &options, |comm| {
            let other = comm.duplicate("other").unwrap();
            if comm.rank() == 1 {
                // The others may still be about to leave `duplicate`.
                std::thread::sleep(Duration::from_millis(300));
                panic!("rank 1 has had enough");
            }
            let error = other.all_gather(vec![1u8]).wait().unwrap_err();
            seen.lock().unwrap().push(error.to_string());
            panic!("rank {}: {error}", comm.rank());
        })
    }))
    .unwrap_err();
    assert!(start.elapsed() < SOON);
    assert_eq!(panic.downcast_ref::<&str>(), Some(&"rank 1 has had enough"));
    let seen = seen.into_inner().unwrap();
    assert_eq!(seen.len(), 2);
    for message in seen {
        assert!(message.contains("rank 1") && message.contains("panicked"), "{message}");
    }
}

#[test]
fn a_rank_that_leaves_is_missed_at_once() {
    let results = soon(3, |comm| {
        comm.barrier().wait().unwrap();
        if comm.rank() == 2 {
            return None;
        }
        Some(comm.all_reduce(vec![1u64; 10_000]).wait().unwrap_err())
    });
    let errors: Vec<_> = results.into_iter().flatten().collect();
    assert_eq!(errors.len(), 2);
    for error in &errors {
        assert!(error.to_string().contains("rank 2 is gone: it has left the group"), "{error}");
    }
    assert!(errors.iter().any(|error| matches!(error, CommError::Gone { peer: 2, .. })));
}

#[test]
fn a_rank_that_gives_up_says_why() {
    let messages = soon(3, |comm| {
        let other = comm.duplicate("other").unwrap();
        if comm.rank() == 2 {
            // The others may still be about to leave `duplicate`.
            std::thread::sleep(Duration::from_millis(300));
            comm.give_up("day_3.npy: unexpected end of file");
            comm.give_up("and something else");
        }
        message(other.barrier().wait())
    });
    for message in messages {
        let text = "barrier #0 (step 0, communicator 'other') given up because rank 2 failed: \
                    day_3.npy: unexpected end of file";
        assert_eq!(message, text);
    }
}

#[test]
fn leaving_in_different_order_is_no_failure() {
    // Rank 0 leaves `a` with an operation in flight that rank 1 joins only after `b`.
    soon(2, |comm| {
        let a = comm.duplicate("a").unwrap();
        let b = comm.duplicate("b").unwrap();
        if comm.rank() == 0 {
            drop(a.all_gather(vec![1u8; 10]));
            drop(a);
            b.barrier().wait().unwrap();
        } else {
            b.barrier().wait().unwrap();
            let parts = a.all_gather(vec![2u8; 10]).wait().unwrap();
            assert_eq!(parts.part(0), [1; 10]);
        }
        comm.barrier().wait().unwrap();
    });
}

#[test]
fn arguments_that_do_not_fit_fail_everywhere() {
    type Post = fn(&Communicator) -> Result<()>;
    let cases: [(Post, &str); 6] = [
        (
            |c| c.all_to_all_v(vec![1u8; 3], &[1, 1]).wait().map(drop),
            "all_to_all_v<u8> #0 (communicator 'world'): the counts sum to 2, the buffer has 3",
        ),
        (|c| c.all_to_all_v(vec![1u8; 3], &[3]).wait().map(drop), "1 counts for a group of 2"),
        (
            |c| c.all_to_all_v(vec![1u8; 3], &[usize::MAX, 4]).wait().map(drop),
            "the counts sum to 18446744073709551619, the buffer has 3",
        ),
        (|c| c.reduce_scatter(vec![1u8; 3], &[1, 3]).wait().map(drop), "the counts sum to 4"),
        (|c| c.broadcast(vec![1u8; 3], 2).wait().map(drop), "root 2 of a group of 2"),
        (
            |c| {
                let receive = Receive::new().exactly(vec![1, 1, 1]);
                c.all_gather_with(vec![1u8], receive).wait().map(drop)
            },
            "3 expected counts for a group of 2",
        ),
    ];
    for (post, text) in cases {
        let messages = soon(2, |comm| {
            if comm.rank() == 0 { message(post(&comm)) } else { message(comm.barrier().wait()) }
        });
        assert!(messages[0].contains(text), "{}", messages[0]);
        assert!(messages[1].contains(text), "{}", messages[1]);
    }
    // Alone, too.
    let comm = single(&Options::default());
    let twin = comm.duplicate("twin").unwrap();
    assert!(message(comm.all_to_all_v(vec![1u8], &[0]).wait()).contains("the counts sum to 0"));
    assert!(message(comm.barrier().wait()).contains("refuses barrier #2"));
    assert!(message(twin.barrier().wait()).contains("given up because rank 0 failed"));
}

#[test]
fn counts_other_than_expected_are_refused_before_a_byte_is_copied() {
    let messages = soon(2, |comm| {
        let receive = Receive::new().exactly(vec![2, 2]);
        let send = vec![1.0f32; 2 + comm.rank()];
        message(comm.all_gather_with(send, receive).wait())
    });
    let text = "all_gather<f32> #0 (step 0, communicator 'world'): rank 1 sent 3 elements, 2 \
                expected";
    assert_eq!(messages[0], text);
    let messages = soon(2, |comm| {
        let receive = Receive::new().at_most(10);
        let counts = if comm.rank() == 0 { [0, 11] } else { [10, 10] };
        let send = vec![1u8; counts.iter().sum()];
        comm.all_to_all_v_with(send, &counts, receive).wait().map(drop).map_err(|e| e.to_string())
    });
    assert_eq!(
        messages[1].as_ref().unwrap_err(),
        "all_to_all_v<u8> #0 (step 0, communicator 'world'): rank 0 sent 11 elements, at most 10 \
         expected"
    );
}

#[test]
fn integers_that_overflow_are_an_error() {
    let messages = soon(2, |comm| message(comm.all_reduce(vec![0, u64::MAX / 2 + 1]).wait()));
    assert_eq!(
        messages[0],
        "all_reduce<u64, sum> of 2 elements #0 (step 0, communicator 'world'): a sum leaves u64"
    );
}

#[test]
fn groups_whose_ranks_call_them_by_different_names_are_refused() {
    let messages = soon(3, |comm| {
        let name = if comm.rank() == 2 { "columns" } else { "rows" };
        comm.split(name, Some(0), 0).map(drop).map_err(|error| error.to_string())
    });
    let text = "rank 2 of communicator 'world' have another name of the new group";
    for message in messages {
        assert!(message.as_ref().unwrap_err().starts_with(text), "{message:?}");
    }
}

#[test]
fn a_world_needs_a_rank() {
    let error = threads::world(0, &Options::default()).unwrap_err();
    assert!(error.to_string().contains("at least one rank"), "{error}");
}

#[test]
fn stragglers_and_traffic_show_in_the_metrics() {
    let registry = prometheus::Registry::new();
    let metrics = Arc::new(CommMetrics::new(&registry).unwrap());
    let options = Options { metrics, ..Options::default() };
    threads::run(2, &options, |comm| {
        if comm.rank() == 1 {
            std::thread::sleep(Duration::from_millis(200));
        }
        comm.all_to_all_v(vec![1.0f32; 30], &[10, 20]).wait().unwrap();
        comm.close().unwrap();
    })
    .unwrap();
    let text = prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap();
    let value = |series: &str| -> f64 {
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.unwrap_or_else(|| panic!("{series} is not in\n{text}")).trim().parse().unwrap()
    };
    let bytes = |rank, direction| {
        value(&format!(
            "tessera_comm_bytes_total{{collective=\"all_to_all_v\",direction=\"{direction}\",rank=\
             \"{rank}\"}}"
        ))
    };
    assert_eq!([bytes(0, "send"), bytes(0, "receive")], [80.0, 40.0]);
    assert_eq!([bytes(1, "send"), bytes(1, "receive")], [40.0, 80.0]);
    let wait = |rank, peer| {
        value(&format!(
            "tessera_comm_wait_seconds_total{{communicator=\"world\",peer=\"{peer}\",rank=\
             \"{rank}\"}}"
        ))
    };
    assert!(wait(0, 1) > 0.15, "{text}");
    assert!(wait(1, 0) < wait(0, 1));
    let busy = value(
        "tessera_comm_seconds_total{collective=\"all_to_all_v\",direction=\"receive\",rank=\"0\"}",
    );
    assert!(busy >= wait(0, 1), "{text}");
    assert!(CommMetrics::new(&registry).is_err());
}
