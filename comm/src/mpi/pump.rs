//! The loop of the thread that owns MPI.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, TryRecvError};
use tessera_device::HostBuffer;

use super::buffers::{Arrived, Buffers};
use super::end::Shared;
use super::library::{Library, Request, Tag};
use super::{Control, LAST_WORDS, past};
use crate::header::Header;
use crate::inbox::Inbox;
use crate::payload::{Bytes, Payload};
use crate::split::pieces;
use crate::transport::{Failure, Message};
use crate::{CommError, Dtype, Result};

/// What the process asks of its MPI thread.
pub(super) enum Command {
    /// Send a message to a rank of the world.
    Post { to: usize, message: Message },
    /// Deliver messages of a group to this inbox, by place in `members`.
    JoinGroup { id: u64, inbox: Arc<Inbox>, members: Vec<usize> },
    /// Tell the group's other members that this process has left it.
    LeaveGroup { id: u64 },
    /// Tell all processes that the world has failed.
    Tell(Failure),
    /// End together with the other processes.
    Finish,
    /// End without them.
    Leave,
    /// End them all.
    Abort(i32),
}

/// A group this process is in.
struct Group {
    inbox: Arc<Inbox>,
    members: Vec<usize>, // numbers in the world
}

/// A message on its way out; what the library reads stays here until it is done.
struct Outgoing {
    requests: Vec<Request>,
    _header: Box<Header>,
    _payload: Payload,
}

/// A message on its way in; what the library writes stays here until it is done.
struct Incoming {
    header: Header,
    requests: Vec<Request>,
    buffer: Option<HostBuffer<u8>>,
}

/// How the loop ends.
enum Ending {
    /// With the other processes, by the time limit from this moment on.
    Finish(Instant),
    /// Alone, after some last words.
    Leave(Instant),
    /// With the end of all processes, after some last words.
    Abort(i32, Instant),
}

pub(super) struct Pump {
    library: Library,
    shared: Arc<Shared>,
    commands: Receiver<Command>,
    piece_bytes_max: usize,
    time_limit: Duration,
    groups: HashMap<u64, Group>,
    /// Groups this process has left: what still comes for them is of no interest.
    left: HashSet<u64>,
    /// Messages for groups that this process has not joined yet, with their senders.
    early: HashMap<u64, Vec<(usize, Message)>>,
    outgoing: Vec<Outgoing>,
    incoming: Vec<VecDeque<Incoming>>, // by sender
    buffers: Arc<Buffers>,
    ending: Option<Ending>,
    said_bye: bool,
    byes: HashSet<usize>,
    /// Why the processes could not end together.
    error: Option<CommError>,
}

impl Pump {
    pub(super) fn new(
        library: Library,
        shared: Arc<Shared>,
        commands: Receiver<Command>,
        piece_bytes_max: usize,
        time_limit: Duration,
    ) -> Self {
        let size = library.size();
        Self {
            library,
            shared,
            commands,
            piece_bytes_max,
            time_limit,
            groups: HashMap::new(),
            left: HashSet::new(),
            early: HashMap::new(),
            outgoing: Vec::new(),
            incoming: (0..size).map(|_| VecDeque::new()).collect(),
            buffers: Arc::default(),
            ending: None,
            said_bye: false,
            byes: HashSet::new(),
            error: None,
        }
    }

    /// Carries messages until it is told to end.
    pub(super) fn run(mut self) -> Result<()> {
        let result = self.carry();
        if let Err(error) = &result {
            let rank = self.library.rank();
            self.shared.fail(Failure { rank, cause: error.to_string() });
            // The library may still read and write these.
            std::mem::forget((self.outgoing, self.incoming));
        } else {
            self.library.finalize();
        }
        result
    }

    fn carry(&mut self) -> Result<()> {
        let mut quiet = 0;
        loop {
            quiet = if self.turn(quiet)? { 0 } else { quiet.saturating_add(1) };
            match self.ending {
                Some(Ending::Finish(start)) => match self.finished(start) {
                    Ok(false) => {}
                    Ok(true) => return Ok(()),
                    Err(error) => {
                        // The others are told before this thread stops carrying messages.
                        self.fail(error.to_string())?;
                        self.error = Some(error);
                        self.ending = Some(Ending::Leave(Instant::now()));
                    }
                },
                Some(Ending::Leave(start)) if past(start, LAST_WORDS) => return self.failed(),
                Some(Ending::Abort(code, start)) if past(start, LAST_WORDS) => {
                    self.library.abort(code);
                }
                _ => {}
            }
        }
    }

    /// Makes the world fail on this rank, unless it has failed, and tells the others.
    fn fail(&mut self, cause: String) -> Result<()> {
        let failure = Failure { rank: self.library.rank(), cause };
        if self.shared.fail(failure.clone()) { self.tell(&failure) } else { Ok(()) }
    }

    /// The world's failure as an error of this process.
    fn failed(&self) -> Result<()> {
        if let Some(error) = &self.error {
            return Err(error.clone());
        }
        self.shared.failure().map_or(Ok(()), |Failure { rank, cause }| {
            Err(CommError::WorldFailed {
                communicator: "world".to_owned(),
                step: 0,
                operation: "the end of the job".to_owned(),
                rank: *rank,
                cause: cause.clone(),
            })
        })
    }

