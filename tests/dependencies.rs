//! The arrows of the code map: which crate of the workspace may use which.

use std::collections::{BTreeMap, BTreeSet};

use cargo_metadata::MetadataCommand;

/// What each crate may depend on. The root package and the benchmarks may use all of them.
const ARROWS: [(&str, &[&str]); 6] = [
    ("tessera-device", &[]),
    ("tessera-data", &[]),
    ("tessera-comm", &["tessera-device"]),
    ("tessera-cache", &["tessera-device"]),
    ("tessera-dense", &["tessera-device"]),
    ("tessera-embedding", &["tessera-device", "tessera-cache", "tessera-comm", "tessera-data"]),
];

#[test]
fn crates_use_each_other_along_the_arrows_only() {
    let metadata = MetadataCommand::new()
        .manifest_path(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .no_deps()
        .other_options(["--offline".to_owned()])
        .exec()
        .unwrap();
    let ours: BTreeSet<&str> =
        metadata.packages.iter().map(|package| package.name.as_str()).collect();
    let arrows: BTreeMap<&str, &[&str]> = ARROWS.into_iter().collect();
    let mut faults = Vec::new();
    for package in &metadata.packages {
        let name = package.name.as_str();
        // Dependencies of tests and build scripts count too: they are code of the crate.
        for dependency in &package.dependencies {
            let other = dependency.name.as_str();
            if other == "cudarc" && name != "tessera-device" {
                faults.push(format!("{name} names cudarc, which tessera-device alone may"));
            }
            let free = ["tessera", "tessera-bench"].contains(&name);
            if !ours.contains(other) || (free && other != "tessera-bench") {
                continue;
            }
            match arrows.get(name) {
                Some(allowed) if allowed.contains(&other) => {}
                Some(_) => faults.push(format!("{name} -> {other} is no arrow of the code map")),
                None => faults.push(format!("{name} is not in the code map")),
            }
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    for needed in ["tessera", "tessera-device", "tessera-data", "tessera-embedding"] {
        assert!(ours.contains(needed), "{needed} is not in the workspace: {ours:?}");
    }
}
