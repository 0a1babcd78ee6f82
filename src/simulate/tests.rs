//! Pipelines whose times are known from a pencil.

use super::costs::{ClassCosts, LinkWork};
use super::measure::{Measured, measure};
use super::pipeline::Schedule;
use super::spec::Mode;
use crate::chrome_trace::Event;

fn link(far_ms: f64) -> LinkWork {
    LinkWork { far_ms, ..LinkWork::default() }
}

/// Ahead of the window 1 + 4 + 5 ms; in it 2 + 8 + 2.
fn class() -> ClassCosts {
    ClassCosts {
        rank: 0,
        count: 1,
        read_ms: 1.0,
        ssd_ms: 4.0,
        host_ms: 5.0,
        exchange_out: link(2.0),
        dense_ms: 8.0,
        exchange_back: link(2.0),
        ..ClassCosts::default()
    }
}

fn schedule(mode: Mode, micro_batches: usize) -> Schedule {
    Schedule {
        mode,
        micro_batches,
        depth: 8,
        queue: 1,
        sync_every: None,
        buckets: 4,
        seen_share: 0.25,
        steps: 0,
    }
}

fn run(classes: &[ClassCosts], schedule: Schedule) -> Measured {
    measure(classes, schedule, 8)
}

fn step_ms(class: ClassCosts, schedule: Schedule) -> f64 {
    run(&[class], schedule).report.step_ms
}

#[track_caller]
fn close(x: f64, wanted: f64) {
    assert!((x - wanted).abs() < 1e-6, "{x} instead of {wanted}");
}

fn exposed(measured: &Measured, stage: &str) -> f64 {
    let stages = &measured.report.ranks[0].stages;
    stages.iter().find(|figures| figures.stage == stage).map_or(0.0, |figures| figures.exposed_ms)
}

#[test]
fn serial_is_the_sum_of_everything_and_parts_do_not_change_it() {
    close(step_ms(class(), schedule(Mode::Serial, 1)), 22.0);
    close(step_ms(class(), schedule(Mode::Serial, 4)), 22.0);
    let measured = run(&[class()], schedule(Mode::Serial, 4));
    close(exposed(&measured, "exchange_out") + exposed(&measured, "exchange_back"), 4.0);
    close(exposed(&measured, "host"), 5.0);
}

#[test]
fn prefetch_hides_what_is_ahead_of_the_window() {
    let measured = run(&[class()], schedule(Mode::Prefetch, 1));
    close(measured.report.step_ms, 12.0);
    // What is hidden may still run while the device waits for the exchange.
    close(exposed(&measured, "exchange_out") + exposed(&measured, "exchange_back"), 4.0);
    // Every stage runs once a step, until the last.
    for (stage, ms) in [("read", 1.0), ("ssd", 4.0), ("host", 5.0), ("dense", 8.0)] {
        let stages = &measured.report.ranks[0].stages;
        close(stages.iter().find(|figures| figures.stage == stage).unwrap().busy_ms, ms);
    }
    // The slowest stage sets the pace, wherever it is; two in a row overlap each other.
    close(step_ms(ClassCosts { ssd_ms: 20.0, ..class() }, schedule(Mode::Prefetch, 1)), 20.0);
    close(step_ms(ClassCosts { read_ms: 20.0, ..class() }, schedule(Mode::Prefetch, 1)), 20.0);
    let both = ClassCosts { ssd_ms: 11.0, host_ms: 11.0, ..class() };
    close(step_ms(both, schedule(Mode::Prefetch, 1)), 12.0);
}

#[test]
fn two_buffers_are_filled_in_turn() {
    // The way to the device begins when the window before has swapped buffers: longer than a
    // window, it sets the pace, however deep the queues are.
    let slow = ClassCosts { host_ms: 20.0, ..class() };
    close(step_ms(slow, Schedule { queue: 4, ..schedule(Mode::Prefetch, 1) }), 20.0);
    // Bringing rows into place is no part of that, and never hidden.
    let install = ClassCosts { install_ms: 1.0, shared_ms: 0.5, ..class() };
    close(step_ms(install, schedule(Mode::Prefetch, 1)), 13.5);
    close(step_ms(install, schedule(Mode::Async, 1)), 13.0);
    let slow = ClassCosts { host_ms: 20.0, ..install };
    close(step_ms(slow, schedule(Mode::Prefetch, 1)), 21.5);
}

