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

use std::collections::HashMap;

use tessera_data::Batch;

/// Keys of a signature: ties of the first are broken by the next.
const SIGNATURE: usize = 4;

/// A row of a table, by the table's number and the id.
type Key = (u32, i64);

/// The order of a batch's samples in which those that share keys are neighbours. `tables` holds
/// the table of each feature.
#[must_use]
pub fn order(batch: &Batch, tables: &[usize]) -> Vec<usize> {
    let samples = batch.samples();
    let mut counts: HashMap<Key, u32> =
        HashMap::with_capacity(batch.features().len() * samples / 2);
    for_each_key(batch, tables, |_, key| *counts.entry(key).or_default() += 1);
    // Of each sample, the rarest keys first: (frequency, key).
    let mut signatures = vec![[(u32::MAX, (u32::MAX, i64::MAX)); SIGNATURE]; samples];
    for_each_key(batch, tables, |sample, key| {
        let count = counts[&key];
        if count < 2 {
            return;
        }
        let signature = &mut signatures[sample];
        let entry = (count, key);
        let at = signature.partition_point(|&other| other < entry);
        if at < SIGNATURE && signature[at] != entry {
            signature[at..].rotate_right(1);
            signature[at] = entry;
        }
    });
    let mut order: Vec<usize> = (0..samples).collect();
    order.sort_by_key(|&sample| (signatures[sample], sample));
    order
}

/// Different keys of each micro-batch, added up: what clustering makes smaller.
#[must_use]
pub fn unique_keys(batch: &Batch, tables: &[usize], parts: usize) -> u64 {
    let ranges = tessera_embedding::micro_batches(batch.samples(), parts);
    let mut last: HashMap<Key, usize> = HashMap::new();
    let mut unique = 0;
    let mut keys: Vec<(usize, Key)> = Vec::new();
    for_each_key(batch, tables, |sample, key| keys.push((sample, key)));
    keys.sort_unstable();
    for (sample, key) in keys {
        let part = ranges.partition_point(|range| range.end <= sample);
        if last.insert(key, part) != Some(part) {
            unique += 1;
        }
    }
    unique
}

fn for_each_key(batch: &Batch, tables: &[usize], mut each: impl FnMut(usize, Key)) {
    for (feature, &table) in batch.features().iter().zip(tables) {
        let (offsets, ids) = (feature.offsets(), feature.ids());
        for (sample, ends) in offsets.windows(2).enumerate() {
            for id in &ids[ends[0] as usize..ends[1] as usize] {
                each(sample, (table as u32, id.0));
            }
        }
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
        let order = order(&all, &[0, 1]);
        assert_eq!(order, [0, 2, 4, 6, 1, 3, 5, 7]);
        assert_eq!(unique_keys(&all, &[0, 1], 2), 6);
        let clustered = all.reordered(&order);
        assert_eq!(unique_keys(&clustered, &[0, 1], 2), 4);
        assert_eq!(clustered.dense(), [0.0, 2.0, 4.0, 6.0, 1.0, 3.0, 5.0, 7.0]);
    }

    #[test]
    fn a_batch_without_shared_keys_keeps_its_order() {
        let all = batch(&[&[5, 4, 3, 2, 1]]);
        assert_eq!(order(&all, &[0]), [0, 1, 2, 3, 4]);
        assert_eq!(order(&batch(&[&[]]), &[0]), Vec::<usize>::new());
    }

    #[test]
    fn features_of_one_table_share_keys() {
        let all = batch(&[&[1, 2, 3, 4], &[9, 8, 1, 2]]);
        assert_eq!(order(&all, &[0, 0]), [0, 2, 1, 3]);
        assert_eq!(order(&all, &[0, 1]), [0, 1, 2, 3]);
    }
}
