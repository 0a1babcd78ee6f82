//! A strict parser of Prometheus' text format, version 0.0.4.
//!
//! It takes less than a scraper does: every family has HELP, then TYPE, then its samples in one
//! block; names and labels follow the naming rules; no series comes twice; counters end in
//! `_total`; histograms are cumulative and complete.

use std::collections::{BTreeMap, BTreeSet};

/// A series: name and labels.
pub type Series = (String, BTreeMap<String, String>);

/// One metric with all its series.
#[derive(Debug, Default)]
pub struct Family {
    pub help: String,
    pub kind: String,
    pub samples: Vec<(Series, f64)>,
}

/// Everything a page holds, by family.
pub type Page = BTreeMap<String, Family>;

/// Reads a page, or says what is wrong with which line.
pub fn parse(text: &str) -> Result<Page, String> {
    if !text.is_empty() && !text.ends_with('\n') {
        return Err("the last line does not end".into());
    }
    let mut page = Page::new();
    let mut seen = BTreeSet::new();
    let mut current: Option<String> = None;
    for (number, line) in text.lines().enumerate() {
        read_line(line, &mut page, &mut seen, &mut current)
            .map_err(|why| format!("line {}: {why}: {line}", number + 1))?;
    }
    for (name, family) in &page {
        check(name, family).map_err(|why| format!("{name}: {why}"))?;
    }
    Ok(page)
}

fn read_line(
    line: &str,
    page: &mut Page,
    seen: &mut BTreeSet<Series>,
    current: &mut Option<String>,
) -> Result<(), String> {
    if let Some(rest) = line.strip_prefix("# HELP ") {
        let (name, help) = rest.split_once(' ').ok_or("no help text")?;
        name_ok(name, true)?;
        let family = Family { help: unescape(help, false)?, ..Family::default() };
        if page.insert(name.to_owned(), family).is_some() {
            return Err("a second HELP".into());
        }
        *current = Some(name.to_owned());
        return Ok(());
    }
    if let Some(rest) = line.strip_prefix("# TYPE ") {
        let (name, kind) = rest.split_once(' ').ok_or("no type")?;
        if current.as_deref() != Some(name) {
            return Err("TYPE does not follow its HELP".into());
        }
        let family = page.get_mut(name).ok_or("no HELP")?;
        if !family.kind.is_empty() || !family.samples.is_empty() {
            return Err("a second TYPE, or one after a sample".into());
        }
        if !["counter", "gauge", "histogram"].contains(&kind) {
            return Err(format!("type {kind}"));
        }
        kind.clone_into(&mut family.kind);
        return Ok(());
    }
    let (series, value) = sample(line)?;
    let owner = current.as_ref().ok_or("a sample before any HELP")?;
    let family = page.get_mut(owner).ok_or("no HELP")?;
    let suffix = series.0.strip_prefix(owner.as_str()).ok_or("a sample of another family")?;
    let allowed: &[&str] = match family.kind.as_str() {
        "histogram" => &["_bucket", "_sum", "_count"],
        "" => return Err("a sample before TYPE".into()),
        _ => &[""],
    };
    if !allowed.contains(&suffix) {
        return Err("a sample of another family".into());
    }
    if !seen.insert(series.clone()) {
        return Err("this series was there before".into());
    }
    family.samples.push((series, value));
    Ok(())
}

/// `name{label="value",...} number`.
fn sample(line: &str) -> Result<(Series, f64), String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, mut rest) = line.split_at(end);
    name_ok(name, true)?;
    let mut labels = BTreeMap::new();
    if let Some(inside) = rest.strip_prefix('{') {
        rest = inside;
        loop {
            let (label, after) = rest.split_once("=\"").ok_or("a label without a value")?;
            name_ok(label, false)?;
            let (value, after) = closing_quote(after)?;
            if labels.insert(label.to_owned(), unescape(value, true)?).is_some() {
                return Err(format!("label {label} twice"));
            }
            if let Some(after) = after.strip_prefix(',') {
                rest = after;
            } else {
                rest = after.strip_prefix('}').ok_or("labels are not closed")?;
                break;
            }
        }
    }
    let number = rest.strip_prefix(' ').ok_or("no space before the value")?;
    let value = match number {
        "+Inf" => f64::INFINITY,
        "-Inf" => f64::NEG_INFINITY,
        "NaN" => f64::NAN,
        _ if number.starts_with(|c: char| c.is_ascii_digit() || c == '-') => {
            number.parse().map_err(|_| format!("value `{number}`"))?
        }
        _ => return Err(format!("value `{number}`")),
    };
    Ok(((name.to_owned(), labels), value))
}

/// The text up to the quote that no backslash hides, and what follows it.
fn closing_quote(text: &str) -> Result<(&str, &str), String> {
    let mut hidden = false;
    for (at, c) in text.char_indices() {
        match c {
            _ if hidden => hidden = false,
            '\\' => hidden = true,
            '"' => return Ok((&text[..at], &text[at + 1..])),
            _ => {}
        }
    }
    Err("a label value is not closed".into())
}

fn unescape(text: &str, label: bool) -> Result<String, String> {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        match chars.next() {
            Some('\\') => out.push('\\'),
            Some('n') => out.push('\n'),
            Some('"') if label => out.push('"'),
            other => return Err(format!("escape {other:?}")),
        }
    }
    Ok(out)
}

fn name_ok(name: &str, colon: bool) -> Result<(), String> {
    let first = |c: char| c.is_ascii_alphabetic() || c == '_' || (colon && c == ':');
    let rest = |c: char| first(c) || c.is_ascii_digit();
    if name.starts_with(first) && name.chars().all(rest) {
        Ok(())
    } else {
        Err(format!("`{name}` is not a name"))
    }
}

