//! Reading through memory maps.
//!
//! A fault on a page that is not in memory waits for one read, so all runs of a batch are asked for
//! first (`MADV_WILLNEED` starts the reads and returns) and then touched in order. Maps are marked
//! random: a fault by itself reads its own page only.

use std::path::Path;

use memmap2::{Advice, MmapOptions};

use super::super::files::{Access, Files};
use super::super::format::Geometry;
use super::super::segment::failed;
use super::{SegmentReader, Source, Take, Wanted, plain, runs};
use crate::Result;

#[derive(Debug)]
pub(super) struct Mapped {
    pub name: &'static str,
}

impl SegmentReader for Mapped {
    fn name(&self) -> &'static str {
        self.name
    }

    fn open(&self, files: &dyn Files, path: &Path, bytes: u64) -> Result<Source> {
        let Some(file) = files.os_file(path, Access::Cached).map_err(failed("open", path))? else {
            return plain::Plain.open(files, path, bytes);
        };
        let failed = failed("map", path);
        let Ok(length) = usize::try_from(bytes) else {
            return Err(failed(std::io::ErrorKind::OutOfMemory.into()));
        };
        // SAFETY: a sealed segment's file is never written, cut or extended by this program, and
        // the directory is locked against other logs; the map ends with the file, as the caller
        // found it.
        let map = unsafe { MmapOptions::new().len(length).map(&file) }.map_err(failed)?;
        // Only a hint: without it single reads bring in their neighbours too.
        let _ = map.advise(Advice::Random);
        Ok(Source::Mapped(map))
    }

    fn read(&self, geometry: &Geometry, wanted: &[Wanted<'_>], take: &mut Take<'_>) -> Result<u64> {
        let runs = runs(geometry, wanted, plain::RUN_BYTES);
        if runs.len() > 1 {
            for run in &runs {
                if let Source::Mapped(map) = &wanted[run.first].segment.source {
                    let (start, length) = (run.start as usize, (run.end - run.start) as usize);
                    let _ = map.advise_range(Advice::WillNeed, start, length);
                }
            }
        }
        let mut bytes = 0;
        for run in &runs {
            bytes += plain::read_run(geometry, wanted, run, take)?;
        }
        Ok(bytes)
    }
}
