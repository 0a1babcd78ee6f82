//! Arrays of numbers in `.npy` files and `.npz` archives, read row by row.
//!
//! An array that is stored as it is (a file, or an archive entry without compression) is read at
//! its position, so passing over rows costs nothing; a deflated one is decoded from its start.
//! The archive's checksums are not compared, since a seek would have to read everything.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use flate2::bufread::DeflateDecoder;
use half::f16;

use crate::{DataError, Result};

/// A type of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Element {
    Float(usize),
    Signed(usize),
    Unsigned(usize),
}

impl Element {
    fn bytes(self) -> usize {
        match self {
            Self::Float(bytes) | Self::Signed(bytes) | Self::Unsigned(bytes) => bytes,
        }
    }
}

/// Where the bytes of an `.npy` lie.
#[derive(Clone, Debug)]
struct Span {
    path: PathBuf,
    /// Name in the archive, if it is in one.
    entry: Option<String>,
    /// First byte in the file.
    start: u64,
    /// Bytes in the file.
    stored: u64,
    /// Bytes after decoding; the same as `stored` unless deflated.
    bytes: u64,
    deflated: bool,
}

impl Span {
    fn fault(&self, reason: impl std::fmt::Display) -> DataError {
        match &self.entry {
            Some(entry) => DataError::bad_file(&self.path, format!("array {entry}: {reason}")),
            None => DataError::bad_file(&self.path, reason.to_string()),
        }
    }

    fn io(&self, operation: &'static str) -> impl FnOnce(std::io::Error) -> DataError {
        DataError::io(operation, &self.path)
    }

    /// The decoded bytes from the first on.
    fn decode(&self) -> Result<Box<dyn Read + Send>> {
        let mut file = File::open(&self.path).map_err(self.io("open"))?;
        file.seek(SeekFrom::Start(self.start)).map_err(self.io("seek in"))?;
        let stored = BufReader::with_capacity(1 << 16, file.take(self.stored));
        Ok(if self.deflated { Box::new(DeflateDecoder::new(stored)) } else { Box::new(stored) })
    }
}

/// An array's place, type and shape: (rows, columns), a one-dimensional array having one column.
#[derive(Clone, Debug)]
pub(super) struct Layout {
    span: Span,
    element: Element,
    /// Bytes before the first number.
    header_bytes: u64,
    pub(super) rows: u64,
    pub(super) columns: usize,
}

impl Layout {
    /// The array of a `.npy` file.
    pub(super) fn of_file(path: &Path) -> Result<Self> {
        let (_, bytes) = super::open_file(path)?;
        let path = path.to_owned();
        Self::read(Span { path, entry: None, start: 0, stored: bytes, bytes, deflated: false })
    }

    /// The arrays `0.npy`, `1.npy`, ... of a `.npz` archive (Zip64 too), which must be `count`.
    pub(super) fn of_archive(path: &Path, count: usize) -> Result<Vec<Self>> {
        let (file, _) = super::open_file(path)?;
        let damaged = |error: zip::result::ZipError| {
            DataError::bad_file(
                path,
                format!("not a readable npz archive: {error}; is the file cut short?"),
            )
        };
        let mut archive = zip::ZipArchive::new(BufReader::new(file)).map_err(damaged)?;
        let mut found: Vec<Option<Span>> = vec![None; count];
        let mut names = Vec::with_capacity(archive.len());
        for i in 0..archive.len() {
            let entry = archive.by_index_raw(i).map_err(damaged)?;
            let name = entry.name().map_err(damaged)?.into_owned();
            let deflated = match entry.compression() {
                zip::CompressionMethod::Stored => false,
                zip::CompressionMethod::Deflated => true,
                other => {
                    let reason =
                        format!("array {name} is compressed by {other}; deflate or none is needed");
                    return Err(DataError::bad_file(path, reason));
                }
            };
            let start = entry.data_start().filter(|_| !entry.encrypted()).ok_or_else(|| {
                DataError::bad_file(path, format!("array {name} is encrypted or has no data"))
            })?;
            if let Some(slot) = (0..count).find(|k| format!("{k}.npy") == name) {
                found[slot] = Some(Span {
                    path: path.to_owned(),
                    entry: Some(name.clone()),
                    start,
                    stored: entry.compressed_size(),
                    bytes: entry.size(),
                    deflated,
                });
            }
            names.push(name);
        }
        let spans: Option<Vec<Span>> = found.into_iter().collect();
        match spans.filter(|spans| spans.len() == names.len()) {
            Some(spans) => spans.into_iter().map(Self::read).collect(),
            None => Err(DataError::bad_file(
                path,
                format!(
                    "{} arrays ({}) for {count} features; one array a feature is needed, named 0.npy, 1.npy, ... in feature order",
                    names.len(),
                    names.join(", ")
                ),
            )),
        }
    }

