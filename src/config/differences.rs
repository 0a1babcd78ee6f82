//! Whether two ranks were given the same configuration.

use toml::{Table, Value};

/// Keys that ranks may have each their own value of: nothing that the others see depends on them.
/// Of lists of files only the length counts, and of plans ranks compare what is in them.
const OWN: [&str; 6] =
    ["threads", "tiers.ssd_dir", "data.train", "data.eval", "parallel.plan", "metrics.listen"];

/// The keys in which two resolved configurations of one run differ, with the value of each, in the
/// order of the first.
#[must_use]
pub fn differing_keys(one: &Table, other: &Table) -> Vec<String> {
    let (mut ones, mut others) = (Vec::new(), Vec::new());
    flatten("", &Value::Table(one.clone()), &mut ones);
    flatten("", &Value::Table(other.clone()), &mut others);
    let find = |list: &[(String, String)], key: &str| {
        let entry = list.iter().find(|(there, _)| there == key);
        entry.map_or_else(|| "absent".to_owned(), |(_, value)| value.clone())
    };
    let more = others.iter().filter(|(key, _)| ones.iter().all(|(there, _)| there != key));
    ones.iter()
        .chain(more)
        .map(|(key, _)| (key, find(&ones, key), find(&others, key)))
        .filter(|(_, one, other)| one != other)
        .map(|(key, one, other)| format!("{key} is {one} and {other}"))
        .collect()
}

/// Adds every value below `value` with its dotted key.
fn flatten(key: &str, value: &Value, out: &mut Vec<(String, String)>) {
    let inside =
        |name: &str| if key.is_empty() { name.to_owned() } else { format!("{key}.{name}") };
    match value {
        Value::Array(files) if OWN.contains(&key) => {
            out.push((key.to_owned(), format!("a list of {}", files.len())));
        }
        _ if OWN.contains(&key) => {}
        Value::Table(table) => table.iter().for_each(|(name, v)| flatten(&inside(name), v, out)),
        Value::Array(list) if list.iter().all(Value::is_table) && !list.is_empty() => {
            for (index, element) in list.iter().enumerate() {
                flatten(&inside(&index.to_string()), element, out);
            }
        }
        value => out.push((key.to_owned(), value.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    #[test]
    fn every_difference_that_counts_is_named_with_both_values() {
        let one = table(
            "threads = 1\nseed = 1\n[data]\ntrain = [\"/a/x\"]\neval = []\n[metrics]\nlisten = \"a\"\n\
             [[table]]\nname = \"c\"\nrows = 3\n[[table]]\nname = \"d\"\nfeatures = [\"d\"]",
        );
        assert_eq!(differing_keys(&one, &one), [] as [String; 0]);
        let same = table(
            "threads = 7\nseed = 1\n[data]\ntrain = [\"/b/y\"]\neval = []\n\
             [[table]]\nname = \"c\"\nrows = 3\n[[table]]\nname = \"d\"\nfeatures = [\"d\"]",
        );
        assert_eq!(differing_keys(&one, &same), [] as [String; 0]);
        let other = table(
            "seed = 2\n[data]\ntrain = [\"/b/y\", \"/b/z\"]\neval = []\n\
             [[table]]\nname = \"c\"\nrows = 3\n[[table]]\nname = \"d\"\nfeatures = [\"d\", \"e\"]\n\
             [[table]]\nname = \"f\"",
        );
        assert_eq!(
            differing_keys(&one, &other),
            [
                "seed is 1 and 2",
                "data.train is a list of 1 and a list of 2",
                "table.1.features is [\"d\"] and [\"d\", \"e\"]",
                "table.2.name is absent and \"f\""
            ]
        );
    }
}
