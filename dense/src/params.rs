//! Parameters: names, places in the flat buffers, buckets and first values.
//!
//! The flat order is the order in which backward finishes gradients: the top MLP from its last
//! layer, the cross layers from the last (`w`, `bias`, then `v`), the bottom MLP from its last.
//! Each parameter starts at a multiple of 16 elements; the gaps stay zero in every buffer.

use std::ops::Range;

use tessera_device::Philox;

use crate::ops::Linear;
use crate::spec::{Interaction, ModelSpec};

/// Aim for the size of a bucket, in bytes.
pub const BUCKET_BYTES: usize = 4 << 20;

/// Parameters start at multiples of this many elements (64 bytes).
const ALIGN: usize = 16;

/// A named tensor in the flat buffers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    /// Name, such as `dense.bottom.0.weight`.
    pub name: String,
    /// Shape, rows first.
    pub shape: Vec<usize>,
    /// Elements in the flat buffers of weights, gradients and each optimizer state.
    pub range: Range<usize>,
}

/// What a tensor of a checkpoint holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A parameter's values.
    Weight,
    /// An optimizer state of a parameter.
    State,
}

/// A tensor as checkpoints know it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Name: the parameter's, followed by `.<state>` for a state.
    pub name: String,
    /// Shape, rows first.
    pub shape: Vec<usize>,
    /// Weight or state.
    pub role: Role,
}

/// A DCNv2 cross layer: `x_0 * (w (v x) + b) + x`.
pub(crate) struct Cross {
    /// (width) to (rank), no bias.
    pub v: Linear,
    /// (rank) to (width), with bias.
    pub w: Linear,
}

/// Where every layer's parameters are.
pub(crate) struct Layout {
    pub bottom: Vec<Linear>,
    pub cross: Vec<Cross>,
    pub top: Vec<Linear>,
    pub params: Vec<Param>,
    /// The parameters' elements, in the same order.
    pub ranges: Vec<Range<usize>>,
    pub buckets: Vec<Range<usize>>,
    /// Elements of a flat buffer.
    pub len: usize,
}

impl Layout {
    /// Lays out a valid model.
    pub fn new(spec: &ModelSpec, bucket_bytes: usize) -> Self {
        let mut build = Builder { params: Vec::new(), ends: Vec::new(), at: 0 };
        let top = build.mlp("dense.top", spec.interaction_width(), &spec.top);
        let mut cross = Vec::new();
        if let Interaction::Dcn { layers, rank } = spec.interaction {
            let width = spec.input_width();
            for layer in (0..layers).rev() {
                let name = |part: &str| format!("dense.cross.{layer}.{part}");
                let w = build.linear(name("w"), Some(name("bias")), rank, width);
                let v = build.linear(name("v"), None, width, rank);
                cross.push(Cross { v, w });
            }
            cross.reverse();
        }
        let bottom = build.mlp("dense.bottom", spec.dense_features, &spec.bottom);
        let Builder { params, ends, at } = build;
        let ranges = params.iter().map(|param| param.range.clone()).collect();
        let buckets = buckets(&ends, bucket_bytes);
        Self { bottom, cross, top, params, ranges, buckets, len: at }
    }

    /// Numbers of the parameters that lie in a range of whole layers.
    pub fn params_in(&self, range: &Range<usize>) -> Range<usize> {
        let first = self.params.partition_point(|param| param.range.start < range.start);
        first..self.params.partition_point(|param| param.range.start < range.end)
    }
}

/// Hands out places in the flat order.
struct Builder {
    params: Vec<Param>,
    /// End of each layer's parameters: where a bucket may be cut.
    ends: Vec<usize>,
    at: usize,
}

impl Builder {
    fn param(&mut self, name: String, shape: Vec<usize>) -> usize {
        let start = self.at;
        let end = start + shape.iter().product::<usize>();
        self.at = end.next_multiple_of(ALIGN);
        self.params.push(Param { name, shape, range: start..end });
        start
    }

    fn linear(
        &mut self,
        weight: String,
        bias: Option<String>,
        inputs: usize,
        outputs: usize,
    ) -> Linear {
        let weight = self.param(weight, vec![outputs, inputs]);
        let bias = bias.map(|name| self.param(name, vec![outputs]));
        self.ends.push(self.at);
        Linear { inputs, outputs, weight, bias }
    }

    /// Layers from the last to the first; returned first to last.
    fn mlp(&mut self, prefix: &str, inputs: usize, widths: &[usize]) -> Vec<Linear> {
        let mut layers: Vec<Linear> = (0..widths.len())
            .rev()
            .map(|i| {
                let inputs = if i == 0 { inputs } else { widths[i - 1] };
                self.linear(
                    format!("{prefix}.{i}.weight"),
                    Some(format!("{prefix}.{i}.bias")),
                    inputs,
                    widths[i],
                )
            })
            .collect();
        layers.reverse();
        layers
    }
}

/// Contiguous ranges that together cover everything, each closed at the first layer's end that
/// brings it to `bucket_bytes`.
fn buckets(ends: &[usize], bucket_bytes: usize) -> Vec<Range<usize>> {
    let mut buckets = Vec::new();
    let mut start = 0;
    for (i, &end) in ends.iter().enumerate() {
        if (end - start) * size_of::<f32>() >= bucket_bytes || i + 1 == ends.len() {
            buckets.push(start..end);
            start = end;
        }
    }
    buckets
}

