//! The ids of dynamic tables as logical tensors, and their rows in an order of their own.
//!
//! ```text
//! tables.T.ids          [n]         ids that have a row, ascending by hash
//! tables.T.weight, ...  [n, dim]    their rows, in the same order
//! tables.T.seen_steps, .occurrences, .rows   [n]   what eviction goes by, and where rows were
//! tables.T.clock        [blocks, 2] last step, sightings since a sketch was halved
//! tables.T.sketch       [blocks, counters]         where admission counts
//! ```
//! A row of the logical tensor is an id, not a slot of whoever keeps it. The order of hashes makes
//! the ids of a rank one range of rows for any number of ranks ([`owner_of`]), so that all that is
//! said of blocks of static tables holds here too. How many rows there are changes from step to
//! step: the tensors are made anew when they are to be saved ([`Model::list_ids`]) or loaded.

use std::collections::BTreeMap;
use std::ops::Range;

use tessera_cache::{Admission, IdMap, IdMapOptions, IdMapState, SketchState, id_hash, owner_of};
use tessera_embedding::{Schema, TableKind, TableSpec};

use super::tables::Piece;
use super::{Found, Model, ModelDevice};
use crate::metrics::Metrics;
use crate::tensors::{Block, Dtype, Stored, Tensor};
use crate::{Error, Result};

/// A tensor that tells of ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum IdTensor {
    Ids,
    SeenSteps,
    Occurrences,
    Rows,
    Clock,
    Sketch,
}

impl IdTensor {
    pub(super) const ALL: [Self; 6] =
        [Self::Ids, Self::SeenSteps, Self::Occurrences, Self::Rows, Self::Clock, Self::Sketch];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ids => "ids",
            Self::SeenSteps => "seen_steps",
            Self::Occurrences => "occurrences",
            Self::Rows => "rows",
            Self::Clock => "clock",
            Self::Sketch => "sketch",
        }
    }

    /// Whether it has a row for each block of the table, not for each id.
    fn of_blocks(self) -> bool {
        matches!(self, Self::Clock | Self::Sketch)
    }
}

/// Dynamic tables as they stood when their ids were listed.
#[derive(Debug, Default)]
pub(super) struct Listing {
    /// Of each dynamic table: its rows in use, and the blocks that they were in.
    sizes: BTreeMap<usize, Size>,
    /// Of each piece that is here, by table and number of the piece.
    parts: BTreeMap<(usize, usize), Part>,
    /// Maps that were loaded and are not in their tables yet.
    loaded: Vec<(usize, usize, IdMap)>,
}

#[derive(Clone, Copy, Debug)]
struct Size {
    rows: usize,
    blocks: usize,
}

/// The ids of a piece.
#[derive(Debug)]
struct Part {
    piece: Piece,
    /// Number of its first id among all of the table.
    start: usize,
    /// The row of each id in the piece, or [`IdMap::NONE`] for one that lost it when loaded.
    order: Vec<u64>,
    /// What is saved of them, in the same order; nothing when loaded.
    state: IdMapState,
}

impl Part {
    fn span(&self) -> Range<usize> {
        self.start..self.start + self.order.len()
    }
}

/// Bytes of a table's sketch, where it has one.
fn sketch_bytes(kind: TableKind) -> Option<usize> {
    match kind {
        TableKind::Dynamic { admission: Admission::Count { sketch, .. }, .. } => {
            Some(sketch.bytes() as usize)
        }
        _ => None,
    }
}

/// `state` with its ids ascending by hash.
fn by_hash(state: IdMapState) -> IdMapState {
    let mut order: Vec<usize> = (0..state.ids.len()).collect();
    order.sort_unstable_by_key(|&i| id_hash(state.ids[i]));
    let pick = |from: &[u64]| order.iter().map(|&i| from[i]).collect();
    IdMapState {
        ids: pick(&state.ids),
        rows: pick(&state.rows),
        seen_steps: pick(&state.seen_steps),
        occurrences: pick(&state.occurrences),
        ..state
    }
}

impl Listing {
    /// Rows of a dynamic table's tensors, and the shape of what tells of its ids.
    pub(super) fn rows(&self, table: usize) -> usize {
        self.sizes.get(&table).map_or(0, |size| size.rows)
    }

    pub(super) fn tensor(
        &self,
        schema: &Schema,
        table: usize,
        what: IdTensor,
        prefix: &str,
    ) -> Option<Tensor> {
        let size = self.sizes.get(&table).copied().unwrap_or(Size { rows: 0, blocks: 0 });
        let (dtype, shape) = match what {
            IdTensor::Clock => (Dtype::U64, vec![size.blocks, 2]),
            IdTensor::Sketch => {
                (Dtype::U8, vec![size.blocks, sketch_bytes(schema.tables()[table].kind)?])
            }
            _ => (Dtype::U64, vec![size.rows]),
        };
        let name = format!("{prefix}.{}", what.name());
        Some(Tensor { name, dtype, shape, is_state: what != IdTensor::Ids })
    }

