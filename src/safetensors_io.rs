//! Safetensors files, written as a stream and read in pieces.
//!
//! The library's own writer wants each tensor whole in memory; ours writes the header and then
//! rows in pieces, so a table of any size passes through a fixed buffer.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use safetensors::tensor::{Metadata, TensorInfo};

use crate::tensors::{Dtype, Stored, Tensor, element_bytes};
use crate::{Error, Result};

/// Bytes of rows that pass through memory at a time.
const CHUNK_BYTES: usize = 8 << 20;

/// Largest header that is read; the library's limit.
const HEADER_BYTES_MAX: u64 = 100_000_000;

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
        for rows in chunks(0..tensor.rows(), tensor.row_bytes()) {
            let bytes = rows.len() * tensor.row_bytes();
            read(i, rows, &mut buffer)?;
            assert_eq!(buffer.len(), bytes, "{}: a reader filled the rows asked for", tensor.name);
            out.write_all(&buffer).map_err(failed)?;
        }
    }
    Ok(())
}

/// A safetensors file, open for reading rows at any place.
///
/// Rows are read, not mapped: a map of a large file counts as memory in use, and one of a file
/// that is cut meanwhile ends the process.
#[derive(Debug)]
pub struct TensorFile {
    path: PathBuf,
    file: File,
    tensors: Vec<StoredTensor>,
}

/// A tensor in a file.
#[derive(Clone, Debug)]
pub struct StoredTensor {
    /// Name.
    pub name: String,
    /// Element type.
    pub dtype: Dtype,
    /// Shape.
    pub shape: Vec<usize>,
    /// Offset of its first byte in the file.
    offset: u64,
    /// Its bytes.
    bytes: usize,
}

impl TensorFile {
    /// Opens `path` and reads its header.
    ///
    /// Errors: a file that cannot be read, or that is not a whole safetensors file.
    pub fn open(path: &Path) -> Result<Self> {
        let unreadable = |source| Error::Read { path: path.into(), source };
        let bad = |reason: String| Error::BadFile {
            path: path.into(),
            reason: format!("not a safetensors file: {reason}"),
        };
        let file = File::open(path).map_err(unreadable)?;
        let length = file.metadata().map_err(unreadable)?.len();
        let mut size = [0; 8];
        file.read_exact_at(&mut size, 0).map_err(|error| bad(error.to_string()))?;
        let header_bytes = u64::from_le_bytes(size);
        if header_bytes > HEADER_BYTES_MAX || header_bytes + 8 > length {
            return Err(bad(format!("a header of {header_bytes} bytes in a file of {length}")));
        }
        let mut start = vec![0; 8 + header_bytes as usize];
        file.read_exact_at(&mut start, 0).map_err(unreadable)?;
        // The library checks the offsets against each other and against the shapes.
        let metadata: Metadata =
            serde_json::from_slice(&start[8..]).map_err(|error| bad(error.to_string()))?;
        let data_bytes = metadata.data_len() as u64;
        if 8 + header_bytes + data_bytes != length {
            return Err(bad(format!(
                "{length} bytes, but header and tensors take {}",
                8 + header_bytes + data_bytes
            )));
        }
        let stored = |name: String| {
            let info = metadata.info(&name)?;
            let (first, end) = info.data_offsets;
            Some(StoredTensor {
                name,
                dtype: info.dtype,
                shape: info.shape.clone(),
                offset: 8 + header_bytes + first as u64,
                bytes: end - first,
            })
        };
        let tensors = metadata.offset_keys().into_iter().filter_map(stored).collect();
        Ok(Self { path: path.into(), file, tensors })
    }

    /// Its tensors, in the order of their data.
    #[must_use]
    pub fn tensors(&self) -> &[StoredTensor] {
        &self.tensors
    }

