//! Reads a TOML tree key by key and remembers everything that is wrong with it.
//!
//! A [`Section`] is one table of the configuration. Reading a key takes it out of the table, notes
//! its name, and writes the value used (given or default) to the resolved configuration; what is
//! left at the end is an unknown key. Faults are collected, never returned, so that one run of
//! the program tells a user all of them.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use toml::{Table, Value};

use super::Fault;
use super::value::{FromValue, absolute, expand};

/// What is shared by all sections of one configuration.
pub(super) struct Context {
    /// Folder that relative paths start from.
    base: PathBuf,
    faults: RefCell<Vec<Fault>>,
    resolved: RefCell<Table>,
    known: RefCell<BTreeSet<String>>,
}

impl Context {
    pub(super) fn new(base: PathBuf) -> Self {
        Self {
            base,
            faults: Vec::new().into(),
            resolved: Table::new().into(),
            known: BTreeSet::new().into(),
        }
    }

    /// Notes a fault of `key`.
    pub(super) fn fault(&self, key: impl Into<String>, message: impl Into<String>) {
        self.faults.borrow_mut().push(Fault { key: key.into(), message: message.into() });
    }

    /// Faults, the resolved configuration and every key that was asked for (`table[].rows`).
    pub(super) fn finish(self) -> (Vec<Fault>, Table, BTreeSet<String>) {
        (self.faults.into_inner(), self.resolved.into_inner(), self.known.into_inner())
    }

    fn record(&self, path: &[Step], key: &str, value: Value) {
        let mut root = self.resolved.borrow_mut();
        let mut table = &mut *root;
        for step in path {
            let entry = table.entry(step.name.clone());
            table = match step.index {
                None => entry
                    .or_insert_with(|| Value::Table(Table::new()))
                    .as_table_mut()
                    .expect("a section is recorded as a table"),
                Some(index) => {
                    let array = entry
                        .or_insert_with(|| Value::Array(Vec::new()))
                        .as_array_mut()
                        .expect("repeated sections are recorded as an array");
                    while array.len() <= index {
                        array.push(Value::Table(Table::new()));
                    }
                    array[index].as_table_mut().expect("an element was made as a table")
                }
            };
        }
        table.insert(key.to_owned(), value);
    }
}

/// One step on the way to a section: a key, and an index where the key holds several sections.
#[derive(Clone)]
struct Step {
    name: String,
    index: Option<usize>,
}

/// One table of the configuration, being read.
pub(super) struct Section<'a> {
    context: &'a Context,
    path: Vec<Step>,
    table: Table,
    asked: RefCell<BTreeSet<String>>,
    /// Inherited keys whose faults are told where they were written.
    quiet: BTreeSet<String>,
}

impl<'a> Section<'a> {
    pub(super) fn root(context: &'a Context, table: Table) -> Self {
        Self::new(context, Vec::new(), table)
    }

    fn new(context: &'a Context, path: Vec<Step>, table: Table) -> Self {
        Self { context, path, table, asked: BTreeSet::new().into(), quiet: BTreeSet::new() }
    }

    /// The full name of `key`: `table.0.rows`.
    pub(super) fn name(&self, key: &str) -> String {
        let mut name = String::new();
        for step in &self.path {
            name.push_str(&step.name);
            name.push('.');
            if let Some(index) = step.index {
                name.push_str(&format!("{index}."));
            }
        }
        name + key
    }

    /// Notes a fault of `key` in this section.
    pub(super) fn fault(&self, key: &str, message: impl Into<String>) {
        if !self.quiet.contains(key) {
            self.context.fault(self.name(key), message);
        }
    }

    /// Number of faults in the whole configuration so far.
    pub(super) fn faults_so_far(&self) -> usize {
        self.context.faults.borrow().len()
    }

    /// Whether `key` is given (and not read yet).
    pub(super) fn has(&self, key: &str) -> bool {
        self.ask(key);
        self.table.contains_key(key)
    }

    /// Passes over keys that another fault leaves without a meaning.
    pub(super) fn ignore(&mut self, keys: &[&str]) {
        for key in keys {
            self.take(key);
        }
    }

    /// Refuses `key`, which has no meaning here, if it is given; `reason` says why.
    pub(super) fn refuse(&mut self, key: &str, reason: &str) {
        if self.take(key).is_some() {
            self.fault(key, reason);
        }
    }

    /// Whether nothing is given.
    pub(super) fn is_empty(&self) -> bool {
        self.table.is_empty()
    }

