//! What the machines can do: speeds, latencies and memory of one rank.

use crate::{EmbeddingError, Result};

/// A link between two ranks, one direction.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// 10^9 bytes a second that one rank can send while all others do.
    pub gb_per_s: f64,
    /// Microseconds that a message of no bytes takes; messages to several peers follow each other.
    pub latency_us: f64,
}

/// Speeds and memory, all of one rank. Sizes are bytes, speeds 10^9 bytes a second.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    /// For reports: a preset's name or the file it was read from.
    pub name: String,
    /// Ranks that share a node; `None`: all of them.
    pub ranks_per_node: Option<usize>,
    /// Memory that tables are looked up in.
    pub device_gb_per_s: f64,
    /// Between ranks of one node.
    pub intra_node: Link,
    /// Between ranks of different nodes.
    pub inter_node: Link,
    /// Between a device and its share of host memory.
    pub host_gb_per_s: f64,
    /// From a rank's share of the disks.
    pub ssd_gb_per_s: f64,
    /// Device memory.
    pub device_bytes: u64,
    /// Host memory for rows that the device has no room for; 0: there is no such tier.
    pub host_bytes: u64,
    /// Disk for rows that host memory has no room for; 0: there is no such tier.
    pub ssd_bytes: u64,
    /// Device memory kept free of tables and their buffers, for towers and the runtime.
    pub reserve_bytes: u64,
}

impl Topology {
    /// Names of the presets.
    pub const PRESETS: [&str; 3] = ["cpu", "a100", "h100"];

    /// Assumed numbers by name. They are published peaks or (`cpu`) round numbers of a server's
    /// core; measured ones are better.
    #[must_use]
    pub fn preset(name: &str) -> Option<Self> {
        let link = |gb_per_s, latency_us| Link { gb_per_s, latency_us };
        let gpu = |device_gb_per_s, nvlink, adapter, host_gb_per_s| Self {
            name: name.to_owned(),
            ranks_per_node: Some(8),
            device_gb_per_s,
            intra_node: link(nvlink, 2.0),
            inter_node: link(adapter, 5.0),
            host_gb_per_s,
            ssd_gb_per_s: 3.0,
            device_bytes: 80_000_000_000,
            host_bytes: 0,
            ssd_bytes: 0,
            reserve_bytes: 8_000_000_000,
        };
        match name {
            // Ranks are threads or processes of one machine: links are copies through memory.
            "cpu" => Some(Self {
                name: name.to_owned(),
                ranks_per_node: None,
                device_gb_per_s: 8.0,
                intra_node: link(4.0, 5.0),
                inter_node: link(1.25, 50.0),
                host_gb_per_s: 8.0,
                ssd_gb_per_s: 1.0,
                device_bytes: 64_000_000_000,
                host_bytes: 0,
                ssd_bytes: 0,
                reserve_bytes: 2_000_000_000,
            }),
            // HBM2e, NVLink 3, one 200 Gb/s adapter a GPU, PCIe 4.
            "a100" => Some(gpu(2039.0, 300.0, 25.0, 25.0)),
            // HBM3, NVLink 4, one 400 Gb/s adapter a GPU, PCIe 5.
            "h100" => Some(gpu(3350.0, 450.0, 50.0, 55.0)),
            _ => None,
        }
    }

    /// What is wrong with it: (field, rule).
    #[must_use]
    pub fn faults(&self) -> Vec<(&'static str, String)> {
        let mut faults = Vec::new();
        for (field, value) in [
            ("device_gb_per_s", self.device_gb_per_s),
            ("intra_node_gb_per_s", self.intra_node.gb_per_s),
            ("inter_node_gb_per_s", self.inter_node.gb_per_s),
            ("host_gb_per_s", self.host_gb_per_s),
            ("ssd_gb_per_s", self.ssd_gb_per_s),
        ] {
            if !(value > 0.0 && value.is_finite()) {
                faults.push((field, format!("must be above 0, is {value}")));
            }
        }
        for (field, value) in [
            ("intra_node_latency_us", self.intra_node.latency_us),
            ("inter_node_latency_us", self.inter_node.latency_us),
        ] {
            if !(value >= 0.0 && value.is_finite()) {
                faults.push((field, format!("must be at least 0, is {value}")));
            }
        }
        if self.ranks_per_node == Some(0) {
            faults.push(("ranks_per_node", "must be at least 1".into()));
        }
        if self.reserve_bytes >= self.device_bytes {
            faults.push((
                "reserve_bytes",
                format!("must be below device_bytes, {} bytes", self.device_bytes),
            ));
        }
        faults
    }

    /// Ranks of each node when there are `ranks` in all.
    ///
    /// Errors: [`EmbeddingError::PlanInput`] when the last node would not be full.
    pub fn node(&self, ranks: usize) -> Result<usize> {
        match self.ranks_per_node {
            None => Ok(ranks),
            Some(per_node) if ranks <= per_node => Ok(ranks),
            Some(per_node) if per_node > 0 && ranks.is_multiple_of(per_node) => Ok(per_node),
            Some(per_node) => Err(EmbeddingError::PlanInput {
                faults: vec![format!(
                    "{ranks} ranks do not fill nodes of {per_node}: set ranks_per_node of the \
                     topology to a divisor"
                )],
            }),
        }
    }

    /// Memory of all tiers of one rank that tables may use.
    #[must_use]
    pub fn capacity_bytes(&self) -> u64 {
        let device = self.device_bytes.saturating_sub(self.reserve_bytes);
        device.saturating_add(self.host_bytes).saturating_add(self.ssd_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_sound_and_senseless_numbers_are_named() {
        for name in Topology::PRESETS {
            assert_eq!(Topology::preset(name).unwrap().faults(), []);
        }
        assert_eq!(Topology::preset("abacus"), None);
        let mut topology = Topology::preset("h100").unwrap();
        topology.device_gb_per_s = f64::NAN;
        topology.inter_node.latency_us = -1.0;
        topology.reserve_bytes = topology.device_bytes;
        topology.ranks_per_node = Some(0);
        let fields: Vec<_> = topology.faults().into_iter().map(|fault| fault.0).collect();
        let wanted =
            ["device_gb_per_s", "inter_node_latency_us", "ranks_per_node", "reserve_bytes"];
        assert_eq!(fields, wanted);
    }

    #[test]
    fn nodes_are_full() {
        let h100 = Topology::preset("h100").unwrap();
        assert_eq!(h100.node(4).unwrap(), 4);
        assert_eq!(h100.node(16).unwrap(), 8);
        assert!(h100.node(12).unwrap_err().to_string().contains("do not fill nodes of 8"));
        assert_eq!(Topology::preset("cpu").unwrap().node(7).unwrap(), 7);
    }
}
