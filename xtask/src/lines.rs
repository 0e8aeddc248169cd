//! `cargo xtask lines [COMMIT]`: lines of product Rust, crate by crate.
//!
//! Product files are the `*.rs` of `crates/*/src` that are not tests: not `tests.rs`, not below a
//! folder `tests`, `examples` or `benches`. Modules and functions behind `#[cfg(test)]`,
//! [`TEST_FEATURE`] (and `cfg(loom)` models), and what fuzz targets assert, do not count, inline or
//! in a file of their own; every other line does, blank ones and comments too.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Result, bail};

use super::gate::git;
use crate::workspace::{files, read, root};

/// What only tests switch on: the driver in memory that they run without a GPU.
const TEST_FEATURE: &str = "feature = \"fake-driver\"";

/// Prints the table; with a commit, what has changed since.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let root = root()?;
    let mut texts = BTreeMap::new();
    for path in files(&root.join("crates"), "rs", true)? {
        let relative = path.strip_prefix(&root)?.to_string_lossy().into_owned();
        if product_crate(&relative).is_some() {
            texts.insert(relative, read(&path)?);
        }
    }
    let own = count(&texts);
    let before = match arguments {
        [] => None,
        [commit] => {
            let mut texts = BTreeMap::new();
            for path in git(&root, &["ls-tree", "-r", "--name-only", commit, "crates"])?.lines() {
                if product_crate(path).is_some() {
                    let text = git(&root, &["show", &format!("{commit}:{path}")])?;
                    texts.insert(path.to_owned(), text);
                }
            }
            Some(count(&texts))
        }
        other => bail!("lines takes one commit or nothing, not {other:?}"),
    };
    let mut names: Vec<&String> = own
        .keys()
        .chain(before.iter().flat_map(BTreeMap::keys))
        .collect();
    names.sort();
    names.dedup();
    let (mut sum, mut sum_before) = (0, 0);
    for name in names {
        let lines = own.get(name).copied().unwrap_or(0);
        let lines_before = before
            .as_ref()
            .map(|before| before.get(name).copied().unwrap_or(0));
        sum += lines;
        sum_before += lines_before.unwrap_or(0);
        println!("{}", line(name, lines, lines_before));
    }
    println!(
        "{}",
        line("all", sum, before.is_some().then_some(sum_before))
    );
    Ok(())
}

fn line(name: &str, lines: usize, before: Option<usize>) -> String {
    match before {
        None => format!("{name:20} {lines:>7}"),
        Some(before) => {
            let change = lines as i64 - before as i64;
            format!("{name:20} {lines:>7} {before:>7} {change:>+7}")
        }
    }
}

/// Lines by crate, of these files by path.
fn count(texts: &BTreeMap<String, String>) -> BTreeMap<String, usize> {
    let of_tests: Vec<String> = texts
        .iter()
        .flat_map(|(path, text)| test_modules(path, text))
        .collect();
    let mut sums = BTreeMap::new();
    for (path, text) in texts {
        // `a/b` stands for `a/b.rs` and for all below `a/b/`.
        let is_test = of_tests.iter().any(|module| {
            let rest = path.strip_prefix(module.as_str());
            rest.is_some_and(|rest| rest == ".rs" || rest.starts_with('/'))
        });
        if let (Some(name), false) = (product_crate(path), is_test) {
            *sums.entry(name.to_owned()).or_default() += product_lines(text);
        }
    }
    sums
}

/// Modules of tests that the file at `path` has in files of their own, without the ending.
fn test_modules(path: &str, text: &str) -> Vec<String> {
    let file = Path::new(path);
    let folder = match file.file_stem().and_then(|stem| stem.to_str()) {
        Some("lib" | "main" | "mod") => file.parent().unwrap_or(file).to_owned(),
        _ => file.with_extension(""),
    };
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let named = lines.windows(2).filter(|pair| is_test(pair[0]));
    let named = named.filter_map(|pair| {
        let (_, name) = pair[1].strip_suffix(';')?.split_once("mod ")?;
        Some(folder.join(name).to_string_lossy().into_owned())
    });
    named.collect()
}

/// The crate of a product file.
fn product_crate(path: &str) -> Option<&str> {
    let (name, rest) = path.strip_prefix("crates/")?.split_once('/')?;
    let is_product = rest.starts_with("src/")
        && rest.ends_with(".rs")
        && !rest.ends_with("/tests.rs")
        && !rest
            .split('/')
            .any(|part| matches!(part, "tests" | "examples" | "benches"));
    is_product.then_some(name)
}

