//! Shared buffers: what a message carries, and where its memory goes afterwards.

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::Wire;

/// Memory that messages can refer to.
pub(crate) trait Bytes: Send + Sync {
    /// All of it. Aligned for the elements that were put in.
    fn bytes(&self) -> &[u8];
}

/// A range of a shared, immutable buffer. Cloning it copies no elements.
#[derive(Clone)]
pub(crate) struct Payload {
    buffer: Option<Arc<dyn Bytes>>,
    range: Range<usize>, // bytes
}

impl Payload {
    /// Nothing.
    pub(crate) fn empty() -> Self {
        Self { buffer: None, range: 0..0 }
    }

    /// All bytes of `buffer`.
    #[cfg(feature = "mpi")]
    pub(crate) fn whole(buffer: Arc<dyn Bytes>) -> Self {
        let range = 0..buffer.bytes().len();
        Self { buffer: Some(buffer), range }
    }

    /// Its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], |buffer| &buffer.bytes()[self.range.clone()])
    }

    /// Its elements. The caller has compared the header's type with `T`.
    pub(crate) fn elements<T: Wire>(&self) -> &[T] {
        let bytes = self.bytes();
        if bytes.is_empty() {
            return &[];
        }
        bytemuck::try_cast_slice(bytes)
            .expect("payloads are whole elements of a buffer aligned for their type")
    }
}

/// A vector lent to other ranks. When the last of them has read it, its memory goes to the pool.
pub(crate) struct Shared<T: Wire> {
    values: Vec<T>,
    pool: Arc<Pool>,
}

impl<T: Wire> Shared<T> {
    /// Shares `values`.
    pub(crate) fn new(values: Vec<T>, pool: &Arc<Pool>) -> Arc<Self> {
        Arc::new(Self { values, pool: Arc::clone(pool) })
    }

    /// A message of the elements in `range`.
    pub(crate) fn payload(self: &Arc<Self>, range: Range<usize>) -> Payload {
        if range.is_empty() {
            return Payload::empty();
        }
        let bytes = range.start * size_of::<T>()..range.end * size_of::<T>();
        Payload { buffer: Some(Arc::clone(self) as Arc<dyn Bytes>), range: bytes }
    }

    /// The vector, if nobody else reads it any more.
    pub(crate) fn take(self: Arc<Self>) -> Option<Vec<T>> {
        Arc::into_inner(self).map(|mut shared| std::mem::take(&mut shared.values))
    }

    /// The vector, or a copy of it if somebody else still reads it.
    pub(crate) fn take_or_copy(self: Arc<Self>) -> Vec<T> {
        match Arc::try_unwrap(self) {
            Ok(mut shared) => std::mem::take(&mut shared.values),
            Err(shared) => {
                let mut copy = shared.pool.take(shared.len());
                copy.extend_from_slice(&shared);
                copy
            }
        }
    }
}

impl<T: Wire> std::ops::Deref for Shared<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.values
    }
}

impl<T: Wire> Bytes for Shared<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(&self.values)
    }
}

impl<T: Wire> Drop for Shared<T> {
    fn drop(&mut self) {
        self.pool.put(std::mem::take(&mut self.values));
    }
}

/// Vectors a pool keeps at most.
const KEPT: usize = 8;

/// Vectors of a communicator that are free again. Fresh memory costs more than a copy (a page
/// fault every 4 KiB), so the steps of a training job pass the same vectors round.
#[derive(Default)]
pub(crate) struct Pool {
    free: Mutex<Vec<Box<dyn Any + Send>>>,
}

impl Pool {
    /// An empty vector: the smallest with room for `capacity` elements, or the largest, for an
    /// operation whose sizes vary a little is to find its memory again, or a new one.
    pub(crate) fn take<T: Wire>(&self, capacity: usize) -> Vec<T> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let best = free
            .iter()
            .enumerate()
            .filter_map(|(at, any)| Some((at, any.downcast_ref::<Vec<T>>()?.capacity())))
            .min_by_key(|&(_, room)| if room >= capacity { (0, room) } else { (1, !room) });
        match best.map(|(at, _)| free.remove(at).downcast::<Vec<T>>()) {
            Some(Ok(vector)) => *vector,
            _ => Vec::new(),
        }
    }

    /// Takes a vector whose elements nobody needs.
    pub(crate) fn put<T: Wire>(&self, mut vector: Vec<T>) {
        if vector.capacity() == 0 {
            return;
        }
        vector.clear();
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        // The oldest goes: it has been of no use for longest.
        let oldest = (free.len() >= KEPT).then(|| free.remove(0));
        free.push(Box::new(vector));
        drop(free);
        drop(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_returns_when_its_last_reader_is_done() {
        let pool = Arc::new(Pool::default());
        let mut values = Vec::with_capacity(100);
        values.extend([1u64, 2, 3]);
        let at = values.as_ptr();
        let shared = Shared::new(values, &pool);
        let payload = shared.payload(1..3);
        assert_eq!(payload.elements::<u64>(), [2, 3]);
        assert_eq!(payload.bytes().len(), 16);
        assert!(shared.take().is_none());
        let second = payload.clone();
        drop(payload);
        assert_eq!(pool.take::<u64>(1).capacity(), 0);
        drop(second);
        assert_eq!(pool.take::<u32>(1).capacity(), 0);
        let again = pool.take::<u64>(50);
        assert_eq!((again.as_ptr(), again.len()), (at, 0));
    }

    #[test]
    fn a_vector_that_nobody_reads_comes_back_whole() {
        let pool = Arc::new(Pool::default());
        let shared = Shared::new(vec![1.5f32, 2.5], &pool);
        drop(shared.payload(0..1));
        assert_eq!(shared.take(), Some(vec![1.5, 2.5]));
        assert!(Payload::empty().elements::<f64>().is_empty());
    }

    #[test]
    fn a_pool_keeps_a_few_and_gives_the_smallest_that_fits() {
        let pool = Pool::default();
        for room in (1..=20).rev() {
            pool.put(Vec::<u8>::with_capacity(room * 10));
        }
        assert_eq!(pool.free.lock().unwrap().len(), KEPT);
        assert_eq!(pool.take::<u8>(35).capacity(), 40);
        assert_eq!(pool.take::<u8>(35).capacity(), 50);
        assert_eq!(pool.take::<u8>(500).capacity(), 80);
        assert_eq!(pool.take::<u8>(5).capacity(), 10);
    }
}
