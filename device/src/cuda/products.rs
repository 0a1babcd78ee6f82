//! Matrix products by cuBLASLt, which is loaded at run time.
//!
//! ```text
//! Product + Output  -> plan of that shape: descriptors and the library's choice of an algorithm,
//!                      asked for once and kept
//!                   -> cublasLtMatmul on the caller's stream, in that stream's workspace
//! ```
//!
//! Matrices here are row-major. The library's are column-major: they are ours transposed, so that
//! `out = a b` is asked for as `out^T = b^T a^T`, and nothing is moved. Bias vectors then run along
//! the library's columns, as its epilogues have them.
//!
//! The same arguments give the same bits on one configuration of GPU and library: an algorithm's
//! sums have a fixed order, sums that are split are added from the workspace (never in place), and
//! a workspace is one stream's alone.
//!
//! The library does not say what its ReLU makes of NaN. Ours must keep it, since a NaN that becomes
//! 0 is a fault that nobody sees. So a plan with a fused ReLU is tried once with a bias of NaNs, on
//! the output that is about to be written; if they do not come through, products of that shape are
//! made without it, and the caller is told what is left to do.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, c_void};
use std::sync::{Arc, Mutex};

use cudarc::cublaslt::sys::{self, cublasStatus_t};

use super::shared::{Shared, lock};
use super::{Cuda, CudaBuffer, CudaStream, libraries};
use crate::{Device, DeviceError, Result};

/// How products of f32 matrices are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Precision {
    /// In f32.
    #[default]
    Fp32,
    /// Factors are rounded to TF32 (10 bits of mantissa), sums are in f32. On paper an H200 does
    /// seven times as many of these a second.
    Tf32,
}

/// How a factor lies in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// As the product needs it.
    Plain,
    /// Transposed.
    Transposed,
}

/// A factor: rows of a matrix from element `at` of a buffer on, `stride` elements apart.
#[derive(Clone, Copy, Debug)]
pub struct Factor<'a> {
    /// The memory.
    pub buffer: &'a CudaBuffer<f32>,
    /// The first element.
    pub at: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// Whether it is the factor or its transpose.
    pub form: Form,
}

/// What follows a product.
#[derive(Clone, Copy, Debug)]
pub enum Epilogue<'a> {
    /// Nothing.
    None,
    /// The elements of a vector from some element of a buffer on are added to each row.
    Bias(&'a CudaBuffer<f32>, usize),
    /// [`Epilogue::Bias`], then `max(0, y)`, where NaN stays NaN.
    BiasRelu(&'a CudaBuffer<f32>, usize),
}

/// `a b`, a (m, k) and b (k, n), all at least 1.
#[derive(Clone, Copy, Debug)]
pub struct Product<'a> {
    /// Rows of the result.
    pub m: usize,
    /// Columns of the result.
    pub n: usize,
    /// Terms of a sum.
    pub k: usize,
    /// The left factor.
    pub a: Factor<'a>,
    /// The right factor.
    pub b: Factor<'a>,
    /// What follows, of a product that is stored.
    pub epilogue: Epilogue<'a>,
}

/// What happens to what the output holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Store {
    /// It is never read.
    Replace,
    /// The product is added to it.
    Add,
}

/// Where a product goes: (m, n), as a [`Factor`].
#[derive(Debug)]
pub struct Output<'a> {
    /// The memory.
    pub buffer: &'a mut CudaBuffer<f32>,
    /// The first element.
    pub at: usize,
    /// Elements from one row to the next.
    pub stride: usize,
    /// What happens to what is there.
    pub store: Store,
}

/// What of an epilogue was fused to its product; the rest is the caller's to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Fused {
    /// Nothing.
    Nothing,
    /// The bias.
    Bias,
    /// Bias and ReLU.
    BiasRelu,
}

/// The most bytes of a stream's workspace: what NVIDIA recommends for the H200's generation.
const WORKSPACE_BYTES_MAX: usize = 32 << 20;

