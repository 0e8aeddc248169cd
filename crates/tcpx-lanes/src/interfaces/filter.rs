//! Which interfaces a user allows, in the notation of `NCCL_SOCKET_IFNAME`.

use std::fmt;

/// Names between commas, each standing for every interface whose name begins so; `=` in front asks
/// for whole names, `^` turns the list around, and both may stand together as `^=`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InterfaceFilter {
    text: String,
    names: Vec<String>,
    exclude: bool,
    exact: bool,
}

impl InterfaceFilter {
    /// Reads a filter; `None` when it names nothing.
    pub fn parse(text: &str) -> Option<Self> {
        let (exclude, rest) = strip(text.trim(), '^');
        let (exact, rest) = strip(rest, '=');
        let names: Vec<String> = rest
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .map(str::to_owned)
            .collect();
        (!names.is_empty()).then(|| Self {
            text: text.trim().to_owned(),
            names,
            exclude,
            exact,
        })
    }

    /// Whether an interface of this name may be used.
    pub fn admits(&self, interface: &str) -> bool {
        let named = self.names.iter().any(|name| self.names(name, interface));
        named != self.exclude
    }

    fn names(&self, name: &str, interface: &str) -> bool {
        match self.exact {
            true => interface == name,
            false => interface.starts_with(name),
        }
    }

    /// The names that stand for none of these interfaces.
    pub fn unmet<'a>(&'a self, interfaces: &'a [&str]) -> impl Iterator<Item = &'a str> {
        let is_met = |name: &str| interfaces.iter().any(|one| self.names(name, one));
        self.names
            .iter()
            .map(String::as_str)
            .filter(move |name| !is_met(name))
    }

    /// The list says what to leave out.
    pub fn is_exclusion(&self) -> bool {
        self.exclude
    }
}

impl fmt::Display for InterfaceFilter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn strip(text: &str, mark: char) -> (bool, &str) {
    text.strip_prefix(mark)
        .map_or((false, text), |rest| (true, rest))
}

#[cfg(test)]
mod tests {
    use super::InterfaceFilter;

    fn admitted(filter: &str) -> Vec<&'static str> {
        let filter = InterfaceFilter::parse(filter).expect("it names something");
        ["lo", "eth0", "eth1", "eth10", "docker0"]
            .into_iter()
            .filter(|name| filter.admits(name))
            .collect()
    }

    #[test]
    fn names_are_prefixes_unless_asked_otherwise() {
        assert_eq!(admitted("eth"), ["eth0", "eth1", "eth10"]);
        assert_eq!(admitted("eth1"), ["eth1", "eth10"]);
        assert_eq!(admitted("=eth1"), ["eth1"]);
        assert_eq!(admitted("=eth1, eth10"), ["eth1", "eth10"]);
        assert_eq!(admitted("^docker,lo"), ["eth0", "eth1", "eth10"]);
        assert_eq!(admitted("^=eth1"), ["lo", "eth0", "eth10", "docker0"]);
        assert_eq!(admitted(" eth0 ,, lo "), ["lo", "eth0"]);
    }

    #[test]
    fn names_that_stand_for_no_interface_are_told() {
        let unmet = |text: &str| {
            let filter = InterfaceFilter::parse(text).expect("it names something");
            filter
                .unmet(&["lo", "eth0"])
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        assert_eq!(unmet("eth,eht1,lo"), ["eht1"]);
        assert_eq!(unmet("=eth"), ["eth"]);
        assert!(unmet("^eth0").is_empty());
    }

    #[test]
    fn a_filter_that_names_nothing_is_none() {
        for text in ["", "  ", "^", "=", "^=", ",,", "^ , "] {
            assert_eq!(InterfaceFilter::parse(text), None, "{text:?}");
        }
    }
}
