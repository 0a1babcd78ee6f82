//! First weights of a table on a GPU.

use tessera_cache::{Resident, RowStore};
use tessera_device::cuda::{CudaStream, Launch};
use tessera_device::{Cuda, Device, Philox};

use super::views::precision_of;
use super::{LOOKUP, THREADS};
use crate::cpu::init;
use crate::{Init, Result, Schema, Window};

/// Numbers of a normal distribution made by the host at a time.
const CHUNK_NUMBERS: usize = 1 << 20;

/// The most blocks a multiprocessor.
const BLOCKS_A_MULTIPROCESSOR_MAX: u64 = 16;

/// Writes the first weights of every row of a fresh store.
///
/// Normal values are made by the host: logarithm and sine have other last bits on a GPU.
pub(super) fn initialize(
    device: &Cuda,
    stream: &CudaStream,
    schema: &Schema,
    table: usize,
    store: &mut Resident<Cuda>,
) -> Result<()> {
    let (spec, window) = (&schema.tables()[table], &schema.windows()[table]);
    let generator = Philox::for_name(schema.seed(), &spec.name);
    let (rows, plane) = (store.rows(), store.planes_mut().0);
    match spec.init {
        // What a fresh store holds.
        Init::Zero => {}
        Init::Uniform { scale } => {
            let scale = init::uniform_scale(scale, window);
            let blocks = rows.saturating_mul(spec.dim.div_ceil(4) as u64);
            let most = u64::from(device.multiprocessors()) * BLOCKS_A_MULTIPROCESSOR_MAX;
            let blocks = blocks.div_ceil(THREADS.into()).min(most.max(1)) as u32;
            let kernel = device.kernel(&LOOKUP, "init_uniform")?;
            let call = kernel.on(stream).value(generator.key()).value(scale).value(rows);
            let call = call.value(spec.dim as u64).value(window.first_row);
            let call = call.value((window.first_column / 4) as u64);
            let call = call.value(precision_of(spec.precision)).write(plane);
            // SAFETY: the kernel's arguments; the plane is (rows, dim) elements of this precision.
            unsafe { call.launch(Launch::blocks(blocks, THREADS))? };
        }
        Init::Normal { .. } => {
            let row_bytes = spec.dim * spec.precision.bytes();
            let chunk = (CHUNK_NUMBERS / spec.dim).max(1) as u64;
            let mut bytes = Vec::new();
            for first in (0..rows).step_by(chunk as usize) {
                bytes.resize(chunk.min(rows - first) as usize * row_bytes, 0u8);
                let here = Window { first_row: window.first_row + first, ..*window };
                init::fill(spec, &here, generator, &mut bytes);
                device.upload(stream, &bytes, plane, first as usize * row_bytes)?;
            }
        }
    }
    Ok(())
}
