//! Standard output and standard error, either of which may be closed or full at any time.
//!
//! Progress is worth nothing to a reader who has gone, so that failing to tell it never stops a
//! run. A result that cannot be printed is an error, unless its reader has just seen enough.

use std::error::Error as _;
use std::fmt::Display;
use std::io::{self, ErrorKind, Write};

use crate::{Error, Result};

/// Writes a line for people to standard error; a failure is of no consequence.
pub fn tell(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Writes what went wrong to standard error, with its causes.
pub fn tell_error(error: &Error) {
    let mut told = error.to_string();
    tell(format_args!("error: {told}"));
    let mut cause = error.source();
    while let Some(reason) = cause {
        // Many messages hold their cause already; nothing is told twice.
        let text = reason.to_string();
        if !told.contains(&text) {
            tell(format_args!("  because: {text}"));
            told = text;
        }
        cause = reason.source();
    }
}

/// Writes a result to standard output, as it is.
///
/// Errors: a failed write, other than to a pipe that its reader closed.
pub fn print(text: impl Display) -> Result<()> {
    let mut out = io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => {
            written.map_err(|source| Error::Write { path: "standard output".into(), source })
        }
    }
}
