//! Tables on several ranks against the same tables on one: any plan, any number of ranks, codecs,
//! and groups of ranks that are averaged.

mod codecs;
mod common;
mod moments;
mod plans;
mod replicas;