/// The part of a device's memory that a workspace is at most.
const WORKSPACE_SHARE: usize = 64;

/// `CUBLAS_OP_N` and `CUBLAS_OP_T` of the library's header, which the binding lacks.
const OP_N: i32 = 0;
const OP_T: i32 = 1;

/// Bytes on which a bias must begin to be fused.
const BIAS_ALIGN: u64 = 16;

/// The most plans that are kept; shapes are few, as batches have one size but for the last.
const PLANS_MAX: usize = 1024;

/// Products of one device.
#[derive(Default)]
pub(super) struct Products {
    precision: Precision,
    /// The library's handle and descriptors are one thread's at a time.
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    plans: HashMap<Key, Option<Plan>>,
    /// Streams' workspaces, by the streams' numbers.
    workspaces: HashMap<usize, CudaBuffer<u8>>,
    handle: Option<Handle>,
}

/// Everything that the choice of an algorithm may depend on.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Key {
    shape: [usize; 3],
    forms: [Form; 2],
    strides: [usize; 3],
    /// Bytes on which a, b and out begin, at most 256.
    aligns: [u32; 3],
    store: Store,
    fused: Fused,
}

impl Products {
    pub(super) fn new(precision: Precision) -> Self {
        Self { precision, state: Mutex::default() }
    }
}

impl Cuda {
    /// Queues a product, and says what of its epilogue is done with it.
    ///
    /// Errors: [`DeviceError::Unavailable`] without cuBLASLt, [`DeviceError::Product`] for matrices
    /// that do not lie in their buffers or that the library refuses, [`DeviceError::Foreign`], or
    /// what the driver says.
    pub fn multiply(
        &self,
        stream: &CudaStream,
        product: Product<'_>,
        mut out: Output<'_>,
    ) -> Result<Fused> {
        self.own("multiply", &stream.shared)?;
        check(&product, &out)?;
        let [a, b] = [product.a, product.b].map(|factor| address(factor.buffer, factor.at, stream));
        let to = address(out.buffer, out.at, stream)?;
        let (a, b) = (a?, b?);
        let (bias, fusions): (u64, &[Fused]) = match product.epilogue {
            Epilogue::None => (0, &[]),
            Epilogue::Bias(buffer, at) => (address(buffer, at, stream)?, &[Fused::Bias]),
            Epilogue::BiasRelu(buffer, at) => {
                (address(buffer, at, stream)?, &[Fused::BiasRelu, Fused::Bias])
            }
        };
        let fusions = if bias.is_multiple_of(BIAS_ALIGN) { fusions } else { &[] };
        self.shared.context.bind()?;
        let mut state = lock(&self.products.state);
        let State { plans, workspaces, handle } = &mut *state;
        let handle = match handle {
            Some(handle) => handle,
            none => none.insert(Handle::new(&self.shared)?),
        };
        let workspace = match workspaces.entry(stream.index) {
            Entry::Occupied(workspace) => workspace.into_mut(),
            Entry::Vacant(none) => none.insert(self.alloc(handle.workspace_bytes)?),
        };
        let run = Run { handle, stream, a, b, to, workspace: workspace.address(stream)? };
        if plans.len() >= PLANS_MAX {
            plans.clear();
        }
        for &fused in fusions.iter().chain(&[Fused::Nothing]) {
            let key = key(&product, &out, [a, b, to], fused);
            let plan = match plans.entry(key) {
                Entry::Occupied(plan) => plan.into_mut(),
                Entry::Vacant(none) => {
                    let mut plan = Plan::new(handle, self.products.precision, key)?;
                    if fused == Fused::BiasRelu
                        && let Some(found) = &mut plan
                        && !self.keeps_nan(&run, found, &product, &mut out)?
                    {
                        plan = None;
                    }
                    none.insert(plan)
                }
            };
            if let Some(plan) = plan {
                plan.run(&run, bias)?;
                return Ok(fused);
            }
        }
        let Product { m, n, k, .. } = product;
        Err(DeviceError::Product {
            reason: format!("cuBLASLt has no algorithm for {m} x {k} x {n}"),
        })
    }