    /// The tensor of this name.
    #[must_use]
    pub fn tensor(&self, name: &str) -> Option<&StoredTensor> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }

    /// Reads `columns` of `rows` of `tensor`: row i to `out[i * stride..]`, in bytes.
    ///
    /// Errors: a failed read.
    ///
    /// # Panics
    /// When the tensor has no such rows or columns, or `out` no room for them.
    pub fn read(
        &self,
        tensor: &StoredTensor,
        rows: Range<usize>,
        columns: Range<usize>,
        out: &mut [u8],
        stride: usize,
    ) -> Result<()> {
        let element = element_bytes(tensor.dtype);
        let width = tensor.columns() * element;
        let wanted = columns.start * element..columns.end * element;
        let inside = rows.end * width <= tensor.bytes && wanted.end <= width;
        assert!(inside, "{}: rows {rows:?}, columns {columns:?}", tensor.name);
        if rows.is_empty() || wanted.is_empty() {
            return Ok(());
        }
        let read = |bytes: &mut [u8]| {
            self.file
                .read_exact_at(bytes, tensor.offset + (rows.start * width) as u64)
                .map_err(|source| Error::Read { path: self.path.clone(), source })
        };
        if wanted.len() == width && stride == width {
            return read(&mut out[..rows.len() * width]);
        }
        // Whole rows, for reading each row's part apart would be a system call a row.
        let mut whole = vec![0; rows.len() * width];
        read(&mut whole)?;
        for (i, row) in whole.chunks_exact(width).enumerate() {
            out[i * stride..][..wanted.len()].copy_from_slice(&row[wanted.clone()]);
        }
        Ok(())
    }
}

impl Stored for TensorFile {
    fn path(&self) -> &Path {
        &self.path
    }

    fn find(&self, name: &str) -> Option<(Dtype, &[usize])> {
        self.tensor(name).map(|tensor| (tensor.dtype, &tensor.shape[..]))
    }

    fn read(&self, name: &str, rows: Range<usize>, out: &mut Vec<u8>) -> Result<()> {
        let tensor = self.tensor(name).expect("who reads it has found it");
        let row_bytes = tensor.columns() * element_bytes(tensor.dtype);
        out.clear();
        out.resize(rows.len() * row_bytes, 0);
        TensorFile::read(self, tensor, rows, 0..tensor.columns(), out, row_bytes)
    }
}

impl StoredTensor {
    /// Elements of one row.
    #[must_use]
    pub fn columns(&self) -> usize {
        self.shape.iter().skip(1).product()
    }
}

/// `rows` in ranges of about 8 MiB each, for rows of `row_bytes`.
pub fn chunks(rows: Range<usize>, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
    let step = (CHUNK_BYTES / row_bytes.max(1)).max(1);
    let end = rows.end;
    rows.step_by(step).map(move |first| first..(first + step).min(end))
}

#[cfg(test)]
mod tests {
    use super::*;
    use safetensors::SafeTensors;

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

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        std::fs::write(&path, &file).unwrap();
        let open = TensorFile::open(&path).unwrap();
        let stored = open.tensor("w").unwrap();
        assert_eq!((stored.dtype, &stored.shape[..]), (Dtype::F32, &[(9 << 20) / 4, 2][..]));
        let mut bytes = [0; 8];
        open.read(stored, last..last + 1, 0..2, &mut bytes, 8).unwrap();
        assert_eq!(bytes[..4], (last as f32).to_le_bytes());
        assert_eq!(bytes[4..], 1f32.to_le_bytes());
        // The first column of three rows, each before four bytes that are left alone.
        let mut bytes = [7; 24];
        open.read(stored, 5..8, 0..1, &mut bytes, 8).unwrap();
        for (row, bytes) in (5..8).zip(bytes.chunks_exact(8)) {
            assert_eq!(bytes[..4], (row as f32).to_le_bytes());
            assert_eq!(bytes[4..], [7; 4]);
        }
        open.read(open.tensor("none").unwrap(), 0..0, 0..4, &mut [], 16).unwrap();
        assert!(open.tensor("x").is_none());
        for cut in [0, 5, 8, 100, file.len() - 1] {
            std::fs::write(&path, &file[..cut]).unwrap();
            let error = TensorFile::open(&path).unwrap_err().to_string();
            assert!(error.contains("t.safetensors: not a safetensors file"), "{error}");
        }
    }
}
