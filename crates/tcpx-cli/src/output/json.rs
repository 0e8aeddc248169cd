//! JSON for programs: each object names its schema and version, and a failed write is an error.

use std::io::{self, Write};

use serde::Serialize;
use serde_json::{Value, json};

use crate::doctor::explains::check_for;
use crate::error::Error;

/// Prints one object, on one line, wherever lines for people go.
///
/// # Errors
/// Standard output takes no more.
pub(crate) fn print<T: Serialize>(value: &T) -> Result<(), Error> {
    let mut text = serde_json::to_vec(value).map_err(|error| Error::Output(error.into()))?;
    text.push(b'\n');
    let mut out = io::stdout().lock();
    out.write_all(&text)
        .and_then(|()| out.flush())
        .map_err(Error::Output)
}

/// The object for a command that did what it should: `value`'s fields with the schema beside them.
pub(crate) fn success(schema: &str, value: Value) -> Value {
    let mut object = json!({ "schema": schema, "version": 1, "ok": true });
    if let (Value::Object(into), Value::Object(fields)) = (&mut object, value) {
        into.extend(fields);
    }
    object
}

/// The object for a command that failed.
pub(crate) fn failure(schema: &str, error: &Error) -> Value {
    json!({
        "schema": schema, "version": 1, "ok": false,
        "error": {
            "what": error.what(),
            "where": error.place(),
            "hint": error.hint(),
            "check": check_for(error).map(|check| check.id),
        },
    })
}
