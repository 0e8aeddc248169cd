//! A tarball, a Debian package and an RPM out of the folder that `cargo xtask dist` laid out.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result};

use super::{
    Dist, GLIBC, LIBRARY, LIBRARY_LINK, LIBRARY_SONAME, NIXL_PLUGIN, VERSION, has, pkg_config,
};
use crate::workspace::run;

/// Files of the folder and where they lie on a host, apart from the library, pages and completions.
/// The program finds its plugin beside itself.
const PLACES: [(&str, &str); 11] = [
    ("tcpx", "usr/lib/tcpx"),
    ("libnccl-net-tcpx.so", "usr/lib/tcpx"),
    (NIXL_PLUGIN, "usr/lib/tcpx"),
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
    libraries: String,
    zsh: &'static str,
}

const SUMMARY: &str = "GPU memory between hosts over plain TCP";
const DESCRIPTION: &str = "The program tcpx, plugins for NCCL and NIXL, and a C library.";

/// `NAME.tar.gz` in `out`, with `folder` as `NAME/`.
pub(super) fn tarball(folder: &Path, out: &Path, name: &str) -> Result<PathBuf> {
    let path = out.join(format!("{name}.tar.gz"));
    tar(&path, folder, name)?;
    Ok(path)
}

/// The tree of an installed package, in the empty folder `tree`.
fn lay_out(dist: &Dist, tree: &Path, layout: &Layout) -> Result<()> {
    let folder = dist.folder();
    let wanted = |name: &str| name != NIXL_PLUGIN || dist.processor.has_nixl;
    for (name, place) in PLACES.into_iter().filter(|(name, _)| wanted(name)) {
        install(&folder.join(name), &tree.join(place).join(name))?;
    }
    let libraries = tree.join(&layout.libraries);
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

/// The Debian package, by Debian's own tool; nothing on a host without it.
pub(super) fn debian(dist: &Dist) -> Result<Option<PathBuf>> {
    if !has("dpkg-deb") {
        println!("skipped: deb: no dpkg-deb is here; Debian has it in dpkg");
        return Ok(None);
    }
    let stage = dist.target.join("deb");
    emptied(&stage)?;
    let tree = stage.join("data");
    let layout = Layout {
        libraries: format!("usr/lib/{}-linux-gnu", dist.processor.name),
        zsh: "usr/share/zsh/vendor-completions/_tcpx",
    };
    lay_out(dist, &tree, &layout)?;
    let control = tree.join("DEBIAN");
    fs::create_dir(&control)?;
    super::write(
        &control.join("control"),
        &format!(
            "Package: tcpx\nVersion: {VERSION}\nArchitecture: {}\nMaintainer: the tcpx authors\n\
             Depends: libc6 (>= {GLIBC})\nSection: net\nPriority: optional\n\
             Description: {SUMMARY}\n {DESCRIPTION}\n",
            dist.processor.debian
        ),
    )?;
    super::write(&control.join("triggers"), "activate-noawait ldconfig\n")?;
    let path = dist.packages.join(dist.debian_name());
    run(Command::new("dpkg-deb")
        .args(["--build", "--root-owner-group", "-Zgzip"])
        .arg(&tree)
        .arg(&path)
        .stdout(Stdio::null()))?;
    Ok(Some(path))
}

/// The RPM, by rpmbuild, which finds out what the files need and provide; nothing on a host
/// without it.
pub(super) fn rpm(dist: &Dist) -> Result<Option<PathBuf>> {
    if !has("rpmbuild") {
        println!("skipped: RPM: no rpmbuild is here; Debian has it in the package rpm");
        return Ok(None);
    }
    let stage = dist.target.join("rpm");
    emptied(&stage)?;
    let tree = stage.join("data");
    let layout = Layout {
        libraries: "usr/lib64".to_owned(),
        zsh: "usr/share/zsh/site-functions/_tcpx",
    };
    lay_out(dist, &tree, &layout)?;
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
    let name = dist.rpm_name();
    let mut build = Command::new("rpmbuild");
    build.args(["-bb", "--quiet", "--target"]);
    build.arg(format!("{}-linux", dist.processor.name));
    for define in [
        format!("_topdir {}", stage.display()),
        format!("_rpmdir {}", dist.packages.display()),
        format!("_rpmfilename {name}"),
    ] {
        build.args(["--define", &define]);
    }
    run(build.arg(spec))?;
    Ok(Some(dist.packages.join(name)))
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