    /// What this rank has of a tensor that tells of ids; other pieces with the same ids leave that
    /// to one.
    pub(super) fn id_blocks(&self, table: usize, what: IdTensor, tensor: usize) -> Vec<Block> {
        let parts = self.parts.values().filter(|part| {
            part.piece.table == table && part.piece.writes && part.piece.columns.start == 0
        });
        parts
            .map(|part| {
                let block = part.piece.block;
                match what {
                    IdTensor::Clock => Block { tensor, rows: block..block + 1, columns: 0..2 },
                    IdTensor::Sketch => {
                        let cells = part.state.sketch.as_ref().map_or(0, |s| s.cells.len());
                        Block { tensor, rows: block..block + 1, columns: 0..cells }
                    }
                    _ => Block { tensor, rows: part.span(), columns: 0..1 },
                }
            })
            .collect()
    }

    /// Little-endian elements of some rows of [`Listing::id_blocks`].
    pub(super) fn read_ids(&self, table: usize, what: IdTensor, block: &Block, out: &mut Vec<u8>) {
        let is_here = |part: &&Part| {
            part.piece.table == table
                && if what.of_blocks() {
                    part.piece.block == block.rows.start
                } else {
                    part.span().start <= block.rows.start && block.rows.end <= part.span().end
                }
        };
        let part = self.parts.values().find(is_here).expect("blocks are of what a rank holds");
        let rows = || block.rows.start - part.start..block.rows.end - part.start;
        let state = &part.state;
        let first_row = part.piece.rows.start;
        let numbers: Vec<u64> = match what {
            IdTensor::Ids => state.ids[rows()].to_vec(),
            IdTensor::SeenSteps => state.seen_steps[rows()].to_vec(),
            IdTensor::Occurrences => state.occurrences[rows()].to_vec(),
            IdTensor::Rows => state.rows[rows()].iter().map(|row| first_row + row).collect(),
            IdTensor::Clock => {
                vec![state.step, state.sketch.as_ref().map_or(0, |sketch| sketch.sightings)]
            }
            IdTensor::Sketch => {
                out.extend(state.sketch.iter().flat_map(|sketch| &sketch.cells));
                return;
            }
        };
        out.extend(numbers.into_iter().flat_map(u64::to_le_bytes));
    }

    /// Rows and columns of a dynamic table that this rank has, as rows of its logical tensor, and
    /// whether it is the one that saves them.
    pub(super) fn rectangles(&self, table: usize) -> Vec<(Range<usize>, Range<usize>, bool)> {
        let parts = self.parts.values().filter(|part| part.piece.table == table);
        parts.map(|part| (part.span(), part.piece.columns.clone(), part.piece.writes)).collect()
    }

    /// The pieces that keep some rows of a table from column `column` on, or of each of their
    /// columns, with the place in each of every one of these rows.
    pub(super) fn find(
        &self,
        table: usize,
        rows: &Range<usize>,
        column: Option<usize>,
    ) -> Vec<(Piece, &[u64])> {
        let parts = self.parts.values().filter(|part| {
            part.piece.table == table
                && column.is_none_or(|column| part.piece.columns.contains(&column))
                && part.span().start <= rows.start
                && rows.end <= part.span().end
        });
        parts
            .map(|part| {
                let order = &part.order[rows.start - part.start..rows.end - part.start];
                (part.piece.clone(), order)
            })
            .collect()
    }
}

impl<D: ModelDevice> Model<D> {
    /// Counts what routing did to the ids of dynamic tables.
    pub(super) fn observe_ids(&self, found: &Found<D>, metrics: &Metrics) {
        let Some(ids) = &metrics.ids else { return };
        for table in 0..self.schema().tables().len() {
            if let Some(stats) = self.tables.id_stats(found, table) {
                ids.observe(table, &stats);
            }
        }
    }

    /// Whether tables are dynamic: what changed of those since a checkpoint is not noted.
    pub fn has_ids(&self) -> bool {
        self.schema().tables().iter().any(TableSpec::is_dynamic)
    }