/// First values of a parameter: a function of (seed, name, element) alone.
///
/// Weights, `v` and `w` are normal with variance 2 / (inputs + outputs), an MLP's biases normal
/// with variance 1 / outputs (both as DLRM's), a cross layer's biases 0. Four normals come from a
/// block of four random words by Box and Muller's method: with u1 in (0, 1] and u2 in [0, 1),
/// `sqrt(-2 ln u1)` times the cosine and the sine of `2 pi u2`, in f64.
pub(crate) fn first_values(param: &Param, seed: u64) -> Vec<f32> {
    let len = param.range.len();
    let deviation = match param.shape[..] {
        [outputs, inputs] => (2.0 / (inputs + outputs) as f64).sqrt(),
        _ if param.name.starts_with("dense.cross.") => return vec![0.0; len],
        _ => (1.0 / len as f64).sqrt(),
    };
    let generator = Philox::for_name(seed, &param.name);
    let mut values = Vec::with_capacity(len + 4);
    for block in 0..len.div_ceil(4) as u64 {
        let words = generator.block(block, 0).map(f64::from);
        for [a, b] in [[words[0], words[1]], [words[2], words[3]]] {
            let radius = (-2.0 * ((a + 1.0) / 4_294_967_296.0).ln()).sqrt() * deviation;
            let (sin, cos) = (std::f64::consts::TAU * (b / 4_294_967_296.0)).sin_cos();
            values.extend([(radius * cos) as f32, (radius * sin) as f32]);
        }
    }
    values.truncate(len);
    values
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::Loss;

    fn spec() -> ModelSpec {
        ModelSpec {
            dense_features: 3,
            bottom: vec![5, 4],
            interaction: Interaction::Dcn { layers: 2, rank: 2 },
            features: vec![4, 1],
            top: vec![7, 1],
            wide: false,
            loss: Loss::Bce,
        }
    }

    #[test]
    fn the_flat_order_is_the_order_of_backward() {
        let layout = Layout::new(&spec(), BUCKET_BYTES);
        let names: Vec<_> = layout.params.iter().map(|p| p.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "dense.top.1.weight",
                "dense.top.1.bias",
                "dense.top.0.weight",
                "dense.top.0.bias",
                "dense.cross.1.w",
                "dense.cross.1.bias",
                "dense.cross.1.v",
                "dense.cross.0.w",
                "dense.cross.0.bias",
                "dense.cross.0.v",
                "dense.bottom.1.weight",
                "dense.bottom.1.bias",
                "dense.bottom.0.weight",
                "dense.bottom.0.bias",
            ]
        );
        assert_eq!(layout.params[4].shape, [9, 2]);
        assert_eq!(layout.params[6].shape, [2, 9]);
        assert_eq!(layout.buckets.as_slice(), std::slice::from_ref(&(0..layout.len)));
        assert_eq!(layout.bottom[0].inputs, 3);
        for pair in layout.params.windows(2) {
            assert!(pair[0].range.end <= pair[1].range.start);
            assert_eq!(pair[1].range.start % ALIGN, 0);
        }
    }

    #[test]
    fn buckets_cover_everything_once_whatever_their_size() {
        for bytes in [0, 100, 300, 1 << 20] {
            let layout = Layout::new(&spec(), bytes);
            let mut at = 0;
            for bucket in &layout.buckets {
                assert_eq!(bucket.start, at);
                assert!(bucket.end > at);
                at = bucket.end;
            }
            assert_eq!(at, layout.len);
        }
        assert_eq!(Layout::new(&spec(), 0).buckets.len(), 8);
    }

    #[test]
    fn first_values_have_the_deviation_they_should_and_depend_on_seed_and_name_alone() {
        let param = |name: &str, shape: Vec<usize>| Param {
            name: name.into(),
            range: 0..shape.iter().product(),
            shape,
        };
        let weight = param("dense.top.0.weight", vec![101, 299]);
        let values = first_values(&weight, 7);
        assert_eq!(values.len(), 101 * 299);
        let (mean, square) = values.iter().fold((0.0, 0.0), |(mean, square), &x| {
            let x = f64::from(x);
            (mean + x, square + x * x)
        });
        let n = values.len() as f64;
        // 30,199 draws of variance 1/200: the mean has deviation 4e-4, the variance 0.8 percent.
        assert!((mean / n).abs() < 2e-3);
        assert!((square / n * 200.0 - 1.0).abs() < 0.04);
        assert!(values.iter().any(|&x| x > 0.2) && values.iter().any(|&x| x < -0.2));
        assert_eq!(first_values(&weight, 7), values);
        assert_ne!(first_values(&weight, 8), values);
        let moved = Param { range: 5..5 + 101 * 299, ..weight };
        assert_eq!(first_values(&moved, 7), values);
        assert!(first_values(&param("dense.cross.0.bias", vec![9]), 7).iter().all(|&x| x == 0.0));
        assert!(first_values(&param("dense.top.0.bias", vec![9]), 7).iter().all(|&x| x != 0.0));
    }
}
