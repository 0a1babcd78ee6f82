//! The log of the SSD tier by itself, against the disk that it is on.
//!
//! ```text
//! put      every row once
//! disk     random 4 KiB reads of the log's own files, past the page cache      the limit of reads
//!          one file written from end to end and synced                        the limit of writes
//! get      random rows, in batches of several sizes
//! update   random rows written again until the log has been through compaction
//! ```

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_cache::log::{Options, SsdLog};
use tessera_cache::{ColdRows, Planes, RowLayout};

use super::disk::{PAGE, Pages};
use super::knobs::CacheArgs;
use super::point::{Bound, CachePoint};
use super::rows::{Block, check};
use crate::draw::Rng;
use crate::stats::{LatencyMs, median};
use crate::{BenchError, Result};

/// Rows of a put.
const PUT_ROWS: u64 = 16_384;

/// Rows of a get, one size after the other.
const GET_ROWS: [u64; 4] = [1, 64, 1024, 16_384];

/// Reads in flight when the disk's limit is taken.
const DEPTHS: [usize; 3] = [1, 8, 64];

/// Most bytes of the file whose writing is the limit of writes.
const WRITE_BYTES_MAX: usize = 256 << 20;

/// Bytes written in one go.
const WRITE_CHUNK: usize = 1 << 20;

/// The log of a table, every row of it written.
#[derive(Debug)]
pub struct Ssd {
    log: Arc<SsdLog>,
    dir: PathBuf,
    layout: RowLayout,
    rows: u64,
    /// How long each measurement of the disk takes.
    long: Duration,
    /// Random reads of 4 KiB a second with 1, 8 and 64 in flight.
    pub reads_per_s: [f64; 3],
}

impl Ssd {
    /// A log in the folder of the knobs, with every row in it; points say what that took.
    ///
    /// Errors: a folder that holds something; what the log or the file system says.
    pub fn fill(
        args: &CacheArgs,
        dir: &Path,
        layout: RowLayout,
        points: &mut Vec<CachePoint>,
    ) -> Result<Self> {
        let write = |source| BenchError::Write { path: dir.into(), source };
        std::fs::create_dir_all(dir).map_err(write)?;
        if std::fs::read_dir(dir).map_err(write)?.next().is_some() {
            let text = format!("--ssd-dir {} must be a new or empty folder", dir.display());
            return Err(BenchError::Usage(text));
        }
        let row_bytes = layout.weight_bytes + layout.state_bytes;
        let table_bytes =
            usize::try_from(args.rows).unwrap_or(usize::MAX).saturating_mul(row_bytes);
        let bytes = table_bytes.clamp(WRITE_CHUNK, WRITE_BYTES_MAX) / WRITE_CHUNK * WRITE_CHUNK;
        let write_s = sequential(&dir.join("limit"), bytes).map_err(write)?;
        let folder = dir.join("log");
        let long = Duration::from_millis(args.disk_ms);
        let budget_bytes = args.ssd_bytes.map_or(0, |size| size.0 as u64);
        let default = Options::default();
        let fitting = if budget_bytes == 0 { u64::MAX } else { budget_bytes / 4 };
        let options = Options {
            segment_bytes: default.segment_bytes.min(fitting),
            budget_bytes,
            reader: args.reader.reader(),
            rows: Some(args.rows),
            ..default
        };
        let log = Arc::new(SsdLog::create(&folder, 1, layout, options)?);
        let mut seconds = Vec::new();
        for first in (0..args.rows).step_by(PUT_ROWS as usize) {
            let rows: Vec<u64> = (first..args.rows.min(first + PUT_ROWS)).collect();
            let block = Block::filled(layout, &rows, |_| 0);
            let last = first + PUT_ROWS >= args.rows;
            let start = Instant::now();
            log.put(&rows, Planes { weights: &block.weights, state: &block.state })?;
            if last {
                log.flush()?;
            }
            seconds.push(start.elapsed().as_secs_f64());
        }
        let row_bytes = row_bytes as f64;
        let limit = Bound::new(
            "one file written from end to end and synced",
            bytes as f64 / write_s / row_bytes,
        );
        // The system takes most puts into its own memory: what counts is the whole, synced.
        let total: f64 = seconds.iter().sum();
        let mut put = CachePoint::new("put".into(), PUT_ROWS as f64, row_bytes, limit, &seconds);
        put.rows = PUT_ROWS.min(args.rows) as f64;
        put.rows_per_s = args.rows as f64 / total;
        put.gb_per_s = put.rows_per_s * row_bytes / 1e9;
        put.share_of_limit = put.rows_per_s / put.limit.rows_per_s;
        points.push(put);
        let mut ssd =
            Self { log, dir: folder, layout, rows: args.rows, long, reads_per_s: [f64::NAN; 3] };
        ssd.limits(args.seed, points)?;
        Ok(ssd)
    }

    /// For a store above.
    #[must_use]
    pub fn cold(&self) -> Arc<dyn ColdRows> {
        Arc::clone(&self.log) as Arc<dyn ColdRows>
    }

