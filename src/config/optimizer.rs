//! `[optimizer.sparse]`, `[optimizer.dense]`, `[optimizer.schedule]` and clipping.
//!
//! Each kind reads just the options it uses, so that any other option is refused, never ignored.

use tessera_dense::{Decay, DenseOptimizer, Schedule};
use tessera_embedding::{SparseOptimizer, WeightDecay};

use super::ClipConfig;
use super::section::Section;

#[derive(Clone, Copy)]
enum SparseKind {
    Sgd,
    Adagrad,
    RowwiseAdagrad,
    Adam,
    PartialRowwiseAdam,
    Lamb,
    PartialRowwiseLamb,
    LarsSgd,
    Ftrl,
}

const SPARSE: &[(&str, SparseKind)] = &[
    ("sgd", SparseKind::Sgd),
    ("adagrad", SparseKind::Adagrad),
    ("rowwise_adagrad", SparseKind::RowwiseAdagrad),
    ("adam", SparseKind::Adam),
    ("partial_rowwise_adam", SparseKind::PartialRowwiseAdam),
    ("lamb", SparseKind::Lamb),
    ("partial_rowwise_lamb", SparseKind::PartialRowwiseLamb),
    ("lars_sgd", SparseKind::LarsSgd),
    ("ftrl", SparseKind::Ftrl),
];

/// Whether a number survives the one rounding to float32 in which kernels use it: it must stay
/// finite, and only zero may become zero.
pub(super) fn single(x: f64) -> bool {
    let rounded = x as f32;
    rounded.is_finite() && (rounded != 0.0 || x == 0.0)
}

fn positive(section: &mut Section<'_>, key: &str, default: f64) -> f64 {
    section.number(key, default, |x| x > 0.0 && single(x), "above 0 and within float32")
}

fn from_zero(section: &mut Section<'_>, key: &str, default: f64) -> f64 {
    section.number(key, default, |x| x >= 0.0 && single(x), "at least 0 and within float32")
}

fn below_one(section: &mut Section<'_>, key: &str, default: f64) -> f64 {
    section.number(key, default, |x| (0.0..1.0).contains(&x), "at least 0 and below 1")
}

fn learning_rate(section: &mut Section<'_>) -> f64 {
    let lr = section.required("lr", 0.0f64);
    if lr < 0.0 || !single(lr) {
        section.fault("lr", format!("must be at least 0 and within float32, is {lr}"));
    }
    lr
}

/// AdaGrad's decay: an amount needs a mode, a mode needs an amount.
fn adagrad_decay(section: &mut Section<'_>) -> WeightDecay {
    #[derive(Clone, Copy)]
    enum Mode {
        None,
        L2,
        Decouple,
    }
    let modes = [("none", Mode::None), ("l2", Mode::L2), ("decouple", Mode::Decouple)];
    let amount_given = section.has("weight_decay");
    let amount = from_zero(section, "weight_decay", 0.0);
    match section.choice("weight_decay_mode", &modes) {
        Mode::None => {
            if amount != 0.0 {
                section.fault(
                    "weight_decay",
                    "needs weight_decay_mode = \"l2\" or \"decouple\" to have an effect",
                );
            }
            WeightDecay::None
        }
        _ if !amount_given => {
            section.fault("weight_decay_mode", "needs a weight_decay");
            WeightDecay::None
        }
        Mode::L2 => WeightDecay::L2(amount),
        Mode::Decouple => WeightDecay::Decouple(amount),
    }
}

/// A sparse optimizer's section, the default one or a table's own. `replicas` is the default of
/// `moment_scale`.
pub(super) fn sparse(mut section: Section<'_>, replicas: u64) -> Option<SparseOptimizer> {
    let kind = section.required_choice("kind", SPARSE)?;
    let s = &mut section;
    let lr = learning_rate(s);
    let adam = |s: &mut Section<'_>| {
        (
            from_zero(s, "eps", 1e-8),
            below_one(s, "beta1", 0.9),
            below_one(s, "beta2", 0.999),
            from_zero(s, "weight_decay", 0.0),
        )
    };
    let optimizer = match kind {
        SparseKind::Sgd => SparseOptimizer::Sgd { lr },
        SparseKind::Adagrad => {
            SparseOptimizer::Adagrad { lr, eps: from_zero(s, "eps", 1e-8), decay: adagrad_decay(s) }
        }
        SparseKind::RowwiseAdagrad => SparseOptimizer::RowwiseAdagrad {
            lr,
            eps: from_zero(s, "eps", 1e-8),
            decay: adagrad_decay(s),
            moment_scale: positive(s, "moment_scale", replicas as f64),
        },
        SparseKind::Adam => {
            let (eps, beta1, beta2, weight_decay) = adam(s);
            SparseOptimizer::Adam { lr, eps, beta1, beta2, weight_decay }
        }
        SparseKind::PartialRowwiseAdam => {
            let (eps, beta1, beta2, weight_decay) = adam(s);
            SparseOptimizer::PartialRowwiseAdam { lr, eps, beta1, beta2, weight_decay }
        }
        SparseKind::Lamb => {
            let (eps, beta1, beta2, weight_decay) = adam(s);
            SparseOptimizer::Lamb { lr, eps, beta1, beta2, weight_decay }
        }
        SparseKind::PartialRowwiseLamb => {
            let (eps, beta1, beta2, weight_decay) = adam(s);
            SparseOptimizer::PartialRowwiseLamb { lr, eps, beta1, beta2, weight_decay }
        }
        SparseKind::LarsSgd => SparseOptimizer::LarsSgd {
            lr,
            eta: positive(s, "eta", 0.001),
            momentum: below_one(s, "momentum", 0.9),
            weight_decay: from_zero(s, "weight_decay", 0.0),
        },
        SparseKind::Ftrl => {
            if lr == 0.0 {
                s.fault("lr", "ftrl divides by it: must be above 0");
            }
            SparseOptimizer::Ftrl {
                lr,
                beta: from_zero(s, "beta", 1.0),
                l1: from_zero(s, "l1", 0.0),
                l2: from_zero(s, "l2", 0.0),
            }
        }
    };
    let name = SPARSE[kind as usize].0;
    section.finish(Some(&format!("optimizer {name}")));
    Some(optimizer)
}

