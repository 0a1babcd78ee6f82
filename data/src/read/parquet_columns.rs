//! Decoded columns of a Parquet file: their values in the types of batches, checked as they are
//! given out, so that a fault is met only by who reads its row.

use std::ops::Range;

use arrow::array::{
    Array, ArrayRef, AsArray, Float32Array, Int64Array, ListArray, RecordBatch, UInt64Array,
};
use arrow::buffer::NullBuffer;
use arrow::compute::cast;
use arrow::datatypes::{DataType, Float32Type, Int64Type, UInt64Type};

use super::parquet::{FeaturePlan, Plan};
use crate::batch::BatchBuilder;
use crate::jagged::JaggedBuilder;

/// A value that cannot be used: its row among the loaded ones and why.
pub(super) struct Fault {
    pub(super) row: usize,
    pub(super) column: String,
    pub(super) reason: String,
}

/// Decoded rows in the types that batches use.
pub(super) struct Loaded {
    pub(super) rows: usize,
    /// The next row to give out.
    pub(super) at: usize,
    dense: Vec<Float32Array>,
    label: Float32Array,
    sample_weight: Option<Float32Array>,
    group: Option<Integers>,
    features: Vec<LoadedFeature>,
}

struct LoadedFeature {
    ids: Integers,
    bags: Bags,
    weights: Option<(Float32Array, Bags)>,
}

impl Loaded {
    /// The columns of `plan` in a decoded batch.
    pub(super) fn new(
        batch: &RecordBatch,
        plan: &Plan,
    ) -> std::result::Result<Self, arrow::error::ArrowError> {
        let floats = |column: &(usize, String)| floats(batch.column(column.0));
        let mut features = Vec::with_capacity(plan.features.len());
        for feature in &plan.features {
            let (bags, ids) = Bags::new(batch.column(feature.ids.0));
            let weights = match &feature.weights {
                Some(column) => {
                    let (bags, weights) = Bags::new(batch.column(column.0));
                    Some((self::floats(&weights)?, bags))
                }
                None => None,
            };
            features.push(LoadedFeature { ids: Integers::new(&ids)?, bags, weights });
        }
        Ok(Self {
            rows: batch.num_rows(),
            at: 0,
            dense: plan.dense.iter().map(floats).collect::<std::result::Result<_, _>>()?,
            label: floats(&plan.label)?,
            sample_weight: plan.sample_weight.as_ref().map(floats).transpose()?,
            group: match &plan.group {
                Some(column) => Some(Integers::new(batch.column(column.0))?),
                None => None,
            },
            features,
        })
    }

    /// Adds the rows, all but their origins, to `out`.
    pub(super) fn append(
        &self,
        rows: Range<usize>,
        plan: &Plan,
        out: &mut BatchBuilder,
    ) -> std::result::Result<(), Fault> {
        append_dense(&self.dense, rows.clone(), plan, &mut out.dense)?;
        append_finite(&self.label, rows.clone(), &plan.label.1, f32::MIN, &mut out.labels)?;
        if let (Some(column), Some(weights), Some((_, name))) =
            (&self.sample_weight, &mut out.sample_weights, &plan.sample_weight)
        {
            append_finite(column, rows.clone(), name, 0.0, weights)?;
        }
        if let (Some(column), Some(groups), Some((_, name))) =
            (&self.group, &mut out.groups, &plan.group)
        {
            for row in rows.clone() {
                let value = column.get(row);
                groups.push(value.map_err(|reason| Fault { row, column: name.clone(), reason })?);
            }
        }
        for ((feature, names), builder) in
            self.features.iter().zip(&plan.features).zip(&mut out.features)
        {
            append_bags(feature, rows.clone(), names, builder)?;
        }
        Ok(())
    }
}

fn append_dense(
    columns: &[Float32Array],
    rows: Range<usize>,
    plan: &Plan,
    out: &mut Vec<f32>,
) -> std::result::Result<(), Fault> {
    for row in rows {
        for (column, (_, name)) in columns.iter().zip(&plan.dense) {
            if column.is_null(row) {
                return Err(null(row, name));
            }
            out.push(column.value(row));
        }
    }
    Ok(())
}

