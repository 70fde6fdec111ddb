//! Any workload, told by its chats: for gateways whose clients name the session in a header.
//!
//! Guarantee: the requests and their times are those of the workload within; only what a request is
//! told to belong to is its chat, not its shared prefix. Not here: the header (load/client.rs).

use std::time::Duration;

use super::{Request, Workload};

/// A workload of which clients tell the chat.
pub struct Sessions(pub Box<dyn Workload>);

fn own(request: Request) -> Request {
    Request {
        prefix: Some(request.id),
        ..request
    }
}

impl Workload for Sessions {
    fn next(&mut self) -> Option<Request> {
        self.0.next().map(own)
    }

    fn follow(&mut self, request: &Request, ended: Duration, answer: &str) -> Option<Request> {
        self.0.follow(request, ended, answer).map(own)
    }

    fn failed(&mut self, request: &Request, at: Duration) -> Option<Request> {
        self.0.failed(request, at).map(own)
    }

    fn prefixes(&self) -> Option<u64> {
        self.0.prefixes()
    }

    fn probe(&self, index: u64) -> Option<Request> {
        self.0.probe(index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workload::conversations::{Conversations, Rounds};

    #[test]
    fn every_turn_tells_its_chat_and_asks_what_it_asked() {
        let rounds = || Box::new(Rounds::new(Conversations::new(1, 1), 2));
        let (mut plain, mut told) = (rounds(), Sessions(rounds()));
        for chat in 0..2 {
            let (plain, told) = (plain.next().unwrap(), told.next().unwrap());
            assert_eq!((plain.prefix, told.prefix), (Some(0), Some(chat)));
            assert_eq!(plain.messages, told.messages);
        }
        let first = Conversations::new(1, 1).first(0);
        let follow = told.follow(&first, Duration::ZERO, "answer").unwrap();
        assert_eq!(follow.prefix, Some(follow.id));
    }
}
