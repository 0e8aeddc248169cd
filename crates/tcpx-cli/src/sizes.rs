//! Sizes and times as a person types and reads them.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A number of bytes, typed as `4096`, `4KiB`, `4MiB` or `1GB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Size(pub(crate) u64);

/// Why a text is no size.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "expected a size such as 4096, 512KiB, 4MiB or 1GB (B, KiB to TiB in powers of 1024, KB to TB in powers of 1000; less than 16 EiB), got `{0}`"
)]
pub(crate) struct SizeError(String);

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
];

/// `4` and `KiB` of `4 KiB`.
fn number_and_unit(text: &str) -> (&str, &str) {
    let text = text.trim();
    let end = text.find(|c: char| !c.is_ascii_digit());
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    (number, unit.trim_start())
}

impl FromStr for Size {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let (number, unit) = number_and_unit(text);
        let known = UNITS
            .iter()
            .find(|(name, _)| unit.eq_ignore_ascii_case(name));
        let factor = match unit {
            "" => Some(1),
            _ => known.map(|&(_, factor)| factor),
        };
        let number: Option<u64> = number.parse().ok();
        number
            .zip(factor)
            .and_then(|(number, factor)| number.checked_mul(factor))
            .map(Self)
            .ok_or_else(|| SizeError(text.to_owned()))
    }
}

impl fmt::Display for Size {
    /// Exact when a power of 1024 divides the size or it is small, else three digits.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, factor) in &UNITS[..4] {
            if self.0 < *factor {
                continue;
            }
            if self.0.is_multiple_of(*factor) {
                return write!(f, "{} {name}", self.0 / factor);
            }
            if self.0 >= 16 * 1024 {
                #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
                return write!(f, "{:.2} {name}", self.0 as f64 / *factor as f64);
            }
        }
        write!(f, "{} bytes", grouped(self.0))
    }
}

/// Bytes that moved, in powers of 1000 as their rates: `381 MB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Amount(pub(crate) u64);

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 < 1_000 {
            let plural = if self.0 == 1 { "" } else { "s" };
            return write!(f, "{} byte{plural}", self.0);
        }
        #[expect(clippy::cast_precision_loss, reason = "three digits are shown")]
        let mut number = self.0 as f64 / 1e3;
        let mut units = ["kB", "MB", "GB", "TB", "PB"].into_iter();
        let mut unit = units.next().unwrap_or_default();
        // What would be rounded to four digits has the next unit.
        while number >= 999.5
            && let Some(next) = units.next()
        {
            (number, unit) = (number / 1e3, next);
        }
        match number {
            _ if number < 9.995 => write!(f, "{number:.2} {unit}"),
            _ if number < 99.95 => write!(f, "{number:.1} {unit}"),
            _ => write!(f, "{number:.0} {unit}"),
        }
    }
}

/// A time limit, typed as `30`, `30s`, `500ms`, `10m` or `2h`; a bare number is seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limit(pub(crate) Duration);

/// Why a text is no time limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("expected a time such as 30s, 500ms or 10m (more than zero, at most 30 days), got `{0}`")]
pub(crate) struct LimitError(String);

impl FromStr for Limit {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let wrong = || LimitError(text.to_owned());
        let (number, unit) = number_and_unit(text);
        let number: u64 = number.parse().map_err(|_| wrong())?;
        let milliseconds = match unit {
            "ms" => Some(number),
            "" | "s" => number.checked_mul(1_000),
            "m" | "min" => number.checked_mul(60_000),
            "h" => number.checked_mul(3_600_000),
            _ => None,
        };
        match milliseconds {
            Some(value @ 1..=2_592_000_000) => Ok(Self(Duration::from_millis(value))),
            _ => Err(wrong()),
        }
    }
}

/// `1234567` as `1,234,567`.
pub(crate) fn grouped(number: u64) -> String {
    indicatif::HumanCount(number).to_string()
}

/// A time with three digits and the unit that suits it.
pub(crate) fn time(span: Duration) -> String {
    let seconds = span.as_secs_f64();
    if seconds >= 100.0 {
        format!("{seconds:.0} s")
    } else if seconds >= 1.0 {
        format!("{seconds:.2} s")
    } else if seconds >= 0.001 {
        format!("{:.2} ms", seconds * 1e3)
    } else {
        format!("{:.1} us", seconds * 1e6)
    }
}

/// A rate in GB/s (10^9 bytes a second); `None` when no time passed.
pub(crate) fn rate(bytes: u64, span: Duration) -> Option<f64> {
    let seconds = span.as_secs_f64();
    #[expect(
        clippy::cast_precision_loss,
        reason = "a rate is shown with three digits"
    )]
    (seconds > 0.0).then(|| bytes as f64 / seconds / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_with_binary_and_decimal_units() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("23B", 23),
            ("4KiB", 4096),
            ("4 MiB", 4 << 20),
            ("4mib", 4 << 20),
            ("1GB", 1_000_000_000),
            ("5GiB", 5 << 30),
            (" 2TB ", 2_000_000_000_000),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn wrong_sizes_are_named() {
        let wrong = [
            "",
            "-1",
            "4M",
            "1.5GiB",
            "99999999999999999999",
            "20000000TiB",
        ];
        for text in wrong {
            assert_eq!(text.parse::<Size>(), Err(SizeError(text.into())));
        }
    }

    #[test]
    fn sizes_are_shown_exactly_when_they_are_round_or_small() {
        assert_eq!(Size(23).to_string(), "23 bytes");
        assert_eq!(Size(4097).to_string(), "4,097 bytes");
        assert_eq!(Size(512 << 10).to_string(), "512 KiB");
        assert_eq!(Size(256 << 20).to_string(), "256 MiB");
        assert_eq!(Size((5 << 30) + 3).to_string(), "5.00 GiB");
        assert_eq!(Size(1_000_000_000).to_string(), "953.67 MiB");
    }

    #[test]
    fn amounts_have_three_digits_and_decimal_units() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (999, "999 bytes"),
            (1_000, "1.00 kB"),
            (9_996, "10.0 kB"),
            (110_400_000, "110 MB"),
            (999_499_999, "999 MB"),
            (999_500_000, "1.00 GB"),
            (u64::MAX, "18447 PB"),
        ] {
            assert_eq!(Amount(bytes).to_string(), text);
        }
    }

    #[test]
    fn limits_need_a_positive_bounded_time() {
        assert_eq!("30".parse(), Ok(Limit(Duration::from_secs(30))));
        assert_eq!("500ms".parse(), Ok(Limit(Duration::from_millis(500))));
        assert_eq!("10m".parse(), Ok(Limit(Duration::from_secs(600))));
        for text in [
            "0",
            "",
            "s",
            "31 days",
            "1e3",
            "800h",
            "18446744073709551615h",
        ] {
            assert_eq!(
                text.parse::<Limit>(),
                Err(LimitError(text.into())),
                "{text}"
            );
        }
    }

    #[test]
    fn numbers_are_grouped_in_threes() {
        assert_eq!(grouped(0), "0");
        assert_eq!(grouped(999), "999");
        assert_eq!(grouped(1_000), "1,000");
        assert_eq!(grouped(65_792_000), "65,792,000");
    }
}