    fn read(span: Span) -> Result<Self> {
        let header = Header::read(&mut span.decode()?).map_err(|reason| {
            span.fault(format!("not a readable npy header ({reason}); is the file cut short?"))
        })?;
        let kind = &header.kind;
        let element = element_of(kind).map_err(|reason| span.fault(reason))?;
        let (rows, columns) = match *header.shape {
            [rows] => (rows, 1),
            [rows, columns] => (rows, columns),
            ref shape => {
                let reason = format!("shape {shape:?} has not 1 or 2 dimensions");
                return Err(span.fault(reason));
            }
        };
        if header.fortran && rows > 1 && columns > 1 {
            return Err(span.fault("the array is in Fortran order; save it in C order"));
        }
        let needed = rows
            .checked_mul(columns)
            .and_then(|count| count.checked_mul(element.bytes() as u64))
            .and_then(|data| data.checked_add(header.bytes));
        if needed != Some(span.bytes) {
            return Err(span.fault(format!(
                "shape ({rows}, {columns}) of type {kind} needs {} bytes, there are {}; is the file cut short?",
                needed.map_or("more than 2^64".to_owned(), |needed| needed.to_string()),
                span.bytes
            )));
        }
        let columns = usize::try_from(columns)
            .map_err(|_| span.fault(format!("{columns} columns do not fit memory")))?;
        Ok(Self { header_bytes: header.bytes, span, element, rows, columns })
    }

    /// Whether the numbers are integers (or booleans).
    pub(super) fn is_integer(&self) -> bool {
        !matches!(self.element, Element::Float(_))
    }

    /// Name of the array, for errors.
    pub(super) fn name(&self) -> String {
        match &self.span.entry {
            Some(entry) => format!("{} array {entry}", self.span.path.display()),
            None => self.span.path.display().to_string(),
        }
    }

    /// An error about the array.
    pub(super) fn fault(&self, reason: impl std::fmt::Display) -> DataError {
        self.span.fault(reason)
    }

    /// Opens the array at its first row.
    pub(super) fn open(&self) -> Result<Rows> {
        let mut source = Source::Stream(self.span.decode()?);
        if self.span.deflated {
            if let Source::Stream(stream) = &mut source {
                discard(stream, self.header_bytes)
                    .map_err(|error| self.fault(format!("cannot decompress: {error}")))?;
            }
        } else {
            let mut file = File::open(&self.span.path).map_err(self.span.io("open"))?;
            let first = self.span.start + self.header_bytes;
            file.seek(SeekFrom::Start(first)).map_err(self.span.io("seek in"))?;
            source = Source::File(file);
        }
        Ok(Rows { layout: self.clone(), source, scratch: Vec::new(), row: 0 })
    }
}

enum Source {
    /// At the next row.
    File(File),
    /// Decoded bytes, at the next row.
    Stream(Box<dyn Read + Send>),
}

/// Reads the rows of an array one after the other.
pub(super) struct Rows {
    layout: Layout,
    source: Source,
    scratch: Vec<u8>,
    /// The next row.
    row: u64,
}

impl Rows {
    pub(super) fn columns(&self) -> usize {
        self.layout.columns
    }

