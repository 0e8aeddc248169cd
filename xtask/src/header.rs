//! `cargo xtask header`: the headers are what the sources of crate `tcpx-capi` declare.

use std::fmt::Write as _;

use anyhow::{Context, Result, anyhow};

use crate::workspace::{files, publish, root};

const CRATE: &str = "crates/tcpx-capi";

/// A header, and what it is made from.
struct Header {
    name: &'static str,
    /// Settings of cbindgen.
    config: &'static str,
    /// In the order of the header; other files declare nothing for C.
    sources: &'static [&'static str],
}

const HEADERS: [Header; 2] = [
    Header {
        name: "tcpx.h",
        config: "cbindgen.toml",
        sources: &[
            "engine/codes",
            "engine/types",
            "engine/failure",
            "engine/endpoint",
            "engine/connection",
            "engine/region",
            "engine/transfer",
            "engine/queue",
            "engine/window",
        ],
    },
    Header {
        name: "tcpx_plugin.h",
        config: "cbindgen-plugin.toml",
        sources: &[
            "plugin/codes",
            "plugin/types",
            "plugin/log",
            "plugin/library",
            "plugin/setup",
            "plugin/memory",
            "plugin/transfer",
        ],
    },
];

/// Writes the headers, or with `--check` fails if one is not what the sources say.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let mut all = String::new();
    let mut made = Vec::new();
    for header in &HEADERS {
        let text = generate(header)?;
        all.push_str(&text);
        made.push((header, text));
    }
    complete(&all)?;
    for (header, text) in made {
        let path = format!("{CRATE}/include/{}", header.name);
        publish(&path, &text, "header", arguments)?;
    }
    Ok(())
}

fn generate(header: &Header) -> Result<String> {
    let folder = root()?.join(CRATE);
    let config = cbindgen::Config::from_file(folder.join(header.config))
        .map_err(|error| anyhow!("{}: {error}", header.config))?;
    let mut builder = cbindgen::Builder::new().with_config(config);
    for name in header.sources {
        builder = builder.with_src(folder.join(format!("src/{name}.rs")));
    }
    let bindings = builder.generate().context("cbindgen")?;
    let mut text = Vec::new();
    bindings.write(&mut text);
    // What Rust calls safety is the caller's part of the contract in C.
    let text = String::from_utf8(text)
        .context("cbindgen wrote no UTF-8")?
        .replace(" * # Safety\n", " * The caller's part:\n");
    Ok(text.lines().map(in_parentheses).collect())
}

/// The line, with a negative number that it defines in parentheses, for use in any expression.
fn in_parentheses(line: &str) -> String {
    match line.rsplit_once(' ') {
        Some((define, number)) if define.starts_with("#define ") && number.starts_with('-') => {
            format!("{define} ({number})\n")
        }
        _ => format!("{line}\n"),
    }
}

/// Every exported function of the crate is in a header, whichever file it stands in.
fn complete(headers: &str) -> Result<()> {
    let mut missing = String::new();
    for path in files(&root()?.join(CRATE).join("src"), "rs", true)? {
        let source = crate::workspace::read(&path)?;
        for name in exported(&source) {
            if !headers.contains(&format!("{name}(")) {
                let _ = write!(missing, " {name}");
            }
        }
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(anyhow!("exported but in no header:{missing}"))
}

/// Names of functions that C can call.
fn exported(source: &str) -> impl Iterator<Item = &str> {
    source
        .lines()
        .filter(|line| line.starts_with("pub ") && line.contains("extern \"C\" fn "))
        .filter_map(|line| line.split("fn ").nth(1)?.split('(').next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_numbers_are_in_parentheses() {
        assert_eq!(in_parentheses("#define A -1"), "#define A (-1)\n");
        assert_eq!(in_parentheses("#define A 1"), "#define A 1\n");
        assert_eq!(in_parentheses(" * from -1"), " * from -1\n");
    }

    #[test]
    fn exported_functions_are_found_by_their_line() {
        let source = "pub unsafe extern \"C\" fn tcpx_a(\n    x: i32,\n) {}\n\
                      extern \"C\" fn hidden() {}\npub extern \"C\" fn tcpx_b() {}\n";
        assert_eq!(Vec::from_iter(exported(source)), ["tcpx_a", "tcpx_b"]);
    }

    #[test]
    fn the_header_declares_the_historic_calls() {
        let header = generate(&HEADERS[1]).unwrap();
        for call in [
            "load_plugin",
            "get_device_count",
            "get_properties",
            "listen",
            "connect_v5",
            "accept_v5",
            "reg_mr",
            "dereg_mr",
            "isend",
            "irecv",
            "test",
            "irecv_consumed",
            "close_send",
            "close_recv",
            "close_listen",
            "wait_request",
        ] {
            assert!(header.contains(&format!("int tcpx_{call}(")), "{call}");
        }
    }
}
