//! The node driver of drava: kubelet's DRA plugin for the GPUs of one node.
//!
//! | Question | Module |
//! |---|---|
//! | What does the node have? | [`inventory`] |
//! | What is published of it? | [`publish`] |
//! | How does kubelet reach the driver? | [`plugin`] |
//! | How is a claim made usable, and undone? | [`prepare`], [`claims`] |
//! | What if something was left over or lost? | [`reconcile`] |
//! | Do containers get what was prepared? | [`injection`] |
//! | Who uses how much of a card, and who escapes its limits? | [`agent`] |
//! | Where does everything lie on the node? | [`layout`], [`directories`], [`artifacts`], [`files`], [`lock`] |
//! | Who is told what? | [`report`], [`conditions`], [`health`] |
//!
//! Decisions ([`publish::desired`], [`publish::diff`], [`prepare::plan`], [`prepare::overcommit`], [`reconcile::decide`]) are
//! pure functions; around them is as little as possible that reads, writes and waits. [`driver::run`] puts it together.

#![forbid(unsafe_code)]

pub mod agent;
pub mod artifacts;
pub mod capacity;
pub mod claim;
pub mod claims;
pub mod conditions;
pub mod directories;
pub mod driver;
pub mod files;
pub mod health;
pub mod injection;
pub mod inventory;
pub mod layout;
pub mod lock;
pub mod options;
pub mod plugin;
pub mod prepare;
pub mod proto;
pub mod publish;
pub mod reconcile;
pub mod report;
