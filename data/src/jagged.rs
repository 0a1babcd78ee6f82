//! Jagged arrays: bags of ids of any length, one bag a sample.
//!
//! ```text
//! offsets  0   2 2     5        bag 0 = ids 0..2, bag 1 is empty, bag 2 = ids 2..5
//! ids      a b   c d e
//! ```
//! Everything is checked once, in [`Jagged::new`]; who holds a `Jagged` relies on it.

use std::ops::Range;

use crate::{DataError, Result};

/// An id as it stands in the data, not yet checked against any table's rows.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    PartialOrd,
    Ord,
    Hash,
    bytemuck::Pod,
    bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct RawId(pub i64);

impl std::fmt::Display for RawId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// Bags of ids, with a weight an id where the feature is weighted.
#[derive(Clone, Debug, PartialEq)]
pub struct Jagged {
    offsets: Vec<u64>,         // (bags + 1)
    ids: Vec<RawId>,           // (offsets[bags])
    weights: Option<Vec<f32>>, // like ids
}

impl Jagged {
    /// Bags `i` = `ids[offsets[i]..offsets[i + 1]]`.
    ///
    /// Errors: [`DataError::Jagged`] unless there are exactly `bags + 1` offsets, the first is 0,
    /// none is below the one before, the last is the number of ids, there are as many weights as
    /// ids, and every weight is finite.
    pub fn new(
        bags: usize,
        offsets: Vec<u64>,
        ids: Vec<RawId>,
        weights: Option<Vec<f32>>,
    ) -> Result<Self> {
        let fail = |reason: String| Err(DataError::Jagged { reason });
        if offsets.len() != bags.saturating_add(1) {
            return fail(format!(
                "{} offsets for {bags} bags; exactly {} are needed",
                offsets.len(),
                bags.saturating_add(1)
            ));
        }
        if offsets[0] != 0 {
            return fail(format!("the first offset is {}, not 0", offsets[0]));
        }
        if let Some(i) = offsets.windows(2).position(|pair| pair[1] < pair[0]) {
            return fail(format!(
                "offset {} is {}, below offset {i}, which is {}",
                i + 1,
                offsets[i + 1],
                offsets[i]
            ));
        }
        if offsets[bags] != ids.len() as u64 {
            return fail(format!(
                "the last offset is {}, but there are {} ids",
                offsets[bags],
                ids.len()
            ));
        }
        if let Some(weights) = &weights {
            if weights.len() != ids.len() {
                return fail(format!("{} weights for {} ids", weights.len(), ids.len()));
            }
            if let Some(i) = weights.iter().position(|weight| !weight.is_finite()) {
                return fail(format!("weight {i} is {}", weights[i]));
            }
        }
        Ok(Self { offsets, ids, weights })
    }

    /// Bags of the given lengths over `ids`.
    ///
    /// Errors: as [`Jagged::new`].
    pub fn from_lengths(
        lengths: &[u64],
        ids: Vec<RawId>,
        weights: Option<Vec<f32>>,
    ) -> Result<Self> {
        let mut offsets = Vec::with_capacity(lengths.len() + 1);
        let mut end = 0u64;
        offsets.push(end);
        for (bag, &length) in lengths.iter().enumerate() {
            end = end.checked_add(length).ok_or_else(|| DataError::Jagged {
                reason: format!("the lengths up to bag {bag} add up to more than 2^64"),
            })?;
            offsets.push(end);
        }
        Self::new(lengths.len(), offsets, ids, weights)
    }

    /// Number of bags.
    #[must_use]
    pub fn bags(&self) -> usize {
        self.offsets.len() - 1
    }

    /// Where bags begin and end: `bags + 1` numbers, first 0, last the number of ids.
    #[must_use]
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// All ids, bag after bag.
    #[must_use]
    pub fn ids(&self) -> &[RawId] {
        &self.ids
    }

    /// A weight an id, where the feature is weighted.
    #[must_use]
    pub fn weights(&self) -> Option<&[f32]> {
        self.weights.as_deref()
    }

    /// Places of bag `i` in [`Jagged::ids`].
    ///
    /// # Panics
    /// When there is no bag `i`.
    #[must_use]
    pub fn bag_range(&self, i: usize) -> Range<usize> {
        self.offsets[i] as usize..self.offsets[i + 1] as usize
    }

    /// Ids of bag `i`.
    ///
    /// # Panics
    /// When there is no bag `i`.
    #[must_use]
    pub fn bag(&self, i: usize) -> &[RawId] {
        &self.ids[self.bag_range(i)]
    }

    /// Weights of bag `i`, where the feature is weighted.
    ///
    /// # Panics
    /// When there is no bag `i`.
    #[must_use]
    pub fn bag_weights(&self, i: usize) -> Option<&[f32]> {
        self.weights.as_ref().map(|weights| &weights[self.bag_range(i)])
    }

