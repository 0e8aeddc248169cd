//! What a person sees.

pub(crate) mod chunk_lines;
pub(crate) mod hexdump;
pub(crate) mod json;
pub(crate) mod progress;
pub(crate) mod say;

use clap::builder::FalseyValueParser;
use clap::{ArgAction, Args};
use comfy_table::{CellAlignment, LineStyle, Table, TableStyle};

#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Output")]
pub(crate) struct OutputArgs {
    /// Print one JSON object for a program, errors in it too; lines for people go to standard
    /// error.
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// Print errors and the line for the other side only.
    #[arg(short, long, global = true, conflicts_with_all = ["verbose", "debug"])]
    pub(crate) quiet: bool,
    /// Log what happens; -vv logs each step, -vvv everything.
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub(crate) verbose: u8,
    /// Show each chunk, each step and other details of a fault.
    #[arg(long, global = true, env = "UCCL_TCPX_DEBUG", value_parser = FalseyValueParser::new())]
    pub(crate) debug: bool,
}

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
