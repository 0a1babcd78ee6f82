//! The shape of a model, checked once, and the layout of its input rows.

use std::fmt;

/// How the dense vector and the pooled features meet before the top MLP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Interaction {
    /// Dot products of all pairs of vectors, after the dense vector (DLRM).
    Dot,
    /// The vectors side by side.
    Concat,
    /// Cross layers of low rank over the vectors side by side (DCNv2):
    /// `x_{l+1} = x_0 * (W (V x_l) + b) + x_l`.
    Dcn {
        /// Number of cross layers.
        layers: usize,
        /// Width of `V x`.
        rank: usize,
    },
}

/// What is minimised: `sum_i w_i * l_i / B` over the global batch of B rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    /// Binary cross-entropy of the logit z: `max(z, 0) - z y + ln(1 + exp(-|z|))`.
    Bce,
    /// Squared error of the prediction: `(sigmoid(z) - y)^2`, as DLRM's.
    Mse,
}

/// Something wrong with a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The setting, as the model section of a config names it.
    pub key: &'static str,
    /// What is wrong and what would be right.
    pub message: String,
}

impl Fault {
    pub(crate) fn new(key: &'static str, message: impl Into<String>) -> Self {
        Self { key, message: message.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.message)
    }
}

/// Shape of a DLRM or DCNv2.
///
/// An input row holds, in this order: the dense vector (output of the bottom MLP, or the raw dense
/// values when there is none; nothing without dense features), each feature's pooled vector, and
/// with `wide` one column a feature with its pooled wide weight. The interaction reads the first
/// [`ModelSpec::input_width`] columns; the wide columns are added to the logit in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSpec {
    /// Dense values a sample; 0 for none.
    pub dense_features: usize,
    /// Widths of the bottom MLP's layers, ReLU after each.
    pub bottom: Vec<usize>,
    /// How the vectors meet.
    pub interaction: Interaction,
    /// Width of each feature's pooled vector, in feature order.
    pub features: Vec<usize>,
    /// Widths of the top MLP's layers, ReLU after each but the last, which is 1.
    pub top: Vec<usize>,
    /// Whether each feature adds a pooled wide weight to the logit.
    pub wide: bool,
    /// What is minimised.
    pub loss: Loss,
}

impl ModelSpec {
    /// Checks everything.
    ///
    /// Errors: every fault at once, each with its key.
    pub fn validate(&self) -> Result<(), Vec<Fault>> {
        let mut faults = Vec::new();
        let mut fault = |key, message: String| faults.push(Fault::new(key, message));
        for (key, widths) in [("bottom_mlp", &self.bottom), ("top_mlp", &self.top)] {
            if let Some(i) = widths.iter().position(|&width| width == 0) {
                fault(key, format!("layer {i} has width 0"));
            }
        }
        if self.dense_features == 0 && !self.bottom.is_empty() {
            fault("bottom_mlp", "needs dense_features of at least 1, or no layers".into());
        }
        match self.top.last() {
            None => fault("top_mlp", "needs at least one layer; the last has width 1".into()),
            Some(&last) if last != 1 => {
                fault("top_mlp", format!("the last layer has width {last}, it must be 1"));
            }
            Some(_) => {}
        }
        if let Some(i) = self.features.iter().position(|&dim| dim == 0) {
            fault("table.dim", format!("feature {i} has dim 0"));
        }
        if self.dense_features == 0 && self.features.is_empty() {
            fault("dense_features", "the model has neither dense nor sparse features".into());
        }
        if self.wide && self.features.is_empty() {
            fault("wide", "needs at least one sparse feature".into());
        }
        match self.interaction {
            Interaction::Dot => self.validate_dot(&mut fault),
            Interaction::Concat => {}
            Interaction::Dcn { layers, rank } => {
                if layers == 0 || rank == 0 {
                    fault(
                        "dcn",
                        format!("layers = {layers}, rank = {rank}: both must be at least 1"),
                    );
                }
            }
        }
        // Sizes are added and multiplied without checks from here on: with all widths together
        // below 2^30, no product of two of them and a batch comes near the address space.
        let widths = self.bottom.iter().chain(&self.top).chain(&self.features);
        let extra = match self.interaction {
            Interaction::Dcn { layers, rank } => (layers as u128).saturating_mul(rank as u128),
            Interaction::Dot | Interaction::Concat => (self.features.len() as u128 + 1).pow(2),
        };
        let total = widths.fold(extra, |sum, &width| sum.saturating_add(width as u128));
        if total.saturating_add(self.dense_features as u128) >= 1 << 30 {
            fault("top_mlp", format!("the widths of all layers add up to {total}, over 2^30"));
        }
        if faults.is_empty() { Ok(()) } else { Err(faults) }
    }