    fn row_bytes(&self) -> usize {
        self.layout.columns * self.layout.element.bytes()
    }

    /// Passes over `rows` rows that the caller knows to be there.
    pub(super) fn skip(&mut self, rows: u64) -> Result<()> {
        // The layout was checked: all rows together fit the file, which is below 2^63 bytes.
        let bytes = rows * self.row_bytes() as u64;
        let result = match &mut self.source {
            Source::File(file) => file.seek_relative(bytes as i64),
            Source::Stream(stream) => discard(stream, bytes),
        };
        result.map_err(|error| self.failure("seek in", 0, error))?;
        self.row += rows;
        Ok(())
    }

    /// An error met `bytes` after the next row's start. In an archive it names array and row:
    /// there the system's message alone (`corrupt deflate stream`) would leave both open.
    fn failure(&self, operation: &'static str, bytes: usize, error: std::io::Error) -> DataError {
        let span = &self.layout.span;
        if span.entry.is_none() {
            return span.io(operation)(error);
        }
        let row = self.row + (bytes / self.row_bytes().max(1)) as u64;
        span.fault(format!("cannot read on from row {row}: {error}; fetch the file again"))
    }

    /// Reads `rows` rows that the caller knows to be there into `scratch`; returns their bytes.
    fn fill(&mut self, rows: usize) -> Result<u64> {
        self.scratch.resize(rows * self.row_bytes(), 0);
        let result = match &mut self.source {
            Source::File(file) => read_whole(file, &mut self.scratch),
            Source::Stream(stream) => read_whole(stream, &mut self.scratch),
        };
        result.map_err(|(bytes, error)| self.failure("read", bytes, error))?;
        self.row += rows as u64;
        Ok(self.scratch.len() as u64)
    }

    /// Appends `rows` rows to `out` as float32, rounded to nearest; returns the bytes read.
    pub(super) fn read_f32(&mut self, rows: usize, out: &mut Vec<f32>) -> Result<u64> {
        let bytes = self.fill(rows)?;
        decode_f32(self.layout.element, &self.scratch, out);
        Ok(bytes)
    }

    /// Appends `rows` rows of integers to `out`, unsigned ones by their bits; returns the bytes read,
    /// or, unless `raw` allows them, the place in the rows and the value of one above 2^63 - 1.
    pub(super) fn read_i64(
        &mut self,
        rows: usize,
        raw: bool,
        out: &mut Vec<i64>,
    ) -> Result<std::result::Result<u64, (usize, u64)>> {
        let bytes = self.fill(rows)?;
        let first = out.len();
        decode_i64(self.layout.element, &self.scratch, out);
        if self.layout.element == Element::Unsigned(8)
            && !raw
            && let Some(at) = out[first..].iter().position(|value| *value < 0)
        {
            return Ok(Err((at, out[first + at] as u64)));
        }
        Ok(Ok(bytes))
    }
}

/// Runs `$then` on the numbers of `$bytes`, taken as little-endian `$type`.
macro_rules! numbers {
    ($bytes:expr, $type:ty) => {
        $bytes.as_chunks().0.iter().map(|chunk| <$type>::from_le_bytes(*chunk))
    };
}

fn decode_f32(element: Element, bytes: &[u8], out: &mut Vec<f32>) {
    match element {
        Element::Float(2) => out.extend(numbers!(bytes, f16).map(f32::from)),
        Element::Float(4) => out.extend(numbers!(bytes, f32)),
        Element::Float(_) => out.extend(numbers!(bytes, f64).map(|value| value as f32)),
        Element::Unsigned(8) => out.extend(numbers!(bytes, u64).map(|value| value as f32)),
        Element::Signed(_) | Element::Unsigned(_) => {
            let mut integers = Vec::with_capacity(bytes.len() / element.bytes());
            decode_i64(element, bytes, &mut integers);
            out.extend(integers.iter().map(|value| *value as f32));
        }
    }
}

