//! Kernels' sources into machine code by NVRTC, kept on disk between runs.
//!
//! ```text
//! file  = <source's name>-<target>-<hash of key, 16 hex digits>.cubin
//! bytes   0..16   "tessera cubin 1\n"
//!        16..24   length of the key   (little-endian, as all numbers)
//!        24..32   length of the image
//!        32..40   FNV-1a of key and image
//!        40..     key: NVRTC's version, options, name and text of every header, text
//!                 image
//! ```
//! The whole key is compared, so that a file is never taken for another. A file that is damaged,
//! or cannot be read, is compiled anew; one that cannot be written is done without.

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::nvrtc::sys::{self, nvrtcResult};

use super::KernelSource;
use super::libraries;
use crate::{DeviceError, Result, fnv1a};

/// What every source may include.
const HEADER: (&str, &str) = ("tessera.cuh", include_str!("../../kernels/tessera.cuh"));

/// Options beside the architecture. Sums and products round as the host's do: apart, with
/// subnormal numbers, division and root correctly rounded.
const OPTIONS: [&str; 5] =
    ["--std=c++17", "--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false"];

const MAGIC: &[u8; 16] = b"tessera cubin 1\n";
const HEAD_BYTES: usize = 40;

/// What to compile for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// Machine code of a compute capability.
    Machine(u32),
    /// Code that the driver translates for a GPU that NVRTC does not know.
    Virtual(u32),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Machine(capability) => write!(f, "sm_{capability}"),
            Self::Virtual(capability) => write!(f, "compute_{capability}"),
        }
    }
}

/// Compiles sources, or reads what was compiled before.
pub(super) struct Compiler {
    folder: Option<PathBuf>,
    compiled: AtomicU64,
    read_back: AtomicU64,
}

impl Compiler {
    pub(super) fn new(folder: Option<PathBuf>) -> Self {
        Self { folder, compiled: AtomicU64::new(0), read_back: AtomicU64::new(0) }
    }

    pub(super) fn compiled(&self) -> u64 {
        self.compiled.load(Ordering::Relaxed)
    }

    pub(super) fn read_back(&self) -> u64 {
        self.read_back.load(Ordering::Relaxed)
    }

    /// What the driver loads on a GPU of this compute capability; ends with a zero byte.
    ///
    /// Errors: [`DeviceError::Unavailable`] without NVRTC, [`DeviceError::Compile`].
    pub(super) fn compile(&self, source: &KernelSource, capability: u32) -> Result<Vec<u8>> {
        let found = libraries::nvrtc().map_err(|reason| DeviceError::Unavailable { reason })?;
        let target = choose(capability, &supported());
        let key = key(&found.version, source, target);
        let path = self.folder.as_deref().map(|folder| {
            let hash = fnv1a(&key);
            folder.join(format!("{}-{target}-{hash:016x}.cubin", source.name))
        });
        if let Some(image) = path.as_deref().and_then(|path| read(path, &key)) {
            self.read_back.fetch_add(1, Ordering::Relaxed);
            return Ok(image);
        }
        let image = Program::compile(source, target)?;
        self.compiled.fetch_add(1, Ordering::Relaxed);
        if let Some(path) = path {
            // Another run compiles again then.
            let _ = write(&path, &key, &image);
        }
        Ok(image)
    }
}

/// The target for a compute capability, of those that NVRTC knows: its own machine code; else that
/// of the nearest older one of its generation, which it runs; else what the driver translates.
fn choose(capability: u32, supported: &[u32]) -> Target {
    let older = || supported.iter().copied().filter(|&known| known <= capability);
    match older().filter(|known| known / 10 == capability / 10).max() {
        Some(known) => Target::Machine(known),
        None => older().max().map_or(Target::Machine(capability), Target::Virtual),
    }
}

/// The compute capabilities that NVRTC knows.
fn supported() -> Vec<u32> {
    let mut count: c_int = 0;
    // SAFETY: NVRTC is loaded, the pointer is to a local.
    let result = unsafe { sys::nvrtcGetNumSupportedArchs(&mut count) };
    if result != nvrtcResult::NVRTC_SUCCESS || count <= 0 {
        return Vec::new();
    }
    let mut known = vec![0 as c_int; count as usize];
    // SAFETY: as above, of as many numbers as it said.
    match unsafe { sys::nvrtcGetSupportedArchs(known.as_mut_ptr()) } {
        nvrtcResult::NVRTC_SUCCESS => known.into_iter().map(|known| known as u32).collect(),
        _ => Vec::new(),
    }
}

