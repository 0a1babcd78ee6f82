//! Increments of tables that lie in memory: files of the rows that changed, whole rows by number.
//!
//! ```text
//! part's changed rows -> cut into lists of about 64 MiB -> a file each:
//!     tables.T.rows    [count]            numbers in the table, ascending
//!     tables.T.weight  [count, columns]   and the states: the same rows
//! ```

use std::path::Path;

use super::agree::Meet;
use super::files::Files;
use super::manifest::{Listed, Shard};
use super::shards::{SHARD_BYTES, part, piece, write_file};
use crate::Result;
use crate::tensors::{Block, Dtype, ReadTensors, TablePart, Tensor};

/// Most rows between two that changed that are read with them, not to read them apart.
const GAP_ROWS: usize = 8;

/// Writes `rows`, ascending, of each of `parts`, which are rank `rank`'s, to files in `folder`.
///
/// Errors: any failed operation, with the file; what the model says.
pub(super) fn write_changes(
    files: &dyn Files,
    folder: &Path,
    rank: usize,
    model: &dyn ReadTensors,
    parts: &[(TablePart, Vec<usize>)],
    meet: &mut Meet,
) -> Result<Vec<Shard>> {
    let mut shards = Vec::new();
    for (part, rows) in parts {
        let row_bytes: usize = part.fields.iter().map(|f| row_bytes(model, &f.block)).sum();
        for rows in rows.chunks((SHARD_BYTES / (row_bytes + 8)).max(1)) {
            let file = format!("changes-{rank:05}-{:05}.safetensors", shards.len());
            shards.push(write_list(files, &folder.join(&file), file, model, part, rows, meet)?);
            meet()?;
        }
    }
    Ok(shards)
}

fn row_bytes(model: &dyn ReadTensors, block: &Block) -> usize {
    let tensor = &model.tensors()[block.tensor];
    tensor.row_bytes() / tensor.columns().max(1) * block.columns.len()
}

/// Writes some rows of a part.
fn write_list(
    files: &dyn Files,
    path: &Path,
    file: String,
    model: &dyn ReadTensors,
    table: &TablePart,
    rows: &[usize],
    meet: &mut Meet,
) -> Result<Shard> {
    let all = model.tensors();
    let weights = &all[table.fields[0].block.tensor].name;
    // Beside the table's states, none of which has this name.
    let numbers = match weights.strip_suffix(".weight") {
        Some(table) => format!("{table}.rows"),
        None => format!("{weights}.rows"),
    };
    let listed = Listed { count: rows.len() as u64, rows: numbers.clone() };
    let span = rows[0]..rows[rows.len() - 1] + 1;
    let shape = vec![rows.len()];
    let mut tensors = vec![Tensor { name: numbers, dtype: Dtype::U64, shape, is_state: false }];
    let mut pieces = Vec::new();
    for field in &table.fields {
        let tensor = &all[field.block.tensor];
        tensors.push(part(tensor, &field.block.with_rows(0..rows.len())));
        let piece = piece(tensor, &field.block.with_rows(span.clone()));
        pieces.push(super::Piece { listed: Some(listed.clone()), ..piece });
    }
    let mut run_bytes = Vec::new();
    write_file(files, path, file, &tensors, pieces, |i, here, buffer| {
        meet()?;
        let rows = &rows[here];
        buffer.clear();
        if i == 0 {
            buffer.extend(rows.iter().flat_map(|&row| (row as u64).to_le_bytes()));
            return Ok(());
        }
        let block = &table.fields[i - 1].block;
        let width = row_bytes(model, block);
        for run in rows.chunk_by(|a, b| b - a <= GAP_ROWS) {
            let (first, end) = (run[0], run[run.len() - 1] + 1);
            model.read_block(&block.with_rows(first..end), &mut run_bytes)?;
            for row in run {
                buffer.extend_from_slice(&run_bytes[(row - first) * width..][..width]);
            }
        }
        Ok(())
    })
}
