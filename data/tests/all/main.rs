//! Tests of the crate through its public interface, against files. One program, since each would
//! link Arrow and Parquet again.

mod bad_input;
mod common;
mod criteo_naive;
mod mlperf;
mod parquet;
mod raw_ids;
mod real_data;
mod round_trips;
mod streams;
