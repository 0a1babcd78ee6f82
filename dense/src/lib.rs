//! Everything dense of a DLRM or DCNv2: MLPs, interactions, loss, dense optimizers and their
//! learning-rate schedules, with explicit forward and backward passes.
//!
//! A model is a [`ModelSpec`], checked once. [`Dlrm`] owns its parameters, gradients and optimizer
//! states as flat buffers laid out in the order in which backward finishes them, cut into buckets,
//! so that a caller can send a bucket away while the rest of backward runs. [`Activations`] owns
//! all memory that depends on the batch. A training step is
//!
//! ```text
//! acts.dense, acts.labels, feature columns of acts.x0  <- the caller (pooled embeddings in place)
//! dlrm.forward(acts, rows)
//! loss = dlrm.loss(acts, rows, global_batch)
//! dlrm.backward(acts, rows, store, |bucket| ...)        -> feature columns of acts.dx0
//! dlrm.update(step)
//! ```
//!
//! where `rows` are all samples, or, one part after the other, those of a part of the batch.
//!
//! The arithmetic is in the operations of [`DenseOps`], one implementation a device. The crate
//! knows nothing of ranks, tables or files.

mod activations;
mod cpu;
mod cuda;
mod dlrm;
mod error;
mod ops;
mod optimizer;
mod params;
mod passes;
mod schedule;
mod spec;

pub use activations::Activations;
pub use dlrm::{Dlrm, sigmoid};
pub use error::{DenseError, Result};
pub use ops::{
    Activation, CrossInput, CrossLayer, DenseOps, DotShape, InputGrad, LOSS_BLOCK, Linear,
    LossInput, ParamGrad, Pass, Rows, RowsMut, SUM_BLOCK, Update, sum_blocks,
};
pub use optimizer::{AdamRule, Clip, DenseOptimizer, DenseStep, Rule};
pub use params::{BUCKET_BYTES, Param, Role, Tensor};
pub use passes::Bucket;
pub use schedule::{Decay, Schedule};
pub use spec::{Fault, Interaction, Loss, ModelSpec};
