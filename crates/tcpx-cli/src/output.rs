//! What a person sees.

pub(crate) mod chunk_lines;
pub(crate) mod hexdump;
pub(crate) mod json;
pub(crate) mod progress;
pub(crate) mod say;
pub(crate) mod table;
