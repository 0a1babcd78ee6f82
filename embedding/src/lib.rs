//! Embedding tables: pooled lookups, and the backward pass and the optimizer fused into one.
//!
//! ```text
//! raw ids --Resolver::resolve--> Lookup (rows known to exist) --EmbeddingCollection::forward-->
//! pooled vectors (bags, stride);   gradients of those --EmbeddingCollection::update--> rows move
//! ```
//! - A table is rows of `dim` weights in float32, float16 or bfloat16 with its optimizer's state
//!   beside them, in a row store of `tessera-cache`.
//! - A feature is a column of bags that one table serves; features may share a table.
//! - A lookup holds a batch's bags of all features. For an update it is grouped: per table the
//!   different rows, ascending, and each one's occurrences in (feature, sample, position) order.
//!   One owner sums a row's gradient in that order and moves the row once.
//!
//! Results are the same to the bit for any number of threads and on any instruction set, and
//! first values and rounding are pure functions of (seed, table's name, row, column, step).
//! Devices implement [`LookupOps`]; everything else is generic over them.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("row slots and element offsets are 64 bits: a 64-bit target is needed");

mod collection;
mod cpu;
mod cuda;
mod dynamic;
mod error;
mod fetch;
mod metrics;
mod ops;
mod optimizer;
mod passes;
pub mod plan;
mod resolve;
mod saving;
mod sharded;
mod spec;
mod tiers;

pub use collection::EmbeddingCollection;
pub use cpu::{CpuLookup, CpuScratch};
pub use cuda::CudaLookup;
pub use error::{EmbeddingError, Result};
pub use fetch::Fetchers;
pub use metrics::{EmbeddingMetrics, IdMetrics};
pub use ops::{Lookup, LookupOps, Marked, Reach, Stores, UpdateStats};
pub use optimizer::{
    Clip, RowSum, SparseOptimizer, SparseStep, StateTensor, StateWidth, WeightDecay,
};
pub use resolve::{BadIdPolicy, FeatureRows, HostLookup, Resolver, Row};
pub use sharded::{
    Held, MICRO_BATCHES_MAX, Routed, RoutedFetchers, Router, ShardedCollection, SyncStats,
    micro_batches,
};
pub use spec::{FeatureSpec, Init, Pooling, Precision, Schema, TableKind, TableSpec, Window};
pub use tiers::{ColdTier, FirstWeights, Tiers};