    /// Whether all processes have come to the end.
    fn finished(&mut self, start: Instant) -> Result<bool> {
        self.failed()?;
        let (rank, size) = (self.library.rank(), self.library.size());
        let peers = (0..size).filter(|&peer| peer != rank);
        if past(start, self.time_limit) {
            let missing = peers.filter(|peer| !self.byes.contains(peer)).collect();
            return Err(CommError::TimeLimit {
                communicator: "world".to_owned(),
                step: 0,
                operation: if self.groups.is_empty() {
                    "the end of the job".to_owned()
                } else {
                    format!("the end of the job ({} communicators held)", self.groups.len())
                },
                limit: self.time_limit,
                missing,
            });
        }
        if !self.groups.is_empty() {
            return Ok(false);
        }
        if !self.said_bye {
            self.said_bye = true;
            for peer in peers {
                self.control(peer, Control::Bye.header(0, 0, 0), Payload::empty())?;
            }
        }
        Ok(self.outgoing.is_empty() && self.byes.len() + 1 == size)
    }

    /// One round: commands, transfers that are done, messages that have arrived. Whether there
    /// was any.
    fn turn(&mut self, quiet: u32) -> Result<bool> {
        let mut news = false;
        loop {
            let command = match pause(quiet).filter(|_| !news) {
                None => match self.commands.try_recv() {
                    Ok(command) => command,
                    Err(TryRecvError::Empty) => break,
                    Err(TryRecvError::Disconnected) => Command::Leave,
                },
                Some(pause) => match self.commands.recv_timeout(pause) {
                    Ok(command) => command,
                    Err(RecvTimeoutError::Timeout) => break,
                    Err(RecvTimeoutError::Disconnected) => Command::Leave,
                },
            };
            if self.ending.is_some() && matches!(command, Command::Leave) {
                std::thread::sleep(pause(quiet).unwrap_or_default());
                break; // nobody is left to ask for anything
            }
            news = true;
            self.obey(command)?;
        }
        news |= self.sent()?;
        news |= self.received()?;
        if !news && pause(quiet).is_none() {
            std::thread::yield_now();
        }
        Ok(news)
    }

    fn obey(&mut self, command: Command) -> Result<()> {
        match command {
            Command::Post { to, message } => self.post(to, message),
            Command::JoinGroup { id, inbox, members } => {
                for (from, message) in self.early.remove(&id).unwrap_or_default() {
                    deliver(&inbox, &members, from, message);
                }
                if self.groups.insert(id, Group { inbox, members }).is_some() {
                    return Err(CommError::Backend {
                        library: "MPI",
                        operation: "join a group".to_owned(),
                        reason: format!("two groups have the id {id:016x}"),
                    });
                }
                Ok(())
            }
            Command::LeaveGroup { id } => {
                let Some(group) = self.groups.remove(&id) else { return Ok(()) };
                self.left.insert(id);
                for peer in group.members {
                    if peer != self.library.rank() {
                        self.control(peer, Control::Left.header(id, 0, 0), Payload::empty())?;
                    }
                }
                Ok(())
            }
            Command::Tell(failure) => self.tell(&failure),
            Command::Finish => {
                self.ending = Some(Ending::Finish(Instant::now()));
                Ok(())
            }
            Command::Leave => {
                self.ending = Some(Ending::Leave(Instant::now()));
                self.fail("its process ends".to_owned())
            }
            Command::Abort(code) => {
                self.ending = Some(Ending::Abort(code, Instant::now()));
                self.fail("it aborts the job".to_owned())
            }
        }
    }

    /// Tells all other processes of the world's failure.
    fn tell(&mut self, failure: &Failure) -> Result<()> {
        let text: Arc<dyn Bytes> = Arc::new(Text(failure.cause.clone().into_bytes()));
        for peer in 0..self.library.size() {
            if peer != self.library.rank() {
                let payload = Payload::whole(Arc::clone(&text));
                let count = payload.bytes().len();
                let header = Control::Failed.header(0, failure.rank as u32, count);
                self.control(peer, header, payload)?;
            }
        }
        Ok(())
    }

    fn control(&mut self, to: usize, header: Header, payload: Payload) -> Result<()> {
        self.post(to, Message { posted: Instant::now(), header, payload })
    }

    fn post(&mut self, to: usize, message: Message) -> Result<()> {
        let Message { header, payload, .. } = message;
        let header = Box::new(header);
        let mut requests = Vec::new();
        // SAFETY: the header is in a box that stays in `outgoing` until the request is done, and
        // for ever if the loop ends before.
        let request = unsafe { self.library.send(bytemuck::bytes_of(&*header), to, Tag::Header) }?;
        requests.push(request);
        let bytes = payload.bytes();
        for piece in pieces(bytes.len(), self.piece_bytes_max) {
            // SAFETY: the payload is immutable and shared; its reference stays in `outgoing` as
            // above.
            requests.push(unsafe { self.library.send(&bytes[piece], to, Tag::Payload) }?);
        }
        requests.reverse(); // the oldest is asked first
        self.outgoing.push(Outgoing { requests, _header: header, _payload: payload });
        Ok(())
    }

