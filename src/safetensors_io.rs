//! Safetensors files, written as a stream and read through a memory map.
//!
//! The library's own writer wants each tensor whole in memory; ours writes the header and then
//! rows in pieces, so a table of any size passes through a fixed buffer.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Metadata, TensorInfo, TensorView};

use crate::tensors::Tensor;
use crate::{Error, Result};

/// Bytes of rows that pass through memory at a time.
const CHUNK_BYTES: usize = 8 << 20;

/// Writes a safetensors file of `tensors` to `out`.
///
/// `read(i, rows, buffer)` replaces `buffer` by the bytes of `rows` of `tensors[i]`. Wider types
/// come first in the file, so that all data is aligned to its type. `place` is the file's name for
/// messages.
///
/// Errors: what `read` says, or the failed write.
pub fn write(
    out: &mut dyn Write,
    place: &Path,
    tensors: &[Tensor],
    metadata: HashMap<String, String>,
    mut read: impl FnMut(usize, Range<usize>, &mut Vec<u8>) -> Result<()>,
) -> Result<()> {
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(tensors[i].dtype));
    let mut offset = 0;
    let mut infos = Vec::with_capacity(tensors.len());
    for &i in &order {
        let tensor = &tensors[i];
        let end = offset + tensor.rows() * tensor.row_bytes();
        let info = TensorInfo {
            dtype: tensor.dtype,
            shape: tensor.shape.clone(),
            data_offsets: (offset, end),
        };
        infos.push((tensor.name.clone(), info));
        offset = end;
    }
    let failed = |source: io::Error| Error::Write { path: place.into(), source };
    let metadata = (!metadata.is_empty()).then_some(metadata);
    let header = Metadata::new(metadata, infos)
        .map_err(|error| failed(io::Error::other(error.to_string())))?;
    let mut header =
        serde_json::to_vec(&header).map_err(|error| failed(io::Error::other(error)))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    out.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
    out.write_all(&header).map_err(failed)?;

    let mut buffer = Vec::new();
    for &i in &order {
        let tensor = &tensors[i];
        let rows_a_chunk = (CHUNK_BYTES / tensor.row_bytes().max(1)).max(1);
        for first in (0..tensor.rows()).step_by(rows_a_chunk) {
            let rows = first..(first + rows_a_chunk).min(tensor.rows());
            let bytes = rows.len() * tensor.row_bytes();
            read(i, rows, &mut buffer)?;
            assert_eq!(buffer.len(), bytes, "{}: a reader filled the rows asked for", tensor.name);
            out.write_all(&buffer).map_err(failed)?;
        }
    }
    Ok(())
}

/// A safetensors file in a memory map.
pub struct MappedFile {
    path: PathBuf,
    map: memmap2::Mmap,
}

impl MappedFile {
    /// Maps `path`.
    ///
    /// Errors: a file that cannot be read.
    pub fn open(path: &Path) -> Result<Self> {
        let unreadable = |source| Error::Read { path: path.into(), source };
        let file = File::open(path).map_err(unreadable)?;
        // SAFETY: the map is read-only, and checkpoint files never change once they are written;
        // a user who truncates a file while it is being read gets a bus error, as with any map.
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(unreadable)?;
        Ok(Self { path: path.into(), map })
    }

    /// The bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Its tensors.
    ///
    /// Errors: a file that is not safetensors.
    pub fn tensors(&self) -> Result<Vec<(String, TensorView<'_>)>> {
        let file = SafeTensors::deserialize(&self.map).map_err(|error| Error::BadFile {
            path: self.path.clone(),
            reason: format!("not a safetensors file: {error}"),
        })?;
        Ok(file.tensors())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::Dtype;

    #[test]
    fn what_is_written_is_read_by_the_library() {
        let tensor = |name: &str, dtype, shape: &[usize]| Tensor {
            name: name.into(),
            dtype,
            shape: shape.into(),
            is_state: false,
        };
        let tensors = [
            tensor("h", Dtype::F16, &[3, 1]),
            tensor("w", Dtype::F32, &[(9 << 20) / 4, 2]),
            tensor("none", Dtype::F32, &[0, 4]),
        ];
        let mut file = Vec::new();
        let metadata = HashMap::from([("k".to_owned(), "v".to_owned())]);
        write(&mut file, Path::new("x"), &tensors, metadata, |i, rows, out| {
            out.clear();
            for row in rows {
                if i == 0 {
                    out.extend((row as u16).to_le_bytes());
                } else {
                    out.extend((row as f32).to_le_bytes());
                    out.extend(1f32.to_le_bytes());
                }
            }
            Ok(())
        })
        .unwrap();
        let read = SafeTensors::deserialize(&file).unwrap();
        assert_eq!(read.len(), 3);
        assert_eq!(read.tensor("h").unwrap().data(), [0, 0, 1, 0, 2, 0]);
        assert_eq!(read.tensor("none").unwrap().shape(), [0, 4]);
        let w = read.tensor("w").unwrap().data();
        let last = (9 << 20) / 4 - 1;
        assert_eq!(w[last * 8..last * 8 + 4], (last as f32).to_le_bytes());
        // Wider types come first, so that every tensor is aligned.
        let (header, meta) = SafeTensors::read_metadata(&file).unwrap();
        assert_eq!(meta.offset_keys().last().unwrap(), "h");
        assert_eq!(header % 8, 0);
    }
}
