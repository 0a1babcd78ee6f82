//! That the pieces of a manifest tile its tensors: every element is in exactly one.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use super::manifest::{Entry, Manifest, Piece};
use crate::{Error, Result};

/// A piece within its tensor, as half-open ranges.
struct Tile {
    rows: (u64, u64),
    columns: (u64, u64),
}

/// Elements of one row of a tensor of this shape; `None` for a number that no machine can hold.
fn row_elements(shape: &[u64]) -> Option<u64> {
    shape.iter().skip(1).try_fold(1, |product: u64, &n| product.checked_mul(n))
}

/// Which elements of each row of `tensor` a piece holds, as (first, end).
///
/// `None` where that is more than there are.
pub(super) fn columns(tensor: &Entry, piece: &Piece) -> Option<(u64, u64)> {
    let width = row_elements(&tensor.shape)?;
    let first = piece.first_column.unwrap_or(0);
    let end = match piece.columns {
        Some(columns) => first.checked_add(columns)?,
        None => width,
    };
    (first <= end && end <= width).then_some((first, end))
}

/// Checks that every element of every tensor is in exactly one piece; of an increment, that none is
/// in two.
///
/// Errors: [`Error::BadFile`] for `path`, the manifest's place, with the tensor and the elements.
pub(super) fn check(path: &Path, manifest: &Manifest) -> Result<()> {
    let mut pieces: HashMap<&str, Vec<&Piece>> = HashMap::new();
    let cold: Vec<Piece> = manifest.cold.iter().flat_map(Manifest::cold_pieces).collect();
    for piece in manifest.shards.iter().flat_map(|shard| &shard.pieces).chain(&cold) {
        pieces.entry(&piece.tensor).or_default().push(piece);
    }
    let bad = |reason: String| Error::BadFile { path: path.into(), reason };
    for tensor in &manifest.tensors {
        let pieces = pieces.remove(tensor.name.as_str()).unwrap_or_default();
        let whole = manifest.chain.is_empty();
        tiles(tensor, &pieces, whole)
            .map_err(|reason| bad(format!("{}: {reason}", tensor.name)))?;
    }
    match pieces.keys().next() {
        Some(name) => Err(bad(format!("a shard holds {name}, which is no tensor of the model"))),
        None => Ok(()),
    }
}

/// Rectangles that lie inside, do not overlap and, if they are `whole`, have the area of the whole
/// tile it.
fn tiles(tensor: &Entry, pieces: &[&Piece], whole: bool) -> std::result::Result<(), String> {
    let Some(&rows) = tensor.shape.first() else { return Err("no rows in its shape".into()) };
    let Some(width) = row_elements(&tensor.shape) else {
        return Err(format!("shape {:?} is too large", tensor.shape));
    };
    let mut tiles = Vec::with_capacity(pieces.len());
    for piece in pieces {
        let end = piece.first_row.checked_add(piece.rows).filter(|&end| end <= rows);
        let (Some(end), Some(columns)) = (end, columns(tensor, piece)) else {
            return Err(format!(
                "a piece has {} rows from row {} (columns: {:?} from {:?}), the tensor is {rows} x \
                 {width}",
                piece.rows, piece.first_row, piece.columns, piece.first_column
            ));
        };
        if piece.listed.as_ref().is_some_and(|listed| whole || listed.count > piece.rows) {
            return Err(format!("some of {} rows are no part of a whole", piece.rows));
        }
        tiles.push(Tile { rows: (piece.first_row, end), columns });
    }
    tiles.retain(|tile| tile.rows.0 < tile.rows.1 && tile.columns.0 < tile.columns.1);
    tiles.sort_unstable_by_key(|tile| (tile.rows, tile.columns));
    if let Some((row, column)) = overlap(&tiles) {
        return Err(format!("row {row} column {column} is in two pieces"));
    }
    let area = |tile: &Tile| {
        u128::from(tile.rows.1 - tile.rows.0) * u128::from(tile.columns.1 - tile.columns.0)
    };
    let (held, wanted) =
        (tiles.iter().map(area).sum::<u128>(), u128::from(rows) * u128::from(width));
    if whole && held != wanted {
        return Err(format!("{} of its {wanted} elements are in no shard", wanted - held));
    }
    Ok(())
}

