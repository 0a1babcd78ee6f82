//! Grouping of a batch's ids: for each table its different rows, ascending, and for each row its
//! occurrences in (feature, sample, position) order.
//!
//! ```text
//! a table's rows are cut into parts by row number, about as many parts as keep all threads busy
//! each part: pick its ids in canonical order as (row - low, payload); sort stably by row;
//!            runs of equal rows -> rows, starts; payloads -> terms, scales
//! ```
//! A term is `feature-of-the-table * bags + bag`: it names the pooled gradient. The payload is
//! the term itself where every scale is 1, else the id's place among the part's terms and
//! scales. Key and payload are packed in one number, 64 bits wide where the table has at most
//! 2^32 rows, else 128, and sorted by a stable radix sort over the bits that keys use. Where the
//! cuts lie shows in no result: rows of all parts, in order, are the table's rows in order.
//!
//! Cost, per id: one read, one packed write, a read and a write per 11 bits of the key.

use crate::{HostLookup, Pooling, Schema};

/// Fewest ids a part: below, a second thread gains nothing.
const PART_IDS_MIN: u64 = 2048;

/// Parts a thread, so that a slow one does not hold up the rest.
const PARTS_PER_THREAD: u64 = 4;

/// Ids looked at to place a cut between two parts.
const SAMPLES_PER_PART: u64 = 64;

/// Most ids sorted by comparison: below, clearing a radix table costs more.
const SORT_MAX: usize = 256;

/// Most bits of the key in one pass of the radix sort.
const DIGIT_BITS_MAX: u32 = 11;

/// The grouping of a batch.
#[derive(Debug, Default)]
pub(crate) struct Groups {
    parts: Vec<Part>, // by table, then by row; of which `used` are in use
    used: usize,
    sample: Vec<u64>,
}

/// Some rows of a table and their occurrences.
#[derive(Debug, Default)]
pub(crate) struct Part {
    table: usize,
    low: u64,  // rows from low
    high: u64, // up to, not including, high
    rows: Vec<u64>,
    starts: Vec<u32>, // (rows + 1)
    terms: Vec<u32>,
    scales: Vec<f32>, // like terms; empty where all are 1
    picked_terms: Vec<u32>,
    picked_scales: Vec<f32>,
    narrow: Packs<u64>,
    wide: Packs<u128>,
}

/// Memory of a sort.
#[derive(Debug, Default)]
struct Packs<K> {
    picked: Vec<K>,
    spare: Vec<K>,
}

/// A key and a payload in one number that orders by key.
pub(crate) trait Packed: Copy + Ord + Default {
    fn pack(key: u64, payload: u32) -> Self;
    fn key(self) -> u64;
    fn payload(self) -> u32;
}

impl Packed for u64 {
    #[inline(always)]
    fn pack(key: u64, payload: u32) -> Self {
        key << 32 | Self::from(payload)
    }
    #[inline(always)]
    fn key(self) -> u64 {
        self >> 32
    }
    #[inline(always)]
    fn payload(self) -> u32 {
        self as u32
    }
}

impl Packed for u128 {
    #[inline(always)]
    fn pack(key: u64, payload: u32) -> Self {
        Self::from(key) << 32 | Self::from(payload)
    }
    #[inline(always)]
    fn key(self) -> u64 {
        (self >> 32) as u64
    }
    #[inline(always)]
    fn payload(self) -> u32 {
        self as u32
    }
}

