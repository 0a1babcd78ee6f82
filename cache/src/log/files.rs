//! The file system as the log uses it: a thin layer, so that tests can break it on purpose.
//!
//! [`Disk`] is the real one. Everything that the log writes goes through here; bulk reads of
//! sealed segments may go around it ([`Files::os_file`]), since nothing there changes any more.

use std::fmt::Debug;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

/// How a file is opened for reading around [`LogFile`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Through the page cache.
    Cached,
    /// Past it (`O_DIRECT`): offsets, lengths and addresses are multiples of a page.
    Direct,
}

/// An open file. Reads and writes may do less than asked; 0 bytes read is the end.
pub trait LogFile: Debug + Send + Sync {
    /// Reads from `offset` on; says how many bytes.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Writes at `offset`; says how many bytes.
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize>;
    /// Bytes in the file.
    fn size(&self) -> io::Result<u64>;
    /// Cuts or extends the file.
    fn resize(&self, bytes: u64) -> io::Result<()>;
    /// Returns when everything written, and the size, outlives a crash.
    fn sync(&self) -> io::Result<()>;
    /// A hint: these bytes may go to the medium now, so that the next sync waits less.
    fn start_writing(&self, _offset: u64, _bytes: u64) {}
}

/// A file system. Names and their files outlive a crash only after [`Files::sync_dir`] and
/// [`LogFile::sync`].
pub trait Files: Debug + Send + Sync {
    /// Makes a directory and those above it; one that is there is fine.
    fn create_dir(&self, dir: &Path) -> io::Result<()>;
    /// Names in a directory, in any order.
    fn list(&self, dir: &Path) -> io::Result<Vec<String>>;
    /// Makes a file that must not be there, to read and write.
    fn create(&self, path: &Path) -> io::Result<Box<dyn LogFile>>;
    /// Opens a file that must be there, to read and write.
    fn open(&self, path: &Path) -> io::Result<Box<dyn LogFile>>;
    /// Renames a file over another name in the same directory.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a name; open files stay readable.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Gives a file a second name.
    fn link(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Returns when the directory's names outlive a crash.
    fn sync_dir(&self, dir: &Path) -> io::Result<()>;
    /// Takes the directory for one owner until the value is dropped; `WouldBlock` if it has one.
    fn lock(&self, dir: &Path) -> io::Result<Box<dyn Debug + Send + Sync>>;
    /// The system's own file for bulk reads, or `None` where there is no such thing.
    fn os_file(&self, path: &Path, access: Access) -> io::Result<Option<File>>;
}

/// Name of the file that [`Disk`] locks.
pub(crate) const LOCK: &str = "lock";

/// The real file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl LogFile for File {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(self, bytes, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<usize> {
        FileExt::write_at(self, bytes, offset)
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.metadata()?.len())
    }

    fn resize(&self, bytes: u64) -> io::Result<()> {
        self.set_len(bytes)
    }

    fn sync(&self) -> io::Result<()> {
        self.sync_data()
    }

    fn start_writing(&self, offset: u64, bytes: u64) {
        #[cfg(target_os = "linux")]
        if let (Ok(offset), Ok(bytes)) = (offset.try_into(), bytes.try_into()) {
            use std::os::fd::AsRawFd;
            // SAFETY: the descriptor is open as long as `self`; the call takes no pointers. Its
            // result does not matter: it is a hint, and the next sync reports what failed.
            unsafe {
                libc::sync_file_range(self.as_raw_fd(), offset, bytes, libc::SYNC_FILE_RANGE_WRITE);
            }
        }
    }
}

impl Files for Disk {
    fn create_dir(&self, dir: &Path) -> io::Result<()> {
        std::fs::create_dir_all(dir)?;
        match dir.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => self.sync_dir(parent),
            _ => Ok(()),
        }
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<String>> {
        std::fs::read_dir(dir)?
            .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
            .collect()
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn LogFile>> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).open(path)?;
        Ok(Box::new(file))
    }

    fn open(&self, path: &Path) -> io::Result<Box<dyn LogFile>> {
        Ok(Box::new(OpenOptions::new().read(true).write(true).open(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn link(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::hard_link(from, to)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        File::open(dir)?.sync_all()
    }

    fn lock(&self, dir: &Path) -> io::Result<Box<dyn Debug + Send + Sync>> {
        let mut options = OpenOptions::new();
        let file = options.write(true).create(true).truncate(false).open(dir.join(LOCK))?;
        match file.try_lock() {
            Ok(()) => Ok(Box::new(file)),
            Err(std::fs::TryLockError::WouldBlock) => Err(io::ErrorKind::WouldBlock.into()),
            Err(std::fs::TryLockError::Error(error)) => Err(error),
        }
    }

    fn os_file(&self, path: &Path, access: Access) -> io::Result<Option<File>> {
        let mut options = OpenOptions::new();
        options.read(true);
        if access == Access::Direct {
            options.custom_flags(libc::O_DIRECT);
        }
        options.open(path).map(Some)
    }
}

/// Reads all of `bytes` from `offset` on, however short the single reads are.
pub(crate) fn read_exact(file: &dyn LogFile, bytes: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.read_at(&mut bytes[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Writes all of `bytes` at `offset`, however short the single writes are.
pub(crate) fn write_all(file: &dyn LogFile, bytes: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0;
    while done < bytes.len() {
        match file.write_at(&bytes[done..], offset + done as u64) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(n) => done += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
