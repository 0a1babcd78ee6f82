//! The conformance suite: what every backend must do, against a sequential oracle.
//!
//! A case runs on every rank of a world at once. Inputs are functions of (seed, rank, place), so
//! each rank computes what all ranks gave, and from that what it must receive.

use std::fmt::Debug;

use half::{bf16, f16};
use tessera_comm::{CommError, Communicator, Ordered, Parts, Pending, Receive, Summable, Wire};

/// A case: its name and what each rank does.
pub type Case = (&'static str, fn(&Communicator, u64));

/// All cases.
pub const CASES: &[Case] = &[
    ("places", places),
    ("all_to_all_v", all_to_all_v),
    ("all_gather", all_gather),
    ("all_reduce", all_reduce),
    ("largest and smallest", extremes),
    ("reduce_scatter", reduce_scatter),
    ("broadcast", broadcast),
    ("barrier and agree", barrier_and_agree),
    ("groups", groups),
    ("communicators in flight", in_flight),
    ("dropped results", dropped),
    ("memory comes back", memory),
    ("random programs", random_programs),
];

/// splitmix64 of some numbers.
fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9E37_79B9_7F4A_7C15, |state, &part| {
        let x = (state ^ part).wrapping_add(0x9E37_79B9_7F4A_7C15);
        let x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    })
}

/// Elements of any bits.
fn noise<T: Wire>(seed: u64, len: usize) -> Vec<T> {
    let mut out = vec![T::zeroed(); len];
    for (i, bytes) in bytemuck::cast_slice_mut::<T, u8>(&mut out).chunks_mut(8).enumerate() {
        bytes.copy_from_slice(&mix(&[seed, i as u64]).to_le_bytes()[..bytes.len()]);
    }
    out
}

/// Numbers whose sum shows its order: of both signs and sizes from 2^-20 to 2^20.
fn terms(seed: u64, len: usize) -> Vec<f64> {
    (0..len as u64)
        .map(|i| {
            let bits = mix(&[seed, i]);
            let size = 2f64.powi((bits % 41) as i32 - 20);
            ((bits >> 20) as f64 / 2f64.powi(43) - 1.0) * size
        })
        .collect()
}

fn assert_same<T: Wire>(found: &[T], expected: &[T], what: &str) {
    let same = bytemuck::cast_slice::<T, u8>(found) == bytemuck::cast_slice::<T, u8>(expected);
    assert!(same, "{what}: {} elements differ from the {} expected", found.len(), expected.len());
}

/// Elements from one rank to another: none, one, few and many, unlike in the two directions.
fn count(seed: u64, from: usize, to: usize) -> usize {
    let bits = mix(&[seed, from as u64, to as u64]);
    match bits % 5 {
        0 => 0,
        1 => 1,
        2 | 3 => (bits >> 8) as usize % 40,
        _ => (bits >> 8) as usize % 3000,
    }
}

/// What rank `from` sends to rank `to`.
fn part<T: Wire>(seed: u64, from: usize, to: usize, len: usize) -> Vec<T> {
    noise(mix(&[seed, from as u64, to as u64, 77]), len)
}

/// Calls a generic function for every type of element.
macro_rules! every_dtype {
    ($function:ident($($arg:expr),*)) => {{
        $function::<u8>($($arg),*);
        $function::<i8>($($arg),*);
        $function::<u16>($($arg),*);
        $function::<i16>($($arg),*);
        $function::<u32>($($arg),*);
        $function::<i32>($($arg),*);
        $function::<u64>($($arg),*);
        $function::<i64>($($arg),*);
        $function::<f16>($($arg),*);
        $function::<bf16>($($arg),*);
        $function::<f32>($($arg),*);
        $function::<f64>($($arg),*);
    }};
}

fn places(comm: &Communicator, _: u64) {
    assert!(comm.rank() < comm.size());
    assert_eq!(comm.world_ranks().len(), comm.size());
    let ranks = comm.all_gather(vec![comm.rank() as u64]).wait().unwrap();
    let expected: Vec<u64> = (0..comm.size() as u64).collect();
    assert_eq!(ranks.data(), expected);
    assert!(ranks.counts().all(|count| count == 1));
}

