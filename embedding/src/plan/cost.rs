//! What a shard costs: milliseconds a step and bytes of memory.
//!
//! With `G` samples a step in the group, `ids` of them at the shard, `F` features, `c` columns:
//! ```text
//! compute = 3 * rows read * max(c, 32) * element bytes   forward, and twice for the backward pass
//!         + ids * 8 + 2 * vectors * c * 4                ids; vectors written, gradients copied
//! links   = ids * 8 + 2 * vectors * c * 4                ids in; vectors out, gradients in
//! pooled: rows read = ids,  vectors = G * F
//! unique: rows read = different rows among the ids,  vectors = ids, different within each rank
//! ```
//! Only what a rank sends is counted: links carry both directions at once, and what a rank
//! receives of all owners is the mean of what they send, so never more than the hottest sends.

use std::ops::Range;

use super::load::{TableLoad, Workload};
use super::{Route, Topology};

/// Bytes of an id.
const ID_BYTES: f64 = 8.0;
/// Bytes of a number on the way and of a gradient.
const NUMBER_BYTES: f64 = 4.0;
/// Fewer columns than this cost as many: a row is at least this much of a memory access.
const COLUMNS_MIN: usize = 32;

/// Milliseconds a step, and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Load {
    pub(super) cost: f64,
    pub(super) memory: u64,
}

/// A part of a table: its columns, and its rows with their shares of the ids and of the unique
/// ids of a batch.
pub(super) struct Part {
    pub(super) rows: u64,
    pub(super) columns: usize,
    pub(super) ids_share: f64,
    pub(super) unique_share: f64,
}

/// What a shard does in a step at its owner.
pub(super) struct OwnerWork {
    /// Different rows.
    pub(super) rows: f64,
    /// Ids that come.
    pub(super) ids_bytes: f64,
    /// Rows that the forward pass reads.
    pub(super) read_bytes: f64,
    /// Vectors that go out; as many gradients come back.
    pub(super) out_bytes: f64,
    /// Squares that owners of other columns are sent.
    pub(super) sums_bytes: f64,
}

/// What a copy of a table does in a step on each rank.
pub(super) struct CopyWork {
    /// Moved by the lookup and its gradients.
    pub(super) lookup_bytes: f64,
    /// Moved by the update.
    pub(super) update_bytes: f64,
    /// Sent.
    pub(super) exchange_bytes: f64,
    /// Held for each batch in flight.
    pub(super) held_bytes: f64,
    /// Gradients of touched rows.
    pub(super) gradient_bytes: f64,
}

/// How pooled vectors go home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// From the owner to each rank.
    Flat,
    /// Summed over the node first: each rank of it sends a part of the bags on.
    Node,
}

/// Costs on a group of ranks.
pub(super) struct Model<'a> {
    topology: &'a Topology,
    workload: &'a Workload,
    ranks: f64,
    per_node: f64,
    /// Shares of all rows that device, and device or host, have room for.
    device_share: f64,
    host_share: f64,
}

impl<'a> Model<'a> {
    pub(super) fn new(
        topology: &'a Topology,
        workload: &'a Workload,
        ranks: usize,
        per_node: usize,
        tables: &[TableLoad],
    ) -> Self {
        let total = tables.iter().map(|table| table.total_bytes() as f64).sum::<f64>().max(1.0);
        let device = topology.device_bytes.saturating_sub(topology.reserve_bytes) as f64;
        let share = |bytes: f64| (bytes * ranks as f64 / total).min(1.0);
        Self {
            topology,
            workload,
            ranks: ranks as f64,
            per_node: per_node as f64,
            device_share: share(device),
            host_share: share(device + topology.host_bytes as f64),
        }
    }

    /// Share of all rows that the devices have room for.
    pub(super) fn device_share(&self) -> f64 {
        self.device_share
    }

    /// Milliseconds to send `bytes` spread evenly over all ranks: both kinds of link at once.
    pub(super) fn send_ms(&self, bytes: f64) -> f64 {
        let near = bytes * (self.per_node - 1.0) / self.ranks;
        let far = bytes * (self.ranks - self.per_node) / self.ranks;
        ms(near, self.topology.intra_node.gb_per_s).max(ms(far, self.topology.inter_node.gb_per_s))
    }

    /// Milliseconds of link latency in a step: three exchanges (ids, vectors, gradients), each
    /// with one message a peer.
    pub(super) fn latency_ms(&self) -> f64 {
        let near = (self.per_node - 1.0) * self.topology.intra_node.latency_us;
        let far = (self.ranks - self.per_node) * self.topology.inter_node.latency_us;
        3.0 * (near + far) / 1e3
    }

