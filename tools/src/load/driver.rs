//! Sends a workload's requests when they are due, whatever became of the ones before.
//!
//! Guarantee: open loop: a slow answer delays no arrival, and how late the driver itself was is
//! part of every report. Requests in flight are bounded, and none outlives the run. Not here: HTTP
//! (client.rs), figures (stats.rs).

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};

use super::client::{Client, Failure, Outcome};
use crate::workload::{Request, Workload};

/// Requests in flight at most: each has a connection, and a process may have 1,024 files open by
/// default on common systems; more than this only measures the queue.
pub const IN_FLIGHT_MAX: usize = 900;

/// How often a phase's watcher hears of its progress.
const TICK: Duration = Duration::from_millis(250);

/// When nothing is due but an answer: answers wake the driver by themselves.
const FAR: Duration = Duration::from_secs(86_400);

/// How one stretch of a workload is played.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Phase {
    /// Engine time per real time.
    pub speed: f64,
    /// Answers' tokens, if other than the workload's.
    pub output_tokens: Option<u32>,
    /// When the phase's sending is over.
    pub until: Until,
    /// Real time to wait, after the last arrival, for what is in flight.
    pub drain: Duration,
}

/// The end of a phase.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Until {
    /// After so many requests, later turns among them.
    Requests(u64),
    /// After so much engine time.
    Elapsed(Duration),
    /// At the workload's end.
    End,
}

/// One request's fate, with times in engine time.
#[derive(Clone, Debug)]
pub struct Record {
    /// When it was due, from the phase's start.
    pub due: Duration,
    /// How late it was sent, in real time.
    pub lag: Duration,
    /// From due to the first content.
    pub ttft: Option<Duration>,
    /// From due to the end.
    pub total: Duration,
    /// The shared prefix it opened with.
    pub prefix: Option<u64>,
    /// Its chat, or itself.
    pub chat: u64,
    /// Its turn of the chat.
    pub turn: u32,
    /// What came back, and why it failed, if it did.
    pub outcome: Outcome,
}

/// What happens while a phase runs.
pub trait Watch {
    /// A request ended.
    fn ended(&mut self, record: Record);

    /// Called about every quarter of a second of real time, with the engine time since the
    /// phase's start.
    fn tick(&mut self, sent: u64, in_flight: usize, elapsed: Duration);
}

/// A workload under way: phases are played one after another, and go on where the last ended.
pub struct Driver {
    /// Request n takes client n mod their number, and so do its later turns.
    clients: Vec<Client>,
    workload: Box<dyn Workload>,
    next: Option<Request>,
    /// Later turns, by when they are due.
    later: BinaryHeap<Reverse<Later>>,
    /// The workload's time at which the present phase began.
    base: Duration,
}

/// A later turn; the order is by time, then by chat.
struct Later(Request);

impl Later {
    fn order(&self) -> (Duration, u64) {
        (self.0.at, self.0.id)
    }
}

impl PartialEq for Later {
    fn eq(&self, other: &Self) -> bool {
        self.order() == other.order()
    }
}

impl Eq for Later {}

impl PartialOrd for Later {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Later {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.order().cmp(&other.order())
    }
}

/// A phase under way.
struct Running {
    phase: Phase,
    began: Instant,
    report: mpsc::Sender<(Request, Outcome)>,
    stop: watch::Receiver<bool>,
    sent: u64,
    in_flight: usize,
    /// The workload's time of the last request sent.
    last_at: Duration,
}

/// What is due next.
enum Due {
    Request(Request),
    End,
}

impl Running {
    /// Engine time since the phase's start.
    fn elapsed(&self, at: Instant) -> Duration {
        at.saturating_duration_since(self.began)
            .mul_f64(self.phase.speed)
    }

    /// The instant of an engine time since the phase's start.
    fn instant(&self, elapsed: Duration) -> Instant {
        self.began + elapsed.div_f64(self.phase.speed)
    }
}

