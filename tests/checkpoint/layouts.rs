//! Written on any ranks in any layout, loaded on any others in another one: the same values.

use std::path::Path;

use proptest::prelude::*;
use tempfile::tempdir;
use tessera::checkpoint::{self, Checkpoint, Disk};
use tessera::tensors::{Block, Dtype, Tensor};
use tessera_comm::{Options, threads};

use crate::parts::{Layout, NOTHING, save, table, tensor};

/// Writes moment 1 in layout `from`.
fn write(run: &Path, tensors: &[Tensor], from: &Layout) {
    let written = threads::run(from.ranks, &Options::default(), |ranks| {
        save(&Disk, &ranks, run, &from.part(tensors, ranks.rank(), 1), 5)
    });
    written.unwrap().into_iter().for_each(Result::unwrap);
}

/// Loads in layout `to` and compares every value on every rank.
fn read(run: &Path, tensors: &[Tensor], to: &Layout, states: bool) {
    let found = Checkpoint::find(run).unwrap();
    let alike = threads::run(to.ranks, &Options::default(), |ranks| {
        let mut part = to.part(tensors, ranks.rank(), NOTHING);
        found.load(&ranks, &mut part, states).unwrap();
        part.is(1, states)
    });
    assert!(alike.unwrap().into_iter().all(|alike| alike), "values differ");
}

/// A layout from drawn numbers, whatever they are: a tensor is cut at some rows and columns
/// (twice at the same place makes an empty block), and each block kept by one or more ranks.
fn layout(tensors: &[Tensor], ranks: usize, drawn: &[Vec<usize>]) -> Layout {
    let mut blocks = Vec::new();
    for (whole, drawn) in Block::all(tensors).into_iter().zip(drawn) {
        let mut next = drawn.iter().copied().cycle();
        let mut draw = move |below: usize| next.next().unwrap() % below;
        let mut cuts = |end: usize| {
            let mut cuts = vec![0, end];
            let count = draw(4);
            cuts.extend((0..count).map(|_| draw(end + 1)));
            cuts.sort_unstable();
            cuts
        };
        let (rows, columns) = (cuts(whole.rows.end), cuts(whole.columns.end));
        for rows in rows.windows(2) {
            for columns in columns.windows(2) {
                let first = draw(ranks);
                let keepers = (0..=draw(ranks)).map(|i| (first + i) % ranks).collect();
                let (rows, columns) = (rows[0]..rows[1], columns[0]..columns[1]);
                blocks.push((Block { rows, columns, ..whole }, keepers));
            }
        }
    }
    Layout { ranks, blocks }
}

fn drawn() -> impl Strategy<Value = (usize, Vec<Vec<usize>>)> {
    (1usize..=5, prop::collection::vec(prop::collection::vec(0usize..1000, 40), 4))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_layout_loads_in_any_other(
        shapes in prop::collection::vec((0usize..40, 1usize..9), 4),
        (n, from) in drawn(),
        (m, to) in drawn(),
        states in any::<bool>(),
    ) {
        let dtypes = [Dtype::F32, Dtype::F16, Dtype::BF16, Dtype::F32];
        let mut tensors: Vec<Tensor> = shapes
            .iter()
            .zip(dtypes)
            .enumerate()
            .map(|(i, (&(rows, columns), dtype))| {
                tensor(&format!("tables.{i}.weight"), dtype, &[rows, columns])
            })
            .collect();
        tensors[3] = tensor("tables.2.sum", Dtype::F32, &[shapes[2].0]);
        let folder = tempdir().unwrap();
        write(folder.path(), &tensors, &layout(&tensors, n, &from));
        read(folder.path(), &tensors, &layout(&tensors, m, &to), states);
    }
}

/// Larger than what passes through memory at a time, and than what a rank keeps.
#[test]
fn rows_become_columns_and_columns_rows() {
    let tensors = [tensor("tables.a.weight", Dtype::F32, &[250_001, 24]), table()[1].clone()];
    let (rows, columns) = (Layout::by_rows(&tensors, 8), Layout::by_columns(&tensors, 6));
    for (from, to) in [(&rows, &columns), (&columns, &rows), (&columns, &Layout::single(&tensors))]
    {
        let folder = tempdir().unwrap();
        write(folder.path(), &tensors, from);
        read(folder.path(), &tensors, to, true);
    }
}

