//! The plan: which rectangle of which table lies on which rank.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tessera_device::fnv1a;

use crate::{EmbeddingError, Result};

/// Columns are cut at multiples of this, the block in which kernels sum over a row: so the state
/// of a row does not depend on the cut.
pub const COLUMN_BLOCK: usize = 32;

/// How a table is spread over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// A whole copy on each rank.
    DataParallel,
    /// The whole table on one rank.
    TableWise,
    /// Blocks of columns, each on a rank of its own.
    ColumnWise,
    /// Blocks of rows, one on every rank; some may be empty.
    RowWise,
    /// Blocks of rows, one on every rank of one node.
    TableRowWise,
    /// Blocks of columns, each on a node of its own and there cut by rows over the node's ranks.
    Grid,
}

impl Sharding {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::DataParallel,
        Self::TableWise,
        Self::ColumnWise,
        Self::RowWise,
        Self::TableRowWise,
        Self::Grid,
    ];

    /// Its name in configurations and plans.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::DataParallel => "data_parallel",
            Self::TableWise => "table_wise",
            Self::ColumnWise => "column_wise",
            Self::RowWise => "row_wise",
            Self::TableRowWise => "table_row_wise",
            Self::Grid => "grid",
        }
    }
}

impl fmt::Display for Sharding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Sharding {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        Self::ALL.into_iter().find(|sharding| sharding.name() == name).ok_or_else(|| {
            let names: Vec<&str> = Self::ALL.iter().map(|sharding| sharding.name()).collect();
            format!("`{name}` is no sharding; there are {}", names.join(", "))
        })
    }
}

/// What travels from the owner of a shard to the ranks that asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Route {
    /// Bags, summed at the owner.
    Pooled,
    /// Each row that a rank needs, once; that rank sums its bags in canonical order.
    Unique,
}

impl Route {
    /// Its name in configurations and plans.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Pooled => "pooled",
            Self::Unique => "unique",
        }
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A rectangle of a table on a rank. Empty ones are normal: 6 rows on 4 ranks are 2, 2, 2 and 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shard {
    /// The rank, within a group of two-dimensional parallelism.
    pub rank: usize,
    /// Its rows.
    pub rows: Range<u64>,
    /// Its columns.
    pub columns: Range<usize>,
}

impl Shard {
    /// Whether it holds nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() || self.columns.is_empty()
    }
}

/// How one table is spread.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct TablePlan {
    /// Name of the table.
    pub table: String,
    /// Rows of the table.
    pub rows: u64,
    /// Columns of the table.
    pub dim: usize,
    /// How it is cut.
    pub sharding: Sharding,
    /// What travels.
    pub route: Route,
    /// Its rectangles: at most one a rank, ordered by first column, then rank.
    pub shards: Vec<Shard>,
}

impl TablePlan {
    /// The rectangle on `rank`, if it has one.
    #[must_use]
    pub fn shard_on(&self, rank: usize) -> Option<&Shard> {
        self.shards.iter().find(|shard| shard.rank == rank)
    }

    /// Everything that is wrong with it for `ranks` ranks in nodes of `per_node`.
    fn faults(&self, ranks: usize, per_node: usize) -> Vec<String> {
        let mut faults = Vec::new();
        if self.dim == 0 {
            faults.push("dim is 0; it must be from 1 up".to_owned());
            return faults;
        }
        let mut seen = vec![false; ranks];
        for shard in &self.shards {
            let (Range { start: r0, end: r1 }, Range { start: c0, end: c1 }) =
                (shard.rows.clone(), shard.columns.clone());
            match seen.get_mut(shard.rank) {
                None => faults.push(format!("rank {} of {ranks} ranks", shard.rank)),
                Some(true) => faults.push(format!("rank {} has two shards of it", shard.rank)),
                Some(seen) => *seen = true,
            }
            if r0 > r1 || r1 > self.rows {
                faults.push(format!("rows {r0}..{r1} of {} (rank {})", self.rows, shard.rank));
            }
            if c0 >= c1 || c1 > self.dim {
                faults.push(format!("columns {c0}..{c1} of {} (rank {})", self.dim, shard.rank));
            }
            if c0 % COLUMN_BLOCK != 0 || (c1 % COLUMN_BLOCK != 0 && c1 != self.dim) {
                faults.push(format!(
                    "columns {c0}..{c1} are not cut at multiples of {COLUMN_BLOCK} (rank {})",
                    shard.rank
                ));
            }
        }
        if faults.is_empty() {
            faults.extend(self.shape_fault(ranks, per_node));
        }
        faults
    }

