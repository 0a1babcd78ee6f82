//! From ids as they stand in the data to rows known to exist.
//!
//! A [`RawId`] may be anything; a [`Row`] was checked against its table. The check happens here
//! and nowhere else, before anything is written, and ids are moved, not copied, when all are
//! good. Ids of a dynamic table are all good; they become rows when the batch is routed. A [`Resolver`] shares nothing mutable with the tables, so that a reader's thread can
//! resolve (and group) batches ahead of the training step.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use tessera_data::{Jagged, RawId};

use crate::cpu::dedup::deduplicate;
use crate::dynamic::Maps;
use crate::{EmbeddingError, Lookup, LookupOps, Pooling, Result, Schema};

/// A row of a table, known to exist there.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, bytemuck::Pod, bytemuck::Zeroable,
)]
#[repr(transparent)]
pub struct Row(pub u64);

/// What to do with an id that names no row of its table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum BadIdPolicy {
    /// Refuse the batch with an error that names the id and its place.
    #[default]
    Error,
    /// Take the id (and its weight) out of its bag, and count it. A mean divides by what is left.
    Drop,
    /// Look up row 0 instead, and count it. A table without rows still refuses.
    DefaultRow,
}

impl BadIdPolicy {
    /// Its name in configs and metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Drop => "drop",
            Self::DefaultRow => "default_row",
        }
    }
}

/// Bags of rows of one feature.
#[derive(Debug)]
pub struct FeatureRows {
    /// Where bags begin and end in `rows`, (bags + 1).
    pub offsets: Vec<u64>,
    /// All rows, bag after bag.
    pub rows: Vec<Row>,
    /// A weight a row, where the feature has them.
    pub weights: Option<Vec<f32>>,
}

/// A batch's lookup as it stands in host memory: what a device stages.
#[derive(Debug)]
pub struct HostLookup {
    /// Bags of every feature.
    pub bags: usize,
    /// One entry a feature, in the schema's order.
    pub features: Vec<FeatureRows>,
    /// Rows read of each table, repeats counted.
    pub rows_read: Vec<u64>,
    /// Bad ids of each table that `policy` dropped or mapped.
    pub bad_ids: Vec<u64>,
    /// The policy.
    pub policy: BadIdPolicy,
    /// For each table whose rows are *numbered*: its different rows, ascending. Features of such a
    /// table hold, in place of rows, their numbers among these.
    pub numbered: Vec<Option<Arc<Vec<u64>>>>,
    /// Whether features of dynamic tables hold ids still, in place of rows.
    pub(crate) holds_ids: bool,
    /// The training step that the batch is of; none for one that is only looked up.
    pub(crate) step: Option<u64>,
}

impl HostLookup {
    /// The batch as that of training step `step`, in which dynamic tables admit ids and evict
    /// others. Without it they stay as they are.
    #[must_use]
    pub fn at_step(self, step: u64) -> Self {
        Self { step: Some(step), ..self }
    }

    /// One past the largest number that stands for a row of `table` in its features.
    pub(crate) fn key_end(&self, schema: &Schema, table: usize) -> u64 {
        let spec = &schema.tables()[table];
        match &self.numbered[table] {
            Some(rows) => rows.len() as u64,
            None if self.holds_ids && spec.is_dynamic() => u64::MAX,
            None => spec.stored_rows(),
        }
    }

    /// Gives the rows of the tables marked in `which` numbers: [`HostLookup::numbered`]. `share`
    /// calls what it is given for each table, on any thread.
    pub(crate) fn number_rows(
        &mut self,
        schema: &Schema,
        which: &[bool],
        share: impl FnOnce(&mut [ToNumber], fn(&mut ToNumber)),
    ) {
        // Each table with its features' rows, taken out of the lookup and put back.
        let mut tables: Vec<ToNumber> = (0..schema.tables().len())
            .filter(|&table| which[table])
            .map(|table| ToNumber {
                table,
                end: self.key_end(schema, table),
                features: schema
                    .features_of(table)
                    .iter()
                    .map(|&feature| std::mem::take(&mut self.features[feature].rows))
                    .collect(),
                unique: Vec::new(),
            })
            .collect();
        share(&mut tables, |work| work.unique = deduplicate(&mut work.features, work.end));
        for ToNumber { table, features, unique, .. } in tables {
            for (&feature, rows) in schema.features_of(table).iter().zip(features) {
                self.features[feature].rows = rows;
            }
            self.numbered[table] = Some(Arc::new(unique));
        }
    }