/// Adds numbers that must be there, finite and not below `least`.
fn append_finite(
    column: &Float32Array,
    rows: Range<usize>,
    name: &str,
    least: f32,
    out: &mut Vec<f32>,
) -> std::result::Result<(), Fault> {
    for row in rows {
        if column.is_null(row) {
            return Err(null(row, name));
        }
        let value = column.value(row);
        if !value.is_finite() || value < least {
            let reason = if value.is_finite() { "is negative" } else { "is not finite" };
            let reason = format!("{value} {reason}");
            return Err(Fault { row, column: name.to_owned(), reason });
        }
        out.push(value);
    }
    Ok(())
}

fn append_bags(
    feature: &LoadedFeature,
    rows: Range<usize>,
    names: &FeaturePlan,
    builder: &mut JaggedBuilder,
) -> std::result::Result<(), Fault> {
    for row in rows {
        let bag = feature.bags.range(row);
        let at = |column: &(usize, String), reason| Fault { row, column: column.1.clone(), reason };
        let id = |place| {
            let bits = if names.raw { feature.ids.bits(place) } else { None };
            bits.map_or_else(|| feature.ids.get(place), Ok).map_err(|reason| at(&names.ids, reason))
        };
        let (Some((weights, weight_bags)), Some(column)) = (&feature.weights, &names.weights)
        else {
            for place in bag {
                builder.push_id(id(place)?);
            }
            builder.end_bag();
            continue;
        };
        let weight_bag = weight_bags.range(row);
        if weight_bag.len() != bag.len() {
            let reason =
                format!("{} weights for {} ids of {}", weight_bag.len(), bag.len(), names.ids.1);
            return Err(at(column, reason));
        }
        for (place, weight_place) in bag.zip(weight_bag) {
            if weights.is_null(weight_place) {
                return Err(at(column, "a weight is null".to_owned()));
            }
            let weight = weights.value(weight_place);
            if !weight.is_finite() {
                return Err(at(column, format!("weight {weight} is not finite")));
            }
            builder.push_weighted(id(place)?, weight);
        }
        builder.end_bag();
    }
    Ok(())
}

fn null(row: usize, column: &str) -> Fault {
    Fault { row, column: column.to_owned(), reason: "the value is null; fill it in".to_owned() }
}

fn floats(array: &ArrayRef) -> std::result::Result<Float32Array, arrow::error::ArrowError> {
    Ok(cast(array, &DataType::Float32)?.as_primitive::<Float32Type>().clone())
}

/// Integers of any type as i64.
struct Integers {
    values: Int64Array,
    /// The same ones where they may be above the range of i64, which makes them null above.
    unsigned: Option<UInt64Array>,
}

impl Integers {
    fn new(array: &ArrayRef) -> std::result::Result<Self, arrow::error::ArrowError> {
        let values = cast(array, &DataType::Int64)?.as_primitive::<Int64Type>().clone();
        Ok(Self { values, unsigned: array.as_primitive_opt::<UInt64Type>().cloned() })
    }

    /// The bits of an unsigned integer.
    fn bits(&self, place: usize) -> Option<i64> {
        let unsigned = self.unsigned.as_ref()?;
        unsigned.is_valid(place).then(|| unsigned.value(place) as i64)
    }

    fn get(&self, place: usize) -> std::result::Result<i64, String> {
        if self.values.is_valid(place) {
            return Ok(self.values.value(place));
        }
        match &self.unsigned {
            Some(unsigned) if unsigned.is_valid(place) => {
                Err(format!("{} is above 2^63 - 1", unsigned.value(place)))
            }
            _ => Err("an integer is null".to_owned()),
        }
    }
}

/// Which values belong to a row.
enum Bags {
    /// One value a row, or none where it is null.
    Single(Option<NullBuffer>),
    /// A list of values a row.
    Lists(ListArray),
}

impl Bags {
    /// The bags of a column and their values.
    fn new(column: &ArrayRef) -> (Self, ArrayRef) {
        match column.as_list_opt::<i32>() {
            Some(lists) => (Self::Lists(lists.clone()), lists.values().clone()),
            None => (Self::Single(column.nulls().cloned()), column.clone()),
        }
    }

    /// The values of a row: none where the list or the single value is null.
    fn range(&self, row: usize) -> Range<usize> {
        match self {
            Self::Single(Some(nulls)) if nulls.is_null(row) => row..row,
            Self::Single(_) => row..row + 1,
            Self::Lists(lists) if lists.is_null(row) => 0..0,
            Self::Lists(lists) => {
                let offsets = lists.value_offsets();
                offsets[row] as usize..offsets[row + 1] as usize
            }
        }
    }
}
