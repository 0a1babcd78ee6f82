//! `tessera export`: a checkpoint's weights as one safetensors file, in our names or a peer's.
//!
//! - `tessera`: logical names, optimizer states included.
//! - `dlrm`: the state dict of the DLRM reference implementation (`emb_l.K.weight`,
//!   `bot_l.2I.weight`, `top_l.2I.weight`; its activations are layers too, hence the 2). Its dot
//!   interaction has our order of pairs.
//! - `torchrec`: the state dict of TorchRec's `DLRM` and `DLRM_DCN`. Its dot interaction lists
//!   the upper triangle, (0,1), (0,2), ..., where ours lists the lower one, (1,0), (2,0), (2,1),
//!   ...; the first top layer's columns are permuted to it.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;

use tessera_dense::Interaction;
use tessera_embedding::{Pooling, TableKind};

use crate::checkpoint::{Checkpoint, CheckpointTensors};
use crate::cli::{self, Layout};
use crate::config::Config;
use crate::tensors::{Block, Tensor};
use crate::{Error, Result, console, safetensors_io};

/// Where a tensor of the export comes from.
struct Source {
    /// Tensor of the checkpoint.
    index: usize,
    /// For each element of a row, which element of the checkpoint's row it is; as it is if none.
    columns: Option<Vec<usize>>,
}

/// Runs `tessera export`.
///
/// Errors: a damaged checkpoint, a model that the layout cannot hold, or a failed write; no file
/// is left then.
pub fn run(args: &cli::Export) -> Result<()> {
    let checkpoint = Checkpoint::find(&args.checkpoint)?;
    let config = checkpoint.config()?;
    let tensors = CheckpointTensors::open(&checkpoint)?;
    let plan = match args.layout {
        Layout::Tessera => all(&tensors),
        Layout::Dlrm => dlrm(&config, &tensors)?,
        Layout::Torchrec => torchrec(&config, &tensors)?,
    };
    write(&args.out, &tensors, &plan)?;
    console::tell(format_args!(
        "wrote {} tensors of step {} to {}",
        plan.len(),
        checkpoint.manifest.moment.step,
        args.out.display()
    ));
    Ok(())
}

/// Writes beside the target and switches, so that a failure leaves no half a file.
fn write(out: &Path, tensors: &CheckpointTensors<'_>, plan: &[(String, Source)]) -> Result<()> {
    let failed = |source| Error::Write { path: out.into(), source };
    let mut part = out.as_os_str().to_owned();
    part.push(".part");
    let part = Path::new(&part);
    let exported: Vec<Tensor> = plan
        .iter()
        .map(|(name, source)| Tensor {
            name: name.clone(),
            ..tensors.tensors()[source.index].clone()
        })
        .collect();
    let mut file = BufWriter::new(File::create(part).map_err(failed)?);
    let mut rows_as_stored = Vec::new();
    let read = |i: usize, rows: Range<usize>, buffer: &mut Vec<u8>| {
        let Source { index, columns } = &plan[i].1;
        let tensor = &tensors.tensors()[*index];
        let block = Block::whole(*index, tensor).with_rows(rows);
        let Some(columns) = columns else { return tensors.read_block(&block, buffer) };
        tensors.read_block(&block, &mut rows_as_stored)?;
        let element = tensor.row_bytes() / columns.len();
        buffer.clear();
        for row in rows_as_stored.chunks_exact(columns.len() * element) {
            for &column in columns {
                buffer.extend(&row[column * element..(column + 1) * element]);
            }
        }
        Ok(())
    };
    let written = safetensors_io::write(&mut file, out, &exported, HashMap::new(), read)
        .and_then(|()| file.flush().map_err(failed))
        .and_then(|()| file.get_ref().sync_all().map_err(failed))
        .and_then(|()| std::fs::rename(part, out).map_err(failed));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = std::fs::remove_file(part);
    }
    written
}

fn all(tensors: &CheckpointTensors<'_>) -> Vec<(String, Source)> {
    let as_is =
        |(index, tensor): (usize, &Tensor)| (tensor.name.clone(), Source { index, columns: None });
    tensors.tensors().iter().enumerate().map(as_is).collect()
}

/// Finds weights by logical name and gives them a peer's.
struct Renamer<'t> {
    tensors: &'t CheckpointTensors<'t>,
    plan: Vec<(String, Source)>,
}

impl<'t> Renamer<'t> {
    fn new(tensors: &'t CheckpointTensors<'t>) -> Self {
        Self { tensors, plan: Vec::new() }
    }

    fn take(&mut self, name: &str, theirs: String, columns: Option<Vec<usize>>) {
        let index = self
            .tensors
            .find(name)
            .expect("a checkpoint holds the weights of its own configuration");
        self.plan.push((theirs, Source { index, columns }));
    }

    /// Weight and bias of layer `ours`.
    fn layer(&mut self, ours: &str, theirs: &str, columns: Option<Vec<usize>>) {
        self.take(&format!("{ours}.weight"), format!("{theirs}.weight"), columns);
        self.take(&format!("{ours}.bias"), format!("{theirs}.bias"), None);
    }
}

