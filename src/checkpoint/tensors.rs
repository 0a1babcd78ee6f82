//! The tensors of a checkpoint, read block by block without loading a model.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::agree::Meet;
use super::cold::ColdReader;
use super::manifest::{Manifest, Piece, Shard};
use super::{Checkpoint, MANIFEST, cover};
use crate::safetensors_io::TensorFile;
use crate::tensors::{Block, Dtype, Stored, Tensor, element_bytes};
use crate::{Error, Result};

/// Files that are open at a time, at most: a checkpoint may have more than a process may open,
/// and ranks may be threads of one.
const OPEN_FILES_MAX: usize = 4;

/// A checkpoint as a list of logical tensors, whoever wrote which part.
pub struct CheckpointTensors<'a> {
    checkpoint: &'a Checkpoint,
    tensors: Vec<Tensor>,
    pieces: Vec<Pieces>,
    /// All files of rows, with their folders.
    shards: Vec<(PathBuf, &'a Shard)>,
    cold: ColdReader<'a>,
    /// Files by number, the last used at the end.
    open: RefCell<VecDeque<(usize, Rc<OpenFile>)>>,
}

/// A file that is open, and the numbers of rows that were read from it.
struct OpenFile {
    file: TensorFile,
    rows: RefCell<HashMap<String, Rc<Vec<u64>>>>,
}

/// The pieces of one tensor, of each level of the chain apart, the oldest first: where two have a
/// row, the last one's counts.
#[derive(Default)]
struct Pieces {
    levels: Vec<Level>,
}

#[derive(Default)]
struct Level {
    /// By first row.
    places: Vec<Place>,
    /// Most rows of a piece.
    rows_max: usize,
}

/// Where a block of a tensor is.
struct Place {
    block: Block,
    source: Source,
}

/// What holds it.
enum Source {
    /// All of it lies in this shard.
    Shard(usize),
    /// Those rows lie in this shard whose numbers are in the shard's tensor of this name.
    Listed(usize, String),
    /// A field of a piece in a log's files.
    Cold { piece: usize, field: usize },
}

impl<'a> CheckpointTensors<'a> {
    /// Checks all files of `checkpoint` and finds every piece.
    ///
    /// Errors: damage, by file.
    pub fn open(checkpoint: &'a Checkpoint) -> Result<Self> {
        checkpoint.check_pieces()?;
        checkpoint.verify(0, 1, &mut || Ok(()))?;
        Self::index(checkpoint)
    }

    /// Finds every piece of a checkpoint whose files and pieces were checked.
    ///
    /// Errors: an element type that models do not have.
    pub(super) fn index(checkpoint: &'a Checkpoint) -> Result<Self> {
        let manifest = &checkpoint.manifest;
        let mut tensors = Vec::new();
        let mut number_of = HashMap::new();
        for entry in &manifest.tensors {
            number_of.insert(entry.name.as_str(), tensors.len());
            tensors.push(Tensor {
                name: entry.name.clone(),
                dtype: dtype(&checkpoint.folder, &entry.dtype)?,
                shape: entry.shape.iter().map(|&n| n as usize).collect(),
                is_state: is_state(&entry.name),
            });
        }
        let mut pieces: Vec<Pieces> = tensors.iter().map(|_| Pieces::default()).collect();
        let place = |piece: &Piece, source: Source| {
            let tensor = number_of[piece.tensor.as_str()];
            let (first, end) =
                cover::columns(&manifest.tensors[tensor], piece).expect("its place was checked");
            let first_row = piece.first_row as usize;
            let rows = first_row..first_row + piece.rows as usize;
            let block = Block { tensor, rows, columns: first as usize..end as usize };
            Place { block, source }
        };
        let cold = checkpoint.cold_pieces();
        let mut shards = Vec::new();
        for level in checkpoint.levels() {
            pieces.iter_mut().for_each(|pieces| pieces.levels.push(Level::default()));
            let mut add = |place: Place| pieces[place.block.tensor].add(place);
            for (number, piece) in cold.iter().enumerate() {
                if level.cold.iter().any(|of_level| std::ptr::eq(of_level, *piece)) {
                    for (field, of_field) in Manifest::cold_pieces(piece).enumerate() {
                        add(place(&of_field, Source::Cold { piece: number, field }));
                    }
                }
            }
            for shard in &level.shards {
                for piece in &shard.pieces {
                    let source = match &piece.listed {
                        None => Source::Shard(shards.len()),
                        Some(listed) => Source::Listed(shards.len(), listed.rows.clone()),
                    };
                    add(place(piece, source));
                }
                shards.push((checkpoint.folder_of(level.moment.step), shard));
            }
        }
        for level in pieces.iter_mut().flat_map(|pieces| &mut pieces.levels) {
            level.places.sort_by_key(|place| place.block.rows.start);
        }
        let (cold, open) = (ColdReader::new(checkpoint, cold), RefCell::default());
        Ok(Self { checkpoint, tensors, pieces, shards, cold, open })
    }

