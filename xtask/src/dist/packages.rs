//! A tarball, a Debian package and an RPM out of the folder that `cargo xtask dist` laid out.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{LIBRARY, LIBRARY_LINK, LIBRARY_SONAME, pkg_config};
use crate::workspace::run;

/// Files of the folder and where they lie on a host, apart from the library, pages and completions. The program
/// finds its plugin beside itself.
const PLACES: [(&str, &str); 11] = [
    ("tcpx", "usr/lib/tcpx"),
    ("libnccl-net-tcpx.so", "usr/lib/tcpx"),
    ("libplugin_TCPX.so", "usr/lib/tcpx"),
    ("tcpx.h", "usr/include"),
    ("tcpx_plugin.h", "usr/include"),
    ("README.md", "usr/share/doc/tcpx"),
    ("transfer.c", EXAMPLES),
    ("put_get.c", EXAMPLES),
    ("plugin_transfer.c", EXAMPLES),
    ("LICENSE-APACHE", "usr/share/doc/tcpx"),
    ("LICENSE-MIT", "usr/share/doc/tcpx"),
];
const EXAMPLES: &str = "usr/share/doc/tcpx/examples";
/// Where a family of distributions has what others have elsewhere.
struct Layout {
    libraries: &'static str,
    zsh: &'static str,
}
const DEBIAN: Layout = Layout {
    libraries: "usr/lib/x86_64-linux-gnu",
    zsh: "usr/share/zsh/vendor-completions/_tcpx",
};
const RPM: Layout = Layout {
    libraries: "usr/lib64",
    zsh: "usr/share/zsh/site-functions/_tcpx",
};

const SUMMARY: &str = "GPU memory between hosts over plain TCP";
const DESCRIPTION: &str = "The program tcpx, plugins for NCCL and NIXL, and a C library.";

/// `NAME.tar.gz` in `out`, with `folder` as `NAME/`.
pub(super) fn tarball(folder: &Path, out: &Path, name: &str) -> Result<PathBuf> {
    let path = out.join(format!("{name}.tar.gz"));
    tar(&path, folder, name)?;
    Ok(path)
}

/// The tree of an installed package, in the empty folder `tree`.
fn lay_out(folder: &Path, tree: &Path, layout: &Layout, version: &str) -> Result<()> {
    for (name, place) in PLACES {
        install(&folder.join(name), &tree.join(place).join(name))?;
    }
    let libraries = tree.join(layout.libraries);
    install(&folder.join(LIBRARY), &libraries.join(LIBRARY))?;
    for (name, place) in [
        ("tcpx.bash", "usr/share/bash-completion/completions/tcpx"),
        ("_tcpx", layout.zsh),
        ("tcpx.fish", "usr/share/fish/vendor_completions.d/tcpx.fish"),
    ] {
        install(&folder.join("completions").join(name), &tree.join(place))?;
    }
    for page in fs::read_dir(folder.join("man"))? {
        let page = page?;
        let place = tree.join("usr/share/man/man1").join(page.file_name());
        install(&page.path(), &place)?;
    }
    for (name, to) in [
        (tree.join("usr/bin/tcpx"), "../lib/tcpx/tcpx"),
        (libraries.join(LIBRARY_SONAME), LIBRARY),
        (libraries.join(LIBRARY_LINK), LIBRARY_SONAME),
    ] {
        make_folder_of(&name)?;
        std::os::unix::fs::symlink(to, &name)
            .with_context(|| format!("cannot link {}", name.display()))?;
    }
    let description = libraries.join("pkgconfig/tcpx.pc");
    make_folder_of(&description)?;
    let libraries = format!("/{}", layout.libraries);
    super::write(
        &description,
        &pkg_config(version, "/usr/include", &libraries),
    )
}

fn emptied(stage: &Path) -> Result<()> {
    if stage.exists() {
        fs::remove_dir_all(stage).with_context(|| format!("cannot empty {}", stage.display()))?;
    }
    fs::create_dir_all(stage).with_context(|| format!("cannot make {}", stage.display()))
}

