//! JSON for programs: each object names its schema and version, and a failed write is an error.

use std::io::{self, Write};

use serde::Serialize;
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
    let (object, end) = match result {
        Ok(Told::Nothing) => return Ok(()),
        Ok(Told::Fields(fields)) => (success(schema, fields), Ok(())),
        Ok(Told::Bad(fields, error)) => {
            let mut object = failure(schema, &error);
            add(&mut object, fields);
            (object, Err(error))
        }
        Err(error) => (failure(schema, &error), Err(error)),
    };
    if is_json() {
        print(&object)?;
    }
    end
}

/// Prints one object, on one line, wherever lines for people go.
///
/// # Errors
/// Standard output takes no more.
pub(crate) fn print<T: Serialize>(value: &T) -> Result<(), Error> {
    let text = serde_json::to_string(value).map_err(|error| Error::Output(error.into()))?;
    print_text(&text)
}

/// The same for a file of another form, such as a benchmark's.
pub(crate) fn print_text(text: &str) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")
        .and_then(|()| out.flush())
        .map_err(Error::Output)
}

/// The object for a command that did what it should: `fields` with the schema beside them.
pub(crate) fn success(schema: &str, fields: Value) -> Value {
    let mut object = json!({ "schema": schema, "version": 1, "ok": true });
    add(&mut object, fields);
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

fn add(object: &mut Value, fields: Value) {
    if let (Value::Object(into), Value::Object(fields)) = (object, fields) {
        into.extend(fields);
    }
}
