//! JSON for programs: each object names its schema and version, and a failed write is an error.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::say::is_json;
use crate::advice::check_for;
use crate::error::Error;

/// What a command tells a program.
#[derive(Debug)]
pub(crate) enum Told {
    /// The fields of its object.
    Fields(Value),
    /// What was found is bad news: the fields, and the error that it comes to.
    Bad(Value, Error),
    /// It has printed what there is, or nothing is to be said.
    Nothing,
}

/// Prints the object of a command, if one is asked for; returns how it ended.
pub(crate) fn conclude(schema: &str, result: Result<Told, Error>) -> Result<(), Error> {
    let (fields, end) = match result {
        Ok(Told::Nothing) => return Ok(()),
        Ok(Told::Fields(fields)) => (fields, Ok(())),
        Ok(Told::Bad(fields, error)) => (fields, Err(error)),
        Err(error) => (Value::Null, Err(error)),
    };
    if is_json() {
        let mut object = json!({ "schema": schema, "version": 1, "ok": end.is_ok() });
        if let Err(error) = &end {
            object["error"] = json!({
                "what": error.what(),
                "where": error.place(),
                "hint": error.hint(),
                "check": check_for(error).map(|check| check.id),
            });
        }
        if let (Value::Object(into), Value::Object(fields)) = (&mut object, fields) {
            into.extend(fields);
        }
        print_text(&object.to_string())?;
    }
    end
}

/// Prints a text wherever lines for people go.
///
/// # Errors
/// Standard output takes no more.
pub(crate) fn print_text(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(Error::Output)
}