fn dlrm(config: &Config, tensors: &CheckpointTensors<'_>) -> Result<Vec<(String, Source)>> {
    let refuse = |reason: &str| Err(Error::Layout { layout: "dlrm", reason: reason.into() });
    if config.model.wide {
        return refuse("it has no wide part");
    }
    if config.tables.iter().any(|table| table.kind != TableKind::Static) {
        return refuse("its tables have rows, not ids");
    }
    if matches!(config.model.interaction, Interaction::Dcn { .. }) {
        return refuse("it has no cross layers");
    }
    if config.tables.iter().any(|table| table.features.len() > 1) {
        return refuse("its tables have one feature each");
    }
    if config.tables.iter().any(|table| table.pooling != Pooling::Sum || table.weighted) {
        return refuse("its bags are plain sums");
    }
    if config.model.bottom_mlp.is_empty() {
        return refuse("it always has a bottom MLP");
    }
    let mut renamer = Renamer::new(tensors);
    for (index, table) in config.tables.iter().enumerate() {
        let ours = format!("tables.{}.weight", table.name);
        renamer.take(&ours, format!("emb_l.{index}.weight"), None);
    }
    for (ours, theirs, layers) in [
        ("bottom", "bot_l", config.model.bottom_mlp.len()),
        ("top", "top_l", config.model.top_mlp.len()),
    ] {
        for layer in 0..layers {
            let theirs = format!("{theirs}.{}", 2 * layer);
            renamer.layer(&format!("dense.{ours}.{layer}"), &theirs, None);
        }
    }
    Ok(renamer.plan)
}

fn torchrec(config: &Config, tensors: &CheckpointTensors<'_>) -> Result<Vec<(String, Source)>> {
    let model = &config.model;
    let refuse = |reason: &str| Err(Error::Layout { layout: "torchrec", reason: reason.into() });
    if model.wide {
        return refuse("it has no wide part");
    }
    if config.tables.iter().any(|table| table.kind != TableKind::Static) {
        return refuse("its tables have rows, not ids");
    }
    if config.tables.iter().any(|table| table.weighted) {
        return refuse("its bags have no weights");
    }
    if model.bottom_mlp.is_empty() {
        return refuse("it always has a bottom MLP");
    }
    if model.top_mlp.len() < 2 {
        return refuse("its top MLP has at least two layers");
    }
    let dim = config.tables[0].dim;
    if config.tables.iter().any(|table| table.dim != dim) || model.bottom_mlp.last() != Some(&dim) {
        return refuse("all its vectors have one dim");
    }
    let mut renamer = Renamer::new(tensors);
    for table in &config.tables {
        let name = &table.name;
        let theirs = format!("sparse_arch.embedding_bag_collection.embedding_bags.{name}.weight");
        renamer.take(&format!("tables.{name}.weight"), theirs, None);
    }
    for layer in 0..model.bottom_mlp.len() {
        let theirs = format!("dense_arch.model._mlp.{layer}._linear");
        renamer.layer(&format!("dense.bottom.{layer}"), &theirs, None);
    }
    let mut first_columns = None;
    match model.interaction {
        Interaction::Dot => {
            let vectors = config.features().count() + 1;
            first_columns = Some(upper_triangle(dim, vectors));
        }
        Interaction::Dcn { layers, .. } => {
            for layer in 0..layers {
                for (ours, theirs) in [("v", "V_kernels"), ("w", "W_kernels"), ("bias", "bias")] {
                    let theirs = format!("inter_arch.crossnet.{theirs}.{layer}");
                    renamer.take(&format!("dense.cross.{layer}.{ours}"), theirs, None);
                }
            }
        }
        Interaction::Concat => return refuse("its models interact by dot or by cross layers"),
    }
    let last = model.top_mlp.len() - 1;
    for layer in 0..=last {
        let theirs = if layer == last {
            "over_arch.model.1".to_owned()
        } else {
            format!("over_arch.model.0._mlp.{layer}._linear")
        };
        renamer.layer(&format!("dense.top.{layer}"), &theirs, first_columns.take());
    }
    Ok(renamer.plan)
}

/// Columns of the layer after a dot interaction in the order of the upper triangle: the dense
/// vector's first, then pair (a, b), a < b, which ours lists as (b, a) at b (b - 1) / 2 + a.
fn upper_triangle(dim: usize, vectors: usize) -> Vec<usize> {
    let mut columns: Vec<usize> = (0..dim).collect();
    for a in 0..vectors {
        for b in a + 1..vectors {
            columns.push(dim + b * (b - 1) / 2 + a);
        }
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::upper_triangle;

    #[test]
    fn pairs_in_the_order_of_the_upper_triangle() {
        // Ours: (1,0) (2,0) (2,1) (3,0) (3,1) (3,2); theirs: (0,1) (0,2) (0,3) (1,2) (1,3) (2,3).
        assert_eq!(upper_triangle(2, 4), [0, 1, 2, 3, 5, 4, 6, 7]);
    }
}
