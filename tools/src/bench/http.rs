//! The least HTTP that a measurement needs: an upstream and a client that cost next to nothing, so
//! that Envoy has the processor to itself.
//!
//! Guarantee: one message at a time per connection; requests have a Content-Length, as we ourselves
//! send them, and answers may be chunked, as some gateways pass them on.
//! Not here: a server or client for anything else (testkit, engine).

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{JoinHandle, JoinSet};

/// A head larger than Envoy's own limit (60 KiB) is none of ours.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// How much of a body is read at a time.
const READ_BYTES: usize = 256 * 1024;

/// What the upstream answers a prompt with: a completion of one token, with its usage.
const ANSWER: &str = r#"{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001,"prompt_tokens_details":{"cached_tokens":960}}}"#;

/// What it answers who asks for its models: some routers send it nothing before they know one.
const MODELS: &str = r#"{"object":"list","data":[{"id":"m","object":"model","owned_by":"x","max_model_len":1048576}]}"#;

/// Bytes of text that it takes for a token, where it renders prompts.
const TOKEN_BYTES: usize = 4;

/// The longest chunked answer that is understood: those of [`ANSWER`]'s size.
const CHUNKED_BYTES_MAX: usize = 16 * 1024;

/// An upstream that answers every request at once; it ends with this value.
#[derive(Debug)]
pub(super) struct Upstream {
    pub(super) address: SocketAddr,
    serving: JoinHandle<()>,
}

impl Upstream {
    pub(super) async fn start() -> Result<Self> {
        Self::start_at(IpAddr::from([127, 0, 0, 1])).await
    }

    /// On any port of this address. An unspecified address means all of the machine's.
    pub(super) async fn start_at(ip: IpAddr) -> Result<Self> {
        let listener = TcpListener::bind((ip, 0)).await?;
        let address = listener.local_addr()?;
        let serving = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                // A connection that breaks ends with the Envoy that held it.
                tokio::spawn(async move { drop(serve(stream).await) });
            }
        });
        Ok(Self { address, serving })
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.serving.abort();
    }
}

async fn serve(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; READ_BYTES];
    let mut body = Vec::new();
    while let Some(first) = read_message(&mut stream, &mut buffer, Some(&mut body)).await? {
        let answer = answer(&first, &body);
        stream.write_all(&answer).await?;
    }
    Ok(())
}

/// The answer to a request, by its first line.
fn answer(first: &str, body: &[u8]) -> Vec<u8> {
    let path = first.split(' ').nth(1).unwrap_or_default();
    let (status, body) = if first.starts_with("POST") && path.ends_with("/render") {
        ("200 OK", rendered(body))
    } else if first.starts_with("POST") || path == "/health" {
        ("200 OK", ANSWER.to_owned())
    } else if path == "/v1/models" {
        ("200 OK", MODELS.to_owned())
    } else {
        ("404 Not Found", "{}".to_owned())
    };
    let length = body.len();
    format!(
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n\
         {body}"
    )
    .into_bytes()
}

/// A body in tokens, as an engine renders it for routers that ask: equal beginnings have equal
/// tokens, which is all that routers look for.
fn rendered(body: &[u8]) -> String {
    let (tokens, _) = body.as_chunks::<TOKEN_BYTES>();
    let ids = tokens.iter().map(|bytes| u32::from_le_bytes(*bytes) >> 1);
    let ids: Vec<String> = ids.map(|id| id.to_string()).collect();
    format!(r#"{{"model":"m","token_ids":[{}]}}"#, ids.join(","))
}

/// A keep-alive connection that sends one request after the other.
#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Connection {
    pub(super) async fn open(address: SocketAddr) -> Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            buffer: vec![0; READ_BYTES],
        })
    }

    /// Sends a request (head and body as [`request`] makes it) and reads its answer, which has to
    /// be a 200.
    pub(super) async fn send(&mut self, request: &[u8]) -> Result<()> {
        self.stream.write_all(request).await?;
        let first = read_message(&mut self.stream, &mut self.buffer, None).await?;
        let first = first.context("the gateway closed the connection")?;
        if !first.starts_with("HTTP/1.1 200") {
            bail!("the gateway answers {first}");
        }
        Ok(())
    }
}

