//! Two-dimensional sparse parallelism: `T = groups * ranks` ranks in groups that each hold all
//! tables.
//!
//! ```text
//! strided (default), T = 8, 2 groups     contiguous
//! group 0: 0 2 4 6                       group 0: 0 1 2 3
//! group 1: 1 3 5 7                       group 1: 4 5 6 7
//! replicas of index 1: 2 3               replicas of index 1: 1 5
//! ```
//! All-to-all stays inside a group; the ranks of one index hold the same shards and average them.
//! Strided placement puts replicas on one node, where their large exchange is cheap; contiguous
//! placement puts groups there.

use serde::{Deserialize, Serialize};

use crate::{EmbeddingError, Result};

/// How ranks are dealt to groups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Placement {
    /// Group `g` is `g, g + groups, ...`; replicas are neighbours.
    #[default]
    Strided,
    /// Group `g` is `g * ranks ..`; its ranks are neighbours.
    Contiguous,
}

/// The groups and replicas of all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grid2d {
    groups: usize,
    ranks: usize,
    placement: Placement,
}

impl Grid2d {
    /// `total` ranks in `groups` groups.
    ///
    /// Errors: [`EmbeddingError::PlanInput`] unless groups are equal and have ranks.
    pub fn new(total: usize, groups: usize, placement: Placement) -> Result<Self> {
        if groups == 0 || total == 0 || !total.is_multiple_of(groups) {
            let fault = format!("{total} ranks cannot form {groups} equal groups");
            return Err(EmbeddingError::PlanInput { faults: vec![fault] });
        }
        Ok(Self { groups, ranks: total / groups, placement })
    }

    /// Groups: M of the paper.
    #[must_use]
    pub fn groups(self) -> usize {
        self.groups
    }

    /// Ranks of a group: N of the paper.
    #[must_use]
    pub fn ranks(self) -> usize {
        self.ranks
    }

    /// All ranks.
    #[must_use]
    pub fn total(self) -> usize {
        self.groups * self.ranks
    }

    /// Group of a rank, and its index there. `rank` is below [`Grid2d::total`].
    #[must_use]
    pub fn place(self, rank: usize) -> (usize, usize) {
        debug_assert!(rank < self.total(), "rank {rank} of {}", self.total());
        match self.placement {
            Placement::Strided => (rank % self.groups, rank / self.groups),
            Placement::Contiguous => (rank / self.ranks, rank % self.ranks),
        }
    }

    /// The rank of an index in a group: the inverse of [`Grid2d::place`].
    #[must_use]
    pub fn rank(self, group: usize, index: usize) -> usize {
        debug_assert!(group < self.groups && index < self.ranks, "no place {group}, {index}");
        match self.placement {
            Placement::Strided => index * self.groups + group,
            Placement::Contiguous => group * self.ranks + index,
        }
    }

    /// The ranks that share all tables, by index.
    pub fn shard_group(self, group: usize) -> impl Iterator<Item = usize> {
        (0..self.ranks).map(move |index| self.rank(group, index))
    }

    /// The ranks that hold the same shards, by group.
    pub fn replica_group(self, index: usize) -> impl Iterator<Item = usize> {
        (0..self.groups).map(move |group| self.rank(group, index))
    }

    /// Successive ranks of every group that surely share a node, for nodes of `per_node` ranks.
    #[must_use]
    pub fn group_ranks_per_node(self, per_node: usize) -> usize {
        match self.placement {
            Placement::Strided => shared(per_node, self.groups, self.ranks),
            Placement::Contiguous => gcd(per_node, self.ranks),
        }
    }

    /// Successive members of every replica group that surely share a node.
    #[must_use]
    pub fn replicas_per_node(self, per_node: usize) -> usize {
        match self.placement {
            Placement::Strided => gcd(per_node, self.groups),
            Placement::Contiguous => shared(per_node, self.ranks, self.groups),
        }
    }
}

/// Of members that lie `stride` ranks apart: how many share each node, where all nodes have
/// equally many; 1 where they do not line up.
fn shared(per_node: usize, stride: usize, members: usize) -> usize {
    if per_node.is_multiple_of(stride) { gcd(per_node / stride, members) } else { 1 }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_as_the_paper_places_them() {
        let grid = Grid2d::new(8, 2, Placement::Strided).unwrap();
        assert!(grid.shard_group(1).eq([1, 3, 5, 7]));
        assert!(grid.replica_group(1).eq([2, 3]));
        let grid = Grid2d::new(8, 2, Placement::Contiguous).unwrap();
        assert!(grid.shard_group(1).eq([4, 5, 6, 7]));
        assert!(grid.replica_group(1).eq([1, 5]));
    }

    #[test]
    fn every_rank_has_one_place_and_neighbours_are_on_its_node() {
        for total in 1..=24 {
            for groups in (1..=total).filter(|groups| total % groups == 0) {
                for placement in [Placement::Strided, Placement::Contiguous] {
                    let grid = Grid2d::new(total, groups, placement).unwrap();
                    let mut seen = vec![false; total];
                    for rank in 0..total {
                        let (group, index) = grid.place(rank);
                        assert_eq!(grid.rank(group, index), rank);
                        assert!(!std::mem::replace(&mut seen[grid.rank(group, index)], true));
                    }
                    for per_node in (1..=total).filter(|per_node| total % per_node == 0) {
                        let near = grid.group_ranks_per_node(per_node);
                        assert_eq!(grid.ranks() % near, 0, "{grid:?} nodes of {per_node}");
                        for group in 0..groups {
                            let ranks: Vec<usize> = grid.shard_group(group).collect();
                            assert!(ranks.chunks(near).all(|c| one_node(c, per_node)), "{grid:?}");
                        }
                        let near = grid.replicas_per_node(per_node);
                        assert_eq!(groups % near, 0, "{grid:?} nodes of {per_node}");
                        for index in 0..grid.ranks() {
                            let ranks: Vec<usize> = grid.replica_group(index).collect();
                            assert!(ranks.chunks(near).all(|c| one_node(c, per_node)), "{grid:?}");
                        }
                    }
                }
            }
        }
        // 8 groups over nodes of 8: replicas share a node, a group has one rank on each.
        let grid = Grid2d::new(64, 8, Placement::Strided).unwrap();
        assert_eq!((grid.group_ranks_per_node(8), grid.replicas_per_node(8)), (1, 8));
        let grid = Grid2d::new(64, 8, Placement::Contiguous).unwrap();
        assert_eq!((grid.group_ranks_per_node(8), grid.replicas_per_node(8)), (8, 1));
    }

    fn one_node(ranks: &[usize], per_node: usize) -> bool {
        ranks.iter().all(|rank| rank / per_node == ranks[0] / per_node)
    }

    #[test]
    fn unequal_groups_are_refused() {
        for (total, groups) in [(8, 3), (8, 0), (0, 1)] {
            let error = Grid2d::new(total, groups, Placement::Strided).unwrap_err().to_string();
            assert!(error.contains(&format!("{total} ranks cannot form {groups}")), "{error}");
        }
    }
}
