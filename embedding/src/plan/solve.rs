//! The choice of layouts and places.
//!
//! A table has many layouts: finer cuts spread its work better and make more of it. The choice is
//! one number, the largest cost `t` that a piece may have on a rank: every table takes the layout
//! of least work under it. The smallest `t` that the mean of all work stays under is where the
//! ranks could be even if pieces were sand; they are not, so that shares of it are tried too, and
//! the best of all placements goes on to local search.

use std::time::Instant;

use super::describe::describe;
use super::improve::{Ended, improve};
use super::layout::{Layout, Span};
use super::planner::{Budget, Planned};
use super::search::{Order, Placed, Problem, place};
use crate::{EmbeddingError, Result};

/// Largest pieces tried, as shares of the even load.
const PIECE_SHARES: [f64; 5] = [1.0, 0.5, 0.25, 0.125, 0.0625];
/// Pieces are not made smaller than this share of a rank's memory for the sake of memory.
const MEMORY_SHARE_MIN: f64 = 0.25;
/// Prices of memory tried, in even loads of cost for a whole rank's memory.
const MEMORY_PRICES: [f64; 5] = [0.0, 1.0, 10.0, 100.0, 1e6];
/// The tight limit on memory that is tried first: this times the mean.
const MEMORY_EVEN: f64 = 1.05;
/// A looser limit on memory must gain this much.
const MEMORY_WORTH: f64 = 0.999;
/// Max/mean that needs no further work.
const GOOD: f64 = 1.0 + 1e-4;
/// A peak this close to what no plan can be below ends the search.
const ENOUGH: f64 = 1.0005;
/// Halvings of the range of even loads.
const BISECTIONS: usize = 50;

/// What the search itself does not need to know of tables.
pub(super) struct Facts<'a> {
    /// Name, rows and columns.
    pub(super) name: &'a dyn Fn(usize) -> (&'a str, u64, usize),
    /// Bytes of the whole table.
    pub(super) total_bytes: &'a dyn Fn(usize) -> u64,
    /// Bytes of a shard.
    pub(super) bytes: &'a dyn Fn(usize, &super::Shard) -> u64,
    /// Whether its layout was asked for.
    pub(super) forced: &'a dyn Fn(usize) -> bool,
}

/// Chooses layouts and places, improves them, and tells why.
pub(super) fn solve(
    problem: &Problem,
    facts: &Facts<'_>,
    replicas: usize,
    budget: Budget,
) -> Result<Planned> {
    let deadline = Instant::now() + budget.cap;
    for (table, layouts) in problem.layouts.iter().enumerate() {
        let least = layouts.iter().map(|layout| layout.peak_memory).min().unwrap_or(0);
        if least > problem.capacity {
            return Err(no_room(problem, facts, table));
        }
    }
    let (mut placed, mut ended) =
        search(problem, budget, deadline).map_err(|table| no_room(problem, facts, table))?;
    if ended == Ended::Settled {
        ended = improve(&mut placed, budget.steps, GOOD, deadline);
    }
    placed.recount();
    let mut notes = Vec::new();
    match ended {
        Ended::Settled => {}
        Ended::Steps => notes.push(format!("the search used all of its {} steps", budget.steps)),
        Ended::Clock => notes.push(format!(
            "the search was cut off after {:.1} s: another run may plan otherwise, so keep this \
             plan in a file",
            budget.cap.as_secs_f64()
        )),
    }
    describe(&placed, facts, replicas, notes)
}

fn no_room(problem: &Problem, facts: &Facts<'_>, table: usize) -> EmbeddingError {
    let all: u128 =
        (0..problem.layouts.len()).map(|table| u128::from((facts.total_bytes)(table))).sum();
    EmbeddingError::CannotPlace {
        table: (facts.name)(table).0.to_owned(),
        bytes: (facts.total_bytes)(table),
        tables_bytes: all,
        ranks: problem.ranks,
        rank_bytes: problem.capacity,
    }
}

