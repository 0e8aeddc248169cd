//! Which of several processes this one is: from a launcher's environment, or from a list of hosts.

use std::net::{SocketAddr, UdpSocket};
use std::path::Path;

use tcpx_status::LAUNCHERS;

use crate::addresses;
use crate::error::Error;
use crate::perf::MatrixArgs;

/// Most processes that are measured together.
const MOST: usize = 256;

/// A process among others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct World {
    pub(super) rank: usize,
    pub(super) size: usize,
    /// Among the processes of this host, and how many they are.
    pub(super) local_rank: u32,
    pub(super) local_size: u32,
    /// Where rank 0 is, with `:PORT` or without; rank 0 itself need not know.
    pub(super) leader: String,
    /// Where this process listens, and behind it.
    pub(super) port: u16,
    /// Every rank's address, where a list says it.
    pub(super) hosts: Vec<(String, SocketAddr)>,
}

impl World {
    pub(super) fn find(args: &MatrixArgs) -> Result<Self, Error> {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        let port = args.link.port;
        match &args.hosts {
            Some(path) => listed(path, port, &variable),
            None => launched(port, &variable),
        }
    }

    /// What a person knows a rank by.
    pub(super) fn title(&self, rank: usize) -> String {
        match self.hosts.get(rank) {
            Some((line, _)) => format!("{rank}: {line}"),
            None => format!("rank {rank}"),
        }
    }
}

type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The number that a variable begins with: Slurm writes `4(x2)`.
fn number(variable: Variables<'_>, name: &str) -> Option<u32> {
    let text = variable(name)?;
    let digits = text.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

fn launched(port: u16, variable: Variables<'_>) -> Result<World, Error> {
    let found = LAUNCHERS.iter().find_map(|[rank, size, local, locals]| {
        let size = number(variable, size)? as usize;
        let slurm = || first_of(&variable("SLURM_STEP_NODELIST")?);
        Some(World {
            rank: number(variable, rank)? as usize,
            size,
            local_rank: number(variable, local).unwrap_or(0),
            local_size: number(variable, locals).unwrap_or(1),
            leader: variable("MASTER_ADDR").or_else(slurm).unwrap_or_default(),
            port,
            hosts: Vec::new(),
        })
    });
    let Some(world) = found.filter(|world| world.size > 1) else {
        return Err(Error::usage(
            "there is nobody to measure with",
            "start it on several hosts by torchrun, mpirun, srun or an indexed job of Kubernetes, give --hosts FILE on every host of that list, or say `perf server` and `perf client`; `tcpx bench net` measures this host alone",
        ));
    };
    if world.rank >= world.size || world.size > MOST {
        return Err(Error::usage(
            format!(
                "the launcher says rank {} of {}, and at most {MOST} are measured together",
                world.rank, world.size
            ),
            "start fewer processes, each with a rank below their number",
        ));
    }
    if world.rank > 0 && world.leader.is_empty() {
        return Err(Error::usage(
            format!("rank {} does not know where rank 0 is", world.rank),
            "set MASTER_ADDR for all ranks to the address of rank 0's host",
        ));
    }
    Ok(world)
}

/// The first host of Slurm's `gpu[03-05,9],cpu1`.
fn first_of(nodes: &str) -> Option<String> {
    let end = nodes.find(['[', ',']).unwrap_or(nodes.len());
    let (name, rest) = nodes.split_at(end);
    let number = rest.strip_prefix('[').map_or("", |rest| {
        let end = rest.find(|c: char| !c.is_ascii_digit());
        &rest[..end.unwrap_or(rest.len())]
    });
    let first = format!("{name}{number}");
    (!first.is_empty()).then_some(first)
}

/// The place of this host in a list: its `RANK`, else the line that is an address of this host.
fn listed(path: &Path, port: u16, variable: Variables<'_>) -> Result<World, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let wrong = |what: String, hint: &str| {
        Error::usage(format!("{}: {what}", path.display()), hint.to_owned())
    };
    let lines = parse(&text).map_err(|what| {
        wrong(
            what,
            "write one address a line, with `:PORT` if it is not the default, and each once",
        )
    })?;
    let resolve = |line: String| Ok((addresses::resolve(&line, port)?[0], line));
    let hosts: Result<Vec<_>, Error> = lines.into_iter().map(resolve).collect();
    let hosts: Vec<_> = hosts?.into_iter().map(|(at, line)| (line, at)).collect();
    // Whether this host can listen there.
    let is_own = |at: &SocketAddr| UdpSocket::bind((at.ip(), 0)).is_ok();
    let own: Vec<usize> = match number(variable, "RANK") {
        Some(rank) => (0..hosts.len()).filter(|at| *at == rank as usize).collect(),
        None => (0..hosts.len())
            .filter(|at| is_own(&hosts[*at].1))
            .collect(),
    };
    let &[rank] = own.as_slice() else {
        return Err(wrong(
            format!("{} of its lines are addresses of this host", own.len()),
            "list each host once, by an address that it has, or set RANK to its place, counted from 0",
        ));
    };
    Ok(World {
        rank,
        size: hosts.len(),
        local_rank: 0,
        local_size: 1,
        leader: hosts[0].1.to_string(),
        port: hosts[rank].1.port(),
        hosts,
    })
}

