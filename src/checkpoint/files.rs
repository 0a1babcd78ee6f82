//! The few file operations a checkpoint is made of, so that a test can make any of them fail.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// A file being written.
///
/// The implementor must keep what was written before `sync` returned through a crash.
pub trait OutFile: Write {
    /// Brings everything written so far to stable storage.
    fn sync(&mut self) -> io::Result<()>;
}

/// A folder tree that checkpoints are written to.
///
/// The implementor must make `rename` atomic: a reader sees the old or the new, never a mixture.
pub trait Files {
    /// Makes a folder and its parents.
    fn create_dir(&self, path: &Path) -> io::Result<()>;
    /// Makes or replaces a file.
    fn create(&self, path: &Path) -> io::Result<Box<dyn OutFile>>;
    /// Renames a file or folder; a file at `to` is replaced.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Gives a file, which nobody changes any more, a second name.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a folder and all in it; it is no error when there is none.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
    /// Brings the names in a folder to stable storage.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// The file system.
pub struct Disk;

impl OutFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}

impl Files for Disk {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn OutFile>> {
        Ok(Box::new(File::create(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::hard_link(from, to)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}
