//! Defects that the simulator must find: those that it has found once, and others of the rules that
//! it is there for.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};

use super::simulator;
use crate::workspace::run as run_command;

/// Seeds that are tried; the first failure ends the search.
const SEEDS: &str = "2000";

/// Names the defect that a process has; all of them are built at once.
const VARIABLE: &str = "TCPX_MUTANT";

/// A defect: `from`, which stands once in a file, becomes `to`, which does the same unless
/// `MUTANT`. Those that follow each other under one name are one.
struct Mutant {
    name: &'static str,
    file: &'static str,
    from: &'static str,
    to: &'static str,
}

const MUTANTS: &[Mutant] = &[
    // A staged chunk that a lane took after the monitor's look is looked after by nobody.
    Mutant {
        name: "unwatched-staged-chunk",
        file: "crates/tcpx-net/src/tcp/staging/sending.rs",
        from: "                self.monitor_handle.request_check();\n",
        to: "                if !MUTANT {\n                    self.monitor_handle.request_check();\n                }\n",
    },
    // "Nothing was delivered", where a part of a chunk has come.
    Mutant {
        name: "untold-partial-write",
        file: "crates/tcpx-net/src/tcp/receive_table.rs",
        from: "match std::mem::replace(&mut state.is_touched, true) {",
        to: "match std::mem::replace(&mut state.is_touched, !MUTANT) {",
    },
    // A batch hides that memory of a part is held.
    Mutant {
        name: "untold-held-memory",
        file: "crates/tcpx/src/transfer.rs",
        from: "Some(first) if is_held(&error) && !is_held(&first) =>",
        to: "Some(first) if is_held(&error) && is_held(&first) == MUTANT =>",
    },
    // R4 in the engine: the end of a window is reported while a lane still writes there.
    Mutant {
        name: "close-without-waiting",
        file: "crates/tcpx-net/src/tcp/tcp_channel.rs",
        from: "                Cancel::Pending\n            }\n        }\n    }",
        to: "                if MUTANT {\n                    self.window_ended(token);\n                    return Cancel::Done;\n                }\n                Cancel::Pending\n            }\n        }\n    }",
    },
    // R7 in the engine: a chunk that its lane did not read to the end counts as come.
    Mutant {
        name: "half-a-chunk-counts",
        file: "crates/tcpx-net/src/tcp/receive_table.rs",
        from: "        state.claims.put_back(index.into());\n",
        to: "        if MUTANT {\n            state.claims.complete(index.into());\n        } else {\n            state.claims.put_back(index.into());\n        }\n",
    },
    // A lane that is dead to the server alone is asked for by nobody.
    Mutant {
        name: "nobody-asks-for-a-lane",
        file: "crates/tcpx-net/src/tcp/repair.rs",
        from: "            channel.roster.ask_for_lost(now, redial.coming());\n",
        to: "            if !MUTANT {\n                channel.roster.ask_for_lost(now, redial.coming());\n            }\n",
    },
    // Chunks of a lane that died are sent again by nobody.
    Mutant {
        name: "nothing-is-resent",
        file: "crates/tcpx-net/src/tcp/transmit_table.rs",
        from: "None => again.push((slot, bytes)),",
        to: "None if MUTANT => {}\n                None => again.push((slot, bytes)),",
    },
    // Rule 2: a later attempt is taken while a lane still has the one before, which lands late.
    Mutant {
        name: "late-attempt-lands",
        file: "crates/tcpx-net/src/tcp/receive_table.rs",
        from: "            Claimed::HeldBy(holder) => return",
        to: "            Claimed::HeldBy(_) if MUTANT => {}\n            Claimed::HeldBy(holder) => return",
    },
    // Rule 10: a resumed control connection leaves a byte out.
    Mutant {
        name: "resume-skips-a-byte",
        file: "crates/tcpx/src/control.rs",
        from: "self.log.rewind(read).map_err",
        to: "self.log.rewind(read + u64::from(MUTANT)).map_err",
    },
    // An operation ends while requests point at its memory.
    Mutant {
        name: "memory-let-go-early",
        file: "crates/tcpx/src/core/actions.rs",
        from: "        if operation.outstanding > 0 {\n            return;\n        }\n        if std::mem::take(&mut operation.quiet_owed)",
        to: "        if operation.outstanding > if MUTANT { 1 } else { 0 } {\n            return;\n        }\n        if std::mem::take(&mut operation.quiet_owed)",
    },
    // R2: a peer that does not read keeps all slots for sends.
    Mutant {
        name: "shared-slots",
        file: "crates/tcpx-net/src/tcp/staging.rs",
        from: "send: worker.slots_to_send(window.into()),",
        to: "send: if MUTANT {\n                    static ALL: std::sync::OnceLock<PinnedPool> = std::sync::OnceLock::new();\n                    ALL.get_or_init(|| worker.slots_to_send(window.into())).clone()\n                } else {\n                    worker.slots_to_send(window.into())\n                },",
    },
    // R3: a full queue of the copy worker fails operations.
    Mutant {
        name: "full-queue-fails",
        file: "crates/tcpx/src/core/jobs.rs",
        from: "                    error: MemoryError::QueueFull { .. },\n                }) => {\n",
        to: "                    error: MemoryError::QueueFull { .. },\n                }) if !MUTANT => {\n",
    },
    // R5: a fork's child says goodbye on its parent's connection.
    Mutant {
        name: "child-says-goodbye",
        file: "crates/tcpx/src/connection/shared.rs",
        from: "        self.generation != fork::generation()\n",
        to: "        self.generation != fork::generation() && !MUTANT\n",
    },
    // R7: a chunk that comes twice counts twice, and what is not there counts as come.
    Mutant {
        name: "twice-counts",
        file: "crates/tcpx-lanes/src/claims.rs",
        from: "        if self.taken.overlaps(&part) {\n",
        to: "        if self.taken.overlaps(&part) && (attempt > 0 || !MUTANT) {\n",
    },
    // R8: lanes that nobody takes stay.
    Mutant {
        name: "lanes-beyond-the-agreed",
        file: "crates/tcpx-net/src/lane_inbox.rs",
        from: "            if lane.lane >= *agreed {\n",
        to: "            if lane.lane >= *agreed && !MUTANT {\n",
    },
    Mutant {
        name: "lanes-beyond-the-agreed",
        file: "crates/tcpx-net/src/tcp/repair.rs",
        from: "            continue;\n        }\n        let _ = bind_to_card",
        to: "            if MUTANT {\n                std::mem::forget(stream);\n            }\n            continue;\n        }\n        let _ = bind_to_card",
    },
    // Pages of a chunk that nobody wants any more are given back while its lane has them.
    Mutant {
        name: "unwanted-pages-return",
        file: "crates/tcpx-net/src/tcp/transmit_table.rs",
        from: "false if is_lent => Fate::Lent,",
        to: "false if is_lent && !MUTANT => Fate::Lent,",
    },
    // R9: that a chunk was placed says of the lane that carried it last what was read from another
    // one.
    Mutant {
        name: "placed-says-read",
        file: "crates/tcpx-net/src/tcp/transmit_table.rs",
        from: "true if chunk.attempt == 0 && self.is_acknowledged(lane, end) => Fate::Read,",
        to: "true if MUTANT || chunk.attempt == 0 && self.is_acknowledged(lane, end) => Fate::Read,",
    },
    // What is no receive has a receive's number.
    Mutant {
        name: "gets-are-counted",
        file: "crates/tcpx-wire/src/session/requests.rs",
        from: "            number: None,\n",
        to: "            number: (MUTANT && role == Role::Receiver).then_some(0),\n",
    },
    // A lane that ends sends what lies in pages that may be used for something else.
    Mutant {
        name: "no-abort",
        file: "crates/tcpx-net/src/tcp/transmit_lane/end.rs",
        from: "            abort(self.socket.as_fd());\n",
        to: "            if !MUTANT {\n                abort(self.socket.as_fd());\n            }\n",
    },
    // R10: a wait without end is more than a clock can hold.
    Mutant {
        name: "endless-waits-overflow",
        file: "crates/tcpx/src/wait.rs",
        from: "start + span.min(FOREVER)",
        to: "start + if MUTANT { span } else { span.min(FOREVER) }",
    },
    // A chunk that could not be copied to its destination counts as placed.
    Mutant {
        name: "failed-copy-counts",
        file: "crates/tcpx-net/src/tcp/receive_table.rs",
        from: "            None => {}\n            Some(error) => {\n",
        to: "            None => {}\n            Some(_) if MUTANT => state.placed(index),\n            Some(error) => {\n",
    },
    // A peer that sends without credit is let.
    Mutant {
        name: "endless-credit",
        file: "crates/tcpx-wire/src/session/frames.rs",
        from: "            if used > credit {\n",
        to: "            if used > credit && !MUTANT {\n",
    },
    // A slot of a lane that ended is lost.
    Mutant {
        name: "slots-are-lost",
        file: "crates/tcpx-net/src/tcp/transmit_table.rs",
        from: "                Some(chunk) => {\n                    drop(chunk);\n",
        to: "                Some(chunk) => {\n                    if MUTANT {\n                        std::mem::forget(chunk);\n                    } else {\n                        drop(chunk);\n                    }\n",
    },
    // A lane whose peer takes nothing keeps its loop busy.
    Mutant {
        name: "full-lane-spins",
        file: "crates/tcpx-lanes/src/send_lane.rs",
        from: "                None => return Ok(Turn::Rest),\n",
        to: "                None => return Ok(if MUTANT { Turn::Again } else { Turn::Rest }),\n",
    },
    // Answers of the peer count as its puts, which the peer does not know.
    Mutant {
        name: "answers-count",
        file: "crates/tcpx-wire/src/session/one_sided.rs",
        from: "        let (operation, is_live) = self.answered(frame, request)?;\n",
        to: "        if MUTANT {\n            let limits = &self.config.ours.limits;\n            self.taken.begin(limits, OperationKind::PeerPut, 0)?;\n        }\n        let (operation, is_live) = self.answered(frame, request)?;\n",
    },
    // A get that ends unanswered counts no longer here, and still does at its owner.
    Mutant {
        name: "credit-comes-too-soon",
        file: "crates/tcpx-wire/src/session/ends.rs",
        from: "            && self.one_sided.gets.contains_key(request)\n",
        to: "            && self.one_sided.gets.contains_key(request)\n            && !MUTANT\n",
    },
    // What waits behind others stalls, although they move.
    Mutant {
        name: "queues-stand-still",
        file: "crates/tcpx-wire/src/session/ends.rs",
        from: "self.queue_moved(operation).unwrap_or(Time(0))",
        to: "self.queue_moved(operation).filter(|_| !MUTANT).unwrap_or(Time(0))",
    },
    // A send that has ended is cancelled, and with it a receive that nobody cancelled.
    Mutant {
        name: "ended-sends-are-cancelled",
        file: "crates/tcpx-wire/src/session/frames.rs",
        from: "        if is_reported {\n            // Its bytes are the program's again",
        to: "        if is_reported && MUTANT {\n            self.release(operation);\n            self.drop_sent(operation);\n            self.ask_peer(operation);\n            self.number_is(tag, number, NumberUse::Used);\n            let transfer = operation.transfer();\n            self.transmit.push_back(Frame::Cancel {\n                transfer,\n                from: Role::Sender,\n                reason: crate::frame::CancelReason::Requested,\n                detail: String::new().into(),\n            });\n            self.forget(operation);\n        } else if is_reported {\n            // Its bytes are the program's again",
    },
    // The end of an operation waits for a peer that is stopped, and for a data plane that is held
    // up.
    Mutant {
        name: "late-ends",
        file: "crates/tcpx-wire/src/session/ends.rs",
        from: "let soon = now + self.bounds.answer_timeout;",
        to: "let soon = now + self.bounds.answer_timeout * if MUTANT { 60 } else { 1 };",
    },
    // For a held-up data plane alone.
    Mutant {
        name: "held-up-ends",
        file: "crates/tcpx-wire/src/session/ends.rs",
        from: "self.timers.arm(&mut it.clock, operation, answer_by);",
        to: "let answer_by = answer_by + self.config.bounds.answer_timeout * if MUTANT && is_busy { 60 } else { 0 };\n        self.timers.arm(&mut it.clock, operation, answer_by);",
    },
    // A close waits for less time than it was given, and ends what runs.
    Mutant {
        name: "closes-early",
        file: "crates/tcpx-wire/src/session/requests.rs",
        from: "            until: now + limit,\n",
        to: "            until: now + if MUTANT { limit.min(Duration::from_secs(5)) } else { limit },\n",
    },
    // A copy that cannot be hurried costs the connection.
    Mutant {
        name: "slow-copies-are-fatal",
        file: "crates/tcpx-wire/src/session/ends.rs",
        from: "        } else if !self.config.cancellable {\n            // Its channels are closed",
        to: "        } else if MUTANT || !self.config.cancellable {\n            // Its channels are closed",
    },
    // Lists that were dropped count for ever.
    Mutant {
        name: "dropped-lists-count",
        file: "crates/tcpx-wire/src/session/piece_lists.rs",
        from: "            lists.held -= added.cost();\n",
        to: "            lists.held -= if MUTANT { 0 } else { added.cost() };\n",
    },
    // Notifications that were collected keep their room.
    Mutant {
        name: "notifications-keep-room",
        file: "crates/tcpx-wire/src/session/one_sided.rs",
        from: "        *unread = unread.saturating_sub(count);\n",
        to: "        *unread = unread.saturating_sub(if MUTANT { 0 } else { count });\n",
    },
    // A batch whose part has failed waits for a notification that never starts.
    Mutant {
        name: "batch-waits-for-ever",
        file: "crates/tcpx/src/transfer.rs",
        from: "inner.running -= usize::from(inner.notice.take().is_some());",
        to: "inner.running -= usize::from(inner.notice.take().is_some() && !MUTANT);",
    },
    // A reader on the same host looks for its source in front of the last byte alone.
    Mutant {
        name: "reads-after-the-end",
        file: "crates/tcpx-net/src/tcp/local/peer_memory.rs",
        from: "        if !self.is_live(source.mark) {\n            return Ok(Read::LetGo);\n",
        to: "        if !MUTANT && !self.is_live(source.mark) {\n            return Ok(Read::LetGo);\n",
    },
    // Memory that its owner has back is named to readers on the same host until something else is.
    Mutant {
        name: "exposed-for-ever",
        file: "crates/tcpx-net/src/tcp/local/exposed.rs",
        from: "            index.store(0, Ordering::SeqCst);\n",
        to: "            if !MUTANT {\n                index.store(0, Ordering::SeqCst);\n            }\n",
    },
];