fn all_to_all_v(comm: &Communicator, seed: u64) {
    fn exchange<T: Wire>(comm: &Communicator, seed: u64, count: impl Fn(usize, usize) -> usize) {
        let (rank, size) = (comm.rank(), comm.size());
        let counts: Vec<usize> = (0..size).map(|to| count(rank, to)).collect();
        let from: Vec<usize> = (0..size).map(|from| count(from, rank)).collect();
        let send = || -> Vec<T> {
            (0..size).flat_map(|to| part::<T>(seed, rank, to, counts[to])).collect()
        };
        let check = |parts: Parts<T>| {
            assert!(parts.counts().eq(from.iter().copied()));
            for (peer, found) in parts.iter().enumerate() {
                let expected = part::<T>(seed, peer, rank, from[peer]);
                assert_same(found, &expected, &format!("{} from {peer}", T::DTYPE));
            }
        };
        check(comm.all_to_all_v(send(), &counts).wait().unwrap());
        let exactly = Receive::new().into(vec![T::zeroed(); 5]).exactly(from.clone());
        check(comm.all_to_all_v_with(send(), &counts, exactly).wait().unwrap());
        let most = from.iter().copied().max().unwrap_or(0);
        let bounded = Receive::new().at_most(most);
        check(comm.all_to_all_v_with(send(), &counts, bounded).wait().unwrap());
    }
    let size = comm.size();
    every_dtype!(exchange(comm, seed, |from, to| count(seed, from, to)));
    exchange::<f32>(comm, seed, |_, _| 0);
    exchange::<u8>(comm, seed, |_, _| 1);
    exchange::<u64>(comm, seed, |_, _| 70_001);
    exchange::<f32>(comm, seed, |from, _| if from == 0 { 0 } else { 13 }); // a rank without data
    exchange::<f32>(comm, seed, |_, to| if to == size - 1 { 1000 } else { 0 }); // all to one
}

fn all_gather(comm: &Communicator, seed: u64) {
    fn gather<T: Wire>(comm: &Communicator, seed: u64, len: impl Fn(usize) -> usize) {
        let send = part::<T>(seed, comm.rank(), 0, len(comm.rank()));
        let lens: Vec<usize> = (0..comm.size()).map(&len).collect();
        let receive = Receive::new().exactly(lens);
        let parts = comm.all_gather_with(send, receive).wait().unwrap();
        for (peer, found) in parts.iter().enumerate() {
            let expected = part::<T>(seed, peer, 0, len(peer));
            assert_same(found, &expected, &format!("{} from {peer}", T::DTYPE));
        }
        assert_eq!(parts.data().len(), (0..comm.size()).map(&len).sum());
    }
    every_dtype!(gather(comm, seed, |rank| count(seed, rank, 0)));
    gather::<f64>(comm, seed, |_| 0);
    gather::<u16>(comm, seed, |rank| rank);
}

/// The lengths at which a reduction's cuts and routes change.
fn lengths<T: Wire>(size: usize) -> Vec<usize> {
    let small = 4096 / size_of::<T>(); // the largest that takes one exchange
    vec![0, 1, size - 1, size, size + 1, small, small + 1, 9001]
}

/// Sums in rank order from the first term, of numbers made by `number`.
fn sums<T: Summable + Debug>(
    comm: &Communicator,
    seed: u64,
    len: usize,
    number: impl Fn(f64) -> T,
    add: impl Fn(T, T) -> T,
) -> (Vec<T>, Vec<T>) {
    let of_rank = |rank: usize| -> Vec<T> {
        terms(mix(&[seed, rank as u64, len as u64]), len).into_iter().map(&number).collect()
    };
    let mut expected = of_rank(0);
    for rank in 1..comm.size() {
        for (sum, term) in expected.iter_mut().zip(of_rank(rank)) {
            *sum = add(*sum, term);
        }
    }
    (of_rank(comm.rank()), expected)
}

