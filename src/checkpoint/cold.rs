//! Tables of a checkpoint that lie in a log's files: rows by number, first values for the others.
//!
//! A piece's files are read once from front to back, which finds every row, and then by batches of
//! rows. Memory: 8 bytes a row of the pieces of one table, and one batch.

use std::cell::RefCell;
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

use tessera_cache::log::{Image, check_file};
use tessera_cache::{Plane, PlanesMut};
use tessera_embedding::{
    FirstWeights, Pooling, Precision, SparseOptimizer, TableKind, TableSpec, Window,
};

use super::Checkpoint;
use super::agree::Meet;
use super::manifest::{ColdField, ColdPiece, Entry};
use crate::{Error, Result};

/// Bytes of rows read at a time.
const BATCH_BYTES: usize = 16 << 20;

/// Checks what the manifest at `path` says of a piece, as far as nothing else does.
///
/// Errors: [`Error::BadFile`].
pub(super) fn check(path: &Path, piece: &ColdPiece) -> Result<()> {
    let bad = |reason: String| {
        let reason = format!("{}: {reason}", piece.folder);
        Err(Error::BadFile { path: path.into(), reason })
    };
    if piece.steps.len() != piece.snapshot.files.len() {
        return bad(format!(
            "{} steps for {} files",
            piece.steps.len(),
            piece.snapshot.files.len()
        ));
    }
    let plain = |name: &str| !name.is_empty() && !name.contains(['/', '\\']) && name != "..";
    if !plain(&piece.folder) {
        return bad("it is no name of a folder".into());
    }
    if piece.fields.is_empty() || piece.rows.checked_add(piece.first_row).is_none() {
        return bad("no tensor has so many rows".into());
    }
    Ok(())
}

impl Checkpoint {
    /// Where a file of a piece lies.
    fn place(&self, piece: &ColdPiece, file: usize) -> std::path::PathBuf {
        let folder = self.folder_of(piece.steps[file]).join(&piece.folder);
        folder.join(&piece.snapshot.files[file].name)
    }

    /// Holds one file of a piece against the manifest.
    ///
    /// Errors: the file, and the first wrong record.
    pub(super) fn verify_cold(&self, piece: &ColdPiece, file: usize) -> Result<()> {
        let path = self.place(piece, file);
        if !path.is_file() {
            let source = std::io::ErrorKind::NotFound.into();
            return Err(Error::Read { path, source });
        }
        let (snapshot, rows) = (&piece.snapshot, piece.rows);
        Ok(check_file(snapshot, rows, &snapshot.files[file], &path)?)
    }
}

/// The pieces of a checkpoint, opened as they are asked for.
pub(super) struct ColdReader<'a> {
    checkpoint: &'a Checkpoint,
    pieces: Vec<&'a ColdPiece>,
    /// Images of pieces, all of the same table.
    open: RefCell<Vec<(usize, Rc<Opened>)>>,
    /// The batch read last: tensors of a table are asked for one after another.
    batch: RefCell<Batch>,
}

struct Opened {
    image: Image,
    first: Option<FirstWeights>,
}

/// Planes of some rows of a piece.
#[derive(Default)]
struct Batch {
    /// Of which piece, and which of its rows.
    what: Option<(usize, Range<u64>)>,
    weights: Vec<u8>,
    state: Vec<u8>,
}

impl<'a> ColdReader<'a> {
    pub(super) fn new(checkpoint: &'a Checkpoint, pieces: Vec<&'a ColdPiece>) -> Self {
        Self { checkpoint, pieces, open: RefCell::default(), batch: RefCell::default() }
    }

    /// Copies `columns` of `rows` of a field's tensor to `out`, row i to `out[i * stride..]`, in
    /// bytes. All are numbered as in the tensor and lie in the piece; an element has `element`
    /// bytes.
    #[allow(clippy::too_many_arguments)] // a rectangle, and where it goes
    pub(super) fn read(
        &self,
        piece: usize,
        field: usize,
        rows: Range<usize>,
        columns: Range<usize>,
        element: usize,
        out: &mut [u8],
        stride: usize,
        meet: &mut Meet,
    ) -> Result<()> {
        let opened = self.opened(piece, meet)?;
        let ColdPiece { first_row, fields, .. } = self.pieces[piece];
        let field = &fields[field];
        let layout = opened.image.layout();
        let (width, at) = (layout.row_bytes(field.plane), field.at as usize);
        let column = |column: usize| at + (column - field.first_column as usize) * element;
        let wanted = column(columns.start)..column(columns.end);
        let batch_rows = (BATCH_BYTES / (layout.weight_bytes + layout.state_bytes).max(1)).max(1);
        let start = rows.start;
        for first in rows.clone().step_by(batch_rows) {
            meet()?;
            let end = rows.end.min(first + batch_rows);
            let within = first as u64 - first_row..end as u64 - first_row;
            let mut batch = self.batch.borrow_mut();
            batch.fill(&opened, piece, within)?;
            let plane = match field.plane {
                Plane::Weights => &batch.weights,
                Plane::State => &batch.state,
            };
            let out = &mut out[(first - start) * stride..];
            for (i, row) in plane.chunks_exact(width).enumerate() {
                out[i * stride..][..wanted.len()].copy_from_slice(&row[wanted.clone()]);
            }
        }
        Ok(())
    }

