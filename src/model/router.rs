//! Which rows a batch needs: checked, agreed on by all ranks and routed to who has them, ahead of
//! the step that trains on it.

use std::ops::Range;

use tessera_data::{Batch, Jagged};
use tessera_embedding::{
    BadIdPolicy, EmbeddingError, Fetchers, Lookup, LookupOps, Resolver, Routed, RoutedFetchers,
    Schema, micro_batches,
};

use super::ModelDevice;
use crate::metrics::Metrics;
use crate::ranks::Ranks;
use crate::{Error, Result};

/// A batch that can be looked up.
pub struct Found<D: LookupOps> {
    pub(super) rows: FoundRows<D>,
    /// Samples of each micro-batch.
    pub(super) micro: Vec<Range<usize>>,
    /// What the device has to have done before the rows are used, where another stream does it.
    pub(super) ready: Option<D::Event>,
}

pub(super) enum FoundRows<D: LookupOps> {
    Alone(Lookup<D>),
    Shared(Box<Routed<D>>),
}

/// Routes batches; it may do so on another thread than the model's.
pub struct Router<D: ModelDevice> {
    pub(super) device: D,
    pub(super) stream: D::Stream,
    pub(super) tables: RouterTables<D>,
    pub(super) micro_batches: usize,
    pub(super) wide: bool,
    pub(super) on_bad_id: BadIdPolicy,
}

pub(super) enum RouterTables<D: LookupOps> {
    Alone(Resolver<D>, Fetchers),
    Shared(tessera_embedding::Router<D>),
}

/// Fetches rows of routed batches from slower tiers; it may do so on another thread than either.
#[derive(Clone, Debug)]
pub struct RowFetchers(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Alone(Fetchers),
    Shared(RoutedFetchers),
}

impl<D: ModelDevice> Router<D> {
    fn schema(&self) -> &Schema {
        match &self.tables {
            RouterTables::Alone(resolver, _) => resolver.schema(),
            RouterTables::Shared(router) => router.schema(),
        }
    }

    /// Checks the labels and ids of this rank's samples of step `step`, and, if those of all ranks
    /// are good, finds the rows that they need. `ranks` are the model's, on a communicator that
    /// only the caller's thread uses. The samples' ids are taken out of `own`. A collective.
    ///
    /// Errors: [`Error::BadInput`] and [`Error::BadLabel`] with the file and row of the sample;
    /// [`Error::OtherRank`] where it is another rank's; what the device says.
    pub fn route(
        &self,
        ranks: &Ranks,
        step: u64,
        own: &mut Batch,
        metrics: &Metrics,
    ) -> Result<Found<D>> {
        let features = twice(own.take_features(), self.wide);
        let own = &*own;
        let micro = micro_batches(own.samples(), self.micro_batches);
        let stream = &self.stream;
        let labels = check_labels(own);
        let rows = match &self.tables {
            RouterTables::Alone(resolver, _) => {
                let checked = labels.and_then(|()| {
                    let checked = resolver.check(features, self.on_bad_id);
                    checked.map_err(|error| bad_input(error, self.schema(), own, metrics))
                });
                let checked = ranks.agree(checked)?.at_step(step);
                let lookup = resolver.route(stream, checked)?;
                resolver.group(stream, &lookup)?;
                FoundRows::Alone(lookup)
            }
            RouterTables::Shared(router) => {
                router.ranks().set_step(step);
                let checked = labels.and_then(|()| {
                    let checked = router.check(features, self.on_bad_id);
                    checked.map_err(|error| bad_input(error, self.schema(), own, metrics))
                });
                let checked = ranks.agree(checked)?.at_step(step);
                FoundRows::Shared(Box::new(router.route(stream, checked)?))
            }
        };
        let ready = Some(self.device.record(stream)?);
        Ok(Found { rows, micro, ready })
    }

    /// What fetches the rows of routed batches; `None` where no rows move between tiers.
    #[must_use]
    pub fn fetchers(&self) -> Option<RowFetchers> {
        let kind = match &self.tables {
            RouterTables::Alone(_, fetchers) => Kind::Alone(fetchers.clone()),
            RouterTables::Shared(router) => Kind::Shared(router.fetchers()),
        };
        let fetches = match &kind {
            Kind::Alone(fetchers) => fetchers.moves(),
            Kind::Shared(fetchers) => fetchers.moves(),
        };
        fetches.then_some(RowFetchers(kind))
    }
}

impl RowFetchers {
    /// Wants the rows that a batch needs of this rank and copies those beside that are in slower
    /// tiers. Gives whether there was room for all; if not, none are wanted.
    ///
    /// Errors: a tier that fails.
    pub fn fetch<D: LookupOps>(&self, found: &mut Found<D>) -> Result<bool> {
        Ok(match (&self.0, &mut found.rows) {
            (Kind::Alone(fetchers), FoundRows::Alone(lookup)) => fetchers.fetch(lookup)?,
            (Kind::Shared(fetchers), FoundRows::Shared(routed)) => fetchers.fetch(routed)?,
            _ => unreachable!("a batch is fetched for the tables that routed it"),
        })
    }
}

impl<D: LookupOps> Found<D> {
    /// Rows that this rank looks up, for itself and for others.
    pub(super) fn rows_asked(&self) -> u64 {
        match &self.rows {
            FoundRows::Alone(lookup) => lookup.rows_read().iter().sum(),
            FoundRows::Shared(routed) => routed.rows_asked(),
        }
    }

    /// Counts a lookup that was done, and its time in seconds.
    pub(super) fn observe(&self, metrics: &Metrics, seconds: f64) {
        match &self.rows {
            FoundRows::Alone(lookup) => metrics.embedding.observe_lookup(lookup, seconds),
            FoundRows::Shared(routed) => metrics.embedding.observe_routed(routed, seconds),
        }
    }
}

/// The features of a batch as the tables take them: the wide part looks them up a second time.
pub(super) fn twice(mut features: Vec<Jagged>, wide: bool) -> Vec<Jagged> {
    if wide {
        features.extend_from_within(..);
    }
    features
}

/// Checks that the loss is defined on a batch's labels.
///
/// Errors: [`Error::BadLabel`] with the file and row of the first label outside 0 to 1.
pub fn check_labels(batch: &Batch) -> Result<()> {
    let outside = |label: &f32| !(0.0..=1.0).contains(label);
    match batch.labels().iter().position(outside) {
        None => Ok(()),
        Some(sample) => Err(Error::BadLabel {
            place: batch.place(sample).to_string(),
            label: batch.labels()[sample],
        }),
    }
}

/// Says where a bad id stands in the data, and counts it.
pub(super) fn bad_input(
    error: EmbeddingError,
    schema: &Schema,
    own: &Batch,
    metrics: &Metrics,
) -> Error {
    match error {
        EmbeddingError::IdOutOfRange { ref table, sample, .. } => {
            if let Some(index) = schema.tables().iter().position(|spec| spec.name == *table) {
                metrics.embedding.observe_refusal(index);
            }
            Error::BadInput { place: own.place(sample).to_string(), source: error.into() }
        }
        other => other.into(),
    }
}