fn all_reduce(comm: &Communicator, seed: u64) {
    fn reduce<T: Summable + Debug>(
        comm: &Communicator,
        seed: u64,
        number: impl Fn(f64) -> T + Copy,
        add: impl Fn(T, T) -> T + Copy,
    ) {
        for len in lengths::<T>(comm.size()) {
            let (values, expected) = sums(comm, seed, len, number, add);
            let found = comm.all_reduce(values).wait().unwrap();
            assert_same(&found, &expected, &format!("sum of {len} {}", T::DTYPE));
        }
    }
    reduce(comm, seed, |x| x as f32, |a, b| a + b);
    reduce(comm, seed, |x| x, |a, b| a + b);
    reduce(comm, seed, |x| x.abs() as u64, |a, b| a + b);
    reduce(comm, seed, |x| x as i64, |a, b| a + b);
    reduce(comm, seed, |x| x.abs() as u32, |a, b| a + b);
    reduce(comm, seed, |x| x as i32, |a, b| a + b);
    reduce(comm, seed, |x| (x.abs() as u64 % 5) as u8, |a, b| a + b);
    reduce(comm, seed, |x| (x as i64 % 5) as i8, |a, b| a + b);
    reduce(comm, seed, |x| (x.abs() as u64 % 999) as u16, |a, b| a + b);
    reduce(comm, seed, |x| (x as i64 % 999) as i16, |a, b| a + b);
}

fn extremes(comm: &Communicator, seed: u64) {
    fn both<T: Ordered + Debug>(comm: &Communicator, seed: u64) {
        for len in lengths::<T>(comm.size()) {
            let of_rank = |rank| part::<T>(seed, rank, len, len);
            let all: Vec<Vec<T>> = (0..comm.size()).map(of_rank).collect();
            let best = |pick: fn(T, T) -> T| -> Vec<T> {
                (0..len).map(|i| all.iter().map(|v| v[i]).reduce(pick).unwrap()).collect()
            };
            let high = comm.all_max(all[comm.rank()].clone());
            let low = comm.all_min(all[comm.rank()].clone());
            assert_eq!(low.wait().unwrap(), best(T::min));
            assert_eq!(high.wait().unwrap(), best(T::max));
        }
    }
    both::<u64>(comm, seed);
    both::<i64>(comm, seed);
    both::<i32>(comm, seed);
    both::<u8>(comm, seed);
}

fn reduce_scatter(comm: &Communicator, seed: u64) {
    for shape in 0..3u64 {
        let counts: Vec<usize> = (0..comm.size())
            .map(|to| if shape == 0 { 0 } else { count(mix(&[seed, shape]), 0, to) })
            .collect();
        let start: usize = counts[..comm.rank()].iter().sum();
        let own = start..start + counts[comm.rank()];
        let len = counts.iter().sum();
        let (values, expected) = sums(comm, seed, len, |x| x as f32, |a, b| a + b);
        let found = comm.reduce_scatter(values, &counts).wait().unwrap();
        assert_same(&found, &expected[own.clone()], "part of a sum of f32");
        let (values, expected) = sums(comm, seed, len, |x| x as i64, |a, b| a + b);
        let found = comm.reduce_scatter(values, &counts).wait().unwrap();
        assert_same(&found, &expected[own], "part of a sum of i64");
    }
}

fn broadcast(comm: &Communicator, seed: u64) {
    fn from_root<T: Wire>(comm: &Communicator, seed: u64) {
        for root in 0..comm.size() {
            for len in [0, 1, 1000] {
                let values = if comm.rank() == root {
                    part::<T>(seed, root, len, len)
                } else {
                    vec![T::zeroed(); 3]
                };
                let found = comm.broadcast(values, root).wait().unwrap();
                assert_same(&found, &part::<T>(seed, root, len, len), "broadcast");
            }
        }
    }
    every_dtype!(from_root(comm, seed));
}

fn barrier_and_agree(comm: &Communicator, seed: u64) {
    comm.barrier().wait().unwrap();
    comm.agree("plan", &seed.to_le_bytes()).wait().unwrap();
    comm.agree("list", &[]).wait().unwrap();
    if comm.size() > 1 {
        // All ranks learn who differs, and go on.
        let own = if comm.rank() == comm.size() - 1 { "b" } else { "a" };
        let error = comm.agree("plan", own.as_bytes()).wait().unwrap_err();
        let CommError::Disagreement { what, first, differing, .. } = &error else {
            panic!("{error}")
        };
        assert_eq!((what.as_str(), *first), ("plan", comm.world_ranks()[0]));
        assert_eq!(differing, &comm.world_ranks()[comm.size() - 1..]);
        // Same length, another value: a hash is compared, not a length.
        assert!(comm.agree("plan", &[comm.rank().min(1) as u8]).wait().is_err());
    }
    comm.barrier().wait().unwrap();
}

