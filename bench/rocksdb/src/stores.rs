//! The two stores behind one trait: the log of the SSD tier, and RocksDB.

use std::path::Path;
use std::time::Duration;

use rayon::ThreadPool;
use rayon::prelude::*;
use rocksdb::{
    BlockBasedOptions, Cache, DB, DBCompressionType, ReadOptions, WriteBatch, WriteOptions,
};
use tessera_cache::log::{Options, Reader, SsdLog};
use tessera_cache::{ColdRows, Planes, PlanesMut, RowLayout};

use crate::{Error, Result};

/// Rows on SSD. Rows of a call are different and ascending; bytes are theirs, one after another.
pub trait Store {
    /// For tables.
    fn name(&self) -> &'static str;

    /// Reads rows that are all there.
    ///
    /// Errors: what the store says, a row that it does not have.
    fn get(&self, rows: &[u64], to: &mut [u8]) -> Result<()>;

    /// Writes rows; they need not outlive a crash yet.
    ///
    /// Errors: what the store says.
    fn put(&self, rows: &[u64], from: &[u8]) -> Result<()>;

    /// Brings everything to the medium and waits until there is nothing left to compact.
    ///
    /// Errors: what the store says.
    fn settle(&self) -> Result<()>;

    /// What it wrote so far.
    ///
    /// Errors: what the system says of its files.
    fn usage(&self) -> Result<Usage>;
}

/// Plain numbers of a store.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct Usage {
    /// Bytes of memory that reading and writing takes, or may take.
    pub memory_bytes: u64,
    /// Bytes of files.
    pub file_bytes: u64,
    /// Bytes of rows, as the store stores them, that callers wrote.
    pub put_bytes: u64,
    /// Bytes written to the medium.
    pub written_bytes: u64,
}

/// Ours, as training uses it: one thread, io_uring.
#[derive(Debug)]
pub struct Ours(SsdLog);

/// Reads in flight.
const DEPTH: u32 = 64;

/// Bytes of a buffer of a read in flight.
const BUFFER_BYTES: u64 = 16 << 10;

impl Ours {
    /// An empty log.
    ///
    /// Errors: what the log says.
    pub fn create(dir: &Path, rows: u64, row_bytes: usize) -> Result<Self> {
        let layout = RowLayout { weight_bytes: row_bytes, state_bytes: 0 };
        let options = Options {
            reader: Reader::Uring,
            queue_depth: DEPTH,
            rows: Some(rows),
            ..Options::default()
        };
        Ok(Self(SsdLog::create(dir, 1, layout, options)?))
    }
}

impl Store for Ours {
    fn name(&self) -> &'static str {
        "tessera"
    }

    fn get(&self, rows: &[u64], to: &mut [u8]) -> Result<()> {
        let mut found = vec![false; rows.len()];
        self.0.get(rows, PlanesMut { weights: to, state: &mut [] }, &mut found)?;
        match found.iter().position(|&found| !found) {
            Some(at) => Err(Error::Missing { store: self.name(), row: rows[at] }),
            None => Ok(()),
        }
    }

    fn put(&self, rows: &[u64], from: &[u8]) -> Result<()> {
        Ok(self.0.put(rows, Planes { weights: from, state: &[] })?)
    }

    fn settle(&self) -> Result<()> {
        self.0.flush()?;
        self.0.compact_now()?;
        Ok(self.0.flush()?)
    }

    fn usage(&self) -> Result<Usage> {
        let stats = self.0.stats();
        Ok(Usage {
            memory_bytes: stats.index_bytes + u64::from(DEPTH) * BUFFER_BYTES,
            file_bytes: stats.file_bytes,
            put_bytes: stats.put_bytes,
            written_bytes: stats.put_bytes + stats.compaction_bytes,
        })
    }
}

/// RocksDB, as stores of embedding rows use it: no write-ahead log, no compression, a batch spread
/// over threads that each read their part of it in one call.
pub struct Rocks {
    db: DB,
    options: rocksdb::Options,
    pool: ThreadPool,
    row_bytes: usize,
    memory_bytes: u64,
}

/// The property that tells whether a compaction waits.
const PENDING: &str = "rocksdb.compaction-pending";

/// The name that RocksDB gives the only family of columns.
const FAMILY: &str = "default";

