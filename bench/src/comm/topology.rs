//! A topology measured, as a file that the planner reads.
//!
//! ```text
//! link, inside a node    all_to_all_v between the ranks of each node, all nodes at once
//! link, between nodes    all_to_all_v between the ranks of one number on every node, all at once
//!   latency              median time of 0 bytes over the number of peers
//!   bandwidth            bytes that a rank sends to others, 16 MiB in all, over the median time
//! device                 random rows read by all ranks at once
//! memory                 the machine's over its ranks
//! ```
//! What one node has no second of is not measured, and left to the preset `cpu`.

use std::fmt::Write;
use std::path::Path;

use tessera_comm::Communicator;
use tessera_device::Cpu;
use tessera_embedding::plan::{Link, Topology};

use super::measure::{Repeat, gather_gb_per_s, repeat};
use super::operation::Operation;
use crate::machine::Machine;
use crate::stats::median;
use crate::{BenchError, Result};

/// Bytes that bandwidth is measured with.
const BANDWIDTH_BYTES: usize = 16 << 20;

/// Four digits say all that such a measurement knows.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().expect("a number that was written is one")
}

/// Ranks of a node, from the name of every rank's machine.
///
/// Errors: [`BenchError::Usage`] when they are not dealt to the machines in equal blocks, which
/// is what a topology can say.
pub fn ranks_per_node(names: &[Vec<u8>]) -> Result<usize> {
    let per_node = names.iter().take_while(|&name| *name == names[0]).count();
    let blocks: Vec<&[Vec<u8>]> = names.chunks(per_node).collect();
    let alike = |block: &[Vec<u8>]| block.len() == per_node && block.iter().all(|n| *n == block[0]);
    let apart = |i: usize| blocks[..i].iter().all(|block| block[0] != blocks[i][0]);
    if blocks.iter().all(|block| alike(block)) && (1..blocks.len()).all(apart) {
        return Ok(per_node);
    }
    Err(BenchError::usage(
        "machines must have successive ranks, as many each: have the launcher place them so \
         (mpirun --map-by slot, srun --distribution=block), or give --ranks-per-node",
    ))
}

/// The link between the ranks of a group; the worst of all groups that measure at once.
fn link(world: &Communicator, group: &Communicator, how: Repeat) -> Result<Link> {
    let seconds = |bytes| -> Result<f64> {
        let samples = repeat(group, Operation::AllToAllV, bytes, how)?;
        let own = median(&samples.iter().map(|s| s.service_s).collect::<Vec<f64>>());
        let ns = world.all_max(vec![(own * 1e9) as u64]).wait()?;
        Ok(ns[0].max(1) as f64 / 1e9)
    };
    let peers = (group.size() - 1) as f64;
    let moved = Operation::AllToAllV.moved_bytes(BANDWIDTH_BYTES, group.size());
    Ok(Link {
        latency_us: rounded(seconds(0)? / peers * 1e6),
        gb_per_s: rounded(moved / seconds(BANDWIDTH_BYTES)? / 1e9),
    })
}

/// Links that were measured.
#[derive(Clone, Copy, Debug)]
struct Links {
    intra_node: Option<Link>,
    inter_node: Option<Link>,
}

/// Measures the links; `per_node` divides the ranks.
fn links(comm: &Communicator, per_node: usize, how: Repeat) -> Result<Links> {
    let nodes = comm.size() / per_node;
    if nodes == 1 {
        return Ok(Links { intra_node: Some(link(comm, comm, how)?), inter_node: None });
    }
    let group = |name: &str, color: usize| -> Result<Communicator> {
        let split = comm.split(name, Some(color as u64), 0)?;
        Ok(split.expect("a rank with a color is in a group"))
    };
    let node = group("node", comm.rank() / per_node)?;
    let across = group("across", comm.rank() % per_node)?;
    let intra_node = if per_node > 1 { Some(link(comm, &node, how)?) } else { None };
    Ok(Links { intra_node, inter_node: Some(link(comm, &across, how)?) })
}

/// How many ranks are where.
#[derive(Clone, Copy, Debug)]
pub struct Nodes {
    /// Ranks on this machine, which share its memory.
    pub here: usize,
    /// Ranks that count as a node: a divisor of all ranks.
    pub per_node: usize,
}

/// What was measured, and how.
#[derive(Clone, Debug)]
pub struct Measured {
    ranks: usize,
    per_node: usize,
    device_gb_per_s: f64,
    device_bytes: Option<u64>,
    links: Links,
    machine: Machine,
}

