//! Lines of a text file, plain or compressed, through one large buffer.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use flate2::bufread::GzDecoder;
use memchr::memchr;

use crate::{DataError, Result};

/// Bytes of the buffer, and so the longest line.
const BUFFER_BYTES: usize = 1 << 20;

/// Bytes that may be looked at behind every line: whole blocks and words can be loaded at any of
/// its bytes. What they hold means nothing.
pub(super) const PADDING: usize = 64;

/// Bytes read at once from a compressed file.
const COMPRESSED_BYTES: usize = 1 << 17;

/// Reads lines; the compression is told by the first bytes, not by the name.
pub(super) struct Lines {
    path: PathBuf,
    source: Box<dyn Read + Send>,
    /// `None` for plain text.
    compression: Option<&'static str>,
    bytes: Arc<AtomicU64>,
    /// [`BUFFER_BYTES`] for text and [`PADDING`].
    buffer: Vec<u8>,
    /// What of the buffer is filled and not yet given out.
    filled: Range<usize>,
    at_end: bool,
    lines: u64,
}

/// A line without its end.
#[derive(Clone, Copy)]
pub(super) struct Line<'a> {
    /// The line and at least [`PADDING`] bytes behind it.
    padded: &'a [u8],
    len: usize,
}

impl<'a> Line<'a> {
    /// The first `len` bytes of `padded`, less the carriage return of a `\r\n` end. The caller
    /// guarantees `padded.len() >= len + PADDING`.
    pub(super) fn new(padded: &'a [u8], len: usize) -> Self {
        debug_assert!(padded.len() >= len + PADDING);
        let len = if len > 0 && padded[len - 1] == b'\r' { len - 1 } else { len };
        Self { padded, len }
    }

    /// Its bytes.
    pub(super) fn bytes(self) -> &'a [u8] {
        &self.padded[..self.len]
    }

    /// Its bytes and at least [`PADDING`] more.
    pub(super) fn padded(self) -> &'a [u8] {
        self.padded
    }
}

/// A file that counts what is read from it.
struct Counted {
    file: File,
    bytes: Arc<AtomicU64>,
}

impl Read for Counted {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let got = self.file.read(buffer)?;
        self.bytes.fetch_add(got as u64, Ordering::Relaxed);
        Ok(got)
    }
}

/// The members of a gzip file, one after the other, zeros between and after them passed over as
/// gzip(1) does: tapes and block-wise copies pad with them.
struct GzipMembers<R> {
    /// `None` after the last member.
    member: Option<GzDecoder<R>>,
}

impl<R: BufRead> GzipMembers<R> {
    fn new(source: R) -> Self {
        Self { member: Some(GzDecoder::new(source)) }
    }
}

impl<R: BufRead> Read for GzipMembers<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        while let Some(member) = &mut self.member {
            let got = member.read(buffer)?;
            if got > 0 {
                return Ok(got);
            }
            pass_zeros(member.get_mut())?;
            let more = !member.get_mut().fill_buf()?.is_empty();
            let ended = self.member.take().map(GzDecoder::into_inner);
            self.member = ended.filter(|_| more).map(GzDecoder::new);
        }
        Ok(0)
    }
}

/// Passes over bytes of 0.
fn pass_zeros(source: &mut impl BufRead) -> io::Result<()> {
    loop {
        let ready = source.fill_buf()?;
        let zeros = ready.iter().take_while(|byte| **byte == 0).count();
        let all = zeros == ready.len();
        source.consume(zeros);
        if zeros == 0 || !all {
            return Ok(());
        }
    }
}

impl Lines {
    /// The lines of `path`, with a buffer of 1 MiB.
    pub(super) fn open(path: &Path) -> Result<Self> {
        let (mut file, _) = super::open_file(path)?;
        let mut magic = [0; 4];
        let known = read_up_to(&mut file, &mut magic).map_err(DataError::io("read", path))?;
        file.seek(SeekFrom::Start(0)).map_err(DataError::io("seek in", path))?;
        let bytes = Arc::new(AtomicU64::new(0));
        let counted = Counted { file, bytes: Arc::clone(&bytes) };
        let buffered = |counted| BufReader::with_capacity(COMPRESSED_BYTES, counted);
        let (source, compression): (Box<dyn Read + Send>, _) = match &magic[..known] {
            [0x1F, 0x8B, ..] => (Box::new(GzipMembers::new(buffered(counted))), Some("gzip")),
            // A zstd frame, or one of the skippable frames that may come before (RFC 8878).
            [0x28, 0xB5, 0x2F, 0xFD] | [0x50..=0x5F, 0x2A, 0x4D, 0x18] => {
                let decoder = zstd::Decoder::with_buffer(buffered(counted))
                    .map_err(DataError::io("decompress", path))?;
                (Box::new(decoder), Some("zstd"))
            }
            _ => (Box::new(counted), None),
        };
        Ok(Self {
            path: path.to_owned(),
            source,
            compression,
            bytes,
            buffer: vec![0; BUFFER_BYTES + PADDING],
            filled: 0..0,
            at_end: false,
            lines: 0,
        })
    }

    /// The next line without its end (`\n` or `\r\n`); `None` after the last. A last line need not
    /// have an end.
    ///
    /// Errors: the system's, damaged or truncated compression, a line longer than the buffer.
    #[inline]
    pub(super) fn next(&mut self) -> Result<Option<Line<'_>>> {
        let mut searched = 0;
        loop {
            let unseen = &self.buffer[self.filled.start + searched..self.filled.end];
            if let Some(at) = memchr(b'\n', unseen) {
                let start = self.filled.start;
                let end = start + searched + at;
                self.filled.start = end + 1;
                self.lines += 1;
                return Ok(Some(Line::new(&self.buffer[start..], end - start)));
            }
            searched = self.filled.len();
            if self.at_end {
                if searched == 0 {
                    return Ok(None);
                }
                let rest = self.filled.clone();
                self.filled.start = self.filled.end;
                self.lines += 1;
                return Ok(Some(Line::new(&self.buffer[rest.start..], rest.len())));
            }
            self.fill()?;
        }
    }

    /// Lines given out so far.
    pub(super) fn lines(&self) -> u64 {
        self.lines
    }

    /// Bytes of the file read so far.
    pub(super) fn bytes_read(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Moves the unfinished line to the front of the buffer and reads on behind it.
    fn fill(&mut self) -> Result<()> {
        self.buffer.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        if self.filled.end == BUFFER_BYTES {
            return Err(DataError::bad_file(
                &self.path,
                format!(
                    "line {} is longer than {BUFFER_BYTES} bytes; is this a text file?",
                    self.lines + 1
                ),
            ));
        }
        let got = loop {
            match self.source.read(&mut self.buffer[self.filled.end..BUFFER_BYTES]) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result.map_err(|source| self.failure(source))?,
            }
        };
        self.filled.end += got;
        self.at_end = got == 0;
        Ok(())
    }

    fn failure(&self, source: io::Error) -> DataError {
        let path = self.path.clone();
        match self.compression {
            Some(compression) => {
                DataError::Compressed { path, compression, lines: self.lines, source }
            }
            None => DataError::Io { operation: "read", path, source },
        }
    }
}

/// Fills `buffer` as far as the file reaches.
fn read_up_to(file: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    let mut got = 0;
    while got < buffer.len() {
        match file.read(&mut buffer[got..]) {
            Ok(0) => break,
            Ok(more) => got += more,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(got)
}
