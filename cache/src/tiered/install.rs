//! Installing: fetched rows go into slots, the rows that were there go down.
//!
//! ```text
//! fresh   = fetched rows that are not in the device tier            (nobody else changes that)
//! victims = as many idle rows of it as fresh ones lack free slots   (a fetch may want one of them)
//! copy victims out; make room for them in the host tier, writing idle rows of that down;
//! write dirty victims for which it has no room down themselves
//! lock; is a victim wanted by now? begin again
//!       index: victims out, to host slots; fresh rows in
//!       lock host bytes
//! unlock; copy victims to their host slots; unlock host bytes; copy fresh rows to their slots
//! ```
//!
//! There are always enough victims: a fetch fails if more rows would be wanted than there are
//! slots, so slots that are free or idle are at least as many as fresh rows.

use super::Tiered;
use super::down::{gather, make_room, put};
use super::share::{ROWS_APART, both};
use super::shared::State;
use super::tier::{BELOW, DIRTY, Moving};
use super::wanted::Wanted;
use crate::index::Index;
use crate::ops::NO_SLOT;
use crate::{Result, RowLayout, RowOps};

/// Rows on their way out of the device tier.
struct Victims {
    slots: Vec<u64>, // those that are kept come first
    rows: Vec<u64>,
    flags: Vec<u32>,
    /// How many are to be kept below; the others are clean first values.
    kept: usize,
}

impl<D: RowOps> Tiered<D> {
    /// Gives every wanted row a slot that holds its newest bytes.
    pub(super) fn bring_in(
        &mut self,
        device: &D,
        stream: &D::Stream,
        wanted: &mut Wanted,
    ) -> Result<()> {
        if wanted.copies.positions.is_empty() {
            drop(self.shared.state()?);
            return Ok(());
        }
        let copied = wanted.copies.positions.iter().map(|&position| wanted.rows()[position]);
        if self.shared.state()?.any_written_since(wanted.copies.generation, copied) {
            wanted.copy_again()?;
        }
        let (fresh, promoted) = self.find_fresh(wanted);
        let targets = loop {
            let victims = self.choose_victims(fresh.len());
            self.copy_out(device, stream, &victims)?;
            let room = make_room(&self.shared, victims.kept as u64, promoted)?;
            self.write_down_overflow(&victims, room)?;
            if let Some(targets) = self.exchange(wanted, &fresh, &victims)? {
                break targets;
            }
        };
        let (layout, copies) = (self.shared.layout, &wanted.copies);
        let planes = copies.block.rows(layout, 0..copies.positions.len());
        let RowLayout { weight_bytes, state_bytes } = layout;
        let (weights, state) = (&mut self.weights, &mut self.state);
        device
            .scatter_rows(stream, planes.weights, &targets, weight_bytes, weights)
            .and_then(|()| device.scatter_rows(stream, planes.state, &targets, state_bytes, state))
            .map_err(|error| self.shared.poison("copy rows to the device", error))?;
        wanted.installed();
        Ok(())
    }

    /// Which copies are of rows that are not in the device tier, and how many of these are in the
    /// host tier. The others get their slots.
    fn find_fresh(&self, wanted: &mut Wanted) -> (Vec<usize>, u64) {
        let state = self.shared.lock();
        let positions = &wanted.copies.positions;
        let in_host = positions.len() - wanted.copies.below;
        if state.installs == wanted.copies.installs {
            return ((0..positions.len()).collect(), in_host as u64);
        }
        let rows: Vec<u64> = positions.iter().map(|&position| wanted.rows()[position]).collect();
        let mut slots = vec![0; rows.len()];
        state.device.find(&rows, &mut slots);
        let mut fresh = Vec::with_capacity(rows.len());
        for (copy, slot) in slots.into_iter().enumerate() {
            if slot == Index::NONE {
                fresh.push(copy);
            } else {
                wanted.set_slot(wanted.copies.positions[copy], u64::from(slot));
            }
        }
        let promoted = fresh.partition_point(|&copy| copy < in_host) as u64;
        (fresh, promoted)
    }

    /// The rows that leave so that `fresh` rows find a slot.
    fn choose_victims(&self, fresh: usize) -> Victims {
        let mut guard = self.shared.lock();
        let state = &mut *guard;
        let count = (fresh as u64).saturating_sub(state.device.free());
        let chosen = state.device.victims(count as usize, state.policy, state.clock);
        // A clean row is kept for the next read, if there is a place for it.
        let keep = if state.host.capacity() > 0 { DIRTY | BELOW } else { DIRTY };
        let (mut slots, dropped): (Vec<u64>, Vec<u64>) =
            chosen.into_iter().partition(|&slot| state.device.marks(slot).flags() & keep != 0);
        let kept = slots.len();
        slots.extend(dropped);
        let rows = slots.iter().map(|&slot| state.device.row(slot)).collect();
        let flags = slots.iter().map(|&slot| state.device.marks(slot).flags()).collect();
        Victims { slots, rows, flags, kept }
    }

    /// Copies the victims that are kept from the device.
    fn copy_out(&mut self, device: &D, stream: &D::Stream, victims: &Victims) -> Result<()> {
        let slots = &victims.slots[..victims.kept];
        let planes = (&self.weights, &self.state);
        gather(device, stream, &self.shared, planes, slots, &mut self.leaving)
    }

