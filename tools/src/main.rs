//! `prefix-router`: the command-line tool.

fn main() {}
