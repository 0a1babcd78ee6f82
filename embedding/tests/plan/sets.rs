//! The tables of published benchmarks.

use std::time::{Duration, Instant};

use tessera_embedding::EmbeddingError;
use tessera_embedding::plan::{
    Budget, GivenTable, Grid2d, Placement, Planned, Sharding, TableLoad, Topology, Workload, plan,
    plan_given,
};

use crate::common::{adagrad, assert_consistent, csv};

/// Memory that the job of plan-96-ranks has besides its tables, in GB: dense part and inputs.
const BESIDES_GB: f64 = 62.667 + 18.2;

/// The tables of plan-96-ranks with their costs.
fn job_of_96() -> Option<Vec<GivenTable>> {
    let tables = csv("plan-96-ranks/tables.csv")?;
    let given = |cells: &Vec<String>| GivenTable {
        name: cells[0].clone(),
        rows: cells[18].parse().unwrap(),
        dim: cells[16].parse().unwrap(),
        cost: cells[3].parse().unwrap(),
        bytes: (cells[8].parse::<f64>().unwrap() * 1e9) as u64,
        sharding: (cells[1] == "RW").then_some(Sharding::RowWise),
    };
    let mut given: Vec<GivenTable> = tables.iter().map(given).collect();
    // One name is used for two tables.
    let twice = given.iter().rposition(|table| table.name.ends_with(".ebc.table_1750")).unwrap();
    given[twice].name += "#2";
    Some(given)
}

#[test]
fn the_job_of_96_ranks_is_even_within_its_memory() {
    let Some(tables) = job_of_96() else { return };
    let ranks = csv("plan-96-ranks/ranks.csv").unwrap();
    let most: f64 = ranks.iter().map(|cells| cells[1].parse().unwrap()).fold(0.0, f64::max);
    let bytes_max = ((most - BESIDES_GB) * 1e9) as u64;
    let start = Instant::now();
    let planned = plan_given(&tables, 96, bytes_max, Budget::default()).unwrap();
    let took = start.elapsed();
    assert_consistent(&planned);
    println!("max/mean {:.6} in {took:?}; {:?}", planned.max_over_mean, planned.notes);
    assert!(planned.max_over_mean <= 1.001, "{}", planned.max_over_mean);
    assert!(took < Duration::from_secs(10), "{took:?}");
    // Of the costs as they are given, no other split of rows than the given one.
    for (table, given) in planned.plan.tables().iter().zip(&tables) {
        assert_eq!(table.sharding == Sharding::RowWise, given.sharding.is_some(), "{table:?}");
    }
    let total: f64 = tables.iter().map(|table| table.cost).sum();
    assert!((planned.cost_mean() * 96.0 / total - 1.0).abs() < 1e-9);
    let again = plan_given(&tables, 96, bytes_max, Budget::default()).unwrap();
    assert_eq!(again.plan.hash(), planned.plan.hash());
}

/// The 26 tables of MLPerf's DLRM-DCNv2.
fn mlperf() -> Option<Vec<TableLoad>> {
    let rows = csv("table-configs/criteo_tables.csv")?;
    let load = |cells: &Vec<String>| {
        let ids = vec![cells[5].parse().unwrap()];
        TableLoad::new(&cells[0], cells[4].parse().unwrap(), 128, &adagrad(), ids)
    };
    Some(rows.iter().map(load).collect())
}

fn hugectr(name: &str) -> Option<Vec<TableLoad>> {
    let mut tables = Vec::new();
    for (line, cells) in csv(&format!("table-configs/hugectr_{name}.csv"))?.iter().enumerate() {
        for copy in 0..cells[0].parse().unwrap() {
            tables.push(TableLoad::new(
                format!("t{line}_{copy}"),
                cells[1].parse().unwrap(),
                cells[3].parse().unwrap(),
                &adagrad(),
                vec![cells[2].parse().unwrap()],
            ));
        }
    }
    Some(tables)
}

fn on(tables: &[TableLoad], ranks: usize, topology: &Topology) -> Result<Planned, EmbeddingError> {
    let workload = Workload::new(65536.0 / ranks as f64);
    let grid = Grid2d::new(ranks, 1, Placement::default()).unwrap();
    let start = Instant::now();
    let planned = plan(tables, grid, topology, &workload, Budget::default())?;
    let bytes = planned.ranks.iter().map(|rank| rank.memory_bytes).max().unwrap();
    println!(
        "{} tables, {ranks} ranks: max {:.3} ms, mean {:.3}, ratio {:.4}, {:.1} GB, {:?}; {:?}",
        tables.len(),
        planned.cost_max(),
        planned.cost_mean(),
        planned.max_over_mean,
        bytes as f64 / 1e9,
        start.elapsed(),
        planned.notes,
    );
    assert_consistent(&planned);
    Ok(planned)
}

#[test]
fn mlperf_tables_are_even_on_8_64_and_128_ranks() {
    let Some(tables) = mlperf() else { return };
    let h100 = Topology::preset("h100").unwrap();
    for ranks in [8, 64, 128] {
        let planned = on(&tables, ranks, &h100).unwrap();
        assert!(planned.max_over_mean <= 1.1, "{ranks} ranks: {}", planned.max_over_mean);
    }
}

#[test]
fn hugectr_sets_are_even_on_16_ranks() {
    let h100 = Topology::preset("h100").unwrap();
    for name in
        ["dcnv2", "180table_70B_hotness80", "200table_100B_hotness20", "510table_110B_hotness5"]
    {
        let Some(tables) = hugectr(name) else { return };
        let planned = on(&tables, 16, &h100).unwrap();
        assert!(planned.max_over_mean <= 1.1, "{name}: {}", planned.max_over_mean);
    }
}

/// 446 billion parameters are 3.6 TB with their state: 16 GPUs hold them with host memory only.
#[test]
fn the_largest_set_needs_a_lower_tier() {
    let Some(tables) = hugectr("7table_470B_hotness20") else { return };
    let mut topology = Topology::preset("h100").unwrap();
    let error = on(&tables, 16, &topology).unwrap_err();
    assert!(matches!(error, EmbeddingError::CannotPlace { .. }), "{error}");
    topology.host_bytes = 256_000_000_000;
    let planned = on(&tables, 16, &topology).unwrap();
    assert!(planned.max_over_mean <= 1.1, "{}", planned.max_over_mean);
    assert!(planned.notes.iter().any(|note| note.contains("devices have room for")));
}

#[test]
fn a_table_too_large_for_all_ranks_is_refused_by_name_and_bytes() {
    let tables = [
        crate::common::table("small", 1000, 64, 1.0),
        crate::common::table("vast", 10_000_000_000, 128, 1.0),
    ];
    let h100 = Topology::preset("h100").unwrap();
    let error = on(&tables, 16, &h100).unwrap_err().to_string();
    for part in ["vast", "10240000000000 bytes", "16 ranks have 72000000000 bytes"] {
        assert!(error.contains(part), "{part}: {error}");
    }
    let given = GivenTable {
        name: "vast".into(),
        rows: 10,
        dim: 64,
        cost: 1.0,
        bytes: 1001,
        sharding: None,
    };
    let error = plan_given(&[given], 4, 250, Budget::default()).unwrap_err().to_string();
    for part in ["vast", "1001 bytes", "4 ranks have 250 bytes"] {
        assert!(error.contains(part), "{part}: {error}");
    }
}
