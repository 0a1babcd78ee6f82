//! A model that is only tensors, spread over ranks as a test wants, with values that tell the
//! moment and the place they belong to.

use std::io;
use std::ops::Range;
use std::path::Path;

use tessera::Error;
use tessera::checkpoint::{self, Checkpoint, Extent, Files, Moment};
use tessera::tensors::{
    Block, Dtype, Field, ReadTensors, TablePart, Tensor, WriteTensors, element_bytes,
};
use tessera_cache::Plane;
use tessera_comm::{Communicator, Options, single};

/// Values that no checkpoint has.
pub const NOTHING: u8 = 0;

/// A tensor of the model.
pub fn tensor(name: &str, dtype: Dtype, shape: &[usize]) -> Tensor {
    let is_state = name.ends_with(".sum");
    Tensor { name: name.into(), dtype, shape: shape.into(), is_state }
}

/// A table with a state of one value a row.
pub fn table() -> Vec<Tensor> {
    vec![
        tensor("tables.a.weight", Dtype::F32, &[300, 16]),
        tensor("tables.a.sum", Dtype::F32, &[300]),
    ]
}

/// Blocks that tile each tensor, in the order of tensors, each with the ranks that keep it; the
/// first of them saves it.
#[derive(Clone, Debug)]
pub struct Layout {
    pub ranks: usize,
    pub blocks: Vec<(Block, Vec<usize>)>,
}

impl Layout {
    /// Everything on one rank.
    pub fn single(tensors: &[Tensor]) -> Self {
        let blocks = Block::all(tensors).into_iter().map(|block| (block, vec![0])).collect();
        Self { ranks: 1, blocks }
    }

    /// Each tensor cut into blocks of rows, one a rank.
    pub fn by_rows(tensors: &[Tensor], ranks: usize) -> Self {
        let cut = |block: &Block, rank| {
            let rows = part(block.rows.end, rank, ranks);
            (block.with_rows(rows), vec![rank])
        };
        let blocks = Block::all(tensors);
        let blocks = blocks.iter().flat_map(|block| (0..ranks).map(move |rank| cut(block, rank)));
        Self { ranks, blocks: blocks.collect() }
    }

    /// Each tensor cut into blocks of columns, one a rank. One value a row is kept by all.
    pub fn by_columns(tensors: &[Tensor], ranks: usize) -> Self {
        let mut blocks = Vec::new();
        for block in Block::all(tensors) {
            let columns = block.columns.end;
            if columns == 1 {
                blocks.push((block, (0..ranks).collect()));
                continue;
            }
            for rank in 0..ranks {
                let columns = part(columns, rank, ranks);
                blocks.push((Block { columns, ..block.clone() }, vec![rank]));
            }
        }
        Self { ranks, blocks }
    }

    /// Rank `rank`'s part of the model of `tensors` at `moment`.
    pub fn part(&self, tensors: &[Tensor], rank: usize, moment: u8) -> Part {
        let mut part = Part {
            tensors: tensors.to_vec(),
            saves: Vec::new(),
            held: Vec::new(),
            refuses_writes: false,
            changed: None,
        };
        for (block, keepers) in &self.blocks {
            if keepers[0] == rank {
                part.saves.push(block.clone());
            }
            if keepers.contains(&rank) {
                let bytes = values(&tensors[block.tensor], block, moment);
                part.held.push((block.clone(), bytes));
            }
        }
        part
    }
}

/// The part of `0..whole` of one of `ranks`.
fn part(whole: usize, rank: usize, ranks: usize) -> Range<usize> {
    whole * rank / ranks..whole * (rank + 1) / ranks
}

/// What a block holds at a moment: every element is another.
fn values(tensor: &Tensor, block: &Block, moment: u8) -> Vec<u8> {
    let element = element_bytes(tensor.dtype);
    let mut bytes = Vec::with_capacity(block.rows.len() * block.columns.len() * element);
    for row in block.rows.clone() {
        for column in block.columns.clone() {
            let place = (block.tensor << 56 | row << 16 | column) as u64;
            let mixed = (place ^ u64::from(moment) << 48).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            bytes.extend(&mixed.to_be_bytes()[..element]);
        }
    }
    bytes
}

/// One rank's part of a model.
pub struct Part {
    tensors: Vec<Tensor>,
    pub saves: Vec<Block>,
    held: Vec<(Block, Vec<u8>)>,
    pub refuses_writes: bool,
    /// Rows of tables that changed, if that is known.
    pub changed: Option<Vec<usize>>,
}

impl Part {
    /// Whether all it holds is of `moment`, states too if `states`, else those are of no moment.
    pub fn is(&self, moment: u8, states: bool) -> bool {
        self.held.iter().all(|(block, bytes)| {
            let tensor = &self.tensors[block.tensor];
            let moment = if tensor.is_state && !states { NOTHING } else { moment };
            *bytes == values(tensor, block, moment)
        })
    }

