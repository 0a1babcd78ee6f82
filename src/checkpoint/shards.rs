//! The shards that one rank writes: its blocks, cut so that a file has a handy size.

use std::collections::HashMap;
use std::io::{self, BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use super::agree::Meet;
use super::files::{Files, OutFile};
use super::manifest::{Piece, Shard};
use crate::safetensors_io;
use crate::tensors::{Block, ReadTensors, Tensor};
use crate::{Error, Result};

/// Aimed-at bytes of a shard.
pub(super) const SHARD_BYTES: usize = 64 << 20;

/// Writes `blocks` of `model`, which are rank `rank`'s, to files in `folder`.
///
/// Errors: any failed operation, with the file; what the model says.
pub(super) fn write_shards(
    files: &dyn Files,
    folder: &Path,
    rank: usize,
    model: &dyn ReadTensors,
    blocks: &[Block],
    meet: &mut Meet,
) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    for (number, pieces) in plan(model.tensors(), blocks, SHARD_BYTES).iter().enumerate() {
        let file = format!("shard-{rank:05}-{number:05}.safetensors");
        shards.push(write_shard(files, &folder.join(&file), file, model, pieces, meet)?);
        meet()?;
    }
    Ok(shards)
}

/// Cuts blocks at rows so that a shard holds about `shard_bytes`. Names in a file differ, so that
/// a second block of a tensor goes to another one.
fn plan(tensors: &[Tensor], blocks: &[Block], shard_bytes: usize) -> Vec<Vec<Block>> {
    let mut shards = Vec::new();
    let mut shard: Vec<Block> = Vec::new();
    let mut room = shard_bytes;
    for block in blocks.iter().filter(|block| !block.is_empty()) {
        let tensor = &tensors[block.tensor];
        let row_bytes = tensor.row_bytes() / tensor.columns() * block.columns.len();
        let mut next = block.rows.start;
        while next < block.rows.end {
            let twice = shard.last().is_some_and(|last| last.tensor == block.tensor);
            let rows = if twice { 0 } else { (room / row_bytes).min(block.rows.end - next) };
            if rows > 0 {
                shard.push(block.with_rows(next..next + rows));
                room -= rows * row_bytes;
                next += rows;
            } else {
                // No whole row fits: close the shard, and let a giant row have one of its own.
                if !shard.is_empty() {
                    shards.push(std::mem::take(&mut shard));
                }
                room = shard_bytes.max(row_bytes);
            }
        }
    }
    if !shard.is_empty() {
        shards.push(shard);
    }
    shards
}

fn write_shard(
    files: &dyn Files,
    path: &Path,
    file: String,
    model: &dyn ReadTensors,
    blocks: &[Block],
    meet: &mut Meet,
) -> Result<Shard> {
    let all = model.tensors();
    let tensors: Vec<Tensor> = blocks.iter().map(|block| part(&all[block.tensor], block)).collect();
    let pieces = blocks.iter().map(|block| piece(&all[block.tensor], block)).collect();
    write_file(files, path, file, &tensors, pieces, |i, rows, buffer| {
        meet()?;
        let first = blocks[i].rows.start;
        let rows = first + rows.start..first + rows.end;
        model.read_block(&blocks[i].with_rows(rows), buffer)
    })
}

/// Writes one safetensors file, as [`safetensors_io::write`], and syncs it.
pub(super) fn write_file(
    files: &dyn Files,
    path: &Path,
    file: String,
    tensors: &[Tensor],
    pieces: Vec<Piece>,
    read: impl FnMut(usize, Range<usize>, &mut Vec<u8>) -> Result<()>,
) -> Result<Shard> {
    let wrote = |source| Error::Write { path: path.into(), source };
    let mut out = BufWriter::new(Counted::new(files.create(path).map_err(wrote)?));
    safetensors_io::write(&mut out, path, tensors, HashMap::new(), read)?;
    let mut out = out.into_inner().map_err(|error| wrote(error.into_error()))?;
    out.file.sync().map_err(wrote)?;
    Ok(Shard { file, bytes: out.bytes, crc32: out.crc.finalize(), pieces })
}

/// A block as a tensor of its own: in the tensor's shape if its rows are whole, else a matrix.
pub(super) fn part(tensor: &Tensor, block: &Block) -> Tensor {
    let mut part = tensor.clone();
    if block.columns.len() == tensor.columns() {
        part.shape[0] = block.rows.len();
    } else {
        part.shape = vec![block.rows.len(), block.columns.len()];
    }
    part
}

/// What the manifest says of a block.
pub(super) fn piece(tensor: &Tensor, block: &Block) -> Piece {
    let cut = block.columns.len() < tensor.columns();
    Piece {
        tensor: tensor.name.clone(),
        first_row: block.rows.start as u64,
        rows: block.rows.len() as u64,
        first_column: cut.then_some(block.columns.start as u64),
        columns: cut.then_some(block.columns.len() as u64),
        listed: None,
    }
}

/// Counts and sums what passes to a file.
struct Counted {
    file: Box<dyn OutFile>,
    bytes: u64,
    crc: crc32fast::Hasher,
}

impl Counted {
    fn new(file: Box<dyn OutFile>) -> Self {
        Self { file, bytes: 0, crc: crc32fast::Hasher::new() }
    }
}

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.crc.update(&bytes[..written]);
        self.bytes += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::Dtype;

    #[test]
    fn shards_hold_whole_rows_of_a_block_and_every_row_once() {
        let tensor = |rows, width| Tensor {
            name: format!("t{rows}x{width}"),
            dtype: Dtype::F32,
            shape: vec![rows, width],
            is_state: false,
        };
        let tensors = [tensor(10, 3), tensor(0, 5), tensor(2, 100), tensor(7, 1)];
        let block = |tensor, rows, columns| Block { tensor, rows, columns };
        let parts = [
            block(0, 0..4, 0..1),
            block(0, 0..4, 1..3),
            block(0, 6..10, 0..3),
            block(1, 0..0, 2..5),
            block(2, 1..1, 0..100),
            block(2, 0..1, 0..100),
            block(2, 1..2, 20..60),
            block(3, 7..7, 0..1),
            block(3, 1..6, 0..1),
        ];
        let bytes = |block: &Block| block.rows.len() * block.columns.len() * 4;
        for blocks in [&parts[..], &Block::all(&tensors)] {
            for shard_bytes in [1, 12, 50, 100, 1000, 1 << 20] {
                let shards = plan(&tensors, blocks, shard_bytes);
                for shard in &shards {
                    assert!(!shard.is_empty());
                    let total: usize = shard.iter().map(bytes).sum();
                    assert!(total <= shard_bytes.max(400), "{total} bytes in a shard");
                    let tensors = shard.iter().map(|block| block.tensor);
                    assert!(tensors.is_sorted_by(|a, b| a < b), "a tensor twice: {shard:?}");
                }
                let mut pieces = shards.into_iter().flatten().peekable();
                for block in blocks.iter().filter(|block| !block.is_empty()) {
                    let mut next = block.rows.start;
                    while next < block.rows.end {
                        let piece = pieces.next().unwrap();
                        assert_eq!(piece, block.with_rows(next..piece.rows.end));
                        next = piece.rows.end;
                    }
                }
                assert_eq!(pieces.next(), None);
            }
        }
    }
}