    /// Forgets what has been sent; whether there was any.
    fn sent(&mut self) -> Result<bool> {
        let mut news = false;
        let mut at = 0;
        while at < self.outgoing.len() {
            if done(&self.library, &mut self.outgoing[at].requests)? {
                self.outgoing.swap_remove(at);
                news = true;
            } else {
                at += 1;
            }
        }
        Ok(news)
    }

    /// Takes what has arrived; whether there was any.
    fn received(&mut self) -> Result<bool> {
        let mut news = false;
        while let Some(from) = self.library.probe(Tag::Header)? {
            news = true;
            let mut header: Header = bytemuck::Zeroable::zeroed();
            self.library.receive_now(bytemuck::bytes_of_mut(&mut header), from, Tag::Header)?;
            let incoming = self.expect(from, header)?;
            self.incoming[from].push_back(incoming);
        }
        for from in 0..self.incoming.len() {
            for incoming in &mut self.incoming[from] {
                news |=
                    !incoming.requests.is_empty() && done(&self.library, &mut incoming.requests)?;
            }
            // In the order sent: a group's messages must not overtake each other.
            while let Some(first) = self.incoming[from].front()
                && first.requests.is_empty()
                && let Some(incoming) = self.incoming[from].pop_front()
            {
                self.arrived(from, incoming)?;
            }
        }
        Ok(news)
    }

    /// Prepares to receive the payload that follows a header.
    fn expect(&self, from: usize, header: Header) -> Result<Incoming> {
        let refuse = |reason: String| CommError::Backend {
            library: "MPI",
            operation: format!("receive {} from rank {from}", header.describe()),
            reason,
        };
        let element_bytes = Dtype::of_code(header.dtype).map_or(1, Dtype::bytes);
        let bytes = usize::try_from(header.count)
            .ok()
            .and_then(|count| count.checked_mul(element_bytes))
            .ok_or_else(|| refuse(format!("{} elements", header.count)))?;
        let mut requests = Vec::new();
        let mut buffer = None;
        if bytes > 0 {
            let mut memory = self.buffers.take(bytes).map_err(|error| refuse(error.to_string()))?;
            for piece in pieces(bytes, self.piece_bytes_max) {
                // SAFETY: the buffer stays in `incoming` until the request is done, and for ever
                // if the loop ends before; moving the owner does not move its bytes.
                requests
                    .push(unsafe { self.library.receive(&mut memory[piece], from, Tag::Payload) }?);
            }
            requests.reverse();
            buffer = Some(memory);
        }
        Ok(Incoming { header, requests, buffer })
    }

    /// Hands a whole message to whom it is for.
    fn arrived(&mut self, from: usize, incoming: Incoming) -> Result<()> {
        let Incoming { header, buffer, .. } = incoming;
        let payload = buffer.map_or_else(Payload::empty, |memory| {
            let element_bytes = Dtype::of_code(header.dtype).map_or(1, Dtype::bytes);
            let len = header.count as usize * element_bytes;
            Payload::whole(Arc::new(Arrived::new(memory, len, &self.buffers)))
        });
        match Control::of_kind(header.kind) {
            Some(Control::Failed) => {
                let cause = String::from_utf8_lossy(payload.bytes()).into_owned();
                self.shared.fail(Failure { rank: header.detail as usize, cause });
            }
            Some(Control::Bye) => drop(self.byes.insert(from)),
            Some(Control::Left) | None => {
                let id = header.communicator;
                let message = Message { posted: Instant::now(), header, payload };
                if let Some(group) = self.groups.get(&id) {
                    deliver(&group.inbox, &group.members, from, message);
                } else if !self.left.contains(&id) {
                    self.early.entry(id).or_default().push((from, message));
                }
            }
        }
        Ok(())
    }
}

/// Puts a message, or the news that its sender has left, in a group's inbox.
fn deliver(inbox: &Inbox, members: &[usize], from: usize, message: Message) {
    // A sender that is no member can only be another group with the same id: its message fails
    // the comparison of operations on its own side.
    let Some(place) = members.iter().position(|&member| member == from) else { return };
    if message.header.kind == Control::Left as u8 {
        inbox.depart(place, "it has left the group");
    } else {
        inbox.deliver(place, message);
    }
}

/// Drops the requests at the end that are done; whether all are.
fn done(library: &Library, requests: &mut Vec<Request>) -> Result<bool> {
    while let Some(request) = requests.last_mut() {
        if !library.done(request)? {
            return Ok(false);
        }
        requests.pop();
    }
    Ok(true)
}

/// How long to wait for commands after so many rounds without news: not at all, then from 10
/// microseconds up to a millisecond.
fn pause(quiet: u32) -> Option<Duration> {
    let quiet = quiet.checked_sub(50)?;
    Some(Duration::from_micros(10 << (quiet / 50).min(7)).min(Duration::from_millis(1)))
}

/// The text of a failure.
struct Text(Vec<u8>);

impl Bytes for Text {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
}