/// `tcpx_VERSION_amd64.deb` in `out`; `stage` is a folder for the installed tree.
pub(super) fn debian(folder: &Path, stage: &Path, out: &Path, version: &str) -> Result<PathBuf> {
    emptied(stage)?;
    let tree = stage.join("data");
    lay_out(folder, &tree, &DEBIAN, version)?;
    let mut libc = None;
    for name in ["tcpx", "libnccl-net-tcpx.so", "libplugin_TCPX.so", LIBRARY] {
        libc = libc.max(newest_glibc(&fs::read(folder.join(name))?));
    }
    let (major, minor) = libc.context("the program needs no glibc version: is it a program?")?;
    let control = stage.join("control");
    fs::create_dir(&control)?;
    fs::write(
        control.join("control"),
        format!(
            "Package: tcpx\nVersion: {version}\nArchitecture: amd64\nMaintainer: the tcpx authors\n\
             Depends: libc6 (>= {major}.{minor}), libgcc-s1\nSection: net\nPriority: optional\n\
             Description: {SUMMARY}\n {DESCRIPTION}\n"
        ),
    )?;
    let (control_tar, data_tar) = (stage.join("control.tar.gz"), stage.join("data.tar.gz"));
    tar(&control_tar, &control, ".")?;
    tar(&data_tar, &tree, ".")?;
    let path = out.join(format!("tcpx_{version}_amd64.deb"));
    let members = [
        ("debian-binary", b"2.0\n".to_vec()),
        ("control.tar.gz", fs::read(control_tar)?),
        ("data.tar.gz", fs::read(data_tar)?),
    ];
    fs::write(&path, archive(&members)?)
        .with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// `tcpx-VERSION-1.x86_64.rpm` in `out`, by rpmbuild, which finds out what the files need and provide; nothing on a
/// host without it.
pub(super) fn rpm(
    folder: &Path,
    stage: &Path,
    out: &Path,
    version: &str,
) -> Result<Option<PathBuf>> {
    let asked = Command::new("rpmbuild").arg("--version").output();
    if !asked.is_ok_and(|answer| answer.status.success()) {
        println!("skipped: RPM: no rpmbuild is here; Debian has it in the package rpm");
        return Ok(None);
    }
    emptied(stage)?;
    let tree = stage.join("data");
    lay_out(folder, &tree, &RPM, version)?;
    let (spec, tree) = (stage.join("tcpx.spec"), tree.display());
    // What was built is taken as it is; gzip is what every rpm reads.
    super::write(
        &spec,
        &format!(
            "%global __os_install_post %{{nil}}\n%global debug_package %{{nil}}\n\
             %global _binary_payload w6.gzdio\n%global _build_id_links none\n\
             %global __requires_exclude pkg-config\n\
             Name: tcpx\nVersion: {version}\nRelease: 1\nSummary: {SUMMARY}\n\
             License: Apache-2.0 OR MIT\n%description\n{DESCRIPTION}\n\
             %install\ncp -a {tree}/. %{{buildroot}}/\n%files\n\
             /usr/bin/tcpx\n/usr/lib/tcpx\n/usr/lib64/libtcpx.so*\n/usr/lib64/pkgconfig/tcpx.pc\n\
             /usr/include/tcpx*.h\n/usr/share/doc/tcpx\n/usr/share/man/man1/tcpx*\n\
             /usr/share/bash-completion/completions/tcpx\n/usr/share/zsh/site-functions/_tcpx\n\
             /usr/share/fish/vendor_completions.d/tcpx.fish\n"
        ),
    )?;
    let name = format!("tcpx-{version}-1.x86_64.rpm");
    let mut build = Command::new("rpmbuild");
    build.args(["-bb", "--quiet", "--target", "x86_64-linux"]);
    for define in [
        format!("_topdir {}", stage.display()),
        format!("_rpmdir {}", out.display()),
        format!("_rpmfilename {name}"),
    ] {
        build.args(["--define", &define]);
    }
    run(build.arg(spec))?;
    Ok(Some(out.join(name)))
}

/// Archives a folder's contents under the name `top`, owned by root.
fn tar(path: &Path, folder: &Path, top: &str) -> Result<()> {
    let mut command = Command::new("tar");
    command
        .args([
            "--create",
            "--gzip",
            "--sort=name",
            "--owner=0",
            "--group=0",
        ])
        .arg("--numeric-owner")
        .arg("--mode=u+rw,go=rX")
        // `S`: where a symbolic link leads stays as it is.
        .arg(format!("--transform=s,^\\.,{top},S"))
        .arg("--file")
        .arg(path)
        .arg("--directory")
        .arg(folder)
        .arg(".");
    run(&mut command)
}

/// The `ar` format that `dpkg` reads: a mark, then a header of 60 characters before each member.
fn archive(members: &[(&str, Vec<u8>)]) -> Result<Vec<u8>> {
    let mut bytes = b"!<arch>\n".to_vec();
    for (name, contents) in members {
        ensure!(name.len() <= 16, "{name} is too long for an ar header");
        let length = contents.len();
        writeln!(
            bytes,
            "{name:<16}{:<12}{:<6}{:<6}{:<8}{length:<10}`",
            0, 0, 0, 100_644
        )?;
        bytes.extend_from_slice(contents);
        if length % 2 == 1 {
            bytes.push(b'\n');
        }
    }
    Ok(bytes)
}

/// The newest `GLIBC_MAJOR.MINOR` that a program's symbols name.
fn newest_glibc(program: &[u8]) -> Option<(u32, u32)> {
    const MARK: &[u8] = b"GLIBC_";
    program
        .windows(MARK.len())
        .enumerate()
        .filter(|(_, window)| *window == MARK)
        .filter_map(|(at, _)| {
            let text: String = program[at + MARK.len()..]
                .iter()
                .map(|byte| char::from(*byte))
                .take_while(|c| c.is_ascii_digit() || *c == '.')
                .take(16)
                .collect();
            let mut numbers = text.split('.').map(str::parse);
            Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
        })
        .max()
}

fn install(from: &Path, to: &Path) -> Result<()> {
    make_folder_of(to)?;
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn make_folder_of(path: &Path) -> Result<()> {
    let folder = path.parent().unwrap_or(path);
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_archive_pads_odd_members_to_even_places() {
        let bytes = archive(&[("a", b"odd".to_vec()), ("b", b"even".to_vec())]).unwrap();
        assert_eq!(bytes.len(), 8 + 60 + 4 + 60 + 4);
        assert_eq!(&bytes[8..24], b"a               ");
        assert_eq!(&bytes[56..68], b"3         `\n");
        assert_eq!(&bytes[68..73], b"odd\nb");
    }

    #[test]
    fn the_newest_glibc_version_counts() {
        let program = b"\0GLIBC_2.9\0GLIBC_2.34\0GLIBC_PRIVATE\0GLIBC_2.2.5\0";
        assert_eq!(newest_glibc(program), Some((2, 34)));
        assert_eq!(newest_glibc(b"GLIBC_"), None);
    }

    #[test]
    fn a_tarball_holds_the_folder_under_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let contents = folder.path().join("in");
        fs::create_dir(&contents).unwrap();
        fs::write(contents.join("file"), "x").unwrap();
        std::os::unix::fs::symlink("./file", contents.join("link")).unwrap();
        let path = tarball(&contents, folder.path(), "tcpx-1").unwrap();
        let list = Command::new("tar").arg("-tvf").arg(path).output().unwrap();
        let list = String::from_utf8(list.stdout).unwrap();
        assert!(list.contains(" tcpx-1/file\n"), "{list}");
        assert!(list.contains(" tcpx-1/link -> ./file\n"), "{list}");
    }
}
