//! Real ids for the planner: counts of the first batches of the training data.

use std::collections::{HashMap, HashSet};

use tessera_cache::owner_of;
use tessera_data::open;
use tessera_embedding::TableKind;
use tessera_embedding::plan::{IdCounter, MissCurve, ReuseCounter, TableLoad};

use crate::cli::Split;
use crate::config::Config;
use crate::{Error, Result, source};

/// What a sample told besides what is in the tables.
pub(super) struct Sample {
    /// How much was read.
    pub(super) note: String,
    /// Of each table of the configuration, in order.
    pub(super) curves: Vec<MissCurve>,
}

/// Rows that stand for the ids of a dynamic table, spread as their hashes are.
struct Numbers {
    rows: u64,
    of: HashMap<i64, i64>,
    taken: HashSet<u64>,
}

impl Numbers {
    fn new(rows: u64) -> Self {
        Self { rows, of: HashMap::new(), taken: HashSet::new() }
    }

    /// The row of an id; none when the sample has more ids than the table rows.
    fn of(&mut self, id: i64) -> Option<i64> {
        if let Some(&row) = self.of.get(&id) {
            return Some(row);
        }
        if self.taken.len() as u64 >= self.rows {
            return None;
        }
        let mut row = owner_of(id as u64, self.rows);
        while !self.taken.insert(row) {
            row = (row + 1) % self.rows;
        }
        self.of.insert(id, row as i64);
        Some(row as i64)
    }
}

/// Counts the ids of `batches` batches into `tables` (the configuration's, the wide parts after
/// them).
///
/// Errors: bad data, by file and row; a configuration without training data.
pub(super) fn count(config: &Config, batches: u64, tables: &mut [TableLoad]) -> Result<Sample> {
    if batches == 0 {
        return Err(Error::Usage("--sample 0: at least one batch is needed".into()));
    }
    let of: Vec<usize> = config.features().map(|(table, _, _)| table).collect();
    let count = config.tables.len();
    let mut counters: Vec<IdCounter> =
        config.tables.iter().map(|table| IdCounter::new(table.rows)).collect();
    let mut reuse: Vec<ReuseCounter> =
        config.tables.iter().map(|table| ReuseCounter::new(table.rows)).collect();
    let mut numbers: Vec<Option<Numbers>> = config
        .tables
        .iter()
        .map(|table| (table.kind != TableKind::Static).then(|| Numbers::new(table.rows)))
        .collect();
    let mut ids = vec![0usize; of.len()];
    let mut samples = 0;
    let mut reader = open(&source::required(config, Split::Train)?)?;
    for _ in 0..batches {
        let batch = reader.read(config.data.batch_size)?;
        if batch.samples() == 0 {
            break;
        }
        samples += batch.samples();
        for (total, bags) in ids.iter_mut().zip(batch.features()) {
            *total += bags.ids().len();
        }
        for (table, (counter, reuse)) in counters.iter_mut().zip(&mut reuse).enumerate() {
            let features = batch.features().iter().zip(&of).filter(|(_, of)| **of == table);
            let ids = features.flat_map(|(bags, _)| bags.ids().iter().map(|id| id.0));
            let ids: Vec<i64> = match &mut numbers[table] {
                Some(numbers) => ids.filter_map(|id| numbers.of(id)).collect(),
                None => ids.collect(),
            };
            counter.batch(ids.iter().copied());
            reuse.batch(ids);
        }
    }
    if samples == 0 {
        return Err(Error::Usage("--sample: the training data is empty".into()));
    }
    let stats: Vec<_> = counters.into_iter().map(IdCounter::finish).collect();
    let distinct: u64 = stats.iter().flatten().map(|stats| stats.distinct()).sum();
    for (number, table) in tables.iter_mut().enumerate() {
        let of_table = ids.iter().zip(&of).filter(|(_, of)| **of == number % count);
        table.ids_per_sample = of_table.map(|(&total, _)| total as f64 / samples as f64).collect();
        table.stats = stats[number % count].clone();
    }
    let note = format!(
        "ids of {samples} samples were counted: {} ids, {distinct} different rows",
        ids.iter().sum::<usize>()
    );
    Ok(Sample { note, curves: reuse.into_iter().map(ReuseCounter::finish).collect() })
}