    /// The image of a piece.
    fn opened(&self, piece: usize, meet: &mut Meet) -> Result<Rc<Opened>> {
        let mut open = self.open.borrow_mut();
        if let Some((_, opened)) = open.iter().find(|(other, _)| *other == piece) {
            return Ok(Rc::clone(opened));
        }
        let table = |piece: usize| &self.pieces[piece].fields[0].tensor;
        open.retain(|(other, _)| table(*other) == table(piece));
        let stored = self.pieces[piece];
        let mut image = Image::new(&stored.snapshot, stored.rows)?;
        for (number, file) in stored.snapshot.files.iter().enumerate() {
            meet()?;
            image.add(file, &self.checkpoint.place(stored, number))?;
        }
        image.finish()?;
        let layout = image.layout();
        for field in &stored.fields {
            let entry = self.entry(field);
            let bytes = field.columns as usize * entry_bytes(entry);
            if field.at as usize + bytes > layout.row_bytes(field.plane) {
                let reason = format!("{} does not lie in its records", field.tensor);
                return Err(Error::BadFile { path: self.checkpoint.folder.clone(), reason });
            }
        }
        let opened = Rc::new(Opened { image, first: self.first(stored) });
        open.push((piece, Rc::clone(&opened)));
        Ok(opened)
    }

    fn entry(&self, field: &ColdField) -> &Entry {
        let entries = &self.checkpoint.manifest.tensors;
        entries.iter().find(|entry| entry.name == field.tensor).expect("its cover was checked")
    }

    /// What draws the first weights of a piece, unless they are zero.
    fn first(&self, piece: &ColdPiece) -> Option<FirstWeights> {
        let first = piece.first.as_ref()?;
        let field = piece.fields.iter().find(|field| field.plane == Plane::Weights)?;
        let entry = self.entry(field);
        let table = TableSpec {
            kind: TableKind::Static,
            name: first.table.clone(),
            rows: piece.rows,
            dim: field.columns as usize,
            precision: match entry.dtype.as_str() {
                "F16" => Precision::Fp16,
                "BF16" => Precision::Bf16,
                _ => Precision::Fp32,
            },
            pooling: Pooling::Sum,
            init: first.init,
            optimizer: SparseOptimizer::Sgd { lr: 0.0 },
        };
        let window = Window {
            rows: entry.shape[0],
            dim: entry.shape[1..].iter().product::<u64>() as usize,
            first_row: piece.first_row,
            first_column: field.first_column as usize,
        };
        Some(FirstWeights::new(&table, &window, first.seed))
    }
}

impl Batch {
    /// Makes it the planes of `rows` of a piece.
    fn fill(&mut self, opened: &Opened, piece: usize, rows: Range<u64>) -> Result<()> {
        let what = Some((piece, rows.clone()));
        if self.what == what {
            return Ok(());
        }
        self.what = None;
        let layout = opened.image.layout();
        let rows: Vec<u64> = rows.collect();
        let Self { weights, state, .. } = self;
        for (plane, width) in
            [(&mut *weights, layout.weight_bytes), (&mut *state, layout.state_bytes)]
        {
            plane.clear();
            plane.resize(rows.len() * width, 0);
        }
        let mut found = vec![false; rows.len()];
        opened.image.get(&rows, PlanesMut { weights, state }, &mut found)?;
        if let Some(first) = &opened.first {
            let width = layout.weight_bytes;
            for (i, _) in found.iter().enumerate().filter(|(_, found)| !**found) {
                first.fill(&rows[i..=i], &mut weights[i * width..(i + 1) * width]);
            }
        }
        self.what = what;
        Ok(())
    }
}

/// Bytes of an element.
fn entry_bytes(entry: &Entry) -> usize {
    if entry.dtype == "F32" { 4 } else { 2 }
}
