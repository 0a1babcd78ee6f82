//! Optimizers; the kernels are in `dense_update.cu`.

use bytemuck::{Pod, Zeroable};
use tessera_device::cuda::{Call, CudaBuffer, CudaStream, Launch};
use tessera_device::{Cuda, DeviceError, Result};

use super::kernels::UPDATE;
use crate::ops::Update;
use crate::optimizer::{Clip, Rule};

/// As `dense_update.cu` has it.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct AdamRule {
    eps: f32,
    beta1: f32,
    rest1: f32,
    correction1: f32,
    beta2: f32,
    rest2: f32,
    correction2: f32,
}

/// See [`crate::DenseOps::update`].
pub fn update(
    cuda: &Cuda,
    stream: &CudaStream,
    update: &Update,
    grads: &CudaBuffer<f32>,
    weights: &mut CudaBuffer<f32>,
    states: &mut [CudaBuffer<f32>],
) -> Result<()> {
    let Update { rule, lr, clip, ref range } = *update;
    let at = range.start;
    let name = match rule {
        Rule::Sgd => "dense_sgd",
        Rule::Adagrad { .. } => "dense_adagrad",
        Rule::Adam(_) => "dense_adam",
    };
    let kernel = cuda.kernel(&UPDATE, name)?;
    let call = kernel.on(stream).read_from(grads, at).write_from(weights, at);
    let call = match (rule, states) {
        (Rule::Sgd, _) => call.value(lr),
        (Rule::Adagrad { eps }, [sum]) => call.write_from(sum, at).value(lr).value(eps),
        (Rule::Adam(rule), [m, v]) => {
            let rule = AdamRule {
                eps: rule.eps,
                beta1: rule.beta1,
                rest1: rule.rest1,
                correction1: rule.correction1,
                beta2: rule.beta2,
                rest2: rule.rest2,
                correction2: rule.correction2,
            };
            call.write_from(m, at).write_from(v, at).value(rule).value(lr)
        }
        (rule, states) => {
            let reason = format!("{rule:?} cannot work on {} states", states.len());
            return Err(DeviceError::Launch { function: name.into(), reason });
        }
    };
    let call = clipped(call, clip).value(range.len() as u64);
    // SAFETY: the kernel's arguments; the caller of the trait guarantees that the range lies in
    // all buffers.
    unsafe { call.launch(Launch::for_items(range.len() as u64, 256)) }
}

/// The kind of clipping, as `dense_update.cu` numbers it, and its number.
fn clipped(call: Call<'_>, clip: Clip) -> Call<'_> {
    let (kind, by): (u32, f32) = match clip {
        Clip::None => (0, 0.0),
        Clip::Value(limit) => (1, limit),
        Clip::Scale(scale) => (2, scale),
    };
    call.value(kind).value(by)
}
