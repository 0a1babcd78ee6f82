//! Updates of the rows that a rank holds, and the sums over rows and tables that they need of
//! other ranks.

use std::sync::Arc;

use super::layout::Piece;
use super::{Routed, ShardedCollection, Spare};
use crate::plan::COLUMN_BLOCK;
use crate::{EmbeddingError, LookupOps, Result, SparseStep, UpdateStats};

impl<D: LookupOps> ShardedCollection<D> {
    /// Squared norm of all rows' gradients before clipping, the same on all ranks: the sums of
    /// the pieces, in the order of tables and pieces, in float64. A collective, after
    /// [`ShardedCollection::exchange_gradients`].
    ///
    /// Errors: as [`EmbeddingCollection::grad_sq_norm`](crate::EmbeddingCollection::grad_sq_norm);
    /// [`EmbeddingError::Comm`].
    pub fn grad_sq_norm(&self, stream: &D::Stream, routed: &Routed<D>) -> Result<f64> {
        check_gradients(routed)?;
        let own = self.ranks.rank();
        let mut norms = Vec::new();
        for (held, asked) in self.held.iter().zip(&routed.asked) {
            // Every rank has the sum of a replicated table; the first one's counts.
            if self.layout.tables[held.piece.table].replicated && own != 0 {
                continue;
            }
            let (grad, columns) = (&asked.numbers, held.columns.len());
            norms.push(held.store.grad_sq_norm(stream, &asked.lookup, grad, columns)?);
        }
        let all = self.ranks.all_gather(norms).wait()?;
        let mut sums = vec![Vec::new(); self.layout.tables.len()];
        for (rank, pieces) in self.layout.pieces_of.iter().enumerate() {
            let counted = |piece: &&Piece| !self.layout.tables[piece.table].replicated || rank == 0;
            for (piece, &norm) in pieces.iter().filter(counted).zip(all.part(rank)) {
                sums[piece.table].push((piece.column_block, piece.row_block, norm));
            }
        }
        let of_table = |pieces: &mut Vec<(usize, usize, f64)>| {
            pieces.sort_by_key(|&(column_block, row_block, _)| (column_block, row_block));
            pieces.iter().map(|&(_, _, norm)| norm).sum::<f64>()
        };
        Ok(sums.iter_mut().map(of_table).sum())
    }

    /// Moves the rows of this rank that any rank's part of the batch holds, once each. A
    /// collective where tables are cut by columns; after
    /// [`ShardedCollection::exchange_gradients`]. Rows count where their first columns are, and
    /// those of a replicated table on the first rank.
    ///
    /// Errors: as [`EmbeddingCollection::update`](crate::EmbeddingCollection::update);
    /// [`EmbeddingError::Comm`]; [`EmbeddingError::Exchange`] while replicas are being averaged.
    pub fn update(
        &mut self,
        stream: &D::Stream,
        routed: Routed<D>,
        step: &SparseStep,
    ) -> Result<UpdateStats> {
        self.settled("update")?;
        check_gradients(&routed)?;
        let tables = self.schema().tables().len();
        let squares = self.exchange_squares(stream, &routed, step)?;
        let mut stats =
            UpdateStats { rows_updated: vec![0; tables], rows_nonfinite: vec![0; tables] };
        let own = self.ranks.rank();
        for ((held, asked), squares) in self.held.iter_mut().zip(&routed.asked).zip(&squares) {
            let (grad, columns) = (&asked.numbers, held.columns.len());
            let moved =
                held.store.update_with(stream, &asked.lookup, grad, columns, step, squares)?;
            let table = held.piece.table;
            let counts =
                held.piece.column_block == 0 && (!self.layout.tables[table].replicated || own == 0);
            stats.rows_updated[table] += if counts { moved.rows_updated[0] } else { 0 };
            stats.rows_nonfinite[table] += moved.rows_nonfinite[0];
        }
        if let Some(replicas) = &mut self.replicas {
            replicas.set_step(step.t);
            for (index, (held, asked)) in self.held.iter().zip(&routed.asked).enumerate() {
                let rows = held.store.resolver().unique_rows(stream, &asked.lookup, 0)?;
                replicas.touch(index, &rows);
            }
        }
        self.finish(stream, routed)?;
        Ok(stats)
    }

