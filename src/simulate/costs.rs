//! What a step costs each class of ranks: milliseconds by stage.

use tessera_embedding::plan::{Grid2d, Topology};

/// Work of a rank on its links in one collective.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LinkWork {
    /// Milliseconds of sending to ranks of the same node.
    pub near_ms: f64,
    /// Milliseconds of sending to other nodes; both kinds of link work at once.
    pub far_ms: f64,
    /// Milliseconds before anything arrives, however little it is.
    pub latency_ms: f64,
}

impl LinkWork {
    /// A part of the bytes, with the latency of an operation of its own.
    #[must_use]
    pub fn part(self, share: f64) -> Self {
        if share > 0.0 {
            Self { near_ms: self.near_ms * share, far_ms: self.far_ms * share, ..self }
        } else {
            Self::default()
        }
    }

    /// As much of everything but the latency, `factor` times.
    #[must_use]
    pub fn times(self, factor: f64) -> Self {
        Self { near_ms: self.near_ms * factor, far_ms: self.far_ms * factor, ..self }
    }
}

/// Milliseconds a step of a class of ranks, stage by stage (docs/simulate.md says what they are).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[allow(missing_docs)] // The names of the stages.
pub struct ClassCosts {
    /// The first rank of the class.
    pub rank: usize,
    /// Its ranks.
    pub count: usize,
    pub read_ms: f64,
    pub upload_ms: f64,
    pub keys: LinkWork,
    pub ssd_ms: f64,
    pub host_ms: f64,
    pub install_ms: f64,
    pub shared_ms: f64,
    pub lookup_ms: f64,
    pub exchange_out: LinkWork,
    pub dense_ms: f64,
    pub exchange_back: LinkWork,
    pub all_reduce: LinkWork,
    pub update_ms: f64,
    pub sync: LinkWork,
    pub overhead_ms: f64,
    /// Memory of a rank, in bytes; `None` when it is not known.
    pub memory_bytes: Option<f64>,
}

/// Links of a group of ranks: who is near whom.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links<'a> {
    /// Speeds.
    pub topology: &'a Topology,
    /// Groups and replicas.
    pub grid: Grid2d,
    /// Ranks of a node.
    pub per_node: usize,
}

/// Milliseconds for `bytes` at 10^9 bytes a second.
#[must_use]
pub fn ms(bytes: f64, gb_per_s: f64) -> f64 {
    bytes / (gb_per_s * 1e6)
}

impl Links<'_> {
    /// Ranks of a shard group, and those of them that share a node.
    fn group(&self) -> (usize, usize) {
        (self.grid.ranks(), self.grid.group_ranks_per_node(self.per_node))
    }

    /// Ranks of a replica group, and those of them that share a node.
    fn replicas(&self) -> (usize, usize) {
        (self.grid.groups(), self.grid.replicas_per_node(self.per_node))
    }

    /// `bytes` of a rank spread evenly over `members`, itself among them, of which `near` are on its
    /// node; messages to several peers follow each other.
    fn spread(&self, bytes: f64, (members, near): (usize, usize)) -> LinkWork {
        let (all, peers, others) = (members as f64, (near - 1) as f64, (members - near) as f64);
        let (intra, inter) = (self.topology.intra_node, self.topology.inter_node);
        LinkWork {
            near_ms: ms(bytes * peers / all, intra.gb_per_s),
            far_ms: ms(bytes * others / all, inter.gb_per_s),
            latency_ms: (peers * intra.latency_us + others * inter.latency_us) / 1e3,
        }
    }

    /// Sends `bytes` to the ranks of the shard group.
    #[must_use]
    pub fn exchange(&self, bytes: f64) -> LinkWork {
        self.spread(bytes, self.group())
    }

    /// Averages `bytes` that all replicas hold: parts are sent to who averages them, and back.
    #[must_use]
    pub fn sync(&self, bytes: f64) -> LinkWork {
        let one_way = self.spread(bytes, self.replicas());
        LinkWork { latency_ms: 2.0 * one_way.latency_ms, ..one_way.times(2.0) }
    }

    /// Adds `bytes` up over all ranks: inside nodes, each rank's part between nodes, and back.
    #[must_use]
    pub fn all_reduce(&self, bytes: f64) -> LinkWork {
        let (near, nodes) = (self.per_node as f64, (self.grid.total() / self.per_node) as f64);
        let (intra, inter) = (self.topology.intra_node, self.topology.inter_node);
        LinkWork {
            near_ms: ms(2.0 * bytes * (near - 1.0) / near, intra.gb_per_s),
            far_ms: ms(2.0 * bytes / near * (nodes - 1.0) / nodes, inter.gb_per_s),
            // Up and down a tree.
            latency_ms: 2.0
                * (near.log2().ceil() * intra.latency_us + nodes.log2().ceil() * inter.latency_us)
                / 1e3,
        }
    }

    /// A collective of the shard group that takes so long.
    #[must_use]
    pub fn group_ms(&self, ms: f64) -> LinkWork {
        given(ms, self.group())
    }

    /// A collective of the replica group that takes so long.
    #[must_use]
    pub fn replicas_ms(&self, ms: f64) -> LinkWork {
        given(ms, self.replicas())
    }

    /// A collective of all ranks that takes so long.
    #[must_use]
    pub fn all_ms(&self, ms: f64) -> LinkWork {
        given(ms, (self.grid.total(), self.per_node))
    }
}

