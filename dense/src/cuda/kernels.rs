//! The kernels' sources, and how views of rows become their arguments.

use tessera_device::cuda::{Call, Kernel, KernelSource, Launch};
use tessera_device::{Cuda, Result};

use crate::ops::{Rows, RowsMut};

macro_rules! source {
    ($name:literal) => {
        KernelSource {
            name: $name,
            text: include_str!(concat!("../../kernels/", $name, ".cu")),
            headers: &[],
        }
    };
}

/// Passes over rows.
pub const ROWS: KernelSource = source!("dense_rows");
/// Products with a single row or column.
pub const VECTOR: KernelSource = source!("dense_vector");
/// The dot interaction.
pub const DOT: KernelSource = source!("dense_dot");
/// Losses.
pub const LOSS: KernelSource = source!("dense_loss");
/// Sums in f64.
pub const SUMS: KernelSource = source!("dense_sums");
/// Optimizers.
pub const UPDATE: KernelSource = source!("dense_update");

/// Arguments that are views.
pub trait ViewArguments<'a>: Sized {
    /// `const float*` and the rows' distance.
    fn rows(self, view: Rows<'a, Cuda>) -> Self;

    /// `float*` and the rows' distance.
    fn rows_mut(self, view: &'a mut RowsMut<'_, Cuda>) -> Self;

    /// `const float*` and the rows' distance, null and 0 for none.
    fn optional_rows(self, view: Option<Rows<'a, Cuda>>) -> Self;
}

impl<'a> ViewArguments<'a> for Call<'a> {
    fn rows(self, view: Rows<'a, Cuda>) -> Self {
        self.read_from(view.buffer, view.at).value(view.stride as u64)
    }

    fn rows_mut(self, view: &'a mut RowsMut<'_, Cuda>) -> Self {
        let stride = view.stride as u64;
        self.write_from(view.buffer, view.at).value(stride)
    }

    fn optional_rows(self, view: Option<Rows<'a, Cuda>>) -> Self {
        match view {
            Some(view) => self.rows(view),
            None => self.value(0u64).value(0u64),
        }
    }
}

/// A kernel for passes over cells, and blocks of threads for `rows` x `cols` of them; none where
/// there is nothing to do.
pub fn cells(
    cuda: &Cuda,
    function: &str,
    rows: usize,
    cols: usize,
) -> Result<Option<(Kernel, Launch)>> {
    const COLUMNS: usize = 32;
    const ROWS_A_BLOCK: usize = 8;
    /// The most blocks in y; a thread takes more rows then.
    const BLOCKS_Y_MAX: usize = 65_535;
    if rows == 0 || cols == 0 {
        return Ok(None);
    }
    let down = rows.div_ceil(ROWS_A_BLOCK).min(BLOCKS_Y_MAX);
    let launch = Launch {
        grid: [blocks(cols.div_ceil(COLUMNS)), down as u32, 1],
        block: [COLUMNS as u32, ROWS_A_BLOCK as u32, 1],
        shared_bytes: 0,
    };
    Ok(Some((cuda.kernel(&ROWS, function)?, launch)))
}

/// A number of blocks as launches take it; what exceeds 32 bits is refused by the launch.
pub fn blocks(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
