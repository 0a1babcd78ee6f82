//! Timelines in Chrome's trace format, which Perfetto and chrome://tracing open, and what they tell.
//!
//! ```text
//! process (pid)  a rank
//! thread (tid)   a lane: one resource of the rank, or one part of it where several things happen on
//!                it at once; lanes of one name are one resource
//! event          a stage of a step at work: name, start, duration; args: step, micro_batch
//! ```
//! [`TraceWriter`] writes events one by one, so that a trace may be larger than memory and one that
//! was cut off can still be read. [`read`] reads them back; [`report::analyse`] computes which stages
//! are exposed, how busy lanes are and what the critical path is made of. docs/simulate.md draws the
//! file and defines the figures.

mod command;
mod intervals;
mod reader;
mod report;
mod writer;

pub(crate) use command::rank_text;
pub use command::run;
pub use reader::read;
pub use report::{LaneFigures, PathPart, RankFigures, Report, StageFigures, StepFigures, analyse};
pub use writer::TraceWriter;

/// Lane of the computations of a device: a stage elsewhere is exposed while this one does nothing.
pub const DEVICE_LANE: &str = "device";

/// A stage of a step at work on a lane of a rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// Name of the stage.
    pub stage: String,
    /// The rank.
    pub rank: usize,
    /// Name of the lane.
    pub lane: String,
    /// The step that it belongs to.
    pub step: Option<u64>,
    /// The part of the batch, from 0, where there are several.
    pub micro_batch: Option<u64>,
    /// Microseconds since the trace began.
    pub start_us: f64,
    /// Microseconds.
    pub duration_us: f64,
}

impl Event {
    /// Microseconds since the trace began.
    #[must_use]
    pub fn end_us(&self) -> f64 {
        self.start_us + self.duration_us
    }
}