    /// The different numbers of `table`, whose rows are numbered, that `bags` hold; ascending.
    pub(crate) fn numbers_of(&self, schema: &Schema, table: usize, bags: Range<usize>) -> Vec<u64> {
        let mut numbers = Vec::new();
        for &feature in schema.features_of(table) {
            let feature = &self.features[feature];
            let ids = feature.offsets[bags.start] as usize..feature.offsets[bags.end] as usize;
            numbers.extend(feature.rows[ids].iter().map(|row| row.0));
        }
        numbers.sort_unstable();
        numbers.dedup();
        numbers
    }

    /// The rows that `numbers` stand for in `table`.
    pub(crate) fn rows_of<'a>(&'a self, table: usize, numbers: &'a [u64]) -> Cow<'a, [u64]> {
        match &self.numbered[table] {
            Some(rows) => numbers.iter().map(|&number| rows[number as usize]).collect(),
            None => Cow::Borrowed(numbers),
        }
    }
}

/// A table whose rows get numbers.
pub(crate) struct ToNumber {
    table: usize,
    /// One past its largest row.
    end: u64,
    features: Vec<Vec<Row>>,
    unique: Vec<u64>,
}

impl ToNumber {
    /// Its ids.
    pub(crate) fn ids(&self) -> u64 {
        self.features.iter().map(|rows| rows.len() as u64).sum()
    }
}

/// Turns raw ids into lookups; cheap to clone and independent of the tables' memory.
pub struct Resolver<D: LookupOps> {
    pub(crate) device: D,
    pub(crate) schema: Arc<Schema>,
    pub(crate) scratch: Arc<D::Scratch>,
    /// Tables whose rows move between tiers, so that a lookup must say which it needs.
    pub(crate) moving: Arc<[bool]>,
    /// Which rows the ids of dynamic tables have.
    pub(crate) maps: Maps,
}

impl<D: LookupOps> Clone for Resolver<D> {
    fn clone(&self) -> Self {
        Self {
            device: self.device.clone(),
            schema: Arc::clone(&self.schema),
            scratch: Arc::clone(&self.scratch),
            moving: Arc::clone(&self.moving),
            maps: Arc::clone(&self.maps),
        }
    }
}

impl<D: LookupOps> fmt::Debug for Resolver<D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").field("schema", &self.schema).finish_non_exhaustive()
    }
}

impl<D: LookupOps> Resolver<D> {
    /// The tables and features.
    #[must_use]
    pub fn schema(&self) -> &Arc<Schema> {
        &self.schema
    }

    /// [`Resolver::check`], then [`Resolver::route`], to look up only: ids of dynamic tables are
    /// found, and none is admitted.
    ///
    /// Errors: as there.
    pub fn resolve(
        &self,
        stream: &D::Stream,
        features: Vec<Jagged>,
        policy: BadIdPolicy,
    ) -> Result<Lookup<D>> {
        self.route(stream, self.check(features, policy)?)
    }

    /// Checks every id of a batch. Nothing changes.
    ///
    /// `features` holds one array a feature in the schema's order.
    ///
    /// Errors: [`EmbeddingError::IdOutOfRange`] under [`BadIdPolicy::Error`], the first in
    /// (feature, sample, position) order; [`EmbeddingError::FeatureCount`],
    /// [`EmbeddingError::BagCount`], [`EmbeddingError::WeightsNeedSum`],
    /// [`EmbeddingError::BagNotSingle`], [`EmbeddingError::BatchTooLarge`].
    pub fn check(&self, features: Vec<Jagged>, policy: BadIdPolicy) -> Result<HostLookup> {
        check(&self.schema, features, policy)
    }

