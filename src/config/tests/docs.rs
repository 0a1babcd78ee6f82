//! docs/config.md against the code, in both directions.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use toml::{Table, Value};

use super::draw::{SPARSE_KINDS, samples};
use super::{SMALL, faults, load, one_fault, parse};

/// The values at `key` (`table[].rows`: of every table), none where it is not there.
fn values<'v>(root: &'v Table, key: &str) -> Vec<&'v Value> {
    let mut tables = vec![root];
    let (way, last) = key.rsplit_once('.').map_or((None, key), |(way, last)| (Some(way), last));
    for step in way.into_iter().flat_map(|way| way.split('.')) {
        let name = step.trim_end_matches("[]");
        tables = tables
            .into_iter()
            .flat_map(|table| match table.get(name) {
                Some(Value::Table(inner)) => vec![inner],
                Some(Value::Array(inner)) => inner.iter().filter_map(Value::as_table).collect(),
                _ => Vec::new(),
            })
            .collect();
    }
    tables.into_iter().filter_map(|table| table.get(last)).collect()
}

/// Puts `value` at `key` in the first section that has it (or takes it out). Gives the key's name
/// in faults.
fn change(root: &mut Table, key: &str, value: Option<Value>) -> Option<String> {
    let (way, last) = key.rsplit_once('.').map_or((None, key), |(way, last)| (Some(way), last));
    let Some((first, rest)) = way.map(|way| way.split_once('.').unwrap_or((way, ""))) else {
        root.get(last)?;
        match value {
            Some(value) => root.insert(last.to_owned(), value),
            None => root.remove(last),
        };
        return Some(last.to_owned());
    };
    let rest = if rest.is_empty() { last.to_owned() } else { format!("{rest}.{last}") };
    match root.get_mut(first.trim_end_matches("[]"))? {
        Value::Table(inner) => Some(format!("{first}.{}", change(inner, &rest, value)?)),
        Value::Array(inner) => inner.iter_mut().enumerate().find_map(|(index, element)| {
            let name = change(element.as_table_mut()?, &rest, value.clone())?;
            Some(format!("{}.{index}.{name}", first.trim_end_matches("[]")))
        }),
        _ => None,
    }
}

/// A row of the tables of keys in docs/config.md.
struct Row {
    key: String,
    kind: String,
    default: String,
}

fn docs() -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/config.md")).unwrap()
}

/// The cells of every row of every table.
fn cells(docs: &str) -> impl Iterator<Item = Vec<&str>> {
    docs.lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |"))
        .map(|line| line.split(" | ").collect())
}

fn rows(docs: &str) -> Vec<Row> {
    cells(docs)
        .filter_map(|cells| {
            let key = cells[0].strip_prefix('`')?.strip_suffix('`')?;
            (cells.len() == 4 && !key.contains(['`', ' '])).then(|| Row {
                key: key.to_owned(),
                kind: cells[1].to_owned(),
                default: cells[2].to_owned(),
            })
        })
        .collect()
}

/// `a`, `b` and `c` of a cell.
fn quoted(cell: &str) -> BTreeSet<String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned).collect()
}

/// The names in `a, b and c`.
fn listed(text: &str) -> BTreeSet<String> {
    text.replace(" and ", ", ").split(", ").map(str::to_owned).collect()
}

/// The default of a row where it is a constant.
fn constant(default: &str) -> Option<Value> {
    let text = default.strip_prefix('`')?.strip_suffix('`')?;
    format!("v = {text}").parse::<Table>().ok()?.remove("v")
}

/// A sample that gives `key`, as a table.
fn sample_with(key: &str) -> Table {
    samples()
        .map(|text| text.parse::<Table>().unwrap())
        .find(|given| !values(given, key).is_empty())
        .unwrap_or_else(|| panic!("no sample gives {key}"))
}