    /// Its tensors, in a fixed order.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Number of the tensor of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|tensor| tensor.name == name)
    }

    /// Replaces `out` by the little-endian elements of `block`, (rows, columns).
    ///
    /// Errors: a failed read.
    pub fn read_block(&self, block: &Block, out: &mut Vec<u8>) -> Result<()> {
        self.read_block_while(block, out, &mut || Ok(()))
    }

    /// [`Self::read_block`], where other ranks may wait meanwhile.
    pub(super) fn read_block_while(
        &self,
        block: &Block,
        out: &mut Vec<u8>,
        meet: &mut Meet,
    ) -> Result<()> {
        let tensor = &self.tensors[block.tensor];
        let element = element_bytes(tensor.dtype);
        let stride = block.columns.len() * element;
        out.resize(block.rows.len() * stride, 0);
        for place in self.pieces[block.tensor].of(&block.rows) {
            let piece = &place.block;
            let rows = block.rows.start.max(piece.rows.start)..block.rows.end.min(piece.rows.end);
            let columns = block.columns.start.max(piece.columns.start)
                ..block.columns.end.min(piece.columns.end);
            if rows.is_empty() || columns.is_empty() {
                continue;
            }
            let at = (rows.start - block.rows.start) * stride
                + (columns.start - block.columns.start) * element;
            let to = &mut out[at..];
            if let Source::Cold { piece, field } = place.source {
                self.cold.read(piece, field, rows, columns, element, to, stride, meet)?;
                continue;
            }
            let columns = columns.start - piece.columns.start..columns.end - piece.columns.start;
            match &place.source {
                Source::Shard(shard) => {
                    let open = self.file(*shard)?;
                    let stored = open.file.tensor(&tensor.name).expect("open_shard found it");
                    let rows = rows.start - piece.rows.start..rows.end - piece.rows.start;
                    open.file.read(stored, rows, columns, to, stride)?;
                }
                Source::Listed(shard, name) => {
                    self.read_listed(
                        *shard,
                        name,
                        &tensor.name,
                        rows,
                        columns,
                        element,
                        to,
                        stride,
                    )?;
                }
                Source::Cold { .. } => unreachable!("read above"),
            }
        }
        Ok(())
    }

    /// Reads those of `rows` that a file lists over what is in `out`.
    #[allow(clippy::too_many_arguments)] // a rectangle, and where it goes
    fn read_listed(
        &self,
        shard: usize,
        name: &str,
        tensor: &str,
        rows: Range<usize>,
        columns: Range<usize>,
        element: usize,
        out: &mut [u8],
        stride: usize,
    ) -> Result<()> {
        let open = self.file(shard)?;
        let all = open.rows(&self.shards[shard].0.join(&self.shards[shard].1.file), name)?;
        let first = all.partition_point(|&row| row < rows.start as u64);
        let end = all.partition_point(|&row| row < rows.end as u64);
        let width = columns.len() * element;
        let mut bytes = vec![0; (end - first) * width];
        let stored = open.file.tensor(tensor).expect("open_shard found it");
        open.file.read(stored, first..end, columns, &mut bytes, width)?;
        for (row, bytes) in all[first..end].iter().zip(bytes.chunks_exact(width)) {
            out[(*row as usize - rows.start) * stride..][..width].copy_from_slice(bytes);
        }
        Ok(())
    }

    /// The file of a shard, open.
    fn file(&self, shard: usize) -> Result<Rc<OpenFile>> {
        let mut open = self.open.borrow_mut();
        let file = match open.iter().position(|&(number, _)| number == shard) {
            Some(at) => open.remove(at).expect("a position in the list").1,
            None => {
                let (folder, shard) = &self.shards[shard];
                let file = self.checkpoint.open_shard(folder, shard)?;
                Rc::new(OpenFile { file, rows: RefCell::default() })
            }
        };
        // Each level may have a file of the rows at hand.
        if open.len() >= OPEN_FILES_MAX + self.checkpoint.manifest.chain.len().min(60) {
            open.pop_front();
        }
        open.push_back((shard, Rc::clone(&file)));
        Ok(file)
    }
}

