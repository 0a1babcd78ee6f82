//! Copying many rows on several threads, which last as long as the call: work on a pool would have
//! to wait for tasks that want the locks under which rows are copied.

/// Bytes a thread, at least: to start one takes as long as copying a tenth of that.
const BYTES_PER_THREAD: usize = 1 << 20;

/// Rows of two tiers whose index is changed on two threads, at least.
pub(super) const ROWS_APART: usize = 1 << 12;

/// How many threads, of at most `threads`, are worth it for `bytes`.
pub(super) fn threads_for(threads: usize, bytes: usize) -> usize {
    threads.min(bytes / BYTES_PER_THREAD).max(1)
}

/// Does `work` for every piece: for the first on this thread, for each other on its own.
pub(super) fn share<T: Send>(pieces: impl IntoIterator<Item = T>, work: impl Fn(T) + Sync) {
    let mut pieces = pieces.into_iter();
    let Some(first) = pieces.next() else { return };
    let Some(second) = pieces.next() else { return work(first) };
    std::thread::scope(|scope| {
        let work = &work;
        for piece in std::iter::once(second).chain(pieces) {
            scope.spawn(move || work(piece));
        }
        work(first);
    });
}

/// Does both, on two threads where `apart` says so.
pub(super) fn both<A: Send, B>(
    apart: bool,
    a: impl FnOnce() -> A + Send,
    b: impl FnOnce() -> B,
) -> (A, B) {
    if !apart {
        return (a(), b());
    }
    std::thread::scope(|scope| {
        let a = scope.spawn(a);
        let b = b();
        (a.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), b)
    })
}
