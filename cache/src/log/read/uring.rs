//! Reading past the page cache with a queue of reads in flight: io_uring and `O_DIRECT`.
//!
//! ```text
//! while runs are left or in flight:
//!     give each free buffer the next run, push its read
//!     submit, wait for an eighth of them
//!     of each that is done: hand its records over, its buffer is free
//! ```
//!
//! A ring has `depth` buffers of 16 KiB (more for larger records): 1 MiB at the default depth. A
//! get takes a ring from the pool or makes one, so there are as many as gets ever ran at once.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use io_uring::{IoUring, opcode, types};

use super::super::files::{Access, Files};
use super::super::format::{Geometry, PAGE};
use super::super::segment::failed;
use super::{Run, SegmentReader, Source, Take, Wanted, hand_over, plain, runs};
use crate::Result;

/// Bytes of a buffer, where a record is not larger.
const BUFFER_BYTES: u64 = 16 << 10;
/// Most bytes of a ring's buffers, where records are so large that fewer reads in flight do.
const BUFFERS_BYTES_MAX: u64 = 64 << 20;

/// The part of the reads in flight that is waited for at a time: a system call a read would cost more
/// than the few reads that are not in flight meanwhile.
const WAIT_SHARE: usize = 8;

/// A page that direct reads can go to.
#[derive(Clone, Copy)]
#[repr(C, align(4096))]
struct Page([u8; PAGE as usize]);

/// A ring and the buffers that its reads go to.
struct Ring {
    ring: IoUring,
    pages: Vec<Page>, // (depth, pages_each)
    in_flight: usize,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("in_flight", &self.in_flight).finish_non_exhaustive()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.in_flight > 0 {
            // The kernel may still write to the buffers: they are given up.
            std::mem::forget(std::mem::take(&mut self.pages));
        }
    }
}

#[derive(Debug)]
pub(super) struct Uring {
    depth: u32,
    buffer_bytes: u64,
    rings: Mutex<Vec<Ring>>,
}

impl Uring {
    /// Makes the first ring, to know that the kernel allows it.
    pub fn new(depth: u32, geometry: &Geometry) -> io::Result<Self> {
        let record = geometry.record_bytes as u64;
        // A record that begins anywhere in a page.
        let buffer_bytes = BUFFER_BYTES.max((record + PAGE).next_multiple_of(PAGE));
        let depth = u64::from(depth).min(BUFFERS_BYTES_MAX / buffer_bytes).max(1) as u32;
        let this = Self { depth, buffer_bytes, rings: Mutex::new(Vec::new()) };
        this.give_back(this.make_ring()?);
        Ok(this)
    }

    fn make_ring(&self) -> io::Result<Ring> {
        let ring = IoUring::new(self.depth)?;
        let pages = vec![
            Page([0; PAGE as usize]);
            self.depth as usize * (self.buffer_bytes / PAGE) as usize
        ];
        Ok(Ring { ring, pages, in_flight: 0 })
    }

    fn take_ring(&self) -> io::Result<Ring> {
        let free = self.rings.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.map_or_else(|| self.make_ring(), Ok)
    }

    fn give_back(&self, ring: Ring) {
        self.rings.lock().unwrap_or_else(PoisonError::into_inner).push(ring);
    }
}