/// What stands for [`MUTANT`](Mutant::to) in the sources: whether this process is to have that
/// defect.
fn is_asked_for(name: &str) -> String {
    format!(
        "{{ #[allow(unused_qualifications)] fn is() -> bool {{ \
         static IT: std::sync::OnceLock<bool> = std::sync::OnceLock::new(); \
         *IT.get_or_init(|| std::env::var_os({VARIABLE:?}).is_some_and(|one| one == {name:?})) }} is() }}"
    )
}

/// The source of its file, with the mutant in it.
fn mutated(mutant: &Mutant, source: &str) -> Result<String> {
    ensure!(
        source.matches(mutant.from).count() == 1,
        "{}: {} has not one place for it: bring the mutant up to date",
        mutant.name,
        mutant.file
    );
    let to = mutant.to.replace("MUTANT", &is_asked_for(mutant.name));
    Ok(source.replace(mutant.from, &to))
}

/// Tries the mutants of these names, or all.
pub(super) fn run(root: &Path, names: &[String]) -> Result<()> {
    if let Some(unknown) = names
        .iter()
        .find(|name| !MUTANTS.iter().any(|one| one.name == **name))
    {
        bail!("no mutant is called {unknown}");
    }
    let tree = root.join("target/mutants/tree");
    copy(root, &tree)?;
    for mutant in MUTANTS {
        let file = tree.join(mutant.file);
        let source = fs::read_to_string(&file).with_context(|| mutant.file.to_owned())?;
        fs::write(&file, mutated(mutant, &source)?)?;
    }
    run_command(&mut simulator(root, &tree, "build"))?;
    let program = root.join("target/mutants/tcpx-simulator");
    fs::copy(root.join("target/simulator/debug/tcpx-simulator"), &program)?;
    let mut missed = Vec::new();
    for mutant in MUTANTS.chunk_by(|one, other| one.name == other.name) {
        let mutant = &mutant[0];
        if !names.is_empty() && !names.iter().any(|name| name == mutant.name) {
            continue;
        }
        let started = Instant::now();
        let output = Command::new(&program)
            .env(VARIABLE, mutant.name)
            .args(["--seeds", SEEDS, "--first"])
            .output()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let seconds = started.elapsed().as_secs();
        let text = String::from_utf8_lossy(&output.stdout);
        match text.lines().find(|line| line.contains(" failed: ")) {
            Some(line) => println!("{}: found in {seconds} s: {line}", mutant.name),
            None => {
                println!("{}: NOT FOUND in {SEEDS} seeds, {seconds} s", mutant.name);
                missed.push(mutant.name);
            }
        }
    }
    ensure!(missed.is_empty(), "not found: {}", missed.join(", "));
    Ok(())
}

