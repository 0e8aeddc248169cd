//! Everything on a card that a binding may change, for comparing before and after.

use super::bind::Devmem;
use super::error::DevmemError;
use super::rule::Rule;

/// Settings of a card that bindings change and put back.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CardState {
    /// `tcp-data-split`: 1 off, 2 on; `None` when the driver has no such setting.
    pub header_split: Option<u8>,
    /// `hds-thresh`, in bytes.
    pub threshold: Option<u32>,
    /// Whether flow rules are on.
    pub flow_rules: Option<bool>,
    /// The table that spreads packets over queues.
    pub table: Option<Vec<u32>>,
    /// Flow rules: their places, and those that are of TCP flows.
    pub rules: Vec<(u32, Option<Rule>)>,
}

impl Devmem {
    /// Reads a card's state. Needs no privilege.
    ///
    /// # Errors
    /// [`DevmemError::NoInterface`] or the kernel's refusal.
    pub fn card_state(&self, interface: &str) -> Result<CardState, DevmemError> {
        let settings = self.settings(interface, self.ifindex(interface)?);
        let split = settings.header_split()?;
        Ok(CardState {
            header_split: split.split,
            threshold: split.threshold,
            flow_rules: settings.flow_rules()?,
            table: settings.indirection()?,
            rules: self
                .kernel
                .rules(interface)
                .map(|table| table.rules)
                .unwrap_or_default(),
        })
    }
}