/// Integers; floating-point elements are not given to this function, and 64-bit unsigned ones
/// come out as their bits.
fn decode_i64(element: Element, bytes: &[u8], out: &mut Vec<i64>) {
    match element {
        Element::Signed(1) => out.extend(numbers!(bytes, i8).map(i64::from)),
        Element::Signed(2) => out.extend(numbers!(bytes, i16).map(i64::from)),
        Element::Signed(4) => out.extend(numbers!(bytes, i32).map(i64::from)),
        Element::Unsigned(1) => out.extend(numbers!(bytes, u8).map(i64::from)),
        Element::Unsigned(2) => out.extend(numbers!(bytes, u16).map(i64::from)),
        Element::Unsigned(4) => out.extend(numbers!(bytes, u32).map(i64::from)),
        Element::Signed(_) | Element::Unsigned(_) | Element::Float(_) => {
            out.extend(numbers!(bytes, i64));
        }
    }
}

/// Fills `buffer`; an error comes with the number of bytes that were read before.
fn read_whole(
    source: &mut dyn Read,
    buffer: &mut [u8],
) -> std::result::Result<(), (usize, std::io::Error)> {
    let mut got = 0;
    while got < buffer.len() {
        match source.read(&mut buffer[got..]) {
            Ok(0) => return Err((got, std::io::ErrorKind::UnexpectedEof.into())),
            Ok(more) => got += more,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err((got, error)),
        }
    }
    Ok(())
}

/// Reads and forgets `bytes` bytes.
fn discard(stream: &mut dyn Read, bytes: u64) -> std::io::Result<()> {
    let got = std::io::copy(&mut stream.take(bytes), &mut std::io::sink())?;
    if got == bytes { Ok(()) } else { Err(std::io::ErrorKind::UnexpectedEof.into()) }
}

/// The header of an `.npy`: magic, version, length of the text, and the text of a Python dict with
/// `descr`, `fortran_order` and `shape`.
#[derive(Debug, PartialEq)]
struct Header {
    /// Type of the numbers, such as `<f4`.
    kind: String,
    fortran: bool,
    shape: Vec<u64>,
    /// Bytes of the header.
    bytes: u64,
}

/// Longest text of a header: real ones have a few hundred bytes.
const TEXT_BYTES_MAX: usize = 1 << 16;

impl Header {
    fn read(source: &mut dyn Read) -> std::result::Result<Self, String> {
        let mut take = |bytes: usize| {
            let mut taken = vec![0; bytes];
            source.read_exact(&mut taken).map(|()| taken).map_err(|error| error.to_string())
        };
        let start = take(8)?;
        if start[..6] != *b"\x93NUMPY" {
            return Err("the first bytes are not those of an npy array".to_owned());
        }
        // The length of the text has 2 bytes in version 1 and 4 in versions 2 and 3.
        let (bytes, length) = match start[6] {
            1 => (10, take(2)?.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte))),
            2 | 3 => (12, take(4)?.iter().rev().fold(0, |n, byte| n << 8 | usize::from(*byte))),
            version => return Err(format!("version {version} is not known")),
        };
        if length > TEXT_BYTES_MAX {
            return Err(format!("the header is said to have {length} bytes"));
        }
        let text = String::from_utf8(take(length)?).map_err(|error| error.to_string())?;
        let value = |key: &str| {
            let (_, rest) = text.split_once(&format!("'{key}':")).ok_or(format!("no {key}"))?;
            Ok::<_, String>(rest.trim_start())
        };
        let kind = value("descr")?
            .strip_prefix('\'')
            .and_then(|rest| rest.split_once('\''))
            .ok_or("records are not numbers")?
            .0
            .to_owned();
        let fortran = value("fortran_order")?.starts_with("True");
        let shape = value("shape")?
            .strip_prefix('(')
            .and_then(|rest| rest.split_once(')'))
            .ok_or("shape is not a tuple")?
            .0
            .split(',')
            .map(str::trim)
            .filter(|number| !number.is_empty())
            .map(|number| number.parse().map_err(|_| format!("`{number}` in the shape")))
            .collect::<std::result::Result<_, _>>()?;
        Ok(Self { kind, fortran, shape, bytes: (bytes + length) as u64 })
    }
}

