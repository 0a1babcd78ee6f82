//! Vectors from the owners of rows to who asked, and gradient sums back to them.

use tessera_comm::Codec;

use super::exchange::{Block, Received, exchange_rows};
use super::layout::Piece;
use super::{Routed, ShardedCollection};
use crate::{LookupOps, Result};

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
    /// [`EmbeddingCollection::forward`](crate::EmbeddingCollection::forward). A collective.
    ///
    /// Errors: as there; [`EmbeddingError::Comm`](crate::EmbeddingError::Comm);
    /// [`EmbeddingError::Exchange`](crate::EmbeddingError::Exchange) while replicas are being
    /// averaged.
    pub fn forward(
        &mut self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        self.settled("lookup")?;
        let vectors = self.exchange_vectors(stream, routed)?;
        self.place_vectors(stream, routed, &vectors)?;
        self.ranks.recycle(vectors.data);
        routed.fetched.forward(stream, &mut routed.lookup, out, stride)
    }

    /// The blocks of vectors that each rank asked of this one.
    fn blocks_asked(&self, routed: &Routed<D>) -> Vec<Vec<Block>> {
        let own = self.ranks.rank();
        let of_rank = |rank: usize| {
            let held = self.held.iter().zip(&routed.asked);
            held.filter(|(held, _)| self.layout.reads(&held.piece, rank, own))
                .map(|(held, asked)| Block {
                    rows: asked.counts[rank],
                    columns: held.columns.len(),
                    stays: held.replicated,
                })
                .collect()
        };
        (0..self.ranks.size()).map(of_rank).collect()
    }

    /// What this rank asked of a piece.
    fn block_requested(&self, routed: &Routed<D>, piece: &Piece) -> Block {
        let table = &self.layout.tables[piece.table];
        Block {
            rows: routed.requests[piece.table].rows_of(piece.row_block).len(),
            columns: table.column_blocks[piece.column_block].len(),
            stays: table.replicated,
        }
    }

    /// Looks up what was asked of this rank and sends it to who asked.
    fn exchange_vectors(&mut self, stream: &D::Stream, routed: &mut Routed<D>) -> Result<Received> {
        let own = self.ranks.rank();
        for (held, asked) in self.held.iter_mut().zip(&mut routed.asked) {
            let columns = held.columns.len();
            held.store.forward(stream, &mut asked.lookup, &mut asked.numbers, columns)?;
        }
        routed.has_gradients = false;
        let to = self.blocks_asked(routed);
        let numbers = to.iter().flatten().map(|block| block.rows * block.columns).sum();
        let mut send: Vec<f32> = self.ranks.buffer(numbers);
        let mut at = vec![0; self.held.len()]; // in each piece's vectors
        for rank in 0..self.ranks.size() {
            for ((held, asked), at) in self.held.iter().zip(&routed.asked).zip(&mut at) {
                let numbers = asked.counts[rank] * held.columns.len();
                if self.layout.reads(&held.piece, rank, own) {
                    let end = send.len();
                    send.resize(end + numbers, 0.0);
                    let to = &mut send[end..];
                    self.resolver.device.download(stream, &asked.numbers, *at, to)?;
                }
                *at += numbers;
            }
        }
        let from: Vec<Vec<Block>> = self
            .layout
            .pieces_of
            .iter()
            .enumerate()
            .map(|(owner, pieces)| {
                let read = pieces.iter().filter(|piece| self.layout.reads(piece, own, owner));
                read.map(|piece| self.block_requested(routed, piece)).collect()
            })
            .collect();
        exchange_rows(&self.ranks, self.forward_codec, send, &to, &from)
    }

    /// Writes received vectors to the fetched tables.
    fn place_vectors(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
        vectors: &Received,
    ) -> Result<()> {
        let own = self.ranks.rank();
        // Tables cut by columns are put together here first.
        let mut whole: Vec<Vec<f32>> = vec![Vec::new(); self.layout.tables.len()];
        for ((owner, pieces), mut part) in
            self.layout.pieces_of.iter().enumerate().zip(vectors.parts())
        {
            for piece in pieces.iter().filter(|piece| self.layout.reads(piece, own, owner)) {
                let table = &self.layout.tables[piece.table];
                let request = &routed.requests[piece.table];
                let rows = request.rows_of(piece.row_block);
                let columns = table.column_blocks[piece.column_block].clone();
                let (here, rest) = part.split_at(rows.len() * columns.len());
                part = rest;
                if table.column_blocks.len() == 1 {
                    let rows = rows.start as u64..rows.end as u64;
                    routed.fetched.write_weights(stream, piece.table, rows, here)?;
                    continue;
                }
                let dim = self.schema().tables()[piece.table].dim;
                let whole = &mut whole[piece.table];
                whole.resize(request.bags() * dim, 0.0);
                let to = whole[rows.start * dim..rows.end * dim].chunks_exact_mut(dim);
                for (to, from) in to.zip(here.chunks_exact(columns.len())) {
                    to[columns.clone()].copy_from_slice(from);
                }
            }
        }
        for (table, whole) in whole.iter().enumerate().filter(|(_, whole)| !whole.is_empty()) {
            let rows = 0..routed.requests[table].bags() as u64;
            routed.fetched.write_weights(stream, table, rows, whole)?;
        }
        Ok(())
    }

    /// Sends the sum of each fetched row's gradient to the row's owner. `grad` is laid out as
    /// [`ShardedCollection::forward`] wrote the pooled vectors. A collective.
    ///
    /// Errors: as [`EmbeddingCollection::update`](crate::EmbeddingCollection::update);
    /// [`EmbeddingError::Comm`](crate::EmbeddingError::Comm).
    pub fn exchange_gradients(
        &self,
        stream: &D::Stream,
        routed: &mut Routed<D>,
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
        let sums = &mut routed.sums[..numbers];
        routed.fetched.row_gradients(stream, &routed.lookup, grad, stride, sums)?;

        let travels = |block: Block| Block { stays: false, ..block };
        let mut send: Vec<f32> = self.ranks.buffer(numbers);
        let mut to = Vec::with_capacity(self.ranks.size());
        for pieces in &self.layout.pieces_of {
            for piece in pieces {
                let dim = schema.tables()[piece.table].dim;
                let columns = &self.layout.tables[piece.table].column_blocks[piece.column_block];
                let rows = routed.requests[piece.table].rows_of(piece.row_block);
                let rows = &routed.sums[starts[piece.table]..][rows.start * dim..rows.end * dim];
                if columns.len() == dim {
                    send.extend_from_slice(rows);
                } else {
                    let rows = rows.chunks_exact(dim);
                    rows.for_each(|row| send.extend_from_slice(&row[columns.clone()]));
                }
            }
            let block = |piece| travels(self.block_requested(routed, piece));
            to.push(pieces.iter().map(block).collect::<Vec<_>>());
        }
        let from: Vec<Vec<Block>> = (0..self.ranks.size())
            .map(|rank| {
                let held = self.held.iter().zip(&routed.asked);
                held.map(|(held, asked)| {
                    let (rows, columns) = (asked.counts[rank], held.columns.len());
                    Block { rows, columns, stays: false }
                })
                .collect()
            })
            .collect();
        let received = exchange_rows(&self.ranks, self.backward_codec, send, &to, &from)?;

        let device = &self.resolver.device;
        let mut messages: Vec<&[f32]> = received.parts().collect();
        for (held, asked) in self.held.iter().zip(&mut routed.asked) {
            let columns = held.columns.len();
            let mut at = 0;
            for (message, count) in messages.iter_mut().zip(&asked.counts) {
                let (here, rest) = message.split_at(count * columns);
                device.upload(stream, here, &mut asked.numbers, at)?;
                *message = rest;
                at += here.len();
            }
        }
        routed.has_gradients = true;
        self.ranks.recycle(received.data);
        Ok(())
    }
}
