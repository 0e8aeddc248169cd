//! As much of HTTP/1.0 as a scraper and `curl` need: one GET or HEAD, one answer, and the
//! connection ends.

/// Longest request, in bytes.
pub(crate) const LONGEST_REQUEST: usize = 4096;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Route {
    /// `/status`.
    Status,
    /// `/metrics`.
    Metrics,
    /// Anything else.
    NotFound,
    /// Another method.
    NotAllowed,
    /// No request.
    Malformed,
}

/// What the request in `bytes` asks for; `None` while its head is not complete, as in the first
/// `seen` of them. Headers are not looked at.
pub(crate) fn route(bytes: &[u8], seen: usize) -> Option<Route> {
    let mut new = bytes[seen.saturating_sub(3)..].windows(4);
    if !new.any(|window| window == b"\r\n\r\n") {
        return (bytes.len() >= LONGEST_REQUEST).then_some(Route::Malformed);
    }
    let line = bytes.split(|&one| one == b'\r').next().unwrap_or_default();
    let mut words = line.split(|&byte| byte == b' ');
    let (Some(method), Some(target), Some(version), None) =
        (words.next(), words.next(), words.next(), words.next())
    else {
        return Some(Route::Malformed);
    };
    if !version.starts_with(b"HTTP/") {
        return Some(Route::Malformed);
    }
    if !matches!(method, b"GET" | b"HEAD") {
        return Some(Route::NotAllowed);
    }
    let path = target.split(|&byte| byte == b'?').next();
    Some(match path.unwrap_or_default() {
        b"/status" => Route::Status,
        b"/metrics" => Route::Metrics,
        _ => Route::NotFound,
    })
}

/// A whole answer.
pub(crate) fn answer(status: &str, kind: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!(
        "HTTP/1.0 {status}\r\nContent-Type: {kind}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}"
    )
    .into_bytes()
}

/// The body of an answer whose status is 200; `None` for any other.
pub(crate) fn body(answer: &[u8]) -> Option<&[u8]> {
    let head = head_bytes(answer);
    (head > 0 && answer.starts_with(b"HTTP/1.0 200 ")).then(|| &answer[head..])
}

/// Where the body of an answer begins; 0 without one.
pub(crate) fn head_bytes(answer: &[u8]) -> usize {
    let end = answer.windows(4).position(|window| window == b"\r\n\r\n");
    end.map_or(0, |at| at + 4)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        for (request, expected) in [
            (&b"GET /status HTTP/1.0\r\n\r\n"[..], Route::Status),
            (b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", Route::Metrics),
            (b"GET /metrics?name=x HTTP/1.1\r\n\r\n", Route::Metrics),
            (b"HEAD /metrics HTTP/1.1\r\n\r\n", Route::Metrics),
            (b"GET / HTTP/1.1\r\n\r\n", Route::NotFound),
            (b"POST /status HTTP/1.1\r\n\r\n", Route::NotAllowed),
            (b"GET /status\r\n\r\n", Route::Malformed),
            (b"\r\n\r\n", Route::Malformed),
            (b"GET /a b HTTP/1.0\r\n\r\n", Route::Malformed),
        ] {
            assert_eq!(route(request, 0), Some(expected), "{request:?}");
        }
    }

    #[test]
    fn an_endless_head_is_not_waited_for() {
        assert_eq!(route(b"GET /status HTTP/1.0\r\n", 0), None);
        let longest = [b'a'; LONGEST_REQUEST];
        assert_eq!(route(&longest, 0), Some(Route::Malformed));
    }

    #[test]
    fn a_body_is_what_follows_the_head() {
        assert_eq!(body(&answer("200 OK", "text/plain", "a")), Some(&b"a"[..]));
        assert_eq!(body(&answer("404 Not Found", "text/plain", "a")), None);
        assert_eq!(body(b"HTTP/1.0 200 OK"), None);
    }
}