    /// Whether a plan's ReLU lets NaN through, found out on an output that nobody needs any more.
    fn keeps_nan(
        &self,
        run: &Run<'_>,
        plan: &mut Plan,
        product: &Product<'_>,
        out: &mut Output<'_>,
    ) -> Result<bool> {
        let mut bias = self.alloc::<f32>(product.n)?;
        let mut row = vec![f32::NAN; product.n];
        self.upload(run.stream, &row, &mut bias, 0)?;
        plan.run(run, bias.address(run.stream)?)?;
        self.download(run.stream, out.buffer, out.at, &mut row)?;
        Ok(row.iter().all(|value| value.is_nan()))
    }
}

/// The address of an element, for work on a stream.
fn address(buffer: &CudaBuffer<f32>, at: usize, stream: &CudaStream) -> Result<u64> {
    Ok(buffer.address(stream)? + (at * size_of::<f32>()) as u64)
}

/// Whether all matrices lie in their buffers, and the epilogue has a product of its own.
fn check(product: &Product<'_>, out: &Output<'_>) -> Result<()> {
    let Product { m, n, k, a, b, epilogue } = *product;
    let stored = |factor: &Factor<'_>, rows, cols| match factor.form {
        Form::Plain => (rows, cols),
        Form::Transposed => (cols, rows),
    };
    let refuse = |reason| Err(DeviceError::Product { reason });
    if m == 0 || n == 0 || k == 0 {
        return refuse(format!("{m} x {k} x {n}: every side must be at least 1"));
    }
    for (name, (rows, cols), at, stride, len) in [
        ("left factor", stored(&a, m, k), a.at, a.stride, a.buffer.len()),
        ("right factor", stored(&b, k, n), b.at, b.stride, b.buffer.len()),
        ("output", (m, n), out.at, out.stride, out.buffer.len()),
    ] {
        let last = (rows - 1).checked_mul(stride).and_then(|start| start.checked_add(cols));
        let end = last.and_then(|last| last.checked_add(at));
        if stride < cols || end.is_none_or(|end| end > len) {
            return refuse(format!(
                "{name} of {rows} x {cols} from element {at} on, rows {stride} apart, \
                 does not lie in a buffer of {len}"
            ));
        }
    }
    if let Epilogue::Bias(bias, at) | Epilogue::BiasRelu(bias, at) = epilogue {
        if out.store == Store::Add {
            return refuse("a bias for a product that is added to something".into());
        }
        bias.check(at, n)?;
    }
    Ok(())
}

fn key(product: &Product<'_>, out: &Output<'_>, addresses: [u64; 3], fused: Fused) -> Key {
    let Product { m, n, k, a, b, .. } = *product;
    Key {
        shape: [m, n, k],
        forms: [a.form, b.form],
        strides: [a.stride, b.stride, out.stride],
        aligns: addresses.map(|address| 1 << address.trailing_zeros().min(8)),
        store: out.store,
        fused,
    }
}

/// The library, opened for a device.
struct Handle {
    raw: sys::cublasLtHandle_t,
    shared: Arc<Shared>,
    /// Of each stream.
    workspace_bytes: usize,
}

// SAFETY: the handle may be used by any thread whose context is the device's, one at a time, which
// the lock around it sees to.
unsafe impl Send for Handle {}

impl Handle {
    fn new(shared: &Arc<Shared>) -> Result<Self> {
        libraries::cublaslt().map_err(|reason| DeviceError::Unavailable { reason })?;
        let (_, total) = shared.context.memory()?;
        let workspace_bytes = WORKSPACE_BYTES_MAX.min(total / WORKSPACE_SHARE);
        let mut raw = std::ptr::null_mut();
        // SAFETY: the library is there, the context is bound, the pointer is to a local.
        done("open", unsafe { sys::cublasLtCreate(&mut raw) })?;
        Ok(Self { raw, shared: shared.clone(), workspace_bytes })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.shared.context.bind().is_ok() {
            // SAFETY: made by `new`, destroyed once. A refusal leaves nothing to do.
            let _ = unsafe { sys::cublasLtDestroy(self.raw) };
        }
    }
}