/// Everything that what is compiled depends on.
fn key(version: &str, source: &KernelSource, target: Target) -> Vec<u8> {
    let mut key = format!("NVRTC {version} {target} {}\n", OPTIONS.join(" ")).into_bytes();
    let texts = std::iter::once(&HEADER).chain(source.headers);
    for (name, text) in texts.copied().chain([(source.name, source.text)]) {
        key.extend(format!("{name} {}\n", text.len()).into_bytes());
        key.extend(text.as_bytes());
    }
    key
}

/// The image of a file, if it is the one of `key` and whole.
fn read(path: &Path, key: &[u8]) -> Option<Vec<u8>> {
    let bytes = std::fs::read(path).ok()?;
    let (head, rest) = bytes.split_at_checked(HEAD_BYTES)?;
    let number = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    let (key_len, image_len) = (usize::try_from(number(16)?).ok()?, number(24)?);
    let (stored, image) = rest.split_at_checked(key_len)?;
    let whole = &head[..16] == MAGIC
        && stored == key
        && image.len() as u64 == image_len
        && fnv1a(rest) == number(32)?;
    whole.then(|| image.to_vec())
}

/// Writes a file beside its place and moves it there, so that nobody reads half of it.
fn write(path: &Path, key: &[u8], image: &[u8]) -> std::io::Result<()> {
    let mut rest = key.to_vec();
    rest.extend(image);
    let mut bytes = MAGIC.to_vec();
    for number in [key.len() as u64, image.len() as u64, fnv1a(&rest)] {
        bytes.extend(number.to_le_bytes());
    }
    bytes.extend(rest);
    let folder = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder)?;
    let beside = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&beside, bytes)
        .and_then(|()| std::fs::rename(&beside, path))
        .inspect_err(|_| drop(std::fs::remove_file(&beside)))
}

/// A program of NVRTC, destroyed when dropped.
struct Program(sys::nvrtcProgram);

impl Program {
    /// Compiles a source; what it gives ends with a zero byte.
    fn compile(source: &KernelSource, target: Target) -> Result<Vec<u8>> {
        let refuse = |log: String| DeviceError::Compile {
            source_name: source.name,
            target: target.to_string(),
            log,
        };
        let c_text = |text: &str| {
            CString::new(text).map_err(|_| refuse("a text has a zero byte in it".into()))
        };
        let texts = || std::iter::once(&HEADER).chain(source.headers);
        let names = texts().map(|(name, _)| c_text(name)).collect::<Result<Vec<_>>>()?;
        let headers = texts().map(|(_, text)| c_text(text)).collect::<Result<Vec<_>>>()?;
        let pointers = |texts: &[CString]| texts.iter().map(|text| text.as_ptr()).collect();
        let (name_pointers, header_pointers): (Vec<_>, Vec<_>) =
            (pointers(&names), pointers(&headers));
        let (text, name) = (c_text(source.text)?, c_text(&format!("{}.cu", source.name))?);
        let mut program = Self(std::ptr::null_mut());
        // SAFETY: all strings end with a zero byte and outlive the call.
        let result = unsafe {
            sys::nvrtcCreateProgram(
                &mut program.0,
                text.as_ptr(),
                name.as_ptr(),
                names.len() as c_int,
                header_pointers.as_ptr(),
                name_pointers.as_ptr(),
            )
        };
        if result != nvrtcResult::NVRTC_SUCCESS {
            return Err(refuse(word(result)));
        }
        let architecture = format!("--gpu-architecture={target}");
        let options = OPTIONS
            .into_iter()
            .chain([architecture.as_str()])
            .map(c_text)
            .collect::<Result<Vec<_>>>()?;
        let option_pointers: Vec<_> = pointers(&options);
        // SAFETY: the program lives, the strings end with a zero byte and outlive the call.
        let result = unsafe {
            let count = options.len() as c_int;
            sys::nvrtcCompileProgram(program.0, count, option_pointers.as_ptr())
        };
        if result != nvrtcResult::NVRTC_SUCCESS {
            let log = program.text(sys::nvrtcGetProgramLogSize, sys::nvrtcGetProgramLog);
            let log = log.ok().map(|log| String::from_utf8_lossy(&log).into_owned());
            let log = log.map(|log| log.trim_end_matches(['\0', '\n']).to_owned());
            return Err(refuse(log.filter(|log| !log.is_empty()).unwrap_or_else(|| word(result))));
        }
        let image = match target {
            Target::Machine(_) => program.text(sys::nvrtcGetCUBINSize, sys::nvrtcGetCUBIN),
            Target::Virtual(_) => program.text(sys::nvrtcGetPTXSize, sys::nvrtcGetPTX),
        };
        let mut image = image.map_err(|result| refuse(word(result)))?;
        if image.last() != Some(&0) {
            image.push(0);
        }
        Ok(image)
    }

