//! Dense towers: MLP, interactions, loss and dense optimizers