/// Where a plan is run, and on what.
struct Run<'a> {
    handle: &'a Handle,
    stream: &'a CudaStream,
    a: u64,
    b: u64,
    to: u64,
    workspace: u64,
}

/// How products of one shape are made.
struct Plan {
    operation: Operation,
    /// The library's first and second factor: b and a.
    first: Layout,
    second: Layout,
    out: Layout,
    algorithm: sys::cublasLtMatmulAlgo_t,
    beta: f32,
    fused: Fused,
}

// SAFETY: descriptors are plain memory of the library, used by one thread at a time.
unsafe impl Send for Plan {}

impl Plan {
    /// The library's choice; none if it has no algorithm.
    fn new(handle: &Handle, precision: Precision, key: Key) -> Result<Option<Self>> {
        use sys::cublasLtEpilogue_t as Ends;
        use sys::cublasLtMatmulDescAttributes_t as Of;
        use sys::cublasLtMatmulPreferenceAttributes_t as Wish;
        let ([m, n, k], [a_stride, b_stride, out_stride]) = (key.shape, key.strides);
        let operation = Operation::new(match precision {
            Precision::Fp32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            Precision::Tf32 => sys::cublasComputeType_t::CUBLAS_COMPUTE_32F_FAST_TF32,
        })?;
        let [a_form, b_form] = key.forms.map(|form| match form {
            Form::Plain => OP_N,
            Form::Transposed => OP_T,
        });
        operation.set(Of::CUBLASLT_MATMUL_DESC_TRANSA, b_form)?;
        operation.set(Of::CUBLASLT_MATMUL_DESC_TRANSB, a_form)?;
        let epilogue = match key.fused {
            Fused::Nothing => Ends::CUBLASLT_EPILOGUE_DEFAULT,
            Fused::Bias => Ends::CUBLASLT_EPILOGUE_BIAS,
            Fused::BiasRelu => Ends::CUBLASLT_EPILOGUE_RELU_BIAS,
        };
        operation.set(Of::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue)?;
        let stored = |form, rows, cols, stride| match form {
            Form::Plain => Layout::new(rows, cols, stride),
            Form::Transposed => Layout::new(cols, rows, stride),
        };
        let first = stored(key.forms[1], k, n, b_stride)?;
        let second = stored(key.forms[0], m, k, a_stride)?;
        let out = Layout::new(m, n, out_stride)?;

        let wishes = Preference::new()?;
        let [a_align, b_align, out_align] = key.aligns;
        wishes.set(Wish::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, handle.workspace_bytes)?;
        let sums = sys::cublasLtReductionScheme_t::CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
        wishes.set(Wish::CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, sums)?;
        wishes.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, b_align)?;
        wishes.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, a_align)?;
        wishes.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, out_align)?;
        wishes.set(Wish::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, out_align)?;
        // SAFETY: a struct of numbers, for which zeros are valid.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut count = 0;
        // SAFETY: all descriptors live, there is room for the one result asked for.
        let result = unsafe {
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle.raw,
                operation.0,
                first.0,
                second.0,
                out.0,
                out.0,
                wishes.0,
                1,
                &mut found,
                &mut count,
            )
        };
        if result == cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED || count == 0 {
            return Ok(None);
        }
        done("choose an algorithm", result)?;
        if found.state != cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            return Ok(None);
        }
        let beta = if key.store == Store::Add { 1.0 } else { 0.0 };
        let (algorithm, fused) = (found.algo, key.fused);
        Ok(Some(Self { operation, first, second, out, algorithm, beta, fused }))
    }

    /// Queues the product.
    fn run(&mut self, run: &Run<'_>, bias: u64) -> Result<()> {
        use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER as BIAS;
        if self.fused != Fused::Nothing {
            self.operation.set(BIAS, bias)?;
        }
        let alpha = 1.0f32;
        let out = run.to as *mut c_void;
        // SAFETY: the matrices were checked to lie in their buffers, and those of the key's
        // alignment; buffers and workspace live until the stream is done with them; scalars are of
        // the host and read before the call returns.
        let result = unsafe {
            sys::cublasLtMatmul(
                run.handle.raw,
                self.operation.0,
                (&raw const alpha).cast(),
                run.b as *const c_void,
                self.first.0,
                run.a as *const c_void,
                self.second.0,
                (&raw const self.beta).cast(),
                out,
                self.out.0,
                out,
                self.out.0,
                &self.algorithm,
                run.workspace as *mut c_void,
                run.handle.workspace_bytes,
                run.stream.handle().cast(),
            )
        };
        done("multiply", result)
    }
}