/// More ranks than rows, a table without rows, and a rank without anything.
#[test]
fn empty_blocks_and_tables_are_no_hindrance() {
    let tensors = [
        tensor("tables.few.weight", Dtype::F32, &[2, 3]),
        tensor("tables.none.weight", Dtype::F32, &[0, 3]),
        tensor("dense.top.0.bias", Dtype::F32, &[4]),
    ];
    let mut idle = Layout::single(&tensors);
    idle.ranks = 3;
    let replicated = Block::all(&tensors).into_iter().map(|block| (block, vec![2, 0, 1])).collect();
    let layouts = [
        Layout::by_rows(&tensors, 5),
        Layout::by_columns(&tensors, 4),
        Layout { ranks: 3, blocks: replicated },
        Layout::single(&tensors),
        idle,
    ];
    for from in &layouts {
        let folder = tempdir().unwrap();
        write(folder.path(), &tensors, from);
        layouts.iter().for_each(|to| read(folder.path(), &tensors, to, true));
    }
}

/// Weights that `--init` reads are rounded to the model's type on whichever rank has them.
#[test]
fn a_weights_file_is_read_in_any_layout() {
    let tensors = [
        tensor("tables.a.weight", Dtype::F32, &[20, 6]),
        tensor("tables.a.sum", Dtype::F32, &[20]),
        tensor("tables.b.weight", Dtype::F16, &[3, 2]),
    ];
    let folder = tempdir().unwrap();
    let path = folder.path().join("weights.safetensors");
    let a: Vec<f32> = (0..120).map(|i| i as f32 * 0.5).collect();
    let mut b = [0.0f32, 1.0, 2.0, 3.0, 4.0, 5.0];
    let file = |b: &[f32]| {
        let header = r#"{"tables.a.weight":{"dtype":"F32","shape":[20,6],"data_offsets":[0,480]},"tables.b.weight":{"dtype":"F32","shape":[3,2],"data_offsets":[480,504]}}"#;
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(a.iter().chain(b).flat_map(|value| value.to_le_bytes()));
        std::fs::write(&path, bytes).unwrap();
    };
    let halves: Vec<u8> = b.iter().flat_map(|&x| half::f16::from_f32(x).to_le_bytes()).collect();
    // The file lacks the states: they stay as they are.
    let whole = Layout::single(&tensors).part(&tensors, 0, NOTHING);
    let states = whole.contents()[1].1.clone();
    let layouts =
        [Layout::single(&tensors), Layout::by_rows(&tensors, 3), Layout::by_columns(&tensors, 4)];
    for to in &layouts {
        file(&b);
        let parts = threads::run(to.ranks, &Options::default(), |ranks| {
            let mut part = to.part(&tensors, ranks.rank(), NOTHING);
            checkpoint::init(&path, &ranks, &mut part).map(|()| part)
        });
        for part in parts.unwrap().into_iter().map(Result::unwrap) {
            for (block, bytes) in part.contents() {
                let (values, element) = match block.tensor {
                    0 => (bytemuck::cast_slice(&a), 4),
                    1 => (&states[..], 4),
                    _ => (&halves[..], 2),
                };
                let width = tensors[block.tensor].columns();
                let expected = block.rows.clone().flat_map(|row| {
                    let row = &values[row * width * element..(row + 1) * width * element];
                    &row[block.columns.start * element..block.columns.end * element]
                });
                assert!(bytes.iter().eq(expected), "{block:?}");
            }
        }
        // 1e6 is no finite f16: whoever has it refuses, and nobody has written.
        b[5] = 1e6;
        file(&b);
        let ends = threads::run(to.ranks, &Options::default(), |ranks| {
            let mut part = to.part(&tensors, ranks.rank(), NOTHING);
            let error = checkpoint::init(&path, &ranks, &mut part).unwrap_err().to_string();
            (error, part.is(NOTHING, true))
        });
        for (error, untouched) in ends.unwrap() {
            assert!(error.ends_with("tables.b.weight row 2 column 1 is inf as F16"), "{error}");
            assert!(untouched);
        }
        b[5] = 5.0;
    }
}