impl Groups {
    /// The parts, by table, then by row.
    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts[..self.used]
    }

    /// The parts, to be filled.
    pub(crate) fn parts_mut(&mut self) -> &mut [Part] {
        &mut self.parts[..self.used]
    }

    /// Cuts every table that occurs into parts of about equal work.
    pub(crate) fn plan(&mut self, schema: &Schema, lookup: &HostLookup, threads: usize) {
        self.used = 0;
        // An occurrence costs a row of gradient, and nearly always a row of weights.
        let cost =
            |table: usize| lookup.rows_read[table] * (schema.tables()[table].dim as u64 + 32);
        let total: u64 = (0..schema.tables().len()).map(cost).sum();
        for table in 0..schema.tables().len() {
            let ids = lookup.rows_read[table];
            if ids == 0 {
                continue;
            }
            let wanted = match threads as u64 {
                1 => 1,
                threads => (cost(table) * threads * PARTS_PER_THREAD).div_ceil(total),
            };
            self.cut(schema, lookup, table, wanted.min(ids.div_ceil(PART_IDS_MIN)));
        }
    }

    /// Adds `parts` parts of a table, cut at evenly spaced places of a sorted sample of its ids.
    fn cut(&mut self, schema: &Schema, lookup: &HostLookup, table: usize, parts: u64) {
        self.sample.clear();
        if parts > 1 {
            let every = (lookup.rows_read[table] / (parts * SAMPLES_PER_PART)).max(1) as usize;
            for &feature in schema.features_of(table) {
                let rows = &lookup.features[feature].rows;
                self.sample.extend(rows.iter().step_by(every).map(|row| row.0));
            }
            self.sample.sort_unstable();
        }
        let end = lookup.key_end(schema, table);
        let mut low = 0;
        for part in 1..=parts {
            let high = if part == parts {
                end
            } else {
                self.sample[self.sample.len() * part as usize / parts as usize]
            };
            if self.used == self.parts.len() {
                self.parts.push(Part::default());
            }
            let next = &mut self.parts[self.used];
            (next.table, next.low, next.high) = (table, low, high);
            self.used += 1;
            low = high;
        }
    }
}

impl Part {
    /// Number of the table.
    pub(crate) fn table(&self) -> usize {
        self.table
    }

    /// Different rows, or their numbers where the lookup's rows are numbered; ascending.
    pub(crate) fn rows(&self) -> &[u64] {
        &self.rows
    }

    /// Where a row's occurrences begin and end in `terms`, (rows + 1).
    pub(crate) fn starts(&self) -> &[u32] {
        &self.starts
    }

    /// Pooled gradients of the occurrences: `feature-of-the-table * bags + bag`.
    pub(crate) fn terms(&self) -> &[u32] {
        &self.terms
    }

    /// What the gradient is multiplied by, one a term; empty where all are 1.
    pub(crate) fn scales(&self) -> &[f32] {
        &self.scales
    }

    /// Finds the part's rows and their occurrences.
    pub(crate) fn fill(&mut self, schema: &Schema, lookup: &HostLookup) {
        if lookup.key_end(schema, self.table) <= 1 << 32 {
            let mut packs = std::mem::take(&mut self.narrow);
            self.fill_packed(schema, lookup, &mut packs);
            self.narrow = packs;
        } else {
            let mut packs = std::mem::take(&mut self.wide);
            self.fill_packed(schema, lookup, &mut packs);
            self.wide = packs;
        }
    }

    fn fill_packed<K: Packed>(
        &mut self,
        schema: &Schema,
        lookup: &HostLookup,
        packs: &mut Packs<K>,
    ) {
        let features = schema.features_of(self.table);
        let mean = schema.tables()[self.table].pooling == Pooling::Mean;
        let scaled = mean || features.iter().any(|&f| lookup.features[f].weights.is_some());
        let count = if scaled {
            self.pick_scaled(schema, lookup, mean, &mut packs.picked)
        } else {
            self.pick(schema, lookup, &mut packs.picked)
        };
        let picked = &mut packs.picked[..count];
        let keys = self.high.saturating_sub(self.low);
        let sorted = sort(picked, &mut packs.spare, u64::BITS - keys.leading_zeros());

        self.rows.clear();
        self.starts.clear();
        self.terms.clear();
        self.scales.clear();
        self.terms.reserve(count);
        let mut last = None;
        for (i, &pack) in sorted.iter().enumerate() {
            if last != Some(pack.key()) {
                last = Some(pack.key());
                self.rows.push(self.low + pack.key());
                self.starts.push(i as u32);
            }
            self.terms.push(pack.payload());
        }
        self.starts.push(count as u32);
        if scaled {
            self.scales.reserve(count);
            for place in &mut self.terms {
                let from = *place as usize;
                *place = self.picked_terms[from];
                self.scales.push(self.picked_scales[from]);
            }
        }
    }

    /// Picks the part's ids with their terms as payloads; returns how many there are.
    ///
    /// Ids outside are overwritten by the next one instead of branched around: which are inside
    /// cannot be predicted.
    fn pick<K: Packed>(&self, schema: &Schema, lookup: &HostLookup, picked: &mut Vec<K>) -> usize {
        make_room(picked, lookup.rows_read[self.table] as usize);
        let mut count = 0;
        let mut term = 0u32;
        for &feature in schema.features_of(self.table) {
            let feature = &lookup.features[feature];
            for pair in feature.offsets.windows(2) {
                for row in &feature.rows[pair[0] as usize..pair[1] as usize] {
                    picked[count] = K::pack(row.0.wrapping_sub(self.low), term);
                    count += usize::from(self.low <= row.0 && row.0 < self.high);
                }
                term += 1;
            }
        }
        count
    }

