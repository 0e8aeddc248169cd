//! What NCCL takes from a table of costs that a tuner has had, in each version.

use super::PROTOCOLS;

/// Names of the algorithms in a table of costs, in NCCL's order.
pub(super) const ALGORITHMS: [&str; 7] = [
    "Tree",
    "Ring",
    "CollNetDirect",
    "CollNetChain",
    "NVLS",
    "NVLSTree",
    "PAT",
];
/// NCCL's number for a way that cannot be taken. Only NCCL may write it.
pub(super) const IGNORE: f32 = -1.0;
/// Names of the protocols in a row of it.
const NAMES: [&str; PROTOCOLS] = ["LL", "LL128", "Simple"];

/// Microseconds of each way: an algorithm's row holds a number for each protocol.
pub(super) type Costs = [[f32; PROTOCOLS]; ALGORITHMS.len()];

/// A way to do a collective: places in a table of costs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CostPlace {
    pub(super) algorithm: usize,
    pub(super) protocol: usize,
}

impl CostPlace {
    /// The algorithm's name.
    pub(super) fn algorithm(self) -> &'static str {
        ALGORITHMS.get(self.algorithm).copied().unwrap_or("unknown")
    }

    /// The protocol's name.
    pub(super) fn protocol(self) -> &'static str {
        NAMES.get(self.protocol).copied().unwrap_or("unknown")
    }
}

/// How versions of NCCL look for the least cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Selection {
    /// 2.28 and earlier: among numbers that are not negative, of less than an hour.
    UpTo2_28,
    /// 2.29 and 2.30: among numbers that are not negative.
    UpTo2_30,
    /// 2.31 and later: among all numbers of the ways that it offered, whatever the tuner wrote.
    From2_31,
}

impl Selection {
    /// All of them, oldest first.
    pub(super) const ALL: [Self; 3] = [Self::UpTo2_28, Self::UpTo2_30, Self::From2_31];

    /// What is taken of a table that was `offered`, once a tuner has `left` it; the first of
    /// several equal ones.
    pub(super) fn choose(self, offered: &Costs, left: &Costs) -> Option<CostPlace> {
        let (is_candidate, limit): (fn(f32, f32) -> bool, f32) = match self {
            Self::UpTo2_28 => (|_, left| left >= 0.0, 3.6e9),
            Self::UpTo2_30 => (|_, left| left >= 0.0, f32::MAX),
            Self::From2_31 => (|offered, _| offered > 0.0, f32::MAX),
        };
        let (mut least, mut way) = (limit, None);
        for (algorithm, (offered, left)) in offered.iter().zip(left).enumerate() {
            for (protocol, (&offered, &left)) in offered.iter().zip(left).enumerate() {
                if is_candidate(offered, left) && left < least {
                    least = left;
                    way = Some(CostPlace {
                        algorithm,
                        protocol,
                    });
                }
            }
        }
        way
    }
}

/// A table like NCCL's for a collective of `bytes` between two hosts with one GPU each: latency,
/// and bytes at a rate. Trees are quicker for few bytes, rings for many; LL moves every byte twice;
/// what needs switches or NVLink cannot be taken.
pub(super) fn usual_costs(bytes: usize) -> Costs {
    let ways: [(usize, [(f32, f32); 3]); 2] = [
        (0, [(28.0, 2.2e3), (56.0, 8.0e3), (60.0, 9.0e3)]),
        (1, [(30.0, 2.8e3), (60.0, 10.6e3), (64.0, 12.0e3)]),
    ];
    let mut costs = [[IGNORE; PROTOCOLS]; ALGORITHMS.len()];
    for (algorithm, protocols) in ways {
        costs[algorithm] = protocols.map(|(latency, rate)| latency + bytes as f32 / rate);
    }
    costs
}

#[cfg(test)]
mod tests {
    use super::*;

    const LL: usize = 0;
    const SIMPLE: usize = 2;

    #[test]
    fn a_mark_written_by_a_tuner_is_a_time_from_2_31_on() {
        let offered = usual_costs(64 << 20);
        let ring = |protocol| {
            Some(CostPlace {
                algorithm: 1,
                protocol,
            })
        };
        for selection in Selection::ALL {
            assert_eq!(selection.choose(&offered, &offered), ring(SIMPLE));
        }
        let mut left = offered;
        left[1][LL] = IGNORE;
        let chosen = Selection::ALL.map(|selection| selection.choose(&offered, &left));
        assert_eq!(chosen, [ring(SIMPLE), ring(SIMPLE), ring(LL)]);
        // What NCCL did not offer is none of its candidates then, and was one before.
        left = offered;
        left[6][SIMPLE] = 1.0;
        let chosen = Selection::ALL.map(|selection| selection.choose(&offered, &left));
        assert_eq!(
            chosen.map(|way| way.unwrap().algorithm()),
            ["PAT", "PAT", "Ring"]
        );
    }

    #[test]
    fn few_bytes_take_ll_and_many_take_simple() {
        let protocol = |bytes| {
            let costs = usual_costs(bytes);
            Selection::From2_31
                .choose(&costs, &costs)
                .unwrap()
                .protocol()
        };
        assert_eq!([8, 4096, 256 << 20].map(protocol), ["LL", "LL", "Simple"]);
    }
}
