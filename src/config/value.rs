//! From TOML values to Rust's, and from the text of a path to the path.

use std::path::{Path, PathBuf};

use toml::Value;

/// A type that can be read from a TOML value.
pub(super) trait FromValue: Sized {
    /// What a right value is, for messages: "a whole number from 0".
    const EXPECTED: &'static str;
    fn from_value(value: &Value) -> Option<Self>;
    fn to_value(&self) -> Value;
}

impl FromValue for bool {
    const EXPECTED: &'static str = "true or false";
    fn from_value(value: &Value) -> Option<Self> {
        value.as_bool()
    }
    fn to_value(&self) -> Value {
        Value::Boolean(*self)
    }
}

impl FromValue for u64 {
    const EXPECTED: &'static str = "a whole number from 0";
    fn from_value(value: &Value) -> Option<Self> {
        u64::try_from(value.as_integer()?).ok()
    }
    fn to_value(&self) -> Value {
        Value::Integer(i64::try_from(*self).expect("read from an i64, or a small default"))
    }
}

impl FromValue for usize {
    const EXPECTED: &'static str = <u64 as FromValue>::EXPECTED;
    fn from_value(value: &Value) -> Option<Self> {
        usize::try_from(value.as_integer()?).ok()
    }
    fn to_value(&self) -> Value {
        (*self as u64).to_value()
    }
}

impl FromValue for f64 {
    const EXPECTED: &'static str = "a finite number";
    fn from_value(value: &Value) -> Option<Self> {
        let number = value.as_float().or_else(|| value.as_integer().map(|i| i as f64))?;
        number.is_finite().then_some(number)
    }
    fn to_value(&self) -> Value {
        Value::Float(*self)
    }
}

impl FromValue for String {
    const EXPECTED: &'static str = "a string";
    fn from_value(value: &Value) -> Option<Self> {
        value.as_str().map(str::to_owned)
    }
    fn to_value(&self) -> Value {
        Value::String(self.clone())
    }
}

impl<T: FromValue> FromValue for Vec<T> {
    const EXPECTED: &'static str = "a list";
    fn from_value(value: &Value) -> Option<Self> {
        value.as_array()?.iter().map(T::from_value).collect()
    }
    fn to_value(&self) -> Value {
        Value::Array(self.iter().map(T::to_value).collect())
    }
}

/// Fills `${NAME}` and `${NAME:-default}` in.
pub(super) fn expand(
    text: &str,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<String, String> {
    let mut out = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("${") {
        let Some(length) = rest[start..].find('}') else {
            return Err(format!("`{text}`: `${{` without `}}`"));
        };
        out.push_str(&rest[..start]);
        let inside = &rest[start + 2..start + length];
        let (name, default) = match inside.split_once(":-") {
            Some((name, default)) => (name, Some(default)),
            None => (inside, None),
        };
        // As in a shell, `:-` also replaces a variable that is set but empty.
        let value = variable(name).filter(|value| default.is_none() || !value.is_empty());
        match (value, default) {
            (Some(value), _) => out.push_str(&value),
            (None, Some(default)) => out.push_str(default),
            (None, None) => {
                return Err(format!("`{text}`: the environment has no variable {name}"));
            }
        }
        rest = &rest[start + length + 1..];
    }
    out.push_str(rest);
    Ok(out)
}

/// `path` from `base`, with `.` and `..` taken away where that needs no look at the disk.
pub(super) fn absolute(base: &Path, path: &Path) -> PathBuf {
    use std::path::Component;
    let mut out = PathBuf::new();
    for part in base.join(path).components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir
                if matches!(out.components().next_back(), Some(Component::Normal(_))) =>
            {
                out.pop();
            }
            other => out.push(other),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_are_filled_in_like_a_shell_does() {
        let variable = |name: &str| match name {
            "A" => Some("x".to_owned()),
            "EMPTY" => Some(String::new()),
            _ => None,
        };
        let expand = |text| expand(text, variable);
        assert_eq!(expand("${A}/${A}y").unwrap(), "x/xy");
        assert_eq!(expand("${B:-../z}/f").unwrap(), "../z/f");
        assert_eq!(expand("${EMPTY:-d}").unwrap(), "d");
        assert_eq!(expand("${EMPTY}").unwrap(), "");
        assert!(expand("${B}").unwrap_err().contains("no variable B"));
        assert!(expand("${B").is_err());
    }

    #[test]
    fn paths_become_absolute() {
        let base = Path::new("/a/b");
        assert_eq!(absolute(base, Path::new("../c/./d")), Path::new("/a/c/d"));
        assert_eq!(absolute(base, Path::new("/e")), Path::new("/e"));
    }
}