    fn device_ms(&self, bytes: f64) -> f64 {
        ms(bytes, self.topology.device_gb_per_s)
    }

    /// Milliseconds to fetch `rows` rows from the tiers below the device and to write them back.
    fn miss_ms(&self, table: &TableLoad, rows: f64, columns: usize) -> f64 {
        let (host, ssd) = self.miss_bytes(table, rows, columns);
        ms(host, self.topology.host_gb_per_s) + ms(ssd, self.topology.ssd_gb_per_s)
    }

    /// The bytes of that from the host's memory, and from disks.
    pub(super) fn miss_bytes(&self, table: &TableLoad, rows: f64, columns: usize) -> (f64, f64) {
        if self.device_share >= 1.0 || self.host_share <= self.device_share {
            return (0.0, 0.0);
        }
        let hit = |share| table.stats.as_ref().map_or(share, |stats| stats.hit(share));
        let bytes = 2.0 * rows * table.row_bytes(columns) as f64;
        let (device, host) = (hit(self.device_share), hit(self.host_share));
        (bytes * (host - device), bytes * (1.0 - host))
    }

    /// What a shard of at least one row does at its owner.
    pub(super) fn owner_work(&self, table: &TableLoad, route: Route, part: &Part) -> OwnerWork {
        let features = table.ids_per_sample.len() as f64;
        let ids_local = self.workload.batch_per_rank * table.ids();
        let ids_global = ids_local * self.ranks;
        let rows = table.unique(ids_global) * part.unique_share;
        let (ids, read, vectors) = match route {
            Route::Pooled => {
                let ids = ids_global * part.ids_share;
                (ids, ids, self.workload.batch_per_rank * self.ranks * features)
            }
            Route::Unique => {
                let ids = self.ranks * table.unique(ids_local) * part.unique_share;
                (ids, rows, ids)
            }
        };
        let columns = part.columns as f64;
        // Owners of other columns need this one's sum of squares of each block of each row.
        let sums = if table.row_states > 0 && part.columns < table.dim {
            rows * columns / COLUMNS_MIN as f64 * NUMBER_BYTES
        } else {
            0.0
        };
        let width = part.columns.max(COLUMNS_MIN) as f64 * table.element_bytes as f64;
        OwnerWork {
            rows,
            ids_bytes: ids * ID_BYTES,
            read_bytes: read * width,
            out_bytes: vectors * columns * NUMBER_BYTES,
            sums_bytes: sums,
        }
    }

    /// A shard at its owner.
    pub(super) fn owner(&self, table: &TableLoad, route: Route, way: Way, part: &Part) -> Load {
        if part.rows == 0 {
            return Load::default();
        }
        let OwnerWork { rows, ids_bytes, read_bytes, out_bytes: out, sums_bytes } =
            self.owner_work(table, route, part);
        let compute = self.device_ms(3.0 * read_bytes + ids_bytes + 2.0 * out);
        let vectors_ms = match way {
            Way::Flat => self.send_ms(out),
            // Each rank keeps its part of the bags, and sends it on to the same place elsewhere.
            Way::Node => {
                let near = out * (self.per_node - 1.0) / self.per_node;
                let far = out / self.per_node * (self.ranks - self.per_node) / self.ranks;
                ms(near, self.topology.intra_node.gb_per_s)
                    + ms(far, self.topology.inter_node.gb_per_s)
            }
        };
        let links = self.send_ms(ids_bytes + sums_bytes) + 2.0 * vectors_ms;
        let row_bytes = table.row_bytes(part.columns);
        // Rows that are in the device anyway need no copy to be read ahead.
        let copies = if self.device_share < 1.0 { self.workload.row_buffers } else { 0 };
        let buffers = self.workload.batches_in_flight as f64 * (ids_bytes + out)
            + copies as f64 * rows.min(part.rows as f64) * row_bytes as f64;
        Load {
            cost: compute + links + self.miss_ms(table, rows, part.columns),
            memory: part.rows.saturating_mul(row_bytes).saturating_add(bytes(buffers)),
        }
    }