    /// Finds the rows of a batch and stages its lookup on the device. A batch of a training step
    /// ([`HostLookup::at_step`]) admits ids to dynamic tables and evicts others: such batches are
    /// routed in the order of their steps, each once, and all of them are looked up or held, in
    /// that order.
    ///
    /// Errors: [`EmbeddingError::Store`] naming the table for a step out of order; what the device
    /// says.
    pub fn route(&self, stream: &D::Stream, batch: HostLookup) -> Result<Lookup<D>> {
        self.route_counted(stream, batch, None)
    }

    /// As [`Resolver::route`], where the ids of the only table and feature stand for `counts`
    /// occurrences each.
    pub(crate) fn route_counted(
        &self,
        stream: &D::Stream,
        mut batch: HostLookup,
        counts: Option<&[u64]>,
    ) -> Result<Lookup<D>> {
        let mapped = self.map_ids(&mut batch, counts)?;
        self.device.number_rows(&self.schema, &self.moving, &mut batch);
        let mut lookup = Lookup::new(self, stream, batch)?;
        lookup.mapped = mapped;
        Ok(lookup)
    }

    /// Groups the occurrences of each row of `lookup`, which an update needs. It happens once a
    /// lookup: now, on the calling thread's time, or else when the update comes.
    ///
    /// Errors: what the device says.
    pub fn group(&self, stream: &D::Stream, lookup: &Lookup<D>) -> Result<()> {
        self.device.group(stream, &lookup.staged)
    }

    /// Number of different rows that `lookup` reads of each table.
    ///
    /// Errors: what the device says.
    pub fn unique_counts(&self, stream: &D::Stream, lookup: &Lookup<D>) -> Result<Vec<u64>> {
        self.device.unique_counts(stream, &lookup.staged)
    }

    /// The different rows that `lookup` reads of a table, ascending.
    ///
    /// Errors: [`EmbeddingError::NoTable`], or what the device says.
    pub fn unique_rows(
        &self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        table: usize,
    ) -> Result<Vec<Row>> {
        let tables = self.schema.tables().len();
        if table >= tables {
            return Err(EmbeddingError::NoTable { table, tables });
        }
        self.device.unique_rows(stream, &lookup.staged, table)
    }
}

/// Checks a batch against the schema.
pub(crate) fn check(
    schema: &Schema,
    features: Vec<Jagged>,
    policy: BadIdPolicy,
) -> Result<HostLookup> {
    let needed = schema.features().len();
    if features.len() != needed {
        return Err(EmbeddingError::FeatureCount { given: features.len(), needed });
    }
    let bags = features.first().map_or(0, Jagged::bags);
    let mut lookup = HostLookup {
        bags,
        features: Vec::with_capacity(needed),
        rows_read: vec![0; schema.tables().len()],
        bad_ids: vec![0; schema.tables().len()],
        policy,
        numbered: vec![None; schema.tables().len()],
        holds_ids: true,
        step: None,
    };
    for (index, jagged) in features.into_iter().enumerate() {
        let table = schema.features()[index].table;
        if jagged.bags() != bags {
            return Err(EmbeddingError::BagCount {
                feature: schema.features()[index].name.clone(),
                given: jagged.bags(),
                first: schema.features()[0].name.clone(),
                needed: bags,
            });
        }
        let (rows, bad) = check_feature(schema, index, jagged, policy)?;
        lookup.rows_read[table] += rows.rows.len() as u64;
        lookup.bad_ids[table] += bad;
        lookup.features.push(rows);
    }
    // An update's grouping counts occurrences and (feature, bag) pairs of a table in 32 bits.
    for (table, spec) in schema.tables().iter().enumerate() {
        let pairs = schema.features_of(table).len() as u64 * bags as u64;
        for (what, count) in [("ids", lookup.rows_read[table]), ("bags", pairs)] {
            let max = u64::from(u32::MAX);
            if count > max {
                let table = spec.name.clone();
                return Err(EmbeddingError::BatchTooLarge { what, count, table, max });
            }
        }
    }
    Ok(lookup)
}

