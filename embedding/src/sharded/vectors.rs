//! Vectors from the owners of rows to who asked, and gradient sums back to them, a micro-batch at
//! a time.
//!
//! ```text
//! look_up                what was asked of this rank -> vectors
//! post_vectors           those of the next micro-batch set out
//! forward_micro          ... arrive; its bags are pooled
//! post_gradients         sums of rows that no later micro-batch adds to set out
//! receive_gradients      ... arrive
//! ```
//! Posting and waiting are apart so that what is posted early travels while others compute.
//! Vectors and gradients have a communicator each, on which exchanges follow in the order of
//! micro-batches.

use std::ops::Range;

use tessera_comm::Codec;

use super::exchange::{Block, Received, post_rows};
use super::layout::Piece;
use super::micro::{Chosen, complete};
use super::{Routed, ShardedCollection};
use crate::{EmbeddingError, LookupOps, Result};

impl<D: LookupOps> ShardedCollection<D> {
    /// Lets vectors travel in the form of `forward` and gradient sums in that of `backward`; both
    /// are [`Codec::Fp32`] unless this is called. A collective.
    ///
    /// A row of a piece is a row of the codec. [`Codec::error_max`] bounds the error of each
    /// element: of a row on unique routes, of a bag's sum over a block of rows on pooled routes,
    /// of each rank's own sum of a row's gradient on the way back. Errors of a bag's rows, and of
    /// the ranks' sums, add up. Every rank's own vectors and sums go through the codec too, so
    /// that all copies of a replicated table move by the same sums, and results are the same to
    /// the bit for any number of threads and any backend; across plans they are where pieces are
    /// whole rows of tables that are not replicated, on unique routes. Vectors of a replicated
    /// table do not travel and keep all bits, and so do rows of fp16 tables under
    /// [`Codec::Fp16`], and of bf16 tables under [`Codec::Bf16`], on unique routes.
    ///
    /// Errors: [`EmbeddingError::Comm`](crate::EmbeddingError::Comm) when ranks give different
    /// codecs.
    pub fn with_codecs(mut self, forward: Codec, backward: Codec) -> Result<Self> {
        let names = format!("{} {}", forward.name(), backward.name());
        self.ranks.agree("codecs of vectors and gradients", names.as_bytes()).wait()?;
        (self.forward_codec, self.backward_codec) = (forward, backward);
        Ok(self)
    }

    /// Brings the vectors that a batch needs from their owners and pools its bags, as
    /// [`EmbeddingCollection::forward`](crate::EmbeddingCollection::forward): all micro-batches,
    /// one after the other. A collective.
    ///
    /// Errors: as there; [`EmbeddingError::Comm`]; [`EmbeddingError::Exchange`] while replicas are
    /// being averaged.
    pub fn forward(
        &mut self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        self.look_up(stream, routed)?;
        for micro in 0..routed.micro.len() {
            self.post_vectors(stream, routed, micro)?;
            self.forward_micro(stream, routed, micro, out, stride)?;
        }
        Ok(())
    }

    /// Looks up what was asked of this rank, for all micro-batches.
    ///
    /// Errors: as [`ShardedCollection::forward`].
    pub fn look_up(&mut self, stream: &D::Stream, routed: &mut Routed<D>) -> Result<()> {
        self.settled("lookup")?;
        let several = routed.micro.len() > 1;
        for (held, asked) in self.held.iter_mut().zip(&mut routed.asked) {
            let columns = held.columns.len();
            held.store.forward(stream, &mut asked.lookup, &mut asked.numbers, columns)?;
            if several {
                asked.vectors.resize(asked.lookup.bags() * columns, 0.0);
                self.resolver.device.download(stream, &asked.numbers, 0, &mut asked.vectors)?;
            }
        }
        routed.has_gradients = false;
        Ok(())
    }

