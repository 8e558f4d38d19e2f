//! Claims between the first and the last step of prepare and unprepare.
//!
//! Prepare writes the record of a claim first and its CDI spec last; unprepare removes them in the other order. So a claim
//! with a record and without a CDI spec is amid one of both.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Stdio};

use anyhow::{Context as _, Result, ensure};

use crate::{Namespace, TestNode, wait};

/// Program of the node driver.
const DRIVER: &str = "drava-dra-driver";

/// Directory of the claim records and limits pages.
const CLAIMS: &str = "/var/lib/drava/claims";

/// An allocated claim.
pub struct AllocatedClaim {
    /// Its UID.
    pub uid: String,
    /// ID of its first share; `None` for a device without shares.
    pub share: Option<String>,
}

impl Namespace<'_> {
    /// Waits for the allocation of the pod's claim and returns the claim.
    ///
    /// # Errors
    /// When the pod has no allocated claim in time.
    pub fn allocated_claim_of(&self, pod: &str) -> Result<AllocatedClaim> {
        self.devices_of(pod)?;
        let claim = self.claim_of(pod)?;
        let found = self.find("resourceclaim", &claim)?.context("no claim")?;
        let uid = found["metadata"]["uid"].as_str().context("uid")?;
        let share = &found["status"]["allocation"]["devices"]["results"][0]["shareID"];
        Ok(AllocatedClaim {
            uid: uid.to_owned(),
            share: share.as_str().map(str::to_owned),
        })
    }
}

/// An obstacle for the preparation of a claim, until dropped.
pub struct BlockedPreparation<'n> {
    node: &'n TestNode,
    uid: String,
    /// Keeps the obstacle until its standard input is closed.
    holder: Child,
}

impl Drop for BlockedPreparation<'_> {
    fn drop(&mut self) {
        let pages = format!("{CLAIMS}/{}", self.uid);
        if let Err(error) = self.node.run("rm", &["-r", &pages]) {
            eprintln!("cannot remove {pages}: {error:#}");
        }
        drop(self.holder.stdin.take());
        // It ends with its input.
        let _ = self.holder.wait();
    }
}

impl TestNode {
    /// Blocks the preparation of a share that has not begun, after the write of the claim's record: the limits page is a pipe
    /// that is never written, so reading it does not return.
    ///
    /// # Errors
    /// When the claim has no share or the pipe cannot be created.
    pub fn block_preparation(&self, claim: &AllocatedClaim) -> Result<BlockedPreparation<'_>> {
        let uid = claim.uid.clone();
        let share = claim.share.as_ref().context("the claim has no share")?;
        let limits = format!("{CLAIMS}/{uid}/{share}/limits");
        // The node agent opens the page, too; the holder keeps the pipe open when the agent closes it.
        let script = format!(
            "mkdir -p {limits}; mkfifo {limits}/page; exec 3<> {limits}/page; echo blocked; exec cat"
        );
        let mut command = self.command("sh")?;
        command
            .args(["-euc", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut holder = command.spawn().context("start the holder of a pipe")?;
        let output = holder.stdout.take().context("no output")?;
        let blocked = BlockedPreparation {
            node: self,
            uid,
            holder,
        };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line)?;
        ensure!(line == "blocked\n", "cannot create a pipe in {limits}");
        Ok(blocked)
    }

    /// Kills the node driver amid prepare or unprepare of all these claims. `release` undoes what delays the driver there; it
    /// is called while the driver is stopped.
    ///
    /// # Errors
    /// When the claims are not amid these steps, no driver runs, or `release` fails.
    pub fn kill_driver_amid_claims(
        &self,
        uids: &[&str],
        release: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let stopped = wait("each claim has a record and no CDI spec", || {
            Ok(self.are_amid(uids)?.then_some(()))
        })
        .and_then(|()| self.signal(DRIVER, "STOP"));
        // The driver may have continued between the last check and the stop.
        let were_amid = stopped.and_then(|_| self.are_amid(uids));
        let released = release();
        let killed = self.signal(DRIVER, "KILL")?;
        ensure!(were_amid?, "the driver was stopped after the last step");
        ensure!(killed > 0, "no driver process on the node");
        released
    }

    /// Returns whether each claim has a record and no CDI spec.
    fn are_amid(&self, uids: &[&str]) -> Result<bool> {
        let is_amid = |uid: &&str| {
            let spec = format!("/var/run/cdi/gpu.drava.dev-claim-{uid}.json");
            format!("[ -f {CLAIMS}/{uid}.json ] && [ ! -e {spec} ]")
        };
        let all: Vec<String> = uids.iter().map(is_amid).collect();
        let script = format!("if {}; then echo amid; fi", all.join(" && "));
        Ok(self.run("sh", &["-c", &script])?.trim() == "amid")
    }
}
