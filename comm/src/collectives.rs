//! What the operations do on the communicator's thread.
//!
//! Bytes that leave a rank of `n`, for `b` bytes of input: all_to_all_v what it is told;
//! all_gather `(n - 1) b`; reduce_scatter `(n - 1)/n b`; all_reduce `2 (n - 1)/n b` (its second
//! half gathers the sums), or `(n - 1) b` in one exchange when `b` is small; broadcast `(n - 1) b`
//! at the root.

use std::ops::Range;
use std::sync::Arc;

use crate::engine::{Engine, Op};
use crate::group::Group;
use crate::header::Header;
use crate::payload::{Payload, Shared};
use crate::reduce::{self, Combine};
use crate::transport::Message;
use crate::{CommError, Result, Wire};

/// Reductions of at most so many bytes take one exchange instead of two.
const SMALL_BYTES: usize = 4096;

/// What every rank sent to this one, in rank order in one buffer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parts<T> {
    data: Vec<T>,
    ends: Vec<usize>,
}

impl<T> Parts<T> {
    /// Number of ranks.
    #[must_use]
    pub fn ranks(&self) -> usize {
        self.ends.len()
    }

    /// The elements that rank `rank` of the group sent.
    ///
    /// # Panics
    /// When the group has no such rank.
    #[must_use]
    pub fn part(&self, rank: usize) -> &[T] {
        &self.data[self.range(rank)]
    }

    /// Where in [`Parts::data`] the elements of rank `rank` of the group are.
    ///
    /// # Panics
    /// When the group has no such rank.
    #[must_use]
    pub fn range(&self, rank: usize) -> Range<usize> {
        let start = if rank == 0 { 0 } else { self.ends[rank - 1] };
        start..self.ends[rank]
    }

    /// The parts in rank order.
    pub fn iter(&self) -> impl Iterator<Item = &[T]> {
        (0..self.ranks()).map(|rank| self.part(rank))
    }

    /// Elements of each part.
    pub fn counts(&self) -> impl Iterator<Item = usize> {
        (0..self.ranks()).map(|rank| self.range(rank).len())
    }

    /// All parts, one behind another.
    #[must_use]
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// All parts, one behind another, to keep or to use again.
    #[must_use]
    pub fn into_data(self) -> Vec<T> {
        self.data
    }
}

/// How to receive: into which memory, and how much is right.
#[derive(Clone, Debug)]
pub struct Receive<T> {
    into: Vec<T>,
    expected: Expected,
}

#[derive(Clone, Debug)]
enum Expected {
    Anything,
    Exactly(Vec<usize>),
    AtMost(usize),
}

impl<T> Default for Receive<T> {
    fn default() -> Self {
        Self { into: Vec::new(), expected: Expected::Anything }
    }
}

impl<T> Receive<T> {
    /// Into memory of the communicator's pool, any number of elements.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Into the memory of this vector, whose elements are lost.
    #[must_use]
    pub fn into(mut self, memory: Vec<T>) -> Self {
        self.into = memory;
        self
    }

    /// Exactly `counts[r]` elements from rank `r` of the group; anything else is an error.
    #[must_use]
    pub fn exactly(mut self, counts: Vec<usize>) -> Self {
        self.expected = Expected::Exactly(counts);
        self
    }

    /// At most `count` elements from each rank; more is an error.
    #[must_use]
    pub fn at_most(mut self, count: usize) -> Self {
        self.expected = Expected::AtMost(count);
        self
    }
}

/// `counts[r]` elements of `send` go to rank `r`.
pub(crate) fn all_to_all_v<T: Wire>(
    engine: &mut Engine,
    op: &Op,
    send: Vec<T>,
    counts: &[usize],
    receive: Receive<T>,
) -> Result<Parts<T>> {
    let ranges = cut(&engine.group, &op.header, send.len(), counts)?;
    check_expected(&engine.group, &op.header, &receive.expected)?;
    if engine.group.ranks.len() == 1 {
        return alone(engine, &op.header, send, receive);
    }
    let send = Shared::new(send, &engine.group.pool);
    let messages = engine.exchange(&op.header, |to| send.payload(ranges[to].clone()))?;
    drop(send);
    gather(&engine.group, &op.header, messages, receive)
}