    /// Gives back the memory of a batch that only looked up.
    ///
    /// Errors: what the device says.
    pub fn finish(&mut self, stream: &D::Stream, routed: Routed<D>) -> Result<()> {
        let numbers = routed.asked.into_iter().map(|asked| asked.numbers).collect();
        let idle = self.resolver.device.record(stream)?;
        self.spare.put(Spare { fetched: routed.fetched, numbers, sums: routed.sums, idle });
        Ok(())
    }

    /// For each held piece whose optimizer sums over columns that others hold: the sum over all
    /// columns of each of its different rows; empty for the rest.
    fn exchange_squares(
        &mut self,
        stream: &D::Stream,
        routed: &Routed<D>,
        step: &SparseStep,
    ) -> Result<Vec<Vec<f32>>> {
        let schema = Arc::clone(self.schema());
        let specs = schema.tables();
        let layout = &self.layout;
        let exchanges = |table: usize| layout.tables[table].exchanges_squares(&specs[table]);
        let mut squares = vec![Vec::new(); self.held.len()];
        if !(0..specs.len()).any(exchanges) {
            return Ok(squares);
        }
        // (different rows, blocks of columns) of each piece.
        for ((held, asked), sums) in self.held.iter_mut().zip(&routed.asked).zip(&mut squares) {
            if exchanges(held.piece.table) {
                let unique = held.store.resolver().unique_counts(stream, &asked.lookup)?[0];
                let blocks = held.columns.len().div_ceil(COLUMN_BLOCK);
                sums.resize(unique as usize * blocks, 0.0);
                let (grad, columns) = (&asked.numbers, held.columns.len());
                held.store.block_squares(stream, &asked.lookup, grad, columns, step, sums)?;
            }
        }
        let same_rows = |a: &Piece, b: &Piece| (a.table, a.row_block) == (b.table, b.row_block);
        let mut send = self.ranks.buffer(0);
        let mut counts = Vec::with_capacity(self.ranks.size());
        for pieces in &self.layout.pieces_of {
            let before = send.len();
            for piece in pieces.iter().filter(|piece| exchanges(piece.table)) {
                for (held, sums) in self.held.iter().zip(&squares) {
                    if same_rows(&held.piece, piece) {
                        send.extend_from_slice(sums);
                    }
                }
            }
            counts.push(send.len() - before);
        }
        let received = self.ranks.all_to_all_v(send, &counts).wait()?;
        let mut messages: Vec<&[f32]> = received.iter().collect();
        for (held, own) in self.held.iter().zip(&mut squares) {
            let table = &self.layout.tables[held.piece.table];
            if !exchanges(held.piece.table) {
                continue;
            }
            let unique = own.len() / held.columns.len().div_ceil(COLUMN_BLOCK);
            let mut totals = vec![0.0f32; unique];
            for (column_block, columns) in table.column_blocks.iter().enumerate() {
                let blocks = columns.len().div_ceil(COLUMN_BLOCK);
                let owner = table.owner(held.piece.row_block, column_block);
                let numbers = unique * blocks;
                let Some((here, rest)) = messages[owner].split_at_checked(numbers) else {
                    let reason = format!("the row sums from rank {owner} end too early");
                    return Err(EmbeddingError::Exchange { reason });
                };
                messages[owner] = rest;
                for (total, sums) in totals.iter_mut().zip(here.chunks_exact(blocks)) {
                    for sum in sums {
                        *total += sum;
                    }
                }
            }
            *own = totals;
        }
        self.ranks.recycle(received.into_data());
        Ok(squares)
    }
}

/// That gradients were exchanged.
fn check_gradients<D: LookupOps>(routed: &Routed<D>) -> Result<()> {
    if routed.has_gradients {
        return Ok(());
    }
    let reason = "a norm or update before the exchange of gradients".to_owned();
    Err(EmbeddingError::Exchange { reason })
}
