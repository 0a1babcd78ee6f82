//! Checkpoints: written by any ranks and loaded by any others, under failing writes and damage.

#[path = "../common/mod.rs"]
mod common;
mod disk;
mod faults;
mod layouts;
mod parts;
mod ranks;
mod runs;
mod versions;