impl Rocks {
    /// An empty store that takes about `memory_bytes`: a quarter for what is being written, the
    /// rest for blocks, indexes and filters.
    ///
    /// Errors: what RocksDB says.
    pub fn create(dir: &Path, row_bytes: usize, memory_bytes: u64, threads: usize) -> Result<Self> {
        let memory = usize::try_from(memory_bytes).unwrap_or(usize::MAX);
        let mut table = BlockBasedOptions::default();
        table.set_block_cache(&Cache::new_lru_cache(memory / 4 * 3)?);
        table.set_cache_index_and_filter_blocks(true);
        table.set_pin_l0_filter_and_index_blocks_in_cache(true);
        table.set_bloom_filter(10.0, false);
        table.set_block_size(4096);
        table.set_format_version(5);
        let mut options = rocksdb::Options::default();
        options.create_if_missing(true);
        options.set_block_based_table_factory(&table);
        options.set_compression_type(DBCompressionType::None);
        options.set_use_direct_reads(true);
        options.set_use_direct_io_for_flush_and_compaction(true);
        options.set_write_buffer_size(memory / 12);
        options.set_max_write_buffer_number(3);
        // Every row that is asked for is there: no filter is needed in the last level.
        options.set_optimize_filters_for_hits(true);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        options.increase_parallelism(i32::try_from(cores.max(2)).unwrap_or(i32::MAX));
        options.set_max_open_files(-1);
        options.enable_statistics();
        let db = DB::open_cf(&options, dir, [FAMILY])?;
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build();
        let pool = pool.map_err(|error| Error::Threads(error.to_string()))?;
        Ok(Self { db, options, pool, row_bytes, memory_bytes })
    }
}

impl Store for Rocks {
    fn name(&self) -> &'static str {
        "rocksdb"
    }

    fn get(&self, rows: &[u64], to: &mut [u8]) -> Result<()> {
        // Big-endian: keys are in the order of rows.
        let keys: Vec<[u8; 8]> = rows.iter().map(|row| row.to_be_bytes()).collect();
        let each = rows.len().div_ceil(self.pool.current_num_threads()).max(1);
        let read = |(keys, to): (&[[u8; 8]], &mut [u8])| -> Result<()> {
            let family = self.db.cf_handle(FAMILY).ok_or(Error::NoFamily)?;
            let options = ReadOptions::default();
            let values = self.db.batched_multi_get_cf_opt(family, keys, true, &options);
            for ((value, key), to) in
                values.into_iter().zip(keys).zip(to.chunks_exact_mut(self.row_bytes))
            {
                let row = u64::from_be_bytes(*key);
                let value = value?.ok_or(Error::Missing { store: self.name(), row })?;
                to.copy_from_slice(&value);
            }
            Ok(())
        };
        let parts = keys.par_chunks(each).zip(to.par_chunks_mut(each * self.row_bytes));
        self.pool.install(|| parts.try_for_each(read))
    }

    fn put(&self, rows: &[u64], from: &[u8]) -> Result<()> {
        let mut batch = WriteBatch::default();
        for (row, value) in rows.iter().zip(from.chunks_exact(self.row_bytes)) {
            batch.put(row.to_be_bytes(), value);
        }
        let mut options = WriteOptions::default();
        options.disable_wal(true);
        Ok(self.db.write_opt(batch, &options)?)
    }

    fn settle(&self) -> Result<()> {
        self.db.flush()?;
        // The C interface of this version cannot wait for compaction.
        let busy = [PENDING, "rocksdb.num-running-compactions", "rocksdb.num-running-flushes"];
        loop {
            let mut left = 0;
            for name in busy {
                left += self.db.property_int_value(name)?.unwrap_or(0);
            }
            if left == 0 {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn usage(&self) -> Result<Usage> {
        let text = self.options.get_statistics().unwrap_or_default();
        let count = |name: &str| ticker(&text, name).ok_or(Error::NoTicker(name.to_owned()));
        let files = self.db.live_files()?;
        Ok(Usage {
            memory_bytes: self.memory_bytes,
            file_bytes: files.iter().map(|file| file.size as u64).sum(),
            put_bytes: count("rocksdb.bytes.written")?,
            written_bytes: count("rocksdb.flush.write.bytes")?
                + count("rocksdb.compact.write.bytes")?,
        })
    }
}

/// The count of a ticker in RocksDB's text of all of them, lines of `name COUNT : 12`.
fn ticker(text: &str, name: &str) -> Option<u64> {
    let mut lines = text.lines().map(str::split_whitespace);
    lines.find_map(|mut words| {
        (words.next() == Some(name)).then(|| words.next_back()?.parse().ok()).flatten()
    })
}
