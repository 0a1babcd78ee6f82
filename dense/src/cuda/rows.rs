//! Passes over rows; the kernels are in `dense_rows.cu`.

use tessera_device::cuda::Launch;
use tessera_device::{Cuda, Result};

use super::kernels::{ROWS, ViewArguments, cells};
use crate::ops::{CrossInput, CrossLayer, Pass, Rows, RowsMut};

/// Threads of a block of a kernel with a thread a row.
const THREADS: u32 = 256;

/// See [`crate::DenseOps::relu_grad`].
pub fn gate(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    cols: usize,
    y: Rows<'_, Cuda>,
    mut dy: RowsMut<'_, Cuda>,
) -> Result<()> {
    let Some((kernel, launch)) = cells(cuda, "dense_gate", batch, cols)? else { return Ok(()) };
    let call = kernel.on(stream).rows(y).rows_mut(&mut dy);
    // SAFETY: the kernel's arguments; the caller of the trait guarantees that views of (batch,
    // cols) lie in their buffers, and the kernel stays within these.
    unsafe { call.value(batch as u64).value(cols as u64).launch(launch) }
}

/// See [`crate::DenseOps::copy_rows`].
pub fn copy(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    cols: usize,
    from: Rows<'_, Cuda>,
    mut to: RowsMut<'_, Cuda>,
) -> Result<()> {
    let Some((kernel, launch)) = cells(cuda, "dense_copy_rows", batch, cols)? else {
        return Ok(());
    };
    let call = kernel.on(stream).rows(from).rows_mut(&mut to);
    // SAFETY: as in `gate`.
    unsafe { call.value(batch as u64).value(cols as u64).launch(launch) }
}

/// See [`crate::DenseOps::cross`]; reads x0, u and x.
pub fn cross(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    cols: usize,
    [x0, u, x]: [Rows<'_, Cuda>; 3],
    mut y: RowsMut<'_, Cuda>,
) -> Result<()> {
    let Some((kernel, launch)) = cells(cuda, "dense_cross", batch, cols)? else { return Ok(()) };
    let call = kernel.on(stream).rows(x0).rows(u).rows(x).rows_mut(&mut y);
    // SAFETY: as in `gate`.
    unsafe { call.value(batch as u64).value(cols as u64).launch(launch) }
}

/// See [`crate::DenseOps::cross_grad`].
pub fn cross_grad(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    CrossLayer { cols, first, last }: CrossLayer,
    CrossInput { dy, x0, u }: CrossInput<'_, Cuda>,
    mut du: RowsMut<'_, Cuda>,
    mut dx0: RowsMut<'_, Cuda>,
) -> Result<()> {
    let Some((kernel, launch)) = cells(cuda, "dense_cross_grad", batch, cols)? else {
        return Ok(());
    };
    let call = kernel.on(stream).rows(dy).rows(x0).rows(u);
    let call = call.rows_mut(&mut du).rows_mut(&mut dx0);
    let call = call.value(u32::from(first)).value(u32::from(last));
    // SAFETY: as in `gate`.
    unsafe { call.value(batch as u64).value(cols as u64).launch(launch) }
}

/// See [`crate::DenseOps::add_columns`].
pub fn add_columns(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    cols: usize,
    x: Rows<'_, Cuda>,
    mut y: RowsMut<'_, Cuda>,
) -> Result<()> {
    let kernel = cuda.kernel(&ROWS, "dense_add_columns")?;
    let call = kernel.on(stream).rows(x).rows_mut(&mut y);
    let call = call.value(batch as u64).value(cols as u64);
    // SAFETY: as in `gate`, y being (batch, 1).
    unsafe { call.launch(Launch::for_items(batch as u64, THREADS)) }
}

/// See [`crate::DenseOps::spread_column`].
pub fn spread_column(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    cols: usize,
    dy: Rows<'_, Cuda>,
    mut dx: RowsMut<'_, Cuda>,
) -> Result<()> {
    let Some((kernel, launch)) = cells(cuda, "dense_spread_column", batch, cols)? else {
        return Ok(());
    };
    let call = kernel.on(stream).rows(dy).rows_mut(&mut dx);
    // SAFETY: as in `gate`, dy being (batch, 1).
    unsafe { call.value(batch as u64).value(cols as u64).launch(launch) }
}

/// Adds a bias to rows of y, if there is one, and then takes `max(0, y)` with `relu`.
pub fn finish_linear(
    cuda: &Cuda,
    Pass { stream, batch }: Pass<'_, Cuda>,
    cols: usize,
    bias: Option<Rows<'_, Cuda>>,
    relu: bool,
    mut y: RowsMut<'_, Cuda>,
) -> Result<()> {
    if bias.is_none() && !relu {
        return Ok(());
    }
    let Some((kernel, launch)) = cells(cuda, "dense_finish_linear", batch, cols)? else {
        return Ok(());
    };
    let call = kernel.on(stream).rows_mut(&mut y);
    let call = match bias {
        Some(bias) => call.read_from(bias.buffer, bias.at),
        None => call.value(0u64),
    };
    let call = call.value(u32::from(relu));
    // SAFETY: as in `gate`, the bias having `cols` elements.
    unsafe { call.value(batch as u64).value(cols as u64).launch(launch) }
}
