//! Local search: lowers the hottest rank until nothing does.
//!
//! ```text
//! while steps are left:
//!     r = the hottest rank
//!     move a piece of r away, or swap one for a cheaper piece of another rank, whichever gains most
//!     else the same with the pieces of r's node
//!     else cut a table on r in another way, and place it afresh
//!     else leave r as it is, and go on with the next: moves and swaps only
//! ```
//! Every step leaves each rank that it touches below what the hottest carried before, so that no
//! state comes twice.

use std::time::Instant;

use super::layout::Span;
use super::search::{Held, Placed};

/// Gains below this share of the hottest rank's cost are not worth a step.
const GAIN_MIN: f64 = 1e-7;
/// Tables of the hottest rank that are cut in other ways, costliest first.
const TABLES_TRIED: usize = 12;
/// Neighbours in cost looked at when the best partner of a swap does not fit.
const PARTNERS_TRIED: usize = 4;
/// Steps between looks at the clock.
const STEPS_A_LOOK: usize = 16;

/// Why the search ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// Nothing lowers the hottest rank, or it is as good as the mean.
    Settled,
    /// The steps are used up.
    Steps,
    /// The clock ran out: another run of the same search may end elsewhere.
    Clock,
}

/// Runs at most `steps` steps, until `deadline`; stops when max/mean is at most `good`.
pub(super) fn improve(
    placed: &mut Placed<'_>,
    steps: usize,
    good: f64,
    deadline: Instant,
) -> Ended {
    // Ranks that nothing lowers. They set the peak; evenness of the others is still worth having
    // (rows may be cut after it), but not more work for them.
    let mut done = vec![false; placed.problem.ranks];
    let mut none_done = true;
    for step in 0..steps {
        if step % STEPS_A_LOOK == 0 && Instant::now() >= deadline {
            return Ended::Clock;
        }
        let Some((hottest, cost)) = placed.hottest_where(|rank| !done[rank]) else {
            return Ended::Settled;
        };
        if cost + placed.floor.cost <= placed.mean() * good {
            return Ended::Settled;
        }
        let gain_min = cost * GAIN_MIN;
        let lowered = exchange(placed, hottest, gain_min)
            || exchange_node(placed, hottest, gain_min)
            || (none_done && recut(placed, hottest, gain_min));
        if !lowered {
            done[hottest] = true;
            none_done = false;
        }
    }
    Ended::Steps
}

/// Moves or swaps the piece of `hot` that lowers the higher of two ranks most.
fn exchange(placed: &mut Placed<'_>, hot: usize, gain_min: f64) -> bool {
    let mut ranks: Vec<usize> = (0..placed.problem.ranks).filter(|&rank| rank != hot).collect();
    ranks.sort_by(|&a, &b| placed.cost[a].total_cmp(&placed.cost[b]).then(a.cmp(&b)));
    let mut best: Option<(f64, Held, usize, Option<Held>)> = None;
    for cold in ranks {
        let gap = placed.cost[hot] - placed.cost[cold];
        let needed = best.map_or(gain_min, |best| best.0);
        // Moving half the gap is the best there is, and gaps get smaller from here on.
        if gap / 2.0 <= needed {
            break;
        }
        for &piece in &placed.held[hot] {
            if placed.at[piece.table].contains(&cold) {
                continue;
            }
            // Moving `d` from hot to cold gains the lesser of d and gap - d.
            let mut consider = |other: Option<Held>| {
                let moved = piece.cost - other.map_or(0.0, |other| other.cost);
                let gain = moved.min(gap - moved);
                let better = gain > best.map_or(gain_min, |best| best.0);
                let fits = better && swap_fits(placed, hot, cold, piece, other);
                if fits {
                    best = Some((gain, piece, cold, other));
                }
                fits
            };
            consider(None);
            let others = &placed.held[cold];
            let wanted = piece.cost - gap / 2.0;
            let middle = others.partition_point(|other| other.cost < wanted);
            // The nearest partner below and the nearest above, or the next that fit.
            let _ =
                others[middle..].iter().take(PARTNERS_TRIED).any(|&other| consider(Some(other)));
            let _ = others[..middle]
                .iter()
                .rev()
                .take(PARTNERS_TRIED)
                .any(|&other| consider(Some(other)));
        }
    }
    let Some((_, piece, cold, other)) = best else { return false };
    placed.take(piece.table, piece.piece);
    if let Some(other) = other {
        placed.take(other.table, other.piece);
        placed.put(other.table, other.piece, hot);
    }
    placed.put(piece.table, piece.piece, cold);
    true
}

