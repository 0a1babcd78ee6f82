//! Tests of the store in tiers through its public interface.

mod faults;
mod large;
mod model;
mod streams;
mod support;
mod threads;
