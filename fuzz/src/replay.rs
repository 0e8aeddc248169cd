//! Replays the inputs kept for a fuzz target through its assertions. Tests of the crates include
//! this file.

use std::fs;
use std::path::Path;

pub(crate) fn replay(target: &str, run: impl Fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/corpus")
        .join(target);
    let mut inputs = 0;
    for entry in fs::read_dir(&folder).expect("the corpus is checked in") {
        let path = entry.expect("a readable folder").path();
        let input = fs::read(&path).expect("a readable input");
        // Shown only when an assertion fails.
        println!("{}", path.display());
        run(&input);
        inputs += 1;
    }
    assert!(inputs > 0, "{} is empty", folder.display());
}
