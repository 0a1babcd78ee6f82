//! Pieces on ranks: what each rank carries, and the first placement.

use std::cmp::Ordering;
use std::ops::Range;

use super::cost::Load;
use super::layout::{Layout, Piece, Span};

/// What is to be placed where.
pub(super) struct Problem {
    pub(super) ranks: usize,
    pub(super) per_node: usize,
    /// Memory of a rank.
    pub(super) capacity: u64,
    /// The ways to cut each table.
    pub(super) layouts: Vec<Vec<Layout>>,
}

/// Which pieces come first when there is a choice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Order {
    /// The costliest.
    Cost,
    /// The largest share of a rank's cost or memory.
    Share,
    /// The largest.
    Memory,
}

/// A piece on a rank of its own.
#[derive(Clone, Copy, Debug)]
pub(super) struct Held {
    pub(super) cost: f64,
    pub(super) memory: u64,
    pub(super) table: usize,
    pub(super) piece: usize,
}

impl Held {
    fn order(&self, other: &Self) -> Ordering {
        self.cost
            .total_cmp(&other.cost)
            .then((self.table, self.piece).cmp(&(other.table, other.piece)))
    }
}

/// Pieces on places.
#[derive(Clone)]
pub(super) struct Placed<'p> {
    pub(super) problem: &'p Problem,
    /// Memory that a rank may hold: the problem's, or less for the sake of evenness.
    pub(super) capacity: u64,
    /// The layout of each table.
    pub(super) choice: Vec<usize>,
    /// The place of each of its pieces: a rank, a node, or 0 for all ranks.
    pub(super) at: Vec<Vec<usize>>,
    /// Of each rank, without `floor`.
    pub(super) cost: Vec<f64>,
    pub(super) memory: Vec<u64>,
    /// What every rank carries besides.
    pub(super) floor: Load,
    /// Pieces of one rank, cheapest first.
    pub(super) held: Vec<Vec<Held>>,
    /// Pieces of one node.
    pub(super) node_held: Vec<Vec<(usize, usize)>>,
}

/// The place of a piece that has none.
const NOWHERE: usize = usize::MAX;

impl<'p> Placed<'p> {
    fn empty(problem: &'p Problem, choice: Vec<usize>, capacity: u64) -> Self {
        let layout = |(table, &choice): (usize, &usize)| &problem.layouts[table][choice];
        let mut floor = Load::default();
        let mut at = Vec::with_capacity(choice.len());
        for layout in choice.iter().enumerate().map(layout) {
            floor.cost += layout.everywhere.cost;
            floor.memory = floor.memory.saturating_add(layout.everywhere.memory);
            at.push(vec![NOWHERE; layout.pieces.len()]);
        }
        Self {
            problem,
            capacity,
            choice,
            at,
            cost: vec![0.0; problem.ranks],
            memory: vec![0; problem.ranks],
            floor,
            held: vec![Vec::new(); problem.ranks],
            node_held: vec![Vec::new(); problem.ranks / problem.per_node],
        }
    }