/// The addresses; empty lines and what follows a `#` do not count.
fn parse(text: &str) -> Result<Vec<String>, String> {
    let mut hosts: Vec<String> = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let host = line.split('#').next().unwrap_or_default().trim();
        if host.contains(char::is_whitespace) {
            return Err(format!("line {number} holds more than an address"));
        }
        if hosts.iter().any(|known| known == host) {
            return Err(format!("line {number} names {host} again"));
        }
        if !host.is_empty() {
            hosts.push(host.to_owned());
        }
    }
    match hosts.len() {
        0 => Err("it names no host".into()),
        1 => Err(format!(
            "it lists {} alone, which has nobody to talk to",
            hosts[0]
        )),
        2..=MOST => Ok(hosts),
        _ => Err(format!("more than {MOST} hosts")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn from<'a>(set: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<String> + 'a {
        |name| {
            let found = set.iter().find(|(known, _)| *known == name);
            found.map(|(_, value)| (*value).to_owned())
        }
    }

    #[test]
    fn every_launcher_says_which_process_this_is() {
        let torchrun = [
            ("RANK", "3"),
            ("WORLD_SIZE", "4"),
            ("LOCAL_RANK", "1"),
            ("LOCAL_WORLD_SIZE", "2"),
            ("MASTER_ADDR", "a"),
        ];
        let mpirun = [
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
            ("MASTER_ADDR", "a"),
        ];
        let srun = [
            ("SLURM_PROCID", "3"),
            ("SLURM_STEP_NUM_TASKS", "4"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
            ("SLURM_STEP_NODELIST", "a"),
        ];
        let expected = World {
            rank: 3,
            size: 4,
            local_rank: 1,
            local_size: 2,
            leader: "a".into(),
            port: 7,
            hosts: Vec::new(),
        };
        for set in [torchrun, mpirun, srun] {
            let found = launched(7, &from(&set)).expect("a right environment");
            assert_eq!(found, expected, "{set:?}");
        }
        let indexed = [
            ("JOB_COMPLETION_INDEX", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "job-0.job"),
        ];
        let found = launched(7, &from(&indexed)).expect("a right environment");
        assert_eq!((found.rank, found.size), (0, 2));
    }

    #[test]
    fn an_environment_that_cannot_be_is_refused() {
        let beyond = [("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")];
        for (set, hint) in [
            (&[][..], "--hosts FILE"),
            (&[("RANK", "0"), ("WORLD_SIZE", "1")], "--hosts FILE"),
            (&[("RANK", "1"), ("WORLD_SIZE", "2")], "MASTER_ADDR"),
            (&beyond, "fewer processes"),
        ] {
            let error = launched(7, &from(set)).expect_err("nothing to measure");
            assert!(error.hint().contains(hint), "{set:?}: {}", error.hint());
        }
    }

    #[test]
    fn the_first_host_of_slurms_list_is_found() {
        for (list, first) in [
            ("gpu[03-05,9],cpu1", "gpu03"),
            ("gpu7", "gpu7"),
            ("a,b[1-2]", "a"),
            ("n[12]", "n12"),
        ] {
            assert_eq!(first_of(list).as_deref(), Some(first), "{list}");
        }
        assert_eq!(first_of(""), None);
    }

    #[test]
    fn addresses_are_read_line_by_line() {
        assert_eq!(
            parse("10.0.0.1\n\n # all\n host-2:4000 # two\n").expect("a list"),
            ["10.0.0.1", "host-2:4000"]
        );
        for (text, complaint) in [
            ("# none\n", "no host"),
            ("a\n", "a alone"),
            ("a b\n", "line 1"),
            ("a\nb\na\n", "line 3 names a again"),
        ] {
            let error = parse(text).expect_err("no list");
            assert!(error.contains(complaint), "{error}");
        }
    }
}
