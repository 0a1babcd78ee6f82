//! A small model that has a bit of everything, with data of every format.

use super::Project;

/// Where the samples of a [`Project`] of [`project`] come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// Generated.
    Synthetic,
    /// Fixed numbers of ids.
    MlperfNpy,
    /// Fixed numbers of ids.
    Raw,
    /// Bags of any length, one feature with weights.
    Parquet,
    /// One id a feature, by hash.
    CriteoTsv,
    /// The same, compressed.
    CriteoGz,
}

impl Source {
    pub const ALL: [Self; 6] = [
        Self::Synthetic,
        Self::MlperfNpy,
        Self::Raw,
        Self::Parquet,
        Self::CriteoTsv,
        Self::CriteoGz,
    ];

    /// Its name in configurations.
    pub fn format(self) -> &'static str {
        match self {
            Self::Synthetic => "synthetic",
            Self::MlperfNpy => "mlperf-npy",
            Self::Raw => "raw",
            Self::Parquet => "parquet",
            Self::CriteoTsv | Self::CriteoGz => "criteo-tsv",
        }
    }

    fn ending(self) -> &'static str {
        match self {
            Self::MlperfNpy => "",
            Self::CriteoGz => ".tsv.gz",
            other => match other.format() {
                "raw" => ".bin",
                "parquet" => ".parquet",
                _ => ".tsv",
            },
        }
    }

    /// Whether a feature may have more than one id.
    fn has_bags(self) -> bool {
        !matches!(self, Self::CriteoTsv | Self::CriteoGz)
    }
}

/// Samples of an epoch: 10 batches of 32, the last of 5.
pub const SAMPLES: u64 = 293;
/// Samples of the files that they lie in.
const FILES: [u64; 3] = [150, 90, 53];
/// Steps of an epoch.
pub const EPOCH: u64 = SAMPLES.div_ceil(32);

/// Every optimizer has a table of its own; precision and pooling go round.
const TABLES: [(&str, &str); 9] = [
    ("sgd", ""),
    ("adagrad", "weight_decay = 0.01\nweight_decay_mode = \"l2\""),
    ("rowwise_adagrad", "weight_decay = 0.01\nweight_decay_mode = \"decouple\""),
    ("adam", "weight_decay = 0.01"),
    ("partial_rowwise_adam", ""),
    ("lamb", ""),
    ("partial_rowwise_lamb", ""),
    ("lars_sgd", "eta = 0.1"),
    ("ftrl", "l1 = 0.001"),
];

/// Sections of the tables. Given names of dims, precisions: one for each table in turn.
pub fn tables(
    dims: &[usize],
    precisions: &[&str],
    hots: impl Fn(usize) -> Option<usize>,
    weighted: bool,
) -> String {
    let mut text = String::new();
    for (i, (kind, options)) in TABLES.iter().enumerate() {
        let number = i + 1;
        let dim = dims[i % dims.len()];
        let precision = precisions[i % precisions.len()];
        // The first feature has the weights, which go with sums only.
        let pooling = if i % 3 == 1 { "mean" } else { "sum" };
        text += &format!(
            "\n[[table]]\nname = \"c{number}\"\nrows = {}\ndim = {dim}\nprecision = \"{precision}\"\npooling = \"{pooling}\"\n",
            20 + 7 * i,
        );
        if let Some(hots) = hots(i) {
            text += &format!("hots = {hots}\n");
        }
        if weighted && i == 0 {
            text += "weighted = true\n";
        }
        text += &format!("optimizer.kind = \"{kind}\"\noptimizer.lr = 0.02\n");
        for option in options.lines() {
            text += &format!("optimizer.{option}\n");
        }
    }
    text
}

fn config(source: Source, data: &str, hots: impl Fn(usize) -> Option<usize>) -> String {
    let weighted = source == Source::Parquet;
    format!(
        r#"seed = 7
threads = 2

[data]
batch_size = 32
dense_transform = "log1p"
{data}

[model]
dense_features = 3
bottom_mlp = [8, 4]
interaction = "dcn"
dcn = {{ layers = 2, rank = 3 }}
top_mlp = [8, 1]
wide = true

[optimizer]
clip_norm = 0.5
dense = {{ kind = "adam", lr = 0.01 }}
schedule = {{ warmup_steps = 3, decay = "cosine", decay_steps = 30, end_ratio = 0.1 }}

[train]
epochs = 2
log_every = 1
{}"#,
        tables(&[4, 3, 5], &["fp32", "fp16", "bf16", "fp32"], hots, weighted),
    )
}

fn hots(source: Source, table: usize) -> usize {
    if source.has_bags() { 1 + table % 3 } else { 1 }
}

fn synthetic(source: Source) -> String {
    let spread = usize::from(source == Source::Parquet);
    let data = format!(
        "format = \"synthetic\"\n[data.synthetic]\nsamples = {SAMPLES}\neval_samples = 64\nseed = 3\ndense = \"counts\"\nhots_spread = {spread}"
    );
    config(source, &data, |table| Some(hots(source, table)))
}

/// A folder with data of `source` in three files, none for [`Source::Synthetic`], and a
/// configuration that trains on it.
pub fn project(source: Source) -> Project {
    let project = Project::new(&synthetic(source));
    if source == Source::Synthetic {
        return project;
    }
    let mut names = Vec::new();
    for (i, samples) in FILES.iter().enumerate() {
        let name = format!("part{i}{}", source.ending());
        project.ok(&format!(
            "data synth config.toml --to {} --out {name} --set data.synthetic.samples={samples} --set data.synthetic.seed={i}",
            source.format()
        ));
        names.push(format!("\"{name}\""));
    }
    let mut data = format!("format = \"{}\"\ntrain = [{}]", source.format(), names.join(", "));
    if source == Source::Parquet {
        data += "\ndense = [\"dense1\", \"dense2\", \"dense3\"]";
    }
    let fixed = source == Source::Raw;
    let text = config(source, &data, |table| fixed.then(|| hots(source, table)));
    project.write("config.toml", &text);
    project
}