    fn take(&mut self, key: &str) -> Option<Value> {
        self.ask(key);
        self.table.remove(key)
    }

    fn ask(&self, key: &str) {
        let mut name = String::new();
        for step in &self.path {
            name.push_str(&step.name);
            name.push_str(if step.index.is_some() { "[]." } else { "." });
        }
        self.context.known.borrow_mut().insert(name + key);
        self.asked.borrow_mut().insert(key.to_owned());
    }

    fn record(&self, key: &str, value: Value) {
        self.context.record(&self.path, key, value);
    }

    /// The value of `key` if it is given; a value of another type is a fault.
    pub(super) fn optional<T: FromValue>(&mut self, key: &str) -> Option<T> {
        let value = self.take(key)?;
        let read = T::from_value(&value);
        match read {
            Some(_) => self.record(key, value),
            None => self.fault(key, format!("expected {}, found `{value}`", T::EXPECTED)),
        }
        read
    }

    /// The value of `key`, or `default`, which is then written to the resolved configuration.
    pub(super) fn or<T: FromValue>(&mut self, key: &str, default: T) -> T {
        let given = self.has(key);
        match self.optional(key) {
            Some(value) => value,
            None => {
                if !given {
                    self.record(key, default.to_value());
                }
                default
            }
        }
    }

    /// The value of `key`, which must be given; `fallback` stands in after a fault.
    pub(super) fn required<T: FromValue>(&mut self, key: &str, fallback: T) -> T {
        if !self.has(key) {
            self.fault(key, "missing");
        }
        self.optional(key).unwrap_or(fallback)
    }

    /// A number for which `ok` holds; `rule` says it in words.
    pub(super) fn number(
        &mut self,
        key: &str,
        default: f64,
        ok: impl Fn(f64) -> bool,
        rule: &str,
    ) -> f64 {
        let value = self.or(key, default);
        if !ok(value) {
            self.fault(key, format!("must be {rule}, is {value}"));
        }
        value
    }

    /// A whole number of at least 1, which must be given.
    pub(super) fn required_at_least_one(&mut self, key: &str) -> usize {
        let value = self.required(key, 1usize);
        if value == 0 {
            self.fault(key, "must be at least 1");
        }
        value
    }

    /// A fault if `value` of `key` is above `max`.
    pub(super) fn at_most(&self, key: &str, value: usize, max: usize) {
        if value > max {
            self.fault(key, format!("must be at most {max}, is {value}"));
        }
    }

    /// A whole number of at least 1.
    pub(super) fn at_least_one<T: FromValue + PartialEq + From<u8>>(
        &mut self,
        key: &str,
        default: T,
    ) -> T {
        let value = self.or(key, default);
        if value == T::from(0) {
            self.fault(key, "must be at least 1");
        }
        value
    }

    /// One of several named values; the first is the default.
    pub(super) fn choice<T: Copy>(&mut self, key: &str, choices: &[(&str, T)]) -> T {
        let name = self.or(key, choices[0].0.to_owned());
        self.pick(key, &name, choices).unwrap_or(choices[0].1)
    }

    /// One of several named values, which must be given.
    pub(super) fn required_choice<T: Copy>(
        &mut self,
        key: &str,
        choices: &[(&str, T)],
    ) -> Option<T> {
        if !self.has(key) {
            self.fault(key, format!("missing; it is one of {}", list(choices.iter().map(|c| c.0))));
            return None;
        }
        let name = self.optional::<String>(key)?;
        self.pick(key, &name, choices)
    }

    fn pick<T: Copy>(&self, key: &str, name: &str, choices: &[(&str, T)]) -> Option<T> {
        let found = choices.iter().find(|choice| choice.0 == name).map(|choice| choice.1);
        if found.is_none() {
            let names = list(choices.iter().map(|c| c.0));
            self.fault(key, format!("`{name}` is not one of {names}"));
        }
        found
    }

    /// A string or a list of strings.
    pub(super) fn strings(&mut self, key: &str) -> Option<Vec<String>> {
        if let Some(Value::String(one)) = self.table.get(key) {
            let one = one.clone();
            self.table.insert(key.to_owned(), Value::Array(vec![Value::String(one)]));
        }
        self.optional(key)
    }

    /// A string or a list of strings, or `default`, which is then written to the resolved
    /// configuration.
    pub(super) fn strings_or(&mut self, key: &str, default: Vec<String>) -> Vec<String> {
        let given = self.has(key);
        self.strings(key).unwrap_or_else(|| {
            if !given {
                self.record(key, default.to_value());
            }
            default
        })
    }

