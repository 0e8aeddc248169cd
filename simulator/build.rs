//! The simulated calls must be found by those who look them up by name.

fn main() {
    println!("cargo::rustc-link-arg-bins=-rdynamic");
    println!("cargo::rerun-if-changed=build.rs");
}
