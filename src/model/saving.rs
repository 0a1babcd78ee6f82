//! A model's tables as checkpoints see them: rectangles of rows with all their tensors, the logs
//! that these lie in, and which of their rows changed.

use std::ops::Range;

use tessera_cache::Plane;

use super::tables::Piece;
use super::tensors::Home;
use super::{Model, ModelDevice};
use crate::Result;
use crate::tensors::{Block, ColdPart, Field, TablePart, WriteTensors, element_bytes};

impl<D: ModelDevice> Model<D> {
    /// Writes down what tables with a log have in memory only: the logs then hold all rows that
    /// differ from their first values.
    ///
    /// Errors: a log that has no room or cannot be written.
    pub fn flush_tables(&mut self) -> Result<()> {
        let stream = &self.stream;
        self.tables.collections().into_iter().try_for_each(|tables| Ok(tables.flush(stream)?))
    }

    /// Notes from now on which rows are written; forgets those noted before.
    pub fn track_changes(&mut self) {
        self.tables.collections().into_iter().for_each(|tables| tables.track_changes());
    }

    /// Number of the tensor of a table's weights, and those of its states in the optimizer's
    /// order.
    fn tensors_of(&self, table: usize) -> (usize, Vec<usize>) {
        let homes = || self.homes.iter().enumerate();
        let weights = homes()
            .find(|(_, home)| matches!(home, Home::Weights { table: of } if *of == table))
            .map(|(tensor, _)| tensor)
            .expect("every table has weights");
        let is_state = |home: &Home| matches!(home, Home::State { table: of, .. } if *of == table);
        (weights, homes().filter(|(_, home)| is_state(home)).map(|(tensor, _)| tensor).collect())
    }

    /// Where the tensors of a table lie in the rows of one of its rectangles.
    fn fields(&self, table: usize, rectangle: &Piece) -> Vec<Field> {
        let rows = rectangle.rows.start as usize..rectangle.rows.end as usize;
        let field = |tensor, columns: Range<usize>, plane, at| {
            let block = Block { tensor, rows: rows.clone(), columns };
            Field { block, plane, at }
        };
        let (weights, states) = self.tensors_of(table);
        let mut fields = vec![field(weights, rectangle.columns.clone(), Plane::Weights, 0)];
        let spec = &self.schema().tables()[table];
        let mut at = 0;
        for (tensor, state) in states.into_iter().zip(spec.optimizer.state()) {
            let a_row = state.columns(spec.dim) == 1 && spec.dim > 1;
            let columns = if a_row { 0..1 } else { rectangle.columns.clone() };
            fields.push(field(tensor, columns.clone(), Plane::State, at));
            at += columns.len() * size_of::<f32>();
        }
        fields
    }

    pub(super) fn table_parts(&self) -> Vec<TablePart> {
        let mut parts = Vec::new();
        for (table, spec) in self.schema().tables().iter().enumerate() {
            // Rows of a dynamic table lie in their logs by slot, in checkpoints by id.
            if spec.is_dynamic() {
                continue;
            }
            for rectangle in self.tables.pieces(table) {
                if !rectangle.writes || rectangle.rows.is_empty() {
                    continue;
                }
                let mut fields = self.fields(table, &rectangle);
                // A number a row stands in every block of columns; the first one's is saved.
                if rectangle.columns.start > 0 {
                    fields.retain(|field| field.block.columns == rectangle.columns);
                }
                let (store, inner, _) =
                    self.tables.store(table, &rectangle.rows, rectangle.columns.start);
                let log = store.log(inner).expect("a table of the collection");
                let cold = log.map(|log| ColdPart {
                    log: log.clone(),
                    table: spec.name.clone(),
                    init: spec.init,
                    seed: self.schema().seed(),
                });
                let rows = rectangle.rows.start as usize..rectangle.rows.end as usize;
                parts.push(TablePart { rows, fields, cold });
            }
        }
        parts
    }

    pub(super) fn changed_rows(&self, part: &TablePart) -> Result<Option<Vec<usize>>> {
        let block = &part.fields[0].block;
        let Home::Weights { table } = self.homes[block.tensor] else {
            unreachable!("a part begins with the weights")
        };
        let rows = part.rows.start as u64..part.rows.end as u64;
        let (store, inner, within) = self.tables.store(table, &rows, block.columns.start);
        let first = rows.start - within.start;
        let changed = store.changed_rows(inner, within)?;
        let in_table = |rows: Vec<u64>| rows.iter().map(|row| (row + first) as usize).collect();
        Ok(changed.map(in_table))
    }

    /// All blocks that this rank holds, those of one rectangle of a table together.
    pub(super) fn held_by_rectangle(&self) -> Vec<Vec<Block>> {
        let mut groups: Vec<Vec<Block>> = Vec::new();
        for table in 0..self.schema().tables().len() {
            if self.is_dynamic(table) {
                continue;
            }
            for rectangle in self.tables.pieces(table) {
                let fields = self.fields(table, &rectangle);
                groups.push(fields.into_iter().map(|field| field.block).collect());
            }
        }
        let alone = |block: &Block| match self.homes[block.tensor] {
            Home::Dense | Home::Ids { .. } => true,
            Home::Weights { table } | Home::State { table, .. } => self.is_dynamic(table),
        };
        groups.extend(self.held().into_iter().filter(alone).map(|block| vec![block]));
        groups
    }

    /// Writes weights and states of some rows of a rectangle at once, if all are there.
    pub(super) fn write_rectangle(&mut self, blocks: &[Block], bytes: &[Vec<u8>]) -> Result<()> {
        let one_by_one = |model: &mut Self| {
            let mut pairs = blocks.iter().zip(bytes);
            pairs.try_for_each(|(block, bytes)| model.write_block(block, bytes))
        };
        let Home::Weights { table } = self.homes[blocks[0].tensor] else {
            return one_by_one(self);
        };
        if self.is_dynamic(table)
            || blocks.len() != 1 + self.schema().tables()[table].optimizer.state().len()
        {
            return one_by_one(self);
        }
        let rows = blocks[0].rows.len();
        let widths: Vec<usize> = blocks[1..]
            .iter()
            .map(|block| block.columns.len() * element_bytes(self.tensors[block.tensor].dtype))
            .collect();
        let assembled;
        let state = match &bytes[1..] {
            [] => &[][..],
            [one] => &one[..],
            several => {
                let mut plane = Vec::with_capacity(rows * widths.iter().sum::<usize>());
                for row in 0..rows {
                    for (bytes, width) in several.iter().zip(&widths) {
                        plane.extend_from_slice(&bytes[row * width..(row + 1) * width]);
                    }
                }
                assembled = plane;
                &assembled[..]
            }
        };
        let span = blocks[0].rows.start as u64..blocks[0].rows.end as u64;
        let column = blocks[0].columns.start;
        let (store, inner, span) = self.tables.store_mut(table, &span, column);
        Ok(store.write_rows(&self.stream, inner, span, &bytes[0], state)?)
    }
}