impl Pieces {
    /// Adds a place to the newest level. What is all in it has no say in older ones.
    fn add(&mut self, place: Place) {
        let (newest, older) = self.levels.split_last_mut().expect("a level was begun");
        if !matches!(place.source, Source::Listed(..)) {
            let (rows, columns) = (&place.block.rows, &place.block.columns);
            for level in older {
                level.places.retain(|old| {
                    let old = &old.block;
                    let inside = rows.start <= old.rows.start
                        && old.rows.end <= rows.end
                        && columns.start <= old.columns.start
                        && old.columns.end <= columns.end;
                    !inside
                });
            }
        }
        newest.rows_max = newest.rows_max.max(place.block.rows.len());
        newest.places.push(place);
    }

    /// The pieces that may have some of `rows`, in the order in which they count.
    fn of(&self, rows: &Range<usize>) -> impl Iterator<Item = &Place> {
        self.levels.iter().flat_map(move |Level { places, rows_max }| {
            // Where those before end cannot be among the rows.
            let from = places.partition_point(|p| p.block.rows.start + rows_max <= rows.start);
            places[from..].iter().take_while(move |p| p.block.rows.start < rows.end)
        })
    }
}

impl OpenFile {
    /// The numbers of rows in a tensor of the file, `path` for messages.
    fn rows(&self, path: &Path, name: &str) -> Result<Rc<Vec<u64>>> {
        let mut known = self.rows.borrow_mut();
        if let Some(rows) = known.get(name) {
            return Ok(Rc::clone(rows));
        }
        let stored = self.file.tensor(name).expect("open_shard found it");
        let count = stored.shape[0];
        let mut bytes = vec![0; count * 8];
        self.file.read(stored, 0..count, 0..1, &mut bytes, 8)?;
        let words = bytes.as_chunks::<8>().0;
        let rows: Vec<u64> = words.iter().map(|word| u64::from_le_bytes(*word)).collect();
        if !rows.is_sorted_by(|a, b| a < b) {
            let reason = format!("{name}: numbers of rows do not ascend");
            return Err(Error::BadFile { path: path.into(), reason });
        }
        let rows = Rc::new(rows);
        known.insert(name.to_owned(), Rc::clone(&rows));
        Ok(rows)
    }
}

impl Stored for CheckpointTensors<'_> {
    fn path(&self) -> &Path {
        &self.checkpoint.folder
    }

    fn find(&self, name: &str) -> Option<(Dtype, &[usize])> {
        let tensor = &self.tensors[self.find(name)?];
        Some((tensor.dtype, &tensor.shape))
    }

    fn read(&self, name: &str, rows: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let tensor = self.find(name).expect("who reads it has found it");
        self.read_block(&Block::whole(tensor, &self.tensors[tensor]).with_rows(rows), out)
    }
}

fn dtype(folder: &Path, name: &str) -> Result<Dtype> {
    [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::U64, Dtype::U8]
        .into_iter()
        .find(|dtype| dtype.to_string() == name)
        .ok_or_else(|| Error::BadFile {
            path: folder.join(MANIFEST),
            reason: format!("element type {name}"),
        })
}

/// Whether a logical name is that of an optimizer state, not of a weight.
fn is_state(name: &str) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    if name.starts_with("tables.") {
        !["weight", "wide", "ids"].contains(&last)
    } else {
        // `dense.cross.L.v` and `.w` are weights; a state has one more part.
        name.split('.').count() > 4
    }
}

#[cfg(test)]
mod tests {
    use super::is_state;

    #[test]
    fn states_are_told_from_weights_by_name() {
        for weight in [
            "tables.a.weight",
            "tables.a.wide",
            "tables.a.ids",
            "dense.top.0.bias",
            "dense.cross.1.v",
        ] {
            assert!(!is_state(weight), "{weight}");
        }
        for state in
            ["tables.a.sum", "tables.a.wide.sum", "dense.top.0.bias.m", "dense.cross.1.v.v"]
        {
            assert!(is_state(state), "{state}");
        }
    }
}