/// All of `send` goes to every rank.
pub(crate) fn all_gather<T: Wire>(
    engine: &mut Engine,
    op: &Op,
    send: Vec<T>,
    receive: Receive<T>,
) -> Result<Parts<T>> {
    check_expected(&engine.group, &op.header, &receive.expected)?;
    if engine.group.ranks.len() == 1 {
        return alone(engine, &op.header, send, receive);
    }
    let send = Shared::new(send, &engine.group.pool);
    let messages = engine.exchange(&op.header, |_| send.payload(0..send.len()))?;
    drop(send);
    gather(&engine.group, &op.header, messages, receive)
}

/// The combination of all ranks' `values`, in place. Two exchanges: rank `r` combines slice `r`
/// of all ranks, then everybody gathers the slices.
pub(crate) fn all_reduce<T: Wire>(
    engine: &mut Engine,
    op: &Op,
    values: Vec<T>,
    combine: Combine<T>,
) -> Result<Vec<T>> {
    let (rank, size, len) = (engine.group.rank, engine.group.ranks.len(), values.len());
    if size == 1 {
        return Ok(values);
    }
    let pool = Arc::clone(&engine.group.pool);
    let values = Shared::new(values, &pool);
    if size_of_val(&values[..]) <= SMALL_BYTES {
        let messages = engine.exchange(&op.header, |_| values.payload(0..len))?;
        return combined(&engine.group, &op.header, &messages, len, combine);
    }
    let slice = |r: usize| share(len, r, size);
    let messages = engine.exchange(&op.header, |to| values.payload(slice(to)))?;
    let sum = combined(&engine.group, &op.header, &messages, slice(rank).len(), combine)?;
    // Before the second exchange: a rank that has heard from all peers in it may take its values
    // back, for nobody reads them any more.
    drop(messages);
    let sum = Shared::new(sum, &pool);
    let messages = engine.exchange(&op.second_phase(), |_| sum.payload(0..sum.len()))?;
    let mut out = values.take().unwrap_or_else(|| pool.take(len));
    out.clear();
    append(&engine.group, &op.header, &messages, &mut out)?;
    Ok(out)
}

/// The combination of this rank's part of all ranks' `values`, cut by `counts`.
pub(crate) fn reduce_scatter<T: Wire>(
    engine: &mut Engine,
    op: &Op,
    values: Vec<T>,
    counts: &[usize],
    combine: Combine<T>,
) -> Result<Vec<T>> {
    let ranges = cut(&engine.group, &op.header, values.len(), counts)?;
    if engine.group.ranks.len() == 1 {
        return Ok(values);
    }
    let values = Shared::new(values, &engine.group.pool);
    let messages = engine.exchange(&op.header, |to| values.payload(ranges[to].clone()))?;
    combined(&engine.group, &op.header, &messages, counts[engine.group.rank], combine)
}

/// The root's `values` on every rank.
pub(crate) fn broadcast<T: Wire>(
    engine: &mut Engine,
    op: &Op,
    values: Vec<T>,
    root: usize,
) -> Result<Vec<T>> {
    let (rank, size) = (engine.group.rank, engine.group.ranks.len());
    if root >= size {
        return Err(argument(
            &engine.group,
            &op.header,
            format!("root {root} of a group of {size}"),
        ));
    }
    if rank == root {
        let values = Shared::new(values, &engine.group.pool);
        let messages = engine.exchange(&op.header, |_| values.payload(0..values.len()))?;
        drop(messages);
        return Ok(values.take_or_copy());
    }
    let messages = engine.exchange(&op.header, |_| Payload::empty())?;
    let mut out = values;
    out.clear();
    append(&engine.group, &op.header, &messages[root..=root], &mut out)?;
    Ok(out)
}

/// Nothing, when every rank has come.
pub(crate) fn barrier(engine: &mut Engine, op: &Op) -> Result<()> {
    engine.exchange(&op.header, |_| Payload::empty()).map(drop)
}

/// `counts` as ranges of a buffer of `len` elements.
fn cut(group: &Group, header: &Header, len: usize, counts: &[usize]) -> Result<Vec<Range<usize>>> {
    let size = group.ranks.len();
    if counts.len() != size {
        let reason = format!("{} counts for a group of {size}", counts.len());
        return Err(argument(group, header, reason));
    }
    let mut end = 0usize;
    let ranges: Option<Vec<_>> = counts
        .iter()
        .map(|&count| {
            let start = end;
            end = start.checked_add(count)?;
            Some(start..end)
        })
        .collect();
    match ranges {
        Some(ranges) if end == len => Ok(ranges),
        _ => {
            let sum: u128 = counts.iter().map(|&count| count as u128).sum();
            let reason = format!("the counts sum to {sum}, the buffer has {len} elements");
            Err(argument(group, header, reason))
        }
    }
}