/// What the library is to compute.
struct Operation(sys::cublasLtMatmulDesc_t);

impl Operation {
    fn new(compute: sys::cublasComputeType_t) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let scale = sys::cudaDataType_t::CUDA_R_32F;
        // SAFETY: the pointer is to a local.
        let result = unsafe { sys::cublasLtMatmulDescCreate(&mut raw, compute, scale) };
        done("describe a product", result).map(|()| Self(raw))
    }

    fn set<T>(&self, of: sys::cublasLtMatmulDescAttributes_t, value: T) -> Result<()> {
        // SAFETY: the descriptor lives, the value has the attribute's size, which is checked.
        done("describe a product", unsafe {
            let value = (&raw const value).cast();
            sys::cublasLtMatmulDescSetAttribute(self.0, of, value, size_of::<T>())
        })
    }
}

impl Drop for Operation {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulDescDestroy(self.0) };
    }
}

/// Where a matrix is, in the library's terms.
struct Layout(sys::cublasLtMatrixLayout_t);

impl Layout {
    /// Of `rows` rows of ours, which are the library's columns.
    fn new(rows: usize, cols: usize, stride: usize) -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        let of = sys::cudaDataType_t::CUDA_R_32F;
        // SAFETY: the pointer is to a local.
        let result = unsafe {
            sys::cublasLtMatrixLayoutCreate(&mut raw, of, cols as u64, rows as u64, stride as i64)
        };
        done("describe a matrix", result).map(|()| Self(raw))
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cublasLtMatrixLayoutDestroy(self.0) };
    }
}

/// What algorithms may ask for.
struct Preference(sys::cublasLtMatmulPreference_t);

impl Preference {
    fn new() -> Result<Self> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the pointer is to a local.
        let result = unsafe { sys::cublasLtMatmulPreferenceCreate(&mut raw) };
        done("choose an algorithm", result).map(|()| Self(raw))
    }

    fn set<T>(&self, of: sys::cublasLtMatmulPreferenceAttributes_t, value: T) -> Result<()> {
        // SAFETY: the preference lives, the value has the attribute's size, which is checked.
        done("choose an algorithm", unsafe {
            let value = (&raw const value).cast();
            sys::cublasLtMatmulPreferenceSetAttribute(self.0, of, value, size_of::<T>())
        })
    }
}

impl Drop for Preference {
    fn drop(&mut self) {
        // SAFETY: made by `new`, destroyed once.
        let _ = unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
    }
}

/// A refusal of the library as an error.
fn done(operation: &'static str, status: cublasStatus_t) -> Result<()> {
    if status == cublasStatus_t::CUBLAS_STATUS_SUCCESS {
        return Ok(());
    }
    // SAFETY: the library is there; it gives a string that lives for ever.
    let text = unsafe { CStr::from_ptr(sys::cublasLtGetStatusString(status)) };
    let (code, text) = (status as u32, text.to_string_lossy());
    Err(DeviceError::Product { reason: format!("cuBLASLt: cannot {operation}: {code} ({text})") })
}
