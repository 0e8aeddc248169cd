//! A tarball, a Debian package and an RPM out of the folder that `cargo xtask dist` laid out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{LIBRARY, LIBRARY_LINK, LIBRARY_SONAME, VERSION, has, pkg_config};
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
fn lay_out(folder: &Path, tree: &Path, layout: &Layout) -> Result<()> {
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
        &pkg_config(VERSION, "/usr/include", &libraries),
    )
}

fn emptied(stage: &Path) -> Result<()> {
    if stage.exists() {
        fs::remove_dir_all(stage).with_context(|| format!("cannot empty {}", stage.display()))?;
    }
    fs::create_dir_all(stage).with_context(|| format!("cannot make {}", stage.display()))
}

/// `tcpx_VERSION_amd64.deb` in `out`, by Debian's own tools, of which one finds out what the files need; nothing on a host
/// without them. `stage` is a folder for the installed tree.
pub(super) fn debian(folder: &Path, stage: &Path, out: &Path) -> Result<Option<PathBuf>> {
    if !["dpkg-deb", "dpkg-shlibdeps"].into_iter().all(has) {
        println!(
            "skipped: deb: no dpkg-deb or dpkg-shlibdeps is here; Debian has them in dpkg-dev"
        );
        return Ok(None);
    }
    emptied(stage)?;
    let tree = stage.join("data");
    lay_out(folder, &tree, &DEBIAN)?;
    // It reads that file, and so much of it.
    fs::create_dir(stage.join("debian"))?;
    super::write(
        &stage.join("debian/control"),
        "Source: tcpx\n\nPackage: tcpx\nArchitecture: any\n",
    )?;
    let mut ask = Command::new("dpkg-shlibdeps");
    ask.current_dir(stage).arg("-O");
    ask.args(
        ["tcpx", "libnccl-net-tcpx.so", "libplugin_TCPX.so"].map(|name| {
            let place = PLACES.iter().find(|(known, _)| *known == name);
            tree.join(place.map_or("", |(_, place)| place)).join(name)
        }),
    );
    ask.arg(tree.join(DEBIAN.libraries).join(LIBRARY));
    let answer = ask.output().context("cannot start dpkg-shlibdeps")?;
    let text = String::from_utf8_lossy(&answer.stdout).into_owned();
    let needs = text.trim().strip_prefix("shlibs:Depends=");
    let needs = needs.with_context(|| {
        let why = String::from_utf8_lossy(&answer.stderr);
        format!("dpkg-shlibdeps does not say what is needed: {text}{why}")
    })?;
    let control = tree.join("DEBIAN");
    fs::create_dir(&control)?;
    super::write(
        &control.join("control"),
        &format!(
            "Package: tcpx\nVersion: {VERSION}\nArchitecture: amd64\nMaintainer: the tcpx authors\n\
             Depends: {needs}\nSection: net\nPriority: optional\n\
             Description: {SUMMARY}\n {DESCRIPTION}\n"
        ),
    )?;
    super::write(&control.join("triggers"), "activate-noawait ldconfig\n")?;
    let path = out.join(format!("tcpx_{VERSION}_amd64.deb"));
    run(Command::new("dpkg-deb")
        .args(["--build", "--root-owner-group", "-Zgzip"])
        .arg(&tree)
        .arg(&path)
        .stdout(Stdio::null()))?;
    Ok(Some(path))
}

/// `tcpx-VERSION-1.x86_64.rpm` in `out`, by rpmbuild, which finds out what the files need and provide; nothing on a
/// host without it.
pub(super) fn rpm(folder: &Path, stage: &Path, out: &Path) -> Result<Option<PathBuf>> {
    if !has("rpmbuild") {
        println!("skipped: RPM: no rpmbuild is here; Debian has it in the package rpm");
        return Ok(None);
    }
    emptied(stage)?;
    let tree = stage.join("data");
    lay_out(folder, &tree, &RPM)?;
    let (spec, tree) = (stage.join("tcpx.spec"), tree.display());
    // What was built is taken as it is; gzip is what every rpm reads.
    super::write(
        &spec,
        &format!(
            "%global __os_install_post %{{nil}}\n%global debug_package %{{nil}}\n\
             %global _binary_payload w6.gzdio\n%global _build_id_links none\n\
             %global __requires_exclude pkg-config\n\
             Name: tcpx\nVersion: {VERSION}\nRelease: 1\nSummary: {SUMMARY}\n\
             License: Apache-2.0 OR MIT\n%description\n{DESCRIPTION}\n\
             %install\ncp -a {tree}/. %{{buildroot}}/\n%files\n\
             /usr/bin/tcpx\n/usr/lib/tcpx\n/usr/lib64/libtcpx.so*\n/usr/lib64/pkgconfig/tcpx.pc\n\
             /usr/include/tcpx*.h\n/usr/share/doc/tcpx\n/usr/share/man/man1/tcpx*\n\
             /usr/share/bash-completion/completions/tcpx\n/usr/share/zsh/site-functions/_tcpx\n\
             /usr/share/fish/vendor_completions.d/tcpx.fish\n"
        ),
    )?;
    let name = format!("tcpx-{VERSION}-1.x86_64.rpm");
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