/// The numbers that a type such as `<f4` or `|u1` stands for.
fn element_of(kind: &str) -> std::result::Result<Element, String> {
    let fault = || format!("type {kind} is not a number of 8 to 64 bits");
    let mut letters = kind.chars();
    let (order, class) = (letters.next().ok_or_else(fault)?, letters.next().ok_or_else(fault)?);
    let bytes = letters.as_str().parse().map_err(|_| fault())?;
    if order == '>' && bytes > 1 {
        return Err(format!("type {kind} is big-endian; save it little-endian"));
    }
    match (class, bytes) {
        ('f', 2 | 4 | 8) => Ok(Element::Float(bytes)),
        ('i', 1 | 2 | 4 | 8) => Ok(Element::Signed(bytes)),
        ('u', 1 | 2 | 4 | 8) | ('b', 1) => Ok(Element::Unsigned(bytes)),
        _ => Err(fault()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header(text: &str) -> Vec<u8> {
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend_from_slice(&(text.len() as u16).to_le_bytes());
        bytes.extend_from_slice(text.as_bytes());
        bytes
    }

    #[test]
    fn headers_are_read_as_numpy_writes_them() {
        let read = |text: &str| Header::read(&mut &header(text)[..]);
        let text = "{'descr': '<f4', 'fortran_order': False, 'shape': (6000, 13), }  \n";
        let expected = Header {
            kind: "<f4".to_owned(),
            fortran: false,
            shape: vec![6000, 13],
            bytes: 10 + text.len() as u64,
        };
        assert_eq!(read(text), Ok(expected));
        let scalar = read("{'shape':(),'descr':'|u1','fortran_order':True}").unwrap();
        assert!(scalar.shape.is_empty());
        assert_eq!(read("{'shape':(3,),'descr':'|u1','fortran_order':True}").unwrap().shape, [3]);
        let broken = [
            ("{'shape':(3,),'fortran_order':True}", "no descr"),
            ("{'shape':(3,),'descr':[('a', '<f4')],'fortran_order':True}", "records"),
            ("{'shape':(-3,),'descr':'<f4','fortran_order':True}", "`-3` in the shape"),
            (
                "{'shape':(99999999999999999999,),'descr':'<f4','fortran_order':True}",
                "in the shape",
            ),
            ("{'shape': 3,'descr':'<f4','fortran_order':True}", "not a tuple"),
        ];
        for (text, part) in broken {
            assert!(read(text).unwrap_err().contains(part), "{text}");
        }
        assert!(Header::read(&mut &b"PK\x03\x04...."[..]).unwrap_err().contains("first bytes"));
        let huge = [b"\x93NUMPY\x02\x00".as_slice(), &[255; 4]].concat();
        assert!(Header::read(&mut &huge[..]).unwrap_err().contains("4294967295 bytes"));
    }

    #[test]
    fn types_are_numbers_or_refused() {
        assert_eq!(element_of("<f4"), Ok(Element::Float(4)));
        assert_eq!(element_of("|b1"), Ok(Element::Unsigned(1)));
        assert_eq!(element_of("<i8"), Ok(Element::Signed(8)));
        assert!(element_of(">i4").unwrap_err().contains("big-endian"));
        for kind in ["", "<", "<f", "<f16", "<U8", "|O", "<c8", "<M8[ns]", "<i0"] {
            assert!(element_of(kind).is_err(), "{kind}");
        }
    }

    proptest! {
        #[test]
        fn damaged_headers_are_faults(at in 0usize..80, byte in any::<u8>()) {
            let mut bytes =
                header("{'descr': '<f4', 'fortran_order': False, 'shape': (6000, 13), }          \n");
            let end = bytes.len();
            bytes[at.min(end - 1)] = byte;
            // Any outcome but a panic will do; what is read is checked against the file's size.
            let _ = Header::read(&mut &bytes[..]);
            prop_assert!(Header::read(&mut &bytes[..at.min(end - 1)]).is_err());
        }
    }
}
