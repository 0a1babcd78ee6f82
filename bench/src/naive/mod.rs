//! Naive computations in float64, which the answers of the code under test are held against
//! before any figure is printed. They share nothing with it but the formulas in its docs.

pub mod network;
pub mod rules;
