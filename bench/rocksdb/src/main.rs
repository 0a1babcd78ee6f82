//! The log of the SSD tier against RocksDB: batched random reads and updates of rows in files
//! larger than the memory that either may take, past the page cache.
//!
//! ```text
//! both stores: write all rows, compact
//! each round:  the disk's own limit
//!              for each batch size: reads of ours, reads of RocksDB      the same rows
//!              updates of ours, updates of RocksDB                       flushed and compacted
//! ```
//! Who goes first changes from round to round. Every row read is held against what was written,
//! outside the clock. Updates are timed until nothing is left to compact, so that no store leaves
//! its work to somebody else's time.

#[path = "../../src/cache/disk.rs"]
mod disk;
mod stores;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use serde::Serialize;

use disk::Pages;
use stores::{Ours, Rocks, Store, Usage};

/// Why there are no figures.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Our log refused.
    #[error(transparent)]
    Cache(#[from] tessera_cache::CacheError),
    /// RocksDB refused.
    #[error("rocksdb: {0}")]
    Rocks(#[from] rocksdb::Error),
    /// RocksDB does not know its family of columns.
    #[error("rocksdb: the default column family is not open")]
    NoFamily,
    /// RocksDB does not count what is asked for.
    #[error("rocksdb: its statistics have no {0}")]
    NoTicker(String),
    /// Threads could not be started.
    #[error("cannot start threads: {0}")]
    Threads(String),
    /// The file system refused.
    #[error("cannot use {path}: {source}")]
    File {
        /// The folder.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// A row that was written is not there.
    #[error("{store} has lost row {row}")]
    Missing {
        /// The store.
        store: &'static str,
        /// The row.
        row: u64,
    },
    /// A row is not what was written.
    #[error("wrong answer, no figures: {store}, row {row} is not what was written")]
    Wrong {
        /// The store.
        store: &'static str,
        /// The row.
        row: u64,
    },
    /// Knobs that make no sense.
    #[error("{0}")]
    Usage(String),
}

/// Result of a part.
pub type Result<T> = std::result::Result<T, Error>;

/// The log of the SSD tier against RocksDB.
#[derive(Clone, Debug, Parser, Serialize)]
struct Args {
    /// A folder that is not there yet, on the disk to measure; deleted at the end
    #[arg(long)]
    dir: PathBuf,
    /// Rows
    #[arg(long, default_value_t = 4_000_000)]
    rows: u64,
    /// Bytes of a row, without its number
    #[arg(long, default_value_t = 256)]
    row_bytes: usize,
    /// MiB that RocksDB may take for buffers, blocks, indexes and filters; ours takes its index
    /// and buffers whatever this says, and must stay below
    #[arg(long, default_value_t = 128)]
    memory_mib: u64,
    /// Rows of a read, one size after the other
    #[arg(long, value_delimiter = ',', default_value = "64,1024,16384")]
    batch: Vec<usize>,
    /// Rows read of each size in a round
    #[arg(long, default_value_t = 65_536)]
    reads: usize,
    /// Rows of an update
    #[arg(long, default_value_t = 16_384)]
    update_batch: usize,
    /// Rows updated in a round
    #[arg(long, default_value_t = 400_000)]
    updates: usize,
    /// Rounds
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Threads that RocksDB reads with
    #[arg(long, default_value_t = 32)]
    threads: usize,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What one round measured, rows a second.
#[derive(Clone, Debug, Serialize)]
struct Round {
    /// Random reads of 4 KiB a second at 1, 8 and 64 in flight.
    limit: [f64; 3],
    /// (batch, ours, RocksDB).
    reads: Vec<(usize, f64, f64)>,
    /// (ours, RocksDB).
    updates: (f64, f64),
}

/// All of it.
#[derive(Clone, Debug, Serialize)]
struct Figures {
    args: Args,
    rounds: Vec<Round>,
    /// Ours, then RocksDB, after loading and at the end.
    loaded: [Usage; 2],
    end: [Usage; 2],
}

/// A sequence of numbers without a pattern.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = disk::mix(self.0);
        self.0
    }

    /// About `count` different rows below `rows`, ascending.
    fn rows(&mut self, count: usize, rows: u64) -> Vec<u64> {
        let mut drawn: Vec<u64> = (0..count)
            .map(|_| ((u128::from(self.next()) * u128::from(rows)) >> 64) as u64)
            .collect();
        drawn.sort_unstable();
        drawn.dedup();
        drawn
    }
}

/// A row's bytes after `version` updates.
fn fill(row: u64, version: u32, bytes: &mut [u8]) {
    let mut word = disk::mix(row ^ (u64::from(version) << 40));
    for bytes in bytes.chunks_mut(8) {
        word = disk::mix(word);
        bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
    }
}

/// Bytes of rows at their versions.
fn filled(rows: &[u64], versions: &[u32], row_bytes: usize) -> Vec<u8> {
    let mut bytes = vec![0; rows.len() * row_bytes];
    for (&row, bytes) in rows.iter().zip(bytes.chunks_exact_mut(row_bytes)) {
        fill(row, versions[row as usize], bytes);
    }
    bytes
}

/// Reads batches of rows and checks them; rows a second.
fn read(
    store: &dyn Store,
    batches: &[Vec<u64>],
    versions: &[u32],
    row_bytes: usize,
) -> Result<f64> {
    let (mut seconds, mut count) = (0.0, 0);
    for rows in batches {
        let mut bytes = vec![0; rows.len() * row_bytes];
        let start = Instant::now();
        store.get(rows, &mut bytes)?;
        seconds += start.elapsed().as_secs_f64();
        count += rows.len();
        let want = filled(rows, versions, row_bytes);
        if let Some(at) = (0..rows.len())
            .find(|&i| bytes[i * row_bytes..][..row_bytes] != want[i * row_bytes..][..row_bytes])
        {
            return Err(Error::Wrong { store: store.name(), row: rows[at] });
        }
    }
    Ok(count as f64 / seconds)
}

/// Writes batches of rows at their versions, down to the medium and compacted; rows a second.
fn update(store: &dyn Store, batches: &[(Vec<u64>, Vec<u8>)]) -> Result<f64> {
    let start = Instant::now();
    for (rows, bytes) in batches {
        store.put(rows, bytes)?;
    }
    store.settle()?;
    let count: usize = batches.iter().map(|(rows, _)| rows.len()).sum();
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

fn measure(args: &Args) -> Result<Figures> {
    if args.rows == 0 || args.row_bytes == 0 || args.rounds == 0 || args.batch.contains(&0) {
        let text = "--rows, --row-bytes, --rounds and --batch must be at least 1";
        return Err(Error::Usage(text.into()));
    }
    let file = |source| Error::File { path: args.dir.clone(), source };
    std::fs::create_dir(&args.dir).map_err(file)?;
    let _folder = Folder(args.dir.clone());
    let ours_dir = args.dir.join("tessera");
    let ours = Ours::create(&ours_dir, args.rows, args.row_bytes)?;
    let memory_bytes = args.memory_mib << 20;
    let rocks =
        Rocks::create(&args.dir.join("rocksdb"), args.row_bytes, memory_bytes, args.threads)?;
    let taken = ours.usage()?.memory_bytes;
    if taken > memory_bytes {
        return Err(Error::Usage(format!("our index takes {taken} bytes; raise --memory-mib")));
    }
    let both: [&dyn Store; 2] = [&ours, &rocks];

    let mut versions = vec![0u32; args.rows as usize];
    for first in (0..args.rows).step_by(args.update_batch.max(1)) {
        let rows: Vec<u64> = (first..args.rows.min(first + args.update_batch as u64)).collect();
        let bytes = filled(&rows, &versions, args.row_bytes);
        both.iter().try_for_each(|store| store.put(&rows, &bytes))?;
    }
    both.iter().try_for_each(|store| store.settle())?;
    let usage = || -> Result<[Usage; 2]> { Ok([ours.usage()?, rocks.usage()?]) };
    let loaded = usage()?;

    let mut numbers = Numbers(1);
    let mut rounds = Vec::with_capacity(args.rounds);
    for round in 0..args.rounds {
        let order = if round % 2 == 0 { [0, 1] } else { [1, 0] };
        let pages = Pages::below(&ours_dir).map_err(file)?;
        let mut limit = [0.0; 3];
        for (limit, depth) in limit.iter_mut().zip([1, 8, 64]) {
            let second = Duration::from_secs(1);
            *limit = pages.rate(depth, second, numbers.next()).map_err(file)?;
        }
        drop(pages);
        let mut reads = Vec::new();
        for &batch in &args.batch {
            let batches: Vec<Vec<u64>> =
                (0..args.reads.div_ceil(batch)).map(|_| numbers.rows(batch, args.rows)).collect();
            let mut rates = [0.0; 2];
            for store in order {
                rates[store] = read(both[store], &batches, &versions, args.row_bytes)?;
            }
            reads.push((batch, rates[0], rates[1]));
        }
        let mut batches = Vec::new();
        for _ in 0..args.updates.div_ceil(args.update_batch.max(1)) {
            let rows = numbers.rows(args.update_batch, args.rows);
            for &row in &rows {
                versions[row as usize] += 1;
            }
            let bytes = filled(&rows, &versions, args.row_bytes);
            batches.push((rows, bytes));
        }
        let mut rates = [0.0; 2];
        for store in order {
            rates[store] = update(both[store], &batches)?;
        }
        rounds.push(Round { limit, reads, updates: (rates[0], rates[1]) });
    }
    Ok(Figures { args: args.clone(), rounds, loaded, end: usage()? })
}

/// A folder that goes when this does.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left is in the user's own folder.
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Median, least and most.
fn spread(values: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values[values.len() / 2];
    (middle, values[0], values[values.len() - 1])
}

fn print(figures: &Figures) {
    let rounds = &figures.rounds;
    let load = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let load = load.split_whitespace().next().unwrap_or("?");
    let Args { rows, row_bytes, memory_mib, .. } = figures.args;
    println!("{rows} rows of {row_bytes} bytes, {memory_mib} MiB for RocksDB, load {load}");
    for (i, depth) in [1, 8, 64].into_iter().enumerate() {
        let (middle, low, high) = spread(rounds.iter().map(|round| round.limit[i]));
        println!(
            "random 4 KiB reads, {depth:>2} in flight: {middle:.0} a second ({low:.0} to {high:.0})"
        );
    }
    println!(
        "\n{:<14} {:>12} {:>12} | {:>22} | {:>22}",
        "rows a second", "tessera", "rocksdb", "ratio", "share of the limit"
    );
    let line = |name: String, pairs: Vec<(f64, f64)>, limits: Option<Vec<f64>>| {
        let ours = spread(pairs.iter().map(|pair| pair.0)).0;
        let theirs = spread(pairs.iter().map(|pair| pair.1)).0;
        let (ratio, low, high) = spread(pairs.iter().map(|pair| pair.0 / pair.1));
        let share = limits.map_or(String::new(), |limits| {
            let shares = pairs.iter().zip(&limits).map(|(pair, limit)| pair.0 / limit);
            let (share, low, high) = spread(shares);
            format!("{share:.2} ({low:.2} to {high:.2})")
        });
        let ratio = format!("{ratio:.2} ({low:.2} to {high:.2})");
        println!("{name:<14} {ours:>12.0} {theirs:>12.0} | {ratio:>22} | {share:>22}");
    };
    for (i, batch) in figures.args.batch.iter().enumerate() {
        let pairs = rounds.iter().map(|round| (round.reads[i].1, round.reads[i].2)).collect();
        let limits = rounds.iter().map(|round| round.limit[2]).collect();
        line(format!("read {batch}"), pairs, Some(limits));
    }
    line("update".into(), rounds.iter().map(|round| round.updates).collect(), None);
    for (name, store) in [("tessera", 0), ("rocksdb", 1)] {
        let (loaded, end) = (figures.loaded[store], figures.end[store]);
        let put = (end.put_bytes - loaded.put_bytes) as f64;
        let written = (end.written_bytes - loaded.written_bytes) as f64;
        println!(
            "{name}: write amplification of updates {:.2}, {:.0} MB of files, {:.0} MB of memory",
            written / put,
            end.file_bytes as f64 / 1e6,
            end.memory_bytes as f64 / 1e6
        );
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    match measure(&args) {
        Ok(figures) if args.json => {
            let text = serde_json::to_string_pretty(&figures);
            println!("{}", text.expect("figures have string keys only"));
            ExitCode::SUCCESS
        }
        Ok(figures) => {
            print(&figures);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(if matches!(error, Error::Usage(_)) { 2 } else { 1 })
        }
    }
}