impl SegmentReader for Uring {
    fn name(&self) -> &'static str {
        "io_uring"
    }

    fn open(&self, files: &dyn Files, path: &Path, bytes: u64) -> Result<Source> {
        match files.os_file(path, Access::Direct).map_err(failed("open with O_DIRECT", path))? {
            Some(file) => Ok(Source::Direct(file)),
            None => plain::Plain.open(files, path, bytes),
        }
    }

    fn read(&self, geometry: &Geometry, wanted: &[Wanted<'_>], take: &mut Take<'_>) -> Result<u64> {
        let mut bytes = 0;
        let mut direct: Vec<(&File, Run)> = Vec::new();
        for run in runs(geometry, wanted, self.buffer_bytes) {
            match &wanted[run.first].segment.source {
                Source::Direct(file) => {
                    bytes += run.end - run.start;
                    direct.push((file, run));
                }
                _ => bytes += plain::read_run(geometry, wanted, &run, take)?,
            }
        }
        let Some(&(_, first)) = direct.first() else { return Ok(bytes) };
        let path = &wanted[first.first].segment.path;
        let mut ring = self.take_ring().map_err(failed("make an io_uring to read", path))?;
        let mut hand_over = |run: &Run, bytes: &[u8]| hand_over(geometry, wanted, run, bytes, take);
        let result =
            ring.read(self.depth as usize, self.buffer_bytes as usize, &direct, |run, read| {
                let path = &wanted[run.first].segment.path;
                hand_over(run, read.map_err(failed("read", path))?)
            });
        match result {
            Ok(done) => {
                self.give_back(ring);
                done?;
            }
            // The ring itself failed; what is in flight is unknown, so it is not used again.
            Err(error) => return Err(failed("read with io_uring", path)(error)),
        }
        Ok(bytes)
    }
}

impl Ring {
    /// Reads each run from its file; `done` gets its bytes from `run.start` on. After an error of
    /// `done` no more reads are begun, and those in flight are waited for. The outer error is the
    /// ring's own.
    fn read(
        &mut self,
        depth: usize,
        buffer_bytes: usize,
        wanted: &[(&File, Run)],
        mut done: impl FnMut(&Run, io::Result<&[u8]>) -> Result<()>,
    ) -> io::Result<Result<()>> {
        let buffers = self.pages.as_mut_ptr().cast::<u8>();
        let mut free: Vec<usize> = (0..depth).collect();
        let mut running = vec![0; depth]; // which run a buffer is for
        let mut next = 0;
        let mut outcome = Ok(());
        loop {
            while outcome.is_ok() && next < wanted.len() {
                let Some(buffer) = free.pop() else { break };
                let (file, run) = wanted[next];
                // A buffer's size and thus a run's fit 32 bits: a record is at most 1 GiB.
                let length = (run.end - run.start) as u32;
                // SAFETY: `buffer < depth`, and `pages` has `depth * buffer_bytes` bytes.
                let to = unsafe { buffers.add(buffer * buffer_bytes) };
                let read = opcode::Read::new(types::Fd(file.as_raw_fd()), to, length)
                    .offset(run.start)
                    .build()
                    .user_data(buffer as u64);
                // SAFETY: the buffer is `length` bytes at least (`runs` cuts at its size), belongs
                // to this read alone until its completion is seen, and outlives it: `Drop` gives up
                // buffers that are in flight. The file is open as long as its segment, which
                // `wanted` borrows.
                if unsafe { self.ring.submission().push(&read) }.is_err() {
                    free.push(buffer);
                    break;
                }
                running[buffer] = next;
                self.in_flight += 1;
                next += 1;
            }
            if self.in_flight == 0 {
                return Ok(outcome);
            }
            match self.ring.submit_and_wait((self.in_flight / WAIT_SHARE).max(1)) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            }
            for completion in self.ring.completion() {
                let buffer = completion.user_data() as usize;
                self.in_flight -= 1;
                free.push(buffer);
                if outcome.is_err() {
                    continue;
                }
                let (file, run) = wanted[running[buffer]];
                let length = (run.end - run.start) as usize;
                // SAFETY: as above; this read is done, so nobody writes to the buffer now, and the
                // next one into it is pushed after the last use of `bytes`.
                let bytes = unsafe {
                    std::slice::from_raw_parts_mut(buffers.add(buffer * buffer_bytes), length)
                };
                let read = match usize::try_from(completion.result()) {
                    Ok(read) if read == length => Ok(&*bytes),
                    // The rest of a short read; offsets of direct reads stay whole pages.
                    Ok(read) => {
                        let whole = read / PAGE as usize * PAGE as usize;
                        let offset = run.start + whole as u64;
                        file.read_exact_at(&mut bytes[whole..], offset).map(|()| &*bytes)
                    }
                    Err(_) => Err(io::Error::from_raw_os_error(-completion.result())),
                };
                outcome = done(&run, read);
            }
        }
    }
}
