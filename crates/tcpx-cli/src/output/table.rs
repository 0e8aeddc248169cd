//! Small tables.

use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

/// A line under the header and nothing else.
const STYLE: TableStyle =
    TableStyle::new().header_separator(LineStyle::none().fill('─').junction('─'));

/// A table with a header line; columns in `right` hold numbers.
pub(crate) fn table(header: &[&str], right: &[usize]) -> Table {
    let mut table = Table::new();
    table.load_style(STYLE);
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
