//! Increments of tables in memory: the rows that were written since, over the checkpoint before.

use std::path::Path;

use proptest::prelude::*;
use tempfile::tempdir;
use tessera::checkpoint::{self, Checkpoint, Disk, Extent};
use tessera::config::ColdFormat;
use tessera::tensors::{Dtype, Tensor};
use tessera_comm::{Options, threads};

use crate::parts::{Layout, NOTHING, moment, tensor};

const RANKS: usize = 3;

fn tensors() -> Vec<Tensor> {
    vec![
        tensor("tables.a.weight", Dtype::F32, &[200, 64]),
        tensor("tables.a.sum", Dtype::F32, &[200]),
        tensor("tables.b.weight", Dtype::F16, &[5, 3]),
        tensor("dense.top.0.bias", Dtype::F32, &[7]),
    ]
}

/// Writes step `step`: `changed` rows of both tables are as of that moment, and all of the rest.
fn write(
    run: &Path,
    layout: &Layout,
    moments: &mut [Vec<u8>; 3],
    step: u8,
    changed: &[usize],
    base: Option<u64>,
) -> u64 {
    for (table, moments) in moments.iter_mut().enumerate() {
        let rows = moments.len();
        if table == 2 {
            moments.fill(step);
        } else {
            changed.iter().filter(|&&row| row < rows).for_each(|&row| moments[row] = step);
        }
    }
    let written = threads::run(layout.ranks, &Options::default(), |ranks| {
        let mut part = layout.part(&tensors(), ranks.rank(), NOTHING);
        part.set_moments(|tensor, row| moments[[0, 0, 1, 2][tensor]][row]);
        part.changed = Some(changed.to_vec());
        let extent = Extent { cold: ColdFormat::Auto, base };
        let (folder, config) = (run.join("checkpoints"), toml::Table::new());
        let step = moment(u64::from(step));
        checkpoint::write(&Disk, &ranks, &folder, &part, &step, &config, extent)
    });
    let mut bytes = 0;
    for written in written.unwrap() {
        let written = written.unwrap();
        assert_eq!(written.is_increment, base.is_some());
        bytes = written.bytes;
    }
    bytes
}

fn check(path: &Path, layout: &Layout, moments: &[Vec<u8>; 3]) {
    let found = Checkpoint::find(path).unwrap();
    let alike = threads::run(layout.ranks, &Options::default(), |ranks| {
        let mut wanted = layout.part(&tensors(), ranks.rank(), NOTHING);
        wanted.set_moments(|tensor, row| moments[[0, 0, 1, 2][tensor]][row]);
        let mut part = layout.part(&tensors(), ranks.rank(), NOTHING);
        found.load(&ranks, &mut part, true).unwrap();
        part.contents() == wanted.contents()
    });
    assert!(alike.unwrap().into_iter().all(|alike| alike), "values differ: {}", path.display());
}

fn layouts() -> Vec<Layout> {
    vec![
        Layout::single(&tensors()),
        Layout::by_rows(&tensors(), RANKS),
        Layout::by_columns(&tensors(), 2),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Each moment of a chain loads in any layout as it was.
    #[test]
    fn a_chain_holds_each_of_its_moments(
        layout in 0usize..3,
        other in 0usize..3,
        changes in prop::collection::vec(prop::collection::btree_set(0usize..200, 0..40), 1..5),
    ) {
        let folder = tempdir().unwrap();
        let run = folder.path();
        let layouts = layouts();
        let mut moments = [vec![0; 200], vec![0; 5], vec![0; 7]];
        let all: Vec<usize> = (0..200).collect();
        write(run, &layouts[layout], &mut moments, 1, &all, None);
        let mut then = vec![moments.clone()];
        for (i, changed) in changes.iter().enumerate() {
            let changed: Vec<usize> = changed.iter().copied().collect();
            let step = i as u8 + 2;
            write(run, &layouts[layout], &mut moments, step, &changed, Some(u64::from(step) - 1));
            then.push(moments.clone());
        }
        for (i, moments) in then.iter().enumerate() {
            check(&run.join(format!("checkpoints/step-{}", i + 1)), &layouts[other], moments);
        }
    }
}

#[test]
fn an_increment_is_as_large_as_what_changed() {
    let folder = tempdir().unwrap();
    let run = folder.path();
    let layout = Layout::single(&tensors());
    let mut moments = [vec![0; 200], vec![0; 5], vec![0; 7]];
    let all: Vec<usize> = (0..200).collect();
    let whole = write(run, &layout, &mut moments, 1, &all, None);
    let few = write(run, &layout, &mut moments, 2, &[3, 4, 150], Some(1));
    let none = write(run, &layout, &mut moments, 3, &[], Some(2));
    assert!(whole > 200 * 260 && few < none + 6 * 1024 + 3 * 268, "{whole} {few} {none}");
    // The base is gone: the next one is whole, and says so.
    std::fs::remove_dir_all(run.join("checkpoints/step-3")).unwrap();
    let part = layout.part(&tensors(), 0, 9);
    let extent = Extent { cold: ColdFormat::Auto, base: Some(3) };
    let (folder, config) = (run.join("checkpoints"), toml::Table::new());
    let ranks = crate::parts::alone();
    let written =
        checkpoint::write(&Disk, &ranks, &folder, &part, &moment(4), &config, extent).unwrap();
    assert!(!written.is_increment);
    assert!(Checkpoint::find(run).unwrap().manifest.chain.is_empty());
}
