//! Checkpoints of earlier versions of the format.

use tempfile::tempdir;
use tessera::checkpoint::Checkpoint;
use tessera::tensors::Dtype;
use tessera_comm::{Options, threads};

use crate::parts::{Layout, NOTHING, tensor};

/// Version 1, of one process: pieces are whole rows and say nothing of columns.
const FIRST: &str = r#"{
  "format": "tessera-checkpoint", "version": 1,
  "moment": {"step": 7, "samples": 70, "updates": 7, "position": {"epoch": 0, "sample": 70},
    "seed": 1, "window": {"capacity": 1, "steps": []}, "best": null,
    "evaluations_without_improvement": 0, "judged": null},
  "config": "",
  "tensors": [{"name": "tables.a.weight", "dtype": "F32", "shape": [3, 2]},
    {"name": "tables.a.sum", "dtype": "F32", "shape": [3]}],
  "shards": [
    {"file": "shard-00000.safetensors", "bytes": 96, "crc32": 2863823276,
      "pieces": [{"tensor": "tables.a.weight", "first_row": 0, "rows": 2}]},
    {"file": "shard-00001.safetensors", "bytes": 164, "crc32": 1437520789,
      "pieces": [{"tensor": "tables.a.weight", "first_row": 2, "rows": 1},
        {"tensor": "tables.a.sum", "first_row": 0, "rows": 3}]}],
  "crc32": 3079341939
}"#;

fn shard(header: &str, values: &[f32]) -> Vec<u8> {
    let header = format!("{header:<0$}", header.len().next_multiple_of(8));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

#[test]
fn earlier_versions_are_read() {
    is_read(FIRST);
    // The second knew columns, which a piece of whole rows has none of.
    let second = FIRST.replace("\"version\": 1", "\"version\": 2");
    is_read(&second.replace("3079341939", "2286124909"));
    // The third knew positions, which ranks that read all data have none of.
    let third = FIRST.replace("\"version\": 1", "\"version\": 3");
    is_read(&third.replace("3079341939", "735335768"));
}

fn is_read(manifest: &str) {
    let folder = tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    std::fs::write(path("manifest.json"), manifest).unwrap();
    let header = r#"{"tables.a.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
    let values = [0.0, 1.0, 10.0, 11.0];
    std::fs::write(path("shard-00000.safetensors"), shard(header, &values)).unwrap();
    let header = r#"{"tables.a.weight":{"dtype":"F32","shape":[1,2],"data_offsets":[0,8]},"tables.a.sum":{"dtype":"F32","shape":[3],"data_offsets":[8,20]}}"#;
    let values = [20.0, 21.0, 0.5, 1.5, 2.5];
    std::fs::write(path("shard-00001.safetensors"), shard(header, &values)).unwrap();

    let found = Checkpoint::find(folder.path()).unwrap();
    assert_eq!(found.manifest.moment.step, 7);
    let tensors =
        [tensor("tables.a.weight", Dtype::F32, &[3, 2]), tensor("tables.a.sum", Dtype::F32, &[3])];
    let weights = |rank: usize| match rank {
        0 => vec![0.0f32, 10.0, 20.0],
        _ => vec![1.0, 11.0, 21.0],
    };
    let layout = Layout::by_columns(&tensors, 2);
    let parts = threads::run(2, &Options::default(), |ranks| {
        let mut part = layout.part(&tensors, ranks.rank(), NOTHING);
        found.load(&ranks, &mut part, true).unwrap();
        part
    });
    for (rank, part) in parts.unwrap().iter().enumerate() {
        let float = |b: &[u8]| f32::from_le_bytes(b.try_into().unwrap());
        let floats = |bytes: &[u8]| bytes.chunks(4).map(float).collect();
        let values: Vec<Vec<f32>> =
            part.contents().iter().map(|(_, bytes)| floats(bytes)).collect();
        assert_eq!(values, [weights(rank), vec![0.5, 1.5, 2.5]]);
    }
}

#[test]
fn a_later_version_is_refused() {
    let folder = tempdir().unwrap();
    let text = FIRST.replace("\"version\": 1", "\"version\": 5");
    std::fs::write(folder.path().join("manifest.json"), text).unwrap();
    let error = Checkpoint::find(folder.path()).unwrap_err().to_string();
    assert!(error.ends_with("version 5; this program reads tessera-checkpoint versions 1 to 4"));
}