/// A chat request as it goes over the wire.
pub(super) fn request(body: &[u8]) -> Vec<u8> {
    request_with(body, None)
}

/// The same with another header.
pub(super) fn request_with(body: &[u8], header: Option<(&str, &str)>) -> Vec<u8> {
    let header = header.map_or_else(String::new, |(name, value)| format!("{name}: {value}\r\n"));
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: engines\r\ncontent-type: application/json\r\n\
         {header}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// How much is sent at saturation.
#[derive(Clone, Copy, Debug)]
pub(super) enum Load {
    /// So many requests, in equal parts over all connections.
    Requests(usize),
    /// As many as can be sent in this time.
    Time(Duration),
}

/// Sends requests, the given ones in turn, over so many connections, each as fast as it is answered;
/// returns how many were sent.
pub(super) async fn saturate(
    address: SocketAddr,
    requests: &[Vec<u8>],
    connections: usize,
    load: Load,
) -> Result<usize> {
    let began = Instant::now();
    let mut running = JoinSet::new();
    for first in 0..connections {
        let mine = requests.iter().skip(first).step_by(connections);
        let mine: Vec<Vec<u8>> = mine.cloned().collect();
        let mine = if mine.is_empty() {
            requests.to_vec()
        } else {
            mine
        };
        let goes_on = move |sent: usize| match load {
            Load::Requests(count) => sent < count.div_ceil(connections),
            Load::Time(time) => began.elapsed() < time,
        };
        running.spawn(async move {
            let mut connection = Connection::open(address).await?;
            let mut sent = 0;
            for request in mine.iter().cycle() {
                if !goes_on(sent) {
                    break;
                }
                connection.send(request).await?;
                sent += 1;
            }
            anyhow::Ok(sent)
        });
    }
    let mut sent = 0;
    while let Some(share) = running.join_next().await {
        sent += share??;
    }
    Ok(sent)
}

/// Reads a message; its first line, or `None` at the connection's end. Its body goes to `keep`, or
/// is thrown away.
async fn read_message(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    keep: Option<&mut Vec<u8>>,
) -> Result<Option<String>> {
    let mut filled = 0;
    loop {
        let free = buffer.get_mut(filled..).unwrap_or_default();
        let count = stream.read(free).await?;
        if count == 0 && filled == 0 {
            return Ok(None);
        }
        filled = filled.saturating_add(count);
        let seen = buffer.get(..filled).unwrap_or_default();
        if let Some(end) = seen.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            let body_start = end.saturating_add(4);
            let head = String::from_utf8_lossy(seen.get(..end).unwrap_or_default()).into_owned();
            let first = head.lines().next().unwrap_or_default().to_owned();
            let Some(length) = content_length(&head)? else {
                read_chunks(stream, buffer, filled).await?;
                return Ok(Some(first));
            };
            let left = length.saturating_sub(filled.saturating_sub(body_start));
            if let Some(body) = keep {
                body.clear();
                body.extend_from_slice(seen.get(body_start..).unwrap_or_default());
                read_rest(stream, buffer, left, |bytes| body.extend_from_slice(bytes)).await?;
            } else {
                read_rest(stream, buffer, left, |_| ()).await?;
            }
            return Ok(Some(first));
        }
        if count == 0 || filled >= HEAD_BYTES_MAX {
            bail!("a message without an end of its head");
        }
    }
}