fn groups(comm: &Communicator, seed: u64) {
    let (rank, size) = (comm.rank(), comm.size());
    comm.set_step(3);
    // Ragged: every third rank in one group, the rest in the other, in reverse order.
    let color = u64::from(rank % 3 == 0);
    let group = comm.split("ragged", Some(color), (size - rank) as u64).unwrap().unwrap();
    let members: Vec<usize> =
        (0..size).rev().filter(|&other| u64::from(other % 3 == 0) == color).collect();
    let world: Vec<usize> = members.iter().map(|&member| comm.world_ranks()[member]).collect();
    assert_eq!(group.world_ranks(), world);
    assert_eq!((group.rank(), group.step()), (members.iter().position(|&m| m == rank).unwrap(), 3));
    for (_, case) in &CASES[1..8] {
        case(&group, mix(&[seed, color]));
    }
    // A group of a group, and ranks in none.
    let pair = group.split("pair", (group.rank() < 2).then_some(9), 0).unwrap();
    assert_eq!(pair.is_some(), group.rank() < 2);
    if let Some(pair) = &pair {
        assert_eq!(pair.size(), group.size().min(2));
        all_reduce(pair, seed);
        pair.barrier().wait().unwrap();
    }
    // Groups of one.
    let own = comm.split("own", Some(rank as u64), 0).unwrap().unwrap();
    assert_eq!((own.size(), own.world_ranks()), (1, &comm.world_ranks()[rank..=rank]));
    all_to_all_v(&own, seed);
    let twin = comm.duplicate("twin").unwrap();
    assert_eq!((twin.rank(), twin.world_ranks()), (rank, comm.world_ranks()));
    all_gather(&twin, seed);
    comm.set_step(0);
    all_gather(comm, seed);
    group.close().unwrap();
    twin.close().unwrap();
}

fn in_flight(comm: &Communicator, seed: u64) {
    let others: Vec<Communicator> =
        (0..3).map(|i| comm.duplicate(&format!("flight-{i}")).unwrap()).collect();
    for round in 0..5u64 {
        type Open<'a> = (usize, Pending<Vec<f32>>, Vec<f32>);
        let mut open: Vec<Open<'_>> = Vec::new();
        // Each rank posts to the communicators in an order of its own, several operations each,
        // and waits in another.
        let mut order: Vec<usize> = (0..others.len()).collect();
        order.sort_by_key(|&i| mix(&[seed, round, comm.rank() as u64, i as u64]));
        for &i in &order {
            for turn in 0..3u64 {
                let seed = mix(&[seed, round, i as u64, turn]);
                let len = [3, 5000, 0][turn as usize];
                let (values, expected) = sums(comm, seed, len, |x| x as f32, |a, b| a + b);
                open.push((i, others[i].all_reduce(values), expected));
            }
        }
        open.reverse();
        let turns = comm.rank() % open.len();
        open.rotate_left(turns);
        for (i, pending, expected) in open {
            assert_same(&pending.wait().unwrap(), &expected, &format!("communicator {i}"));
        }
    }
    for other in others {
        other.close().unwrap();
    }
}

fn dropped(comm: &Communicator, seed: u64) {
    // Nobody waits for these, on some ranks: they take place all the same, in their order.
    for round in 0..20 {
        let (values, expected) = sums(comm, seed, 300, |x| x as i64, |a, b| a + b);
        let pending = comm.all_reduce(values);
        if (round + comm.rank()).is_multiple_of(2) {
            assert_eq!(pending.wait().unwrap(), expected);
        }
    }
    comm.barrier().wait().unwrap();
    // A communicator left right after posting: what was posted still takes place.
    let twin = comm.duplicate("left early").unwrap();
    let pending = twin.all_gather(vec![comm.rank() as u32; 1000]);
    let unwaited = twin.barrier();
    drop(twin);
    let parts = pending.wait().unwrap();
    for (peer, found) in parts.iter().enumerate() {
        assert_eq!(found, vec![peer as u32; 1000]);
    }
    unwaited.wait().unwrap();
}

