//! The ways to cut one table, each shard with its cost and memory.

use std::ops::Range;

use super::cost::{Load, Model, Way};
use super::load::{TableLoad, Workload};
use super::{COLUMN_BLOCK, Route, Shard, Sharding};

/// Where a piece may go: any rank, any node (with a part for each of its ranks), or all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Span {
    Rank,
    Node,
    All,
}

/// What is placed as one: a block of columns, cut by rows over the ranks that it spans.
#[derive(Clone, Debug)]
pub(super) struct Piece {
    pub(super) columns: Range<usize>,
    pub(super) rows: Vec<Range<u64>>,
    /// Load of each of those ranks.
    pub(super) loads: Vec<Load>,
}

impl Piece {
    pub(super) fn cost(&self) -> f64 {
        self.loads.iter().map(|load| load.cost).fold(0.0, f64::max)
    }

    pub(super) fn memory(&self) -> u64 {
        self.loads.iter().map(|load| load.memory).max().unwrap_or(0)
    }
}

/// One way to cut a table.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    pub(super) sharding: Sharding,
    pub(super) route: Route,
    pub(super) span: Span,
    pub(super) pieces: Vec<Piece>,
    /// What it costs every rank, wherever its pieces are.
    pub(super) everywhere: Load,
    /// Cost and memory over all ranks.
    pub(super) work: f64,
    pub(super) memory: f64,
    /// Largest cost and memory on a rank, `everywhere` included.
    pub(super) peak: f64,
    pub(super) peak_memory: u64,
}

impl Layout {
    pub(super) fn new(
        sharding: Sharding,
        route: Route,
        pieces: Vec<Piece>,
        everywhere: Load,
        ranks: usize,
    ) -> Self {
        let span = match sharding {
            Sharding::TableWise | Sharding::ColumnWise => Span::Rank,
            Sharding::TableRowWise | Sharding::Grid => Span::Node,
            Sharding::DataParallel | Sharding::RowWise => Span::All,
        };
        let loads = || pieces.iter().flat_map(|piece| &piece.loads);
        let ranks = ranks as f64;
        Self {
            sharding,
            route,
            span,
            everywhere,
            work: loads().map(|load| load.cost).sum::<f64>() + everywhere.cost * ranks,
            memory: loads().map(|load| load.memory as f64).sum::<f64>()
                + everywhere.memory as f64 * ranks,
            peak: pieces.iter().map(Piece::cost).fold(0.0, f64::max) + everywhere.cost,
            peak_memory: pieces
                .iter()
                .map(Piece::memory)
                .max()
                .unwrap_or(0)
                .saturating_add(everywhere.memory),
            pieces,
        }
    }

    /// The shards when its pieces are on these places (ranks, nodes, or 0 for all).
    pub(super) fn shards(&self, places: &[usize], per_node: usize) -> Vec<Shard> {
        let mut shards = Vec::new();
        for (piece, &place) in self.pieces.iter().zip(places) {
            let first = match self.span {
                Span::Rank => place,
                Span::Node => place * per_node,
                Span::All => 0,
            };
            shards.extend(piece.rows.iter().zip(first..).map(|(rows, rank)| Shard {
                rank,
                rows: rows.clone(),
                columns: piece.columns.clone(),
            }));
        }
        shards
    }

    /// How it is told of: `column_wise in 4`.
    pub(super) fn words(&self) -> String {
        match self.sharding {
            Sharding::ColumnWise | Sharding::Grid => {
                format!("{} in {} ({})", self.sharding, self.pieces.len(), self.route)
            }
            Sharding::DataParallel => self.sharding.to_string(),
            _ => format!("{} ({})", self.sharding, self.route),
        }
    }
}

/// `rows` in `parts` blocks of equal size, the last ones smaller or empty: 6 in 4 is 2, 2, 2, 0.
#[must_use]
pub fn row_cuts(rows: u64, parts: usize) -> Vec<Range<u64>> {
    let block = rows.div_ceil(parts.max(1) as u64);
    let at = |i: usize| block.saturating_mul(i as u64).min(rows);
    (0..parts).map(|i| at(i)..at(i + 1)).collect()
}

/// `dim` columns in at most `parts` blocks, cut at multiples of [`COLUMN_BLOCK`], as equal as that
/// allows, wider ones first.
#[must_use]
pub fn column_cuts(dim: usize, parts: usize) -> Vec<Range<usize>> {
    let blocks = dim.div_ceil(COLUMN_BLOCK);
    let parts = parts.clamp(1, blocks.max(1));
    let (wide, extra) = (blocks / parts, blocks % parts);
    let at = |i: usize| ((i * wide + i.min(extra)) * COLUMN_BLOCK).min(dim);
    (0..parts).map(|i| at(i)..at(i + 1)).collect()
}

/// Numbers of parts worth a look for `dim` columns on `most` places: one for each widest part.
pub(super) fn column_parts(dim: usize, most: usize) -> impl Iterator<Item = usize> {
    let blocks = dim.div_ceil(COLUMN_BLOCK);
    let mut last = 0;
    (1..=blocks.min(most)).filter(move |&parts| {
        let widest = blocks.div_ceil(parts);
        std::mem::replace(&mut last, widest) != widest
    })
}

