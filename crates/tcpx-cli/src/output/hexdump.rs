//! Bytes as a hex dump: offset, sixteen bytes, and what of them is text.

use std::fmt::Write;

const ROW: usize = 16;

/// The first `most` bytes of `bytes`, one line per sixteen, each beginning with `indent`.
///
/// `at` is the offset shown for the first byte. When bytes are left out, a last line says how many.
pub(crate) fn hex_dump(bytes: &[u8], at: u64, most: usize, indent: &str) -> String {
    let shown = &bytes[..bytes.len().min(most)];
    let mut text = String::new();
    for (row, line) in shown.chunks(ROW).enumerate() {
        let _ = write!(text, "{indent}{:08x} ", at + (row * ROW) as u64);
        for column in 0..ROW {
            if column == ROW / 2 {
                text.push(' ');
            }
            match line.get(column) {
                Some(byte) => {
                    let _ = write!(text, " {byte:02x}");
                }
                None => text.push_str("   "),
            }
        }
        text.push_str("  |");
        for &byte in line {
            let printable = byte == b' ' || byte.is_ascii_graphic();
            text.push(if printable { char::from(byte) } else { '.' });
        }
        text.push_str("|\n");
    }
    if shown.len() < bytes.len() {
        let _ = writeln!(text, "{indent}... {} more bytes", bytes.len() - shown.len());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::hex_dump;

    #[test]
    fn the_greeting_is_shown_in_two_rows() {
        assert_eq!(
            hex_dump(b"Hello from TCPX client!", 0, 64, "  "),
            "  00000000  48 65 6c 6c 6f 20 66 72  6f 6d 20 54 43 50 58 20  |Hello from TCPX |\n\
             \x20 00000010  63 6c 69 65 6e 74 21                              |client!|\n"
        );
    }

    #[test]
    fn control_bytes_never_reach_the_terminal() {
        let dump = hex_dump(b"\x1b[31m\n\x7f\xff", 0, 64, "");
        assert!(
            dump.trim_end()
                .bytes()
                .all(|byte| byte == b' ' || byte.is_ascii_graphic()),
            "{dump}"
        );
    }

    #[test]
    fn what_is_left_out_is_counted() {
        let dump = hex_dump(&[0; 100], 0x1000, 32, "");
        assert_eq!(dump.lines().count(), 3);
        assert!(dump.starts_with("00001000 "));
        assert!(dump.ends_with("... 68 more bytes\n"));
    }

    #[test]
    fn no_bytes_give_no_lines() {
        assert_eq!(hex_dump(&[], 0, 64, "  "), "");
    }
}
