//! Lookups and updates of tables whose rows move between tiers.
//!
//! ```text
//! forward   rows of the batch -> slots, held until the lookup is dropped; pool all bags
//! update    over the same slots; then the rows count as changed
//! ```
//! Where a batch has more rows than a table has slots, work is cut into passes, each of which
//! brings its own rows: a forward pass between bags, never inside one, an update by rows. Every
//! bag is pooled, and every row moved, in one of them whole, so passes show in no result.

use std::ops::Range;
use std::sync::Arc;

use tessera_cache::{Fetched, Lease};
use tessera_device::DeviceBuffer;

use crate::collection::of_table;
use crate::fetch::exceeds_slots;
use crate::{
    Clip, EmbeddingCollection, EmbeddingError, Lookup, LookupOps, Reach, Result, SparseStep,
    Stores, TableSpec, UpdateStats,
};

/// The different rows of each table whose rows move.
type Moving = [Option<Arc<Vec<u64>>>];

impl<D: LookupOps> EmbeddingCollection<D> {
    /// Whether rows of a table move between tiers.
    #[must_use]
    pub fn moves(&self) -> bool {
        self.resolver.moving.contains(&true)
    }

    /// Brings the rows of a lookup that move between tiers to device memory, where they stay until
    /// it is dropped, unless there is no room for all of them: then
    /// [`EmbeddingCollection::forward`] brings them pass by pass. Rows that the lookup gave to new
    /// ids get their first values. Forward does all this by itself.
    ///
    /// Errors: [`EmbeddingError::ForeignLookup`]; [`EmbeddingError::Store`] when a tier fails.
    pub fn hold(&mut self, stream: &D::Stream, lookup: &mut Lookup<D>) -> Result<()> {
        if !Arc::ptr_eq(&lookup.schema, self.schema()) {
            return Err(EmbeddingError::ForeignLookup { operation: "hold" });
        }
        if lookup.held.is_none() {
            lookup.held = match lookup.fetched.take() {
                Some(fetched) => Some(self.install_all(stream, fetched)?),
                None => self.lease_all(stream, &lookup.moving)?,
            };
        }
        // Most rows with new ids are in device memory now.
        self.reset_rows(stream, lookup)
    }

    /// Puts rows that were fetched ahead into slots.
    fn install_all(
        &mut self,
        stream: &D::Stream,
        fetched: Vec<Option<Fetched>>,
    ) -> Result<Vec<Option<Lease>>> {
        let Some(pool) = self.fetchers.pool() else {
            return Ok(fetched.iter().map(|_| None).collect());
        };
        let tables = self.stores.iter_mut().zip(self.resolver.schema.tables()).zip(fetched);
        let device = &self.resolver.device;
        pool.install(tables.collect(), |((store, spec), fetched)| {
            let installed = fetched.map(|fetched| store.install(device, stream, fetched));
            installed.transpose().map_err(of_table(spec))
        })
    }

    /// Pools every bag of a lookup: feature `f` of bag `b` at
    /// `out[b * stride + column_f ..][.. dim]`; zeros for an empty bag. Other columns of `out`
    /// stay as they are.
    ///
    /// Rows that move between tiers stay in device memory from here on until `lookup` is
    /// dropped, if it has room for them all.
    ///
    /// Cost: reads `ids * dim` elements, writes `bags * dim` numbers a feature.
    ///
    /// Errors: [`EmbeddingError::Stride`], [`EmbeddingError::BufferTooShort`],
    /// [`EmbeddingError::ForeignLookup`]; [`EmbeddingError::Store`] when a tier fails, or the
    /// device tier has no room for the rows of a single sample; or what the device says.
    pub fn forward(
        &mut self,
        stream: &D::Stream,
        lookup: &mut Lookup<D>,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        let bags = 0..lookup.bags();
        self.forward_bags(stream, lookup, bags, out, stride)
    }

    /// [`EmbeddingCollection::forward`] of some bags.
    pub(crate) fn forward_bags(
        &mut self,
        stream: &D::Stream,
        lookup: &mut Lookup<D>,
        bags: Range<usize>,
        out: &mut D::Buffer<f32>, // (bags, stride)
        stride: usize,
    ) -> Result<()> {
        self.check("lookup", lookup, out.len(), stride)?;
        self.hold(stream, lookup)?;
        match &lookup.held {
            Some(held) => {
                let reach = self.whole_reach(&lookup.moving, held);
                let staged = &lookup.staged;
                self.device().forward(stream, &self.stores, &reach, staged, bags, out, stride)
            }
            None => self.forward_pass(stream, lookup, bags, out, stride),
        }
    }