    /// Sends the vectors that micro-batch `micro` is the first to need, after
    /// [`ShardedCollection::look_up`] and in the order of micro-batches. A collective.
    ///
    /// Errors: what the device says; those of the exchange come from
    /// [`ShardedCollection::forward_micro`].
    pub fn post_vectors(
        &mut self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        micro: usize,
    ) -> Result<()> {
        let own = self.ranks.rank();
        let numbers_max = routed.asked.iter().zip(&self.held);
        let numbers_max = numbers_max.map(|(asked, held)| asked.lookup.bags() * held.columns.len());
        let parts = routed.micro.len();
        let mut send: Vec<f32> = self.ranks.buffer(numbers_max.sum::<usize>() / parts);
        let mut first = vec![0; self.held.len()]; // of each piece's bags
        let mut to = Vec::with_capacity(self.ranks.size());
        for rank in 0..self.ranks.size() {
            let mut blocks = Vec::new();
            for ((held, asked), first) in self.held.iter().zip(&routed.asked).zip(&mut first) {
                let bags = *first..*first + asked.counts[rank];
                *first = bags.end;
                if !self.layout.reads(&held.piece, rank, own) {
                    continue;
                }
                let columns = held.columns.len();
                let chosen = asked.marks.vectors(bags, micro);
                blocks.push(Block { rows: chosen.len(), columns, stays: held.replicated });
                match &chosen {
                    Chosen::All(bags) => {
                        let end = send.len();
                        send.resize(end + bags.len() * columns, 0.0);
                        let (at, to) = (bags.start * columns, &mut send[end..]);
                        self.resolver.device.download(stream, &asked.numbers, at, to)?;
                    }
                    Chosen::Some(_) => {
                        chosen.copy_out(&asked.vectors, columns, 0..columns, &mut send);
                    }
                }
            }
            to.push(blocks);
        }
        let from = self.layout.pieces_of.iter().enumerate().map(|(owner, pieces)| {
            let read = pieces.iter().filter(|piece| self.layout.reads(piece, own, owner));
            read.map(|piece| self.block(piece, self.vectors_of(routed, piece, micro).len()))
                .collect()
        });
        let posted = post_rows(&self.ranks, self.forward_codec, send, &to, from.collect());
        routed.vectors.push_back(posted);
        Ok(())
    }

    /// Waits for the vectors of micro-batch `micro`, the next one posted, and pools its bags. A
    /// collective.
    ///
    /// Errors: as [`ShardedCollection::forward`].
    pub fn forward_micro(
        &mut self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        micro: usize,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        let Some(posted) = routed.vectors.pop_front() else {
            return Err(out_of_order("a lookup before its vectors were posted"));
        };
        let vectors = posted.wait(&self.ranks)?;
        self.place_vectors(stream, routed, micro, &vectors)?;
        self.ranks.recycle(vectors.data);
        let bags = routed.micro[micro].clone();
        routed.fetched.forward_bags(stream, &mut routed.lookup, bags, out, stride)
    }

    /// Rows of a piece's fetched table whose vectors micro-batch `micro` is the first to need.
    fn vectors_of(&self, routed: &Routed<D>, piece: &Piece, micro: usize) -> Chosen {
        let request = &routed.requests[piece.table];
        request.marks.vectors(request.rows_of(piece.row_block), micro)
    }

    /// `rows` rows of a piece.
    fn block(&self, piece: &Piece, rows: usize) -> Block {
        let table = &self.layout.tables[piece.table];
        let columns = table.column_blocks[piece.column_block].len();
        Block { rows, columns, stays: table.replicated }
    }

    /// Writes received vectors to the fetched tables.
    fn place_vectors(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        micro: usize,
        vectors: &Received,
    ) -> Result<()> {
        let own = self.ranks.rank();
        // Tables cut by columns are put together here first: rows of blocks of rows in order.
        let mut whole: Vec<Vec<f32>> = vec![Vec::new(); self.layout.tables.len()];
        for ((owner, pieces), mut part) in
            self.layout.pieces_of.iter().enumerate().zip(vectors.parts())
        {
            for piece in pieces.iter().filter(|piece| self.layout.reads(piece, own, owner)) {
                let table = &self.layout.tables[piece.table];
                let chosen = self.vectors_of(routed, piece, micro);
                let columns = table.column_blocks[piece.column_block].clone();
                let (here, rest) = part.split_at(chosen.len() * columns.len());
                part = rest;
                if table.column_blocks.len() == 1 {
                    write(routed, stream, piece.table, &chosen, here)?;
                    continue;
                }
                let dim = self.schema().tables()[piece.table].dim;
                let before = (0..piece.row_block).map(|row_block| {
                    self.vectors_of(routed, &Piece { row_block, ..*piece }, micro).len()
                });
                let start = before.sum::<usize>() * dim;
                let whole = &mut whole[piece.table];
                if whole.len() < start + chosen.len() * dim {
                    whole.resize(start + chosen.len() * dim, 0.0);
                }
                let to = whole[start..][..chosen.len() * dim].chunks_exact_mut(dim);
                for (to, from) in to.zip(here.chunks_exact(columns.len())) {
                    to[columns.clone()].copy_from_slice(from);
                }
            }
        }
        for (table, whole) in whole.iter().enumerate().filter(|(_, whole)| !whole.is_empty()) {
            let request = &routed.requests[table];
            let chosen = request.marks.vectors(0..request.bags(), micro);
            write(routed, stream, table, &chosen, whole)?;
        }
        Ok(())
    }

    /// Sends the sum of each fetched row's gradient to the row's owner and receives those of this
    /// rank's rows: all micro-batches, one after the other. `grad` is laid out as
    /// [`ShardedCollection::forward`] wrote the pooled vectors. A collective.
    ///
    /// Errors: as [`EmbeddingCollection::update`](crate::EmbeddingCollection::update);
    /// [`EmbeddingError::Comm`].
    pub fn exchange_gradients(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        for micro in 0..routed.micro.len() {
            self.post_gradients(stream, routed, micro, grad, stride)?;
            self.receive_gradients(stream, routed)?;
        }
        Ok(())
    }