/// Lines of a file without its tests.
fn product_lines(text: &str) -> usize {
    let mut count = 0;
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        let start = line.trim_start();
        if !is_test(start) {
            count += 1;
            continue;
        }
        skip_item(&mut lines);
    }
    count
}

/// Skips one item, as rustfmt lays it out: what a line opens ends at a line of the same indent.
fn skip_item<'a>(lines: &mut impl Iterator<Item = &'a str>) {
    while let Some(mut line) = lines.next() {
        while line.ends_with(['{', '(', '[', '<']) || line.ends_with("where") {
            let indent = &line[..line.len() - line.trim_start().len()];
            let closes = |line: &&str| {
                let rest = line.strip_prefix(indent);
                rest.is_some_and(|rest| rest.starts_with(['}', ')', ']', '>', '{']))
            };
            let Some(end) = lines.find(closes) else {
                return;
            };
            line = end;
        }
        if !line.trim_start().starts_with("//") && line.ends_with([';', ',', '}']) {
            return;
        }
    }
}

fn is_test(line: &str) -> bool {
    line.strip_prefix("#[cfg(").is_some_and(|condition| {
        let condition = condition.strip_prefix("any(test, ").unwrap_or(condition);
        [
            TEST_FEATURE,
            "fuzzing)",
            "test)",
            "all(test",
            "loom)",
            "all(loom",
        ]
        .iter()
        .any(|start| condition.starts_with(start))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_and_models_do_not_count() {
        let text = "//! Doc.\nfn one() {}\n\n#[cfg(test)]\nmod tests;\n#[cfg(all(test, not(loom)))]\nmod tests {\n    fn two() {\n    }\n}\nfn three() {\n}\n";
        assert_eq!(product_lines(text), 5);
        let text = "#[cfg(any(test, fuzzing))]\npub mod fuzzing;\nmod one;\n";
        assert_eq!(product_lines(text), 1);
        assert_eq!(
            product_lines("struct A {\n    #[cfg(test)]\n    field: u8,\n    other: u8,\n}\n"),
            3
        );
        assert_eq!(
            product_lines(
                "    #[cfg(test)]\n    fn helper(&self) {\n        x();\n    }\n    fn real() {}\n"
            ),
            1
        );
    }

    #[test]
    fn a_test_signature_over_lines_does_not_count() {
        let text = "#[cfg(test)]\npub(crate) fn pair(\n    size: usize,\n) -> Pair {\n    make(size)\n}\nfn real() {}\n";
        assert_eq!(product_lines(text), 1);
        let text =
            "#[cfg(test)]\nfn all<T>(one: T)\nwhere\n    T: Sized,\n{\n    a();\n}\nfn real() {}\n";
        assert_eq!(product_lines(text), 1);
        assert_eq!(
            product_lines("#[cfg(test)]\nuse crate::{\n    a,\n    b,\n};\nfn real() {}\n"),
            1
        );
    }

    #[test]
    fn a_module_of_tests_in_its_own_file_does_not_count() {
        let texts = [
            ("crates/a/src/lib.rs", "mod b;\n#[cfg(test)]\nmod c;\n"),
            (
                "crates/a/src/b.rs",
                "#[cfg(test)]\npub(crate) mod fake;\nfn one() {}\n",
            ),
            ("crates/a/src/b/fake.rs", "mod more;\n"),
            ("crates/a/src/b/fake/more.rs", "fn two() {}\n"),
            ("crates/a/src/b/faked.rs", "fn three() {}\n"),
            ("crates/a/src/c.rs", "fn four() {}\n"),
        ];
        let texts = texts.map(|(path, text)| (path.to_owned(), text.to_owned()));
        assert_eq!(count(&texts.into()), [("a".to_owned(), 1 + 1 + 1)].into());
    }

    #[test]
    fn only_sources_of_crates_are_product() {
        assert_eq!(product_crate("crates/tcpx/src/core/pace.rs"), Some("tcpx"));
        for path in [
            "crates/tcpx/src/core/tests.rs",
            "crates/tcpx/tests/tcp.rs",
            "crates/tcpx/src/a/tests/b.rs",
            "tests/src/pair.rs",
            "crates/tcpx/examples/x.rs",
        ] {
            assert_eq!(product_crate(path), None, "{path}");
        }
    }
}