#[test]
fn the_docs_list_exactly_the_keys_that_are_read() {
    let known: BTreeSet<String> = samples()
        .flat_map(|text| parse(&text, &[]).unwrap_or_else(|e| panic!("{e}\n{text}")).1)
        .collect();
    let holds_keys = |key: &str| {
        let inside = [format!("{key}."), format!("{key}[].")];
        known.iter().any(|other| inside.iter().any(|prefix| other.starts_with(prefix)))
    };
    let (sections, keys): (BTreeSet<&str>, BTreeSet<&str>) =
        known.iter().map(String::as_str).partition(|key| holds_keys(key));

    let own = |section: &str| -> BTreeSet<&str> {
        keys.iter().filter_map(|key| key.strip_prefix(section)).collect()
    };
    assert_eq!(own("table[].optimizer."), own("optimizer.sparse."));
    let keys: BTreeSet<&str> =
        keys.into_iter().filter(|key| !key.starts_with("table[].optimizer.")).collect();

    let docs = docs();
    let rows = rows(&docs);
    let documented: BTreeSet<&str> = rows.iter().map(|row| row.key.as_str()).collect();
    assert_eq!(documented.len(), rows.len(), "a key has two rows");
    let missing: Vec<_> = keys.difference(&documented).collect();
    let stale: Vec<_> = documented.difference(&keys).collect();
    assert!(
        missing.is_empty() && stale.is_empty(),
        "not in the docs: {missing:?}\nnot in the code: {stale:?}"
    );

    let headings: BTreeSet<String> = docs
        .lines()
        .filter(|line| line.starts_with('#'))
        .flat_map(quoted)
        .filter(|name| name.starts_with('['))
        .collect();
    let wanted: BTreeSet<String> = sections
        .into_iter()
        .map(|section| match section {
            "table" => "[[table]]".to_owned(),
            other => format!("[{}]", other.replace("[]", "")),
        })
        .collect();
    assert_eq!(headings, wanted);
}

#[test]
fn defaults_in_the_docs_are_those_in_force() {
    let docs = docs();
    let rows = rows(&docs);
    let mut checked = BTreeSet::new();
    for text in samples() {
        let given: Table = text.parse().unwrap();
        let resolved = load(&text, &[]).resolved;
        for row in rows.iter().filter(|row| values(&given, &row.key).is_empty()) {
            for value in values(&resolved, &row.key) {
                match constant(&row.default) {
                    Some(default) => assert_eq!(*value, default, "{}\n{text}", row.key),
                    None => assert_ne!(row.default, "none", "{} = {value}\n{text}", row.key),
                }
                checked.insert(row.key.as_str());
            }
        }
    }
    for row in rows.iter().filter(|row| constant(&row.default).is_some()) {
        assert!(checked.contains(row.key.as_str()), "the default of {} was never seen", row.key);
    }
}

#[test]
fn what_the_docs_require_is_missed() {
    let docs = docs();
    let rows = rows(&docs);
    let required: Vec<&Row> = rows.iter().filter(|row| row.default == "required").collect();
    assert!(required.len() >= 15);
    for row in required {
        let mut given = sample_with(&row.key);
        let name = change(&mut given, &row.key, None).unwrap();
        let faults = faults(&given.to_string(), &[]);
        let missed = faults.iter().any(|f| f.key == name && f.message.contains("missing"));
        assert!(missed, "{name} taken out: {faults:?}");
    }
}