    /// The bags `range`, as an array of its own.
    ///
    /// # Panics
    /// When the range leaves the bags.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Self {
        let mut builder = JaggedBuilder::new(self.weights.is_some());
        builder.append(self, range);
        builder.finish()
    }

    /// The bags in the order in which `order` names them.
    ///
    /// # Panics
    /// When it names a bag that is not there.
    #[must_use]
    pub fn reordered(&self, order: &[usize]) -> Self {
        let mut builder = JaggedBuilder::new(self.weights.is_some());
        builder.reserve(order.len(), self.ids.len());
        for &bag in order {
            builder.append(self, bag..bag + 1);
        }
        builder.finish()
    }

    /// Offsets, ids and weights.
    #[must_use]
    pub fn into_parts(self) -> (Vec<u64>, Vec<RawId>, Option<Vec<f32>>) {
        (self.offsets, self.ids, self.weights)
    }
}

/// Grows a [`Jagged`] bag by bag; what it holds is well formed whenever all bags are closed.
#[derive(Debug)]
pub(crate) struct JaggedBuilder {
    inner: Jagged,
}

impl JaggedBuilder {
    /// No bags yet.
    pub(crate) fn new(weighted: bool) -> Self {
        Self {
            inner: Jagged { offsets: vec![0], ids: Vec::new(), weights: weighted.then(Vec::new) },
        }
    }

    /// Room for `bags` more bags of `ids` ids in all.
    pub(crate) fn reserve(&mut self, bags: usize, ids: usize) {
        self.inner.offsets.reserve(bags);
        self.inner.ids.reserve(ids);
        if let Some(weights) = &mut self.inner.weights {
            weights.reserve(ids);
        }
    }

    /// Adds an id to the bag that the next [`JaggedBuilder::end_bag`] closes. For features without
    /// weights.
    pub(crate) fn push_id(&mut self, id: i64) {
        debug_assert!(self.inner.weights.is_none(), "a weighted feature needs a weight an id");
        self.inner.ids.push(RawId(id));
    }

    /// Adds ids as [`JaggedBuilder::push_id`] does.
    pub(crate) fn push_ids(&mut self, ids: &[i64]) {
        debug_assert!(self.inner.weights.is_none(), "a weighted feature needs a weight an id");
        self.inner.ids.extend(ids.iter().copied().map(RawId));
    }

    /// Adds an id and its weight, which the caller knows to be finite. For weighted features.
    pub(crate) fn push_weighted(&mut self, id: i64, weight: f32) {
        debug_assert!(weight.is_finite());
        self.inner.ids.push(RawId(id));
        if let Some(weights) = &mut self.inner.weights {
            weights.push(weight);
        }
    }

    /// Closes a bag.
    pub(crate) fn end_bag(&mut self) {
        self.inner.offsets.push(self.inner.ids.len() as u64);
    }

    /// Closes `bags` bags of `each` ids, which are the ids added since the last bag was closed.
    pub(crate) fn end_bags(&mut self, bags: usize, each: usize) {
        let (bags, each) = (bags as u64, each as u64);
        let closed = self.inner.ids.len() as u64 - bags * each;
        debug_assert_eq!(self.inner.offsets.last().copied(), Some(closed));
        self.inner.offsets.extend((1..=bags).map(|bag| closed + bag * each));
    }

    /// Adds the bags `range` of `from`, which must be weighted where this is.
    pub(crate) fn append(&mut self, from: &Jagged, range: Range<usize>) {
        assert_eq!(self.inner.weights.is_some(), from.weights.is_some());
        assert!(range.start <= range.end && range.end <= from.bags());
        let places = from.offsets[range.start] as usize..from.offsets[range.end] as usize;
        let base = self.inner.ids.len() as u64;
        let first = places.start as u64;
        self.inner.offsets.extend(
            from.offsets[range.start + 1..=range.end].iter().map(|offset| base + (offset - first)),
        );
        self.inner.ids.extend_from_slice(&from.ids[places.clone()]);
        if let (Some(weights), Some(more)) = (&mut self.inner.weights, &from.weights) {
            weights.extend_from_slice(&more[places]);
        }
    }

