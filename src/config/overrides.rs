//! `--set a.b=v`: changes to a configuration before it is read.

use toml::{Table, Value};

use super::Fault;

/// Applies `assignment` (`dotted.key=value`) to `root`.
///
/// Array elements are named by index (`table.0.rows=10`). The value is TOML; what is not TOML is
/// a string, so that `data.format=raw` needs no quotes.
pub(super) fn apply(root: &mut Table, assignment: &str) -> Result<(), Fault> {
    let fault = |key: &str, message: String| Fault { key: key.to_owned(), message };
    let Some((key, text)) = assignment.split_once('=') else {
        return Err(fault(assignment, "--set takes key=value".into()));
    };
    let key = key.trim();
    let steps: Vec<&str> = key.split('.').collect();
    if steps.iter().any(|step| step.is_empty()) {
        return Err(fault(key, "--set: an empty part in the key".into()));
    }
    let (last, way) = steps.split_last().expect("split gives at least one part");
    let mut holder = Holder::Table(root);
    for step in way {
        holder = holder.enter(step).map_err(|message| fault(key, message))?;
    }
    holder.put(last, value(text)).map_err(|message| fault(key, message))
}

/// The text as a TOML value, or as a bare string.
fn value(text: &str) -> Value {
    format!("v = {text}")
        .parse::<Table>()
        .ok()
        // `1\nw = 2` would parse as two keys.
        .filter(|table| table.len() == 1)
        .and_then(|mut table| table.remove("v"))
        .unwrap_or_else(|| Value::String(text.trim().to_owned()))
}

/// A place that holds named or numbered values.
enum Holder<'t> {
    Table(&'t mut Table),
    Array(&'t mut Vec<Value>),
}

impl<'t> Holder<'t> {
    fn enter(self, step: &str) -> Result<Holder<'t>, String> {
        let inner = match self {
            Holder::Table(table) => {
                table.entry(step.to_owned()).or_insert_with(|| Value::Table(Table::new()))
            }
            Holder::Array(array) => element(array, step)?,
        };
        match inner {
            Value::Table(table) => Ok(Holder::Table(table)),
            Value::Array(array) => Ok(Holder::Array(array)),
            other => Err(format!("--set: `{step}` is the value {other}, it has no parts")),
        }
    }

    fn put(self, step: &str, value: Value) -> Result<(), String> {
        match self {
            Holder::Table(table) => {
                table.insert(step.to_owned(), value);
            }
            Holder::Array(array) => *element(array, step)? = value,
        }
        Ok(())
    }
}

fn element<'t>(array: &'t mut [Value], step: &str) -> Result<&'t mut Value, String> {
    let len = array.len();
    step.parse::<usize>()
        .ok()
        .and_then(|index| array.get_mut(index))
        .ok_or_else(|| format!("--set: no element `{step}`; the array has {len}, counted from 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(text: &str, assignments: &[&str]) -> Result<Table, Fault> {
        let mut table = text.parse::<Table>().unwrap();
        for assignment in assignments {
            apply(&mut table, assignment)?;
        }
        Ok(table)
    }

    #[test]
    fn keys_elements_values_and_bare_words() {
        let table = set(
            "[[table]]\nrows = 1\n[data]\ntrain = [\"x\", \"y\"]",
            &[
                "table.0.rows=10",
                "data.train=[\"a\", \"b\"]",
                "data.train.1=c",
                "data.format=criteo-tsv",
                "train.max_steps = 5",
                "optimizer.dense.lr=1e-3",
                "model.wide=true",
            ],
        )
        .unwrap();
        let wanted: Table = "[[table]]\nrows = 10\n[data]\ntrain = [\"a\", \"c\"]\nformat = \"criteo-tsv\"\n[train]\nmax_steps = 5\n[optimizer.dense]\nlr = 1e-3\n[model]\nwide = true".parse().unwrap();
        assert_eq!(table, wanted);
    }

    #[test]
    fn wrong_assignments_say_why() {
        for (assignment, part) in [
            ("nothing", "key=value"),
            ("a..b=1", "empty part"),
            ("table.1.rows=2", "the array has 1"),
            ("table.x.rows=2", "the array has 1"),
            ("seed.x=2", "has no parts"),
        ] {
            let fault = set("seed = 1\n[[table]]\nrows = 1", &[assignment]).unwrap_err();
            assert!(fault.message.contains(part), "{assignment}: {}", fault.message);
        }
    }
}