    /// Lists the ids of dynamic tables as they stand now, for a checkpoint of this moment. A
    /// collective.
    ///
    /// Errors: those of any collective.
    pub fn list_ids(&mut self) -> Result<()> {
        self.listing = Listing::default();
        let mut counts = Vec::new();
        for table in dynamic_tables(self.tables.schema()) {
            let pieces = self.tables.pieces(table);
            let blocks = self.tables.row_blocks(table);
            let mut of_table = vec![0u64; blocks];
            for piece in pieces {
                let (store, number) = self.tables.of_piece(&piece);
                let state = by_hash(store.id_state(number)?);
                of_table[piece.block] = state.ids.len() as u64;
                let (key, order) = ((table, piece.held), state.rows.clone());
                self.listing.parts.insert(key, Part { piece, start: 0, order, state });
            }
            counts.extend(of_table);
            self.listing.sizes.insert(table, Size { rows: 0, blocks });
        }
        if counts.is_empty() {
            return Ok(());
        }
        let counts = self.ranks.control().all_max(counts).wait()?;
        let mut counts = &counts[..];
        for (&table, size) in &mut self.listing.sizes {
            let (of_table, rest) = counts.split_at(size.blocks);
            counts = rest;
            size.rows = of_table.iter().sum::<u64>() as usize;
            for part in self.listing.parts.values_mut().filter(|part| part.piece.table == table) {
                part.start = of_table[..part.piece.block].iter().sum::<u64>() as usize;
            }
        }
        self.relist();
        Ok(())
    }

    /// Reads the ids of this rank's pieces. They come into force with
    /// [`Model::take_ids`]; until then only the shapes of tensors are others.
    pub(super) fn load_ids(&mut self, stored: &dyn Stored, with_states: bool) -> Result<()> {
        self.listing = Listing::default();
        for table in dynamic_tables(self.tables.schema()) {
            let prefix = format!("tables.{}", self.tables.schema().tables()[table].name);
            let source = Source { stored, prefix: &prefix };
            // What is not there, or is something else, is told when tensors are compared.
            let Some(&[rows]) = source.shape(IdTensor::Ids, Dtype::U64) else { continue };
            let blocks = source.shape(IdTensor::Clock, Dtype::U64).map_or(0, |shape| shape[0]);
            let known = [IdTensor::SeenSteps, IdTensor::Occurrences, IdTensor::Rows];
            let is_known = source.shape(IdTensor::Clock, Dtype::U64) == Some(&[blocks, 2])
                && known.iter().all(|&what| source.shape(what, Dtype::U64) == Some(&[rows]));
            let from_blocks = (with_states && is_known).then_some(blocks);
            self.listing.sizes.insert(table, Size { rows, blocks });
            for piece in self.tables.pieces(table) {
                let (store, number) = self.tables.of_piece(&piece);
                let options = store.id_options(number)?;
                let total = self.tables.row_blocks(table) as u64;
                let span = source.span(rows, piece.block as u64, total)?;
                let (state, map, order) = source.map(span.clone(), &piece, options, from_blocks)?;
                let key = (table, piece.held);
                self.listing.loaded.push((table, piece.held, map));
                self.listing.parts.insert(key, Part { piece, start: span.start, order, state });
            }
        }
        self.relist();
        Ok(())
    }

    /// Puts ids that were loaded into their tables.
    pub(super) fn take_ids(&mut self) -> Result<()> {
        for (table, held, map) in std::mem::take(&mut self.listing.loaded) {
            let piece = &self.listing.parts[&(table, held)].piece;
            let (store, number) = self.tables.of_piece_mut(piece);
            store.set_ids(number, map)?;
        }
        Ok(())
    }

    /// Forgets the listing: a step changes what it says.
    pub(super) fn unlist(&mut self) {
        self.listing = Listing::default();
    }

    fn relist(&mut self) {
        let narrow = self.narrow;
        (self.tensors, self.homes) = super::tensors::logical_tensors(
            self.tables.schema(),
            &self.towers,
            narrow,
            &self.listing,
        );
    }
}

fn dynamic_tables(schema: &Schema) -> Vec<usize> {
    (0..schema.tables().len()).filter(|&table| schema.tables()[table].is_dynamic()).collect()
}

/// Where a table's ids are read from.
struct Source<'a> {
    stored: &'a dyn Stored,
    prefix: &'a str,
}

