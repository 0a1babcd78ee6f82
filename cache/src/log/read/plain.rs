//! One read call a run: for segments still being written, whose bytes are in the page cache, and
//! for file systems that give no file of the system's.

use std::path::Path;

use super::super::files::{Files, LogFile, read_exact};
use super::super::format::Geometry;
use super::super::segment::failed;
use super::{Run, SegmentReader, Source, Take, Wanted, hand_over, runs};
use crate::Result;

/// Most bytes of a run that holds more than one record.
pub(super) const RUN_BYTES: u64 = 64 << 10;

#[derive(Debug)]
pub(super) struct Plain;

impl SegmentReader for Plain {
    fn name(&self) -> &'static str {
        "read calls"
    }

    fn open(&self, files: &dyn Files, path: &Path, _bytes: u64) -> Result<Source> {
        Ok(Source::File(files.open(path).map_err(failed("open", path))?))
    }

    fn read(&self, geometry: &Geometry, wanted: &[Wanted<'_>], take: &mut Take<'_>) -> Result<u64> {
        let mut bytes = 0;
        for run in runs(geometry, wanted, RUN_BYTES) {
            bytes += read_run(geometry, wanted, &run, take)?;
        }
        Ok(bytes)
    }
}

/// Hands over a run's records from whatever its segment was opened as.
pub(super) fn read_run(
    geometry: &Geometry,
    wanted: &[Wanted<'_>],
    run: &Run,
    take: &mut Take<'_>,
) -> Result<u64> {
    let segment = wanted[run.first].segment;
    let file: &dyn LogFile = match &segment.source {
        Source::Mapped(map) => {
            hand_over(geometry, wanted, run, &map[run.start as usize..], take)?;
            return Ok(run.end - run.start);
        }
        Source::File(file) => &**file,
        Source::Direct(file) => file,
    };
    // Without what surrounds them: a file that is being written may end there.
    let start = geometry.offset(wanted[run.first].slot);
    let end = geometry.end(wanted[run.last - 1].slot + 1);
    let mut bytes = vec![0; (end - start) as usize];
    read_exact(file, &mut bytes, start).map_err(failed("read", &segment.path))?;
    hand_over(geometry, wanted, &Run { start, ..*run }, &bytes, take)?;
    Ok(end - start)
}