fn swap_fits(
    placed: &Placed<'_>,
    hot: usize,
    cold: usize,
    piece: Held,
    other: Option<Held>,
) -> bool {
    let room = placed.room();
    let back = other.map_or(0, |other| other.memory);
    // A table has one shard a rank, so that a piece may not meet another of its table.
    let met = other.is_some_and(|other| placed.at[other.table].contains(&hot));
    !met && placed.memory[cold] - back + piece.memory <= room
        && placed.memory[hot] - piece.memory + back <= room
}

/// Moves or swaps a piece of the node of `hot`, if every rank touched ends below what `hot` has.
fn exchange_node(placed: &mut Placed<'_>, hot: usize, gain_min: f64) -> bool {
    let node = hot / placed.problem.per_node;
    let old = placed.cost[hot];
    // Gain, piece, node that it goes to, piece that comes back.
    type Exchange = (f64, (usize, usize), usize, Option<(usize, usize)>);
    let mut best: Option<Exchange> = None;
    for (table, piece) in placed.node_held[node].clone() {
        placed.take(table, piece);
        for other_node in (0..placed.node_held.len()).filter(|&other| other != node) {
            if placed.at[table].contains(&other_node) {
                continue;
            }
            let others = placed.node_held[other_node].clone();
            for other in std::iter::once(None).chain(others.into_iter().map(Some)) {
                if let Some((table, piece)) = other {
                    placed.take(table, piece);
                }
                let sound = placed.fits(table, piece, other_node)
                    && other.is_none_or(|(table, piece)| placed.fits(table, piece, node));
                if sound {
                    placed.put(table, piece, other_node);
                    if let Some((table, piece)) = other {
                        placed.put(table, piece, node);
                    }
                    let peak = [node, other_node]
                        .into_iter()
                        .flat_map(|node| placed.members(Span::Node, node))
                        .map(|rank| placed.cost[rank])
                        .fold(0.0, f64::max);
                    let gain = old - peak;
                    if gain > best.map_or(gain_min, |best| best.0) {
                        best = Some((gain, (table, piece), other_node, other));
                    }
                    placed.take(table, piece);
                    if let Some((table, piece)) = other {
                        placed.take(table, piece);
                    }
                }
                if let Some((table, piece)) = other {
                    placed.put(table, piece, other_node);
                }
            }
        }
        placed.put(table, piece, node);
    }
    let Some((_, (table, piece), other_node, other)) = best else { return false };
    placed.take(table, piece);
    if let Some((table, piece)) = other {
        placed.take(table, piece);
        placed.put(table, piece, node);
    }
    placed.put(table, piece, other_node);
    true
}

/// Cuts a table that burdens `hot` in the way that lowers the peak most, others staying in place.
fn recut(placed: &mut Placed<'_>, hot: usize, gain_min: f64) -> bool {
    let old = placed.peak();
    let mut tables = burdens(placed, hot);
    tables.truncate(TABLES_TRIED);
    let mut best: Option<(f64, Placed<'_>)> = None;
    for table in tables {
        let chosen = placed.choice[table];
        for choice in (0..placed.problem.layouts[table].len()).filter(|&c| c != chosen) {
            let mut trial = placed.clone();
            trial.relayout(table, choice);
            if trial.floor.memory > trial.capacity || !trial.put_table(table) {
                continue;
            }
            // Ranks that carried as much as the hottest before and are untouched still do: what
            // counts is that this one got better and none became as bad.
            let touched = trial
                .hottest_where(|rank| rank == hot || trial.cost[rank] != placed.cost[rank])
                .map_or(0.0, |hottest| hottest.1 + trial.floor.cost);
            let gain = old - touched;
            let floor_kept =
                trial.floor.cost <= placed.floor.cost + gain_min || trial.peak() < old - gain_min;
            if floor_kept && gain > best.as_ref().map_or(gain_min, |best| best.0) {
                best = Some((gain, trial));
            }
        }
    }
    let Some((_, trial)) = best else { return false };
    let Placed { choice, at, cost, memory, floor, held, node_held, .. } = trial;
    (placed.choice, placed.at, placed.cost, placed.memory) = (choice, at, cost, memory);
    (placed.floor, placed.held, placed.node_held) = (floor, held, node_held);
    true
}

/// Tables with a part on `rank`, costliest part first.
fn burdens(placed: &Placed<'_>, rank: usize) -> Vec<usize> {
    let node = rank / placed.problem.per_node;
    let mut parts: Vec<(f64, usize)> =
        placed.held[rank].iter().map(|held| (held.cost, held.table)).collect();
    let on_node = |&(table, piece): &(usize, usize)| {
        let load = placed.piece(table, piece).loads[rank - node * placed.problem.per_node];
        (load.cost, table)
    };
    parts.extend(placed.node_held[node].iter().map(on_node));
    for table in 0..placed.at.len() {
        if placed.layout(table).span == Span::All {
            parts.push((placed.piece(table, 0).loads[rank].cost, table));
        }
    }
    parts.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    parts.into_iter().map(|part| part.1).collect()
}
