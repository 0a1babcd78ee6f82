//! Reads the events of a trace: ours, or one of another program that names its threads.

use std::collections::HashMap;
use std::path::Path;

use serde::Deserialize;

use super::Event;
use crate::{Error, Result};

/// A line of the file; what other programs add is passed over.
#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    name: String,
    ph: String,
    #[serde(default)]
    pid: u64,
    #[serde(default)]
    tid: u64,
    ts: Option<f64>,
    dur: Option<f64>,
    #[serde(default)]
    args: Args,
}

#[derive(Default, Deserialize)]
struct Args {
    #[serde(default)]
    name: Option<serde_json::Value>,
    #[serde(default)]
    step: Option<serde_json::Value>,
    #[serde(default)]
    micro_batch: Option<serde_json::Value>,
}

/// The two forms that the format allows.
#[derive(Deserialize)]
#[serde(untagged)]
enum File {
    List(Vec<Line>),
    Object {
        #[serde(rename = "traceEvents")]
        events: Vec<Line>,
    },
}

/// The events with a duration, in the order of their starts.
///
/// Errors: a file that cannot be read, is not a trace, or whose times are no times.
pub fn read(path: &Path) -> Result<Vec<Event>> {
    let text = std::fs::read_to_string(path)
        .map_err(|source| Error::Read { path: path.into(), source })?;
    parse(&text).map_err(|reason| Error::BadFile { path: path.into(), reason })
}

fn parse(text: &str) -> Result<Vec<Event>, String> {
    let lines = match serde_json::from_str::<File>(text) {
        Ok(File::List(lines) | File::Object { events: lines }) => lines,
        Err(error) => cut_off(text).ok_or_else(|| format!("is no Chrome trace: {error}"))?,
    };
    let mut lanes = HashMap::new();
    for line in lines.iter().filter(|line| line.ph == "M" && line.name == "thread_name") {
        if let Some(serde_json::Value::String(name)) = &line.args.name {
            lanes.insert((line.pid, line.tid), name.clone());
        }
    }
    let number = |value: Option<serde_json::Value>| value.and_then(|value| value.as_u64());
    let mut events = Vec::new();
    for line in lines.into_iter().filter(|line| line.ph == "X") {
        let (start_us, duration_us) = (line.ts.unwrap_or(f64::NAN), line.dur.unwrap_or(0.0));
        if !(start_us.is_finite() && duration_us.is_finite() && duration_us >= 0.0) {
            return Err(format!("event {}: ts {start_us} and dur {duration_us}", line.name));
        }
        let lane = lanes.get(&(line.pid, line.tid));
        events.push(Event {
            stage: line.name,
            rank: usize::try_from(line.pid)
                .map_err(|_| format!("pid {} is too large", line.pid))?,
            lane: lane.cloned().unwrap_or_else(|| format!("thread {}", line.tid)),
            step: number(line.args.step),
            micro_batch: number(line.args.micro_batch),
            start_us,
            duration_us,
        });
    }
    events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us).then(a.rank.cmp(&b.rank)));
    Ok(events)
}

/// The whole lines of a list whose end is missing.
fn cut_off(text: &str) -> Option<Vec<Line>> {
    let body = text.trim_start().strip_prefix('[')?;
    if body.trim_end().ends_with(']') {
        return None;
    }
    // The last line may be torn.
    let (whole, _) = body.rsplit_once(",\n")?;
    serde_json::from_str(&format!("[{whole}]")).ok()
}

#[cfg(test)]
mod tests {
    use super::super::TraceWriter;
    use super::*;

    fn events() -> Vec<Event> {
        let event = |stage: &str, rank, lane: &str, start_us, step| Event {
            stage: stage.into(),
            rank,
            lane: lane.into(),
            step,
            micro_batch: Some(1),
            start_us,
            duration_us: 0.1,
        };
        vec![
            event("read", 0, "reader", 0.0, Some(1)),
            event("dense", 1, "device", 0.25, None),
            event("dense", 0, "device", 123_456_789.123_456, Some(u64::MAX)),
        ]
    }

    fn written() -> String {
        let mut out = Vec::new();
        let mut writer = TraceWriter::new(&mut out).unwrap();
        events().iter().for_each(|event| writer.event(event).unwrap());
        writer.finish().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn what_was_written_is_read_back() {
        assert_eq!(parse(&written()).unwrap(), events());
        assert_eq!(parse(&format!("{{\"traceEvents\": {}}}", written())).unwrap(), events());
    }

    #[test]
    fn a_trace_that_was_cut_off_is_read_up_to_there() {
        let text = written();
        let torn = &text[..text.len() - 20];
        assert_eq!(parse(torn).unwrap(), events()[..2]);
    }

    #[test]
    fn what_is_no_trace_is_refused() {
        for (text, part) in [
            ("", "is no Chrome trace"),
            ("{\"steps\": []}", "is no Chrome trace"),
            (
                "[{\"ph\": \"X\", \"name\": \"a\", \"ts\": 1, \"dur\": -1}]",
                "event a: ts 1 and dur -1",
            ),
            ("[{\"ph\": \"X\", \"name\": \"a\"}]", "event a: ts NaN"),
        ] {
            let said = parse(text).unwrap_err();
            assert!(said.contains(part), "{text}: {said}");
        }
    }
}