    /// Sends the sums of rows' gradients to which micro-batch `micro` was the last to add, in the
    /// order of micro-batches. `grad` has the gradients of all bags up to its last one. A
    /// collective.
    ///
    /// Errors: as [`ShardedCollection::exchange_gradients`].
    pub fn post_gradients(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        micro: usize,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        let schema = self.schema();
        let mut starts = vec![0]; // of each table in `sums`
        for (table, request) in schema.tables().iter().zip(&routed.requests) {
            starts.push(starts[starts.len() - 1] + request.bags() * table.dim);
        }
        let numbers = starts[schema.tables().len()];
        if routed.sums.len() < numbers {
            routed.sums.resize(numbers, 0.0);
        }
        if micro == 0 {
            let marks = routed.requests.iter().flat_map(|request| &request.marks.last);
            routed.last.clear();
            routed.last.extend(marks);
        }
        let sums = &mut routed.sums[..numbers];
        let marked = complete(&routed.last, micro);
        routed.fetched.row_gradients(stream, &routed.lookup, grad, stride, marked, sums)?;

        let mut send: Vec<f32> = self.gradients.buffer(numbers / routed.micro.len());
        let mut to = Vec::with_capacity(self.gradients.size());
        for pieces in &self.layout.pieces_of {
            let mut blocks = Vec::with_capacity(pieces.len());
            for piece in pieces {
                let dim = schema.tables()[piece.table].dim;
                let columns = &self.layout.tables[piece.table].column_blocks[piece.column_block];
                let request = &routed.requests[piece.table];
                let chosen = request.marks.gradients(request.rows_of(piece.row_block), micro);
                let sums = &routed.sums[starts[piece.table]..starts[piece.table + 1]];
                chosen.copy_out(sums, dim, columns.clone(), &mut send);
                blocks.push(Block { stays: false, ..self.block(piece, chosen.len()) });
            }
            to.push(blocks);
        }
        let from = (0..self.gradients.size()).map(|rank| {
            let held = self.held.iter().zip(&routed.asked);
            held.map(|(held, asked)| {
                let rows = asked.marks.gradients(bags_of(&asked.counts, rank), micro).len();
                Block { rows, columns: held.columns.len(), stays: false }
            })
            .collect()
        });
        let posted = post_rows(&self.gradients, self.backward_codec, send, &to, from.collect());
        routed.gradients.push_back(posted);
        Ok(())
    }

    /// Waits for all gradients that were posted. A collective.
    ///
    /// Errors: as [`ShardedCollection::exchange_gradients`].
    pub fn receive_gradients(&self, stream: &D::Stream, routed: &mut Routed<D>) -> Result<()> {
        let device = &self.resolver.device;
        while let Some(posted) = routed.gradients.pop_front() {
            let micro = routed.micro_done;
            routed.micro_done += 1;
            let received = posted.wait(&self.gradients)?;
            let mut messages: Vec<&[f32]> = received.parts().collect();
            for (held, asked) in self.held.iter().zip(&mut routed.asked) {
                let columns = held.columns.len();
                for (rank, message) in messages.iter_mut().enumerate() {
                    let chosen = asked.marks.gradients(bags_of(&asked.counts, rank), micro);
                    let (here, rest) = message.split_at(chosen.len() * columns);
                    *message = rest;
                    match &chosen {
                        Chosen::All(bags) => {
                            let at = bags.start * columns;
                            device.upload(stream, here, &mut asked.numbers, at)?;
                        }
                        // The vectors have all been sent by now, or these bags' have.
                        Chosen::Some(_) => chosen.copy_in(here, columns, &mut asked.vectors),
                    }
                }
                if routed.micro_done == routed.micro.len() && routed.micro.len() > 1 {
                    device.upload(stream, &asked.vectors, &mut asked.numbers, 0)?;
                }
            }
            self.gradients.recycle(received.data);
        }
        routed.has_gradients = routed.micro_done == routed.micro.len();
        Ok(())
    }
}

/// A rank's bags among those of all ranks.
fn bags_of(counts: &[usize], rank: usize) -> Range<usize> {
    let start = counts[..rank].iter().sum();
    start..start + counts[rank]
}

/// Writes vectors to rows of a fetched table.
fn write<D: LookupOps>(
    routed: &mut Routed<D>,
    stream: &D::Stream,
    table: usize,
    rows: &Chosen,
    vectors: &[f32],
) -> Result<()> {
    match rows {
        Chosen::All(rows) => {
            let rows = rows.start as u64..rows.end as u64;
            routed.fetched.write_weights(stream, table, rows, vectors)
        }
        Chosen::Some(rows) => routed.fetched.scatter_weights(stream, table, rows, vectors),
    }
}

/// Calls in another order than they are made for.
fn out_of_order(what: &str) -> EmbeddingError {
    EmbeddingError::Exchange { reason: what.to_owned() }
}
