//! Which interfaces carry data, and which one the control connections.

use std::net::IpAddr;

use tcpx_net::interfaces::{Interface, InterfaceFilter, InterfaceKind};

use crate::host::is_for_others;

/// Most data interfaces that Google's plugin takes.
const MAX_DATA_INTERFACES: usize = 16;
/// The driver of Google's network cards.
const GOOGLE_DRIVER: &str = "gve";

/// Interfaces of this host and what they are for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InterfaceChoice {
    /// In the order of their names; empty on a host without a usable interface.
    pub(crate) data: Vec<String>,
    pub(crate) data_why: String,
    /// For NCCL's and the plugin's control connections.
    pub(crate) control: Option<String>,
    pub(crate) control_why: String,
}

/// Chooses among `all`; `default_route` names the interface that packets to everywhere leave by.
pub(crate) fn choose(all: &[Interface], default_route: Option<&str>) -> InterfaceChoice {
    let usable: Vec<&Interface> = all.iter().filter(|one| is_usable(one)).collect();
    let is_default = |one: &&Interface| Some(one.name.as_str()) == default_route;
    let of_kind = |kinds: &[InterfaceKind]| -> Vec<&Interface> {
        let kinds_of = usable.iter().copied();
        kinds_of.filter(|one| kinds.contains(&one.kind)).collect()
    };
    let cards = of_kind(&[InterfaceKind::Physical]);
    let for_data: Vec<&Interface> = cards
        .iter()
        .copied()
        .filter(|one| !is_default(one))
        .collect();
    let for_data = with_googles_first(for_data);
    let (data, data_why) = if !for_data.is_empty() {
        let left = default_route.map_or_else(String::new, |name| {
            format!("; {name} has the default route and is left for control")
        });
        let what = "network cards that are up and have an IPv4 address";
        (for_data, format!("{what}{left}"))
    } else if !cards.is_empty() {
        let why = "the only network card that is up and has an IPv4 address";
        (cards, why.to_owned())
    } else {
        let virtual_ones = of_kind(&[InterfaceKind::Veth, InterfaceKind::Virtual]);
        if virtual_ones.is_empty() {
            let loopback = of_kind(&[InterfaceKind::Loopback]);
            let is_routed = |address: &IpAddr| address.is_ipv4() && is_for_others(address);
            let is_routed = |one: &&Interface| one.addresses.iter().any(is_routed);
            let why = match loopback.iter().any(is_routed) {
                true => "no other interface is up with an IPv4 address; routes may lead to its own",
                false => {
                    "no other interface is up with an IPv4 address: this host alone can be reached"
                }
            };
            (loopback, why.to_owned())
        } else {
            let why = "no network card is visible here, this one is up and has an IPv4 address";
            (virtual_ones, why.to_owned())
        }
    };
    let (control, control_why) = match usable.iter().copied().find(is_default) {
        Some(one) => (Some(one), "it has the default route"),
        None => (
            data.first().copied(),
            "no usable interface has a default route; the first for data",
        ),
    };
    let names = data.iter().take(MAX_DATA_INTERFACES);
    InterfaceChoice {
        data: names.map(|one| one.name.clone()).collect(),
        data_why,
        control: control.map(|one| one.name.clone()),
        control_why: control_why.to_owned(),
    }
}

/// Up, with an IPv4 address that a peer could have: the daemon steers IPv4 flows only.
fn is_usable(interface: &Interface) -> bool {
    let fits = |address: &IpAddr| match address {
        IpAddr::V4(address) => !address.is_link_local() && !address.is_unspecified(),
        IpAddr::V6(_) => false,
    };
    interface.up && interface.addresses.iter().any(fits)
}

/// Google's cards alone, if there are any.
fn with_googles_first(cards: Vec<&Interface>) -> Vec<&Interface> {
    let is_googles = |one: &&Interface| one.driver.as_deref() == Some(GOOGLE_DRIVER);
    if cards.iter().any(is_googles) {
        cards.into_iter().filter(is_googles).collect()
    } else {
        cards
    }
}

/// A filter in NCCL's notation that admits `names` and nothing else of `all`: a name alone would
/// admit what begins with it too.
pub(crate) fn filter_for(names: &[String], all: &[Interface]) -> String {
    let admits_others = all.iter().any(|one| {
        !names.contains(&one.name) && names.iter().any(|name| one.name.starts_with(name.as_str()))
    });
    let exact = if admits_others { "=" } else { "" };
    format!("{exact}{}", names.join(","))
}

/// The interfaces of `all` that a filter in NCCL's notation admits.
pub(super) fn admitted<'a>(filter: &str, all: &'a [Interface]) -> Vec<&'a Interface> {
    let filter = InterfaceFilter::parse(filter);
    let admits = |one: &&Interface| {
        filter
            .as_ref()
            .is_some_and(|filter| filter.admits(&one.name))
    };
    all.iter().filter(admits).collect()
}
