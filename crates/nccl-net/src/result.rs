//! `ncclResult_t`, and what each value means when a network plugin returns it.

use std::ffi::c_int;
use std::fmt;

/// `ncclResult_t` as it crosses the ABI.
pub type RawResult = c_int;

/// A result code, decoded. Values outside the published range are kept, not rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResultCode {
    /// 0
    Success,
    /// 1: a CUDA call failed inside the plugin.
    UnhandledCudaError,
    /// 2: a system call failed, or the peer is gone.
    SystemError,
    /// 3: a rule of the plugin was broken, or its own state is bad.
    InternalError,
    /// 4
    InvalidArgument,
    /// 5
    InvalidUsage,
    /// 6: the peer reported a failure.
    RemoteError,
    /// 7: not finished, call again.
    InProgress,
    /// Any other number.
    Unknown(c_int),
}

impl ResultCode {
    /// Decodes a raw result.
    pub const fn from_raw(rc: RawResult) -> Self {
        match rc {
            0 => Self::Success,
            1 => Self::UnhandledCudaError,
            2 => Self::SystemError,
            3 => Self::InternalError,
            4 => Self::InvalidArgument,
            5 => Self::InvalidUsage,
            6 => Self::RemoteError,
            7 => Self::InProgress,
            other => Self::Unknown(other),
        }
    }

    /// The number that crosses the ABI.
    pub const fn to_raw(self) -> RawResult {
        match self {
            Self::Success => 0,
            Self::UnhandledCudaError => 1,
            Self::SystemError => 2,
            Self::InternalError => 3,
            Self::InvalidArgument => 4,
            Self::InvalidUsage => 5,
            Self::RemoteError => 6,
            Self::InProgress => 7,
            Self::Unknown(rc) => rc,
        }
    }

    /// One short phrase: what the code says.
    pub const fn meaning(self) -> &'static str {
        match self {
            Self::Success => "success",
            Self::UnhandledCudaError => "a CUDA call failed inside the plugin",
            Self::SystemError => "a system call failed or the peer closed",
            Self::InternalError => "the plugin refused the call or failed inside",
            Self::InvalidArgument => "invalid argument",
            Self::InvalidUsage => "invalid usage",
            Self::RemoteError => "the peer reported an error or went away",
            Self::InProgress => "not finished yet",
            Self::Unknown(_) => "a code outside the published range",
        }
    }
}

impl fmt::Display for ResultCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.to_raw(), self.meaning())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_survive_the_round_trip() {
        for rc in -3..20 {
            assert_eq!(ResultCode::from_raw(rc).to_raw(), rc);
        }
        assert_eq!(ResultCode::from_raw(3), ResultCode::InternalError);
        assert_eq!(ResultCode::from_raw(8), ResultCode::Unknown(8));
    }
}