    /// The dot interaction's own demands: equal widths, a dense vector of the same, a pair.
    fn validate_dot(&self, fault: &mut impl FnMut(&'static str, String)) {
        let dim = self.features.first().copied();
        if let Some((i, &other)) =
            self.features.iter().enumerate().find(|&(_, &other)| Some(other) != dim)
        {
            let first = dim.unwrap_or_default();
            fault(
                "interaction",
                format!("dot needs equal dims: feature 0 has {first}, feature {i} has {other}"),
            );
        }
        if self.dense_features > 0 {
            match (self.bottom.last(), dim) {
                (None, _) => fault(
                    "bottom_mlp",
                    "dot needs a bottom MLP that ends in the features' dim".into(),
                ),
                (Some(&last), Some(dim)) if last != dim => {
                    fault("bottom_mlp", format!("ends in {last}, but dot needs the dim {dim}"));
                }
                _ => {}
            }
        }
        if self.vectors() < 2 {
            fault("interaction", "dot needs at least two vectors".into());
        }
    }

    /// Columns of the dense vector in an input row.
    #[must_use]
    pub fn dense_width(&self) -> usize {
        if self.dense_features == 0 {
            return 0;
        }
        self.bottom.last().copied().unwrap_or(self.dense_features)
    }

    /// Columns that the interaction reads: the dense vector and the pooled features.
    #[must_use]
    pub fn input_width(&self) -> usize {
        self.dense_width() + self.features.iter().sum::<usize>()
    }

    /// First column of a feature's pooled vector.
    #[must_use]
    pub fn feature_column(&self, feature: usize) -> usize {
        self.dense_width() + self.features[..feature].iter().sum::<usize>()
    }

    /// Column of a feature's pooled wide weight; there is one only with `wide`.
    #[must_use]
    pub fn wide_column(&self, feature: usize) -> usize {
        self.input_width() + feature
    }

    /// Elements from one input row to the next: all columns, up to a multiple of 16 (64 bytes).
    #[must_use]
    pub fn stride(&self) -> usize {
        let wide = if self.wide { self.features.len() } else { 0 };
        (self.input_width() + wide).next_multiple_of(16)
    }

    /// Vectors that a dot interaction multiplies.
    pub(crate) fn vectors(&self) -> usize {
        self.features.len() + usize::from(self.dense_features > 0)
    }

    /// Columns that the top MLP reads.
    #[must_use]
    pub fn interaction_width(&self) -> usize {
        match self.interaction {
            Interaction::Dot => {
                let vectors = self.vectors();
                self.dense_width() + vectors * (vectors - 1) / 2
            }
            Interaction::Concat | Interaction::Dcn { .. } => self.input_width(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dlrm() -> ModelSpec {
        ModelSpec {
            dense_features: 13,
            bottom: vec![32, 8],
            interaction: Interaction::Dot,
            features: vec![8; 5],
            top: vec![16, 1],
            wide: true,
            loss: Loss::Bce,
        }
    }

    #[test]
    fn the_layout_of_a_row() {
        let spec = dlrm();
        spec.validate().unwrap();
        assert_eq!(spec.input_width(), 48);
        assert_eq!(spec.feature_column(0), 8);
        assert_eq!(spec.feature_column(4), 40);
        assert_eq!(spec.wide_column(4), 52);
        assert_eq!(spec.stride(), 64);
        assert_eq!(spec.interaction_width(), 8 + 15);
        let raw = ModelSpec {
            bottom: vec![],
            interaction: Interaction::Concat,
            features: vec![3, 1],
            wide: false,
            ..spec
        };
        raw.validate().unwrap();
        assert_eq!((raw.dense_width(), raw.input_width(), raw.stride()), (13, 17, 32));
        assert_eq!(raw.interaction_width(), 17);
    }

    #[test]
    fn every_fault_is_listed_with_its_key() {
        let spec = ModelSpec {
            dense_features: 4,
            bottom: vec![0, 5],
            interaction: Interaction::Dot,
            features: vec![8, 0, 8],
            top: vec![16, 2],
            wide: false,
            loss: Loss::Bce,
        };
        let keys: Vec<_> = spec.validate().unwrap_err().into_iter().map(|f| f.key).collect();
        assert_eq!(keys, ["bottom_mlp", "top_mlp", "table.dim", "interaction", "bottom_mlp"]);

        let none = ModelSpec {
            dense_features: 0,
            bottom: vec![4],
            interaction: Interaction::Dcn { layers: 0, rank: 3 },
            features: vec![],
            top: vec![],
            wide: true,
            loss: Loss::Mse,
        };
        let keys: Vec<_> = none.validate().unwrap_err().into_iter().map(|f| f.key).collect();
        assert_eq!(keys, ["bottom_mlp", "top_mlp", "dense_features", "wide", "dcn"]);
    }

    #[test]
    fn dot_refuses_what_it_cannot_multiply() {
        let no_bottom = ModelSpec { bottom: vec![], ..dlrm() };
        assert_eq!(no_bottom.validate().unwrap_err()[0].key, "bottom_mlp");
        let lone = ModelSpec { dense_features: 0, bottom: vec![], features: vec![8], ..dlrm() };
        assert_eq!(lone.validate().unwrap_err()[0].key, "interaction");
        let huge = ModelSpec { top: vec![usize::MAX, usize::MAX, 1], ..dlrm() };
        assert_eq!(huge.validate().unwrap_err()[0].key, "top_mlp");
    }
}
