//! Writes events as they come, and names the lanes as they appear.

use std::collections::HashMap;
use std::io::{self, Write};

use serde::Serialize;

use super::Event;

/// Microseconds by which events on a thread may overlap: below what their times are rounded to.
const OVERLAP_US: f64 = 1e-6;

/// Writes a trace. Nothing of it is kept but the names of lanes.
///
/// The file is a list whose end may be missing: a trace of a program that was killed is readable up
/// to its last line.
pub struct TraceWriter<W: Write> {
    out: W,
    /// Threads of each lane by rank and name: number and end of the last event.
    lanes: HashMap<(usize, String), Vec<(u64, f64)>>,
    /// Threads of each rank.
    threads: HashMap<usize, u64>,
    first: bool,
}

#[derive(Serialize)]
struct Named<'a> {
    name: &'a str,
}

/// A line that names a process or a thread.
#[derive(Serialize)]
struct Metadata<'a> {
    name: &'a str,
    ph: &'a str,
    pid: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    tid: Option<u64>,
    args: Named<'a>,
}

#[derive(Serialize)]
struct Args {
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    micro_batch: Option<u64>,
}

/// A line that is an event with its duration.
#[derive(Serialize)]
struct Complete<'a> {
    name: &'a str,
    ph: &'a str,
    pid: usize,
    tid: u64,
    ts: f64,
    dur: f64,
    args: Args,
}

impl<W: Write> TraceWriter<W> {
    /// Begins a trace.
    ///
    /// Errors: a failed write.
    pub fn new(mut out: W) -> io::Result<Self> {
        out.write_all(b"[")?;
        Ok(Self { out, lanes: HashMap::new(), threads: HashMap::new(), first: true })
    }

    fn line(&mut self, line: &impl Serialize) -> io::Result<()> {
        self.out.write_all(if self.first { b"\n" } else { b",\n" })?;
        self.first = false;
        serde_json::to_writer(&mut self.out, line).map_err(io::Error::from)
    }

    /// Names a rank: `rank 0` if this is never called. To be called before its first event.
    ///
    /// Errors: a failed write.
    pub fn rank(&mut self, rank: usize, label: &str) -> io::Result<()> {
        self.threads.entry(rank).or_insert(0);
        let args = Named { name: label };
        self.line(&Metadata { name: "process_name", ph: "M", pid: rank, tid: None, args })
    }

    /// Adds an event. Events of one lane come in the order in which they start; one that overlaps
    /// those before it is drawn on a thread of its own with the lane's name.
    ///
    /// Errors: a failed write.
    pub fn event(&mut self, event: &Event) -> io::Result<()> {
        if !self.threads.contains_key(&event.rank) {
            self.rank(event.rank, &format!("rank {}", event.rank))?;
        }
        let tid = self.thread(event)?;
        self.line(&Complete {
            name: &event.stage,
            ph: "X",
            pid: event.rank,
            tid,
            ts: event.start_us,
            dur: event.duration_us,
            args: Args { step: event.step, micro_batch: event.micro_batch },
        })
    }

    /// The thread of its lane that is free when the event starts.
    fn thread(&mut self, event: &Event) -> io::Result<u64> {
        let lanes = self.lanes.entry((event.rank, event.lane.clone())).or_default();
        let free = lanes.iter_mut().find(|(_, end)| *end <= event.start_us + OVERLAP_US);
        if let Some((thread, end)) = free {
            *end = event.end_us();
            return Ok(*thread);
        }
        let threads = self.threads.entry(event.rank).or_insert(0);
        *threads += 1;
        let thread = *threads;
        lanes.push((thread, event.end_us()));
        let (pid, args) = (event.rank, Named { name: &event.lane });
        self.line(&Metadata { name: "thread_name", ph: "M", pid, tid: Some(thread), args })?;
        Ok(thread)
    }

    /// Ends the trace.
    ///
    /// Errors: a failed write.
    pub fn finish(mut self) -> io::Result<()> {
        self.out.write_all(b"\n]\n")?;
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(lane: &str, start_us: f64, duration_us: f64) -> Event {
        Event {
            stage: "a \"quoted\" stage".into(),
            rank: 3,
            lane: lane.into(),
            step: Some(7),
            micro_batch: None,
            start_us,
            duration_us,
        }
    }

    fn written(events: &[Event]) -> String {
        let mut out = Vec::new();
        let mut writer = TraceWriter::new(&mut out).unwrap();
        for event in events {
            writer.event(event).unwrap();
        }
        writer.finish().unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_file_is_what_viewers_read() {
        let text = written(&[event("device", 1.5, 2.0)]);
        let lines: serde_json::Value = serde_json::from_str(&text).unwrap();
        let wanted = serde_json::json!([
            {"name": "process_name", "ph": "M", "pid": 3, "args": {"name": "rank 3"}},
            {"name": "thread_name", "ph": "M", "pid": 3, "tid": 1, "args": {"name": "device"}},
            {"name": "a \"quoted\" stage", "ph": "X", "pid": 3, "tid": 1, "ts": 1.5, "dur": 2.0,
             "args": {"step": 7}},
        ]);
        assert_eq!(lines, wanted);
        assert_eq!(text.lines().count(), 5);
        assert_eq!(
            serde_json::from_str::<serde_json::Value>(&written(&[]))
                .unwrap()
                .as_array()
                .unwrap()
                .len(),
            0
        );
    }

    #[test]
    fn what_overlaps_is_drawn_on_threads_of_the_same_name() {
        let events = [event("link", 0.0, 10.0), event("link", 5.0, 10.0), event("link", 10.0, 5.0)];
        let lines: Vec<serde_json::Value> = serde_json::from_str(&written(&events)).unwrap();
        let threads: Vec<u64> = lines
            .iter()
            .filter(|line| line["ph"] == "X")
            .map(|line| line["tid"].as_u64().unwrap())
            .collect();
        assert_eq!(threads, [1, 2, 1]);
        assert_eq!(lines.iter().filter(|line| line["name"] == "thread_name").count(), 2);
    }
}
