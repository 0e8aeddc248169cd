//! Bounded text for a person.

use std::fmt;
use std::ops::Deref;

/// Text for a person, at most [`Detail::MAX_BYTES`] of UTF-8.
///
/// Made from a longer text it keeps the beginning, cut between two characters: an explanation is
/// better short than missing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Detail(String);

impl Detail {
    /// Most bytes a detail holds.
    pub const MAX_BYTES: usize = 512;

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<String> for Detail {
    fn from(mut text: String) -> Self {
        let end = text.floor_char_boundary(Self::MAX_BYTES);
        text.truncate(end);
        Self(text)
    }
}

impl From<&str> for Detail {
    fn from(text: &str) -> Self {
        let end = text.floor_char_boundary(Self::MAX_BYTES);
        Self(text.get(..end).unwrap_or_default().to_owned())
    }
}

impl Deref for Detail {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Detail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_text_is_cut_between_characters() {
        let text = "é".repeat(400);
        assert_eq!(Detail::from(text.as_str()).len(), 512);
        let odd = format!("x{text}");
        assert_eq!(Detail::from(odd.as_str()).len(), 511);
        assert_eq!(Detail::from(odd.clone()).as_str(), &odd[..511]);
    }

    #[test]
    fn a_short_text_is_kept_whole() {
        assert_eq!(Detail::from("peer closed").as_str(), "peer closed");
        assert_eq!(Detail::from(String::new()), Detail::default());
    }
}