    /// Makes each row of what it holds as of the moment that `moment` gives its tensor and row.
    pub fn set_moments(&mut self, moment: impl Fn(usize, usize) -> u8) {
        for (block, bytes) in &mut self.held {
            bytes.clear();
            for row in block.rows.clone() {
                let here = block.with_rows(row..row + 1);
                let moment = moment(block.tensor, row);
                bytes.extend(values(&self.tensors[block.tensor], &here, moment));
            }
        }
    }

    /// The blocks that it holds and their bytes.
    pub fn contents(&self) -> &[(Block, Vec<u8>)] {
        &self.held
    }

    /// Which held block `block` is some rows of, and the bytes these take in it.
    fn place(&self, block: &Block) -> (usize, Range<usize>) {
        let at = self.held.iter().position(|(held, _)| {
            let inside = held.rows.start <= block.rows.start && block.rows.end <= held.rows.end;
            inside && (held.tensor, &held.columns) == (block.tensor, &block.columns)
        });
        let at = at.unwrap_or_else(|| panic!("{block:?} is not some rows of a block held"));
        let first = self.held[at].0.rows.start;
        let width = element_bytes(self.tensors[block.tensor].dtype) * block.columns.len();
        (at, (block.rows.start - first) * width..(block.rows.end - first) * width)
    }
}

impl ReadTensors for Part {
    fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    fn blocks(&self) -> Vec<Block> {
        self.saves.clone()
    }

    fn read_block(&self, block: &Block, out: &mut Vec<u8>) -> tessera::Result<()> {
        let (at, bytes) = self.place(block);
        out.clear();
        out.extend(&self.held[at].1[bytes]);
        Ok(())
    }

    /// Each block of a table with those of its states that it saves too.
    fn parts(&self) -> Vec<TablePart> {
        let name = |block: &Block| &self.tensors[block.tensor].name;
        let weights = self.saves.iter().filter(|block| name(block).ends_with(".weight"));
        let part = |block: &Block| {
            let table = name(block).strip_suffix("weight").unwrap();
            let is_its =
                |state: &&Block| name(state) == &format!("{table}sum") && state.rows == block.rows;
            let states = self.saves.iter().filter(is_its).cloned();
            let fields = [(block.clone(), Plane::Weights)]
                .into_iter()
                .chain(states.map(|state| (state, Plane::State)))
                .map(|(block, plane)| Field { block, plane, at: 0 });
            TablePart { rows: block.rows.clone(), fields: fields.collect(), cold: None }
        };
        // As in a model: a state with a number a row goes with the first block of columns.
        let mut parts: Vec<TablePart> = weights.map(part).collect();
        for part in &mut parts {
            if part.fields[0].block.columns.start > 0 {
                part.fields.truncate(1);
            }
        }
        parts
    }

    fn changed(&self, part: &TablePart) -> tessera::Result<Option<Vec<usize>>> {
        let within = |rows: &Vec<usize>| {
            rows.iter().copied().filter(|row| part.rows.contains(row)).collect()
        };
        Ok(self.changed.as_ref().map(within))
    }
}

impl WriteTensors for Part {
    fn held(&self) -> Vec<Block> {
        self.held.iter().map(|(block, _)| block.clone()).collect()
    }

    fn write_block(&mut self, block: &Block, bytes: &[u8]) -> tessera::Result<()> {
        if self.refuses_writes {
            let source = io::Error::other("the device is lost");
            return Err(Error::Write { path: "device".into(), source });
        }
        let (at, place) = self.place(block);
        self.held[at].1[place].copy_from_slice(bytes);
        Ok(())
    }
}

/// The moment of step `step`.
pub fn moment(step: u64) -> Moment {
    let text = format!(
        r#"{{"step":{step},"samples":0,"updates":{step},"position":{{"epoch":0,"sample":0}},
            "seed":1,"window":{{"capacity":1,"steps":[]}},"best":null,"judged":null,
            "evaluations_without_improvement":0}}"#
    );
    serde_json::from_str(&text).unwrap()
}

/// Writes `part` as step `step` of `run`.
pub fn save(
    files: &dyn Files,
    ranks: &Communicator,
    run: &Path,
    part: &Part,
    step: u64,
) -> tessera::Result<()> {
    let folder = run.join("checkpoints");
    let (moment, config) = (moment(step), toml::Table::new());
    checkpoint::write(files, ranks, &folder, part, &moment, &config, Extent::ROWS).map(|_| ())
}

/// A world of one.
pub fn alone() -> Communicator {
    single(&Options::default())
}

/// The step of the checkpoint of [`table`] that `path` means, and the moment of its values, whole.
pub fn loaded(path: &Path) -> (u64, u8) {
    let found = Checkpoint::find(path).unwrap();
    let mut part = Layout::single(&table()).part(&table(), 0, NOTHING);
    found.load(&alone(), &mut part, true).unwrap();
    let moment = (1..=9).find(|&moment| part.is(moment, true));
    (found.manifest.moment.step, moment.expect("one moment, not a mixture"))
}
