//! A checkpoint's files against its manifest.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use super::Checkpoint;
use super::agree::Meet;
use super::cover;
use super::manifest::{Listed, Shard};
use crate::safetensors_io::TensorFile;
use crate::tensors::Dtype;
use crate::{Error, Result};

impl Checkpoint {
    /// Holds every `size`-th file from number `rank` on against the manifest's size, checksum and
    /// pieces: all safetensors files of its chain, and the segment files that it needs.
    ///
    /// Errors: a file that is missing, cut, changed, or lacks a piece, by name.
    pub(super) fn verify(&self, rank: usize, size: usize, meet: &mut Meet) -> Result<()> {
        let shards = self
            .levels()
            .flat_map(|level| level.shards.iter().map(|shard| (level.moment.step, shard)));
        let shards: Vec<_> = shards.collect();
        for (step, shard) in shards.iter().skip(rank).step_by(size) {
            let folder = self.folder_of(*step);
            let path = folder.join(&shard.file);
            let bad = |reason: String| Err(Error::BadFile { path: path.clone(), reason });
            let (bytes, crc32) = checksum(&path, meet)?;
            if bytes != shard.bytes {
                return bad(format!("{bytes} bytes, the manifest says {}", shard.bytes));
            }
            if crc32 != shard.crc32 {
                return bad(format!(
                    "checksum {crc32:08x}, the manifest says {:08x}: the file was changed or damaged",
                    shard.crc32
                ));
            }
            self.open_shard(&folder, shard)?;
        }
        let pieces = self.cold_pieces();
        let files = pieces
            .iter()
            .flat_map(|piece| (0..piece.snapshot.files.len()).map(move |file| (piece, file)));
        for (piece, file) in files.skip(rank).step_by(size) {
            meet()?;
            self.verify_cold(piece, file)?;
        }
        Ok(())
    }

    /// Opens a shard in `folder` and finds what the manifest says it holds.
    ///
    /// Errors: a piece that is not there or has another shape than its rows and columns.
    pub(super) fn open_shard(&self, folder: &Path, shard: &Shard) -> Result<TensorFile> {
        let path = folder.join(&shard.file);
        let file = TensorFile::open(&path)?;
        for piece in &shard.pieces {
            let entry = self.manifest.tensors.iter().find(|entry| entry.name == piece.tensor);
            let wanted = entry.and_then(|entry| {
                let (first, end) = cover::columns(entry, piece)?;
                let mut shape = entry.shape.clone();
                let rows = piece.listed.as_ref().map_or(piece.rows, |listed| listed.count);
                if piece.columns.is_some() || piece.first_column.is_some() {
                    shape = vec![rows, end - first];
                } else {
                    *shape.first_mut()? = rows;
                }
                Some((entry.dtype.clone(), shape))
            });
            let found = file.tensor(&piece.tensor).map(|stored| {
                let shape: Vec<u64> = stored.shape.iter().map(|&n| n as u64).collect();
                (stored.dtype.to_string(), shape)
            });
            if wanted.is_none() || wanted != found {
                let reason =
                    format!("holds {} as {found:?}, the manifest says {wanted:?}", piece.tensor);
                return Err(Error::BadFile { path, reason });
            }
            if let Some(Listed { count, rows }) = &piece.listed {
                let numbers = file.tensor(rows);
                if numbers.is_none_or(|numbers| {
                    numbers.dtype != Dtype::U64 || numbers.shape != [*count as usize]
                }) {
                    let reason = format!("{count} numbers of rows, {rows}, are not there");
                    return Err(Error::BadFile { path, reason });
                }
            }
        }
        Ok(file)
    }
}

/// Size and CRC-32 of a file.
fn checksum(path: &Path, meet: &mut Meet) -> Result<(u64, u32)> {
    let unreadable = |source| Error::Read { path: path.into(), source };
    let mut file = File::open(path).map_err(unreadable)?;
    let mut crc = crc32fast::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut total = 0;
    loop {
        meet()?;
        match file.read(&mut buffer).map_err(unreadable)? {
            0 => return Ok((total, crc.finalize())),
            bytes => {
                crc.update(&buffer[..bytes]);
                total += bytes as u64;
            }
        }
    }
}