/// Share `index` of `count` contiguous shares of `len` things: they differ by at most one, and the
/// first ones take the remainder.
///
/// # Panics
/// When `count` is 0.
#[must_use]
pub fn share(len: usize, index: usize, count: usize) -> Range<usize> {
    let (each, more) = (len / count, len % count);
    let at = |index: usize| each * index + more.min(index);
    at(index)..at(index + 1)
}

fn argument(group: &Group, header: &Header, reason: String) -> CommError {
    CommError::Argument { communicator: group.name.clone(), operation: header.describe(), reason }
}

/// Compares a count that has arrived with what was expected.
fn check_count(
    group: &Group,
    header: &Header,
    from: usize,
    found: u64,
    expected: &Expected,
) -> Result<()> {
    let words = match expected {
        Expected::Anything => return Ok(()),
        Expected::Exactly(counts) if counts[from] as u64 == found => return Ok(()),
        Expected::AtMost(count) if found <= *count as u64 => return Ok(()),
        Expected::Exactly(counts) => counts[from].to_string(),
        Expected::AtMost(count) => format!("at most {count}"),
    };
    Err(CommError::Count {
        communicator: group.name.clone(),
        step: header.step,
        operation: header.describe(),
        peer: group.ranks[from],
        found,
        expected: words,
    })
}

/// Checks what was expected against the group's size.
fn check_expected(group: &Group, header: &Header, expected: &Expected) -> Result<()> {
    match expected {
        Expected::Exactly(counts) if counts.len() != group.ranks.len() => {
            let reason =
                format!("{} expected counts for a group of {}", counts.len(), group.ranks.len());
            Err(argument(group, header, reason))
        }
        _ => Ok(()),
    }
}

/// In a group of one, what is sent is what arrives.
fn alone<T: Wire>(
    engine: &Engine,
    header: &Header,
    send: Vec<T>,
    receive: Receive<T>,
) -> Result<Parts<T>> {
    check_count(&engine.group, header, 0, send.len() as u64, &receive.expected)?;
    engine.group.pool.put(receive.into);
    Ok(Parts { ends: vec![send.len()], data: send })
}

/// Copies all messages' elements into one buffer, in rank order.
fn gather<T: Wire>(
    group: &Group,
    header: &Header,
    messages: Vec<Message>,
    receive: Receive<T>,
) -> Result<Parts<T>> {
    let mut ends = Vec::with_capacity(messages.len());
    let mut total = 0;
    for (from, message) in messages.iter().enumerate() {
        check_count(group, header, from, message.header.count, &receive.expected)?;
        total += message.payload.elements::<T>().len();
        ends.push(total);
    }
    let mut data = receive.into;
    if data.capacity() == 0 {
        data = group.pool.take(total);
    }
    data.clear();
    append(group, header, &messages, &mut data)?;
    Ok(Parts { data, ends })
}

/// Appends the messages' elements.
fn append<T: Wire>(
    group: &Group,
    header: &Header,
    messages: &[Message],
    out: &mut Vec<T>,
) -> Result<()> {
    let total: usize = messages.iter().map(|m| m.payload.elements::<T>().len()).sum();
    reserve(group, header, total, out)?;
    for message in messages {
        out.extend_from_slice(message.payload.elements());
    }
    Ok(())
}

fn reserve<T: Wire>(group: &Group, header: &Header, len: usize, out: &mut Vec<T>) -> Result<()> {
    out.try_reserve_exact(len).map_err(|_| CommError::OutOfMemory {
        communicator: group.name.clone(),
        operation: header.describe(),
        bytes: len as u128 * size_of::<T>() as u128,
    })
}

/// The combination of the messages' elements, `len` each, in rank order.
fn combined<T: Wire>(
    group: &Group,
    header: &Header,
    messages: &[Message],
    len: usize,
    combine: Combine<T>,
) -> Result<Vec<T>> {
    let expected = Expected::Exactly(vec![len; messages.len()]);
    for (from, message) in messages.iter().enumerate() {
        check_count(group, header, from, message.header.count, &expected)?;
    }
    let terms: Vec<&[T]> = messages.iter().map(|message| message.payload.elements()).collect();
    let mut out = group.pool.take(len);
    reserve(group, header, len, &mut out)?;
    if reduce::in_rank_order(&terms, combine, &mut out) {
        return Err(CommError::Overflow {
            communicator: group.name.clone(),
            step: header.step,
            operation: header.describe(),
            dtype: T::DTYPE,
        });
    }
    Ok(out)
}
