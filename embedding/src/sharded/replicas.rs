//! Two-dimensional sparse parallelism: groups of ranks that each hold all tables, and the mean
//! over groups.
//!
//! ```text
//! T ranks = M groups * N ranks; the ranks of one index in their groups hold the same pieces
//!
//! every step    each group looks up and updates for its own part of the batch
//! every k-th    start    touched rows since the last time  --all gather-->  every replica
//!               finish   their union, cut into slices (see `mean`), M a round:
//!                        slice i of all replicas --> replica i: mean --> every replica
//! ```
//! Rows that nobody touched are the same on all replicas already: averaging the union of touched
//! rows is averaging whole tables. Weights *and* optimizer state are averaged, as they are stored;
//! 16-bit weights are rounded to nearest even, not stochastically as an update does.
//!
//! **Gradients.** The loss is the mean over the global batch of `B` samples; group `i` must give
//! the gradient of its own mean, `g_i = (M / B) * sum over its samples`: at `k = 1` the mean over
//! groups then moves a row under sgd by the sum over all samples, divided by `B`, as one group
//! would. This division by `M` is the only one. The ranks of a group sum what its samples give, so
//! the factor is the caller's to apply, to the gradients of pooled vectors.
//!
//! **Moments.** Averaged state grows by `mean_i |g_i|^2`, which for a row that one group holds is
//! `M |g|^2` where one group alone would add `|g|^2`: `moment_scale = M` of
//! [`SparseOptimizer::RowwiseAdagrad`](crate::SparseOptimizer::RowwiseAdagrad) makes up for it, in
//! the limit of many steps.
//!
//! Cost of a sync of `U` bytes of rows a rank: `2 (M - 1) / M * U` bytes sent, beside 8 bytes a
//! touched row to each replica.

use std::num::NonZeroU64;

use tessera_cache::Plane;
use tessera_comm::{Communicator, Parts, Pending, Receive};

use super::mean::{Cut, Rows, Stretch, encode_touched, mean, merge, union};
use super::{Held, ShardedCollection};
use crate::{EmbeddingError, LookupOps, Precision, Result, Row};

/// The replicas of this rank's pieces, and what must be averaged with them.
pub(super) struct Replicas {
    /// By group.
    ranks: Communicator,
    sync_every: NonZeroU64,
    /// Of each held piece: rows touched since the last sync, ascending.
    touched: Vec<Vec<u64>>,
    /// The touched rows of all replicas, on their way.
    posted: Option<Pending<Parts<u64>>>,
}

impl Replicas {
    /// Notes rows of a piece that an update moved.
    pub(super) fn touch(&mut self, held: usize, rows: &[Row]) {
        merge(&mut self.touched[held], rows.iter().map(|row| row.0));
    }

    /// Later exchanges belong to this step.
    pub(super) fn set_step(&self, t: u64) {
        self.ranks.set_step(t);
    }
}

/// What a sync did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SyncStats {
    /// Rows of each table that were averaged in the pieces of this rank.
    pub rows: Vec<u64>,
}

impl<D: LookupOps> ShardedCollection<D> {
    /// Makes this group one of several that each hold all tables. `replicas` are the ranks that
    /// hold the same pieces as this one, one a group, in the groups' order: a communicator of
    /// their own, so that a sync can go on beside the exchanges of the group. A collective of
    /// theirs.
    ///
    /// A sync is due after every step whose number is a multiple of `sync_every`: it does not
    /// depend on where a run was interrupted. Between syncs groups differ.
    ///
    /// Errors: [`EmbeddingError::Comm`] when they have different plans, places in their groups,
    /// tables or intervals.
    pub fn with_replicas(mut self, replicas: Communicator, sync_every: NonZeroU64) -> Result<Self> {
        let dynamic = self.schema().tables().iter().filter(|table| table.is_dynamic());
        let faults: Vec<String> = dynamic
            .map(|table| {
                format!("table {} is dynamic: groups would keep rows of different ids", table.name)
            })
            .collect();
        if !faults.is_empty() {
            return Err(EmbeddingError::Spec { faults });
        }
        let place = [self.plan_hash, self.ranks.rank() as u64, sync_every.get()];
        let what = "plan, place in the group and sync_every of replicas";
        replicas.agree(what, bytemuck::bytes_of(&place)).wait()?;
        let described = format!("{:?}", self.schema());
        replicas.agree("tables, features and seed", described.as_bytes()).wait()?;
        let touched = vec![Vec::new(); self.held.len()];
        self.replicas = Some(Replicas { ranks: replicas, sync_every, touched, posted: None });
        Ok(self)
    }

