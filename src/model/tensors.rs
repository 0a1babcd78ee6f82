//! A model as logical tensors: their names and shapes, and where the values of each are kept.

use tessera_cache::IdMap;
use tessera_dense::{Dlrm, Role};
use tessera_embedding::{Precision, Schema, StateWidth};

use super::dynamic::{IdTensor, Listing};
use super::{Model, ModelDevice};
use crate::Result;
use crate::tensors::{
    Block, Dtype, ReadTensors, Stored, TablePart, Tensor, WriteTensors, element_bytes,
};

/// Where a logical tensor is kept.
#[derive(Clone, Copy)]
pub(super) enum Home {
    /// Weights of a table.
    Weights { table: usize },
    /// A state tensor of a table.
    State { table: usize, name: &'static str, columns: usize },
    /// What tells of a dynamic table's ids.
    Ids { table: usize, what: IdTensor },
    /// A parameter of the towers or a state of one, which the towers know by its name.
    Dense,
}

/// Names, shapes and homes of all logical tensors. Collection tables from number `narrow` on are
/// those of the wide part.
pub(super) fn logical_tensors<D: ModelDevice>(
    schema: &Schema,
    towers: &Dlrm<D>,
    narrow: usize,
    listing: &Listing,
) -> (Vec<Tensor>, Vec<Home>) {
    let mut tensors = Vec::new();
    let mut homes = Vec::new();
    for (table, spec) in schema.tables().iter().enumerate() {
        let dtype = match spec.precision {
            Precision::Fp32 => Dtype::F32,
            Precision::Fp16 => Dtype::F16,
            Precision::Bf16 => Dtype::BF16,
        };
        let rows = if spec.is_dynamic() { listing.rows(table) } else { spec.rows as usize };
        // Table T's wide weights are `tables.T.wide` themselves, states `tables.T.wide.<state>`.
        let prefix = format!("tables.{}", spec.name);
        let name = if table < narrow { format!("{prefix}.weight") } else { prefix.clone() };
        tensors.push(Tensor { name, dtype, shape: vec![rows, spec.dim], is_state: false });
        homes.push(Home::Weights { table });
        for what in IdTensor::ALL.into_iter().filter(|_| spec.is_dynamic()) {
            if let Some(tensor) = listing.tensor(schema, table, what, &prefix) {
                tensors.push(tensor);
                homes.push(Home::Ids { table, what });
            }
        }
        for state in spec.optimizer.state() {
            let shape = match state.width {
                StateWidth::One => vec![rows],
                StateWidth::Dim => vec![rows, spec.dim],
            };
            let name = format!("{prefix}.{}", state.name);
            tensors.push(Tensor { name, dtype: Dtype::F32, shape, is_state: true });
            homes.push(Home::State { table, name: state.name, columns: state.columns(spec.dim) });
        }
    }
    for tensor in towers.tensors() {
        tensors.push(Tensor {
            name: tensor.name,
            dtype: Dtype::F32,
            shape: tensor.shape,
            is_state: tensor.role == Role::State,
        });
        homes.push(Home::Dense);
    }
    (tensors, homes)
}

impl<D: ModelDevice> ReadTensors for Model<D> {
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn blocks(&self) -> Vec<Block> {
        self.blocks_held(true)
    }