    /// What a pair of NVRTC's functions gives: the size, then the bytes.
    fn text(
        &self,
        size: unsafe fn(sys::nvrtcProgram, *mut usize) -> nvrtcResult,
        get: unsafe fn(sys::nvrtcProgram, *mut c_char) -> nvrtcResult,
    ) -> std::result::Result<Vec<u8>, nvrtcResult> {
        let mut len = 0;
        // SAFETY: the program lives, the pointer is to a local.
        match unsafe { size(self.0, &mut len) } {
            nvrtcResult::NVRTC_SUCCESS => {}
            result => return Err(result),
        }
        let mut bytes = vec![0u8; len];
        // SAFETY: as above; there is room for as many bytes as it said.
        match unsafe { get(self.0, bytes.as_mut_ptr().cast()) } {
            nvrtcResult::NVRTC_SUCCESS => Ok(bytes),
            result => Err(result),
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: a program that was created, destroyed once.
            let _ = unsafe { sys::nvrtcDestroyProgram(&mut self.0) };
        }
    }
}

/// NVRTC's word for a result.
fn word(result: nvrtcResult) -> String {
    // SAFETY: NVRTC is loaded; it gives a string that lives for ever.
    let text = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(result)) };
    text.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_are_the_best_that_the_compiler_knows() {
        let known = [75, 80, 86, 90, 100];
        for (capability, wanted) in [
            (90, Target::Machine(90)),
            (80, Target::Machine(80)),
            (89, Target::Machine(86)),
            (103, Target::Machine(100)),
            (120, Target::Virtual(100)),
            (70, Target::Machine(70)),
        ] {
            assert_eq!(choose(capability, &known), wanted, "{capability}");
        }
        assert_eq!(choose(90, &[]), Target::Machine(90));
    }

    #[test]
    fn a_file_is_read_only_whole_and_of_its_key() {
        let folder = std::env::temp_dir().join(format!("tessera-cubin-{}", std::process::id()));
        let path = folder.join("below").join("a.cubin");
        assert_eq!(read(&path, b"key"), None);
        write(&path, b"key", b"image\0").unwrap();
        assert_eq!(read(&path, b"key").as_deref(), Some(&b"image\0"[..]));
        assert_eq!(read(&path, b"kez"), None);
        let bytes = std::fs::read(&path).unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 4;
            std::fs::write(&path, &damaged).unwrap();
            assert_eq!(read(&path, b"key"), None, "byte {at}");
            std::fs::write(&path, &bytes[..at]).unwrap();
            assert_eq!(read(&path, b"key"), None, "cut at {at}");
        }
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn keys_differ_by_everything_that_is_compiled() {
        let source = KernelSource { name: "a", text: "x", headers: &[("h", "y")] };
        let all = [
            key("12.8", &source, Target::Machine(90)),
            key("12.9", &source, Target::Machine(90)),
            key("12.8", &source, Target::Machine(80)),
            key("12.8", &source, Target::Virtual(90)),
            key("12.8", &KernelSource { text: "z", ..source }, Target::Machine(90)),
            key("12.8", &KernelSource { headers: &[("h", "z")], ..source }, Target::Machine(90)),
            key("12.8", &KernelSource { headers: &[], ..source }, Target::Machine(90)),
        ];
        let different: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(different.len(), all.len());
    }
}