/// Checks one feature; returns its rows and how many bad ids the policy dealt with.
fn check_feature(
    schema: &Schema,
    index: usize,
    jagged: Jagged,
    policy: BadIdPolicy,
) -> Result<(FeatureRows, u64)> {
    let feature = &schema.features()[index];
    let table = &schema.tables()[feature.table];
    if jagged.weights().is_some() && table.pooling != Pooling::Sum {
        return Err(EmbeddingError::WeightsNeedSum {
            feature: feature.name.clone(),
            table: table.name.clone(),
            pooling: table.pooling,
        });
    }
    if table.pooling == Pooling::None {
        let lengths = jagged.offsets().windows(2).map(|pair| pair[1] - pair[0]);
        if let Some((sample, ids)) = lengths.enumerate().find(|&(_, ids)| ids != 1) {
            return Err(EmbeddingError::BagNotSingle {
                feature: feature.name.clone(),
                table: table.name.clone(),
                sample,
                ids,
            });
        }
    }
    let bad = if table.is_dynamic() { 0 } else { count_bad(jagged.ids(), table.rows) };
    if bad > 0 && (policy == BadIdPolicy::Error || table.rows == 0 && policy != BadIdPolicy::Drop) {
        let is_bad = |id: &RawId| id.0 as u64 >= table.rows;
        let at = jagged.ids().iter().position(is_bad).unwrap_or(0);
        return Err(EmbeddingError::IdOutOfRange {
            id: jagged.ids()[at].0,
            table: table.name.clone(),
            rows: table.rows,
            feature: feature.name.clone(),
            sample: jagged.offsets().partition_point(|&offset| offset <= at as u64) - 1,
        });
    }
    let (mut offsets, mut ids, mut weights) = jagged.into_parts();
    if bad > 0 && policy == BadIdPolicy::Drop {
        drop_bad(&mut offsets, &mut ids, weights.as_mut(), table.rows);
    } else if bad > 0 {
        for id in ids.iter_mut().filter(|id| id.0 as u64 >= table.rows) {
            *id = RawId(0);
        }
    }
    // Same size and alignment: the collect reuses the allocation.
    let rows = ids.into_iter().map(|id| Row(id.0 as u64)).collect();
    Ok((FeatureRows { offsets, rows, weights }, bad))
}

/// How many of `ids` are no row of a table of `rows`. A negative id is one from 2^63 up, and no
/// table in memory has as many rows.
fn count_bad(ids: &[RawId], rows: u64) -> u64 {
    // An id in range leaves the sign bits of itself and of its distance to the last row clear:
    // nearly always one pass without branches or comparisons of 64 bits (which plain x86-64 has
    // no vector instruction for) settles it.
    let last = (rows as i64).wrapping_sub(1);
    let signs = ids.iter().fold(0, |signs, id| signs | id.0 | last.wrapping_sub(id.0));
    if rows > 0 && rows <= i64::MAX as u64 && signs >= 0 {
        return 0;
    }
    ids.iter().map(|id| u64::from(id.0 as u64 >= rows)).sum()
}

