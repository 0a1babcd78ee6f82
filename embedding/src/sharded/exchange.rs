//! Rows of float32 between ranks, as they are or in a codec's form.
//!
//! ```text
//! to each rank:   its blocks, one behind another; a block is rows of as many columns
//! from each rank: what this rank knows it will send; anything else is an error
//! ```
//! Every block goes through the codec, also those that a rank sends to itself: what arrives does
//! not depend on who sent it. Only vectors that never travel (a rank's copy of a replicated table,
//! read by that rank) stay as they are.

use std::ops::Range;

use tessera_comm::{Codec, Communicator, Parts, Pending, Receive};
use tessera_device::Simd;

use crate::Result;

/// Rows of one piece in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Block {
    pub(super) rows: usize,
    pub(super) columns: usize,
    /// Whether it is of a table whose vectors stay on their rank.
    pub(super) stays: bool,
}

impl Block {
    fn numbers(&self) -> usize {
        self.rows * self.columns
    }

    fn codec(&self, codec: Codec) -> Codec {
        if self.stays { Codec::Fp32 } else { codec }
    }

    fn bytes(&self, codec: Codec) -> usize {
        self.rows * self.codec(codec).row_bytes(self.columns)
    }
}

/// What arrived, rank after rank.
#[derive(Debug)]
pub(super) struct Received {
    pub(super) data: Vec<f32>,
    parts: Vec<Range<usize>>,
}

impl Received {
    /// The blocks from each rank, in rank order; as many numbers as was expected.
    pub(super) fn parts(&self) -> impl Iterator<Item = &[f32]> {
        self.parts.iter().map(|part| &self.data[part.clone()])
    }
}

/// An exchange of rows that may still be going on.
#[derive(Debug)]
pub(super) struct Posted {
    codec: Codec,
    from: Vec<Vec<Block>>,
    parts: Vec<Range<usize>>,
    message: Message,
}

#[derive(Debug)]
enum Message {
    Plain(Pending<Parts<f32>>),
    Encoded(Pending<Parts<u8>>),
}

/// Sends the blocks `to[r]`, whose numbers are in `send` one behind another, to each rank `r`, and
/// receives `from[r]`. A collective.
pub(super) fn post_rows(
    ranks: &Communicator,
    codec: Codec,
    send: Vec<f32>,
    to: &[Vec<Block>],
    from: Vec<Vec<Block>>,
) -> Posted {
    let numbers = |blocks: &Vec<Block>| blocks.iter().map(Block::numbers).sum::<usize>();
    let mut end = 0;
    let parts = from.iter().map(|blocks| {
        let start = end;
        end += numbers(blocks);
        start..end
    });
    let parts: Vec<Range<usize>> = parts.collect();
    if codec == Codec::Fp32 {
        let counts: Vec<usize> = to.iter().map(numbers).collect();
        let receive = Receive::new().exactly(parts.iter().map(Range::len).collect());
        let message = Message::Plain(ranks.all_to_all_v_with(send, &counts, receive));
        return Posted { codec, from, parts, message };
    }
    let simd = Simd::detect();
    let bytes = |blocks: &Vec<Block>| blocks.iter().map(|block| block.bytes(codec)).sum();
    let counts: Vec<usize> = to.iter().map(bytes).collect();
    let mut message: Vec<u8> = ranks.buffer(counts.iter().sum());
    let mut rest = &send[..];
    for block in to.iter().flatten() {
        let (rows, behind) = rest.split_at(block.numbers());
        block.codec(codec).encode(simd, rows, block.columns, &mut message);
        rest = behind;
    }
    ranks.recycle(send);
    let receive = Receive::new().exactly(from.iter().map(bytes).collect());
    let message = Message::Encoded(ranks.all_to_all_v_with(message, &counts, receive));
    Posted { codec, from, parts, message }
}

impl Posted {
    /// Waits for the rows, over the communicator that they were posted on.
    ///
    /// Errors: [`EmbeddingError::Comm`](crate::EmbeddingError::Comm), also when a rank sends other
    /// blocks than expected.
    pub(super) fn wait(self, ranks: &Communicator) -> Result<Received> {
        let Self { codec, from, parts, message } = self;
        let received = match message {
            Message::Plain(pending) => {
                return Ok(Received { data: pending.wait()?.into_data(), parts });
            }
            Message::Encoded(pending) => pending.wait()?,
        };
        let (simd, end) = (Simd::detect(), parts.last().map_or(0, |part| part.end));
        let mut data: Vec<f32> = ranks.buffer(end);
        data.resize(end, 0.0);
        let (mut bytes, mut rest) = (received.data(), &mut data[..]);
        for block in from.iter().flatten() {
            let (rows, behind) = rest.split_at_mut(block.numbers());
            let (encoded, bytes_behind) = bytes.split_at(block.bytes(codec));
            block.codec(codec).decode(simd, encoded, block.columns, rows)?;
            (bytes, rest) = (bytes_behind, behind);
        }
        ranks.recycle(received.into_data());
        Ok(Received { data, parts })
    }
}
