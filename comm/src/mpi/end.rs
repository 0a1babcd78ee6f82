//! A rank's end of a group whose messages the MPI thread carries.

use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use crossbeam::channel::Sender;

use super::pump::Command;
use crate::Result;
use crate::inbox::Inbox;
use crate::transport::{Failure, Message, Stall, Transport};

/// What the groups of a process and its MPI thread share.
#[derive(Default)]
pub(super) struct Shared {
    failure: OnceLock<Failure>,
    inboxes: Mutex<Vec<Weak<Inbox>>>,
}

impl Shared {
    /// The world's failure, as far as this process knows.
    pub(super) fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Notes the world's failure; whether it is the first.
    pub(super) fn fail(&self, failure: Failure) -> bool {
        let mut first = false;
        self.failure.get_or_init(|| {
            first = true;
            failure
        });
        let inboxes = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        inboxes.iter().filter_map(Weak::upgrade).for_each(|inbox| inbox.wake());
        first
    }

    fn inbox(&self, size: usize) -> Arc<Inbox> {
        let inbox = Arc::new(Inbox::new(size));
        let mut inboxes = self.inboxes.lock().unwrap_or_else(PoisonError::into_inner);
        inboxes.retain(|inbox| inbox.strong_count() > 0);
        inboxes.push(Arc::downgrade(&inbox));
        inbox
    }
}

/// One rank's end of a group.
pub(super) struct End {
    shared: Arc<Shared>,
    commands: Sender<Command>,
    inbox: Arc<Inbox>,
    id: u64,
    rank: usize,
    members: Vec<usize>, // numbers in the world
}

impl End {
    /// This rank's end of group `id`, in which it is number `rank` of `members`.
    pub(super) fn join(
        shared: &Arc<Shared>,
        commands: &Sender<Command>,
        id: u64,
        rank: usize,
        members: Vec<usize>,
    ) -> Self {
        let inbox = shared.inbox(members.len());
        let end = Self {
            shared: Arc::clone(shared),
            commands: commands.clone(),
            inbox: Arc::clone(&inbox),
            id,
            rank,
            members: members.clone(),
        };
        end.command(Command::JoinGroup { id, inbox, members });
        end
    }

    fn command(&self, command: Command) {
        // The thread ends early only when the world has failed, which is what everybody sees then.
        let _ = self.commands.send(command);
    }
}

impl Transport for End {
    fn post(&self, to: usize, message: Message) -> std::result::Result<(), Stall> {
        if let Some(reason) = self.inbox.gone(to) {
            return Err(Stall::Gone(reason));
        }
        self.command(Command::Post { to: self.members[to], message });
        Ok(())
    }

    fn receive(&self, from: usize, deadline: Instant) -> std::result::Result<Message, Stall> {
        self.inbox.receive(from, deadline, &self.shared.failure)
    }

    fn failure(&self) -> Option<Failure> {
        self.shared.failure().cloned()
    }

    fn poison(&self, failure: Failure) {
        if self.shared.fail(failure.clone()) {
            self.command(Command::Tell(failure));
        }
    }

    fn group(&self, id: u64, members: &[usize]) -> Result<Arc<dyn Transport>> {
        let place = members.iter().position(|&member| member == self.rank);
        let rank = place.expect("the caller is a member of the group it asks for");
        let members = members.iter().map(|&member| self.members[member]).collect();
        Ok(Arc::new(Self::join(&self.shared, &self.commands, id, rank, members)))
    }
}

impl Drop for End {
    fn drop(&mut self) {
        self.command(Command::LeaveGroup { id: self.id });
    }
}