/// An element that two tiles have, if there is one. A sweep over the rows: `open` holds the
/// columns of the tiles that the current row crosses, which are apart from each other.
fn overlap(tiles: &[Tile]) -> Option<(u64, u64)> {
    let mut open: BTreeMap<u64, (u64, u64)> = BTreeMap::new(); // first column -> (end, end row)
    for tile in tiles {
        let row = tile.rows.0;
        let (first, end) = tile.columns;
        // Whoever ends above is closed when it is in the way, so that each is looked at once.
        while let Some((&other, &(other_end, end_row))) = open.range(..end).next_back() {
            if other_end <= first {
                break;
            }
            if end_row > row {
                return Some((row, other.max(first)));
            }
            open.remove(&other);
        }
        open.insert(first, (end, tile.rows.1));
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn entry(rows: u64, shape: &[u64]) -> Entry {
        let shape = std::iter::once(&rows).chain(shape).copied().collect();
        Entry { name: "t".into(), dtype: "F32".into(), shape }
    }

    fn piece(rows: (u64, u64), columns: Option<(u64, u64)>) -> Piece {
        Piece {
            tensor: "t".into(),
            first_row: rows.0,
            rows: rows.1,
            first_column: columns.map(|columns| columns.0),
            columns: columns.map(|columns| columns.1),
            listed: None,
        }
    }

    fn said(tensor: &Entry, pieces: &[Piece]) -> String {
        tiles(tensor, &pieces.iter().collect::<Vec<_>>(), true).unwrap_err()
    }

    #[test]
    fn a_gap_an_overlap_and_the_outside_are_told() {
        let tensor = entry(10, &[2, 3]);
        let all = |pieces: &[Piece]| tiles(&tensor, &pieces.iter().collect::<Vec<_>>(), true);
        all(&[piece((0, 10), None)]).unwrap();
        all(&[piece((4, 6), None), piece((0, 4), None), piece((4, 0), None)]).unwrap();
        all(&[piece((0, 10), Some((0, 4))), piece((0, 10), Some((4, 2)))]).unwrap();
        assert_eq!(said(&tensor, &[]), "60 of its 60 elements are in no shard");
        let missing = [piece((0, 9), None), piece((9, 1), Some((1, 5)))];
        assert_eq!(said(&tensor, &missing), "1 of its 60 elements are in no shard");
        let twice = [piece((0, 7), Some((0, 4))), piece((6, 4), Some((3, 3)))];
        assert_eq!(said(&tensor, &twice), "row 6 column 3 is in two pieces");
        for outside in [
            piece((0, 11), None),
            piece((u64::MAX, 2), None),
            piece((0, 10), Some((2, 5))),
            piece((0, 10), Some((7, 0))),
            piece((0, 10), Some((2, u64::MAX))),
        ] {
            let said = said(&tensor, &[outside]);
            assert!(said.ends_with("the tensor is 10 x 6"), "{said}");
        }
        assert!(said(&entry(1, &[u64::MAX, 2]), &[]).contains("too large"));
        tiles(&entry(0, &[4]), &[], true).unwrap();
    }

    proptest! {
        /// Against counting each element.
        #[test]
        fn rectangles_are_judged_as_by_counting(
            (rows, width) in (0u64..6, 1u64..6),
            drawn in prop::collection::vec((0u64..6, 0u64..6, 0u64..6, 0u64..6), 0..6),
            rest in any::<bool>(),
        ) {
            let mut pieces: Vec<Piece> = drawn
                .into_iter()
                .map(|(row, rows, column, columns)| piece((row, rows), Some((column, columns))))
                .filter(|p| p.first_row + p.rows <= rows)
                .filter(|p| p.first_column.unwrap() + p.columns.unwrap() <= width)
                .collect();
            let mut times = vec![0; (rows * width) as usize];
            let mut count = |pieces: &[Piece]| {
                times.fill(0);
                for p in pieces {
                    for row in p.first_row..p.first_row + p.rows {
                        for column in 0..p.columns.unwrap() {
                            times[(row * width + p.first_column.unwrap() + column) as usize] += 1;
                        }
                    }
                }
                times.clone()
            };
            if rest {
                // Fill the gaps, or nearly no drawing would be a tiling.
                let missing = count(&pieces);
                let at = (0..).zip(missing).filter(|&(_, times)| times == 0);
                pieces.extend(at.map(|(i, _)| piece((i / width, 1), Some((i % width, 1)))));
            }
            let whole = count(&pieces).iter().all(|&times| times == 1);
            let refs: Vec<&Piece> = pieces.iter().collect();
            prop_assert_eq!(tiles(&entry(rows, &[width]), &refs, true).is_ok(), whole);
        }
    }
}
