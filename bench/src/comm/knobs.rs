//! The command line of `comm`.

use std::fmt;
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueEnum};
use serde::Serialize;

use super::operation::Operation;
use crate::knobs::OutputKnobs;

/// Who the ranks are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Threads of this process
    Threads,
    /// Processes that mpirun or srun started (a build with --features mpi)
    Mpi,
}

/// A number of bytes, as `64k`: k, m and g are powers of 1024.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Size(pub usize);

/// Units and their binary logarithms, the largest first.
const UNITS: [(char, u32); 3] = [('g', 30), ('m', 20), ('k', 10)];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let lower = text.to_ascii_lowercase();
        let unit = UNITS.iter().find(|(letter, _)| lower.ends_with(*letter));
        let (digits, bits) =
            unit.map_or((&*lower, 0), |(_, bits)| (&lower[..lower.len() - 1], *bits));
        let number = digits
            .parse::<usize>()
            .map_err(|error| format!("`{text}` is no size such as 4096, 64k or 16m: {error}"))?;
        let bytes =
            number.checked_mul(1 << bits).ok_or_else(|| format!("`{text}` is too large"))?;
        if bytes % size_of::<f32>() != 0 {
            return Err(format!(
                "{bytes} bytes are no whole float32 numbers: give a multiple of 4"
            ));
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |bits: u32| self.0 > 0 && self.0.is_multiple_of(1 << bits);
        match UNITS.iter().find(|(_, bits)| whole(*bits)) {
            Some((letter, bits)) => write!(f, "{}{letter}", self.0 >> bits),
            None => write!(f, "{}", self.0),
        }
    }
}

impl Serialize for Size {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// `comm`.
#[derive(Clone, Debug, Args, Serialize)]
pub struct CommArgs {
    /// Who the ranks are
    #[arg(long, value_enum, default_value_t = Backend::Threads)]
    pub comm: Backend,
    /// Ranks [default: all cores, 2 at the least; with --comm mpi what the launcher says]
    #[arg(long)]
    pub ranks: Option<NonZeroUsize>,
    /// Successive ranks that count as a node [default: those whose machines have one name]
    #[arg(long)]
    pub ranks_per_node: Option<NonZeroUsize>,
    /// Operations, in order; codec_* is encoding and decoding, without an exchange [default: all]
    #[arg(long, value_delimiter = ',')]
    pub operations: Vec<Operation>,
    /// Bytes of the larger of what a rank gives and what it gets, one after the other
    #[arg(long, value_delimiter = ',', default_value = "0,1k,4k,16k,64k,256k,1m,4m,16m")]
    pub sizes: Vec<Size>,
    /// Numbers of a row: codec int8 has a scale for each
    #[arg(long, default_value = "128")]
    pub dim: NonZeroUsize,
    /// Operations measured
    #[arg(long, default_value_t = 100)]
    pub iterations: usize,
    /// Operations before those
    #[arg(long, default_value_t = 5)]
    pub warmup: usize,
    /// Write links and memory, measured, for `tessera plan --topology`
    #[arg(long, value_name = "FILE.toml")]
    pub topology: Option<PathBuf>,
    /// Figures.
    #[command(flatten)]
    #[serde(flatten)]
    pub output: OutputKnobs,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        for (text, bytes, shown) in [
            ("0", 0, "0"),
            ("4", 4, "4"),
            ("1k", 1024, "1k"),
            ("1500", 1500, "1500"),
            ("16M", 16 << 20, "16m"),
            ("2048k", 2 << 20, "2m"),
            ("1g", 1 << 30, "1g"),
        ] {
            let size: Size = text.parse().unwrap();
            assert_eq!((size.0, size.to_string().as_str()), (bytes, shown));
        }
        for (text, part) in [("k", "`k`"), ("1x", "`1x`"), ("6", "multiple of 4"), ("-4", "`-4`")] {
            let error = text.parse::<Size>().unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        assert!("99999999999g".parse::<Size>().unwrap_err().contains("too large"));
    }
}
