//! What checkpoints need of tables: logs to link, rows to load at once, and which rows were written
//! since the last one, for the next to hold no others.
//!
//! Changes take one bit a row, set by every update and every write; an update sets those of the batch's
//! different rows: a few nanoseconds a row beside sums and an optimizer over it.

use std::ops::Range;
use std::sync::Arc;

use tessera_cache::Planes;
use tessera_cache::log::SsdLog;

use crate::collection::of_table;
use crate::{EmbeddingCollection, EmbeddingError, Lookup, LookupOps, Resolver, Result};

/// Rows of one table, a bit each.
#[derive(Debug)]
struct Bits {
    words: Vec<u64>,
}

impl Bits {
    fn new(rows: u64) -> Self {
        Self { words: vec![0; rows.div_ceil(64) as usize] }
    }

    fn mark(&mut self, row: u64) {
        self.words[(row / 64) as usize] |= 1 << (row % 64);
    }

    fn mark_range(&mut self, rows: Range<u64>) {
        let mut row = rows.start;
        while row < rows.end {
            if row.is_multiple_of(64) && rows.end - row >= 64 {
                self.words[(row / 64) as usize] = u64::MAX;
                row += 64;
            } else {
                self.mark(row);
                row += 1;
            }
        }
    }

    /// The marked ones of some rows, ascending.
    fn within(&self, rows: Range<u64>) -> Vec<u64> {
        let mut marked = Vec::new();
        for at in rows.start / 64..rows.end.div_ceil(64) {
            let mut word = self.words[at as usize];
            while word != 0 {
                let row = at * 64 + u64::from(word.trailing_zeros());
                if rows.contains(&row) {
                    marked.push(row);
                }
                word &= word - 1;
            }
        }
        marked
    }
}

/// The marks of all tables of a collection.
#[derive(Debug)]
pub(crate) struct Changes {
    tables: Vec<Bits>,
}

impl<D: LookupOps> EmbeddingCollection<D> {
    /// Writes weights and state of `rows`, bits as stored, at once: (rows, dim) elements of the
    /// table's precision, and (rows, state columns) float32, the optimizer's tensors one after
    /// another in each row. Rows that have no room in memory go to the tier below once.
    ///
    /// Errors: [`EmbeddingError::NoTable`], [`EmbeddingError::Store`] naming the range.
    pub fn write_rows(
        &mut self,
        stream: &D::Stream,
        table: usize,
        rows: Range<u64>,
        weights: &[u8],
        state: &[u8],
    ) -> Result<()> {
        self.table(table)?;
        let Resolver { device, schema, .. } = &self.resolver;
        let spec = &schema.tables()[table];
        let planes = Planes { weights, state };
        let written = self.stores[table].write_rows(device, stream, rows.clone(), planes);
        written.map_err(of_table(spec))?;
        self.note_range(table, rows);
        Ok(())
    }

    /// The log in which rows of a table lie that have no room in memory, if it has one.
    ///
    /// Errors: [`EmbeddingError::NoTable`].
    pub fn log(&self, table: usize) -> Result<Option<&Arc<SsdLog>>> {
        self.table(table)?;
        Ok(self.logs[table].as_ref())
    }

    /// Writes down all rows that differ from what their table's log holds, where there is one: it
    /// then holds every row that differs from its first value.
    ///
    /// Errors: [`EmbeddingError::Store`] naming the table.
    pub fn flush(&mut self, stream: &D::Stream) -> Result<()> {
        let Resolver { device, schema, .. } = &self.resolver;
        for (store, spec) in self.stores.iter_mut().zip(schema.tables()) {
            store.flush(device, stream).map_err(of_table(spec))?;
        }
        Ok(())
    }

    /// Notes from now on which rows are written; forgets what was noted before.
    pub fn track_changes(&mut self) {
        let tables =
            self.schema().tables().iter().map(|table| Bits::new(table.stored_rows())).collect();
        self.changes = Some(Changes { tables });
    }

    /// Those of `rows` that were written since [`EmbeddingCollection::track_changes`], ascending;
    /// `None` if that was never called.
    ///
    /// Errors: [`EmbeddingError::NoTable`].
    pub fn changed_rows(&self, table: usize, rows: Range<u64>) -> Result<Option<Vec<u64>>> {
        let tables = self.stores.len();
        if table >= tables {
            return Err(EmbeddingError::NoTable { table, tables });
        }
        Ok(self.changes.as_ref().map(|changes| changes.tables[table].within(rows)))
    }

    /// Notes that a range of rows was written.
    pub(crate) fn note_range(&mut self, table: usize, rows: Range<u64>) {
        if let Some(changes) = &mut self.changes {
            changes.tables[table].mark_range(rows);
        }
    }

    /// Notes that the rows of a lookup were written.
    pub(crate) fn note_lookup(&mut self, stream: &D::Stream, lookup: &Lookup<D>) -> Result<()> {
        let Some(mut changes) = self.changes.take() else { return Ok(()) };
        for (table, bits) in changes.tables.iter_mut().enumerate() {
            match &lookup.moving[table] {
                Some(rows) => rows.iter().for_each(|&row| bits.mark(row)),
                None => {
                    let rows = self.device().unique_rows(stream, &lookup.staged, table)?;
                    rows.iter().for_each(|row| bits.mark(row.0));
                }
            }
        }
        self.changes = Some(changes);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn marks_are_a_set(
            single in prop::collection::vec(0u64..300, 0..20),
            ranges in prop::collection::vec((0u64..=300, 0u64..=300), 0..4),
            (a, b) in (0u64..=300, 0u64..=300),
        ) {
            let (mut bits, mut model) = (Bits::new(300), BTreeSet::new());
            for row in single {
                bits.mark(row);
                model.insert(row);
            }
            for (a, b) in ranges {
                bits.mark_range(a.min(b)..a.max(b));
                model.extend(a.min(b)..a.max(b));
            }
            let range = a.min(b)..a.max(b);
            let wanted: Vec<u64> = model.range(range.clone()).copied().collect();
            prop_assert_eq!(bits.within(range), wanted);
        }
    }
}
