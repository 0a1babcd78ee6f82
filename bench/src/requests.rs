//! Requests: the bags of ids that a benchmark looks up, made before the clock starts.
//!
//! A file of requests, which `--dump-ids` writes for other programs to run the same work, and
//! `--ids` reads back:
//! ```text
//! one line of JSON: {"format": "tessera-bench-ids-1", "requests", "batch", "dense",
//!                    "features": [{"name", "table", "rows", "dim", "weighted"}], "crc32"}
//! then for each request and feature: u64 offsets[batch + 1], i64 ids[offsets[batch]],
//!                    f32 weights (as many, where weighted)
//! and for each request, where dense > 0 (after its features): f32 dense[batch * dense],
//!                    f32 labels[batch]
//! ```
//! All little-endian, without padding; `crc32` covers everything after the line.

use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use tessera::config::Config;
use tessera_data::{Batch, BatchParts, DataMetrics, Event, Jagged, RawId};

use crate::draw::{Law, Rng, Rows};
use crate::feed::Feed;
use crate::knobs::{Hots, TableKnobs};
use crate::tables::{self, Table};
use crate::{BenchError, Result};

/// Name and version of the file format.
const FORMAT: &str = "tessera-bench-ids-1";

/// A feature as the file of requests describes it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct FeatureLine {
    name: String,
    table: usize,
    rows: u64,
    dim: usize,
    weighted: bool,
}

/// First line of a file of requests.
#[derive(Debug, Serialize, Deserialize)]
struct Header {
    format: String,
    requests: usize,
    batch: usize,
    dense: usize,
    features: Vec<FeatureLine>,
    crc32: u32,
}

/// What is drawn for one measurement.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Samples of a request.
    pub batch: usize,
    /// Ids a bag of every feature; their own where `None`.
    pub hots: Option<Hots>,
    /// Different requests.
    pub requests: usize,
    /// Dense values a sample; 0 for requests without dense values and labels.
    pub dense: usize,
    /// Seed.
    pub seed: u64,
}

/// The requests that knobs ask for.
///
/// Errors: knobs that make no sense, a file that cannot be used, ids for other features.
pub fn requests(tables: &[Table], knobs: &TableKnobs, draw: Draw) -> Result<Vec<Batch>> {
    if draw.batch == 0 || draw.requests == 0 {
        return Err(BenchError::usage("--batch and --requests must be at least 1"));
    }
    if let Some(path) = &knobs.ids {
        let requests = match path.extension().and_then(|extension| extension.to_str()) {
            Some("toml") => of_config(path, tables, draw),
            Some("i64") => of_raw(path, tables, draw),
            _ => load(path, tables, draw),
        }?;
        fit(path, tables, draw, &requests)?;
        return Ok(requests);
    }
    let law = match &knobs.reuse {
        Some(reuse) => Law::Reuse(crate::draw::Reuse::load(reuse)?),
        None => Law::Zipf { alpha: knobs.alpha.unwrap_or(0.0) },
    };
    drawn(tables, &law, draw)
}

/// Holds requests of a file against knobs that say what they should be.
fn fit(path: &Path, tables: &[Table], draw: Draw, requests: &[Batch]) -> Result<()> {
    let bad = |reason: String| Err(BenchError::BadFile { path: path.into(), reason });
    let owners = || tables.iter().flat_map(|table| table.features.iter().map(move |_| table));
    for (feature, table) in requests.iter().flat_map(|r| r.features().iter().zip(owners())) {
        if feature.weights().is_some() != table.weighted {
            let (name, weighted) = (&table.spec.name, table.weighted);
            return bad(format!("table {name}: weighted is {weighted} in the knobs, not here"));
        }
        let mut lengths = feature.offsets().windows(2).map(|pair| pair[1] - pair[0]);
        if let Some(Hots { mean, spread }) = draw.hots
            && let Some(ids) = lengths.find(|&ids| ids.abs_diff(mean as u64) > spread as u64)
        {
            return bad(format!("a bag has {ids} ids, which --pooling does not allow"));
        }
    }
    Ok(())
}

/// Requests drawn by a law, one after the other.
#[derive(Debug)]
pub struct Drawer<'a> {
    tables: &'a [Table],
    laws: Vec<Rows>,
    draw: Draw,
    rng: Rng,
}

impl<'a> Drawer<'a> {
    /// The requests of a seed; `draw.requests` does not matter.
    ///
    /// Errors: a law that has no meaning for a table.
    pub fn new(tables: &'a [Table], law: &Law, draw: Draw) -> Result<Self> {
        let laws = tables.iter().enumerate();
        let laws = laws.map(|(i, table)| law.over(table.spec.rows, draw.seed ^ (i as u64) << 32));
        Ok(Self { tables, laws: laws.collect::<Result<_>>()?, draw, rng: Rng::new(draw.seed) })
    }

