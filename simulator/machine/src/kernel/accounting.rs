//! Accounting: statistics of processes that started while accounting was enabled.

use std::collections::VecDeque;

use crate::protocol::{
    AccountingReply, AccountingRequest, AccountingStats, GpuIndex, Nanos, Refusal, Reply,
};

use super::Kernel;

/// Most accounted processes; the oldest ended one is dropped first.
pub const ACCOUNTED_PROCESSES: u32 = 4000;
/// Divisor: part of the busy time in which memory is in use.
const MEMORY_SHARE: u32 = 2;

/// Accounting of one GPU.
#[derive(Debug, Default)]
pub(super) struct Accounting {
    enabled: bool,
    records: VecDeque<Record>,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    pid: u32,
    started: Nanos,
    ended: Option<Nanos>,
    /// BusyPart time of destroyed contexts.
    busy: Nanos,
    max_bytes: u64,
}

impl Accounting {
    /// Records that a process uses the GPU.
    fn start(&mut self, pid: u32, now: Nanos) {
        let running = |record: &Record| record.pid == pid && record.ended.is_none();
        if !self.enabled || self.records.iter().any(running) {
            return;
        }
        if self.records.len() >= ACCOUNTED_PROCESSES as usize
            && let Some(gone) = self.records.iter().position(|one| one.ended.is_some())
        {
            self.records.remove(gone);
        }
        self.records.push_back(Record {
            pid,
            started: now,
            ended: None,
            busy: 0,
            max_bytes: 0,
        });
    }

    fn running(&mut self, pid: u32) -> Option<&mut Record> {
        let mut records = self.records.iter_mut();
        records.find(|record| record.pid == pid && record.ended.is_none())
    }

    /// The newest record of a PID, since PIDs are reused.
    fn newest(&self, pid: u32) -> Option<&Record> {
        self.records.iter().rev().find(|record| record.pid == pid)
    }
}

impl Kernel {
    /// Handles an accounting request. GPUs in MIG mode have no accounting.
    pub(super) fn accounting(
        &mut self,
        index: GpuIndex,
        request: AccountingRequest,
    ) -> Result<Reply, Refusal> {
        let gpu = self.gpu_mut(index)?;
        if gpu.partitions.is_enabled() {
            return Err(Refusal::NotSupported);
        }
        let accounting = &mut gpu.accounting;
        let reply = match request {
            AccountingRequest::State => AccountingReply::State {
                enabled: accounting.enabled,
                pids: accounting.records.iter().map(|record| record.pid).collect(),
            },
            AccountingRequest::SetMode { enabled } => {
                if accounting.enabled != enabled {
                    accounting.enabled = enabled;
                    accounting.records.clear();
                }
                return Ok(Reply::Done);
            }
            AccountingRequest::Clear => {
                accounting.records.retain(|record| record.ended.is_none());
                return Ok(Reply::Done);
            }
            AccountingRequest::Stats { pid } => {
                AccountingReply::Stats(self.accounting_stats(index, pid)?)
            }
        };
        Ok(Reply::Accounting(reply))
    }

    fn accounting_stats(&self, index: GpuIndex, pid: u32) -> Result<AccountingStats, Refusal> {
        let gpu = self.gpu(index)?;
        let record = gpu.accounting.newest(pid).ok_or(Refusal::NotFound)?;
        let running = record.ended.is_none();
        let busy = match running {
            true => record.busy + self.usage(index, pid).1,
            false => record.busy,
        };
        let end = record.ended.unwrap_or(gpu.engine.now());
        let life = end.saturating_sub(record.started).max(1);
        let percent = u32::try_from((busy * 100 / life).min(100)).unwrap_or(100);
        Ok(AccountingStats {
            gpu_percent: percent,
            memory_percent: percent / MEMORY_SHARE,
            max_bytes: record.max_bytes,
            started: record.started,
            nanos: if running { 0 } else { life },
            running,
        })
    }

    /// Records the creation of a context.
    pub(super) fn account_start(&mut self, index: GpuIndex, pid: u32) {
        if let Ok(gpu) = self.gpu_mut(index) {
            let now = gpu.engine.now();
            gpu.accounting.start(pid, now);
        }
        self.account_memory(index);
    }

    /// Records the busy time of a context about to be destroyed.
    pub(super) fn account_end(&mut self, index: GpuIndex, pid: u32, busy: Nanos, is_last: bool) {
        let Ok(gpu) = self.gpu_mut(index) else {
            return;
        };
        let now = gpu.engine.now();
        if let Some(record) = gpu.accounting.running(pid) {
            record.busy += busy;
            record.ended = is_last.then_some(now);
        }
    }

    /// Updates peak memory after an allocation.
    pub(super) fn account_memory(&mut self, index: GpuIndex) {
        if !self.gpu(index).is_ok_and(|gpu| gpu.accounting.enabled) {
            return;
        }
        for process in self.processes(index) {
            if let Ok(gpu) = self.gpu_mut(index)
                && let Some(record) = gpu.accounting.running(process.pid)
            {
                record.max_bytes = record.max_bytes.max(process.used_bytes);
            }
        }
    }
}