    /// How rows are read.
    #[must_use]
    pub fn reader(&self) -> &'static str {
        self.log.stats().reader
    }

    /// What rows are held against that a fetch reads many of.
    #[must_use]
    pub fn limit(&self, rows_a_read: f64) -> Bound {
        Bound::new(
            "random 4 KiB reads of the disk, 64 in flight",
            self.reads_per_s[2] * rows_a_read,
        )
    }

    /// Random reads of the log's files a second.
    fn reads_per_s(&self, depth: usize, seed: u64) -> Result<f64> {
        let read = |source| BenchError::Read { path: self.dir.clone(), source };
        let pages = Pages::below(&self.dir).map_err(read)?;
        pages.rate(depth, self.long, seed).map_err(read)
    }

    /// The disk's own limit.
    fn limits(&mut self, seed: u64, points: &mut Vec<CachePoint>) -> Result<()> {
        for (i, depth) in DEPTHS.into_iter().enumerate() {
            let rate = self.reads_per_s(depth, seed)?;
            self.reads_per_s[i] = rate;
            let limit = Bound::new("itself", rate);
            let case = format!("disk, {depth} in flight");
            // Each of `depth` reads in flight takes so long, on average.
            let seconds = [depth as f64 / rate];
            points.push(CachePoint {
                rows_per_s: rate,
                gb_per_s: rate * PAGE as f64 / 1e9,
                share_of_limit: 1.0,
                ..CachePoint::new(case, 1.0, PAGE as f64, limit, &seconds)
            });
        }
        Ok(())
    }

    /// Random rows, ascending, no two alike: as many as `count` of what is asked for.
    fn draw(&self, count: u64, rng: &mut Rng) -> Vec<u64> {
        let mut rows: Vec<u64> = (0..count).map(|_| rng.below(self.rows)).collect();
        rows.sort_unstable();
        rows.dedup();
        rows
    }

    /// Gets of random rows.
    ///
    /// Errors: a wrong row; what the log says.
    pub fn gets(&self, seed: u64, points: &mut Vec<CachePoint>) -> Result<()> {
        let RowLayout { weight_bytes, state_bytes } = self.layout;
        let mut rng = Rng::new(seed ^ 0x6765_7473);
        for count in GET_ROWS.into_iter().filter(|&count| count <= self.rows) {
            let (mut seconds, mut read) = (Vec::new(), 0);
            // Before and after: others may use the disk meanwhile.
            let depth = if count == 1 { DEPTHS[0] } else { DEPTHS[2] };
            let before = self.reads_per_s(depth, seed)?;
            let begin = Instant::now();
            while seconds.len() < 5 || begin.elapsed() < self.long {
                let rows = self.draw(count, &mut rng);
                let mut block = Block::new(self.layout, rows.len());
                let mut found = vec![false; rows.len()];
                let start = Instant::now();
                self.log.get(&rows, block.planes_mut(), &mut found)?;
                seconds.push(start.elapsed().as_secs_f64());
                read += rows.len();
                let i = rng.below(rows.len() as u64) as usize;
                let weights = &block.weights[i * weight_bytes..][..weight_bytes];
                check(rows[i], (weights, &block.state[i * state_bytes..][..state_bytes]), 0)?;
            }
            let rows = read as f64 / seconds.len() as f64;
            let limit = f64::midpoint(before, self.reads_per_s(depth, seed ^ 1)?);
            let what = format!("random 4 KiB reads of the disk, {depth} in flight, just then");
            let limit = Bound::new(what, limit);
            let bytes = (weight_bytes + state_bytes) as f64;
            points.push(CachePoint::new(format!("get {count}"), rows, bytes, limit, &seconds));
        }
        Ok(())
    }

    /// Updates of random rows, as many as there are, with what they hold already.
    ///
    /// Errors: what the log says.
    pub fn updates(&self, seed: u64, points: &mut Vec<CachePoint>) -> Result<()> {
        let before = self.log.stats();
        let mut rng = Rng::new(seed ^ 0x7075_7473);
        let (mut seconds, mut written) = (Vec::new(), 0);
        while written < self.rows {
            let rows = self.draw(PUT_ROWS.min(self.rows), &mut rng);
            let block = Block::filled(self.layout, &rows, |_| 0);
            written += rows.len() as u64;
            let start = Instant::now();
            self.log.put(&rows, Planes { weights: &block.weights, state: &block.state })?;
            if written >= self.rows {
                self.log.flush()?;
                self.log.compact_now()?;
            }
            seconds.push(start.elapsed().as_secs_f64());
        }
        let after = self.log.stats();
        let put = (after.put_bytes - before.put_bytes) as f64;
        let moved = (after.compaction_bytes - before.compaction_bytes) as f64;
        let rows_per_s = written as f64 / seconds.iter().sum::<f64>();
        let bytes = (self.layout.weight_bytes + self.layout.state_bytes) as f64;
        let limit = points.iter().find(|point| point.case == "put").map(|put| put.limit.clone());
        let limit = limit.unwrap_or(Bound::new("none", f64::MAX));
        let rows = written as f64 / seconds.len() as f64;
        points.push(CachePoint {
            rows_per_s,
            gb_per_s: rows_per_s * bytes / 1e9,
            share_of_limit: rows_per_s / limit.rows_per_s,
            write_amplification: Some((put + moved) / put),
            latency_ms: LatencyMs::of(&seconds),
            ..CachePoint::new("update, compaction included".into(), rows, bytes, limit, &seconds)
        });
        Ok(())
    }
}

/// Seconds of writing and syncing a file, the median of three.
fn sequential(path: &Path, bytes: usize) -> std::io::Result<f64> {
    let mut rng = Rng::new(3);
    let chunk: Vec<u8> = (0..WRITE_CHUNK / 8).flat_map(|_| rng.bits().to_le_bytes()).collect();
    let pass = || {
        let mut file = std::fs::File::create(path)?;
        let start = Instant::now();
        for _ in 0..bytes / WRITE_CHUNK {
            file.write_all(&chunk)?;
        }
        file.sync_all()?;
        Ok::<f64, std::io::Error>(start.elapsed().as_secs_f64())
    };
    let seconds = [pass()?, pass()?, pass()?];
    std::fs::remove_file(path)?;
    Ok(median(&seconds))
}
