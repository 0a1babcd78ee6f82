//! Batches and the readers and writers that move them
