//! A plan seen from one rank: where the pieces of each table are, in the order in which messages
//! hold them.

use std::ops::Range;
use std::sync::Arc;

use tessera_cache::owner_of;

use crate::plan::{Plan, Route, Sharding, TablePlan};
use crate::{EmbeddingError, Result, RowSum, Schema, TableSpec};

/// How one table is cut, as a grid of row blocks and column blocks.
#[derive(Debug)]
pub(super) struct TableLayout {
    /// Every rank holds the whole table; nothing but gradients travels.
    pub(super) replicated: bool,
    /// What travels otherwise.
    pub(super) route: Route,
    /// Rows of each block, in order; together all rows.
    pub(super) row_blocks: Vec<Range<u64>>,
    /// Columns of each block, in order; together all columns.
    pub(super) column_blocks: Vec<Range<usize>>,
    /// The rank that holds each block: `column block * row blocks + row block`. Of a replicated
    /// table, one block that every rank holds.
    owners: Vec<usize>,
}

/// Which block of rows an id belongs to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Cut<'a> {
    /// Ids are rows, and blocks ranges of them.
    Rows(&'a [Range<u64>]),
    /// As many blocks, to which ids go by their hashes.
    Hash(usize),
}

impl Cut<'_> {
    /// Number of blocks.
    pub(super) fn blocks(self) -> usize {
        match self {
            Self::Rows(blocks) => blocks.len(),
            Self::Hash(blocks) => blocks,
        }
    }

    /// What an id is called in block `block`, if it belongs there.
    pub(super) fn within(self, block: usize, id: u64) -> Option<u64> {
        match self {
            Self::Rows(blocks) => {
                let rows = &blocks[block];
                rows.contains(&id).then(|| id - rows.start)
            }
            Self::Hash(blocks) => (owner_of(id, blocks as u64) == block as u64).then_some(id),
        }
    }
}

/// A block of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) table: usize,
    pub(super) row_block: usize,
    pub(super) column_block: usize,
}

impl TableLayout {
    /// The layout of `plan` for a table of the schema.
    fn new(plan: &TablePlan, table: &TableSpec) -> std::result::Result<Self, String> {
        if (plan.rows, plan.dim) != (table.rows, table.dim) {
            return Err(format!(
                "the plan has {} rows of {} columns, the model {} of {}",
                plan.rows, plan.dim, table.rows, table.dim
            ));
        }
        if plan.sharding == Sharding::DataParallel {
            let (rows, columns) = (0..table.rows, 0..table.dim);
            return Ok(Self {
                replicated: true,
                route: Route::Unique,
                row_blocks: vec![rows],
                column_blocks: vec![columns],
                owners: vec![0],
            });
        }
        // Shards are ordered by first column, then rank; rows ascend with ranks.
        let blocks: Vec<_> = plan.shards.chunk_by(|a, b| a.columns == b.columns).collect();
        let rows_of = |block: &[crate::plan::Shard]| {
            block.iter().map(|shard| shard.rows.clone()).collect::<Vec<_>>()
        };
        let row_blocks = blocks.first().map(|block| rows_of(block)).unwrap_or_default();
        if table.is_dynamic() && row_blocks.iter().any(Range::is_empty) {
            return Err(format!(
                "{} rows leave a rank without any, and ids go to all: give it more rows, or cut \
                 them less",
                table.rows
            ));
        }
        if blocks.iter().any(|block| rows_of(block) != row_blocks) {
            return Err("its blocks of columns are cut at different rows".to_owned());
        }
        if blocks.len() > 1 && table.optimizer.row_sum() == RowSum::Norms {
            return Err(format!(
                "{} needs norms over whole rows: shard it without cutting columns",
                table.optimizer.name()
            ));
        }
        Ok(Self {
            replicated: false,
            route: plan.route,
            row_blocks,
            column_blocks: blocks.iter().map(|block| block[0].columns.clone()).collect(),
            owners: plan.shards.iter().map(|shard| shard.rank).collect(),
        })
    }

    /// How the ids of a table that `is_dynamic` or not are cut.
    pub(super) fn cut(&self, is_dynamic: bool) -> Cut<'_> {
        if is_dynamic { Cut::Hash(self.row_blocks.len()) } else { Cut::Rows(&self.row_blocks) }
    }

    /// Whether the optimizer's sum over a row needs what other ranks have of it.
    pub(super) fn exchanges_squares(&self, table: &TableSpec) -> bool {
        self.column_blocks.len() > 1 && table.optimizer.row_sum() == RowSum::Squares
    }

    /// The rank that holds a block of a table that is not replicated.
    pub(super) fn owner(&self, row_block: usize, column_block: usize) -> usize {
        self.owners[column_block * self.row_blocks.len() + row_block]
    }

    /// Whether `rank` holds the block.
    fn holds(&self, rank: usize, row_block: usize, column_block: usize) -> bool {
        self.replicated || self.owner(row_block, column_block) == rank
    }
}

/// All tables of a plan, in the schema's order.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) tables: Vec<TableLayout>,
    /// Blocks that each rank holds, by table: the order of everything in messages to and from it.
    pub(super) pieces_of: Vec<Vec<Piece>>,
}

impl Layout {
    /// The layout of `plan` for the tables of `schema`.
    ///
    /// Errors: [`EmbeddingError::Spec`] with every table that the plan does not fit.
    pub(super) fn new(plan: &Plan, schema: &Arc<Schema>) -> Result<Self> {
        let (mut tables, mut faults) = (Vec::new(), Vec::new());
        for table in schema.tables() {
            let found = plan.table(&table.name).ok_or_else(|| "not in the plan".to_owned());
            match found.and_then(|plan| TableLayout::new(plan, table)) {
                Ok(layout) => tables.push(layout),
                Err(fault) => faults.push(format!("table {}: {fault}", table.name)),
            }
        }
        for planned in plan.tables() {
            if !schema.tables().iter().any(|table| table.name == planned.table) {
                faults.push(format!("table {} of the plan is not in the model", planned.table));
            }
        }
        if !faults.is_empty() {
            return Err(EmbeddingError::Spec { faults });
        }
        let pieces_of = (0..plan.ranks())
            .map(|rank| {
                let mut pieces = Vec::new();
                for (index, table) in tables.iter().enumerate() {
                    for column_block in 0..table.column_blocks.len() {
                        for row_block in 0..table.row_blocks.len() {
                            if table.holds(rank, row_block, column_block) {
                                pieces.push(Piece { table: index, row_block, column_block });
                            }
                        }
                    }
                }
                pieces
            })
            .collect();
        Ok(Self { tables, pieces_of })
    }

    /// Whether rank `source` reads its rows of `piece` from rank `owner`.
    pub(super) fn reads(&self, piece: &Piece, source: usize, owner: usize) -> bool {
        !self.tables[piece.table].replicated || source == owner
    }
}