/// Takes bad ids out of their bags, in place.
fn drop_bad(
    offsets: &mut [u64],
    ids: &mut Vec<RawId>,
    mut weights: Option<&mut Vec<f32>>,
    rows: u64,
) {
    let mut kept = 0;
    let mut at = 0;
    for end in &mut offsets[1..] {
        while at < *end as usize {
            if (ids[at].0 as u64) < rows {
                ids[kept] = ids[at];
                if let Some(weights) = weights.as_mut() {
                    weights[kept] = weights[at];
                }
                kept += 1;
            }
            at += 1;
        }
        *end = kept as u64;
    }
    ids.truncate(kept);
    if let Some(weights) = weights {
        weights.truncate(kept);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{FeatureSpec, Init, Precision, SparseOptimizer, TableKind, TableSpec};

    fn schema(rows: u64, pooling: Pooling) -> Schema {
        let table = TableSpec {
            name: "c3".into(),
            kind: TableKind::Static,
            rows,
            dim: 2,
            precision: Precision::Fp32,
            pooling,
            init: Init::Zero,
            optimizer: SparseOptimizer::Sgd { lr: 0.1 },
        };
        let feature = FeatureSpec { name: "c3".into(), table: 0, column: 0 };
        Schema::new(vec![table], vec![feature], 0).unwrap()
    }

    fn bags(offsets: &[u64], ids: &[i64]) -> Vec<Jagged> {
        let ids = ids.iter().copied().map(RawId).collect();
        vec![Jagged::new(offsets.len() - 1, offsets.to_vec(), ids, None).unwrap()]
    }

    #[test]
    fn ids_just_outside_and_far_outside_are_named_with_their_place() {
        for id in [10, 11, -1, i64::MAX, i64::MIN] {
            let batch = bags(&[0, 2, 2, 5], &[0, 9, 3, id, 4]);
            let error = check(&schema(10, Pooling::Sum), batch, BadIdPolicy::Error).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!(
                    "lookup: id {id} out of range for table c3 of 10 rows (feature c3, sample 2)"
                )
            );
        }
        let batch = bags(&[0, 2, 2, 5], &[0, 9, 3, 9, 4]);
        assert!(check(&schema(10, Pooling::Sum), batch, BadIdPolicy::Error).is_ok());
    }

    #[test]
    fn policies_drop_or_map_and_count() {
        let ids = &[12, 1, -1, 2, 99, 10];
        let offsets = &[0, 1, 1, 4, 6];
        let ids_f32 = || Some(vec![0.5, 1.0, 1.5, 2.0, 2.5, 3.0]);
        let raw = || ids.iter().copied().map(RawId).collect();
        let batch = vec![Jagged::new(4, offsets.to_vec(), raw(), ids_f32()).unwrap()];
        let lookup = check(&schema(10, Pooling::Sum), batch, BadIdPolicy::Drop).unwrap();
        assert_eq!(lookup.features[0].offsets, [0, 0, 0, 2, 2]);
        assert_eq!(lookup.features[0].rows, [Row(1), Row(2)]);
        assert_eq!(lookup.features[0].weights.as_deref(), Some(&[1.0, 2.0][..]));
        assert_eq!((lookup.bad_ids[0], lookup.rows_read[0]), (4, 2));

        let lookup =
            check(&schema(10, Pooling::Sum), bags(offsets, ids), BadIdPolicy::DefaultRow).unwrap();
        assert_eq!(lookup.features[0].offsets, offsets);
        assert_eq!(lookup.features[0].rows, [0, 1, 0, 2, 0, 0].map(Row));
        assert_eq!((lookup.bad_ids[0], lookup.rows_read[0]), (4, 6));
    }

    #[test]
    fn a_table_without_rows_takes_empty_bags_only() {
        let empty = schema(0, Pooling::Sum);
        assert!(check(&empty, bags(&[0, 0, 0], &[]), BadIdPolicy::Error).is_ok());
        for policy in [BadIdPolicy::Error, BadIdPolicy::DefaultRow] {
            let error = check(&empty, bags(&[0, 0, 1], &[0]), policy).unwrap_err();
            assert!(error.to_string().contains("of 0 rows (feature c3, sample 1)"), "{error}");
        }
        let lookup = check(&empty, bags(&[0, 0, 1], &[0]), BadIdPolicy::Drop).unwrap();
        assert_eq!((lookup.bad_ids[0], lookup.rows_read[0]), (1, 0));
    }

    #[test]
    fn bags_that_the_pooling_cannot_take_are_refused() {
        let error =
            check(&schema(10, Pooling::None), bags(&[0, 1, 3], &[1, 2, 3]), BadIdPolicy::Error)
                .unwrap_err();
        assert!(error.to_string().contains("bag 1 of feature c3 has 2 ids"), "{error}");
        let ids = vec![RawId(1)];
        let weighted = vec![Jagged::new(1, vec![0, 1], ids, Some(vec![1.0])).unwrap()];
        let error = check(&schema(10, Pooling::Mean), weighted, BadIdPolicy::Error).unwrap_err();
        assert!(error.to_string().contains("pools by mean; weights go with sum only"), "{error}");
        let error = check(&schema(10, Pooling::Sum), vec![], BadIdPolicy::Error).unwrap_err();
        assert!(error.to_string().contains("0 features given; the tables serve 1"), "{error}");
    }

    #[test]
    fn good_ids_are_moved_not_copied() {
        let batch = bags(&[0, 2, 3], &[7, 8, 9]);
        let place = batch[0].ids().as_ptr().cast::<Row>();
        let lookup = check(&schema(10, Pooling::Sum), batch, BadIdPolicy::Error).unwrap();
        assert_eq!(lookup.features[0].rows.as_ptr(), place);
    }
}