    /// The next request.
    ///
    /// Errors: bags that are none.
    pub fn draw(&mut self) -> Result<Batch> {
        let (draw, rng) = (self.draw, &mut self.rng);
        let mut features = Vec::new();
        for (table, law) in self.tables.iter().zip(&self.laws) {
            for feature in &table.features {
                let hots = draw.hots.unwrap_or(feature.hots);
                let (low, kinds) = (hots.mean - hots.spread, 2 * hots.spread as u64 + 1);
                let lengths: Vec<u64> =
                    (0..draw.batch).map(|_| low as u64 + rng.below(kinds)).collect();
                let count: u64 = lengths.iter().sum();
                let ids = (0..count).map(|_| RawId(law.draw(rng) as i64)).collect();
                let weights = weights(table, count, rng);
                features.push(Jagged::from_lengths(&lengths, ids, weights)?);
            }
        }
        batch(features, draw, rng)
    }
}

/// Requests drawn by a law.
///
/// Errors: a law that has no meaning for a table.
pub fn drawn(tables: &[Table], law: &Law, draw: Draw) -> Result<Vec<Batch>> {
    let mut drawer = Drawer::new(tables, law, draw)?;
    (0..draw.requests).map(|_| drawer.draw()).collect()
}

/// Weights between 0.5 and 1.5, where the table has them.
fn weights(table: &Table, count: u64, rng: &mut Rng) -> Option<Vec<f32>> {
    table.weighted.then(|| (0..count).map(|_| 0.5 + rng.unit() as f32).collect())
}

/// Adds dense values on `[-1, 1)` and labels, a quarter of them 1.
fn batch(features: Vec<Jagged>, draw: Draw, rng: &mut Rng) -> Result<Batch> {
    let values = draw.batch * draw.dense;
    Ok(Batch::new(BatchParts {
        dense_features: draw.dense,
        dense: (0..values).map(|_| (2.0 * rng.unit() - 1.0) as f32).collect(),
        labels: (0..draw.batch).map(|_| f32::from(rng.below(4) == 0)).collect(),
        sample_weights: None,
        groups: None,
        features,
        provenance: None,
    })?)
}

/// Requests from the data of a training configuration, whose features must be those of `tables`.
fn of_config(path: &Path, tables: &[Table], draw: Draw) -> Result<Vec<Batch>> {
    let mut config = Config::load(path, &[])?;
    let names = |tables: &[Table]| -> Vec<String> {
        tables.iter().flat_map(|t| &t.features).map(|feature| feature.name.clone()).collect()
    };
    if names(&tables::of_config(&config)?) != names(tables) {
        return Err(BenchError::usage(format!(
            "--ids {}: its features are not those of the tables; give it as --table-set too",
            path.display()
        )));
    }
    // criteo-tsv places categories by the rows of tables, so tables cut by --rows-max count.
    for (table, ours) in config.tables.iter_mut().zip(tables) {
        table.rows = ours.spec.rows;
    }
    let mut feed = Feed::open(&config, draw.batch, &DataMetrics::unregistered())?;
    let mut requests = Vec::with_capacity(draw.requests);
    while requests.len() < draw.requests {
        match feed.next_event()? {
            Event::Batch { batch, .. } if batch.samples() == draw.batch => requests.push(batch),
            // The last batch of an epoch may be smaller.
            Event::Batch { .. } => {}
            Event::EpochEnd { .. } if requests.is_empty() => {
                return Err(BenchError::BadFile {
                    path: path.into(),
                    reason: format!("its data has no batch of {} samples", draw.batch),
                });
            }
            Event::EpochEnd { .. } => {}
        }
    }
    Ok(requests)
}

/// Requests from plain ids, dealt to bags in order and from the start again at the end.
fn of_raw(path: &Path, tables: &[Table], draw: Draw) -> Result<Vec<Batch>> {
    let bytes = fs::read(path).map_err(|source| BenchError::Read { path: path.into(), source })?;
    let all: Vec<RawId> = bytes
        .chunks_exact(8)
        .map(|b| RawId(i64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]])))
        .collect();
    if all.is_empty() || bytes.len() % 8 != 0 {
        let reason = format!("{} bytes are not whole 64-bit ids", bytes.len());
        return Err(BenchError::BadFile { path: path.into(), reason });
    }
    let mut ids = all.iter().copied().cycle();
    let mut rng = Rng::new(draw.seed);
    (0..draw.requests)
        .map(|_| {
            let mut features = Vec::new();
            for table in tables {
                for feature in &table.features {
                    let hots = draw.hots.unwrap_or(feature.hots).mean;
                    let count = draw.batch * hots;
                    let ids = ids.by_ref().take(count).collect();
                    let lengths = vec![hots as u64; draw.batch];
                    let weights = weights(table, count as u64, &mut rng);
                    features.push(Jagged::from_lengths(&lengths, ids, weights)?);
                }
            }
            batch(features, draw, &mut rng)
        })
        .collect()
}