    /// As `pick`, with places of terms and scales as payloads.
    fn pick_scaled<K: Packed>(
        &mut self,
        schema: &Schema,
        lookup: &HostLookup,
        mean: bool,
        picked: &mut Vec<K>,
    ) -> usize {
        let ids = lookup.rows_read[self.table] as usize;
        make_room(picked, ids);
        make_room(&mut self.picked_terms, ids);
        make_room(&mut self.picked_scales, ids);
        let mut count = 0;
        let mut term = 0u32;
        for &feature in schema.features_of(self.table) {
            let feature = &lookup.features[feature];
            for pair in feature.offsets.windows(2) {
                let share = if mean { 1.0 / (pair[1] - pair[0]) as f32 } else { 1.0 };
                for i in pair[0] as usize..pair[1] as usize {
                    let row = feature.rows[i].0;
                    picked[count] = K::pack(row.wrapping_sub(self.low), count as u32);
                    self.picked_terms[count] = term;
                    self.picked_scales[count] =
                        feature.weights.as_ref().map_or(share, |weights| weights[i]);
                    count += usize::from(self.low <= row && row < self.high);
                }
                term += 1;
            }
        }
        count
    }
}

/// Makes `buffer` at least `len` long.
fn make_room<T: Clone + Default>(buffer: &mut Vec<T>, len: usize) {
    if buffer.len() < len {
        buffer.resize(len, T::default());
    }
}

/// Sorts by key, equal keys in the order they have; `bits` hold every key. Returns where the
/// sorted packs are: in `packs` or in `spare`.
pub(crate) fn sort<'a, K: Packed>(packs: &'a mut [K], spare: &'a mut Vec<K>, bits: u32) -> &'a [K] {
    if packs.len() <= SORT_MAX {
        // Payloads ascend with the place (equal ones are alike), so the whole number orders.
        packs.sort_unstable();
        return packs;
    }
    make_room(spare, packs.len());
    let spare = &mut spare[..packs.len()];
    let passes = bits.div_ceil(DIGIT_BITS_MAX).max(1);
    let digit_bits = bits.div_ceil(passes);
    let (mut from, mut to) = (packs, spare);
    for pass in 0..passes {
        radix_pass(from, to, pass * digit_bits, digit_bits);
        (from, to) = (to, from);
    }
    from
}

/// Moves `from` to `to`, stably ordered by `bits` bits of the key from bit `shift` on.
fn radix_pass<K: Packed>(from: &[K], to: &mut [K], shift: u32, bits: u32) {
    let mut places = [0u32; 1 << DIGIT_BITS_MAX];
    let mask = (1u64 << bits) - 1;
    let digit = |pack: K| ((pack.key() >> shift) & mask) as usize;
    for &pack in from {
        places[digit(pack)] += 1;
    }
    let mut next = 0;
    for place in &mut places[..1 << bits] {
        next += std::mem::replace(place, next);
    }
    for &pack in from {
        let place = &mut places[digit(pack)];
        to[*place as usize] = pack;
        *place += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn check_sort<K: Packed + std::fmt::Debug>(keys: &[u64], bits: u32) {
        let mut packs: Vec<K> = keys.iter().zip(0..).map(|(&key, i)| K::pack(key, i)).collect();
        let mut expected = packs.clone();
        expected.sort_by_key(|pack| pack.key());
        let mut spare = Vec::new();
        assert_eq!(sort(&mut packs, &mut spare, bits), expected);
    }

    proptest! {
        #[test]
        fn sorting_is_stable_at_any_width(
            bits in 1u32..=40,
            raw in prop::collection::vec(any::<u64>(), 0..700),
            few in any::<bool>(),
        ) {
            let limit = if few { 7 } else { u64::MAX };
            let keys: Vec<u64> =
                raw.iter().map(|key| (key % limit) & ((1 << bits) - 1)).collect();
            check_sort::<u128>(&keys, bits);
            if bits <= 32 {
                check_sort::<u64>(&keys, bits);
            }
        }
    }

    #[test]
    fn a_single_row_needs_no_bits() {
        check_sort::<u64>(&[0; 1000], 1);
        check_sort::<u64>(&[0; 1000], 0);
        check_sort::<u128>(&vec![u64::MAX; 1000], 64);
    }
}