    /// The array.
    pub(crate) fn finish(self) -> Jagged {
        let inner = self.inner;
        debug_assert_eq!(inner.offsets.last().copied(), Some(inner.ids.len() as u64));
        debug_assert!(inner.weights.as_ref().is_none_or(|w| w.len() == inner.ids.len()));
        inner
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn ids(values: &[i64]) -> Vec<RawId> {
        values.iter().copied().map(RawId).collect()
    }

    fn message(result: Result<Jagged>) -> String {
        result.unwrap_err().to_string()
    }

    /// The shapes of public crash reports: offsets [0, 2, 0] without ids, one offset short.
    #[test]
    fn each_broken_part_is_named() {
        assert_eq!(
            message(Jagged::new(2, vec![0, 2, 0], vec![], None)),
            "jagged array: offset 2 is 0, below offset 1, which is 2"
        );
        assert_eq!(
            message(Jagged::new(8, vec![0; 8], vec![], None)),
            "jagged array: 8 offsets for 8 bags; exactly 9 are needed"
        );
        assert!(message(Jagged::new(0, vec![], vec![], None)).contains("exactly 1"));
        assert!(message(Jagged::new(usize::MAX, vec![0], vec![], None)).contains("1 offsets"));
        assert_eq!(
            message(Jagged::new(1, vec![1, 1], ids(&[5]), None)),
            "jagged array: the first offset is 1, not 0"
        );
        assert_eq!(
            message(Jagged::new(1, vec![0, 2], ids(&[5]), None)),
            "jagged array: the last offset is 2, but there are 1 ids"
        );
        assert_eq!(
            message(Jagged::new(1, vec![0, 1], ids(&[5]), Some(vec![]))),
            "jagged array: 0 weights for 1 ids"
        );
        assert_eq!(
            message(Jagged::new(1, vec![0, 1], ids(&[5]), Some(vec![f32::NAN]))),
            "jagged array: weight 0 is NaN"
        );
        let overflow = Jagged::from_lengths(&[u64::MAX, 1], vec![], None);
        assert!(message(overflow).contains("more than 2^64"));
    }

    #[test]
    fn empty_arrays_are_fine() {
        let none = Jagged::new(0, vec![0], vec![], Some(vec![])).unwrap();
        assert_eq!((none.bags(), none.ids().len()), (0, 0));
        let empty = Jagged::from_lengths(&[0, 0], vec![], None).unwrap();
        assert_eq!((empty.bags(), empty.bag(1)), (2, &[][..]));
    }

    fn bags() -> impl Strategy<Value = (Vec<Vec<(i64, f32)>>, bool)> {
        let bag = prop::collection::vec((any::<i64>(), -9.0f32..9.0), 0..5);
        (prop::collection::vec(bag, 0..12), any::<bool>())
    }

    fn build(bags: &[Vec<(i64, f32)>], weighted: bool) -> Jagged {
        let lengths: Vec<u64> = bags.iter().map(|bag| bag.len() as u64).collect();
        let all: Vec<(i64, f32)> = bags.concat();
        Jagged::from_lengths(
            &lengths,
            all.iter().map(|pair| RawId(pair.0)).collect(),
            weighted.then(|| all.iter().map(|pair| pair.1).collect()),
        )
        .unwrap()
    }

    #[test]
    fn bags_of_one_length_are_closed_together() {
        let mut builder = JaggedBuilder::new(false);
        builder.push_id(5);
        builder.push_id(6);
        builder.end_bag();
        builder.end_bags(0, 1);
        for id in [7, 8, 9] {
            builder.push_id(id);
        }
        builder.end_bags(3, 1);
        builder.end_bags(2, 0);
        builder.push_ids(&[1, 2, 3, 4]);
        builder.end_bags(2, 2);
        let lengths = [2, 1, 1, 1, 0, 0, 2, 2];
        let expected = Jagged::from_lengths(&lengths, ids(&[5, 6, 7, 8, 9, 1, 2, 3, 4]), None);
        assert_eq!(builder.finish(), expected.unwrap());
    }

    proptest! {
        #[test]
        fn bags_come_back_as_given((bags, weighted) in bags()) {
            let jagged = build(&bags, weighted);
            prop_assert_eq!(jagged.bags(), bags.len());
            for (i, bag) in bags.iter().enumerate() {
                let ids: Vec<i64> = jagged.bag(i).iter().map(|id| id.0).collect();
                prop_assert_eq!(ids, bag.iter().map(|pair| pair.0).collect::<Vec<_>>());
                let weights = jagged.bag_weights(i).map(<[f32]>::to_vec);
                let expected = weighted.then(|| bag.iter().map(|pair| pair.1).collect::<Vec<_>>());
                prop_assert_eq!(weights, expected);
            }
            let (offsets, ids, weights) = jagged.clone().into_parts();
            prop_assert_eq!(Jagged::new(bags.len(), offsets, ids, weights).unwrap(), jagged);
        }

        #[test]
        fn slices_put_together_are_the_whole((bags, weighted) in bags(), cut in 0usize..12) {
            let jagged = build(&bags, weighted);
            let cut = cut.min(bags.len());
            let (head, tail) = (jagged.slice(0..cut), jagged.slice(cut..bags.len()));
            prop_assert_eq!(&head, &build(&bags[..cut], weighted));
            let mut builder = JaggedBuilder::new(weighted);
            builder.append(&head, 0..head.bags());
            builder.append(&tail, 0..tail.bags());
            prop_assert_eq!(builder.finish(), jagged);
        }
    }
}