/// The features of tables as a file of requests describes them.
fn lines(tables: &[Table]) -> Vec<FeatureLine> {
    let (features, _) = tables::features(tables);
    let line = |feature: tessera_embedding::FeatureSpec| {
        let table = &tables[feature.table];
        FeatureLine {
            name: feature.name,
            table: feature.table,
            rows: table.spec.rows,
            dim: table.spec.dim,
            weighted: table.weighted,
        }
    };
    features.into_iter().map(line).collect()
}

/// Writes requests of one size to a file.
///
/// Errors: [`BenchError::Write`].
pub fn save(path: &Path, tables: &[Table], requests: &[Batch]) -> Result<()> {
    let mut body: Vec<u8> = Vec::new();
    for request in requests {
        for feature in request.features() {
            body.extend_from_slice(bytemuck::cast_slice(feature.offsets()));
            body.extend_from_slice(bytemuck::cast_slice(feature.ids()));
            body.extend_from_slice(bytemuck::cast_slice(feature.weights().unwrap_or(&[])));
        }
        if request.dense_features() > 0 {
            body.extend_from_slice(bytemuck::cast_slice(request.dense()));
            body.extend_from_slice(bytemuck::cast_slice(request.labels()));
        }
    }
    let header = Header {
        format: FORMAT.into(),
        requests: requests.len(),
        batch: requests.first().map_or(0, Batch::samples),
        dense: requests.first().map_or(0, Batch::dense_features),
        features: lines(tables),
        crc32: crc32fast::hash(&body),
    };
    let mut bytes = serde_json::to_vec(&header).expect("a header has string keys only");
    bytes.push(b'\n');
    bytes.append(&mut body);
    fs::write(path, bytes).map_err(|source| BenchError::Write { path: path.into(), source })
}

/// Reads what [`save`] wrote, for the same features.
fn load(path: &Path, tables: &[Table], draw: Draw) -> Result<Vec<Batch>> {
    let bad = |reason: String| BenchError::BadFile { path: path.into(), reason };
    let bytes = fs::read(path).map_err(|source| BenchError::Read { path: path.into(), source })?;
    let end = bytes.iter().position(|&byte| byte == b'\n').unwrap_or(bytes.len());
    let header: Header = serde_json::from_slice(&bytes[..end])
        .map_err(|error| bad(format!("not a file of requests: {error}")))?;
    let body = bytes.get(end + 1..).unwrap_or_default();
    if header.format != FORMAT || crc32fast::hash(body) != header.crc32 {
        return Err(bad("the file is damaged or of another version".into()));
    }
    if header.features != lines(tables) {
        return Err(bad("its features or tables are others than those of the knobs".into()));
    }
    if header.batch != draw.batch || header.dense != draw.dense {
        return Err(bad(format!(
            "it holds batches of {} with {} dense values; the knobs ask for {} with {}",
            header.batch, header.dense, draw.batch, draw.dense
        )));
    }
    let mut rest = body;
    let mut take = |bytes: usize| {
        let (now, then) =
            rest.split_at_checked(bytes).ok_or_else(|| bad("it ends early".into()))?;
        rest = then;
        Ok::<_, BenchError>(now)
    };
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
    };
    let words = |bytes: &[u8]| -> Vec<u64> {
        let word = |b: &[u8]| u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]);
        bytes.chunks_exact(8).map(word).collect()
    };
    let mut requests = Vec::with_capacity(header.requests);
    for _ in 0..header.requests {
        let mut features = Vec::with_capacity(header.features.len());
        for feature in &header.features {
            let offsets = words(take(8 * (header.batch + 1))?);
            let count = usize::try_from(offsets[header.batch])
                .ok()
                .filter(|count| count.checked_mul(8).is_some())
                .ok_or_else(|| bad("an offset is beyond memory".into()))?;
            let ids = words(take(8 * count)?).into_iter().map(|id| RawId(id as i64)).collect();
            let weights = match feature.weighted {
                true => Some(floats(take(4 * count)?)),
                false => None,
            };
            features.push(Jagged::new(header.batch, offsets, ids, weights)?);
        }
        let (mut dense, mut labels) = (Vec::new(), vec![0.0; header.batch]);
        if header.dense > 0 {
            dense = floats(take(4 * header.batch * header.dense)?);
            labels = floats(take(4 * header.batch)?);
        }
        requests.push(Batch::new(BatchParts {
            dense_features: header.dense,
            dense,
            labels,
            sample_weights: None,
            groups: None,
            features,
            provenance: None,
        })?);
    }
    Ok(requests)
}

