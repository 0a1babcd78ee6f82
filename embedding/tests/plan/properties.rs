//! Random tables on random ranks.

use proptest::prelude::*;
use tessera_embedding::EmbeddingError;
use tessera_embedding::plan::{
    Budget, GivenTable, Grid2d, IdCounter, Placement, PlanFile, Sharding, TableLoad, Topology,
    Workload, plan, plan_given,
};

use crate::common::{assert_consistent, table};

fn sharding() -> impl Strategy<Value = Option<Sharding>> {
    prop_oneof![
        3 => Just(None),
        2 => proptest::sample::select(Sharding::ALL.to_vec()).prop_map(Some),
    ]
}

/// Rows and columns with their edges: none, one, ragged, large.
fn loads() -> impl Strategy<Value = Vec<TableLoad>> {
    let rows = prop_oneof![Just(0u64), Just(1), 2..100u64, 1000..5_000_000u64];
    let dim = prop_oneof![1..40usize, Just(64), Just(128), 129..300usize];
    let sampled = proptest::option::of(proptest::collection::vec(0..1000i64, 0..200));
    let one = (rows, dim, 0.0..20.0f64, sharding(), sampled);
    proptest::collection::vec(one, 0..12).prop_map(|tables| {
        tables
            .into_iter()
            .zip(0..)
            .map(|((rows, dim, ids, sharding, sampled), i)| {
                let mut counter = IdCounter::new(rows);
                counter.batch(sampled.unwrap_or_default());
                TableLoad {
                    sharding,
                    stats: counter.finish(),
                    ..table(&format!("t{i}"), rows, dim, ids)
                }
            })
            .collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn plans_tile_fit_obey_and_repeat(
        tables in loads(),
        nodes in 1..5usize,
        per_node in 1..5usize,
        groups in 1..3usize,
        batch in 0.0..500.0f64,
        room in 1u64..1 << 34,
    ) {
        let topology = Topology {
            ranks_per_node: Some(per_node),
            device_bytes: room,
            reserve_bytes: 0,
            ..Topology::preset("a100").unwrap()
        };
        let grid = Grid2d::new(nodes * per_node * groups, groups, Placement::Contiguous).unwrap();
        let workload = Workload::new(batch);
        let again = || plan(&tables, grid, &topology, &workload, Budget::default());
        match again() {
            Ok(planned) => {
                assert_consistent(&planned);
                prop_assert_eq!(planned.plan.ranks(), nodes * per_node);
                prop_assert_eq!(planned.plan.replicas(), groups);
                for (spread, table) in planned.plan.tables().iter().zip(&tables) {
                    prop_assert_eq!(&spread.table, &table.name);
                    if let Some(asked) = table.sharding {
                        prop_assert_eq!(spread.sharding, asked);
                    }
                }
                prop_assert_eq!(&again().unwrap().plan, &planned.plan);
                let text = serde_json::to_string(&PlanFile::new(&planned)).unwrap();
                let read: PlanFile = serde_json::from_str(&text).unwrap();
                prop_assert_eq!(read.plan().unwrap(), planned.plan);
            }
            Err(EmbeddingError::CannotPlace { table, bytes, .. }) => {
                let named = tables.iter().find(|load| load.name == table).unwrap();
                prop_assert_eq!(bytes, named.total_bytes());
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }

    /// With given costs nothing is lost: ranks' costs add up to the tables'.
    #[test]
    fn given_costs_are_kept(
        sizes in proptest::collection::vec(
            (0..1000u64, 1..300usize, 0.0..10.0f64, 0..1_000_000u64, any::<bool>()), 0..30),
        ranks in 1..12usize,
    ) {
        let tables: Vec<GivenTable> = sizes
            .into_iter()
            .zip(0..)
            .map(|((rows, dim, cost, bytes, by_rows), i)| GivenTable {
                name: format!("t{i}"),
                rows,
                dim,
                cost,
                bytes,
                sharding: by_rows.then_some(Sharding::RowWise),
            })
            .collect();
        // Always enough, though not by much: every table's bytes on each of the ranks' even parts.
        let most = tables.iter().map(|table| table.bytes).sum::<u64>() + 1000;
        let planned = plan_given(&tables, ranks, most, Budget::default()).unwrap();
        assert_consistent(&planned);
        let given: f64 =
            tables.iter().filter(|table| table.rows > 0).map(|table| table.cost).sum();
        let found: f64 = planned.ranks.iter().map(|rank| rank.cost).sum();
        prop_assert!((found - given).abs() <= 1e-9 * given.max(1.0), "{found} of {given}");
        for (spread, table) in planned.plan.tables().iter().zip(&tables) {
            prop_assert_eq!(
                spread.sharding == Sharding::RowWise,
                table.sharding == Some(Sharding::RowWise)
            );
        }
    }
}