impl Driver {
    /// A driver at the workload's beginning.
    #[must_use]
    pub fn new(client: Client, workload: Box<dyn Workload>) -> Self {
        Self::over(vec![client], workload)
    }

    /// The same over several clients, which requests take in turn; without any, all fail.
    #[must_use]
    pub fn over(clients: Vec<Client>, mut workload: Box<dyn Workload>) -> Self {
        let next = workload.next();
        Self {
            clients,
            workload,
            next,
            later: BinaryHeap::new(),
            base: Duration::ZERO,
        }
    }

    /// Plays one phase, and returns when nothing of it is in flight any more.
    pub async fn play(&mut self, phase: Phase, watch: &mut dyn Watch) {
        let (report, mut ended) = mpsc::channel(IN_FLIGHT_MAX);
        let (stopper, stop) = watch::channel(false);
        let began = Instant::now();
        let (sent, in_flight, last_at) = (0, 0, self.base);
        let mut run = Running {
            phase,
            began,
            report,
            stop,
            sent,
            in_flight,
            last_at,
        };
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Skip);
        while let Some(due) = self.due(&run) {
            tokio::select! {
                biased;
                Some(done) = ended.recv() => self.end(&mut run, done, watch),
                () = tokio::time::sleep_until(due.into()) => match self.take(&run, due) {
                    Due::Request(request) => self.send(&mut run, request, watch),
                    Due::End => break,
                },
                _ = tick.tick() => {
                    watch.tick(run.sent, run.in_flight, run.elapsed(Instant::now()));
                }
            }
        }
        let over = tokio::time::Instant::now() + phase.drain;
        while run.in_flight > 0 {
            tokio::select! {
                Some(done) = ended.recv() => self.end(&mut run, done, watch),
                () = tokio::time::sleep_until(over), if !*stopper.borrow() => {
                    stopper.send_replace(true);
                }
                _ = tick.tick() => {
                    watch.tick(run.sent, run.in_flight, run.elapsed(Instant::now()));
                }
            }
        }
        self.base = match phase.until {
            Until::Elapsed(length) => self.base + length,
            Until::Requests(_) | Until::End => run.last_at,
        };
    }

    /// When something is due next; `None` if nothing ever is.
    fn due(&self, run: &Running) -> Option<Instant> {
        if matches!(run.phase.until, Until::Requests(requests) if run.sent >= requests) {
            return None;
        }
        let arrival = self.next.as_ref().map(|request| request.at);
        let later = self.later.peek().map(|Reverse(later)| later.0.at);
        let request = arrival.into_iter().chain(later).min();
        let request = request.map(|at| at.saturating_sub(self.base));
        match (run.phase.until, request) {
            (Until::Elapsed(length), Some(at)) => Some(run.instant(at.min(length))),
            (Until::Elapsed(length), None) => Some(run.instant(length)),
            (_, Some(at)) => Some(run.instant(at)),
            // An answer may bring another turn.
            (_, None) if run.in_flight > 0 => Some(run.began + FAR),
            (_, None) => None,
        }
    }

    fn take(&mut self, run: &Running, due: Instant) -> Due {
        if matches!(run.phase.until, Until::Elapsed(length) if due >= run.instant(length)) {
            return Due::End;
        }
        let arrival = self
            .next
            .as_ref()
            .map_or(Duration::MAX, |request| request.at);
        let later = self
            .later
            .peek()
            .map_or(Duration::MAX, |Reverse(later)| later.0.at);
        let request = if later < arrival {
            self.later.pop().map(|Reverse(later)| later.0)
        } else {
            std::mem::replace(&mut self.next, self.workload.next())
        };
        request.map_or(Due::End, Due::Request)
    }

    fn send(&mut self, run: &mut Running, mut request: Request, watch: &mut dyn Watch) {
        run.sent += 1;
        run.last_at = run.last_at.max(request.at);
        if let Some(tokens) = run.phase.output_tokens {
            request.output_tokens = tokens;
        }
        if run.in_flight >= IN_FLIGHT_MAX {
            let outcome = Outcome::failed(Failure::Overflow);
            watch.ended(self.record(run, &request, outcome));
            return;
        }
        let turn = request.id % (self.clients.len() as u64).max(1);
        let Some(client) = self.clients.get(turn as usize).cloned() else {
            let outcome = Outcome::failed(Failure::Connect);
            watch.ended(self.record(run, &request, outcome));
            return;
        };
        run.in_flight += 1;
        let (report, mut stop) = (run.report.clone(), run.stop.clone());
        tokio::spawn(async move {
            let outcome = tokio::select! {
                outcome = client.ask(&request, request.turns_left > 0) => outcome,
                _ = stop.wait_for(|&stop| stop) => Outcome::failed(Failure::Unfinished),
            };
            // Nobody listens only when the whole run was given up.
            let _ = report.send((request, outcome)).await;
        });
    }

    fn end(&mut self, run: &mut Running, done: (Request, Outcome), watch: &mut dyn Watch) {
        let (request, mut outcome) = done;
        run.in_flight = run.in_flight.saturating_sub(1);
        let answer = std::mem::take(&mut outcome.answer.text);
        let ended = self.base + run.elapsed(outcome.sent + outcome.total);
        let turn = match outcome.failure {
            None => self.workload.follow(&request, ended, &answer),
            Some(_) => self.workload.failed(&request, ended),
        };
        self.later.extend(turn.map(|turn| Reverse(Later(turn))));
        watch.ended(self.record(run, &request, outcome));
    }

    fn record(&self, run: &Running, request: &Request, outcome: Outcome) -> Record {
        let due = request.at.saturating_sub(self.base);
        let lag = outcome.sent.saturating_duration_since(run.instant(due));
        let engine = |real: Duration| (lag + real).mul_f64(run.phase.speed);
        Record {
            due,
            lag,
            ttft: outcome.first.map(engine),
            total: engine(outcome.total),
            prefix: request.prefix,
            chat: request.id,
            turn: request.turn,
            outcome,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;

    use super::*;
    use crate::load::client::Target;
    use crate::workload::Form;
    use crate::workload::options::WorkloadArgs;

    #[derive(Default)]
    struct Seen {
        records: Vec<Record>,
    }

    impl Watch for Seen {
        fn ended(&mut self, record: Record) {
            self.records.push(record);
        }

        fn tick(&mut self, _sent: u64, _in_flight: usize, _elapsed: Duration) {}
    }

    /// A server that answers every request after `delay`, and counts those at the same time.
    async fn serve(delay: Duration) -> (String, Arc<AtomicUsize>) {
        const ANSWER: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n\
            data: {\"choices\":[],\"usage\":{\"prompt_tokens\":9,\"completion_tokens\":1,\
            \"prompt_tokens_details\":{\"cached_tokens\":3}}}\n\ndata: [DONE]\n\n";
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let most = Arc::new(AtomicUsize::new(0));
        let now = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&most);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (now, most) = (Arc::clone(&now), Arc::clone(&counted));
                let answer = service_fn(move |_request| {
                    let (now, most) = (Arc::clone(&now), Arc::clone(&most));
                    async move {
                        most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                        tokio::time::sleep(delay).await;
                        now.fetch_sub(1, Ordering::SeqCst);
                        let answer = hyper::Response::builder()
                            .header("content-type", "text/event-stream")
                            .body(ANSWER.to_owned())
                            .unwrap();
                        Ok::<_, Infallible>(answer)
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), answer),
                );
            }
        });
        (url, most)
    }

    fn driver(url: &str, arguments: &[&str]) -> Driver {
        #[derive(clap::Parser)]
        struct Arguments {
            #[command(flatten)]
            workload: WorkloadArgs,
        }
        let arguments = [&["test"], arguments].concat();
        let arguments = <Arguments as clap::Parser>::parse_from(arguments);
        let target = Target {
            base: url.parse().unwrap(),
            form: Form::Chat,
            model: "m".into(),
            stream: true,
            headers: hyper::HeaderMap::new(),
            prefix_header: None,
            timeout: Duration::from_secs(20),
        };
        let workload = arguments.workload.plan().unwrap().open().unwrap();
        Driver::new(Client::new(target).unwrap(), workload)
    }

    fn phase(until: Until) -> Phase {
        Phase {
            speed: 1.0,
            output_tokens: None,
            until,
            drain: Duration::from_secs(5),
        }
    }

    #[tokio::test]
    async fn a_slow_answer_delays_no_arrival() {
        let (url, most) = serve(Duration::from_millis(400)).await;
        let mut driver = driver(&url, &["--rate", "100"]);
        let mut seen = Seen::default();
        driver
            .play(phase(Until::Elapsed(Duration::from_secs(1))), &mut seen)
            .await;
        let count = seen.records.len();
        assert!((60..=140).contains(&count), "{count} requests");
        assert!(
            seen.records
                .iter()
                .all(|record| record.outcome.failure.is_none())
        );
        assert!(
            most.load(Ordering::SeqCst) > 20,
            "answers of 400 ms overlap at 100 a second"
        );
        let first = seen
            .records
            .iter()
            .filter_map(|record| record.ttft)
            .min()
            .unwrap();
        assert!(first >= Duration::from_millis(400), "{first:?}");
        // The last ones end while the phase drains, and still know when they were due.
        let late = seen.records.iter().map(|record| record.lag).max().unwrap();
        assert!(late < Duration::from_millis(400), "{late:?} late");
        let due = seen.records.iter().map(|record| record.due).max().unwrap();
        assert!(
            due > Duration::from_millis(800),
            "the last one was due at {due:?}"
        );
        let usage = seen.records[0].outcome.answer.usage.unwrap();
        assert_eq!((usage.prompt_tokens, usage.cached_tokens), (9, Some(3)));
    }

    #[tokio::test]
    async fn phases_go_on_where_the_last_one_ended() {
        let (url, _) = serve(Duration::ZERO).await;
        let mut driver = driver(&url, &["--rate", "20"]);
        let mut warm = Seen::default();
        let fast = Phase {
            speed: 50.0,
            output_tokens: Some(1),
            ..phase(Until::Requests(200))
        };
        driver.play(fast, &mut warm).await;
        assert_eq!(warm.records.len(), 200);
        assert_eq!(driver.next.as_ref().unwrap().id, 200);
        let mut seen = Seen::default();
        driver
            .play(phase(Until::Elapsed(Duration::from_millis(500))), &mut seen)
            .await;
        assert!(
            seen.records.len() < 40,
            "{} requests at 20 a second",
            seen.records.len()
        );
        assert!(
            seen.records
                .iter()
                .all(|record| record.due < Duration::from_millis(500))
        );
    }

    #[tokio::test]
    async fn what_outlasts_the_drain_is_unfinished_and_nothing_is_left() {
        let (url, _) = serve(Duration::from_secs(15)).await;
        let mut driver = driver(&url, &["--rate", "50"]);
        let mut seen = Seen::default();
        let drain = Duration::from_millis(100);
        let phase = Phase {
            drain,
            ..phase(Until::Requests(5))
        };
        driver.play(phase, &mut seen).await;
        let failures: Vec<_> = seen.records.iter().map(|one| one.outcome.failure).collect();
        assert_eq!(failures, [Some(Failure::Unfinished); 5]);
    }

    #[tokio::test]
    async fn later_turns_come_after_their_answers() {
        let (url, _) = serve(Duration::ZERO).await;
        let mut driver = driver(&url, &["--workload", "W2", "--rate", "1"]);
        let mut seen = Seen::default();
        // A chat a second for 80 s of engine time; a turn follows every 20 s, so that a chat has
        // two later turns in the mean before the end.
        let fast = Phase {
            speed: 40.0,
            ..phase(Until::Elapsed(Duration::from_secs(80)))
        };
        driver.play(fast, &mut seen).await;
        let count = seen.records.len();
        assert!(
            count > 140,
            "{count} requests: 80 chats alone would be no turns"
        );
    }
}
