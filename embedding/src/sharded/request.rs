//! What a rank asks of the owners of rows: bags of rows, a block of a table's rows at a time.
//!
//! ```text
//! unique route: the batch's different rows, each a bag of one; the asker pools what comes back
//! pooled route: the batch's bags as far as they lie in the block, with their weights; the asker
//!               adds the blocks' sums
//! dynamic table: ids, not rows, go to the block that their hashes say; on the unique route with the
//!               number of their occurrences where admission or eviction count them
//! message, for each piece of the rank it goes to:
//!     bags, ids, flags; lengths of bags if pooled; rows within the block; weights, as bits of
//!     float32, if weighted; occurrences if counted; marks of bags if the batch is cut into
//!     micro-batches
//! ```
//! Either way what comes back is one vector a bag. The asker sees these vectors as the rows of a
//! small table, the *fetched* table, and its batch as bags of that table.

use std::ops::Range;

use tessera_cache::owner_of;
use tessera_data::{Jagged, RawId};

use super::layout::Cut;
use super::micro::Marks;
use crate::{EmbeddingError, FeatureRows, Pooling, Result, Row};

/// Bags of rows of one block of rows of a table, rows counted from the block's first.
#[derive(Debug, Default)]
pub(super) struct BlockBags {
    /// Lengths of bags; `None` where each has one row.
    lengths: Option<Vec<u64>>,
    rows: Vec<u64>,
    weights: Option<Vec<f32>>,
    /// For how many occurrences each row stands, where the owner wants to know.
    counts: Option<Vec<u64>>,
}

const POOLED: u64 = 1;
const WEIGHTED: u64 = 2;
const MARKED: u64 = 4;
const COUNTED: u64 = 8;

impl BlockBags {
    /// Number of bags.
    pub(super) fn bags(&self) -> usize {
        self.lengths.as_ref().map_or(self.rows.len(), Vec::len)
    }

    /// Appends it to a message, with the marks of its bags.
    fn encode(&self, marks: &Marks, message: &mut Vec<u64>) {
        let flags = if self.lengths.is_some() { POOLED } else { 0 }
            | if self.weights.is_some() { WEIGHTED } else { 0 }
            | if marks.first.is_empty() { 0 } else { MARKED }
            | if self.counts.is_some() { COUNTED } else { 0 };
        message.extend([self.bags() as u64, self.rows.len() as u64, flags]);
        message.extend(self.lengths.iter().flatten());
        message.extend_from_slice(&self.rows);
        message.extend(self.weights.iter().flatten().map(|weight| u64::from(weight.to_bits())));
        message.extend(self.counts.iter().flatten());
        marks.encode(message);
    }
}

/// Bags of one piece that all ranks asked for, rank after rank.
#[derive(Debug, Default)]
pub(super) struct Gathered {
    offsets: Vec<u64>,
    ids: Vec<RawId>,
    weights: Vec<f32>,
    /// Bags of each rank.
    pub(super) counts: Vec<usize>,
    /// Occurrences of each id, if they are counted.
    pub(super) occurrences: Vec<u64>,
    /// Of all bags.
    pub(super) marks: Marks,
}

impl Gathered {
    /// Takes the bags of rank `rank` from the front of its message.
    ///
    /// Errors: [`EmbeddingError::Exchange`] when the message is not what it says.
    pub(super) fn take(&mut self, message: &mut &[u64], rank: usize) -> Result<()> {
        let broken = || EmbeddingError::Exchange {
            reason: format!("the message of ids from rank {rank} is broken"),
        };
        let mut next = |count: u64| {
            let count = usize::try_from(count).ok().filter(|&count| count <= message.len());
            let (head, rest) = message.split_at(count.ok_or_else(broken)?);
            *message = rest;
            Ok::<&[u64], EmbeddingError>(head)
        };
        let &[bags, ids, flags] = next(3)? else { return Err(broken()) };
        let lengths = if flags & POOLED != 0 { Some(next(bags)?) } else { None };
        let rows = next(ids)?;
        let mut end = self.ids.len() as u64;
        if self.offsets.is_empty() {
            self.offsets.push(0);
        }
        for i in 0..bags as usize {
            let length = match lengths {
                Some(lengths) => lengths[i],
                None if i < rows.len() => 1,
                None => return Err(broken()),
            };
            end = end.checked_add(length).ok_or_else(broken)?;
            self.offsets.push(end);
        }
        self.ids.extend(rows.iter().map(|&row| RawId(row as i64)));
        if flags & WEIGHTED != 0 {
            self.weights.extend(next(ids)?.iter().map(|&bits| f32::from_bits(bits as u32)));
        }
        if flags & COUNTED != 0 {
            self.occurrences.extend_from_slice(next(ids)?);
        }
        let bags = bags as usize;
        if flags & MARKED != 0 {
            self.marks.decode(next(Marks::words(bags) as u64)?, bags);
        }
        self.counts.push(bags);
        Ok(())
    }

    /// Number of bags of all ranks.
    pub(super) fn bags(&self) -> usize {
        self.counts.iter().sum()
    }

    /// The bags as a feature of the piece's own table.
    ///
    /// Errors: [`EmbeddingError::Exchange`] when offsets, ids and weights do not fit.
    pub(super) fn into_jagged(self) -> Result<Jagged> {
        let bags = self.bags();
        let offsets = if self.offsets.is_empty() { vec![0] } else { self.offsets };
        let weights = (!self.weights.is_empty()).then_some(self.weights);
        Jagged::new(bags, offsets, self.ids, weights)
            .map_err(|error| EmbeddingError::Exchange { reason: error.to_string() })
    }
}

