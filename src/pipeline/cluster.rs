//! Key clustering: samples that share rows go to the same micro-batch.
//!
//! A row that several micro-batches need must be there before the first of them and is updated
//! after the last. Where samples that share rows are neighbours, fewer rows are in use across
//! micro-batches: rows wait less, and the first exchange is smaller.
//!
//! ```text
//! count each key (row of a table) of the batch
//! signature of a sample: its rarest keys that another sample has too
//! order samples by signature, cut evenly
//! ```
//! Frequent keys are in every micro-batch whatever the order; a key of a few samples is in one if
//! they are neighbours. (Tried on Criteo: by the most frequent keys that a micro-batch could hold
//! alone, and greedy assignment to the micro-batch that shares most keys, which hot keys decide:
//! both save less.) The order depends on the batch alone; the cost is linear in its ids but for one
//! sort of its samples.

use std::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;
use tessera_cache::id_hash;
use tessera_data::Batch;
use tessera_embedding::micro_batches;

/// Keys of a signature: ties of the first are broken by the next.
const SIGNATURE: usize = 4;

/// A row of a table, by the table's number and the id: a bijection of the id for each table. Rows of
/// two tables that fall together would be taken for one, which only the order of samples would show.
fn key_of(table: usize, id: i64) -> u64 {
    id_hash(id as u64 ^ id_hash(table as u64))
}

/// Keys are hashes already.
#[derive(Default)]
struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, _: &[u8]) {
        unreachable!("keys are of 64 bits")
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }
}

/// What clustering did to a batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Clustered {
    /// The order of samples in which those that share keys are neighbours.
    pub order: Vec<usize>,
    /// Different keys of each micro-batch, added up, in the order that was given.
    pub keys_before: u64,
    /// The same in the new order.
    pub keys_after: u64,
}

/// Orders samples; its memory serves one batch after the other.
#[derive(Default)]
pub struct Clusterer {
    /// The number of each key that the batch has, in the order of their first occurrences.
    numbers: HashMap<u64, u32, BuildHasherDefault<AsIs>>,
    /// How often each of them occurs.
    counts: Vec<u32>,
    /// Of each key, one past the micro-batch that had it last.
    last: Vec<u32>,
    /// The keys' numbers, occurrence after occurrence, feature after feature.
    occurrences: Vec<u32>,
    /// Of each sample, its rarest keys: (how often they occur, number).
    signatures: Vec<[(u32, u32); SIGNATURE]>,
}

impl Clusterer {
    /// The order of a batch's samples in which those that share keys are neighbours, for `parts`
    /// micro-batches. `tables` holds the table of each feature.
    pub fn order(&mut self, batch: &Batch, tables: &[usize], parts: usize) -> Clustered {
        self.count(batch, tables);
        let given: Vec<usize> = (0..batch.samples()).collect();
        let order = self.by_signature(batch);
        let keys_before = self.keys(batch, &given, parts);
        let keys_after = self.keys(batch, &order, parts);
        Clustered { order, keys_before, keys_after }
    }

    /// Numbers and counts the batch's keys.
    fn count(&mut self, batch: &Batch, tables: &[usize]) {
        self.numbers.clear();
        self.counts.clear();
        self.occurrences.clear();
        for (feature, &table) in batch.features().iter().zip(tables) {
            for id in feature.ids() {
                let next = self.counts.len() as u32; // a batch has fewer than 2^32 ids
                let number = *self.numbers.entry(key_of(table, id.0)).or_insert(next);
                if number == next {
                    self.counts.push(0);
                }
                self.counts[number as usize] += 1;
                self.occurrences.push(number);
            }
        }
    }