    pub(super) fn layout(&self, table: usize) -> &'p Layout {
        &self.problem.layouts[table][self.choice[table]]
    }

    pub(super) fn piece(&self, table: usize, piece: usize) -> &'p Piece {
        &self.layout(table).pieces[piece]
    }

    /// The ranks of a place.
    pub(super) fn members(&self, span: Span, place: usize) -> Range<usize> {
        let per_node = self.problem.per_node;
        match span {
            Span::Rank => place..place + 1,
            Span::Node => place * per_node..(place + 1) * per_node,
            Span::All => 0..self.problem.ranks,
        }
    }

    pub(super) fn places(&self, span: Span) -> usize {
        match span {
            Span::Rank => self.problem.ranks,
            Span::Node => self.node_held.len(),
            Span::All => 1,
        }
    }

    /// Memory that a rank may hold besides `floor`.
    pub(super) fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.floor.memory)
    }

    /// Whether the piece may go there: each rank holds one part of a table, within its memory.
    pub(super) fn fits(&self, table: usize, piece: usize, place: usize) -> bool {
        let room = self.room();
        let span = self.layout(table).span;
        let loads = &self.piece(table, piece).loads;
        !self.at[table].contains(&place)
            && self.members(span, place).zip(loads).all(|(rank, load)| {
                self.memory[rank].checked_add(load.memory).is_some_and(|sum| sum <= room)
            })
    }

    pub(super) fn put(&mut self, table: usize, piece: usize, place: usize) {
        let span = self.layout(table).span;
        let loads = &self.piece(table, piece).loads;
        for (rank, load) in self.members(span, place).zip(loads) {
            self.cost[rank] += load.cost;
            self.memory[rank] += load.memory;
        }
        self.at[table][piece] = place;
        match span {
            Span::Rank => {
                let held = Held { cost: loads[0].cost, memory: loads[0].memory, table, piece };
                let list = &mut self.held[place];
                let i = list.partition_point(|other| other.order(&held).is_lt());
                list.insert(i, held);
            }
            Span::Node => self.node_held[place].push((table, piece)),
            Span::All => {}
        }
    }

    pub(super) fn take(&mut self, table: usize, piece: usize) {
        let span = self.layout(table).span;
        let place = std::mem::replace(&mut self.at[table][piece], NOWHERE);
        let loads = &self.piece(table, piece).loads;
        for (rank, load) in self.members(span, place).zip(loads) {
            self.cost[rank] -= load.cost;
            self.memory[rank] -= load.memory;
        }
        match span {
            Span::Rank => {
                self.held[place].retain(|held| (held.table, held.piece) != (table, piece))
            }
            Span::Node => self.node_held[place].retain(|&held| held != (table, piece)),
            Span::All => {}
        }
    }

    /// The place where the piece leaves the lowest peak; `None` when it fits nowhere.
    pub(super) fn best_place(&self, table: usize, piece: usize) -> Option<usize> {
        let span = self.layout(table).span;
        let loads = &self.piece(table, piece).loads;
        let mut best: Option<(f64, u64, usize)> = None;
        for place in 0..self.places(span) {
            let mut peak = (0.0f64, 0);
            for (rank, load) in self.members(span, place).zip(loads) {
                peak.0 = peak.0.max(self.cost[rank] + load.cost);
                peak.1 = peak.1.max(self.memory[rank]);
            }
            if best.is_none_or(|best| peak < (best.0, best.1)) && self.fits(table, piece, place) {
                best = Some((peak.0, peak.1, place));
            }
        }
        best.map(|best| best.2)
    }

    /// Gives `table` another layout, none of whose pieces has a place yet.
    pub(super) fn relayout(&mut self, table: usize, choice: usize) {
        for piece in 0..self.at[table].len() {
            if self.at[table][piece] != NOWHERE {
                self.take(table, piece);
            }
        }
        let old = self.layout(table).everywhere;
        self.choice[table] = choice;
        let new = self.layout(table);
        self.floor.cost += new.everywhere.cost - old.cost;
        self.floor.memory = self.floor.memory - old.memory + new.everywhere.memory;
        self.at[table] = vec![NOWHERE; new.pieces.len()];
    }

    /// Places the pieces of one table, costliest first; `false` when some do not fit.
    pub(super) fn put_table(&mut self, table: usize) -> bool {
        let mut pieces: Vec<usize> = (0..self.at[table].len()).collect();
        let layout = self.layout(table);
        pieces.sort_by(|&a, &b| layout.pieces[b].cost().total_cmp(&layout.pieces[a].cost()));
        pieces.into_iter().all(|piece| {
            self.best_place(table, piece).map(|place| self.put(table, piece, place)).is_some()
        })
    }

    /// The rank that carries most of those for which `of` holds, and its cost without `floor`.
    pub(super) fn hottest_where(&self, of: impl Fn(usize) -> bool) -> Option<(usize, f64)> {
        let mut best: Option<(usize, f64)> = None;
        for (rank, &cost) in self.cost.iter().enumerate().filter(|&(rank, _)| of(rank)) {
            if best.is_none_or(|best| cost > best.1) {
                best = Some((rank, cost));
            }
        }
        best
    }

    /// Largest cost of a rank.
    pub(super) fn peak(&self) -> f64 {
        self.cost.iter().copied().fold(0.0, f64::max) + self.floor.cost
    }

    pub(super) fn mean(&self) -> f64 {
        self.cost.iter().sum::<f64>() / self.cost.len() as f64 + self.floor.cost
    }

    /// Adds the costs up afresh: sums and differences of many steps leave a little behind.
    pub(super) fn recount(&mut self) {
        self.cost.fill(0.0);
        for table in 0..self.at.len() {
            let layout = self.layout(table);
            for (piece, &place) in layout.pieces.iter().zip(&self.at[table]) {
                let members = match layout.span {
                    Span::Rank => place..place + 1,
                    Span::Node => {
                        place * self.problem.per_node..(place + 1) * self.problem.per_node
                    }
                    Span::All => 0..self.problem.ranks,
                };
                for (rank, load) in members.zip(&piece.loads) {
                    self.cost[rank] += load.cost;
                }
            }
        }
    }
}

/// Places the chosen layouts, widest spans first, then in the order asked for.
///
/// Errors: the table of the first piece that fits nowhere.
pub(super) fn place<'p>(
    problem: &'p Problem,
    choice: Vec<usize>,
    order: Order,
    capacity: u64,
) -> std::result::Result<Placed<'p>, usize> {
    let mut placed = Placed::empty(problem, choice, capacity);
    let mut pieces = Vec::new();
    let mean = (0..placed.at.len()).map(|table| placed.layout(table).work).sum::<f64>()
        / problem.ranks as f64;
    for table in 0..placed.at.len() {
        let layout = placed.layout(table);
        let width = match layout.span {
            Span::All => 0,
            Span::Node => 1,
            Span::Rank => 2,
        };
        for (number, piece) in layout.pieces.iter().enumerate() {
            let memory = piece.memory() as f64 / capacity.max(1) as f64;
            let key = match order {
                Order::Cost => piece.cost(),
                Order::Memory => memory,
                Order::Share => memory.max(piece.cost() / mean.max(f64::MIN_POSITIVE)),
            };
            pieces.push((width, key, table, number));
        }
    }
    pieces.sort_by(|a, b| {
        (a.0.cmp(&b.0)).then(b.1.total_cmp(&a.1)).then((a.2, a.3).cmp(&(b.2, b.3)))
    });
    if placed.floor.memory > capacity {
        // The tables' buffers alone: the one with most of them is named.
        let most = (0..placed.at.len()).max_by_key(|&table| placed.layout(table).everywhere.memory);
        return Err(most.unwrap_or(0));
    }
    for (_, _, table, piece) in pieces {
        let Some(place) = placed.best_place(table, piece) else { return Err(table) };
        placed.put(table, piece, place);
    }
    Ok(placed)
}