/// What holds for a whole family.
fn check(name: &str, family: &Family) -> Result<(), String> {
    if family.kind.is_empty() || family.samples.is_empty() {
        return Err("no TYPE or no samples".into());
    }
    if family.help.trim().is_empty() {
        return Err("an empty HELP".into());
    }
    if (family.kind == "counter") != name.ends_with("_total") {
        return Err("counters, and no others, end in _total".into());
    }
    if family.kind != "histogram" && ["_bucket", "_sum", "_count"].iter().any(|s| name.ends_with(s))
    {
        return Err("a name of a histogram's part".into());
    }
    match family.kind.as_str() {
        "counter"
            if family.samples.iter().any(|(_, value)| !(*value >= 0.0 && value.is_finite())) =>
        {
            Err("a counter below 0 or not finite".into())
        }
        "histogram" => check_histogram(name, family),
        _ => Ok(()),
    }
}

/// The parts of one histogram.
#[derive(Default)]
struct Parts {
    buckets: Vec<(f64, f64)>,
    sum: Option<f64>,
    count: Option<f64>,
}

fn check_histogram(name: &str, family: &Family) -> Result<(), String> {
    let mut histograms = BTreeMap::<BTreeMap<String, String>, Parts>::new();
    for ((series, labels), value) in &family.samples {
        let mut labels = labels.clone();
        let bound = labels.remove("le");
        let parts = histograms.entry(labels).or_default();
        match (&series[name.len()..], bound) {
            ("_bucket", Some(bound)) => {
                let bound = match bound.as_str() {
                    "+Inf" => f64::INFINITY,
                    other => other.parse().map_err(|_| format!("bound `{other}`"))?,
                };
                parts.buckets.push((bound, *value));
            }
            ("_sum", None) => parts.sum = Some(*value),
            ("_count", None) => parts.count = Some(*value),
            (part, bound) => return Err(format!("part {part} with bound {bound:?}")),
        }
    }
    for (labels, parts) in histograms {
        let rising = parts.buckets.windows(2).all(|w| w[0].0 < w[1].0 && w[0].1 <= w[1].1);
        if !rising {
            return Err(format!("{labels:?}: buckets are not cumulative in rising order"));
        }
        let last = parts.buckets.last().filter(|(bound, _)| bound.is_infinite());
        if last.map(|(_, count)| *count) != parts.count || parts.count.is_none() {
            return Err(format!("{labels:?}: the bucket +Inf is not the count"));
        }
        if !parts.sum.is_some_and(f64::is_finite) {
            return Err(format!("{labels:?}: no sum"));
        }
    }
    Ok(())
}

#[test]
fn what_is_right_is_read() {
    let text = "# HELP a_total Help with \\\\ and \\n.\n# TYPE a_total counter\n\
                a_total{x=\"q\\\"\\\\\\n,}\",y=\"\"} 3\na_total{x=\"b\"} 0.5\n\
                # HELP h H.\n# TYPE h histogram\n\
                h_bucket{le=\"0.1\"} 1\nh_bucket{le=\"+Inf\"} 2\nh_sum 7e-3\nh_count 2\n";
    let page = parse(text).unwrap();
    assert_eq!(page["a_total"].help, "Help with \\ and \n.");
    let ((_, labels), value) = &page["a_total"].samples[0];
    assert_eq!((labels["x"].as_str(), *value), ("q\"\\\n,}", 3.0));
    assert_eq!(page["h"].samples.len(), 4);
}

#[test]
fn what_is_wrong_is_refused() {
    let head = "# HELP a_total Help.\n# TYPE a_total counter\n";
    let histogram = "# HELP h H.\n# TYPE h histogram\n";
    for (text, why) in [
        (format!("{head}a_total 1"), "does not end"),
        (format!("{head}a_total 1\na_total 2\n"), "there before"),
        (format!("{head}a_total{{x=\"1\",x=\"2\"}} 1\n"), "twice"),
        (format!("{head}a_total{{x=\"\\t\"}} 1\n"), "escape"),
        (format!("{head}a_total{{x=\"1\" 1\n"), "not closed"),
        (format!("{head}a_total{{1x=\"1\"}} 1\n"), "not a name"),
        (format!("{head}a_total  1\n"), "value"),
        (format!("{head}a_total inf\n"), "value"),
        (format!("{head}a_total -1\n"), "below 0"),
        (format!("{head}b_total 1\n"), "another family"),
        (format!("{head}a_total 1\n{head}a_total 2\n"), "second HELP"),
        (head.to_owned(), "no samples"),
        ("a_total 1\n".into(), "before any HELP"),
        ("# HELP a_total H.\na_total 1\n".into(), "before TYPE"),
        ("# TYPE a_total counter\n".into(), "follow its HELP"),
        ("# HELP a H.\n# TYPE a counter\na 1\n".into(), "_total"),
        ("# HELP a_total H.\n# TYPE a_total gauge\na_total 1\n".into(), "_total"),
        ("# HELP a H.\n# TYPE a summary\na 1\n".into(), "summary"),
        (format!("{histogram}h_bucket{{le=\"1\"}} 1\nh_sum 1\nh_count 1\n"), "+Inf"),
        (format!("{histogram}h_bucket{{le=\"+Inf\"}} 1\nh_sum 1\nh_count 2\n"), "+Inf"),
        (format!("{histogram}h_bucket{{le=\"+Inf\"}} 1\nh_count 1\n"), "no sum"),
        (
            format!(
                "{histogram}h_bucket{{le=\"1\"}} 2\nh_bucket{{le=\"+Inf\"}} 1\nh_sum 1\nh_count 1\n"
            ),
            "cumulative",
        ),
    ] {
        let said = parse(&text).expect_err(&text);
        assert!(said.contains(why), "{text:?} is refused with: {said}");
    }
}