/// Every way to cut `table` that its constraint and the workload allow; never none.
pub(super) fn layouts(
    table: &TableLoad,
    model: &Model<'_>,
    workload: &Workload,
    ranks: usize,
    per_node: usize,
) -> Vec<Layout> {
    let nodes = ranks / per_node;
    let asked = |sharding| table.sharding.is_none_or(|wanted| wanted == sharding);
    let forced = table.sharding.is_some();
    let mut found = Vec::new();
    for route in [Route::Pooled, Route::Unique] {
        if workload.route.is_some_and(|wanted| wanted != route) {
            continue;
        }
        let source = model.source(table, route);
        let piece = |columns: &Range<usize>, rows: Vec<Range<u64>>, way| Piece {
            loads: rows
                .iter()
                .map(|rows| model.owner(table, route, way, &Model::part(table, rows, columns)))
                .collect(),
            columns: columns.clone(),
            rows,
        };
        let whole = |columns: &Range<usize>| {
            piece(columns, std::iter::once(0..table.rows).collect(), Way::Flat)
        };
        let node = |columns: &Range<usize>, rows: &[Range<u64>]| {
            // Unique rows are pooled where they are needed: there is nothing to sum on the way.
            piece(
                columns,
                rows.to_vec(),
                if route == Route::Pooled { Way::Node } else { Way::Flat },
            )
        };
        let all = 0..table.dim;
        let mut add = |sharding, pieces| {
            found.push(Layout::new(sharding, route, pieces, source, ranks));
        };
        if asked(Sharding::TableWise) {
            add(Sharding::TableWise, vec![whole(&all)]);
        }
        if asked(Sharding::ColumnWise) {
            for parts in splits(table, ranks, forced) {
                let cuts = column_cuts(table.dim, parts);
                add(Sharding::ColumnWise, cuts.iter().map(whole).collect());
            }
        }
        if asked(Sharding::RowWise) && (forced || ranks > 1) {
            for rows in row_splits(table, ranks) {
                add(Sharding::RowWise, vec![piece(&all, rows, Way::Flat)]);
            }
        }
        // On a single node these are row_wise, with another name.
        if asked(Sharding::TableRowWise) && (forced || (per_node > 1 && nodes > 1)) {
            for rows in row_splits(table, per_node) {
                add(Sharding::TableRowWise, vec![node(&all, &rows)]);
            }
        }
        if asked(Sharding::Grid) && (forced || per_node > 1) {
            for parts in splits(table, nodes, forced) {
                let cuts = column_cuts(table.dim, parts);
                for rows in row_splits(table, per_node) {
                    let pieces = cuts.iter().map(|columns| node(columns, &rows)).collect();
                    add(Sharding::Grid, pieces);
                }
            }
        }
    }
    if asked(Sharding::DataParallel) {
        let load = model.copy(table);
        let piece = Piece {
            columns: 0..table.dim,
            rows: vec![0..table.rows; ranks],
            loads: vec![load; ranks],
        };
        let layout =
            Layout::new(Sharding::DataParallel, Route::Pooled, vec![piece], Load::default(), ranks);
        found.push(layout);
    }
    found
}

/// Numbers of column blocks: two at least, unless one is asked for and cannot be cut. None where the
/// optimizer needs whole rows, unless cuts are asked for: whoever makes the tables then refuses them.
fn splits(table: &TableLoad, most: usize, forced: bool) -> Vec<usize> {
    if table.whole_rows && !forced {
        return Vec::new();
    }
    let parts: Vec<usize> = column_parts(table.dim, most).filter(|&parts| parts > 1).collect();
    if parts.is_empty() && forced { vec![1] } else { parts }
}

/// Equal blocks of rows, and where a sample tells another cut, equal shares of the ids.
fn row_splits(table: &TableLoad, parts: usize) -> Vec<Vec<Range<u64>>> {
    let equal = row_cuts(table.rows, parts);
    match &table.stats {
        Some(stats) => {
            let by_ids = stats.even_cuts(parts);
            if by_ids == equal { vec![equal] } else { vec![equal, by_ids] }
        }
        None => vec![equal],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_are_the_ones_of_the_docs() {
        assert_eq!(row_cuts(6, 4), [0..2, 2..4, 4..6, 6..6]);
        assert_eq!(row_cuts(0, 2), [0..0, 0..0]);
        assert!(row_cuts(u64::MAX, 3).windows(2).all(|pair| pair[0].end == pair[1].start));
        assert_eq!(column_cuts(100, 2), [0..64, 64..100]);
        assert_eq!(column_cuts(100, 9), [0..32, 32..64, 64..96, 96..100]);
        assert_eq!(column_cuts(128, 3), [0..64, 64..96, 96..128]);
        assert_eq!(column_cuts(8, 4), std::iter::once(0..8).collect::<Vec<_>>());
        assert!(column_parts(1280, 96).eq([1, 2, 3, 4, 5, 6, 7, 8, 10, 14, 20, 40]));
        assert!(column_parts(1280, 4).eq([1, 2, 3, 4]));
        assert!(column_parts(8, 4).eq([1]));
    }
}
