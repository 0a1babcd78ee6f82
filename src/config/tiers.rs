//! `[tiers]`: memory of a rank's tables, where not all of them fit.

use std::path::PathBuf;

use tessera_cache::Policy;
use tessera_cache::log::Reader;
use tessera_embedding::{ColdTier, Tiers};

use super::section::Section;

/// Reads the section; nothing in it means that all rows are in device memory.
pub(super) fn tiers(mut section: Section<'_>) -> Option<Tiers> {
    if section.is_empty() {
        section.finish(None);
        return None;
    }
    let device_bytes = section.required("device_bytes", 1u64);
    let host_bytes = section.optional::<u64>("host_bytes");
    let dir = section.paths("ssd_dir").and_then(|paths| one(&section, paths));
    let bytes = section.optional::<u64>("ssd_bytes");
    let readers = [("auto", Reader::Auto), ("mmap", Reader::Mmap), ("io_uring", Reader::Uring)];
    let reader = section.choice("ssd_reader", &readers);
    let policy = section.choice("policy", &[("lru", Policy::Lru), ("lfu", Policy::Lfu)]);
    if device_bytes == 0 {
        section.fault("device_bytes", "is 0; rows are looked up in the device tier");
    }
    if bytes == Some(0) {
        section.fault("ssd_bytes", "is 0; leave it out for no bound");
    }
    if dir.is_none() && bytes.is_some() {
        section.fault("ssd_bytes", "has a meaning with ssd_dir only");
    }
    if dir.is_none() && reader != Reader::Auto {
        section.fault("ssd_reader", "has a meaning with ssd_dir only");
    }
    section.finish(None);
    let cold = dir.map(|dir| ColdTier { dir, bytes, reader });
    Some(Tiers { device_bytes, host_bytes, cold, policy })
}

/// The only path of a list.
fn one(section: &Section<'_>, mut paths: Vec<PathBuf>) -> Option<PathBuf> {
    if paths.len() > 1 {
        section.fault("ssd_dir", "is one folder");
    }
    paths.pop()
}
