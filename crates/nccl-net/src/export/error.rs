//! What an exported plugin answers when a call fails.

use std::borrow::Cow;

use crate::result::ResultCode;

/// A failure of an exported call: the code for the host, the text for its log.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct NetError {
    code: ResultCode,
    message: Cow<'static, str>,
}

impl NetError {
    /// An error with a code of the caller's choice; success is turned into an internal error.
    pub fn new(code: ResultCode, message: impl Into<Cow<'static, str>>) -> Self {
        let code = match code {
            ResultCode::Success => ResultCode::InternalError,
            code => code,
        };
        Self {
            code,
            message: message.into(),
        }
    }

    /// The plugin's own state is bad.
    pub fn internal(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ResultCode::InternalError, message)
    }

    /// The host passed something unusable.
    pub fn invalid_argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ResultCode::InvalidArgument, message)
    }

    /// The host called out of order.
    pub fn invalid_usage(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ResultCode::InvalidUsage, message)
    }

    /// The code for the host.
    pub fn code(&self) -> ResultCode {
        self.code
    }
}