/// Ids of a request.
#[must_use]
pub fn ids(request: &Batch) -> u64 {
    request.features().iter().map(|feature| feature.ids().len() as u64).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tables::Defaults;

    const DRAW: Draw =
        Draw { batch: 50, hots: Some(Hots { mean: 4, spread: 3 }), requests: 3, dense: 2, seed: 9 };

    fn some_tables(weighted: bool) -> Vec<Table> {
        let knobs = TableKnobs { weighted, dim: vec![4, 8], ..TableKnobs::default() };
        let defaults = Defaults { tables: 2, rows: 100, dim: 4, hots: Hots::fixed(1) };
        tables::tables(&knobs, defaults).unwrap()
    }

    #[test]
    fn lengths_keep_to_mean_and_spread_and_seeds_repeat() {
        let tables = some_tables(false);
        let draw = Draw { batch: 2000, ..DRAW };
        let first = drawn(&tables, &Law::Zipf { alpha: 1.0 }, draw).unwrap();
        assert_eq!(first, drawn(&tables, &Law::Zipf { alpha: 1.0 }, draw).unwrap());
        for feature in first[0].features() {
            let lengths = feature.offsets().windows(2).map(|pair| pair[1] - pair[0]);
            let (low, high) = lengths.fold((9, 0), |(l, h), n| (l.min(n), h.max(n)));
            assert_eq!((low, high), (1, 7));
            let mean = feature.ids().len() as f64 / 2000.0;
            assert!((mean - 4.0).abs() < 0.25, "{mean}");
        }
        assert_ne!(first[0], first[1]);
    }

    #[test]
    fn saved_requests_come_back_and_damage_is_seen() {
        for weighted in [false, true] {
            let tables = some_tables(weighted);
            let requests = drawn(&tables, &Law::Zipf { alpha: 0.0 }, DRAW).unwrap();
            let folder = tempfile::tempdir().unwrap();
            let path = folder.path().join("requests.ids");
            save(&path, &tables, &requests).unwrap();
            assert_eq!(load(&path, &tables, DRAW).unwrap(), requests);
            let error = load(&path, &tables, Draw { batch: 51, ..DRAW }).unwrap_err().to_string();
            assert!(error.contains("batches of 50"), "{error}");
            let error = load(&path, &some_tables(!weighted), DRAW).unwrap_err().to_string();
            assert!(error.contains("features"), "{error}");
            let mut bytes = fs::read(&path).unwrap();
            let at = bytes.len() - 3;
            bytes[at] ^= 1;
            fs::write(&path, bytes).unwrap();
            let error = load(&path, &tables, DRAW).unwrap_err().to_string();
            assert!(error.contains("damaged"), "{error}");
        }
    }

    #[test]
    fn a_file_that_knobs_contradict_is_refused() {
        let tables = some_tables(false);
        let drawn = drawn(&tables, &Law::Zipf { alpha: 0.0 }, DRAW).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("requests.ids");
        save(&path, &tables, &drawn).unwrap();
        let knobs = TableKnobs { ids: Some(path), ..TableKnobs::default() };
        assert_eq!(requests(&tables, &knobs, DRAW).unwrap(), drawn);
        let draw = Draw { hots: Some(Hots { mean: 4, spread: 1 }), ..DRAW };
        let error = requests(&tables, &knobs, draw).unwrap_err().to_string();
        assert!(error.contains("--pooling does not allow"), "{error}");
    }

    #[test]
    fn raw_ids_are_dealt_in_order_and_start_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.i64");
        let ids: Vec<u8> = (0..7i64).flat_map(i64::to_le_bytes).collect();
        fs::write(&path, ids).unwrap();
        let draw = Draw { batch: 2, hots: Some(Hots::fixed(2)), requests: 1, ..DRAW };
        let knobs = TableKnobs { ids: Some(path.clone()), ..TableKnobs::default() };
        let request = &requests(&some_tables(false), &knobs, draw).unwrap()[0];
        let of = |feature: usize| -> Vec<i64> {
            request.features()[feature].ids().iter().map(|id| id.0).collect()
        };
        assert_eq!((of(0), of(1)), (vec![0, 1, 2, 3], vec![4, 5, 6, 0]));
        fs::write(&path, [1, 2, 3]).unwrap();
        assert!(requests(&some_tables(false), &knobs, draw).is_err());
    }
}
