//! `parquet`: columns by name, list columns as bags.
//!
//! Only the columns that the schema names are read, a few thousand rows at a time; passing over
//! rows goes by row groups and then inside one. Types are Parquet's own: an Arrow schema that a
//! writer has left in the file is not used.
//!
//! Nulls: a null list or a null single id is an empty bag; a null inside a list, a null label,
//! dense value, weight or group is an error, since any value put in its place would be invented.

use std::fs::File;
use std::path::{Path, PathBuf};

use arrow::datatypes::DataType;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader,
    ParquetRecordBatchReaderBuilder,
};

use super::parquet_columns::Loaded;
use super::{FileReader, Unit};
use crate::batch::{BatchBuilder, Numbering, Origin, Place, SourceFile};
use crate::{DataError, Result, Schema};

/// Rows decoded at once.
const DECODE_ROWS: usize = 2048;

/// The file `path` of a source.
pub(super) fn unit(path: &Path, schema: &Schema) -> Result<Unit> {
    let (file, bytes) = super::open_file(path)?;
    if bytes == 0 {
        return Err(DataError::bad_file(path, "the file is empty; a Parquet file is needed"));
    }
    let options = ArrowReaderOptions::new().with_skip_arrow_metadata(true);
    let metadata = ArrowReaderMetadata::load(&file, options).map_err(|error| {
        DataError::bad_file(path, format!("not a readable Parquet file: {error}; is it cut short?"))
    })?;
    let plan = Plan::new(path, schema, &metadata)?;
    let samples = metadata.metadata().row_groups().iter().map(|g| g.num_rows() as u64).sum();
    let file = SourceFile { path: path.into(), numbering: Numbering::Row };
    let path = path.to_owned();
    let open = move || -> Result<Box<dyn FileReader>> {
        let mut reader = ParquetFile {
            path: path.clone(),
            metadata: metadata.clone(),
            plan: plan.clone(),
            samples,
            reader: None,
            loaded: None,
            row: 0,
        };
        reader.seek(0)?;
        Ok(Box::new(reader))
    };
    Ok(Unit { file: Some(file), samples: Some(samples), open: Box::new(open) })
}

/// What a column must hold.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Number,
    Group,
    Ids,
    Weights,
}

impl Kind {
    fn fits(self, kind: &DataType) -> bool {
        let number = |kind: &DataType| kind.is_numeric() && !is_decimal(kind);
        let element = |kind: &DataType| match kind {
            DataType::List(field) => field.data_type().clone(),
            scalar => scalar.clone(),
        };
        match self {
            Self::Number => number(kind) || *kind == DataType::Boolean,
            Self::Group => kind.is_integer(),
            Self::Ids => element(kind).is_integer(),
            Self::Weights => number(&element(kind)),
        }
    }

    fn needed(self) -> &'static str {
        match self {
            Self::Number => "a number or boolean",
            Self::Group => "one integer a row, to be the group,",
            Self::Ids => "an integer or a list of integers",
            Self::Weights => "a number or a list of numbers, like the ids",
        }
    }
}

fn is_decimal(kind: &DataType) -> bool {
    matches!(
        kind,
        DataType::Decimal32(..)
            | DataType::Decimal64(..)
            | DataType::Decimal128(..)
            | DataType::Decimal256(..)
    )
}

/// Which columns of the projected file hold what.
#[derive(Clone)]
pub(super) struct Plan {
    mask: ProjectionMask,
    /// Compressed bytes of the columns of the mask.
    bytes: u64,
    /// Columns with their names.
    pub(super) dense: Vec<(usize, String)>,
    pub(super) label: (usize, String),
    pub(super) sample_weight: Option<(usize, String)>,
    pub(super) group: Option<(usize, String)>,
    pub(super) features: Vec<FeaturePlan>,
}

#[derive(Clone)]
pub(super) struct FeaturePlan {
    pub(super) ids: (usize, String),
    /// Whether unsigned ids above 2^63 - 1 are their bits.
    pub(super) raw: bool,
    pub(super) weights: Option<(usize, String)>,
}

