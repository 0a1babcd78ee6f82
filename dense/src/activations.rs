//! All memory of a model that depends on the batch.

use tessera_device::{Device, Result};

use crate::ops::{DenseOps, LOSS_BLOCK};
use crate::params::Layout;
use crate::spec::{Interaction, ModelSpec};

/// Inputs, intermediate values and gradients of one batch of up to `max_batch` rows. Made once,
/// never grows; rows beyond the batch may hold anything.
pub struct Activations<D: Device> {
    /// Dense input (max_batch, dense_features), written by the caller.
    pub dense: D::Buffer<f32>,
    /// Labels (max_batch), written by the caller.
    pub labels: D::Buffer<f32>,
    /// Weight of each sample in the loss (max_batch): 1 until the caller writes others.
    pub sample_weights: D::Buffer<f32>,
    /// Input rows (max_batch, stride); see [`ModelSpec`]. The caller writes the features' columns
    /// and the wide columns, forward writes the dense vector's.
    pub x0: D::Buffer<f32>,
    /// Gradient of `x0`, in the same layout, after backward. The dense vector's columns are
    /// working memory; columns past the last are never written and stay 0.
    pub dx0: D::Buffer<f32>,
    /// Logits (max_batch) after forward.
    pub logits: D::Buffer<f32>,
    /// Gradient of the logits (max_batch) after loss.
    pub dlogits: D::Buffer<f32>,
    /// Outputs of the bottom MLP's layers but the last, whose output is in `x0`.
    pub(crate) bottom: Vec<D::Buffer<f32>>,
    pub(crate) interaction: Between<D>,
    /// Outputs of the top MLP's layers but the last, whose output is `logits`.
    pub(crate) top: Vec<D::Buffer<f32>>,
    /// Gradients of hidden layers, in turn.
    pub(crate) grads: [D::Buffer<f32>; 2],
    /// For `DenseOps::linear_grad_params`.
    pub(crate) scratch: D::Buffer<f32>,
    /// For `DenseOps::loss`.
    pub(crate) partial_losses: D::Buffer<f64>,
    pub(crate) max_batch: usize,
}

/// What the interaction keeps between forward and backward.
pub(crate) enum Between<D: Device> {
    /// The top MLP reads `x0`.
    Concat,
    /// Output of the dot interaction and its gradient, (max_batch, interaction_width).
    Dot { y: D::Buffer<f32>, dy: D::Buffer<f32> },
    /// Values of each cross layer, and working memory of backward.
    Dcn {
        layers: Vec<CrossValues<D>>,
        /// Gradient of the present layer's output, then input (max_batch, width).
        dx: D::Buffer<f32>,
        /// Gradient of u (max_batch, width).
        du: D::Buffer<f32>,
        /// Gradient of h (max_batch, rank).
        dh: D::Buffer<f32>,
    },
}

/// Values of a cross layer `y = x_0 * u + x`, `u = W h + b`, `h = V x`.
pub(crate) struct CrossValues<D: Device> {
    /// (max_batch, rank).
    pub h: D::Buffer<f32>,
    /// (max_batch, width).
    pub u: D::Buffer<f32>,
    /// (max_batch, width).
    pub y: D::Buffer<f32>,
}

impl<D: DenseOps> Activations<D> {
    pub(crate) fn new(
        device: &D,
        stream: &D::Stream,
        spec: &ModelSpec,
        layout: &Layout,
        max_batch: usize,
    ) -> Result<Self> {
        let alloc = |width: usize| device.alloc::<f32>(max_batch.saturating_mul(width));
        let hidden = |widths: &[usize]| {
            let but_last = &widths[..widths.len().saturating_sub(1)];
            but_last.iter().map(|&width| alloc(width)).collect::<Result<Vec<_>>>()
        };
        let width = spec.interaction_width();
        let interaction = match spec.interaction {
            Interaction::Concat => Between::Concat,
            Interaction::Dot => Between::Dot { y: alloc(width)?, dy: alloc(width)? },
            Interaction::Dcn { layers, rank } => Between::Dcn {
                layers: (0..layers)
                    .map(|_| {
                        Ok(CrossValues { h: alloc(rank)?, u: alloc(width)?, y: alloc(width)? })
                    })
                    .collect::<Result<_>>()?,
                dx: alloc(width)?,
                du: alloc(width)?,
                dh: alloc(rank)?,
            },
        };
        let cross = layout.cross.iter().flat_map(|cross| [&cross.v, &cross.w]);
        let layers = layout.bottom.iter().chain(&layout.top).chain(cross);
        let outputs = layers.map(|layer| layer.outputs).max().unwrap_or(0);
        let widest = spec.bottom.iter().chain(&spec.top).copied().max().unwrap_or(0);
        let mut sample_weights = alloc(1)?;
        device.upload(stream, &vec![1.0; max_batch], &mut sample_weights, 0)?;
        Ok(Self {
            dense: alloc(spec.dense_features)?,
            labels: alloc(1)?,
            sample_weights,
            x0: alloc(spec.stride())?,
            dx0: alloc(spec.stride())?,
            logits: alloc(1)?,
            dlogits: alloc(1)?,
            bottom: hidden(&spec.bottom)?,
            interaction,
            top: hidden(&spec.top)?,
            grads: [alloc(widest)?, alloc(widest)?],
            scratch: device.alloc(device.scratch_len(max_batch, outputs))?,
            partial_losses: device.alloc(max_batch.div_ceil(LOSS_BLOCK))?,
            max_batch,
        })
    }

    /// Most rows of a batch.
    #[must_use]
    pub fn max_batch(&self) -> usize {
        self.max_batch
    }
}