/// `[optimizer.dense]`.
pub(super) fn dense(mut section: Section<'_>) -> Option<DenseOptimizer> {
    #[derive(Clone, Copy)]
    enum Kind {
        Sgd,
        Adagrad,
        Adam,
    }
    const KINDS: &[(&str, Kind)] =
        &[("sgd", Kind::Sgd), ("adagrad", Kind::Adagrad), ("adam", Kind::Adam)];
    let kind = section.required_choice("kind", KINDS)?;
    let s = &mut section;
    let lr = learning_rate(s);
    let optimizer = match kind {
        Kind::Sgd => DenseOptimizer::Sgd { lr },
        Kind::Adagrad => DenseOptimizer::Adagrad { lr, eps: from_zero(s, "eps", 1e-8) },
        Kind::Adam => DenseOptimizer::Adam {
            lr,
            eps: from_zero(s, "eps", 1e-8),
            beta1: below_one(s, "beta1", 0.9),
            beta2: below_one(s, "beta2", 0.999),
        },
    };
    section.finish(Some(&format!("optimizer {}", KINDS[kind as usize].0)));
    Some(optimizer)
}

/// `[optimizer.schedule]`: one factor for all learning rates.
pub(super) fn schedule(mut section: Section<'_>) -> Schedule {
    #[derive(Clone, Copy, PartialEq)]
    enum Kind {
        Constant,
        Linear,
        Cosine,
        Poly,
    }
    let warmup_steps = section.or("warmup_steps", 0u64);
    let kinds = [
        ("constant", Kind::Constant),
        ("linear", Kind::Linear),
        ("cosine", Kind::Cosine),
        ("poly", Kind::Poly),
    ];
    let kind = section.choice("decay", &kinds);
    let mut schedule = Schedule {
        warmup_steps,
        decay: Decay::Constant,
        decay_start: warmup_steps,
        decay_steps: 1,
        end_ratio: 1.0,
    };
    if kind != Kind::Constant {
        schedule.decay_start = section.or("decay_start", warmup_steps);
        schedule.decay_steps = section.required("decay_steps", 1u64);
        if schedule.decay_steps == 0 {
            section.fault("decay_steps", "must be at least 1");
        }
        if schedule.decay_start < warmup_steps {
            section.fault("decay_start", "must not come before the end of the warm-up");
        }
        let share = |x: f64| (0.0..=1.0).contains(&x);
        schedule.end_ratio = section.number("end_ratio", 0.0, share, "from 0 to 1");
        schedule.decay = match kind {
            Kind::Poly => Decay::Poly { power: positive(&mut section, "power", 2.0) },
            Kind::Cosine => Decay::Cosine,
            _ => Decay::Linear,
        };
    }
    section.finish(Some(&format!("decay {}", kinds[kind as usize].0)));
    schedule
}

/// `optimizer.clip_norm` or `optimizer.clip_value`.
pub(super) fn clip(section: &mut Section<'_>) -> ClipConfig {
    let norm = section.optional::<f64>("clip_norm");
    let value = section.optional::<f64>("clip_value");
    for (key, given) in [("clip_norm", norm), ("clip_value", value)] {
        if given.is_some_and(|limit| limit <= 0.0 || !single(limit)) {
            section.fault(key, "must be above 0 and within float32");
        }
    }
    match (norm, value) {
        (Some(_), Some(_)) => {
            section.fault("clip_value", "clip_norm is given too: choose one");
            ClipConfig::None
        }
        (Some(norm), None) => ClipConfig::Norm(norm),
        (None, Some(value)) => ClipConfig::Value(value),
        (None, None) => ClipConfig::None,
    }
}