    /// Paths (a string or a list): `${NAME}` and `${NAME:-default}` filled in from the
    /// environment, relative ones taken from the configuration's folder. `None` when the key is
    /// not given, or after a fault.
    pub(super) fn paths(&mut self, key: &str) -> Option<Vec<PathBuf>> {
        let given = self.strings(key)?;
        let mut paths = Vec::with_capacity(given.len());
        for text in &given {
            match expand(text, |name| std::env::var(name).ok()) {
                Ok(text) => paths.push(absolute(&self.context.base, Path::new(&text))),
                Err(message) => self.fault(key, message),
            }
        }
        if paths.len() < given.len() {
            return None;
        }
        let record = paths.iter().map(|path| Value::String(path.display().to_string()));
        self.record(key, Value::Array(record.collect()));
        Some(paths)
    }

    /// The section under `key`; empty when it is not given.
    pub(super) fn section(&mut self, key: &str) -> Section<'a> {
        let table = match self.take(key) {
            Some(Value::Table(table)) => table,
            Some(other) => {
                self.fault(key, format!("expected a section, found `{other}`"));
                Table::new()
            }
            None => Table::new(),
        };
        self.child(key, None, table)
    }

    /// The sections under `key`, in order.
    pub(super) fn sections(&mut self, key: &str) -> Vec<Section<'a>> {
        let values = match self.take(key) {
            Some(Value::Array(values)) => values,
            Some(other) => {
                self.fault(key, format!("expected [[{key}]] sections, found `{other}`"));
                Vec::new()
            }
            None => Vec::new(),
        };
        let mut sections = Vec::new();
        for (index, value) in values.into_iter().enumerate() {
            match value {
                Value::Table(table) => sections.push(self.child(key, Some(index), table)),
                other => {
                    self.fault(key, format!("element {index}: expected a section, found `{other}`"))
                }
            }
        }
        sections
    }

    fn child(&self, key: &str, index: Option<usize>, table: Table) -> Section<'a> {
        let mut path = self.path.clone();
        path.push(Step { name: key.to_owned(), index });
        Section::new(self.context, path, table)
    }

    /// Adds the entries of `other` that this section does not give itself. `faulty` says that
    /// `other` was refused already: then these entries are not complained about again.
    pub(super) fn inherit(&mut self, other: &Table, faulty: bool) {
        for (key, value) in other {
            if !self.table.contains_key(key) {
                self.table.insert(key.clone(), value.clone());
                if faulty {
                    self.quiet.insert(key.clone());
                }
            }
        }
    }

    /// The entries as they were given.
    pub(super) fn entries(&self) -> &Table {
        &self.table
    }

    /// Ends the reading: whatever was not asked for is unknown. `owner` says what does not know
    /// it ("optimizer sgd"), or nothing.
    pub(super) fn finish(self, owner: Option<&str>) {
        let asked = self.asked.borrow();
        for key in self.table.keys() {
            let near = nearest(key, asked.iter().map(String::as_str));
            let hint = near.map_or_else(String::new, |near| format!("; did you mean `{near}`?"));
            match owner {
                None => self.fault(key, format!("unknown key{hint}")),
                Some(owner) => {
                    let names = list(asked.iter());
                    let message = format!("{owner} does not take this option (it takes {names})");
                    self.fault(key, message + &hint);
                }
            }
        }
    }
}

/// `a, b and c`.
pub(super) fn list<T: Display>(items: impl Iterator<Item = T>) -> String {
    let items: Vec<String> = items.map(|item| item.to_string()).collect();
    match items.split_last() {
        None => "nothing".into(),
        Some((only, [])) => only.clone(),
        Some((last, rest)) => format!("{} and {last}", rest.join(", ")),
    }
}

/// The known name closest to `key`, if one is close.
fn nearest<'n>(key: &str, known: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    known
        .map(|name| (edit_distance(key, name), name))
        .min()
        .filter(|(distance, _)| *distance <= 1 + key.len() / 4)
        .map(|(_, name)| name)
}

/// Levenshtein's distance between two short names.
fn edit_distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, &y) in b.iter().enumerate() {
            let change = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = change.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_near_miss_is_named() {
        assert_eq!(nearest("epoch", ["epochs", "keep"].into_iter()), Some("epochs"));
        assert_eq!(nearest("colour", ["epochs", "keep"].into_iter()), None);
        assert_eq!(list(["a", "b", "c"].iter()), "a, b and c");
    }
}
