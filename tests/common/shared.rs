//! Where the golden values are; for the tests of the program and of its library alike.

use std::path::{Path, PathBuf};

/// The folder of golden values and data: `$TESSERA_SHARED`, or `../shared` beside the repository.
///
/// `None` (after saying so) where it is not there; under `CI=true` that is a failure.
pub fn shared() -> Option<PathBuf> {
    let path = std::env::var_os("TESSERA_SHARED")
        .map(PathBuf::from)
        .unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared"));
    if path.join("golden").is_dir() {
        return Some(path);
    }
    assert!(
        std::env::var("CI").as_deref() != Ok("true"),
        "{} is not there, and CI needs it (set TESSERA_SHARED)",
        path.display()
    );
    eprintln!("skipped: no golden values at {}", path.display());
    None
}