    /// What keeps shards that are sound one by one from being this sharding of the whole table.
    fn shape_fault(&self, ranks: usize, per_node: usize) -> Option<String> {
        let name = self.sharding;
        let whole = |shard: &Shard| shard.rows == (0..self.rows) && shard.columns == (0..self.dim);
        match self.sharding {
            Sharding::DataParallel => {
                let copies = self.shards.iter().filter(|shard| whole(shard)).count();
                return (copies != ranks || self.shards.len() != ranks).then(|| {
                    format!("{name} needs a whole copy on each of {ranks} ranks, has {copies}")
                });
            }
            Sharding::TableWise if !matches!(&self.shards[..], [one] if whole(one)) => {
                return Some(format!("{name} needs one shard, the whole table"));
            }
            _ => {}
        }
        // Blocks of columns in order, and inside each the rows in order.
        let mut column = 0;
        for block in self.shards.chunk_by(|a, b| a.columns == b.columns) {
            if block[0].columns.start != column {
                return Some(format!(
                    "columns {} are followed by {}",
                    column, block[0].columns.start
                ));
            }
            column = block[0].columns.end;
            let mut row = 0;
            for shard in block {
                if shard.rows.start != row {
                    return Some(format!(
                        "row {row} is followed by {} (rank {})",
                        shard.rows.start, shard.rank
                    ));
                }
                row = shard.rows.end;
            }
            if row != self.rows {
                return Some(format!("rows from {row} to {} are on no rank", self.rows));
            }
            let on: Vec<usize> = block.iter().map(|shard| shard.rank).collect();
            let node = on[0] / per_node * per_node;
            let fault = match self.sharding {
                Sharding::DataParallel | Sharding::TableWise => None,
                Sharding::ColumnWise if on.len() != 1 => Some("whole columns"),
                Sharding::RowWise if !on.iter().copied().eq(0..ranks) => {
                    Some("a block of rows on every rank, in order")
                }
                Sharding::TableRowWise | Sharding::Grid
                    if !on.iter().copied().eq(node..node + per_node) =>
                {
                    Some("a block of rows on every rank of a node, in order")
                }
                Sharding::RowWise | Sharding::TableRowWise if block.len() != self.shards.len() => {
                    Some("rows of all columns")
                }
                _ => None,
            };
            if let Some(needed) = fault {
                return Some(format!("{name} needs {needed}"));
            }
        }
        (column != self.dim)
            .then(|| format!("columns from {column} to {} are on no rank", self.dim))
    }
}

/// Where every table lies: the same on all ranks, which compare its [hash](Plan::hash).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    ranks: usize,
    ranks_per_node: usize,
    replicas: usize,
    tables: Vec<TablePlan>,
}

impl Plan {
    /// A plan for groups of `ranks` ranks, of which `ranks_per_node` successive ones share a node,
    /// and `replicas` such groups. Shards are brought into canonical order.
    ///
    /// Errors: [`EmbeddingError::Plan`] with every fault: shards that do not tile their table, cut
    /// columns off the multiples of [`COLUMN_BLOCK`], do not have the form of their sharding, or
    /// name a rank twice or one that is not there; names used twice.
    pub fn new(
        ranks: usize,
        ranks_per_node: usize,
        replicas: usize,
        mut tables: Vec<TablePlan>,
    ) -> Result<Self> {
        let mut faults = Vec::new();
        if ranks == 0 || replicas == 0 {
            faults.push(format!("{ranks} ranks in {replicas} replicas; at least 1 is needed"));
        }
        if ranks_per_node == 0 || !ranks.is_multiple_of(ranks_per_node) {
            faults.push(format!("{ranks} ranks do not fill nodes of {ranks_per_node}"));
        }
        let mut names = hashbrown::HashSet::new();
        for table in &tables {
            if !names.insert(table.table.as_str()) {
                faults.push(format!("table {} is there twice", table.table));
            }
        }
        drop(names);
        if faults.is_empty() {
            for table in &mut tables {
                table.shards.sort_by_key(|shard| (shard.columns.start, shard.rank));
                let name = &table.table;
                let found = table.faults(ranks, ranks_per_node);
                faults.extend(found.into_iter().map(|fault| format!("table {name}: {fault}")));
            }
        }
        if faults.is_empty() {
            Ok(Self { ranks, ranks_per_node, replicas, tables })
        } else {
            Err(EmbeddingError::Plan { faults })
        }
    }

    /// Ranks of a group.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Successive ranks of a group that share a node.
    #[must_use]
    pub fn ranks_per_node(&self) -> usize {
        self.ranks_per_node
    }

    /// Groups that each hold all tables.
    #[must_use]
    pub fn replicas(&self) -> usize {
        self.replicas
    }

    /// The tables, in the order given.
    #[must_use]
    pub fn tables(&self) -> &[TablePlan] {
        &self.tables
    }

    /// The table of that name.
    #[must_use]
    pub fn table(&self, name: &str) -> Option<&TablePlan> {
        self.tables.iter().find(|table| table.table == name)
    }

    /// A number that differs when plans do: 64-bit FNV-1a over the plan's fields in order, numbers
    /// as 8 little-endian bytes, each name as its length and its bytes.
    #[must_use]
    pub fn hash(&self) -> u64 {
        let mut fields = Vec::new();
        let numbers = |fields: &mut Vec<u8>, numbers: &[u64]| {
            fields.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        };
        let text = |fields: &mut Vec<u8>, text: &str| {
            numbers(fields, &[text.len() as u64]);
            fields.extend(text.as_bytes());
        };
        for number in [self.ranks, self.ranks_per_node, self.replicas, self.tables.len()] {
            numbers(&mut fields, &[number as u64]);
        }
        for table in &self.tables {
            text(&mut fields, &table.table);
            numbers(&mut fields, &[table.rows, table.dim as u64]);
            text(&mut fields, table.sharding.name());
            text(&mut fields, table.route.name());
            numbers(&mut fields, &[table.shards.len() as u64]);
            for Shard { rank, rows, columns } in &table.shards {
                let columns = [columns.start as u64, columns.end as u64];
                numbers(&mut fields, &[*rank as u64, rows.start, rows.end]);
                numbers(&mut fields, &columns);
            }
        }
        fnv1a(&fields)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for sharding in Sharding::ALL {
            assert_eq!(sharding.name().parse(), Ok(sharding));
        }
        assert!("rows".parse::<Sharding>().unwrap_err().contains("row_wise"));
    }
}