#[test]
fn nested_exposes_the_first_and_the_last_exchange() {
    for parts in [1, 2, 4, 8] {
        let measured = run(&[class()], schedule(Mode::Nested, parts));
        close(measured.report.step_ms, 8.0 + 4.0 / parts as f64);
        let both = exposed(&measured, "exchange_out") + exposed(&measured, "exchange_back");
        close(both, 4.0 / parts as f64);
    }
    // Links that are slower than the device set the pace: 16 of exchange, and the first and the last
    // part of the computations.
    let slow = ClassCosts { exchange_out: link(8.0), exchange_back: link(8.0), ..class() };
    let step = step_ms(slow, schedule(Mode::Nested, 4));
    assert!((16.0..22.0).contains(&step), "{step}");
    // Latency is paid by every part, and hidden for all but two.
    let far = LinkWork { latency_ms: 0.1, ..link(2.0) };
    let late = ClassCosts { exchange_out: far, exchange_back: far, ..class() };
    close(step_ms(late, schedule(Mode::Prefetch, 1)), 12.2);
    close(step_ms(late, schedule(Mode::Nested, 4)), 9.2);
}

#[test]
fn a_split_exchange_exposes_what_was_seen_before() {
    close(step_ms(class(), schedule(Mode::Split, 1)), 0.25 * 2.0 + 8.0 + 2.0);
    close(step_ms(class(), schedule(Mode::NestedSplit, 4)), (0.25 * 2.0 + 2.0) / 4.0 + 8.0);
    // All rows seen: nothing travels ahead. None seen: nothing is left.
    let all = Schedule { seen_share: 1.0, ..schedule(Mode::Split, 1) };
    close(step_ms(class(), all), 12.0);
    let none = Schedule { seen_share: 0.0, ..schedule(Mode::Split, 1) };
    close(step_ms(class(), none), 10.0);
}

#[test]
fn depth_bounds_how_far_reading_is_ahead() {
    // One batch ahead: reading begins with a window, and all that follows is part of the next.
    let slow = ClassCosts { read_ms: 10.0, ..class() };
    close(step_ms(slow, Schedule { depth: 1, ..schedule(Mode::Prefetch, 1) }), 19.0);
    close(step_ms(slow, Schedule { depth: 2, ..schedule(Mode::Prefetch, 1) }), 12.0);
    let measured = run(&[class()], Schedule { depth: 3, ..schedule(Mode::Prefetch, 1) });
    let mut seen = 0;
    for read in measured.events.iter().filter(|event| event.stage == "read") {
        let begun = |event: &&Event| {
            event.stage == "exchange_out"
                && read.step.is_some_and(|step| event.step == Some(step - 3))
        };
        if let Some(window) = measured.events.iter().find(begun) {
            close(read.start_us, window.start_us);
            seen += 1;
        }
    }
    assert!(seen >= 4, "{seen}");
}

#[test]
fn full_queues_hold_the_stages_before_them_back() {
    // Where depth sets no limit, reading is ahead by one batch in the buffer, one that waits for
    // it, and four stages that each hold one behind a full queue.
    for (queue, ahead) in [(1, 10), (2, 14), (4, 22)] {
        let deep = Schedule { depth: 40, queue, ..schedule(Mode::Prefetch, 1) };
        let fast = ClassCosts { host_ms: 0.5, ssd_ms: 0.5, ..class() };
        let measured = measure(&[fast], deep, 40);
        let last = |stage: &str, before_us: f64| {
            let started = |event: &&Event| event.stage == stage && event.start_us < before_us;
            measured.events.iter().filter(started).filter_map(|event| event.step).max().unwrap()
        };
        // In the middle of a window, when everything ahead waits.
        let dense = measured.events.iter().filter(|event| event.stage == "dense");
        let middle = dense.map(|event| (event.start_us, event.step)).nth(4).unwrap();
        let read = last("read", middle.0 + 5000.0);
        assert_eq!(read - middle.1.unwrap(), ahead, "queue {queue}");
    }
}

#[test]
fn dense_gradients_are_added_up_during_the_backward_pass() {
    // 4 buckets of 1 ms follow pieces of 4/3 ms: three are hidden. The last shares the link with the
    // exchange back: 1 + 2 ms after the end.
    let sums = ClassCosts { all_reduce: link(4.0), ..class() };
    close(step_ms(sums, schedule(Mode::Prefetch, 1)), 13.0);
    // On a link of its own it ends within the 2 ms.
    let near = LinkWork { near_ms: 4.0, ..LinkWork::default() };
    close(step_ms(ClassCosts { all_reduce: near, ..class() }, schedule(Mode::Prefetch, 1)), 12.0);
}

