//! Samples for recommenders: batches, and the readers and writers that move them.
//!
//! - [`Batch`] and [`Jagged`]: dense values, labels and bags of raw ids, checked once when made,
//!   each sample knowing the file and row it came from.
//! - [`open`] gives a [`Reader`] over the files of a [`SourceSpec`] as one stream, in constant
//!   memory, from any sample: `criteo-tsv`, `mlperf-npy`, `raw`, `parquet`, `synthetic`.
//! - [`BatchStream`] cuts epochs of batches from it, shuffled inside windows when asked, from any
//!   [`Position`]; [`Prefetch`] runs it ahead on a thread of its own.
//! - [`create`], [`convert`] and [`inspect`] write, translate and describe data sets.
//!
//! Bad input is an error that names file, row and column before any of it is used. Ids are
//! [`RawId`]s: whether a table has such a row is for the table to say.

mod batch;
mod error;
mod hash;
mod inspect;
mod jagged;
mod metrics;
mod prefetch;
mod read;
mod schema;
mod stream;
mod synthetic;
mod write;
mod zipf;

pub use batch::{Batch, BatchParts, Numbering, Origin, Place, Provenance, SourceFile};
pub use error::{DataError, Result};
pub use hash::{category_row, splitmix64};
pub use inspect::{
    DISTINCT_EXACT_MAX, DenseReport, Distinct, FeatureReport, HeadId, Range, Report, inspect,
};
pub use jagged::{Jagged, RawId};
pub use metrics::DataMetrics;
pub use prefetch::{Prefetch, Waited};
pub use read::{ReadCounts, Reader, open};
pub use schema::{
    DenseTransform, FeatureSpec, Format, OnNanDense, Schema, SourceSpec, Values, log1p,
};
pub use stream::{BatchStream, Event, Position, Shuffle, StreamOptions};
pub use synthetic::{SyntheticDense, SyntheticSpec, ceiling_auc};
pub use write::{Writer, convert, create};