    /// Writes dirty victims down for which the host tier has no room. They are clean then, and
    /// still where they were.
    fn write_down_overflow(&self, victims: &Victims, room: u64) -> Result<()> {
        let from = victims.kept.min(room as usize);
        let mut rows = from..from;
        // Runs of dirty rows: in training all are.
        while rows.end < victims.kept {
            let dirty = |i: &usize| victims.flags[*i] & DIRTY != 0;
            let start = (rows.end..victims.kept).find(dirty).unwrap_or(victims.kept);
            let end = (start..victims.kept).find(|i| !dirty(i)).unwrap_or(victims.kept);
            rows = start..end;
            let planes = self.leaving.rows(self.shared.layout, rows.clone());
            put(&self.shared, &victims.rows[rows.clone()], planes)?;
            let mut state = self.shared.lock();
            state.device.stats.write_backs += rows.len() as u64;
            for &slot in &victims.slots[rows.clone()] {
                state.device.flag(slot, BELOW, DIRTY);
            }
        }
        Ok(())
    }

    /// Exchanges victims and fresh rows in the index, and copies the victims to their host slots.
    /// The slots of copies, [`NO_SLOT`] for those that are not needed; none if a victim is wanted
    /// by now.
    fn exchange(
        &self,
        wanted: &mut Wanted,
        fresh: &[usize],
        victims: &Victims,
    ) -> Result<Option<Vec<u64>>> {
        let shared = &*self.shared;
        let mut guard = shared.lock();
        let state = &mut *guard;
        if victims.slots.iter().any(|&slot| !state.device.marks(slot).idle()) {
            return Ok(None);
        }
        // Before the index can be seen: who finds a victim in the host tier waits for its bytes.
        let mut host = shared.host_mut();
        host.reserve(state.host.capacity().min(state.host.used() + victims.kept as u64))?;
        let (targets, host_slots) = self
            .move_in_index(state, wanted, fresh, victims)
            .inspect_err(|error| state.poison("move rows between tiers", &error.to_string()))?;
        drop(guard);
        let leaving = self.leaving.rows(shared.layout, 0..host_slots.len());
        host.copy_in(&host_slots, leaving, shared.threads);
        Ok(Some(targets))
    }

    fn move_in_index(
        &self,
        state: &mut State,
        wanted: &mut Wanted,
        fresh: &[usize],
        victims: &Victims,
    ) -> Result<(Vec<u64>, Vec<u64>)> {
        let row_bytes = (self.shared.layout.weight_bytes + self.shared.layout.state_bytes) as u64;
        let copies = wanted.copies.positions.len();
        let (below, first) = (copies - wanted.copies.below, copies - wanted.copies.first);
        let (policy, clock) = (state.policy, state.clock);
        let rows: Vec<u64> =
            fresh.iter().map(|&copy| wanted.rows()[wanted.copies.positions[copy]]).collect();

        let promoted = fresh.partition_point(|&copy| copy < below);
        // They stayed where the fetch found them, since they are wanted.
        let found: Vec<u64> =
            fresh[..promoted].iter().map(|&copy| wanted.copies.host_slots[copy]).collect();
        debug_assert!(found.iter().zip(&rows).all(|(&slot, &row)| state.host.row(slot) == row));
        let apart = self.shared.threads > 1 && promoted.min(victims.slots.len()) >= ROWS_APART;
        let (host, device_tier) = (&mut state.host, &mut state.device);
        let (mut rising, falling) =
            both(apart, || host.remove_all(&found), || device_tier.remove_all(&victims.slots));
        rising.extend(fresh.iter().zip(rows).skip(promoted).map(|(&copy, row)| Moving {
            row,
            flags: if copy < first { BELOW } else { 0 },
            wants: state.wanted.remove(&row).unwrap_or(0),
            score: policy.touched(0, clock),
            next: 0,
        }));
        state.host.stats.bytes_out += promoted as u64 * row_bytes;

        let kept = victims.kept.min(state.host.free() as usize);
        let lost = falling[kept..].iter().find(|gone| gone.flags & DIRTY != 0);
        debug_assert!(lost.is_none(), "newest bytes would be lost: {lost:?}");
        let (host, device_tier) = (&mut state.host, &mut state.device);
        let (host_slots, slots) =
            both(apart, || host.insert_all(&falling[..kept]), || device_tier.insert_all(&rising));
        let (host_slots, slots) = (host_slots?, slots?);
        let dirty = falling[..kept].iter().filter(|gone| gone.flags & DIRTY != 0).count();
        state.host.stats.bytes_in += kept as u64 * row_bytes;
        state.device.stats.bytes_out += kept as u64 * row_bytes;
        state.device.stats.write_backs += dirty as u64;
        state.device.stats.evictions += falling.len() as u64;

        let mut targets = vec![NO_SLOT; copies];
        for (&copy, slot) in fresh.iter().zip(slots) {
            targets[copy] = slot;
            wanted.set_slot(wanted.copies.positions[copy], slot);
        }
        state.device.stats.bytes_in += fresh.len() as u64 * row_bytes;
        state.installs += 1;
        Ok((targets, host_slots))
    }
}