    /// The replicas of this rank's pieces, if there are several groups.
    #[must_use]
    pub fn replicas(&self) -> Option<&Communicator> {
        self.replicas.as_ref().map(|replicas| &replicas.ranks)
    }

    /// Whether replicas are to be averaged after step `t`.
    #[must_use]
    pub fn sync_due(&self, t: u64) -> bool {
        self.replicas.as_ref().is_some_and(|replicas| t.is_multiple_of(replicas.sync_every.get()))
    }

    /// Begins to average the rows touched since the last sync: tells the replicas which they are.
    /// The exchange goes on beside [`ShardedCollection::route`] of the next batch; lookups and
    /// updates are refused until [`ShardedCollection::finish_sync`]. Does nothing without
    /// replicas. A collective of the replicas.
    ///
    /// Errors: [`EmbeddingError::Exchange`] when it was called already.
    pub fn start_sync(&mut self) -> Result<()> {
        self.settled("sync")?;
        if let Some(replicas) = &mut self.replicas {
            let rows: usize = replicas.touched.iter().map(Vec::len).sum();
            let mut message = replicas.ranks.buffer(rows + replicas.touched.len());
            encode_touched(&mut replicas.touched, &mut message);
            replicas.posted = Some(replicas.ranks.all_gather(message));
        }
        Ok(())
    }

    /// Averages weights and state of the rows that any replica touched, if
    /// [`ShardedCollection::start_sync`] was called; does nothing otherwise. Afterwards all
    /// replicas have the same bits. A collective of the replicas.
    ///
    /// Errors: [`EmbeddingError::Comm`], [`EmbeddingError::Exchange`], or what the device says;
    /// tables are not to be used then.
    pub fn finish_sync(&mut self, stream: &D::Stream) -> Result<SyncStats> {
        let posted = self
            .replicas
            .as_mut()
            .and_then(|replicas| replicas.posted.take().map(|posted| posted.wait()));
        let Some(touched) = posted.transpose()? else {
            return Ok(SyncStats { rows: vec![0; self.schema().tables().len()] });
        };
        let rows_of: Vec<u64> =
            self.held.iter().map(|held| held.rows.end - held.rows.start).collect();
        let rows = union(touched.iter(), &rows_of)?;
        if let Some(replicas) = &self.replicas {
            replicas.ranks.recycle(touched.into_data());
        }
        self.average(stream, &rows)
    }

    /// Averages now, whether a sync is due or not: [`ShardedCollection::start_sync`] and
    /// [`ShardedCollection::finish_sync`] in one. What is to be saved or evaluated between two
    /// syncs needs one.
    ///
    /// Errors: as there.
    pub fn sync(&mut self, stream: &D::Stream) -> Result<SyncStats> {
        self.start_sync()?;
        self.finish_sync(stream)
    }

    /// As [`ShardedCollection::sync`], over all rows: the same bits at `2 (M - 1) / M` times the
    /// bytes of the tables.
    ///
    /// Errors: as there.
    pub fn sync_full(&mut self, stream: &D::Stream) -> Result<SyncStats> {
        self.settled("sync")?;
        if let Some(replicas) = &mut self.replicas {
            replicas.touched.iter_mut().for_each(Vec::clear);
        }
        let all = |held: &Held<D>| Rows::All(held.rows.end - held.rows.start);
        let rows: Vec<Rows> = self.held.iter().map(all).collect();
        self.average(stream, &rows)
    }

