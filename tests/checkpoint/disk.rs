//! A disk that fails on demand.

use std::cell::Cell;
use std::io::{self, Write};
use std::path::Path;
use std::rc::Rc;

use tessera::checkpoint::{Disk, Files, OutFile};

/// A disk on which the n-th operation and all after it fail, a write half-way.
pub struct Failing {
    left: Rc<Cell<u64>>,
}

impl Failing {
    /// A disk that does `allowed` operations more.
    pub fn after(allowed: u64) -> Self {
        Self { left: Rc::new(Cell::new(allowed)) }
    }
}

struct FailingFile {
    file: Box<dyn OutFile>,
    left: Rc<Cell<u64>>,
}

fn full() -> io::Error {
    io::Error::from_raw_os_error(libc::ENOSPC)
}

/// Counts an operation; the last one allowed has gone by when this fails.
fn count(left: &Cell<u64>) -> io::Result<()> {
    let now = left.get();
    left.set(now.saturating_sub(1));
    if now == 0 { Err(full()) } else { Ok(()) }
}

impl Files for Failing {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        count(&self.left)?;
        Disk.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn OutFile>> {
        count(&self.left)?;
        let file = Disk.create(path)?;
        Ok(Box::new(FailingFile { file, left: Rc::clone(&self.left) }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        count(&self.left)?;
        Disk.rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        count(&self.left)?;
        Disk.link(from, to)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        count(&self.left)?;
        Disk.remove_dir(path)
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        count(&self.left)?;
        Disk.sync_dir(path)
    }
}

impl Write for FailingFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Err(error) = count(&self.left) {
            // The first half still got through.
            self.file.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl OutFile for FailingFile {
    fn sync(&mut self) -> io::Result<()> {
        count(&self.left)?;
        self.file.sync()
    }
}