#[test]
fn types_and_choices_in_the_docs_are_those_of_the_code() {
    let docs = docs();
    let mut rules = BTreeMap::<String, usize>::new();
    for row in rows(&docs) {
        let refused = |value: Value, part: &str| {
            let mut given = sample_with(&row.key);
            let name = change(&mut given, &row.key, Some(value.clone())).unwrap();
            let faults = faults(&given.to_string(), &[]);
            let fault =
                faults.iter().find(|fault| fault.key == name && fault.message.contains(part));
            fault.unwrap_or_else(|| panic!("{name} = {value}: {faults:?}")).message.clone()
        };
        let rule = row.kind.split('`').next().unwrap().to_owned();
        let choices = match row.key.as_str() {
            "optimizer.sparse.kind" => SPARSE_KINDS.iter().map(|&kind| kind.to_owned()).collect(),
            _ => quoted(&row.kind),
        };
        if row.key == "parallel.plan" {
            refused(Value::String("zzz".into()), "only \"auto\"");
            continue;
        }
        if !choices.is_empty() {
            let message = refused(Value::String("zzz".into()), "is not one of ");
            let mut names = listed(message.split_once("is not one of ").unwrap().1);
            // Tables can, a DLRM cannot; and criteo-tsv has one transform.
            if row.key == "table[].pooling" {
                names.remove("none");
            }
            if row.key == "data.dense_transform" {
                names.insert("none".into());
            }
            assert_eq!(names, choices, "{}", row.key);
            *rules.entry("choices".into()).or_default() += 1;
            continue;
        }
        let wrong: &[Value] = match row.kind.as_str() {
            "whole number" => &[Value::Integer(-1), Value::Float(1.5)],
            "whole number from 1" => &[Value::Integer(0), Value::Integer(-1), Value::Float(1.5)],
            "whole number from 1 to 4096" => &[Value::Integer(0), Value::Integer(4097)],
            "number above 0, below 1" => &[Value::Float(0.0), Value::Float(1.0)],
            "whole number from 1 to 1024" => &[Value::Integer(0), Value::Integer(1025)],
            "whole number from 1 to 255" => &[Value::Integer(0), Value::Integer(256)],
            "whole number or list" => {
                &[Value::Integer(-1), Value::Integer(65_537), Value::Boolean(true)]
            }
            "number from 0" => &[Value::Float(-0.1), Value::Float(f64::NAN)],
            "number above 0" => &[Value::Float(0.0), Value::Float(f64::INFINITY)],
            "number from 0, below 1" => &[Value::Float(-0.1), Value::Float(1.0)],
            "number from 0 to 1" => &[Value::Float(-0.1), Value::Float(1.1)],
            "number from 0 to 20" => &[Value::Float(-0.1), Value::Float(20.1)],
            "number from 0 to 100" => &[Value::Float(-0.1), Value::Float(100.1)],
            "number from 0.000001 to 0.999999" => &[Value::Float(0.0), Value::Float(1.0)],
            "true or false" => &[Value::Integer(1), Value::String("true".into())],
            "name"
            | "list of names"
            | "name or list of names"
            | "path"
            | "path or list of paths"
            | "list of whole numbers"
            | "address and port" => &[Value::Integer(1)],
            other => panic!("{}: no rule for the type `{other}`", row.key),
        };
        for value in wrong {
            refused(value.clone(), "");
        }
        *rules.entry(rule).or_default() += 1;
    }
    assert!(rules.len() >= 15, "{rules:?}");
}

#[test]
fn the_docs_list_the_options_of_every_kind() {
    let docs = docs();
    let mut kinds = BTreeSet::new();
    for row in cells(&docs).filter(|row| SPARSE_KINDS.contains(&row[0])) {
        let kind = row[0];
        let mut wanted = listed(row[1]);
        wanted.remove("none");
        wanted.extend(["kind".to_owned(), "lr".to_owned()]);
        let set = [
            format!("optimizer.sparse={{kind=\"{kind}\", lr=1, zzz=1}}"),
            // Tables that inherit do not say it again.
            "table.0.optimizer.lr=1".to_owned(),
        ];
        let set: Vec<&str> = set.iter().map(String::as_str).collect();
        let faults = faults(SMALL, &set);
        assert_eq!(faults.len(), 1, "{faults:?}");
        let message = &faults[0].message;
        let takes = message.split_once("(it takes ").and_then(|(_, rest)| rest.split_once(')'));
        assert_eq!(listed(takes.unwrap().0), wanted, "{kind}: {message}");
        assert!(message.contains(kind), "{message}");
        kinds.insert(kind);
    }
    assert_eq!(kinds.len(), SPARSE_KINDS.len(), "{kinds:?}");
}

#[test]
fn the_docs_say_what_is_refused_in_this_version() {
    let docs = docs();
    let says = |given: &str| {
        let row = cells(&docs).find(|row| row[0] == given).unwrap_or_else(|| panic!("{given}"));
        row[1].trim_matches('`').to_owned()
    };
    let given = "`table[].pooling` \"none\"";
    one_fault(SMALL, &["table.0.pooling=none"], "table.0.pooling", &says(given));
}