    /// What a table on this route costs every rank as a source of ids, wherever its shards are.
    pub(super) fn source(&self, table: &TableLoad, route: Route) -> Load {
        let batch = self.workload.batch_per_rank;
        let ids = batch * table.ids();
        let dim = table.dim as f64;
        let pooled = batch * table.ids_per_sample.len() as f64 * dim * NUMBER_BYTES;
        let flights = self.workload.batches_in_flight as f64;
        match route {
            Route::Pooled => Load { cost: 0.0, memory: bytes(flights * (ids * ID_BYTES + pooled)) },
            Route::Unique => {
                let rows = table.unique(ids) * dim * NUMBER_BYTES;
                // Rows are summed into bags, and gradients of bags into gradients of rows.
                let cost = self.device_ms(2.0 * self.source_bytes(table));
                Load { cost, memory: bytes(flights * (ids * ID_BYTES + pooled + rows)) }
            }
        }
    }

    /// Bytes that a source moves to sum the rows of bags, on the unique route.
    pub(super) fn source_bytes(&self, table: &TableLoad) -> f64 {
        let vectors = table.ids() + table.ids_per_sample.len() as f64;
        self.workload.batch_per_rank * vectors * table.dim as f64 * NUMBER_BYTES
    }

    /// A copy of the table on every rank: local lookups, and an all-reduce of the touched rows.
    pub(super) fn copy(&self, table: &TableLoad) -> Load {
        let CopyWork { lookup_bytes, update_bytes, exchange_bytes, held_bytes, gradient_bytes } =
            self.copy_work(table);
        let exchange = self.send_ms(exchange_bytes);
        let flights = self.workload.batches_in_flight as f64;
        let buffers = flights * held_bytes + 2.0 * gradient_bytes;
        Load {
            cost: self.device_ms(lookup_bytes) + self.device_ms(update_bytes) + exchange,
            memory: table.total_bytes().saturating_add(bytes(buffers)),
        }
    }

    /// What a copy of the table does on every rank.
    pub(super) fn copy_work(&self, table: &TableLoad) -> CopyWork {
        let ids = self.workload.batch_per_rank * table.ids();
        let touched = table.unique(ids * self.ranks);
        let dim = table.dim as f64;
        let width = table.dim.max(COLUMNS_MIN) as f64 * table.element_bytes as f64;
        let pooled =
            self.workload.batch_per_rank * table.ids_per_sample.len() as f64 * dim * NUMBER_BYTES;
        let gradients = touched * dim * NUMBER_BYTES;
        CopyWork {
            lookup_bytes: 2.0 * ids * width + ids * ID_BYTES + 2.0 * pooled,
            update_bytes: touched * 2.0 * width + gradients,
            // Reduce-scatter and all-gather each send every touched row once, with its number.
            exchange_bytes: 2.0 * (gradients + touched * ID_BYTES),
            held_bytes: ids * ID_BYTES + pooled,
            gradient_bytes: gradients,
        }
    }

    /// The part of a table that is `rows` by `columns`.
    pub(super) fn part(table: &TableLoad, rows: &Range<u64>, columns: &Range<usize>) -> Part {
        let count = rows.end - rows.start;
        let even = if table.rows == 0 { 0.0 } else { count as f64 / table.rows as f64 };
        let (ids_share, unique_share) =
            table.stats.as_ref().map_or((even, even), |stats| stats.share(rows));
        Part { rows: count, columns: columns.len(), ids_share, unique_share }
    }
}

/// Milliseconds for `bytes` at 10^9 bytes a second.
pub(super) fn ms(bytes: f64, gb_per_s: f64) -> f64 {
    bytes / (gb_per_s * 1e6)
}

