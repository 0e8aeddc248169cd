//! The examples run to their end.

#[path = "../../examples/lists.rs"]
mod lists;
#[path = "../../examples/messages.rs"]
mod messages;
#[path = "../../examples/windows.rs"]
mod windows;

#[test]
fn a_message_arrives() {
    messages::main().expect("the example works");
}

#[test]
fn pages_are_put_and_got() {
    windows::main().expect("the example works");
}

#[test]
fn a_list_is_told_and_posted() {
    lists::main().expect("the example works");
}