impl Plan {
    fn new(path: &Path, schema: &Schema, metadata: &ArrowReaderMetadata) -> Result<Self> {
        let fields = metadata.schema().fields();
        let mut roots = Vec::new();
        let mut find = |name: &str, kind: Kind| {
            let Some((root, field)) = fields.find(name) else {
                return Err(DataError::MissingColumn {
                    path: path.to_owned(),
                    column: name.to_owned(),
                    present: fields.iter().map(|field| field.name().clone()).collect(),
                });
            };
            if !kind.fits(field.data_type()) {
                return Err(DataError::bad_file(
                    path,
                    format!(
                        "column `{name}` is {}; {} is needed",
                        field.data_type(),
                        kind.needed()
                    ),
                ));
            }
            roots.push(root);
            Ok((root, name.to_owned()))
        };
        let mut dense = Vec::new();
        for name in &schema.dense {
            dense.push(find(name, Kind::Number)?);
        }
        let mut label = find(&schema.label, Kind::Number)?;
        let mut optional =
            |name: &Option<String>, kind| name.as_ref().map(|name| find(name, kind)).transpose();
        let mut sample_weight = optional(&schema.sample_weight, Kind::Number)?;
        let mut group = optional(&schema.group, Kind::Group)?;
        let mut features = Vec::new();
        for feature in &schema.features {
            let ids = find(&feature.name, Kind::Ids)?;
            let weights = match feature.weighted {
                true => Some(find(&feature.weights_column(), Kind::Weights)?),
                false => None,
            };
            features.push(FeaturePlan { ids, raw: feature.raw_ids, weights });
        }

        // Numbers of columns in the file become numbers in the projected batches.
        // The group may be a feature or dense column too, which is then read once.
        roots.sort_unstable();
        roots.dedup();
        let rank =
            |column: &mut (usize, String)| column.0 = roots.partition_point(|r| *r < column.0);
        dense.iter_mut().for_each(rank);
        rank(&mut label);
        sample_weight.iter_mut().chain(&mut group).for_each(rank);
        for feature in &mut features {
            rank(&mut feature.ids);
            feature.weights.iter_mut().for_each(rank);
        }
        let mask = ProjectionMask::roots(metadata.parquet_schema(), roots.iter().copied());
        let columns = metadata.metadata().row_groups().iter().flat_map(|group| {
            group.columns().iter().enumerate().filter(|(leaf, _)| mask.leaf_included(*leaf))
        });
        let bytes = columns.map(|(_, column)| column.compressed_size().max(0) as u64).sum();
        Ok(Self { mask, bytes, dense, label, sample_weight, group, features })
    }
}

struct ParquetFile {
    path: PathBuf,
    metadata: ArrowReaderMetadata,
    plan: Plan,
    samples: u64,
    reader: Option<ParquetRecordBatchReader>,
    /// Rows decoded and not all given out; the next one is `row`.
    loaded: Option<Loaded>,
    /// The next row.
    row: u64,
}

impl ParquetFile {
    fn damaged(&self, error: impl std::fmt::Display) -> DataError {
        let reason = format!("cannot decode the rows from {} on: {error}", self.row);
        DataError::bad_file(&self.path, reason)
    }

    /// Makes `row` the next row.
    fn seek(&mut self, row: u64) -> Result<()> {
        self.row = row;
        self.loaded = None;
        let groups = self.metadata.metadata().row_groups();
        let mut first = 0;
        let mut inside = row;
        while first < groups.len() && groups[first].num_rows() as u64 <= inside {
            inside -= groups[first].num_rows() as u64;
            first += 1;
        }
        let last = groups.len();
        let file = File::open(&self.path).map_err(DataError::io("open", &self.path))?;
        let reader =
            ParquetRecordBatchReaderBuilder::new_with_metadata(file, self.metadata.clone())
                .with_projection(self.plan.mask.clone())
                .with_row_groups((first..last).collect())
                .with_offset(inside as usize)
                .with_batch_size(DECODE_ROWS)
                .build()
                .map_err(|error| self.damaged(error))?;
        self.reader = Some(reader);
        Ok(())
    }

    /// Decodes the next rows; false at the end.
    fn load(&mut self) -> Result<bool> {
        self.loaded = None;
        let Some(next) = self.reader.as_mut().and_then(Iterator::next) else {
            return if self.row < self.samples {
                Err(self.damaged(format!("{} rows were promised", self.samples)))
            } else {
                Ok(false)
            };
        };
        let batch = next.map_err(|error| self.damaged(error))?;
        self.loaded = Some(Loaded::new(&batch, &self.plan).map_err(|error| self.damaged(error))?);
        Ok(true)
    }

    /// Rows decoded and not given out.
    fn ready(&self) -> usize {
        self.loaded.as_ref().map_or(0, |loaded| loaded.rows - loaded.at)
    }
}

impl FileReader for ParquetFile {
    fn read(&mut self, samples: usize, file: u32, out: &mut BatchBuilder) -> Result<usize> {
        let mut got = 0;
        while got < samples {
            if self.ready() == 0 && !self.load()? {
                break;
            }
            let Some(loaded) = &mut self.loaded else { break };
            let take = (loaded.rows - loaded.at).min(samples - got);
            let rows = loaded.at..loaded.at + take;
            loaded.append(rows, &self.plan, out).map_err(|fault| {
                let row = self.row + (fault.row - loaded.at) as u64;
                let file = Some(self.path.as_path().into());
                let place = Place { file, row, numbering: Numbering::Row };
                DataError::BadValue { place, column: fault.column, reason: fault.reason }
            })?;
            loaded.at += take;
            out.origins.extend((0..take as u64).map(|i| Origin { file, row: self.row + i }));
            self.row += take as u64;
            got += take;
        }
        Ok(got)
    }

    fn skip(&mut self, samples: u64) -> Result<u64> {
        let take = (self.samples - self.row).min(samples);
        let ready = self.ready();
        match &mut self.loaded {
            Some(loaded) if take <= ready as u64 => {
                loaded.at += take as usize;
                self.row += take;
            }
            _ => self.seek(self.row + take)?,
        }
        Ok(take)
    }

    fn bytes_read(&self) -> u64 {
        // The columns' bytes in proportion to the rows: pages are not worth counting.
        let share = u128::from(self.plan.bytes) * u128::from(self.row);
        (share / u128::from(self.samples.max(1))) as u64
    }
}
