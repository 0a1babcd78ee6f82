//! A disk's own limit: random pages of given files, read past the page cache, a number of reads in
//! flight at all times. By as many threads with a read each, and by one thread with an io_uring: the
//! better of the two is the limit. Many threads cost a few cores more than the disk takes.
//!
//! `bench/rocksdb` takes the same limit with the same code.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};

/// Bytes of a read.
pub const PAGE: usize = 4096;

/// What direct reads go to.
#[derive(Clone)]
#[repr(C, align(4096))]
struct Page([u8; PAGE]);

/// Pages of some files.
#[derive(Debug)]
pub struct Pages {
    files: Vec<(File, u64)>, // first page's number among all
    pages: u64,
}

/// All files below `dir`.
fn files_below(dir: &Path, found: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            files_below(&entry.path(), found)?;
        } else {
            found.push(entry.path());
        }
    }
    Ok(())
}

impl Pages {
    /// The whole pages of all files below `dir`.
    ///
    /// Errors: what the system says of files or of `O_DIRECT`; no file that has a page.
    pub fn below(dir: &Path) -> io::Result<Self> {
        let mut paths = Vec::new();
        files_below(dir, &mut paths)?;
        paths.sort();
        let (mut files, mut pages) = (Vec::new(), 0);
        for path in paths {
            let here = std::fs::metadata(&path)?.len() / PAGE as u64;
            if here > 0 {
                let mut options = OpenOptions::new();
                let file = options.read(true).custom_flags(libc::O_DIRECT).open(&path)?;
                files.push((file, pages));
                pages += here;
            }
        }
        if pages == 0 {
            return Err(io::Error::other("no file there has a page of 4096 bytes"));
        }
        Ok(Self { files, pages })
    }

    /// The file and offset of a page that a number without a pattern stands for.
    fn place(&self, number: u64) -> (&File, u64) {
        let page = ((u128::from(number) * u128::from(self.pages)) >> 64) as u64;
        let (file, first) = &self.files[self.files.partition_point(|file| file.1 <= page) - 1];
        (file, (page - first) * PAGE as u64)
    }

    /// Pages read a second, at random places, `depth` in flight, in about `duration`: by threads or
    /// by io_uring, whichever is faster.
    ///
    /// Errors: a read that fails.
    pub fn rate(&self, depth: usize, duration: Duration, seed: u64) -> io::Result<f64> {
        let depth = depth.max(1);
        let threads = self.rate_of_threads(depth, duration / 2, seed)?;
        match IoUring::new(u32::try_from(depth).unwrap_or(u32::MAX)) {
            Ok(ring) => Ok(threads.max(self.rate_of_ring(ring, depth, duration / 2, !seed)?)),
            // Not every system allows it.
            Err(_) => Ok(threads),
        }
    }

    /// By one thread with a ring.
    fn rate_of_ring(
        &self,
        mut ring: IoUring,
        depth: usize,
        duration: Duration,
        seed: u64,
    ) -> io::Result<f64> {
        let mut pages = vec![Page([0; PAGE]); depth];
        let outcome = self.drive(&mut ring, &mut pages, duration, seed);
        if outcome.is_err() {
            // Reads may be in flight: the kernel may still write to the pages.
            std::mem::forget(pages);
        }
        outcome
    }

    /// Keeps a read in flight for each of `pages` until `duration` is over, then waits for all.
    fn drive(
        &self,
        ring: &mut IoUring,
        pages: &mut [Page],
        duration: Duration,
        seed: u64,
    ) -> io::Result<f64> {
        let to = pages.as_mut_ptr();
        let mut free: Vec<usize> = (0..pages.len()).collect();
        let (mut number, mut count, mut in_flight) = (mix(seed), 0u64, 0usize);
        let begin = Instant::now();
        loop {
            while begin.elapsed() < duration
                && let Some(page) = free.pop()
            {
                number = mix(number);
                let (file, offset) = self.place(number);
                let fd = types::Fd(file.as_raw_fd());
                // SAFETY: `page` is below the number of pages.
                let buffer = unsafe { to.add(page) }.cast::<u8>();
                let read = opcode::Read::new(fd, buffer, PAGE as u32).offset(offset);
                // SAFETY: the page is this read's alone until its completion is seen, and outlives
                // it: the caller gives the pages up if this fails. The file is open as long as
                // `self`, and all reads are waited for below.
                unsafe { ring.submission().push(&read.build().user_data(page as u64)) }
                    .map_err(io::Error::other)?;
                in_flight += 1;
            }
            if in_flight == 0 {
                return Ok(count as f64 / begin.elapsed().as_secs_f64());
            }
            // A system call for each would hold the disk up.
            match ring.submit_and_wait((in_flight / 8).max(1)) {
                Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
                _ => {}
            }
            for completion in ring.completion() {
                match completion.result() {
                    result if result == PAGE as i32 => count += 1,
                    result if result < 0 => return Err(io::Error::from_raw_os_error(-result)),
                    _ => return Err(io::ErrorKind::UnexpectedEof.into()),
                }
                in_flight -= 1;
                free.push(completion.user_data() as usize);
            }
        }
    }

    /// By `depth` threads.
    fn rate_of_threads(&self, depth: usize, duration: Duration, seed: u64) -> io::Result<f64> {
        let stop = AtomicBool::new(false);
        let begin = Instant::now();
        let read = std::thread::scope(|scope| {
            let reader = |thread: usize| {
                let mut place = mix(seed ^ mix(thread as u64 + 1));
                let mut page = Box::new(Page([0; PAGE]));
                let mut count = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    place = mix(place);
                    let (file, offset) = self.place(place);
                    file.read_exact_at(&mut page.0, offset)?;
                    count += 1;
                }
                Ok::<u64, io::Error>(count)
            };
            let threads: Vec<_> =
                (0..depth).map(|thread| scope.spawn(move || reader(thread))).collect();
            std::thread::sleep(duration);
            stop.store(true, Ordering::Relaxed);
            let mut total = 0;
            for thread in threads {
                let count = thread.join().map_err(|_| io::Error::other("a reader panicked"))?;
                total += count?;
            }
            Ok::<u64, io::Error>(total)
        })?;
        Ok(read as f64 / begin.elapsed().as_secs_f64())
    }
}

/// The next of a sequence of numbers without a pattern: the output function of splitmix64 (Steele,
/// Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
