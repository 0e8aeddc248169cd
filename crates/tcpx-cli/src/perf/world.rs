//! Which of several processes this one is: from a launcher's environment, or from a list of hosts.

use std::net::UdpSocket;
use std::path::Path;

use crate::addresses;
use crate::args::perf::MatrixArgs;
use crate::error::Error;

/// Most processes that are measured together.
const MOST: u16 = 256;

/// Where rank, size, and rank and size among those on the same host stand.
const LAUNCHERS: [[&str; 4]; 5] = [
    // torchrun, and whoever sets them by hand.
    ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"],
    // Open MPI's mpirun.
    [
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ],
    // mpiexec of MPICH and Intel MPI.
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
    // srun.
    [
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
    ],
    // An indexed job of Kubernetes, whose size nothing but its author says.
    ["JOB_COMPLETION_INDEX", "WORLD_SIZE", "", ""],
];

/// A process among others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct World {
    pub(super) rank: u16,
    pub(super) size: u16,
    /// Among the processes of this host, and how many they are.
    pub(super) local_rank: u16,
    pub(super) local_size: u16,
    /// Where rank 0 is, with `:PORT` or without.
    pub(super) leader: Option<String>,
}

impl World {
    /// `None` where this process is alone.
    pub(super) fn find(args: &MatrixArgs) -> Result<Option<Self>, Error> {
        let variable = |name: &str| std::env::var(name).ok().filter(|text| !text.is_empty());
        match &args.hosts {
            Some(path) => listed(path, &variable).map(Some),
            None => launched(&variable),
        }
    }
}

type Variables<'a> = &'a dyn Fn(&str) -> Option<String>;

/// The number that a variable begins with: Slurm writes `4(x2)`.
fn number(variable: Variables<'_>, name: &str) -> Option<u16> {
    let text = variable(name)?;
    let digits = text.split(|c: char| !c.is_ascii_digit()).next()?;
    digits.parse().ok()
}

fn launched(variable: Variables<'_>) -> Result<Option<World>, Error> {
    let found = LAUNCHERS.iter().find_map(|[rank, size, local, locals]| {
        let size = number(variable, size)?;
        Some(World {
            rank: number(variable, rank)?,
            size,
            local_rank: number(variable, local).unwrap_or(0),
            local_size: number(variable, locals).unwrap_or(1),
            leader: variable("MASTER_ADDR").or_else(|| {
                let nodes = variable("SLURM_STEP_NODELIST")?;
                first_of(&nodes)
            }),
        })
    });
    let Some(world) = found.filter(|world| world.size > 1) else {
        return Ok(None);
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
    if world.rank > 0 && world.leader.is_none() {
        return Err(Error::usage(
            format!("rank {} does not know where rank 0 is", world.rank),
            "set MASTER_ADDR for all ranks to the address of rank 0's host",
        ));
    }
    Ok(Some(world))
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
fn listed(path: &Path, variable: Variables<'_>) -> Result<World, Error> {
    let text = std::fs::read_to_string(path).map_err(Error::io("read", path))?;
    let wrong = |what: String, hint: &str| {
        Error::usage(format!("{}: {what}", path.display()), hint.to_owned())
    };
    let hosts = parse(&text).map_err(|what| {
        wrong(
            what,
            "write one address a line, with `:PORT` if it is not the default, and each once",
        )
    })?;
    let size = u16::try_from(hosts.len()).unwrap_or(MOST);
    let rank = match number(variable, "RANK") {
        Some(rank) if rank < size => rank,
        Some(rank) => {
            let hint = "set RANK to the place of this host in the list, counted from 0";
            return Err(wrong(format!("it has no line for rank {rank}"), hint));
        }
        None => {
            let own: Vec<u16> = (0u16..)
                .zip(&hosts)
                .filter(|(_, host)| is_own(host))
                .map(|(rank, _)| rank)
                .collect();
            let &[rank] = own.as_slice() else {
                let what = format!("{} of its lines are addresses of this host", own.len());
                return Err(wrong(
                    what,
                    "list each host once, by an address that it has, or set RANK",
                ));
            };
            rank
        }
    };
    Ok(World {
        rank,
        size,
        local_rank: 0,
        local_size: 1,
        leader: hosts.into_iter().next(),
    })
}

/// Whether this host can listen there.
fn is_own(host: &str) -> bool {
    let found = addresses::resolve(host, 0).unwrap_or_default();
    found
        .iter()
        .any(|address| UdpSocket::bind((address.ip(), 0)).is_ok())
}

/// The addresses; empty lines and what follows a `#` do not count.
fn parse(text: &str) -> Result<Vec<String>, String> {
    let mut hosts: Vec<String> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let host = line.split('#').next().unwrap_or_default().trim();
        let place = number + 1;
        if host.contains(char::is_whitespace) {
            return Err(format!("line {place} holds more than an address"));
        }
        if hosts.iter().any(|known| known == host) {
            return Err(format!("line {place} names {host} again"));
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
        many if many > usize::from(MOST) => Err(format!("more than {MOST} hosts")),
        _ => Ok(hosts),
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
            leader: Some("a".into()),
        };
        for set in [torchrun, mpirun, srun] {
            let found = launched(&from(&set)).expect("a right environment");
            assert_eq!(found.as_ref(), Some(&expected), "{set:?}");
        }
        let indexed = [
            ("JOB_COMPLETION_INDEX", "0"),
            ("WORLD_SIZE", "2"),
            ("MASTER_ADDR", "job-0.job"),
        ];
        let found = launched(&from(&indexed)).expect("a right environment");
        assert_eq!(found.map(|world| (world.rank, world.size)), Some((0, 2)));
    }

    #[test]
    fn a_process_that_is_alone_is_in_no_world() {
        assert_eq!(launched(&from(&[])).expect("nothing"), None);
        let one = [("RANK", "0"), ("WORLD_SIZE", "1")];
        assert_eq!(launched(&from(&one)).expect("one"), None);
    }

    #[test]
    fn an_environment_that_cannot_be_is_refused() {
        let nowhere = [("RANK", "1"), ("WORLD_SIZE", "2")];
        let error = launched(&from(&nowhere)).expect_err("no address");
        assert!(error.hint().contains("MASTER_ADDR"));
        let beyond = [("RANK", "2"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "a")];
        launched(&from(&beyond)).expect_err("no such rank");
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
            ("", "no host"),
            ("# none\n", "no host"),
            ("a\n", "a alone"),
            ("a b\n", "line 1"),
            ("a\nb\na\n", "line 3 names a again"),
        ] {
            let error = parse(text).expect_err("no list");
            assert!(error.contains(complaint), "{error}");
        }
        let many: String = (0..=MOST).map(|host| format!("h{host}\n")).collect();
        assert!(parse(&many).expect_err("too many").contains("256"));
    }
}
