//! The mount that a path lies on.

use std::path::{Path, PathBuf};

/// A mount as `/proc/self/mountinfo` tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) point: PathBuf,
    pub(crate) options: Vec<String>,
}

/// The mount that `path` lies on; of several on one point the last, which covers the others.
pub(crate) fn mount_of(mountinfo: &str, path: &Path) -> Option<Mount> {
    let mut best: Option<Mount> = None;
    for mount in mountinfo.lines().filter_map(parse) {
        let depth = |mount: &Mount| mount.point.components().count();
        let deeper = best
            .as_ref()
            .is_none_or(|best| depth(&mount) >= depth(best));
        if path.starts_with(&mount.point) && deeper {
            best = Some(mount);
        }
    }
    best
}

/// Fields 5 and 6 of a line: mount point, and the options of this mount.
fn parse(line: &str) -> Option<Mount> {
    let mut fields = line.split(' ').skip(4);
    let point = unescaped(fields.next()?);
    let options = fields.next()?.split(',').map(str::to_owned).collect();
    Some(Mount {
        point: point.into(),
        options,
    })
}

/// Without the octal escapes that stand for spaces and the like.
fn unescaped(text: &str) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let code = after
            .get(..3)
            .filter(|_| first == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(byte) => {
                out.push(byte);
                rest = &after[3..];
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:30 / /var/lib/tcpx rw,nosuid,noexec - tmpfs tmpfs rw
31 22 0:31 / /var/lib/tcpx\\040two rw - tmpfs tmpfs rw
32 22 0:32 / /opt ro - tmpfs tmpfs rw
33 32 0:33 / /opt rw,noexec - tmpfs tmpfs rw
broken";

    #[test]
    fn the_deepest_mount_and_of_equals_the_last_one_holds() {
        let point = |path: &str| mount_of(TABLE, Path::new(path)).expect("a mount");
        assert_eq!(point("/usr/lib/x.so").point, Path::new("/"));
        let tcpx = point("/var/lib/tcpx/lib64/x.so");
        assert!(tcpx.options.iter().any(|option| option == "noexec"));
        assert_eq!(point("/var/lib/tcpx two/x").options, ["rw"]);
        assert_eq!(point("/var/lib/tcpxx/x").point, Path::new("/"));
        assert_eq!(point("/opt/x").options, ["rw", "noexec"]);
        assert_eq!(mount_of("", Path::new("/x")), None);
    }
}
