//! Tables on several ranks against the same tables on one: any plan, any number of ranks, codecs,
//! groups of ranks that are averaged, and rows that move between tiers.

mod ahead;
mod codecs;
mod common;
mod dynamic;
mod moments;
mod plans;
mod replicas;
mod tiers;
