//! Processes that this program starts.

use std::io;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

/// How often an end is looked for.
const LOOK: Duration = Duration::from_millis(5);

/// How long one that was killed may take: the kernel ends it later where it waits inside a driver.
const GRACE: Duration = Duration::from_secs(5);

/// A process; killed when dropped.
#[derive(Debug)]
pub(crate) struct Child(pub(crate) std::process::Child);

impl Child {
    pub(crate) fn start(command: &mut Command) -> io::Result<Self> {
        command.spawn().map(Self)
    }

    /// Waits for its end for at most `limit`.
    pub(crate) fn end(&mut self, limit: Duration) -> io::Result<Option<ExitStatus>> {
        let until = Instant::now() + limit;
        loop {
            match self.0.try_wait()? {
                None if Instant::now() < until => std::thread::sleep(LOOK),
                ended => return Ok(ended),
            }
        }
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.end(GRACE);
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        self.kill();
    }
}
