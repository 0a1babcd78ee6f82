//! Names of metrics elsewhere in the docs: the board, the alert rules and the policies ask for what
//! is there.

use std::collections::BTreeSet;

use super::{documented, promtool, repository};

fn read(name: &str) -> String {
    std::fs::read_to_string(repository("docs/monitoring").join(name)).unwrap()
}

/// Every name of ours in a text.
fn names(text: &str) -> BTreeSet<String> {
    let part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut names = BTreeSet::new();
    for (at, _) in text.match_indices("tessera_") {
        if !text[..at].ends_with(part) {
            names.insert(text[at..].chars().take_while(|&c| part(c)).collect());
        }
    }
    names
}

/// Fails unless every name is a series of a documented metric: a histogram's by its parts.
fn all_exist(file: &str, text: &str) {
    let mut series = BTreeSet::new();
    for (name, row) in documented() {
        if row.kind == "histogram" {
            series.extend(["_bucket", "_sum", "_count"].map(|part| format!("{name}{part}")));
        } else {
            series.insert(name);
        }
    }
    let names = names(text);
    assert!(names.len() >= 4, "{file}: {names:?}");
    let unknown: Vec<_> = names.difference(&series).collect();
    assert!(unknown.is_empty(), "{file} asks for {unknown:?}");
}

/// The values of `key` anywhere in a JSON tree.
fn find<'j>(json: &'j serde_json::Value, key: &str, found: &mut Vec<&'j serde_json::Value>) {
    match json {
        serde_json::Value::Object(map) => {
            for (name, value) in map {
                if name == key {
                    found.push(value);
                }
                find(value, key, found);
            }
        }
        serde_json::Value::Array(list) => list.iter().for_each(|value| find(value, key, found)),
        _ => {}
    }
}

#[test]
fn the_policies_of_the_configuration_are_counted_where_it_says() {
    let text = std::fs::read_to_string(repository("docs/config.md")).unwrap();
    all_exist("docs/config.md", &text);
}

#[test]
fn the_board_shows_series_that_exist() {
    let text = read("grafana-dashboard.json");
    let board: serde_json::Value = serde_json::from_str(&text).unwrap();
    all_exist("the board", &text);
    let panels = board["panels"].as_array().unwrap();
    let ids: BTreeSet<_> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "ids of panels are not unique");
    let mut placed = BTreeSet::new();
    for panel in panels {
        let title = panel["title"].as_str().unwrap();
        if panel["type"] != "row" {
            let targets = panel["targets"].as_array().unwrap();
            assert!(!targets.is_empty(), "{title} shows nothing");
            for target in targets {
                let expression = target["expr"].as_str().unwrap();
                let (open, closed) =
                    (expression.matches('(').count(), expression.matches(')').count());
                assert_eq!(open, closed, "{title}: {expression}");
                assert!(expression.contains("instance=~\"$instance\""), "{title}: {expression}");
            }
        }
        let [x, y, w, h] =
            ["x", "y", "w", "h"].map(|side| panel["gridPos"][side].as_u64().unwrap());
        assert!(x + w <= 24, "{title} is wider than the board");
        for cell in (x..x + w).flat_map(|x| (y..y + h).map(move |y| (x, y))) {
            assert!(placed.insert(cell), "{title} lies on another panel");
        }
    }
    // What one wants to see is there.
    let shown = names(&text);
    for name in [
        "tessera_train_samples_total",
        "tessera_train_loss",
        "tessera_train_window_ne_ratio",
        "tessera_train_stage_seconds_sum",
        "tessera_embedding_lookup_seconds_bucket",
        "tessera_embedding_rows_read_total",
        "tessera_embedding_rows_updated_total",
        "tessera_embedding_bad_ids_total",
        "tessera_data_bad_input_total",
        "tessera_embedding_resident_bytes",
        "tessera_checkpoint_last_step",
        "tessera_eval_ratio",
    ] {
        assert!(shown.contains(name), "{name} is not on the board");
    }
    // Every data source is the one that the reader chooses.
    let mut sources = Vec::new();
    find(&board["panels"], "datasource", &mut sources);
    assert!(sources.iter().all(|source| source["uid"] == "${datasource}"));
}

#[test]
fn the_alert_rules_ask_for_series_that_exist() {
    let text = read("alerts.yml");
    all_exist("the rules", &text);
    let alerts: Vec<&str> =
        text.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(alerts.len() >= 6, "{alerts:?}");
    assert_eq!(BTreeSet::from_iter(&alerts).len(), alerts.len(), "{alerts:?}");
    let count = |key: &str| text.lines().filter(|line| line.trim().starts_with(key)).count();
    for key in ["expr:", "for:", "severity:", "summary:", "description:"] {
        assert_eq!(count(key), alerts.len(), "{key}");
    }
    let readme = read("README.md");
    for alert in alerts {
        assert!(readme.contains(&format!("`{alert}`")), "the README says nothing of {alert}");
    }
    let path = repository("docs/monitoring/alerts.yml");
    promtool(&["check", "rules", path.to_str().unwrap()], "");
}
