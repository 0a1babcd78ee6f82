//! The HTTP endpoint: `/metrics` for Prometheus, `/healthz` for whoever restarts the process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use prometheus::{Encoder, Registry, TextEncoder};
use tiny_http::{Header, Method, Request, Response, Server};

use crate::{Error, Result};

/// A running endpoint; dropping it closes it.
pub struct MetricsServer {
    server: Arc<Server>,
    address: SocketAddr,
    thread: Option<JoinHandle<()>>,
}

/// Whether the process is well: `/healthz` says 200 while it is, 503 afterwards.
#[derive(Clone, Default)]
pub struct Health(Arc<AtomicBool>);

impl Health {
    /// From now on `/healthz` says that the process failed.
    pub fn fail(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl MetricsServer {
    /// Serves `registry` on `listen` (`address:port`; port 0 takes a free one).
    ///
    /// Errors: an address that cannot be listened on, at once.
    pub fn start(listen: &str, registry: Registry, health: Health) -> Result<Self> {
        let refused = |reason: String| Error::Listen { address: listen.into(), reason };
        let server = Server::http(listen).map_err(|error| refused(error.to_string()))?;
        let address =
            server.server_addr().to_ip().ok_or_else(|| refused("not an IP address".into()))?;
        let server = Arc::new(server);
        let worker = Arc::clone(&server);
        let thread = std::thread::Builder::new()
            .name("tessera-metrics".into())
            .spawn(move || {
                for request in worker.incoming_requests() {
                    answer(request, &registry, &health);
                }
            })
            .map_err(|error| refused(error.to_string()))?;
        Ok(Self { server, address, thread: Some(thread) })
    }

    /// The address in force.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.server.unblock();
        if let Some(thread) = self.thread.take() {
            // A panic there was printed there; the run does not depend on it.
            let _ = thread.join();
        }
    }
}

fn answer(request: Request, registry: &Registry, health: &Health) {
    let path = request.url().split('?').next().unwrap_or_default();
    let reading = matches!(request.method(), Method::Get | Method::Head);
    let (status, kind, body) = match path {
        _ if !reading => (405, "text/plain", b"only GET\n".to_vec()),
        "/metrics" => {
            let mut body = Vec::new();
            match TextEncoder::new().encode(&registry.gather(), &mut body) {
                Ok(()) => (200, "text/plain; version=0.0.4; charset=utf-8", body),
                Err(error) => (500, "text/plain", error.to_string().into_bytes()),
            }
        }
        "/healthz" if health.0.load(Ordering::Relaxed) => (503, "text/plain", b"failed\n".to_vec()),
        "/healthz" => (200, "text/plain", b"ok\n".to_vec()),
        _ => (404, "text/plain", b"see /metrics and /healthz\n".to_vec()),
    };
    let header = Header::from_bytes("Content-Type", kind).expect("a fixed ASCII header");
    let response = Response::from_data(body).with_status_code(status).with_header(header);
    // A client that went away is no concern of ours.
    let _ = request.respond(response);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;

    fn ask(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        write!(stream, "{request} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }

    #[test]
    fn answers_metrics_health_and_nothing_else() {
        let registry = Registry::new();
        let counter = prometheus::IntCounter::new("a_total", "Help.").unwrap();
        registry.register(Box::new(counter.clone())).unwrap();
        counter.inc_by(3);
        let health = Health::default();
        let server = MetricsServer::start("127.0.0.1:0", registry, health.clone()).unwrap();
        let metrics = ask(server.address(), "GET /metrics");
        assert!(
            metrics.starts_with("HTTP/1.1 200") && metrics.contains("\na_total 3\n"),
            "{metrics}"
        );
        assert!(ask(server.address(), "GET /healthz").starts_with("HTTP/1.1 200"));
        assert!(ask(server.address(), "GET /other").starts_with("HTTP/1.1 404"));
        assert!(ask(server.address(), "POST /metrics").starts_with("HTTP/1.1 405"));
        health.fail();
        assert!(ask(server.address(), "GET /healthz").starts_with("HTTP/1.1 503"));
        let taken = server.address().to_string();
        let second = MetricsServer::start(&taken, Registry::new(), Health::default());
        assert!(matches!(second, Err(Error::Listen { .. })));
    }
}