    fn read_block(&self, block: &Block, out: &mut Vec<u8>) -> Result<()> {
        let tensor = &self.tensors[block.tensor];
        let span = block.rows.start as u64..block.rows.end as u64;
        out.clear();
        match self.homes[block.tensor] {
            Home::Ids { table, what } => self.listing.read_ids(table, what, block, out),
            Home::Weights { table } if self.is_dynamic(table) => {
                let element = element_bytes(tensor.dtype);
                out.resize(block.rows.len() * block.columns.len() * element, 0);
                let found = self.listing.find(table, &block.rows, Some(block.columns.start));
                for (piece, rows) in found {
                    let (store, number) = self.tables.of_piece(&piece);
                    store.read_weights_of(&self.stream, number, rows, out)?;
                }
            }
            Home::State { table, name, .. } if self.is_dynamic(table) => {
                let mut values = vec![0.0f32; block.rows.len() * block.columns.len()];
                let found = self.listing.find(table, &block.rows, Some(block.columns.start));
                for (piece, rows) in found {
                    let (store, number) = self.tables.of_piece(&piece);
                    store.read_state_of(&self.stream, number, name, rows, &mut values)?;
                }
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Home::Weights { table } => {
                let element = element_bytes(tensor.dtype);
                out.resize(block.rows.len() * block.columns.len() * element, 0);
                let (store, table, span) = self.tables.store(table, &span, block.columns.start);
                store.read_weight_bits(&self.stream, table, span, out)?;
            }
            Home::State { table, name, .. } => {
                let mut values = vec![0.0f32; block.rows.len() * block.columns.len()];
                let (store, table, span) = self.tables.store(table, &span, block.columns.start);
                store.read_state(&self.stream, table, name, span, &mut values)?;
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
            Home::Dense => {
                let values = self.towers.read(&self.stream, &tensor.name)?;
                let width = tensor.columns();
                let values = &values[block.rows.start * width..block.rows.end * width];
                out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            }
        }
        Ok(())
    }

    fn parts(&self) -> Vec<TablePart> {
        self.table_parts()
    }

    fn changed(&self, part: &TablePart) -> Result<Option<Vec<usize>>> {
        self.changed_rows(part)
    }
}

impl<D: ModelDevice> WriteTensors for Model<D> {
    fn prepare(&mut self, stored: &dyn Stored, with_states: bool) -> Result<()> {
        self.load_ids(stored, with_states)
    }

    fn begin(&mut self) -> Result<()> {
        self.take_ids()
    }

    fn held(&self) -> Vec<Block> {
        self.blocks_held(false)
    }

    fn held_together(&self) -> Vec<Vec<Block>> {
        self.held_by_rectangle()
    }

    fn write_blocks(&mut self, blocks: &[Block], bytes: &[Vec<u8>]) -> Result<()> {
        self.write_rectangle(blocks, bytes)
    }

    fn write_block(&mut self, block: &Block, bytes: &[u8]) -> Result<()> {
        let tensor = &self.tensors[block.tensor];
        let span = block.rows.start as u64..block.rows.end as u64;
        let floats = || -> Vec<f32> {
            let words = bytes.chunks_exact(4);
            words.map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
        };
        match self.homes[block.tensor] {
            Home::Ids { .. } => unreachable!("ids were loaded before"),
            Home::Weights { table } if self.is_dynamic(table) => {
                let column = Some(block.columns.start);
                for (piece, rows) in self.listing.find(table, &block.rows, column) {
                    let (store, number) = self.tables.of_piece_mut(&piece);
                    let (rows, bytes) = with_row(rows, bytes);
                    store.write_weights_of(&self.stream, number, &rows, &bytes)?;
                }
            }
            Home::State { table, name, columns } if self.is_dynamic(table) => {
                // A number a row stands in every block of columns.
                let column = (columns > 1).then_some(block.columns.start);
                for (piece, rows) in self.listing.find(table, &block.rows, column) {
                    let (store, number) = self.tables.of_piece_mut(&piece);
                    let (rows, values) = with_row(rows, &floats());
                    store.write_state_of(&self.stream, number, name, &rows, &values)?;
                }
            }
            Home::Weights { table } => {
                let column = block.columns.start;
                let (store, table, span) = self.tables.store_mut(table, &span, column);
                store.write_weight_bits(&self.stream, table, span, bytes)?;
            }
            Home::State { table, name, .. } => {
                let values = floats();
                // A number a row stands in every block of columns.
                for column in self.tables.state_columns(table, name, &block.columns) {
                    let (store, table, span) = self.tables.store_mut(table, &span, column);
                    store.write_state(&self.stream, table, name, span, &values)?;
                }
            }
            Home::Dense => {
                let mut values = self.towers.read(&self.stream, &tensor.name)?;
                let width = tensor.columns();
                values[block.rows.start * width..block.rows.end * width].copy_from_slice(&floats());
                self.towers.write(&self.stream, &tensor.name, &values)?;
            }
        }
        Ok(())
    }
}

impl<D: ModelDevice> Model<D> {
    /// What this rank holds of every tensor; with `writes`, only what it writes to checkpoints,
    /// so that over all ranks each element is there once.
    fn blocks_held(&self, writes: bool) -> Vec<Block> {
        let mut blocks = Vec::new();
        for (index, tensor) in self.tensors.iter().enumerate() {
            let (table, a_row) = match self.homes[index] {
                Home::Dense => {
                    if !writes || self.ranks.is_first() {
                        blocks.push(Block::whole(index, tensor));
                    }
                    continue;
                }
                // Those are loaded in one go, by `prepare`.
                Home::Ids { .. } if !writes => continue,
                Home::Ids { table, what } => {
                    blocks.extend(self.listing.id_blocks(table, what, index));
                    continue;
                }
                Home::Weights { table } => (table, false),
                Home::State { table, columns, .. } => {
                    (table, columns == 1 && self.schema().tables()[table].dim > 1)
                }
            };
            if self.is_dynamic(table) {
                for (rows, columns, is_writer) in self.listing.rectangles(table) {
                    if !writes || is_writer && !(a_row && columns.start > 0) {
                        let columns = if a_row { 0..1 } else { columns };
                        blocks.push(Block { tensor: index, rows, columns });
                    }
                }
                continue;
            }
            for rectangle in self.tables.pieces(table) {
                if writes && (!rectangle.writes || a_row && rectangle.columns.start > 0) {
                    continue;
                }
                let rows = rectangle.rows.start as usize..rectangle.rows.end as usize;
                let columns = if a_row { 0..1 } else { rectangle.columns };
                blocks.push(Block { tensor: index, rows, columns });
            }
        }
        blocks
    }

    pub(super) fn is_dynamic(&self, table: usize) -> bool {
        self.schema().tables()[table].is_dynamic()
    }
}

/// Those of some rows, of equal parts of `values`, that have a place.
fn with_row<T: Copy>(rows: &[u64], values: &[T]) -> (Vec<u64>, Vec<T>) {
    let width = values.len() / rows.len().max(1);
    let mut kept = (Vec::with_capacity(rows.len()), Vec::with_capacity(values.len()));
    for (&row, values) in rows.iter().zip(values.chunks_exact(width.max(1))) {
        if row != IdMap::NONE {
            kept.0.push(row);
            kept.1.extend_from_slice(values);
        }
    }
    kept
}