impl Source<'_> {
    fn name(&self, what: IdTensor) -> String {
        format!("{}.{}", self.prefix, what.name())
    }

    /// Shape of a tensor, if it is there and of that type.
    fn shape(&self, what: IdTensor, dtype: Dtype) -> Option<&[usize]> {
        let (found, shape) = self.stored.find(&self.name(what))?;
        (found == dtype).then_some(shape)
    }

    fn numbers(&self, what: IdTensor, rows: Range<usize>) -> Result<Vec<u64>> {
        let mut bytes = Vec::new();
        self.stored.read(&self.name(what), rows, &mut bytes)?;
        Ok(bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect())
    }

    /// The rows whose ids block `block` of `blocks` owns.
    fn span(&self, rows: usize, block: u64, blocks: u64) -> Result<Range<usize>> {
        let first_from = |block: u64| -> Result<usize> {
            let (mut low, mut high) = (0, rows);
            while low < high {
                let middle = low + (high - low) / 2;
                let id = self.numbers(IdTensor::Ids, middle..middle + 1)?[0];
                if owner_of(id, blocks) < block { low = middle + 1 } else { high = middle }
            }
            Ok(low)
        };
        Ok(first_from(block)?..first_from(block + 1)?)
    }

    fn wrong(&self, reason: impl std::fmt::Display) -> Error {
        let reason = format!("{}: {reason}", self.prefix);
        Error::Mismatch { path: self.stored.path().into(), reason }
    }

    /// The map of the ids in `span`, and the row of each. `blocks` is how many blocks there were,
    /// if what is known of the ids is to be taken over; else all are as if seen once.
    fn map(
        &self,
        span: Range<usize>,
        piece: &Piece,
        options: IdMapOptions,
        blocks: Option<usize>,
    ) -> Result<(IdMapState, IdMap, Vec<u64>)> {
        let ids = self.numbers(IdTensor::Ids, span.clone())?;
        let hashes = ids.iter().map(|&id| id_hash(id));
        if !hashes.is_sorted_by(|a, b| a < b) {
            return Err(self.wrong("its ids do not ascend by their hashes"));
        }
        let count = ids.len();
        let mut state = IdMapState {
            rows: (0..count as u64).collect(),
            seen_steps: vec![0; count],
            occurrences: vec![1; count],
            ids,
            ..IdMapState::default()
        };
        let mut sketches = Vec::new();
        let mut keeps_rows = false;
        if let Some(blocks) = blocks {
            state.seen_steps = self.numbers(IdTensor::SeenSteps, span.clone())?;
            state.occurrences = self.numbers(IdTensor::Occurrences, span.clone())?;
            let rows = self.numbers(IdTensor::Rows, span)?;
            // Where they were in this piece, they stay.
            keeps_rows = rows.iter().all(|row| piece.rows.contains(row));
            if keeps_rows {
                state.rows = rows.iter().map(|row| row - piece.rows.start).collect();
            }
            let clocks = self.numbers(IdTensor::Clock, 0..blocks)?;
            let clocks = clocks.as_chunks::<2>().0;
            state.step = clocks.iter().map(|clock| clock[0]).max().unwrap_or(0);
            sketches = self.sketches(clocks, &options)?;
            if blocks == piece.blocks {
                // Each block goes on with its own counts.
                sketches = sketches.into_iter().skip(piece.block).take(1).collect();
            }
        }
        let mut sorted: Vec<usize> = (0..count).collect();
        sorted.sort_unstable_by_key(|&i| state.ids[i]);
        let pick = |from: &[u64]| sorted.iter().map(|&i| from[i]).collect();
        let mut first = IdMapState {
            ids: pick(&state.ids),
            rows: pick(&state.rows),
            seen_steps: pick(&state.seen_steps),
            occurrences: pick(&state.occurrences),
            step: state.step,
            sketch: None,
        };
        let refused = |error: tessera_cache::CacheError| self.wrong(error);
        if keeps_rows && sketches.len() <= 1 {
            first.sketch = sketches.pop();
            let map = IdMap::import(options, &first).map_err(refused)?;
            let order = state.rows.clone();
            return Ok((state, map, order));
        }
        // Rows are given anew: from the place in `span` to the row.
        first.rows = sorted.iter().map(|&i| i as u64).collect();
        let with_sketch = |sketch| IdMapState { sketch: Some(sketch), ..IdMapState::default() };
        let mut parts = vec![first];
        parts.extend(sketches.into_iter().map(with_sketch));
        let dealt = IdMap::deal(options, &parts, 0, 1).map_err(refused)?;
        let mut order = vec![IdMap::NONE; count];
        for moved in &dealt.moves {
            order[moved.from_row as usize] = moved.to_row;
        }
        Ok((state, dealt.map, order))
    }

    /// The sketches of all blocks, if admission counts and counted before.
    fn sketches(&self, clocks: &[[u64; 2]], options: &IdMapOptions) -> Result<Vec<SketchState>> {
        let Admission::Count { sketch: shape, .. } = options.admission else {
            return Ok(Vec::new());
        };
        if self.shape(IdTensor::Sketch, Dtype::U8) != Some(&[clocks.len(), shape.bytes() as usize])
        {
            // Told when tensors are compared.
            return Ok(Vec::new());
        }
        let read = |(block, clock): (usize, &[u64; 2])| {
            let mut cells = Vec::new();
            self.stored.read(&self.name(IdTensor::Sketch), block..block + 1, &mut cells)?;
            Ok(SketchState { shape, sightings: clock[1], cells })
        };
        clocks.iter().enumerate().map(read).collect()
    }
}