    /// That no sync is under way.
    pub(super) fn settled(&self, operation: &str) -> Result<()> {
        if self.replicas.as_ref().is_some_and(|replicas| replicas.posted.is_some()) {
            let reason =
                format!("{operation} between the start of a sync and its end: finish it first");
            return Err(EmbeddingError::Exchange { reason });
        }
        Ok(())
    }

    /// Averages `rows` of each held piece, the same on all replicas.
    fn average(&mut self, stream: &D::Stream, rows: &[Rows]) -> Result<SyncStats> {
        let mut stats = SyncStats { rows: vec![0; self.schema().tables().len()] };
        let Some(Replicas { ranks, .. }) = &self.replicas else { return Ok(stats) };
        if ranks.size() == 1 {
            return Ok(stats);
        }
        for (held, rows) in self.held.iter().zip(rows) {
            stats.rows[held.piece.table] += rows.len();
        }
        let (size, own) = (ranks.size(), ranks.rank());
        let widths: Vec<(usize, usize)> =
            self.held.iter().map(|held| held.store.row_bytes(0)).collect();
        let pieces = rows.iter().zip(&widths);
        let pieces = pieces.map(|(rows, (weights, state))| (rows.len(), (weights + state) as u64));
        let cut = Cut::new(pieces.collect(), size);
        for round in 0..cut.rounds {
            let slices: Vec<Vec<Stretch>> =
                (0..size).map(|r| cut.slice(round * size as u64 + r as u64)).collect();
            let bytes_of = |slice: &Vec<Stretch>| {
                let bytes = slice.iter().map(|Stretch { piece, places }| {
                    let (weights, state) = widths[*piece];
                    (places.end - places.start) as usize * (weights + state)
                });
                bytes.sum::<usize>()
            };
            let counts: Vec<usize> = slices.iter().map(bytes_of).collect();
            let total = counts.iter().sum();
            let mut send: Vec<u8> = ranks.buffer(total);
            send.resize(total, 0);
            let mut at = 0;
            for Stretch { piece, places } in slices.iter().flatten() {
                for (plane, width) in planes(widths[*piece]) {
                    for run in rows[*piece].runs(places.clone()) {
                        let end = at + (run.end - run.start) as usize * width;
                        let store = &self.held[*piece].store;
                        store.read_plane(stream, 0, plane, run, &mut send[at..end])?;
                        at = end;
                    }
                }
            }
            let receive = Receive::new().exactly(vec![counts[own]; size]);
            let terms = ranks.all_to_all_v_with(send, &counts, receive).wait()?;
            let mut means: Vec<u8> = ranks.buffer(counts[own]);
            let mut rest: Vec<&[u8]> = terms.iter().collect();
            for Stretch { piece, places } in &slices[own] {
                let precision = self.held[*piece].store.schema().tables()[0].precision;
                for (plane, width) in planes(widths[*piece]) {
                    let bytes = (places.end - places.start) as usize * width;
                    let here: Vec<&[u8]> = rest.iter().map(|term| &term[..bytes]).collect();
                    rest.iter_mut().for_each(|term| *term = &term[bytes..]);
                    let precision =
                        if plane == Plane::Weights { precision } else { Precision::Fp32 };
                    mean(precision, &here, &mut means);
                }
            }
            ranks.recycle(terms.into_data());
            let receive = Receive::new().exactly(counts);
            let means = ranks.all_gather_with(means, receive).wait()?;
            let mut rest = means.data();
            for Stretch { piece, places } in slices.iter().flatten() {
                for (plane, width) in planes(widths[*piece]) {
                    for run in rows[*piece].runs(places.clone()) {
                        let (bytes, behind) = rest.split_at((run.end - run.start) as usize * width);
                        rest = behind;
                        let store = &mut self.held[*piece].store;
                        store.write_plane(stream, 0, plane, run, bytes)?;
                    }
                }
            }
            ranks.recycle(means.into_data());
        }
        Ok(stats)
    }
}

/// The planes of a row that have bytes, and how many.
fn planes((weights, state): (usize, usize)) -> impl Iterator<Item = (Plane, usize)> {
    let planes = [(Plane::Weights, weights), (Plane::State, state)];
    planes.into_iter().filter(|&(_, width)| width > 0)
}
