//! A disk's own limit: random pages of given files, read past the page cache by as many threads as
//! there are to be reads in flight.
//!
//! Nothing but the standard library and libc is used, so that `bench/rocksdb` takes the same limit.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Bytes of a read.
pub const PAGE: usize = 4096;

/// What direct reads go to.
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

    /// Reads a page.
    fn read(&self, page: u64, to: &mut Page) -> io::Result<()> {
        let (file, first) = &self.files[self.files.partition_point(|file| file.1 <= page) - 1];
        file.read_exact_at(&mut to.0, (page - first) * PAGE as u64)
    }

    /// Pages read a second, at random places, by `depth` threads for about `duration`.
    ///
    /// Errors: a read that fails.
    pub fn rate(&self, depth: usize, duration: Duration, seed: u64) -> io::Result<f64> {
        let stop = AtomicBool::new(false);
        let begin = Instant::now();
        let read = std::thread::scope(|scope| {
            let reader = |thread: usize| {
                let mut place = mix(seed ^ mix(thread as u64 + 1));
                let mut page = Box::new(Page([0; PAGE]));
                let mut count = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    place = mix(place);
                    let at = ((u128::from(place) * u128::from(self.pages)) >> 64) as u64;
                    self.read(at, &mut page)?;
                    count += 1;
                }
                Ok::<u64, io::Error>(count)
            };
            let threads: Vec<_> =
                (0..depth.max(1)).map(|thread| scope.spawn(move || reader(thread))).collect();
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
