//! The least HTTP that a measurement needs: an upstream and a client that cost next to nothing, so
//! that Envoy has the processor to itself.
//!
//! Guarantee: one message at a time per connection, with Content-Length, as we ourselves send it.
//! Not here: a server or client for anything else (testkit, engine).

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;

/// A head larger than Envoy's own limit (60 KiB) is none of ours.
const HEAD_BYTES_MAX: usize = 64 * 1024;

/// How much of a body is read at a time.
const READ_BYTES: usize = 256 * 1024;

/// What the upstream always answers: a completion of one token, with its usage.
const ANSWER: &str = r#"{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1000,"completion_tokens":1,"total_tokens":1001,"prompt_tokens_details":{"cached_tokens":960}}}"#;

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
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{ANSWER}",
        ANSWER.len()
    );
    let mut buffer = vec![0; READ_BYTES];
    while read_message(&mut stream, &mut buffer).await?.is_some() {
        stream.write_all(answer.as_bytes()).await?;
    }
    Ok(())
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
        let first = read_message(&mut self.stream, &mut self.buffer).await?;
        let first = first.context("Envoy closed the connection")?;
        if !first.starts_with("HTTP/1.1 200") {
            bail!("Envoy answers {first}");
        }
        Ok(())
    }
}

/// A chat request as it goes over the wire.
pub(super) fn request(body: &[u8]) -> Vec<u8> {
    let head = format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: engines\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

/// Reads a message and throws its body away; its first line, or `None` at the connection's end.
async fn read_message(stream: &mut TcpStream, buffer: &mut [u8]) -> Result<Option<String>> {
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
            let left = content_length(&head)?.saturating_sub(filled.saturating_sub(body_start));
            discard(stream, buffer, left).await?;
            return Ok(Some(head.lines().next().unwrap_or_default().to_owned()));
        }
        if count == 0 || filled >= HEAD_BYTES_MAX {
            bail!("a message without an end of its head");
        }
    }
}

async fn discard(stream: &mut TcpStream, buffer: &mut [u8], bytes: usize) -> Result<()> {
    let mut left = bytes;
    while left > 0 {
        let length = left.min(buffer.len());
        let count = stream
            .read(buffer.get_mut(..length).unwrap_or_default())
            .await?;
        if count == 0 {
            bail!("a message without its end");
        }
        left = left.saturating_sub(count);
    }
    Ok(())
}

/// No Content-Length is no body: what we measure is never chunked.
fn content_length(head: &str) -> Result<usize> {
    for line in head.lines() {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        if name.eq_ignore_ascii_case("transfer-encoding") {
            bail!("a chunked message, where Content-Length was sent");
        }
        if name.eq_ignore_ascii_case("content-length") {
            return value
                .trim()
                .parse()
                .context("a Content-Length that is no number");
        }
    }
    Ok(0)
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

    #[test]
    fn the_length_is_found_whatever_its_case() {
        assert_eq!(
            content_length("A b c\r\nX: 1\r\nContent-Length: 17").unwrap(),
            17
        );
        assert_eq!(content_length("A b c\r\ncontent-length:0").unwrap(), 0);
        assert_eq!(content_length("A b c").unwrap(), 0);
        assert!(content_length("A b c\r\nTransfer-Encoding: chunked").is_err());
        assert!(content_length("A b c\r\ncontent-length: x").is_err());
    }
}