/// Measures; all ranks call it. `cpu` has this rank's threads.
///
/// Errors: no memory; those of an operation between ranks.
pub fn measure(
    comm: &Communicator,
    nodes: Nodes,
    cpu: &Cpu,
    machine: &Machine,
    how: Repeat,
) -> Result<Measured> {
    Ok(Measured {
        ranks: comm.size(),
        per_node: nodes.per_node,
        device_gb_per_s: rounded(gather_gb_per_s(comm, cpu)?),
        device_bytes: machine.memory_mib.map(|mib| (mib << 20) / nodes.here as u64),
        links: links(comm, nodes.per_node, how)?,
        machine: machine.clone(),
    })
}

impl Measured {
    /// The planner's topology: preset `cpu` with what was measured.
    #[must_use]
    pub fn topology(&self) -> Topology {
        let mut topology = Topology::preset("cpu").expect("cpu is a preset");
        topology.name = format!("{} x {}, measured", self.ranks, self.machine.cpu.trim());
        topology.ranks_per_node = (self.per_node < self.ranks).then_some(self.per_node);
        topology.device_gb_per_s = self.device_gb_per_s;
        topology.intra_node = self.links.intra_node.unwrap_or(topology.intra_node);
        topology.inter_node = self.links.inter_node.unwrap_or(topology.inter_node);
        if let Some(bytes) = self.device_bytes {
            topology.device_bytes = bytes;
            // The towers' share: the preset's, but not most of a small memory.
            topology.reserve_bytes = topology.reserve_bytes.min(bytes / 8);
        }
        topology
    }

    /// The topology as TOML, of the keys that were measured.
    fn toml(&self) -> String {
        let topology = self.topology();
        let mut text = format!(
            "# Written by tessera-bench comm: {} ranks, {} a node. Keys that are not here were not\n\
             # measured and have the preset's values.\n\
             preset = \"cpu\"\nname = {}\n",
            self.ranks,
            self.per_node,
            serde_json::Value::from(topology.name.as_str()), // JSON's strings are TOML's
        );
        let mut line = |key: &str, value: f64| {
            writeln!(text, "{key} = {value}").expect("writing to a string does not fail");
        };
        if let Some(per_node) = topology.ranks_per_node {
            line("ranks_per_node", per_node as f64);
        }
        line("device_gb_per_s", topology.device_gb_per_s);
        for (kind, link) in
            [("intra_node", self.links.intra_node), ("inter_node", self.links.inter_node)]
        {
            if let Some(link) = link {
                line(&format!("{kind}_gb_per_s"), link.gb_per_s);
                line(&format!("{kind}_latency_us"), link.latency_us);
            }
        }
        if self.device_bytes.is_some() {
            line("device_bytes", topology.device_bytes as f64);
            line("reserve_bytes", topology.reserve_bytes as f64);
        }
        text
    }

    /// Writes the file.
    ///
    /// Errors: [`BenchError::Topology`] when a figure is none that the planner takes;
    /// [`BenchError::Write`].
    pub fn write(&self, path: &Path) -> Result<()> {
        let faults = self.topology().faults();
        if !faults.is_empty() {
            let faults = faults.iter().map(|(key, rule)| format!("{key} {rule}"));
            return Err(BenchError::Topology(faults.collect::<Vec<_>>().join("; ")));
        }
        std::fs::write(path, self.toml())
            .map_err(|source| BenchError::Write { path: path.into(), source })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_blocks_of_machines_of_one_name() {
        let of = |names: &str| {
            let names: Vec<Vec<u8>> = names.split(' ').map(|name| name.into()).collect();
            ranks_per_node(&names)
        };
        assert_eq!(of("a a a").unwrap(), 3);
        assert_eq!(of("a a b b c c").unwrap(), 2);
        assert_eq!(of("a b c").unwrap(), 1);
        for names in ["a b a b", "a a b", "a a b b b b", "a b b a"] {
            assert!(of(names).unwrap_err().to_string().contains("--ranks-per-node"), "{names}");
        }
    }

    #[test]
    fn four_digits_are_kept() {
        assert_eq!(rounded(12.345_678), 12.35);
        assert_eq!(rounded(0.000_123_456), 0.000_123_5);
        assert_eq!(rounded(1_234_567.0), 1_235_000.0);
    }
}
