//! Small tables.

use comfy_table::{CellAlignment, Table, presets};

/// A table with a header line; columns in `right` hold numbers.
pub(crate) fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::UTF8_HORIZONTAL_ONLY);
    table.set_header(header.to_vec());
    for &index in right {
        if let Some(column) = table.column_mut(index) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The table's lines, each beginning with `indent`.
pub(crate) fn indented(table: &Table, indent: &str) -> String {
    table
        .lines()
        .map(|line| format!("{indent}{}\n", line.trim_end()))
        .collect()
}