/// What is asked of a table, one entry a block of rows; bags of all blocks in order are the rows
/// of the fetched table.
#[derive(Debug, Default)]
pub(super) struct TableRequest {
    pub(super) blocks: Vec<BlockBags>,
    /// Of all rows of the fetched table.
    pub(super) marks: Marks,
}

impl TableRequest {
    /// Asks for `unique` rows, ascending: row `i` of the fetched table is `unique[i]`.
    pub(super) fn unique(unique: &[u64], row_blocks: &[Range<u64>]) -> Self {
        let block = |range: &Range<u64>| {
            let first = unique.partition_point(|&row| row < range.start);
            let end = unique.partition_point(|&row| row < range.end);
            let rows = unique[first..end].iter().map(|row| row - range.start).collect();
            BlockBags { rows, ..BlockBags::default() }
        };
        Self { blocks: row_blocks.iter().map(block).collect(), marks: Marks::default() }
    }

    /// Asks for the rows of `unique` ids, whose numbers `features` hold and which occur as often as
    /// `counts` says, if it matters, of a table cut into `blocks` by hash. The numbers become rows
    /// of the fetched table.
    pub(super) fn unique_ids(
        unique: &[u64],
        counts: Option<&[u64]>,
        blocks: usize,
        features: &mut [&mut FeatureRows],
    ) -> Self {
        let empty = || BlockBags { counts: counts.map(|_| Vec::new()), ..BlockBags::default() };
        let mut all: Vec<BlockBags> = (0..blocks).map(|_| empty()).collect();
        let mut places = Vec::with_capacity(unique.len()); // (block, place in it)
        for (i, &id) in unique.iter().enumerate() {
            let owner = owner_of(id, blocks as u64) as usize;
            let block = &mut all[owner];
            places.push((owner, block.rows.len()));
            block.rows.push(id);
            if let (Some(to), Some(counts)) = (&mut block.counts, counts) {
                to.push(counts[i]);
            }
        }
        let request = Self { blocks: all, marks: Marks::default() };
        let firsts: Vec<usize> = (0..blocks).map(|block| request.rows_of(block).start).collect();
        for row in features.iter_mut().flat_map(|feature| &mut feature.rows) {
            let (owner, place) = places[row.0 as usize];
            row.0 = (firsts[owner] + place) as u64;
        }
        request
    }

    /// Asks for the sums of `features`' bags, and makes the features bags of the fetched table:
    /// a bag's sums over the blocks that it touches, in order. Under mean each sum is weighted by
    /// one over the bag's length.
    pub(super) fn pooled(features: &mut [FeatureRows], pooling: Pooling, cut: Cut<'_>) -> Self {
        let weighted = features.iter().any(|feature| feature.weights.is_some());
        let empty = || BlockBags {
            lengths: Some(Vec::new()),
            weights: weighted.then(Vec::new),
            ..BlockBags::default()
        };
        let mut blocks: Vec<BlockBags> = (0..cut.blocks()).map(|_| empty()).collect();
        // (block, bag of the block) of each sum, feature after feature.
        let mut sums: Vec<Vec<(usize, usize)>> = Vec::with_capacity(features.len());
        for feature in features.iter_mut() {
            let mut of_feature = Vec::new();
            let mut offsets = vec![0u64];
            let mut scales = Vec::new();
            for pair in feature.offsets.windows(2) {
                let bag = pair[0] as usize..pair[1] as usize;
                for (index, block) in blocks.iter_mut().enumerate() {
                    let before = block.rows.len();
                    for i in bag.clone() {
                        if let Some(row) = cut.within(index, feature.rows[i].0) {
                            block.rows.push(row);
                            if let Some(weights) = &mut block.weights {
                                weights.push(feature.weights.as_ref().map_or(1.0, |w| w[i]));
                            }
                        }
                    }
                    let length = block.rows.len() - before;
                    if length > 0 {
                        of_feature.push((index, block.bags()));
                        block.lengths.as_mut().expect("pooled").push(length as u64);
                        scales.push(1.0 / bag.len() as f32);
                    }
                }
                offsets.push(of_feature.len() as u64);
            }
            feature.offsets = offsets;
            feature.weights = (pooling == Pooling::Mean).then_some(scales);
            sums.push(of_feature);
        }
        let mut first = 0;
        let firsts: Vec<usize> = blocks
            .iter()
            .map(|block| {
                let here = first;
                first += block.bags();
                here
            })
            .collect();
        for (feature, sums) in features.iter_mut().zip(sums) {
            feature.rows =
                sums.into_iter().map(|(block, bag)| Row((firsts[block] + bag) as u64)).collect();
        }
        Self { blocks, marks: Marks::default() }
    }

    /// Appends a block to a message.
    pub(super) fn encode(&self, row_block: usize, message: &mut Vec<u64>) {
        let marks = self.marks.slice(self.rows_of(row_block));
        self.blocks[row_block].encode(&marks, message);
    }

    /// Rows of the fetched table.
    pub(super) fn bags(&self) -> usize {
        self.blocks.iter().map(BlockBags::bags).sum()
    }

    /// Rows of the fetched table that a block brings.
    pub(super) fn rows_of(&self, row_block: usize) -> Range<usize> {
        let first = self.blocks[..row_block].iter().map(BlockBags::bags).sum();
        first..first + self.blocks[row_block].bags()
    }
}