/// On the links between nodes, unless no rank is on another one.
fn given(ms: f64, (members, near): (usize, usize)) -> LinkWork {
    if members == near {
        LinkWork { near_ms: ms, ..LinkWork::default() }
    } else {
        LinkWork { far_ms: ms, ..LinkWork::default() }
    }
}

impl ClassCosts {
    /// A rank whose part of the tables is used `factor` times as much.
    #[must_use]
    pub fn hotter(&self, factor: f64) -> Self {
        Self {
            keys: self.keys.times(factor),
            ssd_ms: self.ssd_ms * factor,
            host_ms: self.host_ms * factor,
            install_ms: self.install_ms * factor,
            shared_ms: self.shared_ms * factor,
            lookup_ms: self.lookup_ms * factor,
            exchange_out: self.exchange_out.times(factor),
            exchange_back: self.exchange_back.times(factor),
            update_ms: self.update_ms * factor,
            ..*self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_embedding::plan::{Link, Placement};

    #[test]
    fn bytes_take_the_time_of_their_links() {
        // 10^6 bytes take 1 ms inside a node and 10 between nodes.
        let topology = Topology {
            intra_node: Link { gb_per_s: 1.0, latency_us: 10.0 },
            inter_node: Link { gb_per_s: 0.1, latency_us: 100.0 },
            ..Topology::preset("h100").unwrap()
        };
        // 16 ranks, 4 a node, 2 groups of neighbours.
        let grid = Grid2d::new(16, 2, Placement::Contiguous).unwrap();
        let links = Links { topology: &topology, grid, per_node: 4 };
        let close = |work: LinkWork, near: f64, far: f64, latency: f64| {
            let (n, f, l) = (work.near_ms, work.far_ms, work.latency_ms);
            let wrong = (n - near).abs() + (f - far).abs() + (l - latency).abs();
            assert!(wrong < 1e-9, "{work:?}");
        };
        // Groups of 8: 3 peers near, 4 far.
        close(links.exchange(8e6), 3.0, 40.0, 0.03 + 0.4);
        // Pairs of replicas, on two nodes: half is sent to be averaged, half the average back.
        close(links.sync(8e6), 0.0, 80.0, 0.2);
        // 4 ranks a node, 4 nodes.
        close(links.all_reduce(8e6), 12.0, 30.0, 2.0 * (0.02 + 0.2));
        close(links.all_ms(5.0), 0.0, 5.0, 0.0);
        let one_node = Links { per_node: 16, ..links };
        close(one_node.group_ms(5.0), 5.0, 0.0, 0.0);
        let alone = Grid2d::new(1, 1, Placement::Strided).unwrap();
        let links = Links { grid: alone, per_node: 1, ..links };
        close(links.exchange(1e9), 0.0, 0.0, 0.0);
        close(links.all_reduce(1e9), 0.0, 0.0, 0.0);
    }

    #[test]
    fn a_part_pays_the_latency_of_the_whole() {
        let work = LinkWork { near_ms: 4.0, far_ms: 8.0, latency_ms: 1.0 };
        assert_eq!(work.part(0.25), LinkWork { near_ms: 1.0, far_ms: 2.0, latency_ms: 1.0 });
        assert_eq!(work.part(0.0), LinkWork::default());
    }
}
