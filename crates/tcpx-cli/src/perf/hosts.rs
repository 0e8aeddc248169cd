//! The file that lists hosts: one address a line.

use std::path::Path;

use crate::error::Error;

/// Most hosts of a list.
const MOST: usize = 256;

/// Reads the addresses; empty lines and what follows a `#` do not count.
pub(super) fn read(path: &Path) -> Result<Vec<String>, Error> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io {
        doing: "read",
        path: path.to_owned(),
        source,
    })?;
    parse(&text).map_err(|what| Error::Usage {
        what: format!("{}: {what}", path.display()),
        hint: "write one address a line, with `:PORT` if it is not the default, and each once"
            .into(),
    })
}

fn parse(text: &str) -> Result<Vec<String>, String> {
    let mut hosts: Vec<String> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let host = line.split('#').next().unwrap_or_default().trim();
        if host.is_empty() {
            continue;
        }
        let place = number + 1;
        if host.contains(char::is_whitespace) {
            return Err(format!("line {place} holds more than an address"));
        }
        if hosts.iter().any(|known| known == host) {
            return Err(format!("line {place} names {host} again"));
        }
        if hosts.len() == MOST {
            return Err(format!("more than {MOST} hosts"));
        }
        hosts.push(host.to_owned());
    }
    if hosts.is_empty() {
        return Err("it names no host".into());
    }
    Ok(hosts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_has_an_address_a_line() {
        let hosts =
            parse("10.0.0.1\n\n  node-2:4567 # the other rack\n# none\n[::1]\n").expect("hosts");
        assert_eq!(hosts, ["10.0.0.1", "node-2:4567", "[::1]"]);
    }

    #[test]
    fn what_is_no_list_says_where() {
        for (text, said) in [
            ("", "no host"),
            ("# 10.0.0.1", "no host"),
            ("a\nb c", "line 2"),
            ("a\nb\na", "line 3 names a again"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(said), "{error}");
        }
        let many: String = (0..=MOST).map(|index| format!("h{index}\n")).collect();
        assert!(parse(&many).is_err());
    }
}
