//! Reads a weights file (`--init`) into a model, checking everything before the first write.

use std::collections::HashSet;
use std::path::Path;

use tessera_comm::Communicator;

use super::agree::{Meet, together};
use super::load::mismatch;
use crate::safetensors_io::{TensorFile, chunks};
use crate::tensors::{Block, Dtype, Tensor, WriteTensors, convert, element_bytes};
use crate::{Error, Result};

/// Reads a weights file (`--init`) into `model`. States may be lacking; then they stay as they
/// are. A table stored in another float type is rounded to nearest.
///
/// Each rank reads what its model holds. A collective; all ranks must see the same file.
///
/// Errors, on all ranks: [`Error::Mismatch`] listing every weight that is missing, has another
/// shape or is not of this model, or a value that is not finite; no rank's model is written then.
pub fn init(path: &Path, ranks: &Communicator, model: &mut dyn WriteTensors) -> Result<()> {
    let mut opened = None;
    together(ranks, |meet| {
        let file = TensorFile::open(path)?;
        model.prepare(&file, false)?;
        compare(path, &file, model)?;
        // All values are looked at before the first is written.
        for held in model.held() {
            let tensor = &model.tensors()[held.tensor];
            let look = |block: &Block, bytes: &[u8]| finite(path, tensor, block, bytes);
            pieces(&file, tensor, &held, meet, look)?;
        }
        opened = Some(file);
        Ok(())
    })?;
    let file = opened.expect("every rank has opened it, or none gets here");
    together(ranks, |meet| {
        model.begin()?;
        for mut group in model.held_together() {
            // States that the file lacks stay as they are.
            group.retain(|held| file.tensor(&model.tensors()[held.tensor].name).is_some());
            let Some(first) = group.first() else { continue };
            let row_bytes = group.iter().map(|held| model.tensors()[held.tensor].row_bytes()).sum();
            for rows in chunks(first.rows.clone(), row_bytes) {
                meet()?;
                let blocks: Vec<Block> =
                    group.iter().map(|held| held.with_rows(rows.clone())).collect();
                let read = |block: &Block| read(&file, &model.tensors()[block.tensor], block);
                let bytes = blocks.iter().map(read).collect::<Result<Vec<_>>>()?;
                model.write_blocks(&blocks, &bytes)?;
            }
        }
        Ok(())
    })
    .map(|_| ())
}

/// Holds the file's tensors against the model's.
fn compare(path: &Path, file: &TensorFile, model: &dyn WriteTensors) -> Result<()> {
    let mut faults = Vec::new();
    for tensor in model.tensors() {
        match file.tensor(&tensor.name) {
            None if tensor.is_state => {}
            None => faults.push(format!("{} is missing", tensor.name)),
            // Ids are known by other means than their number of bytes; the rest is not read.
            Some(_) if tensor.is_state && !is_float(tensor.dtype) => {}
            Some(stored) if stored.shape != tensor.shape => faults.push(format!(
                "{} has shape {:?}, the model {:?}",
                tensor.name, stored.shape, tensor.shape
            )),
            Some(stored) if is_float(stored.dtype) != is_float(tensor.dtype) => {
                let wanted = if is_float(tensor.dtype) { "a float" } else { "U64" };
                faults.push(format!("{} has type {}, not {wanted}", tensor.name, stored.dtype));
            }
            Some(_) => {}
        }
    }
    let known: HashSet<&str> = model.tensors().iter().map(|tensor| tensor.name.as_str()).collect();
    for stored in file.tensors().iter().filter(|stored| !known.contains(stored.name.as_str())) {
        faults.push(format!("the model has no {}", stored.name));
    }
    mismatch(path, faults)
}

/// Hands all rows of `held`, a block of `tensor`, as the model's type, to `take` piece by piece,
/// if the file has the tensor.
fn pieces(
    file: &TensorFile,
    tensor: &Tensor,
    held: &Block,
    meet: &mut Meet,
    mut take: impl FnMut(&Block, &[u8]) -> Result<()>,
) -> Result<()> {
    let Some(stored) = file.tensor(&tensor.name) else { return Ok(()) };
    for rows in chunks(held.rows.clone(), tensor.columns() * element_bytes(stored.dtype)) {
        meet()?;
        let block = held.with_rows(rows);
        take(&block, &read(file, tensor, &block)?)?;
    }
    Ok(())
}

/// The elements of a block of `tensor`, which the file has, as the model's type.
fn read(file: &TensorFile, tensor: &Tensor, block: &Block) -> Result<Vec<u8>> {
    let stored = file.tensor(&tensor.name).expect("the file has it");
    let stride = block.columns.len() * element_bytes(stored.dtype);
    let mut bytes = vec![0; block.rows.len() * stride];
    file.read(stored, block.rows.clone(), block.columns.clone(), &mut bytes, stride)?;
    Ok(convert(&bytes, stored.dtype, tensor.dtype).expect("floats, checked"))
}

/// Refuses values that are not finite in the type that the model stores.
fn finite(path: &Path, tensor: &Tensor, block: &Block, bytes: &[u8]) -> Result<()> {
    let values = convert(bytes, tensor.dtype, Dtype::F32).expect("a model holds floats");
    let values = values.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let Some((at, value)) = values.enumerate().find(|(_, value)| !value.is_finite()) else {
        return Ok(());
    };
    let width = block.columns.len();
    Err(Error::BadFile {
        path: path.into(),
        reason: format!(
            "{} row {} column {} is {value} as {}",
            tensor.name,
            block.rows.start + at / width,
            block.columns.start + at % width,
            tensor.dtype
        ),
    })
}

fn is_float(dtype: Dtype) -> bool {
    matches!(dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16 | Dtype::F64)
}
