//! Embedding tables: pooled lookup, fused backward and optimizers