fn memory(comm: &Communicator, _: u64) {
    // The receiver's memory is used.
    let memory: Vec<f32> = Vec::with_capacity(1000 * comm.size());
    let at = memory.as_ptr();
    let parts = comm
        .all_gather_with(vec![comm.rank() as f32; 1000], Receive::new().into(memory))
        .wait()
        .unwrap();
    if comm.size() > 1 {
        assert_eq!(parts.data().as_ptr(), at);
    }
    comm.recycle(parts.into_data());
    assert!(comm.buffer::<f32>(10).capacity() >= 10);
}

/// Ranks run one random program, over three communicators, waiting when they please.
fn random_programs(comm: &Communicator, seed: u64) {
    let others = [comm.duplicate("random-0").unwrap(), comm.duplicate("random-1").unwrap()];
    let comms = [comm, &others[0], &others[1]];
    let mut open: Vec<Box<dyn FnOnce()>> = Vec::new();
    for place in 0..120u64 {
        let draw = |what: u64| mix(&[seed, place, what]) as usize;
        let on = comms[draw(0) % comms.len()];
        let seed = mix(&[seed, place]);
        let (rank, size) = (comm.rank(), comm.size());
        on.set_step(place / 10);
        let len = [0, 1, 50, 3000, 30_000][draw(1) % 5];
        match draw(2) % 6 {
            0 => {
                let (values, expected) = sums(comm, seed, len, |x| x as f32, |a, b| a + b);
                let pending = on.all_reduce(values);
                open.push(Box::new(move || {
                    assert_same(&pending.wait().unwrap(), &expected, "sum");
                }));
            }
            1 => {
                let counts: Vec<usize> = (0..size).map(|to| count(seed, rank, to)).collect();
                let send =
                    (0..size).flat_map(|to| part::<u32>(seed, rank, to, counts[to])).collect();
                let pending = on.all_to_all_v(send, &counts);
                open.push(Box::new(move || {
                    for (peer, found) in pending.wait().unwrap().iter().enumerate() {
                        let expected = part::<u32>(seed, peer, rank, count(seed, peer, rank));
                        assert_same(found, &expected, "exchange");
                    }
                }));
            }
            2 => {
                let pending = on.all_gather(part::<u8>(seed, rank, 0, count(seed, rank, 1)));
                open.push(Box::new(move || {
                    for (peer, found) in pending.wait().unwrap().iter().enumerate() {
                        let expected = part::<u8>(seed, peer, 0, count(seed, peer, 1));
                        assert_same(found, &expected, "gather");
                    }
                }));
            }
            3 => {
                let root = draw(3) % size;
                let values =
                    if rank == root { part::<f64>(seed, root, 0, len) } else { Vec::new() };
                let pending = on.broadcast(values, root);
                open.push(Box::new(move || {
                    let expected = part::<f64>(seed, root, 0, len);
                    assert_same(&pending.wait().unwrap(), &expected, "broadcast");
                }));
            }
            4 => {
                let pending = on.all_max(vec![mix(&[seed, rank as u64]); len]);
                open.push(Box::new(move || {
                    let best = (0..size as u64).map(|rank| mix(&[seed, rank])).max().unwrap();
                    assert_eq!(pending.wait().unwrap(), vec![best; len]);
                }));
            }
            _ => {
                let pending = on.barrier();
                open.push(Box::new(move || pending.wait().unwrap()));
            }
        }
        // Its own pace: a rank waits for some of what it has open, in any order, or for nothing.
        while open.len() > 12
            || (!open.is_empty() && mix(&[seed, rank as u64, open.len() as u64]).is_multiple_of(3))
        {
            let at = mix(&[seed, rank as u64, 5]) as usize % open.len();
            open.swap_remove(at)();
        }
    }
    open.into_iter().for_each(|wait| wait());
    comm.set_step(0);
}