    /// Pools some bags; in two halves where their rows have no room.
    fn forward_pass(
        &mut self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        bags: Range<usize>,
        out: &mut D::Buffer<f32>,
        stride: usize,
    ) -> Result<()> {
        let mut numbers = Vec::with_capacity(lookup.moving.len());
        for (table, rows) in lookup.moving.iter().enumerate() {
            let numbers_of =
                || self.device().numbers_of(stream, &lookup.staged, table, bags.clone());
            numbers.push(rows.as_ref().map(|_| numbers_of()).transpose()?);
        }
        match self.pass(stream, &lookup.moving, &numbers) {
            Ok(pass) => {
                let reach = pass.reach(|_| 0..0);
                let staged = &lookup.staged;
                self.device().forward(stream, &self.stores, &reach, staged, bags, out, stride)
            }
            Err(error) if exceeds_slots(&error) && bags.len() > 1 => {
                let middle = bags.start + bags.len() / 2;
                self.forward_pass(stream, lookup, bags.start..middle, out, stride)?;
                self.forward_pass(stream, lookup, middle..bags.end, out, stride)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`EmbeddingCollection::update`], with the row sums of tables that are cut by columns:
    /// see [`LookupOps::update`].
    pub(crate) fn update_with(
        &mut self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
        step: &SparseStep,
        squares: &[f32],
    ) -> Result<UpdateStats> {
        self.check("update", lookup, grad.len(), stride)?;
        check_step(step)?;
        let tables = self.stores.len();
        let mut stats =
            UpdateStats { rows_updated: vec![0; tables], rows_nonfinite: vec![0; tables] };
        self.row_passes(stream, lookup, true, |device, stores, reach| {
            let staged = &lookup.staged;
            let moved =
                device.update(stream, stores, reach, staged, grad, stride, step, squares)?;
            for (sum, rows) in stats.rows_updated.iter_mut().zip(&moved.rows_updated) {
                *sum += rows;
            }
            for (sum, rows) in stats.rows_nonfinite.iter_mut().zip(&moved.rows_nonfinite) {
                *sum += rows;
            }
            Ok(())
        })?;
        self.note_lookup(stream, lookup)?;
        Ok(stats)
    }

    /// [`LookupOps::block_squares`] of the only table.
    pub(crate) fn block_squares(
        &mut self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        grad: &D::Buffer<f32>, // (bags, stride)
        stride: usize,
        step: &SparseStep,
        out: &mut [f32],
    ) -> Result<()> {
        self.check("row sums", lookup, grad.len(), stride)?;
        check_step(step)?;
        self.row_passes(stream, lookup, false, |device, stores, reach| {
            device.block_squares(stream, stores, reach, &lookup.staged, grad, stride, step, out)
        })
    }

    /// Calls `work` until every row of a lookup was once in its reach: once, where the rows are
    /// held, or there is room for all. `writes` says that it changes them.
    fn row_passes(
        &mut self,
        stream: &D::Stream,
        lookup: &Lookup<D>,
        writes: bool,
        mut work: impl FnMut(&D, &mut Stores<D>, &[Reach<'_>]) -> Result<()>,
    ) -> Result<()> {
        let held_now;
        let held = match &lookup.held {
            Some(held) => Some(held),
            None => {
                held_now = self.lease_all(stream, &lookup.moving)?;
                held_now.as_ref()
            }
        };
        if let Some(held) = held {
            let reach = self.whole_reach(&lookup.moving, held);
            work(&self.resolver.device, &mut self.stores, &reach)?;
            return if writes { self.commit(held) } else { Ok(()) };
        }
        let mut next: Vec<u64> = vec![0; self.stores.len()]; // number of each table
        let mut first = true;
        loop {
            let numbers: Vec<Option<Vec<u64>>> = lookup
                .moving
                .iter()
                .zip(&mut next)
                .zip(self.stores.iter().zip(self.resolver.schema.tables()))
                .map(|((rows, next), (store, spec))| {
                    let left = moved(spec, rows.as_ref()?) - *next;
                    // Where others hold all slots, asking for one says so.
                    let here = *next..*next + left.min(store.slots_free().max(1));
                    *next = here.end;
                    Some(here.collect())
                })
                .collect();
            if !first && numbers.iter().flatten().all(Vec::is_empty) {
                return Ok(());
            }
            let pass = self.pass(stream, &lookup.moving, &numbers)?;
            let schema = &self.resolver.schema;
            let reach = pass.reach(|table| match &numbers[table] {
                Some(numbers) => {
                    let start = numbers.first().copied().unwrap_or(0);
                    start..start + numbers.len() as u64
                }
                // A table whose rows stay has its turn in the first pass.
                None if first => 0..schema.tables()[table].rows,
                None => 0..0,
            });
            work(&self.resolver.device, &mut self.stores, &reach)?;
            if writes {
                self.commit(&pass.held)?;
            }
            first = false;
        }
    }

    /// Says that held rows were written.
    fn commit(&mut self, held: &[Option<Lease>]) -> Result<()> {
        for (table, (store, lease)) in self.stores.iter_mut().zip(held).enumerate() {
            if let Some(lease) = lease {
                let spec = &self.resolver.schema.tables()[table];
                store.commit(lease).map_err(of_table(spec))?;
            }
        }
        Ok(())
    }

    /// Brings all rows of `moving` to the device, unless a table has too few slots for its own.
    fn lease_all(
        &mut self,
        stream: &D::Stream,
        moving: &Moving,
    ) -> Result<Option<Vec<Option<Lease>>>> {
        let rows: Vec<Option<&[u64]>> =
            moving.iter().map(|rows| rows.as_ref().map(|rows| &rows[..])).collect();
        match self.lease(stream, &rows) {
            Ok(held) => Ok(Some(held)),
            Err(error) if exceeds_slots(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Brings rows of `moving`, by their numbers, to the device.
    fn pass(
        &mut self,
        stream: &D::Stream,
        moving: &Moving,
        numbers: &[Option<Vec<u64>>],
    ) -> Result<Pass> {
        let rows_of = |(rows, numbers): (&Option<Arc<Vec<u64>>>, &Option<Vec<u64>>)| {
            let (rows, numbers) = (rows.as_ref()?, numbers.as_ref()?);
            Some(numbers.iter().map(|&number| rows[number as usize]).collect())
        };
        let rows: Vec<Option<Vec<u64>>> = moving.iter().zip(numbers).map(rows_of).collect();
        let held = self.lease(stream, &rows.iter().map(Option::as_deref).collect::<Vec<_>>())?;
        let slots = (0..rows.len()).map(|table| {
            let (all, numbers) = (moving[table].as_ref()?, numbers[table].as_ref()?);
            let mut slots = vec![u64::MAX; all.len()];
            let leased = held[table].as_ref()?.slots(rows[table].as_ref()?);
            for (&number, &slot) in numbers.iter().zip(leased) {
                slots[number as usize] = slot;
            }
            Some(slots)
        });
        let slots = slots.collect();
        Ok(Pass { held, slots })
    }

    /// Brings rows of each table to the device.
    fn lease(&mut self, stream: &D::Stream, rows: &[Option<&[u64]>]) -> Result<Vec<Option<Lease>>> {
        // A table that can never hold its rows says so before any others are read.
        for (table, rows) in rows.iter().enumerate() {
            if let Some(rows) =
                rows.filter(|rows| rows.len() as u64 > self.stores[table].capacity())
            {
                let refused = self.stores[table].fetcher().fetch(rows);
                drop(refused.map_err(of_table(&self.resolver.schema.tables()[table]))?);
            }
        }
        let fetched = self.fetchers.fetch_rows(rows)?;
        self.install_all(stream, fetched)
    }

    /// Everything that a lookup reads, where leases hold all of it.
    fn whole_reach<'a>(&self, moving: &'a Moving, held: &'a [Option<Lease>]) -> Vec<Reach<'a>> {
        let tables = self.resolver.schema.tables().iter().zip(moving.iter().zip(held));
        tables
            .map(|(spec, pair)| match pair {
                (Some(rows), Some(lease)) => {
                    Reach { slots: Some(lease.slots(rows)), rows: 0..moved(spec, rows) }
                }
                _ => Reach { slots: None, rows: 0..spec.rows },
            })
            .collect()
    }
}

/// How many of a table's different rows an update moves: all but the row of zeros of a dynamic one,
/// which is the last.
fn moved(spec: &TableSpec, rows: &[u64]) -> u64 {
    rows.partition_point(|&row| row < spec.rows) as u64
}

/// Some of a lookup's rows in device memory.
struct Pass {
    held: Vec<Option<Lease>>,
    /// The slot of each number of a table that is held; others have none.
    slots: Vec<Option<Vec<u64>>>,
}

impl Pass {
    /// Reach of every table, with the rows that `rows` gives it.
    fn reach(&self, rows: impl Fn(usize) -> Range<u64>) -> Vec<Reach<'_>> {
        let tables = self.slots.iter().enumerate();
        tables.map(|(table, slots)| Reach { slots: slots.as_deref(), rows: rows(table) }).collect()
    }
}

/// Checks the numbers of a step.
fn check_step(step: &SparseStep) -> Result<()> {
    if step.t == 0 {
        return Err(EmbeddingError::StepZero);
    }
    let needed = "a finite number from 0 up";
    let (what, value) = match step.clip {
        _ if !(step.lr_scale >= 0.0 && step.lr_scale.is_finite()) => ("lr_scale", step.lr_scale),
        Clip::Value(value) if !(value >= 0.0 && value.is_finite()) => ("clip value", value),
        Clip::Scale(scale) if !(scale >= 0.0 && scale.is_finite()) => ("clip scale", scale),
        _ => return Ok(()),
    };
    Err(EmbeddingError::StepValue { what, value, needed })
}