fn bytes(x: f64) -> u64 {
    // Saturates; a plan with such buffers fits nowhere.
    x.ceil() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SparseOptimizer;
    use crate::plan::Link;

    /// Speeds at which a million bytes take a millisecond on every device and link.
    fn unit() -> Topology {
        let link = Link { gb_per_s: 1.0, latency_us: 0.0 };
        Topology {
            device_gb_per_s: 1.0,
            intra_node: link,
            inter_node: link,
            host_gb_per_s: 1.0,
            ssd_gb_per_s: 1.0,
            ..Topology::preset("cpu").unwrap()
        }
    }

    fn table(rows: u64, dim: usize, ids: f64) -> TableLoad {
        TableLoad::new("t", rows, dim, &SparseOptimizer::Sgd { lr: 0.1 }, vec![ids])
    }

    #[test]
    fn a_pooled_shard_costs_what_the_formula_says() {
        let (topology, table) = (unit(), table(1000, 64, 10.0));
        let workload = Workload::new(100.0);
        // 4 ranks on one node: G = 400 samples, 4000 ids, of which half are in this half's rows.
        let model = Model::new(&topology, &workload, 4, 4, std::slice::from_ref(&table));
        let part = Model::part(&table, &(0..500), &(0..32));
        let load = model.owner(&table, Route::Pooled, Way::Flat, &part);
        let out = 400.0 * 32.0 * 4.0;
        let compute = 3.0 * 2000.0 * 128.0 + 2000.0 * 8.0 + 2.0 * out;
        let links = 0.75 * (2000.0 * 8.0 + 2.0 * out);
        assert!((load.cost - (compute + links) / 1e6).abs() < 1e-12, "{load:?}");
        // All 500 rows, and two batches.
        let wanted = 500.0 * 128.0 + 2.0 * (2000.0 * 8.0 + out);
        assert!((load.memory as f64 - wanted).abs() < 2.0, "{load:?}, {wanted}");
    }

    #[test]
    fn unique_rows_travel_once_a_rank() {
        let (topology, table) = (unit(), table(10, 64, 10.0));
        let workload = Workload::new(100.0);
        let model = Model::new(&topology, &workload, 4, 4, std::slice::from_ref(&table));
        let part = Model::part(&table, &(0..10), &(0..64));
        // Every rank asks for all 10 rows; the owner reads each once.
        let load = model.owner(&table, Route::Unique, Way::Flat, &part);
        let out = 40.0 * 64.0 * 4.0;
        let wanted = 3.0 * 10.0 * 256.0 + 40.0 * 8.0 + 2.0 * out + 0.75 * (40.0 * 8.0 + 2.0 * out);
        assert!((load.cost - wanted / 1e6).abs() < 1e-12, "{load:?}");
    }

    #[test]
    fn a_node_sends_each_bag_once() {
        let mut topology = unit();
        topology.intra_node.gb_per_s = f64::INFINITY;
        topology.device_gb_per_s = f64::INFINITY;
        let table = table(1 << 20, 64, 0.0);
        let workload = Workload::new(100.0);
        let model = Model::new(&topology, &workload, 8, 4, std::slice::from_ref(&table));
        let part = Model::part(&table, &(0..1 << 18), &(0..64));
        // Half of the ranks are elsewhere; each of the node's four sends them a quarter of the bags.
        let flat = model.owner(&table, Route::Pooled, Way::Flat, &part).cost;
        let node = model.owner(&table, Route::Pooled, Way::Node, &part).cost;
        assert!((flat - 2.0 * 800.0 * 256.0 / 2.0 / 1e6).abs() < 1e-12);
        assert!((node - flat / 4.0).abs() < 1e-12);
    }

    #[test]
    fn rows_below_the_device_cost_their_way_up_and_down() {
        let mut topology = unit();
        let mut table = table(1_000_000, 64, 1.0);
        // Room for a quarter on the device, a quarter on the host, the rest on disk.
        topology.reserve_bytes = 0;
        topology.device_bytes = 64_000_000;
        topology.host_bytes = 64_000_000;
        topology.host_gb_per_s = 2.0;
        topology.ssd_bytes = 1 << 40;
        let workload = Workload::new(100.0);
        let model = Model::new(&topology, &workload, 1, 1, std::slice::from_ref(&table));
        assert!((model.device_share() - 0.25).abs() < 1e-12);
        // A batch's rows are kept twice besides, to be read ahead.
        let part = Model::part(&table, &(0..table.rows), &(0..64));
        let load = model.owner(&table, Route::Pooled, Way::Flat, &part);
        let buffers = 2.0 * (100.0 * 8.0 + 100.0 * 256.0) + 2.0 * table.unique(100.0) * 256.0;
        assert!((load.memory as f64 - 256e6 - buffers).abs() < 2.0, "{load:?}, {buffers}");
        let missed = model.miss_ms(&table, 100.0, 64);
        let bytes = 2.0 * 100.0 * 256.0;
        assert!((missed - bytes * (0.25 / 2.0 + 0.5) / 1e6).abs() < 1e-12, "{missed}");
        // Ids that are all the same are always on the device.
        let mut counter = crate::plan::IdCounter::new(table.rows);
        counter.batch(std::iter::repeat_n(7, 1000));
        table.stats = counter.finish();
        assert!(model.miss_ms(&table, 100.0, 64) < 1e-6);
    }

    #[test]
    fn one_rank_sends_nothing() {
        let topology = unit();
        let table = table(100, 64, 1.0);
        let workload = Workload::new(100.0);
        let model = Model::new(&topology, &workload, 1, 1, std::slice::from_ref(&table));
        assert_eq!((model.send_ms(1e9), model.latency_ms()), (0.0, 0.0));
    }
}
