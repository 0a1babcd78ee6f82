//! The few calls of the MPI library that messages need, with its errors as values.

use std::ffi::{c_char, c_int};
use std::mem::ManuallyDrop;
use std::ptr;

use ::mpi::Threading;
use ::mpi::environment::Universe;
use ::mpi::ffi;
use ::mpi::traits::{AsRaw, Communicator as _};

use crate::{CommError, Result};

/// The tags of headers and of payloads.
#[derive(Clone, Copy, Debug)]
pub(super) enum Tag {
    Header = 1,
    Payload = 2,
}

/// A transfer that goes on.
pub(super) struct Request(ffi::MPI_Request);

/// The initialised library, on the thread that initialised it.
pub(super) struct Library {
    universe: ManuallyDrop<Universe>,
    comm: ffi::MPI_Comm,
    rank: usize,
    size: usize,
}

impl Library {
    /// Initialises the library. Only this thread uses it, which is what "funneled" promises.
    pub(super) fn start() -> Result<Self> {
        let refused = |reason: &str| CommError::Backend {
            library: "MPI",
            operation: "initialise".to_owned(),
            reason: reason.to_owned(),
        };
        let (universe, threading) = ::mpi::initialize_with_threading(Threading::Funneled)
            .ok_or_else(|| refused("it was initialised before, and can be only once"))?;
        if threading < Threading::Funneled {
            return Err(refused("this build of it cannot be used by programs with threads"));
        }
        let world = universe.world();
        let (comm, rank, size) = (world.as_raw(), world.rank() as usize, world.size() as usize);
        // SAFETY: `comm` is the world, which exists until the library is finalised.
        let code = unsafe { ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN) };
        check(code, "set the error handler")?;
        Ok(Self { universe: ManuallyDrop::new(universe), comm, rank, size })
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn size(&self) -> usize {
        self.size
    }

    /// Name and version.
    pub(super) fn version(&self) -> String {
        let text = ::mpi::environment::library_version().unwrap_or_default();
        let end = text.find([',', '\n', '\0']).unwrap_or(text.len());
        text[..end].trim().replace('\t', " ")
    }

    /// Begins to send. `bytes` are at most `i32::MAX`.
    ///
    /// # Safety
    /// The bytes must stay where they are, unchanged, until the request is done.
    pub(super) unsafe fn send(&self, bytes: &[u8], to: usize, tag: Tag) -> Result<Request> {
        let count = count(bytes.len());
        // SAFETY: `request` is valid for writes whatever it holds, a null request here.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the range is the slice's; the caller keeps it until the request is done.
        let code = unsafe {
            ffi::MPI_Isend(
                bytes.as_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                tag as c_int,
                self.comm,
                &mut request,
            )
        };
        check(code, &format!("send {count} bytes to rank {to}"))?;
        Ok(Request(request))
    }

    /// Begins to receive exactly `bytes.len()` bytes, at most `i32::MAX`.
    ///
    /// # Safety
    /// The bytes must stay where they are, untouched, until the request is done.
    pub(super) unsafe fn receive(
        &self,
        bytes: &mut [u8],
        from: usize,
        tag: Tag,
    ) -> Result<Request> {
        let count = count(bytes.len());
        // SAFETY: as in `send`.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        // SAFETY: the range is the slice's; the caller keeps it until the request is done.
        let code = unsafe {
            ffi::MPI_Irecv(
                bytes.as_mut_ptr().cast(),
                count,
                ffi::RSMPI_UINT8_T,
                from as c_int,
                tag as c_int,
                self.comm,
                &mut request,
            )
        };
        check(code, &format!("receive {count} bytes from rank {from}"))?;
        Ok(Request(request))
    }

    /// Receives a message that [`Library::probe`] has seen, of exactly `bytes.len()` bytes.
    pub(super) fn receive_now(&self, bytes: &mut [u8], from: usize, tag: Tag) -> Result<()> {
        // SAFETY: the range is the slice's, and the call ends before it returns.
        let code = unsafe {
            ffi::MPI_Recv(
                bytes.as_mut_ptr().cast(),
                count(bytes.len()),
                ffi::RSMPI_UINT8_T,
                from as c_int,
                tag as c_int,
                self.comm,
                ffi::RSMPI_STATUS_IGNORE,
            )
        };
        check(code, &format!("receive {} bytes from rank {from}", bytes.len()))
    }

    /// The sender of a message with this tag that has arrived, if any.
    pub(super) fn probe(&self, tag: Tag) -> Result<Option<usize>> {
        let mut flag: c_int = 0;
        // SAFETY: a status is plain numbers; the library writes it when it sets the flag.
        let mut status: ffi::MPI_Status = unsafe { std::mem::zeroed() };
        // SAFETY: both out-parameters are valid for writes.
        let code = unsafe {
            ffi::MPI_Iprobe(ffi::RSMPI_ANY_SOURCE, tag as c_int, self.comm, &mut flag, &mut status)
        };
        check(code, "look for messages")?;
        Ok((flag != 0).then_some(status.MPI_SOURCE as usize))
    }

    /// Whether a transfer is done. A request that is done must not be asked again.
    pub(super) fn done(&self, request: &mut Request) -> Result<bool> {
        let mut flag: c_int = 0;
        // SAFETY: the request came from this library and is not done.
        let code = unsafe { ffi::MPI_Test(&mut request.0, &mut flag, ffi::RSMPI_STATUS_IGNORE) };
        check(code, "finish a transfer")?;
        Ok(flag != 0)
    }

    /// Ends all processes of the job.
    pub(super) fn abort(&self, code: i32) {
        // SAFETY: `comm` is the world.
        unsafe { ffi::MPI_Abort(self.comm, code) };
    }

    /// Finalises the library: all processes must do so, and it waits for them.
    pub(super) fn finalize(self) {
        drop(ManuallyDrop::into_inner(self.universe));
    }
}

/// Lengths are at most `i32::MAX`: payloads are cut so.
fn count(len: usize) -> c_int {
    c_int::try_from(len).expect("pieces fit a 32-bit count")
}

/// The library's error as ours.
fn check(code: c_int, operation: &str) -> Result<()> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0u8; ffi::MPI_MAX_ERROR_STRING as usize + 1];
    let mut len: c_int = 0;
    // SAFETY: the buffer has the length that the library asks for.
    unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr().cast::<c_char>(), ptr::from_mut(&mut len))
    };
    text.truncate(usize::try_from(len).unwrap_or(0));
    Err(CommError::Backend {
        library: "MPI",
        operation: operation.to_owned(),
        reason: String::from_utf8_lossy(&text).into_owned(),
    })
}