#[test]
fn replicas_are_averaged_every_k_steps() {
    let synced = ClassCosts { sync: link(3.0), ..class() };
    let every = |k| Schedule { sync_every: Some(k), ..schedule(Mode::Prefetch, 1) };
    close(step_ms(synced, every(1)), 15.0);
    close(step_ms(synced, every(2)), 13.5);
    close(step_ms(synced, every(7)), 12.0 + 3.0 / 7.0);
    close(step_ms(synced, schedule(Mode::Prefetch, 1)), 12.0);
}

#[test]
fn all_wait_for_the_hottest_rank() {
    let hot = ClassCosts { count: 1, ..class().hotter(2.0) };
    let rest = ClassCosts { rank: 1, count: 63, ..class() };
    let measured = run(&[hot, rest], schedule(Mode::Prefetch, 1));
    close(measured.report.step_ms, 4.0 + 8.0 + 4.0);
    let rank = measured.report.rank(1).unwrap();
    let out = rank.stages.iter().find(|stage| stage.stage == "exchange_out").unwrap();
    // It sends for 2 ms and then waits.
    close(out.exposed_ms, 2.0);
}

#[test]
fn a_class_stands_for_all_its_ranks() {
    // 40 ranks, two of them hot and one with a slow disk, one by one and as classes.
    let mut hot = ClassCosts { count: 2, ..class().hotter(1.3) };
    let mut slow = ClassCosts { rank: 2, count: 1, ssd_ms: 14.0, ..class() };
    let mut rest = ClassCosts { rank: 3, count: 37, ..class() };
    for mode in Mode::ALL.map(|(_, mode)| mode) {
        let schedule = Schedule { sync_every: Some(2), ..schedule(mode, 3) };
        for part in [&mut hot, &mut slow, &mut rest] {
            part.sync = link(1.0);
            part.all_reduce = link(0.5);
            part.keys = LinkWork { near_ms: 0.3, far_ms: 0.2, latency_ms: 0.1 };
        }
        let classes = run(&[hot, slow, rest], schedule).report.step_ms;
        let mut ranks = Vec::new();
        for part in [hot, slow, rest] {
            ranks.extend((0..part.count).map(|i| ClassCosts {
                rank: part.rank + i,
                count: 1,
                ..part
            }));
        }
        let all = run(&ranks, schedule);
        assert_eq!(all.report.step_ms, classes, "{}", mode.name());
        assert_eq!(all.report.ranks.len(), 40);
        // Again: the same events to the last bit.
        assert_eq!(run(&ranks, schedule).events, all.events);
    }
}

#[test]
fn the_critical_path_is_as_long_as_the_step() {
    for mode in Mode::ALL.map(|(_, mode)| mode) {
        for parts in [1, 4] {
            let class = ClassCosts { install_ms: 0.5, update_ms: 0.7, ssd_ms: 6.0, ..class() };
            let measured = run(&[class], schedule(mode, parts));
            let sum = |path: &[crate::chrome_trace::PathPart]| {
                path.iter().map(|part| part.ms).sum::<f64>()
            };
            close(sum(&measured.critical_path), measured.report.step_ms);
            // The estimate from the trace alone is as long, and led by the same stage.
            close(sum(&measured.report.critical_path), measured.report.step_ms);
            let first = |path: &[crate::chrome_trace::PathPart]| path[0].stage.clone();
            assert_eq!(first(&measured.critical_path), "dense");
            assert_eq!(first(&measured.report.critical_path), "dense", "{} {parts}", mode.name());
        }
    }
}

#[test]
fn a_step_without_work_takes_no_time() {
    let nothing = ClassCosts { rank: 0, count: 4, ..ClassCosts::default() };
    for mode in Mode::ALL.map(|(_, mode)| mode) {
        assert_eq!(step_ms(nothing, schedule(mode, 2)), 0.0);
    }
}

/// Serial training at 1,536 accelerators with the published figures' constants, by hand: the
/// simulator does not fit anything itself.
#[test]
fn the_published_run_is_the_sum_that_its_constants_say() {
    let (exchange, lookup) = (150.0 + 0.674 * 1536.0, 423.0 + 1.594 * 1536.0);
    let class = ClassCosts {
        rank: 0,
        count: 1536,
        ssd_ms: lookup / 2.0,
        host_ms: lookup / 2.0,
        exchange_out: link(exchange / 2.0),
        dense_ms: 1713.0,
        exchange_back: link(exchange / 2.0),
        ..ClassCosts::default()
    };
    close(step_ms(class, schedule(Mode::Serial, 1)), 1713.0 + exchange + lookup);
    close(step_ms(class, schedule(Mode::Nested, 8)), 1713.0 + exchange / 8.0);
}