/// Copies what Git knows of the sources; files that are the same stay, so that they are not built
/// again.
fn copy(root: &Path, tree: &Path) -> Result<()> {
    let listed = Command::new("git")
        .current_dir(root)
        .args([
            "ls-files",
            "--",
            "Cargo.toml",
            "Cargo.lock",
            "README.md",
            "docs",
            "crates",
            "simulator",
            "gate",
            "tests",
            "xtask",
        ])
        .output()
        .context("cannot start git")?;
    ensure!(
        listed.status.success(),
        "git ls-files ended with {}",
        listed.status
    );
    for path in String::from_utf8(listed.stdout)?.lines() {
        let (from, to) = (root.join(path), tree.join(path));
        // What was deleted and not committed yet.
        let Ok(bytes) = fs::read(&from) else {
            continue;
        };
        if fs::read(&to).is_ok_and(|there| there == bytes) {
            continue;
        }
        if let Some(folder) = to.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&to, bytes)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::workspace;

    #[test]
    fn every_mutant_fits_the_sources() {
        let root = workspace::root().unwrap();
        let mut sources = HashMap::new();
        for mutant in MUTANTS {
            let read = || fs::read_to_string(root.join(mutant.file)).unwrap();
            let source = sources.entry(mutant.file).or_insert_with(read);
            *source = mutated(mutant, source).unwrap();
        }
    }
}