    /// Samples in the order of their signatures; those of equal ones as they were.
    fn by_signature(&mut self, batch: &Batch) -> Vec<usize> {
        self.signatures.clear();
        self.signatures.resize(batch.samples(), [(u32::MAX, u32::MAX); SIGNATURE]);
        let mut occurrences = &self.occurrences[..];
        for feature in batch.features() {
            for (ends, signature) in feature.offsets().windows(2).zip(&mut self.signatures) {
                let (here, rest) = occurrences.split_at((ends[1] - ends[0]) as usize);
                occurrences = rest;
                for &number in here {
                    let entry = (self.counts[number as usize], number);
                    // A key that no other sample has brings none near.
                    if entry.0 < 2 || entry >= signature[SIGNATURE - 1] {
                        continue;
                    }
                    let at = signature.partition_point(|&other| other < entry);
                    if signature[at] != entry {
                        signature[at..].rotate_right(1);
                        signature[at] = entry;
                    }
                }
            }
        }
        let mut order: Vec<usize> = (0..batch.samples()).collect();
        order.sort_by_key(|&sample| self.signatures[sample]);
        order
    }

    /// Different keys of each of `parts` micro-batches of the samples in this order, added up.
    fn keys(&mut self, batch: &Batch, order: &[usize], parts: usize) -> u64 {
        self.last.clear();
        self.last.resize(self.counts.len(), 0);
        let mut keys = 0;
        for (part, samples) in (1..).zip(micro_batches(order.len(), parts)) {
            let mut first = 0;
            for feature in batch.features() {
                let offsets = feature.offsets();
                for &sample in &order[samples.clone()] {
                    let here = offsets[sample] as usize..offsets[sample + 1] as usize;
                    for &number in &self.occurrences[first + here.start..first + here.end] {
                        let last = &mut self.last[number as usize];
                        keys += u64::from(*last != part);
                        *last = part;
                    }
                }
                first += feature.ids().len();
            }
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_data::{BatchParts, Jagged, RawId};

    fn batch(ids: &[&[i64]]) -> Batch {
        let samples = ids[0].len();
        let feature = |ids: &&[i64]| {
            let ids = ids.iter().map(|&id| RawId(id)).collect();
            Jagged::new(samples, (0..=samples as u64).collect(), ids, None).unwrap()
        };
        Batch::new(BatchParts {
            dense_features: 1,
            dense: (0..samples).map(|i| i as f32).collect(),
            labels: vec![0.0; samples],
            sample_weights: None,
            groups: None,
            features: ids.iter().map(feature).collect(),
            provenance: None,
        })
        .unwrap()
    }

    #[test]
    fn samples_that_share_keys_become_neighbours() {
        // Table 0 says nothing: all share its key. Table 1 has two sessions, taken in turn.
        let all = batch(&[&[7; 8], &[1, 2, 1, 2, 1, 2, 1, 2]]);
        let mut clusterer = Clusterer::default();
        let Clustered { order, keys_before, keys_after } = clusterer.order(&all, &[0, 1], 2);
        assert_eq!(order, [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!((keys_before, keys_after), (6, 4));
        let clustered = all.reordered(&order);
        assert_eq!(clustered.dense(), [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]);
        let again = clusterer.order(&clustered, &[0, 1], 2);
        assert_eq!((again.keys_before, again.keys_after), (4, 4), "memory of the batch before");
    }

    #[test]
    fn a_batch_without_shared_keys_keeps_its_order() {
        let all = batch(&[&[5, 4, 3, 2, 1]]);
        let mut clusterer = Clusterer::default();
        assert_eq!(clusterer.order(&all, &[0], 2).order, [0, 1, 2, 3, 4]);
        let none = clusterer.order(&batch(&[&[]]), &[0], 2);
        assert_eq!(none, Clustered { order: Vec::new(), keys_before: 0, keys_after: 0 });
    }

    #[test]
    fn features_of_one_table_share_keys() {
        let all = batch(&[&[1, 2, 3, 4], &[9, 8, 1, 2]]);
        let mut clusterer = Clusterer::default();
        assert_eq!(clusterer.order(&all, &[0, 0], 2).order, [0, 2, 1, 3]);
        assert_eq!(clusterer.order(&all, &[0, 1], 2).order, [0, 1, 2, 3]);
    }
}