/// Reads a chunked body to its end and throws it away; `filled` bytes of the buffer are read. The
/// last chunk is empty, and nothing follows it: there is one message at a time.
async fn read_chunks(stream: &mut TcpStream, buffer: &mut [u8], mut filled: usize) -> Result<()> {
    const END: &[u8] = b"\r\n0\r\n\r\n";
    loop {
        let seen = buffer.get(..filled).unwrap_or_default();
        if seen.ends_with(END) {
            return Ok(());
        }
        if filled >= CHUNKED_BYTES_MAX {
            bail!("a chunked message longer than {CHUNKED_BYTES_MAX} bytes");
        }
        let free = buffer.get_mut(filled..).unwrap_or_default();
        let count = stream.read(free).await?;
        if count == 0 {
            bail!("a message without its end");
        }
        filled = filled.saturating_add(count);
    }
}

async fn read_rest(
    stream: &mut TcpStream,
    buffer: &mut [u8],
    bytes: usize,
    mut take: impl FnMut(&[u8]),
) -> Result<()> {
    let mut left = bytes;
    while left > 0 {
        let length = left.min(buffer.len());
        let count = stream
            .read(buffer.get_mut(..length).unwrap_or_default())
            .await?;
        if count == 0 {
            bail!("a message without its end");
        }
        take(buffer.get(..count).unwrap_or_default());
        left = left.saturating_sub(count);
    }
    Ok(())
}

/// The length that a head declares, 0 where it says nothing; `None` for a chunked message.
fn content_length(head: &str) -> Result<Option<usize>> {
    for line in head.lines() {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        if name.eq_ignore_ascii_case("transfer-encoding") {
            return Ok(None);
        }
        if name.eq_ignore_ascii_case("content-length") {
            let length = value.trim().parse();
            return Ok(Some(length.context("a Content-Length that is no number")?));
        }
    }
    Ok(Some(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_and_an_upstream_understand_each_other() {
        let upstream = Upstream::start().await.unwrap();
        let mut connection = Connection::open(upstream.address).await.unwrap();
        // Smaller than a head's read, larger than a read, and nothing at all.
        for bytes in [10, 3 * READ_BYTES, 0] {
            connection.send(&request(&vec![b'x'; bytes])).await.unwrap();
        }
    }

    #[tokio::test]
    async fn a_chunked_answer_is_read_to_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = vec![0; READ_BYTES];
            while read_message(&mut stream, &mut buffer, None)
                .await
                .unwrap()
                .is_some()
            {
                let head = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
                // Cut where it hurts: inside the last chunk.
                for part in [head, "3\r\nabc\r\n0\r", "\n\r\n"] {
                    stream.write_all(part.as_bytes()).await.unwrap();
                    stream.flush().await.unwrap();
                    tokio::task::yield_now().await;
                }
            }
        });
        let mut connection = Connection::open(address).await.unwrap();
        for _ in 0..3 {
            connection.send(&request(b"{}")).await.unwrap();
        }
    }

    #[test]
    fn the_upstream_answers_what_routers_ask() {
        let text = |first, body| String::from_utf8(answer(first, body)).unwrap();
        assert!(text("GET /v1/models HTTP/1.1", b"").contains(r#""id":"m""#));
        assert!(text("GET /get_load HTTP/1.1", b"").starts_with("HTTP/1.1 404"));
        assert!(text("POST /v1/chat/completions HTTP/1.1", b"{}").contains("chat.completion"));
        let rendered = text(
            "POST /v1/chat/completions/render HTTP/1.1",
            &[2, 0, 0, 0, 4, 0, 0, 0, 9],
        );
        assert!(rendered.ends_with(r#""token_ids":[1,2]}"#), "{rendered}");
    }

    #[test]
    fn the_length_is_found_whatever_its_case() {
        assert_eq!(
            content_length("A b c\r\nX: 1\r\nContent-Length: 17").unwrap(),
            Some(17)
        );
        assert_eq!(
            content_length("A b c\r\ncontent-length:0").unwrap(),
            Some(0)
        );
        assert_eq!(content_length("A b c").unwrap(), Some(0));
        let chunked = content_length("A b c\r\nTransfer-Encoding: chunked");
        assert_eq!(chunked.unwrap(), None);
        assert!(content_length("A b c\r\ncontent-length: x").is_err());
    }
}