/// The best placement of several choices of layouts.
///
/// Errors: a table for which no choice had room.
fn search(
    problem: &Problem,
    budget: Budget,
    deadline: Instant,
) -> std::result::Result<(Placed<'_>, Ended), usize> {
    let mut lacking = 0;
    // What a search of a whole plan gets; the best one goes on with all steps.
    let steps = (budget.steps / 8).max(1);
    let bound = least_work(problem) / problem.ranks as f64;
    for price in MEMORY_PRICES {
        let mut best: Option<Placed<'_>> = None;
        let mut seen: Vec<Vec<usize>> = Vec::new();
        for share in PIECE_SHARES {
            let choice = choose(problem, share, price);
            if seen.contains(&choice) {
                continue;
            }
            for capacity in capacities(problem, &choice) {
                let orders = [Order::Cost, Order::Share, Order::Memory];
                let placed = orders
                    .into_iter()
                    .map(|order| place(problem, choice.clone(), order, capacity))
                    .reduce(|first, next| first.or(next))
                    .expect("there are orders");
                let mut placed = match placed {
                    Ok(placed) => placed,
                    Err(table) => {
                        lacking = table;
                        continue;
                    }
                };
                let ended = improve(&mut placed, steps, GOOD, deadline);
                let enough = placed.peak() <= bound * ENOUGH;
                let worth = |best: &Placed<'_>| placed.peak() < best.peak() * MEMORY_WORTH;
                if best.as_ref().is_none_or(worth) {
                    best = Some(placed);
                }
                if ended == Ended::Clock || enough {
                    return Ok((best.expect("there is one by now"), ended));
                }
            }
            seen.push(choice);
        }
        if let Some(placed) = best {
            return Ok((placed, Ended::Settled));
        }
    }
    Err(lacking)
}

/// Work of all tables, each cut in the way that makes least of it: no plan's ranks have less.
fn least_work(problem: &Problem) -> f64 {
    let least = |layouts: &Vec<Layout>| {
        layouts.iter().map(|layout| layout.work).fold(f64::INFINITY, f64::min)
    };
    problem.layouts.iter().map(least).sum()
}

/// The layout of each table for pieces of at most `share` of the even load, memory at `price`.
fn choose(problem: &Problem, share: f64, price: f64) -> Vec<usize> {
    let ranks = problem.ranks as f64;
    let least = least_work(problem) / ranks;
    let byte_price = price * least.max(f64::MIN_POSITIVE) / problem.capacity.max(1) as f64;
    // A piece of half a rank's memory may find no rank with so much left.
    let memory_limit = (problem.capacity as f64 * share.max(MEMORY_SHARE_MIN)).max(1.0);
    let pick = |layouts: &Vec<Layout>, limit: f64| {
        // Within the limits by work; beyond them, whichever comes closest.
        let key = |layout: &Layout| {
            let sound = layout.peak_memory <= problem.capacity;
            let memory = if layout.span == Span::All {
                0.0
            } else {
                layout.peak_memory as f64 / memory_limit
            };
            let over = memory.max(layout.peak / limit);
            let within = over <= 1.0;
            let dear = layout.work + byte_price * layout.memory;
            (!sound, !within, if within { dear } else { over }, layout.peak)
        };
        let mut best = 0;
        for i in 1..layouts.len() {
            if key(&layouts[i]) < key(&layouts[best]) {
                best = i;
            }
        }
        best
    };
    let choices = |limit: f64| -> Vec<usize> {
        problem.layouts.iter().map(|layouts| pick(layouts, limit)).collect()
    };
    let mean = |choice: &[usize]| {
        let work = choice.iter().zip(&problem.layouts).map(|(&c, layouts)| layouts[c].work);
        work.sum::<f64>() / ranks
    };
    // The smallest even load that leaves pieces small enough for itself.
    let peaks = problem.layouts.iter().flatten().map(|layout| layout.peak);
    let (mut low, mut high) = (least, peaks.fold(least.max(f64::MIN_POSITIVE), f64::max));
    for _ in 0..BISECTIONS {
        let middle = (low + high) / 2.0;
        if mean(&choices(middle)) <= middle {
            high = middle;
        } else {
            low = middle;
        }
    }
    choices(high * share)
}

/// Memory limits to try: an even one first, as memory left over is worth having.
fn capacities(problem: &Problem, choice: &[usize]) -> Vec<u64> {
    let chosen = || choice.iter().zip(&problem.layouts).map(|(&c, layouts)| &layouts[c]);
    let mean = chosen().map(|layout| layout.memory).sum::<f64>() / problem.ranks as f64;
    let largest = chosen().map(|layout| layout.peak_memory).max().unwrap_or(0);
    let even = ((mean * MEMORY_EVEN) as u64).max(largest);
    if even < problem.capacity { vec![even, problem.capacity] } else { vec![problem.capacity] }
}
