//! The golden runs on several ranks: the answer of one rank, whoever keeps what.

use crate::common::golden::{RUNS, agrees, project, sharded};
use crate::common::{Project, shared::shared};

const SHARDINGS: [&str; 6] =
    ["table_wise", "column_wise", "row_wise", "table_row_wise", "grid", "data_parallel"];

fn train(project: &Project, out: &str, ranks: usize, set: &str) {
    project.ok(&format!(
        "train golden/config.toml --init golden/init.safetensors --out {out} \
         --set parallel.ranks={ranks} --set threads={ranks} {set}"
    ));
}

#[test]
fn golden_runs_agree_on_any_ranks_and_plan_and_plans_give_the_same_bits() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        let golden = shared.join("golden").join(run);
        let project = project(&golden);
        for ranks in [1, 2, 3, 4, 7] {
            let mut first: Option<(String, Vec<u8>)> = None;
            for sharding in SHARDINGS {
                // On one rank all of them are the whole table.
                if ranks == 1 && sharding != "row_wise" {
                    continue;
                }
                let out = format!("{ranks}-{sharding}");
                let set = format!(
                    "--set parallel.comm=threads --set parallel.route=unique{}",
                    sharded(&golden, sharding)
                );
                train(&project, &out, ranks, &set);
                agrees(&project, &golden, &out);
                assert_eq!(project.summary(&out)["ranks"], ranks);
                let export = project.export(&out);
                match &first {
                    None => first = Some((out, export)),
                    Some((other, weights)) => {
                        assert!(*weights == export, "{run}: {out} has other weights than {other}");
                        assert_eq!(project.steps(other), project.steps(&out), "{run}: {out}");
                    }
                }
            }
        }
    }
}

#[test]
fn the_planners_own_choice_and_pooled_routes_agree_too() {
    let Some(shared) = shared() else { return };
    for run in RUNS {
        let golden = shared.join("golden").join(run);
        let project = project(&golden);
        train(&project, "auto", 3, "");
        agrees(&project, &golden, "auto");
        for sharding in ["table_wise", "row_wise", "grid"] {
            let set = format!("--set parallel.route=pooled{}", sharded(&golden, sharding));
            train(&project, sharding, 4, &set);
            agrees(&project, &golden, sharding);
        }
    }
}

/// A run on two ranks goes on with four, then with one, by other plans: the golden losses still.
#[test]
fn a_run_goes_on_with_other_ranks_and_plans() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_dot_rowwise_adagrad");
    let project = project(&golden);
    let set = |sharding: &str, steps: usize| {
        format!("--set train.max_steps={steps}{}", sharded(&golden, sharding))
    };
    train(&project, "run", 2, &set("row_wise", 20));
    for (ranks, sharding, steps) in [(4, "column_wise", 40), (1, "table_wise", 60)] {
        project.ok(&format!(
            "train golden/config.toml --resume run --out run --set parallel.ranks={ranks} {}",
            set(sharding, steps)
        ));
    }
    agrees(&project, &golden, "run");
}

#[test]
fn a_plan_file_is_followed() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_jagged_adam");
    let project = project(&golden);
    let plan = project.ok("plan golden/config.toml --ranks 3 --json --exact").stdout;
    project.write("plan.json", &plan);
    let file = project.path("plan.json");
    train(&project, "run", 3, &format!("--set parallel.plan={}", file.display()));
    agrees(&project, &golden, "run");
    let ran = project.run(&format!(
        "train golden/config.toml --out four --set parallel.ranks=4 --set parallel.plan={}",
        file.display()
    ));
    ran.says(2, &["is a plan for 1 groups of 3 ranks; parallel.ranks is 4"]);
    // The file says how tables are cut and what travels: nothing else may.
    let refused = |set: &str, says: &[&str]| {
        let ran = project.run(&format!(
            "train golden/config.toml --out refused --set parallel.ranks=3 \
             --set parallel.plan={} {set}",
            file.display()
        ));
        ran.says(2, says);
    };
    refused("--set parallel.route=unique", &["parallel.route has no meaning with a plan file"]);
    refused("--set table.1.sharding=row_wise", &["sharding has no meaning with a plan file"]);
    for (from, to) in
        [("\"ranks\": 3", "\"ranks\": 4611686018427387904"), ("\"replicas\": 1", "\"replicas\": 3")]
    {
        let text = String::from_utf8(plan.clone().into()).unwrap();
        assert!(text.contains(from), "{text}");
        project.write("plan.json", &text.replacen(from, to, 1));
        refused("", &["is a plan for"]);
    }
}

/// Groups that each hold all tables, averaged after every step: under sgd the mean over groups is
/// the step of one group.
#[test]
fn two_groups_of_two_under_sgd_are_one_of_four() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_jagged_adam");
    let project = project(&golden);
    let sgd = "--set optimizer.sparse.kind=sgd --set optimizer.sparse.lr=0.05";
    let text = std::fs::read_to_string(golden.join("config.toml")).unwrap();
    let start = text.find("[optimizer.sparse]").unwrap();
    let end = start + text[start..].find("\n[").unwrap_or(text.len() - start);
    let config = format!("{}{}", &text[..start], &text[end..]);
    let config = config.replace("= [\"train.", "= [\"golden/train.");
    let config = config.replace("= [\"eval.", "= [\"golden/eval.");
    project.write("config.toml", &config);
    for (out, set) in [("one", ""), ("two", "--set parallel.replicas=2")] {
        project.ok(&format!(
            "train config.toml --out {out} --set parallel.ranks=4 --set threads=4 {sgd} {set}"
        ));
    }
    let (one, two) = (project.steps("one"), project.steps("two"));
    assert_eq!(one.len(), two.len());
    for (a, b) in one.iter().zip(&two) {
        let (a, b) = (a.loss.unwrap(), b.loss.unwrap());
        assert!((a - b).abs() <= 1e-5 * a, "{a} and {b}");
    }
}

/// Bad input that only one rank has in its part stops all, before anything is written.
#[test]
fn bad_input_of_one_rank_stops_all() {
    let Some(shared) = shared() else { return };
    let golden = shared.join("golden/dlrm_jagged_adam");
    let project = project(&golden);
    let ran = project.run(
        "train golden/config.toml --out run --set parallel.ranks=4 --set threads=4 \
         --set table.0.rows=2",
    );
    ran.says(1, &["out of range for table", "of 2 rows"]);
    assert!(project.steps("run").is_empty());
}
